"""Moves arrays to other devices, shardings and memories, outside of any trace.

There is no single way in JAX, so an array takes up to three steps, in :func:`_perform`:

    it is on the host, or cut differently on other devices or on CPUs   joined there, and put
    the same devices have other parts                                   one compiled program
    other devices have the same parts                                   jax.device_put

Everything goes in as few programs and transfers as possible, and each old array can be freed as
soon as the new one is there. For what happens inside a trace, see ``constrain.py``.

A *move* is one array on its way to its *target*, a sharding. The *bounds* of a part of an array say
where it begins and ends in each dimension. An array is *unreduced* if its value is the sum of the
arrays on the devices. Arrays may be *aliased*: share their memory with a new array.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .. import _compat
from ..specs.fitting import without_reductions
from ..specs.types import AnyArray, Arrays
from .memory import Bounds, bounds_of, copied, joined, main_memory

_MOST_ON_HOST = 2**26  # bytes of arrays that are joined before they are put on devices


def place_arrays(
    leaves: Arrays,
    shardings: Sequence[Sharding | Format | None],
    *,
    donate: bool = False,
    alias: bool = True,
) -> list[Any]:
    """Moves each array to its sharding; those without one, or that already have it, are returned.

    Args:
      leaves: NumPy or JAX arrays, numbers, abstract arrays. Arrays that this process holds in full
        are assumed to be equal in all processes.
      shardings: one for each leaf: a concrete sharding, a ``Format``, or None.
      donate: whether to free replaced arrays, unless they are among ``leaves`` also unchanged or
        with another sharding.
      alias: whether the result may share buffers with ``leaves``. It never does with NumPy arrays.
    """
    alias = alias and not donate
    result = list(leaves)
    moves: dict[tuple[int, Any], _Move] = {}  # by the id of the array, and the target
    staying: set[int] = set()  # the ids of arrays that are also returned unchanged
    for slot, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            result[slot] = leaf if sharding is None else leaf.update(sharding=sharding)
        elif sharding is None or (_is_placed(leaf, sharding) and (alias or donate)):
            staying.add(id(leaf))
        else:
            # An array in several slots is moved once, so that it stays one array.
            moves.setdefault((id(leaf), sharding), _Move(leaf, sharding)).slots.append(slot)
    num_targets = Counter(array_id for array_id, _ in moves)
    for (array_id, _), move in moves.items():
        is_unused = array_id not in staying and num_targets[array_id] == 1
        move.is_ours = donate and is_unused and isinstance(move.array, jax.Array)
    donated = [move.array for move in moves.values() if move.is_ours]
    _perform([*moves.values()], alias)
    for move in moves.values():
        for slot in move.slots:
            result[slot] = move.array
    for array in donated:
        if not array.is_deleted():  # the program that moved it may have reused its memory
            array.delete()
    return result


def obstacle(leaf: AnyArray, sharding: Sharding) -> str | None:
    """Returns why an array cannot get a sharding, whatever its shape; None if it can."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return "the mesh is abstract, without devices to place the array on"
    if not isinstance(leaf, jax.Array):
        return None
    if leaf.is_deleted():
        return "its data was deleted or donated"
    if leaf.is_fully_addressable or leaf.sharding.device_set == sharding.device_set:
        return None
    return (
        "it is on devices of other processes, and JAX moves it only between these; save it and "
        "restore it where it is needed"
    )


@dataclasses.dataclass
class _Move:
    """One array on its way to a sharding."""

    array: Any
    target: Any
    is_ours: bool = False  # whether the array may be freed, being donated or intermediate
    slots: list[int] = dataclasses.field(default_factory=list)  # of the result

    def advance(self, array: AnyArray) -> None:
        """Replaces the array by what it has become, which may be freed afterwards if it is new."""
        self.is_ours |= array is not self.array
        self.array = array


# Moves, each with the sharding that it gets next.
_Steps: TypeAlias = Sequence[tuple[_Move, Any]]


