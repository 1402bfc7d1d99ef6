"""How a seeded fault is written, and how the checker is asked about it.

A fault is a function with a flag, so that a program with it and its right twin differ in one
expression. Where it is decides in which program it runs:

    layer_on_shards   in a ``shard_map`` in the module ``model.mid``
    layer             in that module, around its ``shard_map``
    loss_on_shards    in a ``shard_map`` after the model
    step_on_shards    in a training step that is a ``shard_map``
    step              anywhere else

Each program runs in four surroundings, which differ in the mesh, in the types of its axes, and in
how the layers around the fault are sharded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType

from nnx_sharding import shard_map
from nnx_sharding.partition import fsdp, replicated, tensor_parallel
from nnx_sharding.testing import assert_same
from zoo import P, mesh_of

ROWS, LENGTH, WIDTH, WORDS = 8, 8, 16, 16
LAYER = r"model\.mid \(Layer\)"
OUTSIDE = "outside of modules"


class Surroundings(NamedTuple):
    """A mesh, and how the layers are sharded that Flax computes."""

    sizes: dict[str, int]
    types: str  # of the axes: auto or explicit
    strategy: Callable[..., Any]

    @property
    def mesh(self):
        return mesh_of((*self.sizes.values(),), (*self.sizes,), self.types)


def fsdp_and_tensor(model, mesh, optimizer=None):
    base = tensor_parallel(model, mesh=mesh, optimizer=optimizer)
    return fsdp(model, mesh=mesh, optimizer=optimizer, min_size=0, base=base)


SURROUNDINGS = {
    "data parallel": Surroundings({"data": 4, "model": 2}, "auto", replicated),
    "fsdp": Surroundings({"data": 2, "model": 2}, "auto", functools.partial(fsdp, min_size=0)),
    "tensor": Surroundings({"data": 2, "model": 4}, "auto", tensor_parallel),
    "fsdp and tensor": Surroundings({"data": 2, "model": 2}, "explicit", fsdp_and_tensor),
}


class Program(NamedTuple):
    """What is compared with one device."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    shardings: tuple[Any, ...]
    steps: int = 1


class Fault(NamedTuple):
    """A kind of fault."""

    name: str
    kind: str  # of the table on the page
    complaint: Callable[[bool, Surroundings], str]  # about the faulty program, or the right one
    where: str  # what the complaint begins with, after its head: a regular expression
    tool: str


FAULTS: dict[str, Fault] = {}


def add_fault(function, kind, complaint, where, tool="assert_same"):
    name = function.__name__.replace("_", " ")
    assert name not in FAULTS, name
    FAULTS[name] = Fault(name, kind, complaint, where, tool)
    return function


def add_program(function, kind, build, where):
    """Adds a fault that `assert_same` finds in a program."""

    def complaint(is_wrong, around):
        step, args, shardings, steps = build(is_wrong, around)
        options = {"shardings": shardings, "mesh": around.mesh, "steps": steps}
        try:
            assert_same(step, *args, **options)
        except AssertionError as error:
            _, *lines = str(error).split("\n  ", 1)  # without the head
            return lines[0] if lines else str(error)
        return ""

    return add_fault(function, kind, complaint, where)


def on_shards(function, specs, out):
    """A `shard_map` without JAX's check of replication, which would find some of the faults."""

    def call(*args):
        if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
            args = map(jax.sharding.reshard, args, specs)
        return jax.shard_map(function, in_specs=specs, out_specs=out, check_vma=False)(*args)

    return call


class Layer(nnx.Module):
    """The part that is written by hand: a function of an array and of weights."""

    def __init__(self, function, shapes=()):
        self.function = function
        self.weights = nnx.List(
            nnx.Param(normal(7 + i, *shape) / shape[0] ** 0.5) for i, shape in enumerate(shapes)
        )

    def __call__(self, x):
        return self.function(x, *(weight[...] for weight in self.weights))


class Net(nnx.Module):
    """Layers of Flax around one that is written by hand, or around none."""

    def __init__(self, mid=None):
        rngs = nnx.Rngs(0)
        self.up, self.mid = nnx.Linear(WIDTH, WIDTH, rngs=rngs), mid
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = jnp.tanh(self.up(x))
        return self.out(x if self.mid is None else self.mid(x))


class WordNet(nnx.Module):
    """A layer of words that is written by hand, and one of Flax."""

    def __init__(self, mid):
        self.mid, self.out = mid, nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, words):
        return self.out(jnp.tanh(self.mid(words)))


