"""Checkpoints in one process: values, shardings and errors."""

from __future__ import annotations

import gc
import itertools
import os
import pathlib
import re
import shutil
import tempfile
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from absl.testing import parameterized
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding import StateSharding, jit, split, stack
from nnx_sharding import _publishing as publishing
from nnx_sharding.analysis import parameter_table
from nnx_sharding.checkpoint import (
    Checkpoints,
    contents,
    load_safetensors,
    restore,
    save,
    save_safetensors,
    stored,
)
from nnx_sharding.checkpoint.checksums import _SMALL, checksums
from nnx_sharding.checkpoint.names import named_arrays
from nnx_sharding.core.flatten import flatten
from nnx_sharding.core.unflatten import unflatten
from nnx_sharding.errors import CheckpointError, NoCheckpointError, NoMeshError
from nnx_sharding.export import export
from nnx_sharding.partition import abstract_init, sharded_init
from nnx_sharding.report import compare
from nnx_sharding.report.comparison import load
from nnx_sharding.report.page import write_html
from zoo import MLP, OPTIMIZERS, Net, assert_same_state, mesh_of, mlp_specs, values

MESH = mesh_of((2, 4), ("data", "model"))
OTHER = mesh_of((4, 1), ("model", "data"))
REPLICATED = StateSharding({...: P()})
X = jax.ShapeDtypeStruct((2,), jnp.float32)


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
        # Orbax may still write after a save that failed.
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.folder = pathlib.Path(self.enter_context(folder))
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
    def test_everything_is_restored(self):
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
        tree["np"], tree["g"], tree["h"] = np.arange(4.0), np.float32(3), np.float64(1 / 3)
        tree["e"] = np.arange(4.0, dtype=">f4")
        save(self.path, tree)
        model = MLP(nnx.Rngs(5))
        blank = {"x": jnp.zeros(3, int), "n": 0, "f": 0.0, "b": False, "c": 0j, "m": [model]}
        blank["np"], blank["g"], blank["h"] = np.zeros(4), np.float32(0), np.float64(0)
        blank["e"] = np.zeros(4, ">f4")
        back = restore(self.path, blank)
        self.assertEqual(blank["n"], 0)
        self.assertIs(back["m"][0], model)
        assert_same_state(self, model, tree["m"][0])
        for key in "x", "n", "f", "b", "c", "np", "g", "h", "e":
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

    def test_references_are_written_through(self):
        one, two = Zoo(1), Zoo(2)
        ref = two.ref.get_raw_value()
        save(self.path, one)
        restore(self.path, two)
        self.assertIs(two.ref.get_raw_value(), ref)
        np.testing.assert_array_equal(ref[...], np.full((2,), 2.0))
        refs = {"hijax": nnx.Param(jnp.ones(2), hijax=True), "bare": jax.new_ref(jnp.ones(3))}
        save(self.path, refs, overwrite=True)
        for x in refs.values():
            x[...] = x[...] * 0
        back = restore(self.path, refs)
        for key, x in refs.items():
            self.assertIs(back[key], x)
            np.testing.assert_array_equal(x[...], np.ones(x.shape))


class ShardingsTest(FolderTest):
    def setUp(self):
        super().setUp()
        # Saved from 8 devices, sharded.
        self.model, self.optimizer = trained()
        run = jit(lambda m, x: m(x), in_shardings=(mlp_specs(), P("data")), mesh=MESH)
        run(self.model, jnp.ones((8, 4)))
        save(self.path, (self.model, self.optimizer))
        self.want = contents_of((self.model, self.optimizer))

    def check(self, tree, want):
        self.assertEqual(contents_of(tree), self.want)
        for row in parameter_table(tree):
            self.assert_sharded_as(row, want[row.path])

    def assert_sharded_as(self, row, want):
        """Specs may be equivalent; mesh and memory kind must be equal."""
        self.assertTrue(row.sharding.is_equivalent_to(want, len(row.shape)), row)
        self.assertEqual(row.memory_kind, want.memory_kind, row)
        self.assertEqual(getattr(row.sharding, "mesh", None), getattr(want, "mesh", None), row)

    def test_spec_without_a_mesh(self):
        target = trained(1)
        before = contents_of(target)
        with self.assertRaisesRegex(NoMeshError, "restore: a PartitionSpec needs a mesh"):
            restore(self.path, target, P("data"))
        self.assertEqual(contents_of(target), before)

    def test_as_the_model_is(self):
        target = trained(1)
        self.assertNotEqual(contents_of(target), self.want)
        laid_out = jax.device_put(target[0].up.kernel[...], NamedSharding(OTHER, P(None, "data")))
        target[0].up.kernel.set_value(laid_out)
        moved = jax.device_put(target[0].down.kernel[...], jax.devices()[5])
        target[0].down.kernel.set_value(moved)
        before = shardings(target)
        objects = identities(target)
        restore(self.path, target)
        self.check(target, before)
        self.assertEqual(identities(target), objects)
        self.assertTrue(target[0].down.kernel.get_raw_value().committed)

    def test_by_a_sharding(self):
        target = trained(1)
        restore(self.path, target, (mlp_specs(), REPLICATED), OTHER)
        up, down = P(None, "model"), P("model", None)
        for row in parameter_table(target):
            spec = P() if row.path[0] == "1" else up if "up" in row.path else down
            self.assert_sharded_as(row, NamedSharding(OTHER, spec))
        self.assertEqual(contents_of(target), self.want)
        # And onto another mesh with the specs that they have.
        fourth = mesh_of((1, 2), ("data", "model"), "explicit")
        restore(self.path, target, mesh=fourth)
        self.check(
            target,
            {p: NamedSharding(fourth, s.spec) for p, s in shardings(target).items()},
        )
        with jax.set_mesh(MESH):
            restore(self.path, target, P())
        self.check(target, {p: NamedSharding(MESH, P()) for p in shardings(target)})

    def test_memory_kinds(self):
        target = trained(1)
        host = NamedSharding(MESH, P(), memory_kind="pinned_host")
        restore(self.path, target, host)
        self.check(target, dict.fromkeys(shardings(target), host))
        save(self.path, target, overwrite=True)
        restore(self.path, trained(2))

    def test_into_an_abstract_model(self):
        here = (mlp_specs(), REPLICATED)
        target = abstract_init(trained, here, MESH)
        want = shardings(target)
        self.assertIs(restore(self.path, target)[0], target[0])
        self.check(target, want)
        # The mesh of the model is abstract, the argument of restore is not.
        target = abstract_init(trained, here, MESH.abstract_mesh)
        with self.assertRaisesRegex(ValueError, r"0/down/kernel, .* mesh is abstract.*\n.*0/up"):
            restore(self.path, target)
        self.assertIsInstance(target[0].up.kernel.get_raw_value(), jax.ShapeDtypeStruct)
        restore(self.path, target, mesh=MESH)
        self.check(target, want)
        # Without any sharding.
        target = nnx.eval_shape(trained)
        restore(self.path, target)
        self.assertEqual(contents_of(target), self.want)
        self.assertEqual(set(shardings(target).values()), {SingleDeviceSharding(jax.devices()[0])})

    def test_keys(self):
        explicit = mesh_of((4,), ("model",), "explicit")
        keys = jax.random.split(jax.random.key(3), 8)
        keys = jax.device_put(keys, NamedSharding(explicit, P("model")))
        save(self.path, {"keys": nnx.RngKey(keys, tag="x")}, overwrite=True)
        for mesh in explicit, MESH:
            goal = NamedSharding(mesh, P("model"))
            blank = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=goal)
            back = restore(self.path, {"keys": nnx.RngKey(blank, tag="x")})["keys"].get_raw_value()
            self.assertEqual((back.dtype, back.sharding), (keys.dtype, goal))
            np.testing.assert_array_equal(jax.random.key_data(back), jax.random.key_data(keys))

    @parameterized.parameters("adafactor", "multi", "masked", "injected")
    def test_optimizers(self, name):
        one, two = trained(0, name), trained(1, name)
        save(self.path, one, overwrite=True)
        restore(self.path, two, REPLICATED, MESH)
        self.assertEqual(contents_of(two), contents_of(one))

    def test_bad_shardings(self):
        target = trained(1)[0]
        before = contents_of(target)
        path = self.path
        cases = [
            (StateSharding({nnx.PathContains("up"): P()}), "no filter"),
            ("model", r"P\('model'\)"),
            (NamedSharding(AbstractMesh((2,), ("model",)), P()), "abstract"),
        ]
        for sharding, message in cases:
            with self.assertRaisesRegex((TypeError, ValueError), message):
                restore(path, target, sharding, MESH)
        laid_out = sharded_init(MLP, mlp_specs(), MESH)
        with self.assertRaisesRegex(ValueError, r"down/kernel.*no axis 'model'(.|\n)*up/kernel"):
            restore(path, laid_out, mesh=mesh_of((8,), ("modle",)))
        five = mesh_of((5,), ("model",))
        with self.assertRaisesRegex(ValueError, "not divisible by 'model' \\(5\\)"):
            restore(path, laid_out, mesh=five)
        self.assertEqual(contents_of(target), before)


