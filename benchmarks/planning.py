"""Plans training steps of large models, and compares figures with formulas by hand.

``python -m benchmarks.planning`` plans three models on 16 virtual devices of the CPU;
``--devices v5e:4x4 v5p:2x2x4`` for TPUs, with their compiler (extra ``tpu``). ``--scale`` plans a
transformer of 70 billion parameters and a mixture of 64 experts on 1,024 devices, and reports the
time and the memory of this machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import resource
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnx_sharding import Stack, stack, value_and_grad
from nnx_sharding.analysis import HARDWARE
from nnx_sharding.planning import plan
from nnx_sharding.planning.candidates import Candidate
from nnx_sharding.planning.plan import Plan

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Config:
    """The size of a decoder, in the terms of Llama; with experts its MLPs are mixtures."""

    features: int
    hidden: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int
    batch: int
    context: int = 2048
    experts: int = 0
    top: int = 2


MEDIUM = Config(2048, 5632, 16, 16, 16, 32000, batch=32)
MIXTURE = Config(1024, 2816, 16, 16, 8, 32000, batch=32, experts=16)
LLAMA_70B = Config(8192, 28672, 64, 8, 80, 128256, batch=1024)
EXPERTS_64 = Config(4096, 2048, 32, 32, 32, 128256, batch=1024, experts=64)


class Attention(nnx.Module):
    """Causal attention with grouped heads, written with layers of NNX."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        features, size = config.features, config.features // config.heads
        options: dict[str, Any] = {"use_bias": False, "dtype": jnp.bfloat16, "rngs": rngs}
        self.query = nnx.LinearGeneral(features, (config.heads, size), **options)
        self.key = nnx.LinearGeneral(features, (config.kv_heads, size), **options)
        self.value = nnx.LinearGeneral(features, (config.kv_heads, size), **options)
        self.out = nnx.LinearGeneral((config.heads, size), features, axis=(-2, -1), **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = jax.nn.dot_product_attention(
            self.query(x), self.key(x), self.value(x), is_causal=True
        )
        return self.out(heads)


class MLP(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        options: dict[str, Any] = {"use_bias": False, "dtype": jnp.bfloat16, "rngs": rngs}
        self.gate = nnx.Linear(config.features, config.hidden, **options)
        self.up = nnx.Linear(config.features, config.hidden, **options)
        self.down = nnx.Linear(config.hidden, config.features, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Experts(nnx.Module):
    """Tokens are dispatched to experts of fixed capacity, within each row of the batch (GShard)."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        features, hidden, experts = config.features, config.hidden, config.experts
        options: dict[str, Any] = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.top = config.top
        self.capacity = config.top * config.context // experts
        self.router = nnx.Linear(features, experts, use_bias=False, **options)
        self.gate = nnx.Einsum("becd,edh->bech", (experts, features, hidden), **options)
        self.up = nnx.Einsum("becd,edh->bech", (experts, features, hidden), **options)
        self.down = nnx.Einsum("bech,ehd->becd", (experts, hidden, features), **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        weights, chosen = jax.lax.top_k(jax.nn.softmax(self.router(x)), self.top)
        mask = jax.nn.one_hot(chosen, self.router.out_features, dtype=x.dtype).sum(2)
        place = jnp.cumsum(mask, axis=1) * mask - 1
        dispatch = jax.nn.one_hot(place, self.capacity, dtype=x.dtype)
        h = jnp.einsum("btec,btd->becd", dispatch, x)
        h = self.down(nnx.silu(self.gate(h)) * self.up(h))
        return jnp.einsum("btec,becd->btd", dispatch * weights.sum(-1)[..., None, None], h)


class Block(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.norm_attention = nnx.RMSNorm(config.features, **options)
        self.attention = Attention(config, rngs)
        self.norm_mlp = nnx.RMSNorm(config.features, **options)
        self.mlp = Experts(config, rngs) if config.experts else MLP(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class Decoder(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.tokens = nnx.Embed(config.vocabulary, config.features, **options)
        self.blocks: Stack[Any] = stack(Block, config.layers, config, rngs=rngs, remat=True)
        self.norm = nnx.RMSNorm(config.features, **options)
        self.head = nnx.Linear(config.features, config.vocabulary, use_bias=False, **options)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.norm(self.blocks(self.tokens(tokens))))


class ConvNet(nnx.Module):
    """Convolutions with batch norm, of the widths of a small ResNet, without its residuals."""

    widths = (64, 128, 256, 512)

    def __init__(self, rngs: nnx.Rngs):
        self.convs, self.norms = nnx.List(), nnx.List()
        channels = 3
        for width in self.widths:
            for strides in (2, 1):
                self.convs.append(
                    nnx.Conv(channels, width, (3, 3), strides, use_bias=False, rngs=rngs)
                )
                self.norms.append(nnx.BatchNorm(width, rngs=rngs))
                channels = width
        self.head = nnx.Linear(channels, 1000, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x)))
        return self.head(x.mean((1, 2)))


def train_step(model: Any, optimizer: Any, inputs: jax.Array, labels: jax.Array) -> jax.Array:
    """One step of Adam; returns the loss."""

    def loss_of(model: Any, inputs: jax.Array, labels: jax.Array) -> jax.Array:
        logits = model(inputs).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = value_and_grad(loss_of)(model, inputs, labels)
    optimizer.update(model, grads)
    return loss


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with its batch, and the flops of a training step of all devices by hand."""

    make: Callable[[nnx.Rngs], Any]
    batch: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]
    flops: Callable[[int], float]

    def arguments(self) -> tuple[Any, ...]:
        """The abstract arguments of the step."""

        def both() -> tuple[Any, Any]:
            model = self.make(nnx.Rngs(0))
            return model, nnx.Optimizer(model, optax.adam(3e-4), wrt=nnx.Param)

        return *nnx.eval_shape(both), *self.batch


def decoder(config: Config) -> Case:
    tokens = jax.ShapeDtypeStruct((config.batch, config.context), jnp.int32)

    def flops(parameters: int) -> float:
        count = config.batch * config.context
        d, h, e = config.features, config.hidden, config.experts
        active = parameters - config.vocabulary * d  # the embedding is a gather
        head = config.vocabulary * d
        attention = 4 * config.context * d * config.layers  # all of the square, for each token
        if e:
            expert = 3 * d * h * config.layers
            active -= (e - config.top) * expert
            # The dispatch and the combination are products with one-hot matrices.
            attention += 2 * 2 * config.top * config.context * d * config.layers
        # Forward, backward twice, and recomputed in blocks, but for their last product.
        last = d * h * config.layers * (config.top if e else 1)
        return float(count * (8 * (active - head) + 6 * head - 2 * last + 4 * attention))

    return Case(lambda rngs: Decoder(config, rngs), (tokens, tokens), flops)


def convnet(batch: int, size: int = 224) -> Case:
    images = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def flops(parameters: int) -> float:
        total, channels, side, first = 0.0, 3, size, True
        for width in ConvNet.widths:
            for stride in (2, 1):
                side //= stride
                once = 2 * 9 * channels * width * side * side
                total += once * (2 if first else 3)  # images have no gradient
                channels, first = width, False
        return batch * (total + 6 * channels * 1000)

    return Case(lambda rngs: ConvNet(rngs), (images, labels), flops)


CASES = {
    "transformer": decoder(MEDIUM),
    "convnet": convnet(512),
    "experts": decoder(MIXTURE),
}
SCALE = {"llama 70B": decoder(LLAMA_70B), "64 experts": decoder(EXPERTS_64)}


def parameter_count(model: Any) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def weights_sent(candidate: Candidate, parameters: int) -> float | None:
    """By hand the bytes that a device sends for parameters; None with tensor parallelism."""
    count = math.prod(size for axis, size in candidate.sizes.items() if axis != "model")
    # In float32: gradients are all-reduced; scattered, and parameters gathered once or twice.
    factor = {"dp": 2 * 4, "zero1": 2 * 4, "fsdp": 3 * 4}.get(candidate.strategy)
    return None if factor is None else factor * parameters * (count - 1) / count


def report(name: str, case: Case, found: Plan, seconds: float) -> None:
    model = case.arguments()[0]
    parameters = parameter_count(model)
    print(f"\n{name}: {parameters / 1e9:.2f} billion parameters, planned in {seconds:.0f} s")
    print(found)
    by_hand = case.flops(parameters)
    for candidate in found.candidates.values():
        compiled = found.comparison.compiled.get(candidate.name)
        if compiled is None or compiled.cost is None:
            continue
        flops, devices = compiled.cost.flops or 0.0, candidate.mesh.size
        ratio = flops * devices / by_hand
        line = f"  {candidate.name}: flops {ratio:.3f} of {by_hand / devices:.3g} by hand"
        sent, expected = compiled.collectives, weights_sent(candidate, parameters)
        if sent is not None and expected is not None:
            line += f", sent {sent.bytes_sent / expected:.3f} of {expected / GIB:.2f} GiB by hand"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--scale", action="store_true", help="plan on 1,024 devices")
    parser.add_argument("--cases", nargs="*", help="the names of some of the models")
    parser.add_argument("--devices", nargs="*", default=["16"], help="16, v5e:4x4, v5p:2x2x4, …")
    parser.add_argument("--strategies", nargs="*", default=["dp", "zero1", "fsdp", "fsdp + tensor"])
    parser.add_argument("--most", type=int, default=4)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # JAX would look for TPUs
    cases = SCALE if options.scale else CASES
    for devices in ["1024"] if options.scale and options.devices == ["16"] else options.devices:
        on_cpu = devices.isdigit()
        for name, case in cases.items():
            if options.cases and name not in options.cases:
                continue
            start = time.perf_counter()
            found = plan(
                train_step,
                *case.arguments(),
                devices=int(devices) if on_cpu else None,
                topology=None if on_cpu else devices,
                strategies=options.strategies,
                hardware=HARDWARE["TPU v5p"] if on_cpu else None,
                most=options.most,
                donate_argnums=(0, 1),
            )
            report(f"{name} on {devices}", case, found, time.perf_counter() - start)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
            print(f"peak memory of the planner: {peak:.2f} GiB")


if __name__ == "__main__":
    main()
