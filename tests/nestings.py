"""Programs of transforms in transforms, ours in Flax's too, and the same programs in eager Python.

A transform here is a function of the transforms ``t`` of a library and of a function of a
:class:`Model` and a number: it returns another such function. ``TRANSFORMS`` has for each one what
it computes, as eager Python, so that :func:`check` can compare any composition of them.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_sharding
from libraries import FULL, MODES, Transforms, node

FACTORS = np.array([0.5, 1.0, -0.7], np.float32)
SPEC = P("model")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MESHES = {"auto": (AUTO, AUTO), "explicit": (EXPLICIT, EXPLICIT), "mixed": (EXPLICIT, AUTO)}
Function = Callable[[Any, Any], Any]


class Model(nnx.Module):
    """Two parameters, a counter and a statistic; a Variable of two parts, and a cycle if shared."""

    def __init__(self, *, shared, mesh=None):
        def values(x):
            array = jnp.full(8, x, jnp.float32)
            return array if mesh is None else jax.device_put(array, NamedSharding(mesh, SPEC))

        w = nnx.Param(values(0.7))
        self.a, self.b = node(w=w), node(w=w if shared else nnx.Param(values(0.7)))
        if shared:
            self.b.up = self
        self.u = nnx.Param(values(-0.4))
        self.count, self.stat = nnx.BatchStat(jnp.int32(0)), nnx.BatchStat(values(0.1))

    def with_statistics(self, function):
        """Another model with the same parameters, and statistics of its own."""
        other = Model(shared=hasattr(self.b, "up"))
        other.a.w, other.b.w, other.u = self.a.w, self.b.w, self.u
        other.count = nnx.BatchStat(function(self.count[...]))
        other.stat = nnx.BatchStat(function(self.stat[...]))
        return other


def base(m, x):
    m.count[...] += 1
    m.stat[...] = 0.5 * m.stat[...] + x * m.u[...]
    return jnp.tanh((m.a.w[...] * x + m.b.w[...] ** 2 + m.stat[...]).mean())


def other_branch(m, x):
    m.count[...] += 1
    return (m.u[...] * x).mean()


def third_branch(m, x):
    m.count[...] += 2
    m.stat[...] *= 0.5
    return jnp.sin(m.stat[...] + x).mean()


def weighted(tree):
    """One number for many; what has no derivative has none here either."""
    leaves = (x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact))
    return sum((i * x).mean() for i, x in enumerate(leaves, start=1))


def is_inexact(path, x):
    return jnp.issubdtype(x.dtype, jnp.inexact)


def cotangents(m):
    """Those of the Variables that have a derivative, each once."""
    return nnx.state(m, is_inexact, graph=True)


def ones(m):
    tangent = nnx.clone(m, graph=True)
    for x in (tangent.a.w, tangent.b.w, tangent.u, tangent.stat):
        x.set_value(0 * x[...] + 1)  # with its sharding
    return tangent


# Each makes a function of a model and a number from another one, with the transforms `t`.


def jit(t, fun):
    return t.jit(fun)


def sharded_jit(t, fun):
    """Declares the shardings of the model, on a mesh that has the axis."""

    def run(m, x):
        options = {}
        if "model" in jax.sharding.get_abstract_mesh().axis_names:
            shardings = nnx_sharding.StateSharding({nnx.PathContains("count"): P(), ...: SPEC})
            options |= {"in_shardings": (shardings, P()), "out_shardings": P()}
        return t.jit(fun, **options)(m, x)

    return run


def grad(t, fun):
    run = t.grad(fun, argnums=nnx.DiffState(0, nnx.Param))
    return lambda m, x: weighted(run(m, x))


def value_and_grad(t, fun):
    run = t.value_and_grad(lambda pair: (fun(*pair), pair[1]), has_aux=True, wrt=nnx.Param)

    def combined(m, x):
        (value, same), (grads, slope) = run((m, x))
        return value + weighted(grads) + slope + same - x

    return combined


def vjp(t, fun):
    def combined(m, x):
        y, pullback = t.vjp(fun, m, x)
        of_model, slope = pullback(jnp.ones_like(y))
        return y + weighted(cotangents(of_model)) + slope

    return combined


def jvp(t, fun):
    return lambda m, x: sum(t.jvp(fun, (m, x), (ones(m), jnp.ones_like(x))))


def linearize(t, fun):
    def combined(m, x):
        tangents = ones(m), jnp.ones_like(x)
        y, pushforward = t.linearize(fun, m, x)
        return y + pushforward(*tangents)

    return combined


def vmap(t, fun):
    return mapped(t, t.vmap, fun)


def map_models(t, fun):
    return mapped(t, functools.partial(t.scan, out_axes=0), fun)


def mapped(t, make, fun):
    axes = t.StateAxes({nnx.Param: None, ...: 0})
    run = make(fun, in_axes=(axes, 0))

    def summed(m, x):
        other = m.with_statistics(lambda array: jnp.stack([array] * len(FACTORS)))
        ys = run(other, x * FACTORS)
        m.count[...], m.stat[...] = other.count[...].sum(), other.stat[...].sum(0)
        return ys.sum()

    return summed


def scan(t, fun):
    def step(m, x, factor):
        y = fun(m, x * factor)
        return x + 0.1 * y, y

    run = t.scan(step, in_axes=(None, t.Carry, 0), out_axes=(t.Carry, 0))

    def combined(m, x):
        last, ys = run(m, x, FACTORS)
        return last + ys.sum()

    return combined


def scan_models(t, fun):
    run = t.scan(lambda m, x: (m, fun(m, x)))
    return lambda m, x: run(m, x * FACTORS)[1].sum()


class Layer(nnx.Module):
    def __init__(self, fun, m, factor):
        self.fun, self.m, self.factor = nnx.static(fun), m, nnx.Variable(jnp.asarray(factor))

    def __call__(self, x):
        return x + 0.1 * self.fun(self.m, x * self.factor[...])


def stack(t, fun):
    def run(m, x):
        return nnx_sharding.stack([Layer(fun, m, factor) for factor in FACTORS])(x)

    return run


def cond(t, fun):
    return lambda m, x: t.cond(m.count[...] % 2 == 0, fun, other_branch, m, x)


def switch(t, fun):
    branches = (fun, other_branch, third_branch)
    return lambda m, x: t.switch(m.count[...] % 3, branches, m, x)


def while_loop(t, fun):
    def body(carry):
        m, x, i = carry
        return m, x + 0.5 * fun(m, x), i + 1

    return lambda m, x: t.while_loop(lambda carry: carry[2] < 2, body, (m, x, 0))[1]


def fori_loop(t, fun):
    def body(i, carry):
        m, x = carry
        return m, x + 0.5 * fun(m, x * i)

    return lambda m, x: t.fori_loop(1, 3, body, (m, x))[1]


def remat(t, fun):
    return t.remat(fun)


def checkify(t, fun):
    return lambda m, x: t.checkify(fun)(m, x)[1]


def custom_jvp(t, fun):
    run = t.custom_jvp(fun)
    run.defjvp(lambda primals, tangents: t.jvp(fun, primals, tangents))
    return run


def custom_vjp(t, fun):
    run = t.custom_vjp(fun)

    def forward(m, x):
        pure, chosen = split(fun, m, is_inexact)
        (y, state), pullback = jax.vjp(pure, chosen, x)
        residuals = m, pullback, state
        nnx.update(m, state)
        return y, residuals

    def backward(residuals, g, *, updates_g=None):
        m, pullback, state = residuals
        has_states = isinstance(g, tuple)  # with graph updates
        (after, _), g = g if has_states else (updates_g, g)
        after = after if has_states else vars(after)
        zeros = jax.tree.map(lambda array: 0 * array, state)
        of_state = {name: zeros[name] if after[name] is None else after[name] for name in state}
        of_m, slope = pullback((g, nnx.State(of_state)))
        cotangents = nnx.clone(m, graph=True)
        nnx.update(cotangents, of_m)
        return nnx.state(cotangents, graph=True) if has_states else cotangents, slope

    run.defvjp(forward, backward)
    return run


def over_one_axis():
    """Options of `shard_map` for an axis along which all is replicated; others stay as they are."""
    mesh, options = jax.sharding.get_abstract_mesh(), dict[str, Any]()
    if not mesh.axis_names:
        mesh = jax.make_mesh((2, 2), ("data", "more"), axis_types=(AUTO, AUTO))
        options = {"mesh": mesh}
    axis = min({*mesh.axis_names} - {*getattr(mesh, "manual_axes", ())})
    return {"in_specs": P(), "out_specs": P(), "axis_names": {axis}, **options}


def shard_map(t, fun):
    return lambda m, x: t.shard_map(fun, **over_one_axis())(m, x)


def eval_shape(t, fun):
    def run(m, x):
        out = t.eval_shape(fun, m, x)
        y = fun(m, x)
        assert (out.shape, out.dtype) == (y.shape, y.dtype)
        return y

    return run


def make_jaxpr(t, fun):
    def run(m, x):
        jaxpr = t.make_jaxpr(fun)(m, x)
        arrays = jax.tree.leaves(nnx.state(m, graph=True))
        y, *_ = jaxpr_as_fun(jaxpr)(*arrays, x)
        return (y + fun(m, x)) / 2

    return run


def of_flax(transform, **modes):
    """The transform of Flax, in the mode of ours, or in one of its own."""

    def make(t, fun):
        return transform(Transforms(nnx, **(modes or t.modes)), fun)

    make.__name__ = f"flax_{transform.__name__}"
    return make


flax_jit, flax_remat, flax_grad = of_flax(jit), of_flax(remat), of_flax(grad, **FULL)


# The same in Python.


def same(fun):
    return fun


def split(fun, m, filter_):
    """A function of part of the state, which returns the statistics as well, and that part."""
    graphdef, chosen, rest = nnx.split(m, filter_, ..., graph=True)

    def pure(chosen, x):
        inner = nnx.merge(graphdef, chosen, rest, copy=True)
        return fun(inner, x), nnx.state(inner, nnx.BatchStat, graph=True)

    return pure, chosen


def eager_value_and_grad(fun, filter_=nnx.Param, *, with_value=True, with_slope=True):
    def combined(m, x):
        pure, chosen = split(fun, m, filter_)
        (value, state), (grads, slope) = jax.value_and_grad(pure, argnums=(0, 1), has_aux=True)(
            chosen, x
        )
        nnx.update(m, state)
        return with_value * value + weighted(grads) + with_slope * slope

    return combined


def eager_grad(fun):
    return eager_value_and_grad(fun, with_value=False, with_slope=False)


def eager_vjp(fun):
    return eager_value_and_grad(fun, is_inexact)


def eager_jvp(fun):
    def combined(m, x):
        pure, chosen = split(fun, m, is_inexact)
        point = chosen, x
        directions = jax.tree.map(jnp.ones_like, point)
        value, tangent, state = jax.jvp(pure, point, directions, has_aux=True)
        nnx.update(m, state)
        return value + tangent

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


def eager_cond(fun):
    return lambda m, x: (fun, other_branch)[rest(m.count, 2)](m, x)


def eager_switch(fun):
    return lambda m, x: (fun, other_branch, third_branch)[rest(m.count, 3)](m, x)


def rest(count, divisor):
    with jax.ensure_compile_time_eval():  # Python takes a branch, even in a trace of JAX
        return int(count[...] % divisor)


def eager_loop(factors, weight=0.5):
    def loop(fun):
        def run(m, x):
            for factor in factors:
                x = x + weight * fun(m, x * factor)
            return x

        return run

    return loop


TRANSFORMS: dict[Callable[..., Function], Callable[[Function], Function]] = {
    jit: same,
    sharded_jit: same,
    remat: same,
    checkify: same,
    eval_shape: same,
    make_jaxpr: same,
    custom_jvp: same,
    custom_vjp: same,
    shard_map: same,
    flax_jit: same,
    flax_remat: same,
    grad: eager_grad,
    value_and_grad: eager_value_and_grad,
    vjp: eager_vjp,
    jvp: eager_jvp,
    linearize: eager_jvp,
    vmap: eager_vmap,
    map_models: eager_vmap,
    scan: eager_scan,
    scan_models: eager_scan_models,
    stack: eager_loop(FACTORS, 0.1),
    cond: eager_cond,
    switch: eager_switch,
    while_loop: eager_loop((1, 1)),
    fori_loop: eager_loop((1, 2)),
}
# With graph updates, as they are by default, Flax does the same.
OF_FLAX = {flax_grad: eager_grad} | {
    of_flax(transform, **FULL): TRANSFORMS[transform]
    for transform in (vmap, scan_models, cond, switch, while_loop, fori_loop)
}
ALL = TRANSFORMS | OF_FLAX


# Programs that call `t.jit` themselves, and say what it does with the objects that it is given.
# Python runs them with a `jit` that does nothing. They need graph updates.


def called_twice(t, fun):
    def run(m, x):
        inner = t.jit(fun)
        return inner(m, x) + inner(m, x)

    return run


def passed_twice(t, fun):
    return lambda m, x: t.jit(lambda a, b: fun(a, x) + fun(b, x))(m, m)


def returned(t, fun):
    def run(m, x):
        assert t.jit(lambda m: m)(m) is m
        return fun(m, x)

    return run


def extended(t, fun):
    def add(m, x):
        m.extra = nnx.Param(x * jnp.ones(2))
        return m.extra

    def run(m, x):
        extra = t.jit(add)(m, x)
        extra[...] += 1
        assert extra is m.extra
        return fun(m, x) * m.extra[...].sum()

    return run


def with_random_numbers(t, fun):
    draw = t.jit(lambda rngs: jax.random.normal(rngs(), ()))

    def run(m, x):
        if not hasattr(m, "rngs"):
            m.rngs = nnx.Rngs(0)
        return fun(m, x) + draw(m.rngs) + 10 * draw(m.rngs)

    return run


PYTHON = types.SimpleNamespace(jit=same)
OF_OBJECTS = {
    program: functools.partial(program, PYTHON)
    for program in (called_twice, passed_twice, returned, extended, with_random_numbers)
}
EAGER = ALL | OF_OBJECTS
NAMES = {transform.__name__: transform for transform in TRANSFORMS}
REVERSE, FORWARD = (grad, value_and_grad, vjp, flax_grad), (jvp, linearize)


# Transforms that return the value of the function itself, whose number may be an array.


def value_with_grad(t, fun):
    run = t.value_and_grad(t.jit(fun), argnums=nnx.DiffState(0, nnx.Param))
    return lambda m, x: run(m, x)[0]


def taken_branch(t, fun):
    return lambda m, x: t.cond(x.sum() > 0, fun, lambda m, x: x.sum(), m, x)


TRANSPARENT = (jit, remat, value_with_grad, taken_branch)


def exists(*transforms):
    """Whether JAX has the program: two of its transforms have a derivative in one mode only."""
    for i, inside in enumerate(transforms):
        modes = {"while_loop": REVERSE, "flax_while_loop": REVERSE, "custom_vjp": FORWARD}
        if any(transform in modes.get(inside.__name__, ()) for transform in transforms[i:]):
            return False
    return True


def check(transforms, mode, x=0.3, mesh=None):
    """Compares a program, whose innermost transform comes first, with eager Python."""
    if mesh is not None:
        names = ("model", "data") if mesh == "mixed" else ("data", "model")
        mesh = jax.make_mesh((2, 4), names, axis_types=MESHES[mesh])
    t = Transforms(nnx_sharding, **MODES[mode])
    ours = functools.reduce(lambda fun, transform: transform(t, fun), transforms, base)
    eager = functools.reduce(
        lambda fun, transform: (ALL | OF_OBJECTS)[transform](fun), transforms, base
    )
    shared = t.modes["graph"]
    one, other = Model(shared=shared, mesh=mesh), Model(shared=shared)
    objects = [one.a, one.b, one.a.w, one.b.w, one.u, one.count, one.stat]
    x = jnp.float32(x)
    for _ in range(2):  # the second call finds what the first one made
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            y = ours(one, x)
        np.testing.assert_allclose(y, eager(other, x), rtol=2e-3, atol=1e-4)
        assert one.count[...] == other.count[...] and one.count.dtype == other.count.dtype
        np.testing.assert_allclose(one.stat[...], other.stat[...], rtol=1e-4, atol=1e-5)
        for ours_, theirs in ((one.a.w, other.a.w), (one.u, other.u)):
            np.testing.assert_array_equal(ours_.get_value(), theirs.get_value())
    after = [one.a, one.b, one.a.w, one.b.w, one.u, one.count, one.stat]
    assert all(map(lambda a, b: a is b, objects, after))
    assert not shared or one.b.up is one
    if mesh is not None:
        for variable in (one.a.w, one.b.w, one.u, one.stat):
            assert variable.get_value().sharding.is_equivalent_to(NamedSharding(mesh, SPEC), 1)
