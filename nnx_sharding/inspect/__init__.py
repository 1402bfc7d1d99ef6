"""What a sharded program looks like, and why it was compiled again."""

from .hlo import CollectiveKind, collectives
from .parameters import ParameterRow, format_table, parameter_table
from .retraces import Retrace, Retraces, explain_retraces

__all__ = [
    "CollectiveKind",
    "ParameterRow",
    "Retrace",
    "Retraces",
    "collectives",
    "explain_retraces",
    "format_table",
    "parameter_table",
]
