"""Operations in a traced program that XLA is known to compute wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from .. import _compat
from ..errors import WrongGradientWarning, message, report
from ..specs.fitting import axes_of, axes_of_type


def warn_of_faults(
    mesh: AbstractMesh | None, batch_axes: frozenset[Any], *, name: str, strict: bool
) -> None:
    """Warns about the gradients in the current trace that XLA may compute wrong.

    ``batch_axes`` shard the rows, where no axis is Explicit.
    """
    if mesh is None:
        return
    large = frozenset(axis for axis, size in mesh.shape.items() if size > 1)
    large -= axes_of_type(mesh, AxisType.Manual)
    lines = []
    for eqns in _equations(_compat.trace_equations()) if large else ():
        what, axes, remedy = "", frozenset[Any](), ""
        match (eqn := eqns[-1]).primitive.name:
            case "conv_general_dilated" if eqn.params["batch_group_count"] > 1 and len(large) > 1:
                # The gradient of a kernel is a convolution with groups of rows.
                axes = large - _axes_of(eqn.invars[0], batch_axes)
                what, remedy = "kernel of a grouped convolution", _CONVOLUTION
            case "dot_general":
                reduced = any(map(_reduced, eqn.invars))
                axes = large & axes_of_type(mesh, AxisType.Auto) if reduced else axes
                what, remedy = "reduced operand of a product", _REDUCED
        if axes:
            path = path_of(eqns)
            what = f"{path}: {what}" if path else what
            lines.append(f"  {what}: {', '.join(map(repr, sorted(axes)))}. {remedy}")
    if lines:
        head = f"{name}: by known faults of XLA, these gradients may be multiplied by the sizes of"
        text = message(f"{head} mesh axes:", lines)
        report(WrongGradientWarning, text, strict=strict, anchor="wrong-gradient")


_CONVOLUTION = (
    "Run nnx.Conv on Explicit axes or with a strategy for its model, shard the rows over all axes, "
    "or call the convolution in a shard_map over these axes."
)
_REDUCED = "Reshard it before, to a spec that is not reduced."


def _axes_of(x: Any, batch_axes: frozenset[Any]) -> frozenset[Any]:
    """The axes over which an operand is sharded, or a ``shard_map`` mapped."""
    mesh, spec = x.aval.sharding.mesh, x.aval.sharding.spec
    sharded = frozenset(axis for entry in spec.partitions for axis in axes_of(entry))
    is_typed = bool(axes_of_type(mesh, AxisType.Explicit))
    return axes_of_type(mesh, AxisType.Manual) | (sharded if is_typed else batch_axes)


def _reduced(x: Any) -> frozenset[Any]:
    return frozenset(x.aval.sharding.spec.reduced)


def _equations(eqns: Iterable[Any], outer: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Equations and those inside them, each after the equations that it is in."""
    for eqn in eqns:
        inside = (*outer, eqn)
        yield inside
        for inner in jaxprs_of(eqn):
            yield from _equations(inner.eqns, inside)


def jaxprs_of(eqn: Any) -> Iterator[Any]:
    """The jaxprs in the parameters of an equation."""
    for value in eqn.params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(x, "jaxpr", x)
            if hasattr(inner, "eqns"):
                yield inner


def path_of(eqns: Iterable[Any]) -> str:
    """The path of the module in the names of equations, each inside the previous one."""
    # What is in a custom_jvp_call also has the names around that call.
    kept = [eqn for eqn in eqns if not eqn.primitive.name.startswith("custom_jvp")]
    stacks = (str(eqn.source_info.name_stack) for eqn in kept)
    parts = (part for stack in stacks for part in stack.split("/") if part and "(" not in part)
    return ".".join(parts).replace(".[", "[")
