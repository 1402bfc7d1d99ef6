"""Plans training steps of large models, and compares figures with formulas by hand.

``python -m benchmarks.planning_by_hand`` plans three models on 16 virtual devices of the CPU;
``--devices v5e:4x4 v5p:2x2x4`` for TPUs, with their compiler (extra ``tpu``). ``--scale`` plans a
transformer of 70 billion parameters and a mixture of 64 experts on 1,024 devices, and reports the
time and the memory of this machine. ``--published`` plans five models for the TPUs that MaxText
trains them on, or fewer, beside its configurations; ``--predicted`` compiles none of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
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
from nnx_sharding.experimental import dispatch_to_experts, ring_attention
from nnx_sharding.planning import plan
from nnx_sharding.planning.candidates import Candidate
from nnx_sharding.planning.plan import PlanningResult
from nnx_sharding.planning.prepare import prepare
from nnx_sharding.planning.search import Search

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
    tied: bool = False
    ring: bool = False
    dtype: Any = jnp.bfloat16  # of products
    remat: bool = True


MEDIUM = Config(2048, 5632, 16, 16, 16, 32000, batch=32)
MIXTURE = Config(1024, 2816, 16, 16, 8, 32000, batch=32, experts=16)
LLAMA_70B = Config(8192, 28672, 64, 8, 80, 128256, batch=1024)
EXPERTS_64 = Config(4096, 2048, 32, 32, 32, 128256, batch=1024, experts=64)
MIXTRAL = Config(4096, 14336, 32, 8, 32, 32000, batch=128, context=4096, experts=8)
LLAMA3_70B = Config(8192, 28672, 64, 8, 80, 128256, batch=256, context=4096)
GEMMA_2B = Config(2048, 16384, 8, 1, 18, 256128, batch=16, tied=True)
LONG_8B = Config(4096, 14336, 32, 8, 32, 128256, batch=1, context=131072, ring=True)
DEEPSEEK = Config(2048, 1408, 16, 16, 28, 102400, batch=256, context=4096, experts=64, top=6)


class Attention(nnx.Module):
    """Causal attention with grouped heads, written with layers of NNX."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        features, size = config.features, config.features // config.heads
        options: dict[str, Any] = {"use_bias": False, "dtype": config.dtype, "rngs": rngs}
        self.query = nnx.LinearGeneral(features, (config.heads, size), **options)
        self.key = nnx.LinearGeneral(features, (config.kv_heads, size), **options)
        self.value = nnx.LinearGeneral(features, (config.kv_heads, size), **options)
        self.ring = config.ring
        self.out = nnx.LinearGeneral((config.heads, size), features, axis=(-2, -1), **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        inputs = self.query(x), self.key(x), self.value(x)
        if self.ring and "context" in jax.sharding.get_abstract_mesh().axis_names:
            return self.out(ring_attention(*inputs, is_causal=True, balanced=True))
        return self.out(jax.nn.dot_product_attention(*inputs, is_causal=True))


class MLP(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        options: dict[str, Any] = {"use_bias": False, "dtype": config.dtype, "rngs": rngs}
        self.gate = nnx.Linear(config.features, config.hidden, **options)
        self.up = nnx.Linear(config.features, config.hidden, **options)
        self.down = nnx.Linear(config.hidden, config.features, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Experts(nnx.Module):
    """A mixture of gated MLPs, each with a capacity for the tokens of a row."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        features, hidden, experts = config.features, config.hidden, config.experts
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.top, self.capacity = config.top, config.top * config.context // experts
        self.router = nnx.Linear(features, experts, use_bias=False, dtype=config.dtype, rngs=rngs)
        self.gate = nnx.Param(init(rngs.params(), (experts, features, hidden)))
        self.up = nnx.Param(init(rngs.params(), (experts, features, hidden)))
        self.down = nnx.Param(init(rngs.params(), (experts, hidden, features)))

    def experts(self, rows: jax.Array, matmul: Any) -> jax.Array:
        gate, up, down = (w[...].astype(rows.dtype) for w in (self.gate, self.up, self.down))
        return matmul(nnx.silu(matmul(rows, gate)) * matmul(rows, up), down)

    def __call__(self, x: jax.Array) -> jax.Array:
        weights, chosen = jax.lax.top_k(jax.nn.softmax(self.router(x)), self.top)
        axes = jax.sharding.get_abstract_mesh().axis_names
        options: dict[str, Any] = {"num_experts": self.router.out_features}
        options["batch_axes"] = [axis for axis in ("replica", "data") if axis in axes]
        options["capacity"] = self.capacity
        return dispatch_to_experts(x, weights, chosen, self.experts, **options)[0]


class Block(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": config.dtype, "rngs": rngs}
        self.norm_attention = nnx.RMSNorm(config.features, **options)
        self.attention = Attention(config, rngs)
        self.norm_mlp = nnx.RMSNorm(config.features, **options)
        self.mlp = Experts(config, rngs) if config.experts else MLP(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class Decoder(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": config.dtype, "rngs": rngs}
        self.tied = config.tied
        self.tokens = nnx.Embed(config.vocabulary, config.features, **options)
        self.blocks: Stack[Any] = stack(Block, config.layers, config, rngs=rngs, remat=config.remat)
        self.norm = nnx.RMSNorm(config.features, **options)
        if not config.tied:
            self.head = nnx.Linear(config.features, config.vocabulary, use_bias=False, **options)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.norm(self.blocks(self.tokens(tokens)))
        return self.tokens.attend(x) if self.tied else self.head(x)


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
        active = parameters - config.vocabulary * d * (not config.tied)  # a gather is no product
        head = config.vocabulary * d
        # All of the square, for each token; in a ring half of it.
        attention = 4 * config.context * d * config.layers / (2 if config.ring else 1)
        if e:
            expert = 3 * d * h * config.layers
            active -= (e - config.top) * expert
        # Forward, backward twice, and recomputed in blocks, but for their last product: that of an
        # expert is needed for the gradient of its weight.
        last = 0 if e else d * h * config.layers
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


@dataclasses.dataclass(frozen=True)
class Published:
    """A model whose configuration in MaxText is published, and where to plan it."""

    case: Case
    topology: str
    num_slices: int
    strategies: tuple[str, ...]
    theirs: str


PUBLISHED = {
    "Mixtral 8x7B": Published(
        decoder(MIXTRAL), "v5p:2x4x4", 1, ("fsdp", "fsdp + expert", "fsdp + expert + tensor"),
        "fsdp 64 on v5p-128, 36 rows of 4096 a chip, weights in bfloat16",
    ),
    "Llama 3 70B": Published(
        decoder(LLAMA3_70B), "v5p:4x4x8", 1, ("fsdp", "fsdp + tensor", "fsdp + pipeline"),
        "Llama 2 70B: fsdp 256 on v5p-512, 4 rows of 4096 a chip",
    ),
    "Gemma 2B": Published(
        decoder(GEMMA_2B), "v5e:2x4", 1, ("fsdp", "fsdp + tensor", "zero1"),
        "fsdp_transpose 16 and fsdp 16 on v5e-256, 2 rows of 2048 a chip",
    ),
    "8B, 128k tokens": Published(
        decoder(LONG_8B), "v5p:2x4x4", 1, ("fsdp + context", "fsdp + tensor + context"),
        "Llama 3.1 8B: a ring of 64 on v5p-128 for 1M tokens, fsdp 1",
    ),
    "64 experts": Published(
        decoder(DEEPSEEK), "v5p:2x4x4", 2, ("fsdp", "hsdp", "hsdp + expert", "fsdp + expert"),
        "DeepSeek 3 671B: fsdp 256, expert 1 on v5p-512, 4 rows of 8192 a chip",
    ),
}  # fmt: skip
SCALE = {"llama 70B": decoder(LLAMA_70B), "64 experts": decoder(EXPERTS_64)}


def parameter_count(model: Any) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def weights_sent(candidate: Candidate, parameters: int) -> float | None:
    """By hand the bytes that a device sends for parameters; None with tensor parallelism."""
    count = math.prod(size for axis, size in candidate.sizes.items() if axis != "model")
    # In float32: gradients are all-reduced; scattered, and parameters gathered once or twice.
    factor = {"dp": 2 * 4, "zero1": 2 * 4, "fsdp": 3 * 4, "hsdp": 3 * 4}.get(candidate.strategy)
    return None if factor is None else factor * parameters * (count - 1) / count


def report(name: str, case: Case, found: PlanningResult, seconds: float, theirs: str = "") -> None:
    model = case.arguments()[0]
    parameters = parameter_count(model)
    print(f"\n{name}: {parameters / 1e9:.2f} billion parameters, planned in {seconds:.0f} s")
    print(found)
    by_hand, state = case.flops(parameters), 12 * parameters
    print(f"state by hand {state / GIB:.1f} GiB; MaxText: {theirs}" if theirs else "")
    for candidate in found.candidates.values():
        compiled = found.comparison.compiled.get(candidate.name)
        if compiled is None or compiled.cost is None:
            continue
        flops, devices = compiled.cost.flops or 0.0, candidate.mesh.size
        ratio = flops * devices / by_hand
        held = 0 if compiled.memory is None else compiled.memory.arguments
        line = f"  {candidate.name}: arguments {held * devices / state:.3f} of the state, "
        line += f"flops {ratio:.3f} of {by_hand / devices:.3g} by hand"
        sent, expected = compiled.collectives, weights_sent(candidate, parameters)
        if sent is not None and expected is not None:
            line += f", sent {sent.bytes_sent / expected:.3f} of {expected / GIB:.2f} GiB by hand"
        print(line)


def search(name: str, case: Case, theirs: str = "", **options: Any) -> None:
    """Plans a model, and reports the CPU time of this process, which does not compile."""
    start, cpu = time.perf_counter(), time.process_time()
    found = plan(train_step, *case.arguments(), donate_argnums=(0, 1), **options)
    cpu = time.process_time() - cpu
    report(name, case, found, time.perf_counter() - start, theirs)
    count = len(found.candidates) + len(found.ruled_out)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    print(f"{count} candidates predicted, {len(found.candidates)} of them traced and lowered, in")
    print(f"{cpu:.0f} s of CPU; peak memory of the planner: {peak:.2f} GiB", flush=True)


def searched(step: Callable[..., Any], args: tuple[Any, ...], **changes: Any) -> Search:
    """Returns the search of a plan, with all candidates predicted and none compiled."""
    given = inspect.signature(prepare).parameters
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(plan).parameters.items()
        if name in given and parameter.default is not parameter.empty
    }
    return prepare(step, args, {}, **(defaults | changes))


def predict(name: str, one: Published) -> None:
    """Prints the fastest candidates by prediction, and their figures by hand."""
    args, cpu = one.case.arguments(), time.process_time()
    where: dict[str, Any] = {"topology": one.topology, "num_slices": one.num_slices}
    found = searched(train_step, args, strategies=one.strategies, **where)
    cpu, parameters = time.process_time() - cpu, parameter_count(args[0])

    def order(each: Any) -> tuple[float, float]:
        times = each.seconds.values()
        return max(times), sum(times)

    entries = sorted(found.entries.values(), key=order)
    devices = entries[0].candidate.mesh.size
    print(
        f"\n{name} on {one.num_slices} × {one.topology}: {parameters / 1e9:.2f} billion, ", end=""
    )
    print(f"  {len(entries)} candidates in {cpu:.1f} s of CPU; MaxText: {one.theirs}")
    state, flops = 12 * parameters / devices / GIB, one.case.flops(parameters) / devices
    print(f"  by hand, for one device: state {state:.2f} GiB, {flops:.4g} flops")
    for each in entries[:4]:
        held = each.prediction.arguments / GIB
        times = ", ".join(f"{part} {seconds:.3f} s" for part, seconds in each.seconds.items())
        print(f"  {each.candidate.name}: arguments {held:.2f} GiB; {times}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planning_by_hand", description=__doc__
    )
    parser.add_argument("--scale", action="store_true", help="plan on 1,024 devices")
    parser.add_argument("--published", action="store_true", help="models that MaxText trains")
    parser.add_argument("--predicted", action="store_true", help="of these, compile nothing")
    parser.add_argument("--cases", nargs="*", help="the names of some of the models")
    parser.add_argument("--devices", nargs="*", default=["16"], help="16, v5e:4x4, v5p:2x2x4, …")
    parser.add_argument("--strategies", nargs="*", default=["dp", "zero1", "fsdp", "fsdp + tensor"])
    parser.add_argument("--most", type=int, default=4)
    parser.add_argument("--cache", help="a folder for reports")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # JAX would look for TPUs
    kept: dict[str, Any] = {"most": options.most, "cache_dir": options.cache}
    for name, one in PUBLISHED.items() if options.published else ():
        if not options.cases or name in options.cases:
            where = {"topology": one.topology, "num_slices": one.num_slices}
            if options.predicted:
                predict(name, one)
                continue
            on = f"{name} on {one.num_slices} × {one.topology}"
            search(on, one.case, one.theirs, strategies=one.strategies, **where, **kept)
    cases = {} if options.published else SCALE if options.scale else CASES
    for devices in ["1024"] if options.scale and options.devices == ["16"] else options.devices:
        where = {"devices": int(devices)} if devices.isdigit() else {"topology": devices}
        where |= {"hardware": HARDWARE["TPU v5p"]} if devices.isdigit() else {}
        for name, case in cases.items():
            if not options.cases or name in options.cases:
                on = f"{name} on {devices}"
                search(on, case, strategies=options.strategies, **where, **kept)


if __name__ == "__main__":
    main()
