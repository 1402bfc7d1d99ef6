"""The walk behind :func:`~.flatten.flatten`: gives the objects of a graph indices and entries.

The words of this file:

    object    what has an identity: a module, a Variable, a ``jax.Ref``, a mutable static object
    index     the row of an object in the table of the structure (``structure.py``)
    link      a reference to an object; the first one gives the object its index
    entry     the description of an object in its row, made after it was linked
    child     what an entry holds in one place: an index, ``LEAF`` for an array, or a static value
    slot      the position of an array in the flat list ``leaves``
    position  where a recorder (``recording.py``) can read a value again, for a guard

Objects are described depth first, children before siblings, in the order in which Flax walks.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence, Set
from itertools import compress, repeat
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _compat
from ..specs.types import AnyArray
from .hijax_variables import describe_hijax
from .problems import no_tree
from .recording import UNRECORDED, ReadRecorder, comparison_of
from .snapshot import Snapshot, node_state
from .static_children import describe_static, new_static_child
from .static_equality import Static
from .structure import (
    LEAF,
    Child,
    Container,
    Entry,
    NodeEntry,
    RefEntry,
    StaticObject,
    Structure,
    VariableEntry,
    children_of,
)
from .treedefs import aux_of, is_leaf_treedef


class _Described(NamedTuple):
    """Attributes or metadata that were described; objects with the same static values share it."""

    # Of a node: a child for each attribute, of which only static ones are shared. Of a Variable:
    # pairs of name and child.
    children: Sequence[Any]
    statics: Sequence[Any]  # the values that have to be the same
    comparisons: bytes  # how a guard compares each value, in the order of the dict
    form: _compat.NodeForm | None = None  # of a node; held because its id is the key


@dataclasses.dataclass(eq=False, kw_only=True)
class Flattener:
    """One walk over a graph, with the options of :func:`~.flatten.flatten`.

    The recorder is dropped (None) at anything that no guard can compare.
    """

    graph: bool
    objects: list[Any]  # by index
    replaced: Set[int]
    keeps_alive: bool
    held_weakly: Set[int]
    snapshot: Snapshot | None
    recorder: ReadRecorder | None
    also_data: Set[int]  # the ids of objects in static places that are data elsewhere

    def __post_init__(self) -> None:
        """Makes the table of the objects, of which none is described, and the caches."""
        self.index_of = {_compat.identity(obj): i for i, obj in enumerate(self.objects)}
        self.entries: list[Entry | None] = [None] * len(self.objects)  # None: not yet described
        self.slots: list[tuple[int, ...]] = [()] * len(self.objects)  # of the arrays of each object
        self.leaves: list[Any] = []
        self.origins: dict[int, Any] = {}  # the static objects, by index
        self.linked: set[int] = set()
        self.has_repeats = False  # whether two links lead to one object
        self.left_out: set[int] = set()  # the ids of modules that static places do not link to
        self._pending: list[int] = []  # linked, but not yet described
        self._current = -1  # the index of the object that is described; -1 for none
        self._parents: dict[int, int] = {}  # tells a cycle from a repeat, in tree mode
        # Types that hold no tracers; None within a trace, where the answer may be another one.
        self._no_tracers: set[type[Any]] | None = set() if _compat.trace_is_clean() else None
        # By id, with the value to keep it alive, so that no other object gets its id.
        self.statics: dict[int, tuple[Static | StaticObject, Any]] = {}
        # Equal layers share what their class, attributes and metadata say: computed once for all.
        self._forms: dict[Any, _compat.NodeForm] = {}
        self._nodes: dict[int, _Described] = {}  # by the id of the form
        self._metadata: dict[tuple[Any, ...], _Described] = {}  # by names and ids of values

    def describe(self, tree: object, statics: Sequence[object], *, is_input: bool) -> Structure:
        """Returns the structure of a tree and static arguments; called once for each walk.

        ``is_input`` says whether the tree is the input of a function, not its output.
        """
        num_first = len(self.objects)
        root_slots: list[int] = []
        # JAX itself refuses a ref that is passed twice; results may share one.
        root = self.pytree_child(tree, root_slots, link_refs=not is_input, is_root=True)
        recorder = self.recorder
        positions = repeat(UNRECORDED) if recorder is None else recorder.static_positions
        static_children = tuple(map(self.static_child, statics, positions))
        # The first objects have an entry even if nothing in the tree refers to them any more.
        for index in range(num_first):
            if index not in self.replaced and index not in self.linked:
                self.link_index(index)
        self.describe_pending()
        entries, slots = tuple(self.entries), tuple(self.slots)
        own_slots = tuple(root_slots)
        structure = Structure(entries, root, slots, own_slots, static_children, self.origins)
        structure.shares = self.has_repeats
        return structure

    def link_object(self, obj: object, position: int = UNRECORDED) -> int:
        """Returns the index of an object; the first link adds it to those to be described."""
        identity = _compat.identity(obj)
        index = self.index_of.get(identity)
        if index is None or index in self.replaced or (not self.graph and self._is_copy(index)):
            index = self.index_of[identity] = len(self.objects)
            self.objects.append(obj)
            self.entries.append(None)
            self.slots.append(())
            self._parents[index] = self._current
        return self.link_index(index, position)

    def _is_copy(self, index: int) -> bool:
        """Whether tree mode copies an object that is met again: a module, unless in a cycle."""
        # Looks for the object among those that the current one was met in.
        obj, above = self.objects[index], self._current
        while above >= 0 and self.objects[above] is not obj:
            above = self._parents.get(above, -1)
        return above < 0 and index in self.linked and _compat.is_node(obj)

    def link_index(self, index: int, position: int = UNRECORDED) -> int:
        """Records a link to the object with an index, and returns the index."""
        if self.recorder is not None:
            self.recorder.add_object(position, index)
        if index in self.linked:
            self.has_repeats = True
        else:
            self.linked.add(index)
            self._pending.append(index)
        return index

    def describe_pending(self) -> None:
        """Describes all linked objects, and the objects they link to, children before siblings."""
        stack: list[int] = []  # no recursion: models may be nested deeply
        while stack or self._pending:
            stack += reversed(self._pending)
            self._pending.clear()
            index = self._current = stack.pop()
            slots: list[int] = []
            self.entries[index] = self._describe(index, self.objects[index], slots)
            self.slots[index] = tuple(slots)
        self._current = -1

    def _describe(self, index: int, obj: object, slots: list[int]) -> Entry:
        """Returns the entry of an object; adds its arrays to leaves, their slots to ``slots``."""
        known_entry = None if self.snapshot is None else self.snapshot.entry_of(index, obj)
        if known_entry is not None:  # unchanged since the snapshot, except for a Variable's array
            if isinstance(known_entry, VariableEntry):
                self._add_leaf(_compat.get_value(obj), slots)
            for child in children_of(known_entry):  # it may link to objects that did change
                if type(child) is int:
                    self.link_index(child)
            return known_entry
        recorder = self.recorder
        position = UNRECORDED if recorder is None else recorder.object_positions[index]
        if _compat.is_node(obj):
            return self._describe_node(obj, slots, position)
        if _compat.is_variable(obj):
            metadata, value = self.describe_metadata(obj, position), _compat.get_value(obj)
            if recorder is not None:
                position = recorder.open_variable(position, obj, value)
            return VariableEntry(type(obj), metadata, self.pytree_child(value, slots, position))
        if _compat.is_hijax_variable(obj):
            return describe_hijax(self, obj, slots, position)
        static = describe_static(self, index, obj, position)
        if static is not None:
            return static
        self._add_leaf(obj, slots, position)  # only a ``jax.Ref`` is left
        return RefEntry()

    def _describe_node(self, node: object, slots: list[int], position: int) -> Entry:
        """Returns the entry of a module; links what it holds, adds the slots of its own arrays."""
        if not self.graph and not _compat.is_pytree_type(type(node)):
            raise no_tree(type(node))
        # ``values`` are those of the attributes, sorted by name. A guard reads them in the order of
        # the ``__dict__``: ``in_dict`` has them so, ``form.order`` the place of each there.
        form, values, in_dict = _compat.node_items(node, self._forms, self._no_tracers)
        if in_dict is None:
            self.recorder = None  # not all content is in the ``__dict__``, which a guard reads
        statics = [*compress(values, form.is_static)]
        # Nodes of one form (class and names) with the same statics share what describes these.
        known = self._nodes.get(_compat.identity(form))
        if known is not None and not all(map(operator.is_, statics, known.statics)):
            known = None
        children = [LEAF] * len(values) if known is None else [*known.children]
        positions: Sequence[int] = (UNRECORDED,) * len(values)  # by place in the ``__dict__``
        if self.recorder is not None:
            comparisons = b"" if known is None else known.comparisons  # empty: not yet known
            content = in_dict or values
            positions = self.recorder.open_node(position, form.names, content, comparisons)
        for i in range(len(values)) if known is None else form.others:
            place = positions[form.order[i]]
            children[i] = self._attribute_child(values[i], form.is_data[i], slots, place)
        if known is None:
            self._share_static_children(form, statics, children)
        return NodeEntry(type(node), form.metadata, form.keys, tuple(children))

    def _share_static_children(
        self, form: _compat.NodeForm, statics: Sequence[Any], children: Sequence[Child]
    ) -> None:
        """Keeps the children of a node, for others of its form with the same static values."""
        # Links from static attributes have to be counted at each node, so these are not shared.
        if not all(type(child) is Static for child in compress(children, form.is_static)):
            return
        by_place = bytearray(len(children))  # in the ``__dict__``
        for i in compress(range(len(children)), form.is_static):
            by_place[form.order[i]] = comparison_of(children[i])
        self._nodes[_compat.identity(form)] = _Described(children, statics, bytes(by_place), form)

    def describe_metadata(self, variable: object, position: int) -> tuple[tuple[str, Child], ...]:
        """Returns pairs of name and child for the metadata of a Variable, sorted by name.

        Variables with the same values share the result.
        """
        metadata = _compat.get_metadata(variable)
        names, values = (*metadata,), [*metadata.values()]
        key = (*names, *map(_compat.identity, values))
        known = self._metadata.get(key)
        positions: Sequence[int] = (UNRECORDED,) * len(values)  # in the order of the dict
        if self.recorder is not None:
            comparisons = b"" if known is None else known.comparisons
            positions = self.recorder.open_metadata(position, names, values, comparisons)
        if known is not None:
            return known.children  # type: ignore[return-value]
        by_name: dict[str, Child] = {}
        for i in sorted(range(len(names)), key=names.__getitem__):
            by_name[names[i]] = self.static_child(values[i], positions[i])
        children = tuple(by_name.items())
        # Links to objects have to be counted at each Variable, so these are not shared.
        if all(type(child) is Static for child in by_name.values()):
            comparisons = bytes(comparison_of(by_name[name]) for name in names)
            self._metadata[key] = _Described(children, values, comparisons)
        return children

    def _attribute_child(
        self, value: object, is_data: bool | None, slots: list[int], position: int
    ) -> Child:
        """Returns the child for an attribute.

        ``is_data`` says whether Flax has it as data; None where the value decides.
        """
        if is_data is False:
            return self.static_child(value, position)
        if _compat.is_graph_object(value):
            return self.link_object(value, position)
        if _compat.is_node_state(value):
            if self.recorder is not None:
                self.recorder.open_node_state(position, value)
            return node_state(_compat.node_flags(value))
        # Flax turns any value under nnx.data into an array.
        all_leaves = not self.graph or (bool(is_data) and jax.tree_util.all_leaves([value]))
        return self.pytree_child(value, slots, position, all_leaves=all_leaves)

    def static_child(self, value: object, position: int = UNRECORDED) -> Child:
        """Returns the child for a static value (``static_children.py`` says which it is)."""
        child: Child
        if value is None or type(value) in (str, int, bool):  # nearly all, so tried first
            child = Static.of(value)
        elif (known := self.statics.get(_compat.identity(value))) is not None:
            child = known[0]
            self.has_repeats |= isinstance(child, StaticObject)  # which may hold links
        elif (index := self.index_of.get(_compat.identity(value))) is not None:
            return self.link_index(index, position)
        else:
            child = new_static_child(self, value, position)
        if position != UNRECORDED and self.recorder is not None and isinstance(child, Static):
            self.recorder.add_static(position, value, child)
        return child

    def is_kept_alive(self, value: object) -> bool:
        """Whether the structure keeps alive a static object that is compared by identity."""
        return self.keeps_alive and _compat.identity(value) not in self.held_weakly

    def pytree_child(
        self,
        tree: object,
        slots: list[int],
        position: int = UNRECORDED,
        *,
        all_leaves: bool = True,
        link_refs: bool = True,
        is_root: bool = False,
    ) -> Child:
        """Returns the child for a pytree: a ``Container``, or the child for its only leaf.

        Args:
          tree: any pytree, also a single array.
          slots: gets the slots of its arrays, which are added to the leaves.
          position: where a recorder can read it again.
          all_leaves: False if leaves that are not arrays, such as numbers, are static.
          link_refs: whether a ``jax.Ref`` is an object that may be shared, not an array.
          is_root: whether its objects are described at once, so that all arrays are in its order.
        """
        if _compat.is_plain_array(tree):
            return self._add_leaf(tree, slots, position)
        parts, treedef = jax.tree_util.tree_flatten(tree, is_leaf=_compat.is_graph_object)
        leaf_positions: Iterable[int] = repeat(UNRECORDED)
        aux_positions: Iterable[int] = repeat(UNRECORDED)
        if self.recorder is not None and is_root:
            leaf_positions, aux_positions = self.recorder.open_arguments(treedef)
        elif self.recorder is not None:
            leaf_positions, aux_positions = self.recorder.open_tree(position, tree, treedef)
        children: list[Child] = []
        for part, place in zip(parts, leaf_positions, strict=False):  # `repeat` has no end
            is_object = _compat.is_graph_object(part) or _compat.is_hijax_variable(part)
            if is_object or (link_refs and _compat.is_ref(part)):
                children.append(self.link_object(part, place))
            elif isinstance(part, Static):  # the transform declared it static
                children.append(self.static_child(part.value, place))
            elif all_leaves or isinstance(part, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
                children.append(self._add_leaf(part, slots, place))
            else:
                children.append(self.static_child(part, place))
            if is_root:
                self.describe_pending()
        if is_leaf_treedef(treedef):
            return children[0]
        aux = map(self.static_child, aux_of(treedef), aux_positions)
        return Container(treedef, tuple(children), tuple(aux))

    def _add_leaf(self, value: AnyArray, slots: list[int], position: int = UNRECORDED) -> Child:
        """Adds an array, and its slot to ``slots``; drops the recorder at a tracer."""
        if self.recorder is not None:
            self.recorder.leaf_positions.append(position)
            if type(value) is not _compat.ArrayImpl and isinstance(value, jax.core.Tracer):
                self.recorder = None
        slots.append(len(self.leaves))
        self.leaves.append(value)
        return LEAF
