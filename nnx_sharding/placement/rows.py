"""Which rows of a global batch each process holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..specs.fitting import axes_of, with_entries
from .place import shardings_for, trimmed

Rows: TypeAlias = "np.ndarray[Any, np.dtype[np.intp]]"


@_compat.api_boundary
def process_rows(
    sharding: PartitionSpec | Sharding,
    batch_size: int,
    process: int | None = None,
    *,
    mesh: Mesh | None = None,
    process_of: Callable[[jax.Device], int] | None = None,
) -> slice | Rows:
    """Selects the rows of a global batch that a process has to load for its devices.

    ``jax.make_array_from_process_local_data`` and :func:`shard_batches` take the rows in this
    order. Processes whose devices hold the same rows load the same rows.

    Args:
      sharding: how the batch is sharded; only the first dimension matters.
      batch_size: the number of rows of the global batch.
      process: the index of a process; None for this one.
      mesh: the mesh of a ``PartitionSpec``; None for the mesh in context.
      process_of: maps a device to its process, to plan for processes that do not exist yet; None
        for the actual one.

    Returns:
      A slice where the rows are contiguous, else their indices in ascending order.

    Raises:
      NoMeshError: a ``PartitionSpec`` has no mesh.
      TypeError: ``sharding`` is neither a spec nor a sharding, or ``batch_size`` is not an integer.
      ValueError: the spec does not fit the mesh, the mesh is abstract, the rows cannot be sharded
        evenly, or the process has none of the devices.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.partition import make_mesh
      >>> from nnx_sharding.placement import process_rows
      >>> mesh = make_mesh({"model": 2, "data": 4})
      >>> process_rows(P("data"), 32, 1, mesh=mesh, process_of=lambda device: device.id % 4 // 2)
      slice(16, 32, None)
    """
    check_integer("process_rows", "batch_size", batch_size)
    rows = jax.ShapeDtypeStruct((0,), np.bool_)  # 0 rows, which every spec divides
    [concrete] = shardings_for(rows, sharding, mesh, "process_rows", name="rows", adapt=trimmed)
    if not isinstance(concrete, Sharding):
        raise TypeError(f"process_rows: expected a PartitionSpec or a Sharding, got {sharding!r}.")
    check_has_devices("process_rows", concrete)
    parts = row_parts(concrete)
    if batch_size < 1 or batch_size % parts:
        raise ValueError(
            f"process_rows: {batch_size} rows cannot be divided into {parts} equal parts "
            f"({row_axes(concrete)}). Use {next_size(batch_size, parts)} rows."
        )
    process = jax.process_index() if process is None else process
    held = rows_by_process(concrete, int(batch_size), process_of)
    check_process("process_rows", process, held)
    selected = held[process]
    first, end = int(selected[0]), int(selected[-1]) + 1
    return slice(first, end) if end - first == len(selected) else selected


def check_integer(caller: str, option: str, value: Any, least: int | None = None) -> None:
    """Raises an error if the value of an option is not an integer, or less than ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{caller}: {option} must be an integer, got {value!r}.")
    if least is not None and value < least:
        raise ValueError(f"{caller}: {option} must be at least {least}, got {value}.")


def check_process(caller: str, process: int, processes: Collection[int]) -> None:
    """Raises an error if a process has none of the devices that a sharding needs."""
    if process not in processes:
        raise ValueError(
            f"{caller}: process {process} has none of the devices of the sharding; the processes "
            f"that have some are {', '.join(map(str, processes))}."
        )


def check_has_devices(caller: str, sharding: Any) -> None:
    """Raises an error if a sharding is on an abstract mesh."""
    mesh = getattr(sharding, "mesh", None)
    if isinstance(mesh, AbstractMesh):
        raise ValueError(f"{caller}: {mesh} is abstract, without devices for batches.")


def row_sharding(sharding: Sharding) -> Sharding:
    """The sharding of the first dimension alone."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = sharding.spec
    return NamedSharding(sharding.mesh, with_entries(spec, spec.partitions[:1]))


def _row_axes(sharding: NamedSharding) -> dict[Any, int]:
    """The mesh axes that shard the rows, with their sizes."""
    axes = [axis for entry in sharding.spec.partitions[:1] for axis in axes_of(entry)]
    return {axis: sharding.mesh.shape[axis] for axis in axes}


def row_parts(sharding: Sharding) -> int:
    """The number of parts into which the rows are sharded."""
    if isinstance(sharding, NamedSharding):
        return math.prod(_row_axes(sharding).values())
    return sharding.num_devices // int(sharding.shard_shape((sharding.num_devices,))[0])


def row_axes(sharding: Sharding) -> str:
    """What shards the rows: ``'data' (2) × 'model' (4)``."""
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    sizes = _row_axes(sharding).items()
    return " × ".join(f"{axis!r} ({size})" for axis, size in sizes) or "no axis"


def rows_by_process(
    sharding: Sharding, size: int, process_of: Callable[[jax.Device], int] | None = None
) -> dict[int, Rows]:
    """The rows of a batch of ``size`` rows that each process holds, in ascending order."""
    blocks: dict[int, set[tuple[int, int]]] = {}
    indices: dict[Any, Any] = dict(row_sharding(sharding).devices_indices_map((size,)))
    for device, index in indices.items():
        start, end, _ = index[0].indices(size)
        process = device.process_index if process_of is None else process_of(device)
        blocks.setdefault(process, set()).add((start, end))
    return {
        process: np.concatenate([np.arange(*block) for block in sorted(blocks[process])])
        for process in sorted(blocks)
    }


def next_size(size: int, parts: int) -> int:
    """The least positive number of rows, from ``size`` on, that can be divided into parts."""
    return max(1, math.ceil(size / parts)) * parts
