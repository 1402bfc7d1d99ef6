"""Constraints, rules and questions under the names that eformer's users know.

Everything here is thin: the work is done in ``nnx_sharding.partition``. ``mesh=None`` always means
the mesh in context, by ``jax.set_mesh`` or by the older ``with mesh:``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from ..analysis.parameters import parameter_table
from ..core.flatten import flatten
from ..core.specs import Specs, check_specs
from ..fitting import describe, suggested_spec, suggestion
from ..partition.constrain import assign, is_array, report_lost, with_sharding_constraint
from ..partition.layout import corrected, laid_out, mesh_here, sharding_of
from ..partition.match import (
    by_variable,
    create_pattern_based_partition_spec,
    match_partition_rules,
)
from ..partition.mesh import (
    get_axes_size_in_mesh,
    get_incontext_mesh,
    get_mesh_axis_names,
    get_mesh_axis_size,
    get_submesh_device_index,
    names_in_current_mesh,
)
from ..partition.paths import Found
from ..paths import Path, path_string
from ..state_sharding import StateSharding, is_single_spec

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
    """Two trees of functions, for each array one that shards it and one that brings it to the host.

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
    """Functions that shard arrays as specs say, and functions that gather them on the host.

    A gather function makes arrays of NumPy, whole in each process. It takes them one at a time,
    so that a device never holds more than one as a whole.

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
      >>> type(gather_fns["up"](shard_fns["up"](np.ones((8, 2)))))
      <class 'numpy.ndarray'>
      >>> both.gather(both.shard({"up": np.ones((8, 2))}))["up"].is_fully_replicated
      True
    """
    mesh = _mesh_for("make_shard_and_gather_fns", partition_specs, mesh)

    def shard_fn(spec: Any) -> Callable[[Any], Any]:
        return lambda tree: with_sharding_constraint(tree, spec, mesh=mesh)

    def gather_fn(spec: Any) -> Callable[[Any], Any]:
        def gather(array: Any) -> Any:
            if not is_array(array):
                return array
            return jax.device_get(with_sharding_constraint(array, _whole(spec), mesh=mesh))

        return lambda tree: jax.tree_util.tree_map(gather, tree)

    result = ShardAndGather(
        jax.tree_util.tree_map(function, partition_specs, is_leaf=_is_leaf)
        for function in (shard_fn, gather_fn)
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
      partition_specs: a prefix of specs, corrected as by :func:`with_sharding_constraint`, or a
        mapping from paths such as ``blocks/3/up/kernel`` to specs.
      mesh: the mesh.

    Returns:
      ``total_parameters`` and ``sharded_parameters`` (elements of arrays of which a device holds
      a part only); ``memory_per_device``, bytes by the id of the device (its position in an
      abstract mesh); ``balance_score``, the mean of these over their maximum, 1.0 at best; and
      ``partition_stats``: for each spec its ``arrays``, ``parameters``, ``bytes`` and
      ``bytes_per_device``.

    Raises:
      NoContextMeshError: there is no mesh for a spec.
      ValueError: a path leads nowhere, or an array has no path among those that are given.

    Example:
      >>> import numpy as np
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> from nnx_sharding.constraints import analyze_sharding_strategy
      >>> mesh = AbstractMesh((4,), ("data",))
      >>> found = analyze_sharding_strategy(np.ones(8, "float32"), P("data"), mesh)
      >>> found["memory_per_device"]
      {0: 8, 1: 8, 2: 8, 3: 8}
    """
    partition_specs = _without_paths(pytree, partition_specs)
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


def _without_paths(tree: Any, specs: Any) -> Any:
    """Specs; those that a mapping gives to paths as a prefix of the tree."""
    if not isinstance(specs, Mapping) or (
        isinstance(tree, Mapping) and specs.keys() <= tree.keys()
    ):
        return specs
    names: list[str] = []

    def choose(path: Path, found: Found) -> Any:
        names.append(path_string(path))
        return specs.get(names[-1])

    prefix = by_variable(tree, choose)
    unknown = [name for name in specs if name not in names]
    if unknown and not any("/" in str(name) for name in specs):
        return specs
    lines = [f"  {name!r} leads to no array{suggestion(name, names)}" for name in unknown]
    lines += [f"  {name!r} has no spec" for name in names if name not in specs]
    if lines:
        raise ValueError(
            "analyze_sharding_strategy: these paths do not fit the tree:\n" + "\n".join(lines)
        )
    return prefix


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
    return _extracted(pytree, _named)


get_shardings_with_structure = extract_sharding_structure


def extract_shardings(tree: Any, mesh: Mesh | AbstractMesh | None = None) -> Any:
    """As :func:`extract_sharding_structure`, and each ``PartitionSpec`` as a sharding on the mesh.

    Args:
      tree: arrays, modules or specs; a leaf may also have a spec as its attribute ``sharding``.
      mesh: the mesh for specs.

    Raises:
      NoContextMeshError: there is a spec, and no mesh.
    """

    def read(leaf: Any) -> Any:
        now = leaf if isinstance(leaf, PartitionSpec) else sharding_of(leaf)
        if isinstance(now, PartitionSpec):
            return NamedSharding(get_incontext_mesh() if mesh is None else mesh, now)
        return _named(leaf)

    return _extracted(tree, read)


def get_partition_spec(tree: Any) -> Any:
    """The ``PartitionSpec`` of each array, in a tree as of :func:`extract_sharding_structure`.

    Numbers, arrays of NumPy, abstract ones without a sharding, and those on one device have
    ``P()``.

    Raises:
      ValueError: a leaf is something else, or has several devices and no ``NamedSharding``; all
        are named.
    """

    def read(leaf: Any) -> Any:
        now = sharding_of(leaf)
        if isinstance(now, NamedSharding):
            return now.spec
        is_one = now is None or (isinstance(now, Sharding) and now.num_devices == 1)
        known = hasattr(leaf, "dtype") or isinstance(leaf, int | float)
        return _WHOLE if known and is_one else _MISSING

    return _extracted(tree, read)


_MISSING = object()


def _named(leaf: Any) -> NamedSharding | None:
    now = sharding_of(leaf)
    return now if isinstance(now, NamedSharding) else None


def _extracted(tree: Any, read: Callable[[Any], Any]) -> Any:
    """The tree with what ``read`` makes of each leaf."""
    missing: list[str] = []

    def choose(path: Path, found: Found) -> Any:
        own = list(dict.fromkeys(map(read, found.arrays)))
        if len(own) > 1 or _MISSING in own:
            held = dict.fromkeys(
                str(sharding_of(leaf) if is_array(leaf) else leaf) for leaf in found.arrays
            )
            missing.append(f"  {path_string(path) or 'the root'}: {'; '.join(held)}")
        return own[0] if own else None

    result = by_variable(tree, choose)
    if missing:
        raise ValueError(
            "expected numbers and arrays with a NamedSharding, the same one for all arrays of a "
            "Variable, got:\n" + "\n".join(missing) + "\nPlace arrays with "
            "with_sharding_constraint."
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
