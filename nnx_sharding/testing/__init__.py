"""For tests: assertions about programs, and several processes on one machine."""

from .assertions import (
    assert_bytes_sent_below,
    assert_collectives,
    assert_gathers_weights,
    assert_no_collective,
    assert_no_resharding,
    assert_overlappable,
    assert_peak_below,
    assert_sharded,
)
from .launcher import launch
from .lock import assert_unchanged
from .replaying import replay
from .same import assert_same

__all__ = [
    "assert_bytes_sent_below",
    "assert_collectives",
    "assert_gathers_weights",
    "assert_no_collective",
    "assert_no_resharding",
    "assert_overlappable",
    "assert_peak_below",
    "assert_same",
    "assert_sharded",
    "assert_unchanged",
    "launch",
    "replay",
]
