"""The callable that users hold: one class for every transform."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from . import _compat
from .activations.record import Recorder
from .activations.tracing import inherited
from .core.cache import cache_of
from .core.call import run
from .core.caller import Caller, called_by
from .core.flatten import Flat, flatten
from .core.outcome import Outcome
from .core.plan import Plan, abstract, as_declared, make_plan
from .core.signature import Call, Parameters, Roles
from .core.transform import Transform
from .core.unflatten import unflatten
from .diagnostics.failures import explained
from .diagnostics.trace_log import Observer, TraceLimit, TraceLog
from .stage_calls import Origin
from .stages import Lowered, Traced

P = ParamSpec("P")
R = TypeVar("R")


class Lifted(Generic[P, R]):
    """A function that takes and returns NNX objects, transformed by JAX.

    Made by :func:`~nnx_sharding.jit` and :func:`~nnx_sharding.shard_map`; call it like the
    function itself. As a method of a class it binds to its object, and the bound form has all
    of the methods below.
    """

    def __init__(
        self,
        fun: Callable[P, R],
        transform: Transform,
        roles: Roles,
        *,
        graph: bool,
        updates: bool,
        implicit: int = 0,
        max_traces: int | None = None,
    ):
        # What a class has in its __dict__ are methods, which would hide those of this one.
        updated = () if isinstance(fun, type) else functools.WRAPPER_UPDATES
        functools.update_wrapper(self, fun, updated=updated)
        self._fun = fun
        self._transform = transform
        self._roles = roles
        self._graph = graph
        self._updates = updates
        self._implicit = implicit  # how many leading parameters positions do not count
        self._max_traces = max_traces
        self._trace_limit: TraceLimit | None = None
        if max_traces is not None:
            self._trace_limit = TraceLimit(max_traces, "max_traces", 1)
        self._origin: Lifted[..., Any] | None = None
        self._bound: tuple[Any, ...] = ()
        self._parameters = Parameters(fun, roles, bound=implicit)
        self._cache = cache_of(fun, TraceLog)
        self._observer = Observer(self._cache.log, self._trace_limit)
        self._plans = self._cache.plans((transform, roles, graph, updates, implicit), transform)
        self._guards = self._plans.guards

    @_compat.api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function; objects that it changes are the caller's own."""
        if self._bound:
            args = (*self._bound, *args)  # type: ignore[assignment]
        if not _compat.trace_is_clean():
            call, flat = self._split(args, kwargs)
            plan, _ = self._plan(call, flat)
            with inherited(flat.objects):
                return run(  # type: ignore[no-any-return]
                    plan, flat, plan.program.inline, self._fun, self._observer, nested=True
                )
        _compat.leave_static_cache()
        found = self._guards.find(args, kwargs)
        if found is None:
            call, flat = self._split(args, kwargs)
            plan, is_new = self._plan(call, flat)
            self._guards.add(plan, call, flat, args, kwargs, is_new=is_new)
        else:
            plan, flat = found
        program = plan.program
        return run(plan, flat, program.top_level, self._fun, self._observer)  # type: ignore[no-any-return]

    def __get__(self, obj: Any, objtype: type | None = None) -> Any:
        if obj is None:
            return self
        bound = Lifted.__new__(Lifted)
        bound.__dict__.update(self.__dict__)
        bound._bound = (*self._bound, obj)
        bound._origin = self
        bound.__dict__["__wrapped__"] = types.MethodType(self._fun, obj)
        return bound

    @_compat.api_boundary
    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced:
        """Traces the function for these arguments, without running it.

        Arguments may be abstract: ``jax.ShapeDtypeStruct`` for arrays, and models made by
        ``nnx.eval_shape``. Nothing of the caller's is changed.

        Returns:
          A :class:`~nnx_sharding.stages.Traced`, ready to be lowered.
        """
        call, plan, flat = self._planned(args, kwargs)
        leaves = as_declared(plan, flat.leaves)
        return self._trace(plan, call, flat, leaves)

    @_compat.api_boundary
    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """Traces and lowers the function for these arguments: ``trace(...).lower()``."""
        call, plan, flat = self._planned(args, kwargs)
        leaves = as_declared(plan, flat.leaves)
        traced = self._trace(plan, call, flat, leaves)
        return explained(plan, leaves, lambda *_: traced.lower())  # type: ignore[no-any-return]

    def _trace(self, plan: Plan, call: Call, flat: Flat, leaves: Sequence[Any]) -> Traced:
        with self._tracing(flat):
            traced = explained(plan, leaves, plan.program.staged.trace)
        recorder = Recorder(self._fun, plan, flat, leaves)
        return Traced(traced, Origin(plan, self._split, self._bound, call.statics, recorder))

    @_compat.api_boundary
    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The output of the function with ``jax.ShapeDtypeStruct`` in place of arrays.

        Modules in the output are new, abstract ones. Nothing of the caller's is changed.
        """
        _, plan, flat = self._planned(args, kwargs)
        leaves = as_declared(plan, flat.leaves)
        with self._tracing(flat):
            *groups, outcome = explained(plan, leaves, plan.program.staged.eval_shape)
        arrays = outcome.arrays([abstract(leaf) for leaf in flat.leaves], groups)
        return _abstract_output(outcome, arrays, flat)

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Plan, Flat]:
        """The plan for a call that is only prepared, and its arguments, flattened."""
        call, flat = self._split((*self._bound, *args), kwargs)
        return call, self._plan(call, flat)[0], flat

    @contextlib.contextmanager
    def _tracing(self, flat: Flat) -> Iterator[None]:
        """Traces within the block are made for these arguments."""
        nested = not _compat.trace_is_clean()
        caller = Caller(self._fun, flat.objects, self._observer, nested)
        with inherited(flat.objects), called_by(caller):
            yield

    @property
    def trace_log(self) -> TraceLog:
        """The traces of the function, for :func:`~nnx_sharding.explain_retraces`."""
        return self._observer.log

    def clear_cache(self) -> None:
        """Forgets all traces and compiled programs of this function with these options.

        Also what :func:`~nnx_sharding.explain_retraces` and ``max_traces`` know of the function.
        """
        self._plans.clear()
        self._cache.log.clear()
        if self._trace_limit is not None:
            self._trace_limit.reset()

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Flat]:
        _compat.leave_static_cache()
        signature = self._parameters.signature(len(args), tuple(kwargs))
        if args and isinstance(args[0], type) and self._is_classmethod_of(args[0]):
            signature = signature._replace(static=signature.static | {0})
        call = self._transform.sort_call(self._parameters, signature, args, kwargs)
        flat = flatten(call.tree, graph=self._graph, statics=call.statics, held=False)
        return call, flat

    def _is_classmethod_of(self, owner: type) -> bool:
        """Whether this is the function of a classmethod of ``owner``, which is then its ``cls``."""
        own = self._origin or self
        name = getattr(self._fun, "__name__", "")
        found = (vars(base).get(name) for base in owner.__mro__)
        return any(isinstance(x, classmethod) and x.__func__ is own for x in found)

    def _plan(self, call: Call, flat: Flat) -> tuple[Plan, bool]:
        """The plan for a call, and whether it is new."""
        key = (call.signature, flat.structure, self._transform.key(flat.leaves))
        return self._plans.get_or_make(
            key,
            lambda: make_plan(
                self._fun,
                self._transform,
                self._parameters,
                call,
                flat,
                self._graph,
                self._updates,
                self._cache.traced,
            ),
        )

    def __repr__(self) -> str:
        try:
            return f"<nnx_sharding.{self._transform.name} of {self._fun!r}>"
        except Exception:  # the function's own __repr__ may raise anything, as in JAX
            return f"<nnx_sharding.{self._transform.name} of a {type(self._fun).__name__}>"

    def __eq__(self, other: object) -> bool:
        # Each access to a method makes a new object; like Python's, they compare by content.
        if self is other or not isinstance(other, Lifted) or self._origin is None:
            return self is other
        return self._origin == other._origin and self._bound[-1] is other._bound[-1]

    def __hash__(self) -> int:
        if self._origin is None:
            return object.__hash__(self)
        return hash((self._origin, id(self._bound[-1])))

    def __copy__(self) -> Lifted[P, R]:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        if self._origin is None:
            return self
        return copy.deepcopy(self._origin, memo).__get__(copy.deepcopy(self._bound[-1], memo))

    def __reduce__(self) -> Any:
        if self._origin is not None:
            return self._origin.__get__, (self._bound[-1],)
        # A decorated function is found again under its own name, as functions are.
        module = sys.modules.get(getattr(self._fun, "__module__", None) or "")
        name = getattr(self._fun, "__qualname__", "")
        try:
            found: Any = functools.reduce(getattr, name.split("."), module)
        except AttributeError:
            found = None
        if found is self:
            return name
        modes: dict[str, Any] = {
            "graph": self._graph,
            "updates": self._updates,
            "implicit": self._implicit,
            "max_traces": self._max_traces,
        }
        make = functools.partial(Lifted, self._fun, self._transform, self._roles, **modes)
        return make, ()


def lift(
    fun: Callable[..., Any],
    transform: Transform,
    roles: Roles,
    graph: bool | None,
    graph_updates: bool | None,
    max_traces: int | None,
    **jax_options: Any,
) -> Lifted[..., Any]:
    """Wraps a function; a bound method of an NNX object becomes a function of that object.

    ``jax_options`` are options of ``jax.jit`` on which JAX may raise or warn here already.
    """
    # JAX knows best what it can transform: this raises its own errors for what it cannot.
    jax.jit(fun, **roles._asdict(), **jax_options)
    unbound, bound = unbind(fun)
    # As in Flax, the global flags count where a function is decorated, not where it is called.
    graph, updates = _compat.graph_mode(graph, graph_updates)
    lifted: Lifted[..., Any] = Lifted(
        unbound,
        transform,
        roles,
        graph=graph,
        updates=updates,
        implicit=len(bound),
        max_traces=max_traces,
    )
    for obj in bound:
        lifted = lifted.__get__(obj)
    return lifted


def unbind(fun: Any) -> tuple[Any, tuple[Any, ...]]:
    """A method as the function behind it and the object that it is bound to."""
    if inspect.ismethod(fun) and _compat.is_graph_object(fun.__self__):
        return fun.__func__, (fun.__self__,)
    if isinstance(fun, Lifted) and fun._origin is not None:
        return fun._origin, fun._bound
    if isinstance(fun, functools.partial):
        inner, bound = unbind(fun.func)
        if bound:
            return _unbound_partial(inner, fun.args, fun.keywords), bound
    return fun, ()


def _unbound_partial(
    method: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def call_method(self: Any, *rest: Any, **more: Any) -> Any:
        return method(self, *args, *rest, **{**keywords, **more})

    parameters = list(inspect.signature(method).parameters.values())
    remaining = inspect.signature(functools.partial(method, None, *args, **keywords))
    call_method.__signature__ = remaining.replace(  # type: ignore[attr-defined]
        parameters=[parameters[0], *remaining.parameters.values()]
    )
    return call_method


def _abstract_output(outcome: Outcome, arrays: Sequence[Any], flat: Flat) -> Any:
    """The output as new objects: those of the caller take part with copies."""
    static = set(outcome.structure.static_indices()).difference(outcome.statics)
    known = {
        index: flat.objects[index]
        for index in range(len(flat.objects))
        if outcome.structure.entries[index] is None or index in static
    }
    return unflatten(outcome.structure, arrays, known).root
