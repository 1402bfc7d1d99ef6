"""``custom_vjp`` and ``custom_jvp``: what ``flax.nnx`` and plain JAX compute."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_sharding
from graphs import Memory
from libraries import FULL, WITHOUT_UPDATES, assert_same, node
from nnx_sharding import custom_jvp, custom_vjp, jit, jvp, remat, scan, vmap

X = jnp.linspace(0.1, 1, 3)
# In any mode of Flax, gradients of modules are states.
grad = functools.partial(nnx_sharding.grad, **FULL)


class Model(nnx.Module):
    """Two parameters and a counter."""

    def __init__(self):
        self.a = nnx.Param(jnp.arange(1.0, 4.0))
        self.b = nnx.Param(jnp.full(3, 2.0))
        self.calls = nnx.BatchStat(jnp.float32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return jnp.sin(self.a[...] * x) * self.b[...]


def cotangents(m, x, g):
    """Ten times those of a, and a third of those of x: rules that no derivative has."""
    cos, sin = jnp.cos(m.a[...] * x), jnp.sin(m.a[...] * x)
    of_a, of_b, of_x = 10 * g * cos * x * m.b[...], g * sin, g * cos * m.a[...] * m.b[...] / 3
    return of_a, of_b, of_x


# Programs for either library. Each returns all that can be seen of the outcome.


def with_modules(lib, **modes):
    @functools.partial(lib.custom_vjp, **modes)
    def f(m, x):
        return m(x)

    def fwd(m, x):
        return m(x), (m, x)

    def bwd(residuals, g):
        m, x = residuals
        of_a, of_b, of_x = cotangents(m, x, g)
        of_m = nnx.clone(m)
        of_m.a[...], of_m.b[...], of_m.calls[...] = of_a, of_b, jnp.float32(0)
        return of_m, of_x

    f.defvjp(fwd, bwd)
    m = Model()
    loss = lib.value_and_grad(lambda m, x: f(m, x).sum(), argnums=(0, 1), **modes)
    return f(Model(), X), f(m=Model(), x=X), loss(m, X), nnx.state(m)


def with_updates(lib, **modes):
    """The rule sees the cotangent of the counter."""

    @lib.custom_vjp(**modes)
    def f(m, x):
        return m(x)

    def fwd(m, x):
        return f(m, x), (m, x)

    def bwd(residuals, g, *, updates_g):
        m, x = residuals
        of_a, of_b, of_x = cotangents(m, x, g)
        of_m = nnx.clone(m)
        of_m.a[...], of_m.b[...] = of_a, of_b
        of_m.calls[...] = updates_g[0].calls[...] + (updates_g[0].a is None)
        return of_m, of_x

    f.defvjp(fwd, bwd)

    def loss(m, x):
        return f(m, x).sum() + 3 * m.calls[...]

    m = Model()
    return lib.grad(loss, **modes)(m, X), nnx.state(m)


def with_nondiff(lib, **modes):
    @functools.partial(lib.custom_vjp, nondiff_argnums=(0, 2), **modes)
    def f(mode, x, factor):
        return x * factor if mode == "times" else x

    def fwd(mode, x, factor):
        return f(mode, x, factor), ()

    def bwd(mode, factor, residuals, g):
        assert (mode, factor, residuals) == ("times", 3.0, ())
        return (g * 100,)

    f.defvjp(fwd, bwd)
    return lib.value_and_grad(lambda x: f("times", x, 3.0).sum(), **modes)(X)


def with_states(lib, **modes):
    """Flax's contract with graph updates."""

    @lib.custom_vjp(**modes)
    def f(m, x):
        return m(x)

    def fwd(m, x):
        y = f(m, x)
        return y, (m, x)

    def bwd(residuals, g):
        (of_state, nothing), g = g
        assert nothing is None
        m, x = residuals
        of_a, of_b, of_x = cotangents(m, x, g)
        of_m = jax.tree.map(lambda x: x, of_state)
        of_m["a"][...], of_m["b"][...] = of_a, of_b
        return of_m, of_x

    f.defvjp(fwd, bwd)

    def loss(m, x):
        return f(m, x).sum() + 3 * m.calls[...]

    m = Model()
    filters = nnx.DiffState(0, ...), 1
    return lib.grad(loss, argnums=filters, **modes)(m, X), nnx.state(m), f(m, X), nnx.state(m)


