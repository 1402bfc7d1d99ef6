"""The reports of ``flatten`` while it reads a graph, by which a guard can read the graph again.

``flatten`` knows what the content of an object means, and a recorder knows how to repeat the walk
(``guard/recorder.py``, which imports the core, so the core names its class to type checkers only).
They name everything that is read by its *position*: its index in the list of all that is read. The
arguments come first in this list. When ``flatten`` opens a value, it tells the recorder the
position of the value and what the value holds. The recorder returns the positions of these parts.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .static_equality import Static
from .structure import Child

UNRECORDED = -1  # the position of a value that is not read again
# An endless iterable, to be zipped with any number of values that are not read again.
ALL_UNRECORDED: Iterable[int] = itertools.repeat(UNRECORDED)


class Comparison(enum.IntEnum):
    """How a value must agree with the recorded value, for a guard to hold."""

    NONE = 0  # the value itself is not compared; its content may be
    BY_VALUE = 1
    BY_IDENTITY = 2


def comparison_of(child: Child) -> Comparison:
    """Returns how the value that a child describes is compared."""
    if type(child) is not Static:
        return Comparison.NONE
    return Comparison.BY_IDENTITY if child.by_identity else Comparison.BY_VALUE


class TreePositions(NamedTuple):
    """The positions of what one or several pytrees hold, in the order of JAX."""

    leaves: Sequence[int]  # the positions of the leaves
    # The positions of the data of nodes that JAX compares by ``==`` only (`treedefs.aux_of`).
    aux: Sequence[int]
