"""Gradients of microbatches, against those of the full batch and of a loop in Python."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from nnx_sharding import accumulate_gradients, jit, place, shard_map, stack, value_and_grad
from nnx_sharding.errors import NoMeshError
from nnx_sharding.partition import fsdp, replicated
from zoo import (
    STRATEGIES,
    WIDTH,
    Block,
    Normed,
    P,
    assert_close,
    assert_trains_alike,
    batch_of,
    mean_square,
    mesh_of,
    step_of,
)


class Noisy(Normed):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.gelu(self.norm(self.up(x)))))


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@functools.cache
def batch():
    return {"x": jax.random.normal(jax.random.key(0), (64, WIDTH)), "y": jnp.ones((64, WIDTH))}


@pytest.mark.parametrize("steps", [1, 4, 64])
def test_equals_the_full_batch(steps):
    model = Normed(nnx.Rngs(0))
    assert_close(
        accumulate_gradients(loss, steps=steps)(model, batch()),
        value_and_grad(loss)(model, batch()),
    )


def test_equals_a_loop_over_microbatches():
    one, other = Noisy(nnx.Rngs(0)), Noisy(nnx.Rngs(0))
    value, gradient = accumulate_gradients(loss, steps=4, wrt=nnx.Param)(one, batch())
    # Each microbatch takes every fourth row.
    parts = [jax.tree.map(lambda x, i=i: x[i::4], batch()) for i in range(4)]
    found = [value_and_grad(loss, wrt=nnx.Param)(other, part) for part in parts]
    mean = jax.tree.map(lambda *x: sum(x) / 4, *found)
    assert_close((value, gradient), mean)
    assert_close(nnx.state(one, nnx.BatchStat), nnx.state(other, nnx.BatchStat))
    assert one.dropout.rngs.count[...] == other.dropout.rngs.count[...] == 4


def test_arguments_by_name_and_auxiliary_data():
    def weighted(model, x, *, scale, mode):
        assert mode == "train"
        out = model(x)
        return jnp.mean(out**2) * scale, out

    model, x = Normed(nnx.Rngs(0)), batch()["x"]
    accumulate = accumulate_gradients(weighted, steps=4, has_aux=True)
    (value, outputs), gradient = accumulate(model, x=x, scale=2.0, mode="train")
    full = value_and_grad(weighted, has_aux=True)(model, x, scale=2.0, mode="train")
    assert_close((value, gradient), (full[0][0], full[1]))
    assert_close(jnp.moveaxis(outputs, 0, 1).reshape(64, WIDTH), full[0][1])


def test_named_batch_and_several_arguments():
    def paired(model, x, table, other):
        return jnp.mean((model(x) + other(x)) ** 2) + table.sum()

    model, other = Normed(nnx.Rngs(0)), Normed(nnx.Rngs(1))
    table = jnp.ones(3)  # three rows, which are not those of the batch
    arguments = model, batch()["x"], table, other
    options = {"argnums": (0, "other"), "wrt": nnx.PathContains("kernel")}
    accumulate = accumulate_gradients(paired, steps=8, batch="x", **options)
    assert_close(accumulate(*arguments), value_and_grad(paired, **options)(*arguments))


@pytest.mark.parametrize("make", [nnx.Variable, lambda x: nnx.State({"x": nnx.Variable(x)})])
def test_variables_may_have_the_rows(make):
    def of_rows(model, x, y):
        return jnp.mean((model(x["x"] if isinstance(x, nnx.State) else x[...]) - y) ** 2)

    arguments = Normed(nnx.Rngs(0)), make(batch()["x"]), batch()["x"]
    options = {"wrt": nnx.PathContains("kernel")}
    found = accumulate_gradients(of_rows, steps=4, **options)(*arguments)
    assert_close(found, value_and_grad(of_rows, **options)(*arguments))


def test_dtype():
    model = Normed(nnx.Rngs(0))
    for variable in (model.up.kernel, model.down.kernel):
        variable.set_value(variable[...].astype(jnp.bfloat16))
    _, gradient = accumulate_gradients(loss, steps=4, dtype=jnp.float32)(model, batch())
    assert {x.dtype for x in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    _, gradient = accumulate_gradients(loss, steps=4)(model, batch())
    leaves = jax.tree_util.tree_leaves_with_path(gradient)
    kernels = {x.dtype for path, x in leaves if "kernel" in jax.tree_util.keystr(path)}
    assert kernels == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float32, jnp.complex64])
@pytest.mark.parametrize("kind", [None, AxisType.Auto, AxisType.Explicit])
def test_dtype_of_complex_gradients(dtype, kind):
    def of_squares(kernel, x):
        return (jnp.abs(x @ kernel) ** 2).mean()

    kernel, x = jnp.linspace(1 + 2j, 3 - 1j, 8), jnp.linspace(-1, 1, 128).reshape(16, 8)
    step = accumulate_gradients(of_squares, steps=2, dtype=dtype)
    if kind is not None:
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        step = jit(step, mesh=mesh, in_shardings=(P(), P("data")))
    assert_close(step(kernel, x), jax.value_and_grad(of_squares)(kernel, x))


def test_a_dtype_that_holds_no_gradients():
    with pytest.raises(TypeError, match="dtype=int32 cannot hold gradients"):
        accumulate_gradients(loss, steps=2, dtype=jnp.int32)


def test_method():
    class Model(Normed):
        @accumulate_gradients(steps=4)
        def gradient(self, x):
            return jnp.mean(self(x) ** 2)

    model = Model(nnx.Rngs(0))
    expected = value_and_grad(lambda model, x: jnp.mean(model(x) ** 2))(model, batch()["x"])
    assert_close(model.gradient(batch()["x"]), expected)


def trained(strategy, kind, axis=None):
    """A step with 8 microbatches, which gives the numbers of the full batch on one device."""
    mesh, batch = mesh_of((8,), ("data",), kind), functools.partial(batch_of, mean_square, 64)
    step = step_of(accumulate_gradients(mean_square, steps=8, axis=axis))
    options = {"batch": batch, "step": step, "steps": 3}
    return assert_trains_alike(Block, STRATEGIES[strategy], mesh, **options)


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_one_reduction(kind):
    step, arguments = trained("replicated", kind, None if kind == "explicit" else "data")
    found = step.lower(*arguments).compile().collectives()
    assert {(c.kind, c.times) for c in found if c.bytes > 4} == {("all-reduce", 1)}
    size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(arguments[0])))
    assert sum(c.bytes for c in found if c.bytes > 4) == size


@pytest.mark.parametrize("names", [None, ("x", "mask")], ids=str)
def test_each_array_is_constrained_as_it_is_declared(names):
    """Whatever the order of the parameters, which is not that of their names."""

    def masked(model, x, mask):
        return (mask * (model(x) ** 2).mean(-1)).mean()

    arguments = batch()["x"], jnp.arange(64.0)
    mesh = mesh_of((8,), ("data",))
    model = Normed(nnx.Rngs(0))
    sharding = fsdp(model, mesh=mesh, min_size=0)
    accumulate = accumulate_gradients(masked, steps=4, batch=names)
    step = jit(accumulate, in_shardings=(sharding, P("data"), P("data")), mesh=mesh)
    expected = value_and_grad(masked)(Normed(nnx.Rngs(0)), *arguments)
    assert_close(step(model, *arguments), expected, 1e-4)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.up = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return x + self.up(self.norm(x))


def of_squares(model, x):
    return jnp.mean(model(x) ** 2)


def reductions(model, kinds, axis=None, fun=of_squares, strategy=None):
    """How often what is reduced, in bytes, of more than the loss."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=kinds)
    gradient = accumulate_gradients(fun, steps=4, axis=axis)
    sharding = P() if strategy is None else strategy(model)
    step = jit(gradient, in_shardings=(sharding, P("data")), mesh=mesh)
    x = jax.device_put(batch()["x"], jax.NamedSharding(mesh, P("data")))
    expected = value_and_grad(fun)(model, batch()["x"])
    assert_close(step(model, x), expected, 1e-4)
    found = step.lower(model, x).compile().collectives()
    return sorted((c.times, c.bytes) for c in found if c.bytes > 4)


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MESHES = [((EXPLICIT, EXPLICIT), None), ((EXPLICIT, AUTO), None), ((AUTO, AUTO), "data")]


