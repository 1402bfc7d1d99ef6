"""Attention over sharded sequences by every method: numbers of one matrix, what is sent, memory."""

from __future__ import annotations

import functools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.random import threefry_2x32
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding import jit
from nnx_sharding.experimental import (
    all_gather_attention,
    all_to_all_attention,
    balanced_order,
    blocks,
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
            # Half of the cells have several blocks of queries and keys on each device.
            "block": 3 if len(found) % 2 else None,
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
    with jax.set_mesh(mesh), pytest.MonkeyPatch.context() as patch:
        if cell["block"]:
            patch.setattr(blocks, "BLOCK_LENGTH", cell["block"])
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


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axis", ["outer", ("inner", "outer")])
def test_all_gather_over_axes_in_any_order(axis, kind, balanced):
    """Other axes may be left Explicit, and those of the sequence in another order."""
    mesh = make_mesh(MESHES["two"], [kind] * 3)
    arrays = [jax.random.normal(jax.random.key(i), (2, 32, 2, SIZE)) for i in range(3)]
    placed = jax.device_put(arrays, NamedSharding(mesh, P(None, axis)))

    def loss(attend, *arrays):
        return jnp.sin(attend(*arrays, is_causal=True)).sum()

    ours = functools.partial(all_gather_attention, axis=axis, balanced=balanced)
    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(functools.partial(loss, ours), (0, 1, 2)))(*placed)
    wanted = jax.grad(functools.partial(loss, jax.nn.dot_product_attention), (0, 1, 2))(*arrays)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


