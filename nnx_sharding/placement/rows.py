"""Which rows of a global batch each process holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..errors import NoMeshError
from ..fitting import axes_of, axis_problems, with_entries


@_compat.api_boundary
def process_rows(
    sharding: PartitionSpec | Sharding,
    batch_size: int,
    process: int | None = None,
    *,
    mesh: Mesh | None = None,
    process_of: Callable[[jax.Device], int] | None = None,
) -> slice | np.ndarray[Any, np.dtype[np.intp]]:
    """The rows of a global batch that a process has to load: those that its devices hold.

    In this order ``jax.make_array_from_process_local_data`` takes them, and so does
    :func:`shard_batches`. Processes whose devices hold the same rows load the same.

    Args:
      sharding: how the batch is laid out; only its first dimension matters.
      batch_size: the rows of the global batch.
      process: the index of a process; None for this one.
      mesh: what a ``PartitionSpec`` refers to; None for the mesh in context.
      process_of: the process of a device; None for that to which it belongs. With another
        function this plans for processes that there are not yet.

    Returns:
      A slice where the rows are contiguous, else their indices in ascending order. Either
      selects from an array of all rows.

    Raises:
      NoMeshError: a ``PartitionSpec`` has no mesh.
      TypeError: ``sharding`` is neither a spec nor a sharding, or ``batch_size`` no integer.
      ValueError: the spec does not fit the mesh, the mesh is abstract, the rows cannot be cut
        evenly, or the process has none of the devices.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.partition import make_mesh
      >>> from nnx_sharding.placement import process_rows
      >>> mesh = make_mesh({"model": 2, "data": 4})
      >>> process_rows(P("data"), 32, mesh=mesh)  # a single process loads all
      slice(0, 32, None)
      >>> of_two = lambda device: device.id % 4 // 2  # were there two processes
      >>> process_rows(P("data"), 32, 1, mesh=mesh, process_of=of_two)
      slice(16, 32, None)
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer):
        raise TypeError(f"process_rows: batch_size is an integer, not {batch_size!r}.")
    own = _sharding("process_rows", sharding, mesh)
    parts = row_parts(own)
    if batch_size < 1 or batch_size % parts:
        raise ValueError(
            f"process_rows: {batch_size} rows cannot be cut into {parts} equal parts "
            f"({cuts(own)}). Use {next_size(batch_size, parts)} rows."
        )
    process = jax.process_index() if process is None else process
    found = rows_by_process(own, int(batch_size), process_of)
    if process not in found:
        raise ValueError(
            f"process_rows: process {process} has none of the devices of the sharding; the "
            f"processes that have some are {', '.join(map(str, found))}."
        )
    rows = found[process]
    first, end = int(rows[0]), int(rows[-1]) + 1
    return slice(first, end) if end - first == len(rows) else rows


def _sharding(name: str, given: Any, mesh: Any) -> Sharding:
    """A spec with its mesh, checked."""
    if isinstance(given, PartitionSpec):
        mesh = _compat.context_mesh() if mesh is None else mesh
        if mesh is None:
            raise NoMeshError(f"{name}: {given} has no mesh. Pass mesh=..., or use jax.set_mesh.")
        if isinstance(mesh, Mesh | AbstractMesh) and (faults := axis_problems(given, mesh)):
            raise ValueError(f"{name}: {given}: {'; '.join(faults)}.")
        given = NamedSharding(mesh, given)
    if not isinstance(given, Sharding):
        raise TypeError(f"{name}: a PartitionSpec or a Sharding is needed, not {given!r}.")
    if isinstance(given, NamedSharding) and isinstance(given.mesh, AbstractMesh):
        raise ValueError(f"{name}: {given.mesh} is abstract, without devices that hold rows.")
    return given


def row_sharding(sharding: Sharding) -> Sharding:
    """How a batch's first dimension alone is laid out."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(
            sharding.mesh, with_entries(sharding.spec, sharding.spec.partitions[:1])
        )
    return sharding


def row_parts(sharding: Sharding) -> int:
    """Into how many parts the rows of a batch are cut."""
    if isinstance(sharding, NamedSharding):
        axes = [axis for entry in sharding.spec.partitions[:1] for axis in axes_of(entry)]
        return math.prod(sharding.mesh.shape[axis] for axis in axes)
    return sharding.num_devices // int(sharding.shard_shape((sharding.num_devices,))[0])


def rows_by_process(
    sharding: Sharding, size: int, process_of: Callable[[jax.Device], int] | None = None
) -> dict[int, np.ndarray[Any, np.dtype[np.intp]]]:
    """The rows that each process holds of a batch of ``size`` rows, in ascending order."""
    blocks: dict[int, set[tuple[int, int]]] = {}
    for device, index in row_sharding(sharding).devices_indices_map((size,)).items():
        assert index is not None
        start, end, _ = index[0].indices(size)
        owner = _own_process(device) if process_of is None else process_of(device)
        blocks.setdefault(owner, set()).add((start, end))
    return {
        process: np.concatenate([np.arange(*block) for block in sorted(blocks[process])])
        for process in sorted(blocks)
    }


def _own_process(device: Any) -> int:
    return int(device.process_index)


def cuts(sharding: Sharding) -> str:
    """What cuts the rows: ``'data' (2) × 'model' (4)``."""
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    axes = [axis for entry in sharding.spec.partitions[:1] for axis in axes_of(entry)]
    return " × ".join(f"{axis!r} ({sharding.mesh.shape[axis]})" for axis in axes) or "no axis"


def next_size(size: int, parts: int) -> int:
    """The least positive number of rows, from ``size`` on, that can be cut into equal parts."""
    return max(1, math.ceil(size / parts)) * parts
