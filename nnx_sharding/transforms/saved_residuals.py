"""``saved_residuals``: the arrays that a function keeps from the forward to the backward pass.

The function is differentiated in a trace without values, by `jax.vjp`. The leaves of the pullback
are the residuals. `analysis/residuals.py` finds the operation that computes each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import Literal
from jax.sharding import AxisType, NamedSharding

from .. import _compat
from ..activations.calls import RECORD, Calls
from ..core.call_context import Caller, called_by
from ..core.declared import abstract
from .in_trace import call_on_slots
from .jit import jit
from .lifted import Lifted
from .tangents import is_inexact

if TYPE_CHECKING:
    from ..analysis.residuals import SavedResiduals


@_compat.api_boundary
def saved_residuals(
    fun: Callable[..., object], /, *args: object, **kwargs: object
) -> SavedResiduals:
    """Lists the arrays that a function keeps for the backward pass, without running it.

    Args:
      fun: a function of modules and arrays, such as a loss. All floating-point arrays of its
        arguments count as differentiated.
      *args: its arguments, which may be abstract.
      **kwargs: its keyword arguments.

    Returns:
      The arrays that are kept, each with the module that computes it, its size, and its memory.
      Arrays that are kept inside a loop over layers are stacked, and the size is for all layers.
      Sizes are those of whole arrays; on meshes of Explicit axes also those on each device.

    Raises:
      TypeError: arguments are not arrays, or do not fit the signature of ``fun``.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import remat, saved_residuals
      >>> model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
      >>> def loss(model, x):
      ...     return jnp.sin(model(x)).sum()
      >>> print(saved_residuals(loss, model, jnp.ones((2, 4))))
      kept for the backward pass: 64 B in whole arrays
      64 B  device  float32[2, 8]  cos  loss
      of arrays that are sharded each device holds a part: known only on Explicit axes
      >>> saved_residuals(remat(loss), model, jnp.ones((2, 4))).bytes()
      0
    """
    from ..analysis.residuals import SavedResiduals, residual_of

    lifted: Lifted[..., Any] = fun if isinstance(fun, Lifted) else jit(fun)
    plan, flat = lifted._plan_without_running(args, kwargs)
    program = lifted._program(plan, flat).staged  # a function of all leaves

    def inexact_outputs(*leaves: object) -> list[jax.Array]:
        """Returns the floating-point arrays that the function returns or writes back."""
        *groups, _ = program(*leaves)
        return [x for group in groups for x in group.arrays if is_inexact(x)]

    def vjp_of(function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``jax.vjp`` of a function: it takes arrays, and returns outputs and pullback."""
        return functools.partial(jax.vjp, function)

    def residuals(*leaves: object) -> list[jax.Array]:
        """Returns the arrays in the pullback at the floating-point leaves."""
        slots = [slot for slot, leaf in enumerate(leaves) if is_inexact(leaf)]
        _, pullback = call_on_slots(vjp_of, inexact_outputs, leaves, slots)
        return jax.tree.leaves(pullback)  # the pullback is a pytree of the arrays that it keeps

    # While calls are recorded, the names of operations have the paths of modules.
    with RECORD(Calls()), called_by(Caller(lifted._fun, flat.objects)):
        jaxpr = jax.make_jaxpr(residuals)(*map(_typed, flat.leaves)).jaxpr
    # An array counts once, though JAX may keep it for several operations. A literal is a constant
    # number of the program, and takes no memory.
    kept_arrays = {id(x): x for x in jaxpr.outvars if not isinstance(x, Literal)}
    # A row is None for a constant, because no operation computes it.
    rows = (residual_of(x, jaxpr, plan.names, plan.fun_name) for x in kept_arrays.values())
    return SavedResiduals(row for row in rows if row is not None)


def _typed(leaf: Any) -> Any:
    """Returns the abstract form of a leaf, with its sharding if the sharding is part of its type.

    Shardings are parts of types on meshes with Explicit axes. All that the trace computes from such
    a leaf then has a sharding in its type, too, which says the bytes on each device.
    """
    sharding = getattr(jax.typeof(leaf), "sharding", None) if isinstance(leaf, jax.Array) else None
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        return abstract(leaf, sharding)
    return abstract(leaf)
