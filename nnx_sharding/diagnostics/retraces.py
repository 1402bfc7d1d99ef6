"""Records and limits the traces of each function, and explains traces and compilations.

The core tells the `Observer` of a call when JAX traces its function, and when it compiles. Traces
and compilations are recorded in the `TraceLog` of the function, without arrays and without the
user's objects. They are compared only when someone asks: each trace with the most similar earlier
one, which is the trace with the fewest differences (`nearest`). A limit refuses a trace before JAX
traces, so that the error can say what differs.

A trace depends on its *plan*, the types of the arrays (avals), the configuration of JAX, and the
closures and globals that the function *captures*. The plan has the options of the transform, the
*structure* of the arguments (the arguments without their arrays), and a spec and a name for each
array. Calls are compared by *facts*, texts by the expression for each part of the arguments
(`differences.py`): `facts_of` makes them, `compare` writes a line for each difference.

A *compilation* has the number of the latest trace before it. For example, a compilation with number
3 follows trace 3, and another compilation with number 3 follows if a call with other shardings uses
the trace again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import jax

from .. import _compat
from ..core.declared import is_committed
from ..core.functions import qualified_name_of
from ..core.plan import Plan
from ..core.transform import Transform
from ..errors import RetraceError, message, shortened
from ..specs.fitting import describe_both, describe_mesh, show
from .differences import (
    Facts,
    Side,
    arguments_of,
    compare,
    facts_of,
    facts_of_captured,
    note_identities,
    unlisted_captures,
)

MAX_COMPARED = 64  # a comparison goes through all static values of the model


class Trace(NamedTuple):
    """One trace of a function, without references to arrays or to the function."""

    number: int  # from 1, in the order of the traces of the function
    plan: Plan
    avals: tuple[Any, ...]  # the types of the arrays, by slot as ``plan.names``
    context: dict[str, Any]  # the part of JAX's configuration on which the trace depends
    key: tuple[Any, ...]  # everything on which the trace depends, except what is captured
    nested: bool  # whether it was part of another trace
    captured: Facts | None = None  # None if a change of captured values causes no trace
    # Why each call traces again; looked for only if an earlier trace has the same `key`.
    unlisted: tuple[str, ...] = ()


class Compilation(NamedTuple):
    """A compilation in a call of a function."""

    number: int  # the number of the latest trace before the compilation
    plan: Plan
    avals: tuple[Any, ...]  # the types of the arrays, by slot as ``plan.names``
    shardings: tuple[jax.sharding.Sharding | str, ...]  # "not committed" for uncommitted arrays


class _Closest(NamedTuple):
    """The earlier trace that is most similar to a new one."""

    trace: Trace
    differences: list[str]  # a line for each difference


# Why there may be no visible difference, by the kind of a `Retrace`.
_REASONS = {
    "trace": "JAX dropped the trace (jax.clear_caches), or traced the function within another one; "
    "or the function reads something that cannot be listed",
    "compilation": "other options changed, such as donation, or JAX dropped the compiled program",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Retrace:
    """Why a function was traced, or compiled without being traced.

    Attributes:
      function: the name of the function.
      kind: ``"trace"``; or ``"compilation"`` if JAX compiled an existing trace once more, for
        arguments with other shardings.
      number: the number of the trace, from 1; for a compilation, of the latest trace before it.
      compared_to: the number of the earlier trace that is most similar; None for the first.
      differences: how the two differ, each as ``model.dropout.rate: 0.1 → 0.2``. Empty for the
        first trace, and if no difference is visible.
      nested: whether it was part of another trace, as far as JAX shows that.
    """

    function: str
    kind: Literal["trace", "compilation"]
    number: int
    compared_to: int | None
    differences: tuple[str, ...]
    nested: bool = False

    def __str__(self) -> str:
        within = ", inside another trace" if self.nested else ""
        if self.compared_to is None:
            return f"  trace {self.number}{within}: the first that is recorded"
        if self.kind == "compilation":
            head = f"  compiled again without a trace, after trace {self.number}:"
        else:
            head = f"  trace {self.number}{within}, most similar to trace {self.compared_to}:"
        return "\n    ".join([head, *shown(self.differences, _REASONS[self.kind])])


class Retraces(tuple[Retrace, ...]):
    """Why functions were traced and compiled, oldest first; ``print`` shows it."""

    _text: str  # what ``print`` shows: a heading for each function, and its entries

    def __new__(cls, entries: Iterable[Retrace], text: str = "") -> Retraces:
        """A tuple of the entries that prints as ``text``."""
        new = super().__new__(cls, entries)
        new._text = text
        return new

    def __repr__(self) -> str:
        return self._text


def explain_retraces(fun: object) -> Retraces:
    """Explains why a function was traced and compiled: how each trace differs from earlier ones.

    Each trace is compared with the most similar earlier one; the latest 256 traces of a function
    are recorded. Traces belong to the function: those of all its ``jit`` and ``shard_map`` wrappers
    are listed together.

    Args:
      fun: a function returned by :func:`~nnx_sharding.jit` or :func:`~nnx_sharding.shard_map`,
        also as a method; or a class or an object with such methods.

    Returns:
      A tuple of :class:`Retrace` that prints as an explanation.

    Raises:
      TypeError: ``fun`` is none of these.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import explain_retraces, jit
      >>> @jit
      ... def predict(model, x):
      ...     return model(x)
      >>> model = nnx.Dropout(0.5, deterministic=True)
      >>> _ = predict(model, jnp.ones((32, 4)))
      >>> model.rate = 0.25
      >>> _ = predict(model, jnp.ones((32, 4)))
      >>> print(explain_retraces(predict))
      predict was traced 2 times:
        trace 1: the first that is recorded
        trace 2, most similar to trace 1:
          model.rate: 0.5 → 0.25
    """
    entries: list[Retrace] = []
    lines: list[str] = []
    for name, log in _logs(fun):
        # A compilation has the number of the trace before it. It stays behind this trace, because
        # `sorted` is stable and traces come first in the list.
        events = sorted(
            [*_traces(log, name), *_compilations(log, name)], key=operator.attrgetter("number")
        )
        recorded = sum(event.kind == "trace" for event in events)
        times = "once" if log.count == 1 else f"{log.count} times"
        rest = "" if recorded == log.count else f", of which the last {recorded} are recorded"
        lines.append(f"{name} was traced {times}{rest}:" if events else f"{name} was not traced.")
        lines += map(str, events)
        entries += events
    return Retraces(entries, "\n".join(lines))


def _logs(fun: object) -> list[tuple[str, TraceLog]]:
    """Returns (name, log) of a transformed function, or of each transformed method of a class.

    For another object, the methods of its class are returned.

    Raises:
      TypeError: there is no transformed function.
    """

    def has_log(value: object) -> bool:
        # The class is asked, so that no `__getattr__` of the user runs.
        return hasattr(type(value), "trace_log")

    values = [fun]
    if not has_log(_unwrapped(fun)):
        owner = fun if isinstance(fun, type) else type(fun)
        members = (member for _, member in inspect.getmembers_static(owner))
        # While a module is traced, its methods are replaced by descriptors that intercept their
        # calls (`activations/intercept.py`). A descriptor has the user's method as ``original``.
        values = [getattr(member, "original", member) for member in members]
    lifted = [value for value in map(_unwrapped, values) if has_log(value)]
    if not lifted:
        raise TypeError(
            f"explain_retraces takes a function returned by nnx_sharding.jit or shard_map, or an "
            f"object with such methods, got {show(fun)} of type {type(fun).__name__}. Pass the "
            "transformed function, not the original one: only it records its traces."
        )
    return [(qualified_name_of(function.__wrapped__), function.trace_log) for function in lifted]


def _unwrapped(fun: object) -> Any:
    """Returns the function within partials, methods and static methods."""
    while isinstance(fun, functools.partial | types.MethodType | staticmethod | classmethod):
        fun = fun.func if isinstance(fun, functools.partial) else fun.__func__
    return fun


def _traces(log: TraceLog, name: str) -> Iterator[Retrace]:
    """Yields the traces of a function, each compared with the most similar one before it.

    ``name`` is the name of the function.
    """
    traces = log.traces()
    cache: dict[Side, Facts] = {}  # the facts of arguments, which several traces may share
    for index, trace in enumerate(traces):
        closest = nearest(trace, traces[:index], cache)
        yield Retrace(
            function=name,
            kind="trace",
            number=trace.number,
            compared_to=None if closest is None else closest.trace.number,
            differences=() if closest is None else tuple(closest.differences),
            nested=trace.nested,
        )


def _compilations(log: TraceLog, name: str) -> Iterator[Retrace]:
    """Yields the compilations of traces that JAX had already compiled before.

    Each entry says which arrays have other shardings than in the most similar earlier compilation.
    ``name`` is the name of the function.
    """
    traces = log.traces()
    compilations = list(log.compilations)
    for index, new in enumerate(compilations):
        same_trace = [
            old
            for old in compilations[:index]
            if old.avals == new.avals and old.plan.structure == new.plan.structure
        ]
        if not same_trace:  # The first compilation of a trace needs no explanation.
            continue
        # If the function was traced for this structure since the last compilation, `_traces`
        # explains it.
        last = same_trace[-1].number
        traces_since = (trace for trace in traces if last < trace.number <= new.number)
        if any(trace.plan.structure == new.plan.structure for trace in traces_since):
            continue
        # The latest of equally similar compilations is taken, because `min` returns the first of
        # equals.
        latest_first = reversed(same_trace)
        changes = min((_reshardings(old, new) for old in latest_first), key=len)
        yield Retrace(
            function=name,
            kind="compilation",
            number=new.number,
            compared_to=new.number,  # a compilation has no number of its own
            differences=tuple(changes),
        )


def _reshardings(old: Compilation, new: Compilation) -> list[str]:
    """Lists the arrays that two compilations of a trace have in different shardings.

    For example, ``model.kernel: sharding P('data') → P('model')``.
    """
    triples = zip(new.plan.names, old.shardings, new.shardings, strict=True)
    return [f"{name}: sharding {_both(a, b)}" for name, a, b in triples if a != b]


def shown(differences: Sequence[str], reason: str) -> list[str]:
    """Returns the differences that fit in a message; if there are none, a reason for that."""
    return shortened(differences) or [f"no visible difference: {reason}"]


def nearest(new: Trace, earlier: Sequence[Trace], cache: dict[Side, Facts]) -> _Closest | None:
    """Returns the earlier trace with the fewest differences from a new one, and these differences.

    Args:
      new: the new trace.
      earlier: all traces before it; only the latest are compared.
      cache: the facts of traces that were compared before, by the signature and the structure of
        their arguments; new ones are added.

    Returns:
      The trace and a line for each difference. None if there is no earlier trace.
    """
    # The latest traces come first, because training loops change one thing at a time.
    candidates = [*reversed(earlier[-MAX_COMPARED:])]
    # The keys are compared only if the hashes of the structures are equal, because to compare the
    # keys of large models takes long. A structure keeps its hash.
    alike = (old for old in candidates if hash(old.plan.structure) == hash(new.plan.structure))
    with_same_key = [old for old in alike if old.key == new.key]
    if with_same_key:  # If the keys are equal, only captured values can differ.
        compared = [_Closest(old, _captured(old, new)) for old in with_same_key]
        return min(compared, key=lambda closest: len(closest.differences))
    best: _Closest | None = None
    for old in candidates:
        lines = _differences(old, new, cache)
        if best is None or len(lines) < len(best.differences):
            best = _Closest(old, lines)
        if len(best.differences) == 1:  # No other trace can be more similar.
            break
    return best


def _differences(old: Trace, new: Trace, cache: dict[Side, Facts]) -> list[str]:
    """Lists how two traces with different keys differ, with one line at least.

    ``cache`` is as in `nearest`.
    """
    lines = list[str]()
    if old.plan.structure != new.plan.structure:
        lines += compare(_facts(old, cache), _facts(new, cache))
    # The texts say how the function was called: ``(model, x)`` → ``(model, x, train=)``.
    before, after = arguments_of(old.plan.signature), arguments_of(new.plan.signature)
    if before != after:
        lines.append(f"arguments {before} → {after}")
    lines += [*_arrays(old, new), *_options(old, new), *_captured(old, new)]
    return lines or ["the structure of the arguments, in a part without a name"]


def _facts(trace: Trace, cache: dict[Side, Facts]) -> Facts:
    """Returns the facts about the arguments of a trace, and keeps them in the cache."""
    # Several traces may have this key, because arrays of other shapes change neither part of it.
    side = trace.plan.signature, trace.plan.structure
    if side not in cache:
        cache[side] = facts_of(*side)
    return cache[side]


def _captured(old: Trace, new: Trace) -> list[str]:
    """Lists how the captured values of two traces differ.

    If no difference is visible, the result says which captured values make each call trace. It is
    empty if a change of captured values causes no trace.
    """
    if old.captured is None or new.captured is None:
        return []
    return compare(old.captured, new.captured) or list(new.unlisted)


def _arrays(old: Trace, new: Trace) -> Iterator[str]:
    """Yields a line for each array of both traces whose shape, dtype or sharding differs.

    A line is ``x: shape (32,) → (31,), dtype float32 → int32``. An array that only one trace has is
    left out, because facts describe the difference of the structures.
    """
    before = dict(zip(old.plan.names, old.avals, strict=True))
    shape = "shape of each shard" if new.plan.transform.name == "shard_map" else "shape"
    # The attributes of a type, with their names in the line.
    labels = {"shape": shape, "dtype": "dtype", "weak_type": "weak_type"}
    for name, aval in zip(new.plan.names, new.avals, strict=True):
        old_aval = before.get(name, aval)  # An array that only the new trace has counts as equal.
        if old_aval == aval:
            continue
        parts = []
        for attribute, label in labels.items():
            old_value = getattr(old_aval, attribute, None)
            new_value = getattr(aval, attribute, None)
            if old_value != new_value:
                parts.append(f"{label} {old_value} → {new_value}")
        # The sharding of a type is listed only if nothing else explains the difference, because it
        # names axes for each dimension and so changes with the shape.
        if not parts:
            old_sharding = getattr(old_aval, "sharding", None)
            new_sharding = getattr(aval, "sharding", None)
            if old_sharding != new_sharding:
                parts = [f"sharding {_both(old_sharding, new_sharding)}"]
            else:
                parts = [f"type {old_aval} → {aval}"]
        yield f"{name}: {', '.join(parts)}"


def _options(old: Trace, new: Trace) -> Iterator[str]:
    """Yields a line for each option of the transform or of JAX that differs."""
    yield from _transforms(old.plan.transform, new.plan.transform)
    before = _conditions(old)
    for label, value in _conditions(new).items():
        if before.get(label, value) != value:
            yield f"{label} {_both(before[label], value)}"


def _transforms(old: Transform, new: Transform) -> Iterator[str]:
    """Yields a line for each field of the transform that differs and on which traces depend.

    The ``trace_key`` of a transform is computed from its fields. The parts of the key have no
    names, so each field is changed alone, to see whether the key changes with it.
    """
    if old.name != new.name:
        yield f"{old.name} → {new.name}"
        return
    if old.trace_key == new.trace_key:
        return
    for field in dataclasses.fields(new):
        before, after = getattr(old, field.name), getattr(new, field.name)
        changed: Any = dataclasses.replace(old, **{field.name: after})
        if changed.trace_key != old.trace_key:
            # `jit` keeps the user's ``out_shardings`` in the field ``out_specs``.
            is_out_shardings = new.name == "jit" and field.name == "out_specs"
            option = "out_shardings" if is_out_shardings else field.name
            yield f"{option}: {_both(before, after)}"


def _conditions(trace: Trace) -> dict[str, Any]:
    """Returns what a trace depends on besides the arguments and the transform, by label.

    Labels are written in front of the two values: ``graph: True → False``.
    """
    plan, names, signature = trace.plan, trace.plan.names, trace.plan.signature
    arguments = (*signature.names, *signature.keywords)  # passed by position, and by name
    # Donated arrays are not listed, because they follow from the transform and from the names and
    # the structure of the arguments, which are compared already.
    return {
        **{f"argument {name}: static": name in signature.static_names for name in arguments},
        **{f"spec of {names[slot]}:": spec for slot, spec in plan.object_specs.items()},
        "graph:": plan.graph,
        "graph_updates:": plan.updates,
        **{f"{label}:": value for label, value in trace.context.items()},
    }


def _both(old: Any, new: Any) -> str:
    """Writes two different values in the shortest form that shows the difference."""
    if isinstance(old, jax.sharding.Sharding) or isinstance(new, jax.sharding.Sharding):
        return " → ".join(describe_both(old, new))
    # None is the mesh of a transform that has none.
    are_meshes = all(value is None or hasattr(value, "axis_types") for value in (old, new))
    if are_meshes:
        before, after = describe_mesh(old), describe_mesh(new)
        if before != after:
            return f"{before} → {after}"
    return f"{show(old)} → {show(new)}"


MAX_TRACES = 256  # recorded for each function


class TraceLog:
    """The latest traces and compilations of one function.

    Attributes:
      by_number: number → trace, for the latest `MAX_TRACES` traces. A trace that failed is removed.
      compilations: the latest `MAX_TRACES` compilations, oldest first.
    """

    # There is no lock, because finalizers may call the function at any point. It is safe without,
    # because every change is a single operation of a dict or deque.

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drops all traces and compilations; numbers start from 1 again."""
        self.by_number: dict[int, Trace] = {}
        self.compilations: deque[Compilation] = deque(maxlen=MAX_TRACES)

    @property
    def count(self) -> int:
        """The number of the latest trace."""
        return max(self.by_number, default=0)  # numbers of dropped traces are not given again

    def traces(self) -> list[Trace]:
        """The recorded traces, by number."""
        return sorted(self.by_number.values(), key=operator.attrgetter("number"))

    def add(self, new: Trace) -> int:
        """Records a trace, and drops the oldest ones beyond `MAX_TRACES`.

        Returns:
          The number of the trace. It is larger than ``new.number`` if another thread has recorded a
          trace with that number in the meantime.
        """
        # `setdefault` returns the trace of the other thread if there is one.
        while self.by_number.setdefault(new.number, new) is not new:
            new = new._replace(number=new.number + 1)
        # The number of traces is limited because each of them holds a structure.
        while len(self.by_number) > MAX_TRACES:
            # The default is for a trace that another thread has dropped in the meantime.
            self.by_number.pop(min(self.by_number), None)
        return new.number


