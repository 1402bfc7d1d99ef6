"""What a function takes from its surroundings, by the names it has there."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from .. import _compat
from ..core.flatten import flatten
from ..paths import accessor


class Captured(NamedTuple):
    """An array that a function captures, with the name under which it does."""

    name: str
    array: jax.Array


def captured_values(fun: Any) -> Iterator[tuple[str, Any]]:
    """What a function takes from its surroundings, and the names that it has there."""
    while type(fun) is functools.partial:
        yield from ((f"partial.args[{i}]", value) for i, value in enumerate(fun.args))
        yield from ((f"partial.keywords[{key!r}]", value) for key, value in fun.keywords.items())
        fun = fun.func
    if _compat.is_graph_object(fun):
        yield f"the {type(fun).__name__}", fun
    fun = inspect.unwrap(getattr(fun, "__func__", fun))
    code = getattr(fun, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, fun.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    for name in dict.fromkeys(_global_names(code)):
        if name in fun.__globals__:
            yield name, fun.__globals__[name]


def _global_names(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield str(instruction.argval)
        elif isinstance(instruction.argval, types.CodeType):
            yield from _global_names(instruction.argval)


def captured_shards(fun: Any, constants: Iterable[Any] | None = None) -> list[Captured]:
    """The arrays that a function captures and that are sharded over several devices.

    Args:
      fun: the function.
      constants: what its trace has captured; None for all that it could.
    """
    found = [own for name, value in captured_values(fun) for own in _arrays(name, value)]
    if constants is not None:
        names = {id(array): name for name, array in reversed(found)}
        found = [Captured(names.get(id(x), "an array"), x) for x in constants]
    return [own for own in found if is_sharded(own.array)]


def is_sharded(value: Any) -> bool:
    """Whether a value is an array that is split over several devices."""
    return _is_array(value) and not value.is_fully_replicated


# By type, not by isinstance, which would load the target of a lazy proxy.
def _is_array(value: Any) -> bool:
    return type(value) is _compat.ArrayImpl


def _arrays(name: str, value: Any) -> Iterator[Captured]:
    kind = type(value)
    if _is_array(value):
        yield Captured(name, value)
    elif _compat.is_graph_object(value):
        flat = flatten(value, held=False)
        for path, leaf in zip(flat.structure.paths(), flat.leaves, strict=True):
            if _is_array(leaf):
                yield Captured(accessor(name, path), leaf)
    elif kind in (tuple, list, dict):
        for key, part in value.items() if kind is dict else enumerate(value):
            if _is_array(part) or _compat.is_graph_object(part):
                yield from _arrays(accessor(name, (key,)), part)


def describe_captured(found: list[Captured]) -> str:
    """A line for each captured array: its name, type and spec."""
    return "\n".join(
        f"  {name}, {jax.typeof(array).str_short()}, "
        f"{getattr(array.sharding, 'spec', array.sharding)}"
        for name, array in found
    )
