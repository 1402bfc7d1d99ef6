"""Shardings in ``jit``: how they are written, where arrays end up, and what is moved when."""

from __future__ import annotations

import contextlib
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import parameterized
from flax import nnx
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding

from nnx_sharding import StateSharding, jit, reshard
from nnx_sharding.partition import make_mesh
from zoo import (
    MLP,
    Counter,
    Net,
    P,
    assert_same,
    assert_same_state,
    fails,
    mesh_of,
    mlp_specs,
    pointers,
    values,
)


def mesh8(kind="auto"):
    return mesh_of((8,), ("model",), kind)


def spec_of(x):
    """The spec of an array or Variable, without trailing Nones."""
    parts = list(x.sharding.spec)
    while parts and parts[-1] is None:
        parts.pop()
    return P(*parts)


class MovesTest(parameterized.TestCase):
    """Base of tests that count how often the package moves arrays."""

    def setUp(self):
        super().setUp()
        self.moves = 0
        original = jax.device_put

        def device_put(*args, **kwargs):
            self.moves += 1
            return original(*args, **kwargs)

        jax.device_put = device_put
        self.addCleanup(setattr, jax, "device_put", original)


class WritingTest(parameterized.TestCase):
    """The ways to write ``in_shardings``. All of them say: ``x`` over the axis, ``y`` nowhere."""

    A = staticmethod(lambda: NamedSharding(mesh8(), P("model")))
    R = staticmethod(lambda: NamedSharding(mesh8(), P()))

    def seen(self, fun, *args, **kwargs):
        """The specs of the compiled inputs, by leaf."""
        shardings = fun.lower(*args, **kwargs).compile().input_shardings
        return [getattr(s, "spec", None) for s in jax.tree.leaves(shardings)]

    X = np.arange(8.0, dtype=np.float32)

    @parameterized.named_parameters(
        ("single", lambda a, r: a, [P("model"), P("model")]),
        ("tuple", lambda a, r: (a, r), [P("model"), P()]),
        ("list", lambda a, r: [a, r], [P("model"), P()]),
        ("mapping", lambda a, r: {"y": r, "x": a}, [P("model"), P()]),
    )
    def test_positional(self, specs, expected):
        fun = jit(lambda x, y: x + y, in_shardings=specs(self.A(), self.R()))
        self.assertEqual(self.seen(fun, self.X, self.X), expected)
        np.testing.assert_array_equal(fun(self.X, self.X), 2 * self.X)

    @parameterized.named_parameters(
        ("tuple", lambda a, r: (a, r)),
        ("mapping", lambda a, r: {"x": a, "y": r}),
    )
    def test_passed_by_keyword(self, specs):
        fun = jit(lambda x, y: x + y, in_shardings=specs(self.A(), self.R()))
        for args, kwargs in (
            ((self.X,), {"y": self.X}),
            ((), {"x": self.X, "y": self.X}),
            ((), {"y": self.X, "x": self.X}),
        ):
            self.assertEqual(self.seen(fun, *args, **kwargs), [P("model"), P()])
            np.testing.assert_array_equal(fun(*args, **kwargs), 2 * self.X)

    def test_keyword_only(self):
        fun = jit(lambda x, *, y: x + y, in_shardings={"x": self.R(), "y": self.A()})
        self.assertEqual(self.seen(fun, self.X, y=self.X), [P(), P("model")])

    def test_one_sharding_reaches_keyword_only_arguments_too(self):
        fun = jit(lambda x, *, y: x + y, in_shardings=self.A())
        self.assertEqual(self.seen(fun, self.X, y=self.X), [P("model"), P("model")])

    def test_var_positional(self):
        fun = jit(lambda x, *rest: x + sum(rest), in_shardings={"x": self.R(), "rest": self.A()})
        self.assertEqual(self.seen(fun, self.X, self.X, self.X), [P(), P("model"), P("model")])
        fun = jit(
            lambda x, *rest: x + sum(rest),
            in_shardings={"x": self.R(), "rest": (self.A(), self.R())},
        )
        self.assertEqual(self.seen(fun, self.X, self.X, self.X), [P(), P("model"), P()])
        with self.assertRaisesRegex(ValueError, r"2 entries for 3 arguments in \*rest"):
            fun(self.X, self.X, self.X, self.X)

    def test_var_positional_by_tuple(self):
        fun = jit(lambda *xs: sum(xs), in_shardings=(self.A(), self.R()))
        self.assertEqual(self.seen(fun, self.X, self.X), [P("model"), P()])

    def test_var_keyword(self):
        fun = jit(lambda **kw: kw["a"] + kw["b"], in_shardings={"kw": self.A()})
        self.assertEqual(self.seen(fun, a=self.X, b=self.X), [P("model"), P("model")])
        fun = jit(
            lambda **kw: kw["a"] + kw["b"], in_shardings={"kw": {"a": self.A(), "b": self.R()}}
        )
        self.assertEqual(self.seen(fun, b=self.X, a=self.X), [P("model"), P()])
        fun = jit(lambda **kw: kw["a"] + kw["b"], in_shardings={"a": self.A(), "b": self.R()})
        self.assertEqual(self.seen(fun, b=self.X, a=self.X), [P("model"), P()])

    def test_parameters_left_out_of_a_mapping_stay_as_they_come(self):
        fun = jit(lambda x, y: (x, y), in_shardings={"x": self.A()})
        single = jax.device_put(self.X, NamedSharding(mesh8(), P()))
        x, y = fun(self.X, single)
        self.assertEqual((spec_of(x), spec_of(y)), (P("model"), P()))

    @parameterized.named_parameters(
        ("left_out", lambda a, r: (a, r)),
        ("none", lambda a, r: (a, None, r)),
        ("mapping", lambda a, r: {"x": a, "y": r}),
        ("mapping_none", lambda a, r: {"x": a, "n": None, "y": r}),
    )
    def test_statics_in_the_middle(self, specs):
        for statics in ({"static_argnums": 1}, {"static_argnames": "n"}):
            fun = jit(lambda x, n, y: x * n + y, in_shardings=specs(self.A(), self.R()), **statics)
            self.assertEqual(self.seen(fun, self.X, 2, self.X), [P("model"), P()])
            self.assertEqual(self.seen(fun, self.X, n=2, y=self.X), [P("model"), P()])
            np.testing.assert_array_equal(fun(self.X, 2, self.X), 3 * self.X)

    def test_none_for_a_dynamic_argument_is_no_static(self):
        fun = jit(lambda n, x, y: n * x + y, static_argnums=0, in_shardings=(None, self.A()))
        self.assertEqual(self.seen(fun, 2, self.X, self.X)[1], P("model"))

    def test_prefixes_inside_of_arguments(self):
        fun = jit(
            lambda tree: tree["a"][0] + tree["b"]["c"],
            in_shardings=({"a": self.A(), "b": {"c": self.R()}},),
        )
        tree = {"a": (self.X,), "b": {"c": self.X}}
        self.assertEqual(self.seen(fun, tree), [P("model"), P()])

    @parameterized.named_parameters(
        ("missing", lambda a: (a,)),
        ("extra", lambda a: (a, a, a)),
        ("unknown_name", lambda a: {"z": a}),
        ("wrong_tree", lambda a: ({"k": a}, a)),
    )
    def test_specs_that_do_not_fit(self, specs):
        with self.assertRaises(ValueError):
            jit(lambda x, y: x + y, in_shardings=specs(self.A()))(self.X, self.X)

    def test_unknown_name_names_the_known_ones(self):
        with self.assertRaisesRegex(ValueError, "(?s)'z'.*'x'"):
            jit(lambda x: x, in_shardings={"z": self.A()})(self.X)

    def test_names_inside_of_a_single_dict_argument_are_no_parameters(self):
        """A mapping is by parameter; a dict argument needs its own level."""
        with self.assertRaises(ValueError):
            jit(lambda x: x, in_shardings={"a": self.A()})({"a": self.X})

    def test_bound_method_counts_without_self(self):
        model = Counter()
        fun = jit(model.__call__, in_shardings=(self.A(),))
        self.assertEqual(spec_of(fun(self.X)), P("model"))

    def test_method_in_a_class_counts_self(self):
        a, r = self.A(), self.R()

        class Scale(nnx.Module):
            def __init__(self):
                self.w = nnx.Param(jnp.ones(8))

            @jit(in_shardings=(a, r))
            def __call__(self, x):
                return self.w * x

        model = Scale()
        model(self.X)
        self.assertEqual(spec_of(model.w), P("model"))

    @parameterized.named_parameters(
        ("single", lambda a, r: a, [P("model"), P("model")]),
        ("tuple", lambda a, r: (a, r), [P("model"), P()]),
    )
    def test_out_shardings(self, specs, expected):
        fun = jit(lambda x: (x, x + 1), out_shardings=specs(self.A(), self.R()))
        self.assertEqual([spec_of(x) for x in fun(self.X)], expected)

    def test_out_shardings_of_a_list_and_a_dict(self):
        fun = jit(lambda x: [x, {"b": x}], out_shardings=[self.A(), {"b": self.R()}])
        out = fun(self.X)
        self.assertEqual((spec_of(out[0]), spec_of(out[1]["b"])), (P("model"), P()))

    def test_out_shardings_for_a_dict_output(self):
        fun = jit(lambda x: {"a": x, "b": x}, out_shardings={"a": self.A(), "b": self.R()})
        out = fun(self.X)
        self.assertEqual((spec_of(out["a"]), spec_of(out["b"])), (P("model"), P()))

    def test_same_as_jax(self):
        for in_, out in (
            ((self.A(), self.R()), None),
            (None, self.A()),
            ((self.A(), None), (self.R(), self.A())),
            (self.R(), (None, self.A())),
        ):
            options = {k: v for k, v in (("in_shardings", in_), ("out_shardings", out)) if v}
            ours, theirs = (
                d(lambda x, y: (x + y, x * y), **options)(self.X, self.X) for d in (jit, jax.jit)
            )
            assert_same(self, ours, theirs)


