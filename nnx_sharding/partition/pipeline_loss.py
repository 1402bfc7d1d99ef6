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
the structure afterwards, and the *source* of the array in each slot: an input, or an output of the
program. A *position* counts the inputs or the outputs of the trace, which are arrays only. For S
stages of D layers each, arrays of layers are (S, D, …), and (D, …) in one stage.
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
from .staged_layers import StagedLayers

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
    """Returns a trace without its callbacks, so that it can be cut into parts.

    A part keeps all callbacks of its trace, so each of several parts would run them. Callbacks that
    return nothing, such as ``jax.debug.print``, are left out. Others cannot be, as the program may
    need what they return.

    Args:
      closed: the trace.
      what: names the traced function in the error, such as "a layer".

    Raises:
      ValueError: a callback with side effects returns something.
    """
    without: Jaxpr = _compat.without_callbacks(closed)  # without those that return nothing
    if _compat.has_effects(without):
        refuse_loss(
            [f"{what} has a callback that returns something, such as `io_callback`"],
            "Use `jax.pure_callback`, or call it outside.",
        )
    return without


class PipelineCall:
    """Takes the place of a pipeline's call while a loss is traced, and runs no layers.

    The loss is traced twice. The first trace (`find_call`) finds the call: there nothing is known
    of what layers return, so the call returns the x that it gets, which has the same types. In the
    second one (`TracedLoss`), results and written arrays are inputs of the trace.

    Attributes:
      staged: the layers that are called, on their stages; None before the call.
      x: the arrays that it would get.
      layers: the arrays of the layers, (S, D, …), by slot.
      others: all other arrays that layers get: further arguments, and what all layers share.
      written: the arrays of the layers that the call writes, (S, D, …), by slot.

    Its private attributes are ``_results``, the arrays that it returns; ``_treedef``, the structure
    of x, and so of the results; and ``_trace``, the state of JAX's trace in which it was made.
    """

    def __init__(self, results: Arrays | None = None, written: Mapping[int, Any] | None = None):
        """Chooses what the call returns and writes; to be made in the trace of the loss.

        Args:
          results: the arrays that it returns; None for those that it gets.
          written: the arrays of the layers that it writes, (S, D, …), by slot; None for nothing.
        """
        self.staged: StagedLayers | None = None
        self.x: list[Any] = []
        self.layers: dict[int, jax.Array] = {}
        self.others: list[Any] = []
        self._results, self.written = results, written or {}
        self._trace = _compat.new_trace_state()  # of the loss, to which `run` compares its own

    def run(self, staged: StagedLayers, x: object) -> Any:
        """Records a call of layers, and writes the arrays ``written`` to them.

        Returns:
          What the call returns to the loss: ``results`` as a pytree like x; without them, x.
        """
        if self.staged is not None:
            refuse_loss(["it calls the layers more than once"], "Call them once.")
        # Within another transform, the arrays would belong to an inner trace, and be no outputs.
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
          x: what the first layer gets, in the order of the attribute ``x``.
          others: in the order of the attribute ``others``.

        Returns:
          What the last layer returns, in the order of ``x``, and the arrays that layers have
          written, (D, …), by slot.
        """
        assert self.staged is not None
        by_slot = dict(zip(self.layers, layers, strict=True))
        tree = jax.tree.unflatten(self._treedef, x)  # as the loss passed it
        out, written = self.staged.call_group(by_slot, tree, others)
        return jax.tree.leaves(out), written

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block, a pipeline that is called calls :meth:`run` in place of its loop.

        Raises:
          ValueError: none was called in the block.
        """
        token = PIPELINE_CALL.set(self)
        try:
            yield
        finally:
            PIPELINE_CALL.reset(token)
        if self.staged is None:
            refuse_loss(["it does not call the layers"], "Call the model in the loss itself.")


# What takes the place of a pipeline's call in the current trace, if anything.
PIPELINE_CALL: ContextVar[PipelineCall | None] = ContextVar("PIPELINE_CALL", default=None)


def find_call(function: Function, arrays: Arrays) -> PipelineCall:
    """Traces a loss, and returns the call of a pipeline in it, with types in place of arrays.

    Its ``written`` are the arrays that the layers do write: these are traced for it, too.

    Args:
      function: the loss, a function of a list of arrays.
      arrays: these arrays.
    """
    calls = list[PipelineCall]()

    def run(arrays: Arrays) -> None:
        calls.append(PipelineCall())  # here, as it belongs to the trace in which it is made
        with calls[-1].in_place():
            function(arrays)

    jax.eval_shape(run, arrays)
    [call] = calls
    assert call.staged is not None
    # The arrays are those of a trace that has ended; only their types are of use.
    call.x, call.others, call.layers = jax.tree.map(as_type, (call.x, call.others, call.layers))
    # What the layers of one stage write, (D, …), all stages write, (S, D, …).
    of_one_stage = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in call.layers.values()]
    _, written = jax.eval_shape(call.call_layers, of_one_stage, call.x, call.others)
    call.written = {slot: as_type(x, call.staged.stages) for slot, x in written.items()}
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
    """The outputs of a loss, by their slots after the call: what it returns, and its new state."""

    outcome: Outcome  # says where the array in each slot comes from
    returned: list[int]  # the slot of the value, then those of auxiliary data
    state: dict[int, int]  # the slot of what a Variable gets → the slot of what it had before


