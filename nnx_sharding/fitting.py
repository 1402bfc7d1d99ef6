"""Whether a partition spec fits a mesh and the shape of an array, and what is left that does."""

from __future__ import annotations

import difflib
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from jax.experimental.layout import Layout
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# What is done with a spec that does not divide the dimensions of an array.
OnIndivisible: TypeAlias = Literal["error", "replicate", "drop"]
ON_INDIVISIBLE: tuple[OnIndivisible, ...] = get_args(OnIndivisible)


def axes_of(entry: Any) -> tuple[Any, ...]:
    """The mesh axes that one entry of a spec names: none, one or several."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def axes_of_type(mesh: Any, kind: AxisType) -> frozenset[Any]:
    """The axes of a mesh that are of one type."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, own in kinds if own == kind)


def axis_problems(
    spec: PartitionSpec, mesh: Any, usable: Collection[Any] | None = None
) -> list[str]:
    """What is wrong with a spec on this mesh, whatever array it is for.

    Args:
      spec: the spec.
      mesh: the mesh.
      usable: the axes of the mesh that the spec may name; None for all.
    """
    cutting = [axis for entry in spec.partitions for axis in axes_of(entry)]
    summing = {"unreduced": spec.unreduced, "reduced": spec.reduced}
    problems = []
    for axis, times in Counter((*cutting, *sorted(spec.unreduced | spec.reduced, key=str))).items():
        if axis not in mesh.axis_names:
            problems.append(f"the mesh has no axis {axis!r}{suggestion(axis, mesh.axis_names)}")
        elif usable is not None and axis not in usable:
            problems.append(f"the function is not mapped over {axis!r}, which stays automatic")
        if times > 1:
            problems.append(f"{axis!r} is used {times} times; an axis can cut one dimension only")
    for kind, axes in summing.items():
        others = sorted(axes & axes_of_type(mesh, AxisType.Auto), key=str)
        if others:
            named = ", ".join(map(repr, others))
            problems.append(f"only axes of type Explicit can be {kind}; {named} is of type Auto")
    return problems


