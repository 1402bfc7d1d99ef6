"""``prefetch``: a Stack that gathers the parameters of its next layer computes the same."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from libraries import assert_same
from nnx_sharding import ActivationSharding, accumulate_gradients, jit, stack, value_and_grad
from nnx_sharding.partition import fsdp, tensor_parallel
from nnx_sharding.testing import assert_overlappable
from zoo import WIDTH, Residual, assert_close, numbers

LAYERS, ROWS = 3, 32
PLAIN = {"norm": nnx.LayerNorm, "dropout": 0}  # without statistics and random streams

# XLA runs what it loads from JAX's cache with collectives in another order on each virtual device,
# if no one depends on the other: they wait for each other, until the process is aborted.
pytestmark = [
    pytest.mark.usefixtures("uncached"),
    # The loss is outside of the model, so what that returns is gathered on Explicit axes.
    pytest.mark.filterwarnings("ignore:.*operations outside of modules"),
]


class Half(nnx.Module):
    """A layer that returns another dtype than its parameters have."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(2.0 * x))


class Pair(nnx.Module):
    """A layer with layers."""

    def __init__(self, *, rngs):
        self.inner = stack(Residual, 2, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.out(self.inner(x))


class Model(nnx.Module):
    def __init__(self, blocks):
        self.blocks = blocks
        self.head = nnx.Linear(WIDTH, 4, rngs=nnx.Rngs(1))

    def __call__(self, x, *args):
        return self.head(self.blocks(x, *args))


def model_of(**options):
    return Model(stack(Residual, LAYERS, rngs=nnx.Rngs(0), **options))


def loss(model, x, *args):
    return (model(x, *args) ** 2).mean()


def compiled(
    make, *, prefetch, axis_types=AxisType.Auto, tensor=False, steps=1, loss=loss, args=()
):
    """A compiled step, and all that it computes."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_types,) * 2)
    model = make()
    base = tensor_parallel(model, mesh=mesh) if tensor else None
    sharding = fsdp(model, mesh=mesh, base=base, min_size=0, prefetch=prefetch)

    @jit(in_shardings=(sharding, P("data"), *[P()] * len(args)), mesh=mesh)
    def step(model, x, *args):
        argnums = (0, *range(2, 2 + len(args)))
        if steps == 1:
            return value_and_grad(loss, argnums=argnums)(model, x, *args)
        return accumulate_gradients(loss, steps=steps)(model, x)

    x = jax.random.normal(jax.random.key(2), (ROWS, WIDTH))
    program = step.lower(model, x, *args).compile()
    return program, (program(model, x, *args), nnx.state(model))


def check(make, **options):
    """Compares with the same program without prefetch; returns both programs."""
    before, expected = compiled(make, prefetch=0, **options)
    after, found = compiled(make, prefetch=1, **options)
    arrays = [numbers(x).astype(float) for x in jax.tree.leaves(expected)]
    assert len(arrays) > 8 and any(np.abs(x).max() > 0.01 for x in arrays)
    assert_close(found, expected, rtol=2e-6, atol=1e-9)
    return before, after


@pytest.mark.parametrize(
    ("axis_types", "tensor"),
    [(AxisType.Auto, True), (AxisType.Explicit, False)],
)
def test_prefetch_computes_the_same_and_gathers_beside_the_layers(axis_types, tensor):
    options = {"axis_types": axis_types, "tensor": tensor}
    before, after = check(lambda: model_of(remat=True), **options)
    assert_overlappable(after)
    with pytest.raises(AssertionError, match="independent of 0 of 2 matrix products"):
        assert_overlappable(before)
    # Whole: two kernels and two biases of one layer.
    layer = 4 * (8 * WIDTH**2 + 5 * WIDTH) // (2 if tensor else 1)
    assert after.memory().peak <= before.memory().peak + 2 * layer


POLICIES = False, True, "dots_saveable", {"up": "save"}
CASES = [
    *itertools.product(
        (AxisType.Auto, AxisType.Explicit),
        (False, True),
        POLICIES,
        (nnx.LayerNorm, nnx.BatchNorm),
        (0, 0.1),
        (1, 2),
    )
]


@pytest.mark.parametrize("number", range(8))
def test_prefetch_computes_the_same_in_any_combination(number):
    drawn = np.random.default_rng(number).integers(len(CASES))
    axis_types, tensor, remat, norm, dropout, steps = CASES[drawn]
    _, after = check(
        lambda: model_of(norm=norm, dropout=dropout, remat=remat),
        axis_types=axis_types,
        tensor=tensor,
        steps=steps,
    )
    assert_overlappable(after)


@pytest.mark.parametrize("axis_types", [AxisType.Auto, AxisType.Explicit])
def test_stacks_in_a_stack_gather_their_own_layers_ahead(axis_types):
    _, after = check(lambda: Model(stack(Pair, 2, rngs=nnx.Rngs(0))), axis_types=axis_types)
    assert_overlappable(after)


def test_what_layers_share_is_gathered_in_each_layer():
    def make():
        blocks = [Residual(rngs=nnx.Rngs(i), **PLAIN) for i in range(LAYERS)]
        for block in blocks:
            block.up = blocks[0].up
        return Model(stack(blocks))

    check(make, axis_types=AxisType.Explicit)


def test_unrolled_layers_gather_ahead():
    _, after = check(lambda: Model(stack(Residual, 4, **PLAIN, rngs=nnx.Rngs(0), unroll=2)))
    assert_overlappable(after, layers=2)


def test_further_arguments_and_captured_arrays_have_gradients():
    def scaled(model, x, scale):
        def step(block, x, weight):
            return block(x, weight * scale), (x**2).mean()

        y = model.blocks(x, scale)
        y, means = model.blocks.scan(step, y, jnp.linspace(0.5, 1, LAYERS))
        return (model.head(y) ** 2).mean() + means.sum()

    _, after = check(lambda: model_of(remat=True), loss=scaled, args=(jnp.full(WIDTH, 0.7),))
    assert_overlappable(after)


def test_a_weak_type_becomes_that_of_the_layers():
    def of_constant(model, x):
        scale = jnp.arange(1.0, WIDTH + 1).astype(jnp.bfloat16)
        weak = jnp.full((ROWS, WIDTH), 0.5)
        assert jax.typeof(weak).weak_type
        return (model.blocks(weak).astype(jnp.float32) * x * scale).mean()

    check(lambda: Model(stack(Half, LAYERS, rngs=nnx.Rngs(0))), loss=of_constant)


def test_residuals_have_no_gathered_parameters():
    before, after = check(model_of)
    stacked = f"f32[{LAYERS},{WIDTH},{4 * WIDTH}]"
    assert stacked in before.as_text()
    assert stacked not in after.as_text()


def test_a_stack_by_hand_prefetches_where_parameters_are_gathered():
    mesh = jax.make_mesh((8,), ("data",))
    blocks = stack([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in range(3)], prefetch=1)
    assert blocks[:2].prefetch == 1
    x = jnp.ones((8, WIDTH))

    @jit(
        in_shardings=(P(None, "data"), P("data")),
        activation_shardings=ActivationSharding(gather="data"),
        mesh=mesh,
    )
    def forward(blocks, x):
        return blocks(x)

    assert_overlappable(forward.lower(blocks, x).compile())
    assert_same(forward(blocks, x), blocks(x))


@pytest.mark.parametrize("prefetch", [2, -1, True, "1", None])
def test_prefetch_is_zero_or_one_layer(prefetch):
    text = f"prefetch must be 0 or 1 (layers), got {prefetch!r}"
    blocks = stack(nnx.Linear, 2, 4, 4, rngs=nnx.Rngs(0))
    mesh = jax.make_mesh((8,), ("data",))
    for call in (
        lambda: fsdp(blocks, mesh=mesh, prefetch=prefetch),
        lambda: stack(nnx.Linear, 2, 4, 4, rngs=nnx.Rngs(0), prefetch=prefetch),
        lambda: ActivationSharding(prefetch=prefetch),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            call()


def test_fsdp_without_a_stack_refuses_prefetch():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"of a Stack, and the model has none\. Make one"):
        fsdp(model, mesh=jax.make_mesh((8,), ("data",)), prefetch=1)


def test_a_program_that_gathers_nothing_in_a_loop_is_not_overlappable():
    program = jit(lambda x: x + 1).lower(jnp.ones(3)).compile()
    with pytest.raises(AssertionError, match="it gathers none in a loop"):
        assert_overlappable(program)
