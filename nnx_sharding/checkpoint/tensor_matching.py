"""Finds the tensors that fill each array, or the reverse; one error lists all that does not fit.

The rules always lead from names of tensors to paths of arrays. When a file is read, tensors fill
arrays. When a file is saved, or in a ``transfer`` with ``reverse``, arrays fill tensors. In this
module, a *source* is read and a *goal* is filled, whether it is a tensor or an array.

First the rules give pairs of a tensor and an array, each with a *placement*: which part of the
tensor is which part of the array. Then the pairs are sorted by goal, and missing parts are listed.

``rules.targets(name)`` returns the arrays that a tensor belongs to. The list is empty if the rule
(None) ignores the tensor. The result is None if no rule matches the name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ..errors import CheckpointError, by_kind, raise_if_any
from ..specs.types import AnyArray
from .names import OF_ANOTHER_DTYPE, is_castable, suggestions
from .tensor_layouts import Placement, gaps
from .tensor_rules import Rules, Target

# For each goal, the sources that fill it: pairs of a placement in the goal and a source's name.
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
    """Returns the sources that fill each goal: tensors that fill arrays, or the reverse.

    Args:
      head: the first line of an error.
      rules: the rules for the tensors.
      tensors: all tensors, by name.
      arrays: the arrays that are selected, by path. Tensors of other arrays are ignored.
      everything: the paths of all arrays.
      cast: whether dtypes may differ, among floats and among integers.
      reverse: whether arrays fill tensors.
      nouns: the words for sources and goals in the error.

    Raises:
      CheckpointError: something does not fit; all problems are listed.
    """
    source_noun, goal_noun = nouns
    # 1. The pairs that the rules name together.
    pairs: list[_Pair] = []
    for name, tensor in tensors.items():
        for target in rules.targets(name) or ():
            if target.path in arrays:
                source, goal = (target.path, name) if reverse else (name, target.path)
                placement, problem = _place(name, tensor, target, arrays[target.path])
                pairs.append(_Pair(source, goal, placement, problem))
    # 2. The sources that fill each goal.
    sources: Mapping[str, AnyArray]
    goals: Mapping[str, AnyArray]
    if reverse:
        sources = arrays
        # A tensor that the rules ignore (None, which is read as an empty list) is no goal.
        goals = {name: x for name, x in tensors.items() if rules.targets(name) != []}
    else:
        sources, goals = tensors, arrays
    filled: Filled = {name: [] for name in goals}
    for source, goal, placement, _ in pairs:
        if placement is not None:
            filled[goal].append((placement.inverse(source) if reverse else placement, source))
    # 3. The problems, by kind. If the only tensor of an array has another shape, the array is not
    # listed as incomplete as well.
    misfits = {x.goal for x in pairs if x.problem and (reverse or not filled[x.goal])}
    incomplete = []
    for name, parts in filled.items():
        if name not in misfits:
            # Without parts, there is one gap, an empty text, so the line only says the shape.
            for gap in gaps([placement for placement, _ in parts], source_noun):
                incomplete.append(f"  {name}, shape {goals[name].shape}{gap}")
    dtypes = [
        f"  {source}: {sources[source].dtype}, {goal}: {goals[goal].dtype}"
        for source, goal, _, problem in pairs
        if not problem and not is_castable(sources[source].dtype, goals[goal].dtype, cast)
    ]
    unused = [*_unknown_names(rules, tensors, everything, reverse)]
    if reverse:
        # No part of an array may be lost. A part of a tensor that is read may be unused.
        unused += _unused_parts(pairs, arrays, goal_noun)
    a_source, a_goal = ("an array" if noun == "array" else f"a {noun}" for noun in nouns)
    problems = {
        f"{goal_noun.capitalize()}s without {a_source}": incomplete,
        f"{source_noun.capitalize()}s without {a_goal}": unused,
        "Of another shape": [pair.problem for pair in pairs if pair.problem],
        OF_ANOTHER_DTYPE: dtypes,
    }
    raise_if_any(CheckpointError, head, by_kind(problems))
    return filled


class _Pair(NamedTuple):
    """A source and a goal that a rule names together."""

    source: str  # the name of a tensor, or the path of an array
    goal: str  # the path of an array, or the name of a tensor
    placement: Placement | None  # the place of the tensor in the array; None if there is none
    problem: str  # a line of the error about the shapes; empty if they fit


def _place(
    name: str, tensor: AnyArray, target: Target, array: AnyArray
) -> tuple[Placement | None, str]:
    """Places a tensor in an array by a rule.

    Args:
      target: the rule, the path of the array, and the texts that the pattern's groups matched.

    Returns:
      A pair: the placement, or None if there is none; and a line of the error about the shapes,
      which is empty if they fit.
    """
    line = f"  {name}, shape {tensor.shape}: {target.path}, shape {array.shape}"
    try:
        placement = target.tensor.place(name, target.groups, array.shape)
    except ValueError as error:
        return None, f"{line}: {error}"
    has_right_shape = placement.tensor_shape == tensor.shape
    return placement, "" if has_right_shape else f"{line} needs {placement.tensor_shape}"


def _unknown_names(
    rules: Rules, tensors: Iterable[str], arrays: Collection[str], reverse: bool
) -> Iterator[str]:
    """Yields lines about tensors without a rule, and about rules that name no array.

    ``arrays`` has the paths of all arrays. In ``reverse``, arrays fill tensors.
    """
    tensors = [*tensors]
    # `near(path, paths)` returns a hint at the path that was meant. The hint is an empty text if
    # there are so many tensors that comparing all would take too long.
    near = suggestions(len(tensors))
    for name in tensors:
        targets = rules.targets(name)
        # In reverse, a tensor without a rule is listed as incomplete.
        if targets is None and not reverse:
            yield f"  {name}: no rule matches"
        for target in targets or ():
            if target.path not in arrays:
                yield f"  {name}: no array {target.path}{near(target.path, arrays)}"


def _unused_parts(
    pairs: Sequence[_Pair], arrays: Mapping[str, AnyArray], noun: str
) -> Iterator[str]:
    """Yields lines about arrays of which a part is in no tensor.

    Args:
      pairs: the arrays, as sources, with the tensors that the rules name.
      arrays: all arrays that should be in tensors, by path.
      noun: the word for a tensor in the message.
    """
    misfits = {pair.source for pair in pairs if pair.placement is None}  # listed as other problems
    for path, array in arrays.items():
        if path in misfits:
            continue
        placements = [x.placement for x in pairs if x.source == path and x.placement is not None]
        # A gap is a text such as ": no tensor for [0:8, 4:8]". Several tensors may have the same
        # part of an array.
        for gap in gaps(placements, noun, once=False):
            yield f"  {path}, shape {array.shape}{gap}"
