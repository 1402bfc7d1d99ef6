"""Follows a recipe through a live graph: is it still the one that was recorded?

A walk reads the graph into a list, the *stream*. The stream starts with the arguments of the call,
and each step of the recipe opens one item of the stream and appends the item's contents. Then the
walk compares some items with the *pins* of the recipe, which the recorded graph had in the same
positions: *frozen* statics are compared by their values, and *mentions* of objects by their ids.

If a function gets a module ``m``, which holds an int ``n`` and a Variable ``w``, the stream is
``[m, n, w, metadata, trace, array]``: one step has opened ``m``, three others ``w``. The int, the
metadata and the trace are frozen, ``m`` and ``w`` are mentions, and the array is compared by its
type alone.

``PythonWalk`` is the reference, written to be read. It is also used without the extension.
``walk.c`` does the same up to a hundred times as fast, and must agree; the tests run both.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import numpy as np
from flax import nnx

from ... import _compat
from ..in_c import items_getter
from ..static_equality import open_static, value_key
from ..treedefs import PyTreeDef, aux_of
from .recipe import Opcode, Recipe, unpack_int32

# An item's contents, and what must equal ``Recipe.expected``: names, keys, a length, or a treedef.
Opened: TypeAlias = tuple[Iterable[Any], Any]
# The arrays and the objects of a graph, by slot and by index.
Followed: TypeAlias = tuple[Sequence[Any], Sequence[Any]]


class Matched(NamedTuple):
    """The contents of a graph that is built like the recorded one.

    ``walk.c`` returns plain tuples with the same items.
    """

    leaves: Sequence[Any]  # the arrays of the graph, by slot
    objects: Sequence[Any]  # the objects of the graph, by index
    statics: tuple[Any, ...]  # the field ``Recipe.statics`` of a recipe of this graph
    ids: bytes  # the field ``Recipe.ids`` of a recipe of this graph
    traces: Sequence[Any]  # the traces to which modules and Variables of the graph belong


class Walk(Protocol):
    """A recipe, ready to be followed.

    The methods take the arguments of a call as one tuple, those by keyword last. An error that a
    method raises means the same as None: the graph may have changed.
    """

    recipe: Recipe

    def __init__(self, recipe: Recipe): ...

    def follow(self, arguments: tuple[Any, ...]) -> Followed | None:
        """Returns the arrays and objects of the recorded graph; None if it may have changed."""

    def match(self, arguments: tuple[Any, ...]) -> Matched | None:
        """Returns what another graph of the same structure holds; None if the structure differs.

        The caller has to check that ``Matched.traces`` are the current trace.
        """


class _Step(NamedTuple):
    """A step of a recipe, unpacked."""

    open_item: Callable[[Any], Opened]  # the opener for the step's opcode
    position: int  # the position of the item that the step opens
    recorded_type: type | None  # the type that this item must have
    expected: Any  # what the opener must find: names, keys, a length or a treedef


class PythonWalk:
    """The walk in Python. In ``walk.c``, the methods have the same names.

    Private attributes:

        _steps          the steps of the recipe, unpacked
        _leaves_in, _objects_in, _frozen_in, _mentions_in, _traces_in   functions that pick items of
                        a stream: arrays by slot, objects by index, frozen statics, mentions of
                        objects, and traces
        _leaf_types     the recorded type of each array, by slot
        _first_mention  for each mention, the number of the first mention of the same object in the
                        recorded graph; -1 for a *pinned* object, which has to be the recorded one.
                        For mentions of a, b, a this is ``[0, 1, 0]``
    """

    def __init__(self, recipe: Recipe):
        """Unpacks the numbers of a recipe, once for all walks."""
        self.recipe = recipe
        self._steps: list[_Step] = []
        # Each row has the three fields of a ``Step``. The third, the position at which the step
        # appends its first item, is not needed here, because `_read` appends at the end of a list.
        rows = recipe.rows().tolist()
        for (opcode, position, _), expected in zip(rows, recipe.expected, strict=True):
            open_item = OPENERS[Opcode(opcode)]
            self._steps.append(_Step(open_item, position, recipe.types[position], expected))
        self._leaves_in = items_getter(unpack_int32(recipe.leaves))
        self._objects_in = items_getter(unpack_int32(recipe.objects))
        self._frozen_in = items_getter(unpack_int32(recipe.frozen))
        self._mentions_in = items_getter(unpack_int32(recipe.mentions))
        self._traces_in = items_getter(unpack_int32(recipe.traces))
        self._leaf_types = [recipe.types[position] for position in unpack_int32(recipe.leaves)]
        self._first_mention = np.frombuffer(recipe.first, np.int32)

    def follow(self, arguments: tuple[Any, ...]) -> Followed | None:
        """Returns the arrays and objects of the recorded graph; None if it may have changed."""
        stream = self._read(arguments)
        if stream is None:
            return None
        statics = self._frozen_in(stream)
        pins = self.recipe.statics
        # Statics are nearly always the very objects of the pins, and `is` is fast.
        are_same_objects = all(map(operator.is_, statics, pins))
        if not are_same_objects and not all(map(same_value, statics, pins)):
            return None
        if ids_of(self._mentions_in(stream)) != self.recipe.ids:
            return None
        return self._leaves_in(stream), self._objects_in(stream)

    def match(self, arguments: tuple[Any, ...]) -> Matched | None:
        """Returns what another graph of the same structure holds; None if the structure differs.

        Statics have to be equal to those of the recorded graph. Objects may be others, but have to
        be shared in the same places: where the recorded graph had one object twice, this graph has
        to have one object twice as well.
        """
        stream = self._read(arguments)
        if stream is None:
            return None
        # The traces of the graph are among the statics. Graphs that are built alike may have
        # different traces, so the traces are left out here, and the caller checks that they are the
        # current trace.
        statics = self._frozen_in(stream)
        traces = self._traces_in(stream)
        # Ids tell which statics are traces, because other statics need not have a hash.
        trace_ids = {*map(_compat.identity, traces)}
        for static, pin in zip(statics, self.recipe.statics, strict=True):
            if _compat.identity(static) not in trace_ids and not same_value(static, pin):
                return None
        # Two mentions of one object in the recorded graph must be mentions of one object here: with
        # mentions of a, b, a, the third id must equal the first. A pinned object (-1) must be the
        # recorded object, so its id must be the recorded id.
        ids = np.frombuffer(ids_of(self._mentions_in(stream)), np.uint64)
        recorded_ids = np.frombuffer(self.recipe.ids, np.uint64)
        ids_of_first = np.where(self._first_mention < 0, recorded_ids, ids[self._first_mention])
        if not np.array_equal(ids, ids_of_first):
            return None
        # Two objects of the recorded graph must not be one object here. A set of ids would be slow,
        # because addresses are multiples of a power of two, so many of them collide.
        objects = self._objects_in(stream)
        if np.unique(np.frombuffer(ids_of(objects), np.uintp)).size != len(objects):
            return None
        return Matched(self._leaves_in(stream), objects, tuple(statics), ids.tobytes(), traces)

    def _read(self, arguments: tuple[Any, ...]) -> list[Any] | None:
        """Returns the stream of a graph; None if a type, name, length or treedef differs."""
        stream = [*arguments]
        for step in self._steps:
            item = stream[step.position]
            if type(item) is not step.recorded_type:
                return None
            # For a NODE, the parts are the values of attributes, and the layout is their names.
            parts, layout = step.open_item(item)
            if layout != step.expected:
                return None
            stream += parts
        # The loop compares the types of items that a step opens. No step opens an array, so the
        # types of arrays are compared here.
        if not all(map(operator.is_, map(type, self._leaves_in(stream)), self._leaf_types)):
            return None
        return stream


# Each opener returns an item's contents, and what has to equal ``Recipe.expected`` before these are
# read: names or keys in order, a length, or a treedef.


def _open_node(node: object) -> Opened:
    attributes = _compat.get_dict(node)
    return attributes.values(), (*attributes,)


def _open_dict(mapping: dict[Any, Any]) -> Opened:
    if not {str, int}.issuperset(map(type, mapping)):
        raise TypeError("keys of other types may be equal without being the same")
    return mapping.values(), (*mapping,)


def _open_metadata(variable: object) -> Opened:
    metadata = _compat.get_metadata(variable)
    return metadata.values(), (*metadata,)


def _open_leaves(variable: object) -> Opened:
    return _open_sequence(_compat.get_leaves(variable))


def _open_state(state: nnx.State[Any, Any]) -> Opened:
    return _open_dict(_compat.get_mapping(state))


def _open_sequence(sequence: Sequence[Any]) -> Opened:
    return sequence, len(sequence)


def _slot_opener(opcode: Opcode) -> Callable[[Any], Opened]:
    """Returns the opener of an opcode that reads one field of an object of Flax, such as VALUE."""
    get = _compat.SLOTS[opcode.name].__get__
    return lambda item: ((get(item),), None)


def open_tree(tree: object) -> tuple[list[Any], PyTreeDef]:
    """Returns a list and a treedef: the leaves of a pytree, then the data of its node types."""
    leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=_compat.is_graph_object)
    return [*leaves, *aux_of(treedef)], treedef


OPENERS: dict[Opcode, Callable[[Any], Opened]] = {
    Opcode.NODE: _open_node,
    Opcode.DICT: _open_dict,
    Opcode.METADATA: _open_metadata,
    Opcode.LEAVES: _open_leaves,
    Opcode.SEQUENCE: _open_sequence,
    Opcode.STATE: _open_state,
    Opcode.TREE: open_tree,
    Opcode.STATIC: open_static,
}
OPENERS |= {opcode: _slot_opener(opcode) for opcode in Opcode if opcode not in OPENERS}


def ids_of(objects: Iterable[Any]) -> bytes:
    """Returns the ids of some objects, packed one after the other as pointers."""
    return np.fromiter(objects, object).tobytes()


def same_value(value: object, other: object) -> bool:
    """Whether two statics that are compared by value are the same."""
    if value is other:
        return True
    key = value_key(value)
    return key is not None and key == value_key(other)
