"""Follows the way through a live graph, and compares it with what it was.

All that the walk meets goes into one flat list, the stream: first the arguments, then what they
hold, then what that holds. A recipe says what is opened and how each item is compared.

There are two implementations of one class: this one, whose loops all run in C, and ``_walk.c``,
which reads only what has changed and is used where it was compiled. They must agree.
"""

from __future__ import annotations

import array
import enum
import functools
import logging
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple, TypeAlias

import jax

from ... import _compat
from ..flatten import aux_of
from ..statics import opened as open_static
from ..statics import value_key
from ..unflatten import picker

Positions: TypeAlias = tuple[int, ...]


class Kind(enum.IntEnum):
    """What a step opens, what that adds to the stream, and what else is compared."""

    NODE = 0  # a module or a static object: the values of its attributes; their names
    DICT = 1  # a dict: its values; its keys
    METADATA = 2  # a Variable: the values of its metadata; their names
    VALUE = 3  # a Variable: its value
    TRACE = 4  # a Variable: the trace that it belongs to
    INITIALIZING = 5  # what Flax notes on a module while it is set up: a flag
    IS_SETUP = 6  # the other flag
    SEQUENCE = 7  # a tuple or list: its items; its length
    STATE = 8  # an nnx.State: its values; its keys
    TREE = 9  # another pytree: its leaves and the data of its node types; its treedef
    STATIC = 10  # another static object: its parts; its kind


# Reading these runs Python code, so they come after all others: those are faster by themselves.
LATE_KINDS = frozenset({Kind.STATE, Kind.TREE, Kind.STATIC})


class Step(NamedTuple):
    """Opens items of one kind; what they hold is appended to the stream."""

    kind: Kind
    positions: Positions
    expected: tuple[Any, ...]  # names, keys, length, treedef or kind of each item


class Recipe(NamedTuple):
    """How to walk all graphs of one structure whose attributes come in one order."""

    steps: tuple[Step, ...]
    frozen: Positions  # of statics that are compared by value
    mentions: Positions  # of objects, each as often as it is mentioned
    first: tuple[int, ...]  # for each mention, the first one of this object; -1 for one object only
    traces: Positions  # of those frozen that say to which trace the graph belongs
    typed: Positions  # of items whose type is compared: all that are opened, and the arrays
    types: tuple[type, ...]  # of these
    leaves: Positions  # of the arrays, by slot
    objects: Positions  # of the first mention of each object, by index
    num_arguments: int
    size: int  # of the stream


class Pins(NamedTuple):
    """What one graph must still have at the positions of a recipe."""

    frozen: tuple[Any, ...]
    mentions: bytes  # the ids of the objects, as in memory


class Match(NamedTuple):
    """Another graph of the structure of a recipe."""

    found: tuple[Sequence[Any], Sequence[Any]]  # arrays and objects
    frozen: tuple[Any, ...]
    mentions: bytes
    traces: Sequence[Any]  # which its traces are, for the caller to compare


# What must be equal for each of some items, and what is appended to the stream for all of them.
_Opened: TypeAlias = tuple[list[Any], Iterable[Any]]


def _plain_dicts(dicts: Sequence[Any]) -> Sequence[Any]:
    if not {str, int}.issuperset(map(type, chain.from_iterable(dicts))):
        raise TypeError("other keys may be equal without being the same")
    return dicts


# Where items of some kinds keep what they hold by name.
MAPPINGS: dict[Kind, Callable[[Sequence[Any]], Sequence[Any]]] = {
    Kind.NODE: lambda nodes: [*map(object.__getattribute__, nodes, repeat("__dict__"))],
    Kind.DICT: _plain_dicts,
    Kind.METADATA: lambda variables: [*map(_compat.get_metadata, variables)],
    Kind.STATE: lambda states: _plain_dicts([*map(_compat.get_mapping, states)]),
}


def _open_mappings(get: Callable[[Sequence[Any]], Sequence[Any]], items: Sequence[Any]) -> _Opened:
    mappings = get(items)
    return [*map(tuple, mappings)], chain.from_iterable(map(dict.values, mappings))


def _read_mappings(get: Callable[[Sequence[Any]], Sequence[Any]], items: Sequence[Any]) -> _Opened:
    """The same with all lengths and then all names in one list, which is faster."""
    mappings = get(items)
    return _flat(mappings), chain.from_iterable(map(dict.values, mappings))


def _open_slots(get: Callable[[Any], Any], items: Sequence[Any]) -> _Opened:
    return [None] * len(items), map(get, items)


def _open_sequences(sequences: Sequence[Any]) -> _Opened:
    return [*map(len, sequences)], chain.from_iterable(sequences)


def _open_each(open_one: Callable[[Any], tuple[Any, Any]], items: Sequence[Any]) -> _Opened:
    opened = [open_one(item) for item in items]
    return [name for _, name in opened], chain.from_iterable(parts for parts, _ in opened)


