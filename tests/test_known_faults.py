"""Gradients that XLA computes wrong: in plain JAX, to see when it is mended, and with ours."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nnx_sharding import StateSharding, accumulate_gradients, jit
from nnx_sharding.errors import StrictError, WrongGradientWarning
from nnx_sharding.partition import fsdp, replicated, sharded_init, tensor_parallel

P, AUTO, EXPLICIT = PartitionSpec, AxisType.Auto, AxisType.Explicit
MENDED = "XLA computes this right now: remove what avoids the fault, and this test"


def mesh_of(*types, shape=(2, 4)):
    return jax.make_mesh(shape, ("data", "model"), axis_types=types)


@functools.cache
def array(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def convolved(kernel, x, groups=8):
    numbers = ("NHC", "HIO", "NHC")
    return jax.lax.conv_general_dilated(
        x, kernel, (1,), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def indexed(kernel, x):
    return x + kernel.at[jnp.arange(x.shape[1])].get(out_sharding=P())


def of_auto_axes(kernel, x):
    return x @ jax.sharding.auto_axes(jnp.tanh, out_sharding=P(None, None))(kernel)


PLAIN = {
    "grouped convolution, Auto": (convolved, (AUTO, AUTO), (3, 1, 8), False),
    "grouped convolution, Explicit": (convolved, (EXPLICIT, EXPLICIT), (3, 1, 8), False),
    "indexed, reduced": (indexed, (EXPLICIT, EXPLICIT), (6, 8), True),
    "on Auto axes, reduced": (of_auto_axes, (EXPLICIT, EXPLICIT), (8, 8), True),
    "product, reduced, mixed axes": (lambda w, x: x @ w, (EXPLICIT, AUTO), (8, 8), True),
}


MIXED = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="not a fault of this release")
NAMES = [pytest.param(name, marks=[MIXED] if "mixed" in name else []) for name in PLAIN]


@pytest.mark.parametrize("name", NAMES)
def test_plain_jax_is_still_wrong(name):
    """The gradient is multiplied by the size of an axis; if this fails, XLA is mended."""
    function, types, shape, reduced = PLAIN[name]
    kernel, x = array(1, *shape), array(2, 8, 6, 8)

    def gradient(kernel, x):
        if reduced:
            kernel = jax.sharding.reshard(kernel, P(reduced={"data"}))
        new = jax.grad(lambda kernel: jnp.sin(function(kernel, x)).sum())(kernel)
        return jax.sharding.reshard(new, P()) if reduced else new

    mesh = mesh_of(*types)
    with jax.set_mesh(mesh):
        here = NamedSharding(mesh, P())
        wrong = jax.jit(gradient)(jax.device_put(kernel, here), jax.device_put(x, P("data")))
    one = {
        "indexed, reduced": lambda w, x: x + w[:6],
        "on Auto axes, reduced": lambda w, x: x @ jnp.tanh(w),
    }
    right = jax.grad(lambda w: jnp.sin(one.get(name, function)(w, x)).sum())(kernel)
    assert not np.allclose(wrong, right, rtol=1e-3, atol=1e-4), MENDED


class Depthwise(nnx.Module):
    def __init__(self, rngs, features=8, groups=8):
        self.depthwise = nnx.Conv(8, features, (3,), feature_group_count=groups, rngs=rngs)

    def __call__(self, x):
        return jnp.sin(self.depthwise(x))


def loss(model, x):
    return model(x).sum()


def gradient(model, x):
    return nnx.grad(loss)(model, x)


@functools.cache
def expected(groups, features):
    model = Depthwise(nnx.Rngs(0), features, groups)
    return jax.device_get(gradient(model, array(2, 8, 6, 8)))


def assert_equal(found, want):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


STRATEGIES = {
    "replicated": lambda model, mesh: replicated(model),
    "fsdp": lambda model, mesh: fsdp(model, mesh=mesh, min_size=0),
    "tensor_parallel": tensor_parallel,
    "own": lambda model, mesh: StateSharding({...: P()}),
}
TYPES = [*itertools.product((AUTO, EXPLICIT), repeat=2)]


# XLA keeps no rows over an axis that became Auto for the call.
OPEN_ROWS = ("replicated", (AUTO, EXPLICIT), 2)
CASES = [
    pytest.param(
        *case, marks=[] if number % 5 == 0 or case[:3] == OPEN_ROWS else [pytest.mark.slow]
    )
    for number, case in enumerate(
        (strategy, types, groups, features, rows)
        for strategy, types in itertools.product(STRATEGIES, TYPES)
        for groups, features in ((8, 8), (2, 16))
        for rows in ("data", ("data", "model"))
    )
]


@pytest.mark.parametrize(("strategy", "types", "groups", "features", "rows"), CASES, ids=str)
def test_grouped_convolution(strategy, types, groups, features, rows):
    """Right; or warned of, on Auto axes without a strategy."""
    mesh, make = mesh_of(*types), lambda: Depthwise(nnx.Rngs(0), features, groups)
    sharding = STRATEGIES[strategy](nnx.eval_shape(make), mesh=mesh)
    x = jax.device_put(array(2, 8, 6, 8), NamedSharding(mesh, P(rows)))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", WrongGradientWarning)
        step = jit(gradient, in_shardings=(sharding, P(rows)), mesh=mesh)
        found = step(sharded_init(make, sharding, mesh), x)
    if any(w.category is WrongGradientWarning for w in seen):
        assert strategy == "own" and AUTO in types
        return
    assert_equal(found, expected(groups, features))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_accumulated(kind):
    mesh, axis = mesh_of(kind, kind), "data" if kind is AUTO else None
    model = Depthwise(nnx.Rngs(0))
    step = accumulate_gradients(loss, steps=2, axis=axis)
    rows = P("data")
    _, found = jit(step, in_shardings=(replicated(model), rows), mesh=mesh)(
        model, array(2, 8, 6, 8)
    )
    assert_equal(jax.tree.map(lambda x: 2 * x, found), expected(8, 8))


class Raw(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(array(1, 3, 1, 8))

    def __call__(self, x):
        return jnp.sin(convolved(self.kernel[...], x))


@pytest.mark.parametrize("shape", [(2, 4), (8, 1)], ids=str)
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
@pytest.mark.parametrize("differentiates", [True, False])
def test_warning(shape, kind, differentiates):
    mesh = mesh_of(kind, kind, shape=shape)
    function = gradient if differentiates else loss
    step = jit(function, in_shardings=(P(), P("data")), mesh=mesh)
    is_at_risk = differentiates and shape == (2, 4)
    with pytest.warns(WrongGradientWarning) if is_at_risk else contextlib.nullcontext() as seen:
        step.lower(Raw(), array(2, 8, 6, 8))
    if is_at_risk:
        assert "kernel of a grouped convolution" in str(seen[0].message)
        strict = jit(function, in_shardings=(P(), P("data")), mesh=mesh, strict=True)
        with pytest.raises(StrictError, match="by known faults of XLA"):
            strict.lower(Raw(), array(2, 8, 6, 8))


@MIXED
def test_warning_of_a_reduced_product():
    mesh = mesh_of(EXPLICIT, AUTO)

    def product(kernel, x):
        new = jax.grad(lambda kernel: (x @ kernel).sum())(kernel)
        return jax.sharding.reshard(new, P())

    with jax.set_mesh(mesh), pytest.warns(WrongGradientWarning, match="product: 'model'"):
        step = jit(product, in_shardings=(P(reduced={"data"}), P("data")))
        step.lower(array(1, 8, 8), jax.device_put(array(2, 8, 8), P("data")))
