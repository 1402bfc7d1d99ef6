"""A structure and flat arrays → a graph of NNX objects: new ones, or the caller's."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax

from .. import _compat
from ..specs.types import Arrays, Objects
from .static_equality import Static, content_of
from .static_parts import Operation, assign, is_builtin, make_empty, make_fixed
from .structure import (
    LEAF,
    Child,
    Container,
    Location,
    NodeEntry,
    RefEntry,
    StaticObject,
    Structure,
    VariableEntry,
    atoms,
    holds_objects,
    is_leaf_variable,
)
from .treedefs import with_aux


class Built(NamedTuple):
    """The root of a graph that was built, and the object of each entry of its structure."""

    root: Any
    objects: list[Any]


def unflatten(
    structure: Structure,
    leaves: Arrays,
    existing: Mapping[int, Any] | None = None,
    *,
    share: bool = False,
) -> Built:
    """Builds the objects of ``structure`` around ``leaves``: for a ref, itself or its new value.

    ``existing`` objects are used unchanged. With ``share``, so are the flattened lists and other
    static containers that are unchanged, instead of new ones.
    """
    existing = existing or {}
    existing = {**existing, **_originals(structure, existing, share)}
    plain: dict[int, dict[str, Any]] = {}  # static metadata, which many Variables share
    trace_state = _compat.new_trace_state()
    # First all objects without content, since any may refer to any other.
    objects: list[Any] = [
        existing[index]
        if index in existing
        else _new_object(entry, plain, trace_state, structure.slots[index], leaves)
        for index, entry in enumerate(structure.entries)
    ]
    # Then their content.
    for index, entry in enumerate(structure.entries):
        if index in existing:
            continue
        slots = structure.slots[index]
        arrays: Any = map(leaves.__getitem__, slots) if slots else iter(())
        if isinstance(entry, VariableEntry) and _compat.is_variable(objects[index]):
            known = plain[_compat.identity(entry.metadata)]
            if len(known) < len(entry.metadata):  # some of it links to objects
                _compat.set_metadata(objects[index], _metadata(entry, objects))
            _compat.set_value(objects[index], assemble(entry.value, arrays, objects))
        elif isinstance(entry, NodeEntry):
            _compat.fill_node(objects[index], _attributes(entry, arrays, objects))
        elif isinstance(entry, StaticObject):
            perform(_assign(entry, objects[index], objects))
    root_leaves = (leaves[slot] for slot in structure.root_slots)
    return Built(assemble(structure.root, root_leaves, objects), objects)


def _new_object(
    entry: object,
    plain: dict[int, dict[str, Any]],
    trace_state: object,
    slots: Sequence[int],
    leaves: Arrays,
) -> Any:
    if isinstance(entry, NodeEntry):
        return _compat.new_node(entry.type, entry.metadata)
    if isinstance(entry, VariableEntry):
        settings = plain.get(_compat.identity(entry.metadata))
        if settings is None:
            pairs = ((name, x.value) for name, x in entry.metadata if isinstance(x, Static))
            settings = plain[_compat.identity(entry.metadata)] = dict(pairs)
        # Within a trace, hijax Variables are plain ones.
        if settings.get("hijax") and not holds_objects(entry) and _compat.trace_is_clean():
            value = assemble(entry.value, (leaves[slot] for slot in slots), ())
            kind: Any = entry.type
            return kind.from_metadata(value, settings)
        return _compat.new_variable(entry.type, settings, trace_state)
    if isinstance(entry, StaticObject):
        return make_empty(entry.kind)
    if entry is None:
        return None
    leaf = leaves[slots[0]]
    # An abstract value stays abstract: there is nothing yet for a ref to refer to.
    is_abstract = isinstance(leaf, jax.ShapeDtypeStruct)
    return leaf if is_abstract or _compat.is_ref(leaf) else jax.new_ref(leaf)


def assemble(child: Child, leaves: Iterator[Any], objects: Objects) -> Any:
    """Returns the value of a child; takes its arrays from ``leaves`` in order."""
    if child is LEAF:
        return next(leaves)
    if isinstance(child, int):
        return objects[child]
    if isinstance(child, Static):
        return child.value
    assert isinstance(child, Container | StaticObject)
    parts = [assemble(part, leaves, objects) for part in child.children]
    if isinstance(child, StaticObject):
        return make_fixed(child.kind, parts)
    treedef = child.treedef
    if not all(isinstance(aux, Static) for aux in child.aux):
        treedef = with_aux(treedef, (assemble(aux, leaves, objects) for aux in child.aux))
    return jax.tree_util.tree_unflatten(treedef, parts)


def _attributes(entry: NodeEntry, leaves: Iterator[Any], objects: Objects) -> list[tuple[Any, Any]]:
    return [
        (key, child.value if type(child) is Static else assemble(child, leaves, objects))
        for key, child in zip(entry.keys, entry.children, strict=True)
    ]


def _metadata(entry: VariableEntry, objects: Objects) -> dict[str, Any]:
    return {name: assemble(setting, iter(()), objects) for name, setting in entry.metadata}


def pytree_of(entry: object) -> Container | None:
    """Returns the pytree of arrays that is a Variable's value; None for other values."""
    if not isinstance(entry, VariableEntry) or holds_objects(entry):
        return None
    return entry.value if isinstance(entry.value, Container) else None