def flatten_tree(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and treedef of a pytree in which graph objects are leaves."""
    return jax.tree_util.tree_flatten(tree, is_leaf=_compat.is_graph_object)


def open_tree(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a pytree and the data of its node types; its treedef."""
    leaves, treedef = flatten_tree(tree)
    return [*leaves, *aux_of(treedef)], treedef


OPEN: dict[Kind, Callable[[Sequence[Any]], _Opened]] = {
    **{
        Kind[name]: functools.partial(_open_slots, slot.__get__)
        for name, slot in _compat.SLOTS.items()
    },
    **{kind: functools.partial(_open_mappings, get) for kind, get in MAPPINGS.items()},
    Kind.SEQUENCE: _open_sequences,
    Kind.TREE: functools.partial(_open_each, open_tree),
    Kind.STATIC: functools.partial(_open_each, open_static),
}


class PythonWalk:
    """A recipe, ready to be followed."""

    def __init__(self, recipe: Recipe):
        self._steps = [
            (functools.partial(_read_mappings, MAPPINGS[kind]), picker(positions), _flat(expected))
            if kind in MAPPINGS
            else (OPEN[kind], picker(positions), [*expected])
            for kind, positions, expected in recipe.steps
        ]
        self._types, self._first = recipe.types, recipe.first
        self._typed, self._frozen, self._mentions = map(
            picker, (recipe.typed, recipe.frozen, recipe.mentions)
        )
        self._leaves, self._objects, self._traces = map(
            picker, (recipe.leaves, recipe.objects, recipe.traces)
        )

    def follower(self, pins: Pins) -> Callable[[tuple[Any, ...]], Any]:
        """A function of the arguments of a call: arrays and objects of the graph with these pins.

        It returns None, or raises any error, if the graph may have changed.
        """
        return functools.partial(self._follow, pins.frozen, _numbers(pins.mentions))

    def match(self, pins: Pins, arguments: tuple[Any, ...]) -> Match | None:
        """Another graph of the same structure; None, or any error, if these are not of it."""
        stream = self._stream(arguments)
        if stream is None:
            return None
        frozen, traces, objects = (
            [*pick(stream)] for pick in (self._frozen, self._traces, self._objects)
        )
        of_traces = {*map(id, traces)}
        pairs = zip(frozen, pins.frozen, strict=True)
        if not all(id(one) in of_traces or same_value(one, two) for one, two in pairs):
            return None
        ids = [*map(id, self._mentions(stream))]
        sources = zip(self._first, _numbers(pins.mentions), strict=True)
        if ids != [pin if first < 0 else ids[first] for first, pin in sources]:
            return None
        if len({*map(id, objects)}) != len(objects):
            return None
        return Match((self._leaves(stream), objects), tuple(frozen), _packed(ids), traces)

    def _follow(
        self, pins: Sequence[Any], mentions: list[int], arguments: tuple[Any, ...]
    ) -> tuple[Sequence[Any], Sequence[Any]] | None:
        stream = self._stream(arguments)
        if stream is None:
            return None
        frozen = self._frozen(stream)
        is_same = all(map(operator.is_, frozen, pins))  # which is nearly always so
        if not is_same and not all(map(same_value, frozen, pins)):
            return None
        if [*map(id, self._mentions(stream))] != mentions:
            return None
        return self._leaves(stream), self._objects(stream)

    def _stream(self, arguments: tuple[Any, ...]) -> list[Any] | None:
        """All items; None if one has other names, another length or another type."""
        stream = list(arguments)
        for open_items, pick, expected in self._steps:
            names, parts = open_items(pick(stream))
            if names != expected:
                return None
            stream += parts
        if not all(map(operator.is_, map(type, self._typed(stream)), self._types)):
            return None
        return stream


def _flat(names: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [*map(len, names), *chain.from_iterable(names)]


def _packed(numbers: Iterable[int]) -> bytes:
    """Numbers of 64 bits, as in memory."""
    return array.array("Q", numbers).tobytes()


def _numbers(packed: bytes) -> list[int]:
    return array.array("Q", packed).tolist()


def ids_of(objects: Sequence[Any]) -> bytes:
    """The ids of objects, as in memory."""
    return _packed(map(id, objects))


def same_value(value: Any, other: Any) -> bool:
    """Whether two statics that are compared by value are the same."""
    if value is other:
        return True
    key = value_key(value)
    return key is not None and key == value_key(other)


def _load_walk() -> Any:
    is_pure = bool(os.environ.get("NNX_SHARDING_PURE_PYTHON"))
    try:
        from . import _walk
    except ImportError as error:
        if not is_pure:
            logging.getLogger("nnx_sharding").warning(
                "nnx_sharding was installed without its C extension (%s), so calls are slower. "
                "Install a wheel, or a C compiler and nnx_sharding again. "
                "NNX_SHARDING_PURE_PYTHON=1 silences this.",
                error,
            )
        return PythonWalk
    fields = {shared.__name__: shared._fields for shared in (Step, Recipe, Pins)}
    if getattr(_walk, "FIELDS", None) != {"Kind": tuple(Kind.__members__), **fields}:
        raise RuntimeError(
            f"{_walk.__file__} was compiled from another version of nnx_sharding. Install it "
            "again; in a checkout, run `python setup.py build_ext --inplace`."
        )
    _walk.set_up(
        get_mapping=_compat.get_mapping,
        open_tree=open_tree,
        open_static=open_static,
        same_value=same_value,
        mapping_type=_compat.HashableMapping,
        **_compat.SLOTS,
    )
    return PythonWalk if is_pure else _walk.Walk


Walk: Any = _load_walk()
