"""Arrays to other devices, layouts and memories: by it models and all that ``jit`` places move."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .. import _compat
from ..fitting import unsummed

# Where one device's part of an array begins and ends, for each dimension.
_Bounds = tuple[tuple[int, int], ...]


def transfer(
    leaves: Sequence[Any],
    shardings: Sequence[Any],
    *,
    donate: bool = False,
    alias: bool = True,
) -> list[Any]:
    """Arrays, each with its sharding; those without one, or that have it, as they are.

    What stays on its devices, in whatever order, is laid out by one compiled program for each
    mesh. What comes from other devices, and has the parts that are wanted, is copied from device
    to device, all in one go. The rest is brought to each device part by part from the host; a
    part of an array of other devices is fetched for it, never the whole. No array of NumPy shares
    memory with the result.

    Args:
      leaves: arrays of NumPy or JAX, numbers, abstract arrays. Those that this process holds as a
        whole are taken to be the same in each process.
      shardings: concrete ones (``Format`` too), or None, one for each.
      donate: whether to free the arrays that are replaced, unless one of ``leaves`` stays as it
        is or goes to two places.
      alias: whether the result may have buffers in common with ``leaves``.
    """
    alias = alias and not donate
    result = list(leaves)
    places: dict[tuple[int, Any], list[int]] = {}
    for slot, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            result[slot] = leaf if sharding is None else leaf.update(sharding=sharding)
        elif sharding is not None and not (is_laid_out(leaf, sharding) and (alias or donate)):
            places.setdefault((id(leaf), sharding), []).append(slot)
    sources = [leaves[slots[0]] for slots in places.values()]
    goals = [sharding for _, sharding in places]
    kept = {id(leaf) for leaf in result} - {id(leaf) for leaf in sources}
    kept |= {own for own, times in Counter(map(id, sources)).items() if times > 1}
    freed = [donate and isinstance(x, jax.Array) and id(x) not in kept for x in sources]
    arrays = _moved(sources, goals, freed, alias)
    for slots, array in zip(places.values(), arrays, strict=True):
        for slot in slots:
            result[slot] = array
    for source, is_freed in zip(sources, freed, strict=True):
        if is_freed and not source.is_deleted():
            source.delete()
    return result


def is_laid_out(leaf: Any, sharding: Any) -> bool:
    """Whether an array has just this sharding, for good."""
    return isinstance(leaf, jax.Array) and leaf.committed and leaf.sharding == sharding


def obstacle(leaf: Any, sharding: Sharding) -> str | None:
    """Why a concrete array cannot get a sharding, whatever its shape is; None if it can."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return "the mesh is abstract, without devices to place the array on"
    if not isinstance(leaf, jax.Array):
        return None
    if leaf.is_deleted():
        return "its data was deleted or donated"
    if leaf.is_fully_addressable or leaf.sharding.device_set == sharding.device_set:
        return None
    return (
        "it lies on devices of other processes, and JAX moves it between these only; save it and "
        "restore it where it is to be"
    )


def _moved(
    sources: Sequence[Any], goals: Sequence[Any], freed: Sequence[bool], alias: bool
) -> list[Any]:
    """Each source with its goal as sharding, a new array for each."""
    arrays = list(sources)
    # JAX cannot move summands to other devices, only their sum.
    here = {p: unsummed(x.sharding) for p, x in enumerate(arrays) if _is_sum_left(x, goals[p])}
    _reshard(arrays, here, sources, freed)
    there = {p: goal for p, goal in enumerate(goals) if _is_sum_left(goal, arrays[p])}
    goals = [unsummed(goal) if p in there else goal for p, goal in enumerate(goals)]
    for place, (array, goal) in enumerate(zip(arrays, goals, strict=True)):
        if _is_cut(array, goal, alias):
            arrays[place] = _cut(array, goal)
    # XLA lays out anew in the main memory of devices only.
    ways = [_way(array, goal) for array, goal in zip(arrays, goals, strict=True)]
    known = {place: way for place, way in enumerate(ways) if way is not None}
    _put(arrays, {place: before for place, (before, _) in known.items()})
    _reshard(arrays, {place: after for place, (_, after) in known.items()}, sources, freed)
    same = [not alias and new is old for new, old in zip(arrays, sources, strict=True)]
    _put(arrays, dict(enumerate(goals)), anew=same, alias=alias)
    _reshard(arrays, there, sources, freed)
    return arrays


def _is_sum_left(one: Any, other: Any) -> bool:
    """Whether one of an array and a sharding is unreduced, and the other on other devices."""
    own, others = (getattr(x, "sharding", x) for x in (one, other))
    if not isinstance(own, NamedSharding) or not own.spec.unreduced:
        return False
    return _compat.device_assignment(own) != _compat.device_assignment(others)


def _put(
    arrays: list[Any], goals: dict[int, Any], anew: Sequence[bool] = (), alias: bool = False
) -> None:
    """Copies from device to device what is not where it should be, and what has to be ``anew``."""
    places = [
        place
        for place, goal in goals.items()
        if not is_laid_out(arrays[place], goal) or (anew and anew[place])
    ]
    if places:
        new = jax.device_put(
            [arrays[place] for place in places],
            [goals[place] for place in places],
            may_alias=None if alias else False,
        )
        for place, array in zip(places, new, strict=True):
            arrays[place] = array


def _way(array: Any, goal: Any) -> tuple[Sharding, Sharding] | None:
    """The layouts before and after a program that lays out an array anew on its own devices.

    None if no program is needed, or JAX has to find the way.
    """
    if not isinstance(array, jax.Array) or not isinstance(goal, NamedSharding):
        return None
    now = array.sharding
    if now.device_set != goal.device_set:
        return None
    before, after = _in_main_memory(now), _in_main_memory(goal)
    in_order = _compat.device_assignment(now) == _compat.device_assignment(goal)
    if in_order and before.is_equivalent_to(after, array.ndim):
        return None
    if not in_order and _compat.in_order_of(before, goal) is None:
        return None
    return before, after


