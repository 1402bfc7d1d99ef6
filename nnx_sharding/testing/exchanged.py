"""Assertions about what a compiled program moves between devices: weights, but not activations."""

from __future__ import annotations

from collections.abc import Iterable

from ..analysis.parameters import spec_axes
from ..analysis.units import bytes_text
from .programs import Axes, Program, at, collectives_over, listed, over_text, patterns, shortened

__tracebackhide__ = True  # pytest shows the line of the test that failed


def assert_no_resharding(
    program: Program, axes: Axes | None = None, *, allowed: Iterable[str] = ()
) -> None:
    """Fails if devices exchange activations other than to sum them.

    Gathered parameters, gradients, sums of partial results, and results that are moved to their
    shardings do not count; see :class:`~nnx_sharding.analysis.Collective`.

    Args:
      program: a compiled function, or its report.
      axes: a mesh axis, or several: collectives that run over any of them. None for all.
      allowed: regular expressions; a collective is allowed if one matches in its module, its
        operation or its line of code.

    Raises:
      AssertionError: there are others; each is listed, with the module and the line of your code.
      ValueError: the mesh has no such axis, or a pattern is not a regular expression or matches
        nothing.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.partition import make_mesh
      >>> from nnx_sharding.testing import assert_no_resharding
      >>> shardings = {"in_shardings": P("data"), "out_shardings": P("data"), "auto_axes": True}
      >>> fun = jit(lambda x: x @ x.T, mesh=make_mesh({"data": 8}), **shardings)
      >>> compiled = fun.lower(jax.ShapeDtypeStruct((64, 64), "float32")).compile()
      >>> assert_no_resharding(compiled)
      Traceback (most recent call last):
      AssertionError: <lambda> reshards 1 array:
        all-gather over data, 16.0 KiB, sends 14.0 KiB: ...
      Constrain activations (activation_shardings of jit), or allow it by allowed=...
    """
    report, wanted, some = collectives_over(program, axes)
    resharded = some.resharded
    names = [" ".join(filter(None, (x.module, x.operation, x.source))) for x in resharded]
    tests = patterns(allowed, names)
    hits = [
        one
        for one, name in zip(resharded, names, strict=True)
        if not any(test.search(name) for test in tests)
    ]
    if hits:
        what = f"{len(hits)} array{'s' * (len(hits) > 1)}{over_text(wanted)}"
        raise AssertionError(
            f"{report.name} reshards {what}:\n{listed(hits)}\n"
            "Constrain activations (activation_shardings of jit), or allow it by allowed=..."
        )


def assert_gathers_weights(
    program: Program, axes: Axes | None = None, *, allowed: Iterable[str] = ()
) -> None:
    """Fails if a sharded parameter of a called module is not gathered as in FSDP.

    Args:
      program: a compiled function, or its report.
      axes: a mesh axis, or several: parameters that are sharded over any of them. None for all.
      allowed: regular expressions; a parameter may stay sharded if one matches in its path.

    Raises:
      AssertionError: there are such parameters, or none is sharded over these axes.
      ValueError: the mesh has no such axis, or a pattern is not a regular expression or matches no
        path.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.partition import fsdp, make_mesh
      >>> from nnx_sharding.testing import assert_gathers_weights
      >>> mesh = make_mesh({"data": 8})
      >>> model = nnx.eval_shape(lambda: nnx.Linear(256, 256, rngs=nnx.Rngs(0)))
      >>> x = jax.ShapeDtypeStruct((64, 256), "float32")
      >>> specs = (fsdp(model, mesh), P("data"))
      >>> fun = jit(lambda model, x: model(x), in_shardings=specs, mesh=mesh)
      >>> assert_gathers_weights(fun.lower(model, x).compile(), "data")
    """
    report, wanted, some = collectives_over(program, axes)
    modules = {row.path for row in report.activations}
    weights = [
        row
        for row in report.parameters
        if row.used
        and row.variable is not None
        and (spec_axes(row.spec) if wanted is None else wanted.intersection(spec_axes(row.spec)))
        and any(row.path.startswith((f"{path}.", f"{path}[")) for path in modules)
    ]
    if not weights:
        raise AssertionError(
            f"{report.name} calls no module with parameters that are sharded{over_text(wanted)}."
        )
    paths = [row.path for row in weights]
    tests = patterns(allowed, paths)
    gathered = {
        path
        for one in some
        if one.kind == "all-gather" and one.purpose == "parameter"
        for path in one.parameters
    }
    kept = [
        row
        for row in weights
        if row.path not in gathered and not any(test.search(row.path) for test in tests)
    ]
    if kept:
        lines = [f"  {at(row)}: {bytes_text(row.bytes_total)}, {row.spec_text}" for row in kept]
        raise AssertionError(
            f"{report.name} gathers {len(weights) - len(kept)} of {len(weights)} parameters"
            f"{over_text(wanted)}, but not:\n{shortened(lines)}\n"
            "Gather them (ActivationSharding(gather=True)), or allow it by allowed=..."
        )
