"""Tables that keep only their newest entries.

Without a lock, since comparing keys and collecting garbage may run the user's code.
"""

from __future__ import annotations

from typing import Any, TypeVar

V = TypeVar("V")


def make_room(table: dict[Any, V], limit: int) -> list[V]:
    """Removes the oldest entries of a dict until no more than ``limit`` are left; returns them."""
    removed = []
    while len(table) > limit:
        try:
            removed.append(table.pop(next(iter(table))))
        except (RuntimeError, StopIteration, KeyError):  # changed by another thread or a finalizer
            continue
    return removed
