"""Sharded transforms for Flax NNX: ``jit``, ``shard_map``, ``StateSharding`` and their stages."""

from . import errors, stages
from ._version import __version__
from .graph import merge, split
from .lifting.lifted import Lifted
from .lifting.structure import Structure
from .retraces.explain import explain_retraces
from .retraces.limits import limit_traces
from .state_sharding import StateSharding
from .transforms.jit import jit
from .transforms.shard_map import shard_map

__all__ = [
    "Lifted",
    "StateSharding",
    "Structure",
    "__version__",
    "errors",
    "explain_retraces",
    "jit",
    "limit_traces",
    "merge",
    "shard_map",
    "split",
    "stages",
]
