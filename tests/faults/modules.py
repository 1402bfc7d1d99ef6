"""Faults in random numbers and in state: keys, noise, counters, statistics, caches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import axis_index, axis_size, pmean, psum

from .harness import (
    LENGTH,
    MASK,
    NUMBERS,
    ROWS,
    WIDTH,
    Net,
    P,
    evaluation,
    layer_on_shards,
    on_shards,
    square_error,
    step,
)

DATA = P("data")


def module(kind, where):
    """Adds a fault in a module: a function that makes it."""

    def add(make):
        def build(is_wrong, around):
            return evaluation(square_error, around, Net(make(is_wrong)), NUMBERS, steps=2)

        build.__name__ = make.__name__
        return step(kind, where)(build)

    return add


class Dropped(nnx.Module):
    """A dropout in a `shard_map`."""

    def __init__(self, fold_in):
        self.fold_in, self.dropout = fold_in, nnx.Dropout(0.5)
        self.key = nnx.RngKey(jax.random.key(5), tag="dropout")

    def __call__(self, x):
        def on_one_shard(x, key):
            return self.dropout(x, rngs=nnx.Rngs(dropout=self.fold_in(key)))

        return on_shards(on_one_shard, (DATA, P()), DATA)(x, self.key[...])


@module("one key for all shards", r"model\.mid\.dropout \(Dropout\) drops the same")
def dropout_with_one_key_for_all_shards(wrong):
    return Dropped(lambda key: key if wrong else jax.random.fold_in(key, axis_index("data")))


@module("another key for replicas", r"model\.mid\.dropout \(Dropout\) drops other")
def dropout_with_another_key_for_replicas(wrong):
    axes = ("data", "model") if wrong else "data"
    return Dropped(lambda key: jax.random.fold_in(key, axis_index(axes)))


@layer_on_shards("one key for all shards", DATA, DATA)
def the_same_noise_on_all_shards(wrong, x):
    key, rows = jax.random.key(3), len(x)
    if wrong:
        return x + jax.random.normal(key, x.shape)
    noise = jax.random.normal(key, (ROWS, LENGTH, WIDTH))
    return x + jax.lax.dynamic_slice_in_dim(noise, axis_index("data") * rows, rows)


@step("random counter", where=r"model \(Net\)")
def random_counter_advanced_once_for_each_shard(wrong, around):
    def loss(model, x):
        shards = jax.sharding.get_abstract_mesh().shape["data"]
        for _ in range(shards if wrong else 1):
            key = model.rngs()
        x = x + jax.random.normal(key, x.shape) * 0
        return square_error(model, x)

    model = Net()
    model.rngs = nnx.Rngs(0)
    return evaluation(loss, around, model, NUMBERS)


class Statistics(nnx.Module):
    """Keeps something of what it is called with."""

    def __init__(self, start, update):
        self.value, self.update = nnx.BatchStat(start), update

    def __call__(self, x):
        self.value[...] = self.update(self.value[...], x)
        return x


MID = r"model\.mid \(Statistics\)"


@module("statistics of a shard", MID)
def running_mean_of_a_shard(wrong):
    def update(old, x):
        mean = x.mean((0, 1))
        return 0.9 * old + 0.1 * (mean if wrong else pmean(mean, "data"))

    return Statistics(jnp.zeros(WIDTH), on_shards(update, (P(), DATA), P()))


@module("statistics of a shard", MID)
def running_mean_updated_once_for_each_shard(wrong):
    def update(old, x):
        mean = pmean(x.mean((0, 1)), "data")
        rate = 0.9 ** (axis_size("data") if wrong else 1)
        return rate * old + (1 - rate) * mean

    return Statistics(jnp.zeros(WIDTH), on_shards(update, (P(), DATA), P()))


@module("statistics of a shard", MID)
def words_counted_on_one_shard(wrong):
    def update(old, x, mask):
        count = mask.sum()
        return old + (count if wrong else psum(count, "data"))

    counted = on_shards(update, (P(), DATA, DATA), P())
    return Statistics(jnp.zeros((), int), lambda old, x: counted(old, x, MASK))


@module("position in a shard", MID)
def cache_written_at_the_position_in_each_shard(wrong):
    def update(cache, x, position=LENGTH - 1):
        size = cache.shape[1]
        local = position - (0 if wrong else axis_index("model") * size)
        new = jax.lax.dynamic_update_slice_in_dim(cache, x[:, -1:], local, 1)
        return new if wrong else jnp.where((local >= 0) & (local < size), new, cache)

    sharded = P("data", "model")
    cache = jnp.zeros((ROWS, LENGTH, WIDTH))
    return Statistics(cache, on_shards(update, (sharded, DATA), sharded))
