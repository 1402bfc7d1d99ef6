"""The arguments that strategies share, checked: mesh and axis, base, overrides."""

from __future__ import annotations

from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ..core.resharding import given_mesh
from ..errors import NoMeshError, UnusedFilterWarning, message, raise_listed, report
from ..specs.fitting import axes_of, fit_sharding
from ..specs.paths import Path, accessor
from ..specs.state_sharding import StateSharding
from .variables import variables


def mesh_and_axes(name: str, mesh: Any, axis: Any) -> tuple[Mesh | AbstractMesh, tuple[Any, ...]]:
    """The mesh, or the one in context, and those of its axes that a strategy uses, checked."""
    mesh = given_mesh(name, mesh)
    if mesh is None:
        remedy = "Pass one, or call within `with jax.set_mesh(mesh):`."
        raise NoMeshError(f"{name} has no mesh. {remedy}")
    axes = axes_of(axis)
    reasons = fit_sharding(PartitionSpec(*axes), mesh).reasons if axes else "it names no axis"
    if reasons:
        sizes = ", ".join(f"{name!r} ({size})" for name, size in mesh.shape.items())
        raise ValueError(f"{name}: axis={axis!r}: {reasons}\nThe mesh has the axes {sizes}.")
    return mesh, axes


def base_specs(
    name: str, model: Any, base: StateSharding | None, mesh: Mesh | AbstractMesh
) -> dict[Path, Any]:
    """The sharding that ``base`` has for each path of a model; ``P()`` where it has none."""
    specs = {each.path: PartitionSpec() for each in variables(model)}
    if base is None:
        return specs
    if not isinstance(base, StateSharding):
        raise TypeError(f"{name}: base must be a StateSharding, got {base!r}.")
    chosen, _ = _chosen(f"{name}: specs of base do not fit:", "model", model, base, mesh)
    return specs | {path: spec for path, spec in chosen.items() if spec is not None}


def override_specs(
    name: str, root: str, tree: Any, specs: dict[Path, Any], overrides: Any, mesh: Any = None
) -> dict[Path, Any]:
    """Shardings by path, with those that the user's filters choose instead."""
    if overrides is None:
        return specs
    rules = overrides if isinstance(overrides, StateSharding) else StateSharding(overrides)
    chosen, unused = _chosen(f"{name}: overrides do not fit:", root, tree, rules, mesh)
    if unused:
        head = f"{name}: these overrides match nothing, or only what earlier ones match:"
        text = message(head, [f"  {filter_}" for filter_ in unused])
        report(UnusedFilterWarning, text, strict=False)
    return specs | chosen


def _chosen(
    head: str, root: str, tree: Any, rules: StateSharding, mesh: Any
) -> tuple[dict[Path, Any], list[str]]:
    """The sharding of each path that a filter matches, and the filters that are never used."""
    specs: dict[Path, Any] = {}
    lines, used = [], set()
    for each in variables(tree):
        index, spec = rules.find(each.path, each.variable)
        if index is None:
            continue
        used.add(index)
        for shape in each.shapes:
            fit = fit_sharding(spec, mesh, shape, on_indivisible=rules.on_indivisible or "error")
            if fit.problems:
                lines.append(fit.line(accessor(root, each.path)))
                break
            spec = fit.sharding
        specs[each.path] = spec
    raise_listed(ValueError, head, lines, "Correct these specs.")
    return specs, [name for index, name in enumerate(rules.names) if index not in used]
