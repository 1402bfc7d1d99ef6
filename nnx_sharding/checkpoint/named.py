"""The arrays of a tree under the names that they have in a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _compat
from ..analysis.parameters import keys_inside
from ..core.flatten import Flat
from ..core.structure import VariableEntry
from ..paths import Path, path_string

Name = tuple[str, ...]

# Where Flax puts the value of a Variable when JAX or Orbax flattens an ``nnx.State``.
VALUE = "value"


class Named(NamedTuple):
    """One array of a tree.

    Attributes:
      slot: its place in the flat list.
      name: the keys that lead to it in the checkpoint.
      plain: the same without the level that stands for the Variable.
      path: the same as messages write it.
      place: the path of its Variable, as NNX filters see it.
      subject: the Variable, or the array outside of any.
    """

    slot: int
    name: Name
    plain: Name
    path: str
    place: Path
    subject: Any


def named(flat: Flat) -> Iterator[Named]:
    """Each array of a tree under its first path, named as in a checkpoint of its ``nnx.state``."""
    structure = flat.structure
    for place in structure.walk(structure.root, iter(structure.root_slots)):
        entry = None if place.entry is None else structure.entries[place.entry]
        is_variable = isinstance(entry, VariableEntry)
        level = (VALUE,) if is_variable or not place.path else ()
        for slot, inside in zip(
            place.slots, keys_inside(flat, place.entry, len(place.slots)), strict=True
        ):
            name = tuple(map(str, (*place.path, *level, *inside)))
            index = place.entry
            subject = flat.leaves[slot] if index is None else flat.objects[index]
            plain = tuple(map(str, (*place.path, *inside)))
            yield Named(slot, name, plain, path_string((*place.path, *inside)), place.path, subject)


def clashes(found: list[Named]) -> list[str]:
    """The paths of arrays that would have the same name in a file."""
    # Orbax joins keys by dots.
    times = Counter(".".join(each.name) for each in found)
    return [f"  {each.path or 'the root'}" for each in found if times[".".join(each.name)] > 1]


def is_reference(x: Any) -> bool:
    """Whether ``x`` refers to an array instead of being one."""
    return _compat.is_ref(x) or _compat.is_hijax_variable(x)


def is_storable(x: Any) -> bool:
    """Whether ``x`` is an array or a number; it may be abstract."""
    if isinstance(x, np.ndarray | np.generic):
        return x.dtype.kind not in "OSUMmT"
    if isinstance(x, jax.core.Tracer):
        return False
    if isinstance(x, int):
        return -(2**63) <= x < 2**63
    kinds = jax.Array | jax.ShapeDtypeStruct | float | complex
    return is_reference(x) or isinstance(x, kinds)


def kind_of(x: Any) -> str:
    """What messages call ``x``."""
    if isinstance(x, np.ndarray | np.generic):
        return f"{type(x).__name__} of {x.dtype}"
    if isinstance(x, int):
        return "int of more than 64 bits"
    return type(x).__name__