def value_at(structure: Structure, location: Location, leaves: Arrays) -> Any:
    """Returns the value at a location: an array, or a pytree of arrays."""
    arrays = [leaves[slot] for slot in location.slots]
    pytree = None if location.entry is None else pytree_of(structure.entries[location.entry])
    return arrays[0] if pytree is None else jax.tree_util.tree_unflatten(pytree.treedef, arrays)


# Static objects


def _assign(entry: StaticObject, value: object, objects: Objects) -> list[Operation]:
    """Returns the operations that give an object the content of an entry."""
    return assign(value, entry.kind, [assemble(part, iter(()), objects) for part in entry.children])


def restore(structure: Structure, objects: Objects, indices: Iterable[int]) -> None:
    """Restores the content of static objects from their entries, where it has changed."""
    known = dict(enumerate(objects))
    for index in indices:
        entry = structure.entries[index]
        # Writing equal content anew would be seen by other threads, and by guards.
        if isinstance(entry, StaticObject) and not _has_content(entry, objects[index], known):
            perform(_assign(entry, objects[index], objects))


def _originals(structure: Structure, existing: Mapping[int, Any], share: bool) -> dict[int, Any]:
    """Returns the flattened static objects that still have their content.

    Without ``share``, lists and other containers count only as a part of others: nearly all objects
    that a function creates while it runs are such containers.
    """
    entries: Sequence[Any] = structure.entries
    originals = {i: value for i, value in structure.origins.items() if i not in existing}
    while True:  # an object that holds a changed one has changed as well
        objects = {**existing, **originals}
        changed = [i for i, x in originals.items() if not _has_content(entries[i], x, objects)]
        if not changed:
            break
        for index in changed:
            del originals[index]
    kept: dict[int, Any] = {}
    pending = [i for i, value in originals.items() if share or not is_builtin(type(value))]
    while pending:
        index = pending.pop()
        if index in originals and index not in kept:
            kept[index] = originals[index]
            pending += (atom for atom in atoms(entries[index].children) if isinstance(atom, int))
    return kept


def _has_content(entry: StaticObject, value: object, objects: Mapping[int, Any]) -> bool:
    content = content_of(value)
    if content is None:
        return False
    kind, parts_now = content
    return (
        kind == entry.kind
        and len(parts_now) == len(entry.children)
        and all(map(_has_value, entry.children, parts_now, itertools.repeat(objects)))
    )


def _has_value(child: Child, value: object, objects: Mapping[int, Any]) -> bool:
    if isinstance(child, int):
        return child in objects and objects[child] is value
    if isinstance(child, StaticObject):
        return _has_content(child, value, objects)
    return Static.of(value) == child


# Changes of existing objects


