"""What several test files draw with hypothesis, and how they try all that could be drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import TypeVar

from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P


@st.composite
def specs(draw, axes, rank):
    """A spec that uses each axis at most once, several in one dimension, in any order.

    Of the dimensions behind the last sharded one, it names some.
    """
    entries = [()] * rank
    for axis in draw(st.permutations(axes)):
        dimension = draw(st.integers(0, rank))
        if dimension < rank:
            entries[dimension] = (*entries[dimension], axis)
    used = max((i for i, entry in enumerate(entries, 1) if entry), default=0)
    entries = [entry if len(entry) > 1 else entry[0] if entry else None for entry in entries]
    return P(*entries[: draw(st.integers(used, rank))])


_Case = TypeVar("_Case")


def of_a_night(cases: Iterable[_Case], count: int) -> list[_Case]:
    """Draws so many cases with the seed of the test."""
    return random.sample([*cases], count)


def try_all(check: Callable[[_Case], object], cases: Iterable[_Case]) -> None:
    """Checks cases, also after a failure, and raises all failures as one.

    A merge draws some of the cases. So that it does not fail for a fault that is older than the
    change, a night has to see all of them, not only those up to the first failure.
    """
    failures = []
    for case in cases:
        try:
            check(case)
        except Exception as error:
            error.add_note(f"the case was {case!r}")
            failures.append(error)
    if failures:
        raise ExceptionGroup(f"{len(failures)} cases failed", failures)
