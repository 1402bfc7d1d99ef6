"""Starts processes, watches them, and says how they ended."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..partition.virtual import MOST_DEVICES
from . import worker
from .ending import MARK, dismiss, end_all, start_warden
from .environment import environment_of, reserve_port
from .output import Output, indented

TIMED_OUT = 124  # as of timeout(1)
_SETTLING = 0.3  # seconds


def launch(
    program: Sequence[str],
    *,
    processes: int = 2,
    devices_per_process: int = 1,
    platform: str = "cpu",
    timeout: float | None = None,
    grace: float = 3.0,
) -> int:
    """Runs a Python program in several processes on this machine, and waits for them.

    In each, ``jax.distributed.initialize()`` needs no arguments. Their output is shown line by
    line, with the number of the process before it. If one fails, the others are ended: first they
    are asked to, then killed. The message says which one failed and ends with what it wrote to
    stderr; what the others had to say after that comes last. No process is left, also none that
    the program started, and not if this process is killed either (on Linux; elsewhere none that
    stayed in the process group of its parent).

    Args:
      program: a script and its arguments, or ``-m``, a module and its arguments.
      processes: how many.
      devices_per_process: how many devices each has: virtual ones on the CPU; of others, those
        with the numbers from ``rank * devices_per_process`` on.
      platform: what ``JAX_PLATFORMS`` is set to.
      timeout: end all after so many seconds; None for never.
      grace: how many seconds a process has that is asked to end.

    Returns:
      0 if all processes returned that. Else the exit code of the first that failed, 128 + n for
      one that signal n ended; 124 after the timeout; 128 + n after signal n to this process.

    Raises:
      ValueError: there is no program, or a number is too small or too large.
      OSError: a process could not be started.

    Example:
      >>> import tempfile
      >>> from pathlib import Path
      >>> from nnx_sharding.testing import launch
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     script = Path(folder, "script.py")
      ...     _ = script.write_text("import os; assert os.environ['SLURM_PROCID'] in '01'")
      ...     launch([str(script)], processes=2)
      0
    """
    small = {"processes": processes, "devices_per_process": devices_per_process}
    wrong = [f"{name} is at least 1, not {value}" for name, value in small.items() if value < 1]
    if processes * devices_per_process > MOST_DEVICES:
        devices = f"{processes} processes of {devices_per_process} devices"
        wrong.append(f"expected at most {MOST_DEVICES} devices in all, got {devices}")
    if not program:
        wrong.append("program is empty")
    if wrong:
        raise ValueError("; ".join(wrong))
    deadline = None if timeout is None else time.monotonic() + timeout
    started = time.monotonic()
    events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
    mark = ":".join(filter(None, [os.environ.get(MARK), uuid.uuid4().hex]))
    output = Output(
        processes,
        (sys.stdout, sys.stderr),
        lambda: events.put(_Event("signal", code=128 + signal.SIGPIPE)),
    )
    groups: list[int] = []
    with _signals_to(events), reserve_port() as port, _warden(mark, grace) as tell:
        address = f"127.0.0.1:{port.getsockname()[1]}"
        inherited = {**os.environ, MARK: mark}
        try:
            for rank in range(processes):
                sizes = (rank, processes, devices_per_process, platform)
                process, told = _start(program, environment_of(*sizes, address, inherited))
                groups.append(process.pid)
                tell(process.pid)
                assert process.stdout is not None and process.stderr is not None
                output.follow(rank, process.stdout, process.stderr)
                _wait_for(rank, process, told, events)
            end = _first_end(events, processes, deadline)
            seconds = time.monotonic() - started
            if end.rank is not None:
                output.hold_all_but(end.rank)
        finally:
            end_all(groups, mark, grace)
    output.finish(grace)
    if end.code:
        _explain(end, output, processes, seconds)
    output.release(b"launch: what the others wrote after that:\n")
    return end.code


class _Event(NamedTuple):
    """Something that happened.

    Attributes:
      kind: "failed" (told by a process that has not ended yet), "ended", "signal" to the
        launcher, or "timeout".
      rank: the process that it happened to, if it did to one.
      code: an exit code, as a shell shows it.
    """

    kind: str
    rank: int | None = None
    code: int = 0


def _first_end(events: queue.SimpleQueue[_Event], processes: int, deadline: float | None) -> _Event:
    """Waits for the first failure, or until all processes have ended well."""
    running = processes
    while running:
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            event = events.get(timeout=seconds)
        except queue.Empty:
            return _Event("timeout", code=TIMED_OUT)
        if event.code:
            return _cause(event, events)
        running -= 1
    return _Event("ended")


def _cause(found: _Event, events: queue.SimpleQueue[_Event]) -> _Event:
    """The failure that led to this one, if it did not come by itself.

    A process that dies closes its connections before it has ended, so the others may be faster to
    tell of an error than the system is to tell of its end.
    """
    deadline = time.monotonic() + _SETTLING
    while found.kind == "failed" and (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            event = events.get(timeout=left)
            if event.kind == "ended" and event.code and event.rank != found.rank:
                return event
    return found


def _explain(end: _Event, output: Output, processes: int, seconds: float) -> None:
    """Says on stderr why the launch failed."""
    if end.rank is None:
        what = "not done in time" if end.kind == "timeout" else f"ended by {_name_of(end.code)}"
        output.write(f"launch: {what}, after {seconds:.1f} s; all processes were ended\n".encode())
        return
    how = f"with exit code {end.code}" if end.code <= 128 else f"by {_name_of(end.code)}"
    others = "" if processes == 1 else "; the others were ended"
    last = output.last[end.rank]
    wrote = ". The last that it wrote to stderr:" if last else ""
    text = f"launch: process {end.rank} failed {how}, after {seconds:.1f} s{others}{wrote}\n"
    output.write(text.encode() + indented(list(last)))


def _name_of(code: int) -> str:
    number = code - 128
    known = number in set(signal.Signals)
    return f"signal {number} ({signal.Signals(number).name})" if known else f"signal {number}"


def _start(
    program: Sequence[str], environment: dict[str, str]
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts one process; the number is where it tells that it failed."""
    told, telling = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, str(Path(worker.__file__)), str(telling), *program],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=(telling,),
            start_new_session=True,  # a group that can be ended as a whole
        )
    finally:
        os.close(telling)
    return process, told


