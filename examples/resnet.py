"""Trains a residual network on handwritten digits, data parallel: ``python examples/resnet.py``.

The model is replicated and each device gets some rows of each batch. BatchNorm still takes its
statistics over all rows, and dropout draws the same bits as on one device: ``--check`` trains on
one device, too, and compares the losses. The evaluation counts each image once, although the last
batch is not full.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
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
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from nnx_sharding import jit, value_and_grad
from nnx_sharding.partition import make_mesh, replicated, sharded_init
from nnx_sharding.placement import process_rows, shard_batches

BATCH, LEARNING_RATE = 128, 0.05

Conv = functools.partial(nnx.Conv, use_bias=False, kernel_init=nnx.initializers.he_uniform())
BatchNorm = functools.partial(nnx.BatchNorm, momentum=0.9)


class Block(nnx.Module):
    """Two convolutions and a residual connection; ``strides`` divides height and width."""

    def __init__(self, inputs: int, outputs: int, strides: int, rngs: nnx.Rngs):
        self.conv1 = Conv(inputs, outputs, (3, 3), strides, rngs=rngs)
        self.norm1 = BatchNorm(outputs, rngs=rngs)
        self.conv2 = Conv(outputs, outputs, (3, 3), rngs=rngs)
        self.norm2 = BatchNorm(outputs, rngs=rngs)
        self.shortcut = Conv(inputs, outputs, (1, 1), strides, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The output for ``x`` of shape (batch, height, width, inputs)."""
        y = nnx.relu(self.norm1(self.conv1(x)))
        return nnx.relu(self.shortcut(x) + self.norm2(self.conv2(y)))


class ResNet(nnx.Module):
    """Classifies images of 8 × 8 pixels."""

    def __init__(self, stages: Sequence[int], rngs: nnx.Rngs):
        self.stem = Conv(1, stages[0], (3, 3), rngs=rngs)
        self.norm = BatchNorm(stages[0], rngs=rngs)
        sizes = itertools.pairwise([stages[0], *stages])
        self.blocks = nnx.List(
            [Block(a, b, strides=1 if a == b else 2, rngs=rngs) for a, b in sizes]
        )
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(stages[-1], 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits of shape (batch, 10) for images of shape (batch, 8, 8, 1)."""
        x = nnx.relu(self.norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x.mean((1, 2))))


def make(stages: Sequence[int], steps: int) -> tuple[ResNet, nnx.Optimizer[ResNet]]:
    """A model and its optimizer."""
    model = ResNet(stages, nnx.Rngs(0))
    rate = optax.cosine_decay_schedule(LEARNING_RATE, steps)
    return model, nnx.Optimizer(model, optax.sgd(rate, momentum=0.9), wrt=nnx.Param)


def train_step(model: Any, optimizer: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """One step on a batch; returns the loss before it."""

    def loss_of(model: Any) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    loss, grads = value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def count_correct(model: Any, images: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    """How many of the rows in the mask are classified correctly, and how many there are."""
    # A view, because model.eval() would change the model of the caller.
    model = nnx.view(model, deterministic=True, use_running_average=True)
    is_correct = model(images).argmax(-1) == labels
    return jnp.stack([(is_correct & mask).sum(), mask.sum()])


def digits() -> list[np.ndarray]:
    """Images to train on and to evaluate on, labels to train on and to evaluate on."""
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int32)
    return train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)


def random_batches(images: Any, labels: Any, steps: int, rows: Any) -> Iterator[Any]:
    """These rows of random batches."""
    random = np.random.default_rng(0)
    for _ in range(steps):
        chosen = random.choice(len(images), BATCH, replace=False)[rows]
        yield images[chosen], labels[chosen]


def train(stages: Sequence[int], steps: int, mesh: Mesh) -> tuple[Any, list[float], int, int]:
    """Trains on a mesh; returns the model, losses, and the number of correct images and of all."""
    images, held_out, labels, held_out_labels = digits()
    model, optimizer = sharded_init(functools.partial(make, stages, steps), P(), mesh)
    sharding = replicated(model, optimizer=optimizer)
    step = jit(
        train_step,
        in_shardings=(sharding, sharding, P("data"), P("data")),
        donate_argnames=("model", "optimizer"),
        mesh=mesh,
        max_traces=1,
    )
    rows = process_rows(P("data"), BATCH, mesh=mesh)  # of each batch, for this process
    batches = random_batches(images, labels, steps, rows)
    with shard_batches(batches, P("data"), mesh) as sharded:
        losses = [float(step(model, optimizer, *batch)) for batch in sharded]

    count = jit(count_correct, in_shardings=(sharding, P("data"), P("data"), P("data")), mesh=mesh)
    numbers = [start + np.arange(BATCH)[rows] for start in range(0, len(held_out), BATCH)]
    # The last batch has fewer rows: it is padded, and its mask says which rows count.
    chosen = [mine[mine < len(held_out)] for mine in numbers]
    batches = [(held_out[mine], held_out_labels[mine]) for mine in chosen]
    padded = shard_batches(batches, P("data"), mesh, uneven="pad", batch_size=BATCH)
    counts = [count(model, *batch, mask) for batch, mask in padded]
    correct, total = np.sum(jax.device_get(counts), axis=0)
    return model, losses, int(correct), int(total)


def train_alone(stages: Sequence[int], steps: int) -> list[float]:
    """The losses of the same training on one device, by Flax."""
    images, _, labels, _ = digits()
    state, step = make(stages, steps), nnx.jit(train_step)
    return [
        float(step(*state, *batch)) for batch in random_batches(images, labels, steps, slice(None))
    ]


def main(argv: list[str] | None = None) -> None:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stages", type=int, nargs="+", default=[16, 32, 64], metavar="FEATURES")
    parser.add_argument("--check", action="store_true", help="compare with one device")
    options = parser.parse_args(argv)

    if "JAX_COORDINATOR_ADDRESS" in os.environ:  # the launcher sets it
        jax.distributed.initialize()
    _, losses, correct, total = train(options.stages, options.steps, make_mesh({"data": -1}))
    alone = train_alone(options.stages, options.steps) if options.check else []
    if jax.process_index() == 0:
        for number in range(0, options.steps, max(1, options.steps // 10)):
            print(f"step {number + 1:4}  loss {losses[number]:.4f}")
        print(f"accuracy on {total} held-out images: {correct / total:.2%}")
        if alone:
            difference = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
            print(f"largest difference to one device: {difference:.1e}")


if __name__ == "__main__":
    main()
