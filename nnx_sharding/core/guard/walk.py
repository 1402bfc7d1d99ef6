"""Follows a recipe through a live graph: is it still the one that was recorded?

``PythonWalk`` is the reference, written to be read, and what is used without the extension. It
opens one item after the other. ``walk.c`` does the same up to a hundred times as fast, and must
agree; the tests run both.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

from ... import _compat
from ..static_equality import opened as open_static
from ..static_equality import value_key
from ..treedefs import aux_of
from ..unflatten import picker
from .recipe import Opcode, Recipe, unpacked

# What an item holds, and what must be as expected: names, keys, a length, or a treedef.
Opened: TypeAlias = tuple[Iterable[Any], Any]
# The arrays and the objects of a graph, by slot and by index.
Followed: TypeAlias = tuple[Sequence[Any], Sequence[Any]]
# The same of another graph, with its statics and ids for a recipe, and its traces.
Matched: TypeAlias = tuple[Sequence[Any], Sequence[Any], tuple[Any, ...], bytes, Sequence[Any]]


class Walk(Protocol):
    """A recipe, ready to be followed. Any error means that the graph may have changed."""

    recipe: Recipe

    def __init__(self, recipe: Recipe): ...

    def follow(self, arguments: tuple[Any, ...]) -> Followed | None:
        """Returns what the graph holds; None if it may have changed."""

    def match(self, arguments: tuple[Any, ...]) -> Matched | None:
        """Returns what another graph of the same structure holds; None if the structure differs.

        The caller has to compare the traces with the current one.
        """


class PythonWalk:
    """The walk in Python."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        rows = zip(recipe.rows().tolist(), recipe.expected, strict=True)
        self._steps = [
            (OPENERS[Opcode(opcode)], position, recipe.types[position], expected)
            for (opcode, position, _), expected in rows
        ]
        fields = recipe.leaves, recipe.objects, recipe.frozen, recipe.mentions, recipe.traces
        self._leaves, self._objects, self._frozen, self._mentions, self._traces = (
            picker(unpacked(field)) for field in fields
        )
        self._leaf_types = [recipe.types[position] for position in unpacked(recipe.leaves)]
        self._first = np.frombuffer(recipe.first, np.int32)

    def follow(self, arguments: tuple[Any, ...]) -> Followed | None:
        """Returns what the graph holds; None if it may have changed."""
        stream = self._read(arguments)
        if stream is None:
            return None
        statics = self._frozen(stream)
        is_same = all(map(operator.is_, statics, self.recipe.statics))  # nearly always, and fast
        if not is_same and not all(map(same_value, statics, self.recipe.statics)):
            return None
        if ids_of(self._mentions(stream)) != self.recipe.ids:
            return None
        return self._leaves(stream), self._objects(stream)

    def match(self, arguments: tuple[Any, ...]) -> Matched | None:
        """Returns what another graph of the same structure holds; None if the structure differs."""
        stream = self._read(arguments)
        if stream is None:
            return None
        statics, traces = self._frozen(stream), self._traces(stream)
        of_traces = {*map(_compat.identity, traces)}
        pairs = zip(statics, self.recipe.statics, strict=True)
        if not all(_compat.identity(x) in of_traces or same_value(x, y) for x, y in pairs):
            return None
        # Objects are others, but shared in the same places: each mention is of the same object as
        # the first one. Fixed objects, without a first mention, are the recorded ones.
        ids = np.frombuffer(ids_of(self._mentions(stream)), np.uint64)
        pinned = np.frombuffer(self.recipe.ids, np.uint64)
        if not np.array_equal(ids, np.where(self._first < 0, pinned, ids[self._first])):
            return None
        objects = self._objects(stream)
        # Sorted: regular addresses collide in a set.
        if np.unique(np.frombuffer(ids_of(objects), np.uintp)).size != len(objects):
            return None
        return self._leaves(stream), objects, tuple(statics), ids.tobytes(), traces

    def _read(self, arguments: tuple[Any, ...]) -> list[Any] | None:
        """Returns the stream; None if something differs in type, names or length."""
        stream = [*arguments]
        for open_item, position, own_type, expected in self._steps:
            item = stream[position]
            if type(item) is not own_type:
                return None
            parts, names = open_item(item)
            if names != expected:
                return None
            stream += parts
        if not all(map(operator.is_, map(type, self._leaves(stream)), self._leaf_types)):
            return None
        return stream


def _open_node(node: Any) -> Opened:
    attributes = _compat.get_dict(node)
    return attributes.values(), (*attributes,)


def _open_dict(mapping: dict[Any, Any]) -> Opened:
    if not {str, int}.issuperset(map(type, mapping)):
        raise TypeError("other keys may be equal without being the same")
    return mapping.values(), (*mapping,)


def _open_metadata(variable: Any) -> Opened:
    metadata = _compat.get_metadata(variable)
    return metadata.values(), (*metadata,)


def _open_leaves(variable: Any) -> Opened:
    return _open_sequence(_compat.get_leaves(variable))


def _open_state(state: Any) -> Opened:
    return _open_dict(_compat.get_mapping(state))


def _open_sequence(sequence: Sequence[Any]) -> Opened:
    return sequence, len(sequence)


def _slot_opener(opcode: Opcode) -> Callable[[Any], Opened]:
    get = _compat.SLOTS[opcode.name].__get__
    return lambda item: ((get(item),), None)


def open_tree(tree: Any) -> tuple[list[Any], Any]:
    """Returns the leaves of a pytree and the data of its node types; its treedef."""
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
    """Returns the ids of some objects, as in memory."""
    return np.fromiter(objects, object).tobytes()


def same_value(value: Any, other: Any) -> bool:
    """Whether two statics that are compared by value are the same."""
    if value is other:
        return True
    key = value_key(value)
    return key is not None and key == value_key(other)
