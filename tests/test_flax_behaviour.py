"""What Flax's own tests of its newer transforms show: each program with Flax and with ours."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental.checkify import float_checks

import flax_differences
import nnx_sharding
from libraries import FULL, Transforms, assert_same, node, param, stat

GRAPH = {"graph": True, "graph_updates": False}
TREE = {"graph": False, "graph_updates": False}
X = jnp.linspace(0.1, 1, 4)


def linear(scale=2.0):
    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    layer.kernel.set_value(jnp.identity(4) * scale)
    return layer


def values(*objects):
    return [nnx.to_pure_dict(nnx.state(x, graph=True)) for x in objects]


class Step(NamedTuple):
    count: nnx.Variable
    reward: nnx.Variable


# Programs of the transforms `t`, whose results are compared, in the modes that they take.


def variables_in_a_named_tuple(t):
    state = node(step=nnx.data(Step(nnx.Variable(jnp.int32(0)), nnx.Variable(jnp.float32(0)))))

    def branch(reward):
        def step(state):
            state.step.count[...] += 1
            state.step.reward[...] = reward

        return step

    seen = []
    for _ in range(2):
        t.cond(state.step.count[...] % 2 == 0, branch(2.0), branch(0.0), state)
        seen += values(state)
    return seen


def a_variable_as_condition_and_operand(t):
    x, seen = nnx.Variable(jnp.int32(8)), []

    def halve(x):
        x[...] = x[...] // 2

    def triple(x):
        x[...] = 3 * x[...] + 1

    for _ in range(4):
        t.cond(x % 2 == 0, halve, triple, x)
        seen.append(x[...])
    return seen


def branches_that_write_to_different_variables(t):
    a, b = nnx.Variable(jnp.int32(0)), nnx.Variable(jnp.int32(0))

    def first(a, b):
        a[...] += 1

    def second(a, b):
        b[...] += 10

    def third(a, b):
        a[...] *= 7

    for which in True, False:
        t.cond(which, first, second, a, b)
    for which in range(3):
        t.switch(which, (first, second, third), a, b)
    return a[...], b[...]


def conditions_for_each_element(t):
    state, model = node(i=nnx.Variable(jnp.arange(8)), n=nnx.Variable(jnp.zeros(8))), linear()

    def count(state):
        state.n[...] += 1

    def run(state, model):
        t.cond(state.i[...] % 2 == 0, count, lambda state: None, state)

    t.vmap(run, in_axes=(0, None), out_axes=None)(state, model)
    return values(state)


def branches_with_shared_variables(t):
    v = stat()
    model = node(a=v, b=v)

    def one(model):
        model.a[...] += 1

    def other(model):
        model.b[...] += 10

    for which in True, False:
        t.cond(which, one, other, model)
        t.switch(int(which), (one, other), model)
    assert model.a is model.b
    return v[...]


def a_switch_that_changes_weights(t):
    model, n, seen = linear(1.0), stat(), []

    def counts(model, n, x):
        n[...] += 1
        return model(x)

    def clears(model, n, x):
        model.kernel[...] = jnp.zeros((4, 4))
        return model(x)

    for which in 0, 1, 2, 0:
        branches = counts, lambda model, n, x: model(x) * 2, clears
        seen.append(t.switch(which, branches, model, n, X))
    return seen, values(model), n[...]


def loops_over_several_objects(t):
    one, weight = nnx.Sequential(linear()), nnx.Variable(jnp.identity(4) * 0.5)

    def body(carry):
        one, (weight,), x, n = carry
        return one, (weight,), one(x) @ weight[...], n - 1.0

    start = one, (weight,), X, 3.0
    carry = t.while_loop(lambda carry: carry[-1] > 0, body, start)
    assert carry[0].layers[0].kernel is one.layers[0].kernel and carry[1][0] is weight
    return carry[2:]


def a_loop_of_shared_weights(t):
    first, second = linear(), nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
    second.kernel = first.kernel

    def body(carry):
        model, x, n = carry
        y = model(x)
        model.layers[0].kernel[...] *= 0.5
        return model, y, n - 1.0

    model = nnx.Sequential(first, second)
    y = t.while_loop(lambda carry: carry[-1] > 0, body, (model, X, 2.0))[1]
    assert first.kernel is second.kernel
    return y, values(model)


def a_loop_with_one_object_twice(t):
    model = linear()
    carry = t.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1], c[1]), (0, model, model))
    assert carry[1].kernel is carry[2].kernel is model.kernel
    return carry[0], values(model)


def a_loop_that_sums_into_a_variable(t):
    total = nnx.Variable(jnp.zeros((4, 4)))

    def body(i, total):
        total[...] += i
        return total

    assert t.fori_loop(0, 3, body, total) is total
    return total[...]


def a_loop_that_maps_over_a_model(t):
    model = linear()

    def add(path, variable):
        variable[...] += 1
        return variable

    def body(i, model):
        nnx.map(add, model, graph=t.modes["graph"])
        return model

    assert t.fori_loop(0, 2, body, model).kernel is model.kernel
    return values(model)


def loops_within_jit(t):
    model, n = linear(), stat()

    def body(i, carry):
        model, n, x = carry
        n[...] += i
        return model, n, model(x)

    def run(model, n, x):
        y = t.fori_loop(0, 3, body, (model, n, x))[2]

        def again(carry):
            return *body(1, carry[:3]), carry[3] - 1

        return t.while_loop(lambda carry: carry[3] > 0, again, (model, n, y, 2))[2]

    return t.jit(run)(model, n, X), n[...]


def checks_of_floats(t):
    model = node(a=param(jnp.inf))
    error, y = t.checkify(t.jit(lambda m: m.a[...] + jnp.sin(m.a[...])), errors=float_checks)(model)
    assert "nan generated by primitive: sin" in error.get()
    return y


def checks_of_what_counts(t):
    n = nnx.Variable(jnp.int32(0))

    def count(n):
        n[...] += 1
        return n[...]

    error, y = t.checkify(t.jit(count))(n)
    error.throw()
    return y, n[...]


class Sine(nnx.Module):
    def __init__(self):
        self.x, self.y, self.n = param(1.0), param(2.0), stat()


def sine(m):
    m.n[...] += 1
    return jnp.sin(m.x[...]) * m.y[...]


def cosine_rule(t, f):
    """The rule of `sine`, ten times too large for x."""

    def forward(m):
        return f(m), (jnp.cos(m.x[...]), jnp.sin(m.x[...]), m)

    def backward(residuals, g):
        cos, sin, m = residuals
        result = nnx.clone(m)
        result.x[...], result.y[...] = 10 * cos * g * m.y[...], sin * g
        result.n[...] = jnp.float32(0)
        return (result,)

    f.defvjp(forward, backward)
    return f


def rules_around_remat(t):
    m = Sine()
    f = cosine_rule(t, t.custom_vjp(t.remat(sine)))
    return values(t.grad(t.jit(lambda m: f(m)))(m), m)


def rules_of_two_models(t):
    one, other = Sine(), Sine()
    f = t.custom_vjp(lambda a, b: (sine(a), nnx.clone(b)))

    def forward(a, b):
        return f(a, b), (jnp.cos(a.x[...]), jnp.sin(a.x[...]), a)

    def backward(residuals, g):
        cos, sin, a = residuals
        result = nnx.clone(a)
        result.x[...], result.y[...] = cos * g[0] * a.y[...], sin * g[0]
        result.n[...] = jnp.float32(0)
        return result, g[1]

    f.defvjp(forward, backward)

    def loss(a, b):
        y, b = f(a, b)
        return y + b.x[...] * b.y[...]

    return values(*t.grad(loss, argnums=(0, 1))(one, other), one, other)


def rules_that_write_to_another_variable(t):
    model, state = linear(), stat()

    def times(model, state):
        state[...] = jnp.float32(-1)
        return model.kernel[...] * 2

    f = t.custom_vjp(times, nondiff_argnums=(1,))
    f.defvjp(lambda m, s: (f(m, s), m), lambda s, m, g: (m,))
    return f(model, state), state[...]


def parts_of_a_model_as_arguments(t):
    f = cosine_rule(t, t.custom_vjp(sine))
    params, rest = nnx.unpack(Sine(), nnx.Param, ...)

    def loss(params, rest):
        return f(nnx.merge(params, rest))

    gradient = t.jit(t.grad(loss))(params, rest)
    assert type(gradient) is type(params)
    return nnx.to_pure_dict(gradient)


def pullbacks_of_functions_and_decorators(t):
    model = linear()

    def apply(model, x):
        return jnp.sum(model(x) ** 2), {"x": x}

    y, pullback, aux = t.vjp(apply, model, X, has_aux=True)
    one = pullback(jnp.ones_like(y))
    tangents = jax.tree.map(jnp.ones_like, model), jnp.ones(4)
    along = t.jvp(apply, (model, X), tangents, has_aux=True)
    decorated = t.vjp(has_aux=True)(apply)(model, X)[0]
    return y, values(one[0]), one[1], aux, along, decorated


def axes_from_a_state(t):
    def make():
        return nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    axes = nnx.state(make())
    axes["scale"], axes["bias"], axes["mean"], axes["var"] = 0, 1, 0, None
    return values(t.vmap(make, out_axes=t.StateAxes(axes), axis_size=5)())


EVERY = (FULL, GRAPH, TREE)
PROGRAMS = {
    variables_in_a_named_tuple: EVERY,
    a_variable_as_condition_and_operand: (GRAPH, TREE),
    branches_that_write_to_different_variables: (GRAPH, TREE),
    conditions_for_each_element: EVERY,
    branches_with_shared_variables: (FULL, GRAPH),
    a_switch_that_changes_weights: EVERY,
    loops_over_several_objects: EVERY,
    a_loop_of_shared_weights: (FULL, GRAPH),
    a_loop_with_one_object_twice: (FULL, GRAPH),
    a_loop_that_sums_into_a_variable: EVERY,
    a_loop_that_maps_over_a_model: EVERY,
    loops_within_jit: EVERY,
    checks_of_floats: EVERY,
    checks_of_what_counts: EVERY,
    rules_around_remat: (GRAPH, TREE),
    rules_of_two_models: (GRAPH, TREE),
    rules_that_write_to_another_variable: (GRAPH, TREE),
    parts_of_a_model_as_arguments: (GRAPH, TREE),
    pullbacks_of_functions_and_decorators: (GRAPH, TREE),
    axes_from_a_state: (FULL,),
}
CASES = [
    pytest.param(program, modes, id=f"{program.__name__}-{i}")
    for program, several in PROGRAMS.items()
    for i, modes in enumerate(several)
]


@pytest.mark.parametrize(("program", "modes"), CASES)
def test_as_flax(program, modes):
    libraries = nnx_sharding, nnx
    assert_same(*(program(Transforms(library, **modes)) for library in libraries))


# Flax has them without graph updates only.
OURS = (a_variable_as_condition_and_operand, branches_that_write_to_different_variables)


@pytest.mark.parametrize("program", OURS)
def test_with_graph_updates(program):
    assert_same(*(program(Transforms(nnx_sharding, **modes)) for modes in (FULL, GRAPH)))


# Mistakes


def branches_of_a_shared_variable(t):
    v = stat()
    t.cond(True, lambda m: m.a[...], lambda m: m.b[...], node(a=v, b=v))


def a_loop_that_replaces_a_variable(t):
    def body(carry):
        model, n = carry
        model.kernel = nnx.Param(jnp.zeros_like(model.kernel[...]))
        return model, n - 1.0

    t.while_loop(lambda carry: carry[1] > 0, body, (linear(), 2.0))


def a_loop_that_returns_another_model(t):
    def body(carry):
        return nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(1)), carry[1] - 1.0

    t.while_loop(lambda carry: carry[1] > 0, body, (linear(), 2.0))


def a_variable_mapped_and_not(t):
    v = param(jnp.arange(3.0))
    t.vmap(lambda a, b: a[...] + b[...], in_axes=(0, None))(v, v)


def a_broadcast_variable_that_differs(t):
    class Shared(nnx.Variable):
        pass

    state = node(i=nnx.Variable(jnp.arange(8)), n=Shared(jnp.int32(1)))

    def count(state):
        state.n[...] += 1

    axes = t.StateAxes({Shared: None, ...: 0})
    t.vmap(lambda s: t.cond(s.i[...] % 2 == 0, count, lambda state: None, s), in_axes=(axes,))(
        state
    )


MISTAKES = {
    branches_of_a_shared_variable: (TREE,),
    a_loop_that_replaces_a_variable: EVERY,
    a_loop_that_returns_another_model: EVERY,
    a_variable_mapped_and_not: (FULL, GRAPH),
    a_broadcast_variable_that_differs: (FULL,),
}


@pytest.mark.parametrize("program", MISTAKES)
def test_errors(program):
    for modes in MISTAKES[program]:
        for library in nnx_sharding, nnx:
            with pytest.raises((ValueError, TypeError)):
                program(Transforms(library, **modes))


# Differences


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="Older releases have other messages.")
@pytest.mark.parametrize("title", flax_differences.PROGRAMS)
def test_difference(title):
    row = flax_differences.row(title)
    assert row in flax_differences.PAGE.read_text()
    _, theirs, ours, _ = row.rsplit("|", 3)
    assert theirs != ours


def without_parameters(t):
    """Not one of them."""
    model = nnx.BatchNorm(4, use_scale=False, use_bias=False, rngs=nnx.Rngs(0))
    gradient, slope = t.grad(lambda m, x: m(x).sum(), argnums=(0, 1))(model, X[None])
    return jax.tree.leaves(nnx.state(gradient, nnx.Param)), slope


@pytest.mark.parametrize("modes", EVERY)
def test_models_without_parameters(modes):
    libraries = nnx_sharding, nnx
    assert_same(*(without_parameters(Transforms(library, **modes)) for library in libraries))
