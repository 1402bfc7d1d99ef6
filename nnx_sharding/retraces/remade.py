"""Functions that are made and wrapped anew each time, so that each is traced for itself."""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

from ..errors import RetraceWarning, report

# For each code how many functions were traced for each kind of call. Holds only numbers.
MAX_FUNCTIONS = 5
MAX_NOTED = 256
_LOCK = threading.Lock()
_FUNCTIONS: weakref.WeakKeyDictionary[types.CodeType, dict[int, int]] = weakref.WeakKeyDictionary()


def note_function(fun: Any, call: int, known: set[int], *, strict: bool) -> None:
    """Notes that a function was traced, and warns if ever new ones of the same code are.

    Args:
      fun: the function.
      call: a hash of all else that the trace depends on.
      known: what was noted of this very function: however often it is traced, it counts once.
      strict: whether the warning is an error.

    Raises:
      StrictError: it is.
    """
    code, print_ = _code(fun), _fingerprint(fun)
    mark = hash((print_, call))
    if code is None or print_ is None or mark in known or len(known) > MAX_NOTED:
        return
    known.add(mark)
    with _LOCK:
        counts = _FUNCTIONS.setdefault(code, {})
        if len(counts) >= MAX_NOTED:
            counts.clear()
        counts[mark] = counts.get(mark, 0) + 1
        is_fifth = counts[mark] == MAX_FUNCTIONS
    if is_fifth:
        message = (
            f"{fun_name(fun)} ({code.co_filename}:{code.co_firstlineno}) was traced "
            f"{MAX_FUNCTIONS} times for the same arguments, because it is a new function each "
            "time: traces belong to the function object. Define and wrap it once, outside of "
            "the loop."
        )
        report(RetraceWarning, message, strict=strict)


def fun_name(fun: Any) -> str:
    """What messages call a function."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return str(getattr(fun, "__qualname__", type(fun).__name__)).rpartition("<locals>.")[2]


def _code(fun: Any) -> types.CodeType | None:
    while isinstance(fun, functools.partial):
        fun = fun.func
    return fun.__code__ if isinstance(fun, types.FunctionType) else None


def _fingerprint(value: Any, depth: int = 4) -> Hashable:
    """The same for functions that do the same; None if that cannot be told."""
    if isinstance(value, functools.partial):
        parts: Sequence[Any] = (value.func, *value.args, *value.keywords, *value.keywords.values())
    elif isinstance(value, types.FunctionType):
        try:
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
        except ValueError:  # not assigned yet
            return None
        names = sorted(_names(value.__code__) & value.__globals__.keys())
        globals_ = (value.__globals__[name] for name in names)
        # Functions of a module stay the same, and may call each other.
        known_globals = (id(x) if isinstance(x, types.FunctionType) else x for x in globals_)
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        parts = (*cells, *defaults, *known_globals)
    elif isinstance(value, bool | int | float | str | bytes | type(None)):
        return type(value), value
    elif isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
        return id(value)
    elif type(value) is tuple:
        parts = value
    else:
        return None
    known = [_fingerprint(part, depth - 1) if depth else None for part in parts]
    return None if None in known else (type(value), _code(value), *known)


def _names(code: types.CodeType) -> set[str]:
    inner = (_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return {*code.co_names}.union(*inner)
