"""What every call does once its plan is known: place, execute, write back.

The *plan* is what was computed once for arguments of this structure. ``flat`` has the arguments,
flattened: their arrays (``leaves``, by *slot*) and objects (by *index*). JAX's program returns
*groups* of arrays, one for each sharding, and the *outcome* of its trace, which says to which
Variable each array belongs (``outcome.py``).

Nearly all calls change only the arrays of Variables: :class:`Update` is the fast way to write these
back, and ``_write_back`` the general one. With donated arrays, no signal may come between the
program, which deletes them, and the end of the write-back (``interrupts.py``). Signals are deferred
in the first calls of a program. Later calls are *direct*: JAX runs no Python code before the
results are stored, so no handler of a signal can run there.

    updatable          all objects of ``flat`` are known to belong to the current trace
    placed             the slots of arrays that this call has moved to their declared shardings
    attributes         arrays that modules hold themselves, outside of Variables
    outcome            has the indices of changed objects of the arguments: ``values`` for Variables
                       with new arrays, ``metadata`` for other changes of Variables, ``statics``,
                       ``replaced`` for modules returned as new ones, ``nodes`` for attributes
    operation          a tuple of a function and its arguments; ``perform`` runs many in C, so that
                       no signal comes in between
    deferred_handlers  the user's handlers while signals are deferred; otherwise empty. It stays
                       empty if the user has no handlers in Python, and in all threads but the main
                       one, because Python handles signals only there
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from .. import _compat
from ..errors import listed_error
from ..specs.types import Arrays, Objects
from .call_context import CALLER
from .declared import place_as_declared, placing_operations
from .failures import raise_explained
from .flatten import Flat
from .in_c import Operation, items_getter, perform
from .in_flight import is_bounded, wait_for_some
from .interrupts import DIRECT, defer_signals, deferred_handlers, deliver_signals, unmark_direct
from .outcome import Outcome, OutputGroup, Source
from .plan import Plan
from .rebuild import update_operations
from .static_equality import Static
from .structure import LEAF, Child, Container, is_leaf_variable
from .treedefs import has_builtin_containers
from .unflatten import assemble, unflatten

if TYPE_CHECKING:
    from ..diagnostics.retraces import Observer


def run(
    plan: Plan,
    flat: Flat,
    execute: Callable[..., Any],
    fun: Any = None,
    observer: Observer | None = None,
    *,
    nested: bool = False,
) -> Any:
    """Runs one call: places arrays, executes the program, and writes back; returns the output.

    Nothing here waits for devices, unless many programs are in flight on virtual CPU devices
    (``in_flight.py``). The caller's objects are not changed before ``execute`` has returned.

    Args:
      plan: the plan that serves the call.
      flat: the arguments.
      execute: takes the arrays and returns the outputs: JAX's jitted function, which may trace
        ``fun``, or an executable.
      fun: the user's function; None for an executable, which does not trace it.
      observer: is notified of traces and compilations.
      nested: whether the call is part of a trace.
    """
    leaves: Arrays = flat.leaves
    placed: Sequence[int] = ()  # the slots of arrays that were moved to their declared shardings
    if plan.placed_slots:
        leaves, placed = place_as_declared(plan, leaves)
    compiled_plan = None if nested or fun is None else plan  # the plan that JAX may compile for
    # The program deletes donated arrays, and a signal before the write-back would lose the model.
    deletes_arrays = plan.donated and not nested
    is_direct = getattr(execute, DIRECT, False)
    # This list gets the outputs as its only item, as soon as the program was started. The
    # write-back empties the list, so that the outputs are not written again.
    results: list[Any] = []
    try:
        if deletes_arrays and not is_direct:
            defer_signals()
        outer_fields = CALLER.fields
        try:
            # The fields of a `Caller`, in a plain tuple for speed.
            CALLER.fields = (fun, flat.objects, observer, nested, compiled_plan, leaves)
            # This runs in C, so that no signal comes between the program and storing its results.
            results.extend(itertools.starmap(execute, (leaves,)))
        except Exception as error:
            if not results:
                raise_explained(plan, leaves, error, fun)
            raise
        finally:
            CALLER.fields = outer_fields
        outputs = results[0]
        output = finish(plan, flat, leaves, placed, results)
        # Signals were deferred above (perhaps without any handlers), or when JAX compiled
        # (``call_context.py``). The outputs show whether the next call has to defer them.
        if deferred_handlers or (deletes_arrays and not is_direct):
            mark_direct(execute, outputs)
    except BaseException:
        # A signal came after the donated arrays were deleted, and before ``finish`` was done.
        if results and deletes_arrays:
            defer_signals()
            finish(plan, flat, leaves, placed, results)
        raise
    finally:
        if deferred_handlers:
            deliver_signals()
    if is_bounded() and not nested:
        *groups, _outcome = outputs
        wait_for_some(groups)
    return output


def finish(
    plan: Plan, flat: Flat, leaves: Arrays, placed: Sequence[int], results: list[Any]
) -> Any:
    """Updates the caller's objects, and returns the output.

    If a signal interrupts this, `run` calls it again, unless ``results`` is empty by then.

    Args:
      plan: the plan of the call.
      flat: the arguments, as the caller passed them.
      leaves: the arrays, as the program got them.
      placed: the slots of arrays that were moved before.
      results: has the outputs of the program as its only item. The step that changes the objects
        clears it, so that nothing is written twice.
    """
    *groups, outcome = results[0]
    update = outcome.update
    if update is None:  # the first call with this outcome
        update = outcome.update = Update.of(outcome, len(flat.objects))
    last_operation = (results.clear,)
    # The update is False if more than arrays of Variables changed. The fast way does not store
    # arrays that were placed, and does not check that the objects may be changed.
    if update is False or placed or not flat.updatable:
        return _write_back(
            plan, flat, leaves, groups, outcome, placed, last_operation=last_operation
        )
    is_donated = bool(plan.donated)
    return update.write_back(
        flat.objects, leaves, groups, last_operation=last_operation, is_donated=is_donated
    )


# The attribute that marks a function of JAX if one of its programs runs Python code.
_NEVER_DIRECT = "nnx_sharding_is_never_direct"


def mark_direct(execute: Callable[..., Any], outputs: Sequence[Any]) -> None:
    """Marks a jitted function as direct, if its first call has shown that JAX runs no Python code.

    JAX runs none if all outputs are plain arrays, and the program has no effects, such as
    callbacks. The fast write-back also has to be possible, with an output in containers that JAX
    builds itself. All programs of the function, one for each shape of its arguments, must be so.
    """
    if type(execute) is not _compat.JittedFunction or not _compat.trace_is_clean():
        return  # only a jitted function can be marked, and a call within a trace runs nothing
    *groups, outcome = outputs
    are_plain = all(type(x) is _compat.ArrayImpl for group in groups for x in group.arrays)
    # If ``returned`` is None, Python code has to put the output together.
    is_written_in_c = bool(outcome.update) and outcome.update.returned is not None
    if not are_plain or outcome.has_effects or not is_written_in_c:
        unmark_direct(execute)
        setattr(execute, _NEVER_DIRECT, True)
    elif not hasattr(execute, _NEVER_DIRECT):
        setattr(execute, DIRECT, True)


class Update(NamedTuple):
    """The fast way to write back: what to do after a call that only changed arrays of Variables.

    An update is computed once for each outcome. ``call.c`` writes back by the first three fields.
    ``write_back`` is for calls without the extension, and for outputs in containers that Python
    code has to make. It takes a tenth of the time of the general way: 30 µs for 147 Variables.

    A `Source` says where an array comes from: the number of a group of outputs, and the position in
    the group; or the group ``INPUT``, and the slot of an input. ``LEAF`` stands for an array in the
    root, a ``Container`` for a pytree.

    Attributes:
      written: rows of three 32-bit integers: the index of a Variable, and its array's source.
      returned: the sources of the output; None if Python has to put the output together.
      unflatten: makes the containers of the output; None for one array.
      root: the output, in terms of the structure after the call.
      root_sources: the sources of the arrays in ``root``.
      variables_in: picks the written Variables from all objects.
      sources: the sources of the arrays of these Variables.
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
        # Metadata of Variables, attributes of modules, or static objects have changed, or a module
        # is returned as a new one.
        if outcome.metadata or outcome.nodes or outcome.statics or outcome.replaced:
            return False
        has_new_objects = len(after.entries) != num_arguments
        holds_arrays = all(is_leaf_variable(after.entries[index]) for index in outcome.values)
        if has_new_objects or not holds_arrays:  # a Variable may also hold a pytree
            return False
        # The source of the new array of each changed Variable.
        sources = [outcome.sources[after.slots[index][0]] for index in outcome.values]
        written = [(index, *source) for index, source in zip(outcome.values, sources, strict=True)]
        # The sources of the arrays that the function returned. Objects in its output are old.
        root = after.root
        root_sources = [outcome.sources[slot] for slot in after.root_slots]
        # An output of arrays in tuples, lists and dicts is built in C, where no signal is handled.
        # An output with objects or other containers has to be assembled in Python.
        is_built_in_c = root is LEAF or (
            isinstance(root, Container)
            and has_builtin_containers(root.treedef)
            and all(child is LEAF for child in root.children)
        )
        return cls(
            written=_packed(written),
            returned=_packed(root_sources) if is_built_in_c else None,
            unflatten=root.treedef.unflatten if isinstance(root, Container) else None,
            root=root,
            root_sources=root_sources,
            variables_in=items_getter(outcome.values),
            sources=sources,
        )

    def write_back(
        self,
        objects: Objects,
        leaves: Arrays,
        groups: Sequence[OutputGroup],
        last_operation: Operation,
        *,
        is_donated: bool,
    ) -> Any:
        """Sets the Variables, in one step that a signal cannot split, and returns the output.

        Args:
          objects: the caller's objects, by index.
          leaves: the arrays that the program was given, by slot.
          groups: the arrays that the program returned.
          last_operation: is run at the end of the same step.
          is_donated: whether the program has deleted some of ``leaves``.
        """
        # The inputs come last, because the group of an input is INPUT, which is -1.
        arrays_of = [*(group.arrays for group in groups), leaves]
        returned = [arrays_of[group][i] for group, i in self.root_sources]
        operations: list[Operation] = []
        variables = self.variables_in(objects)  # one for each source
        for variable, (group, i) in zip(variables, self.sources, strict=True):
            array = arrays_of[group][i]
            if _compat.is_concrete_hijax(variable):  # a hijax Variable holds a tuple of arrays
                operations.append((_compat.set_leaves, variable, (array,)))
            else:
                operations.append((_compat.set_value, variable, array))
        operations.append(last_operation)
        # The output is made before the step, because containers of the user's own types may raise
        # errors, and an error changes nothing unless the old arrays are gone.
        try:
            output = assemble(self.root, iter(returned), objects)
        except Exception:
            if is_donated:
                perform(operations)
            raise
        perform(operations)
        return output


