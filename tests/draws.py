"""What several test files draw with hypothesis."""

from __future__ import annotations

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
