"""Functions that take and return NNX objects: what all transforms make, with or without stages.

A call flattens its arguments (``Flat``) into a list of arrays and a *structure*, which describes
all else, finds the *plan* for the structure (one spec for each array, and so on), and runs a
*program* of the plan: a function of the arrays, transformed by JAX. A *guard* finds the plan of an
earlier call with the same objects without flattening. The *fingerprint* of a function is a key for
its closures, globals and arguments: if it differs, it is traced again.

This is the hot path of every call: nothing here may depend on the size of the model, apart from
flattening.

From other modules:

    make_plan     finds all that does not depend on the arrays; raises errors for wrong specs
    run           places arrays, runs the program, and writes back what the function changed
    Program       the forms of a program: ``top_level``, ``inline`` (in another trace), ``staged``
                  (to trace and lower), and ``traced_each_time``, without a fingerprint
    Outcome       what a trace did to objects; picks the arrays after it from inputs and outputs
    recorder_of   what notes how arguments are flattened, so that a guard can be made
    Recorder      traces a call once more, when a report asks
    Caller        what a trace needs of its call; ``called_by`` sets it for this thread
    Observer      is told of traces: logs them, and checks ``max_traces``
    guarded       makes a method in C that tries guards first, and the given method if none holds
    key_traces_by_tags   a context in which JAX uses only traces of modules with the same tags. A
                  tag says what is declared for a module's activations, which changes the trace
    leave_static_cache   discards what ``nnx.cached_partial`` has prepared for a call of `nnx.jit`,
                  which would stay for the next one
    as_declared   the arrays of a call, abstract ones in place of those that a call would move
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, Self, TypeVar

import jax

from .. import _compat
from ..activations.calls import Recorder
from ..activations.trace_keys import key_traces_by_tags
from ..core.cache import cache_of, plan_key
from ..core.call import run
from ..core.call_context import Caller, called_by
from ..core.declared import abstract, as_declared
from ..core.failures import call_with_explained_errors
from ..core.fingerprint import fingerprint_of
from ..core.flatten import Flat, flatten
from ..core.functions import FunctionGroup
from ..core.guard.direct import failed, guarded
from ..core.guard.store import Guards, recorder_of
from ..core.interrupts import unmark_direct
from ..core.outcome import Outcome
from ..core.plan import NOT_ASKED, Plan, make_plan
from ..core.signature import Parameters, Roles, SortedCall
from ..core.transform import Program, Transform
from ..core.unflatten import unflatten
from ..diagnostics.retraces import Observer, TraceLimit, TraceLog
from .out_of_memory import explain_memory
from .stages import Lowered, Traced

P = ParamSpec("P")
R = TypeVar("R")


class Modes(NamedTuple):
    """How the user wants graphs to be treated, as in ``jit``; None for Flax's own flag."""

    graph: bool | None
    graph_updates: bool | None


