"""The end of a trace: the outputs of the program, and what they mean for the caller's objects.

The graph of modules is described by a table of objects, a *structure* (``structure.py``), before
and after the call, with the same objects first. An *index* is that of an object, a *slot* that of
an array in the flat list of all arrays. Comparing the tables tells what changed. An unchanged array
is not an output. The others are in groups, one for each *spec* (a sharding, or an axis of
``vmap``). Where each array belongs is the :class:`Outcome`, which JAX keeps with the trace: no
repeated call computes it again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from .. import _compat
from ..errors import raise_listed
from ..specs.types import Arrays, Spec
from .flatten import Flat
from .rebuild import NodeChange, node_changes, slots_before
from .structure import NodeEntry, RefEntry, StaticObject, Structure, VariableEntry
from .trace_checks import check_donated

if TYPE_CHECKING:
    from .plan import Plan

INPUT = -1  # instead of the number of a group: the array is an input, unchanged


class Source(NamedTuple):
    """Where an array of the graph after a call comes from."""

    group: int  # the number of a group of outputs, or INPUT
    position: int  # in this group; of an input its slot


class OutputGroup(Exception):
    """Outputs with one spec, each with the name under which JAX's messages and HLO show it.

    JAX needs the shardings of outputs before it traces, when their number is not yet known.
    But the user's specs are known, so there is a group for each of them.

    JAX makes groups of what a program returns. No Python code may run there, since a signal would
    interrupt it, and lose arrays that replace donated ones. Only the constructor of an exception
    takes any arguments and is written in C.
    """

    args: tuple[tuple[str, ...], Any]

    @classmethod
    def unnamed(cls, arrays: Sequence[Any]) -> OutputGroup:
        """Returns a group without names, for outputs of a function that was traced before.

        The messages of JAX that show the names are about a trace, and that is done.
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

    *Input* objects are those of the arguments. They come first in both structures.
    """

    # The graph after the call. Its root is the output of the function.
    structure: Structure
    sources: tuple[Source, ...]  # of its arrays, by slot
    values: tuple[int, ...]  # input Variables whose arrays changed
    metadata: tuple[int, ...]  # those whose metadata or kind of value changed
    nodes: tuple[NodeChange, ...]  # the changed attributes of input modules
    statics: tuple[int, ...]  # static objects of the inputs that were changed in place
    replaced: tuple[int, ...] = ()  # input modules that are returned as new objects
    has_effects: bool = False  # whether the program has side effects, such as callbacks
    # What to write back, set by ``call.run`` at the first call from all of this.
    update: Any = dataclasses.field(default=None, compare=False)

    def arrays(self, inputs: Arrays, groups: Sequence[OutputGroup]) -> list[Any]:
        """Returns the arrays of ``structure``, by slot, from the inputs and outputs.

        With other things in place of arrays, such as shapes, it returns these.

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
    # Returns the first of (outcome, ()): an outcome is true, the empty tuple is not. A lambda would
    # run Python code where a signal could interrupt it, as for `OutputGroup`.
    functools.partial(max, key=bool),
)


def pack(
    plan: Plan,
    fun_name: str,
    leaves: Arrays,
    after: Flat,
    specs: Sequence[Spec],
    names: Sequence[str],
) -> tuple[Any, ...]:
    """Returns the outputs of the program: the arrays that changed, and what they mean.

    Args:
      plan: the plan, with the graph before the call.
      fun_name: the name of the user's function, in messages.
      leaves: the arrays before the call, by slot.
      after: the graph after the call, flattened.
      specs: the final spec of each array after the call, by slot.
      names: the expression for each of these, such as ``model.kernel``.

    Returns:
      What the pure function returns: the groups of outputs, and last the outcome.
    """
    # So far, ``sources`` has the slots of unchanged arrays of objects, and `outcome` has none.
    outcome, sources = _compare(plan, leaves, after, specs)
    group_of_spec = _group_numbers(plan, specs, names)  # by spec
    outputs: list[list[Any]] = [[] for _ in group_of_spec]  # by group
    output_names: list[list[str]] = [[] for _ in group_of_spec]
    input_slots = {_compat.identity(leaf): slot for slot, leaf in enumerate(leaves)}
    ref_slots = after.structure.slots_of(RefEntry)
    for slot, leaf in enumerate(after.leaves):
        is_ref = slot in ref_slots and _compat.is_ref(leaf)
        if is_ref and _compat.identity(leaf) in input_slots:
            # The program changes it in place, so it is the caller's ref in any case.
            sources[slot] = Source(INPUT, input_slots[_compat.identity(leaf)])
        elif slot not in sources:  # a new or changed array: the next output of its group
            group = group_of_spec[specs[slot]]
            sources[slot] = Source(group, len(outputs[group]))
            # A ref cannot leave a trace; its value can, and becomes a new ref outside.
            outputs[group].append(leaf[...] if is_ref else leaf)
            output_names[group].append(names[slot])
    # With ``strict``, an output has to use the buffer of each donated array. Otherwise none has to,
    # and there are no slots to reuse.
    donated = {slot: (plan.names[slot], leaves[slot]) for slot in sorted(plan.slots_to_reuse)}
    check_donated(donated, itertools.chain(*outputs), name=plan.transform.name, fun=fun_name)
    outcome.sources = tuple(sources[slot] for slot in range(len(after.leaves)))
    # Effects, such as callbacks, run Python code in each call of the program.
    outcome.has_effects = _compat.trace_has_effects()
    return (*map(OutputGroup, map(tuple, output_names), outputs), outcome)


