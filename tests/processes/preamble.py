"""Joins the other processes, and checks arrays of which a process holds only some shards.

Imported first by the programs that ``tests/test_processes.py`` launches.
"""

import sys
import warnings
from pathlib import Path

import jax

sys.path.append(str(Path(__file__).parents[1]))
jax.distributed.initialize()
warnings.simplefilter("error")

import numpy as np  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

RANK = jax.process_index()


def mesh_of(shape=(2, 4), names=("data", "model"), kind=AxisType.Auto):
    """A mesh over the devices of all processes, in their order."""
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=(kind,) * len(names))


def assert_holds(array, expected, atol=0.0):
    """The shards of this process are those of the expected array."""
    assert array.shape == np.shape(expected), (array.shape, np.shape(expected))
    assert array.addressable_shards
    for shard in array.addressable_shards:
        part = np.asarray(expected)[shard.index]
        np.testing.assert_allclose(np.asarray(shard.data), part, rtol=0, atol=atol)


def spans_all(array):
    """Whether an array is on the devices of all processes."""
    return {device.process_index for device in array.sharding.device_set} == set(
        range(jax.process_count())
    )
