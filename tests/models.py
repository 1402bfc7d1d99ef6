"""Small models and comparisons that several test files share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec

from nnx_sharding import StateSharding

P = PartitionSpec


class MLP(nnx.Module):
    """Two layers without biases: ``up`` (4, 16) and ``down`` (16, 4)."""

    def __init__(self, rngs=None, features=4, hidden=16):
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.up = nnx.Linear(features, hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(hidden, features, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


class Counter(nnx.Module):
    """One Variable that every call increments, and one that no call changes."""

    def __init__(self, value=0):
        self.count = nnx.BatchStat(jnp.array(value))
        self.scale = nnx.Param(jnp.array(2.0))

    def __call__(self, x):
        self.count[...] += 1
        return x * self.scale[...] + self.count[...]


class Net(nnx.Module):
    """Parameters, running statistics, random streams and a static flag."""

    def __init__(self, rngs=None, features=8):
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.linear = nnx.Linear(features, features, rngs=rngs)
        self.norm = nnx.BatchNorm(features, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(jax.nn.relu(self.linear(x))))


def mlp_specs(axis="model"):
    """The megatron layout of an :class:`MLP`."""
    return StateSharding({nnx.PathContains("up"): P(None, axis), ...: P(axis, None)})


def mesh_of(shape, names, kind="auto"):
    """A mesh over the first devices; ``kind`` is auto, explicit, or a tuple of axis types."""
    kinds = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    types = kind if isinstance(kind, tuple) else (kinds[kind],) * len(names)
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=types)


def describe(x):
    """All that can be seen of an array except its numbers."""
    if not isinstance(x, jax.Array):
        return type(x)
    aval = jax.typeof(x)
    return (aval.shape, aval.dtype, aval.weak_type, x.committed, x.sharding, str(aval))


def numbers(x):
    """The numbers of an array or key as NumPy, of a type that NumPy can compare."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    return x if x.dtype.kind in "biufc" else x.astype(np.float32)


def assert_same(test, ours, theirs, rtol=0):
    """Two outputs are the same pytree of the same arrays, with the same shardings."""
    test.assertEqual(jax.tree.structure(ours), jax.tree.structure(theirs))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        test.assertEqual(describe(a), describe(b))
        np.testing.assert_allclose(numbers(a), numbers(b), rtol=rtol, atol=rtol)


def values(module):
    """The numbers of every Variable of a module, by path."""
    flat = nnx.to_flat_state(nnx.state(module))
    return {path: numbers(v.get_raw_value()) for path, v in flat}


def assert_same_state(test, ours, theirs, rtol=0):
    """Two modules hold the same numbers under the same paths."""
    a, b = values(ours), values(theirs)
    test.assertEqual(list(a), list(b))
    for path in a:
        np.testing.assert_allclose(a[path], b[path], rtol=rtol, atol=rtol, err_msg=str(path))


def pointers(x):
    """Where the shards of an array, or of all Variables of a module, are in memory."""
    if isinstance(x, jax.Array):
        return tuple(s.data.unsafe_buffer_pointer() for s in x.addressable_shards)
    flat = nnx.to_flat_state(nnx.state(x))
    return {path: pointers(v.get_raw_value()) for path, v in flat}
