"""Variables made with ``hijax=True``: values of JAX, with a treedef and a tuple of arrays.

A structure describes them as plain Variables, so that no other code has to know both kinds. For
this, ``flatten`` reads a plain copy of each. A guard cannot read the copy, because it is a new
object in each call. So a guard reads the treedef and the arrays of the original, and the *recorder*
is told about these if they hold the same objects as the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
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
      position: where a guard can read the Variable again.
    """
    plain = _compat.plain_variable(variable)
    # Nothing of the copy is recorded, because a guard could not find the copy again. The walk has
    # no recorder meanwhile, and gets it back only if a guard can compare the original.
    recorder, flattener.recorder = flattener.recorder, None
    first_slot = len(flattener.leaves)
    value = flattener.pytree_child(_compat.get_value(plain))
    entry = VariableEntry(type(plain), describe_metadata(flattener, plain, UNRECORDED), value)
    # LEAF for each array in the copy, and the index of each object, in order.
    parts: list[Any] = [part for part in atoms((value,)) if part is LEAF or type(part) is int]
    if recorder is None or not _is_comparable(flattener, variable, parts, first_slot):
        return entry
    # The recorder is told about the original what it would have been told about the copy.
    treedef, leaves = _compat.get_treedef(variable), _compat.get_leaves(variable)
    leaf_positions = recorder.open_hijax(position, treedef, leaves)
    for leaf_position, part in zip(leaf_positions, parts, strict=True):
        if part is LEAF:
            recorder.leaf_positions.append(leaf_position)
        else:
            recorder.add_object(leaf_position, part)
    flattener.recorder = recorder
    return entry


def _is_comparable(
    flattener: Flattener, variable: object, parts: Sequence[Any], first_slot: int
) -> bool:
    """Whether a guard can compare a hijax Variable, by its treedef and its leaves.

    Args:
      flattener: the walk, which has read a plain copy of the Variable.
      parts: what the copy holds, in order: ``LEAF`` for an array, or the index of an object.
      first_slot: the slot of the first array in the copy.
    """
    if not _compat.is_concrete_hijax(variable):  # a tracer has no leaves
        return False
    # A guard compares the treedef by value, and the metadata are in it. None: some metadata are
    # not compared by value.
    if any(value_key(data) is None for data in aux_of(_compat.get_treedef(variable))):
        return False
    # A guard reads the leaves of the original, so these have to be the objects in the copy.
    arrays = iter(flattener.leaves[first_slot:])
    values = [next(arrays) if part is LEAF else flattener.objects[part] for part in parts]
    return [*map(id, values)] == [*map(id, _compat.get_leaves(variable))]
