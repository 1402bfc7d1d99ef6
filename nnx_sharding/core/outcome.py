"""What a call did: the outputs of the program, and the changes of the caller's objects."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from .structure import Structure
from .unflatten import NodeChange, node_changes


class OutputGroup(Exception):
    """Outputs with one spec, each with the name under which JAX's messages and HLO show it.

    JAX needs the shardings of outputs before it traces, when their number is not yet known.
    But their specs are known, those that the user wrote, so there is a group for each.

    JAX makes groups of what a program returns. No Python code may run there, since a signal would
    interrupt it, and lose arrays that replace donated ones. Only the constructor of an exception
    takes any arguments and is written in C.
    """

    args: tuple[tuple[str, ...], Any]

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
    """The static part of what a call did; objects are indices."""

    # The graph after the call: first the input objects, and as its root the output of the function.
    structure: Structure
    # Of each array of it: the group and position among the outputs, or -1 and the slot of an input.
    sources: tuple[tuple[int, int], ...]
    values: tuple[int, ...]  # input Variables whose arrays changed
    metadata: tuple[int, ...]  # those whose metadata or kind of value changed
    nodes: tuple[NodeChange, ...]  # the changed attributes of input modules
    statics: tuple[int, ...]  # static objects of the inputs that were changed in place
    copied: tuple[int, ...] = ()  # input modules in whose place new ones are returned
    has_effects: bool = False  # whether the program has side effects, such as callbacks
    # What to write back, set by ``call.run`` at the first call from all of this.
    update: Any = dataclasses.field(default=None, compare=False)

    def arrays(self, inputs: Sequence[Any], groups: Sequence[OutputGroup]) -> list[Any]:
        """The arrays of ``structure``, from the inputs and outputs."""
        outputs = [group.arrays for group in groups]
        return [inputs[i] if group < 0 else outputs[group][i] for group, i in self.sources]


def union(before: Structure, outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of whichever of several functions runs; the structure after each is the same.

    Arrays that one of them changes are outputs of all, in one group, in the order of their slots.
    """
    first, structure = outcomes[0], outcomes[0].structure
    every = [*zip(*(outcome.sources for outcome in outcomes), strict=True)]
    fresh = [slot for slot, sources in enumerate(every) if max(sources)[0] >= 0]
    places = {slot: (0, position) for position, slot in enumerate(fresh)}
    entries: Any = before.entries
    nodes = sorted({change.node for outcome in outcomes for change in outcome.nodes})
    changes = (node_changes(i, entries[i], structure, {*fresh}) for i in nodes)
    return Outcome(
        structure,
        tuple(places.get(slot, sources[0]) for slot, sources in enumerate(every)),
        tuple(sorted({index for outcome in outcomes for index in outcome.values})),
        first.metadata,
        tuple(change for change in changes if change is not None),
        first.statics,
        first.copied,
        any(outcome.has_effects for outcome in outcomes),
    )


jax.tree_util.register_pytree_node(
    Outcome,
    lambda outcome: ((), outcome),
    functools.partial(max, key=bool),  # of the outcome and (), without any Python code
)
