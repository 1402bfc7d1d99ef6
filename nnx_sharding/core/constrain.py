"""Gives arrays their shardings inside a trace; ``place.py`` does so outside of a trace.

The type of a mesh axis says who decides on shardings over the axis. This module calls

    with_sharding_constraint   for Auto axes: the compiler decides, and a sharding is a constraint
    reshard                    for Explicit axes: the type of an array has the sharding, and JAX
                               checks it
    nothing                    for Manual axes: the function sees the part of one device

One array may be on a mesh with axes of all three types, so :func:`_constrain` calls each for its
axes. Arrays may also meet a mesh with the same axes of other types, in ``auto_axes`` for example.
:func:`retype` gives them the types of the axes there.

The *type* of an array (``jax.typeof``) has a mesh, and the part of its spec that is over Explicit
axes. An array is *plain* unless it is a ``jax.Ref`` or a Variable that is a value of JAX (hijax);
``ArrayImpl`` is JAX's class of arrays that are not traced.
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

    An array whose sharding is None stays as it is. Outside of a trace, an array that already has
    its sharding stays as well.

    Args:
      leaves: the arrays.
      shardings: a sharding or None for each array.
      donate: whether the arrays may be deleted, outside of a trace.
      alias: whether a result may share memory with a given array, outside of a trace.
    """
    if _compat.trace_is_clean():
        return finish_on_cpu(place_arrays(leaves, shardings, donate=donate, alias=alias), leaves)
    new = [*leaves]
    # One constraint takes all arrays on one mesh. A sharding without a mesh counts as its own mesh.
    slots_of_mesh: dict[object, list[int]] = {}
    for slot, sharding in enumerate(shardings):
        if sharding is None:
            continue
        if isinstance(new[slot], jax.ShapeDtypeStruct):  # an abstract array is no tracer
            new[slot] = new[slot].update(sharding=sharding)
        else:
            slots_of_mesh.setdefault(getattr(sharding, "mesh", sharding), []).append(slot)
    for slots in slots_of_mesh.values():
        arrays = tuple(new[slot] for slot in slots)
        constrained = _constrain(arrays, tuple(shardings[slot] for slot in slots))
        for slot, array in zip(slots, constrained, strict=True):
            new[slot] = array
    return new


def _constrain(arrays: tuple[Any, ...], shardings: tuple[Sharding, ...]) -> tuple[Any, ...]:
    """Returns arrays in a trace: constrained, resharded, or both, as the axis types require.

    All shardings are on one mesh. Arrays are taken together because in a derivative, tracing and
    lowering one constraint of two arrays takes 0.6 of the time of two constraints.
    """
    if not isinstance(shardings[0], NamedSharding):  # the sharding has no mesh, so no axis types
        return cast(tuple[Any, ...], _CONSTRAINT(arrays, shardings))
    mesh = shardings[0].mesh
    specs = [cast(NamedSharding, sharding).spec for sharding in shardings]
    explicit_axes = axes_of_type(mesh, AxisType.Explicit)
    if explicit_axes:
        # Types have no UNCONSTRAINED dimensions, so the array keeps its sharding there.
        explicit_specs = [
            without_unconstrained(keep_axes(spec, explicit_axes), array, mesh)
            for array, spec in zip(arrays, specs, strict=True)
        ]
        arrays = _RESHARD(arrays, tuple(NamedSharding(mesh, spec) for spec in explicit_specs))
    auto_axes = axes_of_type(mesh, AxisType.Auto)
    if auto_axes:
        auto_specs = [keep_axes(spec, auto_axes) for spec in specs]
        arrays = _CONSTRAINT(arrays, tuple(NamedSharding(mesh, spec) for spec in auto_specs))
    # Neither operation moves arrays to another memory.
    return tuple(
        jax.device_put(array, sharding) if other_memory(sharding) else array
        for array, sharding in zip(arrays, shardings, strict=True)
    )


# Both are jitted, so that they also work on the single-device arrays of a transformation without
# jit.
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
        # JAX keeps gradients with respect to integers as NumPy arrays of float0.
        return x.dtype.kind not in "OSUMm" and x.dtype != jax.dtypes.float0
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def given_mesh(caller: str, mesh: AnyMesh | None) -> Mesh | AbstractMesh | None:
    """Returns the mesh that a function was given, the mesh in context, or None if there is none."""
    check_mesh(caller, mesh)
    return _compat.context_mesh() if mesh is None else mesh


