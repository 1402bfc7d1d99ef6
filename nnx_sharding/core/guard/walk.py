"""Follows the recorded path through a live graph, and compares the graph with what it was.

Everything that the walk meets goes into one flat list, the stream: first the arguments, then what
they hold, then what that holds. A recipe says what is opened and how each item is compared.

There are two implementations of one class: this one, whose loops all run in C, and ``walk.c``,
which reads only what has changed and is used if it was compiled. They must agree.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

import jax
import numpy as np

from ... import _compat
from ..static_equality import opened as open_static
from ..static_equality import value_key
from ..treedefs import aux_of
from ..unflatten import picker
from .recipe import Opcode, Pins, Recipe, Route, Step, unpacked

# For some items: what must be equal for each, and what is appended to the stream for all.
_Opened: TypeAlias = tuple[list[Any], Iterable[Any]]


def _open_dicts(dicts: Sequence[Any]) -> _Opened:
    if not {str, int}.issuperset(map(type, chain.from_iterable(dicts))):
        raise TypeError("other keys may be equal without being the same")
    return [*map(tuple, dicts)], chain.from_iterable(map(dict.values, dicts))


def _open_sequences(sequences: Sequence[Any]) -> _Opened:
    return [*map(len, sequences)], chain.from_iterable(sequences)


def _open_each(open_one: Callable[[Any], tuple[Any, Any]], items: Sequence[Any]) -> _Opened:
    opened = [open_one(item) for item in items]
    return [name for _, name in opened], chain.from_iterable(parts for parts, _ in opened)


def open_tree(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a pytree and the data of its node types; its treedef."""
    leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=_compat.is_graph_object)
    return [*leaves, *aux_of(treedef)], treedef


# How items are opened that have neither attributes nor slots.
OPEN: dict[Opcode, Callable[[Sequence[Any]], _Opened]] = {
    Opcode.DICT: _open_dicts,
    Opcode.LEAVES: lambda variables: _open_sequences([*map(_compat.get_leaves, variables)]),
    Opcode.STATE: lambda states: _open_dicts([*map(_compat.get_mapping, states)]),
    Opcode.SEQUENCE: _open_sequences,
    Opcode.TREE: functools.partial(_open_each, open_tree),
    Opcode.STATIC: functools.partial(_open_each, open_static),
}


