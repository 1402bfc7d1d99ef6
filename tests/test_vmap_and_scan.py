"""``vmap`` and ``scan``: what ``flax.nnx`` and a loop of Python compute."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import nnx_sharding
from graphs import snapshot
from libraries import FLAX, FULL, OURS, assert_same, named, node, param, programs_of, stat
from nnx_sharding import Carry, StateAxes
from zoo import MLP, Counter

TRACES = logging.getLogger("traces")
X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
KEYS = jax.random.split(jax.random.key(0), 3)


class Block(nnx.Module):
    """Parameters, running statistics and random streams."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (4, 4)))
        self.mean = nnx.BatchStat(jnp.zeros(4))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        y = x @ self.kernel[...]
        self.mean[...] += y.mean(0)
        return x + self.dropout(y - self.mean[...])


def blocks(t, make=Block, **options):
    """Three blocks in one."""
    return nnx.split_rngs(splits=3, **FULL)(t.vmap(lambda rngs: make(rngs), **options))(nnx.Rngs(0))


def linear(rngs):
    """A layer with logical axes in its metadata."""
    init = nnx.with_partitioning(nnx.initializers.ones, ("in", "out"), eager_sharding=False)
    return nnx.Linear(4, 4, kernel_init=init, rngs=rngs)


# Programs for the transforms of any library. Each returns all that can be seen of the outcome.


def make_models(t):
    return nnx.state(blocks(t))


def make_models_along_other_axes(t):
    axes = t.StateAxes({nnx.Param: 1, nnx.BatchStat: -1, ...: 0})
    return nnx.state(blocks(t, out_axes=axes))


def make_models_with_axes_of_flax(t):
    return nnx.state(blocks(t, out_axes=nnx.StateAxes({nnx.Param: 2, ...: 0})))


def make_with_a_part_that_is_not_mapped(t):
    axes = t.StateAxes({nnx.PathContains("same"): None, ...: 0})
    fun = t.vmap(lambda x: node(same=param(3), own=nnx.Param(x)), out_axes=axes)
    return nnx.state(fun(jnp.arange(3.0)))


def call_models(t):
    models = blocks(t)
    fun = t.vmap(lambda m, x: m(x), in_axes=(0, None))
    return fun(models, X), fun(models, X), nnx.state(models)


def call_by_keyword(t):
    return t.vmap(lambda m, x: m(x), in_axes=(0, None))(blocks(t), x=X)


def pytree_axes(t):
    fun = t.vmap(
        lambda d: (d["a"].sum() + d["b"], d["a"]),
        in_axes=({"a": None, "b": 0},),
        out_axes=(0, None),
    )
    return fun({"a": X, "b": jnp.ones(3)})


def negative_axes(t):
    return t.vmap(lambda x: jnp.outer(x, x), in_axes=-1, out_axes=-1)(X)


def unmapped_and_written_alike(t):
    counter = Counter()
    return t.vmap(lambda c, x: c(x), in_axes=(None, 0))(counter, jnp.arange(3.0)), nnx.state(
        counter
    )


def shared_variables(t):
    shared = nnx.Param(jnp.arange(3.0))
    a, b = node(w=shared), node(w=shared, v=nnx.Param(jnp.ones(3)))

    def add(a, b):
        a.w[...] += b.v[...]
        return b.w[...]

    return t.vmap(add)(a, b), shared[...]


def pytree_of_models(t):
    models = {"one": blocks(t), "two": [blocks(t, MLP), jnp.arange(3.0)]}
    return t.vmap(lambda ms: ms["one"](X) * ms["two"][1] + ms["two"][0](X))(models)


def attributes_added(t):
    models = blocks(t)

    def fun(m, x):
        m.seen, m.flag = nnx.Intermediate(m.kernel[...] * x), 3
        return x

    return t.vmap(fun)(models, jnp.arange(3.0)), nnx.state(models), models.flag


def static_arguments(t):
    fun = t.vmap(
        lambda x, f, s, n: x * 2 if f and s == "a" and n is None else x,
        in_axes=(0, None, None, None),
    )
    return fun(X, True, "a", None), fun(X, False, "a", None)


def collective(t):
    return t.vmap(lambda x: x / jax.lax.psum(x, "i"), axis_name="i")(jnp.arange(1.0, 4.0))


def size_of_the_axis(t):
    return t.vmap(lambda: jnp.ones(2), axis_size=3)()


