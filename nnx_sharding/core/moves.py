"""The steps by which many arrays at once get other shardings, outside of any trace.

``place.py`` decides which steps an array takes. A *move* is one array on its way to its *target*, a
sharding. The array is *ours* if it may be freed: the caller donates it, or an earlier step has made
it. Each function here replaces the array of a move by the next one (``Move.advance``).
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
_NO_MESH = Mesh(np.empty((), object), ())  # setting this mesh is like having none in context


@dataclasses.dataclass
class Move:
    """One array on its way to a sharding."""

    array: Any  # the array as it is now; each step replaces it
    target: Any  # the sharding or ``Format`` at the end; `place.py` may change it between steps
    is_ours: bool = False  # whether the array may be freed: it is donated, or made by a step
    # The slots of the new array in the result of `place_arrays`.
    slots: list[int] = dataclasses.field(default_factory=list)

    def advance(self, array: AnyArray) -> None:
        """Replaces the array by the result of a step; if that is a new array, it is ours."""
        if array is not self.array:
            self.is_ours = True
        self.array = array


class Step(NamedTuple):
    """A move, and the sharding that the array gets next, which need not be the target."""

    move: Move
    sharding: Any


def is_placed(leaf: AnyArray, sharding: Sharding | Format) -> bool:
    """Whether an array is committed to exactly this sharding."""
    return isinstance(leaf, jax.Array) and leaf.committed and leaf.sharding == sharding


def put(steps: Sequence[Step], *, alias: bool = True) -> None:
    """Gives arrays their shardings by one ``jax.device_put``, unless they have them already.

    Without ``alias``, arrays of the caller that already have their shardings are copied, because
    the result must not share memory with them.
    """
    pending: list[Step] = []  # the steps that `jax.device_put` has to take
    for step in steps:
        move, sharding = step
        if not is_placed(move.array, sharding):
            pending.append(step)
        elif not alias and not move.is_ours:  # the sharding is right, but a copy is needed
            if is_keys(move.array):  # `jax.device_put` refuses keys of several processes
                move.advance(copied(move.array))
            else:
                pending.append(step)
    if pending:
        # One call makes all transfers together.
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
    # The key is the devices of the next sharding, in their order.
    steps_by_devices: dict[Any, list[Step]] = {}
    for step in steps:
        steps_by_devices.setdefault(_compat.device_assignment(step.sharding), []).append(step)
    for devices, group in steps_by_devices.items():
        # Arrays that are ours come last, because `_join` returns the results in this order.
        group.sort(key=lambda step: step.move.is_ours)
        kept, donated = list[Any](), list[Any]()
        for move, sharding in group:
            arrays = donated if move.is_ours else kept
            arrays.append(_in_device_order(move.array, sharding, devices))
        out_shardings = [step.sharding for step in group]
        program = jax.jit(_join, out_shardings=out_shardings, donate_argnums=1)
        # The mesh in context is left out, because it may have other devices than these.
        with warnings.catch_warnings(), jax.set_mesh(_NO_MESH):
            # JAX warns of buffers that it cannot reuse, because the new ones have another size.
            # These buffers are freed, so the warning is no help.
            warnings.filterwarnings("ignore", _compat.UNUSED_DONATION)
            resharded = program(kept, donated)
        for step, array in zip(group, resharded, strict=True):
            step.move.advance(array)


def _join(kept: list[Any], donated: list[Any]) -> list[Any]:
    """Returns its arrays; JAX gives them new shardings when it runs this as a program."""
    return [*kept, *donated]


def _in_device_order(array: AnyArray, target: NamedSharding, devices: object) -> Any:
    """Returns an array of the same buffers whose devices are in the order of the target.

    Args:
      array: an array on the devices of the target, in any order.
      devices: the devices of the target, in their order.
    """
    if _compat.device_assignment(array.sharding) == devices:
        return array
    # The new sharding has the same parts on the same devices, and a mesh with another order.
    sharding = _compat.in_order_of(array.sharding, target)
    assert sharding is not None  # safe because `_is_resharded` is False if JAX cannot express it
    # Each process makes the array of the buffers on its own devices.
    buffers = {shard.device: shard.data for shard in array.addressable_shards}
    ordered = [buffers[x] for x in sharding.addressable_devices_indices_map(array.shape)]
    return jax.make_array_from_single_device_arrays(
        array.shape, sharding, ordered, dtype=array.dtype
    )


def put_from_host(moves: Sequence[Move]) -> None:
    """Moves arrays by joining their parts on the host, about ``_MOST_ON_HOST`` bytes at a time.

    One `jax.device_put` of many arrays takes a fifth of the time of one for each part.
    """
    batch: list[tuple[Move, np.ndarray[Any, Any]]] = []  # joined arrays, not yet put on devices
    for move in moves:
        if is_keys(move.array):
            # Keys are moved as the integers that they consist of. They are in no batch, because a
            # model has few of them.
            integers = Move(jax.random.key_data(move.array), move.target)
            put_from_host([integers])
            impl = jax.random.key_impl(move.array)
            move.advance(jax.random.wrap_key_data(integers.array, impl=impl))
        elif not move.target.is_fully_addressable:  # each process puts the parts of its devices
            move.advance(_own_parts(move.array, move.target))
        else:
            batch.append((move, joined(move.array)))
            if sum(x.nbytes for _, x in batch) >= _MOST_ON_HOST:
                _put_batch(batch)
                batch = []
    _put_batch(batch)  # the last batch may be empty


def _put_batch(batch: Sequence[tuple[Move, np.ndarray[Any, Any]]]) -> None:
    """Puts joined arrays to their targets, where CPU devices adopt the memory.

    The caller must not use the joined arrays afterwards.
    """
    if batch:
        new_arrays = jax.device_put(
            [array for _, array in batch], [move.target for move, _ in batch]
        )
        for (move, _), array in zip(batch, new_arrays, strict=True):
            move.advance(array)


def _own_parts(array: AnyArray, target: Sharding) -> Any:
    """Returns an array of several processes; this process puts the parts for its own devices."""
    host_array = array if isinstance(array, np.ndarray) else joined(array)
    # The dtype is that of JAX, as in `joined`: without x64, 64-bit types become 32-bit ones.
    dtype = jax.dtypes.canonicalize_dtype(host_array.dtype)
    return jax.make_array_from_callback(
        host_array.shape, target, lambda index: joined(host_array[index]), dtype=dtype
    )
