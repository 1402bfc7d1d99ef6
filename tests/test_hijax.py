"""Variables made with ``hijax=True`` behave as the same model without them."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from flax import nnx
from flax.errors import ImmutableVariableError
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_sharding
from libraries import Transforms, named, node
from nnx_sharding import (
    Carry,
    cond,
    grad,
    jit,
    jvp,
    linearize,
    merge,
    remat,
    scan,
    shard_map,
    split,
    vjp,
    vmap,
)
from zoo import mesh_of

X = jnp.linspace(-1, 1, 4)


class Model(nnx.Module):
    """A parameter and a counter."""

    def __init__(self, **options):
        self.w = nnx.Param(jnp.arange(1.0, 5.0), hijax="hijax" in options)
        self.n = nnx.BatchStat(jnp.float32(0), **options)

    def __call__(self, x):
        self.n[...] += 1
        return self.w[...] * x


def apply(m, x):
    return m(x)


def loss(m, x):
    return (m(x) ** 2).sum()


# Programs of a model; each returns arrays.


def compiled(m):
    call = jit(apply)
    return call(m, X), call(m, X), jit(lambda m: m)(m) is m


def differentiated(m):
    _, pullback = vjp(apply, m, X)
    whole = grad(loss, wrt=..., graph=False)(m, X)
    return grad(loss)(m, X)["w"][...], pullback(X)[0].w[...], whole["n"][...]


def differentiated_as_modules(m):
    return grad(loss, graph=False)(m, X).w[...], jit(grad(loss, graph=False))(m, X).w[...]


def mapped(m):
    models = vmap(lambda m, s: m.w * s, in_axes=(None, 0))(m, X)
    axes = nnx_sharding.StateAxes({nnx.Param: 0, ...: None})
    return models, vmap(lambda m, x: m.w * x, in_axes=(axes, 0))(m, X)


def looped(m):
    xs = jnp.stack([X, 2 * X])
    return scan(lambda m, x: (m, m(x)), in_axes=(Carry, 0))(m, xs)[1]


def recomputed(m):
    return grad(lambda m, x: remat(loss)(m, x))(m, X)["w"][...]


def branched(m):
    return [cond(p, apply, lambda m, x: x, m, X) for p in (True, False)]


def split_and_merged(m):
    structure, state = split(m)
    other = merge(structure, jax.tree.map(lambda x: 2 * x, state))
    assert type(other.w) is type(m.w)
    merge(structure, state, into=m)
    return other(X), m(X)


def made_inside(m):
    other = jit(lambda x: Model(**({"hijax": True} if type(m.w) is not nnx.Param else {})))(X)
    assert type(other.w) is type(m.w)
    return other(X)


def trained(m):
    optimizer = nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param)

    @jit
    def step(m, optimizer):
        optimizer.update(m, grad(loss)(m, X))

    step(m, optimizer)
    step(m, optimizer)
    return optimizer.step[...]


def sharded(m):
    mesh = mesh_of((4,), ("data",))
    m.w.set_value(jax.device_put(m.w[...], NamedSharding(mesh, P("data"))))
    sharding = nnx_sharding.StateSharding({nnx.Param: P("data"), ...: P()})
    y = jit(apply, in_shardings=(sharding, P("data")), mesh=mesh)(m, X)
    specs = {"mesh": mesh, "in_specs": (sharding, P("data")), "out_specs": P("data")}
    return y, shard_map(apply, **specs)(m, X)


PROGRAMS = (
    *(compiled, differentiated, differentiated_as_modules, mapped, looped, recomputed),
    *(branched, split_and_merged, made_inside, trained, sharded),
)


class AsPlainTest(parameterized.TestCase):
    @parameterized.named_parameters(named(PROGRAMS))
    def test_program(self, program):
        one, other = Model(), Model(hijax=True)
        kind = type(other.w)
        expected, found = program(one), program(other)
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
        for name in ("w", "n"):
            before, after = getattr(one, name)[...], getattr(other, name)[...]
            np.testing.assert_allclose(before, after, rtol=1e-6)
            assert type(getattr(other, name)) is kind

    @parameterized.parameters(*itertools.product((True, False), repeat=3))
    def test_repeated_calls_are_guarded(self, graph, updates, donates):
        options = {"donate_argnums": 0} if donates else {}
        fun = jit(lambda m, x: m(x), graph=graph, graph_updates=updates, **options)
        one, other, values = Model(), Model(hijax=True), []
        for number in range(6):
            if number == 4:  # as who restores a checkpoint does
                one.w[...], other.w[...] = X, X + 0
            if number == 5:
                other.w.set_metadata(mark=1)
            values.append(other.w[...])
            found = fun._guards.find((other, X), {})
            assert (found is not None) == (number in (1, 2, 3, 4)), number
            np.testing.assert_allclose(fun(other, X), apply(one, X), rtol=1e-6)
            np.testing.assert_allclose(other.n[...], one.n[...])
            assert (other.w[...] is values[-1]) != donates
            assert values[-1].is_deleted() == donates

    def test_a_call_that_fails_changes_nothing(self):
        def fail(m, x):
            m.n[...] += 1
            return m.w[...] * x + jnp.ones(3)

        m = Model(hijax=True)
        kept = m.w[...], m.n[...]
        for _ in range(2):
            with pytest.raises(TypeError, match="shape"):
                jit(fail)(m, X)
            assert (m.w[...] is kept[0]) and m.n[...] is kept[1]

    def test_references_in_them(self):
        for transform in (jit, grad):
            m = Model(hijax=True, ref=True)
            fun = transform(loss)
            expected = transform(loss)(Model(), X)
            for a, b in zip(*map(jax.tree.leaves, (fun(m, X), expected)), strict=True):
                np.testing.assert_allclose(a, b)
            assert float(m.n[...]) == 1 and m.n.ref

    def test_at_a_point_references_have_no_tangents(self):
        for options in {"ref": True}, {"hijax": True, "ref": True}:
            m = Model(**options)
            expected, pullback = vjp(apply, Model(), X)
            y, pull = vjp(apply, m, X)
            np.testing.assert_allclose(y, expected)
            for a, b in zip(pull(X), pullback(X), strict=True):
                np.testing.assert_allclose(*(getattr(x, "w", x)[...] for x in (a, b)))
            assert linearize(apply, m, X)[0].tolist() == y.tolist()
            of_model, of_x = jax.tree.map(jnp.ones_like, Model()), jnp.ones_like(X)
            of_model.n = m.n
            _, tangent = jvp(apply, (m, X), (of_model, of_x))
            np.testing.assert_allclose(tangent, X + m.w[...])
            assert float(m.n[...]) == 3

    def test_shared(self):
        v = nnx.Variable(jnp.float32(1), hijax=True)

        @jit
        def f(v, w):
            assert v is w
            v[...] += 1
            return v * 2

        assert [float(f(v, v)) for _ in range(2)] == [4, 6]
        assert float(v[...]) == 3

    def test_under_jax_they_are_what_flax_makes_of_them(self):
        v = nnx.Param(X, hijax=True)
        y = jax.jit(lambda v: grad(lambda v, x: (v * x).sum(), argnums=1)(v, X))(v)
        np.testing.assert_allclose(y, X)

        def change(v):
            v[...] += 1
            return v[...]

        def outcome(fun):
            v = nnx.Param(X, hijax=True)
            try:
                return fun(v), v[...]
            except ImmutableVariableError as error:
                np.testing.assert_array_equal(v[...], X)
                return str(error)

        # Flax 0.12.8 changes them, later releases refuse to.
        expected, found = outcome(jax.jit(change)), outcome(jax.jit(lambda v: jit(change)(v)))
        assert type(found) is type(expected)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A matrix of 8-bit integers, with a scale for each row."""

    values: jax.Array
    scales: jax.Array


