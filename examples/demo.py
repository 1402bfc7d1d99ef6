"""Trains a tensor-parallel classifier of handwritten digits: ``python examples/demo.py``.

The MLP is cut over the ``model`` axis of a mesh, the batch over its ``data`` axis. The demo
shows that the block gives the same output under ``jit`` and, written by hand with its
``psum``, under ``shard_map``; trains it; repeats the training with plain Flax on one device;
and prints how the parameters lie and what was compiled. It ends with the checks, and exits
with 0 only if all of them pass.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from nnx_sharding import StateSharding, jit, shard_map
from nnx_sharding.analysis import format_table, parameter_table

Array: TypeAlias = Any  # of JAX or of NumPy

PIXELS, HIDDEN, CLASSES = 8 * 8, 256, 10
BATCH, TEST_IMAGES = 128, 360
LEARNING_RATE, WEIGHT_DECAY = 1e-2, 1e-2

MIN_ACCURACY = 0.97
# The block adds up its products in another order on each mesh: float32 rounds differently.
MAX_OUTPUT_DIFFERENCE = 1e-5
MAX_LOSS_DIFFERENCE = 1e-4

# Columns of `up` and the matching rows of `down`: one sum is all that a forward pass exchanges.
# The filters fit the optimizer too: the path of a moment ends in that of its parameter.
SHARDING = StateSharding(
    {
        nnx.All(nnx.PathContains("up"), nnx.PathContains("kernel")): P(None, "model"),
        nnx.All(nnx.PathContains("up"), nnx.PathContains("bias")): P("model"),
        nnx.All(nnx.PathContains("down"), nnx.PathContains("kernel")): P("model", None),
        ...: P(),
    }
)


class MLP(nnx.Module):
    """A column-parallel layer, then a row-parallel one."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(PIXELS, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, images: Array) -> jax.Array:
        """The logits of flattened images."""
        # A smooth activation: at the kink of a ReLU, rounding alone can change the gradient.
        return self.down(nnx.gelu(self.up(images)))

    @jit(in_shardings=(SHARDING, P("data")), out_shardings=P("data"))
    def predict(self, images: Array) -> jax.Array:
        """The logits; the compiler finds the collectives."""
        return self(images)


@shard_map(in_specs=(SHARDING, P("data")), out_specs=P("data"))
def predict_by_hand(model: MLP, images: Array) -> jax.Array:
    """The same as one device sees it, which has some columns of ``up`` and rows of ``down``."""
    hidden = nnx.gelu(model.up(images))
    logits: jax.Array = jax.lax.psum(hidden @ model.down.kernel[...], "model")
    assert model.down.bias is not None
    return logits + model.down.bias[...]


def create(rngs: nnx.Rngs, steps: int) -> tuple[MLP, nnx.Optimizer[MLP]]:
    """A new model and its optimizer, for a training of so many steps."""
    optax = _extra("optax")
    model = MLP(rngs)
    schedule = optax.cosine_decay_schedule(LEARNING_RATE, steps)
    adamw = optax.adamw(schedule, weight_decay=WEIGHT_DECAY)
    return model, nnx.Optimizer(model, adamw, wrt=nnx.Param)


def update(model: MLP, optimizer: nnx.Optimizer[MLP], images: Array, labels: Array) -> jax.Array:
    """One step of training; returns the loss before it."""
    optax = _extra("optax")

    def loss_of(model: MLP) -> jax.Array:
        losses: jax.Array
        losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
        return losses.mean()

    loss: jax.Array
    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


create_sharded = jit(create, out_shardings=(SHARDING, SHARDING), static_argnames="steps")
train_step = jit(
    update,
    in_shardings=(SHARDING, SHARDING, P("data"), P("data")),
    out_shardings=P(),
    donate_argnames=("model", "optimizer"),
)


