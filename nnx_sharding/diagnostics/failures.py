"""Explains errors of JAX in terms of the user's arguments.

Nothing here runs before JAX has refused a call. If the arguments show the reason, the user gets an
error that names them; otherwise JAX's error is kept, with a note if there is more to say.
"""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from .. import _compat
from ..core.plan import Plan, is_committed
from ..core.problems import Problem, refuse
from ..core.pure import Pure
from ..core.spec_checks import check_arrays, fit_specs, shape_of
from ..errors import DonatedError, NoMeshError, is_explained, message, raise_listed, see
from ..specs.fitting import axes_of, axes_of_type, describe, describe_both
from ..specs.mapped_axis import Axis
from ..specs.paths import accessor
from .captured import captured_shards, captured_values

F = TypeVar("F", bound=Callable[..., None])

_LOGGER = logging.getLogger("nnx_sharding")

MAX_NAMES = 5  # of the arrays on one set of devices


def _only_explains(function: F) -> F:
    """A function that explains an error, whose own failures do not replace that error."""

    @functools.wraps(function)
    def explain(*args: Any) -> None:
        try:
            function(*args)
        except Exception as found:
            if is_explained(found):
                raise
            _LOGGER.warning("The following error cannot be explained:", exc_info=True)

    return cast(F, explain)


@_only_explains
def explain(plan: Plan, leaves: Sequence[Any], error: Exception) -> None:
    """Raises an error that says what is wrong with the arguments, if they show it.

    An error of the user's function, or of the program while it runs, is never replaced; at most it
    gets a note.
    """
    if isinstance(error, _compat.TraceContextError):
        _note_object(plan, error)
    elif isinstance(error, ValueError | NotImplementedError) and _compat.is_mesh_error(error):
        _note_captured(plan, error)
    kinds = ValueError | RuntimeError | TypeError
    if not isinstance(error, kinds) or isinstance(error, NoMeshError):
        return
    if _is_of_the_function(error):
        return
    checks: Sequence[_Check] = _CHECKS
    if isinstance(error, TypeError):
        checks = (_check_arrays, _check_abstract)
    elif isinstance(error, jax.errors.JaxRuntimeError):
        checks = _DONATION_CHECKS if _compat.is_deleted_error(error) else ()
    _raise_first(checks, plan, leaves, error)


def explained(plan: Plan, leaves: Sequence[Any], function: Callable[..., Any]) -> Any:
    """The result of a function of the arrays, with its errors explained."""
    try:
        return function(*leaves)
    except Exception as error:
        explain(plan, leaves, error)
        raise


@_only_explains
def explain_compiled(plan: Plan, leaves: Sequence[Any], stage: Any, error: Exception) -> None:
    """Raises an error that says how the arguments differ from those that a stage is for."""
    if str(error).startswith("Argument types differ"):
        _raise_first([_check_compiled_types(stage.in_avals[0])], plan, leaves, error)
    elif isinstance(error, ValueError) and hasattr(stage, "input_shardings"):
        _raise_first([_check_compiled_shardings(stage.input_shardings[0])], plan, leaves, error)


def _raise_first(
    checks: Sequence[_Check], plan: Plan, leaves: Sequence[Any], error: Exception
) -> None:
    for check in checks:
        try:
            check(plan, leaves)
        except Exception as explanation:
            # The frames of an error of JAX are all internal.
            shows_internals = jax.config.jax_traceback_filtering == "off"
            raise explanation from (error if shows_internals else None)


