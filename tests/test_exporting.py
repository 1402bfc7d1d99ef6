"""Exported functions: a loaded program returns what the function itself returns."""

from __future__ import annotations

import collections
import hashlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import AbstractMesh

from nnx_sharding import StateSharding, errors, export, jit, shard_map
from zoo import MLP, Counter, Net, P, assert_same_state, fails, mesh_of, mlp_specs, numbers

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)

Pair = collections.namedtuple("Pair", "first second")


def apply(model, x):
    return model(x)


def forward():
    """A sharded forward pass, small and the same every time."""
    mesh = mesh_of((2, 4), ("data", "model"))
    return jit(apply, in_shardings=(mlp_specs(), P("data")), mesh=mesh)


class Case(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.path = self.folder / "function.zip"

    def through_file(self, exported):
        exported.save(self.path)
        loaded = export.load(self.path)
        self.assertEqual(loaded.manifest, exported.manifest)
        return loaded

    def export(self, fun, *args, platforms=None, **kwargs):
        return self.through_file(export.export(fun, platforms=platforms)(*args, **kwargs))


def by_path(state):
    """The numbers in a State of Variables or arrays."""
    flat = nnx.to_flat_state(state)
    return {p: numbers(v.get_raw_value() if isinstance(v, nnx.Variable) else v) for p, v in flat}


class RoundTripTest(Case):
    def test_sharded_forward(self):
        model = MLP()
        loaded = self.export(forward(), model, X)
        output, updates = loaded.call(nnx.state(model), X)
        expected = forward()(model, X)
        np.testing.assert_allclose(output, expected, rtol=1e-6)
        self.assertEqual(output.sharding.device_set, expected.sharding.device_set)
        self.assertEqual(updates, {})

    def test_training(self):
        """Updates are fed back for three steps, next to the function itself."""

        def step(model, optimizer, x):
            loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
            optimizer.update(model, grads)
            return loss

        def start():
            model = Net(nnx.Rngs(0), features=4)
            return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        model, optimizer = start()
        states = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
        loaded = self.export(jit(step), *start(), X)
        for _ in range(3):
            loss, updates = loaded.call(**states, x=X)
            states = {name: nnx.merge_state(state, updates[name]) for name, state in states.items()}
            np.testing.assert_allclose(loss, nnx.jit(step)(model, optimizer, X), rtol=1e-5)
        for name, module in (("model", model), ("optimizer", optimizer)):
            found, expected = by_path(states[name]), by_path(nnx.state(module))
            self.assertEqual(list(found), list(expected))
            for path, value in expected.items():
                np.testing.assert_allclose(found[path], value, rtol=1e-4, err_msg=str(path))
        nnx.update(model, updates["model"])
        self.assertEqual(int(model.dropout.rngs.count[...]), 3)

    def test_forms(self):
        """Arrays can be passed in several forms; updates have the same form."""
        model = Counter(3)
        exported = export.export(jit(apply))(model, 1.0)
        arrays = {"count": jnp.array(3), "scale": np.float32(2.0)}
        forms = {
            "module": (model, nnx.State),
            "State": (nnx.state(model), nnx.State),
            "dict": (arrays, dict),
            "tuples": ({(name,): array for name, array in arrays.items()}, dict),
        }
        for name, (given, kind) in forms.items():
            output, updates = exported.call(given, 1.0)
            self.assertEqual((float(output), type(updates["model"])), (6.0, kind), name)
            key = ("count",) if name == "tuples" else "count"
            self.assertEqual(list(updates["model"]), [key])
            self.assertEqual(int(updates["model"][key]), 4)
        self.assertEqual(int(model.count[...]), 3)

    def test_forms_with_depth(self):
        def bump(model):
            model["blocks"][1].count[...] += 1

        model = nnx.Dict(blocks=nnx.List([Counter(), Counter()]))
        exported = export.export(jit(bump))(model)
        flat = nnx.to_flat_state(nnx.state(model))
        texts = {"/".join(map(str, path)): v.get_raw_value() for path, v in flat}
        np.savez(self.folder / "weights.npz", **texts)
        for given in (texts, np.load(self.folder / "weights.npz")):
            updates = exported.call(given).updates["model"]
            self.assertEqual({key: int(v) for key, v in updates.items()}, {"blocks/1/count": 1})
        nested = exported.call(nnx.to_pure_dict(nnx.state(model))).updates["model"]
        self.assertEqual(jax.tree.map(int, nested), {"blocks": {1: {"count": 1}}})

    def test_results(self):
        """Plain containers keep their type; modules are States, other classes dicts."""

        def many(x):
            model = nnx.Dict(a=nnx.Param(x), b=nnx.List([nnx.Param(x + 1)]))
            return {
                "model": model,
                "tuple": (x, [None, x + 2], ()),
                "pair": Pair(x + 3, {2: x + 4}),
                "variable": nnx.Param(x + 5),
                "state": nnx.State({"s": {"t": x + 6}}),
                "empty": nnx.Dict(),
            }

        output = self.export(jit(many), 0.0).call(0.0).output
        expected = {
            "model": nnx.State({"a": 0, "b": {0: 1}}),
            "tuple": (0, [None, 2], ()),
            "pair": {"first": 3, "second": {2: 4}},
            "variable": 5,
            "state": nnx.State({"s": {"t": 6}}),
            "empty": nnx.State({}),
        }
        self.assertEqual(jax.tree.map(int, output), expected)

    def test_arguments_of_other_classes(self):
        exported = self.export(jit(lambda pair: pair.first - pair.second["x"]), Pair(1, {"x": 2}))
        self.assertEqual(int(exported.call(Pair(5, {"x": 3})).output), 2)
        self.assertEqual(int(exported.call({"first": 5, "second": {"x": 3}}).output), 2)

    def test_dtypes(self):
        names = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "bool", "complex64")
        arrays = {name: jnp.arange(4).astype(name) for name in names}
        key = jax.random.key(7)
        fun = jit(lambda arrays, key: (arrays, jax.random.split(key), jax.random.bits(key)))
        output = self.export(fun, arrays, key).call(arrays, key).output
        for ours, theirs in zip(*map(jax.tree.leaves, (output, fun(arrays, key))), strict=True):
            self.assertEqual(jax.typeof(ours), jax.typeof(theirs))
            np.testing.assert_array_equal(numbers(ours), numbers(theirs))

    def test_dtype_that_cannot_be_saved(self):
        exported = export.export(jit(lambda x: x))(jnp.zeros(4, "int2"))
        with self.assertRaisesRegex(ValueError, r"(?s)<lambda> cannot be saved.*int2"):
            exported.save(self.path)
        self.assertFalse(self.path.exists())

    def test_static_arguments_keywords_and_methods(self):
        class Model(MLP):
            @jit(static_argnames=("activation", "times"))
            def run(self, x, activation, *, times=1, shift):
                return activation(self(x)) * times + shift

        model = Model()
        loaded = self.export(model.run, X, jnp.tanh, times=3, shift=1.0)
        output = loaded.call(nnx.state(model), X, shift=1.0).output
        np.testing.assert_allclose(output, model.run(X, jnp.tanh, times=3, shift=1.0), rtol=1e-6)
        self.assertEqual(loaded.manifest.static, {"activation": "tanh", "times": "3"})
        arguments = [(a.name, a.keyword) for a in loaded.manifest.arguments]
        self.assertEqual(arguments, [("self", False), ("x", False), ("shift", True)])

    def test_shard_map(self):
        mesh = mesh_of((8,), ("data",))
        fun = shard_map(
            lambda model, x: jax.lax.psum(model(x).sum(), "data"),
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P(),
        )
        model = MLP()
        loaded = self.export(fun, model, X)
        np.testing.assert_allclose(loaded.call(model, X).output, fun(model, X), rtol=1e-5)
        self.assertEqual(loaded.manifest.transform, "shard_map")

    def test_explicit_mesh(self):
        mesh = mesh_of((2, 4), ("data", "model"), "explicit")
        with jax.set_mesh(mesh):
            kernel = jax.device_put(jnp.ones((4, 8)), P(None, "model"))
            model = nnx.Dict(kernel=nnx.Param(kernel))
            x = jax.device_put(X, P("data"))
            fun = jit(lambda model, x: x @ model["kernel"])
            loaded = self.export(fun, model, x)
            expected = fun(model, x)
        output = loaded.call({"kernel": np.ones((4, 8), np.float32)}, X).output
        self.assertEqual(jax.typeof(output), jax.typeof(expected))
        np.testing.assert_allclose(output, expected, rtol=1e-6)
        kinds = loaded.manifest.meshes[0].axis_types
        self.assertEqual(kinds, dict.fromkeys(("data", "model"), "Explicit"))

    def test_mesh_in_context_selects_the_devices(self):
        loaded = self.export(forward(), MLP(), X)
        devices = jax.devices()[::-1]
        with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), devices=devices)):
            output = loaded.call(MLP(), X).output
        self.assertEqual(list(output.sharding.mesh.devices.flat), devices)
        np.testing.assert_allclose(output, forward()(MLP(), X), rtol=1e-6)

    def test_no_declared_sharding_but_a_mesh_inside(self):
        mesh = mesh_of((8,), ("data",))
        inner = jax.shard_map(
            lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
        )
        loaded = self.export(jit(lambda x: inner(x)), X)
        np.testing.assert_allclose(loaded.call(X).output, X.sum(0, keepdims=True), rtol=1e-6)

    def test_no_arguments(self):
        columns = StateSharding({nnx.PathContains("up"): P(None, "model"), ...: P()})
        init = jit(MLP, out_shardings=columns, mesh=mesh_of((8,), ("model",)))
        output = self.export(init).call().output
        self.assertEqual(output["up"]["kernel"].sharding.spec, P(None, "model"))
        expected = by_path(nnx.state(MLP()))
        for path, value in by_path(output).items():
            np.testing.assert_allclose(value, expected[path], rtol=1e-6)

    def test_donation(self):
        def step(model, x):
            model.count[...] += 1
            return x

        loaded = self.export(jit(step, donate_argnames="model"), Counter(), 1.0)
        model = Counter()
        updates = loaded.call(nnx.state(model), 1.0).updates["model"]
        self.assertTrue(model.scale[...].is_deleted())
        self.assertEqual(by_path(updates), {("count",): 1, ("scale",): 2.0})

    @parameterized.named_parameters(
        ("in one module", lambda m: exchange(m, m, "a", "b"), {"a": 2, "b": 1}),
        ("among modules", lambda m: exchange(m, m.inner, "a", "c"), {"a": 3, "inner/c": 1}),
        ("with a change", lambda m: exchange(m, m, "a", "b", by=1), {"a": 3, "b": 1}),
    )
    def test_exchanged_variables(self, change, expected):
        def fun(model):
            change(model)

        inner = nnx.Dict(c=nnx.Param(jnp.array(3.0)))
        model = nnx.Dict(a=nnx.Param(jnp.array(1.0)), b=nnx.Param(jnp.array(2.0)), inner=inner)
        updates = self.export(jit(fun), model).call(nnx.state(model)).updates["model"]
        found = {"/".join(path): value for path, value in by_path(updates).items()}
        self.assertEqual(found, expected)
        fun(model)
        nnx.update(model, updates)  # which changes nothing
        for name, value in expected.items():
            path = tuple(name.split("/"))
            self.assertEqual(by_path(nnx.state(model))[path], value)

    @parameterized.parameters({"graph": False}, {"graph_updates": False})
    def test_modes(self, **modes):
        loaded = self.export(jit(apply, **modes), Counter(), 1.0)
        self.assertEqual(by_path(loaded.call(Counter(), 1.0).updates["model"]), {("count",): 1})

    def test_shared_variables_are_passed_once(self):
        def both(a, b):
            b.count[...] += 1
            return a.count[...] * 10

        a, b = Counter(), nnx.Dict()
        b.count, b.own = a.count, nnx.Param(jnp.array(5.0))
        loaded = self.export(jit(lambda a, b: both(a, b)), a, b)
        output, updates = loaded.call(Counter(2), {"own": 1.0})
        self.assertEqual(int(output), 30)
        self.assertEqual(jax.tree.map(int, updates["b"]), {"count": 3})
        loaded.call(nnx.state(a), nnx.state(b))
        with self.assertRaisesRegex(TypeError, "(?s)once.*b.count: is a.count, passed as another"):
            loaded.call(Counter(2), {"own": 1.0, "count": np.array(2)})

    def test_added_variables_and_arrays(self):
        def extend(model):
            model.cache = nnx.Dict(
                seen=nnx.Variable(model.count[...] + 1), pair=nnx.data((jnp.ones(2),))
            )
            model.total = jnp.zeros(3)

        updates = self.export(jit(extend), Counter()).call(Counter()).updates["model"]
        shapes = {path: value.shape for path, value in by_path(updates).items()}
        expected = {("cache", "seen"): (), ("cache", "pair", 0): (2,), ("total",): (3,)}
        self.assertEqual(shapes, expected)

    def test_variable_that_holds_a_pytree(self):
        def bump(model):
            model.pair.set_raw_value(jax.tree.map(lambda x: x + 1, model.pair.get_raw_value()))
            return model.pair

        def model():
            return nnx.Dict(pair=nnx.Variable({"a": jnp.array(1), "b": (jnp.array(2),)}))

        output, updates = self.export(jit(bump), model()).call({"pair": {"a": 5, "b": [6]}})
        self.assertEqual(jax.tree.map(int, output), {"a": 6, "b": (7,)})
        self.assertEqual(jax.tree.map(int, updates["model"]), {"pair": {"a": 6, "b": {0: 7}}})
        given = self.export(jit(bump), model()).call(model())
        self.assertEqual(jax.tree.map(int, given.output), {"a": 2, "b": (3,)})

    def test_names_of_any_characters(self):
        names = ("a/b", "..", "../../x", "'\"", "\n\t", "", "名", "\u2028", "a.b[0]", "<script>")
        model = nnx.Dict()
        for position, name in enumerate(names):
            setattr(model, name, nnx.Param(jnp.array(position)))
        fun = jit(lambda model: {name: value[...] for name, value in vars_of(model).items()})
        loaded = self.export(fun, model)
        output = loaded.call({name: 10 + i for i, name in enumerate(names)}).output
        self.assertEqual(
            {k: int(v) for k, v in output.items()}, {name: 10 + i for i, name in enumerate(names)}
        )
        self.assertEqual([p.name for p in self.folder.iterdir()], [self.path.name])

    def test_symbolic_sizes(self):
        (batch,) = jax.export.symbolic_shape("2*b")
        x = jax.ShapeDtypeStruct((batch, 4), jnp.float32)
        loaded = self.export(forward(), nnx.eval_shape(MLP), x)
        for size in (2, 6):
            output = loaded.call(MLP(), X[:size]).output
            np.testing.assert_allclose(output, MLP()(X[:size]), rtol=1e-5)
        self.assertEqual(loaded.manifest.inputs[-1].shape, ("2*b", 4))
        for size in (3, 0):
            expected = rf"Of another type:\n  x: float32\[{size},4\], not float32\[2\*b,4\]"
            with self.assertRaisesRegex(TypeError, expected):
                loaded.call(MLP(), X[:size])

    def test_symbolic_sizes_that_do_not_divide(self):
        (batch,) = jax.export.symbolic_shape("8*b")
        mesh = mesh_of((8,), ("data",))
        fun = jit(apply, in_shardings=(P(), P("data")), mesh=mesh)
        loaded = self.export(fun, MLP(), jax.ShapeDtypeStruct((batch, 4), jnp.float32))
        with self.assertRaisesRegex(TypeError, r"x: float32\[7,4\], not float32\[8\*b,4\]"):
            loaded.call(MLP(), jnp.ones((7, 4)))
        assert loaded.call(MLP(), jnp.ones((16, 4))).output.shape[0] == 16

    def test_sizes_that_jax_decides_about(self):
        shape = jax.export.symbolic_shape("a, a + b")
        double = jit(lambda x: x * 2)
        loaded = self.export(double, jax.ShapeDtypeStruct(shape, jnp.float32))
        self.assertEqual(loaded.call(jnp.ones((2, 5))).output.shape, (2, 5))
        with self.assertRaisesRegex(ValueError, "'b' = -1"):
            loaded.call(jnp.ones((2, 1)))
        (size,) = jax.export.symbolic_shape("2*n")
        x = jax.ShapeDtypeStruct((size, size + 1), jnp.float32)
        outer = export.export(jit(lambda x: loaded.call(x).output))(x)
        self.assertEqual(outer.call(jnp.ones((2, 3))).output.shape, (2, 3))

    def test_inside_of_a_trace(self):
        loaded = self.export(jit(apply), MLP(), X)
        outer = jax.jit(lambda state, x: loaded.call(state, x).output * 2)
        np.testing.assert_allclose(outer(nnx.state(MLP()), X), MLP()(X) * 2, rtol=1e-5)

    def test_differentiated(self):
        exported = export.export(jit(apply))(MLP(), X)
        exported.save(self.path, vjp_order=1)
        loaded = export.load(self.path)
        state = nnx.to_pure_dict(nnx.state(MLP()))
        found = jax.grad(lambda state: loaded.call(state, X).output.sum())(state)
        expected = nnx.to_pure_dict(nnx.grad(lambda model: model(X).sum())(MLP()))
        for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)
        loaded.save(self.path, vjp_order=1)  # the same file
        with self.assertRaisesRegex(
            ValueError, "saved with vjp_order=1, so it cannot be saved with 2"
        ):
            loaded.save(self.path, vjp_order=2)

    def test_the_program_alone(self):
        loaded = self.export(jit(apply), Counter(), 1.0)
        self.assertEqual([i.name for i in loaded.manifest.inputs][-1], "x")
        outputs = loaded.jax_exported.call(3, 2.0, 1.0)
        self.assertEqual(sorted(map(float, outputs)), [4.0, 6.0])

    def test_platforms(self):
        loaded = self.export(jit(apply), MLP(), X, platforms=("tpu", "cpu", "cuda"))
        np.testing.assert_allclose(loaded.call(MLP(), X).output, MLP()(X), rtol=1e-5)
        self.assertEqual(loaded.manifest.platforms, ("tpu", "cpu", "cuda"))

    def test_arguments_are_not_changed(self):
        model = Net(features=4)
        before = nnx.clone(model)
        loaded = self.export(jit(apply), model, X)
        loaded.call(model, X)
        assert_same_state(self, model, before)


