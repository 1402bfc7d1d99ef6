"""The output of several processes, line by line, each with the number of its process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import IO, Any

_REMEMBERED = 40  # lines of stderr
_LONGEST, _LONGEST_REMEMBERED = 1 << 20, 2000  # characters of a line


class Output:
    """Shows complete lines as they arrive, and keeps the last ones of each process's stderr.

    A line of more than 1 Mi characters is shown in parts, and long lines are kept shortened.
    ``on_closed`` is called if stdout or stderr is no longer read.
    """

    def __init__(self, processes: int, on_closed: Callable[[], None]):
        self.last = [deque[str](maxlen=_REMEMBERED) for _ in range(processes)]
        self._streams = sys.stdout, sys.stderr
        self._on_closed = on_closed
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._shown: int | None = None
        self._held: list[tuple[int, str]] = []

    def follow(self, rank: int, process: subprocess.Popen[str]) -> None:
        """Shows what one process writes, until its streams are closed."""
        for stream, pipe in enumerate((process.stdout, process.stderr)):
            thread = threading.Thread(target=self._copy, args=(rank, stream, pipe), daemon=True)
            thread.start()
            self._threads.append(thread)

    def hold_all_but(self, rank: int | None) -> None:
        """From now on holds back what the other processes write; nothing without a rank."""
        with self._lock:
            self._shown = rank

    def finish(self, seconds: float, message: Callable[[], str]) -> None:
        """Waits for the rest, then shows the message on stderr, and what was held back."""
        for thread in self._threads:
            thread.join(seconds)
        with self._lock:
            heading = "launch: output of the others after that:\n" if self._held else ""
            for stream, text in ((1, message() + heading), *self._held):
                self._write(stream, text)

    def _copy(self, rank: int, stream: int, pipe: IO[str]) -> None:
        with pipe:
            while line := pipe.readline(_LONGEST):
                line = line.removesuffix("\n")
                shown = f"[{rank}] {line}\n"
                with self._lock:
                    if stream == 1:
                        self.last[rank].append(_shortened(line))
                    if self._shown in (None, rank):
                        self._write(stream, shown)
                    else:
                        self._held.append((stream, shown))

    def _write(self, stream: int, text: str) -> None:
        target: Any = self._streams[stream]
        data = text.encode(errors="surrogateescape")
        try:
            if hasattr(target, "buffer"):  # unchanged, whatever the encoding
                target.flush()
                target.buffer.write(data)
            else:
                target.write(data.decode(errors="replace"))
            target.flush()
        except (OSError, ValueError) as error:
            if isinstance(error, BrokenPipeError):  # Python would fail to flush the rest at exit
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, target.fileno())
                os.close(nowhere)
            self._on_closed()


def _shortened(line: str) -> str:
    more = len(line) - _LONGEST_REMEMBERED
    return line if more <= 0 else f"{line[:_LONGEST_REMEMBERED]} ... {more} more characters"
