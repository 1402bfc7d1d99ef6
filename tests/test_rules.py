"""Patterns for paths, rules, logical names, and shardings from metadata and placed arrays."""

from __future__ import annotations

import fnmatch
import pickle
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from flax import linen, nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding import StateSharding, jit, place
from nnx_sharding.errors import StrictError, UnusedFilterWarning
from nnx_sharding.partition import (
    LogicalRules,
    from_arrays,
    from_logical,
    from_metadata,
    from_rules,
    fsdp,
    override,
    replicated,
    specs_by_path,
)
from nnx_sharding.partition.variables import from_paths
from nnx_sharding.specs.filters import PathGlob, PathRegex, is_opaque
from zoo import MLP, Net, mesh_of


def mesh24():
    return mesh_of((2, 4), ("data", "model"))


def annotated(shape=(4, 8), **metadata):
    """A Variable with this metadata, whatever the current mesh is."""
    return nnx.Param(np.zeros(shape, np.float32), eager_sharding=False, **metadata)


def by_name(tree, sharding):
    return {"/".join(path): spec for path, spec in specs_by_path(tree, sharding).items()}


def spec_from_metadata(variable, rules=None, mesh=None):
    return from_metadata(variable, rules, mesh=mesh).map_prefix((), variable)


def matches(keys, path):
    """What a glob means, key by key."""
    if not keys:
        return not path
    if keys[0] == "**":
        return any(matches(keys[1:], path[i:]) for i in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], keys[0]) and matches(keys[1:], path[1:])


parts = st.sampled_from(["a", "b", ".", "*", "?", "[ab]", "[!a]", "[]^]", "[a-b]", "\\", "[\\a]"])
key_globs = st.lists(parts, min_size=1, max_size=3).map("".join).filter(lambda k: "**" not in k)
paths = st.lists(st.text("ab.]^\\\n", min_size=1, max_size=3) | st.integers(0, 9), max_size=4)


