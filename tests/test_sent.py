"""What a program with a strategy sends is what the compiler sends with the same shardings.

A step is compiled twice: by :func:`~nnx_sharding.jit` with what a strategy returned, and by
``jax.jit`` on Auto axes with the same shardings of arguments and results. The bytes that a device
sends over each set of mesh axes may only exceed those of the compiler with a warning that names the
module.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_sharding
from nnx_sharding import jit, value_and_grad
from nnx_sharding.analysis import collectives_of
from nnx_sharding.errors import UnshardedWarning
from nnx_sharding.partition import (
    from_rules,
    fsdp,
    override,
    replicated,
    specs_by_path,
    tensor_parallel,
)

ROWS, LENGTH, WIDTH, VOCABULARY = 16, 32, 32, 512
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


class OwnCache(nnx.Variable):
    """A Variable class of the user's."""


class Model(nnx.Module):
    """A language model with, perhaps, a memory for each row."""

    def __init__(self, kind, rngs):
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)
        self.memory = None if kind is None else kind(jnp.zeros((ROWS, WIDTH)))

    def __call__(self, tokens):
        x = self.tokens(tokens)
        x = x + self.down(jax.nn.gelu(self.up(x)))
        if self.memory is not None:
            x = x + self.memory[...][:, None]
            self.memory[...] = jax.lax.stop_gradient(x.mean(1))
        return self.head(x)

    def loss(self, tokens):
        return loss_of(self(tokens), tokens)


def loss_of(logits, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[..., :-1, :], tokens[..., 1:])
    return losses.mean()


STRATEGIES = {
    "replicated": replicated,
    "tensor_parallel": tensor_parallel,
    "sequence": lambda model, mesh: tensor_parallel(model, mesh=mesh, sequence=True),
    "fsdp": lambda model, mesh: fsdp(model, mesh=mesh, min_size=0),
    "both": lambda model, mesh: fsdp(
        model, mesh=mesh, min_size=0, base=tensor_parallel(model, mesh=mesh)
    ),
    "from_rules": lambda model, mesh: from_rules(
        {"(up|head)/kernel": P(None, "model"), "down/kernel": P("model")}, default=P()
    ),
}
TYPES = {
    "auto": (AUTO, AUTO),
    "explicit": (EXPLICIT, EXPLICIT),
    "rows explicit": (EXPLICIT, AUTO),
    "columns explicit": (AUTO, EXPLICIT),
}
KINDS = {"parameters": None, "cache": nnx.Cache, "own": OwnCache, "statistics": nnx.BatchStat}
PLACES = ("method", "function", "step")
MAPS = {"whole": None, "jax.vmap": jax.vmap, "vmap": nnx_sharding.vmap}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One program: its strategy, axis types, kind of Variables, and where the loss is."""

    strategy: str
    types: str
    kind: str
    place: str  # of the loss
    map: str
    trains: bool

    @property
    def is_possible(self):
        """Rows that are mapped share the memory, which a call cannot change.

        ``sequence`` shards activations, too, and the mean over the sequence in a memory.
        """
        return self.kind == "parameters" or (self.map == "whole" and self.strategy != "sequence")


CELLS = [
    cell
    for values in itertools.product(STRATEGIES, TYPES, KINDS, PLACES, MAPS, (False, True))
    if (cell := Cell(*values)).is_possible
]


def step_of(cell, differentiate):
    """The step of a cell, with ours or Flax's ``value_and_grad``."""
    map_ = MAPS[cell.map]

    def by_rows(method):
        if map_ is None:
            return method
        if map_ is jax.vmap:
            return lambda model, tokens: jax.vmap(lambda row: method(model, row))(tokens)
        return nnx_sharding.vmap(method, in_axes=(None, 0))

    def outside(model, tokens):
        return loss_of(by_rows(lambda model, x: model(x))(model, tokens), tokens)

    def method(model, tokens):
        return by_rows(lambda model, x: model.loss(x))(model, tokens).mean()

    loss = method if cell.place == "method" else outside

    def step(model, tokens):
        if not cell.trains:
            return loss(model, tokens)
        if cell.place == "step":
            found, grads = differentiate(lambda model: loss(model, tokens))(model)
        else:
            found, grads = differentiate(loss)(model, tokens)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
        return found

    return step


def sent(text, mesh):
    """The bytes that a device sends over each set of axes."""
    return collectives_of(text, mesh).by_axes()


