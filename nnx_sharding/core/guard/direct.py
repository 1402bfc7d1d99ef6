"""Guarded calls: from a guard that holds straight to the program and its write-back, in C.

``guarded`` replaces a method that calls a function by ``call`` of the extension. That looks for a
guard that holds, runs the program, and stores what it returns, without any Python code in between.
Here is what it needs of Python before and after that, and where it leaves the rest to Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ... import _compat
from ..call import DIRECT, MAX_IN_FLIGHT, finish, is_bounded, mark_direct, wait
from ..call_context import CALLER
from ..failures import raise_explained
from ..flatten import Flat
from ..interrupts import deferred_handlers, deliver_signals
from ..plan import Plan
from .native import FastestWalk
from .walk import PythonWalk

F = TypeVar("F", bound=Callable[..., Any])


def guarded(function: F) -> F:
    """Returns a method that calls what a guard knows, else the given one, `_flattened`."""
    if FastestWalk is PythonWalk:
        return function
    from . import _native

    _native.set_up(
        is_ready=_is_ready,
        caller=CALLER,
        held=deferred_handlers,
        settle=_settle,
        complete=_complete,
        is_bounded=is_bounded,
        wait=wait,
        limit=MAX_IN_FLIGHT,
        direct_mark=DIRECT,
    )
    call: Any = _native.call
    return call  # type: ignore[no-any-return]


def _is_ready() -> bool:
    """Whether a guarded call may start."""
    _compat.leave_static_cache()
    return _compat.trace_is_clean()


def _settle(execute: Any, outputs: Sequence[Any]) -> None:
    """Ends what was begun when a program was compiled in a guarded call."""
    mark_direct(execute, outputs)
    deliver_signals()


def _complete(
    plan: Plan, execute: Any, objects: Sequence[Any], leaves: Sequence[Any], outputs: Sequence[Any]
) -> Any:
    """What follows on the program of a guarded call that needs more than writing arrays back."""
    try:
        flat = Flat(plan.structure, leaves, objects, updatable=True)
        output = finish(plan, flat, leaves, (), [outputs])
        if deferred_handlers:
            mark_direct(execute, outputs)
        return output
    finally:
        deliver_signals()


def failed(plan: Plan, leaves: Sequence[Any], error: BaseException) -> None:
    """Explains what a guarded call raised."""
    deliver_signals()
    if isinstance(error, Exception):
        raise_explained(plan, leaves, error)
