"""Our transforms under those of JAX, around what else JAX has, and with random streams."""

from __future__ import annotations

import contextlib
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compute_on import compute_on
from jax.sharding import NamedSharding

import nestings
import nnx_sharding
from libraries import MODES, Transforms
from nestings import FACTORS, MESHES, NAMES, SPEC

X = jnp.linspace(0.5, 1, 3)
ON_HOST = {"compute_type": "device_host", "out_memory_spaces": jax.memory.Space.Device}

# Functions of a model and a number.


def still(m, x):
    return jnp.tanh((m.a.w[...] * x + m.b.w[...] ** 2 + m.stat[...]).mean())


def with_reference(m, x):
    m.count[...] += 1
    total = jax.new_ref(m.u[...] * x)
    total[...] += m.a.w[...] ** 2
    m.stat[...] = total[...]
    return jnp.sin(total[...]).mean()


def on_host(m, x):
    m.stat[...] = compute_on(lambda u, x: jnp.sin(u * x), **ON_HOST)(m.u[...], x)
    return m.stat[...].mean()


def through_host(m, x):
    kept = jax.device_put(jnp.sin(m.u[...] * x), jax.memory.Space.Host)
    m.stat[...] = jax.device_put(kept, jax.memory.Space.Device) * m.b.w[...]
    return m.stat[...].mean()


BODIES = (nestings.base, still, with_reference, on_host, through_host)
new = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="this JAX does not have all")
RULES = (nestings.custom_vjp, nestings.custom_jvp)
DERIVATIVES = (*nestings.REVERSE, *nestings.FORWARD, *RULES)


# What JAX makes of a function of some arrays, a number and a counter, which returns a number and
# the arrays after it.


def jit(run):
    return jax.jit(run)


def vmap(run):
    mapped = jax.vmap(run, in_axes=(None, 0, None))
    return lambda arrays, x, count: mapped(arrays, x * FACTORS, count)


def grad(run):
    return jax.value_and_grad(run, argnums=(0, 1), has_aux=True)


def checkpoint(run):
    return jax.jit(grad(jax.checkpoint(run)))


def vjp(run):
    def call(arrays, x, count):
        y, pullback, after = jax.vjp(
            lambda arrays, x: run(arrays, x, count), arrays, x, has_aux=True
        )
        return y, after, pullback(jnp.ones_like(y))

    return call


def jvp(run):
    def call(*point):
        arrays, x, count = point
        return jax.jvp(
            lambda arrays, x: run(arrays, x, count)[0],
            (arrays, x),
            jax.tree.map(lambda x: 0 * x + 1, (arrays, x)),
        )

    return call


def linearize(run):
    def call(arrays, x, count):
        y, push = jax.linearize(lambda arrays, x: run(arrays, x, count)[0], arrays, x)
        return y, push(*jax.tree.map(lambda x: 0 * x + 1, (arrays, x)))

    return call


def fwd_and_bwd(run):
    def call(arrays, x, count):
        forward, backward = jax.fwd_and_bwd(run, (0, 1), has_aux=True)
        y, residuals, after = forward(arrays, x, count)
        return y, after, backward(residuals, jnp.ones_like(y))

    return call


def hessian(run):
    return lambda arrays, x, count: jax.hessian(lambda x: run(arrays, x, count)[0])(x)


def scan(run):
    def call(arrays, x, count):
        def step(stat, x):
            y, after = run({**arrays, "stat": stat}, x, count)
            return after["stat"], y

        return jax.lax.scan(step, arrays["stat"], x * FACTORS)

    return call


def shard_map(run):
    return lambda *args: jax.jit(jax.shard_map(run, **nestings.over_one_axis()))(*args)


def export(run):
    return lambda *args: jax.export.export(jax.jit(run))(*args).call(*args)


def eval_shape(run):
    return lambda *args: jax.tree.map(jnp.zeros_like, jax.eval_shape(run, *args))