class Observer(NamedTuple):
    """Records the traces of one wrapped function in the log of the function, up to its limit.

    The core calls :meth:`traced` when a trace begins, before the user's function runs in it, and
    :meth:`compiled` after JAX has compiled a program in a call.
    """

    log: TraceLog  # the log of the user's function, which all of its wrappers share
    limit: TraceLimit | None  # ``max_traces`` of this wrapper; None without a limit

    def traced(
        self, plan: Plan, fun: Callable[..., Any], leaves: Sequence[object], *, nested: bool
    ) -> Callable[[], None]:
        """Records that a function is traced, and returns a function that removes the record.

        Args:
          plan: the plan of the call.
          fun: the user's function.
          leaves: the tracers of its arrays.
          nested: whether it is part of another trace.

        Returns:
          A function to call if the trace fails: it drops the record, and gives back what the trace
          took of limits.

        Raises:
          RetraceError: a limit on traces forbids it.
        """
        # Eager tracers hold shards while a `shard_map` of JAX runs uncompiled, which is no trace.
        if any(map(_compat.is_eager_tracer, leaves)):
            return lambda: None
        earlier = self.log.traces()
        avals = tuple(map(jax.typeof, leaves))
        context = _compat.trace_context()
        key = context, plan.trace_key, avals
        is_known = any(key == trace.key for trace in earlier)
        captured: Facts | None = None
        unlisted: tuple[str, ...] = ()
        # A transform that keeps captures uses the captured values of the first trace in all calls.
        # Their changes then cause no trace, unless the trace is part of another one.
        if nested or not plan.transform.keeps_captures:
            captured = facts_of_captured(fun)
            if is_known:  # The arguments are equal, so captured values may be the reason.
                unlisted = tuple(unlisted_captures(fun))
        new = Trace(
            number=self.log.count + 1,
            plan=plan,
            avals=avals,
            context=context,
            key=key,
            nested=nested,
            captured=captured,
            unlisted=unlisted,
        )
        # A new trace for the same arguments, as after `jax.clear_caches()`, does not count for the
        # function's own limit.
        own_limits = () if self.limit is None or is_known else (self.limit,)
        limits = (*own_limits, *LIMITS.get())
        # This takes a trace of each limit, or returns a limit that has none left.
        refused_by = _take_all(limits)
        if refused_by is not None:
            raise RetraceError(_refusal(refused_by, qualified_name_of(fun), new, earlier))
        # The number is not `new.number` if another thread has added a trace in the meantime.
        number = self.log.add(new)
        # The texts of static objects are written now, because the objects may be gone when someone
        # asks.
        note_identities(plan.structure)

        def forget() -> None:
            """Removes the record of the trace, and gives back what it took of limits."""
            self.log.by_number.pop(number, None)
            for limit in limits:
                limit.give_back()

        return forget

    def compiled(self, plan: Plan, leaves: Sequence[Any]) -> None:
        """Records that JAX compiled the program of ``plan`` in a call with these arrays."""
        shardings = tuple(x.sharding if is_committed(x) else "not committed" for x in leaves)
        avals = tuple(map(jax.typeof, leaves))
        # The plan is recorded without its programs, because these have to go when the plan is
        # dropped, and the log stays.
        plan = dataclasses.replace(plan, programs={}, reported={})
        self.log.compilations.append(Compilation(self.log.count, plan, avals, shardings))


