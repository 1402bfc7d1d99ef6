"""``with_sharding_constraint`` and ``reshard`` for arrays, pytrees and modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..core.flatten import Flat, flatten
from ..core.problems import check_options, no_mesh
from ..core.resharding import (
    apply_shardings,
    given_mesh,
    mesh_here,
    other_memory,
    rebuilt,
    without_unconstrained,
)
from ..core.resolve import Resolved, check_filters, locate, resolve, slot_names
from ..core.targets import Specs, check_specs, target
from ..core.transfer import obstacle
from ..errors import CorrectedSpecWarning, message, raise_listed, warn_or_raise
from ..specs.fitting import (
    ON_INDIVISIBLE,
    Fit,
    OnIndivisible,
    fit_sharding,
    spec_and_mesh,
    spec_axes,
)


@_compat.api_boundary
def with_sharding_constraint(
    tree: Any,
    sharding: Any,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    on_indivisible: OnIndivisible = "error",
) -> Any:
    """Shards arrays: by a constraint in a trace, elsewhere by moving them.

    In a trace, Auto axes are constrained (``jax.lax.with_sharding_constraint``) and Explicit ones
    resharded (``jax.sharding.reshard``). Elsewhere arrays are placed, including NumPy arrays; an
    abstract array gets the sharding. ``UNCONSTRAINED`` dimensions are not changed.

    Args:
      tree: an array, or a pytree of arrays and modules. Modules and Variables are updated in
        place, within the trace that they belong to. Leaves that are not arrays are kept, as are
        references (``jax.Ref``, hijax Variables).
      sharding: a ``PartitionSpec``, a ``Sharding``, a :class:`~nnx_sharding.StateSharding`, None
        to change nothing, or a prefix of ``tree`` with these as leaves. For logical names, use
        :meth:`LogicalRules.spec <nnx_sharding.partition.LogicalRules.spec>`.
      mesh: the mesh of a ``PartitionSpec``; None for the mesh in context.
      on_indivisible: what to do where a spec does not divide its array, as in
        :class:`~nnx_sharding.StateSharding`, whose own option has priority. One warning lists all
        corrections.

    Raises:
      ValueError: specs do not fit the mesh or the shapes, or name an axis over which an enclosing
        ``shard_map`` is mapped; all of them are listed.
      NoMeshError: a ``PartitionSpec`` has no mesh.

    Example:
      >>> import numpy as np
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import make_mesh, with_sharding_constraint
      >>> mesh = make_mesh({"data": 2, "model": 4})
      >>> with_sharding_constraint(np.ones((8, 16)), P("data"), mesh=mesh).sharding.spec
      P('data',)
    """
    check_options("with_sharding_constraint", on_indivisible=(on_indivisible, ON_INDIVISIBLE))
    flat = flatten(tree)
    _, shardings = assign(tree, flat, sharding, mesh=mesh, on_indivisible=on_indivisible)
    return rebuilt(flat, apply_shardings(flat.leaves, shardings))


@_compat.api_boundary
def reshard(tree: Any, out_shardings: Any) -> Any:
    """Shards arrays over Explicit axes, in a trace or elsewhere, so that their types show it.

    ``jax.sharding.reshard``, also for modules and Variables.

    Args:
      tree: as for :func:`~nnx_sharding.partition.with_sharding_constraint`.
      out_shardings: a ``PartitionSpec`` for the mesh in context, a ``NamedSharding``, a
        :class:`~nnx_sharding.StateSharding`, None to change nothing, or a prefix of ``tree`` with
        these as leaves.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import StateSharding, reshard
      >>> layer = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
      >>> specs = StateSharding({nnx.PathContains("kernel"): P(None, "model"), ...: P()})
      >>> with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"))):
      ...     _ = reshard(layer, specs)
      >>> print(jax.typeof(layer.kernel[...]))
      float32[8,16@model]
    """
    specs = Specs(out_shardings)
    check_specs("reshard", (PartitionSpec, NamedSharding), out_shardings=specs)
    flat = flatten(tree)
    _, shardings = assign(tree, flat, specs, caller="reshard", explicit=True)
    return rebuilt(flat, apply_shardings(flat.leaves, shardings), "reshard")


def assign(
    tree: Any,
    flat: Flat,
    sharding: Any,
    *,
    mesh: Any = None,
    caller: str = "with_sharding_constraint",
    name: str = "tree",
    **options: Any,
) -> tuple[list[str], list[Any]]:
    """The name and the sharding of each array of a tree; options are those of :func:`fitted`."""
    mesh, specs = given_mesh(caller, mesh), sharding
    specs = specs if isinstance(specs, Specs) else Specs(specs)
    check_specs(caller, sharding=specs)
    argument = target(name, specs.tree, tree, flat.structure.root, caller)
    locations = locate(flat.structure, [argument])
    resolved = resolve(locations, flat.objects, flat.leaves, lambda spec: spec)
    names = slot_names(len(flat.leaves), locations)
    return names, fitted(caller, names, flat.leaves, resolved, mesh, places=True, **options)


def fitted(
    caller: str,
    names: Sequence[str],
    leaves: Sequence[Any],
    resolved: Resolved,
    mesh: Any,
    *,
    on_indivisible: OnIndivisible = "error",
    explicit: bool = False,
    places: bool = False,
    whole: bool = False,
    lenient: bool = False,
    strict: bool = False,
    adapt: Callable[[Any, Any], Any] = lambda spec, leaf: spec,
) -> list[Any]:
    """The sharding of each array, from its resolved spec; None to change nothing.

    Specs may name Explicit axes only if ``explicit``. The arrays get the shardings here if
    ``places``; outside of a trace, by moving them. With ``whole``, specs decide on all dimensions,
    and on arrays and numbers only. ``lenient`` corrects specs, and changes nothing without a mesh.
    ``strict`` makes errors of warnings. ``adapt`` changes a spec for its array first.
    """
    shardings: list[Any] = [None] * len(leaves)
    corrected, refused, others, without_mesh, remedy = [], [], [], [], ""
    fits: dict[Any, Fit] = {}
    moves = places and _compat.trace_is_clean()
    options: Any = {"unconstrained": not (explicit or whole), "lenient": lenient}
    for slot, (name, leaf, spec) in enumerate(zip(names, leaves, resolved.slots, strict=True)):
        spec = adapt(spec, leaf)
        if not is_array(leaf) and not (whole and isinstance(leaf, bool | int | float | complex)):
            others += [f"  {name}: a {type(leaf).__name__}"] if whole and spec is not None else []
            continue
        of_mesh = spec.sharding if isinstance(spec, Format) else spec
        parts = spec_and_mesh(of_mesh, mesh)
        if parts is None and isinstance(spec, PartitionSpec):
            without_mesh.append(f"  {name}: {spec}")
            continue
        here = mesh if parts is None else mesh_here(parts[1]) if places else parts[1]
        action = resolved.on_indivisible.get(slot, "drop" if lenient else on_indivisible)
        key = of_mesh if parts is None else parts[0], here, np.shape(leaf), action
        if (fit := fits.get(key)) is None:
            fit = fits[key] = fit_sharding(*key[:3], on_indivisible=action, **options)
        if explicit and parts is not None and not fit.problems:
            fit = fit.refuse(_not_explicit(parts[0], here))
        goal = of_mesh if parts is None else NamedSharding(here, PartitionSpec())
        if moves and isinstance(goal, Sharding) and not isinstance(leaf, jax.ShapeDtypeStruct):
            fit = fit.refuse(obstacle(leaf, goal))
        if fit.problems:
            refused.append(fit.line(name))
            if parts is not None and any(misfit.kind == "axis" for misfit in fit.problems):
                sizes = ", ".join(f"{axis!r} ({size})" for axis, size in here.shape.items())
                remedy = f"The mesh has the axes {sizes}."
            continue
        if fit.corrections:
            corrected.append(fit.line(name))
        shardings[slot] = spec
        if parts is not None and of_mesh is spec:
            # JAX supports UNCONSTRAINED only in traces, and only on meshes with Auto axes.
            is_known = isinstance(leaf, jax.core.Tracer) and AxisType.Auto in here.axis_types
            final = fit.sharding if is_known else without_unconstrained(fit.sharding, leaf, here)
            shardings[slot] = NamedSharding(here, final, memory_kind=other_memory(spec))
    if without_mesh and not lenient:
        raise no_mesh(caller, without_mesh)
    raise_listed(
        TypeError,
        f"{caller}: these leaves have a sharding, but are not arrays:",
        others,
        "Give them the sharding None, or keep them out of the tree.",
    )
    raise_listed(ValueError, f"{caller}: these specs cannot be used:", refused, remedy)
    check_filters(resolved.uses, name=caller, strict=strict)
    report_corrections(caller, corrected, strict=strict)
    return shardings


def _not_explicit(spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> str | None:
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    others = [axis for axis in spec_axes(spec) if kinds[axis] != AxisType.Explicit]
    if not others:
        return None
    listed = ", ".join(f"{axis!r} is of type {kinds[axis].name}" for axis in others)
    return f"{listed}; only Explicit axes are part of a type"


def report_corrections(name: str, lines: Sequence[str], *, strict: bool) -> None:
    """Warns of specs that were corrected, if there are any."""
    if lines:
        text = message(f"{name}: these specs do not fit, and were corrected:", lines)
        warn_or_raise(CorrectedSpecWarning, text, strict=strict)


def is_array(x: Any) -> bool:
    """Whether ``x`` can be sharded: not a number, a reference or an array of strings."""
    if _compat.is_ref(x) or _compat.is_hijax_variable(x):
        return False
    if isinstance(x, np.ndarray | np.generic):
        return x.dtype.kind not in "OSUMm"
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)
