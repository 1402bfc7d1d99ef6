"""Checks specs against the mesh and the shapes of arrays, and corrects them where requested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from .. import _compat
from ..errors import CorrectedSpecWarning, message, raise_listed, warn_or_raise
from ..specs.fitting import Fit, OnIndivisible, describe, fit_sharding, spec_and_mesh
from ..specs.state_sharding import StateSharding
from .problems import several
from .resolve import NamedLocation
from .transform import Sharded, Transform


def shape_of(leaf: Any) -> tuple[int, ...] | None:
    """The shape of an array or number; None for anything else."""
    shape = getattr(leaf, "shape", None)
    if shape is not None:
        return tuple(shape)
    return () if isinstance(leaf, bool | int | float | complex) else None


def check_mesh(
    transform: Sharded,
    locations: Sequence[NamedLocation],
    objects: Sequence[Any],
    leaves: Sequence[Any],
) -> None:
    """Raises a ``ValueError`` if specs name axes that the mesh does not have, or one twice.

    The locations of the inputs, the objects and the arrays there say where a spec is used.
    """
    context, inputs = transform.context, transform.in_specs.written
    sizes: dict[Any, int] = {}
    faults: dict[Any, list[str]] = {}
    for spec in (*inputs, *transform.out_specs.written):
        pair = spec_and_mesh(spec, context)
        if pair is None:
            continue
        mesh = pair[1]
        fit = fit_sharding(spec, context, usable=transform.usable_axes, unconstrained=False)
        faults[spec] = list(map(str, fit.problems))
        is_other = mesh.abstract_mesh != getattr(context, "abstract_mesh", None)
        if is_other and not transform.passes_shardings:
            faults[spec] = [f"it is for another mesh, {mesh}; give the PartitionSpec alone"]
        sizes.update(mesh.shape if faults[spec] else {})
    faults = {spec: reasons for spec, reasons in faults.items() if reasons}
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
    lines = []
    for spec, reasons in faults.items():
        option = transform.in_name if spec in inputs else transform.out_name
        lines.append(
            f"  {describe(spec)} for {several(users[spec] or [option])}: {'; '.join(reasons)}"
        )
    sizes.update({} if context is None else context.shape)
    axes = ", ".join(f"{axis!r} ({size})" for axis, size in sizes.items())
    first = next(iter(faults.values()))[0]
    anchor = "axis-used-twice" if " is used " in first else ""
    anchor = "unknown-axis" if "has no axis" in first else anchor
    head = f"{transform.name}: these specs do not fit the mesh:"
    raise_listed(ValueError, head, lines, f"The mesh has the axes {axes}.", anchor)


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
    """Specs that fit arrays of these shapes: the final ones, corrected where requested.

    ``on_indivisible`` has options, by slot, with priority over that of the transform; ``before``
    the previous shapes of outputs that are updates.
    """
    result = list(specs)
    if not isinstance(transform, Sharded):
        return result
    arrays = "results" if outputs else "arrays"
    fits: dict[Any, Fit] = {}
    misfits: list[tuple[Fit, str]] = []
    corrected: list[str] = []
    for slot, (spec, shape) in enumerate(zip(specs, shapes, strict=True)):
        if spec is None or shape is None:
            continue
        action = on_indivisible.get(slot, transform.on_indivisible)
        key = (spec, tuple(shape), action)
        fit = fits.get(key)
        if fit is None:
            fit = fits[key] = fit_sharding(spec, transform.context, shape, on_indivisible=action)
        if not (fit.problems or fit.corrections):
            continue
        is_too_long = any(misfit.kind == "rank" for misfit in fit.problems)
        if outputs and not transform.divides_outputs and not is_too_long:
            continue
        line = fit.line(names[slot], before.get(slot) if before else None)
        if fit.problems:
            misfits.append((fit, line))
        else:
            result[slot] = fit.sharding
            corrected.append(line)
    indivisible = [fit.is_indivisible for fit, _ in misfits]
    raise_listed(
        _compat.IndivisibleError if all(indivisible) and transform.passes_shardings else ValueError,
        f"{transform.name}: the specs of these {arrays} do not fit their shapes:",
        [line for _, line in misfits],
        "Change the shape (pad it) or the spec; or let the spec be corrected: "
        "on_indivisible='replicate' or 'drop'."
        if any(indivisible)
        else "Give each a spec with at most one entry for each dimension.",
        anchor="not-divisible" if all(indivisible) else "spec-too-long",
    )
    if corrected:
        head = f"{transform.name}: the specs of these {arrays} do not fit their shapes"
        anchor = "when-a-spec-does-not-divide-a-shape"
        text = message(f"{head} and were corrected:", corrected)
        warn_or_raise(CorrectedSpecWarning, text, strict=transform.strict, anchor=anchor)
    return result
