"""The layers of a pipeline on their stages, and what stages send each other.

    S  stages, the shards of one mesh axis
    R  repeats: how often a microbatch passes through all stages
    D  depth: the layers that a stage calls at once, a *group*

The stack has L = R·S·D layers: layer (r·S + s)·D + d is the d-th one of stage s in repeat r. The
arrays of layers are (L, …) in the stack, and (S, R, D, …) on the stages; the first dimension of all
that is on stages is sharded over the mesh axis.

*Further arguments* are what all layers get besides the rows ``x``. A *slot* is the position of an
array in the flattened layers (``Flat``: their ``structure``, the ``objects`` in them, and the
arrays as ``leaves``); what ``sow`` collects has slots, too, but in no fixed number. Whoever changes
Variables of a copy of the layers writes that back (:func:`write_back`). The schedules are those of
``pipeline_loop.py`` (GPipe) and ``pipeline_1f1b.py``.

From other modules: `flatten_layer` returns the ``Flat`` of layers; `with_arrays` makes new layers
with other arrays in some slots; `replace_slots` does so in a list of leaves; `pass_tags` lets
copies of modules be known as the originals, for their activation shardings.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..activations.trace_keys import pass_tags
from ..core.flatten import Flat, flatten
from ..core.rebuild import update_operations
from ..core.structure import VariableEntry
from ..core.unflatten import perform, unflatten
from ..specs.fitting import axes_of, keep_axes, spec_axes
from ..specs.paths import Path
from ..specs.types import AnyMesh
from ..transforms.in_trace import is_traced, replace_slots, traced_slots
from ..transforms.mapped_axes import captures
from ..transforms.stack import Stack
from ..transforms.stacked_layers import (
    flatten_layer,
    layer_axes,
    locations_of,
    loop_of_calls,
    stacked_slots,
    with_arrays,
)

# The further arguments of layers: positional and keyword ones.
Further: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

# Whether a call is within a pipeline, where stacks and blocks are called as they are.
RUNNING: ContextVar[bool] = ContextVar("RUNNING", default=False)


@dataclasses.dataclass(frozen=True)
class PipelineSizes:
    """The mesh axis of the stages, and S, M and R."""

    axis: str
    stages: int
    microbatches: int
    repeats: int

    @property
    def items(self) -> int:
        """How often each stage computes something: R·M."""
        return self.repeats * self.microbatches

    @property
    def ticks(self) -> int:
        """How often each stage computes, or waits: R·M + S - 1."""
        return self.items + self.stages - 1


class OtherArrays(NamedTuple):
    """Where the arrays are that layers get besides their own and the rows, in this order."""

    flat_further: Flat  # the further arguments
    further_slots: Sequence[int]  # those of their arrays, in `flat_further`
    shared_slots: Sequence[int]  # those of the arrays that all layers share, in the layers


class StagedLayers:
    """The layers of a ``Stack`` on the stages of a pipeline.

    Args:
      sizes: the sizes of the pipeline; S·R divides the number of layers.
      stack: the layers.
      further: the further arguments of the layers.
      mesh: the mesh of the call, whose axes are Auto.
      row_axes: the mesh axes that shard the rows.
      block_specs: the specs of the arrays of one layer, by path, that shard it over the stages in
        another dimension than that of the layers, as the blocks of a list are.

    Attributes:
      sizes, stack, further, mesh: as given.
      row_entry: the entry of a spec for a dimension of rows, in a list; empty if they are whole.
      depth: how many layers a stage calls at once, D.
      flat: the layers, flattened: their arrays are (L, …).
      slots: those of the arrays that layers have for themselves, not shared.
      call_layers: calls a group of layers, ``(layers, x, args, kwargs) → x``.
    """

    def __init__(
        self,
        sizes: PipelineSizes,
        stack: Stack,
        further: Further,
        mesh: AnyMesh,
        row_axes: tuple[str, ...],
        block_specs: Mapping[Path, PartitionSpec],
    ):
        self.sizes, self.stack, self.further, self.mesh = sizes, stack, further, mesh
        self.row_entry = [row_axes] if row_axes else []
        self.depth = stack.length // (sizes.stages * sizes.repeats)
        self.flat = flatten_layer(stack.layers)
        self.slots = stacked_slots(self.flat, stack.shared)
        self._specs = {  # of an array of one layer, by slot
            slot: block_specs.get(x.path, PartitionSpec())
            for x in locations_of(self.flat)
            for slot in x.slots
        }
        # With remat=True only the input of a stage is kept, which is less than those of all layers.
        policy = False if stack.remat is True else stack.remat
        axes = layer_axes(stack.shared)
        self.call_layers = loop_of_calls(axes, self.depth, stack.unroll, policy)

    @property
    def axis(self) -> str:
        """The mesh axis of the stages."""
        return self.sizes.axis

    @property
    def stages(self) -> int:
        """The number of stages, S."""
        return self.sizes.stages

    @property
    def is_remat(self) -> bool:
        """Whether only the input of a stage is kept for its backward pass."""
        return self.stack.remat is True

    def layers_by_stage(self) -> dict[int, jax.Array]:
        """Returns the arrays of the layers on their stages, (S, D, …), by slot; for one repeat."""
        return {slot: self.to_stages(slot)[:, 0] for slot in self.slots}

    def write_layers(self, arrays: Mapping[int, jax.Array]) -> None:
        """Writes arrays, (S, D, …) by slot, to the layers; for one repeat."""
        after = flatten_layer(with_arrays(self.flat, arrays))
        before = {slot: self.flat.leaves[slot] for slot in arrays}
        # Each (S, D, …) → (S, 1, D, …) → (L, …).
        write_back(self.flat, after, before, lambda _, leaf: self.from_stages(leaf[:, None]))

    @functools.cached_property
    def _other_arrays(self) -> OtherArrays:
        """Where the arrays are that layers get besides their own and the rows."""
        flat_further, leaves = flatten(self.further), self.flat.leaves
        shared = {*range(len(leaves))}.difference(self.slots)
        return OtherArrays(
            flat_further=flat_further,
            further_slots=traced_slots(flat_further.leaves),
            shared_slots=[slot for slot in shared if is_traced(leaves[slot])],
        )

    def other_arrays(self) -> list[Any]:
        """Returns what layers get besides their own arrays and the rows.

        These are the arrays in further arguments, and those that all layers share.
        """
        flat_further, further_slots, shared_slots = self._other_arrays
        return [
            *(flat_further.leaves[slot] for slot in further_slots),
            *(self.flat.leaves[slot] for slot in shared_slots),
        ]

    def call_group(
        self, arrays: Mapping[int, jax.Array], x: Any, others: Sequence[Any]
    ) -> tuple[Any, dict[int, jax.Array]]:
        """Calls the layers of one stage, with other arrays in place of their own.

        Args:
          arrays: the arrays of the layers, (D, …), by slot.
          x: what the first one gets.
          others: as in :meth:`other_arrays`.

        Returns:
          What the last one returns, and the arrays that layers have written, by slot.
        """
        flat_further, further_slots, shared_slots = self._other_arrays
        count = len(further_slots)
        shared = dict(zip(shared_slots, others[count:], strict=True))
        group = with_arrays(self.flat, {**arrays, **shared})
        before = flatten_layer(group)
        pass_tags(self.flat, before)
        leaves = replace_slots(flat_further.leaves, further_slots, others[:count])
        further = unflatten(flat_further.structure, leaves)
        pass_tags(flat_further, further)
        args, kwargs = further.root
        token = RUNNING.set(True)
        try:
            out = self.call_layers(group, x, args, kwargs)
        finally:
            RUNNING.reset(token)
        after = flatten_layer(group)
        pairs = ((slot, after.leaves[slot]) for slot in arrays)
        return out, {slot: x for slot, x in pairs if x is not before.leaves[slot]}

    def send(self, x: jax.Array, shift: int = 1) -> jax.Array:
        """Sends what each stage returned, (S, rows, …), in a ring.

        Args:
          x: what stages send.
          shift: 1 for the next stage, -1 for the one before.
        """
        axis, stages = self.sizes.axis, self.sizes.stages
        pairs = [(i, (i + shift) % stages) for i in range(stages)]  # (source, destination)
        # Not `jnp.roll`, whose gradient would be two permutations.
        send: Callable[[jax.Array], jax.Array] = jax.shard_map(
            lambda x: jax.lax.ppermute(x, axis, pairs),
            mesh=self.mesh,
            in_specs=PartitionSpec(axis),
            out_specs=PartitionSpec(axis),
            axis_names={axis},
        )
        return self.constrain_rows(send(x))

    def take_on_stages(self, x: jax.Array, indices: jax.Array) -> jax.Array:
        """Takes a part of each stage's own array: (S, K, …), and indices (S,) → (S, …)."""
        # Not `vmap`, whose gather the compiler may not divide over the stages.
        take_own: Callable[[jax.Array, jax.Array], jax.Array] = jax.shard_map(
            lambda x, index: take(x, index[0], axis=1),
            mesh=self.mesh,
            in_specs=PartitionSpec(self.sizes.axis),
            out_specs=PartitionSpec(self.sizes.axis),
            axis_names={self.sizes.axis},
        )
        return self.constrain(take_own(x, indices))

    def constrain_rows(self, x: jax.Array) -> jax.Array:
        """Shards the first dimension over the stages, and the rows, which are the next, as such."""
        return self.constrain(x, *self.row_entry)

    def constrain(self, x: jax.Array, *entries: object) -> jax.Array:
        """Shards the first dimension over the stages, and the next ones as these entries say."""
        rest = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1 - len(entries))
        # Other dimensions stay as the compiler and the layers shard them.
        spec = PartitionSpec(self.sizes.axis, *entries, *rest)
        constrained = jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
        return cast(jax.Array, constrained)

    def to_stages(self, slot: int) -> jax.Array:
        """Puts an array of the layers, (L, …), on the stages that call them: (S, R, D, …)."""
        leaf, spec, axis = self.flat.leaves[slot], self._specs[slot], self.sizes.axis
        sizes = (self.sizes.repeats, self.sizes.stages, self.depth)
        groups = leaf.reshape(*sizes, *leaf.shape[1:])  # (R, S, D, …)
        groups = jnp.swapaxes(groups, 0, 1)  # (S, R, D, …)
        axes = {*spec_axes(spec)}
        if axis not in axes:
            return self.constrain(groups)
        # A block of a list: each stage has a part of all layers, in this dimension of a layer, and
        # gets all of its own layers.
        [dimension] = [i for i, entry in enumerate(spec.partitions) if axis in axes_of(entry)]
        others = keep_axes(spec, axes - {axis})
        move: Callable[[jax.Array], jax.Array] = jax.shard_map(
            lambda x: jax.lax.all_to_all(x, axis, 0, dimension + 1, tiled=True),
            mesh=self.mesh,
            in_specs=PartitionSpec(None, *spec.partitions),
            out_specs=PartitionSpec(axis, *others.partitions),
            axis_names=axes,
        )
        moved = move(groups.reshape(leaf.shape))  # (L, …), in the order of the stages
        return self.constrain(moved.reshape(groups.shape))

    def from_stages(self, leaf: jax.Array) -> jax.Array:
        """Puts an array back into the order of the layers: (S, R, D, …) → (L, …)."""
        groups = jnp.swapaxes(leaf, 0, 1)  # (R, S, D, …)
        return self.constrain(groups.reshape(-1, *leaf.shape[3:]))


