"""What a batch may consist of, as arrays that JAX takes without another copy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..diagnostics.differences import show


def host_array(x: Any) -> Any:
    """An array with the memory of ``x``, where that can be; numbers become arrays.

    Raises:
      TypeError: ``x`` is no array, and why.
    """
    if isinstance(x, bool | int | float | complex) and not isinstance(x, np.generic):
        return np.asarray(x, jnp.result_type(type(x)))
    if isinstance(x, jax.Array):
        return x
    if not isinstance(x, np.ndarray | np.generic):
        x = _converted(x)
    array = np.asarray(x)
    if array.dtype.kind in "OSUMm" or array.dtype.type is np.void:
        raise TypeError(f"an array of dtype {array.dtype}")
    return array


def _converted(x: Any) -> Any:
    """A foreign array, such as a tensor of PyTorch, as one of NumPy."""
    try:
        if hasattr(x, "__array__"):
            try:
                return np.asarray(x)
            except TypeError:
                if not hasattr(x, "__dlpack__"):
                    raise
        if hasattr(x, "__dlpack__"):
            return np.asarray(jax.dlpack.from_dlpack(x))  # knows bfloat16, unlike NumPy
    except Exception as error:  # of another library, which may raise anything
        raise TypeError(f"a {type(x).__name__} that gives no array: {error}") from error
    raise TypeError(f"{show(x)} of type {type(x).__name__}")


def padded(array: Any, rows: int, other: Any) -> Any:
    """The array with ``rows`` rows, of which its last one fills those that it lacks; one copy.

    If it has none, ``other`` does. A row that was loaded is one that a model can compute with;
    zeros might become NaN, which no mask takes out of a sum.
    """
    count = len(array)
    if count == rows:
        return array
    own = np.asarray(array)
    result = np.empty((rows, *own.shape[1:]), own.dtype)
    result[:count] = own
    result[count:] = own[-1] if count else other
    return result
