"""The links between the devices of a group, by where they are.

    TPU   The devices form a torus. A group that varies in x is a ring of x, with two links of each
          chip, or a line if x does not wrap around, with one link at the end. Interleaved groups
          share links.
    GPU   The devices of a node are connected by NVLink; any pair can use all links.
    both  A network connects slices or nodes. Two devices of one chip need no link.

A *slice* is a torus of TPUs, or a node of GPUs; a chip of some TPUs is two devices. This is no
simulation: messages do not collide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .collectives import MeshAxes
from .hardware import Hardware
from .meshes import MeshDescription


class Route(NamedTuple):
    """How the devices of a group are connected."""

    links: str  # the name of the links, written as in ``Traffic.links``
    devices: int
    chips: int  # the number of chips, which is less than ``devices`` if a chip is two devices
    slices: int
    # For each dimension: the number of chips, and the number of links of a chip at the end.
    torus: tuple[tuple[int, float], ...] = ()

    @property
    def num_links(self) -> float:
        """The links of one chip in all dimensions of the torus."""
        return sum(links for _, links in self.torus)


# The route of an unknown placement: all bytes go over all links, like bytes between two devices.
UNKNOWN = Route(links="all links", devices=2, chips=2, slices=1)


def route_of(axes: MeshAxes, mesh: MeshDescription | None, hardware: Hardware) -> Route:
    """Finds how the devices along mesh axes are connected: the worst connection if groups differ.

    Returns `UNKNOWN` without a mesh, or if the mesh does not say where its devices are.

    Args:
      axes: the mesh axes; None if they are unknown.
      mesh: the mesh, and where its devices are; None without one.
      hardware: the kind of the devices.
    """
    if mesh is None or not axes or not {*axes} <= {*mesh.axes}:
        return UNKNOWN
    sizes = mesh.axes  # by name
    positions = np.arange(math.prod(sizes.values())).reshape(*sizes.values())  # (size of each axis)
    group_dims = [[*sizes].index(axis) for axis in axes]  # the dimensions of these axes
    group_size = math.prod(sizes[axis] for axis in axes)
    # (other axes…, axes of the group…)
    groups_last = np.moveaxis(positions, group_dims, range(-len(group_dims), 0))
    groups = groups_last.reshape(-1, group_size)  # (groups, devices of a group)
    if hardware.torus_dimensions:
        return _route_of_tpus(groups, mesh, hardware)
    return _route_of_gpus(groups, mesh, hardware)


def _route_of_tpus(groups: np.ndarray, mesh: MeshDescription, hardware: Hardware) -> Route:
    """Finds the worst connection of groups of TPUs, given as positions in the mesh: (groups, size).

    Returns `UNKNOWN` if the devices do not say where they are, or if they are in another torus than
    the hardware's. If the devices of the mesh do not differ in a coordinate, the description of the
    mesh lacks it, and it counts as 0 for all of them.
    """
    zeros = [0] * groups.size
    names = ("slice", "x", "y", "z")
    places = np.array([mesh.coordinates.get(name, zeros) for name in names])  # (4, devices)
    # Chips along x, y and z: the largest coordinate less the smallest, and one.
    extents = [int(extent) + 1 for extent in np.ptp(places[1:], axis=1)]
    fits = sum(extent > 1 for extent in extents) <= hardware.torus_dimensions
    if not mesh.coordinates.keys() - {"slice"} or not fits:
        return UNKNOWN
    grouped = places[:, groups].transpose(1, 0, 2)  # (groups, 4, devices of a group)
    # Most groups differ only in where they are. Relative to the smallest coordinates of each group,
    # there are far fewer shapes than groups, so that few routes are computed.
    smallest = grouped.min(axis=2, keepdims=True)  # (groups, 4, 1)
    shapes = np.unique(grouped - smallest, axis=0)
    routes = {_torus_route(shape, extents, hardware) for shape in shapes}
    # The slowest route is the one over the most slices, because the network between slices is slow.
    # Among these, it is the one with the fewest links.
    return min(routes, key=lambda route: (-route.slices, route.num_links))


def _route_of_gpus(groups: np.ndarray, mesh: MeshDescription, hardware: Hardware) -> Route:
    """Finds the connection of groups of GPUs, given as positions in the mesh: (groups, size).

    If the mesh does not say in which nodes the GPUs are, the function assumes nodes of
    ``Hardware.domain`` devices, or a single node if the domain is unknown.
    """
    links = "NVLink" if hardware.domain else UNKNOWN.links
    num_devices = groups.size  # Each device of the mesh is in one group.
    # The node of each device, by its position in the mesh.
    if mesh.coordinates.keys() == {"slice"}:
        nodes = np.array(mesh.coordinates["slice"])
    else:
        # The nodes are not known, or the mesh is one of TPUs, which has x, y and z, too.
        domain = hardware.domain or num_devices
        nodes = np.arange(num_devices) // domain
        if num_devices > domain:
            links += f" (nodes of {domain} assumed)"
    group_size = groups.shape[1]
    num_nodes = max(len({*nodes[group].tolist()}) for group in groups)
    # Each GPU is a chip of its own.
    return Route(links, devices=group_size, chips=group_size, slices=num_nodes)


def _is_closed(dimension: int, extents: Sequence[int], hardware: Hardware) -> bool:
    """Tells whether links close a dimension to a ring.

    ``extents`` are the numbers of chips along x, y and z. A torus of two dimensions wraps around in
    a dimension that is as large as a pod, 16 chips. A torus of three dimensions consists of cubes
    of 4×4×4 chips, and optical switches connect the faces of cubes. It wraps around in all
    dimensions; but if a cube is cut in any dimension, it wraps around in none.
    """
    # https://jax-ml.github.io/scaling-book/tpus/, https://docs.cloud.google.com/tpu/docs/v5p
    if hardware.torus_dimensions == 2:
        return extents[dimension] == 16
    return all(extent % 4 == 0 for extent in extents)


def _torus_route(places: np.ndarray, extents: Sequence[int], hardware: Hardware) -> Route:
    """Finds the links between the TPUs of a group.

    Args:
      places: the slice, x, y and z of each device: (4, devices). The cores of one chip have equal
        places. Devices of a group are evenly spaced, because mesh axes are.
      extents: the number of chips along x, y and z in the whole mesh.
    """
    torus: list[tuple[int, float]] = []  # the field of `Route`
    words = []
    for i, (name, column) in enumerate(zip("xyz", places[1:], strict=True)):
        coordinates = np.unique(column)  # sorted
        size = len(coordinates)
        if size < 2:
            continue
        # With a gap of 2, every other chip belongs to another group. The groups share the links, so
        # each group has half of them.
        gap = int(np.diff(coordinates).min())
        is_ring = size * gap == extents[i] and _is_closed(i, extents, hardware)
        links_at_end = 2 if is_ring else 1  # The chip at the end of a line has one neighbour.
        torus.append((size, links_at_end / gap))
        shape = f"{'ring' if is_ring else 'line'} of {size}"
        words.append(f"{name} ({shape}, {gap} apart)" if gap > 1 else f"{name} ({shape})")
    return Route(
        links=f"ICI {' + '.join(words)}",
        devices=places.shape[1],
        chips=np.unique(places, axis=1).shape[1],  # distinct places
        slices=len(np.unique(places[0])),
        torus=tuple(torus),
    )
