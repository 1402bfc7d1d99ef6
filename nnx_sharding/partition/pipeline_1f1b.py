"""1F1B: a pipeline in which each stage runs one forward and one backward pass in turn.

GPipe (``pipeline_loop.py``) is one loop forward, which JAX differentiates, so that the activations
of all M microbatches are kept. Here the backward pass of a microbatch starts as soon as its loss is
known, so that at most K = 2S - 1 are kept for S stages (``pipeline_timetable.py`` has a picture).
S - 1 ticks have only a forward pass, M have both, and S - 1 only a backward pass: M + S - 1 of
each, as with GPipe, and so is the share of idle time.

One tick is::

    forward         prefix → x        of the microbatch that enters the first stage
                    layers            of all stages, each for its own microbatch
                    send              what they return to the next stage
    differentiate   suffix → loss     of the microbatch that leaves the last stage, and its gradient
    backward        layers            of all stages, each for another microbatch
                    send              the gradients of what they got to the stage before
                    prefix            of the microbatch whose gradient leaves the first stage

All ticks of a phase are one ``scan``. The backward pass cannot come from JAX's transposition of
that, so gradients are sums in the carry. What a later tick reads waits in *rings* of K slots: slot
``tick % K`` is written at each tick, and read up to K - 1 ticks later.

``pipeline_parts.py`` cuts the loss into parts: ``parts.run_prefix`` and others, functions from
inputs to outputs of the loss, both as dicts by position. Its words are *targets* (the parameters);
*fixed* and *varying* (what layers get besides x: with all microbatches alike, or not); *early* and
*late* (state that is known before the layers, or after them). Gradients of *split* targets are kept
as *shard sums*, (shards, …), until the loop is done. An output may be an input of a later part::

    loss.state[i]         the input with the old value of the Variable that gets output i
    loss.result_of[i]     the input with what the layers return in place of x, which is output i
    loss.written_of[i]    the input with what the layers write in place of their array, output i
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp

from ..transforms.grad import PreparedCall, ValueAndGrad
from ..transforms.in_trace import Function, traced_slots
from .pipeline_loss import ByPosition, TracedLoss, find_call
from .pipeline_parts import LossParts
from .pipeline_stage import Residuals, TracedStages
from .pipeline_timetable import Timetable
from .shard_sums import ShardSums, add_up, dtype_of_sums

Arrays: TypeAlias = Sequence[Any]
Rest = TypeVar("Rest")


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
      batch: for each array in the arguments that has rows a pair: the array of the first
        microbatch, as it is in ``call``, and that of all microbatches, (M, rows, …).
      dtype: that of sums of gradients; None for their own.
      row_axes: mesh axes that shard the rows.
      is_split: for each array that is differentiated, whether none of these axes shards it. Its
        gradient is then added up over them once, after the loop.

    Returns:
      The mean of the losses, or with auxiliary data a pair with these, stacked, and the sum of the
      gradients of each array that is differentiated.
    """
    flat = call.flat
    slots = traced_slots(flat.leaves)  # of all arrays in the arguments: the inputs of the loss
    position_of = {slot: i for i, slot in enumerate(slots)}  # slot → number of the input
    all_microbatches = {id(first): stacked for first, stacked in batch}
    batch_by_position = {}
    for i, slot in enumerate(slots):
        # The arguments hold the same objects as `batch`, which tells which of them have rows.
        if (stacked := all_microbatches.get(id(flat.leaves[slot]))) is not None:
            batch_by_position[i] = stacked
    targets = [position_of[slot] for slot in call.slots]
    names = [call.plan.names[slot] for slot in call.slots]  # such as ``model.up.kernel``

    def differentiate(function: Function, arrays: Arrays) -> tuple[Arrays, tuple[Any, ...]]:
        """Runs the pipeline in the loss; returns the gradients, and what the loss returns."""
        loss = TracedLoss(function, arrays, flat, slots, find_call(function, arrays))
        assert loss.call.staged is not None
        # All stages get all rows of a microbatch, so the axis of the stages divides none.
        axes = tuple(axis for axis in row_axes if axis != loss.call.staged.axis)
        split = {}  # target → its name; none if the rows are not sharded
        if axes:
            triples = zip(targets, names, is_split, strict=True)
            split = {target: name for target, name, splits in triples if splits}
        parts = LossParts(loss, targets, batch_by_position.keys(), split)
        sums = ShardSums(loss.call.staged.mesh, axes)
        loop = OneForwardOneBackward(parts, arrays, batch_by_position, dtype, sums)
        result = loop.run()
        value, *auxiliary = (result.returned[i] for i in loss.returned)  # each (M, …)
        new_state = [result.state[i] for i in loss.state]
        gradients = [result.gradients[i] for i in targets]
        return gradients, loss.outputs([value.mean(), *auxiliary], new_state)

    return gradient.differentiate(call.plan, flat, slots, differentiate)


