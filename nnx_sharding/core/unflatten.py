"""Structure and flat arrays → graph of NNX objects, fresh ones or the caller's own."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax

from .. import _compat
from . import statics
from .statics import Operation, Static
from .structure import (
    LEAF,
    Child,
    Container,
    Group,
    Location,
    NodeEntry,
    PyTreeDef,
    RefEntry,
    StaticEntry,
    Structure,
    VariableEntry,
    holds_objects,
)


class Built(NamedTuple):
    """The root of a merged graph, and the object of each entry of its structure."""

    root: Any
    objects: list[Any]


def unflatten(
    structure: Structure,
    leaves: Sequence[Any],
    existing: Mapping[int, Any] | None = None,
    *,
    share: bool = False,
) -> Built:
    """Makes the objects of ``structure`` around ``leaves``.

    Args:
      structure: what to make.
      leaves: the arrays, by slot. At the place of a ``jax.Ref`` stands the ref itself, or an
        array, for which a new ref is made.
      existing: objects to use as they are, by index. They are linked to, never changed.
      share: whether lists and other static containers are those of the structure, as long as they
        are unchanged, and not new ones.
    """
    existing = existing or {}
    existing = {**existing, **_originals(structure, existing, share)}
    objects: list[Any] = [
        existing[index] if index in existing else _new_object(entry, structure, index, leaves)
        for index, entry in enumerate(structure.entries)
    ]
    for index, entry in enumerate(structure.entries):
        if index in existing:
            continue
        own = (leaves[slot] for slot in structure.slots[index])
        if isinstance(entry, VariableEntry):
            if any(not isinstance(setting, Static) for _, setting in entry.metadata):
                _compat.set_metadata(objects[index], metadata_of(entry, objects))
            _compat.set_value(objects[index], assemble(entry.value, own, objects))
        elif isinstance(entry, NodeEntry):
            _compat.fill_node(objects[index], node_attributes(entry, own, objects))
        elif isinstance(entry, StaticEntry):
            perform(static_operations(entry, objects[index], objects))
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
    assert isinstance(child, Container | Group)
    parts = [assemble(part, leaves, objects) for part in child.children]
    if isinstance(child, Group):
        return statics.make_fixed(child.kind, parts)
    treedef = child.treedef
    if not all(isinstance(aux, Static) for aux in child.aux):
        treedef = _with_aux(treedef, (assemble(aux, leaves, objects) for aux in child.aux))
    return jax.tree_util.tree_unflatten(treedef, parts)


def _with_aux(treedef: PyTreeDef, aux: Iterator[Any]) -> PyTreeDef:
    """The same tree structure with the node data that ``split.aux_of`` gives in its order."""
    data = treedef.node_data()
    if data is None:
        return treedef
    if _compat.has_aux(*data):
        data = data[0], next(aux)
    children = [_with_aux(child, aux) for child in treedef.children()]
    return jax.tree_util.PyTreeDef.from_node_data_and_children(
        jax.tree_util.default_registry, data, children
    )


def pytree_of(entry: Any) -> Container | None:
    """The pytree that a Variable has as its value; None for an array, or one with objects in it."""
    if not isinstance(entry, VariableEntry) or holds_objects(entry):
        return None
    return entry.value if isinstance(entry.value, Container) else None


def value_at(structure: Structure, place: Location, leaves: Sequence[Any]) -> Any:
    """What is at a place: an array, or a pytree of them."""
    own = (leaves[slot] for slot in place.slots)
    pytree = None if place.entry is None else pytree_of(structure.entries[place.entry])
    return next(own) if pytree is None else assemble(pytree, own, ())


def node_attributes(
    entry: NodeEntry, leaves: Iterator[Any], objects: Sequence[Any]
) -> list[tuple[Any, Any]]:
    """All attributes of a node in order."""
    return [
        (key, assemble(child, leaves, objects))
        for key, child in zip(entry.keys, entry.children, strict=True)
    ]


def metadata_of(entry: VariableEntry, objects: Sequence[Any]) -> dict[str, Any]:
    """The metadata of a Variable as a new dict."""
    return {name: assemble(setting, iter(()), objects) for name, setting in entry.metadata}


def static_operations(entry: StaticEntry, value: Any, objects: Sequence[Any]) -> list[Operation]:
    """What gives an object the content of an entry."""
    parts = [assemble(part, iter(()), objects) for part in entry.children]
    return statics.assign(value, entry.kind, parts)


def perform(operations: Iterable[Operation]) -> None:
    """Runs all operations without a step of Python in between, which a signal could interrupt."""
    deque(itertools.starmap(operator.call, operations), maxlen=0)


def _originals(
    structure: Structure, existing: Mapping[int, Any], containers: bool
) -> dict[int, Any]:
    """The static objects that a structure was made from and that still have their content.

    Args:
      structure: the structure.
      existing: objects that are used as they are.
      containers: whether lists and the like count, too, or only with the object that they are
        part of. What a function creates while it runs is nearly always such a container.
    """
    entries = {
        index: entry
        for index, entry in enumerate(structure.entries)
        if isinstance(entry, StaticEntry) and entry.origin is not None and index not in existing
    }
    found = {index: entry.origin for index, entry in entries.items()}
    while True:
        objects = {**existing, **found}
        changed = [i for i in found if not _has_content(entries[i], found[i], objects)]
        if not changed:
            break
        for index in changed:
            del found[index]
    if containers:
        return found
    kept: dict[int, Any] = {}
    pending = [index for index, value in found.items() if not statics.is_container(type(value))]
    while pending:
        index = pending.pop()
        if index in found and index not in kept:
            kept[index] = found[index]
            pending += static_links(entries[index].children)
    return kept


def static_links(children: Iterable[Child]) -> Iterator[int]:
    """The indices among what static values hold."""
    for child in children:
        if isinstance(child, Group):
            yield from static_links(child.children)
        elif isinstance(child, int):
            yield child


def _has_content(entry: StaticEntry | Group, value: Any, objects: Mapping[int, Any]) -> bool:
    content = statics.content_of(value)
    return (
        content is not None
        and content.kind == entry.kind
        and len(content.parts) == len(entry.children)
        and all(map(_stands_for, entry.children, content.parts, itertools.repeat(objects)))
    )


def _stands_for(child: Child, value: Any, objects: Mapping[int, Any]) -> bool:
    if isinstance(child, int):
        return child in objects and objects[child] is value
    if isinstance(child, Group):
        return _has_content(child, value, objects)
    return Static.of(value) == child


def _new_object(entry: Any, structure: Structure, index: int, leaves: Sequence[Any]) -> Any:
    if isinstance(entry, NodeEntry):
        return _compat.new_node(entry.type, entry.metadata)
    if isinstance(entry, VariableEntry):
        plain = {name: own.value for name, own in entry.metadata if isinstance(own, Static)}
        return _compat.new_variable(entry.type, plain)
    if isinstance(entry, RefEntry):
        leaf = leaves[structure.slots[index][0]]
        # An abstract value stays one: there is nothing yet that a ref could refer to.
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if _compat.is_ref(leaf) or _compat.is_hijax_variable(leaf):
            return leaf
        return jax.new_ref(leaf)
    if isinstance(entry, StaticEntry):
        return statics.make_empty(entry.kind)
    return None


def restore(structure: Structure, objects: Sequence[Any]) -> None:
    """Gives static objects the content back that they have in a structure, where they lost it."""
    known = dict(enumerate(objects))
    for index in structure.static_indices():
        entry = structure.entries[index]
        assert isinstance(entry, StaticEntry)
        if not _has_content(entry, objects[index], known):
            perform(static_operations(entry, objects[index], objects))


def parts(structure: Structure, index: int) -> dict[Any, tuple[Child, tuple[int, ...]]]:
    """What an entry consists of: for each attribute its child and the slots of its own arrays."""
    entry, slots = structure.entries[index], iter(structure.slots[index])
    if isinstance(entry, NodeEntry):
        children: dict[Any, Child] = dict(zip(entry.keys, entry.children, strict=True))
    elif isinstance(entry, VariableEntry):
        children = {"value": entry.value}
    else:
        children = {"ref": LEAF} if isinstance(entry, RefEntry) else {}
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


def node_operations(
    change: NodeChange,
    values: Sequence[tuple[Any, Any]],
    after: Structure,
    leaves: Sequence[Any],
    objects: Sequence[Any],
) -> list[Operation]:
    """What applies one change to an existing node."""
    entry = after.entries[change.node]
    assert isinstance(entry, NodeEntry)

    def complete() -> list[tuple[Any, Any]]:
        own = (leaves[slot] for slot in after.slots[change.node])
        return node_attributes(entry, own, objects)

    return _compat.node_operations(objects[change.node], values, change.removed, complete)
