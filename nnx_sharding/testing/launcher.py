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
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from ..partition.mesh import MOST_DEVICES
from . import worker

# The rank of a process that has ended, and its exit code; no rank for the end of the launch.
_Ends: TypeAlias = "queue.SimpleQueue[tuple[int | None, int]]"
_TIMED_OUT = 124  # as for timeout(1)
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
      >>> import tempfile
      >>> from pathlib import Path
      >>> from nnx_sharding.testing import launch
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     script = Path(folder, "script.py")
      ...     _ = script.write_text("import os; assert os.environ['SLURM_PROCID'] in '01'")
      ...     launch([str(script)], processes=2)
      0
    """
    if not program or not 1 <= processes * devices_per_process <= MOST_DEVICES or processes < 1:
        raise ValueError(
            f"expected a program and 1 to {MOST_DEVICES} devices in all, got {program!r} and "
            f"{processes} processes of {devices_per_process} devices."
        )
    ends: _Ends = queue.SimpleQueue()
    workers: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    stderr = [deque[str](maxlen=20) for _ in range(processes)]
    failed, code, started = None, 0, time.monotonic()
    with _signals_to(ends), socket.socket() as port:
        # Bound, but not listening: gRPC also sets SO_REUSEPORT, so JAX can listen on it.
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{port.getsockname()[1]}"
        try:
            for rank, last in enumerate(stderr):
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
                _thread(_wait, rank, process, ends)
                readers.append(_thread(_copy, rank, process.stdout, sys.stdout, None, ends))
                readers.append(_thread(_copy, rank, process.stderr, sys.stderr, last, ends))
            running = processes
            while running and not code:
                passed = time.monotonic() - started
                left = None if timeout is None else max(0.0, timeout - passed)
                failed, code = ends.get(timeout=left)
                running -= 1
        except queue.Empty:
            failed, code = None, _TIMED_OUT
        finally:
            seconds = time.monotonic() - started
            _end(workers, grace)
    for reader in readers:
        reader.join(grace)
    if code:
        n = code - 128
        name = f"signal {n} ({signal.Signals(n).name})" if n in set(signal.Signals) else ""
        how = "timed out" if code == _TIMED_OUT else f"ended by {name}"
        who = (
            how if failed is None else f"process {failed} failed with {name or f'exit code {code}'}"
        )
        lines = [] if failed is None else [f"  {line}" for line in stderr[failed]]
        message = f"launch: {who}, after {seconds:.1f} s; all processes were ended"
        print("\n".join([message, *lines]), file=sys.stderr)
    return code


def _environment(
    rank: int, processes: int, devices: int, platform: str, address: str
) -> dict[str, str]:
    """The environment of one process: that of a Slurm step, from which JAX takes rank and size."""
    # JAX looks for Open MPI first; the other variable competes with XLA_FLAGS.
    hidden = "OMPI_", "JAX_NUM_CPU_DEVICES"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    flags = re.sub(rf"{_DEVICE_COUNT}=\S*", "", kept.get("XLA_FLAGS", ""))
    return {
        "SLURM_JOB_ID": "0",
        **kept,
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # else it listens on all interfaces
        "JAX_LOCAL_DEVICE_IDS": ",".join(str(rank * devices + i) for i in range(devices)),
        "JAX_PLATFORMS": platform,
        "PYTHONUNBUFFERED": "1",
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": str(processes),
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NODELIST": "localhost",
        "XLA_FLAGS": f"{flags} {_DEVICE_COUNT}={devices}",
    }


def _thread(function: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def _wait(rank: int, process: subprocess.Popen[str], ends: _Ends) -> None:
    """Reports the exit code of a process when it has ended, as a shell shows it."""
    code = process.wait()
    ends.put((rank, code if code >= 0 else 128 - code))


def _copy(rank: int, pipe: Any, shown: Any, last: deque[str] | None, ends: _Ends) -> None:
    """Shows each line with the number of its process; very long ones in parts."""
    with pipe:
        for line in iter(lambda: pipe.readline(1 << 20), ""):
            line = line.removesuffix("\n")
            if last is not None:
                last.append(line[:2000])
            try:
                print(f"[{rank}] {line}\n", end="", file=shown, flush=True)
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), shown.fileno())
                ends.put((None, 128 + signal.SIGPIPE))


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
        assert process.stdin is not None
        process.stdin.close()


@contextlib.contextmanager
def _signals_to(ends: _Ends) -> Iterator[None]:
    """Puts the signals that ask this process to end into a queue."""
    is_main = threading.current_thread() is threading.main_thread()  # no other may handle signals
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if is_main else ()
    before = [signal.signal(number, lambda n, _: ends.put((None, 128 + n))) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)
