"""The layers of a pipeline on their stages, and the arrays that stages send each other.

    S  stages, the shards of one mesh axis
    R  repeats: how often a microbatch passes through all stages
    D  depth: the layers that a stage calls at once, a *group*

The stack has L = R·S·D layers: layer (r·S + s)·D + d is the d-th one of stage s in repeat r. The
arrays of layers are (L, …) in the stack, and (S, R, D, …) on the stages. Arrays on stages have a
first dimension for the stages, which is sharded over the mesh axis.

*Further arguments* are all arguments of the layers but the rows ``x``. A *slot* is the position of
an array in the flattened layers (``Flat``: their ``structure``, the ``objects`` in them, and the
arrays as ``leaves``). Values that ``sow`` collects have slots as well, but in no fixed number.
Layers may change Variables of a copy, and the caller then writes the changes back
(:func:`write_back`). The schedules are in ``pipeline_loop.py`` (GPipe) and ``pipeline_1f1b.py``.
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
from ..core.in_c import perform
from ..core.rebuild import update_operations
from ..core.structure import VariableEntry
from ..core.unflatten import unflatten
from ..specs.fitting import axes_of, keep_axes, spec_axes
from ..specs.paths import Path
from ..specs.types import AnyMesh
from ..transforms.in_trace import replace_slots, traced_slots
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

# Whether a call is within a pipeline. Stacks and blocks are then called as they are.
RUNNING: ContextVar[bool] = ContextVar("RUNNING", default=False)


@dataclasses.dataclass(frozen=True)
class PipelineSizes:
    """The mesh axis of the stages, and S (``stages``), M (``microbatches``) and R (``repeats``)."""

    axis: str
    stages: int
    microbatches: int
    repeats: int

    @property
    def items(self) -> int:
        """The number of ticks in which a stage computes an item: R·M."""
        return self.repeats * self.microbatches

    @property
    def ticks(self) -> int:
        """The number of ticks in which a stage computes or waits: R·M + S - 1."""
        return self.items + self.stages - 1


class OtherArrays(NamedTuple):
    """The slots of the arrays that layers get besides the rows and arrays of their own.

    These arrays are in the further arguments, or in the layers, if all layers share them. A shared
    array has no dimension for the layers.
    """

    flat_further: Flat  # the further arguments
    further_slots: Sequence[int]  # the slots of arrays in `flat_further`
    shared_slots: Sequence[int]  # the slots, in the layers, of the arrays that all layers share


class StagedLayers:
    """The layers of a ``Stack`` on the stages of a pipeline.

    Attributes:
      sizes: the sizes of the pipeline.
      stack: the ``Stack``.
      further: the further arguments of the layers, ``(args, kwargs)``.
      mesh: the mesh of the call.
      row_entry: the entry of a spec for a dimension of rows, in a list; empty if they are whole.
      depth: how many layers a stage calls at once, D.
      flat: the layers, flattened: their arrays are (L, …). `write_layers` writes to its objects.
      slots: the slots of the arrays, (L, …), that layers do not share.
      call_layers: calls a group of layers, ``(layers, x, args, kwargs) → x``.

    ``_specs`` has for each slot the spec of the array of one layer. The spec is ``P()`` unless the
    layers are the blocks of a list, whose arrays may be sharded over the stages. ``_other_arrays``
    has the slots of the arrays that layers get besides their own, found at the first use.
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
        """Flattens the layers.

        Args:
          sizes: the sizes of the pipeline; S·R divides the number of layers.
          stack: the layers.
          further: the further arguments of the layers.
          mesh: the mesh of the call, whose axes are Auto.
          row_axes: the mesh axes that shard the rows.
          block_specs: for the blocks of a list, by path, the specs of the arrays of one block,
            which may shard a dimension of the block over the stages; empty for a ``Stack``.
        """
        self.sizes, self.stack, self.further, self.mesh = sizes, stack, further, mesh
        self.row_entry = [row_axes] if row_axes else []
        self.depth = stack.length // (sizes.stages * sizes.repeats)
        self.flat = flatten_layer(stack.layers)
        self.slots = stacked_slots(self.flat, stack.shared)
        self._specs = dict[int, PartitionSpec]()
        for location in locations_of(self.flat):
            spec = block_specs.get(location.path, PartitionSpec())
            self._specs.update(dict.fromkeys(location.slots, spec))
        # `call_layers` is a loop over the D layers of a stage. With remat=True, the caller
        # recomputes the whole stage, so that only the input of the stage is kept. If each layer was
        # recomputed, the input of each layer would be kept.
        policy = False if self.is_remat else stack.remat
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
        flat_copy = flatten_layer(with_arrays(self.flat, arrays))
        old = {slot: self.flat.leaves[slot] for slot in arrays}
        # An array of the copy is (S, D, …). The layers get it in their own order and shape:
        # (S, D, …) → (S, 1, D, …) → (L, …).
        write_back(self.flat, flat_copy, old, lambda _, leaf: self.from_stages(leaf[:, None]))

    @functools.cached_property
    def _other_arrays(self) -> OtherArrays:
        """The slots of the arrays that layers get besides the rows and arrays of their own."""
        flat_further = flatten(self.further)
        # All layers share the arrays that are not in `slots`.
        own_slots = {*self.slots}
        shared_slots = [slot for slot in traced_slots(self.flat.leaves) if slot not in own_slots]
        return OtherArrays(flat_further, traced_slots(flat_further.leaves), shared_slots)

    def other_arrays(self) -> list[Any]:
        """Returns the arrays that layers get besides the rows and arrays of their own.

        First come the arrays in further arguments, then the arrays that all layers share.
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
          x: the input of the first layer.
          others: the other arrays, in the order of :meth:`other_arrays`.

        Returns:
          A pair: the output of the last layer, and the arrays that layers have written, by slot.
        """
        flat_further, further_slots, shared_slots = self._other_arrays
        num_further = len(further_slots)
        # The layers are copied, because they may change their Variables.
        shared = dict(zip(shared_slots, others[num_further:], strict=True))
        group = with_arrays(self.flat, {**arrays, **shared})
        flat_before = flatten_layer(group)
        pass_tags(self.flat, flat_before)
        # The further arguments, ``(args, kwargs)`` with modules among them, are copied as well.
        leaves = replace_slots(flat_further.leaves, further_slots, others[:num_further])
        further = unflatten(flat_further.structure, leaves)
        pass_tags(flat_further, further)
        args, kwargs = further.root
        token = RUNNING.set(True)  # keeps a Stack within a layer from running as a pipeline
        try:
            out = self.call_layers(group, x, args, kwargs)
        finally:
            RUNNING.reset(token)
        # If layers have written to a Variable, it holds another array than before.
        flat_after = flatten_layer(group)
        written: dict[int, jax.Array] = {}
        for slot in arrays:
            if flat_after.leaves[slot] is not flat_before.leaves[slot]:
                written[slot] = flat_after.leaves[slot]
        return out, written

    def send(self, x: jax.Array, shift: int = 1) -> jax.Array:
        """Sends an array of each stage, (S, rows, …), to another stage, in a ring.

        Args:
          x: the arrays that stages send.
          shift: 1 for the next stage, -1 for the stage before.

        Returns:
          The arrays that stages get, (S, rows, …).
        """
        axis, stages = self.sizes.axis, self.sizes.stages
        pairs = [(i, (i + shift) % stages) for i in range(stages)]  # (source, destination)
        # `jnp.roll` is not used, because its gradient would be two permutations.
        send: Callable[[jax.Array], jax.Array] = jax.shard_map(
            lambda x: jax.lax.ppermute(x, axis, pairs),
            mesh=self.mesh,
            in_specs=PartitionSpec(axis),
            out_specs=PartitionSpec(axis),
            axis_names={axis},
        )
        return self.constrain_rows(send(x))

    def take_on_stages(self, x: jax.Array, indices: jax.Array) -> jax.Array:
        """Takes from the array of each stage the part at an index: (S, K, …) → (S, …).

        Args:
          x: the arrays of the stages, each with K parts.
          indices: the index of each stage, in 0 … K-1, (S,).
        """

        def take_own(x: jax.Array, index: jax.Array) -> jax.Array:
            """Runs on one stage, which has x (1, K, …) and index (1,)."""
            return take(x, index[0], axis=1)  # (1, …)

        # `vmap` is not used, because the compiler may not divide its gather over the stages.
        on_stages: Callable[[jax.Array, jax.Array], jax.Array] = jax.shard_map(
            take_own,
            mesh=self.mesh,
            in_specs=PartitionSpec(self.axis),
            out_specs=PartitionSpec(self.axis),
            axis_names={self.axis},
        )
        return self.constrain(on_stages(x, indices))

    def constrain_rows(self, x: jax.Array) -> jax.Array:
        """Constrains an array (S, rows, …): stages over their axis, rows over the row axes."""
        return self.constrain(x, *self.row_entry)

    def constrain(self, x: jax.Array, *entries: object) -> jax.Array:
        """Constrains an array (S, …) to its stages, in a trace.

        Without the constraint, the compiler might compute the whole array on each device.

        Args:
          x: the array.
          *entries: entries of a spec, for the dimensions after the first one. The compiler chooses
            how the dimensions after these are sharded.
        """
        free_entries = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1 - len(entries))
        spec = PartitionSpec(self.axis, *entries, *free_entries)
        constrained = jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
        return cast(jax.Array, constrained)

    def to_stages(self, slot: int) -> jax.Array:
        """Puts an array of the layers, (L, …), on the stages that call them: (S, R, D, …)."""
        leaf = self.flat.leaves[slot]
        sizes = (self.sizes.repeats, self.sizes.stages, self.depth)
        groups = leaf.reshape(*sizes, *leaf.shape[1:])  # (R, S, D, …)
        groups = jnp.swapaxes(groups, 0, 1)  # (S, R, D, …)
        spec = self._specs[slot]  # the spec of one layer's array, (…)
        if self.axis in spec_axes(spec):
            layers = groups.reshape(leaf.shape)  # (L, …), in the order of stages
            groups = self._exchange_parts(layers, spec).reshape(groups.shape)  # (S, R, D, …)
        return self.constrain(groups)

    def _exchange_parts(self, layers: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Gives each stage its layers, if it has had a part of each layer.

        The layers are the blocks of a list, and one dimension of a layer is sharded over the
        stages. A stage sends each other stage the parts of that stage's layers, and gets the
        missing parts of its own layers: on one of S stages, (L, …, n/S, …) → (L/S, …, n, …).

        Args:
          layers: the arrays of all layers, (L, …), in the order of the stages that call them.
          spec: the spec of one layer's array, (…), which has the axis of the stages.
        """
        axis = self.axis
        # There is one such dimension, because a spec names an axis once.
        [dimension] = [i for i, entry in enumerate(spec.partitions) if axis in axes_of(entry)]
        axes = {*spec_axes(spec)}
        other_axes = keep_axes(spec, axes - {axis})
        move: Callable[[jax.Array], jax.Array] = jax.shard_map(
            lambda x: jax.lax.all_to_all(x, axis, 0, dimension + 1, tiled=True),
            mesh=self.mesh,
            in_specs=PartitionSpec(None, *spec.partitions),
            out_specs=PartitionSpec(axis, *other_axes.partitions),
            axis_names=axes,
        )
        return move(layers)

    def from_stages(self, leaf: jax.Array) -> jax.Array:
        """Puts an array back into the order of the layers: (S, R, D, …) → (L, …)."""
        groups = jnp.swapaxes(leaf, 0, 1)  # (R, S, D, …)
        return self.constrain(groups.reshape(-1, *leaf.shape[3:]))


def take(x: jax.Array, index: jax.Array, axis: int = 0) -> jax.Array:
    """Returns the part of an array at an index along an axis, without this axis."""
    return cast(jax.Array, jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False))


def put(x: jax.Array, part: jax.Array, index: jax.Array, axis: int = 0) -> jax.Array:
    """Returns x with ``part`` at an index along an axis, where `take` would read it."""
    return cast(jax.Array, jax.lax.dynamic_update_index_in_dim(x, part, index, axis))


def where_stage(on_stage: jax.Array, x: Any, y: Any) -> jax.Array:
    """Returns x on the stages where ``on_stage``, (S,), is true, and y on the other stages.

    The arrays x and y are (S, …), but one of them may be the same for all stages, (…). If
    ``on_stage`` is (1, S), they are (n, S, …).
    """
    ndim = max(jnp.ndim(x), jnp.ndim(y))
    trailing_dims = range(on_stage.ndim, ndim)
    return jnp.where(jnp.expand_dims(on_stage, tuple(trailing_dims)), x, y)


def write_back(
    flat: Flat,
    flat_copy: Flat,
    old: Mapping[int, object],
    in_form: Callable[[int, jax.Array], jax.Array],
) -> None:
    """Writes the arrays that have changed in a copy of layers to the Variables of the layers.

    A Variable has changed if it holds another array than before, because arrays do not change in
    place.

    Args:
      flat: the layers.
      flat_copy: the copy, as it is now.
      old: the arrays that the copy had, by the slots of the layers.
      in_form: returns the array to write to the layers, from the slot and the new array of the
        copy, because the copy may have arrays of another shape.

    Raises:
      ValueError: the copy has Variables that the layers have not.
    """
    structure = flat.structure
    # There is an entry for each object, so both have as many entries, in the same order.
    if len(flat_copy.structure.entries) != len(structure.entries):
        raise ValueError(
            "pipeline: layers may not make Variables while they run in a pipeline, as by sow. "
            "Return the values, with a dimension for the rows: x, loss = blocks((x, loss))."
        )
    # The arrays of the copy by the slots of the layers. The copy has other slots if layers have
    # sown more arrays in it, so arrays are matched object by object. Sown arrays are left out.
    copy_leaves = dict[int, Any]()
    for index in {*range(len(structure.slots))}.difference(captures(structure)):
        pairs = zip(structure.slots[index], flat_copy.structure.slots[index], strict=True)
        for slot, slot_in_copy in pairs:
            copy_leaves[slot] = flat_copy.leaves[slot_in_copy]
    # By the slots of the layers, the arrays to write. All others are the same as before.
    new = {
        slot: in_form(slot, copy_leaves[slot])
        for slot, old_leaf in old.items()
        if copy_leaves[slot] is not old_leaf
    }
    variables_to_write = [  # by index
        index
        for index, slots in enumerate(structure.slots)
        if isinstance(structure.entries[index], VariableEntry) and not new.keys().isdisjoint(slots)
    ]
    leaves = replace_slots(flat.leaves, slots=new.keys(), arrays=new.values())
    # Everything new is made before the first Variable changes, so an error changes none of them.
    perform(update_operations(structure, leaves, flat.objects, variables_to_write))
