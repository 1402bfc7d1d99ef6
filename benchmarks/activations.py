"""Activations by a strategy, against those by hand: ``python -m benchmarks.activations``.

Times a training step of a small transformer, tensor parallel over 2 × 4 devices, on Auto and on
Explicit axes. By hand, the code of the model says how what some layers return is sharded. In each
turn every way is called once, beginning with another one each time; a ratio is that of one turn.
The first ways differ in what the model says, the last one also in how it is called.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import nnx_sharding
from nnx_sharding import StateSharding
from nnx_sharding.partition import tensor_parallel
from nnx_sharding.placement import place

from .models import Program
from .ways import FLOOR, Flat

FEATURES, HEADS, BLOCKS, VOCABULARY, BATCH, LENGTH = 64, 4, 4, 256, 16, 64
BY_STRATEGY, BY_HAND = "by strategy", "by hand"


def sharded(layer: Any, sharding: NamedSharding | None, *args: Any, **kwargs: Any) -> jax.Array:
    """What a layer returns, sharded by hand unless ``sharding`` is None."""
    if sharding is None:
        return layer(*args, **kwargs)
    if AxisType.Explicit in sharding.mesh.axis_types:
        return layer(*args, **kwargs, out_sharding=sharding)
    return jax.lax.with_sharding_constraint(layer(*args, **kwargs), sharding)


class Block(nnx.Module):
    def __init__(self, by_hand: NamedSharding | None, rngs: nnx.Rngs):
        self.by_hand = by_hand
        self.norm_attention = nnx.RMSNorm(FEATURES, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, FEATURES, decode=False, use_bias=False, rngs=rngs
        )
        self.norm_mlp = nnx.RMSNorm(FEATURES, rngs=rngs)
        self.up = nnx.Linear(FEATURES, 4 * FEATURES, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * FEATURES, FEATURES, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + sharded(self.attention, self.by_hand, self.norm_attention(x), mask=mask)
        return x + sharded(self.down, self.by_hand, nnx.gelu(self.up(self.norm_mlp(x))))


class Transformer(nnx.Module):
    """Ends with logits that are sharded as the tokens are, over ``data``."""

    def __init__(self, mesh: Mesh | None, rngs: nnx.Rngs):
        self.by_hand = mesh and NamedSharding(mesh, PartitionSpec("data"))
        self.replicated = mesh and NamedSharding(mesh, PartitionSpec())
        self.tokens = nnx.Embed(VOCABULARY, FEATURES, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, FEATURES, rngs=rngs)
        self.blocks = nnx.List([Block(self.by_hand, rngs) for _ in range(BLOCKS)])
        self.norm = nnx.RMSNorm(FEATURES, rngs=rngs)
        self.head = nnx.Linear(FEATURES, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        positions = sharded(self.positions, self.replicated, jnp.arange(tokens.shape[1]))
        x = sharded(self.tokens, self.by_hand, tokens) + positions
        for block in self.blocks:
            x = block(x)
        return sharded(self.head, self.by_hand, self.norm(x))


def train_step(model: Any, optimizer: Any, tokens: jax.Array) -> jax.Array:
    def loss_of(model: Any) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens)
        return losses.mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def ways(mesh: Mesh) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """For each way what makes a step, and what traces and lowers it."""

    def make(by_hand: bool) -> tuple[Any, ...]:
        model = Transformer(mesh if by_hand else None, nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        graphs = model, optimizer
        return place(graphs, tensor_parallel(model, mesh=mesh, optimizer=optimizer), mesh=mesh)

    data = NamedSharding(mesh, PartitionSpec("data"))
    tokens = jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, VOCABULARY)
    tokens = jax.device_put(tokens, data)

    def ours(by_hand: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
        graphs = make(by_hand)
        sharding = tensor_parallel(graphs[0], mesh=mesh, optimizer=graphs[1])
        if by_hand:
            sharding = StateSharding(zip(sharding.filters, sharding.shardings, strict=True))
        specs = sharding, sharding, data
        step = nnx_sharding.jit(train_step, in_shardings=specs, mesh=mesh)

        def lower() -> Any:
            new = nnx_sharding.jit(_untraced(train_step), in_shardings=specs, mesh=mesh)
            return new.lower(*graphs, tokens)

        return functools.partial(step, *graphs, tokens), lower

    flat = Flat(Program(train_step, lambda: make(by_hand=True), (tokens,), equinox=""))
    shardings = [x.sharding for x in flat.arrays]
    options = {
        "in_shardings": (shardings, data),
        "out_shardings": (None, [shardings[i] for i in flat.changed]),
    }
    return {
        BY_STRATEGY: ours(by_hand=False),
        BY_HAND: ours(by_hand=True),
        FLOOR: (
            flat.way(jax.jit(flat, **options)),
            lambda: jax.jit(_untraced(flat), **options).lower(flat.arrays, tokens),
        ),
    }


def _untraced(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function that JAX has not traced."""
    return lambda *args: fun(*args)


def seconds(
    calls: Mapping[str, Callable[[], Any]],
    repeats: int,
    clock: Callable[[], float],
    *,
    cold: bool,
) -> dict[str, list[float]]:
    """How long each call takes in each turn; ``cold`` with nothing in the caches of JAX."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(repeats + 1):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            if cold:
                jax.clear_caches()
            else:
                jax.block_until_ready(calls[name]())  # what the others left in the CPU's caches
            gc.collect()
            before = clock()
            jax.block_until_ready(calls[name]())
            if turn:  # the first turn compiles
                times[name].append(clock() - before)
    return times


MEASURES = ("step", "trace and lower", "the same, nothing cached")


def compare(mesh: Mesh, repeats: int) -> None:
    """Prints how long each way takes, and how much longer ours."""
    found, kind = ways(mesh), mesh.axis_types[0].name
    for measure, what in enumerate(MEASURES):
        calls = {name: both[min(measure, 1)] for name, both in found.items()}
        # One thread traces: the time that it runs is steadier than what passes.
        turns, clock = (repeats // 5, time.thread_time) if measure else (repeats, time.perf_counter)
        times = seconds(calls, turns, clock, cold=measure == 2)
        for name, taken in times.items():
            ratios = [a / b for a, b in zip(times[BY_STRATEGY], taken, strict=True)]
            figures = f"{statistics.median(taken) * 1e3:>9.1f} {statistics.median(ratios):>7.3f}"
            print(f"{kind:<9} {what:<25} {name:<24} {figures} {max(ratios):>7.2f}", flush=True)


def main() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.activations", description=__doc__)
    parser.add_argument("--repeats", type=int, default=100, help="of a step; a 5th of it of traces")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    print(f"{'':<60}        ms   by strategy ÷ it: median, maximum")
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
        with jax.set_mesh(mesh):
            compare(mesh, options.repeats)


if __name__ == "__main__":
    main()
