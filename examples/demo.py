"""Trains a tensor-parallel classifier of handwritten digits: ``python examples/demo.py``.

The MLP is sharded over the ``model`` axis of a mesh, the batch over its ``data`` axis. The demo
compares the output of the block under ``jit`` with its output under ``shard_map``, where its
``psum`` is written by hand; trains it; repeats the training with plain Flax on one device; and
prints the shardings of the parameters and the compiled program. The last lines are its checks; the
exit code is 0 if all of them pass.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from nnx_sharding import StateSharding, jit, shard_map
from nnx_sharding.analysis import parameter_table
from nnx_sharding.partition import make_mesh

Array: TypeAlias = Any  # of JAX or NumPy

PIXELS, HIDDEN, CLASSES = 8 * 8, 256, 10
BATCH, TEST_IMAGES = 128, 360
LEARNING_RATE, WEIGHT_DECAY = 1e-2, 1e-2

MIN_ACCURACY = 0.97
# The order of summation depends on the mesh, and so does the rounding of float32.
MAX_OUTPUT_DIFFERENCE = 1e-5
MAX_LOSS_DIFFERENCE = 1e-4

# Columns of `up` and the matching rows of `down`: a forward pass communicates only one sum.
# The filters match the optimizer too: the path of a moment ends in that of its parameter.
SHARDING = StateSharding(
    {
        nnx.All(nnx.PathContains("up"), nnx.PathContains("kernel")): P(None, "model"),
        nnx.All(nnx.PathContains("up"), nnx.PathContains("bias")): P("model"),
        nnx.All(nnx.PathContains("down"), nnx.PathContains("kernel")): P("model", None),
        ...: P(),
    }
)
# The output of `down` is that sum.
ACTIVATIONS = {"down": P("data")}


class MLP(nnx.Module):
    """A column-parallel layer, then a row-parallel one."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(PIXELS, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, images: Array) -> jax.Array:
        """The logits of flattened images."""
        # A smooth activation: at the kink of a ReLU, rounding alone can change the gradient.
        return self.down(nnx.gelu(self.up(images)))

    @jit(
        in_shardings=(SHARDING, P("data")),
        out_shardings=P("data"),
        activation_shardings=ACTIVATIONS,
    )
    def predict(self, images: Array) -> jax.Array:
        """The logits; the compiler inserts the collectives."""
        return self(images)


@shard_map(in_specs=(SHARDING, P("data")), out_specs=P("data"))
def predict_by_hand(model: MLP, images: Array) -> jax.Array:
    """The same for one device, which has some columns of ``up`` and rows of ``down``."""
    hidden = nnx.gelu(model.up(images))
    logits: jax.Array = jax.lax.psum(hidden @ model.down.kernel[...], "model")
    assert model.down.bias is not None
    return logits + model.down.bias[...]


def create(rngs: nnx.Rngs, steps: int) -> tuple[MLP, nnx.Optimizer[MLP]]:
    """A new model and its optimizer, to be trained for this number of steps."""
    model = MLP(rngs)
    schedule = optax.cosine_decay_schedule(LEARNING_RATE, steps)
    adamw = optax.adamw(schedule, weight_decay=WEIGHT_DECAY)
    return model, nnx.Optimizer(model, adamw, wrt=nnx.Param)


def update(model: MLP, optimizer: nnx.Optimizer[MLP], images: Array, labels: Array) -> jax.Array:
    """One step of training; returns the loss before it."""

    def loss_of(model: MLP) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


create_sharded = jit(create, out_shardings=(SHARDING, SHARDING), static_argnames="steps")
train_step = jit(
    update,
    in_shardings=(SHARDING, SHARDING, P("data"), P("data")),
    out_shardings=P(),
    activation_shardings=ACTIVATIONS,
    donate_argnames=("model", "optimizer"),
)


