"""Meshes by name and size, and questions about the mesh that is in context."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from .. import _compat
from ..errors import NoMeshError
from ..fitting import suggestion

AnyMesh: TypeAlias = Mesh | AbstractMesh


class NoContextMeshError(NoMeshError, AssertionError):
    """A question about the mesh in context, where there is none."""


def make_mesh(
    axes: Mapping[str, int] | Iterable[tuple[str, int]],
    *,
    devices: Sequence[jax.Device] | None = None,
    axis_types: AxisType | Mapping[str, AxisType] = AxisType.Auto,
) -> Mesh:
    """Makes a mesh from the names and sizes of its axes.

    Where the devices stand in it is left to ``jax.make_mesh``.

    Args:
      axes: the size of each axis, major first. One may be -1: it takes the devices that the
        others leave.
      devices: the devices, all of which are used; None for all there are.
      axis_types: the type of all axes, or of some by name; the others are then Auto.

    Raises:
      ValueError: a name comes twice, a size is neither positive nor -1, two are -1, the sizes do
        not make up the number of devices, or ``axis_types`` names an axis that does not exist.
      TypeError: a size is no integer, or an axis type is none.

    Example:
      >>> from nnx_sharding.partition import make_mesh
      >>> dict(make_mesh({"data": -1, "model": 4}).shape)
      {'data': 2, 'model': 4}
    """
    pairs = list(axes.items() if isinstance(axes, Mapping) else axes)
    names = tuple(name for name, _ in pairs)
    devices = jax.devices() if devices is None else list(devices)
    sizes = _sizes(pairs, len(devices))
    types = _types(names, axis_types)
    return jax.make_mesh(tuple(sizes), names, axis_types=types, devices=devices)


def _sizes(pairs: Sequence[tuple[str, Any]], count: int) -> list[int]:
    """The sizes of the axes, the one that is open filled in."""
    wrong = [f"{name!r}: {size!r}" for name, size in pairs if not _is_integer(size)]
    if wrong:
        raise TypeError(f"make_mesh: these sizes are no integers: {', '.join(wrong)}.")
    problems = []
    names = [name for name, _ in pairs]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        problems.append(f"these axes come more than once: {', '.join(map(repr, twice))}")
    problems += [
        f"axis {name!r} has size {size}; write a positive number, or -1 for what is left"
        for name, size in pairs
        if size < 1 and size != -1
    ]
    open_axes = [name for name, size in pairs if size == -1]
    if len(open_axes) > 1:
        problems.append(f"one axis only can be -1, not {', '.join(map(repr, open_axes))}")
    if problems:
        raise ValueError("make_mesh: " + "; ".join(problems) + ".")
    known = math.prod(size for _, size in pairs if size != -1)
    if count % known or not (open_axes or count == known):
        product = " × ".join(f"{name!r} ({size})" for name, size in pairs if size != -1)
        relation = "does not divide" if open_axes else "is not"
        hint = "one axis with -1" if not open_axes else "other sizes"
        raise ValueError(
            f"make_mesh: {product or 'no axis'} = {known} {relation} the number of devices, "
            f"{count}. Use {hint}, or choose the devices: devices=jax.devices()[:n]."
        )
    return [int(count // known if size == -1 else size) for _, size in pairs]


def _is_integer(size: Any) -> bool:
    return isinstance(size, int | np.integer) and not isinstance(size, bool)


def _types(names: Sequence[str], given: Any) -> tuple[AxisType, ...]:
    """The type of each axis."""
    by_name = given if isinstance(given, Mapping) else dict.fromkeys(names, given)
    unknown = [f"{name!r}{suggestion(name, names)}" for name in by_name if name not in names]
    if unknown:
        raise ValueError(f"make_mesh: axis_types names axes that do not exist: {unknown[0]}.")
    wrong = [kind for kind in by_name.values() if not isinstance(kind, AxisType)]
    if wrong:
        raise TypeError(f"make_mesh: {wrong[0]!r} is no jax.sharding.AxisType.")
    return tuple(by_name.get(name, AxisType.Auto) for name in names)


def get_incontext_mesh(raise_error: bool = True) -> AnyMesh:
    """The mesh in context: that of ``jax.set_mesh``, else of the older ``with mesh:``.

    Args:
      raise_error: whether it is an error that there is none.

    Returns:
      The mesh; an abstract one while JAX traces under ``jax.set_mesh``; an empty one where there
      is none.

    Raises:
      NoContextMeshError: there is none. It is an ``AssertionError``, too.

    Example:
      >>> import jax
      >>> from nnx_sharding.partition.mesh import get_incontext_mesh, make_mesh
      >>> with jax.set_mesh(make_mesh({"data": -1})):
      ...     get_incontext_mesh().axis_names
      ('data',)
      >>> get_incontext_mesh(raise_error=False).empty
      True
    """
    mesh = _compat.context_mesh()
    if mesh is not None:
        return mesh
    if raise_error:
        raise NoContextMeshError(
            "there is no mesh in context. Use `with jax.set_mesh(mesh):`, or pass mesh=..."
        )
    return Mesh(np.empty((), dtype=object), ())


def names_in_current_mesh(*names: str) -> bool:
    """Whether all of these are axes of the mesh in context; without a mesh there are none."""
    return set(names) <= set(get_incontext_mesh(raise_error=False).axis_names)


def get_mesh_axis_names(mesh: AnyMesh | None = None) -> list[str]:
    """The names of the axes of a mesh, or of that in context.

    Raises:
      NoContextMeshError: there is none.
    """
    return list((get_incontext_mesh() if mesh is None else mesh).axis_names)


def get_axes_size_in_mesh(
    axis_names: str | tuple[str, ...] | list[str], mesh: AnyMesh | None = None
) -> int:
    """The product of the sizes of some axes of a mesh, or of that in context; of none it is 1.

    Raises:
      KeyError: the mesh has no such axis.
      TypeError: these are no names.
      NoContextMeshError: there is no mesh.

    Example:
      >>> from jax.sharding import AbstractMesh
      >>> from nnx_sharding.partition.mesh import get_axes_size_in_mesh
      >>> get_axes_size_in_mesh(("data", "model"), AbstractMesh((2, 4), ("data", "model")))
      8
    """
    names = _names("get_axes_size_in_mesh", axis_names)
    shape = (get_incontext_mesh() if mesh is None else mesh).shape
    unknown = [f"{name!r}{suggestion(name, shape)}" for name in names if name not in shape]
    if unknown:
        axes = ", ".join(map(repr, shape))
        raise KeyError(f"the mesh has no axis {', '.join(unknown)} (its axes are {axes})")
    return math.prod(shape[name] for name in names)


def get_mesh_axis_size(axis_names: str | tuple[str, ...] | list[str]) -> int:
    """The product of the sizes of axes over which the function is mapped; of none it is 1.

    Raises:
      TypeError: these are no names.
      NameError: the function is not mapped over one of them.
    """
    names = _names("get_mesh_axis_size", axis_names)
    return math.prod(int(jax.lax.axis_size(name)) for name in names)


def get_submesh_device_index(axis_names: str | tuple[str, ...] | list[str]) -> jax.Array | int:
    """The index of this shard along axes over which the function is mapped, the first one major.

    Returns:
      An int32 scalar; 0 for no axes.

    Raises:
      TypeError: these are no names.
      NameError: the function is not mapped over one of them.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.partition.mesh import get_submesh_device_index, make_mesh
      >>> mesh = make_mesh({"data": 2, "model": 4})
      >>> index = lambda: get_submesh_device_index(("data", "model")).reshape(1, 1)
      >>> jax.shard_map(index, mesh=mesh, in_specs=(), out_specs=P("data", "model"))().tolist()
      [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    names = _names("get_submesh_device_index", axis_names)
    return jax.lax.axis_index(names) if names else 0


def _names(function: str, given: Any) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{function}: axis_names is a name or a tuple of names, not {given!r}.")
    return tuple(names)