def metadata_of_axes(t):
    names = {"transform_metadata": {nnx.PARTITION_NAME: "layers"}}
    models, seen = blocks(t, linear, out_axes=1, **names), []

    def fun(m, x):
        seen.append(m.kernel.get_metadata()["out_sharding"])
        m.new = nnx.Param(jnp.ones(2), out_sharding=("a",), eager_sharding=False)
        return m(x)

    t.vmap(fun, in_axes=(1, None), **names)(models, X)
    assert seen == [("in", "out")]
    return nnx.state(models)


def metadata_of_axes_in_scan(t):
    names = {"transform_metadata": {nnx.PARTITION_NAME: "layers"}}
    models, seen = blocks(t, linear, **names), []

    def fun(x, m):
        seen.append(m.kernel.get_metadata()["out_sharding"])
        return m(x)

    out = t.scan(fun, in_axes=(t.Carry, 0), out_axes=t.Carry, **names)(X, models)
    assert set(seen) == {("in", "out")}
    return out, nnx.state(models)


def scan_arrays(t):
    return t.scan(lambda c, x: (c + x, c * x))(0.0, jnp.arange(4.0))


def scan_options(t):
    def run(**options):
        axes = {"in_axes": (t.Carry, 0), "out_axes": (t.Carry, 0)}
        return t.scan(lambda c, x: (c + x, c * x), **axes, **options)(0.0, jnp.arange(4.0))

    return run(reverse=True), run(unroll=2), run(unroll=True), run(length=4), run()


def scan_by_length(t):
    fun = t.scan(lambda c: (c * 2, c), in_axes=t.Carry, out_axes=(t.Carry, 0), length=4)
    return fun(1.0)


def scan_of_nothing(t):
    return t.scan(lambda c, x: (c + x, c * x))(0.0, jnp.zeros(0))


def scan_along_axes(t):
    def run(axis):
        axes = {"in_axes": (t.Carry, axis), "out_axes": (axis, t.Carry)}
        return t.scan(lambda c, x: (x * c, c + x.sum()), **axes)(0.0, X)

    return run(1), run(-1), run(0)


def scan_without_carry(t):
    fun = t.scan(lambda x, y: {"x": x * 2, "y": y}, in_axes=(0, None), out_axes=0)
    return fun(jnp.arange(3.0), 5.0)


def scan_layers(t):
    models = blocks(t)
    fun = t.scan(lambda x, m: m(x), in_axes=(t.Carry, 0), out_axes=t.Carry)
    return fun(X, models), fun(X, models), nnx.state(models)


def scan_layers_backwards_along_axis_1(t):
    models = blocks(t, MLP, out_axes=1)
    axes = {"in_axes": (1, t.Carry), "out_axes": t.Carry}
    return t.scan(lambda m, x: m(x), reverse=True, **axes)(models, X)


def scan_with_state_axes(t):
    axes = t.StateAxes({nnx.Param: 0, nnx.BatchStat: t.Carry})
    model = node(w=nnx.Param(jnp.arange(3.0)), n=stat())

    def step(m, x):
        m.n[...] += 1
        return x * m.w[...] + m.n[...]

    return t.scan(step, in_axes=(axes, t.Carry), out_axes=t.Carry)(model, 2.0), nnx.state(model)


def module_as_carry(t):
    counter = Counter()
    same, ys = t.scan(lambda m, x: (m, m(x)))(counter, jnp.arange(4.0))
    return ys, nnx.state(counter), nnx.state(same)


def module_in_the_carry(t):
    counter = Counter()

    def step(carry, x):
        y = carry["m"](x)
        return {"m": carry["m"], "sum": carry["sum"] + y}, y

    last, ys = t.scan(step)({"m": counter, "sum": 0.0}, jnp.arange(4.0))
    assert last["m"] is counter
    return last["sum"], ys, nnx.state(counter)


def variable_as_carry(t):
    v = stat(1)

    def step(v, x):
        v[...] += x
        return v, x

    same, _ = t.scan(step)(v, jnp.arange(3.0))
    assert same is v
    return v[...]


def array_of_a_module_in_the_carry(t):
    model = node(a=nnx.data(jnp.float32(1)))

    def step(m):
        m.a = m.a * 2
        return m

    return t.scan(step, in_axes=t.Carry, out_axes=t.Carry, length=3)(model).a


def arrays_of_mapped_modules(t):
    model = node(a=nnx.data(jnp.arange(3.0)), w=nnx.Param(jnp.arange(3.0)))

    def step(c, m):
        m.a = m.a * 2
        m.w = nnx.Param(m.w[...] + 1)
        return c + m.a

    out = t.scan(step, in_axes=(t.Carry, 0), out_axes=t.Carry)(0.0, model)
    return out, model.a, nnx.state(model)


