"""A recipe: how to walk through a graph, and what has to be there for it to be unchanged.

It is a program for a small interpreter (``walk.py``), which keeps all that it reads in one list,
the *stream*. The stream starts with the arguments of the call. Each step opens one item of it,
checks the names of what the item holds, and appends that. For a function of a module ``m`` with an
int ``n`` and a Variable ``w``, the stream is

    position  0   1   2   3         4     5
    item      m   n   w   metadata  trace array
    opened by     NODE    METADATA  TRACE VALUE
              of 0        of 2      of 2  of 2

and 1, 3 and 4 are compared by value, 0 and 2 by identity; 5 must have the type of an array.
Positions refer to the stream, so the recipe of one model serves all models that are built alike;
only what is compared, the *pins*, belongs to one of them.
"""

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

    opcode: int  # an `Opcode`
    position: int  # of the item that is opened
    start: int  # the position of the first of its parts, which the step appends


class Recipe(NamedTuple):
    """The steps of a walk, and the pins of one graph.

    Steps that run no Python code come first. Numbers are packed, since ``walk.c`` reads them.
    """

    steps: bytes  # rows of 32-bit integers, the fields of a ``Step``
    expected: tuple[Any, ...]  # for each step: names, keys, length, treedef or kind of static
    # of all opened items and arrays; None for the rest of the stream
    types: tuple[type | None, ...]
    rules: bytes  # by position, one byte each
    pins: bytes  # by position, the number among ``frozen`` or ``mentions``, as a 32-bit integer
    frozen: Positions  # of statics that are compared by value
    statics: tuple[Any, ...]  # these statics in this graph
    mentions: Positions  # of objects, once for each mention
    ids: bytes  # the ids of these objects in this graph, as in memory
    first: bytes  # for each mention, the number of the first of its object; -1 for a fixed object
    traces: Positions  # the frozen ones that say to which trace the graph belongs
    leaves: Positions  # of the arrays, by slot
    objects: Positions  # of the first mention of each object, by index
    num_arguments: int

    def rows(self) -> np.ndarray[Any, Any]:
        """Returns the steps as a table of shape (steps, fields of a ``Step``)."""
        return np.frombuffer(self.steps, np.int32).reshape(-1, len(Step._fields))


def pack_int32(numbers: Sequence[Any] | np.ndarray[Any, Any]) -> bytes:
    """Returns numbers as a recipe has them."""
    return np.asarray(numbers, np.int32).tobytes()


def unpack_int32(numbers: bytes) -> list[int]:
    """Returns the numbers that ``pack_int32`` was given."""
    return np.frombuffer(numbers, np.int32).tolist()
