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
that, so gradients are sums in the carry. What a later tick reads waits in *rings* of K slots.

The parts of the loss, and the words for what they get and return (fixed, varying, early, late,
split), are those of ``pipeline_parts.py``. Arrays are named by the position of the output of the
loss that they are, or by that of the input if they are targets: parameters.
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
from .shard_sums import ShardSums, add_up

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
    targets = [position[slot] for slot in call.slots]
    names = [call.plan.names[slot] for slot in call.slots]

    def differentiate(function: Function, arrays: Arrays) -> tuple[Arrays, tuple[Any, ...]]:
        loss = TracedLoss(function, arrays, flat, slots, find_call(function, arrays))
        assert loss.call.loop is not None
        # The stages share the rows.
        axes = tuple(axis for axis in row_axes if axis != loss.call.loop.axis)
        triples = zip(targets, names, is_split, strict=True)
        split = {target: name for target, name, splits in triples if splits and axes}
        parts = LossParts(loss, targets, batch_by_position.keys(), split)
        sums = ShardSums(loss.call.loop.mesh, axes)
        loop = OneForwardOneBackward(parts, arrays, batch_by_position, dtype, sums)
        found = loop.run()
        value, *others = (found.returned[i] for i in loss.returned)
        state = [found.state[i] for i in loss.state]
        gradients = [found.gradients[i] for i in targets]
        return gradients, loss.outputs([value.mean(), *others], state)

    return gradient.differentiate(call.plan, flat, slots, differentiate)


class Accumulated(NamedTuple):
    """What the loop returns."""

    returned: ByPosition  # what the loss returns, of all microbatches, (M, …)
    state: ByPosition  # what Variables get, after the last microbatch
    gradients: ByPosition  # the sums of the gradients of the targets


class _Carry(NamedTuple):
    """What one tick passes to the next, with the shapes of the arrays in each field."""

    sent: ByPosition  # what each stage gets for its forward pass, (S, rows, …)
    d_sent: ByPosition  # what each gets for its backward pass: gradients of what it returned
    written: ByPosition  # the Variables that layers write, (S, D, …)
    early: ByPosition  # the early state that the next microbatch enters with
    late: ByPosition  # the late state that the next microbatch leaves with
    residuals: Residuals  # rings: slot t mod K has what forward passes of tick t kept, (S, K, …)
    past_early: ByPosition  # rings: the early state with which microbatch t entered, (K, …)
    past_varying: ByPosition  # rings: what else layers get with microbatch t, (K, …)
    # Sums over the microbatches so far. Those of split targets are shard sums, (shards, …).
    totals: ByPosition  # gradients of the targets by what is around the layers, as the targets
    fixed_totals: ByPosition  # gradients of what is fixed: of layers (S, D, …), of others (S, …)