def optimizer_in_the_carry(t):
    model = MLP()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def step(carry, x):
        model, optimizer = carry
        value, grads = t.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return carry, value

    _, values = t.scan(step)((model, optimizer), jnp.stack([X] * 3))
    return values, nnx.state(model), nnx.state(optimizer)


def new_models_in_scan(t):
    out = (t.Carry, t.StateAxes({nnx.Param: 1, ...: 0}))
    fun = t.scan(lambda c, key: (c + 1, Block(nnx.Rngs(key))), in_axes=(t.Carry, 0), out_axes=out)
    count, models = fun(0.0, KEYS)
    return count, nnx.state(models)


def attributes_added_in_scan(t):
    models = blocks(t, MLP)

    def step(x, m):
        hidden = m.up(x)
        m.seen, m.flag = nnx.Intermediate(hidden.mean()), 7
        return m.down(hidden)

    out = t.scan(step, in_axes=(t.Carry, 0), out_axes=t.Carry)(X, models)
    return out, nnx.state(models), models.flag


def scan_of_scan(t):
    def step(carry, x):
        models, total = carry
        inner = t.scan(lambda x, m: m(x), in_axes=(t.Carry, 0), out_axes=t.Carry)
        y = inner(x, models)
        return (models, total + y.sum()), y

    (models, total), ys = t.scan(step)((blocks(t), 0.0), jnp.stack([X, X + 1]))
    return total, ys, nnx.state(models)


def grad_of_scan(t):
    models = blocks(t)

    def loss(m):
        run = t.scan(lambda x, m: m(x), in_axes=(t.Carry, 0), out_axes=t.Carry)
        return (run(X, m) ** 2).mean()

    return t.value_and_grad(loss)(models), nnx.state(models)


PROGRAMS = programs_of(globals())
COMPILED = (
    call_models,
    shared_variables,
    scan_layers,
    scan_with_state_axes,
    module_in_the_carry,
    grad_of_scan,
)


# Programs with axes that ``nnx.prefix`` makes in both of its forms.

AXES = {nnx.Param: 1, nnx.BatchStat: 0, nnx.RngState: 0, ...: None}


def prefixed_blocks(t, graph):
    axes = nnx.prefix(Block(nnx.Rngs(0)), AXES, graph=graph)
    return t.vmap(Block, out_axes=axes)(nnx.Rngs(0).split(3))


def prefix_of_a_module(t, graph):
    models = prefixed_blocks(t, graph)
    axes = nnx.prefix(models, AXES, graph=graph)
    y = t.vmap(lambda m, x: m(x), in_axes=(axes, None))(models, X)
    z = t.scan(lambda x, m: m(x), in_axes=(t.Carry, axes), out_axes=t.Carry)(X, models)
    return y, z, nnx.state(models)


def prefix_of_what_is_not_mapped(t, graph):
    model = MLP()
    axes = nnx.prefix(model, {...: None}, graph=graph)
    run = t.scan(lambda x, m, y: (m(x), y), in_axes=(t.Carry, axes, 0))
    return run(X, model, jnp.arange(3.0))


def prefixes_of_two_modules(t, graph):
    models = prefixed_blocks(t, graph), blocks(t)

    def axis(path, x):
        return 1 if path[0] == 0 and isinstance(x, nnx.Param) else 0

    axes = nnx.prefix(models, axis, graph=graph)
    both = t.vmap(lambda m, n, x: n(m(x)), in_axes=(*axes, None))(*models, X)
    as_one = t.vmap(lambda ms, x: ms[1](ms[0](x)), in_axes=(axes, None))(models, X)
    return both, as_one


def prefix_of_variables(t, graph):
    values = {"a": param(2), "b": nnx.BatchStat(jnp.arange(5))}
    axes = nnx.prefix(values, lambda path, x: 0 if "b" in path else None, graph=graph)
    return t.vmap(lambda v: v["a"] * v["b"], in_axes=(axes,))(values)


def prefix_of_streams(t, graph):
    rngs = nnx.Rngs(params=0, dropout=1).split({"params": 3}).broadcast({"dropout": 3})
    axes = nnx.prefix(rngs, {...: 0}, graph=graph)
    return t.scan(lambda r: (r.params(), r.dropout()), in_axes=(axes,), out_axes=0)(rngs)


