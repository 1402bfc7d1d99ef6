"""Checkpoints written and read by different numbers of processes; a killed training run."""

import json
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    import preamble  # noqa: F401  (joins the others before anything is computed)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding import StateSharding, jit
from nnx_sharding.checkpoint import Checkpoints, contents, restore, save
from nnx_sharding.errors import CheckpointError
from nnx_sharding.partition import abstract_init, fsdp, sharded_init
from nnx_sharding.training import fetched, offload

KERNEL = np.random.default_rng(0).normal(size=(256, 128)).astype(np.float32)  # 128 KiB
RULES = StateSharding({nnx.PathContains("kernel"): P("data", "model"), ...: P()})
STEPS = 6


def mesh_of(shape, kind="Auto"):
    names = ("data", "model")
    return jax.make_mesh(shape, names, axis_types=(AxisType[kind],) * 2)


class Model(nnx.Module):
    """Arrays on all devices, and what belongs to each process alone."""

    def __init__(self, mesh, scale=1):
        def everywhere(x, *axes):
            put = NamedSharding(mesh, P(*axes))
            return nnx.Param(jax.make_array_from_callback(x.shape, put, lambda index: x[index]))

        self.kernel = everywhere(KERNEL * scale, "data", "model")
        self.bias = everywhere(np.arange(16.0, dtype=np.float32) * scale)
        self.tied = self.kernel
        self.step = nnx.Variable(jnp.array(7 * scale))
        self.epoch = nnx.Variable(5 * scale)
        self.host = nnx.Variable(np.arange(5) * scale)
        self.rngs = nnx.Rngs(3 * scale)
        keys = jax.random.split(jax.random.key(scale), 8)
        data = everywhere(np.asarray(jax.random.key_data(keys)), "data").get_raw_value()
        self.keys = nnx.Variable(jax.random.wrap_key_data(data))


class Kernel(nnx.Module):
    """A part of it, without data."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.asarray(KERNEL))


def words(x):
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def assert_same(model, other):
    """What this process holds of two models has the same values and shardings."""
    ours, theirs = (dict(nnx.to_flat_state(nnx.state(m))) for m in (model, other))
    assert set(ours) == set(theirs)
    for path in ours:
        a, b = (words(x[path].get_raw_value()) for x in (ours, theirs))
        assert type(a) is type(b), path
        if not isinstance(a, jax.Array):
            np.testing.assert_array_equal(a, b, str(path))
            continue
        assert (a.sharding, a.dtype, a.committed) == (b.sharding, b.dtype, b.committed), path
        for one, two in zip(a.addressable_shards, b.addressable_shards, strict=True):
            np.testing.assert_array_equal(one.data, two.data, str(path))


def write(folder):
    """What this number of processes writes."""
    save(folder, Model(mesh_of((2, 4)), scale=2))
    save(folder, Model(mesh_of((2, 4))), overwrite=True)
    assert not [*folder.parent.glob(f".{folder.name}.*")]  # nothing is left behind


def read(folder):
    """Reads what others wrote, onto several meshes."""
    for shape in (2, 4), (8, 1):
        model = Model(mesh_of(shape), scale=3)
        objects = [id(x) for _, x in nnx.iter_graph(model) if isinstance(x, nnx.Variable)]
        assert restore(folder, model) is model
        assert_same(model, Model(mesh_of(shape)))
        assert model.tied is model.kernel
        found = [id(x) for _, x in nnx.iter_graph(model) if isinstance(x, nnx.Variable)]
        assert found == objects
    one = abstract_init(Kernel, RULES, mesh_of((4, 2)))
    restore(folder, one, only=nnx.Param)
    kernel = one.kernel.get_raw_value()
    assert kernel.addressable_shards[0].data.shape == (64, 64)
    for shard in kernel.addressable_shards:
        np.testing.assert_array_equal(shard.data, KERNEL[shard.index])
    assert len(contents(folder)) == 8, contents(folder)


def refuse(folder):
    """With a bit of an array changed, restore fails on all processes and changes nothing."""
    model = Model(mesh_of((2, 4)), scale=3)
    try:
        restore(folder, model)
    except CheckpointError as error:
        assert "is damaged" in str(error), error
    else:
        raise AssertionError("not noticed")
    assert_same(model, Model(mesh_of((2, 4)), scale=3))


def damage(folder):
    """Changes one bit of the largest file."""
    files = (file for file in folder.rglob("*") if file.is_file())
    largest = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def make():
    rngs = nnx.Rngs(0)
    layers = nnx.Linear(16, 64, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
    model = nnx.Sequential(*layers, nnx.Linear(64, 8, rngs=rngs))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def train_step(model, optimizer, x):
    def loss(model):
        return jnp.mean((model(x) - x[:, :8]) ** 2)

    value, grads = nnx.value_and_grad(loss)(model)
    with fetched(optimizer):
        optimizer.update(model, grads)
    return value


class Data:
    """The data of one process."""

    def __init__(self):
        self.state = {"process": jax.process_index(), "step": 0}

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def train(folder, kind="Auto", killed_at=None, is_another_number=False):
    """The step at which training begins, and the losses; the optimizer's state is offloaded.

    Another number of processes than in the run before has no data state.
    """
    mesh = mesh_of((2, 4), kind)
    put = NamedSharding(mesh, P("data"))
    with jax.set_mesh(mesh), Checkpoints(folder) as checkpoints:
        model, optimizer = nnx.eval_shape(make)
        rules, step_fn = RULES, jit(train_step)
        if kind == "Explicit":  # where JAX does not say how to multiply what RULES shards
            rules = fsdp(model, mesh=mesh, optimizer=optimizer, min_size=0)
        offloaded = offload(rules, optimizer, nnx.optimizer.OptState, mesh=mesh)
        if kind == "Explicit":
            options = {"in_shardings": (rules, offloaded, put)}
            step_fn = jit(train_step, **options, out_shardings=NamedSharding(mesh, P()))
        model, optimizer = sharded_init(make, offloaded, mesh)
        data = Data()
        start = checkpoints.resume((model, optimizer), data=None if is_another_number else data)
        start = start or 0
        assert is_another_number or data.state == {"process": jax.process_index(), "step": start}
        check_memories(model, optimizer)
        losses = []
        for step in range(start + 1, STEPS + 1):
            batch = np.random.default_rng(step).normal(size=(8, 16)).astype(np.float32)
            x = jax.make_array_from_callback(batch.shape, put, lambda index: batch[index])
            losses.append(float(step_fn(model, optimizer, x)))
            data.set_state(data.state | {"step": step})
            checkpoints.save(step, (model, optimizer), data=data)
            if step == killed_at and jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGKILL)  # while the checkpoint is written
        check_memories(model, optimizer)
    return start, losses


def check_memories(model, optimizer):
    """Parameters and numbers are in device memory, moments in host memory."""
    assert {x.sharding.memory_kind for x in jax.tree.leaves(nnx.state(model))} == {"device"}
    for x in jax.tree.leaves(nnx.state(optimizer)):
        assert x.sharding.memory_kind == ("pinned_host" if x.ndim else "device"), x.sharding


def show(found):
    if jax.process_index() == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    what, where, *more = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    if what == "exchange":
        written = where / str(jax.process_count())
        write(written)
        read(where / "1")
        read(written)
        refuse(where / "damaged")
        for folder in more:
            train(Path(folder), killed_at=4)
    if what == "kill":
        train(where, *more, killed_at=4)
    if what == "train":
        kind, *others = more
        for folder in where, *others:
            show(train(folder, kind))
