"""NNX filters as predicates, and filters for paths.

A *filter* of NNX chooses Variables by type, by tag or by exact path. The *predicate* of a filter is
a function ``(path, variable) -> bool``. This module has filters by pattern. It also tells messages
whether a filter depends on paths or on values, and which of its words may be misspelt.

A path is a tuple of keys, ``("blocks", 3, "up")``, and patterns see it as text, ``blocks/3/up``
(`path_string`). `suggestion` returns the end of a message, such as ``; did you mean 'kernel'?``, if
a word is close to one of some names, and "" otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from .. import _compat
from ..errors import shortened
from .fitting import show, suggestion
from .paths import Path, path_key, path_string

Predicate = Callable[[tuple[Any, ...], Any], bool]


def to_predicate(filter_: Any) -> Predicate:
    """Returns the predicate ``(path, value) -> bool`` for a filter.

    Raises a ``TypeError`` if it is no filter.
    """
    try:
        predicate: Predicate = nnx.filterlib.to_predicate(filter_)
    except (TypeError, ValueError):  # Flax may fail while it formats its own message
        raise TypeError(
            f"{show(filter_)} is not an NNX filter. Use a Variable type, a tag, `...`, a predicate "
            "(path, variable) -> bool, or a tuple of these."
        ) from None
    return predicate


def filter_pairs(name: str, given: Any) -> list[tuple[Any, Any]]:
    """Returns pairs of a filter and the value that it chooses, from a mapping or pairs.

    ``name`` is the class that takes the filters, for the message of a ``TypeError``.
    """
    items = getattr(given, "items", lambda: given)  # pairs have no method ``items``
    try:
        return [(_without_lists(filter_), chosen) for filter_, chosen in items()]
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} takes a mapping from filters, or pairs of a filter and what it chooses, not "
            f"{show(given)}."
        ) from None


def _without_lists(filter_: Any) -> Any:
    """Returns a filter with tuples instead of lists. Both mean the same, but lists have no hash."""
    return tuple(map(_without_lists, filter_)) if isinstance(filter_, list | tuple) else filter_


def module_predicate(filter_: object) -> Predicate:
    """Returns the predicate of a filter for modules; a string is a regular expression for paths."""
    return PathRegex(filter_) if isinstance(filter_, str) else to_predicate(filter_)


def paths_inside(path: Path, subject: object) -> list[Path]:
    """Returns the paths of the arrays in a Variable that holds a list or a dict; none for others.

    Filters see the path of the Variable only, because a Variable has one spec.
    """
    variable: Any = subject
    value = variable.get_raw_value() if _compat.is_any_variable(subject) else None
    if not isinstance(value, dict | list | tuple):
        return []
    keys = [keys for keys, _ in jax.tree_util.tree_leaves_with_path(value)]
    return [(*path, *map(path_key, inner)) for inner in keys]


def spelling_hint(
    filter_: object, keys: Iterable[object], paths_in_variables: Iterable[Path] = ()
) -> str:
    """Returns what is probably wrong with a filter that matches nothing, for the end of a message.

    Args:
      filter_: the filter.
      keys: the keys in all paths of the model, one of which may have been meant.
      paths_in_variables: the paths of arrays in Variables that hold several (`paths_inside`).
    """
    if isinstance(filter_, PathPattern | nnx.PathContains):
        inner = next((path for path in paths_in_variables if filter_(path, None)), None)
        if inner is not None:
            return f"; {path_string(inner)} is in a Variable, which has one spec for all its arrays"
    names = list(map(str, keys))
    words = _words(filter_)  # the keys that the filter names
    # Globs come first, because nearly every glob is a valid regular expression for other paths.
    hint = glob_hint(filter_.text) if isinstance(filter_, PathRegex) else ""
    if hint:
        return f".{hint.removesuffix('.')}"  # the hint is a sentence, and the caller ends it
    # The suggestion for the first word that is close to a key, such as `; did you mean 'kernel'?`.
    suggestions = [suggestion(word, names) for word in words if word not in names]
    first_suggestion = next((text for text in suggestions if text), "")
    # A string is a tag here, as in Flax. In `activation_shardings` a string is a pattern for paths,
    # so users may mean a pattern here. That is likely if its words are keys, or close to keys.
    if isinstance(filter_, str) and (first_suggestion or not set(names).isdisjoint(words)):
        return f"; a string is a tag here: for paths, write PathRegex({filter_!r})"
    return first_suggestion


def without_first_keys(filter_: object, paths: Collection[Path]) -> str:
    """Returns a filter for paths, as text, without its first keys, if it then matches a path.

    Returns "" otherwise. A filter for a whole model matches nothing in a module of the model,
    because paths start at the module there. For ``PathRegex("blocks/0/up/kernel")`` and the path
    ``up/kernel``, the result is ``PathRegex('up/kernel')``; for ``down/kernel``, it is "". The
    first filter in a tuple that gives a text decides. Filters other than patterns and paths have no
    keys that could be left out.

    Args:
      filter_: the filter.
      paths: the paths of the Variables that the filter is for.
    """
    if isinstance(filter_, tuple):
        part_texts = (without_first_keys(part, paths) for part in filter_)
        return next((text for text in part_texts if text), "")
    if type(filter_) is nnx.filterlib.PathIn:  # a strategy makes `Paths`, which nobody rewrites
        # Each path of the filter without its first keys, in all lengths.
        ends = {path[start:] for path in filter_.paths for start in range(1, len(path))}
        found = next((path for path in paths if path in ends), None)
        return repr(nnx.filterlib.PathIn(found)) if found else ""
    if not isinstance(filter_, PathPattern):
        return ""
    path_texts = [*map(path_string, paths)]
    flags = getattr(filter_.pattern, "flags", 0)
    for slash in _slashes(filter_.text):
        end = filter_.text[slash + 1 :]
        with contextlib.suppress(TypeError, ValueError, re.error):  # what is left may be invalid
            pattern = type(filter_)(end)
            # The rest has to match from the start of the path, because the keys that were left out
            # would come before it.
            match = re.compile(pattern._regex(), flags).match
            if any(match(text) and not _starts_with_any(match, text) for text in path_texts):
                return repr(pattern)
    return ""


def _starts_with_any(match: Callable[[str], Any], text: str) -> bool:
    """Whether a pattern that matches a path would match with other keys at its start, too.

    This is so for ``.*kernel``, ``[^/]+/kernel`` and an empty pattern. That such a pattern matches
    shows nothing about the path.

    Args:
      match: the ``match`` of the pattern, compiled as a regular expression.
    """
    _, slash, rest = text.partition("/")
    # The path with one more key before it, and with another first key. No key contains a null.
    return any(map(match, (f"\0/{text}", f"\0{slash}{rest}")))


def _slashes(pattern: str) -> Iterator[int]:
    """Yields the positions of slashes in a pattern that are outside of brackets."""
    depth = 0  # the number of parentheses around the position
    # The matches are escapes and brackets as a whole, so that what is in these is not counted.
    for match in re.finditer(r"\\.|\[[^\]]*\]|[(/)]", pattern):
        if match[0] == "(":
            depth += 1
        elif match[0] == ")":
            depth -= 1
        elif match[0] == "/" and depth == 0:
            yield match.start()


def _words(filter_: object) -> list[str]:
    """Returns the keys that a filter for paths names: ``blocks`` and ``up`` of ``blocks/*/up``.

    Tuples and lists of filters, ``nnx.Any`` and ``nnx.All`` name the keys that their parts name.
    All other filters name no keys.
    """
    if isinstance(filter_, nnx.PathContains):
        return [str(filter_.key)]
    if isinstance(filter_, str | PathPattern):
        text = filter_ if isinstance(filter_, str) else filter_.text
        # A word has two letters or more, because one letter may be an escape, such as `d` of `\d`.
        return re.findall(r"[A-Za-z_]\w+", text)
    # `nnx.Any` and `nnx.All` have their parts in `predicates`.
    parts = filter_ if isinstance(filter_, tuple | list) else getattr(filter_, "predicates", ())
    return [word for part in parts for word in _words(part)]


def shadowed(count: int, matches: Iterable[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """Returns the filters that never decide, each with the earlier filters that decide instead.

    For two filters and the matches [[0], [0, 1]], the result is {1: (0,)}, because filter 1 matches
    only what filter 0 matches. A filter that matches nothing has an empty tuple.

    Args:
      count: the number of filters.
      matches: for each Variable or module, the numbers of the filters that match it, in order.
    """
    # By the number of a filter: the filters that decide about what it matches.
    deciding: dict[int, set[int]] = {number: set() for number in range(count)}
    for numbers in matches:
        for number in numbers:
            deciding[number].add(numbers[0])  # the first filter that matches decides
    return {
        number: tuple(sorted(deciders))
        for number, deciders in deciding.items()
        if number not in deciders
    }


def subject_text(subject: object) -> str:
    """Returns a Variable or an array as text, for messages: ``Param of shape (2,)``.

    For a Variable that holds a pytree, and for any other pytree, the text lists the shapes of its
    arrays: ``State with arrays of shape (2,), (3, 2)``.
    """
    if isinstance(subject, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        kind = "array"
    elif _compat.is_ref(subject):
        kind = "Ref"
    else:
        kind = type(subject).__name__
    shape = getattr(subject, "shape", None)  # a Variable of one array has its shape
    if shape is not None:
        return f"{kind} of shape {shape}"
    value = _compat.get_value(subject) if _compat.is_variable(subject) else subject
    # Each shape is shown once. The shape of a number is ().
    shapes = dict.fromkeys(str(getattr(leaf, "shape", ())) for leaf in jax.tree.leaves(value))
    first_shapes = shortened(shapes)  # at most ten shapes
    return f"{kind} with arrays of shape {', '.join(first_shapes)}" if shapes else kind


def is_opaque(predicate: object) -> bool:
    """Whether a predicate is a user's function, which may depend on shapes and dtypes."""
    return any(not isinstance(part, _PATH_OR_TYPE) for part in _parts(predicate))


def names_paths(predicate: object) -> bool:
    """Whether a predicate depends, or may depend, on paths and not only on the Variable."""
    return any(not isinstance(part, _TYPE) for part in _parts(predicate))


def _parts(predicate: object) -> Iterable[Any]:
    """Returns the predicates that ``nnx.Any``, ``nnx.All`` and ``nnx.Not`` combine."""
    if isinstance(predicate, nnx.Any | nnx.All):
        return [part for inner in predicate.predicates for part in _parts(inner)]
    return _parts(predicate.predicate) if isinstance(predicate, nnx.Not) else [predicate]


class Paths(nnx.filterlib.PathIn):
    """A filter that matches certain paths.

    Args:
      paths: the paths, each the keys from the argument to a Variable.
      note: why the Variables have their sharding, for reports.
      strategy: what chose the sharding, for reports: ``column of tensor_parallel, fsdp over
        dimension 0``.

    Example:
      >>> from nnx_sharding import filters
      >>> filters.Paths([("blocks", 3, "up")])(("blocks", 3, "up"), None)
      True
    """

    note: str
    strategy: str

    def __init__(self, paths: Iterable[Path], note: str = "", strategy: str = ""):
        super().__init__(*map(tuple, paths))
        object.__setattr__(self, "note", note)  # PathIn is frozen
        object.__setattr__(self, "strategy", strategy)

    def __repr__(self) -> str:
        names = sorted(map(path_string, self.paths))
        more = f", … {len(names) - 3} more" if len(names) > 3 else ""
        note = f"; {self.note}" if self.note else ""
        return f"Paths({', '.join(names[:3])}{more}{note})"


@dataclasses.dataclass(frozen=True, repr=False)
class PathPattern:
    """Base class of filters that match paths by a pattern.

    A subclass translates its pattern to a regular expression (:meth:`_regex`).

    Attributes:
      pattern: what the user wrote: a string, or a compiled regular expression.
      search: searches the regular expression in the text of a path; None if it is not found.
    """

    pattern: str | re.Pattern[str]
    search: Callable[[str], Any] = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Compiles the pattern; raises a ``TypeError`` or ``ValueError`` if it is invalid."""
        # A pattern is a string, or a compiled regular expression whose `pattern` is a string.
        if not isinstance(getattr(self.pattern, "pattern", self.pattern), str):
            raise TypeError(f"{type(self).__name__} takes a string, not {self.pattern!r}.")
        try:
            search = re.compile(self._regex()).search
        except re.error as error:
            hint = "PathRegex is for regular expressions, PathGlob for blocks/*/kernel"
            raise ValueError(f"{self!r}: {error}. {hint}.") from None
        object.__setattr__(self, "search", search)  # the class is frozen

    def _regex(self) -> str | re.Pattern[str]:
        """Returns the pattern as a regular expression that is searched in a path."""
        return self.pattern

    @property
    def text(self) -> str:
        """The pattern as a string."""
        return str(getattr(self.pattern, "pattern", self.pattern))

    def __call__(self, path: Path, value: object) -> bool:
        """Whether the pattern matches the path."""
        return self.search(path_string(path)) is not None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.pattern!r})"