class PatternTest(parameterized.TestCase):
    @given(st.lists(st.just("**") | key_globs, min_size=1, max_size=4), paths, st.booleans())
    def test_glob(self, keys, path, dollar):
        pattern = PathGlob("/".join(keys) + "$" * dollar)
        self.assertEqual(pattern(tuple(path), None), matches(keys, list(map(str, path))))

    def test_globs(self):
        kernel = ("blocks", 3, "up", "kernel")
        for pattern in ["blocks/*/up/kernel", "**/kernel$", "blocks/**/kernel", "blocks/**", "**"]:
            self.assertTrue(PathGlob(pattern)(kernel, None), pattern)
        for pattern in ["blocks/*/kernel", "up/kernel", "*", "blocks/*/up/ke", "**/up"]:
            self.assertFalse(PathGlob(pattern)(kernel, None), pattern)
        self.assertTrue(PathGlob("blocks/**")(("blocks",), None))
        for pattern, path in {
            "cost[$]": ("cost$",),
            "**/b": ("a\n", "b"),
            "[\\a]": ("\\",),
        }.items():
            self.assertTrue(PathGlob(pattern)(path, None), pattern)
        for pattern in ["a[.-0]b", "a[!b]b", "a?b"]:
            self.assertFalse(PathGlob(pattern)(("a", "b"), None))
        self.assertEqual([PathGlob(x)((), None) for x in ["**", "*", "**/*"]], [True, False, False])

    @given(st.sampled_from(["b", "^a", "a$", "a/b", "[ab]+/", r"\d", "", r"^$"]), paths)
    def test_regex(self, pattern, path):
        found = re.search(pattern, "/".join(map(str, path))) is not None
        self.assertIs(PathRegex(pattern)(tuple(path), None), found)
        self.assertIs(PathRegex(re.compile(pattern))(path, None), found)
        path.clear()  # the same list, but another path
        self.assertIs(PathRegex(pattern)(path, None), re.search(pattern, "") is not None)

    def test_bad_patterns(self):
        for pattern in ["", "a//b", "/a", "a/", "$", "a**", "**a/b", "[a", "a[b/[c]", "[z-a]"]:
            with self.assertRaisesRegex(ValueError, "PathGlob"):
                PathGlob(pattern)
        for pattern in ["[]?", "[!]?"]:  # a bracket at the beginning is one of the characters
            with self.assertRaisesRegex(ValueError, "is not closed"):
                PathGlob(pattern)
        for pattern in ["**/kernel$", "(", "a[", "*"]:
            with self.assertRaisesRegex(ValueError, "PathRegex.*PathGlob"):
                PathRegex(pattern)
        for pattern in [3, None, b"a", ("a",), nnx.Param, re.compile(b"a")]:
            for kind in (PathGlob, PathRegex):
                with self.assertRaisesRegex(TypeError, "takes a string"):
                    kind(pattern)

    @parameterized.parameters(PathGlob, PathRegex)
    def test_as_values(self, kind):
        pattern = kind("up/k[a-z]*$")
        self.assertEqual(repr(pattern), f"{kind.__name__}('up/k[a-z]*$')")
        for same in (eval(repr(pattern)), pickle.loads(pickle.dumps(pattern))):
            self.assertEqual((same, hash(same)), (pattern, hash(pattern)))
            self.assertTrue(same(("up", "kernel"), None))
        self.assertNotIn(pattern, [kind("up"), "up/k[a-z]*$"])
        self.assertNotEqual(PathGlob("up"), PathRegex("up"))

    @parameterized.parameters(PathGlob("up/*"), PathRegex("^up/"))
    def test_as_filters(self, up):
        model = MLP()
        self.assertEqual(list(nnx.state(model, up)), ["up"])
        _, ups, rest = nnx.split(model, nnx.All(nnx.Param, up), ...)
        self.assertEqual((list(ups), list(rest)), (["up"], ["down"]))
        self.assertEqual(list(nnx.state(model, nnx.Not(up))), ["down"])
        sharding = StateSharding({nnx.Any(up, nnx.BatchStat): P("model"), ...: P()})
        self.assertEqual(by_name(model, sharding), {"up/kernel": P("model"), "down/kernel": P()})
        self.assertFalse(is_opaque(nnx.All(up, nnx.Not(nnx.Any(up)))))
        self.assertFalse(sharding.depends_on_values)
        self.assertTrue(is_opaque(nnx.Any(up, lambda path, value: True)))


