"""Trains a small language model on 2 × 4 devices: ``python examples/transformer.py``.

A decoder-only transformer of ordinary NNX layers: tensor parallel over the ``model`` axis of the
mesh, fully sharded over its ``data`` axis. Its sharding is the one line in :func:`sharding_of`; the
model does not depend on it. The text is Python's language reference, installed for ``help()``.

``--check`` trains the same model on one device with ``nnx.jit``, and compares the losses. With
``--stack`` the blocks run in one loop, with ``--remat`` the backward pass computes them again, and
with ``--microbatches`` gradients are accumulated; the losses stay the same.

To run it in several processes, which load different rows of the batches: ``python -m nnx_sharding
launch --processes 2 --devices-per-process 4 examples/transformer.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

# For the CPU only; JAX reads it when it is initialized.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nnx_sharding import (
    Stack,
    StateSharding,
    accumulate_gradients,
    jit,
    limit_traces,
    remat,
    stack,
    value_and_grad,
)
from nnx_sharding.partition import fsdp, sharded_init, tensor_parallel
from nnx_sharding.placement import process_rows, shard_batches
from nnx_sharding.report import check_sharding


@dataclasses.dataclass(frozen=True)
class Config:
    """The size of the model and of its training."""

    vocabulary: int = 256
    context: int = 64
    features: int = 64
    heads: int = 4
    layers: int = 2
    batch: int = 16
    learning_rate: float = 3e-3
    stacked: bool = False  # whether the blocks are one stack, which runs in a loop
    remat: str | None = None  # what a block keeps for the backward pass; None for all
    microbatches: int = 1


class Block(nnx.Module):
    """Attention and an MLP, each with a normalized input and a residual connection."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.norm_attention = nnx.RMSNorm(config.features, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            config.heads, config.features, decode=False, use_bias=False, rngs=rngs
        )
        self.norm_mlp = nnx.RMSNorm(config.features, rngs=rngs)
        self.up = nnx.Linear(config.features, 4 * config.features, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * config.features, config.features, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The output for ``x`` of shape (batch, length, features)."""
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm_attention(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm_mlp(x))))


class Transformer(nnx.Module):
    """Predicts the next byte at each position of a text."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(config.vocabulary, config.features, rngs=rngs)
        self.positions = nnx.Embed(config.context, config.features, rngs=rngs)
        blocks = [Block(config, rngs) for _ in range(config.layers)]
        self.blocks = stack(blocks) if config.stacked else nnx.List(blocks)
        self.policy = config.remat
        self.norm = nnx.RMSNorm(config.features, rngs=rngs)
        self.head = nnx.Linear(config.features, config.vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of shape (batch, length, vocabulary) for ``tokens`` of shape (batch, length)."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        run = Block.__call__ if self.policy is None else remat(Block.__call__, policy=self.policy)
        if isinstance(self.blocks, Stack):
            x, _ = self.blocks.scan(lambda block, x: (run(block, x), None), x)
        else:
            for block in self.blocks:
                x = run(block, x)
        return self.head(self.norm(x))


def make(config: Config) -> tuple[Transformer, nnx.Optimizer[Transformer]]:
    """A model and its optimizer."""
    model = Transformer(config, nnx.Rngs(0))
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, 20, 400)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    return model, nnx.Optimizer(model, chain, wrt=nnx.Param)


def sharding_of(model: Any, optimizer: Any, mesh: Mesh) -> StateSharding:
    """The sharding of the model and its optimizer."""
    return fsdp(
        model, mesh=mesh, base=tensor_parallel(model, mesh=mesh), min_size=0, optimizer=optimizer
    )


def loss_of(model: Any, tokens: jax.Array) -> jax.Array:
    """The mean loss on tokens of shape (batch, context + 1)."""
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def train_step(
    model: Any, optimizer: Any, tokens: jax.Array, *, microbatches: int = 1
) -> jax.Array:
    """One step on a batch of tokens; returns the loss."""
    gradient = accumulate_gradients(loss_of, steps=microbatches)
    loss, grads = (
        gradient(model, tokens) if microbatches > 1 else value_and_grad(loss_of)(model, tokens)
    )
    optimizer.update(model, grads)
    return loss


def batches(config: Config, steps: int, rows: Any = slice(None)) -> Iterator[np.ndarray]:
    """Batches of random pieces of the text, as bytes: these rows of each."""
    from pydoc_data.topics import topics

    text = np.frombuffer("\n".join(topics.values()).encode(), np.uint8).astype(np.int32)
    random = np.random.default_rng(0)
    for _ in range(steps):
        starts = random.integers(0, len(text) - config.context - 1, config.batch)
        yield np.stack([text[start : start + config.context + 1] for start in starts[rows]])


def train(
    step: Callable[..., jax.Array], model: Any, optimizer: Any, data: Iterator[Any]
) -> list[float]:
    """Trains for one step per batch; returns the losses."""
    # Virtual CPU devices share few threads, which many queued programs can exhaust: wait for each.
    losses = [float(step(model, optimizer, next(data)))]
    with limit_traces(0):  # a retrace would be a mistake
        losses += [float(step(model, optimizer, tokens)) for tokens in data]
    return losses


def train_sharded(config: Config, steps: int, mesh: Mesh) -> tuple[Any, Any, list[float]]:
    """Trains on all devices of a mesh; arrays are created sharded."""
    model, optimizer = sharded_init(
        lambda: make(config), lambda state: sharding_of(*state, mesh), mesh
    )
    sharding = sharding_of(model, optimizer, mesh)
    step = jit(
        functools.partial(train_step, microbatches=config.microbatches),
        in_shardings=(sharding, sharding, P("data")),
        activation_shardings={"head": P("data")},  # the loss needs all logits of a position
        mesh=mesh,
        strict=True,
    )
    rows = process_rows(P("data"), config.batch, mesh=mesh)
    with shard_batches(batches(config, steps, rows), P("data"), mesh, uneven="error") as data:
        return model, optimizer, train(step, model, optimizer, iter(data))


def train_alone(config: Config, steps: int) -> list[float]:
    """Trains the same model on one device, with Flax."""
    model, optimizer = nnx.jit(lambda: make(config))()
    return train(nnx.jit(train_step), model, optimizer, batches(config, steps))


def main(size: Config | None = None) -> None:
    """Trains a model of a size, and prints the losses."""
    size = size or Config()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--check", action="store_true", help="compare with one device")
    parser.add_argument("--layers", type=int, default=size.layers)
    parser.add_argument("--stack", action="store_true", help="run the blocks in one loop")
    parser.add_argument("--remat", metavar="POLICY", help="such as dots_saveable: what is kept")
    parser.add_argument("--microbatches", type=int, default=1, help="for each batch")
    options = parser.parse_args()

    if "JAX_COORDINATOR_ADDRESS" in os.environ:  # the launcher sets it
        jax.distributed.initialize()
    log = print if jax.process_index() == 0 else lambda *_: None

    config = dataclasses.replace(
        size,
        layers=options.layers,
        stacked=options.stack,
        remat=options.remat,
        microbatches=options.microbatches,
    )
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    abstract = nnx.eval_shape(lambda: make(config))
    log(check_sharding(abstract, sharding_of(*abstract, mesh), mesh))

    start = time.perf_counter()
    _, _, losses = train_sharded(config, options.steps, mesh)
    seconds = time.perf_counter() - start
    for number in range(0, options.steps, max(1, options.steps // 10)):
        log(f"step {number:4}  loss {losses[number]:.4f}")
    log(f"step {options.steps - 1:4}  loss {losses[-1]:.4f}  ({seconds:.0f} s)")
    if options.check:
        alone = train_alone(config, options.steps)
        difference = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
        log(f"largest difference to one device: {difference:.1e}")


if __name__ == "__main__":
    main()
