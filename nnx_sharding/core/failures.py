"""Explains errors of JAX in terms of the user's arguments.

Nothing here runs before JAX has refused a call. If the arguments show the reason, the user gets an
error that names them; otherwise JAX's error is kept, with a note if there is more to say.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from .. import _compat
from ..errors import DonatedError, NoMeshError, listed_error
from ..specs.fitting import axes_of, axes_of_type, describe, describe_both
from ..specs.state_sharding import Axis
from .captured import note_captured_arrays, note_captured_object
from .placing import is_committed
from .plan import Plan
from .problems import arguments_not_arrays, committed_elsewhere
from .pure import Pure
from .spec_checks import misfits_of, shape_of
from .transform import Sharded

_LOGGER = logging.getLogger("nnx_sharding")

MAX_NAMES = 5  # of the arrays on one set of devices

# The error for what is wrong with the arguments, if that is what it checks.
_Check: TypeAlias = Callable[[Plan, Sequence[Any]], Exception | None]


def raise_explained(plan: Plan, leaves: Sequence[Any], error: Exception, fun: Any = None) -> None:
    """Raises an error that says what is wrong with the arguments, if they show it.

    An error of the user's function, or of the program while it runs, is never replaced; at most it
    gets a note.
    """
    raise_instead(error, lambda: _explanation(plan, leaves, error, fun or plan.fun()))


def explained(plan: Plan, leaves: Sequence[Any], function: Callable[..., Any]) -> Any:
    """The result of a function of the arrays, with its errors explained."""
    try:
        return function(*leaves)
    except Exception as error:
        raise_explained(plan, leaves, error)
        raise


def raise_instead(error: Exception, find: Callable[[], Exception | None]) -> None:
    """Raises what a function finds in place of an error; logs if it finds nothing but a fault."""
    try:
        explanation = find()
    except Exception:
        _LOGGER.warning("The following error cannot be explained:", exc_info=True)
        return
    if explanation is not None:
        # The frames of an error of JAX are all internal.
        shows_internals = jax.config.jax_traceback_filtering == "off"
        raise explanation from (error if shows_internals else None)


def _explanation(plan: Plan, leaves: Sequence[Any], error: Exception, fun: Any) -> Exception | None:
    """The first reason for an error that the arguments show; it may get a note as well."""
    if isinstance(error, _compat.TraceContextError):
        note_captured_object(fun, plan.fun_name, error)
    elif isinstance(error, ValueError | NotImplementedError) and _compat.is_mesh_error(error):
        note_captured_arrays(fun, plan.fun_name, error)
    is_ours = isinstance(error, NoMeshError) or _is_of_the_function(error)
    if is_ours or not isinstance(error, ValueError | RuntimeError | TypeError):
        return None
    checks = _CHECKS
    if isinstance(error, TypeError):
        checks = (_check_arrays, _check_abstract)
    elif isinstance(error, jax.errors.JaxRuntimeError):
        checks = _DONATION_CHECKS if _compat.is_deleted_error(error) else ()
    found = (check(plan, leaves) for check in checks)
    return next((one for one in found if one is not None), None)


def _is_of_the_function(error: Exception) -> bool:
    """Whether an error was raised within the user's function."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is Pure._called.__code__ for frame, _ in frames)


_Lines: TypeAlias = Callable[[Plan, Sequence[Any]], Iterator[str]]


def _check(
    anchor: str, first: str, last: str, error: type[Exception] = ValueError
) -> Callable[[_Lines], _Check]:
    """Makes a check from a function that yields a line for each wrong argument.

    ``first`` and ``last`` are the lines around them, ``anchor`` the section in docs/errors.md.
    """

    def decorate(lines_of: _Lines) -> _Check:
        def check(plan: Plan, leaves: Sequence[Any]) -> Exception | None:
            head = first.format(name=plan.transform.name, fun_name=plan.fun_name)
            remedy = last.format(in_name=plan.transform.in_name)
            return listed_error(
                error, head, [f"  {x}" for x in lines_of(plan, leaves)], remedy, anchor
            )

        return check

    return decorate


def _check_arrays(plan: Plan, leaves: Sequence[Any]) -> Exception | None:
    is_sharded = isinstance(plan.transform, Sharded)
    return arguments_not_arrays(plan.names, leaves) if is_sharded else None


@_check(
    "abstract-arguments",
    "{name}: these arguments are abstract, without data:",
    "Pass them to lower or eval_shape. If nnx.eval_shape did not make them, a traced function has "
    "stored an intermediate value where it outlives the trace.",
    TypeError,
)
def _check_abstract(plan: Plan, leaves: Sequence[Any]) -> Iterator[str]:
    for name, leaf in zip(plan.names, leaves, strict=True):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            yield f"{name}, {jax.typeof(leaf).str_short()}"