class Accumulated(NamedTuple):
    """What the loop returns, by the positions of outputs; ``gradients`` by those of the targets."""

    returned: ByPosition  # what the loss returns, of all microbatches, (M, …)
    state: ByPosition  # what Variables get, after the last microbatch
    gradients: ByPosition  # the sums of the gradients of the targets


class _Carry(NamedTuple):
    """What one tick passes to the next, with the shapes of the arrays in each field.

    ``totals`` has positions of inputs, the targets. All other fields have those of outputs, but for
    ``residuals``, which have numbers of their own.
    """

    sent: ByPosition  # the x that each stage gets for its forward pass, (S, rows, …)
    d_sent: ByPosition  # gradients of what each stage returned, for its backward pass, (S, rows, …)
    written: ByPosition  # the arrays of the layers that layers write, (S, D, …)
    early: ByPosition  # the early state that the next microbatch enters with
    late: ByPosition  # the late state that the next microbatch leaves with
    residuals: Residuals  # rings: slot t mod K has what forward passes of tick t kept, (S, K, …)
    past_early: ByPosition  # rings: the early state with which microbatch t entered, (K, …)
    past_varying: ByPosition  # rings: what else layers get with microbatch t, (K, …)
    # Sums over the microbatches so far. Those of split targets are shard sums: one more dimension
    # in front, (shards, …).
    totals: ByPosition  # gradients of the targets by prefix and suffix, in the targets' shapes
    fixed_totals: ByPosition  # gradients of what is fixed: of layers (S, D, …), of others (S, …)


