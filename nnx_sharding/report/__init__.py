"""Reports on sharded programs: tables, comparisons, pages and differences."""

from ..analysis.meshes import MeshDescription
from .activation_checks import ActivationReport, check_activations
from .changes import Change, Changes, diff
from .comparison import Comparison, Failure
from .program import ProgramReport, Versions
from .sharding import ShardingReport, ShardingRow, check_sharding
from .strategies import Strategy, compare

__all__ = [
    "ActivationReport",
    "Change",
    "Changes",
    "Comparison",
    "Failure",
    "MeshDescription",
    "ProgramReport",
    "ShardingReport",
    "ShardingRow",
    "Strategy",
    "Versions",
    "check_activations",
    "check_sharding",
    "compare",
    "diff",
]
