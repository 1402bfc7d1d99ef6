"""Our transforms under those of JAX, with random streams, and with Variables of other kinds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compute_on import compute_on

import nnx_sharding
from libraries import named

X = jnp.linspace(0.5, 1, 3)
ON_HOST = {"compute_type": "device_host", "out_memory_spaces": jax.memory.Space.Device}


class Model(nnx.Module):
    """A parameter and random numbers."""

    def __init__(self, **options):
        self.w = nnx.Param(jnp.arange(1.0, 4.0), **options)
        self.n = nnx.BatchStat(jnp.float32(0), **options)
        self.rngs = nnx.Rngs(dropout=0)

    def __call__(self, x):
        self.n[...] += 1
        return jnp.sin(self.w[...] * x)


def loss(model, x):
    return jnp.sin(model.w[...] * x).sum()


# What each transform makes of a function of a model and an array.


def jit(library, f):
    return library.jit(f)


def grad(library, f):
    return lambda model, x: library.value_and_grad(f)(model, x)[0]


def remat(library, f):
    return library.remat(f)


def vmap(library, f):
    mapped = library.vmap(f, in_axes=(None, 0))
    return lambda model, x: mapped(model, x[None])[0]


def scan(library, f):
    run = library.scan(lambda model, x: (model, f(model, x)), in_axes=(library.Carry, 0))
    return lambda model, x: run(model, x[None])[1][0]


def cond(library, f):
    return lambda model, x: library.cond(True, f, lambda model, x: x.sum(), model, x)


def switch(library, f):
    return lambda model, x: library.switch(1, [lambda model, x: x.sum(), f], model, x)


def fori_loop(library, f):
    def step(_, carry):
        return carry[0], carry[0].n[...] * 0 + f(carry[0], X)

    return lambda model, x: library.fori_loop(0, 2, step, (model, jnp.float32(0)))[1]


def vjp(library, f):
    return lambda model, x: library.vjp(f, model, x)[0]


def linearize(library, f):
    return lambda model, x: library.linearize(f, model, x)[0]


TRANSFORMS = dict(named((jit, grad, remat, vmap, scan, cond, switch, fori_loop)))
DERIVATIVES = {"vjp": vjp, "linearize": linearize}


def pure(transform):
    """The transformed loss as a function of the parameter and an array, for JAX."""
    run = transform(nnx_sharding, loss)

    def call(w, x):
        model = Model()
        model.w.set_value(w)
        return run(model, x)

    return call


@pytest.mark.parametrize("name", TRANSFORMS | DERIVATIVES)
def test_under_jax(name):
    call = pure((TRANSFORMS | DERIVATIVES)[name])
    w = jnp.arange(1.0, 4.0)

    def plain(w, x):
        return jnp.sin(w * x).sum()

    want = jax.grad(plain)(w, X)
    _, tangents = jax.linearize(lambda w: call(w, X), w)
    np.testing.assert_allclose(tangents(w), want @ w, rtol=1e-6)
    np.testing.assert_allclose(call(w, X), plain(w, X), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(jax.checkpoint(call))(w, X), want, rtol=1e-6)
    if hasattr(jax, "fwd_and_bwd"):
        forward, backward = jax.fwd_and_bwd(call, 0)
        np.testing.assert_allclose(backward(forward(w, X)[1], 1.0), want, rtol=1e-6)
    exported = jax.export.export(jax.jit(call))(w, X)
    np.testing.assert_allclose(exported.call(w, X), plain(w, X), rtol=1e-6)


def on_host(model, x):
    product = compute_on(lambda w, x: jnp.sin(w * x), **ON_HOST)
    return product(model.w[...], x).sum()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_computations_on_the_host(name):
    run = TRANSFORMS[name](nnx_sharding, on_host)
    model = Model()
    gradient = nnx_sharding.jit(nnx_sharding.grad(run))(model, X)["w"][...]
    np.testing.assert_allclose(gradient, X * jnp.cos(model.w[...] * X), rtol=1e-6)
    lowered = nnx_sharding.jit(run).lower(model, X).as_text()
    assert 'compute_type = "host"' in lowered


def draw(model, x):
    return x.sum() * jax.random.normal(model.rngs.dropout())


def reseeded(library, transform):
    def step(model, x):
        nnx.reseed(model, dropout=7)
        return draw(model, x)

    return transform(library, step)


def reseeds(library, transform):
    def step(model, x):
        nnx.reseed(model, dropout=7)
        value = transform(library, draw)(model, x)
        nnx.reseed(model, dropout=8)
        return value

    return library.jit(step)


def forks(library, transform):
    fork = nnx.fork_rngs(split=3)
    return library.jit(lambda model, x: fork(transform(library, lambda m, x: x.sum()))(model, x))


@pytest.mark.parametrize("how", (reseeded, reseeds, forks))
@pytest.mark.parametrize("name", ("jit", "grad", "remat", "cond", "switch"))
def test_random_streams_as_flax(name, how):
    results = []
    for library in nnx_sharding, nnx:
        model = Model()
        value = how(library, TRANSFORMS[name])(model, X)
        stream = model.rngs.dropout
        results.append((value, stream.count[...], jax.random.key_data(stream.key[...])))
    jax.tree.map(np.testing.assert_array_equal, *results)


def loops(model):
    return nnx_sharding.fori_loop(0, 3, lambda _, c: (c[0], c[0](c[1])), (model, X))[1]


def waits(model):
    def step(carry):
        return carry[0], carry[0](carry[1]) + 1

    start = model, X
    return nnx_sharding.while_loop(lambda c: c[0].n[...] < 3, step, start)[1]


def chooses(model):
    return nnx_sharding.switch(1, [lambda model, x: x, Model.__call__], model, X)


def linear(model):
    return nnx_sharding.linearize(Model.__call__, model, X)[0]


def checked(model):
    return nnx_sharding.checkify(Model.__call__)(model, X)[1]


@pytest.mark.parametrize("program", (loops, waits, chooses, linear, checked))
@pytest.mark.parametrize("options", ({"hijax": True}, {"use_ref": True}), ids=("hijax", "ref"))
def test_other_variables_as_plain_ones(program, options):
    results = []
    for model in Model(), Model(**options):
        value = program(model)
        results.append((value, model.n[...]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *results)
