"""Compiles programs side by side, and keeps their reports on disk.

Programs are traced and lowered one after the other in the thread of the caller, because settings
such as `jax.default_matmul_precision` hold for one thread. Up to four other threads compile them;
they run side by side because XLA releases the lock of Python. A program for more virtual CPU
devices than this process has, or for a TPU topology, is compiled in another process. Each thread
has one such process (`CompilerProcess`), so a crash of the compiler does not end this process.

A *program* is a lowered function and its mesh. A *worker* is a thread, with its process if there is
one. With ``ruled_out``, programs that lower to the same text are compiled once. With ``most``, a
program takes a *slot* when it is lowered, and only ``most`` slots exist (`_Slots`).

Errors do not leave the threads: `attempt` returns an error as a `Failure`. A program that cannot be
lowered becomes such a `Failure`, too, and goes through a worker like the others, so `_Workers.wait`
yields a result for each program that was given to a worker.
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
# A lowered function, and the mesh that it is for; None without a mesh.
Program: TypeAlias = tuple[Lowered, Mesh | None]
Lower: TypeAlias = Callable[[], Program]
# Chooses the name of the next program from the reports so far. Returns None if no program should
# start before others are compiled.
Pick: TypeAlias = Callable[[Mapping[str, ProgramReport | Failure]], "str | None"]
# A number of virtual CPU devices, or a TPU topology and its number of slices.
Devices: TypeAlias = int | tuple[str, int]


class _Finished(NamedTuple):
    """A program that was compiled, or that failed."""

    name: str
    report: ProgramReport | Failure
    seconds: float  # the time that tracing, lowering and compiling took


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
      title: the title of the bar that shows progress.
      programs: functions that lower each program, by name. A function is removed from this mapping
        when its program is started. ``pick`` may add functions.
      pick: chooses the next program; None starts programs in the order of ``programs``.
      most: the largest number of programs to compile; None for no limit. Programs that cannot be
        lowered do not count. Programs that fail for the reason of an earlier failure do not count
        either, but only ``most`` of them are left out of the count.
      time_limit: the seconds after which no program is started any more; None for no limit.
      ruled_out: a mapping which gets the name of each program that is equal to one that was started
        before, with the reason. Such programs are not compiled. None compiles all programs.
      memory_limit: the bytes that a device has, for the comparison.
      hardware: the hardware that rooflines are for; None for no rooflines.
      cache_dir: the folder for reports; None for no folder.
      devices: the devices that other processes compile for; None compiles in this process, for its
        own devices.
      by_module: whether reports have memory and cost by module.
      quiet: whether to show no progress.

    Returns:
      The comparison of the programs that were compiled. If there are none, it says why.

    Raises:
      SearchInterrupted: Ctrl-C was pressed. The result in the error compares the programs that were
        compiled before.
    """
    # `_Run.start` removes each program from ``programs``, so `iter(programs)` begins with the next.
    run = _Run(programs, _Slots(most), ruled_out)
    cache = None if cache_dir is None else file_path(cache_dir)
    end = math.inf if time_limit is None else time.monotonic() + time_limit
    try:
        with (
            _Workers(devices, cache, by_module=by_module) as workers,
            progress(title, run.expected, running=run.under_way, quiet=quiet) as advance,
        ):
            while (seconds_left := end - time.monotonic()) > 0:
                # While a worker is free, this thread lowers a program for it; otherwise this thread
                # waits. Without a free slot, no program is started until one that runs returns its
                # slot.
                name = None
                if workers.is_free and run.slots.is_free:
                    name = pick(run.reports) if pick else next(iter(programs), None)
                if name is not None:
                    run.start(name, workers)
                elif not workers.running:  # Nothing is left to do.
                    break
                else:
                    for finished in workers.wait(seconds_left):
                        run.note(finished, hardware)
                        advance(finished.name)
    except KeyboardInterrupt:
        result = run.comparison(dict.fromkeys(run.unfinished(), INTERRUPTED))
        result = result.judged(memory_limit=memory_limit, hardware=hardware)
        raise SearchInterrupted(result) from None
    # A comparison without reports has to say why, so it names the programs that were late. With
    # reports it does not, because `pick` may not have wanted the other programs.
    late = () if run.reports else run.unfinished()
    result = run.comparison(dict.fromkeys(late, "not compiled within the time limit"))
    return result.judged(memory_limit=memory_limit, hardware=hardware)


INTERRUPTED = "not compiled before the interruption"


