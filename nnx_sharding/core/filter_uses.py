"""What the filters of a ``StateSharding`` decided in a call, and the messages about it.

A :class:`~nnx_sharding.StateSharding`, here the *rules*, maps filters to specs. Its first filter
that matches the path of a Variable decides. The *number* of a filter is its place in the rules; the
*subject* is the Variable or array that filters are applied to. It is an error if no filter matches,
and a warning tells about filters that are misspelt or come too late.

A :class:`FilterUse` notes the decisions of the rules of one argument. From other modules:

    FilterMatch    a path, with the number and the sharding of the filter that decides about it;
                   both are None if none does
    NamedLocation  where a Variable or array is: ``paths`` are all paths to it in its ``part`` of an
                   ``argument``, and ``part.below`` is the path of the part in a tuple or dict of
                   modules that the rules are for; empty without one
    Paths          a filter that lists paths, as a strategy makes it
    is_opaque      whether nothing is known of a filter, such as a function of the user
    names_paths    whether a filter looks at paths
    spelling_hint  a suggestion if a filter names a key that is nearly one of some others, or ""
    filter_remedy  the end of the error for subjects that no filter matches: what to do
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flax import nnx

from ..errors import UnusedFilterWarning, message, raise_listed, warn_or_raise
from ..specs.filters import Paths, is_opaque, names_paths, spelling_hint, subject_text, to_predicate
from ..specs.paths import Path
from ..specs.state_sharding import FilterMatch, StateSharding, filter_remedy, filters_text
from .locations import NamedLocation
from .problems import join_paths


def needs_filter(slots: Sequence[int], subject: object) -> bool:
    """Whether a filter has to decide about a location: not if it holds no array, or a number.

    ``subject`` is the Variable or array there, ``slots`` are those of its arrays.
    """
    return bool(slots) and not isinstance(subject, int | float | complex)


class FilterUse:
    """The decisions of one ``StateSharding``, the *rules*: which filter was used for what.

    Attributes:
      rules: the filters, known by their number there, and a sharding for each.
      unmatched: the name and the subject of each location that needs a filter, and has none.
      added: the paths of those among them that a call added to its arguments.
    """

    def __init__(self, rules: StateSharding):
        """Starts with no decisions."""
        self.rules = rules
        self.unmatched: list[tuple[str, Any]] = []
        self.added: list[Path] = []
        # The numbers of filters that decided about anything; None if none of them did.
        self._matched: set[int | None] = set()
        # Those that match something about which an earlier one decided; some may also decide.
        self._shadowed: set[int] = set()
        # Dicts as sets that keep their order: all keys in paths, to find what a misspelt one meant,
        # and the names of the arguments.
        self._keys: dict[Any, None] = {}
        self._arguments: dict[str, None] = {}

    def find(self, named: NamedLocation, subject: object) -> list[FilterMatch]:
        """Finds the filters that decide about a location: the first one does, others may disagree.

        All paths of a shared Variable are tried: a filter that names one of them has priority over
        those that do not depend on paths.

        Args:
          named: the location, with all its paths.
          subject: the Variable or array there.

        Returns:
          Matches by path, which the caller compares. If there are none, the match for the first
          path alone, because filters that do not depend on paths match all paths alike.
        """
        matches: list[FilterMatch] = []  # one for each path
        matches_by_path: list[FilterMatch] = []  # those whose filter depends on the path
        for path in named.paths:
            match = self.rules.find_below(named.part.below, path, subject)
            self._record(match, subject, named.argument.name)
            match = match._replace(path=path)  # from the part, as the user sees it
            matches.append(match)
            if self._depends_on_path(match.number):
                matches_by_path.append(match)
        return matches_by_path or matches[:1]

    def _depends_on_path(self, number: int | None) -> bool:
        """Whether the filter with a number looks at paths; None stands for no filter."""
        filters = self.rules.filters
        if number is None or number >= len(filters):  # the latter for a function without filters
            return False
        return names_paths(to_predicate(filters[number]))

    def _record(self, match: FilterMatch, subject: object, argument: str) -> None:
        """Records which filter decided about a subject, and which later ones match it, too.

        A later one is *shadowed*: if it never decides, it comes too late, and `unused` says so.

        Args:
          match: the filter that decided, and the path by which it was found.
          subject: the Variable or array.
          argument: the name of the argument with it.
        """
        self._matched.add(match.number)
        first_later = 0 if match.number is None else match.number + 1  # None: no filter matches
        for later in range(first_later, len(self.rules.filters)):
            filter_ = self.rules.filters[later]
            # What is known is not asked again: models have thousands of Variables. Nor are lists of
            # paths, about which `unused` does not warn.
            if later in self._matched or later in self._shadowed or isinstance(filter_, Paths):
                continue
            if to_predicate(filter_)(match.path, subject):
                self._shadowed.add(later)
        self._keys.update(dict.fromkeys(match.path))
        self._arguments[argument] = None

    def is_inside(self, path: Path) -> bool:
        """Whether one of the paths is this one below another key, as in a tuple of modules."""
        paths = (path for x in self.rules.filters if isinstance(x, Paths) for path in x.paths)
        return any(other[1:] == path for other in paths)

    def merge(self, other: FilterUse) -> FilterUse:
        """Returns the decisions of two uses whose rules are equal, as one, for `unused`.

        What is unmatched has been reported by then, and is left out.
        """
        new = FilterUse(self.rules)
        for use in (self, other):
            new._matched |= use._matched
            new._shadowed |= use._shadowed
            new._keys |= use._keys
            new._arguments |= use._arguments
        return new

    def unused(self, *, strict: bool) -> Iterator[str]:
        """Yields a line for each filter that decided nothing, and is likely a mistake.

        That is so if it looks misspelt, or if it matches only what earlier filters decided about.
        Any other may be meant for another argument or function. With ``strict``, those that name
        paths are mistakes as well; one for a type alone, such as ``nnx.BatchStat``, fits any model.
        """
        for index, filter_ in enumerate(self.rules.filters):
            if index in self._matched:
                continue
            # Strategies list all paths, and a last filter for the rest may be left with nothing. Of
            # a function of the user, it is not known what it is for.
            is_for_the_rest = filter_ in (..., True, nnx.Everything())
            predicate = to_predicate(filter_)
            if isinstance(filter_, Paths) or is_for_the_rest or is_opaque(predicate):
                continue
            hint = spelling_hint(filter_, self._keys)
            if hint or index in self._shadowed or (strict and names_paths(predicate)):
                yield f"  {self.rules.names[index]}, for {join_paths([*self._arguments])}{hint}"


def check_filters(uses: Iterable[FilterUse], *, name: str, strict: bool) -> None:
    """Warns about filters that decided nothing and are likely mistakes, or raises if strict.

    Args:
      uses: the decisions for each argument that has rules.
      name: that of the transform, in messages.
      strict: whether to raise an error instead.
    """
    # The user may give one set of rules for several arguments, and none of these needs all filters.
    # So uses of equal rules are taken together.
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


def check_matched(uses: Sequence[FilterUse], *, is_inside: bool) -> None:
    """Raises an error for Variables that no filter of their ``StateSharding`` matches.

    The error lists all of them, and says what to do about the first set of rules.

    Args:
      uses: those with such Variables (``unmatched``).
      is_inside: whether the filters have paths of a tuple or dict of modules, such as ``(0,
        "kernel")``, and were used for one of these modules, whose path is ``("kernel",)``.
    """
    if not uses:
        return
    subjects = [subject for use in uses for _, subject in use.unmatched]
    filters = "; or ".join(dict.fromkeys(filters_text(use.rules) for use in uses))
    remedy = filter_remedy(uses[0].rules, subjects, uses[0].added)
    if is_inside:  # then the filters are right, and the argument is only a part of theirs
        remedy = (
            "Their paths begin with another key, as in a tuple or dict of modules: pass that as "
            "one argument, or choose shardings for each; fsdp(model, optimizer=optimizer) covers "
            "both."
        )
    raise_listed(
        ValueError,
        f"no filter of the {type(uses[0].rules).__name__} matches:",
        [f"  {path}: {subject_text(x)}" for use in uses for path, x in use.unmatched],
        f"The filters are {filters}. {remedy}",
        anchor="no-filter-matches",
    )
