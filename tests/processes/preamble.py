"""What each of several processes does first: it joins the others.

It also has checks of arrays that a process holds only a part of. A worker imports this before
anything else; ``tests/test_processes.py`` launches it.
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
    """The part of an array that this process holds is that part of another, whole one."""
    assert array.shape == np.shape(expected), (array.shape, np.shape(expected))
    assert array.addressable_shards
    for shard in array.addressable_shards:
        part = np.asarray(expected)[shard.index]
        np.testing.assert_allclose(np.asarray(shard.data), part, rtol=0, atol=atol)


def spans_all(array):
    """Whether an array lies on the devices of all processes."""
    return {device.process_index for device in array.sharding.device_set} == set(
        range(jax.process_count())
    )
