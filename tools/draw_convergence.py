"""Trains one model with every strategy, and draws the losses: ``python tools/draw_convergence.py``.

Writes the table of ``docs/convergence.md`` and the plot beside it, for which it needs matplotlib.
``--steps 5`` trains shorter and only prints the table.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nnx_sharding import accumulate_gradients, fsdp, jit, make_mesh, tensor_parallel, value_and_grad
from nnx_sharding.partition import pipeline, replicated, sharded_init, zero1

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tools")]

from draw_performance import BLUE, GREY, OTHER_WAYS, save, subplots  # noqa: E402
from train_deep import Config, Model, batches, loss_of  # noqa: E402

PAGE = ROOT / "docs/convergence.md"
PART = re.compile(
    r"(?<=<!-- written by tools/draw_convergence.py -->\n).*(?=<!-- end -->)", re.DOTALL
)

# Sizes of the mesh, and what makes the sharding of model and optimizer.
Way = tuple[dict[str, int], Callable[..., Any]]
WAYS: dict[str, Way] = {
    "data parallelism": ({"data": 8}, lambda model, mesh, **opt: replicated(model, **opt)),
    "data parallelism, 2 microbatches": (
        {"data": 8},
        lambda model, mesh, **opt: replicated(model, **opt),
    ),
    "`zero1`": ({"data": 8}, functools.partial(zero1, min_size=0)),
    "`fsdp`": ({"data": 8}, functools.partial(fsdp, min_size=0)),
    "`fsdp`, once more": ({"data": 8}, functools.partial(fsdp, min_size=0)),
    "`fsdp(prefetch=1)`": ({"data": 8}, functools.partial(fsdp, min_size=0, prefetch=1)),
    "`tensor_parallel`": ({"data": 2, "model": 4}, tensor_parallel),
    "`tensor_parallel(sequence=True)`": (
        {"data": 2, "model": 4},
        functools.partial(tensor_parallel, sequence=True),
    ),
    "`fsdp` on `tensor_parallel`": (
        {"data": 2, "model": 4},
        lambda model, mesh, **opt: fsdp(
            model, mesh=mesh, base=tensor_parallel(model, mesh=mesh), min_size=0, **opt
        ),
    ),
    "`pipeline`, 4 stages": (
        {"stage": 4, "data": 2},
        functools.partial(pipeline, microbatches=4),
    ),
    "`pipeline(repeats=2)`": (
        {"stage": 4, "data": 2},
        functools.partial(pipeline, microbatches=4, repeats=2),
    ),
}


def make(config: Config) -> tuple[Model, nnx.Optimizer[Model]]:
    """A model and its optimizer."""
    model = Model(config, rngs=nnx.Rngs(config.seed))
    return model, nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)


def losses_of(config: Config, name: str | None) -> np.ndarray:
    """The loss of each step, with one of the ways or on one device."""
    steps = 2 if name and "microbatches" in name else 1
    gradient = accumulate_gradients(loss_of, steps=steps) if steps > 1 else value_and_grad(loss_of)

    def train_step(model: Any, optimizer: Any, tokens: jax.Array) -> jax.Array:
        loss, grads = gradient(model, tokens)
        optimizer.update(model, grads)
        return loss

    new, options = functools.partial(make, config), {"donate_argnums": (0, 1)}
    if name is None:
        state, step = new(), jit(train_step, **options)
    else:
        sizes, strategy = WAYS[name]
        mesh: Mesh = make_mesh(sizes)
        model, optimizer = nnx.eval_shape(new)
        sharding = strategy(model, mesh=mesh, optimizer=optimizer)
        state = sharded_init(new, sharding, mesh)
        step = jit(train_step, in_shardings=(sharding, sharding, P("data")), mesh=mesh, **options)
    return np.array([float(step(*state, tokens)) for tokens in batches(config)])


def main() -> None:
    """Trains, and writes table and plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="train this many steps, and only print")
    steps = parser.parse_args().steps
    config = Config(steps=steps or 300, batch=16, features=32, context=16)
    alone = losses_of(config, None)
    found = {name: losses_of(config, name) for name in WAYS}
    meshes = dict.fromkeys(" × ".join(map(str, sizes.values())) for sizes, *_ in WAYS.values())
    lines = [f"| on meshes of {', '.join(meshes)} | largest difference from one device |"]
    lines.append("|---|---:|")
    for name, losses in found.items():
        lines.append(f"| {name} | {np.abs(losses - alone).max():.1e} |")
    same = (found["`fsdp`"] == found["`fsdp`, once more"]).all()
    where = f"jax {jax.__version__}, {len(jax.devices())} virtual CPU devices"
    lines += ["", f"Measured on {datetime.date.today()}: {where}, {config.steps} steps in float32."]
    lines += [f"The two runs of `fsdp` agree {'bit for bit' if same else 'NOT'}.", ""]
    if steps:
        return print("\n".join(lines))
    text = PART.sub(lambda _: "\n".join(lines), PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")
    draw(alone, found)


def draw(alone: np.ndarray, found: dict[str, np.ndarray]) -> None:
    """All curves in one plot, and below it how far each is from one device."""
    figure, (upper, lower) = subplots(nrows=2, figsize=(4, 4.6), sharex=True)
    upper.plot(alone, color=GREY, lw=4, alpha=0.5, label="one device")
    colours = [BLUE, *OTHER_WAYS] * 2
    for index, (name, losses) in enumerate(found.items()):
        style = {"color": colours[index], "lw": 1, "ls": "-" if index < 7 else "--"}
        upper.plot(losses, **style)
        furthest = np.maximum.accumulate(np.abs(losses - alone)) + 1e-9
        lower.semilogy(furthest, label=name.replace("`", ""), **style)
    upper.set(ylabel="loss")
    upper.legend()
    lower.set(xlabel="step", ylabel="largest difference")
    lower.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2))
    save(figure, "convergence")


if __name__ == "__main__":
    main()
