"""Checks specs against meshes and shapes: one error lists all misfits, one warning all corrections.

``specs/fitting.py`` decides for one array. Here are the loops over many: over the arrays of a call
(:func:`fit_specs`), whose specs belong to a transform, and over those of any tree that gets
shardings outside of a plan (:func:`assign_shardings`), as in ``place`` or ``reshard``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from ..specs.types import AnyArray, AnyMesh, Arrays, AxisName, Objects, Spec
from .arguments import Specs, check_specs, split_argument
from .constrain import given_mesh, is_shardable, mesh_in_trace, without_unconstrained
from .flatten import Flat
from .memory import other_memory
from .place import obstacle
from .problems import join_paths, no_mesh
from .resolve import NamedLocation, Resolved, check_filters, locate, resolve, slot_names
from .transform import Sharded, Transform


def check_mesh(
    transform: Sharded, locations: Sequence[NamedLocation], objects: Objects, leaves: Arrays
) -> None:
    """Raises a ``ValueError`` if specs name axes that the mesh does not have, or one twice.

    The locations of the inputs, the objects and the arrays there say where a spec is used.
    """
    faults: dict[Any, list[str]] = {}  # the reasons why each spec does not fit
    sizes: dict[AxisName, int] = {}  # of the axes of meshes, for the message
    for spec in (*transform.in_specs.written, *transform.out_specs.written):
        pair = spec_and_mesh(spec, transform.context)
        if pair is not None and (reasons := _mesh_faults(transform, spec, pair[1])):
            faults[spec] = reasons
            sizes.update(pair[1].shape)
    if not faults:
        return
    users = _users_of(faults, locations, objects, leaves)
    lines = []
    for spec, reasons in faults.items():
        is_input = spec in transform.in_specs.written
        option = transform.in_name if is_input else transform.out_name
        lines.append(
            f"  {describe(spec)} for {join_paths(users[spec] or [option])}: {'; '.join(reasons)}"
        )
    sizes.update({} if transform.context is None else transform.context.shape)
    axes = ", ".join(f"{axis!r} ({size})" for axis, size in sizes.items())
    first_reason = next(iter(faults.values()))[0]
    anchor = "axis-used-twice" if " is used " in first_reason else ""
    anchor = "unknown-axis" if "has no axis" in first_reason else anchor
    head = f"{transform.name}: these specs do not fit the mesh:"
    raise_listed(ValueError, head, lines, f"The mesh has the axes {axes}.", anchor)


def _mesh_faults(transform: Sharded, spec: Spec, mesh: AnyMesh) -> list[str]:
    """Returns what is wrong with a spec on its mesh."""
    context = transform.context
    is_other = mesh.abstract_mesh != getattr(context, "abstract_mesh", None)
    # A transform that passes no shardings to JAX runs on one mesh, by the types of arrays.
    if is_other and not transform.passes_shardings:
        return [f"it is for another mesh, {mesh}; give the PartitionSpec alone"]
    fit = fit_sharding(spec, context, usable=transform.usable_axes, unconstrained=False)
    return list(map(str, fit.problems))


def _users_of(
    specs: Iterable[Any], locations: Sequence[NamedLocation], objects: Objects, leaves: Arrays
) -> dict[Any, list[str]]:
    """Finds which arrays have some specs; only for a message, as it asks all filters again."""
    users: dict[Any, list[str]] = {spec: [] for spec in specs}
    for place in locations:
        spec = place.part.spec
        if isinstance(spec, StateSharding):
            subject = place.subject(objects, leaves)
            spec = spec.find_below(place.part.below, place.location.path, subject)[-1]
        if isinstance(spec, PartitionSpec | NamedSharding) and spec in users:
            users[spec].append(place.name)
    return users


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

    Names, shapes (None for what is no array) and specs are by slot. ``on_indivisible`` has options
    with priority over that of the transform; ``before`` the old shapes of outputs that are updates.
    """
    result = list(specs)
    if not isinstance(transform, Sharded):
        return result
    arrays = "results" if outputs else "arrays"
    fit_once = functools.cache(fit_sharding)  # a model has many arrays of one shape and spec
    mismatches: list[tuple[Fit, str]] = []
    corrected: list[str] = []
    for slot, (spec, shape) in enumerate(zip(specs, shapes, strict=True)):
        if spec is None or shape is None:
            continue
        action = on_indivisible.get(slot, transform.on_indivisible)
        fit = fit_once(spec, transform.context, tuple(shape), on_indivisible=action)
        if not (fit.problems or fit.corrections):
            continue
        is_too_long = any(mismatch.kind == "rank" for mismatch in fit.problems)
        if outputs and not transform.divides_outputs and not is_too_long:
            continue  # in `shard_map` these are shapes of parts, which need not be divided
        line = fit.line(names[slot], before.get(slot) if before else None)
        if fit.problems:
            mismatches.append((fit, line))
        else:
            result[slot] = fit.sharding
            corrected.append(line)
    _raise_for_mismatches(transform, arrays, mismatches)
    if corrected:
        head = f"{transform.name}: the specs of these {arrays} do not fit their shapes"
        anchor = "when-a-spec-does-not-divide-a-shape"
        text = message(f"{head} and were corrected:", corrected)
        warn_or_raise(CorrectedSpecWarning, text, strict=transform.strict, anchor=anchor)
    return result


