"""The pure function of flat arrays that JAX transforms instead of the user's function.

The user's function takes modules and may change them. The function that JAX traces takes all arrays
of the modules as positional arguments, and takes these steps:

    build a copy of the modules around the tracers               unflatten.py
    call the user's function on the copy
    flatten the result, with the objects of the arguments first  flatten.py
    find the spec (a sharding, or a dimension) of each array     resolve.py
    return only the arrays that are new                          outcome.py

A *structure* is to a graph of modules what a treedef is to a pytree: all but the arrays, as a table
of objects. The *index* of an object is its position in this table, and the *slot* of an array its
position in the flat list. The *plan* (``plan.py``) is what is known before the trace: the structure
of the arguments, the names and specs of their arrays. The *caller* (``call_context.py``) is the
call being traced.

An array that the function did not change is no output, because the caller's object keeps it. Where
each output belongs is known only after tracing, so each trace returns this as a static part.
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
from .filter_uses import check_filters
from .flatten import Flat, flatten
from .functions import name_as, name_of
from .interrupts import deliver_signals
from .known_faults import work_around_faults
from .locations import NamedLocation, locate, slot_names
from .outcome import pack
from .problems import not_arrays
from .rebuild import slots_before
from .resolve import Resolved, resolve
from .retyping import RetypedArrays, recorded_leaving
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
    """Returns the function of arrays that JAX traces, with the user's names for its arguments.

    The pure function calls the user's function of the call that is being traced. It has no
    reference to ``fun``, because JAX's cache of traces would keep ``fun`` alive.
    """

    def pure(*leaves: object) -> Any:
        """Traces the user's function on these arrays; returns what `call_and_pack` does."""
        caller = current_caller()
        assert caller is not None  # a call has asked JAX for this trace
        # A call at top level has a plan, and may have deferred Ctrl-C. Nothing has run yet, and
        # tracing may take long, so signals are delivered here.
        if caller.plan is not None:
            deliver_signals()
        withdraw = None  # takes the record of this trace back, if the trace fails
        if caller.observer is not None:  # the log of retraces
            withdraw = caller.observer.traced(plan, caller.fun, leaves, nested=caller.nested)
        try:
            # Calls of lifted functions within this trace are not part of this call.
            with called_by(None):
                return on_one_chunk(_trace, plan, caller, leaves)  # calls `_trace`
        except BaseException:
            if withdraw is not None:
                withdraw()
            raise

    name_as(pure, fun, plan.names)  # JAX's messages show these names
    return pure


def on_one_chunk(function: Callable[..., R], *args: object) -> R:
    """Calls a function with room for its calls in one chunk of Python's stack.

    CPython releases before the fix of https://github.com/python/cpython/issues/142183 in March 2026
    map and unmap memory at each call that crosses the end of a 16 KiB chunk. Traces are deep enough
    to make such calls in their loops, which can take a third of their time.
    """
    return function(*args)


# This frame takes half of a chunk of 256 KiB, which leaves room for about 800 further calls.
on_one_chunk.__code__ = on_one_chunk.__code__.replace(co_stacksize=1 << 14)


def _trace(plan: Plan, caller: Caller, leaves: Arrays) -> tuple[Any, ...]:
    """Calls the user's function on modules made of tracers; returns the arrays that are new.

    The function gets copies of the caller's objects, and when it has returned, its changes of these
    are found. In the caller's own objects, changes of another thread would be found as well.

    Args:
      leaves: the tracers of all arrays of the arguments, by slot.
    """
    # The function may see other types than JAX gives, such as Auto instead of Explicit mesh axes:
    # ``arrays.inside`` has the same arrays with the types that the function sees.
    arrays = plan.transform.retype_inputs(plan, leaves, nested=caller.nested)
    # A static object that is equal only to itself, such as a logger in a module, is not copied,
    # because a copy would not be equal. So the function gets the caller's own.
    uncopied = {index: caller.objects[index] for index in not_copied(plan.structure)}
    unflattened = unflatten(plan.structure, arrays.inside, uncopied)
    try:
        return call_and_pack(plan, caller, arrays, unflattened)
    finally:
        # A trace must not change the caller's objects. So static objects that were not copied get
        # the content back that the plan's structure describes; they may hold tracers.
        restore(plan.structure, unflattened.objects, uncopied)


