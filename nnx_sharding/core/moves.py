"""The steps by which arrays get other shardings, outside of any trace: each for many at once.

``place.py`` decides which steps an array takes. A *move* is one array on its way to its *target*, a
sharding. It is *ours* if it may be freed: because the caller donates it, or because a step before
has made it. Each function here replaces the array of a move by the next one (``Move.advance``).

    joined    all of an array of this process, in new NumPy memory, which a CPU device adopts
    is_keys   whether an array has PRNG keys, which have no form in NumPy, and which
              ``jax.device_put`` refuses if several processes hold them
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, Sharding

from .. import _compat
from ..specs.types import AnyArray
from .memory import copied, is_keys, joined

_MOST_ON_HOST = 2**26  # bytes of arrays that are joined before they are put on devices
_NO_MESH = Mesh(np.empty((), object), ())  # in context, like none


@dataclasses.dataclass
class Move:
    """One array on its way to a sharding."""

    array: Any
    target: Any
    is_ours: bool = False  # whether the array may be freed, being donated or intermediate
    slots: list[int] = dataclasses.field(default_factory=list)  # of the result

    def advance(self, array: AnyArray) -> None:
        """Replaces the array by what it has become, which may be freed afterwards if it is new."""
        self.is_ours |= array is not self.array
        self.array = array


class Step(NamedTuple):
    """A move, and the sharding that its array gets next, which need not be the target."""

    move: Move
    sharding: Any


def is_placed(leaf: AnyArray, sharding: Sharding | Format) -> bool:
    """Whether an array is committed to exactly this sharding."""
    return isinstance(leaf, jax.Array) and leaf.committed and leaf.sharding == sharding


def put(steps: Sequence[Step], *, alias: bool = True) -> None:
    """Gives arrays their shardings by one ``jax.device_put``, unless they have them already.

    Without ``alias``, arrays of the caller that have them are copied, since the result must not
    share memory with them.
    """
    pending: list[Step] = []  # what `jax.device_put` has to move or to copy
    for step in steps:
        move, sharding = step
        if not is_placed(move.array, sharding):
            pending.append(step)
        elif not alias and not move.is_ours:  # it is where it should be, but has to be copied
            if is_keys(move.array):  # `jax.device_put` refuses keys of several processes
                move.advance(copied(move.array))
            else:
                pending.append(step)
    if pending:
        # In one call, so that JAX makes all transfers together.
        copies = jax.device_put(
            [step.move.array for step in pending],
            [step.sharding for step in pending],
            may_alias=None if alias else False,  # None: JAX shares memory where it can
        )
        for step, array in zip(pending, copies, strict=True):
            step.move.advance(array)


def reshard(steps: Sequence[Step]) -> None:
    """Reshards arrays on their own devices, with one program for each device order.

    JAX compiles a program for devices in one order. The mesh of an array may have them in another
    order than its target, so each array first gets the order of its target, without any transfer.
    """
    by_devices: dict[Any, list[Step]] = {}  # by the devices of the target in their order
    for step in steps:
        by_devices.setdefault(_compat.device_assignment(step.sharding), []).append(step)
    for devices, group in by_devices.items():
        # Ours last, in the order in which `_join` returns the results.
        group.sort(key=lambda step: step.move.is_ours)
        kept, donated = list[Any](), list[Any]()
        for move, sharding in group:
            arrays = donated if move.is_ours else kept
            arrays.append(_in_device_order(move.array, sharding, devices))
        out_shardings = [step.sharding for step in group]
        program = jax.jit(_join, out_shardings=out_shardings, donate_argnums=1)
        # Without the mesh in context, which may have other devices than these.
        with warnings.catch_warnings(), jax.set_mesh(_NO_MESH):
            # Buffers whose size differs from the new ones cannot be reused; they are freed.
            warnings.filterwarnings("ignore", _compat.UNUSED_DONATION)
            resharded = program(kept, donated)
        for step, array in zip(group, resharded, strict=True):
            step.move.advance(array)


def _join(kept: list[Any], donated: list[Any]) -> list[Any]:
    """The program: returns its arrays, to which JAX gives their new shardings."""
    return [*kept, *donated]


def _in_device_order(array: AnyArray, target: NamedSharding, devices: object) -> Any:
    """Returns an array of the same buffers whose devices are in the order of the target.

    Args:
      array: an array on the devices of the target, in any order.
      target: the sharding that it gets next.
      devices: those of the target, in their order.
    """
    if _compat.device_assignment(array.sharding) == devices:
        return array
    # The same parts on the same devices, on a mesh that has these in the other order.
    sharding = _compat.in_order_of(array.sharding, target)
    assert sharding is not None  # where JAX cannot express it, `place.py` takes another path
    # This process makes the array of the buffers on its own devices, as the others do.
    buffers = {shard.device: shard.data for shard in array.addressable_shards}
    ordered = [buffers[x] for x in sharding.addressable_devices_indices_map(array.shape)]
    return jax.make_array_from_single_device_arrays(
        array.shape, sharding, ordered, dtype=array.dtype
    )


def put_from_host(moves: Sequence[Move]) -> None:
    """Moves arrays by joining their parts on the host, as many at once as its memory should hold.

    One `jax.device_put` of many arrays takes a fifth of the time of one for each part.
    """
    batch: list[tuple[Move, np.ndarray[Any, Any]]] = []  # joined, but not yet put on devices
    for move in moves:
        if is_keys(move.array):
            # Keys are moved as the integers that they consist of. On their own, since a model has
            # few of them.
            integers = Move(jax.random.key_data(move.array), move.target)
            put_from_host([integers])
            impl = jax.random.key_impl(move.array)
            move.advance(jax.random.wrap_key_data(integers.array, impl=impl))
        elif not move.target.is_fully_addressable:  # other processes put the rest
            move.advance(_own_parts(move.array, move.target))
        else:
            batch.append((move, joined(move.array)))
            if sum(x.nbytes for _, x in batch) >= _MOST_ON_HOST:
                _put_batch(batch)
                batch = []
    _put_batch(batch)  # the rest, which may be empty


def _put_batch(batch: Sequence[tuple[Move, np.ndarray[Any, Any]]]) -> None:
    """Puts arrays that belong to this function to their goals; CPU devices adopt the memory."""
    if batch:
        new = jax.device_put([array for _, array in batch], [move.target for move, _ in batch])
        for (move, _), array in zip(batch, new, strict=True):
            move.advance(array)


def _own_parts(array: AnyArray, target: Sharding) -> Any:
    """Makes an array of several processes of the parts that the devices of this one hold."""
    host = array if isinstance(array, np.ndarray) else joined(array)
    dtype = jax.dtypes.canonicalize_dtype(host.dtype)
    return jax.make_array_from_callback(host.shape, target, lambda i: joined(host[i]), dtype=dtype)
