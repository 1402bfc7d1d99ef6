"""Follows a recipe through a live graph: is it still the one that was recorded?

A walk reads the graph into a list, the *stream*: it starts with the arguments of the call, and each
step of the recipe opens one item of it and appends what that holds. Then it compares some items
with the *pins* of the recipe, which are what the recorded graph had there: *frozen* statics by
their values, and *mentions* of objects by their ids. For a function of a module ``m`` with an int
``n`` and a Variable ``w``, the stream is ``[m, n, w, metadata, trace, array]``: one step has opened
``m``, the others ``w``. Then ``n``, the metadata and the trace are frozen, ``m`` and ``w`` are
mentions, and of the array only the type is compared.

``PythonWalk`` is the reference, written to be read, and what is used without the extension.
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
from ..static_equality import open_static, value_key
from ..treedefs import PyTreeDef, aux_of
from ..unflatten import items_getter
from .recipe import Opcode, Recipe, unpack_int32

# What an item holds, and what must be as expected: names, keys, a length, or a treedef.
Opened: TypeAlias = tuple[Iterable[Any], Any]
# The arrays and the objects of a graph, by slot and by index.
Followed: TypeAlias = tuple[Sequence[Any], Sequence[Any]]


class Matched(NamedTuple):
    """What a graph holds that is built like the recorded one. ``walk.c`` returns plain tuples."""

    leaves: Sequence[Any]  # its arrays, by slot
    objects: Sequence[Any]  # by index
    statics: tuple[Any, ...]  # the pins that a recipe of this graph has, as ``Recipe.statics``
    ids: bytes  # likewise, as ``Recipe.ids``
    traces: Sequence[Any]  # to which its modules and Variables belong


class Walk(Protocol):
    """A recipe, ready to be followed. Any error means that the graph may have changed."""

    recipe: Recipe

    def __init__(self, recipe: Recipe): ...

    def follow(self, arguments: tuple[Any, ...]) -> Followed | None:
        """Returns what the recorded graph holds; None if it may have changed."""

    def match(self, arguments: tuple[Any, ...]) -> Matched | None:
        """Returns what another graph of the same structure holds; None if the structure differs.

        The caller has to compare the traces with the current one.
        """


class _Step(NamedTuple):
    """A step of a recipe, unpacked."""

    open_item: Callable[[Any], Opened]  # the opener for its opcode
    position: int  # of the item that it opens
    recorded_type: type | None  # which this item must have
    expected: Any  # what else the opener must find: names, keys, a length or a treedef


class PythonWalk:
    """The walk in Python. In ``walk.c``, the methods have the same names.

    ``_read`` returns the stream of a graph, ``_leaves_in`` and so on pick items of it: arrays by
    slot, objects by index, frozen statics, mentions of objects, and traces. ``_first_mention`` has
    for each mention the number of the first one of its object in the recorded graph; -1 if it has
    to be the recorded object (it is *pinned*). With mentions of a, b, a it is ``[0, 1, 0]``.
    """

    def __init__(self, recipe: Recipe):
        """Unpacks the numbers of a recipe, once for all walks."""
        self.recipe = recipe
        self._steps: list[_Step] = []
        rows = recipe.rows().tolist()  # the third number is where a step appends: at the end here
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
        """Returns what the recorded graph holds; None if it may have changed."""
        stream = self._read(arguments)
        if stream is None:
            return None
        statics = self._frozen_in(stream)
        pins = self.recipe.statics
        are_same = all(map(operator.is_, statics, pins))  # nearly always, and fast to find out
        if not are_same and not all(map(same_value, statics, pins)):
            return None
        if ids_of(self._mentions_in(stream)) != self.recipe.ids:
            return None
        return self._leaves_in(stream), self._objects_in(stream)

    def match(self, arguments: tuple[Any, ...]) -> Matched | None:
        """Returns what another graph of the same structure holds; None if the structure differs.

        Statics have to be equal, and objects others, but shared in the same places: where the
        recorded graph had one object twice, this one has to as well.
        """
        stream = self._read(arguments)
        if stream is None:
            return None
        # Among the statics are the traces of the graph. They differ between graphs that are built
        # alike, so the caller compares them, with the trace that is current.
        statics = self._frozen_in(stream)
        traces = self._traces_in(stream)
        trace_ids = {*map(_compat.identity, traces)}  # by id: other statics need no hash
        for static, pin in zip(statics, self.recipe.statics, strict=True):
            if _compat.identity(static) not in trace_ids and not same_value(static, pin):
                return None
        # Each mention must be of the same object as the first mention of that object in the
        # recorded graph: with mentions of a, b, a, the third id must equal the first. Where there
        # is no first one, the object is pinned, and must be the recorded one.
        ids = np.frombuffer(ids_of(self._mentions_in(stream)), np.uint64)
        recorded_ids = np.frombuffer(self.recipe.ids, np.uint64)
        ids_of_first = np.where(self._first_mention < 0, recorded_ids, ids[self._first_mention])
        if not np.array_equal(ids, ids_of_first):
            return None
        # Objects that were different must not be one now. A set would be slow: addresses are
        # multiples of a power of two, so that many have one hash in it.
        objects = self._objects_in(stream)
        if np.unique(np.frombuffer(ids_of(objects), np.uintp)).size != len(objects):
            return None
        return Matched(self._leaves_in(stream), objects, tuple(statics), ids.tobytes(), traces)

    def _read(self, arguments: tuple[Any, ...]) -> list[Any] | None:
        """Returns the stream of a graph; None if something differs in type, names or length."""
        stream = [*arguments]
        for step in self._steps:
            item = stream[step.position]
            if type(item) is not step.recorded_type:
                return None
            parts, compared = step.open_item(item)  # a NODE: values of attributes, and their names
            if compared != step.expected:
                return None
            stream += parts
        # No step opens an array, so the types of arrays are still to be compared.
        if not all(map(operator.is_, map(type, self._leaves_in(stream)), self._leaf_types)):
            return None
        return stream


# Each opener returns what an item holds, and what is compared before that: names or keys in order,
# a length, or a treedef.


def _open_node(node: object) -> Opened:
    attributes = _compat.get_dict(node)
    return attributes.values(), (*attributes,)


def _open_dict(mapping: dict[Any, Any]) -> Opened:
    if not {str, int}.issuperset(map(type, mapping)):
        raise TypeError("other keys may be equal without being the same")
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
    """Returns the leaves of a pytree followed by the data of its node types; and its treedef."""
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
    """Returns the ids of some objects, one after the other, as an array of pointers in memory."""
    return np.fromiter(objects, object).tobytes()


def same_value(value: object, other: object) -> bool:
    """Whether two statics that are compared by value are the same."""
    if value is other:
        return True
    key = value_key(value)
    return key is not None and key == value_key(other)
