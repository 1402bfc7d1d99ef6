"""What a call did: the outputs of the program, and the changes of the caller's objects."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from .structure import Structure
from .unflatten import NodeChange


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


jax.tree_util.register_pytree_node(
    Outcome,
    lambda outcome: ((), outcome),
    functools.partial(max, key=bool),  # of the outcome and (), without any Python code
)
