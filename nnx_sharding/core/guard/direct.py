"""Guarded calls: from a guard that holds straight to the program and its write-back, in C.

A *guard* recognizes arguments that a function was called with before, without flattening them.
``guarded`` replaces a method that calls a function by ``call`` of the extension. That looks for a
guard that holds, runs the program, and stores the new arrays in the caller's Variables, without any
Python code in between. Here is what it needs of Python before and after that.

    outputs      what a program returns: groups of arrays, and last the *outcome*, which says to
                 which Variable each array belongs
    finish       writes the outputs back into the caller's objects; returns what the user gets
    mark_direct  marks a program whose outputs show that JAX runs no Python code for it
    deferred_handlers   is not empty while signals are deferred: from a compilation until
                 ``deliver_signals``, which does nothing if none are deferred
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

    The method finds on its object, by name, what it needs: ``_direct`` has the guards and the
    user's function, ``_flattened`` takes any other call, and ``_failed`` explains errors.

    Args:
      function: the method ``_flattened``, which is returned as it is without the extension.
    """
    if FastestWalk is PythonWalk:  # the extension is missing, or the user does not want it
        return function
    from . import _native

    # Passes the extension what it calls and reads, the same for each use of ``guarded``.
    _native.set_up(
        is_ready=_is_ready,  # whether a guarded call may start
        caller=CALLER,  # where it leaves what a trace needs to know
        held=deferred_handlers,  # not empty while signals are deferred
        settle=_settle,  # delivers them, once the outputs are written back
        complete=_complete,  # writes back what the extension cannot
        is_bounded=is_bounded,  # whether only so many programs may be in flight:
        limit=MAX_IN_FLIGHT,
        wait=wait,
        direct_mark=DIRECT,  # the attribute of programs that run no Python code
    )
    call: Any = _native.call
    return call  # type: ignore[no-any-return]


def _is_ready() -> bool:
    """Whether a guarded call may start: not within a trace. Discards what Flax left for a call."""
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

    The extension calls this where it cannot do it: where more than arrays of Variables changed, or
    where Python has to put the output together.

    Args:
      plan: the plan of the call.
      execute: the program.
      objects: the caller's objects, by index.
      leaves: the arrays of the arguments, by slot.
      outputs: what the program returned.
    """
    try:
        # A guard holds for objects of the current trace only, so all of them may be changed.
        flat = Flat(plan.structure, leaves, objects, updatable=True)
        # Nothing was placed: a guard does not hold for arrays that have to be. ``finish`` takes the
        # outputs in a list, which it clears when they are written back.
        output = finish(plan, flat, leaves, placed=(), results=[outputs])
        # Then JAX has compiled the program in this call (``call_context.py`` defers signals when it
        # reports that), and the first outputs show whether later runs need Python code.
        if deferred_handlers:
            mark_direct(execute, outputs)
        return output
    finally:
        deliver_signals()


def failed(plan: Plan, leaves: Arrays, error: BaseException) -> None:
    """Raises an error that explains why a guarded call failed, if the arguments show it."""
    deliver_signals()
    if isinstance(error, Exception):
        raise_explained(plan, leaves, error)