class PartTest(FolderTest):
    def test_only_some(self):
        one, two = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))
        one.norm(jnp.ones((2, 8)) * 3)
        save(self.path, {"model": one, "optimizer": trained()[1]})
        before, want = values(two), values(one)
        restore(self.path, {"model": two}, only=nnx.Param)
        for path, value in values(two).items():
            is_param = path[-1] in ("kernel", "bias", "scale")
            expected = want if is_param else before
            np.testing.assert_array_equal(value, expected[path], str(path))
        restore(self.path, {"model": two}, only=nnx.PathContains("norm"))
        np.testing.assert_array_equal(values(two)[("norm", "mean")], want[("norm", "mean")])
        with self.assertRaisesRegex(CheckpointError, "Missing in the checkpoint:\n  model/added"):
            two.added = nnx.Param(jnp.ones(1))
            restore(self.path, {"model": two}, only=nnx.Param)
        with self.assertRaisesRegex(TypeError, "not an NNX filter"):
            restore(self.path, two, only=3)
        with self.assertRaisesRegex(ValueError, r"only='kernle' matches none of .*up/kernel"):
            restore(self.path, MLP(), only="kernle")
        with Checkpoints(self.folder / "steps") as checkpoints:
            checkpoints.save(1, one)
            with self.assertRaisesRegex(ValueError, "matches none of the arrays"):
                checkpoints.restore(two, only=nnx.Cache)
        self.assertEqual(restore(self.path, [], only=nnx.Cache), [])

    @parameterized.named_parameters(
        ("index", lambda *pair: pair, lambda model: (model,), r"below 0/: pass \(model,\)"),
        ("key", lambda *pair: dict(zip("mo", pair, strict=True)), lambda model: {"m": model},
         "below m/: pass {'m': model}"),
    )  # fmt: skip
    def test_model_without_its_optimizer(self, saved, part, hint):
        one, two = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))
        one.norm(jnp.ones((2, 8)) * 3)
        optimizer = nnx.Optimizer(one, OPTIMIZERS["adam"], wrt=nnx.Param)
        save(self.path, saved(one, optimizer))
        before = contents_of(two)
        with self.assertRaisesRegex(CheckpointError, hint):
            restore(self.path, two)
        with self.assertRaisesRegex(CheckpointError, "what the model has, pass only="):
            restore(self.path, part(two))
        self.assertEqual(contents_of(two), before)
        restore(self.path, part(two), only=...)
        self.assertEqual(contents_of(two), contents_of(one))

    def test_fewer_layers(self):
        def layers(count):
            rngs = nnx.Rngs(0)
            blocks = nnx.List([nnx.Linear(2, 2, use_bias=False, rngs=rngs) for _ in range(count)])
            return nnx.Dict(blocks=blocks, head=nnx.Linear(2, 3, rngs=rngs))

        save(self.path, (layers(4), layers(2)))
        with self.assertLogs("nnx_sharding", "WARNING") as logs:
            restore(self.path, (layers(2),), only=nnx.Param)
        [line] = logs.output
        self.assertIn("more of a list than the model; these were not read:", line)
        self.assertEqual(line.split()[-2:], ["0/blocks/2/kernel", "0/blocks/3/kernel"])
        with self.assertNoLogs("nnx_sharding", "WARNING"):  # parts of the model, and of the tuple
            restore(self.path, (layers(4),), only=nnx.PathContains(1))
            restore(self.path, (layers(4),), only=...)
            restore(self.path, {0: {"head": layers(1).head}}, only=...)

    def test_cast(self):
        one = MLP()
        save(self.path, {"model": one, "n": jnp.arange(3), "flag": jnp.array(True)})
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), MLP(nnx.Rngs(1)))
        tree = {"model": half, "n": jnp.zeros(3, jnp.int8), "flag": jnp.array(False)}
        before = contents_of(half)
        with self.assertRaisesRegex(
            CheckpointError, r"model/up/kernel: float32 in the checkpoint, bfloat16 in the model"
        ):
            restore(self.path, tree)
        self.assertEqual(contents_of(half), before)
        back = restore(self.path, tree, REPLICATED, MESH, cast=True)
        self.assertEqual(back["n"].dtype, jnp.int8)
        for path, value in nnx.to_flat_state(nnx.state(half)):
            want = dict(nnx.to_flat_state(nnx.state(one)))[path][...].astype(jnp.bfloat16)
            self.assertTrue(value.get_raw_value().sharding.is_fully_replicated)
            self.assertEqual(value.get_raw_value().sharding.mesh, MESH)
            np.testing.assert_array_equal(np.asarray(value[...]), np.asarray(want))
        with self.assertRaisesRegex(CheckpointError, "flag: bool in the checkpoint, float32"):
            restore(self.path, {**tree, "flag": jnp.ones(())}, cast=True)

    @parameterized.parameters(
        ("int32", "int8", 128), ("int32", "uint8", -1), ("uint32", "int32", 2**31),
        ("int8", "int4", 8), ("int64", "int32", 2**40), ("int64", "uint32", -(2**40)),
    )  # fmt: skip
    def test_integers_are_never_wrapped(self, there, here, value):
        with jax.enable_x64(True):
            saved = jnp.array([1, value] * 4, there)
            save(self.path, {"fits": saved.at[1::2].set(2), "a": saved, "b": np.asarray(saved)})
        put = NamedSharding(MESH, P("data"))
        like = jax.device_put(jnp.ones(8, here), put)
        model = nnx.Dict(fits=nnx.Param(like), a=nnx.Param(like), b=nnx.Param(np.ones(8, here)))
        before = contents_of(model)
        with self.assertRaisesRegex(
            CheckpointError, rf"\n  a: .*, {here}\n  b: .*{value}"
        ) as error:
            restore(self.path, model, cast=True)
        self.assertNotIn("fits", str(error.exception))
        self.assertEqual(contents_of(model), before)
        restore(self.path, model, only=nnx.PathContains("fits"), cast=True)
        fits = model.fits.get_raw_value()
        self.assertEqual((fits.sharding, fits.dtype), (put, here))
        np.testing.assert_array_equal(fits.astype("int32"), [1, 2] * 4)


