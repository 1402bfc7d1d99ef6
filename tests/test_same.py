"""``assert_same``: faults of sharded programs, each with the module that it names."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from flax import nnx

from nnx_sharding import (
    accumulate_gradients,
    grad,
    jit,
    jvp,
    linearize,
    shard_map,
    stack,
    value_and_grad,
    vmap,
)
from nnx_sharding.checkpoint import save
from nnx_sharding.partition import fsdp, override, pipeline, replicated
from nnx_sharding.testing import assert_same, replay
from nnx_sharding.testing.comparison import unequal_runs
from nnx_sharding.testing.recording import Outcome, Site
from nnx_sharding.testing.rounding import rounded
from nnx_sharding.testing.shrinking import shrink
from zoo import P, mesh_of

AXES = ("data", "model")
MESH = mesh_of((2, 4), AXES)
X = jax.random.normal(jax.random.key(1), (8, 16))
# What JAX would refuse is checked at run time only.
unchecked = functools.partial(jax.shard_map, check_vma=False)


class Row(nnx.Module):
    """A layer whose kernel is sharded over its rows, in a `shard_map`."""

    def __init__(self, reduce, rngs):
        self.kernel, self.reduce = nnx.Param(rngs.normal((32, 16)) / 6), reduce

    def __call__(self, x):
        fun = lambda x, kernel: self.reduce(x @ kernel)  # noqa: E731
        specs = P("data", "model"), P("model")
        return unchecked(fun, in_specs=specs, out_specs=P("data"))(x, self.kernel[...])


class Block(nnx.Module):
    def __init__(self, reduce=lambda x: jax.lax.psum(x, "model")):
        rngs = nnx.Rngs(0)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), Row(reduce, rngs)
        self.out = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(x + self.down(jax.nn.relu(self.up(x)))))


def forward(model, x):
    return model(x)


def train(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def message(function, *args, **options):
    options = {"shardings": (None, P("data")), "mesh": MESH, "steps": 1} | options
    with pytest.raises(AssertionError) as caught:
        assert_same(function, *args, **options)
    return str(caught.value)


class CollectiveTest(parameterized.TestCase):
    def test_training_on_both_kinds_of_axes(self):
        model = Block()
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        before = nnx.to_pure_dict(nnx.state((model, optimizer)))
        specs = (None, None, P("data"))
        assert_same(train, model, optimizer, X, shardings=specs, mesh=MESH)
        explicit = mesh_of((2,), ("data",), "explicit")
        mlp = nnx.Sequential(
            nnx.Linear(16, 8, rngs=nnx.Rngs(0)), nnx.LayerNorm(8, rngs=nnx.Rngs(0))
        )
        specs = (fsdp(mlp, mesh=explicit, min_size=0), P("data"))
        assert_same(forward, mlp, X, shardings=specs, mesh=explicit, steps=1)
        after = nnx.to_pure_dict(nnx.state((model, optimizer)))
        jax.tree.map(lambda a, b: self.assertIs(a, b), before, after)

    @parameterized.named_parameters(
        ("dropped_psum", lambda x: x),
        ("doubled_psum", lambda x: jax.lax.psum(jax.lax.psum(x, "model"), "model")),
        ("wrong_axis", lambda x: jax.lax.psum(x, "data")),
    )
    def test_sums(self, reduce):
        text = message(forward, Block(reduce), X)
        assert text.startswith(
            "call 1 of forward is not the same on 8 devices:\n  model.down (Row)"
        )
        assert "model.down (Row) is the first module whose output differs: max error " in text
        assert "\n    inputs: f32[8,32] P('data', 'model'), kernel: f32[32,16] P(" in text
        assert "\n  the result: max error " in text


DATA = mesh_of((4,), ("data",))


def data_parallel(function):
    """A step whose shards of the batch compute in a `shard_map`; what it returns is replicated."""

    def step(model, x):
        specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
        return shard_map(function, **specs)(model, x)

    return step


class Norm(nnx.Module):
    """Batch normalization with running statistics, over all shards or its own."""

    def __init__(self, average):
        self.mean, self.average = nnx.BatchStat(jnp.zeros(16)), average

    def __call__(self, x):
        mean = jax.lax.pmean(x.mean(0), "data")
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * self.average(mean, x.mean(0), self.mean[...])
        return x - mean


class Net(nnx.Module):
    def __init__(self, average=lambda mean, local, old: mean, rate=0.0):
        rngs = nnx.Rngs(0)
        self.up, self.norm = nnx.Linear(16, 16, rngs=rngs), Norm(average)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.out = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x, rngs=None):
        return self.out(self.dropout(self.norm(jnp.tanh(self.up(x))), rngs=rngs))


def squares(model, x):
    return jax.lax.pmean((model(x) ** 2).mean(), "data")


def with_local_mean(model, x):
    return (model(x) ** 2).mean()


def with_own_keys(model, x):
    key = jax.random.fold_in(model.dropout.rngs.key[...], jax.lax.axis_index("data"))
    return jax.lax.pmean((model(x, rngs=nnx.Rngs(dropout=key)) ** 2).mean(), "data")


class ShardMapTest(parameterized.TestCase):
    options = {"mesh": DATA, "shardings": (P(), P("data"))}

    def test_right_programs(self):
        assert_same(data_parallel(squares), Net(), X, steps=2, **self.options)
        assert_same(data_parallel(with_own_keys), Net(rate=0.5), X, steps=1, **self.options)

    def test_stale_statistics(self):
        first = lambda mean, local, old: jnp.where(jax.lax.axis_index("data") == 0, mean, old)  # noqa: E731
        text = message(data_parallel(squares), Net(first), X, **self.options)
        assert "\n  model.norm (Norm) is the first module with an array that differs\n" in text
        assert re.search(r"model\.norm\.mean: .*; its replicas over 'data' are not equal", text)

    def test_local_statistics(self):
        text = message(data_parallel(squares), Net(lambda _, local, old: local), X, **self.options)
        assert "\n  model.norm (Norm) is the first module with an array that differs\n" in text

    def test_shared_key(self):
        text = message(data_parallel(squares), Net(rate=0.5), X, **self.options)
        assert "\n  model.dropout (Dropout) drops the same elements of shards with diff" in text
        assert "over 'data'" in text and "fold_in" in text

    def test_local_mean(self):
        text = message(data_parallel(with_local_mean), Net(), X, **self.options)
        assert "\n  outside of modules: their outputs and gradients are the same\n" in text
        assert re.search("the result: max error .*; its replicas over 'data' are not equal", text)

    def test_local_mean_in_a_module(self):
        class Center(nnx.Module):
            def __call__(self, x):
                return x - x.mean(0)

        net = Net()
        net.norm = Center()
        text = message(data_parallel(squares), net, X, **self.options)
        assert "\n  model.norm (Center) is the first module whose output differs: max err" in text
        assert "\n    inputs: f32[2,16]" in text

    def test_hidden_replicas(self):
        """Where the first device is right, only the comparison of all replicas finds it."""

        def fun(x):
            y = jax.lax.psum(x.sum(), "data")
            return y + jax.lax.axis_index("data")

        step = lambda x: unchecked(fun, in_specs=P("data"), out_specs=P())(x)  # noqa: E731
        text = message(step, X, mesh=DATA, shardings=(P("data"),))
        assert "the result: max error 3, tolerance" in text
        assert "its replicas over 'data' are not equal" in text


def scalar_loss(model, x):
    return model.loss(x)


class Loss(Block):
    """A block whose loss is a method."""

    def loss(self, x):
        return (self(x) ** 2).mean()


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_method_that_returns_a_scalar(kind):
    mesh = mesh_of((2, 4), AXES, kind)
    specs = {"mesh": mesh, "shardings": (None, P("data"))}
    if kind == "auto":
        assert_same(scalar_loss, Loss(), X, steps=1, **specs)
        text = message(scalar_loss, Loss(lambda x: x), X, **specs)
        assert "model.down (Row) is the first module whose output differs" in text
    else:
        model = nnx.Dict(layer=nnx.Linear(16, 4, rngs=nnx.Rngs(0)))
        model.layer.__class__ = type("Layer", (nnx.Linear,), {"loss": lambda s, x: s(x).sum()})
        assert_same(lambda model, x: model.layer.loss(x), model, X, steps=1, **specs)


def mapped(call, spec):
    """A step in which each device calls a dropout for its shard; JAX does not check replicas."""

    def step(model, x):
        specs = {"in_specs": (P(), spec), "out_specs": spec, "check_vma": False}
        return shard_map(call, **specs)(model, x)

    return step


def drop(model, x):
    return model(x)


def drop_own(axes):
    """Drops other elements for each index along the axes."""

    def drop(model, x):
        key = jax.random.fold_in(model.rngs(), jax.lax.axis_index(axes))
        return model(x, rngs=key)

    return drop


def drop_rows(axes):
    """Drops elements of each row by a key of its own, in a `vmap`."""

    def drop(model, x):
        key = jax.random.fold_in(model.rngs(), jax.lax.axis_index(axes))
        keys = jax.random.split(key, len(x))
        return jax.vmap(lambda x, key: model(x, rngs=key))(x, keys)

    return drop


def drop_second(model, x):
    key = jax.random.fold_in(model.rngs(), jax.lax.axis_index("data"))
    return model(model(x, rngs=key))


class OwnKeys(nnx.Dropout):
    """A dropout whose key is known only inside of it."""

    def __call__(self, x):
        key = jax.random.fold_in(self.rngs(), jax.lax.axis_index("data"))
        return super().__call__(x, rngs=key)


class OneKey(nnx.Dropout):
    def __call__(self, x):
        return super().__call__(x)


BOTH = P("data", "model")
MASKS = {  # what each device calls, the dropout, the spec of its input, and what the error says
    "shared": (drop, nnx.Dropout(0.5), P("data"), r"the same .*, over 'data'\."),
    "shared, few dropped": (drop, nnx.Dropout(0.05), P("data"), r"the same .*, over 'data'\."),
    "shared, few kept": (drop, nnx.Dropout(0.95), P("data"), r"the same .*, over 'data'\."),
    "shared by two axes": (drop, nnx.Dropout(0.5), BOTH, r"the same .*, over 'data' and 'model'\."),
    "shared by one of two axes": (drop_own("data"), nnx.Dropout(0.5), BOTH, r"over 'model'\."),
    "the second one shared": (drop_second, nnx.Dropout(0.5), P("data"), r"the same .* 'data'\."),
    "zeros in the input": (
        lambda model, x: drop(model, jax.nn.relu(x)),
        nnx.Dropout(0.5),
        P("data"),
        r"the same .*, over 'data'\.",
    ),
    "shared in a subclass": (drop, OneKey(0.5), P("data"), r"the same .*, over 'data'\."),
    "own": (drop_own("data"), nnx.Dropout(0.5), P("data"), ""),
    "own, all dropped": (drop, nnx.Dropout(1.0), P("data"), ""),
    "own in a subclass": (drop, OwnKeys(0.5), P("data"), ""),
    "own, of two rows": (
        drop_own("data"),
        nnx.Dropout(0.5, broadcast_dims=(1,)),
        P("data"),
        "",
    ),
    "own in a vmap": (drop_rows("data"), nnx.Dropout(0.5), P("data"), ""),
    "replicas": (drop, nnx.Dropout(0.5), P(), ""),
    "unequal replicas": (
        drop_own(("data", "model")),
        nnx.Dropout(0.5),
        P("data"),
        r"drops other elements of replicas, over 'model'\.",
    ),
    "unequal replicas over two axes": (
        drop_own(("data", "model")),
        nnx.Dropout(0.5),
        P(),
        r"drops other elements of replicas, over 'data' and 'model'\.",
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    """Keys are compared, so no mask is too small, and none is equal by chance."""
    call, dropout, spec, expected = MASKS[name]
    # Each call needs a stream of keys.
    model = type(dropout)(dropout.rate, broadcast_dims=dropout.broadcast_dims, rngs=nnx.Rngs(0))
    x = jnp.tile(X, (4, 1)) if "subclass" in name else X[:4, :8]
    x = x + jnp.arange(x.size).reshape(x.shape)[::-1] / 1000  # rows differ
    step, options = mapped(call, spec), {"mesh": MESH, "shardings": (P(), spec)}
    if expected:
        assert re.search(
            rf"model \({type(model).__name__}\) .*{expected}", message(step, model, x, **options)
        )
    else:
        assert_same(step, model, x, steps=1, **options)


def one_when_sharded():
    """1 on the mesh of several devices, 0 on that of one."""
    return float(jax.sharding.get_abstract_mesh().shape["data"] > 1)


def on_device(index, value):
    """A step that returns its input, but another value on one device."""
    other = lambda x: jnp.where(jax.lax.axis_index("data") == index, value, x)  # noqa: E731
    return lambda x: unchecked(other, in_specs=P("data"), out_specs=P("data"))(x)


WRONG = {  # a step, and what the error says
    "NaN in one shard": (
        lambda x: x + one_when_sharded() * (on_device(2, jnp.nan)(x) - x),
        "the result: max error nan",
    ),
    "next to -inf": (
        lambda x: jnp.where(x < 0, -jnp.inf, x + one_when_sharded()),
        "the result: max error 1",
    ),
    "next to a number for it": (
        lambda x: jnp.where(x < 0, jnp.finfo(x.dtype).min, x + one_when_sharded()),
        "the result: max error 1",
    ),
    "a value of each device": (
        lambda x: unchecked(lambda x: 0 * x[:1, 0], in_specs=P("data"), out_specs=P("data"))(x),
        r"the result: shape \(4,\), but \(1,\) on one device",
    ),
    "another shape": (
        lambda x: jnp.zeros(4 if one_when_sharded() else 3),
        r"the result: shape \(4,\), but \(3,\) on one device",
    ),
    "nothing": (lambda x: None if one_when_sharded() else x, "the result: missing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arrays(name):
    step, expected = WRONG[name]
    assert re.search(expected, message(step, X, mesh=DATA, shardings=(P("data"),)))


class Returns(nnx.Module):
    """A module whose method returns what is no array with dimensions."""

    def __call__(self, x):
        key = jax.random.key(0)
        results = x.sum(), (x > 0).sum(), x[:, :0], key, jax.random.split(key, 2), None
        return x, results, x.astype(bool).all()


def on_one_axis(x):
    """The same module in a `shard_map`, where devices have shards of their own."""

    def on_shards(x):
        y, (total, *_), _ = Returns()(x)
        return y, jax.lax.psum(total, "data"), Returns()(x[:, :0])[0]

    specs = {"in_specs": P("data"), "out_specs": (P("data"), P(), P("data"))}
    return jax.shard_map(on_shards, **specs)(x)


FACTORS = {  # sizes of the mesh, a factor, and what the error says
    "one axis": ({"a": 4}, 4, "once too often over 'a'$"),
    "two explanations": ({"a": 2, "b": 4}, 4, "once too often over 'b', or twice over 'a'$"),
    "equal axes": ({"a": 2, "b": 2}, 2, "once too often over 'a', or over 'b'$"),
    "both axes": ({"a": 2, "b": 4}, 8, "over 'a' and 'b', or 3 times over 'a'$"),
    "too small": ({"a": 2, "b": 4}, 1 / 2, "2 times too small: not summed, or .* over 'a'$"),
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors(name):
    """A factor names all sums that can make it, because the number does not tell which it was."""
    sizes, factor, expected = FACTORS[name]
    mesh = mesh_of((*sizes.values(),), (*sizes,))

    def step(x):
        size = jax.sharding.get_abstract_mesh().size
        return x * (factor if size > 1 else 1)

    text = message(step, X, mesh=mesh, shardings=(P("a"),))
    assert re.search(expected, text.splitlines()[-1])


RIGHT = {
    "NaN": (lambda x: jnp.where(x < 0, jnp.nan, x), X),
    # Rounded up, its input has no root.
    "NaN by a rounding error": (lambda x: jnp.sqrt(1 - x), jnp.ones(8)),
    "donation": (lambda x: x + 1, X),
    "results without dimensions": (lambda x: Returns()(x), X),
    "results without dimensions on shards": (on_one_axis, X),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_arrays(name):
    step, x = RIGHT[name]
    options = {"donate_argnums": (0,)} if name == "donation" else {}
    assert_same(step, x, mesh=DATA, shardings=(P("data"),), steps=2, **options)


def pushed_forward(model, x):
    return jvp(lambda model, x: model(x), (model, x), (nnx.state(model, nnx.Param), x))


def gradient_of_tangent(model, x):
    return grad(lambda model: pushed_forward(model, x)[1].sum())(model)


def linearized(model, x):
    y, apply = linearize(lambda model, x: model(x), model, x)
    return y, apply(nnx.state(model, nnx.Param), x)


@pytest.mark.parametrize("step", [pushed_forward, gradient_of_tangent, linearized])
def test_forward_mode(step):
    """Records have tangents as well: what differs is found, and what is right passes."""
    model = nnx.Sequential(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), jnp.tanh)
    options = {"mesh": MESH, "shardings": (None, P("data"))}
    assert_same(step, model, X, steps=1, **options)
    off = lambda model, x: step(model, x * (1 + one_when_sharded()))  # noqa: E731
    assert "outside of modules, before model (Sequential)" in message(off, model, X, **options)


@pytest.mark.parametrize("counts", [{"steps": 0}, {"runs": 0}])
def test_no_calls(counts):
    with pytest.raises(ValueError, match="expected at least one of each, got steps="):
        assert_same(forward, Block(), X, shardings=None, mesh=DATA, **counts)


class GradientTest(parameterized.TestCase):
    def test_wrong_gradient(self):
        """The gradient of the sum is not summed, as in a hand-written tensor-parallel layer."""

        @jax.custom_vjp
        def copy(x):
            return x

        copy.defvjp(lambda x: (x, None), lambda _, g: (2.0 * g,))

        class Copied(nnx.Module):
            def __init__(self):
                self.scale = nnx.Param(jnp.ones(32))

            def __call__(self, x):
                size = jax.sharding.get_abstract_mesh().shape["data"]
                return self.scale[...] * (copy(x) if size > 1 else x)

        model = nnx.Sequential(nnx.Linear(16, 32, rngs=nnx.Rngs(0)), Copied())
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        specs = (None, None, P("data"))
        text = message(train, model, optimizer, X, shardings=specs)
        assert "\n  model.layers[1] (Copied) is the first module whose gradient differs: " in text
        assert "\n  model.layers[0].kernel: max error" in text
        assert "the result" not in text


def replicated_gradient(reduce):
    """A step of SGD in a `shard_map`: JAX has summed the gradient of the replicated kernel."""

    def on_shards(kernel, x):
        gradient = jax.grad(lambda kernel: ((x @ kernel) ** 2).mean())(kernel)
        return reduce(gradient)

    def step(model, x):
        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        model.kernel[...] -= jax.shard_map(on_shards, **specs)(model.kernel[...], x)

    return step


class SummedTwiceTest(parameterized.TestCase):
    options = {"mesh": DATA, "shardings": (P(), P("data"))}

    def test_gradient_of_a_replicated_argument(self):
        model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
        step = replicated_gradient(lambda gradient: jax.lax.pmean(gradient, "data"))
        text = message(step, model, X, **self.options)
        assert "; 4 times as large: summed once too often over 'data'" in text
        size = jax.lax.axis_size
        right = replicated_gradient(lambda gradient: gradient / size("data"))
        assert_same(right, model, X, steps=1, **self.options)


class RepeatedTest(parameterized.TestCase):
    def test_bit_for_bit(self):
        specs = None, None, P("data")
        model = Block()
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        options = {"shardings": specs, "mesh": MESH, "steps": 1, "runs": 2}
        assert_same(train, model, optimizer, X, **options)
        calls = iter(range(100))

        class Unsteady(nnx.Module):
            def __call__(self, x):
                kind = jax.ShapeDtypeStruct((), "float32")
                noise = jax.pure_callback(lambda: np.float32(1e-3 * next(calls)), kind)
                return x + noise

        model = nnx.Sequential(nnx.Linear(16, 4, rngs=nnx.Rngs(0)), Unsteady())
        text = message(forward, model, X, runs=2)
        assert text.startswith("call 1 of forward does not repeat bit for bit on 8 devices:\n")
        assert "the output of model.layers[1] (Unsteady) differs first\n  the result: larg" in text


@pytest.mark.parametrize(
    ("differing", "expected"),
    [
        # Gradients are computed backwards, after all values.
        ([(0, True), (1, True)], "the gradient of model.last (Linear)"),
        ([(0, True), (1, False)], "the output of model.last (Linear)"),
        ([(0, False), (1, False), (1, True)], "the output of model.first (Linear)"),
    ],
)
def test_runs_are_compared_in_the_order_of_execution(differing, expected):
    modules = "model.first (Linear)", "model.last (Linear)"
    sites = [Site(module, "output", (), i, [], []) for i, module in enumerate(modules)]
    keys = [(number, backward) for number in range(2) for backward in (False, True)]
    first = Outcome({}, sites, {key: {(): [np.zeros(1)]} for key in keys}, {})
    changed = {key: {(): [np.full(1, float(key in differing))]} for key in keys}
    second = Outcome({}, sites, changed, {})
    assert unequal_runs(first, second) == [f"  {expected} differs first"]


def test_replay(tmp_path):
    model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    save(tmp_path / "before", (model, optimizer))
    step = jit(train)
    loss, into = float(step(model, optimizer, X)), (model, optimizer)
    after = np.asarray(model.kernel[...])
    replay(step, tmp_path / "before", X, into=into, recorded=loss)
    np.testing.assert_array_equal(after, model.kernel[...])
    with pytest.raises(AssertionError, match="repeats, but does not return what was recorded"):
        replay(step, tmp_path / "before", 2 * X, into=into, recorded=loss)
    # Of the processor, which sets its sign; a log has Python's.
    undefined = jit(lambda model, optimizer, x: 0 * x.sum() / (0 * x).sum())
    replay(undefined, tmp_path / "before", X, into=into, recorded=float("nan"))
    noise = iter(range(1, 9))
    unsteady = lambda model, optimizer, x: train(model, optimizer, x * next(noise))  # noqa: E731
    with pytest.raises(AssertionError, match="is not equal bit for bit to the first"):
        replay(unsteady, tmp_path / "before", X, into=into)


@dataclasses.dataclass(frozen=True)
class Checked:
    width: int = 64
    heads: int = 4

    def __post_init__(self):
        if self.width % (2 * self.heads):
            raise ValueError("heads of two features at least")


@dataclasses.dataclass
class Computed:
    width: int = 64
    hidden: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.hidden = 4 * self.width


@dataclasses.dataclass(slots=True)
class Slots:
    width: int = 64


@pytest.mark.parametrize("config", [Checked(), Computed(), Slots()])
def test_configurations_that_know_their_numbers(config):
    def build(config):
        model = nnx.Linear(config.width, 8, rngs=nnx.Rngs(0))
        return jit(forward), model, jnp.ones((8, config.width))

    smaller, [*changes] = shrink(build, config, lambda _: None)
    assert type(smaller) is type(config)
    assert smaller.width < 64 and f"width 64 → {smaller.width}" in changes


class TrueMeshTest(parameterized.TestCase):
    """Each case starts a process with as many devices."""

    def test_a_process_of_its_own(self):
        model = Net(rate=0.5)
        model.dropout.deterministic = True
        options = {"shardings": (P(), P("data")), "steps": 1, "devices": 16}
        mesh = jax.sharding.AbstractMesh(
            (16, 1), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2
        )
        x = jnp.concatenate([X, X])
        assert_same(data_parallel(squares), model, x, mesh=mesh, **options)
        text = message(data_parallel(with_local_mean), model, x, **options | {"mesh": mesh})
        assert "is not the same on 16 devices" in text

    def test_sizes(self):
        with pytest.raises(ValueError, match="devices=16, but the axes"):
            assert_same(forward, Net(), X, shardings=None, mesh=MESH, devices=16)


class ToleranceTest(parameterized.TestCase):
    def test_types(self):
        off = lambda x: x * (1 + 1e-3 * (jax.sharding.get_abstract_mesh().shape["data"] > 1))  # noqa: E731
        options = {"mesh": DATA, "shardings": (P("data"),)}
        assert "the result: max error 0.00" in message(off, X, **options)
        assert_same(off, X.astype("bfloat16"), steps=1, **options)
        assert_same(off, X, steps=1, tolerance=0.01, **options)

    def test_jitted(self):
        for wrapped in (jit(forward), jax.jit(forward)):
            with pytest.raises(TypeError, match="pass it without jit"):
                assert_same(wrapped, Block(), X, shardings=None, mesh=MESH)

    def test_abstract(self):
        with pytest.raises(TypeError, match=r"runs the step, but some .* abstract.*sharded_init"):
            assert_same(forward, nnx.eval_shape(Block), X, shardings=None, mesh=MESH)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("is_inside", [True, False])
def test_elements_of_a_vmap_are_recorded_in_any_order(kind, is_inside):
    """An ensemble over a mesh axis; the fault is in its elements, or after them."""

    class Element(nnx.Linear):
        def __call__(self, x):
            axis_size = jax.sharding.get_abstract_mesh().shape["model"]
            return super().__call__(x) * (axis_size if is_inside else 1)

    make = nnx.split_rngs(splits=4)(nnx.vmap(lambda rngs: Element(16, 4, rngs=rngs)))
    mesh = mesh_of((2, 4), AXES, kind)

    def mean_square(ensemble, x):
        y = vmap(lambda element, x: element(x), in_axes=(0, None))(ensemble, x)
        return (y**2).mean()

    def step(ensemble, x):
        axis_size = jax.sharding.get_abstract_mesh().shape["model"]
        loss, gradients = value_and_grad(mean_square)(ensemble, x)
        return loss * axis_size, gradients

    place = "ensemble \\(Element\\) is the first module" if is_inside else "outside of modules:"
    model = make(nnx.Rngs(0))
    shardings = override(replicated(model), {...: P("model")}), P("data")
    with pytest.raises(AssertionError, match=place):
        assert_same(step, model, X, shardings=shardings, mesh=mesh, steps=1)


class PipelineTest(parameterized.TestCase):
    @parameterized.parameters(True, False)
    def test_gradients_of_one_forward_one_backward(self, with_embedding):
        """Each module has records, which are callbacks, in the trace that the schedule cuts."""
        model = stack([nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(4)])
        if with_embedding:
            model = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(4)), model)
        mesh = mesh_of((4, 2), ("stage", "data"))

        def step(model, x):
            return accumulate_gradients(lambda model, x: (model(x) ** 2).mean(), steps=2)(model, x)

        def wrong_step(model, x):
            loss, gradients = step(model, x)
            shards = jax.sharding.get_abstract_mesh().shape["stage"]
            return loss, jax.tree.map(lambda x: x * shards, gradients)

        shardings = pipeline(model, mesh=mesh, schedule="1f1b"), P("data")
        assert_same(step, model, X, shardings=shardings, mesh=mesh, steps=1)
        with pytest.raises(AssertionError, match="4 times as large"):
            assert_same(wrong_step, model, X, shardings=shardings, mesh=mesh, steps=1)

    @parameterized.parameters(True, False)
    def test_as_on_one_device(self, is_stack):
        blocks = [nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(4)]
        model = nnx.Sequential(*blocks) if not is_stack else stack(blocks)
        mesh = mesh_of((4, 2), ("stage", "data"))
        shardings = pipeline(model, mesh=mesh, microbatches=4), P("data")
        assert_same(forward, model, X, shardings=shardings, mesh=mesh, steps=1)

    def test_another_number_of_stages(self):
        model = stack([nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(4)])
        sharding = pipeline(model, mesh=mesh_of((4,), ("stage",)), microbatches=4)
        step = jit(forward, in_shardings=(sharding, P()), mesh=mesh_of((8,), ("stage",)))
        with pytest.raises(ValueError, match="divisible"):
            step(model, X)


def test_neither_xla_nor_jax_warns_of_copies(capfd):
    def step(model, tokens):
        return model(jnp.zeros((*tokens.shape, 16)) + tokens[..., None])

    model, tokens = Block(), np.arange(32).reshape(8, 4)
    assert tokens.dtype == np.int64
    model.down = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
    specs = fsdp(model, mesh=MESH, min_size=0), P("data")
    assert_same(step, model, tokens, shardings=specs, mesh=MESH, steps=1)
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers_that_stand_for_infinity_are_not_rounded(dtype):
    """As in masks that modules pass on: their mean is infinite, and would be added to scores."""
    least = jnp.finfo(dtype).min
    x = jnp.array([0.5, -1, least, least, 0, -jnp.inf], dtype)
    changed = rounded(x, jnp.float32(0.25))
    np.testing.assert_array_equal(changed[2:], x[2:])
    np.testing.assert_array_equal(jnp.abs(changed - x)[:2], [0.5 * 0.25, 0.25])
