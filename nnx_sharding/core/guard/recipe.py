"""What a walk through a graph follows and compares: a recipe, and the pins of one graph."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

Positions: TypeAlias = tuple[int, ...]


class Kind(enum.IntEnum):
    """What a step opens, what that adds to the stream, and what else is compared."""

    NODE = 0  # a module or a static object: the values of its attributes; their names
    DICT = 1  # a dict: its values; its keys
    METADATA = 2  # a Variable: the values of its metadata; their names
    VALUE = 3  # a Variable: its value
    TRACE = 4  # a Variable: the trace that it belongs to
    INITIALIZING = 5  # Flax's state of a module while it is set up: a flag
    IS_SETUP = 6  # the other flag
    SEQUENCE = 7  # a tuple or list: its items; its length
    STATE = 8  # an nnx.State: its values; its keys
    TREE = 9  # another pytree: its leaves and the data of its node types; its treedef
    STATIC = 10  # another static object: its parts; its kind


# Reading these runs Python code, so they come last: the others are faster without it.
LATE_KINDS = frozenset({Kind.STATE, Kind.TREE, Kind.STATIC})


class Step(NamedTuple):
    """Opens items of one kind; what they hold is appended to the stream."""

    kind: Kind
    positions: Positions
    expected: tuple[Any, ...]  # names, keys, length, treedef or kind of each item


class Recipe(NamedTuple):
    """How to walk all graphs of one structure whose attributes have one order."""

    steps: tuple[Step, ...]
    frozen: Positions  # of statics that are compared by value
    mentions: Positions  # of objects, once for each mention
    first: tuple[int, ...]  # for each mention, the first one of its object; -1 for a fixed object
    traces: Positions  # the frozen ones that say to which trace the graph belongs
    typed: Positions  # of items whose type is compared: all opened ones, and the arrays
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
    """Another graph with the structure of a recipe."""

    found: tuple[Sequence[Any], Sequence[Any]]  # arrays and objects
    frozen: tuple[Any, ...]
    mentions: bytes
    traces: Sequence[Any]  # which its traces are, for the caller to compare
