"""The end of a trace: the outputs of the program, and what they mean for the caller's objects.

A *structure* (``structure.py``) describes the graph of modules by a table of objects. There is one
before the call and one after it, and the objects of the arguments come first in both. The *index*
of an object is its position in the table, and the *slot* of an array its position in the flat list
of all arrays. Comparing the two tables tells what changed. An unchanged array is not an output. All
other arrays are outputs, in one group for each *spec* (a sharding, or an axis of ``vmap``). The
:class:`Outcome` says where each array belongs. JAX keeps it with the trace, so repeated calls do
not compute it again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from .. import _compat
from ..errors import raise_if_any
from ..specs.types import Arrays, Spec
from .flatten import Flat
from .rebuild import NodeChange, node_changes, slots_before
from .structure import NodeEntry, RefEntry, StaticObject, Structure, VariableEntry
from .trace_checks import check_donated

if TYPE_CHECKING:
    from .plan import Plan

INPUT = -1  # takes the place of the number of a group: the array is an unchanged input


class Source(NamedTuple):
    """Where an array of the graph after a call comes from."""

    group: int  # the number of a group of outputs, or INPUT
    position: int  # the position in this group, or the slot of an input


class OutputGroup(Exception):
    """Outputs with one spec, each with the name under which JAX's messages and HLO show it.

    JAX needs the shardings of outputs before it traces, when the number of outputs is not yet
    known. The user's specs are known by then, so there is a group for each of them.

    JAX makes groups of what a program returns. Groups must be made without Python code, because a
    signal handler could run in it, and lose arrays that replace donated ones. So a group is an
    exception: the constructor of exceptions takes any arguments and is written in C.
    """

    args: tuple[tuple[str, ...], Any]

    @classmethod
    def unnamed(cls, arrays: Sequence[Any]) -> OutputGroup:
        """Returns a group without names, for outputs of a function that was traced before.

        Names are not needed, because JAX shows them only in messages about a trace.
        """
        return cls(("",) * len(arrays), arrays)

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each array."""
        return self.args[0]

    @property
    def arrays(self) -> Any:
        """The arrays."""
        return self.args[1]


jax.tree_util.register_pytree_with_keys(
    OutputGroup,
    lambda group: (
        tuple(zip(map(jax.tree_util.GetAttrKey, group.names), group.arrays, strict=True)),
        group.names,
    ),
    OutputGroup,
    lambda group: (group.arrays, group.names),
)


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Outcome:
    """The static part of what a call did to its graph; objects are named by their indices.

    *Input* objects are the objects of the arguments. They come first in both structures.
    """

    # The graph after the call. Its root is the output of the function.
    structure: Structure
    sources: tuple[Source, ...]  # the sources of the arrays of ``structure``, by slot
    values: tuple[int, ...]  # input Variables of which only the arrays changed
    metadata: tuple[int, ...]  # input Variables whose metadata or kind of value changed
    nodes: tuple[NodeChange, ...]  # the changed attributes of input modules
    statics: tuple[int, ...]  # static objects of the inputs that were changed in place
    replaced: tuple[int, ...] = ()  # input modules that are returned as new objects
    has_effects: bool = False  # whether the program has side effects, such as callbacks
    # What to write back; False if more than arrays of Variables changed. ``call.finish`` computes
    # this in the first call with this outcome, and it is None until then.
    update: Any = dataclasses.field(default=None, compare=False)

    def arrays(self, inputs: Arrays, groups: Sequence[OutputGroup]) -> list[Any]:
        """Returns the arrays of ``structure``, by slot, from the inputs and outputs.

        The inputs and outputs may also be other things than arrays, such as shapes.

        Args:
          inputs: the arrays before the call, by slot.
          groups: what the program returned.
        """
        outputs = [group.arrays for group in groups]
        return [
            inputs[position] if group == INPUT else outputs[group][position]
            for group, position in self.sources
        ]


jax.tree_util.register_pytree_node(
    Outcome,
    lambda outcome: ((), outcome),
    # This function in C returns the first of (outcome, ()), because an outcome is true and the
    # empty tuple is not. A lambda would be Python code, where a signal handler could run (see
    # `OutputGroup`).
    functools.partial(max, key=bool),
)


