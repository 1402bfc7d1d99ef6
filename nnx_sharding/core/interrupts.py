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

# The handlers of deferred signals, and the signals that arrived. Only the main thread has any.
held: dict[int, Any] = {}
_arrived: list[int] = []


def _note(number: int, _: object) -> None:
    _arrived.append(number)


def hold() -> None:
    """Defers all signals that have a handler in Python until :func:`release`."""
    if held or threading.current_thread() is not threading.main_thread():
        return
    handlers = zip(_NUMBERS, map(_signal.getsignal, _NUMBERS), strict=True)
    # Others are handled in C, and interrupt no Python code.
    pairs = [(number, handler) for number, handler in handlers if callable(handler)]
    perform([(held.update, pairs), *((_signal.signal, number, _note) for number, _ in pairs)])


def release() -> None:
    """Restores the handlers, and delivers the signals that arrived."""
    if held and threading.current_thread() is threading.main_thread():
        # The user's function may have set another handler meanwhile, which stays.
        pairs = [pair for pair in held.items() if _signal.getsignal(pair[0]) is _note]
        perform([*((_signal.signal, *pair) for pair in pairs), (held.clear,)])
        arrived = [*dict.fromkeys(_arrived)]
        _arrived.clear()
        for number in arrived:
            _signal.raise_signal(number)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Defers them within the block."""
    try:
        hold()
        yield
    finally:
        release()
