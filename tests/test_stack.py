"""``stack``: what a list of the same layers computes."""

from __future__ import annotations

import copy
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from flax import nnx

from graphs import snapshot
from libraries import FULL, OURS, assert_same, node, param
from nnx_sharding import Stack, grad, jit, remat, shard_map, stack
from zoo import MLP, P, mesh_of
from zoo import run_layers as run

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
WIDTH, LAYERS = 4, 3


class Block(nnx.Module):
    """Parameters, running statistics and random streams."""

    def __init__(self, rngs, width=WIDTH):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (width, width)))
        self.mean = nnx.BatchStat(jnp.zeros(width))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, scale=1.0, *, double=False):
        y = x @ self.kernel[...]
        self.mean[...] += y.mean(0)
        y = self.dropout(y - self.mean[...]) * scale
        return jnp.tanh(x + (2 * y if double else y))


class Outer(nnx.Module):
    """A layer with layers."""

    def __init__(self, rngs):
        self.inner = stack(Block, 2, rngs=rngs)

    def __call__(self, x):
        return self.inner(x)


class Group(nnx.Module):
    """A pattern of two kinds of layers."""

    def __init__(self, rngs):
        self.one, self.two = Block(rngs), MLP(rngs)

    def __call__(self, x):
        return jnp.tanh(self.two(self.one(x)))


def blocks(make=Block):
    return [make(nnx.Rngs(i)) for i in range(LAYERS)]


def close(ours, theirs, tol=1e-6):
    np.testing.assert_allclose(ours, theirs, rtol=tol, atol=tol)


