"""What is remembered of the traces of a function, so that each new one can be explained."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from .. import _compat
from ..errors import RetraceError, RetraceWarning, report
from .differences import Difference, note_identities
from .trace_limits import LIMITS, TraceLimit
from .traces import between, nearest

if TYPE_CHECKING:
    from ..core.plan import Plan
    from ..core.pure import Pure
    from ..core.structure import Structure

MAX_TRACES = 256
MAX_TOLD = 10  # differences in a message
RECENT = 8  # a trace is compared with so many earlier ones while it is made


class Trace(NamedTuple):
    """One trace of a function. Holds no array, and not the function.

    Attributes:
      number: from 1 on.
      fun_name: what messages call the function.
      pure: what was traced.
      names: for each array what the user would write to reach it.
      avals: the types of the arrays.
      context: what in JAX's configuration a trace depends on.
      nested: whether it was part of another trace, as far as that can be seen.
      mark: a hash of all this.
    """

    number: int
    fun_name: str
    pure: Pure
    names: Sequence[str]
    avals: tuple[Any, ...]
    context: dict[str, Any]
    nested: bool
    mark: int

    def is_like(self, other: Trace) -> bool:
        """Whether nothing differs that a trace depends on."""
        return (
            self.mark == other.mark
            and self.context == other.context
            and self.avals == other.avals
            and self.pure.key == other.pure.key
        )


class Compilation(NamedTuple):
    """A compilation in a call of a function.

    Attributes:
      after: the number of the latest trace then.
      structure: the structure of the arguments.
      names: for each array what the user would write to reach it.
      avals: the types of the arrays.
      shardings: what each array is committed to; None if to nothing.
    """

    after: int
    structure: Structure
    names: Sequence[str]
    avals: tuple[Any, ...]
    shardings: tuple[Any, ...]

    def is_like(self, other: Compilation) -> bool:
        """Whether it was for arguments that differ at most in where they are."""
        return self.avals == other.avals and self.structure == other.structure


class TraceLog:
    """The latest traces and compilations of one function.

    Threads share it, and finalizers may call the function at any point, so it has no lock: every
    change is one operation of a deque or list.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets them."""
        self._traces: deque[Trace] = deque(maxlen=MAX_TRACES)
        self._compilations: deque[Compilation] = deque(maxlen=MAX_TRACES)
        self._look_alikes: list[None] = []

    @property
    def count(self) -> int:
        """The number of the latest trace."""
        traces = self.traces()
        return traces[-1].number if traces else 0

    def traces(self) -> list[Trace]:
        """What is known, oldest first."""
        return list(self._traces)

    def compilations(self) -> list[Compilation]:
        """What is known, oldest first."""
        return list(self._compilations)

    def add_trace(
        self,
        pure: Pure,
        name: str,
        names: Sequence[str],
        leaves: Sequence[Any],
        limit: TraceLimit | None,
        *,
        nested: bool,
    ) -> Callable[[], None]:
        """Notes that ``pure`` is being traced.

        Args:
          pure: what is traced.
          name: what messages call the function.
          names: what they call its arrays.
          leaves: the arrays.
          limit: that of the wrapper that was called.
          nested: whether this is part of another trace.

        Returns:
          What forgets it again, if tracing fails.

        Raises:
          RetraceError: ``max_traces`` or ``limit_traces`` forbids it.
          StrictError: it looks like earlier ones, and the transform is strict.
        """
        if any(map(_compat.is_eager_tracer, leaves)):
            return lambda: None
        avals = tuple(map(jax.typeof, leaves))
        mark = hash((avals, pure.key))
        new = Trace(self.count + 1, name, pure, names, avals, _compat.trace_context(), nested, mark)
        earlier = self.traces()
        seen = any(new.is_like(trace) for trace in earlier)
        limits = LIMITS.get() if limit is None or seen else (limit, *LIMITS.get())
        taken: list[TraceLimit] = []

        def forget() -> None:
            for own in taken:
                own.give_back()
            self._traces = deque((t for t in self.traces() if t is not new), MAX_TRACES)

        for own in limits:
            if not own.take():
                forget()
                raise RetraceError(_refusal(own, new, earlier))
            taken.append(own)
        self._traces.append(new)
        note_identities(pure.structure)
        if not seen:
            try:
                self._warn_of_look_alikes(new, earlier)
            except Exception:  # strict, or warnings are errors
                forget()
                raise
        return forget

    def add_compilation(self, plan: Plan, leaves: Sequence[Any]) -> None:
        """Notes that JAX compiled the program of ``plan`` in a call with these arrays."""
        shardings = tuple(map(_commitment, leaves))
        avals = tuple(map(jax.typeof, leaves))
        new = Compilation(self.count, plan.structure, plan.names, avals, shardings)
        self._compilations.append(new)

    def _warn_of_look_alikes(self, new: Trace, earlier: Sequence[Trace]) -> None:
        like = [old for old in earlier[-RECENT:] if old.avals == new.avals]
        found = next(filter(None, (_look_alikes(old, new) for old in reversed(like))), [])
        if not found:
            return
        self._look_alikes.append(None)
        if len(self._look_alikes) == 2:
            lines = "".join(f"\n  {difference.text}" for difference in found[:MAX_TOLD])
            message = f"{new.fun_name} is traced again and again for what looks the same:{lines}"
            report(RetraceWarning, message, strict=new.pure.transform.strict)


class Observer(NamedTuple):
    """Hears of the traces of one wrapped function: the log of the function, and the limit."""

    log: TraceLog
    limit: TraceLimit | None

    def traced(
        self, pure: Pure, fun: Any, leaves: Sequence[Any], *, nested: bool
    ) -> Callable[[], None]:
        """Notes a trace; returns what forgets it."""
        return self.log.add_trace(
            pure, fun_name(fun), pure.names, leaves, self.limit, nested=nested
        )

    def compiled(self, plan: Plan, leaves: Sequence[Any]) -> None:
        """Notes a compilation."""
        self.log.add_compilation(plan, leaves)


def _commitment(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.committed:
        return leaf.sharding
    return None


def _look_alikes(old: Trace, new: Trace) -> list[Difference]:
    """The differences, if all are between values that look the same; else none."""
    found: list[Difference] = []
    for difference in between(old, new):
        if not difference.look_alike:
            return []
        found.append(difference)
    return found


def _refusal(limit: TraceLimit, new: Trace, earlier: Sequence[Trace]) -> str:
    message = f"{new.fun_name} would be traced again, but {limit.option}={limit.limit} is reached."
    found = nearest(new, earlier)
    if found is None:
        return f"{message} It was not traced before."
    old, lines = found
    told = lines[:MAX_TOLD] + [f"… and {len(lines) - MAX_TOLD} more"] * (len(lines) > MAX_TOLD)
    told = told or ["nothing that we see: JAX dropped the trace, or its configuration changed"]
    return (
        f"{message} What differs from trace {old.number}, the nearest:\n  "
        + "\n  ".join(told)
        + "\nKeep this the same from call to call, or allow more traces."
    )


def fun_name(fun: Any) -> str:
    """What messages call a function."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return str(getattr(fun, "__qualname__", type(fun).__name__)).rpartition("<locals>.")[2]
