"""``place``: a model, or any pytree, sharded by a prefix of shardings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..core.flatten import Flat, flatten
from ..core.interrupts import deferred
from ..core.problems import check_options
from ..core.resharding import apply_shardings, given_mesh, mesh_here, rebuilt
from ..core.resolve import check_filters
from ..core.spec_checks import check_mesh, fit_specs, shape_of
from ..core.targets import Specs
from ..core.transfer import obstacle
from ..core.transform import Sharded
from ..core.unflatten import unflatten
from ..errors import NoMeshError, raise_listed
from ..partition.constrain import is_array, resolved_prefix
from ..specs.fitting import ON_INDIVISIBLE, OnIndivisible, describe, with_entries


@_compat.api_boundary
def place(
    tree: Any,
    sharding: Any,
    mesh: Mesh | None = None,
    *,
    copy: bool = False,
    donate: bool = False,
    on_indivisible: OnIndivisible = "error",
    strict: bool = False,
) -> Any:
    """Places a model, or any pytree, on devices with the given shardings.

    The arrays may be NumPy arrays, on one device, on another mesh, or in host memory
    (``NamedSharding(mesh, spec, memory_kind="pinned_host")``). Numbers become arrays. If anything
    is wrong, nothing is moved, and one error lists all problems. Needs memory for the old and the
    new arrays; ``donate=True`` avoids that.

    Every process makes the same call. An array that one process alone can address is assumed to
    have the same value in each; this is not verified.

    Args:
      tree: a module, an optimizer, a Variable, an array, or a pytree of them. Abstract arrays
        (``jax.ShapeDtypeStruct``) only get the sharding.
      sharding: a ``PartitionSpec``, a ``Sharding``, a :class:`~nnx_sharding.StateSharding`, or a
        pytree prefix of ``tree`` with these as leaves; None leaves a part unchanged.
      mesh: the mesh of each ``PartitionSpec``; None for the mesh in context.
      copy: whether to leave ``tree`` unchanged and return a copy of the graph, which shares no
        memory with it, except for any ``jax.Ref``.
      donate: whether to delete the old JAX arrays, unless ``tree`` still holds them elsewhere, so
        that buffers of shards of the same size are reused.
      on_indivisible: what to do where a spec does not divide a shape, unless a ``StateSharding``
        decides: ``"error"``, ``"replicate"`` the array, or ``"drop"`` the axes.
      strict: whether warnings are errors.

    Returns:
      ``tree``, with the same modules and Variables, changed in place, in new containers.
      With ``copy``, all of it is new.

    Raises:
      NoMeshError: a ``PartitionSpec`` has no mesh.
      TypeError: a leaf with a sharding is not an array.
      ValueError: the shardings are not a pytree prefix, no filter matches, specs do not fit the
        mesh or the shapes, or an array cannot be placed.

    Example:
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import make_mesh, place
      >>> model = nnx.Linear(16, 64, rngs=nnx.Rngs(0))
      >>> model = place(model, P("model"), make_mesh({"model": -1}))
      >>> model.kernel.sharding.shard_shape(model.kernel.shape)
      (2, 64)
    """
    if not _compat.trace_is_clean():
        raise RuntimeError(
            "place moves data, which a traced function cannot do. Place the arrays before they are "
            "passed in, or use nnx_sharding.partition.with_sharding_constraint."
        )
    if copy and donate:
        raise ValueError("place: copy=True keeps the old arrays, donate=True deletes them.")
    check_options("place", on_indivisible=(on_indivisible, ON_INDIVISIBLE))
    flat = flatten(tree)
    shardings = shardings_for(
        tree, sharding, mesh, "place", flat=flat, on_indivisible=on_indivisible, strict=strict
    )
    with deferred() if donate else contextlib.nullcontext():
        leaves = apply_shardings(flat.leaves, shardings, donate=donate, alias=not copy)
        if not copy:
            return rebuilt(flat, leaves, "place")
    copies = [
        new.copy() if new is old and is_array(old) and hasattr(old, "copy") else new
        for new, old in zip(leaves, flat.leaves, strict=True)
    ]
    return unflatten(flat.structure, copies).root


def trimmed(spec: Any, leaf: Any) -> Any:
    """A spec without entries beyond the rank of an array; None for what is not an array."""
    if not is_array(leaf):
        return None
    if isinstance(spec, NamedSharding):
        return spec.update(spec=trimmed(spec.spec, leaf))
    is_spec = isinstance(spec, PartitionSpec)
    return with_entries(spec, spec.partitions[: len(leaf.shape)]) if is_spec else spec


def shardings_for(
    tree: Any,
    sharding: Any,
    mesh: Any,
    caller: str,
    *,
    name: str = "tree",
    flat: Flat | None = None,
    on_indivisible: OnIndivisible = "error",
    strict: bool = False,
    adapt: Callable[[Any, Any], Any] = lambda spec, leaf: spec,
) -> list[Any]:
    """The sharding of each array of a tree; None for unchanged ones.

    Arguments and errors are those of :func:`place`. ``adapt`` changes the spec of an array before
    it is checked, as :func:`trimmed` does.
    """
    flat = flatten(tree) if flat is None else flat
    mesh = mesh_for(caller, mesh)
    specs = sharding if isinstance(sharding, Specs) else Specs(sharding)
    names, resolved, locations = resolved_prefix(caller, name, tree, flat, specs)
    declared = [adapt(*pair) for pair in zip(resolved.slots, flat.leaves, strict=True)]
    _check_leaves(caller, names, flat.leaves, declared, mesh)
    transform = Sharded(
        name=caller,
        in_name="sharding",
        in_specs=specs,
        context=mesh,
        on_indivisible=on_indivisible,
        strict=strict,
    )
    check_mesh(transform, locations, flat.objects, flat.leaves)
    shapes = [shape_of(leaf) for leaf in flat.leaves]
    fitting = fit_specs(transform, names, shapes, declared, resolved.on_indivisible)
    check_filters(resolved.uses, name=caller, strict=strict)
    return [
        NamedSharding(mesh, spec) if isinstance(spec, PartitionSpec) and mesh is not None else spec
        for spec in fitting
    ]


def mesh_for(caller: str, mesh: Any) -> Any:
    """The mesh that a function was given, or the one in context, as it is in the current trace."""
    mesh = given_mesh(caller, mesh)
    return None if mesh is None else mesh_here(mesh)


def _check_leaves(
    caller: str, names: Sequence[str], leaves: Sequence[Any], specs: Sequence[Any], mesh: Any
) -> None:
    """Raises an error if a leaf cannot be placed by its spec, whatever its shape."""
    no_mesh, not_arrays, obstacles = [], [], []
    for name, leaf, spec in zip(names, leaves, specs, strict=True):
        where = spec.sharding if isinstance(spec, Format) else spec
        if isinstance(where, PartitionSpec):
            if mesh is None:
                no_mesh.append(f"  {name}: {spec}")
                continue
            where = NamedSharding(mesh, PartitionSpec())
        if spec is None or isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer):
            continue
        if not is_array(leaf) and not isinstance(leaf, bool | int | float | complex):
            not_arrays.append(f"  {name}: a {type(leaf).__name__}")
        elif isinstance(where, Sharding) and (problem := obstacle(leaf, where)):
            obstacles.append(f"  {name}, shape {shape_of(leaf)}, {describe(spec)}: {problem}")
    raise_listed(
        NoMeshError,
        f"{caller}: these partition specs have no mesh:",
        no_mesh,
        "Pass mesh=..., use `with jax.set_mesh(mesh):`, or give NamedShardings.",
    )
    raise_listed(
        TypeError,
        f"{caller}: these leaves have a sharding, but are not arrays:",
        not_arrays,
        "Give them the sharding None, or keep them out of the tree.",
    )
    raise_listed(ValueError, f"{caller}: these arrays cannot be placed:", obstacles)
