"""What is computed once per structure: specs, names, and the pure function transformed by JAX."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh

from .. import _compat
from ..specs.fitting import in_type, is_equivalent
from .flatten import Flat
from .problems import Problem
from .pure import Pure
from .resolve import NamedLocation, locate, resolve, slot_names
from .retyping import first_axes
from .signature import Call, Parameters, Signature, align_specs
from .spec_checks import check_arrays, check_mesh, fit_specs, shape_of
from .structure import LEAF, NodeEntry, RefEntry, Structure, VariableEntry
from .targets import Target, argument_targets
from .transform import OnCommitted, Program, Transform
from .unflatten import parts, picker


class Plan(NamedTuple):
    """All that a call needs once its arguments are split.

    Attributes:
      transform: the transform, with the mesh that applies.
      fun_name: the name of the function.
      structure: the structure of the arguments that the plan serves.
      signature: the roles of the arguments.
      targets: the dynamic arguments and their parts.
      names: the expression for the array in each slot: ``model.up.kernel``.
      specs: the spec of each slot.
      shardings: the declared sharding of each slot, or None.
      out_specs: all specs that outputs can have.
      donated: the slots whose arrays are donated.
      attributes: the slots of arrays that are attributes of modules, each with the index of the
        module and the name. Empty if attributes of the caller's modules are not updated.
      placed_slots: the slots that are placed before the function runs: those of Variables and of
        these attributes, and all if committed arrays may be moved.
      placed_shardings: the shardings of these slots.
      pick_placed: picks these slots from all arrays.
      program: the pure function, transformed by JAX.
      fun: the function, held weakly.
      reported: what JAX has reported about an unfinished compilation.
    """

    transform: Transform
    fun_name: str
    structure: Structure
    signature: Signature
    targets: list[Target]
    names: list[str]
    specs: tuple[Any, ...]
    shardings: tuple[jax.sharding.Sharding | None, ...]
    out_specs: tuple[Any, ...]
    donated: frozenset[int]
    attributes: Mapping[int, tuple[int, Any]]
    placed_slots: tuple[int, ...]
    placed_shardings: list[jax.sharding.Sharding]
    pick_placed: Callable[[Sequence[Any]], Sequence[Any]]
    program: Program
    fun: Callable[[], Any]
    reported: dict[str, Any]


def make_plan(
    fun: Callable[..., Any],
    transform: Transform,
    parameters: Parameters,
    call: Call,
    flat: Flat,
    graph: bool,
    updates: bool,
    traced: MutableMapping[Hashable, Callable[..., Any]],
) -> Plan:
    """Makes the plan for a structure.

    Args:
      fun: the user's function.
      transform: what to do with it.
      parameters: its parameters.
      call: the arguments by their roles.
      flat: the arguments, flattened.
      graph: whether references are kept.
      updates: whether changes of structure are written back to the caller's objects.
      traced: existing pure functions of ``fun``, by their keys, so that options that do not affect
        the trace, such as compiler options, do not cause another one.

    Raises:
      ValueError: the specs do not fit the arguments.
      TypeError: an argument is not an array.
      StrictError: the transform is strict, and there would be a warning.
    """
    transform = transform.in_context()
    signature, structure, leaves = call.signature, flat.structure, flat.leaves
    prefixes = align_specs(transform.in_specs.tree, parameters, signature, transform.in_name)
    positional = [signature.names[i] for i in signature.dynamic]
    caller = f"{transform.name}: {transform.in_name}"
    targets = argument_targets(structure, call.tree, prefixes, positional, caller)
    locations = locate(structure, targets)
    names = [
        name or f"array {slot}" for slot, name in enumerate(slot_names(len(leaves), locations))
    ]
    if not transform.takes_any:
        check_arrays(Problem.ARGUMENT_IS_NOT_ARRAY, names, leaves)
    if transform.shards:
        check_mesh(transform, locations, flat.objects, leaves)
    resolved = resolve(locations, flat.objects, leaves, transform.spec_of)
    specs = fit_specs(
        transform,
        names,
        list(map(shape_of, leaves)),
        transform.input_specs(resolved.slots, leaves),
        resolved.on_indivisible,
    )
    donated = _donated_slots(structure, signature, targets, locations)
    open_spec = transform.spec_of(None)
    object_specs = {
        slot: open_spec if specs[slot] is None else specs[slot]
        for slots in structure.slots
        for slot in slots
    }
    batch = structure.root_slots if _has_activations(transform, targets) else ()
    pure = Pure(
        transform=transform,
        signature=signature._replace(donated=frozenset(), donated_keywords=frozenset()),
        structure=structure,
        targets=tuple(target.objects_only() for target in targets),
        known=known_variables(locations, object_specs, resolved.variables),
        object_specs=object_specs,
        on_indivisible=resolved.on_indivisible,
        donated=donated.intersection(object_specs),
        must_be_used=donated if transform.strict else frozenset(),
        names=names,
        uses=tuple(resolved.uses),
        graph=graph,
        updates=updates,
        typed=tuple(
            (slot, part)
            for slot in structure.root_slots
            if (part := in_type(specs[slot])) is not None
        ),
        batch_axes=first_axes((specs[slot] for slot in batch), transform.context),
        batch_slots=tuple(slot for slot in batch if not specs[slot]),
    )
    function = traced.get(pure.key)
    if function is None:
        function = traced.setdefault(pure.key, pure.function(fun))
    groups = pure.group_specs()
    shardings = tuple(map(transform.sharding_of, specs))
    attributes = _attributes(structure, leaves) if graph and updates else {}
    kept = structure.slots_of(VariableEntry).union(attributes)
    may_move = range(len(leaves)) if transform.on_committed == "move" else kept
    placed = {s: x for s, x in enumerate(shardings) if x is not None and s in may_move}
    return Plan(
        transform=transform,
        fun_name=function.__name__,
        structure=structure,
        signature=signature,
        targets=targets,
        names=names,
        specs=tuple(specs),
        shardings=shardings,
        out_specs=groups,
        donated=donated,
        attributes=attributes,
        placed_slots=tuple(placed),
        placed_shardings=list(placed.values()),
        pick_placed=picker(tuple(placed)),
        program=transform.compile(pure, function, specs, groups, tuple(sorted(donated))),
        fun=_weak(fun),
        reported={},
    )


def plan_key(transform: Transform, call: Call, flat: Flat) -> Hashable:
    """All of a call on which its plan depends."""
    structure, leaves = flat.structure, flat.leaves
    # Only arrays of JAX that are attributes of modules are placed.
    others = {s for s, x in enumerate(leaves) if type(x) is not _compat.ArrayImpl}
    others = others and others.intersection(structure.slots_of(NodeEntry))
    others = {s for s in others if not isinstance(leaves[s], jax.Array | jax.ShapeDtypeStruct)}
    return call.signature, structure, transform.key(leaves), frozenset(others)


def _attributes(structure: Structure, leaves: Sequence[Any]) -> dict[int, tuple[int, Any]]:
    """The slots of JAX arrays that are attributes of modules, each with its module and name."""
    return {
        slots[0]: (index, key)
        for index, entry in enumerate(structure.entries)
        if isinstance(entry, NodeEntry) and structure.slots[index]
        if issubclass(entry.type, nnx.Pytree)
        for key, (child, slots) in parts(structure, index).items()
        if child is LEAF and isinstance(leaves[slots[0]], jax.Array | jax.ShapeDtypeStruct)
    }


def _has_activations(transform: Transform, targets: Sequence[Target]) -> bool:
    written = [part.spec for target in targets for part in target.parts]
    has_own = any(getattr(spec, "activations", None) is not None for spec in written)
    return has_own or transform.activation_shardings is not None


def _donated_slots(
    structure: Structure,
    signature: Signature,
    targets: Sequence[Target],
    locations: Sequence[NamedLocation],
) -> frozenset[int]:
    are_donated = [i in signature.donated for i in signature.dynamic]
    are_donated += [k in signature.donated_keywords for k in signature.dynamic_keywords]
    donated = {
        target.name for target, is_donated in zip(targets, are_donated, strict=True) if is_donated
    }
    in_donated = (x.location.slots for x in locations if x.target.name in donated)
    return frozenset(slot for slots in in_donated for slot in slots) - structure.slots_of(RefEntry)


def known_variables(
    locations: Sequence[NamedLocation],
    object_specs: Mapping[int, Any],
    declared: Mapping[int, tuple[str, Any]],
) -> dict[int, tuple[str, Any]]:
    """The first name and the spec of each Variable: the declared one if it holds no array yet."""
    known: dict[int, tuple[str, Any]] = {}
    for found in locations:
        index, slots = found.location.entry, found.location.slots
        if index is not None and index not in known:
            spec = object_specs.get(slots[0]) if slots else declared.get(index, ("", None))[1]
            known[index] = found.name, spec
    return known


def as_declared(plan: Plan, leaves: Sequence[Any]) -> list[Any]:
    """Arrays to trace with: with the declared sharding if a call would place them there.

    This includes abstract ones, if JAX does not get the declared shardings as an option, or if they
    have a type of their own, as those that ``nnx.eval_shape`` makes while a mesh is in context.
    """
    placed, by_type = frozenset(plan.placed_slots), not plan.transform.passes_shardings
    return [
        abstract(leaf, sharding)
        if sharding
        and (
            slot in placed
            or (isinstance(leaf, jax.ShapeDtypeStruct) and (by_type or leaf.sharding))
        )
        and _is_open(leaf, sharding, plan.transform.on_committed)
        else leaf
        for slot, (leaf, sharding) in enumerate(zip(leaves, plan.shardings, strict=True))
    ]


_DATA = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def abstract(leaf: Any, sharding: jax.sharding.Sharding | None = None) -> Any:
    """The ``jax.ShapeDtypeStruct`` of an array, with a sharding."""
    if sharding is None and not isinstance(leaf, _DATA):
        return leaf
    aval = jax.typeof(leaf)
    weak_type = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak_type)


def is_committed(leaf: Any) -> bool:
    """Whether ``leaf`` is an array that must stay on its devices, perhaps an abstract one."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        is_abstract = isinstance(getattr(leaf.sharding, "mesh", None), AbstractMesh)
        return leaf.sharding is not None and not is_abstract
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.committed


def _is_open(leaf: Any, declared: jax.sharding.Sharding, on_committed: OnCommitted) -> bool:
    """Whether a call moves an array to its declared sharding."""
    if isinstance(leaf, jax.core.Tracer) or _compat.is_ref(leaf):
        return False
    if not is_committed(leaf):
        return isinstance(leaf, (*_DATA, jax.ShapeDtypeStruct))
    if on_committed == "leave" or is_equivalent(leaf.sharding, declared, leaf.ndim):
        return False
    if on_committed == "reshard":
        return leaf.sharding.device_set == declared.device_set  # type: ignore[no-any-return]
    return on_committed == "move" or leaf.sharding.is_equivalent_to(declared, leaf.ndim)


def _weak(fun: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(fun)
    except TypeError:  # some NumPy callables; nothing is kept for them beyond their wrappers
        return lambda: fun
