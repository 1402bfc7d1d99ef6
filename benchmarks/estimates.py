"""Estimated and measured times and peaks of training steps on one device.

``python -m benchmarks.estimates`` calibrates the first device, for products of bfloat16 and of
float32, and runs each program; ``--scale 16`` divides its sizes, to see whether everything runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnx_sharding import jit, stack, value_and_grad
from nnx_sharding.planning import calibrate
from nnx_sharding.training import accumulate_gradients

BF16 = jnp.bfloat16
MIB = 2**20
STEPS = 20


class Mlp(nnx.Module):
    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs):
        layers = range(6)
        self.layers = nnx.List([nnx.Linear(width, width, dtype=dtype, rngs=rngs) for _ in layers])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.gelu(layer(x))
        return x


class Block(nnx.Module):
    def __init__(self, width: int, attention: Callable[..., Any], rngs: nnx.Rngs):
        options = {"rngs": rngs, "dtype": BF16}
        self.norm, self.norm2 = nnx.RMSNorm(width, **options), nnx.RMSNorm(width, **options)
        self.attention = nnx.MultiHeadAttention(
            16, width, decode=False, attention_fn=attention, **options
        )
        self.up, self.down = (
            nnx.Linear(width, 4 * width, **options),
            nnx.Linear(4 * width, width, **options),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Blocks(nnx.Module):
    def __init__(self, width: int, attention: Callable[..., Any], rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(width, attention, rngs) for _ in range(4)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


class Images(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        layers = range(4)
        self.convs = nnx.List([nnx.Conv(64, 64, (3, 3), dtype=BF16, rngs=rngs) for _ in layers])
        self.norms = nnx.List([nnx.BatchNorm(64, rngs=rngs) for _ in layers])

    def __call__(self, x: jax.Array) -> jax.Array:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x)))
        return x


def loss_of(model: Any, x: jax.Array) -> jax.Array:
    return jnp.square(model(x)).mean(dtype=jnp.float32)


def train(model: Any, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, grads = value_and_grad(loss_of)(model, x)
    optimizer.update(model, grads)
    return loss


def train_in_parts(model: Any, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, grads = accumulate_gradients(loss_of, steps=8)(model, x)
    optimizer.update(model, grads)
    return loss


def cudnn(query: Any, key: Any, value: Any, **_: Any) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, implementation="cudnn")


def programs(scale: int) -> dict[str, tuple[Callable[[], Any], Any, tuple[int, ...]]]:
    """What makes each model, its step, and the shape of its input."""
    width, length, rows = 2048 // scale, 1024 // scale, 32 // min(scale, 4)
    plain, rngs = nnx.dot_product_attention, nnx.Rngs(0)
    tokens, few = (rows, length, width), (8, length, width)
    found: dict[str, Any] = {
        "perceptron": (lambda: Mlp(width, BF16, rngs), train, tokens),
        "perceptron, float32": (lambda: Mlp(width, jnp.float32, rngs), train, tokens),
        "transformer": (lambda: Blocks(width, plain, rngs), train, few),
        "transformer in a loop, remat": (
            lambda: stack(Block, 4, width, plain, rngs=rngs, remat=True),
            train,
            few,
        ),
        "convolutions": (lambda: Images(rngs), train, (64 // scale, 112, 112, 64)),
        "perceptron, 8 microbatches": (lambda: Mlp(width, BF16, rngs), train_in_parts, tokens),
    }
    if jax.default_backend() == "gpu":
        found["transformer, cuDNN"] = (lambda: Blocks(width, cudnn, rngs), train, few)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=int, default=1, help="what sizes are divided by")
    scale = parser.parse_args().scale
    device = jax.devices()[0]
    hardware = {
        dtype: calibrate([device], dtype=dtype, side=4096 // scale) for dtype in (BF16, jnp.float32)
    }
    for one in hardware.values():
        print(f"{one}\n")
    print("ms: estimate (bounds), measured, ratio; MiB at the peak: predicted, of the process")
    for name, (make, step, shape) in programs(scale).items():
        model = make()
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        x = jax.random.normal(jax.random.key(0), shape, BF16)
        compiled = jit(step, donate_argnums=(0, 1)).lower(model, optimizer, x).compile()
        found = compiled.roofline(hardware[jnp.float32 if "float32" in name else BF16])
        jax.block_until_ready(compiled(model, optimizer, x))
        start = time.perf_counter()
        for _ in range(STEPS):
            loss = compiled(model, optimizer, x)
        jax.block_until_ready(loss)
        seconds = (time.perf_counter() - start) / STEPS
        times = found.estimate, found.seconds, found.seconds_without_overlap
        words = [f"{1e3 * t:.2f}" if t is not None else "?" for t in times]
        ratio = f"{seconds / found.estimate:.2f}" if found.estimate else "?"
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
        used = "?" if peak is None else f"{peak / MIB:.0f}"
        memory = compiled.memory()
        predicted = "?" if memory is None or memory.peak is None else f"{memory.peak / MIB:.0f}"
        bounds = f"{words[1]} to {words[2]}"
        print(
            f"{name}: {words[0]} ({bounds}), {1e3 * seconds:.2f}, {ratio}; {predicted}, {used}",
            flush=True,
        )


if __name__ == "__main__":
    main()
