"""NNX filters as predicates, with what the rest of the library has to know of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from flax import nnx

from .fitting import suggestion
from .paths import Path, path_string

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


def misspelt(filter_: Any, keys: Iterable[Any]) -> str:
    """``; did you mean 'up'?`` for a filter that names a key which is nearly one of ``keys``."""
    known = list(map(str, keys))
    near = (suggestion(word, known) for word in _words(filter_) if word not in known)
    return next(filter(None, near), "")


def _words(filter_: Any) -> list[str]:
    """The keys that a filter for paths names."""
    if isinstance(filter_, nnx.PathContains):
        return [str(filter_.key)]
    if isinstance(filter_, PathPattern):
        return re.findall(r"[A-Za-z_]\w+", filter_.text)
    parts = filter_ if isinstance(filter_, tuple | list) else getattr(filter_, "predicates", ())
    return [word for part in parts for word in _words(part)]


def is_opaque(predicate: Any) -> bool:
    """Whether a predicate is the user's own, which may look at shapes and dtypes."""
    if isinstance(predicate, _PATH_OR_TYPE):
        return False
    if isinstance(predicate, nnx.Any | nnx.All):
        return any(map(is_opaque, predicate.predicates))
    if isinstance(predicate, nnx.Not):
        return is_opaque(predicate.predicate)
    return True


def names_paths(predicate: Any) -> bool:
    """Whether a predicate looks at paths, or may do so, and not only at what is there."""
    if isinstance(predicate, nnx.WithTag | nnx.OfType | nnx.Everything | nnx.Nothing):
        return False
    if isinstance(predicate, nnx.Any | nnx.All):
        return any(map(names_paths, predicate.predicates))
    return names_paths(predicate.predicate) if isinstance(predicate, nnx.Not) else True


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


class PathPattern:
    """What filters by a pattern for paths have in common."""

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
        """Whether the pattern is found in the path."""
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
      pattern: a string, or what ``re.compile`` made of one, for paths as one writes them:
        ``blocks/3/up/kernel``. They end at the Variable, so ``kernel$`` matches that name.

    Raises:
      TypeError: the pattern is neither.
      ValueError: it is no regular expression.

    Example:
      >>> from nnx_sharding.filters import PathRegex
      >>> PathRegex(r"blocks/\d+/up/")(("blocks", 3, "up", "kernel"), None)
      True
    """

    __slots__ = ()

    def __init__(self, pattern: str | re.Pattern[str]):
        if not isinstance(getattr(pattern, "pattern", pattern), str):
            raise TypeError(f"PathRegex takes a string or re.compile(string), not {pattern!r}.")
        super().__init__(pattern, pattern)


class PathGlob(PathPattern):
    """A filter that matches whole paths, written like the names of files.

    Args:
      pattern: keys with ``/`` between them. ``*`` stands for any characters of one key, ``?``
        for one, ``[a-z]`` for one of these, ``[!a-z]`` for another, ``**`` for any number of
        keys, also none. A ``$`` at the end changes nothing; ``[$]`` is the character.

    Raises:
      TypeError: the pattern is no string.
      ValueError: it has an empty key, ``**`` beside other characters, or an open ``[``.

    Example:
      >>> from nnx_sharding.filters import PathGlob
      >>> PathGlob("**/up/*")(("blocks", 3, "up", "kernel"), None)
      True

    ``*``, ``?`` and ``[...]`` are those of Python's ``fnmatch``, ``**`` is that of ``gitignore``.
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


_GLOB_PART = re.compile(r"(\*)|\?|\[(!?)(\]?[^\]]*)\]|(.)", re.DOTALL)


def _part_regex(part: re.Match[str]) -> str:
    any_number, negated, inside, literal = part.groups()
    if inside is not None:
        inside = re.sub(r"([\\\[\]^&|~])", r"\\\1", inside)
        return f"(?!/)[{'^' if negated else ''}{inside}]"
    if literal == "[":
        raise ValueError(f"PathGlob: `[` is not closed in {part.string!r}; for itself write `[[]`.")
    if literal:
        return re.escape(literal)
    return "[^/]*" if any_number else "[^/]"


_last: tuple[Path | None, str] = (None, "")


def path_name(path: Path) -> str:
    """The path as a string, kept for the next filter that is asked about the same."""
    global _last
    known, name = _last
    if known is not path:
        name = path_string(path)
        if type(path) is tuple:
            _last = path, name
    return name


_PATH_OR_TYPE = (
    Paths,
    PathPattern,
    nnx.PathContains,
    nnx.filterlib.PathIn,
    nnx.WithTag,
    nnx.OfType,
    nnx.Everything,
    nnx.Nothing,
)