def vars_of(model):
    return {name: value for name, value in vars(model).items() if isinstance(value, nnx.Variable)}


class LargerMachineTest(Case):
    def test_256_devices(self):
        """A program for a larger mesh can be exported and inspected, but not called."""
        mesh = AbstractMesh((16, 16), ("data", "model"))
        fun = jit(apply, in_shardings=(mlp_specs(), P("data")), mesh=mesh)
        x = jax.ShapeDtypeStruct((32, 4), jnp.float32)
        loaded = self.export(fun, nnx.eval_shape(MLP), x, platforms=("tpu", "cpu"))
        infos = {info.name: info for info in loaded.manifest.inputs}
        self.assertEqual(infos["x"].shape, (32, 4))
        self.assertEqual(infos["model.up.kernel"].spec, P(None, "model"))
        self.assertEqual([*map(str, loaded.manifest.meshes)], ["data 16 × model 16"])
        with self.assertRaisesRegex(
            errors.ExportError, r"256 devices \(mesh data 16 × model 16\); here there are 8 of cpu"
        ):
            loaded.call(MLP(), np.ones((32, 4), np.float32))

    def test_another_platform(self):
        loaded = self.export(jit(apply), MLP(), X, platforms="tpu")
        # JAX's own error.
        with self.assertRaisesRegex(
            ValueError, r"exported for platforms '\('tpu',\)'.*'\('cpu',\)'"
        ):
            loaded.call(MLP(), X)

    def test_another_mesh_in_context(self):
        loaded = self.export(forward(), MLP(), X)
        with (
            jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"))),
            self.assertRaisesRegex(errors.ExportError, "data 2 × model 4.*is data 4 × model 2"),
        ):
            loaded.call(MLP(), X)


