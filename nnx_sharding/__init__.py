"""Sharded transforms for Flax NNX: see :func:`jit`, :func:`shard_map`, :class:`StateSharding`."""

from .lifting.lifted import Lifted
from .state_sharding import StateSharding
from .transforms.jit import jit
from .transforms.shard_map import shard_map