class _Run:
    """The programs of one call of `compile_all`, and the reports of those that ended.

    Attributes:
      reports: the report, or the failure, of each program that ended, by name.
      slots: the limit of how many programs may be compiled.
      _programs: the functions that lower the programs which have not started, by name. This is the
        mapping of the caller, who may add to it.
      _ruled_out: the mapping of the caller for programs that equal an earlier one: name → reason.
        None if equal programs are compiled, too.
      _initial: the names of the programs that the caller gave at first.
      _started: the names of all programs that were started, in order; also of those that ended,
        could not be lowered, or were ruled out.
      _seconds: how long tracing, lowering and compiling took for each program that ended, by name.
      _first_names: for each digest of a lowered program, the name of the first program that has it.
        It stays empty if ``_ruled_out`` is None.
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
          slots: the slots; no program has taken one yet.
          ruled_out: as in `compile_all`.
        """
        self.reports: dict[str, ProgramReport | Failure] = {}
        self.slots = slots
        self._programs, self._ruled_out = programs, ruled_out
        # The names are copied here because `start` removes names from ``programs``.
        self._initial = [*programs]
        self._started: list[str] = []
        self._seconds: dict[str, float] = {}
        self._first_names: dict[str, str] = {}

    def start(self, name: str, workers: _Workers) -> None:
        """Lowers a program and lets a worker compile it, unless an equal one was started.

        A program that cannot be lowered goes to the worker as well, as a `Failure`, so that all
        results come from workers. The name of a program that equals an earlier one is noted in
        ``ruled_out``.
        """
        self._started.append(name)
        start = time.perf_counter()
        program = attempt(self._programs.pop(name))  # a `Failure` if it cannot be lowered
        seconds = time.perf_counter() - start
        if not isinstance(program, Failure):
            if self._ruled_out is not None:
                first = self._first_names.setdefault(_digest(program), name)
                if first != name:
                    self._ruled_out[name] = f"compiles to the program of {first}"
                    return
            self.slots.taken.add(name)
        workers.start(name, program, lowering_seconds=seconds)

    def note(self, finished: _Finished, hardware: Hardware | None) -> None:
        """Notes the report or the failure of a program.

        Args:
          hardware: the hardware that the roofline of the report is for; None for no roofline.
        """
        name, report, seconds = finished
        if hardware is not None and isinstance(report, ProgramReport):
            report = report.with_roofline(hardware)
        if isinstance(report, Failure):  # A failed program may return its slot.
            self.slots.note_failure(name, report)
        self.reports[name] = report
        self._seconds[name] = round(seconds, 3)

    def under_way(self) -> list[str]:
        """Lists the programs that are being lowered or compiled.

        The thread that shows progress calls this method while other threads start and end programs.
        """
        return [name for name in self._started if not self._is_done(name)]

    def expected(self) -> int:
        """Counts the programs that have a report or will get one, as far as is known now.

        The thread that shows progress calls this method, too. The number changes because a search
        may add programs, and may rule out some.
        """
        num_left = min(len(self._programs), self.slots.num_free)
        return len(self.reports) + len(self.under_way()) + int(num_left)

    def unfinished(self) -> list[str]:
        """Lists the programs that have no report, and are not equal to another program."""
        names = dict.fromkeys((*self._initial, *self._started, *self._programs))
        return [name for name in names if not self._is_done(name)]

    def _is_done(self, name: str) -> bool:
        """Tells whether a program has a report, or is equal to another program."""
        return name in self.reports or name in (self._ruled_out or ())

    def comparison(self, why_not: Mapping[str, str]) -> Comparison:
        """Returns the reports in the order in which programs were started, not yet judged.

        Args:
          why_not: the reasons why other programs were not compiled, by name.
        """
        in_order = {name: self.reports[name] for name in self._started if name in self.reports}
        return Comparison(
            reports=in_order, memory_limit=None, seconds=self._seconds, ruled_out=why_not
        )


_NUMBER = re.compile(r"\d+")


