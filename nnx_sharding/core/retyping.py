"""Axis types that change for the duration of a call, and array types before, in and after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..errors import raise_listed
from ..specs.fitting import (
    axes_of,
    axes_of_type,
    fit_sharding,
    only_axes,
    spec_and_mesh,
    with_entries,
)
from .flatten import Flat
from .problems import array_line
from .structure import Structure

# The parameters of the current trace whose gradients go to partial sums, each by its id with them.
PARTIAL: ContextVar[dict[int, tuple[Any, Any]] | None] = ContextVar("PARTIAL", default=None)


def type_spec(x: Any) -> PartitionSpec | None:
    """The spec in the type of an array; None if none of the axes is Explicit."""
    mesh = type_mesh(x)
    if mesh is None or not axes_of_type(mesh, AxisType.Explicit):
        return None
    spec: PartitionSpec = jax.typeof(x).sharding.spec
    return spec


def type_mesh(x: Any) -> Any:
    """The mesh in the type of an array, or None."""
    if type(x) is _compat.ArrayImpl and not isinstance(x.sharding, NamedSharding):
        return None  # most arrays
    if not _compat.is_plain_array(x) and (not isinstance(x, jax.Array) or _compat.is_ref(x)):
        return None
    mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
    return None if mesh is None or mesh.empty else mesh


def typed_as(x: Any, goal: NamedSharding) -> Any:
    """An array with the type that it has on the mesh of another sharding.

    It is unchanged if both meshes have Auto axes only.
    """
    here, there = type_mesh(x), goal.mesh.abstract_mesh
    is_untyped = type_spec(x) is None and not axes_of_type(there, AxisType.Explicit)
    return x if here == there or is_untyped or _compat.is_ref(x) else jax.sharding.reshard(x, goal)


def mesh_of_types(leaves: Iterable[Any], default: Any = None) -> Any:
    """The mesh with which JAX types arrays: the one in context, a default, or that of an array."""
    here = jax.sharding.get_abstract_mesh()
    if not here.empty:
        return here
    found = (mesh for mesh in map(type_mesh, leaves) if mesh is not None)
    return next(found, None) if default is None else default


def retyped(x: Any, mesh: Mesh | AbstractMesh, spec: PartitionSpec | None = None) -> Any:
    """An array with the axis types of a mesh, and a spec over its Explicit axes or its present one.

    Without ``spec``, anything else is returned unchanged. Where a reduced axis would become Auto,
    the array is no longer reduced over it: JAX counts some gradients of what is reduced over Auto
    axes once per device.
    """
    here, abstract = type_mesh(x), mesh.abstract_mesh
    if spec is None:
        if here is None or here == abstract or here.axis_names != mesh.axis_names:
            return x
        old, kept = jax.typeof(x).sharding.spec, axes_of_type(mesh, AxisType.Explicit)
        if not kept.issuperset(old.reduced):
            plain = with_reduced(old, old.reduced & kept)
            x = jax.sharding.reshard(x, NamedSharding(here, plain))
        spec = only_axes(old, kept)
    elif here == abstract:
        padding = [None] * (x.ndim - len(spec))
        if jax.typeof(x).sharding.spec == with_entries(spec, (*spec.partitions, *padding)):
            return x
    # In a `vmap`, JAX adds the mapped axes to the spec if they are Explicit in context.
    with jax.sharding.use_abstract_mesh(abstract):
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def with_reduced(spec: PartitionSpec, axes: Iterable[Any]) -> PartitionSpec:
    """A spec with other reduced axes."""
    return PartitionSpec(*spec.partitions, unreduced=spec.unreduced, reduced=frozenset(axes))


class Retyping(NamedTuple):
    """Axis types that change for the duration of a call."""

    outer: AbstractMesh  # the mesh around the call
    inner: AbstractMesh  # the mesh during the call

    @classmethod
    def of(
        cls, mesh: Any, axes: Any, kind: AxisType, *, name: str, option: str = "axes"
    ) -> Retyping | None:
        """The retyping of some axes (True or None: all that are not manual); None if none changes.

        A ValueError of the caller with this name if the mesh has no such axis, or it is manual.
        """
        outer = getattr(mesh, "abstract_mesh", mesh)
        free = [a for a in outer.axis_names if a not in axes_of_type(outer, AxisType.Manual)]
        chosen = free if axes is None or axes is True else axes
        expected = f"expected one of {', '.join(map(repr, free))}"
        wrong = [f"  {option}: {expected}, got {axis!r}" for axis in chosen if axis not in free]
        raise_listed(ValueError, f"{name}: these options have invalid values:", wrong)
        changed = dict.fromkeys(set(chosen) - axes_of_type(outer, kind), kind)
        return cls(outer, outer.update_axis_types(changed)) if changed else None


class Retyped(NamedTuple):
    """The arrays that go into a call."""

    retyping: Retyping | None  # the axis types that change for the call; None if none do
    leaves: Sequence[Any]  # the arrays before the call
    inside: Sequence[Any]  # the same arrays during the call

    @classmethod
    def of(cls, retyping: Retyping | None, leaves: Sequence[Any]) -> Retyped:
        """Arrays that keep their sharding over the axes that remain Explicit."""
        if retyping is None:
            return cls(None, leaves, leaves)
        inside = [retyped(leaf, retyping.inner) for leaf in leaves]
        if (partial := PARTIAL.get()) is not None:
            pairs = ((new, partial.get(id(old))) for old, new in zip(leaves, inside, strict=True))
            partial.update(
                (id(new), (new, retyped(found[1], retyping.inner)))
                for new, found in [*pairs]
                if found
            )
        return cls(retyping, leaves, inside)

    def context(self) -> AbstractContextManager[Any]:
        """The context of the call."""
        if self.retyping is None:
            return nullcontext()
        return jax.sharding.use_abstract_mesh(self.retyping.inner)

    def leave(self, before: Structure, after: Flat) -> tuple[list[Any], dict[int, Any]]:
        """The arrays after the call, and, by slot, those that have no type yet.

        Unchanged arrays are the original ones; new ones in existing objects have the type of what
        they replace; scalars are replicated. Both structures have the same objects first.
        """
        assert self.retyping is not None
        outer, inner = self.retyping
        origins = {id(new): old for new, old in zip(self.inside, self.leaves, strict=True)}
        left = [origins.get(id(leaf), leaf) for leaf in after.leaves]
        untyped = {slot: x for slot, x in enumerate(left) if type_mesh(x) == inner}
        specs = {slot: PartitionSpec() for slot, x in untyped.items() if not x.ndim}
        for old_slots, slots in zip(before.slots, after.structure.slots, strict=False):
            if len(old_slots) == len(slots):
                old = (type_spec(self.leaves[slot]) or PartitionSpec() for slot in old_slots)
                specs.update(zip(slots, old, strict=True))
        for slot, spec in specs.items():
            if slot in untyped and not fit_sharding(spec, outer, left[slot].shape).problems:
                left[slot] = retyped(untyped.pop(slot), outer, spec)
        return left, untyped

    def leave_as(
        self,
        before: Structure,
        after: Flat,
        specs: Sequence[Any],
        names: Sequence[str],
        *,
        name: str,
        option: str,
    ) -> Flat:
        """The outputs with the types of :meth:`leave`, but as declared where there is a spec."""
        if self.retyping is None:
            return after
        left, untyped = self.leave(before, after)
        for slot, declared in enumerate(specs):
            pair = spec_and_mesh(declared, self.retyping.outer)
            if pair is not None and not _compat.is_ref(left[slot]):
                left[slot] = retyped(left[slot], self.retyping.outer, pair[0])
                untyped.pop(slot, None)
        raise_listed(
            ValueError,
            f"{name}: these results were computed on Auto axes, and no spec says how they are "
            "sharded on the Explicit axes outside:",
            [array_line(names[slot], x) for slot, x in untyped.items()],
            f"Declare them in {option}; P() replicates.",
        )
        return after._replace(leaves=left)


def first_axes(shardings: Iterable[Any], mesh: Any) -> frozenset[Any]:
    """The axes of a mesh over which the first dimension is sharded by some of these."""
    pairs = (spec_and_mesh(sharding, mesh) for sharding in shardings)
    firsts = (pair[0].partitions[:1] for pair in pairs if pair is not None)
    return frozenset(axis for entries in firsts for entry in entries for axis in axes_of(entry))
