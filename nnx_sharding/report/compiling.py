"""Compiles programs side by side, and keeps reports on disk."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import importlib.metadata
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias, TypeVar

import jax
from jax.sharding import Mesh

from .._version import __version__
from ..analysis.hardware import Hardware
from ..analysis.meshes import MeshDescription
from ..diagnostics.progress import progress
from ..transforms.stages import Lowered
from .comparison import Comparison, Failure
from .compiler_process import CompilerProcess, Devices
from .program import ProgramReport

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
    with (
        _Compilers(cache_dir, devices, by_module) as compilers,
        progress(title, len(groups) if most is None else most, quiet=quiet) as advance,
    ):
        while True:
            while groups and (most is None or len(names) < most) and len(running) < _WORKERS:
                # While nothing fits, the second half goes to those with the smallest arguments.
                by_memory = most is not None and not fits and 2 * len(names) >= most
                group = min(groups, key=lambda x: x.arguments if by_memory else x.seconds)
                groups.remove(group)
                name = next(iter(group.programs))
                names.append(name)
                running[compilers.submit(group.programs.pop(name))] = name, group
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
    for group in groups:
        reason = f"the {most} compiled are predicted to be better"
        reasons.update(dict.fromkeys(group.programs, reason))
    reports = {name: finished[name][0] for name in names}
    seconds = {name: round(finished[name][1], 3) for name in names}
    comparison = Comparison(reports, None, seconds, reasons)
    return comparison.judged(memory_limit=memory_limit, hardware=hardware)


_WORKERS = min(os.cpu_count() or 1, 4)


class _Compilers:
    """Threads that compile, each of which may use a process."""

    def __init__(
        self, cache_dir: str | os.PathLike[str] | None, devices: Devices | None, by_module: bool
    ):
        self._by_module = by_module
        self._cache = None if cache_dir is None else Path(cache_dir)
        self._executor = concurrent.futures.ThreadPoolExecutor(_WORKERS)
        count = 0 if devices is None else _WORKERS
        self._processes = [CompilerProcess(devices) for _ in range(count) if devices is not None]
        self._free = self._processes.copy()

    def __enter__(self) -> _Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:  # without waiting for what still runs
            process.close()
        self._executor.shutdown(cancel_futures=True)

    def submit(self, lower: Lower) -> concurrent.futures.Future[_Finished]:
        """Lowers a program, and compiles it in a thread."""
        start = time.perf_counter()
        lowered = attempt(lower)
        if isinstance(lowered, Failure):
            failed: concurrent.futures.Future[_Finished] = concurrent.futures.Future()
            failed.set_result((lowered, time.perf_counter() - start))
            return failed
        return self._executor.submit(self._compiled, *lowered, time.perf_counter() - start)

    def _compiled(self, lowered: Lowered, mesh: Mesh | None, seconds: float) -> _Finished:
        start = time.perf_counter()
        report = attempt(lambda: self._report(lowered, mesh))
        return report, seconds + time.perf_counter() - start

    def _report(self, lowered: Lowered, mesh: Mesh | None) -> ProgramReport:
        """The report of a program, from disk if it has been compiled before."""
        path = None if self._cache is None else self._cache / f"{fingerprint(lowered, mesh)}.json"
        if path is not None:
            try:
                report = ProgramReport.load(path)
                if report.by_module is not None or not self._by_module:
                    return report
            except (OSError, ValueError):  # not compiled before, or by another release
                path.parent.mkdir(parents=True, exist_ok=True)
        # Its code is not run, and optimisation does not affect the figures.
        on_cpu = mesh is not None and mesh.devices.flat[0].platform == "cpu"
        options = {"xla_backend_optimization_level": 0} if on_cpu else None
        if self._processes:
            process = self._free.pop()  # there are as many as threads
            try:
                report = process.compile(lowered, options).report(by_module=self._by_module)
            finally:
                self._free.append(process)
        else:
            report = lowered.compile(options).report(by_module=self._by_module)
        if path is not None:
            # Renamed when complete: other processes may write the same report.
            partial = path.with_suffix(f".{os.getpid()}.{id(lowered)}")
            report.save(partial)
            partial.replace(path)
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
