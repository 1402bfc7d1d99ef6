"""Whether a sharding fits a mesh and the shape of an array, and the part of it that does."""

from __future__ import annotations

import difflib
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from flax import nnx
from jax.experimental.layout import Layout
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from .types import AnyMesh, AxisName, Spec

# What is done with a spec that does not divide the dimensions of an array.
OnIndivisible: TypeAlias = Literal["error", "replicate", "drop"]
ON_INDIVISIBLE: tuple[OnIndivisible, ...] = get_args(OnIndivisible)


class Misfit(NamedTuple):
    """One reason why a spec does not fit a mesh or a shape, and the axes that it is about."""

    reason: str
    kind: Literal["axis", "repeated", "rank", "indivisible", "other"] = "other"
    axes: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return self.reason


class Fit(NamedTuple):
    """How a sharding fits a mesh and a shape."""

    declared: Any
    shape: tuple[int, ...] | None  # None if only the mesh was considered
    sharding: Any  # without problems, the part that fits: a spec or a NamedSharding
    corrections: tuple[Misfit, ...]
    problems: tuple[Misfit, ...]  # what cannot be corrected, or was not allowed to be

    @property
    def is_indivisible(self) -> bool:
        """Whether axes do not divide a dimension."""
        return any(m.kind == "indivisible" for m in (*self.corrections, *self.problems))

    @property
    def reasons(self) -> str:
        """The problems in words; if there are none, the corrections."""
        return "; ".join(map(str, self.problems or self.corrections))

    def refuse(self, reason: str | None) -> Fit:
        """A copy with one more problem, unless it is None."""
        if reason is None:
            return self
        return self._replace(problems=(*self.problems, Misfit(reason)))

    def line(self, name: str, before: Sequence[int] | None = None) -> str:
        """A line of a message: ``name, shape (6,) (was (4,)), P('a') → P(None,): the reasons``."""
        shape = "" if self.shape is None else f", shape {self.shape}"
        was = "" if before is None or tuple(before) == self.shape else f" (was {tuple(before)})"
        new = "" if self.problems else f" → {describe(self.sharding)}"
        return f"  {name}{shape}{was}, {describe(self.declared)}{new}: {self.reasons}"


def fit_sharding(
    sharding: Spec,
    mesh: AnyMesh | None = None,
    shape: Sequence[int] | None = None,
    *,
    on_indivisible: OnIndivisible = "error",
    usable: Collection[Any] | None = None,
    unconstrained: bool = True,
    lenient: bool = False,
) -> Fit:
    """The part of a sharding that fits a mesh and a shape, and what does not fit.

    JAX decides on shardings without a spec; a spec without a mesh fits. Without a ``shape``, only
    the mesh counts. With ``on_indivisible="drop"``, each entry keeps as many first axes as divide
    the dimension, and unreduced and reduced ones stay. ``usable`` are axes that may be named, None
    for all. ``lenient`` drops others and cuts the spec to the rank, and reports no problems.
    """
    declared, of_shape = sharding, None if shape is None else tuple(shape)
    parts = spec_and_mesh(sharding, mesh)
    if parts is None:
        fit = Fit(declared, of_shape, sharding, (), ())
        if isinstance(sharding, Sharding) and of_shape is not None:
            try:
                sharding.shard_shape(of_shape)
            except ValueError as error:
                return fit.refuse(str(error))
        return fit
    spec, mesh = parts
    corrections: list[Misfit] = []
    if lenient and of_shape is not None:
        if any(map(axes_of, spec.partitions[len(of_shape) :])):
            corrections.append(_too_long(spec, of_shape))
        spec = with_entries(spec, padded(spec, len(of_shape)))
    problems = list(_unusable(spec, mesh, usable))
    if lenient:
        corrections += [problem for problem in problems if problem.kind == "axis"]
        dropped = {axis for correction in corrections for axis in correction.axes}
        problems = [problem for problem in problems if dropped.isdisjoint(problem.axes)]
        spec = only_axes(spec, set(mesh.axis_names) - dropped) if dropped else spec
    if not unconstrained:
        open_ = (d for d, x in enumerate(spec.partitions) if x is PartitionSpec.UNCONSTRAINED)
        remedy = "is UNCONSTRAINED; write None or a mesh axis"
        problems += [Misfit(f"dimension {d} {remedy}") for d in open_]
    if of_shape is not None and not problems:
        if len(spec) > len(of_shape):
            problems = [_too_long(spec, of_shape)]
        indivisible = [] if problems else list(_indivisible(spec, mesh.shape, of_shape))
        if on_indivisible == "error":
            problems += indivisible
        elif indivisible:
            corrections += indivisible
            pairs = zip(of_shape, spec.partitions, strict=False)
            entries = () if on_indivisible == "replicate" else _dividing(pairs, mesh.shape)
            spec = with_entries(spec, entries)
    sharding = sharding if spec is parts[0] else like(sharding, spec)
    return Fit(declared, of_shape, sharding, tuple(corrections), tuple(problems))


