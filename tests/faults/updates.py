"""Faults between the gradients and the parameters: averages, clipping, accumulation, updates.

The steps are written by hand, in one `shard_map` with replicated parameters: each shard has the
gradient of its own rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import all_gather, axis_index, axis_size, pmean, psum

from nnx_sharding import value_and_grad

from .harness import (
    NUMBERS,
    Net,
    square_error,
    step,
    step_on_shards,
    training,
)

RATE = 0.1


def gradients_of(model, x, loss=square_error):
    """The loss of a shard, and its gradients: a pytree of arrays."""
    value, gradients = value_and_grad(loss)(model, x)
    return pmean(value, "data"), nnx.to_pure_dict(gradients)


def descend(model, updates):
    """Changes the parameters."""
    state = nnx.state(model, nnx.Param)
    new = jax.tree.map(lambda p, u: p - RATE * u, nnx.to_pure_dict(state), updates)
    nnx.replace_by_pure_dict(state, new)
    nnx.update(model, state)


@step_on_shards("missing sum")
def gradients_not_averaged(wrong, model, x):
    value, gradients = gradients_of(model, x)
    descend(model, gradients if wrong else pmean(gradients, "data"))
    return value


@step_on_shards("wrong divisor")
def gradients_of_means_summed(wrong, model, x):
    value, gradients = gradients_of(model, x)
    descend(model, (psum if wrong else pmean)(gradients, "data"))
    return value


@step_on_shards("doubled sum")
def loss_averaged_before_its_gradient_is_summed(wrong, model, x):
    """Without its check of replication, JAX transposes a sum to a sum."""

    def loss(model, x):
        value = square_error(model, x)
        return (psum(value, "data") if wrong else value) / axis_size("data")

    value = pmean(square_error(model, x), "data")
    _, gradients = gradients_of(model, x, loss)
    descend(model, psum(gradients, "data"))
    return value


@step_on_shards("missing sum")
def gradients_of_biases_not_averaged(wrong, model, x):
    value, gradients = gradients_of(model, x)
    average = lambda g: g if wrong and g.ndim == 1 else pmean(g, "data")  # noqa: E731
    descend(model, jax.tree.map(average, gradients))
    return value


@step_on_shards("sum in bfloat16")
def gradients_averaged_in_bfloat16(wrong, model, x):
    value, gradients = gradients_of(model, x)
    if wrong:
        gradients = jax.tree.map(lambda g: g.astype("bfloat16"), gradients)
    mean = pmean(gradients, "data")
    descend(model, jax.tree.map(lambda g: g.astype("float32"), mean))
    return value


def norm_of(gradients):
    return jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradients)))


@step_on_shards("clipped norm of a shard")
def gradients_clipped_before_they_are_averaged(wrong, model, x):
    value, gradients = gradients_of(model, x)
    clip = lambda gradients: jax.tree.map(lambda g: g / norm_of(gradients), gradients)  # noqa: E731
    mean = pmean(clip(gradients), "data") if wrong else clip(pmean(gradients, "data"))
    descend(model, mean)
    return value


def slice_of(gradient):
    """The rows of an array that a shard updates."""
    size = len(gradient) // axis_size("data")
    return jax.lax.dynamic_slice_in_dim(gradient, axis_index("data") * size, size)


@step_on_shards("clipped norm of a shard")
def norm_of_the_rows_of_a_shard(wrong, model, x):
    value, gradients = gradients_of(model, x)
    mine = jax.tree.map(slice_of, pmean(gradients, "data"))
    square = norm_of(mine) ** 2
    norm = jnp.sqrt(square if wrong else psum(square, "data"))
    clipped = jax.tree.map(lambda g: g / norm, mine)
    descend(model, all_gather(clipped, "data", tiled=True))
    return value


@step_on_shards("doubled sum")
def replicated_biases_counted_once_for_each_shard(wrong, model, x):
    value, gradients = gradients_of(model, x)
    gradients = pmean(gradients, "data")
    leaves = jax.tree.leaves(gradients)
    kernels = psum(sum((slice_of(g) ** 2).sum() for g in leaves if g.ndim > 1), "data")
    biases = sum((g**2).sum() for g in leaves if g.ndim == 1)
    norm = jnp.sqrt(kernels + (psum(biases, "data") if wrong else biases))
    descend(model, jax.tree.map(lambda g: g / norm, gradients))
    return value


@step_on_shards("order of shards")
def updated_rows_gathered_in_another_order(wrong, model, x):
    value, gradients = gradients_of(model, x)
    parts = all_gather(jax.tree.map(slice_of, pmean(gradients, "data")), "data")
    order = slice(None, None, -1 if wrong else 1)
    descend(model, jax.tree.map(lambda g: g[order].reshape(-1, *g.shape[2:]), parts))
    return value


@step_on_shards("mean of means")
def second_moment_of_the_gradients_of_a_shard(wrong, model, x):
    value, gradients = gradients_of(model, x)
    mean = pmean(gradients, "data")
    squares = jax.tree.map(lambda g: g**2, gradients if wrong else mean)
    squares = pmean(squares, "data")
    descend(model, jax.tree.map(lambda g, v: g / (jnp.sqrt(v) + 1e-3), mean, squares))
    return value


@step_on_shards("wrong divisor")
def accumulated_gradients_divided_by_all_shards(wrong, model, x):
    halves = jnp.split(x, 2)
    values, gradients = zip(*(gradients_of(model, half) for half in halves), strict=True)
    count = len(halves) * (axis_size("data") if wrong else 1)
    total = jax.tree.map(lambda *g: sum(g) / count, *gradients)
    descend(model, pmean(total, "data"))
    return sum(values) / len(halves)


@step("scaled rate")
def rate_scaled_by_the_number_of_shards(wrong, around):
    def scaled(model, optimizer, x):
        value, gradients = nnx.value_and_grad(square_error)(model, x)
        shards = jax.sharding.get_abstract_mesh().shape["data"]
        factor = shards if wrong else 1
        optimizer.update(model, jax.tree.map(lambda g: factor * g, gradients))
        return value

    return training(scaled, around, Net(), NUMBERS)
