"""1F1B: a pipeline in which each stage runs one forward and one backward pass in turn.

GPipe (``pipeline_loop.py``) is one forward loop that JAX differentiates, so the activations of all
M microbatches are kept. In 1F1B, the backward pass of a microbatch starts as soon as its loss is
known, so for S stages the activations of at most K = 2S - 1 microbatches are kept
(``pipeline_timetable.py`` has a picture). S - 1 ticks have only a forward pass, M ticks have both,
and S - 1 ticks have only a backward pass. Each kind of pass takes M + S - 1 ticks, as with GPipe,
so the share of idle time is the same.

One tick is::

    forward         prefix → x        of the microbatch that enters the first stage
                    layers            of all stages, each for its own microbatch
                    send              the layers' outputs, to the next stage
    differentiate   suffix → loss     of the microbatch that leaves the last stage, and its gradient
    backward        layers            of all stages, each for another microbatch
                    send              the gradients of the layers' inputs, to the stage before
                    prefix            of the microbatch whose gradient leaves the first stage

The ticks with only a forward pass are the *warm* phase, those with both the *steady*, and the last
ones the *cool* phase. All ticks of a phase are one ``scan``. JAX's transposition of a scan would
run the backward pass after all ticks, so gradients are computed in each tick, and added to sums in
the carry. Stages send in a circle: the first stage receives the output of the last one. Values that
a later tick reads wait in *rings* of K slots: each tick writes slot ``tick % K``, and the slot is
read up to K - 1 ticks later.

``pipeline_parts.py`` cuts the loss into parts, such as ``parts.run_prefix``. A part is a function
from inputs to outputs of the loss, both as dicts by position. Words of that module: *targets* are
the parameters. Layers get values besides x, which are *fixed* if they are the same for all
microbatches, and *varying* otherwise. State is *early* if it is known before the layers, and *late*
if it is known after them. Gradients of *split* targets are kept as *shard sums*, (shards, …), until
the loop is done. An output may be an input of a later part::

    loss.state[i]         the input with the old value of the Variable that gets output i
    loss.result_of[i]     the input with the layers' result for x; output i is this x
    loss.written_of[i]    the input with the array that the layers write; output i is the old array

The keys of these three dicts are positions of outputs. ``loss.x`` and ``loss.layers`` have the
positions of the outputs that are the layers' inputs: x, and the arrays of the layers. The first of
the positions ``loss.returned`` is the one of the loss's value. Of the parts' attributes,
``x_with_gradients`` and ``fixed_with_gradients`` are the positions of floating-point arrays, for
which there are gradients. ``split`` and ``split_fixed`` map the positions of split targets and of
fixed values with shard sums to names for reports.

Helpers in this file: `_pick` selects some positions of a dict of arrays, and `_rename` gives
outputs the positions of inputs. `_put` returns rings with a new value in one slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from ..transforms.grad import PreparedCall, ValueAndGrad
from ..transforms.in_trace import Function, traced_slots
from .pipeline_loss import ByPosition, trace_loss
from .pipeline_parts import LossParts
from .pipeline_stage import Residuals, trace_stages
from .pipeline_timetable import Timetable
from .shard_sums import ShardSums, add_up, dtype_of_sums
from .staged_layers import put, take, where_stage

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
      batch: a pair for each array in the arguments that has rows: the array of the first
        microbatch, the same object as in ``call``, and the array of all microbatches,
        (M, rows, …).
      dtype: the dtype of sums of gradients; None for the dtypes of the gradients.
      row_axes: mesh axes that shard the rows.
      is_split: for each array that is differentiated, whether none of these axes shards it. Its
        gradient is then added up over the axes once, after the loop.

    Returns:
      A pair. The first item is the mean of the losses; with auxiliary data, it is a pair of the
      mean and the stacked data. The second item has the sum of the gradients of each array that is
      differentiated.
    """
    flat = call.flat
    slots = traced_slots(flat.leaves)  # the slots of all arrays in the arguments: the loss's inputs
    position_of = {slot: i for i, slot in enumerate(slots)}  # slot → position of the input
    # Arrays with rows are found by identity, because the arguments hold the objects in `batch`.
    stacked_by_id = {id(first): stacked for first, stacked in batch}
    batch_by_position = {}  # position of the input → the array of all microbatches
    for i, slot in enumerate(slots):
        leaf_id = id(flat.leaves[slot])
        if leaf_id in stacked_by_id:
            batch_by_position[i] = stacked_by_id[leaf_id]
    targets = [position_of[slot] for slot in call.slots]
    names = [call.plan.names[slot] for slot in call.slots]  # for example ``model.up.kernel``

    def differentiate(function: Function, arrays: Arrays) -> tuple[Arrays, tuple[Any, ...]]:
        """Runs the pipeline in the loss, for all microbatches.

        Args:
          function: the loss, a function of the arrays in the arguments.

        Returns:
          A pair: the gradients of the targets, and the outputs of the loss in the form in which
          ``function`` returns them.
        """
        loss = trace_loss(function, arrays, flat, slots)
        # The axis of the stages divides no rows, because all stages get all rows of a microbatch.
        axes = tuple(axis for axis in row_axes if axis != loss.staged.axis)
        split = {}  # position of a split target → its name; empty if the rows are not sharded
        if axes:
            for target, name, is_target_split in zip(targets, names, is_split, strict=True):
                if is_target_split:
                    split[target] = name
        parts = LossParts(loss, targets, batch_by_position.keys(), split)
        sums = ShardSums(loss.staged.mesh, axes)
        loop = OneForwardOneBackward(parts, arrays, batch_by_position, dtype, sums)
        result = loop.run()
        value, *auxiliary = (result.returned[i] for i in loss.returned)  # each (M, …)
        new_state = [result.state[i] for i in loss.state]  # the keys are positions of outputs
        gradients = [result.gradients[i] for i in targets]
        return gradients, loss.outputs([value.mean(), *auxiliary], new_state)

    # This calls the function above in place of JAX's transform, writes the new state to the
    # Variables, and returns the result of the loss and the gradients.
    return gradient.differentiate(call.plan, flat, slots, differentiate)