def pack(
    plan: Plan,
    fun_name: str,
    leaves: Arrays,
    flat_after: Flat,
    specs: Sequence[Spec],
    names: Sequence[str],
) -> tuple[Any, ...]:
    """Returns the outputs of the program: the arrays that changed, and what they mean.

    Args:
      plan: the plan, with the graph before the call.
      fun_name: the name of the user's function, in messages.
      leaves: the arrays before the call, by slot.
      flat_after: the graph after the call, flattened.
      specs: the final spec of each array after the call, by slot.
      names: the expression for each array after the call, by slot, such as ``model.kernel``.

    Returns:
      What the pure function returns: the groups of outputs, and last the outcome.
    """
    # ``sources`` has the sources of unchanged arrays of objects. The others are added below, and
    # ``outcome`` then gets all sources.
    outcome, sources = _compare(plan, leaves, flat_after, specs)
    group_of_spec = _group_numbers(plan, specs, names)  # by spec
    outputs: list[list[Any]] = [[] for _ in group_of_spec]  # by group
    output_names: list[list[str]] = [[] for _ in group_of_spec]
    input_slots = {_compat.identity(leaf): slot for slot, leaf in enumerate(leaves)}
    ref_slots = flat_after.structure.slots_of(RefEntry)
    for slot, leaf in enumerate(flat_after.leaves):
        is_ref = slot in ref_slots and _compat.is_ref(leaf)
        if is_ref and _compat.identity(leaf) in input_slots:
            # The program changes a ref in place, so it is the caller's ref in any case.
            sources[slot] = Source(INPUT, input_slots[_compat.identity(leaf)])
        elif slot not in sources:  # a new or changed array: the next output of its group
            group = group_of_spec[specs[slot]]
            sources[slot] = Source(group, len(outputs[group]))
            # A ref cannot leave a trace; its value can, and becomes a new ref outside.
            outputs[group].append(leaf[...] if is_ref else leaf)
            output_names[group].append(names[slot])
    # With ``strict``, an output has to use the buffer of each donated array. Without it, there are
    # no slots to reuse, and the check raises nothing.
    donated = {slot: (plan.names[slot], leaves[slot]) for slot in sorted(plan.slots_to_reuse)}
    check_donated(donated, itertools.chain(*outputs), name=plan.transform.name, fun=fun_name)
    outcome.sources = tuple(sources[slot] for slot in range(len(flat_after.leaves)))
    # Effects, such as callbacks, run Python code in each call of the program.
    outcome.has_effects = _compat.trace_has_effects()
    return (*map(OutputGroup, map(tuple, output_names), outputs), outcome)


def _compare(
    plan: Plan, leaves: Arrays, flat_after: Flat, specs: Sequence[Spec]
) -> tuple[Outcome, dict[int, Source]]:
    """Compares the objects of the arguments before and after the call.

    Args:
      plan: has the structure before the call, and the specs of its arrays.
      specs: the spec of each array after the call, by slot.

    Returns:
      The outcome without sources, and the sources of the unchanged arrays, by slot after the call.
    """
    sources: dict[int, Source] = {}
    values: list[int] = []  # Variables of which only the arrays changed
    metadata: list[int] = []  # Variables whose metadata or kind of value changed
    nodes: list[NodeChange] = []  # the attributes of modules that changed
    statics: list[int] = []  # static objects, such as dicts of settings, that changed in place
    replaced: list[int] = []  # modules that the caller gets as new ones
    for index, old_entry in enumerate(plan.structure.entries):
        # ``new_entry`` describes the same object after the call. An entry says nothing about the
        # arrays of an object, so these may have changed even if the entries are equal.
        new_entry = flat_after.structure.entries[index]
        slots = flat_after.structure.slots[index]
        # Without graph updates, the caller's modules stay as they are, and a module that is
        # returned is a new one. Flattening has left entries only for modules that a loop carries.
        if isinstance(new_entry, NodeEntry) and not plan.updates:
            replaced.append(index)
        if not slots and new_entry == old_entry:  # an unchanged object without arrays of its own
            continue
        # 1. Which arrays of the object are unchanged. All others are outputs.
        unchanged = _unchanged_sources(plan, leaves, flat_after, specs, index)
        sources |= unchanged
        changed_slots = {*slots} - unchanged.keys()
        # 2. What has to be written back to the caller's object.
        if isinstance(new_entry, VariableEntry) and new_entry != old_entry:
            metadata.append(index)
        elif isinstance(new_entry, VariableEntry) and changed_slots:
            values.append(index)
        elif isinstance(new_entry, NodeEntry) and isinstance(old_entry, NodeEntry) and plan.updates:
            # Attributes with another child, or with an array that changed.
            change = node_changes(index, old_entry, flat_after.structure, changed_slots)
            if change is not None:
                nodes.append(change)
        elif isinstance(new_entry, StaticObject):  # has no arrays, so its entry has changed
            statics.append(index)
    outcome = Outcome(
        structure=flat_after.structure,
        sources=(),
        values=tuple(values),
        metadata=tuple(metadata),
        nodes=tuple(nodes),
        statics=tuple(statics),
        replaced=tuple(replaced),
    )
    return outcome, sources


