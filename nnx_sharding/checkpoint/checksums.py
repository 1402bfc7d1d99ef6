"""Checksums of arrays, which do not depend on their shardings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..apply import finished_on_cpu
from .names import is_key

# Below this many bytes, moving an array takes less time than compiling a program for its shape.
_SMALL = 1 << 16


def checksums(arrays: Sequence[Any]) -> list[int | None]:
    """The checksum of each array, PRNG key or number, modulo 2³².

    It is the sum of a hash of each 32-bit word with its position. Large arrays are summed on their
    devices. None for an array of which this process holds nothing.
    """
    sums = [_sum(jax.random.key_data(x) if is_key(x) else x) for x in arrays]
    return [None if total is None else int(total) for total in jax.device_get(sums)]


def _sum(x: Any) -> Any:
    """The checksum of one array, as a number or as an array that is still being computed."""
    if not isinstance(x, jax.Array):
        return _on_host(np.asarray(x))
    if x.nbytes > _SMALL or not (x.is_fully_addressable or x.is_fully_replicated):
        [total] = finished_on_cpu([_on_devices(x)])
        return _local(total)
    return _on_host(np.asarray(x if x.is_fully_addressable else _local(x)))


def _local(x: jax.Array) -> Any:
    shards = x.addressable_shards
    return shards[0].data if shards else None


def _on_host(x: np.ndarray[Any, Any]) -> int:
    if x.dtype == np.bool_:
        x = x.astype(np.uint32)
    elif x.dtype.kind != "c":
        x = x.astype(_widened(x.dtype))
    word = {1: np.uint8, 2: np.uint16}.get(x.dtype.itemsize, np.uint32)
    words = np.ascontiguousarray(x).reshape(-1).view(word).astype(np.uint32)
    with np.errstate(over="ignore"):
        hashes = _mixed(words, np.arange(words.size, dtype=np.uint32), np.uint32)
        return int(np.sum(hashes, dtype=np.uint32))


@jax.jit
def _on_devices(x: jax.Array) -> jax.Array:
    words = _words(x)
    index = jnp.uint32(0)
    for axis, size in enumerate(words.shape):
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        index = index * jnp.uint32(size % 2**32) + along
    return jnp.sum(_mixed(words, index, jnp.uint32), dtype=jnp.uint32)


def _mixed(words: Any, index: Any, uint32: Any) -> Any:
    """A hash of each word with its index, one to one in the word.

    The steps are those of MurmurHash3 (fmix32), https://github.com/aappleby/smhasher.
    """
    x = words ^ (index * uint32(0x9E3779B9))
    x = (x ^ (x >> uint32(16))) * uint32(0x85EBCA6B)
    x = (x ^ (x >> uint32(13))) * uint32(0xC2B2AE35)
    return x ^ (x >> uint32(16))


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array as 32-bit words; a trailing dimension if elements have several."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    x = x.astype(_widened(x.dtype))
    word = {8: jnp.uint8, 16: jnp.uint16}.get(_bits(x.dtype), jnp.uint32)
    return jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)


def _widened(dtype: Any) -> Any:
    """A type of full bytes that holds all values of a smaller one."""
    if _bits(dtype) >= 8:
        return dtype
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32


def _bits(dtype: Any) -> int:
    info = jnp.finfo if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo
    return int(info(dtype).bits)
