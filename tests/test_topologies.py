"""Meshes of TPUs that are not there, from the names of topologies."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import jax
import pytest
from jax.sharding import PartitionSpec as P

from nnx_sharding import jit
from nnx_sharding.partition import planning_mesh
from nnx_sharding.testing import assert_no_collective

HAS_COMPILER = importlib.util.find_spec("libtpu") is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="libtpu is not installed")


def compiled(mesh):
    fun = jit(lambda x: x.sum(0), in_shardings=P("data"), out_shardings=P(), mesh=mesh)
    return fun.lower(jax.ShapeDtypeStruct((1024, 256), "float32")).compile()


@pytest.mark.skipif(HAS_COMPILER, reason="libtpu is installed")
def test_the_compiler_is_missing():
    with pytest.raises(ImportError, match=r"'v5e:4x4' .* pip install 'nnx_sharding\[tpu\]'"):
        planning_mesh("v5e:4x4", {"data": 16})


def test_topologies_and_axes_come_together():
    for wrong in (("v5e:4x4",), ({"data": 8}, {"data": 8}), ("v5e:4x4", (4, 4))):
        with pytest.raises(TypeError, match="a topology and axes are given together"):
            planning_mesh(*wrong)
    with pytest.raises(TypeError, match="a topology and axes are given together"):
        planning_mesh({"data": 8}, num_slices=2)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("v4:2x2x1", "TPU v4", 4),
        ("v5e:16x16", "TPU v5 lite", 256),
        ("v5p:2x2x2", "TPU v5", 8),
        ("v6e:4x4", "TPU v6 lite", 16),
        ("tpu7x:2x2x1", "TPU7x", 8),  # two devices are one chip
    ],
)
def test_devices(name, kind, count):
    mesh = planning_mesh(name, {"data": -1, "model": 2})
    assert mesh.shape == {"data": count // 2, "model": 2}
    assert mesh.devices.flat[0].device_kind == kind
    assert len({*mesh.devices.flat}) == count


@needs_compiler
def test_slices_are_along_the_first_axes():
    mesh = planning_mesh("v5e:2x4", {"data": 4, "model": 8}, num_slices=4)
    assert [{d.slice_index for d in row} for row in mesh.devices] == [{0}, {1}, {2}, {3}]
    mesh = planning_mesh("v5e:2x4", {"replica": 2, "data": -1}, num_slices=4)
    assert [{d.slice_index for d in row} for row in mesh.devices] == [{0, 1}, {2, 3}]
    # The hosts sum over slices, of which no figures are known.
    report = compiled(planning_mesh("v5e:2x4", {"data": 16}, num_slices=2)).report()
    assert report.collectives is None and report.roofline.interconnect_s is None
    with pytest.raises(ValueError, match=r"collectives of .* are unknown: .*\n  send"):
        assert_no_collective(report)


@needs_compiler
def test_names_and_sizes_that_do_not_fit():
    with pytest.raises(
        ValueError, match=r"unknown TPU topology 'v9:2x2': .* Examples are 'v5e:4x4'"
    ):
        planning_mesh("v9:2x2", {"data": 4})
    with pytest.raises(ValueError, match="unknown TPU topology 'v5e:3x5'"):
        planning_mesh("v5e:3x5", {"data": 15})
    with pytest.raises(ValueError, match="is not the number of devices, 8"):
        planning_mesh("v5e:2x4", {"data": 3})


@needs_compiler
def test_the_real_compiler_compiles():
    before = dict(os.environ)
    report = compiled(planning_mesh("v5e:2x4", {"data": 8})).report()
    assert dict(os.environ) == before
    assert (report.platform, report.device_kind) == ("tpu", "TPU v5 lite")
    assert report.roofline.device == "TPU v5e"
    assert report.memory.arguments == 1024 * 256 * 4 // 8
    assert report.collectives.bytes_sent == 2 * 256 * 4 * 7 // 8
    [row] = report.roofline.traffic
    assert row.links == "ICI x (line of 2) + y (line of 4)"
    assert row.seconds == pytest.approx(256 * 4 / 2 / 50e9)  # the chip in the corner has two links
    assert report.cost.compiled.optimal_seconds > 0
    assert "the compiler's own estimate" in str(report)


@needs_compiler
def test_processes_side_by_side_write_nothing():
    code = (
        "import time; from nnx_sharding.partition import planning_mesh\n"
        "mesh = planning_mesh('v5e:2x4', {'data': 8}); time.sleep(5)"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TPU_", "JAX_"))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    assert [process.communicate()[0] for process in processes] == ["", ""]
    assert [process.returncode for process in processes] == [0, 0]
