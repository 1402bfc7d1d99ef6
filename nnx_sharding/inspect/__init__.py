"""What a sharded program looks like, and why it was compiled again."""

from ..analysis.collectives import CollectiveKind
from ..retraces.explain import Retrace, Retraces, explain_retraces
from .assertions import (
    assert_collectives,
    assert_no_collective,
    assert_no_parameter_replicated,
    assert_peak_below,
    assert_sent_below,
)
from .changes import Change, Changes, diff
from .comparison import Comparison, Failure, Strategy, compare
from .hlo import collectives
from .parameters import ParameterRow, ParameterTable, format_table, parameter_table
from .program import MeshDescription, ProgramReport, Versions
from .virtual import planning_mesh

__all__ = [
    "Change",
    "Changes",
    "CollectiveKind",
    "Comparison",
    "Failure",
    "MeshDescription",
    "ParameterRow",
    "ParameterTable",
    "ProgramReport",
    "Retrace",
    "Retraces",
    "Strategy",
    "Versions",
    "assert_collectives",
    "assert_no_collective",
    "assert_no_parameter_replicated",
    "assert_peak_below",
    "assert_sent_below",
    "collectives",
    "compare",
    "diff",
    "explain_retraces",
    "format_table",
    "parameter_table",
    "planning_mesh",
]