def sort_outputs(outcome: Outcome, before: Structure, value: int) -> SortedOutputs:
    """Sorts the arrays that there are after a call of a loss.

    They are its value, auxiliary data, and new values of Variables. Inputs that modules still hold
    are left out, but not those that the loss returns as they are, outside of any module.

    Args:
      outcome: what the loss returns and changes.
      before: the structure of its arguments.
      value: the slot of its value after the call.

    Raises:
      ValueError: it changes more than the values of Variables.
    """
    # Attributes of modules, metadata, static objects, and modules returned as new ones.
    if outcome.nodes or outcome.metadata or outcome.statics or outcome.replaced:
        refuse_loss(
            ["it changes the structure of its arguments"],
            "Return what it adds, with has_aux=True.",
        )
    is_input = [source.group == INPUT for source in outcome.sources]  # by slot after the call
    state = dict[int, int]()
    for variable in outcome.values:  # the indices of those that were assigned to
        for slot, slot_before in slots_before(before, outcome.structure, variable).items():
            if not is_input[slot]:
                state[slot] = slot_before
    outside_of_modules = {*outcome.structure.root_slots}  # in what the loss returns
    outputs = [
        slot for slot, is_old in enumerate(is_input) if not is_old or slot in outside_of_modules
    ]
    auxiliary = [slot for slot in outputs if slot != value and slot not in state]
    return SortedOutputs(outcome, [value, *auxiliary], state)


class TracedLoss:
    """A loss of one microbatch, traced with what the pipeline returns and writes as inputs.

    Inputs and outputs are named by their positions: inputs are the arrays of the arguments, then
    the ``results`` of the pipeline, then what its layers have ``written``. Outputs are all that a
    part of the loss may be asked for: ``returned``, ``state``, ``x``, ``others``, ``layers``.

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

    ``_sorted`` has the outcome of the trace, and the slots of what the loss returns and changes.
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
          function: the loss, of the arrays; returns ``([value], (*groups, outcome))``: its outputs
            in groups, and what they are for the arguments.
          arrays: the arrays of its arguments.
          before: the arguments.
          slots: the slots of the arrays.
          call: the call of the pipeline that :func:`find_call` has found, which has the types of
            results and written arrays.
        """

        # Besides its outputs, the trace leaves `self.call`, the call in it, and `self._sorted`,
        # which says what the outputs are.
        def program(arrays: Arrays, results: Arrays, written: Arrays) -> list[list[Any]]:
            self.call = PipelineCall(results, dict(zip(call.written, written, strict=True)))
            with self.call.in_place():  # the pipeline in the function returns `results`
                [value], (*groups, outcome) = function(arrays)
            # All arrays of the arguments and of what the loss returns, by slot, after the call.
            after = outcome.arrays(replace_slots(before.leaves, slots, arrays), groups)
            slot_of_value = next(slot for slot, x in enumerate(after) if x is value)
            self._sorted = sort_outputs(outcome, before.structure, slot_of_value)
            return [
                [after[slot] for slot in self._sorted.returned],
                [after[slot] for slot in self._sorted.state],  # the keys: new values
                self.call.x,
                self.call.others,
                [*self.call.layers.values()],
            ]

        inputs = [*arrays], call.x, [*call.written.values()]
        self.with_callbacks, outputs = jax.make_jaxpr(program, return_shape=True)(*inputs)
        self.closed = without_callbacks(self.with_callbacks, "it")
        # The positions of each list among all inputs, and among all outputs.
        _, self.results, self.written = positions_of(inputs)
        self.returned, new_values, self.x, self.others, self.layers = positions_of(outputs)

        # What belongs together: new and old values of Variables, x and results, layers and written.
        input_of_slot = {slot: i for i, slot in enumerate(slots)}
        old_values = [input_of_slot[slot] for slot in self._sorted.state.values()]
        self.state = dict(zip(new_values, old_values, strict=True))
        self.result_of = dict(zip(self.x, self.results, strict=True))
        layer_of_slot = dict(zip(self.call.layers, self.layers, strict=True))
        layers_written = [layer_of_slot[slot] for slot in call.written]
        self.written_of = dict(zip(layers_written, self.written, strict=True))

    def has_gradient(self, output: int) -> bool:
        """Whether an output is of floating-point numbers."""
        return bool(jnp.issubdtype(self.closed.out_avals[output].dtype, jnp.inexact))

    def outputs(self, returned: Arrays, state: Arrays) -> tuple[Any, ...]:
        """Returns what the traced function returns, with these arrays: one group, and the outcome.

        The outcome is that of the trace, but all arrays are in one group of outputs.

        Args:
          returned: what the loss returns, in the order of the attribute ``returned``.
          state: what Variables get, in the order of the attribute ``state``.
        """
        slots = [*self._sorted.returned, *self._sorted.state]
        # Each is in the only group, number 0; all other arrays are the inputs that they were.
        new_sources = {slot: Source(group=0, position=i) for i, slot in enumerate(slots)}
        traced = self._sorted.outcome
        sources = tuple(new_sources.get(slot, old) for slot, old in enumerate(traced.sources))
        # What is written back depends on the sources, so it is computed anew: `update` is unknown.
        outcome = dataclasses.replace(traced, sources=sources, update=None)
        return OutputGroup.unnamed((*returned, *state)), outcome


def positions_of(lists: Iterable[Arrays]) -> list[range]:
    """Returns the positions of the items of some lists in all of them together.

    For lists of 3, 0 and 2 items, these are 0 … 2, none, and 3 … 4.
    """
    ends = [*itertools.accumulate(map(len, lists), initial=0)]
    return [range(*pair) for pair in itertools.pairwise(ends)]