class NodeChange(NamedTuple):
    """The attributes of one node that differ."""

    node: int
    changed: tuple[tuple[Any, Child, tuple[int, ...]], ...]  # key, child, and its slots
    removed: tuple[Any, ...]  # keys


def parts(structure: Structure, index: int) -> dict[Any, tuple[Child, tuple[int, ...]]]:
    """Returns the child of each attribute of an object, and the slots of the arrays in it."""
    entry, slots = structure.entries[index], iter(structure.slots[index])
    children: dict[Any, Child] = {}
    if isinstance(entry, NodeEntry):
        if not structure.slots[index]:  # most modules hold Variables, and no arrays themselves
            return {key: (child, ()) for key, child in zip(entry.keys, entry.children, strict=True)}
        children = dict(zip(entry.keys, entry.children, strict=True))
    elif isinstance(entry, VariableEntry | RefEntry):  # a ref is one array
        children = {"value": getattr(entry, "value", LEAF)}
    # Slots are in the order of attributes, as many for each as it holds arrays.
    counts = {key: sum(x is LEAF for x in atoms((child,))) for key, child in children.items()}
    return {
        key: (child, tuple(itertools.islice(slots, counts[key]))) for key, child in children.items()
    }


def kept_places(before: Structure, after: Structure, index: int) -> list[tuple[int, int]]:
    """Returns the slots, after and before a call, of an object's arrays in the same places."""
    if is_leaf_variable(before.entries[index]) and is_leaf_variable(after.entries[index]):
        return [(after.slots[index][0], before.slots[index][0])]  # nearly all have no parts
    old = parts(before, index)
    pairs: list[tuple[int, int]] = []
    for key, (child, slots) in parts(after, index).items():
        old_child, old_slots = old.get(key, (None, ()))
        if child == old_child:
            pairs += zip(slots, old_slots, strict=True)
    return pairs


def node_changes(
    index: int, before: NodeEntry | None, after: Structure, fresh: Set[int]
) -> NodeChange | None:
    """Returns what differs in a node, in all attributes without ``before``; None if nothing.

    The arrays in ``fresh`` slots are new, even if the entry is the same.
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


def _node_operations(
    change: NodeChange, after: Structure, leaves: Arrays, objects: Objects
) -> list[Operation]:
    entry: Any = after.entries[change.node]
    attributes = [
        (key, assemble(child, (leaves[slot] for slot in slots), objects))
        for key, child, slots in change.changed
    ]

    def complete() -> list[tuple[Any, Any]]:
        return _attributes(entry, (leaves[slot] for slot in after.slots[change.node]), objects)

    return _compat.node_operations(objects[change.node], attributes, change.removed, complete)


def update(
    after: Structure,
    leaves: Arrays,
    objects: Objects,
    values: Iterable[int] = (),
    metadata: Collection[int] = (),
    nodes: Sequence[NodeChange] = (),
    statics: Iterable[int] = (),
) -> list[Operation]:
    """Returns the operations that change existing objects; makes everything new in them.

    ``after`` has the new content. Values are those of Variables; some get their metadata, too.
    """
    entries: Sequence[Any] = after.entries
    operations: list[Operation] = []
    for index in values:
        arrays = (leaves[slot] for slot in after.slots[index])
        value = assemble(entries[index].value, arrays, objects)
        settings = _metadata(entries[index], objects) if index in metadata else None
        operations += _compat.variable_operations(objects[index], value, settings)
    for change in nodes:
        operations += _node_operations(change, after, leaves, objects)
    for index in statics:
        operations += _assign(entries[index], objects[index], objects)
    return operations


def perform(operations: Iterable[Operation]) -> None:
    """Runs all operations without Python code in between, which a signal could interrupt."""
    deque(itertools.starmap(operator.call, operations), maxlen=0)


def picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Returns a function that picks these positions from a sequence, at C speed."""
    if not positions:
        return lambda items: ()
    if len(positions) == 1:  # for one position, itemgetter would not give a sequence
        start = positions[0]
        return operator.itemgetter(slice(start, start + 1))
    return operator.itemgetter(*positions)