class ManifestTest(Case):
    def test_attributes_and_text(self):
        loaded = self.export(forward(), MLP(), X)
        manifest = loaded.manifest
        self.assertEqual(manifest.function, "apply")
        self.assertEqual((manifest.devices, manifest.platforms), (8, ("cpu",)))
        (mesh,) = manifest.meshes
        self.assertEqual(mesh.axes, {"data": 2, "model": 4})
        self.assertEqual(mesh.axis_types["data"], "Auto")
        specs = {info.name: (info.shape, info.dtype, info.spec) for info in manifest.inputs}
        expected = {
            "model.down.kernel": ((16, 4), "float32", P("model", None)),
            "model.up.kernel": ((4, 16), "float32", P(None, "model")),
            "x": ((8, 4), "float32", P("data")),
        }
        self.assertEqual(specs, expected)
        self.assertEqual(manifest.versions["jax"], jax.__version__)
        for text in ("apply", "data 2 × model 4", "model.up.kernel", "P(None, 'model')", "result"):
            self.assertIn(text, str(loaded))
        self.assertIn("apply", repr(loaded))

    def test_zip_tools_can_read_it(self):
        export.export(forward())(MLP(), X).save(self.path)
        with zipfile.ZipFile(self.path) as archive:
            self.assertIsNone(archive.testzip())
            data = json.loads(archive.read("manifest.json"))
            jax.export.deserialize(bytearray(archive.read("program.bin")))
        self.assertEqual((data["format"], data["version"]), ("nnx_sharding export", 2))

    def test_same_function_same_bytes(self):
        def elsewhere():
            export.export(forward())(MLP(), X).save(self.folder / "other.zip")

        export.export(forward())(MLP(), X).save(self.path)
        jax.clear_caches()
        elsewhere()
        data = self.path.read_bytes()
        self.assertEqual(data, (self.folder / "other.zip").read_bytes())
        self.assertNotIn(str(pathlib.Path(__file__).parent).encode(), data)