@_check(
    "used-after-donation",
    "these arguments are deleted, or were donated to an earlier call:",
    "Use what that call returned, or do not donate them (donate_argnums, donate_argnames).",
    DonatedError,
)
def _check_deleted(plan: Plan, leaves: Sequence[Any]) -> Iterator[str]:
    for name, leaf in zip(plan.names, leaves, strict=True):
        if _is_concrete(leaf) and leaf.is_deleted():
            yield f"{name}, {jax.typeof(leaf).str_short()}"


@_check(
    "donated-twice",
    "these arrays are donated, and passed once more in the same call:",
    "Pass each once, or donate a copy: x.copy() of an array, nnx_sharding.place(model, None, "
    "copy=True) of a model (a copy by nnx.clone has the same arrays).",
    DonatedError,
)
def _check_donated_twice(plan: Plan, leaves: Sequence[Any]) -> Iterator[str]:
    for slots in _repeated(leaves, _is_concrete):
        if not plan.donated.isdisjoint(slots):
            names = ", ".join(plan.names[slot] for slot in slots)
            yield f"{jax.typeof(leaves[slots[0]]).str_short()}: {names}"


@_check(
    "one-reference-passed-twice",
    "one jax.Ref is passed more than once, which JAX does not allow:",
    "Pass it once, or only in modules, where it may be shared.",
)
def _check_refs(plan: Plan, leaves: Sequence[Any]) -> Iterator[str]:
    for same in _repeated(leaves, _compat.is_ref):
        yield ", ".join(plan.names[slot] for slot in same)


def _repeated(leaves: Sequence[Any], is_wanted: Callable[[Any], bool]) -> list[list[int]]:
    """The slots of each object that is passed more than once."""
    slots: dict[int, list[int]] = {}
    for slot, leaf in enumerate(leaves):
        if is_wanted(leaf):
            slots.setdefault(id(leaf), []).append(slot)
    return [same for same in slots.values() if len(same) > 1]


@_check(
    "axes-that-arrays-do-not-have",
    "{name}: these arrays do not have the axis along which they are mapped:",
    "Give each in {in_name} an axis that it has, or None: in a module by StateAxes({{nnx.Param: 0, "
    "...: None}}). Random streams get one by nnx.split_rngs.",
)
def _check_axes(plan: Plan, leaves: Sequence[Any]) -> Iterator[str]:
    for name, leaf, spec in zip(plan.names, leaves, plan.specs, strict=True):
        if isinstance(spec, Axis) and spec.index is not None:
            ndim = np.ndim(leaf)
            if not -ndim <= spec.index < ndim:
                yield f"{name}, {jax.typeof(leaf).str_short()}: axis {spec.index}"


def _check_shapes(plan: Plan, leaves: Sequence[Any]) -> Exception | None:
    if not isinstance(plan.transform, Sharded):
        return None
    return misfits_of(plan.transform, plan.names, map(shape_of, leaves), plan.specs)


@_check(
    "declared-otherwise-than-its-type",
    "{name}: on a mesh with Explicit axes the sharding is part of an array's type, and these "
    "specs differ from it:",
    "Without {in_name}, the types decide.",
)
def _check_types(plan: Plan, leaves: Sequence[Any]) -> Iterator[str]:
    if not isinstance(plan.transform, Sharded):
        return
    by_option, context = plan.transform.passes_shardings, plan.transform.context
    axes = plan.transform.usable_axes
    if not by_option and (context is None or axes != frozenset(context.axis_names)):
        return
    for name, leaf, declared in zip(plan.names, leaves, plan.specs, strict=True):
        aval = jax.typeof(leaf)
        spec, actual = getattr(declared, "spec", declared), getattr(aval, "sharding", None)
        if actual is None or actual.mesh.empty or not isinstance(spec, PartitionSpec):
            continue
        explicit = axes_of_type(actual.mesh if by_option else context, AxisType.Explicit)
        if not explicit or (by_option and not is_committed(leaf)):
            continue
        ndim = len(aval.shape)
        if _meaning(actual.spec, ndim, explicit) != _meaning(spec, ndim, explicit):
            yield (
                f"{name} is {aval.str_short()}, declared {spec!r}: write {actual.spec!r}, or pass "
                f"jax.sharding.reshard({name}, {spec!r})"
            )


