"""Checks: each returns the error for one kind of mistake in the arguments of a call, or None.

Checks run only after JAX has refused a call (``failures.py``), so none has to be fast. A check gets
the plan of the call and the arrays, by slot. Most checks are written as functions that yield a line
of the message for each wrong argument, and the decorator :func:`as_check` makes the check.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..errors import DonatedError, listed_error
from ..specs.fitting import axes_of, axes_of_type, describe, keep_axes, pad_entries
from ..specs.paths import enclosing_paths
from ..specs.types import AnyArray, AnyMesh, Arrays, Axis, AxisName
from .constrain import shape_of
from .declared import is_committed
from .plan import Plan
from .problems import (
    DeclaredArray,
    arguments_not_arrays,
    array_line,
    committed_elsewhere,
    join_paths,
)
from .spec_checks import fit_specs
from .structure import Structure, VariableEntry, locations_in
from .transform import Sharded

# A function of the plan and the arrays of a call: returns the error, or None if nothing is wrong.
Check: TypeAlias = Callable[..., Exception | None]


def first_mistake(plan: Plan, leaves: Arrays, error: Exception) -> Exception | None:
    """Returns the error for the first mistake that the arguments show; None if they show none.

    Args:
      plan: the plan of the call.
      leaves: the arrays of the call, by slot.
      error: the error by which JAX refused the arrays. Its class says which mistakes are possible.
    """
    checks: Sequence[Check] = ()
    if isinstance(error, TypeError):
        checks = _check_arrays, _check_abstract
    elif isinstance(error, jax.errors.JaxRuntimeError):
        # Some of these errors say that an argument is deleted or donated. Most others come from the
        # program while it runs, so the arguments are right.
        checks = (_check_deleted, _check_donated_twice) if _compat.is_deleted_error(error) else ()
    elif isinstance(error, ValueError | RuntimeError):
        checks = _CHECKS
    # The first mistake counts: an array of the wrong rank, for example, also has a wrong type.
    reasons = (check(plan, leaves) for check in checks)
    return next((reason for reason in reasons if reason is not None), None)


def as_check(
    anchor: str, head: str, remedy: str, error: type[Exception] = ValueError
) -> Callable[[Callable[..., Iterator[str]]], Check]:
    """Returns a decorator that makes a check of a function which yields lines of a message.

    The function yields a line for each wrong argument. The error has ``head``, then the lines, then
    ``remedy``. If there are no lines, the check returns None.

    Args:
      anchor: the section of docs/errors.md that the error refers to.
      head: the first line, with ``{name}`` for the transform and ``{fun_name}`` for the function.
      remedy: what to do, with ``{in_name}`` for the option with the specs of inputs.
      error: the type of the error.
    """

    def decorate(lines_of: Callable[..., Iterator[str]]) -> Check:
        """Returns the check whose error has the lines that a function yields."""

        # ``details`` are the arrays, and for some checks what a program was compiled for.
        def check(plan: Plan, *details: object) -> Exception | None:
            first = head.format(name=plan.transform.name, fun_name=plan.fun_name)
            last = remedy.format(in_name=plan.transform.in_name)
            return listed_error(error, first, [*lines_of(plan, *details)], last, anchor)

        return check

    return decorate


def _check_arrays(plan: Plan, leaves: Arrays) -> Exception | None:
    """Returns an error for leaves that are not arrays, unless the transform has no shardings.

    A transform without shardings checks this itself.
    """
    is_sharded = isinstance(plan.transform, Sharded)
    return arguments_not_arrays(plan.names, leaves) if is_sharded else None


def _check_abstract(plan: Plan, leaves: Arrays) -> Exception | None:
    """Returns an error for abstract arrays, which says for random streams how to fill them."""
    abstract = {x for x, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)}
    remedies = ["Pass them to lower or eval_shape."]
    random = abstract.intersection(_slots_of_streams(plan.structure))
    if random:  # after load_safetensors, only these are abstract
        remedies.append(
            "Files of weights have no random streams (nnx.RngState): after load_safetensors, fill "
            "them by nnx.update(model, nnx.state(make(), nnx.RngState)), where make() returns such "
            "a model; a large one is made within jit."
        )
    if random != abstract:
        remedies.append(
            "If nnx.eval_shape did not make them, a traced function has stored an intermediate "
            "value where it outlives the trace."
        )
    return listed_error(
        TypeError,
        f"{plan.transform.name}: these arguments are abstract, without data:",
        [array_line(plan.names[slot], leaves[slot]) for slot in sorted(abstract)],
        " ".join(remedies),
        anchor="abstract-arguments",
    )


def _slots_of_streams(structure: Structure) -> Iterator[int]:
    """Yields the slots of the keys and counts of random streams."""
    for location in locations_in(structure):
        index = location.object_index
        entry = None if index is None else structure.entries[index]  # None for a bare array
        if isinstance(entry, VariableEntry) and issubclass(entry.type, nnx.RngState):
            yield from location.slots


@as_check(
    "used-after-donation",
    "these arguments are deleted, or were donated to an earlier call:",
    "Use what that call returned, or do not donate them (donate_argnums, donate_argnames).",
    DonatedError,
)
def _check_deleted(plan: Plan, leaves: Arrays) -> Iterator[str]:
    """Yields a line for each array whose buffers are gone."""
    for name, leaf in zip(plan.names, leaves, strict=True):
        if _is_concrete(leaf) and leaf.is_deleted():
            yield array_line(name, leaf)


@as_check(
    "donated-twice",
    "these arrays are donated, and passed once more in the same call:",
    "Pass each once, or donate a copy: x.copy() of an array, nnx_sharding.place(model, None, "
    "copy=True) of a model (a copy by nnx.clone has the same arrays).",
    DonatedError,
)
def _check_donated_twice(plan: Plan, leaves: Arrays) -> Iterator[str]:
    """Yields a line for each array that is passed several times in a call that donates it."""
    slots_of: dict[int, list[int]] = {}  # by the id of an array: the slots that it is in
    for slot, leaf in enumerate(leaves):
        if _is_concrete(leaf):
            slots_of.setdefault(id(leaf), []).append(slot)
    for slots in slots_of.values():
        if len(slots) > 1 and not plan.donated.isdisjoint(slots):
            names = ", ".join(plan.names[slot] for slot in slots)
            yield f"  {jax.typeof(leaves[slots[0]]).str_short()}: {names}"


@as_check(
    "axes-that-arrays-do-not-have",
    "{name}: these arrays do not have the axis along which they are mapped:",
    "Give each in {in_name} an axis that it has, or None: in a module by StateAxes({{nnx.Param: 0, "
    "...: None}}). Random streams get one by nnx.split_rngs; values of a hijax type have none.",
)
def _check_axes(plan: Plan, leaves: Arrays) -> Iterator[str]:
    """Yields a line for each array that has too few dimensions for its axis."""
    for name, leaf, spec in zip(plan.names, leaves, plan.specs, strict=True):
        if isinstance(spec, Axis) and spec.index is not None:  # None: the array is not mapped
            ndim = np.ndim(leaf)
            if not -ndim <= spec.index < ndim:
                yield f"{array_line(name, leaf)}: axis {spec.index}"


def _check_shapes(plan: Plan, leaves: Arrays) -> Exception | None:
    """Returns the error for specs that do not fit the shapes.

    The plan may have been made for the shapes of an earlier call, so the shapes of this call may
    not have been checked.
    """
    shapes = [*map(shape_of, leaves)]
    try:
        fit_specs(plan.transform, plan.names, shapes, plan.specs, on_indivisible={})
    except ValueError as error:
        return error.with_traceback(None)  # the caller raises it where JAX's error was
    return None


@as_check(
    "declared-otherwise-than-its-type",
    "{name}: on a mesh with Explicit axes the sharding is part of an array's type, and these "
    "specs differ from it:",
    "Without {in_name}, the types decide.",
)
def _check_types(plan: Plan, leaves: Arrays) -> Iterator[str]:
    """Yields a line for each array whose type has another spec over Explicit axes than declared.

    Arrays for which JAX does not compare the two are left out.
    """
    transform = plan.transform
    if not isinstance(transform, Sharded):
        return
    for name, leaf, declared in zip(plan.names, leaves, plan.specs, strict=True):
        aval = jax.typeof(leaf)
        actual = getattr(aval, "sharding", None)  # a type of hijax has another attribute
        spec = getattr(declared, "spec", declared)  # ``declared`` is a sharding or a spec
        if not isinstance(actual, NamedSharding) or not isinstance(spec, PartitionSpec):
            continue
        if not _is_compared(transform, leaf, actual.mesh):
            continue
        explicit = _compared_axes(transform, actual.mesh)
        rank = len(aval.shape)
        if _in_type(actual.spec, explicit, rank) == _in_type(spec, explicit, rank):
            continue
        if actual.mesh.empty:  # the enclosing trace has given its tracer no mesh
            change = "declare it in the jit around, too"
        else:
            change = f"write {actual.spec!r}"
        # The user passes a module, not its arrays, so the remedy reshards the module.
        in_argument = enclosing_paths(name)
        argument, target = (in_argument[0], "sharding") if in_argument else (name, repr(spec))
        text = f"  {name} is {aval.str_short()}, declared {spec!r}: {change}, or pass "
        yield f"{text}nnx_sharding.reshard({argument}, {target})"


def _is_compared(transform: Sharded, leaf: AnyArray, mesh: AnyMesh) -> bool:
    """Whether JAX compares the type of an argument with the declared spec, and refuses another one.

    If not, JAX moves the argument to the declared sharding instead.

    Args:
      transform: says whether JAX gets the declared shardings as an option.
      mesh: the mesh in the type of the argument, which may be empty.
    """
    if mesh.empty and not isinstance(leaf, jax.core.Tracer):
        return False  # the array is on no mesh
    # If `jax.jit` gets shardings as an option, it moves arrays that are not committed.
    return is_committed(leaf) or not transform.passes_shardings


def _compared_axes(transform: Sharded, mesh: AnyMesh) -> frozenset[AxisName]:
    """Returns the Explicit axes over which JAX compares the type of an array with its spec.

    Args:
      transform: has the mesh that applies to the call (``context``), and the axes that specs may
        name (``usable_axes``; None for all axes).
      mesh: the mesh in the type of the array.
    """
    # If JAX gets shardings as an option, it compares on the mesh of the type. Otherwise it compares
    # on the mesh that applies to the call.
    if not transform.passes_shardings and transform.context is not None:
        mesh = transform.context
    explicit = axes_of_type(mesh, AxisType.Explicit)
    usable = transform.usable_axes  # the only axes that specs may name, as in `shard_map`
    return explicit & usable if usable else explicit


def _in_type(spec: PartitionSpec, explicit: Collection[Any], rank: int) -> tuple[Any, ...]:
    """Returns the part of a spec over Explicit axes, as the type of an array of this rank has it.

    The result can be compared: it is a tuple of the axes of each dimension, the unreduced axes, and
    the reduced axes. For ``P("a", "b")``, the Explicit axis ``a`` and rank 3, it is
    ``((("a",), (), ()), frozenset(), frozenset())``.
    """
    part = keep_axes(spec, explicit)
    return tuple(map(axes_of, pad_entries(part, rank))), part.unreduced, part.reduced


def _check_committed(plan: Plan, leaves: Arrays) -> Exception | None:
    """Returns the error for committed arrays that have another sharding than declared."""
    return committed_elsewhere(plan.transform.name, _other_shardings(plan, leaves, is_committed))


@as_check(
    "committed-to-another-sharding",
    "{name}: these references have a sharding other than declared, and a jax.Ref cannot be "
    "resharded:",
    "Create them from arrays with the declared sharding, or declare the one they have.",
)
def _check_ref_shardings(plan: Plan, leaves: Arrays) -> Iterator[str]:
    """Yields a line for each reference that has another sharding than declared."""
    for ref in _other_shardings(plan, leaves, _is_concrete_ref):
        yield ref.line()


def _other_shardings(
    plan: Plan, leaves: Arrays, is_wanted: Callable[[Any], bool]
) -> Iterator[DeclaredArray]:
    """Yields arrays that have another sharding than declared.

    Arrays on other devices than declared are left out, because `_check_devices` reports them, and
    says what to do. References are not left out, because they cannot be moved as it advises.

    Args:
      is_wanted: selects arrays with a ``sharding``.
    """
    for slot, declared in passed_shardings(plan).items():
        leaf = leaves[slot]
        if not is_wanted(leaf):
            continue
        if not _compat.is_ref(leaf) and leaf.sharding.device_set != declared.device_set:
            continue
        if not leaf.sharding.is_equivalent_to(declared, leaf.ndim):
            yield DeclaredArray(plan.names[slot], leaf, declared)


def passed_shardings(plan: Plan) -> dict[int, Sharding]:
    """Returns the shardings of inputs that JAX gets as an option, by slot."""
    if not isinstance(plan.transform, Sharded) or not plan.transform.passes_shardings:
        return {}
    return {slot: sharding for slot, sharding in enumerate(plan.shardings) if sharding is not None}


@as_check(
    "numpy-arguments-across-processes",
    "{name}: NumPy arguments cannot be sharded across processes: each process holds its own copy:",
    "Make global arrays of them: with nnx_sharding.placement.shard_batches, or "
    "jax.make_array_from_process_local_data, if each process has its own rows; with "
    "nnx_sharding.partition.with_sharding_constraint if each has the full array.",
)
def _check_host_arrays(plan: Plan, leaves: Arrays) -> Iterator[str]:
    """Yields a line for each NumPy array that would be divided among processes."""
    for slot, sharding in passed_shardings(plan).items():
        leaf = leaves[slot]
        is_local = sharding.is_fully_addressable or sharding.is_fully_replicated
        if isinstance(leaf, np.ndarray) and not is_local:
            yield f"  {plan.names[slot]}, shape {leaf.shape}, {describe(sharding)}"


@as_check(
    "different-devices",
    "{name}: incompatible devices. A program runs on one set of devices in one order, but these "
    "are on, or declared for, different ones:",
    "Use one mesh for all; move models with nnx_sharding.place and arrays with jax.device_put, or "
    "pass on_committed='move'.",
)
def _check_devices(plan: Plan, leaves: Arrays) -> Iterator[str]:
    """Yields a line for each tuple of devices, with the arguments on it, if there are several."""
    shardings: list[tuple[Any, str]] = []  # pairs of a sharding and its argument or option
    for name, leaf, sharding in zip(plan.names, leaves, plan.shardings, strict=True):
        shardings.append((sharding, name))
        if _is_concrete_ref(leaf) or is_committed(leaf):
            shardings.append((leaf.sharding, name))
    shardings += [(spec, plan.transform.out_name) for spec in plan.out_specs]
    # By devices: the names of arguments and options, as the keys of a dict, which keeps their order
    # and has each only once.
    names_on: dict[tuple[jax.Device, ...], dict[str, None]] = {}
    for sharding, name in shardings:
        devices = _compat.device_assignment(sharding)
        if devices is not None:
            names_on.setdefault(devices, {})[name] = None
    if len(names_on) > 1:
        for devices, names in names_on.items():
            ids = ", ".join(str(device.id) for device in devices)
            yield f"  {join_paths([*names])}: {devices[0].platform} {ids}"


_CHECKS: Sequence[Check] = (
    *(_check_axes, _check_deleted, _check_shapes, _check_types, _check_committed),
    *(_check_ref_shardings, _check_host_arrays, _check_devices, _check_donated_twice),
)


def _is_concrete(leaf: AnyArray) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def _is_concrete_ref(leaf: AnyArray) -> bool:
    return _compat.is_ref(leaf) and not isinstance(leaf, jax.core.Tracer)
