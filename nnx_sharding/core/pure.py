"""The pure function of flat arrays that JAX transforms instead of the user's function.

It takes the arrays of the arguments, by slot, and does in a trace, from the top of this file on:

    build a copy of the graph around the tracers            unflatten.py
    call the user's function on it
    flatten the graph again, with the old objects first     flatten.py
    find the spec of each array                             resolve.py
    return what changed                                     outcome.py

The *plan* (``plan.py``) has what is known before the trace: the structure of the arguments, the
names and specs of their arrays. The *caller* (``call_context.py``) is the call that is traced.
An *index* is that of an object in a structure, a *slot* the position of an array.

Outputs are as few as possible: an array that the function did not change is not an output, and the
caller's object keeps it. What the outputs mean is known only after tracing and may depend on
shapes, so it is the static part of what is returned, of which JAX keeps one for each trace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from .. import _compat
from ..specs.fitting import first_axes
from ..specs.types import Arrays
from .arguments import split_argument
from .call_context import Caller, called_by, current_caller
from .constrain import mesh_of_types, shape_of
from .flatten import Flat, flatten
from .functions import name_as, name_of
from .interrupts import deliver_signals
from .known_faults import work_around_faults
from .outcome import pack
from .problems import not_arrays
from .rebuild import kept_places
from .resolve import NamedLocation, Resolved, check_filters, locate, resolve, slot_names
from .retyping import RetypedArrays
from .signature import join_call
from .snapshot import Snapshot
from .spec_checks import fit_specs
from .static_places import not_copied
from .structure import NodeEntry, Structure
from .trace_checks import check_captured, check_objects, check_output
from .transform import Sharded
from .unflatten import Unflattened, assemble, restore, unflatten

if TYPE_CHECKING:  # a plan makes its pure functions
    from .plan import Plan

R = TypeVar("R")


def pure_function(plan: Plan, fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function to pass to JAX, with the user's names for its many arguments.

    It has no reference to ``fun``, which cached traces must not keep alive: it calls the function
    of the call that is being traced.
    """

    def pure(*leaves: object) -> Any:
        caller = current_caller()
        assert caller is not None
        if caller.plan is not None:
            deliver_signals()  # nothing has run yet, and tracing may take long
        withdraw = None  # takes back what the observer was told
        if caller.observer is not None:
            withdraw = caller.observer.traced(plan, caller.fun, leaves, nested=caller.nested)
        try:
            with called_by(None):  # what the function calls makes traces of its own
                return on_one_chunk(_trace, plan, caller, leaves)
        except BaseException:
            if withdraw is not None:
                withdraw()
            raise

    name_as(pure, fun, plan.names)
    return pure


def on_one_chunk(function: Callable[..., R], *args: object) -> R:
    """Calls a function with room for its calls in one chunk of Python's stack.

    CPython releases before the fix of https://github.com/python/cpython/issues/142183 in March 2026
    map and unmap memory at each call that crosses the end of a 16 KiB chunk. Traces are deep enough
    to make such calls in their loops, which can take a third of their time.
    """
    return function(*args)


# This frame takes half of a chunk of 256 KiB; the frames of about 800 further calls the rest.
on_one_chunk.__code__ = on_one_chunk.__code__.replace(co_stacksize=1 << 14)


def _trace(plan: Plan, caller: Caller, leaves: Arrays) -> tuple[Any, ...]:
    """Builds the graph around tracers, and returns the outputs of the user's function on it.

    Static objects that cannot be copied are the caller's own: what the function changes in them is
    undone when the trace ends.
    """
    arrays = plan.transform.retype_inputs(plan, leaves, nested=caller.nested)
    # Copies of all others, or another thread's changes would be taken for the function's.
    unique = {index: caller.objects[index] for index in not_copied(plan.structure)}
    unflattened = unflatten(plan.structure, arrays.inside, unique)
    try:
        return call_and_pack(plan, caller, arrays, unflattened)
    finally:
        restore(plan.structure, unflattened.objects, unique)


