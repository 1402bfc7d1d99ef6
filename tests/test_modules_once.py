"""Modules run once in each trace, on any axes, and give what they give on one device."""

from __future__ import annotations

import collections
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import zoo
from nnx_sharding import (
    ActivationSharding,
    InOutSharding,
    StateSharding,
    accumulate_gradients,
    jit,
    scan,
    shard_map,
)
from nnx_sharding.errors import ActivationError
from nnx_sharding.partition import fsdp, replicated
from zoo import STRATEGIES, assert_close

WIDTH = 16
X = jax.random.normal(jax.random.key(0), (8, 4, WIDTH))
AXIS_TYPES = {
    "auto": (AxisType.Auto, AxisType.Auto),
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "mixed": (AxisType.Explicit, AxisType.Auto),
}
NAMES = ("replicated", "fsdp", "tensor", "both")


def mesh_of(kind):
    return zoo.mesh_of((2, 4), ("data", "model"), AXIS_TYPES[kind])


EXPLICIT = mesh_of("explicit")
INFERRED = StateSharding({...: P()}, activations=ActivationSharding(infer=True))


class Noted(nnx.Module):
    """Notes its calls in a list, which is a side effect."""

    def __init__(self, *parts):
        self.calls, self.parts = [], nnx.List(parts)

    def __call__(self, x):
        self.calls.append(type(self).__name__)
        for part in self.parts:
            x = self.mixed(part(x))
        return x

    def mixed(self, x):
        return x


class Raw(Noted):
    """Contracts a dimension that may be sharded on both sides."""

    def __init__(self, rngs, *parts):
        super().__init__(*parts)
        self.kernel = nnx.Param(jax.random.normal(rngs(), (WIDTH, WIDTH)) / 4)

    def mixed(self, x):
        return x + jnp.tanh(x @ self.kernel[...])


class Sliced(Noted):
    """Joins parts of dimensions that may be sharded."""

    def mixed(self, x):
        return jnp.concatenate([x[:1], x[1:] + x[:-1]])


class Attended(Noted):
    """Reshapes, and picks rows by index."""

    def mixed(self, x):
        heads = x.reshape(*x.shape[:-1], 4, -1)
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", heads, heads))
        y = jnp.einsum("bhts,bshd->bthd", weights, heads).reshape(x.shape)
        return y[jnp.arange(len(x))[::-1]]


class Looped(Noted):
    """A loop whose carry begins with zeros."""

    def mixed(self, x):
        total, _ = jax.lax.scan(lambda c, row: (c + row, None), jnp.zeros(WIDTH), x[:, 0])
        return x + total


class Wide(Noted):
    """Two layers, one sharded by columns and one by rows."""

    def __init__(self, rngs, *parts):
        super().__init__(*parts)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def mixed(self, x):
        return x + self.down(jnp.tanh(self.norm(self.up(x))))


def nested(seed):
    """A model of modules in modules, the same for each seed."""
    choose, rngs = random.Random(seed), nnx.Rngs(seed)

    def make(depth):
        kind = choose.choice([Noted, Raw, Sliced, Attended, Looped, Wide])
        parts = [make(depth - 1) for _ in range(choose.randint(1, 2))] if depth else []
        parts = parts or [nnx.Linear(WIDTH, WIDTH, rngs=rngs)]
        return kind(*([rngs] if kind in (Raw, Wide) else []), *parts)

    return make(2)


def double(model):
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.float64), nnx.state(model, nnx.Param)))
    return model


def notes(model):
    return [x.calls for _, x in nnx.iter_modules(model) if isinstance(x, Noted)]


def loss(model, x):
    return (model(x) ** 2).mean()


def direct(model, x):
    """The function calls the parts itself."""
    for part in model.parts:
        x = part(x)
    return (x**2).mean()


@pytest.fixture(autouse=True, scope="module")
def _less_optimized():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


CASES = [(axes, strategy) for axes in AXIS_TYPES for strategy in NAMES]


@pytest.mark.parametrize(("axes", "strategy"), CASES)
def test_nested_modules_run_once(axes, strategy):
    seed = random.randrange(1000)
    fun = random.choice([loss, direct])
    # In float32, rounding alone is 2 % of some gradients of deep residual models.
    with jax.enable_x64(True):
        model, expected, mesh = double(nested(seed)), double(nested(seed)), mesh_of(axes)
        x = X.astype(jnp.float64)
        sharding = STRATEGIES[strategy](model, mesh=mesh)
        step = jit(nnx.value_and_grad(fun), in_shardings=(sharding, P("data")), mesh=mesh)
        value, gradient = step(model, x)
        wanted, wanted_gradient = nnx.value_and_grad(fun)(expected, x)
    assert notes(model) == notes(expected), seed
    assert_close((value, gradient), (wanted, wanted_gradient), 1e-8, 1e-10, f"{seed} ")


