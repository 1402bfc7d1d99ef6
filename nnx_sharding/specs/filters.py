"""NNX filters as predicates, and filters for paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from .. import _compat
from ..errors import shortened
from .fitting import suggestion
from .paths import Path, path_string

Predicate = Callable[[tuple[Any, ...], Any], bool]


def to_predicate(filter_: Any) -> Predicate:
    """The predicate ``(path, value) -> bool`` for a filter."""
    try:
        predicate: Predicate = nnx.filterlib.to_predicate(filter_)
    except (TypeError, ValueError):  # Flax fails while it formats its message
        raise TypeError(
            f"{filter_!r} is not an NNX filter. Use a Variable type, a tag, `...`, a predicate "
            "(path, variable) -> bool, or a tuple of these."
        ) from None
    return predicate


def module_predicate(filter_: Any) -> Predicate:
    """The predicate for a filter for modules: a string is searched in the path."""
    return PathRegex(filter_) if isinstance(filter_, str) else to_predicate(filter_)


def misspelt(filter_: Any, keys: Iterable[Any]) -> str:
    """``; did you mean 'up'?`` for a filter with a key that nearly equals one of ``keys``."""
    names = list(map(str, keys))
    near = (suggestion(word, names) for word in _words(filter_) if word not in names)
    return next(filter(None, near), "")


def _words(filter_: Any) -> list[str]:
    """The keys that a filter for paths names."""
    if isinstance(filter_, nnx.PathContains):
        return [str(filter_.key)]
    if isinstance(filter_, PathPattern):
        return re.findall(r"[A-Za-z_]\w+", filter_.text)
    parts = filter_ if isinstance(filter_, tuple | list) else getattr(filter_, "predicates", ())
    return [word for part in parts for word in _words(part)]


def shadowed(count: int, matches: Iterable[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """The filters that never match first, each with the earlier ones that match instead."""
    deciding: dict[int, set[int]] = {number: set() for number in range(count)}
    for numbers in matches:
        for number in numbers:
            deciding[number].add(numbers[0])
    return {number: tuple(sorted(by)) for number, by in deciding.items() if number not in by}


def subject_text(subject: Any) -> str:
    """A Variable or an array as in ``Param of shape (2,)``, for messages about filters."""
    is_array = isinstance(subject, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
    is_ref = _compat.is_ref(subject)
    kind = "array" if is_array else "Ref" if is_ref else type(subject).__name__
    shape = getattr(subject, "shape", None)
    if shape is not None:
        return f"{kind} of shape {shape}"
    value = _compat.get_value(subject) if _compat.is_variable(subject) else subject
    shapes = dict.fromkeys(str(getattr(x, "shape", ())) for x in jax.tree.leaves(value))
    return f"{kind} with arrays of shape {', '.join(shortened(shapes))}" if shapes else kind


def is_opaque(predicate: Any) -> bool:
    """Whether a predicate is a user's function, which may depend on shapes and dtypes."""
    return any(not isinstance(part, _PATH_OR_TYPE) for part in _parts(predicate))


def names_paths(predicate: Any) -> bool:
    """Whether a predicate depends, or may depend, on paths and not only on the Variable."""
    return any(not isinstance(part, _TYPE) for part in _parts(predicate))


def _parts(predicate: Any) -> Iterable[Any]:
    """The predicates that ``nnx.Any``, ``nnx.All`` and ``nnx.Not`` combine."""
    if isinstance(predicate, nnx.Any | nnx.All):
        return [part for one in predicate.predicates for part in _parts(one)]
    return _parts(predicate.predicate) if isinstance(predicate, nnx.Not) else [predicate]


class Paths(nnx.filterlib.PathIn):
    """A filter that matches certain paths.

    Args:
      paths: the paths, each the keys from the argument to a Variable.
      note: why they have their sharding, for reports.

    Example:
      >>> from nnx_sharding import filters
      >>> first = filters.Paths([("blocks", 0, "kernel")])
      >>> first(("blocks", 0, "kernel"), None), first(("blocks", 1, "kernel"), None)
      (True, False)
    """

    note: str

    def __init__(self, paths: Iterable[Path], note: str = ""):
        super().__init__(*map(tuple, paths))
        object.__setattr__(self, "note", note)  # PathIn is frozen

    def __call__(self, path: Path, value: Any) -> bool:
        """Whether ``path`` is one of them."""
        return tuple(path) in self.paths

    def __repr__(self) -> str:
        names = sorted(map(path_string, self.paths))
        more = f", … {len(names) - 3} more" if len(names) > 3 else ""
        note = f"; {self.note}" if self.note else ""
        return f"Paths({', '.join(names[:3])}{more}{note})"


