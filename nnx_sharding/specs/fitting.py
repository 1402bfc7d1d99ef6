"""Whether a sharding fits a mesh and the shape of an array, and the part of it that fits.

A spec fits if the mesh has its axes, if it names none twice, if it has no more entries than the
array has dimensions, and if the sizes of the axes of an entry divide the dimension:

    mesh data 2 × model 4    P("data", ("model",))    (6, 8) → parts of (3, 2)    fits
                             P("model")               (6, 8)                      6 % 4 ≠ 0

JAX checks the same, but one array at a time, in a trace or when the array is placed. Here all
misfits of a model are found before, and specs that do not divide can be corrected
(``on_indivisible``). An *entry* of a ``PartitionSpec`` (a *spec*) is for one dimension: a mesh
axis, a tuple of axes, None, or ``UNCONSTRAINED``, which leaves the dimension to the compiler.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from flax import nnx
from jax.experimental.layout import Layout
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from .types import AnyMesh, AxisName, Spec

# What is done with a spec that does not divide the dimensions of an array.
OnIndivisible: TypeAlias = Literal["error", "replicate", "drop"]
ON_INDIVISIBLE: tuple[OnIndivisible, ...] = get_args(OnIndivisible)


class Mismatch(NamedTuple):
    """One reason why a spec does not fit a mesh or a shape, and the axes that it is about."""

    reason: str
    # "unknown": the mesh has no such axis. "unusable": the spec may not name the axis here.
    # "repeated": the spec names it several times. "rank": the spec has more entries than the array
    # has dimensions. "indivisible": axes do not divide a dimension. "other": all other reasons.
    kind: Literal["unknown", "unusable", "repeated", "rank", "indivisible", "other"] = "other"
    axes: tuple[Any, ...] = ()  # only the first three kinds have axes

    @property
    def is_about_mesh(self) -> bool:
        """Whether the spec names an axis that no spec may name here."""
        return self.kind in ("unknown", "unusable")

    def __str__(self) -> str:
        return self.reason


class Fit(NamedTuple):
    """How a sharding fits a mesh and a shape."""

    declared: Any  # the spec or sharding that was checked
    shape: tuple[int, ...] | None  # None if only the mesh was considered
    sharding: Any  # if there are no problems, the part that fits: a spec or a NamedSharding
    corrections: tuple[Mismatch, ...]  # the mismatches that were corrected
    problems: tuple[Mismatch, ...]  # the mismatches that cannot or must not be corrected

    @property
    def is_indivisible(self) -> bool:
        """Whether axes do not divide a dimension."""
        return any(m.kind == "indivisible" for m in (*self.corrections, *self.problems))

    @property
    def reasons(self) -> str:
        """The problems in words; if there are none, the corrections."""
        return "; ".join(map(str, self.problems or self.corrections))

    def refuse(self, reason: str | None) -> Fit:
        """Returns a copy with one more problem, or this fit if the reason is None."""
        if reason is None:
            return self
        return self._replace(problems=(*self.problems, Mismatch(reason)))

    def line(self, name: str, before: Sequence[int] | None = None) -> str:
        """Returns a line as ``name, shape (6,) (was (4,)), P('a') → P(None,): the reasons``."""
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
    usable: Collection[AxisName] | None = None,
    unconstrained: bool = True,
) -> Fit:
    """Returns the part of a sharding that fits a mesh and a shape, and what does not fit.

    Args:
      sharding: the sharding. JAX decides about a sharding without a spec; a spec without a mesh
        fits.
      mesh: the mesh of a spec.
      shape: the shape of the array; if this is None, only the mesh counts.
      on_indivisible: with ``"replicate"`` or ``"drop"``, an entry that does not divide the shape is
        corrected. Dropping keeps as many first axes of each entry as divide the dimension. Neither
        removes unreduced and reduced axes.
      usable: the axes that the spec may name; None for all axes except those over which an
        enclosing ``shard_map`` maps.
      unconstrained: whether entries may be ``UNCONSTRAINED``.
    """
    shape = None if shape is None else tuple(shape)
    pair = spec_and_mesh(sharding, mesh)
    if pair is None:  # a sharding of another kind, a spec without a mesh, or no sharding
        return _fit_without_spec(sharding, shape)
    spec, mesh = pair
    corrections: list[Mismatch] = []
    corrected = sharding
    # 1. The axes that the spec names: the mesh has to have them, and the spec may name each once.
    problems = list(_axis_problems(spec, mesh, usable))
    # 2. Dimensions that are left to the compiler.
    if not unconstrained:
        problems += [
            Mismatch(f"dimension {dimension} is UNCONSTRAINED; write None or a mesh axis")
            for dimension, entry in enumerate(spec.partitions)
            if entry is PartitionSpec.UNCONSTRAINED
        ]
    # 3. The shape. The sizes of the axes are known only if the mesh has all of them.
    if shape is not None and not problems:
        indivisible = list(_indivisible(spec, mesh.shape, shape))
        if len(spec) > len(shape):
            problems.append(too_long(spec, shape))
        elif on_indivisible == "error":
            problems += indivisible
        elif indivisible:
            corrections = indivisible
            spec = _corrected(spec, mesh.shape, shape, on_indivisible)
            corrected = replace_spec(sharding, spec)
    return Fit(
        declared=sharding,
        shape=shape,
        sharding=corrected,
        corrections=tuple(corrections),
        problems=tuple(problems),
    )


def _fit_without_spec(sharding: Spec, shape: tuple[int, ...] | None) -> Fit:
    """Asks JAX whether a sharding of another kind, such as ``SingleDeviceSharding``, fits.

    JAX cannot be asked about a spec without a mesh, or if there is no shape. Both count as fitting.
    """
    fit = Fit(declared=sharding, shape=shape, sharding=sharding, corrections=(), problems=())
    if isinstance(sharding, Sharding) and shape is not None:
        try:
            sharding.shard_shape(shape)
        except ValueError as error:  # the text says what does not divide the shape
            return fit.refuse(str(error))
    return fit


def _axis_problems(
    spec: PartitionSpec, mesh: AnyMesh, usable: Collection[AxisName] | None
) -> Iterator[Mismatch]:
    """Yields what is wrong with the axes that a spec names, whatever the shape of the array.

    Args:
      usable: the axes that the spec may name. None stands for all axes except those over which an
        enclosing ``shard_map`` maps; in it, these are Manual axes of the mesh.
    """
    manual = axes_of_type(mesh, AxisType.Manual) if usable is None else ()
    auto = axes_of_type(mesh, AxisType.Auto)
    # Over an unreduced axis, the devices hold summands of the array. The gradient of an array with
    # a reduced axis is unreduced. JAX keeps both in types of arrays, so the axes must be Explicit.
    reduced = spec.unreduced | spec.reduced
    for axis, times in Counter(spec_axes(spec)).items():
        reason = None
        if axis not in mesh.axis_names:
            reason = f"the mesh has no axis {axis!r}{suggestion(axis, mesh.axis_names)}"
        elif usable is not None and axis not in usable:
            reason = f"the function is not mapped over {axis!r}, which stays automatic"
        elif axis in manual:
            reason = f"the function is mapped over {axis!r}, which already shards its arrays"
        elif axis in auto & reduced:
            word = "unreduced" if axis in spec.unreduced else "reduced"
            reason = f"only axes of type Explicit can be {word}; {axis!r} is of type Auto"
        if reason is not None:
            is_known = axis in mesh.axis_names
            yield Mismatch(reason, "unusable" if is_known else "unknown", (axis,))
        if times > 1:
            reason = f"{axis!r} is used {times} times; an axis can shard only one dimension"
            yield Mismatch(reason, "repeated", (axis,))


def too_long(spec: PartitionSpec, shape: Sequence[int]) -> Mismatch:
    """Returns the mismatch of a spec that has more entries than a shape has dimensions."""
    if not shape:
        return Mismatch("a scalar has no dimension to shard; its spec is P()", "rank")
    rank = "1 dimension" if len(shape) == 1 else f"{len(shape)} dimensions"
    return Mismatch(f"the spec has {len(spec)} entries, the array {rank}", "rank")


def _indivisible(
    spec: PartitionSpec, sizes: Mapping[AxisName, int], shape: Sequence[int]
) -> Iterator[Mismatch]:
    """Yields a mismatch for each dimension of an array that the axes of its entry do not divide.

    Args:
      spec: the spec; it may have fewer entries than the array has dimensions.
      shape: the shape of the array.
    """
    for dimension, (size, entry) in enumerate(zip(shape, spec.partitions, strict=False)):
        axes = axes_of(entry)
        num_parts = _num_parts(entry, sizes)
        if size % num_parts:
            product = " × ".join(f"{axis!r} ({sizes[axis]})" for axis in axes)
            total = f" = {num_parts}" if len(axes) > 1 else ""
            reason = f"dimension {dimension} of size {size} is not divisible by {product}{total}"
            yield Mismatch(reason, "indivisible")


def _corrected(
    spec: PartitionSpec,
    sizes: Mapping[AxisName, int],
    shape: Sequence[int],
    on_indivisible: OnIndivisible,
) -> PartitionSpec:
    """Returns a spec without entries, or without the axes that do not divide their dimensions.

    With ``"drop"`` and axes of sizes 2 and 4, ``P(("data", "model"))`` becomes ``P("data")`` for 6
    rows.

    Args:
      shape: the shape of the array.
      on_indivisible: ``"replicate"`` or ``"drop"``.
    """
    if on_indivisible == "replicate":
        return with_entries(spec, ())
    entries = []
    for size, entry in zip(shape, spec.partitions, strict=False):
        # There is always a fitting part, because the last one is None, which divides every size.
        fitting = (part for part in _prefixes(entry) if size % _num_parts(part, sizes) == 0)
        entries.append(next(fitting))
    return with_entries(spec, entries)


def possible_corrections(spec: PartitionSpec, action: OnIndivisible) -> list[PartitionSpec]:
    """Returns all other specs that :func:`fit_sharding` can make of a spec, for any shape.

    With ``"drop"``, these are ``P("data")`` and ``P(None)`` for ``P(("data", "model"))``.

    Args:
      spec: the spec.
      action: what ``fit_sharding`` does with a spec that does not divide a shape.
    """
    if action == "error":
        return []
    if action == "replicate":
        return [with_entries(spec, ())]  # P(): all dimensions are replicated
    # Each entry keeps its first axes. `_prefixes` begins with the whole entry, so the first of the
    # choices is the unchanged spec.
    choices = itertools.product(*map(_prefixes, spec.partitions))
    _unchanged, *corrected = [with_entries(spec, entries) for entries in choices]
    return corrected


def _prefixes(entry: object) -> list[Any]:
    """Returns an entry, the entry without its last axis, and so on: ``("a", "b")``, "a", None."""
    axes = axes_of(entry)
    return [entry, *(entry_of(axes[:count]) for count in reversed(range(len(axes))))]


def _num_parts(entry: object, sizes: Mapping[AxisName, int]) -> int:
    """Returns the number of parts into which an entry of a spec divides a dimension."""
    return math.prod(sizes[axis] for axis in axes_of(entry))


def entry_of(axes: Sequence[AxisName]) -> Any:
    """Returns the entry of a spec that names these axes: None, one axis, or a tuple of several."""
    if not axes:
        return None
    return tuple(axes) if len(axes) > 1 else axes[0]


def axes_of(entry: object) -> tuple[Any, ...]:
    """Returns the mesh axes that one entry of a spec names: none, one, or a tuple or list."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    if isinstance(entry, tuple):
        return entry
    return tuple(entry) if isinstance(entry, list) else (entry,)


