"""One global batch after another, of what each process loads of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from ..core.specs import Specs
from ..fitting import describe
from .agreement import Agreement, GoneError, Message
from .batch_layout import BatchLayout
from .host_arrays import padded
from .rows import row_parts, rows_by_process

_NAME = "shard_batches"

# What is done with a batch that has fewer rows than the others.
Uneven: TypeAlias = Literal["pad", "drop", "error"]
UNEVEN: tuple[Uneven, ...] = get_args(Uneven)


class FitOptions(NamedTuple):
    """What the user said about batches; see :func:`shard_batches`."""

    specs: Specs
    mesh: Mesh | None
    processes: tuple[int, ...]
    uneven: Uneven
    batch_size: int | None
    prefetch: int
    timeout: float
    copy: bool


class Round(NamedTuple):
    """A global batch as users get it, and the state of the source after it."""

    value: Any
    state: Any


class Rounds(Iterator[Round]):
    """Global batches, made by whichever thread asks for them.

    In each round this process loads its part, all processes tell how many rows they have, and
    each decides by the same answers, so that all of them do the same.
    """

    def __init__(self, source: Iterator[Any], terms: FitOptions, agreement: Agreement):
        self._source, self._terms, self._agreement = source, terms, agreement
        self._own = jax.process_index()
        # That of the user's thread, which others do not see.
        self._x64 = bool(jax.config.read("jax_enable_x64"))
        self._count = 0
        self._has_ended = False
        self._state: Any = None
        self._layout: BatchLayout | None = None
        self._size: int | None = None
        self._capacities: dict[int, np.ndarray[Any, Any]] = {}
        self._about: tuple[int, list[str]] | None = None
        self._known: set[int] = set()
        self._last: list[Any] = []
        self._failure = "closed its iteration"

    def __next__(self) -> Round:
        try:
            while True:
                arrays = self._load()
                rows = None if arrays is None else self._counted(arrays)
                messages = self._agreement.exchange(self._message(rows))
                self._count += 1
                counts = self._counts(messages)
                if self._is_wanted(counts):
                    return Round(self._global(arrays, counts), self._state)
        except StopIteration:
            self._agreement.end()
            raise
        except GoneError:
            raise
        except Exception as error:
            self._failure = f"failed at batch {self._count} (from 0): {_in_short(error)}"
            raise

    def leave(self) -> None:
        """Tells other processes that no more rounds come from here, and why."""
        self._agreement.leave(self._failure)

    def _load(self) -> list[Any] | None:
        """This process's part of the next batch as host arrays; None if there is none."""
        if self._has_ended:
            return None
        try:
            batch = next(self._source)
        except StopIteration:
            self._has_ended = True
            return None
        if hasattr(self._source, "get_state"):
            self._state = copy.deepcopy(self._source.get_state())
        if self._layout is None:
            self._layout = BatchLayout(batch, self._terms.specs, self._terms.mesh)
        arrays = self._layout.arrays(batch)
        if self._terms.copy:
            placed = [leaf.sharding is not None for leaf in self._layout.leaves]
            arrays = [np.array(x) if own else x for x, own in zip(arrays, placed, strict=True)]
        return arrays

    def _counted(self, arrays: Sequence[Any]) -> int:
        assert self._layout is not None
        rows = self._layout.count(arrays)
        if len(self._agreement.processes) > 1 and (rows or not self._last):
            # Should this process end before others do, its rows are filled with these.
            self._last = [
                x
                if not leaf.has_rows
                else np.array(x[-1])
                if rows
                else np.zeros(x.shape[1:], x.dtype)
                for x, leaf in zip(arrays, self._layout.leaves, strict=True)
            ]
        return rows

    def _message(self, rows: int | None) -> Message:
        message: Message = {"rows": rows}
        if rows is not None and self._own not in self._known and self._layout is not None:
            lines = [f"{leaf}, {describe(leaf.sharding)}" for leaf in self._layout.leaves]
            terms = self._terms
            options = f"uneven={terms.uneven!r}, batch_size={terms.batch_size}"
            message["about"] = [*lines, options]
        return message

    def _counts(self, messages: Sequence[Message]) -> dict[int, int | None]:
        """The rows that each process has, None for one that has ended; all else is checked.

        Raises:
          ValueError: processes have batches of different kinds.
        """
        processes = self._agreement.processes
        for process, message in zip(processes, messages, strict=True):
            if "about" in message:
                self._known.add(process)
                self._check_about(process, message["about"])
        return {p: m["rows"] for p, m in zip(processes, messages, strict=True)}

    def _check_about(self, process: int, lines: list[str]) -> None:
        first, expected = self._about = self._about or (process, lines)
        if lines != expected:
            ours = [line for line in expected if line not in lines]
            theirs = [line for line in lines if line not in expected]
            raise ValueError(
                f"{_NAME}: processes have different batches.\n"
                f"  process {first}: {'; '.join(ours)}\n  process {process}: {'; '.join(theirs)}\n"
                "All of them have to iterate over the same kinds of batches, in the same order."
            )

    def _is_wanted(self, counts: dict[int, int | None]) -> bool:
        """Whether these rows make a batch.

        Raises:
          StopIteration: there are no more.
          ValueError: they make none, and should.
        """
        uneven, has_ended = self._terms.uneven, [p for p, n in counts.items() if n is None]
        if len(has_ended) == len(counts) or (has_ended and uneven == "drop"):
            raise StopIteration
        if not any(counts.values()):
            return False  # batches without rows
        self._check_known(has_ended)
        capacities = self._settled(counts)
        rows = {p: n or 0 for p, n in counts.items()}
        over = [p for p, n in rows.items() if n > capacities[p]]
        if over:
            raise ValueError(self._describe(rows, "more"))
        if all(n == capacities[p] for p, n in rows.items()):
            return True
        if uneven == "error":
            hint = "uneven='pad' fills it and gives a mask, uneven='drop' leaves it out"
            raise ValueError(self._describe(rows, "fewer") + f" {hint}.")
        return uneven == "pad"

    def _check_known(self, has_ended: Sequence[int]) -> None:
        unknown = [p for p in has_ended if p not in self._known]
        if unknown:
            raise ValueError(
                f"{_NAME}: process {', '.join(map(str, unknown))} has no batch at all, so it "
                "cannot know what to fill its rows with. Give each process at least one batch, "
                "or use uneven='drop'."
            )

    def _settled(self, counts: dict[int, int | None]) -> dict[int, int]:
        """How many rows each process has of a full batch; the first batch settles it."""
        if not self._capacities:
            assert self._layout is not None
            rows = self._layout.rows
            self._size = self._terms.batch_size or _whole(rows, counts)
            self._layout.check_size(self._size, self._agreement.processes)
            self._capacities = rows_by_process(rows, self._size)
        return {p: len(held) for p, held in self._capacities.items()}

    def _describe(self, rows: dict[int, int], what: str) -> str:
        if len(rows) == 1:
            found = f"batch {self._count - 1} (from 0) has {rows[self._own]} rows"
        else:
            each = ", ".join(f"{n} on process {p}" for p, n in rows.items())
            found = f"batch {self._count - 1} (from 0) has these rows: {each}"
        capacities = sorted({len(held) for held in self._capacities.values()})
        return f"{_NAME}: {found}, {what} than {' or '.join(map(str, capacities))} of a full one."

    def _global(self, arrays: list[Any] | None, counts: dict[int, int | None]) -> Any:
        """The global batch, with its mask if there is one."""
        layout, size = self._layout, self._size
        assert layout is not None and size is not None
        capacity = len(self._capacities[self._own])
        mask = _mask(size, self._capacities, counts) if self._terms.uneven == "pad" else None
        filled = [
            x if not leaf.has_rows else padded(x, capacity, last)
            for x, last, leaf in self._with_last(arrays)
        ]
        places = [i for i, leaf in enumerate(layout.leaves) if leaf.sharding is not None]
        shardings = [leaf.sharding for leaf in layout.leaves if leaf.sharding is not None]
        shapes = [(size, *(leaf.shape or ())) if leaf.has_rows else () for leaf in layout.leaves]
        local = [filled[i] for i in places]
        with jax.enable_x64(self._x64):
            placed = _placed(local, shardings, [shapes[i] for i in places], mask, layout.rows)
        for i, array in zip(places, placed, strict=False):
            filled[i] = array
        batch = jax.tree_util.tree_unflatten(layout.treedef, filled)
        return batch if mask is None else (batch, placed[-1])

    def _with_last(self, arrays: list[Any] | None) -> Iterator[tuple[Any, Any, Any]]:
        """Each leaf with the last row seen, and what is known of it; no rows after the end."""
        assert self._layout is not None
        lasts = self._last or [None] * len(self._layout.leaves)
        own = arrays or [
            last[None][:0] if leaf.has_rows else last
            for last, leaf in zip(lasts, self._layout.leaves, strict=True)
        ]
        yield from zip(own, lasts, self._layout.leaves, strict=True)