class PathPattern:
    """Base class of filters that match paths by a pattern."""

    __slots__ = ("_pattern", "search")

    def __init__(self, pattern: Any, regex: str | re.Pattern[str]):
        self._pattern = pattern
        try:
            self.search = re.compile(regex).search
        except re.error as error:
            hint = "PathRegex is for regular expressions, PathGlob for blocks/*/kernel"
            raise ValueError(f"{self!r}: {error}. {hint}.") from None

    @property
    def text(self) -> str:
        """The pattern as a string."""
        return str(getattr(self._pattern, "pattern", self._pattern))

    def __call__(self, path: Path, value: Any) -> bool:
        """Whether the pattern matches the path."""
        return self.search(path_name(path)) is not None

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._pattern == other._pattern

    def __hash__(self) -> int:
        return hash(self._pattern)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._pattern!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._pattern,)


class PathRegex(PathPattern):
    r"""A filter that matches where ``re.search`` finds a regular expression in the path.

    Args:
      pattern: a string or a compiled regular expression, for paths such as
        ``blocks/3/up/kernel``. They end at the Variable, so ``kernel$`` matches that name.

    Raises:
      TypeError: the pattern is neither.
      ValueError: it is not a valid regular expression.

    Example:
      >>> from nnx_sharding import filters
      >>> filters.PathRegex(r"blocks/\d+/up/")(("blocks", 3, "up", "kernel"), None)
      True
    """

    __slots__ = ()

    def __init__(self, pattern: str | re.Pattern[str]):
        if not isinstance(getattr(pattern, "pattern", pattern), str):
            raise TypeError(f"PathRegex takes a string or re.compile(string), not {pattern!r}.")
        super().__init__(pattern, pattern)


class PathGlob(PathPattern):
    """A filter that matches full paths by a pattern like those for file names (globs).

    Args:
      pattern: keys with ``/`` between them. ``*``, ``?`` and ``[...]`` work as in ``fnmatch``
        within one key; ``**`` matches any number of keys, including none, as in ``gitignore``. A
        ``$`` at the end is ignored; ``[$]`` matches the character.

    Raises:
      TypeError: the pattern is not a string.
      ValueError: it has an empty key, ``**`` next to other characters, or an open ``[``.

    Example:
      >>> from nnx_sharding import filters
      >>> filters.PathGlob("**/up/*")(("blocks", 3, "up", "kernel"), None)
      True
    """

    __slots__ = ()

    def __init__(self, pattern: str):
        if not isinstance(pattern, str):
            raise TypeError(f"PathGlob takes a string, not {pattern!r}.")
        regex, slash = "", ""
        for key in pattern.removesuffix("$").split("/"):
            if key == "**":
                regex += "(?:/.*)?" if slash else "(?:.*/)?"
            elif not key or "**" in key:
                raise ValueError(f"PathGlob({pattern!r}): write keys and `**` like a/b/**/c.")
            else:
                regex += slash + _GLOB_PART.sub(_part_regex, key)
                slash = "/"
        super().__init__(pattern, rf"(?s)\A(?=.){regex}\Z" if slash else "")


def glob_hint(text: str) -> str:
    """A hint for a regular expression that matches nothing, if it looks like a glob."""
    is_glob = re.search(r"\*\*|(^|/)\*(/|$)", text) is not None
    return f" For globs, pass PathGlob({text!r})." if is_glob else ""


_GLOB_PART = re.compile(r"(\*)|\?|\[(!?)(\]?[^\]]*)\]|(.)", re.DOTALL)


def _part_regex(part: re.Match[str]) -> str:
    any_number, negated, inside, literal = part.groups()
    if inside is not None:
        inside = re.sub(r"([\\\[\]^&|~])", r"\\\1", inside)
        return f"(?!/)[{'^' if negated else ''}{inside}]"
    if literal == "[":
        raise ValueError(f"PathGlob: `[` is not closed in {part.string!r}; write `[[]` for `[`.")
    if literal:
        return re.escape(literal)
    return "[^/]*" if any_number else "[^/]"


_last: tuple[Path | None, str] = (None, "")


def path_name(path: Path) -> str:
    """The path as a string, cached for the next filter that tests the same path."""
    global _last
    known, name = _last
    if known is not path:
        name = path_string(path)
        if type(path) is tuple:
            _last = path, name
    return name


_TYPE = (nnx.WithTag, nnx.OfType, nnx.Everything, nnx.Nothing)
_PATH_OR_TYPE = (*_TYPE, PathPattern, nnx.PathContains, nnx.filterlib.PathIn)
