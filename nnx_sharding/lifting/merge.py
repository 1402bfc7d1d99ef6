"""Structure and flat arrays → graph of NNX objects, fresh ones or the caller's own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax

from .. import _compat
from .structure import (
    LEAF,
    Child,
    Container,
    NodeEntry,
    RefEntry,
    Static,
    Structure,
    VariableEntry,
)


class Built(NamedTuple):
    """The root of a merged graph, and the object of each entry of its structure."""

    root: Any
    objects: list[Any]


def unflatten(
    structure: Structure, leaves: Sequence[Any], existing: Mapping[int, Any] | None = None
) -> Built:
    """Makes the objects of ``structure`` around ``leaves``.

    Args:
      structure: what to make.
      leaves: the arrays, by slot. At the place of a ``jax.Ref`` stands the ref itself, or an
        array, for which a new ref is made.
      existing: objects to use as they are, by index. They are linked to, never changed.
    """
    existing = existing or {}
    objects: list[Any] = [
        existing[index] if index in existing else _new_object(entry, structure, index, leaves)
        for index, entry in enumerate(structure.entries)
    ]
    for index, entry in enumerate(structure.entries):
        if index in existing:
            continue
        own = (leaves[slot] for slot in structure.slots[index])
        if isinstance(entry, VariableEntry):
            _compat.set_value(objects[index], assemble(entry.value, own, objects))
        elif isinstance(entry, NodeEntry):
            _compat.fill_node(objects[index], node_attributes(entry, own, objects))
    root_leaves = (leaves[slot] for slot in structure.root_slots)
    return Built(assemble(structure.root, root_leaves, objects), objects)


def assemble(child: Child, leaves: Iterator[Any], objects: Sequence[Any]) -> Any:
    """The value that a child stands for; takes its arrays from ``leaves`` in order."""
    if child is LEAF:
        return next(leaves)
    if isinstance(child, int):
        return objects[child]
    if isinstance(child, Static):
        return child.value
    assert isinstance(child, Container)
    parts = [assemble(part, leaves, objects) for part in child.children]
    return jax.tree_util.tree_unflatten(child.treedef, parts)


def node_attributes(
    entry: NodeEntry, leaves: Iterator[Any], objects: Sequence[Any]
) -> list[tuple[Any, Any]]:
    """All attributes of a node in order."""
    return [
        (key, assemble(child, leaves, objects))
        for key, child in zip(entry.keys, entry.children, strict=True)
    ]


def metadata_of(entry: VariableEntry) -> dict[str, Any]:
    """The metadata of a Variable as a new dict."""
    return {name: setting.value for name, setting in entry.metadata}


def _new_object(entry: Any, structure: Structure, index: int, leaves: Sequence[Any]) -> Any:
    if isinstance(entry, NodeEntry):
        return _compat.new_node(entry.type, entry.metadata)
    if isinstance(entry, VariableEntry):
        return _compat.new_variable(entry.type, metadata_of(entry))
    if isinstance(entry, RefEntry):
        leaf = leaves[structure.slots[index][0]]
        # An abstract value stays one: there is nothing yet that a ref could refer to.
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if _compat.is_ref(leaf) or _compat.is_hijax_variable(leaf):
            return leaf
        return jax.new_ref(leaf)
    return None


def parts(structure: Structure, index: int) -> dict[Any, tuple[Child, tuple[int, ...]]]:
    """What an entry consists of: for each attribute its child and the slots of its own arrays."""
    entry, slots = structure.entries[index], iter(structure.slots[index])
    if isinstance(entry, NodeEntry):
        children: dict[Any, Child] = dict(zip(entry.keys, entry.children, strict=True))
    elif isinstance(entry, VariableEntry):
        children = {"value": entry.value}
    else:
        children = {} if entry is None else {"ref": LEAF}
    return {
        key: (child, tuple(next(slots) for _ in range(count_leaves(child))))
        for key, child in children.items()
    }


class NodeChange(NamedTuple):
    """The attributes of one node that differ: key and child, with its slots; keys that went."""

    node: int
    changed: tuple[tuple[Any, Child, tuple[int, ...]], ...]
    removed: tuple[Any, ...]


def node_changes(
    index: int, before: NodeEntry | None, after: Structure, fresh: Set[int]
) -> NodeChange | None:
    """What must be set and deleted to bring a node to its new entry, or None for nothing.

    Args:
      index: the node in the new structure.
      before: its old entry; None sets every attribute.
      after: the new structure.
      fresh: slots whose arrays are new even though the structure did not change.
    """
    new = parts(after, index)
    old = {} if before is None else dict(zip(before.keys, before.children, strict=True))
    changed = tuple(
        (key, child, slots)
        for key, (child, slots) in new.items()
        if key not in old or old[key] != child or not fresh.isdisjoint(slots)
    )
    removed = tuple(key for key in old if key not in new)
    return NodeChange(index, changed, removed) if changed or removed else None


def picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that picks these positions from a sequence, at C speed."""
    if not positions:
        return lambda items: ()
    if len(positions) == 1:  # of one position, itemgetter would not give a sequence
        start = positions[0]
        return operator.itemgetter(slice(start, start + 1))
    return operator.itemgetter(*positions)


def is_leaf_variable(entry: Any) -> bool:
    """Whether an entry is that of a Variable whose value is one array."""
    return isinstance(entry, VariableEntry) and entry.value is LEAF


def count_leaves(child: Child) -> int:
    """How many arrays a child holds outside of any entry."""
    if child is LEAF:
        return 1
    if isinstance(child, Container):
        return sum(map(count_leaves, child.children))
    return 0


def node_values(
    changes: Sequence[NodeChange], leaves: Sequence[Any], objects: Sequence[Any]
) -> list[list[tuple[Any, Any]]]:
    """For each change the new attributes, made but not yet set."""
    return [
        [
            (key, assemble(child, (leaves[slot] for slot in slots), objects))
            for key, child, slots in change.changed
        ]
        for change in changes
    ]


def write_node(
    change: NodeChange,
    values: Sequence[tuple[Any, Any]],
    after: Structure,
    leaves: Sequence[Any],
    objects: Sequence[Any],
) -> None:
    """Applies one change to an existing node."""
    entry = after.entries[change.node]
    assert isinstance(entry, NodeEntry)

    def complete() -> list[tuple[Any, Any]]:
        own = (leaves[slot] for slot in after.slots[change.node])
        return node_attributes(entry, own, objects)

    _compat.rewrite_node(objects[change.node], values, change.removed, complete)