class MistakesTest(Case):
    def test_arrays(self):
        loaded = self.export(forward(), MLP(), X)
        given = {"up": {"kernl": X}, "down": {"kernel": np.ones((16, 5), np.float32)}}
        problems = (
            "apply was exported for other arrays",
            "model.up.kernel, float32[4,16] P(None, 'model')",
            "model.up.kernl; did you mean 'model.up.kernel'?",
            "model.down.kernel: float32[16,5], not float32[16,4]",
            "x: int32[8,4], not float32[8,4]",
        )
        with fails(TypeError, *problems):
            loaded.call(given, X.astype(np.int32))
        with fails(TypeError, "x: a str, not"):
            loaded.call(MLP(), "x")
        with fails(TypeError, "Missing", "x, float32[8,4]"):
            loaded.call(MLP(), None)
        with fails(TypeError, "x: a ShapeDtypeStruct"):
            loaded.call(MLP(), jax.ShapeDtypeStruct((8, 4), jnp.float32))

    def test_arguments(self):
        fun = jit(lambda model, x, n: model(x) * n, static_argnames="n")
        loaded = self.export(fun, MLP(), X, 3)
        unknown = "modle: unknown; did you mean 'model'?"
        with fails(TypeError, unknown, "n: static", "as 3", "x: missing"):
            loaded.call(modle=MLP(), n=3)
        with fails(TypeError, "3 positional", "takes 2"):
            loaded.call(MLP(), X, 3)
        with fails(TypeError, "x: passed twice"):
            loaded.call(MLP(), X, x=X)

    def test_wide_types(self):
        with jax.enable_x64(True):
            loaded = self.export(jit(lambda x: x * 2), np.ones(3))
            self.assertEqual(loaded.call(np.ones(3)).output.dtype, np.float64)
        with fails(TypeError, "float64", "jax_enable_x64"):
            loaded.call(np.ones(3))

    def test_functions_and_arguments_that_cannot_be_exported(self):
        make = export.export
        with fails(TypeError, "jax.jit", "jax.export"):
            make(jax.jit(apply))
        with fails(ValueError, "'cuda' or 'rocm'"):
            make(jit(apply), platforms="gpu")
        with fails(TypeError, "box.ref: "):
            make(jit(read))(nnx.Dict(ref=jax.new_ref(jnp.ones(2))))

    def test_jax_export_names_ours(self):
        with fails(TypeError, "apply", "nnx_sharding.export.export"):
            jax.export.export(jit(apply))(MLP(), X)

    @parameterized.named_parameters(
        ("static", lambda m: setattr(m, "flag", 1), "model.flag: 0 → 1"),
        ("removed", lambda m: delattr(m, "a"), "model.a: a Param → missing"),
        (
            "replaced",
            lambda m: setattr(m, "a", nnx.BatchStat(m.a[...])),
            "model.a: a Param → a Bat",
        ),
        ("alias", lambda m: setattr(m, "c", m.a), "model.c: missing → a Param"),
        ("tied", lambda m: setattr(m, "b", m.a), "model.b: a Param → a Param, shared with model.a"),
        ("modules", lambda m: exchange(m.pair, m.pair, "x", "y"), "look alike are exchanged"),
        ("new static", lambda m: setattr(m, "d", "text"), "model.d: missing → 'text'"),
        ("metadata", lambda m: m.a.set_metadata(tag=1), "model.a, metadata 'tag'"),
    )
    def test_changes_of_structure(self, change, text):
        model = nnx.Dict(a=nnx.Param(jnp.ones(2)), b=nnx.Param(jnp.ones(2)), flag=0)
        model.pair = nnx.Dict(x=nnx.Dict(w=nnx.Param(1.0)), y=nnx.Dict(w=nnx.Param(2.0)))

        def fun(model):
            change(model)

        with fails(ValueError, "fun cannot be exported", text):
            export.export(jit(fun))(model)
        self.assertEqual(model.flag, 0)

    def test_without_flatbuffers(self):
        exported = export.export(jit(apply))(MLP(), X)
        exported.save(self.path)
        with absltest.mock.patch.dict(sys.modules, {"flatbuffers": None}):
            for name in [name for name in sys.modules if name.endswith("export.serialization")]:
                del sys.modules[name]  # it imports flatbuffers once it is used again
            texts = "flatbuffers", "pip install 'nnx_sharding[export]'"
            for function in (lambda: exported.save(self.path), lambda: export.load(self.path)):
                with fails(ImportError, *texts):
                    function()


