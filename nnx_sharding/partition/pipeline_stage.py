"""The layers of one stage of a pipeline: a forward pass, and its transpose, as functions of arrays.

JAX's ``vjp`` of the layers returns their outputs and the *residuals*, which are all that the
transpose needs. Forward and backward pass of a microbatch are some ticks apart (``pipeline_1f1b``),
so the residuals wait in a ring. Those that depend only on what all microbatches have in common,
such as parameters, would be the same in each slot: they are computed again, and the ring keeps the
others.

All S stages run at once, as ``vmap`` over the stages: what each stage has for itself is (S, …). The
layers get and return dicts by *position*, that of an output of the traced loss (``TracedLoss``):

    fixed          what is the same for all microbatches, such as the parameters of the layers
    x, varying     what differs: x, which goes from stage to stage, and what else they get
    out            what the layers return, by the position of the x that it is for the next stage
    written        new arrays of layers, by the position of the old ones

Residuals have no positions. Their *number* is the place in the list that ``vjp`` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax

from .pipeline_loss import ByPosition, Part, as_type, without_callbacks
from .pipeline_parts import LossParts
from .shard_sums import ShardSums

Residuals: TypeAlias = dict[int, Any]  # by their numbers in the order of `jax.vjp`


class TracedStages:
    """The layers of all stages, traced once, and cut into what each pass needs.

    Attributes:
      residual_types: by number, the types of the residuals that the ring keeps, of one stage and
        microbatch.

    Its private attributes. Outputs are those of the trace of all stages:

        _inputs          the positions of what the layers get, in the order of the trace's inputs
        _out, _written   by position, the output with what the layers return, or write
        _residuals       by number, the output with the residual
        _kept            the same for those that the ring keeps
        _run_forward     a function from inputs to out, written, and the residuals that are kept
        _recompute       a function from what is fixed to the other residuals
        _transpose       the tree of the function that ``vjp`` returned, with residuals as leaves
    """

    def __init__(self, parts: LossParts):
        """Traces the layers of a loss."""
        loss, call = parts.loss, parts.loss.call
        assert call.staged is not None
        self._axis = call.staged.axis
        # 1. The types of what the layers get, by position. Arrays of layers are (S, …) already, and
        # what all stages have in common has no dimension for them. Else there is one for each.
        shared = {*loss.others}.difference(parts.varying)
        inputs = (*loss.layers, *loss.x, *loss.others)
        types = {i: as_type(loss.closed.out_avals[i]) for i in inputs}
        for i in {*types} - {*loss.layers} - shared:
            types[i] = as_type(types[i], call.staged.stages)
        self._inputs = sorted(types)  # in the order of the trace's inputs: JAX sorts the keys

        # 2. The trace of all stages at once: a `shard_map` in a layer has to know of the `vmap`.
        of_all_stages = jax.vmap(
            self._forward_of_one_stage(parts),
            in_axes=({i: None if i in shared else 0 for i in types},),
            spmd_axis_name=self._axis,
        )
        with_callbacks, results = jax.make_jaxpr(of_all_stages, return_shape=True)(types)
        closed = without_callbacks(with_callbacks, "a layer")
        # In each of the three results, a number for each array: which output of this trace it is.
        result_types, treedef = jax.tree.flatten(results)  # (S, …)
        numbered = jax.tree.unflatten(treedef, range(len(result_types)))
        self._out, self._written, self._residuals = numbered

        # 3. The residuals that depend on a microbatch are kept in a ring. The others depend on
        # constants only: on what is fixed, and not written by the layers of another microbatch.
        constants = {*parts.fixed}.difference(loss.written_of)
        self._kept: dict[int, int] = {}  # number of a residual → output of this trace
        for number, output in enumerate(self._residuals):
            read = {self._inputs[n] for n in Part(closed, [output]).used}
            if not read.issubset(constants):
                self._kept[number] = output
        self.residual_types = {
            number: jax.ShapeDtypeStruct(result_types[output].shape[1:], result_types[output].dtype)
            for number, output in self._kept.items()
        }

        # 4. Callbacks in layers run in the forward pass, not again where residuals are recomputed.
        kept = self._kept.values()
        self._run_forward = Part(
            with_callbacks, [*self._out.values(), *self._written.values(), *kept]
        )
        self._recompute = Part(closed, {*self._residuals}.difference(kept))

    def _forward_of_one_stage(
        self, parts: LossParts
    ) -> Callable[[ByPosition], tuple[ByPosition, ByPosition, list[Any]]]:
        """Returns the forward pass of the layers of one stage, as a function to trace.

        Its argument is what the layers get; their own arrays are (D, …) for D layers. It returns
        what they return (``out``), what they write, and the list of all residuals. When it is
        traced, it stores the transpose, which :meth:`backward` calls, in ``_transpose``.
        """
        loss, call = parts.loss, parts.loss.call
        assert call.staged is not None
        is_remat = call.staged.is_remat
        # Calls of layers have their arrays by slot, here they have positions.
        position_of_slot = dict(zip(call.layers, loss.layers, strict=True))
        differentiated = {*parts.fixed_with_gradients, *parts.x_with_gradients}

        def forward(arrays: ByPosition) -> tuple[ByPosition, ByPosition, list[Any]]:
            def run(chosen: ByPosition) -> tuple[ByPosition, tuple[ByPosition, ByPosition]]:
                """Runs the layers as a function of what is differentiated.

                Returns:
                  What has a gradient of what the layers return, and, with no gradients, all that
                  they return and write.
                """
                merged = arrays | chosen
                layers, x, others = (
                    [merged[i] for i in positions]
                    for positions in (loss.layers, loss.x, loss.others)
                )
                results, written_by_slot = call.call_layers(layers, x, others)
                # What a stage returns is the x of the next one, so it has the same positions, and a
                # gradient where x has one.
                out = dict(zip(loss.x, results, strict=True))
                written = {position_of_slot[slot]: x for slot, x in written_by_slot.items()}
                return {i: out[i] for i in parts.x_with_gradients}, (out, written)

            # Without `prevent_cse`, as the recomputation is in another iteration of the loop.
            run_or_remat = jax.checkpoint(run, prevent_cse=False) if is_remat else run
            chosen = {i: arrays[i] for i in sorted(differentiated)}
            _, transpose, (out, written) = jax.vjp(run_or_remat, chosen, has_aux=True)
            # JAX's transpose is a pytree: a function whose leaves are the residuals.
            residuals, self._transpose = jax.tree.flatten(transpose)
            return out, written, residuals

        return forward

    def _as_inputs(self, arrays: Mapping[int, Any]) -> dict[int, Any]:
        """Returns arrays by their number among the inputs of the trace of the stages."""
        return {n: arrays[i] for n, i in enumerate(self._inputs) if i in arrays}

    def forward(self, arrays: ByPosition) -> tuple[ByPosition, ByPosition, Residuals]:
        """Runs all stages forward.

        Args:
          arrays: what the layers get, (S, …) but for what all stages have in common.

        Returns:
          Three dicts of arrays (S, …): what the layers return, by the positions of x; what they
          write, by the positions of layers; and, by number, the residuals that the ring keeps.
        """
        outputs = self._run_forward(self._as_inputs(arrays))  # by output of the trace
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
          fixed: what the layers get with all microbatches alike.
          kept: the residuals of each stage's microbatch, from the ring, (S, …).
          d_out: the gradients of what the layers returned, apart from integers, (S, rows, …).
          sums: computes gradients as one sum for each shard of the rows.
          wanted: the positions whose gradients are such shard sums, (shards, S, …).

        Returns:
          The gradients of what the layers got, (S, …), by position: of what is fixed and of x, as
          far as they have one.
        """
        recomputed = self._recompute(self._as_inputs(fixed))  # by output of the trace
        residuals = [  # all of them, in the order of their numbers
            kept[number] if number in kept else recomputed[output]
            for number, output in enumerate(self._residuals)
        ]

        def transpose(inputs: tuple[list[Any], ByPosition]) -> ByPosition:
            """Computes the gradients of one stage."""
            residuals, d_out = inputs
            # The function that `vjp` returned in the forward pass, with these residuals in it.
            run_transpose = jax.tree.unflatten(self._transpose, residuals)
            [gradients] = run_transpose(d_out)  # of the only argument of what was differentiated
            return gradients  # type: ignore[no-any-return]

        def of_all_stages(inputs: Any) -> tuple[ByPosition, tuple[()]]:
            gradients = jax.vmap(transpose, spmd_axis_name=self._axis)(inputs)
            return gradients, ()  # and nothing besides gradients, which `evaluate` allows

        # Where the rows are: nowhere in residuals, as far as is known; in gradients, (S, rows, …),
        # in dimension 1.
        row_dims = [None] * len(residuals), dict.fromkeys(d_out, 1)
        gradients, _ = sums.evaluate(of_all_stages, (residuals, d_out), row_dims, wanted)
        return gradients
