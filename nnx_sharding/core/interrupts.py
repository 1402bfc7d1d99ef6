"""Defers signals between a program that consumes donated arrays and the write-back.

The program deletes the arrays that the caller's model holds. If Ctrl-C came before the new ones are
written back, the model would be lost. Python runs handlers of signals between its instructions, so
the handlers are replaced by one that only notes the signal, and the signal is raised again after.
"""

from __future__ import annotations

# Takes a tenth of the time of the functions in `signal`, which make enum members.
import _signal  # type: ignore[import-not-found]
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from .unflatten import perform

_NUMBERS = (*_signal.valid_signals(),)

# The user's handlers while signals are deferred, by number; else empty. Only the main thread, which
# Python runs handlers in, defers any. `call.c` reads this dict.
deferred_handlers: dict[int, Any] = {}
_arrived: list[int] = []


def _note_signal(number: int, _: object) -> None:
    _arrived.append(number)


def defer_signals() -> None:
    """Defers all signals that have a handler in Python until :func:`deliver_signals`."""
    if deferred_handlers or threading.current_thread() is not threading.main_thread():
        return
    handlers = zip(_NUMBERS, map(_signal.getsignal, _NUMBERS), strict=True)
    # Others are handled in C, and interrupt no Python code.
    pairs = [(number, handler) for number, handler in handlers if callable(handler)]
    # In one step, or a signal could come when only some handlers are replaced.
    replacements = [(_signal.signal, number, _note_signal) for number, _ in pairs]
    perform([(deferred_handlers.update, pairs), *replacements])


def deliver_signals() -> None:
    """Restores the handlers, and delivers the signals that arrived."""
    if deferred_handlers and threading.current_thread() is threading.main_thread():
        # The user's function may have set another handler meanwhile, which stays.
        still_replaced = [
            (number, handler)
            for number, handler in deferred_handlers.items()
            if _signal.getsignal(number) is _note_signal
        ]
        restore = [(_signal.signal, number, handler) for number, handler in still_replaced]
        perform([*restore, (deferred_handlers.clear,)])  # in one step, as above
        arrived = [*dict.fromkeys(_arrived)]
        _arrived.clear()
        for number in arrived:
            _signal.raise_signal(number)


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Defers signals within the block."""
    try:
        defer_signals()
        yield
    finally:
        deliver_signals()