def prefix_of_shared(t, graph):
    models = blocks(t, MLP)
    if not graph:  # which refuses shared Variables
        return ()
    axes = nnx.prefix((models, models), {nnx.Param: 0}, graph=True)
    return t.vmap(lambda m, n, x: m(x) + n(x), in_axes=(*axes, None))(models, models, X)


def module_of_axes(t, graph):
    if graph:  # where Flax refuses it
        return ()
    models = blocks(t, MLP)
    axes = jax.tree.map(lambda _: 0, models)
    y = t.vmap(lambda m, x: m(x), in_axes=(axes, None))(models, X)
    return y, t.scan(lambda x, m: m(x), in_axes=(t.Carry, axes), out_axes=t.Carry)(X, models)


PREFIXES = (
    module_of_axes,
    prefix_of_a_module,
    prefix_of_what_is_not_mapped,
    prefixes_of_two_modules,
    prefix_of_variables,
    prefix_of_streams,
    prefix_of_shared,
)


class AsFlaxTest(parameterized.TestCase):
    @parameterized.named_parameters(named(PROGRAMS))
    def test_program(self, program):
        assert_same(program(OURS), program(FLAX), rtol=1e-5)

    @parameterized.named_parameters(named(COMPILED))
    def test_program_in_jit(self, program):
        assert_same(OURS.jit(lambda: program(OURS))(), program(FLAX), rtol=1e-5)

    @parameterized.parameters({"graph": False}, {"graph_updates": False})
    def test_other_modes(self, **mode):
        for program in (
            scan_layers_backwards_along_axis_1,
            module_as_carry,
            unmapped_and_written_alike,
        ):
            ours, theirs = (program(WithOptions(t, mode)) for t in (OURS, FLAX))
            assert_same(ours, theirs)

    @parameterized.parameters(-3, -2, -1, 0, 1, 2)
    def test_names_of_axes(self, axis):
        # Flax counts a negative axis in the names without the axis itself.
        outer = axis + 4 if axis < 0 else axis
        seen, ours = names_of_axes(OURS, axis, axis)
        expected, theirs = names_of_axes(FLAX, axis % 3, outer)
        assert seen == expected == {("in", "out")}
        assert_same(ours, theirs, rtol=1e-5)

    def test_names_of_scalars(self):
        names = {"transform_metadata": {nnx.PARTITION_NAME: "layers"}}

        def make():
            return node(scale=nnx.Param(jnp.ones(()), out_sharding=(), eager_sharding=False))

        models = OURS.vmap(make, axis_size=3, **names)()
        assert OURS.vmap(lambda m: m.scale[...] * 2, **names)(models).tolist() == [2, 2, 2]
        assert models.scale.get_metadata()["out_sharding"] == ()
        layers = nnx_sharding.stack([make(), make()])
        assert layers[1].scale.get_metadata()["out_sharding"] == ()

    @parameterized.product(program=PREFIXES, graph=[True, False])
    def test_prefix(self, program, graph):
        mode = {"graph": graph, "graph_updates": False}
        ours, theirs = (program(WithOptions(t, mode), graph) for t in (OURS, FLAX))
        assert_same(ours, theirs, rtol=1e-5)

    @parameterized.parameters(0, 1)
    def test_prefix_of_new_variables(self, axis):
        models = blocks(OURS, MLP)
        axes = nnx.prefix(models, {nnx.Intermediate: axis, ...: 0}, graph=True)

        def fun(m):
            m.seen = nnx.Intermediate(jnp.ones(2))

        run = OURS.vmap(fun, in_axes=(axes,), out_axes=0)
        if axis == 0:
            run(models)
            assert models.seen.shape == (3, 2)
        else:
            with pytest.raises(ValueError, match=r"(?s)nnx.prefix.*m\.seen: 1.* StateAxes"):
                run(models)

    def test_arrays_of_modules_without_graph_updates(self):
        model = node(a=nnx.data(jnp.float32(2)), w=stat(1))

        def step(m, x):
            m.w[...] += m.a
            return x * m.w[...]

        ys = OURS.scan(step, in_axes=(None, 0), out_axes=0, graph=False)(model, jnp.ones(3))
        assert (ys.tolist(), model.w[...]) == ([3, 5, 7], 7)