def spec_axes(spec: PartitionSpec) -> Iterable[Any]:
    """Yields the mesh axes that a spec names; unreduced and reduced axes come last."""
    yield from itertools.chain.from_iterable(map(axes_of, spec.partitions))
    yield from sorted(spec.unreduced | spec.reduced, key=str)


def axes_of_type(mesh: AnyMesh, axis_type: AxisType) -> frozenset[Any]:
    """Returns the axes of a mesh that have this type."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(axis for axis, type_of_axis in pairs if type_of_axis == axis_type)


def keep_axes(spec: PartitionSpec, axes: Collection[AxisName]) -> PartitionSpec:
    """Returns a spec with only those of its axes that are in ``axes``; UNCONSTRAINED stays."""
    entries: list[Any] = []
    for entry in spec.partitions:
        if entry is PartitionSpec.UNCONSTRAINED:
            entries.append(entry)
        else:
            kept = tuple(axis for axis in axes_of(entry) if axis in axes)
            entries.append(entry_of(kept))
    # Over unreduced axes the devices hold summands of the array, and over reduced axes they will
    # hold summands of its gradient.
    unreduced = spec.unreduced.intersection(axes)
    reduced = spec.reduced.intersection(axes)
    if not unreduced:
        # `update` is not used, because it keeps `unreduced_kind` (how summands are combined), and
        # JAX refuses that in a spec without unreduced axes.
        return PartitionSpec(*entries, reduced=reduced)
    kept_spec: PartitionSpec = spec.update(
        partitions=tuple(entries), unreduced=unreduced, reduced=reduced
    )
    return kept_spec


def pad_entries(spec: PartitionSpec, rank: int) -> list[Any]:
    """Returns the entries of a spec, cut or filled with None to this number of dimensions."""
    return [*spec.partitions[:rank], *[None] * (rank - len(spec))]


def with_entries(spec: PartitionSpec, entries: Iterable[object]) -> PartitionSpec:
    """Returns a spec with other entries; its unreduced and reduced axes stay."""
    return spec.update(partitions=tuple(entries))  # type: ignore[no-any-return]


def with_reduced(spec: PartitionSpec, axes: Iterable[AxisName]) -> PartitionSpec:
    """Returns a spec with other reduced axes."""
    return PartitionSpec(*spec.partitions, unreduced=spec.unreduced, reduced=frozenset(axes))


def replace_spec(sharding: Spec, spec: PartitionSpec) -> Any:
    """Returns a spec in the form of ``sharding``: a spec, or a NamedSharding with its mesh."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return spec


