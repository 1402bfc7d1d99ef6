"""Batches of the host as global arrays, loaded while devices compute."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .. import _compat
from ..core.specs import Specs, check_specs
from ..core.transform import check_options
from ..errors import NoMeshError
from .agreement import Agreement
from .feed import Consumer, Feed
from .rounds import UNEVEN, FitOptions, Round, Rounds, Uneven, processes_of

_NAME = "shard_batches"

# How long `close` waits for a loader that is in the middle of a batch.
_CLOSE_SECONDS = 10.0


@_compat.api_boundary
def shard_batches(
    batches: Iterable[Any],
    sharding: Any,
    mesh: Mesh | None = None,
    *,
    uneven: Uneven = "pad",
    batch_size: int | None = None,
    prefetch: int = 2,
    timeout: float = 600.0,
    copy: bool = False,
) -> ShardedBatches:
    """Turns batches of the host into global arrays, loading ahead in a thread.

    A batch is a pytree of arrays whose first dimensions are its rows: of NumPy or JAX, or of
    anything with ``__array__`` or ``__dlpack__``, such as tensors of PyTorch. Numbers in it belong
    to all rows and become replicated arrays. All batches have the same structure, dtypes and
    shapes, but for a smaller number of rows.

    **Several processes.** Each gives its own part of each batch, the rows that
    :func:`process_rows` names, in that order. All of them iterate over the same number of
    ``shard_batches`` in the same order, and agree on each batch before it is yielded, through
    JAX's coordination service. So where some have fewer rows or batches than others, all yield
    the same number of global batches. If loading fails on one, it fails on all.

    Args:
      batches: any iterable, such as a list, a generator, a ``DataLoader`` of PyTorch or Grain.
        What it yielded it must not write to again; ``copy`` is for one that does.
      sharding: how the arrays are laid out: a ``PartitionSpec``, a ``Sharding``, a
        :class:`~nnx_sharding.StateSharding`, or a prefix pytree of these. Where it says None a
        leaf is handed on as it is, and may be anything.
      mesh: what a ``PartitionSpec`` refers to; None for the mesh in context.
      uneven: what happens to a batch with fewer rows than a full one, mostly the last: ``"pad"``
        repeats its last row, and a mask tells which rows are real; ``"drop"`` leaves it out;
        ``"error"`` refuses it. Over several processes a batch is full if it is on all of them,
        and ``"drop"`` ends with the first process that ends.
      batch_size: the rows of a full global batch; None for those of the first batch.
      prefetch: how many batches are loaded and placed ahead of the one that is in use; so many
        more are in the memory of devices. 0 loads in the thread of the loop.
      timeout: seconds after which a process gives up on another one that it waits for.
      copy: whether to copy arrays before they are placed. On CPUs the global array may else be
        the same memory.

    Returns:
      An iterable of global batches; with ``uneven="pad"`` of pairs ``(batch, mask)``, always.
      The mask is a bool array of shape (batch size,), laid out as the rows are, True for rows
      that were loaded.

    Raises:
      NoMeshError: a ``PartitionSpec`` has no mesh.
      TypeError: ``batches`` is no iterable, something else stands where a spec belongs, or an
        option has the wrong type.
      ValueError: an option is none of its values, the mesh is abstract, or this process has none
        of its devices. While iterating: specs do not fit or are no prefix of the batch, a batch
        cannot be cut evenly, or batches differ; with the path of each offender.

    Example:
      >>> import numpy as np
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.partition import make_mesh
      >>> from nnx_sharding.placement import shard_batches
      >>> mesh = make_mesh({"data": -1})
      >>> loader = [{"x": np.ones((8, 3))}, {"x": np.ones((5, 3))}]
      >>> for batch, mask in shard_batches(loader, P("data"), mesh):
      ...     print(batch["x"].shape, batch["x"].sharding.spec, int(mask.sum()))
      (8, 3) P('data',) 8
      (8, 3) P('data',) 5
    """
    check_options(_NAME, uneven=(uneven, UNEVEN))
    _check_numbers(prefetch, batch_size, timeout)
    if not isinstance(batches, Iterable):
        raise TypeError(f"{_NAME}: batches is an iterable, not {batches!r}.")
    specs = Specs(sharding)
    check_specs(_NAME, sharding=specs)
    mesh = _checked_mesh(specs, mesh)
    processes = processes_of(specs, mesh)
    if processes and jax.process_index() not in processes:
        raise ValueError(
            f"{_NAME}: process {jax.process_index()} has none of the devices of the shardings; "
            f"the processes that have some are {', '.join(map(str, processes))}."
        )
    terms = FitOptions(specs, mesh, processes or (0,), uneven, batch_size, prefetch, timeout, copy)
    return ShardedBatches(batches, terms)


class ShardedBatches(Iterable[Any]):
    """What :func:`shard_batches` returns.

    Each ``for`` goes over the batches anew, as far as the loader itself can do that; of a generator
    or another iterator there is one way through, which a second ``for`` continues. A loop that is
    left early ends its thread when its iterator is dropped; to end it at a certain point use
    ``with``, or :meth:`close`.
    """

    def __init__(self, batches: Iterable[Any], terms: FitOptions):
        self._batches, self._terms = batches, terms
        self._open: weakref.WeakSet[BatchIterator] = weakref.WeakSet()
        self._only: BatchIterator | None = None

    def __iter__(self) -> BatchIterator:
        if self._only is not None:
            return self._only
        source = iter(self._batches)
        iterator = BatchIterator(source, self._terms)
        self._open.add(iterator)
        if source is self._batches:
            # What was loaded ahead is in this iterator and would be lost to another one.
            self._only = iterator
        return iterator

    def close(self) -> None:
        """Ends all iterations and their threads; see :meth:`BatchIterator.close`."""
        for iterator in list(self._open):
            iterator.close()

    def __enter__(self) -> ShardedBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        terms = self._terms
        return f"shard_batches({type(self._batches).__name__}, {terms.specs}, {terms.uneven!r})"


class BatchIterator(Iterator[Any]):
    """One way through the batches of a :class:`ShardedBatches`.

    Loading begins with the first ``next``. An error of the loader is raised in the place of the
    batch that failed, after all before it, with its own traceback.
    """

    def __init__(self, source: Iterator[Any], terms: FitOptions):
        self._source, self._terms = source, terms
        self._state: Any = source.get_state() if hasattr(source, "get_state") else None
        self._begin()

    def _begin(self) -> None:
        consumer = Consumer()
        agreement = Agreement(self._terms.processes, self._terms.timeout, consumer)
        rounds = Rounds(self._source, self._terms, agreement)
        self._feed: Feed[Round] = Feed(
            rounds.__next__, self._terms.prefetch, consumer, rounds.leave
        )
        self._finalizer = weakref.finalize(self, Feed.stop, self._feed)
        self._finalizer.atexit = False

    def __next__(self) -> Any:
        round_ = self._feed.take()
        self._state = round_.state
        return round_.value

    def close(self) -> None:
        """Ends the iteration and its thread; batches that were loaded ahead are dropped.

        Waits for the loader to finish the batch that it is at, up to 10 s; a thread that is
        stuck for longer ends as soon as the loader returns.
        """
        self._feed.stop(_CLOSE_SECONDS)

    def get_state(self) -> Any:
        """The state of the loader after the last batch that was yielded here.

        Batches that were loaded ahead are not in it: an iterator that continues from it yields
        them again.

        Raises:
          TypeError: the loader's iterator has no ``get_state``; those of Grain have.
        """
        self._need("get_state")
        return self._state

    def set_state(self, state: Any) -> None:
        """Continues from a state that :meth:`get_state` gave; in all processes alike.

        Raises:
          TypeError: the loader's iterator has no ``set_state``.
        """
        self._need("set_state")
        self._feed.stop(None)  # its thread uses the loader
        self._finalizer.detach()
        self._source.set_state(state)  # type: ignore[attr-defined]
        self._state = state
        self._begin()

    def _need(self, method: str) -> None:
        if not hasattr(self._source, method):
            raise TypeError(
                f"{_NAME}: {type(self._source).__name__} has no {method}. Pass a loader whose "
                "iterators have get_state and set_state, such as one of Grain."
            )

    def __enter__(self) -> BatchIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _checked_mesh(specs: Specs, mesh: Any) -> Mesh | None:
    """The mesh that partition specs refer to, if there are any."""
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"{_NAME}: mesh is a jax.sharding.Mesh, not {mesh!r}.")
    mesh = _compat.context_mesh() if mesh is None else mesh
    if mesh is None and specs.has_partition_spec:
        raise NoMeshError(
            f"{_NAME}: a PartitionSpec has no mesh. Pass mesh=..., or use jax.set_mesh."
        )
    own = [spec.mesh for spec in specs.written if isinstance(spec, NamedSharding)]
    used = [*own, *([mesh] if specs.has_partition_spec else [])]
    abstract = [m for m in used if isinstance(m, AbstractMesh)]
    if abstract:
        raise ValueError(f"{_NAME}: {abstract[0]} is abstract, without devices for batches.")
    return mesh if isinstance(mesh, Mesh) else None


def _check_numbers(prefetch: Any, batch_size: Any, timeout: Any) -> None:
    integers = {"prefetch": (prefetch, 0)}
    if batch_size is not None:
        integers["batch_size"] = (batch_size, 1)
    for name, (value, least) in integers.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{_NAME}: {name} is an integer, not {value!r}.")
        if value < least:
            raise ValueError(f"{_NAME}: {name} is at least {least}, not {value}.")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"{_NAME}: timeout is a number of seconds, not {timeout!r}.")
    if not timeout > 0:
        raise ValueError(f"{_NAME}: timeout is more than 0 seconds, not {timeout!r}.")
