"""``with_sharding_constraint`` and ``reshard`` for arrays, pytrees and modules."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..core.flatten import Flat, flatten
from ..core.problems import no_mesh
from ..core.resharding import (
    apply_shardings,
    given_mesh,
    mesh_here,
    other_memory,
    rebuilt,
    without_unconstrained,
)
from ..core.resolve import NamedLocation, Resolved, check_filters, locate, resolve, slot_names
from ..core.targets import PathFunction, Specs, check_specs, is_spec, target
from ..core.transfer import obstacle
from ..errors import CorrectedSpecWarning, message, raise_listed, report
from ..specs.fitting import describe, fit_sharding, spec_and_mesh, spec_axes

_NAME = "with_sharding_constraint"
_YES = ("1", "true", "yes", "on")


@_compat.api_boundary
def with_sharding_constraint(
    tree: Any,
    sharding: Any,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    rules: Any = None,
    strict: bool = False,
    log: bool | None = None,
) -> Any:
    """Shards arrays: by a constraint in a trace, elsewhere by moving them.

    A spec need not fit: it is padded or truncated to the rank of its array; axes that the mesh
    does not have, over which an enclosing ``shard_map`` is mapped, or that do not divide their
    dimension are dropped. One warning lists all corrections. ``UNCONSTRAINED`` dimensions are not
    changed.

    In a trace, Auto axes are constrained (``jax.lax.with_sharding_constraint``) and Explicit ones
    resharded (``jax.sharding.reshard``). Elsewhere arrays are placed, including NumPy arrays; an
    abstract array gets the sharding.

    Args:
      tree: an array, or a pytree of arrays and modules. Modules and Variables are updated in
        place, within the trace that they belong to. Leaves that are not arrays are kept, as are
        references (``jax.Ref``, hijax Variables).
      sharding: a ``PartitionSpec``, a ``Sharding``, a :class:`~nnx_sharding.StateSharding`, None
        to change nothing, the logical names of the dimensions (``("batch", None, "embed")``), or
        a prefix of ``tree`` with these as leaves.
      mesh: the mesh of a ``PartitionSpec``; None for the mesh in context. Without one, the arrays
        of a ``PartitionSpec`` are not changed.
      rules: turns logical names into specs: an object with ``spec(names, shape=…, mesh=…)``.
      strict: whether a correction is an error.
      log: whether to log which arrays move; None for the environment variable
        ``LOG_SHARDING_MOVE``.

    Returns:
      ``tree`` with its arrays sharded.

    Raises:
      TypeError: a leaf of ``sharding`` is not a sharding, or ``rules`` has no method ``spec``.
      ValueError: the shardings are not a prefix of ``tree``, no filter matches a Variable, a spec
        uses an axis twice, or arrays are to be placed on a mesh without devices.
      TraceContextError: a Variable belongs to another trace.
      StrictError: a spec was corrected, and ``strict`` is true.

    Example:
      >>> import numpy as np
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import make_mesh, with_sharding_constraint
      >>> mesh = make_mesh({"data": 2, "model": 4})
      >>> with_sharding_constraint(np.ones((8, 16)), P("data"), mesh=mesh).sharding.spec
      P('data', None)
    """
    flat = flatten(tree)
    assigned = assign(tree, flat, sharding, mesh=mesh, rules=rules, strict=strict)
    if os.environ.get("LOG_SHARDING_MOVE", "").lower() in _YES if log is None else log:
        _log_moves(flat.leaves, assigned)
    return rebuilt(flat, apply_shardings(flat.leaves, [each.sharding for each in assigned]))


@_compat.api_boundary
def reshard(tree: Any, out_shardings: Any) -> Any:
    """Shards arrays over Explicit axes, in a trace or elsewhere, so that their types show it.

    ``jax.sharding.reshard``, also for modules and Variables. A spec that
    :func:`~nnx_sharding.partition.with_sharding_constraint` would correct is an error.

    Args:
      tree: an array, or a pytree of arrays and modules. Modules and Variables are updated in
        place, within the trace that they belong to. Leaves that are not arrays are kept.
      out_shardings: a ``PartitionSpec`` for the mesh in context, a ``NamedSharding``, a
        :class:`~nnx_sharding.StateSharding`, None to change nothing, or a prefix of ``tree`` with
        these as leaves.

    Returns:
      ``tree`` with its arrays sharded.

    Raises:
      TypeError: a leaf of ``out_shardings`` is not a spec.
      ValueError: the specs are not a prefix of ``tree``, do not fit the mesh or the shapes, name an
        axis that is not Explicit, or no filter matches a Variable.
      NoMeshError: a ``PartitionSpec`` has no mesh.
      TraceContextError: a Variable belongs to another trace.

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
    assigned = assign(tree, flat, specs.tree, strict=False, caller="reshard", exact=True)
    leaves = apply_shardings(flat.leaves, [each.sharding for each in assigned])
    return rebuilt(flat, leaves, "reshard")


