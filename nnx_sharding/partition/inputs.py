"""The arguments that strategies share, checked: mesh and axis, base, overrides."""

from __future__ import annotations

from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ..errors import NoMeshError, UnusedFilterWarning, raise_listed, report
from ..fitting import OnIndivisible, axes_of, fit_sharding
from ..paths import Path, accessor
from ..state_sharding import StateSharding
from .apply import given_mesh
from .variables import NamedVariable, variables


def mesh_and_axes(name: str, mesh: Any, axis: Any) -> tuple[Mesh | AbstractMesh, tuple[Any, ...]]:
    """The mesh, or the one in context, and the axes of it that a strategy uses, checked."""
    mesh = given_mesh(name, mesh)
    if mesh is None:
        remedy = "Pass one, or call within `with jax.set_mesh(mesh):`."
        raise NoMeshError(f"{name} has no mesh. {remedy}")
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
        base = StateSharding({...: PartitionSpec()})
    if not isinstance(base, StateSharding):
        raise TypeError(f"{name}: base is a StateSharding, not {base!r}.")
    specs, lines = {}, []
    for each in variables(model):
        spec = base.find(each.path, each.variable)[1]
        spec, problems = _fitted("model", each, spec, mesh, base.on_indivisible or "error")
        specs[each.path] = PartitionSpec() if spec is None else spec
        lines += problems
    raise_listed(ValueError, f"{name}: specs of base do not fit:", lines, "Correct these specs.")
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
    raise_listed(ValueError, f"{name}: overrides do not fit:", lines, "Correct these specs.")
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
