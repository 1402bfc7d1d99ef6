"""``pipeline``: the numbers of a stack that is called with each microbatch in turn."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding import (
    ActivationSharding,
    Carry,
    InOutSharding,
    StateSharding,
    accumulate_gradients,
    grad,
    jit,
    place,
    scan,
    shard_map,
    stack,
    value_and_grad,
)
from nnx_sharding.errors import UnshardedWarning
from nnx_sharding.partition import (
    fsdp,
    idle_share,
    pipeline,
    tensor_parallel,
    with_sharding_constraint,
)
from nnx_sharding.report import compare
from zoo import Residual, assert_close, run_layers

STAGES = AbstractMesh((4,), ("stage",))


class Model(nnx.Module):
    def __init__(self, length: int, remat: object = False):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(4, 16, rngs=rngs)
        self.blocks = stack(Residual, length, hidden=32, remat=remat, rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.hidden(self.embed(x)))

    def hidden(self, x):
        return run_layers(self.blocks, x, scale=jnp.float32(0.5))


class Listed(Model):
    """The same with a list, and a loop over it."""

    def __init__(self, length: int, remat: object):
        super().__init__(length)
        self.blocks = nnx.List(self.blocks)


def loss(model, x):
    return (model(x) ** 2).mean()


def loss_of_microbatches(count, model, x):
    h = model.embed(x)
    parts = [model.hidden(h[i::count]) for i in range(count)]
    return (model.head(jnp.stack(parts, 1).reshape(h.shape)) ** 2).mean()


def gradients(fun, **options):
    return jit(lambda model, x: value_and_grad(fun, wrt=nnx.Param)(model, x), **options)


def run(stages, microbatches, repeats, remat=False, base=None, kind=AxisType.Auto, make=Model):
    """Checks a step against one without a pipeline; returns the collectives of the program."""
    model = make(max(4, stages * repeats), remat)
    like, x = nnx.clone(model), jax.random.normal(jax.random.key(1), (32, 4))
    names = ("stage",) if base is None else ("stage", "data", "model")
    mesh = jax.make_mesh((stages, 2, 2)[: len(names)], names, axis_types=(kind,) * len(names))
    options = {"mesh": mesh, "microbatches": microbatches, "repeats": repeats}
    sharding = pipeline(model, base=base and base(model, mesh=mesh), **options)
    rows = P("data") if base else P()
    step = gradients(loss, mesh=mesh, in_shardings=(sharding, rows))
    compiled = step.lower(model, x).compile()
    found = compiled(model, jax.device_put(x, jax.NamedSharding(mesh, rows)))
    expected = gradients(functools.partial(loss_of_microbatches, microbatches))(like, x)
    assert_close((found, nnx.state(model)), (expected, nnx.state(like)), atol=1e-5)
    return compiled.collectives()


def permutes(collectives):
    return [each for each in collectives if each.kind == "collective-permute"]


def test_a_step_on_two_stages_is_that_of_one_device_with_two_permutes_in_a_tick():
    sent = permutes(run(2, 4, 1))
    assert [each.axes for each in sent] == [("stage",)] * 2  # forward and backward
    ticks = 1 * 4 + 2 - 1
    assert [each.times for each in sent] == [ticks] * 2
    rows, features, size = 32 // 4, 16, 4
    assert [each.bytes for each in sent] == [rows * features * size] * 2
    assert idle_share(2, 4) == (ticks - 4) / ticks


@pytest.mark.parametrize(
    "declared",
    [{"^blocks$": P("data")}, {"blocks": InOutSharding(P("data"), input=P("data"))}],
    ids=["exactly", "with-layers"],
)
@pytest.mark.parametrize("where", ["call", "base"])
def test_shardings_of_its_activations_keep_the_pipeline(declared, where):
    model = nnx.eval_shape(lambda: Model(4))
    model.set_attributes(deterministic=True, use_running_average=True)
    mesh = jax.make_mesh((2, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    base = StateSharding({...: P()}, activations=ActivationSharding(declared))
    given = base if where == "base" else None
    options = {} if given else {"activation_shardings": declared}
    sharding = pipeline(model, mesh=mesh, microbatches=2, base=given)
    step = jit(lambda m, x: m(x), mesh=mesh, in_shardings=(sharding, P("data")), **options)
    compiled = step.lower(model, jax.ShapeDtypeStruct((8, 4), "float32")).compile()
    assert 2 + 2 - 1 in [each.times for each in permutes(compiled.collectives())]


@pytest.mark.parametrize("where", ["base", "call"])
def test_no_prefetch(where):
    blocks = nnx.eval_shape(lambda: stack(nnx.Linear, 4, 4, 4, rngs=nnx.Rngs(0)))
    mesh = jax.make_mesh((2, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    sharding, options = pipeline(blocks, mesh=mesh, microbatches=2), {}
    if where == "base":
        sharding = fsdp(blocks, mesh=mesh, base=sharding, prefetch=1, min_size=0)
    else:
        options["activation_shardings"] = ActivationSharding(prefetch=1)
    step = jit(lambda m, x: m(x), mesh=mesh, in_shardings=(sharding, P("data")), **options)
    with pytest.raises(ValueError, match="Leave out the option prefetch=1"):
        step.lower(blocks, jax.ShapeDtypeStruct((8, 4), "float32"))


def test_an_input_on_no_mesh_of_explicit_axes():
    blocks = nnx.eval_shape(lambda: stack(nnx.Linear, 2, 4, 4, rngs=nnx.Rngs(0)))
    mesh = jax.make_mesh((2,), ("stage",), axis_types=(AxisType.Explicit,))
    sharding = pipeline(blocks, mesh=mesh, microbatches=2)
    step = jit(lambda m, x: m(x), mesh=mesh, in_shardings=(sharding, None))
    with pytest.raises(ValueError, match="the input of the Stack is on no mesh"):
        step.lower(blocks, jax.ShapeDtypeStruct((8, 4), "float32"))


@pytest.mark.parametrize(
    ("base", "repeats", "kind"),
    [
        (None, 1, AxisType.Explicit),
        (functools.partial(fsdp, min_size=0), 2, AxisType.Auto),
        (functools.partial(fsdp, min_size=0), 1, AxisType.Explicit),
        (tensor_parallel, 1, AxisType.Auto),
    ],
)
def test_a_list_of_equal_blocks_moves_to_its_stages_once(base, repeats, kind):
    found = run(2, 4, repeats, False, base, kind, Listed)
    moved = [each for each in found.of("all-to-all") if each.axes == ("stage",)]
    assert {each.times for each in moved} == {1}
    kernels = 2 * 16 * 32 * 4  # bytes in a block; and half of the blocks on a stage
    rest = 2 if base else 1  # devices that share them
    largest = sorted(each.bytes for each in moved)[-4:]  # two kernels, there and back
    assert sum(largest) == 2 * (4 // 2) * kernels // rest
    assert {x.times for x in permutes(found) if x.in_loop} == {repeats * 4 + 1}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m, x: m[1](x), r"m\[1\] gets something else"),
        (lambda m, x: m[2](m[1](m[0](x))), r"m\[2\] returns what is not passed"),
        (lambda m, x: m[2](m[0](x)), r"m\[2\] gets something else"),
        (lambda m, x: m[1](m[0](x) + x), r"m\[0\] returns what is not passed"),
        (lambda m, x: m[1](x - m[0](x)), r"m\[0\] returns what is not passed"),
        (lambda m, x: m[1](jnp.tanh(m[0](x))), r"m\[0\] returns what is not passed"),
        (lambda m, x: m[1](m[0](x)[:2]), r"m\[0\] returns what is not passed"),
        (lambda m, x: m[1](m[0](x).reshape(-1, 4)), r"m\[0\] returns what is not passed"),
        (lambda m, x: m[1]((m[0]((x, x)),)), r"m\[1\] gets something else"),
        (lambda m, x: m[1](tuple(m[0]((x, x)))[::-1]), r"m\[1\] gets something else"),
        (lambda m, x: m[1]([*m[0](x)]), r"x, loss = block\(\(x, loss\)\)"),
        (lambda m, x: m[1](m[0](x), x), r"m\[1\] gets other further arguments"),
        (lambda m, x: m[1](m[0](x, x), x + 0), r"m\[1\] gets another argument 2, made by"),
        (lambda m, x: m[1](m[0](x, [x]), [x + 0]), r"m\[1\] gets another argument 2\[0\], made by"),
        (lambda m, x: m[1](m[0](x, out_sharding=1), out_sharding=2), "gets another out_sharding"),
        (lambda m, x: nnx.remat(lambda m, x: m(x))(m[1], m[0](x)), r"m\[0\] returns"),
        (lambda m, x: (m[0](x), x)[1], r"m\[0\] returns what is not passed"),
        (lambda m, x: m[1](m[0](x) == 0), r"m\[0\] returns what is not passed"),
        (lambda m, x: [m[3](y) for y in [m[2](m[1](m[0](x)))] * 2], r"m\[3\] gets something else"),
        (lambda m, x: m[3](m[2](m[1](_halved(m[0], x)))), r"m\[0\] has changed since"),
        (lambda m, x: m[3](m[2](m[1](_frozen(m[0], x)))), r"m\[0\] has changed since"),
        (lambda m, x: m[3](m[2](m[1](_read(m[0], x, "count")))), r"m\[0\] may write this Vari"),
        (lambda m, x: m[3](m[2](m[1](_written(m[0], x)))), r"m\[0\] has changed since"),
    ],
)
def test_blocks_of_a_list_that_are_no_chain(call, text):
    blocks = nnx.List(nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(4))
    for block in blocks:
        block.count = nnx.BatchStat(jnp.zeros(()))
    mesh = jax.make_mesh((4,), ("stage",), axis_types=(AxisType.Auto,))
    sharding = pipeline(blocks, mesh=mesh, microbatches=4)
    step = jit(call, in_shardings=(sharding, P()), mesh=mesh)
    with pytest.raises(ValueError, match=text):
        step.lower(blocks, jnp.ones((8, 4)))


def _halved(block, x):
    x = block(x)
    block.kernel[...] /= 2
    return x


def _read(block, x, name):
    x = block(x)
    assert getattr(block, name)[...].shape
    return x


def _written(block, x):
    x = block(x)
    block.count.set_value(jnp.ones(()))
    return x


def _frozen(block, x):
    x = block(x)
    block.use_bias = False
    return x


def test_further_arguments_of_blocks_may_be_equal_numpy_arrays():
    blocks = nnx.List(Scaled() for _ in range(4))
    mesh = jax.make_mesh((4,), ("stage",), axis_types=(AxisType.Auto,))
    sharding = pipeline(blocks, mesh=mesh, microbatches=2)

    def call(blocks, x):
        return run_layers(blocks, x, np.arange(4.0))

    found = jit(call, in_shardings=(sharding, P()), mesh=mesh)(blocks, jnp.ones((2, 4)))
    np.testing.assert_array_equal(found, [[0, 1, 2**4, 3**4]] * 2)


# Further arguments that are made anew for each block, numbered `i`; whether they are the same.
MADE_ANEW = {
    "of nothing": (lambda x, by, i: jnp.tril(jnp.ones((4, 4)))[1], True),
    "of the rows": (lambda x, by, i: jnp.where(x > 1, 2.0, -1.0).sum(0), True),
    "of another argument": (lambda x, by, i: jnp.cumsum(by) + jnp.arange(4), True),
    "of NumPy": (lambda x, by, i: jnp.asarray(np.linspace(0, 1, 4)), True),
    "random": (lambda x, by, i: jax.random.normal(jax.random.key(3), 4), True),
    "one of two results": (lambda x, by, i: jax.lax.top_k(by, 4)[0], True),
    "other numbers": (lambda x, by, i: by * i, False),
    "other NumPy": (lambda x, by, i: jnp.asarray(np.arange(4.0) + i), False),
    "another slice": (lambda x, by, i: x[i], False),
    "another key": (lambda x, by, i: jax.random.normal(jax.random.key(i), 4), False),
    "another result": (lambda x, by, i: jax.lax.top_k(by, 4)[i % 2].astype(float), False),
    "another operation": (lambda x, by, i: jnp.sin(by) if i % 2 else jnp.cos(by), False),
}


@pytest.mark.parametrize("name", MADE_ANEW)
def test_further_arguments_of_blocks_may_be_made_anew(name):
    make, is_same = MADE_ANEW[name]
    kind = AxisType.Explicit if name.startswith("of ") else AxisType.Auto
    blocks = nnx.List(Scaled() for _ in range(4))
    mesh = jax.make_mesh((4,), ("stage",), axis_types=(kind,))

    def loss(blocks, x, by):
        first = x
        for i, block in enumerate(blocks):
            x = block(x, by=make(first, by, i))
        return (x**2).mean()

    gradient = value_and_grad(loss, wrt=nnx.Param)
    args = blocks, jnp.arange(32.0).reshape(8, 4) / 8, jnp.arange(4.0)
    expected = gradient(*args)
    sharding = pipeline(blocks, mesh=mesh, microbatches=2)
    step = jit(lambda *args: gradient(*args), in_shardings=(sharding, P(), P()), mesh=mesh)
    if is_same:
        assert_close(step(*args), expected)
        return
    with pytest.raises(ValueError, match=r"\[1\] gets another by, made by other operations"):
        step.lower(*args)


class Scaled(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(4))

    def __call__(self, x, by):
        return x * self.scale * by


class Telling(nnx.Module):
    def __init__(self, *, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        self.sow(nnx.Intermediate, "seen", x)
        x = jnp.tanh(self.dense(x))
        self.sow(nnx.Intermediate, "seen", x.mean(-1))
        self.sow(nnx.BatchStat, "norm", (x**2).sum(-1), init_fn=float, reduce_fn=jnp.add)
        return x


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda x: x.name)
@pytest.mark.parametrize(
    ("as_list", "remat", "repeats"),
    [(True, False, 1), (False, True, 1), (False, "dots_saveable", 2)],
    ids=str,
)
def test_what_layers_sow_is_captured(as_list, remat, repeats, kind):
    def run(blocks, x):
        def loss(blocks):
            y, *sown = nnx.capture(run_layers, nnx.Intermediate, nnx.BatchStat)(blocks, x)
            return (y**2).mean() + (sown[1][0 if as_list else "layers"]["norm"] ** 2).mean(), sown

        return value_and_grad(loss, has_aux=True, wrt=nnx.Param)(blocks)

    layers = stack(Telling, 4, remat=remat, rngs=nnx.Rngs(0))
    blocks = nnx.List(layers) if as_list else layers
    x = jax.random.normal(jax.random.key(0), (16, 4))
    expected = jit(run)(blocks, x)
    mesh = jax.make_mesh((2, 2), ("stage", "data"), axis_types=(kind,) * 2)
    base = fsdp(blocks, mesh=mesh, min_size=0)
    sharding = pipeline(blocks, mesh=mesh, microbatches=4, repeats=repeats, base=base)
    found = jit(run, mesh=mesh, in_shardings=(sharding, P("data")))(blocks, x)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert_close(found, expected, atol=1e-5)


def test_a_capture_has_one_call_of_a_stack():
    blocks = stack(Telling, 4, rngs=nnx.Rngs(0))
    mesh = jax.make_mesh((4,), ("stage",), axis_types=(AxisType.Auto,))
    sharding = pipeline(blocks, mesh=mesh, microbatches=4)
    twice = nnx.capture(lambda m, x: m(m(x)), nnx.Intermediate)
    step = jit(lambda m, x: twice(m, x), in_shardings=(sharding, P()), mesh=mesh)
    with pytest.raises(ValueError, match="in one call of the Stack"):
        step.lower(blocks, jnp.ones((8, 4)))


class Masked(nnx.Module):
    def __init__(self, *, rngs):
        self.dense = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, inputs, scale, *, is_double):
        x, mask = inputs
        return jnp.tanh(self.dense(x)) * mask[:, None] * (2.0 if is_double else 1.0) + scale, mask


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda x: x.name)
def test_a_stack_alone_with_pairs_of_inputs_and_further_arguments(kind):
    def run(blocks, x, mask, scale):
        y, _ = blocks((x, mask), scale, is_double=True)
        return (y**2).mean()

    blocks = stack(Masked, 4, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (8, 16))
    args = x, jnp.arange(8) % 3, jnp.linspace(0.0, 1.0, 16)
    both = grad(run, argnums=(0, 1, 3))
    expected = jit(lambda *args: both(*args))(blocks, *args)
    mesh = jax.make_mesh((2, 2), ("stage", "data"), axis_types=(kind,) * 2)
    sharding = pipeline(blocks, mesh=mesh, microbatches=4, base=fsdp(blocks, mesh=mesh, min_size=0))
    in_shardings = sharding, P("data"), P("data"), P()
    found = jit(lambda *args: both(*args), mesh=mesh, in_shardings=in_shardings)(blocks, *args)
    assert_close(found, expected, atol=1e-5)


class Mapped(nnx.Module):
    """A layer whose rows are on their own in a ``shard_map``."""

    def __init__(self, *, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        @shard_map(in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        def centred(x):
            return x - jax.lax.pmean(x.mean(0), "data")

        return centred(self.dense(x))


def test_a_shard_map_over_other_axes():
    blocks, x = stack(Mapped, 4, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (8, 4))
    mesh = jax.make_mesh((2, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    sharding = pipeline(blocks, mesh=mesh, microbatches=2)
    found = gradients(loss, mesh=mesh, in_shardings=(sharding, P("data")))(blocks, x)

    def one_by_one(blocks, x):
        for i in range(4):
            x = blocks[i].dense(x)
            halves = [x[j::2] - x[j::2].mean(0) for j in range(2)]
            x = jnp.stack(halves, 1).reshape(x.shape)
        return (x**2).mean()

    value, _ = found
    np.testing.assert_allclose(value, one_by_one(blocks, x), rtol=1e-5)


def test_specs_in_either_order():
    model = Model(4)
    mesh = AbstractMesh((2, 2), ("stage", "data"))
    inner = pipeline(model, mesh=mesh, base=fsdp(model, mesh=mesh, min_size=0))
    outer = fsdp(model, mesh=mesh, min_size=0, base=pipeline(model, mesh=mesh))
    for sharding in (inner, outer):
        spec = sharding.map_prefix(("blocks", "layers", "up", "kernel"), None)
        assert spec == P("stage", None, "data")
        assert sharding.map_prefix(("head", "kernel"), None) == P("data", None)


def test_compare_takes_it():
    model = nnx.eval_shape(lambda: Model(4, True))
    model.set_attributes(deterministic=True, use_running_average=True)
    x = jax.ShapeDtypeStruct((32, 4), "float32")
    strategies = {"pipeline": lambda model, x: (pipeline(model, microbatches=4), P())}
    comparison = compare(strategies, lambda model, x: model(x), model, x, mesh={"stage": 4})
    [sent] = permutes(comparison.reports["pipeline"].collectives)
    assert sent.times == 4 + 4 - 1


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), {}, r"neither a Stack (.|\n)*stack\(blocks\)"),
        (lambda: _listed(4, 6, 4), {}, r"neither (.|\n)*model\[1\]: .*out_features: 4 → 6"),
        (lambda: nnx.List(nnx.Dict(a=_listed(4, 6)) for _ in "ab"), {}, "neither a Stack"),
        (lambda: _listed(4, 4, 4), {}, r"do not divide (.|\n)*model: 3 layers"),
        (lambda: _listed(*[4] * 4, tied=True), {}, "share these Variables.*\n  0/kernel\n"),
        (lambda: Model(6), {}, "4 stages .*\n  model.blocks: 6 layers"),
        (lambda: Model(4), {"repeats": 2}, "times 2 repeats .*\n  model.blocks: 4 layers"),
        (lambda: Model(4), {"repeats": 0, "microbatches": 1.5}, "=1.5\n  repeats=0"),
        (lambda: Model(4), {"axis": "stages"}, "did you mean 'stage'"),
        (lambda: _ahead(), {}, "Leave out the option prefetch=1"),
        (lambda: _tied(), {}, "share these Variables.*\n  layers/layers/1/kernel"),
        (lambda: Model(4), {"base": StateSharding({...: P("stage")})}, "base shard layers, or use"),
        (
            lambda: Model(4),
            {"base": StateSharding({...: NamedSharding(STAGES, P())})},
            "base shard layers, (.|\n)*in specs without a mesh",
        ),
    ],
)
def test_models_that_cannot_be_in_stages(make, options, text):
    model = nnx.eval_shape(make, graph=True, graph_updates=True)  # some share Variables
    with pytest.raises(ValueError, match=text):
        pipeline(model, mesh=STAGES, **options)


def _listed(*sizes, tied=False):
    blocks = nnx.List(nnx.Linear(4, size, use_bias=False, rngs=nnx.Rngs(0)) for size in sizes)
    if tied:
        blocks[3].kernel = blocks[0].kernel
    return blocks


def _ahead():
    return stack(nnx.Linear, 4, 4, 4, prefetch=1, rngs=nnx.Rngs(0))


def _tied():
    rngs = nnx.Rngs(0)
    tied = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
    return stack([nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), tied) for _ in range(4)])


class Sowing(nnx.Module):
    def __init__(self, *, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x, *, mask=None):
        self.sow(nnx.Intermediate, "mean", jax.tree.leaves(x)[0].mean())
        return x if mask is None else x + mask


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize(
    ("call", "options", "text"),
    [
        (lambda m, x: m(x[:6]), {}, r"4 microbatches .*\n  x: shape \(6, 4\)"),
        (lambda m, x: m((x, x.sum())), {}, r"x\[1\]: shape \(\)(.|\n)*blocks\(x, step\)"),
        (lambda m, x: m(x), {}, r"as by sow. Return .* blocks\(\(x, loss\)\)"),
        (lambda m, x: m(x, mask=x), {}, r"further arguments .* 8 rows(.|\n)*\n  mask: shape"),
        (lambda m, x: m(x), {"microbatches": 2, "repeats": 2}, "less than the 4 stages"),
        (
            lambda m, x: nnx.capture(m, nnx.Intermediate)(x),
            {},
            r"layers sow \['mean'\] of shape \(\), without .* 2 rows",
        ),
        (lambda m, x: nnx.capture(m, nnx.Perturbation)(x), {}, "no perturbations"),
    ],
)
def test_calls_that_cannot_be_in_stages(call, options, text):
    model = stack(Sowing, 8, rngs=nnx.Rngs(0))
    mesh = jax.make_mesh((4,), ("stage",))
    sharding = pipeline(model, mesh=mesh, **({"microbatches": 4} | options))
    with pytest.raises(ValueError, match=text):
        jit(call, in_shardings=(sharding, P()), mesh=mesh).lower(model, jnp.ones((8, 4)))


class Own(nnx.Module):
    """A layer that does with what it gets what a function of the test says."""

    def __init__(self, function, *, rngs):
        self.dense, self.function = nnx.Linear(4, 4, rngs=rngs), function

    def __call__(self, x, *args):
        return self.function(self.dense(x), *args)

    def apply(self, x):
        return self.function(self.dense(x))

    def norm(self):
        return jnp.square(self.dense.kernel[...]).sum()


WRONG_LAYERS = {
    "shape": (lambda x: jnp.concatenate([x, x], 1), None, r"Own .*\n  x: .*\[2,4\] → .*\[2,8\]"),
    "dtype": (lambda x: x.astype("bfloat16"), None, r"\n  x: float32\[2,4\] → bfloat16\[2,4\]\n"),
    "structure": (lambda x: (x, x), None, r"\n  x: float32\[2,4\] → \(float32\[2,4\], "),
    "random stream": (
        lambda x, rngs: x + jax.random.normal(rngs(), x.shape),
        lambda: nnx.Rngs(0),
        r"further arguments.*\n  argument 2.default.count: RngCount\n",
    ),
    "statistics": (
        lambda x, norm: norm(x),
        lambda: nnx.BatchNorm(4, rngs=nnx.Rngs(0)),
        r"\n  argument 2.mean: BatchStat\n  argument 2.var: BatchStat\n.*each layer its own",
    ),
}


@pytest.mark.parametrize("is_list", [True, False])
@pytest.mark.parametrize("kind", WRONG_LAYERS)
def test_layers_that_cannot_be_in_stages(kind, is_list):
    function, make, text = WRONG_LAYERS[kind]
    model = nnx.List([Own(function, rngs=nnx.Rngs(i)) for i in range(4)])
    model = model if is_list else stack(model)
    mesh = jax.make_mesh((4,), ("stage",), axis_types=(AxisType.Auto,))
    more = () if make is None else (make(),)

    def step(model, x, *more):
        for layer in model if is_list else [model]:
            x = layer(x, *more)
        return x

    in_shardings = (pipeline(model, mesh=mesh, microbatches=4), P(), *[P() for _ in more])
    with pytest.raises(ValueError if more else TypeError, match=text):
        jit(step, in_shardings=in_shardings, mesh=mesh).lower(model, jnp.ones((8, 4)), *more)


def test_other_methods_of_blocks_make_no_pipeline():
    model = nnx.List([Own(jnp.tanh, rngs=nnx.Rngs(i)) for i in range(4)])
    mesh = jax.make_mesh((4,), ("stage",), axis_types=(AxisType.Auto,))
    sharding = pipeline(model, mesh=mesh, microbatches=4)

    def compiled(method, with_norm=False):
        def step(model, x):
            total = sum(block.norm() for block in model) if with_norm else 0
            for block in model:
                x = getattr(block, method)(x)
            return x + total

        step = jit(step, in_shardings=(sharding, P()), mesh=mesh)
        return step.lower(model, jnp.ones((8, 4))).compile()

    with pytest.warns(UnshardedWarning, match=r"blocks of model are called by apply"):
        assert not permutes(compiled("apply").collectives())
    assert permutes(compiled("__call__", with_norm=True).collectives())  # without a warning


@pytest.mark.parametrize("make", [Model, Listed])
def test_the_model_of_an_optimizer_that_holds_it(make):
    mesh = jax.make_mesh((4,), ("stage",), axis_types=(AxisType.Auto,))
    model = make(4, False)
    optimizer = nnx.ModelAndOptimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    specs = pipeline(model, mesh=mesh, optimizer=optimizer, microbatches=4), P()
    step = jit(lambda optimizer, x: optimizer.model(x), in_shardings=specs, mesh=mesh)
    assert permutes(step.lower(optimizer, jnp.ones((8, 4))).compile().collectives())


def _by_hand(model, x):
    graph, state = nnx.split(model.blocks.layers)
    return jax.lax.scan(lambda x, s: (nnx.merge(graph, s)(x), None), x, state)[0]


class WithUse(nnx.Module):
    """A ``Stack`` that is used in one of many ways."""

    def __init__(self, use):
        self.blocks = stack(nnx.Linear, 4, 4, 4, rngs=nnx.Rngs(0))
        self.use = use

    def __call__(self, x):
        return self.use(self, x)


def _one_by_one(layers, x):
    for layer in layers:
        x = jnp.tanh(layer(x))
    return x


# What a model does with its Stack, and whether the layers run in stages.
USES = {
    "called": (lambda m, x: m.blocks(x), True),
    "called and read": (lambda m, x: m.blocks(x) + m.blocks[0].bias.sum(), True),
    "iterated": (lambda m, x: _one_by_one(m.blocks, x), False),
    "indexed": (lambda m, x: _one_by_one([m.blocks[i] for i in range(4)], x), False),
    "slices": (lambda m, x: m.blocks[2:](m.blocks[:2](x)), False),
    "unstacked": (lambda m, x: _one_by_one([*m.blocks], x), False),
    "method scan": (lambda m, x: m.blocks.scan(lambda n, x: (n(x), 0), x)[0], False),
    "scan": (
        lambda m, x: scan(lambda n, x: n(x), in_axes=(0, Carry), out_axes=Carry)(
            m.blocks.layers, x
        ),
        False,
    ),
    "scan of Flax": (
        lambda m, x: nnx.scan(lambda n, x: n(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(
            m.blocks.layers, x
        ),
        False,
    ),
    "scan of JAX": (_by_hand, False),
    "in remat": (lambda m, x: nnx.remat(lambda m, x: m.blocks(x))(m, x), True),
}


@pytest.mark.parametrize("where", ["model", "function"])
@pytest.mark.parametrize("name", USES)
def test_a_warning_where_layers_do_not_run_in_stages(name, where):
    use, is_pipeline = USES[name]
    mesh = jax.make_mesh((4, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    model, x = WithUse(use), jax.random.normal(jax.random.key(0), (8, 4))
    expected = use(model, x)
    call = (lambda m, x: m(x)) if where == "model" else use
    specs = pipeline(model, mesh=mesh, microbatches=4), P("data")
    step = jit(call, in_shardings=specs, mesh=mesh)
    if is_pipeline:  # without a warning, which would be an error here
        found = step(model, x)
    else:
        warning = r"the layers of m(odel)?\.blocks do not run in stages"
        with pytest.warns(UnshardedWarning, match=warning):
            found = step(model, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_warning_for_lists_that_are_in_no_pipeline():
    rngs, mesh = nnx.Rngs(0), AbstractMesh((2,), ("stage",))
    equal = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(4)])
    unequal = nnx.List([nnx.Linear(4, 4 + i % 2, rngs=rngs) for i in range(4)])
    blocks = stack(nnx.Linear, 4, 4, 4, rngs=rngs)
    for first, other in ((equal, unequal), (blocks, unequal), (blocks, equal)):
        with pytest.warns(UnshardedWarning, match=r"do not run in stages[^`]*model.other"):
            pipeline(nnx.Dict(first=first, other=other), mesh=mesh)
    pipeline(nnx.Dict(first=blocks, other=nnx.List(equal[:1])), mesh=mesh)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_layers_on_stages_are_read_and_written(kind):
    mesh = jax.make_mesh((4,), ("stage",), axis_types=(kind,))
    layers = stack(nnx.Linear, 8, 4, 4, rngs=nnx.Rngs(0))
    kernel, bias = layers.layers.kernel[...], layers.layers.bias[...]
    place(layers, pipeline(layers, mesh=mesh), mesh)
    sharding = layers.layers.bias.sharding
    one = layers[3]
    np.testing.assert_array_equal(one.kernel, kernel[3])
    one.bias[...] += 1
    layers[3] = one
    np.testing.assert_array_equal(layers.layers.bias, bias.at[3].add(1))
    assert layers.layers.bias.sharding == sharding or kind is AxisType.Auto
    np.testing.assert_array_equal(layers[2:4].layers.kernel, kernel[2:4])
    assert jit(lambda m: m[1].kernel.sum(), mesh=mesh)(layers) == kernel[1].sum()


class WithRows(nnx.Module):
    """A layer with a mask and positions of its rows, and a factor that is the same for all."""

    def __init__(self, *, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x, factor, mask=None, *, positions=None):
        y = self.dense(x) * factor
        y = y if mask is None else y * mask["keep"]
        return x + (y if positions is None else y * positions[..., None])


class RowsModel(nnx.Module):
    def __init__(self, call, *, is_list, remat=False):
        layers = [WithRows(rngs=nnx.Rngs(i)) for i in range(8)]
        self.blocks = nnx.List(layers) if is_list else stack(layers, remat=remat)
        self.call = call

    def __call__(self, x, keep, positions):
        keep, factor = {"keep": keep[..., None]}, jnp.float32(0.5)
        if self.call == "names":
            return run_layers(self.blocks, x, factor, mask=keep, positions=positions)
        if self.call == "x by name":
            for block in self.blocks:
                x = block(x=x, factor=factor, mask=keep, positions=positions)
            return x
        if self.call == "for all rows":
            return run_layers(self.blocks, x, factor, {"keep": keep["keep"][:1]})
        return run_layers(self.blocks, x, factor, keep, positions=positions)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("call", "is_list", "remat", "repeats"),
    [
        ("positions", False, False, 1),
        ("positions", False, True, 2),
        ("names", False, True, 1),
        ("names", True, False, 1),
        ("positions", True, False, 2),
        ("x by name", True, False, 1),
        ("for all rows", False, False, 1),
    ],
)
def test_arguments_with_rows(call, is_list, remat, repeats, kind):
    mesh = jax.make_mesh((4, 2), ("stage", "data"), axis_types=(kind,) * 2)
    model = RowsModel(call, is_list=is_list, remat=remat)
    keys = jax.random.split(jax.random.key(0), 3)
    args = (
        jax.random.normal(keys[0], (16, 3, 4)),
        jax.random.bernoulli(keys[1], 0.7, (16, 3)),
        jax.random.uniform(keys[2], (16, 3)),
    )

    def step(model, x, keep, positions):
        def loss(model, positions):
            return (model(x, keep, positions) ** 2).mean()

        return value_and_grad(loss, argnums=(0, 1))(model, positions)

    expected = step(nnx.clone(model), *args)
    options = {"microbatches": 4, "repeats": repeats, "rows": ("mask", "positions")}
    sharding = pipeline(model, mesh=mesh, **options)
    rows = P("data")
    run = jit(step, in_shardings=(sharding, rows, rows, rows), mesh=mesh)
    assert_close(run(model, *args), expected)


class Same(nnx.Module):
    """Returns a new array, which is declared as the output of a module."""

    def __call__(self, keep):
        return keep * 1


class MaskedRows(nnx.Module):
    """Layers with a mask of the rows, which ``change`` makes of what the model gets."""

    def __init__(self, change, *, is_list):
        self.blocks = stack(WithRows, 4, rngs=nnx.Rngs(0))
        if is_list:
            self.blocks = nnx.List(self.blocks)
        self.change, self.same = change, Same()

    def __call__(self, x, keep):
        return run_layers(self.blocks, x, jnp.float32(0.5), {"keep": self.change(self, keep)})


# What declares the sharding of a mask, and on which axes that can be seen.
DECLARATIONS = {
    "argument": (lambda model, keep: keep, (AxisType.Auto, AxisType.Explicit)),
    "constraint": (
        lambda model, keep: jax.lax.with_sharding_constraint(keep * 1, P("data")),
        (AxisType.Auto, AxisType.Explicit),
    ),
    "our constraint": (
        lambda model, keep: with_sharding_constraint(keep * 1, P("data")),
        (AxisType.Auto, AxisType.Explicit),
    ),
    "output of a module": (
        lambda model, keep: model.same(keep),
        (AxisType.Auto, AxisType.Explicit),
    ),
    "argument that is differentiated": (
        lambda model, keep: keep,
        (AxisType.Auto, AxisType.Explicit),
    ),
    "constraint of what is differentiated": (
        lambda model, keep: jax.lax.with_sharding_constraint(keep * 1, P("data")),
        (AxisType.Auto, AxisType.Explicit),
    ),
    "other axes": (lambda model, keep: jax.lax.with_sharding_constraint(keep * 1, P("stage")), ()),
    "another dimension": (
        lambda model, keep: jax.lax.with_sharding_constraint(keep * 1, P(None, "data")),
        (),
    ),
    "operation": (lambda model, keep: keep * 1, ()),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("accumulated", [None, "gpipe", "1f1b"])  # the schedule of microbatches
@pytest.mark.parametrize("name", DECLARATIONS)
def test_arguments_with_a_declared_sharding_of_rows(name, accumulated, is_list, kind):
    change, seen = DECLARATIONS[name]
    mesh = jax.make_mesh((4, 2), ("stage", "data"), axis_types=(kind,) * 2)
    model = MaskedRows(change, is_list=is_list)
    args = (
        jax.random.normal(jax.random.key(0), (16, 4, 4)),
        jax.random.uniform(jax.random.key(1), (16, 4, 1)),
    )
    is_differentiated = "differentiated" in name
    if is_differentiated and accumulated:
        pytest.skip("the batch is not differentiated there")
    argnums, steps = (0, 1) if is_differentiated else 0, 4 if accumulated == "1f1b" else 2

    def step(model, x, keep):
        if accumulated:

            def loss_of_rows(model, x, keep):
                return (model(x, keep) ** 2).mean()

            return accumulate_gradients(loss_of_rows, steps=steps)(model, x, keep)

        def loss(model, keep):
            return (model(x, keep) ** 2).mean()

        return value_and_grad(loss, argnums=argnums)(model, keep)

    rows = P("data")
    declared = {"same$": rows} if name == "output of a module" else None
    schedule = {"schedule": "1f1b"} if accumulated == "1f1b" else {"microbatches": 4}
    specs = pipeline(model, mesh=mesh, **schedule), rows, rows
    run = jit(step, in_shardings=specs, mesh=mesh, activation_shardings=declared)
    if kind not in seen and accumulated != "1f1b":  # there, layers run with a whole microbatch
        number = 16 // (steps if accumulated else 1)
        message = rf"{number} rows, as many(.|\n)*mask\['keep'\]: shape \({number},"
        with pytest.raises(ValueError, match=message):
            run.trace(model, *args)
        return
    with jax.set_mesh(jax.make_mesh((1, 1), ("stage", "data"), devices=jax.devices()[:1])):
        expected = step(MaskedRows(lambda _, keep: keep, is_list=is_list), *args)
    found = run(model, *args)
    assert_close(jax.tree.leaves(found), jax.tree.leaves(expected))


def test_arguments_with_rows_are_not_sent():
    """All stages have them, so only what layers return goes from stage to stage."""
    mesh = jax.make_mesh((4, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    model = RowsModel("names", is_list=False)
    sharding = pipeline(model, mesh=mesh, microbatches=4, rows=("mask", "positions"))
    shapes = (((16, 3, 4), "float32"), ((16, 3), "bool"), ((16, 3), "float32"))
    args = [jax.ShapeDtypeStruct(*x) for x in shapes]
    run = jit(lambda m, *x: m(*x), in_shardings=(sharding, *[P("data")] * 3), mesh=mesh)
    sent = run.lower(model, *args).compile().collectives()
    assert {shape for each in sent.of("collective-permute") for shape in each.shapes} == {
        (1, 2, 3, 4)
    }


@pytest.mark.parametrize("rows", [("msk",), ("x",)])
def test_rows_that_no_layer_takes(rows):
    model = RowsModel("names", is_list=False)
    with pytest.raises(ValueError, match=r"rows names what no layer takes(.|\n)*take factor, mask"):
        pipeline(model, mesh=STAGES, rows=rows)


def test_rows_of_another_number():
    model, mesh = RowsModel("names", is_list=False), jax.make_mesh((4,), ("stage",))
    sharding = pipeline(model, mesh=mesh, microbatches=4, rows=("mask", "positions"))
    run = jit(lambda m, *x: m(*x), in_shardings=(sharding, P(), P(), P()), mesh=mesh)
    with pytest.raises(ValueError, match=r"4 microbatches .*\n  positions: shape \(8, 3\)"):
        run.lower(model, jnp.ones((16, 3, 4)), jnp.ones((16, 3), bool), jnp.ones((8, 3)))
