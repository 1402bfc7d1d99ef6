"""Trains a language model on any number of devices: ``python examples/train_lm.py FOLDER``.

A decoder-only transformer that predicts the next byte of Python's language reference, which is
installed for ``help()``. Tensor parallel over the ``model`` axis of the mesh, fully sharded over
its ``data`` axis: :func:`sharding_of` is all that says so. ``FOLDER`` gets checkpoints and metrics.
The same command continues a run that was killed, and its losses are those of a run that was not,
bit for bit. ``--check`` compares them with those of one device.

For several processes write ``python -m nnx_sharding launch --processes 2 --devices-per-process 4``
in place of ``python``. docs/guides/training_run.md explains this file part by part.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import time
from pathlib import Path
from typing import Any

# For the CPU only; JAX reads it when it is initialized.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import Progress

from nnx_sharding import accumulate_gradients, jit, limit_traces, remat, stack, value_and_grad
from nnx_sharding.analysis import HARDWARE
from nnx_sharding.checkpoint import Checkpoints
from nnx_sharding.partition import abstract_init, fsdp, make_mesh, sharded_init, tensor_parallel
from nnx_sharding.placement import process_rows, shard_batches
from nnx_sharding.report.page import write_html

try:
    from tensorboardX import SummaryWriter
except ImportError:
    SummaryWriter = None


@dataclasses.dataclass(frozen=True)
class Config:
    """What a run computes. Each field is an option of the command line."""

    steps: int = 300
    batch: int = 16
    context: int = 128
    layers: int = 4
    features: int = 128
    heads: int = 4
    dropout: float = 0.1
    dtype: str = "bfloat16"  # of activations; parameters and the optimizer have float32
    learning_rate: float = 3e-3
    seed: int = 0
    stack: bool = False  # runs the blocks in one loop, which compiles as one block
    remat: str = ""  # the policy of what blocks keep for the backward pass, such as dots_saveable
    microbatches: int = 1  # for each batch


class Block(nnx.Module):
    """Attention and an MLP, each with a normalized input and a residual connection."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        size, options = config.features, {"dtype": config.dtype, "rngs": rngs}
        self.norm_attention = nnx.RMSNorm(size, **options)
        self.attention = nnx.MultiHeadAttention(
            config.heads, size, use_bias=False, decode=False, **options
        )
        self.norm_mlp = nnx.RMSNorm(size, **options)
        self.up = nnx.Linear(size, 4 * size, use_bias=False, **options)
        self.down = nnx.Linear(4 * size, size, use_bias=False, **options)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The output for ``x`` of shape (batch, length, features)."""
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.dropout(self.attention(self.norm_attention(x), mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm_mlp(x)))))


class Model(nnx.Module):
    """Predicts the next byte at each position of a text."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        size, options = config.features, {"dtype": config.dtype, "rngs": rngs}
        self.tokens = nnx.Embed(256, size, **options)
        self.positions = nnx.Embed(config.context, size, **options)
        blocks = [Block(config, rngs) for _ in range(config.layers)]
        self.blocks = stack(blocks) if config.stack else nnx.List(blocks)
        self.stacked, self.remat = config.stack, config.remat
        self.norm = nnx.RMSNorm(size, **options)
        self.head = nnx.Linear(size, 256, use_bias=False, **options)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of shape (batch, length, 256) in float32 for tokens of shape (batch, length)."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        run = remat(Block.__call__, policy=self.remat) if self.remat else Block.__call__
        if self.stacked:
            x, _ = self.blocks.scan(lambda block, x: (run(block, x), None), x)
        else:
            for block in self.blocks:
                x = run(block, x)
        return self.head(self.norm(x)).astype(jnp.float32)

    def losses(self, tokens: jax.Array) -> jax.Array:
        """The loss of each predicted byte, for tokens of shape (batch, length + 1).

        Outside of the model, logits that are sharded over the bytes would be gathered.
        """
        logits = self(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


def make(config: Config) -> tuple[Model, nnx.Optimizer[Model]]:
    """A model and its optimizer."""
    model = Model(config, nnx.Rngs(config.seed))
    warmup = 1 + config.steps // 10
    rate = optax.warmup_cosine_decay_schedule(0, config.learning_rate, warmup, config.steps + 1)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    return model, nnx.Optimizer(model, chain, wrt=nnx.Param)


def sharding_of(model: Any, optimizer: Any, mesh: Mesh) -> Any:
    """The sharding of the model and its optimizer."""
    return fsdp(model, mesh=mesh, base=tensor_parallel(model, mesh=mesh), optimizer=optimizer)


def train_step(model: Any, optimizer: Any, tokens: jax.Array, *, microbatches: int) -> jax.Array:
    """One step on a batch; returns the mean loss before it."""

    def loss_of(model: Model, tokens: jax.Array) -> jax.Array:
        return model.losses(tokens).mean()

    gradient = value_and_grad(loss_of)
    if microbatches > 1:
        gradient = accumulate_gradients(loss_of, steps=microbatches)
    loss, grads = gradient(model, tokens)
    optimizer.update(model, grads)
    return loss


def evaluate_step(model: Any, tokens: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of the losses of the rows in the mask, without dropout, and their number."""
    losses = nnx.view(model, deterministic=True).losses(tokens)
    return jnp.where(mask[:, None], losses, 0).sum(), mask.sum() * losses.shape[1]


def texts(context: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of bytes to train on and to evaluate on, of shape (rows, context + 1)."""
    from pydoc_data.topics import topics

    text = np.frombuffer("\n".join(topics.values()).encode(), np.uint8)
    parts = np.split(text, [len(text) * 9 // 10])
    windows = np.lib.stride_tricks.sliding_window_view
    return tuple(windows(part, context + 1)[::context] for part in parts)


def batches_of(text: Any, config: Config, rows: np.ndarray, *, train: bool) -> grain.IterDataset:
    """Batches of a text, of which this process loads these rows; for training without an end."""
    order = grain.MapDataset.range(len(text))
    order = order.seed(config.seed).shuffle().repeat() if train else order
    chosen = order.batch(config.batch)  # of numbers of rows: the same on each process
    mine = chosen.map(lambda numbers: numbers[rows[rows < len(numbers)]])
    return mine.map(lambda numbers: text[numbers].astype(np.int32)).to_iter_dataset()


class Log:
    """A progress bar, the metrics in ``metrics.jsonl``, and for TensorBoard if there is a writer.

    What a run wrote after its last checkpoint, of step ``start``, is removed.
    """

    def __init__(self, folder: Path, config: Config, start: int, seconds_at_peak: float | None):
        self.tokens, self.seconds_at_peak = config.batch * config.context, seconds_at_peak
        self.last, self.time = None, time.perf_counter()
        self.path, self.is_first = folder / "metrics.jsonl", jax.process_index() == 0
        self.bar = Progress(console=Console(stderr=True), disable=not self.is_first)
        self.task = self.bar.add_task("", total=config.steps, completed=start)
        self.bar.start()
        writer = SummaryWriter if self.is_first else None
        self.board = writer and writer(str(folder), purge_step=start + 1)
        if self.is_first:
            lines = self.path.read_text().split("\n")[:-1] if self.path.exists() else []
            kept = [f"{line}\n" for line in lines if json.loads(line)["step"] <= start]
            self.path.write_text("".join(kept))

    def add(self, step: int, loss: jax.Array) -> None:
        """Takes the loss of a step; waits for the one before, so that devices have work."""
        self.flush()
        self.last = step, loss

    def flush(self) -> None:
        """Waits for the last loss, and writes it."""
        if self.last is not None:
            (step, loss), self.last = self.last, None
            loss, seconds = float(loss), time.perf_counter() - self.time
            metrics = {"loss": loss, "tokens_per_second": self.tokens / seconds}
            if self.seconds_at_peak:
                metrics["utilization"] = self.seconds_at_peak / seconds
            self.write(step, **metrics)
            text = f"loss {loss:.4f}, {self.tokens / seconds:,.0f} tokens/s"
            self.bar.update(self.task, completed=step, description=text)

    def write(self, step: int, **metrics: float) -> None:
        """Writes metrics of a step."""
        if self.is_first:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, **metrics}) + "\n")
        for name, value in metrics.items() if self.board else ():
            self.board.add_scalar(name, value, step)
        self.time = time.perf_counter()  # without the evaluation

    def close(self) -> None:
        """Ends the bar and the files."""
        self.bar.stop()
        if self.board:
            self.board.close()


def compiled_step(config: Config, state: Any, sharding: Any, mesh: Mesh) -> Any:
    """The compiled step of the training."""
    step = jit(
        functools.partial(train_step, microbatches=config.microbatches),
        in_shardings=(sharding, sharding, P("data")),
        donate_argnames=("model", "optimizer"),  # the new ones take their memory
        mesh=mesh,
        strict=True,
    )
    tokens = jax.ShapeDtypeStruct((config.batch, config.context + 1), jnp.int32)
    return step.lower(*state, tokens).compile()


def seconds_at_peak(compiled: Any) -> float | None:
    """How long a step takes at the peak of the devices; None if that is not known."""
    peak = HARDWARE.get(jax.devices()[0].device_kind)
    cost = compiled.cost() if peak else None
    return cost.flops / peak.flops if cost and cost.flops else None


def train(config: Config, options: argparse.Namespace) -> None:
    """Trains from the last checkpoint, if there is one, to the last step."""
    folder, mesh = options.folder, make_mesh({"data": -1, "model": options.model_parallel})
    text, held_out = texts(config.context)
    rows = np.arange(config.batch)[process_rows(P("data"), config.batch, mesh=mesh)]
    training = batches_of(text, config, rows, train=True)
    evaluation = batches_of(held_out, config, rows, train=False)
    padded = shard_batches(evaluation, P("data"), mesh, uneven="pad", batch_size=config.batch)
    intervals = {"save_interval_steps": options.save_every, "max_to_keep": 2}
    with (
        shard_batches(training, P("data"), mesh, uneven="error") as sharded,
        Checkpoints(folder / "checkpoints", **intervals) as checkpoints,
    ):
        batches = iter(sharded)
        # A checkpoint fills a model without data, so that devices never hold two.
        init = sharded_init if checkpoints.latest_step() is None else abstract_init
        state = init(make, lambda state: sharding_of(*state, mesh), mesh, config)
        start = checkpoints.resume(state, data=batches) or 0

        sharding = sharding_of(*state, mesh)
        step_on_devices = compiled_step(config, state, sharding, mesh)
        if options.report and jax.process_index() == 0:
            write_html(folder / "report.html", step_on_devices.report())
        evaluate = jit(evaluate_step, in_shardings=(sharding, P("data"), P("data")), mesh=mesh)
        log = Log(folder, config, start, seconds_at_peak(step_on_devices))

        # The step is compiled and evaluation is traced once; more traces would be a mistake.
        with contextlib.closing(log), limit_traces(1):
            for step in range(start + 1, config.steps + 1):
                if options.profile and step == start + 3:
                    jax.profiler.start_trace(folder)
                with jax.profiler.StepTraceAnnotation("train", step_num=step):
                    log.add(step, step_on_devices(*state, next(batches)))
                if options.profile and step == start + 5:
                    log.flush()
                    jax.profiler.stop_trace()
                is_last = step == config.steps or checkpoints.reached_preemption(step)
                if is_last or step % options.evaluate_every == 0:
                    log.flush()  # before the evaluation takes its time
                    sums = [evaluate(state[0], *batch) for batch in padded]
                    loss, count = np.sum(jax.device_get(sums), axis=0)
                    log.write(step, evaluation=loss / count, evaluated=count)
                if is_last or checkpoints.should_save(step):
                    log.flush()  # what comes before this step will not be repeated
                    checkpoints.save(step, state, data=batches, force=is_last)
                if is_last:
                    break


def train_alone(config: Config) -> list[float]:
    """The losses of the same training on one device, by Flax: no loop over blocks, no remat."""
    config = dataclasses.replace(config, stack=False, remat="")
    state = nnx.jit(functools.partial(make, config))()
    step = nnx.jit(functools.partial(train_step, microbatches=config.microbatches))
    text, _ = texts(config.context)
    batches = batches_of(text, config, np.arange(config.batch), train=True)
    return [float(step(*state, tokens)) for tokens in itertools.islice(batches, config.steps)]


def main(argv: list[str] | None = None) -> None:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = functools.partial(parser.add_argument, help="default: %(default)s")
    option("folder", type=Path, help="of the run: a new one, or one to continue")
    for name, default in dataclasses.asdict(Config()).items():
        flag = "--" + name.replace("_", "-")
        kind = {"action": "store_true"} if default is False else {"type": type(default)}
        option(flag, default=default, **kind)
    option("--save-every", type=int, default=100, metavar="STEPS")
    option("--evaluate-every", type=int, default=100, metavar="STEPS")
    option("--model-parallel", type=int, metavar="SIZE", help="of the model axis of the mesh")
    option("--report", action="store_true", help="write report.html: memory, cost, communication")
    option("--profile", action="store_true", help="write a profile of three steps")
    option("--check", action="store_true", help="compare the losses with those of one device")
    options = parser.parse_args(argv)
    config = Config(**{name: getattr(options, name) for name in Config.__dataclass_fields__})

    if "JAX_COORDINATOR_ADDRESS" in os.environ:  # the launcher sets it
        jax.distributed.initialize()
    options.model_parallel = options.model_parallel or math.gcd(4, jax.device_count())
    file = options.folder / "config.json"
    if jax.process_index() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dataclasses.asdict(config))
        if file.exists() and file.read_text() != text:
            parser.error(f"{options.folder} is a run with other options: {file.read_text()}")
        file.write_text(text)

    train(config, options)
    alone = train_alone(config) if options.check else []
    if jax.process_index() == 0:
        lines = map(json.loads, (options.folder / "metrics.jsonl").read_text().splitlines())
        losses = [line["loss"] for line in lines if "loss" in line]
        print(f"step 1: loss {losses[0]:.4f}, step {len(losses)}: loss {losses[-1]:.4f}")
        if alone:
            difference = max(abs(a - b) for a, b in zip(losses, alone, strict=False))
            print(f"largest difference to one device: {difference:.1e}")


if __name__ == "__main__":
    main()
