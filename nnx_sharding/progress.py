"""Progress of work that takes seconds: a bar on terminals and in notebooks, nothing elsewhere."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

# Shorter work needs no bar.
DELAY_S = 2.0


@contextlib.contextmanager
def progress(
    title: str, total: int | None = None, *, quiet: bool = False
) -> Iterator[Callable[[str], None]]:
    """Shows a bar on stderr once the block has taken two seconds, and removes it at its end.

    Args:
      title: what is being done.
      total: the number of steps; None if it is not known.
      quiet: whether to show nothing.

    Yields:
      A function that is called after each step, with the name of what comes next.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if quiet or not (console.is_terminal or console.is_jupyter):
        yield lambda _: None
        return
    count = () if total is None else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *count, TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(title, total=total)
    timer = threading.Timer(DELAY_S, bar.start)
    timer.daemon = True
    timer.start()

    def advance(following: str) -> None:
        bar.update(task, advance=1, description=f"{title}: {following}" if following else title)

    try:
        yield advance
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
