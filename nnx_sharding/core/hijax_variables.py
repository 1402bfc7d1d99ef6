"""Variables made with ``hijax=True``: values of JAX, with a treedef and a tuple of arrays.

A structure describes them as plain Variables, so that both kinds are the same to what comes after.

From other modules:

    VariableEntry   how a structure describes a Variable: type, metadata, and the child in it
    recorder        of the flattener: is told what is read, so that a guard can read it again
    aux_of          the data of pytree nodes in a treedef, other than plain keys
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _compat
from .attributes import describe_metadata
from .recording import UNRECORDED
from .static_equality import value_key
from .structure import LEAF, VariableEntry, atoms
from .treedefs import aux_of

if TYPE_CHECKING:  # flattening calls the functions below
    from .flattener import Flattener


def describe_hijax(flattener: Flattener, variable: object, position: int) -> VariableEntry:
    """Returns the entry of an equal plain Variable; adds its arrays to the leaves of the walk.

    Drops the flattener's recorder if no guard can compare the Variable.

    Args:
      flattener: the walk.
      variable: the hijax Variable.
      position: where a recorder can read it again.
    """
    plain = _compat.plain_variable(variable)
    # The plain copy is a new object at each call, so a guard has to read the original.
    recorder, flattener.recorder = flattener.recorder, None
    num_before = len(flattener.leaves)
    value = flattener.pytree_child(_compat.get_value(plain))
    entry = VariableEntry(type(plain), describe_metadata(flattener, plain, UNRECORDED), value)
    if recorder is None or not _compat.is_concrete_hijax(variable):
        return entry
    treedef, leaves = _compat.get_treedef(variable), _compat.get_leaves(variable)
    # The arrays and objects in the copy, in order: LEAF, or the index of an object.
    parts: list[Any] = [part for part in atoms((value,)) if part is LEAF or type(part) is int]
    arrays = iter(flattener.leaves[num_before:])
    values = [next(arrays) if part is LEAF else flattener.objects[part] for part in parts]
    # What was read from the copy has to be what a guard reads from the original. And a guard
    # compares the metadata, which are in the treedef, by value.
    is_same = [*map(id, values)] == [*map(id, leaves)]
    if not is_same or None in map(value_key, aux_of(treedef)):
        return entry
    for place, part in zip(recorder.open_hijax(position, treedef, leaves), parts, strict=True):
        if type(part) is int:
            recorder.add_object(place, part)
        else:
            recorder.leaf_positions.append(place)
    flattener.recorder = recorder
    return entry
