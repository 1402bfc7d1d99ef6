"""What is remembered of the traces of a function, so that each new one can be explained."""

from __future__ import annotations

import functools
import os
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from .. import _compat
from ..errors import RetraceError, RetraceWarning, report
from .compare import between, nearest
from .difference import Difference
from .limits import LIMITS, TraceLimit
from .remade import fun_name, note_function

if TYPE_CHECKING:
    from ..lifting.plan import Plan
    from ..lifting.pure import Pure

MAX_TRACES = 256
MAX_TOLD = 10  # differences in a message
RECENT = 8  # a trace is compared with so many earlier ones while it is made


class Trace(NamedTuple):
    """One trace of a function. Holds no array, and the function only weakly.

    Attributes:
      number: from 1 on.
      pure: what was traced.
      names: for each array what the user would write to reach it.
      avals: the types of the arrays.
      context: what in JAX's configuration a trace depends on.
      nested: whether it was part of another trace, as far as that can be seen.
      mark: a hash of all this.
    """

    number: int
    pure: Pure
    names: Sequence[str]
    avals: tuple[Any, ...]
    context: dict[str, Any]
    nested: bool
    mark: int

    @property
    def fun_name(self) -> str:
        """What messages call the function."""
        return fun_name(self.pure.fun())

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
      plan_key: the static arguments, and the structure of the others.
      names: for each array what the user would write to reach it.
      avals: the types of the arrays.
      shardings: what each array is committed to; None if to nothing.
    """

    after: int
    plan_key: tuple[Any, Any]
    names: Sequence[str]
    avals: tuple[Any, ...]
    shardings: tuple[Any, ...]

    def is_like(self, other: Compilation) -> bool:
        """Whether it was for arguments that differ at most in where they are."""
        return self.avals == other.avals and bool(self.plan_key == other.plan_key)


class TraceLog:
    """The latest traces and compilations of one function; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._functions: set[int] = set()
        self.clear()

    def clear(self) -> None:
        """Forgets them."""
        with self._lock:
            self.count = 0
            self._traces: deque[Trace] = deque(maxlen=MAX_TRACES)
            self._compilations: deque[Compilation] = deque(maxlen=MAX_TRACES)
            self._look_alikes = 0

    def traces(self) -> list[Trace]:
        """What is known, oldest first."""
        with self._lock:
            return list(self._traces)

    def compilations(self) -> list[Compilation]:
        """What is known, oldest first."""
        with self._lock:
            return list(self._compilations)

    def add_trace(
        self, pure: Pure, names: Sequence[str], leaves: Sequence[Any]
    ) -> Callable[[], None]:
        """Notes that ``pure`` is being traced.

        Returns:
          What forgets it again, if tracing fails.

        Raises:
          RetraceError: ``max_traces`` or ``limit_traces`` forbids it.
        """
        if any(map(_compat.is_eager_tracer, leaves)):
            return _do_nothing
        own, nested = _callers()
        avals = tuple(map(jax.typeof, leaves))
        mark = hash((avals, pure.key))
        new = Trace(0, pure, names, avals, _compat.trace_context(), nested, mark)
        earlier = self.traces()
        seen = any(new.is_like(trace) for trace in earlier)
        limits = LIMITS.get() if own is None or seen else (own, *LIMITS.get())
        with self._lock:
            spent = next((limit for limit in limits if limit.used >= limit.limit), None)
            if spent is None:
                for limit in limits:
                    limit.used += 1
                self.count += 1
                new = new._replace(number=self.count)
                self._traces.append(new)
        if spent is not None:
            raise RetraceError(_refusal(spent, new, earlier))
        forget = functools.partial(self._discard, new, limits)
        if not seen:
            try:
                self._warn_of_look_alikes(new, earlier)
                note_function(pure.fun(), mark, self._functions, strict=pure.rules.terms.strict)
            except Exception:  # strict, or warnings are errors
                forget()
                raise
        return forget

    def _discard(self, trace: Trace, limits: Sequence[TraceLimit]) -> None:
        with self._lock:
            for limit in limits:
                limit.used -= 1
            self._traces = deque((t for t in self._traces if t is not trace), MAX_TRACES)
            self.count -= trace.number == self.count

    def add_compilation(self, plan: Plan, leaves: Sequence[Any]) -> None:
        """Notes that JAX compiled the program of ``plan`` in a call with these arrays."""
        shardings = tuple(map(_commitment, leaves))
        avals = tuple(map(jax.typeof, leaves))
        key = (plan.statics, plan.structure)
        with self._lock:
            self._compilations.append(Compilation(self.count, key, plan.names, avals, shardings))

    def _warn_of_look_alikes(self, new: Trace, earlier: Sequence[Trace]) -> None:
        like = [old for old in earlier[-RECENT:] if old.avals == new.avals]
        found = next(filter(None, (_look_alikes(old, new) for old in reversed(like))), [])
        with self._lock:
            self._look_alikes += bool(found)
            is_second = bool(found) and self._look_alikes == 2
        if is_second:
            lines = "".join(f"\n  {difference.text}" for difference in found[:MAX_TOLD])
            message = f"{new.fun_name} is traced again and again for what looks the same:{lines}"
            report(RetraceWarning, message, strict=new.pure.rules.terms.strict)


def _commitment(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.committed:
        return leaf.sharding
    return None


def _do_nothing() -> None:
    pass


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


# What Python's frames tell: it costs a call nothing, and one that traces or compiles next to it.

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIFTED, _PURE, _RUN = (f"{_PACKAGE}lifting{os.sep}{name}.py" for name in ("lifted", "pure", "run"))


def _frames() -> Iterator[types.FrameType]:
    """The frames of this library, but for those of this file, from the inside out."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename.startswith(_PACKAGE) and filename != __file__:
            yield frame
        frame = frame.f_back


def _callers() -> tuple[TraceLimit | None, bool]:
    """The limit of the wrapper that is called, and whether that is part of another trace."""
    frames = _frames()
    next(frames)  # the pure function that is being traced
    limit, nested = None, False
    for frame in frames:
        filename = frame.f_code.co_filename
        if filename == _RUN and frame.f_code.co_name == "run":
            nested = any(isinstance(x, jax.core.Tracer) for x in frame.f_locals["leaves"])
        elif filename == _LIFTED and "self" in frame.f_locals:
            limit = getattr(frame.f_locals["self"], "_trace_limit", None)
            break
    return limit, nested or any(frame.f_code.co_filename == _PURE for frame in frames)


def _on_compilation(event: str, duration_secs: float, **of: Any) -> None:
    if event != "/jax/core/compile/backend_compile_duration":
        return
    frame = next(_frames(), None)
    if frame is None or (frame.f_code.co_filename, frame.f_code.co_name) != (_RUN, "run"):
        return  # not a program of ours, or one that is compiled while ours is traced
    found = frame.f_locals
    plan: Plan = found["plan"]
    # JAX also compiles what moves arguments to where they belong.
    is_own = of.get("fun_name") == f"jit({plan.fun_name})"
    if is_own and found["execute"] in (plan.program.staged, plan.program.top_level):
        plan.log.add_compilation(plan, found["leaves"])


jax.monitoring.register_event_duration_secs_listener(_on_compilation)