@pytest.mark.parametrize(("kinds", "axis"), MESHES, ids=str)
@pytest.mark.parametrize("remat", [False, True])
def test_a_stack_is_reduced_once(kinds, axis, remat):
    model = stack(Layer, 3, rngs=nnx.Rngs(0), remat=remat)
    size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
    assert reductions(model, kinds, axis) == [(1, size)]


class Convolutions(nnx.Module):
    """Convolutions, of groups and transposed, whose rows are the features of their gradients."""

    def __init__(self, rngs):
        self.one = nnx.Conv(4, 8, (3,), rngs=rngs)
        self.groups = nnx.Conv(8, 8, (3,), feature_group_count=2, rngs=rngs)
        self.back = nnx.ConvTranspose(8, 4, (3,), strides=2, rngs=rngs)

    def __call__(self, x):
        return self.back(self.groups(self.one(x.reshape(len(x), 4, 4))))


class OwnCode(nnx.Module):
    """Parameters that are used without a layer of Flax, in loops and in ``vmap``."""

    def __init__(self, rngs):
        self.layer = Layer(rngs)
        self.positions = nnx.Param(rngs.normal((16,)))
        self.temperature = nnx.Param(jnp.full(16, 1.5))
        self.kernel = nnx.Param(0.1 * rngs.normal((16, 16)))

    def __call__(self, x):
        x = self.layer(x + self.positions[...])

        def step(x, _):
            return x + jnp.tanh(x @ self.kernel[...]), None

        x, _ = jax.lax.scan(step, x, length=2)
        return jax.vmap(lambda row: jnp.sin(row) / self.temperature[...])(x)