AROUND = (jit, vmap, grad, checkpoint, vjp, jvp, linearize, fwd_and_bwd, hessian, scan, shard_map)
AROUND += (export, eval_shape)
REVERSE_AROUND = (grad, checkpoint, vjp, fwd_and_bwd, hessian)
FORWARD_AROUND = (jvp, linearize, hessian)


def pure(fun, shared, registered, is_python=False):
    """A function of arrays from one of a model, which JAX has made if it is `registered`."""

    def run(arrays, x, count):
        m = nestings.Model(shared=shared)
        variables = {"w": m.a.w, "b": m.b.w, "u": m.u, "stat": m.stat}
        for name, array in arrays.items():
            variables[name].set_value(array)
        with jax.ensure_compile_time_eval():  # Python takes branches by it
            m.count.set_value(jnp.int32(0) if is_python else count)
        if registered:
            m = jax.tree.map(lambda x: x, m)
        y = fun(m, x)
        return y, {"stat": m.stat[...], "count": m.count[...]}

    return run


def exists(outer, inner, body, mesh):
    """Whether JAX has the program."""
    is_reverse = outer in REVERSE_AROUND
    around = (nestings.grad,) * is_reverse + (nestings.jvp,) * (outer in FORWARD_AROUND)
    if body is through_host and (around or outer is vmap or inner in DERIVATIVES):
        return False  # in a trace, these have no derivative
    if body is with_reference and inner is nestings.shard_map and (around or outer is vmap):
        return False  # outside of jit, it takes no references
    if outer is shard_map and inner in (nestings.cond, nestings.switch) and mesh is not None:
        return False  # Python cannot read the counter
    if body is with_reference and (outer is hessian or inner in RULES):
        return False  # where these are new, JAX does not map over them, nor take them in rules
    if body is with_reference and outer is scan and inner in nestings.FORWARD:
        return False  # JAX fails to lower the jaxpr on Explicit axes, though its types are right
    if outer is export and inner is nestings.shard_map and mesh is None:
        return False  # a program for several devices is called in the context of their mesh
    if outer is shard_map and (inner is nestings.shard_map or body is through_host):
        return False  # along the other axis, not all is replicated; in it, nothing is moved
    return nestings.exists(inner, *around)


def draw(outer, inner):
    """All that is left to chance of a program that JAX has."""
    while True:
        body, mesh = random.choice(BODIES), random.choice([None, *MESHES])
        if exists(outer, inner, body, mesh):
            break
    mode = random.choice([*MODES])
    shared = MODES[mode]["graph"] and random.random() < 0.5
    return body, mode, mesh, shared, not shared and random.random() < 0.5


def check(outer, inner, body, mode, mesh, shared, registered):
    """Compares with the same program of eager Python."""
    place, context = jnp.asarray, contextlib.nullcontext()
    if mesh is not None:
        names = ("model", "data") if mesh == "mixed" else ("data", "model")
        mesh = jax.make_mesh((2, 4), names, axis_types=MESHES[mesh])
        place = functools.partial(jax.device_put, device=NamedSharding(mesh, SPEC))
        context = jax.set_mesh(mesh)
    values = {"w": 0.7, "u": -0.4, "stat": 0.1} | ({} if shared else {"b": 0.6})
    args = (
        {name: place(jnp.full(8, x)) for name, x in values.items()},
        jnp.float32(0.3),
        jnp.int32(0),
    )
    ours = inner(Transforms(nnx_sharding, **MODES[mode]), body)
    eager = nestings.TRANSFORMS[inner](body)
    with context:
        found = outer(pure(ours, shared, registered))(*args)
        wanted = outer(pure(eager, shared, registered, is_python=True))(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=1e-4), found, wanted)
    types = (jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (found, wanted))
    assert next(types) == next(types)


def check_some(pairs):
    failures = {}
    for outer, inner in pairs:
        case = draw(outer, inner)
        try:
            check(outer, inner, *case)
        except Exception as error:
            names = [getattr(x, "__name__", str(x)) for x in (outer, inner, *case)]
            failures[" ".join(names)] = error
    if failures:
        raise ExceptionGroup("\n".join(failures), [*failures.values()])


