"""Static attributes and metadata: part of the structure, by content and type."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx

import nnx_sharding
from nnx_sharding import split


class Holder(nnx.Module):
    def __init__(self, static: Any):
        self.static = nnx.static(static)
        self.w = nnx.Param(jnp.ones(2))


@dataclasses.dataclass
class Config:
    scale: Any = 1


@dataclasses.dataclass(frozen=True)
class FrozenConfig:
    scale: Any = 1


class Equal:
    """Comparable, but without a hash."""

    def __init__(self, number: int):
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal) and self.number == other.number

    __hash__ = None  # type: ignore[assignment]


VALUES = {
    "list": lambda: [1, 2],
    "dict": lambda: {"a": [1]},
    "set": lambda: {1, 2},
    "tuple": lambda: (1, [2]),
    "array": lambda: np.arange(3),
    "config": lambda: Config([1]),
    "frozen_config": lambda: FrozenConfig([1]),
    "no_hash": lambda: Equal(3),
}
OTHERS = {
    "list": ([1, 2], [1, 2.0]),
    "list_and_tuple": ([1], (1,)),
    "dict": ({"a": 1}, {"a": True}),
    "set": ({1}, {True}),
    "frozenset": (frozenset({0}), frozenset({False})),
    "config": (Config(1), Config(1.0)),
    "frozen_config": (FrozenConfig(1), FrozenConfig(True)),
    "no_hash": (Equal(1), Equal(2)),
    "number": (1, True),
    "zero": (0.0, -0.0),
}


ATTRIBUTES = {name: make for name, make in VALUES.items() if name != "array"}


class StaticsTest(parameterized.TestCase):
    @parameterized.named_parameters(ATTRIBUTES.items())
    def test_works_and_traces_once_as_with_flax(self, make):
        for jit in (nnx_sharding.jit, nnx.jit):
            traces = []

            @jit
            def f(model, traces=traces):
                traces.append(1)
                model.w[...] *= 2
                return model.w[...]

            for _ in range(2):
                model = Holder(make())
                kept = model.static
                np.testing.assert_array_equal(f(model), [2.0, 2.0])
                if jit is nnx_sharding.jit:  # Flax gives every model the object of the first
                    self.assertIs(model.static, kept)
            self.assertLen(traces, 1)

    @parameterized.named_parameters(VALUES.items())
    def test_as_metadata(self, make):
        model = nnx.Dict(w=nnx.Param(jnp.ones(2), note=make()))
        nnx_sharding.jit(lambda m: m.w.set_value(m.w[...] * 2))(model)
        np.testing.assert_array_equal(model.w[...], [2.0, 2.0])

    @parameterized.named_parameters(ATTRIBUTES.items())
    def test_equal_ones_make_equal_structures(self, make):
        one, two = (split(Holder(make()))[0] for _ in range(2))
        self.assertEqual(one, two)
        self.assertEqual(hash(one), hash(two))

    @parameterized.named_parameters((name, *pair) for name, pair in OTHERS.items())
    def test_others_do_not(self, one, two):
        self.assertNotEqual(split(Holder(one))[0], split(Holder(two))[0])

    def test_layers_that_take_lists(self):
        rngs = nnx.Rngs(0)
        conv = nnx.Conv(1, 2, (3, 3), strides=[1, 1], padding=[(1, 1), (1, 1)], rngs=rngs)
        x = jnp.ones((1, 4, 4, 1))
        np.testing.assert_allclose(nnx_sharding.jit(lambda m, x: m(x))(conv, x), conv(x), rtol=1e-6)

    def test_change_in_place_means_a_new_trace(self):
        model = Holder([1, 2])
        f = nnx_sharding.jit(lambda m: m.w[...] * len(m.static))
        self.assertEqual(float(f(model)[0]), 2)
        model.static.append(3)
        self.assertEqual(float(f(model)[0]), 3)

    def test_change_in_place_does_not_reach_a_kept_structure(self):
        model = Holder([1, 2])
        f = nnx_sharding.jit(lambda m, x: x * len(m.static))
        f(model, 1.0)
        model.static.append(3)
        # Another shape traces again, under the structure that the first call has left.
        np.testing.assert_array_equal(f(Holder([1, 2]), jnp.ones(2)), [2.0, 2.0])

    def test_change_inside_reaches_the_caller_and_nothing_else(self):
        def grow(model):
            model.static = [*model.static, 3]
            model.static.append(4)

        model, f = Holder([1, 2]), nnx_sharding.jit(grow)
        first = model.static
        f(model)
        self.assertEqual((model.static, first), ([1, 2, 3, 4], [1, 2]))
        model.static.append(5)
        again = Holder([1, 2])
        f(again)
        self.assertEqual(again.static, [1, 2, 3, 4])

    def test_merged_graphs_have_the_object_as_long_as_it_is_unchanged(self):
        model = Holder([1])
        structure, state = split(model)
        one = nnx_sharding.merge(structure, state)
        self.assertIs(one.static, model.static)  # as with Flax
        one.static.append(2)
        two = nnx_sharding.merge(structure, state)
        self.assertEqual((one.static, two.static), ([1, 2], [1]))


class TreeModeOutputTest(absltest.TestCase):
    def test_shared_outputs_are_refused_as_with_flax(self):
        def make():
            variable = nnx.Param(jnp.ones(2))
            return variable, variable

        for jit in (nnx_sharding.jit, nnx.jit):
            with self.assertRaises(ValueError):
                jit(make, graph=False)()
            with self.assertRaises(ValueError):
                jit(lambda model: make(), graph=False)(Holder(1))


class KeywordTest(absltest.TestCase):
    def test_the_function_by_keyword_as_with_flax(self):
        self.assertEqual(float(nnx_sharding.jit(fun=lambda x: x + 1)(1.0)), 2.0)
        mesh = jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("x")
        mapped = nnx_sharding.shard_map(f=lambda x: x + 1, mesh=mesh, in_specs=spec, out_specs=spec)
        np.testing.assert_array_equal(mapped(jnp.ones(8)), jnp.ones(8) + 1)
