"""A graph of NNX objects → a :class:`~nnx_sharding.core.structure.Structure` and flat arrays."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _compat
from ..errors import raise_listed
from ..specs.paths import path_string
from .snapshot import Snapshot, node_state
from .static_equality import Static, content_of
from .static_parts import is_fixed
from .structure import (
    LEAF,
    Child,
    Container,
    Entry,
    Group,
    NodeEntry,
    PyTreeDef,
    RefEntry,
    StaticEntry,
    Structure,
    VariableEntry,
    children_of,
    is_leaf_treedef,
)
from .unflatten import picker


class Flat(NamedTuple):
    """A flattened graph."""

    structure: Structure
    leaves: Sequence[Any]  # by slot
    objects: Sequence[Any]  # by entry
    updatable: bool = False  # whether all objects are known to belong to the current trace


def flatten(
    tree: Any,
    *,
    graph: bool = True,
    known: Sequence[Any] | None = None,
    copied: Set[int] = frozenset(),
    statics: Sequence[Any] = (),
    held: bool = True,
    borrowed: Set[int] = frozenset(),
    snapshot: Snapshot | None = None,
) -> Flat:
    """Flattens a pytree of NNX objects, arrays and scalars; changes nothing.

    Args:
      tree: any pytree; NNX objects in it may share references and form cycles.
      graph: False for Flax's tree mode: no Variable may be shared, and each leaf of data is an
        array.
      known: objects that get the first indices. None if ``tree`` is a function's input, not its
        output.
      copied: the indices of known modules whose entries are None; new ones take their place.
      statics: static arguments.
      held: whether the structure keeps alive static objects that are compared by identity.
      borrowed: the ids of objects that it never keeps alive.
      snapshot: the known objects as they were before; unchanged ones keep their entries.

    Raises:
      ValueError: in tree mode, an object is not a pytree, or ``tree`` is not one.
    """
    flattener = _Flattener(graph, known or (), copied, held, borrowed, snapshot)
    root_slots: list[int] = []
    # JAX itself refuses a ref that is passed twice; results may share one.
    root = flattener.pytree(tree, root_slots, link_refs=known is not None, is_root=True)
    static_children = tuple(map(flattener.static, statics))
    for index in range(len(known or ())):
        if index not in copied:
            flattener.link_index(index)
    flattener.describe_pending()
    structure = Structure(
        tuple(flattener.entries),
        root,
        tuple(flattener.slots),
        tuple(root_slots),
        static_children,
        flattener.origins,
    )
    if not graph and known is None:
        _check_tree(structure)
    return Flat(structure, flattener.leaves, flattener.objects)


class _Row:
    """The last node with these names and data whose statics cannot change, which others share."""

    __slots__ = ("children", "keys", "others", "pick", "statics")

    def __init__(self, items: _compat.NodeItems):
        self.keys = items.keys  # held because its id is the key of this row
        is_static = [is_data is False for is_data in items.is_data]
        self.pick = picker([i for i, static in enumerate(is_static) if static])
        self.others = [i for i, static in enumerate(is_static) if not static]
        self.statics: Sequence[Any] = ()
        self.children: list[Any] = []


class _Flattener:
    """One walk over a graph. Entries are in the order of discovery, depth first."""

    def __init__(
        self,
        graph: bool,
        known: Sequence[Any],
        copied: Set[int],
        held: bool,
        borrowed: Set[int],
        snapshot: Snapshot | None,
    ):
        self.graph = graph
        self.held = held
        self.borrowed = borrowed
        self.snapshot = snapshot
        self.tracing = not _compat.trace_is_clean()
        self.objects: list[Any] = list(known)
        self.index = {id(obj): i for i, obj in enumerate(known)}
        self.entries: list[Entry | None] = [None] * len(known)
        self.slots: list[tuple[int, ...]] = [()] * len(known)
        self.leaves: list[Any] = []
        self.origins: dict[int, Any] = {}
        self._copied = copied
        self._parents: dict[int, int] = {}
        self._described = -1
        self._linked: set[int] = set()
        self._pending: list[int] = []
        # By id, with the value to keep it alive, so that no other object gets its id.
        self._statics: dict[int, tuple[Static | Group, Any]] = {}
        self._forms: dict[Any, Any] = {}
        self._rows: dict[int, _Row] = {}
        self._metadata: dict[tuple[Any, ...], tuple[tuple[tuple[str, Child], ...], list[Any]]] = {}

    def link(self, obj: Any) -> int:
        """The index of an object, which will be described if this is the first link to it."""
        index = self.index.get(id(obj))
        if index is None or index in self._copied or (not self.graph and self._repeats(index)):
            index = self.index[id(obj)] = len(self.objects)
            self.objects.append(obj)
            self.entries.append(None)
            self.slots.append(())
            if not self.graph:
                self._parents[index] = self._described
        self.link_index(index)
        return index

    def _repeats(self, index: int) -> bool:
        """Whether a link to an object of a tree is to a copy: to a module again, in no cycle."""
        obj, above = self.objects[index], self._described
        while above >= 0 and self.objects[above] is not obj:
            above = self._parents.get(above, -1)
        return above < 0 and index in self._linked and _compat.is_node(obj)

    def link_index(self, index: int) -> None:
        """Describes the object with an index, if it is not yet."""
        if index not in self._linked:
            self._linked.add(index)
            self._pending.append(index)

    def describe_pending(self) -> None:
        """Describes all linked objects, and those that they link to, children before siblings."""
        stack: list[int] = []  # no recursion: models may be nested deeply
        while stack or self._pending:
            stack += reversed(self._pending)
            self._pending.clear()
            index = self._described = stack.pop()
            slots: list[int] = []
            self.entries[index] = self._describe(index, self.objects[index], slots)
            self.slots[index] = tuple(slots)
        self._described = -1

    def _describe(self, index: int, obj: Any, slots: list[int]) -> Entry:
        entry = None if self.snapshot is None else self.snapshot.entry_of(index, obj)
        if entry is not None:
            for child in children_of(entry):
                if type(child) is int:
                    self.link_index(child)
            if isinstance(entry, VariableEntry):
                self._leaf(_compat.get_value(obj), slots)
            return entry
        if _compat.is_variable(obj):
            metadata, value = self._describe_metadata(obj), _compat.get_value(obj)
            is_array = type(value) is _compat.ArrayImpl
            child = self._leaf(value, slots) if is_array else self.pytree(value, slots)
            return VariableEntry(type(obj), metadata, child)
        if _compat.is_node(obj):
            return self._describe_node(obj, slots)
        content = content_of(obj)
        if content is None:
            self._leaf(obj, slots)
            return RefEntry()
        if self._holds(obj):
            self.origins[index] = obj
        if not content.shallow:
            return StaticEntry(content.kind, tuple(map(self.static, content.parts)))
        # Not from `static`: elsewhere the same object may be compared by content.
        parts = [Static.of(part, hold=self._holds(part)) for part in content.parts]
        return StaticEntry(content.kind, tuple(parts), Static(obj, self._holds(obj)))

    def _describe_metadata(self, variable: Any) -> tuple[tuple[str, Child], ...]:
        """The metadata of a Variable: one tuple for all Variables with the same objects in it."""
        metadata = _compat.get_metadata(variable)
        values = [*metadata.values()]
        key = (*metadata, *map(id, values))
        known = self._metadata.get(key)
        if known is None:
            items = sorted(metadata.items())
            known = tuple([(name, self.static(setting)) for name, setting in items]), values
            if all(isinstance(child, Static) for _, child in known[0]):  # links must be counted
                self._metadata[key] = known
        return known[0]

    def _describe_node(self, obj: Any, slots: list[int]) -> Entry:
        if not self.graph and not _compat.is_pytree_type(type(obj)):
            raise ValueError(
                f"{type(obj).__name__} is declared with pytree=False, so it cannot be used "
                "with graph=False. Use graph=True, or make the class a pytree."
            )
        items = _compat.node_items(obj, self._forms, tracing=self.tracing)
        row = self._rows.get(id(items.keys))
        if row is None:
            row = self._rows[id(items.keys)] = _Row(items)
        values = items.values
        statics = row.pick(values)
        is_known = row.children and all(map(operator.is_, statics, row.statics))
        children: list[Any] = [*row.children] if is_known else [None] * len(values)
        for i in row.others if is_known else range(len(values)):
            children[i] = self._attribute(values[i], items.is_data[i], slots)
        if not is_known and all(type(child) is Static for child in row.pick(children)):
            row.statics, row.children = statics, children
        return NodeEntry(type(obj), items.metadata, items.keys, tuple(children))

    def _attribute(self, value: Any, is_data: bool | None, slots: list[int]) -> Child:
        if is_data is False:
            return self.static(value)
        if _compat.is_graph_object(value):
            return self.link(value)
        if _compat.is_node_state(value):
            return node_state(value)
        # Flax turns any value under nnx.data into an array.
        all_leaves = not self.graph or (bool(is_data) and jax.tree_util.all_leaves([value]))
        return self.pytree(value, slots, all_leaves=all_leaves)

    def static(self, value: Any) -> Child:
        """The child for a static value: a static, or the index of an object that can change."""
        kind = type(value)
        if kind is str or kind is int or kind is bool or value is None:
            return Static.of(value)
        known = self._statics.get(id(value))
        if known is not None:
            return known[0]
        if (index := self.index.get(id(value))) is not None:
            self.link_index(index)
            return index
        static = Static.of(value, hold=self._holds(value))
        content = content_of(value) if static.by_identity else None
        if content is not None and not is_fixed(content.kind):
            return self.link(value)
        child: Static | Group = static
        if content is not None:
            child = Group(content.kind, tuple(map(self.static, content.parts)))
        self._statics[id(value)] = child, value
        return child

    def _holds(self, value: Any) -> bool:
        return self.held and id(value) not in self.borrowed

    def pytree(
        self,
        tree: Any,
        slots: list[int],
        *,
        all_leaves: bool = True,
        link_refs: bool = True,
        is_root: bool = False,
    ) -> Child:
        """The child for a pytree, the slots of whose arrays are added to ``slots``.

        Args:
          tree: the pytree.
          slots: the slots of the object that holds it.
          all_leaves: whether leaves that are not arrays are kept with the arrays; else as statics.
          link_refs: whether a ``jax.Ref`` is an object that may be shared; else it is a leaf.
          is_root: whether it is outside any object. Then its arrays and those of its objects are in
            its order.
        """
        parts, treedef = jax.tree_util.tree_flatten(tree, is_leaf=_compat.is_graph_object)
        children: list[Child] = []
        for part in parts:
            is_object = _compat.is_graph_object(part) or _compat.is_hijax_variable(part)
            if is_object or (link_refs and _compat.is_ref(part)):
                children.append(self.link(part))
            elif isinstance(part, Static):  # the transform declared it static
                children.append(self.static(part.value))
            elif all_leaves or isinstance(part, _ARRAYS):
                children.append(self._leaf(part, slots))
            else:
                children.append(self.static(part))
            if is_root:
                self.describe_pending()
        if is_leaf_treedef(treedef):
            return children[0]
        return Container(treedef, tuple(children), tuple(map(self.static, aux_of(treedef))))

    def _leaf(self, value: Any, slots: list[int]) -> Child:
        slots.append(len(self.leaves))
        self.leaves.append(value)
        return LEAF


_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


def aux_of(treedef: PyTreeDef) -> Iterator[Any]:
    """The auxiliary data of the node types of a pytree, except plain keys."""
    stack = [treedef]
    while stack:
        node = stack.pop()
        data = node.node_data()
        if data is None:
            continue
        if _compat.has_aux(*data):
            yield data[1]
        stack += reversed(node.children())


def _check_tree(structure: Structure) -> None:
    """Raises an error for what a tree cannot express: a shared Variable, or a cycle."""
    entries: Sequence[Any] = structure.entries
    duplicates = structure.shared_objects(structure.root)  # modules are copied, except in cycles
    if duplicates:
        paths = structure.paths_to_objects([((), structure.root)], limit=4)
        lines = [
            f"  {entries[index].type.__name__}: "
            + ", ".join(path_string(path) or "the root" for path in paths[index])
            for index in sorted(duplicates)
        ]
        head = "graph=False does not support shared references. Duplicates, found at paths:"
        raise_listed(ValueError, head, lines, "Remove the duplicates, or use graph=True.")
