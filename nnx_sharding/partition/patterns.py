"""Pairs of patterns and values, as users write them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args

from ..errors import listed
from ..specs.filters import PathGlob, PathRegex

# How a pattern that is a string is read.
PatternKind: TypeAlias = Literal["regex", "glob"]


def read_pairs(caller: str, pairs: Any) -> list[tuple[Any, Any]]:
    """The pairs of a mapping or of an iterable of pairs."""
    items = pairs.items() if isinstance(pairs, Mapping) else pairs
    items = list(items) if isinstance(items, Iterable) and not isinstance(items, str) else [items]
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in items):
        raise TypeError(f"{caller} takes a mapping or a sequence of pairs, not {pairs!r}.")
    return [(first, second) for first, second in items]


def read_patterns(caller: str, pairs: Any, kind: PatternKind) -> list[tuple[Any, Any]]:
    """Pairs of a filter and a value; strings are read as patterns for paths."""
    if kind not in get_args(PatternKind):
        raise ValueError(f"kind must be one of {get_args(PatternKind)}, got {kind!r}.")
    result: list[tuple[Any, Any]] = []
    wrong: list[str] = []
    for pattern, value in read_pairs(caller, pairs):
        try:
            if isinstance(pattern, re.Pattern) or (isinstance(pattern, str) and kind == "regex"):
                pattern = PathRegex(pattern)
            elif isinstance(pattern, str):
                pattern = PathGlob(pattern)
            result.append((pattern, value))
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("\n".join(listed(wrong)))
    return result
