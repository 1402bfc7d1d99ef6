"""What a call did: the outputs of the program, and the changes of the caller's objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from .structure import Structure
from .unflatten import NodeChange


class OutputGroup:
    """Outputs of one spec, each with the name under which JAX's messages and HLO show it.

    JAX wants the shardings of outputs before it traces, when their number is not known yet.
    The specs are known: they are those that the user wrote. So there is a group for each.
    """

    __slots__ = ("arrays", "names")

    def __init__(self, names: tuple[str, ...], arrays: Any):
        self.names = names
        self.arrays = arrays


jax.tree_util.register_pytree_with_keys(
    OutputGroup,
    lambda group: (
        tuple(zip(map(jax.tree_util.GetAttrKey, group.names), group.arrays, strict=True)),
        group.names,
    ),
    OutputGroup,  # called at every call: a function around it would cost as much again
    lambda group: (group.arrays, group.names),
)


@jax.tree_util.register_static
@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Outcome:
    """The static part of what a call did.

    Attributes:
      structure: the graph after the call. The objects that went in have the first indices;
        its root is the output of the function.
      sources: for each array of ``structure`` where it is found: ``(group, position)`` among
        the outputs, or ``(-1, slot)`` for an input that was left alone.
      values: indices of input Variables whose arrays changed.
      metadata: indices of input Variables whose metadata or kind of value changed.
      nodes: the attributes of input modules that changed.
      statics: indices of static objects of the inputs that were changed in place.
      update: set by ``call.run`` at the first call: what to write back, worked out from all this.
    """

    structure: Structure
    sources: tuple[tuple[int, int], ...]
    values: tuple[int, ...]
    metadata: tuple[int, ...]
    nodes: tuple[NodeChange, ...]
    statics: tuple[int, ...]
    update: Any = dataclasses.field(default=None, compare=False)

    def arrays(self, inputs: Sequence[Any], groups: Sequence[OutputGroup]) -> list[Any]:
        """For each array of ``structure`` the input or output that it is."""
        outputs = [group.arrays for group in groups]
        return [inputs[i] if group < 0 else outputs[group][i] for group, i in self.sources]
