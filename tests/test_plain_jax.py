"""Functions without NNX objects: every outcome is the one of ``jax.jit`` and ``jax.shard_map``."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import logging
import traceback
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding

import nnx_sharding
from nnx_sharding import jit, shard_map
from nnx_sharding.errors import NoMeshError
from zoo import P, assert_same, describe, mesh_of

Point = collections.namedtuple("Point", ["x", "y"])


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "b"], meta_fields=["name"])
@dataclasses.dataclass
class Affine:
    w: object
    b: object
    name: str = "affine"


class Counted(logging.Logger):
    """A function that counts how often Python executes it.

    As a logger, since a function that changes anything else that it reaches is traced each time.
    """

    def __init__(self, fun):
        super().__init__("counted")
        self.count = 0

        @functools.wraps(fun)
        def counted(*args, **kwargs):
            self.count += 1
            return fun(*args, **kwargs)

        self.fun = counted


def both(fun, *args, decorators=(jit, jax.jit), **options):
    """The same call under both, on separate functions; returns both outcomes."""
    return [decorator(fun, **options)(*args) for decorator in decorators]


def error_of(action):
    try:
        action()
    except Exception as error:
        return type(error)
    return None


VALUES = {
    "python_int": 3,
    "python_float": 2.5,
    "python_bool": True,
    "python_complex": 1 + 2j,
    "numpy_scalar": np.float32(2.0),
    "numpy_int64": np.int64(7),
    "numpy_array": np.arange(6.0).reshape(2, 3),
    "weak_array": jnp.asarray(1.0) * 1,
    "float32": jnp.arange(4, dtype=jnp.float32),
    "bfloat16": jnp.arange(4, dtype=jnp.bfloat16),
    "int4": jnp.arange(-4, 4, dtype=jnp.int4),
    "uint8": jnp.arange(4, dtype=jnp.uint8),
    "float8": jnp.arange(4, dtype=jnp.float8_e4m3fn),
    "bool": jnp.array([True, False]),
    "empty": jnp.zeros((0, 3)),
    "key": jax.random.key(3),
    "raw_key": jax.random.PRNGKey(3),
    "key_array": jax.random.split(jax.random.key(0), 3),
    "none": None,
    "list": [1, jnp.ones(2)],
    "dict": {"b": 1.0, "a": jnp.ones(3)},
    "namedtuple": Point(jnp.ones(2), 2),
    "dataclass": Affine(jnp.ones((2, 2)), 1.0),
    "nested": ({"z": [None, (1, 2.0)]}, Point(None, jnp.ones(1))),
    "empty_tree": ((), {}, None),
}


class OutputsTest(parameterized.TestCase):
    @parameterized.named_parameters((name, name) for name in VALUES)
    def test_identity_gives_what_jax_gives(self, name):
        ours, theirs = both(lambda x: x, VALUES[name])
        assert_same(self, ours, theirs)

    @parameterized.named_parameters((name, name) for name in VALUES)
    def test_rebuilt_leaves_give_what_jax_gives(self, name):
        def fun(tree):
            def change(x):
                if jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key):
                    return jax.random.fold_in(x, 1) if x.ndim == 0 else x
                return jnp.asarray(x).T

            return {"out": jax.tree.map(change, tree), "constant": 1.0, "none": None}

        assert_same(self, *both(fun, VALUES[name]))

    @parameterized.named_parameters((name, name) for name in VALUES)
    def test_eval_shape(self, name):
        def fun(x):
            return {"x": x, "y": (1, 2.0), "z": None}

        ours, theirs = (d(fun).eval_shape(VALUES[name]) for d in (jit, jax.jit))
        self.assertEqual(jax.tree.structure(ours), jax.tree.structure(theirs))
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            self.assertEqual((type(a), a), (type(b), b))
            self.assertEqual(a.weak_type, b.weak_type)

    @parameterized.parameters(True, False)
    def test_same_under_x64(self, enable):
        with jax.enable_x64(enable):
            assert_same(self, *both(lambda x, y: (x + 1, y * 2.0), 3, np.arange(3.0)))

    def test_x64_setting_is_part_of_the_cache_key(self):
        fun = jit(lambda x: x + 1)
        with jax.enable_x64(False):
            self.assertEqual(fun(np.float64(1)).dtype, jnp.float32)
        with jax.enable_x64(True):
            self.assertEqual(fun(np.float64(1)).dtype, jnp.float64)
        with jax.enable_x64(False):
            self.assertEqual(fun(np.float64(1)).dtype, jnp.float32)

    @parameterized.named_parameters(
        ("named", lambda: NamedSharding(mesh_of((8,), ("a",)), P("a"))),
        ("named_explicit", lambda: NamedSharding(mesh_of((8,), ("a",), "explicit"), P("a"))),
        ("replicated", lambda: NamedSharding(mesh_of((4, 2), ("a", "b")), P())),
        ("single", lambda: SingleDeviceSharding(jax.devices()[3])),
        ("pinned", lambda: SingleDeviceSharding(jax.devices()[3], memory_kind="pinned_host")),
    )
    def test_committed_inputs_decide_the_layout(self, sharding):
        x = jax.device_put(jnp.arange(16.0).reshape(8, 2), sharding())
        assert_same(self, *both(lambda x, y: (x + y, x, y, x.sum()), x, 1.0), rtol=1e-6)

    def test_two_devices_at_once_is_the_error_of_jax(self):
        a, b = (jax.device_put(jnp.ones(2), d) for d in jax.devices()[:2])
        self.assertIs(
            error_of(lambda: jit(jnp.add)(a, b)), error_of(lambda: jax.jit(jnp.add)(a, b))
        )
        with self.assertRaisesRegex(ValueError, "incompatible devices"):
            jit(jnp.add)(a, b)

    def test_an_argument_that_is_returned_is_that_array_or_a_copy_as_in_jax(self):
        one, two = jnp.arange(4.0), jnp.arange(4.0)
        ours, theirs = jit(lambda x: x)(one), jax.jit(lambda x: x)(two)
        one.delete(), two.delete()
        self.assertEqual(ours.is_deleted(), theirs.is_deleted())


class ScalarStream:
    """Arguments over which a sequence of calls is drawn."""

    SAMPLES = (
        1,
        1.0,
        True,
        np.float32(1),
        np.ones(3),
        np.ones((2, 3), np.float32),
        jnp.ones(3),
        jnp.ones(3, jnp.int32),
        jnp.float32(1),
        jnp.asarray(1.0) * 1,
        (1, jnp.ones(2)),
        [1, 2.0],
        None,
    )


class TraceCountTest(parameterized.TestCase):
    def assert_traces_alike(self, calls, body=lambda *a, **k: (a, k), **options):
        ours, theirs = Counted(body), Counted(body)
        us, them = jit(ours.fun, **options), jax.jit(theirs.fun, **options)
        for args, kwargs in calls:
            us(*args, **kwargs)
            them(*args, **kwargs)
            self.assertEqual(ours.count, theirs.count, f"after {args}, {kwargs}")
        return ours.count

    def test_every_kind_of_argument_twice(self):
        calls = [((x,), {}) for x in ScalarStream.SAMPLES * 2]
        self.assertGreater(self.assert_traces_alike(calls), 5)

    @settings(max_examples=15, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(range(len(ScalarStream.SAMPLES))),
                st.sampled_from([None, 0, 4]),
                st.sampled_from(["", "k", "kj", "jk"]),
            ),
            max_size=8,
        )
    )
    def test_any_sequence_of_calls(self, drawn):
        samples = ScalarStream.SAMPLES
        calls = []
        for first, second, keywords in drawn:
            args = (samples[first],) + (() if second is None else (samples[second],))
            calls.append((args, dict.fromkeys(keywords, samples[first])))
        self.assert_traces_alike(calls)

    def test_order_of_keywords_does_not_matter(self):
        calls = [((), {"a": 1, "b": 2.0}), ((), {"b": 2.0, "a": 1}), ((1,), {"b": 2.0})]
        self.assert_traces_alike(calls, lambda a, b: a + b)

    @parameterized.named_parameters(
        ("num", {"static_argnums": 1}),
        ("name", {"static_argnames": "n"}),
        ("names", {"static_argnames": ("n", "m")}),
        ("both", {"static_argnums": (1,), "static_argnames": ("m",)}),
        ("num_tuple", {"static_argnums": (1, 2)}),
    )
    def test_static_arguments(self, options):
        def body(x, n, m=3):
            return x * n * m

        calls = [
            ((1.0, 2, 3), {}),
            ((1.0, 2, 3), {}),
            ((2.0, 3, 3), {}),
            ((2.0, 3), {"m": 3}),
            ((2.0,), {"n": 3, "m": 3}),
            ((2.0,), {"m": 3, "n": 3}),
            ((2.0,), {"m": 4, "n": 3}),
        ]
        self.assert_traces_alike(calls, body, **options)

    def test_missing_static_argument_uses_the_default(self):
        def body(x, n=2):
            return x * n

        self.assert_traces_alike(
            [((1.0,), {}), ((1.0, 2), {}), ((2.0,), {})], body, static_argnums=1
        )

    def test_statics_of_equal_value_and_other_type_give_their_own_results(self):
        """JAX calls 1 and True one static; a function can distinguish them, so we do too."""
        fun = jit(lambda x, n: x + (10 if n is True else n), static_argnums=1)
        self.assertEqual([float(fun(1.0, n)) for n in (1, True, 1.0)], [2.0, 11.0, 2.0])

    def test_shardings_and_committedness(self):
        mesh = mesh_of((8,), ("a",))
        x = np.ones((8, 8), np.float32)
        placed = [
            jnp.asarray(x),
            jax.device_put(x, jax.devices()[0]),
            jax.device_put(x, jax.devices()[1]),
            jax.device_put(x, NamedSharding(mesh, P("a"))),
            jax.device_put(x, NamedSharding(mesh, P(None, "a"))),
        ]
        self.assert_traces_alike([((x,), {}) for x in placed * 2], lambda x: x + 1)

    def test_explicit_shardings_are_part_of_the_type(self):
        mesh = mesh_of((8,), ("a",), "explicit")
        x = np.ones((8, 8), np.float32)
        placed = [jax.device_put(x, NamedSharding(mesh, s)) for s in (P("a"), P(None, "a"), P())]
        count = self.assert_traces_alike([((x,), {}) for x in placed * 2], lambda x: x + 1)
        self.assertEqual(count, 3)

    def test_context_mesh_is_part_of_the_key(self):
        ours, theirs = Counted(lambda x: x + 1), Counted(lambda x: x + 1)
        us, them = jit(ours.fun), jax.jit(theirs.fun)
        x = jnp.ones(8)
        for mesh in (None, mesh_of((8,), ("a",)), mesh_of((8,), ("b",)), None):
            with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
                us(x), them(x)
            self.assertEqual(ours.count, theirs.count, mesh)

    def test_two_jits_alive_at_once_trace_once(self):
        counted = Counted(lambda x: x + 1)
        one, two = jit(counted.fun), jit(counted.fun)
        one(1.0), two(2.0)
        self.assertEqual(counted.count, 1)

    def test_options_that_do_not_change_the_trace_do_not_trace_again(self):
        ours, theirs = Counted(lambda x: x + 1), Counted(lambda x: x + 1)
        for decorator, counted in ((jit, ours), (jax.jit, theirs)):
            funs = [decorator(counted.fun), decorator(counted.fun, keep_unused=True)]
            funs.append(decorator(counted.fun, donate_argnums=0))
            for fun in funs:
                fun(jnp.ones(3))
        self.assertEqual(ours.count, theirs.count)

    def test_two_functions_of_one_name_trace_twice(self):
        def make(n):
            return Counted(lambda x: x + n)

        one, two = make(1), make(2)
        self.assertEqual([float(jit(c.fun)(0.0)) for c in (one, two)], [1.0, 2.0])

    def test_jax_clear_caches_traces_again(self):
        counted = Counted(lambda x: x + 1)
        fun = jit(counted.fun)
        fun(1.0)
        jax.clear_caches()
        self.assertEqual(float(fun(1.0)), 2.0)
        self.assertEqual(counted.count, 2)

    def test_staging_and_calling_share_one_trace(self):
        ours, theirs = Counted(lambda x: x + 1), Counted(lambda x: x + 1)
        us, them = jit(ours.fun), jax.jit(theirs.fun)
        for f in (us, them):
            f(jnp.ones(3))
            f.lower(jnp.ones(3)).compile()
            f.trace(jnp.ones(3))
            f.eval_shape(jnp.ones(3))
            f(jnp.ones(3))
        self.assertEqual(ours.count, theirs.count)

    def test_ours_inside_a_trace(self):
        ours, theirs = Counted(lambda x: x + 1), Counted(lambda x: x + 1)
        us, them = jit(ours.fun), jax.jit(theirs.fun)
        for f in (us, them):
            jax.jit(lambda x, f=f: f(x) + f(x))(1.0)
            jax.jit(lambda x, f=f: f(x) * f(x))(1.0)
            jax.grad(lambda x, f=f: f(x) * f(x))(1.0)
        self.assertEqual(ours.count, theirs.count)


class OptionsTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("num", {"donate_argnums": 0}),
        ("name", {"donate_argnames": "x"}),
        ("tuple", {"donate_argnums": (0, 1)}),
        ("second", {"donate_argnames": ("y",)}),
    )
    def test_donation_deletes_the_same_buffers(self, options):
        def fun(x, y):
            return x + 1, y["a"] * 2

        gone = []
        for decorator in (jit, jax.jit):
            x, y = jnp.ones(4), {"a": jnp.ones(4)}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                decorator(fun, **options)(x, y=y)
                decorator(fun, **options)(jnp.ones(4), {"a": jnp.ones(4)})
            gone.append((x.is_deleted(), y["a"].is_deleted()))
        self.assertEqual(*gone)
        self.assertIn(True, gone[0])

    def test_donation_that_cannot_be_used_warns(self):
        for decorator in (jit, jax.jit):
            with self.assertWarnsRegex(UserWarning, "donated buffers were not usable"):
                decorator(lambda x: x[:1], donate_argnums=0)(jnp.ones(4))

    def test_donated_twice_is_refused(self):
        x = jnp.ones(4)
        for decorator in (jit, jax.jit):
            with self.assertRaises((ValueError, RuntimeError)):
                decorator(lambda x, y: (x + 1, y + 1), donate_argnums=(0, 1))(x, x)

    def test_a_deleted_argument_is_refused(self):
        kinds = []
        for decorator in (jit, jax.jit):
            x = jnp.ones(4)
            x.delete()
            kinds.append(error_of(lambda: decorator(lambda x: x + 1)(x)))
        self.assertTrue(issubclass(*kinds), kinds)

    @parameterized.named_parameters(("device", "device"), ("backend", "backend"))
    def test_device_and_backend_work_and_warn(self, option):
        value = jax.devices()[2] if option == "device" else "cpu"
        outcomes = []
        for decorator in (jit, jax.jit):
            with self.assertWarns(DeprecationWarning):
                fun = decorator(lambda x: x + 1, **{option: value})
                outcomes.append(fun(jnp.ones(2)))
        assert_same(self, *outcomes)

    def test_device_with_shardings_is_refused(self):
        sharding = SingleDeviceSharding(jax.devices()[0])
        for decorator in (jit, jax.jit):
            with self.assertRaises(ValueError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                decorator(lambda x: x, device=jax.devices()[0], in_shardings=sharding)(1.0)

    def test_keep_unused(self):
        for keep in (True, False):
            ours, theirs = (
                d(lambda x, y: x + 1, keep_unused=keep).lower(1.0, 2.0).as_text()
                for d in (jit, jax.jit)
            )
            self.assertEqual(ours.count("%arg1"), theirs.count("%arg1"))

    def test_inline(self):
        for inline in (True, False):
            names = []
            for decorator in (jit, jax.jit):
                inner = decorator(jnp.sin, inline=inline)
                jaxpr = jax.make_jaxpr(lambda x, inner=inner: inner(x) + 1)(1.0)
                names.append([equation.primitive.name for equation in jaxpr.eqns])
            self.assertEqual(names[0], names[1])

    def test_compiler_options_reach_xla(self):
        fun = jit(lambda x: x + 1, compiler_options={"xla_embed_ir_in_executable": True})
        self.assertEqual(float(fun(1.0)), 2.0)
        for decorator in (jit, jax.jit):
            with self.assertRaisesRegex(Exception, "no_such_option"):
                decorator(lambda x: x + 1, compiler_options={"no_such_option": 1})(1.0)

    def test_negative_static_beyond_the_call(self):
        # Releases of JAX differ in whether they see this.
        fun = jit(lambda *args: args, static_argnums=-2)
        with self.assertRaisesRegex(ValueError, "static_argnums"):
            fun(1.0)

    def test_disable_jit_runs_python_every_time(self):
        ours, theirs = Counted(lambda x: x + 1), Counted(lambda x: x + 1)
        us, them = jit(ours.fun), jax.jit(theirs.fun)
        with jax.disable_jit():
            for _ in range(3):
                a, b = us(jnp.ones(2)), them(jnp.ones(2))
        self.assertEqual((ours.count, theirs.count), (3, 3))
        assert_same(self, a, b)

    def test_disable_jit_gives_concrete_values(self):
        def fun(x):
            return x + 1 if float(x) > 0 else x

        with jax.disable_jit():
            self.assertEqual(float(jit(fun)(1.0)), 2.0)

    def test_decorator_forms(self):
        @jit
        def one(x):
            return x + 1

        @jit(static_argnums=1)
        def two(x, n):
            return x + n

        three = functools.partial(jit, static_argnames="n")(lambda x, n: x + n)
        self.assertEqual([float(one(1.0)), float(two(1.0, 2)), float(three(1.0, n=3))], [2, 3, 4])

    def test_names_and_documentation_are_kept(self):
        def fun(x: int) -> int:
            """Doc."""
            return x

        for decorated, theirs in (
            (jit(fun), jax.jit(fun)),
            (shard_map(fun, mesh=mesh_of((8,), ("a",)), in_specs=P(), out_specs=P()), jax.jit(fun)),
        ):
            for name in ("__name__", "__qualname__", "__doc__", "__module__", "__wrapped__"):
                self.assertEqual(getattr(decorated, name), getattr(theirs, name))

    def test_public_names_of_jits_wrapper_exist(self):
        wrapper = jax.jit(lambda x: x)
        for name in dir(wrapper):
            if not name.startswith("_"):
                self.assertTrue(hasattr(jit(lambda x: x), name), name)

    @parameterized.named_parameters(
        ("partial", functools.partial(lambda a, b, c=0: a + 2 * b + c, 1.0)),
        ("partial_keyword", functools.partial(lambda a, b=1, c=0: a + 2 * b + c, c=3.0)),
        ("builtin", jnp.sin),
        ("ufunc", jnp.add.reduce),
        ("callable_object", type("Call", (), {"__call__": lambda self, x: x * 2})()),
        ("bound_method", Point(1.0, 2.0).__class__._make),
        ("class_", lambda x: Point(x, x)),
    )
    def test_callables(self, fun):
        x = jnp.arange(2.0)
        assert_same(self, *both(fun, x))

    def test_partial_with_statics(self):
        fun = functools.partial(lambda a, n, b: a * n + b, b=2.0)
        assert_same(self, *both(fun, 3.0, 2, static_argnums=1))


class ErrorsTest(parameterized.TestCase):
    """The error types of ``jax.jit``, at the moment where ``jax.jit`` raises them."""

    def generator(x):
        yield x

    CASES = {
        "not_callable": lambda d: d(3),
        "generator": lambda d: d(ErrorsTest.generator),
        "staticmethod_object": lambda d: d(staticmethod(abs)),
        "unhashable_static": lambda d: d(lambda x, n: x, static_argnums=1)(1, [2]),
        "unhashable_static_name": lambda d: d(lambda x, n: x, static_argnames="n")(1, n=[2]),
        "static_out_of_range": lambda d: d(lambda x: x, static_argnums=3),
        "donate_out_of_range": lambda d: d(lambda x: x, donate_argnums=3),
        "static_negative_out_of_range": lambda d: d(lambda x: x, static_argnums=-3),
        "unknown_static_name": lambda d: d(lambda x: x, static_argnames="y"),
        "unknown_donate_name": lambda d: d(lambda x: x, donate_argnames="y"),
        "static_type": lambda d: d(lambda x: x, static_argnums=1.5),
        "static_string": lambda d: d(lambda x: x, static_argnums="x"),
        "name_type": lambda d: d(lambda x: x, static_argnames=1),
        "static_and_donated": lambda d: d(lambda x: x, static_argnums=0, donate_argnums=0),
        "too_few_shardings": lambda d: d(
            lambda x, y: x, in_shardings=(SingleDeviceSharding(jax.devices()[0]),)
        )(1, 2),
        "too_many_shardings": lambda d: d(
            lambda x: x, in_shardings=(SingleDeviceSharding(jax.devices()[0]),) * 2
        )(1),
        "sharding_type": lambda d: d(lambda x: x, in_shardings="model")(1),
        "array_as_sharding": lambda d: d(lambda x: x, in_shardings=np.ones(3))(1),
        "out_sharding_type": lambda d: d(lambda x: x, out_shardings=3)(1),
        "out_sharding_structure": lambda d: d(
            lambda x: x, out_shardings=(SingleDeviceSharding(jax.devices()[0]),) * 2
        )(1),
        "string_output": lambda d: d(lambda x: "text")(1),
        "object_output": lambda d: d(lambda x: object())(1),
        "string_argument": lambda d: d(lambda x: 1)("text"),
        "object_argument": lambda d: d(lambda x: 1)(object()),
        "object_array": lambda d: d(lambda x: 1)(np.array([None, 1], dtype=object)),
        "set_argument": lambda d: d(lambda x: 1)({1, 2}),
        "missing_argument": lambda d: d(lambda x, y: x)(1),
        "extra_argument": lambda d: d(lambda x: x)(1, 2),
        "unknown_keyword": lambda d: d(lambda x: x)(1, z=2),
        "argument_given_twice": lambda d: d(lambda x: x)(1, x=2),
        "concretization": lambda d: d(lambda x: 1 if x > 0 else 2)(1.0),
        "integer_of_tracer": lambda d: d(lambda x: jnp.ones(3)[int(x) :])(1),
        "numpy_of_tracer": lambda d: d(lambda x: np.sin(x))(1.0),
        "own_error": lambda d: d(lambda x: {}["missing"])(1.0),
        "zero_division": lambda d: d(lambda x: x / (1 // 0))(1.0),
        "indivisible": lambda d: d(
            lambda x: x, in_shardings=NamedSharding(mesh_of((8,), ("a",)), P("a"))
        )(jnp.ones(3)),
        "rank": lambda d: d(
            lambda x: x, in_shardings=NamedSharding(mesh_of((8,), ("a",)), P("a", None))
        )(jnp.ones(8)),
        "committed_elsewhere": lambda d: d(
            lambda x: x, in_shardings=NamedSharding(mesh_of((8,), ("a",)), P("a"))
        )(jax.device_put(jnp.ones(8), NamedSharding(mesh_of((8,), ("a",)), P()))),
        "overflow": lambda d: d(lambda x: x)(2**70),
    }

    @parameterized.named_parameters((name, name) for name in CASES)
    def test_error_type(self, name):
        case = self.CASES[name]
        expected = error_of(lambda: case(jax.jit))
        self.assertIsNotNone(expected, "jax.jit raises nothing: the case tests nothing")
        self.assertIs(error_of(lambda: case(jit)), expected)

    def test_leaked_tracer(self):
        leaked = []
        jit(leaked.append)(1.0)
        with self.assertRaises(jax.errors.UnexpectedTracerError):
            jit(lambda: leaked[0] + 1)()

    def test_check_tracer_leaks(self):
        leaked = []
        with jax.checking_leaks(), self.assertRaisesRegex(Exception, "Leaked"):
            jit(lambda x: leaked.append(x))(1.0)

    def test_no_false_leaks(self):
        with jax.checking_leaks():
            self.assertEqual(float(jit(lambda x: x + 1)(1.0)), 2.0)

    def test_debug_nans(self):
        with jax.debug_nans(True), self.assertRaises(FloatingPointError):
            jit(lambda x: jnp.log(x))(jnp.float32(-1.0))

    @parameterized.parameters(jit, jax.jit)
    def test_traceback_ends_in_the_users_frame(self, decorator):
        def my_function(x):
            return my_helper(x)

        def my_helper(x):
            raise RuntimeError("mine")

        try:
            decorator(my_function)(1.0)
        except RuntimeError as error:
            names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        self.assertEqual(names[-2:], ["my_function", "my_helper"])

    def test_traceback_has_no_frames_of_the_package(self):
        def my_function(x):
            raise RuntimeError("mine")

        try:
            jit(my_function)(1.0)
        except RuntimeError as error:
            frames = traceback.extract_tb(error.__traceback__)
        folder = nnx_sharding.__path__[0]
        inside = [f.name for f in frames if f.filename.startswith(folder)]
        self.assertEqual(inside, [])

    def test_message_of_a_bad_argument_names_it(self):
        with self.assertRaisesRegex(TypeError, "weights"):
            jit(lambda weights: 1)("text")

    def test_concretization_message_names_the_argument(self):
        with self.assertRaisesRegex(jax.errors.TracerBoolConversionError, "weights"):
            jit(lambda weights: 1 if weights > 0 else 2)(1.0)


class LifetimeTest(absltest.TestCase):
    class Big:
        pass

    def test_closure_is_freed_without_the_garbage_collector(self):
        """As with ``jax.jit``: no reference cycle keeps it."""
        for decorator in (jax.jit, jit):
            gc.collect()
            gc.disable()
            try:
                big = self.Big()
                ref = weakref.ref(big)
                fun = decorator(lambda x, big=big: x + 1)
                fun(1.0)
                del big, fun
                self.assertIsNone(ref(), decorator)
            finally:
                gc.enable()

    def test_static_arguments_are_freed_with_the_function(self):
        class Static:
            pass

        value = Static()
        ref = weakref.ref(value)
        fun = jit(lambda x, s: x, static_argnums=1)
        fun(1.0, value)
        del value, fun
        gc.collect()
        self.assertIsNone(ref())


class RefTest(absltest.TestCase):
    """``jax.Ref`` arguments behave as under ``jax.jit``."""

    def test_a_mutated_ref(self):
        for decorator in (jax.jit, jit):
            ref = jax.new_ref(jnp.zeros(3))

            @decorator
            def fun(ref, x):
                ref[...] += x
                return ref[...].sum()

            self.assertEqual(float(fun(ref, 1.0)), 3.0)
            self.assertEqual(float(fun(ref, 1.0)), 6.0)
            np.testing.assert_array_equal(ref[...], np.full(3, 2.0))

    def test_refs_in_a_pytree(self):
        for decorator in (jax.jit, jit):
            refs = {"a": jax.new_ref(jnp.zeros(3)), "b": [jax.new_ref(jnp.ones(()))]}

            @decorator
            def fun(refs):
                refs["a"][0] = refs["b"][0][...]

            self.assertIsNone(fun(refs))
            np.testing.assert_array_equal(refs["a"][...], [1.0, 0.0, 0.0])

    def test_a_ref_passed_twice_is_refused(self):
        kinds = []
        for decorator in (jax.jit, jit):
            ref = jax.new_ref(jnp.zeros(3))
            kinds.append(error_of(lambda: decorator(lambda a, b: a[...] + b[...])(ref, ref)))
        self.assertIs(*kinds)
        self.assertIsNotNone(kinds[0])

    def test_a_captured_ref(self):
        for decorator in (jax.jit, jit):
            ref = jax.new_ref(jnp.zeros(()))

            @decorator
            def fun(x):
                ref[...] = x

            fun(3.0)
            self.assertEqual(float(ref[...]), 3.0)

    def test_a_ref_captured_and_passed_is_refused(self):
        kinds = []
        for decorator in (jax.jit, jit):
            ref = jax.new_ref(jnp.zeros(()))
            kinds.append(error_of(lambda: decorator(lambda r: ref[...] + r[...])(ref)))
        self.assertIs(*kinds)

    def test_returned_refs_are_what_they_are_as_with_flax(self):
        """JAX refuses to return a ref; Flax does it, and its users rely on that."""

        def fun(ref):
            ref[...] += 1
            return ref, jax.new_ref(ref[...] * 10)

        for decorator in (jit, nnx.jit):
            ref = jax.new_ref(jnp.zeros(()))
            same, new = decorator(fun)(ref)
            self.assertIs(same, ref)
            self.assertIsInstance(new, jax.Ref)
            self.assertEqual((float(ref[...]), float(new[...])), (1.0, 10.0))

    def test_a_ref_made_inside(self):
        def fun(x):
            ref = jax.new_ref(x)
            ref[...] *= 2
            return jax.freeze(ref)

        assert_same(self, *both(fun, 3.0))


def _in_mesh(mesh, action):
    with jax.set_mesh(mesh):
        return action()


def shard_maps(jit_ours=True):
    """Ours and JAX's, the latter compiled like ours."""

    def theirs(f, **options):
        mapped = jax.shard_map(f, **options)
        return jax.jit(mapped) if jit_ours else mapped

    return (functools.partial(shard_map, jit=jit_ours), theirs)


