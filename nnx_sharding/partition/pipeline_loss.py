"""The loss of one microbatch, cut at the call of a pipeline.

The loss calls the pipeline, and JAX differentiates the loss. So a schedule in the pipeline alone
cannot start the backward pass of one microbatch before the forward pass of the last. Here the loss
is traced with the pipeline's results as further inputs, and cut into parts by the inputs that its
outputs depend on::

    parameters ──► layers, constants                 casts, blocks of a list → stack
    microbatch, early state ──► prefix ──► x         an embedding
    … , the pipeline's results ──► suffix ──► loss, auxiliary data
    arrays that its layers wrote ──► ending ──► Variables of the layers

Nothing has to be known about the model, because each part is the trace without the operations that
the part does not need. An operation that both sides use, such as a skip connection around the
pipeline, is computed for both. State is *early* if it does not depend on the pipeline's results, so
that the next microbatch can have it at once (random streams), and *late* otherwise (statistics of a
head).

A *slot* is the number of an array among all arrays of the arguments. A *position* counts the inputs
or the outputs of the trace, which are arrays only. For S stages of D layers each, arrays of layers
are (S, D, …), and (D, …) in one stage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxpr_as_fun

from .. import _compat
from ..core.flatten import Flat
from ..core.outcome import INPUT, Outcome, OutputGroup, Source
from ..core.rebuild import slots_before
from ..core.structure import Structure
from ..errors import raise_if_any
from ..transforms.in_trace import Function, replace_slots
from .staged_layers import StagedLayers

Arrays: TypeAlias = Sequence[Any]
# Arrays by the position of an input, or of an output, of a trace.
ByPosition: TypeAlias = dict[int, Any]


def refuse_loss(reasons: Sequence[str], remedy: str) -> None:
    """Raises a ValueError if there are reasons why microbatches of a loss cannot pass each other.

    Without reasons, it does nothing.
    """
    raise_if_any(
        ValueError,
        'pipeline: schedule="1f1b" cannot interleave this loss:',
        [f"  {reason}" for reason in reasons],
        f"{remedy} Or leave out the schedule.",
        anchor="loss-that-cannot-be-interleaved",
    )


def without_callbacks(closed: Jaxpr, what: str) -> Jaxpr:
    """Returns a trace without its callbacks, so that it can be cut into parts.

    A part keeps all callbacks of its trace, so each of several parts would run them. Callbacks that
    return nothing, such as ``jax.debug.print``, are left out. Other callbacks cannot be left out,
    because the program may need what they return.

    Args:
      closed: the trace.
      what: names the traced function in the error, such as "a layer".

    Raises:
      ValueError: a callback with side effects returns something.
    """
    # This removes the callbacks that return nothing, so effects are those of other callbacks.
    trimmed: Jaxpr = _compat.without_callbacks(closed)
    if _compat.has_effects(trimmed):
        refuse_loss(
            [f"{what} has a callback that returns something, such as `io_callback`"],
            "Use `jax.pure_callback`, or call it outside.",
        )
    return trimmed


class PipelineCall:
    """Takes the place of a pipeline's call while a loss is traced, and runs no layers.

    The loss is traced twice. The first trace (`_find_call`) finds the call. The layers' results are
    not known there, so the call returns its argument x, which has the same types. In the second
    trace (`trace_loss`), results and written arrays are inputs of the trace.

    Attributes:
      staged: the layers that are called, on their stages; None before the call.
      x: the arrays that the first layer would get.
      layers: the arrays of the layers, (S, D, …), by slot.
      others: all other arrays that layers get: further arguments, and arrays that layers share.
      written: the arrays of the layers that the call writes, (S, D, …), by slot.

    Its private attributes are ``_results``, the arrays that the call returns; ``_treedef``, the
    structure of x, and so of the results; and ``_trace``, the state of JAX's trace in which this
    object was made.
    """

    def __init__(self, results: Arrays | None = None, written: Mapping[int, Any] | None = None):
        """Chooses the arrays that the call returns and writes.

        The object has to be made in the trace of the loss, because `run` compares its trace.

        Args:
          results: the arrays that the call returns; None: the call returns its argument x.
          written: the arrays of the layers that the call writes, (S, D, …), by slot; None for
            nothing.
        """
        self.staged: StagedLayers | None = None
        self.x: list[Any] = []
        self.layers: dict[int, jax.Array] = {}
        self.others: list[Any] = []
        self._results, self.written = results, written or {}
        self._trace = _compat.new_trace_state()

    def run(self, staged: StagedLayers, x: object) -> Any:
        """Records a call of layers, and writes the arrays ``written`` to them.

        Returns:
          The value that the loss gets: ``results`` as a pytree like x, or x without results.

        Raises:
          ValueError: the layers are called a second time, or within another transform.
        """
        if self.staged is not None:
            refuse_loss(["it calls the layers more than once"], "Call them once.")
        # Within another transform, the arrays would belong to an inner trace, so they could not be
        # outputs of the loss's trace.
        if _compat.new_trace_state() != self._trace:
            refuse_loss(
                ["it calls the layers within another transform, such as jit, remat or scan"],
                "Call the model in the loss itself, and give remat=True to stack.",
            )
        self.x, self._treedef = jax.tree.flatten(x)
        self.staged = staged
        self.layers, self.others = staged.layers_by_stage(), staged.other_arrays()
        if self.written:
            staged.write_layers(self.written)
        return x if self._results is None else jax.tree.unflatten(self._treedef, self._results)

    def call_layers(
        self, layers: Arrays, x: Arrays, others: Arrays
    ) -> tuple[list[Any], dict[int, Any]]:
        """Runs the D layers of one stage, with flat lists of arrays. Needs a recorded call.

        Args:
          layers: the arrays of the layers, (D, …), in the order of the attribute ``layers``.
          x: the arrays that the first layer gets, in the order of the attribute ``x``.
          others: the other arrays, in the order of the attribute ``others``.

        Returns:
          A pair: the arrays that the last layer returns, in the order of ``x``, and the arrays that
          layers have written, (D, …), by slot.
        """
        assert self.staged is not None
        by_slot = dict(zip(self.layers, layers, strict=True))
        x_tree = jax.tree.unflatten(self._treedef, x)  # the tree that the loss passed
        out, written = self.staged.call_group(by_slot, x_tree, others)
        return jax.tree.leaves(out), written

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block, a pipeline that is called calls :meth:`run` instead of its loop.

        The pipeline finds this object in ``PIPELINE_CALL``.

        Raises:
          ValueError: no pipeline was called in the block.
        """
        token = PIPELINE_CALL.set(self)
        try:
            yield
        finally:
            PIPELINE_CALL.reset(token)
        if self.staged is None:
            refuse_loss(["it does not call the layers"], "Call the model in the loss itself.")


