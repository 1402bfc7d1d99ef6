"""Runs a program as ``python`` does, in a process that ends soon after the program fails.

Started by its path, it imports only the standard library, so the program can still set the
variables that JAX reads.
"""

import os
import runpy
import signal
import sys
import threading


def _run(program: list[str]) -> None:
    try:
        if program[0] == "-m":
            sys.argv, sys.path[0] = program[1:], os.getcwd()
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = program, os.path.dirname(os.path.abspath(program[0]))
            runpy.run_path(program[0], run_name="__main__")
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if code:
            # JAX's exit handler waits for the other processes, which wait for this one.
            late = threading.Timer(1.0, os._exit, (code if isinstance(code, int) else 1,))
            late.daemon = True
            late.start()
        if isinstance(error, SystemExit):
            raise
        frames = error.__traceback__  # without those of this file
        while frames and frames.tb_frame.f_code.co_filename.startswith((__file__, "<frozen")):
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        sys.exit(1)


def _end_with(launcher: int) -> None:
    os.read(launcher, 1)  # until the launcher closes the pipe, or ends
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    pipe = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    _run(sys.argv[1:])
