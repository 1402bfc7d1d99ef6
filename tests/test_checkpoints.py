"""Checkpoints in one process: what comes back, where it goes, and what is wrong with one."""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from layouts import OPTIMIZERS
from models import MLP, Net, assert_same_state, mesh_of, mlp_specs, values
from nnx_sharding import StateSharding, jit, split
from nnx_sharding._compat import TraceContextError
from nnx_sharding.errors import CheckpointError, NoCheckpointError
from nnx_sharding.inspect import parameter_table
from nnx_sharding.partition import abstract_init, sharded_init
from nnx_sharding.placement import Checkpoints, contents, restore, save
from nnx_sharding.placement.checkpoints.checksums import checksum, fetched

MESH = mesh_of((2, 4), ("data", "model"))
OTHER = mesh_of((4, 1), ("model", "data"))
WHOLE = StateSharding({...: P()})


class Zoo(nnx.Module):
    """Everything that a Variable or an attribute may hold."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        key = jax.random.key(seed)
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.same = self.blocks[0].kernel
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.tree = nnx.Param({"a": jnp.ones(3) * seed, "b": (jnp.zeros(2), np.arange(3) + seed)})
        self.half = nnx.Param(jax.random.normal(key, (4, 4), jnp.bfloat16))
        self.small = nnx.Param(jnp.full((5,), seed, jnp.int4))
        self.number = nnx.Variable(3 + seed)
        self.numpy = nnx.Variable(np.full((2, 2), seed + 0.5))
        self.bare = jnp.full((3,), seed)
        self.keys = nnx.RngKey(jax.random.split(jax.random.key(seed, impl="rbg"), 4), tag="x")
        self.empty = nnx.Param(jnp.zeros((0, 3 + 0 * seed)))
        self.nothing = nnx.Dict()
        self.none = nnx.Param(None)
        self.odd = nnx.Dict({"a/b": nnx.Param(jnp.array(seed)), "c d": nnx.Param(jnp.array(1))})
        self.ref = nnx.Variable(jnp.full((2,), seed + 1.0), ref=True)


class FolderTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.path = self.folder / "checkpoint"


def trained(seed=0, name="adam"):
    model = MLP(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, OPTIMIZERS[name], wrt=nnx.Param)
    grads = jax.tree.map(lambda x: x * 0.1, nnx.state(model, nnx.Param))
    optimizer.update(model, grads)
    return model, optimizer


def contents_of(tree):
    """All values of a tree, copied to the host, by path, as bytes."""
    found = {}
    for path, leaf in nnx.to_flat_state(split(tree)[1]):
        for key, x in jax.tree_util.tree_leaves_with_path(leaf):
            if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                kind, x = str(x.dtype), jax.random.key_data(x)
            else:
                kind = type(x).__name__
            x = np.asarray(x[...] if isinstance(x, jax.Ref) else x)
            found[(*path, *map(str, key))] = kind, x.dtype, x.shape, x.tobytes()
    return found


def shardings(tree):
    return {row.path: row.sharding for row in parameter_table(tree)}


def identities(tree):
    return [id(x) for _, x in nnx.iter_graph(tree) if isinstance(x, nnx.Module | nnx.Variable)]


class RoundTripTest(FolderTest):
    def test_everything_comes_back(self):
        one, two = Zoo(1), Zoo(2)
        before, objects = contents_of(one), identities(two)
        save(self.path, one)
        self.assertEqual(contents_of(one), before)
        self.assertIs(restore(self.path, two), two)
        self.assertEqual(contents_of(two), before)
        self.assertEqual(identities(two), objects)
        self.assertIs(two.same, two.blocks[0].kernel)
        self.assertIs(type(two.number.get_raw_value()), int)
        self.assertIs(type(two.numpy.get_raw_value()), np.ndarray)
        self.assertFalse(two.half.get_raw_value().committed)
        self.assertEqual(two.dropout(jnp.ones(9)).tolist(), one.dropout(jnp.ones(9)).tolist())

    def test_pytrees(self):
        tree = {"x": jnp.arange(3), "n": 3, "f": 2.5, "b": True, "c": 1 + 2j, "m": [MLP()]}
        tree["np"], tree["g"], tree[1] = np.arange(4.0), np.float32(3), (np.int8(4), None)
        del tree[1]  # JAX sorts the keys of dicts
        save(self.path, tree)
        model = MLP(nnx.Rngs(5))
        blank = {"x": jnp.zeros(3, int), "n": 0, "f": 0.0, "b": False, "c": 0j, "m": [model]}
        blank["np"], blank["g"] = np.zeros(4), np.float32(0)
        back = restore(self.path, blank)
        self.assertEqual(blank["n"], 0)
        self.assertIs(back["m"][0], model)
        assert_same_state(self, model, tree["m"][0])
        for key in "x", "n", "f", "b", "c", "np", "g":
            self.assertIs(type(back[key]), type(blank[key]))
            np.testing.assert_array_equal(back[key], tree[key])
        back["np"][0] = 7  # may be written to

    def test_single(self):
        for x, blank in (jnp.arange(3.0), jnp.zeros(3)), (4, 0), (nnx.Param(np.ones(3)), None):
            save(self.path, x, overwrite=True)
            blank = nnx.Param(np.zeros(3)) if blank is None else blank
            back = restore(self.path, blank)
            self.assertIs(type(back), type(x))
            np.testing.assert_array_equal(np.asarray(back), np.asarray(x))
