"""Reports on sharded programs: tables, comparisons, pages and differences."""

from ..analysis.program import ProgramReport
from .changes import diff
from .comparison import Comparison
from .sharding import check_activations, check_sharding
from .strategies import Strategy, compare

__all__ = [
    "Comparison",
    "ProgramReport",
    "Strategy",
    "check_activations",
    "check_sharding",
    "compare",
    "diff",
]