class Assignment(NamedTuple):
    """The name of an array in messages, and its sharding; None to change nothing."""

    name: str
    sharding: Any


def assign(
    tree: Any,
    flat: Flat,
    sharding: Any,
    *,
    mesh: Any = None,
    rules: Any = None,
    strict: bool,
    caller: str = _NAME,
    exact: bool = False,
    needs_mesh: bool = False,
) -> list[Assignment]:
    """The sharding of each array of a tree, as in :func:`with_sharding_constraint`.

    With ``exact``, as in :func:`reshard`. With ``needs_mesh`` a ``PartitionSpec`` without a mesh
    is an error.
    """
    mesh = given_mesh(caller, mesh)
    specs = Specs(_without_logical_names(sharding, rules, mesh, caller))
    names, resolved, _ = resolved_prefix(caller, "tree", tree, flat, specs)
    options = {"strict": strict, "exact": exact, "places": True, "needs_mesh": needs_mesh or exact}
    return fitted(caller, names, flat.leaves, resolved, mesh, **options)


def fitted(
    caller: str,
    names: Sequence[str],
    leaves: Sequence[Any],
    resolved: Resolved,
    mesh: Any,
    *,
    strict: bool = False,
    exact: bool = True,
    places: bool = False,
    needs_mesh: bool = True,
) -> list[Assignment]:
    """The sharding of each array, from its resolved spec.

    Args:
      caller: the name of the caller, for messages.
      names: the expression for each array.
      leaves: the arrays.
      resolved: their specs.
      mesh: the mesh of a ``PartitionSpec``; None for none.
      strict: whether corrections are errors.
      exact: whether specs must fit, and name Explicit axes only.
      places: whether arrays get these shardings in the present context: outside of a trace, by
        moving them.
      needs_mesh: whether a ``PartitionSpec`` without a mesh is an error.

    Raises:
      NoMeshError: a ``PartitionSpec`` has no mesh, and ``needs_mesh`` is true.
      ValueError: specs cannot be used.
    """
    assigned, corrected, refused = [], [], []
    for slot, (name, leaf, spec) in enumerate(zip(names, leaves, resolved.slots, strict=True)):
        parts = spec_and_mesh(spec, mesh)
        if parts is None and needs_mesh and isinstance(spec, PartitionSpec):
            raise no_mesh(caller)
        if parts is None or not is_array(leaf):
            is_final = isinstance(spec, Sharding | Format) and is_array(leaf)
            assigned.append(Assignment(name, spec if is_final else None))
            continue
        here = mesh_here(parts[1]) if places else parts[1]
        action = resolved.on_indivisible.get(slot, "error" if exact else "drop")
        options: Any = {"unconstrained": False} if exact else {"lenient": True}
        fit = fit_sharding(parts[0], here, leaf.shape, on_indivisible=action, **options)
        fit = fit.refuse(_not_explicit(parts[0], here)) if exact and not fit.problems else fit
        if places and _compat.trace_is_clean() and not isinstance(leaf, jax.ShapeDtypeStruct):
            fit = fit.refuse(obstacle(leaf, NamedSharding(here, PartitionSpec())))
        if fit.problems:
            refused.append(fit.line(name))
            continue
        if fit.corrections:
            corrected.append(fit.line(name))
        # JAX supports UNCONSTRAINED only in traces, and only on meshes with Auto axes.
        is_known = isinstance(leaf, jax.core.Tracer) and AxisType.Auto in here.axis_types
        final = fit.sharding if is_known else without_unconstrained(fit.sharding, leaf, here)
        assigned.append(
            Assignment(name, NamedSharding(here, final, memory_kind=other_memory(spec)))
        )
    raise_listed(ValueError, f"{caller}: these specs cannot be used:", refused)
    check_filters(resolved.uses, name=caller, strict=strict)
    report_corrections(caller, corrected, strict=strict)
    return assigned


