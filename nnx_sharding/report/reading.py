"""Dataclasses as data for JSON, and back: strictly, with all faults in one error."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_MOST = 40  # faults that a message tells


def as_data(value: Any) -> Any:
    """A dataclass, or what it consists of, as dicts and lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: as_data(getattr(value, name)) for name in _fields(type(value))}
    if isinstance(value, Mapping):
        return {str(key): as_data(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [as_data(part) for part in value]
    return value


def read(kind: type[T], data: Any, what: str) -> T:
    """Makes a dataclass from data.

    Args:
      kind: the dataclass.
      data: what :func:`as_data` made, perhaps by way of JSON.
      what: the name of the whole, for messages.

    Raises:
      ValueError: keys are missing or unknown, or values are of other types; all are told.
    """
    problems: list[str] = []
    found = _read(kind, data, "", problems)
    if problems:
        shown = problems[:_MOST] + [f"… and {len(problems) - _MOST} more"] * (len(problems) > _MOST)
        lines = "\n".join(f"  {problem}" for problem in shown)
        raise ValueError(f"this is no {what}:\n{lines}\nIt may be damaged or not made by us.")
    return typing.cast(T, found)


def _read(kind: Any, data: Any, path: str, problems: list[str]) -> Any:
    if kind is Any:
        return data
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, data, path, problems)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _read_union(arguments, data, path, problems)
    if origin is typing.Literal and data in arguments and isinstance(data, str):
        return data
    part = _part_of(kind)
    if part is not None and isinstance(data, list):
        parts = tuple(_read(part, one, f"{path}[{i}]", problems) for i, one in enumerate(data))
        return parts if origin is tuple else kind(parts)
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(data, dict):
        return {key: _read(arguments[1], data[key], f"{path}.{key}", problems) for key in data}
    if origin is None and _is(kind, data):
        return float(data) if kind is float else data
    problems.append(f"{path.lstrip('.') or 'the whole'}: {_show(data)} is no {_name(kind)}")
    return None


def _part_of(kind: Any) -> Any:
    """The type of the parts of ``tuple[X, ...]``, or of a class with the base ``Sequence[X]``."""
    for base in (kind, *getattr(kind, "__orig_bases__", ())):
        if typing.get_origin(base) in (tuple, Sequence):
            return typing.get_args(base)[0]
    return None


def _is(kind: Any, data: Any) -> bool:
    if kind is None or kind is type(None):
        return data is None
    if kind is float:
        return type(data) in (int, float) and math.isfinite(data)
    return type(data) is kind  # a bool is no number


def _read_union(kinds: tuple[Any, ...], data: Any, path: str, problems: list[str]) -> Any:
    faults: list[str] = []
    for kind in kinds:
        own: list[str] = []
        found = _read(kind, data, path, own)
        if not own:
            return found
        faults = own if len(own) > len(faults) or not faults else faults
    if data is None or len(kinds) > 2:
        names = " or ".join(map(_name, kinds))
        faults = [f"{path.lstrip('.') or 'the whole'}: {_show(data)} is no {names}"]
    problems += faults
    return None


def _read_fields(kind: Any, data: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(data, dict):
        problems.append(f"{path.lstrip('.') or 'the whole'}: {_show(data)} is no object")
        return None
    fields, prefix = _fields(kind), path.lstrip(".") + "." if path else ""
    needed = fields.keys() - _optional(kind)
    missing = [f"{prefix}{name}: missing" for name in fields if name in needed - data.keys()]
    unknown = [f"{prefix}{name}: not known" for name in data if name not in fields]
    problems += missing + unknown
    found = {
        name: _read(own, data[name], f"{path}.{name}", problems)
        for name, own in fields.items()
        if name in data
    }
    return None if problems else kind(**found)


@functools.cache
def _fields(kind: Any) -> dict[str, Any]:
    """The fields that are written, with their types."""
    hints = typing.get_type_hints(kind)
    return {
        field.name: hints[field.name]
        for field in dataclasses.fields(kind)
        if field.metadata.get("written", True)
    }


@functools.cache
def _optional(kind: Any) -> frozenset[str]:
    """The fields that older releases did not write."""
    return frozenset(f.name for f in dataclasses.fields(kind) if f.metadata.get("optional"))


def _name(kind: Any) -> str:
    if kind is None or kind is type(None):
        return "null"
    names = {float: "number", int: "integer", str: "string", bool: "true or false"}
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(kind)))
    if _part_of(kind) is not None:
        return "list"
    return names.get(kind, "object")


def _show(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 60 else text[:57] + "..."
