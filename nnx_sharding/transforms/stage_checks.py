"""Checks that the arguments of a stage are those for which it was traced and compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ..core.failures import declared_shardings
from ..core.flatten import Flat
from ..core.placing import is_committed
from ..core.plan import Plan
from ..core.problems import array_line
from ..core.signature import Call, Signature
from ..diagnostics.differences import arguments_of, differences
from ..errors import listed_error, message, see
from ..specs.fitting import describe_both


def with_statics(
    signature: Signature,
    statics: Sequence[Any],
    bound: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Fills in static arguments that the caller left out, in ``args`` without the bound ones."""
    if not statics:
        return args, kwargs
    values = dict(zip(signature.static_order, statics, strict=True))
    keywords = {name: values.pop(name) for name in signature.static_keywords}
    unbound = {i: value for i, value in values.items() if isinstance(i, int) and i >= bound}
    count = len(signature.names)
    if unbound and len(args) == count - bound - len(unbound):
        dynamic = iter(args)
        args = tuple(unbound[i] if i in unbound else next(dynamic) for i in range(bound, count))
    return args, {**keywords, **kwargs}


def check_structure(plan: Plan, kind: str, call: Call, flat: Flat) -> None:
    """Raises a ``TypeError`` for arguments of another structure than those of the plan.

    ``kind``: what was done for those, ``"traced"`` or ``"compiled"``.
    """
    before, after = (plan.signature, plan.structure), (call.signature, flat.structure)
    if before == after:
        return
    changes = differences(before, after)
    if before[0] != after[0]:
        changes.insert(0, f"arguments {arguments_of(before[0])} → {arguments_of(after[0])}")
    head = f"{plan.fun_name} was {kind} for other arguments than it is called with now:"
    text = message(head, [f"  {change}" for change in changes], "Lower it again for these.")
    raise see(TypeError(text), anchor="compiled-for-another-structure")


def misfit(plan: Plan, leaves: Sequence[Any], stage: Any, error: Exception) -> Exception | None:
    """The error that says how the arguments differ from those that a program was compiled for."""
    if str(error).startswith("Argument types differ"):
        return _other_types(plan, leaves, stage.in_avals[0])
    if isinstance(error, ValueError) and hasattr(stage, "input_shardings"):
        return _other_shardings(plan, leaves, stage.input_shardings[0])
    return None


def _other_types(plan: Plan, leaves: Sequence[Any], avals: Sequence[Any]) -> Exception | None:
    lines = []
    for name, leaf, aval in zip(plan.names, leaves, avals, strict=True):
        actual, compiled = jax.typeof(leaf).str_short(), aval.str_short()
        if actual != compiled:
            lines.append(f"  {name}: is {actual}, compiled for {compiled}")
    return listed_error(
        TypeError,
        f"{plan.fun_name} was compiled for other types than these arguments have:",
        lines,
        "Compile it for these too, as jit does, or pad them to the shapes that it was compiled "
        "for.",
        anchor="compiled-for-other-types",
    )


def _other_shardings(
    plan: Plan, leaves: Sequence[Any], shardings: Sequence[Any]
) -> Exception | None:
    # Arrays with a declared spec are moved, or refused for that reason.
    done = {*plan.placed_slots, *(slot for slot, *_ in declared_shardings(plan, leaves))}
    lines = []
    for slot, (leaf, compiled) in enumerate(zip(leaves, shardings, strict=True)):
        if slot in done or compiled is None or not is_committed(leaf):  # None: not used
            continue
        if not leaf.sharding.is_equivalent_to(compiled, leaf.ndim):
            actual, expected = describe_both(leaf.sharding, compiled)
            line = array_line(plan.names[slot], leaf)
            lines.append(f"{line}: is {actual}, compiled for {expected}")
    return listed_error(
        ValueError,
        f"{plan.fun_name} was compiled for other shardings than these arguments have:",
        lines,
        "Move them with jax.device_put or nnx_sharding.place, or lower it for such arrays: "
        "abstract ones too can have a sharding, jax.ShapeDtypeStruct(..., sharding=...).",
        anchor="compiled-for-other-shardings",
    )