def names_of_axes(t, axis, outer):
    """Logical axes inside and outside of transforms that map kernels along an axis."""
    one, two = ({"transform_metadata": {nnx.PARTITION_NAME: name}} for name in ("one", "two"))
    axes, outer = (t.StateAxes({nnx.PathContains("kernel"): x, ...: 0}) for x in (axis, outer))
    seen, models = [], blocks(t, linear, out_axes=axes, **one)

    def step(x, m):
        seen.append(m.kernel.get_metadata()["out_sharding"])
        m.kernel[...] += x.mean()
        m.other = node(kernel=nnx.Param(m.kernel[...], out_sharding=("a",), eager_sharding=False))
        return m(x)

    t.vmap(step, in_axes=(None, axes), **one)(X, models)
    x = t.scan(step, in_axes=(t.Carry, axes), out_axes=t.Carry, **one)(X, models)
    new = t.scan(lambda x: linear(nnx.Rngs(0)), in_axes=(0,), out_axes=axes, **one)(jnp.ones(3))
    nested = t.vmap(
        t.vmap(lambda x: linear(nnx.Rngs(0)), out_axes=axes, **one), out_axes=outer, **two
    )(jnp.ones((5, 3)))
    return set(seen), (x, [nnx.state(m) for m in (models, new, nested)])


class WithOptions:
    """Transforms with other options."""

    def __init__(self, t, options):
        self.Carry, self.StateAxes = t.Carry, t.StateAxes
        self.vmap, self.scan = (functools.partial(x, **options) for x in (t.vmap, t.scan))


def counting(model, x):
    model.n[...] += x
    return model.n[...] * model.w[...]