def spec_and_mesh(sharding: Spec, mesh: AnyMesh | None = None) -> tuple[PartitionSpec, Any] | None:
    """Returns the spec and the mesh of a sharding; None if it has no spec, or if there is no mesh.

    ``mesh`` is the mesh of a plain spec.
    """
    if isinstance(sharding, NamedSharding):
        return sharding.spec, sharding.mesh
    if isinstance(sharding, PartitionSpec) and mesh is not None:
        return sharding, mesh
    return None


def first_axes(shardings: Iterable[Spec], mesh: AnyMesh | None) -> frozenset[Any]:
    """Returns the mesh axes over which any of these shardings shards the first dimension."""
    axes = set[Any]()
    for sharding in shardings:
        pair = spec_and_mesh(sharding, mesh)
        if pair is not None:
            spec, _ = pair
            axes.update(*map(axes_of, spec.partitions[:1]))
    return frozenset(axes)


def without_reductions(sharding: Any) -> Any:
    """Returns a sharding without unreduced and reduced axes: itself if its spec has none."""
    spec = getattr(sharding, "spec", PartitionSpec())  # not all shardings have a spec
    if not (spec.unreduced or spec.reduced):
        return sharding
    return sharding.update(spec=PartitionSpec(*spec.partitions))


def explicit_part(sharding: Any) -> NamedSharding | None:
    """Returns the part of a sharding over Explicit axes, which is in an array's type; else None."""
    if not isinstance(sharding, NamedSharding):
        return None
    axes = axes_of_type(sharding.mesh, AxisType.Explicit)
    return NamedSharding(sharding.mesh, keep_axes(sharding.spec, axes)) if axes else None


