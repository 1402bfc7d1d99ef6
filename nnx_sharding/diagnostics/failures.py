"""What is behind an error of JAX, in the user's names.

Nothing here runs before JAX has refused a call. Where the arguments show why, the user gets that as
the error; otherwise the error of JAX stays, with a note where there is more to say.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType

from .. import _compat
from ..core.fit import fit_specs, shape_of
from ..core.plan import Plan, is_committed
from ..core.problems import Problem, refuse
from ..core.pure import Pure
from ..errors import DonatedError, NoMeshError, is_library
from ..fitting import axes_of, axes_of_type, describe, describe_both
from ..paths import accessor
from .captured import captured_shards, describe_captured

SHOWN = 5  # names in a list of arrays that have something in common


# What JAX says where arrays that a function captures are in the way.
_ABOUT_CAPTURED = re.compile("mesh|closing over", re.IGNORECASE)


def explain(plan: Plan, leaves: Sequence[Any], error: Exception) -> None:
    """Says what is behind an error, if that can be seen.

    An error that comes from the user's function, or from the program while it runs, stays what it
    is and gets a note at most. Only where JAX refused the call before that is there another error,
    with that of JAX as its cause.

    Args:
      plan: the plan of the call.
      leaves: the arrays that JAX was given.
      error: what it raised.

    Raises:
      DonatedError: an array was donated before, or is donated twice.
      ValueError: specs, shardings or devices do not fit together.
    """
    if isinstance(error, _compat.TraceContextError):
        _note_object(error)
    elif isinstance(error, ValueError | NotImplementedError) and _ABOUT_CAPTURED.search(str(error)):
        _note_captured(plan, error)
    if not isinstance(error, ValueError | RuntimeError) or isinstance(error, NoMeshError):
        return
    if _is_of_the_function(error):
        return
    checks: Sequence[Callable[[Plan, Sequence[Any]], None]] = _CHECKS
    if isinstance(error, jax.errors.JaxRuntimeError):
        is_deleted = _compat.is_deleted_error(error)
        checks = (_check_deleted, _check_donated_twice) if is_deleted else ()
    for check in checks:
        try:
            check(plan, leaves)
        except Exception as found:
            raise found from error


def _is_of_the_function(error: Exception) -> bool:
    """Whether an error was raised while the user's function was called."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is Pure._called.__code__ for frame, _ in frames)


def explained(plan: Plan, leaves: Sequence[Any], function: Callable[..., Any]) -> Any:
    """What a function of the arrays returns; its errors are explained."""
    try:
        return function(*leaves)
    except Exception as error:
        explain(plan, leaves, error)
        raise


def _check_deleted(plan: Plan, leaves: Sequence[Any]) -> None:
    lines = [
        f"  {name}, {jax.typeof(leaf).str_short()}"
        for name, leaf in zip(plan.names, leaves, strict=True)
        if _is_concrete(leaf) and leaf.is_deleted()
    ]
    if lines:
        raise DonatedError(
            "these arguments were deleted, or donated to an earlier call that took their memory:\n"
            + "\n".join(lines)
            + "\nUse what that call returned, or do not donate them (donate_argnums, "
            "donate_argnames)."
        )


def _check_donated_twice(plan: Plan, leaves: Sequence[Any]) -> None:
    slots: dict[int, list[int]] = {}
    for slot, leaf in enumerate(leaves):
        if _is_concrete(leaf):
            slots.setdefault(id(leaf), []).append(slot)
    lines = [
        f"  {jax.typeof(leaves[same[0]]).str_short()}: {', '.join(plan.names[s] for s in same)}"
        for same in slots.values()
        if len(same) > 1 and not plan.donated.isdisjoint(same)
    ]
    if lines:
        raise DonatedError(
            "one array is donated, and passed once more in the same call:\n"
            + "\n".join(lines)
            + "\nDonate a copy (x.copy()), or pass it once."
        )


def _check_shapes(plan: Plan, leaves: Sequence[Any]) -> None:
    shapes = [shape_of(leaf) for leaf in leaves]
    fit_specs(plan.transform, plan.names, shapes, plan.specs, {})


def _check_types(plan: Plan, leaves: Sequence[Any]) -> None:
    """On Explicit meshes the sharding is part of an array's type."""
    transform = plan.transform
    mesh: Any = transform.context
    if not transform.passes_shardings and transform.usable_axes != frozenset(mesh.axis_names):
        return
    lines = []
    for name, leaf, spec in zip(plan.names, leaves, plan.specs, strict=True):
        partition = getattr(spec, "spec", spec)
        own = getattr(jax.typeof(leaf), "sharding", None)
        if own is None or not isinstance(partition, jax.sharding.PartitionSpec):
            continue
        explicit = axes_of_type(own.mesh if transform.passes_shardings else mesh, AxisType.Explicit)
        if not explicit or (transform.passes_shardings and not is_committed(leaf)):
            continue
        ndim = len(jax.typeof(leaf).shape)
        if _meaning(own.spec, ndim, explicit) != _meaning(partition, ndim, explicit):
            lines.append(
                f"  {name} is {jax.typeof(leaf).str_short()}, declared {partition!r}: write "
                f"{own.spec!r}, or pass jax.sharding.reshard({name}, {partition!r})"
            )
    if lines:
        raise ValueError(
            f"{plan.transform.name}: on a mesh with Explicit axes an array's type says how it is "
            "sharded, and these specs say otherwise:\n"
            + "\n".join(lines)
            + f"\nWithout {plan.transform.in_name}, the types decide."
        )


def _meaning(spec: Any, ndim: int, axes: frozenset[Any]) -> tuple[Any, ...]:
    entries = [*spec.partitions, *[None] * (ndim - len(spec))]
    cuts = [tuple(axis for axis in axes_of(entry) if axis in axes) for entry in entries]
    return cuts, spec.unreduced, spec.reduced


