"""Several processes of one program on this machine, each in a process group of its own."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from ..partition.mesh import MOST_DEVICES
from . import worker

_TIMED_OUT = 124  # as for timeout(1)
_LONGEST = 1e9  # seconds that the system can wait
_DEVICE_COUNT = "--xla_force_host_platform_device_count"


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
    have started in their process groups.

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
      signal n ended it; 124 after the timeout; 128 + n after signal n to this process.

    Raises:
      ValueError: ``program`` is empty, or a number is too small or too large.
      OSError: a process could not be started.

    Example:
      >>> from nnx_sharding.testing import launch
      >>> launch(["-m", "__hello__"], processes=1)
      [0] Hello world!
      0
    """
    if not program or not 1 <= processes * devices_per_process <= MOST_DEVICES or processes < 1:
        raise ValueError(
            f"expected a program and 1 to {MOST_DEVICES} devices in all, got {program!r} and "
            f"{processes} processes of {devices_per_process} devices."
        )
    # Which process ended (None: the launcher has to), and its exit code, negative after a signal.
    ends: queue.SimpleQueue[tuple[int | None, int]] = queue.SimpleQueue()
    workers: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    failed, code, start = None, 0, time.monotonic()
    limit = _LONGEST if timeout is None else min(timeout, _LONGEST)
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():  # no other may handle signals
            for each in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
                old = signal.signal(each, lambda number, _: ends.put((None, -number)))
                stack.callback(signal.signal, each, old)
        # Bound, but not listening: gRPC also sets SO_REUSEPORT, so JAX can listen on it.
        port = stack.enter_context(socket.socket())
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{port.getsockname()[1]}"
        try:
            for rank in range(processes):
                process = subprocess.Popen(
                    [sys.executable, worker.__file__, *program],
                    env=_environment(rank, processes, devices_per_process, platform, address),
                    stdin=subprocess.PIPE,  # the worker ends when it is closed
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    encoding="utf-8",
                    errors="backslashreplace",
                    start_new_session=True,  # only the launcher receives Ctrl-C
                )
                workers.append(process)
                readers.append(_thread(_copy, rank, process.stdout, sys.stdout, ends))
                readers.append(_thread(_copy, rank, process.stderr, sys.stderr, ends))
                _thread(lambda rank, process: ends.put((rank, process.wait())), rank, process)
            running = processes
            while running and not code:
                failed, code = ends.get(timeout=max(0.0, start + limit - time.monotonic()))
                running -= 1
        except queue.Empty:
            failed, code = None, _TIMED_OUT
        finally:
            seconds = time.monotonic() - start
            _end(workers, min(grace, _LONGEST))
    for reader in readers:
        reader.join(min(grace, 3.0))
    if code:
        how = f"exit code {code}" if code > 0 else f"signal {-code} ({signal.Signals(-code).name})"
        who = f"process {failed} failed with {how}"
        if failed is None:
            who = "timed out" if code == _TIMED_OUT else f"ended by {how}"
        print(f"launch: {who}, after {seconds:.1f} s; all processes were ended", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _environment(rank: int, processes: int, devices: int, platform: str, at: str) -> dict[str, str]:
    """The environment of one process: that of a Slurm step, from which JAX takes rank and size."""
    # JAX looks for Open MPI first; the other variable competes with XLA_FLAGS.
    hidden = "OMPI_", "JAX_NUM_CPU_DEVICES"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    flags = re.sub(rf"{_DEVICE_COUNT}=\S*", "", kept.get("XLA_FLAGS", ""))
    ranks = dict.fromkeys(("SLURM_LOCALID", "SLURM_PROCID"), str(rank))
    # Without the second one, JAX listens on all interfaces.
    addresses = dict.fromkeys(("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"), at)
    return {"SLURM_JOB_ID": "0", **kept, **ranks, **addresses} | {
        "JAX_LOCAL_DEVICE_IDS": ",".join(str(rank * devices + i) for i in range(devices)),
        "JAX_PLATFORMS": platform,
        "PYTHONUNBUFFERED": "1",
        "SLURM_NTASKS": str(processes),
        "SLURM_STEP_NODELIST": "localhost",
        "XLA_FLAGS": f"{flags} {_DEVICE_COUNT}={devices}",
    }


def _thread(function: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def _copy(rank: int, pipe: Any, shown: Any, ends: Any) -> None:
    """Shows each line with the number of its process; very long ones in parts."""
    with pipe:
        while line := pipe.readline(1 << 20):
            text = line.removesuffix("\n")
            try:
                print(f"[{rank}] {text}\n", end="", file=shown, flush=True)
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), shown.fileno())
                ends.put((None, -signal.SIGPIPE))


def _end(workers: Sequence[subprocess.Popen[str]], grace: float) -> None:
    """Ends the process groups of the workers: asks them, then kills what is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace
        for process in workers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        for process in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    for process in workers:
        process.stdin.close()  # type: ignore[union-attr]