class Words(nnx.Module):
    """Tokens in functions that JAX jits, whose outputs have more dimensions than the inputs."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 16, rngs=rngs)
        self.table = nnx.Param(rngs.normal((16, 16)))
        self.of_words = nnx.Linear(16, 16, rngs=rngs)
        self.out = nnx.Linear(16, 32, rngs=rngs)

    def __call__(self, x):
        tokens = jnp.abs(16 * x[:, :3]).astype(int) % 16
        lookup = jax.checkpoint(jax.jit(lambda table, tokens: table[tokens]))
        x = self.embed(tokens) + lookup(self.table[...], tokens)
        return self.out(x + self.of_words(jax.nn.one_hot(tokens, 16)))


class Bent(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 16, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + nnx.gelu(self.up(x))


class Layers(nnx.Module):
    """A stack behind a lookup: what its forward pass keeps is all that has rows."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 16, rngs=rngs)
        self.layers = stack(Bent, 2, rngs=rngs)

    def __call__(self, x):
        return self.layers(self.embed(jnp.abs(16 * x[:, :3]).astype(int) % 16))


@pytest.mark.parametrize(("kinds", "axis"), MESHES, ids=str)
def test_a_linear_loss_of_a_stack_is_reduced_once(kinds, axis):
    model = Layers(nnx.Rngs(0))
    size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
    found = reductions(model, kinds, axis, lambda model, x: model(x).mean(), replicated)
    assert found == [(1, size)]


@pytest.mark.parametrize(("kinds", "axis"), MESHES, ids=str)
@pytest.mark.parametrize("model_class", [Convolutions, OwnCode, Words])
def test_uses_outside_of_layers_are_reduced_once(model_class, kinds, axis):
    model = model_class(nnx.Rngs(0))

    def decayed(model, x):
        weights = jax.tree.leaves(nnx.state(model, nnx.Param))
        return jnp.mean(model(x) ** 2) + sum((w**2).sum() for w in weights)

    size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
    # On Explicit axes, JAX cannot type lookups; those of a strategy's modules run on Auto axes.
    strategy = replicated if model_class is Words else None
    assert reductions(model, kinds, axis, decayed, strategy) == [(1, size)]