def _not_explicit(spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> str | None:
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    others = [axis for axis in spec_axes(spec) if kinds[axis] != AxisType.Explicit]
    if not others:
        return None
    listed = ", ".join(f"{axis!r} is of type {kinds[axis].name}" for axis in others)
    return f"{listed}; only Explicit axes are part of a type"


def resolved_prefix(
    caller: str, name: str, tree: Any, flat: Flat, specs: Specs
) -> tuple[list[str], Resolved, list[NamedLocation]]:
    """The names, specs (from a prefix of the tree) and locations of the arrays of a tree."""
    check_specs(caller, sharding=specs)
    argument = target(name, specs.tree, tree, flat.structure.root, caller)
    locations = locate(flat.structure, [argument])
    resolved = resolve(locations, flat.objects, flat.leaves, lambda spec: spec)
    return slot_names(len(flat.leaves), locations), resolved, locations


def report_corrections(name: str, lines: Sequence[str], *, strict: bool) -> None:
    """Warns of specs that were corrected, if there are any."""
    if lines:
        text = message(f"{name}: these specs do not fit, and were corrected:", lines)
        report(CorrectedSpecWarning, text, strict=strict)


def _without_logical_names(sharding: Any, rules: Any, mesh: Any, caller: str) -> Any:
    """The prefix, with each tuple of logical names replaced by a function of the array."""
    if rules is None:
        return sharding
    if not callable(getattr(rules, "spec", None)):
        raise TypeError(
            f"{caller}: rules must have a method spec(names, shape=…, mesh=…), got {rules!r}."
        )

    def resolved(names: Any) -> Any:
        if not _is_logical(names):
            return names
        return PathFunction(
            lambda path, x: rules.spec(names, shape=getattr(x, "shape", None), mesh=mesh), {}
        )

    return jax.tree.map(resolved, sharding, is_leaf=lambda x: is_spec(x) or _is_logical(x))


def _is_logical(x: Any) -> bool:
    """Whether ``x`` names dimensions: a tuple of strings and None, or of tuples for several."""
    if type(x) is not tuple or not any(isinstance(name, str) for name in x):
        return False
    return all(name is None or isinstance(name, str | tuple) for name in x)


def is_array(x: Any) -> bool:
    """Whether ``x`` can be sharded: not a number, a reference or an array of strings."""
    if _compat.is_ref(x) or _compat.is_hijax_variable(x):
        return False
    if isinstance(x, np.ndarray | np.generic):
        return x.dtype.kind not in "OSUMm"
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def _log_moves(leaves: Sequence[Any], assigned: Sequence[Assignment]) -> None:
    """Logs which arrays get another sharding, at level WARNING so that it is shown by default."""
    for leaf, (name, sharding) in zip(leaves, assigned, strict=True):
        old = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
        if sharding is not None and old != sharding:
            was = type(leaf).__name__ if old is None else describe(old)
            logging.getLogger("nnx_sharding").warning("%s: %s → %s", name, was, describe(sharding))
