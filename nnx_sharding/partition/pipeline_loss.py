"""The loss of one microbatch, cut at the call of a pipeline.

The loss calls the pipeline, and JAX differentiates the loss: so a schedule by itself cannot start
the backward pass of one microbatch before the forward pass of the last. Here the loss is traced
once, with what the pipeline returns as further inputs, and cut by what depends on what::

    parameters ──► layers, constants                 casts, blocks of a list → stack
    microbatch, early state ──► prefix ──► x         an embedding
    … , what the pipeline returns ──► suffix ──► loss, auxiliary data
    what its layers wrote ──► ending ──► Variables of the layers

Nothing has to be known of the model: each part is the trace without what it does not need, so
what both sides use, such as a skip connection around the pipeline, is computed for both. State is
*early* if it does not depend on what the pipeline returns, so that the next microbatch can have it
at once (random streams), and *late* otherwise (statistics of a head).

From other modules: a *slot* is the number of an array among all arrays of the arguments (``Flat``:
their structure, and ``leaves`` by slot). An ``Outcome`` says what a call has done to its arguments:
the structure afterwards, and where the array in each slot comes from. A *position* counts the
inputs or the outputs of the trace, which are arrays only.
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
from ..errors import raise_listed
from ..transforms.in_trace import Function, replace_slots
from .pipeline_loop import PipelineLoop

Arrays: TypeAlias = Sequence[Any]
# Arrays by the position of an input, or of an output, of a trace.
ByPosition: TypeAlias = dict[int, Any]


def refuse_loss(reasons: Sequence[str], remedy: str) -> None:
    """Raises an error if there are reasons why microbatches of a loss cannot pass each other."""
    raise_listed(
        ValueError,
        'pipeline: schedule="1f1b" cannot interleave this loss:',
        [f"  {reason}" for reason in reasons],
        f"{remedy} Or leave out the schedule.",
        anchor="loss-that-cannot-be-interleaved",
    )


def without_callbacks(closed: Jaxpr, what: str) -> Jaxpr:
    """Returns a trace that can be cut into parts: a callback would belong to each of them.

    Args:
      closed: the trace.
      what: names it in the error, such as "the loss".

    Raises:
      ValueError: something depends on what a callback returns.
    """
    without: Jaxpr = _compat.without_callbacks(closed)
    if _compat.has_effects(without):
        refuse_loss(
            [f"{what} has a callback that returns something, such as `io_callback`"],
            "Use `jax.pure_callback`, or call it outside.",
        )
    return without


class PipelineCall:
    """Takes the place of a pipeline's call while a loss is traced, and runs nothing.

    Attributes:
      loop: the loop that would run; None before the call.
      x: the arrays that it would get.
      layers: the arrays of the layers, (S, D, …), by slot.
      others: all other arrays that layers get: further arguments, and what all layers share.
      written: the arrays of the layers that the call writes, (S, D, …), by slot.
    """

    def __init__(self, results: Arrays | None = None, written: Mapping[int, Any] | None = None):
        """Chooses what the call returns and writes.

        Args:
          results: the arrays that it returns; None for those that it gets.
          written: the arrays of the layers that it writes, (S, D, …), by slot.
        """
        self.loop: PipelineLoop | None = None
        self.x: list[Any] = []
        self.layers: dict[int, jax.Array] = {}
        self.others: list[Any] = []
        self._results, self.written = results, written or {}
        self._trace = _compat.new_trace_state()

    def run(self, loop: PipelineLoop, x: object) -> Any:
        """Records the call; returns what was chosen."""
        if self.loop is not None:
            refuse_loss(["it calls the layers more than once"], "Call them once.")
        if _compat.new_trace_state() != self._trace:
            refuse_loss(
                ["it calls the layers within another transform, such as jit, remat or scan"],
                "Call the model in the loss itself, and give remat=True to stack.",
            )
        self.x, treedef = jax.tree.flatten(x)
        self.loop, self.layers, self.others = loop, loop.layers_by_stage(), loop.other_arrays()
        self._treedef = treedef
        if self.written:
            loop.write_layers(self.written)
        return x if self._results is None else jax.tree.unflatten(treedef, self._results)

    def call_layers(
        self, layers: Arrays, x: Arrays, others: Arrays
    ) -> tuple[list[Any], dict[int, Any]]:
        """Calls the layers of one stage.

        Args:
          layers: their arrays, (D, …), in the order of ``layers``.
          x: what the first one gets, in the order of ``x``.
          others: in the order of ``others``.

        Returns:
          What the last one returns, in the order of ``x``, and the arrays that layers have written,
          (D, …), by slot.
        """
        assert self.loop is not None
        by_slot = dict(zip(self.layers, layers, strict=True))
        tree = jax.tree.unflatten(self._treedef, x)
        out, written = self.loop.call_group(by_slot, tree, others)
        return jax.tree.leaves(out), written

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Takes the place of pipelines within the block."""
        token = PIPELINE_CALL.set(self)
        try:
            yield
        finally:
            PIPELINE_CALL.reset(token)
        if self.loop is None:
            refuse_loss(["it does not call the layers"], "Call the model in the loss itself.")


