"""Which ways to train compose: all pairs of them in a training step, against one device.

``python tests/combinations.py`` runs all pairs, and writes the table of ``docs/combinations.md``.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from nnx_sharding import accumulate_gradients, jit, remat, stack, value_and_grad
from nnx_sharding.experimental import context_parallel
from nnx_sharding.partition import fsdp, make_mesh, pipeline, replicated, tensor_parallel, zero1
from nnx_sharding.training import fetched, offload

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
    "prefetch": "`fsdp(prefetch=1)`",
    "accumulation": "`accumulate_gradients`",
    "remat": "`remat`",
    "offload": "`offload`",
    "Stack": "`stack`",
    "Auto": "Auto axes",
    "Explicit": "Explicit axes",
}
AXES = {"context": "context", "stage": "pipeline"}
CELLS = [*itertools.combinations_with_replacement(WAYS, 2)]


class Block(nnx.Module):
    def __init__(self, attends: bool, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(16, rngs=rngs)
        self.up = nnx.Linear(16, 32, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(32, 16, use_bias=False, rngs=rngs)
        self.attention = nnx.data(
            nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs) if attends else None
        )

    def __call__(self, x):
        if self.attention is not None:
            x = x + self.attention(self.norm(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, attends: bool, stacked: bool = False, lean: bool = False):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(4, 16, rngs=rngs)
        blocks = [Block(attends, rngs=rngs) for _ in range(4)]
        self.blocks = stack(blocks, remat=lean) if stacked else nnx.List(blocks)
        self.head = nnx.Linear(16, 4, rngs=rngs)
        self.stacked, self.lean = stacked, lean

    def __call__(self, x):
        x = self.embed(x)
        if self.stacked:
            return self.head(self.blocks(x))
        for block in self.blocks:
            x = remat(Block.__call__)(block, x) if self.lean else block(x)
        return self.head(x)


def loss(model, x):
    return ((model(x) - 1) ** 2).mean()


def train(step, model, optimizer):
    """The losses of two steps, and the weights after them, in the order of a list of blocks."""
    x = jax.random.normal(jax.random.key(0), (8, 4, 4))
    losses = [np.asarray(step(model, optimizer, x)) for _ in range(2)]
    blocks = [*model.blocks] if model.stacked else model.blocks
    weights = [nnx.state(m, nnx.Param) for m in (model.embed, *blocks, model.head)]
    return [*losses, *map(np.asarray, jax.tree.leaves(weights))]


def make(*args):
    model = Model(*args)
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def step_of(gradient):
    def step(model, optimizer, x):
        value, grads = gradient(model, x)
        with fetched(optimizer):
            optimizer.update(model, grads)
        return value

    return step


@functools.cache
def alone(attends):
    return train(jit(step_of(value_and_grad(loss))), *make(attends))


def mesh_of(ways):
    sizes = {"data": 2}
    if ways & {"tensor", "sequence"} or ways >= {"Auto", "Explicit"}:
        sizes["model"] = 2
    sizes |= {axis: 2 for axis, way in AXES.items() if way in ways}
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
    if ways & {"fsdp", "prefetch"}:
        found = fsdp(model, base=found, min_size=0, prefetch=int("prefetch" in ways), **options)
    if "pipeline" in ways:
        found = pipeline(model, base=found, microbatches=2, **options)
    if "zero1" in ways:
        found = zero1(model, base=found, min_size=0, **options)
    found = found or replicated(model, **options)
    return found, offload(found, optimizer, mesh=mesh) if "offload" in ways else found


def run(*pair: str) -> str | None:
    """Compares a step with that of one device; returns the error if there is a typed one."""
    ways = {*pair}
    attends, stacked = "context" in ways, bool(ways & {"Stack", "pipeline", "prefetch"})
    model, optimizer = make(attends, stacked, "remat" in ways)
    mesh = mesh_of(ways)
    try:
        shardings = sharding_of(ways, model, optimizer, mesh)
    except ValueError as error:
        return " ".join(str(error).split())
    gradient = value_and_grad(loss)
    if "accumulation" in ways:
        gradient = accumulate_gradients(loss, steps=2)
    rows = P("data", "context") if attends else P("data")
    step = jit(step_of(gradient), in_shardings=(*shardings, rows), mesh=mesh)
    for found, wanted in zip(train(step, model, optimizer), alone(attends), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    return None


def recorded() -> dict[tuple[str, str], str | None]:
    """What the table says: for each pair, the error or None."""
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    found = re.findall(r"^(\d+)\. (.*(?:\n   .*)*)$", text, re.MULTILINE)
    notes = {number: " ".join(note.split()) for number, note in found}
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if "|" in line
    ]
    cells = {(rows[0][j], row[0]): cell for row in rows[2:] for j, cell in enumerate(row) if j}
    return {pair: None if cells[pair] == "✓" else notes[cells[pair]] for pair in CELLS}


def main() -> None:
    """Writes the table."""
    notes: list[str] = []
    cells = {}
    for pair in CELLS:
        error = run(*pair)
        if error is not None and error not in notes:
            notes.append(error)
        cells[pair] = "✓" if error is None else str(notes.index(error) + 1)
        print(*pair, cells[pair], flush=True)
    names = [*WAYS]
    lines = [["", *names], ["---", *[":-:"] * len(names)]]
    cells |= {(row, column): cell for (column, row), cell in cells.items()}
    lines += [[row, *(cells[column, row] for column in names)] for row in names]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    errors = "\n".join(f"{i}. {note}" for i, note in enumerate(notes, 1))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(
        f"{before}{BEGIN}{table}\n\n{errors}\n{END}{rest.partition(END)[2]}", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
