"""Variables made with ``hijax=True``: values of JAX, with a treedef and a tuple of arrays.

A structure describes them as plain Variables, so that both kinds are the same to what comes after.

From other modules:

    VariableEntry   how a structure describes a Variable: type, metadata, and the child in it
    ReadRecorder    is told what is read, and where, so that a guard can read it again
    aux_of          the data of pytree nodes in a treedef, other than plain keys
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _compat
from .recording import UNRECORDED, ReadRecorder
from .static_equality import value_key
from .structure import LEAF, Child, VariableEntry, atoms
from .treedefs import aux_of

if TYPE_CHECKING:  # flattening calls the functions below
    from .flattener import Flattener


def describe_hijax(
    flattener: Flattener, variable: object, slots: list[int], position: int
) -> VariableEntry:
    """Returns the entry of an equal plain Variable; adds the arrays, and their slots to ``slots``.

    Drops the flattener's recorder if no guard can compare the Variable, which is at ``position``.
    """
    plain = _compat.plain_variable(variable)
    # The plain copy is a new object at each call, so a guard has to read the original.
    recorder, flattener.recorder = flattener.recorder, None
    value = flattener.pytree_child(_compat.get_value(plain), slots)
    metadata = flattener.describe_metadata(plain, UNRECORDED)
    if recorder is not None and _record(flattener, recorder, variable, value, slots, position):
        flattener.recorder = recorder
    return VariableEntry(type(plain), metadata, value)


def _record(
    flattener: Flattener,
    recorder: ReadRecorder,
    variable: object,
    value: Child,
    slots: list[int],
    position: int,
) -> bool:
    """Records the treedef and the arrays of a hijax Variable for a guard.

    A guard compares the metadata, which are in the treedef, by value. So no metadata may be
    compared by identity, and no Variables may be within the value.

    Args:
      flattener: has the arrays and objects that were read.
      recorder: gets what is read.
      variable: the Variable.
      value: the child for its value.
      slots: the slots of the arrays in the value.
      position: the position of the Variable in the recorder's stream.

    Returns:
      Whether a guard can compare the Variable.
    """
    if not _compat.is_concrete_hijax(variable):
        return False
    treedef = _compat.get_treedef(variable)
    leaves = _compat.get_leaves(variable)
    arrays = (flattener.leaves[slot] for slot in slots)
    # The arrays and objects in the copy, in order: LEAF, or the index of an object.
    parts: list[Any] = [part for part in atoms((value,)) if part is LEAF or type(part) is int]
    values = [next(arrays) if part is LEAF else flattener.objects[part] for part in parts]
    # What was read from the copy has to be what a guard reads from the original.
    is_same = [*map(id, values)] == [*map(id, leaves)]
    has_identities = None in map(value_key, aux_of(treedef))
    if has_identities or not is_same:
        return False
    positions = recorder.open_hijax(position, treedef, leaves)
    for place, part in zip(positions, parts, strict=True):
        if type(part) is int:
            recorder.add_object(place, part)
        else:
            recorder.leaf_positions.append(place)
    return True