class RulesTest(parameterized.TestCase):
    def test_the_first_match_counts(self):
        rules = [("kernel$", P("data")), (nnx.Param, None), (re.compile("^up"), P("model"))]
        sharding = from_rules(rules, default=P(), on_indivisible="drop")
        self.assertEqual(sharding.find(("up", "kernel"), None), (0, P("data")))
        self.assertEqual(sharding.find(("up", "bias"), nnx.Param(0)), (1, None))
        self.assertEqual(sharding.find(("up", "bias"), None), (2, P("model")))
        self.assertEqual(sharding.find(("mean",), None), (3, P()))
        self.assertEqual(pickle.loads(pickle.dumps(sharding)), sharding)
        self.assertEqual(sharding.on_indivisible, "drop")

    def test_mappings_and_globs(self):
        sharding = from_rules({PathGlob("**/kernel$"): P("data"), nnx.WithTag("x"): P()})
        self.assertEqual(sharding.find(("up", "kernel"), None), (0, P("data")))
        expected = "matches up/bias: Param .*Add one for these.*PathGlob"
        with self.assertRaisesRegex(ValueError, expected):
            sharding.map_prefix(("up", "bias"), nnx.Param(0))

    def test_many_filters_in_a_message(self):
        sharding = StateSharding((nnx.PathContains(str(n)), P()) for n in range(12))
        expected = r"Add one.* are PathContains\('0'.*PathContains\('9', exact=True\), … 2 more\.$"
        with self.assertRaisesRegex(ValueError, expected):
            sharding.map_prefix(("up",), nnx.Param(0))
        state = StateSharding(nnx.State({str(n): P() for n in range(12)}))
        with self.assertRaisesRegex(ValueError, r"Add one.* are Paths\(0, 1, 10, … 9 more\)\.$"):
            state.map_prefix(("up",), nnx.Param(0))

    def test_another_model(self):
        sharding, mesh = replicated(MLP()), mesh24()
        other = nnx.Dict(mlp=MLP(), seen=nnx.Intermediate((jnp.ones(2), jnp.ones((3, 4)))))
        for call in (
            lambda: sharding.map_prefix(("seen",), other.seen),
            lambda: place(nnx.Dict(seen=other.seen), sharding, mesh),
        ):
            with self.assertRaisesRegex(ValueError, "call the strategy again") as caught:
                call()
            text = str(caught.exception)
            assert "seen: Intermediate with arrays of shape (2,), (3, 4)" in text
            assert "override(sharding, {Intermediate: P()})." in text
        self.assertRaisesRegex(
            ValueError, r"for this model\.", place, nnx.Param(0.0), sharding, mesh
        )
        models = nnx.Dict(up=MLP().up, down=MLP().down, seen=other.seen)
        placed = place(models, override(sharding, {nnx.Intermediate: P()}), mesh)
        self.assertEqual(placed.seen.get_value()[0].sharding, NamedSharding(mesh, P()))

    def test_arrays_that_no_filter_matches(self):
        rules, ref = StateSharding({nnx.Param: P()}), jax.new_ref(jnp.ones(2))
        model = nnx.Dict(mask=nnx.data(jnp.ones(())), list=nnx.data([jnp.ones(3)]), ref=ref)
        expected = (
            r"m.list\[0\]: array of shape \(3,\)\n  m.mask: array of shape \(\)\n  m.ref: Ref of"
        )
        inner = jit(lambda m: None, in_shardings=(rules,), mesh=mesh24())
        for fun in (inner, jit(lambda m: inner(m))):
            with self.assertRaisesRegex(ValueError, expected):
                fun(model)

    def test_in_jit(self):
        rules, mesh = from_rules({"up/kernel$": P(None, "model"), "kernel$": P("model")}), mesh24()
        placed = jit(lambda m: m, in_shardings=rules, out_shardings=rules, mesh=mesh)(MLP())
        self.assertEqual(placed.up.kernel.sharding, NamedSharding(mesh, P(None, "model")))
        self.assertEqual(placed.down.kernel.sharding, NamedSharding(mesh, P("model")))

    def test_layers_follow_on_explicit_axes(self):
        """As with a strategy: its activations are neither missing nor lost by ``override``."""
        model, mesh = MLP(), jax.make_mesh((2, 4), ("data", "model"))
        x = jnp.ones((8, model.up.kernel.shape[0]))
        rules = {"up/kernel$": P(None, "model"), "down/kernel$": P("model")}
        gathered = fsdp(model, mesh=mesh, min_size=0)
        for sharding in (
            from_rules(rules, default=P()),
            override(gathered, {"up/bias": P()}),
            override(from_rules(rules, default=P()), {"norm": P()}),
        ):
            forward = jit(lambda m, x: m(x), in_shardings=(sharding, P("data")), mesh=mesh)
            np.testing.assert_allclose(forward(MLP(), x), model(x), rtol=1e-5)
        self.assertEqual(override(gathered, {}).activations, gathered.activations)

    def test_mistakes(self):
        with self.assertRaisesRegex(ValueError, r"(?s)'\(a'.*'b\['"):
            from_rules({"(a": P(), "fine": P(), "b[": P()})
        for rules, text in [
            *((x, "from_rules takes a map") for x in (3, "ab", ["ab"], None, StateSharding({}))),
            ({"up": "data"}, "(?s)up.*'data'.*write P"),
            ({3: P()}, "3 is not an NNX filter"),
        ]:
            with self.assertRaisesRegex(TypeError, text):
                from_rules(rules)

    def test_filters_that_match_nothing(self):
        mesh, glob = mesh24(), r"PathRegex\('blocks/\*/kernel'\).*For globs, pass PathGlob\("
        expected = {"blocks/*/kernel": glob, "up/kernl": "did you mean 'kernel'"}
        for text, hint in expected.items():
            with pytest.warns(UnusedFilterWarning, match=hint):
                place(MLP(), from_rules({text: P()}, default=P()), mesh)
        hint = r"'kernel', for .*a string is a tag here: for paths, write PathRegex\('kernel'\)"
        with pytest.warns(UnusedFilterWarning, match=hint):
            place(MLP(), StateSharding({"kernel": P("data"), ...: P()}), mesh)

    def test_override(self):
        base = StateSharding({nnx.PathContains("up"): P("data"), ...: P()}, on_indivisible="drop")
        new = override(base, {"up/bias": P("model"), nnx.BatchStat: None})
        self.assertEqual(new.find(("up", "bias"), None), (0, P("model")))
        self.assertEqual(new.find(("up", "kernel"), None), (2, P("data")))
        self.assertEqual(new.find(("up", "mean"), nnx.BatchStat(0)), (1, None))
        self.assertEqual(new.on_indivisible, "drop")
        self.assertEqual(override(base, {}), base)
        at_paths = override(from_paths({("up", "kernel"): P("data")}), {PathGlob("up/*"): P()})
        self.assertEqual(at_paths.map_prefix(("up", "kernel"), None), P())
        with self.assertRaisesRegex(TypeError, "override changes"):
            override({...: P()}, {})


