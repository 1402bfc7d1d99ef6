"""``ring_attention``: the numbers of attention in one matrix, what is sent, and the memory."""

from __future__ import annotations

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from nnx_sharding import jit, stack
from nnx_sharding.experimental import balanced_order, ring_attention
from nnx_sharding.experimental.blocks import Rule, may_attend
from nnx_sharding.experimental.context import METHODS
from nnx_sharding.partition import fsdp, make_mesh
from nnx_sharding.planning.predictions import products_in
from zoo import Causal, assert_trains_alike, batch_of, mean_square


@pytest.mark.parametrize("remat", [False, True])
def test_a_stack_with_fsdp_over_both_axes(remat):
    def make(rngs):
        return stack(functools.partial(Causal, function=ring_attention), 3, remat=remat, rngs=rngs)

    mesh = make_mesh({"data": 2, "context": 4})
    strategy = functools.partial(fsdp, axis=("data", "context"), min_size=0)
    batch = functools.partial(batch_of, mean_square, 4, 24)
    assert_trains_alike(make, strategy, mesh, batch=batch, spec=P("data", "context"), steps=1)


def compiled(shards, length, dtype=jnp.bfloat16, **options):
    """The gradients of attention over a sequence on so many devices."""
    mesh = make_mesh({"context": shards}, devices=jax.devices()[:shards])
    like = jax.ShapeDtypeStruct((1, length, 2, 32), dtype)

    def fun(query, key, value):
        out = ring_attention(query, key, value, is_causal=True, **options)
        return (out.astype(jnp.float32) ** 2).sum()

    step = jit(jax.grad(fun, (0, 1, 2)), mesh=mesh, in_shardings=P(None, "context"))
    return step.lower(like, like, like).compile()


def test_what_is_sent():
    shards, length = 8, 256
    sent = compiled(shards, length, jnp.float32).collectives()
    assert {each.kind for each in sent} == {"collective-permute"}
    block, positions = length // shards * 2 * 32 * 4, length // shards * 4
    # All but the own keys, values and positions come by, twice; gradients go home in one step more.
    moved = 2 * (shards - 1) * (2 * block + positions) + shards * 2 * block
    assert sent.bytes_sent == moved


def test_memory_falls_with_the_number_of_devices():
    peaks = [compiled(shards, 2048).memory().peak for shards in (1, 2, 4, 8)]
    for more, fewer in itertools.pairwise(peaks):
        assert fewer < 0.6 * more


@pytest.mark.parametrize("attend", METHODS.values(), ids=METHODS)
def test_without_rank_promotion(attend):
    mesh = jax.make_mesh((4,), ("context",))
    heads = jax.ShapeDtypeStruct((2, 16, 4, 8), jnp.float32)
    options = {"is_causal": True, "dropout_rate": 0.1, "mask": jnp.ones((16, 16), bool)}

    def total(*arrays):
        return attend(
            *arrays, mesh=mesh, dropout_rng=jax.random.key(0), broadcast_dropout=False, **options
        ).sum()

    with jax.numpy_rank_promotion("raise"):
        jax.eval_shape(jax.grad(total, (0, 1, 2)), heads, heads, heads)


def test_bfloat16():
    arrays = [jax.random.normal(jax.random.key(i), (2, 64, 4, 16)) for i in range(3)]
    mesh = make_mesh({"context": 8})
    fun = jit(lambda *x: ring_attention(*x, is_causal=True), mesh=mesh)
    found = fun(*(x.astype(jnp.bfloat16) for x in arrays))
    expected = jax.nn.dot_product_attention(*arrays, is_causal=True)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=0.05)


@pytest.mark.parametrize(("length", "shards"), [(48, 4), (64, 8), (16, 1)])
def test_balanced_order(length, shards):
    order = balanced_order(length, shards)
    assert sorted(order.tolist()) == [*range(length)]
    pairs = (order + 1).reshape(shards, -1).sum(1)  # keys that the queries of a shard attend to
    assert len({*pairs.tolist()}) == 1
    with pytest.raises(ValueError, match=f"2 × {shards} shards do not divide {length + 1}"):
        balanced_order(length + 1, shards)


def test_devices_have_equal_work_in_the_balanced_order():
    shards, length = 8, 64
    ring = Rule(is_causal=True)

    def blocks(order):
        """How many halves of blocks the halves of each device's queries attend to."""
        parts = order.reshape(shards, 2, -1)
        halves = parts.reshape(2 * shards, -1)
        return [sum(may_attend(ring, x, y) for x in own for y in halves) for own in parts]

    assert blocks(balanced_order(length, shards)) == [2 * shards + 1] * shards
    assert blocks(np.arange(length)) == [4 * i + 3 for i in range(shards)]


