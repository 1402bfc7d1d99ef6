"""Shardings of arrays inside a trace; for what happens outside of one, see ``place.py``.

A mesh axis says by its type who decides on shardings over it, and this module does what each wants:

    Auto      the compiler decides; a sharding is a constraint      with_sharding_constraint
    Explicit  it is in the type of each array, and JAX checks it    reshard
    Manual    the function sees one device's part                   nothing to do

One array may be on a mesh with all three, so :func:`_constrain` does each for its axes. Arrays may
also meet a mesh with the same axes of other types, in ``auto_axes`` for example: :func:`retype`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..specs.fitting import (
    axes_of,
    axes_of_type,
    keep_axes,
    pad_entries,
    spec_axes,
    with_entries,
    with_reduced,
)
from ..specs.types import AnyArray, AnyMesh
from .memory import other_memory
from .place import finish_on_cpu, place_arrays
from .problems import check_mesh


def apply_shardings(
    leaves: Sequence[Any], shardings: Sequence[Any], *, donate: bool = False, alias: bool = True
) -> list[Any]:
    """Returns the arrays, each with its sharding: placed outside of a trace, constrained in one.

    An array stays as it is if its sharding is None or the present one.

    Args:
      leaves: the arrays.
      shardings: one for each of them, or None.
      donate: whether the arrays may be deleted, outside of a trace.
      alias: whether a result may share memory with a NumPy array, outside of a trace.
    """
    if _compat.trace_is_clean():
        return finish_on_cpu(place_arrays(leaves, shardings, donate=donate, alias=alias), leaves)
    new = [*leaves]
    slots_of_mesh: dict[object, list[int]] = {}
    for slot, sharding in enumerate(shardings):
        if isinstance(new[slot], jax.ShapeDtypeStruct) and sharding is not None:
            new[slot] = new[slot].update(sharding=sharding)
        elif sharding is not None:
            slots_of_mesh.setdefault(getattr(sharding, "mesh", sharding), []).append(slot)
    for slots in slots_of_mesh.values():
        arrays = tuple(new[slot] for slot in slots)
        constrained = _constrain(arrays, tuple(shardings[slot] for slot in slots))
        for slot, array in zip(slots, constrained, strict=True):
            new[slot] = array
    return new


def _constrain(arrays: tuple[Any, ...], shardings: tuple[Sharding, ...]) -> tuple[Any, ...]:
    """Returns arrays in a trace: constrained, resharded, or both, as the axis types require.

    All shardings are on one mesh. In a derivative, tracing and lowering one constraint of two
    arrays takes 0.6 of the time of two constraints.
    """
    if not isinstance(shardings[0], NamedSharding):
        return cast(tuple[Any, ...], _CONSTRAINT(arrays, shardings))
    mesh = shardings[0].mesh
    specs = [cast(NamedSharding, sharding).spec for sharding in shardings]
    if axes := axes_of_type(mesh, AxisType.Explicit):
        explicit_specs = [
            without_unconstrained(keep_axes(spec, axes), array, mesh)
            for array, spec in zip(arrays, specs, strict=True)
        ]
        arrays = _RESHARD(arrays, tuple(NamedSharding(mesh, spec) for spec in explicit_specs))
    if axes := axes_of_type(mesh, AxisType.Auto):
        auto = tuple(NamedSharding(mesh, keep_axes(spec, axes)) for spec in specs)
        arrays = _CONSTRAINT(arrays, auto)
    # Neither operation moves arrays to another memory.
    return tuple(
        jax.device_put(array, sharding) if other_memory(sharding) else array
        for array, sharding in zip(arrays, shardings, strict=True)
    )


# Compiled so that they also work on the single-device arrays of a transformation without jit.
_CONSTRAINT = jax.jit(jax.lax.with_sharding_constraint, static_argnums=1, inline=True)
_RESHARD = jax.jit(jax.sharding.reshard, static_argnums=1, inline=True)


# The mesh and the sharding of an array


def shape_of(leaf: AnyArray) -> tuple[int, ...] | None:
    """Returns the shape of an array or number; None for anything else."""
    shape = getattr(leaf, "shape", None)
    if shape is not None:
        return tuple(shape)
    return () if isinstance(leaf, bool | int | float | complex) else None


def is_shardable(x: object) -> bool:
    """Whether ``x`` can be sharded: not a number, a reference or an array of strings."""
    if _compat.is_ref(x) or _compat.is_hijax_variable(x):
        return False
    if isinstance(x, np.ndarray | np.generic):
        return x.dtype.kind not in "OSUMm"
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def given_mesh(caller: str, mesh: AnyMesh | None) -> Mesh | AbstractMesh | None:
    """Returns the mesh that a function was given, or else the one in context, or None."""
    check_mesh(caller, mesh)
    return _compat.context_mesh() if mesh is None else mesh


def in_context(mesh: Mesh | AbstractMesh | None) -> AbstractContextManager[Any]:
    """Puts a mesh in context, for traces; without one, nothing changes."""
    use = jax.sharding.use_abstract_mesh
    return contextlib.nullcontext() if mesh is None else use(mesh.abstract_mesh)


def mesh_in_trace(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """Returns a mesh with the axis types that it has in the current trace, such as Manual.

    With the same types it keeps its devices, which JAX may know from nowhere else.
    """
    context = jax.sharding.get_abstract_mesh()
    has_same_axes = context.axis_names == mesh.axis_names and dict(context.shape) == dict(
        mesh.shape
    )
    has_other_types = has_same_axes and context != mesh.abstract_mesh
    return context if has_other_types and not _compat.trace_is_clean() else mesh


def sharding_of(leaf: AnyArray) -> Any:
    """Returns the sharding of an array, or in the type of a tracer; None if there is none."""
    is_traced = isinstance(leaf, jax.core.Tracer)
    return getattr(jax.typeof(leaf) if is_traced else leaf, "sharding", None)


def without_unconstrained(
    spec: PartitionSpec, leaf: AnyArray, mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """Replaces UNCONSTRAINED in a spec by the entries of the array's present sharding.

    An array ``P(None, "model")`` and the spec ``P("data", UNCONSTRAINED)`` give ``P("data",
    "model")``.

    Args:
      spec: the spec.
      leaf: the array.
      mesh: the mesh of the spec; a sharding on another one is left out.
    """
    if PartitionSpec.UNCONSTRAINED not in spec.partitions:
        return spec
    present = sharding_of(leaf)
    is_on_mesh = isinstance(present, NamedSharding) and dict(present.mesh.shape) == dict(mesh.shape)
    present_entries = pad_entries(present.spec if is_on_mesh else PartitionSpec(), len(spec))
    entries = list(spec.partitions)
    used = set(spec_axes(spec))
    for dimension, entry in enumerate(entries):
        if entry is PartitionSpec.UNCONSTRAINED:
            # An axis can shard one dimension only, and the other entries were asked for.
            is_free = used.isdisjoint(axes_of(present_entries[dimension]))
            entries[dimension] = present_entries[dimension] if is_free else None
    return with_entries(spec, entries)


# The types of arrays, which have the part of a sharding that is over Explicit axes


def type_spec(x: object) -> PartitionSpec | None:
    """Returns the spec in the type of an array; None if none of the axes is Explicit."""
    mesh = type_mesh(x)
    if mesh is None or not axes_of_type(mesh, AxisType.Explicit):
        return None
    spec: PartitionSpec = jax.typeof(x).sharding.spec
    return spec


def type_mesh(x: Any) -> Any:
    """Returns the mesh in the type of an array; None if that has none, and for what is no array."""
    # Most arrays are of this kind; asking `jax.typeof` first would take much longer.
    if type(x) is _compat.ArrayImpl and not isinstance(x.sharding, NamedSharding):
        return None
    if not _compat.is_plain_array(x) and (not isinstance(x, jax.Array) or _compat.is_ref(x)):
        return None
    mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
    return None if mesh is None or mesh.empty else mesh


def mesh_of_types(leaves: Iterable[object], default: AnyMesh | None = None) -> Any:
    """Returns the mesh by which JAX types arrays.

    That is the mesh in context or else the default. Without both, it is that of the first array
    whose type has one; None if there is none.
    """
    context = jax.sharding.get_abstract_mesh()
    if not context.empty:
        return context
    meshes = (mesh for mesh in map(type_mesh, leaves) if mesh is not None)
    return next(meshes, None) if default is None else default


def type_as_in_jit(leaves: Sequence[Any]) -> Sequence[Any]:
    """Gives arrays that are on no mesh the type (with a mesh) that ``jax.jit`` gives them.

    Outside of ``jax.jit``, JAX types them without a mesh. On Explicit axes, a gradient is then
    added up from terms with and without one, which raises an error, or has the sharding of a term.
    """
    context = jax.sharding.get_abstract_mesh()
    if context.empty or not axes_of_type(context, AxisType.Explicit):
        return leaves
    typed = []
    for x in leaves:
        # For an array that was put on one device, JAX raises its own error: it is not on the mesh.
        is_uncommitted = type(x) is _compat.ArrayImpl and not x.committed
        is_on_no_mesh = is_uncommitted and type_mesh(x) is None
        typed.append(jax.sharding.reshard(x, PartitionSpec()) if is_on_no_mesh else x)
    return typed


def type_as(x: object, target: NamedSharding) -> Any:
    """Gives an array the type that it has on the mesh of another sharding.

    It is unchanged if both meshes have Auto axes only.
    """
    present = type_mesh(x)
    wanted = target.mesh.abstract_mesh
    is_untyped = type_spec(x) is None and not axes_of_type(wanted, AxisType.Explicit)
    if present == wanted or is_untyped or _compat.is_ref(x):
        return x
    return jax.sharding.reshard(x, target)


def retype(x: Any, mesh: Mesh | AbstractMesh, spec: PartitionSpec | None = None) -> Any:
    """Gives an array in a trace the axis types of a mesh, as :func:`retype_all` does."""
    [new] = retype_all([x], mesh, [spec])
    return new


def retype_all(
    leaves: Sequence[Any],
    mesh: Mesh | AbstractMesh,
    specs: Sequence[PartitionSpec | None] | None = None,
) -> list[Any]:
    """Gives arrays in a trace the axis types of a mesh, and specs over its Explicit axes.

    Other values than arrays are returned unchanged.

    Args:
      leaves: the arrays.
      mesh: has the axis types.
      specs: the spec of each array; None to keep that of the array, over axes that stay Explicit.
        An array without a mesh, or with one of other axes, is then returned unchanged.
    """
    wanted = mesh.abstract_mesh
    new = [*leaves]
    targets: dict[int, NamedSharding] = {}  # by the position of the array
    for i, spec in enumerate([None] * len(new) if specs is None else specs):
        present = type_mesh(new[i])
        if spec is None:
            # To keep its spec, an array has to be on other types of the same axes.
            if present is None or present == wanted or present.axis_names != mesh.axis_names:
                continue
            new[i], spec = _with_kept_spec(new[i], mesh)
        elif present == wanted:
            padded = with_entries(spec, pad_entries(spec, new[i].ndim))  # as types have their specs
            if jax.typeof(new[i]).sharding.spec == padded:
                continue
        targets[i] = NamedSharding(mesh, spec)
    if targets:
        # In a `vmap`, JAX adds the mapped axes to the spec if they are Explicit in context.
        with jax.sharding.use_abstract_mesh(wanted):
            arrays = jax.sharding.reshard([new[i] for i in targets], [*targets.values()])
        for i, array in zip(targets, arrays, strict=True):
            new[i] = array
    return new


def _with_kept_spec(x: jax.Array, mesh: Mesh | AbstractMesh) -> tuple[jax.Array, PartitionSpec]:
    """Returns an array, and its spec over the axes that are Explicit on a mesh with other types.

    It is the array itself, unless it is *reduced* over axes that are Auto there: gradients of such
    arrays are sums over these axes, and JAX counts some of them once per device. So it gets a type
    without that before it goes to the mesh.
    """
    explicit = axes_of_type(mesh, AxisType.Explicit)
    present: NamedSharding = jax.typeof(x).sharding
    if not explicit.issuperset(present.spec.reduced):
        less_reduced = with_reduced(present.spec, present.spec.reduced & explicit)
        x = jax.sharding.reshard(x, NamedSharding(present.mesh, less_reduced))
    return x, keep_axes(present.spec, explicit)