def call_and_pack(
    plan: Plan, caller: Caller, arrays: RetypedArrays, unflattened: Unflattened
) -> tuple[Any, ...]:
    """Calls the user's function; returns the new arrays, grouped by spec, and what they mean.

    Args:
      plan: the plan of the call.
      caller: the call that is traced.
      arrays: the arrays of the arguments, with their outer types and as the function sees them.
      unflattened: copies of the arguments, made of the arrays that the function sees.

    Returns:
      One tuple of arrays for each spec, then their :class:`~.outcome.Outcome`, which is static.

    Raises:
      ValueError: the function returned or changed what it must not. There are other errors, too.
    """
    transform = plan.transform
    fun_name = name_of(caller.fun)
    name, strict = transform.name, transform.strict
    # 1. Call. ``left`` records the arrays that modules of a strategy computed on Auto axes.
    with recorded_leaving() as left:
        output, snapshot = _call_function(plan, caller, arrays, unflattened)
    # 2. Flatten the arguments and the output as they are now. Loops may return the Variables that
    # they carry, even with ``graph_updates=False``.
    carried = transform.carried_objects(plan)
    flat_after = _flatten_after(plan, output, unflattened, carried, snapshot)
    # 3. The name and the spec of each array, by slot. Variables of the arguments keep their names.
    locations = _locate_new(plan, flat_after.structure)
    names = slot_names(flat_after.structure.num_leaves, locations)
    for index, (variable_name, _) in plan.variables.items():
        for slot in flat_after.structure.slots[index]:
            names[slot] = variable_name
    if not transform.returns_any:
        head = f"{name}: these results are not arrays:"
        if error := not_arrays(head, names, flat_after.leaves, "Return only arrays or numbers."):
            raise error
    specs = _output_specs(plan, arrays.leaves, flat_after, locations, names)
    # 4. Replace ``flat_after.leaves``: results of modules of a strategy get their declared
    # shardings, then all arrays get the types of the surrounding trace.
    if isinstance(transform, Sharded) and transform.passes_shardings:
        flat_after = left.as_declared(flat_after, specs)
    option = transform.out_name
    flat_after = arrays.with_declared_types(
        plan.structure, flat_after, specs, names, name=name, option=option
    )
    # 5. Check the whole trace for outputs that the transform refuses, captured sharded arrays, and
    # operations that XLA would compute wrong.
    transform.check_outputs(fun_name, names, flat_after.leaves, specs)
    check_captured(caller.fun, arrays.leaves, name=name, strict=strict)
    if isinstance(transform, Sharded):
        mesh = mesh_of_types(arrays.leaves, transform.context)
        work_around_faults(mesh, name=name, strict=strict, nested=caller.nested)
    # 6. The outputs of the program, and what they mean for the caller's objects.
    return pack(plan, fun_name, arrays.leaves, flat_after, specs, names)


