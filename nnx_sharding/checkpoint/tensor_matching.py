"""Which tensors fill which arrays, or the reverse; all that does not fit is one error.

The rules always lead from names of tensors to paths of arrays. Reading, arrays are filled by
tensors; saving, or in a ``transfer`` with ``reverse``, tensors are filled by arrays. Here, a
*source* is read and a *goal* is filled, whichever of the two it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import TypeAlias

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

    ``arrays`` are the selected ones, and ``everything`` has the paths of all: tensors of others are
    ignored. ``cast`` allows other dtypes among floats and among integers. A CheckpointError lists
    all that does not fit, after the line ``head``, which calls it by ``nouns``.
    """
    matching = _Matching(rules, tensors, arrays, cast, reverse)
    near = suggestions(len(tensors))
    unknown = []
    for name in tensors:
        targets = rules.targets(name)
        if targets is None and not reverse:  # in reverse, a tensor that nothing fills is missing
            unknown.append(f"  {name}: no rule matches")
        for target in targets or ():
            if target.path not in everything:
                unknown.append(f"  {name}: no array {target.path}{near(target.path, everything)}")
            if target.path in arrays:
                matching.add(name, target)
    source, goal = nouns
    a_source, a_goal = ("an array" if noun == "array" else f"a {noun}" for noun in nouns)
    problems = {
        f"{goal.capitalize()}s without {a_source}": list(matching.incomplete(source)),
        f"{source.capitalize()}s without {a_goal}": [*unknown, *matching.unused(goal)],
        "Of another shape": matching.shapes,
        OF_ANOTHER_DTYPE: matching.dtypes,
    }
    raise_listed(CheckpointError, head, by_kind(problems))
    return matching.filled


@dataclasses.dataclass
class _Matching:
    """The pairs of tensors and arrays that were found so far, and the problems of these pairs."""

    rules: Rules
    tensors: Mapping[str, AnyArray]
    arrays: Mapping[str, AnyArray]
    cast: bool
    reverse: bool

    def __post_init__(self) -> None:
        pair = self.tensors, self.arrays
        self._sources, self._goals = pair[::-1] if self.reverse else pair
        # A tensor with the rule None needs nothing that fills it.
        is_ignored = {name: self.reverse and self.rules.targets(name) == [] for name in self._goals}
        self.filled: Filled = {name: [] for name in self._goals if not is_ignored[name]}
        self._used: dict[str, list[Placement]] = {path: [] for path in self.arrays}
        self._misfits: set[str] = set()  # what has a problem already is not called incomplete, too
        self.shapes, self.dtypes = list[str](), list[str]()

    def add(self, name: str, target: Target) -> None:
        """Adds a tensor and an array that it belongs to."""
        tensor, path = self.tensors[name], target.path
        shape = self.arrays[path].shape
        line = f"  {name}, shape {tensor.shape}: {path}, shape {shape}"
        source, goal = (path, name) if self.reverse else (name, path)
        try:
            placement = target.tensor.place(name, target.groups, shape)
        except ValueError as error:
            self._misfits |= {goal, path}
            self.shapes.append(f"{line}: {error}")
            return
        self._used[path].append(placement)
        into = placement.inverse(path) if self.reverse else placement
        self.filled[goal].append((into, source))
        there, here = self._sources[source].dtype, self._goals[goal].dtype
        if placement.tensor_shape != tensor.shape:
            if self.reverse:
                self._misfits.add(goal)
            self.shapes.append(f"{line} needs {placement.tensor_shape}")
        elif not is_castable(there, here, self.cast):
            self.dtypes.append(f"  {source}: {there}, {goal}: {here}")

    def incomplete(self, source: str) -> Iterator[str]:
        """Describes the goals of which a part is filled not once."""
        for name, pairs in self.filled.items():
            if name in self._misfits and not (pairs and not self.reverse):
                continue
            for gap in gaps([placement for placement, _ in pairs], source):
                yield f"  {name}, shape {self._goals[name].shape}{gap}"

    def unused(self, goal: str) -> Iterator[str]:
        """Describes the arrays of which a part goes nowhere; without ``reverse`` there are none."""
        for path, placements in self._used.items():
            if self.reverse and path not in self._misfits:
                for gap in gaps(placements, goal, once=False):
                    yield f"  {path}, shape {self.arrays[path].shape}{gap}"