def square_error(model, x):
    target = x if x.ndim == 3 else x[..., None] / WORDS
    return ((model(x) - target) ** 2).mean()


def train_with(loss):
    """A step of training."""

    def train(model, optimizer, *batch):
        value, gradients = nnx.value_and_grad(loss)(model, *batch)
        optimizer.update(model, gradients)
        return value

    return train


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


NUMBERS = normal(1, ROWS, LENGTH, WIDTH)
WORD_IDS = jax.random.randint(jax.random.key(2), (ROWS, LENGTH), 0, WORDS)
# Rows have 1 to 8 words, so the shards of the batch have unequally many.
MASK = jnp.arange(LENGTH) <= jnp.arange(ROWS)[:, None]


def training(step, around, model, *batch, steps=1):
    """The program that trains a model."""
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    sharding = around.strategy(model, mesh=around.mesh, optimizer=optimizer)
    shardings = sharding, sharding, *(P("data") for _ in batch)
    return Program(step, (model, optimizer, *batch), shardings, steps)


def evaluation(loss, around, model, *batch, steps=1):
    """The program that evaluates a model, which compiles in a third of the time."""
    sharding = around.strategy(model, mesh=around.mesh)
    return Program(loss, (model, *batch), (sharding, *(P("data") for _ in batch)), steps)


def layer(kind, *shapes, words=False, is_trained=False, where=LAYER):
    """Adds a fault in a layer: a function that returns that of the layer.

    Args:
      kind: the kind of fault.
      *shapes: of the layer's weights.
      words: whether the layer takes words, or numbers.
      is_trained: whether the fault is in gradients.
      where: what the checker has to name.
    """

    def add(function):
        def build(is_wrong, around):
            mid = Layer(function(is_wrong), shapes)
            model, batch = (WordNet(mid), WORD_IDS) if words else (Net(mid), NUMBERS)
            if is_trained:
                return training(train_with(square_error), around, model, batch)
            return evaluation(square_error, around, model, batch)

        return add_program(function, kind, build, where)

    return add


def layer_on_shards(kind, x, out, *weights, **options):
    """Adds a fault in a layer: a function of the shards of its input and its weights.

    Args:
      kind: the kind of fault.
      x: the spec of the layer's input.
      out: the spec of its output.
      *weights: the shape of each weight, and its spec.
      **options: of :func:`layer`.
    """
    specs = (x, *(spec for _, spec in weights))

    def add(function):
        def make(is_wrong):
            return on_shards(functools.partial(function, is_wrong), specs, out)

        make.__name__ = function.__name__
        layer(kind, *(shape for shape, _ in weights), **options)(make)
        return function

    return add


def loss_on_shards(kind, outputs, batch, *, with_words=False):
    """Adds a fault in a loss: a function of the shards of the model's outputs, and of the batch.

    Args:
      kind: the kind of fault.
      outputs: the spec of the outputs.
      batch: the spec of the mask, or of the words.
      with_words: whether the function takes words, or the mask.
    """

    def add(function):
        def build(is_wrong, around):
            local = on_shards(functools.partial(function, is_wrong), (outputs, batch), P())
            loss = lambda model, x, batch: local(model(x), batch)  # noqa: E731
            return evaluation(loss, around, Net(), NUMBERS, WORD_IDS if with_words else MASK)

        return add_program(function, kind, build, OUTSIDE)

    return add


def step_on_shards(kind, where=OUTSIDE, steps=1):
    """Adds a fault in a training step that runs in one `shard_map`, with replicated parameters."""

    def add(function):
        def build(is_wrong, around):
            def descend(model, x):
                specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
                return shard_map(functools.partial(function, is_wrong), **specs)(model, x)

            # On Explicit axes, the types of the parameters would have to be those of `in_specs`.
            strategy = replicated if around.types == "explicit" else around.strategy
            sharding = strategy(model := Net(), mesh=around.mesh)
            return Program(descend, (model, NUMBERS), (sharding, P("data")), steps)

        return add_program(function, kind, build, where)

    return add


def step(kind, where=OUTSIDE):
    """Adds any other fault: a function that returns the program."""
    return lambda build: add_program(build, kind, build, where)


class Verdict(NamedTuple):
    """What a tool says of one program."""

    text: str  # empty if it has nothing to say
    is_named: bool  # whether it begins with the place of the fault


def check(name, around, is_wrong):
    """Asks the tool about a faulty program, or about its right twin."""
    fault = FAULTS[name]
    text = fault.complaint(is_wrong, SURROUNDINGS[around])
    return Verdict(text, bool(re.match(fault.where, text)))
