"""The loop of a pipeline: layers on stages, through which microbatches pass.

    S  stages, the shards of one mesh axis
    M  microbatches; microbatch i has every M-th row of the batch, ``x[i::M]``
    R  repeats: how often a microbatch passes through all stages (1: GPipe; more: circular)
    D  depth: the layers that a stage calls at once, a *group*

The stack has L = R·S·D layers: layer (r·S + s)·D + d is the d-th one of stage s in repeat r. An
*item* is one microbatch in one repeat: item i is microbatch i mod M in repeat i div M. At tick t,
stage s computes item t - s. For S = 3, M = 4 and R = 2, with a1 for microbatch a in repeat 1::

    tick      0   1   2   3   4   5   6   7   8   9
    stage 0   a0  b0  c0  d0  a1  b1  c1  d1  .   .
    stage 1   .   a0  b0  c0  d0  a1  b1  c1  d1  .
    stage 2   .   .   a0  b0  c0  d0  a1  b1  c1  d1

Each array has a first dimension for the stages, sharded over the mesh axis. One tick is

    feed      the first stage takes a microbatch from its buffer; others have what they were sent
    compute   ``vmap`` over the stages of "call my group of layers"
    send      ``ppermute``: each stage to the next one, and the last one to the first, which stores
              that in its buffer, where it has read the microbatch: as the input of the next repeat,
              or as a result

All R·M + S - 1 ticks are one ``scan``, so that autodiff gives the schedule of the backward pass. It
is one program for all stages: each has a buffer, though only that of the first is read, and a stage
without an item (``.``) computes as well, with rows of the batch; what it returns is never stored,
and what it writes to Variables is discarded.

*Further arguments* are what all layers get besides the rows ``x``; those that have rows, too, are
on all stages, and each takes the rows of its microbatch. A *slot* is the position of an
array in the flattened layers (``Flat``); what ``sow`` collects has slots, too, but in no fixed
number. Whoever changes Variables of a copy of the layers writes that back (:func:`write_back`).

The schedule is that of GPipe (Huang et al., 2019, arXiv:1811.06965), with the repeats of
Megatron-LM (Narayanan et al., 2021, arXiv:2104.04473); its form as one program is that of GSPMD (Xu
et al., 2021, arXiv:2105.04663, section 3.3).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from .. import _compat
from ..activations.trace_keys import pass_tags
from ..core.flatten import Flat, flatten
from ..core.rebuild import update_operations
from ..core.structure import VariableEntry
from ..core.unflatten import perform, unflatten
from ..specs.fitting import axes_of, keep_axes, spec_axes
from ..specs.paths import Path
from ..specs.types import AnyMesh
from ..transforms.in_trace import is_traced, replace_slots, traced_slots
from ..transforms.mapped_axes import Carry, captures
from ..transforms.remat import remat
from ..transforms.scan import scan
from ..transforms.stack import Stack
from ..transforms.stacked_layers import (
    LAYER_OPTIONS,
    flatten_layer,
    layer_axes,
    locations_of,
    loop_of_calls,
    name_axis,
    stacked_slots,
    with_arrays,
)
from ..transforms.vmap import vmap

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


class PipelineLoop:
    """One call of a ``Stack`` in stages.

    Args:
      sizes: the sizes of the pipeline; S·R divides the number of layers.
      stack: the layers.
      further: the further arguments of the layers.
      mesh: the mesh of the call, whose axes are Auto.
      row_axes: the mesh axes that shard the rows.
      block_specs: the specs of the arrays of one layer, by path, that shard it over the stages in
        another dimension than that of the layers, as the blocks of a list are.
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
        self._sizes, self._stack, self._further, self.mesh = sizes, stack, further, mesh
        self._row_entry = [row_axes] if row_axes else []  # of specs, for a dimension of rows
        self._depth = stack.length // (sizes.stages * sizes.repeats)
        self._flat = flatten_layer(stack.layers)
        self._slots = stacked_slots(self._flat, stack.shared)
        self._specs = {
            slot: block_specs.get(x.path, PartitionSpec())
            for x in locations_of(self._flat)
            for slot in x.slots
        }
        axes = layer_axes(stack.shared)
        # With remat=True only the input of a stage is kept, which is less than those of all layers.
        policy = False if stack.remat is True else stack.remat
        self._call_group = loop_of_calls(axes, self._depth, stack.unroll, policy)
        call_stage = self.call_stage
        if stack.remat is True:
            call_stage = remat(call_stage, prevent_cse=False, graph=True, graph_updates=True)
        self._call_stages = vmap(
            call_stage, in_axes=(axes, 0, 0, None), spmd_axis_name=sizes.axis, **LAYER_OPTIONS
        )

    def run(self, x: Any, has_rows: Sequence[bool]) -> Any:
        """Returns what the last layer returns for a batch, and updates the layers.

        Args:
          x: a pytree of arrays of shape (batch, …).
          has_rows: for each leaf in the further arguments whether it is an array (batch, …) of
            the same rows.
        """
        self._leaves, self._treedef = jax.tree.flatten(
            self._further, is_leaf=_compat.is_graph_object
        )
        # Of those that have rows, by position: (M, rows, …).
        self._microbatches_of = {
            i: self._microbatches(leaf)
            for i, (leaf, splits) in enumerate(zip(self._leaves, has_rows, strict=True))
            if splits
        }
        flat, slots = self._flat, self._slots
        rows = len(jax.tree.leaves(x)[0]) // self._sizes.microbatches
        # A copy with another shape; the caller's layers are written to after the loop.
        layers = _copy(flat, {s: self._to_stages(s) for s in slots}, self._stack, nnx.spmd.add_axis)
        before = flatten_layer(layers)
        buffer = jax.tree.map(self._split_rows, x)  # (S, M, rows, …)
        # Stages that wait compute with rows of the batch, as zeros might have no finite gradient.
        inputs = jax.tree.map(lambda parts: parts[:, 0], buffer)  # (S, rows, …)
        ticks = scan(self.run_tick, in_axes=(None, Carry, 0), out_axes=Carry, **LAYER_OPTIONS)
        buffer, _ = ticks(layers, (buffer, inputs), jnp.arange(self._sizes.ticks))
        old = {slot: before.leaves[slot] for slot in slots}
        write_back(flat, flatten_layer(layers), old, lambda _, leaf: self._from_stages(leaf))
        self._collect_sown(rows)
        return jax.tree.map(_join_rows, buffer)

    def run_tick(self, layers: object, carry: tuple[object, object], tick: jax.Array) -> Any:
        """Runs one tick; the carry is the buffers, (S, M, rows, …), and the inputs, (S, rows, …).

        Returns:
          The new carry.
        """
        buffer, inputs = carry
        stages = jnp.arange(self._sizes.stages)
        inputs = jax.tree.map(functools.partial(self._feed_first_stage, tick), buffer, inputs)
        outputs = self._call_stages(layers, inputs, stages, tick)
        sent = jax.tree.map(self.send, outputs)
        return jax.tree.map(functools.partial(self._store_last_stage, tick), buffer, sent), sent

    def call_stage(self, layers: Any, x: Any, stage: jax.Array, tick: jax.Array) -> Any:
        """Calls the layers of one stage, within a ``vmap`` over all, and updates their Variables.

        Args:
          layers: the layers of this stage, whose arrays are (R, D, …).
          x: a pytree of arrays of one microbatch, (rows, …).
          stage: the number of the stage.
          tick: the tick.

        Returns:
          What the last layer of the stage returns; of no meaning if the stage has no item.
        """
        item = tick - stage
        # Clipped, as stages that wait compute as well.
        repeat = jnp.clip(item // self._sizes.microbatches, 0, self._sizes.repeats - 1)
        flat = flatten_layer(layers)
        before = {slot: _take(flat.leaves[slot], repeat, axis=0) for slot in self._slots}  # (D, …)
        group = _copy(flat, before, self._stack, nnx.spmd.remove_axis)
        args, kwargs = self._further_of(item)
        out = self._call_group(group, x, args, kwargs)
        has_item = (item >= 0) & (item < self._sizes.items)

        def put_into_repeat(slot: int, new: jax.Array) -> jax.Array:
            kept = jnp.where(has_item, new, before[slot])
            return _put(flat.leaves[slot], kept, repeat, axis=0)

        write_back(flat, flatten_layer(group), before, put_into_repeat)
        return out

    @property
    def axis(self) -> str:
        """The mesh axis of the stages."""
        return self._sizes.axis

    @property
    def stages(self) -> int:
        """The number of stages, S."""
        return self._sizes.stages

    @property
    def is_remat(self) -> bool:
        """Whether only the input of a stage is kept for its backward pass."""
        return self._stack.remat is True

    def layers_by_stage(self) -> dict[int, jax.Array]:
        """Returns the arrays of the layers on their stages, (S, D, …), by slot; for one repeat."""
        return {slot: self._to_stages(slot)[:, 0] for slot in self._slots}

    def write_layers(self, arrays: Mapping[int, jax.Array]) -> None:
        """Writes arrays, (S, D, …), to the layers."""
        copy = with_arrays(self._flat, arrays)
        old = {slot: self._flat.leaves[slot] for slot in arrays}
        # Each (S, D, …) → (L, …).
        write_back(
            self._flat,
            flatten_layer(copy),
            old,
            lambda _, leaf: self._from_stages(leaf[:, None]),
        )

    def other_arrays(self) -> list[Any]:
        """Returns what layers get besides their own arrays and the rows.

        These are the arrays in further arguments, and those that all layers share.
        """
        self._flat_further = flatten(self._further)
        self._further_slots = traced_slots(self._flat_further.leaves)
        shared = {*range(len(self._flat.leaves))}.difference(self._slots)
        self._shared_slots = [s for s in shared if is_traced(self._flat.leaves[s])]
        return [
            *(self._flat_further.leaves[slot] for slot in self._further_slots),
            *(self._flat.leaves[slot] for slot in self._shared_slots),
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
        count = len(self._further_slots)
        shared = dict(zip(self._shared_slots, others[count:], strict=True))
        group = with_arrays(self._flat, {**arrays, **shared})
        before = flatten_layer(group)
        pass_tags(self._flat, before)
        flat = self._flat_further
        leaves = replace_slots(flat.leaves, self._further_slots, others[:count])
        further = unflatten(flat.structure, leaves)
        pass_tags(flat, further)
        args, kwargs = further.root
        token = RUNNING.set(True)
        try:
            out = self._call_group(group, x, args, kwargs)
        finally:
            RUNNING.reset(token)
        after = flatten_layer(group)
        pairs = ((slot, after.leaves[slot]) for slot in arrays)
        return out, {slot: x for slot, x in pairs if x is not before.leaves[slot]}

    def _feed_first_stage(self, tick: jax.Array, buffer: jax.Array, x: jax.Array) -> jax.Array:
        """Gives the first stage a microbatch: (S, M, rows, …) and (S, rows, …) → (S, rows, …)."""
        stages = jnp.arange(self._sizes.stages)
        is_first = stages.reshape(-1, *[1] * (x.ndim - 1)) == 0  # (S, 1, …)
        microbatch = _take(buffer, tick % self._sizes.microbatches, axis=1)
        return self.constrain(jnp.where(is_first, microbatch, x), *self._row_entry)

    def send(self, x: jax.Array, shift: int = 1) -> jax.Array:
        """Sends what each stage returned, (S, rows, …), to the next one, or to the one before."""
        axis, stages = self._sizes.axis, self._sizes.stages
        to_next = [(i, (i + shift) % stages) for i in range(stages)]
        # Not `jnp.roll`, whose gradient would be two permutations.
        send: Callable[[jax.Array], jax.Array] = jax.shard_map(
            lambda x: jax.lax.ppermute(x, axis, to_next),
            mesh=self.mesh,
            in_specs=PartitionSpec(axis),
            out_specs=PartitionSpec(axis),
            axis_names={axis},
        )
        return self.constrain_rows(send(x))

    def take_on_stages(self, x: jax.Array, indices: jax.Array) -> jax.Array:
        """Takes a part of each stage's own array: (S, K, …), and indices (S,) → (S, …)."""
        # Not `vmap`, whose gather the compiler may not divide over the stages.
        take: Callable[[jax.Array, jax.Array], jax.Array] = jax.shard_map(
            lambda x, index: _take(x, index[0], axis=1),
            mesh=self.mesh,
            in_specs=PartitionSpec(self._sizes.axis),
            out_specs=PartitionSpec(self._sizes.axis),
            axis_names={self._sizes.axis},
        )
        return self.constrain(take(x, indices))

    def constrain_rows(self, x: jax.Array) -> jax.Array:
        """Shards the first dimension over the stages, and the rows, which are the next, as such."""
        return self.constrain(x, *self._row_entry)

    def _store_last_stage(self, tick: jax.Array, buffer: jax.Array, sent: jax.Array) -> jax.Array:
        """Stores what the first stage got from the last one: (S, rows, …) into (S, M, rows, …)."""
        item = tick - (self._sizes.stages - 1)  # of the last stage
        index = item % self._sizes.microbatches
        # Until the last stage has an item, the first one has not read this microbatch.
        stored = jnp.where(item >= 0, sent, _take(buffer, index, axis=1))
        return self.constrain(_put(buffer, stored, index, axis=1), None, *self._row_entry)

    def _split_rows(self, leaf: jax.Array) -> jax.Array:
        """Splits a batch into microbatches: (batch, …) → (S, M, rows, …)."""
        parts = self._microbatches(leaf)
        buffers = jnp.broadcast_to(parts, (self._sizes.stages, *parts.shape))
        return self.constrain(buffers, None, *self._row_entry)

    def _microbatches(self, leaf: jax.Array) -> jax.Array:
        """Splits a batch into microbatches, on all stages: (batch, …) → (M, rows, …)."""
        # Every M-th row is of one microbatch, so that rows stay on their devices.
        parts = leaf.reshape(-1, self._sizes.microbatches, *leaf.shape[1:])  # (rows, M, …)
        return jnp.swapaxes(parts, 0, 1)

    def _further_of(self, item: jax.Array) -> Further:
        """Returns the further arguments of layers, with the rows of an item's microbatch."""
        index = item % self._sizes.microbatches
        # (M, rows, …) → (rows, …)
        rows = [_take(parts, index, axis=0) for parts in self._microbatches_of.values()]
        leaves = replace_slots(self._leaves, self._microbatches_of, rows)
        return cast(Further, jax.tree.unflatten(self._treedef, leaves))

    def _to_stages(self, slot: int) -> jax.Array:
        """Puts an array of the layers, (L, …), on the stages that call them: (S, R, D, …)."""
        leaf, spec, axis = self._flat.leaves[slot], self._specs[slot], self._sizes.axis
        sizes = (self._sizes.repeats, self._sizes.stages, self._depth)
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

    def _from_stages(self, leaf: jax.Array) -> jax.Array:
        """Puts an array back into the order of the layers: (S, R, D, …) → (L, …)."""
        groups = jnp.swapaxes(leaf, 0, 1)  # (R, S, D, …)
        return self.constrain(groups.reshape(-1, *leaf.shape[3:]))

    def _collect_sown(self, rows: int) -> None:
        """Puts what layers sowed for ``nnx.capture`` into the form that it has in one call."""
        for index in captures(self._flat.structure):
            sown = _compat.get_value(self._flat.objects[index])
            order = functools.partial(self._order_sown, rows)
            sown = jax.tree_util.tree_map_with_path(order, sown)
            _compat.set_value(self._flat.objects[index], sown)

    def _order_sown(self, rows: int, keys: Any, leaf: jax.Array) -> jax.Array:
        """Orders what ticks sowed by layers and rows: (ticks, S, D, rows, …) → (L, batch, …)."""
        # What has no rows, such as a mean, cannot be put together from microbatches.
        if leaf.shape[3:4] != (rows,):
            raise ValueError(
                f"pipeline: layers sow {jax.tree_util.keystr(keys[:1])} of shape "
                f"{leaf.shape[3:]}, without a first dimension for the {rows} rows of a microbatch. "
                "Sow a value for each row, or return it from layer to layer: "
                "x, loss = blocks((x, loss))."
            )
        sizes = self._sizes
        # Stage s has items in the R·M ticks from s on.
        take_items = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=sizes.items)
        items = jax.vmap(take_items, in_axes=(1, 0))(leaf, jnp.arange(sizes.stages))
        items = items.reshape(sizes.stages, sizes.repeats, sizes.microbatches, *items.shape[2:])
        # (S, R, M, D, rows, …) → (R, S, D, rows, M, …)
        layers = jnp.moveaxis(items, (1, 0, 3, 4, 2), range(5))
        batch = rows * sizes.microbatches
        return self.constrain(layers.reshape(self._stack.length, batch, *layers.shape[5:]))

    def constrain(self, x: jax.Array, *entries: object) -> jax.Array:
        """Shards the first dimension over the stages, and the next ones as these entries say."""
        rest = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1 - len(entries))
        # Other dimensions stay as the compiler and the layers shard them.
        spec = PartitionSpec(self._sizes.axis, *entries, *rest)
        constrained = jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
        return cast(jax.Array, constrained)


def _join_rows(buffer: jax.Array) -> jax.Array:
    """Joins the microbatches in the buffer of the first stage: (S, M, rows, …) → (batch, …)."""
    rows = jnp.swapaxes(buffer[0], 0, 1)  # (rows, M, …)
    return rows.reshape(-1, *buffer.shape[3:])


def _take(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    return cast(jax.Array, jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False))


def _put(x: jax.Array, part: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    return cast(jax.Array, jax.lax.dynamic_update_index_in_dim(x, part, index, axis))


def _copy(
    flat: Flat, new: Mapping[int, object], stack: Stack, change: Callable[..., object]
) -> Any:
    """Returns layers with other arrays in some slots, and one more or one less leading dimension.

    ``change`` is ``nnx.spmd.add_axis`` or ``remove_axis``.
    """
    layers = with_arrays(flat, new)
    copy = flatten_layer(layers)
    pass_tags(flat, copy)
    # What `nnx.capture` has put on modules, which is no part of their structure.
    for old, module in zip(flat.objects, copy.objects, strict=True):
        if sown := vars(old).get(_compat.CAPTURES) if _compat.is_node(old) else None:
            vars(module)[_compat.CAPTURES] = sown
    name_axis(change, layers, stack.shared)
    return layers


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
