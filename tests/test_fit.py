"""Specs that do not divide, arrays elsewhere than declared, and what strict transforms refuse."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from draws import specs
from graphs import Memory
from nnx_sharding import StateSharding, jit, place, shard_map
from nnx_sharding.errors import (
    CapturedArrayWarning,
    CorrectedSpecWarning,
    DonatedError,
    ShardingWarning,
    StrictError,
    UnusedFilterWarning,
)
from nnx_sharding.specs.filters import PathGlob, PathRegex
from nnx_sharding.specs.fitting import fit_sharding, possible_corrections
from zoo import MLP, mesh_of, mlp_specs


def mesh24() -> Mesh:
    return mesh_of((2, 4), ("a", "b"))


shapes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 16]), min_size=3, max_size=3).map(tuple)


class FitTest(parameterized.TestCase):
    @given(specs(("a", "b"), 3), shapes)
    def test_problems_are_those_of_jax(self, spec, shape):
        try:
            NamedSharding(mesh24(), spec).shard_shape(shape)
        except ValueError:
            assert fit_sharding(spec, mesh24(), shape).problems
        else:
            assert not fit_sharding(spec, mesh24(), shape).problems

    @given(specs(("a", "b"), 3), shapes, st.sampled_from(["replicate", "drop"]))
    def test_the_part_that_fits(self, spec, shape, how):
        fit = fit_sharding(spec, mesh24(), shape, on_indivisible=how)
        part = fit.sharding
        NamedSharding(mesh24(), part).shard_shape(shape)
        assert not fit.problems and part in [spec, *possible_corrections(spec, how)]
        again = fit_sharding(part, mesh24(), shape, on_indivisible=how)
        assert again.sharding is part and not again.corrections
        assert bool(fit.corrections) == bool(fit_sharding(spec, mesh24(), shape).problems)
        if not fit.corrections:
            assert part is spec
        elif how == "replicate":
            assert part == P()

    @parameterized.parameters(
        (P("a", "b"), (3, 4), P(None, "b")),
        (P(("a", "b")), (6,), P("a")),
        (P(("b", "a")), (6,), P(None)),
        (P(P.UNCONSTRAINED, "b"), (5, 5), P(P.UNCONSTRAINED, None)),
        (P(), (5,), P()),
    )
    def test_dropped(self, spec, shape, expected):
        fit = fit_sharding(spec, mesh24(), shape, on_indivisible="drop")
        self.assertEqual(fit.sharding, expected)
        named = fit_sharding(NamedSharding(mesh24(), spec), None, shape, on_indivisible="drop")
        self.assertEqual(named.sharding, NamedSharding(mesh24(), expected))
        self.assertEqual(named.reasons, fit.reasons)

    def test_axes(self):
        one, two = map(str, fit_sharding(P("aa", ("b", "b")), mesh24()).problems)
        self.assertIn("did you mean 'a'?", one)
        self.assertIn("used 2 times", two)
        self.assertEqual(fit_sharding(P("a", ("b",)), mesh24()).problems, ())
        self.assertIn("'a'", fit_sharding(P("a"), mesh24(), usable={"b"}).reasons)
        fit = fit_sharding(P(P.UNCONSTRAINED), mesh24(), unconstrained=False)
        self.assertIn("is UNCONSTRAINED", fit.reasons)

    def test_other_shardings(self):
        self.assertEqual(fit_sharding(None, mesh24(), (3,)).problems, ())
        self.assertEqual(fit_sharding(P("z"), None, (3,)).problems, ())
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        self.assertIs(fit_sharding(one, None, (3,)).sharding, one)
        fit = fit_sharding(P("a"), mesh24(), (3,))
        line = "  x, shape (3,) (was (4,)), P('a',): dimension 0 of size 3 is not divisible by"
        self.assertStartsWith(fit.line("x", (4,)), line)


class IndivisibleTest(parameterized.TestCase):
    """``on_indivisible=`` on ``jit``, ``shard_map`` and ``StateSharding``."""

    RULES = {nnx.PathContains("up"): P("a", "b"), ...: P()}

    def check(self, fun, model, expected, warns=True):
        x = np.ones((8, 4), np.float32)
        want = model(x)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                np.testing.assert_allclose(fun(model, x), want, rtol=1e-5)
        self.assertEqual(model.up.kernel.sharding.spec, expected)
        found = [str(w.message) for w in seen if w.category is CorrectedSpecWarning]
        self.assertLen(found, 1 if warns else 0)
        if warns:
            self.assertIn("model.up.kernel, shape (4, 6), P('a', 'b') → ", found[0])
            self.assertEqual(seen[0].filename, __file__)

    @parameterized.product(how=["replicate", "drop"], on=["jit", "rules"])
    def test_jit(self, how, on):
        expected = P() if how == "replicate" else P("a", None)
        rules, options = StateSharding(self.RULES), {"on_indivisible": how}
        if on == "rules":
            rules, options = StateSharding(self.RULES, on_indivisible=how), {}
        fun = jit(lambda model, x: model(x), in_shardings=(rules, None), mesh=mesh24(), **options)
        self.check(fun, MLP(hidden=6), expected)
        self.check(fun, MLP(hidden=8), P("a", "b"), warns=False)

    def test_the_rules_come_before_the_transform(self):
        rules = StateSharding(self.RULES, on_indivisible="error")
        fun = jit(lambda m: None, in_shardings=rules, mesh=mesh24(), on_indivisible="drop")
        with self.assertRaisesRegex(ValueError, "m.up.kernel"):
            fun(MLP(hidden=6))

    def test_updates_and_results(self):
        rules = StateSharding(
            {nnx.PathContains("up"): P("a", "b"), ...: P()}, on_indivisible="drop"
        )

        @jit(in_shardings=rules, out_shardings={"y": P("b"), "m": rules}, mesh=mesh24())
        def f(model):
            model.up.kernel[...] += 1
            return {"y": jnp.ones((6, 2)), "m": MLP(hidden=6)}

        model = MLP(hidden=6)
        with (
            pytest.warns(CorrectedSpecWarning),
            self.assertRaisesRegex(ValueError, r"output\['y'\], shape \(6, 2\), P\('b',\)"),
        ):
            f(model)
        g = jit(
            f._fun, in_shardings=rules, out_shardings=rules, mesh=mesh24(), on_indivisible="drop"
        )
        with pytest.warns(CorrectedSpecWarning):
            out = g(model)
        self.assertEqual(model.up.kernel.sharding.spec, P("a", None))
        self.assertEqual(out["m"].up.kernel.sharding.spec, P("a", None))

    def test_outputs_of_the_transform(self):
        f = jit(lambda x: (x[:6], x), out_shardings=P("b"), mesh=mesh24(), on_indivisible="drop")
        with pytest.warns(CorrectedSpecWarning, match=r"output\[0\], shape \(6,\)"):
            short, full = f(jnp.ones(8))
        self.assertEqual((short.sharding.spec, full.sharding.spec), (P(None), P("b")))

    def test_a_shape_that_changes(self):
        rules = StateSharding(self.RULES, on_indivisible="replicate")

        @jit(in_shardings=rules, mesh=mesh24())
        def grow(model, by):
            model.up.kernel.set_value(jnp.ones((4, model.up.kernel.shape[1] + len(by))))

        model = MLP(hidden=8)
        grow(model, np.ones(0))
        self.assertEqual(model.up.kernel.sharding.spec, P("a", "b"))
        with pytest.warns(CorrectedSpecWarning, match=r"\(4, 9\) \(was \(4, 8\)\)"):
            grow(model, np.ones(1))
        self.assertEqual(model.up.kernel.sharding.spec, P())

    def test_shard_map(self):
        seen = []

        def f(model, x):
            seen.append(model.up.kernel.shape)
            return x

        options = {"mesh": mesh24(), "in_specs": (StateSharding(self.RULES), P()), "out_specs": P()}
        with pytest.warns(CorrectedSpecWarning):
            shard_map(f, **options, on_indivisible="drop")(MLP(hidden=6), jnp.ones(3))
        with pytest.warns(CorrectedSpecWarning):
            shard_map(f, **options, on_indivisible="replicate")(MLP(hidden=6), jnp.ones(3))
        self.assertEqual(seen, [(2, 6), (4, 6)])

    def test_strict(self):
        fun = jit(
            lambda m: None,
            in_shardings=StateSharding(self.RULES),
            mesh=mesh24(),
            on_indivisible="drop",
            strict=True,
        )
        model = MLP(hidden=6)
        memory = Memory(model)
        with self.assertRaisesRegex(StrictError, "m.up.kernel"):
            fun(model)
        memory.assert_unchanged()

    @parameterized.parameters("Replicate", None, "keep")
    def test_other_values(self, value):
        with self.assertRaisesRegex(ValueError, "'error', 'replicate', 'drop'"):
            jit(lambda x: x, on_indivisible=value)
        with self.assertRaisesRegex(ValueError, "'error', 'replicate', 'drop'"):
            shard_map(lambda x: x, mesh=mesh24(), out_specs=P(), on_indivisible=value)
        if value is not None:
            with self.assertRaisesRegex(ValueError, "indivisible"):
                StateSharding({...: P()}, on_indivisible=value)

    def test_rules_as_values(self):
        import pickle

        one = StateSharding({...: P()}, on_indivisible="drop")
        self.assertNotEqual(one, StateSharding({...: P()}))
        self.assertEqual(pickle.loads(pickle.dumps(one)), one)
        self.assertIn("on_indivisible='drop'", repr(one))
        self.assertNotEqual(hash(one), hash(StateSharding({...: P()})))


class CommittedTest(parameterized.TestCase):
    def placed(self, mesh):
        model = MLP()
        nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, P())))
        return model

    @parameterized.parameters("jit", "shard_map")
    def test_move(self, transform):
        mesh, other = mesh_of((8,), ("model",)), mesh_of((4,), ("model",))
        x = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(other, P("model")))
        if transform == "jit":
            fun = jit(
                lambda m, x: m(x), in_shardings=(mlp_specs(), P()), mesh=mesh, on_committed="move"
            )
        else:
            options = {"in_specs": (mlp_specs(), P()), "out_specs": P()}
            fun = shard_map(
                lambda m, x: jax.lax.psum(m(x), "model"), mesh=mesh, on_committed="move", **options
            )
        for where in (mesh, other):
            model = self.placed(where)
            for _ in range(2):
                np.testing.assert_allclose(fun(model, x), MLP()(np.ones((8, 4))), rtol=1e-5)
            self.assertEqual(model.up.kernel.sharding, NamedSharding(mesh, P(None, "model")))
        self.assertEqual(x.sharding.device_set, set(other.devices.flat))

    def test_shard_map_without_the_option(self):
        mesh, other = mesh_of((8,), ("model",)), mesh_of((4,), ("model",))
        options = {"in_specs": mlp_specs(), "out_specs": P()}
        f = shard_map(lambda m: None, mesh=mesh, **options)
        f(self.placed(mesh))
        with self.assertRaisesRegex(ValueError, "m.up.kernel, shape .4, 16.: is"):
            f(self.placed(other))
        with self.assertRaisesRegex(
            ValueError, "m.up.kernel, .*: is P.., declared P.None, 'model'."
        ):
            shard_map(lambda m: None, mesh=mesh, on_committed="error", **options)(self.placed(mesh))

    def test_other_values(self):
        with self.assertRaisesRegex(ValueError, "on_committed: expected one of 'error', 'move'"):
            jit(lambda x: x, on_committed="leave")


class StrictTest(parameterized.TestCase):
    def test_a_filter_for_other_arguments_is_legitimate(self):
        rules = StateSharding({nnx.PathContains("up"): P(), nnx.BatchStat: P(), ...: P()})
        fun = jit(lambda m, n: None, in_shardings=(rules, rules), mesh=mesh24(), strict=True)
        fun(MLP(), nnx.Dict(count=nnx.BatchStat(jnp.ones(()))))
        fun(MLP(), MLP())  # it may be meant for arguments of another call

    @parameterized.parameters(
        (PathGlob("**/upp/kernel"), "up"),
        (PathRegex(r"(upp|down)/kernal$"), "up"),
        (nnx.All(nnx.Param, nnx.PathContains("dwon")), "down"),
        (("other", PathRegex("up/kernal")), "kernel"),
    )
    def test_a_filter_with_a_typo(self, filter_, meant):
        rules = StateSharding({filter_: P(), ...: P()})
        with pytest.warns(UnusedFilterWarning, match=f"for m; did you mean '{meant}'"):
            jit(lambda m: None, in_shardings=rules, mesh=mesh24())(MLP())

    @parameterized.parameters(
        (PathRegex(r"layers/\d+/mlp/up/kernel"), "PathRegex('up/kernel')"),
        (PathRegex("^(a/b|[/c])/up/kernel$"), "PathRegex('up/kernel$')"),
        (PathGlob("layers/*/up/*"), "PathGlob('up/*')"),
        (nnx.filterlib.PathIn(("mlp", "up", "kernel")), "PathIn(('up', 'kernel'))"),
        (("tag", PathRegex("mlp/up/kernel")), "PathRegex('up/kernel')"),
    )
    def test_filters_for_a_module_around_the_argument(self, filter_, end):
        rules = StateSharding({filter_: P(), ...: P()})
        with pytest.warns(UnusedFilterWarning) as caught:
            jit(lambda m: None, in_shardings=rules, mesh=mesh24())(MLP())
        self.assertIn(f"paths start at this argument, where {end} would", str(caught[0].message))

    def test_filters_for_another_model(self):
        for patterns in (
            ["encoder/up/kernel", "down/kernel"],  # one of them matches
            ["encoder/attention/kernel", "encoder/kernel"],
            ["^encoder/", "encoder/.*", "encoder/.*kernel", "encoder/[^/]+/kernel$"],
        ):
            rules = StateSharding([*((PathRegex(x), P()) for x in patterns), (..., P())])
            jit(lambda m: None, in_shardings=rules, mesh=mesh24())(MLP())

    def test_a_filter_behind_another(self):
        rules = StateSharding({nnx.Param: P(), nnx.PathContains("up"): P(None, "a"), ...: P()})
        with pytest.warns(UnusedFilterWarning, match=r"PathContains\('up'"):
            jit(lambda m: None, in_shardings=rules, mesh=mesh24())(MLP())

    @parameterized.parameters(
        ({nnx.Param: P(), nnx.PathContains("up"): P(None, "a"), ...: P()}, "PathContains.'up'"),
        ({...: P(), nnx.PathContains("up"): P(None, "a")}, "PathContains.'up'"),
        ({"up/kernel": P(None, "a"), ...: P()}, "a string is a tag here"),
    )
    def test_the_warning_comes_before_the_error_of_a_function_that_fails(self, rules, text):
        def f(model):
            raise ArithmeticError("the function")

        sharding = StateSharding(rules)
        error = self.assertRaisesRegex(ArithmeticError, "the function")
        with pytest.warns(UnusedFilterWarning, match=text) as caught, error:
            jit(f, in_shardings=sharding, mesh=mesh24())(MLP())
        self.assertLen(caught, 1)
        with self.assertRaisesRegex(StrictError, text):
            jit(f, in_shardings=sharding, mesh=mesh24(), strict=True)(MLP())

    def test_a_filter_for_what_the_function_adds(self):
        rules = StateSharding({nnx.BatchStat: P("a"), ...: P()})

        @jit(in_shardings=rules, mesh=mesh24(), strict=True)
        def f(model):
            model.new = nnx.BatchStat(jnp.ones(4))

        model = MLP()
        f(model)
        self.assertEqual(model.new.sharding.spec, P("a"))

    def test_warned_once(self):
        rules = StateSharding({nnx.PathContains("upp"): P("a"), ...: P()})
        fun = jit(lambda m, x: x, in_shardings=(rules, None), mesh=mesh24())
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model = MLP()
            for _ in range(3):
                fun(model, 1.0)
            fun(MLP(), 1.0)
        self.assertLen(seen, 1)
        self.assertEqual(seen[0].filename, __file__)

    @parameterized.parameters(jit, shard_map)
    def test_captured(self, transform):
        model = MLP()
        sharding = NamedSharding(mesh24(), P(None, "b"))
        nnx.update(model, jax.device_put(nnx.state(model), sharding))
        tables = {"one": jax.device_put(jnp.ones((4, 16)), sharding), "two": 3}
        replicated = jax.device_put(jnp.ones(8), NamedSharding(mesh24(), P()))

        def f(x):
            return model(x) @ tables["one"] + replicated.sum()

        options = {"mesh": mesh24(), "in_specs": P(), "out_specs": P()}
        fun = transform(f, **options if transform is shard_map else {})
        x = jnp.ones((2, 4))
        with pytest.warns(CapturedArrayWarning) as seen:
            out = fun(x)
        np.testing.assert_allclose(out, f(x), rtol=1e-5)
        text = str(seen[0].message)
        for name in ("model.up.kernel", "model.down.kernel", "tables.one, float32[4,16], P(None"):
            self.assertIn(name, text)
        self.assertNotIn("replicated", text)

        def g(x):  # another function: warnings come with traces
            return model(x)

        with self.assertRaisesRegex(StrictError, "model.up.kernel"):
            transform(g, **options if transform is shard_map else {}, strict=True)(x)

    def test_a_model_as_the_function_and_in_a_partial(self):
        model = MLP()
        sharding = NamedSharding(mesh24(), P(None, "b"))
        nnx.update(model, jax.device_put(nnx.state(model), sharding))
        x = jnp.ones((2, 4))
        for fun, name in (
            (model, "the MLP.up.kernel"),
            (functools.partial(lambda m, x: m(x), model), "partial.args.0..up.kernel"),
            (functools.partial(lambda x, m: m(x), m=model), "partial.keywords.'m'..up.kernel"),
        ):
            with pytest.warns(CapturedArrayWarning, match=name):
                out = jit(fun)(x)
            np.testing.assert_allclose(out, model(x), rtol=1e-5)

    def test_a_global(self):
        global TABLE
        TABLE = jax.device_put(jnp.ones(8), NamedSharding(mesh24(), P("b")))
        with pytest.warns(CapturedArrayWarning, match="TABLE"):
            jit(lambda x: [x + y for y in [TABLE.sum()]])(1.0)

    def test_donated(self):
        def f(a, b):
            return a + 1, b.sum()

        a, b = jnp.ones(4), jnp.ones((3, 2))
        strict = jit(f, donate_argnums=(0, 1), strict=True)
        for call in (strict, strict.lower):
            with self.assertRaisesRegex(StrictError, r"  b, float32\[3,2\]") as raised:
                call(a, b)
            self.assertNotIn("  a,", str(raised.exception))
        self.assertFalse(a.is_deleted() or b.is_deleted())
        half, short = (jnp.ones((3, 2), dtype) for dtype in (jnp.float16, jnp.bfloat16))
        with self.assertRaisesRegex(StrictError, r"  b, bfloat16\[3,2\]") as raised:
            strict(half, short)  # the name of one type ends in that of the other
        self.assertNotIn("  a,", str(raised.exception))
        fine = jit(f, donate_argnums=0, strict=True)
        fine(a, b)
        self.assertTrue(a.is_deleted())

    def test_nothing_to_warn_of(self):
        model, x = MLP(), jnp.ones((8, 4))
        with warnings.catch_warnings():
            warnings.simplefilter("error", ShardingWarning)
            for strict in (False, True):
                specs = {"in_shardings": (mlp_specs("b"), None), "mesh": mesh24()}
                jit(lambda m, x: m(x), strict=strict, **specs)(model, x)


class ExplainedTest(parameterized.TestCase):
    """Errors that JAX raises after a call got through the checks."""

    def test_another_shape_at_a_later_call(self):
        fun = jit(lambda m, x: m(x), in_shardings=(mlp_specs("b"), P("a")), mesh=mesh24())
        model = MLP()
        fun(model, np.ones((8, 4)))
        memory = Memory(model)
        for call in (fun, fun.trace, fun.lower, fun.eval_shape):
            with self.assertRaisesRegex(ValueError, r"x, shape \(7, 4\), P\('a',\)"):
                call(model, np.ones((7, 4)))
        memory.assert_unchanged()
        fun(model, np.ones((6, 4)))

    def test_errors_of_the_user_stay(self):
        class Own(ValueError):
            pass

        for error in (Own("mine"), RuntimeError("mesh"), NotImplementedError("mesh")):

            def fail(x, error=error):
                raise error

            with self.assertRaises(type(error)) as raised:
                jit(fail)(jnp.ones(3))
            self.assertIs(raised.exception, error)
            self.assertEqual(str(error), error.args[0])

    def test_deleted(self):
        model = MLP()
        model.up.kernel[...].delete()
        for error in (RuntimeError, ValueError, DonatedError):
            with self.assertRaisesRegex(error, r"model\.up\.kernel, float32\[4,16\]"):
                jit(lambda model: model.up.kernel + 1)(model)

    def test_one_array_donated_in_two_variables(self):
        x = jnp.ones(4)
        a, b = nnx.Param(x), nnx.Param(x)

        def f(a, b):
            a[...] += 1
            b[...] += 1

        with self.assertRaisesRegex(DonatedError, r"float32\[4\]: a, b"):
            jit(f, donate_argnums=(0, 1))(a, b)

    def test_a_model_and_its_copy_donated(self):
        models = nnx.List([MLP() for _ in range(6)])
        step = jit(lambda a, b: None, donate_argnums=(0, 1))
        with self.assertRaisesRegex(DonatedError, r"b\[5\].up.kernel\nPass each once") as caught:
            step(models, nnx.clone(models))
        self.assertLess(len(str(caught.exception).splitlines()), 25)
        self.assertIn("place(model, None, copy=True)", str(caught.exception))
        step(models, place(models, None, copy=True))

    def test_stages_with_another_sharding(self):
        mesh = mesh24()
        x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("a")))
        compiled = jit(lambda m, x: m(x), in_shardings=(P(), P("a")), mesh=mesh).lower(MLP(), x)
        other = jax.device_put(x, NamedSharding(mesh, P("b")))
        with self.assertRaisesRegex(ValueError, r"x, shape .*: is P\('b',\), declared P\('a',\)"):
            compiled.compile()(MLP(), other)

    def test_a_spec_of_another_mesh(self):
        options = {"mesh": mesh24(), "out_specs": P()}
        specs = [NamedSharding(mesh_of((8,), (name,)), P(name)) for name in ("a", "c")]
        with self.assertRaisesRegex(ValueError, r"(?s)P\('a',\) for x: .*another mesh.* for y: "):
            shard_map(lambda x, y: x, in_specs=tuple(specs), **options)(jnp.ones(8), jnp.ones(8))
        same = NamedSharding(mesh24(), P("a"))
        shard_map(lambda x: x.sum(), in_specs=same, mesh=mesh24(), out_specs=P(), check_vma=False)

    def test_a_mapped_function_over_some_axes(self):
        options = {"mesh": mesh24(), "axis_names": {"b"}, "out_specs": P()}
        fun = shard_map(lambda x: x, in_specs=P("a"), **options)
        with self.assertRaisesRegex(ValueError, "P.'a',. for x.*'a', which stays automatic"):
            fun(jnp.ones(8))

    @parameterized.product(on_committed=("error", "move"), has_mesh=(True, False))
    def test_what_is_committed_over_other_axes_keeps_its_sharding(self, on_committed, has_mesh):
        options = {"mesh": mesh24()} if has_mesh else {}
        options |= {"axis_names": {"b"}, "in_specs": P("b"), "out_specs": P("b")}
        fun = shard_map(lambda x: x, on_committed=on_committed, **options)
        error = f"'{on_committed}' needs .* leaves out 'a', over"
        with jax.set_mesh(mesh24()), self.assertRaisesRegex(ValueError, error):
            fun(jnp.ones(8))

    @parameterized.parameters(("psum", "b"), ("pmean", "b"), ("all_gather", "b"))
    def test_the_remedy_works(self, name, axis):
        def f(x):
            y = jax.lax.pvary(x.sum(), ()) if hasattr(jax.lax, "pvary") else x.sum()
            if name == "all_gather":
                return jax.lax.all_gather(y, axis)
            return getattr(jax.lax, name)(y, axis)

        options = {"mesh": mesh24(), "in_specs": P(axis)}
        shard_map(f, out_specs=P(axis) if name == "all_gather" else P(), **options)(jnp.ones(8))
        with self.assertRaisesRegex(ValueError, "varies along 'b'"):
            shard_map(lambda x: x.sum(), out_specs=P(), **options)(jnp.ones(8))
        unchecked = shard_map(lambda x: x, out_specs=P(), check_vma=False, **options)
        self.assertEqual(unchecked(jnp.ones(8)).shape, (2,))
