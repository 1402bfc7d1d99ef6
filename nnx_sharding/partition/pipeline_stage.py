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

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax

from .pipeline_loss import ByPosition, Part, as_type, without_callbacks
from .pipeline_parts import LossParts
from .shard_sums import ShardSums

Residuals: TypeAlias = dict[int, Any]  # by their numbers in the order of `jax.vjp`


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedStages:
    """The layers of all stages, traced once, and cut into a part for each pass.

    An *output* is an output of the trace of all stages.

    Attributes:
      axis: the mesh axis of the stages.
      inputs: the positions of the layers' inputs, in the order of the trace's inputs.
      out: by position, the output with what the layers return.
      written: by position, the output with what the layers write.
      residuals: the output with each residual, in the order of the residuals' numbers.
      transpose: the tree of the function that ``vjp`` returned, with residuals as leaves.
      kept: by number, the output with each residual that the ring keeps.
      residual_types: by number, the types of the residuals that the ring keeps, for one stage and
        one microbatch.
      run_forward: a function from inputs to out, written, and the residuals that are kept.
      recompute: a function from fixed inputs to the other residuals.
    """

    axis: str
    inputs: Sequence[int]
    out: Mapping[int, int]
    written: Mapping[int, int]
    residuals: Sequence[int]
    transpose: jax.tree_util.PyTreeDef
    kept: Mapping[int, int]
    residual_types: Mapping[int, jax.ShapeDtypeStruct]
    run_forward: Part
    recompute: Part

    def _as_inputs(self, arrays: Mapping[int, Any]) -> dict[int, Any]:
        """Returns arrays by their index among the inputs of the trace of the stages.

        ``arrays`` are by position. Positions without an array are left out, because a part of the
        trace needs only some inputs.
        """
        return {n: arrays[i] for n, i in enumerate(self.inputs) if i in arrays}

    def forward(self, arrays: ByPosition) -> tuple[ByPosition, ByPosition, Residuals]:
        """Runs all stages forward.

        Args:
          arrays: the layers' inputs, by position: (S, …), or (…) if all stages share them.

        Returns:
          Three dicts of arrays (S, …): the layers' outputs, by the positions of x; the arrays that
          they write, by the positions of layers; and the residuals that the ring keeps, by number.
        """
        outputs = self.run_forward(self._as_inputs(arrays))  # by the index of the trace's output
        out = {i: outputs[output] for i, output in self.out.items()}
        written = {i: outputs[output] for i, output in self.written.items()}
        kept = {number: outputs[output] for number, output in self.kept.items()}
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
        # By the index of the trace's output. The fixed inputs are enough, because `trace_stages`
        # keeps each residual that depends on anything else.
        recomputed = self.recompute(self._as_inputs(fixed))
        residuals = [  # all residuals, in the order of their numbers
            kept[number] if number in kept else recomputed[output]
            for number, output in enumerate(self.residuals)
        ]

        def transpose(inputs: tuple[list[Any], ByPosition]) -> ByPosition:
            """Computes the gradients of one stage."""
            residuals, d_out = inputs
            # The function that `vjp` returned in the forward pass, with these residuals in it.
            run_transpose = jax.tree.unflatten(self.transpose, residuals)
            [gradients] = run_transpose(d_out)  # the differentiated function has one argument
            return gradients  # type: ignore[no-any-return]

        def transpose_all_stages(inputs: Any) -> tuple[ByPosition, tuple[()]]:
            gradients = jax.vmap(transpose, spmd_axis_name=self.axis)(inputs)
            return gradients, ()  # `evaluate` allows further results; there are none

        # The dimension of the rows: unknown in residuals; dimension 1 in gradients, (S, rows, …).
        row_dims = [None] * len(residuals), dict.fromkeys(d_out, 1)
        gradients, _ = sums.evaluate(transpose_all_stages, (residuals, d_out), row_dims, wanted)
        return gradients


