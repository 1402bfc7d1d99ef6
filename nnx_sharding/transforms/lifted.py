"""What ``jit`` and ``shard_map`` return: lifted functions with stages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from .. import _compat
from ..activations.calls import Recorder
from ..activations.tracing import inherited
from ..core.call import failed, guarded, run, unmark_direct
from ..core.call_context import Caller, called_by
from ..core.failures import explained
from ..core.flatten import Flat
from ..core.outcome import Outcome
from ..core.placing import abstract, as_declared
from ..core.plan import Plan
from ..core.signature import Call
from ..core.unflatten import unflatten
from ..diagnostics.retraces import Observer, TraceLimit, TraceLog
from .lifted_function import LiftedFunction, P, R
from .module_memory import explain_memory
from .stages import Lowered, Traced


class Lifted(LiftedFunction[P, R]):
    """A function that takes and returns NNX objects, transformed by JAX.

    Made by :func:`~nnx_sharding.jit` and :func:`~nnx_sharding.shard_map`; call it like the
    function itself. As a method of a class it binds to its object; the bound form has all the
    methods below.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import jit
      >>> predict = jit(lambda model, x: model(x))
      >>> model, x = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), jnp.ones((8, 4))
      >>> predict.eval_shape(model, x)
      ShapeDtypeStruct(shape=(8, 2), dtype=float32)
      >>> predict.lower(model, x).compile()(model, x).shape
      (8, 2)
    """

    def __init__(self, *args: Any, max_traces: int | None = None, **modes: Any):
        super().__init__(*args, **modes)
        self._options["max_traces"] = max_traces
        self._trace_limit: TraceLimit | None = None
        if max_traces is not None:
            self._trace_limit = TraceLimit(max_traces, "max_traces", 1)
        self._observer = Observer(self._cache.log, self._trace_limit)
        self._direct = (self._guards.routes, (), self._fun, self._observer)

    def __get__(self, obj: Any, objtype: type | None = None) -> Any:
        bound = super().__get__(obj, objtype)
        if bound is not self:
            bound._direct = (self._direct[0], bound._bound, *self._direct[2:])
        return bound

    @_compat.api_boundary
    def _flattened(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function; its changes are made to the caller's own objects."""
        if self._bound:
            args = (*self._bound, *args)  # type: ignore[assignment]
        plan, flat = self._found(args, kwargs)
        program, caller = plan.program, (self._fun, self._observer)
        if _compat.trace_is_clean():
            try:
                return run(plan, flat, program.top_level, *caller)  # type: ignore[no-any-return]
            except jax.errors.JaxRuntimeError as error:
                self._explain_memory(plan, flat.leaves, error, flat.objects)
                raise
        with inherited(flat.objects):
            return run(plan, flat, program.inline, *caller, nested=True)  # type: ignore[no-any-return]

    __call__ = guarded(_flattened)

    @_compat.api_boundary
    def _failed(
        self, plan: Plan, leaves: Sequence[Any], error: BaseException, objects: Sequence[Any]
    ) -> None:
        failed(plan, leaves, error)
        self._explain_memory(plan, leaves, error, objects)

    def _explain_memory(
        self, plan: Plan, leaves: Sequence[Any], error: BaseException, objects: Sequence[Any]
    ) -> None:
        """Raises an error that says what holds the memory, if a call ran out of it."""
        explain_memory(
            error,
            plan,
            lambda: Recorder(self._fun, plan, Flat(plan.structure, leaves, objects), leaves),
            lambda stage, options: stage.compile(dict(options)),
        )

    @_compat.api_boundary
    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced:
        """Traces the function for these arguments, without running it.

        Arguments may be abstract: ``jax.ShapeDtypeStruct`` for arrays, and models made by
        ``nnx.eval_shape``. The caller's objects are not changed.

        Returns:
          A :class:`~nnx_sharding.stages.Traced`, ready to be lowered.

        Raises:
          TypeError: arguments are not arrays, or do not fit the signature of the function.
          ValueError: the declared shardings do not fit the arguments, as in a call.
        """
        return self._trace(args, kwargs)[0]

    @_compat.api_boundary
    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """Traces and lowers the function for these arguments: ``trace(...).lower()``."""
        traced, leaves = self._trace(args, kwargs)
        return explained(traced._plan, leaves, lambda *_: traced.lower())  # type: ignore[no-any-return]

    def _trace(self, args: Any, kwargs: Any) -> tuple[Traced, Sequence[Any]]:
        """The traced function, and the arrays with which it was traced."""
        call, plan, flat = self._planned(args, kwargs)
        leaves = as_declared(plan, flat.leaves)
        unmark_direct(plan.program.staged)
        with self._tracing(flat, plan):
            traced = explained(plan, leaves, plan.program.staged.trace)
        recorder = Recorder(self._fun, plan, flat, leaves)
        return Traced(traced, self, plan, call.statics, recorder), leaves

    @_compat.api_boundary
    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The output of the function with ``jax.ShapeDtypeStruct`` in place of arrays.

        Modules in the output are new, abstract ones. The caller's objects are not changed.
        """
        _, plan, flat = self._planned(args, kwargs)
        leaves = as_declared(plan, flat.leaves)
        with self._tracing(flat):
            *groups, outcome = explained(plan, leaves, plan.program.staged.eval_shape)
        arrays = outcome.arrays([abstract(leaf) for leaf in flat.leaves], groups)
        return _abstract_output(outcome, arrays, flat)

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Plan, Flat]:
        """The plan for a call that is not run, and its flattened arguments."""
        call, flat = self._split((*self._bound, *args), kwargs)
        return call, self._plan(call, flat)[0], flat

    @contextlib.contextmanager
    def _tracing(self, flat: Flat, plan: Plan | None = None) -> Iterator[None]:
        """Records traces within the block as made for these arguments."""
        nested = not _compat.trace_is_clean()
        caller = Caller(self._fun, flat.objects, self._observer, nested, plan)
        with inherited(flat.objects), called_by(caller):
            yield

    @property
    def trace_log(self) -> TraceLog:
        """The traces of the function, for :func:`~nnx_sharding.explain_retraces`."""
        return self._observer.log

    def clear_cache(self) -> None:
        """Forgets all traces and compiled programs of this function with these options.

        Also what :func:`~nnx_sharding.explain_retraces` and ``max_traces`` have recorded.
        """
        self._plans.clear()
        self._cache.log.clear()
        if self._trace_limit is not None:
            self._trace_limit.reset()


def _abstract_output(outcome: Outcome, arrays: Sequence[Any], flat: Flat) -> Any:
    """The output as new objects, with copies of those of the caller."""
    static = set(outcome.structure.static_indices()).difference(outcome.statics)
    known = {
        index: flat.objects[index]
        for index in range(len(flat.objects))
        if outcome.structure.entries[index] is None or index in static
    }
    return unflatten(outcome.structure, arrays, known).root