@pytest.mark.parametrize("chosen", [P("data"), None], ids=["declared", "open"])
@pytest.mark.parametrize(("rows", "columns"), [("data", None), (None, "data"), ("data", "data")])
def test_what_a_failed_operation_left_is_there_once(rows, columns, chosen):
    """With specs by hand too: one call, or one error."""
    model = Raw(nnx.Rngs(0))
    model.parts.append(nnx.Dropout(0.0))
    expected = Raw(nnx.Rngs(0), nnx.Dropout(0.0))(X)
    spec = StateSharding({nnx.PathContains("kernel"): P(columns), ...: P()})
    options = {"in_shardings": (spec, P(None, None, rows)), "mesh": EXPLICIT}
    activations = {"^$": InOutSharding(chosen, axis_types=AxisType.Auto)} if chosen else None
    step = jit(lambda model, x: model(x), activation_shardings=activations, **options)
    if rows == columns and not chosen:
        with pytest.raises(ActivationError, match=r"model: Raw of f32\[8,4,16@data\]"):
            step(model, X)
        assert model.calls == []
    else:
        np.testing.assert_allclose(step(model, X), expected, rtol=1e-4, atol=1e-5)
        assert model.calls == ["Raw"]


def test_a_program_does_not_depend_on_what_was_traced_before():
    def text(seed):
        model = nested(seed)
        options = {"in_shardings": (fsdp(model, mesh=EXPLICIT, min_size=0), P("data"))}
        return jit(lambda model, x: loss(model, x), mesh=EXPLICIT, **options).lower(model, X)

    seeds = random.sample(range(1000), 2)
    first = [text(seed).as_text() for seed in seeds]
    assert [text(seed).as_text() for seed in reversed(seeds)] == first[::-1]
    auto = mesh_of("auto")
    plain = [jit(lambda m, x: m(x), mesh=auto).lower(nested(s), X).as_text() for s in seeds]
    jit(lambda m, x: m(x), mesh=auto, activation_shardings={"^$": P("data")}).lower(nested(1), X)
    again = [jit(lambda m, x: m(x), mesh=auto).lower(nested(s), X).as_text() for s in seeds]
    assert plain == again


