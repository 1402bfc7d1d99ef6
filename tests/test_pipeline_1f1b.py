"""``pipeline(schedule="1f1b")``: the numbers of accumulated gradients on one device."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from nnx_sharding import accumulate_gradients, grad, jit, remat, shard_map, stack, value_and_grad
from nnx_sharding.partition import fsdp, pipeline, tensor_parallel
from zoo import assert_close

FEATURES, VOCABULARY = 8, 12
LAYERS = nnx.All(nnx.Param, nnx.PathContains("blocks"))


class Block(nnx.Module):
    """A layer with statistics and dropout."""

    def __init__(self, *, rngs):
        self.norm = nnx.BatchNorm(FEATURES, rngs=rngs)
        self.up = nnx.Linear(FEATURES, 2 * FEATURES, rngs=rngs)
        self.down = nnx.Linear(2 * FEATURES, FEATURES, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, mask=None, scale=1.0):
        y = self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))
        return x + scale * (y if mask is None else jnp.where(mask[..., None], y, 0))


class Paired(nnx.Module):
    """A layer that passes on more than the rows, also integers."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(FEATURES, FEATURES, rngs=rngs)

    def __call__(self, inputs):
        x, mask, total = inputs
        x = x + jnp.where(mask[..., None] > 0, self.linear(x), 0)
        return x, mask, total + (x**2).mean(-1)


class Own(nnx.Module):
    """A layer of products by hand, one recomputed, and a parameter that all rows are added to."""

    def __init__(self, *, rngs):
        self.up = nnx.Param(0.3 * rngs.normal((FEATURES, 3, 4)))
        self.down = nnx.Param(0.3 * rngs.normal((12, FEATURES)))
        self.bias = nnx.Param(rngs.normal((3, FEATURES)))

    def __call__(self, x):
        @jax.checkpoint
        def inside(x, up, down):
            hidden = jnp.tanh(jnp.einsum("btf,fhk->bhtk", x, up))
            rows = jnp.concatenate([hidden[:, i] for i in range(3)], -1)
            return rows @ (down - down.mean())

        return x + inside(x, self.up[...], self.down[...]) + 0.1 * self.bias[...]


class Model(nnx.Module):
    """An embedding and a head around layers; ``call`` says how these are called."""

    def __init__(self, call, *, options, block=Block, is_list=False):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCABULARY, FEATURES, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.scale = nnx.Param(jnp.full(1, 0.5))
        self.blocks = stack(block, 4, rngs=rngs, **options)
        if is_list:
            self.blocks = nnx.List(self.blocks)
        self.norm = nnx.BatchNorm(FEATURES, rngs=rngs)
        self.head = nnx.Linear(FEATURES, VOCABULARY, rngs=rngs)
        self.call = call

    def __call__(self, tokens):
        return self.call(self, tokens)


