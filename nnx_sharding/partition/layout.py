"""Specs made to fit the mesh where it is used, and arrays laid out by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..core.flatten import Flat
from ..core.structure import NodeEntry, VariableEntry
from ..core.transfer import transfer
from ..core.unflatten import (
    assemble,
    node_changes,
    node_operations,
    node_values,
    perform,
)
from ..fitting import (
    OnIndivisible,
    axes_of,
    axes_of_type,
    axis_problems,
    fit,
    only_axes,
    shape_problems,
    suggestion,
    with_entries,
)

_OPEN = PartitionSpec.UNCONSTRAINED


class Correction(NamedTuple):
    """The part of a spec that fits, what was lost of it, and what cannot be corrected."""

    spec: PartitionSpec
    lost: list[str]
    faults: list[str]


def mesh_here(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """A mesh with the axis types that it has where JAX traces, such as Manual ones."""
    context = jax.sharding.get_abstract_mesh()
    same = context.axis_names == mesh.axis_names and dict(context.shape) == dict(mesh.shape)
    return context if same and not _compat.trace_is_clean() else mesh


def corrected(
    spec: PartitionSpec,
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh,
    how: OnIndivisible = "drop",
) -> Correction:
    """The part of a spec that fits an array of this shape on this mesh.

    Args:
      spec: the spec, of any length.
      shape: the shape of the array.
      mesh: the mesh, with the axis types that it has here.
      how: what to do with axes that do not divide, as in :func:`~nnx_sharding.fitting.fit`.
    """
    rank = len(shape)
    lost = []
    over = [repr(axis) for entry in spec.partitions[rank:] for axis in axes_of(entry)]
    if over:
        lost.append(f"the array has no dimension {rank} or more to cut by {', '.join(over)}")
    manual = axes_of_type(mesh, AxisType.Manual)
    auto = axes_of_type(mesh, AxisType.Auto)
    summing = sorted(spec.unreduced | spec.reduced, key=str)
    cutting = [axis for entry in spec.partitions[:rank] for axis in axes_of(entry)]
    kept = set()
    for axis in (*cutting, *summing):
        if axis not in mesh.axis_names:
            lost.append(f"the mesh has no axis {axis!r}{suggestion(axis, mesh.axis_names)}")
        elif axis in manual:
            lost.append(f"the function is mapped over {axis!r}, which cuts its arrays already")
        elif axis in auto and axis in summing:
            lost.append(f"{axis!r} is of type Auto; only Explicit axes can be unreduced or reduced")
        else:
            kept.add(axis)
    entries = (*spec.partitions[:rank], *[None] * (rank - len(spec)))
    usable = only_axes(with_entries(spec, entries), kept)
    faults = axis_problems(usable, mesh)
    if faults:
        return Correction(usable, lost, faults)
    misfits = shape_problems(usable, mesh, shape)
    if how == "error":
        return Correction(usable, lost, misfits)
    part = fit(usable, shape, mesh.shape, how) if misfits else usable
    return Correction(part, lost + misfits, [])


def sharding_of(leaf: Any) -> Any:
    """The sharding that an array has now, or None; of a traced one, what its type tells."""
    traced = isinstance(leaf, jax.core.Tracer)
    return getattr(jax.typeof(leaf) if traced else leaf, "sharding", None)


def settled(spec: PartitionSpec, leaf: Any, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The spec with what the array has now in the place of UNCONSTRAINED."""
    now = sharding_of(leaf)
    known = isinstance(now, NamedSharding) and dict(now.mesh.shape) == dict(mesh.shape)
    present = (*(now.spec.partitions if known else ()), *[None] * len(spec))
    taken = {axis for entry in spec.partitions for axis in axes_of(entry)}
    taken |= spec.unreduced | spec.reduced
    return with_entries(
        spec,
        tuple(
            entry if entry is not _OPEN else None if taken & set(axes_of(old)) else old
            for entry, old in zip(spec.partitions, present, strict=False)
        ),
    )


def laid_out(leaves: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Arrays, each with its sharding; those without one, or that have it, as they are."""
    if _compat.trace_is_clean():
        return finished_on_cpu(transfer(leaves, shardings), leaves)
    return [
        leaf if sharding is None else _constrained(leaf, sharding)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]


def finished_on_cpu(arrays: list[Any], known: Sequence[Any] = ()) -> list[Any]:
    """The arrays, once those on several CPU devices are computed, but for those known before.

    On CPUs, programs with collectives that run at the same time take each other's threads, and
    may wait for each other for ever.
    """
    before = set(map(id, known))
    for array in arrays:
        if isinstance(array, jax.Array) and id(array) not in before:
            devices: Any = array.sharding.device_set
            if len(devices) > 1 and next(iter(devices)).platform == "cpu":
                array.block_until_ready()
    return arrays


def _constrained(leaf: Any, sharding: Any) -> Any:
    """An array in a trace with a constraint, resharded, or both, as the axis types need it."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=sharding)
    if not isinstance(sharding, NamedSharding):
        return _CONSTRAINT(leaf, sharding)
    mesh = sharding.mesh
    for kind, operation in ((AxisType.Explicit, _RESHARD), (AxisType.Auto, _CONSTRAINT)):
        own = axes_of_type(mesh, kind)
        if own:
            part = only_axes(sharding.spec, own)
            part = settled(part, leaf, mesh) if kind == AxisType.Explicit else part
            leaf = operation(leaf, NamedSharding(mesh, part))
    # Neither operation moves to another memory.
    return jax.device_put(leaf, sharding) if has_memory(sharding) else leaf


def has_memory(sharding: NamedSharding) -> bool:
    """Whether a sharding asks for another memory than arrays have by default."""
    return sharding.memory_kind != NamedSharding(sharding.mesh, sharding.spec).memory_kind


# Compiled so that they also work on the single-device arrays of a transformation that is not.
_CONSTRAINT = jax.jit(jax.lax.with_sharding_constraint, static_argnums=1, inline=True)
_RESHARD = jax.jit(jax.sharding.reshard, static_argnums=1, inline=True)


def rebuilt(flat: Flat, leaves: Sequence[Any], caller: str = "with_sharding_constraint") -> Any:
    """The tree with new arrays: modules and Variables changed in place, all else made anew."""
    structure, objects = flat.structure, flat.objects
    fresh = {i for i, leaf in enumerate(leaves) if leaf is not flat.leaves[i]}
    touched = [i for i, slots in enumerate(structure.slots) if not fresh.isdisjoint(slots)]
    touched_objects = [objects[i] for i in touched]
    stale = sorted({type(x).__name__ for x in touched_objects if not _compat.can_update(x)})
    if stale:
        raise _compat.TraceContextError(
            f"{caller} cannot change objects of another trace: {', '.join(stale)}. "
            "Pass the module as an argument of the function that is traced."
        )
    operations = []
    for index in touched:
        entry, own = structure.entries[index], (leaves[slot] for slot in structure.slots[index])
        if isinstance(entry, VariableEntry):
            value = assemble(entry.value, own, objects)
            operations.append((_compat.set_value, objects[index], value))
        else:
            assert isinstance(entry, NodeEntry)  # refs are never laid out
            change = node_changes(index, entry, structure, fresh)
            assert change is not None
            [values] = node_values([change], leaves, objects)
            operations += node_operations(change, values, structure, leaves, objects)
    perform(operations)
    return assemble(structure.root, (leaves[slot] for slot in structure.root_slots), objects)