def with_filters(lib, **modes):
    only_a = nnx.DiffState(0, nnx.PathContains("a"))

    @lib.custom_vjp(nondiff_argnums=(only_a,), **modes)
    def f(m):
        return m(X)

    def fwd(m):
        return f(m), m

    def bwd(m, g):
        (of_state,), g = g
        of_m = jax.tree.map(lambda x: x, of_state)
        of_m["a"][...] = cotangents(m, X, g)[0]
        del of_m["b"], of_m["calls"]
        return (of_m,)

    f.defvjp(fwd, bwd)
    return lib.grad(lambda m: f(m).sum(), argnums=only_a, **modes)(Model())


class AsFlaxTest(parameterized.TestCase):
    @parameterized.parameters(
        *((p, m) for p in (with_modules, with_updates, with_nondiff) for m in WITHOUT_UPDATES),
        (with_states, FULL),
        (with_filters, FULL),
    )
    def test_program(self, program, modes):
        assert_same(program(nnx_sharding, **modes), program(nnx, **modes))


def scaled(make=custom_vjp, fun=lambda m, x: m(x)):
    """A function that counts its calls, and whose derivative is doubled."""
    f = make(fun, graph_updates=False)
    if make is custom_vjp:

        def bwd(residuals, g):
            m, x = residuals
            of_a, of_b, of_x = cotangents(m, x, 2 * g)
            of_m = node(a=nnx.Param(of_a / 10), b=nnx.Param(of_b), calls=nnx.BatchStat(0 * X[0]))
            return of_m, 3 * of_x

        f.defvjp(lambda m, x: (fun(m, x), (m, x)), bwd)
    else:

        @f.defjvp
        def rule(primals, tangents):
            (m, x), (of_m, of_x) = primals, tangents
            cos, sin = jnp.cos(m.a[...] * x), jnp.sin(m.a[...] * x)
            of_y = cos * (of_m.a[...] * x + of_x * m.a[...]) * m.b[...] + sin * of_m.b[...]
            return fun(m, x), 2 * of_y

    return f


def plain(a, b, x):
    """The same with ``jax.custom_vjp``."""

    @jax.custom_vjp
    def double(y):
        return y

    double.defvjp(lambda y: (y, None), lambda _, g: (2 * g,))
    return double(jnp.sin(a * x) * b)


RULES = custom_vjp, custom_jvp


