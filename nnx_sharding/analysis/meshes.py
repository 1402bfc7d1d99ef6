"""What reports store about a mesh: its axes, and where its devices are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh


@dataclasses.dataclass(frozen=True, slots=True)
class MeshDescription:
    """A mesh without its devices.

    Attributes:
      axes: the sizes of the axes by name, major first.
      axis_types: their types, such as ``Auto``.
      device_ids: the ids of the devices, in lists nested like the mesh; None for an abstract mesh.
      coordinates: where the devices are, in the order of the mesh: the ``slice``, which a slower
        network connects to others, and for TPUs ``x``, ``y`` and ``z`` in the torus and the
        ``core`` of the chip, as far as the devices differ. Empty if unknown.
    """

    axes: Mapping[str, int]
    axis_types: Mapping[str, str]
    device_ids: Any
    coordinates: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh) -> MeshDescription:
        """Describes a mesh."""
        names = tuple(map(str, mesh.axis_names))  # JAX takes any hashable names.
        types = [getattr(kind, "name", str(kind)) for kind in mesh.axis_types]
        # An abstract mesh has no devices, so it has neither ids nor coordinates.
        ids, coordinates = None, {}
        if isinstance(mesh, Mesh):
            # `vectorize` keeps the shape of the mesh, and `tolist` makes nested lists of it.
            ids = np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices).tolist()
            coordinates = _coordinates(list(mesh.devices.flat))
        return cls(
            axes=dict(zip(names, mesh.axis_sizes, strict=True)),
            axis_types=dict(zip(names, types, strict=True)),
            device_ids=ids,
            coordinates=coordinates,
        )

    def __str__(self) -> str:
        return " × ".join(f"{axis} {size}" for axis, size in self.axes.items())


def _coordinates(devices: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """Returns where devices are, by dimension: ``{"slice": (0, 0), "x": (0, 1)}`` for two TPUs.

    A dimension other than the slice is left out if the devices do not differ in it. The result is
    empty for devices that do not say where they are.
    """
    names: tuple[str, ...]
    if devices[0].platform == "tpu":
        # A TPU has three coordinates even if its torus has two dimensions. A topology of one slice
        # has no ``slice_index``.
        names = ("slice", "x", "y", "z", "core")
        rows = [(getattr(d, "slice_index", 0), *d.coords, d.core_on_chip) for d in devices]
    elif hasattr(devices[0], "slice_index"):  # GPUs in several nodes have it.
        names = ("slice",)
        rows = [(d.slice_index,) for d in devices]
    else:
        return {}
    coordinates = dict(zip(names, zip(*rows, strict=True), strict=True))  # of all devices, by name
    return {
        name: column
        for name, column in coordinates.items()
        if name == "slice" or len(set(column)) > 1
    }