class PathRegex(PathPattern):
    r"""A filter that matches if ``re.search`` finds a regular expression in the path.

    Args:
      pattern: a string or a compiled regular expression, for paths such as
        ``blocks/3/up/kernel``. A path ends at the Variable, so ``kernel$`` matches its name.

    Example:
      >>> from nnx_sharding import filters
      >>> filters.PathRegex(r"blocks/\d+/up/")(("blocks", 3, "up", "kernel"), None)
      True
    """


class PathGlob(PathPattern):
    """A filter that matches full paths by a pattern like those for file names (globs).

    Args:
      pattern: keys with ``/`` between them. ``*``, ``?`` and ``[...]`` work as in ``fnmatch``
        within one key; ``**`` matches any number of keys, including none, as in ``gitignore``. A
        ``$`` at the end is ignored; ``[$]`` matches the character.

    Example:
      >>> from nnx_sharding import filters
      >>> filters.PathGlob("**/up/*")(("blocks", 3, "up", "kernel"), None)
      True
    """

    def _regex(self) -> str:
        """Translates the glob to a regular expression, key by key.

        ``a/*/c`` becomes ``a/[^/]*/c``, ``**/c`` becomes ``(?:.*/)?c``, and ``a/**/c`` becomes
        ``a(?:/.*)?/c``.

        Raises:
          TypeError: the pattern is a compiled regular expression.
          ValueError: a key is empty, or has ``**`` beside other characters.
        """
        if not isinstance(self.pattern, str):
            raise TypeError(f"PathGlob takes a string, not {self.pattern!r}.")
        regex = ""
        slash = ""  # the text before the next key, which is empty before the first key
        for key in self.pattern.removesuffix("$").split("/"):
            if key == "**":
                # `**` is any number of keys, each with one slash. The slash is before each key if a
                # key came before. Otherwise the slash is after each key, and `slash` stays empty.
                regex += "(?:/.*)?" if slash else "(?:.*/)?"
            elif not key or "**" in key:
                raise ValueError(f"{self!r}: write keys and `**` like a/b/**/c.")
            else:
                regex += slash + _GLOB_PART.sub(_part_regex, key)
                slash = "/"
        if not slash:  # the glob is `**`, and an empty regular expression is found in every path
            return ""
        # \A and \Z stand for the ends of the path, and (?=.) says that it is not empty. (?s) makes
        # a dot match line breaks as well.
        return rf"(?s)\A(?=.){regex}\Z"


