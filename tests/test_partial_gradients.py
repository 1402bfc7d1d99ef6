"""Gradients that several programs add up, against those of one device and of one program."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from nnx_sharding import accumulate_gradients, jit, stack, value_and_grad
from nnx_sharding.partition import fsdp, replicated, tensor_parallel, zero1
from nnx_sharding.training import partial_gradients, reduce_gradients

P = PartitionSpec
STEPS = 3


class MLP(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.down = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Shifted(MLP):
    """With a parameter that is used outside of layers."""

    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__(rngs=rngs)
        self.shift = nnx.Param(jnp.ones((1, 16)))

    def __call__(self, x):
        return super().__call__(x + self.shift[...])


class Deep(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.layers = stack(lambda rngs: nnx.Linear(32, 32, rngs=rngs), 3, rngs=rngs)
        self.down = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.layers(self.up(x)))


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def microbatches():
    x = jax.random.normal(jax.random.key(0), (STEPS, 16, 16))
    return [{"x": each, "y": jnp.ones((16, 8))} for each in x]


ADAM = optax.adam(0.1, eps=1e-3)


def trained(model, tx=ADAM):
    """The parameters after two updates on one device."""
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(2):
        gradients = [value_and_grad(loss)(model, each)[1] for each in microbatches()]
        optimizer.update(model, jax.tree.map(lambda *x: sum(x) / STEPS, *gradients))
    return nnx.state(model)


def assert_close(one, other, rtol=2e-5):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=2e-6)


class Programs:
    """The two programs of a training loop."""

    def __init__(self, model, strategy, kinds, shape, tx=ADAM):
        names = ("data", "model")[: len(shape)]
        kinds = kinds if isinstance(kinds, tuple) else (kinds,) * len(shape)
        self.mesh = jax.make_mesh(shape, names, axis_types=kinds)
        self.model = model
        self.optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        sharding = strategy(model, optimizer=self.optimizer, mesh=self.mesh)
        axis = None if kinds[0] is AxisType.Explicit else "data"

        @jit(in_shardings={"model": sharding, "batch": P("data")}, mesh=self.mesh)
        def microbatch(model, batch, total):
            value, partial = partial_gradients(loss, axis=axis)(model, batch)
            return value, partial if total is None else total + partial

        @jit(in_shardings={"model": sharding, "optimizer": sharding}, mesh=self.mesh)
        def update(model, optimizer, total):
            optimizer.update(model, reduce_gradients(total))

        self.microbatch, self.update = microbatch, update

    def train(self):
        for _ in range(2):
            self.total = None
            for each in microbatches():
                value, self.total = self.microbatch(self.model, each, self.total)
                assert value.shape == ()
            self.update(self.model, self.optimizer, self.total)
        return nnx.state(self.model)

    def sent(self):
        """The collectives of both programs that are not of scalars."""
        batch = microbatches()[0]
        lowered = (
            self.microbatch.lower(self.model, batch, self.total),
            self.update.lower(self.model, self.optimizer, self.total),
        )
        return [[c for c in x.compile().collectives() if c.bytes > 4] for x in lowered]


KINDS = [AxisType.Explicit, AxisType.Auto]


def sharded(model, **options):
    return fsdp(model, min_size=0, **options)


def both(model, *, mesh, **options):
    return sharded(model, mesh=mesh, base=tensor_parallel(model, mesh=mesh), **options)


EXPLICIT, AUTO = KINDS
FAST = {(both, (EXPLICIT, EXPLICIT)), (sharded, (EXPLICIT, AUTO))}
FAST |= {(replicated, AxisType.Explicit, (8,)), (replicated, AxisType.Auto, (4, 2))}


CASES = [
    pytest.param(
        strategy,
        kind,
        shape,
        marks=() if (strategy, kind, shape) in FAST else pytest.mark.slow,
        id=f"{strategy.__name__}-{kind}-{shape}",
    )
    for strategy in (replicated, zero1)
    for kind in KINDS
    for shape in ((8,), (4, 2))
]


def programs(model, strategy, kind, shape):
    options = {} if strategy is replicated else {"min_size": 0}
    return Programs(model, functools.partial(strategy, **options), kind, shape)


def reduced_bytes(collectives):
    kinds = ("all-reduce", "reduce-scatter")
    return sum(c.bytes * c.times for c in collectives if c.kind in kinds and c.bytes > 8)


@pytest.mark.parametrize(("strategy", "kind", "shape"), CASES)
def test_one_reduction(strategy, kind, shape):
    one = programs(MLP(rngs=nnx.Rngs(0)), strategy, kind, shape)
    expected = trained(MLP(rngs=nnx.Rngs(0)))
    state = one.train()
    assert_close(state, expected)
    microbatch, update = one.sent()
    assert microbatch == []
    assert reduced_bytes(update) == sum(x.nbytes for x in jax.tree.leaves(state))
    assert [c.times for c in update if c.kind == "all-reduce"] == [1]
    for x in jax.tree.leaves(one.total.gradient):
        assert x.sharding.shard_shape(x.shape)[0] == 1


MIXED = [
    pytest.param(
        strategy,
        kinds,
        marks=() if (strategy, kinds) in FAST else pytest.mark.slow,
        id=f"{name}-{'-'.join(kind.name for kind in kinds)}",
    )
    for name, strategy in (("fsdp", sharded), ("tensor_parallel", tensor_parallel), ("both", both))
    for kinds in itertools.product(KINDS, repeat=2)
]


@pytest.mark.parametrize(("strategy", "kinds"), MIXED)
def test_sharded_parameters(strategy, kinds):
    """Also in a Stack, whose layers gather them one by one."""
    tx = optax.sgd(0.1)
    one = Programs(Deep(rngs=nnx.Rngs(0)), strategy, kinds, (4, 2), tx)
    state = one.train()
    assert_close(state, trained(Deep(rngs=nnx.Rngs(0)), tx), rtol=2e-4)
    microbatch, update = (
        [c for c in each if c.kind in ("all-reduce", "reduce-scatter") and "data" in c.axes]
        for each in one.sent()
    )
    assert microbatch == []
    assert [c.times for c in update] == [1]
    assert reduced_bytes(update) <= sum(x.nbytes for x in jax.tree.leaves(state))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_parameters_outside_of_layers(kind):
    one = programs(Shifted(rngs=nnx.Rngs(0)), replicated, kind, (8,))
    assert_close(one.train(), trained(Shifted(rngs=nnx.Rngs(0))))
    microbatch, update = one.sent()
    assert 64 <= reduced_bytes(microbatch) <= 68  # the shift, perhaps with the loss
    assert reduced_bytes(update) == 1608 * 4


def sum_of(function, model):
    first, *others = (function(model, each)[1] for each in microbatches())
    return sum(others, first)


def test_one_program_with_sharded_parameters_on_auto_axes():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    model = MLP(rngs=nnx.Rngs(0))
    gradient = accumulate_gradients(loss, steps=2, axis="data")
    specs = (fsdp(model, mesh=mesh, min_size=0), P("data"))
    compiled = (
        jit(gradient, in_shardings=specs, mesh=mesh).lower(model, microbatches()[0]).compile()
    )
    large = [one for one in compiled.collectives().of("all-reduce") if one.bytes > 4]
    size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
    assert [(one.times, one.bytes) for one in large] == [(1, size)]


@pytest.mark.parametrize("graph_updates", [True, False])
def test_equals_one_program(graph_updates):
    model, options = MLP(rngs=nnx.Rngs(0)), {"graph_updates": graph_updates}
    parts = microbatches()
    # Each microbatch of accumulate_gradients takes every third row.
    batch = jax.tree.map(lambda *x: jnp.stack(x, 1).reshape(-1, *x[0].shape[1:]), *parts)
    _, expected = accumulate_gradients(loss, steps=STEPS, **options)(model, batch)
    total = sum_of(partial_gradients(loss, **options), model)
    assert_close(reduce_gradients(total), expected)


def test_dtype():
    model = nnx.Linear(16, 8, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    gradient = reduce_gradients(sum_of(partial_gradients(loss, dtype=jnp.float32), model))
    assert {x.dtype for x in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    gradient = reduce_gradients(sum_of(partial_gradients(loss), model))
    assert {x.dtype for x in jax.tree.leaves(gradient)} == {jnp.dtype("bfloat16")}


def test_errors():
    model, [batch, *_] = MLP(rngs=nnx.Rngs(0)), microbatches()
    _, partial = partial_gradients(loss)(model, batch)
    _, other = partial_gradients(loss, wrt=nnx.PathContains("up"))(model, batch)
    with pytest.raises(ValueError, match="different parameters"):
        partial + other
    with pytest.raises(TypeError, match="got dict"):
        reduce_gradients({"gradient": partial})
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    step = jit(partial_gradients(loss), in_shardings=(P(), P("data")), mesh=mesh)
    with pytest.raises(ValueError, match=r"Auto axes 'data'.*axis="):
        step(model, batch)