class LiftedFunction(Generic[P, R]):
    """A function, a transform, and the plans of its calls. As a method it binds to its object.

    Its private attributes:

        _fun, _transform   the user's function, and what is to be done with it
        _modes             how graphs are treated: ``graph`` and ``updates``
        _options           the arguments of ``__init__``, to wrap the function again (`__reduce__`)
        _origin            of a bound form, the function that was bound; else None
        _bound             the objects that it is bound to: the first arguments of each call
        _parameters        the parameters of the function, with their roles (static, donated)
        _cache, _plans     what all wrappers of the function share; the plans for these options
        _guards            find the plans of earlier calls
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
    ):
        """Wraps a function.

        Args:
          fun: the user's function.
          transform: what is to be done with it.
          roles: which arguments are static or donated.
          graph: whether shared references are kept.
          updates: whether changes of structure are written back.
          implicit: how many leading parameters the user's positions do not count, such as ``self``:
            in ``jit(model.loss, static_argnums=0)``, the first argument has position 0.
        """
        # The __dict__ of a class has methods, which would hide the methods of this class.
        attributes = () if isinstance(fun, type) else functools.WRAPPER_UPDATES
        functools.update_wrapper(self, fun, updated=attributes)  # type: ignore[arg-type]
        self._fun = fun
        self._transform = transform
        self._modes = {"graph": graph, "updates": updates}
        self._implicit = implicit
        self._options: dict[str, Any] = {"roles": roles, "implicit": implicit, **self._modes}
        self._origin: Self | None = None
        self._bound: tuple[Any, ...] = ()
        # As in `jax.checkpoint`, negative positions may count from the end of each call.
        from_call = transform.counts_from_call
        self._parameters = Parameters(fun, roles, bound=implicit, from_call=from_call)
        # All wrappers of one function share its cache, with its log of traces. Those with equal
        # options share plans, and the guards that find these: new ones for options that are new.
        self._cache = cache_of(fun, make_log=TraceLog)
        options_key = (transform.options_key, roles, graph, updates, implicit)
        self._plans = self._cache.plans(options_key, guards=Guards(transform))
        self._guards = self._plans.guards

    def __get__(self, obj: object, objtype: type | None = None) -> Any:
        """Binds the function to an object, as a method; the bound form shares plans and guards."""
        if obj is None:
            return self
        # Without __init__, which would make caches anew at each access to a method.
        cls: Any = type(self)
        bound = cls.__new__(cls)
        bound.__dict__.update(self.__dict__)
        bound._bound = (*self._bound, obj)
        bound._origin = self
        # For `inspect.signature`, which then leaves out `self`.
        bound.__dict__["__wrapped__"] = types.MethodType(self._fun, obj)
        return bound

    def _sort(self, args: tuple[object, ...], kwargs: dict[str, object]) -> SortedCall:
        """Sorts the arguments of a call by their roles: static, donated, other."""
        signature = self._parameters.signature(len(args), tuple(kwargs))
        if args and isinstance(args[0], type) and self._is_classmethod_of(args[0]):
            signature = signature._replace(static=signature.static | {0})  # a class is not an array
        return self._transform.sort_call(self._parameters, signature, args, kwargs)

    def _split(
        self, args: tuple[object, ...], kwargs: dict[str, object], *, record: bool = False
    ) -> tuple[SortedCall, Flat]:
        """Returns the arguments of a call by their roles (static, donated), and flattened.

        Args:
          args: the positional arguments, bound objects first.
          kwargs: the keyword arguments.
          record: whether to record what is read of the arguments, so that a guard can be made.
        """
        _compat.leave_static_cache()
        call = self._sort(args, kwargs)
        flat = flatten(
            call.tree,  # all arguments but static ones: ``(positional, keywords)``
            graph=self._modes["graph"],
            statics=call.statics,
            keeps_alive=False,  # plans keep the structure, longer than the user keeps the objects
            recorder=recorder_of(call, args, kwargs) if record else None,
        )
        return call, flat

    def _is_classmethod_of(self, owner: type) -> bool:
        """Whether this is what a classmethod of ``owner`` calls, with ``owner`` as its ``cls``."""
        unbound: Any = self._origin or self
        name = getattr(self._fun, "__name__", "")
        definitions = (vars(base).get(name) for base in owner.__mro__)
        return any(isinstance(x, classmethod) and x.__func__ is unbound for x in definitions)

    def _find_plan(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Plan, Flat]:
        """Returns the plan for a call, and its flattened arguments.

        A guard knows both if an earlier call had the same objects, unchanged but for their arrays.
        """
        # In a trace, the objects in the arguments hold its tracers, and no later call is given them
        # again. So a guard for them would never hold.
        is_top_level = _compat.trace_is_clean()
        guards = self._guards
        known = guards.find(args, kwargs) if is_top_level else None
        if known is not None:
            _compat.leave_static_cache()  # as `_split` does for all other calls
            return known
        call, flat = self._split(args, kwargs, record=is_top_level)
        plan, is_new = self._plan(call, flat)
        if is_top_level:
            # A call with a new plan compiles, which takes far longer than to make a guard at once.
            # For others, one is made when the same arguments come again.
            guards.add(plan, flat, args, kwargs, is_new=is_new)
        return plan, flat

    def _fingerprint(self, plan: Plan, flat: Flat) -> Hashable | None:
        """Returns a key for what the function can reach now: globals, closures and arguments.

        A traced program is used again for an equal key. There are two special cases:

        * ``NOT_ASKED``, one key for all calls: a function of ``jit`` at top level keeps what its
          first trace captured, as with ``jax.jit``;
        * None: the function can reach something without a key, such as an array in a closure, so
          each call traces it.

        Args:
          plan: the plan of the call.
          flat: its arguments, flattened.
        """
        is_top_level = _compat.trace_is_clean()
        if self._transform.keeps_captures and is_top_level:  # only ``jit`` has this flag
            return NOT_ASKED
        fun = self._fun
        # Transforms of several functions, such as `cond`, put them into one group.
        functions = fun.functions if isinstance(fun, FunctionGroup) else (fun,)
        # What is called in the trace has globals and closures, too: static values in the arguments,
        # such as an activation function, and the user's filters in specs or in a policy of remat.
        static_values = plan.reached_from(flat.objects)
        filters = self._transform.traced_filters
        return fingerprint_of([*functions, *static_values, *filters])

    def _program(self, plan: Plan, flat: Flat) -> Program:
        """Returns the program of a plan in which the function was traced with what it reaches."""
        return plan.program_for(self._fingerprint(plan, flat))

    def _choose_program(self, plan: Plan, flat: Flat) -> Callable[..., Any]:
        """Returns what a call executes, a function of the arrays.

        It depends on where the call is made, in a trace or at top level, and on whether what the
        function can reach has a fingerprint, which an earlier call may have had.
        """
        fingerprint = self._fingerprint(plan, flat)
        # Asked first, as `program_for` adds a program for this fingerprint. A function that counts
        # its calls reaches another number in each of them: each would compile a program that no
        # later call uses.
        is_changed_since = bool(plan.programs) and fingerprint not in plan.programs
        program = plan.program_for(fingerprint)
        if not _compat.trace_is_clean():
            return program.inline
        if fingerprint is None or is_changed_since:
            return program.traced_each_time
        return program.top_level

    def _plan(self, call: SortedCall, flat: Flat) -> tuple[Plan, bool]:
        """Returns the plan for a call, and whether it is new.

        Args:
          call: the arguments by their roles.
          flat: the same, flattened.
        """
        transform = self._transform

        def make() -> Plan:
            parameters, traced = self._parameters, self._cache.traced
            return make_plan(self._fun, transform, parameters, call, flat, traced, **self._modes)

        # The key has all that a plan depends on: structure, roles, and what the transform reads.
        return self._plans.get_or_make(plan_key(transform, call, flat), make)

    def __repr__(self) -> str:
        try:
            return f"<nnx_sharding.{self._transform.name} of {self._fun!r}>"
        except Exception:  # the function's own __repr__ may raise anything, as in JAX
            return f"<nnx_sharding.{self._transform.name} of a {type(self._fun).__name__}>"

    def __eq__(self, other: object) -> bool:
        if self._origin is None or not isinstance(other, LiftedFunction):
            return self is other
        # Each access to a method makes a new object. Like Python's bound methods, two of them are
        # equal if they bind one function to one object.
        return self._origin == other._origin and self._bound[-1] is other._bound[-1]

    def __hash__(self) -> int:
        if self._origin is None:
            return object.__hash__(self)
        return hash((self._origin, id(self._bound[-1])))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        """Returns the function itself, as for Python's functions; a method of a copied object."""
        if self._origin is None:
            return self
        new_origin, new_object = copy.deepcopy((self._origin, self._bound[-1]), memo)
        return new_origin.__get__(new_object)

    def __reduce__(self) -> Any:
        """Returns how pickle makes this again: a name, or a function and its arguments.

        There are three forms:

        * a bound method: ``origin.__get__(obj)``, as Python evaluates ``obj.method``;
        * a decorated function: its name, as Python pickles functions;
        * ``g = jit(f)``: the wrapper of ``f`` with the same options. The name of ``f`` is that of
          the user's function, not of ``g``.
        """
        if self._origin is not None:
            return self._origin.__get__, (self._bound[-1],)
        # Whether this has taken the function's place under its name, as a decorator does.
        module = sys.modules.get(getattr(self._fun, "__module__", None) or "")
        name = getattr(self._fun, "__qualname__", "")
        try:
            under_name: Any = functools.reduce(getattr, name.split("."), module)
        except AttributeError:  # of a function in another function, or without a name
            under_name = None
        if under_name is self:
            return name
        wrap_again = functools.partial(type(self), self._fun, self._transform, **self._options)
        return wrap_again, ()


