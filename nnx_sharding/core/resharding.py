"""Applies shardings to arrays, in a trace or outside, and puts the arrays back into their tree."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..specs.fitting import axes_of, axes_of_type, only_axes, spec_axes, with_entries
from .flatten import Flat, flatten
from .retyping import Retyped
from .structure import NodeEntry, VariableEntry
from .transfer import transfer
from .unflatten import assemble, node_changes, perform, update


def given_mesh(caller: str, mesh: Any) -> Mesh | AbstractMesh | None:
    """The mesh that a function was given, or else the one in context, or None."""
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"{caller}: mesh must be a Mesh or an AbstractMesh, got {mesh!r}.")
    return _compat.context_mesh() if mesh is None else mesh


def in_context(mesh: Mesh | AbstractMesh | None) -> AbstractContextManager[Any]:
    """With a mesh in context, for traces; without one, nothing changes."""
    use = jax.sharding.use_abstract_mesh
    return contextlib.nullcontext() if mesh is None else use(mesh.abstract_mesh)


def mesh_here(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """A mesh with the axis types that it has in the current trace, such as Manual.

    With the same types it keeps its devices, which JAX may know from nowhere else.
    """
    context = jax.sharding.get_abstract_mesh()
    same = context.axis_names == mesh.axis_names and dict(context.shape) == dict(mesh.shape)
    differs = same and context != mesh.abstract_mesh and not _compat.trace_is_clean()
    return context if differs else mesh


def sharding_of(leaf: Any) -> Any:
    """The sharding of an array, for a tracer that of its type; None if it has none."""
    traced = isinstance(leaf, jax.core.Tracer)
    return getattr(jax.typeof(leaf) if traced else leaf, "sharding", None)


def other_memory(sharding: Any) -> str | None:
    """The memory kind of a sharding, if it is not the default one."""
    if not isinstance(sharding, NamedSharding):
        return None
    default = NamedSharding(sharding.mesh, sharding.spec).memory_kind
    return None if sharding.memory_kind == default else sharding.memory_kind


def without_unconstrained(
    spec: PartitionSpec, leaf: Any, mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """The spec with UNCONSTRAINED replaced by the present entries of the array."""
    if PartitionSpec.UNCONSTRAINED not in spec.partitions:
        return spec
    present = sharding_of(leaf)
    is_known = isinstance(present, NamedSharding) and dict(present.mesh.shape) == dict(mesh.shape)
    old = (*(present.spec.partitions if is_known else ()), *[None] * len(spec))
    entries, used = list(spec.partitions), set(spec_axes(spec))
    for dimension, entry in enumerate(entries):
        if entry is PartitionSpec.UNCONSTRAINED:
            is_free = used.isdisjoint(axes_of(old[dimension]))
            entries[dimension] = old[dimension] if is_free else None
    return with_entries(spec, entries)


def apply_shardings(
    leaves: Sequence[Any], shardings: Sequence[Any], *, donate: bool = False, alias: bool = True
) -> list[Any]:
    """The arrays, each with its sharding; unchanged if that is None or the present one."""
    if _compat.trace_is_clean():
        return finished_on_cpu(transfer(leaves, shardings, donate=donate, alias=alias), leaves)
    return [
        leaf if sharding is None else _constrained(leaf, sharding)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]


def finished_on_cpu(arrays: list[Any], known: Sequence[Any] = ()) -> list[Any]:
    """Waits for new arrays (not in ``known``) on several CPU devices, and returns all of them.

    On CPUs, programs with collectives that run simultaneously compete for threads and may deadlock.
    """
    before = set(map(id, known))
    new = [x for x in arrays if isinstance(x, jax.Array) and id(x) not in before]
    jax.block_until_ready([x for x in new if _is_on_cpus(x.sharding)])
    return arrays


@functools.lru_cache(maxsize=1024)
def _is_on_cpus(sharding: Any) -> bool:
    devices = sharding.device_set
    return len(devices) > 1 and next(iter(devices)).platform == "cpu"


def _constrained(leaf: Any, sharding: Any) -> Any:
    """An array in a trace: constrained, resharded, or both, as the axis types require."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=sharding)
    if not isinstance(sharding, NamedSharding):
        return _CONSTRAINT(leaf, sharding)
    mesh = sharding.mesh
    if axes := axes_of_type(mesh, AxisType.Explicit):
        part = without_unconstrained(only_axes(sharding.spec, axes), leaf, mesh)
        leaf = _RESHARD(leaf, NamedSharding(mesh, part))
    if axes := axes_of_type(mesh, AxisType.Auto):
        leaf = _CONSTRAINT(leaf, NamedSharding(mesh, only_axes(sharding.spec, axes)))
    # Neither operation moves arrays to another memory.
    return jax.device_put(leaf, sharding) if other_memory(sharding) else leaf


# Compiled so that they also work on the single-device arrays of a transformation without jit.
_CONSTRAINT = jax.jit(jax.lax.with_sharding_constraint, static_argnums=1, inline=True)
_RESHARD = jax.jit(jax.sharding.reshard, static_argnums=1, inline=True)


def rebuilt(
    flat: Flat,
    leaves: Sequence[Any],
    caller: str = "with_sharding_constraint",
    *,
    foreign: bool = False,
) -> Any:
    """The tree with other arrays: modules and Variables changed in place, in new containers.

    It is an error of the ``caller`` if objects of another trace would change, unless ``foreign``.
    """
    structure, objects = flat.structure, flat.objects
    fresh = {i for i, leaf in enumerate(leaves) if leaf is not flat.leaves[i]}
    changed = [i for i, slots in enumerate(structure.slots) if not fresh.isdisjoint(slots)]
    stale = {type(objects[i]).__name__ for i in changed if not _compat.can_update(objects[i])}
    if stale and not foreign:
        raise _compat.TraceContextError(
            f"{caller} cannot change objects of another trace: {', '.join(sorted(stale))}. "
            "Pass the module as an argument of the function that is traced."
        )
    entries = [(i, structure.entries[i]) for i in changed]
    variables = [i for i, entry in entries if isinstance(entry, VariableEntry)]
    nodes = [node_changes(i, e, structure, fresh) for i, e in entries if isinstance(e, NodeEntry)]
    changes = [change for change in nodes if change is not None]
    perform(update(structure, leaves, objects, variables, nodes=changes))
    return assemble(structure.root, (leaves[slot] for slot in structure.root_slots), objects)


def called(flat: Flat, arrays: Retyped, call: Callable[[Any], Any]) -> Flat:
    """Calls a function of a tree under other axis types, and flattens what it returns.

    The objects of the tree hold the arrays of the call until the result is :func:`rebuilt`, or,
    after an exception, until the caller restores the old ones.
    """
    with arrays.context():
        out = call(rebuilt(flat, arrays.inside, foreign=True))
    return flatten(out, known=flat.objects)
