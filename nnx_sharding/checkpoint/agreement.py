"""Agreement of processes: an operation on files succeeds on all of them, or fails on all.

A process that fails alone would leave the others waiting for it. So each operation is a block, and
the processes meet at the same points of the block and at its end:

    with Operation("save", folder) as operation:
        ...                                  # an error here is raised on all processes
        operation.agree(path=str(folder))    # all processes are here, and mean the same path
        ...

Messages go through the service that connects the processes. They do not go through devices, because
the devices of a process that failed may have a program to run first, and because threads cannot run
programs of several processes. The service, which process 0 runs, is a table of texts. Operation
``nnx_sharding/3`` has these keys:

    nnx_sharding/3/0/2        the facts that process 2 gives at the first meeting point
    nnx_sharding/3/0/verdict  the answer of process 0 there
    nnx_sharding/3/failed/2   the error of process 2; all processes look there while they wait
    nnx_sharding/3/left/2     process 2 has failed as well, and reads no more

An error is raised again on the other processes, as one of the types in ``_KINDS`` or as a
``CheckpointError``. An error from another process is marked as *heard*, so that it is not reported
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

# How long this process waits for others, which may compile, or write more than this process.
_PATIENCE = 3600.0  # seconds
_LAST_PATIENCE = 60.0  # seconds that process 0 waits for others after an error
# The time between two looks whether another process has failed. The service counts milliseconds.
_POLL = 500

# If one process raises an error of these types, all raise the same type. For an error of any other
# type, the other processes raise a CheckpointError.
_KINDS = (CheckpointError, NoCheckpointError, ExportError, FileExistsError, TypeError, ValueError)

_HEARD = "of_all_processes"  # the attribute of errors that this process heard from others

# The innermost operation in whose block this thread is; None outside of all blocks.
_current: contextvars.ContextVar[Operation | None] = contextvars.ContextVar(
    "operation", default=None
)
_operations = itertools.count()  # numbers the operations that begin outside of all blocks


class Operation:
    """An operation of all processes on the files at one place; a context manager.

    Processes have to begin the same operations in the same order. An operation that begins within
    the block of another fails with it.

    Args:
      caller: the function that the user called, for messages.
      place: the file or folder that the operation uses, for messages.
      alone: whether this process does the operation without the others.

    ``agree`` is used in three ways. ``agree()`` is a meeting point: it returns once all processes
    are there. ``agree(path=text)`` also compares the text among processes. ``agree(value)`` also
    returns the value that the first process passes. All raise the error of a process that has
    failed, and so does ``wait_for(function)``, which calls a function that waits for others.

    Private attributes:

        _caller, _place   the arguments of these names
        _token       ends the block: restores the value that ``_current`` had before
        _is_shared   whether other processes take part
        _key         the beginning of the keys of messages in the service; "" without others
        _parent      the operation in whose block this one began; None without one
        _begun       numbers the operations that begin in the block of this one
        _meetings    numbers the points where the processes meet
        _resources   contexts that are closed when the operation ends
    """

    def __init__(self, caller: str, place: object, *, alone: bool = False):
        """Chooses the operation's key, under which its messages to other processes are."""
        self._caller, self._place = caller, place
        self._is_shared = not alone and jax.process_count() > 1
        self._parent = _current.get()
        self._resources = contextlib.ExitStack()
        self._begun, self._meetings = itertools.count(), itertools.count()
        # The key is the same in all processes, because they begin the same operations in the same
        # order: "nnx_sharding/3", and "nnx_sharding/3/0" for the first operation in its block.
        # Operations of one process alone are not counted.
        numbers = _operations if self._parent is None else self._parent._begun
        parent_key = "nnx_sharding" if self._parent is None else self._parent._key
        self._key: str = f"{parent_key}/{next(numbers)}" if self._is_shared else ""

    @property
    def is_first(self) -> bool:
        """Whether this process does the work that only one process has to do."""
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

        This tells the other processes about an error in the block. Otherwise it waits until they
        have ended their blocks. An ``OSError`` becomes a ``CheckpointError`` that names the place.
        A ``FileExistsError`` stays one, because it says enough.
        """
        _current.reset(self._token)
        with self._resources:  # closes the resources even after an error
            if error is None:
                try:
                    # Resources are closed before the other processes may return, so that they find
                    # nothing left.
                    self._resources.close()
                    self.agree()
                except BaseException as raised:
                    self._leave(raised)
                    raise
            elif isinstance(error, OSError) and not isinstance(error, _KINDS):
                text = f"{self._caller}: cannot use {self._place}: {error}."
                failure = CheckpointError(text)
                self._leave(failure)
                raise failure from error
            else:
                self._leave(error)  # then Python raises the error, because this returns None

    def enter(self, resource: AbstractContextManager[T]) -> T:
        """Enters a context that ends with the operation, once no process works there any more."""
        return self._resources.enter_context(resource)

    def _leave(self, error: BaseException) -> None:
        """Reports an error to the other processes; process 0 waits until these have stopped.

        Process 0 runs the service that connects the processes. If its program ended at once, the
        others could not read the error any more.
        """
        if not self._is_shared:
            return
        client, index = _compat.distributed_client(), jax.process_index()
        if not hasattr(error, _HEARD):  # no other process knows the error
            # The name is "" for an error of another type, and the others raise a CheckpointError.
            name = next((cls.__name__ for cls in _KINDS if type(error) is cls), "")
            report = json.dumps([name, first_line(error)])
            client.key_value_set(f"{self._key}/failed/{index}", report, allow_overwrite=True)
        client.key_value_set(f"{self._key}/left/{index}", "", allow_overwrite=True)
        if index != 0:
            return
        # All processes raise this error or one of their own, so each of them writes its key.
        end = time.monotonic() + _LAST_PATIENCE
        for other in range(1, jax.process_count()):
            milliseconds = max(1, int(1000 * (end - time.monotonic())))
            # JAX raises an error if the process was killed and does not come.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                client.blocking_key_value_get(f"{self._key}/left/{other}", milliseconds)

    def agree(self, value: Any = None, **facts: str | Callable[[], str]) -> Any:
        """Waits until all processes are here, and returns the value that process 0 gives.

        Args:
          value: a JSON value. The values of other processes are ignored.
          facts: texts that have to be the same in all processes, such as a path. If a text takes
            time, it is a function that returns the text, which is called only if there are other
            processes.

        Raises:
          ValueError: the facts, such as paths, differ among processes.
          CheckpointError: another process has failed, or does not come. If that process has raised
            an error of another type in ``_KINDS``, this raises the same type.
        """
        if not self._is_shared:
            return value
        client = _compat.distributed_client()
        key = f"{self._key}/{next(self._meetings)}"
        index = jax.process_index()
        texts = {name: fact() if callable(fact) else fact for name, fact in facts.items()}
        if index == 0:  # process 0 collects all facts, and tells whether these agree
            by_process = [texts]
            for process in range(1, jax.process_count()):
                by_process.append(json.loads(self._wait(f"{key}/{process}", process)))
            verdict = {"value": value, "differ": _differences(by_process)}
            client.key_value_set(f"{key}/verdict", json.dumps(verdict))
            # The verdict is not deleted, because nothing says when all processes have read it. It
            # is short.
            for process in range(1, jax.process_count()):
                client.key_value_delete(f"{key}/{process}")
        else:
            client.key_value_set(f"{key}/{index}", json.dumps(texts))
            verdict = json.loads(self._wait(f"{key}/verdict", process=0))
        if verdict["differ"]:  # a text for the message; "" if all processes agree
            # All processes read the same verdict and raise this error, so it is marked as heard.
            raise _heard(
                ValueError(
                    f"{self._caller}: all processes have to call it with the same arguments, but "
                    f"got {verdict['differ']}."
                )
            )
        return verdict["value"]

    def wait_for(self, function: Callable[[], T]) -> T:
        """Returns the result of a function that may wait for another process.

        If the other process fails, this raises its error instead. The function then still waits in
        its thread, and so may a program on the devices. Nothing can interrupt these, so the
        processes have to be started again.
        """
        if not self._is_shared:
            return function()
        result = concurrent.futures.Future[T]()
        has_64_bits = jax.config.jax_enable_x64  # `enable_x64` sets it for one thread only

        def run() -> None:  # in the other thread: passes the result or the error on
            try:
                with jax.enable_x64(has_64_bits):
                    result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        # A thread is used instead of a pool, because the interpreter would wait for the threads of
        # a pool at its end. The thread gets a copy of the context, so that operations that begin in
        # the function know that they are within this one.
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(run,), daemon=True).start()
        while True:
            done, _ = concurrent.futures.wait([result], timeout=_POLL / 1000)  # in seconds
            if done:
                # If another process has failed, its error says more than that of JAX.
                if isinstance(result.exception(), jax.errors.JaxRuntimeError):
                    self._raise_errors_of_others()
                return result.result()  # raises the error of the function if there was one
            self._raise_errors_of_others()  # returns if there are none

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
        """Raises the error of another process in this operation or an enclosing one, if any.

        If several processes have failed, the first error that is found is enough.
        """
        operation: Operation | None = self
        while operation is not None:
            reports = _compat.distributed_client().key_value_dir_get(f"{operation._key}/failed/")
            if reports:  # a list of pairs of a key and a text
                key, report = reports[0]
                name, text = json.loads(report)
                cls = next((cls for cls in _KINDS if cls.__name__ == name), CheckpointError)
                process = key.rpartition("/")[2]
                raise _heard(cls(f"{self._caller}: process {process} failed: {text}"))
            operation = operation._parent


def _heard(error: Exception) -> Exception:
    """Returns the error, marked as known to all processes, so that this one does not report it."""
    setattr(error, _HEARD, True)
    return error


def first_line(error: BaseException) -> str:
    """Returns the kind of an error and the beginning of its message."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _differences(by_process: Sequence[Mapping[str, str]]) -> str:
    """Returns a text for the first fact that differs between process 0 and another; else "".

    ``by_process`` has the facts of each process, by name. All processes give facts with the same
    names, because they run the same code.
    """
    expected = by_process[0]
    for process, facts in enumerate(by_process[1:], start=1):
        for name, text in facts.items():
            if expected.get(name) != text:
                return f"the {name} {expected.get(name)} (process 0) and {text} ({process})"
    return ""
