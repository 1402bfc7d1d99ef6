"""``grad`` and ``value_and_grad``: what ``flax.nnx``, JAX and eager Python compute."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import NamedSharding

import nnx_sharding
from graphs import Loose, snapshot
from libraries import (
    FLAX,
    FULL,
    OURS,
    WITHOUT_UPDATES,
    Transforms,
    assert_same,
    named,
    node,
    param,
    programs_of,
    stat,
)
from zoo import MLP, Counter, Net, P, mesh_of

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)


class Plain:
    """Without an ``__eq__``."""


def square(model, x=X):
    return jnp.mean(model(x) ** 2)


WIDE = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)


def net():
    return Net(features=3)


# Programs for the transforms of any library. Each returns all that can be seen of the outcome.


def of_a_model(t):
    model = MLP()
    return t.value_and_grad(square)(model), nnx.state(model)


def gradient_alone(t):
    return t.grad(square)(MLP(), X)


def with_aux(t):
    model = Counter()

    def loss(m, x):
        return m(x) ** 2, {"x": x, "note": m.scale[...] * 2}

    return (
        t.value_and_grad(loss, has_aux=True)(model, 3.0),
        t.grad(loss, has_aux=True)(model, 3.0),
        nnx.state(model),
    )


def of_nothing(t):
    model = node(n=nnx.BatchStat(jnp.ones(3)), parts=nnx.List([node()]))
    fun = t.value_and_grad(lambda m, x: ((m.n[...] * x).sum(), m.n[...]), has_aux=True)
    return fun(model, 2.0), t.grad(lambda m: 1.0)(node()), t.grad(lambda m: 1.0)([node(), None])


def of_nothing_in_one_of_several(t):
    fun = t.grad(lambda m, n, o: square(m) * n.n[...] * o.other[...], argnums=(0, 1, 2))
    return fun(MLP(), node(n=stat(2)), node(other=param()))


def by_a_diff_state_that_matches_nothing(t):
    return t.grad(square, argnums=nnx.DiffState(0, nnx.LoRAParam))(MLP())


def other_position(t):
    return t.grad(lambda x, m: m(x) ** 2, argnums=1)(2.0, Counter())


def of_an_array(t):
    model = Counter()
    return t.grad(lambda m, x: m(x) ** 2, argnums=1)(model, 3.0), nnx.state(model)


def of_several(t):
    model = Counter()
    fun = t.value_and_grad(lambda m, x, y: m(x) ** 2 * y["a"], argnums=(0, 2))
    return fun(model, 3.0, {"a": jnp.float32(2), "b": jnp.float32(1)}), nnx.state(model)


def of_one_in_a_tuple(t):
    return t.grad(square, argnums=(0,))(MLP(), X)


def by_diff_state(t):
    fun = t.grad(lambda m: square(m, WIDE), argnums=nnx.DiffState(0, nnx.PathContains("bias")))
    return fun(net())


def by_several_diff_states(t):
    which = (nnx.DiffState(0, nnx.PathContains("up")), 1, nnx.DiffState(2, nnx.Param))
    fun = t.grad(lambda a, s, b: square(a) * s + square(b), argnums=which)
    return fun(MLP(), jnp.float32(2), MLP(nnx.Rngs(1)))


def of_statistics(t):
    model = net()
    which = nnx.DiffState(0, (nnx.Param, nnx.BatchStat))
    model.norm.use_running_average = True
    return t.grad(lambda m: square(m.norm, WIDE), argnums=which)(model)


def statistics_and_dropout(t):
    model = net()
    fun = t.value_and_grad(square)
    return [fun(model, WIDE) for _ in range(2)], nnx.state(model)


def metrics(t):
    model, metric = MLP(), nnx.metrics.Average()

    def loss(m, metric):
        value = square(m)
        metric.update(values=value)
        return value

    fun = t.grad(loss)
    grads = [fun(model, metric), fun(model, metric)]
    return grads, metric.compute(), nnx.state(metric)


def new_key_of_rngs(t):
    rngs, model = nnx.Rngs(0), MLP()

    def loss(m, rngs):
        return square(m, jax.random.normal(rngs(), (2, 4)))

    return t.value_and_grad(loss)(model, rngs), nnx.state(rngs), rngs()


def shared_in_one_argument(t):
    shared = param(2)
    model = node(a=node(w=shared), b=node(w=shared), c=param(3))
    grads = t.grad(lambda m: m.a.w[...] * m.b.w[...] * m.c[...])(model)
    return jax.tree.map(lambda x: x, grads), nnx.state(model)


def cycle(t):
    model = node(w=param(3), child=node(w=param(2)))
    model.child.parent = model
    return t.grad(lambda m: m.w[...] ** 2 * m.child.parent.child.w[...])(model)


def pytree_of_modules(t):
    models = {"one": MLP(), "two": [MLP(nnx.Rngs(1)), jnp.float32(2)]}
    return t.grad(lambda ms: square(ms["one"]) + ms["two"][1] * square(ms["two"][0]))(models)


def bare_variable(t):
    v = param(3)

    def loss(v):
        value = v[...] ** 2
        v[...] += 1
        return value

    return t.value_and_grad(loss)(v), v[...]


def variable_of_another_type(t):
    return t.grad(lambda v: v[...] ** 2)(nnx.BatchStat(jnp.float32(3)))


def variables_in_a_list(t):
    return t.grad(lambda vs: vs[0][...] * vs[1][...])([param(3), param(4)])


def shared_list_of_variables(t):
    shared = param(3)
    values = [shared, node(w=shared, v=param(2)), {"again": shared}]
    return t.grad(lambda vs: vs[0][...] * vs[1].w[...] * vs[1].v[...] * vs[2]["again"][...])(values)


def shared_between_arguments(t):
    shared = param(3)
    models = node(w=shared, u=param(1)), node(w=shared, v=param(2))
    fun = t.grad(lambda a, b: a.w[...] * b.w[...] ** 2 + b.v[...] * a.u[...], argnums=(0, 1))
    return fun(*models)


def the_same_model_twice(t):
    model = MLP()
    return t.grad(lambda a, b: square(a) + square(b), argnums=(0, 1))(model, model)


def variable_of_none(t):
    model = node(w=param(2), bias=nnx.Param(None))
    return t.grad(lambda m: m.w[...] * 2)(model)


def numbers_in_variables(t):
    model = node(w=nnx.Param(3.0), n=nnx.BatchStat(2))
    return t.grad(lambda m: m.w[...] * m.n.get_value())(model)


def metadata(t):
    model = node(w=nnx.Param(jnp.float32(2), mark=1, out_sharding=()))
    return t.grad(lambda m: m.w[...] ** 2)(model)


def static_arguments(t):
    def loss(m, name, flag, nothing):
        value = square(m)
        return value * 2 if name == "twice" and flag and nothing is None else value

    return t.grad(loss)(MLP(), "twice", True, None), t.grad(loss)(MLP(), "once", True, None)


def other_aux(t):
    fun = t.value_and_grad(lambda m: [m.w[...] * 2, {"name": "a", "n": None}], has_aux=True)
    (_, aux), grads = fun(node(w=param(2)))
    assert aux == {"name": "a", "n": None}
    return grads


def loss_of_python(t):
    return t.value_and_grad(lambda m: 3.0)(node(w=param(2)))[1]


def function_as_argument(t):
    return t.grad(lambda x, f: f(x))(2.0, jnp.sin)


def lora(t):
    model = nnx.LoRALinear(2, 2, lora_rank=1, rngs=nnx.Rngs(0))
    loss = t.grad(lambda m: square(m, X[:, :2]), argnums=nnx.DiffState(0, nnx.LoRAParam))
    return loss(model)


def of_a_state(t):
    graphdef, state = nnx.split(MLP())
    return t.grad(lambda s: square(nnx.merge(graphdef, s)))(state)


def of_a_state_by_variables(t):
    graphdef, params, rest = nnx.split(net(), nnx.Param, ...)

    def loss(params):
        return square(nnx.merge(graphdef, params, rest).linear, WIDE)

    return t.grad(loss)(params)


def integers_allowed(t):
    model = node(w=param(3), n=nnx.Param(jnp.int32(2)))
    return t.grad(lambda m: m.w[...] ** 2 * m.n[...], allow_int=True)(model)


def integer_argument(t):
    return t.grad(lambda n, w: w**2 * n, argnums=(0, 1), allow_int=True)(
        jnp.int32(3), jnp.float32(2)
    )


def holomorphic(t):
    v = nnx.Param(jnp.complex64(1 + 2j))
    return t.grad(lambda v: v[...] ** 3, holomorphic=True)(v)


def complex_parameters(t):
    model = node(w=nnx.Param(jnp.complex64(1 + 2j)))
    return t.grad(lambda m: jnp.abs(m.w[...]) ** 2)(model)


def pytree_values(t):
    model = node(w=nnx.Param({"x": jnp.float32(2), "y": [jnp.float32(3)]}))
    return t.grad(lambda m: m.w["x"] * m.w["y"][0] ** 2)(model)


def reduced_precision(t):
    model = nnx.Linear(4, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    return t.value_and_grad(lambda m: square(m).astype(jnp.float32))(model)


def attribute_added(t):
    model = MLP()

    def loss(m):
        m.seen = nnx.Intermediate(m.up(X).mean())
        m.calls = 1
        return square(m)

    grads = t.grad(loss)(model)
    return grads, nnx.state(model), model.calls


def attribute_removed(t):
    model = node(w=param(2), old=param(3))

    def loss(m):
        value = m.w[...] ** 2 * m.old[...]
        del m.old
        return value

    return t.grad(loss)(model), nnx.state(model)


def sown(t):
    class Sowing(MLP):
        def __call__(self, x):
            hidden = self.up(x)
            self.sow(nnx.Intermediate, "hidden", hidden)
            return self.down(hidden)

    model = Sowing()

    def loss(m):
        value, sown = nnx.capture(m, nnx.Intermediate)(X)
        return jnp.mean(value**2), sown

    return t.value_and_grad(loss, has_aux=True)(model), nnx.state(model)


def differentiated_variable_is_written(t):
    model = node(w=param(3))

    def loss(m):
        m.w[...] = m.w[...] * 2
        return m.w[...] ** 2

    return t.value_and_grad(loss)(model), model.w[...]


def model_made_inside(t):
    def loss(x):
        model = node(w=nnx.Param(x * 2), v=param(3))
        return model.w[...] ** 2 + model.v[...], model

    grads, model = t.grad(loss, has_aux=True)(jnp.float32(3))
    return grads, nnx.state(model)


def models_as_aux(t):
    model = MLP()
    (_, (same, new)), grads = t.value_and_grad(
        lambda m: (square(m), (m, node(w=nnx.Param(m.up.kernel[...] * 2)))), has_aux=True
    )(model)
    assert same is model
    return grads, nnx.state(new)


def loose_module(t):
    model = Loose()
    model.w, model.flag = param(3), True
    return t.grad(lambda m: m.w[...] ** 2 if m.flag else 0.0)(model)


def of_itself_with_state(t):
    model = Counter()

    def inner(m):
        return m(3.0) ** 2

    def outer(m):
        grads = t.grad(inner)(m)
        return grads["scale"][...] * m(1.0)

    return t.value_and_grad(outer)(model), nnx.state(model)


def of_a_model_that_is_closed_over(t):
    model, other = MLP(), node(w=param(2))
    return t.grad(lambda m: square(m) * other.w[...])(model)


def in_a_training_step(t):
    model = MLP()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = []
    for _ in range(4):
        value, grads = t.value_and_grad(square)(model)
        optimizer.update(model, grads)
        losses.append(value)
    return losses, nnx.state(model), nnx.state(optimizer)


PROGRAMS = programs_of(globals())


# These run as a part of jit, too.
COMPILED = (
    of_a_model,
    by_several_diff_states,
    shared_between_arguments,
    cycle,
    pytree_of_modules,
    new_key_of_rngs,
    integers_allowed,
    pytree_values,
    models_as_aux,
    attribute_removed,
    of_itself_with_state,
    differentiated_variable_is_written,
    statistics_and_dropout,
)


# These run without graph updates, where Flax has neither filters nor gradients of integers.
RUN_WITHOUT_UPDATES = (
    *(of_a_model, gradient_alone, of_one_in_a_tuple, pytree_of_modules),
    *(bare_variable, variable_of_another_type, variables_in_a_list, variable_of_none, metadata),
    *(of_a_state, integers_allowed, integer_argument, holomorphic, pytree_values),
    *(differentiated_variable_is_written, of_a_model_that_is_closed_over, in_a_training_step),
)


class AsFlaxTest(parameterized.TestCase):
    @parameterized.named_parameters(named(PROGRAMS))
    def test_program(self, program):
        assert_same(program(OURS), program(FLAX))

    @parameterized.named_parameters(named(COMPILED))
    def test_program_in_jit(self, program):
        ours = nnx_sharding.jit(lambda: program(OURS), **FULL)()
        assert_same(ours, nnx.jit(lambda: program(FLAX), **FULL)(), rtol=1e-5)

    @parameterized.named_parameters(named(RUN_WITHOUT_UPDATES))
    def test_without_graph_updates(self, program):
        """Gradients are modules, as in Flax, whichever way the mode is chosen."""
        for mode in WITHOUT_UPDATES:
            theirs = program(Transforms(nnx, **mode))
            assert_same(program(Transforms(nnx_sharding, **mode)), theirs)
            with nnx.set_graph_mode(mode["graph"]), nnx.set_graph_updates(False):
                assert_same(program(nnx_sharding), theirs)

    def test_a_filter_gives_a_state_in_every_mode(self):
        """Flax has no filters without graph updates."""
        for mode in (*WITHOUT_UPDATES, FULL):
            for which in ({"wrt": nnx.Param}, {"argnums": nnx.DiffState(0, nnx.Param)}):
                ours = nnx_sharding.grad(square, **which, **mode)(MLP(), X)
                assert_same(ours, FLAX.grad(square)(MLP(), X))

    @parameterized.product(graph=(True, False), compiled=(True, False), static=(Plain, list))
    def test_modules_of_gradients_have_the_static_objects_of_the_model(
        self, graph, compiled, static
    ):
        """Those that are compared by identity are part of the treedef."""
        mode = {"graph": graph, "graph_updates": False}
        model, plain = param([1.0, 2.0]), static()
        model.set_metadata(note=plain)
        model = node(w=model, config=plain)

        def loss(model):
            return (model.w[...] ** 2).sum()

        def pulled(model):
            return nnx_sharding.vjp(loss, model, **mode)[1](1.0)[0]

        for function in nnx_sharding.grad(loss, **mode), pulled:
            gradient = (nnx_sharding.jit(function, **mode) if compiled else function)(model)
            new = jax.tree.map(lambda x, y: x - y, model, gradient)
            np.testing.assert_allclose(new.w[...], [-1, -2])
            assert gradient.config is plain and gradient.w.get_metadata("note") is plain

    def test_integers_without_graph_updates_are_named(self):
        with pytest.raises(TypeError, match=r"m\.count: int32\[\]\n.*wrt=nnx\.Param"):
            nnx_sharding.grad(lambda m: m(2.0), graph=False)(Counter())

    def test_without_graph_updates_values_are_kept_and_attributes_refused(self):
        model = Counter()
        OURS.grad(lambda m: m(2.0), wrt=nnx.Param, graph_updates=False)(model)
        assert model.count[...] == 1

        def loss(m):
            m.new = nnx.BatchStat(jnp.ones(2))
            return m.scale[...]

        OURS.grad(loss, wrt=nnx.Param, graph_updates=False)(model)
        assert not hasattr(model, "new")

    def test_tree_mode_refuses_shared_variables(self):
        shared = param()
        with pytest.raises(ValueError, match=r"a/w.*b/w|shared references"):
            OURS.grad(lambda m: m.a.w[...], graph=False)(node(a=node(w=shared), b=node(w=shared)))


def model_with_two():
    return node(a=node(w=param(2)), b=node(w=param(3)), s=nnx.BatchStat(jnp.float32(5)))


def product(m, x=1.0):
    return m.a.w[...] * m.b.w[...] * m.s[...] * x


class OwnOptionsTest(parameterized.TestCase):
    @parameterized.parameters(
        (nnx.PathContains("a"), ["a"]),
        (nnx.Param, ["a", "b"]),
        ((nnx.BatchStat, nnx.PathContains("b")), ["b", "s"]),
        (..., ["a", "b", "s"]),
        (nnx.Not(nnx.Param), ["s"]),
        (lambda path, value: path[0] == "a", ["a"]),
    )
    def test_wrt_is_a_diff_state(self, filter_, keys):
        grads = OURS.grad(product, wrt=filter_)(model_with_two())
        assert sorted(grads) == keys
        assert_same(grads, FLAX.grad(product, argnums=nnx.DiffState(0, filter_))(model_with_two()))

    def test_wrt_leaves_arrays_outside_of_modules_alone(self):
        values = {"x": 2.0, "m": model_with_two(), "v": nnx.BatchStat(jnp.float32(3))}
        fun = OURS.grad(lambda v: product(v["m"], v["x"]) * v["v"][...], wrt=nnx.PathContains("a"))
        grads = fun(values)
        assert (grads["x"], grads["v"][...]) == (90, 60)
        assert [*grads["m"]] == ["a"]

    @parameterized.parameters("m", "x", [("x", "m")], [(0, "x")], -1, [(-2,)])
    def test_by_name_and_position(self, which):
        names = ("m", "x")
        several = isinstance(which, tuple)
        positions = [
            names.index(x) if isinstance(x, str) else x % 2 for x in (which if several else [which])
        ]
        ours = OURS.grad(product, argnums=which)(model_with_two(), 2.0)
        theirs = FLAX.grad(product, argnums=tuple(positions))(model_with_two(), 2.0)
        assert_same(ours, theirs if several else theirs[0])

    def test_arguments_by_keyword(self):
        expected = OURS.grad(product)(model_with_two(), 2.0)
        assert_same(OURS.grad(product)(x=2.0, m=model_with_two()), expected)
        assert_same(OURS.grad(product, argnums="m")(x=2.0, m=model_with_two()), expected)

        @OURS.grad(argnums=("scale", "ms[1]"))
        def loss(*ms, scale):
            return square(ms[0]) + square(ms[1]) * scale

        slope, grads = loss(MLP(), MLP(nnx.Rngs(1)), scale=2.0)
        np.testing.assert_allclose(slope, square(MLP(nnx.Rngs(1))), rtol=1e-6)
        doubled = FLAX.grad(lambda m: square(m) * 2)(MLP(nnx.Rngs(1)))
        assert_same(grads, doubled, rtol=1e-5)

    def test_shared_with_an_argument_that_is_not_differentiated(self):
        shared = param(3)
        fun = OURS.grad(lambda a, b: a.w[...] * b.w[...], argnums=1)
        assert fun(node(w=shared), node(w=shared))["w"][...] == 6

    def test_variables_that_hold_references(self):
        model = node(w=param(3), n=nnx.BatchStat(jnp.float32(0), ref=True))

        def loss(m):
            m.n[...] += 1
            return m.w[...] ** 2

        for calls, transform in enumerate((lambda f: f, nnx_sharding.jit), start=1):
            assert transform(OURS.grad(loss))(model)["w"][...] == 6
            assert model.n[...] == calls  # Flax loses this change

    def test_plain_arrays_are_as_in_jax(self):
        def loss(a, b):
            return (a["x"] ** 2 * b).sum()

        args = {"x": np.ones(3, np.float32), "none": None}, 2.0
        for argnums in (0, 1, (0, 1), [1, 0], -1):
            assert_same(
                OURS.value_and_grad(loss, argnums=argnums)(*args),
                jax.value_and_grad(loss, argnums=argnums)(*args),
            )

    def test_methods(self):
        class Model(nnx.Module):
            def __init__(self):
                self.w, self.calls = param(3), nnx.BatchStat(jnp.float32(0))

            def loss(self, x):
                self.calls[...] += 1
                return self.w[...] ** 2 * x

            slope = OURS.grad(loss)
            slope_of_x = OURS.value_and_grad(loss, argnums="x")

            @staticmethod
            @OURS.grad
            def cube(x):
                return x**3

        model = Model()
        assert model.slope(2.0)["w"][...] == 12
        assert Model.slope(model, 2.0)["w"][...] == 12
        value, slope = model.slope_of_x(2.0)
        assert (value, slope, model.calls[...]) == (18, 9, 3)
        assert model.cube(2.0) == 12
        assert OURS.grad(model.loss, argnums="self")(2.0)["w"][...] == 12
        with pytest.raises(ValueError, match="argnums='self'"):
            OURS.grad(model.loss)

    def test_gradients_are_new_and_fit_the_optimizer(self):
        model = MLP()
        before = snapshot(model)
        grads = OURS.grad(square)(model)
        assert snapshot(model) == before
        assert grads["up"]["kernel"] is not model.up.kernel
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.PathContains("up"))
        optimizer.update(model, OURS.grad(square, wrt=nnx.PathContains("up"))(model))
        assert snapshot(model.down) == snapshot(MLP().down)
        assert snapshot(model.up) != snapshot(MLP().up)


class ShardedTest(parameterized.TestCase):
    @parameterized.product(
        kind=["auto", "explicit"], which=[0, nnx.DiffState(0, nnx.PathContains("kernel"))]
    )
    def test_gradients_have_the_shardings_of_parameters(self, kind, which):
        mesh = mesh_of((4, 2), ("data", "model"), kind)
        model, specs = MLP(), {"up": P(None, "model"), "down": P("model", None)}
        for name, spec in specs.items():
            kernel = getattr(model, name).kernel
            kernel.set_value(jax.device_put(kernel[...], NamedSharding(mesh, spec)))
        x = jax.device_put(X, NamedSharding(mesh, P("data")))

        def loss(m, x):
            hidden = jax.nn.relu(x @ m.up.kernel[...])
            kernel = m.down.kernel[...]
            if kind == "auto":
                return jnp.mean((hidden @ kernel) ** 2)
            return jnp.mean(jnp.einsum("bh,hf->bf", hidden, kernel, out_sharding=P("data")) ** 2)

        with jax.set_mesh(mesh):
            for transform in (lambda fun: fun, functools.partial(nnx_sharding.jit, **FULL)):
                grads = transform(OURS.grad(loss, argnums=which))(model, x)
                for name, spec in specs.items():
                    array = grads[name]["kernel"][...]
                    assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        expected = FLAX.grad(square, argnums=which)(MLP(), X)
        assert_same(jax.tree.map(np.asarray, grads), jax.tree.map(np.asarray, expected), rtol=1e-5)

    @parameterized.parameters("grad", "value_and_grad")
    def test_captured_arrays_are_not_blamed_for_a_missing_mesh(self, name):
        mesh = mesh_of((4, 2), ("data", "model"), "explicit")
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        step = nnx_sharding.jit(lambda model, x: model(x), in_shardings=(P(), P("data")), mesh=mesh)
        grad = getattr(OURS, name)(lambda model: jnp.mean(step(model, x) ** 2))
        with pytest.raises(ValueError, match=r"jax\.set_mesh") as caught:
            grad(MLP())
        assert not any("captures" in note for note in caught.value.__notes__)
        with jax.set_mesh(mesh):
            grad(MLP())

    def test_in_shard_map_as_jax(self):
        mesh = mesh_of((8,), ("data",))
        model, counter = MLP(), Counter()

        def loss(up, down, x):
            return jnp.mean((jax.nn.relu(x @ up) @ down) ** 2)

        @nnx_sharding.shard_map(mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P(), **FULL)
        def ours(model, counter, x):
            def counted(m, c, x):
                c.count[...] += 1
                return loss(m.up.kernel[...], m.down.kernel[...], x)

            return OURS.grad(counted)(model, counter, x)

        grads = ours(model, counter, X)
        expected = jax.jit(
            jax.shard_map(
                jax.grad(loss, argnums=(0, 1)),
                mesh=mesh,
                in_specs=(P(), P(), P("data")),
                out_specs=P(),
            )
        )(model.up.kernel[...], model.down.kernel[...], X)
        for name, array in zip(("up", "down"), expected, strict=True):
            np.testing.assert_allclose(grads[name]["kernel"][...], array, rtol=1e-5)
        assert counter.count[...] == 1


class ErrorTest(parameterized.TestCase):
    @parameterized.parameters(
        (ValueError, "argnums=2, but product has the arguments m, x", {"argnums": 2}, product),
        (ValueError, "'y'.*arguments: m, x", {"argnums": "y"}, product),
        (ValueError, "more than once: .1, 'x'", {"argnums": (1, "x")}, product),
        (ValueError, "more than once: .1, -1", {"argnums": (1, -1)}, product),
        (ValueError, "in m: .* Cache.* Param", {"wrt": nnx.Cache}, product),
        (TypeError, r"must return a scalar loss, got float32\[3\]", {}, lambda m, x: jnp.ones(3)),
        (TypeError, "must return a scalar loss, got a tuple.*has_aux", {}, lambda m, x: (x, x)),
        (TypeError, "must return a scalar loss, got a NoneType", {}, lambda m, x: None),
        (TypeError, "must return a scalar loss, got a Param", {}, lambda m, x: m.a.w),
        (TypeError, "must return a pair", {"has_aux": True}, product),
        (TypeError, r"m\.n: int32\[\]", {"wrt": nnx.Cache}, lambda m, x: 1.0),
    )
    def test_call(self, error, message, options, fun):
        model = model_with_two()
        if message.startswith(r"m\.n"):
            model.n = nnx.Cache(jnp.int32(1))
        with pytest.raises(error, match=message):
            OURS.grad(fun, **options)(model, 2.0)

    @parameterized.parameters(
        ({"argnums": (0, 0)}, "argnums"),
        ({"argnums": 1.5}, "argnums"),
        ({"wrt": 5}, "not an NNX filter"),
    )
    def test_options(self, options, message):
        with pytest.raises(TypeError, match=message):
            OURS.grad(**options)

    def test_captured_object_is_named_once(self):
        model = Counter()

        def loss(x):
            return model(x) ** 2

        with pytest.raises(TraceContextError) as caught:
            nnx_sharding.jit(lambda x: nnx_sharding.grad(loss)(x))(1.0)
        assert str(caught.value).count("model.") == 1

    def test_integers_name_their_place(self):
        models = {"one": [node(n=nnx.Param(jnp.int32(1)), w=param())]}
        with pytest.raises(TypeError, match=r"ms\['one'\]\[0\]\.n: int32"):
            OURS.grad(lambda ms: ms["one"][0].w[...])(models)
