"""A hundred arrays, which processes of two devices each save, restore, shard and gather."""

from preamble import assert_holds, mesh_of  # isort: skip

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from nnx_sharding.checkpoint import Checkpoints, restore, save
from nnx_sharding.compat.eformer import make_shard_and_gather_fns
from nnx_sharding.placement import place

MESH = mesh_of((jax.device_count(),), ("data",))
ROWS = 24 * 512
SPECS = {f"x{i}": P("data") for i in range(100)}
HOST = {name: np.arange(i, i + ROWS, dtype=np.float32) for i, name in enumerate(SPECS)}


def assert_same(tree):
    for name, array in tree.items():
        assert_holds(array, HOST[name])


folder = Path(sys.argv[1])
arrays = place(HOST, P("data"), MESH)
zeros = place({name: np.zeros_like(x) for name, x in HOST.items()}, P("data"), MESH)
save(folder / "saved", arrays)
assert_same(restore(folder / "saved", zeros))
with Checkpoints(folder / "steps") as checkpoints:
    checkpoints.save(1, arrays)
    assert_same(checkpoints.restore(zeros))
shard, gather = make_shard_and_gather_fns(SPECS, MESH)
gathered = {name: gather[name](array) for name, array in arrays.items()}
for name, array in gathered.items():
    np.testing.assert_array_equal(array, HOST[name])
assert_same({name: shard[name](array) for name, array in gathered.items()})
assert_same({name: place(array, P(), MESH) for name, array in arrays.items()})
print("ok")
