"""Checks the specs of a call against the mesh and the shapes of its arrays.

A *spec* is a ``PartitionSpec`` or a sharding. It *fits* if the mesh has its axes, and these divide
the dimensions of the array. ``specs/fitting.py`` decides that for one array, and :func:`fit_specs`
for all arrays of a call. One error lists all specs that do not fit, and one warning all specs that
were corrected. ``tree_shardings.py`` does the same for trees outside of a call. A *slot* is the
position of an array in the list of all arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from .. import _compat
from ..errors import raise_if_any, shortened
from ..specs.fitting import (
    Fit,
    Mismatch,
    OnIndivisible,
    axes_text,
    describe,
    fit_sharding,
    spec_and_mesh,
)
from ..specs.state_sharding import StateSharding
from ..specs.types import AnyMesh, Arrays, AxisName, Objects, Spec
from .locations import NamedLocation
from .problems import join_paths, warn_of_corrections
from .transform import Sharded, Transform


def check_axes(
    transform: Sharded, locations: Sequence[NamedLocation], objects: Objects, leaves: Arrays
) -> None:
    """Raises a ``ValueError`` if specs name axes that the mesh does not have, or an axis twice.

    Args:
      transform: has the specs and the mesh.
      locations: where the inputs are; the message names the inputs for which a spec is used.
      objects: the objects of the inputs, by index.
      leaves: the arrays of the inputs, by slot.
    """
    mismatches: dict[Any, Sequence[Mismatch]] = {}  # by spec
    # The sizes of the axes of all meshes that specs do not fit, for the message. Usually there is
    # one such mesh. If there are several, the sizes of the call's mesh have priority.
    sizes: dict[AxisName, int] = {}
    for spec in (*transform.in_specs.written, *transform.out_specs.written):
        pair = spec_and_mesh(spec, transform.context)  # None for a sharding without a spec
        if pair is None:
            continue
        _, mesh = pair
        problems = _mesh_mismatches(transform, spec, mesh)
        if problems:
            mismatches[spec] = problems
            sizes.update(mesh.shape)
    if not mismatches:
        return
    names_by_spec = _names_by_spec(mismatches, locations, objects, leaves)
    lines = []
    for spec, problems in mismatches.items():
        # The line names the arrays that the spec is for. The arrays of outputs are not known yet,
        # so a spec of outputs is named by its option, and by its filters if it has some.
        is_input = spec in transform.in_specs.written
        option = transform.in_name if is_input else transform.out_name
        rules = (transform.in_specs if is_input else transform.out_specs).rules
        names = join_paths(names_by_spec[spec] or [option + _filters_of(spec, rules)])
        lines.append(f"  {describe(spec)} for {names}: {'; '.join(map(str, problems))}")
    if transform.context is not None:
        sizes.update(transform.context.shape)
    raise_if_any(
        ValueError,
        f"{transform.name}: these specs do not fit the mesh:",
        lines,
        axes_text(sizes),
        anchor="specs-that-do-not-fit-the-mesh",
    )


def _mesh_mismatches(transform: Sharded, spec: Spec, mesh: AnyMesh) -> Sequence[Mismatch]:
    """Returns what is wrong with a spec on its mesh, such as an axis that the mesh does not have.

    Args:
      transform: has the mesh of the call (``context``). This is None if each spec is a sharding
        with a mesh.
      mesh: the mesh of the sharding, or the mesh of the call for a spec.
    """
    context = transform.context
    is_other_mesh = context is None or mesh.abstract_mesh != context.abstract_mesh
    # `jax.jit` gets shardings (``passes_shardings``), and these may be on several meshes. A program
    # of `shard_map` runs on the mesh of the call, because JAX gets specs without their meshes.
    if is_other_mesh and not transform.passes_shardings:
        return [Mismatch(f"it is for another mesh, {mesh}; give the PartitionSpec alone")]
    # A sharding is checked on its own mesh, and a spec on the mesh of the call. JAX takes
    # UNCONSTRAINED entries only in constraints, not for inputs and outputs.
    return fit_sharding(spec, context, usable=transform.usable_axes, unconstrained=False).problems


def _filters_of(spec: Spec, rules: Iterable[Any]) -> str:
    """Returns the filters that have a spec, as the end of ``sharding, filter 'kernel'``; else "".

    ``rules`` are the leaves of a prefix: each is a spec, or a ``StateSharding``.
    """
    names = [
        name
        for rule in rules
        if isinstance(rule, StateSharding)
        for name, sharding in zip(rule.names, rule.shardings, strict=True)
        if sharding == spec
    ]
    if not names:
        return ""
    return f", {'filter' if len(names) == 1 else 'filters'} {', '.join(shortened(names))}"


def _names_by_spec(
    specs: Iterable[Any], locations: Sequence[NamedLocation], objects: Objects, leaves: Arrays
) -> dict[Any, list[str]]:
    """Returns the names of the arrays that have each of some specs, for a message.

    This asks all filters again, which takes long, so it is only called for an error.

    Args:
      locations: where the arrays are, each with the user's spec for its part.
    """
    names: dict[Any, list[str]] = {spec: [] for spec in specs}
    for named in locations:
        spec = named.part.spec  # the user's spec for this part of an argument
        if isinstance(spec, StateSharding):
            # Filters see the Variable or bare array, its path in a module, and the path of the
            # module in a tuple, list or dict (``below``).
            subject = named.subject(objects, leaves)
            spec = spec.find_below(named.part.below, named.location.path, subject).sharding
        # Other specs are left out, because they fit their mesh.
        if isinstance(spec, PartitionSpec | NamedSharding) and spec in names:
            names[spec].append(named.name)
    return names


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
    """Returns the specs; those that do not fit their arrays are corrected if the user wants that.

    Warns of corrections.

    Args:
      transform: has the mesh, and the option ``on_indivisible``.
      names: the expression for each array, by slot.
      shapes: the shape of each array, by slot; None for other values.
      specs: the final spec of each array, by slot.
      on_indivisible: options with priority over that of the transform, by slot.
      outputs: whether the arrays are results.
      before: the old shapes of results that are updates, by slot.

    Raises:
      ValueError: some specs do not fit, and are not to be corrected. The error lists all of them.
    """
    result = list(specs)
    if not isinstance(transform, Sharded):  # the specs are axes of `vmap` and the like
        return result
    noun = "results" if outputs else "arrays"  # the word for the arrays in messages
    fit_once = functools.cache(fit_sharding)  # a model has many arrays of one shape and spec
    mismatches: list[tuple[Fit, str]] = []  # specs that do not fit, with lines for the error
    corrected: list[str] = []  # lines for the warning
    for slot, (spec, shape) in enumerate(zip(specs, shapes, strict=True)):
        if spec is None or shape is None:
            continue
        action = on_indivisible.get(slot, transform.on_indivisible)
        fit = fit_once(spec, transform.context, tuple(shape), on_indivisible=action)
        if not (fit.problems or fit.corrections):
            continue
        # The results of `shard_map` are parts. A spec joins them and need not divide them, but it
        # must not have more entries than a part has dimensions.
        is_too_long = any(mismatch.kind == "rank" for mismatch in fit.problems)
        if outputs and not transform.divides_outputs and not is_too_long:
            continue
        # The line for an update has the old shape, too: "model.kernel, shape (6,) (was (4,)), …".
        line = fit.line(names[slot], before.get(slot) if before else None)
        if fit.problems:
            mismatches.append((fit, line))
        else:
            result[slot] = fit.sharding
            corrected.append(line)
    _raise_for_mismatches(transform, noun, mismatches)
    head = f"{transform.name}: the specs of these {noun} do not fit their shapes"
    warn_of_corrections(head, corrected, strict=transform.strict)
    return result


def _raise_for_mismatches(
    transform: Sharded, noun: str, mismatches: Sequence[tuple[Fit, str]]
) -> None:
    """Raises the error for specs that do not fit, if there are any.

    Args:
      transform: the transform, whose JAX counterpart decides on the type of the error.
      noun: the word for the arrays in the message: ``arrays`` or ``results``.
      mismatches: the fits with problems, each with its line: a dimension is not divisible, or a
        spec is too long.
    """
    indivisible = [fit.is_indivisible for fit, _ in mismatches]
    # `jax.jit` raises its own type of error for indivisible dimensions, and a ValueError for specs
    # that are too long. `jax.shard_map` raises a ValueError for both.
    is_like_jit = all(indivisible) and transform.passes_shardings
    # If the list has both kinds of problems, the remedy is for indivisible dimensions, which are
    # more frequent. Each line says its problem.
    if any(indivisible):
        remedy = (
            "Change the shape (pad it) or the spec; or let the spec be corrected: "
            "on_indivisible='replicate' or 'drop'."
        )
    else:
        remedy = "Give each a spec with at most one entry for each dimension."
    raise_if_any(
        _compat.IndivisibleError if is_like_jit else ValueError,
        f"{transform.name}: the specs of these {noun} do not fit their shapes:",
        [line for _, line in mismatches],
        remedy,
        anchor="not-divisible" if all(indivisible) else "spec-too-long",
    )
