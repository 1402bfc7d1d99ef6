"""The programs that are measured, written with Flax NNX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class FrozenConfig:
    """What most published models keep in each of their blocks."""

    width: int = 8
    epsilon: float = 1e-6
    activation: Callable[..., Any] = jax.nn.relu
    names: tuple[str, ...] = ("norm", "up", "down")


@dataclasses.dataclass
class PlainConfig:
    """The same, which can be changed at any time."""

    width: int = 8
    epsilon: float = 1e-6
    activation: Callable[..., Any] = jax.nn.relu
    names: list[str] = dataclasses.field(default_factory=lambda: ["norm", "up", "down"])


# How blocks are configured: each makes what one block keeps.
SHARED = PlainConfig()
CONFIGS: dict[str, Callable[[], Any] | None] = {
    "bare": None,
    "frozen dataclass": FrozenConfig,
    "dataclass": PlainConfig,
    "one shared dataclass": lambda: SHARED,
    "list": lambda: ["norm", "up", "down"],
}


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs, config: Callable[[], Any] | None = None):
        if config is not None:
            self.config = nnx.static(config())
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, width, rngs=rngs)
        self.down = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.relu(self.up(self.norm(x))))


class Network(nnx.Module):
    """Residual blocks of 6 Variables each, and a counter that every call changes."""

    def __init__(
        self, blocks: int, width: int, rngs: nnx.Rngs, config: Callable[[], Any] | None = None
    ):
        self.blocks = nnx.List([Block(width, rngs, config) for _ in range(blocks)])
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        for block in self.blocks:
            x = block(x)
        return x


class MLP(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)


class Tiny(nnx.Module):
    """Two Variables; ``cyclic`` adds a child that refers to its parent."""

    def __init__(self, cyclic: bool):
        self.scale = nnx.Param(jnp.array(2.0))
        self.calls = nnx.Variable(jnp.array(0))
        if cyclic:
            self.child = nnx.Module()
            self.child.parent = self

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return x * self.scale[...]


class Program(NamedTuple):
    """One computation, to be called in several ways.

    Attributes:
      fun: the function; it takes the graphs, then the data, and changes the graphs in place.
      make: makes new graphs, the same ones each time.
      data: the other arguments.
      equinox: the name of the function in ``equinox_models`` that makes the same program there.
    """

    fun: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]
    data: tuple[Any, ...]
    equinox: str


def call_model(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


def forward(blocks: int, config: str = "bare", width: int = 8) -> Program:
    x = jax.random.normal(jax.random.key(1), (4, width))

    def make() -> tuple[Any, ...]:
        return (Network(blocks, width, nnx.Rngs(0), CONFIGS[config]),)

    return Program(call_model, make, (x,), equinox="forward")


def count_calls(model: Network, x: jax.Array) -> jax.Array:
    model.calls[...] += 1
    return x


def trivial(blocks: int, config: str = "bare") -> Program:
    """Nearly no work for JAX or XLA, however deep the model is."""
    return forward(blocks, config)._replace(fun=count_calls, equinox="count_calls")


def train_step(model: Network, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    def loss_of(model: Network) -> jax.Array:
        return jnp.mean((model(x) - y) ** 2)

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def training(blocks: int, width: int, batch: int) -> Program:
    def make() -> tuple[Any, ...]:
        model = Network(blocks, width, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(LEARNING_RATE), wrt=nnx.Param)

    x, y = jax.random.normal(jax.random.key(1), (2, batch, width))
    return Program(train_step, make, (x, y), equinox="training")


LEARNING_RATE = 1e-3


def parallel_mlp(model: MLP, x: jax.Array) -> jax.Array:
    """What one device does: it has some columns of ``up`` and the matching rows of ``down``."""
    hidden = jax.nn.relu(model.up(x))
    partial_sum = hidden @ model.down.kernel[...]
    return jax.lax.psum(partial_sum, "model") + model.down.bias[...]


def tensor_parallel(width: int, batch: int) -> Program:
    x = jax.random.normal(jax.random.key(1), (batch, width))
    return Program(
        parallel_mlp, lambda: (MLP(width, nnx.Rngs(0)),), (x,), equinox="tensor_parallel"
    )


def slow(model: nnx.Linear, x: jax.Array, steps: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, steps, lambda _, x: model(x), x)
