"""Guarded calls: from a guard that holds straight to the program and its write-back, in C.

A *guard* recognizes arguments that a function was called with before, without flattening them.
``guarded`` replaces a method that calls a function by ``call`` of the extension. ``call`` looks for
a guard that holds, runs the program, and stores the new arrays in the caller's Variables, without
any Python code in between. This module has the Python functions that ``call`` uses before and after
these steps.

    outputs      what a program returns: groups of arrays, and last the *outcome*, which says to
                 which Variable each array belongs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ... import _compat
from ...specs.types import Arrays, Objects
from ..call import finish, mark_direct
from ..call_context import CALLER
from ..failures import raise_explained
from ..flatten import Flat
from ..in_flight import MAX_IN_FLIGHT, is_bounded, wait
from ..interrupts import DIRECT, deferred_handlers, deliver_signals
from ..plan import Plan
from .native import FastestWalk
from .walk import PythonWalk

F = TypeVar("F", bound=Callable[..., Any])


def guarded(function: F) -> F:
    """Returns a method in C that tries the guards first, and calls ``_flattened`` if none holds.

    The method uses three attributes of its object: ``_direct`` has the guards and the user's
    function, ``_flattened`` takes a call for which no guard holds, and ``_failed`` explains errors.
    Without the extension, ``guarded`` returns ``function``.

    Args:
      function: the method ``_flattened``.
    """
    if FastestWalk is PythonWalk:  # the extension is missing, or the user does not want it
        return function
    from . import _native

    # Each use of ``guarded`` passes the same hooks, so it does not matter which one is the last.
    _native.set_up(
        is_ready=_is_ready,  # whether a guarded call may start
        caller=CALLER,  # the call that a trace belongs to; the extension sets its fields
        held=deferred_handlers,  # not empty while signals are deferred
        settle=_settle,  # delivers deferred signals, once the outputs are written back
        complete=_complete,  # writes back what the extension cannot
        # Whether at most `limit` programs may be in flight. If so, the extension calls `wait` for
        # the outputs of the last of them.
        is_bounded=is_bounded,
        limit=MAX_IN_FLIGHT,
        wait=wait,
        direct_mark=DIRECT,  # the attribute of programs that run no Python code
    )
    call: Any = _native.call
    return call  # type: ignore[no-any-return]


def _is_ready() -> bool:
    """Whether a guarded call may start, which it may only outside of a trace.

    Also discards what ``nnx.cached_partial`` prepares for ``nnx.jit``; nothing here uses that.
    """
    _compat.leave_static_cache()
    return _compat.trace_is_clean()


def _settle(execute: Callable[..., Any], outputs: Sequence[Any]) -> None:
    """Delivers the signals that were deferred when a program was compiled in a guarded call.

    Also marks the program as one whose next calls need no Python code, if its outputs allow that.
    """
    mark_direct(execute, outputs)
    deliver_signals()


def _complete(
    plan: Plan,
    execute: Callable[..., Any],
    objects: Objects,
    leaves: Arrays,
    outputs: Sequence[Any],
) -> Any:
    """Writes back what a guarded call has changed, and returns its output.

    The extension writes arrays back by itself. It calls this function if more than arrays of
    Variables changed, or if Python has to put the output together.
    """
    try:
        # All objects may be changed, because a guard holds for objects of the current trace only.
        flat = Flat(plan.structure, leaves, objects, updatable=True)
        # ``placed`` is empty, because a guard does not hold if an array has to be placed.
        output = finish(plan, flat, leaves, placed=(), results=[outputs])
        # Deferred signals mean that JAX has compiled the program in this call. The first outputs of
        # a program show whether its later runs need Python code.
        if deferred_handlers:
            mark_direct(execute, outputs)
        return output
    finally:
        deliver_signals()


def failed(plan: Plan, leaves: Arrays, error: BaseException) -> None:
    """Raises an error that explains why a guarded call failed, if the arguments show it.

    Otherwise returns, and the extension raises ``error``.
    """
    deliver_signals()
    if isinstance(error, Exception):
        raise_explained(plan, leaves, error)
