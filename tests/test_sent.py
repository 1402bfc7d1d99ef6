"""What a program with a strategy sends is what plain JAX sends with the same shardings.

A step is compiled by :func:`~nnx_sharding.jit` with what a strategy returned, and by ``jax.jit`` on
Auto axes with the same shardings of arguments and results. An all-reduce counts as the
reduce-scatter and the all-gather that it consists of. Two rules hold, within 5 % of the total:

* Of each kind over each set of axes, a device sends no more bytes than in a program that says by
  hand what the strategy promises: ``fsdp`` gathers parameters where a layer uses them, and
  ``sequence=True`` keeps sums sharded by their sequence (on Explicit axes also outputs by their
  columns). Other strategies promise nothing, so theirs is the compiler's own program.
* In total, it sends no more than the compiler's own program, which has the same shardings and
  nothing said by hand. ``fsdp`` trades kinds for that: it gathers parameters over ``data``, where
  the compiler moves activations over both axes, twice as many bytes. ``sequence=True`` is left out,
  because it trades bytes for memory.

An :class:`~nnx_sharding.errors.UnshardedWarning` excuses all-gathers over the axes that it names.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
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
import zoo
from nnx_sharding import jit, value_and_grad
from nnx_sharding.analysis import collectives_of
from nnx_sharding.errors import UnshardedWarning
from nnx_sharding.partition import (
    from_rules,
    override,
    specs_by_path,
    tensor_parallel,
)

ROWS, LENGTH, WIDTH, VOCABULARY = 16, 32, 32, 512
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


class OwnCache(nnx.Variable):
    """A Variable class of the user's."""


class Model(nnx.Module):
    """A language model with, perhaps, a memory for each row.

    ``layer`` and ``stream`` are where plain JAX says by hand what a strategy says.
    """

    def __init__(self, kind, rngs):
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)
        self.memory = None if kind is None else kind(jnp.zeros((ROWS, WIDTH)))

    def __call__(self, tokens):
        x = self.layer("tokens")(tokens)
        x = x + self.stream(self.layer("down")(jax.nn.gelu(self.layer("up")(x))))
        if self.memory is not None:
            x = x + self.memory[...][:, None]
            self.memory[...] = jax.lax.stop_gradient(x.mean(1))
        return self.layer("head")(x)

    def layer(self, name):
        return getattr(self, name)

    def stream(self, x):
        return x

    def logits(self, tokens):
        return self(tokens)

    def loss(self, tokens):
        return loss_of(self(tokens), tokens)


def loss_of(logits, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[..., :-1, :], tokens[..., 1:])
    return losses.mean()


NAMES = ("replicated", "tensor", "sequence", "fsdp", "both")
STRATEGIES = {name: zoo.STRATEGIES[name] for name in NAMES} | {
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


def mesh_of(types):
    return zoo.mesh_of((2, 4), ("data", "model"), types)


def sharding_of(cell, model, mesh):
    sharding = STRATEGIES[cell.strategy](model, mesh=mesh)
    return sharding if cell.kind == "parameters" else override(sharding, {"memory": P("data")})


def model_of(cell, kind=Model):
    return nnx.eval_shape(lambda: kind(KINDS[cell.kind], nnx.Rngs(0)))


TOKENS = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)


def sent(compiled, mesh):
    """The bytes that a device sends, by kind and axes; of an all-reduce in its two halves."""
    sizes = collections.Counter()
    for (kind, axes), (_, size) in collectives_of(compiled.as_text(), mesh).totals().items():
        for half in HALVES.get(kind, (kind,)):
            sizes[half, axes] += size / len(HALVES.get(kind, (kind,)))
    return +sizes


HALVES = {"all-reduce": ("reduce-scatter", "all-gather")}


def ours(cell):
    """What a step with the library's functions sends, and the warnings."""
    mesh, model = mesh_of(TYPES[cell.types]), model_of(cell)
    shardings = (sharding_of(cell, model, mesh), P("data")), P()
    names = dict(zip(("in_shardings", "out_shardings"), shardings, strict=True))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step = jit(step_of(cell, value_and_grad), mesh=mesh, donate_argnums=0, **names)
        compiled = step.lower(model, TOKENS).compile()
    return sent(compiled, mesh), [w for w in seen if issubclass(w.category, UnshardedWarning)]


