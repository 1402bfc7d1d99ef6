"""Explains why a function was traced or compiled again."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from .differences import Facts, Side, show
from .trace_log import TraceLog, fun_name, shown
from .traces import nearest

_REASONS = {
    "trace": "JAX dropped the trace (jax.clear_caches), or traced the function within another one",
    "compilation": "other options changed, such as donation, or JAX dropped the compiled program",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Retrace:
    """Why a function was traced, or compiled without being traced.

    Attributes:
      function: the name of the function.
      kind: ``"trace"``; or ``"compilation"`` if JAX compiled an existing trace once more, for
        arguments with other shardings.
      number: the number of the trace, from 1 on; for a compilation, of the latest trace before it.
      compared_to: the number of the earlier trace that is most similar; None for the first.
      differences: in what the two differ, each as ``model.dropout.rate: 0.1 → 0.2``. Empty for
        the first trace, and if there is no visible difference.
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
        head = f"  trace {self.number}{within}, most similar to trace {self.compared_to}:"
        if self.kind == "compilation":
            head = f"  compiled again without a trace, after trace {self.number}:"
        return "\n    ".join([head, *shown(self.differences, _REASONS[self.kind])])


class Retraces(tuple[Retrace, ...]):
    """Why functions were traced and compiled, oldest first; ``print`` shows it."""

    _text: str

    def __new__(cls, entries: Iterable[Retrace], text: str = "") -> Retraces:
        """A tuple of the entries that prints as ``text``."""
        new = super().__new__(cls, entries)
        new._text = text
        return new

    def __repr__(self) -> str:
        return self._text


def explain_retraces(fun: Any) -> Retraces:
    """Explains why a function was traced and compiled, each time: what differed from before.

    Each trace is compared with the most similar earlier one. That costs time here only; the
    latest 256 traces of a function are recorded. Traces belong to the function: those of all its
    ``jit`` and ``shard_map`` are listed together.

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
      >>> _ = predict(model, jnp.ones((31, 4)))
      >>> model.rate = 0.25
      >>> _ = predict(model, jnp.ones((31, 4)))
      >>> print(explain_retraces(predict))
      predict was traced 3 times:
        trace 1: the first that is recorded
        trace 2, most similar to trace 1:
          x: shape (32, 4) → (31, 4)
        trace 3, most similar to trace 2:
          model.rate: 0.5 → 0.25
    """
    entries: list[Retrace] = []
    lines: list[str] = []
    for name, log in _logs(fun):
        # A compilation comes after the trace that was the latest then.
        of_fun = sorted([*_traces(log, name), *_compilations(log, name)], key=lambda x: x.number)
        recorded = sum(entry.kind == "trace" for entry in of_fun)
        times = "once" if log.count == 1 else f"{log.count} times"
        rest = "" if recorded == log.count else f", of which the last {recorded} are recorded"
        lines.append(f"{name} was traced {times}{rest}:" if of_fun else f"{name} was not traced.")
        lines += map(str, of_fun)
        entries += of_fun
    return Retraces(entries, "\n".join(lines))


def _logs(fun: Any) -> list[tuple[str, TraceLog]]:
    """The names and logs of a transformed function, or of those that a class or object has."""
    values = [fun]
    if _log_of(fun) is None:
        owner = fun if isinstance(fun, type) else type(fun)
        values = [value for _, value in inspect.getmembers_static(owner)]
    logs = [(fun_name(_unwrapped(x).__wrapped__), log) for x in values if (log := _log_of(x))]
    if not logs:
        raise TypeError(
            f"explain_retraces takes a function returned by nnx_sharding.jit or shard_map, or an "
            f"object with such methods, got {show(fun)} of type {type(fun).__name__}. Pass the "
            "transformed function, not the original one: only it records its traces."
        )
    return logs


def _log_of(fun: Any) -> TraceLog | None:
    fun = _unwrapped(fun)
    log = fun.trace_log if hasattr(type(fun), "trace_log") else None
    return log if isinstance(log, TraceLog) else None


def _unwrapped(fun: Any) -> Any:
    while isinstance(fun, functools.partial | types.MethodType | staticmethod | classmethod):
        fun = fun.func if isinstance(fun, functools.partial) else fun.__func__
    return fun


def _traces(log: TraceLog, name: str) -> Iterator[Retrace]:
    traces, cache = log.traces(), dict[Side, Facts]()
    for index, trace in enumerate(traces):
        closest = nearest(trace, traces[:index], cache)
        number = None if closest is None else closest[0].number
        differences = () if closest is None else tuple(closest[1])
        yield Retrace(name, "trace", trace.number, number, differences, trace.nested)


def _compilations(log: TraceLog, name: str) -> Iterator[Retrace]:
    """Those that no trace explains: JAX had compiled the same trace before."""
    traces, compilations = log.traces(), log.compilations()
    for index, new in enumerate(compilations):
        earlier = [old for old in compilations[:index] if old.is_like(new)]
        if not earlier:
            continue
        since = (t for t in traces if earlier[-1].number < t.number <= new.number)
        if any(t.pure.structure == new.structure for t in since):
            continue
        changes = min((new.changes_from(old) for old in reversed(earlier)), key=len)
        yield Retrace(name, "compilation", new.number, new.number, tuple(changes))