class Lifted(LiftedFunction[P, R]):
    """A function that takes and returns NNX objects, transformed by JAX.

    Made by :func:`~nnx_sharding.jit` and :func:`~nnx_sharding.shard_map`; call it like the
    function itself. As a method of a class it binds to its object; the bound form has all the
    methods below.

    Most calls never reach Python code of this class: ``__call__`` is in C (`guarded`), and calls
    `_flattened` only if no guard knows the arguments.

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
        """Adds what functions with stages have: a limit on traces, and what calls in C read.

        Args:
          *args: the positional arguments of :class:`LiftedFunction`.
          max_traces: how many traces are allowed; None for any number.
          **modes: its keyword arguments.
        """
        super().__init__(*args, **modes)
        self._options["max_traces"] = max_traces
        self._trace_limit: TraceLimit | None = None
        if max_traces is not None:
            self._trace_limit = TraceLimit(max_traces, option="max_traces", least=1)
        self._observer = Observer(self._cache.log, self._trace_limit)
        # What a call in C reads, by position: the guards that held last, the bound objects (one for
        # a method), the function that JAX may trace, and who is told of that.
        no_bound_objects: tuple[Any, ...] = ()
        self._direct = (self._guards.recent, no_bound_objects, self._fun, self._observer)
        # Trainers count compiled programs by ``jitted_fn._cache_size()`` of what `nnx.jit` returns.
        # In the __dict__, not a property: `functools.wraps`, as in `nnx.cached_partial`, copies it.
        self.jitted_fn = self._plans

    def __get__(self, obj: object, objtype: type | None = None) -> Any:
        """Binds the function to an object, as a method, also for calls in C."""
        bound = super().__get__(obj, objtype)
        if bound is not self:
            bound._direct = (self._direct[0], bound._bound, *self._direct[2:])
        return bound

    @_compat.api_boundary
    def _flattened(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function for arguments that the call in C does not know.

        They are flattened, unless a guard knows them here. The function's changes are made to the
        caller's own objects. Errors of memory are explained at top level only: in a trace nothing
        runs.
        """
        if self._bound:  # else `args` is passed on as it is, which saves a new tuple
            args = (*self._bound, *args)  # type: ignore[assignment]
        plan, flat = self._find_plan(args, kwargs)
        execute = self._choose_program(plan, flat)
        if _compat.trace_is_clean():
            try:
                return run(plan, flat, execute, self._fun, self._observer)  # type: ignore[no-any-return]
            except jax.errors.JaxRuntimeError as error:
                self._explain_memory(plan, flat.leaves, error, flat.objects)
                raise
        # JAX must not use a trace of modules whose activations are sharded in another way.
        with key_traces_by_tags(flat.objects):
            return run(plan, flat, execute, self._fun, self._observer, nested=True)  # type: ignore[no-any-return]

    __call__ = guarded(_flattened)

    @_compat.api_boundary
    def _failed(
        self, plan: Plan, leaves: Sequence[object], error: BaseException, objects: Sequence[object]
    ) -> None:
        """Is called for an error of a call in C, with its arrays and the caller's objects."""
        failed(plan, leaves, error)  # raises an explained error for what `run` explains, too
        self._explain_memory(plan, leaves, error, objects)

    def _explain_memory(
        self, plan: Plan, leaves: Sequence[object], error: BaseException, objects: Sequence[object]
    ) -> None:
        """Raises an error that says what holds the memory, if a call ran out of it.

        For any other error it returns, and the caller raises that.

        Args:
          plan: the plan of the call.
          leaves: its arrays.
          error: what JAX raised.
          objects: the caller's objects.
        """

        # Passed as functions: only for an error of memory is the program traced and compiled again.
        def make_recorder() -> Recorder:
            return Recorder(self._fun, plan, Flat(plan.structure, leaves, objects), leaves)

        def compile_with(stage: jax.stages.Lowered, options: Mapping[str, Any]) -> Any:
            return stage.compile(dict(options))

        explain_memory(error, plan, make_recorder, compile_with)

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
        traced, _ = self._trace(args, kwargs)
        return traced

    @_compat.api_boundary
    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """Traces and lowers the function for these arguments: ``trace(...).lower()``."""
        traced, leaves = self._trace(args, kwargs)
        return call_with_explained_errors(traced._plan, leaves, lambda *_: traced.lower())  # type: ignore[no-any-return]

    def _trace(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Traced, Sequence[Any]]:
        """Returns the traced function, and the arrays with which it was traced."""
        call, flat = self._split((*self._bound, *args), kwargs)
        plan, _ = self._plan(call, flat)
        leaves = as_declared(plan, flat.leaves)  # abstract where a call would move the array
        staged = self._program(plan, flat).staged
        # A program that is marked as direct runs no Python code in calls (``core/call.py``), so
        # these defer no signals. A call with the types of this trace has to compile, and makes no
        # trace of its own that would notice it.
        unmark_direct(staged)
        with self._tracing(flat, plan):
            traced = call_with_explained_errors(plan, leaves, staged.trace)
        # Keeps the function and the objects, to trace once more when a report is asked for.
        recorder = Recorder(self._fun, plan, flat, leaves)
        return Traced(traced, self, plan, call.statics, recorder), leaves

    @_compat.api_boundary
    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Returns the output of the function with ``jax.ShapeDtypeStruct`` in place of arrays.

        Modules in the output are new, abstract ones. The caller's objects are not changed.
        """
        plan, flat = self._plan_without_running(args, kwargs)
        leaves = as_declared(plan, flat.leaves)  # abstract where a call would move the array
        with self._tracing(flat):
            staged = self._program(plan, flat).staged
            # Types of the output arrays, in groups of one sharding each; and what the call did,
            # which has no arrays: it is a part of the treedef of JAX's result.
            *groups, outcome = call_with_explained_errors(plan, leaves, staged.eval_shape)
        # The type of each array after the call, by slot: an output, or an input left unchanged.
        types = outcome.arrays([abstract(leaf) for leaf in flat.leaves], groups)
        return _abstract_output(outcome, types, flat)

    def _jaxpr(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """Returns the jaxpr for these arguments, a function of all arrays in them.

        Arrays that the user's function captures are constants of it, as in ``jax.make_jaxpr``; in
        the jaxpr of a stage, such as ``jit(f).trace(x).jaxpr``, they are inputs.
        """
        plan, flat = self._plan_without_running(args, kwargs)
        # JAX finds a trace by the identity of the function. So this is the function that a call
        # traces, while what the user's function can reach (the fingerprint) is the same.
        pure_function = plan.pure_function(self._fingerprint(plan, flat))
        # Abstract where a call would move the array to its declared sharding: nothing is moved for
        # a jaxpr, but its types are those of the call.
        leaves = as_declared(plan, flat.leaves)
        with self._tracing(flat):
            return call_with_explained_errors(plan, leaves, jax.make_jaxpr(pure_function))

    def _plan_without_running(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Plan, Flat]:
        """Returns the plan of a call with these arguments, and the arguments, flattened."""
        call, flat = self._split((*self._bound, *args), kwargs)
        plan, _ = self._plan(call, flat)
        return plan, flat

    @contextlib.contextmanager
    def _tracing(self, flat: Flat, plan: Plan | None = None) -> Iterator[None]:
        """Attributes traces within the block to a call with these arguments.

        Args:
          flat: the arguments.
          plan: the plan for which the times that JAX reports in the block are recorded; None if
            they are not.
        """
        caller = Caller(
            fun=self._fun,
            objects=flat.objects,
            observer=self._observer,
            nested=not _compat.trace_is_clean(),  # whether they are a part of another trace
            plan=plan,
        )
        with key_traces_by_tags(flat.objects), called_by(caller):
            yield

    @property
    def trace_log(self) -> TraceLog:
        """The traces of the function, for :func:`~nnx_sharding.explain_retraces`."""
        return self._observer.log

    def _cache_size(self) -> int:
        """How many programs are compiled for calls, as trainers ask of what ``jax.jit`` returns."""
        return self._plans._cache_size()

    def clear_cache(self) -> None:
        """Forgets all traces and compiled programs of this function with these options.

        Also what :func:`~nnx_sharding.explain_retraces` and ``max_traces`` have recorded.
        """
        self._plans.clear()  # with their guards
        self._cache.log.clear()  # of all wrappers of this function: they share one log
        if self._trace_limit is not None:
            self._trace_limit.reset()


def _abstract_output(outcome: Outcome, types: Sequence[object], flat: Flat) -> Any:
    """Builds what ``eval_shape`` returns: the output of a call, with types in place of arrays.

    A call would change the caller's objects. Here it must not, so new objects are made for modules
    and Variables, with types in place of arrays. Two kinds of objects are the caller's own: those
    that no call can change, and static ones, such as functions, that this call has not changed.

    Args:
      outcome: what the call did. The objects of the arguments have the same indices in its
        structure, which describes all objects after the call, as in ``flat``.
      types: the type of each array after the call, by slot.
      flat: the arguments.
    """
    structure = outcome.structure
    static_indices = {*structure.static_indices()}
    callers_own: dict[int, object] = {}  # by index
    for index, obj in enumerate(flat.objects):
        # The structure after a call describes only what a call can change: others have None.
        is_fixed = structure.entries[index] is None
        is_unchanged_static = index in static_indices and index not in outcome.statics
        if is_fixed or is_unchanged_static:
            callers_own[index] = obj
    return unflatten(structure, types, existing=callers_own).root


def lift(
    cls: type[LiftedFunction[..., Any]],
    fun: Callable[..., Any],
    transform: Transform,
    roles: Roles,
    graph: bool | None,
    graph_updates: bool | None,
    *,
    jax_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Wraps a function in a :class:`LiftedFunction`: the last step of each decorator.

    A bound method of an NNX object becomes a function of that object, bound to it again: so the
    object is an argument, whose changes are written back.

    Args:
      cls: the class of the wrapper.
      fun: the user's function.
      transform: what is to be done with it.
      roles: which arguments are static or donated.
      graph: the user's option; None for Flax's global flag.
      graph_updates: likewise.
      jax_options: options of ``jax.jit`` about which JAX may raise or warn already here.
      **options: further keyword arguments of ``cls``, such as ``max_traces``.
    """
    no_roles = Roles()
    for option in ("static_argnames", "donate_argnames"):
        if names := getattr(roles, option):
            Parameters(fun, no_roles).check_names(f"{transform.name}: {option}", names)
    # Only for its errors and warnings: JAX knows best what it can transform, with which options.
    jax.jit(fun, **roles._asdict(), **(jax_options or {}))
    unbound, bound = unbind(fun)  # for a method: the function in its class, and the object
    # As in Flax, the global flags count where a function is decorated, not where it is called.
    graph, updates = _compat.graph_mode(graph, graph_updates)
    lifted: Any = cls(
        unbound,
        transform,
        roles,
        graph=graph,
        updates=updates,
        implicit=len(bound),  # the user counts positions of the bound method
        **options,
    )
    for obj in bound:
        lifted = lifted.__get__(obj)
    return lifted