class PythonWalk:
    """A recipe, ready to be followed.

    Its stream is reordered for fewer steps: items without anything to open come last.
    """

    def __init__(self, recipe: Recipe):
        self._steps: list[tuple[Any, list[Any], list[Any]]] = []
        place = {position: position for position in range(recipe.num_arguments)}  # in the stream
        previous: Sequence[int] = ()
        for opcode, positions, expected, parts in _in_order(recipe):
            types: list[Any] = [recipe.types[position] for position in positions]
            if positions != previous:
                pick = picker([place[position] for position in positions])
                self._steps.append((pick, types, []))
            previous = positions
            self._steps[-1][-1].append(_reader(opcode, types, expected))
            place |= zip(chain.from_iterable(parts), itertools.count(len(place)))
        fields = (recipe.leaves, recipe.objects, recipe.frozen, recipe.mentions, recipe.traces)
        leaves, objects, frozen, mentions, traces = (
            [place[position] for position in unpacked(field)] for field in fields
        )
        self._leaves, self._objects, self._frozen, self._mentions, self._traces = map(
            picker, (leaves, objects, frozen, mentions, traces)
        )
        self._leaf_types = [recipe.types[position] for position in unpacked(recipe.leaves)]
        self._first = np.frombuffer(recipe.first, np.int32)
        pinned = {*frozen, *mentions}
        self._end = max(pinned, default=-1) + 1
        self._free = [i for i in range(self._end) if i not in pinned]

    def follower(self, pins: Pins) -> Callable[[tuple[Any, ...]], Any]:
        """A function of a call's arguments that returns the arrays and objects of the pinned graph.

        It returns None, or raises any error, if the graph may have changed.
        """
        # The ids of an unchanged graph, and the statics that must live as long as these are used.
        known: tuple[bytes, Sequence[Any]] = (b"", ())

        def follow(arguments: tuple[Any, ...]) -> tuple[Sequence[Any], Sequence[Any]] | None:
            nonlocal known
            stream = self._stream(arguments)
            if stream is None:
                return None
            leaves, objects = self._leaves(stream), self._objects(stream)
            for position in self._free:
                stream[position] = None
            ids = ids_of(stream, self._end)
            if ids != known[0]:
                frozen = self._frozen(stream)
                is_same = all(map(operator.is_, frozen, pins.frozen))
                if not is_same and not all(map(same_value, frozen, pins.frozen)):
                    return None
                if ids_of(self._mentions(stream)) != pins.mentions:
                    return None
                known = ids, () if is_same else frozen
            return leaves, objects

        return follow

    def match(self, pins: Pins, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Another graph with the same path; None, or any error, if there is another.

        Its arrays, its objects, its frozen statics and mentions, and its traces, for the caller to
        compare.
        """
        stream = self._stream(arguments)
        if stream is None:
            return None
        frozen, traces = self._frozen(stream), self._traces(stream)
        of_traces = {*map(_compat.identity, traces)}
        pairs = zip(frozen, pins.frozen, strict=True)
        if not all(
            _compat.identity(one) in of_traces or same_value(one, two) for one, two in pairs
        ):
            return None
        mentions = ids_of(self._mentions(stream))
        ids, pinned = np.frombuffer(mentions, np.uint64), np.frombuffer(pins.mentions, np.uint64)
        if not np.array_equal(ids, np.where(self._first < 0, pinned, ids[self._first])):
            return None
        objects = self._objects(stream)
        # Sorted: regular addresses collide in a set.
        if np.unique(np.frombuffer(ids_of(objects), np.uintp)).size != len(objects):
            return None
        return self._leaves(stream), objects, tuple(frozen), mentions, traces

    def _stream(self, arguments: tuple[Any, ...]) -> list[Any] | None:
        """All items; None if one differs in names, length or type."""
        stream = list(arguments)
        for pick, types, reads in self._steps:
            items = pick(stream)
            if not all(map(operator.is_, map(type, items), types)):
                return None
            for get, names, open_items in reads:
                if open_items is not None:
                    found, parts = open_items(items)
                    if found != names:
                        return None
                    stream += parts
                elif names is not None:
                    mappings = [*map(get, items)]
                    if not all(map(operator.eq, map(list, map(dict.keys, mappings)), names)):
                        return None
                    stream += chain.from_iterable(map(dict.values, mappings))
                else:
                    stream += map(get, items)
        if not all(map(operator.is_, map(type, self._leaves(stream)), self._leaf_types)):
            return None
        return stream


# The order of items without anything to open. A Variable is picked once; arrays are at the end.
_OF_VARIABLES = (Opcode.METADATA, Opcode.TRACE, Opcode.VALUE)
_LAST = (*(opcode for opcode in Opcode if opcode not in _OF_VARIABLES), *_OF_VARIABLES)


def _in_order(
    recipe: Recipe,
) -> Iterator[tuple[Opcode, Sequence[int], Sequence[Any], Sequence[range]]]:
    """Opcode, positions, what is expected and positions of the parts, in the order of this walk."""
    opcodes, opened, starts = recipe.rows().T.tolist()
    depths = [0] * len(recipe.types)  # by position
    items: list[tuple[tuple[int, int], Opcode, int, Any, range]] = []
    ends = [*starts[1:], len(depths)]
    for *step, start, end in zip(opcodes, opened, recipe.expected, starts, ends, strict=True):
        opcode, position, expected = step
        depth, parts = depths[position], range(start, end)
        depths[start:end] = [depth + 1] * len(parts)
        items.append(((depth, opcode), Opcode(opcode), position, expected, parts))
    inner, last = {*opened}, max(depths, default=0) + 1
    items = [
        item if not inner.isdisjoint(item[-1]) else ((last, _LAST.index(item[1])), *item[1:])
        for item in items
    ]
    items.sort(key=operator.itemgetter(0))
    for _, group in itertools.groupby(items, operator.itemgetter(0)):
        _, opcodes, positions, expected, ranges = zip(*group, strict=True)
        yield opcodes[0], positions, expected, ranges


def _reader(opcode: Opcode, types: Iterable[Any], expected: Sequence[Any]) -> tuple[Any, Any, Any]:
    """A getter of an item's content, and its names; or what to expect, and what opens all items."""
    if opcode in OPEN:
        return None, [*expected], OPEN[opcode]
    slot = _compat.SLOTS.get(opcode.name)
    name, get = ("__dict__", _compat.get_dict) if slot is None else (slot.__name__, slot.__get__)
    if all(
        own.__getattribute__ is object.__getattribute__
        and (slot is None or getattr(own, name, None) is slot)
        for own in types
    ):
        get = operator.attrgetter(name)  # faster, and runs no code of the class here
    shared: dict[Any, list[Any]] = {}
    named = opcode in (Opcode.NODE, Opcode.METADATA)
    names = [shared.setdefault(own, [*own]) for own in expected] if named else None
    return get, names, None


def ids_of(objects: Iterable[Any], count: int = -1) -> bytes:
    """The ids of the first ``count`` objects, or of all, as bytes."""
    return np.fromiter(objects, object, count).tobytes()


def same_value(value: Any, other: Any) -> bool:
    """Whether two statics that are compared by value are the same."""
    if value is other:
        return True
    key = value_key(value)
    return key is not None and key == value_key(other)


def _load_walk() -> Any:
    is_pure = bool(os.environ.get("NNX_SHARDING_PURE_PYTHON"))
    try:
        _native = importlib.import_module("._native", __package__)
    except ImportError as error:
        if not is_pure:
            is_missing = isinstance(error, ModuleNotFoundError)
            logging.getLogger("nnx_sharding").warning(
                "nnx_sharding was installed without its C extension%s, so calls are slower. "
                "Install a wheel, or a C compiler and nnx_sharding again. "
                "NNX_SHARDING_PURE_PYTHON=1 silences this.",
                "" if is_missing else f" for this Python ({error})",
            )
        return PythonWalk
    tuples = {own.__name__: own._fields for own in (Step, Recipe, Pins, Route)}
    shared = {"Opcode": tuple(Opcode.__members__), **tuples}
    fields = " ".join(word for name, own in shared.items() for word in (name, *own))
    if getattr(_native, "FIELDS", None) != fields:
        raise RuntimeError(
            f"{_native.__file__} was compiled from another version of nnx_sharding. Install it "
            "again; in a checkout, run `python setup.py build_ext --inplace`."
        )
    _native.set_up(
        open_tree=open_tree,
        open_static=open_static,
        same_value=same_value,
        mapping_type=_compat.HashableMapping,
        **_compat.SLOTS,
    )
    return PythonWalk if is_pure else _native.Walk


Walk: Any = _load_walk()
