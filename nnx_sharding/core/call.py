"""What every call does once its plan is known: place, execute, write back."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .. import _compat
from ..specs.fitting import is_equivalent
from . import problems
from . import unflatten as graph
from .call_context import CALLER, Observer
from .flatten import Flat
from .in_flight import is_bounded, wait_for_some
from .interrupts import held, hold, release
from .outcome import Outcome, OutputGroup
from .plan import Plan, is_committed, known_variables
from .problems import Problem, refuse
from .resolve import locate
from .spec_checks import fit_specs
from .static_parts import Operation
from .structure import LEAF, VariableEntry
from .transfer import obstacle, transfer


def run(
    plan: Plan,
    flat: Flat,
    execute: Callable[..., Any],
    fun: Any = None,
    observer: Observer | None = None,
    *,
    nested: bool = False,
) -> Any:
    """Runs one call: gather, place, execute, write back.

    The caller's objects are not changed before ``execute`` has returned. Nothing here waits for
    the device.

    Args:
      plan: the plan for the structure of ``flat``.
      flat: the arguments of this call, flattened.
      execute: takes the arrays and returns the outputs: JAX's jitted function, or an
        executable compiled from it.
      fun: the user's function, in case ``execute`` traces it.
      observer: is notified of that.
      nested: whether this is part of a trace.

    Raises:
      TraceContextError: the function changed objects that belong to another trace.
      ValueError: a Variable cannot be brought to its declared sharding.
    """
    leaves: Sequence[Any] = flat.leaves
    placed: Sequence[int] = ()
    if plan.placed_slots:
        leaves, placed = _place(plan, leaves)
    compiles = None if nested or fun is None else plan
    donates = plan.donated and not nested
    results: list[Any] = []
    try:
        if donates and not getattr(execute, _DIRECT, False):
            hold()
        token = CALLER.set((fun, flat.objects, observer, nested, compiles, leaves))
        try:
            if donates:
                # In C, so that no signal comes between the program and the storing of its results.
                results.extend(itertools.starmap(execute, (leaves,)))
                *groups, outcome = results[0]
            else:
                *groups, outcome = execute(*leaves)
        except Exception as error:
            if not results:
                problems.failed(plan, leaves, error)
            raise
        finally:
            CALLER.reset(token)
        update = outcome.update
        if update and flat.updatable and not placed:
            output = update.output(flat.objects, leaves, groups)
            update.apply(flat.objects, groups)
        else:
            output = _finish(plan, flat, leaves, groups, outcome, placed, results.clear)
        if held:
            _mark_direct(execute, groups, outcome)
    except BaseException:
        if results and donates:  # a signal, after the donated arrays were consumed
            hold()
            *groups, outcome = results[0]
            _finish(plan, flat, leaves, groups, outcome, placed, results.clear)
        raise
    finally:
        if held:
            release()
    if is_bounded() and not nested:
        wait_for_some(groups)
    return output


def _finish(
    plan: Plan,
    flat: Flat,
    leaves: Sequence[Any],
    groups: Sequence[OutputGroup],
    outcome: Outcome,
    placed: Sequence[int],
    done: Callable[[], None],
) -> Any:
    """Updates the caller's objects, and returns the output; may be repeated if interrupted."""
    update = outcome.update
    if update is None:
        update = outcome.update = _Update.of(outcome, len(flat.objects))
    if not update or placed or not flat.updatable:
        return _write_back(plan, flat, leaves, groups, outcome, placed, done)
    output = update.output(flat.objects, leaves, groups)
    update.apply(flat.objects, groups)
    return output


# The attribute of a function of JAX that runs no Python code before its results are stored.
_DIRECT = "nnx_sharding_is_direct"


def _mark_direct(execute: Any, groups: Sequence[OutputGroup], outcome: Outcome) -> None:
    """Marks a function that JAX will call without Python code, as its first call has shown."""
    arrays = (array for group in groups for array in group.arrays)
    is_array = (type(x) is _compat.ArrayImpl for x in arrays)
    if type(execute) is _compat.JittedFunction and not outcome.has_effects and all(is_array):
        setattr(execute, _DIRECT, True)