def in_context(mesh: Mesh | AbstractMesh | None) -> AbstractContextManager[Any]:
    """Returns a context that sets a mesh for traces; the context does nothing for None."""
    use = jax.sharding.use_abstract_mesh
    return contextlib.nullcontext() if mesh is None else use(mesh.abstract_mesh)


def mesh_in_trace(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """Returns a mesh with the axis types that it has in the current trace, such as Manual.

    Outside of a trace, and if the mesh in context has other axes, returns the mesh unchanged.
    """
    context = jax.sharding.get_abstract_mesh()  # has no axes if no mesh is in context
    has_same_axes = context.axis_names == mesh.axis_names
    has_same_sizes = dict(context.shape) == dict(mesh.shape)
    if _compat.trace_is_clean() or not (has_same_axes and has_same_sizes):
        return mesh
    # If the types are the same, the mesh itself is returned, because it has devices, and the mesh
    # in context has none. If no argument is on a mesh, JAX knows the devices of a program only from
    # the shardings in it.
    has_same_types = context == mesh.abstract_mesh
    return mesh if has_same_types else context


def sharding_of(leaf: AnyArray) -> Any:
    """Returns the sharding of an array, or the one in the type of a tracer; None without one."""
    is_traced = isinstance(leaf, jax.core.Tracer)
    return getattr(jax.typeof(leaf) if is_traced else leaf, "sharding", None)


def without_unconstrained(
    spec: PartitionSpec, leaf: AnyArray, mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """Returns a spec with the entries of the array's present sharding instead of UNCONSTRAINED.

    An array ``P(None, "model")`` and the spec ``P("data", UNCONSTRAINED)`` give ``P("data",
    "model")``.

    Args:
      spec: the spec.
      leaf: the array.
      mesh: the mesh of the spec. If the array is on another mesh, the entries are None.
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
            # An axis can shard one dimension only, and the entries of the spec have priority.
            is_free = used.isdisjoint(axes_of(present_entries[dimension]))
            entries[dimension] = present_entries[dimension] if is_free else None
    return with_entries(spec, entries)


# The types of arrays, which have the part of a sharding that is over Explicit axes


def type_spec(x: object) -> PartitionSpec | None:
    """Returns the spec in the type of an array; None if no axis of its mesh is Explicit."""
    mesh = type_mesh(x)
    if mesh is None or not axes_of_type(mesh, AxisType.Explicit):
        return None
    spec: PartitionSpec = jax.typeof(x).sharding.spec
    return spec


def type_mesh(x: Any) -> Any:
    """Returns the mesh in the type of an array; None if there is none, or if ``x`` is no array."""
    # Most arrays outside of a trace are on no mesh. This test is much faster than `jax.typeof`.
    if type(x) is _compat.ArrayImpl and not isinstance(x.sharding, NamedSharding):
        return None
    # A ref is a `jax.Array` as well, but is left out because it cannot be resharded.
    is_array = _compat.is_plain_array(x) or (isinstance(x, jax.Array) and not _compat.is_ref(x))
    if not is_array:
        return None
    sharding = getattr(jax.typeof(x), "sharding", None)  # a value of a hijax type has none
    mesh = getattr(sharding, "mesh", None)
    return None if mesh is None or mesh.empty else mesh


def mesh_of_types(leaves: Iterable[object], default: AnyMesh | None = None) -> Any:
    """Returns the mesh by which JAX types arrays; None if there is none.

    This is the mesh in context, or the default if there is none. Without both, it is the first mesh
    in the type of an array.
    """
    context = jax.sharding.get_abstract_mesh()
    if not context.empty:
        return context
    meshes = (mesh for mesh in map(type_mesh, leaves) if mesh is not None)
    return next(meshes, None) if default is None else default


def type_as_in_jit(leaves: Sequence[Any]) -> Sequence[Any]:
    """Returns arrays; those on no mesh get the type (with a mesh) that ``jax.jit`` gives them.

    Outside of ``jax.jit``, JAX types such arrays without a mesh. The gradient of such an array is a
    sum. On Explicit axes, some terms of the sum have a type with a mesh and some have none. JAX
    refuses to add them, or gives the sum the sharding of one term. So these arrays get the mesh in
    context and the spec ``P()``, as in ``jax.jit``.
    """
    context = jax.sharding.get_abstract_mesh()
    if context.empty or not axes_of_type(context, AxisType.Explicit):
        return leaves
    typed = []
    for x in leaves:
        # A tracer has its type from the enclosing trace. An array that the user put on one device
        # (committed) stays there, and JAX raises its own error that it is not on the mesh.
        is_uncommitted = type(x) is _compat.ArrayImpl and not x.committed
        is_on_no_mesh = is_uncommitted and type_mesh(x) is None
        typed.append(jax.sharding.reshard(x, PartitionSpec()) if is_on_no_mesh else x)
    return typed


def type_as(x: object, target: NamedSharding) -> Any:
    """Returns an array with the type that it has on the mesh of another sharding.

    The array is unchanged if it is on this mesh already, or if neither its mesh nor that of the
    target has Explicit axes, because no spec is in either type then. A ref is unchanged, because it
    cannot be resharded.
    """
    wanted = target.mesh.abstract_mesh
    has_spec_in_type = type_spec(x) is not None or axes_of_type(wanted, AxisType.Explicit)
    if type_mesh(x) == wanted or not has_spec_in_type or _compat.is_ref(x):
        return x
    return jax.sharding.reshard(x, target)


def retype(x: Any, mesh: Mesh | AbstractMesh, spec: PartitionSpec | None = None) -> Any:
    """Returns an array in a trace with the axis types of a mesh; see :func:`retype_all`."""
    [new] = retype_all([x], mesh, [spec])
    return new


def retype_all(
    leaves: Sequence[Any],
    mesh: Mesh | AbstractMesh,
    specs: Sequence[PartitionSpec | None] | None = None,
) -> list[Any]:
    """Returns arrays in a trace with the axis types of a mesh, and specs over its Explicit axes.

    Values that are no arrays are returned unchanged.

    Args:
      leaves: the arrays.
      mesh: has the axis types.
      specs: a spec or None for each array. With None, an array keeps its spec over axes that stay
        Explicit, and is returned unchanged if it is on no mesh, or on a mesh with other axes.
    """
    new = [*leaves]
    targets: dict[int, NamedSharding] = {}  # by the position of the array
    for i, spec in enumerate([None] * len(new) if specs is None else specs):
        new_spec = _spec_on(mesh, new[i], spec)
        if new_spec is None:  # the array has its new type already, or is to be left alone
            continue
        if spec is None:  # the array keeps its own spec, which may be reduced over some axes
            new[i] = _without_lost_reduced(new[i], mesh)
        targets[i] = NamedSharding(mesh, new_spec)
    if targets:
        # In a `vmap`, JAX adds the mapped axes to the spec if they are Explicit in context.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            arrays = jax.sharding.reshard([new[i] for i in targets], [*targets.values()])
        for i, array in zip(targets, arrays, strict=True):
            new[i] = array
    return new


def _spec_on(mesh: Mesh | AbstractMesh, x: Any, spec: PartitionSpec | None) -> PartitionSpec | None:
    """Returns the spec with which an array has to be resharded to a mesh; None if it stays.

    If ``spec`` is None, the array keeps its own spec over axes that stay Explicit. It then stays if
    it is on no mesh, or on a mesh with other axes.
    """
    present_mesh = type_mesh(x)
    is_on_mesh = present_mesh == mesh.abstract_mesh  # with the same axis types
    if spec is None:
        has_same_axes = present_mesh is not None and present_mesh.axis_names == mesh.axis_names
        if is_on_mesh or not has_same_axes:
            return None
        return keep_axes(jax.typeof(x).sharding.spec, axes_of_type(mesh, AxisType.Explicit))
    if is_on_mesh:
        # The spec in a type has an entry for each dimension, so P("a") becomes P("a", None).
        padded = with_entries(spec, pad_entries(spec, x.ndim))
        if jax.typeof(x).sharding.spec == padded:
            return None
    return spec


def _without_lost_reduced(x: jax.Array, mesh: Mesh | AbstractMesh) -> jax.Array:
    """Returns an array that is not *reduced* over axes which are Auto on another mesh.

    The gradient of an array that is reduced over an axis is a sum over this axis. The type of the
    array on the other mesh does not have the axis. If the axis only went missing there, JAX would
    count some gradients once per device: on an axis of four devices, they would be four times too
    large. So the array first gets a type on its present mesh that is not reduced over such axes.
    """
    explicit = axes_of_type(mesh, AxisType.Explicit)  # the axes in types of arrays on ``mesh``
    present: NamedSharding = jax.typeof(x).sharding
    if explicit.issuperset(present.spec.reduced):
        return x
    less_reduced = with_reduced(present.spec, present.spec.reduced & explicit)
    resharded: jax.Array = jax.sharding.reshard(x, NamedSharding(present.mesh, less_reduced))
    return resharded
