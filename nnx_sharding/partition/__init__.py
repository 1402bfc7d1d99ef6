"""Choosing how arrays are split over a mesh.

``rules``, ``logical`` and ``strategies`` (with ``tensor_parallel`` and ``optimizer``) give a
:class:`~nnx_sharding.StateSharding`; ``report`` checks one, ``init`` makes a model that is laid out
by it, ``constrain`` lays out arrays inside of a function.
"""

from .constrain import with_sharding_constraint
from .init import abstract_init, sharded_init
from .logical import LogicalRules, Unsharded, from_logical
from .mesh import make_mesh
from .optimizer import optimizer_sharding
from .paths import Found, exact, spec_table, variables
from .report import ShardingReport, ShardingRow, assert_sharded, check_sharding
from .rules import from_arrays, from_metadata, from_rules, override
from .strategies import fsdp, replicated, zero1
from .tensor_parallel import tensor_parallel

__all__ = [
    "Found",
    "LogicalRules",
    "ShardingReport",
    "ShardingRow",
    "Unsharded",
    "abstract_init",
    "assert_sharded",
    "check_sharding",
    "exact",
    "from_arrays",
    "from_logical",
    "from_metadata",
    "from_rules",
    "fsdp",
    "make_mesh",
    "optimizer_sharding",
    "override",
    "replicated",
    "sharded_init",
    "spec_table",
    "tensor_parallel",
    "variables",
    "with_sharding_constraint",
    "zero1",
]
