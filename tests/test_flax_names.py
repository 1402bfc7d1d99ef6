"""The table of Flax's transforms in the guide: it has all, and what it says of them is there."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_sharding
from libraries import OURS, assert_same
from test_transform_nesting import MODES, NAMES

TESTS = Path(__file__).parent
GUIDE = TESTS.parent / "docs" / "guides" / "migrating_from_flax.md"
NESTED = "test_transform_nesting.py"


def rows():
    """The cells of each row, without those of the heading."""
    table = re.findall(r"^" + r"\| (.*?) " * 5 + r"\|$", GUIDE.read_text(), re.MULTILINE)
    return list(table[2:])


def names(cell):
    """Names of functions and tests, without those of options."""
    return re.findall(r"`([\w.:]+)[`(]", cell)


def is_transform(name):
    return str(getattr(getattr(nnx, name), "__module__", "")).startswith("flax.nnx.transforms")


def test_all_transforms_of_flax():
    listed = [name for cells in rows() for name in names(cells[0])]
    assert sorted(listed) == sorted(filter(is_transform, dir(nnx)))


def test_ours_exist_and_are_listed():
    for theirs, ours, *_ in rows():
        ours = names(ours)
        for name in ours:
            library, _, own = name.rpartition(".")
            libraries = {"": nnx_sharding, "nnx": nnx, "jax.lax": jax.lax}
            assert hasattr(libraries[library], own), name
        for name in names(theirs):
            assert (name in ours) == hasattr(nnx_sharding, name), name


def test_tests_exist():
    for theirs, _, modes, meshes, tests in rows():
        for name in names(tests):
            file, _, test = name.partition("::")
            assert re.search(rf"(def|class) {test}", (TESTS / file).read_text()), name
        if names(tests) == [NESTED]:
            # Its nestings have all modes and meshes.
            assert modes == "all" and meshes == "Auto, Explicit, mixed"
            missing = {*names(theirs)} - {*NAMES} - {"jit_partial", "Carry", "StateAxes"}
            assert not missing


@pytest.mark.parametrize("mode", MODES)
def test_custom_vjp_of_flax(mode):
    modes = MODES[mode]

    def double(model, x):
        return model.kernel.sum() * x

    def forward(model, x):
        return scaled(model, x), (model, x)

    def backward(residuals, cotangents):
        model, x = residuals
        like = nnx.state(model) if isinstance(cotangents, tuple) else model
        return jax.tree.map(lambda array: jnp.full_like(array, 7), like), 2 * x

    scaled = nnx.custom_vjp(double, **modes)
    scaled.defvjp(forward, backward)
    model = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    run = nnx_sharding.jit(nnx_sharding.grad(scaled, wrt=nnx.Param, **modes), **modes)
    gradient = run(model, jnp.float32(3))
    np.testing.assert_array_equal(gradient["kernel"], np.full((2, 2), 7))


@pytest.mark.parametrize("mode", MODES)
def test_transform_metadata_of_flax(mode):
    modes, seen = MODES[mode], []
    make = nnx.split_rngs(splits=3)(nnx_sharding.vmap(lambda rngs: nnx.Linear(2, 2, rngs=rngs)))
    layers = make(nnx.Rngs(0))
    layers.kernel.set_metadata(out_sharding=("layers", None, None))

    @nnx_sharding.scan(in_axes=(0, nnx_sharding.Carry), out_axes=nnx_sharding.Carry, **modes)
    @nnx.transform_metadata(
        in_axes=(0, None), out_axes=None, partition="layers", graph=modes["graph"]
    )
    def forward(layer, x):
        seen.append(layer.kernel.get_metadata("out_sharding"))
        return layer(x)

    assert forward(layers, jnp.ones((1, 2))).shape == (1, 2)
    assert {*seen} == {(None, None)}
    assert layers.kernel.get_metadata("out_sharding") == ("layers", None, None)


class Tied(nnx.Module):
    """A parameter in two places, and a counter: of Flax, only ``nnx.compat`` takes it."""

    def __init__(self):
        self.w = self.again = nnx.Param(jnp.arange(1.0, 4.0))
        self.calls = nnx.BatchStat(jnp.float32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return jnp.sin(self.w[...] * x) * self.again[...]


def loss(model, x):
    return model(x).sum()


def grad(outer, inner, model, x):
    return outer.jit(inner.grad(loss))(model, x)


def jit(outer, inner, model, x):
    return outer.value_and_grad(inner.jit(loss))(model, x)


def vmap(outer, inner, model, x):
    mapped = inner.vmap(lambda model, x: model.w[...] * x, in_axes=(None, 0))
    return outer.grad(lambda model, x: mapped(model, x).sum())(model, x)


def vmap_of_states(outer, inner, model, x):
    axes = nnx.StateAxes({nnx.Param: None, ...: 0})
    model.calls.set_value(jnp.zeros(3))
    return outer.vmap(inner.jit(loss), in_axes=(axes, 0))(model, x)


def scan(outer, inner, model, x):
    run = inner.scan(lambda model, x: (model, model(x)), in_axes=(nnx.Carry, 0))
    return outer.grad(lambda model, x: (run(model, x)[1] ** 2).sum())(model, x)


@pytest.mark.skipif(not hasattr(nnx, "compat"), reason="This Flax has no nnx.compat.")
@pytest.mark.parametrize("program", (grad, jit, vmap, vmap_of_states, scan))
def test_beside_compat_of_flax(program):
    """Around ours, within ours, and before ours on the same objects."""
    theirs = nnx.compat

    def outcome(*pairs):
        model, x = Tied(), jnp.linspace(0.1, 1, 3)
        results = [program(outer, inner, model, x) for outer, inner in pairs]
        assert model.w is model.again
        return results, nnx.compat.state(model)

    pairs = (theirs, OURS), (OURS, theirs), (theirs, theirs), (OURS, OURS)
    assert_same(outcome(*pairs), outcome(*[(theirs, theirs)] * len(pairs)))