class Digits(NamedTuple):
    """The images that come with scikit-learn, in two parts."""

    train_images: Array
    train_labels: Array
    test_images: Array
    test_labels: Array

    @classmethod
    def load(cls, seed: int) -> Digits:
        """The images, parted at random."""
        digits = _extra("sklearn.datasets").load_digits()
        split = _extra("sklearn.model_selection").train_test_split
        images = (digits.images / 16).astype(np.float32)
        labels = digits.target.astype(np.int32)
        train_images, test_images, train_labels, test_labels = split(
            images, labels, test_size=TEST_IMAGES, random_state=seed, stratify=labels
        )
        return cls(train_images, train_labels, test_images.reshape(-1, PIXELS), test_labels)

    @property
    def batches_per_epoch(self) -> int:
        """The number of whole batches."""
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
    step: Callable[..., jax.Array],
    model: MLP,
    optimizer: nnx.Optimizer[MLP],
    digits: Digits,
    *,
    epochs: int,
    seed: int,
    title: str,
) -> Array:
    """Trains in place and returns the loss at every step."""
    losses: list[jax.Array] = []
    with _progress(title, epochs) as show:
        for epoch, batches in enumerate(digits.epochs(epochs, seed), 1):
            losses += [step(model, optimizer, images, labels) for images, labels in batches]
            show(epoch, float(losses[-1]))
    return np.array(jax.device_get(losses))


@contextlib.contextmanager
def _progress(title: str, epochs: int) -> Iterator[Callable[[int, float], None]]:
    """A progress bar on a terminal, now and then a line elsewhere."""
    bars, console = _extra("rich.progress"), _extra("rich").get_console()
    if console.is_terminal:
        columns = (
            "{task.description}",
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            "epochs, loss {task.fields[loss]},",
            bars.TimeElapsedColumn(),
        )
        with bars.Progress(*columns, console=console) as progress:
            task = progress.add_task(title, total=epochs, loss="-")
            yield lambda epoch, loss: progress.update(task, completed=epoch, loss=f"{loss:.4f}")
        return
    every = max(1, epochs // 6)

    def line(epoch: int, loss: float) -> None:
        if epoch % every == 0 or epoch == epochs:
            print(f"{title}: epoch {epoch}/{epochs}, loss {loss:.4f}", flush=True)

    yield line


class Check(NamedTuple):
    """A figure and the bound that it must keep."""

    name: str
    figure: str
    bound: str
    passed: bool

    def __str__(self) -> str:
        verdict = "PASS" if self.passed else "FAIL"
        return f"{verdict}  {self.name}: {self.figure} ({self.bound})"


def check_outputs(model: MLP, images: Array) -> Check:
    """Whether both ways to write the block give the same."""
    # In NumPy: on the CPU, JAX's maximum over several devices passes over NaN.
    by_hand, by_compiler = jax.device_get((predict_by_hand(model, images), model.predict(images)))
    difference = float(abs(by_hand - by_compiler).max())
    return Check(
        "largest difference between the outputs of jit and shard_map",
        f"{difference:.1e}",
        f"at most {MAX_OUTPUT_DIFFERENCE:.0e}",
        difference <= MAX_OUTPUT_DIFFERENCE,
    )


def check_accuracy(model: MLP, digits: Digits) -> Check:
    """Whether the trained model reads enough of the images that it has not seen."""
    correct = int((model.predict(digits.test_images).argmax(-1) == digits.test_labels).sum())
    total = len(digits.test_labels)
    return Check(
        "accuracy on the test images",
        f"{correct / total:.2%}, {correct} of {total}",
        f"at least {MIN_ACCURACY:.0%}",
        correct >= MIN_ACCURACY * total,
    )


def check_losses(sharded: Array, single: Array) -> Check:
    """Whether two trainings went alike at every step."""
    difference = float(abs(sharded - single).max())
    return Check(
        f"largest difference between the losses of {len(sharded)} steps, sharded and not",
        f"{difference:.1e}",
        f"at most {MAX_LOSS_DIFFERENCE:.0e}",
        difference <= MAX_LOSS_DIFFERENCE,
    )


def describe_step(model: MLP, optimizer: nnx.Optimizer[MLP], digits: Digits) -> str:
    """What one step of training becomes on its way to the devices."""
    [(images, labels), *_] = next(digits.epochs(1, seed=0))
    lowered = train_step.lower(model, optimizer, images, labels)
    compiled = lowered.compile()
    lines = [
        f"StableHLO, {len(lowered.as_text().splitlines())} lines; its first arguments and its "
        "matrix products:",
        *(f"  {line}" for line in _excerpt(lowered)),
        "\nwhat the devices exchange:",
        str(compiled.collectives()),
        "\ncost of one step, by XLA's estimates:",
        str(compiled.cost() or "not known for this backend"),
        "\nmemory on one device:",
        str(compiled.memory() or "not known for this backend"),
    ]
    return "\n".join(lines)


def _excerpt(lowered: Any) -> list[str]:
    """Some arguments with their shardings and the user's names for them, and all products."""
    arguments = re.findall(r'%arg\d+: .*?loc\(".*?"\)', lowered.as_text(debug_info=True))
    products = [line.strip() for line in lowered.as_text().splitlines() if "dot_general" in line]
    return [
        *arguments[:_ARGUMENTS_SHOWN],
        *(re.sub(r", precision = \[.*?\]", "", product) for product in products),
    ]


_ARGUMENTS_SHOWN = 4


def request_virtual_devices(count: int) -> None:
    """Has the CPU appear as ``count`` devices, if JAX has not looked at its devices yet.

    A count that is already set, for this process or by the user, stays.
    """
    flag, flags = "--xla_force_host_platform_device_count", os.environ.get("XLA_FLAGS", "")
    if flag not in flags and "JAX_NUM_CPU_DEVICES" not in os.environ:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={count}".strip()


def choose_devices(count: int) -> list[jax.Device]:
    """Up to ``count`` devices: accelerators if there are enough, else those of the CPU."""
    devices = jax.devices()
    if len(devices) < count:
        with contextlib.suppress(RuntimeError):  # JAX may be told to leave the CPU out
            devices = max(devices, jax.devices("cpu"), key=len)
    usable = min(count, len(devices))
    while not _divides(*mesh_shape(usable)):
        usable -= 1
    return devices[:usable]


def mesh_shape(count: int) -> tuple[int, int]:
    """The sizes of ``data`` and ``model``: as square as can be, ``model`` the larger one."""
    data = max(n for n in range(1, math.isqrt(count) + 1) if count % n == 0)
    return data, count // data


def _divides(data: int, model: int) -> bool:
    return HIDDEN % model == 0 and BATCH % data == 0 and TEST_IMAGES % data == 0


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """The mesh with the axes ``data`` and ``model`` of these devices."""
    types = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh(mesh_shape(len(devices)), ("data", "model"), types, devices=devices)


def _extra(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'the demo needs {module}, which is not installed: pip install -e ".[demo]"',
            name=error.name,
        ) from None


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python examples/demo.py",
        description="Trains a tensor-parallel classifier of handwritten digits, checks it "
        "against one device, and shows what was compiled.",
    )
    parser.add_argument(
        "--epochs",
        type=_positive,
        default=60,
        help="how often to go through the images (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="decides on the first parameters, the test images and the order of the others "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--devices",
        type=_positive,
        default=8,
        help="how many devices to use at most, virtual ones of the CPU if there are not as many "
        "others (default: %(default)s)",
    )
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _heading(text: str) -> None:
    print(f"\n{text}\n{'=' * len(text)}", flush=True)


