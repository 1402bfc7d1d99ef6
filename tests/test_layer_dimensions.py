"""Strategies never shard the dimensions of stacked layers, wherever ``vmap`` put them."""

from __future__ import annotations

import functools
import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

from nnx_sharding import StateAxes, eval_shape, jit, scan, vmap
from nnx_sharding.partition import fsdp, sharded_init, specs_by_path, tensor_parallel
from nnx_sharding.partition.variables import variables
from nnx_sharding.report import check_sharding
from zoo import STRATEGIES, WIDTH, P, assert_trains_alike, mesh_of

# Of what a layer adds. Up to 128 blocks run in a row: with 1, they amplify the rounding of the sums
# in another order to 0.3 % of the gradients.
SHARE = 1 / 8


class Own(nnx.Module):
    """A user's class, which tells no shapes."""

    def __init__(self, rngs):
        self.table = nnx.Param(rngs.normal((24, WIDTH)) / 8)

    def __call__(self, x):
        return jnp.tanh(x @ self.table[...].T) @ self.table[...]


LAYERS = {
    "linear": lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs),
    "without bias": lambda rngs: nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs),
    "general": lambda rngs: nnx.LinearGeneral(WIDTH, (WIDTH,), rngs=rngs),
    "norm": lambda rngs: nnx.LayerNorm(WIDTH, rngs=rngs),
    "lora": lambda rngs: nnx.LoRA(WIDTH, 4, WIDTH, rngs=rngs),
    "attention": lambda rngs: nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs),
    "own": Own,
}


class Block(nnx.Module):
    def __init__(self, kinds, rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.inner = nnx.List([LAYERS[kind](rngs) for kind in kinds])
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        for layer in self.inner:
            added = layer(x[:, None])[:, 0] if _is_attention(layer) else layer(x)
            x = x + SHARE * added
        return x + SHARE * self.down(jnp.tanh(self.up(x)))


def _is_attention(layer):
    return isinstance(layer, nnx.MultiHeadAttention)


class Case(NamedTuple):
    """A stack of blocks, or of stacks of them, and how it is sharded."""

    kinds: tuple[str, ...]
    axes: tuple[int, ...]  # of Params: the dimension of layers, from the outer stack to the inner
    lengths: tuple[int, ...]
    mapping: Any  # ours or Flax's
    strategy: str
    axis_type: AxisType

    @classmethod
    def drawn(cls):
        depth = random.choice((1, 1, 2))
        return cls(
            tuple(random.choices([*LAYERS], k=random.choice((0, 1, 2)))),
            tuple(random.choice((0, 1, 1, -1)) for _ in range(depth)),
            tuple(random.sample((2, 4, 8, WIDTH), depth)),
            random.choice((vmap, nnx.vmap)),
            random.choice(NAMES),
            random.choice((AxisType.Auto, AxisType.Explicit)),
        )

    def make(self, rngs=None, level=0):
        """The blocks below one level of stacks."""
        rngs = nnx.Rngs(0) if rngs is None else rngs
        if level == len(self.axes):
            return Block(self.kinds, rngs)
        kind = StateAxes if self.mapping is vmap else nnx.StateAxes
        axes = kind({nnx.Param: self.axes[level], ...: 0})
        make = self.mapping(lambda rngs: self.make(rngs, level + 1), in_axes=(0,), out_axes=axes)
        return nnx.split_rngs(splits=self.lengths[level])(make)(rngs)

    def call(self, layers, x, level=0):
        if level == len(self.axes):
            return layers(x)
        axes = StateAxes({nnx.Param: self.axes[level], ...: 0})
        run = scan(
            lambda x, inner: self.call(inner, x, level + 1),
            in_axes=(nnx.Carry, axes),
            out_axes=nnx.Carry,
        )
        return run(x, layers)

    def dimensions(self, rank):
        """The dimensions of layers of a Param of this rank."""
        found: list[int] = []
        for inner, axis in enumerate(reversed(self.axes), start=rank - len(self.axes) + 1):
            axis %= inner
            found = [axis, *(d + (d >= axis) for d in found)]
        return found


NAMES = ("fsdp", "tensor", "both", "zero1 both")


def unsharded(case, tree, sharding):
    """Checks that no Param, and no state of one, is sharded along a dimension of layers."""
    for each in variables(tree):
        if len(each.shape or ()) >= len(case.axes) and "count" not in each.path:
            spec = sharding.find(each.path, each.variable)[1]
            entries = (*spec.partitions, *[None] * len(each.shape))
            for d in case.dimensions(len(each.shape)):
                assert entries[d] is None, (case, each.path, each.shape, spec)


def check_shardings(case):
    """Checks the specs of all that a strategy shards, from shapes alone."""
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=(case.axis_type,) * 2)
    model = nnx.eval_shape(case.make)
    optimizer = nnx.eval_shape(lambda: nnx.Optimizer(case.make(), optax.adam(1e-3), wrt=nnx.Param))
    sharding = STRATEGIES[case.strategy](model, mesh=mesh, optimizer=optimizer)
    unsharded(case, model, sharding)
    unsharded(case, optimizer, sharding)
    specs = [sharding.find(each.path, each.variable)[1] for each in variables(optimizer)]
    assert any(spec != P() for spec in specs), case


