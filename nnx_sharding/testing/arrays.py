"""Names and copies the arrays of arguments and results, and measures how far two are apart.

`flatten` splits a pytree with modules into ``leaves``, its arrays and numbers by *slot*, and a
``structure``, from which `unflatten` builds the pytree again.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..core.flatten import flatten
from ..core.structure import locations_in
from ..core.unflatten import unflatten
from ..specs.paths import accessor
from .rounding import Rounding, is_inexact

Array: TypeAlias = "jax.Array | np.ndarray[Any, Any]"


def arrays_of(named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arrays in named values by expressions for them; random keys become their words.

    For ``{"model": model, "x": x}`` the result is ``{"model.up.kernel": …, "x": …}``. An array that
    is shared has its first name.
    """
    flat = flatten(dict(named))
    arrays = {}
    # A location is the path and the slots of a Variable, or of an array outside of Variables. The
    # first key of a path is one of the names.
    for location in locations_in(flat.structure):
        name, *path = location.path
        holds_pytree = len(location.slots) > 1  # a Variable with several arrays
        for number, slot in enumerate(location.slots):
            leaf = flat.leaves[slot]
            if isinstance(leaf, jax.Array):  # leaves are numbers and NumPy arrays, too
                keys = (*path, number) if holds_pytree else tuple(path)
                arrays[accessor(str(name), keys)] = raw(leaf)
    return arrays


def raw(x: jax.Array | np.ndarray[Any, Any]) -> Any:
    """Returns an array as it is, or the words of an array of PRNG keys."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def copied(args: Any, rounding: Rounding | None = None, seed: int = 0) -> Any:
    """Copies arguments to new arrays on no particular device.

    Args:
      args: a pytree with modules, which are copied as well.
      rounding: the rounding errors by which each number is changed, up or down at random; None to
        change nothing. Random keys stay as they are.
      seed: the seed of the random signs.
    """
    flat, random = flatten(args), np.random.default_rng(seed)

    def copy_leaf(x: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray):
            return x
        array = np.asarray(raw(x))
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(jnp.array(array), impl=jax.random.key_impl(x))
        if rounding is not None and is_inexact(x):
            signs = random.choice([-1, 1], x.shape)
            array = array * (1 + signs * rounding.relative(x.dtype))  # in float64, or complex128
        # NumPy converts the dtype, because JAX warns if it is asked for a dtype that it narrows,
        # such as int64.
        return jnp.array(np.asarray(array, x.dtype))

    return unflatten(flat.structure, [*map(copy_leaf, flat.leaves)]).root


def numbers(x: Array) -> np.ndarray[Any, Any]:
    """Returns an array as complex128 or float64, in which differences are exact enough."""
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def largest_difference(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    """Returns the largest difference of two arrays; NaN if only one of two elements is NaN.

    Elements that are the same infinity, or both NaN, have the difference 0.
    """
    with np.errstate(invalid="ignore"):
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        return float(np.where(same, 0, np.abs(x - y)).max(initial=0))


def distance_of_shards(x: np.ndarray[Any, Any], shards: np.ndarray[Any, Any]) -> float | None:
    """Returns the largest difference between an array and its shards in the best layout.

    The layout of the shards is not known where they are recorded, so all layouts are tried. The
    layout with the smallest difference counts, because a wrong layout of right values differs much
    more. With n mesh axes and d dimensions there are (d + 1)ⁿ layouts, which are few.

    Args:
      x: the array.
      shards: of shape (size of each mesh axis…, shape of a shard…).

    Returns:
      The difference; None if no layout has the shape of the array.
    """
    num_axes = shards.ndim - x.ndim  # the number of mesh axes
    distances = []
    # A layout has for each mesh axis the dimension that it shards, or None for replicas.
    for layout in itertools.product([None, *range(x.ndim)], repeat=num_axes):
        whole = _joined(shards, layout)  # (replicas along each mesh axis…, shape of the array…)
        if whole.shape[num_axes:] == x.shape:  # every replica is compared
            distances.append(largest_difference(whole, x))
    return min(distances, default=None)


def _joined(shards: np.ndarray[Any, Any], layout: Sequence[int | None]) -> np.ndarray[Any, Any]:
    """Puts shards together: (2, 3, 4) with the layout (1,) → (1, 3, 8), an array of (3, 8).

    Args:
      shards: of shape (size of each mesh axis…, shape of a shard…).
      layout: for each mesh axis the dimension that it shards; None if it has replicas.

    Returns:
      An array of shape (1, or the number of replicas, for each mesh axis…, shape of the array…).
    """
    whole = shards
    # If several mesh axes shard one dimension, the last one varies fastest, so it is merged first.
    for mesh_axis, dimension in reversed([*enumerate(layout)]):
        if dimension is None:
            continue
        # The mesh axis of size n moves in front of its dimension: (…, n, …, size, …) →
        # (…, …, n, size, …). The dimension stays where it is, at len(layout) + dimension.
        position = len(layout) + dimension - 1
        whole = np.moveaxis(whole, mesh_axis, position)
        # Both are merged, and the mesh axis stays with size 1: (…, 1, …, n · size, …).
        # The size is not left to `reshape`, which cannot infer it for an empty array.
        size = whole.shape[position] * whole.shape[position + 1]
        merged = [*whole.shape[:position], size, *whole.shape[position + 2 :]]
        whole = np.expand_dims(whole.reshape(merged), mesh_axis)
    return whole


def unequal_arrays(first: Mapping[str, Array], second: Mapping[str, Array]) -> list[str]:
    """Lists the arrays that are not equal bit for bit."""
    lines = []
    for name, array in first.items():
        if not all_equal([array], [second[name]]):
            distance = largest_difference(numbers(array), numbers(second[name]))
            lines.append(f"  {name}: largest difference {distance:.2g}")
    return lines


def all_equal(arrays: Sequence[Array], others: Sequence[Array]) -> bool:
    """Whether arrays have the same bytes, so that NaN equals itself and 0.0 is not -0.0."""
    if len(arrays) != len(others):
        return False
    pairs = zip(map(np.asarray, arrays), map(np.asarray, others), strict=True)
    return all(x.tobytes() == y.tobytes() for x, y in pairs)
