"""The same programs written with Equinox, as functions that take and return their state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from . import models


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.relu(self.up(self.norm(x))))


class Network(eqx.Module):
    blocks: list[Block]
    calls: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


class MLP(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear


class Program(NamedTuple):
    """``fun(state, *data)`` returns the result and the new state."""

    fun: Callable[..., tuple[Any, Any]]
    state: Any


def forward(model: models.Network) -> Program:
    def apply(model: Network, x: jax.Array) -> tuple[jax.Array, Network]:
        return jax.vmap(model)(x), _counted(model)

    return Program(apply, _network(model))


def count_calls(model: models.Network) -> Program:
    return Program(lambda model, x: (x, _counted(model)), _network(model))


def training(model: models.Network, _: Any) -> Program:
    optimizer = optax.adam(models.LEARNING_RATE)

    def loss_of(model: Network, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        model, moments = state
        loss, gradients = eqx.filter_value_and_grad(loss_of)(model, x, y)
        updates, moments = optimizer.update(gradients, moments)
        return loss, (_counted(eqx.apply_updates(model, updates)), moments)

    own = _network(model)
    return Program(step, (own, optimizer.init(eqx.filter(own, eqx.is_inexact_array))))


def tensor_parallel(model: models.MLP) -> Program:
    def apply(model: MLP, x: jax.Array) -> tuple[jax.Array, MLP]:
        hidden = jax.nn.relu(jax.vmap(model.up)(x))
        partial_sum = hidden @ model.down.weight.T
        return jax.lax.psum(partial_sum, "model") + model.down.bias, model

    return Program(apply, MLP(_linear(model.up), _linear(model.down)))


def network_specs(model: Network) -> Network:
    """The specs of all arrays: kernels are split by their outputs, which come first here."""
    return jax.tree.map(lambda a: P("model", None) if a.ndim == 2 else P(), model)


def mlp_specs(model: MLP) -> MLP:
    return eqx.tree_at(
        lambda m: (m.up.weight, m.up.bias, m.down.weight, m.down.bias),
        model,
        (P("model", None), P("model"), P(None, "model"), P()),
    )


def _counted(model: Network) -> Network:
    return eqx.tree_at(lambda m: m.calls, model, model.calls + 1)


def _network(model: models.Network) -> Network:
    blocks = [Block(_norm(b.norm), _linear(b.up), _linear(b.down)) for b in model.blocks]
    return Network(blocks, model.calls[...])


def _norm(norm: nnx.LayerNorm) -> eqx.nn.LayerNorm:
    own = eqx.nn.LayerNorm(norm.num_features, eps=norm.epsilon)
    return eqx.tree_at(lambda n: (n.weight, n.bias), own, (norm.scale[...], norm.bias[...]))


def _linear(linear: nnx.Linear) -> eqx.nn.Linear:
    own = eqx.nn.Linear(linear.in_features, linear.out_features, key=jax.random.key(0))
    values = (linear.kernel[...].T, linear.bias[...])
    return eqx.tree_at(lambda layer: (layer.weight, layer.bias), own, values)