class Nested(nnx.Module):
    """The layers of a case, which run as it says."""

    def __init__(self, case):
        self.layers, self.case = case.make(), case

    def __call__(self, x):
        return self.case.call(self.layers, x.reshape(-1, WIDTH))


def check_numbers(case):
    """Compares a step with one device; each block adds to the same sum."""
    mesh = mesh_of((2, 4), ("data", "model"), (case.axis_type,) * 2)
    strategy, tx = STRATEGIES[case.strategy], optax.sgd(1.0)
    assert_trains_alike(lambda _: Nested(case), strategy, mesh, tx=tx, steps=1, rtol=1e-3)


def test_specs():
    """They need no devices, so many are drawn."""
    for _ in range(6):
        check_shardings(Case.drawn())


@pytest.mark.parametrize("number", range(150))
def test_drawn(number):
    case = Case.drawn()
    check_shardings(case)
    check_numbers(case)


def test_as_much_is_sent_as_with_layers_in_front():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sent = []
    for axis in (0, 1):
        case = Case(("linear", "norm"), (axis,), (8,), vmap, "both", AxisType.Auto)
        sharding = STRATEGIES["both"](eval_shape(case.make), mesh=mesh)
        layers = sharded_init(case.make, sharding, mesh)
        step = jit(case.call, in_shardings=(sharding, P("data")), mesh=mesh)
        collectives = step.lower(layers, jnp.ones((8, WIDTH))).compile().collectives()
        sent.append(sorted((x.kind, x.axes, x.bytes, x.times) for x in collectives))
    assert sent[0] == sent[1]


class Named(nnx.Module):
    """Only classes of the user's, whose dimension of layers has a declared name."""

    def __init__(self, rngs):
        self.table = nnx.Param(
            rngs.normal((8, WIDTH)), out_sharding=(None, "out"), eager_sharding=False
        )


@pytest.mark.parametrize("mapping", [vmap, nnx.vmap])
def test_a_declared_name(mapping):
    @nnx.split_rngs(splits=64)
    def make(rngs):
        return mapping(Named, out_axes=1, transform_metadata={nnx.PARTITION_NAME: "layers"})(rngs)

    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    assert STRATEGIES["fsdp"](model, mesh=mesh).map_prefix(("table",), model.table) == P(
        None, None, "data"
    )


def test_what_is_not_known_is_not_sharded():
    @nnx.split_rngs(splits=8)
    def make(rngs):
        linear = lambda rngs: nnx.Linear(8, 3, use_bias=False, rngs=rngs)  # noqa: E731
        return vmap(linear, out_axes=1)(rngs)

    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    for strategy in (STRATEGIES["fsdp"], functools.partial(tensor_parallel, axis="data")):
        [row] = check_sharding(model, strategy(model, mesh=mesh), mesh).rows
        assert "one of the dimensions (0, 1)" in row.reason


def test_subclasses_that_do_not_call_the_constructor_of_flax():
    """They lack the sizes that a layer of Flax has as attributes."""

    class Dense(nnx.Linear):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones((8, 16)))

    class Norm(nnx.LayerNorm):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones(16))

    mesh, model = jax.sharding.AbstractMesh((2,), ("model",)), nnx.Dict(up=Dense(), norm=Norm())
    for sharding in (
        fsdp(model, mesh=mesh, axis="model", min_size=0),
        tensor_parallel(model, mesh=mesh),
    ):
        assert {*specs_by_path(model, sharding).values()} == {P(None, "model"), P()}


