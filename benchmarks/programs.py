"""Times a training step of each program in ``tests/programs``: ``python -m benchmarks.programs``.

With ``flax.nnx.jit`` and with ours, on one device; the loop waits for the loss of each step.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"


def main() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path.insert(0, str(TESTS))
    import programs

    parser = argparse.ArgumentParser(prog="python -m benchmarks.programs", description=__doc__)
    parser.add_argument("names", nargs="*", default=programs.NAMES, help="default: all")
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    print(f"{'program':<10} {'arrays':>7} {'nnx.jit':>9} {'ours':>9}  ratio   milliseconds")
    for name in options.names:
        arrays, stock, ours = _measure(programs.PROGRAMS[name], options.repeats)
        print(f"{name:<10} {arrays:>7} {stock:>9.2f} {ours:>9.2f} {stock / ours:>6.1f}", flush=True)


def _measure(program: Any, repeats: int) -> tuple[int, float, float]:
    """The number of arrays, and milliseconds of a step by each of both."""
    import jax
    from flax import nnx

    import nnx_sharding

    from .measure import time_calls
    from .ways import NNX_JIT, OURS

    def way(jit: Callable[..., Any]) -> Callable[[], Any]:
        objects, steps = program.make(), itertools.count()
        step = jit(program.train_step, **getattr(program, "OPTIONS", {}))
        batches = [program.batch(i) for i in range(8)]
        return lambda: step(*objects, *batches[next(steps) % 8])

    ways = {NNX_JIT: way(nnx.jit), OURS: way(nnx_sharding.jit)}
    figures = time_calls(ways, repeats, NNX_JIT, [OURS], compare=False).ready
    arrays = len(jax.tree.leaves(nnx.state(program.make())))
    return arrays, figures[NNX_JIT].median / 1e3, figures[OURS].median / 1e3


if __name__ == "__main__":
    main()
