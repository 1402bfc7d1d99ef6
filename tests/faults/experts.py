"""Faults in layers with experts, which are sharded along `model`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import all_gather, axis_index, axis_size, pmax, psum

from .harness import WIDTH, WORDS, P, layer_on_shards

EXPERTS, CAPACITY = 4, 8
ROUTER = (WIDTH, EXPERTS), P(None, "model")
KERNELS = (EXPERTS, WIDTH, WIDTH), P("model")


@layer_on_shards("capacity of a shard", P("data"), P("data"), ((WORDS, WIDTH), P()), words=True)
def capacity_of_experts_counted_on_each_shard(wrong, words, table):
    chosen = jax.nn.one_hot(words.reshape(-1) % EXPERTS, EXPERTS, dtype="int32")
    place = jnp.cumsum(chosen, 0) - chosen  # of each word in the queue of each expert
    counts = all_gather(chosen.sum(0), "data")  # (n, experts)
    is_before = jnp.arange(len(counts)) < axis_index("data")
    before = jnp.where(is_before[:, None], counts, 0).sum(0)
    capacity = CAPACITY // axis_size("data") if wrong else CAPACITY
    is_kept = chosen * (place + (0 if wrong else before) < capacity)
    return table[words] * is_kept.sum(-1).reshape(*words.shape, 1)


@layer_on_shards("normalization over a shard", P("data"), P("data"), ROUTER, KERNELS)
def gates_normalized_over_the_experts_of_a_shard(wrong, x, router, kernels):
    scores = jnp.exp(jnp.tanh(x @ router))
    total = scores.sum(-1, keepdims=True)
    gates = scores / (total if wrong else psum(total, "model"))
    return psum(jnp.einsum("rle,rli,eio->rlo", gates, x, kernels), "model")


@layer_on_shards("normalization over a shard", P("data"), P("data"), ROUTER, KERNELS)
def best_expert_of_each_shard(wrong, x, router, kernels):
    scores = x @ router
    best = scores.max(-1, keepdims=True)
    best = best if wrong else pmax(jax.lax.stop_gradient(best), "model")
    gates = jnp.where(scores >= jax.lax.stop_gradient(best), jax.nn.sigmoid(scores), 0)
    return psum(jnp.einsum("rle,rli,eio->rlo", gates, x, kernels), "model")
