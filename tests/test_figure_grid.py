"""Figures of small random programs, against those of a slow interpreter of what was traced.

A program is a few operations on an array of one dtype and shape, perhaps in loops, in a `shard_map`
with collectives, with a donated argument. `slow_figures.py` counts by definition. A barrier follows
each operation, so that the compiler computes what is written: it may not simplify, merge or fuse.
"""

from __future__ import annotations

import functools
import math
import os
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from nnx_sharding import jit
from nnx_sharding.partition import planning_mesh
from slow_figures import Figures, NotDefined, figures_of
from zoo import mesh_of

SEED = os.environ.get("NNX_SHARDING_TEST_SEED", "0")  # of those that a merge draws
COUNT = 120  # of all programs
DEVICES = 8
REAL, COMPLEX, INTEGERS = "float32", "complex64", "int32"


def rows_of(draw, x):
    """Half of the rows, without the arithmetic of negative indices."""
    rows = jnp.asarray(draw.sample(range(x.shape[0]), x.shape[0] // 2), jnp.int32)
    return x.at[rows], {"mode": "clip", "wrap_negative_indices": False}


def half(draw, y):
    """Half of the rows, so that two of a program are hardly the same."""
    start = draw.randrange(len(y) // 2)
    return barrier(y[start : start + len(y) // 2])


def repeated(x, times):
    return jnp.broadcast_to(x, (times, *x.shape)).reshape(-1, *x.shape[1:])


def take(draw, x, y):
    rows, options = rows_of(draw, x)
    return repeated(barrier(rows.get(**options)), 2)


def put(draw, x, y):
    rows, options = rows_of(draw, x)
    return rows.set(half(draw, y), **options)


def accumulate(draw, x, y):
    rows, options = rows_of(draw, x)
    return rows.add(half(draw, y), **options)


def pool(draw, x, y):
    least = np.iinfo(x.dtype).min if x.dtype == INTEGERS else -np.inf
    sizes, strides = (draw.randint(1, 5), draw.randint(1, 5)), (1, 1)
    return lax.reduce_window(x, np.array(least, x.dtype), lax.max, sizes, strides, "SAME")


def product(draw, x, y):
    """Two, neither of which is the same in all runs of a loop."""
    square = lax.dot_general(x, y, (((0,), (0,)), ((), ())))
    return x @ barrier(square)


def convolved(draw, x, y):
    """One feature, as the shape of what the operations share has no room for more."""
    spacing = draw.randint(1, 2)
    low = draw.randint(0, 2 * spacing)
    image, kernel = barrier(x[:, None]), barrier(y[:1, None, :3])
    padding = [(low, 2 * spacing - low)]
    out = lax.conv_general_dilated(image, kernel, (1,), padding, rhs_dilation=(spacing,))
    return barrier(out)[:, 0]


# From a source of choices, the array and another like it, to an array like it.
ANY = {
    "add": lambda draw, x, y: x + y,
    "subtract": lambda draw, x, y: x - y,
    "multiply": lambda draw, x, y: x * y,
    "negate": lambda draw, x, y: -x,
    "product": product,
    "sum": lambda draw, x, y: jnp.broadcast_to(barrier(x.sum(0)), x.shape),
    "write": lambda draw, x, y: lax.dynamic_update_slice(x, barrier(y[:2]), (draw.randrange(4), 0)),
    "transpose": lambda draw, x, y: barrier(x.T).reshape(x.shape),
    "reverse": lambda draw, x, y: lax.rev(x, (0,)),
    "take": take,
    "put": put,
    "accumulate": accumulate,
}
ORDERED = {
    "maximum": lambda draw, x, y: jnp.maximum(x, y),
    "select": lambda draw, x, y: lax.select(barrier(x > y), x, y),
    "largest": lambda draw, x, y: jnp.broadcast_to(barrier(x.max(1, keepdims=True)), x.shape),
    "sort": lambda draw, x, y: lax.sort(x, dimension=draw.randrange(2)),
    "pool": pool,
    "clamp": lambda draw, x, y: lax.clamp(jnp.zeros((), x.dtype), x, jnp.ones((), x.dtype)),
}
FLOATS = {
    name: lambda draw, x, y, name=name: getattr(lax, name)(x)
    for name in ("exp", "tanh", "sin", "cos", "log", "sqrt", "rsqrt", "log1p", "expm1")
}
FLOATS["divide"] = lambda draw, x, y: x / y
FLOATS["convolve"] = convolved
KINDS = {
    REAL: ANY | ORDERED | FLOATS,
    INTEGERS: ANY | ORDERED,
    COMPLEX: ANY
    | {
        "fft": lambda draw, x, y: jnp.fft.fft(x, axis=draw.randrange(2)),
        "fft2": lambda draw, x, y: jnp.fft.fft2(x),
    },
}
# Within a `shard_map` over the axis `d`, which gives each device a part like the array.
COLLECTIVES = {
    "psum": lambda draw, x, y: lax.psum(x, "d"),
    "pmax": lambda draw, x, y: lax.pmax(x, "d"),
    "permute": lambda draw, x, y: lax.ppermute(x, "d", [(i, (i + 1) % 8) for i in range(8)]),
    "all_gather": lambda draw, x, y: barrier(lax.all_gather(x, "d"))[3],
    "reduce_scatter": lambda draw, x, y: repeated(
        barrier(lax.psum_scatter(x, "d", tiled=True)), DEVICES
    ),
    "exchange": lambda draw, x, y: lax.all_to_all(x, "d", 0, 0, tiled=True),
}


UNKNOWN = -1  # the length of a loop
pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="XLA fuses across barriers in older releases"
)


def barrier(x):
    return lax.optimization_barrier(x)


class Program:
    """A random program: drawn again, in the same way, whenever it is traced."""

    def __init__(self, number):
        draw = random.Random(number)
        self.number = number
        self.dtype = draw.choice([REAL, REAL, INTEGERS, COMPLEX])
        self.shape = draw.choice([(8, 16), (32, 32), (64, 8), (16, 128)])
        self.loop = draw.choice([0, 0, 0, 2, 7, UNKNOWN])
        self.donates = draw.random() < 0.5
        self.is_sharded = draw.random() < 0.4
        kinds = KINDS[self.dtype]
        if self.is_sharded:
            kinds = kinds | {
                k: v for k, v in COLLECTIVES.items() if k != "pmax" or self.dtype != COMPLEX
            }
        self.names = [draw.choice(sorted(kinds)) for _ in range(draw.randint(1, 4))]
        self._steps = [kinds[name] for name in self.names]

    def __str__(self):
        where = f"{DEVICES} devices" if self.is_sharded else "one device"
        times = "some" if self.loop == UNKNOWN else self.loop
        loop = f", {times} times" if self.loop else ""
        donated = ", donated" if self.donates else ""
        names = " ".join(self.names)
        return f"{self.number}: {names} of {self.dtype}{[*self.shape]}{loop} on {where}{donated}"

    def _body(self, x, y):
        draw = random.Random(self.number)
        for step in self._steps:
            x = barrier(step(draw, x, y))
        return x

    def _whole(self, x, y):
        x = barrier(x + y)  # updates in place are of no argument; and JAX drops unused arguments
        if self.loop == UNKNOWN:
            x = lax.while_loop(lambda x: (x != 0).any(), lambda x: self._body(x, y), x)
        elif self.loop:
            x, _ = lax.scan(lambda x, _: (self._body(x, y), None), x, length=self.loop)
        else:
            x = self._body(x, y)
        return x

    @functools.cached_property
    def _parts(self):
        """The function, its arguments and the mesh."""
        dims, mesh, fun = self.shape, None, self._whole
        if self.is_sharded:
            mesh, dims = self._mesh, (self.shape[0] * DEVICES, self.shape[1])
            fun = jax.shard_map(fun, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
        return fun, [jax.ShapeDtypeStruct(dims, self.dtype)] * 2, mesh

    @functools.cached_property
    def _mesh(self):
        return mesh_of((DEVICES,), ("d",))

    @functools.cached_property
    def by_definition(self):
        fun, args, _ = self._parts
        try:
            return figures_of(jax.make_jaxpr(fun)(*args).jaxpr, {"d": DEVICES})
        except NotDefined:
            return Figures(None, None, None, None)

    @functools.cached_property
    def compiled(self):
        fun, args, mesh = self._parts
        options = {"donate_argnums": 0} if self.donates else {}
        if mesh is not None:
            options |= {"mesh": mesh, "in_shardings": P("d"), "out_shardings": P("d")}
        return jit(lambda x, y: fun(x, y), **options).lower(*args).compile()

    def cells(self):
        """Yields each figure with that by definition, and why it is None if it is."""
        truth, cost = self.by_definition, self.compiled.cost()
        yield "flops", cost.flops, truth.flops, cost.why
        yield "transcendentals", cost.transcendentals, truth.transcendentals, cost.why
        # Compilers copy what loops carry, divide an exchange into slices, and choose layouts.
        is_as_written = not {"exchange", "transpose", "convolve"} & {*self.names}
        if is_as_written and self.loop in (0, UNKNOWN):
            yield "bytes accessed", cost.bytes_accessed, truth.accessed, cost.why
        size, memory = (
            math.prod(self.shape) * jnp.dtype(self.dtype).itemsize,
            self.compiled.memory(),
        )
        yield "arguments", memory.arguments, 2 * size, None
        yield "outputs", memory.outputs, size, None
        yield "aliased", memory.aliased, size if self.donates else 0, None
        if truth.sent is not None:
            yield "sent", self.compiled.collectives().bytes_sent, truth.sent, None

    def check(self):
        """Lists the cells that are wrong, and counts all and those that are None for a reason."""
        wrong, count, unknown = [], 0, 0
        for name, figure, truth, why in self.cells():
            count += 1
            if figure is None and truth is None and why:
                unknown += 1
            # Counters of loops and indices of slices are some more.
            elif None in (figure, truth) or abs(figure - truth) > max(0.05 * truth, 64):
                wrong.append(f"{self}: {name}: {figure}, by definition {truth}, why {why!r}")
        return wrong, count, unknown


class ProgramForTpu(Program):
    """The same for a TPU topology: what its compiler computes and sends as it is written.

    It computes complex numbers as two real ones, small gathers by comparisons, and reduce-scatters
    of small arrays as all-reduces.
    """

    is_as_written = property(
        lambda self: self.dtype != COMPLEX and not {"take", "reduce_scatter"} & {*self.names}
    )

    @functools.cached_property
    def _mesh(self):
        return planning_mesh("v5e:2x4", {"d": DEVICES})

    @functools.cached_property
    def by_definition(self):
        return Program(self.number).by_definition

    @functools.cached_property
    def compiled(self):
        fun, args, _ = self._parts
        options = {"donate_argnums": 0} if self.donates else {}
        spec = P("d") if self.is_sharded else P()
        options |= {"mesh": self._mesh, "in_shardings": spec, "out_shardings": spec}
        return jit(lambda x, y: fun(x, y), **options).lower(*args).compile()

    def cells(self):
        return (x for x in super().cells() if x[0] in ("flops", "transcendentals", "sent"))


def check(programs):
    results = [program.check() for program in programs]
    wrong = [line for lines, *_ in results for line in lines]
    assert not wrong, "\n".join(wrong)
    return [sum(column) for column in zip(*(counts for _, *counts in results), strict=True)]


def test_figures_of_some_programs():
    """Others in each run; the header shows the seed that draws them again."""
    check(map(Program, random.Random(SEED).sample(range(COUNT), 4)))


@pytest.mark.parametrize("part", range(4))
def test_figures_of_all_programs(part, record_property):
    """At least 500 cells in all, of which a few are None, each with a reason."""
    count, unknown = check(map(Program, range(part, COUNT, 4)))
    record_property("unknown", unknown)
    assert count >= 500 / 4 and unknown < count / 4
