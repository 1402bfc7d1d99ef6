"""One process of a launch: runs the program in a child process, and ends all its descendants.

It is started by its path, and imports only the standard library, so that the program can still set
the variables that JAX reads. Its arguments are the pipe on which it reports, the grace period and
the program. It runs until its standard input is closed, by the launcher or by the launcher's end.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import runpy
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

_PARENT_DEATH_SIGNAL, _CHILD_SUBREAPER = 1, 36  # options of prctl(2)
_PAUSE = 0.02  # seconds


def main() -> None:
    """Forks: the parent watches, the child runs the program."""
    pipe, grace, program = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    os.set_inheritable(pipe, False)
    _prctl(_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child:
        _discard(1, 2)  # nobody but the program keeps its output open
        _watch(child, pipe, grace)
    else:
        _prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        _discard(0)
        _run(program, pipe)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _discard(*descriptors: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)


def _report(pipe: int, event: str, code: int) -> None:
    with contextlib.suppress(OSError):  # the launcher is gone
        os.write(pipe, b"%s %d\n" % (event.encode(), code))


def _watch(program: int, pipe: int, grace: float) -> None:
    """Reports the exit code of the program; when the launch is over, ends whatever is left.

    As a subreaper this process is the parent of every orphan of the program. It has one thread, so
    no process is reaped, and its id reused, between being listed and being signalled. It leads the
    process group of the program, whose id is therefore not reused either.
    """
    running = {program}

    def children() -> set[int]:
        """The children that are left once the ended ones are reaped."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] in running:
                    running.clear()
                    code = os.waitstatus_to_exitcode(ended[1])
                    _report(pipe, "ended", 128 - code if code < 0 else code)
        lists = glob.glob("/proc/self/task/*/children")
        return {int(pid) for path in lists for pid in Path(path).read_text().split()} or running

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        children()
        ready, _, _ = select.select([0, reading], [], [])
        if 0 in ready:
            break
        os.read(reading, 1 << 10)

    os.killpg(0, signal.SIGTERM)
    asked: set[int] = set()
    deadline = time.monotonic() + grace
    while (left := children()) and time.monotonic() < deadline:
        _send(signal.SIGTERM, (p for p in left - asked if os.getpgid(p) != os.getpgrp()))
        asked |= left
        time.sleep(_PAUSE)
    deadline = time.monotonic() + grace
    while (left := children()) and time.monotonic() < deadline:
        _send(signal.SIGKILL, left)
        time.sleep(_PAUSE)
    os.killpg(0, signal.SIGKILL)  # this process and its group, for orphans with another parent


def _send(number: signal.Signals, processes: Iterable[int]) -> None:
    for process in processes:
        with contextlib.suppress(OSError):  # it runs as another user
            os.kill(process, number)


def _run(program: list[str], pipe: int) -> None:
    """Runs the program as ``python`` does, and reports a failure immediately.

    JAX's exit handler waits up to five minutes for the other processes, which wait for this one.
    """
    try:
        if program[0] == "-m":
            sys.argv, sys.path[0] = program[1:], os.getcwd()
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = program, os.path.dirname(os.path.abspath(program[0]))
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as error:
        # Python writes any other value to stderr and exits with 1.
        code = error.code or 0
        code = code & 0xFF if isinstance(code, int) else 1
        if code:
            _report(pipe, "failed", code)
        raise
    except KeyboardInterrupt:
        _report(pipe, "failed", 128 + signal.SIGINT)
        raise
    except BaseException as error:
        _show(error)
        _report(pipe, "failed", 1)
        sys.exit(1)


def _show(error: BaseException) -> None:
    """Shows an error as Python does, without the frames that led into the program."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_FRAMES):
        frames = frames.tb_next
    try:
        sys.excepthook(type(error), error.with_traceback(frames), frames)
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()


_FRAMES = (__file__, "<frozen")

if __name__ == "__main__":
    main()
