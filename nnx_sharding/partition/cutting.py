"""What all strategies do: look at a mesh and at what is cut already, and cut one dimension more."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..errors import NoMeshError, UnusedFilterWarning, report
from ..fitting import (
    axes_of,
    axis_problems,
    describe,
    fit,
    shape_problems,
    spec_and_mesh,
    with_entries,
)
from ..paths import Path, accessor
from ..state_sharding import StateSharding
from .paths import Found, variables


def mesh_and_axes(name: str, mesh: Any, axis: Any) -> tuple[Mesh | AbstractMesh, tuple[Any, ...]]:
    """The mesh, if need be the one in context, and the axes of it that a strategy shall use.

    Raises:
      NoMeshError: there is no mesh.
      TypeError: ``mesh`` is something else.
      ValueError: the mesh has no such axis, or ``axis`` names none or one twice.
    """
    found = _compat.context_mesh() if mesh is None else mesh
    if found is None:
        raise NoMeshError(
            f"{name} has no mesh. Pass one, or call within `with jax.set_mesh(mesh):`."
        )
    if not isinstance(found, Mesh | AbstractMesh):
        raise TypeError(f"{name}: mesh is a Mesh or an AbstractMesh, not {found!r}.")
    axes = axes_of(axis)
    problems = axis_problems(PartitionSpec(*axes), found) if axes else ["it names no axis"]
    if problems:
        sizes = ", ".join(f"{own!r} ({size})" for own, size in found.shape.items())
        raise ValueError(
            f"{name}: axis={axis!r}: {'; '.join(problems)}.\nThe mesh has the axes {sizes}."
        )
    return found, axes


def shapes_of(found: Found) -> list[tuple[int, ...]]:
    """The shapes of what a Variable holds; numbers have the shape of scalars."""
    return [tuple(getattr(array, "shape", ())) for array in found.arrays]


def base_specs(
    name: str, model: Any, base: StateSharding | None, mesh: Mesh | AbstractMesh
) -> dict[Path, Any]:
    """The spec that ``base`` has for each path of a model; ``P()`` where it has none.

    Raises:
      TypeError: ``base`` is no ``StateSharding``.
      ValueError: specs do not fit the mesh or the shapes.
    """
    if base is None:
        return {found.path: PartitionSpec() for found in variables(model)}
    if not isinstance(base, StateSharding):
        raise TypeError(f"{name}: base is a StateSharding, not {base!r}.")
    specs, wrong = {}, []
    for found in variables(model):
        spec = _fitted(found, base, mesh)
        specs[found.path] = PartitionSpec() if spec is None else spec
        wrong += _misfits("model", found, spec, mesh)
    _refuse(f"{name}: specs of base do not fit:", wrong)
    return specs


def _fitted(found: Found, base: StateSharding, mesh: Mesh | AbstractMesh) -> Any:
    """The spec for a Variable, made to fit if its ``StateSharding`` says so."""
    spec = base.find(found.path, found.variable)[1]
    how = base.on_indivisible or "error"
    if how == "error" or not isinstance(spec, PartitionSpec) or axis_problems(spec, mesh):
        return spec
    for shape in shapes_of(found):
        if len(spec) <= len(shape):
            spec = fit(spec, shape, mesh.shape, how)
    return spec


def overridden(
    name: str, root: str, tree: Any, specs: dict[Path, Any], overrides: Any, mesh: Any = None
) -> dict[Path, Any]:
    """Specs by path, with those that the user's filters choose instead.

    Args:
      name: the function that was called, for messages.
      root: the argument that the tree is, for messages.
      tree: the model or optimizer.
      specs: what was chosen so far.
      overrides: a ``StateSharding`` or what makes one; None for none.
      mesh: the mesh that they have to fit, if it is known.

    Raises:
      ValueError: an override does not fit the mesh or the shape of its array.
    """
    if overrides is None:
        return specs
    rules = overrides if isinstance(overrides, StateSharding) else StateSharding(overrides)
    result, wrong, used = dict(specs), [], set()
    for found in variables(tree):
        index, spec = rules.find(found.path, found.variable)
        if index is not None:
            used.add(index)
            result[found.path] = spec
            wrong += _misfits(root, found, spec, mesh)
    _refuse(f"{name}: overrides do not fit:", wrong)
    unused = [own for index, own in enumerate(rules.names) if index not in used]
    if unused:
        message = f"{name}: these overrides match nothing that an earlier one had not taken:\n  "
        report(UnusedFilterWarning, message + "\n  ".join(unused), strict=False)
    return result


def _misfits(root: str, found: Found, sharding: Any, mesh: Any) -> list[str]:
    """What is wrong with the spec of a Variable, in one line if anything is."""
    own = spec_and_mesh(sharding, mesh)
    if own is None:
        return []
    problems = axis_problems(*own)
    shapes = shapes_of(found)
    if not problems:
        problems = [fault for shape in shapes for fault in shape_problems(*own, shape)]
    if not problems:
        return []
    where = f"{accessor(root, found.path)}, shape {', '.join(map(str, shapes))}"
    return [f"  {where}, {describe(sharding)}: {'; '.join(problems)}"]


def _refuse(message: str, lines: Sequence[str]) -> None:
    if lines:
        raise ValueError(f"{message}\n" + "\n".join(lines) + "\nCorrect these specs.")


def cut(
    spec: PartitionSpec, shape: Sequence[int], dimension: int, axes: Sequence[Any], mesh: Any
) -> PartitionSpec | None:
    """A spec that cuts one dimension more, or one dimension further.

    Args:
      spec: what is cut already.
      shape: the shape of the array.
      dimension: which dimension to cut; a negative one counts from the end.
      axes: the mesh axes that cut it together.
      mesh: the mesh.

    Returns:
      The new spec, with one entry for each dimension; None if the array has no such dimension,
      the axes do not divide it, or one of them cuts something already.
    """
    if not -len(shape) <= dimension < len(shape) or len(spec) > len(shape):
        return None
    entries = [*spec.partitions, *[None] * (len(shape) - len(spec))]
    if entries[dimension] is PartitionSpec.UNCONSTRAINED or not _used(spec).isdisjoint(axes):
        return None
    together = (*axes_of(entries[dimension]), *axes)
    if shape[dimension] % math.prod(mesh.shape[axis] for axis in together):
        return None
    entries[dimension] = together if len(together) > 1 else together[0]
    return with_entries(spec, entries)


def cut_largest(sharding: Any, found: Found, axes: Sequence[Any], mesh: Any, min_size: int) -> Any:
    """The sharding of a Variable, its largest dimension cut over axes that are not used yet.

    Dimensions that are not cut come first, of equal ones the last. Where the axes together
    divide none, as many of the first of them are taken as do.
    """
    shape = found.shape
    if not isinstance(sharding, PartitionSpec) or isinstance(found.variable, nnx.RngState):
        return sharding
    if shape is None or math.prod(shape) < min_size or len(sharding) > len(shape):
        return sharding
    is_cut = [bool(axes_of(entry)) for entry in sharding.partitions] + [False] * len(shape)
    order = sorted(range(len(shape)), key=lambda d: (is_cut[d], -shape[d], -d))
    free = [axis for axis in axes if axis not in _used(sharding)]
    for count in range(len(free), 0, -1):
        for dimension in order:
            new = cut(sharding, shape, dimension, free[:count], mesh)
            if new is not None:
                return new
    return sharding


def _used(spec: PartitionSpec) -> set[Any]:
    cutting = {axis for entry in spec.partitions for axis in axes_of(entry)}
    return cutting | spec.unreduced | spec.reduced


def like(sharding: Any, spec: PartitionSpec) -> Any:
    """A spec in the form of another: on its mesh and in its memory, if it names them."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return spec


def union(one: Mapping[Path, Any], other: Mapping[Path, Any]) -> dict[Path, Any]:
    """The specs of a model and of its optimizer in one table.

    Raises:
      ValueError: both have the same path, with different specs.
    """
    clashes = [path for path in one if path in other and one[path] != other[path]]
    if clashes:
        lines: Iterable[str] = (
            f"  {'/'.join(map(str, path))}: {describe(one[path])} and {describe(other[path])}"
            for path in clashes
        )
        raise ValueError(
            "the model and the optimizer have these paths in common, with different specs:\n"
            + "\n".join(lines)
            + "\nUse one StateSharding for the model and optimizer_sharding(...) for the other."
        )
    return {**one, **other}
