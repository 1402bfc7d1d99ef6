"""Tables that keep only their newest entries.

No lock is taken, because comparing keys and collecting garbage may run the user's code.
"""

from __future__ import annotations

from typing import Any, TypeVar

V = TypeVar("V")


def make_room(table: dict[Any, V], limit: int) -> list[V]:
    """Removes the oldest entries of a dict beyond ``limit``; returns the removed values."""
    removed = []
    while len(table) > limit:
        try:
            removed.append(table.pop(next(iter(table))))
        except (RuntimeError, StopIteration, KeyError):
            continue  # another thread or a finalizer has changed the dict meanwhile
    return removed