def call_and_pack(
    plan: Plan, caller: Caller, arrays: RetypedArrays, unflattened: Unflattened
) -> tuple[Any, ...]:
    """Calls the user's function; returns its outputs by spec, and the outcome.

    Raises errors for what it must not return or change.

    Args:
      plan: the plan of the call.
      caller: the call that is traced.
      arrays: the arrays of the arguments.
      unflattened: the arguments, made of the arrays inside the trace.
    """
    transform = plan.transform
    fun_name = name_of(caller.fun)
    name, strict = transform.name, transform.strict
    output, before = _call_function(plan, caller, arrays, unflattened)
    # Loops return the Variables that they carry, which without graph updates is else refused.
    carried = transform.carried_objects(plan)
    after = _flatten_after(plan, output, unflattened, carried, before)
    locations = _locate_new(plan, output, after.structure)
    names = _names_after(plan, after.structure, locations)
    if not transform.returns_any:
        head = f"{name}: these results are not arrays:"
        if error := not_arrays(head, names, after.leaves, "Return only arrays or numbers."):
            raise error
    specs = _output_specs(plan, arrays.leaves, after, locations, names)
    option = transform.out_name
    after = arrays.leave_with_specs(plan.structure, after, specs, names, name=name, option=option)
    transform.check_outputs(fun_name, names, after.leaves, specs)
    check_captured(caller.fun, arrays.leaves, name=name, strict=strict)
    if isinstance(transform, Sharded):
        mesh = mesh_of_types(arrays.leaves, transform.context)
        work_around_faults(mesh, name=name, strict=strict, nested=caller.nested)
    return pack(plan, fun_name, arrays.leaves, after, specs, names)


def _call_function(
    plan: Plan, caller: Caller, arrays: RetypedArrays, unflattened: Unflattened
) -> tuple[Any, Snapshot]:
    """Returns what the user's function returns, and a snapshot of its arguments before the call."""
    statics = [assemble(child, iter(()), unflattened.objects) for child in plan.structure.statics]
    args, kwargs = join_call(plan.signature, statics, unflattened.root)
    # In a trace, the types of arrays may say over which axes the rows of the batch are sharded.
    types = (getattr(jax.typeof(arrays.leaves[s]), "sharding", None) for s in plan.batch_slots)
    batch_axes = plan.batch_axes | first_axes(types, plan.transform.context)
    plan_in_trace = dataclasses.replace(plan, batch_axes=batch_axes)
    tracing = plan.transform.tracing(plan_in_trace, caller, unflattened, arrays.inside)
    with arrays.context(), tracing as call:
        # Within the context: what it sets, such as tags of modules, is not a change by the user.
        before = Snapshot(plan.structure, unflattened.objects)
        return call(*args, **kwargs), before


def _flatten_after(
    plan: Plan, output: object, unflattened: Unflattened, carried: Set[int], before: Snapshot
) -> Flat:
    """Flattens the graph after the call, with the objects of the arguments first.

    Raises errors for what the function must not do to them. Without graph updates, the output must
    not hold Variables of the arguments, except the ``carried`` ones.
    """
    structure, updates, name = plan.structure, plan.updates, plan.transform.name
    # JAX keeps the structure with the trace, which must not keep the caller's statics alive.
    static_ids = {_compat.identity(static.value) for static in structure.identities()}
    nodes = {i for i, entry in enumerate(structure.entries) if isinstance(entry, NodeEntry)}
    object_ids = {_compat.identity(unflattened.objects[i]) for i in structure.static_indices()}
    after = flatten(
        output,
        graph=plan.graph,
        first_objects=unflattened.objects,
        # Without updates the caller's modules stay unchanged, and results are new modules.
        replaced=frozenset() if updates else nodes - carried,
        held_weakly=static_ids | object_ids,
        snapshot=before,
    )
    if not plan.graph:
        after.structure.check_tree()  # of the output; the arguments have been checked
    check_objects(structure, after, plan.graph_arguments, static_ids, name=name, updates=updates)
    if not updates:
        check_output(after, plan.variables, carried, name=name)
    return after


