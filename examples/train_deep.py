"""Trains a deep model, in stages or with gathers ahead: ``python examples/train_deep.py``.

A decoder-only transformer whose blocks are one ``Stack`` predicts the next byte of Python's
language reference. The options choose how the blocks run, without a change of the model:

* ``--stages 4 --microbatches 8``: in stages of a pipeline, over an axis of the mesh; all other
  devices shard parameters and rows (fsdp). ``--repeats 2`` is the circular schedule.
* ``--stages 1 --prefetch 1``: on all devices, which gather the parameters of the next block while
  one computes. With ``--microbatches``, gradients are accumulated.
* ``--remat``: blocks, or stages, keep only their inputs, and the backward pass recomputes the rest.
* ``--explicit``: on a mesh with Explicit axes.
* ``--check``: the losses are compared with those of one device.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from typing import Any

# For the CPU only; JAX reads it when it is initialized.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from nnx_sharding import accumulate_gradients, jit, stack, value_and_grad
from nnx_sharding.partition import fsdp, idle_share, make_mesh, pipeline, sharded_init
from nnx_sharding.report import ProgramReport


@dataclasses.dataclass(frozen=True)
class Config:
    """What a run computes, and how. Each field is an option of the command line."""

    steps: int = 20
    batch: int = 32
    context: int = 64
    layers: int = 8
    features: int = 64
    heads: int = 4
    stages: int = 4
    microbatches: int = 8
    repeats: int = 1
    prefetch: int = 0
    remat: bool = False
    explicit: bool = False
    learning_rate: float = 0.1
    seed: int = 0


class Block(nnx.Module):
    """Attention and an MLP, each with a normalized input and a residual connection."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        size = config.features
        self.norm_attention = nnx.RMSNorm(size, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            config.heads, size, use_bias=False, decode=False, rngs=rngs
        )
        self.norm_mlp = nnx.RMSNorm(size, rngs=rngs)
        self.up = nnx.Linear(size, 4 * size, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * size, size, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The output for ``x`` of shape (batch, length, features)."""
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm_attention(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm_mlp(x))))


class Model(nnx.Module):
    """Predicts the next byte at each position of a text."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(256, config.features, rngs=rngs)
        self.positions = nnx.Embed(config.context, config.features, rngs=rngs)
        self.blocks = stack(Block, config.layers, config, remat=config.remat, rngs=rngs)
        self.norm = nnx.RMSNorm(config.features, rngs=rngs)
        self.head = nnx.Linear(config.features, 256, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of shape (batch, length, 256) for tokens of shape (batch, length)."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def make(config: Config) -> tuple[Model, nnx.Optimizer[Model]]:
    """A model and its optimizer."""
    model = Model(config, rngs=nnx.Rngs(config.seed))
    return model, nnx.Optimizer(model, optax.sgd(config.learning_rate), wrt=nnx.Param)


def mesh_of(config: Config) -> Mesh:
    """All devices, over stages and data."""
    sizes = {"stage": config.stages, "data": -1} if config.stages > 1 else {"data": -1}
    return make_mesh(sizes, AxisType.Explicit if config.explicit else AxisType.Auto)


def sharding_of(config: Config, model: Any, optimizer: Any, mesh: Mesh) -> Any:
    """The sharding of the model and its optimizer."""
    options = {"mesh": mesh, "optimizer": optimizer}
    if config.stages == 1:
        return fsdp(model, prefetch=config.prefetch, min_size=0, **options)
    base = fsdp(model, prefetch=config.prefetch, min_size=0, mesh=mesh)
    schedule = {"microbatches": config.microbatches, "repeats": config.repeats}
    return pipeline(model, base=base, **schedule, **options)


def loss_of(model: Any, tokens: jax.Array) -> jax.Array:
    """The mean loss of the predicted bytes, for tokens of shape (batch, context + 1)."""
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(model: Any, optimizer: Any, tokens: jax.Array, *, microbatches: int) -> jax.Array:
    """One step on a batch; returns the mean loss before it."""
    gradient = value_and_grad(loss_of)
    if microbatches > 1:
        gradient = accumulate_gradients(loss_of, steps=microbatches)
    loss, grads = gradient(model, tokens)
    optimizer.update(model, grads)
    return loss


def batches(config: Config) -> Any:
    """Batches of bytes, of shape (batch, context + 1)."""
    from pydoc_data.topics import topics

    text = np.frombuffer("\n".join(topics.values()).encode(), np.uint8).astype(np.int32)
    generator = np.random.default_rng(config.seed)
    for _ in range(config.steps):
        starts = generator.integers(len(text) - config.context, size=(config.batch, 1))
        yield text[starts + np.arange(config.context + 1)]


def train(config: Config, mesh: Mesh | None) -> tuple[list[float], ProgramReport]:
    """The loss of each step on a mesh, or on one device; and what the step costs."""
    # A pipeline makes its own microbatches.
    accumulated = 1 if config.stages > 1 or mesh is None else config.microbatches
    fun = functools.partial(train_step, microbatches=accumulated)
    if mesh is None:
        model, optimizer = make(config)
        step = jit(fun, donate_argnums=(0, 1))
    else:
        like = nnx.eval_shape(functools.partial(make, config))
        sharding = sharding_of(config, *like, mesh)
        model, optimizer = sharded_init(functools.partial(make, config), (sharding,) * 2, mesh)
        shardings = sharding, sharding, P("data")
        step = jit(fun, in_shardings=shardings, mesh=mesh, donate_argnums=(0, 1))
    report = step.lower(model, optimizer, next(batches(config))).compile().report()
    return [float(step(model, optimizer, batch)) for batch in batches(config)], report


def main() -> None:
    """Trains, and prints the losses and what the step sends and holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in dataclasses.fields(Config):
        kind = {} if field.type == "bool" else {"type": type(field.default)}
        action = "store_true" if field.type == "bool" else "store"
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, default=field.default, action=action, **kind)
    parser.add_argument("--check", action="store_true", help="compare with one device")
    options = vars(parser.parse_args())
    check, config = options.pop("check"), Config(**options)
    mesh = mesh_of(config)
    losses, report = train(config, mesh)
    print(report)
    if config.stages > 1:
        idle = idle_share(config.stages, config.microbatches, config.repeats)
        print(f"idle: {idle:.0%} of the time of a stage")
    print(f"loss: {losses[0]:.3f} before training, {losses[-1]:.3f} after {config.steps} steps")
    if check:
        alone, _ = train(config, None)
        np.testing.assert_allclose(losses, alone, rtol=1e-4)
        print("the losses are those of one device")


if __name__ == "__main__":
    main()
