"""Formats, open specs, abstract meshes and names: what ``jax.jit`` does, or says, with them."""

from __future__ import annotations

import functools
import io
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding

from nnx_sharding import StateSharding, jit, shard_map
from nnx_sharding.errors import NoMeshError
from zoo import P, fails, mesh_of

X = np.arange(128, dtype=np.float32).reshape(16, 8)
KERNEL = nnx.PathContains("kernel")


def mesh8():
    return mesh_of((8,), ("x",))


def rows():
    return NamedSharding(mesh8(), P("x", None))


def double(x):
    return x * 2


FORMATS = {
    "row-major": lambda: Format(Layout((0, 1)), rows()),
    "column-major": lambda: Format(Layout((1, 0)), rows()),
    "sharding alone": lambda: Format(None, rows()),
    "AUTO": lambda: Format(Layout.AUTO, rows()),
    "AUTO alone": lambda: Format(Layout.AUTO),
}


class FormatTest(parameterized.TestCase):
    @parameterized.named_parameters(FORMATS.items())
    def test_of_arrays(self, make):
        own = make()
        for option in ("in_shardings", "out_shardings"):
            ours, theirs = (transform(double, **{option: own}) for transform in (jit, jax.jit))
            self.assertEqual(ours(X).format, theirs(X).format)
            self.assertEqual(ours.eval_shape(X), theirs.eval_shape(X))
            ours, theirs = (f.lower(jax.typeof(X)).compile() for f in (ours, theirs))
            self.assertEqual(ours.input_formats, theirs.input_formats)
            self.assertEqual(ours.output_formats, theirs.output_formats)

    @parameterized.named_parameters(FORMATS.items())
    def test_in_a_state_sharding(self, make):
        own = make()
        specs = StateSharding({KERNEL: own, ...: None})

        def layer():
            return nnx.Linear(16, 8, rngs=nnx.Rngs(0))

        def step(model):
            model.kernel[...] *= 2

        made = jit(layer, out_shardings=specs)
        theirs = jax.jit(lambda: layer().kernel[...], out_shardings=own)
        self.assertEqual(made().kernel[...].format, theirs().format)
        self.assertEqual(made.eval_shape().kernel.get_raw_value(), theirs.eval_shape())
        ours = jit(step, in_shardings=(specs,)).lower(layer()).compile()
        theirs = jax.jit(double, in_shardings=own).lower(layer().kernel[...]).compile()
        self.assertEqual(ours.input_formats[0][0]["kernel"], theirs.input_formats[0][0])
        if own.layout is Layout.AUTO:  # JAX refuses it for placed arrays
            return
        model, run = layer(), jit(step, in_shardings=(specs,))
        for _ in range(2):
            run(model)
        theirs = jax.jit(double, in_shardings=own, out_shardings=own)
        kernel = theirs(theirs(layer().kernel[...]))
        self.assertEqual(model.kernel[...].format, kernel.format)
        np.testing.assert_array_equal(model.kernel[...], kernel)

    @parameterized.parameters("in_shardings", "out_shardings")
    def test_a_layout_without_a_sharding(self, option):
        for layout in (Layout((1, 0)), Layout.AUTO):
            for given in (layout, (layout,), StateSharding):
                with self.assertRaisesRegex(TypeError, r"write jax\.experimental\.layout\.Format"):
                    given = given({...: layout}) if given is StateSharding else given
                    jit(double, **{option: given})

    def test_shard_map_takes_none(self):
        for own in (Format(Layout((1, 0)), rows()), jax.sharding.SingleDeviceSharding):
            own = own(jax.devices()[0]) if isinstance(own, type) else own
            with self.assertRaisesRegex(TypeError, "in_specs: .*write its PartitionSpec"):
                shard_map(double, mesh=mesh8(), in_specs=own, out_specs=P())