def trace_stages(parts: LossParts) -> TracedStages:
    """Traces the layers of a loss.

    Args:
      parts: the parts of the loss, with the call of the pipeline.

    Raises:
      ValueError: a layer has a callback with side effects that returns something.
    """
    loss = parts.loss
    # 1. The types of the layers' inputs, by position. Arrays of layers are (S, …) already. Inputs
    # that all stages share have no dimension for the stages. All others get one.
    shared = {*loss.others}.difference(parts.varying)
    types = {i: as_type(loss.closed.out_avals[i]) for i in (*loss.layers, *loss.x, *loss.others)}
    for i in {*types} - {*loss.layers} - shared:
        types[i] = as_type(types[i], loss.staged.stages)
    inputs = sorted(types)  # in the order of the trace's inputs: JAX sorts the keys

    # 2. The trace. All stages are traced at once, because a `shard_map` in a layer has to be in the
    # `vmap` when it is traced, so `trace_one_stage` is called once.
    transposes = list[jax.tree_util.PyTreeDef]()

    def trace_one_stage(arrays: ByPosition) -> tuple[ByPosition, ByPosition, list[Any]]:
        """Returns what the layers of one stage return and write, and all residuals."""
        out, written, transpose = _differentiate_layers(parts, arrays)
        # JAX's transpose is a pytree: a function whose leaves are the residuals.
        residuals, treedef = jax.tree.flatten(transpose)
        transposes.append(treedef)
        return out, written, residuals

    trace_all_stages = jax.vmap(
        trace_one_stage,
        in_axes=({i: None if i in shared else 0 for i in types},),
        spmd_axis_name=loss.staged.axis,
    )
    with_callbacks, results = jax.make_jaxpr(trace_all_stages, return_shape=True)(types)
    [transpose] = transposes
    closed = without_callbacks(with_callbacks, "a layer")
    # The three results, with the index of the output of this trace in place of each array.
    result_types, treedef = jax.tree.flatten(results)  # (S, …)
    out, written, residuals = jax.tree.unflatten(treedef, range(len(result_types)))

    # 3. The residuals that depend on a microbatch are kept in a ring. The others depend on
    # constants only: fixed inputs that layers do not write, because a written array changes from
    # one microbatch to the next.
    constants = {*parts.fixed}.difference(loss.written_of)
    kept: dict[int, int] = {}  # number of a residual → output of this trace
    for number, output in enumerate(residuals):
        inputs_read = {inputs[n] for n in Part(closed, [output]).used}
        if not inputs_read.issubset(constants):
            kept[number] = output
    residual_types = {number: _on_one_stage(result_types[i]) for number, i in kept.items()}

    return TracedStages(
        axis=loss.staged.axis,
        inputs=inputs,
        out=out,
        written=written,
        residuals=residuals,
        transpose=transpose,
        kept=kept,
        residual_types=residual_types,
        # Callbacks in layers run in the forward pass. They do not run again when residuals are
        # recomputed, because `closed` has none.
        run_forward=Part(with_callbacks, [*out.values(), *written.values(), *kept.values()]),
        recompute=Part(closed, {*residuals}.difference(kept.values())),
    )


def _on_one_stage(on_stages: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the type of an array (S, …) without the dimension for the stages."""
    return jax.ShapeDtypeStruct(on_stages.shape[1:], on_stages.dtype)


def _differentiate_layers(
    parts: LossParts, arrays: ByPosition
) -> tuple[ByPosition, ByPosition, Any]:
    """Runs the layers of one stage, and differentiates them.

    Args:
      arrays: the layers' inputs, by position; arrays of D layers are (D, …).

    Returns:
      The layers' outputs (``out``), the arrays that they write (``written``), and the function from
      gradients of outputs to those of inputs, which `jax.vjp` returns.
    """

    def run(chosen: ByPosition) -> tuple[ByPosition, tuple[ByPosition, ByPosition]]:
        """Runs the layers as a function of the inputs that are differentiated.

        Returns:
          The outputs that have a gradient. As auxiliary data, without gradients, a pair of all
          outputs and the written arrays.
        """
        out, written = _run_layers(parts, arrays | chosen)
        # The output of a stage is the x of the next stage, so it has a gradient where x has one.
        return {i: out[i] for i in parts.x_with_gradients}, (out, written)

    # `prevent_cse` is not needed, because the recomputation is in another iteration of the loop.
    is_remat = parts.loss.staged.is_remat
    run_or_remat = jax.checkpoint(run, prevent_cse=False) if is_remat else run
    differentiated = {*parts.fixed_with_gradients, *parts.x_with_gradients}
    chosen = {i: arrays[i] for i in sorted(differentiated)}
    _, transpose, (out, written) = jax.vjp(run_or_remat, chosen, has_aux=True)
    return out, written, transpose


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
