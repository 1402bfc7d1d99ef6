"""Reports on sharded programs: tables, comparisons, pages and differences."""

from .activation_checks import check_activations
from .changes import diff
from .comparison import Comparison
from .program import ProgramReport
from .sharding import check_sharding
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
