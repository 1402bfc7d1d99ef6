"""Operations on arrays in the memories of devices and hosts: nothing leaves its memory."""

from __future__ import annotations

import itertools
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding import value_and_grad
from nnx_sharding.cli.main import main
from nnx_sharding.core.memory import main_memory, memory_of, other_memory
from nnx_sharding.partition import fsdp
from nnx_sharding.testing import assert_same
from nnx_sharding.training import offload
from zoo import mean_square, mesh_of, step_of

WORKER = pathlib.Path(__file__).parent / "processes" / "memories.py"
sys.path.append(str(WORKER.parent))

import memories  # noqa: E402

CASES = [*itertools.product(memories.KINDS, memories.SIZES, memories.SPECS)]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("operation", memories.OPERATIONS.values(), ids=lambda x: x.__name__)
@pytest.mark.parametrize("words", CASES, ids="-".join)
def test_operations(words, operation, axis_type, tmp_path):
    operation(memories.Case(*words, axis_type), tmp_path)


def test_two_processes(tmp_path, capfd):
    options = ["--processes", "2", "--devices-per-process", "4", "--timeout", "600"]
    code = main(["launch", *options, str(WORKER), str(tmp_path)])
    out, err = capfd.readouterr()
    assert code == 0, out + err
    assert "[1] ok" in out


def test_what_tells_the_memory():
    mesh = mesh_of((8,), ("data",))
    for kind, expected in zip(memories.KINDS, (None, *memories.KINDS[1:]), strict=True):
        sharding = NamedSharding(mesh, P("data"), memory_kind=kind)
        assert other_memory(sharding) == expected
        array = jax.device_put(jnp.ones(8), sharding)
        assert memory_of(array) == expected
        seen = []
        jax.jit(lambda x: seen.append(memory_of(x)) or x)(array)
        assert seen == [jax.memory.Space.Host if kind == "pinned_host" else None]
        device = array.addressable_shards[0].data.sharding
        assert other_memory(device) == expected
    on_no_device = NamedSharding(mesh.abstract_mesh, P("data"), memory_kind="pinned_host")
    assert other_memory(on_no_device) == "pinned_host"
    assert memory_of(1) is memory_of(np.ones(2)) is other_memory(P()) is None


class TestSame:
    """``assert_same`` runs on one device what is declared with shardings on the mesh."""

    step = staticmethod(step_of(value_and_grad(mean_square), fetches=True))

    @pytest.mark.parametrize("kind", ["auto", "explicit"])
    def test_offloaded_and_named(self, kind):
        mesh = mesh_of((8,), ("data",), kind)
        model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        sharding = fsdp(model, mesh=mesh, optimizer=optimizer, min_size=0)
        offloaded = offload(sharding, optimizer, mesh=mesh)
        rows = NamedSharding(mesh, P("data"))
        shardings, options = (
            (sharding, offloaded, rows),
            {"out_shardings": NamedSharding(mesh, P())},
        )
        assert_same(
            self.step, model, optimizer, jnp.ones((8, 8)), shardings=shardings, mesh=mesh, **options
        )

    def test_prefixes_of_pytrees(self):
        mesh, x = mesh_of((8,), ("data",)), jnp.arange(64.0).reshape(8, 8)
        rows = NamedSharding(mesh, P("data"))

        def step(x, y):
            return x @ y[0] + y[1]

        assert_same(step, x, [x, x], shardings={"x": rows, "y": [P("data"), None]}, mesh=mesh)


class Client:
    """The client of a process on one of several hosts."""

    def __init__(self):
        self._devices = [Device(self, process) for process in (1, 0, 1)]

    def devices(self):
        return self._devices

    def process_index(self):
        return 0


class Device:
    def __init__(self, client, process_index):
        self.client, self.process_index = client, process_index

    def default_memory(self):
        if self.process_index != 0:  # as JAX for TPUs of other hosts
            raise RuntimeError("UNIMPLEMENTED: DefaultMemory is not supported")
        return types.SimpleNamespace(kind="device")


def test_main_memory_of_devices_of_other_processes():
    client = Client()
    sharding = types.SimpleNamespace(device_set={client.devices()[0]}, memory_kind="device")
    assert main_memory(sharding) is sharding
