"""Models, optimizers and shardings of them that the tests of strategies share."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh

from nnx_sharding.partition import specs_by_path
from nnx_sharding.partition.strategies import fsdp, replicated, zero1
from nnx_sharding.partition.tensor_parallel import tensor_parallel
from nnx_sharding.partition.variables import variables
from nnx_sharding.specs.fitting import fit_sharding

MESH = AbstractMesh((2, 4), ("data", "model"))
WIDTH = 16


class MLP(nnx.Module):
    def __init__(self, rngs, hidden=32):
        self.up = nnx.Linear(WIDTH, hidden, rngs=rngs)
        self.norm = nnx.LayerNorm(hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(self.norm(jax.nn.gelu(self.up(x))))


class Attention(nnx.Module):
    def __init__(self, rngs, heads=4):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, WIDTH, 4 * heads, normalize_qk=True, decode=False, rngs=rngs
        )
        self.mlp = MLP(rngs)

    def __call__(self, x):
        x = x[:, None, :] * jnp.arange(1.0, 4.0)[:, None]
        x = x + self.attention(self.norm(x))
        return (x + self.mlp(x)).mean(1)


class ResNet(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.conv2 = nnx.Conv(8, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(8, rngs=rngs)
        self.back = nnx.ConvTranspose(8, 4, (2, 2), rngs=rngs)
        self.head = nnx.Linear(4, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = self.conv1(x.reshape(-1, 4, 4, 1))
        y = self.norm2(self.conv2(jax.nn.relu(self.norm1(x))))
        return self.head(self.back(jax.nn.relu(x + y)).mean((1, 2)))


class Recurrent(nnx.Module):
    def __init__(self, rngs, cell=nnx.LSTMCell):
        self.rnn = nnx.RNN(cell(4, WIDTH, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return self.rnn(x.reshape(-1, 4, 4))[:, -1]


class Adapted(nnx.Module):
    """LoRA as a layer and around one."""

    def __init__(self, rngs):
        self.up = nnx.LoRALinear(WIDTH, 32, lora_rank=4, rngs=rngs)
        down = nnx.Linear(32, WIDTH, rngs=rngs)
        self.down = nnx.LoRA(32, 4, WIDTH, base_module=down, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x)))


class Words(nnx.Module):
    """An embedding whose vocabulary no axis divides, layers over several dimensions, a stack."""

    def __init__(self, rngs, words=24):
        self.embed = nnx.Embed(words, WIDTH, rngs=rngs)
        self.odd = nnx.Embed(5, WIDTH, rngs=rngs)
        self.split = nnx.Einsum("btd,dhk->bthk", (WIDTH, 4, 3), (4, 3), rngs=rngs)
        self.join = nnx.LinearGeneral((4, 3), WIDTH, axis=(-2, -1), rngs=rngs)
        rows = rngs.split(3)
        self.stack = nnx.vmap(lambda r: nnx.Linear(WIDTH, WIDTH, rngs=r), graph=True)(rows)
        self.own = nnx.Param(jnp.ones((WIDTH,)))

    def __call__(self, x):
        words = jnp.abs(x * 10).astype(int)
        x = self.embed(words % 24) + self.odd(words % 5)
        x = self.join(self.split(x))
        for kernel, bias in zip(self.stack.kernel[...], self.stack.bias[...], strict=True):
            x = jnp.tanh(x @ kernel + bias)
        return (x * self.own[...]).mean(1)


MODELS = {
    "mlp": MLP,
    "attention": Attention,
    "resnet": ResNet,
    "lstm": Recurrent,
    "gru": functools.partial(Recurrent, cell=nnx.GRUCell),
    "optimized lstm": functools.partial(Recurrent, cell=nnx.OptimizedLSTMCell),
    "simple": functools.partial(Recurrent, cell=nnx.SimpleCell),
    "lora": Adapted,
    "words": Words,
}


# fmt: off
OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "adamw chain": optax.chain(optax.clip_by_global_norm(1.0),
                               optax.adamw(optax.cosine_decay_schedule(1e-2, 9))),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "masked": optax.masked(optax.adam(1e-2), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "multi": optax.multi_transform(
        {True: optax.adamw(1e-2), False: optax.sgd(1e-2, momentum=0.5)},
        lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    "steps": optax.MultiSteps(optax.adam(1e-2), 2),
    "lion": optax.lion(1e-3),
    "lamb": optax.lamb(1e-2),
    "ema": optax.chain(optax.sgd(1e-2), optax.ema(0.9)),
    "sm3": optax.sm3(1e-2),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
}
# fmt: on


def both(make, tx):
    model = make(nnx.Rngs(0))
    model.train()
    return model, nnx.Optimizer(model, tx, wrt=nnx.Any(nnx.Param, nnx.LoRAParam))


def strategy(name, model, optimizer, mesh):
    """The sharding of a model and its optimizer by a strategy."""
    small, both = {"min_size": 8}, {"optimizer": optimizer}
    if name == "replicated":
        return replicated(model, **both)
    if name == "tensor":
        return tensor_parallel(model, mesh=mesh, **both)
    base = tensor_parallel(model, mesh=mesh) if name in ("2d", "zero1 tensor") else None
    if name.startswith("zero1"):
        return zero1(model, optimizer=optimizer, mesh=mesh, base=base, **small)
    axis = ("data", "model") if name == "fsdp both" else "data"
    return fsdp(model, mesh=mesh, axis=axis, base=base, **small, **both)


def misfits(tree, sharding, mesh):
    """What is wrong with a sharding: paths without a spec, specs that do not fit."""
    wrong = []
    for each in variables(tree):
        index, spec = sharding.find(each.path, each.variable)
        fits = [fit_sharding(spec, mesh, shape) for shape in each.shapes]
        reasons = ["no spec"] if index is None else [fit.reasons for fit in fits if fit.problems]
        wrong += [(each.name, spec, reason) for reason in reasons]
    return wrong


def table(tree, sharding):
    """The specs by name, without those of replicated arrays."""
    specs = {"/".join(map(str, path)): spec for path, spec in specs_by_path(tree, sharding).items()}
    return {name: spec for name, spec in specs.items() if any(spec)}
