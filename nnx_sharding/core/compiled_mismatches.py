"""Explains why a compiled program refuses arguments that differ from those it was compiled for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from ..specs.fitting import describe_both
from ..specs.types import Arrays
from .checks import as_check, passed_shardings
from .declared import is_committed
from .failures import raise_instead
from .plan import Plan
from .problems import array_line


def raise_mismatch(plan: Plan, leaves: Arrays, stage: Any, error: BaseException) -> None:
    """Raises an error that says how arguments differ from those that a program was compiled for.

    Returns if there is no difference, and the caller then raises the original error.

    Args:
      plan: the plan of the call.
      leaves: the arrays of the call, by slot.
      stage: JAX's ``Lowered`` or ``Compiled``, which has refused the arrays.
      error: the error by which it has refused them.
    """
    if isinstance(error, ValueError | TypeError):
        # JAX compares types first, then shardings. Only the text of the error tells which differ.
        if str(error).startswith("Argument types differ"):
            avals = stage.in_avals[0]  # all arguments of the program are positional
            raise_instead(error, lambda: _check_compiled_types(plan, leaves, avals))
        elif isinstance(error, ValueError) and hasattr(stage, "input_shardings"):
            compiled = stage.input_shardings[0]
            raise_instead(error, lambda: _check_compiled_shardings(plan, leaves, compiled))


@as_check(
    "compiled-for-other-types",
    "{fun_name} was compiled for other types than these arguments have:",
    "Compile it for these too, as jit does, or pad them to the shapes that it was compiled for.",
    TypeError,
)
def _check_compiled_types(plan: Plan, leaves: Arrays, avals: Sequence[Any]) -> Iterator[str]:
    """Yields a line for each array of another type than the program was compiled for."""
    for name, leaf, aval in zip(plan.names, leaves, avals, strict=True):
        actual, compiled = jax.typeof(leaf).str_short(), aval.str_short()
        if actual != compiled:
            yield f"  {name}: is {actual}, compiled for {compiled}"


@as_check(
    "compiled-for-other-shardings",
    "{fun_name} was compiled for other shardings than these arguments have:",
    "Move them with jax.device_put or nnx_sharding.place, or lower it for such arrays: abstract "
    "ones too can have a sharding, jax.ShapeDtypeStruct(..., sharding=...).",
)
def _check_compiled_shardings(
    plan: Plan, leaves: Arrays, shardings: Sequence[Sharding | None]
) -> Iterator[str]:
    """Yields a line for each array with another sharding than the program was compiled for.

    Args:
      shardings: the shardings of the program's inputs, by slot; None for an input that the program
        does not read.
    """
    # Arrays with declared shardings are left out, because a call has moved them before, or has
    # raised another error.
    declared = {*plan.placed_slots, *passed_shardings(plan)}
    for slot, (leaf, compiled) in enumerate(zip(leaves, shardings, strict=True)):
        # JAX itself moves an array that is not committed.
        if slot in declared or compiled is None or not is_committed(leaf):
            continue
        if not leaf.sharding.is_equivalent_to(compiled, leaf.ndim):
            actual, expected = describe_both(leaf.sharding, compiled)
            line = array_line(plan.names[slot], leaf)
            yield f"{line}: is {actual}, compiled for {expected}"
