"""A graph of NNX objects → a :class:`~nnx_sharding.core.structure.Structure` and flat arrays."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence, Set
from itertools import compress, repeat
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _compat
from .hijax_variables import describe_hijax
from .problems import no_tree
from .recording import NOWHERE, ReadRecorder, comparison_of
from .snapshot import Snapshot, node_state
from .static_equality import Static, content_of
from .static_objects import describe_parts, describe_static, is_linked
from .static_parts import is_fixed
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


class Flat(NamedTuple):
    """A flattened graph."""

    structure: Structure
    leaves: Sequence[Any]  # by slot
    objects: Sequence[Any]  # by entry
    updatable: bool = False  # whether all objects are known to belong to the current trace
    recorder: ReadRecorder | None = None  # of the walk through the graph


def flatten(
    tree: object,
    *,
    graph: bool = True,
    known: Sequence[Any] | None = None,
    copied: Set[int] = frozenset(),
    statics: Sequence[object] = (),
    held: bool = True,
    borrowed: Set[int] = frozenset(),
    snapshot: Snapshot | None = None,
    recorder: ReadRecorder | None = None,
    shown: Set[int] = frozenset(),
) -> Flat:
    """Flattens a pytree of NNX objects, arrays and scalars.

    Args:
      tree: any pytree; NNX objects in it may share references and form cycles.
      graph: False for Flax's tree mode, in which each leaf of data is an array, and a module that
        is met again another one.
      known: objects that get the first indices; None if ``tree`` is the input of a function.
      copied: the indices of known modules whose entries are None; new ones take their place.
      statics: static arguments.
      held: whether the structure keeps alive static objects that are compared by identity.
      borrowed: the ids of objects that it never keeps alive.
      snapshot: the known objects as they were before; unchanged ones keep their entries.
      recorder: takes down what is read, for a guard.
      shown: the ids of objects in static places that are data elsewhere.
    """
    options: Any = {"graph": graph, "copied": copied, "held": held, "borrowed": borrowed}
    options |= {"snapshot": snapshot, "recorder": recorder, "shown": shown}
    flattener = Flattener(objects=[*(known or ())], **options)
    root_slots: list[int] = []
    # JAX itself refuses a ref that is passed twice; results may share one.
    root = flattener.pytree(tree, root_slots, link_refs=known is not None, is_root=True)
    places = repeat(NOWHERE) if recorder is None else recorder.static
    static_children = tuple(map(flattener.static, statics, places))
    for index in range(len(known or ())):
        if index not in copied and index not in flattener.linked:
            flattener.link_index(index)
    flattener.describe_pending()
    met_later = flattener.hidden.intersection(flattener.index)
    if met_later:
        options |= {"shown": shown | met_later, "recorder": recorder and recorder.restarted()}
        return flatten(tree, known=known, statics=statics, **options)
    slots = tuple(flattener.slots), tuple(root_slots)
    entries, origins = tuple(flattener.entries), flattener.origins
    structure = Structure(entries, root, *slots, static_children, origins)
    structure.shares = flattener.has_repeats
    return Flat(structure, flattener.leaves, flattener.objects, recorder=flattener.recorder)


class _Row(NamedTuple):
    """The statics of a node, with its children at them; other nodes of its form share them."""

    form: _compat.NodeForm  # held because its id is the key of this row
    values: Sequence[Any]
    children: Sequence[Any]
    rules: bytes  # how a guard compares the items of the dict


@dataclasses.dataclass(eq=False)
class Flattener:
    """One walk over a graph. Entries are in the order of discovery, depth first.

    ``at`` is the position of a value in the stream of the recorder. That is dropped where there is
    something that no guard can compare.
    """

    graph: bool
    objects: list[Any]
    copied: Set[int]
    held: bool
    borrowed: Set[int]
    snapshot: Snapshot | None
    recorder: ReadRecorder | None
    shown: Set[int]

    def __post_init__(self) -> None:
        # The table: an object's index is its position in these three lists.
        self.index = {_compat.identity(obj): i for i, obj in enumerate(self.objects)}
        self.entries: list[Entry | None] = [None] * len(self.objects)  # None: not yet described
        self.slots: list[tuple[int, ...]] = [()] * len(self.objects)  # positions in `leaves`
        self.leaves: list[Any] = []
        self.origins: dict[int, Any] = {}  # the static objects, by index
        self.linked: set[int] = set()
        self.has_repeats = False  # whether two links lead to one object
        # The ids of objects with arrays in static places, which are not parts of the graph.
        self.hidden: set[int] = set()
        self._pending: list[int] = []  # linked, but not yet described
        self._current = -1  # the index of the object that is described; -1 for none
        self._parents: dict[int, int] = {}  # only of trees, to tell a cycle from a repeat
        # Types that hold no tracers; None within a trace, where the answer may be another one.
        self._no_tracers: set[type[Any]] | None = set() if _compat.trace_is_clean() else None
        # By id, with the value to keep it alive, so that no other object gets its id.
        self._statics: dict[int, tuple[Static | StaticObject, Any]] = {}
        # Equal layers share what their class, attributes and metadata say: computed once for all.
        self._forms: dict[Any, _compat.NodeForm] = {}
        self._rows: dict[int, _Row] = {}
        self._metadata: dict[tuple[Any, ...], tuple[Any, Sequence[Any], bytes]] = {}

    def link(self, obj: object, at: int = NOWHERE) -> int:
        """The index of an object, which will be described if this is the first link to it."""
        index = self.index.get(_compat.identity(obj))
        if index is None or index in self.copied or (not self.graph and self._repeats(index)):
            index = self.index[_compat.identity(obj)] = len(self.objects)
            self.objects.append(obj)
            self.entries.append(None)
            self.slots.append(())
            if not self.graph:
                self._parents[index] = self._current
        return self.link_index(index, at)

    def _repeats(self, index: int) -> bool:
        """Whether a link to an object of a tree is to a copy: to a module again, in no cycle."""
        obj, above = self.objects[index], self._current
        while above >= 0 and self.objects[above] is not obj:
            above = self._parents.get(above, -1)
        return above < 0 and index in self.linked and _compat.is_node(obj)

    def link_index(self, index: int, at: int = NOWHERE) -> int:
        """Describes the object with an index, if it is not yet."""
        if self.recorder is not None:
            self.recorder.add_object(at, index)
        if index in self.linked:
            self.has_repeats = True
        else:
            self.linked.add(index)
            self._pending.append(index)
        return index

    def describe_pending(self) -> None:
        """Describes all linked objects, and those that they link to, children before siblings."""
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
        entry = None if self.snapshot is None else self.snapshot.entry_of(index, obj)
        if entry is not None:
            if isinstance(entry, VariableEntry):
                self._leaf(_compat.get_value(obj), slots)
            for child in children_of(entry):
                if type(child) is int:
                    self.link_index(child)
            return entry
        recorder = self.recorder
        at = NOWHERE if recorder is None else recorder.objects[index]
        if _compat.is_node(obj):
            return self._describe_node(obj, slots, at)
        if not _compat.is_variable(obj) and _compat.is_hijax_variable(obj):
            return describe_hijax(self, obj, slots, at)
        if _compat.is_variable(obj):
            metadata, value = self.describe_metadata(obj, at), _compat.get_value(obj)
            at = NOWHERE if recorder is None else recorder.open_variable(at, obj, value)
            return VariableEntry(type(obj), metadata, self.pytree(value, slots, at))
        static = describe_static(self, index, obj, at)
        if static is None:
            self._leaf(obj, slots, at)
            return RefEntry()
        return static

    def describe_metadata(self, variable: object, at: int) -> tuple[tuple[str, Child], ...]:
        """The metadata of a Variable: one tuple for all Variables with the same objects in it."""
        metadata = _compat.get_metadata(variable)
        names, values = (*metadata,), [*metadata.values()]
        key = (*names, *map(_compat.identity, values))
        found: tuple[tuple[str, Child], ...] | None
        found, _, rules = self._metadata.get(key, (None, (), b""))
        places: Sequence[int] = (NOWHERE,) * len(values)
        if self.recorder is not None:
            places = self.recorder.open_metadata(at, names, values, rules)
        if found is None:
            order = sorted(range(len(names)), key=names.__getitem__)
            found = tuple([(names[i], self.static(values[i], places[i])) for i in order])
            if all(type(child) is Static for _, child in found):  # links must be counted
                rules = bytes(map(comparison_of, map(dict(found).__getitem__, names)))
                self._metadata[key] = found, values, rules
        return found

    def _describe_node(self, obj: object, slots: list[int], at: int) -> Entry:
        if not self.graph and not _compat.is_pytree_type(type(obj)):
            raise no_tree(type(obj))
        form, values, own = _compat.node_items(obj, self._forms, self._no_tracers)
        if own is None:
            self.recorder = None
        statics = [*compress(values, form.is_static)]
        row = self._rows.get(_compat.identity(form))
        if row is not None and all(map(operator.is_, statics, row.values)):
            rules, left, children = row.rules, form.others, [*row.children]
        else:
            rules, left, children = b"", tuple(range(len(values))), [None] * len(values)
        places: Sequence[int] = (NOWHERE,) * len(values)
        if self.recorder is not None:
            places = self.recorder.open_node(at, form.names, own or values, rules)
        for i in left:
            place = places[form.order[i]]
            children[i] = self._attribute(values[i], form.is_data[i], slots, place)
        if not rules and all(type(child) is Static for child in compress(children, form.is_static)):
            new = bytearray(len(values))
            for i in compress(left, form.is_static):
                new[form.order[i]] = comparison_of(children[i])
            self._rows[_compat.identity(form)] = _Row(form, statics, children, bytes(new))
        return NodeEntry(type(obj), form.metadata, form.keys, tuple(children))

    def _attribute(self, value: object, is_data: bool | None, slots: list[int], at: int) -> Child:
        if is_data is False:
            return self.static(value, at)
        if _compat.is_graph_object(value):
            return self.link(value, at)
        if _compat.is_node_state(value):
            if self.recorder is not None:
                self.recorder.open_node_state(at, value)
            return node_state(value)
        # Flax turns any value under nnx.data into an array.
        all_leaves = not self.graph or (bool(is_data) and jax.tree_util.all_leaves([value]))
        return self.pytree(value, slots, at, all_leaves=all_leaves)

    def static(self, value: object, at: int = NOWHERE) -> Child:
        """The child for a static value: a static, or the index of an object that can change."""
        kind = type(value)
        if kind is str or kind is int or kind is bool or value is None:
            child: Static | StaticObject = Static.of(value)
        elif (known := self._statics.get(_compat.identity(value))) is not None:
            child = known[0]
            self.has_repeats |= isinstance(child, StaticObject)  # which may hold links
        elif (index := self.index.get(_compat.identity(value))) is not None:
            return self.link_index(index, at)
        else:
            child = Static.of(value, hold=self.holds(value))
            content = content_of(value) if child.by_identity else None
            if is_linked(self, value) if content is None else not is_fixed(content[0]):
                return self.link(value, at)
            if content is not None:
                child = StaticObject(content[0], describe_parts(self, value, *content, at))
            if content is None or at == NOWHERE:  # a recorder opens a group wherever it is
                self._statics[_compat.identity(value)] = child, value
        if at != NOWHERE and self.recorder is not None and isinstance(child, Static):
            self.recorder.add_static(at, value, child)
        return child

    def holds(self, value: object) -> bool:
        """Whether the structure keeps alive an object that is compared by identity."""
        return self.held and _compat.identity(value) not in self.borrowed

    def pytree(
        self,
        tree: object,
        slots: list[int],
        at: int = NOWHERE,
        *,
        all_leaves: bool = True,
        link_refs: bool = True,
        is_root: bool = False,
    ) -> Child:
        """The child for a pytree, the slots of whose arrays are added to ``slots``.

        Without ``all_leaves``, only arrays are leaves, all else is static. With ``link_refs``, a
        ``jax.Ref`` is an object that may be shared, not a leaf. The arrays of the root and those of
        its objects are in its order.
        """
        if _compat.is_plain_array(tree):
            return self._leaf(tree, slots, at)
        parts, treedef = jax.tree_util.tree_flatten(tree, is_leaf=_compat.is_graph_object)
        places: tuple[Iterable[int], Iterable[int]] = repeat(NOWHERE), repeat(NOWHERE)
        if self.recorder is not None:
            places = self.recorder.open_tree(NOWHERE if is_root else at, tree, treedef)
        children: list[Child] = []
        for part, place in zip(parts, places[0], strict=False):
            is_object = _compat.is_graph_object(part) or _compat.is_hijax_variable(part)
            if is_object or (link_refs and _compat.is_ref(part)):
                children.append(self.link(part, place))
            elif isinstance(part, Static):  # the transform declared it static
                children.append(self.static(part.value, place))
            elif all_leaves or isinstance(part, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
                children.append(self._leaf(part, slots, place))
            else:
                children.append(self.static(part, place))
            if is_root:
                self.describe_pending()
        if is_leaf_treedef(treedef):
            return children[0]
        aux = map(self.static, aux_of(treedef), places[1])
        return Container(treedef, tuple(children), tuple(aux))

    def _leaf(self, value: object, slots: list[int], at: int = NOWHERE) -> Child:
        if self.recorder is not None:
            self.recorder.leaves.append(at)
            if type(value) is not _compat.ArrayImpl and isinstance(value, jax.core.Tracer):
                self.recorder = None
        slots.append(len(self.leaves))
        self.leaves.append(value)
        return LEAF
