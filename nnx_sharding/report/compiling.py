"""Compiles programs side by side, and keeps reports on disk."""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.metadata
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import jax
from jax.sharding import Mesh

from .. import _compat
from .._version import __version__
from ..analysis.hardware import Hardware
from ..analysis.json_codec import file_path
from ..analysis.meshes import MeshDescription
from ..analysis.program import ProgramReport
from ..diagnostics.progress import progress
from ..partition.mesh import topology_devices
from ..transforms.stages import Compiled, Lowered
from .comparison import Comparison, Failure

T = TypeVar("T")
Lower: TypeAlias = Callable[[], tuple[Lowered, Mesh | None]]
# Chooses the next program from the reports so far; None for none before others are compiled.
Pick: TypeAlias = Callable[[Mapping[str, ProgramReport | Failure]], "str | None"]
_Finished: TypeAlias = tuple[ProgramReport | Failure, float]  # with the seconds that it took


def search(
    title: str,
    programs: MutableMapping[str, Lower],
    pick: Pick | None = None,
    *,
    most: int | None = None,
    time_limit: float | None = None,
    memory_limit: int | None = None,
    hardware: Hardware | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    devices: Devices | None = None,
    by_module: bool = False,
    quiet: bool = False,
) -> Comparison:
    """Takes programs, in the order of ``pick``, and compiles them in threads, or in processes."""
    running: dict[concurrent.futures.Future[_Finished], str] = {}
    started: list[str] = []
    compiling = 0  # how many of them could be traced
    reports: dict[str, ProgramReport | Failure] = {}
    took: dict[str, float] = {}
    processes = [] if devices is None else [CompilerProcess(devices) for _ in range(_WORKERS)]
    free: list[CompilerProcess | None] = [*processes] or [None] * _WORKERS  # as many as threads
    cache = None if cache_dir is None else file_path(cache_dir)
    end = math.inf if time_limit is None else time.monotonic() + time_limit

    def run(program: Any, seconds: float) -> _Finished:
        start, process = time.perf_counter(), free.pop()
        if not isinstance(program, Failure):
            lowered, mesh = program
            program = attempt(partial(_report, lowered, mesh, process, cache, by_module=by_module))
        free.append(process)
        return program, seconds + time.perf_counter() - start

    executor = concurrent.futures.ThreadPoolExecutor(_WORKERS)
    try:
        with progress(title, len(programs) if most is None else most, quiet=quiet) as advance:
            while (left := end - time.monotonic()) > 0:
                if len(running) < _WORKERS and (most is None or compiling < most):
                    name = pick(reports) if pick else next(iter(programs), None)
                    if name is not None:
                        # Here, as `jax.default_matmul_precision` and its like hold for one thread.
                        started.append(name)
                        start = time.perf_counter()
                        program = attempt(programs.pop(name))
                        compiling += not isinstance(program, Failure)  # as that compiles nothing
                        seconds = time.perf_counter() - start
                        running[executor.submit(run, program, seconds)] = name
                        continue
                if not running:
                    break
                timeout = None if left == math.inf else left
                for one in concurrent.futures.wait(running, timeout, "FIRST_COMPLETED").done:
                    name = running.pop(one)
                    report, seconds = one.result()
                    if hardware is not None and isinstance(report, ProgramReport):
                        report = report.with_roofline(hardware)
                    reports[name], took[name] = report, round(seconds, 3)
                    advance(name)
    finally:
        for process in processes:  # without waiting for what still runs
            process.close()
        executor.shutdown(cancel_futures=True)
    if not reports:
        raise ValueError(f"{title}: no program was compiled within the time limit.")
    in_order = {name: reports[name] for name in started if name in reports}
    comparison = Comparison(in_order, None, took)
    return comparison.judged(memory_limit=memory_limit, hardware=hardware)


_WORKERS = min(os.cpu_count() or 1, 4)


