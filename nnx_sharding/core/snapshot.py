"""Which objects a function did not change: most of them, and their entries can be reused.

After a call the graph is flattened again. An object whose content is still the same, part by part
and by identity, has the same entry, so only what changed is described again.

From other modules:

    Structure   the table; an entry describes one object, by index, and its children
    Static      a child that is a static value, compared as ``static_equality.py`` says
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
    """Objects before a function may change them, to find the unchanged ones afterwards.

    It has, by index, the entry of each object, and its *content*: a flat tuple of the names and
    values in it, which it keeps alive. An object in which a change may not show has the content
    None, and is described again.
    """

    def __init__(self, structure: Structure, objects: Sequence[Any]):
        """Notes the contents of objects; ``structure`` describes them as they are now."""
        self._entries: Sequence[Any] = structure.entries
        self._contents = [
            _content(obj) if _shows_changes(entry, slots, obj) else None
            for entry, slots, obj in zip(self._entries, structure.slots, objects, strict=True)
        ]

    def attributes_of(self, index: int) -> tuple[str, ...]:
        """Returns the names of the attributes that a static object had."""
        entry = self._entries[index] if index < len(self._entries) else None
        return entry.kind.names if isinstance(entry, StaticObject) else ()

    def entry_of(self, index: int, obj: object) -> NodeEntry | VariableEntry | None:
        """Returns the entry of an object that is unchanged but for a Variable's array, or None."""
        before = self._contents[index] if index < len(self._contents) else None
        if before is None:  # a new object, or one that does not show all changes
            return None
        # Part by part, by identity: the parts from before are alive, so a new object is another.
        content = _content(obj)
        is_same = len(content) == len(before) and all(map(operator.is_, content, before))
        return self._entries[index] if is_same else None


def _shows_changes(entry: Entry | None, slots: Sequence[int], obj: object) -> bool:
    """Whether any change in an object shows in its content (:func:`_content`).

    ``entry`` describes the object; ``slots`` are those of its own arrays.
    """
    if isinstance(entry, VariableEntry):
        # One array, whose entry says LEAF for any array. A pytree or module as the value could be
        # changed in place, and a hijax Variable has no attributes to compare.
        return entry.value is LEAF and _compat.is_variable(obj)
    # A module with arrays of its own may get others, and has to deal out its slots again.
    if not isinstance(entry, NodeEntry) or slots or not _compat.is_plain_pytree(obj):
        return False
    # Static values, and links to other objects (int), change only by being replaced. A container
    # can be changed in place, which does not show, with one exception: Flax's record of how far the
    # module is set up, whose flags are a part of the content.
    pairs = zip(entry.keys, entry.children, strict=True)
    containers = [key for key, child in pairs if type(child) not in (Static, int)]
    return containers in ([], [_compat.STATE])


def _content(obj: object) -> tuple[Any, ...]:
    """Returns what two states of an object are compared by: names and values, in one tuple.

    Of a module its attributes, with the flags of Flax's record of how far it is set up. Of a
    Variable its metadata, and whether it holds an array: the array itself may be another one. The
    tuple is flat, since its items are compared by identity.
    """
    if _compat.is_variable(obj):
        metadata = _compat.get_metadata(obj)
        is_array = isinstance(_compat.get_value(obj), jax.Array)
        return type(obj), is_array, *metadata, *metadata.values()
    own = _compat.get_dict(obj)
    return type(obj), *_compat.node_flags_of(own), *own, *own.values()


@functools.cache
def node_state(flags: tuple[bool, bool]) -> Container:
    """Returns the child for Flax's record of how far a module is set up: it has no leaves.

    The flags of the record are in the treedef, so that structures of other flags are not equal.
    """
    return Container(jax.tree_util.tree_structure(_compat.new_node_state(*flags)), ())