def unsaid(mesh, specs):
    """All is left to the compiler."""
    return Model


def gathering(mesh, specs):
    """Parameters are gathered over ``data`` where a layer uses them, as ``fsdp`` says."""

    class Gathering(Model):
        def layer(self, name):
            graphdef, state = nnx.split(getattr(self, name))
            gathered = nnx.from_flat_state(
                (path, variable.replace(self.whole(variable[...], specs[name, *path])))
                for path, variable in nnx.to_flat_state(state)
            )
            return nnx.merge(graphdef, gathered)

        def whole(self, x, spec):
            kept = P(*(None if entry == "data" else entry for entry in spec))
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, kept))

    return Gathering


def by_sequence(mesh, specs):
    """Sums over ``model`` are kept sharded by their sequence, as ``sequence=True`` says."""

    class BySequence(Model):
        def stream(self, x):
            return constrained(x, mesh, P(P.UNCONSTRAINED, "model", P.UNCONSTRAINED))

    return BySequence


def by_columns(mesh, specs):
    """On Explicit axes, outputs are also kept sharded like the columns of their kernel."""

    class ByColumns(by_sequence(mesh, specs)):
        def layer(self, name):
            layer, spec = getattr(self, name), P(P.UNCONSTRAINED, P.UNCONSTRAINED, "model")
            return (
                layer if name in ("tokens", "down") else lambda x: constrained(layer(x), mesh, spec)
            )

    return ByColumns


def constrained(x, mesh, spec):
    if x.ndim < len(spec):  # a row in a map, which a strategy leaves alone
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def by_hand(cell):
    """The model that says what the strategy promises."""
    if cell.strategy == "sequence":
        return by_columns if TYPES[cell.types][1] is EXPLICIT else by_sequence
    return gathering if cell.strategy in ("fsdp", "both") else unsaid


@functools.cache
def plain(cell, kind):
    """What a step of plain JAX and Flax sends, with the same shardings on Auto axes."""
    mesh, model = mesh_of((AUTO, AUTO)), model_of(cell)
    specs = specs_by_path(model, sharding_of(cell, model, mesh))
    graphdef, state = nnx.split(model_of(cell, kind(mesh, specs)))
    placed = nnx.from_flat_state(
        (path, variable.replace(NamedSharding(mesh, specs[path])))
        for path, variable in nnx.to_flat_state(state)
    )

    def step(state, tokens):
        model = nnx.merge(graphdef, state)
        return step_of(cell, nnx.value_and_grad)(model, tokens), nnx.state(model)

    rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    shardings = {"in_shardings": (placed, rows), "out_shardings": (everywhere, placed)}
    lowered = jax.jit(step, donate_argnums=0, **shardings).lower(state, TOKENS)
    return sent(lowered.compile(), mesh)


@pytest.mark.parametrize("cell", CELLS, ids=repr)
def test_sent(cell):
    sizes, seen = ours(cell)
    alike = dataclasses.replace(cell, types="auto")
    compilers, said = plain(alike, unsaid), plain(alike, by_hand(cell))
    more = {key for key in sizes if sizes[key] - said[key] > 0.05 * said.total()}
    if seen:  # of an output that is gathered over the columns' axis
        [text] = {str(w.message) for w in seen}
        assert "model: f32[" in text, (cell, text)
        assert "over 'model'" in text, (cell, text)
        more.discard(("all-gather", ("model",)))
    elif cell.strategy != "sequence":
        assert sizes.total() <= 1.05 * compilers.total(), (cell, sizes, compilers)
    assert not more, (cell, more, sizes, said)


@pytest.mark.parametrize("types", TYPES)
def test_a_sequence_is_what_is_said_by_hand(types):
    """Axes that are Auto around the model stay the compiler's in it."""
    test_sent(Cell("sequence", types, "parameters", "method", "whole", True))


@pytest.mark.parametrize("types", ["explicit", "columns explicit"])
def test_only_a_loss_outside_of_the_model_is_warned_of(types):
    for place, count in {"method": 0, "function": 1}.items():
        _, seen = ours(Cell("tensor", types, "parameters", place, "whole", True))
        assert len(seen) == count, place


