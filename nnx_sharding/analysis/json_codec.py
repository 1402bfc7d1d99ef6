"""Dataclasses as JSON data and back, and as files with a format and a version.

Reports consist of frozen dataclasses, whose annotations say how to read them: there is no second
description of the format. A release reads the version that it writes; of other data it says what is
wrong. A `PartitionSpec` is the list of its entries, `P("data", ("x", "y"))` as
``["data", ["x", "y"]]``. One that is *unreduced* over axes, which means that the values of devices
along these are still to be summed, or *reduced*, is a dictionary::

    {"partitions": ["data", null], "unreduced": ["model"], "reduced": []}
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import jax
from jax.sharding import PartitionSpec

from .._publishing import write_file
from .tables import Pictured
from .units import printable

T = TypeVar("T")

# Metadata of a dataclass field that JSON omits.
UNWRITTEN = {"written": False}


def file_path(path: str | os.PathLike[str]) -> Path:
    """Returns a path that a user gave, with their home directory for ``~``."""
    return Path(path).expanduser()


def unique_json(text: str | bytes) -> Any:
    """Reads JSON; raises a ValueError if an object has a key twice.

    Such JSON is refused because readers differ in which of the two values they use.
    """

    def checked_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        by_key = dict(pairs)
        if len(by_key) < len(pairs):
            twice = next(key for key in by_key if sum(key == other for other, _ in pairs) > 1)
            raise ValueError(f"{twice!r} is there twice")
        return by_key

    return json.loads(text, object_pairs_hook=checked_dict)


def json_text(data: Any) -> str:
    """Writes data as JSON that is safe to print on a terminal."""
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    return printable(text, kept="\n", escape=lambda c: json.dumps(c)[1:-1])


def as_data(value: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """Returns a dataclass, or a value in one, as dicts, lists and plain values for JSON.

    ``other`` converts values of other types.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: as_data(getattr(value, name), other) for name in _fields(type(value))}
    if isinstance(value, Mapping):
        return {str(key): as_data(part, other) for key, part in value.items()}
    if isinstance(value, PartitionSpec):
        return _spec_data(value)
    if isinstance(value, Sequence):
        return [as_data(part, other) for part in value]
    return value if other is None else as_data(other(value), other)


def _spec_data(spec: PartitionSpec) -> list[Any] | dict[str, Any]:
    """Returns a spec as data for JSON: its entries, or a dictionary of these and its sums."""
    entries: list[Any] = []
    for entry in spec.partitions:
        if isinstance(entry, tuple):
            entries.append([*map(str, entry)])
        else:
            entries.append(None if entry is None else str(entry))
    axes = {name: sorted(map(str, getattr(spec, name))) for name in ("unreduced", "reduced")}
    if not any(axes.values()):
        return entries
    data: dict[str, Any] = {"partitions": entries, **axes}
    # From JAX 0.12 on, values may also be those of a maximum or minimum that is to be computed.
    kind = getattr(spec, "unreduced_kind", None)  # Before JAX 0.12, specs lack it.
    if kind is not None and kind.name != "sum":
        data["unreduced_kind"] = kind.name
    return data


def read(kind: type[T], data: Any, what: str, **unwritten: Any) -> T:
    """Makes a dataclass from what :func:`as_data` returned.

    Args:
      kind: the class.
      data: the data.
      what: the noun for such data in messages.
      **unwritten: values for fields that are not in ``data``.

    Raises:
      ValueError: the data are of another form.
    """
    try:
        return typing.cast(T, _read_value(kind, data, unwritten))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"not a valid {what}: {error}. It may be damaged, or written by another program."
        ) from None


