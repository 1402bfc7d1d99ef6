"""What a sharded program looks like: how its parameters lie, what its devices exchange."""

from .hlo import CollectiveKind, collectives
from .parameters import ParameterRow, format_table, parameter_table

__all__ = [
    "CollectiveKind",
    "ParameterRow",
    "collectives",
    "format_table",
    "parameter_table",
]
