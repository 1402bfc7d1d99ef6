"""1F1B: a pipeline in which each stage runs one forward and one backward pass in turn.

GPipe (``pipeline_loop.py``) is one loop forward, which JAX differentiates, so that the activations
of all M microbatches are kept. Here the backward pass of a microbatch starts as soon as its loss is
known. Stage s of S computes microbatch i forward at tick ``i + s``, and backward at tick
``i + 2 (S-1) - s``. For S = 3 and M = 5, with A for the backward pass of microbatch a::

    tick      0   1   2   3   4   5   6   7   8
    stage 0   a   b   c   d   eA  .B  .C  .D  .E
    stage 1   .   a   b   cA  dB  eC  .D  .E  .
    stage 2   .   .   aA  bB  cC  dD  eE  .   .
              └ warm ─┘──── steady ────┘─ cool ┘
              forward        both       backward

A stage has at most K = 2S - 1 microbatches in flight, so what its backward pass needs is in a ring
of K slots, that of the forward pass at tick t in slot t mod K. S - 1 ticks have only a forward
pass, M have both, and S - 1 only a backward pass: M + S - 1 of each, as with GPipe, and so is the
share of idle time.

All ticks of a phase are one ``scan``. The backward pass cannot come from JAX's transposition of
that, so gradients are sums in the carry: each tick calls the ``vjp`` of a stage forward, puts its
residuals into the ring, and calls its transpose with others from there. Residuals that depend only
on parameters, such as these themselves, are computed again, so that the ring does not hold them.
What is around the layers in the loss comes from ``pipeline_loss.py``. Sums over rows may be kept as
one for each device, and added up after the last tick (``shard_sums.py``).

The loss is cut as in ``pipeline_loss.py``, and everything is named by its position among the
inputs or the outputs of the traced loss:

    targets   inputs that are differentiated: parameters
    fixed     what layers get for all microbatches alike: their arrays, (S, D, …) for D layers on
              each stage, and constants; computed once, before the first tick
    varying   what else layers get with each microbatch, such as a mask
    early     state that is known before the pipeline is called (random streams)
    late      state that depends on what the pipeline returns (statistics of a head)
    written   Variables of layers that these write, each on its stage; the state that depends on
              them is *ending*, as it is known after the last tick
    split     targets whose gradients are kept as one sum for each device until the end

The schedule is PipeDream's with flushes (Narayanan et al., 2021, arXiv:2006.09503).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp

from ..transforms.grad import PreparedCall, ValueAndGrad
from ..transforms.in_trace import Function, replace_slots, traced_slots
from .pipeline_loss import (
    Part,
    PipelineCall,
    TracedLoss,
    as_type,
    find_call,
    positions_of,
    refuse_loss,
    without_callbacks,
)
from .shard_sums import ShardSums, add_up

Arrays: TypeAlias = Sequence[Any]


def accumulate_interleaved(
    gradient: ValueAndGrad[..., Any],
    call: PreparedCall,
    batch: Sequence[tuple[jax.Array, jax.Array]],
    dtype: Any,
    row_axes: Sequence[str],
    is_split: Sequence[bool],
) -> tuple[Any, Arrays]:
    """Differentiates a loss microbatch by microbatch, in the stages of its pipeline.

    Args:
      gradient: differentiates the loss.
      call: its call with the first microbatch.
      batch: the arrays of this, and those of all microbatches, (M, rows, …).
      dtype: that of sums of gradients; None for their own.
      row_axes: mesh axes that shard the rows.
      is_split: for each array that is differentiated, whether these shard it nowhere, so that its
        gradient is added up over them once, after the loop.

    Returns:
      The mean of the losses, or with auxiliary data a pair with these, stacked, and the sum of the
      gradients of each array that is differentiated.
    """
    flat = call.flat
    slots = traced_slots(flat.leaves)
    position = {slot: i for i, slot in enumerate(slots)}  # among the inputs of the traced loss
    # Which arguments have rows is known by the identity of the first microbatch's arrays.
    microbatches = {id(first): all_parts for first, all_parts in batch}
    inputs = {position[slot]: flat.leaves[slot] for slot in slots}
    batch_by_position = {i: microbatches[id(x)] for i, x in inputs.items() if id(x) in microbatches}

    def differentiate(function: Function, arrays: Arrays) -> tuple[Arrays, tuple[Any, ...]]:
        loss = TracedLoss(function, arrays, flat, slots, find_call(function, arrays))
        targets = [position[slot] for slot in call.slots]
        names = [call.plan.names[slot] for slot in call.slots]
        triples = zip(targets, names, is_split, strict=True)
        split = {target: name for target, name, splits in triples if splits}
        loop = OneForwardOneBackward(
            loss, arrays, targets, batch_by_position, dtype, row_axes, split
        )
        (values, *others), state, totals = loop.run()
        return totals, loss.outputs([values.mean(), *others], state)

    return gradient.differentiate(call.plan, flat, slots, differentiate)


class TracedStage:
    """The layers of one stage: their forward pass, and its transpose, as functions of arrays.

    The inputs are three lists, one after the other: the arrays of the layers, (D, …); what the
    first layer gets, ``x``; and the other arrays that all layers get.

    Residuals are what the transpose needs of the forward pass. Those that depend only on what is
    the same for all microbatches are computed again; the ring keeps the others.

    Attributes:
      written: the slots of the arrays that layers write.
      kept: the residuals that the ring keeps, by number in the order of ``jax.vjp``.
      residual_types: the types of these, of one stage and one microbatch.
    """

    def __init__(
        self,
        call: PipelineCall,
        types: tuple[Arrays, Arrays, Arrays],
        targets: Sequence[int],
        invariant: Collection[int],
        on_stages: Collection[int],
    ):
        """Traces the layers.

        Args:
          call: the call of the pipeline.
          types: the types of the three lists of inputs of one stage.
          targets: the positions of the inputs that are differentiated.
          invariant: the positions of those that are the same for all microbatches.
          on_stages: the positions of those that each stage has for itself; the first dimension of
            these is S when all stages run.
        """
        assert call.loop is not None
        is_remat, self._axis = call.loop.is_remat, call.loop.axis
        layers, x, others = positions_of(types)

        def forward(*arrays: Any) -> list[Arrays]:
            """Returns what the layers of one stage return and write, and all residuals."""

            def run(chosen: Arrays) -> tuple[Arrays, tuple[Arrays, Arrays]]:
                """Runs the layers as a function of the targets; returns what has gradients first.

                Each stage returns what the next one gets, so what it returns in the place of a
                target among ``x`` has a gradient.
                """
                merged = replace_slots(arrays, targets, chosen)
                out, written = call.call_layers(
                    *([merged[i] for i in part] for part in (layers, x, others))
                )
                self.written = [*written]
                differentiated = [out[x.index(i)] for i in targets if i in x]
                return differentiated, (out, [*written.values()])

            run_or_remat = jax.checkpoint(run, prevent_cse=False) if is_remat else run
            chosen = [arrays[i] for i in targets]
            _, transpose, (out, written) = jax.vjp(run_or_remat, chosen, has_aux=True)
            residuals, self._transpose = jax.tree.flatten(transpose)
            return [out, written, residuals]

        # All stages are traced at once: a `shard_map` in a layer has to know of the `vmap`.
        of_all_stages = jax.vmap(
            forward,
            in_axes=tuple(0 if i in on_stages else None for i in range(sum(map(len, types)))),
            spmd_axis_name=self._axis,
        )
        types_of_all = [
            as_type(x, call.loop.stages) if i in on_stages else x
            for i, x in enumerate(x for part in types for x in part)
        ]
        # Callbacks in layers run in the forward pass, and not again where residuals are computed.
        with_callbacks, shapes = jax.make_jaxpr(of_all_stages, return_shape=True)(*types_of_all)
        closed = without_callbacks(with_callbacks, "a layer")
        out, written, residuals = positions_of(shapes)
        used_inputs = [{*Part(closed, [i]).used} for i in residuals]
        self.kept = [n for n, used in enumerate(used_inputs) if not used <= {*invariant}]
        kept_types = [shapes[2][n] for n in self.kept]  # (S, …)
        self.residual_types = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in kept_types]
        self._counts = len(out), len(written)
        kept = [residuals[n] for n in self.kept]
        self._forward = Part(with_callbacks, [*out, *written, *kept])
        recomputed = [n for n in range(len(residuals)) if n not in self.kept]
        self._recomputed = Part(closed, [residuals[n] for n in recomputed])
        self._order = [*recomputed, *self.kept]  # of the residuals that the transpose gets

    def forward(self, inputs: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """Runs all stages forward.

        Args:
          inputs: the inputs, (S, …) for those that each stage has for itself.

        Returns:
          What the layers return and write, and the residuals that the ring keeps, all (S, …).
        """
        outputs = self._forward(inputs)
        out, written = self._counts
        return outputs[:out], outputs[out : out + written], outputs[out + written :]

    def backward(
        self,
        inputs: Arrays,
        kept: Arrays,
        d_out: Arrays,
        sums: ShardSums,
        wanted: Collection[int],
    ) -> Arrays:
        """Runs all stages backward.

        Args:
          inputs: as for the forward pass; only those that are invariant are read.
          kept: the residuals from the ring, (S, …).
          d_out: the gradients of what the layers returned, apart from integers.
          sums: splits sums over rows.
          wanted: the targets whose gradients are shard sums, by number.

        Returns:
          The gradients of the targets.
        """
        residuals = [*self._recomputed(inputs), *kept]
        by_number = dict(zip(self._order, residuals, strict=True))
        ordered = [by_number[n] for n in range(len(residuals))]  # as `jax.vjp` returned them

        def transpose(inputs: Arrays) -> Arrays:
            residuals, d_out = inputs[: len(ordered)], inputs[len(ordered) :]
            [gradients] = jax.tree.unflatten(self._transpose, residuals)(d_out)
            return gradients  # type: ignore[no-any-return]

        of_all_stages = jax.vmap(transpose, spmd_axis_name=self._axis)
        # The dimension of rows: none in residuals, the second one in gradients, (S, rows, …).
        rows = [*[None] * len(ordered), *[1] * len(d_out)]
        return sums.evaluate(of_all_stages, [*ordered, *d_out], rows, wanted)


class Timetable(NamedTuple):
    """Which microbatch is where at a tick. Items are microbatches by number, also idle ones.

    For S = 3, the item of each stage; one that is not in 0 … M-1 is idle::

        tick          0   1   2   3   4   5
        forward  0    0   1   2   3   4   5     entering: the first line
                 1   -1   0   1   2   3   4
                 2   -2  -1   0   1   2   3     leaving, with its loss
        backward 2   -2  -1   0   1   2   3     leaving, with the gradient of the loss
                 1   -3  -2  -1   0   1   2
                 0   -4  -3  -2  -1   0   1     returning to where it entered
    """

    stages: int  # S
    microbatches: int  # M

    @property
    def delay(self) -> int:
        """The ticks that an item takes from the first stage to the last one, or back."""
        return self.stages - 1

    @property
    def slots(self) -> int:
        """The length of a ring: a stage has at most so many items in flight."""
        return 2 * self.delay + 1

    @property
    def is_first(self) -> jax.Array:
        """Whether a stage is the first one, (S,)."""
        return jnp.arange(self.stages) == 0

    @property
    def is_last(self) -> jax.Array:
        """Whether a stage is the last one, (S,)."""
        return jnp.arange(self.stages) == self.delay

    def forward(self, tick: jax.Array) -> jax.Array:
        """Returns the items of the forward passes, (S,)."""
        return tick - jnp.arange(self.stages)

    def backward(self, tick: jax.Array) -> jax.Array:
        """Returns the items of the backward passes, (S,)."""
        return self.returning(tick) + jnp.arange(self.stages)

    def leaving(self, tick: jax.Array) -> jax.Array:
        """Returns the item that leaves the last stage, and starts its way back."""
        return tick - self.delay

    def returning(self, tick: jax.Array) -> jax.Array:
        """Returns the item whose backward pass ends in the first stage."""
        return tick - 2 * self.delay

    def is_busy(self, items: jax.Array) -> jax.Array:
        """Whether items are microbatches."""
        return (items >= 0) & (items < self.microbatches)

    def slot(self, tick: jax.Array) -> jax.Array:
        """Returns the slot for what forward passes keep. The first stage's item is the tick."""
        return tick % self.slots

    def slots_on_stages(self, items: jax.Array) -> jax.Array:
        """Returns where each stage has what it kept of its item, (S,): by the tick of that."""
        return self.slot(items + jnp.arange(self.stages))


