"""The transforms: what ``jit`` and ``shard_map`` each decide, and the stages of both."""
