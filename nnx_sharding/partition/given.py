"""What rules are made from: pairs, patterns, and what the metadata of Variables says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args

from flax import nnx

from ..filters import PathGlob, PathRegex
from .paths import Found

# How a pattern that is a string is read.
PatternKind: TypeAlias = Literal["regex", "glob"]


def read_pairs(caller: str, given: Any) -> list[tuple[Any, Any]]:
    """The pairs of a mapping or of a sequence of pairs.

    Raises:
      TypeError: it is neither.
    """
    items = given.items() if isinstance(given, Mapping) else given
    pairs = list(items) if isinstance(items, Iterable) and not isinstance(items, str) else [items]
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise TypeError(f"{caller} takes a mapping or a sequence of pairs, not {given!r}.")
    return [(first, second) for first, second in pairs]


def from_patterns(filters: Iterable[Any], kind: PatternKind) -> list[Any]:
    """NNX filters, with the strings among them read as patterns for paths.

    Raises:
      ValueError: ``kind`` is something else, or strings are no such patterns; all are named.
    """
    if kind not in get_args(PatternKind):
        raise ValueError(f"kind is one of {get_args(PatternKind)}, not {kind!r}.")
    read, wrong = [], []
    for own in filters:
        try:
            if isinstance(own, re.Pattern) or (isinstance(own, str) and kind == "regex"):
                own = PathRegex(own)
            elif isinstance(own, str):
                own = PathGlob(own)
            read.append(own)
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("\n".join(wrong))
    return read


def metadata(variable: Any) -> dict[str, Any]:
    """The metadata of a Variable; none for a bare array."""
    return dict(variable.get_metadata()) if isinstance(variable, nnx.Variable) else {}


def annotation(variable: Any) -> Any:
    """What the metadata of a Variable says of its sharding; None if nothing."""
    own = metadata(variable)
    # Flax writes the first; the others are in what older releases have stored.
    return next(
        (own[k] for k in ("out_sharding", "sharding", "sharding_names") if own.get(k)), None
    )


def problem_line(found: Found, given: Any, problems: Iterable[str]) -> str:
    """One line of an error: where, what is given for it, and what is wrong with that."""
    return f"  {found.name}, shape {found.shape}, {given!r}: {'; '.join(problems)}"
