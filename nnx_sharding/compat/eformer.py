"""The names of ``eformer.escale.partition.constraints``.

``nnx_sharding.partition`` implements them. ``mesh=None`` always means the mesh in context, by
``jax.set_mesh`` or by the older ``with mesh:``; functions that need one raise a
:class:`~nnx_sharding.errors.NoMeshError`, here also an ``AssertionError``, without one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ..analysis.parameters import device_bytes, parameter_table
from ..apply import apply_shardings, mesh_here, sharding_of
from ..core.flatten import flatten
from ..core.specs import Specs, check_specs
from ..errors import raise_listed
from ..fitting import fit_sharding, suggested_spec, suggestion
from ..partition.constrain import assign, is_array, report_corrections, with_sharding_constraint
from ..partition.variables import NamedVariable, map_variables
from ..state_sharding import StateSharding, is_single_spec
from .eformer_queries import (
    extract_sharding_structure,
    extract_shardings,
    get_axes_size_in_mesh,
    get_incontext_mesh,
    get_mesh_axis_names,
    get_mesh_axis_size,
    get_names_from_partition_spec,
    get_partition_spec,
    get_shardings_with_structure,
    get_submesh_device_index,
    names_in_current_mesh,
)
from .eformer_rules import create_pattern_based_partition_spec, match_partition_rules

__all__ = [
    "ShardAndGather",
    "analyze_sharding_strategy",
    "create_pattern_based_partition_spec",
    "extract_sharding_structure",
    "extract_shardings",
    "get_axes_size_in_mesh",
    "get_corrected_named_sharding",
    "get_incontext_mesh",
    "get_mesh_axis_names",
    "get_mesh_axis_size",
    "get_names_from_partition_spec",
    "get_partition_spec",
    "get_shardings_with_structure",
    "get_submesh_device_index",
    "make_shard_and_gather_fns",
    "match_partition_rules",
    "names_in_current_mesh",
    "with_sharding_constraint",
]


def get_corrected_named_sharding(
    shape: Sequence[int],
    partition_spec: PartitionSpec,
    raise_mesh_error: bool = True,
    mesh: Mesh | AbstractMesh | None = None,
) -> NamedSharding:
    """The sharding that :func:`with_sharding_constraint` gives an array of this shape.

    Args:
      shape: the shape of the array.
      partition_spec: the spec to correct.
      raise_mesh_error: whether it is an error if no mesh is in context; if not, the sharding has
        an empty mesh.
      mesh: the mesh.

    Raises:
      TypeError: it is not a partition spec.
      ValueError: an axis is used twice.

    Example:
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> from nnx_sharding.constraints import get_corrected_named_sharding
      >>> mesh = AbstractMesh((2, 4), ("data", "model"))
      >>> get_corrected_named_sharding((8, 4), P("data"), mesh=mesh).spec == P("data", None)
      True
    """
    if not isinstance(partition_spec, PartitionSpec):
        hint = suggested_spec(partition_spec)
        raise TypeError(f"{partition_spec!r} is not a PartitionSpec{hint}.")
    mesh = mesh_here(get_incontext_mesh(raise_mesh_error) if mesh is None else mesh)
    if mesh.empty:
        return NamedSharding(mesh, PartitionSpec(*[None] * len(shape)))
    fit = fit_sharding(partition_spec, mesh, shape, on_indivisible="drop", lenient=True)
    if fit.problems:
        raise ValueError(f"this spec cannot be used:\n{fit.line('array')}")
    corrected = [fit.line("array")] if fit.corrections else []
    report_corrections("get_corrected_named_sharding", corrected, strict=False)
    return NamedSharding(mesh, fit.sharding)


class ShardAndGather(tuple[Any, Any]):
    """Two trees of functions: one shards an array, the other gathers it on the host.

    Example:
      See :func:`make_shard_and_gather_fns`.
    """

    _specs: Any
    _mesh: Mesh | AbstractMesh | None

    def shard(self, tree: Any) -> Any:
        """Shards all arrays of a tree together; modules are updated in place."""
        return with_sharding_constraint(tree, self._specs, mesh=self._mesh)

    def gather(self, tree: Any) -> Any:
        """Replicates every array on every device, with one compiled program."""
        replicated = jax.tree_util.tree_map(_replicated, self._specs, is_leaf=_is_leaf)
        return with_sharding_constraint(tree, replicated, mesh=self._mesh)


def make_shard_and_gather_fns(
    partition_specs: Any, mesh: Mesh | AbstractMesh | None = None
) -> ShardAndGather:
    """Functions that shard arrays by specs, and functions that gather them on the host.

    A gather function makes full NumPy arrays, one at a time.

    Args:
      partition_specs: a pytree of specs, shardings and ``StateSharding``.
      mesh: the mesh; None for the one in context now, not when a function is called.

    Returns:
      ``(shard_fns, gather_fns)``, two trees like ``partition_specs``; see :class:`ShardAndGather`.

    Raises:
      TypeError: a leaf of ``partition_specs`` is not a sharding.

    Example:
      >>> import numpy as np
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.constraints import make_shard_and_gather_fns
      >>> from nnx_sharding.partition import make_mesh
      >>> both = make_shard_and_gather_fns({"up": P("data")}, make_mesh({"data": 8}))
      >>> shard_fns, gather_fns = both
      >>> type(gather_fns["up"](shard_fns["up"](np.ones((8, 2)))))
      <class 'numpy.ndarray'>
      >>> both.gather(both.shard({"up": np.ones((8, 2))}))["up"].is_fully_replicated
      True
    """
    mesh = _mesh_for("make_shard_and_gather_fns", partition_specs, mesh)

    def shard_fn(spec: Any) -> Callable[[Any], Any]:
        return lambda tree: with_sharding_constraint(tree, spec, mesh=mesh)

    def gather_fn(spec: Any) -> Callable[[Any], Any]:
        replicate = shard_fn(_replicated(spec))
        return lambda tree: jax.tree.map(
            lambda x: jax.device_get(replicate(x)) if is_array(x) else x, tree
        )

    functions = (shard_fn, gather_fn)
    result = ShardAndGather(jax.tree.map(f, partition_specs, is_leaf=_is_leaf) for f in functions)
    result._specs, result._mesh = partition_specs, mesh
    return result


def _mesh_for(name: str, partition_specs: Any, mesh: Any) -> Any:
    """The mesh, or the one in context; None if all shardings have their mesh."""
    specs = Specs(partition_specs)
    check_specs(name, partition_specs=specs)
    mesh = get_incontext_mesh(specs.has_partition_spec) if mesh is None else mesh
    return None if mesh.empty else mesh


def _is_leaf(x: Any) -> bool:
    return is_single_spec(x) or isinstance(x, StateSharding)


_REPLICATED = PartitionSpec()


def _replicated(spec: Any) -> Any:
    """The sharding that gathers an array with this one."""
    return NamedSharding(spec.mesh, _REPLICATED) if isinstance(spec, NamedSharding) else _REPLICATED


def analyze_sharding_strategy(
    pytree: Any, partition_specs: Any, mesh: Mesh | AbstractMesh | None = None
) -> dict[str, Any]:
    """Counts the parameters and bytes that specs give each device.

    Args:
      pytree: arrays or modules, also abstract ones; only shapes are read.
      partition_specs: a prefix of specs, corrected as by :func:`with_sharding_constraint`, or a
        mapping from paths such as ``blocks/3/up/kernel`` to specs.
      mesh: the mesh.

    Returns:
      ``total_parameters`` and ``sharded_parameters`` (elements of arrays of which a device holds
      only a part); ``memory_per_device``, bytes by the id of the device (its position in an
      abstract mesh); ``balance_score``, the mean of these over their maximum, 1.0 at best; and
      ``partition_stats``: for each spec its ``arrays``, ``parameters``, ``bytes`` and
      ``bytes_per_device``.

    Raises:
      ValueError: a path is unknown, or an array has no spec among those by path.

    Example:
      >>> import numpy as np
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> from nnx_sharding.constraints import analyze_sharding_strategy
      >>> mesh = AbstractMesh((4,), ("data",))
      >>> numbers = analyze_sharding_strategy(np.ones(8, "float32"), P("data"), mesh)
      >>> numbers["memory_per_device"]
      {0: 8, 1: 8, 2: 8, 3: 8}
    """
    partition_specs = _as_prefix(pytree, partition_specs)
    mesh = _mesh_for("analyze_sharding_strategy", partition_specs, mesh)
    flat = flatten(pytree)
    leaves = [_abstract(leaf) for leaf in flat.leaves]
    assigned = assign(
        pytree, flat._replace(leaves=leaves), partition_specs, mesh=mesh, strict=False
    )
    rows = parameter_table(apply_shardings(leaves, [each.sharding for each in assigned]))
    held = dict.fromkeys(_ids(mesh), 0) | device_bytes(rows)
    stats: dict[Any, Counter[str]] = {}
    for row in rows:
        counts = stats.setdefault(row.spec, Counter())
        counts["arrays"] += 1
        counts["parameters"] += math.prod(row.shape)
        counts["bytes"] += row.bytes_total
        counts["bytes_per_device"] += row.bytes_per_device
    most = max(held.values(), default=0)
    sharded = (math.prod(row.shape) for row in rows if row.shard_shape != row.shape)
    return {
        "total_parameters": sum(math.prod(row.shape) for row in rows),
        "sharded_parameters": sum(sharded),
        "memory_per_device": held,
        "balance_score": sum(held.values()) / len(held) / most if most else 1.0,
        "partition_stats": {spec: dict(counts) for spec, counts in stats.items()},
    }


def _as_prefix(tree: Any, specs: Any) -> Any:
    """Specs as a prefix of the tree, also if they are a mapping by path."""
    if not isinstance(specs, Mapping) or (
        isinstance(tree, Mapping) and specs.keys() <= tree.keys()
    ):
        return specs
    names: list[str] = []

    def choose(each: NamedVariable) -> Any:
        names.append(each.name)
        return specs.get(each.name)

    prefix = map_variables(tree, choose)
    unknown = [name for name in specs if name not in names]
    if unknown and not any("/" in str(name) for name in specs):
        return specs
    lines = [f"  {name!r} is not the path of an array{suggestion(name, names)}" for name in unknown]
    lines += [f"  {name!r} has no spec" for name in names if name not in specs]
    head = "analyze_sharding_strategy: these paths do not fit the tree:"
    raise_listed(ValueError, head, lines)
    return prefix


def _abstract(leaf: Any) -> Any:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(leaf))


def _ids(mesh: Mesh | AbstractMesh | None) -> list[int]:
    """The ids of the devices of a mesh; positions in an abstract mesh."""
    if mesh is None or isinstance(mesh, AbstractMesh):
        return [] if mesh is None else list(range(mesh.size))
    return [device.id for device in mesh.devices.flat]
