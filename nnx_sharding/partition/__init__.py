"""Choosing how arrays are partitioned over a mesh."""

from typing import TYPE_CHECKING, Any

from ..errors import moved_name
from .axis_modes import auto_axes, explicit_axes
from .constrain import reshard, with_sharding_constraint
from .init import abstract_init, sharded_init
from .mesh import make_mesh, planning_mesh
from .optimizer import optimizer_sharding
from .pipelining import idle_share, pipeline
from .rules import LogicalRules, from_arrays, from_logical, from_metadata, from_rules, override
from .strategies import fsdp, replicated, zero1
from .tensor_parallel import tensor_parallel
from .variables import specs_by_path

__all__ = [
    "LogicalRules",
    "abstract_init",
    "auto_axes",
    "explicit_axes",
    "from_arrays",
    "from_logical",
    "from_metadata",
    "from_rules",
    "fsdp",
    "idle_share",
    "make_mesh",
    "optimizer_sharding",
    "override",
    "pipeline",
    "planning_mesh",
    "replicated",
    "reshard",
    "sharded_init",
    "specs_by_path",
    "tensor_parallel",
    "with_sharding_constraint",
    "zero1",
]

_MOVED = dict.fromkeys(
    (
        "ExpertStatistics",
        "balanced_order",
        "context_parallel",
        "dispatch_to_experts",
        "expert_parallel",
        "ring_attention",
    ),
    "nnx_sharding.experimental",
)


if not TYPE_CHECKING:  # with it, type checkers would find any name here

    def __getattr__(name: str) -> Any:
        return moved_name(__name__, name, _MOVED)
