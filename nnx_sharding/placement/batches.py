"""``shard_batches``: batches from the host as global arrays, loaded while devices compute.

``global_batches`` makes the batches one after the other, and ``feed`` runs it in a thread ahead of
the loop. This module has the objects that users hold: an iterable, its iterators, and their state.

`GlobalBatches` is an iterator whose results are `Loaded`: a global batch (``value``), the number of
rows of a full batch (``batch_size``), and the state of the loader after this batch (``loader``). It
has to know if an earlier iteration has yielded batches (``resumed``), because an iteration that
yields none may be an error. A `Feed` calls its ``__next__`` ahead of the loop: ``take`` returns the
next result or raises its error, and ``stop`` ends the feed.
"""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..core.constrain import given_mesh
from ..core.prefixes import Specs, check_specs
from ..core.problems import check_options, no_mesh
from ..specs.fitting import show
from .batch_sharding import NAME, check_has_devices, check_integer, check_process
from .feed import Feed
from .global_batches import UNEVEN, BatchOptions, GlobalBatches, Loaded, Uneven, state_of

# The time that `close` waits for a loader that is loading a batch.
_CLOSE_SECONDS = 10.0


@_compat.api_boundary
def shard_batches(
    batches: Iterable[Any],
    sharding: Any,
    mesh: Mesh | None = None,
    *,
    uneven: Uneven = "drop",
    batch_size: int | None = None,
    prefetch: int = 2,
    copy: bool = False,
) -> ShardedBatches:
    """Turns batches on the host into global arrays, loading ahead in a thread.

    A batch is a pytree of arrays whose first dimension is its rows: NumPy or JAX arrays, or
    anything with ``__array__`` or ``__dlpack__``. Numbers in it become replicated arrays. All
    batches have the same structure, dtypes and shapes, except for a smaller number of rows.

    With several processes, each loads the rows that :func:`process_rows` selects. All loaders have
    to yield equally many batches, in the same order, as Grain does with ``drop_remainder=True``,
    because a step that only some processes run waits for the others. Differences that one process
    alone can notice are an error.

    Args:
      batches: any iterable, such as a ``DataLoader`` of PyTorch or Grain. It must not write again
        to arrays that it has yielded, unless ``copy`` is true.
      sharding: a ``PartitionSpec``, a ``Sharding``, a :class:`~nnx_sharding.StateSharding`, or a
        pytree prefix of a batch with these as leaves. A leaf with None may be anything and is
        passed through.
      mesh: the mesh of each ``PartitionSpec``; None for the mesh in context.
      uneven: what to do with a batch that has fewer rows than a full one, such as the last.
        ``"drop"`` leaves it out, for training: layers such as ``nnx.BatchNorm`` would count padding
        in their statistics. ``"pad"`` fills it with copies of its last row and yields a mask of the
        loaded rows with each batch, for evaluation. ``"error"`` raises an error, and so does
        ``"drop"`` with several processes, which cannot know whether all would drop theirs. To
        leave out every batch is an error.
      batch_size: the number of rows of a full global batch; None to use that of the first batch.
        ``"pad"`` needs it with several processes, because one may load less than the others.
      prefetch: the number of batches that are loaded and placed ahead of the one in use. 0 loads
        in the thread of the loop.
      copy: whether to copy arrays before they are placed. On CPUs, a global array may otherwise
        share the memory of an array of the loader.

    Returns:
      A :class:`~nnx_sharding.placement.batches.ShardedBatches` of global batches; with
      ``uneven="pad"``, of pairs ``(batch, mask)``. The mask is a bool array of shape (batch size,),
      sharded like the rows and True for loaded rows.

    Raises:
      NoMeshError: a ``PartitionSpec`` has no mesh.
      ValueError: an option has a wrong value, the mesh is abstract, or this process has none of its
        devices. While iterating: specs do not fit, a batch cannot be sharded evenly, batches
        differ, or integers do not fit JAX's dtype; the path of each wrong leaf is listed.

    Example:
      >>> import numpy as np
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.partition import make_mesh
      >>> from nnx_sharding.placement import shard_batches
      >>> loader = [{"x": np.ones((8, 3))}, {"x": np.ones((5, 3))}]
      >>> mesh = make_mesh({"data": -1})
      >>> for batch, mask in shard_batches(loader, P("data"), mesh, uneven="pad"):
      ...     print(batch["x"].shape, batch["x"].sharding.spec, int(mask.sum()))
      (8, 3) P('data',) 8
      (8, 3) P('data',) 5
    """
    check_options(NAME, uneven=(uneven, UNEVEN))
    check_integer(NAME, "prefetch", prefetch, 0)
    if batch_size is not None:
        check_integer(NAME, "batch_size", batch_size, 1)
    if not isinstance(batches, Iterable):
        raise TypeError(f"{NAME}: batches must be an iterable, got {show(batches)}.")
    specs = Specs(sharding)
    check_specs(NAME, sharding=specs)
    onto = given_mesh(NAME, mesh)
    processes = _processes_of(specs, onto)
    # If all specs are None, everything is passed through, and no process needs devices.
    if processes:
        check_process(NAME, jax.process_index(), processes)
    is_alone = len(processes) <= 1
    if not is_alone and uneven == "pad" and batch_size is None:
        raise ValueError(
            f"{NAME}: with several processes, uneven='pad' needs batch_size=..., the number of "
            "rows of a full batch of all of them, since the first batch of one may be short."
        )
    options = BatchOptions(
        specs=specs,
        mesh=onto,
        is_alone=is_alone,
        uneven=uneven,
        batch_size=batch_size,
        prefetch=prefetch,
        copy=copy,
    )
    return ShardedBatches(batches, options)