class ArraysTest(parameterized.TestCase):
    def test_a_placed_model_and_its_optimizer(self):
        model, mesh = MLP(), mesh24()
        sharded = NamedSharding(mesh, P(None, "model"), memory_kind="device")
        model.up.kernel[...] = jax.device_put(model.up.kernel[...], sharded)
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        own = from_arrays((model, optimizer))
        self.assertEqual(own.map_prefix((0, "up", "kernel"), None), sharded)
        self.assertIsNone(own.map_prefix((0, "down", "kernel"), None))
        moments = own.map_prefix((1, "opt_state", 0, "mu", "up", "kernel"), None)
        self.assertEqual(moments, optimizer.opt_state[0].mu.up.kernel.sharding)
        self.assertEqual(moments.spec, P(None, "model"))
        again = jit(lambda: MLP(), out_shardings=from_arrays(model))()
        self.assertEqual(again.up.kernel.sharding, sharded)

    def test_abstract_and_others(self):
        sharded = NamedSharding(mesh24(), P("data"))
        array = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharded)
        here = jax.device_put(np.zeros(3), jax.devices()[1])
        tree = {"abstract": nnx.Param(array), "bare": array, "committed": nnx.Param(here)}
        tree["same"] = nnx.Param({"a": array, "b": array})
        tree["mixed"] = nnx.Param({"a": array, "b": np.zeros(3)})
        tree |= {"numpy": nnx.Param(np.zeros(3)), "fresh": nnx.Param(jnp.zeros(3))}
        tree["plain"] = jax.ShapeDtypeStruct((8,), jnp.float32)
        want = dict.fromkeys(tree) | dict.fromkeys(["abstract", "bare", "same"], sharded)
        want["committed"] = here.sharding
        self.assertEqual(by_name(tree, from_arrays(tree)), want)
        jax.jit(lambda x: self.assertEqual(by_name(x, from_arrays(x)), {"": None}))(1.0)


