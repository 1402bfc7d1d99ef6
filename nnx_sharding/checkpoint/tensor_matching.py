"""Which tensors fill which arrays, or the reverse; all that does not fit is one error.

The rules always lead from names of tensors to paths of arrays. Reading, arrays are filled by
tensors; saving, or in a ``transfer`` with ``reverse``, tensors are filled by arrays. Here, a
*source* is read and a *goal* is filled, whichever of the two it is.

First the rules give pairs of a tensor and an array, each with a *placement*: which part of the
tensor is which part of the array. Then the pairs are sorted by goal, and what is missing is listed.

``rules.targets(name)`` are the arrays that a tensor belongs to. It is empty if the rule says to
ignore the tensor (None), and None if no rule matches the name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ..errors import CheckpointError, by_kind, raise_listed
from ..specs.types import AnyArray
from .names import OF_ANOTHER_DTYPE, is_castable, suggestions
from .tensor_layouts import Placement, gaps
from .tensor_rules import Rules, Target

# What fills each goal: placements of sources in it, and the names of these.
Filled: TypeAlias = dict[str, list[tuple[Placement, str]]]


def fill_by_rules(
    head: str,
    rules: Rules,
    tensors: Mapping[str, AnyArray],
    arrays: Mapping[str, AnyArray],
    everything: Collection[str],
    *,
    cast: bool = False,
    reverse: bool = False,
    nouns: tuple[str, str] = ("tensor", "array"),
) -> Filled:
    """Returns what fills each array, or in reverse each tensor.

    Args:
      head: the first line of an error.
      rules: what the tensors become.
      tensors: all tensors, by name.
      arrays: the arrays that are selected, by path. Tensors of others are ignored.
      everything: the paths of all arrays.
      cast: whether dtypes may differ, among floats and among integers.
      reverse: whether arrays fill tensors.
      nouns: what the error calls sources and goals.

    Raises:
      CheckpointError: something does not fit; it lists all of that.
    """
    source_noun, goal_noun = nouns
    # 1. What the rules name together.
    pairs: list[_Pair] = []
    for name, tensor in tensors.items():
        for target in rules.targets(name) or ():
            if target.path in arrays:
                source, goal = (target.path, name) if reverse else (name, target.path)
                placement, problem = _place(name, tensor, target, arrays[target.path])
                pairs.append(_Pair(source, goal, placement, problem))
    sources: Mapping[str, AnyArray] = arrays if reverse else tensors
    goals: Mapping[str, AnyArray] = tensors if reverse else arrays
    # 2. What fills each goal. In reverse, a tensor that the rules ignore needs nothing.
    filled: Filled = {name: [] for name in goals if not (reverse and rules.targets(name) == [])}
    for source, goal, placement, _ in pairs:
        if placement is not None:
            filled[goal].append((placement.inverse(source) if reverse else placement, source))
    # 3. What is wrong, by the kind of the problem. If the only tensor of an array has another
    # shape, the array is not listed as incomplete as well.
    misfits = {x.goal for x in pairs if x.problem and (reverse or not filled[x.goal])}
    incomplete = []
    for name, parts in filled.items():
        if name not in misfits:
            for gap in gaps([placement for placement, _ in parts], source_noun):
                incomplete.append(f"  {name}, shape {goals[name].shape}{gap}")
    dtypes = [
        f"  {source}: {sources[source].dtype}, {goal}: {goals[goal].dtype}"
        for source, goal, _, problem in pairs
        if not problem and not is_castable(sources[source].dtype, goals[goal].dtype, cast)
    ]
    a_source, a_goal = ("an array" if noun == "array" else f"a {noun}" for noun in nouns)
    problems = {
        f"{goal_noun.capitalize()}s without {a_source}": incomplete,
        f"{source_noun.capitalize()}s without {a_goal}": [
            *_unknown_names(rules, tensors, everything, reverse),
            # Of a tensor that is read, a part may be unused.
            *(_unused_parts(pairs, arrays, goal_noun) if reverse else ()),
        ],
        "Of another shape": [pair.problem for pair in pairs if pair.problem],
        OF_ANOTHER_DTYPE: dtypes,
    }
    raise_listed(CheckpointError, head, by_kind(problems))
    return filled


class _Pair(NamedTuple):
    """A source and a goal that a rule names together."""

    source: str  # a name or a path
    goal: str  # likewise
    placement: Placement | None  # of the tensor in the array; None if there is none
    problem: str  # of their shapes, as a line of the error; empty if they fit


def _place(
    name: str, tensor: AnyArray, target: Target, array: AnyArray
) -> tuple[Placement | None, str]:
    """Places a tensor in an array by a rule.

    Returns:
      The placement, None if there is none, and what is wrong with the shapes: a line, or empty.
    """
    line = f"  {name}, shape {tensor.shape}: {target.path}, shape {array.shape}"
    try:
        placement = target.tensor.place(name, target.groups, array.shape)
    except ValueError as error:
        return None, f"{line}: {error}"
    is_right = placement.tensor_shape == tensor.shape
    return placement, "" if is_right else f"{line} needs {placement.tensor_shape}"


def _unknown_names(
    rules: Rules, tensors: Iterable[str], arrays: Collection[str], reverse: bool
) -> Iterator[str]:
    """Yields lines about tensors without a rule, and about rules that name no array.

    ``arrays`` are the paths of all arrays. In ``reverse``, arrays fill tensors.
    """
    tensors = [*tensors]
    # `near(path, paths)` is a hint at the path that was meant, or empty text if there are so many
    # tensors that it would take too long to compare all.
    near = suggestions(len(tensors))
    for name in tensors:
        targets = rules.targets(name)
        if targets is None and not reverse:  # in reverse, a tensor that nothing fills is missing
            yield f"  {name}: no rule matches"
        for target in targets or ():
            if target.path not in arrays:
                yield f"  {name}: no array {target.path}{near(target.path, arrays)}"


def _unused_parts(
    pairs: Sequence[_Pair], arrays: Mapping[str, AnyArray], noun: str
) -> Iterator[str]:
    """Yields lines about arrays that fill tensors, if a part of an array is in none of these.

    Args:
      pairs: the arrays, as sources, with the tensors that the rules name.
      arrays: all arrays that should be in tensors, by path.
      noun: what the message calls a tensor.
    """
    misfits = {pair.source for pair in pairs if pair.placement is None}  # listed already
    for path, array in arrays.items():
        if path in misfits:
            continue
        placed = [x.placement for x in pairs if x.source == path and x.placement is not None]
        # Several tensors may have the same part. A gap is ": no tensor for [0:8, 4:8]".
        for gap in gaps(placed, noun, once=False):
            yield f"  {path}, shape {array.shape}{gap}"
