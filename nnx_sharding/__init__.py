"""Sharded transforms for Flax NNX: ``jit``, ``shard_map``, ``StateSharding`` and their stages.

By task: ``partition`` chooses specs, ``placement`` puts models and batches on devices,
``checkpoint`` saves and restores them, ``transforms`` are for use inside others, ``training``
accumulates gradients and offloads state, ``analysis`` and ``report`` say what a program costs,
``planning`` searches for a mesh and a strategy, ``export`` writes programs to files, ``testing``
has assertions and a launcher of processes, and ``compat`` has the names of other libraries.
``experimental`` has parts with a shorter promise. All other modules are internal.
"""

import importlib
from typing import TYPE_CHECKING

from . import errors, filters, stages
from ._version import __version__
from .core.structure import Structure
from .diagnostics.retraces import explain_retraces, limit_traces
from .specs.activation_sharding import ActivationSharding, InOutSharding
from .specs.state_sharding import StateSharding
from .transforms import (
    Carry,
    Stack,
    StateAxes,
    checkify,
    cond,
    custom_jvp,
    custom_vjp,
    eval_shape,
    fori_loop,
    grad,
    jvp,
    linearize,
    make_jaxpr,
    remat,
    saved_residuals,
    scan,
    stack,
    switch,
    value_and_grad,
    vjp,
    vmap,
    while_loop,
)
from .transforms.jit import jit
from .transforms.lifted import Lifted
from .transforms.shard_map import shard_map
from .transforms.split_merge import merge, split

if TYPE_CHECKING:
    from . import (
        analysis,
        checkpoint,
        compat,
        diagnostics,
        experimental,
        export,
        partition,
        placement,
        planning,
        report,
        testing,
        training,
    )
    from .partition import (
        auto_axes,
        explicit_axes,
        fsdp,
        make_mesh,
        replicated,
        reshard,
        sharded_init,
        with_sharding_constraint,
        zero1,
    )
    from .partition.tensor_parallel import tensor_parallel
    from .placement.place import place
    from .training import accumulate_gradients

__all__ = [
    "ActivationSharding",
    "Carry",
    "InOutSharding",
    "Lifted",
    "Stack",
    "StateAxes",
    "StateSharding",
    "Structure",
    "__version__",
    "accumulate_gradients",
    "auto_axes",
    "checkify",
    "cond",
    "custom_jvp",
    "custom_vjp",
    "errors",
    "eval_shape",
    "explain_retraces",
    "explicit_axes",
    "filters",
    "fori_loop",
    "fsdp",
    "grad",
    "jit",
    "jvp",
    "limit_traces",
    "linearize",
    "make_jaxpr",
    "make_mesh",
    "merge",
    "place",
    "remat",
    "replicated",
    "reshard",
    "saved_residuals",
    "scan",
    "shard_map",
    "sharded_init",
    "split",
    "stack",
    "stages",
    "switch",
    "tensor_parallel",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
    "with_sharding_constraint",
    "zero1",
]

# These modules are imported on first use, because most programs need one or two of them.
_MODULES = frozenset(
    {
        "analysis",
        "checkpoint",
        "compat",
        "diagnostics",
        "experimental",
        "export",
        "partition",
        "placement",
        "planning",
        "report",
        "testing",
        "training",
    }
)
# The modules of names in `__all__` that are not imported above. All other such names are in
# `partition`.
_ELSEWHERE = {"accumulate_gradients": "training", "place": "placement"}


def __getattr__(name: str) -> object:
    """Returns a module, or a function of one, that is imported when it is first used."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in __all__:
        module = _ELSEWHERE.get(name, "partition")
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    # Names that this file imports for itself, such as `importlib`, are left out.
    return sorted({*_MODULES, *__all__, *(name for name in globals() if name.startswith("__"))})
