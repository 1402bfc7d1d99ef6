"""What a compiled program costs: memory, operations, collectives, and its roofline."""

from .activation_table import ActivationRow, ActivationTable
from .collectives import Collective, CollectiveKind, Collectives, collectives_of
from .cost import Cost, Costs, cost_of
from .hardware import DEVICES, Device, device, known_device
from .links import Traffic
from .memory import Memory, memory_of
from .parameters import ParameterRow, ParameterTable, parameter_table
from .roofline import Roofline, roofline_of

__all__ = [
    "DEVICES",
    "ActivationRow",
    "ActivationTable",
    "Collective",
    "CollectiveKind",
    "Collectives",
    "Cost",
    "Costs",
    "Device",
    "Memory",
    "ParameterRow",
    "ParameterTable",
    "Roofline",
    "Traffic",
    "collectives_of",
    "cost_of",
    "device",
    "known_device",
    "memory_of",
    "parameter_table",
    "roofline_of",
]
