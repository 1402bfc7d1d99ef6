"""Compiles programs side by side, and keeps their reports on disk.

Programs are traced and lowered one after the other in the thread of the caller, because settings
such as `jax.default_matmul_precision` hold for one thread. Then they are compiled in up to four
threads, for which XLA releases the lock of Python. A program for more virtual CPU devices than this
process has, or for a TPU topology, is compiled in a process of each thread (`CompilerProcess`),
which also survives a crash of the compiler.

A *program* is a lowered function and its mesh. One *worker* is a thread, with its process if there
is one. With ``ruled_out``, programs that lower to the same text are compiled once. Of ``most``
programs each takes a *slot* when it is lowered (`_Slots`).

From other modules: a `Failure` has the text of an error in place of a report; a `Comparison` has
the reports by name; `Lowered` is a traced and lowered function, as of ``jax.jit``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import importlib.metadata
import math
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

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
from .comparison import Comparison, Failure, SearchInterrupted

T = TypeVar("T")
Program: TypeAlias = tuple[Lowered, Mesh | None]  # and the mesh that it is for, None for none
Lower: TypeAlias = Callable[[], Program]
# Chooses the next program from the reports so far; None for none before others are compiled.
Pick: TypeAlias = Callable[[Mapping[str, ProgramReport | Failure]], "str | None"]
# A number of virtual CPU devices, or a TPU topology and its number of slices.
Devices: TypeAlias = int | tuple[str, int]


class _Finished(NamedTuple):
    """What came of a program."""

    name: str
    report: ProgramReport | Failure
    seconds: float  # to trace, lower and compile it


def compile_all(
    title: str,
    programs: MutableMapping[str, Lower],
    pick: Pick | None = None,
    *,
    most: int | None = None,
    time_limit: float | None = None,
    ruled_out: MutableMapping[str, str] | None = None,
    memory_limit: int | None = None,
    hardware: Hardware | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    devices: Devices | None = None,
    by_module: bool = False,
    quiet: bool = False,
) -> Comparison:
    """Compiles programs, and compares their reports.

    Args:
      title: of the bar that shows progress.
      programs: functions that lower each program, by name; each is removed when it is started.
        ``pick`` may add others.
      pick: chooses the next one; None for the order of ``programs``.
      most: how many to compile at most. Those that cannot be lowered do not count. Those that fail
        for the reason of another one do not count either, up to ``most`` of these.
      time_limit: seconds after which none is started any more.
      ruled_out: gets the names of programs that are equal to one that was started, and why; these
        are not compiled. None compiles all.
      memory_limit: the bytes that a device has, for the comparison.
      hardware: for the rooflines.
      cache_dir: the folder for reports.
      devices: what processes compile for; None for the devices of this process.
      by_module: whether reports have memory and cost by module.
      quiet: whether to show no progress.

    Raises:
      SearchInterrupted: Ctrl-C; its result is the comparison of those that were compiled.
    """
    run = _Run(programs, _Slots(most), ruled_out)
    cache = None if cache_dir is None else file_path(cache_dir)
    end = math.inf if time_limit is None else time.monotonic() + time_limit
    try:
        with (
            _Workers(devices, cache, by_module=by_module) as workers,
            progress(title, run.expected, running=run.under_way, quiet=quiet) as advance,
        ):
            while (seconds_left := end - time.monotonic()) > 0:
                # As long as a worker is free, this thread lowers a program for it; else it waits.
                # Without a free slot none is started any more, unless one that runs returns its
                # slot.
                name = None
                if workers.is_free and run.slots.is_free:
                    name = pick(run.reports) if pick else next(iter(programs), None)
                if name is not None:
                    run.start(name, workers)
                elif not workers.running:  # nothing is left to do
                    break
                else:
                    for finished in workers.wait(seconds_left):
                        run.note(finished, hardware)
                        advance(finished.name)
    except KeyboardInterrupt:
        result = run.comparison(dict.fromkeys(run.unfinished(), INTERRUPTED))
        result = result.judged(memory_limit=memory_limit, hardware=hardware)
        raise SearchInterrupted(result) from None
    # A comparison is not empty: without reports, it says why there are none. With some, `pick` may
    # not have wanted the others.
    late = () if run.reports else run.unfinished()
    result = run.comparison(dict.fromkeys(late, "not compiled within the time limit"))
    return result.judged(memory_limit=memory_limit, hardware=hardware)


INTERRUPTED = "not compiled before the interruption"


class _Run:
    """The programs of one call that were started, and the reports of those that ended.

    Attributes:
      reports: by the name of the program.
      slots: which programs may be compiled.
    """

    def __init__(
        self,
        programs: MutableMapping[str, Lower],
        slots: _Slots,
        ruled_out: MutableMapping[str, str] | None,
    ):
        """Starts no program yet.

        Args:
          programs: functions that lower each program, by name. Each is removed here when it is
            started; the caller may add others meanwhile.
          slots: none of them taken.
          ruled_out: gets the names of programs that equal one that was started, and why; None if
            programs are not compared.
        """
        self.reports: dict[str, ProgramReport | Failure] = {}
        self.slots = slots
        self._programs, self._ruled_out = programs, ruled_out
        self._initial = [*programs]  # their names in order, as those that start are removed
        self._started: list[str] = []  # names, in order
        self._seconds: dict[str, float] = {}  # to trace, lower and compile, by name
        self._first_names: dict[str, str] = {}  # digest of a program → its first name

    def start(self, name: str, workers: _Workers) -> None:
        """Lowers a program and lets a worker compile it, unless an equal one was started.

        What could not be lowered goes to the worker as well, as a `Failure`, so that all results
        come from workers.
        """
        self._started.append(name)
        start = time.perf_counter()
        program = attempt(self._programs.pop(name))
        seconds = time.perf_counter() - start
        if not isinstance(program, Failure):
            if self._ruled_out is not None:  # else equal programs are compiled, too
                first = self._first_names.setdefault(_digest(program), name)
                if first != name:
                    self._ruled_out[name] = f"compiles to the program of {first}"
                    return
            self.slots.taken.add(name)
        workers.start(name, program, lowering_seconds=seconds)

    def note(self, finished: _Finished, hardware: Hardware | None) -> None:
        """Notes what came of a program.

        Args:
          finished: its report, or the failure.
          hardware: for the roofline of the report; None for none.
        """
        name, report, seconds = finished
        if hardware is not None and isinstance(report, ProgramReport):
            report = report.with_roofline(hardware)
        if isinstance(report, Failure):  # another program may be compiled in its place
            self.slots.note_failure(name, report)
        self.reports[name] = report
        self._seconds[name] = round(seconds, 3)

    def under_way(self) -> list[str]:
        """Lists the programs that are being lowered or compiled.

        The thread that shows progress calls this, while others start and end programs.
        """
        return [name for name in self._started if not self._is_done(name)]

    def expected(self) -> int:
        """Counts the programs that have a report or will get one, as far as is known now.

        Called by the thread that shows progress, too. A search may add programs, and rule out some.
        """
        num_left = min(len(self._programs), self.slots.num_free)
        return len(self.reports) + len(self.under_way()) + int(num_left)

    def unfinished(self) -> list[str]:
        """Lists the programs that have no report, and are not equal to another one."""
        names = dict.fromkeys((*self._initial, *self._started, *self._programs))
        return [name for name in names if not self._is_done(name)]

    def _is_done(self, name: str) -> bool:
        """Whether a program has a report, or is equal to another one."""
        return name in self.reports or name in (self._ruled_out or ())

    def comparison(self, why_not: Mapping[str, str]) -> Comparison:
        """Returns the reports in the order in which programs were started, not yet judged.

        Args:
          why_not: why other programs were not compiled, by name.
        """
        in_order = {name: self.reports[name] for name in self._started if name in self.reports}
        return Comparison(
            reports=in_order, memory_limit=None, seconds=self._seconds, ruled_out=why_not
        )


_NUMBER = re.compile(r"\d+")


class _Slots:
    """The ``most`` programs that may be compiled.

    A program that fails as another one did says nothing new, so a further one may be compiled in
    its place; but no more than ``most``, so that it ends if all fail.
    """

    def __init__(self, most: int | None):
        self.taken: set[str] = set()  # the names of programs that were lowered to be compiled
        self._most = most  # None for any number
        self._num_returned = 0  # slots of programs that failed as others had
        self._reasons: set[str] = set()  # why programs failed, without numbers

    @property
    def is_free(self) -> bool:
        """Whether another program may be compiled."""
        return self.num_free > 0

    @property
    def num_free(self) -> float:
        """How many programs may still be compiled; infinity without a limit."""
        return math.inf if self._most is None else self._most - len(self.taken)

    def note_failure(self, name: str, failure: Failure) -> None:
        """Frees the slot of a program that failed for the reason of an earlier one."""
        if self._most is None or self._num_returned >= self._most:
            return
        reason = _NUMBER.sub("#", failure.error)  # "needs 3 GiB" → "needs # GiB"
        if reason not in self._reasons:  # this failure is news, which keeps its slot
            self._reasons.add(reason)
        elif name in self.taken:  # one that could not be lowered never took one
            self.taken.remove(name)
            self._num_returned += 1


class _Workers:
    """Threads that compile, each with a process if there are devices to compile for.

    Attributes:
      running: what the threads are to return.
    """

    def __init__(self, devices: Devices | None, cache: Path | None, *, by_module: bool):
        """Prepares the workers; a thread and its process start with their first program.

        Args:
          devices: what processes compile for; None to compile in this process.
          cache: the folder for reports; None for none.
          by_module: whether reports have memory and cost by module.
        """
        self.running: set[concurrent.futures.Future[_Finished]] = set()
        self._cache, self._by_module = cache, by_module
        # Where threads compile: each in another process, or all in this one.
        self._processes: list[CompilerProcess] = []
        if devices is not None:
            self._processes = [CompilerProcess(devices) for _ in range(_NUM_WORKERS)]
        # The processes that no thread uses now; None, once for each thread, for this process.
        self._free: list[CompilerProcess | None] = [*self._processes]
        if devices is None:
            self._free = [None] * _NUM_WORKERS
        self._executor = concurrent.futures.ThreadPoolExecutor(_NUM_WORKERS)

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:  # without waiting for what still runs
            process.kill()
        self._executor.shutdown(cancel_futures=True)
        for process in self._processes:  # only now: threads read the pipes until they end
            process.close()

    @property
    def is_free(self) -> bool:
        """Whether a thread has nothing to do."""
        return len(self.running) < _NUM_WORKERS

    def start(self, name: str, program: Program | Failure, *, lowering_seconds: float) -> None:
        """Compiles a program in a thread; what could not be lowered ends there at once."""
        self.running.add(self._executor.submit(self._compile, name, program, lowering_seconds))

    def wait(self, timeout: float) -> Iterator[_Finished]:
        """Waits until at least one program is compiled, or for so many seconds; yields all done."""
        limit = None if timeout == math.inf else timeout
        for future in concurrent.futures.wait(self.running, limit, "FIRST_COMPLETED").done:
            self.running.remove(future)
            yield future.result()

    def _compile(self, name: str, program: Program | Failure, lowering_seconds: float) -> _Finished:
        """Runs in a thread: compiles a program, in a process that no other thread uses."""
        if isinstance(program, Failure):
            return _Finished(name, program, lowering_seconds)
        start = time.perf_counter()
        process = self._free.pop()  # or None: in this process. Never empty: as many as threads
        lowered, mesh = program
        make_report = partial(
            _report, lowered, mesh, process, self._cache, by_module=self._by_module
        )
        report = attempt(make_report)  # returns errors, so the process is always given back
        self._free.append(process)
        return _Finished(name, report, lowering_seconds + time.perf_counter() - start)


_NUM_WORKERS = min(os.cpu_count() or 1, 4)  # more need gigabytes of memory for little time


def _report(
    lowered: Lowered,
    mesh: Mesh | None,
    process: CompilerProcess | None,
    cache: Path | None,
    *,
    by_module: bool,
) -> ProgramReport:
    """Compiles a program and reports on it.

    Args:
      lowered: the lowered function.
      mesh: the mesh that it is for; None for none.
      process: where to compile; None for this process.
      cache: a folder for reports. If it has one of the same program, that is returned. None for no
        folder.
      by_module: whether the report has memory and cost by module.
    """
    path = None if cache is None else cache / f"{fingerprint(lowered, mesh, by_module)}.json"
    if path is not None:
        try:
            return ProgramReport.load(path)
        except (OSError, ValueError):  # not compiled before, or by another release
            # Only now: a folder that is not needed is not made.
            path.parent.mkdir(parents=True, exist_ok=True)
    # Its code is not run, and optimisation does not affect the figures.
    on_cpu = mesh is not None and mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 0} if on_cpu else None
    compile_with = lowered.compile if process is None else partial(process.compile, lowered)
    report = compile_with(options).report(by_module=by_module)
    if path is not None:
        # An error while another thread or process writes the same report: one of them is enough.
        with contextlib.suppress(FileExistsError):
            report.save(path)
    return report


def attempt(make: Callable[[], T]) -> T | Failure:
    """Calls a function; returns its result, or the error that it raised."""
    try:
        return make()
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}", error)


def _digest(program: Program) -> str:
    """Digests what is compiled: programs of equal digests are the same, but for their names.

    Candidates of a plan may declare different shardings that come to the same for their arrays.
    """
    lowered, mesh = program
    # The text of the program says nothing of the devices and their order, which a description has.
    described_mesh = None if mesh is None else MeshDescription.of(mesh)
    parts = described_mesh, lowered.as_text()
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def fingerprint(lowered: Lowered, mesh: Mesh | None, by_module: bool = False) -> str:
    """Returns the name of a report on disk: a digest of all that it depends on.

    Line numbers are left out, so that a comment in the user's code does not compile all again; but
    with ``by_module``, the report has a table of lines.
    """
    devices = [] if mesh is None else list(mesh.devices.flat)
    client = devices[0].client if devices else jax.devices()[0].client
    # Versions and flags of the compilers make another program of the same text. The report has the
    # paths of arguments and the activations, of which the text has nothing.
    parts = (
        __version__,
        jax.__version__,
        importlib.metadata.version("jaxlib"),
        client.platform_version,
        os.environ.get("XLA_FLAGS"),
        os.environ.get("LIBTPU_INIT_ARGS"),
        getattr(lowered._plan.transform, "compiler_options", None),
        None if mesh is None else MeshDescription.of(mesh),
        # Only TPUs have coordinates, by which the compiler routes collectives.
        [(device.device_kind, getattr(device, "coords", None)) for device in devices],
        lowered.in_tree,
        str(lowered.activations()),
        by_module,
        lowered.as_text(debug_info=by_module),  # with the locations of operations, or without
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


class CompilerCrash(jax.errors.JaxRuntimeError):  # type: ignore[misc]
    """A compiler ended its process."""


class CompilerProcess:
    """A process that compiles one program after another.

    One thread at a time uses it. Only :meth:`kill` may be called by another one: it leaves the
    pipes open, which that thread may be reading until the end.
    """

    def __init__(self, devices: Devices):
        self._devices = devices
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None
        # A thread may be about to start the process when another one kills it.
        self._lock, self._is_killed = threading.Lock(), False

    def compile(self, lowered: Lowered, options: dict[str, Any] | None) -> Compiled:
        """Compiles a program for its figures; the result cannot be called.

        Args:
          lowered: the program.
          options: those of the compiler, as for ``jax.stages.Lowered.compile``.
        """

        # `_ask` takes the place of JAX's compiler. The result keeps this function, and calls it
        # with further options if it is asked for tables by module.
        def compile_with(stage: jax.stages.Lowered, more: Mapping[str, Any]) -> Any:
            return _compat.compile_elsewhere(stage, {**(options or {}), **more}, self._ask)

        program = compile_with(lowered._stage, {})
        return lowered._compiled_to(program, compile_with)

    def kill(self) -> None:
        """Ends the process, which may be in the middle of a program, and starts no other."""
        with self._lock:
            self._is_killed = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """Ends the process, and closes what it was connected with."""
        self.kill()
        if self._process is not None:
            self._process.communicate()
        self._errors.close()

    def _ask(self, *request: Any) -> dict[str, Any]:
        """Sends a request, the arguments of ``compile_module``, and waits for the answer.

        The process is started for the first request, and again after a crash.

        Raises:
          CompilerCrash: the process ended, or was killed.
          JaxRuntimeError: the compiler refused the program.
        """
        with self._lock:
            if self._is_killed:  # by the end of the search, while its threads go on
                raise CompilerCrash("the search had ended")
            if self._process is None:
                self._process = self._start()
            process = self._process
        assert process.stdin is not None and process.stdout is not None
        # Outside of the lock, or `kill` would wait for the compiler. A pickle knows its own end.
        try:
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            answer: dict[str, Any] | str = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError):
            with self._lock:
                self._process = None  # the next request starts another one
            raise CompilerCrash(self._last_words(process)) from None
        if isinstance(answer, str):  # the text of an error
            raise jax.errors.JaxRuntimeError(answer)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        """Starts the process, which runs `serve`."""
        # `serve` sets the number of devices, which a flag of this process would override.
        flags = os.environ.get("XLA_FLAGS", "").split()
        kept = [flag for flag in flags if "force_host_platform_device_count" not in flag]
        # On CPUs also for a TPU topology, which needs the TPU compiler, but no TPU.
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(kept)}
        # ``serve(64)``, or ``serve(('v5e:16x16', 1))``.
        command = [sys.executable, "-c", f"from {__name__} import serve; serve({self._devices!r})"]
        pipe, errors = subprocess.PIPE, self._errors
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, env=environment)

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        """Says how the process ended, with the check that failed in XLA or the error of Python."""
        process.communicate()  # waits for its end
        self._errors.seek(0)
        printed = self._errors.read().decode(errors="replace")
        # Empty for the next process.
        self._errors.seek(0)
        self._errors.truncate()
        if process.returncode >= 0:
            # No signal. While it serves, errors are answers; so Python failed before, at an import.
            return f"the compiler could not start:\n{printed[-2000:]}"
        name = signal.Signals(-process.returncode).name
        # XLA logs what is fatal as "F1129 12:00:00.000000 …": F, the month and the day.
        checks = re.findall(r"(?m)^F\d{4} .*", printed)
        return "\n".join([f"the compiler crashed with {name}", *checks])


def serve(devices: Devices) -> None:
    """Runs in a :class:`CompilerProcess`: compiles what is requested on standard input.

    Requests and answers are pickled, one after the other. An answer is what was compiled, or the
    text of an error. It returns when the input ends.

    Args:
      devices: what to compile for.
    """
    requests: Any = sys.stdin.buffer
    # Answers go to what standard output was. What libraries print there goes to standard error.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if isinstance(devices, int):
        jax.config.update("jax_num_cpu_devices", devices)
    targets = jax.devices() if isinstance(devices, int) else topology_devices(*devices)
    by_id = {device.id: device for device in targets}  # requests name devices by id
    # The loop notices the end of the input only between two programs; this thread does at once.
    threading.Thread(target=_end_with, args=[requests.fileno()], daemon=True).start()
    while requests.peek(1):  # until the other end is closed
        try:
            answer: Any = _compat.compile_module(by_id, *pickle.load(requests))
        except Exception as error:
            answer = str(error)
        pickle.dump(answer, answers)
        answers.flush()


def _end_with(requests: int) -> None:
    """Ends this process when the other end of a pipe is closed, even while it compiles.

    ``requests`` is the number of the file from which this process reads requests. A search that is
    killed cannot end its processes, which would compile on for minutes.
    """
    pipe = select.poll()
    pipe.register(requests, 0)  # for no event but the end, which poll always reports
    pipe.poll()
    os._exit(0)
