"""Moves arrays to other devices, shardings and memories, outside of any trace.

JAX has no single way to do this, so an array takes up to three steps, in :func:`_perform`:

    it is on the host, or cut differently on other devices or on CPUs   joined on the host, and put
    the same devices have other parts                                   one compiled program
    other devices have the same parts                                   jax.device_put

All arrays go in as few programs and transfers as possible, and each old array can be freed as soon
as the new one is there. ``constrain.py`` does the same inside of a trace.

This module decides on the steps of each array, and ``moves.py`` takes them. A *move* is one array
on its way to its *target*, a sharding. The array is *ours* if it may be freed. A *step* is a move
and the sharding that the array gets next. Each step replaces ``move.array`` by the new array. An
array is *unreduced* if its value is the sum of the arrays on the devices. An array is *aliased* if
a new array shares its memory.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .. import _compat
from ..specs.fitting import without_reductions
from ..specs.types import AnyArray, Arrays
from .memory import Bounds, bounds_of, main_memory
from .moves import Move, Step, is_placed, put, put_from_host, reshard


def place_arrays(
    leaves: Arrays,
    shardings: Sequence[Sharding | Format | None],
    *,
    donate: bool = False,
    alias: bool = True,
) -> list[Any]:
    """Moves each array to its sharding, and returns the new arrays, by slot.

    An array without a sharding is returned itself. An array that already has its sharding is
    returned itself as well, or copied if both ``donate`` and ``alias`` are False.

    Args:
      leaves: NumPy or JAX arrays, numbers, abstract arrays. Arrays that this process holds in full
        are assumed to be equal in all processes.
      shardings: one for each leaf: a concrete sharding, a ``Format``, or None.
      donate: whether to free replaced arrays. An array that is in ``leaves`` once more, with None
        or with another sharding, is not freed.
      alias: whether the result may share buffers with ``leaves``. It never does with NumPy arrays.
    """
    may_alias = alias and not donate  # the buffers of donated arrays are deleted
    # An array that has its sharding already may be neither shared nor deleted, as in `place(...,
    # copy=True)`. Its move then makes a copy.
    copies_placed = not alias and not donate
    result = list(leaves)
    # The key is the id of an array or the slot of a number, whether it is a number, and the target.
    moves: dict[tuple[int, bool, Any], Move] = {}
    staying: set[int] = set()  # the ids of arrays that are also returned unchanged
    for slot, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            result[slot] = leaf if sharding is None else leaf.update(sharding=sharding)
        elif sharding is None or (is_placed(leaf, sharding) and not copies_placed):
            staying.add(id(leaf))  # the leaf itself is returned
        else:
            # An array in several slots is moved once, so that it stays one array. Its id is safe as
            # a key because ``leaves`` keeps it alive. Equal numbers may be one object in Python,
            # but each becomes an array, because a call could not donate one array twice.
            is_number = isinstance(leaf, bool | int | float | complex | np.generic)
            key = (slot if is_number else id(leaf), is_number, sharding)
            moves.setdefault(key, Move(leaf, sharding)).slots.append(slot)
    num_targets = Counter(id(move.array) for move in moves.values())  # by the id of an array
    for move in moves.values():
        array_id = id(move.array)
        has_no_other_use = array_id not in staying and num_targets[array_id] == 1
        move.is_ours = donate and has_no_other_use and isinstance(move.array, jax.Array)
    donated = [move.array for move in moves.values() if move.is_ours]  # the old arrays
    _perform([*moves.values()], alias=may_alias)  # `move.array` is then the new one
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
    if leaf.is_fully_addressable:  # this process has all parts of the array
        return None
    if leaf.sharding.device_set == sharding.device_set:  # a program on these devices moves it
        return None
    return (
        "it is on devices of other processes, and JAX moves it only between these; save it and "
        "restore it where it is needed"
    )


def _perform(moves: Sequence[Move], *, alias: bool) -> None:
    """Moves each array to its target, by the steps that it needs.

    One compiled program for each mesh reshards the arrays that stay on their devices, in any order.
    On CPUs, it does so only with arrays of several processes, because collectives take longer than
    copies there. One ``jax.device_put`` copies all arrays whose devices have the wanted parts. All
    other arrays are joined on the host. ``alias`` says whether new arrays may share memory with
    old ones.
    """
    # 1. JAX cannot move an unreduced array to other devices, so the sum is computed here, and is
    # moved. If the target is unreduced, step 6 makes an unreduced array of the sum.
    unreduced = [move for move in moves if _is_unreduced_elsewhere(move.array, move.target)]
    reshard([Step(move, without_reductions(move.array.sharding)) for move in unreduced])
    # Here the target is the unreduced one of the two, so the arguments are exchanged.
    to_unreduced = [move for move in moves if _is_unreduced_elsewhere(move.target, move.array)]
    last_steps = [Step(move, move.target) for move in to_unreduced]
    for move in to_unreduced:
        move.target = without_reductions(move.target)
    # 2. Arrays that go over the host are at their targets after this, so the steps below find
    # nothing left to do for them.
    put_from_host([move for move in moves if _needs_host(move, alias=alias)])
    # 3 and 4. A program reshards arrays on their own devices. XLA does so only in their main
    # memory, so arrays in another memory go there first, and step 5 brings them to the target's.
    resharded = [
        move
        for move in moves
        if isinstance(move.array, jax.Array)
        and _is_resharded(move.array.sharding, move.target, move.array.ndim)
    ]
    put([Step(move, main_memory(move.array.sharding)) for move in resharded])
    reshard([Step(move, main_memory(move.target)) for move in resharded])
    # 5. All arrays that are not at their target yet are copied from device to device.
    put([Step(move, move.target) for move in moves], alias=alias)
    # 6. The sums of step 1 become unreduced arrays.
    reshard(last_steps)


def finish_on_cpu(arrays: list[Any], known: Arrays = ()) -> list[Any]:
    """Waits for new arrays on several CPU devices; returns ``arrays``.

    The wait is needed because programs with collectives that run at the same time on CPUs compete
    for threads and may deadlock.

    Args:
      arrays: the arrays after a move.
      known: the arrays before the move, for which nothing waits.
    """
    old_ids = set(map(id, known))
    new_arrays = [x for x in arrays if isinstance(x, jax.Array) and id(x) not in old_ids]
    jax.block_until_ready([x for x in new_arrays if _is_on_cpus(x.sharding)])
    return arrays


@functools.lru_cache(maxsize=1024)
def _is_on_cpus(sharding: Any) -> bool:
    """Whether a sharding is on several CPU devices; False for a single CPU device."""
    devices = sharding.device_set
    return len(devices) > 1 and next(iter(devices)).platform == "cpu"


def _is_unreduced_elsewhere(source: Any, other: object) -> bool:
    """Whether ``source`` is unreduced, and on other devices than ``other``.

    One of the two is an array, the other a sharding.
    """
    sharding = getattr(source, "sharding", source)
    if not isinstance(sharding, NamedSharding) or not sharding.spec.unreduced:
        return False
    other_sharding = getattr(other, "sharding", other)
    return _compat.device_assignment(sharding) != _compat.device_assignment(other_sharding)


# Results are cached, because the many arrays of a model have few different shardings.
@functools.lru_cache(maxsize=1024)
def _is_resharded(current: Any, target: Sharding | Format, ndim: int) -> bool:
    """Whether a program reshards an array, because its own devices have to exchange parts.

    Args:
      target: the sharding that it gets. No program is made for a ``Format``.
    """
    if not isinstance(target, NamedSharding) or current.device_set != target.device_set:
        return False
    # Memories are left out, because an array that is only in another memory is copied.
    current_in_main, target_in_main = main_memory(current), main_memory(target)
    if _compat.device_assignment(current) != _compat.device_assignment(target):
        # A program takes devices in one order. So JAX can run it only if the current sharding can
        # be written in the order of the target (None: it cannot).
        return _compat.in_order_of(current_in_main, target) is not None
    # A replicated array on CPUs is copied, because each device has all parts of it.
    is_on_cpus = current.is_fully_addressable and _is_on_cpus(target)
    if current.is_fully_replicated and is_on_cpus:
        return False
    return not current_in_main.is_equivalent_to(target_in_main, ndim)


def _needs_host(move: Move, *, alias: bool) -> bool:
    """Whether an array has to be joined on the host, and put on its devices from there.

    ``alias`` says whether the new array may share memory with the old one.
    """
    array, target = move.array, move.target
    if not isinstance(target, Sharding):  # only JAX can make the layout of a Format
        return False
    if not isinstance(array, jax.Array):
        # A NumPy array is on the host. JAX puts a Python number, because it keeps the weak type.
        # But JAX cannot put a number on devices of other processes.
        return isinstance(array, np.ndarray | np.generic) or not target.is_fully_addressable
    is_weak = bool(getattr(array, "weak_type", False))
    return _is_joined(
        array.sharding, target, array.shape, is_weak=is_weak, is_ours=move.is_ours, alias=alias
    )


# Results are cached, because the many arrays of a model have few different shardings and shapes,
# and all tests together take ten times as long as the look-up.
@functools.lru_cache(maxsize=1024)
def _is_joined(
    current: Any,
    target: Sharding,
    shape: tuple[int, ...],
    *,
    is_weak: bool,
    is_ours: bool,
    alias: bool,
) -> bool:
    """Whether a JAX array is joined on the host, to get another sharding.

    Otherwise a program reshards it (:func:`_is_resharded`), or ``jax.device_put`` copies it. An
    array goes over the host if these two cannot move it, or take longer. In most cases this is
    because the devices of the target need parts that no device has as a whole.

    Args:
      shape: the shape of the array.
      is_weak: whether the array's type is weak, like that of a Python number.
      is_ours: whether the array may be freed.
      alias: whether the new array may share memory with the old one.
    """
    # A program reshards an array of several processes, because no host has all of it.
    if not current.is_fully_addressable:
        return False
    # If the target has devices of several processes, each process has the whole array, and puts
    # its parts.
    if not target.is_fully_addressable:
        return bool(current.device_set != target.device_set)
    if is_weak:  # only jax.device_put keeps a weak type
        return False
    # On the same devices, a program reshards the array. Only on CPUs it goes over the host, because
    # collectives take longer than copies there. But only a program can add up an unreduced array,
    # or reuse the buffers of a donated one.
    if current.device_set == target.device_set:
        is_sum = any(without_reductions(x) is not x for x in (current, target))
        is_for_program = is_ours or is_sum or not _is_on_cpus(target)
        return _is_resharded(current, target, len(shape)) and not is_for_program
    # An array that gets other devices and another memory goes over the host, because some releases
    # of JAX confuse the two memories.
    if current.memory_kind != target.memory_kind:
        return True
    # A device that is in both shardings would share the memory of its part, because JAX makes no
    # copy there, even if one is asked for. The way over the host makes a copy.
    may_share_memory = alias or current.device_set.isdisjoint(target.device_set)
    device: Any = next(iter(current.device_set))
    # JAX slices an array on one GPU or TPU there, into new memory unless all of it is wanted.
    if current.num_devices == 1 and device.platform != "cpu":
        return not may_share_memory and target.shard_shape(shape) == shape
    # `device_put` can copy a part only from a device that has it as a whole.
    has_all_parts = _parts(target, shape) <= _parts(current, shape)
    return not may_share_memory or not has_all_parts


def _parts(sharding: Sharding, shape: tuple[int, ...]) -> set[Bounds]:
    """Returns the different parts of an array that devices hold."""
    return {bounds_of(index, shape) for index in sharding.devices_indices_map(shape).values()}
