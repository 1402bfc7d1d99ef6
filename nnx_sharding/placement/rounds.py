"""Assembles global batches from the rows that each process loads.

Processes exchange messages through JAX's coordination service: a collective of a background thread
may run before that of the training step on one process and after it on another, and both wait.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import json
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import numpy as np
from jax.sharding import Mesh

from .. import _compat
from ..core.arguments import Specs
from ..specs.fitting import describe
from .batch_sharding import BatchSharding, copied, padded
from .feed import Consumer

_NAME = "shard_batches"

# How often a waiting process checks whether its consumer is gone.
_INTERVAL_MS = 250

# How many agreements these processes have begun, which numbers them alike on all processes.
_BEGUN: collections.Counter[tuple[int, ...]] = collections.Counter()

# What is done with a batch that has fewer rows than the others.
Uneven: TypeAlias = Literal["pad", "drop", "error"]
UNEVEN: tuple[Uneven, ...] = get_args(Uneven)

# The number of rows that each process has loaded; None for one that has ended.
Counts: TypeAlias = dict[int, int | None]


class ConsumerGoneError(Exception):
    """The consumer of this process is gone, so nobody sees this."""


class Agreement:
    """An exchange of messages in turns, which the first of ``processes`` collects and sends to all.

    Only seconds in which the consumer waits count towards ``timeout``.
    """

    def __init__(self, processes: Sequence[int], timeout: float, consumer: Consumer):
        self.processes = tuple(processes)
        self._timeout, self._consumer = timeout, consumer
        self._process, self._leader = jax.process_index(), self.processes[0]
        self._turn = 0
        self.is_over = len(self.processes) == 1
        if self.is_over:
            return
        self._store = _compat.key_value_store()
        if self._store is None:
            raise RuntimeError(
                f"{_NAME}: processes agree on the end of their batches through JAX's coordination "
                "service, which is not running. Call jax.distributed.initialize() first."
            )
        number = _BEGUN[self.processes]
        _BEGUN[self.processes] += 1
        group = zlib.crc32(repr(self.processes).encode())
        self._prefix = f"nnx_sharding/batches/{group:08x}/{number}"

    def exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of all processes at this turn, in their order."""
        if len(self.processes) == 1:
            return [message]
        turn = self._turn
        if self._process == self._leader:
            messages = [message, *(self._receive(turn, p, p) for p in self.processes[1:])]
            self._send("all", messages)
            if turn:  # all received the last turn's messages before they sent these
                self._store.key_value_delete(f"{self._prefix}/{turn - 1}")
            self._turn += 1
        else:
            self._send(self._process, message)
            self._turn += 1  # if it leaves now, its note is for the next turn
            messages = self._receive(turn, "all", self._leader)
        left = [m["left"] for m in messages if "left" in m]
        if left:
            self.is_over = True
            raise RuntimeError(f"{_NAME}: {'; '.join(left)}")
        return messages

    def leave(self, reason: str) -> None:
        """Informs the others, which may be waiting for this process, that it sends nothing more."""
        if self.is_over:
            return
        self.is_over = True
        note: Any = {"left": f"process {self._process} {reason}"}
        is_leader = self._process == self._leader
        # If the service is gone, so are the others, or JAX informs them.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._send("all" if is_leader else self._process, [note] if is_leader else note)

    def _send(self, key: int | str, message: Any) -> None:
        self._store.key_value_set(f"{self._prefix}/{self._turn}/{key}", json.dumps(message))

    def _receive(self, turn: int, key: int | str, sender: int) -> Any:
        began = time.monotonic()
        while True:
            try:
                path = f"{self._prefix}/{turn}/{key}"
                return json.loads(self._store.blocking_key_value_get(path, _INTERVAL_MS))
            except jax.errors.JaxRuntimeError as error:
                if not _compat.is_timeout(error):
                    raise RuntimeError(
                        f"{_NAME}: the coordination service, through which processes agree on the "
                        "end of their batches, is no longer available."
                    ) from error
            if self._consumer.gone:
                raise ConsumerGoneError
            # While the consumer computes, other processes may compute as well without waiting.
            since = self._consumer.waiting_since
            if since is not None and time.monotonic() - max(began, since) >= self._timeout:
                raise TimeoutError(
                    f"{_NAME}: process {sender} sent nothing about its next batch for "
                    f"{self._timeout:g} s. It may be blocked, slower than that (raise "
                    "timeout=...), or not iterating: all processes of a sharding have to iterate "
                    "over the same batches, in the same order."
                )


