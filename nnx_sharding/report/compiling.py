"""Compiles programs side by side, and keeps reports on disk."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import importlib.metadata
import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import jax
from jax.sharding import Mesh

from .._version import __version__
from ..analysis.hardware import Hardware
from ..analysis.meshes import MeshDescription
from ..analysis.program import ProgramReport
from ..diagnostics.progress import progress
from ..transforms.stages import Lowered
from .comparison import Comparison, Failure
from .compiler_process import CompilerProcess, Devices

T = TypeVar("T")
Lower: TypeAlias = Callable[[], tuple[Lowered, Mesh | None]]
_Finished: TypeAlias = tuple[ProgramReport | Failure, float]  # with the seconds that it took


@dataclasses.dataclass
class Group:
    """Programs by name, of which only the first that fits is wanted, and what it is predicted."""

    programs: dict[str, Lower]
    arguments: float = 0  # bytes
    seconds: float = 0


def search(
    title: str,
    groups: Iterable[Group],
    ruled_out: Mapping[str, str] | None = None,
    *,
    most: int | None = None,
    memory_limit: int | None = None,
    hardware: Hardware | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    devices: Devices | None = None,
    by_module: bool = False,
    quiet: bool = False,
) -> Comparison:
    """Compiles programs in the order of their predictions, and notes why not the others.

    They are compiled in threads, or with ``devices`` in processes for these devices. They are
    traced and lowered in the thread of the caller, because what a function depends on, such as
    ``jax.default_matmul_precision``, holds for one thread only.
    """
    groups, reasons = [*groups], dict(ruled_out or {})
    running: dict[concurrent.futures.Future[_Finished], tuple[str, Group]] = {}
    finished: dict[str, _Finished] = {}
    names: list[str] = []
    fits = False
    processes = [] if devices is None else [CompilerProcess(devices) for _ in range(_WORKERS)]
    free = processes.copy()  # as many as threads
    cache = None if cache_dir is None else Path(cache_dir)

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
        with progress(title, len(groups) if most is None else most, quiet=quiet) as advance:
            while True:
                while groups and (most is None or len(names) < most) and len(running) < _WORKERS:
                    # While nothing fits, the second half goes to those with the smallest arguments.
                    by_memory = most is not None and not fits and 2 * len(names) >= most
                    group = min(groups, key=lambda x: x.arguments if by_memory else x.seconds)
                    groups.remove(group)
                    name = next(iter(group.programs))
                    names.append(name)
                    start = time.perf_counter()
                    program = attempt(group.programs.pop(name))
                    seconds = time.perf_counter() - start
                    running[executor.submit(run, program, seconds)] = name, group
                if not running:
                    break
                done = concurrent.futures.wait(running, return_when="FIRST_COMPLETED").done.pop()
                name, group = running.pop(done)
                report, _ = finished[name] = done.result()
                advance(name)
                if Comparison({name: report}, memory_limit).fits(name):
                    fits = True
                    reasons.update(dict.fromkeys(group.programs, f"{name} fits"))
                elif group.programs:
                    groups.append(group)
    finally:
        for process in processes:  # without waiting for what still runs
            process.close()
        executor.shutdown(cancel_futures=True)
    for group in groups:
        reason = f"the {most} compiled are predicted to be better"
        reasons.update(dict.fromkeys(group.programs, reason))
    reports = {name: finished[name][0] for name in names}
    took = {name: round(finished[name][1], 3) for name in names}
    comparison = Comparison(reports, None, took, reasons)
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