def _check_committed(plan: Plan, leaves: Sequence[Any]) -> None:
    if not plan.transform.passes_shardings:
        return
    lines: list[tuple[Any, ...]] = []
    refs: list[str] = []
    for name, leaf, sharding in zip(plan.names, leaves, plan.shardings, strict=True):
        is_ref = _is_concrete_ref(leaf)
        if sharding is None or not (is_ref or is_committed(leaf)):
            continue
        same_devices = leaf.sharding.device_set == sharding.device_set
        if (is_ref or same_devices) and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            if is_ref:
                own, declared = describe_both(leaf.sharding, sharding)
                refs.append(f"  {name}, shape {leaf.shape}: is {own}, declared {declared}")
            else:
                lines.append((name, leaf.shape, leaf.sharding, sharding))
    if lines:
        refuse(Problem.COMMITTED_ELSEWHERE, lines, name=plan.transform.name)
    if refs:
        raise ValueError(
            f"{plan.transform.name}: these references are laid out otherwise than declared, and a "
            "jax.Ref cannot be moved:\n"
            + "\n".join(refs)
            + "\nMake them of arrays that are placed there, or declare what they are."
        )


def _check_host_arrays(plan: Plan, leaves: Sequence[Any]) -> None:
    """Each process has an array of its own, and JAX cannot know which part of it is meant."""
    if not plan.transform.passes_shardings:
        return
    lines = [
        f"  {name}, shape {leaf.shape}, {describe(sharding)}"
        for name, leaf, sharding in zip(plan.names, leaves, plan.shardings, strict=True)
        if isinstance(leaf, np.ndarray)
        and sharding is not None
        and not (sharding.is_fully_addressable or sharding.is_fully_replicated)
    ]
    if lines:
        raise ValueError(
            f"{plan.transform.name}: these arrays of NumPy are declared to be cut over several "
            "processes, of which each has one of its own:\n"
            + "\n".join(lines)
            + "\nMake global arrays of them: with nnx_sharding.placement.shard_batches, or "
            "jax.make_array_from_process_local_data, if a process has its own rows; with "
            "nnx_sharding.partition.with_sharding_constraint if each has the whole."
        )


def _check_devices(plan: Plan, leaves: Sequence[Any]) -> None:
    """All that a program touches is on the same devices, in the same order."""
    groups: dict[tuple[jax.Device, ...], list[str]] = {}

    def add(sharding: Any, name: str) -> None:
        devices = _compat.device_assignment(sharding)
        if devices is not None and name not in groups.setdefault(devices, []):
            groups[devices].append(name)

    for name, leaf, sharding in zip(plan.names, leaves, plan.shardings, strict=True):
        if sharding is not None:
            add(sharding, name)
        if _is_concrete_ref(leaf) or is_committed(leaf):
            add(leaf.sharding, name)
    for spec in plan.out_specs:
        add(spec, plan.transform.out_name)
    if len(groups) > 1:
        lines = []
        for devices, names in groups.items():
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            ids = ", ".join(str(device.id) for device in devices)
            lines.append(f"  {', '.join(names[:SHOWN])}{more}: {devices[0].platform} {ids}")
        raise ValueError(
            f"{plan.transform.name}: incompatible devices. A program runs on one set of devices in "
            "one order, but these are on, or declared for, different ones:\n"
            + "\n".join(lines)
            + "\nUse one mesh for all; move arrays with jax.device_put, or on_committed='move'."
        )


def _check_refs(plan: Plan, leaves: Sequence[Any]) -> None:
    names: dict[int, list[str]] = {}
    for name, leaf in zip(plan.names, leaves, strict=True):
        if _compat.is_ref(leaf):
            names.setdefault(id(leaf), []).append(name)
    lines = [f"  {', '.join(same)}" for same in names.values() if len(same) > 1]
    if lines:
        raise ValueError(
            "one jax.Ref is passed more than once, which JAX does not allow:\n"
            + "\n".join(lines)
            + "\nPass it once, or inside of modules only, where it may be shared."
        )


_CHECKS: tuple[Callable[[Plan, Sequence[Any]], None], ...] = (
    _check_deleted,
    _check_shapes,
    _check_types,
    _check_committed,
    _check_host_arrays,
    _check_devices,
    _check_refs,
    _check_donated_twice,
)


def _is_concrete(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def _is_concrete_ref(leaf: Any) -> bool:
    return _compat.is_ref(leaf) and not isinstance(leaf, jax.core.Tracer)


def _note_captured(plan: Plan, error: Exception) -> None:
    found = captured_shards(plan.fun())
    if found:
        error.add_note(
            f"{plan.fun_name} captures these sharded arrays:\n{describe_captured(found)}\n"
            "Pass them as arguments."
        )


def _note_object(error: Exception) -> None:
    """Names the object that a function tried to change, from where it got it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    users = [frame for frame in frames if not is_library(frame.f_code.co_filename)]
    target = next(
        (
            frame.f_locals["self"]
            for frame in reversed(frames)
            if frame not in users and _compat.is_graph_object(frame.f_locals.get("self"))
        ),
        None,
    )
    for frame in reversed(users):
        named = {
            **{name: frame.f_globals.get(name) for name in frame.f_code.co_names},
            **frame.f_locals,
        }
        for name, value in named.items():
            if target is None or not _compat.is_graph_object(value):
                continue
            path = next((path for path, node in nnx.iter_graph(value) if node is target), None)
            if path is not None:
                error.add_note(
                    f"This is {accessor(name, path)}. {frame.f_code.co_name} takes it from its "
                    "surroundings; what a function changes has to be among its arguments."
                )
                return