def quantized_type():
    """The type of these, and what makes arrays of them."""
    hijax = pytest.importorskip("jax.experimental.hijax")
    if not hasattr(hijax, "HiPrim"):
        pytest.skip("this JAX has hijax types of another form")

    @dataclasses.dataclass(frozen=True)
    class Type(hijax.HiType):
        shape: tuple[int, ...]

        def lo_ty(self):
            values = hijax.ShapedArray(self.shape, jnp.dtype("int8"))
            return [values, hijax.ShapedArray(self.shape[:-1], jnp.dtype("float32"))]

        def lower_val(self, x):
            return [x.values, x.scales]

        def raise_val(self, values, scales):
            return Quantized(values, scales)

        def to_tangent_aval(self):
            return hijax.ShapedArray(self.shape, jnp.dtype("float32"))

        to_ct_aval = to_tangent_aval

    class Dense(hijax.HiPrim):
        def __init__(self, aval):
            self.in_avals, self.params = (aval,), {}
            self.out_aval = hijax.ShapedArray(aval.shape, jnp.dtype("float32"))
            super().__init__()

        def expand(self, x):
            return x.values.astype("float32") * x.scales[:, None]

        def batch(self, axis, arguments, dimensions):
            return Dense(jax.typeof(arguments[0]))(*arguments), *dimensions

        def vjp_fwd(self, is_nonzero, x):
            return self(x), None

        def jvp(self, primals, tangents):
            return self(*primals), tangents[0]

        def vjp_bwd_retval(self, residuals, cotangent):
            return (cotangent,)

    hijax.register_hitype(Quantized, lambda x: Type(x.values.shape))
    return lambda x: Dense(jax.typeof(x))(x)


