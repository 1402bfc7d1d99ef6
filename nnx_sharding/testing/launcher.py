"""Starts processes, watches them, and reports how they ended."""

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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..partition.mesh import MOST_DEVICES
from . import worker
from .output import Output

TIMED_OUT = 124  # as for timeout(1)
DEVICE_COUNT = "--xla_force_host_platform_device_count"
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

    In each of them ``jax.distributed.initialize()`` needs no arguments. Their output is shown line
    by line, prefixed with the number of the process. If one fails, it is named, with the end of its
    stderr, and the others are asked to end, then killed. On Linux, no process started by the
    program is left, even if this process is killed; elsewhere, none in its process group.

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
    least = {"processes": processes, "devices_per_process": devices_per_process}
    wrong = [f"expected {name} >= 1, got {value}" for name, value in least.items() if value < 1]
    if processes * devices_per_process > MOST_DEVICES:
        devices = f"{processes} processes of {devices_per_process} devices"
        wrong.append(f"expected at most {MOST_DEVICES} devices in all, got {devices}")
    if not program:
        wrong.append("program is empty")
    if wrong:
        raise ValueError("; ".join(wrong))
    started = time.monotonic()
    ends: queue.SimpleQueue[_End] = queue.SimpleQueue()
    output = Output(processes, lambda: ends.put(_End(128 + signal.SIGPIPE)))
    workers: list[subprocess.Popen[str]] = []
    with _signals_to(ends), reserve_port() as port:
        address = f"127.0.0.1:{port.getsockname()[1]}"
        try:
            for rank in range(processes):
                sizes = (rank, processes, devices_per_process)
                environment = environment_of(*sizes, platform, address, os.environ)
                workers.append(_start(rank, [str(grace), *program], environment, ends))
                output.follow(rank, workers[-1])
            end = _first_failure(ends, processes, None if timeout is None else started + timeout)
            seconds = time.monotonic() - started
            output.hold_all_but(end.rank)
        finally:
            for process in workers:
                assert process.stdin is not None
                process.stdin.close()  # the worker then ends everything that it started
            for process in workers:
                process.wait()
    output.finish(grace, lambda: _explanation(end, output, seconds))
    return end.code


class _End(NamedTuple):
    """The end of one process, or of the launch."""

    code: int
    rank: int | None = None
    has_ended: bool = True  # a process that has only reported its failure is still running


def _start(
    rank: int, words: Sequence[str], environment: Mapping[str, str], ends: queue.SimpleQueue[_End]
) -> subprocess.Popen[str]:
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, worker.__file__, str(writing), *words],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="surrogateescape",
            pass_fds=(writing,),
            start_new_session=True,  # only the launcher receives Ctrl-C
        )
    finally:
        os.close(writing)

    def listen() -> None:
        with open(reading) as reports:
            for kind, code in map(str.split, reports):
                ends.put(_End(int(code), rank, kind == "ended"))
                if kind == "ended":
                    return
        ends.put(_End(128 - process.wait(), rank))  # the worker itself was killed

    threading.Thread(target=listen, daemon=True).start()
    return process


def _first_failure(ends: queue.SimpleQueue[_End], running: int, deadline: float | None) -> _End:
    """Waits for the failure that caused the others, or until all processes have succeeded."""
    # A dying process closes its connections before it has ended, so another one may report an error
    # before the system reports that end.
    first: _End | None = None
    while running:
        try:
            end = ends.get(timeout=deadline and max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return first or _End(TIMED_OUT)
        if not end.code:
            running -= 1
        elif first is None:
            if end.has_ended:
                return end
            first, deadline = end, time.monotonic() + _SETTLING
        elif end.has_ended and end.rank not in (None, first.rank):
            return end
    return _End(0)


def _explanation(end: _End, output: Output, seconds: float) -> str:
    """Why the launch failed; empty if it did not."""
    if not end.code:
        return ""
    number = end.code - 128
    is_named = number in set(signal.Signals)
    name = f"signal {number}" + (f" ({signal.Signals(number).name})" if is_named else "")
    if end.rank is None:
        what = "timed out" if end.code == TIMED_OUT else f"ended by {name}"
        return f"launch: {what}, after {seconds:.1f} s; all processes were ended\n"
    what = f"with exit code {end.code}" if number <= 0 else f"by {name}"
    last = output.last[end.rank]
    text = f"launch: process {end.rank} failed {what}, after {seconds:.1f} s"
    text += "; the others were ended" if len(output.last) > 1 else ""
    text += ". The end of its stderr:" if last else ""
    return "".join([f"{text}\n", *(f"  {line}\n" for line in last)])


@contextlib.contextmanager
def _signals_to(ends: queue.SimpleQueue[_End]) -> Iterator[None]:
    """Puts the signals that ask this process to end into a queue."""

    def handle(number: int, _: Any) -> None:
        ends.put(_End(128 + number))

    is_main = threading.current_thread() is threading.main_thread()  # no other may handle signals
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if is_main else ()
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)


def reserve_port() -> socket.socket:
    """A socket that keeps a free port on the loopback interface for as long as it is open.

    JAX's coordinator can still listen on it, because gRPC also sets ``SO_REUSEPORT``.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    return held


def environment_of(
    rank: int,
    processes: int,
    devices: int,
    platform: str,
    address: str,
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """The environment of one process: that of a Slurm step, from which JAX takes rank and size."""
    # JAX looks for Open MPI first; the other variable competes with XLA_FLAGS.
    hidden = {name for name in inherited if name.startswith("OMPI_")} | {"JAX_NUM_CPU_DEVICES"}
    kept = {name: value for name, value in inherited.items() if name not in hidden}
    flags = re.sub(rf"{DEVICE_COUNT}=\S*", "", kept.get("XLA_FLAGS", "")).split()
    return {
        **kept,
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # else it listens on all interfaces
        "JAX_LOCAL_DEVICE_IDS": ",".join(str(rank * devices + i) for i in range(devices)),
        "JAX_PLATFORMS": platform,
        "PYTHONUNBUFFERED": "1",
        "SLURM_JOB_ID": kept.get("SLURM_JOB_ID", "0"),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": str(processes),
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NODELIST": "localhost",
        "XLA_FLAGS": " ".join([*flags, f"{DEVICE_COUNT}={devices}"]),
    }
