"""The walk behind :func:`~.flatten.flatten`: gives the objects of a graph indices and entries.

The words of this file:

    object    what has an identity: a module, a Variable, a ``jax.Ref``, a mutable static object
    index     the row of an object in the table of the structure (``structure.py``)
    link      a reference to an object; the first one gives the object its index
    entry     the description of an object in its row, made after it was linked
    child     what an entry holds in one place: an index, ``LEAF`` for an array, or a static value
    slot      the position of an array in the flat list ``leaves``
    static    a value that is no array, compared as ``static_equality.py`` says (``Static``)
    position  where a recorder (``recording.py``) can read a value again, for a guard;
              ``UNRECORDED`` if nowhere

Objects are described depth first, children before siblings, in the order in which Flax walks. In
Flax's tree mode (``graph=False``), a module that is met again is copied instead of shared.

A recorder gives positions to the parts of a pytree: those of its leaves, and those of its *node
data*, which are what a container has besides children and plain keys. Without a recorder, both are
``ALL_UNRECORDED``: an endless iterator of ``UNRECORDED``, for any number of parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence, Set
from typing import Any

import jax
import numpy as np

from .. import _compat
from ..specs.types import AnyArray
from .attributes import Described, describe_metadata, describe_node
from .hijax_variables import describe_hijax
from .recording import ALL_UNRECORDED, UNRECORDED, ReadRecorder
from .snapshot import Snapshot
from .static_children import describe_static, new_static_child
from .static_equality import Static
from .structure import (
    LEAF,
    Child,
    Container,
    Entry,
    RefEntry,
    StaticObject,
    Structure,
    VariableEntry,
    children_of,
)
from .treedefs import PyTreeDef, aux_of, is_leaf_treedef


@dataclasses.dataclass(eq=False, kw_only=True)
class Flattener:
    """One walk over a graph, with the options of :func:`~.flatten.flatten`.

    Attributes:
      graph: False for tree mode.
      objects: by index: at first those before the call, to which the walk adds others.
      replaced: the indices of modules among these that links do not lead to any more.
      keeps_alive: whether the structure keeps alive statics that are compared by identity.
      held_weakly: the ids of objects that it never keeps alive.
      snapshot: the first objects as they were before, to reuse the entries of unchanged ones.
      recorder: is told what is read, for a guard; None from anything on that no guard can compare.
      also_data: the ids of objects in static places that are data elsewhere.
      index_of: the index of each object, by its id.
      entries, slots: the entry of each object, and the slots of its arrays, by index.
      leaves: the arrays, by slot.
      linked: the indices of the objects that were linked.
      has_repeats: whether any two links may lead to one object.
      left_out: the ids of modules with arrays in static places, which do not link to them.
      origins: the static objects that the structure keeps alive, by index.
      statics: by the id of each static value that was met, its child and the value.
      forms: the forms of modules that were met, for ``_compat.node_items``.
      described: what layers with equal attributes or metadata share (``attributes.py``).
      no_tracers: types of attributes that are no tracers, to ask once for each; None within a
        trace, where modules hold tracers.

    Its private attributes:

        _pending   the indices of objects that were linked, but not yet described
        _current   the index of the object that is being described; -1 for none
        _holders   for the index of each object, that of the object that has the first link to it
    """

    graph: bool
    objects: list[Any]
    replaced: Set[int]
    keeps_alive: bool
    held_weakly: Set[int]
    snapshot: Snapshot | None
    recorder: ReadRecorder | None
    also_data: Set[int]

    def __post_init__(self) -> None:
        """Makes the table of the objects, of which none is described, and the caches."""
        self.index_of = {_compat.identity(obj): i for i, obj in enumerate(self.objects)}
        self.entries: list[Entry | None] = [None] * len(self.objects)  # None: not yet described
        self.slots: list[tuple[int, ...]] = [()] * len(self.objects)
        self.leaves: list[Any] = []
        self.origins: dict[int, Any] = {}
        self.linked: set[int] = set()
        self.has_repeats = False
        self.left_out: set[int] = set()
        self._pending: list[int] = []
        self._current = -1
        self._holders: dict[int, int] = {}
        self.no_tracers: set[type[Any]] | None = set() if _compat.trace_is_clean() else None
        # With the value, to keep it alive, so that no other object gets its id.
        self.statics: dict[int, tuple[Static | StaticObject, Any]] = {}
        self.forms: dict[Any, _compat.NodeForm] = {}
        self.described: dict[Hashable, Described] = {}

    def describe(self, tree: object, statics: Sequence[object], *, is_input: bool) -> Structure:
        """Returns the structure of a tree and static arguments; called once for each walk.

        Args:
          tree: the pytree, whose objects get the next indices in the order of the walk.
          statics: the static arguments of a function.
          is_input: whether the tree is the input of a function, not its output.
        """
        num_first = len(self.objects)
        # A ref is linked like a module where it may be met twice: JAX refuses that for inputs.
        root, root_slots = self._describe_root(tree, link_refs=not is_input)
        # After the tree, so that an object in both is data first, and known to be so here.
        recorder = self.recorder
        positions = ALL_UNRECORDED if recorder is None else recorder.static_positions
        static_children = tuple(map(self.static_child, statics, positions))
        # The first objects have an entry even if nothing in the tree refers to them any more.
        for index in range(num_first):
            if index not in self.replaced and index not in self.linked:
                self.link_index(index)
        self.describe_pending()
        structure = Structure(
            entries=tuple(self.entries),
            root=root,
            slots=tuple(self.slots),
            root_slots=root_slots,
            statics=static_children,
            origins=self.origins,
        )
        structure.shares = self.has_repeats
        return structure

    def _describe_root(self, tree: object, *, link_refs: bool) -> tuple[Child, tuple[int, ...]]:
        """Returns the child for the flattened tree, and the slots of its arrays outside of objects.

        ``link_refs`` says whether a ``jax.Ref`` is an object that may be shared, not an array.
        """
        leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=_compat.is_graph_object)
        leaf_positions, data_positions = ALL_UNRECORDED, ALL_UNRECORDED
        if self.recorder is not None:
            leaf_positions, data_positions = self.recorder.open_arguments(treedef)
        children: list[Child] = []
        root_slots: list[int] = []
        # Not strict, since the positions may be endless.
        for leaf, position in zip(leaves, leaf_positions, strict=False):
            first_slot = len(self.leaves)
            children.append(self._leaf_child(leaf, position, link_refs=link_refs))
            root_slots += range(first_slot, len(self.leaves))  # one if it is an array, else none
            self.describe_pending()  # at once, so that all arrays are in the order of the tree
        return self._container(treedef, children, data_positions), tuple(root_slots)

    def link_object(self, obj: object, position: int = UNRECORDED) -> int:
        """Records a link to an object, and returns its index; an object that has none gets one.

        ``position`` is where a recorder can read the link again.
        """
        identity = _compat.identity(obj)
        index = self.index_of.get(identity)
        # An object gets a new index if it is new, if links do not lead to its old entry any more,
        # or in tree mode, if Flax makes a copy of it here.
        is_copied = not self.graph and index is not None and self._is_copy(index)
        if index is None or index in self.replaced or is_copied:
            index = self.index_of[identity] = len(self.objects)
            self.objects.append(obj)
            self.entries.append(None)
            self.slots.append(())
            self._holders[index] = self._current  # this is the first link to it
        return self.link_index(index, position)

    def _is_copy(self, index: int) -> bool:
        """Whether tree mode copies an object that is met again: a module, unless in a cycle."""
        obj = self.objects[index]
        if index not in self.linked or not _compat.is_node(obj):
            return False
        holder = self._current  # the object with the new link; then what holds this, and so on
        while holder >= 0:
            if self.objects[holder] is obj:
                return False  # a cycle: copies would go on without end
            holder = self._holders.get(holder, -1)
        return True

    def link_index(self, index: int, position: int = UNRECORDED) -> int:
        """Records a link to the object with an index, and returns the index.

        The first link to an object adds it to those that are to be described.
        """
        if self.recorder is not None:  # each link, since a guard compares which objects are shared
            self.recorder.add_object(position, index)
        if index in self.linked:
            self.has_repeats = True
        else:
            self.linked.add(index)
            self._pending.append(index)
        return index

    def describe_pending(self) -> None:
        """Describes all linked objects, and the objects they link to, children before siblings."""
        leaves = self.leaves
        stack: list[int] = []  # of indices; no recursion, since models may be nested deeply
        while stack or self._pending:
            # What the last object links to is described next, before its siblings further down in
            # the stack. Reversed, since the end of a list is its top.
            stack += reversed(self._pending)
            self._pending.clear()
            index = self._current = stack.pop()
            first_slot = len(leaves)
            # Adds its arrays to ``leaves``, and the objects that it links to, to ``_pending``.
            self.entries[index] = self._describe(index, self.objects[index])
            num_leaves = len(leaves)
            if num_leaves > first_slot:  # most modules hold no arrays themselves: () is there
                self.slots[index] = (*range(first_slot, num_leaves),)
        self._current = -1

    def _describe(self, index: int, obj: object) -> Entry:
        """Returns the entry of an object; links the objects in it, and adds its arrays."""
        # An entry of before, if the object is unchanged since, except for a Variable's array.
        known_entry = None if self.snapshot is None else self.snapshot.entry_of(index, obj)
        if known_entry is not None:
            if isinstance(known_entry, VariableEntry):
                self._add_leaf(_compat.get_value(obj))
            for child in children_of(known_entry):  # it may link to objects that did change
                if type(child) is int:  # the index of one
                    self.link_index(child)
            return known_entry
        recorder = self.recorder
        position = UNRECORDED if recorder is None else recorder.object_positions[index]
        if _compat.is_node(obj):
            return describe_node(self, obj, position)
        if _compat.is_variable(obj):
            metadata, value = describe_metadata(self, obj, position), _compat.get_value(obj)
            value_position = UNRECORDED
            if recorder is not None:
                value_position = recorder.open_variable(position, obj, value)
            return VariableEntry(type(obj), metadata, self.pytree_child(value, value_position))
        if _compat.is_hijax_variable(obj):
            return describe_hijax(self, obj, position)
        static = describe_static(self, index, obj, position)
        if static is not None:
            return static
        # Only a ``jax.Ref`` is left, which has no content for us: it counts as an array.
        self._add_leaf(obj, position)
        return RefEntry()

    def static_child(self, value: object, position: int = UNRECORDED) -> Child:
        """Returns the child for a static value (``static_children.py`` says which it is).

        ``position`` is where a recorder can read the value again.
        """
        child: Child
        if value is None or type(value) in (str, int, bool):  # nearly all, so tried first
            child = Static.of(value)
        elif (known := self.statics.get(_compat.identity(value))) is not None:  # met before
            child, _ = known
            # A ``StaticObject`` may hold links to objects, and is now in two places.
            self.has_repeats |= isinstance(child, StaticObject)
        elif (index := self.index_of.get(_compat.identity(value))) is not None:
            return self.link_index(index, position)  # it has an entry, as an object that can change
        else:
            child = new_static_child(self, value, position)
        # Others are recorded part by part, where they are opened.
        if position != UNRECORDED and self.recorder is not None and isinstance(child, Static):
            self.recorder.add_static(position, value, child)
        return child

    def is_kept_alive(self, value: object) -> bool:
        """Whether the structure keeps alive a static object that is compared by identity."""
        return self.keeps_alive and _compat.identity(value) not in self.held_weakly

    def pytree_child(
        self, tree: object, position: int = UNRECORDED, *, all_leaves: bool = True
    ) -> Child:
        """Returns the child for a pytree in an object: a ``Container``, or that for its only leaf.

        Args:
          tree: any pytree, also a single array; its arrays are added to the leaves.
          position: where a recorder can read it again.
          all_leaves: whether each leaf counts as an array. In a module, as opposed to a Variable,
            numbers and the like are static.
        """
        if _compat.is_plain_array(tree):  # nearly all, so tried first
            return self._add_leaf(tree, position)
        leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=_compat.is_graph_object)
        leaf_positions, data_positions = ALL_UNRECORDED, ALL_UNRECORDED
        if self.recorder is not None:
            leaf_positions, data_positions = self.recorder.open_tree(position, tree, treedef)
        children = [
            self._leaf_child(leaf, leaf_position, all_leaves=all_leaves)
            # Not strict, since the positions may be endless.
            for leaf, leaf_position in zip(leaves, leaf_positions, strict=False)
        ]
        return self._container(treedef, children, data_positions)

    def _leaf_child(
        self, leaf: Any, position: int, *, all_leaves: bool = True, link_refs: bool = True
    ) -> Child:
        """Returns the child for a leaf of a pytree: an array, an object, or a static value.

        Args:
          leaf: the leaf.
          position: where a recorder can read it again.
          all_leaves: whether it counts as an array whatever it is. In attributes of a module,
            numbers and the like are static.
          link_refs: whether a ``jax.Ref`` is an object that may be shared, not an array.
        """
        # Objects first: in a trace, a hijax Variable and a ref are tracers, as arrays are.
        is_object = _compat.is_graph_object(leaf) or _compat.is_hijax_variable(leaf)
        if is_object or (link_refs and _compat.is_ref(leaf)):
            return self.link_object(leaf, position)
        if isinstance(leaf, Static):  # the transform declared it static, also among arguments
            return self.static_child(leaf.value, position)
        if all_leaves or isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
            return self._add_leaf(leaf, position)
        return self.static_child(leaf, position)

    def _container(
        self, treedef: PyTreeDef, children: Sequence[Child], data_positions: Iterable[int]
    ) -> Child:
        """Returns the child for a pytree: a ``Container``, or its only child if it is a leaf.

        Args:
          treedef: describes the pytree.
          children: one for each of its leaves.
          data_positions: where a recorder can read the data of its nodes again.
        """
        if is_leaf_treedef(treedef):
            return children[0]
        # The treedef has the data of its nodes as well, but compares them by ``==`` only: there 1
        # and True are equal. As static values they are not.
        aux = map(self.static_child, aux_of(treedef), data_positions)
        return Container(treedef, tuple(children), tuple(aux))

    def _add_leaf(self, value: AnyArray, position: int = UNRECORDED) -> Child:
        """Adds an array to the leaves; drops the recorder at a tracer, which no guard compares."""
        if self.recorder is not None:
            self.recorder.leaf_positions.append(position)
            if type(value) is not _compat.ArrayImpl and isinstance(value, jax.core.Tracer):
                self.recorder = None
        self.leaves.append(value)
        return LEAF
