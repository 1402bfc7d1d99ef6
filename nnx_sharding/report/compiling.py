"""Compiles programs side by side, and keeps reports on disk."""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.metadata
import math
import os
import time
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import jax
from jax.sharding import Mesh

from .._version import __version__
from ..analysis.hardware import Hardware
from ..analysis.json_codec import file_path
from ..analysis.meshes import MeshDescription
from ..analysis.program import ProgramReport
from ..diagnostics.progress import progress
from ..transforms.stages import Lowered
from .comparison import Comparison, Failure
from .compiler_process import CompilerProcess, Devices

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
    """Compiles programs, each of which is taken out of ``programs``, in the order of ``pick``.

    They are compiled in threads, or with ``devices`` in processes for these devices. They are
    traced and lowered in the thread of the caller, because what a function depends on, such as
    ``jax.default_matmul_precision``, holds for one thread only. After ``time_limit`` seconds, no
    more are started, and those that still run are given up.
    """
    running: dict[concurrent.futures.Future[_Finished], str] = {}
    started: list[str] = []
    reports: dict[str, ProgramReport | Failure] = {}
    took: dict[str, float] = {}
    processes = [] if devices is None else [CompilerProcess(devices) for _ in range(_WORKERS)]
    free = processes.copy()  # as many as threads
    cache = None if cache_dir is None else file_path(cache_dir)
    end = math.inf if time_limit is None else time.monotonic() + time_limit

    def compiled(program: tuple[Lowered, Mesh | None]) -> ProgramReport:
        process = free.pop() if processes else None
        try:
            return _report(*program, process, cache, by_module=by_module)
        finally:
            free.extend([process] if process else [])

    def run(program: tuple[Lowered, Mesh | None] | Failure, seconds: float) -> _Finished:
        start = time.perf_counter()
        report = program if isinstance(program, Failure) else attempt(lambda: compiled(program))
        return report, seconds + time.perf_counter() - start

    executor = concurrent.futures.ThreadPoolExecutor(_WORKERS)
    try:
        with progress(title, len(programs) if most is None else most, quiet=quiet) as advance:
            while (left := end - time.monotonic()) > 0:
                if len(running) < _WORKERS and (most is None or len(started) < most):
                    name = pick(reports) if pick else next(iter(programs), None)
                    if name is not None:
                        started.append(name)
                        start = time.perf_counter()
                        program = attempt(programs.pop(name))
                        seconds = time.perf_counter() - start
                        running[executor.submit(run, program, seconds)] = name
                        continue
                if not running:
                    break
                wait: Any = {} if left == math.inf else {"timeout": left}
                for one in concurrent.futures.wait(
                    running, return_when="FIRST_COMPLETED", **wait
                ).done:
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
