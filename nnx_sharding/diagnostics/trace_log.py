"""The traces of each function, and limits on how many there may be."""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax

from .. import _compat
from ..core.placing import is_committed
from ..core.plan import Plan
from ..core.pure import Pure
from ..errors import RetraceError, message
from .differences import note_identities
from .retraces import Compilation, Trace, fun_name, nearest, shown

MAX_TRACES = 256  # recorded for each function


class TraceLog:
    """The latest traces and compilations of one function."""

    # Without a lock, because finalizers may call the function at any point: every change is a
    # single operation of a dict or deque.

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drops all of them; numbers start from 1 again."""
        self.by_number: dict[int, Trace] = {}
        self.compilations: deque[Compilation] = deque(maxlen=MAX_TRACES)

    @property
    def count(self) -> int:
        """The number of the latest trace."""
        return max(self.by_number, default=0)

    def traces(self) -> list[Trace]:
        """The recorded traces, by number."""
        return sorted(self.by_number.values(), key=operator.attrgetter("number"))


class Observer(NamedTuple):
    """Records the traces of one wrapped function in the log of the function, up to its limit."""

    log: TraceLog
    limit: TraceLimit | None

    def traced(
        self, pure: Pure, fun: Any, leaves: Sequence[Any], *, nested: bool
    ) -> Callable[[], None]:
        """Records a trace, unless a limit forbids it; returns what removes the record."""
        if any(map(_compat.is_eager_tracer, leaves)):
            return lambda: None
        traces, earlier = self.log.by_number, self.log.traces()
        avals, context = tuple(map(jax.typeof, leaves)), _compat.trace_context()
        new = Trace(self.log.count + 1, pure, avals, context, (context, pure.key, avals), nested)
        is_known = any(new.key == trace.key for trace in earlier)
        limits = LIMITS.get()
        if self.limit is not None and not is_known:
            limits = (self.limit, *limits)
        for index, limit in enumerate(limits):
            if not limit.take():
                for other in limits[:index]:
                    other.give_back()
                raise RetraceError(_refusal(limit, fun_name(fun), new, earlier))
        # Another thread may have taken the number.
        while traces.setdefault(new.number, new) is not new:
            new = new._replace(number=new.number + 1)
        while len(traces) > MAX_TRACES:
            traces.pop(min(traces), None)
        note_identities(pure.structure)

        def forget() -> None:
            traces.pop(new.number, None)
            for limit in limits:
                limit.give_back()

        return forget

    def compiled(self, plan: Plan, leaves: Sequence[Any]) -> None:
        """Records that JAX compiled the program of ``plan`` in a call with these arrays."""
        shardings = tuple(x.sharding if is_committed(x) else "not committed" for x in leaves)
        avals = tuple(map(jax.typeof, leaves))
        self.log.compilations.append(
            Compilation(self.log.count, plan.structure, plan.names, avals, shardings)
        )


def _refusal(limit: TraceLimit, name: str, new: Trace, earlier: Sequence[Trace]) -> str:
    option = f"{limit.option}={limit.limit}"
    closest = nearest(new, earlier, {})
    if closest is None:
        return f"{name} would be traced for the first time, which {option} does not allow."
    old, differences = closest
    lines = shown(differences, "JAX dropped the trace, or its configuration changed")
    return message(
        f"{name} would be traced again, which {option} does not allow. Differences from trace "
        f"{old.number}, the most similar one:",
        [f"  {line}" for line in lines],
        "Keep them the same from call to call, or allow more traces.",
    )


class TraceLimit:
    """The number of traces that one wrapped function, or one block of code, may have."""

    def __init__(self, limit: Any, option: str, least: int):
        try:
            self.limit = operator.index(limit)
        except TypeError:
            raise TypeError(f"{option} must be a number of traces, got {limit!r}.") from None
        if self.limit < least or isinstance(limit, bool):
            raise ValueError(f"{option} must be a number of traces >= {least}, got {limit!r}.")
        self.option = option
        self._used: list[None] = []  # a list, because its methods cannot be interrupted

    def take(self) -> bool:
        """Uses one trace, if there is one left."""
        self._used.append(None)
        if len(self._used) <= self.limit:
            return True
        self.give_back()
        return False

    def give_back(self) -> None:
        """Makes one trace available again."""
        del self._used[-1:]  # may be empty after a reset

    def reset(self) -> None:
        """Makes all traces available again."""
        self._used.clear()


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
    return _limited(TraceLimit(limit, "limit_traces", 0))


@contextlib.contextmanager
def _limited(limit: TraceLimit) -> Iterator[None]:
    token = LIMITS.set((*LIMITS.get(), limit))
    try:
        yield
    finally:
        LIMITS.reset(token)