def _refusal(limit: TraceLimit, name: str, new: Trace, earlier: Sequence[Trace]) -> str:
    """Returns the text of the error for a refused trace, with its differences from the nearest."""
    option = f"{limit.option}={limit.limit}"
    closest = nearest(new, earlier, cache={})
    if closest is None:
        return f"{name} would be traced for the first time, which {option} does not allow."
    reason = "JAX dropped the trace, or its configuration changed"  # shown if nothing differs
    lines = shown(closest.differences, reason)
    return message(
        f"{name} would be traced again, which {option} does not allow. Differences from the most "
        f"similar earlier trace, number {closest.trace.number} of explain_retraces:",
        [f"  {line}" for line in lines],
        "Keep them the same from call to call, or allow more traces.",
    )


class TraceLimit:
    """The number of traces that one wrapped function, or one block of code, may have.

    Attributes:
      limit: the number of traces that are allowed.
      option: the option or function that the user gave the limit to, for messages.
      _used: a list with an item for each trace that was taken and not given back.
    """

    def __init__(self, limit: Any, option: str, least: int):
        """Checks a limit that the user gave.

        Args:
          limit: how many traces are allowed.
          option: the option or function that it was given to, for messages.
          least: the smallest limit that this allows: 0 for a block, 1 for a function.
        """
        try:
            self.limit = operator.index(limit)
        except TypeError:
            raise TypeError(f"{option} must be a number of traces, got {limit!r}.") from None
        if self.limit < least or isinstance(limit, bool):
            raise ValueError(f"{option} must be a number of traces >= {least}, got {limit!r}.")
        self.option = option
        # This is a list and no number, because threads share a limit: another thread can run
        # between reading and writing a number, but not within ``append``.
        self._used: list[None] = []

    def take(self) -> bool:
        """Uses one trace and returns True; returns False if no trace is left."""
        self._used.append(None)
        if len(self._used) <= self.limit:
            return True
        self.give_back()
        return False

    def give_back(self) -> None:
        """Makes one trace available again."""
        del self._used[-1:]  # a slice, because the list may be empty after a reset

    def reset(self) -> None:
        """Makes all traces available again."""
        self._used.clear()