PAIRS = [
    (outer, inner)
    for outer in AROUND
    for inner in nestings.TRANSFORMS
    if exists(outer, inner, nestings.base, "auto")
]


@new
@pytest.mark.parametrize("number", range(4))
def test_some_under_jax(number):
    check_some(random.sample(PAIRS, 2))


@new
@pytest.mark.parametrize("name", sorted(NAMES))
def test_under_jax(name):
    check_some([pair for pair in PAIRS if pair[1] is NAMES[name]] * 2)


@new
@pytest.mark.parametrize("name", sorted(NAMES))
def test_computations_stay_on_the_host(name):
    run = NAMES[name](Transforms(nnx_sharding, graph=True), on_host)
    lowered = nnx_sharding.jit(run).lower(nestings.Model(shared=True), jnp.float32(1)).as_text()
    assert 'compute_type = "host"' in lowered


# Random streams, and Variables of other kinds.


class Model(nnx.Module):
    """A parameter and random numbers."""

    def __init__(self, **options):
        self.w = nnx.Param(jnp.arange(1.0, 4.0), **options)
        self.n = nnx.BatchStat(jnp.float32(0), **options)
        self.rngs = nnx.Rngs(dropout=0)

    def __call__(self, x):
        self.n[...] += 1
        return jnp.sin(self.w[...] * x)


def last_branch(t, fun):
    return lambda m, x: t.switch(1, [lambda m, x: x.sum(), fun], m, x)


def noise(model, x):
    return x.sum() * jax.random.normal(model.rngs.dropout())


def reseeded(library, transform):
    def step(model, x):
        nnx.reseed(model, dropout=7)
        return noise(model, x)

    return transform(library, step)


def reseeds(library, transform):
    def step(model, x):
        nnx.reseed(model, dropout=7)
        value = transform(library, noise)(model, x)
        nnx.reseed(model, dropout=8)
        return value

    return library.jit(step)


def forks(library, transform):
    fork = nnx.fork_rngs(split=3)
    return library.jit(lambda model, x: fork(transform(library, lambda m, x: x.sum()))(model, x))


@pytest.mark.parametrize("how", (reseeded, reseeds, forks))
@pytest.mark.parametrize("transform", (*nestings.TRANSPARENT, last_branch))
def test_random_streams_as_flax(transform, how):
    results = []
    for library in nnx_sharding, nnx:
        model = Model()
        value = how(library, transform)(model, X)
        stream = model.rngs.dropout
        results.append((value, stream.count[...], jax.random.key_data(stream.key[...])))
    jax.tree.map(np.testing.assert_array_equal, *results)


# Programs that make plain models of their own, or tangents and jaxprs for arrays.
OTHER_MODELS = (
    "vmap",
    "map_models",
    "vjp",
    "jvp",
    "linearize",
    "make_jaxpr",
    "flax_jit",
    "flax_remat",
)
# JAX differentiates no writes to references outside of the function, and does not move them.
NO_REFERENCES = ("grad", "value_and_grad", "shard_map")


@pytest.mark.parametrize("kind", ("hijax", "ref"))
@pytest.mark.parametrize("name", sorted(NAMES))
def test_variables_of_other_kinds(name, kind):
    """They end as plain ones do."""
    if name in OTHER_MODELS or (kind == "ref" and name in NO_REFERENCES):
        pytest.skip("JAX or Flax does not have it.")
    run = NAMES[name](Transforms(nnx_sharding, **random.choice([*MODES.values()])), nestings.base)
    results = []
    for options in {}, {kind: True}:
        m = nestings.Model(shared=False)
        m.count, m.stat = (nnx.BatchStat(x[...], **options) for x in (m.count, m.stat))
        results.append((run(m, jnp.float32(0.3)), m.count[...], m.stat[...]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *results)