def _unusable(spec: PartitionSpec, mesh: Any, usable: Collection[Any] | None) -> Iterator[Misfit]:
    """The axes that a spec cannot use."""
    mapped = axes_of_type(mesh, AxisType.Manual) if usable is None else ()
    auto = axes_of_type(mesh, AxisType.Auto)
    for axis, times in Counter(spec_axes(spec)).items():
        why, summed = None, spec.unreduced | spec.reduced
        if axis not in mesh.axis_names:
            why = f"the mesh has no axis {axis!r}{suggestion(axis, mesh.axis_names)}"
        elif usable is not None and axis not in usable:
            why = f"the function is not mapped over {axis!r}, which stays automatic"
        elif axis in mapped:
            why = f"the function is mapped over {axis!r}, which already shards its arrays"
        elif axis in auto & summed:
            kind = "unreduced" if axis in spec.unreduced else "reduced"
            why = f"only axes of type Explicit can be {kind}; {axis!r} is of type Auto"
        if why is not None:
            yield Misfit(why, "axis", (axis,))
        if times > 1:
            why = f"{axis!r} is used {times} times; an axis can shard only one dimension"
            yield Misfit(why, "repeated", (axis,))


def _too_long(spec: PartitionSpec, shape: Sequence[int]) -> Misfit:
    if not shape:
        return Misfit("a scalar has no dimension to shard; its spec is P()", "rank")
    rank = f"{len(shape)} dimension{'s' * (len(shape) > 1)}"
    return Misfit(f"the spec has {len(spec)} entries, the array {rank}", "rank")


def _indivisible(
    spec: PartitionSpec, sizes: Mapping[Any, int], shape: Sequence[int]
) -> Iterator[Misfit]:
    """The dimensions that their axes do not divide."""
    for dimension, (size, entry) in enumerate(zip(shape, spec.partitions, strict=False)):
        axes, parts = axes_of(entry), _parts(entry, sizes)
        if size % parts:
            product = " × ".join(f"{axis!r} ({sizes[axis]})" for axis in axes)
            total = f" = {parts}" if len(axes) > 1 else ""
            why = f"dimension {dimension} of size {size} is not divisible by {product}{total}"
            yield Misfit(why, "indivisible")


def _dividing(pairs: Iterable[tuple[int, Any]], sizes: Mapping[Any, int]) -> Iterator[Any]:
    """The entries of a spec without the axes that do not divide their dimensions."""
    for size, entry in pairs:
        yield next(part for part in _prefixes(entry) if not size % _parts(part, sizes))


def variants(spec: PartitionSpec, action: OnIndivisible) -> list[PartitionSpec]:
    """All specs that :func:`fit_sharding` can make of one, depending on the shape of the array."""
    if action == "error":
        return []
    if action == "replicate":
        return [with_entries(spec, ())]
    choices = itertools.product(*map(_prefixes, spec.partitions))
    return [with_entries(spec, entries) for entries in choices][1:]


def _prefixes(entry: object) -> list[Any]:
    """An entry, the same without its last axis, without the last two, and so on."""
    axes = axes_of(entry)
    return [entry, *(_entry(axes[:count]) for count in reversed(range(len(axes))))]


def _parts(entry: object, sizes: Mapping[Any, int]) -> int:
    return math.prod(sizes[axis] for axis in axes_of(entry))


def _entry(axes: tuple[Any, ...]) -> Any:
    return axes if len(axes) > 1 else axes[0] if axes else None


def axes_of(entry: object) -> tuple[Any, ...]:
    """The mesh axes that one entry of a spec names: none, one or several."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def spec_axes(spec: PartitionSpec) -> Iterable[Any]:
    """The mesh axes that a spec names, the unreduced and reduced ones last."""
    yield from itertools.chain.from_iterable(map(axes_of, spec.partitions))
    yield from sorted(spec.unreduced | spec.reduced, key=str)


def axes_of_type(mesh: Any, kind: AxisType) -> frozenset[Any]:
    """The axes of a mesh that have this type."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, its_kind in kinds if its_kind == kind)


def only_axes(spec: PartitionSpec, axes: Collection[Any]) -> PartitionSpec:
    """A spec with only some of the axes that it names; UNCONSTRAINED stays."""
    entries = tuple(
        entry
        if entry is PartitionSpec.UNCONSTRAINED
        else _entry(tuple(axis for axis in axes_of(entry) if axis in axes))
        for entry in spec.partitions
    )
    unreduced, reduced = spec.unreduced.intersection(axes), spec.reduced.intersection(axes)
    if not unreduced:  # JAX refuses a kind of reduction without axes
        return PartitionSpec(*entries, reduced=reduced)
    part: PartitionSpec = spec.update(partitions=entries, unreduced=unreduced, reduced=reduced)
    return part


def padded(spec: PartitionSpec, rank: int) -> list[Any]:
    """The entries of a spec, cut or filled with None to this number of dimensions."""
    return [*spec.partitions[:rank], *[None] * (rank - len(spec))]


