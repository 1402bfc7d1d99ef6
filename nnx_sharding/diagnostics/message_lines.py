"""The line of a message for each offender: where it is, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ..errors import merged, shortened
from ..specs.filters import glob_hint, subject_text
from ..specs.fitting import Fit, describe_both
from .differences import show


def several(paths: Sequence[str]) -> str:
    """Some paths; if they are many, those of similar places together."""
    return ", ".join(paths if len(paths) <= 5 else shortened(merged(paths)))


def value(path: str, value: Any) -> str:
    """A value that is not an array."""
    return f"{path}: {show(value)} of type {type(value).__name__}"


def object(path: str, obj: Any) -> str:
    """An object and its class."""
    return f"{path}: {type(obj).__name__}"


def array(path: str, array: Any) -> str:
    """An array and its type."""
    return f"{path}, {jax.typeof(array).str_short()}"


def parameters(
    parameters: Sequence[str], static: Sequence[str], missing: Sequence[str], count: int
) -> str:
    """The parameters of a function, and the entries given for them."""
    dynamic = [name for name in parameters if name not in static]
    lines = [
        f"{count} {'entry' if count == 1 else 'entries'} for {len(parameters)} positional "
        f"parameters: {', '.join(parameters)}",
        *(f"{name}: static, needs no entry, or None" for name in static),
        *(f"{name}: no entry" for name in missing),
        f"Give one entry for each of ({', '.join(dynamic)}), or a mapping from parameter names.",
    ]
    return "\n  ".join(lines)


def unmatched(path: str, subject: Any, rules: Any) -> str:
    """A Variable that no filter matches."""
    return f"{path}: {subject_text(subject)}"


def untyped(
    path: str, key: str, module: Any, error: Exception, types: Sequence[str], entry: Any
) -> str:
    """A module with an operation that JAX cannot type."""
    reason = str(error).partition(". ")[0].partition("\n")[0]
    return f"{path}: {type(module).__name__} of {', '.join(types)}\n    {reason}"


def unused(filter_: Any, method: str) -> str:
    """A filter for modules that matches no call."""
    of = "" if method == "__call__" else f", method {method!r}"
    return f"{filter_!r}{of}{glob_hint(filter_) if isinstance(filter_, str) else ''}"


def conflict(path: str, spec: Any, other_path: str, other: Any) -> str:
    """Two specs for one Variable."""
    first, second = describe_both(spec, other)
    return f"{path}: {first}\n  {other_path}: {second}"


def misfit(path: str, fit: Fit, before: Sequence[int] | None) -> str:
    """A spec that does not fit a shape."""
    return fit.line(path, before).strip()