class ShardedBatches(Iterable[Any], AbstractContextManager[Any]):
    """The iterable that :func:`~nnx_sharding.placement.shard_batches` returns.

    Each ``for`` loop iterates over the loader again; if that is an iterator, a second loop
    continues it. When a loop ends early, its thread ends once its iterator is dropped; ``with`` or
    :meth:`close` end it at a defined point.
    """

    # Private attributes:
    #   _batches   the loader
    #   _options   the options of ``shard_batches``
    #   _open      the iterations that `close` ends. References are weak, so that an iteration ends
    #              when its loop drops it
    #   _only      the only iteration over a loader that is an iterator itself; None for other
    #              loaders, and before the first loop

    def __init__(self, batches: Iterable[Any], options: BatchOptions):
        self._batches, self._options = batches, options
        self._open: weakref.WeakSet[BatchIterator] = weakref.WeakSet()
        self._only: BatchIterator | None = None

    def __iter__(self) -> BatchIterator:
        """Starts another pass over the loader; a loader that is an iterator has only one."""
        if self._only is not None:  # a second loop continues where the first one ended
            return self._only
        source = iter(self._batches)
        iterator = BatchIterator(source, self._options)
        self._open.add(iterator)  # for `close`
        # The loader is an iterator and cannot start again. The iteration is kept, because a second
        # one over the same source would lose batches that this one has loaded ahead.
        if source is self._batches:
            self._only = iterator
        return iterator

    def close(self) -> None:
        """Ends all iterations and their threads; see :meth:`BatchIterator.close`."""
        for iterator in list(self._open):
            iterator.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        specs, uneven = self._options.specs, self._options.uneven
        return f"shard_batches({type(self._batches).__name__}, {specs}, {uneven!r})"


