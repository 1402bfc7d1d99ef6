"""Moves arrays to other devices, shardings and memories, outside of any trace.

There is no single way in JAX, so an array takes up to three steps, in :func:`_perform`:

    it is on the host, or cut differently on other devices or on CPUs   joined there, and put
    the same devices have other parts                                   one compiled program
    other devices have the same parts                                   jax.device_put

Everything goes in as few programs and transfers as possible, and each old array can be freed as
soon as the new one is there. For what happens inside a trace, see ``constrain.py``.

This module decides on the steps of each array, and ``moves.py`` takes them. A *move* is one array
on its way to its *target*, a sharding; it is *ours* if it may be freed. A *step* is a move and the
sharding that it goes to next. Each step replaces ``move.array`` by the new array. An array is
*unreduced* if its value is the sum of the arrays on the devices. Arrays may be *aliased*: share
their memory with a new array.

From other modules:

    main_memory           a sharding with the same parts, in the main memory of the devices
    without_reductions    a sharding whose spec has no unreduced axes; itself if it has none
    device_assignment     the devices of a sharding in the order for which JAX compiles
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
    """Moves each array to its sharding; those without one, or that already have it, are returned.

    Args:
      leaves: NumPy or JAX arrays, numbers, abstract arrays. Arrays that this process holds in full
        are assumed to be equal in all processes.
      shardings: one for each leaf: a concrete sharding, a ``Format``, or None.
      donate: whether to free replaced arrays, unless they are among ``leaves`` also unchanged or
        with another sharding.
      alias: whether the result may share buffers with ``leaves``. It never does with NumPy arrays.
    """
    may_alias = alias and not donate  # the buffers of donated arrays are deleted
    result = list(leaves)
    # By the id of the array, or the slot of a number; whether it is a number; and the target.
    moves: dict[tuple[int, bool, Any], Move] = {}
    staying: set[int] = set()  # the ids of arrays that are also returned unchanged
    for slot, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            result[slot] = leaf if sharding is None else leaf.update(sharding=sharding)
        elif sharding is None or (is_placed(leaf, sharding) and (alias or donate)):
            # Returned itself. One that is placed is copied if neither sharing nor deleting it is
            # allowed, as for `place(..., copy=True)`.
            staying.add(id(leaf))
        else:
            # An array in several slots is moved once, so that it stays one array. ``leaves`` keeps
            # it alive, so that no other array gets its id. Equal numbers may be one object in
            # Python, but become an array each, or a call could not donate them.
            is_number = isinstance(leaf, bool | int | float | complex | np.generic)
            key = (slot if is_number else id(leaf), is_number, sharding)
            moves.setdefault(key, Move(leaf, sharding)).slots.append(slot)
    num_targets = Counter(id(move.array) for move in moves.values())
    for move in moves.values():
        array_id = id(move.array)
        is_unused = array_id not in staying and num_targets[array_id] == 1
        move.is_ours = donate and is_unused and isinstance(move.array, jax.Array)
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
    if leaf.is_fully_addressable:  # this process has all parts of it
        return None
    if leaf.sharding.device_set == sharding.device_set:  # a program on all of them moves it
        return None
    return (
        "it is on devices of other processes, and JAX moves it only between these; save it and "
        "restore it where it is needed"
    )


def _perform(moves: Sequence[Move], *, alias: bool) -> None:
    """Moves each array to its target, by the steps that it needs.

    Arrays that stay on their devices, in any order, are resharded by one compiled program for each
    mesh; on CPUs, whose collectives take longer than copies, only those of several processes.
    Arrays on other devices that have the wanted parts are copied from device to device, all
    together. The rest is joined on the host. ``alias`` says whether new arrays may share memory
    with old ones.
    """
    # 1. JAX cannot move unreduced arrays to other devices, only their sum, which is computed here.
    # If the target is unreduced, the sum goes there, and step 6 makes an unreduced array of it.
    unreduced = [move for move in moves if _is_unreduced_elsewhere(move.array, move.target)]
    reshard([Step(move, without_reductions(move.array.sharding)) for move in unreduced])
    to_unreduced = [move for move in moves if _is_unreduced_elsewhere(move.target, move.array)]
    last_steps = [Step(move, move.target) for move in to_unreduced]
    for move in to_unreduced:
        move.target = without_reductions(move.target)
    # 2. What takes the way over the host is at its target after this. The steps below find nothing
    # left to do for it.
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
    # 5. All that are not at their target yet, by copies from device to device.
    put([Step(move, move.target) for move in moves], alias=alias)
    # 6.
    reshard(last_steps)


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


def _is_unreduced_elsewhere(source: Any, other: object) -> bool:
    """Whether ``source`` is unreduced, and on other devices than ``other``.

    One of the two is an array, the other a sharding.
    """
    sharding = getattr(source, "sharding", source)
    if not isinstance(sharding, NamedSharding) or not sharding.spec.unreduced:
        return False
    other_sharding = getattr(other, "sharding", other)
    return _compat.device_assignment(sharding) != _compat.device_assignment(other_sharding)


# Cached, since the many arrays of a model have few different shardings.
@functools.lru_cache(maxsize=1024)
def _is_resharded(current: Any, target: Sharding | Format, ndim: int) -> bool:
    """Whether a program reshards an array, because its own devices have to exchange parts.

    Args:
      current: the sharding that the array has.
      target: the sharding that it gets. No program is made for a ``Format``.
      ndim: the number of dimensions of the array.
    """
    if not isinstance(target, NamedSharding) or current.device_set != target.device_set:
        return False
    # What is only in another memory is copied, not resharded.
    before, after = main_memory(current), main_memory(target)
    if _compat.device_assignment(current) != _compat.device_assignment(target):
        # A program takes devices in one order. JAX can only run it if the current sharding can be
        # written in the order of the target; None if it cannot.
        return _compat.in_order_of(before, target) is not None
    # Each CPU device has all parts of a replicated array.
    is_on_cpus = current.is_fully_addressable and _is_on_cpus(target)
    if current.is_fully_replicated and is_on_cpus:
        return False
    return not before.is_equivalent_to(after, ndim)


def _needs_host(move: Move, *, alias: bool) -> bool:
    """Whether an array has to be joined on the host, and put on its devices from there.

    ``alias`` says whether the new array may share memory with the old one.
    """
    array, target = move.array, move.target
    if not isinstance(target, Sharding):  # a Format, whose layout only JAX can make
        return False
    if not isinstance(array, jax.Array):
        # NumPy arrays are on the host. A Python number is put by JAX, which keeps it weakly typed;
        # but JAX cannot put one on devices of other processes.
        return isinstance(array, np.ndarray | np.generic) or not target.is_fully_addressable
    is_weak = bool(getattr(array, "weak_type", False))
    return _is_joined(
        array.sharding, target, array.shape, is_weak=is_weak, is_ours=move.is_ours, alias=alias
    )


# Cached, since the many arrays of a model have few different shardings and shapes: all tests
# together take ten times as long as the look-up.
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

    If not, a program reshards it (:func:`_is_resharded`), or ``jax.device_put`` copies it. The host
    is for what these cannot do, or take longer for: mostly, if the devices of the target need parts
    that no device has as a whole.

    Args:
      current: the sharding that it has.
      target: the sharding that it gets.
      shape: its shape.
      is_weak: whether its type is weak, as that of a Python number.
      is_ours: whether it may be freed.
      alias: whether the new array may share memory with it.
    """
    # An array of several processes: no host has all of it, so a program reshards it.
    if not current.is_fully_addressable:
        return False
    # To devices of several processes: each process has the whole array, and puts its parts of it.
    if not target.is_fully_addressable:
        return bool(current.device_set != target.device_set)
    if is_weak:  # a weak type is kept only by jax.device_put
        return False
    # On the same devices, what would be resharded goes over the host only on CPUs, whose
    # collectives take longer than copies. Only a program can add up an unreduced array, or reuse
    # the buffers of a donated one.
    if current.device_set == target.device_set:
        is_sum = any(without_reductions(x) is not x for x in (current, target))
        is_for_program = is_ours or is_sum or not _is_on_cpus(target)
        return _is_resharded(current, target, len(shape)) and not is_for_program
    # To other devices and another memory: some releases of JAX confuse the two memories.
    if current.memory_kind != target.memory_kind:
        return True
    # A device that is in both shardings would share the memory of its part: even if a copy is asked
    # for, JAX makes none there. The host makes one.
    is_safe = alias or current.device_set.isdisjoint(target.device_set)
    device: Any = next(iter(current.device_set))
    # From one GPU or TPU: JAX slices the array there, into new memory unless all of it is wanted.
    if current.num_devices == 1 and device.platform != "cpu":
        return not is_safe and target.shard_shape(shape) == shape
    # Parts that some device has can be copied from there.
    has_all_parts = _parts(target, shape) <= _parts(current, shape)
    return not is_safe or not has_all_parts


def _parts(sharding: Sharding, shape: tuple[int, ...]) -> set[Bounds]:
    """Returns the different parts of an array that devices hold."""
    return {bounds_of(index, shape) for index in sharding.devices_indices_map(shape).values()}
