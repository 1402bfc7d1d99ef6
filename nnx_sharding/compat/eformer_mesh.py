"""Queries about the mesh in context, under the names of eformer."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from .. import _compat
from ..errors import NoMeshError
from ..fitting import suggestion

AnyMesh: TypeAlias = Mesh | AbstractMesh
AxisNames: TypeAlias = str | tuple[str, ...] | list[str]


class NoContextMeshError(NoMeshError, AssertionError):
    """A query about the mesh in context, where there is none."""


def get_incontext_mesh(raise_error: bool = True) -> AnyMesh:
    """The mesh in context: that of ``jax.set_mesh``, else of the older ``with mesh:``.

    Args:
      raise_error: whether it is an error that there is none.

    Returns:
      The mesh, abstract while JAX traces under ``jax.set_mesh``; an empty one if there is none.

    Raises:
      NoContextMeshError: there is none. It is an ``AssertionError``, too.

    Example:
      >>> import jax
      >>> from nnx_sharding.constraints import get_incontext_mesh
      >>> from nnx_sharding.partition import make_mesh
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
    """Whether the mesh in context has all of these axes; without a mesh it has none."""
    return set(names) <= set(get_incontext_mesh(raise_error=False).axis_names)


def get_mesh_axis_names(mesh: AnyMesh | None = None) -> list[str]:
    """The names of the axes of a mesh, or of the one in context."""
    return list((get_incontext_mesh() if mesh is None else mesh).axis_names)


def get_axes_size_in_mesh(axis_names: AxisNames, mesh: AnyMesh | None = None) -> int:
    """The product of the sizes of some axes of a mesh, or of the one in context; 1 for no axes.

    Raises:
      KeyError: the mesh has no such axis.
    """
    names = _names("get_axes_size_in_mesh", axis_names)
    shape = (get_incontext_mesh() if mesh is None else mesh).shape
    unknown = [f"{name!r}{suggestion(name, shape)}" for name in names if name not in shape]
    if unknown:
        axes = ", ".join(map(repr, shape))
        raise KeyError(f"the mesh has no axis {', '.join(unknown)} (its axes are {axes})")
    return math.prod(shape[name] for name in names)


def get_mesh_axis_size(axis_names: AxisNames) -> int:
    """The product of the sizes of axes over which the function is mapped; 1 for no axes.

    Raises:
      NameError: the function is not mapped over one of the axes.
    """
    names = _names("get_mesh_axis_size", axis_names)
    return math.prod(int(jax.lax.axis_size(name)) for name in names)


def get_submesh_device_index(axis_names: AxisNames) -> jax.Array | int:
    """The index of this shard along axes over which the function is mapped, the first one major.

    Raises:
      NameError: the function is not mapped over one of the axes.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.constraints import get_submesh_device_index
      >>> from nnx_sharding.partition import make_mesh
      >>> mesh = make_mesh({"data": 2, "model": 4})
      >>> index = lambda: get_submesh_device_index(("data", "model")).reshape(1, 1)
      >>> jax.shard_map(index, mesh=mesh, in_specs=(), out_specs=P("data", "model"))().tolist()
      [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    names = _names("get_submesh_device_index", axis_names)
    return jax.lax.axis_index(names) if names else 0


def _names(function: str, axis_names: Any) -> tuple[str, ...]:
    names = (axis_names,) if isinstance(axis_names, str) else axis_names
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{function}: axis_names is a name or a tuple of names, not {axis_names!r}."
        )
    return tuple(names)
