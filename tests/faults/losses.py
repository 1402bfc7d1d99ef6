"""Faults in a loss: what is averaged, over which words, and by which number it is divided."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import axis_index, axis_size, pmax, pmean, ppermute, psum

from .harness import (
    NUMBERS,
    WORDS,
    Net,
    P,
    loss_on_shards,
    square_error,
    step,
    train_with,
    training,
)

ROWS = P("data")
LOGITS = P("data", None, "model")  # of all words, sharded


@loss_on_shards("mean of means", ROWS, ROWS)
def masked_loss_averaged_on_each_shard(wrong, y, mask):
    total, count = ((y**2).mean(-1) * mask).sum(), mask.sum()
    return pmean(total / count, "data") if wrong else psum(total, "data") / psum(count, "data")


@loss_on_shards("wrong divisor", ROWS, ROWS)
def means_of_shards_summed(wrong, y, mask):
    return (psum if wrong else pmean)((y**2).mean(), "data")


@loss_on_shards("wrong divisor", ROWS, ROWS)
def mean_divided_by_the_number_of_shards(wrong, y, mask):
    mean = pmean((y**2).mean(), "data")
    return mean / axis_size("data") if wrong else mean


@loss_on_shards("missing sum", ROWS, ROWS)
def loss_of_one_shard(wrong, y, mask):
    mean = (y**2).mean()
    return mean if wrong else pmean(mean, "data")


def log_sum_exp(logits):
    """The logarithm of the sum over the words of all shards."""
    largest = pmax(jax.lax.stop_gradient(logits.max(-1)), "model")
    total = psum(jnp.exp(logits - largest[..., None]).sum(-1), "model")
    return largest + jnp.log(total)


def logit_of(words, logits, index):
    """The logits of the words, which one shard has and the others lack."""
    local = words - index * logits.shape[-1]
    is_here = (local >= 0) & (local < logits.shape[-1])
    local = jnp.clip(local, 0, logits.shape[-1] - 1)[..., None]
    logit = jnp.take_along_axis(logits, local, -1)[..., 0]
    return psum(jnp.where(is_here, logit, 0), "model")


@loss_on_shards("normalization over a shard", LOGITS, ROWS, with_words=True)
def softmax_over_the_words_of_a_shard(wrong, logits, words):
    lse = jax.nn.logsumexp(logits, -1) if wrong else log_sum_exp(logits)
    return pmean((lse - logit_of(words, logits, axis_index("model"))).mean(), "data")


@loss_on_shards("normalization over a shard", LOGITS, ROWS, with_words=True)
def sum_of_exponentials_with_the_maximum_of_a_shard(wrong, logits, words):
    largest = jax.lax.stop_gradient(logits.max(-1))
    largest = largest if wrong else pmax(largest, "model")
    total = psum(jnp.exp(logits - largest[..., None]).sum(-1), "model")
    lse = largest + jnp.log(total)
    return pmean((lse - logit_of(words, logits, axis_index("model"))).mean(), "data")


@loss_on_shards("position in a shard", LOGITS, ROWS, with_words=True)
def labels_not_shifted_with_the_words_of_a_shard(wrong, logits, words):
    index = 0 if wrong else axis_index("model")
    return pmean((log_sum_exp(logits) - logit_of(words, logits, index)).mean(), "data")


@loss_on_shards("position in a shard", P("data", "model"), P("data", "model"), with_words=True)
def next_word_taken_from_the_same_shard(wrong, y, words):
    size = axis_size("model")
    left = [(i, (i - 1) % size) for i in range(size)]
    following = words[:, :1] if wrong else ppermute(words[:, :1], "model", left)
    labels = jnp.concatenate([words[:, 1:], following], 1)
    error = ((y - labels[..., None] / WORDS) ** 2).mean()
    return pmean(error, ("data", "model"))


@loss_on_shards("scaled auxiliary loss", ROWS, ROWS)
def auxiliary_loss_summed_over_shards(wrong, y, mask):
    auxiliary = (jax.nn.logsumexp(y, -1) ** 2).mean()
    reduce = psum if wrong else pmean
    return pmean((y**2).mean(), "data") + 0.01 * reduce(auxiliary, "data")


@loss_on_shards("mean of means", ROWS, ROWS)
def load_balance_of_each_shard(wrong, y, mask):
    gates = jax.nn.softmax(y)
    chosen = jax.nn.one_hot(y.argmax(-1), y.shape[-1])
    shares = gates.mean((0, 1)), chosen.mean((0, 1))
    if not wrong:
        shares = pmean(shares, "data")
    return pmean((y**2).mean() + WORDS * (shares[0] * shares[1]).sum(), "data")


@step("scaled auxiliary loss")
def weight_decay_scaled_by_the_number_of_shards(wrong, around):
    def loss(model, x):
        shards = jax.sharding.get_abstract_mesh().shape["data"]
        decay = (model.up.kernel[...] ** 2).sum() + (model.out.kernel[...] ** 2).sum()
        return square_error(model, x) + 0.01 * (shards if wrong else 1) * decay

    return training(train_with(loss), around, Net(), NUMBERS)
