"""Objects that are saved as JSON files, with a format and a version."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar, Self

from ..analysis.json_codec import as_data, json_text, read
from ..analysis.tables import Pictured


class JsonForm(Pictured):
    """A dataclass that can be written as JSON and read again, and that notebooks show."""

    _FORMAT: ClassVar[str]
    _VERSION: ClassVar[int] = 1
    _NOUN: ClassVar[str]  # for messages

    def _parts(self) -> dict[str, Any]:
        """The data without format and version."""
        data: dict[str, Any] = as_data(self)
        return data

    @classmethod
    def _of_parts(cls, parts: dict[str, Any]) -> Self:
        return read(cls, parts, cls._NOUN)

    def as_dict(self) -> dict[str, Any]:
        """All of it as data for JSON."""
        return {"format": self._FORMAT, "version": self._VERSION, **self._parts()}

    def to_json(self) -> str:
        """:meth:`as_dict` as text."""
        return json_text(self.as_dict())

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Reads what :meth:`as_dict` returned; a ValueError if it has another form or version."""
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
        """Reads what :meth:`to_json` returned; a ValueError as for :meth:`from_dict`."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a {cls._NOUN}: it is not JSON: {error}") from None
        return cls.from_dict(data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a file as JSON; an existing file is replaced."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads what :meth:`save` wrote; a ValueError as for :meth:`from_dict`, with the path."""
        try:
            return cls.from_json(Path(path).read_bytes())
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None
