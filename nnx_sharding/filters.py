"""NNX filters as predicates, with what the rest of the library has to know of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

Predicate = Callable[[tuple[Any, ...], Any], bool]


def to_predicate(filter_: Any) -> Predicate:
    """The predicate ``(path, value) -> bool`` for a filter.

    Raises:
      TypeError: it is no NNX filter.
    """
    try:
        predicate: Predicate = nnx.filterlib.to_predicate(filter_)
    except (TypeError, ValueError):  # Flax fails on a format string of its own
        raise TypeError(
            f"{filter_!r} is no NNX filter. Use a Variable type, a tag, `...`, a predicate "
            "(path, variable) -> bool, or a tuple of these."
        ) from None
    return predicate


def is_opaque(predicate: Any) -> bool:
    """Whether a predicate is the user's own, which may look at shapes and dtypes."""
    if isinstance(predicate, _PATH_OR_TYPE):
        return False
    if isinstance(predicate, nnx.Any | nnx.All):
        return any(map(is_opaque, predicate.predicates))
    if isinstance(predicate, nnx.Not):
        return is_opaque(predicate.predicate)
    return True


_PATH_OR_TYPE = (
    nnx.PathContains,
    nnx.filterlib.PathIn,
    nnx.WithTag,
    nnx.OfType,
    nnx.Everything,
    nnx.Nothing,
)
