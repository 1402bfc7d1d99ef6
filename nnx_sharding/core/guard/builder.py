"""Builds the guard of a call: walks the graph once and records the path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeAlias

import jax

from ... import _compat
from ..flatten import Flat, aux_of
from ..signature import Call
from ..snapshot import node_state
from ..static_equality import Static, opened
from ..static_parts import has_only_dict
from ..structure import (
    LEAF,
    Child,
    Container,
    Group,
    NodeEntry,
    RefEntry,
    StaticEntry,
    VariableEntry,
    is_leaf_treedef,
)
from ..unflatten import count_leaves, parts
from .recipe import LATE_KINDS, Kind, Pins, Recipe, Step
from .record import Guard
from .row import Row
from .walk import OPEN, Walk, flatten_tree, ids_of


class _NotGuardedError(Exception):
    """The graph contains something that the guard cannot compare, or is changing."""


def make_guard(
    call: Call,
    flat: Flat,
    arguments: tuple[Any, ...],
    keywords: Sequence[str],
    walks: dict[Recipe, Any],
) -> tuple[Guard, list[Any]] | None:
    """A guard for the arguments of a call, or None if they contain something it cannot watch.

    ``keywords`` are the names of the last ``arguments``. ``walks`` are those of earlier recipes,
    shared by models of one class. Also returns the static objects of which only the identity is
    known: when one of them is collected, the guard must be dropped.
    """
    builder = _Builder(flat)
    try:
        builder.add_arguments(call, arguments, keywords)
        builder.open_all()
        recipe, pins = builder.recipe_and_pins()
    except _NotGuardedError:
        return None
    try:
        walk = walks.get(recipe) or walks.setdefault(recipe, Walk(recipe))
    except Exception:  # a treedef with data that cannot be hashed
        walk = Walk(recipe)
    guard = Guard.of(flat.structure, walk, pins)
    # The graph may have changed while the guard was built.
    return (guard, [*builder.identities.values()]) if guard.check(arguments) is not None else None


class _Subtree(Container):
    """A part of a pytree whose treedef has been compared."""


# What the structure has for an item of the stream, and the slots of its arrays. If the structure
# has nothing for it, the item is compared with its present self.
_AS_IT_IS = object()
_TRACE = object()
_Want: TypeAlias = tuple[Any, Sequence[int]]


class _Builder:
    """Walks a graph once, verifies that it has the structure, and records the path."""

    def __init__(self, flat: Flat):
        self._structure = flat.structure
        self._known = flat.objects
        self._stream: list[Any] = []
        self._steps: list[Step] = []
        self._pending: dict[Kind, list[tuple[int, Sequence[Any], Sequence[Any], Any]]] = {}
        self._rows: dict[tuple[Any, ...], Row] = {}
        self._compared: dict[int, Static] = {}  # by the id of a value: the static that it equals
        self._frozen: list[int] = []
        self._mentions: dict[int, int] = {}  # by position: the first mention; -1 if fixed
        self._first_mentions: dict[int, int] = {}
        self._traces: list[int] = []
        self._leaves: dict[int, int] = {}
        self._objects: dict[int, int] = {}
        self.identities: dict[int, Any] = {}

    def add_arguments(self, call: Call, arguments: Sequence[Any], keywords: Sequence[str]) -> None:
        """Puts the arguments of a call at the start of the stream."""
        signature, root = call.signature, self._structure.root
        assert isinstance(root, Container)
        dynamic: list[Any] = [*signature.dynamic, *sorted(signature.dynamic_keywords)]
        static: list[Any] = [*sorted(signature.static), *sorted(signature.static_keywords)]
        sides = _subtrees(root, self._structure.root_slots)
        wants = chain.from_iterable(_subtrees(side, slots) for side, slots in sides)
        want_of = dict(zip(dynamic, wants, strict=True))
        want_of |= zip(static, ((child, ()) for child in self._structure.statics), strict=True)
        self._num_arguments = len(arguments)
        names = [*range(len(arguments) - len(keywords)), *keywords]
        for name, value in zip(names, arguments, strict=True):
            child, slots = want_of[name]
            self._add(value, Container(*child) if isinstance(child, _Subtree) else child, slots)

    def open_all(self) -> None:
        """Opens what was added, and what this adds in turn, until nothing is left."""
        while self._pending:
            kinds = sorted(self._pending.keys() - LATE_KINDS) or sorted(self._pending)
            for kind, group in [(kind, self._pending.pop(kind)) for kind in kinds]:
                positions = tuple(position for position, *_ in group)
                names, parts = OPEN[kind]([self._stream[position] for position in positions])
                self._steps.append(Step(kind, positions, tuple(names)))
                parts = iter(parts)
                for _, children, slots, row in group:
                    self._add_all([*islice(parts, len(children))], children, slots, row)
                if next(parts, None) is not None:
                    raise _NotGuardedError

    def _open_later(
        self,
        kind: Kind,
        position: int,
        children: Sequence[Any],
        slots: Sequence[Sequence[int]] = (),
        row: Row | None = None,
    ) -> None:
        """Queues an item, to compare what it holds with ``children``, which have these slots."""
        self._pending.setdefault(kind, []).append((position, children, slots, row))

    def _add_all(
        self,
        values: Sequence[Any],
        children: Sequence[Any],
        slots: Sequence[Sequence[int]],
        row: Row | None,
    ) -> None:
        """Appends values to the stream; ``row`` has the last ones of their kind."""
        if len(values) != len(children):
            raise _NotGuardedError
        start = len(self._stream)
        self._stream += values
        if len(children) == 1 and children[0] is LEAF and type(values[0]) is _compat.ArrayImpl:
            self._leaves[slots[0][0]] = start  # as for nearly all Variables
            return
        slots = slots or ((),) * len(children)
        rest: Sequence[int] = range(len(values))
        is_known = row is not None and row.matches(values, children)
        if row is not None and is_known:
            self._frozen += map(start.__add__, row.frozen)
            self._mentions.update(dict.fromkeys(map(start.__add__, row.identities), -1))
            rest = row.others
        for i in rest:
            self._compare(start + i, values[i], children[i], slots[i])
        if row is not None and not is_known:
            row.remember(values, children)

    def _add(self, value: Any, child: Any, slots: Sequence[int]) -> None:
        self._stream.append(value)
        self._compare(len(self._stream) - 1, value, child, slots)

    def _compare(self, position: int, value: Any, child: Any, slots: Sequence[int]) -> None:
        """Compares the value at a position with ``child``, its counterpart in the structure."""
        if type(child) is Static:
            if self._compared.get(id(value)) is not child:
                same = _compat.are_same_statuses(value, child.value)
                if not same and Static.of(value, hold=False) != child:
                    raise _NotGuardedError
                self._compared[id(value)] = child
            if child.by_identity:
                self.identities[id(value)] = value
                self._mentions[position] = -1
            else:
                self._frozen.append(position)
        elif isinstance(child, Container):
            self._add_tree(position, value, child, slots)
        elif child is LEAF:
            if isinstance(value, jax.core.Tracer):
                raise _NotGuardedError
            self._leaves[slots[0]] = position
        elif child is _AS_IT_IS or child is _TRACE:
            self._frozen.append(position)
            if child is _TRACE:
                self._traces.append(position)
        elif isinstance(child, Group):
            self._add_static(position, value, child)
        else:
            self._mention(position, value, child)

    def _add_tree(self, position: int, value: Any, tree: Container, slots: Sequence[int]) -> None:
        if _compat.is_node_state(value):
            if node_state(value) != tree:
                raise _NotGuardedError
            self._frozen.append(position)  # as an object: its trace does not change
            self._traces.append(position)
            for kind in (Kind.INITIALIZING, Kind.IS_SETUP):
                self._open_later(kind, position, (_AS_IT_IS,))
            return
        if type(tree) is Container and flatten_tree(value)[1] != tree.treedef:
            raise _NotGuardedError
        if value is None:
            self._frozen.append(position)
            return
        items = _compat.own_items(value)
        if items is None:  # a pytree of a type that only JAX can open
            wants = [*_with_slots(tree.children, slots), *((aux, ()) for aux in tree.aux)]
            kind = Kind.TREE
        elif isinstance(items, dict):
            by_key = dict(zip(sorted(items), _subtrees(tree, slots), strict=True))
            wants = [by_key[key] for key in items]
            kind = Kind.DICT if type(value) is dict else Kind.STATE
        else:
            wants, kind = _subtrees(tree, slots), Kind.SEQUENCE
        self._open_later(kind, position, [want[0] for want in wants], [want[1] for want in wants])

    def _mention(self, position: int, value: Any, index: int) -> None:
        entry, slots = self._structure.entries[index], self._structure.slots[index]
        if self._known[index] is not value:
            raise _NotGuardedError
        is_pinned = isinstance(entry, StaticEntry) and entry.identity is not None
        number = self._first_mentions.setdefault(index, len(self._mentions))
        self._mentions[position] = -1 if is_pinned else number
        if index in self._objects:
            return
        self._objects[index] = position
        if isinstance(entry, NodeEntry) and _compat.is_plain_pytree(value):
            content = _compat.get_dict(value)
            row = self._row(entry.keys, content)
            own_slots = self._slots_in_order(index, content) if slots else ()
            children = [entry.children[i] for i in row.order]
            self._open_later(Kind.NODE, position, children, own_slots, row)
        elif isinstance(entry, VariableEntry) and type(value) is entry.type:
            row = self._row(entry.metadata, _compat.get_metadata(value))
            children = [entry.metadata[i][1] for i in row.order]
            self._open_later(Kind.METADATA, position, children, (), row)
            self._open_later(Kind.VALUE, position, (entry.value,), (slots,))
            self._open_later(Kind.TRACE, position, (_TRACE,))
        elif isinstance(entry, RefEntry) and _compat.is_ref(value):
            self._leaves[slots[0]] = position
        elif isinstance(entry, StaticEntry):
            if entry.identity is not None:
                self.identities[id(value)] = value
            self._add_static(position, value, entry)
        else:
            raise _NotGuardedError

    def _row(self, keys: tuple[Any, ...], content: dict[str, Any]) -> Row:
        """The row of the objects whose attributes or metadata have these keys in this order."""
        key = (id(keys), *dict.keys(content))
        row = self._rows.get(key)
        if row is None:
            names = [str(key[0] if type(key) is tuple else key) for key in keys]
            if content.keys() != {*names}:
                raise _NotGuardedError
            row = self._rows[key] = Row([names.index(name) for name in dict.keys(content)])
        return row

    def _slots_in_order(self, index: int, content: dict[str, Any]) -> list[Sequence[int]]:
        by_name = {str(key): slots for key, (_, slots) in parts(self._structure, index).items()}
        return [by_name[name] for name in dict.keys(content)]

    def _add_static(self, position: int, value: Any, entry: StaticEntry | Group) -> None:
        if opened(value)[1] != (entry.kind, len(entry.children)):
            raise _NotGuardedError
        if type(value) in (list, tuple):
            self._open_later(Kind.SEQUENCE, position, entry.children)
        elif type(value) is dict and {str, int}.issuperset(map(type, value)):
            if [*map(Static.of, value)] != [*entry.children[::2]]:
                raise _NotGuardedError
            self._open_later(Kind.DICT, position, entry.children[1::2])
        else:
            kind = Kind.NODE if has_only_dict(value) else Kind.STATIC
            self._open_later(kind, position, entry.children)

    def recipe_and_pins(self) -> tuple[Recipe, Pins]:
        """The recorded path, and the pins of this graph."""
        structure, stream = self._structure, self._stream
        if len(self._leaves) != structure.num_leaves or len(self._objects) != len(self._known):
            raise _NotGuardedError
        if not _compat.are_current(stream[position] for position in self._traces):
            raise _NotGuardedError
        leaves = tuple(self._leaves[slot] for slot in range(structure.num_leaves))
        opened_at = chain.from_iterable(step.positions for step in self._steps)
        typed = (*dict.fromkeys((*opened_at, *leaves)),)
        recipe = Recipe(
            steps=tuple(self._steps),
            frozen=tuple(sorted(self._frozen)),
            mentions=tuple(self._mentions),
            first=tuple(self._mentions.values()),
            traces=tuple(self._traces),
            typed=typed,
            types=tuple(type(stream[position]) for position in typed),
            leaves=leaves,
            objects=tuple(self._objects[index] for index in range(len(self._objects))),
            num_arguments=self._num_arguments,
            size=len(stream),
        )
        frozen = tuple(stream[position] for position in recipe.frozen)
        return recipe, Pins(frozen, ids_of([stream[position] for position in self._mentions]))


def _with_slots(children: Sequence[Child], slots: Sequence[int]) -> Iterator[_Want]:
    """Each child with the slots of its own arrays."""
    rest = iter(slots)
    return ((child, [*islice(rest, count_leaves(child))]) for child in children)


def _subtrees(tree: Container, slots: Sequence[int]) -> list[_Want]:
    """What the structure has for each pytree within a pytree."""
    wants, aux = _with_slots(tree.children, slots), iter(tree.aux)
    result: list[_Want] = []
    for treedef in tree.treedef.children():
        leaves = [*islice(wants, treedef.num_leaves)]
        if is_leaf_treedef(treedef):
            result += leaves
            continue
        count = len([*aux_of(treedef)]) if tree.aux else 0
        children = tuple(child for child, _ in leaves)
        subtree = _Subtree(treedef, children, tuple(islice(aux, count)))
        result.append((subtree, [slot for _, own in leaves for slot in own]))
    return result
