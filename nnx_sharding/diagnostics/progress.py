"""Shows the progress of long work: a bar on terminals, and in notebooks with ipywidgets.

If a bar cannot be drawn, as in the log of a job, a line is printed each half minute, so that work
of minutes is not taken for a program that hangs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from .. import _compat

# The seconds before a bar is shown; shorter work needs no bar.
DELAY_S = 2.0
LINE_S = 30.0  # seconds between the lines in a log
QUIET = "NNX_SHARDING_QUIET"

# This lock is held while a bar or lines are shown, so that nested work shows no other ones.
_BAR = threading.Lock()


@contextlib.contextmanager
def progress(
    title: str,
    total: int | Callable[[], int] | None = None,
    *,
    running: Callable[[], Sequence[str]] = list,  # `list()` is empty: no names
    quiet: bool = False,
) -> Iterator[Callable[[str], None]]:
    """Shows a bar on stderr once the block has taken two seconds, or lines in a log.

    Args:
      title: what the work is.
      total: the number of steps, or a function that returns it if it changes while the block runs;
        None if it is unknown. The function is also called from another thread.
      running: returns the names of the steps that run now; called from another thread. Lines name
        them, since a single step may take minutes.
      quiet: whether to show nothing.

    Yields:
      A function to call after each step, with its name.
    """
    # `acquire` returns False if another bar is shown.
    if quiet or _is_quiet() or not _BAR.acquire(blocking=False):
        yield lambda _: None
        return
    try:
        counted = _constant(total) if isinstance(total, int) else total
        shown = _bar(title, counted) if _has_bar() else _lines(title, counted, running)
        with shown as advance:
            yield advance
    finally:
        _BAR.release()


def _constant(number: int) -> Callable[[], int]:
    """Returns a function that returns a number."""
    return lambda: number


@contextlib.contextmanager
def _bar(title: str, total: Callable[[], int] | None) -> Iterator[Callable[[str], None]]:
    """Draws a bar from `DELAY_S` on, and removes it in the end; yields what `progress` yields."""
    # rich is imported here, because this takes time, and work without a bar need not wait for it.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    title_column = TextColumn("{task.description}", markup=False)
    counts = [] if total is None else [MofNCompleteColumn()]
    columns = [title_column, BarColumn(), *counts, TimeElapsedColumn()]
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(title, total=None if total is None else total())
    timer = threading.Timer(DELAY_S, bar.start)
    timer.daemon = True  # A process that ends does not wait for the timer.
    timer.start()

    def advance(name: str) -> None:
        current_total = None if total is None else total()  # None leaves the total unchanged.
        description = f"{title}: {name}" if name else title
        bar.update(task, total=current_total, advance=1, description=description)

    try:
        yield advance
    finally:
        timer.cancel()
        timer.join()  # The timer may just start the bar, and `stop` has to come after that.
        bar.stop()


@contextlib.contextmanager
def _lines(
    title: str, total: Callable[[], int] | None, running: Callable[[], Sequence[str]]
) -> Iterator[Callable[[str], None]]:
    """Prints a line every `LINE_S` seconds from a thread; yields what `progress` yields.

    ``running`` returns the names of the steps that run at the time of a call.
    """
    names: list[str] = []  # the names of the steps that were done
    start, is_done = time.monotonic(), threading.Event()

    def print_lines() -> None:
        while not is_done.wait(LINE_S):
            seconds = time.monotonic() - start
            steps = _steps_text(names, None if total is None else total(), running())
            print(f"{title}: {steps}{seconds:.0f} s so far", file=sys.stderr, flush=True)

    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield names.append  # The caller calls it after each step, with the name of the step.
    finally:
        is_done.set()
        thread.join()


def _steps_text(done: Sequence[str], total: int | None, running: Sequence[str]) -> str:
    """Writes the part of a line about steps: ``1 of 3 done, the last: fsdp; now: replicated; ``.

    The time follows in the line, so the text ends with a semicolon, unless it is empty.

    Args:
      done: the names of the steps that were done.
      total: the number of all steps; None if it is unknown.
      running: the names of the steps that run now.
    """
    text = ""
    if done or total is not None:
        text += f"{len(done)} done" if total is None else f"{len(done)} of {total} done"
        text += f", the last: {done[-1]}; " if done else "; "
    if running:
        text += f"now: {' and '.join(running)}; "
    return text


# The values of TERM for which rich moves no cursor, and would write empty lines.
_WITHOUT_CURSOR = ("dumb", "unknown")


def _is_quiet() -> bool:
    """Whether progress is not shown: on request, in a process other than 0, or without stderr."""
    is_requested = os.environ.get(QUIET, "0") not in ("", "0")
    return is_requested or _compat.process_id() != 0 or sys.stderr is None


def _has_bar() -> bool:
    """Whether a bar can be drawn on stderr."""
    # In a notebook the shell is the shell of a Jupyter kernel; rich looks for it, too. It is no
    # proof that the module of kernels is imported, because a program that starts kernels imports it
    # as well.
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    is_notebook = type(shell).__name__ == "ZMQInteractiveShell"
    if is_notebook:  # rich draws with ipywidgets in notebooks, and warns if they are missing.
        return importlib.util.find_spec("ipywidgets") is not None
    # Errors mean False, because programs may close stderr, or replace it by an object that only
    # writes to a log.
    with contextlib.suppress(AttributeError, ValueError):
        return sys.stderr.isatty() and os.environ.get("TERM") not in _WITHOUT_CURSOR
    return False