def is_equivalent(present: Sharding, declared: Sharding, ndim: int) -> bool:
    """Whether two shardings put the same parts on each device, in arrays of the same type."""
    same_type = _typed(present, ndim) == _typed(declared, ndim)
    return same_type and bool(present.is_equivalent_to(declared, ndim))


def _typed(sharding: Spec, ndim: int) -> Any:
    """Returns a key for what a sharding puts into an array's type; None if that is nothing.

    An array's type has the mesh, and the Explicit axes of the spec. It has neither if the mesh has
    no Explicit axis, so shardings on all such meshes have the same key, None.
    """
    part = explicit_part(sharding)
    if part is None:
        return None
    # P("a") and P(("a",)) get equal keys, and so do specs that differ by None at the end.
    entries = tuple(map(axes_of, pad_entries(part.spec, ndim)))
    return part.mesh.abstract_mesh, entries, part.spec.unreduced, part.spec.reduced


def suggestion(name: object, names: Iterable[object]) -> str:
    """Returns ``; did you mean 'model'?`` if a name is close to one of ``names``; otherwise ""."""
    # Names are converted, because the names of axes need not be strings.
    near = difflib.get_close_matches(str(name), [str(n) for n in names], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def suggested_spec(x: object) -> str:
    """Returns what to write instead of ``x``, for the end of a message that shows ``x``.

    The text is ``: write P('data', None)`` for ``("data", None)``, which was probably meant as a
    spec. There is also a text for a ``Layout``, and for a ``StateSharding`` of Flax. It is "" for
    anything else.
    """
    if isinstance(x, nnx.StateSharding):
        return ", which is Flax's: write nnx_sharding.StateSharding, with the same arguments"
    # A layout alone does not name the devices. JAX has no name for the type of `Layout.AUTO`.
    if isinstance(x, Layout | type(Layout.AUTO)):
        return ": write jax.experimental.layout.Format(layout, sharding)"
    entries = x if isinstance(x, tuple | list) else (x,)
    axes = [axis for entry in entries for axis in axes_of(entry)]
    if not axes:  # (None, None), for example, is a prefix without specs for two arrays
        return ""
    if not all(isinstance(axis, str) for axis in axes):  # these are no names of mesh axes
        return ""
    return f": write P({', '.join(map(repr, entries))})"


def describe(sharding: object) -> str:
    """Returns a short text for a sharding: its spec, if it has one."""
    return repr(sharding.spec) if isinstance(sharding, NamedSharding) else str(sharding)


def describe_mesh(mesh: AnyMesh | None) -> str:
    """Returns a short text for a mesh, such as ``data 2 × model 4, Explicit``."""
    if mesh is None or mesh.empty:
        return "none"
    sizes = " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return f"{sizes}, {' × '.join(dict.fromkeys(kind.name for kind in mesh.axis_types))}"


def axes_text(sizes: Mapping[AxisName, int]) -> str:
    """Returns the sentence of messages that lists the axes of a mesh, from their sizes."""
    listed = ", ".join(f"{axis!r} ({size})" for axis, size in sizes.items())
    return f"The mesh has the axes {listed}."


def describe_both(sharding: Any, other: object) -> tuple[str, str]:
    """Returns a text for each of two different shardings, short but with their difference.

    The texts are the specs if these differ on meshes of equal sizes. Otherwise the meshes are
    added, or the kinds of memory.
    """
    text, other_text = describe(sharding), describe(other)
    if not isinstance(sharding, NamedSharding) or not isinstance(other, NamedSharding):
        return (text, other_text) if text != other_text else (str(sharding), str(other))
    # The mesh is left out for an array that is on no mesh, because the spec says all.
    are_on_meshes = not (sharding.mesh.empty or other.mesh.empty)
    have_equal_sizes = sharding.mesh.shape == other.mesh.shape
    if text != other_text and (have_equal_sizes or not are_on_meshes):
        return text, other_text
    if sharding.mesh == other.mesh:
        return f"{text} in {sharding.memory_kind}", f"{other_text} in {other.memory_kind}"
    mesh, other_mesh = describe_mesh(sharding.mesh), describe_mesh(other.mesh)
    if mesh == other_mesh:  # the meshes have different devices, which only the long text shows
        mesh, other_mesh = str(sharding.mesh), str(other.mesh)
    return f"{text} on mesh {mesh}", f"{other_text} on mesh {other_mesh}"


def show(value: object) -> str:
    """Returns a value as text for a message: its name or its repr, in one short line.

    The text is the same in each process and run, without addresses of objects.
    """
    if isinstance(value, Mesh | AbstractMesh):
        return f"mesh {describe_mesh(value)}"
    if isinstance(value, set | frozenset) and value:  # sorted, so that all processes agree
        text = f"{{{', '.join(sorted(map(show, value)))}}}"
        return shorten(text if type(value) is set else f"{type(value).__name__}({text})")
    try:
        name = getattr(value, "__qualname__", None) if callable(value) else None
        text = name if isinstance(name, str) else repr(value)
    except Exception as error:  # the user's class may raise, but a message must not fail
        return f"a {type(value).__name__} whose repr raises {type(error).__name__}"
    return shorten(re.sub(r" at 0x[0-9a-fA-F]+", "", text))


def shorten(text: str, length: int = 120) -> str:
    """Returns a text in one line, without its middle if it is long."""
    text = " ".join(text.split())
    half = length // 2
    return text if len(text) <= length else f"{text[:half]} … {text[-half:]}"