@pytest.mark.parametrize("types", TYPES)
def test_no_cache_of_the_users_is_gathered(types):
    cell = Cell("tensor", types, "own", "method", "whole", False)
    assert ours(cell)[0] == plain(dataclasses.replace(cell, types="auto"), unsaid)


class Logits(nnx.Module):
    """What a function may return logits in."""

    def __init__(self, logits):
        self.logits = nnx.Variable(logits)


def with_logits(model, tokens):
    logits = model(tokens)
    return loss_of(logits, tokens), logits


# Programs that return logits. Where the rows are in another trace, the logits are gathered first.
RETURNED = {
    "alone": lambda model, x: model(x),
    "in a tuple": lambda model, x: (model(x), x.sum())[:1],
    "in a module": lambda model, x: Logits(model(x)),
    "of a method": lambda model, x: model.logits(x),
    "jit": lambda model, x: jit(lambda m, x: m(x), out_shardings=LOGITS)(model, x),
}
MOVED = {
    "beside a loss": lambda model, x: with_logits(model, x)[1],
    "has_aux": lambda model, x: value_and_grad(with_logits, has_aux=True)(model, x)[0][1],
    "remat": lambda model, x: nnx_sharding.remat(lambda m, x: m(x))(model, x),
    "vmap": lambda model, x: jax.vmap(model)(x),
    "scan": lambda model, x: jax.lax.map(model, x[None])[0],
    "cast": lambda model, x: model(x).astype(float),
}
LOGITS, LOGITS_CELL = P("data", None, "model"), Cell("", "", "parameters", "", "", False)


TOKENS_OF_ROWS = jnp.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 11


def jit_of_logits(name, mesh, spec):
    shardings = tensor_parallel(model_of(LOGITS_CELL), mesh=mesh), P("data")
    return jit((RETURNED | MOVED)[name], mesh=mesh, in_shardings=shardings, out_shardings=spec)


@pytest.mark.parametrize("types", ["explicit", "rows explicit", "columns explicit"])
@pytest.mark.parametrize("name", RETURNED)
def test_returned_logits_are_not_gathered(name, types):
    """With the sharding that the head gives them, a function sends what it sends on Auto axes."""

    def sent_on(types):
        mesh = mesh_of(TYPES[types])
        with jax.set_mesh(mesh):
            lowered = jit_of_logits(name, mesh, LOGITS).lower(model_of(LOGITS_CELL), TOKENS)
        return sent(lowered.compile(), mesh)

    with warnings.catch_warnings(action="error"):
        assert sent_on(types) == sent_on("auto")


@pytest.mark.parametrize("name", [*RETURNED, *MOVED])
def test_returned_logits_are_right(name):
    mesh, model = mesh_of((EXPLICIT, EXPLICIT)), Model(None, nnx.Rngs(0))
    tokens = TOKENS_OF_ROWS
    expected = model(tokens)
    with warnings.catch_warnings(action="ignore", category=UnshardedWarning), jax.set_mesh(mesh):
        for spec in (LOGITS, P("data")):
            [found] = jax.tree.leaves(jit_of_logits(name, mesh, spec)(model, tokens))
            assert found.sharding.spec == spec
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", [P("data"), LOGITS], ids=["whole", "sharded"])
def test_what_is_declared_for_the_head_holds_for_the_model(spec):
    """The model returns the array of its head, and operations after it get that."""
    mesh, model = mesh_of((EXPLICIT, EXPLICIT)), Model(None, nnx.Rngs(0))
    seen = []

    def used(model, tokens):
        logits = model(tokens)
        seen.append(jax.typeof(logits).sharding.spec)
        return (logits**2).mean()

    shardings = tensor_parallel(model, mesh=mesh), P("data")
    expected = used(model, TOKENS_OF_ROWS)
    options = {"in_shardings": shardings, "activation_shardings": {"head": spec}, "strict": True}
    with jax.set_mesh(mesh):
        found = jit(used, mesh=mesh, **options)(model, TOKENS_OF_ROWS)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert seen[-1] == P(*spec, *[None] * (3 - len(spec)))


def mapped_in(step, types, strategy="tensor"):
    """The results of a step of rows, jitted with a strategy, and in eager Python."""
    mesh, model, tokens = mesh_of(TYPES[types]), Model(None, nnx.Rngs(0)), TOKENS_OF_ROWS
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
