"""Dataclasses as JSON data and back. Reading is strict, and lists all faults in one error."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

from .units import printable

T = TypeVar("T")

# Metadata of a dataclass field that JSON omits.
UNWRITTEN = {"written": False}

_MAX_FAULTS = 40


def json_text(data: Any) -> str:
    """Data as JSON that is safe to print on a terminal."""
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    return printable(text, kept="\n", escape=lambda c: json.dumps(c)[1:-1])


def as_data(value: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """A dataclass, or the value of a field, as dicts and lists.

    A ``PartitionSpec`` becomes a list with one entry per dimension; with unreduced or reduced axes
    it becomes a dict, which has this list as ``partitions``. Other values are converted
    by ``other``.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: as_data(getattr(value, name), other) for name in _fields(type(value))}
    if isinstance(value, Mapping):
        return {str(key): as_data(part, other) for key, part in value.items()}
    if isinstance(value, PartitionSpec):
        sums = {kind: sorted(map(str, getattr(value, kind))) for kind in ("unreduced", "reduced")}
        entries = [_entry(entry) for entry in value.partitions]
        kind = getattr(getattr(value, "unreduced_kind", None), "name", "sum")
        others = {} if kind == "sum" else {"unreduced_kind": kind}
        return {"partitions": entries, **sums, **others} if any(sums.values()) else entries
    if isinstance(value, Sequence):
        return [as_data(part, other) for part in value]
    return value if other is None else as_data(other(value), other)


def read(kind: type[T], data: Any, what: str) -> T:
    """Makes a dataclass, called ``what`` in messages, from the data that :func:`as_data` returned.

    Raises:
      ValueError: keys are missing or unknown, or values have wrong types; all are listed.
    """
    faults: list[str] = []
    value = _read(kind, data, "", faults)
    if faults:
        more = [f"… and {len(faults) - _MAX_FAULTS} more"] * (len(faults) > _MAX_FAULTS)
        lines = "\n".join(f"  {fault}" for fault in [*faults[:_MAX_FAULTS], *more])
        raise ValueError(
            f"not a valid {what}:\n{lines}\nIt may be damaged, or written by another program."
        )
    return typing.cast(T, value)


def _entry(entry: Any) -> Any:
    if entry is None or isinstance(entry, str):
        return entry
    return list(map(str, entry)) if isinstance(entry, tuple) else str(entry)


def _read(kind: Any, data: Any, path: str, faults: list[str]) -> Any:
    """A value of a type; what does not fit is added to the faults."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return data
    if dataclasses.is_dataclass(kind) and isinstance(data, dict):
        return _read_fields(kind, data, path, faults)
    if origin in (typing.Union, types.UnionType):
        return _read_union(arguments, data, path, faults)
    if origin is typing.Literal and isinstance(data, str) and data in arguments:
        return data
    if kind is PartitionSpec and isinstance(data, list | dict):
        return _read_spec(data, path, faults)
    part = _part_of(kind)
    if part is not None and isinstance(data, list):
        parts = tuple(_read(part, one, f"{path}[{i}]", faults) for i, one in enumerate(data))
        return parts if origin is tuple else kind(parts)
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(data, dict):
        return {key: _read(arguments[1], data[key], f"{path}.{key}", faults) for key in data}
    if kind is float and type(data) in (int, float) and math.isfinite(data):
        return float(data)
    if kind in (int, str, bool, types.NoneType) and type(data) is kind:  # a bool is not an int
        return data
    faults.append(f"{_named(path)}: {_shown(data)} is not {_name(kind)}")
    return None


def _read_union(kinds: tuple[Any, ...], data: Any, path: str, faults: list[str]) -> Any:
    if data is None and types.NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not types.NoneType)
    wrong: list[str] = []
    for kind in kinds:
        wrong.clear()
        value = _read(kind, data, path, wrong)
        if not wrong:
            return value
    names = " or ".join(map(_name, kinds))
    faults += wrong if len(kinds) == 1 else [f"{_named(path)}: {_shown(data)} is not {names}"]
    return None


def _read_fields(kind: Any, data: dict[str, Any], path: str, faults: list[str]) -> Any:
    fields = _fields(kind)
    wrong = [f"{_named(f'{path}.{name}')}: missing" for name in fields if name not in data]
    wrong += [f"{_named(f'{path}.{name}')}: unknown" for name in data if name not in fields]
    values = {
        name: _read(type_, data[name], f"{path}.{name}", wrong)
        for name, type_ in fields.items()
        if name in data
    }
    faults += wrong
    try:
        return None if wrong else kind(**values)
    except ValueError as error:
        faults.append(f"{_named(path)}: {error}")


def _read_spec(data: Any, path: str, faults: list[str]) -> PartitionSpec | None:
    wrong: list[str] = []
    parts = data if isinstance(data, dict) else {"partitions": data, "unreduced": [], "reduced": []}
    sums = {
        name: _read(tuple[str, ...], parts.get(name), f"{path}.{name}", wrong)
        for name in ("unreduced", "reduced")
    }
    entries = _read(_ENTRIES, parts.get("partitions"), path, wrong)
    options: dict[str, Any] = {}
    if kind := parts.get("unreduced_kind"):  # JAX 0.12 has others than sums
        kinds = getattr(getattr(jax.sharding, "UnreducedKind", None), "__members__", {})
        options = {"unreduced_kind": kinds.get(kind)}
        wrong += [] if kind in kinds else [f"{_named(path)}.unreduced_kind: {kind!r} is unknown"]
    faults += wrong
    return None if wrong else PartitionSpec(*entries, **_sets(sums), **options)


def _sets(values: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    return {name: {*value} for name, value in values.items()}


_ENTRIES = tuple[str | tuple[str, ...] | None, ...]


def _part_of(kind: Any) -> Any:
    """The type of the parts of ``tuple[X, ...]``, or of a class with the base ``Sequence[X]``."""
    for base in (kind, *getattr(kind, "__orig_bases__", ())):
        if typing.get_origin(base) in (tuple, Sequence):
            return typing.get_args(base)[0]
    return None


@functools.cache
def _fields(kind: Any) -> dict[str, Any]:
    """The fields that are written, with their types."""
    hints = typing.get_type_hints(kind)
    written = (f.name for f in dataclasses.fields(kind) if f.metadata.get("written", True))
    return {name: hints[name] for name in written}


_NAMES = {float: "a number", int: "an integer", str: "a string", bool: "true or false"}
_NAMES |= {types.NoneType: "null", PartitionSpec: "a list"}


def _name(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(kind)))
    return "a list" if _part_of(kind) is not None else _NAMES.get(kind, "an object")


def _named(path: str) -> str:
    return path.lstrip(".") or "the root"


def _shown(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 60 else text[:57] + "..."