class OrbaxTest(FolderTest):
    """Orbax and this library read the checkpoints of each other."""

    def test_written_by_orbax(self):
        one = trained()
        model = Net()
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(self.folder / "state", nnx.state(model))
            checkpointer.save(self.folder / "both", tuple(map(nnx.state, one)))
            checkpointer.save(self.folder / "pure", nnx.to_pure_dict(nnx.state(one[0])))
        with ocp.CheckpointManager(self.folder / "steps") as manager:
            manager.save(3, args=ocp.args.StandardSave(nnx.state(one[0])))
        two = Net(nnx.Rngs(1))
        restore(self.folder / "state", two)
        self.assertEqual(contents_of(two), contents_of(model))
        both = restore(self.folder / "both", trained(1), REPLICATED, MESH)
        self.assertEqual(contents_of(both), contents_of(one))
        for path in "pure", "steps/3", "steps/3/default":
            two = restore(self.folder / path, MLP(nnx.Rngs(1)))
            self.assertEqual(contents_of(two), contents_of(one[0]))
        with self.assertRaisesRegex(CheckpointError, "got a folder of some: .*steps/3"):
            restore(self.folder / "steps", two)

    def test_read_by_orbax(self):
        model = Net()
        save(self.path, model)
        with ocp.StandardCheckpointer() as checkpointer:
            state = checkpointer.restore(self.path, nnx.state(Net(nnx.Rngs(1))))
        two = Net(nnx.Rngs(1))
        nnx.update(two, state)
        self.assertEqual(contents_of(two), contents_of(model))


class ContentsTest(FolderTest):
    def test_rows(self):
        tree = (Zoo(), {"x": np.ones(3)})
        save(self.path, tree)
        rows = {row.path: row for row in contents(self.path)}
        for row in parameter_table(tree):
            if row.path in ("0/ref", "0/number"):  # their types differ from those in the table
                continue
            stored = rows[row.path]
            self.assertEqual((stored.shape, str(stored.dtype)), (row.shape, row.dtype))
            self.assertEqual(stored.nbytes, row.bytes_total)
        self.assertLen(rows, len(contents_of(tree)))
        with self.assertRaisesRegex(NoCheckpointError, "contents: no checkpoint found"):
            contents(self.path / "x")


