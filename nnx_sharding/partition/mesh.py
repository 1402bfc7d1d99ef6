"""Meshes by the names and sizes of their axes, even of devices that this machine does not have.

A *slice* of TPUs is a group of chips with fast links between them; several slices are connected by
a slower network. A *topology*, such as ``v5e:4x4``, describes the chips of a slice, for which the
TPU compiler can compile without them. *Virtual* devices are CPU devices that JAX only simulates.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import glob
import importlib.util
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AbstractMesh, AxisType, Mesh

from .. import _compat
from ..specs.fitting import show

# The largest number of virtual CPU devices. Each takes a thread and 0.3 MiB, and the largest pods
# have fewer devices.
MOST_DEVICES = 10_000


@_compat.api_boundary
def make_mesh(
    axes: Mapping[str, int],
    axis_types: AxisType | Sequence[AxisType] | None = None,
    *,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Makes a mesh from the sizes of its axes by name, along the links between the devices.

    In contrast to ``jax.make_mesh``, the devices may be of several slices of TPUs, which a slower
    network connects. The slices are along the first axes, so give them an axis of their own: on
    ``make_mesh({"replica": 2, "data": -1})``, ``fsdp`` over ``data`` with the batch over both is
    HSDP, whose gradients alone are sent between two slices.

    Args:
      axes: the size of each axis by name, major first. One may be -1, for the devices that the
        others leave.
      axis_types: the type of each axis, or of all of them; None for Explicit ones, as in JAX: the
        types of arrays then show how they are sharded. Over Auto axes, the compiler decides;
        ``jit(..., auto_axes=True)`` makes axes Auto for one function.
      devices: the devices, all of which are used; None for all devices.

    Example:
      >>> from nnx_sharding.partition import make_mesh
      >>> dict(make_mesh({"data": -1, "model": 4}).shape)
      {'data': 2, 'model': 4}
    """
    if not isinstance(axes, Mapping):
        raise TypeError(
            "make_mesh takes sizes by name, as in {'data': 2, 'model': -1}, got "
            f"{show(axes)}. For sizes and names, use jax.make_mesh."
        )
    sizes = _filled(tuple(axes.values()), devices)
    devices = jax.devices() if devices is None else list(devices)
    names = tuple(axes)
    if axis_types is None:
        axis_types = AxisType.Explicit
    if isinstance(axis_types, AxisType):
        axis_types = (axis_types,) * len(names)
    return Mesh(arrange_devices(sizes, devices), names, axis_types=tuple(axis_types))


