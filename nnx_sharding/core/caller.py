"""Who makes a call: what a trace needs of it, and who hears of traces and compilations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import jax

from .. import _compat


class Observer(Protocol):
    """Who hears of the traces and compilations of a function."""

    def traced(
        self, pure: Any, fun: Any, leaves: Sequence[Any], *, nested: bool
    ) -> Callable[[], None]:
        """Hears that ``pure`` is being traced; may refuse it.

        Returns:
          What takes it back, if tracing fails.
        """

    def compiled(self, plan: Any, leaves: Sequence[Any]) -> None:
        """Hears that JAX compiled the program of a plan in a call with these arrays."""


class Caller(NamedTuple):
    """Who makes a call.

    A plan serves equal functions and equal static objects, too; a trace must get those of the call
    that it is made in.

    Attributes:
      fun: the function.
      objects: the objects of its arguments.
      observer: who hears of traces.
      nested: whether the call is part of a trace.
      plan: the plan of the call, if JAX compiles it as part of the call; else None.
      leaves: the arrays, in this case.
    """

    fun: Any
    objects: Sequence[Any]
    observer: Observer | None = None
    nested: bool = False
    plan: Any = None
    leaves: Sequence[Any] = ()


# A plain tuple of these fields, because it is made at each call. None while a function is traced.
CALLER: ContextVar[tuple[Any, ...] | None] = ContextVar("caller", default=None)


@contextlib.contextmanager
def called_by(caller: Caller | None) -> Iterator[None]:
    """Traces within the block belong to this call."""
    token = CALLER.set(caller)
    try:
        yield
    finally:
        CALLER.reset(token)


def _on_compilation(event: str, duration_secs: float, **details: Any) -> None:
    fields = CALLER.get()
    if event != _compat.COMPILATION or fields is None:
        return
    caller = Caller(*fields)
    if caller.plan is None or caller.observer is None:
        return
    # JAX also compiles the programs that move arguments to their shardings.
    if details.get("fun_name") == f"jit({caller.plan.fun_name})":
        caller.observer.compiled(caller.plan, caller.leaves)


jax.monitoring.register_event_duration_secs_listener(_on_compilation)