class Digits(NamedTuple):
    """The images of scikit-learn, split into two sets."""

    train_images: Array
    train_labels: Array
    test_images: Array
    test_labels: Array

    @classmethod
    def load(cls, seed: int) -> Digits:
        """The images, split at random."""
        digits = load_digits()
        images = (digits.images / 16).astype(np.float32)
        labels = digits.target.astype(np.int32)
        train_images, test_images, train_labels, test_labels = train_test_split(
            images, labels, test_size=TEST_IMAGES, random_state=seed, stratify=labels
        )
        return cls(train_images, train_labels, test_images.reshape(-1, PIXELS), test_labels)

    @property
    def batches_per_epoch(self) -> int:
        """The number of complete batches."""
        return len(self.train_labels) // BATCH

    def epochs(self, count: int, seed: int) -> Iterator[list[tuple[Array, Array]]]:
        """The batches of each epoch: all images in a new order, many shifted by a pixel."""
        rng = np.random.default_rng(seed)
        for _ in range(count):
            order = rng.permutation(len(self.train_labels))[: self.batches_per_epoch * BATCH]
            yield [
                (_shifted(self.train_images[chosen], rng), self.train_labels[chosen])
                for chosen in order.reshape(-1, BATCH)
            ]


def _shifted(images: Array, rng: np.random.Generator) -> Array:
    count, height, width = images.shape
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
    down, right = rng.choice([0, 1, 2], (2, count), p=[1 / 6, 2 / 3, 1 / 6])
    return windows[np.arange(count), down, right].reshape(count, -1)


