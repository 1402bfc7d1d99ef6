"""Judges plans by running them: all candidates that ``plan`` ranks, on the devices at hand.

``python -m benchmarks.planning`` calibrates the devices (8 virtual ones on a CPU), plans training
steps of five small models with these figures, and runs each compiled candidate in rounds in which
all take turns, in another order each time. It prints the rank correlation of estimated and measured
times (Spearman's), and the time of the best by the plan over that of the fastest.

The best is run twice in each round, as two programs that are equal: the difference of these is
noise. Both figures have the interval in which they are for 90 % of draws from the rounds; if that
contains the bar, noise forbids a verdict.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from nnx_sharding import jit, stack
from nnx_sharding.analysis import Hardware
from nnx_sharding.partition import make_mesh, sharded_init
from nnx_sharding.placement import place
from nnx_sharding.planning import calibrate, plan
from nnx_sharding.planning.candidates import Candidate
from nnx_sharding.planning.plan import PlanningResult

from .planning_by_hand import Config, Decoder, train_step

CORRELATION, RATIO = 0.6, 1.10  # the bars
DRAWS = 1000  # of rounds, for the intervals
AGAIN = "the best, again"


class Perceptron(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        widths = [512, 1024, 1024, 256]
        self.layers = nnx.List(
            [nnx.Linear(*pair, rngs=rngs) for pair in itertools.pairwise(widths)]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


class ConvNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        channels = [3, 32, 64, 128]
        self.convs = nnx.List(
            [
                nnx.Conv(a, b, (3, 3), 2 if a > 3 else 1, rngs=rngs)
                for a, b in itertools.pairwise(channels)
            ]
        )
        self.head = nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for conv in self.convs:
            x = nnx.relu(conv(x))
        return self.head(x.mean((1, 2)))


class LongBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(64, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(8, 64, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.relu(self.up(x)))


class LongContext(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(512, 64, rngs=rngs)
        self.blocks = stack(LongBlock, 2, rngs=rngs)
        self.head = nnx.Linear(64, 512, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.blocks(self.tokens(tokens)))


FLOAT32: dict[str, Any] = {"dtype": jnp.float32, "remat": False}
DENSE = Config(256, 704, 8, 8, 4, 2048, batch=16, context=64, **FLOAT32)
MIXTURE = Config(128, 256, 8, 8, 2, 1024, batch=16, context=64, experts=8, **FLOAT32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and a batch of inputs and labels by their shapes."""

    model: Callable[[nnx.Rngs], nnx.Module]
    inputs: tuple[int, ...]
    labels: tuple[int, ...]
    dtype: Any = jnp.int32  # of the inputs
    strategies: tuple[str, ...] | None = None  # None for all that apply

    def make(self) -> tuple[Any, Any]:
        """Makes the model and its optimizer."""
        model = self.model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Makes inputs and labels."""
        return np.ones(self.inputs, self.dtype), np.ones(self.labels, np.int32)


CASES = {
    "MLP": Case(Perceptron, (256, 512), (256,), np.float32),
    "language model": Case(lambda rngs: Decoder(DENSE, rngs), (16, 64), (16, 64)),
    "ConvNet": Case(ConvNet, (32, 32, 32, 3), (32,), np.float32),
    "MoE": Case(lambda rngs: Decoder(MIXTURE, rngs), (16, 64), (16, 64)),
    "long context": Case(LongContext, (2, 1024), (2, 1024)),
}


def run(case: Case, found: PlanningResult, rounds: int) -> dict[str, np.ndarray]:
    """Runs all candidates in rounds; returns the seconds of each round, by name."""
    best = found.best
    assert best is not None
    steps = {name: prepare(case, each) for name, each in found.candidates.items()}
    steps[AGAIN] = prepare(case, best)
    times: dict[str, list[float]] = {name: [] for name in steps}
    order, random = [*steps], np.random.default_rng(0)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            times[name].append(steps[name]())
    del steps
    gc.collect()
    return {name: np.array(x) for name, x in times.items()}


def prepare(case: Case, candidate: Candidate) -> Callable[[], float]:
    """Compiles a candidate; returns what runs it and gives the seconds of a step."""
    mesh, options = make_mesh(candidate.sizes), {"donate_argnums": (0, 1)}
    shardings = candidate.in_shardings
    with jax.set_mesh(mesh):
        model, optimizer = sharded_init(case.make, shardings[:2], mesh)
        batch = [place(x, spec, mesh) for x, spec in zip(case.batch(), shardings[2:], strict=True)]
        step = jit(train_step, in_shardings=shardings, mesh=mesh, **options)

    def seconds(calls: int = 2) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            loss = step(model, optimizer, *batch)
        jax.block_until_ready((loss, nnx.state(model)))
        return (time.perf_counter() - start) / calls

    seconds()
    return seconds


def correlation(estimates: np.ndarray, times: np.ndarray) -> float:
    """Spearman's rank correlation; equal estimates have the mean of their ranks."""

    def ranks(x: np.ndarray) -> np.ndarray:
        return (x[:, None] > x).sum(1) + (x[:, None] == x).sum(1) / 2

    return float(np.corrcoef(ranks(estimates), ranks(times))[0, 1])