class _Slots:
    """A limit of how many programs are compiled: each program takes one of ``most`` slots.

    A program that fails for the reason of an earlier failure says nothing new, so it returns its
    slot to another program. At most ``most`` slots are returned, so that a search ends even if all
    programs fail.

    Attributes:
      taken: the names of the programs that have a slot: they were lowered to be compiled.
      _most: how many slots there are; None without a limit.
      _num_returned: how many slots failed programs have returned so far.
      _reasons: the texts of the errors so far, with ``#`` instead of numbers.
    """

    def __init__(self, most: int | None):
        """Creates ``most`` free slots; None for no limit."""
        self.taken: set[str] = set()
        self._most = most
        self._num_returned = 0
        self._reasons: set[str] = set()

    @property
    def is_free(self) -> bool:
        """Whether another program may be compiled."""
        return self.num_free > 0

    @property
    def num_free(self) -> float:
        """How many programs may still be compiled; infinity without a limit."""
        return math.inf if self._most is None else self._most - len(self.taken)

    def note_failure(self, name: str, failure: Failure) -> None:
        """Notes a failure, and frees the program's slot if its reason is that of an earlier one."""
        if self._most is None or self._num_returned >= self._most:
            return
        reason = _NUMBER.sub("#", failure.error)  # "needs 3 GiB" → "needs # GiB"
        if reason not in self._reasons:  # The reason is new, so the program keeps its slot.
            self._reasons.add(reason)
        elif name in self.taken:  # A program that could not be lowered took no slot.
            self.taken.remove(name)
            self._num_returned += 1


class _Workers:
    """Threads that compile, each with a process if there are devices to compile for.

    Attributes:
      running: the futures of the programs that threads compile, or are going to compile.
      _processes: the processes in which threads compile, one for each thread; empty if the threads
        compile in this process.
      _free: one item for each thread that does not compile now: its process, or None for this
        process.
      _cache: the folder for reports; None for no folder.
      _by_module: whether reports have memory and cost by module.
      _executor: the pool of ``_NUM_WORKERS`` threads.
    """

    def __init__(self, devices: Devices | None, cache: Path | None, *, by_module: bool):
        """Prepares the workers; a thread and its process start with their first program.

        Args:
          devices: the devices that processes compile for; None to compile in this process.
          cache: the folder for reports; None for none.
          by_module: whether reports have memory and cost by module.
        """
        self.running: set[concurrent.futures.Future[_Finished]] = set()
        self._cache, self._by_module = cache, by_module
        self._processes: list[CompilerProcess] = []
        self._free: list[CompilerProcess | None] = [None] * _NUM_WORKERS
        if devices is not None:
            self._processes = [CompilerProcess(devices) for _ in range(_NUM_WORKERS)]
            self._free = [*self._processes]
        self._executor = concurrent.futures.ThreadPoolExecutor(_NUM_WORKERS)

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        # Killing the processes ends the threads' requests (`CompilerProcess._ask` raises then), so
        # that nobody waits for the compiler. `shutdown` waits for the threads.
        for process in self._processes:
            process.kill()
        self._executor.shutdown(cancel_futures=True)
        # Pipes are closed only now, because threads read from them until they end.
        for process in self._processes:
            process.close()

    @property
    def is_free(self) -> bool:
        """Whether a thread has nothing to do."""
        return len(self.running) < _NUM_WORKERS

    def start(self, name: str, program: Program | Failure, *, lowering_seconds: float) -> None:
        """Lets a thread compile a program. A `Failure` passes through the thread unchanged."""
        self.running.add(self._executor.submit(self._compile, name, program, lowering_seconds))

    def wait(self, timeout: float) -> Iterator[_Finished]:
        """Waits until a program is compiled, or for ``timeout`` seconds; yields all that ended."""
        limit = None if timeout == math.inf else timeout
        for future in concurrent.futures.wait(self.running, limit, "FIRST_COMPLETED").done:
            self.running.remove(future)
            yield future.result()  # This raises no error of a compiler: `_compile` returns those.

    def _compile(self, name: str, program: Program | Failure, lowering_seconds: float) -> _Finished:
        """Compiles a program in a process that no other thread uses; threads run this method."""
        if isinstance(program, Failure):
            return _Finished(name, program, lowering_seconds)
        start = time.perf_counter()
        # ``_free`` is not empty, because it has one item for each thread. It needs no lock, because
        # `pop` and `append` of a list are atomic.
        process = self._free.pop()  # None compiles in this process.
        lowered, mesh = program
        make_report = partial(
            _report, lowered, mesh, process, self._cache, by_module=self._by_module
        )
        # `attempt` returns errors instead of raising them, so the process is always given back.
        report = attempt(make_report)
        self._free.append(process)
        return _Finished(name, report, lowering_seconds + time.perf_counter() - start)