def unmark_direct(execute: Any) -> None:
    """Forgets this, where JAX may have a program for arrays that it has not been called with."""
    vars(execute).pop(_DIRECT, None)


_get_sharding = operator.attrgetter("sharding")


def _place(plan: Plan, leaves: Sequence[Any]) -> tuple[Sequence[Any], Sequence[int]]:
    """Brings Variables and attributes to their declared shardings, if they are not there yet.

    Raises:
      ValueError: one is committed to another sharding, or has a shape that does not fit.
    """
    try:
        # Lists compare by identity first, so this is all the work from the second call on.
        if list(map(_get_sharding, plan.pick_placed(leaves))) == plan.placed_shardings:
            return leaves, ()
    except AttributeError:  # a NumPy array, a number, a ref
        pass
    slots = [
        slot
        for slot, sharding in zip(plan.placed_slots, plan.placed_shardings, strict=True)
        if not _is_placed(leaves[slot], sharding)
        and not (plan.transform.on_committed == "leave" and is_committed(leaves[slot]))
    ]
    if not slots or not _compat.trace_is_clean():
        return leaves, ()
    _check_placing(plan, leaves, slots)
    placed = transfer([leaves[s] for s in slots], [plan.shardings[s] for s in slots])
    leaves = list(leaves)
    for slot, array in zip(slots, placed, strict=True):
        leaves[slot] = array
    return leaves, slots


def _is_placed(leaf: Any, sharding: jax.sharding.Sharding) -> bool:
    if not isinstance(leaf, jax.Array):
        # An abstract array has no data to place; a NumPy array or a number does.
        return isinstance(leaf, jax.ShapeDtypeStruct) or _compat.is_ref(leaf)
    if isinstance(leaf, jax.core.Tracer):
        return True
    current = leaf.sharding
    return (
        current is sharding
        or current == sharding
        or (leaf.committed and is_equivalent(current, sharding, leaf.ndim))
    )


def _check_placing(plan: Plan, leaves: Sequence[Any], slots: Sequence[int]) -> None:
    names, transform = [plan.names[slot] for slot in slots], plan.transform
    shapes = [jnp.shape(leaves[slot]) for slot in slots]
    fit_specs(transform, names, shapes, [plan.specs[slot] for slot in slots], {})
    shardings = [plan.shardings[slot] for slot in slots]
    reasons = [obstacle(leaves[s], x) for s, x in zip(slots, shardings, strict=True) if x]
    offenders = [(n, why) for n, why in zip(names, reasons, strict=True) if why is not None]
    if offenders:
        refuse(Problem.CANNOT_PLACE, offenders, name=transform.name)
    committed = []
    for name, slot, sharding in zip(names, slots, shardings, strict=True):
        leaf = leaves[slot]
        if sharding is None or transform.on_committed == "move" or not is_committed(leaf):
            continue
        moves = leaf.sharding.device_set != sharding.device_set
        is_same = leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        if moves or (transform.on_committed == "error" and not is_same):
            committed.append((name, leaf.shape, leaf.sharding, sharding))
    if committed:
        refuse(Problem.COMMITTED_ELSEWHERE, committed, name=transform.name)


