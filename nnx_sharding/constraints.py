"""Constraints, rules and questions under the names that eformer's users know.

Everything here is thin: the work is done in ``nnx_sharding.partition``. ``mesh=None`` always means
the mesh in context, by ``jax.set_mesh`` or by the older ``with mesh:``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .fitting import describe, suggested_spec
from .inspect.parameters import parameter_table
from .lifting.prefixes import Specs
from .lifting.split import flatten
from .lifting.structure import Path, path_string
from .partition.constrain import assign, report_lost, with_sharding_constraint
from .partition.layout import corrected, laid_out, mesh_here, sharding_of
from .partition.match import (
    by_variable,
    create_pattern_based_partition_spec,
    match_partition_rules,
)
from .partition.mesh import (
    get_axes_size_in_mesh,
    get_incontext_mesh,
    get_mesh_axis_names,
    get_mesh_axis_size,
    get_submesh_device_index,
    names_in_current_mesh,
)
from .partition.paths import Found
from .state_sharding import StateSharding, is_single_spec
from .transforms.options import check_specs

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
      partition_spec: what is wanted.
      raise_mesh_error: whether it is an error that there is no mesh; else the sharding then is
        that of an empty mesh.
      mesh: the mesh.

    Raises:
      NoContextMeshError: there is no mesh.
      TypeError: it is no partition spec.
      ValueError: an axis is used twice.

    Example:
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> from nnx_sharding.constraints import get_corrected_named_sharding
      >>> mesh = AbstractMesh((2, 4), ("data", "model"))
      >>> get_corrected_named_sharding((8, 4), P("data"), mesh=mesh).spec == P("data", None)
      True
    """
    if not isinstance(partition_spec, PartitionSpec):
        raise TypeError(f"{partition_spec!r} is no PartitionSpec{suggested_spec(partition_spec)}.")
    mesh = mesh_here(get_incontext_mesh(raise_mesh_error) if mesh is None else mesh)
    if mesh.empty:
        return NamedSharding(mesh, PartitionSpec(*[None] * len(shape)))
    found = corrected(partition_spec, shape, mesh)
    line = f"  shape {tuple(shape)}, {describe(partition_spec)}"
    if found.faults:
        raise ValueError(f"this spec cannot be used:\n{line}: {'; '.join(found.faults)}")
    lost = [f"{line} → {describe(found.spec)}: {'; '.join(found.lost)}"] if found.lost else []
    report_lost("get_corrected_named_sharding", lost, strict=False)
    return NamedSharding(mesh, found.spec)


class ShardAndGather(tuple[Any, Any]):
    """Two trees of functions, for each array one that shards it and one that makes it whole.

    Unpack it, or use :meth:`shard` and :meth:`gather` for a whole tree at once.
    """

    _specs: Any
    _mesh: Mesh | AbstractMesh | None

    def shard(self, tree: Any) -> Any:
        """Shards a tree; arrays that are on their devices already, with one compiled program.

        The rest, NumPy arrays included, is sent there. Modules are updated in place.
        """
        return with_sharding_constraint(tree, self._specs, mesh=self._mesh)

    def gather(self, tree: Any) -> Any:
        """Makes every array whole on each device (each process), with one compiled program."""
        whole = jax.tree_util.tree_map(_whole, self._specs, is_leaf=_is_leaf)
        return with_sharding_constraint(tree, whole, mesh=self._mesh)