def _unchanged_sources(
    plan: Plan, leaves: Arrays, flat_after: Flat, specs: Sequence[Spec], index: int
) -> dict[int, Source]:
    """Returns the sources of the arrays of one object that are no outputs, by slot after the call.

    The function did not change an array whose tracer is still the same. The array is an output all
    the same if its buffer is donated, or if it gets another sharding.

    Args:
      plan: has the structure before the call, and the specs of its arrays.
      specs: the spec of each array after the call, by slot.
    """
    unchanged: dict[int, Source] = {}
    # `slots_before` leaves out arrays in places that the object did not have before.
    for slot, old_slot in slots_before(plan.structure, flat_after.structure, index).items():
        is_same = flat_after.leaves[slot] is leaves[old_slot]
        keeps_spec = specs[slot] == plan.object_specs[old_slot]
        if is_same and keeps_spec and old_slot not in plan.donated:
            unchanged[slot] = Source(INPUT, old_slot)
    return unchanged


def _group_numbers(plan: Plan, specs: Sequence[Spec], names: Sequence[str]) -> dict[Any, int]:
    """Returns the number of the group of outputs for each spec that an output can have.

    Raises a ``ValueError`` if some of ``specs`` have no group.

    Args:
      plan: has the specs that an output can have.
      specs: the spec of each array after the call, by slot.
    """
    numbers = {spec: number for number, spec in enumerate(plan.out_specs)}
    # JAX needs the specs before the trace. The function in a prefix of `nnx.prefix` is asked about
    # new Variables only in the trace, and may return specs that were not known before.
    pairs = zip(names, specs, strict=True)
    lines = [f"  {name}: {spec!r}" for name, spec in pairs if spec not in numbers]
    raise_if_any(
        ValueError,
        f"{plan.transform.name}: nnx.prefix cannot shard Variables that the function creates, "
        "because it only sees the arguments. These are new, and get specs that no argument has:",
        lines,
        "Give its filters as StateSharding, or in vmap and scan as StateAxes.",
    )
    return numbers


def union(before: Structure, outcomes: Sequence[Outcome]) -> Outcome:
    """Returns one outcome for all branches of a ``cond`` or ``switch``.

    The structure is the same after each branch, because the caller refuses other branches. So the
    outcomes agree in all that follows from comparing entries, but not in the arrays that change.
    An array that any branch changes is an output of all branches. These arrays are in one group, in
    the order of their slots.

    Args:
      before: the structure of the arguments.
      outcomes: the outcome of each branch.
    """
    first = outcomes[0]
    structure = first.structure
    sources: list[Source] = []  # by slot
    changed_slots: list[int] = []  # the slots of arrays that any branch changes
    for slot, by_branch in enumerate(zip(*(outcome.sources for outcome in outcomes), strict=True)):
        if all(source.group == INPUT for source in by_branch):  # the same input in each branch
            sources.append(by_branch[0])
        else:
            sources.append(Source(0, len(changed_slots)))  # the only group
            changed_slots.append(slot)
    # An attribute of a module changes if its array changes in any branch. So the changes of modules
    # are computed again, with the arrays of all branches.
    entries: Sequence[Any] = before.entries
    changed_nodes = sorted({change.node for outcome in outcomes for change in outcome.nodes})
    nodes = [
        node_changes(index, entries[index], structure, {*changed_slots}) for index in changed_nodes
    ]
    # The indices of Variables of which any branch changes an array.
    values = sorted({index for outcome in outcomes for index in outcome.values})
    return Outcome(
        structure=structure,
        sources=tuple(sources),
        values=tuple(values),
        # The next three follow from the entries alone, so they are the same for all branches.
        metadata=first.metadata,
        statics=first.statics,
        replaced=first.replaced,
        nodes=tuple(change for change in nodes if change is not None),
        has_effects=any(outcome.has_effects for outcome in outcomes),
    )
