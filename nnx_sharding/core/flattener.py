"""The walk behind :func:`~.flatten.flatten`: gives the objects of a graph indices and entries.

The words of this file:

    object    a module, a Variable, a ``jax.Ref`` or a mutable static object: these have identities
    index     the row of an object in the table of the structure (``structure.py``)
    link      a reference to an object; the first link gives the object its index
    entry     the description of an object in its row, made after it was linked
    child     what an entry holds in one place: an index, ``LEAF`` for an array, or a static value
    slot      the position of an array in the flat list ``leaves``
    static    a value that is no array, compared as ``static_equality.py`` says (``Static``)
    position  the place from which a recorder (``recording.py``) can read a value again, for a
              guard; ``UNRECORDED`` if there is none

Objects are described depth first, children before siblings, in the order in which Flax walks. In
Flax's tree mode (``graph=False``), a module that is met again is copied instead of shared.

A recorder gives positions to the leaves of a pytree, and to its *node data*: what a container has
besides children and plain keys. Without a recorder, ``ALL_UNRECORDED`` takes the place of these
positions, an endless iterator of ``UNRECORDED`` for any number of parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from .. import _compat
from ..specs.types import AnyArray
from .attributes import Described, describe_metadata, describe_node
from .hijax_variables import describe_hijax
from .recording import ALL_UNRECORDED, UNRECORDED
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

if TYPE_CHECKING:
    from .guard.recorder import WalkRecorder


@dataclasses.dataclass(eq=False, kw_only=True)
class Flattener:
    """One walk over a graph, with the options of :func:`~.flatten.flatten`.

    Attributes:
      graph: False for tree mode.
      objects: the objects, by index. The walk adds new objects behind those of the caller.
      replaced: the indices of modules among the caller's objects to which links do not lead any
        more.
      keeps_alive: whether the structure keeps alive statics that are compared by identity.
      held_weakly: the ids of objects that the structure never keeps alive.
      snapshot: the caller's objects as they were before a call, to reuse the entries of unchanged
        objects.
      recorder: is told what is read, for a guard. It becomes None when the walk meets something
        that no guard can compare.
      also_data: the ids of objects in static places that are data elsewhere.
      index_of: the index of each object, by id.
      entries, slots: the entry of each object, and the slots of its arrays, by index.
      leaves: the arrays, by slot.
      linked: the indices of the objects that were linked.
      has_repeats: whether any two links may lead to one object.
      left_out: the ids of modules with arrays in static places, to which these do not link.
      origins: the static objects that the structure keeps alive, by index.
      statics: the child and the value of each static value that was met, by id.
      forms: the forms of modules that were met, for ``_compat.node_items``.
      described: what layers with equal attributes or metadata share (``attributes.py``).
      no_tracers: types of attributes that are no tracers, so that each type is tested once; None
        within a trace, because modules hold tracers there.

    Private attributes:

        _pending   the indices of objects that were linked, but not yet described
        _current   the index of the object that is being described; -1 for none
        _holders   for the index of each object, the index of the object with the first link to it
    """

    graph: bool
    objects: list[Any]
    replaced: Set[int]
    keeps_alive: bool
    held_weakly: Set[int]
    snapshot: Snapshot | None
    recorder: WalkRecorder | None
    also_data: Set[int]

    def __post_init__(self) -> None:
        """Makes the table of the objects, without descriptions, and empty caches."""
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
        # The table keeps each value alive, so that no other object gets the id of the value.
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
        # Refs in an output are linked like modules, because one may be met twice. JAX refuses that
        # for inputs, so a ref is an array there.
        root, root_slots = self._describe_root(tree, link_refs=not is_input)
        # Statics come after the tree, so that an object in both has an index as data by now.
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
        # The positions may be endless, so zip is not strict.
        for leaf, position in zip(leaves, leaf_positions, strict=False):
            first_slot = len(self.leaves)
            children.append(self._leaf_child(leaf, position, link_refs=link_refs))
            root_slots += range(first_slot, len(self.leaves))  # one slot for an array, else none
            self.describe_pending()  # now, so that all arrays are in the order of the tree
        return self._container(treedef, children, data_positions), tuple(root_slots)

    def link_object(self, obj: object, position: int = UNRECORDED) -> int:
        """Records a link to an object, and returns its index; an object that has none gets one.

        ``position`` is where a recorder can read the link again.
        """
        identity = _compat.identity(obj)
        index = self.index_of.get(identity)
        # An object gets a new index if it is new, if links do not lead to its old entry any more,
        # or if tree mode makes a copy of the object here.
        is_copied = not self.graph and index is not None and self._is_copy(index)
        if index is None or index in self.replaced or is_copied:
            index = self.index_of[identity] = len(self.objects)
            self.objects.append(obj)
            self.entries.append(None)
            self.slots.append(())
            self._holders[index] = self._current
        return self.link_index(index, position)

    def _is_copy(self, index: int) -> bool:
        """Whether tree mode copies an object: a module that is met again, outside of a cycle."""
        obj = self.objects[index]
        if index not in self.linked or not _compat.is_node(obj):
            return False
        holder = self._current  # the object that is being described has the new link
        while holder >= 0:
            if self.objects[holder] is obj:
                return False  # copies of a cycle would go on without end
            holder = self._holders.get(holder, -1)
        return True

    def link_index(self, index: int, position: int = UNRECORDED) -> int:
        """Records a link to the object with an index, and returns the index.

        The first link to an object adds it to the objects that ``describe_pending`` describes.
        ``position`` is where a recorder can read the link again.
        """
        if self.recorder is not None:
            # Each link is recorded, because a guard compares which objects are shared.
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
        # A stack of indices takes the place of recursion, because models may be nested deeply.
        stack: list[int] = []
        while stack or self._pending:
            # Objects to which the last object links are described before its siblings, which are
            # further down in the stack. The top of the stack is the end of the list, so the first
            # link goes there last.
            stack += reversed(self._pending)
            self._pending.clear()
            index = self._current = stack.pop()
            first_slot = len(leaves)
            # This adds the object's arrays to ``leaves``, and linked objects to ``_pending``.
            self.entries[index] = self._describe(index, self.objects[index])
            num_leaves = len(leaves)
            # Most modules hold no arrays themselves, and have () in ``slots`` from the start.
            if num_leaves > first_slot:
                self.slots[index] = (*range(first_slot, num_leaves),)
        self._current = -1

    def _describe(self, index: int, obj: object) -> Entry:
        """Returns the entry of an object; links the objects in it, and adds its arrays.

        ``index`` is that of ``obj``, which has been linked already.
        """
        # The entry before the call is used again if nothing has changed but a Variable's array.
        earlier_entry = None if self.snapshot is None else self.snapshot.entry_of(index, obj)
        if earlier_entry is not None:
            if isinstance(earlier_entry, VariableEntry):
                self._add_leaf(_compat.get_value(obj))
            # The object may link to objects that have changed, so these have to be described.
            for child in children_of(earlier_entry):
                if type(child) is int:  # the index of an object
                    self.link_index(child)
            return earlier_entry
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
        static = describe_static(self, index, obj, position)  # None: not a static object
        if static is not None:
            return static
        # Only a ``jax.Ref`` is left. Its content is JAX's, so it counts as an array.
        self._add_leaf(obj, position)
        return RefEntry()

    def static_child(self, value: object, position: int = UNRECORDED) -> Child:
        """Returns the child for a static value (``static_children.py`` says which it is).

        ``position`` is where a recorder can read the value again.
        """
        child: Child
        # Nearly all static values are of these types, so they are tried first.
        if value is None or type(value) in (str, int, bool):
            child = Static.of(value)
        else:
            identity = _compat.identity(value)
            met_static = self.statics.get(identity)
            if met_static is not None:
                child, _ = met_static
                # A ``StaticObject`` may hold links to objects, and is now in two places.
                self.has_repeats |= isinstance(child, StaticObject)
            elif identity in self.index_of:  # the value has an entry, because it can change
                return self.link_index(self.index_of[identity], position)
            else:
                child = new_static_child(self, value, position)
        # A child that is no ``Static`` has been recorded part by part, where it was opened.
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
          position: where a recorder can read the pytree again.
          all_leaves: whether each leaf counts as an array. In a module, as opposed to a Variable,
            numbers and the like are static.
        """
        if _compat.is_plain_array(tree):  # tried first, because nearly all pytrees are arrays
            return self._add_leaf(tree, position)
        leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=_compat.is_graph_object)
        leaf_positions, data_positions = ALL_UNRECORDED, ALL_UNRECORDED
        if self.recorder is not None:
            leaf_positions, data_positions = self.recorder.open_tree(position, tree, treedef)
        children = [
            self._leaf_child(leaf, leaf_position, all_leaves=all_leaves)
            # The positions may be endless, so zip is not strict.
            for leaf, leaf_position in zip(leaves, leaf_positions, strict=False)
        ]
        return self._container(treedef, children, data_positions)

    def _leaf_child(
        self, leaf: Any, position: int, *, all_leaves: bool = True, link_refs: bool = True
    ) -> Child:
        """Returns the child for a leaf of a pytree: an array, an object, or a static value.

        Args:
          position: where a recorder can read the leaf again.
          all_leaves: whether any leaf counts as an array. In attributes of a module, numbers and
            the like are static.
          link_refs: whether a ``jax.Ref`` is an object that may be shared, not an array.
        """
        # Objects are tested first, because a hijax Variable and a ref are tracers in a trace, and
        # tracers are arrays to the tests below.
        is_object = _compat.is_graph_object(leaf) or _compat.is_hijax_variable(leaf)
        if is_object or (link_refs and _compat.is_ref(leaf)):
            return self.link_object(leaf, position)
        if isinstance(leaf, Static):  # the transform has declared the leaf static
            return self.static_child(leaf.value, position)
        if all_leaves or isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
            return self._add_leaf(leaf, position)
        return self.static_child(leaf, position)

    def _container(
        self, treedef: PyTreeDef, children: Sequence[Child], data_positions: Iterable[int]
    ) -> Child:
        """Returns the child for a pytree: a ``Container``, or its only child if it is a leaf.

        Args:
          data_positions: where a recorder can read the data of the nodes again.
        """
        if is_leaf_treedef(treedef):
            return children[0]
        # The treedef has the data of its nodes as well, but compares the data by ``==``, to which 1
        # and True are equal. So the data is also kept as static values.
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
