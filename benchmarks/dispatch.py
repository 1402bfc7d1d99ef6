"""What a call costs before the device gets to work, as a ratio to ``jax.jit`` on flat arrays.

Run ``python benchmarks/dispatch.py [--blocks 32] [--repeats 100] [--json FILE]``. All ways to
call are measured in one process and in turn, so that a change in the machine's speed hits
all alike; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import nnx_sharding


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, width, rngs=rngs)
        self.down = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.relu(self.up(self.norm(x))))


class Network(nnx.Module):
    def __init__(self, blocks: int, width: int, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(width, rngs) for _ in range(blocks)])
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        for block in self.blocks:
            x = block(x)
        return x


def forward_ways(blocks: int) -> dict[str, Callable[[], Any]]:
    """The same forward pass with one counter updated, called in several ways."""
    x = jnp.ones((4, 8))

    def make() -> Network:
        return Network(blocks, 8, nnx.Rngs(0))

    def apply(model: Network, x: jax.Array) -> jax.Array:
        return model(x)

    structure, state = nnx_sharding.split(make())
    arrays, treedef = jax.tree.flatten(state)
    counter = next(i for i, array in enumerate(arrays) if array.ndim == 0)

    @jax.jit
    def flat(arrays: list[jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = nnx_sharding.merge(structure, jax.tree.unflatten(treedef, arrays))
        y = model(x)
        return y, model.calls[...]

    def floor() -> Any:
        y, arrays[counter] = flat(arrays, x)
        return y

    ours, theirs, cached_model = make(), make(), make()
    our_jit, flax_jit = nnx_sharding.jit(apply), nnx.jit(apply)
    cached = nnx.cached_partial(flax_jit, cached_model)
    return {
        "jax.jit, flat arrays": floor,
        "nnx_sharding.jit": lambda: our_jit(ours, x),
        "nnx.cached_partial(nnx.jit)": lambda: cached(x),
        "nnx.jit": lambda: flax_jit(theirs, x),
    }


def measure(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median microseconds of each way to call."""
    for call in ways.values():
        jax.block_until_ready(call())
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, call in ways.items():
            start = time.perf_counter()
            result = call()
            times[name].append(time.perf_counter() - start)
            jax.block_until_ready(result)
    return {name: statistics.median(t) * 1e6 for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--json", help="write the figures to this file as well")
    options = parser.parse_args()
    medians = measure(forward_ways(options.blocks), options.repeats)
    floor = medians["jax.jit, flat arrays"]
    print(f"forward, {options.blocks} blocks, {options.repeats} repeats, {jax.default_backend()}")
    for name, median in medians.items():
        print(f"  {name:30} {median:10.0f} µs {median / floor:8.1f} x floor")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"blocks": options.blocks, "microseconds": medians}, file, indent=2)


if __name__ == "__main__":
    main()
