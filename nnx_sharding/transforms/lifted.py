"""Functions that take and return NNX objects: the wrappers that all transforms make of a function.

A call flattens its arguments (``Flat``) into a list of arrays and a *structure*, which describes
all else. It finds the *plan* for the structure (one spec for each array, and so on), and runs a
*program* of the plan: a function of the arrays, transformed by JAX. A *guard* finds the plan of an
earlier call with the same objects without flattening. The *fingerprint* of a function is a key for
its closures, globals and arguments: if it differs, the function is traced again.

This is the hot path of every call: nothing here may depend on the size of the model, apart from
flattening.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, ParamSpec, Self, TypeVar

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
from ..core.signature import NO_ROLES, Parameters, Roles, SortedCall, check_takes
from ..core.transform import Program, Transform
from ..core.unflatten import unflatten
from ..diagnostics.retraces import Observer, TraceLimit, TraceLog
from .out_of_memory import explain_memory
from .stages import Lowered, Traced

P = ParamSpec("P")
R = TypeVar("R")


class LiftedFunction(Generic[P, R]):
    """A function, a transform, and the plans of its calls. A method binds to its object.

    Its private attributes:

        _fun, _transform   the user's function, and the transform that is applied to it
        _graph, _updates   whether shared references are kept, and changes of structure written
                           back. Neither is None any more, because `lift` has read Flax's flags
        _implicit          how many leading parameters the user's positions do not count: 1 for the
                           ``self`` of ``jit(model.loss)``, 0 for a plain function
        _options           the arguments of ``__init__``, to wrap the function again (`__reduce__`)
        _origin            the wrapper from which `__get__` made this bound form; None for a wrapper
                           that is not bound
        _bound             the objects to which it is bound: the first arguments of each call. Empty
                           if it is not bound
        _parameters        the parameters of the function, with their roles (static, donated);
                           ``signature`` returns the names and roles of the arguments of one call
        _cache             what all wrappers of the function share: plans, traced pure functions
                           (``traced``) and the log of traces (``log``)
        _plans             the plans that all wrappers with these options share. ``get_or_make``
                           returns a plan, and whether it is new
        _guards            the guards of these plans. ``find`` returns a plan and the flattened
                           arguments, or None if no guard knows the arguments

    In a call, `_find_plan` tries the guards, and then takes three steps: `_sort` finds the roles of
    the arguments, `_split` flattens them, and `_plan` finds or makes the plan. `_choose_program`
    follows. Subclasses run the program.
    """

    def __init__(
        self,
        fun: Callable[P, R],
        transform: Transform,
        *,
        graph: bool,
        updates: bool,
        roles: Roles = NO_ROLES,
        implicit: int = 0,
    ):
        """Wraps a function.

        Args:
          fun: the user's function.
          transform: the transform that is applied to the function.
          graph: whether shared references are kept.
          updates: whether changes of structure are written back.
          roles: which arguments are static or donated.
          implicit: how many leading parameters the user's positions do not count, such as ``self``:
            in ``jit(model.loss, static_argnums=0)``, the first argument has position 0.
        """
        # The __dict__ of a class has methods, which would hide the methods of this class.
        attributes = () if isinstance(fun, type) else functools.WRAPPER_UPDATES
        functools.update_wrapper(self, fun, updated=attributes)  # type: ignore[arg-type]
        self._fun = fun
        self._transform = transform
        self._graph, self._updates = graph, updates
        self._implicit = implicit
        # A subclass adds its own arguments, and `unjitted` reads the roles from here.
        self._options: dict[str, Any] = {
            "graph": graph,
            "updates": updates,
            "roles": roles,
            "implicit": implicit,
        }
        self._origin: Self | None = None
        self._bound: tuple[Any, ...] = ()
        # Negative positions may count from the end of each call, as in `jax.checkpoint`.
        from_call = transform.counts_from_call
        self._parameters = Parameters(fun, roles, bound=implicit, from_call=from_call)
        # All wrappers of one function share its cache, with its log of traces. Wrappers with equal
        # options share plans, and the guards that find the plans. The new guards are used only if
        # the options are new.
        self._cache = cache_of(fun, make_log=TraceLog)
        options_key = (transform.options_key, roles, graph, updates, implicit)
        self._plans = self._cache.plans(options_key, guards=Guards(transform))
        self._guards = self._plans.guards

    def __get__(self, obj: object, objtype: type | None = None) -> Any:
        """Binds the function to an object, as a method; the bound form shares plans and guards."""
        if obj is None:
            return self
        # `__init__` is not called, because it would look up caches at each access to a method.
        cls: Any = type(self)
        bound = cls.__new__(cls)
        bound.__dict__.update(self.__dict__)
        bound._bound = (*self._bound, obj)
        bound._origin = self
        # `inspect.signature` reads this, so that it leaves out `self`.
        bound.__dict__["__wrapped__"] = types.MethodType(self._fun, obj)
        return bound

    def _sort(self, args: tuple[object, ...], kwargs: dict[str, object]) -> SortedCall:
        """Sorts the arguments of a call by their roles: static, donated, other."""
        signature = self._parameters.signature(len(args), tuple(kwargs))
        if args and isinstance(args[0], type) and self._is_classmethod_of(args[0]):
            # The class is static because it is not an array.
            signature = signature._replace(static=signature.static | {0})
        return self._transform.sort_call(self._parameters, signature, args, kwargs)

    def _split(
        self, args: tuple[object, ...], kwargs: dict[str, object], *, record: bool = False
    ) -> tuple[SortedCall, Flat]:
        """Returns the arguments of a call by their roles (static, donated), and flattened.

        Discards what ``nnx.cached_partial`` has prepared for a call of `nnx.jit`.

        Args:
          record: whether to record what flattening reads, so that a guard can be made.
        """
        _compat.leave_static_cache()
        call = self._sort(args, kwargs)
        flat = flatten(
            call.tree,  # all arguments except static ones: ``(positional, keywords)``
            graph=self._graph,
            statics=call.statics,
            keeps_alive=False,  # plans keep the structure, longer than the user keeps the objects
            recorder=recorder_of(call, args, kwargs) if record else None,
        )
        return call, flat

    def _is_classmethod_of(self, owner: type) -> bool:
        """Whether a classmethod of ``owner`` calls this function, with ``owner`` as its ``cls``."""
        unbound: Any = self._origin or self
        name = getattr(self._fun, "__name__", "")
        definitions = (vars(base).get(name) for base in owner.__mro__)
        return any(isinstance(x, classmethod) and x.__func__ is unbound for x in definitions)

    def _find_plan(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Plan, Flat]:
        """Returns the plan for a call, and its flattened arguments.

        A guard finds both if an earlier call had the same objects, with no change except in arrays.
        """
        # In a trace, the objects in the arguments hold its tracers. No later call gets these again,
        # so a guard for them would never hold.
        is_top_level = _compat.trace_is_clean()
        guards = self._guards
        earlier_call = guards.find(args, kwargs) if is_top_level else None
        if earlier_call is not None:
            _compat.leave_static_cache()  # `_split` does it for all other calls
            return earlier_call
        call, flat = self._split(args, kwargs, record=is_top_level)
        plan, is_new = self._plan(call, flat)
        if is_top_level:
            # A call with a new plan compiles. That takes far longer than making a guard, so its
            # guard is made at once. Other calls make one when the same arguments come again.
            guards.add(plan, flat, args, kwargs, is_new=is_new)
        return plan, flat

    def _fingerprint(self, plan: Plan, flat: Flat) -> Hashable | None:
        """Returns a key for what the function can reach now: globals, closures and arguments.

        A traced program is used again for an equal key. There are two special cases:

        * ``NOT_ASKED``, one key for all calls: a function of ``jit`` at top level keeps what its
          first trace captured, as with ``jax.jit``;
        * None: the function can reach something without a key, such as an array in a closure, so
          each call traces it.
        """
        is_top_level = _compat.trace_is_clean()
        if self._transform.keeps_captures and is_top_level:  # true for ``jit`` only
            return NOT_ASKED
        fun = self._fun
        # Transforms of several functions, such as `cond`, put them into one group.
        functions = fun.functions if isinstance(fun, FunctionGroup) else (fun,)
        # Static values in the arguments, such as an activation function, and the user's filters in
        # specs or in a policy of remat are called in the trace, so their globals count as well.
        static_values = plan.reached_from(flat.objects)
        filters = self._transform.traced_filters
        return fingerprint_of([*functions, *static_values, *filters])

    def _program(self, plan: Plan, flat: Flat) -> Program:
        """Returns the plan's program for what the function can reach now (its fingerprint)."""
        return plan.program_for(self._fingerprint(plan, flat))

    def _choose_program(self, plan: Plan, flat: Flat) -> Callable[..., Any]:
        """Returns the function of the arrays that a call executes.

        It depends on whether the call is in a trace or at top level, and on the fingerprint of what
        the function can reach: whether there is one, and whether an earlier call had it.
        """
        fingerprint = self._fingerprint(plan, flat)
        # This is asked before `program_for`, which adds a program for the fingerprint. A function
        # that counts its calls reaches another number in each of them, so each call would compile a
        # program that no later call uses.
        is_changed_since = bool(plan.programs) and fingerprint not in plan.programs
        program = plan.program_for(fingerprint)
        if not _compat.trace_is_clean():
            return program.inline
        if fingerprint is None or is_changed_since:
            return program.traced_each_time
        return program.top_level

    def _plan(self, call: SortedCall, flat: Flat) -> tuple[Plan, bool]:
        """Returns the plan for a call, and whether it is new."""
        transform = self._transform

        def make() -> Plan:
            try:
                return make_plan(
                    self._fun,
                    transform,
                    self._parameters,
                    call,
                    flat,
                    self._cache.traced,
                    graph=self._graph,
                    updates=self._updates,
                )
            except (ValueError, TypeError):
                # Specs are wrong for the arguments, perhaps because these are too few or too many.
                if not isinstance(self._fun, FunctionGroup):
                    check_takes(transform.name, self._fun, call)
                raise

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
        # Each access to a method makes a new object, so two of them are equal if they bind one
        # function to one object, like Python's bound methods.
        return self._origin == other._origin and self._bound[-1] is other._bound[-1]

    def __hash__(self) -> int:
        if self._origin is None:
            return object.__hash__(self)
        return hash((self._origin, id(self._bound[-1])))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        """Returns the function itself, as Python does for functions; a bound form is bound anew.

        The copy of a bound form is bound to a copy of its object.
        """
        if self._origin is None:
            return self
        new_origin, new_object = copy.deepcopy((self._origin, self._bound[-1]), memo)
        return new_origin.__get__(new_object)

    def __reduce__(self) -> Any:
        """Returns how pickle makes this object again: a name, or a function and its arguments.

        There are three forms:

        * a bound method: ``origin.__get__(obj)``, as Python evaluates ``obj.method``;
        * a decorated function: its name, as Python pickles functions;
        * ``g = jit(f)``: the wrapper of ``f`` with the same options. The name of ``f`` is that of
          the user's function, not of ``g``.
        """
        if self._origin is not None:
            return self._origin.__get__, (self._bound[-1],)
        # A decorator puts the wrapper in the function's place, under its name.
        module = sys.modules.get(getattr(self._fun, "__module__", None) or "")
        name = getattr(self._fun, "__qualname__", "")
        try:
            named_object: Any = functools.reduce(getattr, name.split("."), module)
        except AttributeError:  # the function is inside another one, or has no name
            named_object = None
        if named_object is self:
            return name
        wrap_again = functools.partial(type(self), self._fun, self._transform, **self._options)
        return wrap_again, ()