def compare(cell):
    """What ours and the compiler's own program send, and the warnings of ours."""
    devices = jax.devices()[:8]
    mesh = jax.make_mesh((2, 4), ("data", "model"), TYPES[cell.types], devices=devices)
    auto = jax.make_mesh((2, 4), ("data", "model"), (AUTO, AUTO), devices=devices)
    model = nnx.eval_shape(lambda: Model(KINDS[cell.kind], nnx.Rngs(0)))
    sharding = STRATEGIES[cell.strategy](model, mesh=mesh)
    if cell.kind != "parameters":
        sharding = override(sharding, {"memory": P("data")})
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        shardings = {"in_shardings": (sharding, P("data")), "out_shardings": P()}
        ours = jit(step_of(cell, value_and_grad), mesh=mesh, donate_argnums=0, **shardings)
        ours = sent(ours.lower(model, tokens).compile().as_text(), mesh)

    graphdef, state = nnx.split(model)
    specs = specs_by_path(model, sharding)
    flat = nnx.to_flat_state(state)
    placed = nnx.from_flat_state(
        (path, variable.replace(NamedSharding(auto, specs[path]))) for path, variable in flat
    )

    def plain(state, tokens):
        model = nnx.merge(graphdef, state)
        return step_of(cell, nnx.value_and_grad)(model, tokens), nnx.state(model)

    rows, everywhere = NamedSharding(auto, P("data")), NamedSharding(auto, P())
    compiled = jax.jit(
        plain, in_shardings=(placed, rows), out_shardings=(everywhere, placed), donate_argnums=0
    )
    theirs = sent(compiled.lower(state, tokens).compile().as_text(), auto)
    return ours, theirs, [w for w in seen if issubclass(w.category, UnshardedWarning)]


def check(cell):
    ours, theirs, seen = compare(cell)
    if sum(ours.values()) > 1.05 * sum(theirs.values()):
        assert any("model: f32[" in str(w.message) for w in seen), (cell, ours, theirs)


@pytest.mark.parametrize("strategy", ["tensor_parallel", "both"])
def test_some(strategy):
    check(random.choice([cell for cell in CELLS if cell.strategy == strategy]))


NIGHTLY = 300


def test_many():
    """Of all cells, 300 are drawn."""
    for cell in random.sample(CELLS, NIGHTLY):
        check(cell)


@pytest.mark.parametrize("types", ["explicit", "columns explicit"])
def test_only_a_loss_outside_of_the_model_is_warned_of(types):
    for place, count in {"method": 0, "function": 1}.items():
        *_, seen = compare(Cell("tensor_parallel", types, "parameters", place, "whole", True))
        assert len(seen) == count, place


@pytest.mark.parametrize("types", TYPES)
def test_no_cache_of_the_users_is_gathered(types):
    ours, theirs, _ = compare(Cell("tensor_parallel", types, "own", "method", "whole", False))
    assert ours == theirs


def mapped_in(step, types, strategy="tensor_parallel"):
    """The results of a step of rows, jitted with a strategy, and in eager Python."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), TYPES[types])
    model, tokens = Model(None, nnx.Rngs(0)), jnp.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 11
    shardings = STRATEGIES[strategy](model, mesh=mesh), P("data")
    with warnings.catch_warnings(action="ignore", category=UnshardedWarning):
        found = jit(step, in_shardings=shardings, mesh=mesh)(Model(None, nnx.Rngs(0)), tokens)
    return jax.tree.leaves(found), jax.tree.leaves(step(model, tokens))


MAPPED = {
    "jax.vmap": lambda model, x: jax.vmap(model)(x),
    "nnx.vmap": lambda model, x: nnx.vmap(lambda m, row: m(row), in_axes=(None, 0))(model, x),
    "vmap": lambda model, x: nnx_sharding.vmap(lambda m, row: m(row), in_axes=(None, 0))(model, x),
    "gradient of vmap": lambda model, x: nnx_sharding.grad(lambda m: jax.vmap(m.loss)(x).mean())(
        model
    ),
    "vmap of gradient": lambda model, x: jax.vmap(
        lambda row: nnx_sharding.grad(lambda m: m.loss(row))(model)
    )(x),
    "vmap of remat": lambda model, x: jax.vmap(
        lambda row: nnx_sharding.grad(nnx_sharding.remat(lambda m: m.loss(row)))(model)
    )(x),
    "vmap of jit": lambda model, x: jax.vmap(lambda row: jit(lambda m: m.loss(row))(model))(x),
}


def test_our_vmap_takes_unmapped_parameters_that_layers_gather():
    """As an argument, JAX refuses them."""
    found, expected = mapped_in(MAPPED["vmap"], "explicit", "both")
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("types", ["explicit", "rows explicit"])
@pytest.mark.parametrize("name", MAPPED)
def test_models_of_one_row_are_mapped_over_sharded_rows(name, types):
    """On Explicit axes JAX adds the mapped axes to each spec."""
    found, expected = mapped_in(MAPPED[name], types)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
