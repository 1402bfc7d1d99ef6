"""Ends processes together with all that they started.

Started by its path, it is the warden: it waits until the launcher is gone, for whatever reason,
and ends what is left then. It imports only the standard library, and starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

# In the environment of each process that a launcher started, and so of those that they start.
MARK = "NNX_SHARDING_LAUNCH"
_PROCESSES = Path("/proc")
_PAUSE = 0.02


def end_all(groups: Sequence[int], mark: str, grace: float) -> None:
    """Asks processes to end, and kills those that did not in time.

    Args:
      groups: process groups.
      mark: what the processes have in their environment, also those that left their group.
      grace: how long they have, in seconds.
    """
    asked = set(_living(groups, mark))
    _send(asked, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while _living(groups, mark) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    # Again and again: one of them may have started another one just before it was killed.
    deadline = time.monotonic() + grace
    while (left := _living(groups, mark)) and time.monotonic() < deadline:
        _send(left, signal.SIGKILL)
        time.sleep(_PAUSE)


def start_warden(mark: str, grace: float) -> subprocess.Popen[bytes]:
    """Starts the warden; it gets the groups through its stdin, a line for each."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark, str(grace)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def dismiss(warden: subprocess.Popen[bytes]) -> None:
    """Ends the warden: nothing is left to do."""
    warden.kill()
    warden.communicate()


def _living(groups: Sequence[int], mark: str) -> list[int]:
    """The processes that still run; where the system does not list them, the groups, negative."""
    if not (_PROCESSES / "self").exists():
        return [-group for group in groups if _exists(-group)]
    return list(_listed(frozenset(groups), f"{MARK}={mark}".encode()))


def _listed(groups: frozenset[int], mark: bytes) -> Iterator[int]:
    for folder in _PROCESSES.iterdir():
        if folder.name.isdigit():
            try:
                # After the name of the program, which may hold anything.
                state, _, group = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:3]
                if state in b"ZX":
                    continue
                if int(group) in groups or mark in (folder / "environ").read_bytes():
                    yield int(folder.name)
            except OSError:  # it is gone, or not ours
                continue


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True


def _send(processes: Sequence[int] | set[int], number: signal.Signals) -> None:
    for process in processes:
        try:
            os.kill(process, number)
        except OSError:  # it is gone
            continue


def _watch() -> None:
    mark, grace = sys.argv[1:]
    groups = [int(line) for line in sys.stdin.buffer]
    end_all(groups, mark, float(grace))


if __name__ == "__main__":
    _watch()
