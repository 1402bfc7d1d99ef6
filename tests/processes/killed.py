"""Saves steps without end, until it is killed or, with ``preempt``, notified of that."""

import socket
import sys
from itertools import count

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_sharding.checkpoint import Checkpoints

preempt = sys.argv[2] == "preempt"
if preempt:  # the service of several processes notices SIGTERM
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    jax.distributed.initialize(f"localhost:{port}", 1, 0)
x = nnx.Param(jnp.zeros((256, 256)))
interval = 1_000_000 if preempt else 1
with Checkpoints(sys.argv[1], max_to_keep=3, save_interval_steps=interval) as checkpoints:
    start = checkpoints.resume(x) or 0
    assert (x[...] == start).all()
    print("resumed", start, flush=True)
    for step in count(start + 1):
        x[...] = x[...] + 1
        checkpoints.save(step, x)
        if checkpoints.reached_preemption(step):
            print("preempted", step, flush=True)
            break
        if not preempt:
            print(step, flush=True)
