"""``nnx.capture`` around and within the transforms: what Flax or a loop of Python collects."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_sharding
from libraries import FLAX, FULL, OURS, WITHOUT_UPDATES, assert_same, named, programs_of
from nnx_sharding import stack

X = jnp.linspace(-1, 1, 8).reshape(2, 4)
XS = jnp.stack([X, X + 1, X * 2])


class Loud(nnx.Module):
    """Sows twice under one name, under another name in a part, and in another type."""

    def __init__(self, rngs):
        self.dense = Part(rngs)
        self.scale = nnx.Param(jnp.float32(2))

    def __call__(self, x):
        self.sow(nnx.Intermediate, "x", x)
        y = jnp.tanh(self.dense(x)) * self.scale[...]
        self.sow(nnx.Intermediate, "x", y.mean())
        self.sow(nnx.BatchStat, "norm", jnp.abs(y).sum(), init_fn=float, reduce_fn=jnp.add)
        return y


class Part(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (4, 4)))

    def __call__(self, x):
        y = self.perturb("y", x @ self.kernel[...], variable_type=nnx.Perturbation)
        self.sow(nnx.Intermediate, "out", y)
        return y


class Model(nnx.Module):
    """Layers as one module."""

    def __init__(self, layers, run):
        self.layers, self.run = layers, nnx.static(run)

    def __call__(self, *args):
        return self.run(self.layers, *args)


SOWN = nnx.Intermediate, nnx.BatchStat
TYPES = nnx.Perturbation, *SOWN  # a perturbation is an Intermediate, too


def capture(model, *args, types=TYPES, **options):
    return nnx.capture(lambda model, *args: model(*args), *types, **options)(model, *args)


def layers(t=FLAX):
    return nnx.split_rngs(splits=3)(t.vmap(Loud))(nnx.Rngs(0))


def mapped(t, axis=0):
    axes = t.StateAxes({nnx.Intermediate: axis, ...: 0})
    return t.vmap(lambda m, x: m(x), in_axes=(axes, None))


def looped(transforms):
    return transforms.scan(
        lambda x, m: m(x), in_axes=(transforms.Carry, 0), out_axes=transforms.Carry
    )


# Programs for the transforms of any library.


def vmap_of_mapped(t):
    return capture(Model(layers(), mapped(t)), X)


def vmap_along_another_axis(t):
    run = mapped(t, -1)
    return capture(Model(layers(), run), X, types=SOWN)


def vmap_of_unmapped_without_sowing(t):
    run = t.vmap(lambda m, x: x @ m.dense.kernel[...] * m.scale[...], in_axes=(None, 0))
    return capture(Model(Loud(nnx.Rngs(0)), run), XS)


def vmap_of_unmapped_with_equal_values(t):
    def call(m, x):
        m.sow(nnx.Intermediate, "scale", m.scale[...] * 2)
        return m.dense.perturb("x", x, variable_type=nnx.Perturbation)

    return capture(Model(Loud(nnx.Rngs(0)), t.vmap(call, in_axes=(None, 0))), XS)


def scan_of_mapped(t):
    return capture(Model(layers(), lambda m, x: looped(t)(x, m)), X)


def scan_of_mapped_twice(t):
    return capture(Model(layers(), lambda m, x: looped(t)(looped(t)(x, m), m)), X)


def scan_in_vmap(t):
    model = nnx.vmap(nnx.split_rngs(splits=3)(FLAX.vmap(Loud)))(
        nnx.Rngs(params=jax.random.split(jax.random.key(0)))
    )
    run = t.vmap(lambda m, x: looped(t)(x, m), in_axes=(0, None))
    return capture(Model(model, run), X)


def in_remat(t):
    return capture(Model(Loud(nnx.Rngs(0)), t.remat(lambda m, x: m(x))), X)


def in_grad(t):
    run = t.value_and_grad(lambda m, x: m(x).sum())
    return capture(Model(Loud(nnx.Rngs(0)), run), X)


def in_jit(t):
    return capture(Model(Loud(nnx.Rngs(0)), t.jit(lambda m, x: m(x))), X)


def within_vmap(t):
    run = t.vmap(lambda m, x: capture(m, x), in_axes=(0, None))
    return run(layers(), X)


def within_scan(t):
    def step(x, m):
        y, *states = capture(m, x)
        return y, states

    return t.scan(step, in_axes=(t.Carry, 0))(X, layers())


def within_grad(t):
    def loss(m, x):
        y, *states = capture(m, x)
        return y.sum(), states

    return t.value_and_grad(loss, has_aux=True)(Loud(nnx.Rngs(0)), X)


def outputs_of_methods(t):
    return capture(Model(layers(), mapped(t)), X, method_outputs=nnx.Intermediate)


def gradients_of_perturbations(t):
    def call(m, x):
        return looped(t)(x, m)

    model = Model(layers(), call)
    _, start = capture(model, X, types=[nnx.Perturbation])

    def loss(model, start, x):
        y, state = capture(model, x, types=[nnx.Intermediate], init=start)
        return (y**2).sum(), state

    return t.grad(loss, argnums=1, has_aux=True)(model, start, X)


PROGRAMS = programs_of(globals())


def stacked(calls):
    """What separate calls return and collect, stacked."""
    return jax.tree.map(lambda *xs: jnp.stack(xs), *calls)


def of_each_layer(model, x):
    """A loop over the layers, and what it collects in each of them."""
    states = []
    for layer in nnx_sharding.Stack(model, 3):
        x, *found = capture(layer, x)
        states.append(found)
    return x, stacked(states)


def at_layers(result, *path):
    """The result of ``capture``, with the states at a path."""
    value, *states = result
    for key in path:
        states = [state[key] for state in states]
    return value, states


class AsFlaxTest(parameterized.TestCase):
    @parameterized.named_parameters(named(PROGRAMS))
    def test_program(self, program):
        assert_same(program(OURS), program(FLAX), rtol=1e-5)


class StackedTest(parameterized.TestCase):
    """Where Flax refuses: what is captured in each element or step is stacked."""

    @parameterized.product(axes=[None, "all", 1], mode=[FULL, *WITHOUT_UPDATES])
    def test_vmap_of_a_module_that_is_not_mapped(self, axes, mode):
        axes = OURS.StateAxes({...: None}) if axes == "all" else axes
        layer = Loud(nnx.Rngs(0))
        expected = stacked([capture(layer, x, types=SOWN) for x in XS])
        if axes == 1:  # along which the array, and not the module, is mapped
            axes, xs = (None, 1), jnp.moveaxis(XS, 0, 1)
        else:
            axes, xs = (axes, 0), XS
        run = nnx_sharding.vmap(lambda m, x: m(x), in_axes=axes, **mode)
        ours = at_layers(capture(Model(layer, run), xs, types=SOWN), "layers")
        assert_same(ours, (expected[0], [*expected[1:]]), rtol=1e-5)

    @parameterized.parameters("vmap", "scan")
    def test_twice_needs_an_axis(self, name):
        # What a second call adds may be reduced with what the first one stacked.
        def twice(axes):
            if name == "vmap":
                run = nnx_sharding.vmap(lambda x, m: m(x), in_axes=(0, axes))
                x = XS
            else:
                loop = {"in_axes": (nnx.Carry, axes), "out_axes": nnx.Carry, "length": 3}
                run, x = nnx_sharding.scan(lambda x, m: m(x), **loop), X
            return capture(Model(Loud(nnx.Rngs(0)), lambda m, x: run(run(x, m), m)), x, types=SOWN)

        with pytest.raises(ValueError, match=r"(?s)m\.__captures__\[0\].*an axis"):
            twice(None)
        _, _, norm = twice(OURS.StateAxes({SOWN: 0, ...: None}))
        assert norm["layers"]["norm"].shape == (3,)

    @parameterized.product(position=["carry", "same", "axes"], mode=[FULL, *WITHOUT_UPDATES])
    def test_scan_of_a_module_that_is_not_mapped(self, position, mode):
        def step(x, m):
            return m(x), None

        def carry(pair, _):
            m, x = pair
            return (m, m(x)), None

        layer, x, states = Loud(nnx.Rngs(0)), X, []
        for _ in range(3):
            x, *found = capture(layer, x, types=SOWN)
            states.append(found)
        Carry, options = nnx_sharding.Carry, {"length": 3, **mode}
        if position == "carry":
            loop = nnx_sharding.scan(carry, in_axes=(Carry, None), **options)
            run = lambda m, x: loop((m, x), None)[0][1]  # noqa: E731
        else:
            axes = None if position == "same" else OURS.StateAxes({...: None})
            loop = nnx_sharding.scan(step, in_axes=(Carry, axes), **options)
            run = lambda m, x: loop(x, m)[0]  # noqa: E731
        ours = at_layers(capture(Model(layer, run), X, types=SOWN), "layers")
        assert_same(ours, (x, stacked(states)), rtol=1e-5)

    @parameterized.product(
        options=[{}, {"remat": True}, {"remat": {"dense": "save"}}, {"unroll": True}],
        around=["call", "jit", "remat"],
    )
    def test_layers(self, options, around):
        model = Model(stack(Loud, 3, rngs=nnx.Rngs(0), **options), lambda m, x: m(x))
        if around != "call":
            model.run = getattr(nnx_sharding, around)(lambda m, x: m(x))
        ours = at_layers(capture(model, X), "layers", "layers")
        assert_same(ours, of_each_layer(model.layers.layers, X), rtol=1e-5)

    def test_layers_of_layers(self):
        def inner(rngs):
            return stack(Loud, 2, rngs=rngs)

        model = stack(inner, 3, rngs=nnx.Rngs(0))
        x, states = X, []
        for outer in model:
            for layer in outer:
                x, *found = capture(layer, x)
                states.append(found)
        expected = jax.tree.map(lambda x: x.reshape(3, 2, *x.shape[1:]), stacked(states))
        assert_same(at_layers(capture(model, X), "layers", "layers"), (x, expected), rtol=1e-5)

    def test_outputs_of_methods(self):
        def run(model, x):
            return nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)(x)

        model = stack(Part, 3, rngs=nnx.Rngs(0))
        y, state = run(model, X)
        x, states = X, []
        for layer in model:
            x, found = run(layer, x)
            states.append(found)
        assert_same((y, state["layers"]), (x, stacked(states)), rtol=1e-5)

    def test_gradients_with_a_stack(self):
        model = stack(Loud, 3, rngs=nnx.Rngs(0))

        def loss(model, x):
            y, state = capture(model, x, types=[nnx.Intermediate])
            return (y**2).sum(), state

        def eager(model, x):
            states = []
            for layer in model:
                x, found = capture(layer, x, types=[nnx.Intermediate])
                states.append(found)
            return (x**2).sum(), stacked(states)

        (ours, state), grads = nnx_sharding.value_and_grad(loss, has_aux=True)(model, X)
        (theirs, expected), of_eager = nnx_sharding.value_and_grad(eager, has_aux=True)(model, X)
        assert_same((ours, state["layers"], grads), (theirs, expected, of_eager), rtol=3e-4)

    def test_perturbations_of_a_stack(self):
        model = stack(Loud, 3, rngs=nnx.Rngs(0))
        _, start = capture(model, X, types=[nnx.Perturbation])

        def loss(model, start, x):
            run = nnx.capture(lambda m, x: m(x), init=start)
            return (run(model, x) ** 2).sum()

        ours = nnx_sharding.grad(loss, argnums=1)(model, start, X)
        model = Model(model.layers, lambda m, x: looped(FLAX)(x, m))
        _, start = capture(model, X, types=[nnx.Perturbation])
        theirs = nnx.grad(loss, argnums=1)(model, start, X)
        assert_same(ours, theirs, rtol=1e-5)

    def test_variable_without_arrays(self):
        for transform in (nnx_sharding.vmap, nnx_sharding.scan):
            model = layers()
            model.seen = nnx.Intermediate(None)

            def fun(m, x):
                m.seen.set_value({"x": x * m.scale[...]})
                return x

            transform(fun, in_axes=(0, 0), out_axes=0)(model, jnp.arange(3.0))
            np.testing.assert_allclose(model.seen["x"], jnp.arange(3.0) * 2)
            with pytest.raises(ValueError, match=r"length|sizes"):
                transform(fun, in_axes=(0, 0), out_axes=0)(model, jnp.arange(4.0))

    def test_shard_map_as_declared(self):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        layer, x = Loud(nnx.Rngs(0)), jnp.linspace(-1, 1, 64).reshape(16, 4)
        specs = nnx_sharding.StateSharding({nnx.Intermediate: P("data"), ...: P()})
        run = nnx_sharding.shard_map(
            lambda m, x: m.dense(x), mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data")
        )
        types = [nnx.Intermediate]
        y, state = capture(Model(layer, run), x, types=types)
        expected = capture(layer.dense, x, types=types)
        assert_same((y, state["layers"]["dense"]), expected, rtol=1e-5)
        assert state["layers"]["dense"]["out"][0].sharding.spec == P("data")