class OneForwardOneBackward:
    """The loop over the ticks of M microbatches.

    Its private attributes:

        _parts, _loss   the parts of the loss, and the loss itself, with its positions
        _arrays         the inputs of the loss, with one microbatch
        _batch          those of them that have rows, with all microbatches, (M, rows, …)
        _fixed          what layers get with all microbatches alike, by position
        _stages         the layers of all stages: their forward and their backward pass
        _staged         constrains arrays (S, …) to the stages, and sends them to the next one
        _time           says which microbatch each stage has at a tick, and which slot of a ring
        _sums           makes and constrains shard sums
        _dtype          the dtype of sums of gradients; None for their own
    """

    def __init__(
        self,
        parts: LossParts,
        arrays: Arrays,
        batch: Mapping[int, jax.Array],
        dtype: Any,
        sums: ShardSums,
    ):
        """Traces the layers.

        Args:
          parts: the parts of the loss.
          arrays: the inputs of the loss, with one microbatch.
          batch: the inputs that have rows, of all microbatches, (M, rows, …).
          dtype: that of sums of gradients; None for their own.
          sums: computes gradients as one sum for each shard of the rows, (shards, …).
        """
        assert parts.loss.call.staged is not None  # `find_call` has refused a loss without one
        self._parts, self._loss, self._staged = parts, parts.loss, parts.loss.call.staged
        self._arrays, self._batch = dict(enumerate(arrays)), batch
        self._dtype, self._sums = dtype, sums
        num_microbatches = len(next(iter(batch.values())))  # M, the same in all arrays
        self._time = Timetable(self._staged.stages, num_microbatches)  # which microbatch is where
        self._stages = TracedStages(parts)

    def run(self) -> Accumulated:
        """Runs all ticks, and what comes before and after them once for all microbatches."""
        parts, loss, inputs = self._parts, self._loss, self._arrays
        # What layers get with all microbatches alike, and its derivative by the targets.
        self._fixed = parts.run_fixed(inputs)
        _, pull_fixed = jax.vjp(
            lambda targets: parts.run_fixed_with_gradients(inputs | targets),
            _pick(inputs, parts.targets),
        )
        # The ticks, in three phases.
        carry = self._first_carry()
        warm, steady = self._time.delay, self._time.microbatches  # S - 1 and M ticks
        carry, _ = self._scan(self._run_warm, carry, 0, warm)
        carry, returned = self._scan(self._run_steady, carry, warm, steady)
        carry, _ = self._scan(self._run_cool, carry, warm + steady, warm)
        # The gradient of a target: by prefix and suffix, plus by what is fixed, such as the layers.
        gradients = self._added_up(carry.totals, parts.split)
        [by_fixed] = pull_fixed(self._fixed_gradients(carry))
        for i, gradient in gradients.items():
            gradients[i] = gradient + by_fixed[i].astype(gradient.dtype)
        # State that depends on what layers write is computed from what they wrote last.
        inputs_at_the_end = (
            inputs
            | _rename(carry.early, loss.state)
            | _rename(carry.late, loss.state)
            | _rename(carry.written, loss.written_of)
        )
        state = carry.early | carry.late | parts.run_ending(inputs_at_the_end)
        return Accumulated(returned, state, gradients)

    def _scan(self, run: Callable[..., Any], carry: _Carry, start: int, count: int) -> Any:
        """Runs ``count`` ticks, from number ``start``."""
        return jax.lax.scan(run, carry, start + jnp.arange(count))

    def _run_warm(self, carry: _Carry, tick: jax.Array) -> tuple[_Carry, None]:
        """Runs a tick with a forward pass only."""
        return self._forward(carry, tick), None

    def _run_steady(self, carry: _Carry, tick: jax.Array) -> tuple[_Carry, ByPosition]:
        """Runs a tick with a forward pass, a loss, which it returns, and a backward pass."""
        carry = self._forward(carry, tick)
        # Stages send in a ring, so the first one has got what the last one returned. It is read
        # there because XLA compiles a slice of the last stage, [-1], as a shift of all stages.
        leaving = {i: x[0] for i, x in carry.sent.items()}  # (rows, …)
        carry, returned, d_leaving = self._differentiate(carry, tick, leaving)
        # The gradient of what each stage returned, (S, rows, …): the last one has it from the loss,
        # the others from the next stage, which sent it in the tick before.
        d_out = {
            i: _where(self._time.is_last, d_leaving[i], d_sent)
            for i, d_sent in carry.d_sent.items()
        }
        return self._backward(carry, tick, d_out), returned

    def _run_cool(self, carry: _Carry, tick: jax.Array) -> tuple[_Carry, None]:
        """Runs a tick with a backward pass only."""
        return self._backward(carry, tick, carry.d_sent), None

    def _forward(self, carry: _Carry, tick: jax.Array) -> _Carry:
        """Runs the forward pass of one tick: the prefix, the layers of all stages, and the send."""
        parts, time = self._parts, self._time
        slot = time.slot(tick)  # of the rings, for what this tick keeps
        # 1. The prefix of the microbatch that enters the first stage; its number is the tick. When
        # all have entered, the last one does so again, and what comes of it is ignored.
        entering = jnp.minimum(tick, time.microbatches - 1)
        before = parts.run_prefix(self._inputs(entering, carry.early))
        past_early = _put(carry.past_early, carry.early, slot)  # for the backward pass of it
        past_varying = _put(carry.past_varying, _pick(before, parts.varying), slot)
        # 2. What the layers get. The first stage has x from the prefix, the others were sent it.
        x = {  # (S, rows, …)
            i: self._staged.constrain_rows(_where(time.is_first, before[i], sent))
            for i, sent in carry.sent.items()
        }
        items = time.forward(tick)  # (S,): stage s has microbatch `tick - s`
        # Each stage gets what its own microbatch entered with: (K, …) → (S, …).
        varying = {
            i: self._staged.constrain(jnp.take(ring, time.slot(items), axis=0))
            for i, ring in past_varying.items()
        }
        # 3. The layers. Variables that they write have their newest values in `carry.written`.
        arrays = self._fixed | carry.written | x | varying
        out, written, residuals = self._stages.forward(arrays)  # each array (S, …)
        # 4. What the next tick gets. State only changes for real microbatches: early state not once
        # all have entered, and that of layers not in idle stages.
        is_entering, is_busy = time.is_busy(tick), time.is_busy(items)
        return carry._replace(
            sent=self._send(out, 1),
            early={i: jnp.where(is_entering, before[i], old) for i, old in carry.early.items()},
            written={i: _where(is_busy, written[i], old) for i, old in carry.written.items()},
            residuals=_put(carry.residuals, residuals, slot, axis=1),
            past_early=past_early,
            past_varying=past_varying,
        )

    def _differentiate(
        self, carry: _Carry, tick: jax.Array, leaving: ByPosition
    ) -> tuple[_Carry, ByPosition, ByPosition]:
        """Computes the loss of the microbatch that leaves the last stage, and its gradient.

        Args:
          carry: what the forward pass of this tick passed on.
          tick: the tick.
          leaving: what the last stage returned, (rows, …), by the position of the x it replaces.

        Returns:
          The carry, with new totals and late state; what the loss returns; and the gradient of
          ``leaving``, by the same positions, for floating-point arrays.
        """
        parts, loss = self._parts, self._loss
        microbatch = self._time.leaving(tick)
        inputs = (
            self._inputs(microbatch, self._early_of(carry, microbatch))
            | _rename(carry.late, loss.state)
            | _rename(leaving, loss.result_of)
        )
        # The suffix is differentiated by the targets, and by what the layers returned.
        results = [loss.result_of[i] for i in parts.x_with_gradients]

        def gradients_and_outputs(inputs: ByPosition, _: object) -> tuple[ByPosition, ByPosition]:
            def value(chosen: ByPosition) -> tuple[Any, ByPosition]:
                outputs = parts.run_suffix(inputs | chosen)
                return outputs[loss.returned[0]], outputs  # the first that it returns is the loss

            chosen = _pick(inputs, [*parts.targets, *results])
            gradients, outputs = jax.grad(value, has_aux=True)(chosen)
            return gradients, outputs

        gradients, outputs = self._with_shard_sums(gradients_and_outputs, inputs, {})
        totals = _add(carry.totals, _pick(gradients, parts.targets))
        carry = carry._replace(late=_pick(outputs, parts.late), totals=totals)
        d_leaving = {i: gradients[loss.result_of[i]] for i in parts.x_with_gradients}
        return carry, _pick(outputs, loss.returned), d_leaving

    def _backward(self, carry: _Carry, tick: jax.Array, d_out: ByPosition) -> _Carry:
        """Runs the backward pass of one tick: the layers of all stages, the send, and the prefix.

        Args:
          carry: what this tick has computed so far.
          tick: the tick.
          d_out: the gradient of what each stage returned for its microbatch, (S, rows, …).
        """
        parts, time = self._parts, self._time
        items = time.backward(tick)  # (S,): the microbatch of each stage
        is_busy = time.is_busy(items)  # (S,): an idle stage has a number that is no microbatch
        # What each stage kept of its microbatch in the forward pass: (S, K, …) → (S, …).
        slots = time.slots_on_stages(items)
        kept = {n: self._staged.take_on_stages(ring, slots) for n, ring in carry.residuals.items()}
        gradients = self._stages.backward(
            self._fixed, kept, d_out, self._sums, wanted=[*parts.split_fixed]
        )
        # An idle stage computes with whatever is in its ring, so its gradients may be inf or nan.
        d_fixed = {}
        for i in parts.fixed_with_gradients:
            # Gradients are (S, …); those of split ones are shard sums, (shards, S, …).
            on_stages = is_busy[None] if i in parts.split_fixed else is_busy
            d_fixed[i] = _where(on_stages, gradients[i], 0)
        d_x = _pick(gradients, parts.x_with_gradients)  # (S, rows, …)
        by_prefix = self._prefix_gradients(carry, time.returning(tick), d_x)
        return carry._replace(
            fixed_totals=_add(carry.fixed_totals, d_fixed),
            totals=_add(carry.totals, by_prefix),
            # To the stage before, which returned this x. What an idle stage sends gets to one that
            # is idle in the next tick.
            d_sent=self._send(d_x, -1),
        )

    def _prefix_gradients(self, carry: _Carry, item: jax.Array, d_x: ByPosition) -> ByPosition:
        """Returns gradients of the targets by the prefix, such as those of an embedding.

        Args:
          carry: what this tick has computed so far.
          item: the microbatch whose backward pass ends in the first stage; negative while none has
            come so far, for which the gradients are 0.
          d_x: the gradients of what each stage got, (S, rows, …); those of the first are read.
        """
        parts, microbatch = self._parts, jnp.maximum(item, 0)
        inputs = self._inputs(microbatch, self._early_of(carry, microbatch))
        d_first = {i: jnp.where(item >= 0, x[0], 0) for i, x in d_x.items()}  # (rows, …)

        def gradients(inputs: ByPosition, d_first: ByPosition) -> tuple[ByPosition, tuple[()]]:
            # The prefix runs again: to keep its residuals for 2S - 1 microbatches takes memory.
            _, pull = jax.vjp(
                lambda targets: parts.run_x_with_gradients(inputs | targets),
                _pick(inputs, parts.targets),
            )
            [d_targets] = pull(d_first)
            return d_targets, ()  # and nothing else

        d_targets, _ = self._with_shard_sums(gradients, inputs, d_first)
        return d_targets

    def _with_shard_sums(
        self,
        function: Callable[[ByPosition, ByPosition], tuple[ByPosition, Rest]],
        inputs: ByPosition,
        d_first: ByPosition,
    ) -> tuple[ByPosition, Rest]:
        """Runs a function that differentiates a part of the loss, for one microbatch.

        Args:
          function: a function of ``inputs`` and ``d_first`` that returns gradients by the position
            of the input, and anything else.
          inputs: the inputs of the loss. Those of the batch, and what the layers returned, are
            (rows, …).
          d_first: further arrays, (rows, …).

        Returns:
          What the function returns, with the gradients of split targets as shard sums.
        """
        have_rows = {*self._batch, *self._loss.results}
        # The dimension of the rows; none in an array (M,) of the batch, which is a scalar here.
        row_dims = {i: 0 if i in have_rows and x.ndim else None for i, x in inputs.items()}
        return self._sums.evaluate(
            lambda arrays: function(*arrays),
            (inputs, d_first),
            (row_dims, dict.fromkeys(d_first, 0)),
            wanted=self._parts.split,
        )

    def _first_carry(self) -> _Carry:
        """Returns the carry of the first tick: zeros, and state as it is before the call.

        No value of ``sent`` or of a ring is used before a tick has written it, but idle stages
        compute with what is there.
        """
        parts, loss = self._parts, self._loss
        stages, slots = self._time.stages, self._time.slots  # S and K
        types = loss.closed.out_avals  # of the outputs of the loss
        sent = {
            i: self._staged.constrain_rows(_zeros((stages, *types[i].shape), types[i].dtype))
            for i in loss.x
        }
        # State comes from the input that holds the Variable before the call.
        early = {i: self._arrays[loss.state[i]] for i in parts.early}
        late = {i: self._arrays[loss.state[i]] for i in parts.late}
        totals = {}
        for i in parts.targets:
            target = self._arrays[i]
            dtype = dtype_of_sums(target, self._dtype)
            if i in parts.split:
                totals[i] = self._sums.zeros(target, dtype)  # (shards, …)
            else:
                totals[i] = jnp.zeros_like(target, dtype)
        return _Carry(
            sent=sent,
            d_sent=_pick(sent, parts.x_with_gradients),  # a gradient has the type of its array
            written=_pick(self._fixed, loss.written_of),
            early=early,
            late=late,
            residuals={  # on their stages
                n: self._staged.constrain(_zeros((stages, slots, *kept.shape), kept.dtype))
                for n, kept in self._stages.residual_types.items()
            },
            past_early={i: jnp.broadcast_to(old, (slots, *old.shape)) for i, old in early.items()},
            past_varying={
                i: _zeros((slots, *types[i].shape), types[i].dtype) for i in parts.varying
            },
            totals=totals,
            fixed_totals={i: self._zero_fixed_total(i) for i in parts.fixed_with_gradients},
        )

    def _zero_fixed_total(self, position: int) -> jax.Array:
        """Returns zeros, to which the stages add the gradients of a fixed array.

        They are (S, …) on the stages; shard sums, (shards, S, …), if the array is split.
        """
        array = self._fixed[position]
        # All stages have the same array, unless it is one of the layers, (S, D, …). Each stage adds
        # up a gradient of its own, and these are summed after the loop.
        if position not in self._loss.layers:
            array = jnp.broadcast_to(array, (self._time.stages, *array.shape))
        dtype = dtype_of_sums(array, self._dtype)
        if position in self._parts.split_fixed:
            return self._sums.zeros(array, dtype, self._staged.axis)
        return self._staged.constrain(jnp.zeros_like(array, dtype))

    def _inputs(self, microbatch: jax.Array, early: ByPosition) -> ByPosition:
        """Returns the inputs of the loss for a microbatch, by its number.

        Args:
          microbatch: the number, () of integers.
          early: the early state with which it enters, by the positions of outputs.
        """
        of_microbatch = {i: _take(stacked, microbatch) for i, stacked in self._batch.items()}
        return self._arrays | of_microbatch | _rename(early, self._loss.state)

    def _early_of(self, carry: _Carry, microbatch: jax.Array) -> ByPosition:
        """Returns the early state with which a microbatch entered."""
        slot = self._time.slot(microbatch)
        return {i: _take(ring, slot) for i, ring in carry.past_early.items()}

    def _fixed_gradients(self, carry: _Carry) -> ByPosition:
        """Returns the gradients of what is fixed, in the types in which the loss computes it."""
        types = self._loss.closed.out_avals  # of the outputs of the loss, by position
        totals = self._added_up(carry.fixed_totals, self._parts.split_fixed)  # (S, …)
        gradients = {}
        for i, total in totals.items():
            # Layers have a part for each stage, (S, D, …). What else is fixed, all stages read, and
            # each has added up a gradient of its own: (S, …) → (…).
            gradient = total if i in self._loss.layers else total.sum(0)
            gradients[i] = gradient.astype(types[i].dtype)  # from the dtype of sums
        return gradients

    def _added_up(self, totals: ByPosition, names: Mapping[int, str]) -> ByPosition:
        """Returns sums of gradients, with shard sums added up: (shards, …) → (…).

        ``names`` has a name, for reports, for each position whose total is shard sums.
        """
        return {i: add_up(x, 0, names[i]) if i in names else x for i, x in totals.items()}

    def _send(self, x: ByPosition, shift: int) -> ByPosition:
        """Sends arrays, (S, rows, …), to the next stage; with a shift of -1 to the one before."""
        return {i: self._staged.send(array, shift) for i, array in x.items()}


