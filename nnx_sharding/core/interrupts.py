"""Defers signals between a program that consumes donated arrays and the write-back.

The program deletes the arrays that the caller's model holds. If Ctrl-C came before the new ones are
written back, the model would be lost. Python runs handlers of signals between its instructions, so
the handlers are replaced by one that only notes the signal, and the signal is raised again after.

``perform`` runs *operations*, each a tuple of a function and its arguments, in a loop in C. Between
functions written in C, such as ``signal``, no instruction of Python runs, so no handler does. All
of this is for the main thread, the only one in which Python runs handlers.
"""

from __future__ import annotations

# Takes a tenth of the time of the functions in `signal`, which make enum members.
import _signal  # type: ignore[import-not-found]
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .unflatten import perform

_NUMBERS = (*_signal.valid_signals(),)

# The user's handlers while signals are deferred, by number; else empty. Only the main thread, which
# Python runs handlers in, defers any. `call.c` reads this dict.
deferred_handlers: dict[int, Any] = {}
# The attribute of a function of JAX that runs no Python code before its results are stored, for
# arrays of any shapes. Its calls defer nothing.
DIRECT = "nnx_sharding_is_direct"
_arrived: list[int] = []  # the numbers of signals that came since, in their order


def unmark_direct(execute: Callable[..., Any]) -> None:
    """Removes the mark, where JAX compiles, or may have to, for arrays of other types."""
    if hasattr(execute, DIRECT):
        vars(execute).pop(DIRECT, None)


def _note_signal(number: int, _: object) -> None:
    """The handler of all signals that are deferred."""
    _arrived.append(number)


def defer_signals() -> None:
    """Defers all signals that have a handler in Python until :func:`deliver_signals`.

    If they are deferred already, nothing changes. In other threads than the main one, it does
    nothing.
    """
    if deferred_handlers or threading.current_thread() is not threading.main_thread():
        return
    handlers = zip(_NUMBERS, map(_signal.getsignal, _NUMBERS), strict=True)
    # Others are handled in C, and interrupt no Python code.
    pairs = [(number, handler) for number, handler in handlers if callable(handler)]
    replacements = [(_signal.signal, number, _note_signal) for number, _ in pairs]
    # In one step, or a signal could come when only some handlers are replaced. The old ones are
    # kept first, so that no handler is lost if setting one fails.
    perform([(deferred_handlers.update, pairs), *replacements])


def deliver_signals() -> None:
    """Restores the handlers, and delivers the signals that arrived, if signals are deferred."""
    if deferred_handlers and threading.current_thread() is threading.main_thread():
        # The user's function may have set another handler meanwhile, which stays.
        still_replaced = [
            (number, handler)
            for number, handler in deferred_handlers.items()
            if _signal.getsignal(number) is _note_signal
        ]
        restore = [(_signal.signal, number, handler) for number, handler in still_replaced]
        # In one step: a signal in between would be handled when others are still deferred.
        perform([*restore, (deferred_handlers.clear,)])
        arrived = [*dict.fromkeys(_arrived)]  # each once, as the system does with pending signals
        _arrived.clear()
        for number in arrived:
            _signal.raise_signal(number)


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Defers signals within the block. One inside another ends the deferral for both."""
    try:
        defer_signals()  # here, since a signal may come when it has just deferred them
        yield
    finally:
        deliver_signals()