class DifferencesTest(FolderTest):
    def test_all_in_one_message(self):
        save(self.path, {"model": MLP(), "step": 3, "old": jnp.ones(2)})
        model = MLP(nnx.Rngs(1), hidden=8)
        model.upp = model.up
        del model.up
        tree = {"model": model, "step": 1.0}
        before, objects = contents_of(model), identities(model)
        with self.assertRaises(CheckpointError) as caught:
            restore(self.path, tree)
        self.assertEqual(
            str(caught.exception).replace(str(self.path), "PATH"),
            """restore: PATH does not fit the model.
Missing in the checkpoint:
  model/upp/kernel, shape (4, 8); did you mean 'model/up/kernel'?
Not in the model:
  model/up/kernel; did you mean 'model/upp/kernel'?
  old
Of another shape:
  model/down/kernel: (16, 4) in the checkpoint, (8, 4) in the model
Of another dtype (cast=True converts among floats and among integers):
  step: int64 in the checkpoint, float in the model""",
        )
        self.assertEqual(contents_of(model), before)
        self.assertEqual(identities(model), objects)

    @parameterized.product(inner=["array", "Variable"], outer=["array", "Variable"])
    def test_a_key_called_value(self, inner, outer):
        """It is that of a Variable, too, so two arrays could take one that was saved."""
        make = {"array": lambda: jnp.zeros(2), "Variable": lambda: nnx.Param(jnp.zeros(2))}
        save(self.path, {"a": {"value": {"b": jnp.ones(2)}}})
        tree = {"a": {"value": {"b": make[inner]()}, "b": make[outer]()}}
        before = contents_of(tree)
        with self.assertRaisesRegex(CheckpointError, r"Missing in the checkpoint:\n  a/.*b, shape"):
            restore(self.path, tree)
        self.assertEqual(contents_of(tree), before)
        for part in {"value": {"b": make[inner]()}}, {"b": make[outer]()}:
            [found] = jax.tree.leaves(restore(self.path, {"a": part}))
            np.testing.assert_array_equal(found, [1, 1])

    @parameterized.named_parameters(
        ("states", lambda model, optimizer: {"params": model, "opt_state": optimizer.opt_state}),
        ("objects", lambda model, optimizer: (model, optimizer)),
        ("model", lambda model, _: {"params": model}),
    )
    def test_modules_of_other_names(self, tree_of):
        """The call in the message reads blocks that `nnx.vmap` had stacked, and their moments."""
        tx = optax.chain(optax.clip(1.0), optax.adam(0.1))

        def make(is_saved):
            rngs = nnx.Rngs(int(is_saved))
            blocks = stack([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
            model = nnx.Dict(embed=nnx.Embed(3, 4, rngs=rngs), head=nnx.Linear(4, 4, rngs=rngs))
            model.blocks = blocks.layers if is_saved else blocks
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
            optimizer.update(model, nnx.state(model, nnx.Param))
            return model, optimizer

        saved_model, saved = make(is_saved=True)
        with ocp.StandardCheckpointer() as checkpointer:
            params, states = nnx.state(saved_model), nnx.state(saved)
            raw = {"params": params, "opt_state": states["opt_state"], "step": states["step"]}
            checkpointer.save(self.path, raw)
        model, optimizer = make(is_saved=False)
        tree = tree_of(model, optimizer)
        before = contents_of((model, optimizer))
        with self.assertRaisesRegex(CheckpointError, "does not fit") as caught:
            restore(self.path, tree)
        self.assertEqual(contents_of((model, optimizer)), before)
        text = str(caught.exception)
        self.assertRegex(text, "blocks/… of the checkpoint is (0/)?blocks/layers/… of the model")
        self.assertNotIn("Missing", text)
        [call] = re.findall(r"(?s)\nrestore\(path, .*\)$", text)
        objects = {"model": model, "optimizer": optimizer, "tree": tree}
        eval(call.strip(), {"restore": restore, "path": self.path, **objects})
        pairs = [(model, saved_model)]
        if isinstance(tree, tuple) or "opt_state" in tree:
            pairs.append((optimizer.opt_state, saved.opt_state))
        for restored, original in pairs:  # in the same order, under other paths
            want = [*contents_of(original).values()]
            self.assertEqual([*contents_of(restored).values()], want)

    # The filters of `nnx.split` by the keys of a checkpoint, whether it has pure dicts, and whether
    # modules share their random streams.
    SPLITS = (
        ({"params": nnx.Param, "rest": ...}, False, False),
        ({"rngs": nnx.RngState, "params": ...}, True, True),
        ({"params": nnx.Param, "batch_stats": nnx.BatchStat, "rngs": ...}, False, True),
        ({"params": nnx.Param, "keys": nnx.RngKey, "model": ...}, True, False),
    )

    GIVEN = ("one key", "another key", "the model alone", "with a step", "all keys")

    @parameterized.product(case=SPLITS, given=GIVEN)
    def test_a_split_model(self, case, given):
        """The model under all keys of the checkpoint reads it; else the message has a call."""
        filters, is_pure, shares = case

        def make(seed):
            rngs = nnx.Rngs(seed)
            model = nnx.Dict(blocks=nnx.List([Net(rngs), Net(rngs)]), bare=jnp.full(3, seed))
            if shares:
                model.blocks[0].dropout.rngs = model.blocks[1].dropout.rngs = rngs
            model.blocks[1].norm(jnp.ones((2, 8)) * seed)
            optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
            optimizer.update(model, nnx.state(model, nnx.Param))
            return model, optimizer

        saved_model, saved = make(2)
        raw = dict(zip(filters, nnx.split(saved_model, *filters.values())[1:], strict=True))
        raw["opt_state"] = nnx.state(saved)["opt_state"]
        if is_pure:
            raw = {key: nnx.to_pure_dict(state) for key, state in raw.items()}
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(self.path, raw)
        model, optimizer = make(1)
        keys = {"one key": [*filters][-1:], "another key": ["params", "x"]}.get(given, filters)
        is_alone = given == "the model alone"
        tree = {"opt_state": optimizer.opt_state, **dict.fromkeys(keys, model)}
        if given == "with a step":  # which the checkpoint lacks
            tree = (model, optimizer)
        if given == "all keys":
            restore(self.path, tree)
        else:
            before = contents_of((model, optimizer))
            with self.assertRaisesRegex(CheckpointError, "does not fit") as caught:
                restore(self.path, model if is_alone else tree)
            self.assertEqual(contents_of((model, optimizer)), before)
            call = r"below .*: pass (.*), with only=\.\.\." if is_alone else r"(?s)\nrestore(\(.*)$"
            [code] = re.findall(call, str(caught.exception))
            code = f"(path, {code}, only=...)" if is_alone else code
            eval(f"restore{code}", locals(), {"restore": restore, "path": self.path})
        self.assertEqual(contents_of(model), contents_of(saved_model))
        if not is_alone:
            self.assertEqual(contents_of(optimizer.opt_state), contents_of(saved.opt_state))

    def test_one_model_in_two_parts(self):
        """Each array is read from the first part that the checkpoint has it in."""
        one, two = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))
        for count, saved in enumerate((one, two)):
            saved.norm(jnp.ones((2, 8)) * (count + 2))
        save(self.path, {"a": one, "b": {"norm": two.norm, "dropout": two.dropout}})
        for part in (lambda model: model), (lambda model: {"norm": model.norm}):
            model = Net(nnx.Rngs(2))
            before = contents_of(model)
            with self.assertRaisesRegex(CheckpointError, "Not in the model:\n  b/"):
                restore(self.path, {"a": model, "b": part(model)})
            self.assertEqual(contents_of(model), before)
            with self.assertNoLogs("nnx_sharding", "WARNING"):
                restore(self.path, {"a": model, "b": part(model)}, only=...)
            self.assertEqual(contents_of(model), contents_of(one))
            restore(self.path, {"A": [model.linear], "a": model, "b": model}, only=nnx.Param)
            restore(self.path, {"b": part(model), "a": model.linear}, only=nnx.BatchStat)
            self.assertEqual(contents_of(model.norm), contents_of(two.norm))

    def test_one_array_in_two_dicts(self):
        """They are two arrays for JAX, so the same dict under both keys would read neither."""
        arrays = {"x": jnp.ones(2), "y": jnp.ones(2)}
        save(self.path, {"a": {"x": arrays["x"]}, "b": {"y": arrays["y"]}})
        for tree in {"a": arrays}, {"a": arrays, "b": arrays}:
            with self.assertRaisesRegex(CheckpointError, "Missing in the checkpoint:") as caught:
                restore(self.path, tree)
            self.assertNotIn("restore(path", str(caught.exception))

    @parameterized.named_parameters(
        ("two candidates", {"a": (4, 4), "b": (4, 4)}, {"c": (4, 4), "d": (4, 4)}),
        ("another shape", {"a": (4, 4)}, {"c": (4, 5)}),
        ("two that want one", {"a": (4, 4), "b": (4, 4)}, {"c": (4, 4)}),
    )
    def test_names_that_are_not_certain(self, model, saved):
        def make(shapes):
            return nnx.Dict(
                {key: nnx.Linear(*shape, rngs=nnx.Rngs(0)) for key, shape in shapes.items()}
            )

        save(self.path, make(saved))
        with self.assertRaisesRegex(CheckpointError, "Missing in the checkpoint:") as caught:
            restore(self.path, make(model))
        self.assertNotIn("restore(path", str(caught.exception))

    # The parameters whose moments are saved and those that are restored, and whether a filter can
    # leave out the others.
    WRT = (
        ("head", "all", True),
        ("head", "body", True),
        ("all", "head", None),  # nothing is missing
        ("kernels", "all", True),
        ("first block", "all", False),
    )

    @parameterized.product(case=WRT, chained=[False, True], stacked=[False, True])
    def test_an_optimizer_of_other_parameters(self, case, chained, stacked):
        filters = {
            "all": nnx.Param,
            "head": nnx.All(nnx.Param, nnx.PathContains("head")),
            "body": nnx.All(nnx.Param, nnx.Not(nnx.PathContains("head"))),
            "kernels": nnx.All(nnx.Param, nnx.PathContains("kernel")),
            "first block": nnx.All(nnx.Param, lambda path, _: path[:2] == ("blocks", 0)),
        }
        saved_wrt, wrt, has_filter = case
        tx = optax.chain(optax.clip(1.0), optax.adam(0.1)) if chained else optax.adam(0.1)

        def make(wrt):
            rngs = nnx.Rngs(0)
            layers = [nnx.Linear(4, 4, rngs=rngs) for _ in range(4)]
            blocks = stack(layers[:2]) if stacked else nnx.List(layers[:2])
            model = nnx.Dict(blocks=blocks, body=layers[2], head=layers[3])
            optimizer = nnx.Optimizer(model, tx, wrt=filters[wrt])
            grads = nnx.state(model, filters[wrt])
            optimizer.update(model, jax.tree.map(jnp.ones_like, grads))
            return model, optimizer

        if stacked and saved_wrt == "first block":
            return
        save(self.path, saved := make(saved_wrt))
        model, optimizer = make(wrt)
        with self.assertRaisesRegex(CheckpointError, "does not fit") as caught:
            restore(self.path, (model, optimizer))
        text = str(caught.exception).replace("\n", " ")
        self.assertNotIn("another Optax", text)
        if has_filter is None:
            restore(self.path, (model, optimizer), only=...)
        elif has_filter:
            [only] = re.findall(
                r"and keep the others, pass only=(.*?)\. With the saved count", text
            )
            restore(self.path, (model, optimizer), only=eval(only))
        else:
            self.assertIn("nnx.update(optimizer, nnx.state(old))", text)
            old = make(saved_wrt)[1]
            restore(self.path, (model, old))
            nnx.update(optimizer, nnx.state(old))
        expected, found = contents_of(saved[1]), contents_of(optimizer)
        shared = expected.keys() & found.keys()
        self.assertGreater(len(shared), 1)
        self.assertEqual({x: found[x] for x in shared}, {x: expected[x] for x in shared})

    PLACES = {
        "adam": lambda: optax.adam(0.1),
        "adam alone": lambda: optax.scale_by_adam(),
        "second of a chain": lambda: optax.chain(optax.clip(1.0), optax.adam(0.1)),
        "in a chain of a chain": lambda: optax.chain(
            optax.chain(optax.clip(1.0), optax.adamw(optax.constant_schedule(0.1))),
            optax.scale(1.0),
        ),
        "with a field": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    }

    @parameterized.parameters(*itertools.permutations(PLACES, 2))
    def test_moments_in_another_place(self, saved_in, place):
        """What the message proposes carries the moments over."""

        def make(name):
            model = MLP()
            optimizer = nnx.Optimizer(model, self.PLACES[name](), wrt=nnx.Param)
            optimizer.update(model, nnx.state(model, nnx.Param))
            return model, optimizer

        save(self.path, saved := make(saved_in))
        model, optimizer = make(place)
        for path, variable in nnx.to_flat_state(nnx.state(optimizer, nnx.OptState)):
            if "opt_state" in path:
                variable[...] = jnp.zeros_like(variable[...])
        with self.assertRaisesRegex(CheckpointError, "another Optax transformation") as caught:
            restore(self.path, (model, optimizer))
        text = str(caught.exception).replace("\n", " ")
        [places, rest] = re.findall(r"has them: (\{'step'.*\})(.*)\.$", text)[0]
        options = {"only": ...} if "only=..." in rest else {}
        restore(self.path, (model, eval(places, {"optimizer": optimizer})), **options)

        def moments(optimizer):
            contents = contents_of(optimizer).items()
            return [value for path, value in contents if {"mu", "nu"} & {*path}]

        self.assertEqual(moments(optimizer), moments(saved[1]))

    def test_another_optimizer(self):
        def make(tx):
            model = MLP()
            return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

        save(self.path, saved := make(optax.adam(0.1)))
        chained = make(optax.chain(optax.clip(1.0), optax.adam(0.1)))
        chained[0].up.kernel[...] = 0
        with self.assertRaisesRegex(CheckpointError, r"(?s)another Optax .*only=nnx.Not.*dict"):
            restore(self.path, chained)
        restore(self.path, chained, only=nnx.Not(nnx.PathContains("opt_state")))
        self.assertEqual(contents_of(chained[0]), contents_of(saved[0]))

    def test_moments_of_another_optimizer(self):
        model = MLP()
        adam = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        adam.update(model, nnx.state(model, nnx.Param))  # so that moments are not zeros
        save(self.path, (model, adam))
        chain = optax.chain(optax.clip(1.0), optax.adamw(0.1))
        chained = nnx.Optimizer(MLP(), chain, wrt=nnx.Param)
        moments = chained.opt_state[1][0]
        restore(self.path, {1: {"opt_state": {0: moments}, "step": chained.step}}, only=...)
        # In the same order, under other paths.
        self.assertEqual([*contents_of(chained).values()], [*contents_of(adam).values()])

    def test_keys_of_another_kind(self):
        save(self.path, {"k": jax.random.key(0), "e": jnp.zeros(0)})
        with self.assertRaisesRegex(CheckpointError, r"k: key<fry> in the .*, key<rbg> in the"):
            restore(self.path, {"k": jax.random.key(0, impl="rbg"), "e": jnp.zeros(0)})
        with self.assertRaisesRegex(CheckpointError, r"e: \(0,\) in the checkpoint, \(0, 2\)"):
            restore(self.path, {"k": jax.random.key(0), "e": jnp.zeros((0, 2))})

    def test_another_version(self):
        save(self.path, model := MLP())
        before, metadata = contents_of(model), self.path / "_METADATA"
        text = metadata.read_text()
        assert '"version": 1' in text
        metadata.write_text(text.replace('"version": 1', '"version": 2'))
        with self.assertRaisesRegex(CheckpointError, "has version 2; this release .* reads 1"):
            restore(self.path, model)
        self.assertEqual(contents_of(model), before)

    def test_foreign(self):
        before = contents_of(model := MLP())
        empty = self.folder / "empty"
        empty.mkdir()
        (self.folder / "file").write_text("hello")
        (self.folder / "begun.orbax-checkpoint-tmp").mkdir()
        with self.assertRaisesRegex(CheckpointError, "empty is damaged, or it is not a checkpoint"):
            restore(empty, model)
        with self.assertRaisesRegex(CheckpointError, "file is damaged, or it is not a checkpoint"):
            restore(self.folder / "file", model)
        with self.assertRaisesRegex(FileNotFoundError, "nowhere.$"):
            restore(self.folder / "nowhere", model)
        with self.assertRaisesRegex(NoCheckpointError, "begun, but not written completely"):
            restore(self.folder / "begun", model)
        with self.assertRaisesRegex(CheckpointError, "not written completely"):
            restore(self.folder / "begun.orbax-checkpoint-tmp", model)
        save(self.path, trained())
        with self.assertRaisesRegex(CheckpointError, "Not in the model:\n  0/down/kernel"):
            restore(self.path, model)
        self.assertEqual(contents_of(model), before)


