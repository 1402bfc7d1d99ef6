"""``shard_map`` over modules: equal to ``jax.shard_map`` over arrays, and updates in place."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import nnx
from jax.sharding import AxisType, NamedSharding

from nnx_sharding import (
    StateSharding,
    accumulate_gradients,
    explain_retraces,
    jit,
    shard_map,
    stack,
    tensor_parallel,
    value_and_grad,
)
from nnx_sharding.experimental import all_to_all_attention, ring_attention
from nnx_sharding.export import export
from nnx_sharding.partition import pipeline
from zoo import (
    MLP,
    Counter,
    P,
    assert_close,
    assert_same,
    assert_same_state,
    mesh_of,
    mlp_specs,
    normal,
)

# A list that a function appends to would be something that it reaches, and that changes.
TRACES = logging.getLogger("traces")
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)


def mesh8(kind="auto"):
    return mesh_of((8,), ("model",), kind)


def megatron(model, x):
    return jax.lax.psum(model(x), "model")


def plain_megatron(state, x):
    hidden = jax.nn.relu(x @ state["up"])
    return jax.lax.psum(hidden @ state["down"], "model")


def state_of(model):
    return {"up": model.up.kernel[...], "down": model.down.kernel[...]}


STATE_SPECS = {"up": P(None, "model"), "down": P("model", None)}


class Attention(nnx.Module):
    def __init__(self, attention):
        function = functools.partial(attention, axis="other")
        self.attention = nnx.MultiHeadAttention(
            4, 16, attention_fn=function, decode=False, rngs=nnx.Rngs(0)
        )

    def __call__(self, x):
        return x + self.attention(x)


def with_inner_map(model, x):
    @shard_map(in_specs=P(), out_specs=P(), axis_names={"other"}, check_vma=False)
    def inner(x):
        return jnp.sin(x)

    return inner(model(x))


def forward(model, x):
    return model(x)


# Models that map over the axis "other" without checking what varies, and how they are called.
MAPPING = {
    "shard_map": (lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(0)), with_inner_map),
    "ring_attention": (lambda: Attention(ring_attention), forward),
    "all_to_all_attention": (lambda: Attention(all_to_all_attention), forward),
    "pipeline": (lambda: stack(nnx.Linear, 4, 16, 16, rngs=nnx.Rngs(0)), forward),
}


class EqualToJaxTest(parameterized.TestCase):
    @parameterized.parameters(True, False)
    def test_megatron(self, jitted):
        mesh, model = mesh8(), MLP()
        ours = shard_map(
            megatron, mesh=mesh, in_specs=(mlp_specs(), P()), out_specs=P(), jit=jitted
        )(model, X)
        theirs = jax.shard_map(
            plain_megatron, mesh=mesh, in_specs=(STATE_SPECS, P()), out_specs=P()
        )
        theirs = (jax.jit(theirs) if jitted else theirs)(state_of(MLP()), X)
        assert_same(self, ours, theirs, rtol=1e-6)
        np.testing.assert_allclose(ours, MLP()(X), rtol=1e-5, atol=1e-6)

    def test_the_function_sees_shards(self):
        shapes = []

        def body(model):
            shapes.append((model.up.kernel.shape, model.down.kernel.shape))

        shard_map(body, mesh=mesh8(), in_specs=(mlp_specs(),), out_specs=P())(MLP())
        self.assertEqual(shapes, [((4, 2), (2, 4))])


class UpdatesTest(parameterized.TestCase):
    def test_statistics_with_pmean(self):
        mesh = mesh_of((8,), ("data",))

        class Stats(nnx.Module):
            def __init__(self):
                self.mean = nnx.BatchStat(jnp.zeros(4))
                self.scale = nnx.Param(jnp.ones(4))

            def __call__(self, x):
                mean = jax.lax.pmean(x.mean(0), "data")
                self.mean[...] = 0.5 * self.mean[...] + 0.5 * mean
                return x * self.scale - self.mean[...]

        model = Stats()
        scale = model.scale.get_raw_value()
        fun = shard_map(
            lambda m, x: m(x), mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
        )
        y = fun(model, X)
        np.testing.assert_allclose(model.mean[...], 0.5 * X.mean(0), atol=1e-6)
        np.testing.assert_allclose(y, X - 0.5 * X.mean(0), atol=1e-6)
        fun(model, X)
        np.testing.assert_allclose(model.mean[...], 0.75 * X.mean(0), atol=1e-6)
        self.assertEqual(model.mean.sharding, NamedSharding(mesh, P()))
        np.testing.assert_array_equal(model.scale[...], np.asarray(scale))

    def test_sharded_parameters(self):
        mesh, model = mesh8(), MLP()

        def body(model):
            model.up.kernel[...] += jax.lax.axis_index("model").astype(jnp.float32)

        self.assertIsNone(shard_map(body, mesh=mesh, in_specs=(mlp_specs(),), out_specs=P())(model))
        expected = MLP().up.kernel[...] + np.repeat(np.arange(8.0), 2)
        np.testing.assert_allclose(model.up.kernel[...], expected, rtol=1e-6)
        self.assertEqual(model.up.kernel.sharding, NamedSharding(mesh, P(None, "model")))
        np.testing.assert_array_equal(model.down.kernel[...], MLP().down.kernel[...])

    def test_static_attribute(self):
        class Flag(nnx.Module):
            def __init__(self):
                self.calls = 0

        def body(flag):
            flag.calls += 1

        flag = Flag()
        fun = shard_map(body, mesh=mesh8(), in_specs=(P(),), out_specs=P())
        fun(flag), fun(flag)
        self.assertEqual(flag.calls, 2)

    def test_added_and_removed_parts(self):
        def body(model):
            model.extra = nnx.Param(model.up.kernel[...] * 2)
            model.layer = nnx.Dict(w=nnx.BatchStat(jnp.ones(())))
            del model.down

        model = MLP()
        spec = StateSharding(  # also decides for the parts that are new
            {
                nnx.PathContains("layer"): P(),
                nnx.PathContains("down"): P("model"),
                ...: P(None, "model"),
            }
        )
        shard_map(body, mesh=mesh8(), in_specs=(spec,), out_specs=P())(model)
        np.testing.assert_allclose(model.extra[...], 2 * MLP().up.kernel[...])
        self.assertFalse(hasattr(model, "down"))
        self.assertEqual(float(model.layer.w[...]), 1.0)
        self.assertEqual(model.extra.sharding.spec, P(None, "model"))
        self.assertEqual(model.layer.w.sharding.spec, P())

    def test_rngs(self):
        """Streams count on, and every device draws the same as without shard_map."""
        mesh, rngs, plain = mesh8(), nnx.Rngs(0), nnx.Rngs(0)
        fun = shard_map(
            lambda r: jax.random.normal(r(), (2,)), mesh=mesh, in_specs=(P(),), out_specs=P()
        )
        for _ in range(2):
            np.testing.assert_allclose(fun(rngs), jax.random.normal(plain(), (2,)), rtol=1e-6)
        self.assertEqual(int(rngs.default.count[...]), 2)

    def test_shared_variables(self):
        model = Counter()

        def body(a, b):
            a.count[...] += 1
            b.count[...] += 10

        shard_map(body, mesh=mesh8(), in_specs=(P(), P()), out_specs=P())(model, model)
        self.assertEqual(int(model.count[...]), 11)

    def test_a_second_call_moves_nothing(self):
        model = MLP()
        x = jax.device_put(X, NamedSharding(mesh8(), P()))
        fun = shard_map(megatron, mesh=mesh8(), in_specs=(mlp_specs(), P()), out_specs=P())
        fun(model, x)
        self.assertEqual(model.up.kernel.sharding, NamedSharding(mesh8(), P(None, "model")))
        before = model.up.kernel.get_raw_value()
        with jax.transfer_guard("disallow"):
            fun(model, x)
        self.assertIs(model.up.kernel.get_raw_value(), before)


class SpecsTest(parameterized.TestCase):
    def test_keyword_arguments(self):
        expected = MLP()(X)
        for specs in ((mlp_specs(), P()), {"model": mlp_specs(), "x": P()}):
            fun = shard_map(megatron, mesh=mesh8(), in_specs=specs, out_specs=P())
            for args, kwargs in (((), {"x": X, "model": MLP()}), ((MLP(),), {"x": X})):
                np.testing.assert_allclose(fun(*args, **kwargs), expected, rtol=1e-5, atol=1e-6)

    def test_keyword_only(self):
        fun = shard_map(
            lambda x, *, scale: x * scale,
            mesh=mesh8(),
            in_specs={"x": P("model"), "scale": P()},
            out_specs=P("model"),
        )
        np.testing.assert_array_equal(fun(np.ones(8), scale=2.0), 2 * np.ones(8))

    @parameterized.product(
        value=(3, 2.5, True, "mode"),
        specs=((P("model"), None), {"x": P("model"), "option": None}),
        by_keyword=(False, True),
    )
    def test_none_for_a_plain_python_value_is_static(self, value, specs, by_keyword):
        seen = []

        def body(x, option):
            seen.append(option)
            return x

        fun = shard_map(body, mesh=mesh8(), in_specs=specs, out_specs=P("model"))
        if by_keyword:
            fun(jnp.ones(8), option=value)
        else:
            fun(jnp.ones(8), value)
        self.assertEqual([(type(s), s) for s in seen], [(type(value), value)])

    def test_none_for_keyword_only_values(self):
        def body(x, *, how, scale, **more):
            TRACES.info("%s %s %s", how, isinstance(scale, jax.core.Tracer), more)
            return x * scale

        specs = {"x": P("model"), "how": None, "more": {"flag": None}}
        fun = shard_map(body, mesh=mesh8(), in_specs=specs, out_specs=P("model"))
        with self.assertLogs(TRACES) as traces:
            for scale in (1.0, 2.0):
                out = fun(jnp.ones(8), how="so", scale=scale, flag=3)
                np.testing.assert_array_equal(out, scale * np.ones(8))
        [record] = traces.records  # what is not mentioned does not retrace
        self.assertEqual(record.getMessage(), "so True {'flag': 3}")

    @parameterized.parameters(
        ({"a": None, "b": P("model")}, {"a": 3, "b": X}),
        ({"a": None, "b": P("model")}, {"a": {"c": "text", "d": [len, None]}, "b": X}),
        ([None, P()], [object(), 2.0]),
        (None, {"a": 3, "b": "text"}),
        (None, jnp.sin),
        ((P(), (None, None)), (1.0, (np.array(["text"]), True))),
    )
    def test_a_nested_none_is_static_as_in_jax(self, spec, value):
        def seen_by(transform):
            seen = []

            def body(x, options):
                parts = jax.tree.leaves(options)
                seen.append([None if isinstance(x, jax.core.Tracer) else x for x in parts])
                return x

            specs = {"in_specs": (P("model"), spec), "out_specs": P("model")}
            transform(body, mesh=mesh8(), **specs)(jnp.ones(8), value)
            return seen

        self.assertEqual(seen_by(shard_map), seen_by(jax.shard_map))

    def test_a_nested_static_value(self):
        model = MLP()
        spec = {"how": None, "by": P(), "model": None}

        @shard_map(mesh=mesh8(), in_specs=(P("model"), spec), out_specs=P("model"))
        def fun(x, options):
            TRACES.info("%s", options["how"][0])
            assert options["model"].up.kernel.shape == (4, 16)
            return x * options["by"] if options["how"] == ["times"] else x + options["by"]

        how = ["times"]
        options = {"how": how, "by": jnp.float32(3), "model": model}
        x = jnp.arange(8.0)
        with self.assertLogs(TRACES) as traces:
            for _ in range(3):
                np.testing.assert_array_equal(fun(x, options), 3 * x)
            how[0] = "plus"
            for _ in range(3):
                np.testing.assert_array_equal(fun(x, options), x + 3)
        self.assertEqual([x.getMessage() for x in traces.records], ["times", "plus"])
        self.assertIn("'times' → 'plus'", str(explain_retraces(fun)))
        compiled = fun.lower(x, options).compile()
        np.testing.assert_array_equal(compiled(x, options), x + 3)
        self.assertLen(jax.tree.leaves(compiled.args_info), 4)
        with self.assertRaisesRegex(TypeError, r"options\['how'\]\[0\]: 'plus' → 'times'"):
            compiled(x, {**options, "how": ["times"]})
        exported = export(fun)(x, options)
        np.testing.assert_array_equal(exported.call(x, {**options, "how": None}).output, x + 3)

    def test_none_for_arrays_and_modules_is_replicated(self):
        model = MLP()
        fun = shard_map(
            lambda m, x: m.up.kernel[...] * x, mesh=mesh8(), in_specs=(None, None), out_specs=P()
        )
        np.testing.assert_allclose(fun(model, jnp.ones(())), MLP().up.kernel[...])
        self.assertEqual(model.up.kernel.sharding, NamedSharding(mesh8(), P()))

    def test_new_modules_as_output(self):
        def body():
            return nnx.Param(jnp.full((2, 3), jax.lax.axis_index("model"), jnp.float32))

        for out_specs in (P("model"), StateSharding({nnx.Param: P("model")})):
            made = shard_map(body, mesh=mesh8(), in_specs=(), out_specs=out_specs)()
            self.assertIsInstance(made, nnx.Param)
            np.testing.assert_array_equal(made[...][:, 0], np.repeat(np.arange(8.0), 2))
            self.assertEqual(made.sharding.spec[0], "model")

    def test_returned_input(self):
        model = MLP()
        out = shard_map(lambda m: m, mesh=mesh8(), in_specs=(mlp_specs(),), out_specs=mlp_specs())(
            model
        )
        self.assertIs(out, model)
        assert_same_state(self, model, MLP())

    def test_named_sharding_as_a_spec(self):
        """As in jax.shard_map, or a clear error: never another meaning."""
        mesh = mesh8()
        fun = shard_map(
            lambda x: x * 2,
            mesh=mesh,
            in_specs=NamedSharding(mesh, P("model")),
            out_specs=P("model"),
        )
        np.testing.assert_array_equal(fun(np.ones(8)), 2 * np.ones(8))

    def test_committed_elsewhere_is_resharded_as_in_jax(self):
        mesh = mesh8()
        x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P(None, "model")))
        ours, theirs = (
            d(lambda x: x * 2, mesh=mesh, in_specs=P("model"), out_specs=P("model"))(x)
            for d in (shard_map, lambda f, **k: jax.jit(jax.shard_map(f, **k)))
        )
        assert_same(self, ours, theirs)
        variable = nnx.Param(x)
        out = shard_map(lambda v: v * 2, mesh=mesh, in_specs=P("model"), out_specs=P("model"))(
            variable
        )
        np.testing.assert_array_equal(out, ours)

    def test_variable_that_does_not_divide(self):
        fun = shard_map(lambda v: None, mesh=mesh8(), in_specs=P("model"), out_specs=P())
        with self.assertRaisesRegex(ValueError, "divi"):
            fun(nnx.Param(jnp.ones(3)))

    def test_bound_method_and_method(self):
        mesh = mesh8()

        class Model(MLP):
            @shard_map(mesh=mesh, in_specs=(mlp_specs(), P()), out_specs=P())
            def mapped(self, x):
                return jax.lax.psum(self(x), "model")

            def body(self, x):
                return jax.lax.psum(self(x), "model") / 8

        model = Model()
        np.testing.assert_allclose(model.mapped(X), MLP()(X), rtol=1e-5, atol=1e-6)
        other = Model()
        fun = shard_map(other.body, mesh=mesh, in_specs=(P(),), out_specs=P(), check_vma=False)
        np.testing.assert_allclose(fun(X), MLP()(X), rtol=1e-5, atol=1e-6)

    def test_decorator_factory(self):
        @shard_map(mesh=mesh8(), in_specs=P("model"), out_specs=P("model"))
        def double(x):
            return 2 * x

        @functools.partial(shard_map, mesh=mesh8(), in_specs=P("model"), out_specs=P("model"))
        def triple(x):
            return 3 * x

        np.testing.assert_array_equal(double(np.ones(8)) + triple(np.ones(8)), 5 * np.ones(8))


class MeshTest(parameterized.TestCase):
    def fun(self, **options):
        return shard_map(megatron, in_specs=(mlp_specs(), P()), out_specs=P(), **options)

    def check(self, fun, context=None):
        model, expected = MLP(), MLP()(X)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the legacy `with mesh:`
            with context or contextlib.nullcontext():
                y = fun(model, X)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)

    def test_set_mesh(self):
        self.check(self.fun(), jax.set_mesh(mesh8()))

    def test_legacy_context(self):
        self.check(self.fun(), mesh8())

    def test_legacy_context_inside_of_jit(self):
        self.check(jit(lambda m, x: self.fun()(m, x)), mesh8())

    def test_the_same_mesh_found_in_another_way(self):
        fun = self.fun()
        for size in (8, 4):
            self.check(fun, jax.set_mesh(mesh_of((size,), ("model",))))
        self.check(jit(lambda m, x: fun(m, x)), mesh8())

    @parameterized.product(kind=["auto", "explicit"], nested=["directly", "in a function"])
    def test_only_the_mesh_knows_the_devices(self, kind, nested):
        mesh, rows = mesh8(kind), NamedSharding(mesh8(kind), P("model"))
        mapped = shard_map(lambda x: x + 1, mesh=mesh, in_specs=P("model"), out_specs=P("model"))
        fun = mapped if nested == "directly" else lambda x: mapped(x)
        x = X if kind == "auto" else jax.device_put(X, rows)  # types have to agree with specs
        out = jit(fun, mesh=mesh)(x)
        np.testing.assert_array_equal(out, X + 1)
        assert out.sharding.is_equivalent_to(rows, 2)

    def test_set_mesh_inside_of_jit(self):
        self.check(jit(lambda m, x: self.fun()(m, x)), jax.set_mesh(mesh8()))

    def test_another_mesh_later(self):
        fun = self.fun()
        for size in (8, 4, 2):
            self.check(fun, jax.set_mesh(mesh_of((size,), ("model",))))

    def test_none_is_a_value_error(self):
        with self.assertRaisesRegex(ValueError, "mesh"):
            self.fun()(MLP(), X)

    def test_abstract_mesh_on_arrays_with_a_mesh(self):
        """JAX takes an AbstractMesh where the arrays, or the context, bring the devices."""
        mesh = mesh8()
        x = jax.device_put(X.reshape(8, 8), NamedSharding(mesh, P("model")))
        ours, theirs = (
            d(lambda x: x * 2, mesh=mesh.abstract_mesh, in_specs=P("model"), out_specs=P("model"))(
                x
            )
            for d in (shard_map, jax.shard_map)
        )
        assert_same(self, ours, theirs)

    def test_abstract_mesh_in_context(self):
        self.check(self.fun(mesh=mesh8().abstract_mesh), jax.set_mesh(mesh8()))

    def test_abstract_mesh_to_lower_for_devices_that_are_not_there(self):
        mesh = jax.sharding.AbstractMesh((64,), ("model",), axis_types=(AxisType.Auto,))
        model = nnx.eval_shape(lambda: MLP(hidden=128))
        fun = self.fun(mesh=mesh)
        x = jax.ShapeDtypeStruct((2, 4), jnp.float32)
        lowered = fun.trace(model, x).lower(lowering_platforms=("tpu",))
        self.assertIn("all_reduce", lowered.as_text())

    @parameterized.parameters("auto", "explicit")
    def test_sub_mesh_types(self, kind):
        mesh = mesh8(kind)
        model = jit(lambda: MLP(), out_shardings=mlp_specs(), mesh=mesh)()
        np.testing.assert_allclose(self.fun(mesh=mesh)(model, X), MLP()(X), rtol=1e-5, atol=1e-6)

    @parameterized.parameters("auto", "explicit")
    def test_fresh_model_on_either_kind_of_mesh(self, kind):
        """Variables that nobody committed are placed as declared, also on Explicit meshes."""
        model = MLP()
        self.fun(mesh=mesh8(kind))(model, X)
        self.assertEqual(model.up.kernel.sharding, NamedSharding(mesh8(kind), P(None, "model")))

    @parameterized.product(
        array=[jnp.asarray, np.asarray], jit=[True, False], axis_names=[frozenset(), {"data"}]
    )
    def test_array_that_is_not_committed_on_an_explicit_mesh(self, array, jit, axis_names):
        mesh = mesh_of((2, 4), ("data", "model"), "explicit")
        options = {"in_specs": P("data"), "out_specs": P("data"), "axis_names": axis_names}

        def body(x):
            return x - jax.lax.pmean(x, "data")

        placed = jax.device_put(X, NamedSharding(mesh, P("data")))
        expected = jax.shard_map(body, mesh=mesh, **options)(placed)
        ours = shard_map(body, mesh=mesh, jit=jit, **options)
        x = array(X)
        assert_same(self, ours(x), expected)
        with jax.set_mesh(mesh):
            assert_same(self, ours(x), expected)
        if not axis_names:  # over some axes only, older releases of JAX reshard
            elsewhere = jax.device_put(X, NamedSharding(mesh, P("model")))
            with self.assertRaisesRegex(ValueError, "specs"):
                ours(elsewhere)

    def test_specs_inferred_on_an_explicit_mesh(self):
        mesh = mesh8("explicit")
        model = jit(lambda: MLP(), out_shardings=mlp_specs(), mesh=mesh)()
        shapes = []

        def body(model):
            shapes.append((model.up.kernel.shape, model.down.kernel.shape))
            return model.up.kernel[...].sum()[None]

        for options, context in (
            ({"mesh": mesh}, contextlib.nullcontext()),
            ({}, jax.set_mesh(mesh)),
        ):
            with context:
                out = shard_map(body, out_specs=P("model"), **options)(model)
            self.assertAlmostEqual(float(out.sum()), float(MLP().up.kernel[...].sum()), places=4)
        self.assertEqual(set(shapes), {((4, 2), (2, 4))})

    def test_inferred_specs_follow_the_arrays(self):
        mesh = mesh8("explicit")
        fun = shard_map(lambda x: jnp.array(x.size), mesh=mesh, out_specs=P())
        for spec, size in ((P("model"), 8), (P(), 64), (P(None, "model"), 8)):
            x = jax.device_put(np.ones((8, 8)), NamedSharding(mesh, spec))
            self.assertEqual(int(fun(x)), size)

    def test_cannot_be_inferred_on_an_auto_mesh(self):
        with self.assertRaises(TypeError):
            shard_map(lambda m: None, mesh=mesh8(), out_specs=P())(MLP())


class OptionsTest(parameterized.TestCase):
    def test_partial_manual(self):
        mesh = mesh_of((2, 4), ("data", "model"))
        shapes = []

        def body(model, x):
            shapes.append((x.shape, model.up.kernel.shape))
            return jax.lax.psum(model(x), "model")

        options = {"in_specs": (mlp_specs(), P()), "out_specs": P()}
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        y = shard_map(body, mesh=mesh, **options, axis_names={"model"})(MLP(), x)
        np.testing.assert_allclose(y, MLP()(X), rtol=1e-5, atol=1e-6)
        self.assertEqual(set(shapes), {((16, 4), (4, 4))})

    def test_partial_manual_update(self):
        mesh = mesh_of((2, 4), ("data", "model"))
        model = MLP()

        def body(model):
            model.up.kernel[...] += jax.lax.axis_index("model")

        shard_map(body, mesh=mesh, in_specs=(mlp_specs(),), out_specs=P(), axis_names={"model"})(
            model
        )
        expected = MLP().up.kernel[...] + np.repeat(np.arange(4.0), 4)
        np.testing.assert_allclose(model.up.kernel[...], expected, rtol=1e-6)

    def test_replication_is_checked(self):
        def body(x):
            return x.sum() * 1.0

        options = {"mesh": mesh8(), "in_specs": P("model"), "out_specs": P()}
        with self.assertRaises(ValueError):
            jax.shard_map(body, **options)(np.ones(8))
        with self.assertRaises(ValueError):
            shard_map(body, **options)(np.ones(8))
        self.assertEqual(float(shard_map(body, **options, check_vma=False)(np.ones(8))), 1.0)

    def test_replication_of_updates_is_checked(self):
        def body(model):
            model.count[...] += jax.lax.axis_index("model")

        options = {"mesh": mesh8(), "in_specs": (P(),), "out_specs": P()}
        model = Counter()
        with self.assertRaises(ValueError):
            shard_map(body, **options)(model)
        self.assertEqual(int(model.count[...]), 0)
        shard_map(body, **options, check_vma=False)(model)

    def test_without_jit_python_runs_every_time(self):
        count = []

        def body(model, x):
            count.append(1)
            model.up.kernel[...] *= 1.5
            return megatron(model, x)

        options = {"mesh": mesh8(), "in_specs": (mlp_specs(), P()), "out_specs": P()}
        one, two = MLP(), MLP()
        eager, compiled = shard_map(body, jit=False, **options), shard_map(body, **options)
        for calls in (1, 2, 3):
            y = eager(one, X)
            self.assertLen(count, calls)
        count.clear()
        for _ in range(3):
            z = compiled(two, X)
        np.testing.assert_allclose(y, z, rtol=1e-5)
        assert_same_state(self, one, two, rtol=1e-6)


class NestingTest(parameterized.TestCase):
    def test_inside_of_jit_inside_of_grad(self):
        mapped = shard_map(megatron, mesh=mesh8(), in_specs=(mlp_specs(), P()), out_specs=P())
        inner = jit(lambda m, x: (mapped(m, x) ** 2).sum())
        ours = nnx.grad(lambda m: inner(m, X))(MLP())
        theirs = nnx.grad(lambda m: (m(X) ** 2).sum())(MLP())
        np.testing.assert_allclose(
            ours["up"]["kernel"][...], theirs["up"]["kernel"][...], rtol=1e-4, atol=1e-5
        )

    @parameterized.parameters("argument", "context")
    def test_over_disjoint_axes(self, where):
        mesh = mesh_of((2, 4), ("data", "model"))
        options = {"mesh": mesh} if where == "argument" else {}

        @shard_map(in_specs=(mlp_specs(), P()), out_specs=P(), axis_names={"model"})
        def inner(model, x):
            return jax.lax.psum(model(x), "model")

        @shard_map(in_specs=(P(), P("data")), out_specs=P("data"), axis_names={"data"}, **options)
        def outer(model, x):
            return inner(model, x)

        context = jax.set_mesh(mesh) if where == "context" else contextlib.nullcontext()
        model, expected = MLP(), MLP()(X)
        with context:
            y = outer(model, X)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)

    @parameterized.product(accumulates=[True, False], check_vma=[True, False])
    def test_gradients_where_other_axes_are_explicit(self, accumulates, check_vma):
        """Modules of a strategy run with Auto axes; the map is over another axis."""
        mesh = mesh_of((2, 4), ("data", "model"), "explicit")
        x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)

        def mean_square(model, x):
            return (model(x) ** 2).mean()

        @shard_map(
            in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}, check_vma=check_vma
        )
        def loss(model, x):
            return jax.lax.pmean(mean_square(model, x), "data")

        gradient = accumulate_gradients(loss, steps=2) if accumulates else value_and_grad(loss)
        model = MLP()
        sharding = tensor_parallel(model, mesh=mesh, axis="model")
        step = jit(lambda *args: gradient(*args), mesh=mesh, in_shardings=(sharding, P("data")))
        found = jax.tree.leaves(step(model, x))
        expected = jax.tree.leaves(nnx.value_and_grad(mean_square)(MLP(), x))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)

    def test_gradients_of_plain_functions_cost_what_they_cost_in_jax(self):
        """Other axes are Explicit, but nothing in the map runs on Auto axes."""
        mesh = mesh_of((2, 4), ("data", "model"), "explicit")
        x = jax.device_put(np.ones((32, 16), np.float32), NamedSharding(mesh, P("data", "model")))

        def of_shards(x):
            return jax.lax.pmean((jnp.tanh(jnp.sin(x) * x) ** 3 * jnp.exp(-x)).mean(), "data")

        flops = []
        for map_over in (jax.shard_map, shard_map):
            loss = map_over(of_shards, in_specs=P("data"), out_specs=P(), axis_names={"data"})
            with jax.set_mesh(mesh):
                compiled = jax.jit(jax.value_and_grad(loss)).lower(x).compile()
            flops.append(compiled.cost_analysis()["flops"])
        assert flops[0] == flops[1]

    @parameterized.product(name=[*MAPPING], kind=["auto", "explicit"])
    def test_within_a_map_that_checks_what_varies(self, name, kind):
        """JAX forgets what varies in a map without check_vma: its gradients would be wrong."""
        mesh = mesh_of((2, 4), ("data", "other"), kind)
        make, call = MAPPING[name]
        model, x = make(), np.asarray(normal(1, 8, 8, 16))
        rows = P("data", "other") if name.endswith("attention") else P("data")
        sharding = (
            pipeline(model, mesh=mesh, axis="other", microbatches=2) if name == "pipeline" else P()
        )

        def mean_square(model, x):
            return (call(model, x) ** 2).mean()

        def gradients(check_vma):
            @shard_map(
                in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}, check_vma=check_vma
            )
            def loss(model, x):
                return jax.lax.pmean(mean_square(model, x), "data")

            gradient = value_and_grad(loss)
            return jit(lambda *a: gradient(*a), mesh=mesh, in_shardings=(sharding, rows))(model, x)

        # The gradient of a ring is a rule of its own, of which JAX compares the types.
        text = "manual axis types" if name == "ring_attention" else "check_vma=False"
        with self.assertRaisesRegex(ValueError, text):
            gradients(check_vma=True)
        if name != "pipeline":  # JAX cannot map over the stages there
            forward_of_rows = shard_map(
                call, in_specs=(P(), P("data")), out_specs=P("data"), axis_names={"data"}
            )
            options = {"mesh": mesh, "in_shardings": (sharding, rows)}
            y = jit(lambda *a: forward_of_rows(*a), **options)(model, x)
            with jax.set_mesh(mesh_of((1, 1), ("data", "other"), kind)):
                expected = jax.device_get(jit(lambda *a: call(*a))(make(), x))
            assert_close(jax.device_get(y), expected, atol=1e-5)
        with jax.set_mesh(mesh_of((1, 1), ("data", "other"), kind)):
            expected = jax.device_get(jit(value_and_grad(mean_square))(make(), np.asarray(x)))
        assert_close(jax.device_get(gradients(check_vma=False)), expected, atol=1e-5)

    def test_update_in_the_inner_one(self):
        mesh = mesh_of((2, 4), ("data", "model"))

        @shard_map(in_specs=(P(),), out_specs=P(), axis_names={"model"})
        def inner(model):
            model.count[...] += jax.lax.psum(1, "model")

        @shard_map(mesh=mesh, in_specs=(P(),), out_specs=P(), axis_names={"data"})
        def outer(model):
            inner(model)
            model.count[...] += 10 * jax.lax.psum(1, "data")

        model = Counter()
        outer(model)
        self.assertEqual(int(model.count[...]), 24)

    def test_jit_inside(self):
        inner = jit(lambda m, x: m(x))
        fun = shard_map(
            lambda m, x: jax.lax.psum(inner(m, x), "model"),
            mesh=mesh8(),
            in_specs=(mlp_specs(), P()),
            out_specs=P(),
        )
        np.testing.assert_allclose(fun(MLP(), X), MLP()(X), rtol=1e-5, atol=1e-6)

    def test_inside_of_scan_and_vmap(self):
        mapped = shard_map(megatron, mesh=mesh8(), in_specs=(mlp_specs(), P()), out_specs=P())
        model = MLP()
        batched = jax.vmap(lambda x: mapped(model, x))(jnp.stack([X, 2 * X]))
        np.testing.assert_allclose(batched[1], MLP()(2 * X), rtol=1e-5, atol=1e-6)