def _locate_new(plan: Plan, output: object, after: Structure) -> list[NamedLocation]:
    """Locates the output, and the arguments if something new may be in them.

    Known Variables keep their spec and name, so only new things need a location.
    """
    transform = plan.transform
    option = f"{transform.name}: {transform.out_name}"
    result = split_argument("output", transform.out_specs.tree, output, after.root, option)
    has_new = plan.updates and not _is_unchanged(plan.structure, after)
    return locate(after, [*plan.graph_arguments, result] if has_new else [result])


def _is_unchanged(before: Structure, after: Structure) -> bool:
    """Whether the objects are the same as before, and no module changed or holds arrays."""
    return len(before.entries) == len(after.entries) and all(
        new == old and not slots
        for old, new, slots in zip(before.entries, after.entries, after.slots, strict=True)
        if isinstance(old, NodeEntry)
    )


def _names_after(plan: Plan, after: Structure, locations: Sequence[NamedLocation]) -> list[str]:
    """Returns the names of the arrays after the call; known Variables keep their names."""
    names = slot_names(after.num_leaves, locations)
    for index, (name, _) in plan.variables.items():
        for slot in after.slots[index]:
            names[slot] = name
    return names


def _output_specs(
    plan: Plan,
    leaves: Arrays,
    after: Flat,
    locations: Sequence[NamedLocation],
    names: Sequence[str],
) -> list[Any]:
    """Returns the final spec of each array after the call.

    What was updated keeps its spec. The user's rules for inputs and outputs decide on what is new.

    Args:
      plan: the plan of the call.
      leaves: the arrays before the call, by slot.
      after: the graph after the call.
      locations: where new Variables and arrays are.
      names: the expression for each array after the call.

    Raises:
      ValueError: a spec does not fit its array.
    """
    transform = plan.transform
    resolved = resolve(
        locations,
        after.objects,
        after.leaves,
        transform.spec_of,
        decided=plan.variables,
        decided_arguments={argument.name for argument in plan.graph_arguments},
    )
    check_filters((*plan.uses, *resolved.uses), name=transform.name, strict=transform.strict)
    old_shapes = _keep_specs(plan, leaves, after.structure, resolved)
    open_spec = transform.spec_of(None)
    written = transform.written_specs(plan, after)
    declared = (written.get(slot, spec) for slot, spec in enumerate(resolved.slots))
    specs = [open_spec if spec is None else spec for spec in declared]
    shapes = [shape_of(leaf) for leaf in after.leaves]
    return fit_specs(
        transform, names, shapes, specs, resolved.on_indivisible, outputs=True, before=old_shapes
    )


def _keep_specs(
    plan: Plan, leaves: Arrays, after: Structure, resolved: Resolved
) -> dict[int, tuple[int, ...] | None]:
    """Gives what was updated the specs that it had, in ``resolved``.

    Returns the old shapes of Variables, by new slot. ``leaves`` are the arrays before the call.
    """
    old_shapes: dict[int, tuple[int, ...] | None] = {}
    for index in plan.variables:
        old_slots = plan.structure.slots[index]
        for position, slot in enumerate(after.slots[index]):
            resolved.slots[slot] = resolved.variables[index].spec
            if not old_slots:
                continue
            # A Variable may hold more arrays than before, in a larger pytree.
            old_slot = old_slots[min(position, len(old_slots) - 1)]
            old_shapes[slot] = shape_of(leaves[old_slot])
            if old_slot in plan.on_indivisible:
                resolved.on_indivisible[slot] = plan.on_indivisible[old_slot]
    for index, slots in enumerate(plan.structure.slots):
        if not slots or not isinstance(after.entries[index], NodeEntry):
            continue
        for slot, old_slot in kept_places(plan.structure, after, index):
            if resolved.slots[slot] is None:  # an attribute, as what it replaces
                resolved.slots[slot] = plan.object_specs[old_slot]
    return old_shapes