def _call_function(
    plan: Plan, caller: Caller, arrays: RetypedArrays, unflattened: Unflattened
) -> tuple[Any, Snapshot]:
    """Calls the user's function; returns its result, and a snapshot of its arguments before that.

    Args:
      caller: the call that is traced; ``caller.fun`` is the user's function.
      arrays: the tracers of the arguments, with their outer types and as the function sees them.
      unflattened: copies of the dynamic arguments, which hold the arrays that the function sees.
    """
    no_arrays = iter(())  # static arguments hold no arrays
    statics = [assemble(child, no_arrays, unflattened.objects) for child in plan.structure.statics]
    args, kwargs = join_call(plan.signature, statics, unflattened.root)
    # Modules of a strategy shard the rows of activations over the mesh axes that shard the rows of
    # the batch. The plan has the declared axes, and the types of tracers may name further axes.
    batch_types = [jax.typeof(arrays.leaves[slot]) for slot in plan.batch_slots]
    shardings = [getattr(array_type, "sharding", None) for array_type in batch_types]
    batch_axes = plan.batch_axes | first_axes(shardings, plan.transform.context)
    plan_in_trace = dataclasses.replace(plan, batch_axes=batch_axes)
    # The context yields the user's function, or a function that shards activations in it.
    tracing = plan.transform.tracing(plan_in_trace, caller, unflattened, arrays.inside)
    with arrays.context(), tracing as function:  # sets the mesh that the types of arrays name
        # The snapshot is taken in the context, because what this sets, such as tags of modules, is
        # no change of the user's function.
        snapshot = Snapshot(plan.structure, unflattened.objects)
        try:
            return function(*args, **kwargs), snapshot
        except Exception:
            # A filter that decides nothing may be why the function fails: on Explicit axes, JAX
            # refuses operations on arrays that were left whole. The warning would otherwise wait
            # for the outputs, to which filters may apply as well.
            transform = plan.transform
            check_filters(plan.filter_uses, name=transform.name, strict=transform.strict)
            raise


def _flatten_after(
    plan: Plan, output: object, unflattened: Unflattened, carried: Set[int], snapshot: Snapshot
) -> Flat:
    """Flattens the output of the function, and its arguments as they are after the call.

    The objects of the arguments keep their indices, so that the structures before and after can be
    compared. Raises errors for changes that the function must not make.

    Args:
      unflattened: the copies of the arguments that the function got.
      carried: the indices of Variables that the function may return even without graph updates.
      snapshot: the arguments before the call; unchanged objects are not read again.
    """
    structure, updates, name = plan.structure, plan.updates, plan.transform.name
    # The ids of static values that are compared by identity, such as functions, and of the static
    # objects in the table, such as a dict of settings.
    static_ids = {_compat.identity(static.value) for static in structure.identities()}
    object_ids = {_compat.identity(unflattened.objects[i]) for i in structure.static_indices()}
    replaced: Set[int] = frozenset()
    if not updates:  # the caller's modules stay unchanged, and returned modules are new ones
        entries = enumerate(structure.entries)
        replaced = {i for i, entry in entries if isinstance(entry, NodeEntry)} - carried
    flat_after = flatten(
        output,
        graph=plan.graph,
        first_objects=unflattened.objects,  # the objects of the arguments keep their indices
        replaced=replaced,
        # JAX keeps the structure with the trace, which must not keep the caller's objects alive.
        held_weakly=static_ids | object_ids,
        snapshot=snapshot,
    )
    if not plan.graph:
        flat_after.structure.check_tree()  # raises for shared references in the output
    check_objects(
        structure, flat_after, plan.graph_arguments, static_ids, name=name, updates=updates
    )
    if not updates:
        check_output(flat_after, plan.variables, carried, name=name)
    return flat_after


def _locate_new(plan: Plan, new_structure: Structure) -> list[NamedLocation]:
    """Finds where the arrays of the output are, and of the arguments if these may hold new arrays.

    Variables of the arguments keep their specs and names, so only new arrays need a location: an
    argument or output, and a path in it.
    """
    transform = plan.transform
    option = f"{transform.name}: {transform.out_name}"  # for errors
    # The output, cut into the parts for which the user gave one spec each, as arguments are.
    result = split_argument("output", transform.out_specs.tree, new_structure.root, option)
    # The arguments have a new Variable or array only if there are new objects, if a module links to
    # other objects (its entry differs), or if a module holds arrays itself (it has slots).
    old_entries, new_entries = plan.structure.entries, new_structure.entries
    has_new_objects = len(old_entries) != len(new_entries)
    # The objects of the arguments come first in both structures, so `zip` pairs each with itself.
    has_changed_modules = any(
        isinstance(old, NodeEntry) and (new != old or has_arrays)
        for old, new, has_arrays in zip(old_entries, new_entries, new_structure.slots, strict=False)
    )
    # Without updates, objects that the function attached to its arguments are not written back.
    may_have_new = plan.updates and (has_new_objects or has_changed_modules)
    return locate(new_structure, [*plan.graph_arguments, result] if may_have_new else [result])