def with_entries(spec: PartitionSpec, entries: Iterable[object]) -> PartitionSpec:
    """A spec with other entries; its unreduced and reduced axes stay."""
    return spec.update(partitions=tuple(entries))  # type: ignore[no-any-return]


def with_reduced(spec: PartitionSpec, axes: Iterable[AxisName]) -> PartitionSpec:
    """A spec with other reduced axes."""
    return PartitionSpec(*spec.partitions, unreduced=spec.unreduced, reduced=frozenset(axes))


def like(sharding: Spec, spec: PartitionSpec) -> Any:
    """A spec in the form of a sharding: on its mesh and in its memory, if it names them."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return spec


def spec_and_mesh(sharding: Spec, mesh: AnyMesh | None = None) -> tuple[PartitionSpec, Any] | None:
    """The spec of a sharding and its mesh; None without a spec or a mesh."""
    if isinstance(sharding, NamedSharding):
        return sharding.spec, sharding.mesh
    if isinstance(sharding, PartitionSpec) and mesh is not None:
        return sharding, mesh
    return None


def first_axes(shardings: Iterable[Spec], mesh: AnyMesh | None) -> frozenset[Any]:
    """The axes of a mesh over which the first dimension is sharded by some of these."""
    pairs = (spec_and_mesh(sharding, mesh) for sharding in shardings)
    firsts = (pair[0].partitions[:1] for pair in pairs if pair is not None)
    return frozenset(axis for entries in firsts for entry in entries for axis in axes_of(entry))


def unsummed(sharding: Any) -> Any:
    """A sharding without the unreduced and reduced axes of its spec."""
    spec = getattr(sharding, "spec", PartitionSpec())
    if not (spec.unreduced or spec.reduced):
        return sharding
    return sharding.update(spec=PartitionSpec(*spec.partitions))


def in_type(sharding: Any) -> NamedSharding | None:
    """The part of a sharding that is in the type of an array: that over Explicit axes, if any."""
    axes = axes_of_type(sharding.mesh, AxisType.Explicit) if spec_and_mesh(sharding) else ()
    return NamedSharding(sharding.mesh, only_axes(sharding.spec, axes)) if axes else None


def is_equivalent(present: Sharding, declared: Sharding, ndim: int) -> bool:
    """Whether two shardings put the same parts on each device, in arrays of the same type."""
    same_type = _typed(present, ndim) == _typed(declared, ndim)
    return same_type and bool(present.is_equivalent_to(declared, ndim))


def _typed(sharding: Spec, ndim: int) -> Any:
    """What is in the type of an array; JAX does not distinguish meshes with Auto axes only."""
    part = in_type(sharding)
    if part is None:
        return None
    entries = tuple(map(axes_of, padded(part.spec, ndim)))
    return part.mesh.abstract_mesh, entries, part.spec.unreduced, part.spec.reduced


def suggestion(name: object, names: Iterable[object]) -> str:
    """``; did you mean 'model'?`` for a name that nearly equals one of the others."""
    near = difflib.get_close_matches(str(name), [str(n) for n in names], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def suggested_spec(x: object) -> str:
    """``: write P('data', None)`` for a value that was probably meant as a spec or ``Format``."""
    if isinstance(x, nnx.StateSharding):
        return ", which is Flax's: write nnx_sharding.StateSharding, with the same arguments"
    if isinstance(x, Layout | type(Layout.AUTO)):
        return ": write jax.experimental.layout.Format(layout, sharding)"
    names = x if isinstance(x, tuple | list) else (x,)
    flat = [name for entry in names for name in axes_of(entry)]
    if not flat or not all(isinstance(name, str) for name in flat):
        return ""  # a tuple of None is a prefix, not a spec
    return f": write P({', '.join(map(repr, names))})"


def describe(sharding: object) -> str:
    """A short text for a sharding: its spec, if it has one."""
    return repr(sharding.spec) if isinstance(sharding, NamedSharding) else str(sharding)


def describe_mesh(mesh: AnyMesh | None) -> str:
    """A short text for a mesh, such as ``data 2 × model 4, Explicit``."""
    if mesh is None or mesh.empty:
        return "none"
    sizes = " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return f"{sizes}, {' × '.join(dict.fromkeys(kind.name for kind in mesh.axis_types))}"


def describe_both(sharding: Any, other: object) -> tuple[str, str]:
    """Short texts for two different shardings, with the part in which they differ."""
    short = describe(sharding), describe(other)
    if short[0] != short[1]:
        return short
    if isinstance(sharding, NamedSharding) and isinstance(other, NamedSharding):
        if sharding.mesh != other.mesh:
            meshes = describe_mesh(sharding.mesh), describe_mesh(other.mesh)
            meshes = meshes if meshes[0] != meshes[1] else (str(sharding.mesh), str(other.mesh))
            return f"{short[0]} on mesh {meshes[0]}", f"{short[1]} on mesh {meshes[1]}"
        return f"{short[0]} in {sharding.memory_kind}", f"{short[1]} in {other.memory_kind}"
    return str(sharding), str(other)
