"""Models, batches and checkpoints on devices, in one process or in several."""

from .batches import BatchIterator, ShardedBatches, shard_batches
from .checkpoints import Checkpoints, StoredArray, contents, restore, save
from .place import place
from .rows import process_rows
from .sharder import ArraySharder, SharderModuleConfig

__all__ = [
    "ArraySharder",
    "BatchIterator",
    "Checkpoints",
    "ShardedBatches",
    "SharderModuleConfig",
    "StoredArray",
    "contents",
    "place",
    "process_rows",
    "restore",
    "save",
    "shard_batches",
]