def _compare(
    plan: Plan, leaves: Arrays, after: Flat, specs: Sequence[Spec]
) -> tuple[Outcome, dict[int, Source]]:
    """Compares the objects of the arguments before and after the call.

    Args:
      plan: has the structure before the call, and the specs of its arrays.
      leaves: the arrays before it, by slot.
      after: the graph after it.
      specs: the spec of each array after it, by slot.

    Returns:
      What changed, without sources, and the sources of the unchanged arrays, by slot after the
      call.
    """
    sources: dict[int, Source] = {}
    values: list[int] = []  # Variables whose arrays changed, and nothing else
    metadata: list[int] = []  # Variables whose metadata or kind of value changed
    nodes: list[NodeChange] = []  # the attributes of modules that changed
    statics: list[int] = []  # static objects, such as dicts of settings, that changed in place
    replaced: list[int] = []  # modules that the caller gets as new ones
    for index, old in enumerate(plan.structure.entries):
        # The same object after the call. An entry describes all but the arrays of an object, whose
        # slots are apart: an equal entry leaves open whether its arrays changed.
        new = after.structure.entries[index]
        slots = after.structure.slots[index]
        # Without graph updates, the caller's modules stay as they are, and one that is returned is
        # a new module. Flattening has left an entry only for those that a loop carries.
        if isinstance(new, NodeEntry) and not plan.updates:
            replaced.append(index)
        if not slots and new == old:  # it holds no arrays itself, and did not change
            continue
        # 1. Which of its arrays are unchanged, by slot after the call → before it, for arrays in
        # places that the object had before. The others are outputs.
        changed_slots = set(slots)
        for slot, old_slot in slots_before(plan.structure, after.structure, index).items():
            # A tracer that is still the same is an array that the function did not change. It is an
            # output all the same if its buffer is donated, or if it gets another sharding.
            is_same = after.leaves[slot] is leaves[old_slot]
            keeps_spec = specs[slot] == plan.object_specs[old_slot]
            if is_same and keeps_spec and old_slot not in plan.donated:
                sources[slot] = Source(INPUT, old_slot)
                changed_slots.discard(slot)
        # 2. What has to be written back to the caller's object.
        if isinstance(new, VariableEntry) and new != old:
            metadata.append(index)
        elif isinstance(new, VariableEntry) and changed_slots:
            values.append(index)
        elif isinstance(new, NodeEntry) and isinstance(old, NodeEntry) and plan.updates:
            # Attributes with another child, or with an array that changed.
            change = node_changes(index, old, after.structure, changed_slots)
            if change is not None:
                nodes.append(change)
        elif isinstance(new, StaticObject):  # it holds no arrays, so its entry differs
            statics.append(index)
    outcome = Outcome(
        structure=after.structure,
        sources=(),
        values=tuple(values),
        metadata=tuple(metadata),
        nodes=tuple(nodes),
        statics=tuple(statics),
        replaced=tuple(replaced),
    )
    return outcome, sources


def _group_numbers(plan: Plan, specs: Sequence[Spec], names: Sequence[str]) -> dict[Any, int]:
    """Returns the number of the group of outputs for each spec that an output can have.

    Raises a ``ValueError`` if some of ``specs`` have none; ``names`` are those of their arrays.
    """
    numbers = {spec: number for number, spec in enumerate(plan.out_specs)}
    # JAX needs the specs before the trace, but the function in a prefix of `nnx.prefix` is asked
    # about new Variables only in it, and may return others.
    pairs = zip(names, specs, strict=True)
    lines = [f"  {name}: {spec!r}" for name, spec in pairs if spec not in numbers]
    raise_listed(
        ValueError,
        f"{plan.transform.name}: nnx.prefix cannot shard Variables that the function creates, "
        "because it only sees the arguments. These are new, and get specs that no argument has:",
        lines,
        "Give its filters as StateSharding, or in vmap and scan as StateAxes.",
    )
    return numbers


def union(before: Structure, outcomes: Sequence[Outcome]) -> Outcome:
    """Returns one outcome for all branches of a ``cond`` or ``switch``.

    The structure after each branch is the same: other branches have been refused. So they agree in
    all that an outcome finds by comparing entries, but not in the arrays that they change. Arrays
    that one of them changes are outputs of all, in one group, in the order of their slots.

    Args:
      before: the structure of the arguments.
      outcomes: what each branch did to them.
    """
    first = outcomes[0]
    structure = first.structure
    sources: list[Source] = []  # by slot
    changed_slots: list[int] = []  # of arrays that a branch changes
    for slot, by_branch in enumerate(zip(*(outcome.sources for outcome in outcomes), strict=True)):
        if all(source.group == INPUT for source in by_branch):  # the same input in each branch
            sources.append(by_branch[0])
        else:
            sources.append(Source(0, len(changed_slots)))  # the only group
            changed_slots.append(slot)
    # An attribute of a module changes if its array changes in any branch, so changes of modules are
    # found again, with the arrays of all branches.
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
        metadata=first.metadata,  # these three follow from the entries alone
        statics=first.statics,
        replaced=first.replaced,
        nodes=tuple(change for change in nodes if change is not None),
        has_effects=any(outcome.has_effects for outcome in outcomes),
    )