def _read_value(
    kind: Any, data: Any, unwritten: Mapping[str, Any] = types.MappingProxyType({})
) -> Any:
    """Reads a value of a type from JSON data; raises an error for data of another form.

    Args:
      kind: the type, as an annotation: a dataclass, ``tuple[X, ...]``, ``Mapping[str, X]``,
        ``PartitionSpec``, a plain type, or a union of these.
      unwritten: for a dataclass, values for fields that are not in the data.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        # At most one type of a union is written as a list or a dict: ``Cost | None``.
        structured = [kind for kind in arguments if kind not in _PLAIN]
        if structured and isinstance(data, list | dict):
            return _read_value(structured[0], data)
        return _read_plain(arguments, data)
    if kind is PartitionSpec:
        return _read_spec(data)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, data, unwritten)
    # ``tuple[X, ...]``; or a class such as ``Collectives(tuple[Collective, ...])``.
    for base in (kind, *getattr(kind, "__orig_bases__", ())):
        if typing.get_origin(base) in (tuple, Sequence):
            parts = tuple(_read_value(typing.get_args(base)[0], item) for item in data)
            return parts if origin is tuple else kind(parts)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: _read_value(arguments[1], value) for key, value in data.items()}
    return _read_plain((kind,), data)


def _read_dataclass(kind: Any, data: Any, unwritten: Mapping[str, Any]) -> Any:
    """Makes a dataclass from the data of its fields, and from the values of ``unwritten`` fields.

    Every field has to be there, because a default may have another meaning later. Raises a
    ValueError if one is missing, or if there is another one.
    """
    fields = _fields(kind)  # the types of the fields
    given = {**unwritten, **data}
    missing = [name for name in fields if name not in given]
    unknown = [name for name in given if name not in fields]
    if missing or unknown:
        raise ValueError(f"{', '.join(missing + unknown)} missing or unknown")
    values = {name: _read_value(fields[name], value) for name, value in data.items()}
    return kind(**unwritten, **values)


def _read_plain(kinds: Sequence[Any], data: Any) -> Any:
    """Returns a value that has one of the types ``kinds``; raises a TypeError for any other value.

    Only plain types are checked: if ``kinds`` has another, such as ``Literal["gpu"]`` or ``Any``,
    the value is returned as it is.
    """
    # JSON does not tell 1 from 1.0, and people write 8e10 for an integer.
    if type(data) is int and float in kinds and int not in kinds:
        return float(data)
    if isinstance(data, float) and data.is_integer() and int in kinds and float not in kinds:
        return int(data)
    are_plain = all(kind in _PLAIN for kind in kinds)
    if are_plain and type(data) not in kinds:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"expected {names}, got {data!r:.100}")
    return data


_PLAIN = (str, int, float, bool, types.NoneType)


def _read_spec(data: Any) -> PartitionSpec:
    """Reads what `_spec_data` returned: a list of entries, or a dictionary that has one."""
    parts = {"partitions": data} if isinstance(data, list) else dict(data)
    # Known keys are removed from ``parts``. `PartitionSpec` then refuses those that are left.
    entries = [tuple(x) if isinstance(x, list) else x for x in parts.pop("partitions")]
    options: dict[str, Any] = {}
    for name in ("unreduced", "reduced"):
        if name in parts:
            options[name] = {*parts.pop(name)}
    kind = parts.pop("unreduced_kind", None)  # Only data from JAX 0.12 or later have it.
    if kind:
        options["unreduced_kind"] = jax.sharding.UnreducedKind[str(kind)]
    return PartitionSpec(*entries, **options, **parts)


@functools.cache
def _fields(kind: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that are written, with their types, by name."""
    hints = typing.get_type_hints(kind)
    written = (f.name for f in dataclasses.fields(kind) if f.metadata.get("written", True))
    return {name: hints[name] for name in written}


class AsData(Pictured):
    """A dataclass that can be written as JSON, and that notebooks show."""

    def as_dict(self) -> dict[str, Any]:
        """Returns all of it as data for JSON."""
        data: dict[str, Any] = as_data(self)
        return data


class JsonForm(Pictured):
    """A dataclass that can be written as JSON and read again, and that notebooks show.

    All methods that write call `_parts`, and all that read call `_of_parts`. A subclass overrides
    the two if its fields and its data differ.

    Attributes:
      _FORMAT: the name of the format, which the data begin with.
      _VERSION: the version of the format. Data of another version are refused.
      _NOUN: what messages call such data.
    """

    _FORMAT: ClassVar[str]
    _VERSION: ClassVar[int] = 1
    _NOUN: ClassVar[str]

    def _parts(self) -> dict[str, Any]:
        """Returns the data without format and version."""
        data: dict[str, Any] = as_data(self)
        return data

    @classmethod
    def _of_parts(cls, parts: dict[str, Any]) -> Self:
        """Makes an object from what `_parts` returned; raises a ValueError for other data."""
        return read(cls, parts, cls._NOUN)

    def as_dict(self) -> dict[str, Any]:
        """Returns all of it as data for JSON."""
        return {"format": self._FORMAT, "version": self._VERSION, **self._parts()}

    def to_json(self) -> str:
        """:meth:`as_dict` as text."""
        return json_text(self.as_dict())

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Reads what :meth:`as_dict` returned.

        Raises:
          ValueError: the data have another form or version.
        """
        parts = dict(data) if isinstance(data, dict) else {}
        form, version = parts.pop("format", None), parts.pop("version", None)
        if form != cls._FORMAT:
            actual = "it has no format" if form is None else f"its format is {form!r}"
            raise ValueError(f"not a {cls._NOUN}: {actual}, expected {cls._FORMAT!r}.")
        if type(version) is not int or version != cls._VERSION:
            raise ValueError(
                f"this {cls._NOUN} has the version {version!r}; this release of nnx_sharding reads "
                f"version {cls._VERSION}. Use the release that wrote it, or write it again."
            )
        return cls._of_parts(parts)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Reads what :meth:`to_json` returned.

        Raises:
          ValueError: the text is no JSON, or has another form or version.
        """
        try:
            data = unique_json(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a {cls._NOUN}: it is not JSON: {error}") from None
        return cls.from_dict(data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a file as JSON; an existing file is replaced."""
        write_file(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads what :meth:`save` wrote.

        Raises:
          ValueError: the file is no JSON, or has another form or version. The text begins with the
            path.
        """
        try:
            return cls.from_json(file_path(path).read_bytes())
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None
