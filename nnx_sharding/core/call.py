"""What every call does once its plan is known: place, execute, write back.

The *plan* is what was computed once for arguments of this structure, and ``flat`` the arguments,
flattened: their arrays (``leaves``, in *slots*) and objects (by *index*). JAX's program returns
*groups* of arrays, one for each sharding, and the *outcome* of its trace, which says to which
Variable each belongs (``outcome.py``).

Nearly all calls change only the arrays of Variables: :class:`Update` is the fast way to write these
back, and ``_write_back`` the general one. With donated arrays, no signal may come between the
program, which deletes them, and the end of the write-back (``interrupts.py``). Signals are deferred
in the first calls of a program. Later ones are *direct*: JAX then runs no Python code in which a
signal could be handled before the results are stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from .. import _compat
from ..errors import listed_error
from ..specs.types import Arrays, Objects
from .call_context import CALLER, Observer
from .declared import place_as_declared
from .failures import raise_explained
from .flatten import Flat
from .in_flight import is_bounded, wait_for_some
from .interrupts import defer_signals, deferred_handlers, deliver_signals
from .outcome import Outcome, OutputGroup, Source
from .plan import Plan
from .rebuild import AttributeValue, NodeChange, update_operations
from .static_parts import Operation
from .structure import LEAF, Child, Container, VariableEntry, is_leaf_variable
from .treedefs import has_builtin_containers
from .unflatten import assemble, items_getter, perform, unflatten


def run(
    plan: Plan,
    flat: Flat,
    execute: Callable[..., Any],
    fun: Any = None,
    observer: Observer | None = None,
    *,
    nested: bool = False,
) -> Any:
    """Runs one call: place, execute, write back; nothing here waits for the device.

    The caller's objects are not changed before ``execute`` has returned.

    Args:
      plan: the plan that serves the call.
      flat: the arguments.
      execute: takes the arrays and returns the outputs: JAX's jitted function, which may trace
        ``fun``, or an executable.
      fun: the user's function; None if it is not traced, for an executable.
      observer: is notified of traces and compilations.
      nested: whether the call is part of a trace.
    """
    leaves: Arrays = flat.leaves
    placed: Sequence[int] = ()  # the slots of arrays that were moved to their declared shardings
    if plan.placed_slots:
        leaves, placed = place_as_declared(plan, leaves)
    compiled_plan = None if nested or fun is None else plan
    # The program deletes donated arrays; a signal before the write-back would lose them.
    defers = plan.donated and not nested
    is_direct = getattr(execute, DIRECT, False)
    # A list, which is filled when the program was started, also if an error or a signal follows.
    results: list[Any] = []
    try:
        if defers and not is_direct:
            defer_signals()
        outer = CALLER.fields
        try:
            # The fields of a `Caller`, in a plain tuple for speed.
            CALLER.fields = (fun, flat.objects, observer, nested, compiled_plan, leaves)
            # In C, so that no signal comes between the program and the storing of its results.
            results.extend(itertools.starmap(execute, (leaves,)))
        except Exception as error:
            if not results:
                raise_explained(plan, leaves, error, fun)
            raise
        finally:
            CALLER.fields = outer
        outputs = results[0]
        output = finish(plan, flat, leaves, placed, results)
        # The second condition is for a process that has no handlers to defer.
        if deferred_handlers or (defers and not is_direct):
            mark_direct(execute, outputs)
    except BaseException:
        if results and defers:  # a signal, after the donated arrays were consumed
            defer_signals()
            finish(plan, flat, leaves, placed, results)
        raise
    finally:
        if deferred_handlers:
            deliver_signals()
    if is_bounded() and not nested:
        wait_for_some(outputs[:-1])
    return output


def finish(
    plan: Plan, flat: Flat, leaves: Arrays, placed: Sequence[int], results: list[Any]
) -> Any:
    """Updates the caller's objects, and returns the output; may be repeated if interrupted.

    ``results`` holds the outputs of the program, as its only item, until they are written back.
    """
    *groups, outcome = results[0]
    update = outcome.update
    if update is None:  # the first call with this outcome
        update = outcome.update = Update.of(outcome, len(flat.objects))
    if not update or placed or not flat.updatable:
        return _write_back(plan, flat, leaves, groups, outcome, placed, results.clear)
    return update.write_back(flat.objects, leaves, groups)


# The attribute of a function of JAX that runs no Python code before its results are stored.
DIRECT = "nnx_sharding_is_direct"


def mark_direct(execute: Callable[..., Any], outputs: Sequence[Any]) -> None:
    """Marks a jitted function as direct, if its first call has shown that JAX runs no Python code.

    That is so if all outputs are plain arrays, in containers that JAX builds itself, and the
    program has no effects, such as callbacks. Otherwise the mark is removed.
    """
    *groups, outcome = outputs
    are_plain = all(type(x) is _compat.ArrayImpl for group in groups for x in group.arrays)
    if type(execute) is not _compat.JittedFunction or outcome.has_effects or not are_plain:
        return
    if outcome.update and outcome.update.returned is not None:
        setattr(execute, DIRECT, True)
    else:
        unmark_direct(execute)


def unmark_direct(execute: Callable[..., Any]) -> None:
    """Removes the mark, where JAX may have to compile for arrays of other types."""
    vars(execute).pop(DIRECT, None)


class Update(NamedTuple):
    """The fast way to write back: what to do after a call that only changed arrays of Variables.

    It is computed once for each outcome. ``call.c`` does the same from the first three fields; here
    it is for calls without it, and for results in containers that Python code has to make. It takes
    a tenth of the time of the general way: 30 µs for 147 Variables.

    A `Source` says where an array comes from: the number of a group of outputs, and the position in
    it; or the group ``INPUT``, and the slot of an input.

    Attributes:
      written: rows of three 32-bit integers: the index of a Variable, and its array's source.
      returned: the sources of the output; None if Python has to put it together.
      unflatten: makes the containers of the output; None for one array.
      root: the output, in terms of the structure after the call.
      root_sources: the sources of the arrays in it.
      variables_in: picks the written Variables from all objects.
      sources: the sources of their arrays.
    """

    written: bytes
    returned: bytes | None
    unflatten: Callable[[Sequence[Any]], Any] | None
    root: Child
    root_sources: Sequence[Source]
    variables_in: Callable[[Objects], Objects]
    sources: Sequence[Source]

    @classmethod
    def of(cls, outcome: Outcome, num_arguments: int) -> Update | Literal[False]:
        """Returns the update for an outcome, or False if the call changed more than arrays.

        ``num_arguments`` is the number of the objects of the arguments, which come first.
        """
        after = outcome.structure
        if outcome.metadata or outcome.nodes or outcome.statics or outcome.replaced:
            return False
        has_new_objects = len(after.entries) != num_arguments
        holds_arrays = all(is_leaf_variable(after.entries[index]) for index in outcome.values)
        if has_new_objects or not holds_arrays:  # a Variable may also hold a pytree
            return False
        # Where the new array of each changed Variable is among the outputs of the program.
        sources = [outcome.sources[after.slots[index][0]] for index in outcome.values]
        written = [(index, *source) for index, source in zip(outcome.values, sources, strict=True)]
        # Likewise the arrays that the function returned. Objects in its result are the caller's.
        root = after.root
        root_sources = [outcome.sources[slot] for slot in after.root_slots]
        # JAX builds these containers in C, where no signal is handled.
        is_builtin = root is LEAF or (
            isinstance(root, Container)
            and has_builtin_containers(root.treedef)
            and all(child is LEAF for child in root.children)
        )
        return cls(
            written=_packed(written),
            returned=_packed(root_sources) if is_builtin else None,
            unflatten=root.treedef.unflatten if isinstance(root, Container) else None,
            root=root,
            root_sources=root_sources,
            variables_in=items_getter(outcome.values),
            sources=sources,
        )

    def write_back(self, objects: Objects, leaves: Arrays, groups: Sequence[OutputGroup]) -> Any:
        """Sets the Variables, in one step that a signal cannot split, and returns the output.

        ``leaves`` are the arrays that the program was given, ``groups`` those that it returned.
        """
        outputs = [*(group.args[1] for group in groups), leaves]  # INPUT is -1, the last
        results = [outputs[group][i] for group, i in self.root_sources]
        # Before the step, since containers of the user's own types may raise errors.
        output = results[0] if self.root is LEAF else assemble(self.root, iter(results), objects)
        operations: list[Operation] = []
        variables = self.variables_in(objects)
        for variable, (group, i) in zip(variables, self.sources, strict=True):
            if _compat.is_concrete_hijax(variable):
                operations.append((_compat.set_leaves, variable, (outputs[group][i],)))
            else:
                operations.append((_compat.set_value, variable, outputs[group][i]))
        perform(operations)
        return output


def _packed(rows: Sequence[tuple[int, ...]]) -> bytes:
    """Returns rows of numbers as the extension reads them."""
    return np.array(rows, np.int32).tobytes()


def _write_back(
    plan: Plan,
    flat: Flat,
    leaves: Arrays,
    groups: Sequence[OutputGroup],
    outcome: Outcome,
    placed: Sequence[int],
    finished: Callable[[], None],
) -> Any:
    """Writes all changes of a call into the caller's objects: arrays, attributes, metadata.

    All new objects are made, and all checks done, before the first old one is changed: so an error
    or a signal changes everything or nothing.

    Args:
      plan: the plan of the call.
      flat: the arguments, as the caller passed them.
      leaves: their arrays, as they were placed.
      groups: the outputs.
      outcome: what they mean.
      placed: the slots of the arrays that were placed.
      finished: is called in the step that changes the objects.

    Returns:
      The output of the user's function.
    """
    objects = flat.objects
    if not flat.updatable:  # else all are known to belong to the current trace
        _check_updatable(plan, objects, outcome)
    after = outcome.structure
    arrays = outcome.arrays(leaves, groups)  # by slot after the call
    existing = dict(enumerate(objects))
    for index in outcome.replaced:
        del existing[index]
    # Makes only what is new: objects, and the containers of the output.
    unflattened = unflatten(after, arrays, existing)
    # First the arrays that were moved before the program ran, then what it changed.
    operations = _placing_operations(plan, flat, leaves, placed) if placed else []
    operations += update_operations(
        after,
        arrays,
        unflattened.objects,
        values=[*outcome.values, *outcome.metadata],
        metadata=outcome.metadata,
        nodes=outcome.nodes,
        statics=outcome.statics,
    )
    perform([*operations, (finished,)])  # in C, where no signal is handled
    return unflattened.root


def _check_updatable(plan: Plan, objects: Objects, outcome: Outcome) -> None:
    """Raises a ``TraceContextError`` for changed objects that belong to another trace.

    The error has the attribute ``objects``, from which the functions around this one can tell
    which of these they capture.
    """
    changed = (*outcome.values, *outcome.metadata, *(change.node for change in outcome.nodes))
    lines: list[str] = []
    stale: list[Any] = []
    for index in changed:
        if _compat.can_update(objects[index]):
            continue
        stale.append(objects[index])
        variable = plan.variables.get(index)  # None for a module, which has no name
        type_name = getattr(plan.structure.entries[index], "type", object).__name__
        lines.append(f"  a {type_name}" if variable is None else f"  {variable.name}")
    error = listed_error(
        _compat.TraceContextError,
        "the function changed objects that belong to another trace, where they cannot be updated:",
        lines,
        "Pass them into the transformed function that is being traced, instead of capturing them.",
        anchor="changed-from-outside-its-trace",
    )
    if error is not None:
        vars(error)["objects"] = stale
        raise error


def _placing_operations(
    plan: Plan, flat: Flat, leaves: Arrays, placed: Sequence[int]
) -> list[Operation]:
    """Returns the operations by which the caller's objects get the arrays that a call moved.

    So they are moved only once. ``placed`` has the slots of these arrays in ``leaves``.
    """
    moved = set(placed)
    structure = plan.structure
    variables = [
        index
        for index, slots in enumerate(structure.slots)
        if isinstance(structure.entries[index], VariableEntry) and not moved.isdisjoint(slots)
    ]
    attributes = []
    for slot in moved.intersection(plan.attributes):
        node, name = plan.attributes[slot]
        old = flat.leaves[slot]
        # NumPy arrays stay, and so does what was assigned meanwhile.
        if isinstance(old, jax.Array) and vars(flat.objects[node]).get(str(name)) is old:
            attributes.append(NodeChange(node, ((name, AttributeValue(LEAF, (slot,))),), ()))
    return update_operations(structure, leaves, flat.objects, variables, nodes=attributes)
