"""Variables made with ``hijax=True``: values of JAX, with a treedef and a tuple of arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _compat
from .recording import NOWHERE, ReadRecorder
from .static_equality import value_key
from .structure import LEAF, Child, VariableEntry, atoms
from .treedefs import aux_of

if TYPE_CHECKING:  # flattening calls the functions below
    from .flatten import Flattener


def describe_hijax(
    flattener: Flattener, variable: object, slots: list[int], at: int
) -> VariableEntry:
    """Returns the entry of a plain Variable with the same content, at this place for a guard."""
    plain = _compat.plain_variable(variable)
    # The plain copy is a new object at each call, so a guard has to read the original.
    recorder, flattener.recorder = flattener.recorder, None
    value = flattener.pytree(_compat.get_value(plain), slots)
    metadata = flattener.describe_metadata(plain, NOWHERE)
    if recorder is not None and _note(flattener, recorder, variable, value, slots, at):
        flattener.recorder = recorder
    return VariableEntry(type(plain), metadata, value)


def _note(
    flattener: Flattener,
    recorder: ReadRecorder,
    variable: object,
    value: Child,
    slots: list[int],
    at: int,
) -> bool:
    """Notes it for a guard; False where that cannot compare it.

    Metadata, which are in the treedef, are only compared by value, and no Variables in its value.
    """
    if not _compat.is_concrete_hijax(variable):
        return False
    treedef, leaves = _compat.get_treedef(variable), _compat.get_leaves(variable)
    arrays = (flattener.leaves[slot] for slot in slots)
    parts: list[Any] = [part for part in atoms((value,)) if part is LEAF or type(part) is int]
    values = [next(arrays) if part is LEAF else flattener.objects[part] for part in parts]
    if [*map(id, values)] != [*map(id, leaves)] or None in map(value_key, aux_of(treedef)):
        return False
    for place, part in zip(recorder.open_hijax(at, treedef, leaves), parts, strict=True):
        if type(part) is int:
            recorder.add_object(place, part)
        else:
            recorder.leaves.append(place)
    return True
