"""Small programs that show each form of what XLA writes for TPUs, as lowered functions.

A program with a loop has one named ``..._written_out`` beside it, which does the same without.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding import jit
from nnx_sharding.partition import fsdp, make_mesh, tensor_parallel

BATCH, WIDTH, HIDDEN, LAYERS = 256, 256, 1024, 6
SIZES = {"fsdp_step": {"data": 8}, "stack_step": {"data": 8}}
SIZES["tensor_parallel_step"] = {"data": 2, "model": 4}
NHWC = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}


def mesh_over(devices, **sizes):
    """A mesh with Auto axes over the first devices."""
    return make_mesh(sizes, axis_types=AxisType.Auto, devices=devices[: math.prod(sizes.values())])


def array(mesh, *shape, spec=None, dtype=jnp.float32, kind=None):
    sharding = NamedSharding(mesh, spec or P(), memory_kind=kind)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def repeated(fun, x, length, written_out):
    """A function applied so often to its result, in a loop or written out."""
    if not written_out:
        return lax.scan(lambda x, _: (fun(x), None), x, None, length=length)[0]
    for _ in range(length):
        x = fun(x)
    return x


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


class Stack(nnx.Module):
    """Layers in a loop, whose parameters have them as their first dimension."""

    def __init__(self, rngs):
        self.nets = nnx.vmap(Net)(rngs.split(LAYERS))

    def __call__(self, x):
        return nnx.scan(lambda x, net: x + net(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.nets
        )


def train_step(devices, name, strategy, model_type=Net):
    mesh = mesh_over(devices, **SIZES[name])

    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    def make():
        model = model_type(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(make)
    sharding = strategy(model, mesh=mesh, optimizer=optimizer)
    fun = jit(step, in_shardings=(sharding, sharding, P("data")), mesh=mesh, donate_argnums=(0, 1))
    return fun.lower(model, optimizer, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))


def layers(devices, written_out=False):
    """The gradient of a loop over layers, whose kernels are sharded as FSDP does."""
    mesh = mesh_over(devices, data=8)

    def layer(x, kernel):
        return jnp.tanh(x @ lax.with_sharding_constraint(kernel, NamedSharding(mesh, P()))), None

    def loss(kernels, x):
        if written_out:
            for kernel in kernels:
                x, _ = layer(x, kernel)
        else:
            x, _ = lax.scan(layer, x, jnp.stack(kernels))
        return (x**2).mean()

    kernels = [array(mesh, WIDTH, WIDTH, spec=P("data"))] * LAYERS
    x = array(mesh, BATCH, WIDTH, spec=P("data"))
    return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(kernels, x)


def scan(devices, written_out=False):
    mesh = mesh_over(devices, one=1)

    def fun(kernel, x):
        return repeated(lambda x: jnp.tanh(x @ kernel) * x + 1.0, x, 12, written_out)

    return jax.jit(fun).lower(array(mesh, WIDTH, WIDTH), array(mesh, BATCH, WIDTH))


def nested(devices, written_out=False):
    mesh = mesh_over(devices, data=8)

    def fun(kernel, x):
        def outer(x):
            return jnp.exp(-repeated(lambda x: x @ kernel, x, 3, written_out))

        # The sum is used in float32 as well, otherwise it is made in the bfloat16 of the products.
        return repeated(lambda x: lax.psum(outer(x), "data") + x, x, 5, written_out)

    mapped = jax.shard_map(
        fun, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False
    )
    return jax.jit(mapped).lower(
        array(mesh, WIDTH, WIDTH), array(mesh, BATCH, WIDTH, spec=P("data"))
    )


def convolution(devices, written_out=False):
    """Convolutions whose windows contain padding."""
    mesh = mesh_over(devices, one=1)

    def fun(kernel, x):
        convolved = functools.partial(lax.conv_general_dilated, padding="SAME", **NHWC)
        return repeated(lambda x: convolved(x, kernel, (1, 1)), x, 5, written_out)

    return jax.jit(fun).lower(array(mesh, 3, 3, 128, 128), array(mesh, 8, 16, 16, 128))


def attention(devices, written_out=False):
    """Batched matrix products, which the compiler writes as convolutions, and a softmax."""
    mesh = mesh_over(devices, one=1)

    def head(q):
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q))
        return jnp.einsum("bhqk,bkhd->bqhd", scores, q)

    fun = functools.partial(repeated, head, length=4, written_out=written_out)
    return jax.jit(fun).lower(array(mesh, 2, 128, 4, 64))


def ring(devices, written_out=False):
    mesh = mesh_over(devices, data=8)
    pairs = [(i, (i + 1) % 8) for i in range(8)]

    def fun(x):
        return repeated(lambda x: lax.ppermute(jnp.tanh(x), "data", pairs), x, 8, written_out)

    mapped = jax.shard_map(fun, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    return jax.jit(mapped).lower(array(mesh, 8 * 128, WIDTH, spec=P("data")))


def unknown_length(devices):
    mesh = mesh_over(devices, one=1)

    def fun(kernel, x):
        return lax.while_loop(lambda x: jnp.sum(x) < 1e3, lambda x: jnp.tanh(x @ kernel) + x, x)

    return jax.jit(fun).lower(array(mesh, WIDTH, WIDTH), array(mesh, BATCH, WIDTH))


def branches(devices):
    mesh = mesh_over(devices, data=8)

    def fun(flag, x):
        return lax.cond(flag, lambda x: lax.psum(x, "data"), lambda x: jnp.tanh(x) + 1, x)

    mapped = jax.shard_map(
        fun, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False
    )
    flag = array(mesh, dtype=jnp.bool_)
    return jax.jit(mapped).lower(flag, array(mesh, 8 * 128, WIDTH, spec=P("data")))


def collective_matmul(devices):
    """A product whose operand is sent around in a ring while it is multiplied."""
    mesh = mesh_over(devices, data=8)
    columns = NamedSharding(mesh, P(None, "data"))
    fun = jax.jit(lambda x, kernel: lax.with_sharding_constraint(x @ kernel, columns))
    half = functools.partial(array, mesh, 8192, 8192, dtype=jnp.bfloat16)
    return fun.lower(half(spec=P("data")), half(spec=P(None, "data")))


def groups(devices):
    """Each kind of collective, over either axis of a mesh."""
    mesh = mesh_over(devices, data=2, model=4)

    def block(x):
        for axis in mesh.axis_names:
            x = lax.psum_scatter(jnp.tanh(x), axis, tiled=True)
            x = lax.all_gather(jnp.tanh(x), axis, tiled=True)
            x = lax.all_to_all(jnp.tanh(x), axis, 1, 0, tiled=True)
            x = lax.all_to_all(jnp.tanh(x), axis, 0, 1, tiled=True)
            x = lax.psum(jnp.tanh(x), axis)
        return x

    mapped = jax.shard_map(
        block, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    return jax.jit(mapped).lower(array(mesh, 2 * BATCH, HIDDEN, spec=P("data")))


def offload(devices):
    """A kernel that is read from the memory of the host, and a result that is written there."""
    mesh = mesh_over(devices, one=1)
    host, device = (NamedSharding(mesh, P(), memory_kind=k) for k in ("pinned_host", "device"))
    fun = jax.jit(lambda kernel, x: jax.device_put(x @ jax.device_put(kernel, device), host))
    return fun.lower(array(mesh, WIDTH, WIDTH, kind="pinned_host"), array(mesh, BATCH, WIDTH))


def kernel(devices):
    """A Pallas kernel in a loop, with an estimate of its cost."""
    mesh = mesh_over(devices, one=1)

    def double(x_ref, o_ref):
        o_ref[...] = 2 * jnp.tanh(x_ref[...])

    cost = pl.CostEstimate(flops=1000, transcendentals=100, bytes_accessed=10)
    call = pl.pallas_call(
        double,
        out_shape=jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32),
        cost_estimate=cost,
    )
    mapped = jax.shard_map(
        functools.partial(repeated, call, length=7, written_out=False),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    return jax.jit(mapped).lower(array(mesh, BATCH, WIDTH))


LOOPS = {f.__name__: f for f in (layers, scan, nested, convolution, attention, ring)}
PROGRAMS = {
    "fsdp_step": functools.partial(
        train_step, name="fsdp_step", strategy=functools.partial(fsdp, min_size=0)
    ),
    "stack_step": functools.partial(
        train_step,
        name="stack_step",
        strategy=functools.partial(fsdp, min_size=0),
        model_type=Stack,
    ),
    "tensor_parallel_step": functools.partial(
        train_step, name="tensor_parallel_step", strategy=tensor_parallel
    ),
    **LOOPS,
    **{f"{name}_written_out": functools.partial(f, written_out=True) for name, f in LOOPS.items()},
    "unknown_length": unknown_length,
    "branches": branches,
    "collective_matmul": collective_matmul,
    "groups": groups,
    "offload": offload,
    "kernel": kernel,
}