class _Carry(NamedTuple):
    """What one tick passes to the next. Each field is a list of arrays with the shapes given."""

    sent: Arrays  # what each stage gets for its forward pass, (S, rows, …)
    d_sent: Arrays  # what it gets for its backward pass: gradients of what it returned, likewise
    written: Arrays  # the Variables that layers write, (S, D, …)
    early: Arrays  # the early state that the next microbatch enters with
    late: Arrays  # the late state that the next microbatch leaves with
    residuals: Arrays  # a ring: slot t mod K has what the forward passes of tick t kept, (S, K, …)
    past_early: Arrays  # a ring: the early state with which microbatch t entered, (K, …)
    past_varying: Arrays  # a ring: what else layers get with microbatch t, (K, …)
    # Sums over the microbatches so far. Those of split targets are shard sums, (shards, …).
    totals: Arrays  # gradients of the targets by what is around the layers, as the targets
    fixed_totals: Arrays  # gradients of fixed arrays: of layers (S, D, …), of others (S, …)


class OneForwardOneBackward:
    """The loop over the ticks of M microbatches. The module's docstring has the words used here."""

    def __init__(
        self,
        loss: TracedLoss,
        arrays: Arrays,
        targets: Sequence[int],
        batch: Mapping[int, jax.Array],
        dtype: Any,
        row_axes: Sequence[str],
        split: Mapping[int, str],
    ):
        """Sorts inputs and outputs of a loss, and traces the layers.

        Args:
          loss: the loss.
          arrays: its inputs, with a microbatch; without what the pipeline returns and writes.
          targets: the positions of those that are differentiated.
          batch: the arrays of all microbatches, (M, rows, …), by the position of the input.
          dtype: that of sums of gradients; None for their own.
          row_axes: the mesh axes that shard the rows.
          split: the targets whose gradients are added up over these axes after the loop, and their
            names.
        """
        assert loss.call.loop is not None
        self._loss, self._arrays, self._targets, self._batch = loss, arrays, targets, batch
        self._dtype, self._loop = dtype, loss.call.loop
        # The stages share the rows.
        axes = tuple(axis for axis in row_axes if axis != self._loop.axis)
        self._sums = ShardSums(self._loop.mesh, axes)
        self._split = split if axes else {}
        self._time = Timetable(self._loop.stages, len(next(iter(batch.values()))))
        closed = loss.closed
        self._depends = [loss.depends(i) for i in range(len(closed.out_avals))]
        self._sort_outputs()
        self._x = Part(closed, [i for i in loss.x if self._is_float(i)])
        self._prefix = Part(closed, [*loss.x, *self._varying, *self._early])
        self._suffix = Part(loss.with_callbacks, [*loss.returned, *self._late])
        self._check()
        self._trace_stage()

    def _is_float(self, output: int) -> bool:
        """Whether an output has a gradient."""
        return _is_float(self._loss.closed.out_avals[output])

    def _sort_outputs(self) -> None:
        """Sorts state, and what layers get, by the inputs that each depends on.

        Sets the positions of outputs of the loss: ``_early``, ``_late`` and ``_ending`` state,
        ``_fixed`` and ``_varying`` inputs of layers, and those with gradients, ``_d_fixed``;
        ``_split_fixed`` has those whose gradients are shard sums, each with a name for errors.
        """
        loss = self._loss
        depends = self._depends
        self._ending = [i for i in loss.state if depends[i] & {*loss.written}]
        outside = [i for i in loss.state if i not in self._ending]
        self._late = list[int]()
        # What depends on late state is late, too.
        while late := [i for i in outside if depends[i] & self._after and i not in self._late]:
            self._late += late
        self._early = [i for i in outside if i not in self._late]
        self._varying = [i for i in loss.others if depends[i] & self._changing]
        self._fixed = [*loss.layers, *(i for i in loss.others if i not in self._varying)]
        targets = {*self._targets}
        self._d_fixed = [i for i in self._fixed if depends[i] & targets and self._is_float(i)]
        # An array of layers may come from several targets, such as the blocks of a list. Its
        # gradient is split if those of all of them are.
        self._split_fixed = dict[int, str]()
        for i in self._d_fixed:
            sources = sorted(depends[i] & targets)
            if self._split.keys() >= {*sources}:
                self._split_fixed[i] = self._split[sources[0]]

    @property
    def _changing(self) -> set[int]:
        """The inputs that differ between microbatches, and are known before they enter."""
        return {*self._batch} | {self._loss.state[i] for i in self._early}

    @property
    def _after(self) -> set[int]:
        """The inputs that are known when the pipeline has returned."""
        return {*self._loss.results} | {self._loss.state[i] for i in self._late}

    def _check(self) -> None:
        """Refuses a loss whose microbatches cannot pass each other."""
        loss, depends, changing, after = self._loss, self._depends, self._changing, self._after
        own = {*loss.written} | {loss.state[i] for i in self._ending}
        outside = [*loss.returned, *self._early, *self._late, *loss.x, *loss.others]
        entering = [*loss.x, *self._varying]
        problems = {
            "what layers write is used outside of them": any(depends[i] & own for i in outside)
            or any(depends[i] & (changing | after) for i in self._ending),
            "a callback, such as jax.debug.print, reads what layers write": bool(
                own.intersection(Part(loss.with_callbacks, []).used)
            ),
            "what layers get depends on what is written after they are called": any(
                depends[i] & after for i in entering
            ),
            "the parameters of layers depend on the microbatch": any(
                depends[i] & (changing | after) for i in loss.layers
            ),
            "further arguments of layers depend on the microbatch and on parameters": any(
                depends[i] & {*self._targets} and self._is_float(i) for i in self._varying
            ),
        }
        refuse_loss(
            [text for text, is_so in problems.items() if is_so],
            "Pass values from layer to layer, x, y = blocks((x, y)).",
        )

    def _trace_stage(self) -> None:
        """Traces the layers of one stage, whose inputs are outputs of the loss."""
        loss, types = self._loss, [as_type(x) for x in self._loss.closed.out_avals]
        inputs = [*loss.layers, *loss.x, *loss.others]  # outputs of the loss, in the stage's order
        position = {output: i for i, output in enumerate(inputs)}
        layers = [jax.ShapeDtypeStruct(types[i].shape[1:], types[i].dtype) for i in loss.layers]
        stage_types = layers, [types[i] for i in loss.x], [types[i] for i in loss.others]
        # In the order of their positions, as of the gradients.
        d_x = [i for i in loss.x if self._is_float(i)]
        self._targets_of_stage = [i for i in inputs if i in self._d_fixed or i in d_x]
        slots = [*loss.call.layers]
        written = [
            i for i, slot in zip(loss.layers, slots, strict=True) if slot in loss.call.written
        ]
        self._stage_inputs, self._written = inputs, written
        self._stage = TracedStage(
            loss.call,
            stage_types,
            [position[i] for i in self._targets_of_stage],
            {position[i] for i in self._fixed if i not in written},
            {position[i] for i in inputs if i not in loss.others or i in self._varying},
        )

    def run(self) -> tuple[Arrays, Arrays, Arrays]:
        """Runs all ticks.

        Returns:
          What the loss returns, of all microbatches (M, …), the new state, in the order of
          ``TracedLoss.state``, and the sums of the gradients of the targets.
        """
        # What all microbatches share is computed, and differentiated, once.
        fixed = Part(self._loss.closed, self._fixed)(self._inputs())
        self._fixed_values = dict(zip(self._fixed, fixed, strict=True))
        d_part = Part(self._loss.closed, self._d_fixed)
        arrays = [self._arrays[i] for i in self._targets]
        _, pull_fixed = jax.vjp(d_part.of_changed(self._inputs(), self._targets), arrays)
        carry = self._first_carry()
        warm, steady = self._time.delay, self._time.microbatches
        carry, _ = self._scan(self._run_warm, carry, 0, warm)
        carry, returned = self._scan(self._run_steady, carry, warm, steady)
        carry, _ = self._scan(self._run_cool, carry, warm + steady, warm)
        # The gradient of a target: by the layers, and by what is around them.
        [by_layers] = pull_fixed(self._fixed_gradients(carry))
        by_others = [
            add_up(x, 0, self._split[i]) if i in self._split else x
            for i, x in zip(self._targets, carry.totals, strict=True)
        ]
        totals = [x + y.astype(x.dtype) for x, y in zip(by_others, by_layers, strict=True)]
        # Ending state, and the early and late state after the last microbatch.
        final = self._inputs(early=carry.early, late=carry.late, written=carry.written)
        ending = Part(self._loss.closed, self._ending)(final)
        new = dict(zip(self._ending, ending, strict=True))
        new |= zip([*self._early, *self._late], [*carry.early, *carry.late], strict=True)
        return returned, [new[i] for i in self._loss.state], totals

    def _scan(self, run: Callable[..., Any], carry: _Carry, start: int, count: int) -> Any:
        """Runs ``count`` ticks, from number ``start``."""
        return jax.lax.scan(run, carry, start + jnp.arange(count))

    def _run_warm(self, carry: _Carry, tick: jax.Array) -> tuple[_Carry, None]:
        """Runs a tick with a forward pass only."""
        carry, out = self._forward(carry, tick)
        return carry._replace(sent=self._send(out, 1)), None

    def _run_steady(self, carry: _Carry, tick: jax.Array) -> tuple[_Carry, Arrays]:
        """Runs a tick with a forward pass, a loss and a backward pass."""
        carry, out = self._forward(carry, tick)
        carry = carry._replace(sent=self._send(out, 1))
        # From the first stage, which the last one has sent it to: XLA slices the last by a shift.
        carry, returned, d_out = self._differentiate(carry, tick, [x[0] for x in carry.sent])
        d_sent = [
            _where(self._time.is_last, x, y) for x, y in zip(d_out, carry.d_sent, strict=True)
        ]
        return self._backward(carry, tick, d_sent), returned

    def _run_cool(self, carry: _Carry, tick: jax.Array) -> tuple[_Carry, None]:
        """Runs a tick with a backward pass only."""
        return self._backward(carry, tick, carry.d_sent), None

    def _forward(self, carry: _Carry, tick: jax.Array) -> tuple[_Carry, Arrays]:
        """Runs the forward pass of one tick; returns what the stages return, (S, rows, …)."""
        loss, slot = self._loss, self._time.slot(tick)
        # When all have entered, the last one does so again, and what it computes is ignored.
        entering = jnp.minimum(tick, self._time.microbatches - 1)
        inputs = self._inputs(entering, carry.early)
        values = self._prefix(inputs)
        x, varying, early = (
            [values[i] for i in part] for part in positions_of([loss.x, self._varying, self._early])
        )
        past_early = [
            _put(ring, x, slot) for ring, x in zip(carry.past_early, carry.early, strict=True)
        ]
        past_varying = [
            _put(ring, x, slot) for ring, x in zip(carry.past_varying, varying, strict=True)
        ]
        enters, items = self._time.is_busy(tick), self._time.forward(tick)
        is_busy = self._time.is_busy(items)
        sent = [
            self._loop.constrain_rows(_where(self._time.is_first, a, b))
            for a, b in zip(x, carry.sent, strict=True)
        ]
        varying_on_stages = [  # each stage gets what its own microbatch entered with, (S, …)
            self._loop.constrain(jnp.take(ring, self._time.slot(items), axis=0))
            for ring in past_varying
        ]
        out, written, residuals = self._stage.forward(
            self._stage_arrays(carry.written, sent, varying_on_stages)
        )
        carry = carry._replace(
            early=[
                jnp.where(enters, new, old) for new, old in zip(early, carry.early, strict=True)
            ],
            past_early=past_early,
            past_varying=past_varying,
            written=[
                _where(is_busy, new, old) for new, old in zip(written, carry.written, strict=True)
            ],
            residuals=[
                _put(ring, x, slot, 1) for ring, x in zip(carry.residuals, residuals, strict=True)
            ],
        )
        return carry, out

    def _differentiate(
        self, carry: _Carry, tick: jax.Array, results: Arrays
    ) -> tuple[_Carry, Arrays, Arrays]:
        """Computes the loss of the microbatch that leaves the last stage, and its gradient.

        Returns:
          The carry, what the loss returns, and the gradient of the results.
        """
        loss = self._loss
        leaving = self._time.leaving(tick)
        inputs = self._inputs(leaving, self._early_of(carry, leaving), carry.late, results)
        d_results = [i for i, x in zip(loss.results, results, strict=True) if _is_float(x)]
        positions = [*self._targets, *d_results]

        def gradients_and_outputs(inputs: Arrays) -> Arrays:
            """Returns the gradients of the targets and of the results, then all outputs."""
            function = self._suffix.of_changed(inputs, positions)

            def value(arrays: Arrays) -> tuple[Any, Arrays]:
                outputs = function(arrays)
                return outputs[0], outputs  # the loss is the first one

            gradients, outputs = jax.grad(value, has_aux=True)([inputs[i] for i in positions])
            return [*gradients, *outputs]

        found = self._with_split_totals(gradients_and_outputs, inputs)
        d_totals, d_out, outputs = (
            [found[i] for i in part]
            for part in positions_of([self._targets, d_results, [*loss.returned, *self._late]])
        )
        carry = carry._replace(
            late=outputs[len(loss.returned) :], totals=_add(carry.totals, d_totals)
        )
        return carry, outputs[: len(loss.returned)], d_out

    def _backward(self, carry: _Carry, tick: jax.Array, d_out: Arrays) -> _Carry:
        """Runs the backward pass of one tick, from the gradients of what stages returned."""
        items = self._time.backward(tick)
        is_busy, slots = self._time.is_busy(items), self._time.slots_on_stages(items)
        kept = [self._loop.take_on_stages(ring, slots) for ring in carry.residuals]
        # The transpose reads the fixed inputs only; the ring has what it needs of the others.
        inputs = self._stage_arrays(carry.written, None, None)
        targets = self._targets_of_stage
        wanted = [n for n, i in enumerate(targets) if i in self._split_fixed]
        found = self._stage.backward(inputs, kept, d_out, self._sums, wanted)
        gradients = dict(zip(targets, found, strict=True))
        # Idle stages compute with what is in the ring, of which gradients need not be finite.
        # Shard sums are (shards, S, …).
        fixed = [
            _where(is_busy[None] if i in self._split_fixed else is_busy, gradients[i], 0)
            for i in self._d_fixed
        ]
        d_x = [gradients[i] for i in self._loss.x if self._is_float(i)]
        d_prefix = self._prefix_gradients(carry, self._time.returning(tick), d_x)
        return carry._replace(
            fixed_totals=_add(carry.fixed_totals, fixed),
            totals=_add(carry.totals, d_prefix),
            d_sent=self._send(d_x, -1),
        )

    def _prefix_gradients(self, carry: _Carry, item: jax.Array, d_x: Arrays) -> Arrays:
        """Returns gradients of the targets by the prefix, such as those of an embedding.

        Args:
          carry: what the tick before passed on.
          item: the microbatch whose backward pass ends in the first stage; negative while none has
            come so far, for which the gradients are 0.
          d_x: the gradients of what each stage got, (S, rows, …); those of the first are read.
        """
        microbatch = jnp.maximum(item, 0)
        inputs = self._inputs(microbatch, self._early_of(carry, microbatch))
        d_first = [jnp.where(item >= 0, x[0], 0) for x in d_x]

        def gradients(inputs_and_d_x: Arrays) -> Arrays:
            loss_inputs, d_x = inputs_and_d_x[: len(inputs)], inputs_and_d_x[len(inputs) :]
            arrays = [loss_inputs[i] for i in self._targets]
            # The prefix runs again: to keep its residuals for 2S - 1 microbatches takes memory.
            _, pull = jax.vjp(self._x.of_changed(loss_inputs, self._targets), arrays)
            [d_targets] = pull(d_x)
            return d_targets  # type: ignore[no-any-return]

        return self._with_split_totals(gradients, inputs, d_first)

    def _with_split_totals(
        self, function: Callable[[Arrays], Arrays], inputs: Arrays, of_rows: Arrays = ()
    ) -> Arrays:
        """Runs a function that returns the gradients of the targets first, some as shard sums.

        Args:
          function: a function of one list: the inputs of the loss, then ``of_rows``.
          inputs: the inputs of the loss.
          of_rows: further arrays, whose first dimension is that of rows.
        """
        # For each input the dimension of its rows; None if it has none.
        have_rows = {*self._batch, *self._loss.results}
        rows = [
            0 if i in have_rows and x is not None and x.ndim else None for i, x in enumerate(inputs)
        ]
        wanted = [n for n, i in enumerate(self._targets) if i in self._split]
        return self._sums.evaluate(
            function, [*inputs, *of_rows], [*rows, *[0] * len(of_rows)], wanted
        )

    def _first_carry(self) -> _Carry:
        """Returns the carry of the first tick: zeros, and state as it is before the call."""
        loss, stages, slots = self._loss, self._time.stages, self._time.slots
        types = loss.closed.out_avals
        x = [_zeros((stages, *types[i].shape), types[i].dtype) for i in loss.x]
        x = [self._loop.constrain_rows(leaf) for leaf in x]
        early = [self._arrays[loss.state[i]] for i in self._early]
        return _Carry(
            sent=x,
            d_sent=[leaf for leaf in x if _is_float(leaf)],
            written=[self._fixed_values[i] for i in self._written],
            early=early,
            late=[self._arrays[loss.state[i]] for i in self._late],
            residuals=[
                self._loop.constrain(_zeros((stages, slots, *a.shape), a.dtype))
                for a in self._stage.residual_types
            ],
            past_early=[jnp.broadcast_to(a, (slots, *a.shape)) for a in early],
            past_varying=[_zeros((slots, *types[i].shape), types[i].dtype) for i in self._varying],
            totals=[
                self._sums.zeros(self._arrays[i], self._dtype)
                if i in self._split
                else jnp.zeros_like(self._arrays[i], self._dtype)
                for i in self._targets
            ],
            fixed_totals=[self._zero_total(i) for i in self._d_fixed],
        )

    def _zero_total(self, fixed: int) -> jax.Array:
        """Returns the first sum of the gradients of a fixed array: of each stage, (S, …)."""
        array = self._fixed_values[fixed]
        if fixed not in self._loss.layers:  # all stages have it, and each adds up its own gradient
            array = jnp.broadcast_to(array, (self._time.stages, *array.shape))
        if fixed in self._split_fixed:
            return self._sums.zeros(array, self._dtype, self._loop.axis)
        return self._loop.constrain(jnp.zeros_like(array, self._dtype))

    def _inputs(
        self,
        microbatch: jax.Array | None = None,
        early: Arrays | None = None,
        late: Arrays | None = None,
        results: Arrays | None = None,
        written: Arrays | None = None,
    ) -> list[Any]:
        """Returns the inputs of the loss, in its order.

        Args:
          microbatch: which one; None for the one that the loss was traced with.
          early: the early state; None for that before the call.
          late: likewise the late state.
          results: what the pipeline returns for the microbatch; None where it is not read.
          written: likewise what layers have written.
        """
        loss = self._loss
        inputs = [*self._arrays, *[None] * (len(loss.results) + len(loss.written))]
        if microbatch is not None:
            for i, parts in self._batch.items():
                inputs[i] = _take(parts, microbatch)
        state = {loss.state[i]: x for i, x in zip(self._early, early or (), strict=bool(early))}
        state |= {loss.state[i]: x for i, x in zip(self._late, late or (), strict=bool(late))}
        state |= zip(loss.results, results or (), strict=bool(results))
        state |= zip(loss.written, written or (), strict=bool(written))
        return replace_slots(inputs, state, state.values())

    def _stage_arrays(self, written: Arrays, x: Arrays | None, varying: Arrays | None) -> list[Any]:
        """Returns the inputs of all stages, in the order of ``TracedStage``.

        All are (S, …), but for fixed arrays that are not of layers. ``x`` is what the first layer
        of each stage gets; None leaves inputs out that the pass does not read.
        """
        values = self._fixed_values | dict(zip(self._written, written, strict=True))
        values |= zip(self._loss.x, x or (), strict=bool(x))
        values |= zip(self._varying, varying or (), strict=bool(varying))
        return [values.get(i) for i in self._stage_inputs]

    def _early_of(self, carry: _Carry, microbatch: jax.Array) -> Arrays:
        """Returns the early state with which a microbatch entered."""
        return [_take(ring, self._time.slot(microbatch)) for ring in carry.past_early]

    def _fixed_gradients(self, carry: _Carry) -> Arrays:
        """Returns the gradients of fixed arrays, in the shapes in which the loss computes them.

        In the carry, each stage has a gradient of its own also of what all stages have.
        """
        types = self._loss.closed.out_avals
        totals = [
            # (shards, S, …) → (S, …)
            add_up(x, 0, self._split_fixed[i]) if i in self._split_fixed else x
            for i, x in zip(self._d_fixed, carry.fixed_totals, strict=True)
        ]
        return [
            (x if i in self._loss.layers else x.sum(0)).astype(types[i].dtype)
            for i, x in zip(self._d_fixed, totals, strict=True)
        ]

    def _send(self, x: Arrays, shift: int) -> Arrays:
        """Sends arrays, (S, rows, …), to the next stage; with a shift of -1 to the one before."""
        return [self._loop.send(leaf, shift) for leaf in x]


def _is_float(x: Any) -> bool:
    """Whether an array or a type has a gradient."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns one item along the first dimension."""
    return cast(jax.Array, jax.lax.dynamic_index_in_dim(x, index, keepdims=False))


def _put(ring: jax.Array, x: jax.Array, slot: jax.Array, axis: int = 0) -> jax.Array:
    """Replaces one slot of a ring, whose slots are along ``axis``."""
    return cast(jax.Array, jax.lax.dynamic_update_index_in_dim(ring, x, slot, axis))


def _where(on_stage: jax.Array, x: Any, y: Any) -> jax.Array:
    """Chooses between arrays, (S, …), by stage; one may lack the first dimension."""
    ndim = max(jnp.ndim(x), jnp.ndim(y))
    return jnp.where(on_stage.reshape(*on_stage.shape, *[1] * (ndim - on_stage.ndim)), x, y)


def _add(totals: Arrays, new: Arrays) -> Arrays:
    return [total + x.astype(total.dtype) for total, x in zip(totals, new, strict=True)]


def _zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns an array of zeros, also of keys."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.zeros(shape, dtype)
    key = jax.random.key(0, impl=dtype._impl.name)
    return jnp.broadcast_to(key, shape)