class Accumulated(NamedTuple):
    """The results of the loop.

    ``returned`` and ``state`` are by the positions of outputs, ``gradients`` by the positions of
    the targets, which are inputs.
    """

    returned: ByPosition  # what the loss returns for all microbatches, (M, …)
    state: ByPosition  # the values that Variables have after the last microbatch
    gradients: ByPosition  # the sums of the gradients of the targets


class _Carry(NamedTuple):
    """The arrays that one tick passes to the next, with the shapes of each field.

    ``totals`` is by the positions of inputs, the targets. ``residuals`` have numbers of their own.
    All other fields are by the positions of outputs.
    """

    # What each stage received at the end of the tick before, (S, rows, …): the x of its next
    # forward pass, and the gradient of its output in its next backward pass.
    received_x: ByPosition
    received_d_out: ByPosition
    written: ByPosition  # the arrays of the layers that layers write, (S, D, …)
    early: ByPosition  # the early state that the next microbatch enters with
    late: ByPosition  # the late state that the next microbatch leaves with
    residuals: Residuals  # rings: slot t mod K has the residuals of the passes of tick t, (S, K, …)
    past_early: ByPosition  # rings: the early state with which microbatch t entered, (K, …)
    past_varying: ByPosition  # rings: the varying values that microbatch t has, (K, …)
    # The totals are sums over the microbatches so far. The totals of split targets are shard sums,
    # with one more dimension in front, (shards, …).
    totals: ByPosition  # gradients of the targets by prefix and suffix, in the targets' shapes
    fixed_totals: ByPosition  # gradients of fixed values: (S, D, …) for layers, else (S, …)


