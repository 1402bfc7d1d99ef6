"""``StateSharding``: which filter decides, and that it is the rule of ``flax.nnx``."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding

from nnx_sharding import ActivationSharding, StateSharding, jit, shard_map
from nnx_sharding.filters import Paths
from zoo import MLP, Net, P, mesh_of


def is_wide(path, variable):
    return variable.shape[-1] > 8


def is_up(path, variable):
    return "up" in path


FILTERS = {
    "everything": ...,
    "true": True,
    "false": False,
    "none": None,
    "type": nnx.Param,
    "other_type": nnx.BatchStat,
    "base_type": nnx.Variable,
    "contains": nnx.PathContains("up"),
    "path_in": nnx.filterlib.PathIn(("up", "kernel")),
    "tuple": (nnx.BatchStat, nnx.PathContains("down")),
    "list": [nnx.Param, nnx.PathContains("down")],
    "any": nnx.Any(nnx.BatchStat, nnx.PathContains("down")),
    "all": nnx.All(nnx.Param, nnx.PathContains("down")),
    "not": nnx.Not(nnx.PathContains("up")),
    "tag": "special",
    "with_tag": nnx.WithTag("special"),
    "of_type": nnx.OfType(nnx.Param),
    "predicate": is_up,
    "lambda": lambda path, variable: path[-1] == "kernel",
    "nothing": nnx.Nothing(),
}


def places():
    model = nnx.Dict(up=nnx.Linear(2, 3, rngs=nnx.Rngs(0)), down=nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    model.special = nnx.Param(jnp.ones(2), tag="special")
    return [(path, variable) for path, variable in nnx.to_flat_state(nnx.state(model))]


class RuleTest(parameterized.TestCase):
    @parameterized.named_parameters((name, name) for name in FILTERS)
    def test_every_filter_decides_as_in_flax(self, name):
        pairs = {FILTERS[name] if name != "list" else tuple(FILTERS[name]): P("a"), ...: P("rest")}
        ours, theirs = StateSharding(pairs), nnx.StateSharding(pairs)
        for path, variable in places():
            self.assertEqual(ours.map_prefix(path, variable), theirs.map_prefix(path, variable))

    def test_lists_as_specs_by_path(self):
        with self.assertRaisesRegex(TypeError, r"\[None, 'a'\]: write P\(None, 'a'\)"):
            StateSharding({"up": {"kernel": [None, "a"], "bias": P()}})

    def test_lists_of_filters_in_a_call(self):
        """They mean what tuples do; a list has no hash, by which calls find their programs."""
        pairs = [([nnx.Param, [nnx.BatchStat]], P("a")), (..., P())]
        rules = StateSharding(pairs)
        self.assertEqual(
            rules, StateSharding([((nnx.Param, (nnx.BatchStat,)), P("a")), (..., P())])
        )
        jit(lambda net: None, in_shardings=rules, mesh=mesh_of((8,), ("a",)))(Net())
        modules = ActivationSharding([([nnx.Linear, nnx.Conv], P("a"))], gather=["a"], kept=["b"])
        self.assertEqual((modules.gather, modules.kept), (("a",), ("b",)))
        self.assertIsInstance(hash(modules), int)

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.sampled_from(sorted(set(FILTERS) - {"list"})), max_size=5))
    def test_any_order_of_filters_decides_as_in_flax(self, names):
        pairs = {FILTERS[name]: P(name) for name in names}
        ours, theirs = StateSharding(pairs), nnx.StateSharding(pairs)
        for path, variable in places():
            try:
                expected = theirs.map_prefix(path, variable)
            except ValueError:
                self.assertEqual(ours.find(path, variable), (None, None))
                with self.assertRaises(ValueError):
                    ours.map_prefix(path, variable)
            else:
                self.assertEqual(ours.map_prefix(path, variable), expected)
                index, found = ours.find(path, variable)
                self.assertEqual((ours.shardings[index], found), (expected, expected))

    def test_first_match_decides(self):
        kernel = nnx.Param(jnp.ones((2, 2)))
        for order in ((nnx.Param, ...), (..., nnx.Param)):
            sharding = StateSharding([(f, P(str(i))) for i, f in enumerate(order)])
            self.assertEqual(sharding.map_prefix(("x",), kernel), P("0"))

    def test_mapping_pairs_and_iterator_say_the_same(self):
        pairs = [(nnx.Param, P("a")), (..., P())]
        forms = [StateSharding(dict(pairs)), StateSharding(pairs), StateSharding(iter(pairs))]
        self.assertEqual(len(set(forms)), 1)
        self.assertEqual(forms[2].filters, (nnx.Param, ...))
        self.assertEqual(forms[2].shardings, (P("a"), P()))

    def test_attributes_are_those_of_flax(self):
        pairs = {nnx.Param: P("a"), ...: None}
        ours, theirs = StateSharding(pairs), nnx.StateSharding(pairs)
        self.assertEqual(ours.filters, theirs.filters)
        self.assertEqual(ours.shardings, theirs.shardings)

    @parameterized.named_parameters(
        ("none", None),
        ("spec", P("a")),
        ("single", SingleDeviceSharding(jax.devices()[0])),
        ("named", NamedSharding(mesh_of((8,), ("a",)), P("a"))),
    )
    def test_every_kind_of_sharding(self, sharding):
        found = StateSharding({...: sharding}).find(("x",), nnx.Param(jnp.ones(8)))
        self.assertEqual(found, (0, sharding))

    def test_state_of_specs(self):
        model = MLP()
        specs = nnx.state(model)
        specs = jax.tree.map(lambda _: P(None, "a"), specs)
        specs["down"]["kernel"] = P("a")
        sharding = StateSharding(specs)
        self.assertEqual(sharding.map_prefix(("up", "kernel"), model.up.kernel), P(None, "a"))
        self.assertEqual(sharding.map_prefix(("down", "kernel"), model.down.kernel), P("a"))
        with self.assertRaises(ValueError):
            sharding.map_prefix(("other",), model.up.kernel)

    def test_state_of_specs_as_in_flax(self):
        model = MLP()
        specs = nnx.get_partition_spec(nnx.state(model))
        ours, theirs = StateSharding(specs), nnx.StateSharding(specs)
        for path, variable in nnx.to_flat_state(nnx.state(model)):
            a, b = ours.map_prefix(path, variable), theirs.map_prefix(path, variable)
            self.assertEqual(a, b.get_raw_value() if isinstance(b, nnx.Variable) else b)

    def test_state_with_none_and_shardings(self):
        sharding = NamedSharding(mesh_of((8,), ("a",)), P())
        by_path = {"x": {"y": None}, "z": sharding}
        state = nnx.State(by_path)
        assert StateSharding(by_path) == StateSharding(state)
        with self.assertRaisesRegex(TypeError, "'x': {'y': None}"):
            StateSharding({**by_path, ...: None})
        made = StateSharding(state)
        self.assertEqual(made.find(("x", "y"), nnx.Param(1.0)), (0, None))
        self.assertEqual(made.find(("z",), nnx.Param(1.0)), (1, sharding))


class ObjectTest(parameterized.TestCase):
    PAIRS = {nnx.PathContains("up"): P(None, "a"), nnx.Param: P("a"), ...: P()}

    def test_equal_and_hash(self):
        one, two = StateSharding(self.PAIRS), StateSharding(dict(self.PAIRS))
        self.assertEqual(one, two)
        self.assertEqual(hash(one), hash(two))
        self.assertEqual({one: 1}[two], 1)

    @parameterized.named_parameters(
        ("order", dict(reversed(PAIRS.items()))),
        ("sharding", {**PAIRS, ...: P("b")}),
        ("fewer", {...: P()}),
        ("filter", {nnx.PathContains("down"): P(None, "a"), nnx.Param: P("a"), ...: P()}),
    )
    def test_not_equal(self, pairs):
        self.assertNotEqual(StateSharding(self.PAIRS), StateSharding(pairs))
        self.assertNotEqual(StateSharding(self.PAIRS), dict(self.PAIRS))

    def test_repr_can_be_evaluated(self):
        sharding = StateSharding({"tag": P("a", None), ...: P()})
        names = {"StateSharding": StateSharding, "PartitionSpec": P, "P": P}
        self.assertEqual(eval(repr(sharding), names), sharding)

    def test_pickle_and_copy(self):
        sharding = StateSharding({is_up: P("a"), nnx.Param: P("b"), "tag": None, ...: P()})
        for other in (
            pickle.loads(pickle.dumps(sharding)),
            copy.copy(sharding),
            copy.deepcopy(sharding),
        ):
            self.assertEqual(other, sharding)
            self.assertEqual(other.map_prefix(("up",), nnx.BatchStat(1.0)), P("a"))

    def test_is_a_leaf_of_pytrees(self):
        sharding = StateSharding(self.PAIRS)
        self.assertEqual(jax.tree.leaves({"a": sharding}), [sharding])

    def test_cannot_be_changed(self):
        sharding = StateSharding(self.PAIRS)
        for name in ("filters", "shardings"):
            with self.assertRaises(AttributeError):
                setattr(sharding, name, ())

    @parameterized.named_parameters(("number", 3), ("object", object()), ("float", 1.5))
    def test_no_filter_is_a_type_error(self, filter_):
        with self.assertRaisesRegex(TypeError, "filter"):
            StateSharding({filter_: P()})

    @parameterized.named_parameters(("number", 3), ("string", "a"), ("tuple", ("a",)))
    def test_no_sharding_is_a_type_error(self, sharding):
        with self.assertRaises(TypeError):
            StateSharding({...: sharding})

    @parameterized.named_parameters(("number", 3), ("none", None), ("spec", P("a")))
    def test_something_else_than_pairs_is_a_type_error(self, value):
        with self.assertRaises(TypeError):
            StateSharding(value)


class PredicateTest(parameterized.TestCase):
    """Predicates see the Variable, so what was resolved for one shape may be wrong for another."""

    def test_a_predicate_on_shapes_is_asked_again_for_other_shapes(self):
        mesh = mesh_of((8,), ("a",))
        spec = StateSharding({is_wide: P(None, "a"), ...: P()})
        touch = jit(lambda model: None, in_shardings=spec, mesh=mesh)
        for hidden, expected in ((16, P(None, "a")), (8, P()), (16, P(None, "a"))):
            model = MLP(hidden=hidden)
            touch(model)
            self.assertEqual(model.up.kernel.sharding.spec, expected)

    def test_a_predicate_on_dtypes_is_asked_again(self):
        mesh = mesh_of((8,), ("a",))
        spec = StateSharding({lambda p, v: v.dtype == jnp.bfloat16: P("a"), ...: P()})
        touch = jit(lambda v: None, in_shardings=spec, mesh=mesh)
        for dtype, expected in ((jnp.float32, P()), (jnp.bfloat16, P("a")), (jnp.float32, P())):
            variable = nnx.Param(jnp.ones(8, dtype))
            touch(variable)
            self.assertEqual(variable.sharding.spec, expected)

    def test_a_predicate_on_values_of_metadata(self):
        mesh = mesh_of((8,), ("a",))
        spec = StateSharding({lambda p, v: v.get_metadata().get("split", False): P("a"), ...: P()})
        touch = jit(lambda v: None, in_shardings=spec, mesh=mesh)
        for split in (True, False, True):
            variable = nnx.Param(jnp.ones(8), split=split)
            touch(variable)
            self.assertEqual(variable.sharding.spec, P("a") if split else P())

    def test_a_predicate_on_shapes_in_shard_map(self):
        mesh = mesh_of((8,), ("a",))
        spec = StateSharding({is_wide: P("a"), ...: P()})
        fun = shard_map(
            lambda v: jnp.array(v[...].size), mesh=mesh, in_specs=(spec,), out_specs=P()
        )
        for size, expected in ((16, 2), (8, 8), (16, 2)):
            self.assertEqual(int(fun(nnx.Param(jnp.ones(size)))), expected)

    def test_a_predicate_inside_of_combinations(self):
        mesh = mesh_of((8,), ("a",))
        for filter_ in (
            nnx.Any(is_wide),
            nnx.All(nnx.Param, is_wide),
            nnx.Not(nnx.Not(is_wide)),
            (is_wide,),
        ):
            spec = StateSharding({filter_: P("a"), ...: P()})
            touch = jit(lambda v: None, in_shardings=spec, mesh=mesh)
            for size, expected in ((16, P("a")), (8, P())):
                variable = nnx.Param(jnp.ones(size))
                touch(variable)
                self.assertEqual(variable.sharding.spec, expected, filter_)

    def test_an_output_predicate_sees_the_shapes_of_the_output(self):
        mesh = mesh_of((8,), ("a",))
        spec = StateSharding({lambda p, v: v.shape[0] % 8 == 0: P("a"), ...: P()})
        make = jit(
            lambda n: nnx.Param(jnp.ones(n)), static_argnums=0, out_shardings=spec, mesh=mesh
        )
        self.assertEqual([make(n).sharding.spec for n in (8, 3, 16)], [P("a"), P(), P("a")])

    def test_paths_are_those_inside_the_argument(self):
        seen = set()

        def note(path, variable):
            seen.add((path, type(variable).__name__))
            return True

        spec = StateSharding({note: P()})
        jit(lambda x, m: None, in_shardings=(None, {"m": [spec]}), mesh=mesh_of((8,), ("a",)))(
            1.0, {"m": [MLP()]}
        )
        self.assertEqual(seen, {(("up", "kernel"), "Param"), (("down", "kernel"), "Param")})


class UnmatchedTest(parameterized.TestCase):
    SPEC = StateSharding({nnx.BatchStat: P()})

    def check(self, error):
        text = str(error)
        for expected in ("kernel", "bias", "scale", "(8, 8)", "Param", "net"):
            self.assertIn(expected, text)
        self.assertNotIn(".mean", text)

    def test_all_are_listed_for_jit(self):
        with self.assertRaises(ValueError) as caught:
            jit(lambda net: None, in_shardings=self.SPEC, mesh=mesh_of((8,), ("a",)))(Net())
        self.check(caught.exception)

    def test_all_are_listed_for_shard_map(self):
        fun = shard_map(
            lambda net: None, in_specs=(self.SPEC,), out_specs=P(), mesh=mesh_of((8,), ("a",))
        )
        with self.assertRaises(ValueError) as caught:
            fun(Net())
        self.check(caught.exception)

    def test_of_the_output(self):
        with self.assertRaisesRegex(ValueError, "output.*kernel"):
            jit(lambda: Net(), out_shardings=self.SPEC, mesh=mesh_of((8,), ("a",)))()

    def test_nothing_was_changed(self):
        net = Net()
        before = net.linear.kernel.get_raw_value()
        with self.assertRaises(ValueError):
            jit(lambda net: None, in_shardings=self.SPEC, mesh=mesh_of((8,), ("a",)))(net)
        self.assertIs(net.linear.kernel.get_raw_value(), before)

    def test_the_remedy_comes_before_the_paths_of_a_strategy(self):
        rules = StateSharding({Paths([(f"layer{i}", "kernel")]): P() for i in range(12)})
        with self.assertRaises(ValueError) as by_path:
            rules.map_prefix(("up", "kernel"), MLP().up.kernel)
        with self.assertRaises(ValueError) as by_jit:
            jit(lambda net: None, in_shardings=rules, mesh=mesh_of((8,), ("a",)))(Net())
        for text in map(str, (by_path.exception, by_jit.exception)):
            self.assertLess(text.index("strategy again"), text.index("The filters are"))
            self.assertEqual(text.count("Paths("), 3)
            self.assertIn("9 more", text)

    def test_map_prefix_names_path_and_shape(self):
        with self.assertRaisesRegex(ValueError, r"up/kernel.*\(4, 16\)"):
            self.SPEC.map_prefix(("up", "kernel"), MLP().up.kernel)


class AsInFlaxTest(parameterized.TestCase):
    """The same program through flax.nnx.jit with its StateSharding."""

    PAIRS = {nnx.PathContains("up"): P(None, "a"), nnx.PathContains("down"): P("a"), ...: P()}

    def named(self, mesh):
        return {f: NamedSharding(mesh, s) for f, s in self.PAIRS.items()}

    def test_layouts_and_numbers_of_a_step(self):
        mesh = mesh_of((8,), ("a",))
        x = jnp.ones((3, 4))

        def step(model, x):
            y = model(x)
            model.up.kernel[...] -= 0.1 * y.mean()
            return y

        outcomes = []
        for decorator, kind in ((jit, StateSharding), (nnx.jit, nnx.StateSharding)):
            model = MLP()
            spec = kind(self.named(mesh))
            y = decorator(step, in_shardings=(spec, None))(model, x)
            outcomes.append((y, model))
        (a, ours), (b, theirs) = outcomes
        np.testing.assert_allclose(a, b, rtol=1e-6)
        for layer in ("up", "down"):
            one, two = getattr(ours, layer).kernel, getattr(theirs, layer).kernel
            np.testing.assert_allclose(one[...], two[...], rtol=1e-6)
            self.assertTrue(one.sharding.is_equivalent_to(two.sharding, 2))

    def test_new_model(self):
        mesh = mesh_of((8,), ("a",))
        ours, theirs = (
            d(lambda: MLP(), out_shardings=kind(self.named(mesh)))()
            for d, kind in ((jit, StateSharding), (nnx.jit, nnx.StateSharding))
        )
        self.assertTrue(ours.up.kernel.sharding.is_equivalent_to(theirs.up.kernel.sharding, 2))
        np.testing.assert_array_equal(ours.up.kernel[...], theirs.up.kernel[...])
