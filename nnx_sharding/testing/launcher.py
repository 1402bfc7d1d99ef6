"""Runs several processes of one program on this machine, in one process group.

Each process runs this file. The file does not import JAX, so the program can still set variables
that JAX reads. Three events end all processes: the first failure, the end of the launcher (each
process waits for the launcher's end of a pipe to close), and a timeout. All processes have to end,
because one that is left would wait for the others in a collective forever.

The *launcher* is the process that calls `launch`, and its *workers* are the processes that it
starts. The *rank* of a worker is its number, from 0. `_start`, `_wait`, `_copy` and `_end` run in
the launcher; `_run` and `_end_with` run in the workers. All workers are in one process group, whose
id is the process id of the first worker.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TextIO, TypeAlias

Worker: TypeAlias = "subprocess.Popen[str]"


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

    In each of them ``jax.distributed.initialize()`` needs no arguments. Their output is shown line
    by line, after the number of the process. The first failure ends all of them, with what they
    have started in their process group.

    Args:
      program: a script and its arguments, or ``-m``, a module and its arguments.
      processes: the number of processes.
      devices_per_process: the number of devices of each process: virtual ones on the CPU; on other
        platforms, those numbered from ``rank * devices_per_process``.
      platform: the value of ``JAX_PLATFORMS``.
      timeout: the seconds after which all processes are ended; None for no limit.
      grace: the seconds between asking a process to end and killing it.

    Returns:
      0 if all processes succeeded; else the exit code of the first that failed, or 128 + n if
      signal n ended it; 124 after the timeout; 130 after Ctrl-C.

    Raises:
      ValueError: ``program`` is empty, or a number is not positive.
      OSError: a process could not be started.

    Example:
      >>> from nnx_sharding.testing import launch
      >>> launch(["-m", "__hello__"], processes=1)
      [0] Hello world!
      0
    """
    if not program or min(processes, devices_per_process) < 1:
        found = f"{processes} processes of {devices_per_process} devices"
        raise ValueError(f"expected a program, and a positive number of each, got {found}.")
    workers, readers = list[Worker](), list[threading.Thread]()
    start = time.monotonic()
    with socket.socket() as port, ThreadPoolExecutor(processes) as pool:
        # The socket is bound to reserve the port, but does not listen. gRPC also sets SO_REUSEPORT,
        # so JAX can listen on the port.
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{port.getsockname()[1]}"
        try:
            for rank in range(processes):
                variables = _environment(
                    rank, processes, devices_per_process, platform=platform, coordinator=address
                )
                # All processes are in the group of the first one, not in the launcher's group, so a
                # terminal sends Ctrl-C only to the launcher. The launcher then ends them all.
                group = workers[0].pid if workers else 0
                worker = _start(program, variables, group)
                workers.append(worker)
                readers.append(_thread(_copy, rank, worker.stdout, sys.stdout))
                readers.append(_thread(_copy, rank, worker.stderr, sys.stderr))
            # The launcher waits only after it has started all processes, because none can join the
            # group once its first process has ended and was waited for.
            code, how = _wait(workers, pool, timeout)
        except KeyboardInterrupt:
            code, how = -signal.SIGINT, "ended by signal 2 (SIGINT)"
        finally:
            seconds = time.monotonic() - start
            _end(workers, grace)
    for reader in readers:
        reader.join(min(grace, 3.0))
    if code:
        print(f"launch: {how}, after {seconds:.1f} s; all processes were ended", file=sys.stderr)
    return code if code >= 0 else 128 - code  # a shell returns 128 + n for signal n, too


def _wait(
    workers: Sequence[Worker], pool: ThreadPoolExecutor, timeout: float | None
) -> tuple[int, str]:
    """Waits until all processes have succeeded, the first one has failed, or the time is over.

    Args:
      pool: has a thread for each process, so that the first end of any process is noticed.
      timeout: the seconds to wait; None for no limit.

    Returns:
      (exit code, what happened). The code is -n for signal n, as in `subprocess`. The text is empty
      if the code is 0.
    """
    rank_of_wait = {pool.submit(worker.wait): rank for rank, worker in enumerate(workers)}
    limit = None if timeout is None else min(timeout, threading.TIMEOUT_MAX)
    try:
        for wait in as_completed(rank_of_wait, limit):
            code = wait.result()
            if code != 0:
                return code, f"process {rank_of_wait[wait]} failed with {_reason(code)}"
    except TimeoutError:
        return 124, "timed out"  # the code of the command timeout
    return 0, ""


def _start(program: Sequence[str], variables: dict[str, str], group: int) -> Worker:
    """Starts one process, which ends when its standard input is closed.

    Args:
      program: a script or a module, and its arguments.
      group: the process group that it joins; 0 for a new one.
    """
    return subprocess.Popen(
        [sys.executable, __file__, *program],
        env=variables,
        process_group=group,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="backslashreplace",
    )


