"""Programs of different kinds, lowered, whose memory and cost are attributed to modules."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import zoo
from nnx_sharding import StateSharding, jit, stack, value_and_grad
from nnx_sharding.partition import fsdp, make_mesh
from nnx_sharding.training import accumulate_gradients

WIDTH, ROWS, LAYERS = 64, 1024, 3


Block = functools.partial(zoo.Block, width=WIDTH)


class Mlp(nnx.Module):
    def __init__(self, rngs, layer=Block):
        self.blocks = nnx.List([layer(rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.mlp = Block(rngs)

    def __call__(self, x):
        return self.mlp(x + self.attention(self.norm(x)))


class Stacked(nnx.Module):
    def __init__(self, rngs):
        self.layers = stack([Attention(rngs) for _ in range(LAYERS)], remat=True)

    def __call__(self, x):
        return self.layers(x)


class ConvNet(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(8, 32, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.out = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.conv(x))))


class Experts(nnx.Module):
    """A mixture of experts without a limit on tokens: each expert sees all, weighted."""

    def __init__(self, rngs):
        self.router = nnx.Linear(WIDTH, 4, rngs=rngs)
        self.up = nnx.Param(jax.random.normal(rngs.params(), (4, WIDTH, 4 * WIDTH)) * 0.1)
        self.down = nnx.Param(jax.random.normal(rngs.params(), (4, 4 * WIDTH, WIDTH)) * 0.1)

    def __call__(self, x):
        weights = jax.nn.softmax(self.router(x))
        hidden = nnx.gelu(jnp.einsum("td,edh->teh", x, self.up[...]))
        return x + jnp.einsum("teh,ehd,te->td", hidden, self.down[...], weights)


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=True, rngs=rngs)
        self.attention.init_cache((8, ROWS, WIDTH))
        self.head = nnx.Linear(WIDTH, 1000, rngs=rngs)

    def __call__(self, x):
        return self.head(self.attention(x))


def _loss(model, x):
    return (model(x) ** 2).mean()


def _train(make, shape, gradient=None, devices=None):
    gradient = gradient or value_and_grad(_loss)
    mesh = _mesh(devices)

    def step(model, optimizer, x):
        value, gradients = gradient(model, x)
        optimizer.update(model, gradients)
        return value

    def both():
        model = make(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(both)
    sharding = fsdp(model, mesh=mesh, optimizer=optimizer, min_size=0)
    specs = sharding, sharding, P("data")
    fun = jit(step, in_shardings=specs, mesh=mesh, donate_argnums=(0, 1))
    return fun.lower(model, optimizer, jax.ShapeDtypeStruct(shape, jnp.float32))


def _mesh(devices):
    devices = jax.devices() if devices is None else devices
    return make_mesh({"data": 4}, axis_types=AxisType.Auto, devices=devices[:4])


def mlp(devices=None):
    return _train(Mlp, (4 * ROWS, WIDTH), devices=devices)


def transformer(devices=None):
    return _train(lambda rngs: Mlp(rngs, Attention), (32, 128, WIDTH), devices=devices)


def stacked(devices=None):
    return _train(Stacked, (32, 128, WIDTH), devices=devices)


def convolutions(devices=None):
    return _train(ConvNet, (32, 32, 32, 8), devices=devices)


def experts(devices=None):
    return _train(Experts, (ROWS, WIDTH), devices=devices)


def microbatches(devices=None):
    gradient = accumulate_gradients(_loss, steps=8)
    return _train(Mlp, (32 * ROWS, WIDTH), gradient, devices=devices)


def decode(devices=None):
    model = nnx.eval_shape(lambda: Decoder(nnx.Rngs(0)))
    specs = StateSharding({...: P()}), P("data")
    options = {"in_shardings": specs, "mesh": _mesh(devices), "donate_argnums": 0}
    fun = jit(lambda model, x: model(x), **options)
    return fun.lower(model, jax.ShapeDtypeStruct((8, 1, WIDTH), jnp.float32))


PROGRAMS = {
    f.__name__: f for f in (mlp, transformer, stacked, convolutions, experts, microbatches, decode)
}