# More than four workers would need gigabytes of memory, and save little time.
_NUM_WORKERS = min(os.cpu_count() or 1, 4)


def _report(
    lowered: Lowered,
    mesh: Mesh | None,
    process: CompilerProcess | None,
    cache: Path | None,
    *,
    by_module: bool,
) -> ProgramReport:
    """Returns the report of a program: from the cache, or else by compiling the program.

    A new report is saved in the cache.

    Args:
      mesh: the mesh that the function is for; None without a mesh.
      process: the process in which to compile; None for this process.
      cache: the folder for reports; None for no folder.
      by_module: whether the report has memory and cost by module.
    """
    path = None if cache is None else cache / f"{fingerprint(lowered, mesh, by_module)}.json"
    if path is not None:
        try:
            return ProgramReport.load(path)
        except (OSError, ValueError):
            # There is no such report, or another release wrote it. The folder is created only here,
            # because it is needed only for a new report.
            path.parent.mkdir(parents=True, exist_ok=True)
    # Optimisation of code for CPUs is switched off, because nobody runs the code, and optimisation
    # does not affect the figures.
    on_cpu = mesh is not None and mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 0} if on_cpu else None
    # Both functions take the options of the compiler, and return a `Compiled`.
    compile_with = lowered.compile if process is None else partial(process.compile, lowered)
    report = compile_with(options).report(by_module=by_module)
    if path is not None:
        # The error means that another thread or process writes the same report, and one is enough.
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
    """Returns a digest of what is compiled. Programs with equal digests differ only in their names.

    Candidates of a plan may have equal digests, because different declarations may give their
    arrays the same shardings.
    """
    lowered, mesh = program
    # The description of the mesh is part of the digest, because the text of the program does not
    # have the devices and their order.
    described_mesh = None if mesh is None else MeshDescription.of(mesh)
    parts = described_mesh, lowered.as_text()
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def fingerprint(lowered: Lowered, mesh: Mesh | None, by_module: bool = False) -> str:
    """Returns the name of a report on disk: a digest of all that the report depends on.

    The digest leaves out line numbers, so that a new comment in the user's code does not compile
    everything again. With ``by_module`` it includes them, because the report has a table of lines.
    """
    devices = [] if mesh is None else list(mesh.devices.flat)
    client = devices[0].client if devices else jax.devices()[0].client
    # Versions and flags of the compilers are included because they change the program that is made
    # from the same text. The paths of arguments and the activations are included because the report
    # has them, but the text does not.
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
        lowered.as_text(debug_info=by_module),  # debug_info: the locations of operations
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


class CompilerCrash(jax.errors.JaxRuntimeError):  # type: ignore[misc]
    """Raised if a compiler ended its process, or if the process was killed."""


