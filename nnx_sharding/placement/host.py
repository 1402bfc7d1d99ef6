"""Leaves of a batch as arrays that JAX takes without another copy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..diagnostics.differences import show


def host_array(x: Any) -> Any:
    """An array that shares the memory of ``x`` where possible; numbers become arrays.

    Raises:
      TypeError: ``x`` is not an array, and why.
    """
    if isinstance(x, bool | int | float | complex) and not isinstance(x, np.generic):
        return np.asarray(x, jnp.result_type(type(x)))
    if isinstance(x, jax.Array):
        return x
    array = np.asarray(x if isinstance(x, np.ndarray | np.generic) else _converted(x))
    if array.dtype.kind in "OSUMm" or array.dtype.type is np.void:
        raise TypeError(f"an array of dtype {array.dtype}")
    return array


def _converted(x: Any) -> Any:
    """A foreign array, such as a tensor of PyTorch, as a NumPy array."""
    try:
        if hasattr(x, "__array__"):
            try:
                return np.asarray(x)
            except TypeError:
                if not hasattr(x, "__dlpack__"):
                    raise
        if hasattr(x, "__dlpack__"):
            return np.asarray(jax.dlpack.from_dlpack(x))  # supports bfloat16, unlike NumPy
    except Exception as error:  # of another library, which may raise anything
        raise TypeError(f"a {type(x).__name__} that gives no array: {error}") from error
    raise TypeError(f"{show(x)} of type {type(x).__name__}")


def padded(array: Any, rows: int, filler: Any) -> Any:
    """The array with ``rows`` rows: its last row, or ``filler`` if it has none, is repeated.

    A loaded row is one that a model can compute with; zeros might become NaN, which no mask removes
    from a sum.
    """
    count = len(array)
    if count == rows:
        return array
    source = np.asarray(array)
    result = np.empty((rows, *source.shape[1:]), source.dtype)
    result[:count] = source
    result[count:] = source[-1:] if count else filler
    return result