def _pick(arrays: Mapping[int, Any], positions: Iterable[int]) -> ByPosition:
    """Returns those of some arrays that have these positions."""
    return {i: arrays[i] for i in positions}


def _rename(arrays: ByPosition, position_of: Mapping[int, int]) -> ByPosition:
    """Returns outputs of the loss as inputs: ``position_of`` maps one position to the other."""
    return {position_of[i]: x for i, x in arrays.items()}


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns one item along the first dimension."""
    return cast(jax.Array, jax.lax.dynamic_index_in_dim(x, index, keepdims=False))


def _put(
    rings: Mapping[int, Any], arrays: Mapping[int, Any], slot: jax.Array, axis: int = 0
) -> dict[int, Any]:
    """Replaces one slot of each ring by the array at its position; slots are along ``axis``."""
    return {
        i: jax.lax.dynamic_update_index_in_dim(ring, arrays[i], slot, axis)
        for i, ring in rings.items()
    }


def _where(on_stage: jax.Array, x: Any, y: Any) -> jax.Array:
    """Returns x on the stages where ``on_stage``, (S,), is true, and y on the others.

    Arrays are (S, …), but one may be the same for all stages, (…). With (1, S), they are (n, S, …).
    """
    ndim = max(jnp.ndim(x), jnp.ndim(y))
    return jnp.where(on_stage.reshape(*on_stage.shape, *[1] * (ndim - on_stage.ndim)), x, y)


def _add(totals: ByPosition, new: ByPosition) -> ByPosition:
    """Adds gradients to their sums, in the dtype of these."""
    return {i: total + new[i].astype(total.dtype) for i, total in totals.items()}


def _zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns an array of zeros, also of keys."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.zeros(shape, dtype)
    key = jax.random.key(0, impl=dtype._impl.name)
    return jnp.broadcast_to(key, shape)