def scan_lengths(jaxpr):
    """The numbers of steps of all loops in a jaxpr, also of inner ones."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn.params["length"]
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(getattr(x, "jaxpr", x), "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from scan_lengths(inner)


@pytest.mark.parametrize("local", [1000, 1031, 2078, 4096, 8000, 8198])
@pytest.mark.parametrize("method", ["ring", "all_to_all", "all_gather"])
def test_loops_are_short_for_any_length(method, local):
    """1,031 is prime, as is half of 2,078: a loop over single tokens would take 7 times as long."""
    mesh = make_mesh({"sequence": 8}, AxisType.Auto)
    x = jax.ShapeDtypeStruct((1, 8 * local, 8, 16), jnp.float32)

    def loss(query, key, value):
        options = {"mesh": mesh, "axis": "sequence", "is_causal": True}
        return METHODS[method](query, key, value, **options).sum()

    found = [*scan_lengths(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, x).jaxpr)]
    assert max(found, default=0) <= 8 * local / blocks.BLOCK_LENGTH * 8


def compiled(method, sizes, length=256, heads=8, key_heads=2, dtype="float32", **options):
    """The outputs and gradients of causal attention."""
    mesh = make_mesh(sizes)
    sequence = ("outer", "inner") if "inner" in sizes else "context"
    query = jax.ShapeDtypeStruct((1, length, heads, 16), dtype)
    key = jax.ShapeDtypeStruct((1, length, key_heads, 16), dtype)

    def step(query, key, value, d_out):
        attend = functools.partial(METHODS[method], is_causal=True, **options)
        out, pullback = jax.vjp(attend, query, key, value)
        return out, pullback(d_out)

    spec = P(None, sequence)
    run = jit(step, mesh=mesh, in_shardings=spec, out_shardings=spec)
    return run.lower(query, key, key, query).compile()


def bytes_by_hand(method, sizes, length, heads, key_heads, itemsize, balanced):
    """What one device sends, forward and backward; queries and keys are those of one device."""
    devices = 8
    wide = max(itemsize, 4)  # of gradients that are summed
    query = length // devices * heads * 16 * itemsize
    key = length // devices * key_heads * 16 * itemsize
    if method == "all_gather":
        moved = 4 * query if balanced else 0  # queries and outputs, and the gradients of both
        return (devices - 1) * 2 * key * (1 + wide // itemsize) + moved
    inner = sizes.get("inner", devices)
    key *= math.lcm(key_heads, inner) // key_heads
    exchanged = 2 * (inner - 1) / inner * (2 * query + 2 * key)
    if method == "all_to_all":
        return exchanged
    outer, positions = sizes["outer"], length // sizes["outer"] * 4
    once = (outer - 1) * (2 * key + positions)
    moved = 4 * (query + key) if balanced else 0
    return exchanged + 2 * once + outer * 2 * key * wide // itemsize + moved


@pytest.mark.parametrize(
    ("method", "sizes", "key_heads", "dtype", "balanced"),
    [
        ("all_to_all", {"context": 8}, 8, "float32", False),
        ("all_to_all", {"context": 8}, 2, "float32", True),
        ("all_gather", {"context": 8}, 2, "float32", False),
        ("all_gather", {"context": 8}, 2, "float32", True),
        ("two axes", {"outer": 2, "inner": 4}, 2, "float32", False),
        ("two axes", {"outer": 4, "inner": 2}, 4, "float32", True),
    ],
)
def test_what_is_sent(method, sizes, key_heads, dtype, balanced):
    options = {"key_heads": key_heads, "dtype": dtype, "balanced": balanced}
    sent = compiled(method, sizes, **options).collectives().bytes_sent
    itemsize = jnp.dtype(dtype).itemsize
    by_hand = bytes_by_hand(method, sizes, 256, 8, key_heads, itemsize, balanced)
    assert sent == pytest.approx(by_hand, rel=0.01)


@pytest.mark.parametrize("method", ["ring", "all_to_all", "all_gather"])
def test_memory_does_not_grow_with_the_square_of_the_length(method):
    """Beyond a block, four times the length takes at most four times the memory, and little."""
    peaks = [compiled(method, {"context": 8}, n).memory().peak for n in (8192, 32768)]
    assert peaks[1] < 4.2 * peaks[0]


def test_heads_that_devices_do_not_divide():
    with pytest.raises(ValueError, match=r"8 devices along 'context' do not divide 4 heads; exch"):
        compiled("all_to_all", {"context": 8}, heads=4)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        # Without a mesh, an attention of the user may know what to return.
        (((2, 16, 8, 4), (2, 0, 8, 4)), r"key: shape \(2, 0, 8, 4\) has no tokens"),
        (((2, 16, 0, 4), (2, 16, 0, 4)), r"query: shape \(2, 16, 0, 4\) has no heads or features"),
    ],
)
@pytest.mark.parametrize("attention", [None, jax.nn.dot_product_attention])
@pytest.mark.parametrize("method", [all_gather_attention, all_to_all_attention])
def test_keys_of_no_size(method, attention, shapes, message):
    mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))
    query, key = map(jnp.ones, shapes)
    with pytest.raises(ValueError, match=message):
        method(query, key, key, mesh=mesh, attention=attention)


def test_an_attention_of_the_user_needs_one_axis():
    with pytest.raises(ValueError, match="expected one axis, or two without attention"):
        options = {"attention": jax.nn.dot_product_attention}
        compiled("two axes", {"outer": 2, "inner": 4}, **options)


def test_dropout_needs_a_parameter_of_the_attention():
    options = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}
    with pytest.raises(ValueError, match="attention has no parameter dropout_rng"):
        compiled("all_to_all by jax", {"context": 8}, **options)


def test_each_device_drops_other_weights_of_an_attention_of_the_user():
    """The same rows and heads on all devices: their outputs differ by what is dropped alone."""
    x = jnp.ones((2, 16, 8, 4)).at[:, ::2].set(-1)
    options = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0), "broadcast_dropout": True}
    with jax.set_mesh(make_mesh({"data": 2, "context": 4}, AxisType.Auto)):
        run = functools.partial(METHODS["all_to_all by flax"], batch_axis="data", **options)
        out = np.asarray(jax.jit(run)(x, x, x))  # (batch, length, heads, features)
    by_device = out.reshape(2, 16, 4, 2, 4).transpose(0, 2, 1, 3, 4).reshape(8, -1)
    assert len({x.tobytes() for x in by_device}) == 8


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("method", [all_to_all_attention, all_gather_attention])
def test_replicas_drop_the_same_weights_of_an_attention_of_the_user(method, implementation):
    """The axis "data" shards nothing, so the devices along it compute the same."""
    x = jax.random.normal(jax.random.key(1), (2, 16, 8, 4))
    mesh = make_mesh({"data": 2, "context": 4}, AxisType.Auto)
    with jax.default_prng_impl(implementation), jax.set_mesh(mesh):
        key = jax.random.key(0)
        run = functools.partial(by_flax(method), dropout_rate=0.5, dropout_rng=key)
        out = jax.jit(run)(x, x, x)
    replicas = {}
    for shard in out.addressable_shards:
        replicas.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    assert [len(contents) for contents in replicas.values()] == [1] * 4
