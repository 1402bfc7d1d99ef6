"""Models and batches on devices, in one process or in several."""

from .batch_sharding import process_rows
from .batches import shard_batches
from .place import place

__all__ = ["place", "process_rows", "shard_batches"]