class CompilerProcess:
    """A process that compiles one program after another.

    Only one thread at a time uses the process. Another thread may call :meth:`kill`, and nothing
    else: `kill` leaves the pipes open, because the first thread may still read from them.

    Args:
      devices: the devices that the process compiles for.

    Attributes:
      _devices: as given.
      _errors: the file that the process prints its errors to.
      _process: the process; None before the first request, and after a crash.
      _lock: the lock for ``_process`` and ``_is_killed``, which two threads read and change.
      _is_killed: whether `kill` was called, after which no process is started any more.
    """

    def __init__(self, devices: Devices):
        self._devices = devices
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None
        # The lock is needed because a thread may be about to start the process when another thread
        # calls `kill`.
        self._lock, self._is_killed = threading.Lock(), False

    def compile(self, lowered: Lowered, options: dict[str, Any] | None) -> Compiled:
        """Compiles a program for its figures; the result cannot be called.

        Args:
          lowered: the program.
          options: the options of the compiler, as for ``jax.stages.Lowered.compile``.

        Raises:
          CompilerCrash: the process ended, or was killed.
          JaxRuntimeError: the compiler refused the program.
        """

        # `compile_elsewhere` calls `_ask` instead of JAX's compiler. The result of `compile` keeps
        # this function, and calls it with further options if it is asked for tables by module.
        def compile_with(stage: jax.stages.Lowered, more: Mapping[str, Any]) -> Any:
            return _compat.compile_elsewhere(stage, {**(options or {}), **more}, self._ask)

        program = compile_with(lowered._stage, {})
        return lowered._compiled_to(program, compile_with)

    def kill(self) -> None:
        """Ends the process, even in the middle of a program, and starts no other from then on."""
        with self._lock:
            self._is_killed = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """Ends the process, and closes its pipes and the file for its errors."""
        self.kill()
        if self._process is not None:
            # `communicate` waits for the end of the process, and closes the pipes.
            self._process.communicate()
        self._errors.close()

    def _ask(self, *request: Any) -> dict[str, Any]:
        """Sends a request, the arguments of ``compile_module``, and waits for the answer.

        The process is started for the first request, and again after a crash. The answer has the
        figures of the compiled program, by the names of methods such as ``"cost_analysis"``.

        Raises:
          CompilerCrash: the process ended, or was killed.
          JaxRuntimeError: the compiler refused the program.
        """
        with self._lock:
            if self._is_killed:  # The search has ended, while its threads go on.
                raise CompilerCrash("the search had ended")
            if self._process is None:
                self._process = self._start()
            process = self._process
        assert process.stdin is not None and process.stdout is not None
        # The lock is released here, because `kill` would otherwise wait for the compiler. The
        # answer needs no length in front, because a pickle marks its own end.
        try:
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            answer: dict[str, Any] | str = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError):
            with self._lock:
                self._process = None  # The next request starts another process.
            raise CompilerCrash(self._last_words(process)) from None
        if isinstance(answer, str):  # A text is that of an error.
            raise jax.errors.JaxRuntimeError(answer)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        """Starts the process, which runs `serve`."""
        # This flag is removed because it would override the number of devices that `serve` sets.
        flags = os.environ.get("XLA_FLAGS", "").split()
        kept = [flag for flag in flags if "force_host_platform_device_count" not in flag]
        # The process runs JAX on CPUs even if it compiles for a TPU topology, because that needs
        # the TPU compiler, but no TPU.
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(kept)}
        # The command calls ``serve(64)``, for example, or ``serve(('v5e:16x16', 1))``.
        command = [sys.executable, "-c", f"from {__name__} import serve; serve({self._devices!r})"]
        pipe, errors = subprocess.PIPE, self._errors
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, env=environment)

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        """Says how a process ended, with the check that failed in XLA or the error of Python.

        ``process`` is a parameter because `_ask` has already set ``_process`` to None.
        """
        process.communicate()  # `communicate` waits for the end of the process.
        self._errors.seek(0)
        printed = self._errors.read().decode(errors="replace")
        # The file is emptied for the next process.
        self._errors.seek(0)
        self._errors.truncate()
        if process.returncode >= 0:
            # No signal ended the process. While `serve` runs, errors are answers, so Python failed
            # before that, at an import.
            return f"the compiler could not start:\n{printed[-2000:]}"
        name = signal.Signals(-process.returncode).name
        # XLA logs a fatal error as "F1129 12:00:00.000000 …": F, the month and the day.
        checks = re.findall(r"(?m)^F\d{4} .*", printed)
        return "\n".join([f"the compiler crashed with {name}", *checks])


def serve(devices: Devices) -> None:
    """Compiles the programs that are requested on standard input, until the input ends.

    A :class:`CompilerProcess` runs this function in its process. Requests and answers are pickled,
    one after the other. An answer is a compiled program, or the text of an error.

    Args:
      devices: the devices to compile for.
    """
    requests: Any = sys.stdin.buffer
    # Answers go to the original standard output. Texts that libraries print go to standard error
    # instead, so that they do not mix with answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if isinstance(devices, int):
        jax.config.update("jax_num_cpu_devices", devices)
    targets = jax.devices() if isinstance(devices, int) else topology_devices(*devices)
    by_id = {device.id: device for device in targets}  # Requests name devices by id.
    # The loop notices the end of the input only between two programs. This thread notices it at
    # once, and ends the process.
    threading.Thread(target=_end_with, args=[requests.fileno()], daemon=True).start()
    while requests.peek(1):  # The loop ends when the other end is closed.
        try:
            answer: Any = _compat.compile_module(by_id, *pickle.load(requests))
        except Exception as error:
            answer = str(error)
        pickle.dump(answer, answers)
        answers.flush()


def _end_with(requests: int) -> None:
    """Ends this process when the other end of a pipe is closed, even while it compiles.

    ``requests`` is the number of the file from which this process reads requests. The process ends
    itself because a search that is killed cannot end its processes, and they would go on to compile
    for minutes.
    """
    pipe = select.poll()
    pipe.register(requests, 0)  # 0: no event but the end of the pipe, which `poll` always reports.
    pipe.poll()
    os._exit(0)