def suggestion(name: Any, names: Iterable[Any]) -> str:
    """``; did you mean 'model'?`` for a name that is nearly one of the others."""
    near = difflib.get_close_matches(str(name), [str(n) for n in names], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def shape_problems(spec: PartitionSpec, mesh: Any, shape: Sequence[int]) -> list[str]:
    """What is wrong with a spec on this mesh for an array of this shape.

    The axes that the spec names must be those of the mesh.
    """
    if len(spec) > len(shape):
        if not shape:
            return ["a scalar has no dimension to cut; its spec is P()"]
        return [f"the spec has {len(spec)} entries, the array {_plural(len(shape), 'dimension')}"]
    problems = []
    for dimension, (size, entry) in enumerate(zip(shape, spec.partitions, strict=False)):
        axes = axes_of(entry)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if size % parts:
            product = " × ".join(f"{axis!r} ({mesh.shape[axis]})" for axis in axes)
            total = f" = {parts}" if len(axes) > 1 else ""
            problems.append(
                f"dimension {dimension} of size {size} is not divisible by {product}{total}"
            )
    return problems


def with_entries(spec: PartitionSpec, entries: Iterable[Any]) -> PartitionSpec:
    """A spec with other entries; its unreduced and reduced axes stay."""
    new: PartitionSpec = spec.update(partitions=tuple(entries))
    return new


def fit(
    spec: PartitionSpec, shape: Sequence[int], sizes: Mapping[Any, int], how: OnIndivisible
) -> PartitionSpec:
    """The part of a spec that divides the dimensions of an array; unreduced and reduced axes stay.

    Args:
      spec: the spec, with no more entries than the array has dimensions.
      shape: the shape of the array.
      sizes: the size of each mesh axis.
      how: ``"drop"`` keeps of each entry the first axes, as many as divide; ``"replicate"``
        keeps all or nothing; ``"error"`` leaves the spec as it is.
    """
    if how == "error":
        return spec
    kept = []
    for size, entry in zip(shape, spec.partitions, strict=False):
        axes = axes_of(entry)
        divides = len(axes)
        while size % math.prod(sizes[axis] for axis in axes[:divides]):
            divides -= 1
        if divides < len(axes) and how == "replicate":
            return with_entries(spec, ())
        kept.append(entry if divides == len(axes) else _entry(axes[:divides]))
    return with_entries(spec, kept)


def only_axes(spec: PartitionSpec, axes: Collection[Any]) -> PartitionSpec:
    """What a spec says about some of the axes that it names; UNCONSTRAINED stays."""
    entries = tuple(
        entry
        if entry is PartitionSpec.UNCONSTRAINED
        else _entry(tuple(axis for axis in axes_of(entry) if axis in axes))
        for entry in spec.partitions
    )
    unreduced, reduced = spec.unreduced.intersection(axes), spec.reduced.intersection(axes)
    if unreduced:
        part: PartitionSpec = spec.update(partitions=entries, unreduced=unreduced, reduced=reduced)
        return part
    # JAX refuses to keep a kind of reduction where no axis is left to reduce over.
    return PartitionSpec(*entries, reduced=reduced)


def unsummed(sharding: Any) -> Any:
    """A sharding without what its spec says of unreduced and reduced axes."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = sharding.spec
    if not (spec.unreduced or spec.reduced):
        return sharding
    return sharding.update(spec=PartitionSpec(*spec.partitions))


def is_equivalent(one: Any, other: Any, ndim: int) -> bool:
    """Whether two shardings are the same layout and, unlike JAX's own, the same type."""
    sums = [getattr(getattr(own, "spec", None), "reduced", None) or None for own in (one, other)]
    return sums[0] == sums[1] and one.is_equivalent_to(other, ndim)


def variants(spec: PartitionSpec, how: OnIndivisible) -> list[PartitionSpec]:
    """All that :func:`fit` can make of a spec, by the shapes of arrays."""
    if how == "error":
        return []
    if how == "replicate":
        return [with_entries(spec, ())]
    choices = []
    for entry in spec.partitions:
        axes = axes_of(entry)
        shorter = [_entry(axes[:count]) for count in range(len(axes))]
        choices.append([entry, *reversed(shorter)])
    return [with_entries(spec, entries) for entries in itertools.product(*choices)][1:]


def _entry(axes: tuple[Any, ...]) -> Any:
    return axes if len(axes) > 1 else axes[0] if axes else None


def suggested_spec(x: Any) -> str:
    """What is meant by names of axes without ``P(...)``, or by a layout without its sharding."""
    if isinstance(x, Layout | type(Layout.AUTO)):
        return ": write jax.experimental.layout.Format(layout, sharding)"
    names = x if isinstance(x, tuple | list) else (x,)
    if not all(isinstance(n, str) or n is None or _is_names(n) for n in names):
        return ""
    if all(n is None for n in names):  # specs that are left open
        return ""
    return f": write P({', '.join(map(repr, names))})"


def _is_names(x: Any) -> bool:
    return isinstance(x, tuple) and all(isinstance(name, str) for name in x)


def describe(sharding: Any) -> str:
    """A sharding as short as can be: its spec, if it has one."""
    return repr(sharding.spec) if isinstance(sharding, NamedSharding) else str(sharding)


def describe_both(one: Any, other: Any) -> tuple[str, str]:
    """Two shardings that differ, with as much of them as shows it."""
    short = describe(one), describe(other)
    if short[0] != short[1]:
        return short
    if isinstance(one, NamedSharding) and isinstance(other, NamedSharding):
        if one.mesh != other.mesh:
            return f"{short[0]} on {one.mesh}", f"{short[1]} on {other.mesh}"
        return f"{short[0]} in {one.memory_kind}", f"{short[1]} in {other.memory_kind}"
    return str(one), str(other)


def spec_and_mesh(sharding: Any, mesh: Any = None) -> tuple[PartitionSpec, Any] | None:
    """The partition spec in a sharding, and its mesh; None for one that has no spec or no mesh."""
    if isinstance(sharding, NamedSharding):
        return sharding.spec, sharding.mesh
    if isinstance(sharding, PartitionSpec) and mesh is not None:
        return sharding, mesh
    return None


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