class _Update:
    """What to write back after a call that only changed the arrays of Variables.

    Nearly all calls are of this kind, so it is computed once for each outcome.
    """

    __slots__ = ("_arrays", "_root", "_root_sources", "_variables")

    def __init__(self, outcome: Outcome):
        after = outcome.structure
        sources = [outcome.sources[after.slots[index][0]] for index in outcome.values]
        order = sorted(range(len(sources)), key=sources.__getitem__)
        self._variables = graph.picker([outcome.values[i] for i in order])
        self._arrays = [
            (group, graph.picker([position for _, position in found]))
            for group, found in itertools.groupby(
                (sources[i] for i in order), key=operator.itemgetter(0)
            )
        ]
        self._root = after.root
        self._root_sources = [outcome.sources[slot] for slot in after.root_slots]

    @classmethod
    def of(cls, outcome: Outcome, known: int) -> _Update | Literal[False]:
        """The update for an outcome, or False if the outcome is of another kind.

        Args:
          outcome: what the call did.
          known: the number of input objects.
        """
        entries = outcome.structure.entries
        is_simple = (
            not outcome.metadata
            and not outcome.nodes
            and not outcome.statics
            and not outcome.copied
            and len(entries) == known
            and all(graph.is_leaf_variable(entries[index]) for index in outcome.values)
        )
        return is_simple and cls(outcome)

    def output(
        self, objects: Sequence[Any], leaves: Sequence[Any], groups: Sequence[OutputGroup]
    ) -> Any:
        """What the function returned."""
        arrays = [leaves[i] if g < 0 else groups[g].args[1][i] for g, i in self._root_sources]
        return (
            arrays[0] if self._root is LEAF else graph.assemble(self._root, iter(arrays), objects)
        )

    def apply(self, objects: Sequence[Any], groups: Sequence[OutputGroup]) -> None:
        """Sets the Variables, in one step that a signal cannot split."""
        new = [pick(groups[group].args[1]) for group, pick in self._arrays]
        arrays = new[0] if len(new) == 1 else itertools.chain.from_iterable(new)
        deque(map(_compat.set_value, self._variables(objects), arrays), maxlen=0)


def _write_back(
    plan: Plan,
    flat: Flat,
    leaves: Sequence[Any],
    groups: Sequence[OutputGroup],
    outcome: Outcome,
    placed: Sequence[int],
    done: Callable[[], None],
) -> Any:
    """Updates the caller's objects to their state after the call, and returns the output.

    All new objects are made, and all checks done, before the first old one is changed. ``done`` is
    called in the same step.
    """
    objects = flat.objects
    if not flat.updatable:
        _check_updatable(plan, objects, outcome)
    after = outcome.structure
    arrays = outcome.arrays(leaves, groups)
    existing = dict(enumerate(objects))
    for index in outcome.copied:
        del existing[index]
    built = graph.unflatten(after, arrays, existing)
    values = [*outcome.values, *outcome.metadata]
    operations = _keep_placed(plan, flat, leaves, placed) if placed else []
    operations += graph.update(
        after, arrays, built.objects, values, outcome.metadata, outcome.nodes, outcome.statics
    )
    graph.perform([*operations, (done,)])
    return built.root


def _check_updatable(plan: Plan, objects: Sequence[Any], outcome: Outcome) -> None:
    changed = (*outcome.values, *outcome.metadata, *(change.node for change in outcome.nodes))
    stale = [index for index in changed if not _compat.can_update(objects[index])]
    if stale:
        known = known_variables(locate(plan.structure, plan.targets), {}, {})
        types = [getattr(plan.structure.entries[i], "type", object).__name__ for i in stale]
        names = [known[i][0] if i in known else f"a {t}" for i, t in zip(stale, types, strict=True)]
        refuse(Problem.FOREIGN_TRACE, [(name,) for name in names])


def _keep_placed(
    plan: Plan, flat: Flat, leaves: Sequence[Any], placed: Sequence[int]
) -> list[Operation]:
    """Operations by which the caller's objects get the placed arrays, to be moved only once."""
    moved, structure = set(placed), plan.structure
    variables = [
        index
        for index, slots in enumerate(structure.slots)
        if isinstance(structure.entries[index], VariableEntry) and not moved.isdisjoint(slots)
    ]
    attributes = []
    for slot in moved.intersection(plan.attributes):
        index, key = plan.attributes[slot]
        old = flat.leaves[slot]  # NumPy arrays stay, and so does what was assigned meanwhile
        if isinstance(old, jax.Array) and vars(flat.objects[index]).get(str(key)) is old:
            attributes.append(graph.NodeChange(index, ((key, LEAF, (slot,)),), ()))
    return graph.update(structure, leaves, flat.objects, variables, nodes=attributes)
