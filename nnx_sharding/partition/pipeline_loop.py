"""The loop of a pipeline: microbatches pass through layers on stages.

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
    send      ``ppermute``: each stage to the next one, and the last one to the first. The first
              stage stores what it is sent where it has read the microbatch from its buffer: as the
              input of the next repeat, or as a result

All R·M + S - 1 ticks are one ``scan``, so that autodiff gives the schedule of the backward pass.
All stages run the same program, so each has a buffer, although only the first stage's is read. A
stage without an item (``.``) computes with rows of the batch. Its output is never stored, and the
values that it writes to Variables are discarded.

*Further arguments* are all arguments of the layers but the rows ``x``. If they have rows, they are
on all stages, and each stage takes the rows of its microbatch. `StagedLayers`
(``staged_layers.py``) has the arrays of the layers, each with a *slot*. Layers run as copies with
other arrays, and may change their Variables; `write_back` then writes the changed arrays to the
original.

Methods of `StagedLayers` that the loop uses: ``to_stages`` puts the array of a slot, (L, …), on the
stages, (S, R, D, …), and ``from_stages`` puts such an array back in the order of the layers.
``send`` moves each stage's array to the next stage. ``constrain`` and ``constrain_rows`` shard
(S, …) and (S, rows, …). ``row_entry`` is a list with the entry of a spec for rows; it is empty if
rows are whole. ``call_layers`` calls D layers.

The schedule is the one of GPipe (Huang et al., 2019, arXiv:1811.06965), with the repeats of
Megatron-LM (Narayanan et al., 2021, arXiv:2104.04473). Its form as one program is the one of GSPMD
(Xu et al., 2021, arXiv:2105.04663, section 3.3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from .. import _compat
from ..activations.trace_keys import pass_tags
from ..core.flatten import Flat
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
from .staged_layers import Further, StagedLayers, put, take, where_stage, write_back


class PipelineLoop:
    """One call of a ``Stack`` in stages, with the schedule of GPipe.

    Its private attributes:

        _staged         the layers on their stages (`StagedLayers`), with the arguments of the call
        _sizes          S, M and R, and how many items and ticks there are
        _call_stages    calls the layers of all stages, ``(layers, x, stages, tick) → x``, and
                        updates them
        _further_of     returns the further arguments of a microbatch, given by its number
    """

    def __init__(self, staged: StagedLayers, has_rows: Sequence[bool]):
        """Splits the further arguments into microbatches, and maps the layers over the stages.

        Args:
          staged: the layers, on their stages, with the further arguments of the call.
          has_rows: for each leaf in the further arguments whether it is an array (batch, …) of the
            same rows as x.
        """
        self._staged, self._sizes = staged, staged.sizes
        self._further_of = _split_further(staged.further, has_rows, self._to_microbatches)
        call_stage = self.call_stage
        if staged.is_remat:  # only the inputs of a stage are kept for its backward pass
            # `prevent_cse` is not needed in a scan, because no compiler merges the recomputation
            # with the forward pass there.
            call_stage = remat(call_stage, prevent_cse=False, graph=True, graph_updates=True)
        # The axes of the arguments of `call_stage`. Layers and x have a dimension of stages,
        # (S, …); `layer_axes` leaves it out for Variables that all layers share. Each stage has its
        # own number. All stages have the same tick.
        layers, x, stage, tick = layer_axes(staged.stack.shared), 0, 0, None
        self._call_stages = vmap(
            call_stage,
            in_axes=(layers, x, stage, tick),
            # Constraints in layers shard the dimension of the stages over this axis.
            spmd_axis_name=staged.axis,
            **LAYER_OPTIONS,  # graph mode, because layers may share Variables
        )

    def run(self, x: Any) -> Any:
        """Returns the output of the last layer for a batch, and updates the layers.

        Args:
          x: a pytree of arrays of shape (batch, …).
        """
        staged, flat, slots = self._staged, self._staged.flat, self._staged.slots
        rows = len(jax.tree.leaves(x)[0]) // self._sizes.microbatches
        # The loop runs a copy with arrays (S, R, D, …). The caller's layers, (L, …), are written to
        # after the loop.
        on_stages = {slot: staged.to_stages(slot) for slot in slots}
        layers = _copy_layers(flat, on_stages, staged.stack, nnx.spmd.add_axis)
        flat_before = flatten_layer(layers)
        buffer = jax.tree.map(self._split_rows, x)  # (S, M, rows, …)
        # Stages that wait compute with rows of the batch, because the gradient for zeros might not
        # be finite.
        inputs = jax.tree.map(lambda parts: parts[:, 0], buffer)  # (S, rows, …)
        # The layers are the same object in each tick, which updates their Variables.
        ticks = scan(self.run_tick, in_axes=(None, Carry, 0), out_axes=Carry, **LAYER_OPTIONS)
        # The first stage has stored the results in its buffer. The arrays that the last tick sent
        # are not needed.
        buffer, _ = ticks(layers, (buffer, inputs), jnp.arange(self._sizes.ticks))
        old = {slot: flat_before.leaves[slot] for slot in slots}
        write_back(flat, flatten_layer(layers), old, lambda _, leaf: staged.from_stages(leaf))
        # `write_back` leaves out what layers have sown, because the copy sows into the same
        # Variables of `nnx.capture` as the layers. Their values are still in the order of ticks.
        self._reorder_sown(rows)
        return jax.tree.map(_join_rows, buffer)

    def run_tick(self, layers: object, carry: tuple[object, object], tick: jax.Array) -> Any:
        """Runs one tick for all stages, and updates the layers.

        Args:
          layers: the layers of all stages, with arrays (S, R, D, …).
          carry: the buffers of microbatches, (S, M, rows, …), and what the stages received in the
            tick before, (S, rows, …).
          tick: the number of the tick.

        Returns:
          The new carry.
        """
        buffer, received = carry
        stages = jnp.arange(self._sizes.stages)  # the numbers of the stages
        feed = functools.partial(self._feed_first_stage, tick)
        store = functools.partial(self._store_in_buffer, tick)
        inputs = jax.tree.map(feed, buffer, received)
        outputs = self._call_stages(layers, inputs, stages, tick)  # updates the layers
        received = jax.tree.map(self._staged.send, outputs)
        return jax.tree.map(store, buffer, received), received

    def call_stage(self, layers: Any, x: Any, stage: jax.Array, tick: jax.Array) -> Any:
        """Calls the layers of one stage, within a ``vmap`` over stages, and updates the layers.

        Args:
          layers: the layers of this stage, whose arrays are (R, D, …).
          x: a pytree of arrays of one microbatch, (rows, …).
          stage: the number of the stage.
          tick: the tick.

        Returns:
          The output of the last layer of the stage. The output has no meaning if the stage has no
          item.
        """
        staged, sizes = self._staged, self._sizes
        item = tick - stage
        has_item = (item >= 0) & (item < sizes.items)
        # A stage without an item computes as well, with a repeat and a microbatch that exist.
        repeat = jnp.clip(item // sizes.microbatches, 0, sizes.repeats - 1)
        microbatch = item % sizes.microbatches  # in 0 … M-1, even if the item is negative
        # The D layers of this repeat, as a copy: (R, D, …) → (D, …).
        flat = flatten_layer(layers)
        old = {slot: take(flat.leaves[slot], repeat, axis=0) for slot in staged.slots}
        group = _copy_layers(flat, old, staged.stack, nnx.spmd.remove_axis)
        args, kwargs = self._further_of(microbatch)
        # This may write other arrays to the Variables of the copy.
        out = staged.call_layers(group, x, args, kwargs)

        def put_into_repeat(slot: int, new: jax.Array) -> jax.Array:
            """Returns the stage's array, (R, D, …), with a new array of the copy, (D, …), in it.

            A stage without an item keeps its old array.
            """
            kept = jnp.where(has_item, new, old[slot])
            return put(flat.leaves[slot], kept, repeat, axis=0)

        # The arrays that have changed in the copy are written to the Variables of `layers`.
        write_back(flat, flatten_layer(group), old, put_into_repeat)
        return out

    def _feed_first_stage(
        self, tick: jax.Array, buffer: jax.Array, received: jax.Array
    ) -> jax.Array:
        """Returns the inputs of the stages, (S, rows, …), for one array of x.

        The first stage gets a microbatch from its buffer, the others get what they received.

        Args:
          buffer: the buffers of all stages, (S, M, rows, …).
          received: what each stage received in the tick before, (S, rows, …).
        """
        microbatch = take(buffer, tick % self._sizes.microbatches, axis=1)  # (S, rows, …)
        is_first = jnp.arange(self._sizes.stages) == 0  # (S,)
        return self._staged.constrain_rows(where_stage(is_first, microbatch, received))

    def _store_in_buffer(
        self, tick: jax.Array, buffer: jax.Array, received: jax.Array
    ) -> jax.Array:
        """Returns the buffers of all stages with what each stage received, for one array of x.

        All stages store, because they run the same program. Only the first stage's buffer is read,
        and what it stores is the output of the last stage.

        Args:
          buffer: the buffers of all stages, (S, M, rows, …).
          received: what each stage received in this tick, (S, rows, …).
        """
        item = tick - (self._sizes.stages - 1)  # the item of the last stage
        index = item % self._sizes.microbatches
        # While the last stage has no item, the buffer keeps this microbatch, because the first
        # stage has not read it yet.
        stored = jnp.where(item >= 0, received, take(buffer, index, axis=1))
        buffer = put(buffer, stored, index, axis=1)
        return self._staged.constrain(buffer, None, *self._staged.row_entry)  # (S, M, rows, …)

    def _split_rows(self, leaf: jax.Array) -> jax.Array:
        """Splits a batch into microbatches: (batch, …) → (S, M, rows, …)."""
        parts = self._to_microbatches(leaf)
        buffers = jnp.broadcast_to(parts, (self._sizes.stages, *parts.shape))
        return self._staged.constrain(buffers, None, *self._staged.row_entry)

    def _to_microbatches(self, leaf: jax.Array) -> jax.Array:
        """Splits a batch into microbatches, on all stages: (batch, …) → (M, rows, …)."""
        # A microbatch has every M-th row, so that rows stay on their devices.
        parts = leaf.reshape(-1, self._sizes.microbatches, *leaf.shape[1:])  # (rows, M, …)
        return jnp.swapaxes(parts, 0, 1)

    def _reorder_sown(self, rows: int) -> None:
        """Gives what layers sowed for ``nnx.capture`` the order of a call without stages, in place.

        Raises:
          ValueError: a sown value has no rows.
        """
        flat = self._staged.flat
        to_layer_order = functools.partial(self._to_layer_order, rows)
        for index in captures(flat.structure):
            sown = _compat.get_value(flat.objects[index])
            reordered = jax.tree_util.tree_map_with_path(to_layer_order, sown)
            _compat.set_value(flat.objects[index], reordered)

    def _to_layer_order(self, rows: int, keys: Any, leaf: jax.Array) -> jax.Array:
        """Orders what ticks sowed by layers and rows: (ticks, S, D, rows, …) → (L, batch, …).

        Args:
          keys: JAX's path of the array in what a layer sowed: the name, then keys in its value.

        Raises:
          ValueError: the array has no rows.
        """
        shape_in_layer = leaf.shape[3:]
        # An array without rows, such as a mean, cannot be put together from microbatches.
        if shape_in_layer[:1] != (rows,):
            name = jax.tree_util.keystr(keys[:1])
            raise ValueError(
                f"pipeline: layers sow {name} of shape "
                f"{shape_in_layer}, without a first dimension for the {rows} rows of a microbatch. "
                "Sow a value for each row, or return it from layer to layer: "
                "x, loss = blocks((x, loss))."
            )
        sizes = self._sizes
        # Stage s has items in the R·M ticks from s on: (ticks, S, …) → (S, R·M, …).
        take_items = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=sizes.items)
        items = jax.vmap(take_items, in_axes=(1, 0))(leaf, jnp.arange(sizes.stages))
        items = items.reshape(sizes.stages, sizes.repeats, sizes.microbatches, *items.shape[2:])
        # The order is that of layers, (r·S + s)·D + d, then of rows of the batch. Row i of
        # microbatch m is row i·M + m: (S, R, M, D, rows, …) → (R, S, D, rows, M, …).
        layers = jnp.moveaxis(items, (1, 0, 3, 4, 2), range(5))
        batch = rows * sizes.microbatches
        length = self._staged.stack.length  # L
        return self._staged.constrain(layers.reshape(length, batch, *layers.shape[5:]))


def _split_further(
    further: Further,
    has_rows: Sequence[bool],
    to_microbatches: Callable[[jax.Array], jax.Array],
) -> Callable[[jax.Array], Further]:
    """Returns a function from the number of a microbatch to the further arguments of layers in it.

    Args:
      has_rows: for each leaf in them whether it is an array with rows. Modules are leaves.
      to_microbatches: splits an array: (batch, …) → (M, rows, …).
    """
    leaves, treedef = jax.tree.flatten(further, is_leaf=_compat.is_graph_object)
    positions = [position for position, leaf_has_rows in enumerate(has_rows) if leaf_has_rows]
    microbatches = [to_microbatches(leaves[position]) for position in positions]  # (M, rows, …)

    def of_microbatch(index: jax.Array) -> Further:
        rows = [take(array, index) for array in microbatches]  # (M, rows, …) → (rows, …)
        return cast(Further, jax.tree.unflatten(treedef, replace_slots(leaves, positions, rows)))

    return of_microbatch


def _join_rows(buffer: jax.Array) -> jax.Array:
    """Joins the microbatches in the buffer of the first stage: (S, M, rows, …) → (batch, …)."""
    rows = jnp.swapaxes(buffer[0], 0, 1)  # (rows, M, …)
    return rows.reshape(-1, *buffer.shape[3:])


def _copy_layers(
    flat: Flat, new: Mapping[int, object], stack: Stack, change: Callable[..., object]
) -> Any:
    """Returns a copy of layers with other arrays, which have a dimension more or less in front.

    Args:
      new: by slot, the arrays of the copy that differ from the arrays of the layers.
      change: ``nnx.spmd.add_axis`` or ``remove_axis``, which changes the names of dimensions in
        the metadata of Variables in the same way.
    """
    layers = with_arrays(flat, new)
    copied = flatten_layer(layers)
    pass_tags(flat, copied)  # activation shardings know modules by their tags
    # `nnx.capture` has put Variables on the original. The copy gets the same ones, so that they
    # collect what it sows.
    for old, module in zip(flat.objects, copied.objects, strict=True):
        captured = vars(old).get(_compat.CAPTURES) if _compat.is_node(old) else None
        if captured:
            vars(module)[_compat.CAPTURES] = captured
    name_axis(change, layers, stack.shared)
    return layers