class LoopTest(parameterized.TestCase):
    """Where Flax does something else than a loop of Python: ours is the loop."""

    def assert_is_loop(self, step, make, xs, **options):
        ours, theirs = make(), make()
        run = OURS.scan(step, in_axes=(None, 0), out_axes=0, **options)
        for transform in (lambda f: f, OURS.jit):
            ys = transform(lambda m: run(m, xs))(ours)
            expected = jnp.stack([step(theirs, x) for x in xs])
            np.testing.assert_allclose(ys, expected, rtol=1e-6)
            assert snapshot(ours) == snapshot(theirs)

    def test_changes_of_what_is_not_mapped_go_on_to_the_next_step(self):
        self.assert_is_loop(counting, lambda: node(n=stat(), w=param(2)), jnp.arange(3.0))

    def test_random_streams(self):
        def step(rngs, x):
            return x * jax.random.normal(rngs())  # a sum could cancel

        self.assert_is_loop(step, lambda: nnx.Rngs(0), jnp.arange(3.0))

    def test_shared_by_what_is_not_mapped(self):
        def make():
            shared = stat()
            return node(n=shared, w=param(2), again=node(n=shared))

        self.assert_is_loop(
            lambda m, x: counting(m, x) + m.again.n[...], make, jnp.arange(3.0), unroll=2
        )

    def test_pytree_values(self):
        def step(m, x):
            m.n.set_value({"x": m.n["x"] + x, "y": m.n["y"]})
            return m.n["x"] * m.n["y"]

        def make():
            return node(n=nnx.BatchStat({"x": jnp.float32(0), "y": jnp.float32(2)}))

        self.assert_is_loop(step, make, jnp.arange(3.0))

    def test_references(self):
        def make():
            return node(n=nnx.BatchStat(jnp.float32(0), ref=True), w=param(2))

        self.assert_is_loop(counting, make, jnp.arange(3.0))

    def test_arguments_that_are_not_arrays_stay_what_they_are(self):
        def step(carry, x, flag, size, name, function):
            assert (flag, name) == (True, "sum")
            return carry + getattr(jnp, name)(function(x) * jnp.ones(size))

        fun = OURS.scan(step, in_axes=(Carry, 0, None, None, None, None), out_axes=Carry)
        assert fun(0.0, jnp.arange(3.0), True, 2, "sum", jnp.square) == 10
        assert fun(0.0, jnp.arange(3.0), True, 3, "sum", jnp.square) == 15

    def test_parameters_are_inputs_of_the_loop_and_never_outputs(self):
        models = blocks(OURS, MLP)
        forward = OURS.scan(lambda x, m: m(x), in_axes=(Carry, 0), out_axes=Carry)
        jaxpr = jax.make_jaxpr(lambda m, x: forward(x, m))(models, X)
        (loop,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
        assert [x.aval.shape for x in loop.outvars] == [X.shape]

        shared = MLP()
        forward = OURS.scan(lambda m, x: m(x), in_axes=(None, Carry), out_axes=Carry, length=3)
        jaxpr = jax.make_jaxpr(forward)(shared, X)
        (loop,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
        assert [x.aval.shape for x in loop.outvars] == [X.shape]
        before = shared.up.kernel[...]
        forward(shared, X)
        assert shared.up.kernel[...] is before

    def test_top_level_loop_is_traced_once(self):
        def step(x, m, scale):
            TRACES.info("traced")  # a list would be something that the step reaches
            return m(x) * scale

        forward = OURS.scan(step, in_axes=(Carry, 0, None), out_axes=Carry)
        models, others = blocks(OURS, MLP), blocks(OURS, MLP)
        first = forward(X, models, 1.0)
        with self.assertNoLogs(TRACES):
            np.testing.assert_allclose(forward(X, others, 2.0) / first, 8, rtol=1e-5)

    def test_failure_leaves_the_metadata(self):
        names = {"transform_metadata": {nnx.PARTITION_NAME: "layers"}}
        models = blocks(OURS, linear, **names)
        before = snapshot(models)
        with pytest.raises(ZeroDivisionError):
            OURS.vmap(lambda m: 1 / 0, **names)(models)
        assert snapshot(models) == before

    def test_methods(self):
        class Model(nnx.Module):
            def __init__(self, rngs):
                self.w = nnx.Param(jax.random.normal(rngs(), (2,)))

            @OURS.vmap(in_axes=(0, None))
            def each(self, x):
                return self.w[...].sum() * x

            @OURS.scan(in_axes=(0, Carry), out_axes=Carry)
            def all(self, x):
                return self.w[...].sum() * x

        models = blocks(OURS, Model)
        factors = models.w[...].sum(1)
        np.testing.assert_allclose(models.each(2.0), factors * 2, rtol=1e-6)
        np.testing.assert_allclose(models.all(2.0), factors.prod() * 2, rtol=1e-6)
        bound = OURS.vmap(MLP().up.__call__, in_axes=(0,))
        assert bound(jnp.ones((3, 4))).shape == (3, 16)

    def test_keyword_only_arguments_are_not_mapped_unless_named(self):
        def fun(x, *, scale):
            return x * scale

        assert OURS.vmap(fun, in_axes=(0,))(jnp.ones(3), scale=jnp.ones(2)).shape == (3, 2)
        by_name = OURS.vmap(fun, in_axes={"x": None, "scale": 0})
        assert by_name(jnp.ones(3), scale=jnp.ones(2)).shape == (2, 3)

    def test_carry_by_keyword_after_a_default(self):
        def step(x, scale=2.0, total=0.0):
            return x, total + scale * x

        run = OURS.scan(step, in_axes=(0, None, Carry), out_axes=(0, Carry))
        assert float(run(jnp.ones(3), total=jnp.float32(1))[1]) == 7
        with pytest.raises(TypeError, match="step is called without total, which is the carry"):
            run(jnp.ones(3), 2.0)


def scan_of(step, in_axes=(Carry, 0), out_axes=(Carry, 0), **options):
    return OURS.scan(step, in_axes=in_axes, out_axes=out_axes, **options)


def counter_step(change):
    """A step on a module that is not mapped, which changes it."""

    def step(m, x):
        change(m)
        return x

    return lambda: scan_of(step, (None, 0), 0)(node(w=param(), k=1, s=stat()), jnp.arange(3.0))


def other_carry(carry, x):
    return {"a": Counter(), "b": Counter}, x


class ErrorTest(parameterized.TestCase):
    def test_stacked_keys_that_are_not_mapped(self):
        """JAX says that there are several keys; the note says which ones, and what to do."""
        make = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs)))
        axes = StateAxes({nnx.Param: 0, ...: None})
        with self.assertRaisesRegex(ValueError, "accepts a single key") as caught:
            OURS.vmap(lambda m, x: m(x), in_axes=(axes, 0))(make(nnx.Rngs(0)), X[:3])
        [note] = [note for note in caught.exception.__notes__ if "stacked" in note]
        self.assertRegex(note, r"m\.rngs\.key.*key<fry>\[3\]")
        self.assertIn("StateAxes({nnx.RngState: 0", note)

    @parameterized.parameters(
        (TypeError, "in_axes: expected an axis, got 'a'", lambda: OURS.vmap(in_axes="a")),
        (TypeError, r"out_axes\[1\]: .* got 1.5", lambda: OURS.scan(out_axes=(Carry, 1.5))),
        (TypeError, "expected an axis, got True", lambda: StateAxes({...: True})),
        (TypeError, "Carry is for scan", lambda: OURS.vmap(in_axes=(Carry, 0))),
        (TypeError, "Carry is for scan", lambda: OURS.vmap(in_axes=StateAxes({...: Carry}))),
        (ValueError, "only one argument", lambda: OURS.scan(in_axes=(Carry, Carry))),
        (ValueError, "both in_axes and", lambda: OURS.scan(in_axes=(Carry, 0), out_axes=0)),
        (ValueError, "both in_axes and", lambda: OURS.scan(in_axes=0, out_axes=(Carry, 0))),
        (ValueError, "cannot be None", lambda: OURS.scan(out_axes=(Carry, None))),
    )
    def test_options(self, error, message, make):
        with pytest.raises(error, match=message):
            make()

    @parameterized.parameters(
        (r"m\.(up|down)\.kernel", lambda: OURS.vmap(lambda m, x: x)(MLP(), jnp.ones(3))),
        (
            r"length 3: m.mean\(3, 4\).*\n  length 2: x\(2, 4\)",
            lambda: scan_of(
                lambda c, m, x: (c, c), (Carry, StateAxes({nnx.BatchStat: 0, ...: None}), 0)
            )(0.0, blocks(OURS), X),
        ),
        (
            r"length 4: x.*\n  length 3: the option length",
            lambda: scan_of(lambda c, x: (c, x), length=3)(0.0, jnp.ones(4)),
        ),
        (r"x, float32\[2,4\]: axis 7", lambda: scan_of(lambda c, x: (c, x), (Carry, 7))(0.0, X)),
        (
            r"different axes.*\n  a.w: 0\n  b.w: None",
            lambda: (lambda v: OURS.vmap(lambda a, b: 1, in_axes=(0, None))(node(w=v), node(w=v)))(
                nnx.Param(jnp.ones(3))
            ),
        ),
        (
            r"no filter of the StateAxes matches:\n  m.up.kernel[^`]*`...: None`",
            lambda: OURS.vmap(lambda m: 1, in_axes=StateAxes({nnx.PathContains("down"): 0}))(MLP()),
        ),
        (
            r"differ between the elements:\n  model\.n, float32\[\]",
            lambda: OURS.vmap(counting, in_axes=(None, 0))(
                node(n=stat(), w=param()), jnp.arange(3.0)
            ),
        ),
        (r"2 entries for 1", lambda: OURS.vmap(lambda x: x, in_axes=(0, 0))(X)),
        (r"m\.k: is 1 before, 2 after", counter_step(lambda m: setattr(m, "k", 2))),
        (
            r"m\.new: is nothing before, a BatchStat after",
            counter_step(lambda m: setattr(m, "new", stat())),
        ),
        (r"m\.w: is replaced", counter_step(lambda m: setattr(m, "w", param()))),
        (r"m\.w: is a Param before, nothing after", counter_step(lambda m: delattr(m, "w"))),
        (
            r"m\.s.*mark.*: is nothing before, 1 after",
            counter_step(lambda m: m.s.set_metadata(mark=1)),
        ),
        (
            r"different objects in the carry.*\n  carry\[0\]: Counter",
            lambda: scan_of(lambda c, x: ((Counter(), 0.0), x))((Counter(), 0.0), jnp.ones(3)),
        ),
        (
            r"jax.Ref cannot be mapped: model\.n\.",
            lambda: scan_of(counting, (0, 0), 0)(
                node(n=nnx.BatchStat(jnp.zeros(3), ref=True), w=nnx.Param(jnp.zeros(3))),
                jnp.zeros(3),
            ),
        ),
    )
    def test_values(self, message, call):
        with pytest.raises(ValueError, match="(?s)" + message):
            call()

    @parameterized.parameters(
        (r"c: float32\[\] → float32\[3\]", lambda c, x: (jnp.ones(3), x)),
        (r"given: float32\[\]\n  returned: \(float32\[\], float32\[\]\)", lambda c, x: ((c, c), x)),
        (r"returned: \{a: a Counter, b: the class Counter\}", other_carry),
        (r"a tuple whose item 0 is the carry .*, got float32\[\]", lambda c, x: c),
    )
    def test_carry(self, message, step):
        with pytest.raises(TypeError, match=message):
            scan_of(step)(0.0, jnp.ones(3))

    def test_dtype_of_a_variable_in_the_carry(self):
        def step(m):
            m.w.set_value(jnp.int32(1))
            return m

        with pytest.raises(TypeError, match=r"m\.w: float32"):
            OURS.scan(step, in_axes=Carry, out_axes=Carry, length=2)(node(w=param()))

    @parameterized.parameters("scan", "vmap")
    def test_objects_of_an_outer_trace(self, name):
        counter = Counter()
        with pytest.raises(TraceContextError):
            getattr(OURS, name)(lambda x: counter(x), in_axes=0, out_axes=0)(jnp.arange(3.0))
        assert counter.count[...] == 0

    def test_results_that_are_not_arrays(self):
        with pytest.raises(TypeError, match=r"vmap: .*\n  output\[1\]: 'a'"):
            nnx_sharding.vmap(lambda x: (x, "a"))(X)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_names_of_axes_on_a_mesh(kind):
    names = {"transform_metadata": {nnx.PARTITION_NAME: "data"}}
    spec = P() if kind is AxisType.Explicit else None

    def run(t):
        def make(key):
            metadata = {"out_sharding": (None, "model")}
            rngs = nnx.Rngs(key)
            return nnx.Linear(4, 4, use_bias=False, kernel_metadata=metadata, rngs=rngs)

        def step(x, layer):
            kernel = layer.kernel[...]
            seen.append((layer.kernel.get_metadata()["out_sharding"], jax.typeof(kernel)))
            layer.kernel[...] = 2 * kernel
            return jnp.matmul(x, kernel, out_sharding=spec)

        seen = []
        layers = nnx.jit(t.vmap(make, **names))(KEYS[:2])
        out = nnx.jit(t.scan(step, in_axes=(t.Carry, 0), out_axes=t.Carry, **names))(X, layers)
        assert layers.kernel.get_metadata()["out_sharding"] == ("data", None, "model")
        assert layers.kernel[...].sharding.spec == P(None, None, "model")
        assert seen[0] == seen[-1] and seen[0][0] == (None, "model")
        return (out, nnx.state(layers)), seen[0]

    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        (ours, own), (theirs, expected) = run(OURS), run(FLAX)
    assert_same(ours, theirs, rtol=1e-6)
    assert own == expected


