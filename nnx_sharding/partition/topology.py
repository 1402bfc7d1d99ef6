"""TPU devices to compile for, which need not be attached to this machine."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import glob
import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AbstractMesh, Mesh

# A JAX device is two cores of a TPU v4.
_OPTIONS = {"v4": {"chip_config_name": "megacore"}}

# Without these, libtpu looks for a TPU, asks the network for its kind, logs what it does not find,
# and locks out other processes.
_WITHOUT_TPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5e-8",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


@functools.lru_cache(maxsize=8)  # devices of two descriptions are never equal
def topology_devices(name: str, num_slices: int = 1) -> tuple[Any, ...]:
    """The devices of a topology such as ``v5e:4x4``, in each of several slices."""
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            f"the topology {name!r} needs the TPU compiler, which needs no TPU: pip install "
            "'nnx_sharding[tpu]'. A mesh of sizes alone compiles for virtual CPU devices."
        )
    options: dict[str, Any] = dict(_OPTIONS.get(name.partition(":")[0], {}))
    if num_slices > 1:
        options["num_slices"] = num_slices
    try:
        with _environment():
            topology = topologies.get_topology_desc(name, "tpu", **options)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"unknown TPU topology {name!r}: {error}. Examples are 'v5e:4x4', "
            "'v5p:2x2x2', 'v6e:4x4', 'v4:2x2x1' or 'tpu7x:2x2x1'."
        ) from None
    return tuple(topology.devices)


# The topology and the number of slices for meshes made from sizes alone.
DEFAULT: contextvars.ContextVar[tuple[str, int] | None] = contextvars.ContextVar(
    "topology", default=None
)


@contextlib.contextmanager
def on_topology(name: str | None, num_slices: int = 1) -> Iterator[None]:
    """Within the block, ``planning_mesh`` places sizes on this topology; None changes nothing."""
    if name is None:
        yield
        return
    topology_devices(name, num_slices)  # fails here if it is unknown
    token = DEFAULT.set((name, num_slices))
    try:
        yield
    finally:
        DEFAULT.reset(token)


def arranged(sizes: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """The devices as a mesh along their links, with the slices along the first axes."""
    num_slices = len({_slice(device) for device in devices})
    across: list[int] = []
    for size in sizes:
        across.append(math.gcd(size, num_slices // math.prod(across)))
    within = [size // count for size, count in zip(sizes, across, strict=True)]
    split = {"allow_split_physical_axes": True}
    if num_slices == 1:
        return mesh_utils.create_device_mesh(within, devices, **split)
    try:
        return mesh_utils.create_hybrid_device_mesh(within, across, devices, **split)
    except ValueError as error:
        raise ValueError(
            f"{num_slices} slices do not form axes of the sizes {tuple(sizes)}. They are along the "
            f"first axes, as in {{'replica': {num_slices}, 'data': -1}}: {error}"
        ) from None


def axes_across_slices(mesh: Mesh | AbstractMesh) -> set[str]:
    """The axes along which devices are in different slices; none for GPUs, whose nodes differ."""
    if not isinstance(mesh, Mesh) or mesh.devices.flat[0].platform == "gpu":
        return set()
    slices = np.vectorize(_slice, otypes=[int])(mesh.devices)
    return {str(name) for i, name in enumerate(mesh.axis_names) if np.diff(slices, axis=i).any()}


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", 0)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Sets what libtpu reads when it is loaded on a machine without a TPU."""
    has_tpu = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
    added = {} if has_tpu else {k: v for k, v in _WITHOUT_TPU.items() if k not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)
