"""In which memory an array is, and computing with what is not in the main memory of its devices.

A device has a main memory, and often memories of its host: ``pinned_host``, ``unpinned_host``. JAX
computes with arrays in main memory only. What computes with arrays that a user may have offloaded
moves them there (:func:`fetch`), and results to where their origin was (:func:`move`). What
computes with NumPy joins the parts of an array in the memory of this process (:func:`joined`).

What says where an array is: the memory kind of its sharding (a string), or, in a trace, the
``MemorySpace`` of its type: ``Host`` or ``Device``. A trace does not tell ``unpinned_host`` from
main memory, and computes with both. In this module, None stands for main memory.
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
_ALIGNMENT = 64  # of memory that a CPU device adopts; XLA copies buffers that are not aligned
# A memory kind, or in a trace the ``MemorySpace`` of the host; None for main memory.
Memory: TypeAlias = str | enum.Enum | None


@functools.lru_cache(maxsize=16)  # clients are a few for each process; a topology has one, too
def _main_memory_kind(client: Any) -> str:
    """Returns the kind of the main memory of a client's devices.

    A client has devices of one platform, so the first is asked for all. It has to be one of this
    process: for others, as on a TPU pod of several hosts, JAX raises UNIMPLEMENTED. A process has
    at least one.
    """
    local = (d for d in client.devices() if d.process_index == client.process_index())
    kind: str = next(local).default_memory().kind
    return kind


def main_memory(sharding: Sharding) -> Any:
    """Returns the same sharding in the main memory of its devices; itself if it is there."""
    device: Any = next(iter(sharding.device_set))
    main = _main_memory_kind(device.client)
    return sharding if sharding.memory_kind == main else sharding.with_memory_kind(main)


def other_memory(sharding: object) -> str | None:
    """Returns the memory kind of a sharding; None for main memory, and without any."""
    if not isinstance(sharding, Sharding):
        return None
    # An abstract mesh has no devices to ask for their main memory. Its memory kind is None unless
    # the user has given one.
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
    """Returns an array in a memory of its devices, with the sharding that it has.

    Args:
      x: the array, also a traced one.
      memory: what ``memory_of`` returns for an array: a memory kind, which is never that of main
        memory, ``MemorySpace.Host`` in a trace, or None for main memory.
    """
    if memory_of(x) == memory:
        return x
    if isinstance(memory, str) and not isinstance(x, jax.core.Tracer):
        return jax.device_put(x, x.sharding.with_memory_kind(memory))
    # To a space, JAX moves an array without changing its sharding. In a trace there is no other
    # way: a tracer has no sharding with a memory kind, so the kind of host memory is left to JAX.
    space = jax.memory.Space.Device if memory is None else jax.memory.Space.Host
    return jax.device_put(x, space)


def compute(function: Callable[..., Any], x: AnyArray, *others: AnyArray) -> Any:
    """Calls a function of arrays in any memories; moves the result to the memory of the first."""
    return move(function(fetch(x), *map(fetch, others)), memory_of(x))


def copied(x: jax.Array) -> jax.Array:
    """Returns a copy in the same memory, also of keys that several processes hold."""
    copy: jax.Array = move(x.copy(), memory_of(x))  # `copy` moves what is in unpinned_host
    return copy


def is_keys(x: object) -> bool:
    """Whether ``x`` is an array of PRNG keys, which may be abstract."""
    return hasattr(x, "dtype") and bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def bounds_of(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    """Returns the bounds of the part of an array that an index selects.

    ``[0:4, :]`` of the shape ``(8, 6)`` has ``((0, 4), (0, 6))``.
    """
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def aligned(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Returns an uninitialised array, whose memory a CPU device adopts without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT  # to the next address that is aligned
    return memory[offset : offset + size].view(dtype).reshape(shape)


def joined(array: AnyArray) -> np.ndarray[Any, Any]:
    """Copies all of an array, whose parts this process holds, into new memory of the host.

    ``jax.device_put`` to a CPU device adopts this memory instead of copying it once more.
    """
    is_sharded = isinstance(array, jax.Array)
    # Its type in JAX: without x64, 64-bit types become 32-bit ones. JAX raises an error for what it
    # has no type for, such as a masked array, which would lose its mask here.
    dtype = jax.typeof(array).dtype
    source: Any = array if is_sharded else np.asarray(array)
    whole = aligned(source.shape, dtype)
    if is_sharded:
        # Of shards with the same bounds, which are replicas of one part, one is enough.
        shards = {
            bounds_of(shard.index, source.shape): shard for shard in source.addressable_shards
        }
        for shard in shards.values():
            whole[shard.index] = np.asarray(shard.data)
    else:
        whole[...] = source
    return whole
