"""A ``Stack`` in what is not a transform: checkpoints, exports, reports and placing."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from nnx_sharding import Carry, export, jit, place, scan, stack
from nnx_sharding.checkpoint import restore, save
from nnx_sharding.partition import from_rules, fsdp, sharded_init
from nnx_sharding.report import check_sharding
from zoo import Block, P, run_layers


class Model(nnx.Module):
    def __init__(self, *, stacked: bool, rngs: nnx.Rngs):
        blocks = [Block(rngs) for _ in range(4)]
        self.blocks = stack(blocks) if stacked else nnx.List(blocks)

    def __call__(self, x):
        return run_layers(self.blocks, x)


def make(stacked=True, seed=0):
    return Model(stacked=stacked, rngs=nnx.Rngs(seed))


X = np.linspace(-1, 1, 8 * 16, dtype=np.float32).reshape(8, 16)


def test_checkpoint(tmp_path):
    mesh = jax.make_mesh((8,), ("data",))
    model = make()
    save(tmp_path / "model", model)
    abstract = nnx.eval_shape(make)
    sharding = fsdp(abstract, mesh=mesh, min_size=0)
    restored = restore(tmp_path / "model", abstract, sharding, mesh)
    np.testing.assert_array_equal(restored.blocks.layers.up.kernel, model.blocks.layers.up.kernel)
    assert restored.blocks.layers.up.kernel.sharding.spec == P(None, None, "data")
    forward = jit(Model.__call__, in_shardings=(sharding, P("data")), mesh=mesh)
    np.testing.assert_allclose(forward(restored, X), model(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stacked", [False, True])
def test_checkpoint_in_the_other_form(tmp_path, stacked):
    model, other = make(stacked), make(not stacked, seed=1)
    save(tmp_path / "model", model)
    # Written in the form of one, and read into that of the other.
    read = restore(tmp_path / "model", nnx.eval_shape(lambda: make(stacked)))
    blocks = [*read.blocks] if stacked else read.blocks
    other.blocks = nnx.List(blocks) if stacked else stack(blocks)
    np.testing.assert_allclose(other(X), model(X), rtol=1e-5, atol=1e-6)


def test_export(tmp_path):
    model = make()
    export.export(jit(Model.__call__))(model, X).save(tmp_path / "program.zip")
    output, _ = export.load(tmp_path / "program.zip").call(nnx.state(model), X)
    np.testing.assert_allclose(output, model(X), rtol=1e-5, atol=1e-6)


def test_placed_initialized_and_checked():
    mesh = jax.make_mesh((8,), ("data",))
    abstract = nnx.eval_shape(make)
    sharding = fsdp(abstract, mesh=mesh, min_size=0)
    created = sharded_init(make, sharding, mesh)
    placed = place(make(), sharding, mesh)
    for model in (created, placed):
        kernel = model.blocks.layers.up.kernel
        assert kernel.sharding.spec == P(None, None, "data")
        np.testing.assert_allclose(kernel, make().blocks.layers.up.kernel, rtol=1e-6)
    report = check_sharding(abstract, sharding, mesh)
    assert "blocks/layers/up/kernel" in str(report)


def test_report_of_a_program():
    def loss(model, x):
        return jnp.mean(model(x) ** 2)

    compiled = jit(loss).lower(make(), X).compile()
    assert compiled.memory().by_path["model.blocks.layers.up.kernel"] == 4 * 16 * 64 * 4
    flops = compiled.cost().flops
    of_list = jit(loss).lower(make(stacked=False), X).compile().cost().flops
    assert flops == pytest.approx(of_list, rel=0.05)


class Anything:
    """What a function may hold, or get as an argument."""


def scanned(blocks, held):
    blocks.scan(lambda block, x: ((block(x), held)[0], None), X)


def passed(blocks, held):
    def step(block, x, held):
        return block(x)

    scan(step, in_axes=(0, Carry, None), out_axes=Carry)(blocks.layers, X, held)


STEP = scan(lambda block, x, held: block(x), in_axes=(0, Carry, None), out_axes=Carry)


@pytest.mark.parametrize(
    "use", [scanned, passed, lambda blocks, held: STEP(blocks.layers, X, held)]
)
def test_nothing_is_kept(use):
    held = Anything()
    reference = weakref.ref(held)
    use(make().blocks, held)
    del held
    gc.collect()
    assert reference() is None


class Residual(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 64, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(64, 16, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("count", [4, 16], ids=["other size", "size of the features"])
def test_parameters_are_gathered_along_any_dimension_of_layers(kind, count):
    """As with ``param_scan_axis=1`` of MaxText."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    sent = []
    for axis in (0, 1):
        axes = nnx.StateAxes({nnx.Param: axis, ...: 0})

        class Net(nnx.Module):
            def __init__(self, rngs, axes=axes):
                self.layers = nnx.vmap(Residual, in_axes=0, out_axes=axes)(rngs.split(count))

            def __call__(self, x, axes=axes):
                step = nnx.scan(
                    lambda x, layer: layer(x), in_axes=(nnx.Carry, axes), out_axes=nnx.Carry
                )
                return step(x, self.layers)

        up, down = [["data", "model"], ["model", "data"]]
        up.insert(axis, None)
        down.insert(axis, None)
        sharding = from_rules({"up/kernel": P(*up), "down/kernel": P(*down)}, default=P())
        model, x = Net(nnx.Rngs(0)), jnp.ones((16, 16))
        apply = jit(lambda model, x: model(x), in_shardings=(sharding, P("data")), mesh=mesh)
        sent.append(apply.lower(model, x).compile().collectives().by_axes())
        np.testing.assert_allclose(apply(model, x), Net(nnx.Rngs(0))(x), rtol=1e-4, atol=1e-4)
    assert sent[0] == sent[1]