def _whole(rows: Sharding, counts: dict[int, int | None]) -> int:
    """The size of a global batch of which processes hold so many rows; the largest one."""
    parts = row_parts(rows)
    shares = rows_by_process(rows, parts)
    return max(-(-(n or 0) * parts // len(shares[p])) for p, n in counts.items())


def _mask(
    size: int, held: dict[int, np.ndarray[Any, Any]], counts: dict[int, int | None]
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which rows of a global batch are loaded, and no filler.

    Raises:
      ValueError: processes that hold the same rows have different numbers of them.
    """
    mask = np.ones(size, np.bool_)
    fillers = {p: held[p][n or 0 :] for p, n in counts.items()}
    for own in fillers.values():
        mask[own] = False
    wrong = [p for p, n in counts.items() if mask[held[p][: n or 0]].sum() < (n or 0)]
    if wrong:
        each = ", ".join(f"{n or 0} on process {p}" for p, n in counts.items())
        raise ValueError(
            f"{_NAME}: processes that hold the same rows have different numbers of them: {each}. "
            "Load on each what process_rows(sharding, batch_size) says."
        )
    return mask


def _placed(
    arrays: Sequence[Any],
    shardings: Sequence[Sharding],
    shapes: Sequence[tuple[int, ...]],
    mask: Any,
    rows: Sharding,
) -> list[Any]:
    """Global arrays, and the mask if there is one as the last."""
    if all(sharding.is_fully_addressable for sharding in (*shardings, rows)):
        masks = [] if mask is None else [mask]
        # One call for all, and a copy only where devices have a memory of their own.
        placed: list[Any] = jax.device_put(
            [*arrays, *masks], [*shardings, *([rows] if masks else [])]
        )
        return placed
    # device_put would compare what is replicated over processes by a collective.
    placed = [
        jax.make_array_from_process_local_data(sharding, np.asarray(array), shape)
        for array, sharding, shape in zip(arrays, shardings, shapes, strict=True)
    ]
    if mask is not None:
        placed.append(jax.make_array_from_callback(mask.shape, rows, lambda index: mask[index]))
    return placed


def _in_short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def processes_of(specs: Specs, mesh: Mesh | None) -> tuple[int, ...]:
    """The processes that have devices of any sharding that is written."""
    devices: set[jax.Device] = set()
    for spec in specs.written:
        if isinstance(spec, Sharding):
            devices |= spec.device_set
    if mesh is not None and specs.has_partition_spec:
        devices |= set(mesh.devices.flat)
    return tuple(sorted({device.process_index for device in devices}))
