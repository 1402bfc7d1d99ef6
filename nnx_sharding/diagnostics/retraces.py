"""Why a function was traced or compiled again: what differed from the time before."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

import jax

from ..lifted import Lifted
from .differences import show
from .trace_log import MAX_TOLD, Compilation, TraceLog, fun_name
from .traces import nearest

_NO_DIFFERENCE = {
    "trace": "nothing that we see: JAX dropped the trace (jax.clear_caches), or traces the "
    "function anew within another one",
    "compilation": "nothing in the arguments: other options, such as donation, or JAX dropped what "
    "it had compiled",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Retrace:
    """Why a function was traced, or compiled without being traced.

    Attributes:
      function: the name of the function.
      kind: ``"trace"``; or ``"compilation"``, if a trace that was there already was compiled once
        more, for arguments that lie elsewhere.
      number: of the trace, from 1 on. That of a compilation is the latest one at that time.
      compared_to: the number of the earlier trace that is most like this one; None for the first.
      differences: in what the two differ, each as ``model.dropout.rate: 0.1 → 0.2``. Empty for
        the first trace, and if nothing differs that can be told.
      nested: whether it was part of another trace, as far as that can be seen.
    """

    function: str
    kind: Literal["trace", "compilation"]
    number: int
    compared_to: int | None
    differences: tuple[str, ...]
    nested: bool = False

    def __str__(self) -> str:
        within = ", inside of another trace" if self.nested else ""
        if self.compared_to is None:
            return f"  trace {self.number}{within}: the first that is known"
        if self.kind == "trace":
            head = f"  trace {self.number}{within}, most like trace {self.compared_to}:"
        else:
            head = f"  compiled again without a trace, after trace {self.number}:"
        told = list(self.differences[:MAX_TOLD]) or [_NO_DIFFERENCE[self.kind]]
        if len(self.differences) > MAX_TOLD:
            told.append(f"… and {len(self.differences) - MAX_TOLD} more")
        return "\n    ".join([head, *told])


class Retraces(Sequence[Retrace]):
    """Why functions were traced and compiled, oldest first; ``print`` shows it."""

    def __init__(self, groups: Sequence[tuple[str, Sequence[Retrace]]]):
        self._entries = tuple(entry for _, entries in groups for entry in entries)
        self._text = "\n".join("\n".join([head, *map(str, own)]) for head, own in groups)

    @overload
    def __getitem__(self, index: int) -> Retrace: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Retrace, ...]: ...

    def __getitem__(self, index: int | slice) -> Retrace | tuple[Retrace, ...]:
        return self._entries[index]

    def __len__(self) -> int:
        return len(self._entries)

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__


def explain_retraces(fun: Any) -> Retraces:
    """Tells why a function was traced and compiled, each time: what differed from before.

    Each trace is compared with the earlier one that is most like it. That costs time only here
    and where a trace is made; the latest 256 of a function are remembered. Traces belong to the
    function, so those of all its ``jit`` and ``shard_map`` are told together.

    Args:
      fun: what :func:`~nnx_sharding.jit` or :func:`~nnx_sharding.shard_map` returned, also as a
        method; or a class or an object that has such methods.

    Returns:
      A sequence of :class:`Retrace`, to be printed or looked through.

    Raises:
      TypeError: it is none of these.

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
        trace 1: the first that is known
        trace 2, most like trace 1:
          x: shape (32, 4) → (31, 4)
        trace 3, most like trace 2:
          model.rate: 0.5 → 0.25
    """
    groups = []
    for lifted in _lifted(fun):
        log, name = lifted._cache.log, fun_name(lifted._fun)
        own = [*_traces(log, name), *_compilations(log, name)]
        # A compilation belongs behind the trace that was the latest then.
        own.sort(key=lambda entry: (entry.number, entry.kind == "compilation"))
        known = sum(entry.kind == "trace" for entry in own)
        times = "once" if log.count == 1 else f"{log.count} times"
        rest = "" if known == log.count else f", of which the last {known} are known"
        header = f"{name} was traced {times}{rest}:" if own else f"{name} was not traced."
        groups.append((header, own))
    return Retraces(groups)


def _lifted(fun: Any) -> list[Lifted[..., Any]]:
    found = _unwrapped(fun)
    if isinstance(found, Lifted):
        return [found]
    own = fun if isinstance(fun, type) else type(fun)
    names = dict.fromkeys(itertools.chain.from_iterable(map(vars, reversed(own.__mro__))))
    # By vars: properties must not run.
    attributes = (
        next(vars(base)[name] for base in own.__mro__ if name in vars(base)) for name in names
    )
    methods = [x for x in map(_unwrapped, attributes) if isinstance(x, Lifted)]
    if not methods:
        raise TypeError(
            f"explain_retraces takes what jit or shard_map of nnx_sharding returned, or an object "
            f"with such methods, not {show(fun)} of type {type(fun).__name__}. Only they remember "
            "their traces: pass the wrapped function, not the one that was wrapped."
        )
    return methods


def _unwrapped(fun: Any) -> Any:
    while isinstance(fun, functools.partial | types.MethodType | staticmethod | classmethod):
        fun = fun.func if isinstance(fun, functools.partial) else fun.__func__
    return fun


def _traces(log: TraceLog, name: str) -> Iterator[Retrace]:
    traces = log.traces()
    for index, trace in enumerate(traces):
        found = nearest(trace, traces[:index])
        number = None if found is None else found[0].number
        differences = () if found is None else tuple(found[1])
        yield Retrace(name, "trace", trace.number, number, differences, trace.nested)


def _compilations(log: TraceLog, name: str) -> Iterator[Retrace]:
    """Those that no trace explains: JAX had compiled the same trace before."""
    traces, compilations = log.traces(), log.compilations()
    for index, new in enumerate(compilations):
        earlier = [old for old in compilations[:index] if old.is_like(new)]
        if not earlier:
            continue
        since = (t for t in traces if earlier[-1].after < t.number <= new.after)
        if any(t.pure.structure == new.structure for t in since):
            continue
        found = min((_moved(old, new) for old in reversed(earlier)), key=len)
        yield Retrace(name, "compilation", new.after, new.after, tuple(found))


def _moved(old: Compilation, new: Compilation) -> list[str]:
    triples = zip(new.names, old.shardings, new.shardings, strict=True)
    return [f"{name}: {_sharding_change(a, b)}" for name, a, b in triples if a != b]


def _sharding_change(old: Any, new: Any) -> str:
    named = [isinstance(x, jax.sharding.NamedSharding) for x in (old, new)]
    if all(named) and old.mesh == new.mesh and old.memory_kind == new.memory_kind:
        return f"sharding {old.spec} → {new.spec}"
    before, after = ("not committed" if x is None else show(x) for x in (old, new))
    return f"sharding {before} → {after}"