class MetadataTest(parameterized.TestCase):
    @given(
        st.permutations(["a", None, None, P.UNCONSTRAINED, ("b", "c"), ("d",)]),
        st.integers(0, 2),
        st.sampled_from([tuple, list, lambda x: P(*x)]),
    )
    def test_names_are_read_as_flax_reads_them(self, names, rank, kind):
        own = annotated(out_sharding=kind(names[:rank]))
        self.assertEqual(spec_from_metadata(own), nnx.get_partition_spec(own).get_raw_value())

    @given(st.permutations(["data", "model", None, P.UNCONSTRAINED, "a", "b", "c"]))
    def test_rules_are_read_as_flax_reads_them(self, names):
        rules = (("a", "x"), ("b", ("y", "z")), ("c", None))
        local = annotated(out_sharding=tuple(names[:2]), sharding_rules=rules)
        plain = annotated(out_sharding=tuple(names[:2]))
        with nnx.logical_axis_rules(rules):
            want = nnx.get_partition_spec(plain).get_raw_value()
            self.assertEqual(spec_from_metadata(plain), want)
            self.assertEqual(nnx.get_partition_spec(local).get_raw_value(), want)
        self.assertEqual(spec_from_metadata(local), want)
        self.assertEqual(spec_from_metadata(plain, LogicalRules(rules)), want)

    def test_a_model_as_flax_reads_it(self):
        def make():
            columns = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
            row = nnx.with_metadata(nnx.initializers.zeros, out_sharding=("model",))
            up = nnx.Linear(4, 8, kernel_init=columns, bias_init=row, rngs=nnx.Rngs(0))
            return nnx.Dict(up=up, rest=Net())

        with nnx.use_eager_sharding(False):
            model = nnx.eval_shape(make)
        theirs = nnx.to_flat_state(nnx.get_partition_spec(nnx.state(model)))
        want = {path: variable.get_raw_value() for path, variable in theirs}
        self.assertEqual(specs_by_path(model, from_metadata(model)), want)
        with jax.set_mesh(mesh24()):
            placed = make()
        self.assertEqual(specs_by_path(placed, from_metadata(placed, mesh=mesh24())), want)

    def test_older_names_and_optimizers(self):
        for key in ("sharding", "sharding_names"):
            with pytest.warns(DeprecationWarning):
                variable = annotated(**{key: ("data", None)})
            self.assertEqual(spec_from_metadata(variable), P("data", None))
            stored = {key: ("data", None)}
            with mock.patch.object(nnx.Param, "get_metadata", lambda self: stored):
                self.assertEqual(spec_from_metadata(annotated()), P("data", None))
        model = nnx.Dict(w=annotated(out_sharding=("data",), optimizer_sharding=(None, "model")))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        table = specs_by_path(optimizer, from_metadata(optimizer))
        self.assertEqual(table["opt_state", 0, "mu", "w"], P(None, "model"))
        self.assertEqual(table["opt_state", 0, "count"], P())

    def test_shardings_and_kinds_of_variables(self):
        sharded = NamedSharding(mesh24(), P("data"))
        tree = {
            "placed": annotated(out_sharding=sharded),
            "hijax": annotated(hijax=True, out_sharding=("a",)),
            "tree": annotated(out_sharding=("a", "b", "c")).replace({"x": np.zeros(3), "y": 1.0}),
            "bare": np.zeros(3),
            "empty": annotated(out_sharding=()),
        }
        want = {"placed": sharded, "hijax": P("a"), "tree": P("a", "b", "c")}
        want |= {"bare": P(), "empty": P()}
        self.assertEqual(by_name(tree, from_metadata(tree)), want)

    def test_rules_meet_axes(self):
        rules = {"embed": "model", "mlp": ("data", "model")}
        for names, want in [
            (("embed", "model"), P(None, "model")),
            ((("embed", "data"), None), P(("model", "data"), None)),
            (("mlp",), P(("data", "model"), None)),
        ]:
            self.assertEqual(spec_from_metadata(annotated(out_sharding=names), rules), want)
        own = annotated(out_sharding=("embed", None), sharding_rules=(("embed", "data"),))
        self.assertEqual(spec_from_metadata(own, rules), P("data", None))
        odd = annotated((6, 8), out_sharding=("embed", "mlp"))
        self.assertEqual(spec_from_metadata(odd, rules, mesh24()), P(None, ("data", "model")))

    def test_all_mistakes_at_once(self):
        model = {
            "letter": annotated(out_sharding="model"),
            "long": annotated(out_sharding=("data", None, None)),
            "number": annotated(out_sharding=(3,)),
            "typo": annotated(out_sharding=("modle", "embde")),
            "twice": annotated(out_sharding=("data", "data")),
            "rules": annotated(out_sharding=("data",), sharding_rules=(("embed", 3),)),
            "fine": annotated(out_sharding=("embed", "model")),
        }
        with self.assertRaises(ValueError) as raised:
            from_metadata(model, {"embed": "data"}, mesh=mesh24())
        lines = {line.split(",")[0].strip(): line for line in str(raised.exception).split("\n")}
        self.assertIn("'model': expected a tuple of names: write P('model')", lines["letter"])
        self.assertIn("3 names for 2 dimensions", lines["long"])
        self.assertIn("3 is not a name", lines["number"])
        self.assertIn(
            "'modle' has no rule and is not an axis of the mesh; did you mean 'model'",
            lines["typo"],
        )
        self.assertIn("did you mean 'embed'?", lines["typo"])
        self.assertIn("'data' shards 2 dimensions", lines["twice"])
        self.assertIn("('embed', 3)", lines["rules"])
        self.assertNotIn("fine", lines)
        with self.assertRaisesRegex(ValueError, "3 names for 2 dimensions"):
            from_metadata(model["long"])