def _meaning(spec: PartitionSpec, ndim: int, axes: frozenset[Any]) -> tuple[Any, ...]:
    """The meaning of a spec for some mesh axes; equal for equivalent specs."""
    entries = [*spec.partitions, *[None] * (ndim - len(spec))]
    sharded = [tuple(axis for axis in axes_of(entry) if axis in axes) for entry in entries]
    return sharded, spec.unreduced, spec.reduced


def _check_committed(plan: Plan, leaves: Sequence[Any]) -> Exception | None:
    return committed_elsewhere(plan.transform.name, _other_shardings(plan, leaves, is_committed))


@_check(
    "committed-to-another-sharding",
    "{name}: these references have a sharding other than declared, and a jax.Ref cannot be "
    "resharded:",
    "Create them from arrays with the declared sharding, or declare the one they have.",
)
def _check_ref_shardings(plan: Plan, leaves: Sequence[Any]) -> Iterator[str]:
    for name, ref, declared in _other_shardings(plan, leaves, _is_concrete_ref):
        actual, expected = describe_both(ref.sharding, declared)
        yield f"{name}, shape {ref.shape}: is {actual}, declared {expected}"


def _other_shardings(
    plan: Plan, leaves: Sequence[Any], is_wanted: Callable[[Any], bool]
) -> Iterator[tuple[str, Any, Any]]:
    """The names and declared shardings of arrays with other shardings, and these arrays."""
    for slot, leaf, declared in declared_shardings(plan, leaves):
        if not is_wanted(leaf):
            continue
        # Arrays on other devices are left to _check_devices.
        is_meant = _compat.is_ref(leaf) or leaf.sharding.device_set == declared.device_set
        if is_meant and not leaf.sharding.is_equivalent_to(declared, leaf.ndim):
            yield plan.names[slot], leaf, declared


@_check(
    "numpy-arguments-across-processes",
    "{name}: NumPy arguments cannot be sharded across processes: each process holds its own copy:",
    "Make global arrays of them: with nnx_sharding.placement.shard_batches, or "
    "jax.make_array_from_process_local_data, if each process has its own rows; with "
    "nnx_sharding.partition.with_sharding_constraint if each has the full array.",
)
def _check_host_arrays(plan: Plan, leaves: Sequence[Any]) -> Iterator[str]:
    for slot, leaf, sharding in declared_shardings(plan, leaves):
        is_local = sharding.is_fully_addressable or sharding.is_fully_replicated
        if isinstance(leaf, np.ndarray) and not is_local:
            yield f"{plan.names[slot]}, shape {leaf.shape}, {describe(sharding)}"


def declared_shardings(plan: Plan, leaves: Sequence[Any]) -> Iterator[tuple[int, Any, Any]]:
    """The slots, arrays and shardings for which the transform gives JAX a sharding."""
    if isinstance(plan.transform, Sharded) and plan.transform.passes_shardings:
        for slot, (leaf, sharding) in enumerate(zip(leaves, plan.shardings, strict=True)):
            if sharding is not None:
                yield slot, leaf, sharding


@_check(
    "different-devices",
    "{name}: incompatible devices. A program runs on one set of devices in one order, but these "
    "are on, or declared for, different ones:",
    "Use one mesh for all; move models with nnx_sharding.place and arrays with jax.device_put, or "
    "pass on_committed='move'.",
)
def _check_devices(plan: Plan, leaves: Sequence[Any]) -> Iterator[str]:
    pairs: list[tuple[Any, str]] = []
    for name, leaf, sharding in zip(plan.names, leaves, plan.shardings, strict=True):
        pairs.append((sharding, name))
        if _is_concrete_ref(leaf) or is_committed(leaf):
            pairs.append((leaf.sharding, name))
    pairs += [(spec, plan.transform.out_name) for spec in plan.out_specs]
    groups: dict[tuple[jax.Device, ...], dict[str, None]] = {}  # unique names in order
    for sharding, name in pairs:
        devices = _compat.device_assignment(sharding)
        if devices is not None:
            groups.setdefault(devices, {})[name] = None
    for devices, names in groups.items() if len(groups) > 1 else ():
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        ids = ", ".join(str(device.id) for device in devices)
        yield f"{', '.join([*names][:MAX_NAMES])}{more}: {devices[0].platform} {ids}"


_DONATION_CHECKS: Sequence[_Check] = (_check_deleted, _check_donated_twice)
_CHECKS: Sequence[_Check] = (
    _check_axes,
    _check_deleted,
    _check_shapes,
    _check_types,
    _check_committed,
    _check_ref_shardings,
    _check_host_arrays,
    _check_devices,
    _check_refs,
    _check_donated_twice,
)


def _is_concrete(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def _is_concrete_ref(leaf: Any) -> bool:
    return _compat.is_ref(leaf) and not isinstance(leaf, jax.core.Tracer)
