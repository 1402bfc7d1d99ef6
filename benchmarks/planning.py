"""Judges plans by running them: all candidates that ``plan`` ranks, on the devices at hand.

``python -m benchmarks.planning`` calibrates the devices (8 virtual ones on a CPU), plans training
steps of five small models with these figures and with ``measure=3``, and runs each compiled
candidate in rounds in which all take turns, in another order each time. It prints the rank
correlation of estimated and measured times (Spearman's), and over the time of the fastest the time
of the best by its roofline, and of the best of the three that ``plan`` has measured by itself.

The best by its roofline is run twice in each round, as two programs that are equal: the difference
of these is noise. All figures have the interval in which they are for 90 % of draws from the
rounds; if that contains the bar, noise forbids a verdict.
"""

from __future__ import annotations

import argparse
import dataclasses
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

from nnx_sharding import stack
from nnx_sharding.analysis import Hardware
from nnx_sharding.planning import calibrate, plan
from nnx_sharding.planning.measuring import Runner, run_in_rounds
from nnx_sharding.planning.plan import PlanningResult
from nnx_sharding.report.comparison import Failure

from .planning_by_hand import Config, Decoder, train_step

CORRELATION, RATIO = 0.6, 1.10  # the bars
DRAWS = 1000  # of rounds, for the intervals
OPTIONS = {"donate_argnums": (0, 1)}
AGAIN = "the best by its roofline, again"


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

    def abstract(self) -> tuple[Any, ...]:
        """Makes the model, its optimizer, the inputs and the labels, as shapes only."""
        inputs = jax.ShapeDtypeStruct(self.inputs, self.dtype)
        return (*nnx.eval_shape(self.make), inputs, jax.ShapeDtypeStruct(self.labels, jnp.int32))


CASES = {
    "MLP": Case(Perceptron, (256, 512), (256,), np.float32),
    "language model": Case(lambda rngs: Decoder(DENSE, rngs), (16, 64), (16, 64)),
    "ConvNet": Case(ConvNet, (32, 32, 32, 3), (32,), np.float32),
    "MoE": Case(lambda rngs: Decoder(MIXTURE, rngs), (16, 64), (16, 64)),
    # No power of two: rows of 4096 bytes begin in one set of a CPU's first cache, and transposing a
    # block of (1024, 1024) took 204 ms where its bytes take 11, and that of (960, 960) takes 12.
    "long context": Case(LongContext, (2, 960), (2, 960)),
}


def run(found: PlanningResult, args: Sequence[Any], rounds: int) -> dict[str, np.ndarray]:
    """Runs all candidates in rounds; returns the seconds of each round, by name."""
    named = {name: found.candidates[name] for name in found.comparison.compiled}
    named[AGAIN] = found.candidates[best_by_roofline(found)]
    runners = {name: Runner.of(each, train_step, args, OPTIONS) for name, each in named.items()}
    times = {}
    for name, seconds in run_in_rounds(runners, rounds, quiet=True).items():
        if isinstance(seconds, Failure):
            raise RuntimeError(f"{name}: {seconds.error}")
        times[name] = np.array(seconds)
    return times


def best_by_roofline(found: PlanningResult) -> str:
    """Returns the name of the candidate that is the best if none is measured."""
    name = found.comparison.best("roofline")
    assert name is not None
    return name


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
    estimates: Mapping[str, float], bests: Mapping[str, str], times: Mapping[str, np.ndarray]
) -> Iterator[str]:
    """Yields the figures of a plan by the times of its candidates, as lines.

    Args:
      estimates: the seconds by the roofline of each candidate.
      bests: candidates by what they are the best by; the first is the best by its roofline.
      times: the seconds of each candidate in each round.
    """
    names, best = [*estimates], next(iter(bests.values()))
    estimated = np.array([estimates[name] for name in names])
    measured = np.array([times[name] for name in names])  # (candidates, rounds)
    again = times[AGAIN]

    def figures(chosen: np.ndarray) -> tuple[float, ...]:
        """Returns the correlation, and the ratio of each best, of some rounds."""
        typical = np.median(measured[:, chosen], axis=1)
        correlated = correlation(estimated, typical)
        # The mean of the two equal programs has less noise.
        typical[names.index(best)] = (typical[names.index(best)] + np.median(again[chosen])) / 2
        ratios = (typical[names.index(each)] / min(typical) for each in bests.values())
        return correlated, *map(float, ratios)

    rounds = measured.shape[1]
    random = np.random.default_rng(0)
    draws = [figures(random.integers(rounds, size=rounds)) for _ in range(DRAWS)]
    correlated, *ratios = figures(np.arange(rounds))
    drawn_correlations, *drawn_ratios = zip(*draws, strict=True)
    noise = abs(np.median(again) / np.median(times[best]) - 1)
    in_rounds = np.percentile(abs(again / times[best] - 1), 90)
    yield f"rank correlation {Judged(correlated, drawn_correlations, lambda x: x >= CORRELATION)}"
    for by, ratio, drawn in zip(bests, ratios, drawn_ratios, strict=True):
        yield f"best {by} over fastest {Judged(ratio, drawn, lambda x: x <= RATIO)}"
    yield f"noise: equal programs differ by {noise:.0%}, in a round by up to {in_rounds:.0%}"


def report(name: str, case: Case, hardware: Hardware, most: int, measure: int, rounds: int) -> None:
    """Plans a model, runs the candidates, and prints what both say."""
    args = case.abstract()
    found = plan(
        train_step, *args, devices=jax.device_count(), hardware=hardware, most=most,
        measure=measure, strategies=case.strategies, memory_limit="1 TiB", quiet=True, **OPTIONS,
    )  # fmt: skip
    start = time.perf_counter()
    times = run(found, args, rounds)
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
    bests = {"by roofline": best_by_roofline(found), f"with measure={measure}": found.best.name}
    print(*(f"  {line}" for line in judge(estimates, bests, times)), sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--cases", nargs="*", default=[*CASES], help="the names of some models")
    parser.add_argument("--most", type=int, default=8, help="candidates that are compiled")
    parser.add_argument("--measure", type=int, default=3, help="those that plan itself measures")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--hardware", help="a file of Hardware.save, not to calibrate again")
    options = parser.parse_args()
    # Read when the first device is asked for, which no import does; only CPUs obey it.
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    hardware = Hardware.load(options.hardware) if options.hardware else calibrate(dtype=jnp.float32)
    print(hardware, f"load of the machine: {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")
    for name in options.cases:
        report(name, CASES[name], hardware, options.most, options.measure, options.rounds)


if __name__ == "__main__":
    main()