Q, K = (2, 48, 4, 8), (2, 48, 2, 8)


@pytest.mark.parametrize(
    ("shapes", "options", "text"),
    [
        ((Q, K, (2, 48, 4, 8)), {}, "query .* do not fit"),
        ((Q, (2, 48, 3, 8), (2, 48, 3, 8)), {}, "3 heads of keys do not divide 4 heads"),
        ((Q[1:], K, K), {}, r"query: shape \(48, 4, 8\), not 4-D"),
        (((2, 0, 4, 8), K, K), {}, r"query: shape \(2, 0, 4, 8\) has no tokens"),
        ((Q, *[(2, 0, 2, 8)] * 2), {}, r"(?s)key: shape \(2, 0, 2, 8\) has no tokens.*value: "),
        (((2, 49, 4, 8), K, K), {}, "8 devices along 'context' do not divide 49 queries; pad"),
        (((2, 24, 4, 8), K, K), {"is_causal": True}, "for as many keys as queries"),
        (
            (Q, K, K),
            {"mask": np.ones((3, 1, 48, 48), bool)},
            "mask: .* does not broadcast",
        ),
        (
            (Q, K, K),
            {"mask": np.ones((1, 1, 1, 48, 48), bool)},
            "mask: .* does not broadcast",
        ),
        (
            (Q, K, K),
            {"input_positions": np.arange(3)},
            r"input_positions: shape \(3,\), not \(48,\)",
        ),
        ((Q, K, K), {"segment_ids": np.ones(48, int)}, r"segment_ids: shape \(48,\)"),
        ((Q, K, K), {"axis": "contxt"}, "did you mean 'context'"),
        ((Q, K, K), {"window": 0, "bias": 1}, "bias: not supported\n.*\n?.*window=0"),
        ((Q, K, K), {"dropout_rate": 0.1}, "dropout_rng, a random key, is needed"),
        ((Q, K, K), {"module": nnx.Module()}, "sowing weights"),
    ],
)
def test_wrong_calls(shapes, options, text):
    arrays = [jnp.ones(shape) for shape in shapes]
    with pytest.raises(ValueError, match=text), jax.set_mesh(make_mesh({"context": 8})):
        ring_attention(*arrays, **options)


@pytest.mark.parametrize("remat", [False, True])
def test_masks_of_all_blocks_are_not_kept_for_a_loop_over_layers(remat):
    """What depends on positions alone is the same in all layers, but may not be held for them."""
    mesh, length = make_mesh({"context": 8}, AxisType.Auto), 1024

    def layer(x):
        heads = x.reshape(1, length, 4, 8)
        out = ring_attention(heads, heads, heads, is_causal=True, window=300, mesh=mesh)
        return x + out.reshape(x.shape)

    def loss(x):
        run = jax.checkpoint(layer) if remat else layer
        return jax.lax.scan(lambda x, _: (run(x), None), x, None, 3)[0].sum()

    x = jax.ShapeDtypeStruct((1, length, 32), jnp.float32)
    text = jax.jit(jax.grad(loss)).lower(x).as_text()
    shapes = {
        tuple(map(int, shape.split("x"))) for shape in re.findall(r"tensor<(\d[\dx]*)x", text)
    }
    part = length // 8 // 2  # of the queries, or of the keys, of a device
    blocks = [shape for shape in shapes if shape[-2:] == (part, part)]
    assert blocks and max(map(math.prod, blocks)) == 4 * part * part  # one block, in each head


@pytest.mark.parametrize("kind", ["moved", "by the user", "in order"])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_causal_products_by_hand(kind, with_gradients):
    shards, length, heads, size = 8, 256, 2, 8
    mesh = make_mesh({"context": shards}, AxisType.Auto)
    order = {"input_positions": balanced_order(length, shards)} if kind == "by the user" else {}

    def attend(query, key, value):
        return ring_attention(
            query, key, value, is_causal=True, balanced=kind == "moved", mesh=mesh, **order
        ).sum()

    x = jax.ShapeDtypeStruct((1, length, heads, size), jnp.float32)
    run = jax.grad(attend, (0, 1, 2)) if with_gradients else attend
    product = 2 * heads * (length // shards // 2) ** 2 * size  # of halves of two blocks
    # Of its own keys three halves, of all others two; in order, the last device needs all.
    halves = 4 * shards if kind == "in order" else 3 + 2 * (shards - 1)
    products = 2 + 5 * with_gradients  # backward again the scores, and four more
    assert products_in(jax.make_jaxpr(run)(x, x, x).eqns).flops == halves * products * product
