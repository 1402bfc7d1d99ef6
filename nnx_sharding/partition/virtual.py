"""Meshes with more devices than this machine has, to compile programs for that cannot run here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from .. import _compat
from .mesh import make_mesh

# Each virtual CPU device takes a thread and 0.3 MiB; the largest pods have fewer devices.
MOST_DEVICES = 10_000


def planning_mesh(mesh: Mesh | AbstractMesh | Mapping[str, int]) -> Mesh:
    """A mesh to compile for, of devices that this machine need not have.

    If there are enough devices, the mesh consists of them. Otherwise it consists of virtual CPU
    devices: XLA partitions a program for them as for any others, and the memory that it reports
    is that of its CPU compiler. They hold no arrays, and programs for them cannot be run.

    Args:
      mesh: the sizes of the axes by name, major first; the axes are then ``Auto``. Or an abstract
        mesh. A mesh of devices is returned as it is.

    Raises:
      TypeError: it is something else, or a size is not an integer.
      ValueError: a size is not positive, or the mesh has more than 10,000 devices. One size may be
        -1 for the devices of this machine.
      RuntimeError: there are too few devices, and this release of JAX cannot make more.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.partition import planning_mesh
      >>> mesh = planning_mesh({"data": 64, "model": 4})
      >>> double = jit(lambda x: 2 * x, in_shardings=P("data", "model"), mesh=mesh)
      >>> compiled = double.lower(jax.ShapeDtypeStruct((1024, 1024), "float32")).compile()
      >>> compiled.memory().arguments == 4 * 1024 * 1024 // 256
      True
    """
    if isinstance(mesh, Mesh):
        return mesh
    if not isinstance(mesh, AbstractMesh | Mapping):
        raise TypeError(
            f"mesh is a mesh, or the sizes of its axes by name as in {{'data': 8}}, not {mesh!r}."
        )
    axes: Mapping[str, int] = mesh.shape if isinstance(mesh, AbstractMesh) else mesh
    types: Any = AxisType.Auto
    if isinstance(mesh, AbstractMesh):
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return make_mesh(axes, devices=_planning_devices(list(axes.values())), axis_types=types)


def _planning_devices(sizes: list[Any]) -> list[jax.Device]:
    """As many devices as the product of the sizes; all there are if the sizes are invalid."""
    devices = jax.devices()
    count = math.prod(sizes) if all(isinstance(size, int) and size > 0 for size in sizes) else 0
    if count <= len(devices):
        return devices[: count or None]
    if count > MOST_DEVICES:
        raise ValueError(
            f"expected a mesh of at most {MOST_DEVICES} devices, got {count}: each virtual device "
            "takes memory and a thread on this machine. Make an axis smaller; a smaller mesh "
            "shows what a device holds and sends, too."
        )
    virtual = _compat.virtual_cpu_devices(count)
    if virtual is None:
        raise RuntimeError(
            f"the mesh has {count} devices, this machine {len(devices)}. This release of JAX "
            "cannot make more once it runs: set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count} before it starts, or use "
            f"`python -m nnx_sharding ... --devices {count}`."
        )
    return virtual