# What takes the place of a pipeline's call in the current trace, if anything.
PIPELINE_CALL: ContextVar[PipelineCall | None] = ContextVar("PIPELINE_CALL", default=None)


def find_call(function: Function, arrays: Arrays) -> PipelineCall:
    """Returns the call of a pipeline in a function of arrays, with types in place of arrays."""
    calls = list[PipelineCall]()

    def run(arrays: Arrays) -> None:
        calls.append(PipelineCall())
        with calls[-1].in_place():
            function(arrays)

    jax.eval_shape(run, arrays)
    call = calls[-1]
    call.x, call.others, call.layers = jax.tree.map(as_type, (call.x, call.others, call.layers))
    assert call.loop is not None
    stages = call.loop.stages
    # What the layers of one stage, (D, …), write, and the same of all stages, (S, D, …).
    of_stage = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in call.layers.values()]
    _, written = jax.eval_shape(call.call_layers, of_stage, call.x, call.others)
    call.written = {slot: as_type(x, stages) for slot, x in written.items()}
    return call


def as_type(x: Any, *leading: int) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array, with further dimensions in front."""
    return jax.ShapeDtypeStruct((*leading, *x.shape), x.dtype)


class Part:
    """Some outputs of a traced function, as a function of the inputs that these depend on.

    Attributes:
      used: the positions of these inputs.
    """

    def __init__(self, closed: Jaxpr, outputs: Iterable[int]):
        """Takes what computes the outputs at some positions, and all callbacks."""
        wanted = {*outputs}
        self._outputs = sorted(wanted)
        is_wanted = [i in wanted for i in range(len(closed.out_avals))]
        part, self.used = _compat.used_part(closed, is_wanted)
        self._call = jaxpr_as_fun(part)

    def __call__(self, inputs: ByPosition) -> ByPosition:
        """Returns the outputs; of the inputs, only those in ``used`` have to be there."""
        results = self._call(*(inputs[i] for i in self.used))
        return dict(zip(self._outputs, results, strict=True))


class SortedOutputs(NamedTuple):
    """The arrays after a call of a loss, by slot: those that it returns, and its new state."""

    outcome: Outcome  # says what the array in each slot is
    returned: list[int]  # the slot of the value, then those of auxiliary data
    state: dict[int, int]  # the slot of what a Variable gets → the slot of what it had before


def sort_outputs(outcome: Outcome, before: Structure, value: int) -> SortedOutputs:
    """Sorts the arrays after a call; those that only pass through the loss are left out.

    Args:
      outcome: what the loss returns and changes.
      before: the structure of its arguments.
      value: the slot of its value after the call.

    Raises:
      ValueError: it changes more than the values of Variables.
    """
    if outcome.nodes or outcome.metadata or outcome.statics or outcome.replaced:
        refuse_loss(
            ["it changes the structure of its arguments"],
            "Return what it adds, with has_aux=True.",
        )
    is_input = [source.group == INPUT for source in outcome.sources]
    state = {
        slot: old
        for index in outcome.values  # of the Variables that were assigned to
        for slot, old in slots_before(before, outcome.structure, index).items()
        if not is_input[slot]
    }
    # Of the inputs, only those that are returned as they are, outside of any module.
    is_returned = {*outcome.structure.root_slots}
    outputs = [i for i, is_old in enumerate(is_input) if not is_old or i in is_returned]
    auxiliary = [slot for slot in outputs if slot != value and slot not in state]
    return SortedOutputs(outcome, [value, *auxiliary], state)


class TracedLoss:
    """A loss of one microbatch, traced with what the pipeline returns and writes as inputs.

    Inputs and outputs are named by their positions: inputs are the arrays of the arguments, then
    the ``results`` of the pipeline, then what its layers have ``written``.

    Attributes:
      closed: the trace, without callbacks, which would run in every part.
      with_callbacks: the trace as it is, for the one part that runs them.
      call: the call of the pipeline.
      results: the positions of its results among the inputs.
      written: those of the arrays that its layers write.
      returned: the positions among the outputs of what the loss returns, the value first.
      x: those of what the pipeline gets.
      others: those of the other arrays that layers get.
      layers: those of the arrays of the layers.
      state: the positions of the outputs that Variables of the arguments get, and for each the
        position of the input that it replaces.
      result_of: for each position in ``x``, the position in ``results`` of what takes its place.
      written_of: for each position in ``layers`` that layers write, the one in ``written``.
    """

    def __init__(
        self,
        function: Function,
        arrays: Arrays,
        before: Flat,
        slots: Sequence[int],
        call: PipelineCall,
    ):
        """Traces a loss.

        Args:
          function: the loss, of the arrays; returns ``([value], (*groups, outcome))``.
          arrays: the arrays of its arguments.
          before: the arguments.
          slots: the slots of the arrays.
          call: the call of the pipeline, from :func:`find_call`.
        """

        # Returns all that a part may be asked for, in the order of the positions of outputs.
        def program(arrays: Arrays, results: Arrays, written: Arrays) -> list[list[Any]]:
            self.call = PipelineCall(results, dict(zip(call.written, written, strict=True)))
            with self.call.in_place():
                [value], (*groups, outcome) = function(arrays)
            # All arrays of the arguments and of what the loss returns, by slot, after the call.
            after = outcome.arrays(replace_slots(before.leaves, slots, arrays), groups)
            slot_of_value = next(slot for slot, x in enumerate(after) if x is value)
            self._sorted = sort_outputs(outcome, before.structure, slot_of_value)
            return [
                [after[slot] for slot in self._sorted.returned],
                [after[slot] for slot in self._sorted.state],
                self.call.x,
                self.call.others,
                [*self.call.layers.values()],
            ]

        inputs = [*arrays], call.x, [*call.written.values()]
        self.with_callbacks, shapes = jax.make_jaxpr(program, return_shape=True)(*inputs)
        self.closed = without_callbacks(self.with_callbacks, "it")
        _, self.results, self.written = positions_of(inputs)
        self.returned, state, self.x, self.others, self.layers = positions_of(shapes)
        position = {slot: i for i, slot in enumerate(slots)}
        replaced = [position[old] for old in self._sorted.state.values()]
        self.state = dict(zip(state, replaced, strict=True))
        self.result_of = dict(zip(self.x, self.results, strict=True))
        layer = dict(zip(self.call.layers, self.layers, strict=True))  # slot → position
        written_layers = [layer[slot] for slot in call.written]
        self.written_of = dict(zip(written_layers, self.written, strict=True))

    def has_gradient(self, output: int) -> bool:
        """Whether an output is of floating-point numbers."""
        return bool(jnp.issubdtype(self.closed.out_avals[output].dtype, jnp.inexact))

    def outputs(self, returned: Arrays, state: Arrays) -> tuple[Any, ...]:
        """Returns the groups of outputs, and the outcome, of a call that returns these arrays.

        Args:
          returned: what the loss returns, in the order of ``returned``.
          state: what Variables get, in the order of ``state``.
        """
        traced, slots = self._sorted.outcome, [*self._sorted.returned, *self._sorted.state]
        position = {slot: Source(0, i) for i, slot in enumerate(slots)}
        sources = traced.sources
        outcome = dataclasses.replace(
            traced,
            sources=tuple(position.get(slot, source) for slot, source in enumerate(sources)),
            update=None,
        )
        return OutputGroup(("",) * len(slots), (*returned, *state)), outcome

    def depends(self, output: int) -> frozenset[int]:
        """Returns the positions of the inputs of which an output depends."""
        return frozenset(Part(self.closed, [output]).used)


def positions_of(lists: Iterable[Arrays]) -> list[range]:
    """Returns the positions of the items of some lists in all of them together."""
    ends = [*itertools.accumulate(map(len, lists), initial=0)]
    return [range(*pair) for pair in itertools.pairwise(ends)]