def _raise_for_mismatches(
    transform: Sharded, arrays: str, mismatches: Sequence[tuple[Fit, str]]
) -> None:
    """Raises the error for specs that do not fit, each with its line, if there are any."""
    indivisible = [fit.is_indivisible for fit, _ in mismatches]
    # `jax.jit` raises its own type of error for these, and `jax.shard_map` a plain ValueError.
    is_like_jit = all(indivisible) and transform.passes_shardings
    if any(indivisible):
        remedy = (
            "Change the shape (pad it) or the spec; or let the spec be corrected: "
            "on_indivisible='replicate' or 'drop'."
        )
    else:
        remedy = "Give each a spec with at most one entry for each dimension."
    raise_listed(
        _compat.IndivisibleError if is_like_jit else ValueError,
        f"{transform.name}: the specs of these {arrays} do not fit their shapes:",
        [line for _, line in mismatches],
        remedy,
        anchor="not-divisible" if all(indivisible) else "spec-too-long",
    )


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
    fitter.raise_for_mismatches()
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
        self._actions = resolved.on_indivisible  # by slot
        self._moves = places and _compat.trace_is_clean()  # inside a trace, nothing is moved
        # Cached, since the many arrays of a model have few different shapes and specs.
        options: Any = {"unconstrained": not (explicit or whole), "lenient": lenient}
        self._fit_once = functools.cache(functools.partial(fit_sharding, **options))
        # The lines of messages.
        self.corrected: list[str] = []
        self._refused: list[str] = []
        self._not_arrays: list[str] = []
        self._without_mesh: list[str] = []
        self._remedy = ""

    def fit(self, slot: int, name: str, leaf: AnyArray, spec: Spec) -> Any:
        """Returns the sharding of one array; None to change nothing, also if something is wrong."""
        spec = self._adapt(spec, leaf)
        # `place` (`whole`) makes arrays of numbers; for others they stay as they are.
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
            if pair is not None and any(mismatch.kind == "axis" for mismatch in fit.problems):
                sizes = ", ".join(f"{axis!r} ({size})" for axis, size in mesh.shape.items())
                self._remedy = f"The mesh has the axes {sizes}."
            return None
        if fit.corrections:
            self.corrected.append(fit.line(name))
        if pair is None or sharding is not spec:  # not a spec, or a Format, which has a layout
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
        """Returns how an array's sharding fits, and its mesh; ``pair`` is its spec and mesh."""
        mesh: Any = self._mesh if pair is None else pair[1]
        if pair is not None and self._places:
            mesh = mesh_in_trace(mesh)
        action = self._actions.get(slot, self._default_action)
        declared = sharding if pair is None else pair[0]
        fit = self._fit_once(declared, mesh, np.shape(leaf), on_indivisible=action)
        if self._explicit and pair is not None and not fit.problems:
            fit = fit.refuse(_not_explicit(pair[0], mesh))
        # Whether an array can be moved depends on the devices, not on the spec.
        target = sharding if pair is None else NamedSharding(mesh, PartitionSpec())
        is_concrete = not isinstance(leaf, jax.ShapeDtypeStruct)
        if self._moves and isinstance(target, Sharding) and is_concrete:
            fit = fit.refuse(obstacle(leaf, target))
        return fit, mesh

    def raise_for_mismatches(self) -> None:
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
    """Returns what is wrong with a spec that may only name Explicit axes; None if nothing is."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    wrong = [axis for axis in spec_axes(spec) if types[axis] != AxisType.Explicit]
    if not wrong:
        return None
    listed = ", ".join(f"{axis!r} is of type {types[axis].name}" for axis in wrong)
    return f"{listed}; only Explicit axes are part of a type"


def warn_of_corrections(name: str, lines: Sequence[str], *, strict: bool) -> None:
    """Warns of specs that were corrected, if there are any."""
    if lines:
        text = message(f"{name}: these specs do not fit, and were corrected:", lines)
        warn_or_raise(CorrectedSpecWarning, text, strict=strict)
