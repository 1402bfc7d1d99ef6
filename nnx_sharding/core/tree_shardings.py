"""Gives the arrays of any tree their shardings, outside of a plan: for ``place`` or ``reshard``.

:func:`assign_shardings` finds the spec of each array, from a prefix that the user wrote (a pytree
of specs that may end above the arrays), and *fits* the spec: checks that the mesh has its axes, and
that these divide the shape. One error lists all specs that do not fit, and one warning all specs
that were corrected. ``spec_checks.py`` does the same for the arrays of a call, with the specs of a
transform. ``specs/fitting.py`` decides for one array.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..errors import raise_if_any
from ..specs.fitting import (
    Fit,
    OnIndivisible,
    axes_text,
    fit_sharding,
    replace_spec,
    spec_and_mesh,
    spec_axes,
)
from ..specs.types import AnyArray, Arrays, Spec
from .arguments import split_argument
from .constrain import given_mesh, is_shardable, mesh_in_trace, without_unconstrained
from .filter_uses import check_filters
from .flatten import Flat
from .locations import locate, slot_names
from .memory import other_memory
from .place import obstacle
from .prefixes import Specs, check_specs
from .problems import no_mesh, warn_of_corrections
from .resolve import Resolved, resolve


def assign_shardings(
    flat: Flat,
    sharding: Any,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    caller: str = "with_sharding_constraint",
    name: str = "tree",
    **options: Any,
) -> tuple[list[str], list[Any]]:
    """Returns two lists, in the order of ``flat.leaves``: the names of arrays, and their shardings.

    The sharding of an array that is to stay as it is is None.

    Args:
      flat: the tree, flattened.
      sharding: a prefix of the tree, as the user wrote it.
      mesh: the mesh of a ``PartitionSpec``; None for the mesh in context.
      caller: the function that the user called, in messages.
      name: the name of the argument of this function, in messages.
      **options: the options of :func:`fit_shardings`.
    """
    mesh = given_mesh(caller, mesh)
    specs = sharding if isinstance(sharding, Specs) else Specs(sharding)
    check_specs(caller, sharding=specs)
    # The tree counts as one argument, whose parts have the user's specs.
    argument = split_argument(name, specs.tree, flat.structure.root, caller)
    locations = locate(flat.structure, [argument])
    # A spec stays as it is written, because the mesh is added once it is fitted to a shape.
    resolved = resolve(locations, flat.objects, flat.leaves, spec_of=lambda spec: spec)
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
    """Returns the sharding of each array, from the spec that was found for it.

    The sharding is None for an array that is to stay as it is. Warns of corrections and of filters
    without effect.

    Args:
      caller: the function that the user called, in messages.
      names: the expression for each array, in messages.
      leaves: the arrays.
      resolved: the specs that were found for the arrays.
      mesh: the mesh of each ``PartitionSpec``.
      strict: whether warnings are errors.
      **options: the other fields of :class:`_Fitter`.

    Raises:
      ValueError, TypeError, NoMeshError: some specs do not fit; the error lists all of one kind.
    """
    fitter = _Fitter(caller=caller, resolved=resolved, mesh=mesh, **options)
    shardings = []
    for slot, (name, leaf, spec) in enumerate(zip(names, leaves, resolved.slots, strict=True)):
        shardings.append(fitter.fit(slot, name, leaf, spec))
    fitter.raise_for_mismatches()
    check_filters(resolved.filter_uses, name=caller, strict=strict)
    warn_of_corrections(f"{caller}: these specs do not fit", fitter.corrected, strict=strict)
    return shardings


@dataclasses.dataclass(kw_only=True)
class _Fitter:
    """Fits specs to the arrays of a tree, and collects problems, so that one error lists all.

    Args:
      caller: the function that the user called, for messages.
      resolved: the spec of each array.
      mesh: the mesh of each ``PartitionSpec``.
      on_indivisible: what to do if a spec does not divide a shape, unless a ``StateSharding``
        decides.
      explicit: whether specs may only name Explicit axes, as in ``reshard``.
      places: whether arrays get the shardings now. Outside of a trace, this means that they are
        moved.
      whole: whether arrays are placed outside of a trace, as in ``place``. There is no compiler
        then, so a spec has to decide about all dimensions. Numbers become arrays, and any other
        value with a spec is an error.
      fit_spec: decides for one array, as `fit_sharding` does.
      adapt: a function of a spec and its array, which returns the spec that is fitted.

    Attributes:
      corrected: a line for each array whose spec was corrected, for the caller's warning.

    Private attributes. The lists hold a line for each array, and each becomes one error:

        _moves         whether :meth:`fit` refuses arrays that cannot be moved: ``places``,
                       outside of a trace
        _fit_once      ``fit_spec`` with the options of this class, with a cache of its results
        _refused       arrays whose specs do not fit
        _not_arrays    values that have a spec, and are no arrays
        _without_mesh  arrays that have a spec for which there is no mesh
        _remedy        the last line of the error for ``_refused``: the axes of the mesh if a spec
                       names other axes; "" otherwise
    """

    caller: str
    resolved: Resolved
    mesh: Mesh | AbstractMesh | None
    on_indivisible: OnIndivisible = "error"
    explicit: bool = False
    places: bool = False
    whole: bool = False
    fit_spec: Callable[..., Fit] = fit_sharding
    adapt: Callable[[Any, Any], Any] = lambda spec, leaf: spec

    def __post_init__(self) -> None:
        """Starts with no problems."""
        self._moves = self.places and _compat.trace_is_clean()  # inside a trace, nothing is moved
        # UNCONSTRAINED leaves a dimension to the compiler. Types of arrays have no such dimensions
        # (``explicit``), and outside of a trace there is no compiler (``whole``).
        fit = functools.partial(self.fit_spec, unconstrained=not (self.explicit or self.whole))
        # Results are cached, because the arrays of a model have few different shapes and specs.
        self._fit_once = functools.cache(fit)
        self.corrected: list[str] = []
        self._refused: list[str] = []
        self._not_arrays: list[str] = []
        self._without_mesh: list[str] = []
        self._remedy = ""

    def fit(self, slot: int, name: str, leaf: AnyArray, spec: Spec) -> Any:
        """Returns the sharding of one array; None if it stays as it is, or if there is a problem.

        A problem is noted for the error of all arrays, and a correction for the warning. For a
        spec, the result is a ``NamedSharding`` on its mesh. Any other sharding of the user, such as
        a ``SingleDeviceSharding`` or a ``Format``, is returned as it is.

        Args:
          spec: the spec, sharding or format of the array, or None.
        """
        spec = self.adapt(spec, leaf)
        # 1. Values that are no arrays. `place` (``whole``) makes arrays of numbers.
        is_number = isinstance(leaf, bool | int | float | complex)
        if not is_shardable(leaf) and not (self.whole and is_number):
            if self.whole and spec is not None:
                self._not_arrays.append(f"  {name}: a {type(leaf).__name__}")
            return None
        # 2. The spec and its mesh; None for a sharding without a spec, or a spec without a mesh.
        sharding = spec.sharding if isinstance(spec, Format) else spec
        pair = spec_and_mesh(sharding, self.mesh)
        if pair is None and isinstance(spec, PartitionSpec):
            self._without_mesh.append(f"  {name}: {spec}")
            return None
        # 3. Whether the spec fits the array.
        fit, mesh = self._fit_array(slot, leaf, sharding, pair)
        if fit.problems:
            self._refused.append(fit.line(name))
            if pair is not None and any(mismatch.is_about_mesh for mismatch in fit.problems):
                self._remedy = axes_text(mesh.shape)
            return None
        if fit.corrections:
            self.corrected.append(fit.line(name))
        # 4. The result. A Format keeps its layout.
        if pair is None:
            return spec
        if isinstance(spec, Format):  # gets the corrected sharding
            return Format(spec.layout, replace_spec(sharding, fit.sharding))
        # JAX supports UNCONSTRAINED only in traces, and only on meshes with Auto axes.
        may_be_unconstrained = (
            isinstance(leaf, jax.core.Tracer) and AxisType.Auto in mesh.axis_types
        )
        final = fit.sharding  # the spec after corrections
        if not may_be_unconstrained:
            final = without_unconstrained(final, leaf, mesh)
        return NamedSharding(mesh, final, memory_kind=other_memory(spec))

    def _fit_array(
        self, slot: int, leaf: AnyArray, sharding: Spec, pair: tuple[PartitionSpec, Any] | None
    ) -> tuple[Fit, Any]:
        """Returns how the sharding of an array fits, and the mesh of its spec.

        Args:
          sharding: the spec or sharding; None fits, and leaves the array as it is.
          pair: the spec and the mesh of ``sharding``; None if it has no spec.
        """
        action = self.resolved.on_indivisible.get(slot, self.on_indivisible)
        shape = np.shape(leaf)
        mesh: Any
        target: Any  # a sharding on the devices to which the array goes
        if pair is None:
            mesh, target = self.mesh, sharding  # `fit_sharding` ignores a mesh without a spec
            fit = self._fit_once(sharding, mesh, shape, on_indivisible=action)
        else:
            spec, mesh = pair
            if self.places:
                mesh = mesh_in_trace(mesh)  # gets the axis types of the current trace
            # The spec is left out, because only the devices decide whether an array can be moved.
            target = NamedSharding(mesh, PartitionSpec())
            fit = self._fit_once(spec, mesh, shape, on_indivisible=action)
            # `refuse` adds a problem, unless its text is None: here, if all axes are Explicit.
            if self.explicit and not fit.problems:
                fit = fit.refuse(_not_explicit(spec, mesh))
        is_concrete = not isinstance(leaf, jax.ShapeDtypeStruct)
        if self._moves and isinstance(target, Sharding) and is_concrete:
            fit = fit.refuse(obstacle(leaf, target))  # None if the array can be moved
        return fit, mesh

    def raise_for_mismatches(self) -> None:
        """Raises an error that lists all problems of one kind, if there are any."""
        if self._without_mesh:
            raise no_mesh(self.caller, self._without_mesh)
        raise_if_any(
            TypeError,
            f"{self.caller}: these leaves have a sharding, but are not arrays:",
            self._not_arrays,
            "Give them the sharding None, or keep them out of the tree.",
        )
        head = f"{self.caller}: these specs cannot be used:"
        raise_if_any(ValueError, head, self._refused, self._remedy)


def _not_explicit(spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> str | None:
    """Returns a text for axes of a spec that are not Explicit; None if all are Explicit."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    wrong = [axis for axis in spec_axes(spec) if types[axis] != AxisType.Explicit]
    if not wrong:
        return None
    listed = ", ".join(f"{axis!r} is of type {types[axis].name}" for axis in wrong)
    return f"{listed}; only Explicit axes are part of a type"
