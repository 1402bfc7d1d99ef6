"""Faults in a layer: what is summed over which axes, and in which order shards are put together."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import all_gather, all_to_all, axis_index, axis_size, pmean, psum

from .harness import LAYER, LENGTH, WIDTH, WORDS, P, layer, layer_on_shards, on_shards

FEATURES = P("data", None, "model")
ROW = FEATURES, P("data")  # a matrix product over sharded features
KERNEL = (WIDTH, WIDTH), P("model")


@layer_on_shards("missing sum", *ROW, KERNEL)
def row_parallel_product_not_summed(wrong, x, kernel):
    y = x @ kernel
    return y if wrong else psum(y, "model")


@layer_on_shards("doubled sum", *ROW, KERNEL)
def row_parallel_product_summed_twice(wrong, x, kernel):
    y = psum(x @ kernel, "model")
    return psum(y, "model") if wrong else y


@layer_on_shards("wrong axis", *ROW, KERNEL)
def row_parallel_product_summed_over_the_batch(wrong, x, kernel):
    return psum(x @ kernel, "data" if wrong else "model")


@layer_on_shards("wrong divisor", *ROW, KERNEL)
def row_parallel_product_averaged(wrong, x, kernel):
    return (pmean if wrong else psum)(x @ kernel, "model")


@layer_on_shards("doubled sum", *ROW, KERNEL, ((WIDTH,), P()))
def bias_added_before_the_sum(wrong, x, kernel, bias):
    return psum(x @ kernel + bias, "model") if wrong else psum(x @ kernel, "model") + bias


@layer_on_shards("sum in bfloat16", *ROW, KERNEL)
def products_summed_in_bfloat16(wrong, x, kernel):
    y = x @ kernel
    return psum(y.astype("bfloat16"), "model").astype("float32") if wrong else psum(y, "model")


def with_gradient(forward, backward):
    """A product whose gradients are written by hand."""
    product = jax.custom_vjp(forward)
    product.defvjp(
        lambda x, kernel: (forward(x, kernel), (kernel, x)),
        lambda saved, d_y: backward(*saved, d_y),
    )
    return product


GRADIENT = LAYER + " is the first module whose gradient"


@layer("missing sum", (WIDTH, WIDTH), is_trained=True, where=GRADIENT)
def gradient_of_a_column_parallel_input_not_summed(wrong):
    column = P(None, "model")
    forward = on_shards(jnp.matmul, (P("data"), column), FEATURES)

    def on_one_shard(kernel, x, d_y):
        d_x = d_y @ kernel.T
        d_kernel = psum(jnp.einsum("rli,rlo->io", x, d_y), "data")
        return d_x if wrong else psum(d_x, "model"), d_kernel

    specs = (column, P("data"), FEATURES), (P("data"), column)
    backward = on_shards(on_one_shard, *specs)
    return with_gradient(forward, backward)


@layer("missing sum", (WIDTH, WIDTH), is_trained=True)
def gradient_of_a_kernel_not_summed_over_the_batch(wrong):
    forward = on_shards(jnp.matmul, (P("data"), P()), P("data"))

    def on_one_shard(kernel, x, d_y):
        d_kernel = jnp.einsum("rli,rlo->io", x, d_y)
        return d_y @ kernel.T, d_kernel if wrong else psum(d_kernel, "data")

    backward = on_shards(on_one_shard, (P(), P("data"), P("data")), (P("data"), P()))
    return with_gradient(forward, backward)


@layer_on_shards("order of axes", P(("data", "model")), P())
def rows_gathered_with_the_axes_in_the_wrong_order(wrong, x):
    return all_gather(x, ("model", "data") if wrong else ("data", "model"), tiled=True)


@layer_on_shards("order of shards", P("data", "model"), FEATURES)
def sequence_interleaved_by_an_all_to_all(wrong, x):
    rows, length, _ = x.shape
    parts = x.reshape(rows, length, axis_size("model"), -1)
    # (rows, n, length / n, features / n), or (rows, length / n, n, features / n)
    parts = all_to_all(parts, "model", 2, 2 if wrong else 1)
    return jnp.cumsum(parts.reshape(rows, LENGTH, -1), 1)


@layer("order of shards", (WIDTH, 2 * WIDTH))
def fused_kernel_split_after_it_was_sharded(wrong):
    def gated(x, kernel):  # (features, 2, hidden / n), or (features, 2 * hidden / n)
        gate, value = jnp.split((x @ kernel.reshape(WIDTH, -1)), 2, -1)
        return jax.nn.sigmoid(gate) * value

    spec = P(None, "model") if wrong else P(None, None, "model")
    local = on_shards(gated, (P("data"), spec), FEATURES)
    return lambda x, kernel: local(x, kernel if wrong else kernel.reshape(WIDTH, 2, WIDTH))


@layer("transposed spec", (WIDTH, WIDTH))
def kernel_with_a_transposed_spec_gathered(wrong):
    def gathered(x, kernel):
        return x @ all_gather(kernel, "model").reshape(WIDTH, WIDTH)

    spec = P(None, "model") if wrong else P("model")
    return on_shards(gathered, (P("data"), spec), P("data"))


@layer_on_shards("normalization over a shard", FEATURES, FEATURES)
def layer_norm_over_the_features_of_a_shard(wrong, x):
    mean, square = x.mean(-1, keepdims=True), (x**2).mean(-1, keepdims=True)
    if not wrong:
        mean, square = pmean((mean, square), "model")
    return (x - mean) * jax.lax.rsqrt(square - mean**2 + 1e-5)


@layer_on_shards("normalization over a shard", P("data"), P("data"))
def batch_norm_over_the_rows_of_a_shard(wrong, x):
    mean = x.mean((0, 1))
    return x - (mean if wrong else pmean(mean, "data"))


@layer_on_shards("mean of means", P("data"), P("data"))
def variance_as_the_mean_of_variances(wrong, x):
    mean = pmean(x.mean((0, 1)), "data")
    center = x.mean((0, 1)) if wrong else mean
    variance = pmean(((x - center) ** 2).mean((0, 1)), "data")
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5)


TABLE = (WORDS, WIDTH), P("model")


@layer_on_shards("mask of another shard", P("data"), P("data"), TABLE, words=True)
def words_of_other_shards_not_masked(wrong, words, table):
    local = words - axis_index("model") * len(table)
    rows = table[jnp.clip(local, 0, len(table) - 1)]
    is_here = (local >= 0) & (local < len(table))
    return psum(rows if wrong else jnp.where(is_here[..., None], rows, 0), "model")


@layer_on_shards("position in a shard", P("data"), P("data"), TABLE, words=True)
def words_looked_up_by_the_index_along_another_axis(wrong, words, table):
    local = words - axis_index("data" if wrong else "model") * len(table)
    is_here = (local >= 0) & (local < len(table))
    rows = table[jnp.clip(local, 0, len(table) - 1)]
    return psum(jnp.where(is_here[..., None], rows, 0), "model")
