"""The walk over a live graph that tells whether it is still what it was.

Everything that the walk meets goes into one flat list, the stream: first the arguments, then what
they hold, then what that holds. The names in it, the types, the statics and who is who are
compared with what a recipe and pins say, each at one stroke.

There are two implementations of one class: this one, and ``_walk.c``, which does the same several
times as fast and is used where it could be compiled. They must agree.
"""

from __future__ import annotations

import array
import operator
import os
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import jax

from ... import _compat
from ..flatten import aux_of
from ..statics import opened as open_static
from ..statics import value_key
from ..unflatten import picker

Positions = tuple[int, ...]


class Wave(NamedTuple):
    """Positions in the stream whose objects are opened next; what they hold extends the stream.

    In this order: attributes of nodes and of static objects, entries of States and dicts, metadata
    of Variables, values of Variables, items of sequences, leaves and data of other pytrees, parts
    of other static objects.
    """

    nodes: Positions
    states: Positions
    dicts: Positions
    variables: Positions
    sequences: Positions
    trees: Positions
    statics: Positions


class Recipe(NamedTuple):
    """How to walk all graphs of one structure whose attributes come in one order.

    Attributes:
      waves: what to open, in turn.
      keys: the keys of each mapping that is opened, in the order of opening.
      types: the type of each object and container that is opened.
      lengths: the length of each sequence.
      treedefs: the treedef of each other pytree.
      kinds: the kind of each other static object, and how many parts it has.
      frozen: positions of statics that are compared by value.
      mentions: positions of objects, each as often as it is mentioned.
      leaves: the position of each array, by slot.
      leaf_types: their types.
      objects: the first position of each object, by index.
      size: how long the stream becomes.
    """

    waves: tuple[Wave, ...]
    keys: tuple[tuple[Any, ...], ...]
    types: tuple[type, ...]
    lengths: tuple[int, ...]
    treedefs: tuple[Any, ...]
    kinds: tuple[Any, ...]
    frozen: Positions
    mentions: Positions
    leaves: Positions
    leaf_types: tuple[type, ...]
    objects: Positions
    size: int


class Pins(NamedTuple):
    """What one graph must still have in the places that a recipe names.

    Attributes:
      frozen: statics that are compared by value.
      mentions: the id of each mentioned object, as in memory.
      trace_states: the trace state of each Variable.
      node_states: what Flax notes on each node while it is set up, and the two flags in it.
      flags: these flags.
    """

    frozen: tuple[Any, ...]
    mentions: bytes
    trace_states: tuple[Any, ...]
    node_states: tuple[Any, ...]
    flags: tuple[tuple[bool, bool], ...]


class PythonWalk:
    """A recipe, ready to be followed."""

    __slots__ = ("_frozen", "_leaves", "_mentions", "_objects", "_recipe", "_waves")

    def __init__(self, recipe: Recipe):
        self._recipe = recipe
        self._waves = [[picker(p) if p else None for p in wave] for wave in recipe.waves]
        self._frozen = picker(recipe.frozen)
        self._mentions = picker(recipe.mentions)
        self._leaves = picker(recipe.leaves)
        self._objects = picker(recipe.objects)

    def follow(
        self, pins: Pins, arguments: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any]] | None:
        """The arrays and objects of an unchanged graph, in order; None if it may have changed.

        Raises whatever comes of walking and comparing what is there now: this, too, is a change.

        Args:
          pins: what must be found.
          arguments: all arguments of the call, positional ones first.
        """
        recipe = self._recipe
        stream = list(arguments)
        opened: list[Any] = []
        mappings: list[Any] = []
        variables: list[Any] = []
        lengths: list[int] = []
        treedefs: list[Any] = []
        kinds: list[Any] = []
        for nodes, states, dicts, own_variables, sequences, trees, statics in self._waves:
            start = len(mappings)
            if nodes is not None:
                found = nodes(stream)
                opened += found
                mappings += map(object.__getattribute__, found, repeat("__dict__"))
            if states is not None:
                found = states(stream)
                opened += found
                mappings += map(_compat.get_mapping, found)
            if dicts is not None:
                found = dicts(stream)
                opened += found
                mappings += found
            values: Any = ()
            if own_variables is not None:
                found = own_variables(stream)
                opened += found
                variables += found
                mappings += map(_compat.get_metadata, found)
                values = map(_compat.get_value, found)
            items: Any = ()
            if sequences is not None:
                found = sequences(stream)
                opened += found
                lengths += map(len, found)
                items = chain.from_iterable(found)
            parts: list[Any] = []
            if trees is not None:
                for tree in trees(stream):
                    own, treedef = open_tree(tree)
                    parts += own
                    treedefs.append(treedef)
                    opened.append(tree)
            if statics is not None:
                for value in statics(stream):
                    own, kind = open_static(value)
                    parts += own
                    kinds.append(kind)
                    opened.append(value)
            stream += chain.from_iterable(map(dict.values, mappings[start:]))
            stream += values
            stream += items
            stream += parts
        if not all(map(operator.is_, map(type, opened), recipe.types)):
            return None
        if tuple(map(tuple, mappings)) != recipe.keys:
            return None
        if tuple(lengths) != recipe.lengths:
            return None
        if tuple(treedefs) != recipe.treedefs:
            return None
        if tuple(kinds) != recipe.kinds:
            return None
        if not _are_equal(self._frozen(stream), pins.frozen):
            return None
        if ids_of(self._mentions(stream)) != pins.mentions:
            return None
        leaves = self._leaves(stream)
        if not all(map(operator.is_, map(type, leaves), recipe.leaf_types)):
            return None
        trace_states = map(_compat.get_trace_state, variables)
        if not all(map(operator.is_, trace_states, pins.trace_states)):
            return None
        if tuple(map(_compat.node_flags, pins.node_states)) != pins.flags:
            return None
        return leaves, self._objects(stream)


def ids_of(objects: Sequence[Any]) -> bytes:
    """Who the objects are, as numbers of 64 bits."""
    return array.array("Q", map(id, objects)).tobytes()


def flatten_tree(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and treedef of a pytree in which graph objects are leaves."""
    return jax.tree_util.tree_flatten(tree, is_leaf=_compat.is_graph_object)


def open_tree(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a pytree and the data of its node types, and its treedef."""
    leaves, treedef = flatten_tree(tree)
    return [*leaves, *aux_of(treedef)], treedef


def _are_equal(values: Sequence[Any], pinned: Sequence[Any]) -> bool:
    if all(map(operator.is_, values, pinned)):
        return True
    return all(map(same_value, values, pinned))


def same_value(value: Any, other: Any) -> bool:
    """Whether two statics that are compared by value are the same."""
    if value is other:
        return True
    key = value_key(value)
    return key is not None and key == value_key(other)


def _load_walk() -> Any:
    try:
        from . import _walk

        _walk.set_up(open_tree, open_static, same_value, *_compat.GUARDED_SLOTS)
    except (ImportError, TypeError):  # there was no compiler, or Flax keeps things elsewhere
        return PythonWalk
    return PythonWalk if os.environ.get("NNX_SHARDING_PURE_PYTHON") else _walk.Walk


Walk: Any = _load_walk()