def run(epochs: int, seed: int, devices: Sequence[jax.Device]) -> list[Check]:
    """The whole demo on these devices; prints as it goes and returns the checks."""
    digits = Digits.load(seed)
    steps = epochs * digits.batches_per_epoch
    mesh = make_mesh(devices)
    sizes = " x ".join(f"{size} ({axis})" for axis, size in mesh.shape.items())
    print(f"mesh: {sizes} of {devices[0].platform} devices")
    with jax.set_mesh(mesh):
        model, optimizer = create_sharded(nnx.Rngs(seed), steps=steps)
        _heading("The block under jit and under shard_map")
        outputs = check_outputs(model, digits.test_images)
        print(f"{outputs.name}: {outputs.figure}")
        _heading("Training")
        training = functools.partial(train, digits=digits, epochs=epochs, seed=seed)
        losses = training(train_step, model, optimizer, title="sharded")
        accuracy = check_accuracy(model, digits)
    alone = training(nnx.jit(update), *create(nnx.Rngs(seed), steps), title="one device")
    _heading("Parameters and optimizer state")
    print(format_table(parameter_table({"model": model, "optimizer": optimizer})))
    _heading("One step, compiled")
    with jax.set_mesh(mesh):
        print(describe_step(model, optimizer, digits))
    return [outputs, accuracy, check_losses(losses, alone)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo from a command line; returns the exit code."""
    arguments = _arguments(argv)
    try:
        for module in ("optax", "rich", "sklearn"):
            _extra(module)
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    started = time.perf_counter()
    request_virtual_devices(arguments.devices)
    devices = choose_devices(arguments.devices)
    # Some accelerators multiply float32 in a shorter format unless told otherwise.
    with jax.default_device(devices[0]), jax.default_matmul_precision("highest"):
        checks = run(arguments.epochs, arguments.seed, devices)
    _heading(f"Checks, after {time.perf_counter() - started:.1f} s")
    print(*checks, sep="\n")
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