class Mapped(nnx.Module):
    """A layer with a ``shard_map`` of its own."""

    def __init__(self, *, rngs):
        self.dense = nnx.Linear(FEATURES, FEATURES, rngs=rngs)

    def __call__(self, x):
        @shard_map(in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        def centred(x):
            return x - jax.lax.pmean(x.mean(0), "data")

        return x + centred(self.dense(x))


def plainly(model, tokens):
    return model.head(model.blocks(model.embed(tokens)))


def with_state_on_both_sides(model, tokens):
    x = model.dropout(model.embed(tokens))
    return model.head(model.norm(model.blocks(x) + x))  # a skip connection


def tied(model, tokens):
    return model.embed.attend(model.blocks(model.embed(tokens)))


def with_a_mask_and_a_parameter(model, tokens):
    return model.head(model.blocks(model.embed(tokens), tokens > 2, scale=model.scale[...]))


def one_by_one(model, tokens):
    x, mask = model.embed(tokens), tokens > 2
    for block in model.blocks:
        x = block(x, mask)
    return model.head(x)


def in_pairs(model, tokens):
    x, _, total = model.blocks((model.embed(tokens), tokens, jnp.zeros(tokens.shape)))
    return model.head(x) + total[..., None]


def pairs_one_by_one(model, tokens):
    x, mask, total = model.embed(tokens), tokens, jnp.zeros(tokens.shape)
    for block in model.blocks:
        x, mask, total = block((x, mask, total))
    return model.head(x) + total[..., None]


def loss(model, tokens):
    logits = model(tokens)
    labels = jax.nn.one_hot(jnp.roll(tokens, 1, 1), VOCABULARY)
    return -(jax.nn.log_softmax(logits) * labels).sum(-1).mean()


def loss_and_logits(model, tokens):
    return loss(model, tokens), (tokens.sum(), tokens + 1, model.embed(tokens))


def sharding_of(model, mesh, strategy, **options):
    base = strategy and strategy(model, mesh=mesh)
    return pipeline(model, mesh=mesh, base=base, schedule="1f1b", **options)


def check(model, kind, stages, steps, strategy=None, fun=loss, atol=2e-5, **options):
    """Checks a step in stages against one on one device; returns the compiled one."""
    like, tokens = nnx.clone(model), jax.random.randint(jax.random.key(1), (16, 3), 0, VOCABULARY)
    options = {"steps": steps, "wrt": nnx.Param, **options}

    def gradients(model, tokens):
        return accumulate_gradients(fun, **options)(model, tokens)

    def gradients_on_one_device(model, tokens):
        return accumulate_gradients(fun, **{**options, "axis": None})(model, tokens)

    sizes = (stages, 2, 2)[: 3 if stages == 2 else 2]
    names = ("stage", "data", "model")[: len(sizes)]
    mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))
    sharding = sharding_of(model, mesh, strategy)
    step = jit(gradients, mesh=mesh, in_shardings=(sharding, P("data")))
    compiled = step.lower(model, tokens).compile()
    found = compiled(model, jax.device_put(tokens, jax.NamedSharding(mesh, P("data"))))
    expected = jit(gradients_on_one_device)(like, tokens)
    assert_close((found, nnx.state(model)), (expected, nnx.state(like)), atol=atol)
    return compiled


def fsdp_small(model, mesh):
    return fsdp(model, mesh=mesh, min_size=16)


def columns(model, mesh):
    return tensor_parallel(model, mesh=mesh)


