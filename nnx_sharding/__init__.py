"""Sharded transforms for Flax NNX: ``jit``, ``shard_map``, ``StateSharding`` and their stages.

What is needed around them is in ``partition`` (choosing specs), ``placement`` (models, batches and
checkpoints on devices), ``inspect`` and ``analysis`` (what a program takes), ``exporting``,
``launching``, ``filters`` and ``constraints``. All other modules are internal.
"""

import importlib
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from . import (
        analysis,
        constraints,
        exporting,
        filters,
        inspect,
        launching,
        partition,
        placement,
    )

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

# Imported when they are first asked for: most programs need one or two of them.
_ON_DEMAND = frozenset(
    {
        "analysis",
        "constraints",
        "exporting",
        "filters",
        "inspect",
        "launching",
        "partition",
        "placement",
    }
)


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_DEMAND})
