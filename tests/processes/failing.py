"""Trains without end; after some steps one process fails as the command line says."""

import os
import signal
import sys

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from preamble import RANK, mesh_of

from nnx_sharding import jit

HOW, WHO = sys.argv[1], int(sys.argv[2])


@jit(in_shardings=(P("data"),), mesh=mesh_of((8,), ("data",)))
def step(model):
    """Sums over all processes."""
    model.kernel[...] += jnp.sum(model.kernel[...])


model = nnx.Linear(8, 8, rngs=nnx.Rngs(0), use_bias=False)
for number in range(10**9):
    step(model)
    jax.block_until_ready(model.kernel[...])
    if number == 20:
        print("training", flush=True)
    if number == 20 and RANK == WHO:
        if HOW == "raise":
            raise ValueError("out of luck")
        if HOW == "exit":
            sys.exit(3)
        if HOW == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
