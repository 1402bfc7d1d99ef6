"""Loops that run in C: they are fast, and no signal is handled between two of their steps.

Python handles a signal between two instructions of Python code.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

Operation: TypeAlias = tuple[Any, ...]  # a function and its arguments


def perform(operations: Iterable[Operation]) -> None:
    """Runs all operations in C: no Python code runs in between, so no signal can interrupt them."""
    deque(itertools.starmap(operator.call, operations), maxlen=0)


def items_getter(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Returns a function that returns the items at these positions of a sequence, at C speed."""
    if not positions:
        return lambda items: ()
    if len(positions) == 1:  # itemgetter of one position would return an item, not a sequence
        start = positions[0]
        return operator.itemgetter(slice(start, start + 1))
    return operator.itemgetter(*positions)