class AsJaxTest(parameterized.TestCase):
    def check(self, transform, around=lambda f: f):
        """``transform`` of our function, and ``around`` of the plain one, are the same."""
        for make in RULES:
            m, f = Model(), transform(scaled(make))
            out, (of_m, of_x) = grad_of(f)(m, X)
            expected = jax.value_and_grad(lambda *x: around(plain)(*x).sum(), argnums=(0, 1, 2))
            value, (of_a, of_b, other) = expected(m.a[...], m.b[...], X)
            for ours, theirs in ((out, value), (of_m["a"][...], of_a), (of_m["b"][...], of_b)):
                np.testing.assert_allclose(ours, theirs, rtol=1e-5)
            np.testing.assert_allclose(of_x, other, rtol=1e-5)
            assert float(m.calls[...]) == 1

    def test_eager(self):
        self.check(lambda f: f)

    def test_in_jit(self):
        self.check(jit)
        self.check(lambda f: jit(lambda m, x: remat(f)(m, x)))

    def test_in_grad_of_jit_of_grad(self):
        for make in RULES:
            run = jit(grad_of(jit(scaled(make))))
            assert_same(run(Model(), X), grad_of(scaled(make))(Model(), X))

    def test_in_vmap_and_scan(self):
        for make in RULES:
            f, xs = scaled(make), jnp.stack([X, 2 * X])

            def scanned(m, xs, f=f):
                def step(m, x):
                    return m, f(m, x)

                return scan(step, in_axes=(nnx_sharding.Carry, 0))(m, xs)[1]

            m = Model()
            expected = jax.grad(lambda a: jax.vmap(lambda x: plain(a, m.b[...], x))(xs).sum())
            ours = jit(grad(lambda m, xs: scanned(m, xs).sum()))(m, xs)
            np.testing.assert_allclose(ours["a"][...], expected(m.a[...]), rtol=1e-5)
            assert float(m.calls[...]) == 2
            silent = scaled(make, lambda m, x: jnp.sin(m.a[...] * x) * m.b[...])
            ours = jit(grad(lambda m, xs: vmap(silent, in_axes=(None, 0))(m, xs).sum()))(m, xs)
            np.testing.assert_allclose(ours["a"][...], expected(m.a[...]), rtol=1e-5)

    @parameterized.parameters(
        ((AxisType.Auto, AxisType.Auto),),
        ((AxisType.Explicit, AxisType.Explicit),),
        ((AxisType.Explicit, AxisType.Auto),),
    )
    def test_sharded(self, types):
        mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=types)
        for make in RULES:
            expected = grad_of(scaled(make))(Model(), X)
            with jax.set_mesh(mesh):
                m = Model()
                for v in (m.a, m.b):
                    wide = jnp.tile(v[...], 4)
                    v.set_value(jax.device_put(wide, NamedSharding(mesh, P("model"))))
                x = jax.device_put(jnp.tile(X, 4), NamedSharding(mesh, P("model")))
                _, (of_m, of_x) = jit(grad_of(scaled(make)))(m, x)
            for ours, theirs in ((of_m["a"], expected[1][0]["a"]), (of_x, expected[1][1])):
                np.testing.assert_allclose(ours[...], jnp.tile(theirs[...], 4), rtol=1e-5)
            if types[1] == AxisType.Explicit:
                assert of_x.sharding.spec == P("model") == of_m["a"][...].sharding.spec


def grad_of(f):
    return nnx_sharding.value_and_grad(lambda m, x: f(m, x).sum(), argnums=(0, 1), **FULL)


class OwnTest(parameterized.TestCase):
    def test_what_is_unchanged_keeps_its_gradient(self):
        """Flax gives parameters that are used again the gradient of the rule alone."""
        f, m = scaled(), Model()
        both = grad(lambda m: f(m, X).sum() + (m.a[...] ** 2).sum())(m)
        alone = grad(lambda m: f(m, X).sum())(m)
        np.testing.assert_allclose(both["a"][...], alone["a"][...] + 2 * m.a[...], rtol=1e-6)

    @parameterized.parameters({"note": [1]}, {"note": {"a": object()}})
    def test_objects_in_metadata(self, note):
        m, seen = Model(), []
        m.a.set_metadata(note=note)

        @custom_vjp(**FULL)
        def f(m):
            return m(X).sum()

        def backward(_, cotangents):
            [[of_model], _] = cotangents
            seen.append(of_model["a"].get_metadata("note"))
            return (of_model,)

        f.defvjp(lambda m: (f(m), None), backward)
        grad(f)(m)
        assert seen == [note]

    def test_methods(self):
        class Layer(Model):
            @custom_vjp(graph_updates=False)
            def run(self, x):
                return self(x)

            @custom_jvp(nondiff_argnums=(1,))
            def times(self, n):
                return self.a[...] * n

        Layer.run.defvjp(lambda m, x: (m(x), None), lambda _, g: (None, 7 * g))

        @Layer.times.defjvp
        def rule(n, primals, tangents):
            return primals[0].a[...] * n, 5 * n * tangents[0].a[...]

        layer = Layer()
        of_x = grad(lambda x, m: m.run(x).sum())(X, layer)
        np.testing.assert_allclose(of_x, jnp.full(3, 7.0))
        assert float(layer.calls[...]) == 1
        np.testing.assert_allclose(grad(lambda m: m.times(2).sum())(layer)["a"][...], [10] * 3)

    def test_tangents_of_changed_variables(self):
        @custom_jvp
        def f(m, x):
            m.b[...] = x
            return x

        @f.defjvp
        def rule(primals, tangents):
            (m, x), (of_m, of_x) = primals, tangents
            m.b[...], of_m.b[...] = x, 4 * of_x
            return x, of_x

        def after(x):
            m = Model()
            f(m, x)
            return m.b[...]

        np.testing.assert_allclose(jvp(after, (X,), (jnp.ones(3),))[1], [4] * 3)

    def test_traced_nondifferentiated_arguments_and_modules_as_outputs(self):
        f = custom_vjp(lambda n, x: node(y=nnx.Param(n * x)), nondiff_argnums=(0,), **FULL)
        f.defvjp(lambda n, x: (f(n, x), x), lambda n, x, g: (n * g[1]["y"][...] + x,))
        found = jit(lambda n, x: grad(lambda x: f(n, x).y[...].sum())(x))(jnp.float32(3), X)
        np.testing.assert_allclose(found, 3 + X)

    def test_nothing_changes_if_a_rule_fails(self):
        m, f = Model(), custom_vjp(lambda m: m(X).sum())
        f.defvjp(lambda m: (m(X).sum(), m), lambda m, g: (1 / 0,))
        memory = Memory(m)
        with pytest.raises(ZeroDivisionError):
            grad(f)(m)
        memory.assert_unchanged()


