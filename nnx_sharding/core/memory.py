"""In which memory an array is, and computing with arrays outside of the main memory of devices.

A device has a main memory, and often memories of its host: ``pinned_host``, ``unpinned_host``. JAX
computes with arrays in main memory only. Code that computes with arrays that a user may have
offloaded first moves the arrays to main memory (:func:`fetch`), and then moves the results to the
memory where the arrays were (:func:`move`). Code that computes with NumPy joins the parts of an
array in the memory of this process (:func:`joined`).

The memory kind of an array's sharding (a string) says where the array is. In a trace, the
``MemorySpace`` of the array's type does: ``Host`` or ``Device``. A trace does not tell
``unpinned_host`` from main memory, and computes with both. In this module, None stands for main
memory.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from ..specs.types import AnyArray

# The beginning and end of one device's part of an array, in each dimension.
Bounds: TypeAlias = tuple[tuple[int, int], ...]
_ALIGNMENT = 64  # bytes; a CPU device adopts memory that is aligned so, and copies any other
# A memory kind, or in a trace the ``MemorySpace`` of the host; None for main memory.
Memory: TypeAlias = str | enum.Enum | None


@functools.lru_cache(maxsize=16)  # a process has a few clients, and each topology has one
def _main_memory_kind(client: Any) -> str:
    """Returns the kind of the main memory of a client's devices.

    A client has devices of one platform, so one device is asked for all. The device has to be one
    of this process, because JAX raises UNIMPLEMENTED for devices of other processes, such as those
    of other hosts of a TPU pod. Each process has at least one device.
    """
    local_devices = (d for d in client.devices() if d.process_index == client.process_index())
    kind: str = next(local_devices).default_memory().kind
    return kind


def main_memory(sharding: Sharding) -> Any:
    """Returns the same sharding in the main memory of its devices: itself if it is there."""
    device: Any = next(iter(sharding.device_set))
    main = _main_memory_kind(device.client)
    return sharding if sharding.memory_kind == main else sharding.with_memory_kind(main)


def other_memory(sharding: object) -> str | None:
    """Returns the memory kind of a sharding; None for main memory, and if there is no sharding."""
    if not isinstance(sharding, Sharding):
        return None
    # An abstract mesh has no devices to ask for their main memory. The memory kind of the sharding
    # is then None, unless the user has given one.
    is_abstract = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)
    if not is_abstract and main_memory(sharding) is sharding:
        return None
    return sharding.memory_kind


def memory_of(x: AnyArray) -> Memory:
    """Returns the memory of an array; None for what is not an array."""
    if isinstance(x, jax.core.Tracer):
        space = getattr(jax.typeof(x), "memory_space", None)
        return space if space is jax.memory.Space.Host else None
    return other_memory(getattr(x, "sharding", None))


def fetch(x: AnyArray) -> Any:
    """Returns an array in the main memory of its devices."""
    return move(x, None)


def move(x: AnyArray, memory: Memory) -> Any:
    """Returns an array in a memory of its devices, with an unchanged sharding.

    Args:
      x: the array, also a traced one.
      memory: what ``memory_of`` returns for an array: a memory kind, which is never that of main
        memory, ``MemorySpace.Host`` in a trace, or None for main memory.
    """
    if memory_of(x) == memory:
        return x
    if isinstance(memory, str) and not isinstance(x, jax.core.Tracer):
        return jax.device_put(x, x.sharding.with_memory_kind(memory))
    # `device_put` to a memory space keeps the array's sharding. In a trace there is no other way,
    # because a tracer has no sharding with a memory kind. So JAX chooses the kind of host memory.
    space = jax.memory.Space.Device if memory is None else jax.memory.Space.Host
    return jax.device_put(x, space)


def compute(function: Callable[..., Any], x: AnyArray, *others: AnyArray) -> Any:
    """Calls a function of arrays in any memories; returns the result in the memory of the first."""
    return move(function(fetch(x), *map(fetch, others)), memory_of(x))


def copied(x: jax.Array) -> jax.Array:
    """Returns a copy in the same memory, also of keys that several processes hold."""
    # `x.copy()` of an array in unpinned_host is in another memory, so it is moved back.
    copy: jax.Array = move(x.copy(), memory_of(x))
    return copy


def is_keys(x: object) -> bool:
    """Whether ``x`` is an array of PRNG keys, which may be abstract."""
    return hasattr(x, "dtype") and bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def bounds_of(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    """Returns the bounds of the part of an array that an index selects.

    For the index ``[0:4, :]`` and the shape ``(8, 6)``, these are ``((0, 4), (0, 6))``.
    """
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def aligned(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Returns an uninitialised array, whose memory a CPU device adopts without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)  # has an aligned part of this size
    offset = -memory.ctypes.data % _ALIGNMENT  # the distance to the next aligned address
    return memory[offset : offset + size].view(dtype).reshape(shape)


def joined(array: AnyArray) -> np.ndarray[Any, Any]:
    """Copies all of an array, whose parts this process holds, into new memory of the host.

    ``jax.device_put`` to a CPU device adopts this memory instead of copying it once more.
    """
    is_sharded = isinstance(array, jax.Array)
    # The dtype is that of JAX: without x64, 64-bit types become 32-bit ones. `jax.typeof` raises an
    # error if JAX has no such type. A masked array, for example, would lose its mask here.
    dtype = jax.typeof(array).dtype
    source: Any = array if is_sharded else np.asarray(array)
    host_array = aligned(source.shape, dtype)
    if is_sharded:
        # Shards with the same bounds are replicas, so one shard is copied for each part.
        shards = {
            bounds_of(shard.index, source.shape): shard for shard in source.addressable_shards
        }
        for shard in shards.values():
            host_array[shard.index] = np.asarray(shard.data)
    else:
        host_array[...] = source
    return host_array
