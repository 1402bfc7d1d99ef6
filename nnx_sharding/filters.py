"""NNX filters as predicates, with what the rest of the library has to know of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flax import nnx

from .lifting.structure import Path, path_string

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


class Paths:
    """A filter that matches certain paths, and nothing else.

    Args:
      paths: the paths, each the keys from the argument to a Variable.

    Example:
      >>> from nnx_sharding.filters import Paths
      >>> first = Paths([("blocks", 0, "kernel")])
      >>> first(("blocks", 0, "kernel"), None), first(("blocks", 1, "kernel"), None)
      (True, False)
    """

    __slots__ = ("_paths",)

    def __init__(self, paths: Iterable[Path]):
        self._paths = frozenset(map(tuple, paths))

    @property
    def paths(self) -> frozenset[Path]:
        """The paths."""
        return self._paths

    def __call__(self, path: Path, value: Any) -> bool:
        """Whether it is one of them."""
        return tuple(path) in self._paths

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Paths) and self._paths == other._paths

    def __hash__(self) -> int:
        return hash(self._paths)

    def __repr__(self) -> str:
        names = sorted(map(path_string, self._paths))
        more = f", … {len(names) - 3} more" if len(names) > 3 else ""
        return f"Paths({', '.join(names[:3])}{more})"


_PATH_OR_TYPE = (
    Paths,
    nnx.PathContains,
    nnx.filterlib.PathIn,
    nnx.WithTag,
    nnx.OfType,
    nnx.Everything,
    nnx.Nothing,
)
