"""Queries about the mesh in context, and about shardings of trees, under the names of eformer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..apply import sharding_of
from ..errors import NoMeshError, raise_listed
from ..fitting import spec_axes, suggestion
from ..partition.constrain import is_array
from ..partition.variables import NamedVariable, map_variables
from ..state_sharding import StateSharding

AnyMesh: TypeAlias = Mesh | AbstractMesh
AxisNames: TypeAlias = str | tuple[str, ...] | list[str]


class NoContextMeshError(NoMeshError, AssertionError):
    """A query about the mesh in context found none."""


def get_incontext_mesh(raise_error: bool = True) -> AnyMesh:
    """The mesh in context: that of ``jax.set_mesh``, else of the older ``with mesh:``.

    Args:
      raise_error: whether it is an error if no mesh is in context.

    Returns:
      The mesh, abstract while JAX traces under ``jax.set_mesh``; an empty one outside of any mesh.

    Raises:
      NoContextMeshError: there is none. It is also an ``AssertionError``.

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
            "no mesh in context. Use `with jax.set_mesh(mesh):`, or pass mesh=..."
        )
    return Mesh(np.empty((), dtype=object), ())


def names_in_current_mesh(*names: str) -> bool:
    """Whether the mesh in context has all of these axes; without a mesh it has none.

    Example:
      >>> import jax
      >>> from nnx_sharding.compat.eformer import names_in_current_mesh
      >>> with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"))):
      ...     names_in_current_mesh("data"), names_in_current_mesh("data", "expert")
      (True, False)
    """
    return set(names) <= set(get_incontext_mesh(raise_error=False).axis_names)


def get_mesh_axis_names(mesh: AnyMesh | None = None) -> list[str]:
    """The names of the axes of a mesh, or of the one in context.

    Example:
      >>> import jax
      >>> from nnx_sharding.compat.eformer import get_mesh_axis_names
      >>> get_mesh_axis_names(jax.make_mesh((2, 4), ("data", "model")))
      ['data', 'model']
    """
    return list((get_incontext_mesh() if mesh is None else mesh).axis_names)


