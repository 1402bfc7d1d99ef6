"""Reports on sharded programs: tables, comparisons, pages and differences."""

from .changes import Change, Changes, diff
from .comparison import Comparison, Failure, Strategy, compare
from .hlo import collectives
from .program import MeshDescription, ProgramReport, Versions
from .sharding import ShardingReport, ShardingRow, check_sharding

__all__ = [
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
    "check_sharding",
    "collectives",
    "compare",
    "diff",
]