def assert_same_layers(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert_same(nnx.state(one), nnx.state(other), rtol=1e-5)


def with_shared_kernel():
    layers, shared = blocks(), param(np.eye(WIDTH))
    for layer in layers:
        layer.kernel = shared
    return layers


def with_shared_dropout():
    layers, shared = blocks(), nnx.Dropout(0.5, rngs=nnx.Rngs(7))
    for layer in layers:
        layer.dropout = shared
    return layers


def with_tied_parts():
    layers = blocks()
    for layer in layers:
        layer.tied = layer.kernel
    return layers


def with_partly_shared(*numbers):
    """Layers whose kernels are those of the layers with these numbers."""
    layers = blocks()
    kernels = [layer.kernel for layer in layers]
    for layer, number in zip(layers, numbers, strict=True):
        layer.kernel = kernels[number]
    return layers


def with_chained_parts():
    """The second kernel of each layer is the first one of the next layer."""
    kernels = [param(np.eye(WIDTH)) for _ in range(3)]
    return [node(first=kernels[i], second=kernels[i + 1]) for i in range(2)]


def with_masks(differ):
    layers, mask = blocks(), jnp.tril(jnp.ones((WIDTH, WIDTH)))
    for i, layer in enumerate(layers):
        layer.mask = nnx.data(mask * (i + 1) if differ else mask)
    return layers


LISTS = {
    "plain": blocks,
    "shared_kernel": with_shared_kernel,
    "shared_dropout": with_shared_dropout,
    "tied": with_tied_parts,
    "masks": lambda: with_masks(False),
    "own_masks": lambda: with_masks(True),
    "nested": lambda: blocks(Outer),
    "nested_directly": lambda: [stack(blocks()) for _ in range(2)],
    "groups": lambda: blocks(Group),
    "one": lambda: blocks()[:1],
}


class AsListTest(parameterized.TestCase):
    @parameterized.named_parameters(*((name, make) for name, make in LISTS.items()))
    def test_call(self, make):
        ours, theirs = stack(make()), make()
        for _ in range(2):
            close(ours(X), run(theirs, X))
        assert_same_layers(ours, theirs)
        assert snapshot(next(iter(ours))) == snapshot(ours[0])

    @parameterized.named_parameters(*((name, LISTS[name]) for name in ("plain", "shared_dropout")))
    def test_training(self, make):
        models = stack(make()), nnx.List(make())
        losses = []
        for model in models:
            optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

            @OURS.jit
            def step(model, optimizer):
                value, grads = OURS.value_and_grad(lambda m: jnp.mean(run(m, X) ** 2))(model)
                optimizer.update(model, grads)
                return value

            losses.append([step(model, optimizer) for _ in range(5)])
        close(*losses)
        assert_same_layers(*models)

    def test_arguments_of_the_layers(self):
        ours, theirs = stack(blocks()), blocks()
        close(ours(X, 2.0, double=True), run(theirs, X, 2.0, double=True))
        close(ours(X, scale=jnp.float32(0.5)), run(theirs, X, scale=0.5))
        assert_same_layers(ours, theirs)

    def test_random_streams_as_an_argument(self):
        class Noise(nnx.Module):
            def __init__(self, rngs):
                self.scale = nnx.Param(rngs.params.normal(()))

            def __call__(self, x, rngs):
                return {"x": x["x"] + self.scale[...] * rngs.normal(x["x"].shape), "y": x["y"]}

        streams = nnx.Rngs(3), nnx.Rngs(3)
        x = {"x": jnp.ones(2), "y": jnp.ones(1)}
        ours = stack(blocks(Noise))(x, streams[0])
        assert_same(ours, run(blocks(Noise), x, streams[1]), rtol=1e-5)
        assert_same(*map(nnx.state, streams))

    @parameterized.parameters(2, True)
    def test_unroll(self, unroll):
        close(stack(blocks(), unroll=unroll)(X), run(blocks(), X))

    def test_scan(self):
        layers, expected, x = stack(blocks()), [], X
        last, means = layers.scan(lambda m, x, k: (m(x) * k, x.mean()), X, jnp.arange(3.0))
        for k, layer in enumerate(blocks()):
            expected.append(x.mean())
            x = layer(x) * k
        close(last, x)
        close(means, expected)

    def test_modes(self):
        layers = stack(blocks())
        layers.eval()
        theirs = nnx.List(blocks())
        theirs.eval()
        close(layers(X), run(theirs, X))
        layers.train()
        assert not layers[1].dropout.deterministic

    def test_gradients(self):
        ours = OURS.grad(lambda m: jnp.mean(m(X) ** 2))(stack(blocks()))
        theirs = OURS.grad(lambda m: jnp.mean(run(m, X) ** 2))(nnx.List(blocks()))
        close(ours["layers"]["kernel"][...], [theirs[i]["kernel"][...] for i in range(LAYERS)])
        shared = OURS.grad(lambda m: jnp.mean(m(X) ** 2))(stack(with_shared_kernel()))
        theirs = OURS.grad(lambda m: jnp.mean(run(m, X) ** 2))(nnx.List(with_shared_kernel()))
        close(shared["layers"]["kernel"][...], theirs[0]["kernel"][...])


class MadeTest(parameterized.TestCase):
    def test_layers_differ_and_arguments_arrive(self):
        for layers in (
            stack(Block, LAYERS, rngs=nnx.Rngs(0)),
            stack(Block, LAYERS, nnx.Rngs(0)),
            stack(Block, LAYERS, nnx.Rngs(0), width=WIDTH),
            stack(lambda rngs: Block(rngs), LAYERS, rngs=nnx.Rngs(0)),
        ):
            assert layers.layers.kernel.shape == (LAYERS, WIDTH, WIDTH)
            assert len({float(layer.kernel[0, 0]) for layer in layers}) == LAYERS
            keys = jax.random.key_data(layers.layers.dropout.rngs.key[...])
            assert len({tuple(key.tolist()) for key in keys}) == LAYERS
            close(run([*layers], X), layers(X))

    def test_as_flax_makes_them(self):
        ours = stack(Block, LAYERS, rngs=nnx.Rngs(0)).layers
        make = nnx.split_rngs(splits=LAYERS, **FULL)(nnx.vmap(lambda r: Block(r), **FULL))
        assert_same(nnx.state(ours), nnx.state(make(nnx.Rngs(0))))

    def test_a_stream_and_the_state_of_streams(self):
        rngs = nnx.Rngs(0, params=1)
        stack(lambda rngs: nnx.Linear(2, 2, rngs=nnx.Rngs(params=rngs())), 3, rngs=rngs.params)
        assert (rngs.params.count[...], rngs.default.count[...]) == (1, 0)

    def test_nested(self):
        layers = stack(Outer, LAYERS, rngs=nnx.Rngs(0))
        assert layers.layers.inner.layers.kernel.shape == (LAYERS, 2, WIDTH, WIDTH)
        close(run([inner for layer in layers for inner in layer.inner], X), layers(X))

    def test_arrays_outside_of_variables_are_the_same_in_all_layers(self):
        class Masked(nnx.Module):
            def __init__(self, rngs):
                self.linear = nnx.Linear(4, 4, rngs=rngs)
                self.mask = nnx.data(jnp.tril(jnp.ones((4, 4))))

            def __call__(self, x):
                return self.linear(x) @ self.mask

        layers = stack(Masked, LAYERS, rngs=nnx.Rngs(0))
        assert layers.layers.mask.shape == layers[1].mask.shape == (4, 4)
        close(layers(X), run([*layers], X))

    def test_logical_axes(self):
        def make(rngs):
            init = nnx.with_partitioning(nnx.initializers.ones, (None, "model"))
            return nnx.Linear(4, 4, kernel_init=init, rngs=rngs)

        with jax.set_mesh(mesh_of((2,), ("model",))):
            made = stack(make, LAYERS, rngs=nnx.Rngs(0))
            for layers in (made, stack([make(nnx.Rngs(i)) for i in range(LAYERS)]), made[1:]):
                kernel = layers.layers.kernel
                assert kernel.get_metadata()["out_sharding"] == (None, None, "model")
                assert kernel.sharding.spec == P(None, None, "model")
                assert layers[0].kernel.get_metadata()["out_sharding"] == (None, "model")
                layers(X)
                assert kernel.get_metadata()["out_sharding"] == (None, None, "model")

    def test_abstract(self):
        def shapes(module):
            return jax.tree.map(lambda x: (x.shape, x.dtype), nnx.to_pure_dict(nnx.state(module)))

        made = nnx.eval_shape(lambda: stack(Block, LAYERS, rngs=nnx.Rngs(0)), **FULL)
        concrete = stack(Block, LAYERS, rngs=nnx.Rngs(0))
        block = nnx.eval_shape(lambda: Block(nnx.Rngs(0)), **FULL)
        for layers in (made, stack([nnx.clone(block) for _ in range(LAYERS)])):
            assert shapes(layers) == shapes(concrete)
            assert shapes(layers[0]) == shapes(concrete[0])
            assert shapes(layers[1:]) == shapes(concrete[1:])


class ListTest(parameterized.TestCase):
    @parameterized.parameters(0, 2, -1, np.int64(1))
    def test_index(self, index):
        assert snapshot(stack(blocks())[index]) == snapshot(blocks()[int(index)])

    @parameterized.parameters(
        slice(1, None), slice(None, None, -1), slice(None, None, 2), slice(-2, -1)
    )
    def test_slice(self, index):
        ours, theirs = stack(blocks())[index], blocks()[index]
        assert isinstance(ours, Stack) and len(ours) == len(theirs)
        close(ours(X), run(theirs, X))
        assert_same_layers(ours, theirs)

    def test_iteration(self):
        layers = stack(blocks())
        assert snapshot([*layers]) == snapshot(blocks())
        assert len(layers) == LAYERS

    def test_a_layer_is_a_copy_until_it_is_written_back(self):
        layers = stack(blocks())
        layer = layers[1]
        layer.kernel[...] = jnp.zeros((WIDTH, WIDTH))
        assert snapshot(layers[1]) == snapshot(blocks()[1])
        before = layers.layers.kernel
        layers[-2] = layer
        assert layers.layers.kernel is before
        assert snapshot(layers[1]) == snapshot(layer)
        assert snapshot(layers[0]) == snapshot(blocks()[0])

    def test_arrays_outside_of_variables_are_written_back(self):
        layers, expected = stack(with_masks(True)), with_masks(True)
        expected[1].mask = nnx.data(7 * expected[1].mask)
        layers[1] = expected[1]
        np.testing.assert_array_equal(layers[1].mask, expected[1].mask)
        close(layers(X), run(expected, X))

    def test_shared_parts_stay_shared(self):
        for layers in (with_shared_kernel(), with_tied_parts()):
            again = stack([*stack(layers)])
            close(again(X), run(layers, X))
        layers = stack(with_shared_kernel())
        assert layers[0].kernel is layers[1].kernel is layers.layers.kernel
        tied = stack(with_tied_parts())[1]
        assert tied.tied is tied.kernel
        outside = with_shared_kernel()[0].kernel  # such as an embedding
        layers = blocks()
        for layer in layers:
            layer.kernel = outside
        assert stack(layers).layers.kernel is outside

    def test_copies(self):
        layers = stack(blocks())
        expected = run(blocks(), X)
        for other in (
            nnx.clone(layers),
            nnx.merge(*nnx.split(layers)),
            copy.deepcopy(layers),
            jax.tree.map(lambda x: x, layers),
        ):
            close(other(X), expected)
        state = nnx.state(stack(blocks(Block)[::-1]))
        nnx.update(layers, state)
        close(layers(X), run(blocks()[::-1], X))

    def test_pickle(self):
        layers = stack(nnx.Linear, 2, 4, 4, rngs=nnx.Rngs(0))
        again = pickle.loads(pickle.dumps(layers))
        np.testing.assert_array_equal(again(X), layers(X))

    def test_paths(self):
        paths = ["/".join(path) for path, _ in nnx.to_flat_state(nnx.state(stack(blocks())))]
        assert paths[2:] == ["layers/kernel", "layers/mean"]


class InsideTest(parameterized.TestCase):
    def test_compiled_once_and_parameters_stay(self):
        layers, traces = stack(blocks()), []

        @OURS.jit
        def step(layers, x):
            traces.append(1)
            return layers(x)

        kernel = layers.layers.kernel[...]
        for expected in (blocks(),):
            close(step(layers, X), run(expected, X))
            close(step(layers, X), run(expected, X))
        assert layers.layers.kernel[...] is kernel and len(traces) == 1

    def test_made_in_jit(self):
        layers = OURS.jit(lambda: stack(Block, LAYERS, rngs=nnx.Rngs(0)))()
        close(layers.layers.kernel[...], stack(Block, LAYERS, rngs=nnx.Rngs(0)).layers.kernel[...])
        indexed = OURS.jit(lambda layers: (layers[1], layers[1:]))(layers)
        assert snapshot(indexed[0]) == snapshot(layers[1])

    def test_written_in_jit(self):
        layers, new = stack(blocks()), Block(nnx.Rngs(9))

        @OURS.jit
        def write(layers, new):
            layers[1] = new

        write(layers, new)
        assert snapshot(layers[1]) == snapshot(new)

    def test_in_shard_map(self):
        class Plain(nnx.Module):
            def __init__(self, rngs):
                self.kernel = nnx.Param(rngs.params.normal((4, 4)))

            def __call__(self, x):
                return jnp.tanh(x @ self.kernel[...])

        layers = stack(blocks(Plain))
        mesh = mesh_of((8,), ("data",))
        options = {"in_specs": (P(), P("data")), "out_specs": P("data"), **FULL}
        run_sharded = shard_map(lambda m, x: m(x), mesh=mesh, **options)
        close(OURS.jit(run_sharded)(layers, X), run(blocks(Plain), X))

    def test_remat_in_each_layer(self):
        class Recomputed(Block):
            __call__ = remat(Block.__call__, **FULL)

        ours = OURS.value_and_grad(lambda m: m(X).sum())(stack(blocks(Recomputed)))
        assert_same(ours, OURS.value_and_grad(lambda m: m(X).sum())(stack(blocks())), rtol=1e-5)

    @parameterized.parameters([[("up", "save")]], [[["up", "save"]]], [{"up": "save"}.items()])
    def test_policy_by_pairs(self, policy):
        ours = stack(MLP, 2, rngs=nnx.Rngs(0), remat=policy)
        assert_same(ours(X), stack(MLP, 2, rngs=nnx.Rngs(0))(X))

    def test_unroll_is_compared_with_its_type(self):
        def unroll(value):
            layers = stack(blocks(), unroll=value)
            return re.findall(r"unroll=(\d)", str(jax.make_jaxpr(lambda m, x: m(x))(layers, X)))

        assert [*map(unroll, (1, True, 1))] == [["1"], ["3"], ["1"]]

    def test_jaxpr_does_not_grow(self):
        def size(count):
            layers = stack(Block, count, rngs=nnx.Rngs(0))
            layers.eval()
            return len(str(jax.make_jaxpr(lambda m, x: m(x))(layers, X)).splitlines())

        assert size(3) == size(12)


def changed(change):
    layers = blocks()
    change(layers[2])
    return layers


class ErrorTest(parameterized.TestCase):
    @parameterized.parameters(
        ("layer 2: layer.dropout.rate: 0.5 → 0.1", lambda m: setattr(m.dropout, "rate", 0.1)),
        ("layer 2: layer.extra: missing → 1", lambda m: setattr(m, "extra", 1)),
        ("layer 2: layer.kernel, metadata 'a'", lambda m: m.kernel.set_metadata(a=1)),
        ("layer 2: layer.mean: a BatchStat → a Param", lambda m: setattr(m, "mean", param())),
        (
            r"layer 2: layer.mean: float32\[4\] → float32\[5\]",
            lambda m: setattr(m, "mean", nnx.BatchStat(jnp.zeros(5))),
        ),
        (
            r"float32\[4,4\] → bfloat16\[4,4\]",
            lambda m: m.kernel.set_value(m.kernel[...].astype(jnp.bfloat16)),
        ),
    )
    def test_layers_that_differ(self, message, change):
        with pytest.raises(ValueError, match=message):
            stack(changed(change))

    @parameterized.parameters(
        (TypeError, "what makes one and the number of layers", lambda: stack(Block)),
        (TypeError, "what makes one and the number of layers", lambda: stack("blocks")),
        (TypeError, "what makes one and the number of layers", lambda: stack(blocks(), 3)),
        (TypeError, r"expected modules, got:\n  \[1\]: 1", lambda: stack([MLP(), 1])),
        (
            TypeError,
            "no arguments for making layers, got prefech",
            lambda: stack([MLP()], prefech=1),
        ),
        (
            ValueError,
            r"some layers only.*\n  layers\[0\].kernel is layers\[2\].kernel\nLet all",
            lambda: stack(with_partly_shared(0, 1, 0)),
        ),
        (
            ValueError,
            r"\n  layers\[0\].second is layers\[1\].first\nLet all",
            lambda: stack(with_chained_parts()),
        ),
        (ValueError, "expected at least one module", lambda: stack([])),
        (ValueError, "expected a positive length", lambda: stack(Block, 0, rngs=nnx.Rngs(0))),
        (ValueError, "layer: a MLP → a Block", lambda: stack([MLP(), blocks()[0]])),
        (IndexError, "out of range", lambda: stack(blocks())[3]),
        (TypeError, "integer", lambda: stack(blocks())["a"]),
        (
            ValueError,
            r"\[1\]: layer.kernel: float32\[4,4\] → float32\[5,5\]",
            lambda: stack(blocks()).__setitem__(1, Block(nnx.Rngs(0), 5)),
        ),
        (
            TypeError,
            r"Linear returns .*\n  x: float32\[8,4\] → float32\[8,5\]",
            lambda: stack(nnx.Linear, 2, 4, 5, rngs=nnx.Rngs(0))(X),
        ),
    )
    def test_misuse(self, error, message, call):
        with pytest.raises(error, match=message):
            call()

    def test_new_attributes_get_the_layers_in_front(self):
        class Sowing(Block):
            def __call__(self, x):
                self.seen = nnx.Intermediate(x.mean())
                return super().__call__(x)

        layers, x = stack(blocks(Sowing)), X
        layers(X)
        expected = []
        for layer in blocks():
            expected.append(x.mean())
            x = layer(x)
        close(layers.layers.seen[...], expected)
        assert node(seen=layers[1].seen).seen.shape == ()


@pytest.mark.parametrize("remat", [False, True, "dots_saveable", {"linear": "save"}])
@pytest.mark.parametrize("transform", [lambda fun: fun, jit])
def test_ints_are_settings(remat, transform):
    class Heads(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x, heads, options=None):
            parts = self.linear(x).reshape(len(x), heads, -1)[..., : options["parts"][0]]
            return x + jax.nn.softmax(parts, 1).sum((1, 2))[:, None] * options["scale"]

    def loss(layers, x, scale):
        options = {"parts": [2, None, "unused"], "scale": scale}
        return (layers(x, heads=2, options=options) ** 2).sum()

    x = jnp.arange(32.0).reshape(4, 8) / 32
    plain, layers = (stack(Heads, 3, rngs=nnx.Rngs(0), remat=r) for r in (False, remat))
    found, expected = transform(grad(loss))(layers, x, 0.5), grad(loss)(plain, x, 0.5)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        close(one, other)