def _wait_for(
    rank: int, process: subprocess.Popen[bytes], told: int, events: queue.SimpleQueue[_Event]
) -> None:
    def wait() -> None:
        with open(told, "rb") as pipe:
            for line in pipe:
                events.put(_Event("failed", rank, int(line)))
        code = process.wait()
        events.put(_Event("ended", rank, 128 - code if code < 0 else code))

    threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def _signals_to(events: queue.SimpleQueue[_Event]) -> Iterator[None]:
    """Makes events of the signals that ask this process to end."""

    def handle(number: int, _: Any) -> None:
        events.put(_Event("signal", code=128 + number))

    wanted = ("SIGINT", "SIGTERM", "SIGHUP")
    is_main = threading.current_thread() is threading.main_thread()  # others cannot ask for any
    numbers = [getattr(signal, name) for name in wanted if hasattr(signal, name) and is_main]
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)


@contextlib.contextmanager
def _warden(mark: str, grace: float) -> Iterator[Any]:
    """Has what is left ended if this process is killed; gives how to tell the groups."""
    warden = start_warden(mark, grace)
    assert warden.stdin is not None

    def tell(group: int) -> None:
        assert warden.stdin is not None
        with contextlib.suppress(OSError):  # someone ended it; we end ours ourselves
            warden.stdin.write(b"%d\n" % group)
            warden.stdin.flush()

    try:
        yield tell
    finally:
        dismiss(warden)
