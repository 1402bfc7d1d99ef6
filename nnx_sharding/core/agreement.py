"""Agreement of processes: an operation on files succeeds on all of them, or fails on all.

A process that fails alone would leave the others waiting for it. So each operation is a block, in
which processes meet at the same points and at the end:

    with Operation("save", folder) as operation:
        ...                                  # an error here is raised on all processes
        operation.agree(path=str(folder))    # they are all here, and mean the same path
        ...

Messages go through the service that connects the processes, not through devices: those of a process
that failed may have a program to run first, and threads cannot run programs of several processes.
The service, which process 0 runs, is a table of texts. Operation ``nnx_sharding/3`` has these keys:

    nnx_sharding/3/0/2        what process 2 says at the first point where they meet: its facts
    nnx_sharding/3/0/verdict  what process 0 answers there
    nnx_sharding/3/failed/2   the error of process 2; all look there while they wait
    nnx_sharding/3/left/2     process 2 has failed, too, and reads no more

An error is raised again on the other processes, as one of the types in ``_KINDS`` or else as a
``CheckpointError``. An error from another process is marked as *heard*, so as not to be reported
once more.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

import jax

from .. import _compat
from ..errors import CheckpointError, ExportError, NoCheckpointError

T = TypeVar("T")

# How long this process waits for others, which may compile, or write more than this one.
_PATIENCE = 3600.0  # seconds
_LAST_PATIENCE = 60.0  # seconds, after another error
# Between two looks whether another process has failed; in milliseconds, as the service counts.
_POLL = 500

# If one process raises one of these, all do. For any other error, the others raise a
# CheckpointError.
_KINDS = (CheckpointError, NoCheckpointError, ExportError, FileExistsError, TypeError, ValueError)

_HEARD = "of_all_processes"  # the attribute of errors that this process heard from others

_current: contextvars.ContextVar[Operation | None] = contextvars.ContextVar(
    "operation", default=None
)
_operations = itertools.count()


class Operation:
    """What all processes do together with the files at one place; a context manager.

    Processes have to begin the same operations in the same order. One that begins within the block
    of another fails with it.

    Args:
      caller: the function that the user called, for messages.
      place: the file or folder that it uses, for messages.
      alone: whether this process does it without the others.

    Its private attributes:

        _is_shared   whether other processes take part
        _key         where its messages to them are, in the service that connects the processes
        _parent      the operation in whose block it began
        _begun       numbers the operations that begin in its block
        _meetings    numbers the points where its processes meet
        _resources   what is closed when it ends
    """

    def __init__(self, caller: str, place: object, *, alone: bool = False):
        """Chooses the operation's key, under which its messages to other processes are."""
        self._caller, self._place = caller, place
        self._is_shared = not alone and jax.process_count() > 1
        self._parent = _current.get()
        self._resources = contextlib.ExitStack()
        self._begun, self._meetings = itertools.count(), itertools.count()
        # The key is the same in all processes, since they begin the same operations in the same
        # order: "nnx_sharding/3", and "nnx_sharding/3/0" for the first one in its block. Those of
        # one process alone are not counted.
        numbers = _operations if self._parent is None else self._parent._begun
        above = "nnx_sharding" if self._parent is None else self._parent._key
        self._key: str = f"{above}/{next(numbers)}" if self._is_shared else ""

    @property
    def is_first(self) -> bool:
        """Whether this process does what only one has to do."""
        return not self._is_shared or jax.process_index() == 0

    def __enter__(self) -> Operation:
        self._token = _current.set(self)
        return self

    def __exit__(
        self,
        cls: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the operation on all processes alike: all return from the block, or all raise.

        An error in the block is told to the others; otherwise this waits until they have ended
        theirs. An ``OSError`` becomes a ``CheckpointError`` that names the place; a
        ``FileExistsError``, which says enough, stays one.
        """
        _current.reset(self._token)
        with self._resources:  # closes them at last, also after an error
            try:
                if error is None:
                    # Closed before the others may return, so that they find nothing left.
                    self._resources.close()
                    self.agree()
                elif isinstance(error, OSError) and not isinstance(error, _KINDS):
                    text = f"{self._caller}: cannot use {self._place}: {error}."
                    raise CheckpointError(text) from error
                else:
                    raise error
            except BaseException as raised:
                self._leave(raised)
                if raised is not error:  # the error of the block Python raises again by itself
                    raise

    def enter(self, resource: AbstractContextManager[T]) -> T:
        """Enters a context that ends with the operation, once no process works there any more."""
        return self._resources.enter_context(resource)

    def _leave(self, error: BaseException) -> None:
        """Reports an error to the others; process 0 waits until they have stopped, too.

        Process 0 runs the service that connects them. If its program ended at once, the others
        could not read the error any more.
        """
        if not self._is_shared:
            return
        client, index = _compat.distributed_client(), jax.process_index()
        if not hasattr(error, _HEARD):  # an error of this process, which no other knows
            # An error of another type has no name: the others raise a CheckpointError.
            name = next((cls.__name__ for cls in _KINDS if type(error) is cls), "")
            report = json.dumps([name, first_line(error)])
            client.key_value_set(f"{self._key}/failed/{index}", report, allow_overwrite=True)
        client.key_value_set(f"{self._key}/left/{index}", "", allow_overwrite=True)
        if index != 0:
            return
        end = time.monotonic() + _LAST_PATIENCE
        for other in range(1, jax.process_count()):
            milliseconds = max(1, int(1000 * (end - time.monotonic())))
            # A process that was killed does not come, which is an error here.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                client.blocking_key_value_get(f"{self._key}/left/{other}", milliseconds)

    def agree(self, value: Any = None, **facts: str | Callable[[], str]) -> Any:
        """Waits until all processes are here, and returns the value that the first one gives.

        Args:
          value: a JSON value. Those of other processes are ignored.
          facts: texts that have to be the same in all processes, such as a path. One that takes
            time is a function that returns it, and is only called if there are other processes.

        Raises:
          ValueError: the facts, such as paths, differ among processes.
          CheckpointError: another process has failed, or does not come; and other errors as there.
        """
        if not self._is_shared:
            return value
        client = _compat.distributed_client()
        key = f"{self._key}/{next(self._meetings)}"
        index = jax.process_index()
        texts = {name: fact() if callable(fact) else fact for name, fact in facts.items()}
        if index == 0:  # collects the facts of all, and tells them whether these agree
            by_process = [texts]
            for process in range(1, jax.process_count()):
                by_process.append(json.loads(self._wait(f"{key}/{process}", process)))
            verdict = {"value": value, "differ": _differences(by_process)}
            client.key_value_set(f"{key}/verdict", json.dumps(verdict))
            # The short verdict stays, since nothing says when all have read it.
            for process in range(1, jax.process_count()):
                client.key_value_delete(f"{key}/{process}")
        else:
            client.key_value_set(f"{key}/{index}", json.dumps(texts))
            verdict = json.loads(self._wait(f"{key}/verdict", process=0))
        if verdict["differ"]:  # a text for the message; empty if all agree
            # All processes raise this error, so none has to report it.
            raise _heard(
                ValueError(
                    f"{self._caller}: all processes have to call it with the same arguments, but "
                    f"got {verdict['differ']}."
                )
            )
        return verdict["value"]

    def wait_for(self, function: Callable[[], T]) -> T:
        """Returns what a function returns that may wait for another process.

        If the other process fails, its error is raised instead.

        Then the function still waits in its thread, and so may a program on the devices: nothing
        can interrupt it, and the processes have to be started again.
        """
        if not self._is_shared:
            return function()
        result = concurrent.futures.Future[T]()
        has_64_bits = jax.config.jax_enable_x64  # `enable_x64` may have set it in this thread only

        def run() -> None:
            try:
                with jax.enable_x64(has_64_bits):
                    result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        # Not a pool: the interpreter would wait for its threads at the end. In a copy of the
        # context, so that operations that begin in the function know that they are within this one.
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(run,), daemon=True).start()
        while True:
            done, _ = concurrent.futures.wait([result], timeout=_POLL / 1000)  # in seconds
            if done:
                # Where another process has ended already, its error says more than that of JAX.
                if isinstance(result.exception(), jax.errors.JaxRuntimeError):
                    self._raise_errors_of_others()
                return result.result()  # or raises what the function has raised
            self._raise_errors_of_others()  # goes on if there are none

    def _wait(self, key: str, process: int) -> str:
        """Returns what another process has written under a key, or raises its error."""
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            try:
                return str(_compat.distributed_client().blocking_key_value_get(key, _POLL))
            except jax.errors.JaxRuntimeError as error:
                if not _compat.is_timeout(error):
                    raise CheckpointError(f"{self._caller}: {first_line(error)}") from error
            self._raise_errors_of_others()
        raise CheckpointError(
            f"{self._caller}: process {process} did not come within {_PATIENCE:.0f} s. All "
            "processes have to call it."
        )

    def _raise_errors_of_others(self) -> None:
        """Raises the error of another process in this operation or in one around it.

        Returns if there is none. If several processes have failed, the first one's error is enough.
        """
        operation: Operation | None = self
        while operation is not None:
            reports = _compat.distributed_client().key_value_dir_get(f"{operation._key}/failed/")
            if reports:  # pairs of a key and a text
                key, report = reports[0]
                name, text = json.loads(report)
                cls = next((cls for cls in _KINDS if cls.__name__ == name), CheckpointError)
                process = key.rpartition("/")[2]
                raise _heard(cls(f"{self._caller}: process {process} failed: {text}"))
            operation = operation._parent


def _heard(error: Exception) -> Exception:
    """Marks an error that all processes know already, so that this one does not report it."""
    setattr(error, _HEARD, True)
    return error


def first_line(error: BaseException) -> str:
    """Returns the kind of an error and the beginning of its message."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _differences(by_process: Sequence[Mapping[str, str]]) -> str:
    """Describes the first fact that differs between process 0 and another one; ``""`` if none does.

    ``by_process`` has the facts of each process, by name: all give the same ones, since they run
    the same code.
    """
    first = by_process[0]
    for process, facts in enumerate(by_process[1:], start=1):
        for name, text in facts.items():
            if first.get(name) != text:
                return f"the {name} {first.get(name)} (process 0) and {text} ({process})"
    return ""