def _is_of_the_function(error: Exception) -> bool:
    """Whether an error was raised within the user's function."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is Pure._called.__code__ for frame, _ in frames)


_Lines: TypeAlias = Callable[[Plan, Sequence[Any]], Iterator[str]]
_Check: TypeAlias = Callable[[Plan, Sequence[Any]], None]


def _check(
    anchor: str, first: str, last: str, error: type[Exception] = ValueError
) -> Callable[[_Lines], _Check]:
    """Makes a check from a function that yields a line for each wrong argument.

    ``first`` and ``last`` are the lines around them, ``anchor`` the section in docs/errors.md.
    """

    def decorate(lines_of: _Lines) -> _Check:
        def check(plan: Plan, leaves: Sequence[Any]) -> None:
            head = first.format(name=plan.transform.name, fun_name=plan.fun_name)
            remedy = last.format(in_name=plan.transform.in_name)
            raise_listed(error, head, [f"  {x}" for x in lines_of(plan, leaves)], remedy, anchor)

        return check

    return decorate


def _check_arrays(plan: Plan, leaves: Sequence[Any]) -> None:
    if not plan.transform.takes_any:
        check_arrays(Problem.ARGUMENT_IS_NOT_ARRAY, plan.names, leaves)


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


def _check_shapes(plan: Plan, leaves: Sequence[Any]) -> None:
    shapes = [shape_of(leaf) for leaf in leaves]
    fit_specs(plan.transform, plan.names, shapes, plan.specs, {})


@_check(
    "declared-otherwise-than-its-type",
    "{name}: on a mesh with Explicit axes the sharding is part of an array's type, and these "
    "specs differ from it:",
    "Without {in_name}, the types decide.",
)
def _check_types(plan: Plan, leaves: Sequence[Any]) -> Iterator[str]:
    by_option, context = plan.transform.passes_shardings, cast(Any, plan.transform.context)
    if not by_option and plan.transform.usable_axes != frozenset(context.axis_names):
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


def _check_committed(plan: Plan, leaves: Sequence[Any]) -> None:
    offenders = list(_other_shardings(plan, leaves, is_committed))
    if offenders:
        refuse(Problem.COMMITTED_ELSEWHERE, offenders, name=plan.transform.name)


@_check(
    "committed-to-another-sharding",
    "{name}: these references have a sharding other than declared, and a jax.Ref cannot be "
    "resharded:",
    "Create them from arrays with the declared sharding, or declare the one they have.",
)
def _check_ref_shardings(plan: Plan, leaves: Sequence[Any]) -> Iterator[str]:
    for name, shape, sharding, declared in _other_shardings(plan, leaves, _is_concrete_ref):
        actual, expected = describe_both(sharding, declared)
        yield f"{name}, shape {shape}: is {actual}, declared {expected}"


def _other_shardings(
    plan: Plan, leaves: Sequence[Any], is_wanted: Callable[[Any], bool]
) -> Iterator[tuple[str, Any, Any, Any]]:
    """The names, shapes, shardings and declared shardings of arrays whose shardings differ."""
    for slot, leaf, declared in _declared(plan, leaves):
        if not is_wanted(leaf):
            continue
        # Arrays on other devices are left to _check_devices.
        is_meant = _compat.is_ref(leaf) or leaf.sharding.device_set == declared.device_set
        if is_meant and not leaf.sharding.is_equivalent_to(declared, leaf.ndim):
            yield plan.names[slot], leaf.shape, leaf.sharding, declared


def _check_compiled_types(avals: Sequence[Any]) -> _Check:
    """A check that arguments have the types for which a program was compiled."""

    @_check(
        "compiled-for-other-types",
        "{fun_name} was compiled for other types than these arguments have:",
        "Compile it for these too, as jit does, or pad them to the shapes that it was compiled "
        "for.",
        TypeError,
    )
    def check(plan: Plan, leaves: Sequence[Any]) -> Iterator[str]:
        for name, leaf, aval in zip(plan.names, leaves, avals, strict=True):
            actual, compiled = jax.typeof(leaf).str_short(), aval.str_short()
            if actual != compiled:
                yield f"{name}: is {actual}, compiled for {compiled}"

    return check


def _check_compiled_shardings(shardings: Sequence[Any]) -> _Check:
    """A check that arguments have the shardings for which a program was compiled."""

    @_check(
        "compiled-for-other-shardings",
        "{fun_name} was compiled for other shardings than these arguments have:",
        "Move them with jax.device_put or nnx_sharding.place, or lower it for such arrays: "
        "abstract ones too can have a sharding, jax.ShapeDtypeStruct(..., sharding=...).",
    )
    def check(plan: Plan, leaves: Sequence[Any]) -> Iterator[str]:
        # Arrays with a declared spec are moved, or refused for that reason.
        done = {*plan.placed_slots, *(slot for slot, *_ in _declared(plan, leaves))}
        for slot, (leaf, compiled) in enumerate(zip(leaves, shardings, strict=True)):
            if slot in done or compiled is None or not is_committed(leaf):  # None: not used
                continue
            if not leaf.sharding.is_equivalent_to(compiled, leaf.ndim):
                actual, expected = describe_both(leaf.sharding, compiled)
                name, type_ = plan.names[slot], jax.typeof(leaf).str_short()
                yield f"{name}, {type_}: is {actual}, compiled for {expected}"

    return check


@_check(
    "numpy-arguments-across-processes",
    "{name}: NumPy arguments cannot be sharded across processes: each process holds its own copy:",
    "Make global arrays of them: with nnx_sharding.placement.shard_batches, or "
    "jax.make_array_from_process_local_data, if each process has its own rows; with "
    "nnx_sharding.partition.with_sharding_constraint if each has the full array.",
)
def _check_host_arrays(plan: Plan, leaves: Sequence[Any]) -> Iterator[str]:
    for slot, leaf, sharding in _declared(plan, leaves):
        is_local = sharding.is_fully_addressable or sharding.is_fully_replicated
        if isinstance(leaf, np.ndarray) and not is_local:
            yield f"{plan.names[slot]}, shape {leaf.shape}, {describe(sharding)}"


def _declared(plan: Plan, leaves: Sequence[Any]) -> Iterator[tuple[int, Any, Any]]:
    """The slots, arrays and shardings for which the transform gives JAX a sharding."""
    if plan.transform.passes_shardings:
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


_DONATION_CHECKS = (_check_deleted, _check_donated_twice)
_CHECKS = (
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


def _note_captured(plan: Plan, error: Exception) -> None:
    lines = [
        f"  {name}, {jax.typeof(array).str_short()}, {describe(array.sharding)}"
        for name, array in captured_shards(plan.fun())
    ]
    if lines:
        head = f"{plan.fun_name} captures these sharded arrays:"
        error.add_note(message(head, lines, "Pass them as arguments."))
        see(error, "captured-array-on-explicit-axes")


def _note_object(plan: Plan, error: Exception) -> None:
    """Names the captured object that a function tried to change."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    objects = (frame.f_locals.get("self") for frame in reversed(frames))
    target = next(filter(_compat.is_graph_object, objects), None)
    for name, value in captured_values(plan.fun()):
        for path, node in nnx.iter_graph(value) if _compat.is_graph_object(value) else ():
            if node is target:
                text = (
                    f"This is {accessor(name, path)}, which {plan.fun_name} captures. Pass what a "
                    "function changes as one of its arguments."
                )
                if text not in str(error):  # of an inner function
                    error.args = (f"{error}\n{text}", *error.args[1:])
                    see(error, "changed-from-outside-its-trace")
                return
