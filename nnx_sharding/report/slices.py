"""Which part of an array each device of a mesh holds, also where the mesh is abstract."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from ..fitting import axes_of, fit_sharding

Slices: TypeAlias = tuple[slice, ...]


class Part(NamedTuple):
    """A part of an array and who holds it.

    Attributes:
      slices: where it begins and ends in each dimension.
      holders: the ids of its devices; on an abstract mesh their positions, such as ``data=0``.
    """

    slices: Slices
    holders: tuple[str, ...]


def parts_of(shape: Sequence[int], sharding: Sharding) -> list[Part]:
    """The parts of an array in their order, each with those that hold it.

    Args:
      shape: the shape of the array.
      sharding: how it is laid out.

    Raises:
      ValueError: the sharding does not divide the shape.
    """
    held: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for index, holder in _held(tuple(shape), sharding):
        bounds = tuple(dim.indices(size)[:2] for dim, size in zip(index, shape, strict=True))
        held.setdefault(bounds, []).append(holder)
    return [
        Part(tuple(slice(*dim) for dim in bounds), tuple(held[bounds])) for bounds in sorted(held)
    ]


def _held(shape: tuple[int, ...], sharding: Sharding) -> list[tuple[Slices, str]]:
    if isinstance(sharding, NamedSharding):
        fit = fit_sharding(sharding, None, shape)
        if fit.problems:
            raise ValueError(f"{sharding.spec} does not fit the shape {shape}: {fit.reasons}")
        return _held_on_mesh(shape, sharding)
    found: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    whole = (slice(None),) * len(shape)
    ordered = sorted(found.items(), key=lambda pair: pair[0].id)
    return [(whole if index is None else index, str(device.id)) for device, index in ordered]


def _held_on_mesh(shape: tuple[int, ...], sharding: NamedSharding) -> list[tuple[Slices, str]]:
    """The same from the spec, for which no devices are needed."""
    mesh: Any = sharding.mesh
    sizes = dict(mesh.shape)
    entries = [axes_of(entry) for entry in sharding.spec.partitions]
    entries += [()] * (len(shape) - len(entries))
    cutting = [axis for axes in entries for axis in axes]
    found = []
    for position in np.ndindex(*sizes.values()):
        at = dict(zip(sizes, position, strict=True))
        index = tuple(
            _slice(size, axes, at, sizes) for size, axes in zip(shape, entries, strict=True)
        )
        if isinstance(mesh, Mesh):
            device: Any = mesh.devices[position]
            found.append((index, str(device.id)))
        elif all(at[axis] == 0 for axis in sizes if axis not in cutting):
            name = ", ".join(f"{axis}={at[axis]}" for axis in cutting)
            found.append((index, name or "all"))
    return found


def _slice(size: int, axes: Sequence[Any], at: dict[Any, int], sizes: dict[Any, int]) -> slice:
    """What is left of one dimension at a position of the mesh; the first axis is the major one."""
    part = 0
    for axis in axes:
        part = part * sizes[axis] + at[axis]
    length = size // math.prod(sizes[axis] for axis in axes)
    return slice(part * length, (part + 1) * length)