def _perform(moves: Sequence[_Move], alias: bool) -> None:
    """Moves each array to its target, by the steps that it needs.

    Arrays that stay on their devices, in any order, are resharded by one compiled program for each
    mesh; on CPUs, whose collectives take longer than copies, only those of several processes.
    Arrays on other devices that have the wanted parts are copied from device to device, all
    together. The rest is joined on the host.
    """
    # JAX cannot move unreduced arrays to other devices, only their sum: it is computed before the
    # move, and an unreduced array is made from it after the move.
    sums = [move for move in moves if _has_summands(move.array, move.target)]
    _reshard([(move, without_reductions(move.array.sharding)) for move in sums])
    last = [(move, move.target) for move in moves if _has_summands(move.target, move.array)]
    for move, target in last:
        move.target = without_reductions(target)
    _put_from_host([move for move in moves if _needs_host(move, alias)])
    # A program reshards arrays on their own devices: XLA does so only in their default memory.
    programs = [
        move
        for move in moves
        if isinstance(move.array, jax.Array)
        and _is_resharded(move.array.sharding, move.target, move.array.ndim)
    ]
    _put([(move, main_memory(move.array.sharding)) for move in programs])
    _reshard([(move, main_memory(move.target)) for move in programs])
    _put([(move, move.target) for move in moves], alias=alias)
    _reshard(last)


def finish_on_cpu(arrays: list[Any], known: Arrays = ()) -> list[Any]:
    """Waits for new arrays (not in ``known``) on several CPU devices, and returns all of them.

    On CPUs, programs with collectives that run simultaneously compete for threads and may deadlock.
    """
    before = set(map(id, known))
    new = [x for x in arrays if isinstance(x, jax.Array) and id(x) not in before]
    jax.block_until_ready([x for x in new if _is_on_cpus(x.sharding)])
    return arrays


@functools.lru_cache(maxsize=1024)
def _is_on_cpus(sharding: Any) -> bool:
    devices = sharding.device_set
    return len(devices) > 1 and next(iter(devices)).platform == "cpu"


def _is_placed(leaf: AnyArray, sharding: Sharding | Format) -> bool:
    """Whether an array is committed to exactly this sharding."""
    return isinstance(leaf, jax.Array) and leaf.committed and leaf.sharding == sharding


def is_keys(x: object) -> bool:
    """Whether ``x`` is an array of PRNG keys, which may be abstract."""
    return hasattr(x, "dtype") and bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def _has_summands(summed: Any, other: object) -> bool:
    """Whether one of an array and a sharding is unreduced, and the other is on other devices."""
    sharding = getattr(summed, "sharding", summed)
    if not isinstance(sharding, NamedSharding) or not sharding.spec.unreduced:
        return False
    other_sharding = getattr(other, "sharding", other)
    return _compat.device_assignment(sharding) != _compat.device_assignment(other_sharding)


def _put(steps: _Steps, alias: bool = True) -> None:
    """Copies arrays to their target by one ``jax.device_put``, where they are not there already.

    Without ``alias``, also those that are there are copied, since their memory must not be shared.
    """
    pending: list[tuple[_Move, Any]] = []
    for move, target in steps:
        may_stay = alias or move.is_ours
        if not may_stay and is_keys(move.array) and _is_placed(move.array, target):
            move.advance(copied(move.array))  # device_put refuses keys of several processes
            may_stay = True
        if not (may_stay and _is_placed(move.array, target)):
            pending.append((move, target))
    if pending:
        # In one call, so that JAX makes all transfers together.
        arrays, targets = [move.array for move, _ in pending], [target for _, target in pending]
        copies = jax.device_put(arrays, targets, may_alias=None if alias else False)
        for (move, _), array in zip(pending, copies, strict=True):
            move.advance(array)


# Cached, since the many arrays of a model have few different shardings.
@functools.lru_cache(maxsize=1024)
def _is_resharded(current: Any, target: Sharding | Format, ndim: int) -> bool:
    """Whether two shardings of the same devices divide an array so that these exchange parts."""
    if not isinstance(target, NamedSharding) or current.device_set != target.device_set:
        return False
    before, after = main_memory(current), main_memory(target)
    if _compat.device_assignment(current) != _compat.device_assignment(target):
        return _compat.in_order_of(before, target) is not None
    # Each CPU device has all parts of a replicated array.
    is_on_cpus = current.is_fully_addressable and _is_on_cpus(target)
    if current.is_fully_replicated and is_on_cpus:
        return False
    return not before.is_equivalent_to(after, ndim)


def _reshard(steps: _Steps) -> None:
    """Reshards arrays on their own devices, with one program for each device order."""
    for devices in dict.fromkeys(_compat.device_assignment(target) for _, target in steps):
        group = [step for step in steps if _compat.device_assignment(step[1]) == devices]
        group.sort(key=lambda step: step[0].is_ours)  # donated ones last, as `_join` returns them
        kept, donated = list[Any](), list[Any]()
        for move, target in group:
            arrays = donated if move.is_ours else kept
            arrays.append(_reordered(move.array, target, devices))
        program = jax.jit(_join, out_shardings=[target for _, target in group], donate_argnums=1)
        with warnings.catch_warnings():
            # Buffers whose size differs from the new ones cannot be reused; they are freed.
            warnings.filterwarnings("ignore", _compat.UNUSED_DONATION)
            resharded = program(kept, donated)
        for (move, _), array in zip(group, resharded, strict=True):
            move.advance(array)