@dataclasses.dataclass(frozen=True)
class Judged:
    """A figure, in what interval it is for 90 % of draws from the rounds, and its bar."""

    figure: float
    draws: Sequence[float]
    is_at_least: Callable[[float], bool]  # whether a value reaches the bar

    def __str__(self) -> str:
        low, high = np.nanpercentile(self.draws, [5, 95])
        reached = {self.is_at_least(low), self.is_at_least(high)}
        verdict = "noise forbids a verdict"
        if len(reached) == 1:
            verdict = "reached" if reached == {True} else "missed"
        return f"{self.figure:.2f} ({low:.2f} to {high:.2f}), {verdict}"


def judge(
    estimates: Mapping[str, float], best: str, times: Mapping[str, np.ndarray]
) -> Iterator[str]:
    """Yields the figures of a plan by the times of its candidates, as lines."""
    names = [*estimates]
    estimated = np.array([estimates[name] for name in names])
    measured = np.array([times[name] for name in names])  # (candidates, rounds)
    again = times[AGAIN]

    def figures(chosen: np.ndarray) -> tuple[float, float]:
        typical = np.median(measured[:, chosen], axis=1)
        # The mean of the two equal programs has less noise.
        of_best = (typical[names.index(best)] + np.median(again[chosen])) / 2
        return correlation(estimated, typical), float(of_best / min(*typical, of_best))

    rounds = measured.shape[1]
    random = np.random.default_rng(0)
    draws = [figures(random.integers(rounds, size=rounds)) for _ in range(DRAWS)]
    (correlated, ratio), (correlations, ratios) = (
        figures(np.arange(rounds)),
        zip(*draws, strict=True),
    )
    noise = abs(np.median(again) / np.median(times[best]) - 1)
    in_rounds = np.percentile(abs(again / times[best] - 1), 90)
    yield f"rank correlation {Judged(correlated, correlations, lambda x: x >= CORRELATION)}"
    yield f"best over fastest {Judged(ratio, ratios, lambda x: x <= RATIO)}"
    yield f"noise: equal programs differ by {noise:.0%}, in a round by up to {in_rounds:.0%}"


def report(name: str, case: Case, hardware: Hardware, most: int, rounds: int) -> None:
    """Plans a model, runs the candidates, and prints what both say."""
    args = *nnx.eval_shape(case.make), *map(jax.typeof, case.batch())
    found = plan(
        train_step, *args, devices=jax.device_count(), hardware=hardware, most=most,
        strategies=case.strategies, memory_limit="1 TiB", donate_argnums=(0, 1), quiet=True,
    )  # fmt: skip
    start = time.perf_counter()
    times = run(case, found, rounds)
    reports = found.comparison.compiled
    rooflines = {each: reports[each].roofline for each in found.candidates if each in reports}
    estimates = {each: x.estimate for each, x in rooflines.items() if x is not None and x.estimate}
    print(f"\n{name}: {len(estimates)} candidates, {time.perf_counter() - start:.0f} s")
    for each, estimate in estimates.items():
        roofline, low = rooflines[each], min(times[each])
        parts = ", ".join(f"{part} {1e3 * (x or 0):.2f}" for part, x in roofline.times.items())
        waits = (
            f"busy {1e3 * (roofline.busy_s or 0):.2f}, waits {1e3 * (roofline.exposed_s or 0):.2f}"
        )
        measured = f"{1e3 * float(np.median(times[each])):.2f} ms (least {1e3 * low:.2f})"
        print(f"  {each}: estimated {1e3 * estimate:.2f} ms ({parts}; {waits}), took {measured}")
    assert found.best is not None
    print(*(f"  {line}" for line in judge(estimates, found.best.name, times)), sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--cases", nargs="*", default=[*CASES], help="the names of some models")
    parser.add_argument("--most", type=int, default=8, help="candidates that are compiled")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--hardware", help="a file of Hardware.save, not to calibrate again")
    options = parser.parse_args()
    # Read when the first device is asked for, which no import does; only CPUs obey it.
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    hardware = Hardware.load(options.hardware) if options.hardware else calibrate(dtype=jnp.float32)
    print(hardware, f"load of the machine: {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")
    for name in options.cases:
        report(name, CASES[name], hardware, options.most, options.rounds)


if __name__ == "__main__":
    main()