class BatchIterator(Iterator[Any], AbstractContextManager[Any]):
    """One iteration over a :class:`ShardedBatches`.

    Loading begins with the first ``next``. An error of the loader is raised in place of the
    batch that failed, after all batches before it, with its own traceback.
    """

    # Private attributes:
    #   _source         the iterator of the loader, which the feed advances ahead of the loop
    #   _options        the options of ``shard_batches``
    #   _batch_size     the number of rows of a full batch; None until it is known
    #   _loader_state   the state of the loader after the last batch that was yielded; None if the
    #                   loader has no state
    #   _feed           makes the global batches, in a thread unless nothing is loaded ahead
    #   _finalizer      stops this feed when the iterator is dropped

    def __init__(self, source: Iterator[Any], options: BatchOptions):
        self._source, self._options = source, options
        self._batch_size = options.batch_size
        self._loader_state = state_of(source)
        self._begin(resumed=False)

    def _begin(self, *, resumed: bool) -> None:
        """Makes a new feed; ``resumed`` says whether an earlier iteration has yielded batches."""
        batches = GlobalBatches(self._source, self._options, resumed=resumed)
        self._feed: Feed[Loaded] = Feed(batches.__next__, self._options.prefetch)
        # The finalizer stops the feed of an iterator that is dropped. The finalizer does not run at
        # exit, because the feed has a handler of its own there.
        self._finalizer = weakref.finalize(self, Feed.stop, self._feed)
        self._finalizer.atexit = False

    def __next__(self) -> Any:
        loaded = self._take()
        if loaded is None:
            raise StopIteration
        self._batch_size, self._loader_state = loaded.batch_size, loaded.loader
        return loaded.value

    @_compat.api_boundary
    def _take(self) -> Loaded | None:
        """Returns the next result of the feed; None at the end."""
        # StopIteration does not leave this function, because `api_boundary` would filter its
        # traceback, which takes as long as ten batches.
        try:
            return self._feed.take()
        except StopIteration:
            return None

    def close(self) -> None:
        """Ends the iteration and its thread; batches that were loaded ahead are dropped.

        Waits up to 10 s for the loader to finish its current batch; a thread that is blocked for
        longer ends as soon as the loader returns.
        """
        self._feed.stop(_CLOSE_SECONDS)

    def get_state(self) -> bytes:
        """Returns the state of the iteration after the last batch that it yielded, to be stored.

        An iterator that continues from it yields again what was loaded ahead. Each process has its
        own state: JSON text with the state of the loader's iterator, which has to be text as bytes
        or something that JSON can hold, and the number of rows of full batches.

        Raises:
          TypeError: the loader's iterator has no ``get_state`` (Grain's iterators have it).
        """
        # The method is not called, because the loader is ahead of the loop. `__next__` has kept the
        # loader's state after the last batch. `_method` raises an error if the loader has no state.
        self._method("get_state")
        state: dict[str, Any] = {"batch_size": self._batch_size}
        # JSON has no bytes, so bytes are stored as text. The key says whether they were bytes.
        if isinstance(self._loader_state, bytes):
            state["text"] = self._loader_state.decode()
        else:
            state["loader"] = self._loader_state
        return json.dumps(state).encode()

    def set_state(self, state: bytes) -> None:
        """Continues from a state of :meth:`get_state`; call it on all processes, at the same batch.

        Args:
          state: what ``get_state`` returned on this process, of an iteration over the same loader
            with the same number of processes.

        Raises:
          TypeError: the loader's iterator has no ``set_state``.
          ValueError: ``get_state`` did not return ``state``.
        """
        set_state = self._method("set_state")
        try:
            # `get_state` has written a loader's state of bytes as "text", and any other as
            # "loader".
            fields = json.loads(state)
            size = fields["batch_size"]
            loader_state = fields["text"].encode() if "text" in fields else fields["loader"]
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"{NAME}: expected a state from get_state, got {state!r}.") from error
        # The thread that loads ahead has to end first, because it must not use the loader while the
        # state is set. If `set_state` raises an error, the iteration stays at its end.
        self._feed.stop(None)
        # The finalizer would keep the old feed. `_begin` makes a new one of both.
        self._finalizer.detach()
        set_state(copy.deepcopy(loader_state))  # copied because the loader may change it in place
        self._batch_size, self._loader_state = size, loader_state
        # By default, the first batch decides on the number of rows. The number in the state is used
        # instead, because the next batch may be uneven.
        self._options = self._options._replace(batch_size=self._options.batch_size or size)
        self._begin(resumed=True)

    def _method(self, name: str) -> Callable[..., Any]:
        """Returns a method of the loader's iterator; raises a TypeError if it has none."""
        if not hasattr(self._source, name):
            raise TypeError(
                f"{NAME}: {type(self._source).__name__} has no {name}. Pass a loader whose "
                "iterators have get_state and set_state, such as one of Grain."
            )
        method: Callable[..., Any] = getattr(self._source, name)
        return method

    def __exit__(self, *_: object) -> None:
        self.close()


def _processes_of(specs: Specs, mesh: Mesh | AbstractMesh | None) -> tuple[int, ...]:
    """Returns the indices of the processes that have devices of the user's shardings, ascending.

    A spec that is None needs no devices, because its leaves are passed through.

    Raises:
      NoMeshError: a ``PartitionSpec`` has no mesh.
      ValueError: a mesh is abstract, or a spec is a ``Format``, which also has a memory layout.
    """
    if mesh is None and specs.has_partition_spec:
        raise no_mesh(NAME)
    devices: set[jax.Device] = set()
    for spec in specs.written:
        if isinstance(spec, Format):
            raise ValueError(f"{NAME}: {spec}: give the Sharding without a memory layout.")
        if isinstance(spec, PartitionSpec):
            assert mesh is not None  # checked above
            spec = NamedSharding(mesh, PartitionSpec())  # any spec is on all devices of the mesh
        if isinstance(spec, Sharding):
            check_has_devices(NAME, spec)
            devices |= spec.device_set
    return tuple(sorted({device.process_index for device in devices}))
