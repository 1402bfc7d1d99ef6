"""Trains until one process is notified, in the middle of a save, that the job is preempted."""

import os
import signal
import sys
from itertools import count
from pathlib import Path
from unittest import mock

import preamble  # isort: skip  (joins the others before anything is computed)
import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding.checkpoint import Checkpoints, restore, save

folder = Path(sys.argv[1])
async_save = ocp.StandardCheckpointHandler.async_save


async def notified(self, directory, args):
    if preamble.RANK == 1:
        os.kill(os.getpid(), signal.SIGTERM)  # which the service of JAX shares with the others
    return await async_save(self, directory, args=args)


put = NamedSharding(preamble.mesh_of(), P("data", "model"))
zeros = np.zeros((64, 64), np.float32)
tree = {"x": nnx.Param(jax.make_array_from_callback(zeros.shape, put, lambda index: zeros[index]))}
with Checkpoints(folder / "steps", save_interval_steps=1_000_000) as checkpoints:
    start = checkpoints.resume(tree) or 0
    for shard in tree["x"].get_raw_value().addressable_shards:
        assert (np.asarray(shard.data) == start).all()
    for step in count(start + 1):
        tree["x"].set_value(jax.jit(lambda x: x + 1)(tree["x"].get_raw_value()))
        if step == start + 3:
            with mock.patch.object(ocp.StandardCheckpointHandler, "async_save", notified):
                save(folder / "one", tree, overwrite=True)
        checkpoints.save(step, tree)
        if checkpoints.reached_preemption(step):
            break
restore(folder / "one", tree)
for shard in tree["x"].get_raw_value().addressable_shards:
    assert (np.asarray(shard.data) == start + 3).all()
print("preempted", start, step, flush=True)
