"""The layers of one stage of a pipeline: a forward pass, and its transpose, as functions of arrays.

JAX's ``vjp`` of the layers returns their outputs and the *residuals*, which are all that the
transpose needs. Forward and backward pass of a microbatch are some ticks apart (``pipeline_1f1b``),
so the residuals wait in a ring. Those that depend only on what all microbatches have in common,
such as parameters, would be the same in each slot: they are computed again, and the ring keeps the
others.

All S stages run at once, as ``vmap`` over the stages: what each stage has for itself is (S, …).
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
    """The layers of all stages, traced. Arrays are named by the outputs of the loss that they are.

    Attributes:
      residual_types: the types of the residuals that the ring keeps, of one stage and microbatch.
    """

    def __init__(self, parts: LossParts):
        """Traces the layers of a loss."""
        loss, call = parts.loss, parts.loss.call
        assert call.loop is not None
        self._axis = call.loop.axis
        self._targets = sorted({*parts.fixed_with_gradients, *parts.x_with_gradients})
        # What all stages have in common has no dimension of the stages.
        shared = {*loss.others}.difference(parts.varying)
        inputs = (*loss.layers, *loss.x, *loss.others)
        types = {i: as_type(loss.closed.out_avals[i]) for i in inputs}
        for i in {*types} - {*loss.layers} - shared:
            types[i] = as_type(types[i], call.loop.stages)  # those of layers are (S, …) already
        self._inputs = sorted(types)  # as JAX flattens a dict
        # All stages are traced at once: a `shard_map` in a layer has to know of the `vmap`.
        of_all_stages = jax.vmap(
            self._forward_of_one_stage(parts),
            in_axes=({i: None if i in shared else 0 for i in types},),
            spmd_axis_name=self._axis,
        )
        with_callbacks, results = jax.make_jaxpr(of_all_stages, return_shape=True)(types)
        closed = without_callbacks(with_callbacks, "a layer")
        # The same tree with the position of each result among the outputs of this trace.
        count = len(jax.tree.leaves(results))
        positions = jax.tree.unflatten(jax.tree.structure(results), range(count))
        self._out, self._written, residuals = positions
        self._residuals = dict(enumerate(residuals))  # number → position
        constant = {n for n, i in enumerate(self._inputs) if i in parts.fixed}
        constant -= {n for n, i in enumerate(self._inputs) if i in loss.written_of}
        kept = {
            number: position
            for number, position in self._residuals.items()
            if not constant.issuperset(Part(closed, [position]).used)
        }
        types_of_all = jax.tree.leaves(results)  # (S, …)
        self.residual_types = {
            number: jax.ShapeDtypeStruct(types_of_all[n].shape[1:], types_of_all[n].dtype)
            for number, n in kept.items()
        }
        self._kept = kept
        # Callbacks in layers run in the forward pass, and not again where residuals are computed.
        forward_outputs = [*self._out.values(), *self._written.values(), *kept.values()]
        self._run_forward = Part(with_callbacks, forward_outputs)
        self._recompute = Part(closed, {*residuals}.difference(kept.values()))

    def _forward_of_one_stage(
        self, parts: LossParts
    ) -> Callable[[ByPosition], tuple[ByPosition, ByPosition, list[Any]]]:
        """Returns a function of what the layers of one stage get, (D, …) for their own arrays.

        It returns what they return and write, and all residuals. When it is traced, it stores the
        transpose of the layers as a tree, whose leaves are the residuals.
        """
        loss, call = parts.loss, parts.loss.call
        assert call.loop is not None
        is_remat = call.loop.is_remat
        output_of_slot = dict(zip(call.layers, loss.layers, strict=True))

        def forward(arrays: ByPosition) -> tuple[ByPosition, ByPosition, list[Any]]:
            def run(chosen: ByPosition) -> tuple[ByPosition, tuple[ByPosition, ByPosition]]:
                """Runs the layers as a function of the targets; returns what has gradients first.

                Each stage returns what the next one gets, so a result has the name of what it
                takes the place of, and a gradient if that has one.
                """
                merged = arrays | chosen
                lists = [[merged[i] for i in part] for part in (loss.layers, loss.x, loss.others)]
                results, written_by_slot = call.call_layers(*lists)
                out = dict(zip(loss.x, results, strict=True))
                written = {output_of_slot[slot]: x for slot, x in written_by_slot.items()}
                return {i: out[i] for i in parts.x_with_gradients}, (out, written)

            run_or_remat = jax.checkpoint(run, prevent_cse=False) if is_remat else run
            chosen = {i: arrays[i] for i in self._targets}
            _, transpose, (out, written) = jax.vjp(run_or_remat, chosen, has_aux=True)
            residuals, self._transpose = jax.tree.flatten(transpose)
            return out, written, residuals

        return forward

    def _by_number(self, arrays: Mapping[int, Any]) -> ByPosition:
        """Returns inputs by their positions in the trace of the stages."""
        return {n: arrays[i] for n, i in enumerate(self._inputs) if i in arrays}

    def forward(self, arrays: ByPosition) -> tuple[ByPosition, ByPosition, Residuals]:
        """Runs all stages forward.

        Args:
          arrays: what the layers get, (S, …) but for what all stages have in common.

        Returns:
          What the layers return, by the names of what they got, what they write, and the residuals
          that the ring keeps, all (S, …).
        """
        outputs = self._run_forward(self._by_number(arrays))
        out = {i: outputs[position] for i, position in self._out.items()}
        written = {i: outputs[position] for i, position in self._written.items()}
        return out, written, {n: outputs[position] for n, position in self._kept.items()}

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
          kept: the residuals from the ring, (S, …).
          d_out: the gradients of what the layers returned, apart from integers, (S, rows, …).
          sums: splits sums over rows.
          wanted: whose gradients are shard sums, (shards, S, …).

        Returns:
          The gradients of what has one, (S, …).
        """
        recomputed = self._recompute(self._by_number(fixed))
        residuals = [
            kept[number] if number in kept else recomputed[position]
            for number, position in self._residuals.items()
        ]

        def transpose(inputs: tuple[list[Any], ByPosition]) -> ByPosition:
            residuals, d_out = inputs
            [gradients] = jax.tree.unflatten(self._transpose, residuals)(d_out)
            return gradients  # type: ignore[no-any-return]

        def of_all_stages(inputs: Any) -> tuple[ByPosition, tuple[()]]:
            return jax.vmap(transpose, spmd_axis_name=self._axis)(inputs), ()

        # The dimension of rows: none in residuals, the second one in gradients, (S, rows, …).
        rows = [None] * len(residuals), dict.fromkeys(d_out, 1)
        gradients, _ = sums.evaluate(of_all_stages, (residuals, d_out), rows, wanted)
        return gradients
