"""Compiles programs side by side, and keeps reports on disk."""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import importlib.metadata
import os
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from .._version import __version__
from ..analysis.meshes import MeshDescription
from ..transforms.stages import Compiled, Lowered
from .comparison import Failure
from .compiler_process import CompilerProcess, Devices
from .program import ProgramReport


class Finished(NamedTuple):
    """A program that was compiled: a report or an error, and the seconds that it took."""

    key: Any
    report: ProgramReport | Failure
    seconds: float


class Compilers:
    """Compiles programs in threads, each of which may use a process.

    Programs are traced and lowered in the thread of the caller: what a user's function depends on,
    such as ``jax.default_matmul_precision``, holds for one thread only.

    Args:
      cache_dir: a folder for reports; None to keep none.
      devices: what the processes compile for; None to compile in this process.
    """

    def __init__(
        self, cache_dir: str | os.PathLike[str] | None = None, devices: Devices | None = None
    ):
        self.workers = min(os.cpu_count() or 1, 4)
        self._cache = None if cache_dir is None else Path(cache_dir)
        self._executor = concurrent.futures.ThreadPoolExecutor(self.workers)
        self._running: set[concurrent.futures.Future[Finished]] = set()
        self._processes: list[CompilerProcess] = []
        if devices is not None:
            self._processes = [CompilerProcess(devices) for _ in range(self.workers)]
        self._free = self._processes.copy()

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:  # without waiting for what still runs
            process.close()
        self._executor.shutdown(cancel_futures=True)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being compiled."""
        return not self._running

    @property
    def is_busy(self) -> bool:
        """Whether all threads compile."""
        return len(self._running) >= self.workers

    def submit(self, key: Hashable, lower: Callable[[], tuple[Lowered, Mesh | None]]) -> None:
        """Lowers a program for a mesh, and compiles it in a thread."""
        start = time.perf_counter()
        try:
            lowered, mesh = lower()
        except Exception as error:
            future: concurrent.futures.Future[Finished] = concurrent.futures.Future()
            future.set_result(Finished(key, _failure(error), time.perf_counter() - start))
        else:
            seconds = time.perf_counter() - start
            future = self._executor.submit(self._compiled, key, lowered, mesh, seconds)
        self._running.add(future)

    def next(self) -> Finished:
        """Waits for one of the programs."""
        done, _ = concurrent.futures.wait(
            self._running, return_when=concurrent.futures.FIRST_COMPLETED
        )
        future = done.pop()
        self._running.remove(future)
        return future.result()

    def _compiled(
        self, key: Hashable, lowered: Lowered, mesh: Mesh | None, seconds: float
    ) -> Finished:
        start = time.perf_counter()
        report = attempt(functools.partial(self._kept, lowered, mesh))
        return Finished(key, report, seconds + time.perf_counter() - start)

    def _kept(self, lowered: Lowered, mesh: Mesh | None) -> ProgramReport:
        """The report of a program, from disk if it has been compiled before."""
        # Its code is not run, and optimisation does not affect the figures.
        on_cpu = mesh is not None and mesh.devices.flat[0].platform == "cpu"
        options = {"xla_backend_optimization_level": 0} if on_cpu else None
        if self._cache is None:
            return self._compile(lowered, options).report()
        path = self._cache / f"{fingerprint(lowered, mesh)}.json"
        try:
            return ProgramReport.load(path)
        except (OSError, ValueError):  # not compiled before, or by another release
            report = self._compile(lowered, options).report()
        self._cache.mkdir(parents=True, exist_ok=True)
        # Renamed when complete: other processes may write the same report.
        partial = path.with_suffix(f".{os.getpid()}.{id(lowered)}")
        report.save(partial)
        partial.replace(path)
        return report

    def _compile(self, lowered: Lowered, options: dict[str, Any] | None) -> Compiled:
        if not self._processes:
            return lowered.compile(options)
        process = self._free.pop()  # there are as many as threads
        try:
            return process.compile(lowered, options)
        finally:
            self._free.append(process)


def attempt(make: Callable[[], ProgramReport]) -> ProgramReport | Failure:
    """The report, or the error that was raised instead."""
    try:
        return make()
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> Failure:
    return Failure(f"{type(error).__name__}: {error}")


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
        None if mesh is None else MeshDescription.of(mesh),
        [(device.device_kind, getattr(device, "coords", None)) for device in devices],
        lowered.in_tree,
        str(lowered.activations()),
        lowered.as_text(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()
