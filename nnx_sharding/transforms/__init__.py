"""JAX's transforms for functions that take and return NNX objects, and their stages."""

from .control_flow import cond, fori_loop, switch, while_loop
from .custom_derivatives import custom_jvp, custom_vjp
from .differentiation import jvp, linearize, vjp
from .evaluation import checkify, eval_shape, make_jaxpr
from .grad import grad, value_and_grad
from .remat import remat
from .saved_residuals import Residual, SavedResiduals, saved_residuals
from .scan import scan
from .stack import Stack, stack
from .vmap import Carry, StateAxes, vmap

__all__ = [
    "Carry",
    "Residual",
    "SavedResiduals",
    "Stack",
    "StateAxes",
    "checkify",
    "cond",
    "custom_jvp",
    "custom_vjp",
    "eval_shape",
    "fori_loop",
    "grad",
    "jvp",
    "linearize",
    "make_jaxpr",
    "remat",
    "saved_residuals",
    "scan",
    "stack",
    "switch",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
]