class MeshTest(parameterized.TestCase):
    """Where a ``PartitionSpec`` finds its mesh."""

    def check(self, fun, mesh, context=None):
        model = MLP()
        expected = MLP()(jnp.ones((2, 4)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the legacy `with mesh:`
            with context or contextlib.nullcontext():
                np.testing.assert_allclose(fun(model, np.ones((2, 4))), expected, rtol=1e-5)
        self.assertEqual(model.up.kernel.sharding, NamedSharding(mesh, P(None, "model")))
        self.assertEqual(model.down.kernel.sharding, NamedSharding(mesh, P("model", None)))

    def make(self, **options):
        return jit(lambda m, x: m(x), in_shardings=(mlp_specs(), None), **options)

    def test_argument(self):
        mesh = mesh8()
        self.check(self.make(mesh=mesh), mesh)

    @parameterized.parameters("auto", "explicit")
    def test_set_mesh(self, kind):
        mesh = mesh8(kind)
        fun = jit(lambda m: None, in_shardings=mlp_specs())
        model = MLP()
        with jax.set_mesh(mesh):
            fun(model)
        self.assertEqual(model.up.kernel.sharding, NamedSharding(mesh, P(None, "model")))

    def test_model_made_in_the_context(self):
        mesh = mesh8()
        with jax.set_mesh(mesh):  # a model made in here is committed to the mesh, replicated
            model = MLP()
        jit(lambda m: None, in_shardings=StateSharding({...: P()}), mesh=mesh)(model)
        with jax.set_mesh(mesh):
            y = jit(lambda m, x: m(x), in_shardings=(P(), None))(model, np.ones((2, 4)))
        np.testing.assert_allclose(y, MLP()(jnp.ones((2, 4))), rtol=1e-5)

    def test_legacy_context(self):
        mesh = mesh8()
        self.check(self.make(), mesh, context=mesh)

    def test_argument_wins_over_context(self):
        mesh, other = mesh8(), mesh_of((4,), ("model",))
        self.check(self.make(mesh=mesh), mesh, context=other)

    def test_another_context_gives_another_layout(self):
        fun = jit(lambda m: None, in_shardings=StateSharding({...: P("model")}))
        for size in (8, 4, 8):
            mesh = mesh_of((size,), ("model",))
            variable = nnx.Param(jnp.ones(8))
            with jax.set_mesh(mesh):
                fun(variable)
            self.assertEqual(variable.sharding.num_devices, size)

    @parameterized.parameters("auto", "explicit")
    def test_argument_is_in_context_while_tracing(self, kind):
        mesh, seen = mesh8(kind), []

        @jit(mesh=mesh, in_shardings=P())
        def fun(x):
            seen.append(jax.sharding.get_abstract_mesh())
            return reshard(x, P("model")) if kind == "explicit" else constrained(x, P("model"))

        constrained = jax.lax.with_sharding_constraint
        self.assertEqual(spec_of(fun(jnp.ones(8))), P("model"))
        self.assertEqual(seen, [mesh.abstract_mesh])
        self.assertTrue(jax.sharding.get_abstract_mesh().empty)

    def test_none_is_an_error(self):
        with self.assertRaisesRegex(ValueError, "mesh"):
            self.make()(MLP(), jnp.ones((2, 4)))
        with self.assertRaisesRegex(ValueError, "mesh"):
            jit(lambda x: x, out_shardings=P("model"))(jnp.ones(8))

    def test_no_mesh_is_needed_for_shardings(self):
        sharding = NamedSharding(mesh8(), P())
        model = MLP()
        jit(lambda m: None, in_shardings=StateSharding({...: sharding}))(model)
        self.assertEqual(model.up.kernel.sharding, sharding)

    def test_unknown_axis(self):
        with self.assertRaisesRegex(ValueError, "nowhere"):
            jit(lambda x: x, in_shardings=P("nowhere"), mesh=mesh8())(jnp.ones(8))

    def test_partition_spec_in_context_as_in_jax(self):
        mesh = mesh8()
        with jax.set_mesh(mesh):
            ours, theirs = (
                d(lambda x: x + 1, in_shardings=P("model"), out_shardings=P())(np.ones(8))
                for d in (jit, jax.jit)
            )
        assert_same(self, ours, theirs)

    def test_mixed_mesh(self):
        mesh = mesh_of((4, 2), ("data", "model"), (AxisType.Explicit, AxisType.Auto))
        spec = StateSharding({nnx.PathContains("up"): P("data", None), ...: P("data")})
        model, plain = MLP(), MLP()
        fun = jit(
            lambda m: sum(jnp.sum(v[...] ** 2) for v in (m.up.kernel, m.down.kernel)),
            in_shardings=spec,
            mesh=mesh,
        )
        self.assertAlmostEqual(
            float(fun(model)),
            float(jnp.sum(plain.up.kernel[...] ** 2) + jnp.sum(plain.down.kernel[...] ** 2)),
            places=3,
        )
        self.assertEqual(spec_of(model.up.kernel), P("data"))

    def test_explicit_mesh_as_in_jax(self):
        mesh = mesh_of((4, 2), ("data", "model"), "explicit")
        model = MLP()
        x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data", None)))
        types = []

        def fun(model, x):
            types.append((jax.typeof(model.up.kernel[...]), jax.typeof(x)))
            return x @ model.up.kernel[...]

        with jax.set_mesh(mesh):
            y = jit(fun, in_shardings=(mlp_specs(), P("data")))(model, x)
            plain = jax.jit(jnp.matmul)(x, model.up.kernel[...])
        self.assertEqual([str(t) for t in types[0]], ["float32[4,16@model]", "float32[8@data,4]"])
        self.assertEqual(y.sharding, plain.sharding)
        np.testing.assert_array_equal(y, plain)

    def test_make_mesh_default(self):
        mesh = jax.make_mesh((8,), ("model",))
        model = MLP()
        with jax.set_mesh(mesh):
            jit(lambda m: None, in_shardings=mlp_specs())(model)
        self.assertEqual(model.up.kernel.sharding, NamedSharding(mesh, P(None, "model")))

    @parameterized.parameters(
        # sizes, processes, what makes devices, whether it says how to start processes
        ((16,), 1, "=16, set before JAX starts, makes 16 devices of the CPU.", True),
        ((4, 8), 1, "=32, set before JAX starts, makes 32 devices of the CPU.", True),
        ((-1, 16), 1, "=16, set before JAX starts, makes 16 devices of the CPU.", True),
        ((16,), 2, "=8, set before JAX starts, makes 8 devices of the CPU in each", False),
        ((15,), 2, None, False),  # two processes cannot have as many each
        ((100_000,), 1, None, True),  # more than a machine can have
    )
    def test_make_mesh_says_how_to_get_devices(self, sizes, processes, flag, initialize):
        with (
            mock.patch.object(jax, "process_count", lambda: processes),
            mock.patch.object(jax.distributed, "is_initialized", lambda: processes > 1),
            self.assertRaisesRegex(ValueError, "do not take the 8 devices") as caught,
        ):
            make_mesh(dict(zip("ab", sizes, strict=False)))
        text = str(caught.exception)
        self.assertEqual("XLA_FLAGS" in text, flag is not None)
        if flag is not None:
            self.assertIn(f"--xla_force_host_platform_device_count{flag}", text)
        self.assertEqual("jax.distributed.initialize()" in text, initialize)
        self.assertIn("To compile only, planning_mesh", text)

    @parameterized.parameters(
        ({"a": 4}, {}),  # fewer than there are
        ({"a": -1, "b": 3}, {}),
        ({"a": "16"}, {}),
        ({"a": 16}, {"backend": "gpu"}),
        ({"a": 16}, {"devices": True}),  # the user chose them
    )
    def test_make_mesh_proposes_no_devices(self, axes, options):
        backend = options.get("backend", "cpu")
        devices = jax.devices() if "devices" in options else None
        with (
            mock.patch.object(jax, "default_backend", lambda: backend),
            self.assertRaisesRegex(ValueError, r"or other devices\.$"),
        ):
            make_mesh(axes, devices=devices)


class KindsOfShardingsTest(parameterized.TestCase):
    def test_single_device(self):
        device = jax.devices()[5]
        model = MLP()
        y = jit(
            lambda m, x: m(x),
            in_shardings=SingleDeviceSharding(device),
            out_shardings=SingleDeviceSharding(device),
        )(model, jnp.ones((1, 4)))
        self.assertEqual(y.devices(), {device})
        self.assertEqual(model.up.kernel.devices(), {device})

    @parameterized.parameters("pinned_host", "unpinned_host", "device")
    def test_memory_kinds(self, kind):
        kinds = {m.kind for m in jax.devices()[0].addressable_memories()}
        if kind not in kinds:
            self.skipTest(f"this backend has only {kinds}")
        mesh = mesh8()
        spec = StateSharding(
            {
                nnx.PathContains("up"): NamedSharding(mesh, P(None, "model"), memory_kind=kind),
                ...: NamedSharding(mesh, P()),
            }
        )
        model, plain = MLP(), MLP()

        def step(model):
            kernel = jax.device_put(model.up.kernel[...], jax.memory.Space.Device)
            return kernel.sum()

        total = jit(step, in_shardings=spec)(model)
        self.assertEqual(model.up.kernel.sharding.memory_kind, kind)
        self.assertEqual(model.down.kernel.sharding.memory_kind, "device")
        np.testing.assert_allclose(total, plain.up.kernel[...].sum(), rtol=1e-4)

    @parameterized.parameters("pinned_host", "unpinned_host")
    def test_new_model_in_host_memory(self, kind):
        if kind not in {m.kind for m in jax.devices()[0].addressable_memories()}:
            self.skipTest("this backend has no such memory")
        sharding = NamedSharding(mesh8(), P(None, "model"), memory_kind=kind)
        spec = StateSharding({nnx.PathContains("up"): sharding, ...: None})
        model = jit(lambda: MLP(), out_shardings=spec)()
        self.assertEqual(model.up.kernel.sharding, sharding)
        assert_same_state(self, model, MLP(), rtol=1e-6)

    def test_state_of_specs_in_place_of_state_sharding(self):
        model = MLP()
        specs = jax.tree.map(lambda _: P(None, "model"), nnx.state(model))
        specs["down"]["kernel"] = P("model")
        jit(lambda m, x: None, in_shardings=(specs, None), mesh=mesh8())(model, 1.0)
        self.assertEqual(spec_of(model.up.kernel), P(None, "model"))
        self.assertEqual(spec_of(model.down.kernel), P("model"))

    def test_module_of_specs(self):
        """A spec in the place of each Variable, or of each array in a Variable."""
        for specs in nnx.eval_shape(MLP), MLP():
            if isinstance(specs.up.kernel.get_value(), jax.Array):
                specs = jax.tree.map(lambda _: P(None, "model"), specs)
            else:
                specs.up.kernel = specs.down.kernel = P(None, "model")
            model = MLP(features=16)
            jit(lambda m: None, in_shardings=(specs,), mesh=mesh8())(model)
            self.assertEqual(spec_of(model.up.kernel), P(None, "model"))
            self.assertEqual(spec_of(model.down.kernel), P(None, "model"))

    def test_state_of_specs_for_outputs(self):
        specs = nnx.State({"up": {"kernel": P(None, "model")}, "down": {"kernel": P()}})
        model = jit(lambda: MLP(), out_shardings=specs, mesh=mesh8())()
        self.assertEqual(spec_of(model.up.kernel), P(None, "model"))

    def test_specs_over_a_state_argument(self):
        """An ``nnx.State`` argument is a pytree; a State of specs is its prefix."""
        state = nnx.state(MLP())
        specs = nnx.State({"up": {"kernel": P(None, "model")}, "down": {"kernel": P()}})
        out = jit(lambda s: s, in_shardings=(specs,), out_shardings=specs, mesh=mesh8())(state)
        self.assertEqual(spec_of(out["up"]["kernel"]), P(None, "model"))

    def test_state_sharding_over_a_state_argument(self):
        state = nnx.state(MLP())
        out = jit(lambda s: s, out_shardings=mlp_specs(), mesh=mesh8())(state)
        self.assertEqual(spec_of(out["up"]["kernel"]), P(None, "model"))
        self.assertEqual(spec_of(out["down"]["kernel"]), P("model"))

    def test_state_sharding_over_plain_arrays(self):
        spec = StateSharding({nnx.PathContains("w"): P("model"), ...: P()})
        out = jit(lambda t: t, out_shardings=spec, mesh=mesh8())(
            {"w": jnp.ones(8), "b": jnp.ones(8)}
        )
        self.assertEqual((spec_of(out["w"]), spec_of(out["b"])), (P("model"), P()))

    def test_state_sharding_anywhere_in_a_prefix(self):
        spec = ({"m": [mlp_specs(), P()], "x": None},)
        one, two = MLP(), MLP(nnx.Rngs(1))
        jit(lambda tree: None, in_shardings=spec, mesh=mesh8())({"m": [one, two], "x": 1.0})
        self.assertEqual(spec_of(one.up.kernel), P(None, "model"))
        self.assertEqual(spec_of(two.up.kernel), P())

    def test_bare_variable(self):
        variable = nnx.Param(jnp.ones(8))
        jit(lambda v: None, in_shardings=P("model"), mesh=mesh8())(variable)
        self.assertEqual(spec_of(variable), P("model"))

    def test_none_leaves_a_variable_alone(self):
        spec = StateSharding({nnx.PathContains("up"): P(None, "model"), ...: None})
        model = MLP()
        before = pointers(model.down.kernel.get_raw_value())
        jit(lambda m: None, in_shardings=spec, mesh=mesh8())(model)
        self.assertEqual(pointers(model.down.kernel.get_raw_value()), before)
        self.assertEqual(spec_of(model.up.kernel), P(None, "model"))


class NewModelTest(parameterized.TestCase):
    @parameterized.parameters("auto", "explicit")
    def test_is_created_sharded(self, kind):
        mesh = mesh8(kind)
        make = jit(lambda: MLP(), out_shardings=mlp_specs(), mesh=mesh)
        model = make()
        self.assertEqual(model.up.kernel.sharding, NamedSharding(mesh, P(None, "model")))
        self.assertEqual(
            {s.data.shape for s in model.up.kernel.get_raw_value().addressable_shards}, {(4, 2)}
        )
        assert_same_state(self, model, MLP(), rtol=1e-6)

    def test_new_part_of_an_old_model(self):
        mesh = mesh8()

        def grow(model):
            model.extra = nnx.Param(jnp.ones((8, 8)))
            return model

        spec = StateSharding({nnx.PathContains("extra"): P("model"), ...: P()})
        model = MLP()
        out = jit(grow, out_shardings=spec, mesh=mesh)(model)
        self.assertIs(out, model)
        self.assertEqual(spec_of(model.extra), P("model"))

    def test_returned_input_is_laid_out_as_the_output_says(self):
        mesh = mesh8()
        model = MLP()
        out = jit(lambda m: m, out_shardings=mlp_specs(), mesh=mesh)(model)
        self.assertIs(out, model)
        self.assertEqual(model.up.kernel.sharding, NamedSharding(mesh, P(None, "model")))
        assert_same_state(self, model, MLP(), rtol=0)

    def test_returned_part_of_an_input(self):
        model = MLP()
        layer = jit(lambda m: m.up, out_shardings=P(None, "model"), mesh=mesh8())(model)
        self.assertIs(layer, model.up)
        self.assertEqual(spec_of(model.up.kernel), P(None, "model"))

    def test_in_and_out_of_one_variable_as_flax_wants_them(self):
        """flax.nnx.jit refuses when both disagree; agreeing ones work in both."""
        spec, model = mlp_specs(), MLP()
        out = jit(lambda m: m, in_shardings=spec, out_shardings=spec, mesh=mesh8())(model)
        self.assertIs(out, model)
        self.assertEqual(spec_of(model.up.kernel), P(None, "model"))

    def test_in_and_out_that_disagree(self):
        """Flax: the Variable is one object, so two layouts for it are inconsistent aliasing."""
        model = MLP()
        fun = jit(lambda m: m, in_shardings=mlp_specs(), out_shardings=P(), mesh=mesh8())
        mesh = mesh8()
        with self.assertRaisesRegex(ValueError, "aliasing"):
            nnx.jit(
                lambda m: m,
                in_shardings=NamedSharding(mesh, P("model")),
                out_shardings=NamedSharding(mesh, P()),
            )(nnx.Param(jnp.ones(8)))
        with fails(ValueError, "m.up.kernel", "output.up.kernel"):
            fun(model)


class PlacementTest(MovesTest):
    """After a call the Variables have the declared sharding; the next one moves nothing."""

    def specs(self):
        return StateSharding({nnx.PathContains("kernel"): P(None, "model"), ...: P()})

    def test_variables_stay_placed(self):
        net = Net()
        fun = jit(lambda net: None, in_shardings=self.specs(), mesh=mesh8())
        fun(net)
        self.assertEqual(self.moves, 2)  # parts by way of the host, and whole arrays
        self.assertEqual(spec_of(net.linear.kernel), P(None, "model"))
        self.assertEqual(spec_of(net.norm.mean), P())
        before = pointers(net)
        for _ in range(3):
            fun(net)
        self.assertEqual(self.moves, 2)
        self.assertEqual(pointers(net), before)

    def test_second_call_transfers_nothing(self):
        net, x = Net(), jnp.ones((8, 8))
        sharding = NamedSharding(mesh8(), P("model"))
        fun = jit(lambda net, x: net(x), in_shardings=(self.specs(), sharding), mesh=mesh8())
        x = jax.device_put(x, sharding)
        fun(net, x)
        with jax.transfer_guard("disallow"):
            fun(net, x)

    def test_updated_variables_keep_the_layout(self):
        net = Net()
        x = jnp.ones((8, 8))
        fun = jit(lambda net, x: net(x), in_shardings=(self.specs(), None), mesh=mesh8())
        fun(net, x)
        moves = self.moves
        layouts = {p: v.sharding for p, v in nnx.to_flat_state(nnx.state(net))}
        fun(net, x)
        self.assertEqual(self.moves, moves)
        after = {p: v.sharding for p, v in nnx.to_flat_state(nnx.state(net))}
        self.assertEqual(layouts, after)
        for path, sharding in after.items():
            expected = P(None, "model") if "kernel" in path else P()
            self.assertEqual(sharding, NamedSharding(mesh8(), expected), path)

    def test_unchanged_variables_keep_their_buffers(self):
        model = Counter()
        fun = jit(lambda m, x: m(x))
        fun(model, 1.0)
        before = model.scale.get_raw_value()
        fun(model, 1.0)
        self.assertIs(model.scale.get_raw_value(), before)

    def test_arrays_already_in_place_are_not_touched(self):
        mesh = mesh8()
        model = jit(lambda: MLP(), out_shardings=mlp_specs(), mesh=mesh)()
        before = model.up.kernel.get_raw_value()
        moves = self.moves
        jit(lambda m: None, in_shardings=mlp_specs(), mesh=mesh)(model)
        self.assertEqual(self.moves, moves)
        self.assertIs(model.up.kernel.get_raw_value(), before)

    def test_equivalent_layout_is_not_moved(self):
        """P('model') and P('model', None) are one layout."""
        mesh = mesh8()
        array = jax.device_put(jnp.ones((8, 2)), NamedSharding(mesh, P("model")))
        variable = nnx.Param(array)
        moves = self.moves
        jit(lambda v: None, in_shardings=P("model", None), mesh=mesh)(variable)
        self.assertEqual(self.moves, moves)
        self.assertEqual(pointers(variable.get_raw_value()), pointers(array))

    def test_failing_function_leaves_variables_as_they_were(self):
        model = MLP()
        before = model.up.kernel.get_raw_value()

        def fail(model):
            model.up.kernel[...] = 0.0
            raise RuntimeError("mine")

        with self.assertRaisesRegex(RuntimeError, "mine"):
            jit(fail, in_shardings=mlp_specs(), mesh=mesh8())(model)
        self.assertIs(model.up.kernel.get_raw_value(), before)

    def test_trace_and_lower_place_nothing(self):
        model = MLP()
        before = model.up.kernel.get_raw_value()
        fun = jit(lambda m: None, in_shardings=mlp_specs(), mesh=mesh8())
        fun.trace(model), fun.lower(model).compile(), fun.eval_shape(model)
        self.assertEqual(self.moves, 0)
        self.assertIs(model.up.kernel.get_raw_value(), before)

    def test_numpy_values_are_placed(self):
        variable = nnx.Param(np.arange(8.0, dtype=np.float32))
        fun = jit(lambda v: v[...].sum(), in_shardings=P("model"), mesh=mesh8())
        self.assertEqual(float(fun(variable)), 28.0)
        self.assertEqual(variable.get_raw_value().sharding, NamedSharding(mesh8(), P("model")))

    @parameterized.named_parameters(
        ("module", MLP), ("variable", lambda: nnx.Param(jnp.ones((8, 8))))
    )
    def test_committed_elsewhere_is_an_error_as_in_jax(self, make):
        mesh = mesh8()
        value = make()
        jit(lambda m: None, in_shardings=P(), mesh=mesh)(value)
        with self.assertRaises(ValueError):
            jit(lambda m: None, in_shardings=P(None, "model"), mesh=mesh)(value)

    def test_message_of_committed_elsewhere_names_the_variable(self):
        mesh = mesh8()
        model = MLP()
        jit(lambda m: None, in_shardings=P(), mesh=mesh)(model)
        with self.assertRaisesRegex(ValueError, r"model\.(up|down)\.kernel"):
            jit(lambda model: model(jnp.ones((1, 4))), in_shardings=mlp_specs(), mesh=mesh)(model)

    def test_indivisible_is_an_error_that_names_the_variable(self):
        sharding = NamedSharding(mesh8(), P("model"))
        with self.assertRaises(ValueError):
            jax.jit(lambda weights: weights[0], in_shardings=(sharding,))(jnp.ones(3))
        with self.assertRaisesRegex(
            ValueError, r"weights, shape \(3,\), .*: dimension 0 of size 3"
        ):
            jit(lambda weights: weights[0], in_shardings=(sharding,))(nnx.Param(jnp.ones(3)))

    def test_fewer_dimensions_in_a_later_call(self):
        """JAX raises an IndexError when it compares their sharding with the declared one."""
        variable = nnx.Param(jnp.ones((8, 8)))
        fun = jit(lambda v: v[...].sum(), in_shardings=P(None, "model"), mesh=mesh8())
        fun(variable)
        variable.set_value(jax.device_put(jnp.ones(8), NamedSharding(mesh8(), P("model"))))
        with self.assertRaisesRegex(ValueError, r"v, shape \(8,\), .* 2 entries"):
            fun(variable)

    def test_arguments_that_are_no_variables_are_not_kept(self):
        x = jnp.ones(8)
        before = x.sharding
        jit(lambda x: None, in_shardings=P("model"), mesh=mesh8())(x)
        self.assertEqual(x.sharding, before)


class SharedTest(parameterized.TestCase):
    def test_equal_shardings_for_both_arguments(self):
        model = MLP()
        fun = jit(lambda a, b: None, in_shardings=(mlp_specs(), mlp_specs()), mesh=mesh8())
        fun(model, model)
        self.assertEqual(spec_of(model.up.kernel), P(None, "model"))

    def test_different_shardings_are_an_error_that_names_both(self):
        model = MLP()
        fun = jit(lambda first, second: None, in_shardings=(mlp_specs(), P()), mesh=mesh8())
        with fails(ValueError, "aliasing", "first.up.kernel", "model", "second.up.kernel"):
            fun(model, model)

    def test_as_in_flax(self):
        mesh = mesh8()
        model = MLP()
        specs = (NamedSharding(mesh, P("model")), NamedSharding(mesh, P()))
        for decorator in (nnx.jit, jit):
            with self.assertRaisesRegex(ValueError, "[Ii]nconsistent aliasing"):
                decorator(lambda a, b: None, in_shardings=specs)(model.down, model.down)

    def test_none_takes_the_sharding_of_the_other(self):
        model = MLP()
        for specs in ((mlp_specs(), None), (None, mlp_specs())):
            model = MLP()
            jit(lambda a, b: None, in_shardings=specs, mesh=mesh8())(model, model)
            self.assertEqual(spec_of(model.up.kernel), P(None, "model"))

    def test_shared_inside_of_one_model(self):
        class Tied(nnx.Module):
            def __init__(self):
                self.one = nnx.Param(jnp.ones((8, 8)))
                self.two = self.one

        tied = Tied()
        jit(lambda m: None, in_shardings=StateSharding({...: P("model")}), mesh=mesh8())(tied)
        self.assertIs(tied.one, tied.two)
        self.assertEqual(spec_of(tied.two), P("model"))

    def test_optimizer_and_model_share_variables(self):
        model = MLP()
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
        spec = StateSharding(
            {
                lambda p, v: "up" in p and v.ndim == 2: P(None, "model"),
                lambda p, v: "down" in p and v.ndim == 2: P("model"),
                ...: P(),
            }
        )
        jit(lambda m, o: None, in_shardings=spec, mesh=mesh8())(model, optimizer)
        trace = optimizer.opt_state[0].trace
        self.assertEqual(spec_of(model.up.kernel), P(None, "model"))
        self.assertEqual(spec_of(trace["up"]["kernel"]), P(None, "model"))


class DonationTest(parameterized.TestCase):
    def test_with_shardings(self):
        mesh = mesh8()
        model = jit(lambda: MLP(), out_shardings=mlp_specs(), mesh=mesh)()
        old = model.up.kernel.get_raw_value()
        where = set(pointers(old))

        def step(model):
            model.up.kernel[...] *= 2

        jit(step, in_shardings=mlp_specs(), mesh=mesh, donate_argnums=0)(model)
        self.assertTrue(old.is_deleted())
        self.assertEqual(spec_of(model.up.kernel), P(None, "model"))
        self.assertEqual(set(pointers(model.up.kernel.get_raw_value())), where)

    def test_first_call_that_places_keeps_the_model_usable(self):
        model = MLP()
        expected = values(model)
        fun = jit(lambda m: None, in_shardings=mlp_specs(), mesh=mesh8(), donate_argnums=0)
        fun(model), fun(model)
        for path, value in values(model).items():
            np.testing.assert_array_equal(value, expected[path])

    def test_shared_between_a_donated_and_another_argument(self):
        model = Counter()
        jit(lambda a, b: a(1.0), donate_argnums=0)(model, model)
        self.assertEqual(int(model.count[...]), 1)
        self.assertEqual(float(model.scale[...]), 2.0)

    def test_donated_and_returned(self):
        model = MLP()
        out = jit(lambda m: m, donate_argnums=0)(model)
        self.assertIs(out, model)
        self.assertFalse(model.up.kernel.get_raw_value().is_deleted())
        assert_same_state(self, model, MLP())

    def test_donated_variable_that_is_removed(self):
        model = Counter()

        def fun(model):
            scale = model.scale[...]
            del model.scale
            return scale

        self.assertEqual(float(jit(fun, donate_argnums=0)(model)), 2.0)
        self.assertFalse(hasattr(model, "scale"))
        self.assertEqual(int(model.count[...]), 0)


class TrainingTest(parameterized.TestCase):
    @staticmethod
    def step(model, optimizer, x, y):
        def loss(model):
            return jnp.mean((model(x) - y) ** 2)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    @staticmethod
    def spec():
        return StateSharding(
            {
                lambda p, v: "up" in p and v.ndim == 2: P(None, "model"),
                lambda p, v: "down" in p and v.ndim == 2: P("model", None),
                ...: P(),
            }
        )

    def run_steps(self, step, count=3):
        rng = np.random.default_rng(0)
        model = MLP()
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        losses = []
        for _ in range(count):
            x, y = rng.normal(size=(2, 8, 4)).astype(np.float32)
            losses.append(float(step(model, optimizer, x, y)))
        return losses, model, optimizer

    def test_traces_once(self):
        count = []

        def step(*args):
            count.append(1)
            return self.step(*args)

        mesh = mesh_of((2, 4), ("data", "model"))
        self.run_steps(
            jit(step, in_shardings=(self.spec(), self.spec(), P("data"), P("data")), mesh=mesh)
        )
        self.assertLen(count, 1)
