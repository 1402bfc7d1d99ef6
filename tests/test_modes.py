"""The modes: graph and tree, with and without graph updates, by option and by Flax's flags."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_sharding
from graphs import Loose, Memory, Node, snapshot
from libraries import FULL, NO_UPDATES, TREE, param
from nnx_sharding import StateSharding

MODES = (("full", FULL), ("no_updates", NO_UPDATES), ("tree", TREE))
WITHOUT_UPDATES = MODES[1:]


class Model(nnx.Module):
    def __init__(self):
        self.w = param(2)
        self.stat = nnx.BatchStat(jnp.zeros(()))
        self.block = Node()
        self.block.w = param(3)
        self.calls = 0


def step(m, x):
    m.calls += 1
    m.w[...] += x
    m.block.w[...] *= 2
    m.stat.set_metadata(note="seen")
    return m.w[...] + m.block.w[...]


class UpdatesTest(parameterized.TestCase):
    @parameterized.named_parameters(*MODES)
    def test_values_are_updated(self, options):
        ours, eager = Model(), Model()
        lifted = nnx_sharding.jit(step, **options)
        for _ in range(2):
            assert float(lifted(ours, 1.0)) == float(step(eager, 1.0))
        assert float(ours.w[...]) == 4 and float(ours.block.w[...]) == 12

    @parameterized.named_parameters(
        ("full", FULL, 1), ("no_updates", NO_UPDATES, 0), ("tree", TREE, 0)
    )
    def test_static_attributes(self, options, expected):
        model = Model()
        nnx_sharding.jit(step, **options)(model, 1.0)
        assert model.calls == expected

    @parameterized.named_parameters(*WITHOUT_UPDATES)
    def test_structure_of_the_callers_model_stays(self, options):
        @nnx_sharding.jit(**options)
        def change(m):
            m.block.w[...] += 1
            m.extra = param(5)
            m.block = Node()
            del m.w

        model = Model()
        block, w = model.block, model.w
        change(model)
        assert model.block is block and model.w is w and not hasattr(model, "extra")
        assert float(block.w[...]) == 4

    def test_shared_references_without_updates(self):
        model = Model()
        model.block.w = model.w

        @nnx_sharding.jit(**NO_UPDATES)
        def f(m):
            m.w[...] += 1
            m.block.w[...] += 1
            return jnp.asarray(m.w is m.block.w)

        assert bool(f(model))
        assert float(model.w[...]) == 4 and model.w is model.block.w

    def test_cycles_without_updates(self):
        model = Model()
        model.block.parent = model
        assert float(nnx_sharding.jit(step, **NO_UPDATES)(model, 1.0)) == 9
        assert model.block.parent is model

    @parameterized.named_parameters(*MODES)
    def test_new_modules_are_returned(self, options):
        @nnx_sharding.jit(**options)
        def make(x):
            model = Model()
            model.w[...] = x
            model.calls = 7
            return model

        model = make(5.0)
        assert type(model) is Model and float(model.w[...]) == 5 and model.calls == 7
        model.w[...] = jnp.asarray(1.0)
        assert float(nnx_sharding.jit(step, **options)(model, 1.0)) == 8

    @parameterized.named_parameters(*WITHOUT_UPDATES)
    def test_returning_an_input_is_refused(self, options):
        model = Model()
        memory = Memory(model)
        for f, named in (
            (lambda m: m.w, "output: the input m.w"),
            (lambda m: {"a": m}, r"output\S*\ba\S*.block.w: the input m.block.w"),
            (lambda m: (1.0, m.block), r"output\[1\].w: the input m.block.w"),
        ):
            with pytest.raises(ValueError, match=named):
                nnx_sharding.jit(f, **options)(model)
        memory.assert_unchanged()

    @parameterized.named_parameters(*WITHOUT_UPDATES)
    def test_returning_a_copy_is_fine(self, options):
        model = Model()
        new = nnx_sharding.jit(lambda m: nnx.clone(m), **options)(model)
        assert new is not model and new.w is not model.w
        assert snapshot(new) == snapshot(model)

    @parameterized.named_parameters(*MODES)
    def test_bare_variable(self, options):
        variable = param(2)

        @nnx_sharding.jit(**options)
        def f(v):
            v[...] *= 5
            return v[...] + 1

        assert float(f(variable)) == 11 and float(variable[...]) == 10


class GlobalFlagsTest(parameterized.TestCase):
    def calls(self, **options: Any) -> int:
        model = Model()
        nnx_sharding.jit(step, **options)(model, 1.0)
        assert float(model.w[...]) == 3
        return model.calls

    def test_flags_are_the_default(self):
        assert self.calls() == 1
        with nnx.set_graph_updates(False):
            assert self.calls() == 0
        with nnx.set_graph_mode(False):
            assert self.calls() == 0
        assert self.calls() == 1

    def test_options_win_over_flags(self):
        with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
            assert self.calls(graph=True, graph_updates=True) == 1
            assert self.calls(graph=True) == 0
            assert self.calls(graph_updates=True) == 0
        assert self.calls(graph=False, graph_updates=True) == 0
        assert self.calls(graph_updates=False) == 0

    def test_flags_count_where_a_function_is_decorated_as_in_flax(self):
        for jit in (nnx_sharding.jit, nnx.jit):
            model, before = Model(), jit(step)
            with nnx.set_graph_updates(False):
                within = jit(step)
                before(model, 1.0)
            assert model.calls == 1
            within(model, 1.0)
            assert model.calls == 1

    def test_shared_references_in_tree_mode_by_flag(self):
        model = Model()
        model.block.w = model.w
        with nnx.set_graph_mode(False), pytest.raises(ValueError, match="shared references"):
            nnx_sharding.jit(step)(model, 1.0)


class TreeModeTest(parameterized.TestCase):
    def assert_refused(self, args: tuple[Any, ...], *named: str) -> None:
        memory = Memory(args)
        with pytest.raises(ValueError, match="graph=False") as error:
            nnx_sharding.jit(lambda *a: 0.0, **TREE)(*args)
        for text in named:
            assert text in str(error.value), str(error.value)
        memory.assert_unchanged()

    def test_variable_in_two_places(self):
        model = Model()
        model.block.w = model.w
        self.assert_refused((model,), "block/w", "/w")

    def test_variable_in_two_arguments(self):
        variable = param()
        self.assert_refused((variable, {"again": variable}), "again")

    def test_module_in_two_arguments(self):
        model = Model()
        self.assert_refused((model, model), "w", "stat")

    def test_cycle(self):
        model = Model()
        model.block.parent = model
        self.assert_refused((model,), "block/parent")

    def test_module_that_is_no_pytree(self):
        model = Loose()
        model.w = param()
        with pytest.raises(ValueError, match=r"Loose.*pytree=False"):
            nnx_sharding.jit(lambda m: 0.0, **TREE)(model)

    def test_tree_mode_needs_no_graph_for_plain_sharing_of_arrays(self):
        array = jnp.ones(2)
        model = Node()
        model.a, model.b = array, array
        assert float(nnx_sharding.jit(lambda m: (m.a + m.b).sum(), **TREE)(model)) == 4


class ShardingInEveryModeTest(parameterized.TestCase):
    @parameterized.named_parameters(*MODES)
    def test_state_sharding(self, options):
        mesh = Mesh(jax.devices(), ("x",))
        specs = StateSharding({nnx.PathContains("kernel"): P(None, "x"), ...: P()})

        @nnx_sharding.jit(in_shardings=(specs, None), mesh=mesh, **options)
        def f(m, x):
            m.bias[...] += 1
            return m(x)

        model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
        expected = model(jnp.ones((2, 4))) + 1
        assert jnp.allclose(f(model, jnp.ones((2, 4))), expected, rtol=1e-5)
        assert model.kernel.sharding == NamedSharding(mesh, P(None, "x"))
        assert model.bias.sharding.is_equivalent_to(NamedSharding(mesh, P()), 1)

    @parameterized.named_parameters(*MODES)
    def test_new_module_is_made_sharded(self, options):
        mesh = Mesh(jax.devices(), ("x",))
        specs = StateSharding({nnx.PathContains("kernel"): P("x"), ...: P()})
        make = nnx_sharding.jit(
            lambda: nnx.Linear(8, 2, rngs=nnx.Rngs(0)), out_shardings=specs, mesh=mesh, **options
        )
        assert make().kernel.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)


class FlaxPrefixTest(parameterized.TestCase):
    """The result of ``nnx.prefix`` is accepted as a spec, as in Flax."""

    def setUp(self):
        super().setUp()
        self.mesh = Mesh(jax.devices(), ("x",))
        self.specs = {nnx.Param: P("x"), ...: P()}

    def prefix(self, value: Any, graph: bool) -> Any:
        shardings = {f: NamedSharding(self.mesh, s) for f, s in self.specs.items()}
        return nnx.prefix(value, shardings, graph=graph)

    def model(self) -> nnx.Dict:
        return nnx.Dict(w=nnx.Param(jnp.ones(8)), n=nnx.BatchStat(jnp.ones(8)))

    def layout(self, model: nnx.Dict) -> list[P]:
        return [model.w.get_raw_value().sharding.spec, model.n.get_raw_value().sharding.spec]

    @parameterized.product(graph=(True, False), updates=(True, False))
    def test_inputs_and_outputs(self, graph, updates):
        prefix = self.prefix(self.model(), graph)
        modes = {"graph": graph, "graph_updates": updates}
        made = nnx_sharding.jit(self.model, out_shardings=prefix, **modes)()
        assert self.layout(made) == [P("x"), P()]
        taken = self.model()
        nnx_sharding.jit(lambda m: m.w[...].sum(), in_shardings=(prefix,), **modes)(taken)
        assert self.layout(taken) == [P("x"), P()]

    def test_shared_objects(self):
        model = self.model()
        prefixes = tuple(self.prefix((model, model), True))
        modes = {"graph": True, "graph_updates": False}
        one, two = nnx_sharding.jit(
            lambda: (lambda m: (m, m))(self.model()), out_shardings=prefixes, **modes
        )()
        assert one is two
        assert self.layout(one) == [P("x"), P()]

    def test_shard_map(self):
        prefix = nnx.prefix(self.model(), self.specs, graph=True)
        seen = []

        @nnx_sharding.shard_map(mesh=self.mesh, in_specs=(prefix,), out_specs=P("x"))
        def f(model):
            seen.append((model.w.shape, model.n.shape))
            return model.w[...]

        f(self.model())
        assert seen == [((1,), (8,))]
