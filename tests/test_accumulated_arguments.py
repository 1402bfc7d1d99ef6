"""``accumulate_gradients`` with arguments of all kinds, against the gradient of the whole batch."""

from __future__ import annotations

import itertools
import random

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from nnx_sharding import accumulate_gradients, jit, stack, value_and_grad, vmap
from nnx_sharding.partition import tensor_parallel
from zoo import STRATEGIES, WIDTH, Block, assert_close

ROWS = 32
WEIGHTS = jnp.linspace(0.5, 3, WIDTH)


def make(kind):
    return Block(nnx.Rngs(0)) if kind == "MLP" else stack(Block, 2, rngs=nnx.Rngs(0))


def of_batch(model, x, y, weights):
    return (weights * (model(x) - y) ** 2).mean()


def of_rows(model, x, y, weights):
    return vmap(of_batch, in_axes=(None, 0, 0, None))(model, x, y, weights).mean()


def of_rows_by_jax(model, x, y, weights):
    return jax.vmap(lambda x, y: of_batch(model, x, y, weights))(x, y).mean()


def of_a_sum(model, x, y, weights):
    return (weights * (model(x) - y) ** 2).sum() / len(x)


def of_masked(model, x, y, weights):
    mask = (jnp.arange(WIDTH) % 3 > 0).astype(x.dtype)  # as many elements in each row
    return (mask * weights * (model(x) - y) ** 2).sum() / (mask.sum() * len(x))


DIMENSIONS = {
    "axes": [*itertools.product((AxisType.Auto, AxisType.Explicit), repeat=2)],
    "axis": (None, "data"),
    "strategy": ("replicated", "fsdp", "tensor", "both"),
    "model": ("MLP", "stack"),
    "loss": (of_batch, of_rows, of_rows_by_jax, of_a_sum, of_masked),
    "steps": (1, 2, 4),
    "weights": ("constant", "scalar", "of rows"),
    "form": ("positional", "keywords", "pytree"),
}


def drawn(**fixed):
    return {key: fixed.get(key, random.choice([*values])) for key, values in DIMENSIONS.items()}


def check(case):
    """Compares a call with the plain gradient on one device."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=case["axes"])
    model, fun = make(case["model"]), case["loss"]
    keys = jax.random.split(jax.random.key(0))
    x, y = (jax.random.normal(key, (ROWS, WIDTH)) for key in keys)
    weights = {
        "constant": WEIGHTS,
        "scalar": jnp.float32(2),
        "of rows": jnp.tile(jnp.linspace(1, 2, ROWS)[:, None], (1, WIDTH)),
    }[case["weights"]]
    if case["weights"] == "of rows" and fun in (of_rows, of_rows_by_jax):  # not mapped
        weights = WEIGHTS
    expected = value_and_grad(fun)(model, x, y, weights)
    with_rows = ["x", "y", *["weights"] * (weights.shape[:1] == (ROWS,))]
    options = {"steps": case["steps"], "axis": case["axis"], "batch": with_rows}
    rows, own = P("data"), P("data") if "weights" in with_rows else P()
    maps_rows = fun in (of_rows, of_rows_by_jax)
    sharding = P() if maps_rows else STRATEGIES[case["strategy"]](model, mesh=mesh)
    specs = sharding, rows, rows, own

    def step(model, x, y, weights):
        if case["form"] == "pytree":
            pairs = {**options, "batch": ["batch", *with_rows[2:]]}
            loss = lambda model, batch, weights: fun(model, *batch["xy"], weights)  # noqa: E731
            return accumulate_gradients(loss, **pairs)(model, {"xy": (x, y)}, weights)
        if case["form"] == "keywords":
            return accumulate_gradients(fun, **options)(model, weights=weights, y=y, x=x)
        return accumulate_gradients(fun, **options)(model, x, y, weights)

    found = jit(step, in_shardings=specs, mesh=mesh)(model, x, y, weights)
    assert_close(found, expected, 2e-4, 1e-5, str(case))


@pytest.mark.parametrize("number", range(40))
def test_combinations(number):
    """Each draws one of 5760."""
    check(drawn(axis=(None, "data")[number % 2]))


@pytest.mark.parametrize("axes", DIMENSIONS["axes"])
def test_tensor_parallelism_is_kept(axes):
    """With ``axis``, nothing is gathered over ``model`` that it does not gather without steps."""

    def sent(gradient):
        mesh, model = jax.make_mesh((4, 2), ("data", "model"), axis_types=axes), make("MLP")
        specs = tensor_parallel(model, mesh=mesh), P("data"), P("data"), P()
        xy = jnp.ones((ROWS, WIDTH))
        step = jit(gradient, in_shardings=specs, mesh=mesh).lower(model, xy, xy, WEIGHTS)
        table = step.compile().collectives()
        assert all(c.purpose == "gradient" for c in table if c.bytes > 500 and c.axes == ("data",))
        gathered = sum(c.bytes * (c.times or 1) for c in table if c.kind == "all-gather")
        return gathered, sum(c.bytes * (c.times or 1) for c in table if c.axes == ("data",))

    names = {"batch": ("x", "y"), "axis": "data"}
    plain = sent(value_and_grad(of_batch))
    found = sent(accumulate_gradients(of_batch, steps=2, **names))
    assert found[0] <= 1.05 * plain[0] + 64 and found[1] <= 1.05 * plain[1] + 64


def test_a_batch_of_unequal_rows_is_refused():
    xy, model = jnp.ones((ROWS, WIDTH)), make("MLP")
    for batch in (None, ("x", "weights")):
        with pytest.raises(ValueError, match=r"weights: shape \(16,\)[^$]*batch='x'"):
            accumulate_gradients(of_batch, batch=batch, steps=2)(model, xy, xy, WEIGHTS)
