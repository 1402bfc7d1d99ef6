"""A recipe: how to walk through a graph, and what has to be there for it to be unchanged.

A recipe is a program for a small interpreter (``walk.py``), which keeps all that it reads in one
list, the *stream*. The stream starts with the arguments of the call. Each step opens one item,
checks the names of the item's contents, and appends the contents to the stream. If a function gets
a module ``m``, which holds an int ``n`` and a Variable ``w``, the stream is

    position  0   1   2   3         4     5
    item      m   n   w   metadata  trace array
    opened by     NODE    METADATA  TRACE VALUE
              of 0        of 2      of 2  of 2

The walk compares the items 1, 3 and 4 by value, and the items 0 and 2 by identity. Item 5 must have
the type that the recorded array had. Positions refer to the stream, so the steps that were recorded
for one model serve all models that are built alike. Only the *pins*, the recorded values and ids,
belong to one model.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Positions: TypeAlias = bytes  # positions in the stream, packed as 32-bit integers


class Opcode(enum.IntEnum):
    """How a step opens an item.

    Each comment says what kind of item is opened: what the step appends to the stream; what a walk
    compares with ``Recipe.expected``.
    """

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
    # The openers of all opcodes from here on run Python code; `walk_order.py` relies on this order.
    TREE = 11  # another pytree: its leaves and the data of its node types; its treedef
    STATIC = 12  # another static object: its parts; their kind and number


class Rule(enum.IntFlag):
    """How an item of the stream is compared."""

    FROZEN = 1  # the value of the item must equal a pin
    MENTION = 2  # the id of the item must be a pin
    TYPED = 4  # the type of the item must be the recorded type
    # The item says to which trace the graph belongs. Only `follow` compares such an item, because
    # graphs that are built alike may belong to different traces.
    OF_TRACE = 8


class Step(NamedTuple):
    """A row of ``Recipe.steps``."""

    opcode: int  # an `Opcode`
    position: int  # the position of the item that is opened
    start: int  # the position of the item's first part, which is the first that the step appends


class Recipe(NamedTuple):
    """The steps of a walk, and the pins of one graph.

    Steps that run no Python code come first. Numbers are packed, because ``walk.c`` reads them.
    """

    steps: bytes  # rows of 32-bit integers, the fields of a ``Step``
    expected: tuple[Any, ...]  # for each step: names, keys, length, treedef or kind of static
    # By position: the types of arrays and of items that a step opens; None for all other items.
    types: tuple[type | None, ...]
    rules: bytes  # by position: a `Rule`, one byte each
    # By position: the number of the item's pin in ``statics`` or in ``ids``, as a 32-bit integer.
    pins: bytes
    frozen: Positions  # the positions of statics that are compared by value
    statics: tuple[Any, ...]  # the pins of ``frozen``: the values of these statics in this graph
    mentions: Positions  # the positions of links to objects, with repetitions of shared objects
    ids: bytes  # the pins of ``mentions``: the ids of these objects, packed as pointers
    # By mention: the number of the first mention of the same object; -1 for an object that has to
    # be the recorded one.
    first: bytes
    traces: Positions  # the positions of statics that say to which trace the graph belongs
    leaves: Positions  # the positions of the arrays, by slot
    objects: Positions  # the position of the first mention of each object, by index
    num_arguments: int  # the number of arguments, which are the first items of the stream

    def rows(self) -> np.ndarray[Any, Any]:
        """Returns the steps as a table of shape (steps, fields of a ``Step``)."""
        return np.frombuffer(self.steps, np.int32).reshape(-1, len(Step._fields))


def pack_int32(numbers: Sequence[Any] | np.ndarray[Any, Any]) -> bytes:
    """Returns numbers as a recipe has them: packed as 32-bit integers."""
    return np.asarray(numbers, np.int32).tobytes()


def unpack_int32(numbers: bytes) -> list[int]:
    """Returns the numbers that ``pack_int32`` was given."""
    return np.frombuffer(numbers, np.int32).tolist()