def glob_hint(text: str) -> str:
    """Returns a hint for a regular expression that matches nothing, if it looks like a glob."""
    is_glob = re.search(r"\*\*|(^|/)\*(/|$)", text) is not None
    return f" For globs, pass PathGlob({text!r})." if is_glob else ""


# One part of a key: `*`, `?`, characters in brackets, or any other character.
_GLOB_PART = re.compile(
    r"(?P<star>\*)|\?|\[(?P<negated>!?+)(?P<characters>[^\]]+|\][^\]]*)\]|(?P<other>.)", re.DOTALL
)


def _part_regex(part: re.Match[str]) -> str:
    """Translates one part of a key, as ``_GLOB_PART`` matches it, to a regular expression.

    ``*`` becomes ``[^/]*``, ``?`` becomes ``[^/]``, ``[!ab]`` becomes ``(?!/)[^ab]``, and other
    characters are escaped.
    """
    star, negated, characters, other = part.group("star", "negated", "characters", "other")
    if characters is not None:
        # Characters with a meaning between the brackets of regular expressions are escaped.
        escaped = re.sub(r"([\\\[\]^&|~])", r"\\\1", characters)
        return f"(?!/)[{'^' if negated else ''}{escaped}]"
    if other == "[":
        raise ValueError(f"PathGlob: `[` is not closed in {part.string!r}; write `[[]` for `[`.")
    if other:
        return re.escape(other)
    return "[^/]*" if star else "[^/]"


_TYPE = (nnx.WithTag, nnx.OfType, nnx.Everything, nnx.Nothing)
_PATH_OR_TYPE = (*_TYPE, PathPattern, nnx.PathContains, nnx.filterlib.PathIn)
