"""The assertion that a model is sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..analysis.parameters import ParameterRow, parameter_table
from ..errors import raise_listed
from ..report.sharding import check_sharding, is_replicated
from ..state_sharding import StateSharding

__tracebackhide__ = True  # pytest shows the line of the test that failed


def assert_sharded(
    model: Any, *, tolerance: float = 0.02, sharding: StateSharding | None = None, mesh: Any = None
) -> None:
    """Fails if much of a model is fully replicated, as after a forgotten rule.

    Args:
      model: a placed model or optimizer, or a pytree or ``nnx.state(model, nnx.Param)`` of it.
      tolerance: the fraction of all bytes that may be replicated, from 0 to 1. Arrays on a mesh of
        one device do not count: they cannot be sharded.
      sharding: rules to check instead of the present shardings; the model may then be abstract.
      mesh: the mesh of these rules.

    Raises:
      AssertionError: more is replicated; the largest of these arrays are listed.
      ValueError: ``tolerance`` is not from 0 to 1, or the rules have problems.

    Example:
      >>> from flax import nnx
      >>> from nnx_sharding.testing import assert_sharded
      >>> assert_sharded(nnx.Linear(8, 16, rngs=nnx.Rngs(0)))
      Traceback (most recent call last):
      AssertionError: 576 of 576 bytes (100.0%) are fully replicated, more than 2.0%:
        kernel, shape (8, 16): 512 bytes
        bias, shape (16,): 64 bytes
      Give them specs, or raise the tolerance.

    The check, and its tolerance of 2%, follow ``assert_params_sufficiently_sharded`` of MaxText.
    """
    if not 0 <= tolerance <= 1:
        raise ValueError(f"tolerance must be a fraction of all bytes, 0 to 1, got {tolerance!r}.")
    rows: Sequence[ParameterRow]
    if sharding is None:
        rows = parameter_table(model)
    else:
        report = check_sharding(model, sharding, mesh)
        report.raise_for_problems()
        rows = report.rows
    replicated = sorted(filter(is_replicated, rows), key=lambda row: -row.bytes_total)
    held, total = (sum(row.bytes_total for row in some) for some in (replicated, rows))
    if held > tolerance * total:
        raise_listed(
            AssertionError,
            f"{held} of {total} bytes ({held / total:.1%}) are fully replicated, more than "
            f"{tolerance:.1%}:",
            [f"  {row.path}, shape {row.shape}: {row.bytes_total} bytes" for row in replicated],
            "Give them specs, or raise the tolerance.",
        )
