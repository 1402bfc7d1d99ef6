"""Transforms in transforms in transforms, at random: what eager Python computes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libraries import FULL, OURS, node, param, stat

FACTORS = np.array([0.5, 1.0, -0.7], np.float32)
Function = Callable[[Any, Any], Any]


class Model(nnx.Module):
    """A Variable that two parts share, another one, a counter and a statistic."""

    def __init__(self):
        shared = param(0.7)
        self.a, self.b = node(w=shared), node(w=shared, up=self)
        self.u = param(-0.4)
        self.count, self.stat = nnx.BatchStat(jnp.int32(0)), stat(0.1)

    def with_statistics(self, function):
        """Another model with the same parameters, and statistics of its own."""
        other = Model()
        other.a, other.b, other.u = self.a, node(w=self.a.w, up=other), self.u
        other.count = nnx.BatchStat(function(self.count[...]))
        other.stat = nnx.BatchStat(function(self.stat[...]))
        return other


def base(model, x):
    model.count[...] += 1
    model.stat[...] = 0.5 * model.stat[...] + x * model.u[...]
    return jnp.tanh(model.a.w[...] * x + model.b.up.b.w[...] ** 2 + model.stat[...])


def weighted(grads):
    return sum(i * x for i, x in enumerate(jax.tree.leaves(grads), start=1))


# Each makes a function of a model and a number from another one, with our transforms.


def jit(fun):
    return OURS.jit(fun)


def grad(fun):
    run = OURS.grad(fun)
    return lambda m, x: weighted(run(m, x))


def value_and_grad(fun):
    run = OURS.value_and_grad(lambda pair: (fun(*pair), pair[0]), has_aux=True, wrt=nnx.Param)

    def combined(m, x):
        (value, same), (grads, slope) = run((m, x))
        assert same is m
        return value + weighted(grads) + slope

    return combined


def vmap(fun):
    axes = OURS.StateAxes({nnx.Param: None, ...: 0})
    run = OURS.vmap(fun, in_axes=(axes, 0))

    def summed(m, x):
        other = m.with_statistics(lambda array: jnp.stack([array] * len(FACTORS)))
        ys = run(other, x * FACTORS)
        m.count[...], m.stat[...] = other.count[...].sum(), other.stat[...].sum()
        return ys.sum()

    return summed


def scan(fun):
    def step(m, x, factor):
        y = fun(m, x * factor)
        return x + 0.1 * y, y

    axes = {"in_axes": (None, OURS.Carry, 0), "out_axes": (OURS.Carry, 0)}
    run = OURS.scan(step, **axes)

    def combined(m, x):
        last, ys = run(m, jnp.float32(x), FACTORS)
        return last + ys.sum()

    return combined


def scan_models(fun):
    run = OURS.scan(lambda m, x: (m, fun(m, x)))

    def combined(m, x):
        same, ys = run(m, x * FACTORS)
        assert same is m
        return ys.sum()

    return combined


def remat(fun):
    return OURS.remat(fun)


# The same in Python.


def same(fun):
    return fun


def eager_grads(fun, m, x):
    graphdef, params, rest = nnx.split(m, nnx.Param, ..., graph=True)

    def pure(params, x):
        inner = nnx.merge(graphdef, params, rest, copy=True)
        return fun(inner, x), nnx.state(inner, nnx.BatchStat, graph=True)

    (value, state), grads = jax.value_and_grad(pure, argnums=(0, 1), has_aux=True)(
        params, jnp.float32(x)
    )
    nnx.update(m, state)
    return value, *grads


def eager_grad(fun):
    return lambda m, x: weighted(eager_grads(fun, m, x)[1])


def eager_value_and_grad(fun):
    def combined(m, x):
        value, grads, slope = eager_grads(fun, m, x)
        return value + weighted(grads) + slope

    return combined


def eager_vmap(fun):
    def summed(m, x):
        others = [m.with_statistics(lambda array: array) for _ in FACTORS]
        ys = [fun(other, x * k) for other, k in zip(others, FACTORS, strict=True)]
        m.count[...] = sum(other.count[...] for other in others)
        m.stat[...] = sum(other.stat[...] for other in others)
        return sum(ys)

    return summed


def eager_scan(fun):
    def combined(m, x):
        total = 0.0
        for factor in FACTORS:
            y = fun(m, x * factor)
            x, total = x + 0.1 * y, total + y
        return x + total

    return combined


def eager_scan_models(fun):
    return lambda m, x: sum(fun(m, x * factor) for factor in FACTORS)


TRANSFORMS: dict[str, tuple[Callable[[Function], Function], Callable[[Function], Function]]] = {
    "jit": (jit, same),
    "grad": (grad, eager_grad),
    "value_and_grad": (value_and_grad, eager_value_and_grad),
    "vmap": (vmap, eager_vmap),
    "scan": (scan, eager_scan),
    "scan_models": (scan_models, eager_scan_models),
    "remat": (remat, same),
    "flax_jit": (lambda fun: nnx.jit(fun, **FULL), same),
    "flax_remat": (lambda fun: nnx.remat(fun, **FULL), same),
}


def check(names, x):
    ours, theirs = (
        functools.reduce(lambda fun, name: TRANSFORMS[name][which](fun), names, base)
        for which in (0, 1)
    )
    one, other = Model(), Model()
    objects = [one.a, one.b, one.a.w, one.u, one.count, one.stat]
    for _ in range(2):  # the second call finds what the first one made
        np.testing.assert_allclose(ours(one, x), theirs(other, x), rtol=2e-3, atol=1e-4)
        assert one.count[...] == other.count[...] and one.count.dtype == other.count.dtype
        np.testing.assert_allclose(one.stat[...], other.stat[...], rtol=1e-4, atol=1e-5)
        assert (one.a.w[...], one.u[...]) == (other.a.w[...], other.u[...])
    assert all(
        map(lambda a, b: a is b, objects, [one.a, one.b, one.b.w, one.u, one.count, one.stat])
    )
    assert one.b.up is one


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.sampled_from(sorted(TRANSFORMS)), min_size=2, max_size=3),
    st.floats(-1, 1, width=16),
)
def test_random_programs(names, x):
    check(names, x)


@pytest.mark.slow
@pytest.mark.parametrize("first", sorted(TRANSFORMS))
def test_all_programs_to_depth_3(first):
    for depth in (0, 1, 2):
        for rest in itertools.product(sorted(TRANSFORMS), repeat=depth):
            check((first, *rest), 0.3)