class Everything(nnx.Module):
    """Returns, changes and creates things of several types."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.eye(WIDTH))
        self.count = nnx.Variable(jnp.array(0))
        self.mean = nnx.BatchStat(jnp.zeros(WIDTH))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))

    def __call__(self, x, scale=2, *, flag=True):
        self.count[...] += 1
        self.mean[...] = x.mean((0, 1))
        self.sow(nnx.Intermediate, "seen", x)
        self.made = nnx.Param(x[0] @ self.kernel[...])
        y = nnx.jit(lambda inner, x: inner(x))(self.inner, x)
        y = nnx.remat(lambda inner, x: inner(x))(self.inner, y)
        y, _ = jax.lax.scan(lambda c, _: (self.inner(c), None), y, length=2)
        y = self.dropout(y) * scale if flag else y
        return {
            "float": y.astype(jnp.bfloat16),
            "integer": y.argmax(-1),
            "key": self.dropout.rngs.key[...],
            "scalar": y.sum(),
            "transposed": y.T,
            "module": self.inner,
            "new": nnx.Linear(2, 2, rngs=nnx.Rngs(2)),
            "same": self.kernel[...],
        }


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize("axes", ["explicit", "mixed"])
def test_results_and_state_of_all_types(axes):
    mesh = mesh_of(axes)
    model, expected = Everything(), Everything()
    step = jit(lambda m, x: m(x), in_shardings=(INFERRED, P("data")), mesh=mesh)
    found, wanted = step(model, X), expected(X)
    assert nnx.graphdef((model, found)) == nnx.graphdef((expected, wanted))
    states = [jax.tree.leaves(nnx.state(tree)) for tree in ((model, found), (expected, wanted))]
    for one, other in zip(*states, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_allclose(one.astype(float), other.astype(float), 1e-3, 1e-4)


def test_capture_in_a_model_on_explicit_axes():
    model = nested(3)

    def fun(model, x):
        return nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)(x)

    step = jit(fun, in_shardings=(replicated(model), P("data")), mesh=EXPLICIT)
    (out, captured), (wanted, expected) = step(model, X), fun(nested(3), X)
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)
    assert jax.tree.structure(captured) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), captured, expected)


# Modules that choose shardings themselves


def with_out_sharding(self, x):
    return jnp.dot(x, self.kernel[...], out_sharding=P("data"))


def with_a_mesh(self, x):
    specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
    return jax.shard_map(jnp.dot, mesh=EXPLICIT, **specs)(x, self.kernel[...])


class Choosing(nnx.Module):
    def __init__(self, method):
        self.kernel, self.method = nnx.Param(jnp.eye(WIDTH)), method

    def __call__(self, x):
        return self.method(self, x)


@pytest.mark.parametrize("method", [with_out_sharding, with_a_mesh])
def test_modules_that_are_declared_to_run_as_written(method):
    """So do those that hold them; others, such as the layers in them, have Auto axes."""
    types = collections.defaultdict(list)

    class Seen(nnx.Module):
        def __init__(self, *parts):
            self.parts = nnx.List(parts)

        def __call__(self, x):
            types[len(self.parts)].append(jax.typeof(x).sharding.spec)
            for part in self.parts:
                x = part(x)
            return x

    linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    expected = linear(X)
    model = Seen(Seen(), Choosing(method), linear)
    options = {"in_shardings": (replicated(model), P("data")), "mesh": EXPLICIT}
    with pytest.raises(ValueError) as info:
        jit(lambda model, x: model(x), **options)(model, X)
    [note] = [note for note in info.value.__notes__ if "Auto axes, because" in note]
    assert note.startswith("model.parts[1] runs with Auto axes")
    [entry] = re.findall(r"activation_shardings=(.*)\.$", note)
    chosen = eval(entry, {"InOutSharding": InOutSharding, "AxisType": AxisType})
    types.clear()
    step = jit(lambda model, x: model(x), activation_shardings=chosen, **options)
    np.testing.assert_allclose(step(model, X), expected, rtol=1e-5, atol=1e-6)
    assert types[3][0] == P("data", None, None)
    assert types[0][0] == P(None, None, None)


def test_our_shard_map_in_a_module():
    def method(self, x):
        specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
        return shard_map(jnp.dot, mesh=EXPLICIT, **specs)(x, self.kernel[...])

    model = Choosing(method)
    options = {"in_shardings": (replicated(model), P("data")), "mesh": EXPLICIT}
    np.testing.assert_allclose(jit(lambda model, x: model(x), **options)(model, X), X)


def test_a_call_that_is_given_an_out_sharding_runs_as_written():
    types = []

    def fun(model, x):
        types.append(jax.typeof(model(x, out_sharding=P("data", None, "model"))).sharding.spec)
        types.append(jax.typeof(model(x)).sharding.spec)

    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    sharding = replicated(model)
    jit(fun, in_shardings=(sharding, P("data")), mesh=EXPLICIT)(model, X)
    assert types == [P("data", None, "model"), P("data", None, None)]


def test_an_exception_in_a_module_that_the_function_catches():
    class Failing(nnx.Module):
        def __init__(self):
            self.kernel, self.inner = nnx.Param(jnp.eye(WIDTH)), nnx.Linear(2, 2, rngs=nnx.Rngs(0))

        def __call__(self, x):
            self.kernel[...] *= 2
            raise RuntimeError("of the user")

    def fun(model, x):
        with pytest.raises(RuntimeError, match="of the user"):
            model(x)
        return jnp.dot(x, model.kernel[...])

    model = Failing()
    step = jit(fun, in_shardings=(replicated(model), P("data")), mesh=EXPLICIT)
    np.testing.assert_allclose(step(model, X), X, rtol=1e-6)


def test_modules_in_a_loop_of_the_function():
    class Layer(Noted):
        def __init__(self, rngs):
            super().__init__(nnx.Linear(WIDTH, WIDTH, rngs=rngs))

    make = nnx.vmap(lambda rngs: Layer(rngs))
    layers, expected = make(nnx.Rngs(0).split(3)), make(nnx.Rngs(0).split(3))
    run = scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    specs = INFERRED, P("data")
    step = jit(lambda layers, x: run(x, layers), in_shardings=specs, mesh=EXPLICIT)
    np.testing.assert_allclose(step(layers, X), run(X, expected), rtol=1e-5, atol=1e-6)


def test_wrong_axis_types():
    with pytest.raises(TypeError, match="axis_types must be"):
        InOutSharding(axis_types="auto")


@pytest.mark.parametrize("by_hand", [False, True])
def test_gradients_of_reduced_parameters(by_hand):
    """They are counted once."""

    def make():
        rngs = nnx.Rngs(0)
        up, down = nnx.Linear(WIDTH, 8, rngs=rngs), nnx.Linear(8, WIDTH, rngs=rngs)
        return nnx.Sequential(up, nnx.LayerNorm(8, rngs=rngs), jnp.tanh, nnx.Sequential(down))

    def microbatches(model, x):
        return accumulate_gradients(loss, steps=2)(model, x)

    model = make()
    specs = P() if by_hand else replicated(model), P("data")
    found = jit(microbatches, in_shardings=specs, mesh=EXPLICIT)(model, X)
    expected = nnx.value_and_grad(loss)(make(), X)
    assert_close(found, expected, 1e-3, 1e-5)