def get_axes_size_in_mesh(axis_names: AxisNames, mesh: AnyMesh | None = None) -> int:
    """The product of the sizes of some axes of a mesh, or of the one in context; 1 for no axes.

    Raises:
      KeyError: the mesh has no such axis.

    Example:
      >>> import jax
      >>> from nnx_sharding.compat.eformer import get_axes_size_in_mesh
      >>> get_axes_size_in_mesh(("data", "model"), jax.make_mesh((2, 4), ("data", "model")))
      8
    """
    names = _axis_tuple("get_axes_size_in_mesh", axis_names)
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

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.compat.eformer import get_mesh_axis_size
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> def scaled():
      ...     return jnp.ones(1) / get_mesh_axis_size("data")
      >>> float(jax.shard_map(scaled, mesh=mesh, in_specs=(), out_specs=P("data"))().sum())
      1.0
    """
    names = _axis_tuple("get_mesh_axis_size", axis_names)
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
    names = _axis_tuple("get_submesh_device_index", axis_names)
    return jax.lax.axis_index(names) if names else 0


def _axis_tuple(function: str, axis_names: Any) -> tuple[str, ...]:
    names = (axis_names,) if isinstance(axis_names, str) else axis_names
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{function}: axis_names must be a name or a tuple of names, got {axis_names!r}."
        )
    return tuple(names)


def extract_sharding_structure(pytree: Any) -> Any:
    """The ``NamedSharding`` of each array; None for arrays that have none.

    Returns:
      The tree with shardings in place of arrays, an ``nnx.State`` for a module, a sharding for a
      Variable.

    Example:
      >>> import numpy as np
      >>> from nnx_sharding.constraints import extract_sharding_structure
      >>> extract_sharding_structure({"x": np.ones(3)})
      {'x': None}
    """
    return _extracted(pytree, _named)


get_shardings_with_structure = extract_sharding_structure


def extract_shardings(tree: Any, mesh: AnyMesh | None = None) -> Any:
    """Like :func:`extract_sharding_structure`, with each ``PartitionSpec`` as a sharding.

    Args:
      tree: arrays, modules or specs; a leaf may also have a spec as its attribute ``sharding``.
      mesh: the mesh of the specs.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.compat.eformer import extract_shardings
      >>> extract_shardings({"up": P("data")}, jax.make_mesh((8,), ("data",)))["up"].spec
      P('data',)
    """

    def read(leaf: Any) -> Any:
        spec = leaf if isinstance(leaf, PartitionSpec) else sharding_of(leaf)
        if isinstance(spec, PartitionSpec):
            return NamedSharding(get_incontext_mesh() if mesh is None else mesh, spec)
        return _named(leaf)

    return _extracted(tree, read)


def get_partition_spec(tree: Any) -> Any:
    """The ``PartitionSpec`` of each array: ``P()`` for numbers and what is on one device.

    Raises:
      ValueError: leaves are something else, or have several devices and no ``NamedSharding``.

    Example:
      >>> import jax.numpy as jnp
      >>> from nnx_sharding.compat.eformer import get_partition_spec
      >>> get_partition_spec({"step": 3, "up": jnp.ones(4)})
      {'step': P(), 'up': P()}
    """

    def read(leaf: Any) -> Any:
        sharding = sharding_of(leaf)
        if isinstance(sharding, NamedSharding):
            return sharding.spec
        one_device = isinstance(sharding, Sharding) and sharding.num_devices == 1
        is_known = hasattr(leaf, "dtype") or isinstance(leaf, int | float)
        return PartitionSpec() if is_known and (sharding is None or one_device) else _MISSING

    return _extracted(tree, read)


_MISSING = object()


def _named(leaf: Any) -> NamedSharding | None:
    sharding = sharding_of(leaf)
    return sharding if isinstance(sharding, NamedSharding) else None


def _extracted(tree: Any, read: Callable[[Any], Any]) -> Any:
    """The tree with the result of ``read`` for each leaf."""
    missing: list[str] = []

    def choose(each: NamedVariable) -> Any:
        results = list(dict.fromkeys(map(read, each.arrays)))
        if len(results) > 1 or _MISSING in results:
            shardings = [sharding_of(leaf) if is_array(leaf) else leaf for leaf in each.arrays]
            missing.append(
                f"  {each.name or 'the root'}: {'; '.join(dict.fromkeys(map(str, shardings)))}"
            )
        return results[0] if results else None

    result = map_variables(tree, choose)
    raise_listed(
        ValueError,
        "expected numbers and arrays with a NamedSharding, the same one for all arrays of a "
        "Variable, got:",
        missing,
        "Place arrays with with_sharding_constraint.",
    )
    return result


def get_names_from_partition_spec(specs: Any) -> list[str]:
    """The mesh axes that specs name, each once, in the order of their first occurrence.

    Args:
      specs: a spec, a sharding, a ``StateSharding``, a name, None, or any nesting of tuples,
        lists and mappings of them.

    Raises:
      TypeError: ``specs`` contains anything else.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.constraints import get_names_from_partition_spec
      >>> get_names_from_partition_spec({"up": P(None, ("fsdp", "model")), "down": P("model")})
      ['fsdp', 'model']
    """
    return list(dict.fromkeys(_names(specs)))


def _names(specs: Any) -> Iterator[str]:
    if specs is None or specs is PartitionSpec.UNCONSTRAINED:
        return
    specs = specs.spec if isinstance(specs, NamedSharding) else specs
    if isinstance(specs, str):
        yield specs
    elif isinstance(specs, PartitionSpec):
        yield from spec_axes(specs)
    else:
        parts = specs.shardings if isinstance(specs, StateSharding) else specs
        parts = parts.values() if isinstance(parts, Mapping | nnx.State) else parts
        if parts is specs and not isinstance(specs, tuple | list):
            raise TypeError(f"{specs!r} is not a PartitionSpec or a pytree of them.")
        for part in parts:
            yield from _names(part)
