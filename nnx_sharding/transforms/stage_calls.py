"""Calls of a stage, which already has its plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from .. import _compat
from ..activations.calls import Recorder
from ..core.call import run
from ..core.call_context import Caller, called_by
from ..core.flatten import Flat
from ..core.guard.store import Guards
from ..core.plan import Plan
from ..core.signature import Call
from ..diagnostics.differences import arguments_of, differences
from ..diagnostics.failures import explain_compiled
from ..errors import message, see

Split = Callable[..., tuple[Call, Flat]]


class Origin(NamedTuple):
    """What a stage was made from."""

    plan: Plan
    split: Split  # flattens the arguments of a call
    bound: tuple[Any, ...]  # the objects to which the function is bound: its first arguments
    statics: tuple[Any, ...]  # the static arguments
    recorder: Recorder  # knows the calls of modules

    def reported(self) -> contextlib.AbstractContextManager[None]:
        """Attributes what JAX reports within the block to this plan."""
        return called_by(Caller(None, (), plan=self.plan, leaves=self.recorder.leaves))


def call_stage(
    stage: Any,
    origin: Origin,
    guards: Guards,
    kind: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a stage of JAX for the user's arguments.

    Raises:
      TypeError: their structure differs from that for which the function was ``kind``.
      ValueError: their shardings differ from those for which it was compiled.
    """
    plan = origin.plan
    args, kwargs = _with_statics(origin, args, kwargs)
    args = (*origin.bound, *args)
    if not _compat.trace_is_clean():
        return run(plan, _split_as_planned(origin, kind, args, kwargs), stage)
    found = guards.find(args, kwargs)
    if found is None:
        flat = _split_as_planned(origin, kind, args, kwargs, record=True)
        guards.add(plan, flat, args, kwargs, is_new=True)
    else:
        _, flat = found
    try:
        return run(plan, flat, _compat.direct_form(stage))
    except (ValueError, TypeError) as error:
        explain_compiled(plan, flat.leaves, stage, error)
        raise


def _split_as_planned(
    origin: Origin, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], record: bool = False
) -> Flat:
    plan = origin.plan
    call, flat = origin.split(args, kwargs, record=record)
    before, after = (plan.signature, plan.structure), (call.signature, flat.structure)
    if before == after:
        return flat
    changes = differences(before, after)
    if before[0] != after[0]:
        changes.insert(0, f"arguments {arguments_of(before[0])} → {arguments_of(after[0])}")
    head = f"{plan.fun_name} was {kind} for other arguments than it is called with now:"
    text = message(head, [f"  {change}" for change in changes], "Lower it again for these.")
    raise see(TypeError(text), "compiled-for-another-structure")


def _with_statics(
    origin: Origin, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Fills in static arguments that the caller left out."""
    if not origin.statics:
        return args, kwargs
    signature, bound = origin.plan.signature, len(origin.bound)
    names = [*sorted(signature.static), *sorted(signature.static_keywords)]
    statics: dict[Any, Any] = dict(zip(names, origin.statics, strict=True))
    keywords = {name: statics.pop(name) for name in signature.static_keywords}
    unbound = {i: value for i, value in statics.items() if i >= bound}
    count = len(signature.names)
    if unbound and len(args) == count - bound - len(unbound):
        dynamic = iter(args)
        args = tuple(unbound[i] if i in unbound else next(dynamic) for i in range(bound, count))
    return args, {**keywords, **kwargs}
