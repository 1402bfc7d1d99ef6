"""Runs a program as ``python`` does, in a process that ends soon after the program fails.

Started by its path, it imports only the standard library, so the program can still set the
variables that JAX reads.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from typing import NoReturn


def main() -> None:
    """Runs the program; kills its process group when standard input is closed."""
    launcher = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=_watch, args=(launcher,), daemon=True).start()
    program = sys.argv[1:]
    try:
        if program[0] == "-m":
            sys.argv, sys.path[0] = program[1:], os.getcwd()
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = program, os.path.dirname(os.path.abspath(program[0]))
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as error:
        if not error.code:
            raise
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        _leave(error.code & 0xFF if isinstance(error.code, int) else 1)
    except BaseException as error:
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename.startswith((__file__, "<frozen")):
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        _leave(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)


def _leave(code: int) -> NoReturn:
    """Ends the process, at the latest after a second."""
    # JAX's exit handler waits for the other processes, which wait for this one.
    late = threading.Timer(1.0, os._exit, (code,))
    late.daemon = True
    late.start()
    sys.exit(code)


def _watch(launcher: int) -> None:
    os.read(launcher, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