# The object that takes the place of a pipeline's call in the current trace; None outside of one.
PIPELINE_CALL: ContextVar[PipelineCall | None] = ContextVar("PIPELINE_CALL", default=None)


def _find_call(function: Function, arrays: Arrays) -> PipelineCall:
    """Traces a loss, and returns the call of a pipeline in it, with types in place of arrays.

    The layers of one stage are traced as well, to find the arrays that they write: ``written`` of
    the call.

    Args:
      function: the loss, a function of a list of arrays.
      arrays: the arguments of the loss.

    Raises:
      ValueError: the loss calls no pipeline, or calls it in a way that `PipelineCall.run` refuses.
    """
    calls = list[PipelineCall]()

    def run(arrays: Arrays) -> None:
        # The call is made in the trace, because it belongs to the trace in which it is made.
        calls.append(PipelineCall())
        with calls[-1].in_place():
            function(arrays)

    jax.eval_shape(run, arrays)  # calls `run` once, so there is one call
    [call] = calls
    assert call.staged is not None  # `in_place` has refused a loss that calls no pipeline
    # The arrays belong to a trace that has ended, so only their types can be used.
    call.x, call.others, call.layers = jax.tree.map(as_type, (call.x, call.others, call.layers))
    # The layers of one stage write arrays (D, …), so all stages write (S, D, …).
    stage_types = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in call.layers.values()]
    # Only layers that write to a Variable have an array here, so most slots are missing.
    _, written = jax.eval_shape(call.call_layers, stage_types, call.x, call.others)
    call.written = {slot: as_type(x, call.staged.stages) for slot, x in written.items()}
    return call


