"""Assembles global batches from the rows that each process loads."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import numpy as np
from jax.sharding import Mesh

from ..core.targets import Specs
from ..specs.fitting import describe
from .agreement import Agreement, ConsumerGoneError
from .batch_sharding import BatchSharding, padded

_NAME = "shard_batches"

# What is done with a batch that has fewer rows than the others.
Uneven: TypeAlias = Literal["pad", "drop", "error"]
UNEVEN: tuple[Uneven, ...] = get_args(Uneven)

# The number of rows that each process has loaded; None for one that has ended.
Counts: TypeAlias = dict[int, int | None]


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


class State(NamedTuple):
    """Where an iteration is: the number of rows of a full batch, if known, and the loader."""

    batch_size: int | None
    loader: Any


class Round(NamedTuple):
    """A global batch, and the state of the iteration after it."""

    value: Any
    state: State


class Rounds(Iterator[Round]):
    """Global batches, made by whichever thread asks for them.

    All processes exchange how many rows they have loaded, and so decide alike.
    """

    def __init__(self, source: Iterator[Any], options: BatchOptions, agreement: Agreement):
        self._source, self._options, self._agreement = source, options, agreement
        # Read in the user's thread, since other threads do not see it.
        self._x64 = bool(jax.config.read("jax_enable_x64"))
        self._count = 0
        self._has_ended = False
        self._state: Any = None
        self._sharding: Any = None  # a BatchSharding from the first batch on
        self._known: dict[int, list[str]] = {}  # the processes that have described their batches
        self._fillers: list[Any] = []
        self._failure = "closed its iteration"

    def __next__(self) -> Round:
        try:
            while True:
                arrays = self._load()
                rows = None if arrays is None else self._count_rows(arrays)
                counts = self._exchange(rows)
                self._count += 1
                if self._makes_batch(counts):
                    state = State(self._sharding.size, self._state)
                    return Round(self._global(arrays, counts), state)
        except StopIteration:
            self._agreement.end()
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
            arrays = [x if leaf.sharding is None else np.array(x) for x, leaf in pairs]
        return arrays

    def _count_rows(self, arrays: Sequence[Any]) -> int:
        rows: int = self._sharding.count(arrays)
        if len(self._agreement.processes) > 1 and (rows or not self._fillers):
            # If this process ends before others do, its rows are copies of these.
            self._fillers = [
                x if not leaf.has_rows else np.array(padded(x[-1:], 1, 0))
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
        return uneven == "pad" or not any(missing)

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
