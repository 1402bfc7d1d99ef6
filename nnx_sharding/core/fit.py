"""Whether specs fit the mesh and the shapes of arrays, and the corrected specs where they do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..fitting import OnIndivisible, axis_problems, fit, shape_problems, spec_and_mesh
from ..state_sharding import StateSharding
from .problems import Problem, refuse, warn
from .resolve import NamedLocation
from .transform import Transform


def shape_of(leaf: Any) -> tuple[int, ...] | None:
    """The shape of an array or number; None for what has none."""
    shape = getattr(leaf, "shape", None)
    if shape is not None:
        return tuple(shape)
    return () if isinstance(leaf, bool | int | float | complex) else None


def check_mesh(
    transform: Transform,
    locations: Sequence[NamedLocation],
    objects: Sequence[Any],
    leaves: Sequence[Any],
) -> None:
    """Checks that the specs of a transform name axes of its mesh, each once.

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
        partition, mesh = pair
        problems = axis_problems(partition, mesh, transform.usable_axes)
        if PartitionSpec.UNCONSTRAINED in partition.partitions:
            options = f"{transform.in_name} and {transform.out_name}"
            problems.append(f"{options} do not support UNCONSTRAINED; use None or an axis")
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
            path = found.location.path or found.part.below
            spec = spec.find(path, found.subject(objects, leaves))[1]
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


class _Fit(NamedTuple):
    """The spec for one shape, and what is wrong with the declared one."""

    spec: Any
    faults: Sequence[str] = ()
    corrected: bool = False


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
    """Specs that fit arrays of these shapes: the declared ones, corrected where that is asked for.

    Args:
      transform: the transform.
      names: the expression for each array.
      shapes: their shapes; None for what has none.
      specs: their specs, in final form.
      on_indivisible: by slot, what to do instead of what the transform does.
      outputs: whether these are outputs.
      before: for outputs that are updates, the shapes before.

    Raises:
      ValueError: a spec does not fit, and is not to be corrected.
      StrictError: one was corrected, and the transform is strict.
    """
    checked: dict[Any, _Fit] = {}
    result, misfits, corrections = list(specs), [], []
    for slot, (spec, shape) in enumerate(zip(specs, shapes, strict=True)):
        if spec is None or shape is None:
            continue
        action = on_indivisible.get(slot, transform.on_indivisible)
        key = (spec, tuple(shape), action)
        found = checked.get(key)
        if found is None:
            found = checked[key] = _fit(transform, spec, shape, action, outputs)
        if not found.faults:
            continue
        earlier = before.get(slot) if before else None
        offender = (names[slot], tuple(shape), earlier, spec, found.faults)
        if found.corrected:
            result[slot] = found.spec
            corrections.append((*offender, found.spec))
        else:
            misfits.append(offender)
    details = {"name": transform.name, "outputs": outputs}
    if misfits:
        as_jax = transform.passes_shardings
        refuse(Problem.SPEC_DOES_NOT_FIT_SHAPE, misfits, as_jax=as_jax, **details)
    if corrections:
        warn(Problem.SPEC_CORRECTED, corrections, strict=transform.strict, **details)
    return result


def _fit(
    transform: Transform, spec: Any, shape: Sequence[int], action: OnIndivisible, outputs: bool
) -> _Fit:
    pair = spec_and_mesh(spec, transform.context)
    if pair is None:
        return _Fit(spec, _sharding_faults(spec, shape))
    partition, mesh = pair
    is_too_long = len(partition) > len(shape)
    faults = shape_problems(partition, mesh, shape)
    if not faults or (outputs and not transform.divides_outputs and not is_too_long):
        return _Fit(spec)
    if action == "error" or is_too_long:
        return _Fit(spec, faults)
    new: Any = fit(partition, shape, mesh.shape, action)
    if isinstance(spec, NamedSharding):
        new = NamedSharding(mesh, new, memory_kind=spec.memory_kind)
    return _Fit(new, faults, corrected=True)


def _sharding_faults(spec: Any, shape: Sequence[int]) -> list[str]:
    """What JAX says about a sharding that is not made of a spec and a mesh."""
    if isinstance(spec, jax.sharding.Sharding):
        try:
            spec.shard_shape(tuple(shape))
        except ValueError as error:
            return [str(error)]
    return []
