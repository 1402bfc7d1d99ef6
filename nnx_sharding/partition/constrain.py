"""``with_sharding_constraint`` for arrays, pytrees and modules, on meshes of every axis type."""

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
from ..core.resolve import check_filters, reach, resolve, slot_names
from ..core.specs import PathFunction, Specs, check_specs, is_spec, target
from ..core.transfer import obstacle
from ..errors import CorrectedSpecWarning, report
from ..fitting import describe, spec_and_mesh
from .layout import (
    corrected,
    has_memory,
    laid_out,
    mesh_here,
    rebuilt,
    settled,
)

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
    """Lays arrays out as a sharding says: in a trace as a constraint, else by moving them.

    A spec need not fit. It is padded or cut to the rank of its array; axes that the mesh does not
    have are left out, those over which an enclosing ``shard_map`` is mapped, and those that do
    not divide their dimension (``('a', 'b')`` keeps ``'a'`` if that divides). One warning lists
    all that was lost. ``UNCONSTRAINED`` dimensions stay as they are.

    Where JAX traces, Auto axes are constrained (``jax.lax.with_sharding_constraint``), Explicit
    ones resharded (``jax.sharding.reshard``); in a dimension with both, the Explicit ones come
    first. Elsewhere arrays are placed, those of NumPy too; an abstract array gets the sharding.

    Args:
      tree: an array, a pytree, a module, or a pytree of modules. Modules and Variables are
        updated in place, within the trace that they belong to, and are returned themselves. What
        is no array is kept, and so is a reference (``jax.Ref``, a hijax Variable).
      sharding: a ``PartitionSpec``, a ``Sharding``, a :class:`~nnx_sharding.StateSharding`, None
        for "as it is", the logical names of the dimensions (``("batch", None, "embed")``), or a
        prefix of ``tree`` with these as leaves.
      mesh: what a ``PartitionSpec`` refers to; None for the mesh in context. Where there is
        none, the arrays of a ``PartitionSpec`` are left as they are.
      rules: turns logical names into specs: an object with ``spec(names, shape=…, mesh=…)``.
      strict: whether a correction is an error.
      log: whether to log which arrays move; None for what the environment variable
        ``LOG_SHARDING_MOVE`` says.

    Returns:
      ``tree`` with its arrays laid out.

    Raises:
      TypeError: something else stands where a sharding belongs, or ``rules`` are none.
      ValueError: the shardings are no prefix of ``tree``, no filter matches a Variable, a spec
        uses an axis twice, or arrays are to be placed on a mesh without devices.
      TraceContextError: a Variable belongs to another trace.
      StrictError: a spec was corrected, and ``strict`` is true.

    Example:
      >>> import numpy as np
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.partition import with_sharding_constraint
      >>> from nnx_sharding.partition import make_mesh
      >>> mesh = make_mesh({"data": 2, "model": 4})
      >>> x = with_sharding_constraint(np.ones((8, 16)), P("data"), mesh=mesh)
      >>> x.sharding.shard_shape(x.shape)
      (4, 16)
    """
    flat = flatten(tree)
    goals = assign(tree, flat, sharding, mesh=mesh, rules=rules, strict=strict)
    if os.environ.get("LOG_SHARDING_MOVE", "").lower() in _YES if log is None else log:
        _log_moves(flat.leaves, goals)
    return rebuilt(flat, laid_out(flat.leaves, [goal.sharding for goal in goals]))


