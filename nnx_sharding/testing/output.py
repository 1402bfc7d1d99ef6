"""What several processes write, line by line, each with the number of its process."""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, Any

# A progress bar goes back to the start of its line instead of ending it.
_END = re.compile(rb"\r?\n|\r(?!\Z)")
_REMEMBERED = 40
_LONGEST = 1 << 20  # bytes of a line that is shown as one
_LONGEST_REMEMBERED = 2000


class Output:
    """Shows lines as they come, whole, and keeps the last that each process wrote to stderr.

    A line of more than 1 MiB is shown in parts, and a long one is shortened when it is kept.

    Attributes:
      last: for each process its last lines of stderr, without their ends.
    """

    def __init__(self, processes: int, streams: Sequence[Any], on_closed: Callable[[], None]):
        """Shows lines on the two streams, of text; tells if nobody reads them any more."""
        self.last = [deque[bytes](maxlen=_REMEMBERED) for _ in range(processes)]
        self._streams = streams
        self._on_closed = on_closed
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._shown: int | None = None
        self._held: list[tuple[int, bytes]] | None = None

    def follow(self, rank: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Shows what one process writes, in threads of its own, until nobody can write more."""
        for stream, pipe in enumerate((stdout, stderr)):
            thread = threading.Thread(target=self._pump, args=(rank, stream, pipe), daemon=True)
            thread.start()
            self._threads.append(thread)

    def hold_all_but(self, rank: int) -> None:
        """Keeps back from now on what all but one of the processes write."""
        with self._lock:
            self._shown, self._held = rank, []

    def release(self, heading: bytes = b"") -> None:
        """Shows what was kept back, below a heading if there is anything."""
        with self._lock:
            held, self._held = self._held, None
            if held and heading:
                self._write(1, heading)
            for stream, text in held or ():
                self._write(stream, text)

    def write(self, text: bytes) -> None:
        """Writes to stderr without a prefix."""
        with self._lock:
            self._write(1, text)

    def finish(self, seconds: float) -> None:
        """Waits until all that was written is shown."""
        for thread in self._threads:
            thread.join(seconds)

    def _pump(self, rank: int, stream: int, pipe: IO[bytes]) -> None:
        line, end = bytearray(), b""
        with pipe:
            while chunk := os.read(pipe.fileno(), 1 << 16):
                *lines, rest = _END.split(end + chunk)
                if lines:
                    lines[0] = bytes(line) + lines[0]
                    line.clear()
                end = rest[len(rest.rstrip(b"\r")) :]  # the next chunk may go on with a newline
                line += rest.removesuffix(end)
                if len(line) >= _LONGEST:
                    lines.append(bytes(line))
                    line.clear()
                if lines:
                    self._show(rank, stream, lines)
        if line or end:
            self._show(rank, stream, [bytes(line)])

    def _show(self, rank: int, stream: int, lines: Sequence[bytes]) -> None:
        """Shows whole lines at once."""
        shown = b"".join(b"[%d] %s\n" % (rank, line) for line in lines)
        with self._lock:
            if stream == 1:
                self.last[rank].extend(map(_shortened, lines))
            if self._held is not None and rank != self._shown:
                self._held.append((stream, shown))
            else:
                self._write(stream, shown)

    def _write(self, stream: int, text: bytes) -> None:
        target = self._streams[stream]
        try:
            if hasattr(target, "buffer"):  # whatever the encoding, what comes is what goes
                target.flush()
                target.buffer.write(text)
            else:
                target.write(text.decode(errors="replace"))
            target.flush()
        except (OSError, ValueError) as error:  # whoever read it is gone
            if isinstance(error, BrokenPipeError):
                _discard(target)
            self._on_closed()


def _discard(stream: IO[str]) -> None:
    """Sends to nowhere what a stream still holds: Python would fail to flush it when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)


def _shortened(line: bytes) -> bytes:
    left = len(line) - _LONGEST_REMEMBERED
    return line if left <= 0 else b"%s ... %d more bytes" % (line[:_LONGEST_REMEMBERED], left)


def indented(lines: Sequence[bytes]) -> bytes:
    """Lines as part of a message."""
    return b"".join(b"  %s\n" % line for line in lines)