class BatchOptions(NamedTuple):
    """The options of :func:`shard_batches`."""

    specs: Specs
    mesh: Mesh | None
    processes: tuple[int, ...]
    uneven: Uneven
    batch_size: int | None
    prefetch: int
    timeout: float
    copy: bool


class Round(NamedTuple):
    """A global batch, and the state of the iteration after it."""

    value: Any
    batch_size: int  # the number of rows of a full batch
    loader: Any  # the state of the loader


class Rounds(Iterator[Round]):
    """Global batches, made by whichever thread asks; all processes decide by their rows."""

    def __init__(
        self, source: Iterator[Any], options: BatchOptions, agreement: Agreement, *, resumed: bool
    ):
        self._source, self._options, self._agreement = source, options, agreement
        # Read in the user's thread, since other threads do not see it.
        self._x64 = bool(jax.config.read("jax_enable_x64"))
        self._count = self._left_out = 0  # rounds, and batches with too few rows
        self._has_made = resumed  # a batch, or another iteration has
        self._has_ended = False
        self._state: Any = None
        self._sharding: Any = None  # a BatchSharding from the first batch on
        self._known: dict[int, list[str]] = {}  # the processes that have described their batches
        self._fillers: list[Any] = []
        self._failure = "closed its iteration"

    def __next__(self) -> Round:
        try:
            while True:
                with jax.enable_x64(self._x64):
                    arrays = self._load()
                rows = None if arrays is None else self._count_rows(arrays)
                counts = self._exchange(rows)
                self._count += 1
                if self._makes_batch(counts):
                    self._has_made = True
                    return Round(self._global(arrays, counts), self._sharding.size, self._state)
        except StopIteration:
            self._agreement.is_over = True  # all processes know that nothing more is sent
            if self._left_out and not self._has_made:
                raise ValueError(
                    f"{_NAME}: uneven='drop' left out every batch: {self._left_out}, all with "
                    f"fewer than {self._sharding.size} rows. Pass uneven='pad', or a smaller "
                    "batch_size."
                ) from None
            raise
        except ConsumerGoneError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            self._failure = f"failed at batch {self._count} (from 0): {what}"
            raise

    def leave(self) -> None:
        """Informs other processes that this one ends its rounds, and why."""
        self._agreement.leave(self._failure)

    def _load(self) -> list[Any] | None:
        """This process's rows of the next batch, as host arrays; None if the loader has ended."""
        if self._has_ended:
            return None
        try:
            batch = next(self._source)
        except StopIteration:
            self._has_ended = True
            return None
        if hasattr(self._source, "get_state"):
            self._state = copy.deepcopy(self._source.get_state())
        if self._sharding is None:
            self._sharding = BatchSharding(batch, self._options.specs, self._options.mesh)
        arrays: list[Any] = self._sharding.arrays(batch)
        if self._options.copy:
            pairs = zip(arrays, self._sharding.leaves, strict=True)
            arrays = [x if leaf.sharding is None else copied(x) for x, leaf in pairs]
        return arrays

    def _count_rows(self, arrays: Sequence[Any]) -> int:
        rows: int = self._sharding.count(arrays)
        if len(self._agreement.processes) > 1 and (rows or not self._fillers):
            # If this process ends before others do, its rows are copies of these.
            self._fillers = [
                x if not leaf.has_rows else copied(padded(x[-1:], 1, 0))
                for x, leaf in zip(arrays, self._sharding.leaves, strict=True)
            ]
        return rows

    def _exchange(self, rows: int | None) -> Counts:
        """The rows of all processes, which must have batches of the same kind."""
        message: dict[str, Any] = {"rows": rows}
        if rows is not None and jax.process_index() not in self._known:
            options = f"uneven={self._options.uneven!r}, batch_size={self._options.batch_size}"
            leaves = [f"{leaf}, {describe(leaf.sharding)}" for leaf in self._sharding.leaves]
            message["about"] = [*leaves, options]
        answers = zip(self._agreement.processes, self._agreement.exchange(message), strict=True)
        counts = {}
        for process, answer in answers:
            counts[process] = answer["rows"]
            if "about" in answer:
                self._known[process] = lines = answer["about"]
                first, expected = next(iter(self._known.items()))
                if lines != expected:
                    ours = [line for line in expected if line not in lines]
                    theirs = [line for line in lines if line not in expected]
                    raise ValueError(
                        f"{_NAME}: processes have different batches.\n"
                        f"  process {first}: {'; '.join(ours)}\n"
                        f"  process {process}: {'; '.join(theirs)}\n"
                        "All of them have to iterate over the same kinds of batches, in the same "
                        "order."
                    )
        return counts

    def _makes_batch(self, counts: Counts) -> bool:
        """Whether these rows make a batch; StopIteration after the last ones."""
        uneven, ended = self._options.uneven, [p for p, n in counts.items() if n is None]
        if len(ended) == len(counts) or (ended and uneven == "drop"):
            raise StopIteration
        if not any(counts.values()):
            return False  # batches without rows
        if unknown := [process for process in ended if process not in self._known]:
            raise ValueError(
                f"{_NAME}: process {unknown[0]} has no batch, so it cannot take part. A process "
                "without rows has to yield batches of 0 rows, with the dtypes and the other "
                "dimensions of those of the other processes."
            )
        if not self._sharding.size:
            self._sharding.set_size(self._options.batch_size, counts)
        missing = [len(self._sharding.held[p]) - (n or 0) for p, n in counts.items()]
        if min(missing) < 0:
            raise ValueError(self._describe(counts, "more"))
        if any(missing) and uneven == "error":
            hint = "uneven='pad' fills it and gives a mask, uneven='drop' leaves it out"
            raise ValueError(f"{self._describe(counts, 'fewer')} {hint}.")
        is_full = uneven == "pad" or not any(missing)
        self._left_out += not is_full
        return is_full

    def _describe(self, counts: Counts, what: str) -> str:
        [*others, last] = counts.values()
        rows = f"these rows: {_by_process(counts)}" if others else f"{last} rows"
        full = sorted({len(held) for held in self._sharding.held.values()})
        return (
            f"{_NAME}: batch {self._count - 1} (from 0) has {rows}, {what} than "
            f"{' or '.join(map(str, full))} in a full batch."
        )

    def _global(self, arrays: list[Any] | None, counts: Counts) -> Any:
        """The global batch, with its mask if there is one."""
        leaves, held = self._sharding.leaves, self._sharding.held
        fillers = self._fillers or [None] * len(leaves)
        full = len(held[jax.process_index()])
        arrays = [
            padded(x, full, filler) if leaf.has_rows else x
            for x, filler, leaf in zip(arrays or fillers, fillers, leaves, strict=True)
        ]
        mask = _mask(self._sharding, counts) if self._options.uneven == "pad" else None
        with jax.enable_x64(self._x64):
            return self._sharding.place(arrays, mask)


def _by_process(counts: Counts) -> str:
    return ", ".join(f"{rows or 0} on process {process}" for process, rows in counts.items())


def _mask(sharding: BatchSharding, counts: Counts) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which rows of a global batch are loaded and not padding."""
    mask = np.ones(sharding.size, np.bool_)
    for process, rows in counts.items():
        mask[sharding.held[process][rows or 0 :]] = False
    if not all(mask[sharding.held[p][: n or 0]].all() for p, n in counts.items()):
        raise ValueError(
            f"{_NAME}: processes that hold the same rows have different numbers of them: "
            f"{_by_process(counts)}. Load on each the rows of process_rows(sharding, batch_size)."
        )
    return mask
