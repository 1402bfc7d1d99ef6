"""Builds a graph of NNX objects of a structure and flat arrays: with new objects, or the caller's.

A structure (``structure.py``) is a table that describes a graph as a treedef describes a pytree. An
*entry* describes one object, and its position in the table is the object's *index*. The *children*
of an entry are indices of other objects, ``LEAF`` for an array, static values, and pytrees of
these. *Slots* are positions in the list of all arrays. To *assemble* a child is to make the value
that it describes, with arrays from an iterator.

Existing objects are changed by *operations*, as in ``rebuild.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .. import _compat
from ..specs.types import AnyArray, Arrays, Objects
from .in_c import Operation, perform
from .static_equality import Static, content_of
from .static_parts import assign, is_builtin, make_empty, make_fixed
from .structure import (
    LEAF,
    Child,
    Container,
    Entry,
    Location,
    NodeEntry,
    RefEntry,
    StaticObject,
    Structure,
    VariableEntry,
    atoms,
    holds_objects,
)
from .treedefs import with_aux


class Unflattened(NamedTuple):
    """A graph that was built from a structure."""

    root: Any  # the pytree that the root of the structure describes
    objects: list[Any]  # the objects of the graph, by index


def unflatten(
    structure: Structure,
    leaves: Arrays,
    existing: Mapping[int, Any] | None = None,
    *,
    share: bool = False,
) -> Unflattened:
    """Builds the objects of a structure around arrays.

    Args:
      structure: describes the objects.
      leaves: the arrays, by slot. For a ``jax.Ref``, this is the ref itself or its new value.
      existing: objects that are used unchanged, by index, instead of new objects.
      share: whether flattened lists and other static containers are used again if unchanged.
    """
    existing = existing or {}
    existing = {**existing, **_unchanged_statics(structure, existing, share)}
    # The static part of metadata, by the id of ``entry.metadata``. `_new_object` adds it for the
    # first of the Variables that share their metadata.
    static_metadata: dict[int, dict[str, Any]] = {}
    trace_state = _compat.new_trace_state()  # names the current trace, for new Variables
    new_entries = [
        (index, entry) for index, entry in enumerate(structure.entries) if index not in existing
    ]
    # All objects are made without content first, because any object may refer to any other.
    objects: list[Any] = [existing.get(index) for index in range(len(structure.entries))]
    for index, entry in new_entries:
        slots = structure.slots[index]
        objects[index] = _new_object(entry, static_metadata, trace_state, slots, leaves)
    # The new objects get their content, except refs and hijax Variables, which have it already.
    for index, entry in new_entries:
        slots, obj = structure.slots[index], objects[index]
        arrays: Iterator[AnyArray] = map(leaves.__getitem__, slots) if slots else iter(())
        if isinstance(entry, VariableEntry) and _compat.is_variable(obj):
            # The Variable has its static metadata, from `_new_object`. The other settings link to
            # objects, and are set now, because all objects exist.
            num_static = len(static_metadata[_compat.identity(entry.metadata)])
            if num_static < len(entry.metadata):
                _compat.set_metadata(obj, assemble_metadata(entry, objects))
            _compat.set_value(obj, assemble(entry.value, arrays, objects))
        elif isinstance(entry, NodeEntry):
            _compat.fill_node(obj, assemble_attributes(entry, arrays, objects))
        elif isinstance(entry, StaticObject):
            perform(assign_content(entry, obj, objects))
    root_leaves = (leaves[slot] for slot in structure.root_slots)
    return Unflattened(assemble(structure.root, root_leaves, objects), objects)


def _new_object(
    entry: Entry | None,
    static_metadata: dict[int, dict[str, Any]],
    trace_state: object,
    slots: Sequence[int],
    leaves: Arrays,
) -> Any:
    """Returns a new object of the class in an entry.

    The caller fills the object later. Hijax Variables and refs need not be filled, because they are
    made with their arrays.

    Args:
      static_metadata: a cache: the metadata of Variables, except settings that link to objects, by
        the id of ``entry.metadata``. The metadata of this entry are added.
      trace_state: Flax's record of the current trace, for a new Variable.
      slots: the slots of the arrays of the object.
    """
    if isinstance(entry, NodeEntry):
        return _compat.new_node(entry.type, entry.metadata)
    if isinstance(entry, VariableEntry):
        metadata = static_metadata.get(_compat.identity(entry.metadata))
        if metadata is None:
            children = entry.metadata  # pairs of name and child
            pairs = ((name, child.value) for name, child in children if isinstance(child, Static))
            metadata = static_metadata[_compat.identity(entry.metadata)] = dict(pairs)
        # Within a trace, or if modules are in its value, a hijax Variable is made as a plain one.
        if metadata.get("hijax") and not holds_objects(entry) and _compat.trace_is_clean():
            value = assemble(entry.value, (leaves[slot] for slot in slots), ())
            variable_type: Any = entry.type
            return variable_type.from_metadata(value, metadata)
        return _compat.new_variable(entry.type, metadata, trace_state)
    if isinstance(entry, StaticObject):
        return make_empty(entry.kind)
    if entry is None:  # the object is not described, because nothing refers to it
        return None
    assert isinstance(entry, RefEntry)
    leaf = leaves[slots[0]]
    # An abstract value stays abstract, because a ref needs data.
    is_abstract = isinstance(leaf, jax.ShapeDtypeStruct)
    return leaf if is_abstract or _compat.is_ref(leaf) else jax.new_ref(leaf)


def assemble(child: Child, leaves: Iterator[AnyArray], objects: Objects) -> Any:
    """Returns the value that a child describes.

    Args:
      child: the child of an entry, or the root.
      leaves: the arrays; each ``LEAF`` in the child takes the next array.
      objects: the objects of the graph, by index.
    """
    if child is LEAF:
        return next(leaves)
    if isinstance(child, int):
        return objects[child]
    if isinstance(child, Static):
        return child.value
    assert isinstance(child, Container | StaticObject)
    parts = [assemble(part, leaves, objects) for part in child.children]
    if isinstance(child, StaticObject):
        # A child, as opposed to an entry, is an object that cannot change, such as a tuple with a
        # list in it.
        return make_fixed(child.kind, parts)
    treedef = child.treedef
    # The treedef has the node data, such as the settings of a registered class. If children
    # describe data that can change, the treedef has to get copies of it. Data comes after the
    # parts, because the leaves of both come from one iterator.
    if not all(isinstance(aux, Static) for aux in child.aux):
        treedef = with_aux(treedef, (assemble(aux, leaves, objects) for aux in child.aux))
    return jax.tree_util.tree_unflatten(treedef, parts)


def assemble_attributes(
    entry: NodeEntry, leaves: Iterator[AnyArray], objects: Objects
) -> list[tuple[Any, Any]]:
    """Returns the attributes of a module, as pairs of name and value.

    Args:
      entry: describes the module.
      leaves: the arrays that the module holds itself, in the order of its attributes.
      objects: the objects of the graph, by index.
    """
    # Most attributes are static, and a model is built faster without a call for each of these.
    return [
        (key, child.value if type(child) is Static else assemble(child, leaves, objects))
        for key, child in zip(entry.keys, entry.children, strict=True)
    ]


def assemble_metadata(entry: VariableEntry, objects: Objects) -> dict[str, Any]:
    """Returns the metadata of a Variable by name; settings may link to ``objects``, by index."""
    return {name: assemble(setting, iter(()), objects) for name, setting in entry.metadata}


def pytree_of(entry: object) -> Container | None:
    """Returns the pytree of arrays that is the value of a Variable; None for any other entry.

    Returns None as well if the value is one array, or a pytree with modules or Variables in it,
    because the arrays in such a pytree have locations of their own.
    """
    if not isinstance(entry, VariableEntry) or holds_objects(entry):
        return None
    return entry.value if isinstance(entry.value, Container) else None


def value_at(structure: Structure, location: Location, leaves: Arrays) -> Any:
    """Returns the value at a location: an array, or the pytree of arrays that a Variable holds.

    ``leaves`` has the arrays by slot, or other things instead of arrays.
    """
    arrays = [leaves[slot] for slot in location.slots]
    index = location.object_index
    pytree = None if index is None else pytree_of(structure.entries[index])
    return arrays[0] if pytree is None else jax.tree_util.tree_unflatten(pytree.treedef, arrays)


# Static objects


def assign_content(entry: StaticObject, value: object, objects: Objects) -> list[Operation]:
    """Returns the operations that give a static object the content of an entry.

    The content may link to ``objects``, the objects of the graph by index.
    """
    return assign(value, entry.kind, [assemble(part, iter(()), objects) for part in entry.children])


def restore(structure: Structure, objects: Objects, indices: Iterable[int]) -> None:
    """Restores the content of static objects from their entries, where it has changed.

    A static object has no arrays and is compared by its content, as a config or a list is.

    Args:
      structure: has the entries.
      objects: the objects of the graph, by index.
      indices: the indices of the objects to restore. Objects that are not static are left alone.
    """
    by_index = dict(enumerate(objects))
    for index in indices:
        entry = structure.entries[index]
        # Equal content is not written, because other threads would see the change, and a guard
        # would take the object for a changed one.
        if isinstance(entry, StaticObject) and not _has_content(objects[index], entry, by_index):
            perform(assign_content(entry, objects[index], objects))


def _unchanged_statics(
    structure: Structure, existing: Mapping[int, Any], share: bool
) -> dict[int, Any]:
    """Returns the static objects that were flattened and still have their content, by index.

    The caller uses these instead of copies. Without ``share``, a list, dict or the like is left
    out, unless an object that is used again holds it. So if a function has created a list in its
    trace, and returns it in a module, the results of different calls have different lists.

    Args:
      structure: has the entries, and the objects that were flattened (``origins``).
      existing: objects that are used in any case, by index.
      share: whether containers are used again as well.
    """
    entries: Sequence[Any] = structure.entries
    origins = structure.origins.items()
    unchanged = {index: value for index, value in origins if index not in existing}
    while True:  # in rounds, because an object that holds a changed object has changed as well
        objects = {**existing, **unchanged}
        changed = [
            index for index, x in unchanged.items() if not _has_content(x, entries[index], objects)
        ]
        if not changed:
            break
        for index in changed:
            del unchanged[index]
    # The objects that are used again, with all that they hold.
    shared: dict[int, Any] = {}
    pending = [index for index, value in unchanged.items() if share or not is_builtin(type(value))]
    while pending:
        index = pending.pop()
        if index in unchanged and index not in shared:
            shared[index] = unchanged[index]
            # The indices of the objects in this object, also in tuples and the like.
            pending += (atom for atom in atoms(entries[index].children) if isinstance(atom, int))
    return shared


def _has_content(value: object, entry: StaticObject, objects: Mapping[int, Any]) -> bool:
    """Whether a static object still has the content that its entry describes.

    The content is the object's kind (class and names of attributes) and its parts. Each part has to
    be what a child of the entry describes. A child may link to ``objects``, by index.
    """
    content = content_of(value)
    if content is None:
        return False
    kind, parts = content
    if kind != entry.kind or len(parts) != len(entry.children):
        return False
    return all(
        _is_described_by(part, child, objects)
        for part, child in zip(parts, entry.children, strict=True)
    )


def _is_described_by(value: object, child: Child, objects: Mapping[int, Any]) -> bool:
    """Whether a value in a static object is the one that a child describes."""
    if isinstance(child, int):  # an object of the graph
        return child in objects and objects[child] is value
    if isinstance(child, StaticObject):  # a tuple with a list in it, for example
        return _has_content(value, child, objects)
    return Static.of(value) == child  # there are no other children, because statics hold no arrays
