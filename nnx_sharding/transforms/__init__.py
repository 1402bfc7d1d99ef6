"""JAX's transforms for functions that take and return NNX objects, and their stages."""

from .batching import Carry, StateAxes, vmap
from .control_flow import cond, fori_loop, switch, while_loop
from .gradients import grad, value_and_grad
from .loops import scan
from .recompute import remat
from .residuals import Residual, SavedResiduals, saved_residuals
from .stacking import Stack, stack

__all__ = [
    "Carry",
    "Residual",
    "SavedResiduals",
    "Stack",
    "StateAxes",
    "cond",
    "fori_loop",
    "grad",
    "remat",
    "saved_residuals",
    "scan",
    "stack",
    "switch",
    "value_and_grad",
    "vmap",
    "while_loop",
]