def _take_all(limits: Sequence[TraceLimit]) -> TraceLimit | None:
    """Takes a trace of each limit, and returns None.

    If a limit has no trace left, none is taken, and that limit is returned.
    """
    for index, limit in enumerate(limits):
        if not limit.take():
            for taken_before in limits[:index]:
                taken_before.give_back()
            return limit
    return None


# The limits of the blocks around the current code (`limit_traces`), the outermost first.
LIMITS: ContextVar[tuple[TraceLimit, ...]] = ContextVar("limits", default=())


def limit_traces(limit: int) -> contextlib.AbstractContextManager[None]:
    """Allows at most ``limit`` traces in a block of code, of all functions of this library.

    Around a loop whose first step has run, ``limit_traces(0)`` turns a retrace into an error that
    says what changed. It counts the traces of the current thread.

    Args:
      limit: how many traces are allowed in total, 0 or more.

    Returns:
      A context manager. Blocks may be nested; each one counts for itself.

    Raises:
      TypeError: ``limit`` is not an integer.
      ValueError: it is negative.
      RetraceError: in the block, at a call that would exceed the limit. The function does not run,
        and no object of the caller changes.

    Example:
      >>> import jax.numpy as jnp
      >>> from nnx_sharding import jit, limit_traces
      >>> double = jit(lambda x: 2 * x)
      >>> batches = [jnp.ones(32), jnp.ones(32), jnp.ones(31)]
      >>> _ = double(batches[0])
      >>> with limit_traces(0):
      ...     for x in batches:
      ...         _ = double(x)
      Traceback (most recent call last):
      ...
      nnx_sharding.errors.RetraceError: ...
        x: shape (32,) → (31,)
      ...
    """
    return _limited(TraceLimit(limit, "limit_traces", least=0))


# This is a function of its own, so that `limit_traces` raises errors about its argument before
# `with` enters the block.
@contextlib.contextmanager
def _limited(limit: TraceLimit) -> Iterator[None]:
    """Adds a limit to the limits of the current thread for the time of a block."""
    token = LIMITS.set((*LIMITS.get(), limit))
    try:
        yield
    finally:
        LIMITS.reset(token)
