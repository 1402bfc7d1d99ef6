"""What is kept as JSON: a head with format and version, and files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar, Self

from ..analysis.units import printable


def json_text(data: Any) -> str:
    """Data as JSON that a terminal can show."""
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    return printable(text, kept="\n", escape=lambda c: json.dumps(c)[1:-1])


class JsonForm:
    """Something that is written as JSON and read again.

    A class of this has ``_parts``, its data without the head, and ``_of_parts``, which reads them.
    """

    _FORMAT: ClassVar[str]
    _VERSION: ClassVar[int]
    _NOUN: ClassVar[str]  # what messages call it

    def _parts(self) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def _of_parts(cls, parts: dict[str, Any]) -> Self:
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """All of it as data for JSON."""
        return {"format": self._FORMAT, "version": self._VERSION, **self._parts()}

    def to_json(self) -> str:
        """:meth:`as_dict` as text, to be kept and compared."""
        return json_text(self.as_dict())

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Reads what :meth:`as_dict` made.

        Raises:
          ValueError: it is of another format or version, something is missing or unknown, or
            something is of another type.
        """
        found = data.get("format") if isinstance(data, dict) else None
        if found != cls._FORMAT:
            told = "it has no format" if found is None else f"its format is {found!r}"
            raise ValueError(f"this is no {cls._NOUN}: {told}, not {cls._FORMAT!r}.")
        version = data.get("version")
        if type(version) is not int or version != cls._VERSION:
            raise ValueError(
                f"this {cls._NOUN} has the version {version!r}; this release of nnx_sharding reads "
                f"version {cls._VERSION}. Make it anew, or read it with the release that made it."
            )
        return cls._of_parts(
            {key: part for key, part in data.items() if key not in ("format", "version")}
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Reads what :meth:`to_json` made.

        Raises:
          ValueError: it is no JSON, or as for :meth:`from_dict`.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"this is no {cls._NOUN}, as it is no JSON: {error}") from None
        return cls.from_dict(data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a file as JSON.

        Args:
          path: the file, which is replaced.
        """
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads what :meth:`save` wrote.

        Raises:
          ValueError: the file holds none; its name is in the message.
          OSError: the file cannot be read.
        """
        try:
            return cls.from_json(Path(path).read_bytes())
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None
