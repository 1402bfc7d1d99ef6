"""What a compiled program costs: memory, operations, collectives, and its roofline."""

from .compiled_collectives import collectives_of
from .cost import Cost, cost_of
from .hardware import HARDWARE, Hardware
from .memory import memory_of
from .parameters import parameter_table
from .roofline import roofline_of

__all__ = [
    "HARDWARE",
    "Cost",
    "Hardware",
    "collectives_of",
    "cost_of",
    "memory_of",
    "parameter_table",
    "roofline_of",
]
