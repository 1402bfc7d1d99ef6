"""What a function keeps from the forward to the backward pass, and which operation computes it.

Differentiation turns a function into one jaxpr that returns the residuals. Each of them is followed
back to the operation that computes it: out of calls that only pass it on, and into calls that
compute it. The names of the calls around the operation make up the path of the module.

The bytes of a device are known if the type of the array has its sharding, which is so only on
meshes of Explicit axes. On Auto axes the compiler chooses the sharding later, so the table has the
bytes of whole arrays, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AxisType, NamedSharding

from .. import _compat
from ..core.known_faults import path_of
from .memory import array_bytes
from .tables import Pictured, text
from .units import all_known, bytes_text


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
      shard_shape: the shape of its part on each device; None if its type does not say it: without a
        mesh, and on Auto axes, where the compiler chooses.
    """

    source: str
    operation: str
    shape: tuple[int, ...]
    dtype: Any
    memory: str
    shard_shape: tuple[int, ...] | None = None

    @property
    def bytes(self) -> int:
        """The size of the whole array, on all devices together."""
        return array_bytes(self.shape, self.dtype)

    @property
    def bytes_per_device(self) -> int | None:
        """The size of its part on each device; None if that is not known."""
        return None if self.shard_shape is None else array_bytes(self.shard_shape, self.dtype)


class SavedResiduals(tuple[Residual, ...], Pictured):
    """What a function keeps; ``print`` and notebooks show it as a table, the largest first."""

    __slots__ = ()

    def bytes(self, memory: str = "device") -> int:
        """Sums the bytes of whole arrays that are kept in a memory, not counting arguments.

        Arguments do not count because they are in memory in any case. Each device holds less than
        this of arrays that are sharded.

        Args:
          memory: ``"device"`` or ``"host"``.

        Returns:
          The bytes.
        """
        return sum(x.bytes for x in self._computed() if x.memory == memory)

    def bytes_per_device(self, memory: str = "device") -> int | None:
        """Sums the bytes that each device holds of the arrays that :meth:`bytes` counts.

        Returns None if the bytes of one array are not known.

        Args:
          memory: ``"device"`` or ``"host"``.
        """
        sizes = all_known(x.bytes_per_device for x in self._computed() if x.memory == memory)
        return None if sizes is None else int(sum(sizes))

    def _computed(self) -> Iterator[Residual]:
        """Yields the arrays that are no arguments."""
        return (x for x in self if x.operation != "argument")

    def _pictures(self, width: int) -> Iterable[Any]:
        """Yields what ``print`` shows: the sums, and a line for each array."""
        # The table has bytes on each device only if they are known for all arrays. Otherwise it has
        # the bytes of whole arrays, so that rows are comparable.
        is_known = all(x.shard_shape is not None for x in self._computed())
        on_device = self.bytes_per_device() if is_known else self.bytes()
        host = self.bytes_per_device("host") if is_known else self.bytes("host")
        counted = "on each device" if is_known else "in whole arrays"
        on_host = f", {bytes_text(host)} on the host" if host else ""
        yield text(f"kept for the backward pass: {bytes_text(on_device)} {counted}{on_host}")
        rows = [
            (
                bytes_text(residual.bytes_per_device if is_known else residual.bytes),
                residual.memory,
                f"{residual.dtype.name}{[*residual.shape]}",
                residual.operation,
                residual.source,
            )
            for residual in sorted(self._computed(), key=lambda residual: -residual.bytes)
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            yield text("  ".join(cells))
        if not is_known:
            yield text(
                "of arrays that are sharded each device holds a part: known only on Explicit axes",
                "dim",
            )


# Primitives by which JAX marks the arrays that a policy keeps: `checkpoint_name` and offloading
# make them. The operation of an array is the one before its marks.
_MARKS = frozenset({"name", "reduce_precision", "device_put"})


def residual_of(
    var: Var | Literal, jaxpr: Jaxpr, names: Sequence[str], fun_name: str
) -> Residual | None:
    """Follows an output of a jaxpr back to the operation that computes it; None for a constant.

    An operation that is itself a call, such as a nested ``jit``, is followed into its jaxpr.

    Args:
      var: the output.
      jaxpr: the jaxpr.
      names: the expression for each of its inputs.
      fun_name: the source of an array that no module computes.
    """
    aval: Any = var.aval  # the type of the array, which stays the same on the way back
    memory = "host" if "host" in str(getattr(aval, "memory_space", "")).lower() else "device"
    # The calls that lead from the outermost jaxpr to ``jaxpr``, each with the jaxpr that it is in.
    calls: list[tuple[Jaxpr, JaxprEqn]] = []

    def residual(operation: str, *equations: JaxprEqn, source: str = "") -> Residual:
        """Describes the array, which an operation in the calls has made.

        The names of the calls and of ``equations``, the equation of the operation if it has one,
        say the module.
        """
        path = path_of([*(call for _, call in calls), *equations])
        return Residual(
            source=source or path or fun_name,
            operation=operation,
            shape=aval.shape,
            dtype=aval.dtype,
            memory=memory,
            shard_shape=_shard_shape(aval),
        )

    while not isinstance(var, Literal):
        if var in jaxpr.invars:  # The search goes out of the call, to the argument of the call.
            position = jaxpr.invars.index(var)
            if not calls:
                return residual("argument", source=names[position])
            outer, call = calls[-1]
            # The inputs of a jaxpr are the last inputs of its call: a `cond` has its predicate
            # before the inputs of a branch, and a `scan` has as many inputs as its body.
            argument = call.invars[len(call.invars) - len(jaxpr.invars) + position]
            # If shapes differ, the array is the stack of a loop's carries in each step. No array
            # outside of the loop has these values.
            if argument.aval.shape != aval.shape:  # type: ignore[attr-defined]
                return residual("carry")
            jaxpr, var = outer, argument
            calls.pop()
            continue
        equation = next((eqn for eqn in jaxpr.eqns if var in eqn.outvars), None)
        if equation is None:  # The jaxpr has the variable as a constant.
            return None
        called = _called_jaxpr(equation)
        if called is not None:  # The search goes into the call.
            calls.append((jaxpr, equation))
            jaxpr, var = called, called.outvars[equation.outvars.index(var)]
        elif equation.primitive.name in _MARKS:  # A mark computes nothing.
            var = equation.invars[0]
        else:
            return residual(equation.primitive.name, equation)
    return None


def _called_jaxpr(equation: JaxprEqn) -> Jaxpr | None:
    """Returns the jaxpr that computes the results of an equation; None if the equation does.

    All branches of a `cond` return the same results, and the first branch is returned.
    """
    # The condition of a `while` is left out by its name, because it returns one value, and the loop
    # may return one, too.
    condition = getattr(equation.params.get("cond_jaxpr"), "jaxpr", None)
    jaxprs: Iterable[Jaxpr] = _compat.jaxprs_of(equation)
    for inner in jaxprs:
        if inner is not condition and len(inner.outvars) == len(equation.outvars):
            return inner
    return None


def _shard_shape(aval: Any) -> tuple[int, ...] | None:
    """Returns the shape on one device of a value of a type; None if the type does not say it."""
    sharding = getattr(aval, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    if any(kind != AxisType.Explicit for kind in sharding.mesh.axis_types):
        return None
    return sharding.shard_shape(aval.shape)
