"""The arguments that strategies share, checked: mesh and axis, base, overrides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .. import _compat
from ..errors import NoMeshError, UnusedFilterWarning, report
from ..fitting import OnIndivisible, axes_of, describe, fit_sharding
from ..paths import Path, accessor, path_string
from ..state_sharding import StateSharding
from .variables import NamedVariable, variables


def mesh_and_axes(name: str, mesh: Any, axis: Any) -> tuple[Mesh | AbstractMesh, tuple[Any, ...]]:
    """The mesh, or the one in context, and the axes of it that a strategy uses, checked."""
    mesh = _compat.context_mesh() if mesh is None else mesh
    if mesh is None:
        raise NoMeshError(
            f"{name} has no mesh. Pass one, or call within `with jax.set_mesh(mesh):`."
        )
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"{name}: mesh is a Mesh or an AbstractMesh, not {mesh!r}.")
    axes = axes_of(axis)
    reasons = fit_sharding(PartitionSpec(*axes), mesh).reasons if axes else "it names no axis"
    if reasons:
        sizes = ", ".join(f"{name!r} ({size})" for name, size in mesh.shape.items())
        raise ValueError(f"{name}: axis={axis!r}: {reasons}.\nThe mesh has the axes {sizes}.")
    return mesh, axes


def base_specs(
    name: str, model: Any, base: StateSharding | None, mesh: Mesh | AbstractMesh
) -> dict[Path, Any]:
    """The sharding that ``base`` has for each path of a model; ``P()`` where it has none."""
    if base is None:
        return {each.path: PartitionSpec() for each in variables(model)}
    if not isinstance(base, StateSharding):
        raise TypeError(f"{name}: base is a StateSharding, not {base!r}.")
    specs, lines = {}, []
    for each in variables(model):
        spec = base.find(each.path, each.variable)[1]
        spec, problems = _fitted("model", each, spec, mesh, base.on_indivisible or "error")
        specs[each.path] = PartitionSpec() if spec is None else spec
        lines += problems
    _refuse(f"{name}: specs of base do not fit:", lines)
    return specs


def override_specs(
    name: str, root: str, tree: Any, specs: dict[Path, Any], overrides: Any, mesh: Any = None
) -> dict[Path, Any]:
    """Shardings by path, with those that the filters of the user choose instead."""
    if overrides is None:
        return specs
    rules = overrides if isinstance(overrides, StateSharding) else StateSharding(overrides)
    result, lines, used = dict(specs), [], set()
    for each in variables(tree):
        index, spec = rules.find(each.path, each.variable)
        if index is not None:
            used.add(index)
            result[each.path] = spec
            lines += _fitted(root, each, spec, mesh)[1]
    _refuse(f"{name}: overrides do not fit:", lines)
    unused = [filter_ for index, filter_ in enumerate(rules.names) if index not in used]
    if unused:
        message = f"{name}: these overrides match nothing that an earlier one does not match:\n  "
        report(UnusedFilterWarning, message + "\n  ".join(unused), strict=False)
    return result


def _fitted(
    root: str, each: NamedVariable, spec: Any, mesh: Any, action: OnIndivisible = "error"
) -> tuple[Any, list[str]]:
    """The part of a sharding that fits all arrays of a Variable, and a line for a problem."""
    for shape in each.shapes:
        fit = fit_sharding(spec, mesh, shape, on_indivisible=action)
        if fit.problems:
            return spec, [fit.line(accessor(root, each.path))]
        spec = fit.sharding
    return spec, []


def _refuse(message: str, lines: Sequence[str]) -> None:
    if lines:
        raise ValueError("\n".join([message, *lines, "Correct these specs."]))


def union(model: Mapping[Path, Any], optimizer: Mapping[Path, Any]) -> dict[Path, Any]:
    """The shardings of a model and of its optimizer in one table."""
    common = [path for path in model if path in optimizer and model[path] != optimizer[path]]
    if common:
        lines: Iterable[str] = (
            f"  {path_string(path)}: {describe(model[path])} and {describe(optimizer[path])}"
            for path in common
        )
        raise ValueError(
            "the model and the optimizer have these paths in common, with different specs:\n"
            + "\n".join(lines)
            + "\nUse one StateSharding for the model and optimizer_sharding(...) for the other."
        )
    return {**model, **optimizer}
