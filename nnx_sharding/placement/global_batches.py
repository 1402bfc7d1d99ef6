"""Assembles global batches from the rows that this process loads.

    loader → host arrays → all rows of this process → global arrays
             (checked)     (padded or dropped)        (placed)

A *row* is one example, an index along the first dimension. A batch is *full* if it has all rows
that this process's devices hold; what is done with one that has fewer is the option ``uneven``.
Which processes hold which rows follows from the sharding, so no process asks another one. This also
means that none can notice that another one has ended: with several processes, what would depend on
the others is an error, and the loaders have to yield equally many batches.

`BatchSharding` (`batch_sharding.py`) knows the leaves of a batch, checks and places them; its
``own_rows`` are the indices of the rows of a full batch that this process holds. A leaf whose
sharding is None is *passed through*: it may be anything. A process *is alone* if no other process
has devices of the shardings.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from ..core.prefixes import Specs
from .batch_sharding import BatchSharding, HostArray, copied, pad_rows

_NAME = "shard_batches"

# What is done with a batch that has fewer rows than the others.
Uneven: TypeAlias = Literal["pad", "drop", "error"]
UNEVEN: tuple[Uneven, ...] = get_args(Uneven)


class BatchOptions(NamedTuple):
    """The options of :func:`~nnx_sharding.placement.shard_batches`."""

    specs: Specs
    mesh: Mesh | AbstractMesh | None  # None if no spec needs one
    is_alone: bool  # whether no other process has devices of the sharding
    uneven: Uneven
    batch_size: int | None  # None for that of the first batch
    prefetch: int
    copy: bool


class Loaded(NamedTuple):
    """A global batch, and the state of the iteration after it."""

    value: Any  # a pytree of arrays; with ``uneven="pad"``, a pair of it and the mask
    batch_size: int  # the number of rows of a full batch
    loader: Any  # the state of the loader; None if it has none


class GlobalBatches(Iterator[Loaded]):
    """The global batches of one iteration, made in whichever thread asks for them.

    Its private attributes:

        _source        the iterator of the loader
        _options       the options that the user gave (``BatchOptions``)
        _x64           the user's setting of ``jax_enable_x64``, by which arrays are placed
        _count         the number of batches that the loader has yielded
        _dropped       the number of those that were left out
        _has_yielded   whether this iteration, or the one that it continues, has yielded a batch
        _sharding      the leaves and shardings of a batch, known from the first one on
        _last_rows     the last row of each leaf, to fill a batch without rows
    """

    def __init__(self, source: Iterator[Any], options: BatchOptions, *, resumed: bool):
        """Iterates over a loader; ``resumed`` if an earlier iteration has yielded batches."""
        self._source, self._options = source, options
        # Batches may be placed in a thread of our own. There, a setting that the user made with
        # `with jax.enable_x64(True):`, for one thread, would not apply.
        self._x64 = bool(jax.config.read("jax_enable_x64"))
        self._count = 0
        self._dropped = 0
        self._has_yielded = resumed
        self._sharding: BatchSharding | None = None
        self._last_rows: list[HostArray | None] = []

    def __next__(self) -> Loaded:
        """Returns the next global batch, and the loader's state after it; skips dropped batches."""
        while True:
            try:
                batch = next(self._source)
            except StopIteration:
                self._check_end()
                raise
            # The state after this batch. A copy, since the loader may change it in place for the
            # next one.
            get_state = getattr(self._source, "get_state", None)
            state = None if get_state is None else copy.deepcopy(get_state())
            if jax.config.read("jax_enable_x64") == self._x64:  # a fifth of the time of a context
                value = self._shard(batch)
            else:
                with jax.enable_x64(self._x64):
                    value = self._shard(batch)
            self._count += 1
            if value is not None:  # None if the batch is dropped
                assert self._sharding is not None
                self._has_yielded = True
                return Loaded(value, self._sharding.size, state)

    def _shard(self, batch: Any) -> Any:
        """Turns the rows that this process loaded into a global batch; None to leave it out.

        With ``uneven="pad"``, the result is a pair of the batch and the mask of loaded rows.
        """
        options = self._options
        if self._sharding is None:  # the first batch decides for all
            self._sharding = BatchSharding(batch, options.specs, options.mesh)
        sharding = self._sharding
        # Nearly all batches end here. What follows takes as long for a small one as placing it.
        if options.uneven != "pad" and not options.copy:
            full_arrays = sharding.full_arrays(batch)
            if full_arrays is not None:
                return sharding.place(full_arrays)
        arrays = sharding.arrays(batch)  # the leaves, checked to be like those of the first batch
        if options.copy:
            pairs = zip(arrays, sharding.leaves, strict=True)
            # What is passed through is not placed, and may have no copy.
            arrays = [x if leaf.sharding is None else copied(x) for x, leaf in pairs]
        rows = sharding.count(arrays)
        # If other processes have rows, this one has to run the step as well, with padding.
        if not rows and options.is_alone:
            if options.uneven == "error":
                raise ValueError(
                    f"{_NAME}: batch {self._count} (from 0) has no rows. uneven='drop' leaves it "
                    "out."
                )
            return None
        if not sharding.size:  # not known yet: this is the first batch that is not left out
            sharding.set_size(options.batch_size, rows, is_alone=options.is_alone)
        full = len(sharding.own_rows)
        if rows > full:
            raise ValueError(self._describe(rows, "more"))
        if options.uneven == "pad":
            mask = np.arange(full) < rows  # (own rows,)
            return sharding.place(self._fill(arrays, rows, full), mask)
        if rows < full:
            self._leave_out(rows)
            return None
        return sharding.place(arrays)

    def _leave_out(self, rows: int) -> None:
        """Counts a batch with too few rows that is dropped; raises an error if it must not be."""
        # "shard_batches: batch 3 (from 0) has 5 rows, fewer than 8 in a full batch."
        found = self._describe(rows, "fewer")
        if self._options.uneven == "error":
            hint = "uneven='pad' fills it and gives a mask, uneven='drop' leaves it out"
            raise ValueError(f"{found} {hint}.")
        if not self._options.is_alone:
            # Where another process has a full batch, its step would wait for this one forever.
            raise ValueError(
                f"{found} Other processes may have all of theirs, so it "
                "cannot be dropped here alone: drop it in the loader of each process (Grain: "
                "drop_remainder=True), or pass uneven='pad' with batch_size=..."
            )
        self._dropped += 1

    def _fill(self, arrays: Sequence[HostArray], rows: int, full: int) -> list[HostArray]:
        """Fills the arrays of a short batch with copies of their last row: (rows, …) → (full, …).

        A batch without rows gets the last row of an earlier one, or zeros if there was none. What
        has no rows, as numbers and what is passed through, stays as it is.
        """
        assert self._sharding is not None
        leaves = self._sharding.leaves
        # Kept for a batch without rows. A process that is alone skips such batches. Each batch with
        # rows replaces what is kept; one without rows only adds zeros if nothing is kept yet.
        if not self._options.is_alone and (rows or not self._last_rows):
            self._last_rows = []
            for array, leaf in zip(arrays, leaves, strict=True):
                last_row = None
                if leaf.has_rows:
                    # (rows, …) → (1, …), of zeros if there are no rows. A copy, since the loader
                    # may write to its array again.
                    last_row = copied(pad_rows(array[-1:], 1, filler=0))
                self._last_rows.append(last_row)
        fillers = self._last_rows or [None] * len(leaves)
        return [
            pad_rows(array, full, filler) if leaf.has_rows else array
            for array, filler, leaf in zip(arrays, fillers, leaves, strict=True)
        ]

    def _check_end(self) -> None:
        """Raises an error if the loader has ended and this iteration has yielded no batch.

        If this process is alone, an empty loader is no mistake, but one whose batches were all
        dropped is.
        """
        if self._has_yielded:
            return
        if not self._options.is_alone:
            raise ValueError(
                f"{_NAME}: process {jax.process_index()} has no batch, so the others would wait "
                "for it. Each process has to yield equally many batches; one without rows yields "
                "batches of 0 rows, with uneven='pad' and the dtypes and other dimensions of "
                "the leaves of the other processes."
            )
        if self._dropped:
            assert self._sharding is not None  # made for the first batch
            raise ValueError(
                f"{_NAME}: uneven='drop' left out every batch: {self._dropped}, all with "
                f"fewer than {self._sharding.size} rows. Pass uneven='pad', or a smaller "
                "batch_size."
            )

    def _describe(self, rows: int, what: str) -> str:
        """Says that the current batch has ``what`` ("more" or "fewer") rows than a full one."""
        assert self._sharding is not None
        where = "" if self._options.is_alone else f" on process {jax.process_index()}"
        return (
            f"{_NAME}: batch {self._count} (from 0) has {rows} rows{where}, {what} than "
            f"{len(self._sharding.own_rows)} in a full batch."
        )
