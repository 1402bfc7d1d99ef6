"""What a walk through a graph follows and compares: a recipe, and the pins of one graph."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Positions: TypeAlias = bytes  # in the stream, as 32-bit integers


class Opcode(enum.IntEnum):
    """What a step opens, what that adds to the stream, and what else is compared."""

    NODE = 0  # a module or a static object: the values of its attributes; their names
    DICT = 1  # a dict: its values; its keys
    METADATA = 2  # a Variable: the values of its metadata; their names
    VALUE = 3  # a Variable: its value
    TRACE = 4  # a Variable: the trace that it belongs to
    INITIALIZING = 5  # Flax's state of a module while it is set up: a flag
    IS_SETUP = 6  # the other flag
    TREEDEF = 7  # a hijax Variable: its treedef, which has the metadata
    LEAVES = 8  # a hijax Variable: its arrays; their number
    SEQUENCE = 9  # a tuple or list: its items; its length
    STATE = 10  # an nnx.State: its values; its keys
    # From here on, opening runs Python code.
    TREE = 11  # another pytree: its leaves and the data of its node types; its treedef
    STATIC = 12  # another static object: its parts; their kind and number


class Rule(enum.IntFlag):
    """How an item of the stream is compared."""

    FROZEN = 1  # with a pin, by value
    MENTION = 2  # with a pin, by its id
    TYPED = 4  # by its type
    OF_TRACE = 8  # it says to which trace the graph belongs, so only within the same graph


class Step(NamedTuple):
    """A row of ``Recipe.steps``."""

    opcode: int
    position: int  # that is opened
    start: int  # the position of the first part


class Recipe(NamedTuple):
    """How to walk all graphs of one structure whose attributes have one order.

    Each step opens one item of the stream, and appends what it holds. The steps that run no Python
    code come first.
    """

    steps: bytes  # rows of 32-bit integers
    expected: tuple[Any, ...]  # for each step: names, keys, length, treedef or kind of static
    # of all opened items and arrays; None for the rest of the stream
    types: tuple[type | None, ...]
    rules: bytes  # by position, one byte each
    pins: bytes  # by position, the number among ``frozen`` or ``mentions``, as a 32-bit integer
    frozen: Positions  # of statics that are compared by value
    mentions: Positions  # of objects, once for each mention
    first: bytes  # for each mention, the number of the first of its object; -1 for a fixed object
    traces: Positions  # the frozen ones that say to which trace the graph belongs
    leaves: Positions  # of the arrays, by slot
    objects: Positions  # of the first mention of each object, by index
    num_arguments: int

    def rows(self) -> np.ndarray[Any, Any]:
        """The steps as a table."""
        return np.frombuffer(self.steps, np.int32).reshape(-1, len(Step._fields))


class Pins(NamedTuple):
    """What one graph must still have at the positions of a recipe."""

    frozen: tuple[Any, ...]
    mentions: bytes  # the ids of the objects, as in memory


class Route(NamedTuple):
    """A guard as ``_native.call`` uses it."""

    follow: Any
    names: tuple[str, ...]  # of the keyword arguments
    plan: Any
    execute: Any  # what runs the program
    donates: bool
    context_of: Any  # returns the mesh in context; None if the plan does not depend on it
    context: Any
    slots: bytes  # of the arrays that have to be placed, or whose shapes matter
    shardings: list[Any]  # of these; None for those that are not placed
    avals: list[Any]  # of these; empty if shapes do not matter
    known: list[Any]  # for each, a weak reference to an array that is as it should be
    entry: Any  # keeps the weak references that end this route


def packed(numbers: Sequence[Any] | np.ndarray[Any, Any]) -> bytes:
    """Numbers as a recipe has them."""
    return np.asarray(numbers, np.int32).tobytes()


def unpacked(numbers: bytes) -> list[int]:
    """The inverse of :func:`packed`."""
    return np.frombuffer(numbers, np.int32).tolist()
