"""Is this still the graph that was split? If so, its arrays and objects, at little cost.

Splitting describes a graph anew; the guard only compares it with what it was. It walks the live
objects from the arguments on, lays everything that it meets into one flat list (the stream), and
compares this list at C speed: attribute names, who is who, types, statics. A match means that
splitting again would give the same structure, for all on which a structure depends is compared:

* The names of all attributes, metadata entries and dict keys, in order.
* The types of all objects, containers and arrays.
* The value of statics that are compared by value.
* The identity of objects, static ones included. It is their pattern that counts (what is shared
  with what), so a number is enough, and no reference to an object is kept: a guard keeps no model
  alive. That the number might meanwhile belong to another object does no harm where its content is
  compared as well. Objects that have no content end the guard when they go (``watched``).

A mismatch, or anything unexpected, means "changed": the call then splits. So a guard may be too
careful, which costs time, but never too trusting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import jax

from ... import _compat
from .. import unflatten as merge
from ..flatten import Flat, aux_of
from ..signature import Call
from ..statics import Static, has_only_dict, opened
from ..structure import (
    LEAF,
    Child,
    Container,
    Group,
    NodeEntry,
    RefEntry,
    StaticEntry,
    Structure,
    VariableEntry,
    is_leaf_treedef,
)
from .walk import Pins, Recipe, Walk, Wave, flatten_tree, ids_of, open_tree


class Guard(NamedTuple):
    """The way through a graph, and what must be found on it.

    Attributes:
      structure: the structure that the graph has as long as the guard holds.
      walk: how to walk it.
      pins: what to find.
      watched: objects of which only the identity is known; the guard must go when one of them
        does. Whoever keeps the guard keeps no references to them.
    """

    structure: Structure
    walk: Any
    pins: Pins
    watched: tuple[Any, ...] = ()

    def check(self, arguments: tuple[Any, ...]) -> Flat | None:
        """The graph taken apart as by ``flatten``, or None if it may have changed.

        Args:
          arguments: all arguments of the call, positional ones first.
        """
        try:
            found = self.walk.follow(self.pins, arguments)
        except Exception:  # an attribute that is gone, a comparison that raises: all are changes
            return None
        if found is None:
            return None
        leaves, objects = found
        return Flat(self.structure, leaves, objects, True)


class _NotGuardedError(Exception):
    """The graph has something that the guard does not know how to compare, or is changing."""


def make_guard(
    call: Call,
    flat: Flat,
    arguments: tuple[Any, ...],
    keywords: Sequence[str],
    walks: MutableMapping[Recipe, Any],
) -> Guard | None:
    """A guard for the arguments of a call, or None if there is something it cannot watch.

    Args:
      call: the arguments by their roles.
      flat: the arguments taken apart.
      arguments: all arguments of the call, positional ones first.
      keywords: the names of the keyword arguments, in their order in ``arguments``.
      walks: the walks of recipes that were seen before: models of one class share them.
    """
    try:
        builder = _Builder(flat)
        builder.add_arguments(call, arguments, keywords)
        builder.open_all()
        recipe, pins = builder.recipe(), builder.pins()
    except _NotGuardedError:
        return None
    try:
        walk = walks.get(recipe) or walks.setdefault(recipe, Walk(recipe))
    except TypeError:  # a treedef with data that cannot be hashed
        walk = Walk(recipe)
    guard = Guard(flat.structure, walk, pins, tuple(builder.watched.values()))
    # What was written down piece by piece must hold as a whole.
    return guard if guard.check(arguments) is not None else None


class _Builder:
    """Walks a graph once, verifies that it has the structure, and notes the way."""

    def __init__(self, flat: Flat):
        self._structure = flat.structure
        self._known = flat.objects
        self._stream: list[Any] = []
        self._waves: list[Wave] = []
        self._keys: list[tuple[Any, ...]] = []
        self._types: list[type] = []
        self._lengths: list[int] = []
        self._treedefs: list[Any] = []
        self._kinds: list[Any] = []
        self._frozen: list[int] = []
        self.watched: dict[int, Any] = {}
        self._mentions: list[int] = []
        self._variables: list[Any] = []
        self._node_states: list[Any] = []
        self._leaves: dict[int, int] = {}
        self._objects: dict[int, int] = {}
        self._clear_next()

    def _clear_next(self) -> None:
        # What the next wave opens: the position, and what is known of it.
        self._nodes: list[tuple[int, int]] = []
        self._variables_next: list[tuple[int, int]] = []
        self._states: list[tuple[int, Sequence[_Want | Child]]] = []
        self._dicts: list[tuple[int, Sequence[_Want | Child]]] = []
        self._sequences: list[tuple[int, Sequence[_Want | Child]]] = []
        self._trees: list[tuple[int, _Want]] = []
        self._statics: list[tuple[int, StaticEntry | Group]] = []

    def add_arguments(self, call: Call, arguments: Sequence[Any], keywords: Sequence[str]) -> None:
        """Puts the arguments of a call at the start of the stream."""
        signature, root = call.signature, self._structure.root
        assert isinstance(root, Container)
        dynamic: list[Any] = [*signature.dynamic, *sorted(signature.dynamic_keywords)]
        values = [*call.tree[0], *(call.tree[1][k] for k in sorted(signature.dynamic_keywords))]
        want = _Want(root.children, self._structure.root_slots, root.aux)
        wants: dict[Any, _Want] = dict(zip(dynamic, want.divide(values), strict=True))
        static = [*sorted(signature.static), *sorted(signature.static_keywords)]
        statics = dict(zip(static, self._structure.statics, strict=True))
        names = [*range(len(arguments) - len(keywords)), *keywords]
        for name, value in zip(names, arguments, strict=True):
            if name in statics:
                self._add(value, statics[name], ())
            else:
                self._add_tree(value, wants[name])

    def open_all(self) -> None:
        """Opens what was added, and what comes to light by that, until nothing is left."""
        while True:
            nodes, variables = self._nodes, self._variables_next
            states, dicts = self._states, self._dicts
            sequences, trees, statics = self._sequences, self._trees, self._statics
            kinds = (nodes, states, dicts, variables, sequences, trees, statics)
            if not any(kinds):
                return
            self._clear_next()
            self._waves.append(Wave(*(tuple(position for position, _ in kind) for kind in kinds)))
            self._open_nodes(nodes)
            self._open_mappings(states, _compat.get_mapping)
            self._open_mappings(dicts, lambda own: own)
            self._open_variables(variables)
            for position, wants in sequences:
                own = self._opened(position)
                self._lengths.append(len(own))
                self._add_all(own, wants)
            for position, want in trees:
                own, treedef = open_tree(self._opened(position))
                self._treedefs.append(treedef)
                self._add_all(own[: treedef.num_leaves], want.divide(own[: treedef.num_leaves]))
                for data, child in zip(own[treedef.num_leaves :], want.aux, strict=True):
                    self._add(data, child, ())
            for position, entry in statics:
                own, kind = opened(self._opened(position))
                self._kinds.append(kind)
                self._add_static_parts(own, kind[0], entry)

    def _opened(self, position: int) -> Any:
        found = self._stream[position]
        self._types.append(type(found))
        return found

    def _open_nodes(self, nodes: Sequence[tuple[int, int]]) -> None:
        for position, index in nodes:
            node = self._opened(position)
            own = _compat.get_dict(node)
            entry = self._structure.entries[index]
            if isinstance(entry, StaticEntry):
                self._keys.append(tuple(own))
                self._add_static_parts(list(own.values()), (type(node), None, tuple(own)), entry)
                continue
            parts = {str(k): part for k, part in merge.parts(self._structure, index).items()}
            if own.keys() != parts.keys():
                raise _NotGuardedError
            self._keys.append(tuple(own))
            for key, value in own.items():
                self._add(value, *parts[key])

    def _open_mappings(
        self, mappings: Sequence[tuple[int, Sequence[_Want | Child]]], content: Callable[[Any], Any]
    ) -> None:
        for position, wants in mappings:
            own = content(self._opened(position))
            self._keys.append(tuple(own))
            self._add_all(own.values(), wants)

    def _open_variables(self, variables: Sequence[tuple[int, int]]) -> None:
        for position, index in variables:
            variable = self._opened(position)
            entry = self._structure.entries[index]
            assert isinstance(entry, VariableEntry)
            self._variables.append(variable)
            own, metadata = _compat.get_metadata(variable), dict(entry.metadata)
            if own.keys() != metadata.keys():
                raise _NotGuardedError
            self._keys.append(tuple(own))
            for key, value in own.items():
                self._add(value, metadata[key], ())
        for position, index in variables:
            value = _compat.get_value(self._stream[position])
            entry = self._structure.entries[index]
            self._add(value, entry.value, self._structure.slots[index])  # type: ignore[union-attr]

    def _add_static_parts(
        self, parts: Sequence[Any], kind: tuple[Any, ...], entry: StaticEntry | Group
    ) -> None:
        if kind != entry.kind or len(parts) != len(entry.children):
            raise _NotGuardedError
        self._add_all(parts, entry.children)

    def _add_all(self, values: Any, wants: Sequence[_Want | Child]) -> None:
        for value, want in zip(values, wants, strict=True):
            if isinstance(want, _Want):
                self._add_tree(value, want)
            else:
                self._add(value, want, ())

    def _add(self, value: Any, child: Child, slots: Sequence[int]) -> None:
        """Puts a value on the stream that stands where the structure has ``child``."""
        if isinstance(child, Container):
            if flatten_tree(value)[1] != child.treedef:
                raise _NotGuardedError
            self._add_tree(value, _Want(child.children, slots, child.aux))
            return
        position = len(self._stream)
        self._stream.append(value)
        if child is LEAF:
            if isinstance(value, jax.core.Tracer):
                raise _NotGuardedError
            self._leaves[slots[0]] = position
        elif isinstance(child, Static):
            if Static.of(value, hold=False) != child:
                raise _NotGuardedError
            if child.by_identity:
                self._mentions.append(position)
                self.watched[id(value)] = value
            else:
                self._frozen.append(position)
        elif isinstance(child, Group):
            self._add_group(position, value, child)
        else:
            assert isinstance(child, int)
            self._mention(position, value, child)

    def _add_group(self, position: int, value: Any, group: Group) -> None:
        if type(value) is not tuple:
            self._statics.append((position, group))
        elif (tuple, None, ()) != group.kind or len(value) != len(group.children):
            raise _NotGuardedError
        else:
            self._sequences.append((position, group.children))

    def _mention(self, position: int, value: Any, index: int) -> None:
        entry = self._structure.entries[index]
        can_update = isinstance(entry, StaticEntry) or _compat.can_update(value)
        if self._known[index] is not value or not can_update:
            raise _NotGuardedError
        self._mentions.append(position)
        if index in self._objects:
            return
        self._objects[index] = position
        if isinstance(entry, NodeEntry) and _compat.is_plain_pytree(value):
            self._nodes.append((position, index))
        elif isinstance(entry, VariableEntry) and type(value) is entry.type:
            self._variables_next.append((position, index))
        elif isinstance(entry, RefEntry) and _compat.is_ref(value):
            self._leaves[self._structure.slots[index][0]] = position
        elif isinstance(entry, StaticEntry):
            self._open_static(position, index, value, entry)
        else:
            raise _NotGuardedError

    def _open_static(self, position: int, index: int, value: Any, entry: StaticEntry) -> None:
        if entry.identity is not None:
            self.watched[id(value)] = value
        if type(value) is list and len(value) == len(entry.children):
            self._sequences.append((position, entry.children))
        elif type(value) is dict and {str, int}.issuperset(map(type, value)):
            if len(entry.children) != 2 * len(value):
                raise _NotGuardedError
            keys = [Static.of(key) for key in value]
            if list(entry.children[::2]) != keys:
                raise _NotGuardedError
            self._dicts.append((position, entry.children[1::2]))
        elif has_only_dict(value):
            self._nodes.append((position, index))
        else:
            self._statics.append((position, entry))

    def _add_tree(self, value: Any, want: _Want) -> None:
        """Puts a pytree on the stream whose leaves are given by ``want``."""
        _, treedef = flatten_tree(value)
        if is_leaf_treedef(treedef):
            self._add(value, want.children[0], want.slots)
            return
        position = len(self._stream)
        self._stream.append(value)
        if value is None:
            self._frozen.append(position)
        elif _compat.is_node_state(value):
            self._frozen.append(position)
            self._node_states.append(value)
        else:
            self._add_container(position, value, want)

    def _add_container(self, position: int, value: Any, want: _Want) -> None:
        kind, items = type(value), _compat.own_items(value)
        if items is None:  # a pytree of a type that only JAX can open
            self._trees.append((position, want))
        elif isinstance(items, Mapping):
            ordered = sorted(items)
            wants = dict(zip(ordered, want.divide([items[k] for k in ordered]), strict=True))
            pending = self._dicts if kind is dict else self._states
            pending.append((position, [wants[key] for key in items]))
        else:
            self._sequences.append((position, want.divide(items)))

    def recipe(self) -> Recipe:
        """The way that was walked."""
        structure, stream = self._structure, self._stream
        if len(self._leaves) != structure.num_leaves or len(self._objects) != len(self._known):
            raise _NotGuardedError
        leaves = tuple(self._leaves[slot] for slot in range(structure.num_leaves))
        return Recipe(
            waves=tuple(self._waves),
            keys=tuple(self._keys),
            types=tuple(self._types),
            lengths=tuple(self._lengths),
            treedefs=tuple(self._treedefs),
            kinds=tuple(self._kinds),
            frozen=tuple(self._frozen),
            mentions=tuple(self._mentions),
            leaves=leaves,
            leaf_types=tuple(type(stream[position]) for position in leaves),
            objects=tuple(self._objects[index] for index in range(len(self._objects))),
            size=len(stream),
        )

    def pins(self) -> Pins:
        """What was found on it."""
        stream = self._stream
        return Pins(
            frozen=tuple(stream[position] for position in self._frozen),
            mentions=ids_of([stream[position] for position in self._mentions]),
            trace_states=tuple(map(_compat.get_trace_state, self._variables)),
            node_states=tuple(self._node_states),
            flags=tuple(map(_compat.node_flags, self._node_states)),
        )


class _Want(NamedTuple):
    """What the structure has for a pytree: its leaves, the slots of its arrays, its node data."""

    children: Sequence[Child]
    slots: Sequence[int]
    aux: Sequence[Child] = ()

    def divide(self, values: Sequence[Any]) -> list[_Want]:
        """The same for each of the subtrees that the pytree consists of."""
        children, slots, aux = iter(self.children), iter(self.slots), iter(self.aux)
        return [_take(value, children, slots, aux) for value in values]


def _take(
    value: Any, children: Iterator[Child], slots: Iterator[int], aux: Iterator[Child]
) -> _Want:
    treedef = flatten_tree(value)[1]
    own = [next(children) for _ in range(treedef.num_leaves)]
    count = sum(map(merge.count_leaves, own))
    return _Want(own, [next(slots) for _ in range(count)], [next(aux) for _ in aux_of(treedef)])
