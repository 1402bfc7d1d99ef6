"""JAX's transforms for functions that take and return NNX objects, and their stages."""

from typing import TYPE_CHECKING, Any

from .checkify import checkify
from .cond import cond, switch
from .custom_derivatives import custom_jvp, custom_vjp
from .evaluation import eval_shape, make_jaxpr
from .grad import grad, value_and_grad
from .mapped_axes import Carry, StateAxes
from .remat import remat
from .saved_residuals import saved_residuals
from .scan import scan
from .stack import Stack, stack
from .vjp import jvp, linearize, vjp
from .vmap import vmap
from .while_loop import fori_loop, while_loop

if TYPE_CHECKING:
    from ..analysis.residuals import Residual, SavedResiduals

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


def __getattr__(name: str) -> Any:
    # `analysis` takes long to import, and no call needs it.
    if name in ("Residual", "SavedResiduals"):
        from ..analysis import residuals

        return getattr(residuals, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
