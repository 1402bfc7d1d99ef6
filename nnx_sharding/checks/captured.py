"""What a function takes from its surroundings, by the names it has there."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from flax import nnx

from .. import _compat
from ..lifting.structure import accessor


class Captured(NamedTuple):
    """An array that a function captures, with the name under which it does."""

    name: str
    array: jax.Array


def captured_values(fun: Any) -> Iterator[tuple[str, Any]]:
    """What a function takes from its surroundings, and the names that it has there."""
    while isinstance(fun, functools.partial):
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
        if cell != _EMPTY:
            yield name, cell.cell_contents
    for name in dict.fromkeys(_global_names(code)):
        if name in fun.__globals__:
            yield name, fun.__globals__[name]


_EMPTY = types.CellType()


def _global_names(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield str(instruction.argval)
        elif isinstance(instruction.argval, types.CodeType):
            yield from _global_names(instruction.argval)


def captured_shards(fun: Any) -> list[Captured]:
    """The arrays that a function captures and that are split over several devices."""
    return [
        found
        for name, value in captured_values(fun)
        for found in _arrays(name, value)
        if not isinstance(found.array, jax.core.Tracer) and not found.array.is_fully_replicated
    ]


def _arrays(name: str, value: Any) -> Iterator[Captured]:
    if isinstance(value, jax.Array):
        yield Captured(name, value)
    elif _compat.is_graph_object(value):
        for path, leaf in nnx.to_flat_state(nnx.state(value)):
            array = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
            if isinstance(array, jax.Array):
                yield Captured(accessor(name, path), array)
    elif isinstance(value, tuple | list | dict):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(part, jax.Array) or _compat.is_graph_object(part):
                yield from _arrays(accessor(name, (key,)), part)


def describe_captured(found: list[Captured]) -> str:
    """A line for each captured array: its name, type and spec."""
    return "\n".join(
        f"  {name}, {jax.typeof(array).str_short()}, "
        f"{getattr(array.sharding, 'spec', array.sharding)}"
        for name, array in found
    )
