"""Numbers and names as people read and write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

UNKNOWN = "–"  # noqa: RUF001, a dash in a table


def bytes_text(n: float | None) -> str:
    """Writes bytes with a binary unit, such as ``1.50 MiB``."""
    return UNKNOWN if n is None else _scaled(n, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), 1024)


def count_text(n: float | None) -> str:
    """Writes a count with a decimal prefix, such as ``4.19 M``."""
    return UNKNOWN if n is None else _scaled(n, ("", "k", "M", "G", "T", "P", "E"), 1000).strip()


def time_text(seconds: float | None) -> str:
    """Writes a time in a unit from nanoseconds to seconds, such as ``12.5 µs``."""
    if seconds is None:
        return UNKNOWN
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds * 1e9)} ns" if seconds else "0 s"


def bound_text(
    figure: float | None, at_least: float | None, show: Callable[[float | None], str]
) -> str:
    """Writes a figure; one that is unknown with its lower bound, if that is known: ``≥ 4.19 M``.

    ``show`` writes a figure with its unit.
    """
    is_bound = figure is None and at_least is not None
    return f"≥ {show(at_least)}" if is_bound else show(figure)


def read_bytes(limit: int | str) -> int:
    """Returns the bytes of a size: a number, or text such as ``16 GiB`` (1024³), ``16 GB`` (1000³).

    Raises:
      TypeError: it is neither a number nor a text.
      ValueError: the text is not a size.
    """
    if isinstance(limit, bool) or not isinstance(limit, int | str):
        raise TypeError(f"a size must be a number of bytes or like '16 GiB', got {limit!r}.")
    size = _SIZE.fullmatch(str(limit))
    if size is None:
        raise ValueError(f"{limit!r} is not a size; write bytes, or a text such as '16 GiB'.")
    prefixes = ["", "K", "M", "G", "T", "P"]
    power = prefixes.index((size["prefix"] or "").upper())
    unit: int = (1024 if size["binary"] else 1000) ** power
    return round(float(size["number"]) * unit)


_SIZE = re.compile(
    r"\s*(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?:(?P<prefix>[KMGTP]?)(?P<binary>i?)B?)\s*", re.I
)


def printable(
    text: Any, kept: str = "", escape: Callable[[str], str] = lambda c: ascii(c)[1:-1]
) -> str:
    """Returns a text with characters escaped that cannot be printed, as names may contain anything.

    These are control characters, and others such as marks that reverse the direction of a text.

    Args:
      text: the text, or what is converted to one.
      kept: the characters that stay although they cannot be printed, such as a line break.
      escape: returns the text for a character; by default as in Python's ``repr``.
    """

    def shown(char: re.Match[str]) -> str:
        """Returns a character itself if it stays, else its escape."""
        return char[0] if char[0] in kept or char[0].isprintable() else escape(char[0])

    # `shown` is only called for characters outside of printable ASCII, because that is fast: most
    # texts have few of them.
    return re.sub(r"[^ -~]", shown, str(text))


def without_address(text: str) -> str:
    """Removes addresses of objects from a text, because they differ from process to process."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def all_known(figures: Iterable[float | None]) -> list[float] | None:
    """Lists figures; returns None if one of them is None, because their sum is then unknown."""
    known = []
    for figure in figures:
        if figure is None:
            return None
        known.append(figure)
    return known


def _scaled(n: float, units: Sequence[str], base: int) -> str:
    """Writes a number in the largest unit that is not larger; each is ``base`` of the one before.

    Numbers of the first unit are exact, others have three digits: ``12 B``, ``1.50 KiB``.
    """
    power = 0
    # With three digits, 999.6 would be written as 1000, so it counts as 1.00 of the next unit. For
    # the base 1024, the same fraction of the base is the limit.
    while abs(n) >= base * 0.9995 and power < len(units) - 1:
        n, power = n / base, power + 1
    exact = power == 0 and n == int(n)
    return f"{int(n) if exact else _digits(n)} {units[power]}"


def _digits(n: float) -> str:
    """Writes three significant digits, or more before the decimal point."""
    if n >= 99.95:  # 99.96 is rounded to 100.
        return f"{n:.0f}"
    return f"{n:.1f}" if n >= 9.995 else f"{n:.2f}"
