"""Gradients that XLA computes wrong: in plain JAX, to see when it is mended, and with ours."""

from __future__ import annotations

import functools
import itertools
import random
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import zoo
from nnx_sharding import StateSharding, jit, stack, vmap
from nnx_sharding.core import convolutions
from nnx_sharding.errors import WrongGradientWarning
from nnx_sharding.partition import pipeline, sharded_init
from zoo import assert_close

P, AUTO, EXPLICIT = PartitionSpec, AxisType.Auto, AxisType.Explicit
MENDED = "XLA computes this right now: remove what avoids the fault, and this test"


def mesh_of(*types, shape=(2, 4)):
    return jax.make_mesh(shape, ("data", "model"), axis_types=types)


@functools.cache
def array(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def convolved(kernel, x, groups=8):
    numbers = ("NHC", "HIO", "NHC")
    return jax.lax.conv_general_dilated(
        x, kernel, (1,), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def indexed(kernel, x):
    return x + kernel.at[jnp.arange(x.shape[1])].get(out_sharding=P())


def of_auto_axes(kernel, x):
    return x @ jax.sharding.auto_axes(jnp.tanh, out_sharding=P(None, None))(kernel)


PLAIN = {
    "grouped convolution, Auto": (convolved, (AUTO, AUTO), (3, 1, 8), False),
    "grouped convolution, Explicit": (convolved, (EXPLICIT, EXPLICIT), (3, 1, 8), False),
    "indexed, reduced": (indexed, (EXPLICIT, EXPLICIT), (6, 8), True),
    "on Auto axes, reduced": (of_auto_axes, (EXPLICIT, EXPLICIT), (8, 8), True),
    "product, reduced, mixed axes": (lambda w, x: x @ w, (EXPLICIT, AUTO), (8, 8), True),
}


MIXED = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="not a fault of this release")
NAMES = [pytest.param(name, marks=[MIXED] if "mixed" in name else []) for name in PLAIN]


@pytest.mark.parametrize("name", NAMES)
def test_plain_jax_is_still_wrong(name):
    """The gradient is multiplied by the size of an axis; if this fails, XLA is mended."""
    function, types, shape, reduced = PLAIN[name]
    kernel, x = array(1, *shape), array(2, 8, 6, 8)

    def gradient(kernel, x):
        if reduced:
            kernel = jax.sharding.reshard(kernel, P(reduced={"data"}))
        new = jax.grad(lambda kernel: jnp.sin(function(kernel, x)).sum())(kernel)
        return jax.sharding.reshard(new, P()) if reduced else new

    mesh = mesh_of(*types)
    with jax.set_mesh(mesh):
        here = NamedSharding(mesh, P())
        wrong = jax.jit(gradient)(jax.device_put(kernel, here), jax.device_put(x, P("data")))
    one = {
        "indexed, reduced": lambda w, x: x + w[:6],
        "on Auto axes, reduced": lambda w, x: x @ jnp.tanh(w),
    }
    right = jax.grad(lambda w: jnp.sin(one.get(name, function)(w, x)).sum())(kernel)
    assert not np.allclose(wrong, right, rtol=1e-3, atol=1e-4), MENDED


class Convolutions(nnx.Module):
    """One or two layers of a kind, between a product that fits the channels and a head."""

    def __init__(self, kind, window, options, rngs):
        groups = options.get("feature_group_count", 1)
        self.enter = nnx.Linear(4, 8, rngs=rngs)
        if kind == "raw":
            self.layer = Raw(window, groups, rngs)
        else:
            self.layer = getattr(nnx, kind)(8, 8, window, rngs=rngs, **options)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.sin(self.layer(jnp.sin(self.enter(x)))))


