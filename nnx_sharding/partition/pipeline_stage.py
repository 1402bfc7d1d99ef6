"""The layers of one stage of a pipeline: a forward pass, and its transpose, as functions of arrays.

JAX's ``vjp`` of the layers returns their outputs and the *residuals*, which are all that the
transpose needs. Forward and backward pass of a microbatch are some ticks apart (``pipeline_1f1b``),
so the residuals wait in a ring. A residual that depends only on values that all microbatches have
in common, such as parameters, would be the same in each slot. Such residuals are computed again,
and the ring keeps the others.

All S stages run at once, by ``vmap`` over the stages. An array that differs between stages is
(S, …). The layers get and return dicts by *position*, the position of an output of the traced loss
(``TracedLoss``):

    fixed          inputs that are the same for all microbatches, such as the layers' parameters
    x, varying     inputs that differ: x, which goes from stage to stage, and all others
    out            the layers' outputs, by the position of the x that they are in the next stage
    written        new arrays of layers, by the position of the old ones

Residuals have no positions. Their *number* is the index in the list that ``vjp`` returns.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax

from .pipeline_loss import ByPosition, Part, as_type, without_callbacks
from .pipeline_parts import LossParts
from .shard_sums import ShardSums

Residuals: TypeAlias = dict[int, Any]  # by their numbers in the order of `jax.vjp`


class TracedStages:
    """The layers of all stages, traced once, and cut into a part for each pass.

    Attributes:
      residual_types: by number, the types of the residuals that the ring keeps, for one stage and
        one microbatch.

    Its private attributes; an *output* is an output of the trace of all stages:

        _axis            the mesh axis of the stages
        _inputs          the positions of the layers' inputs, in the order of the trace's inputs
        _out, _written   by position, the output with what the layers return, or write
        _residuals       the output with each residual, in the order of the residuals' numbers
        _kept            by number, the output with each residual that the ring keeps
        _run_forward     a function from inputs to out, written, and the residuals that are kept
        _recompute       a function from fixed inputs to the other residuals
        _transpose       the tree of the function that ``vjp`` returned, with residuals as leaves;
                         set while the forward pass is traced
    """

    def __init__(self, parts: LossParts):
        """Traces the layers of a loss.

        Args:
          parts: the parts of the loss, with the call of the pipeline.

        Raises:
          ValueError: a layer has a callback with side effects that returns something.
        """
        loss, call = parts.loss, parts.loss.call
        assert call.staged is not None  # `find_call` has refused a loss without a pipeline
        self._axis = call.staged.axis
        # 1. The types of the layers' inputs, by position. Arrays of layers are (S, …) already.
        # Inputs that all stages share have no dimension for the stages. All others get one.
        shared = {*loss.others}.difference(parts.varying)
        inputs = (*loss.layers, *loss.x, *loss.others)
        types = {i: as_type(loss.closed.out_avals[i]) for i in inputs}
        for i in {*types} - {*loss.layers} - shared:
            types[i] = as_type(types[i], call.staged.stages)
        self._inputs = sorted(types)  # in the order of the trace's inputs: JAX sorts the keys

        # 2. The trace. All stages are traced at once, because a `shard_map` in a layer has to be in
        # the `vmap` when it is traced.
        forward_of_all_stages = jax.vmap(
            functools.partial(self._trace_one_stage, parts),
            in_axes=({i: None if i in shared else 0 for i in types},),
            spmd_axis_name=self._axis,
        )
        with_callbacks, results = jax.make_jaxpr(forward_of_all_stages, return_shape=True)(types)
        closed = without_callbacks(with_callbacks, "a layer")
        # The three results, with the index of the output of this trace in place of each array.
        result_types, treedef = jax.tree.flatten(results)  # (S, …)
        numbered = jax.tree.unflatten(treedef, range(len(result_types)))
        self._out, self._written, self._residuals = numbered

        # 3. The residuals that depend on a microbatch are kept in a ring. The others depend on
        # constants only: fixed inputs that layers do not write, because a written array changes
        # from one microbatch to the next.
        constants = {*parts.fixed}.difference(loss.written_of)
        self._kept: dict[int, int] = {}  # number of a residual → output of this trace
        self.residual_types: dict[int, jax.ShapeDtypeStruct] = {}
        for number, output in enumerate(self._residuals):
            inputs_read = {self._inputs[n] for n in Part(closed, [output]).used}
            if not inputs_read.issubset(constants):
                self._kept[number] = output
                on_stages = result_types[output]  # (S, …)
                one = jax.ShapeDtypeStruct(on_stages.shape[1:], on_stages.dtype)
                self.residual_types[number] = one

        # 4. Callbacks in layers run in the forward pass. Callbacks do not run again when residuals
        # are recomputed, because `closed` has none.
        kept = self._kept.values()
        self._run_forward = Part(
            with_callbacks, [*self._out.values(), *self._written.values(), *kept]
        )
        self._recompute = Part(closed, {*self._residuals}.difference(kept))

    def _trace_one_stage(
        self, parts: LossParts, arrays: ByPosition
    ) -> tuple[ByPosition, ByPosition, list[Any]]:
        """Runs the layers of one stage in the trace; sets ``_transpose`` for :meth:`backward`.

        Args:
          parts: the parts of the loss, with the call of the pipeline.
          arrays: the layers' inputs, by position; arrays of D layers are (D, …).

        Returns:
          The layers' outputs (``out``), the arrays that they write (``written``), and the list of
          all residuals.
        """
        staged = parts.loss.call.staged
        assert staged is not None  # `find_call` has refused a loss without a pipeline

        def run(chosen: ByPosition) -> tuple[ByPosition, tuple[ByPosition, ByPosition]]:
            """Runs the layers as a function of the inputs that are differentiated.

            Returns:
              The outputs that have a gradient. As auxiliary data, without gradients, a pair of all
              outputs and the written arrays.
            """
            out, written = _run_layers(parts, arrays | chosen)
            # The output of a stage is the x of the next stage, so it has a gradient where x has
            # one.
            return {i: out[i] for i in parts.x_with_gradients}, (out, written)

        # `prevent_cse` is not needed, because the recomputation is in another iteration of the
        # loop.
        run_or_remat = jax.checkpoint(run, prevent_cse=False) if staged.is_remat else run
        differentiated = {*parts.fixed_with_gradients, *parts.x_with_gradients}
        chosen = {i: arrays[i] for i in sorted(differentiated)}
        _, transpose, (out, written) = jax.vjp(run_or_remat, chosen, has_aux=True)
        # JAX's transpose is a pytree: a function whose leaves are the residuals.
        residuals, self._transpose = jax.tree.flatten(transpose)
        return out, written, residuals

    def _as_inputs(self, arrays: Mapping[int, Any]) -> dict[int, Any]:
        """Returns arrays by their index among the inputs of the trace of the stages.

        ``arrays`` are by position. Positions without an array are left out, because a part of the
        trace needs only some inputs.
        """
        return {n: arrays[i] for n, i in enumerate(self._inputs) if i in arrays}

    def forward(self, arrays: ByPosition) -> tuple[ByPosition, ByPosition, Residuals]:
        """Runs all stages forward.

        Args:
          arrays: the layers' inputs, by position: (S, …), or (…) if all stages share them.

        Returns:
          Three dicts of arrays (S, …): the layers' outputs, by the positions of x; the arrays that
          they write, by the positions of layers; and the residuals that the ring keeps, by number.
        """
        outputs = self._run_forward(self._as_inputs(arrays))  # by the index of the trace's output
        out = {i: outputs[output] for i, output in self._out.items()}
        written = {i: outputs[output] for i, output in self._written.items()}
        kept = {number: outputs[output] for number, output in self._kept.items()}
        return out, written, kept

    def backward(
        self,
        fixed: ByPosition,
        kept: Residuals,
        d_out: ByPosition,
        sums: ShardSums,
        wanted: list[int],
    ) -> ByPosition:
        """Runs all stages backward.

        Args:
          fixed: the fixed inputs of the layers.
          kept: the residuals of each stage's microbatch, from the ring, (S, …).
          d_out: the gradients of the layers' floating-point outputs, (S, rows, …).
          sums: computes gradients as one sum for each shard of the rows.
          wanted: the positions whose gradients are such shard sums, (shards, S, …).

        Returns:
          The gradients of x and of fixed inputs, by position, for those that have a gradient. They
          are (S, …); the wanted ones are shard sums.
        """
        # By the index of the trace's output. The fixed inputs are enough, because the constructor
        # keeps each residual that depends on anything else.
        recomputed = self._recompute(self._as_inputs(fixed))
        residuals = [  # all residuals, in the order of their numbers
            kept[number] if number in kept else recomputed[output]
            for number, output in enumerate(self._residuals)
        ]

        def transpose(inputs: tuple[list[Any], ByPosition]) -> ByPosition:
            """Computes the gradients of one stage."""
            residuals, d_out = inputs
            # The function that `vjp` returned in the forward pass, with these residuals in it.
            run_transpose = jax.tree.unflatten(self._transpose, residuals)
            [gradients] = run_transpose(d_out)  # the differentiated function has one argument
            return gradients  # type: ignore[no-any-return]

        def transpose_all_stages(inputs: Any) -> tuple[ByPosition, tuple[()]]:
            gradients = jax.vmap(transpose, spmd_axis_name=self._axis)(inputs)
            return gradients, ()  # `evaluate` allows further results; there are none

        # The dimension of the rows: unknown in residuals; dimension 1 in gradients, (S, rows, …).
        row_dims = [None] * len(residuals), dict.fromkeys(d_out, 1)
        gradients, _ = sums.evaluate(transpose_all_stages, (residuals, d_out), row_dims, wanted)
        return gradients


def _run_layers(parts: LossParts, arrays: ByPosition) -> tuple[ByPosition, ByPosition]:
    """Runs the layers of one stage.

    Args:
      parts: the parts of the loss, with the call of the pipeline.
      arrays: the layers' inputs, by position; arrays of D layers are (D, …).

    Returns:
      A pair: the layers' outputs, by the positions of x, and the arrays that they write, by the
      positions of layers.
    """
    loss, call = parts.loss, parts.loss.call
    layers = [arrays[i] for i in loss.layers]
    x = [arrays[i] for i in loss.x]
    others = [arrays[i] for i in loss.others]
    results, written_by_slot = call.call_layers(layers, x, others)
    # A call of layers has their arrays by slot, but this module has them by position.
    position_of_slot = dict(zip(call.layers, loss.layers, strict=True))
    out = dict(zip(loss.x, results, strict=True))
    written = {position_of_slot[slot]: array for slot, array in written_by_slot.items()}
    return out, written