def make_shard_and_gather_fns(
    partition_specs: Any, mesh: Mesh | AbstractMesh | None = None
) -> ShardAndGather:
    """Functions that shard arrays as specs say, and functions that make them whole again.

    Args:
      partition_specs: a pytree of specs; shardings and ``StateSharding`` may stand in it too.
      mesh: the mesh; that in context is taken now, not when a function is called.

    Returns:
      ``(shard_fns, gather_fns)``, two trees like ``partition_specs``; see :class:`ShardAndGather`.

    Raises:
      NoContextMeshError: there is no mesh.
      TypeError: something else stands where a spec belongs.

    Example:
      >>> import numpy as np
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.constraints import make_shard_and_gather_fns
      >>> from nnx_sharding.partition import make_mesh
      >>> both = make_shard_and_gather_fns({"up": P("data")}, make_mesh({"data": 8}))
      >>> shard_fns, gather_fns = both
      >>> shard_fns["up"](np.ones((8, 2))).sharding.shard_shape((8, 2))
      (1, 2)
      >>> both.gather(both.shard({"up": np.ones((8, 2))}))["up"].is_fully_replicated
      True
    """
    mesh = _mesh_for("make_shard_and_gather_fns", partition_specs, mesh)

    def function(spec: Any) -> Callable[[Any], Any]:
        return functools.partial(with_sharding_constraint, sharding=spec, mesh=mesh)

    whole = jax.tree_util.tree_map(_whole, partition_specs, is_leaf=_is_leaf)
    result = ShardAndGather(
        jax.tree_util.tree_map(function, specs, is_leaf=_is_leaf)
        for specs in (partition_specs, whole)
    )
    result._specs, result._mesh = partition_specs, mesh
    return result


def _mesh_for(name: str, partition_specs: Any, mesh: Any) -> Any:
    """The mesh, or that in context; there need be none for specs that bring their own."""
    specs = Specs(partition_specs)
    check_specs(name, partition_specs=specs)
    mesh = get_incontext_mesh(specs.has_partition_spec) if mesh is None else mesh
    return None if mesh.empty else mesh


def _is_leaf(x: Any) -> bool:
    return is_single_spec(x) or isinstance(x, StateSharding)


def _whole(spec: Any) -> Any:
    """What gathers arrays that are sharded by this."""
    return NamedSharding(spec.mesh, _WHOLE) if isinstance(spec, NamedSharding) else _WHOLE


_WHOLE = PartitionSpec()


def analyze_sharding_strategy(
    pytree: Any, partition_specs: Any, mesh: Mesh | AbstractMesh | None = None
) -> dict[str, Any]:
    """Counts what specs make of a tree, arrays or abstract ones.

    Args:
      pytree: arrays or modules; only shapes are looked at.
      partition_specs: a prefix of specs, corrected as by :func:`with_sharding_constraint`.
      mesh: the mesh.

    Returns:
      ``total_parameters`` and ``sharded_parameters`` (elements of arrays of which a device holds
      a part only); ``memory_per_device``, bytes by the id of the device (its position in an
      abstract mesh); ``balance_score``, the mean of these over their maximum, 1.0 at best; and
      ``partition_stats``: for each spec its ``arrays``, ``parameters``, ``bytes`` and
      ``bytes_per_device``.

    Raises:
      NoContextMeshError: there is no mesh for a spec.

    Example:
      >>> import numpy as np
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> from nnx_sharding.constraints import analyze_sharding_strategy
      >>> mesh = AbstractMesh((4,), ("data",))
      >>> found = analyze_sharding_strategy(np.ones(8, "float32"), P("data"), mesh)
      >>> found["memory_per_device"]
      {0: 8, 1: 8, 2: 8, 3: 8}
    """
    mesh = _mesh_for("analyze_sharding_strategy", partition_specs, mesh)
    flat = flatten(pytree)
    leaves = [_abstract(leaf) for leaf in flat.leaves]
    goals = assign(pytree, flat._replace(leaves=leaves), partition_specs, mesh=mesh, strict=False)
    rows = parameter_table(laid_out(leaves, [goal.sharding for goal in goals]))
    held = dict.fromkeys(_ids(mesh), 0)
    stats: dict[Any, dict[str, int]] = {}
    for row in rows:
        for device in _ids(row.sharding):
            held[device] = held.get(device, 0) + row.bytes_per_device
        own = stats.setdefault(row.spec, dict.fromkeys(_STATS, 0))
        numbers = (1, math.prod(row.shape), row.bytes_total, row.bytes_per_device)
        for name, number in zip(_STATS, numbers, strict=True):
            own[name] += number
    most = max(held.values(), default=0)
    return {
        "total_parameters": sum(math.prod(row.shape) for row in rows),
        "sharded_parameters": sum(
            math.prod(row.shape) for row in rows if row.shard_shape != row.shape
        ),
        "memory_per_device": held,
        "balance_score": sum(held.values()) / len(held) / most if most else 1.0,
        "partition_stats": stats,
    }


_STATS = ("arrays", "parameters", "bytes", "bytes_per_device")


