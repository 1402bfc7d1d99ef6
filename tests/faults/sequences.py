"""Faults in layers whose sequence or heads are sharded: positions, masks, and neighbours."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import all_gather, axis_index, axis_size, pmax, pmean, ppermute, psum

from .harness import LENGTH, MASK, WIDTH, P, layer, layer_on_shards, on_shards

SHARDED = P("data", "model")  # the sequence, along `model`
SAME = SHARDED, SHARDED
HEADS = 4


def positions(x, wrong):
    """The positions of a shard of a sequence, or those in the shard."""
    start = 0 if wrong else axis_index("model") * x.shape[1]
    return start + jnp.arange(x.shape[1])


def attend(query, key, value, mask):
    """Attention of one head: mask (queries, keys), or (rows, queries, keys)."""
    scores = jnp.einsum("rqd,rkd->rqk", query, key) / WIDTH**0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return jnp.einsum("rqk,rkd->rqd", weights, value)


def gather(x):
    """The whole sequence."""
    return all_gather(x, "model", axis=1, tiled=True)


@layer_on_shards("position in a shard", *SAME, ((LENGTH, WIDTH), P()))
def learned_positions_not_shifted(wrong, x, table):
    return x + table[positions(x, wrong)]


@layer_on_shards("position in a shard", *SAME)
def rotary_angles_not_shifted(wrong, x):
    def rotate(x, positions):
        angle = positions[:, None] / 10.0 ** jnp.arange(WIDTH // 2)
        real, imaginary = jnp.split(x, 2, -1)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)

    keys = rotate(gather(x), jnp.arange(LENGTH))
    return attend(rotate(x, positions(x, wrong)), keys, gather(x), True)


@layer_on_shards("position in a shard", *SAME)
def causal_mask_not_shifted(wrong, x):
    mask = positions(x, wrong)[:, None] >= jnp.arange(LENGTH)
    return attend(x, gather(x), gather(x), mask)


@layer("mask of another shard")
def padding_mask_of_the_first_shard_for_all_keys(wrong):
    def attend_to_all(x, mask):
        whole = jnp.tile(mask, (1, axis_size("model"))) if wrong else gather(mask)
        return attend(x, gather(x), gather(x), whole[:, None])

    local = on_shards(attend_to_all, (SHARDED, SHARDED), SHARDED)
    return lambda x: local(x, MASK)


@layer_on_shards("mean of means", P("data"), P("data"))
def attention_to_shards_of_keys_averaged(wrong, x):
    size = LENGTH // axis_size("model")
    keys = jax.lax.dynamic_slice_in_dim(x, axis_index("model") * size, size, 1)
    scores = jnp.einsum("rqd,rkd->rqk", x, keys) / WIDTH**0.5
    lse = jax.nn.logsumexp(scores, -1, keepdims=True)
    y = jnp.exp(scores - lse) @ keys
    if wrong:
        return pmean(y, "model")
    weight = jnp.exp(lse - pmax(jax.lax.stop_gradient(lse), "model"))
    return psum(weight * y, "model") / psum(weight, "model")


@layer_on_shards("position in a shard", P("data", None, "model"), P("data", None, "model"))
def heads_take_the_keys_of_another_group(wrong, x):
    size = WIDTH // HEADS
    heads = x.reshape(*x.shape[:2], -1, size)  # (rows, length, heads / n, size)
    # Two heads share one of two keys, which are features of all heads.
    keys = all_gather(x, "model", axis=2, tiled=True)[..., : 2 * size].reshape(
        *x.shape[:2], 2, size
    )
    count = heads.shape[2]
    first = 0 if wrong else axis_index("model") * count
    keys = keys[:, :, (first + jnp.arange(count)) // (HEADS // 2)]
    weights = jax.nn.softmax(jnp.einsum("rqhd,rkhd->rhqk", heads, keys))
    return jnp.einsum("rhqk,rkhd->rqhd", weights, keys).reshape(x.shape)


def from_left(x, step=1):
    """What the left neighbour has; zeros on the first shard. With step -1, the right one."""
    size = axis_size("model")
    pairs = [(i, i + step) for i in range(size) if 0 <= i + step < size]
    return ppermute(x, "model", pairs)


@layer_on_shards("neighbours", *SAME)
def convolution_without_the_words_of_the_neighbour(wrong, x):
    before = jnp.zeros_like(x[:, :1]) if wrong else from_left(x[:, -1:])
    return x + 0.5 * jnp.concatenate([before, x[:, :-1]], 1)


@layer_on_shards("neighbours", *SAME)
def convolution_with_the_words_of_the_wrong_neighbour(wrong, x):
    before = from_left(x[:, -1:], -1 if wrong else 1)
    return x + 0.5 * jnp.concatenate([before, x[:, :-1]], 1)


@layer_on_shards("neighbours", *SAME)
def running_sum_that_starts_anew_on_each_shard(wrong, x):
    sums = jnp.cumsum(x, 1)
    totals = all_gather(sums[:, -1], "model")  # (n, rows, features)
    is_before = jnp.arange(len(totals)) < axis_index("model")
    carried = jnp.where(is_before[:, None, None], totals, 0).sum(0)
    return sums if wrong else sums + carried[:, None]


@layer_on_shards("order of shards", P("data"), P("data"), ((4, WIDTH, WIDTH), P("model")))
def output_taken_from_another_stage_of_a_pipeline(wrong, x, kernels):
    index, size = axis_index("model"), axis_size("model")
    for _ in range(size):
        for kernel in kernels:
            x = jnp.tanh(x @ kernel)
        x = ppermute(x, "model", [(i, (i + 1) % size) for i in range(size)])
    # What began on stage 0 has come round to it.
    is_last = index == (size - 1 if wrong else 0)
    return psum(jnp.where(is_last, x, 0), "model")