# When one read fails, Orbax does not cancel the others, whose event loop is then closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class DamageTest(FolderTest):
    def test_every_file(self):
        self.damage()
        time.sleep(0.05)  # until the other reads end
        gc.collect()

    def damage(self):
        key = jax.random.key(0)
        split_up = jax.device_put(jax.random.normal(key, (64, 64)), NamedSharding(MESH, P("model")))
        tree = nnx.Dict(w=nnx.Param(split_up), n=nnx.Param(np.arange(99)), k=nnx.Param(key))
        tree.step = nnx.Variable(77)
        save(self.path, tree)
        want = contents_of(tree)
        blank = jax.tree.map(lambda x: x, tree)
        blank.w.set_value(jnp.zeros((64, 64)))
        blank.step.set_value(0)
        before = contents_of(blank)
        files = [f.relative_to(self.path) for f in sorted(self.path.rglob("*")) if f.is_file()]
        noticed = set()
        for file in files:
            for harm in (flip, flip_late, truncate, empty, os.unlink):
                copy = self.folder / "copy"
                shutil.copytree(self.path, copy)
                harm(copy / file)
                model = nnx.clone(blank)
                with self.subTest(file=str(file), harm=harm.__name__):
                    try:
                        restore(copy, model)
                    except CheckpointError:
                        noticed.add((file.name, harm))
                        self.assertEqual(contents_of(model), before)
                    else:
                        self.assertEqual(contents_of(model), want)
                shutil.rmtree(copy)
        self.assertIn(("_METADATA", truncate), noticed)
        self.assertIn(("manifest.ocdbt", flip), noticed)
        data = max(files, key=lambda f: (self.path / f).stat().st_size).name
        for harm in flip, flip_late, truncate, os.unlink:
            self.assertIn((data, harm), noticed)


