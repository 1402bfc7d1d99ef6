"""Progress of work that takes seconds: a bar on terminals, and in notebooks with ipywidgets."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator

from .. import _compat

# Shorter work needs no bar.
DELAY_S = 2.0
QUIET = "NNX_SHARDING_QUIET"

# Held while there is a bar: nested work shows none of its own.
_BAR = threading.Lock()


@contextlib.contextmanager
def progress(
    title: str, total: int | None = None, *, quiet: bool = False
) -> Iterator[Callable[[str], None]]:
    """Shows a bar on stderr once the block has taken two seconds.

    Yields a function to call after each step, with its name. ``total`` is the number of steps;
    None if it is unknown.
    """
    if quiet or not _is_shown() or not _BAR.acquire(blocking=False):  # one bar at a time
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    title_column = TextColumn("{task.description}", markup=False)
    columns = [title_column, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    if total is None:
        columns.pop(2)
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(title, total=total)
    timer = threading.Timer(DELAY_S, bar.start)
    timer.daemon = True  # a process that ends does not wait for it
    timer.start()

    def advance(name: str) -> None:
        bar.update(task, advance=1, description=f"{title}: {name}" if name else title)

    try:
        yield advance
    finally:
        timer.cancel()
        timer.join()  # it may be starting the bar
        bar.stop()
        _BAR.release()


_WITHOUT_CURSOR = ("dumb", "unknown")  # as rich knows them, which then writes empty lines


def _is_shown() -> bool:
    """Whether stderr is shown to a user who wants to see progress."""
    if os.environ.get(QUIET, "0") not in ("", "0") or _compat.process_id() != 0:
        return False
    if _is_notebook():  # no terminal; rich draws by ipywidgets, and warns without
        return importlib.util.find_spec("ipywidgets") is not None
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return is_terminal and os.environ.get("TERM") not in _WITHOUT_CURSOR


def _is_notebook() -> bool:
    """Whether the program runs in a kernel. A program that starts kernels only imports theirs."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"  # as rich tells it
