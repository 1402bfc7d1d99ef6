"""Where Variables and arrays are in the arguments or outputs of a call, and how messages name them.

A *part* is one module, Variable or array of an argument, with the spec that the user gave for it
(``arguments.py``). A *location* is where a Variable or array is in a part: its path there, the
index of the Variable in the table of all objects (``structure.py``), and the *slots* of its arrays
in the flat list. An array is *bare* if it is in no Variable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..specs.paths import Path, accessor
from ..specs.types import Arrays, Objects
from .arguments import Argument, ArgumentPart
from .structure import Location, Structure


class NamedLocation(NamedTuple):
    """Where a Variable or a bare array is in an argument or output, with the names for it."""

    argument: Argument
    part: ArgumentPart  # the part of the argument
    location: Location  # the first path from the part, the index and the slots
    name: str  # the expression for the Variable or array: ``model.blocks[3].kernel``
    paths: Sequence[Path]  # all paths from the part; the first is that of ``location``

    def name_of(self, path: Path) -> str:
        """Returns the expression for the Variable or array by another path."""
        return accessor(self.argument.name, (*self.part.keys, *path))

    def subject(self, objects: Objects, leaves: Arrays) -> Any:
        """Returns the Variable there, or the bare array."""
        index = self.location.object_index
        return leaves[self.location.slots[0]] if index is None else objects[index]


def locate(structure: Structure, arguments: Sequence[Argument]) -> list[NamedLocation]:
    """Finds every Variable and array in arguments or outputs, each with its name and all its paths.

    A Variable that several parts share has a location in each of them.

    Args:
      structure: describes the arguments or outputs.
      arguments: all of them, in the order in which they were flattened.
    """
    # The slots of arrays outside of objects, in the order of all parts. All walks share the
    # iterator, because each walk takes a slot for each such array in its part.
    root_slots = iter(structure.root_slots)
    locations = []
    for argument in arguments:
        for part in argument.parts:
            # By the index of a Variable that has several paths: all its paths.
            aliases: Mapping[Any, Sequence[Path]] = structure.aliases(part.child)
            part_name = accessor(argument.name, part.keys)  # an expression like ``models[0]``
            # The walk yields each Variable and array of the part once, under its first path.
            for location in structure.walk(part.child, root_slots):
                paths: tuple[Path, ...] = (location.path,)
                if aliases:
                    # `fromkeys` removes the duplicate of the first path, which is also an alias.
                    alias_paths = aliases.get(location.object_index, ())
                    paths = tuple(dict.fromkeys((location.path, *alias_paths)))
                name = accessor(part_name, location.path)
                locations.append(NamedLocation(argument, part, location, name, paths))
    return locations


def slot_names(num_leaves: int, locations: Sequence[NamedLocation]) -> list[str]:
    """Returns the first expression for each array, by slot; "" for an array in no location.

    ``num_leaves`` is the number of all arrays. An array has several locations if parts share it.
    """
    names = [""] * num_leaves
    for named in locations:
        for slot in named.location.slots:
            names[slot] = names[slot] or named.name
    return names