def _reshard(
    arrays: list[Any], goals: dict[int, Any], sources: Sequence[Any], freed: Sequence[bool]
) -> None:
    """Lays arrays out anew on their own devices, with one program for each order of these."""
    groups: dict[Any, list[int]] = {}
    for place, goal in goals.items():
        groups.setdefault(_compat.device_assignment(goal), []).append(place)
    for devices, group in groups.items():
        ours = [place for place in group if freed[place] or arrays[place] is not sources[place]]
        others = [place for place in group if place not in set(ours)]
        old = [[_restated(arrays[p], goals[p], devices) for p in part] for part in (others, ours)]
        program = jax.jit(
            _joined, out_shardings=[goals[p] for p in (*others, *ours)], donate_argnums=1
        )
        with warnings.catch_warnings():
            # Buffers of another size than the new ones cannot be used again; they are freed.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            new = program(*old)
        for place, array in zip((*others, *ours), new, strict=True):
            arrays[place] = array


def _joined(one: list[Any], other: list[Any]) -> list[Any]:
    return [*one, *other]


def _restated(array: Any, goal: NamedSharding, devices: Any) -> Any:
    """The same buffers as an array whose devices are listed in the order of the goal."""
    if _compat.device_assignment(array.sharding) == devices:
        return array
    sharding = _compat.in_order_of(array.sharding, goal)
    assert sharding is not None
    buffers = {shard.device: shard.data for shard in array.addressable_shards}
    own = sharding.addressable_devices_indices_map(array.shape)
    return jax.make_array_from_single_device_arrays(
        array.shape, sharding, [buffers[device] for device in own], dtype=array.dtype
    )


def _in_main_memory(sharding: Any) -> Any:
    main = next(iter(sharding.device_set)).default_memory().kind
    return sharding if sharding.memory_kind == main else sharding.with_memory_kind(main)


def _is_cut(array: Any, goal: Any, alias: bool) -> bool:
    """Whether the parts of an array have to come from the host."""
    if not isinstance(goal, Sharding):
        return False
    if not isinstance(array, jax.Array):
        # As a number JAX keeps it weakly typed.
        return isinstance(array, np.ndarray | np.generic) or not goal.is_fully_addressable
    now = array.sharding
    if not array.is_fully_addressable or now.device_set == goal.device_set:
        return False
    if not goal.is_fully_addressable:
        return True
    if getattr(array, "weak_type", False):  # which only JAX's own way keeps
        return False
    # Where devices have a part already JAX does not copy it, also if asked to.
    may_share = alias or now.device_set.isdisjoint(goal.device_set)
    if now.memory_kind != goal.memory_kind:  # where some releases of JAX mix the two up
        return True
    device: Any = next(iter(now.device_set))
    if now.num_devices == 1 and device.platform != "cpu":  # there JAX cuts on the device
        return not may_share and goal.shard_shape(array.shape) == array.shape
    wanted, held = (_parts(sharding, array.shape) for sharding in (goal, now))
    return not (may_share and wanted <= held)


def _parts(sharding: Sharding, shape: Sequence[int]) -> set[_Bounds]:
    indices = sharding.devices_indices_map(tuple(shape)).values()
    return {_bounds(index, shape) for index in indices if index is not None}


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> _Bounds:
    return tuple(own.indices(size)[:2] for own, size in zip(index, shape, strict=True))


def _cut(array: Any, goal: Sharding) -> Any:
    """An array made of the parts that the devices of this process hold."""
    array = array if isinstance(array, jax.Array) else np.asarray(array)
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        part, dtype = _part_of_keys(array), array.dtype
    else:
        part = (_part_of_shards if isinstance(array, jax.Array) else _part_of_whole)(array, goal)
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return jax.make_array_from_callback(array.shape, goal, part, dtype=dtype)


def _part_of_whole(array: np.ndarray[Any, Any], goal: Sharding) -> Callable[[Any], Any]:
    devices: Any = goal.addressable_devices
    if any(device.platform == "cpu" for device in devices):
        # There a device may use the memory of an array that is handed to it.
        return lambda index: _copied(array[index])
    return lambda index: array[index]


def _copied(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    new = _empty(array.shape, array.dtype)
    new[...] = array
    return new


def _empty(shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """Memory that a CPU device takes over; where it begins elsewhere, XLA would copy it."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    aligned: np.ndarray[Any, Any] = memory[start : start + size].view(dtype)
    return aligned.reshape(shape)


_ALIGNMENT = 64


def _part_of_keys(array: jax.Array) -> Callable[[Any], Any]:
    return lambda index: array[index]


def _part_of_shards(array: jax.Array, _: Sharding) -> Callable[[Any], Any]:
    held = {_bounds(shard.index, array.shape): shard.data for shard in array.addressable_shards}

    def part(index: Any) -> Any:
        wanted = _bounds(index, array.shape)
        new = _empty([end - start for start, end in wanted], array.dtype)
        for own, data in held.items():
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, own, strict=True)]
            if all(start < end for start, end in common):
                new[_within(common, wanted)] = np.asarray(data)[_within(common, own)]
        return new

    return part


def _within(common: Sequence[tuple[int, int]], outer: _Bounds) -> tuple[slice, ...]:
    """Bounds as an index into the array that begins where ``outer`` begins."""
    pairs = zip(common, outer, strict=True)
    return tuple(slice(start - begin, end - begin) for (start, end), (begin, _) in pairs)
