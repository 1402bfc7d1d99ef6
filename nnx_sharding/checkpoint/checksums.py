"""Checksums of arrays, which do not depend on their shardings.

Orbax stores checksums of its own metadata, but not of the values of arrays. One bit of the values
was flipped in each of 59 checkpoints, and Orbax restored all with wrong numbers. So a checkpoint
has a checksum of each array in its manifest.

The checksum is a sum modulo 2³² of a hash of each 32-bit word and its position. A sum needs no
order, so each device can hash its own shard wherever it is, and only the sums are communicated.

    words   1.5f32  → 0x3fc00000, at the position 7 of the array
    salt    the position times a constant, modulo 2³², so that equal words count differently
    sum     the sum of the hashes of each word ^ salt

The host and the devices compute the same checksum: `_sum_on_host` and `_sum_on_devices` have the
same `_words`, `_salts` and steps of `_hashes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core.memory import fetch, is_keys
from ..core.place import finish_on_cpu

# An array, a PRNG key or a number.
Value: TypeAlias = Any

# Below this many bytes, moving an array takes less time than compiling a program for its shape.
_SMALL = 1 << 16

# The number of words that NumPy hashes at once. Intermediate results of so many words stay in the
# processor's caches, which takes a third of the time.
_CHUNK = 1 << 15

# The last steps of MurmurHash3: a shift and a factor for each round, and a last shift.
_ROUNDS = ((np.uint32(16), np.uint32(0x85EBCA6B)), (np.uint32(13), np.uint32(0xC2B2AE35)))
_LAST_SHIFT = np.uint32(16)


def checksums(arrays: Sequence[Value]) -> list[int | None]:
    """Returns the checksum of each array; None if this process holds no shard of it.

    Large arrays are summed on their devices, all at once.
    """
    sums = [_sum(jax.random.key_data(x) if is_keys(x) else x) for x in arrays]
    return [None if total is None else int(total) for total in jax.device_get(sums)]


def _sum(x: Value) -> jax.Array | np.uint32 | None:
    """Returns the checksum of one array, which may still be computed when this returns.

    Large arrays, and arrays of which this process holds only a part, are summed on their devices.
    Other arrays are summed on the host. None if this process holds no part.
    """
    if isinstance(x, jax.Array):
        if x.is_fully_replicated:  # one copy is enough
            x = _first_local_shard(x)
        if x is None:
            return None
        if x.nbytes > _SMALL or not x.is_fully_addressable:
            # On several CPU devices, `finish_on_cpu` waits for the result, because the programs for
            # several arrays would compete for threads, and might deadlock.
            [device_total] = finish_on_cpu([_sum_on_devices(x)])
            return _first_local_shard(device_total)  # each device has the total
    return _sum_on_host(_words(np.atleast_1d(x), np).reshape(-1))


def _sum_on_host(words: np.ndarray[Any, np.dtype[np.uint32]]) -> np.uint32:
    """Returns the checksum of the words of an array, chunk by chunk in the same memory.

    The memory of intermediate results is reused. New arrays would take 1.6 times as long, because
    the system would give and take back the memory of each.
    """
    total = np.uint32(0)
    size = min(len(words), _CHUNK)
    hashes, shifted = np.empty(size, np.uint32), np.empty(size, np.uint32)
    with np.errstate(over="ignore"):  # sums and products are modulo 2**32
        first_salts = _salts(np.arange(size, dtype=np.uint32))
        for first_position in range(0, len(words), _CHUNK):
            chunk = words[first_position : first_position + _CHUNK]
            x, y = hashes[: len(chunk)], shifted[: len(chunk)]
            # Salts are linear, so the salt of `first_position + i` is the sum of both salts.
            np.add(first_salts[: len(chunk)], _salts(np.uint32(first_position % 2**32)), out=x)
            np.bitwise_xor(x, chunk, out=x)
            # The same steps as in `_hashes`, but in place.
            for shift, factor in _ROUNDS:
                np.right_shift(x, shift, out=y)
                np.bitwise_xor(x, y, out=x)
                np.multiply(x, factor, out=x)
            np.right_shift(x, _LAST_SHIFT, out=y)
            np.bitwise_xor(x, y, out=x)
            total += np.sum(x, dtype=np.uint32)
    return total


def _first_local_shard(x: jax.Array) -> jax.Array | None:
    """Returns the first shard of this process; None if it has none."""
    shards = x.addressable_shards
    return shards[0].data if shards else None


@jax.jit
def _sum_on_devices(x: jax.Array) -> jax.Array:
    """Returns the checksum of a sharded array, as a replicated number."""
    words = _words(fetch(x), jnp)  # `fetch` moves an array in the memory of the host to the device
    # The position of each word in row-major order, modulo 2**32 like all numbers here. Iotas are
    # used because the compiler shards them like the words; it would replicate a reshaped arange.
    positions = jnp.uint32(0)
    for axis, size in enumerate(words.shape):
        index = lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        positions = positions * jnp.uint32(size % 2**32) + index
    return jnp.sum(_hashes(words, _salts(positions)), dtype=jnp.uint32)


def _salts(positions: Any) -> Any:  # np.ndarray or jax.Array, of uint32
    """Returns the salt of each position. Salts are linear: salt(i + j) = salt(i) + salt(j)."""
    return positions * np.uint32(0x9E3779B9)


def _hashes(words: jax.Array, salts: jax.Array) -> jax.Array:
    """Returns a hash of each word with its salt: the last steps of MurmurHash3.

    For one salt, different words have different hashes.
    """
    x = words ^ salts
    for shift, factor in _ROUNDS:
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> _LAST_SHIFT)


def _words(x: Any, numpy: ModuleType) -> Any:  # np.ndarray or jax.Array, as numpy says
    """Returns the bits of an array as 32-bit words.

    Numbers of fewer bits are one word each. Numbers of 64 bits are two words. Complex numbers have
    the words of the real part and of the imaginary part.

    Args:
      numpy: ``np`` for an array of NumPy, ``jnp`` for one of JAX.
    """
    if x.dtype == np.bool_:  # JAX cannot view the bits of booleans
        return x.astype(np.uint32)
    if x.dtype.kind == "c":  # JAX cannot view complex numbers as words
        x = numpy.stack([x.real, x.imag], axis=-1)
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    info: Any = jnp.finfo(x.dtype) if is_float else jnp.iinfo(x.dtype)  # type: ignore[no-untyped-call]
    if info.bits < 8:
        # Elements such as int4 share a byte in JAX, but not in NumPy. Their values are the same.
        x = x.astype(np.float32 if is_float else np.int32)
    # The bits of an element are read as one word of its size, or as two words of 32 bits.
    word = {1: np.uint8, 2: np.uint16}.get(x.dtype.itemsize, np.uint32)
    if numpy is np:
        return np.ascontiguousarray(x).view(word).astype(np.uint32, copy=False)
    return lax.bitcast_convert_type(x, word).astype(np.uint32)
