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
on all stages, and each takes the rows of its microbatch. `StagedLayers` (``staged_layers.py``)
has the arrays of the layers, each with a *slot*; `write_back` writes to them what a copy has got.

The schedule is that of GPipe (Huang et al., 2019, arXiv:1811.06965), with the repeats of
Megatron-LM (Narayanan et al., 2021, arXiv:2104.04473); its form as one program is that of GSPMD (Xu
et al., 2021, arXiv:2105.04663, section 3.3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from .. import _compat
from ..activations.trace_keys import pass_tags
from ..core.flatten import Flat
from ..specs.paths import Path
from ..specs.types import AnyMesh
from ..transforms.in_trace import replace_slots
from ..transforms.mapped_axes import Carry, captures
from ..transforms.remat import remat
from ..transforms.scan import scan
from ..transforms.stack import Stack
from ..transforms.stacked_layers import (
    LAYER_OPTIONS,
    flatten_layer,
    layer_axes,
    name_axis,
    with_arrays,
)
from ..transforms.vmap import vmap
from .staged_layers import Further, PipelineSizes, StagedLayers, take, write_back


class PipelineLoop(StagedLayers):
    """One call of a ``Stack`` in stages, with the schedule of GPipe.

    ``flat``, ``slots`` and ``call_layers`` are those of `StagedLayers`: the flattened layers, the
    slots of their arrays, and a function that calls one group, ``(layers, x, args, kwargs) → x``.

    Args:
      has_rows: for each leaf in the further arguments whether it is an array (batch, …) of the
        same rows.
    """

    def __init__(
        self,
        sizes: PipelineSizes,
        stack: Stack,
        further: Further,
        mesh: AnyMesh,
        row_axes: tuple[str, ...],
        block_specs: Mapping[Path, PartitionSpec],
        has_rows: Sequence[bool],
    ):
        super().__init__(sizes, stack, further, mesh, row_axes, block_specs)
        self._has_rows = has_rows
        call_stage = self.call_stage
        if stack.remat is True:
            # In a scan, no compiler merges what is recomputed with the forward pass.
            call_stage = remat(call_stage, prevent_cse=False, graph=True, graph_updates=True)
        self._call_stages = vmap(
            call_stage,
            in_axes=(layer_axes(stack.shared), 0, 0, None),
            spmd_axis_name=sizes.axis,
            **LAYER_OPTIONS,
        )

    def run(self, x: Any) -> Any:
        """Returns what the last layer returns for a batch, and updates the layers.

        Args:
          x: a pytree of arrays of shape (batch, …).
        """
        self._split_further = _SplitFurther(self.further, self._has_rows, self._microbatches)
        flat, slots = self.flat, self.slots
        rows = len(jax.tree.leaves(x)[0]) // self.sizes.microbatches
        # A copy with another shape; the caller's layers are written to after the loop.
        layers = _copy(flat, {s: self.to_stages(s) for s in slots}, self.stack, nnx.spmd.add_axis)
        before = flatten_layer(layers)
        buffer = jax.tree.map(self._split_rows, x)  # (S, M, rows, …)
        # Stages that wait compute with rows of the batch, as zeros might have no finite gradient.
        inputs = jax.tree.map(lambda parts: parts[:, 0], buffer)  # (S, rows, …)
        ticks = scan(self.run_tick, in_axes=(None, Carry, 0), out_axes=Carry, **LAYER_OPTIONS)
        buffer, _ = ticks(layers, (buffer, inputs), jnp.arange(self.sizes.ticks))
        old = {slot: before.leaves[slot] for slot in slots}
        write_back(flat, flatten_layer(layers), old, lambda _, leaf: self.from_stages(leaf))
        self._collect_sown(rows)
        return jax.tree.map(_join_rows, buffer)

    def run_tick(self, layers: object, carry: tuple[object, object], tick: jax.Array) -> Any:
        """Runs one tick; the carry is the buffers, (S, M, rows, …), and the inputs, (S, rows, …).

        Returns:
          The new carry.
        """
        buffer, inputs = carry
        stages = jnp.arange(self.sizes.stages)
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
        repeat = jnp.clip(item // self.sizes.microbatches, 0, self.sizes.repeats - 1)
        flat = flatten_layer(layers)
        before = {slot: take(flat.leaves[slot], repeat, axis=0) for slot in self.slots}  # (D, …)
        group = _copy(flat, before, self.stack, nnx.spmd.remove_axis)
        args, kwargs = self._split_further.of_microbatch(item % self.sizes.microbatches)
        out = self.call_layers(group, x, args, kwargs)
        has_item = (item >= 0) & (item < self.sizes.items)

        def put_into_repeat(slot: int, new: jax.Array) -> jax.Array:
            kept = jnp.where(has_item, new, before[slot])
            return _put(flat.leaves[slot], kept, repeat, axis=0)

        write_back(flat, flatten_layer(group), before, put_into_repeat)
        return out

    def _feed_first_stage(self, tick: jax.Array, buffer: jax.Array, x: jax.Array) -> jax.Array:
        """Gives the first stage a microbatch: (S, M, rows, …) and (S, rows, …) → (S, rows, …)."""
        stages = jnp.arange(self.sizes.stages)
        is_first = stages.reshape(-1, *[1] * (x.ndim - 1)) == 0  # (S, 1, …)
        microbatch = take(buffer, tick % self.sizes.microbatches, axis=1)
        return self.constrain(jnp.where(is_first, microbatch, x), *self.row_entry)

    def _store_last_stage(self, tick: jax.Array, buffer: jax.Array, sent: jax.Array) -> jax.Array:
        """Stores what the first stage got from the last one: (S, rows, …) into (S, M, rows, …)."""
        item = tick - (self.sizes.stages - 1)  # of the last stage
        index = item % self.sizes.microbatches
        # Until the last stage has an item, the first one has not read this microbatch.
        stored = jnp.where(item >= 0, sent, take(buffer, index, axis=1))
        return self.constrain(_put(buffer, stored, index, axis=1), None, *self.row_entry)

    def _split_rows(self, leaf: jax.Array) -> jax.Array:
        """Splits a batch into microbatches: (batch, …) → (S, M, rows, …)."""
        parts = self._microbatches(leaf)
        buffers = jnp.broadcast_to(parts, (self.sizes.stages, *parts.shape))
        return self.constrain(buffers, None, *self.row_entry)

    def _microbatches(self, leaf: jax.Array) -> jax.Array:
        """Splits a batch into microbatches, on all stages: (batch, …) → (M, rows, …)."""
        # Every M-th row is of one microbatch, so that rows stay on their devices.
        parts = leaf.reshape(-1, self.sizes.microbatches, *leaf.shape[1:])  # (rows, M, …)
        return jnp.swapaxes(parts, 0, 1)

    def _collect_sown(self, rows: int) -> None:
        """Puts what layers sowed for ``nnx.capture`` into the form that it has in one call."""
        for index in captures(self.flat.structure):
            sown = _compat.get_value(self.flat.objects[index])
            order = functools.partial(self._order_sown, rows)
            sown = jax.tree_util.tree_map_with_path(order, sown)
            _compat.set_value(self.flat.objects[index], sown)

    def _order_sown(self, rows: int, keys: Any, leaf: jax.Array) -> jax.Array:
        """Orders what ticks sowed by layers and rows: (ticks, S, D, rows, …) → (L, batch, …)."""
        # Behind (ticks, S, D). What has no rows, such as a mean, cannot be put together from
        # microbatches.
        if leaf.shape[3:4] != (rows,):
            raise ValueError(
                f"pipeline: layers sow {jax.tree_util.keystr(keys[:1])} of shape "
                f"{leaf.shape[3:]}, without a first dimension for the {rows} rows of a microbatch. "
                "Sow a value for each row, or return it from layer to layer: "
                "x, loss = blocks((x, loss))."
            )
        sizes = self.sizes
        # Stage s has items in the R·M ticks from s on.
        take_items = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=sizes.items)
        items = jax.vmap(take_items, in_axes=(1, 0))(leaf, jnp.arange(sizes.stages))
        items = items.reshape(sizes.stages, sizes.repeats, sizes.microbatches, *items.shape[2:])
        # (S, R, M, D, rows, …) → (R, S, D, rows, M, …)
        layers = jnp.moveaxis(items, (1, 0, 3, 4, 2), range(5))
        batch = rows * sizes.microbatches
        return self.constrain(layers.reshape(self.stack.length, batch, *layers.shape[5:]))


class _SplitFurther:
    """The further arguments of layers; what has rows, (batch, …), is split into microbatches."""

    def __init__(
        self,
        further: Further,
        has_rows: Sequence[bool],
        split: Callable[[jax.Array], jax.Array],
    ):
        """Splits arguments.

        Args:
          further: the arguments.
          has_rows: for each leaf in them whether it is an array with rows.
          split: splits an array: (batch, …) → (M, rows, …).
        """
        self._leaves, self._treedef = jax.tree.flatten(further, is_leaf=_compat.is_graph_object)
        self._microbatches = {  # by the position of the leaf
            position: split(leaf)
            for position, (leaf, splits) in enumerate(zip(self._leaves, has_rows, strict=True))
            if splits
        }

    def of_microbatch(self, index: jax.Array) -> Further:
        """Returns the arguments with the rows of one microbatch."""
        # (M, rows, …) → (rows, …)
        rows = [take(array, index, axis=0) for array in self._microbatches.values()]
        leaves = replace_slots(self._leaves, self._microbatches, rows)
        return cast(Further, jax.tree.unflatten(self._treedef, leaves))


def _join_rows(buffer: jax.Array) -> jax.Array:
    """Joins the microbatches in the buffer of the first stage: (S, M, rows, …) → (batch, …)."""
    rows = jnp.swapaxes(buffer[0], 0, 1)  # (rows, M, …)
    return rows.reshape(-1, *buffer.shape[3:])


def _put(x: jax.Array, part: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    """Returns an array with another part at an index: the inverse of `take`."""
    return cast(jax.Array, jax.lax.dynamic_update_index_in_dim(x, part, index, axis))


def _copy(
    flat: Flat, new: Mapping[int, object], stack: Stack, change: Callable[..., object]
) -> Any:
    """Returns layers with other arrays in some slots, and one more or one less leading dimension.

    Args:
      flat: the given layers.
      new: the other arrays, by slot.
      stack: the stack whose layers these are.
      change: ``nnx.spmd.add_axis`` or ``remove_axis``, for the names of dimensions.
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
