"""Attention over sharded sequences by every method: numbers of one matrix, what is sent, memory."""

from __future__ import annotations

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.random import threefry_2x32
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding.experimental import (
    all_gather_attention,
    all_to_all_attention,
    balanced_order,
    ring_attention,
)
from nnx_sharding.partition import make_mesh

BATCH, HEADS, SIZE, FEATURES = 4, 8, 8, 6
TWO_AXES = functools.partial(all_to_all_attention, axis=("inner", "outer"))


def by_jax(function):
    return functools.partial(function, attention=jax.nn.dot_product_attention)


def by_flax(function):
    """Flax's, which knows dropout, but neither scale nor precision as a keyword of ours."""
    return functools.partial(function, attention=nnx.dot_product_attention)


def told_positions(
    query, key, value, *, is_causal=False, query_positions=None, key_positions=None, **options
):
    """A function that is told where its queries and keys are, as a kernel may be."""
    mask = options.pop("mask", None)
    if is_causal:
        apart = query_positions[..., :, None] - key_positions[..., None, :]
        apart = apart[None, None] if apart.ndim == 2 else apart[:, None]
        mask = (apart >= 0) if mask is None else mask & (apart >= 0)
    return jax.nn.dot_product_attention(query, key, value, mask=mask, **options)


METHODS = {
    "ring": ring_attention,
    "all_to_all": all_to_all_attention,
    "all_gather": all_gather_attention,
    "two axes": TWO_AXES,
    "all_to_all by jax": by_jax(all_to_all_attention),
    "all_gather by jax": by_jax(all_gather_attention),
    "all_to_all by flax": by_flax(all_to_all_attention),
    "all_gather with positions": functools.partial(all_gather_attention, attention=told_positions),
}
MESHES = {
    "all": {"data": 2, "context": 2, "model": 2},
    "data": {"data": 2, "context": 4},
    "one": {"context": 8},
    "two": {"outer": 2, "data": 2, "inner": 2},
    "wide": {"inner": 4, "outer": 2},
}
KINDS = ("Auto", "Explicit", "mixed")
# The dimensions of a mask that are whole: of the batch, heads, queries, keys; the last n of them.
MASKS = (None, None, "k", "qk", "hqk", "bk", "bqk", "bhqk", "1k", "11k", "q1")


def shape_of_mask(name, queries, keys):
    sizes = {"b": BATCH, "h": HEADS, "q": queries, "k": keys, "1": 1}
    if name == "bk":  # of Flax: (batch, 1, 1, keys)
        return BATCH, 1, 1, keys
    if name == "bqk":
        return BATCH, 1, queries, keys
    return tuple(sizes[x] for x in name)


def cells(count, seed=0):
    """Draws cells at random, without those that are refused."""
    draw = random.Random(seed)
    found = []
    while len(found) < count:
        method = draw.choice([*METHODS])
        meshes = ("two", "wide") if method == "two axes" else ("all", "data", "one")
        cell = {
            "method": method,
            "mesh": draw.choice(meshes),
            "kind": draw.choice(KINDS),
            "key_heads": draw.choice((8, 4, 2, 1)),
            "length": draw.choice((32, 48)),
            "keys": draw.choice((None, None, None, 24, 37)),
            "mask": draw.choice(MASKS),
            "dtype": draw.choice(("float32", "float32", "bfloat16")),
            "is_causal": draw.random() < 0.6,
            "window": draw.choice((None, None, 7)),
            "order": draw.choice((None, None, "balanced", "of each row")),
            "segments": draw.random() < 0.3,
            "dropout": draw.choice((None, None, "shared", "own")),
            "scale": draw.choice((None, 0.3)),
            "balanced": draw.random() < 0.6,
            "named": draw.random() < 0.7,
            "rope": draw.random() < 0.2,
        }
        if cell["keys"] is not None:  # another sequence has no order in common
            cell |= {"is_causal": False, "window": None, "order": None, "segments": False}
        if "by" in method or "with" in method:
            cell["dropout"] = None  # with bits of its own
        found.append(cell)
    return found


def mesh_of(cell):
    sizes = MESHES[cell["mesh"]]
    kinds = {"Auto": [AxisType.Auto] * 3, "Explicit": [AxisType.Explicit] * 3}
    mixed = [AxisType.Explicit, AxisType.Auto, AxisType.Explicit]
    return make_mesh(sizes, kinds.get(cell["kind"], mixed)[: len(sizes)])


def kept_weights(key, rate, queries, keys, *, is_shared):
    """Which weights dropout keeps, one after another: (batch, heads, queries, keys)."""
    words = jax.random.bits(key, (2,), "uint32")
    counters = jnp.stack([*jnp.mgrid[:queries, :keys]]).astype("uint32")
    kept = []
    for row in range(1 if is_shared else BATCH):
        for head in range(1 if is_shared else HEADS):
            of_head = threefry_2x32(words, jnp.asarray([row, head], "uint32"))
            kept.append(threefry_2x32(of_head, counters)[0] >= np.uint32(rate * 2**32))
    shape = (1, 1) if is_shared else (BATCH, HEADS)
    return jnp.stack(kept).reshape(*shape, queries, keys) / (1 - rate)


def attention(query, key, value, visible, kept, scale):
    """Attention in one matrix; rows that may attend to nothing are zero."""
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, 2) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * scale
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights * visible.any(-1, keepdims=True) * kept, value)