def test_layers_that_mix_rows():
    """A product of one's own may mix rows, as with a scale for all of them."""

    def scaled(x, kernel, *args, **kwargs):
        return jax.lax.dot_general(x / jnp.abs(x).max(), kernel, *args, **kwargs)

    model = nnx.Linear(16, 16, dot_general=scaled, use_bias=False, rngs=nnx.Rngs(0))
    mesh = jax.make_mesh((8,), ("data",))
    found = jit(
        accumulate_gradients(of_squares, steps=2), in_shardings=(P(), P("data")), mesh=mesh
    )(model, batch()["x"])
    assert_close(found, accumulate_gradients(of_squares, steps=2)(model, batch()["x"]), 1e-4)


class Looped(nnx.Module):
    """A loop in the loss, over a flag as well; each kernel gets a whole number as its gradient."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.eye(WIDTH))

    def __call__(self, x):
        @jax.custom_vjp
        def with_rounded_gradient(x):
            return x

        def backward(_, d_x):
            return ((64 * d_x).astype(jnp.int32).astype(d_x.dtype),)

        with_rounded_gradient.defvjp(lambda x: (x, None), backward)
        kernel = with_rounded_gradient(self.kernel[...])

        def step(carry, _):
            x, is_small = carry
            return (jnp.tanh(x @ kernel), is_small & (x.sum() < 1e6)), None

        (x, is_small), _ = jax.lax.scan(step, (x, jnp.array(True)), length=2)
        return x * is_small.astype(x.dtype)


def test_a_gradient_that_is_rounded_is_a_sum_over_all_rows():
    """The sums of the shards are added up before, and nothing of a trace is kept."""
    mesh, x = jax.make_mesh((8,), ("data",)), batch()["x"]
    accumulate = accumulate_gradients(of_squares, steps=2)
    with jax.checking_leaks():
        _, found = jit(accumulate, in_shardings=(P(), P("data")), mesh=mesh)(Looped(), x)
    _, expected = accumulate(Looped(), x)
    [found], [expected] = jax.tree.leaves(found), jax.tree.leaves(expected)  # those of the kernel
    np.testing.assert_allclose(found, expected, atol=0.5)


class Normalized(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.out = nnx.Linear(16, 1, rngs=rngs)

    def loss(self, x):
        return (self.out(self.norm(x)) ** 2).mean()


def test_bound_method_that_writes_state():
    one, other = (Normalized(nnx.Rngs(0)) for _ in range(2))
    found = accumulate_gradients(one.loss, steps=4, argnums="self")(batch()["x"])
    loss = Normalized.loss
    assert_close(found, accumulate_gradients(loss, steps=4)(other, batch()["x"]))
    assert_close(nnx.state(one), nnx.state(other))
    assert not np.allclose(one.norm.mean[...], 0)


def test_batch_norm_and_dropout_on_one_axis():
    mesh = jax.make_mesh((8,), ("data",))
    states = []
    for sharding in (P("data"), None):
        model = Noisy(nnx.Rngs(0))
        in_shardings = None if sharding is None else (replicated(model), sharding)
        accumulate = accumulate_gradients(loss, steps=4, wrt=nnx.Param)
        step = jit(accumulate, in_shardings=in_shardings, mesh=mesh)
        states.append((step(model, batch()), nnx.state(model, nnx.BatchStat)))
    assert_close(*states)


def test_arrays_without_a_derivative_are_named():
    accumulate = accumulate_gradients(loss, steps=4, wrt=...)
    with pytest.raises(TypeError, match=r"cannot be differentiated(.|\n)*model.dropout.rngs.key: "):
        accumulate(Noisy(nnx.Rngs(0)), batch())


@pytest.mark.parametrize(
    ("options", "arguments", "error", "message"),
    [
        ({"steps": 0}, None, TypeError, "steps must be a positive integer, got 0"),
        ({"steps": True}, None, TypeError, "steps must be a positive integer"),
        ({"steps": 5}, 1, ValueError, r"x'\]: .*64 rows are not a multiple of 5\n"),
        ({"steps": 4, "batch": "bath"}, 1, ValueError, "'bath'; did you mean 'batch'"),
        ({"steps": 4}, 0, ValueError, "no argument is a batch of arrays"),
    ],
)
def test_errors(options, arguments, error, message):
    model = Normed(nnx.Rngs(0))
    fun = loss if arguments else lambda model: jnp.sum(model.up.kernel[...])
    with pytest.raises(error, match=message):
        accumulate_gradients(fun, **options)(model, *([batch()] if arguments else []))


def of_three(w, x, target):
    return ((x @ w - target["y"]) ** 2).mean() * target["scale"]


def of_all(*arguments):
    return of_three(*arguments)


@pytest.mark.parametrize(
    ("fun", "options", "message"),
    [
        (of_three, {}, r"the rows of the batch, and values without rows:\n  target\n"),
        (of_three, {"batch": ("x", "target"), "argnums": (0, 1)}, r"differentiated:\n  'x'\n"),
        (of_all, {}, "no argument is a batch of arrays"),
        (of_all, {"batch": "arguments"}, "differentiated:\n  'arguments'\n"),
    ],
)
def test_rows_that_would_be_broadcast(fun, options, message):
    """With as many steps as rows, the loss and the totals would broadcast them."""
    arguments = jnp.ones((8, 1)), jnp.ones((8, 8)), {"y": jnp.ones((8, 1)), "scale": 2.0}
    with pytest.raises(ValueError, match=message):
        accumulate_gradients(fun, steps=8, **options)(*arguments)


def test_a_differentiated_argument_with_rows_may_be_a_parameter():
    def of_squares(w, x, y):
        return ((x @ w - y) ** 2).mean()

    w, x, y = jnp.linspace(0, 1, 64).reshape(8, 8), jnp.eye(8), jnp.ones((8, 8))
    text = r"as many rows as the batch:\n  x\nThe gradients(.|\n)*If these are .*pass batch='y'\."
    with pytest.raises(ValueError, match=text):
        accumulate_gradients(of_squares, steps=2, argnums=(0, 1))(w[:, :4].T, x[:, :4], y)
    # Alone, it is the parameter.
    found = accumulate_gradients(of_squares, steps=2)(w, x, y)
    assert_close(found, jax.value_and_grad(of_squares)(w, x, y))


def test_settings_may_have_arrays_and_scalars():
    def of_weights(w, x, settings):
        return ((x @ w * settings["weights"]) ** 2).mean() * settings["scale"]

    arguments = (
        jnp.ones((4, 3)),
        jnp.arange(32.0).reshape(8, 4),
        {"weights": jnp.ones(3), "scale": 2.0},
    )
    found = accumulate_gradients(of_weights, steps=4)(*arguments)
    assert_close(found, jax.value_and_grad(of_weights)(*arguments))


@pytest.mark.parametrize(
    ("axis", "is_mapped", "error"),
    [
        ("dta", False, "accumulate_gradients: axis='dta': .*did you mean 'data'"),
        ("data", True, "accumulate_gradients: axis='data': the function is mapped over 'data'"),
        # In the loop, `model` shards the rows as well, which a shard_map in the loss may refuse.
        ("model", False, r"accumulate_gradients\(axis=...\) shards .* over 'model', too"),
    ],
)
def test_errors_about_the_axis(axis, is_mapped, error):
    explicit = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=explicit)
    specs = P("data"), P()

    def of_rows(x, kernel):
        if not is_mapped:
            raise ValueError
        return ((x @ kernel) ** 2).mean()

    step = accumulate_gradients(of_rows, steps=2, axis=axis, argnums=1)
    if is_mapped:
        step = shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), axis_names={"data"})
    with pytest.raises(ValueError) as caught:
        jit(step, in_shardings=specs, mesh=mesh)(jnp.ones((16, 8)), jnp.ones((8, 8)))
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert re.search(error, text)


@pytest.mark.parametrize("run", [lambda f: f, jax.jit, jit], ids=["eager", "jax.jit", "jit"])
def test_the_mesh_of_the_axis_may_be_that_of_placed_arrays(run):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    kernel, x = jnp.linspace(-1, 1, 8), jnp.linspace(-1, 1, 128).reshape(16, 8)
    placed = place((kernel, x), (P(), P("data")), mesh)
    step = accumulate_gradients(lambda kernel, x: ((x @ kernel) ** 2).mean(), steps=2, axis="data")
    assert_close(run(step)(*placed), jax.value_and_grad(step.__wrapped__)(kernel, x))


def test_the_mesh_of_the_axis_may_be_that_of_the_batch_alone():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    kernel, x = jnp.linspace(-1, 1, 8), jnp.linspace(-1, 1, 128).reshape(16, 8)
    step = accumulate_gradients(lambda kernel, x: ((x @ kernel) ** 2).mean(), steps=2, axis="data")
    found = step(kernel, place(x, P("data"), mesh))
    assert_close(found, jax.value_and_grad(step.__wrapped__)(kernel, x))
    with pytest.raises(NoMeshError, match=r"axis='data'\): there is no mesh. Call within"):
        step(kernel, x)


def test_auxiliary_data_that_are_not_arrays():
    def with_name(model, batch):
        return loss(model, batch), {"name": "text", "x": batch["x"]}

    fun = accumulate_gradients(with_name, steps=4, has_aux=True)
    with pytest.raises(TypeError, match=r"aux\['name'\]: a str\n"):
        fun(Normed(nnx.Rngs(0)), batch())


def test_microbatches_that_the_devices_do_not_divide():
    mesh, model = jax.make_mesh((8,), ("data",)), Normed(nnx.Rngs(0))
    step = jit(
        accumulate_gradients(loss, steps=16), in_shardings=(replicated(model), P("data")), mesh=mesh
    )
    faults = r"rows sharded over 'data' \(8\): 64 rows are not a multiple of 16 × 8 = 128"
    with pytest.raises(ValueError, match=rf"batch\['x'\]: shape \(64, 16\), {faults}"):
        step(model, batch())


def test_parameters_that_fsdp_shards_on_auto_axes_are_reduced_once():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    model = Normed(nnx.Rngs(0))
    gradient = accumulate_gradients(loss, steps=2, axis="data")
    specs = (fsdp(model, mesh=mesh, min_size=0), P("data"))
    compiled = jit(gradient, in_shardings=specs, mesh=mesh).lower(model, batch()).compile()
    large = [c for c in compiled.collectives().of("all-reduce") if c.bytes > 4]
    size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
    assert [(c.times, c.bytes) for c in large] == [(1, size)]


@pytest.mark.parametrize("is_stack", [False, True])
def test_parameters_are_gathered_before_the_loop_but_those_of_a_stack(is_stack):
    def layer(rngs):
        return nnx.Linear(16, 16, use_bias=False, rngs=rngs)

    def make():
        if is_stack:
            return stack(layer, 3, rngs=nnx.Rngs(0))
        return nnx.Sequential(*(layer(nnx.Rngs(i)) for i in range(3)))

    mesh = jax.make_mesh((8,), ("data",))
    model = nnx.eval_shape(make)

    @jit(in_shardings=(fsdp(model, mesh=mesh, min_size=0), P("data")), mesh=mesh)
    def gradient(model, x):
        return accumulate_gradients(lambda model, x: jnp.mean(model(x) ** 2), steps=8)(model, x)

    compiled = gradient.lower(model, jax.ShapeDtypeStruct((64, 16), jnp.float32)).compile()
    gathers = [(c.bytes, c.times) for c in compiled.collectives().of("all-gather")]
    assert gathers == ([(1024, 3 * 8)] if is_stack else [(1024, 1)] * 3)
