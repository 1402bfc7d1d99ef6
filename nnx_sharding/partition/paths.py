"""The Variables of a model by path, and shardings that are given by path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..core.flatten import flatten
from ..core.structure import VariableEntry
from ..filters import Paths
from ..paths import Path, path_string, plain_key
from ..state_sharding import StateSharding


class Found(NamedTuple):
    """One Variable of a model, or one array outside of any.

    Attributes:
      path: the keys from the model to it, as NNX filters see them.
      variable: the Variable, or the array.
      arrays: what it holds: one array, or those of its pytree; abstract ones have no data.
    """

    path: Path
    variable: Any
    arrays: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The path as a string: ``blocks/3/up/kernel``."""
        return path_string(self.path)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of what it holds; None for several arrays of different shapes."""
        shapes = {tuple(getattr(array, "shape", ())) for array in self.arrays}
        return shapes.pop() if len(shapes) == 1 else None


def variables(tree: Any) -> Iterator[Found]:
    """All Variables and arrays of a model, an optimizer or a pytree of them.

    Only types are looked at. What is reached twice comes once, under its first path.
    """
    flat = flatten(tree, graph=True)
    structure = flat.structure
    for place in structure.walk(structure.root, iter(structure.root_slots)):
        arrays = tuple(flat.leaves[slot] for slot in place.slots)
        path = tuple(map(plain_key, place.path))
        if not arrays:
            continue
        index = place.entry
        if index is None or not isinstance(structure.entries[index], VariableEntry):
            yield Found(path, arrays[0], arrays)
        else:
            yield Found(path, flat.objects[index], arrays)


def exact(specs: Mapping[Path, Any]) -> StateSharding:
    """A ``StateSharding`` that gives each path its spec, and matches no other path."""
    groups: dict[Any, list[Path]] = {}
    for path, spec in specs.items():
        groups.setdefault(spec, []).append(path)
    return StateSharding((Paths(paths), spec) for spec, paths in groups.items())


def spec_table(tree: Any, sharding: StateSharding) -> dict[Path, Any]:
    """The spec of each path of a model: what ``sharding`` says of it, None where nothing does."""
    return {found.path: sharding.find(found.path, found.variable)[1] for found in variables(tree)}
