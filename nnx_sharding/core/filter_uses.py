"""Records what the filters of a ``StateSharding`` decide in a call, and reports unused filters.

A :class:`~nnx_sharding.StateSharding` maps filters to specs, and is called the *rules* here. The
first filter that matches a Variable decides. The *number* of a filter is its place in the rules,
and the *subject* is the Variable or array that filters are applied to. It is an error if no filter
matches, and a warning lists filters that are misspelt or come too late.

A :class:`FilterUse` notes the decisions of the rules of one argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flax import nnx

from ..errors import UnusedFilterWarning, message, raise_if_any, shortened, warn_or_raise
from ..specs.filters import (
    Paths,
    is_opaque,
    names_paths,
    paths_inside,
    spelling_hint,
    subject_text,
    to_predicate,
    without_first_keys,
)
from ..specs.paths import Path, path_string
from ..specs.state_sharding import FilterMatch, StateSharding, filter_remedy, filters_text
from .locations import NamedLocation
from .problems import join_paths


def needs_filter(slots: Sequence[int], subject: object) -> bool:
    """Whether a filter has to decide about a location: False for a number, and without arrays.

    ``subject`` is the Variable or array there, and ``slots`` are the slots of its arrays.
    """
    return bool(slots) and not isinstance(subject, int | float | complex)


class FilterUse:
    """The decisions of one ``StateSharding``, the *rules*: which filter was used for what.

    Attributes:
      rules: the filters, with a sharding for each.
      unmatched: the name and the subject of each location that needs a filter, and has none.
      added: the paths of those unmatched locations that a call added to its arguments.
      is_for_container: whether filters have the path of an unmatched location with one more key in
        front, as the path in a tuple or dict of modules would be.

    Private attributes:

        _matched     the numbers of filters that decided about a subject; None among them stands for
                     a subject about which no filter decided
        _shadowed    the numbers of filters that match a subject about which an earlier filter
                     decided. Such a filter may also decide about other subjects
        _keys        all keys in paths, by which the spelling of filters is corrected
        _paths       all paths, each from the part that it is in, by which filters for a module
                     around the argument are found
        _inside      the paths of arrays in Variables that hold several, which no filter can match
        _arguments   the names of the arguments, for messages

    The last four are dicts that serve as sets, because dicts keep their order.
    """

    def __init__(self, rules: StateSharding):
        """Starts with no decisions."""
        self.rules = rules
        self.unmatched: list[tuple[str, Any]] = []
        self.added: list[Path] = []
        self.is_for_container = False
        self._matched: set[int | None] = set()
        self._shadowed: set[int] = set()
        self._keys: dict[Any, None] = {}
        self._paths: dict[Path, None] = {}
        self._inside: dict[Path, None] = {}
        self._arguments: dict[str, None] = {}

    def find(self, named: NamedLocation, subject: object) -> list[FilterMatch]:
        """Finds the filters that decide about a location; several paths may have several filters.

        All paths of a shared Variable are tried. A filter that names one of them has priority over
        filters that do not depend on paths.

        Args:
          named: the location, with all its paths.
          subject: the Variable or array there.

        Returns:
          The matches whose filters depend on paths. The first decides, and the caller checks that
          the others agree. If there are no such matches, the match for the first path alone,
          because filters that do not depend on paths match all paths alike.
        """
        matches: list[FilterMatch] = []  # one for each path
        matches_by_path: list[FilterMatch] = []  # the matches whose filters depend on the path
        for path in named.paths:
            match = self.rules.find_below(named.part.below, path, subject)
            self._record(match, subject, named.argument.name)
            match = match._replace(path=path)  # the path from the part, as the user sees it
            matches.append(match)
            self._paths[path] = None
            self._inside.update(dict.fromkeys(paths_inside(path, subject)))
            if self._depends_on_path(match.number):
                matches_by_path.append(match)
        return matches_by_path or matches[:1]

    def _depends_on_path(self, number: int | None) -> bool:
        """Whether the filter with a number looks at paths; None stands for no filter."""
        filters = self.rules.filters
        # A `PathFunction` without specs has no filters, and returns 0 all the same.
        if number is None or number >= len(filters):
            return False
        return names_paths(to_predicate(filters[number]))

    def _record(self, match: FilterMatch, subject: object, argument: str) -> None:
        """Records which filter decided about a subject, and which later filters match it as well.

        A later filter is *shadowed*: if it never decides, it comes too late, and `unused` says so.

        Args:
          match: the filter that decided, and the path that it matches.
        """
        self._matched.add(match.number)
        first_later = 0 if match.number is None else match.number + 1  # None: no filter matches
        for later in range(first_later, len(self.rules.filters)):
            filter_ = self.rules.filters[later]
            # Filters whose use is known are not asked again, because models have thousands of
            # Variables. Lists of paths are not asked, because `unused` does not warn of them.
            if later in self._matched or later in self._shadowed or isinstance(filter_, Paths):
                continue
            if to_predicate(filter_)(match.path, subject):
                self._shadowed.add(later)
        self._keys.update(dict.fromkeys(match.path))
        self._arguments[argument] = None

    def add_unmatched(self, named: NamedLocation, subject: object, *, is_added: bool) -> None:
        """Notes a location that no filter matches, for the error of `check_matched`.

        Args:
          named: the location.
          subject: the Variable or array there.
          is_added: whether the function has added the location to its arguments.
        """
        path = named.paths[0]
        self.unmatched.append((named.name, subject))
        if is_added:
            self.added.append(path)
        # Only filters that list paths are searched, as strategies make them.
        filters = (filter_ for filter_ in self.rules.filters if isinstance(filter_, Paths))
        if any(other[1:] == path for filter_ in filters for other in filter_.paths):
            self.is_for_container = True

    def merge(self, other: FilterUse) -> FilterUse:
        """Returns the decisions of two uses whose rules are equal, as one, for `unused`.

        What `add_unmatched` has noted is left out, because it has been reported by then.
        """
        merged = FilterUse(self.rules)
        for use in (self, other):
            merged._matched |= use._matched
            merged._shadowed |= use._shadowed
            merged._keys |= use._keys
            merged._paths |= use._paths
            merged._inside |= use._inside
            merged._arguments |= use._arguments
        return merged

    def unused(self, *, strict: bool) -> Iterator[str]:
        """Yields a line for each filter that decided nothing, and is likely a mistake.

        A filter is likely a mistake if it looks misspelt, if it is for a module around the argument
        (`_for_outer_module`), or if it matches only subjects about which earlier filters decided.
        Any other filter may be meant for another argument or function. With ``strict``, filters
        that name paths are mistakes as well. A filter for a type alone, such as ``nnx.BatchStat``,
        is none, because it fits any model.
        """
        shorter_texts = self._for_outer_module()
        for number, filter_ in enumerate(self.rules.filters):
            if number in self._matched:
                continue
            # Filters of these kinds are no mistakes: strategies list all paths of a model, a last
            # filter for the rest may be left with nothing, and nobody knows which Variables a
            # user's function is for.
            is_for_the_rest = filter_ in (..., True, nnx.Everything())
            predicate = to_predicate(filter_)
            if isinstance(filter_, Paths) or is_for_the_rest or is_opaque(predicate):
                continue
            if number in shorter_texts:
                hint = f"; paths start at this argument, where {shorter_texts[number]} would match"
            else:
                hint = spelling_hint(filter_, self._keys, self._inside)
            is_likely_mistake = bool(hint) or number in self._shadowed
            if is_likely_mistake or (strict and names_paths(predicate)):
                yield f"  {self.rules.names[number]}, for {join_paths([*self._arguments])}{hint}"
        if shorter_texts:
            yield f"  all paths there: {', '.join(shortened(map(path_string, self._paths)))}"

    def _for_outer_module(self) -> dict[int, str]:
        """Finds filters that are for a module around the argument, by their number.

        Such a filter would match without its first keys. The result has the text of the filter
        without these. If any filter for paths decided something, the result is empty, because the
        other filters may be for other models.
        """
        if any(map(self._depends_on_path, self._matched)):
            return {}
        shorter_texts = {}
        for number, filter_ in enumerate(self.rules.filters):
            text = without_first_keys(filter_, self._paths)  # "" if no such filter matches
            if text:
                shorter_texts[number] = text
        return shorter_texts

    def outer_hint(self) -> str:
        """Returns a sentence if filters are for a module around the argument; otherwise ""."""
        text = next(iter(self._for_outer_module().values()), "")  # one of the filters is enough
        return f"Paths start at this argument, where {text} would match." if text else ""


def check_filters(uses: Iterable[FilterUse], *, name: str, strict: bool) -> None:
    """Warns about filters that decided nothing and are likely mistakes, or raises if strict.

    Args:
      uses: the decisions for each argument that has rules.
      name: the name of the transform, in messages.
      strict: whether to raise an error instead.
    """
    # The user may give one set of rules for several arguments, and no argument has to need all
    # filters. So uses of equal rules are taken together.
    merged: list[FilterUse] = []
    for use in uses:
        for position, other in enumerate(merged):
            if other.rules == use.rules:
                merged[position] = other.merge(use)
                break
        else:
            merged.append(use)
    lines = [line for use in merged for line in use.unused(strict=strict)]
    if lines:
        head = f"{name}: these filters match nothing, or only what earlier filters match:"
        remedy = "Correct or remove them, or put them before the filter that matches the same."
        text = message(head, lines, remedy)
        warn_or_raise(UnusedFilterWarning, text, strict=strict, anchor="unused-filter")


def check_matched(uses: Iterable[FilterUse]) -> None:
    """Raises an error for Variables that no filter of their ``StateSharding`` matches, if any.

    The error lists the Variables of all ``uses``, and says what to do about the first set of rules.
    """
    failed = [use for use in uses if use.unmatched]
    if not failed:
        return
    first = failed[0]
    unmatched = [item for use in failed for item in use.unmatched]  # pairs of name and subject
    texts = dict.fromkeys(filters_text(use.rules) for use in failed)  # each text once
    remedy = filter_remedy(first.rules, [subject for _, subject in unmatched], first.added)
    outer_hint = first.outer_hint()
    if outer_hint:
        remedy = outer_hint  # the other remedy, a last filter for the rest, would hide the mistake
    # The filters may have paths of a tuple or dict of modules, such as ``(0, "kernel")``, and be
    # used for one of these modules, where the path is ``("kernel",)``.
    if any(use.is_for_container for use in failed):
        remedy = (
            "Their paths begin with another key, as in a tuple or dict of modules: pass that as "
            "one argument, or choose shardings for each; fsdp(model, optimizer=optimizer) covers "
            "both."
        )
    raise_if_any(
        ValueError,
        f"no filter of the {type(first.rules).__name__} matches:",
        [f"  {name}: {subject_text(subject)}" for name, subject in unmatched],
        f"{remedy} The filters are {'; or '.join(texts)}.",
        anchor="no-filter-matches",
    )