class OneForwardOneBackward:
    """The loop over the ticks of M microbatches.

    Its private attributes:

        _parts, _loss   the parts of the loss, and the loss itself, with its positions
        _arrays         the inputs of the loss, with one microbatch
        _batch          the inputs that have rows, with all microbatches, (M, rows, …)
        _fixed          the fixed values that layers get, by position
        _stages         the layers of all stages: their forward and their backward pass
        _staged         constrains arrays (S, …) to the stages, and sends them to the next one
        _time           says which microbatch each stage has at a tick, and which slot of a ring
                        has the values of that microbatch
        _sums           makes and constrains shard sums
        _dtype          the dtype of sums of gradients; None for the dtypes of the gradients
    """

    def __init__(
        self,
        parts: LossParts,
        arrays: Arrays,
        batch: Mapping[int, jax.Array],
        dtype: Any,
        sums: ShardSums,
    ):
        """Computes the fixed values, and traces the layers.

        Args:
          parts: the parts of the loss.
          arrays: the inputs of the loss, with one microbatch.
          batch: the inputs that have rows, with all microbatches, (M, rows, …).
          dtype: the dtype of sums of gradients; None for the dtypes of the gradients.
          sums: computes gradients as one sum for each shard of the rows, (shards, …).
        """
        self._parts, self._loss, self._staged = parts, parts.loss, parts.loss.staged
        self._arrays, self._batch = dict(enumerate(arrays)), batch
        self._dtype, self._sums = dtype, sums
        num_microbatches = len(next(iter(batch.values())))  # M, the same in all arrays
        self._time = Timetable(self._staged.stages, num_microbatches)
        self._fixed = parts.run_fixed(self._arrays)
        self._stages = trace_stages(parts)

    def run(self) -> Accumulated:
        """Runs all ticks, and returns the loss's outputs, the state, and the gradients."""
        num_warm, num_steady = self._time.delay, self._time.microbatches  # S - 1 and M ticks
        num_cool = num_warm
        carry = self._first_carry()
        warm_ticks = jnp.arange(num_warm)
        steady_ticks = num_warm + jnp.arange(num_steady)
        cool_ticks = num_warm + num_steady + jnp.arange(num_cool)
        carry, _ = jax.lax.scan(self._run_warm, carry, warm_ticks)
        carry, returned = jax.lax.scan(self._run_steady, carry, steady_ticks)
        carry, _ = jax.lax.scan(self._run_cool, carry, cool_ticks)
        return Accumulated(returned, self._last_state(carry), self._target_gradients(carry))

    def _target_gradients(self, carry: _Carry) -> ByPosition:
        """Returns the gradients of the targets, which are inputs, from the last carry."""
        parts, inputs = self._parts, self._arrays
        # A target has one gradient that came through prefix and suffix, and one through the fixed
        # values: the layers' parameters, for example, are fixed. The gradient is the sum of both.
        by_prefix_and_suffix = self._add_up_shards(carry.totals, parts.split)
        _, pull_fixed = jax.vjp(
            lambda targets: parts.run_fixed_with_gradients(inputs | targets),
            _pick(inputs, parts.targets),
        )
        [by_fixed] = pull_fixed(self._fixed_gradients(carry))
        # Both dicts have all targets as keys.
        return _add(by_prefix_and_suffix, by_fixed)

    def _last_state(self, carry: _Carry) -> ByPosition:
        """Returns all new state, by the positions of outputs, from the last carry."""
        loss = self._loss
        # The ending is the state that depends on the arrays that layers write. It is computed once,
        # from the arrays that the last microbatch has left.
        inputs_at_the_end = (
            self._arrays
            | _rename(carry.early, loss.state)
            | _rename(carry.late, loss.state)
            | _rename(carry.written, loss.written_of)
        )
        return carry.early | carry.late | self._parts.run_ending(inputs_at_the_end)

    def _run_warm(self, carry: _Carry, tick: jax.Array) -> tuple[_Carry, None]:
        """Runs a tick with a forward pass only."""
        return self._forward(carry, tick), None

    def _run_steady(self, carry: _Carry, tick: jax.Array) -> tuple[_Carry, ByPosition]:
        """Runs a tick with a forward pass, a loss and a backward pass.

        Returns:
          A pair: the new carry, and the outputs of the loss, its value and auxiliary data, for the
          microbatch that leaves the last stage, by the position of the output.
        """
        carry = self._forward(carry, tick)
        # `leaving` is the last stage's output, which the first stage has received. It is read there
        # because XLA would compile a slice of the last stage, [-1], as a shift of all stages.
        leaving = {i: x[0] for i, x in carry.received_x.items()}  # (rows, …)
        carry, returned, d_leaving = self._differentiate(carry, tick, leaving)
        # The gradients of the stages' outputs, (S, rows, …). The last stage has its gradient from
        # the loss. Each other stage has received it from the next stage in the tick before.
        d_out = {
            i: where_stage(self._time.is_last, d_leaving[i], received)
            for i, received in carry.received_d_out.items()
        }
        return self._backward(carry, tick, d_out), returned

    def _run_cool(self, carry: _Carry, tick: jax.Array) -> tuple[_Carry, None]:
        """Runs a tick with a backward pass only."""
        # The last stage has no loss in these ticks. What it received from the first stage is no
        # gradient of its output, but does not count, because the last stage is idle.
        return self._backward(carry, tick, carry.received_d_out), None

    def _forward(self, carry: _Carry, tick: jax.Array) -> _Carry:
        """Runs the forward pass of one tick: the prefix, the layers of all stages, and the send."""
        parts, time = self._parts, self._time
        slot = time.slot(tick)  # the slot of each ring that the tick writes
        # 1. The prefix runs for the microbatch that enters the first stage; its number is the tick.
        # When all have entered, the last one enters again, and its results are ignored.
        entering = jnp.minimum(tick, time.microbatches - 1)
        prefix_outputs = parts.run_prefix(self._inputs(entering, carry.early))
        # The backward pass of this microbatch reads the early state again.
        past_early = _put(carry.past_early, carry.early, slot)
        past_varying = _put(carry.past_varying, _pick(prefix_outputs, parts.varying), slot)
        # 2. The layers' inputs. The first stage has x from the prefix, the others from the stage
        # before.
        x = {  # (S, rows, …)
            i: self._staged.constrain_rows(where_stage(time.is_first, prefix_outputs[i], received))
            for i, received in carry.received_x.items()
        }
        items = time.forward(tick)  # (S,): stage s has microbatch `tick - s`
        # Each stage gets the varying values with which its own microbatch entered:
        # (K, …) → (S, …).
        varying = {
            i: self._staged.constrain(jnp.take(ring, time.slot(items), axis=0))
            for i, ring in past_varying.items()
        }
        # 3. The layers. Variables that they write have their newest values in `carry.written`.
        arrays = self._fixed | carry.written | x | varying
        out, written, residuals = self._stages.forward(arrays)  # each array (S, …)
        # 4. State only changes for real microbatches, so early state does not change once all have
        # entered, and idle stages write nothing.
        is_entering, is_busy = time.is_busy(tick), time.is_busy(items)
        early = {
            i: jnp.where(is_entering, prefix_outputs[i], old) for i, old in carry.early.items()
        }
        written = {i: where_stage(is_busy, written[i], old) for i, old in carry.written.items()}
        return carry._replace(
            received_x=self._send(out, 1),
            early=early,
            written=written,
            residuals=_put(carry.residuals, residuals, slot, axis=1),
            past_early=past_early,
            past_varying=past_varying,
        )

    def _differentiate(
        self, carry: _Carry, tick: jax.Array, leaving: ByPosition
    ) -> tuple[_Carry, ByPosition, ByPosition]:
        """Computes the loss of the microbatch that leaves the last stage, and its gradient.

        Args:
          carry: the carry after the forward pass of this tick.
          leaving: the output of the last stage, (rows, …). Its arrays have the positions of x,
            because the output of layers has the same structure as their input.

        Returns:
          Three items: the carry, with new totals and late state; the outputs that the loss returns,
          by position; and the gradients of the floating-point arrays in ``leaving``, by the same
          positions as there.
        """
        parts, loss = self._parts, self._loss
        microbatch = self._time.leaving(tick)
        inputs = (
            self._inputs(microbatch, self._early_of(carry, microbatch))
            | _rename(carry.late, loss.state)
            | _rename(leaving, loss.result_of)
        )
        # The suffix is differentiated by the targets, and by the layers' results.
        results = [loss.result_of[i] for i in parts.x_with_gradients]
        differentiated = [*parts.targets, *results]  # positions of inputs

        def gradients_and_outputs(inputs: ByPosition, _: object) -> tuple[ByPosition, ByPosition]:
            """Returns gradients of the loss, by input, and all outputs of the suffix."""

            def value_and_outputs(arrays: ByPosition) -> tuple[Any, ByPosition]:
                outputs = parts.run_suffix(inputs | arrays)
                return outputs[loss.returned[0]], outputs  # the first returned output is the loss

            differentiate = jax.grad(value_and_outputs, has_aux=True)
            gradients, outputs = differentiate(_pick(inputs, differentiated))
            return gradients, outputs

        # The gradients of split targets come back as shard sums, like those in `totals`.
        gradients, outputs = self._differentiate_by_shards(gradients_and_outputs, inputs, {})
        totals = _add(carry.totals, _pick(gradients, parts.targets))
        carry = carry._replace(late=_pick(outputs, parts.late), totals=totals)
        d_leaving = {i: gradients[loss.result_of[i]] for i in parts.x_with_gradients}
        return carry, _pick(outputs, loss.returned), d_leaving

    def _backward(self, carry: _Carry, tick: jax.Array, d_out: ByPosition) -> _Carry:
        """Runs the backward pass of one tick: the layers of all stages, the send, and the prefix.

        Args:
          carry: the carry with all that this tick has computed so far.
          d_out: the gradient of each stage's output for its microbatch, (S, rows, …).
        """
        parts, time = self._parts, self._time
        items = time.backward(tick)  # (S,): the microbatch of each stage
        is_busy = time.is_busy(items)  # (S,): an idle stage has a number that is no microbatch
        # The residuals that each stage kept of its microbatch: (S, K, …) → (S, …).
        slots = time.slots_on_stages(items)
        residuals = {
            n: self._staged.take_on_stages(ring, slots) for n, ring in carry.residuals.items()
        }
        # The gradients of split fixed values are shard sums, (shards, S, …), others are (S, …).
        gradients = self._stages.backward(
            self._fixed, residuals, d_out, self._sums, wanted=[*parts.split_fixed]
        )
        # An idle stage computes with whatever is in its ring, so its gradients may be inf or nan.
        # They count as 0.
        d_fixed = {}
        for i in parts.fixed_with_gradients:
            on_stage = is_busy[None] if i in parts.split_fixed else is_busy
            d_fixed[i] = where_stage(on_stage, gradients[i], 0)
        d_x = _pick(gradients, parts.x_with_gradients)  # (S, rows, …)
        by_prefix = self._prefix_gradients(carry, time.returning(tick), d_x)
        return carry._replace(
            fixed_totals=_add(carry.fixed_totals, d_fixed),
            totals=_add(carry.totals, by_prefix),
            # The gradients go to the stage before, which returned this x. An idle stage may send
            # anything, because the receiver is idle in the next tick.
            received_d_out=self._send(d_x, -1),
        )

    def _prefix_gradients(self, carry: _Carry, item: jax.Array, d_x: ByPosition) -> ByPosition:
        """Returns the targets' gradients that come through the prefix, such as an embedding.

        Args:
          carry: the carry with all that this tick has computed so far.
          item: the microbatch whose backward pass ends in the first stage. It is negative while no
            microbatch has come so far; the gradients are then 0.
          d_x: the gradients of each stage's inputs, (S, rows, …). Only the first stage's are read.
        """
        parts, microbatch = self._parts, jnp.maximum(item, 0)
        inputs = self._inputs(microbatch, self._early_of(carry, microbatch))
        d_x_first = {i: jnp.where(item >= 0, x[0], 0) for i, x in d_x.items()}  # (rows, …)

        def gradients_and_nothing(
            inputs: ByPosition, d_x_first: ByPosition
        ) -> tuple[ByPosition, tuple[()]]:
            """Returns gradients of the targets, and no further results."""
            # The prefix runs again: to keep its residuals for 2S - 1 microbatches takes memory.
            _, pull = jax.vjp(
                lambda targets: parts.run_x_with_gradients(inputs | targets),
                _pick(inputs, parts.targets),
            )
            [d_targets] = pull(d_x_first)
            return d_targets, ()

        d_targets, _ = self._differentiate_by_shards(gradients_and_nothing, inputs, d_x_first)
        return d_targets

    def _differentiate_by_shards(
        self,
        function: Callable[[ByPosition, ByPosition], tuple[ByPosition, Rest]],
        inputs: ByPosition,
        cotangents: ByPosition,
    ) -> tuple[ByPosition, Rest]:
        """Runs a function that differentiates a part of the loss, for one microbatch.

        Args:
          function: a function of ``inputs`` and ``cotangents`` that returns a pair: gradients by
            the position of the input, and a pytree of further results.
          inputs: the inputs of the loss. The arrays of the batch and the layers' results are
            (rows, …).
          cotangents: the gradients of outputs of the part, (rows, …); empty if the part returns the
            loss.

        Returns:
          The pair that the function returns, with the gradients of split targets as shard sums.
        """
        # The dimension of the rows of each input; None for inputs without rows.
        row_dims: dict[int, int | None] = dict.fromkeys(inputs)
        for i in {*self._batch, *self._loss.results}.intersection(inputs):
            # An array (M,) of the batch is a scalar in one microbatch, so it has no rows there.
            if inputs[i].ndim:
                row_dims[i] = 0
        return self._sums.evaluate(
            lambda arrays: function(*arrays),
            (inputs, cotangents),
            (row_dims, dict.fromkeys(cotangents, 0)),
            wanted=self._parts.split,
        )

    def _first_carry(self) -> _Carry:
        """Returns the carry of the first tick: zeros, and state as it is before the call.

        A received value or a value of a ring only counts once a tick has written it, but idle
        stages compute with the values of this carry.
        """
        parts, loss = self._parts, self._loss
        stages, slots = self._time.stages, self._time.slots  # S and K
        types = loss.closed.out_avals  # the types of the loss's outputs, by position
        received_x = {
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
            received_x=received_x,
            # A gradient has the type of its array.
            received_d_out=_pick(received_x, parts.x_with_gradients),
            written=_pick(self._fixed, loss.written_of),
            early=early,
            late=late,
            residuals={  # sharded over the stages
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
        """Returns zeros to which the stages add the gradients of a fixed array.

        The zeros are (S, …) on the stages, or shard sums, (shards, S, …), if the array is split.
        """
        array = self._fixed[position]
        # An array of the layers is (S, D, …). All stages share any other fixed array. Each stage
        # adds up a gradient of its own for it, and `_fixed_gradients` sums these after the loop.
        if position not in self._loss.layers:
            array = jnp.broadcast_to(array, (self._time.stages, *array.shape))
        dtype = dtype_of_sums(array, self._dtype)
        if position in self._parts.split_fixed:
            return self._sums.zeros(array, dtype, self._staged.axis)
        return self._staged.constrain(jnp.zeros_like(array, dtype))

    def _inputs(self, microbatch: jax.Array, early: ByPosition) -> ByPosition:
        """Returns the inputs of the loss for a microbatch, by its number.

        Args:
          early: the early state with which the microbatch enters, by the positions of outputs.
        """
        microbatch_arrays = {i: take(stacked, microbatch) for i, stacked in self._batch.items()}
        return self._arrays | microbatch_arrays | _rename(early, self._loss.state)

    def _early_of(self, carry: _Carry, microbatch: jax.Array) -> ByPosition:
        """Returns the early state with which a microbatch entered."""
        slot = self._time.slot(microbatch)
        return {i: take(ring, slot) for i, ring in carry.past_early.items()}

    def _fixed_gradients(self, carry: _Carry) -> ByPosition:
        """Returns the gradients of the fixed values, by position, in the dtypes of these values."""
        types = self._loss.closed.out_avals  # the types of the loss's outputs, by position
        totals = self._add_up_shards(carry.fixed_totals, self._parts.split_fixed)  # (S, …)
        gradients = {}
        for i, total in totals.items():
            # An array of layers has a part for each stage, (S, D, …). All stages read any other
            # fixed value, and each has added up a gradient of its own: (S, …) → (…).
            gradient = total if i in self._loss.layers else total.sum(0)
            gradients[i] = gradient.astype(types[i].dtype)  # sums may have another dtype
        return gradients

    def _add_up_shards(self, totals: ByPosition, names: Mapping[int, str]) -> ByPosition:
        """Returns sums of gradients, by position, with shard sums added up: (shards, …) → (…).

        The result is a new dict with the same positions. ``names`` has the positions whose totals
        are shard sums, each with a name for reports.
        """
        return {i: add_up(x, 0, names[i]) if i in names else x for i, x in totals.items()}

    def _send(self, x: ByPosition, shift: int) -> ByPosition:
        """Sends arrays, (S, rows, …), to the next stage; with a shift of -1 to the stage before."""
        return {i: self._staged.send(array, shift) for i, array in x.items()}


def _pick(arrays: Mapping[int, Any], positions: Iterable[int]) -> ByPosition:
    """Returns the arrays at these positions."""
    return {i: arrays[i] for i in positions}


def _rename(arrays: ByPosition, position_of: Mapping[int, int]) -> ByPosition:
    """Returns the arrays by the positions of inputs of the loss instead of outputs.

    ``position_of`` maps the positions of outputs to those of inputs, for example ``loss.state``.
    """
    return {position_of[i]: x for i, x in arrays.items()}


def _put(
    rings: Mapping[int, Any], arrays: Mapping[int, Any], slot: jax.Array, axis: int = 0
) -> dict[int, Any]:
    """Replaces one slot of each ring by the array at its position; slots are along ``axis``."""
    return {i: put(ring, arrays[i], slot, axis) for i, ring in rings.items()}


def _add(totals: ByPosition, new: ByPosition) -> ByPosition:
    """Adds gradients to their sums, in the dtypes of the sums."""
    return {i: total + new[i].astype(total.dtype) for i, total in totals.items()}


def _zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns an array of zeros; for a dtype of PRNG keys, an array of equal keys."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.zeros(shape, dtype)
    key = jax.random.key(0, impl=dtype._impl.name)
    return jnp.broadcast_to(key, shape)
