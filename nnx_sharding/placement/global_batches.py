"""Assembles global batches from the rows that this process loads.

    loader → host arrays → all rows of this process → global arrays
             (checked)     (padded or dropped)        (placed)

A *row* is one example, an index along the first dimension. A batch is *full* if it has all rows
that this process's devices hold. The option ``uneven`` says what is done with a batch that has
fewer rows. The sharding tells which processes hold which rows, so no process asks another one. For
the same reason, no process can notice that another one has ended. So with several processes, the
loaders have to yield equally many batches, and a decision that depends on other processes is an
error.

`BatchSharding` (`batch_sharding.py`) knows the leaves of a batch, checks and places them. Its
``own_rows`` are the indices of the rows of a full batch that this process holds. Its ``size`` is
the number of rows of a full global batch, which is 0 until ``set_size``. ``full_arrays`` returns
the leaves of a batch that needs no more checks, or None. A leaf whose sharding is None is *passed
through*: it may be anything. `pad_rows` fills an array up to a number of rows with copies of its
last row, or of the given ``filler`` if it has no rows. A process *is alone* if no other process has
devices of the shardings.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from ..core.prefixes import Specs
from .batch_sharding import NAME, BatchSharding, HostArray, copied, pad_rows

# The ways to treat a batch that has fewer rows than a full one.
Uneven: TypeAlias = Literal["pad", "drop", "error"]
UNEVEN: tuple[Uneven, ...] = get_args(Uneven)


class BatchOptions(NamedTuple):
    """The options of :func:`~nnx_sharding.placement.shard_batches`."""

    specs: Specs
    mesh: Mesh | AbstractMesh | None  # None if no spec needs one
    is_alone: bool  # whether no other process has devices of the sharding
    uneven: Uneven
    batch_size: int | None  # None: the size of the first batch
    prefetch: int
    copy: bool


class Loaded(NamedTuple):
    """A global batch, and the state of the iteration after it."""

    value: Any  # a pytree of arrays; with ``uneven="pad"``, a pair of the pytree and the mask
    batch_size: int  # the number of rows of a full batch
    loader: Any  # the state of the loader; None if it has none


class GlobalBatches(Iterator[Loaded]):
    """The global batches of one iteration, made in whichever thread asks for them.

    Its private attributes:

        _source        the iterator of the loader
        _options       the options that the user gave (``BatchOptions``)
        _x64           the user's setting of ``jax_enable_x64``, by which arrays are placed
        _count         the number of batches that the loader has yielded
        _dropped       the number of batches that had too few rows and were left out
        _has_yielded   whether this iteration, or the one that it continues, has yielded a batch
        _sharding      the leaves and shardings of a batch; None until the first batch
        _last_rows     the last row of each leaf, to fill a batch without rows
    """

    def __init__(self, source: Iterator[Any], options: BatchOptions, *, resumed: bool):
        """Prepares to iterate over a loader.

        ``resumed`` says whether an earlier iteration has yielded batches.
        """
        self._source, self._options = source, options
        # The setting is kept, because batches may be placed in a thread of our own, and a setting
        # that the user made with `with jax.enable_x64(True):` is for one thread only.
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
            state = state_of(self._source)  # after this batch
            # Reading the setting takes a fifth of the time of a context.
            if jax.config.read("jax_enable_x64") == self._x64:
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

        Raises:
          ValueError, TypeError: the batch does not fit, or may not be left out.
        """
        options = self._options
        if self._sharding is None:  # the first batch decides for all
            self._sharding = BatchSharding(batch, options.specs, options.mesh)
        sharding = self._sharding
        # The shortcut is for nearly all batches. The steps below take as long for a small batch as
        # placing it.
        if options.uneven != "pad" and not options.copy:
            full_arrays = sharding.full_arrays(batch)
            if full_arrays is not None:
                return sharding.place(full_arrays)
        arrays = sharding.arrays(batch)  # the leaves, checked to be like those of the first batch
        if options.copy:
            pairs = zip(arrays, sharding.leaves, strict=True)
            # Leaves that are passed through are not copied, because they may be anything.
            arrays = [x if leaf.sharding is None else copied(x) for x, leaf in pairs]
        rows = sharding.count(arrays)
        # A batch without rows is left out only if this process is alone. Otherwise other processes
        # may have rows, and this one has to run the step as well, with padding.
        if rows == 0 and options.is_alone:
            if options.uneven == "error":
                raise ValueError(
                    f"{NAME}: batch {self._count} (from 0) has no rows. uneven='drop' leaves it "
                    "out."
                )
            return None
        if sharding.size == 0:  # this is the first batch that is not left out
            sharding.set_size(options.batch_size, rows, is_alone=options.is_alone)
        return self._place(sharding, arrays, rows)

    def _place(self, sharding: BatchSharding, arrays: Sequence[HostArray], rows: int) -> Any:
        """Places a batch that was checked, as ``uneven`` says if it is not full; None to drop it.

        Args:
          sharding: the sharding of all batches, whose size is set.

        Raises:
          ValueError: the batch has more rows than a full one, or may not be dropped.
        """
        num_full = len(sharding.own_rows)
        if rows > num_full:
            raise ValueError(self._describe(rows, "more"))
        if self._options.uneven == "pad":
            mask = np.arange(num_full) < rows  # (own rows,)
            return sharding.place(self._fill(arrays, rows, num_full), mask)
        if rows < num_full:
            self._leave_out(rows)  # raises an error if the batch may not be dropped
            return None
        return sharding.place(arrays)

    def _leave_out(self, rows: int) -> None:
        """Counts a batch with too few rows as dropped.

        Raises:
          ValueError: it may not be dropped, by ``uneven`` or because this process is not alone.
        """
        # "shard_batches: batch 3 (from 0) has 5 rows, fewer than 8 in a full batch."
        description = self._describe(rows, "fewer")
        if self._options.uneven == "error":
            hint = "uneven='pad' fills it and gives a mask, uneven='drop' leaves it out"
            raise ValueError(f"{description} {hint}.")
        if not self._options.is_alone:
            # If another process has a full batch, its step would wait for this process forever.
            raise ValueError(
                f"{description} Other processes may have all of theirs, so it "
                "cannot be dropped here alone: drop it in the loader of each process (Grain: "
                "drop_remainder=True), or pass uneven='pad' with batch_size=..."
            )
        self._dropped += 1

    def _fill(self, arrays: Sequence[HostArray], rows: int, full: int) -> list[HostArray]:
        """Fills the arrays of a short batch with copies of their last row: (rows, …) → (full, …).

        A batch without rows gets the last row of an earlier one, or zeros if there was none. Leaves
        without rows, such as numbers and leaves that are passed through, stay as they are.
        """
        assert self._sharding is not None
        leaves = self._sharding.leaves
        # The last rows are kept for a later batch without rows, unless this process is alone,
        # because it leaves out such batches. Each batch with rows replaces the last rows. A batch
        # without rows keeps zeros if there are no last rows yet.
        if not self._options.is_alone and (rows or not self._last_rows):
            self._last_rows = []
            for array, leaf in zip(arrays, leaves, strict=True):
                last_row = None
                if leaf.has_rows:
                    # (rows, …) → (1, …), zeros if there are no rows. The row is copied, because the
                    # loader may write to its array again.
                    last_row = copied(pad_rows(array[-1:], 1, filler=0))
                self._last_rows.append(last_row)
        fillers = self._last_rows or [None] * len(leaves)
        return [
            pad_rows(array, full, filler) if leaf.has_rows else array
            for array, filler, leaf in zip(arrays, fillers, leaves, strict=True)
        ]

    def _check_end(self) -> None:
        """Raises a ValueError if the loader has ended and this iteration has yielded no batch.

        If this process is alone, an empty loader is no mistake, but it is one if all batches were
        dropped.
        """
        if self._has_yielded:
            return
        if not self._options.is_alone:
            raise ValueError(
                f"{NAME}: process {jax.process_index()} has no batch, so the others would wait "
                "for it. Each process has to yield equally many batches; one without rows yields "
                "batches of 0 rows, with uneven='pad' and the dtypes and other dimensions of "
                "the leaves of the other processes."
            )
        if self._dropped:
            assert self._sharding is not None  # the first batch has set it
            raise ValueError(
                f"{NAME}: uneven='drop' left out every batch: {self._dropped}, all with "
                f"fewer than {self._sharding.size} rows. Pass uneven='pad', or a smaller "
                "batch_size."
            )

    def _describe(self, rows: int, what: str) -> str:
        """Returns a text: the batch has "more" or "fewer" (``what``) rows than a full one."""
        assert self._sharding is not None
        where = "" if self._options.is_alone else f" on process {jax.process_index()}"
        return (
            f"{NAME}: batch {self._count} (from 0) has {rows} rows{where}, {what} than "
            f"{len(self._sharding.own_rows)} in a full batch."
        )


def state_of(source: Iterator[Any]) -> Any:
    """Returns a copy of the state of a loader's iterator; None if the iterator has no state.

    The loader may change its state in place, for the next batch or for a batch that fails.
    """
    get_state = getattr(source, "get_state", None)
    return None if get_state is None else copy.deepcopy(get_state())