def take(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    """Returns the part of an array at an index, without this dimension."""
    return cast(jax.Array, jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False))


def write_back(
    flat: Flat,
    after: Flat,
    before: Mapping[int, object],
    in_form: Callable[[int, jax.Array], jax.Array],
) -> None:
    """Updates the Variables of layers from those of a copy that have changed.

    Args:
      flat: the layers.
      after: the copy, as it is now.
      before: the arrays that the copy had, by slot.
      in_form: returns what to write, from the slot and the new array of the copy.

    Raises:
      ValueError: the copy has Variables that the layers have not.
    """
    structure = flat.structure
    if len(after.structure.entries) != len(structure.entries):
        raise ValueError(
            "pipeline: layers may not make Variables while they run in a pipeline, as by sow. "
            "Return the values, with a dimension for the rows: x, loss = blocks((x, loss))."
        )
    # What layers sow has another number of arrays in the copy, so slots are found by the object.
    leaves_after = dict[int, Any]()
    for index in {*range(len(structure.slots))}.difference(captures(structure)):
        pairs = zip(structure.slots[index], after.structure.slots[index], strict=True)
        leaves_after |= {slot: after.leaves[slot_after] for slot, slot_after in pairs}
    new = {
        slot: in_form(slot, leaves_after[slot])
        for slot, old in before.items()
        if leaves_after[slot] is not old
    }
    written_to = [
        index
        for index, slots in enumerate(structure.slots)
        if isinstance(structure.entries[index], VariableEntry)
        if not new.keys().isdisjoint(slots)
    ]
    leaves = replace_slots(flat.leaves, new, new.values())
    perform(update_operations(structure, leaves, flat.objects, written_to))