def _report(
    lowered: Lowered,
    mesh: Mesh | None,
    process: CompilerProcess | None,
    cache: Path | None,
    *,
    by_module: bool,
) -> ProgramReport:
    """The report of a program, from disk if it has been compiled before."""
    path = None if cache is None else cache / f"{fingerprint(lowered, mesh)}.json"
    if path is not None:
        try:
            report = ProgramReport.load(path)
            if report.by_module is not None or not by_module:
                return report
        except (OSError, ValueError):  # not compiled before, or by another release
            path.parent.mkdir(parents=True, exist_ok=True)
    # Its code is not run, and optimisation does not affect the figures.
    on_cpu = mesh is not None and mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 0} if on_cpu else None
    compile_with = lowered.compile if process is None else partial(process.compile, lowered)
    report = compile_with(options).report(by_module=by_module)
    if path is not None:
        # Renamed when complete: other processes may write the same report.
        partial_file = path.with_suffix(f".{os.getpid()}.{id(lowered)}")
        report.save(partial_file)
        partial_file.replace(path)
    return report


def attempt(make: Callable[[], T]) -> T | Failure:
    """The result, or the error that was raised instead."""
    try:
        return make()
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}", error)


def fingerprint(lowered: Lowered, mesh: Mesh | None) -> str:
    """A digest of all that a report depends on, except line numbers."""
    devices = [] if mesh is None else list(mesh.devices.flat)
    client = devices[0].client if devices else jax.devices()[0].client
    parts = (
        __version__,
        jax.__version__,
        importlib.metadata.version("jaxlib"),
        client.platform_version,
        os.environ.get("XLA_FLAGS"),
        os.environ.get("LIBTPU_INIT_ARGS"),
        None if mesh is None else MeshDescription.of(mesh),
        [(device.device_kind, getattr(device, "coords", None)) for device in devices],
        lowered.in_tree,
        str(lowered.activations()),
        lowered.as_text(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


# A number of virtual CPU devices, or a TPU topology and its number of slices.
Devices: TypeAlias = int | tuple[str, int]


class CompilerCrash(jax.errors.JaxRuntimeError):  # type: ignore[misc]
    """A compiler ended its process."""


class CompilerProcess:
    """A process that compiles one program after another."""

    def __init__(self, devices: Devices):
        self._devices = devices
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, lowered: Lowered, options: dict[str, Any] | None) -> Compiled:
        """Compiles a program for its figures; it cannot be called."""

        def compile_with(stage: Any, more: Mapping[str, Any]) -> Any:
            return _compat.compile_elsewhere(stage, {**(options or {}), **more}, self._ask)

        return lowered._compiled_to(compile_with(lowered._stage, {}), compile_with)

    def close(self) -> None:
        """Ends the process."""
        self._errors.close()
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _ask(self, *request: Any) -> dict[str, Any]:
        process = self._process = self._process or self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            answer: dict[str, Any] | str = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError):
            self._process = None
            raise CompilerCrash(self._last_words(process)) from None
        if isinstance(answer, str):
            raise jax.errors.JaxRuntimeError(answer)
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        flags = os.environ.get("XLA_FLAGS", "").split()
        kept = [flag for flag in flags if "force_host_platform_device_count" not in flag]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(kept)}
        command = [sys.executable, "-c", f"from {__name__} import serve; serve({self._devices!r})"]
        pipe, errors = subprocess.PIPE, self._errors
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, env=environment)

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        """How the process ended, with the check that failed in XLA or the error of Python."""
        process.communicate()
        self._errors.seek(0)
        printed = self._errors.read().decode(errors="replace")
        self._errors.truncate(self._errors.seek(0))
        if process.returncode >= 0:
            return f"the compiler could not start:\n{printed[-2000:]}"
        name, checks = (
            signal.Signals(-process.returncode).name,
            re.findall(r"(?m)^F\d{4} .*", printed),
        )
        return "\n".join([f"the compiler crashed with {name}", *checks])


def serve(devices: Devices) -> None:
    """Compiles the programs requested on standard input, until that ends."""
    requests: Any = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries also print to standard output
    if isinstance(devices, int):
        jax.config.update("jax_num_cpu_devices", devices)
    found = jax.devices() if isinstance(devices, int) else topology_devices(*devices)
    by_id = {device.id: device for device in found}
    while requests.peek(1):
        try:
            answer: Any = _compat.compile_module(by_id, *pickle.load(requests))
        except Exception as error:
            answer = str(error)
        pickle.dump(answer, answers)
        answers.flush()
