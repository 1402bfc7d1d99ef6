"""Dataclasses as JSON data and back."""

from __future__ import annotations

import dataclasses
import functools
import json
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


def read(kind: type[T], data: Any, what: str, **made: Any) -> T:
    """Makes a dataclass, called ``what`` in messages, from the data that :func:`as_data` returned.

    Strings and numbers are taken as they are: the caller has checked the version of the data. The
    fields in ``made`` are given. A ValueError if the data has another form.
    """
    try:
        return typing.cast(T, _made(kind, data, made))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"not a valid {what}: {error}. It may be damaged, or written by another program."
        ) from None


def _entry(entry: Any) -> Any:
    if entry is None or isinstance(entry, str):
        return entry
    return list(map(str, entry)) if isinstance(entry, tuple) else str(entry)


def _made(kind: Any, data: Any, made: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        # One of them at most is written as a list or a dict.
        if not isinstance(data, list | dict):
            return data
        return _made(next(each for each in arguments if each not in _PLAIN), data)
    if kind is PartitionSpec:
        return _made_spec(data)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        fields = _fields(kind)
        given = {**made, **data}
        if wrong := [name for name in fields | given if (name in fields) != (name in given)]:
            raise ValueError(f"{', '.join(wrong)} missing or unknown")
        return kind(**made, **{name: _made(fields[name], value) for name, value in data.items()})
    part = _part_of(kind)
    if part is not None:
        parts = tuple(_made(part, one) for one in data)
        return parts if origin is tuple else kind(parts)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: _made(arguments[1], value) for key, value in data.items()}
    return float(data) if kind is float else data


_PLAIN = (str, int, float, bool, types.NoneType)


def _made_spec(data: Any) -> PartitionSpec:
    parts = {"partitions": data} if isinstance(data, list) else dict(data)
    entries = [tuple(x) if isinstance(x, list) else x for x in parts.pop("partitions")]
    if kind := parts.pop("unreduced_kind", None):  # JAX 0.12 has others than sums
        parts["unreduced_kind"] = jax.sharding.UnreducedKind[str(kind)]
    sums = {name: {*parts.pop(name)} for name in ("unreduced", "reduced") if name in parts}
    return PartitionSpec(*entries, **sums, **parts)


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