def unbind(fun: object) -> tuple[Any, tuple[Any, ...]]:
    """Splits a method into its function and the arguments that it is bound to.

    ``model.loss`` → ``(Model.loss, (model,))``; a plain ``f`` → ``(f, ())``.
    """
    # Only NNX objects become arguments; other objects stay captured, as by `jax.jit`.
    if inspect.ismethod(fun) and _compat.is_graph_object(fun.__self__):
        return fun.__func__, (fun.__self__,)
    # A decorated method, such as `model.step` of a class with `@jit def step(self, …)`.
    if isinstance(fun, LiftedFunction) and fun._origin is not None:
        return fun._origin, fun._bound
    # A partial of a method, whose object has to become an argument as well. A partial of a plain
    # function is left as it is: `inspect.signature` and JAX understand it.
    if isinstance(fun, functools.partial):
        method, bound = unbind(fun.func)
        if bound:
            return _unbound_partial(method, fun.args, fun.keywords), bound
    return fun, ()


def _unbound_partial(
    method: Callable[..., object], args: tuple[object, ...], keywords: dict[str, object]
) -> Callable[..., Any]:
    """Returns ``functools.partial(obj.method, *args, **keywords)`` as a function of ``obj`` first.

    Its signature has the object, then the parameters that the partial leaves open.

    Args:
      method: the function in the class.
      args: the positional arguments that the partial gives, without the object.
      keywords: the keyword arguments that it gives, which a call may give again.
    """

    @functools.wraps(method)
    def call_method(self: object, *open_args: object, **open_keywords: object) -> Any:
        return method(self, *args, *open_args, **{**keywords, **open_keywords})

    # Static arguments and specs are found by these names and positions. None stands for the object,
    # whose parameter comes first.
    open_signature = inspect.signature(functools.partial(method, None, *args, **keywords))
    self_parameter, *_ = inspect.signature(method).parameters.values()
    call_method.__signature__ = open_signature.replace(  # type: ignore[attr-defined]
        parameters=[self_parameter, *open_signature.parameters.values()]
    )
    return call_method
