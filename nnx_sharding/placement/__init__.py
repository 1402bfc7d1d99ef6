"""Models and batches on devices, in one process or in several."""

from .batches import BatchIterator, ShardedBatches, shard_batches
from .place import place
from .rows import process_rows

__all__ = [
    "BatchIterator",
    "ShardedBatches",
    "place",
    "process_rows",
    "shard_batches",
]
