"""What depth costs: ``python -m benchmarks.depth``.

A transformer of pre-norm blocks with dropout, as a list of blocks and as a ``Stack``, against the
same model by hand in plain JAX: time to trace, lower and compile, memory, dispatch; and the time
to trace nested transforms, against Flax's.
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

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import nnx_sharding as ns

FEATURES, HEADS, LENGTH, BATCH = 32, 2, 16, 4


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        bare = {"use_bias": False, "rngs": rngs}
        self.norm1 = nnx.RMSNorm(FEATURES, rngs=rngs)
        self.query = nnx.Linear(FEATURES, FEATURES, **bare)
        self.key = nnx.Linear(FEATURES, FEATURES, **bare)
        self.value = nnx.Linear(FEATURES, FEATURES, **bare)
        self.out = nnx.Linear(FEATURES, FEATURES, **bare)
        self.norm2 = nnx.RMSNorm(FEATURES, rngs=rngs)
        self.up = nnx.Linear(FEATURES, 4 * FEATURES, **bare)
        self.down = nnx.Linear(4 * FEATURES, FEATURES, **bare)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.norm1(x)
        query, key, value = (
            layer(h).reshape(*h.shape[:-1], HEADS, -1)
            for layer in (self.query, self.key, self.value)
        )
        h = jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape)
        x = x + self.dropout(self.out(h))
        return x + self.dropout(self.down(jax.nn.gelu(self.up(self.norm2(x)))))


class Deep(nnx.Module):
    def __init__(self, blocks: int, *, stacked: bool):
        rngs = nnx.Rngs(0)
        if stacked:
            self.blocks = ns.stack(Block, blocks, rngs=rngs)
        else:
            self.blocks = nnx.List([Block(rngs=rngs) for _ in range(blocks)])

    def __call__(self, x: jax.Array) -> jax.Array:
        if isinstance(self.blocks, ns.Stack):
            return self.blocks(x)
        for block in self.blocks:
            x = block(x)
        return x


def loss(model: Deep, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


def plain_block(params: Mapping[str, Any], key: jax.Array, x: jax.Array) -> jax.Array:
    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        mean = jnp.square(x).mean(-1, keepdims=True)
        return x * jax.lax.rsqrt(mean + 1e-6) * scale

    def dropout(x: jax.Array, key: jax.Array) -> jax.Array:
        keep = jax.random.bernoulli(key, 0.9, x.shape)
        return jnp.where(keep, x / 0.9, 0.0)

    first, second = (jax.random.fold_in(key, i) for i in range(2))
    h = norm(x, params["norm1"])
    query, key, value = (
        (h @ params[name]).reshape(*h.shape[:-1], HEADS, -1) for name in ("query", "key", "value")
    )
    h = jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape)
    x = x + dropout(h @ params["out"], first)
    h = jax.nn.gelu(norm(x, params["norm2"]) @ params["up"]) @ params["down"]
    return x + dropout(h, second)


def plain_loss(params: Any, keys: Any, x: jax.Array) -> jax.Array:
    for block, key in zip(params, keys, strict=True):
        x = plain_block(block, key, x)
    return (x**2).mean()


def plain_arguments(blocks: int) -> tuple[Any, ...]:
    model = Deep(blocks, stacked=False)
    params = []
    for block in model.blocks:
        layers = ("query", "key", "value", "out", "up", "down")
        kernels = {name: getattr(block, name).kernel[...] for name in layers}
        scales = {name: getattr(block, name).scale[...] for name in ("norm1", "norm2")}
        params.append(kernels | scales)
    return params, [*jax.random.split(jax.random.key(0), blocks)]


def plain_step(params: Any, state: Any, keys: Any, x: jax.Array) -> Any:
    value, gradient = jax.value_and_grad(plain_loss)(params, keys, x)
    updates, state = ADAM.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value


ADAM = optax.adam(1e-3)


def train_step(gradient: Callable[..., Any], model: Deep, optimizer: Any, x: jax.Array) -> Any:
    value, new = gradient(model, x)
    optimizer.update(model, new)
    return value


def ways(blocks: int) -> dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]]:
    """By name, a step to compile, and what makes its arguments."""
    x = jnp.ones((BATCH, LENGTH, FEATURES))

    def objects(stacked: bool) -> tuple[Any, ...]:
        model = Deep(blocks, stacked=stacked)
        return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param), x

    def arrays() -> tuple[Any, ...]:
        params, keys = plain_arguments(blocks)
        return params, ADAM.init(params), keys, x

    def step(gradient: Any) -> Callable[..., Any]:
        return lambda model, optimizer, x: train_step(gradient, model, optimizer, x)

    def own(stacked: bool) -> tuple[Any, Any]:
        fun = step(ns.value_and_grad(lambda model, x: loss(model, x)))
        return ns.jit(fun), lambda: objects(stacked)

    by_flax = step(nnx.value_and_grad(loss))
    return {
        "plain JAX, list": (jax.jit(lambda *a: plain_step(*a)), arrays),
        "value_and_grad, list": own(False),
        "nnx.value_and_grad in jit, list": (ns.jit(by_flax), lambda: objects(False)),
        "nnx.value_and_grad in nnx.jit, list": (nnx.jit(by_flax), lambda: objects(False)),
        "value_and_grad, Stack": own(True),
    }


def compiling(depths: list[int], repeats: int) -> None:
    print(
        "\nmilliseconds to trace and lower a training step, and to compile it (median of "
        f"{repeats}, ratio of medians to plain JAX)"
    )
    for blocks in depths:
        found: dict[str, list[tuple[float, float]]] = {}
        for _ in range(repeats):
            for name, (step, make) in ways(blocks).items():
                arguments = make()
                gc.collect()
                start = time.perf_counter()
                lowered = step.lower(*arguments)
                middle = time.perf_counter()
                lowered.compile()
                found.setdefault(name, []).append((middle - start, time.perf_counter() - middle))
        medians = {
            name: [statistics.median(column) * 1e3 for column in zip(*times, strict=True)]
            for name, times in found.items()
        }
        floor = medians["plain JAX, list"]
        for name, (lower, compile_) in medians.items():
            print(
                f"{blocks:>4} blocks  {name:<36} {lower:>8.0f} {compile_:>8.0f}   "
                f"{lower / floor[0]:.2f}  {compile_ / floor[1]:.2f}",
                flush=True,
            )


def nestings(blocks: int) -> dict[str, Callable[[Any], tuple[Callable[..., Any], Any]]]:
    """By name, what makes a loss with transforms of a library, and its model."""

    def scanned(library: Any) -> tuple[Callable[..., Any], Any]:
        make = nnx.split_rngs(splits=blocks)(nnx.vmap(lambda rngs: Block(rngs=rngs)))

        def apply(model: Block, x: jax.Array) -> jax.Array:
            axes = {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry}
            return library.scan(lambda block, x: block(x), **axes)(model, x).mean()  # type: ignore[no-any-return]

        return apply, make(nnx.Rngs(0))

    def recomputed(library: Any) -> tuple[Callable[..., Any], Any]:
        def apply(model: Deep, x: jax.Array) -> jax.Array:
            for block in model.blocks:
                x = library.remat(lambda block, x: block(x))(block, x)
            return x.mean()

        return apply, Deep(blocks, stacked=False)

    def of_gradient(make: Any) -> Callable[[Any], tuple[Callable[..., Any], Any]]:
        def made(library: Any) -> tuple[Callable[..., Any], Any]:
            apply, model = make(library)
            return lambda model, x: library.value_and_grad(apply)(model, x), model

        return made

    return {
        "scan": scanned,
        "value_and_grad of scan": of_gradient(scanned),
        "remat": recomputed,
        "value_and_grad of remat": of_gradient(recomputed),
    }


def tracing(blocks: int, repeats: int) -> None:
    print(
        f"\nmilliseconds of CPU to trace {blocks} blocks in jit (median of {repeats}): "
        "nnx, nnx_sharding, ratio"
    )
    x = jnp.ones((BATCH, LENGTH, FEATURES))
    for name, make in nestings(blocks).items():
        found: dict[Any, list[float]] = {nnx: [], ns: []}
        for _ in range(repeats + 1):
            for library, times in found.items():
                fun, model = make(library)
                step = library.jit(fun)
                gc.collect()
                start = time.process_time()
                step.trace(model, x)
                times.append(time.process_time() - start)
        theirs, ours = (statistics.median(times[1:]) * 1e3 for times in found.values())
        print(f"  {name:<36} {theirs:>8.0f} {ours:>8.0f}   {ours / theirs:.2f}", flush=True)


def memory(blocks: int) -> None:
    print(f"\nbytes of a training step of {blocks} blocks: arguments, temporaries")
    for name, (step, make) in ways(blocks).items():
        analysis = step.lower(*make()).compile()
        analysis = getattr(analysis, "jax_compiled", analysis).memory_analysis()
        print(
            f"  {name:<36} {analysis.argument_size_in_bytes:>10} {analysis.temp_size_in_bytes:>10}"
        )


def live(blocks: int) -> None:
    """Bytes of all arrays before and after steps, without and with a Stack."""
    print(f"\nbytes alive with {blocks} blocks: before, after three steps")
    for stacked in (False, True):
        gc.collect()
        model = Deep(blocks, stacked=stacked)
        optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
        x = jnp.ones((BATCH, LENGTH, FEATURES))
        step = ns.jit(functools.partial(train_step, ns.value_and_grad(loss)))
        gc.collect()
        before = sum(a.nbytes for a in jax.live_arrays())
        for _ in range(3):
            step(model, optimizer, x).block_until_ready()
        gc.collect()
        after = sum(a.nbytes for a in jax.live_arrays())
        print(f"  {'Stack' if stacked else 'list':<6} {before:>10} {after:>10}")


def main() -> None:
    """Prints all figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.depth", description=__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    tracing(32, options.repeats)
    live(24)
    memory(24)
    compiling(options.depths, options.repeats)


if __name__ == "__main__":
    main()