class OneForwardOneBackward:
    """The loop over the ticks of M microbatches."""

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
          arrays: the arrays of its arguments, with one microbatch.
          batch: the arrays of all microbatches, (M, rows, …), by the position of the input.
          dtype: that of sums of gradients; None for their own.
          sums: splits the gradients of split targets by the shards of the rows.
        """
        assert parts.loss.call.loop is not None
        self._parts, self._loss, self._loop = parts, parts.loss, parts.loss.call.loop
        self._arrays, self._batch = dict(enumerate(arrays)), batch
        self._dtype, self._sums = dtype, sums
        self._time = Timetable(self._loop.stages, len(next(iter(batch.values()))))
        self._stages = TracedStages(parts)

    def run(self) -> Accumulated:
        """Runs all ticks."""
        parts, inputs = self._parts, self._inputs()
        # What all microbatches share is computed, and differentiated, once.
        self._fixed = parts.run_fixed(inputs)
        _, pull_fixed = jax.vjp(
            lambda targets: parts.run_fixed_with_gradients(inputs | targets),
            _pick(inputs, parts.targets),
        )
        carry = self._first_carry()
        warm, steady = self._time.delay, self._time.microbatches
        carry, _ = self._scan(self._run_warm, carry, 0, warm)
        carry, returned = self._scan(self._run_steady, carry, warm, steady)
        carry, _ = self._scan(self._run_cool, carry, warm + steady, warm)
        # The gradient of a target: by what is around the layers, and by the layers.
        gradients = self._added_up(carry.totals, parts.split)
        [by_layers] = pull_fixed(self._fixed_gradients(carry))
        for i, gradient in gradients.items():
            gradients[i] = gradient + by_layers[i].astype(gradient.dtype)
        # The early and late state after the last microbatch, and the state that layers wrote.
        last = self._inputs(early=carry.early, late=carry.late, written=carry.written)
        state = carry.early | carry.late | parts.run_ending(last)
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
        # From the first stage, which the last one has sent it to: XLA slices the last by a shift.
        leaving = {i: x[0] for i, x in carry.sent.items()}
        carry, returned, d_leaving = self._differentiate(carry, tick, leaving)
        d_out = {
            i: _where(self._time.is_last, d_leaving[i], d_sent)
            for i, d_sent in carry.d_sent.items()
        }
        return self._backward(carry, tick, d_out), returned

    def _run_cool(self, carry: _Carry, tick: jax.Array) -> tuple[_Carry, None]:
        """Runs a tick with a backward pass only."""
        return self._backward(carry, tick, carry.d_sent), None

    def _forward(self, carry: _Carry, tick: jax.Array) -> _Carry:
        """Runs the forward pass of one tick."""
        parts, slot = self._parts, self._time.slot(tick)
        # When all have entered, the last one does so again, and what it computes is ignored.
        entering = jnp.minimum(tick, self._time.microbatches - 1)
        before = parts.run_prefix(self._inputs(entering, early=carry.early))
        items = self._time.forward(tick)
        past_early = _put(carry.past_early, carry.early, slot)
        past_varying = _put(carry.past_varying, _pick(before, parts.varying), slot)
        x = {
            i: self._loop.constrain_rows(_where(self._time.is_first, before[i], sent))
            for i, sent in carry.sent.items()
        }
        varying = {  # each stage gets what its own microbatch entered with, (S, …)
            i: self._loop.constrain(jnp.take(ring, self._time.slot(items), axis=0))
            for i, ring in past_varying.items()
        }
        arrays = self._fixed | carry.written | x | varying
        out, written, residuals = self._stages.forward(arrays)
        is_entering, is_busy = self._time.is_busy(tick), self._time.is_busy(items)
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

        Returns:
          The carry, what the loss returns, and the gradient of what leaves the last stage.
        """
        parts, loss = self._parts, self._loss
        microbatch = self._time.leaving(tick)
        early = self._early_of(carry, microbatch)
        inputs = self._inputs(microbatch, early=early, late=carry.late, results=leaving)
        # The results of the layers are inputs of the loss, and differentiated as the targets are.
        results = [loss.result_of[i] for i in parts.x_with_gradients]

        def gradients_and_outputs(inputs: ByPosition) -> tuple[ByPosition, ByPosition]:
            def value(chosen: ByPosition) -> tuple[Any, ByPosition]:
                outputs = parts.run_suffix(inputs | chosen)
                return outputs[loss.returned[0]], outputs  # the first one is the loss

            chosen = _pick(inputs, [*parts.targets, *results])
            gradients, outputs = jax.grad(value, has_aux=True)(chosen)
            return gradients, outputs

        rows = dict.fromkeys([*self._batch, *loss.results], 0)
        gradients, outputs = self._with_split_gradients(gradients_and_outputs, inputs, rows)
        totals = _add(carry.totals, _pick(gradients, parts.targets))
        carry = carry._replace(late=_pick(outputs, parts.late), totals=totals)
        d_leaving = {i: gradients[loss.result_of[i]] for i in parts.x_with_gradients}
        return carry, _pick(outputs, loss.returned), d_leaving

    def _backward(self, carry: _Carry, tick: jax.Array, d_out: ByPosition) -> _Carry:
        """Runs the backward pass of one tick, from the gradients of what stages returned."""
        parts, items = self._parts, self._time.backward(tick)
        is_busy, slots = self._time.is_busy(items), self._time.slots_on_stages(items)
        kept = {n: self._loop.take_on_stages(ring, slots) for n, ring in carry.residuals.items()}
        gradients = self._stages.backward(
            self._fixed | carry.written, kept, d_out, self._sums, wanted=[*parts.split_fixed]
        )
        # Idle stages compute with what is in the ring, of which gradients need not be finite.
        fixed = {
            # Shard sums are (shards, S, …).
            i: _where(is_busy[None] if i in parts.split_fixed else is_busy, gradients[i], 0)
            for i in parts.fixed_with_gradients
        }
        d_x = _pick(gradients, parts.x_with_gradients)
        by_prefix = self._prefix_gradients(carry, self._time.returning(tick), d_x)
        return carry._replace(
            fixed_totals=_add(carry.fixed_totals, fixed),
            totals=_add(carry.totals, by_prefix),
            d_sent=self._send(d_x, -1),
        )

    def _prefix_gradients(self, carry: _Carry, item: jax.Array, d_x: ByPosition) -> ByPosition:
        """Returns gradients of the targets by the prefix, such as those of an embedding.

        Args:
          carry: what the tick before passed on.
          item: the microbatch whose backward pass ends in the first stage; negative while none has
            come so far, for which the gradients are 0.
          d_x: the gradients of what each stage got, (S, rows, …); those of the first are read.
        """
        parts, microbatch = self._parts, jnp.maximum(item, 0)
        inputs = self._inputs(microbatch, early=self._early_of(carry, microbatch))
        d_first = {i: jnp.where(item >= 0, x[0], 0) for i, x in d_x.items()}

        def gradients(inputs_and_d_first: Any) -> tuple[ByPosition, tuple[()]]:
            inputs, d_first = inputs_and_d_first
            # The prefix runs again: to keep its residuals for 2S - 1 microbatches takes memory.
            _, pull = jax.vjp(
                lambda targets: parts.run_x_with_gradients(inputs | targets),
                _pick(inputs, parts.targets),
            )
            [d_targets] = pull(d_first)
            return d_targets, ()

        rows = dict.fromkeys(self._batch, 0), dict.fromkeys(d_first, 0)
        found, _ = self._with_split_gradients(gradients, (inputs, d_first), rows)
        return found

    def _with_split_gradients(
        self,
        function: Callable[[Any], tuple[ByPosition, Rest]],
        inputs: Any,
        rows: Any,
    ) -> tuple[ByPosition, Rest]:
        """Runs a function that returns gradients of the targets, those of split ones as shard sums.

        Args:
          function: a function of ``inputs``.
          inputs: a dict of arrays, or a tuple of dicts.
          rows: the same with the dimension of the rows of those that have any.
        """

        def with_all_keys(arrays: Any, rows: Any) -> Any:
            if isinstance(arrays, tuple):
                return tuple(map(with_all_keys, arrays, rows))
            return {i: rows.get(i) if x.ndim else None for i, x in arrays.items()}

        dimensions = with_all_keys(inputs, rows)
        return self._sums.evaluate(function, inputs, dimensions, self._parts.split)

    def _first_carry(self) -> _Carry:
        """Returns the carry of the first tick: zeros, and state as it is before the call."""
        parts, loss = self._parts, self._loss
        stages, slots = self._time.stages, self._time.slots
        types = loss.closed.out_avals
        x = {
            i: self._loop.constrain_rows(_zeros((stages, *types[i].shape), types[i].dtype))
            for i in loss.x
        }
        early = {i: self._arrays[loss.state[i]] for i in parts.early}
        return _Carry(
            sent=x,
            d_sent=_pick(x, parts.x_with_gradients),
            written=_pick(self._fixed, loss.written_of),
            early=early,
            late={i: self._arrays[loss.state[i]] for i in parts.late},
            residuals={
                n: self._loop.constrain(_zeros((stages, slots, *kept.shape), kept.dtype))
                for n, kept in self._stages.residual_types.items()
            },
            past_early={i: jnp.broadcast_to(x, (slots, *x.shape)) for i, x in early.items()},
            past_varying={
                i: _zeros((slots, *types[i].shape), types[i].dtype) for i in parts.varying
            },
            totals={
                i: self._sums.zeros(self._arrays[i], self._dtype)
                if i in parts.split
                else jnp.zeros_like(self._arrays[i], self._dtype)
                for i in parts.targets
            },
            fixed_totals={i: self._zero_total(i) for i in parts.fixed_with_gradients},
        )

    def _zero_total(self, fixed: int) -> jax.Array:
        """Returns the first sum of the gradients of what is fixed: of each stage, (S, …)."""
        array = self._fixed[fixed]
        if fixed not in self._loss.layers:  # all stages have it, and each adds up its own gradient
            array = jnp.broadcast_to(array, (self._time.stages, *array.shape))
        if fixed in self._parts.split_fixed:
            return self._sums.zeros(array, self._dtype, self._loop.axis)
        return self._loop.constrain(jnp.zeros_like(array, self._dtype))

    def _inputs(
        self,
        microbatch: jax.Array | None = None,
        *,
        early: ByPosition | None = None,
        late: ByPosition | None = None,
        results: ByPosition | None = None,
        written: ByPosition | None = None,
    ) -> ByPosition:
        """Returns the inputs of the loss.

        Args:
          microbatch: which one; None for the one that the loss was traced with.
          early: the early state; None for that before the call.
          late: likewise the late state.
          results: what the pipeline returns for the microbatch, by the names of what it gets; None
            where it is not read.
          written: likewise what layers have written.
        """
        loss, inputs = self._loss, dict(self._arrays)
        if microbatch is not None:
            inputs |= {i: _take(parts, microbatch) for i, parts in self._batch.items()}
        inputs |= {loss.state[i]: x for i, x in (early or {}).items()}
        inputs |= {loss.state[i]: x for i, x in (late or {}).items()}
        inputs |= {loss.result_of[i]: x for i, x in (results or {}).items()}
        inputs |= {loss.written_of[i]: x for i, x in (written or {}).items()}
        return inputs

    def _early_of(self, carry: _Carry, microbatch: jax.Array) -> ByPosition:
        """Returns the early state with which a microbatch entered."""
        slot = self._time.slot(microbatch)
        return {i: _take(ring, slot) for i, ring in carry.past_early.items()}

    def _fixed_gradients(self, carry: _Carry) -> ByPosition:
        """Returns the gradients of what is fixed, in the types in which the loss computes it.

        In the carry, each stage has a gradient of its own also of what all stages have.
        """
        types = self._loss.closed.out_avals
        totals = self._added_up(carry.fixed_totals, self._parts.split_fixed)
        return {
            i: (total if i in self._loss.layers else total.sum(0)).astype(types[i].dtype)
            for i, total in totals.items()
        }

    def _added_up(self, totals: ByPosition, split: Mapping[int, str]) -> ByPosition:
        """Returns sums of gradients, with shard sums added up: (shards, …) → (…)."""
        return {i: add_up(x, 0, split[i]) if i in split else x for i, x in totals.items()}

    def _send(self, x: ByPosition, shift: int) -> ByPosition:
        """Sends arrays, (S, rows, …), to the next stage; with a shift of -1 to the one before."""
        return {i: self._loop.send(array, shift) for i, array in x.items()}


def _pick(arrays: Mapping[int, Any], positions: Iterable[int]) -> ByPosition:
    """Returns those of some arrays that have these positions."""
    return {i: arrays[i] for i in positions}


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns one item along the first dimension."""
    return cast(jax.Array, jax.lax.dynamic_index_in_dim(x, index, keepdims=False))


def _put(
    rings: Mapping[int, Any], arrays: Mapping[int, Any], slot: jax.Array, axis: int = 0
) -> dict[int, Any]:
    """Replaces one slot of each ring by the array of the same name; slots are along ``axis``."""
    return {
        i: jax.lax.dynamic_update_index_in_dim(ring, arrays[i], slot, axis)
        for i, ring in rings.items()
    }


def _where(on_stage: jax.Array, x: Any, y: Any) -> jax.Array:
    """Chooses between arrays, (S, …), by stage; one may lack the first dimension."""
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