def _reason(code: int) -> str:
    """Describes the end of a process that did not succeed."""
    if code > 0:
        return f"exit code {code}"
    return f"signal {-code} ({signal.Signals(-code).name})"


def _environment(
    rank: int, processes: int, devices: int, *, platform: str, coordinator: str
) -> dict[str, str]:
    """Returns the environment of one process as in a Slurm step, where JAX finds rank and size.

    Args:
      rank: the number of the process, from 0.
      coordinator: the address at which the first process waits for the others.
    """
    variables = with_virtual_cpus(devices)  # other platforms ignore this
    # JAX would take rank and size from Open MPI before it looks for Slurm.
    kept = {name: value for name, value in variables.items() if not name.startswith("OMPI_")}
    # Any job number will do. Within a real job its number is kept, because programs may use it.
    return {"SLURM_JOB_ID": "0", **kept} | {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_COORDINATOR_BIND_ADDRESS": coordinator,  # without it, JAX listens on all interfaces
        "JAX_LOCAL_DEVICE_IDS": ",".join(str(rank * devices + i) for i in range(devices)),
        "JAX_PLATFORMS": platform,
        "PYTHONUNBUFFERED": "1",
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": str(processes),
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NODELIST": "localhost",
    }


def with_virtual_cpus(devices: int) -> dict[str, str]:
    """Returns this process's environment for another number of virtual CPU devices."""
    # This variable has another number of devices, which competes with that in XLA_FLAGS.
    hidden = "JAX_NUM_CPU_DEVICES"
    kept = {name: value for name, value in os.environ.items() if name != hidden}
    option = "--xla_force_host_platform_device_count"
    flags = re.sub(rf"{option}=\S*", "", os.environ.get("XLA_FLAGS", ""))
    return kept | {"XLA_FLAGS": f"{flags} {option}={devices}"}


def _thread(function: Callable[..., None], *args: Any) -> threading.Thread:
    """Starts a function in a thread that does not keep the program from ending."""
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def _copy(rank: int, pipe: TextIO, shown: TextIO) -> None:
    """Shows each line with the number of its process; very long ones in parts.

    Args:
      shown: where it is shown: the output of the launcher, which all threads share.
    """
    try:
        # The pipe is closed even after an error here, because nobody reads the output of the
        # process any more: with a closed pipe it fails, with a full pipe it would wait forever.
        with pipe:
            while line := pipe.readline(1 << 20):  # no more than 1 Mi characters in memory
                text = line.removesuffix("\n")
                print(f"[{rank}] {text}\n", end="", file=shown, flush=True)
    except BrokenPipeError:  # the program that reads our output has ended, for example `head`
        # From now on output goes nowhere, so that neither the launcher's exit nor another thread
        # fails.
        os.dup2(os.open(os.devnull, os.O_WRONLY), shown.fileno())


def _end(workers: Sequence[Worker], grace: float) -> None:
    """Ends the process group of the workers: asks its processes to end, then kills the rest.

    The group is killed even if all workers have ended, because processes that they started may
    still run in it.
    """
    for number in (signal.SIGTERM, signal.SIGKILL) if workers else ():
        deadline = time.monotonic() + grace
        # A ProcessLookupError means that the group is gone. On macOS, a PermissionError means that
        # all processes in the group have ended.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(workers[0].pid, number)
        for process in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    for process in workers:
        # The pipe is closed only now, because workers kill their group when it closes
        # (`_end_with`).
        if process.stdin is not None:
            process.stdin.close()


def _run(program: list[str]) -> None:
    """Runs a program as ``python`` does, in a process that ends soon after the program fails."""
    try:
        # `python` searches modules first in the current folder (with -m) or the script's folder.
        if program[0] == "-m":
            sys.argv, sys.path[0] = program[1:], os.getcwd()
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = program, os.path.dirname(os.path.abspath(program[0]))
            runpy.run_path(program[0], run_name="__main__")
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if code:
            # JAX's exit handler waits for the other processes, and they wait for this one in a
            # collective. So a timer ends this process after a second, in which it writes its
            # output.
            exit_code = code if isinstance(code, int) else 1  # 1 for a message: ``sys.exit("…")``
            late = threading.Timer(1.0, os._exit, [exit_code])
            late.daemon = True
            late.start()
        if isinstance(error, SystemExit):
            raise
        # The error is printed here instead of raised, because `raise` would show the frames of this
        # file.
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename.startswith((__file__, "<frozen")):
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        sys.exit(1)


def _end_with(launcher: int) -> None:
    """Kills the group as soon as the launcher, which holds the other end of the pipe, is gone."""
    os.read(launcher, 1)  # until the launcher closes the pipe, or ends
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _thread(_end_with, os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _run(sys.argv[1:])