def _output_specs(
    plan: Plan,
    leaves: Arrays,
    flat_after: Flat,
    locations: Sequence[NamedLocation],
    names: Sequence[str],
) -> list[Any]:
    """Returns the spec of each array after the call, by slot: a sharding, or a dimension.

    An array that was updated keeps its spec. The user's ``out_shardings`` (or ``out_axes``) decide
    about the output, and the spec of an argument decides about new arrays in it.

    Args:
      locations: where new Variables and arrays are in the output and the arguments.
      names: the expression for each array after the call, by slot.

    Raises:
      ValueError: a spec does not fit its array.
    """
    transform = plan.transform
    # 1. The specs of places decide about new arrays there. The plan decides about Variables of the
    # arguments, even if they are returned.
    resolved = resolve(
        locations,
        flat_after.objects,
        flat_after.leaves,
        transform.spec_of,
        decided=plan.variables,
        decided_arguments={argument.name for argument in plan.graph_arguments},
    )
    filter_uses = (*plan.filter_uses, *resolved.filter_uses)
    check_filters(filter_uses, name=transform.name, strict=transform.strict)
    # 2. Updated arrays keep their specs: this writes the old specs into ``resolved``.
    old_shapes = _keep_specs(plan, leaves, flat_after.structure, resolved)
    # 3. The specs that the transform itself decides, by slot: `vmap`, for example, stacks arrays
    # that a function adds.
    written = transform.written_specs(plan, flat_after)
    open_spec = transform.spec_of(None)  # leaves the decision to the compiler
    specs = []
    for slot, resolved_spec in enumerate(resolved.slots):
        spec = written.get(slot, resolved_spec)
        specs.append(open_spec if spec is None else spec)
    # 4. The part of each spec that fits its shape. Messages also show the shape before an update.
    shapes = [shape_of(leaf) for leaf in flat_after.leaves]
    return fit_specs(
        transform, names, shapes, specs, resolved.on_indivisible, outputs=True, before=old_shapes
    )


def _keep_specs(
    plan: Plan, leaves: Arrays, new_structure: Structure, resolved: Resolved
) -> dict[int, tuple[int, ...] | None]:
    """Writes the old spec of each updated array into ``resolved``, by its slot after the call.

    Args:
      plan: the plan of the call, with the structure and the specs before the call.
      resolved: the specs that were found for the arrays after the call; changed in place.

    Returns:
      The old shapes of arrays of Variables, by slot after the call.
    """
    old_structure = plan.structure
    old_shapes: dict[int, tuple[int, ...] | None] = {}
    # A Variable has one spec, for all arrays in it. Its index is the same before and after.
    for index in plan.variables:
        old_slots = old_structure.slots[index]
        for position, slot in enumerate(new_structure.slots[index]):
            resolved.slots[slot] = resolved.variables[index].spec
            if not old_slots:  # the Variable held no array before
                continue
            # If a Variable holds more arrays than before, the last old array stands for the rest.
            old_slot = old_slots[min(position, len(old_slots) - 1)]
            old_shapes[slot] = shape_of(leaves[old_slot])
            if old_slot in plan.on_indivisible:
                resolved.on_indivisible[slot] = plan.on_indivisible[old_slot]
    # An array that is an attribute of a module gets the spec of the array that it replaces.
    for index, old_slots in enumerate(old_structure.slots):
        is_module = isinstance(new_structure.entries[index], NodeEntry)
        if not (is_module and old_slots):
            continue
        # By slot after the call: the slot before it.
        old_slot_of = slots_before(old_structure, new_structure, index)
        for slot, old_slot in old_slot_of.items():
            if resolved.slots[slot] is None:  # no rule for new arrays has decided
                resolved.slots[slot] = plan.object_specs[old_slot]
    return old_shapes
