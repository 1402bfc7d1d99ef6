"""Transformers in a pipeline: gradients, the step of SGD, what is sent and what waits."""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from nnx_sharding import accumulate_gradients, jit, stack, value_and_grad
from nnx_sharding.partition import fsdp, idle_share, pipeline, tensor_parallel

# The loss is outside of the model, so what that returns is gathered on Explicit axes.
pytestmark = pytest.mark.filterwarnings("ignore:.*operations outside of modules")
WIDTH, HEADS, GROUPS, TOKENS, ROWS, RATE = 16, 4, 2, 4, 32, 0.1


class Attention(nnx.Module):
    """Causal attention in which two heads share keys and values."""

    def __init__(self, *, rngs):
        dense = functools.partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        self.query = dense(WIDTH, (HEADS, WIDTH // HEADS))
        self.key_value = dense(WIDTH, (GROUPS, 2 * WIDTH // HEADS))
        self.out = dense((HEADS, WIDTH // HEADS), WIDTH, axis=(-2, -1))

    def __call__(self, x):
        key, value = jnp.split(self.key_value(x), 2, axis=-1)
        y = jax.nn.dot_product_attention(self.query(x), key, value, is_causal=True)
        return self.out(y)


class Dense(nnx.Module):
    def __init__(self, *, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Experts(nnx.Module):
    """A mixture of experts: all run for each token, of which it takes two."""

    def __init__(self, *, rngs):
        self.router = nnx.Linear(WIDTH, 4, rngs=rngs)
        init = nnx.initializers.normal(0.1)
        self.up = nnx.Param(init(rngs.params(), (4, WIDTH, 2 * WIDTH)))
        self.down = nnx.Param(init(rngs.params(), (4, 2 * WIDTH, WIDTH)))

    def __call__(self, x):
        best, chosen = jax.lax.top_k(self.router(x), 2)
        gates = jax.nn.one_hot(chosen, 4) * jax.nn.softmax(best)[..., None]
        y = nnx.gelu(jnp.einsum("btd,edf->btef", x, self.up[...]))
        return jnp.einsum("btef,efd,btke->btd", y, self.down[...], gates)


class Block(nnx.Module):
    def __init__(self, mlp, *, rngs):
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention, self.mlp = Attention(rngs=rngs), mlp(rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Model(nnx.Module):
    def __init__(self, mlp, remat):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(16, WIDTH, rngs=rngs)
        self.blocks = stack(Block, 8, mlp, remat=remat, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 16, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def loss(model, tokens):
    logs = jax.nn.log_softmax(model(tokens))
    return -jnp.take_along_axis(logs, tokens[..., None], -1).mean()


def step_of(gradient):
    def step(model, tokens):
        value, grads = gradient(model, tokens)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - RATE * g, params, nnx.state(grads)))
        return value

    return step


def batch():
    return jax.random.randint(jax.random.key(1), (ROWS, TOKENS), 0, 16)


def numbers(model):
    return [*map(np.asarray, jax.tree.leaves(nnx.state(model)))]


@functools.cache
def make(mlp):
    """The arrays of a model that all cases start from."""
    return nnx.state(jit(lambda: Model(mlp, False))())


@functools.cache
def alone(mlp):
    """The loss, and all arrays after a step, on one device."""
    model = built(mlp, False)
    value = jit(step_of(value_and_grad(loss, wrt=nnx.Param)))(model, batch())
    return [np.asarray(value), *numbers(model)]


def built(mlp, remat):
    model = nnx.eval_shape(lambda: Model(mlp, remat))
    nnx.update(model, jax.tree.map(jnp.copy, make(mlp)))
    return model


BASES = {"": None, "fsdp": functools.partial(fsdp, min_size=0), "tensor": tensor_parallel}


def compiled(mlp, remat, stages, microbatches, repeats, base, kind, gradient=None, **options):
    """The step, compiled, and its model and batch."""
    model = built(mlp, remat)
    names = ("stage", "data", "model") if base else ("stage",)
    sizes = (stages, 2, 2)[: len(names)]
    mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))
    given = BASES[base] and BASES[base](model, mesh=mesh)
    schedule = {"microbatches": microbatches, "repeats": repeats}
    sharding = pipeline(model, mesh=mesh, base=given, **schedule)
    tokens = jax.device_put(batch(), jax.NamedSharding(mesh, P("data") if base else P()))
    gradient = gradient or value_and_grad(loss, wrt=nnx.Param)
    in_shardings = sharding, P("data") if base else P()
    step = jit(step_of(gradient), mesh=mesh, in_shardings=in_shardings, **options)
    return step.lower(model, tokens).compile(), model, tokens


def shifts(found):
    """What is sent from stage to stage in each tick."""
    return [
        each
        for each in found.collectives()
        if each.kind == "collective-permute" and each.axes == ("stage",) and each.in_loop
    ]


def check(found, model, tokens, mlp):
    got = [np.asarray(found(model, tokens)), *numbers(model)]
    for one, other in zip(got, alone(mlp), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def _cases():
    schedules = [(s, s * m, r) for s in (2, 4) for m in (1, 2, 4) for r in (1, 2)]
    for schedule, base in itertools.product(schedules, BASES):
        if base and schedule[0] == 4:  # 16 devices
            continue
        models = itertools.product((Dense, Experts), (False, True))
        for (mlp, remat), kind in itertools.product(models, (AxisType.Auto, AxisType.Explicit)):
            yield pytest.param(
                (mlp, remat, *schedule, base, kind),
                id="-".join(map(str, (mlp.__name__, remat, *schedule, base, kind.name))),
            )


@pytest.mark.parametrize("case", [*_cases()])
def test_equals_one_device(case):
    mlp, _, stages, microbatches, repeats, base, _ = case
    found, model, tokens = compiled(*case)
    check(found, model, tokens, mlp)
    sent = shifts(found)
    ticks = repeats * microbatches + stages - 1
    assert [each.times for each in sent] == [ticks] * 2  # forward and backward
    rows = ROWS // microbatches // (2 if base else 1)
    whole = rows * TOKENS * WIDTH * 4
    # With tensor parallelism, the compiler may shard the features, over two devices.
    assert {each.bytes for each in sent} <= ({whole, whole // 2} if base == "tensor" else {whole})
    # Each stage computes in every tick, in R·M of them a microbatch.
    assert (ticks - repeats * microbatches) / ticks == idle_share(stages, microbatches, repeats)


@pytest.mark.slow
def test_accumulation_around_a_pipeline():
    gradient = accumulate_gradients(loss, steps=2)
    case = Dense, True, 2, 4, 1, "fsdp", AxisType.Auto
    found, model, tokens = compiled(*case, gradient)
    check(found, model, tokens, Dense)
    sent = shifts(found)
    assert {each.times for each in sent} == {2 * (4 + 1)}
    assert {each.bytes for each in sent} == {ROWS // 2 // 4 // 2 * TOKENS * WIDTH * 4}


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_with_repeats_layers_move_once_in_a_step(stages):
    found, model, _ = compiled(Dense, True, stages, stages, 2, "", AxisType.Auto)
    leaves = jax.tree.leaves(nnx.state(model.blocks, nnx.Param))
    held = sum(x.nbytes for x in leaves) // stages
    sent = [
        each
        for each in found.collectives()
        if each.kind in ("collective-permute", "all-to-all", "all-gather") and not each.in_loop
    ]
    assert {each.times for each in sent} == {1}
    assert {each.kind for each in sent} <= {"collective-permute", "all-to-all"}  # none has them all
    # To the stages that run them, and their gradients back: each time at most what a stage holds,
    # twice.
    assert sum(each.bytes for each in sent) <= 2 * 2 * held


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_flops_have_the_idle_share(stages):
    """Stages that wait compute as well, so that the bound of the time has what they wait."""

    def layers_only(count):
        blocks = stack(Dense, 8, rngs=nnx.Rngs(0))
        mesh = jax.make_mesh((stages,), ("stage",), axis_types=(AxisType.Auto,))
        sharding = pipeline(blocks, mesh=mesh, microbatches=count)
        step = jit(lambda m, x: m(x), mesh=mesh, in_shardings=(sharding, P()))
        return step.lower(blocks, jnp.ones((ROWS, WIDTH))).compile().report().cost.flops

    few, many = layers_only(stages), layers_only(4 * stages)
    wanted = (1 - idle_share(stages, 4 * stages)) / (1 - idle_share(stages, stages))
    assert few / many == pytest.approx(wanted, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_activations_in_memory(remat):
    """Of each further microbatch, a stage keeps what its ticks need for the backward pass."""

    def temporary(count):
        blocks = stack(Dense, 8, remat=remat, rngs=nnx.Rngs(0))
        mesh = jax.make_mesh((4,), ("stage",), axis_types=(AxisType.Auto,))
        sharding = pipeline(blocks, mesh=mesh, microbatches=count)
        gradient = value_and_grad(lambda m, x: (m(x) ** 2).mean(), wrt=nnx.Param)
        step = jit(lambda m, x: gradient(m, x), mesh=mesh, in_shardings=(sharding, P()))
        x = jax.ShapeDtypeStruct((64 * count, WIDTH), jnp.float32)
        return step.lower(blocks, x).compile().memory().temporaries

    def kept(layer, x):
        graph, state = nnx.split(layer)
        _, backward = jax.vjp(lambda state, x: nnx.merge(graph, state)(x), state, x)
        return [leaf for leaf in jax.tree.leaves(backward) if leaf.shape[:1] == x.shape[:1]]

    x = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)
    layer = nnx.eval_shape(lambda: Dense(rngs=nnx.Rngs(0)))
    residuals = sum(math.prod(each.shape) * 4 for each in jax.eval_shape(kept, layer, x))
    size = 64 * WIDTH * 4
    added = (temporary(16) - temporary(8)) / 8
    # With remat: the input of the tick, and the batch on its way in and out. Else: what two layers
    # keep, and the gradients of the batch as well.
    assert added <= 1.02 * (3 * size if remat else 4 * size + 2 * residuals)
