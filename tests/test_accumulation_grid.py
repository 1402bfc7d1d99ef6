"""Accumulated gradients against those of one device, for all kinds of meshes, rows and specs."""

from __future__ import annotations

import functools
import itertools
import os
import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding

from nnx_sharding import StateSharding, accumulate_gradients, jit, stack, value_and_grad
from nnx_sharding.partition import fsdp, replicated, tensor_parallel, zero1
from nnx_sharding.specs.filters import Paths
from zoo import LENGTH, WIDTH, WORDS, GroupedQuery, Mixture, P, Tied, assert_close, mesh_of, normal

ROWS = 32


class Dense(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 16, rngs=rngs)
        self.down = nnx.LinearGeneral(16, (4, 4), rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x))).reshape(x.shape)


class Einsum(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Einsum("btd,dh->bth", (WIDTH, 16), (16,), rngs=rngs)
        self.down = nnx.Einsum("...h,hd->...d", (16, WIDTH), rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


class Norms(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.rms = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.group = nnx.GroupNorm(WIDTH, num_groups=2, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.out(self.rms(self.layer(x)) + self.group(x))


class BatchNorm(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.norm(self.up(x)))


class Convolution(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(WIDTH, 16, (3,), rngs=rngs)
        self.back = nnx.ConvTranspose(16, WIDTH, (1,), rngs=rngs)

    def __call__(self, x):
        return self.back(jnp.tanh(self.conv(x)))


class Raw(nnx.Module):
    """Parameters that are added and multiplied in a module."""

    def __init__(self, rngs):
        self.position = nnx.Param(normal(1, 1, LENGTH, WIDTH))
        self.scale = nnx.Param(normal(2, WIDTH))
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.out(x + self.position[...]) * self.scale[...]


class Outside(nnx.Module):
    """Parameters that the loss uses outside of modules."""

    def __init__(self, rngs):
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.temperature = nnx.Param(jnp.asarray(1.5))
        self.shift = nnx.Param(normal(3, WIDTH))

    def __call__(self, x):
        return self.out(x)


class OwnEmbed(nnx.Embed):
    """One with a Variable besides its table."""

    def __init__(self, *args, rngs):
        super().__init__(*args, rngs=rngs)
        self.shift = nnx.Param(normal(6, WIDTH))


class Embeddings(nnx.Module):
    def __init__(self, rngs):
        self.tokens = OwnEmbed(WORDS, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, ids):
        return self.out(self.tokens(ids) + self.positions(jnp.arange(ids.shape[1]), None))


class Scaled(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.scale = nnx.Param(normal(4, WIDTH))

    def __call__(self, x):
        return x + self.up(self.norm(x)) * self.scale[...]


def squares(model, x):
    return jnp.mean(model(x) ** 2)


def decayed(model, x):
    y = model(x) / model.temperature[...] + model.shift[...]
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    return jnp.mean(y**2) + 0.01 * sum((p**2).sum() for p in leaves)


MODELS: dict[str, Any] = {
    **{
        kind.__name__: kind
        for kind in (Dense, Einsum, Norms, BatchNorm, Convolution, GroupedQuery, Mixture, Raw)
    },
    **{kind.__name__: kind for kind in (Outside, Embeddings, Tied)},
    "Stack": lambda rngs: stack(Scaled, 3, rngs=rngs),
    "remat": lambda rngs: stack(Scaled, 2, rngs=rngs, remat=True),
}
STRATEGIES = (
    "replicated",
    "fsdp first",
    "fsdp last",
    "fsdp both",
    "tp",
    "zero1",
    "own",
    "one spec",
)
MESHES = {"8": ((8,), ("a",)), "24": ((2, 4), ("a", "b")), "222": ((2, 2, 2), ("a", "b", "c"))}


class Case(NamedTuple):
    """What is drawn; ``explicit`` are the axes of that type."""

    mesh: str
    explicit: tuple[str, ...]
    rows: tuple[str, ...]
    strategy: str
    model: str
    steps: int
    named: bool  # whether the axes of the rows are named

    @property
    def axis(self):
        return self.rows if self.named else None


def all_cases():
    """Each surrounding with each model, under two strategies, in place of all combinations.

    All 25,000 took more than an hour. Strategies and numbers of steps take turns, so that each
    pair of a model and a strategy is tried with each number, in about 20 surroundings.
    """
    surroundings = []
    for mesh, (_, names) in MESHES.items():
        explicits = [x for n in range(len(names) + 1) for x in itertools.combinations(names, n)]
        rows = [*((a,) for a in names[:2]), *itertools.permutations(names[:2], 2)]
        for explicit, row in itertools.product(explicits, dict.fromkeys(rows)):
            for named in {False, not set(row) <= set(explicit)}:
                surroundings.append((mesh, explicit, row, named))
    for turn, (mesh, explicit, row, named) in enumerate(surroundings):
        for number, model in enumerate(MODELS):
            for half in (0, 1):
                strategy = STRATEGIES[(turn + 3 * number + half * len(STRATEGIES) // 2) % 8]
                steps = (1, 2, 4)[(turn + number + half) % 3]
                yield Case(mesh, explicit, row, strategy, model, steps, named)


def loss_of(case):
    return decayed if case.model == "Outside" else squares


@functools.cache
def batch_of(model):
    ids = np.random.default_rng(0).integers(0, WORDS, (ROWS, LENGTH)).astype(np.int32)
    return ids if model in ("Embeddings", "Tied") else np.asarray(normal(5, ROWS, LENGTH, WIDTH))


def made(case):
    return MODELS[case.model](nnx.Rngs(0))


@functools.cache
def expected(model, steps):
    """The gradient on one device; of the whole batch, unless a model has statistics of it."""
    case = Case("", (), (), "", model, steps, named=False)
    loss = loss_of(case)
    gradient = value_and_grad(loss)
    if model == "BatchNorm":
        gradient = accumulate_gradients(loss, steps=steps)
    return jax.device_get(nnx.jit(gradient)(made(case), batch_of(model)))


def sharding_of(case, model, optimizer, mesh):
    names = mesh.axis_names
    by_name = {
        "replicated": lambda: replicated(model),
        "zero1": lambda: zero1(model, mesh=mesh, axis=case.rows, min_size=0, optimizer=optimizer),
        "fsdp first": lambda: fsdp(model, mesh=mesh, axis=case.rows[0], min_size=0),
        "fsdp last": lambda: fsdp(model, mesh=mesh, axis=names[-1], min_size=0),
        "fsdp both": lambda: fsdp(model, mesh=mesh, axis=case.rows, min_size=0),
        "tp": lambda: tensor_parallel(model, mesh=mesh, axis=names[-1]),
        "own": lambda: own_specs(case, model, mesh),
        "one spec": lambda: P(),
    }
    return by_name[case.strategy]()


def own_specs(case, model, mesh):
    """Each parameter sharded over one axis or two, along any dimension, or not at all."""
    draw, specs = random.Random(repr(case)), {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        shape, entries = jnp.shape(variable[...]), [None] * jnp.ndim(variable[...])
        axes = draw.sample(mesh.axis_names, draw.randint(0, len(mesh.axis_names)))
        for axis in axes:
            fits = [
                d for d, n in enumerate(shape) if entries[d] is None and n % mesh.shape[axis] == 0
            ]
            if fits:
                entries[draw.choice(fits)] = axis
        specs[Paths([path])] = P(*entries)
    return StateSharding({**specs, ...: P()})


def run(case, gradient):
    shape, names = MESHES[case.mesh]
    types = tuple(AxisType.Explicit if name in case.explicit else AxisType.Auto for name in names)
    mesh, model = mesh_of(shape, names, types), made(case)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    sharding, rows = sharding_of(case, model, optimizer, mesh), P(case.rows)
    batch = jax.device_put(batch_of(case.model), NamedSharding(mesh, rows))
    if case.strategy != "zero1":
        return jax.device_get(jit(gradient, in_shardings=(sharding, rows), mesh=mesh)(model, batch))

    @jit(in_shardings=(sharding, sharding, rows), mesh=mesh)
    def step(model, optimizer, batch):
        value, new = gradient(model, batch)
        optimizer.update(model, new)
        return value, new

    return jax.device_get(step(model, optimizer, batch))


def check(case):
    """Compares the gradient; returns the error if JAX refuses that of the whole batch, too."""
    try:
        found = run(case, accumulate_gradients(loss_of(case), steps=case.steps, axis=case.axis))
    except Exception as error:
        try:
            run(case, value_and_grad(loss_of(case)))
        except Exception as other:
            return f"{type(error).__name__}: {error}", f"{type(other).__name__}: {other}"
        raise AssertionError(f"only accumulate_gradients refuses {case}") from error
    want = expected(case.model, case.steps)
    assert jax.tree.structure(found) == jax.tree.structure(want), case
    assert_close(found, want, 1e-3, 1e-5, f"{case} ")
    return None


SEED = os.environ["NNX_SHARDING_TEST_SEED"]


# A look-up on a mesh whose other axes are Auto.
ONCE_WRONG = [Case("222", (), ("b", "a"), "one spec", "Embeddings", 2, named=True)]


DRAWN = random.Random(SEED).sample([*all_cases()], 160)  # more than a night has time for


@pytest.mark.parametrize("case", [*ONCE_WRONG, *DRAWN], ids=repr)
def test_gradients(case):
    check(case)
