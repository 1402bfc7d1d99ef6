"""Checks specs against meshes and shapes: one error lists all misfits, one warning all corrections.

``specs/fitting.py`` decides for one array. Here are the loops over many: over the arrays of a call
(:func:`fit_specs`), whose specs belong to a transform, and over those of any tree that gets
shardings outside of a plan (:func:`assign_shardings`), as in ``place`` or ``reshard``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..errors import CorrectedSpecWarning, message, raise_listed, warn_or_raise
from ..specs.fitting import (
    Fit,
    OnIndivisible,
    describe,
    fit_sharding,
    spec_and_mesh,
    spec_axes,
)
from ..specs.state_sharding import StateSharding
from ..specs.types import AnyArray, Arrays, Objects, Spec
from .arguments import Specs, check_specs, split_argument
from .constrain import given_mesh, mesh_here, other_memory, without_unconstrained
from .flatten import Flat
from .place import obstacle
from .problems import no_mesh, several
from .resolve import NamedLocation, Resolved, check_filters, locate, resolve, slot_names
from .transform import Sharded, Transform


def shape_of(leaf: AnyArray) -> tuple[int, ...] | None:
    """Returns the shape of an array or number; None for anything else."""
    shape = getattr(leaf, "shape", None)
    if shape is not None:
        return tuple(shape)
    return () if isinstance(leaf, bool | int | float | complex) else None


def is_shardable(x: object) -> bool:
    """Whether ``x`` can be sharded: not a number, a reference or an array of strings."""
    if _compat.is_ref(x) or _compat.is_hijax_variable(x):
        return False
    if isinstance(x, np.ndarray | np.generic):
        return x.dtype.kind not in "OSUMm"
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def check_mesh(
    transform: Sharded,
    locations: Sequence[NamedLocation],
    objects: Objects,
    leaves: Arrays,
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
    # Only now, for the message: asking all filters again takes long.
    users: dict[Any, list[str]] = {spec: [] for spec in faults}
    for place in locations:
        spec = place.part.spec
        if isinstance(spec, StateSharding):
            subject = place.subject(objects, leaves)
            spec = spec.find_below(place.part.below, place.location.path, subject)[-1]
        if isinstance(spec, PartitionSpec | NamedSharding) and spec in users:
            users[spec].append(place.name)
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
    specs: Sequence[Spec],
    on_indivisible: Mapping[int, OnIndivisible],
    *,
    outputs: bool = False,
    before: Mapping[int, Sequence[int] | None] | None = None,
) -> list[Any]:
    """Returns specs that fit arrays of these shapes: the given ones, corrected where requested.

    ``on_indivisible`` has options, by slot, with priority over that of the transform; ``before``
    the previous shapes of outputs that are updates.
    """
    result = list(specs)
    if not isinstance(transform, Sharded):
        return result
    arrays = "results" if outputs else "arrays"
    fit_once = functools.cache(fit_sharding)  # a model has many arrays of one shape and spec
    misfits: list[tuple[Fit, str]] = []
    corrected: list[str] = []
    for slot, (spec, shape) in enumerate(zip(specs, shapes, strict=True)):
        if spec is None or shape is None:
            continue
        action = on_indivisible.get(slot, transform.on_indivisible)
        fit = fit_once(spec, transform.context, tuple(shape), on_indivisible=action)
        if not (fit.problems or fit.corrections):
            continue
        is_too_long = any(misfit.kind == "rank" for misfit in fit.problems)
        if outputs and not transform.divides_outputs and not is_too_long:
            continue  # in `shard_map` these are shapes of parts, which need not be divided
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


def assign_shardings(
    tree: Any,
    flat: Flat,
    sharding: Any,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    caller: str = "with_sharding_constraint",
    name: str = "tree",
    **options: Any,
) -> tuple[list[str], list[Any]]:
    """Returns the name and the sharding of each array of a tree, None to change nothing.

    Args:
      tree: any pytree.
      flat: the same, flattened.
      sharding: a prefix of it, as the user wrote it.
      mesh: the mesh of a ``PartitionSpec``; None for the one in context.
      caller: the function that the user called, in messages.
      name: the name of its argument, in messages.
      **options: those of :func:`fit_shardings`.
    """
    mesh = given_mesh(caller, mesh)
    specs = sharding if isinstance(sharding, Specs) else Specs(sharding)
    check_specs(caller, sharding=specs)
    argument = split_argument(name, specs.tree, tree, flat.structure.root, caller)
    locations = locate(flat.structure, [argument])
    resolved = resolve(locations, flat.objects, flat.leaves, lambda spec: spec)
    names = slot_names(len(flat.leaves), locations)
    return names, fit_shardings(caller, names, flat.leaves, resolved, mesh, places=True, **options)


def fit_shardings(
    caller: str,
    names: Sequence[str],
    leaves: Arrays,
    resolved: Resolved,
    mesh: Mesh | AbstractMesh | None,
    *,
    strict: bool = False,
    **options: Any,
) -> list[Any]:
    """Returns the sharding of each array, from its resolved spec; None to change nothing.

    Raises:
      ValueError, TypeError, NoMeshError: for all that does not fit; with ``strict``, also for
        corrections and filters without effect, which otherwise are warnings.
    """
    fitter = _Fitter(caller, resolved, mesh, **options)
    triples = zip(names, leaves, resolved.slots, strict=True)
    shardings = [fitter.fit(slot, *triple) for slot, triple in enumerate(triples)]
    fitter.raise_for_misfits()
    check_filters(resolved.uses, name=caller, strict=strict)
    warn_of_corrections(caller, fitter.corrected, strict=strict)
    return shardings


class _Fitter:
    """Fits specs to the arrays of a tree, and collects what is wrong, for one error of all.

    Args:
      on_indivisible: what to do where a spec does not divide a shape, unless a ``StateSharding``
        says.
      explicit: whether specs may name Explicit axes only.
      places: whether the arrays get the shardings now; outside of a trace, by moving them.
      whole: whether specs decide on all dimensions, on arrays and numbers only.
      lenient: whether specs are corrected instead of refused, and ignored without a mesh.
      adapt: changes a spec for its array first.
    """

    def __init__(
        self,
        caller: str,
        resolved: Resolved,
        mesh: Mesh | AbstractMesh | None,
        *,
        on_indivisible: OnIndivisible = "error",
        explicit: bool = False,
        places: bool = False,
        whole: bool = False,
        lenient: bool = False,
        adapt: Callable[[Any, Any], Any] = lambda spec, leaf: spec,
    ):
        self._caller, self._mesh, self._adapt = caller, mesh, adapt
        self._explicit, self._places = explicit, places
        self._whole, self._lenient = whole, lenient
        self._default_action: OnIndivisible = "drop" if lenient else on_indivisible
        self._actions = resolved.on_indivisible
        self._moves = places and _compat.trace_is_clean()
        options: Any = {"unconstrained": not (explicit or whole), "lenient": lenient}
        self._fit_once = functools.cache(functools.partial(fit_sharding, **options))
        # Lines of messages.
        self.corrected: list[str] = []
        self._refused: list[str] = []
        self._not_arrays: list[str] = []
        self._without_mesh: list[str] = []
        self._remedy = ""

    def fit(self, slot: int, name: str, leaf: AnyArray, spec: Spec) -> Any:
        """Returns the sharding of one array; None to change nothing, also if something is wrong."""
        spec = self._adapt(spec, leaf)
        is_number = isinstance(leaf, bool | int | float | complex)
        if not is_shardable(leaf) and not (self._whole and is_number):
            if self._whole and spec is not None:
                self._not_arrays.append(f"  {name}: a {type(leaf).__name__}")
            return None
        sharding = spec.sharding if isinstance(spec, Format) else spec
        pair = spec_and_mesh(sharding, self._mesh)
        if pair is None and isinstance(spec, PartitionSpec):
            self._without_mesh.append(f"  {name}: {spec}")
            return None
        fit, mesh = self._fit_array(slot, leaf, sharding, pair)
        if fit.problems:
            self._refused.append(fit.line(name))
            if pair is not None and any(misfit.kind == "axis" for misfit in fit.problems):
                sizes = ", ".join(f"{axis!r} ({size})" for axis, size in mesh.shape.items())
                self._remedy = f"The mesh has the axes {sizes}."
            return None
        if fit.corrections:
            self.corrected.append(fit.line(name))
        if pair is None or sharding is not spec:
            return spec
        # JAX supports UNCONSTRAINED only in traces, and only on meshes with Auto axes.
        is_supported = isinstance(leaf, jax.core.Tracer) and AxisType.Auto in mesh.axis_types
        final = fit.sharding
        if not is_supported:
            final = without_unconstrained(final, leaf, mesh)
        return NamedSharding(mesh, final, memory_kind=other_memory(spec))

    def _fit_array(
        self, slot: int, leaf: AnyArray, sharding: Spec, pair: tuple[PartitionSpec, Any] | None
    ) -> tuple[Fit, Any]:
        """Returns how a sharding, with its spec and mesh if it has them, fits, and the mesh."""
        mesh: Any = self._mesh if pair is None else pair[1]
        if pair is not None and self._places:
            mesh = mesh_here(mesh)
        action = self._actions.get(slot, self._default_action)
        declared = sharding if pair is None else pair[0]
        fit = self._fit_once(declared, mesh, np.shape(leaf), on_indivisible=action)
        if self._explicit and pair is not None and not fit.problems:
            fit = fit.refuse(_not_explicit(pair[0], mesh))
        goal = sharding if pair is None else NamedSharding(mesh, PartitionSpec())
        is_concrete = not isinstance(leaf, jax.ShapeDtypeStruct)
        if self._moves and isinstance(goal, Sharding) and is_concrete:
            fit = fit.refuse(obstacle(leaf, goal))
        return fit, mesh

    def raise_for_misfits(self) -> None:
        """Raises the errors for what was wrong, if anything."""
        if self._without_mesh and not self._lenient:
            raise no_mesh(self._caller, self._without_mesh)
        raise_listed(
            TypeError,
            f"{self._caller}: these leaves have a sharding, but are not arrays:",
            self._not_arrays,
            "Give them the sharding None, or keep them out of the tree.",
        )
        head = f"{self._caller}: these specs cannot be used:"
        raise_listed(ValueError, head, self._refused, self._remedy)


def _not_explicit(spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> str | None:
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    others = [axis for axis in spec_axes(spec) if kinds[axis] != AxisType.Explicit]
    if not others:
        return None
    listed = ", ".join(f"{axis!r} is of type {kinds[axis].name}" for axis in others)
    return f"{listed}; only Explicit axes are part of a type"


def warn_of_corrections(name: str, lines: Sequence[str], *, strict: bool) -> None:
    """Warns of specs that were corrected, if there are any."""
    if lines:
        text = message(f"{name}: these specs do not fit, and were corrected:", lines)
        warn_or_raise(CorrectedSpecWarning, text, strict=strict)