class Goal(NamedTuple):
    """How one array is to be laid out: what messages call it, and its sharding or None."""

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
) -> list[Goal]:
    """The sharding of each array of a tree, made to fit; None for "as it is".

    The arguments and errors are those of :func:`with_sharding_constraint`; ``flat`` is the tree,
    taken apart, and ``caller`` what messages call the function.
    """
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"{caller}: mesh is a jax.sharding.Mesh, not {mesh!r}.")
    mesh = _compat.context_mesh() if mesh is None else mesh
    specs = Specs(_without_logical_names(sharding, rules, mesh, caller))
    check_specs(caller, sharding=specs)
    reached = reach(flat.structure, [target("tree", specs.tree, tree, flat.structure.root)])
    resolved = resolve(reached, flat.objects, flat.leaves, lambda spec: spec)
    names = slot_names(len(flat.leaves), reached)
    goals, lost, faults = [], [], []
    for slot, (name, leaf, spec) in enumerate(zip(names, flat.leaves, resolved.slots, strict=True)):
        own = spec_and_mesh(spec, mesh)
        if own is None or not is_array(leaf):
            whole = isinstance(spec, Sharding | Format) and is_array(leaf)
            goals.append(Goal(name, spec if whole else None))
            continue
        here = mesh_here(own[1])
        found = corrected(own[0], leaf.shape, here, resolved.on_indivisible.get(slot, "drop"))
        line = f"  {name}, shape {tuple(leaf.shape)}, {describe(own[0])}"
        if _needs_devices(leaf):
            problem = obstacle(leaf, NamedSharding(here, PartitionSpec()))
            found.faults.extend([] if problem is None else [problem])
        if found.faults:
            faults.append(f"{line}: {'; '.join(found.faults)}")
            continue
        if found.lost:
            lost.append(f"{line} → {describe(found.spec)}: {'; '.join(found.lost)}")
        kind = spec.memory_kind if isinstance(spec, NamedSharding) and has_memory(spec) else None
        # JAX knows UNCONSTRAINED where it traces, and only on meshes with Auto axes.
        known = isinstance(leaf, jax.core.Tracer) and AxisType.Auto in here.axis_types
        part = found.spec if known else settled(found.spec, leaf, here)
        goals.append(Goal(name, NamedSharding(here, part, memory_kind=kind)))
    if faults:
        raise ValueError(f"{caller}: these specs cannot be used:\n" + "\n".join(faults))
    check_filters(resolved.uses, name=caller, strict=strict)
    report_lost(caller, lost, strict=strict)
    return goals


def report_lost(name: str, lines: Sequence[str], *, strict: bool) -> None:
    """Warns of all that corrections took away, if anything.

    Raises:
      StrictError: something was, and ``strict`` is true.
    """
    if lines:
        message = f"{name}: these specs do not fit, and were corrected:\n" + "\n".join(lines)
        report(CorrectedSpecWarning, message, strict=strict)


def _without_logical_names(sharding: Any, rules: Any, mesh: Any, caller: str) -> Any:
    """The prefix, with a function of the array in the place of its logical names."""
    if rules is None:
        return sharding
    if not callable(getattr(rules, "spec", None)):
        raise TypeError(
            f"{caller}: rules have a method spec(names, shape=…, mesh=…), not {rules!r}."
        )

    def resolved(names: Any) -> Any:
        if not _is_logical(names):
            return names
        return PathFunction(
            lambda path, x: rules.spec(names, shape=getattr(x, "shape", None), mesh=mesh), ()
        )

    return jax.tree_util.tree_map(
        resolved, sharding, is_leaf=lambda x: is_spec(x) or _is_logical(x)
    )


def _is_logical(x: Any) -> bool:
    """Whether ``x`` names dimensions: a tuple of strings and None, or of tuples for several."""
    if type(x) is not tuple or not any(isinstance(name, str) for name in x):
        return False
    return all(name is None or isinstance(name, str | tuple) for name in x)


def is_array(x: Any) -> bool:
    """Whether ``x`` can be laid out: no number, reference or array of strings."""
    if _compat.is_ref(x) or _compat.is_hijax_variable(x):
        return False
    if isinstance(x, np.ndarray | np.generic):
        return x.dtype.kind not in "OSUMm"
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def _needs_devices(x: Any) -> bool:
    return _compat.trace_is_clean() and not isinstance(x, jax.ShapeDtypeStruct)


def _log_moves(leaves: Sequence[Any], goals: Sequence[Goal]) -> None:
    """Logs, as a warning so that it is seen, which arrays get another sharding."""
    for leaf, (name, sharding) in zip(leaves, goals, strict=True):
        now = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
        if sharding is not None and now != sharding:
            was = type(leaf).__name__ if now is None else describe(now)
            logging.getLogger("nnx_sharding").warning("%s: %s → %s", name, was, describe(sharding))
