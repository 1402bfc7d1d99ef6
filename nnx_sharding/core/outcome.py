"""What a call did: the outputs of the program, and the changes of the caller's objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from .structure import Structure
from .unflatten import NodeChange


class OutputGroup:
    """Outputs with one spec, each with the name under which JAX's messages and HLO show it.

    JAX needs the shardings of outputs before it traces, when their number is not yet known.
    But their specs are known, those that the user wrote, so there is a group for each.
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
    OutputGroup,  # runs at every call: a wrapper would double its cost
    lambda group: (group.arrays, group.names),
)


@jax.tree_util.register_static
@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Outcome:
    """The static part of what a call did.

    Attributes:
      structure: the graph after the call. The input objects have the first indices; its root is the
        output of the function.
      sources: where each array of ``structure`` is: ``(group, position)`` among the outputs, or
        ``(-1, slot)`` for an unchanged input.
      values: indices of input Variables whose arrays changed.
      metadata: indices of input Variables whose metadata or kind of value changed.
      nodes: the attributes of input modules that changed.
      statics: indices of static objects of the inputs that were changed in place.
      update: what to write back, set by ``call.run`` at the first call from all of this.
    """

    structure: Structure
    sources: tuple[tuple[int, int], ...]
    values: tuple[int, ...]
    metadata: tuple[int, ...]
    nodes: tuple[NodeChange, ...]
    statics: tuple[int, ...]
    update: Any = dataclasses.field(default=None, compare=False)

    def arrays(self, inputs: Sequence[Any], groups: Sequence[OutputGroup]) -> list[Any]:
        """The arrays of ``structure``, from the inputs and outputs."""
        outputs = [group.arrays for group in groups]
        return [inputs[i] if group < 0 else outputs[group][i] for group, i in self.sources]
