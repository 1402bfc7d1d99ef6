"""Sizes as people write them: ``16 GiB``, ``2 GB``."""

from __future__ import annotations

import re


def read_bytes(limit: int | str) -> int:
    """A number of bytes.

    Args:
      limit: the number, or a text such as ``"16 GiB"`` (1024³) or ``"16 GB"`` (1000³).

    Raises:
      ValueError: it is negative, or cannot be read.
      TypeError: it is neither a whole number nor a text.

    Example:
      >>> from nnx_sharding.report.limits import read_bytes
      >>> read_bytes("1.5 MiB"), read_bytes("2GB"), read_bytes(512)
      (1572864, 2000000000, 512)
    """
    if isinstance(limit, bool) or not isinstance(limit, int | str):
        raise TypeError(f"a size is a number of bytes or a text such as '16 GiB', not {limit!r}.")
    found = _SIZE.fullmatch(str(limit))
    if found is None:
        raise ValueError(f"{limit!r} is no size; write bytes, or a text such as '16 GiB'.")
    power = _PREFIXES.index(found["prefix"].upper())
    unit: int = (1024 if found["binary"] else 1000) ** power
    return round(float(found["number"]) * unit)


_PREFIXES = ("", "K", "M", "G", "T", "P")
_SIZE = re.compile(
    r"\s*(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?:(?P<prefix>[KMGTP]?)(?P<binary>i?)B?)\s*", re.I
)