def _join(kept: list[Any], donated: list[Any]) -> list[Any]:
    return [*kept, *donated]


def _reordered(array: AnyArray, target: NamedSharding, devices: object) -> Any:
    """Returns an array of the same buffers whose devices are in the order of the target."""
    if _compat.device_assignment(array.sharding) == devices:
        return array
    sharding = _compat.in_order_of(array.sharding, target)
    assert sharding is not None
    buffers = {shard.device: shard.data for shard in array.addressable_shards}
    ordered = [buffers[x] for x in sharding.addressable_devices_indices_map(array.shape)]
    return jax.make_array_from_single_device_arrays(
        array.shape, sharding, ordered, dtype=array.dtype
    )


def _needs_host(move: _Move, alias: bool) -> bool:
    """Whether an array has to be joined on the host, and put on its devices from there."""
    array, target = move.array, move.target
    if not isinstance(target, Sharding):
        return False
    if not isinstance(array, jax.Array):
        # JAX keeps a Python number weakly typed.
        return isinstance(array, np.ndarray | np.generic) or not target.is_fully_addressable
    is_weak = bool(getattr(array, "weak_type", False))
    return _is_joined(array.sharding, target, array.shape, is_weak, move.is_ours, alias)


# Cached, since the many arrays of a model have few different shardings and shapes: all tests
# together take ten times as long as the look-up.
@functools.lru_cache(maxsize=1024)
def _is_joined(
    current: Any,
    target: Sharding,
    shape: tuple[int, ...],
    is_weak: bool,
    is_ours: bool,
    alias: bool,
) -> bool:
    """Whether a JAX array is joined on the host; see :class:`_Move` and :func:`place_arrays`."""
    if not current.is_fully_addressable:
        return False
    if not target.is_fully_addressable:
        return bool(current.device_set != target.device_set)
    if is_weak:  # preserved only by jax.device_put
        return False
    if current.device_set == target.device_set:
        # A program is better for sums, for donated buffers, and on anything but CPUs.
        is_sum = any(without_reductions(x) is not x for x in (current, target))
        is_for_program = is_ours or is_sum or not _is_on_cpus(target)
        return _is_resharded(current, target, len(shape)) and not is_for_program
    # JAX does not copy a part to a device that already has it, even if asked to.
    may_share = alias or current.device_set.isdisjoint(target.device_set)
    if current.memory_kind != target.memory_kind:  # some releases of JAX confuse them
        return True
    device: Any = next(iter(current.device_set))
    if current.num_devices == 1 and device.platform != "cpu":  # JAX then slices on the device
        return not may_share and target.shard_shape(shape) == shape
    has_all_parts = _parts(target, shape) <= _parts(current, shape)
    return not may_share or not has_all_parts


def _parts(sharding: Sharding, shape: tuple[int, ...]) -> set[Bounds]:
    """Returns the different parts of an array that devices hold."""
    return {bounds_of(index, shape) for index in sharding.devices_indices_map(shape).values()}


def _put_from_host(moves: Sequence[_Move]) -> None:
    """Moves arrays by joining their parts on the host, as many at once as its memory should hold.

    One `jax.device_put` of many arrays takes a fifth of the time of one for each part.
    """
    batch: list[tuple[_Move, np.ndarray[Any, Any]]] = []  # joined, but not yet put on devices
    for move in moves:
        if is_keys(move.array):  # which have no form in NumPy
            words = _Move(jax.random.key_data(move.array), move.target)
            _put_from_host([words])
            impl = jax.random.key_impl(move.array)
            move.advance(jax.random.wrap_key_data(words.array, impl=impl))
        elif not move.target.is_fully_addressable:
            move.advance(_own_parts(move.array, move.target))
        else:
            batch.append((move, joined(move.array)))
            if sum(x.nbytes for _, x in batch) >= _MOST_ON_HOST:
                _put_batch(batch)
                batch = []
    _put_batch(batch)


def _put_batch(batch: Sequence[tuple[_Move, np.ndarray[Any, Any]]]) -> None:
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