# Layers of Flax with parameters; containers of layers have none of their own.
FLAX_LAYERS = {
    "BatchNorm": lambda rngs: nnx.BatchNorm(8, rngs=rngs),
    "Conv": lambda rngs: nnx.Conv(4, 8, 3, rngs=rngs),
    "ConvTranspose": lambda rngs: nnx.ConvTranspose(4, 8, (3, 3), rngs=rngs),
    "Einsum": lambda rngs: nnx.Einsum("bi,ihd->bhd", (4, 2, 8), (2, 8), rngs=rngs),
    "Embed": lambda rngs: nnx.Embed(16, 8, rngs=rngs),
    "GRUCell": lambda rngs: nnx.GRUCell(4, 8, rngs=rngs),
    "GroupNorm": lambda rngs: nnx.GroupNorm(8, num_groups=2, rngs=rngs),
    "GroupNorm of a size": lambda rngs: nnx.GroupNorm(8, num_groups=None, group_size=2, rngs=rngs),
    "InstanceNorm": lambda rngs: nnx.InstanceNorm(8, rngs=rngs),
    "LSTMCell": lambda rngs: nnx.LSTMCell(4, 8, rngs=rngs),
    "LayerNorm": lambda rngs: nnx.LayerNorm(8, rngs=rngs),
    "Linear": lambda rngs: nnx.Linear(4, 8, rngs=rngs),
    "LinearGeneral": lambda rngs: nnx.LinearGeneral(4, (2, 8), rngs=rngs),
    "LoRA": lambda rngs: nnx.LoRA(4, 2, 8, rngs=rngs),
    "LoRALinear": lambda rngs: nnx.LoRALinear(4, 8, lora_rank=2, rngs=rngs),
    "MultiHeadAttention": lambda rngs: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs),
    "OptimizedLSTMCell": lambda rngs: nnx.OptimizedLSTMCell(4, 8, rngs=rngs),
    "PReLU": lambda rngs: nnx.PReLU(),
    "RMSNorm": lambda rngs: nnx.RMSNorm(8, rngs=rngs),
    "SimpleCell": lambda rngs: nnx.SimpleCell(4, 8, rngs=rngs),
    "SpectralNorm": lambda rngs: nnx.SpectralNorm(nnx.Linear(4, 8, rngs=rngs), rngs=rngs),
    "WeightNorm": lambda rngs: nnx.WeightNorm(nnx.Linear(4, 8, rngs=rngs), rngs=rngs),
}


@pytest.mark.parametrize("name", FLAX_LAYERS)
def test_all_layers_of_flax(name):
    """A layer alone has no dimension of layers; where ``vmap`` stacks three, it is the first."""
    layer = nnx.eval_shape(lambda: FLAX_LAYERS[name](nnx.Rngs(0)))
    shapes = {each.path: each.shape for each in variables(layer)}
    assert all(each.layer_shape == each.shape for each in variables(layer))
    stack = nnx.split_rngs(splits=3)(vmap(FLAX_LAYERS[name]))
    stacked = nnx.eval_shape(lambda: stack(nnx.Rngs(0)))
    for each in variables(stacked):
        if isinstance(each.variable, nnx.Param) and shapes[each.path]:
            assert each.layer_shape == shapes[each.path], each.path
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    make_optimizer = lambda model: nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)  # noqa: E731
    optimizer = nnx.eval_shape(make_optimizer, stacked)
    for strategy in ("fsdp", "tensor", "both", "zero1"):
        sharding = STRATEGIES[strategy](stacked, mesh=mesh, optimizer=optimizer)
        for each in variables(stacked):
            spec = sharding.find(each.path, each.variable)[1]
            assert spec == P() or spec.partitions[:1] == (None,), (each.path, spec)


def test_all_layers_of_flax_are_listed():
    layers = {
        name
        for name, kind in vars(nnx).items()
        if isinstance(kind, type)
        and issubclass(kind, nnx.Module)
        and kind.__module__.startswith("flax.nnx.nn.")
    }
    containers = {
        "Bidirectional",
        "Dropout",
        "Identity",
        "RNN",
        "RNNCellBase",
        "RoPE",
        "Sequential",
    }
    assert layers - containers <= {name.split()[0] for name in FLAX_LAYERS}