def flip(file, place=0.5):
    """Changes one bit."""
    content = bytearray(file.read_bytes())
    if content:
        content[int(len(content) * place)] ^= 0x10
        file.write_bytes(content)


def flip_late(file):
    flip(file, 0.9)


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file):
    file.write_bytes(b"")


class SaveTest(FolderTest):
    def test_existing_checkpoints_are_kept(self):
        model = MLP()
        save(self.path, model)
        with self.assertRaisesRegex(FileExistsError, "overwrite=True replaces it"):
            save(self.path, MLP(nnx.Rngs(1)))
        with self.assertRaisesRegex(FileExistsError, "is not a checkpoint, so it is kept"):
            save(self.folder, model, overwrite=True)
        handler = ocp.StandardCheckpointHandler
        fault = mock.patch.object(handler, "async_save", side_effect=OSError("full"))
        with fault, self.assertRaisesRegex(CheckpointError, "could not be written: OSError: full"):
            save(self.path, MLP(nnx.Rngs(1)), overwrite=True)
        self.assertEqual(contents_of(restore(self.path, MLP(nnx.Rngs(2)))), contents_of(model))
        save(self.path, two := MLP(nnx.Rngs(1)), overwrite=True)
        self.assertEqual(contents_of(restore(self.path, MLP(nnx.Rngs(2)))), contents_of(two))
        self.assertEqual(os.listdir(self.folder), ["checkpoint"])  # nothing is left behind

    def test_only_a_checkpoint_is_replaced(self):
        model = MLP()
        for inside in ("", "model", "default", "3/model"):
            for others in (["metrics.jsonl"], ["logs/a", "model2/_METADATA"], ["d2", "_META"]):
                folder = self.folder / f"{inside}{len(others)}{others[0][0]}".replace("/", "-")
                save(folder / inside, model)
                for name in others:
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_text("precious")
                before = sorted(folder.rglob("*"))
                text = "is not a checkpoint" if inside else "not of a checkpoint.*" + others[-1][0]
                with self.assertRaisesRegex(FileExistsError, text):
                    save(folder, MLP(nnx.Rngs(1)), overwrite=True)
                self.assertEqual(sorted(folder.rglob("*")), before)

    def test_what_a_link_names_is_written(self):
        link, new = self.folder / "link", self.folder / "new"
        link.symlink_to(self.path)
        new.symlink_to(self.folder / "made")
        for path, real in ((link, self.path), (link, self.path), (new, self.folder / "made")):
            model = MLP(nnx.Rngs(len(os.listdir(self.folder))))
            save(path, model, overwrite=True)
            self.assertTrue(path.is_symlink())
            assert_same_state(self, restore(real, MLP()), model)
        self.assertLen(os.listdir(self.folder), 4)

    def test_the_home_directory(self):
        """In the paths of checkpoints, of programs and of reports; nothing is called ``~``."""
        model, here = MLP(), os.getcwd()
        report = jit(lambda x: x).lower(X).compile().report()
        home = mock.patch.dict(os.environ, {"HOME": str(self.folder), "USERPROFILE": ""})
        elsewhere = self.enter_context(tempfile.TemporaryDirectory())
        self.addCleanup(os.chdir, here)
        os.chdir(elsewhere)
        with home:
            save("~/a/model", model)
            assert_same_state(self, restore(self.folder / "a" / "model", MLP()), model)
            self.assertLen(contents(pathlib.Path("~/a/model")), 2)
            with Checkpoints("~/steps") as steps:
                steps.save(1, model)
            rules = {"(.+)": "{0}"}
            save_safetensors("~/tensors", model, rules)
            load_safetensors("~/tensors/model.safetensors", MLP(), rules)
            export(jit(lambda x: x))(X).save("~/program")
            report.save("~/report.json")
            write_html("~/page.html", load("~/report.json"))
            compare({"x": None}, lambda x: x, X, cache_dir="~/cache", quiet=True)
        names = {"a", "steps", "tensors", "program", "report.json", "page.html", "cache"}
        self.assertLessEqual(names, set(os.listdir(self.folder)))
        self.assertEmpty(os.listdir())

    def test_an_interrupted_save_keeps_the_old_checkpoint(self):
        model = MLP()
        save(self.path, model)
        handler, interrupt = ocp.StandardCheckpointHandler, {"side_effect": KeyboardInterrupt}
        for where, name in ((handler, "async_save"), (handler, "finalize"), (publishing, "sync")):
            with mock.patch.object(where, name, **interrupt), self.assertRaises(KeyboardInterrupt):
                save(self.path, MLP(nnx.Rngs(1)), overwrite=True)
            self.assertEqual(os.listdir(self.folder), ["checkpoint"])
            self.assertEqual(contents_of(restore(self.path, MLP(nnx.Rngs(2)))), contents_of(model))
        save(self.path, MLP(nnx.Rngs(1)), overwrite=True)
        self.assertEqual(os.listdir(self.folder), ["checkpoint"])

    def test_another_job_that_saves_meanwhile(self):
        """What it has saved is not replaced. If its path is another one, both can save."""
        long = self.folder / f"{'a' * 50}1"
        with publishing.Draft(self.folder / f"{'a' * 50}2", is_ours=lambda name: True):
            save(long, {"x": np.ones(2)})
        check = stored.check_replaceable

        def save_another(folder, overwrite):
            check(folder, overwrite)
            with mock.patch.object(stored, "check_replaceable", check):
                save(self.path, {"x": np.ones(2)})

        meanwhile = mock.patch.object(stored, "check_replaceable", save_another)
        with meanwhile, self.assertRaisesRegex(FileExistsError, "overwrite=True replaces it"):
            save(self.path, {"x": np.zeros(2)})
        for path in long, self.path:
            np.testing.assert_array_equal(restore(path, {"x": np.zeros(2)})["x"], 1)

    @pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="a folder in memory, on Linux")
    def test_a_folder_in_memory(self):
        """It is below /dev, but files in it are replaced as others are: as a whole."""
        path = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")), "a")
        path.write_bytes(b"old")
        with self.assertRaises(ValueError):
            publishing.write_file(path, b"new", check=mock.Mock(side_effect=ValueError))
        self.assertEqual(path.read_bytes(), b"old")

    def test_a_file_as_parent(self):
        (self.folder / "file").write_text("hello")
        with self.assertRaisesRegex(CheckpointError, r"cannot use .*: \[Errno"):
            save(self.folder / "file" / "x", MLP())

    def test_relative_and_nested_paths(self):
        here = os.getcwd()
        self.addCleanup(os.chdir, here)
        os.chdir(self.folder)
        save("a/b/c", nnx.Param(jnp.ones(2)))
        restore(self.folder / "a" / "b" / "c", nnx.Param(jnp.zeros(2)))

    def test_what_cannot_be_saved(self):
        gone = jnp.ones(3)
        gone.delete()
        cases = [
            (
                {"x": "text", "m": nnx.Dict(y=nnx.Param(object()))},
                TypeError,
                "m/y: object\n  x: str",
            ),
            (nnx.eval_shape(MLP), TypeError, "down/kernel: ShapeDtypeStruct\n  up/kernel"),
            ({"x": np.array(["a"])}, TypeError, "x: ndarray of <U1"),
            ({"x": jnp.ones(2, jnp.uint4)}, TypeError, "x: Array of uint4"),
            ({"x": 2**63, "y": -(2**63)}, TypeError, "x: int of more than 64 bits$"),
            ({"x": {"y": gone}}, ValueError, "donated or deleted:\n  x/y"),
            ({"x": jnp.ones(0)}, ValueError, "expected arrays with at least one element"),
            ({}, ValueError, "expected arrays with at least one element"),
            ({"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, ValueError, "a/b\n  a.b\nRename"),
        ]
        steps = self.enter_context(Checkpoints(self.folder / "steps"))
        for tree, kind, message in cases:
            with self.assertRaisesRegex(kind, message):
                save(self.path, tree)
            with self.assertRaisesRegex(kind, message):
                steps.save(1, tree)
        self.assertFalse(self.path.exists())
        save(self.path, {"a": {"b": jnp.ones(1)}})
        tree, _, message = cases[-1]
        with self.assertRaisesRegex(ValueError, f"restore: (.|\n)*joined by dots:\n  {message}"):
            restore(self.path, tree)

    def test_in_a_trace(self):
        model = MLP()
        with self.assertRaisesRegex(TypeError, "Tracer"):
            nnx.jit(lambda m: save(self.path, m))(model)
        save(self.path, model)
        with self.assertRaisesRegex(ValueError, "inside a traced function"):
            nnx.jit(lambda m: restore(self.path, m))(model)
        with self.assertRaisesRegex(TypeError, "up/kernel: str"):
            model.up.kernel.set_value("x")
            restore(self.path, model)


class StepsTest(FolderTest):
    def test_a_training_run_resumes(self):
        @jax.jit
        def loss(state, x):
            return jnp.mean((nnx.merge(graph, state)(x) - x) ** 2)

        graph = nnx.graphdef(MLP())
        x = jnp.ones((8, 4))

        def train(model, optimizer, checkpoints, last):
            losses = []
            start = checkpoints.resume((model, optimizer)) or 0
            for step in range(start + 1, last + 1):
                value, grads = jax.value_and_grad(loss)(nnx.state(model, nnx.Param), x)
                optimizer.update(model, grads)
                checkpoints.save(step, (model, optimizer))
                losses.append(float(value))
            return losses

        with Checkpoints(self.folder / "a") as checkpoints:
            want = train(*trained(), checkpoints, 6)
        with Checkpoints(self.folder / "b", enable_async_checkpointing=False) as checkpoints:
            first = train(*trained(), checkpoints, 3)
        with Checkpoints(self.folder / "b", max_to_keep=2) as checkpoints:
            rest = train(*nnx.eval_shape(trained), checkpoints, 6)
            checkpoints.wait_until_finished()
            self.assertEqual((checkpoints.all_steps(), checkpoints.latest_step()), ([5, 6], 6))
        self.assertEqual(first + rest, want)
        self.assertEqual(len(set(want)), 6)

    def test_which_steps_are_kept(self):
        x = nnx.Param(jnp.zeros(2))
        with Checkpoints(
            self.folder, max_to_keep=1, keep_period=4, save_interval_steps=2
        ) as checkpoints:
            saved = [step for step in range(1, 8) if checkpoints.save(step, x)]
            self.assertTrue(checkpoints.save(9, x, force=True))
            checkpoints.wait_until_finished()
            self.assertEqual((saved, checkpoints.all_steps()), ([1, 2, 4, 6], [4, 9]))
        self.assertEqual(contents(self.folder / "9")[0].shape, (2,))

    def test_arrays_may_change_while_they_are_written(self):
        x = jax.device_put(jnp.zeros((512, 512)), NamedSharding(MESH, P("data", "model")))
        host = np.zeros((512, 512))
        add = jax.jit(lambda x: x + 1, donate_argnums=0)
        with Checkpoints(self.folder, max_to_keep=None) as checkpoints:
            for step in range(3):
                checkpoints.save(step, {"x": x, "host": host})
                x = add(x)
                host += 1
            for step in range(3):
                back = checkpoints.restore({"x": x, "host": host}, step=step)
                self.assertEqual({*np.unique(back["x"]), *np.unique(back["host"])}, {step})

    def test_mistakes(self):
        x = nnx.Param(jnp.zeros(2))
        with Checkpoints(self.folder / "new") as checkpoints:
            self.assertIsNone(checkpoints.resume(x))
            self.assertIsNone(checkpoints.latest_step())
            with self.assertRaisesRegex(NoCheckpointError, "no steps found in"):
                checkpoints.restore(x)
            checkpoints.save(3, x)
            for step in 3, 2:
                with self.assertRaisesRegex(ValueError, f"step {step} does not come after step 3"):
                    checkpoints.save(step, x)
            with self.assertRaisesRegex(NoCheckpointError, "step 4 is not in .*, only 3"):
                checkpoints.restore(x, step=4)
            with self.assertRaisesRegex(TypeError, "cannot be changed in place: y, z/0"):
                checkpoints.resume({"x": x, "y": jnp.ones(2), "z": [3]})

    def test_invalid_steps(self):
        x = nnx.Param(jnp.zeros(2))
        with Checkpoints(self.folder / "new") as checkpoints:
            for step in -1, np.int64(-1):
                with self.assertRaisesRegex(ValueError, "a step of 0 or more, got -1"):
                    checkpoints.save(step, x)
            for step in np.bool_(True), 1.0, "1", None:
                with self.assertRaisesRegex(TypeError, "cannot be interpreted as an integer"):
                    checkpoints.save(step, x)
            self.assertTrue(checkpoints.save(np.int32(3), x))
            self.assertEqual(checkpoints.all_steps(), [3])

    def test_a_step_that_cannot_be_written(self):
        x = nnx.Param(jnp.ones(2))
        with Checkpoints(self.folder / "a") as checkpoints:
            checkpoints.save(1, x)
            checkpoints.wait_until_finished()
            target = "orbax.checkpoint.StandardCheckpointHandler.async_save"
            fault = mock.patch(target, side_effect=OSError("no space"))
            with fault, self.assertRaisesRegex(CheckpointError, "no space"):
                checkpoints.save(2, x)
            self.assertEqual(checkpoints.latest_step(), 1)
            restore(self.folder / "a" / "1", x)


class ChecksumTest(parameterized.TestCase):
    @parameterized.parameters(
        "float32", "bfloat16", "float16", "int8", "uint16", "int32", "bool", "complex64", "int4",
        "float8_e4m3fn", "float4_e2m1fn",
    )  # fmt: skip
    def test_shardings_do_not_matter(self, dtype):
        host = (np.arange(2**17).reshape(256, 512) * 37 % 101 - 40).astype(jnp.dtype(dtype))
        self.assertGreater(jnp.asarray(host).nbytes, _SMALL)
        there = NamedSharding(mesh_of((2, 4), ("a", "b"), "explicit"), P("b", "a"))
        found = checksums([host, jnp.asarray(host), jax.device_put(host, there)])
        self.assertLen(set(found), 1)
        self.assertNotEqual(checksums([np.roll(host, 1)])[0], found[0])
        part = host[0]
        self.assertEqual(checksums([part]), checksums([jnp.asarray(part)]))
        self.assertEqual(checksums([host[:0], jnp.asarray(host[:0])]), [0, 0])

    @parameterized.parameters(1, 5, 2**15, 2**16 + 3)  # up to three chunks
    def test_as_defined(self, size):
        """As the docstring of the module defines it, which files of earlier releases need."""

        def hash_of(word):
            for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
                word = (word ^ word >> shift) * factor % 2**32
            return word ^ word >> 16

        words = np.random.default_rng(0).integers(0, 2**32, size, np.uint32)
        expected = sum(hash_of(int(x) ^ i * 0x9E3779B9 % 2**32) for i, x in enumerate(words))
        self.assertEqual(checksums([words, jnp.asarray(words)]), [expected % 2**32] * 2)

    def test_any_bit_matters(self):
        words = np.zeros((5, 3), np.uint32)
        [zero] = checksums([words])
        for place in np.ndindex(words.shape):
            for bit in range(32):
                words[place] = 1 << bit
                self.assertNotEqual(checksums([words]), [zero])
            words[place] = 0


# What a leaf may be: dtypes of both formats, and those that only Orbax has.
IN_BOTH = ("float32", "bfloat16", "float8_e4m3fn", "int8", "uint16", "bool", "complex64")
IN_ORBAX = (*IN_BOTH, "int4", "key<fry>", "key<rbg>", "numpy", "number")
SHAPES = ((), (0,), (8, 0), (1,), (8,), (7, 3), (4, 8), (16, 2, 4))
MESHES = (MESH, OTHER, mesh_of((8,), ("data",), "explicit"))


@st.composite
def some_sharding(draw, shape):
    """None, one device, or axes of some mesh for the dimensions that they divide."""
    mesh = draw(st.sampled_from((None, *MESHES)))
    if mesh is None:
        return draw(st.sampled_from((None, SingleDeviceSharding(jax.devices()[5]))))
    free, entries = list(draw(st.permutations(mesh.axis_names))), []
    for size in shape:
        fits = free and size % mesh.shape[free[-1]] == 0 and draw(st.booleans())
        entries.append(free.pop() if fits else None)
    return NamedSharding(mesh, P(*entries))


@st.composite
def some_leaf(draw, kinds):
    """A number, an array of NumPy, or a Variable with an array or keys in some sharding."""
    kind, shape = draw(st.sampled_from(kinds)), draw(st.sampled_from(SHAPES))
    seed = draw(st.integers(1, 99))
    rng = np.random.default_rng(seed)
    if kind == "number":
        return draw(st.sampled_from((3, 2.5, True, 1 + 2j)))
    x = (rng.normal(size=shape) * 4).astype(np.float32)
    if kind == "numpy":
        return x
    if kind.startswith("key"):
        x = jax.random.key(seed, impl="rbg" if kind == "key<rbg>" else None)
        x, shape = jax.random.split(x, 8), (8,)
    else:
        x = jnp.asarray(x > 0 if kind == "bool" else (np.abs(x) if kind[0] == "u" else x), kind)
    return draw(st.sampled_from((nnx.Param, nnx.BatchStat)))(
        jax.device_put(x, draw(some_sharding(shape)))
    )


def some_tree(kinds):
    """A tuple of two containers of leaves, of which some are in both, and of stacked layers."""

    def make(items, keys, stacked):
        items = [*items, items[0]]  # shared, if it is a Variable
        kinds = (list, tuple, lambda x: dict(zip(keys, x, strict=False)))
        layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2)]
        inner = stack(layers) if stacked else nnx.List(layers)
        return (kinds[len(items) % 3](items), kinds[2](items[::-1]), {"value": inner})

    keys = st.sampled_from((("a b", "c.d", "value", "\u00fc", "A"), (0, 1, -2, 3, 10)))
    items = st.lists(some_leaf(kinds), min_size=1, max_size=4)
    return st.builds(make, items, keys, st.booleans())


