"""Which ways to train compose: all pairs of them in a training step, against one device.

``python tests/combinations.py`` runs all pairs, and writes the table of ``docs/combinations.md``.
With names of ways it runs the pairs of these, and keeps the others.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from nnx_sharding import accumulate_gradients, remat, stack, value_and_grad
from nnx_sharding.experimental import context_parallel, dispatch_to_experts, expert_parallel
from nnx_sharding.partition import fsdp, make_mesh, pipeline, replicated, tensor_parallel, zero1
from nnx_sharding.training import offload
from zoo import WIDTH, Block, Tied, assert_trains_alike, cross_entropy, layer, step_of

PAGE = Path(__file__).parents[1] / "docs" / "combinations.md"
BEGIN, END = "<!-- written by tests/combinations.py -->\n", "<!-- end -->\n"

WAYS = {
    "data": "`replicated`",
    "fsdp": "`fsdp`",
    "zero1": "`zero1`",
    "tensor": "`tensor_parallel`",
    "sequence": "`tensor_parallel(sequence=True)`",
    "context": "`context_parallel`",
    "pipeline": "`pipeline`",
    "1F1B": '`pipeline(schedule="1f1b")`',
    "experts": "`expert_parallel`",
    "prefetch": "`fsdp(prefetch=1)`",
    "accumulation": "`accumulate_gradients`",
    "remat": "`remat`",
    "offload": "`offload`",
    "Stack": "`stack`",
    "Auto": "Auto axes",
    "Explicit": "Explicit axes",
}
STAGED = {"pipeline", "1F1B"}
AXES = {"context": {"context"}, "stage": STAGED, "expert": {"experts"}}
CELLS = [*itertools.combinations_with_replacement(WAYS, 2)]


class Recomputed(nnx.Module):
    """A layer of a list with ``remat``."""

    def __init__(self, inner):
        self.inner = inner

    @remat
    def __call__(self, x):
        return self.inner(x)


class Experts(nnx.Module):
    """Residual experts, to which tokens are sent; each takes two of eight."""

    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = nnx.Linear(WIDTH, 8, use_bias=False, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), (8, WIDTH, 2 * WIDTH)))
        self.down = nnx.Param(init(rngs.params(), (8, 2 * WIDTH, WIDTH)))

    def __call__(self, x):
        weights, indices = jax.lax.top_k(nnx.softmax(self.router(x)), 2)
        y, _ = dispatch_to_experts(x, weights, indices, self.experts, num_experts=8)
        return x + y

    def experts(self, rows, matmul):
        return matmul(nnx.tanh(matmul(rows, self.up[...])), self.down[...])


@functools.cache
def model_of(attends: bool, dispatches: bool, stacked: bool, lean: bool):
    """What makes a language model of four layers."""
    mlp = Experts if dispatches else Block

    def make(rngs):
        blocks = [layer(rngs, mlp=mlp) if attends else mlp(rngs) for _ in range(4)]
        if stacked:
            return stack(blocks, remat=lean)
        return nnx.List(map(Recomputed, blocks) if lean else blocks)

    return functools.partial(Tied, blocks=make)


def mesh_of(ways):
    sizes = {"data": 2}
    if ways & {"tensor", "sequence"} or ways >= {"Auto", "Explicit"}:
        sizes["model"] = 2
    sizes |= {axis: 2 for axis, need in AXES.items() if ways & need}
    explicit = {} if "Explicit" not in ways else {"data"} if "Auto" in ways else {*sizes}
    kinds = [AxisType.Explicit if axis in explicit else AxisType.Auto for axis in sizes]
    return make_mesh(sizes, kinds, devices=jax.devices()[: math.prod(sizes.values())])


def sharding_of(ways, model, optimizer, mesh):
    """The sharding of the model, and that of the optimizer."""
    found, options = None, {"mesh": mesh, "optimizer": optimizer}
    if "model" in mesh.shape:
        found = tensor_parallel(model, sequence="sequence" in ways, **options)
    if "context" in ways:
        found = context_parallel(model, base=found, **options)
    if "experts" in ways:
        found = expert_parallel(model, base=found, **options)
    if ways & {"fsdp", "prefetch"}:
        found = fsdp(model, base=found, min_size=0, prefetch=int("prefetch" in ways), **options)
    if ways & STAGED:
        schedule = "1f1b" if "1F1B" in ways else "gpipe"
        found = pipeline(model, base=found, microbatches=2, schedule=schedule, **options)
    if "zero1" in ways:
        found = zero1(model, base=found, min_size=0, **options)
    found = found or replicated(model, **options)
    return found, offload(found, optimizer, mesh=mesh) if "offload" in ways else found


def run(*pair: str) -> str | None:
    """Compares steps with those of one device; returns the error if there is a typed one."""
    ways = {*pair}
    attends, stacked = "context" in ways, bool(ways & {"Stack", "prefetch", *STAGED})
    gradient = value_and_grad(cross_entropy)
    if ways & {"accumulation", "1F1B"}:  # which has gradients nowhere else
        gradient = accumulate_gradients(cross_entropy, steps=2)
    rows = ("data", "expert") if "experts" in ways else "data"
    spec = P(rows, "context") if attends else P(rows)
    options = {"loss": cross_entropy, "step": step_of(gradient, fetches=True), "spec": spec}
    strategy = functools.partial(sharding_of, ways)
    try:
        make = model_of(attends, "experts" in ways, stacked, "remat" in ways)
        assert_trains_alike(make, strategy, mesh_of(ways), **options)
    except ValueError as error:
        return " ".join(str(error).split())
    return None


def recorded() -> dict[tuple[str, str], str | None]:
    """Returns what the page says of each pair: its error, or None."""
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    errors = re.findall(r"^\| (\w+), (\w+) \| (.*) \|$", text, re.MULTILINE)
    return dict.fromkeys(CELLS) | {(first, second): error for first, second, error in errors}


def main(*chosen: str) -> None:
    """Writes the table of pairs that fail; with names of ways, runs only the pairs of these."""
    known = recorded()
    for pair in CELLS:
        if not chosen or {*pair} & {*chosen}:
            known[pair] = run(*pair)
            print(*pair, known[pair] or "✓", flush=True)
    failing = {pair: error for pair, error in known.items() if error}
    rows = [f"| {', '.join(pair)} | {error} |\n" for pair, error in failing.items()]
    table = "".join(["| ways | error |\n| --- | --- |\n", *rows])
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