def _packed(rows: Sequence[tuple[int, ...]]) -> bytes:
    """Returns rows of numbers as the extension reads them: 32-bit integers without a header."""
    return np.array(rows, np.int32).tobytes()


def _write_back(
    plan: Plan,
    flat: Flat,
    leaves: Arrays,
    groups: Sequence[OutputGroup],
    outcome: Outcome,
    placed: Sequence[int],
    *,
    last_operation: Operation,
) -> Any:
    """Writes all changes of a call into the caller's objects: arrays, attributes, metadata.

    All new objects are made, and all checks done, before the first old object is changed. So an
    error or a signal changes everything or nothing. With donated arrays, an error in making the
    output is raised after the changes, because the old arrays are gone.

    Args:
      leaves: the arrays of the arguments, as they were placed.
      placed: the slots of the arrays that were placed.
      last_operation: is run at the end of the step that changes the objects.

    Returns:
      The output of the user's function.
    """
    objects = flat.objects
    # The check is not needed if all objects are known to belong to the current trace.
    if not flat.updatable:
        _check_updatable(plan, objects, outcome)
    after = outcome.structure
    arrays = outcome.arrays(leaves, groups)  # by slot after the call
    # `unflatten` makes only what is new: the containers of the output, objects that the function
    # has created, and without graph updates, the modules that it returns as new ones.
    existing = dict(enumerate(objects))
    for index in outcome.replaced:
        del existing[index]
    error: Exception | None = None  # containers of the user's own types may raise one
    try:
        unflattened = unflatten(after, arrays, existing)
    except Exception as raised:
        if not plan.donated:
            raise
        # The old arrays are gone, so the new ones are written, and no output is made.
        error = raised
        without_output = dataclasses.replace(after, root=Static.of(None), root_slots=())
        unflattened = unflatten(without_output, arrays, existing)
    # The arrays that were moved before the program ran come first, then what the program changed.
    operations = placing_operations(plan, flat, leaves, placed) if placed else []
    operations += update_operations(
        after,
        arrays,
        unflattened.objects,
        # The arrays of Variables whose metadata changed may have changed as well.
        values=[*outcome.values, *outcome.metadata],
        metadata=outcome.metadata,
        nodes=outcome.nodes,
        statics=outcome.statics,
    )
    perform([*operations, last_operation])  # in C, where no signal is handled
    if error is not None:
        raise error
    return unflattened.root


def _check_updatable(plan: Plan, objects: Objects, outcome: Outcome) -> None:
    """Raises a ``TraceContextError`` for changed objects that belong to another trace.

    The error has the changed objects in its attribute ``objects``, so that the transforms around
    this call can tell which of the objects their functions capture.

    Args:
      plan: has the names of Variables, and the structure of the arguments.
    """
    # The indices of Variables whose arrays or metadata changed, and of changed modules.
    changed = (*outcome.values, *outcome.metadata, *(change.node for change in outcome.nodes))
    lines: list[str] = []
    stale: list[Any] = []
    for index in changed:
        if _compat.can_update(objects[index]):  # the object belongs to the current trace
            continue
        stale.append(objects[index])
        variable = plan.variables.get(index)  # None for a module
        type_name = getattr(plan.structure.entries[index], "type", object).__name__
        lines.append(f"  a {type_name}" if variable is None else f"  {variable.name}")
    error = listed_error(  # None if there are no lines
        _compat.TraceContextError,
        "the function changed objects that belong to another trace, where they cannot be updated:",
        lines,
        "Pass them into the transformed function that is being traced, instead of capturing them.",
        anchor="changed-from-outside-its-trace",
    )
    if error is not None:
        vars(error)["objects"] = stale
        raise error