class Raw(nnx.Module):
    """A convolution that is not one of Flax's layers."""

    def __init__(self, window, groups, rngs):
        self.kernel = nnx.Param(rngs.normal((*window, 8 // groups, 8)))
        self.groups = groups

    def __call__(self, x):
        letters = "DHW"[3 - len(self.kernel.shape) + 2 :]
        numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
        return jax.lax.conv_general_dilated(
            x,
            self.kernel[...],
            (1,) * len(letters),
            "SAME",
            dimension_numbers=numbers,
            feature_group_count=self.groups,
        )


def loss(model, x):
    return (model(x) ** 2).mean()


def gradient(model, x):
    return nnx.value_and_grad(loss)(model, x)


def per_example(map_):
    def gradients(model, x):
        one = lambda model, x: nnx.grad(lambda model: loss(model, x[None]))(model)  # noqa: E731
        return map_(one, in_axes=(None, 0))(model, x)

    return gradients


def ensemble(models, x):
    def losses(models):
        return vmap(loss, in_axes=(0, None))(models, x).sum()

    return nnx.value_and_grad(losses)(models)


PROGRAMS = {
    "gradient": gradient,
    "per example": per_example(vmap),
    "per example, Flax": per_example(nnx.vmap),
    "ensemble": ensemble,
    "stack": gradient,
    "pipeline": gradient,
}
STRATEGIES = {
    **{name: zoo.STRATEGIES[name] for name in ("replicated", "fsdp", "tensor", "both")},
    "own": lambda model, mesh: StateSharding({...: P()}),
}
KINDS = ("Conv", "Conv", "ConvTranspose", "raw")


def drawn_layer(keeps_shape):
    """The kind, the window and the options of a layer."""
    kind, dimensions = random.choice(KINDS), random.choice((1, 1, 2, 3))
    window = tuple(random.choice((1, 2, 3, 4)) for _ in range(dimensions))
    options = {}
    if kind != "ConvTranspose":
        options["feature_group_count"] = random.choice((1, 2, 8))
    if kind == "Conv":
        options["kernel_dilation"] = random.choice((1, 2))
        options["padding"] = random.choice(("SAME", "CIRCULAR"))
        if not keeps_shape:
            options["strides"], options["input_dilation"] = random.choice(((1, 1), (2, 1), (1, 2)))
            options["padding"] = window[0] - 1
    if kind == "ConvTranspose":
        options["transpose_kernel"] = random.choice((False, True))
        options["strides"] = 1 if keeps_shape else random.choice((1, 2))
    return kind, window, options


class Case(NamedTuple):
    """A program on a mesh."""

    program: str
    layer: tuple[Any, ...]  # kind, window, options
    strategy: str
    shape: tuple[int, ...]  # of the mesh: data, stage, model
    types: tuple[AxisType, ...]
    size: int  # of each spatial dimension

    @classmethod
    def drawn(cls):
        program = random.choice([*PROGRAMS])
        shape = random.choice(((8, 1, 1), (2, 1, 4), (4, 1, 2), (2, 2, 2)))
        types = random.choice(((AUTO,) * 3, (EXPLICIT,) * 3, (AUTO, EXPLICIT, AUTO)))
        if program == "pipeline":
            shape, types = (2, 2, 2), (types[0],) * 3
        layer = drawn_layer(program in ("stack", "pipeline"))
        return cls(
            program, layer, random.choice([*STRATEGIES]), shape, types, random.choice((1, 4, 6))
        )

    def make(self):
        one = lambda rngs: Convolutions(*self.layer, rngs)  # noqa: E731
        if self.program in ("stack", "pipeline"):
            return stack(one, 2, nnx.Rngs(0))
        if self.program == "ensemble":
            return nnx.split_rngs(splits=3)(vmap(one))(nnx.Rngs(0))
        return one(nnx.Rngs(0))

    def check(self):
        """Compares with one device. JAX may refuse to map sharded rows, but no number is wrong."""
        mesh = jax.make_mesh(self.shape, ("data", "stage", "model"), axis_types=self.types)
        x = array(2, 8, *[self.size] * len(self.layer[1]), 4)
        want = nnx.jit(PROGRAMS[self.program])(self.make(), x)
        abstract = nnx.eval_shape(self.make)
        sharding = STRATEGIES[self.strategy](abstract, mesh=mesh)
        if self.program == "pipeline":
            sharding = pipeline(abstract, mesh=mesh, microbatches=2, base=sharding)
        step = jit(PROGRAMS[self.program], in_shardings=(sharding, P("data")), mesh=mesh)
        try:
            found = step(sharded_init(self.make, sharding, mesh), x)
        except Exception as error:  # JAX's ShardingTypeError derives from nothing narrower
            if EXPLICIT in self.types and REFUSED.search(str(error)):
                return
            raise
        assert_close(found, want, 1e-4, 1e-4, str(self))


# By JAX, which gives each mesh axis to one dimension of a type only.
REFUSED = re.compile(
    "vmapping over|passed to reshard cannot|Please specify the|can map every mesh axis"
    "|JAX cannot know how a module shards"
)
# XLA multiplied or zeroed gradients in these.
FIXED = [
    Case("per example", ("Conv", (3, 3), {}), "replicated", (8, 1, 1), (AUTO,) * 3, 6),
    Case("pipeline", ("Conv", (3,), {}), "fsdp", (2, 2, 2), (EXPLICIT,) * 3, 4),
    Case("pipeline", ("ConvTranspose", (3,), {}), "replicated", (2, 2, 2), (AUTO,) * 3, 4),
    Case("gradient", ("raw", (3,), {"feature_group_count": 8}), "own", (2, 1, 4), (AUTO,) * 3, 6),
    Case(
        "gradient",
        ("Conv", (3,), {"feature_group_count": 8}),
        "replicated",
        (2, 1, 4),
        (AUTO, EXPLICIT, AUTO),
        6,
    ),
]


@pytest.mark.parametrize("case", FIXED, ids=str)
def test_convolution(case):
    case.check()


# Losses outside of the model gather its output on Explicit axes; here only numbers count.
@pytest.mark.filterwarnings("ignore::nnx_sharding.errors.UnshardedWarning")
@pytest.mark.parametrize("number", range(300))
def test_drawn_convolution(number):
    Case.drawn().check()


def test_large_sums_run_in_loops(monkeypatch):
    """A grouped convolution of many terms, with both of its gradients, on several devices."""
    monkeypatch.setattr(convolutions, "_MAX_UNROLLED", 2)
    FIXED[3].check()


def test_a_gradient_around_a_program():
    """The products in an inner program are differentiated as the convolution would be."""
    mesh = mesh_of(AUTO, AUTO)
    model, x = Raw((3,), 8, nnx.Rngs(0)), array(2, 8, 6, 8)

    def penalty(run):
        inner = lambda model, x: jax.grad(lambda x: loss_of(run)(model, x))(x)  # noqa: E731
        return nnx.grad(lambda model, x: (inner(model, x) ** 2).sum())

    def loss_of(run):
        return lambda model, x: jnp.sin(run(model, x)).sum()

    plain = lambda model, x: model(x)  # noqa: E731
    want = penalty(plain)(model, x)
    step = jit(penalty(jit(plain)), in_shardings=(P(), P("data")), mesh=mesh)
    assert_close(step(model, x), want, 1e-4, 1e-4)


@MIXED
def test_warning_of_a_reduced_product():
    mesh = mesh_of(EXPLICIT, AUTO)

    def product(kernel, x):
        new = jax.grad(lambda kernel: (x @ kernel).sum())(kernel)
        return jax.sharding.reshard(new, P())

    with jax.set_mesh(mesh), pytest.warns(WrongGradientWarning, match="product: 'model'"):
        step = jit(product, in_shardings=(P(reduced={"data"}), P("data")))
        step.lower(array(1, 8, 8), jax.device_put(array(2, 8, 8), P("data")))


def test_convolutions_without_rows_inputs_or_outputs():
    """Their gradients have kernels without positions, which are drawn rarely."""
    dimensions = jax.lax.conv_dimension_numbers((2, 4, 4), (4, 4, 3), ("NCH", "OIH", "NCH"))
    sizes = itertools.product((0, 2), (0, 1, 4), (0, 1, 3), ((2, 1), (1, 2)), ((0, 0), (1, 1)))
    for rows, size, window, (features, batches), padding in sizes:
        options = {"feature_group_count": features, "batch_group_count": batches}
        x, kernel = jnp.ones((rows, 4, size)), jnp.ones((4, 4 // features, window))
        try:
            want = jax.lax.conv_general_dilated(
                x, kernel, (1,), (padding,), dimension_numbers=dimensions, **options
            )
        except (TypeError, ValueError):  # no rows for two groups of them
            continue
        found = convolutions.as_products(
            x,
            kernel,
            window_strides=(1,),
            padding=(padding,),
            lhs_dilation=(1,),
            rhs_dilation=(1,),
            dimension_numbers=dimensions,
            precision=None,
            preferred_element_type=None,
            **options,
        )
        assert found.shape == want.shape, (rows, size, window, options, padding)
        np.testing.assert_allclose(found, want, rtol=1e-6)
