"""Transformers in a pipeline: gradients, the step of SGD, what is sent and what waits."""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from nnx_sharding import accumulate_gradients, jit, stack, value_and_grad
from nnx_sharding.partition import idle_share, pipeline
from zoo import (
    LENGTH,
    STRATEGIES,
    WIDTH,
    Block,
    GroupedQuery,
    Mixture,
    Tied,
    assert_trains_alike,
    batch_of,
    cross_entropy,
    layer,
    mesh_of,
    step_of,
)

# The loss is outside of the model, so what that returns is gathered on Explicit axes.
pytestmark = pytest.mark.filterwarnings("ignore:.*operations outside of modules")
ROWS = 32
BATCH = functools.partial(batch_of, cross_entropy, ROWS)
BASES = {"": None, "fsdp": STRATEGIES["fsdp"], "tensor": STRATEGIES["tensor"]}


@functools.cache
def model_of(mlp, remat):
    """What makes a transformer of 8 layers with grouped-query attention."""
    one = functools.partial(layer, attention=GroupedQuery, mlp=mlp)
    return functools.partial(Tied, blocks=lambda rngs: stack(one, 8, remat=remat, rngs=rngs))


def trained(mlp, remat, stages, microbatches, repeats, base, kind, gradient=None):
    """A step that gives the numbers of one device, compiled, and its model."""
    names = ("stage", "data", "model") if base else ("stage",)
    mesh = mesh_of((stages, 2, 2)[: len(names)], names, (kind,) * len(names))

    def strategy(model, **options):
        inner = BASES[base] and BASES[base](model, **options)
        schedule = {"microbatches": microbatches, "repeats": repeats}
        return pipeline(model, base=inner, **schedule, **options)

    options = {"loss": cross_entropy, "batch": BATCH, "steps": 1, "ahead": True}
    options |= {"step": gradient and step_of(gradient), "spec": P("data") if base else P()}
    step, (model, *_) = assert_trains_alike(model_of(mlp, remat), strategy, mesh, **options)
    return step, model


def shifts(found):
    """What is sent from stage to stage in each tick."""
    return [
        each
        for each in found.collectives()
        if each.kind == "collective-permute" and each.axes == ("stage",) and each.in_loop
    ]


def _cases():
    schedules = [(s, s * m, r) for s in (2, 4) for m in (1, 2, 4) for r in (1, 2)]
    for schedule, base in itertools.product(schedules, BASES):
        if base and schedule[0] == 4:  # 16 devices
            continue
        models = itertools.product((Block, Mixture), (False, True))
        for (mlp, remat), kind in itertools.product(models, (AxisType.Auto, AxisType.Explicit)):
            yield pytest.param(
                (mlp, remat, *schedule, base, kind),
                id="-".join(map(str, (mlp.__name__, remat, *schedule, base, kind.name))),
            )


@pytest.mark.parametrize("case", [*_cases()])
def test_equals_one_device(case):
    _, _, stages, microbatches, repeats, base, _ = case
    sent = shifts(trained(*case)[0])
    ticks = repeats * microbatches + stages - 1
    assert [each.times for each in sent] == [ticks] * 2  # forward and backward
    rows = ROWS // microbatches // (2 if base else 1)
    whole = rows * LENGTH * WIDTH * 4
    # With tensor parallelism, the compiler may shard the features, over two devices.
    assert {each.bytes for each in sent} <= ({whole, whole // 2} if base == "tensor" else {whole})
    # Each stage computes in every tick, in R·M of them a microbatch.
    assert (ticks - repeats * microbatches) / ticks == idle_share(stages, microbatches, repeats)


def test_accumulation_around_a_pipeline():
    gradient = accumulate_gradients(cross_entropy, steps=2)
    sent = shifts(trained(Block, True, 2, 4, 1, "fsdp", AxisType.Auto, gradient)[0])
    assert {each.times for each in sent} == {2 * (4 + 1)}
    assert {each.bytes for each in sent} == {ROWS // 2 // 4 // 2 * LENGTH * WIDTH * 4}


@pytest.mark.parametrize("stages", [2, 4])
def test_with_repeats_layers_move_once_in_a_step(stages):
    found, model = trained(Block, True, stages, stages, 2, "", AxisType.Auto)
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


@pytest.mark.parametrize("stages", [2, 4])
def test_flops_have_the_idle_share(stages):
    """Stages that wait compute as well, so that the bound of the time has what they wait."""

    def layers_only(count):
        blocks = stack(Block, 8, rngs=nnx.Rngs(0))
        mesh = jax.make_mesh((stages,), ("stage",), axis_types=(AxisType.Auto,))
        sharding = pipeline(blocks, mesh=mesh, microbatches=count)
        step = jit(lambda m, x: m(x), mesh=mesh, in_shardings=(sharding, P()))
        return step.lower(blocks, jnp.ones((ROWS, WIDTH))).compile().report().cost.flops

    few, many = layers_only(stages), layers_only(4 * stages)
    wanted = (1 - idle_share(stages, 4 * stages)) / (1 - idle_share(stages, stages))
    assert few / many == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("remat", [False, True])
def test_activations_in_memory(remat):
    """Of each further microbatch, a stage keeps what its ticks need for the backward pass."""

    def temporary(count):
        blocks = stack(Block, 8, remat=remat, rngs=nnx.Rngs(0))
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
    layer = nnx.eval_shape(lambda: Block(nnx.Rngs(0)))
    residuals = sum(math.prod(each.shape) * 4 for each in jax.eval_shape(kept, layer, x))
    size = 64 * WIDTH * 4
    added = (temporary(16) - temporary(8)) / 8
    # With remat: the input of the tick, and the batch on its way in and out. Else: what two layers
    # keep, and the gradients of the batch as well.
    assert added <= 1.02 * (3 * size if remat else 4 * size + 2 * residuals)