CASES = {
    "all alike": (plainly, {}, 4, 8, {}),
    "fewer microbatches than stages": (plainly, {}, 4, 2, {}),
    "one microbatch": (plainly, {"remat": True}, 2, 1, {}),
    "fsdp": (plainly, {}, 4, 8, {"strategy": fsdp_small}),
    "tensor parallel": (plainly, {}, 2, 4, {"strategy": columns}),
    "remat": (with_state_on_both_sides, {"remat": True}, 4, 8, {"strategy": fsdp_small}),
    "remat of dots": (plainly, {"remat": "dots_saveable"}, 2, 4, {}),
    "state": (with_state_on_both_sides, {}, 4, 8, {}),
    "tied": (tied, {}, 4, 8, {"strategy": fsdp_small}),
    "further arguments": (with_a_mask_and_a_parameter, {}, 4, 8, {}),
    "pairs": (in_pairs, {"block": Paired}, 4, 8, {}),
    "list of pairs": (pairs_one_by_one, {"block": Paired, "is_list": True}, 2, 4, {}),
    "list": (one_by_one, {"is_list": True}, 4, 8, {"strategy": fsdp_small}),
    "auxiliary data": (plainly, {}, 2, 4, {"fun": loss_and_logits, "has_aux": True}),
    "sums in another dtype": (plainly, {}, 2, 4, {"dtype": jnp.bfloat16, "atol": 2e-2}),
    "reduced once": (with_state_on_both_sides, {}, 4, 8, {"axis": "data"}),
    "fsdp, reduced once": (
        plainly,
        {"remat": True},
        4,
        8,
        {"strategy": fsdp_small, "axis": "data"},
    ),
    "columns, reduced once": (plainly, {}, 2, 4, {"strategy": columns, "axis": "data"}),
    "tied, reduced once": (tied, {}, 4, 8, {"axis": "data"}),
    "list, reduced once": (one_by_one, {"is_list": True}, 4, 8, {"axis": "data"}),
    "argument, reduced once": (with_a_mask_and_a_parameter, {}, 4, 8, {"axis": "data"}),
    "pairs, reduced once": (in_pairs, {"block": Paired}, 4, 8, {"axis": "data"}),
    "own code, reduced once": (plainly, {"block": Own}, 4, 8, {"axis": "data"}),
    "only the head": (plainly, {}, 2, 4, {"wrt": nnx.All(nnx.Param, nnx.PathContains("head"))}),
    "only layers": (plainly, {}, 2, 4, {"wrt": LAYERS}),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_device(name, kind):
    call, options, stages, steps, more = CASES[name]
    named = {key: options[key] for key in ("block", "is_list") if key in options}
    others = {key: x for key, x in options.items() if key not in named}
    check(Model(call, options=others, **named), kind, stages, steps, **more)


def counting_callbacks(counts):
    """Returns a class of layers and a call of a model, with callbacks that count by name."""

    def count(name, x):
        jax.debug.callback(lambda _: counts.update([name]), x.sum())

    @jax.custom_vjp
    def inside_custom_vjp(x):
        count("custom_vjp", x)
        return x

    inside_custom_vjp.defvjp(lambda x: (x, None), lambda _, gradient: (gradient,))

    class Counted(Block):
        def __call__(self, x):
            count("layer", x)
            return super().__call__(x)

    def call(model, tokens):
        jax.jit(lambda tokens: count("before", tokens))(tokens)
        x = model.embed(inside_custom_vjp(tokens.astype(float)).astype(int))
        logits = model.head(model.blocks(x))
        count("after", logits)
        return logits

    return Counted, call


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_callbacks_run_for_each_microbatch(kind):
    """In layers also on stages that wait, as with GPipe."""
    counts = Counter()
    block, call = counting_callbacks(counts)
    step = check(Model(call, options={}, block=block), kind, stages=4, steps=8)
    jax.effects_barrier()
    assert step.memory() is not None
    on_one_device = {"before": 8, "custom_vjp": 8, "after": 8, "layer": 4 * 8}
    in_stages = {"before": 8, "custom_vjp": 8, "after": 8, "layer": 4 * (8 + 3)}
    assert counts == Counter(on_one_device) + Counter(in_stages)


def in_a_scan(function):
    def run(model, tokens):
        def step(_, part):
            return _, function(model, part)

        return jax.lax.scan(step, 0, tokens[None])[1]

    return run


# How the loss is used without `accumulate_gradients`, and whether that is an error.
ELSEWHERE = {
    "called": (loss, False),
    "called in a scan": (in_a_scan(loss), False),
    "gradient of the head": (grad(loss, wrt=nnx.PathContains("head")), False),
    "gradient of layers": (grad(loss, wrt=LAYERS), True),
    "gradient in a scan": (in_a_scan(grad(loss, wrt=nnx.Param)), True),
    "gradient by Flax": (nnx.value_and_grad(loss, graph=True), True),
    "gradient of remat": (grad(remat(loss), wrt=nnx.Param), True),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_only_gradients_of_layers_are_refused_elsewhere(name, kind):
    function, is_refused = ELSEWHERE[name]
    model, tokens = Model(plainly, options={}), jnp.zeros((16, 3), int)
    mesh = jax.make_mesh((4, 2), ("stage", "data"), axis_types=(kind,) * 2)
    shardings = (sharding_of(model, mesh, None), P("data"))
    step = jit(lambda *args: function(*args), mesh=mesh, in_shardings=shardings)
    if not is_refused:
        step.trace(model, tokens)
        return
    with pytest.raises(ValueError, match="has gradients only in accumulate_gradients"):
        step.trace(model, tokens)


@pytest.mark.parametrize(
    ("options", "text"),
    [({"schedule": "interleaved"}, "expected schedule="), ({"repeats": 2}, "has no repeats")],
)
def test_options(options, text):
    model = stack(nnx.Linear, 8, 4, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=text):
        pipeline(
            model,
            mesh=jax.sharding.AbstractMesh((4,), ("stage",)),
            **{"schedule": "1f1b", **options},
        )


def lowered(microbatches, schedule):
    """Lowers a step on microbatches of 2 rows for each of 2 shards of the data."""
    model = Model(plainly, options={"remat": True})
    mesh = jax.make_mesh((4, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    tokens = jnp.zeros((4 * microbatches, 32), int)
    options = {"mesh": mesh, "schedule": schedule, "microbatches": microbatches}
    if schedule == "gpipe":
        step = value_and_grad(loss, wrt=nnx.Param)
    else:
        step = accumulate_gradients(loss, steps=microbatches, wrt=nnx.Param)
    shardings = (pipeline(model, **options), P("data"))
    return jit(lambda *args: step(*args), mesh=mesh, in_shardings=shardings).lower(model, tokens)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_shard_map_in_layers(kind):
    """The numbers are those without stages, on the same mesh."""
    tokens = jax.random.randint(jax.random.key(1), (16, 3), 0, VOCABULARY)
    mesh = jax.make_mesh((2, 2), ("stage", "data"), axis_types=(kind,) * 2)
    found = []
    for strategy in (fsdp_small, lambda model, mesh: sharding_of(model, mesh, None)):
        model = Model(plainly, options={}, block=Mapped)
        gradient = accumulate_gradients(loss, steps=4, wrt=nnx.Param)
        shardings = (strategy(model, mesh), P("data"))
        step = jit(lambda *args, g=gradient: g(*args), mesh=mesh, in_shardings=shardings)
        found.append(jax.device_get(step(model, tokens)))
    assert_close(*found, atol=2e-5)


def test_gradients_and_auxiliary_data_keep_their_types_on_explicit_axes():
    model, tokens = Model(plainly, options={}), jnp.zeros((16, 3), int)
    mesh = jax.make_mesh((4, 2), ("stage", "data"))
    types = {}

    def step(model, tokens):
        options = {"steps": 4, "wrt": nnx.Param, "has_aux": True}
        (_, aux), gradient = accumulate_gradients(loss_and_logits, **options)(model, tokens)
        types["aux"] = [jax.typeof(x).sharding.spec for x in aux]
        types["gradient"] = jax.typeof(gradient.blocks.layers.up.kernel[...]).sharding.spec
        return aux

    shardings = (sharding_of(model, mesh, fsdp_small), P("data"))
    jit(step, mesh=mesh, in_shardings=shardings).trace(model, tokens)
    rows = P(None, "data", None)
    assert types == {"aux": [P(None), rows, P(*rows, None)], "gradient": P("stage", None, "data")}


@pytest.mark.parametrize("strategy", [None, fsdp_small])
@pytest.mark.parametrize("block", [Block, Own])
def test_gradients_are_reduced_once_after_the_loop(strategy, block):
    """By hand: the bytes of the gradients that a device has, and of what `fsdp` gathers for it."""
    model = Model(plainly, options={"remat": True}, block=block)
    del model.scale, model.norm  # which the loss does not use
    compiled = check(model, AxisType.Auto, 4, 8, strategy, axis="data")
    layers = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model.blocks, nnx.Param))) // 4
    used = (model.embed, model.head)
    held = layers + sum(x.nbytes for x in jax.tree.leaves([nnx.state(x) for x in used]))
    over_data = [x for x in compiled.collectives() if x.axes == ("data",)]
    gradients = [x for x in over_data if x.kind == "all-reduce" and not x.in_loop]
    assert sum(x.bytes for x in gradients) == held
    assert {(x.times, x.purpose) for x in gradients} == {(1, "gradient")}
    # In the loop there are the loss, and the statistics of `BatchNorm` and their gradients.
    in_loop = [x for x in over_data if x.in_loop]
    assert all(x.bytes <= 4 * FEATURES * 4 for x in in_loop), in_loop
    gathered = sum(x.bytes for x in over_data if x.kind == "all-gather")
    assert 0 < gathered <= held if strategy else not gathered


def test_memory_does_not_grow_with_the_microbatches():
    """By hand: a ring of 2S - 1 inputs, and M + S - 1 ticks in both directions."""
    rows = 2 * 32 * FEATURES * 4  # bytes of the input of a stage, for one microbatch on a device

    def growth(schedule):
        few, many = (lowered(count, schedule).compile() for count in (8, 24))
        return [x.memory_analysis().temp_size_in_bytes for x in (few, many)], many

    (few, many), compiled = growth("1f1b")
    tokens = 2 * 32 * 4 * 16  # of 16 more microbatches, which are sliced from a copy
    assert many - few <= 2 * tokens
    assert few > (2 * 4 - 1) * rows
    permutes = [x.times for x in compiled.collectives() if x.kind == "collective-permute"]
    assert sorted(permutes) == [3, 3, 24, 24]
    (few, many), _ = growth("gpipe")
    assert many - few >= 16 * rows
