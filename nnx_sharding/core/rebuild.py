"""Changes existing objects of a graph: finds what differs, and makes operations that change it.

An *operation* is a function with its arguments. All operations are made before the first is run,
and they run together (:func:`~.in_c.perform`), so that an error or a signal changes everything
or nothing. The words are those of ``structure.py``: an *index* is the position of an object in the
table of a structure, a *slot* is the position of an array, and a *child* describes what an object
has in one place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from typing import Any, NamedTuple

import jax
from flax import nnx

from .. import _compat
from ..specs.types import Arrays, Objects
from .flatten import Flat
from .in_c import Operation, perform
from .structure import (
    LEAF,
    Child,
    NodeEntry,
    RefEntry,
    Structure,
    VariableEntry,
    atoms,
    is_leaf_variable,
)
from .unflatten import assemble, assemble_attributes, assemble_metadata, assign_content


class AttributeValue(NamedTuple):
    """The value of one attribute of an object: its child, and the slots of the arrays in it."""

    child: Child
    slots: tuple[int, ...]


class NodeChange(NamedTuple):
    """The attributes of one node (a module or the like) that a call has changed."""

    node: int  # the index of the node
    changed: tuple[tuple[Any, AttributeValue], ...]  # the names, each with the new value
    removed: tuple[Any, ...]  # the names of attributes that the node has no more


class ArrayAttribute(NamedTuple):
    """A JAX array that is an attribute of a module, outside of Variables."""

    node: int  # the index of the module
    name: Any  # the name of the attribute


def attribute_values(structure: Structure, index: int) -> dict[Any, AttributeValue]:
    """Returns the attributes of a module, by name; for a Variable or ref, its ``"value"``.

    A structure has the slots of all arrays of an object in one tuple, in the order of the object's
    children. So each child gets as many slots as it has leaves. If a module has an array ``a``, a
    Variable ``w`` (object 3), a list ``b`` of two arrays, and the slots ``(7, 8, 9)``, the result
    is ``{"a": (LEAF, (7,)), "w": (3, ()), "b": (Container, (8, 9))}``.
    """
    entry = structure.entries[index]
    slots = structure.slots[index]
    if isinstance(entry, NodeEntry):
        children: Iterable[tuple[Any, Child]] = zip(entry.keys, entry.children, strict=True)
        if not slots:  # most modules hold Variables, and no arrays themselves
            return {name: AttributeValue(child, ()) for name, child in children}
    elif isinstance(entry, VariableEntry):
        children = [("value", entry.value)]
    else:
        children = [("value", LEAF)] if isinstance(entry, RefEntry) else []
    remaining = iter(slots)  # each child takes the next slots
    values: dict[Any, AttributeValue] = {}
    for name, child in children:
        num_leaves = sum(atom is LEAF for atom in atoms((child,)))
        child_slots = tuple(itertools.islice(remaining, num_leaves))
        values[name] = AttributeValue(child, child_slots)
    return values


def array_attributes(structure: Structure, leaves: Arrays) -> dict[int, ArrayAttribute]:
    """Finds the JAX arrays that are themselves attributes of modules, by slot.

    If a call has to move such an array, it can put the moved array into the module. Arrays in lists
    or dicts that are attributes are left out. Arrays in Variables are not attributes.

    Args:
      structure: describes the modules.
      leaves: all arrays, by slot.
    """
    attributes = {}
    for index, entry in enumerate(structure.entries):
        is_module = isinstance(entry, NodeEntry) and issubclass(entry.type, nnx.Pytree)
        if not is_module or not structure.slots[index]:  # not a module with arrays of its own
            continue
        for name, (child, slots) in attribute_values(structure, index).items():
            if child is not LEAF:
                continue
            [slot] = slots  # a ``LEAF`` is one array
            if isinstance(leaves[slot], (jax.Array, jax.ShapeDtypeStruct)):
                attributes[slot] = ArrayAttribute(index, name)
    return attributes


def slots_before(before: Structure, after: Structure, index: int) -> dict[int, int]:
    """Returns the slots of an object's arrays before a call, by their slots after it.

    Arrays of an attribute are left out if another child describes its value than before the call,
    for example because a list is longer: they had no place before.

    Args:
      before: the structure of the graph before the call.
      after: the structure of the graph after the call.
      index: the index of the object in both.
    """
    # Nearly all objects with arrays are Variables of one array, so they are tried first.
    if is_leaf_variable(before.entries[index]) and is_leaf_variable(after.entries[index]):
        return {after.slots[index][0]: before.slots[index][0]}
    # Two values with equal children have equally many slots.
    old_values = attribute_values(before, index)
    old_slot_of: dict[int, int] = {}
    for name, value in attribute_values(after, index).items():
        old_value = old_values.get(name)
        if old_value is not None and value.child == old_value.child:
            old_slot_of |= zip(value.slots, old_value.slots, strict=True)
    return old_slot_of


def node_changes(
    index: int, before: NodeEntry | None, after: Structure, fresh: Set[int]
) -> NodeChange | None:
    """Returns the attributes of a module that a call changed; None if it changed none.

    Args:
      index: the index of the module in the structure ``after`` the call.
      before: the entry of the module before the call; None if the module is new, so that all
        attributes count.
      after: the structure after the call.
      fresh: the slots after the call of arrays that are new. These are needed because an entry only
        says that there is an array (``LEAF``), not which.
    """
    old_children = {} if before is None else dict(zip(before.keys, before.children, strict=True))
    values = attribute_values(after, index)
    changed: list[tuple[Any, AttributeValue]] = []
    for name, value in values.items():
        has_other_child = name not in old_children or old_children[name] != value.child
        if has_other_child or not fresh.isdisjoint(value.slots):
            changed.append((name, value))
    removed = tuple(name for name in old_children if name not in values)
    return NodeChange(index, tuple(changed), removed) if changed or removed else None


def _node_operations(
    change: NodeChange, after: Structure, leaves: Arrays, objects: Objects
) -> list[Operation]:
    """Returns the operations that change the attributes of one module; runs none of them.

    Args:
      change: the attributes that differ, in terms of ``after``.
      leaves: the arrays of the new state, by slot.
    """
    attributes: list[tuple[Any, Any]] = []  # names and new values
    for name, (child, slots) in change.changed:
        arrays = (leaves[slot] for slot in slots)
        attributes.append((name, assemble(child, arrays, objects)))

    def all_attributes() -> list[tuple[Any, Any]]:
        """Returns all attributes, for nodes other than an ``nnx.Pytree``: these are rewritten."""
        entry: Any = after.entries[change.node]
        arrays = (leaves[slot] for slot in after.slots[change.node])
        return assemble_attributes(entry, arrays, objects)

    node = objects[change.node]
    return _compat.node_operations(node, attributes, change.removed, all_attributes)


def update_operations(
    after: Structure,
    leaves: Arrays,
    objects: Objects,
    values: Iterable[int] = (),
    metadata: Collection[int] = (),
    nodes: Sequence[NodeChange] = (),
    statics: Iterable[int] = (),
) -> list[Operation]:
    """Returns the operations that bring existing objects to a new state; runs none of them.

    Everything new that the objects will hold is made here, so that the operations cannot fail.

    Args:
      after: describes the new state.
      leaves: the arrays of the new state, by slot.
      objects: the existing objects, by index.
      values: the indices of all Variables that get new values.
      metadata: the indices of Variables among ``values`` that also get new metadata.
      nodes: for each module that changes, the attributes that it gets, and those that it loses.
      statics: the indices of static objects that get new content.
    """
    entries: Sequence[Any] = after.entries
    operations: list[Operation] = []
    for index in values:
        arrays = (leaves[slot] for slot in after.slots[index])
        value = assemble(entries[index].value, arrays, objects)
        new_metadata = assemble_metadata(entries[index], objects) if index in metadata else None
        operations += _compat.variable_operations(objects[index], value, new_metadata)
    for change in nodes:
        operations += _node_operations(change, after, leaves, objects)
    for index in statics:
        operations += assign_content(entries[index], objects[index], objects)
    return operations


def rebuild(
    flat: Flat,
    leaves: Arrays,
    caller: str = "with_sharding_constraint",
    *,
    foreign: bool = False,
    finish: Callable[[], object] = lambda: None,
) -> Any:
    """Puts other arrays into a flattened tree: changes its modules, makes new containers.

    Args:
      flat: the tree, flattened.
      leaves: the new arrays, in the order of the old ones.
      caller: the function that the user called, in messages.
      foreign: whether objects of another trace may be changed; if not, they raise an error.
      finish: is called when all is made, before anything changes. If it raises an error, the tree
        is unchanged.

    Returns:
      The tree: the same modules and Variables, in new lists, dicts and tuples.

    Raises:
      TraceContextError: an object that would change belongs to another trace, and ``foreign`` is
        False.
    """
    structure, objects = flat.structure, flat.objects
    fresh = {slot for slot, leaf in enumerate(leaves) if leaf is not flat.leaves[slot]}
    # The indices of the objects that get a new array.
    changed = [index for index, slots in enumerate(structure.slots) if not fresh.isdisjoint(slots)]
    if not (foreign or flat.updatable):
        refused = [objects[index] for index in changed if not _compat.can_update(objects[index])]
        if refused:
            type_names = sorted({type(obj).__name__ for obj in refused})
            raise _compat.TraceContextError(
                f"{caller} cannot change objects of another trace: {', '.join(type_names)}. "
                "Pass the module as an argument of the function that is traced."
            )
    variables: list[int] = []
    changes: list[NodeChange] = []
    for index in changed:
        entry = structure.entries[index]
        if isinstance(entry, VariableEntry):
            variables.append(index)
        elif isinstance(entry, NodeEntry):
            # The entry of the module stays the same, because only arrays that it holds are new.
            change = node_changes(index, entry, structure, fresh)
            assert change is not None  # safe because the module gets a new array
            changes.append(change)
    operations = update_operations(structure, leaves, objects, variables, nodes=changes)
    finish()
    perform(operations)
    root_arrays = (leaves[slot] for slot in structure.root_slots)
    return assemble(structure.root, root_arrays, objects)