logical_names = st.sampled_from(["a", "b", "c", "d"])
mesh_entries = st.sampled_from(["x", "y", "z", ("x", "y"), ("z",), (), None])
logical_rules = st.lists(st.tuples(logical_names, mesh_entries), max_size=8)


class LogicalRulesTest(parameterized.TestCase):
    @given(logical_rules, st.permutations(["a", "b", "c", "d", None, None, P.UNCONSTRAINED]))
    def test_specs_are_those_of_linen(self, rules, names):
        names = tuple(names[:4])
        ours = LogicalRules(rules)
        # A name without a rule is unsharded there, an error here.
        known = tuple(n if n in ours.names or not isinstance(n, str) else None for n in names)
        self.assertEqual(ours.spec(known), linen.logical_to_mesh_axes(names, rules))
        if known != names:
            with self.assertRaisesRegex(ValueError, "no rule for"):
                ours.spec(names)

    @given(
        logical_rules,
        st.lists(st.one_of(logical_names, st.tuples(logical_names, logical_names)), max_size=3),
        st.lists(st.sampled_from([1, 2, 4, 6, 8, 24]), min_size=3, max_size=3),
    )
    def test_what_is_resolved_for_a_mesh_fits_it(self, rules, names, shape):
        ours = LogicalRules([*rules, *((name, None) for name in "abcd")])
        mesh, shape = mesh_of((2, 4), ("x", "y")), tuple(shape[: len(names)])
        spec = ours.spec(names, shape, mesh)
        NamedSharding(mesh, spec).shard_shape(shape)
        NamedSharding(mesh_of((2, 2, 2), ("x", "y", "z")), ours.spec(names))

    def test_fallbacks(self):
        spec = LogicalRules([("mlp", "model"), ("embed", "model"), ("embed", "data")]).spec
        self.assertEqual(spec(("embed", "mlp")), P("data", "model"))
        self.assertEqual(spec(["embed", "embed", "embed"]), P("model", "data", None))
        self.assertEqual(spec((("embed", "mlp"), None)), P(("data", "model"), None))
        self.assertEqual(spec(P("embed"), (3,)), P("model"))

    def test_mesh_and_shape(self):
        heads = [("h", "tensor"), ("h", "model"), ("h", "data")]
        rules, mesh = LogicalRules([("b", ("pod", "data")), *heads]), mesh24()
        self.assertEqual(rules.spec(("b", "h")), P(("pod", "data"), "tensor"))
        self.assertEqual(rules.spec(("b", "h"), mesh=mesh), P("data", "model"))
        self.assertEqual(rules.spec(("b", "h"), (4, 6), mesh), P("data", None))
        self.assertEqual(rules.spec(("h", None), (6, 2), mesh), P("data", None))
        self.assertEqual(rules.spec(("h", None), (6, 2)), P("tensor", None))
        self.assertEqual(rules.spec((("b", "h"),), (4,), mesh), P("data"))

    def test_mistakes(self):
        rules = LogicalRules({"embed": "data", "mlp": "model"})
        for names, text in [
            (("embde", "vocab"), "'embde'; did you mean 'embed'.*'vocab'.* are 'embed', 'mlp'"),
            ("embed", r"write P\('embed'\)"),
            ((3,), "a name"),
            (None, "expected a tuple"),
        ]:
            with self.assertRaisesRegex(ValueError, text):
                rules.spec(names)
        for shape in [(2,), (2, 2, 2)]:
            with self.assertRaisesRegex(ValueError, f"2 names for {len(shape)} dim"):
                rules.spec(("embed", None), shape)
        text = r"\('a', 3\), \(4, 'x'\), \('b', \('x', 'x'\)\), \('', 'x'\)"
        with self.assertRaisesRegex(ValueError, text):
            LogicalRules([("a", 3), (4, "x"), ("fine", "x"), ("b", ["x", "x"]), ("", "x")])
        for bad in (3, ["ab"], [("a", "b", "c")], None):
            with self.assertRaisesRegex(TypeError, "LogicalRules takes"):
                LogicalRules(bad)

    def test_as_values(self):
        rules = LogicalRules([("a", ["x", "y"]), ("b", None)])
        for same in (eval(repr(rules)), pickle.loads(pickle.dumps(rules))):
            self.assertEqual((same, hash(same)), (rules, hash(rules)))
        self.assertNotEqual(rules, LogicalRules([("b", None), ("a", ("x", "y"))]))
        self.assertEqual(rules.names, ("a", "b"))