def in_dicts(tree):
    """The same tree with dicts by index instead of lists and tuples."""
    if isinstance(tree, list | tuple):
        return {i: in_dicts(x) for i, x in enumerate(tree)}
    return {k: in_dicts(x) for k, x in tree.items()} if isinstance(tree, dict) else tree


def as_bytes(x):
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()


@settings(max_examples=settings().max_examples // 4)  # each takes a quarter of a second
@given(st.data())
def test_random_round_trips(data):
    """Any tree, sharding and dtype comes back as it was, in the shardings that are asked for."""
    is_of_orbax = data.draw(st.booleans())
    tree = data.draw(some_tree(IN_ORBAX if is_of_orbax else IN_BOTH))
    flat, is_abstract = flatten(tree), data.draw(st.booleans())
    blank, wanted = [], []
    for x in flat.leaves:
        if not isinstance(x, jax.Array):
            blank.append(np.zeros_like(x) if isinstance(x, np.ndarray) else type(x)())
            wanted.append(None)
            continue
        wanted.append(data.draw(some_sharding(x.shape)))
        new = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=wanted[-1])
        if not is_abstract:
            is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            other = (
                jax.random.key(0, impl=jax.random.key_impl(x)) if is_key else np.zeros((), x.dtype)
            )
            new = jax.device_put(jnp.broadcast_to(other, x.shape), wanted[-1])
        blank.append(new)
    target = unflatten(flat.structure, blank).root
    with tempfile.TemporaryDirectory() as folder:
        if is_of_orbax:
            save(folder + "/x", tree)
            target = in_dicts(target) if data.draw(st.booleans()) else target
            result = restore(folder + "/x", target)
        else:
            paths = {array.path for array in named_arrays(flat)}
            rules = {re.escape(path.replace("/", ".")): path for path in paths}
            save_safetensors(folder, tree, rules)
            result = load_safetensors(folder, target, rules)
    for old, new, sharding in zip(flat.leaves, flatten(result).leaves, wanted, strict=True):
        assert getattr(new, "dtype", type(new)) == getattr(old, "dtype", type(old))
        assert (np.shape(new), as_bytes(new)) == (np.shape(old), as_bytes(old))
        assert sharding is None or new.sharding.is_equivalent_to(sharding, new.ndim)