MESH_OF_TWO_AXES = jax.make_mesh((4, 2), ("data", "model"))
ROWS = jnp.arange(32.0).reshape(8, 4)


def with_noise(key, x):
    return x + jax.random.normal(key, x.shape)


@pytest.mark.parametrize("over", ["data", ("data", "model")])
@pytest.mark.parametrize("of_stream", [False, True])
def test_a_replicated_argument_is_sharded_like_the_others(of_stream, over):
    """On Explicit axes, JAX refuses keys that are split in the function with rows of a batch."""

    def from_keys(x):
        return nnx_sharding.vmap(with_noise)(jax.random.split(jax.random.key(0), 8), x)

    def from_stream(x):
        @nnx.split_rngs(splits=8)
        @nnx_sharding.vmap
        def mapped(rngs, x):
            return with_noise(rngs.noise(), x)

        return mapped(nnx.Rngs(noise=0), x)

    function = from_stream if of_stream else from_keys
    sharded = nnx_sharding.jit(function, in_shardings=(P(over),), mesh=MESH_OF_TWO_AXES)
    result = sharded(ROWS)
    np.testing.assert_allclose(result, function(ROWS), rtol=1e-6)
    assert result.sharding.spec == P(over, None)
    assert not sharded.lower(ROWS).compile().collectives()


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, nnx_sharding.jit])
@pytest.mark.parametrize("library", [np, jnp])
def test_constants_are_sharded_like_the_others(library, transform):
    offsets = library.arange(8, dtype=np.float32)

    def shifted(x):
        return nnx_sharding.vmap(jnp.add)(x, offsets) + nnx_sharding.vmap(jnp.add)(offsets, x)

    with jax.set_mesh(MESH_OF_TWO_AXES):
        x = jax.device_put(ROWS, P("data"))
        result = transform(shifted)(x)
    np.testing.assert_allclose(result, 2 * (ROWS + np.arange(8)[:, None]))
    assert result.sharding.spec == P("data", None)


def test_mapped_dimensions_of_different_sizes():
    mapped = nnx_sharding.vmap(lambda x, y: x + y)
    step = nnx_sharding.jit(mapped, in_shardings=(P("data"), None), mesh=MESH_OF_TWO_AXES)
    with pytest.raises(ValueError, match="inconsistent sizes"):
        step(ROWS, jnp.arange(7.0))


@pytest.mark.parametrize("other", [P("model"), P(None, "data")])
def test_mapped_dimensions_over_different_mesh_axes(other):
    def product(x, y):
        return nnx_sharding.vmap(jnp.multiply)(x, y)

    step = nnx_sharding.jit(product, in_shardings=(P("data"), other), mesh=MESH_OF_TWO_AXES)
    with pytest.raises(
        ValueError, match=r"(?s)different axes:\n  args\[0\], .*\n  args\[1\], .*alike"
    ):
        step(ROWS, ROWS)