class Lifted(LiftedFunction[P, R]):
    """A function that takes and returns NNX objects, transformed by JAX.

    :func:`~nnx_sharding.jit` and :func:`~nnx_sharding.shard_map` make it. Call it like the function
    itself. As a method of a class it binds to its object; the bound form has all the methods below.

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

    # Private attributes, besides those of `LiftedFunction`:
    #   _trace_limit   the limit `max_traces`, with the traces that it has allowed; None without it
    #   _observer      is told of each trace: records it in the log of the function, and raises an
    #                  error beyond the limit
    #   _direct        the tuple that the call in C reads; see `__init__`

    def __init__(self, *args: Any, max_traces: int | None = None, **modes: Any):
        """Wraps a function, with a limit on traces, and the tuple that calls in C read.

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
        # The call in C reads this tuple by position: the guards that held last, the bound objects
        # (one for a method), the function that JAX may trace, and the observer of traces.
        no_bound_objects: tuple[Any, ...] = ()
        self._direct = (self._guards.recent, no_bound_objects, self._fun, self._observer)
        # Trainers count compiled programs by ``jitted_fn._cache_size()`` of what `nnx.jit` returns.
        # This is in the __dict__, not a property, because `functools.wraps` copies the __dict__,
        # for example in `nnx.cached_partial`.
        self.jitted_fn = self._plans

    def __get__(self, obj: object, objtype: type | None = None) -> Any:
        """Binds the function to an object, as a method; calls in C know the object, too."""
        bound = super().__get__(obj, objtype)
        if bound is not self:
            bound._direct = (self._direct[0], bound._bound, *self._direct[2:])
        return bound

    @_compat.api_boundary
    def _flattened(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function for arguments that the call in C does not know.

        The arguments are flattened, unless a guard knows them here. The function's changes are made
        to the caller's own objects. Errors of memory are explained at top level only, because a
        trace runs nothing.
        """
        if self._bound:  # without bound objects, `args` itself is passed on: no new tuple is made
            args = (*self._bound, *args)  # type: ignore[assignment]
        plan, flat = self._find_plan(args, kwargs)
        execute = self._choose_program(plan, flat)
        if _compat.trace_is_clean():
            try:
                return run(plan, flat, execute, self._fun, self._observer)  # type: ignore[no-any-return]
            except jax.errors.JaxRuntimeError as error:
                # Raises another error if the memory is full; otherwise it returns.
                self._explain_memory(plan, flat.leaves, error, flat.objects)
                raise
        # JAX must not use a trace that was made for other shardings of the modules' activations.
        with key_traces_by_tags(flat.objects):
            return run(plan, flat, execute, self._fun, self._observer, nested=True)  # type: ignore[no-any-return]

    __call__ = guarded(_flattened)

    @_compat.api_boundary
    def _failed(
        self, plan: Plan, leaves: Sequence[object], error: BaseException, objects: Sequence[object]
    ) -> None:
        """Explains an error of a call in C: raises another error, or returns if it knows none.

        The call in C passes its arrays and the caller's objects.
        """
        failed(plan, leaves, error)  # raises what `run` would raise for this error
        self._explain_memory(plan, leaves, error, objects)  # raises if the memory is full

    def _explain_memory(
        self, plan: Plan, leaves: Sequence[object], error: BaseException, objects: Sequence[object]
    ) -> None:
        """Raises an error that says what holds the memory, if a call ran out of it.

        Returns for any other error, which the caller then raises.
        """

        # Functions are passed, because only an error of memory traces and compiles again.
        def make_recorder() -> Recorder:
            return Recorder(self._fun, plan, Flat(plan.structure, leaves, objects), leaves)

        def compile_with(stage: jax.stages.Lowered, options: Mapping[str, Any]) -> Any:
            return stage.compile(dict(options))

        # Raises if the memory is full, or returns.
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
        leaves = as_declared(plan, flat.leaves)  # abstract if a call would move the array
        staged = self._program(plan, flat).staged
        # A program that is marked as direct runs no Python code in calls (``core/call.py``), so
        # these calls defer no signals. A call with the types of this trace has to compile, but
        # makes no trace of its own that would notice it, so the mark is removed.
        unmark_direct(staged)
        with self._tracing(flat, plan):
            traced = call_with_explained_errors(plan, leaves, staged.trace)
        # The recorder keeps the function and the objects, because a report may trace once more.
        recorder = Recorder(self._fun, plan, flat, leaves)
        return Traced(traced, self, plan, call.statics, recorder), leaves

    @_compat.api_boundary
    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Returns the output of the function with ``jax.ShapeDtypeStruct`` in place of arrays.

        Modules in the output are new, abstract ones. The caller's objects are not changed.
        """
        plan, flat = self._plan_without_running(args, kwargs)
        leaves = as_declared(plan, flat.leaves)  # abstract if a call would move the array
        with self._tracing(flat):
            staged = self._program(plan, flat).staged
            # The groups hold the types of the output arrays, one sharding for each group. The
            # outcome has no arrays, so JAX keeps it in the treedef of its result.
            *groups, outcome = call_with_explained_errors(plan, leaves, staged.eval_shape)
        # An array after the call is an output, or an input left unchanged. Types are by slot.
        types = outcome.arrays([abstract(leaf) for leaf in flat.leaves], groups)
        return _abstract_output(outcome, types, flat)

    def _jaxpr(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """Returns the jaxpr for these arguments, a function of all arrays in them.

        Arrays that the user's function captures are constants of the jaxpr, as in
        ``jax.make_jaxpr``. In the jaxpr of a stage, such as ``jit(f).trace(x).jaxpr``, they are
        inputs.
        """
        plan, flat = self._plan_without_running(args, kwargs)
        # JAX finds a trace by the identity of the function, so this has to be the function that a
        # call traces while the fingerprint of what the user's function can reach is the same.
        pure_function = plan.pure_function(self._fingerprint(plan, flat))
        # An array is abstract if a call would move it to its declared sharding: a jaxpr needs no
        # array to be moved, but its types are those of the call.
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
          plan: the plan for which the times that JAX reports in the block are recorded; None if
            they are not.
        """
        caller = Caller(
            fun=self._fun,
            objects=flat.objects,
            observer=self._observer,
            nested=not _compat.trace_is_clean(),  # whether the traces are part of another trace
            plan=plan,
        )
        with key_traces_by_tags(flat.objects), called_by(caller):
            yield

    @property
    def trace_log(self) -> TraceLog:
        """The traces of the function, for :func:`~nnx_sharding.explain_retraces`."""
        return self._observer.log

    def _cache_size(self) -> int:
        """Returns how many programs are compiled for calls, for trainers that ask ``jax.jit``."""
        return self._plans._cache_size()

    def clear_cache(self) -> None:
        """Forgets all traces and compiled programs of this function with these options.

        It also forgets what :func:`~nnx_sharding.explain_retraces` and ``max_traces`` have
        recorded.
        """
        self._plans.clear()  # clears their guards as well
        self._cache.log.clear()  # the log of all wrappers of this function
        if self._trace_limit is not None:
            self._trace_limit.reset()


def _abstract_output(outcome: Outcome, types: Sequence[object], flat: Flat) -> Any:
    """Builds what ``eval_shape`` returns: the output of a call, with types in place of arrays.

    A call would change the caller's objects. ``eval_shape`` must not, so it makes new objects
    for modules and Variables, with types in place of arrays. The output holds the caller's own
    objects in two cases: objects that no call can change, and static objects, such as functions,
    that this call has not changed.

    Args:
      outcome: what the call did. The objects of the arguments have the same indices in its
        structure, which describes all objects after the call, as in ``flat``.
      types: the type of each array after the call, by slot.
    """
    structure = outcome.structure
    static_indices = {*structure.static_indices()}
    callers_own: dict[int, object] = {}  # by index
    for index, obj in enumerate(flat.objects):
        # The structure after a call has no entry for an object that a call cannot change.
        is_fixed = structure.entries[index] is None
        is_unchanged_static = index in static_indices and index not in outcome.statics
        if is_fixed or is_unchanged_static:
            callers_own[index] = obj
    return unflatten(structure, types, existing=callers_own).root


def lift(
    cls: type[LiftedFunction[..., Any]],
    fun: Callable[..., Any],
    transform: Transform,
    graph: bool | None,
    graph_updates: bool | None,
    *,
    roles: Roles = NO_ROLES,
    jax_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Wraps a function in a :class:`LiftedFunction`: the last step of each decorator.

    A bound method of an NNX object becomes a function of that object, and is bound to the object
    again. In this way the object is an argument, whose changes are written back.

    Raises the errors and warnings that ``jax.jit`` has for such a function and options.

    Args:
      cls: the class of the wrapper.
      fun: the user's function.
      transform: the transform that is applied to the function.
      graph: the user's option; None for Flax's global flag.
      graph_updates: the user's option; None for Flax's global flag.
      roles: which arguments are static or donated.
      jax_options: options for ``jax.jit``, about which JAX may raise or warn when it decorates.
      **options: further keyword arguments of ``cls``, such as ``max_traces``.
    """
    for option in ("static_argnames", "donate_argnames"):
        names = getattr(roles, option)
        if names:  # raises if the function has no parameter of such a name
            Parameters(fun, NO_ROLES).check_names(f"{transform.name}: {option}", names)
    # The call is only for its errors and warnings: JAX knows best which functions it can transform.
    jax.jit(fun, **roles._asdict(), **(jax_options or {}))
    unbound, bound = unbind(fun)  # for a method: the function in its class, and the object
    # The global flags count when a function is decorated, not when it is called, as in Flax.
    graph, updates = _compat.graph_mode(graph, graph_updates)
    lifted: Any = cls(
        unbound,
        transform,
        graph=graph,
        updates=updates,
        roles=roles,
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
    # Only NNX objects become arguments. `jax.jit` captures other objects, and they stay captured.
    if inspect.ismethod(fun) and _compat.is_graph_object(fun.__self__):
        return fun.__func__, (fun.__self__,)
    # `model.step` is such a function, if its class has `@jit def step(self, …)`.
    if isinstance(fun, LiftedFunction) and fun._origin is not None:
        return fun._origin, fun._bound
    # The object of a partial of a method has to become an argument as well. A partial of a plain
    # function is left as it is, because `inspect.signature` and JAX understand it.
    if isinstance(fun, functools.partial):
        method, bound = unbind(fun.func)
        if bound:
            return _unbound_partial(method, fun.args, fun.keywords), bound
    return fun, ()


def _unbound_partial(
    method: Callable[..., object], args: tuple[object, ...], keywords: dict[str, object]
) -> Callable[..., Any]:
    """Returns ``functools.partial(obj.method, *args, **keywords)`` as a function of ``obj`` first.

    The signature of the function has the object, then the parameters that the partial leaves open.

    Args:
      args: the positional arguments that the partial gives, without the object.
      keywords: the keyword arguments that the partial gives, which a call may give again.
    """

    @functools.wraps(method)
    def call_method(self: object, *open_args: object, **open_keywords: object) -> Any:
        return method(self, *args, *open_args, **{**keywords, **open_keywords})

    # Static arguments and specs are found by the names and positions in this signature. None stands
    # for the object, whose parameter comes first.
    open_signature = inspect.signature(functools.partial(method, None, *args, **keywords))
    self_parameter, *_ = inspect.signature(method).parameters.values()
    call_method.__signature__ = open_signature.replace(  # type: ignore[attr-defined]
        parameters=[self_parameter, *open_signature.parameters.values()]
    )
    return call_method