class OpenTest(parameterized.TestCase):
    @parameterized.parameters(
        ([None],), ((None,),), (([None, None],),), (((None, None),),), ({"a": (None, [None])},)
    )
    def test_nested_none(self, specs):
        value = jax.tree.map(lambda _: X, specs, is_leaf=lambda x: x is None)
        args = value.values() if isinstance(value, dict) else value
        ours = jit(lambda a: a, in_shardings=specs, out_shardings=None)(*args)
        theirs = jax.jit(lambda a: a)(*args)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            self.assertEqual(a.sharding, b.sharding)
        out = value["a"] if isinstance(value, dict) else value
        specs = specs["a"] if isinstance(specs, dict) else specs
        self.assertEqual(
            jax.tree.structure(jit(lambda: out, out_shardings=specs)()), jax.tree.structure(out)
        )

    @parameterized.parameters(True, False)
    def test_unconstrained(self, with_mesh):
        spec = P(P.UNCONSTRAINED, None)
        own = NamedSharding(mesh8(), spec) if with_mesh else spec
        mesh = None if with_mesh else mesh8()
        with self.assertRaises(ValueError):
            jax.jit(double, in_shardings=NamedSharding(mesh8(), spec))(X)
        specs = ({"x": own}, StateSharding({KERNEL: own, ...: None}))
        facts = "for a['x'], model.kernel", "is UNCONSTRAINED; write None or a mesh axis"
        with fails(ValueError, *facts):
            jit(lambda a, model: a, in_shardings=specs, mesh=mesh)(
                {"x": X}, nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            )
        with self.assertRaisesRegex(ValueError, "for out_shardings: .* is UNCONSTRAINED"):
            jit(double, out_shardings=own, mesh=mesh)(X)
        if not with_mesh:
            with self.assertRaisesRegex(ValueError, "for x: .* is UNCONSTRAINED"):
                shard_map(double, mesh=mesh, in_specs=own, out_specs=P())(X)


class AbstractMeshTest(parameterized.TestCase):
    """Without devices nothing runs; all that needs none works."""

    def check(self, call):
        with self.assertRaisesRegex(NoMeshError, r"(?s)no devices.*AbstractMesh\('x': 8"):
            call()

    def test_jit(self):
        mesh = mesh8().abstract_mesh
        for option in ("in_shardings", "out_shardings"):
            for own, given in ((P("x"), mesh), (NamedSharding(mesh, P("x")), None)):
                fun = jit(double, **{option: own}, mesh=given)
                for x in (X, jnp.ones((16, 8))):
                    self.check(lambda fun=fun, x=x: fun(x))
                self.assertEqual(fun.eval_shape(X).shape, X.shape)
                lowered = fun.trace(X).lower(lowering_platforms=("cpu",))
                self.assertIn("jit_double", lowered.as_text())
        model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        specs = StateSharding({...: P("x")})
        self.check(lambda: jit(lambda m: m.kernel[...], in_shardings=(specs,), mesh=mesh)(model))

    @parameterized.parameters(True, False)
    def test_shard_map(self, compiled):
        mesh = mesh8().abstract_mesh
        fun = shard_map(double, mesh=mesh, in_specs=P("x"), out_specs=P("x"), jit=compiled)
        self.check(lambda: fun(X))
        np.testing.assert_array_equal(fun(jax.device_put(X, rows())), 2 * X)
        with jax.set_mesh(mesh8()):
            np.testing.assert_array_equal(fun(X), 2 * X)
        with jax.sharding.use_abstract_mesh(mesh):
            self.check(lambda: shard_map(double, in_specs=P("x"), out_specs=P("x"))(X))

    def test_devices_of_arrays_and_contexts(self):
        mesh = mesh8().abstract_mesh
        fun = jit(double, out_shardings=P("x"), mesh=mesh)
        np.testing.assert_array_equal(fun(jax.device_put(X, rows())), 2 * X)
        with jax.set_mesh(mesh8()):
            np.testing.assert_array_equal(fun(X), 2 * X)
            np.testing.assert_array_equal(jit(double, in_shardings=P("x"), mesh=mesh)(X), 2 * X)


class _Callable:
    def __call__(self, x):
        return x * 2


class NameTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("function", double),
        ("lambda", lambda x: x * 2),
        ("partial", functools.partial(double)),
        ("object", _Callable()),
        ("method", _Callable().__call__),
        ("wrapper", functools.wraps(double)(lambda x: x * 2)),
        ("jitted", jax.jit(double)),
    )
    def test_of_programs(self, fun):
        ours, theirs = jit(fun), jax.jit(fun)
        self.assertEqual(ours.trace(X).fun_name, theirs.trace(X).fun_name)
        module = re.compile(r"(?:module @|HloModule )(\w+)")
        for stage in (lambda f: f.lower(X), lambda f: f.lower(X).compile()):
            names = [module.match(stage(f).as_text())[1] for f in (ours, theirs)]
            self.assertEqual(*names)

    @pytest.mark.usefixtures("uncached")  # the key of the cache is in the log
    def test_in_logs(self):
        def log_of(transform):
            out = io.StringIO()
            handler, logger = logging.StreamHandler(out), logging.getLogger("jax")
            logger.addHandler(handler)
            try:
                with jax.log_compiles():
                    transform(lambda x: x * 3)(X)
            finally:
                logger.removeHandler(handler)
            return re.sub(r"[\d.e-]+ sec", "… sec", out.getvalue())

        self.assertIn("Compiling jit(<lambda>)", log_of(jit))
        self.assertEqual(log_of(jit), log_of(jax.jit))