def train(
    title: str,
    step: Callable[..., jax.Array],
    model: MLP,
    optimizer: nnx.Optimizer[MLP],
    epochs: Sequence[list[tuple[Array, Array]]],
) -> Array:
    """Trains in place and returns the loss at every step."""
    losses: list[jax.Array] = []
    for epoch, batches in enumerate(epochs, 1):
        losses += [step(model, optimizer, images, labels) for images, labels in batches]
        if epoch % max(1, len(epochs) // 6) == 0 or epoch == len(epochs):
            print(f"{title}: epoch {epoch}/{len(epochs)}, loss {losses[-1]:.4f}", flush=True)
    return np.array(jax.device_get(losses))


class Check(NamedTuple):
    """A measured value and its bound."""

    name: str
    value: str
    bound: str
    passed: bool

    def __str__(self) -> str:
        return f"{'PASS' if self.passed else 'FAIL'}  {self.name}: {self.value} ({self.bound})"


def check_difference(name: str, one: Array, other: Array, limit: float) -> Check:
    """Whether two arrays are nearly equal."""
    # In NumPy: on the CPU, JAX's maximum over several devices ignores NaN.
    difference = float(abs(np.asarray(one) - np.asarray(other)).max())
    name = f"largest difference between {name}"
    return Check(name, f"{difference:.1e}", f"at most {limit:.0e}", difference <= limit)


def check_outputs(model: MLP, images: Array) -> Check:
    """Whether both ways to write the block have the same output."""
    outputs = jax.device_get((predict_by_hand(model, images), model.predict(images)))
    return check_difference("the outputs of jit and shard_map", *outputs, MAX_OUTPUT_DIFFERENCE)


def check_losses(sharded: Array, single: Array) -> Check:
    """Whether two trainings have the same loss at every step."""
    name = f"the losses of {len(sharded)} steps, sharded and not"
    return check_difference(name, sharded, single, MAX_LOSS_DIFFERENCE)


def check_accuracy(model: MLP, digits: Digits) -> Check:
    """Whether the trained model classifies enough of the test images correctly."""
    correct = int((model.predict(digits.test_images).argmax(-1) == digits.test_labels).sum())
    total = len(digits.test_labels)
    return Check(
        "accuracy on the test images",
        f"{correct / total:.2%}, {correct} of {total}",
        f"at least {MIN_ACCURACY:.0%}",
        correct >= MIN_ACCURACY * total,
    )


def describe_step(model: MLP, optimizer: nnx.Optimizer[MLP], digits: Digits) -> str:
    """The program of one training step."""
    [(images, labels), *_] = next(digits.epochs(1, seed=0))
    lowered = train_step.lower(model, optimizer, images, labels)
    compiled = lowered.compile()
    arguments = re.findall(r'%arg\d+: .*?loc\(".*?"\)', lowered.as_text(debug_info=True))[:4]
    lines = lowered.as_text().splitlines()
    products = [
        re.sub(r", precision = \[.*?\]", "", x.strip()) for x in lines if "dot_general" in x
    ]
    parts = {
        f"StableHLO, {len(lines)} lines; its first arguments and its matrix products": "\n".join(
            f"  {line}" for line in (*arguments, *products)
        ),
        "communication": compiled.collectives(),
        "cost of one step, estimated by XLA": compiled.cost() or "unknown for this backend",
        "memory of one device": compiled.memory() or "unknown for this backend",
    }
    return "\n\n".join(f"{title}:\n{part}" for title, part in parts.items())


def request_virtual_devices(count: int) -> None:
    """Splits the CPU into ``count`` devices, unless the user or this process has already."""
    flag, flags = "--xla_force_host_platform_device_count", os.environ.get("XLA_FLAGS", "")
    if flag not in flags and "JAX_NUM_CPU_DEVICES" not in os.environ:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={count}".strip()


def choose_devices(count: int) -> list[jax.Device]:
    """Up to ``count`` devices: accelerators if there are enough, else those of the CPU."""
    devices = jax.devices()
    if len(devices) < count:
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may exclude the CPU
            devices = max(devices, jax.devices("cpu"), key=len)
    usable = min(count, len(devices))
    while not _divides(**mesh_sizes(usable)):
        usable -= 1
    return devices[:usable]


def mesh_sizes(count: int) -> dict[str, int]:
    """The sizes of ``data`` and ``model``: nearly equal, ``model`` the larger one."""
    data = max(n for n in range(1, math.isqrt(count) + 1) if count % n == 0)
    return {"data": data, "model": count // data}


def _divides(data: int, model: int) -> bool:
    return HIDDEN % model == 0 and BATCH % data == 0 and TEST_IMAGES % data == 0


def run(epochs: int, seed: int, devices: Sequence[jax.Device]) -> list[Check]:
    """The complete demo on these devices; prints its progress and returns the checks."""
    digits = Digits.load(seed)
    batches = list(digits.epochs(epochs, seed))
    steps = epochs * digits.batches_per_epoch
    mesh = make_mesh(mesh_sizes(len(devices)), devices=devices)
    sizes = " x ".join(f"{size} ({axis})" for axis, size in mesh.shape.items())
    print(f"mesh: {sizes} of {devices[0].platform} devices")
    with jax.set_mesh(mesh):
        model, optimizer = create_sharded(nnx.Rngs(seed), steps=steps)
        outputs = check_outputs(model, digits.test_images)
        losses = train("sharded", train_step, model, optimizer, batches)
        accuracy = check_accuracy(model, digits)
    alone = train("one device", nnx.jit(update), *create(nnx.Rngs(seed), steps), batches)
    print("\nparameters and optimizer state:")
    print(parameter_table({"model": model, "optimizer": optimizer}), end="\n\n")
    with jax.set_mesh(mesh):
        print(describe_step(model, optimizer, digits))
    return [outputs, accuracy, check_losses(losses, alone)]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo from a command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    option = parser.add_argument
    option("--epochs", type=_positive, default=60, help="default: %(default)s")
    option("--seed", type=int, default=0, help="of the parameters and the order of the images")
    option("--devices", type=_positive, default=8, help="number of devices, if there are as many")
    arguments = parser.parse_args(argv)
    request_virtual_devices(arguments.devices)
    devices = choose_devices(arguments.devices)
    # By default, some accelerators multiply float32 in a shorter format.
    with jax.default_device(devices[0]), jax.default_matmul_precision("highest"):
        checks = run(arguments.epochs, arguments.seed, devices)
    print("", *checks, sep="\n")
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