def _filled(sizes: tuple[int, ...], devices: Sequence[jax.Device] | None) -> tuple[int, ...]:
    """Returns the sizes of the axes, with the number of remaining devices for -1.

    ``devices`` are the devices of the mesh; None for all devices.

    Raises:
      ValueError: the sizes do not take all devices.
    """
    count = len(jax.devices() if devices is None else devices)
    known_product = math.prod(size for size in sizes if size != -1)
    # Each -1 gets all remaining devices, so two of them take too many, which is an error below.
    filled = tuple(count // max(known_product, 1) if size == -1 else size for size in sizes)
    # All devices have to be used, because idle ones would be a mistake more often than a wish.
    if math.prod(filled) != count or min(filled, default=1) < 1:
        # If a size is no integer, such as 2.5, more devices would not help.
        is_integer = isinstance(known_product, int | np.integer)
        has_too_few = devices is None and is_integer and known_product > count
        raise ValueError(
            f"make_mesh: axes of the sizes {sizes} do not take the {count} devices. Use other "
            "sizes, of which one may be -1 for the remaining devices, or other devices."
            f"{_how_to_get_more(known_product) if has_too_few else ''}"
        )
    return filled


def _how_to_get_more(count: int) -> str:
    """Returns a text: how to have as many devices as a mesh needs; empty unless JAX is on CPUs."""
    if jax.default_backend() != "cpu":
        return ""
    per_process, remainder = divmod(count, jax.process_count())
    where = " in each process" if jax.process_count() > 1 else ""
    lines = [""]
    if not remainder and per_process <= MOST_DEVICES:
        lines.append(
            f"XLA_FLAGS=--xla_force_host_platform_device_count={per_process}, set before JAX "
            f"starts, makes {per_process} devices of the CPU{where}."
        )
    if not jax.distributed.is_initialized():
        lines.append(
            "If the program has several processes, call jax.distributed.initialize() first."
        )
    lines.append("To compile only, planning_mesh makes a mesh of devices that need not exist.")
    return "\n".join(lines)


@_compat.api_boundary
def planning_mesh(
    mesh: Mesh | AbstractMesh | Mapping[str, int] | str,
    axes: AbstractMesh | Mapping[str, int] | None = None,
    *,
    num_slices: int = 1,
) -> Mesh:
    """Makes a mesh to compile for, whose devices need not be attached to this machine.

    For a TPU topology, as in ``planning_mesh("v5e:4x4", {"data": 4, "model": 4})``, programs are
    compiled by the TPU compiler, which needs ``pip install 'nnx_sharding[tpu]'`` but no TPU. The
    mesh follows the links between the devices. Sizes alone give devices of this machine, or virtual
    CPU devices if there are too few: XLA partitions a program for them as for any others, and
    reports the memory that its CPU compiler needs. Equal arguments make equal meshes.

    Args:
      mesh: the sizes of the axes by name, major first, which makes Explicit axes, as in
        :func:`make_mesh`; an abstract mesh; a mesh of devices, which is returned unchanged; or the
        name of a TPU topology.
      axes: for a topology, the sizes of the axes by name, of which one may be -1, or an abstract
        mesh.
      num_slices: for a topology, the number of slices. Each has this topology, and a slower network
        connects them. The slices are along the first axes.

    Raises:
      ValueError: also if the mesh has more than 10,000 virtual devices.
      RuntimeError: this release of JAX cannot make virtual devices.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.partition import planning_mesh
      >>> mesh = planning_mesh({"data": 64, "model": 4})
      >>> double = jit(lambda x: 2 * x, in_shardings=P("data", "model"), mesh=mesh)
      >>> double.lower(jax.ShapeDtypeStruct((256, 64), "float32")).compile().memory().arguments
      256
    """
    if num_slices < 1:
        raise ValueError(f"planning_mesh: expected num_slices of at least 1, got {num_slices}.")
    if isinstance(mesh, str) and isinstance(axes, AbstractMesh | Mapping):
        return _mesh(axes, topology_devices(mesh, num_slices))
    if axes is not None or isinstance(mesh, str) or num_slices != 1:
        raise TypeError(
            "a topology needs the sizes of axes, as in planning_mesh('v5e:4x4', {'data': 16}), and "
            "these and num_slices are for a topology only; got "
            f"{mesh!r}, {axes!r}, num_slices={num_slices!r}."
        )
    if isinstance(mesh, Mesh):
        return mesh
    if not isinstance(mesh, AbstractMesh | Mapping):
        raise TypeError(
            "expected a mesh, or the sizes of its axes by name as in {'data': 8}, got "
            f"{show(mesh)}."
        )
    # Within `on_topology`, sizes alone make a mesh of devices of that topology.
    default = DEFAULT.get()  # (name, num_slices); None outside of `on_topology`
    return _mesh(mesh, None if default is None else topology_devices(*default))


def _mesh(axes: AbstractMesh | Mapping[str, int], devices: Sequence[object] | None = None) -> Mesh:
    """Makes a mesh of axes by name; None for devices of this machine, or virtual ones."""
    sizes = axes.shape if isinstance(axes, AbstractMesh) else axes
    types = axes.axis_types if isinstance(axes, AbstractMesh) else None
    devices = _planning_devices(list(sizes.values())) if devices is None else devices
    return make_mesh(sizes, types, devices=devices)


def _planning_devices(sizes: list[Any]) -> list[jax.Device]:
    """Returns the devices for a mesh of these sizes: of this machine, or virtual ones if too few.

    If a size is invalid, or -1, all devices of this machine are returned, because ``make_mesh``
    reports or fills it.

    Raises:
      ValueError: the mesh needs more than ``MOST_DEVICES`` virtual devices.
      RuntimeError: this release of JAX cannot make virtual devices.
    """
    devices = jax.devices()
    if not all(isinstance(size, int | np.integer) and size > 0 for size in sizes):
        return devices
    count = int(math.prod(sizes))
    # If there are enough devices of this machine, they are used, so that the mesh can run as well.
    if count <= len(devices):
        return devices[:count]
    if count > MOST_DEVICES:
        raise ValueError(
            f"expected a mesh of at most {MOST_DEVICES} devices, got {count}: each virtual device "
            "takes memory and a thread on this machine. Make an axis smaller; a smaller mesh "
            "also shows what a device holds and sends."
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


# Options of JAX's description of a topology, by generation. A device of TPU v4 has two cores.
_OPTIONS = {"v4": {"chip_config_name": "megacore"}}

# Environment variables for a machine without a TPU. Without them, libtpu looks for a TPU, asks the
# network for its kind, logs its failures, and locks out other processes.
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


# The function is cached because equal arguments have to give equal meshes, but devices of two
# descriptions are never equal.
@functools.lru_cache(maxsize=8)
def topology_devices(name: str, num_slices: int = 1) -> tuple[Any, ...]:
    """Returns the devices of a topology, as JAX describes them for the TPU compiler.

    Args:
      name: the topology of one slice, such as ``v5e:4x4``.
      num_slices: the number of slices, each of this topology.

    Raises:
      ImportError: the TPU compiler is not installed.
      ValueError: there is no such topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            f"the topology {name!r} needs the TPU compiler, which needs no TPU: pip install "
            "'nnx_sharding[tpu]'. A mesh of sizes alone compiles for virtual CPU devices."
        )
    generation, _, _ = name.partition(":")  # "v5e:4x4" → "v5e"
    options: dict[str, Any] = dict(_OPTIONS.get(generation, {}))
    if num_slices > 1:
        options["num_slices"] = num_slices
    try:
        with _libtpu_environment():
            topology = topologies.get_topology_desc(name, "tpu", **options)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"unknown TPU topology {name!r}: {error}. Examples are 'v5e:4x4', "
            "'v5p:2x2x2', 'v6e:4x4', 'v4:2x2x1' or 'tpu7x:2x2x1'."
        ) from None
    return tuple(topology.devices)


# The topology and the number of slices for meshes made from sizes alone.
DEFAULT = contextvars.ContextVar[tuple[str, int] | None]("topology", default=None)


@contextlib.contextmanager
def on_topology(name: str | None, num_slices: int = 1) -> Iterator[None]:
    """Within the block, ``planning_mesh`` makes meshes of sizes alone on this topology.

    A name of None changes nothing.

    Raises:
      ImportError: the TPU compiler is not installed.
      ValueError: the topology is unknown.
    """
    if name is None:
        yield
        return
    topology_devices(name, num_slices)  # raises the errors before the block is entered
    # `DEFAULT` is a context variable, because other threads may plan for other devices.
    token = DEFAULT.set((name, num_slices))
    try:
        yield
    finally:
        DEFAULT.reset(token)


def arrange_devices(sizes: Sequence[int], devices: Sequence[object]) -> np.ndarray:
    """Arranges devices in an array of these sizes, so that neighbours are linked.

    Slices are along the first axes, because the network between them is slow. In an array (4, 2) of
    two slices with 4 devices each, the slices are (2, 1), and each has the devices (2, 2).

    Raises:
      ValueError: the sizes do not divide so that each part is in one slice.
    """
    num_slices = len({_slice(device) for device in devices})
    # The number of slices along each axis: the largest part of the remaining number that divides
    # the size of the axis.
    slices_by_axis: list[int] = []
    for size in sizes:
        remaining = num_slices // math.prod(slices_by_axis)
        slices_by_axis.append(math.gcd(size, remaining))
    # The sizes of the part of the mesh that is in one slice.
    sizes_in_slice = [size // count for size, count in zip(sizes, slices_by_axis, strict=True)]
    # By default, JAX refuses a size that is no product of whole axes of the network, such as 8 and
    # 2 for chips that are linked as 4 by 4.
    options = {"allow_split_physical_axes": True}
    if num_slices == 1:
        return mesh_utils.create_device_mesh(sizes_in_slice, devices, **options)
    try:
        # JAX raises an error if slices remain, because `slices_by_axis` has too few then.
        return mesh_utils.create_hybrid_device_mesh(
            sizes_in_slice, slices_by_axis, devices, **options
        )
    except ValueError as error:
        raise ValueError(
            f"{num_slices} slices do not form axes of the sizes {tuple(sizes)}. They are along the "
            f"first axes, as in {{'replica': {num_slices}, 'data': -1}}: {error}"
        ) from None


def axes_across_slices(mesh: Mesh | AbstractMesh) -> set[str]:
    """Returns the axes along which devices are in different TPU slices; none without slices."""
    if not isinstance(mesh, Mesh):  # an abstract mesh does not know its devices
        return set()
    # Devices of GPUs have a slice as well, but it is the number of their node.
    if mesh.devices.flat[0].platform == "gpu":
        return set()
    slices = np.vectorize(_slice, otypes=[int])(mesh.devices)  # by device, in the mesh's shape
    crossing: set[str] = set()
    for dimension, name in enumerate(mesh.axis_names):
        # A difference that is not 0 is between neighbours in different slices.
        if np.diff(slices, axis=dimension).any():
            crossing.add(str(name))
    return crossing


def _slice(device: object) -> int:
    """Returns the number of the slice that a device is in; 0 for devices without slices."""
    return getattr(device, "slice_index", 0)


@contextlib.contextmanager
def _libtpu_environment() -> Iterator[None]:
    """Within the block, keeps libtpu from looking for a TPU on a machine without one.

    The function sets environment variables that libtpu reads when it is loaded. Variables that the
    user has set are kept.
    """
    has_tpu = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
    added = {}
    if not has_tpu:
        added = {name: value for name, value in _WITHOUT_TPU.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