class ShardMapTest(parameterized.TestCase):
    X = np.arange(64, dtype=np.float32).reshape(8, 8)

    PROGRAMS = {
        "elementwise": (lambda x: x * 2, (P("a"),), P("a")),
        "second_axis": (lambda x: x * 2, (P(None, "a"),), P(None, "a")),
        "psum": (lambda x: jax.lax.psum(x, "a"), (P("a"),), P()),
        "pmean": (lambda x: jax.lax.pmean(x.sum(), "a"), (P("a"),), P()),
        "all_gather": (
            lambda x: jax.lax.all_gather(x, "a", tiled=True)[:1],
            (P("a"),),
            P("a"),
        ),
        "ppermute": (
            lambda x: jax.lax.ppermute(x, "a", [(i, (i + 1) % 8) for i in range(8)]),
            (P("a"),),
            P("a"),
        ),
        "all_to_all": (
            lambda x: jax.lax.all_to_all(x, "a", 1, 0, tiled=True),
            (P("a"),),
            P(None, "a"),
        ),
        "psum_scatter": (
            lambda x: jax.lax.psum_scatter(x, "a", scatter_dimension=1, tiled=True),
            (P("a"),),
            P(None, "a"),
        ),
        "axis_index": (lambda x: x + jax.lax.axis_index("a"), (P("a"),), P("a")),
        "tree": (
            lambda x: {"s": jax.lax.psum(x, "a"), "x": (x, x[:, 0])},
            (P("a"),),
            {"s": P(), "x": P("a")},
        ),
        "none_out": (lambda x: None, (P("a"),), P()),
        "spec_without_tuple": (lambda x: x, P("a"), P("a")),
        "argument_returned": (lambda x: x, (P("a"),), P("a")),
        "replicated_returned": (lambda x: x, (P(),), P()),
    }

    @parameterized.named_parameters(
        (f"{name}_{kind}_{'jit' if jitted else 'eager'}", name, kind, jitted)
        for name, kind, jitted in itertools.product(PROGRAMS, ("auto", "explicit"), (True, False))
        if jitted or name in ("psum", "elementwise", "tree")
    )
    def test_same_as_jax(self, name, kind, jitted):
        body, in_specs, out_specs = self.PROGRAMS[name]
        mesh = mesh_of((8,), ("a",), kind)
        spec = in_specs[0] if type(in_specs) is tuple else in_specs
        x = jnp.asarray(self.X)
        if kind == "explicit":  # there the layout is part of the type, so it has to fit
            x = jax.device_put(x, NamedSharding(mesh, spec))
        # On explicit meshes jax.jit writes P('a', None) where jax.shard_map alone has P('a').
        decorators = (shard_maps(jitted)[0], shard_maps(jitted and kind == "auto")[1])
        ours, theirs = (
            d(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(x) for d in decorators
        )
        assert_same(self, ours, theirs, rtol=1e-6)

    @parameterized.parameters("auto", "explicit")
    def test_two_axes(self, kind):
        mesh = mesh_of((4, 2), ("a", "b"), kind)

        def body(x, y):
            return jax.lax.psum(x @ y, "b"), x.sum(1)[None]

        specs = {"in_specs": (P("a", "b"), P("b")), "out_specs": (P("a"), P("b", "a"))}
        args = [jax.device_put(self.X, NamedSharding(mesh, s)) for s in specs["in_specs"]]
        ours, theirs = (d(body, mesh=mesh, **specs)(*args) for d in (shard_map, jax.shard_map))
        assert_same(self, ours, theirs, rtol=1e-6)

    CASES = {
        "indivisible": lambda d, m: d(lambda x: x, mesh=m, in_specs=P("a"), out_specs=P("a"))(
            jnp.ones(3)
        ),
        "rank": lambda d, m: d(lambda x: x, mesh=m, in_specs=P("a", None), out_specs=P("a"))(
            jnp.ones(8)
        ),
        "unknown_axis": lambda d, m: d(lambda x: x, mesh=m, in_specs=P("z"), out_specs=P())(
            jnp.ones(8)
        ),
        "unknown_out_axis": lambda d, m: d(lambda x: x, mesh=m, in_specs=P(), out_specs=P("z"))(
            jnp.ones(8)
        ),
        "out_rank": lambda d, m: d(lambda x: x.sum(), mesh=m, in_specs=P("a"), out_specs=P("a"))(
            jnp.ones(8)
        ),
        "not_replicated": lambda d, m: d(lambda x: x, mesh=m, in_specs=P("a"), out_specs=P())(
            jnp.ones(8)
        ),
        "spec_structure": lambda d, m: d(
            lambda x: x, mesh=m, in_specs=({"a": P()},), out_specs=P()
        )(jnp.ones(8)),
        "too_few_specs": lambda d, m: d(lambda x, y: x, mesh=m, in_specs=(P(),), out_specs=P())(
            jnp.ones(8), jnp.ones(8)
        ),
        "too_many_specs": lambda d, m: d(lambda x: x, mesh=m, in_specs=(P(), P()), out_specs=P())(
            jnp.ones(8)
        ),
        "out_structure": lambda d, m: d(lambda x: x, mesh=m, in_specs=P(), out_specs=(P(), P()))(
            jnp.ones(8)
        ),
        "spec_type": lambda d, m: d(lambda x: x, mesh=m, in_specs=("a",), out_specs=P())(
            jnp.ones(8)
        ),
        "out_spec_type": lambda d, m: d(lambda x: x, mesh=m, in_specs=P(), out_specs="a")(
            jnp.ones(8)
        ),
        "axis_names": lambda d, m: d(
            lambda x: x, mesh=m, in_specs=P(), out_specs=P(), axis_names={"z"}
        )(jnp.ones(8)),
        "mesh_type": lambda d, m: d(lambda x: x, mesh=3, in_specs=P(), out_specs=P())(jnp.ones(8)),
        "no_mesh": lambda d, m: d(lambda x: x, in_specs=P(), out_specs=P())(jnp.ones(8)),
        "not_callable": lambda d, m: d(3, mesh=m, in_specs=P(), out_specs=P()),
        "string_output": lambda d, m: d(lambda x: "t", mesh=m, in_specs=P(), out_specs=P())(1.0),
        "own_error": lambda d, m: d(lambda x: {}["k"], mesh=m, in_specs=P(), out_specs=P())(1.0),
        "unknown_collective_axis": lambda d, m: d(
            lambda x: jax.lax.psum(x, "z"), mesh=m, in_specs=P(), out_specs=P()
        )(jnp.ones(8)),
        "inferred_on_auto": lambda d, m: d(lambda x: x, mesh=m, out_specs=P())(jnp.ones(8)),
        "no_out_specs": lambda d, m: d(lambda x: x, mesh=m, in_specs=P()),
        "numpy_output": lambda d, m: d(
            lambda x: np.asarray(jax.lax.axis_index("a")), mesh=m, in_specs=P(), out_specs=P()
        )(jnp.ones(8)),
        "mesh_and_context": lambda d, m: _in_mesh(
            mesh_of((8,), ("b",)),
            lambda: d(lambda x: x, mesh=m, in_specs=P(), out_specs=P())(jnp.ones(8)),
        ),
    }

    @parameterized.named_parameters((name, name) for name in CASES)
    def test_error_type(self, name):
        case, mesh = self.CASES[name], mesh_of((8,), ("a",))
        expected = error_of(lambda: case(jax.shard_map, mesh))
        self.assertIsNotNone(expected, "jax.shard_map raises nothing: the case tests nothing")
        error = error_of(lambda: case(shard_map, mesh))
        self.assertIn(error, (expected, NoMeshError))
        self.assertTrue(issubclass(error, expected))

    def test_compiled_once(self):
        counted = Counted(lambda x: x + 1)
        fun = shard_map(counted.fun, mesh=mesh_of((8,), ("a",)), in_specs=P("a"), out_specs=P("a"))
        fun(jnp.ones(8))
        first = counted.count
        for _ in range(3):
            fun(jnp.ones(8))
        self.assertEqual((first, counted.count), (1, 1))

    def test_types_of_results(self):
        mesh = mesh_of((8,), ("a",))
        x = jnp.asarray(1.0) * 1
        for value in (x, 1.0, np.float32(1), jnp.bfloat16(1), jax.random.key(0)):
            ours, theirs = (
                d(lambda x: x, mesh=mesh, in_specs=P(), out_specs=P())(value) for d in shard_maps()
            )
            self.assertEqual(describe(ours), describe(theirs))


if __name__ == "__main__":
    absltest.main()


class FromJaxTest(parameterized.TestCase):
    """Small things that JAX's own tests ask for."""

    def test_lowering_for_whatever_has_a_shape_and_a_dtype(self):
        class Duck:
            shape, dtype = (3,), np.dtype("float32")

        for jit_ in (jit, jax.jit):
            lowered = jit_(lambda x: x * 2).lower(Duck())
            self.assertEqual((lowered.out_info.shape, lowered.out_info.dtype), ((3,), np.float32))

    def test_function_without_weak_references(self):
        self.assertEqual(float(jit(lambda: np.float32(2))()), 2.0)
        np.testing.assert_array_equal(jit(np.shape)(jnp.ones((2, 3))), (2, 3))

    def test_device_warns_at_the_decoration_and_only_there(self):
        with self.assertWarns(DeprecationWarning):
            fun = jit(lambda x: x + 1, device=jax.devices()[1])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.assertEqual(fun(1.0).devices(), {jax.devices()[1]})

    def test_positions_may_be_numbers_of_numpy(self):
        fun = jit(lambda x, n: x * [2, 3][n], static_argnums=np.int64(1))
        self.assertEqual(float(fun(1.0, 1)), 3.0)

    def test_partial_has_the_name_of_its_function(self):
        def named(x, y):
            return x + y

        for jit_ in (jit, jax.jit):
            traced = jit_(functools.partial(named, 1.0)).trace(2.0)
            self.assertEqual(traced.fun_name, "named")

    def test_repr_of_a_function_without_one(self):
        class Bad:
            def __call__(self, x):
                return x

            def __repr__(self):
                raise ValueError("no repr")

        self.assertIn("Bad", repr(jit(Bad())))

    def test_missing_mesh_is_the_error_of_jax(self):
        for jit_ in (jit, jax.jit):
            with self.assertRaises(RuntimeError):
                jit_(lambda x: x, in_shardings=P("a"))(jnp.ones(8))


@jax.tree_util.register_pytree_node_class
class Picky:
    """A pytree whose constructor takes arrays and numbers only."""

    def __init__(self, x):
        if not isinstance(x, jax.Array | float):
            raise TypeError(type(x))
        self.x = x

    def tree_flatten(self):
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


class PytreesOfTheUserTest(absltest.TestCase):
    def test_classes_that_check_their_children(self):
        mesh = mesh_of((8,), ("a",))
        for options in ({}, {"in_shardings": P(), "out_shardings": P(), "mesh": mesh}):
            self.assertEqual(float(jit(lambda v: Picky(v.x * 2), **options)(Picky(1.0)).x), 2.0)

    def test_nested_partition_spec_gives_a_named_sharding(self):
        mesh, x = mesh_of((8,), ("a",)), jnp.ones(8)
        found = []
        for jit_ in (jit, jax.jit):
            inner = jit_(lambda x: x * 2, in_shardings=P("a"), out_shardings=P("a"))
            with jax.set_mesh(mesh):
                found.append(jax.jit(lambda x, inner=inner: inner(x) + 1)(x).sharding)
        self.assertEqual(found[0], found[1])

    def test_staging_shares_the_trace_of_a_call(self):
        sharding = NamedSharding(mesh_of((8,), ("a",)), P("a"))
        counts = []
        for jit_ in (jit, jax.jit):
            counted = Counted(lambda x: x + 1)
            fun = jit_(counted.fun, in_shardings=sharding)
            fun(np.ones(8, np.float32))
            fun.lower(np.ones(8, np.float32))
            counts.append(counted.count)
        self.assertEqual(counts, [1, 1])

    def test_a_string_is_no_set_of_axes(self):
        with self.assertRaises(TypeError):
            shard_map(lambda x: x, mesh=mesh_of((8,), ("a",)), out_specs=P(), axis_names="a")
