"""Trains without end; after some steps one process fails."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from preamble import RANK, mesh_of

from nnx_sharding import jit


@jit(in_shardings=(P("data"),), mesh=mesh_of((8,), ("data",)))
def step(model):
    """Sums over all processes."""
    model.kernel[...] += jnp.sum(model.kernel[...])


model = nnx.Linear(8, 8, rngs=nnx.Rngs(0), use_bias=False)
for number in range(10**9):
    step(model)
    jax.block_until_ready(model.kernel[...])
    if number == 20 and RANK == 1:
        raise ValueError("out of luck")
