"""Checksums of arrays, which do not depend on their shardings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core.place import finish_on_cpu
from .names import is_key

# Below this many bytes, moving an array takes less time than compiling a program for its shape.
_SMALL = 1 << 16


def checksums(arrays: Sequence[Any]) -> list[int | None]:
    """The checksum of each array, PRNG key or number, modulo 2³².

    It is the sum of a hash of each 32-bit word with its position. Large arrays are summed on their
    devices. None for an array of which this process holds no shard.
    """
    sums = [_sum(jax.random.key_data(x) if is_key(x) else x) for x in arrays]
    return [None if total is None else int(total) for total in jax.device_get(sums)]


def _sum(x: Any) -> Any:
    """The checksum of one array, as a number or as an array that is still being computed."""
    if isinstance(x, jax.Array):
        x = _local(x) if x.is_fully_replicated else x  # one copy is enough
        if x is None:
            return None
        if x.nbytes > _SMALL or not x.is_fully_addressable:
            [total] = finish_on_cpu([_on_devices(x)])
            return _local(total)
    words = _words(np.atleast_1d(x), np)
    index = np.arange(words.size, dtype=np.uint32).reshape(words.shape)
    with np.errstate(over="ignore"):
        return np.sum(_mixed(words, index), dtype=np.uint32)


def _local(x: jax.Array) -> Any:
    shards = x.addressable_shards
    return shards[0].data if shards else None


@jax.jit
def _on_devices(x: jax.Array) -> jax.Array:
    words = _words(x, jnp)
    index = jnp.uint32(0)
    for axis, size in enumerate(words.shape):  # unlike a reshaped arange, this is never replicated
        along = lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        index = index * jnp.uint32(size % 2**32) + along
    return jnp.sum(_mixed(words, index), dtype=jnp.uint32)


def _mixed(words: Any, index: Any) -> Any:
    """A hash of each word with its index, one to one in the word, by the steps of MurmurHash3."""
    x = words ^ (index * np.uint32(0x9E3779B9))
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _words(x: Any, numpy: Any) -> Any:
    """The bits of an array as 32-bit words; numbers of fewer bits are one word each."""
    if x.dtype == np.bool_:
        return x.astype(np.uint32)
    if x.dtype.kind == "c":
        x = numpy.stack([x.real, x.imag], axis=-1)
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    if (jnp.finfo if is_float else jnp.iinfo)(x.dtype).bits < 8:
        x = x.astype(np.float32 if is_float else np.int32)
    word = {1: np.uint8, 2: np.uint16}.get(x.dtype.itemsize, np.uint32)
    is_host = numpy is np
    return (
        np.ascontiguousarray(x).view(word) if is_host else lax.bitcast_convert_type(x, word)
    ).astype(np.uint32)
