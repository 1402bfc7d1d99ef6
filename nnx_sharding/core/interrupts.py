"""Defers signals between a program that consumes donated arrays and the write-back.

The program deletes the arrays that the caller's model holds. If Ctrl-C came before the new arrays
are written back, the model would be lost. Python runs handlers of signals between its instructions.
So the handlers are replaced by one that only notes the signal, and each signal is raised again
after the write-back.

``perform`` runs *operations*, each a tuple of a function and its arguments, in a loop in C. Between
functions written in C, such as ``signal``, no instruction of Python runs, so no handler does. All
of this is for the main thread, the only one in which Python runs handlers.
"""

from __future__ import annotations

# The module in C takes a tenth of the time of `signal`, whose functions make enum members.
import _signal  # type: ignore[import-not-found]
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .in_c import perform

_NUMBERS = (*_signal.valid_signals(),)

# The user's handlers by number while signals are deferred; empty otherwise. Only the main thread
# defers signals, because Python runs handlers only there. `call.c` reads this dict.
deferred_handlers: dict[int, Any] = {}
# The attribute that marks a function of JAX as direct: for arrays of any shapes, it runs no Python
# code before its results are stored, so its calls need not defer signals.
DIRECT = "nnx_sharding_is_direct"
_arrived: list[int] = []  # the numbers of signals that came while signals were deferred, in order


def unmark_direct(execute: Callable[..., Any]) -> None:
    """Removes the mark ``DIRECT``, because JAX compiles, or may compile, for other arrays."""
    if hasattr(execute, DIRECT):
        vars(execute).pop(DIRECT, None)


def _note_signal(number: int, _: object) -> None:
    """The handler of all signals that are deferred."""
    _arrived.append(number)


def defer_signals() -> None:
    """Defers all signals that have a handler in Python until :func:`deliver_signals`.

    Does nothing if signals are already deferred, or in any thread but the main one.
    """
    if deferred_handlers or threading.current_thread() is not threading.main_thread():
        return
    handlers = zip(_NUMBERS, map(_signal.getsignal, _NUMBERS), strict=True)
    # Signals without such a handler are handled in C, and interrupt no Python code.
    pairs = [(number, handler) for number, handler in handlers if callable(handler)]
    replacements = [(_signal.signal, number, _note_signal) for number, _ in pairs]
    # All handlers are replaced in one step, so that no handler runs when only some are. The old
    # handlers are kept first, so that none is lost if setting one fails.
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
        # All handlers are restored in one step, because a signal in between would be handled while
        # other signals are still deferred.
        perform([*restore, (deferred_handlers.clear,)])
        # Each signal is raised once, as the system does with pending signals. The stack also raises
        # those after one whose handler raises, as that of Ctrl-C does; it calls in reverse order.
        with contextlib.ExitStack() as to_raise:
            for number in reversed([*dict.fromkeys(_arrived)]):
                to_raise.callback(_signal.raise_signal, number)
            _arrived.clear()


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Defers signals within the block. The end of an inner block ends the deferral for both."""
    try:
        defer_signals()  # in the `try`, because a signal may come when it has just deferred them
        yield
    finally:
        deliver_signals()
