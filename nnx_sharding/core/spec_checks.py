"""Checks specs against the mesh and the shapes of arrays, and corrects them where requested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from .. import _compat
from ..specs.fitting import Fit, OnIndivisible, fit_sharding, spec_and_mesh
from ..specs.state_sharding import StateSharding
from .problems import Problem, refuse, warn
from .resolve import NamedLocation
from .transform import Transform


def shape_of(leaf: Any) -> tuple[int, ...] | None:
    """The shape of an array or number; None for anything else."""
    shape = getattr(leaf, "shape", None)
    if shape is not None:
        return tuple(shape)
    return () if isinstance(leaf, bool | int | float | complex) else None


def check_arrays(
    problem: Problem, names: Sequence[str], leaves: Sequence[Any], **details: Any
) -> None:
    """Raises an error if leaves are not arrays."""
    pairs = zip(names, leaves, strict=True)
    offenders = [(name, leaf) for name, leaf in pairs if not _compat.is_array_like(leaf)]
    if offenders:
        refuse(problem, offenders, **details)


def check_mesh(
    transform: Transform,
    locations: Sequence[NamedLocation],
    objects: Sequence[Any],
    leaves: Sequence[Any],
) -> None:
    """Checks that the specs of a transform only name axes of its mesh, each once.

    Args:
      transform: the transform, with its mesh.
      locations: the locations of all inputs, which say where a spec is used.
      objects: the object of each entry.
      leaves: the arrays, by slot.

    Raises:
      ValueError: a spec does not fit.
    """
    faults: dict[Any, list[str]] = {}
    sizes: dict[Any, int] = {}
    for spec in (*transform.in_specs.written, *transform.out_specs.written):
        pair = spec_and_mesh(spec, transform.context)
        if pair is None:
            continue
        mesh = pair[1]
        fit = fit_sharding(
            spec, transform.context, usable=transform.usable_axes, unconstrained=False
        )
        problems = list(map(str, fit.problems))
        if not transform.passes_shardings and mesh.abstract_mesh != _abstract(transform.context):
            problems = [f"it is for another mesh, {mesh}; give the PartitionSpec alone"]
        if problems:
            faults[spec] = problems
            sizes.update(mesh.shape)
    if not faults:
        return
    users: dict[Any, list[str]] = {spec: [] for spec in faults}
    for found in locations:
        spec = found.part.spec
        if isinstance(spec, StateSharding):
            subject = found.subject(objects, leaves)
            spec = spec.find_below(found.part.below, found.location.path, subject)[-1]
        if isinstance(spec, PartitionSpec | NamedSharding) and spec in users:
            users[spec].append(found.name)
    inputs = transform.in_specs.written
    offenders = [
        (spec, users[spec] or [transform.in_name if spec in inputs else transform.out_name], why)
        for spec, why in faults.items()
    ]
    sizes.update({} if transform.context is None else transform.context.shape)
    refuse(Problem.SPEC_DOES_NOT_FIT_MESH, offenders, name=transform.name, sizes=sizes)


def _abstract(mesh: Any) -> Any:
    return getattr(mesh, "abstract_mesh", None)


def fit_specs(
    transform: Transform,
    names: Sequence[str],
    shapes: Sequence[Sequence[int] | None],
    specs: Sequence[Any],
    on_indivisible: Mapping[int, OnIndivisible],
    *,
    outputs: bool = False,
    before: Mapping[int, Sequence[int] | None] | None = None,
) -> list[Any]:
    """Specs that fit arrays of these shapes: the declared ones, corrected where requested.

    Args:
      transform: the transform.
      names: the expression for each array.
      shapes: their shapes; None if they have none.
      specs: their specs, in final form.
      on_indivisible: by slot, the option that has priority over that of the transform.
      outputs: whether these are outputs.
      before: for outputs that are updates, the previous shapes.

    Raises:
      ValueError: a spec does not fit, and no correction was requested.
      StrictError: one was corrected, and the transform is strict.
    """
    if not transform.shards:
        return list(specs)
    fits: dict[Any, Fit] = {}
    result, misfits, corrections = list(specs), [], []
    for slot, (spec, shape) in enumerate(zip(specs, shapes, strict=True)):
        if spec is None or shape is None:
            continue
        action = on_indivisible.get(slot, transform.on_indivisible)
        key = (spec, tuple(shape), action)
        fit = fits.get(key)
        if fit is None:
            fit = fits[key] = fit_sharding(spec, transform.context, shape, on_indivisible=action)
        if outputs and not transform.divides_outputs and not _is_too_long(fit):
            continue
        earlier = before.get(slot) if before else None
        if fit.problems:
            misfits.append((names[slot], fit, earlier))
        elif fit.corrections:
            result[slot] = fit.sharding
            corrections.append((names[slot], fit, earlier))
    details = {"name": transform.name, "outputs": outputs}
    if misfits:
        as_jax = transform.passes_shardings
        refuse(Problem.SPEC_DOES_NOT_FIT_SHAPE, misfits, as_jax=as_jax, **details)
    if corrections:
        warn(Problem.SPEC_CORRECTED, corrections, strict=transform.strict, **details)
    return result


def _is_too_long(fit: Fit) -> bool:
    return any(misfit.kind == "rank" for misfit in fit.problems)
