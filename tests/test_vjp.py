"""``vjp``, ``jvp`` and ``linearize``: what ``flax.nnx`` and plain JAX compute."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_sharding
from graphs import Memory
from libraries import FULL, WITHOUT_UPDATES, Statistics, assert_same, node
from nnx_sharding import jvp, linearize, vjp

X = jnp.linspace(-1, 1, 3)
FLOAT0 = jax.dtypes.float0
# Flax has no vjp and jvp with graph updates.


class Model(Statistics):
    def __call__(self, x):
        self.count[...] += 1
        self.mean[...] = self.mean[...] + x * self.w[...]
        return {"y": self.dropout(self.w[...] ** 2 * x + self.mean[...]), "n": self.count[...]}


def apply(m, x):
    return m(x)


def with_aux(m, x):
    out = m(x)
    return out["y"], {"note": out["n"], "flag": True}


def tangents_like(tree, value=1.0):
    def tangent(x):
        is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        return jnp.full_like(x, value) if is_inexact else np.zeros(x.shape, FLOAT0)

    return jax.tree.map(tangent, tree)


def pulled_back(lib, **modes):
    m = Model()
    out, pullback = lib.vjp(apply, m, X, **modes)
    cotangents = [{"y": y, "n": np.zeros((), FLOAT0)} for y in (X, jnp.ones(3))]
    return out, [pullback(x) for x in cotangents], nnx.state(m)


def pulled_back_with_aux(lib, **modes):
    m = Model()
    out, pullback, aux = lib.vjp(with_aux, m, X, has_aux=True, **modes)
    return out, pullback(X), jax.tree.map(jnp.asarray, aux), nnx.state(m)


def pushed_forward(lib, **modes):
    m = Model()
    primals = m, X
    return lib.jvp(apply, primals, tangents_like(primals), **modes), nnx.state(m)


def pushed_forward_with_aux(lib, **modes):
    primals = Model(), X
    out = lib.jvp(with_aux, primals, tangents_like(primals), has_aux=True, **modes)
    return jax.tree.map(jnp.asarray, out)


def as_decorators(lib, **modes):
    one = lib.vjp(**modes)(lambda x: x**2)
    other = lib.jvp(**modes)(lambda x: x**2)
    return one(X)[1](X), lib.vjp(jnp.sin, **modes)(X)[0], other((X,), (X,))


PROGRAMS = (
    *(pulled_back, pulled_back_with_aux, pushed_forward, pushed_forward_with_aux),
    as_decorators,
)


class ValuesTest(parameterized.TestCase):
    @parameterized.product(program=PROGRAMS, modes=WITHOUT_UPDATES)
    def test_as_in_flax(self, program, modes):
        assert_same(program(nnx_sharding, **modes), program(nnx, **modes))

    @parameterized.parameters(*PROGRAMS)
    def test_graph_updates_change_nothing(self, program):
        full = program(nnx_sharding, **FULL)
        assert_same(full, program(nnx_sharding, graph=False))

    def test_attributes_are_set_with_graph_updates(self):
        def fun(m, x):
            m.seen = nnx.Intermediate(x)
            return x * m.w[...]

        m = Model()
        _, pullback = vjp(fun, m, X, **FULL)
        assert jnp.array_equal(m.seen[...], X)
        of_model, of_x = pullback(jnp.ones(3))
        assert not hasattr(of_model, "seen") and jnp.array_equal(of_x, m.w[...])

    def test_shared_variables_have_one_cotangent(self):
        w = nnx.Param(jnp.float32(3))
        a, b = node(w=w), node(w=w)
        _, pullback = vjp(lambda a, b: a.w[...] * b.w[...], a, b, **FULL)
        of_a, of_b = pullback(1.0)
        assert of_a.w is of_b.w and float(of_a.w[...]) == 6
        assert a.w is w and float(w[...]) == 3

    def test_modules_as_outputs(self):
        _, pullback = vjp(lambda x: node(w=nnx.Param(x**2)), X)
        [of_x] = pullback(node(w=nnx.Param(jnp.ones(3))))
        np.testing.assert_allclose(of_x, 2 * X)
        _, tangent = jvp(lambda x: node(w=nnx.Param(x**2)), (X,), (jnp.ones(3),))
        assert type(tangent.w) is nnx.Param
        np.testing.assert_allclose(tangent.w[...], 2 * X)

    def test_methods_are_not_differentiated_but_updated(self):
        m = Model()
        _, pullback = vjp(m.__call__, X)
        of_x = pullback({"y": jnp.ones(3), "n": np.zeros((), FLOAT0)})
        assert len(of_x) == 1 and int(m.count[...]) == 1

    def test_linearize(self):
        primals = Model(), X
        _, pushforward = linearize(apply, *primals)
        for scale in (1.0, 2.0):
            tangents = tangents_like(primals, scale)
            expected = jvp(apply, (Model(), X), tangents_like((Model(), X), scale))[1]
            assert_same(pushforward(*tangents), expected)
        assert int(primals[0].count[...]) == 1
        assert linearize(with_aux, Model(), X, has_aux=True)[2]["flag"] is True


class NestingTest(parameterized.TestCase):
    @parameterized.parameters(
        ((AxisType.Auto, AxisType.Auto),),
        ((AxisType.Explicit, AxisType.Explicit),),
        ((AxisType.Explicit, AxisType.Auto),),
    )
    def test_sharded(self, types):
        mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=types)
        weights, batch = jnp.arange(64.0).reshape(8, 8) / 640, jnp.ones((4, 8))
        expected = jax.vjp(lambda w, x: jnp.tanh(x * w.sum(0)), weights, batch)[1](batch)
        with jax.set_mesh(mesh):
            specs = NamedSharding(mesh, P("model")), NamedSharding(mesh, P("data"))
            model = node(w=nnx.Param(jax.device_put(weights, specs[0])))
            x = jax.device_put(batch, specs[1])

            @nnx_sharding.jit
            def run(model, x):
                y, pullback = vjp(lambda m, x: jnp.tanh(x * m.w[...].sum(0)), model, x)
                return pullback(jnp.ones_like(y))

            of_model, of_x = run(model, x)
        np.testing.assert_allclose(of_model.w[...], expected[0], rtol=1e-5)
        np.testing.assert_allclose(of_x, expected[1], rtol=1e-5)
        if types[0] == AxisType.Explicit:
            assert of_x.sharding.is_equivalent_to(specs[1], 2)


class ErrorsTest(parameterized.TestCase):
    @parameterized.parameters(
        (
            TypeError,
            "cotangents['y']: float32[2], expected float32[3]",
            lambda m: vjp(apply, m, X)[1]({"y": jnp.ones(2), "n": 0}),
        ),
        (
            TypeError,
            "cotangents['y']: int32[3], expected float32[3]",
            lambda m: vjp(apply, m, X)[1]({"y": jnp.arange(3), "n": 0}),
        ),
        (
            ValueError,
            "the structure of float32[3] is not that of their values:\n  cotangents['n']: missing",
            lambda m: vjp(apply, m, X)[1](X),
        ),
        (
            TypeError,
            "vjp: with has_aux=True apply must return a pair (output, aux)",
            lambda m: vjp(apply, m, X, has_aux=True),
        ),
        (
            ValueError,
            "jvp: tangents: the structure of (float32[3], float32[3])",
            lambda m: jvp(apply, (m, X), (X, X)),
        ),
        (
            TypeError,
            "tangents[1]: float32[2], expected float32[3]",
            lambda m: jvp(apply, (m, X), (tangents_like(m), X[:2])),
        ),
        (
            TypeError,
            "tangents[0]: complex64[], expected float32[]",
            lambda m: jvp(jnp.sin, (1.0,), (jnp.asarray(1j),)),
        ),
        (
            TypeError,
            "tangents[0].w: int32[3], expected float32[3]",
            lambda m: linearize(apply, m, X)[1](
                jax.tree.map(lambda x: x.astype(int) if x.shape else x, tangents_like(m)), X
            ),
        ),
        (
            TraceContextError,
            "m.count, which <lambda> captures",
            lambda m: vjp(lambda x: m(x), X),
        ),
    )
    def test_error(self, kind, message, call):
        with pytest.raises(kind, match=re.escape(message)):
            call(Model())

    def test_nothing_changes(self):
        m = Model()
        memory = Memory(m)
        for fails in (
            functools.partial(vjp, apply, m, X, has_aux=True),
            functools.partial(jvp, apply, (m, X), (m, X[:2])),
        ):
            with pytest.raises(TypeError):
                fails()
        memory.assert_unchanged()
