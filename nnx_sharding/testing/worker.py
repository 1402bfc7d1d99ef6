"""Runs the program in one process, and tells the launcher at once if it fails.

A Python that ends after an error runs JAX's exit handler, which waits for all other processes, for
up to five minutes; they wait in a collective for this one. So the exit code is told before.

Started by its path, so that nothing is imported before the program does: it may set the variables
that JAX reads.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
from types import TracebackType


def main() -> None:
    """Takes from the command line where to tell the exit code, then the program."""
    told, program = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(told, False)
    try:
        _run(program)
    except SystemExit as error:
        _tell(told, _code_of(error))
        raise
    except KeyboardInterrupt:
        _tell(told, 128 + signal.SIGINT)
        raise
    except BaseException as error:
        _show(error)
        _tell(told, 1)
        sys.exit(1)


def _run(program: list[str]) -> None:
    """What ``python`` does with these words."""
    if program[0] == "-m":
        sys.argv, sys.path[0] = program[1:], os.getcwd()
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = program, os.path.dirname(os.path.abspath(program[0]))
        runpy.run_path(program[0], run_name="__main__")


def _code_of(error: SystemExit) -> int:
    """The exit code that Python gives itself; it writes what is no number to stderr."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _show(error: BaseException) -> None:
    """Shows an error as Python does, without the frames that led into the program."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and _is_ours(frames):
        frames = frames.tb_next
    try:
        sys.excepthook(type(error), error.with_traceback(frames), frames)
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()


def _is_ours(frames: TracebackType) -> bool:
    name = frames.tb_frame.f_code.co_filename
    return name == __file__ or name.startswith("<frozen")


def _tell(told: int, code: int) -> None:
    if code:
        os.write(told, b"%d\n" % code)


if __name__ == "__main__":
    main()