def visible_to(positions, segments, mask, is_causal, window, queries, keys):
    found = jnp.ones((BATCH, 1, queries, keys), bool)
    if is_causal or window:
        places = jnp.arange(queries) if positions is None else jnp.asarray(positions)
        places = jnp.broadcast_to(places, (BATCH, queries))
        apart = places[:, None, :, None] - places[:, None, None, :]
        found &= apart >= 0 if is_causal else True
        found &= jnp.abs(apart) < window if window else True
    if segments is not None:
        found &= segments[:, None, :, None] == segments[:, None, None, :]
    return found if mask is None else found & mask


def check(cell):
    """Compares values and gradients with those of attention in one matrix."""
    mesh, generator = mesh_of(cell), np.random.default_rng(0)
    length = cell["length"]
    keys = cell["keys"] or length
    sequence = ("outer", "inner") if "inner" in mesh.shape else "context"
    ring = mesh.shape.get("outer") or mesh.shape["context"]
    positions = {
        None: None,
        "balanced": balanced_order(length, ring),
        "of each row": np.stack([generator.permutation(length) for _ in range(BATCH)]),
    }[cell["order"]]
    segments = None
    if cell["segments"]:
        segments = jnp.asarray(generator.integers(0, 3, (BATCH, length)))
    mask = None
    if cell["mask"]:
        mask = jnp.asarray(generator.random(shape_of_mask(cell["mask"], length, keys)) < 0.8)
    dtype = jnp.dtype(cell["dtype"])
    shapes = ((length, HEADS, SIZE), (keys, cell["key_heads"], SIZE))
    shapes += ((keys, cell["key_heads"], FEATURES), (length, HEADS, FEATURES))
    if "by" in cell["method"] or "with" in cell["method"]:
        shapes = tuple((*shape[:2], SIZE) for shape in shapes)  # as JAX's function needs
    arrays = [
        jax.random.normal(jax.random.key(i), (BATCH, *shape)).astype(dtype)
        for i, shape in enumerate(shapes)
    ]
    visible = visible_to(positions, segments, mask, cell["is_causal"], cell["window"], length, keys)
    # Others give rows that may attend to nothing the mean of all values.
    arrays[3] = arrays[3] * jnp.broadcast_to(visible.any(-1), (BATCH, HEADS, length))[
        ..., None
    ].swapaxes(1, 2)
    rope = nnx.RoPE() if cell["rope"] and hasattr(nnx, "RoPE") else None
    options = {"is_causal": cell["is_causal"], "window": cell["window"], "rope": rope}
    options |= {"input_positions": positions, "segment_ids": segments, "scale": cell["scale"]}
    options["balanced"] = cell["balanced"]
    if cell["named"]:
        options |= {"batch_axis": "data", "head_axis": "model"}
    key, rate, kept = jax.random.key(7), 0.25, 1
    if cell["dropout"]:
        is_shared = cell["dropout"] == "shared"
        options |= {"dropout_rate": rate, "dropout_rng": key, "broadcast_dropout": is_shared}
        kept = kept_weights(key, rate, length, keys, is_shared=is_shared)

    def ours(query, key, value, weights):
        out = METHODS[cell["method"]](query, key, value, mask=mask, **options)
        return (out.astype("float32") * weights.astype("float32")).sum(), out

    def plain(query, key, value, weights):
        if rope is not None:
            places = jnp.arange(length) if positions is None else jnp.asarray(positions)
            places = jnp.broadcast_to(places, (BATCH, length))
            query = jax.vmap(rope)(query.swapaxes(1, 2), places).swapaxes(1, 2)
            places = places if keys == length else jnp.tile(jnp.arange(keys), (BATCH, 1))
            key = jax.vmap(rope)(key.swapaxes(1, 2), places).swapaxes(1, 2)
        out = attention(query, key, value, visible, kept, cell["scale"])
        return (out * weights).sum(), out

    wide = [x.astype("float32") for x in arrays]
    (_, wanted), wanted_grads = jax.value_and_grad(plain, (0, 1, 2), has_aux=True)(*wide)
    data = "data" if "data" in mesh.shape else None
    heads = "model" if "model" in mesh.shape else None
    placed = []
    for x in arrays:
        fits = x.shape[1] % (mesh.size // 1) == 0
        fits_heads = heads if heads and x.shape[2] % 2 == 0 else None
        spec = P(data, sequence if fits else None, fits_heads)
        placed.append(jax.device_put(x, NamedSharding(mesh, spec)))
    with jax.set_mesh(mesh):
        found = jax.jit(jax.value_and_grad(ours, (0, 1, 2), has_aux=True))(*placed)
    (_, out), grads = found
    assert out.dtype == dtype
    # bfloat16 rounds to 1/256, of sums of up to 48 terms.
    limits = {"rtol": 1e-4, "atol": 2e-5} if dtype == jnp.float32 else {"rtol": 0.06, "atol": 0.08}
    seen = np.asarray(visible.any(-1) | jnp.zeros((1, HEADS, 1), bool)).swapaxes(1, 2)[..., None]
    pairs = [
        (jnp.where(seen, out, 0), jnp.where(seen, wanted, 0)),
        *zip(grads, wanted_grads, strict=True),
    ]
    for one, other in pairs:
        np.testing.assert_allclose(one.astype("float32"), other, **limits)


def name_of(cell):
    return "-".join("" if x is None else str(x) for x in cell.values())


@pytest.mark.parametrize("cell", cells(12), ids=name_of)
def test_equals_attention_in_one_matrix(cell):
    check(cell)


@pytest.mark.parametrize("cell", cells(320, seed=1), ids=name_of)
def test_equals_attention_in_one_matrix_at_random(cell):
    check(cell)
