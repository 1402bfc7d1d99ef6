"""Finds the objects that a function did not change, so that their entries are used again.

After a call the graph is flattened again. If the content of an object is still the same, part by
part and by identity, the object keeps its entry. Only changed objects are described again, and
these are few.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax

from .. import _compat
from .static_equality import Static
from .structure import LEAF, Container, Entry, NodeEntry, StaticObject, Structure, VariableEntry


class Snapshot:
    """The objects of a graph before a function may change them.

    The *content* of an object is a flat tuple of its names and values (:func:`_content`). If a
    change in an object may not show in this tuple, the object is always described again.

    Private attributes, both by index:

        _entries    the entry of each object before the function was called
        _contents   the content of each object at that time, which is kept alive; None if a change
                    may not show in it
    """

    def __init__(self, structure: Structure, objects: Sequence[Any]):
        """Notes the contents of ``objects``, which ``structure`` describes."""
        self._entries: Sequence[Any] = structure.entries
        self._contents = [
            _content(obj) if _shows_changes(entry, slots, obj) else None
            for entry, slots, obj in zip(self._entries, structure.slots, objects, strict=True)
        ]

    def attributes_of(self, index: int) -> tuple[str, ...]:
        """Returns the names of the attributes that a static object had; () for any other object."""
        entry = self._entries[index] if index < len(self._entries) else None
        return entry.kind.names if isinstance(entry, StaticObject) else ()

    def entry_of(self, index: int, obj: object) -> NodeEntry | VariableEntry | None:
        """Returns the entry of an object that is unchanged but for a Variable's array, or None."""
        old_content = self._contents[index] if index < len(self._contents) else None
        if old_content is None:  # the object is new, or does not show all changes
            return None
        # Parts are compared by identity, which is safe because the old parts are alive.
        content = _content(obj)
        is_same = len(content) == len(old_content) and all(map(operator.is_, content, old_content))
        return self._entries[index] if is_same else None


def _shows_changes(entry: Entry | None, slots: Sequence[int], obj: object) -> bool:
    """Whether any change in an object shows in its content (:func:`_content`).

    ``entry`` describes the object; ``slots`` are the slots of its own arrays.
    """
    if isinstance(entry, VariableEntry):
        # A value of one array is fine, because the entry says LEAF for any array. A pytree or
        # module as the value could be changed in place, and a hijax Variable has no attributes to
        # compare.
        return entry.value is LEAF and _compat.is_variable(obj)
    # A module with arrays of its own has to be described again, because the arrays get new slots.
    if not isinstance(entry, NodeEntry) or slots or not _compat.is_plain_pytree(obj):
        return False
    # Static values, and links to other objects (int), change only by being replaced. A change of a
    # container in place does not show. Flax's record of how far the module is set up is the one
    # container that is fine, because its flags are a part of the content.
    pairs = zip(entry.keys, entry.children, strict=True)
    containers = [key for key, child in pairs if type(child) not in (Static, int)]
    return all(key == _compat.STATE for key in containers)


def _content(obj: object) -> tuple[Any, ...]:
    """Returns what two states of an object are compared by: names and values, in one tuple.

    For a module, these are its attributes, and the flags of Flax's record of how far it is set up.
    For a Variable, these are its metadata, and whether it holds an array; the array itself may be
    replaced. The tuple is flat, because its items are compared by identity.
    """
    if _compat.is_variable(obj):
        metadata = _compat.get_metadata(obj)
        is_array = isinstance(_compat.get_value(obj), jax.Array)
        return type(obj), is_array, *metadata, *metadata.values()
    attributes = _compat.get_dict(obj)
    return type(obj), *_compat.node_flags_of(attributes), *attributes, *attributes.values()


@functools.cache
def node_state(flags: tuple[bool, bool]) -> Container:
    """Returns the child for Flax's record of how far a module is set up: it has no leaves.

    ``flags`` says whether the module is being initialized, and whether it is set up. The flags are
    in the treedef of the record, so structures with different flags are not equal.
    """
    return Container(jax.tree_util.tree_structure(_compat.new_node_state(*flags)), ())