@pytest.mark.parametrize("axis", ("in", "out"))
@pytest.mark.parametrize("transform", ("vmap", "scan"))
def test_values_of_a_hijax_type_have_no_axis(transform, axis):
    quantized_type()
    weights = Quantized(jnp.arange(6, dtype="int8").reshape(2, 3), jnp.float32([0.5, 2]))
    model = node(w=nnx.Variable(weights))
    run = functools.partial(getattr(nnx_sharding, transform), in_axes=0, out_axes=0)
    call = run(lambda m: 0) if axis == "in" else run(lambda x: model.w.get_value())
    message = r"w, .*Type.*: axis 0\n.*hijax type" if axis == "in" else r"output, .*Type.*: axis 0"
    with pytest.raises(ValueError, match=message):
        call(model if axis == "in" else jnp.ones(2))


@pytest.mark.parametrize("updates", (True, False))
@pytest.mark.parametrize("graph", (True, False))
def test_values_of_a_hijax_type(graph, updates):
    """Quantized weights are a value of a type of the user's, with which JAX can compute."""
    dense, t = quantized_type(), Transforms(nnx_sharding, graph=graph, graph_updates=updates)
    weights = Quantized(jnp.arange(6, dtype="int8").reshape(2, 3), jnp.float32([0.5, 2]))
    expected = np.ones((4, 2)) @ (np.arange(6).reshape(2, 3) * [[0.5], [2]])

    def fun(m, x):
        m.calls[...] += 1
        return x @ dense(m.w.get_value())

    def loop(m, x):
        step = lambda i, carry: (carry[0], carry[1] + fun(carry[0], x))  # noqa: E731
        return t.fori_loop(0, 2, step, (m, jnp.zeros((4, 3))))[1] / 2

    def gradient(m, x):
        total = lambda m, x: fun(m, x).sum()  # noqa: E731
        return t.grad(total, argnums=1)(m, x)

    def total(m, x):
        return fun(m, x).sum()

    def of_weights(m, x):
        found = t.grad(total, argnums=nnx.DiffState(0, lambda path, _: "w" in path))(m, x)
        return found["w"].get_value()

    def pulled_back(m, x):
        return t.vjp(total, m, x)[1](jnp.float32(1))[0].w.get_value()

    def pushed_forward(m, x):
        tangent = node(w=nnx.Variable(jnp.ones((2, 3))), calls=m.calls)
        return t.jvp(total, (m, x), (tangent, 0 * x))[1]

    programs = {
        fun: expected,
        t.remat(fun): expected,
        t.vmap(lambda m, x: x @ dense(m.w.get_value()), in_axes=(None, 0)): expected,
        t.scan(lambda m, x: x @ dense(m.w.get_value()), in_axes=(None, 0), out_axes=0): expected,
        (lambda m, x: t.cond(x.sum() > 0, fun, lambda m, x: fun(m, x) * 2, m, x)): expected,
        loop: expected,
        # As in Flax, gradients are of the type that the user's type says: here an array.
        of_weights: np.full((2, 3), 4),
        pulled_back: np.full((2, 3), 4),
        pushed_forward: 4 * 6,
        gradient: np.broadcast_to((np.arange(6).reshape(2, 3) * [[0.5], [2]]).sum(1), (4, 2)),
    }
    for program, result in programs.items():
        model = node(w=nnx.Variable(weights), calls=nnx.BatchStat(jnp.int32(0)))
        for call in (program, t.jit(program)):
            np.testing.assert_allclose(call(model, jnp.ones((4, 2))), result)
            assert model.w.get_value() is weights or isinstance(model.w.get_value(), Quantized)