def _abstract(leaf: Any) -> Any:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(leaf))


def _ids(where: Any) -> list[int]:
    """The ids of the devices of a mesh or a sharding; positions in an abstract mesh."""
    where = getattr(where, "mesh", where)
    if where is None or isinstance(where, AbstractMesh):
        return [] if where is None else list(range(where.size))
    return [d.id for d in (where.devices.flat if isinstance(where, Mesh) else where.device_set)]


def extract_sharding_structure(pytree: Any) -> Any:
    """The ``NamedSharding`` of each array, None for arrays that have none.

    Returns:
      The tree with shardings in the place of arrays: an ``nnx.State`` for a module, a sharding
      for a Variable.

    Example:
      >>> import numpy as np
      >>> from nnx_sharding.constraints import extract_sharding_structure
      >>> extract_sharding_structure({"x": np.ones(3)})
      {'x': None}
    """
    return _extracted(pytree, lambda now: now if isinstance(now, NamedSharding) else None)


def get_shardings_with_structure(pytree: Any) -> Any:
    """As :func:`extract_sharding_structure`; every array must have a ``NamedSharding``.

    Raises:
      ValueError: some have none; all are named.
    """
    return _extracted(pytree, lambda now: now if isinstance(now, NamedSharding) else _MISSING)


def extract_shardings(tree: Any, mesh: Mesh | AbstractMesh | None = None) -> Any:
    """As :func:`extract_sharding_structure`, with ``P()`` on the mesh for the other arrays.

    Raises:
      ValueError: there are others (of NumPy, abstract, on a single device), and no mesh.
    """
    mesh = get_incontext_mesh(raise_error=False) if mesh is None else mesh
    other = _MISSING if mesh.empty else NamedSharding(mesh, _WHOLE)
    return _extracted(tree, lambda now: now if isinstance(now, NamedSharding) else other)


def get_partition_spec(tree: Any) -> Any:
    """The ``PartitionSpec`` of each array, in a tree as of :func:`extract_sharding_structure`.

    Arrays of NumPy, abstract ones without a sharding, and those on one device have ``P()``.

    Raises:
      ValueError: an array has several devices and no ``NamedSharding``; all are named.
    """

    def spec_of(now: Any) -> Any:
        if isinstance(now, NamedSharding):
            return now.spec
        return _WHOLE if now is None or now.num_devices == 1 else _MISSING

    return _extracted(tree, spec_of)


_MISSING = object()


def _extracted(tree: Any, read: Callable[[Any], Any]) -> Any:
    """The tree with what ``read`` makes of the sharding of each array."""
    missing: list[str] = []

    def choose(path: Path, found: Found) -> Any:
        arrays = [array for array in found.arrays if hasattr(array, "dtype")]
        own = list(dict.fromkeys(read(sharding_of(array)) for array in arrays))
        if len(own) > 1 or _MISSING in own:
            held = "; ".join(dict.fromkeys(str(sharding_of(array)) for array in arrays))
            missing.append(f"  {path_string(path) or 'the root'}: {held}")
        return own[0] if own else None

    result = by_variable(tree, choose)
    if missing:
        raise ValueError(
            "these arrays have no NamedSharding, or one Variable has several:\n"
            + "\n".join(missing)
            + "\nPlace them with with_sharding_constraint, or give extract_shardings a mesh."
        )
    return result


def get_names_from_partition_spec(specs: Any) -> list[str]:
    """The mesh axes that specs name, each once, in the order in which they come.

    Args:
      specs: a spec, a sharding, a ``StateSharding``, a name, None, or any nesting of tuples,
        lists and mappings of them.

    Raises:
      TypeError: something else is in it.

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
    if isinstance(specs, str):
        yield specs
        return
    specs = specs.spec if isinstance(specs, NamedSharding) else specs
    if isinstance(specs, PartitionSpec):
        specs = (*specs.partitions, *sorted(specs.unreduced | specs.reduced, key=str))
    elif isinstance(specs, StateSharding):
        specs = specs.shardings
    elif isinstance(specs, Mapping | nnx.State):
        specs = specs.values()
    elif not isinstance(specs, tuple | list):
        raise TypeError(f"{specs!r} is no PartitionSpec, and no tree of them.")
    for part in specs:
        yield from _names(part)