def as_type(x: Any, *leading: int) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array, with further dimensions in front."""
    return jax.ShapeDtypeStruct((*leading, *x.shape), x.dtype)


class Part:
    """Some outputs of a traced function, as a function of the inputs that they depend on.

    Attributes:
      used: the positions of these inputs.

    ``_outputs`` has the positions of the outputs, sorted, and ``_call`` is a function of the used
    inputs that returns these outputs in this order.
    """

    def __init__(self, closed: Jaxpr, outputs: Iterable[int]):
        """Takes from a trace all that computes the outputs at some positions, and all callbacks."""
        wanted = {*outputs}
        self._outputs = sorted(wanted)
        is_wanted = [i in wanted for i in range(len(closed.out_avals))]
        part, self.used = _compat.used_part(closed, is_wanted)
        self._call = jaxpr_as_fun(part)

    def __call__(self, inputs: ByPosition) -> ByPosition:
        """Returns the outputs, by position. Only the inputs in ``used`` are needed."""
        results = self._call(*(inputs[i] for i in self.used))
        return dict(zip(self._outputs, results, strict=True))


class SortedOutputs(NamedTuple):
    """The outputs of a loss by their slots after the call: returned arrays and new state."""

    outcome: Outcome  # says where the array in each slot comes from
    returned: list[int]  # the slot of the value, then the slots of auxiliary data
    state: dict[int, int]  # the slot of a Variable's new array → the slot of its old array


def sort_outputs(outcome: Outcome, before: Structure, value: int) -> SortedOutputs:
    """Sorts the outputs of a loss: its value, auxiliary data, and new values of Variables.

    An input that a module still holds is not an output. An input that the loss returns outside of
    any module is an output, even if it is unchanged.

    Args:
      outcome: the description of all that the loss returns and changes.
      before: the structure of the loss's arguments.
      value: the slot of the loss's value after the call.

    Raises:
      ValueError: the loss changes more than the values of Variables.
    """
    # The fields list changed attributes of modules, changed metadata, changed static objects, and
    # modules that were returned as new ones.
    if outcome.nodes or outcome.metadata or outcome.statics or outcome.replaced:
        refuse_loss(
            ["it changes the structure of its arguments"],
            "Return what it adds, with has_aux=True.",
        )
    is_input = [source.group == INPUT for source in outcome.sources]  # by slot after the call
    state = dict[int, int]()
    for variable in outcome.values:  # the indices of the Variables that were assigned to
        for slot, slot_before in slots_before(before, outcome.structure, variable).items():
            if not is_input[slot]:
                state[slot] = slot_before
    outside_of_modules = {*outcome.structure.root_slots}  # returned, but not in a module
    outputs = [
        slot for slot, is_old in enumerate(is_input) if not is_old or slot in outside_of_modules
    ]
    auxiliary = [slot for slot in outputs if slot != value and slot not in state]
    return SortedOutputs(outcome, [value, *auxiliary], state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedLoss:
    """A loss of one microbatch, traced with the pipeline's results and written arrays as inputs.

    Inputs and outputs are named by their positions. Inputs are the arrays of the arguments, then
    the ``results`` of the pipeline, then the arrays that its layers have ``written``. Outputs are
    all that a part of the loss may compute: ``returned``, ``state``, ``x``, ``others``, ``layers``.

    Attributes:
      closed: the trace without callbacks, because they would run in every part.
      with_callbacks: the trace as it is, for the one part that runs them.
      call: the call of the pipeline.
      sorted_outputs: the outcome of the trace, and the slots of what the loss returns and changes.
      results: the positions, among the inputs, of the pipeline's results.
      written: the positions, among the inputs, of the arrays that its layers write.
      returned: the positions, among the outputs, of what the loss returns, the value first.
      x: the positions, among the outputs, of what the pipeline gets.
      others: the positions, among the outputs, of the other arrays that layers get.
      layers: the positions, among the outputs, of the arrays of the layers.
      state: maps the position of each output that a Variable of the arguments gets to the position
        of the input that it replaces.
      result_of: maps each position in ``x`` to the position in ``results`` of its replacement.
      written_of: maps each position in ``layers`` that layers write to the one in ``written``.
    """

    closed: Jaxpr
    with_callbacks: Jaxpr
    call: PipelineCall
    sorted_outputs: SortedOutputs
    results: Sequence[int]
    written: Sequence[int]
    returned: Sequence[int]
    x: Sequence[int]
    others: Sequence[int]
    layers: Sequence[int]
    state: Mapping[int, int]
    result_of: Mapping[int, int]
    written_of: Mapping[int, int]

    @property
    def staged(self) -> StagedLayers:
        """The layers of the pipeline, on their stages."""
        assert self.call.staged is not None  # `in_place` has refused a loss without a pipeline
        return self.call.staged

    def has_gradient(self, output: int) -> bool:
        """Whether an output has floating-point or complex numbers."""
        return bool(jnp.issubdtype(self.closed.out_avals[output].dtype, jnp.inexact))

    def outputs(self, returned: Arrays, state: Arrays) -> tuple[Any, ...]:
        """Returns these arrays in the form in which the traced function returns its outputs.

        Args:
          returned: the arrays that the loss returns, in the order of the attribute ``returned``.
          state: the arrays that Variables get, in the order of the attribute ``state``.

        Returns:
          One group with all arrays, and the outcome of the trace, whose sources are changed to this
          group.
        """
        slots = [*self.sorted_outputs.returned, *self.sorted_outputs.state]
        # The given arrays are in the only group, number 0. All other arrays are unchanged inputs.
        new_sources = {slot: Source(group=0, position=i) for i, slot in enumerate(slots)}
        traced = self.sorted_outputs.outcome
        sources = tuple(new_sources.get(slot, old) for slot, old in enumerate(traced.sources))
        # `update` says what is written back. This field depends on the sources, so it is computed
        # anew: None means unknown.
        outcome = dataclasses.replace(traced, sources=sources, update=None)
        return OutputGroup.unnamed((*returned, *state)), outcome


def trace_loss(
    function: Function, arrays: Arrays, before: Flat, slots: Sequence[int]
) -> TracedLoss:
    """Traces a loss.

    Args:
      function: the loss, a function of the arrays. The loss returns ``([value], (*groups,
        outcome))``: its outputs in groups, and an outcome that says what they are for the
        arguments.
      arrays: the arrays of the loss's arguments.
      before: the arguments, flattened.
      slots: the slots of the arrays.

    Raises:
      ValueError: the loss calls no pipeline, or in a way that `PipelineCall.run` refuses; it
        changes more than the values of Variables; or it has a callback that returns something.
    """
    call_types = _find_call(function, arrays)  # has the types of results and written arrays
    # What the trace of `program` finds besides its arrays: the call in this trace, and what the
    # outputs are. `make_jaxpr` traces it once.
    found = list[tuple[PipelineCall, SortedOutputs]]()

    def program(arrays: Arrays, results: Arrays, written: Arrays) -> list[list[Any]]:
        """Returns the outputs of the loss in five lists."""
        call = PipelineCall(results, dict(zip(call_types.written, written, strict=True)))
        with call.in_place():  # the pipeline in the function returns `results`
            [value], (*groups, outcome) = function(arrays)
        # All arrays of the arguments and of the loss's result after the call, by slot.
        leaves_after = outcome.arrays(replace_slots(before.leaves, slots, arrays), groups)
        slot_of_value = next(slot for slot, x in enumerate(leaves_after) if x is value)
        sorted_outputs = sort_outputs(outcome, before.structure, slot_of_value)
        found.append((call, sorted_outputs))
        return [
            [leaves_after[slot] for slot in sorted_outputs.returned],
            [leaves_after[slot] for slot in sorted_outputs.state],  # the keys: new values
            call.x,
            call.others,
            [*call.layers.values()],
        ]

    # The results of layers have the types of x, so ``x`` has the types of the results.
    inputs = [*arrays], call_types.x, [*call_types.written.values()]
    with_callbacks, outputs = jax.make_jaxpr(program, return_shape=True)(*inputs)
    [(call, sorted_outputs)] = found
    # The positions of each list among all inputs, then among all outputs.
    _, results, written = positions_of(inputs)
    returned, new_values, x, others, layers = positions_of(outputs)
    # Both lists of each pair below are in the same order, so `zip` finds what belongs together.
    input_of_slot = {slot: i for i, slot in enumerate(slots)}
    old_values = [input_of_slot[slot] for slot in sorted_outputs.state.values()]
    layer_of_slot = dict(zip(call.layers, layers, strict=True))
    layers_written = [layer_of_slot[slot] for slot in call_types.written]
    return TracedLoss(
        closed=without_callbacks(with_callbacks, "it"),
        with_callbacks=with_callbacks,
        call=call,
        sorted_outputs=sorted_outputs,
        results=results,
        written=written,
        returned=returned,
        x=x,
        others=others,
        layers=layers,
        state=dict(zip(new_values, old_values, strict=True)),
        result_of=dict(zip(x, results, strict=True)),
        written_of=dict(zip(layers_written, written, strict=True)),
    )


def positions_of(lists: Iterable[Arrays]) -> list[range]:
    """Returns, for each of some lists, the positions of its items in all lists together.

    For lists of 3, 0 and 2 items, the positions are 0 … 2, none, and 3 … 4.
    """
    ends = [*itertools.accumulate(map(len, lists), initial=0)]
    return [range(*pair) for pair in itertools.pairwise(ends)]
