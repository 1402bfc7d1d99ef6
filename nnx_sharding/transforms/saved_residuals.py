"""``saved_residuals``: what a function keeps from the forward to the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from .. import _compat
from ..activations.calls import RECORD, Calls
from ..analysis.memory import array_bytes
from ..analysis.tables import Pictured, text
from ..analysis.units import bytes_text
from ..core.call_context import Caller, called_by
from ..core.known_faults import jaxprs_of, path_of
from ..core.placing import abstract
from .differentiation import is_inexact
from .in_trace import of_slots
from .jit import jit
from .lifted import Lifted


class Residual(NamedTuple):
    """One array that is kept from the forward to the backward pass.

    Attributes:
      source: where it comes from: the path of the module that computes it, such as
        ``model.blocks[0].up``, or, for an argument, its expression.
      operation: the operation that computes it; ``"argument"`` for an argument, which is in memory
        in any case.
      shape: its shape.
      dtype: its dtype.
      memory: where it is kept: ``"device"`` or ``"host"``.
    """

    source: str
    operation: str
    shape: tuple[int, ...]
    dtype: Any
    memory: str

    @property
    def bytes(self) -> int:
        """Its size."""
        return array_bytes(self.shape, self.dtype)


class SavedResiduals(tuple[Residual, ...], Pictured):
    """What a function keeps; ``print`` and notebooks show it as a table, the largest first."""

    __slots__ = ()

    def bytes(self, memory: str = "device") -> int:
        """The bytes that are kept in a memory, not counting arguments."""
        return sum(x.bytes for x in self._computed() if x.memory == memory)

    def _computed(self) -> Iterator[Residual]:
        return (x for x in self if x.operation != "argument")

    def _pictures(self, width: int) -> Iterable[Any]:
        host = self.bytes("host")
        on_host = f", {bytes_text(host)} on the host" if host else ""
        yield text(f"kept for the backward pass: {bytes_text(self.bytes())} on the device{on_host}")
        rows = [
            (
                bytes_text(x.bytes),
                x.memory,
                f"{jnp.dtype(x.dtype).name}{[*x.shape]}",
                x.operation,
                x.source,
            )
            for x in sorted(self._computed(), key=lambda x: -x.bytes)
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            yield text("  ".join(cells))


@_compat.api_boundary
def saved_residuals(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> SavedResiduals:
    """Lists what a function keeps from the forward to the backward pass, without running it.

    Args:
      fun: a function of modules and arrays, such as a loss. All floating-point arrays of its
        arguments count as differentiated.
      *args: its arguments, which may be abstract.
      **kwargs: its keyword arguments.

    Returns:
      The arrays that are kept, each with the module that computes it, its size, and its memory.
      What is kept inside a loop over layers is stacked, and its size is that for all layers.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import remat, saved_residuals
      >>> model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
      >>> def loss(model, x):
      ...     return jnp.sin(model(x)).sum()
      >>> print(saved_residuals(loss, model, jnp.ones((2, 4))))
      kept for the backward pass: 64 B on the device
      64 B  device  float32[2, 8]  cos  loss
      >>> saved_residuals(remat(loss), model, jnp.ones((2, 4))).bytes()
      0
    """
    lifted: Lifted[..., Any] = fun if isinstance(fun, Lifted) else jit(fun)
    _, plan, flat = lifted._planned(args, kwargs)
    program = lifted._program(plan, flat).staged

    def inexact(*leaves: Any) -> list[Any]:
        *groups, _ = program(*leaves)
        return [x for group in groups for x in group.arrays if is_inexact(x)]

    def forward(*leaves: Any) -> list[Any]:
        slots = [slot for slot, leaf in enumerate(leaves) if is_inexact(leaf)]

        _, pullback = jax.vjp(of_slots(inexact, slots, leaves), *(leaves[slot] for slot in slots))
        return jax.tree.leaves(pullback)

    with RECORD(Calls()), called_by(Caller(lifted._fun, flat.objects)):
        jaxpr = jax.make_jaxpr(forward)(*map(abstract, flat.leaves)).jaxpr
    kept = {id(x): x for x in jaxpr.outvars if not isinstance(x, Literal)}
    found = (_residual(x, jaxpr, plan.names, plan.fun_name) for x in kept.values())
    return SavedResiduals(x for x in found if x is not None)


def _residual(var: Any, jaxpr: Any, names: Sequence[str], fun_name: str) -> Residual | None:
    """What is known of a variable of a jaxpr; None for a constant."""
    aval = var.aval
    memory = "host" if "host" in str(getattr(aval, "memory_space", "")).lower() else "device"
    calls: list[tuple[Any, Any]] = []  # the equations that lead inside, each with its jaxpr

    def found(operation: str, *eqns: Any, source: str = "") -> Residual:
        source = source or path_of([*(eqn for _, eqn in calls), *eqns]) or fun_name
        return Residual(source, operation, aval.shape, aval.dtype, memory)

    while not isinstance(var, Literal):
        if var in jaxpr.invars:
            position = jaxpr.invars.index(var)
            if not calls:
                return found("argument", source=names[position])
            outer, eqn = calls[-1]
            given = eqn.invars[len(eqn.invars) - len(jaxpr.invars) + position]
            if given.aval.shape != aval.shape:  # the carry of each step of a loop, stacked
                return found("carry")
            jaxpr, var = outer, given
            calls.pop()
            continue
        eqn = next((eqn for eqn in jaxpr.eqns if var in eqn.outvars), None)
        if eqn is None:
            return None
        if inside := [x for x in jaxprs_of(eqn) if len(x.outvars) == len(eqn.outvars)]:
            calls.append((jaxpr, eqn))
            jaxpr, var = inside[0], inside[0].outvars[eqn.outvars.index(var)]
        elif eqn.primitive.name in _MARKS:
            var = eqn.invars[0]
        else:
            return found(eqn.primitive.name, eqn)
    return None


# Primitives by which JAX marks what a policy keeps.
_MARKS = frozenset({"name", "reduce_precision", "device_put"})