def with_rules(fwd, bwd, **options):
    f = custom_vjp(lambda m, x: m(x), graph_updates=False, **options)
    f.defvjp(fwd, bwd)
    return lambda m: jit(lambda m: grad(lambda m: jit(f)(m, X).sum())(m))(m)


class ErrorsTest(parameterized.TestCase):
    @parameterized.parameters(
        (TypeError, "custom_vjp: f has no rule. Call f.defvjp(fwd, bwd)", lambda m: unruled()(m)),
        (
            TypeError,
            "<lambda> must return a pair (output, residuals), got float32[3]",
            with_rules(lambda m, x: m(x), None),
        ),
        (
            ValueError,
            "to change the same Variables:\n  m.calls: changed by <lambda> only",
            with_rules(lambda m, x: (m.a[...] * x, None), None),
        ),
        (
            ValueError,
            "cotangents[0].calls: missing",
            with_rules(lambda m, x: (m(x), None), lambda _, g: (node(a=X, b=X), g)),
        ),
        (
            TypeError,
            "cotangents[1]: float32[2], expected float32[3]",
            with_rules(lambda m, x: (m(x), m), lambda m, g: (m, g[:2])),
        ),
        (TypeError, "different positions", lambda m: custom_vjp(len, nondiff_argnums=(0, 0))),
        (
            ValueError,
            "nnx.DiffState, which only custom_vjp takes",
            lambda m: custom_jvp(len, nondiff_argnums=(nnx.DiffState(0, ...),)),
        ),
        (
            ValueError,
            "nnx.DiffState, which needs graph=True and graph_updates=True. ",
            lambda m: custom_vjp(len, nondiff_argnums=(nnx.DiffState(0, ...),), graph=False),
        ),
        (ValueError, "__call__ is a bound method", lambda m: custom_vjp(m.__call__)),
        (
            Exception,
            "m.calls, which <lambda> captures",
            lambda m: jit(lambda x: closed(m)(x))(X),
        ),
    )
    def test_error(self, kind, message, call):
        with pytest.raises(kind, match=re.escape(message)):
            call(Model())


def unruled():
    @custom_vjp
    def f(m):
        return m

    return f


def closed(m):
    f = custom_vjp(lambda x: m(x))
    f.defvjp(lambda x: (m(x), None), lambda _, g: (g,))
    return f
