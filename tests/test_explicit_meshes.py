"""Models of others on plain meshes: Explicit axes, the shardings of strategies, three steps."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding import jit
from nnx_sharding.partition import fsdp, replicated, tensor_parallel

WIDTH = 16


@pytest.fixture(autouse=True, scope="module")
def _less_optimized():
    """Compiles in a third of the time."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.mlp = MLP(rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(64, WIDTH, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(self.norm(self.embed(tokens)))


class ConvNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Conv(4, 16, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.second = nnx.Conv(16, 8, (3, 3), rngs=rngs)
        self.head = nnx.Linear(8, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = jax.nn.relu(self.norm(self.first(x)))
        return self.head(self.second(x).mean((1, 2)))


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.LSTMCell(WIDTH, 32, rngs=rngs))
        self.out = nnx.Linear(32, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.out(self.rnn(x))


class LoRA(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.LoRALinear(WIDTH, 4 * WIDTH, lora_rank=4, rngs=rngs)
        self.down = nnx.LoRALinear(4 * WIDTH, WIDTH, lora_rank=4, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


class MixtureOfExperts(nnx.Module):
    def __init__(self, rngs):
        self.router = nnx.Linear(WIDTH, 4, use_bias=False, rngs=rngs)
        self.wi = nnx.Einsum("bd,edf->ebf", (4, WIDTH, 32), rngs=rngs)
        self.wo = nnx.Einsum("ebf,efd->ebd", (4, 32, WIDTH), rngs=rngs)

    def __call__(self, x):
        gates = jax.nn.softmax(self.router(x))
        return jnp.einsum("ebd,be->bd", self.wo(jax.nn.relu(self.wi(x))), gates)


# The shapes of what each model takes and of its targets; None for tokens.
MODELS = {
    MLP: ((8, WIDTH), (8, WIDTH)),
    Attention: ((8, 4, WIDTH), (8, 4, WIDTH)),
    Tied: (None, None),
    ConvNet: ((8, 8, 8, 4), (8, WIDTH)),
    Recurrent: ((8, 4, WIDTH), (8, 4, WIDTH)),
    LoRA: ((8, WIDTH), (8, WIDTH)),
    MixtureOfExperts: ((8, WIDTH), (8, WIDTH)),
}
STRATEGIES = {
    "replicated": replicated,
    "fsdp": functools.partial(fsdp, min_size=0),
    "tensor_parallel": tensor_parallel,
    "sequence": functools.partial(tensor_parallel, sequence=True),
    "both": lambda model, mesh, **o: fsdp(
        model, mesh=mesh, min_size=0, base=tensor_parallel(model, mesh=mesh), **o
    ),
}


def data_for(kind):
    x_shape, y_shape = MODELS[kind]
    if x_shape is None:
        return tuple(jax.random.randint(jax.random.key(i), (8, 4), 0, 64) for i in (1, 2))
    return jax.random.normal(jax.random.key(1), x_shape), jnp.ones(y_shape)


def loss(model, x, y):
    out = model(x)
    if jnp.issubdtype(y.dtype, jnp.integer):
        return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()
    return ((out - y) ** 2).mean()


# With a larger epsilon: Adam amplifies the rounding of gradients that are zero, as of key biases.
ADAM = optax.adam(1e-2, eps=1e-3)


def step(model, optimizer, x, y):
    value, gradients = nnx.value_and_grad(loss)(model, x, y)
    optimizer.update(model, gradients)
    return value


@functools.cache
def expected(kind):
    """The losses and parameters of flax.nnx on one device."""
    model = kind(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    losses = [float(nnx.jit(step)(model, optimizer, *data_for(kind))) for _ in range(3)]
    return losses, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState)))


CASES = [
    pytest.param(
        kind,
        strategy,
        id=f"{kind.__name__}-{strategy}",
        marks=() if kind is MLP or (strategy == "both" and kind is Tied) else pytest.mark.slow,
    )
    for kind in MODELS
    for strategy in STRATEGIES
]


# The loss is outside of the models, and the logits of a tied embedding are gathered for it.
@pytest.mark.filterwarnings("ignore::nnx_sharding.errors.UnshardedWarning")
@pytest.mark.parametrize(("kind", "strategy"), CASES)
def test_training_equals_one_device(kind, strategy):
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    model = kind(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    sharding = STRATEGIES[strategy](model, mesh=mesh, optimizer=optimizer)
    train = jit(step, mesh=mesh, in_shardings=(sharding, sharding, P("data"), P("data")))
    losses = [float(train(model, optimizer, *data_for(kind))) for _ in range(3)]
    wanted, parameters = expected(kind)
    np.testing.assert_allclose(losses, wanted, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3),
        jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState)))),
        jax.device_get(parameters),
    )
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        declared = sharding.map_prefix(path, variable)
        array = variable.get_raw_value()
        if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            same = jax.sharding.NamedSharding(mesh, declared)
            assert array.sharding.is_equivalent_to(same, array.ndim), path


def test_abstract_arguments_that_have_a_type():
    """Arrays that are made abstract in a mesh have replicated types; the declared specs win."""
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    make = functools.partial(nnx.eval_shape, lambda: MLP(nnx.Rngs(0)))
    batch = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    sharding = fsdp(make(), mesh=mesh, min_size=0, base=tensor_parallel(make(), mesh=mesh))
    step = jit(lambda model, x: model(x), in_shardings=(sharding, P("data")), mesh=mesh)
    expected = step.lower(make(), batch)
    with jax.set_mesh(mesh):
        model, x = make(), jax.eval_shape(lambda: jnp.ones(batch.shape))
        assert x.sharding.spec == model.up.kernel.sharding.spec == P(None, None)
        found = step.lower(model, x)
        assert found.compile().collectives() == expected.compile().collectives()
        assert step.eval_shape(model, x).sharding.spec == P("data", None)
    assert model.up.kernel.sharding.spec == P(None, None)  # the caller's model is not changed


@pytest.mark.parametrize("kind", ["mesh", "device"])
def test_abstract_arguments_on_devices(kind):
    """They are like committed arrays."""
    mesh = jax.make_mesh((8,), ("data",))
    other = NamedSharding(mesh, P()) if kind == "mesh" else SingleDeviceSharding(jax.devices()[1])
    array = jax.device_put(jnp.ones((8, 8)), other)
    x = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=other)
    fun = functools.partial(jit, lambda x: x, in_shardings=P("data"), mesh=mesh)
    with pytest.raises(ValueError, match=r"x(:| is) ") as expected:
        fun()(array)
    with pytest.raises(ValueError) as found:
        fun().lower(x)
    assert str(found.value) == str(expected.value)
    assert fun(on_committed="move").lower(x).compile().input_shardings[0][0].spec == P("data")