class FromLogicalTest(parameterized.TestCase):
    RULES = {"embed": None, "mlp": "model", "batch": "data"}

    def test_names_by_path_come_before_metadata(self):
        model = nnx.Dict(
            up=nnx.Dict(kernel=annotated(out_sharding=("embed", "mlp"))),
            down=nnx.Dict(kernel=annotated(out_sharding=("mlp", "embed")), bias=annotated((8,))),
            head=annotated(out_sharding=("embed", "mlp")),
            placed=annotated(out_sharding=NamedSharding(mesh24(), P("data"))),
        )
        names = {PathGlob("down/*"): ("batch", None), "head": None}
        with self.assertRaisesRegex(ValueError, "down/bias, .*2 names for 1 dimensions"):
            from_logical(model, self.RULES, names)
        names = {"down/kernel": ("batch", None), "head": None}
        want = {"up/kernel": P(None, "model"), "down/kernel": P("data", None), "down/bias": P()}
        want |= {"head": P(), "placed": NamedSharding(mesh24(), P("data"))}
        sharding = from_logical(model, self.RULES, names)
        self.assertEqual(by_name(model, sharding), want)
        self.assertEqual(sharding, from_logical(model, LogicalRules(self.RULES), [*names.items()]))

    def test_an_abstract_model_and_a_mesh(self):
        model = nnx.eval_shape(lambda: MLP(hidden=6))
        names = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
        sharding = from_logical(model, [("mlp", "model"), ("embed", "data")], names, mesh=mesh24())
        want = {"up/kernel": P("data", None), "down/kernel": P(None, "data")}
        self.assertEqual(by_name(model, sharding), want)
        placed = jit(lambda m: m, out_shardings=sharding, mesh=mesh24())(MLP(hidden=6))
        self.assertEqual(placed.up.kernel.sharding.spec, P("data", None))

    def test_all_mistakes_at_once(self):
        with self.assertRaises(ValueError) as raised:
            from_logical(MLP(), self.RULES, {"up": ("embed", "mpl"), "down": ("mlp",)})
        text = str(raised.exception)
        self.assertIn("up/kernel, shape (4, 16), ('embed', 'mpl'): no rule for 'mpl'; d", text)
        self.assertIn("down/kernel, shape (16, 4), ('mlp',): 1 names for 2 dimensions", text)
        self.assertIn("'embed', 'mlp', 'batch'", text)
        with self.assertRaisesRegex(TypeError, "from_logical takes"):
            from_logical(MLP(), self.RULES, "up")

    def test_names_for_nothing(self):
        with pytest.warns(UnusedFilterWarning, match="PathRegex.'upp'"):
            from_logical(MLP(), self.RULES, {"upp": ("embed", "mlp")})
        with pytest.warns(UnusedFilterWarning, match=r"For globs, pass PathGlob\("):
            from_logical(MLP(), self.RULES, {"blocks/*/up": ("embed", "mlp")})
        with self.assertRaisesRegex(StrictError, "upp"):
            from_logical(MLP(), self.RULES, {"upp": (), "up": ("embed", "mlp")}, strict=True)