def read(box):
    return box.ref[...]


def exchange(one, other, a, b, by=0):
    """Exchanges an attribute of a module with one of another, and adds to the new value of one."""
    first, second = getattr(one, a), getattr(other, b)
    setattr(one, a, second)
    setattr(other, b, first)
    if by:
        second[...] += by


ARRAY = {"name": "x", "dtype": "float32", "mesh": None, "spec": None, "memory_kind": None}

# Damaged manifests, or entries that replace one of a valid manifest.
MANIFESTS = [
    (b"",),
    (b"null",),
    (b"{}",),
    (b"\xff",),
    (b"[" * 100_000,),
    ({"format": "other"},),
    ({"arguments": None},),
    ({"arguments": [{"name": "x"}]},),
    ({"inputs": []},),
    ({"updates": 3},),
    ({"inputs": [{**ARRAY, "shape": [[]]}]},),
    ({"unknown": 1},),
]


class FileTest(Case):
    """Reading any other or damaged file is an ExportError."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "f.zip")
            export.export(jit(apply))(Counter(), 1.0).save(path)
            cls.data = path.read_bytes()
        with zipfile.ZipFile(io.BytesIO(cls.data)) as archive:
            cls.manifest = json.loads(archive.read("manifest.json"))
            cls.program = archive.read("program.bin")

    def refuse(self, data, text=""):
        self.path.write_bytes(data)
        with self.assertRaisesRegex(errors.ExportError, text) as caught:
            export.load(self.path)
        self.assertIn(str(self.path), str(caught.exception))

    def forged(self, manifest=None, program=None, compression=zipfile.ZIP_STORED, more=()):
        """A file with another content whose digests are valid."""
        program = self.program if program is None else program
        if not isinstance(manifest, bytes):
            manifest = json.dumps({**self.manifest, **(manifest or {})}).encode()
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", compression) as archive:
            for name, data in (("manifest.json", manifest), ("program.bin", program), *more):
                archive.writestr(name, data)
            archive.comment = b"0" * 64
        sealed = buffer.getvalue()[:-64]
        return sealed + hashlib.sha256(sealed).hexdigest().encode()

    def test_valid_forgery_is_read(self):
        self.path.write_bytes(self.forged({}))
        self.assertEqual(float(export.load(self.path).call(Counter(), 1.0).output), 3.0)

    def test_truncated_at_any_byte(self):
        size = len(self.data)
        for end in {*range(100), *range(100, size, 211), *range(size - 100, size)}:
            self.refuse(self.data[:end], "not a file of|damaged")

    def test_changed_bytes(self):
        size = len(self.data)
        for place in {*range(100), *range(100, size, 211), *range(size - 150, size)}:
            changed = bytearray(self.data)
            changed[place] ^= 1 << (place % 8)
            self.refuse(bytes(changed), "not a file of|damaged")

    def test_additional_bytes(self):
        self.refuse(self.data + b"0", "damaged")
        self.refuse(b"0" + self.data, "not a file of")

    def test_other_files(self):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("word/document.xml", "<xml/>")
        for data in (b"", b"hello", b"\x80\x04", b"PK\x03\x04", buffer.getvalue()):
            self.refuse(data, "not a file of nnx_sharding.export")
        with self.assertRaises(FileNotFoundError):
            export.load(self.folder / "missing.zip")

    def test_control_characters_in_names(self):
        name = "\x1b]0;hacked\x07\x9b31m"
        self.path.write_bytes(self.forged({"function": name, "static": {name: name}}))
        loaded = export.load(self.path)
        assert loaded.manifest.function == name
        for text in str(loaded), str(loaded.manifest), repr(loaded):
            assert text.replace("\n", "").isprintable() and "hacked" in text

    def test_versions(self):
        for version in (1, 3, "2", None):
            self.refuse(self.forged({"version": version}), "reads version 2")
        self.refuse(
            self.forged({"format": "nnx_sharding executable"}), "its format is 'nnx_sharding ex"
        )
        oldest = jax.export.minimum_supported_calling_convention_version
        newest = jax.export.maximum_supported_calling_convention_version
        for convention in (oldest - 1, newest + 1):
            text = f"(?s)version {convention} of the calling convention.*{oldest} to {newest}"
            self.refuse(self.forged({"calling_convention": convention}), text)

    def test_another_program(self):
        (self.folder / "g").mkdir()
        export.export(jit(apply))(MLP(), X).save(self.folder / "g" / "f.zip")
        with zipfile.ZipFile(self.folder / "g" / "f.zip") as archive:
            other = archive.read("program.bin")
        self.refuse(self.forged(program=other), "does not describe its program")
        self.refuse(self.forged(program=b""), "cannot read")
        self.refuse(self.forged(program=b"\x00" * 64), "cannot read|not describe")

    @parameterized.parameters(*MANIFESTS)
    def test_manifests(self, manifest):
        self.refuse(self.forged(manifest), "manifest of an exported function")


LOADER = """
import sys
import numpy as np
from flax import nnx
from nnx_sharding import export

