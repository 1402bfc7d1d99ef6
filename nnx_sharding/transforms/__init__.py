"""JAX's transforms within a trace, for functions that take and return NNX objects."""

from .axes import Carry, StateAxes
from .batching import vmap
from .gradients import grad, value_and_grad
from .loops import scan
from .recompute import remat
from .residuals import Residual, SavedResiduals, saved_residuals
from .stacking import stack
from .stacks import Stack

__all__ = [
    "Carry",
    "Residual",
    "SavedResiduals",
    "Stack",
    "StateAxes",
    "grad",
    "remat",
    "saved_residuals",
    "scan",
    "stack",
    "value_and_grad",
    "vmap",
]