folder = sys.argv[1]
loaded = export.load(f"{folder}/function.zip")
weights = dict(np.load(f"{folder}/weights.npz"))
for _ in range(2):
    output, updates = loaded.call(weights, np.load(f"{folder}/x.npy"))
    weights |= updates["model"]
np.savez(f"{folder}/results.npz", output=output, **weights)
assert "models" not in sys.modules and "Model" not in dir(sys.modules["__main__"])
loaded.save(f"{folder}/again.zip")
"""


class OtherProcessTest(Case):
    def test_without_the_code_of_the_model(self):
        class Model(nnx.Module):
            def __init__(self):
                self.mlp, self.counter = MLP(), Counter()

            def __call__(self, x):
                return self.counter(self.mlp(x))

        sharding = StateSharding({nnx.PathContains("up"): P(None, "model"), ...: P()})
        mesh = mesh_of((2, 4), ("data", "model"))
        model = Model()
        fun = jit(apply, in_shardings=(sharding, P("data")), mesh=mesh)
        export.export(fun)(model, X).save(self.path)
        flat = nnx.to_flat_state(nnx.state(model))
        weights = {"/".join(path): np.asarray(value.get_raw_value()) for path, value in flat}
        np.savez(self.folder / "weights.npz", **weights)
        np.save(self.folder / "x.npy", X)
        root = str(pathlib.Path(__file__).parents[1])
        environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": root}
        ran = subprocess.run(
            [sys.executable, "-W", "error", "-c", LOADER, str(self.folder)],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(ran.returncode, 0, ran.stderr)
        fun(model, X)
        results = np.load(self.folder / "results.npz")
        np.testing.assert_allclose(results["output"], fun(model, X), rtol=1e-5)
        self.assertEqual(int(results["counter/count"]), 2)
        self.assertEqual((self.folder / "again.zip").read_bytes(), self.path.read_bytes())
