"""The specs that a user gave for arguments → one spec for each Variable and array, with its path.

A *spec* is a sharding or a dimension that is mapped. A Variable may be in several arguments, or in
one under several paths, and all of them may have a spec. They have to agree, since there is one
array; a path without a spec leaves it to the others. A :class:`~nnx_sharding.StateSharding` maps
filters to specs, and its first filter that matches decides. What each filter decided is recorded
(:class:`FilterUse`), to warn about those that are misspelt or come too late.

A *part* is one module, Variable or array of an argument, with the spec that the user gave for it. A
*location* is where a Variable or array is in a part; a *subject* is that Variable or array. The
*index* is that of a Variable among all objects, a *slot* that of an array in the flat list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

from flax import nnx

from ..errors import UnusedFilterWarning, message, raise_listed, warn_or_raise
from ..specs.filters import Paths, is_opaque, names_paths, spelling_hint, subject_text, to_predicate
from ..specs.fitting import OnIndivisible, describe_both
from ..specs.paths import Path, accessor
from ..specs.state_sharding import FilterMatch, StateSharding, filter_remedy, filters_text
from ..specs.types import Arrays, Axis, Objects, Spec
from .arguments import Argument, Part
from .problems import join_paths
from .structure import Location, Structure

SpecOf: TypeAlias = Callable[[Any], Any]  # a spec as the user wrote it → its final form


class NamedLocation(NamedTuple):
    """A location in an argument or output, with the names for it."""

    argument: Argument
    part: Part  # of the argument
    location: Location
    name: str  # the expression for it: ``model.blocks[3].kernel``
    paths: Sequence[Path]  # all paths from the part, the first one first

    def name_of(self, path: Path) -> str:
        """Returns the expression for it by another path."""
        return accessor(self.argument.name, (*self.part.keys, *path))

    def subject(self, objects: Objects, leaves: Arrays) -> Any:
        """Returns the Variable there, or the array outside of Variables."""
        index = self.location.entry
        return leaves[self.location.slots[0]] if index is None else objects[index]


def locate(structure: Structure, arguments: Sequence[Argument]) -> list[NamedLocation]:
    """Finds every Variable and array in arguments or outputs, each with its name and all its paths.

    A Variable that parts share is found in each. ``structure`` describes the arguments or outputs.
    """
    root_slots = iter(structure.root_slots)  # of arrays outside of objects: each part takes its own
    locations = []
    for argument in arguments:
        for part in argument.parts:
            aliases: Mapping[Any, Sequence[Path]] = structure.aliases(part.child)
            prefix = accessor(argument.name, part.keys)
            for location in structure.walk(part.child, root_slots):
                paths = dict.fromkeys((location.path, *aliases.get(location.entry, ())))
                name = accessor(prefix, location.path)
                locations.append(NamedLocation(argument, part, location, name, (*paths,)))
    return locations


def slot_names(num_leaves: int, locations: Sequence[NamedLocation]) -> list[str]:
    """Returns the first expression for each array; empty for one in no location."""
    names = [""] * num_leaves
    for place in locations:
        for slot in place.location.slots:
            names[slot] = names[slot] or place.name
    return names


class NamedSpec(NamedTuple):
    """The spec of a Variable or an array, and the expression that names it in messages."""

    name: str  # ``model.blocks[3].kernel``
    spec: Any  # in the final form that the transform uses; None if the user gave none


UNNAMED = NamedSpec("", None)


class Conflict(NamedTuple):
    """Two expressions for one Variable or array, with different specs."""

    first: NamedSpec
    other: NamedSpec


class Resolved(NamedTuple):
    """The spec of each Variable and array at some locations."""

    slots: list[Any]  # the spec of each array, by slot
    variables: dict[int, NamedSpec]  # of each located Variable or ref, by index
    on_indivisible: dict[int, OnIndivisible]  # by slot, the option of the ``StateSharding`` there
    uses: list[FilterUse]  # the decisions of each ``StateSharding``


def resolve(
    locations: Sequence[NamedLocation],
    objects: Objects,
    leaves: Arrays,
    spec_of: SpecOf,
    *,
    decided: Mapping[int, NamedSpec] | None = None,
    decided_arguments: Set[str] = frozenset(),
) -> Resolved:
    """Finds the one spec of each Variable and array, from the user's specs for the arguments.

    Args:
      locations: where they are in arguments or outputs, each with the user's spec for its part.
      objects: the Variables and modules, by index.
      leaves: the arrays, by slot.
      spec_of: returns the final form of a spec that a user wrote, such as that of a dimension that
        ``vmap`` maps.
      decided: the names and final specs of Variables that already have them, by index: when outputs
        are resolved, of those that were in the arguments.
      decided_arguments: the names of the arguments whose specs are in ``decided``, so that their
        filters are not asked again.

    Raises:
      ValueError: no filter matches, or one array has several specs.
    """
    result = Resolved([None] * len(leaves), dict(decided or {}), {}, [])
    # The name and spec of each array outside of Variables, by slot; Variables are in the result.
    arrays: dict[int, NamedSpec] = {}
    uses: dict[int, FilterUse] = {}
    conflicts: list[Conflict] = []
    is_inside = False  # for an error: whether rules for a tuple of modules were used for one
    for place in locations:
        index, slots = place.location.entry, place.location.slots
        # Step 1: the spec that the user gave for this location, perhaps by a filter, or None.
        written = place.part.spec
        if place.argument.name in decided_arguments and decided and index in decided:
            written = None
        elif isinstance(written, StateSharding):
            # By identity, as comparing filters takes long; uses of equal rules are joined later.
            use = uses.setdefault(id(written), FilterUse(written))
            subject = place.subject(objects, leaves)
            matches = use.find(place, subject)
            written = matches[0].sharding
            conflicts += _disagreements(place, matches, spec_of)
            if matches[0].number is None and needs_filter(slots, subject):
                use.unmatched.append((place.name, subject))
                is_inside |= use.is_inside(place.paths[0])
                if place.argument.name in decided_arguments:
                    use.added.append(place.paths[0])
                continue
            if use.rules.on_indivisible is not None:
                result.on_indivisible.update(dict.fromkeys(slots, use.rules.on_indivisible))
        spec = None if written is None else spec_of(written)
        # Step 2: the first location with a spec decides; the others have to agree, or have none.
        # A Variable is known by its index, an array outside of Variables by its slot.
        decisions, key = (arrays, slots[0]) if index is None else (result.variables, index)
        first = decisions.get(key, UNNAMED)
        if first.spec is None:
            decisions[key] = NamedSpec(place.name, spec)
        elif spec is not None and spec != first.spec:
            conflicts.append(Conflict(first, NamedSpec(place.name, spec)))
        for slot in slots:
            result.slots[slot] = decisions[key].spec
    _check_matched([use for use in uses.values() if use.unmatched], is_inside=is_inside)
    _check_conflicts(conflicts)
    result.uses.extend(uses.values())
    return result


def _disagreements(
    place: NamedLocation, matches: Sequence[FilterMatch], spec_of: SpecOf
) -> Iterator[Conflict]:
    """Yields a conflict for each path of a shared Variable that has another spec than the first.

    ``matches`` are the filters that decide about it, each with the path that it was tried with.
    """
    first = NamedSpec(place.name_of(matches[0].path), matches[0].sharding)
    for match in matches[1:]:
        if spec_of(match.sharding) != spec_of(first.spec):
            yield Conflict(first, NamedSpec(place.name_of(match.path), match.sharding))


def _check_conflicts(conflicts: Sequence[Conflict]) -> None:
    """Raises an error if one Variable has different specs under different paths."""
    specs = "axes" if conflicts and isinstance(conflicts[0].first.spec, Axis) else "shardings"
    lines = []
    for first, other in conflicts:
        text, other_text = describe_both(first.spec, other.spec)
        lines.append(f"  {first.name}: {text}\n  {other.name}: {other_text}")
    raise_listed(
        ValueError,
        f"Inconsistent aliasing: one Variable or array has different {specs} under different "
        "paths:",
        lines,
        f"Give it the same {specs} everywhere.",
        anchor="two-shardings-for-one-variable",
    )


def name_variables(
    locations: Sequence[NamedLocation], specs: Sequence[Spec], open_spec: Spec, resolved: Resolved
) -> dict[int, NamedSpec]:
    """Returns the first name and the final spec of each Variable or ref, by index.

    ``specs`` are those of the arrays, by slot; where one is None, the Variable gets ``open_spec``,
    which leaves the decision to the compiler. A Variable without an array has the resolved spec.
    """
    variables: dict[int, NamedSpec] = {}
    for place in locations:
        index, slots = place.location.entry, place.location.slots
        if index is None or index in variables:
            continue
        spec = specs[slots[0]] if slots else resolved.variables.get(index, UNNAMED).spec
        is_open = bool(slots) and spec is None
        variables[index] = NamedSpec(place.name, open_spec if is_open else spec)
    return variables


def _check_matched(uses: Sequence[FilterUse], *, is_inside: bool) -> None:
    """Raises an error for Variables that no filter of their ``StateSharding`` matches.

    With ``is_inside``, the filters are for a tuple or dict of modules, and were used for one.
    """
    if not uses:
        return
    subjects = [subject for use in uses for _, subject in use.unmatched]
    filters = "; or ".join(dict.fromkeys(filters_text(use.rules) for use in uses))
    remedy = filter_remedy(uses[0].rules, subjects, uses[0].added)
    if is_inside:
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


def needs_filter(slots: Sequence[int], subject: object) -> bool:
    """Whether a filter has to decide about a location: not if it holds no array, or a number."""
    return bool(slots) and not isinstance(subject, int | float | complex)


class FilterUse:
    """The decisions of one ``StateSharding``."""

    def __init__(self, rules: StateSharding):
        self.rules = rules
        self.unmatched: list[tuple[str, Any]] = []  # names and subjects
        self.added: list[Path] = []  # of those that a call added to arguments
        self._matched: set[int | None] = set()  # filters that decided, by index; None for no filter
        self._shadowed: set[int] = set()  # filters that match what an earlier one matched
        self._keys: dict[Any, None] = {}  # all keys in paths, in their order
        self._arguments: dict[str, None] = {}  # the names of the arguments, likewise

    def find(self, place: NamedLocation, subject: object) -> list[FilterMatch]:
        """Finds the filters that decide about a location: the first one does, others may disagree.

        All paths of a shared Variable are tried: a filter that names one of them has priority over
        those that do not depend on paths.
        """
        matches, matches_of_paths = [], []
        filters = self.rules.filters
        for path in place.paths:
            match = self.rules.find_below(place.part.below, path, subject)
            self._record(match, subject, place.argument.name)
            match = match._replace(path=path)
            matches.append(match)
            number = match.number
            has_filter = number is not None and number < len(filters)
            if has_filter and names_paths(to_predicate(filters[number])):  # type: ignore[index]
                matches_of_paths.append(match)
        return matches_of_paths or matches[:1]

    def _record(self, match: FilterMatch, subject: object, argument: str) -> None:
        """Records which filter decided about a subject, and which later ones match it, too.

        These may be in vain (*shadowed*), about which the user is warned.
        """
        self._matched.add(match.number)
        first_later = 0 if match.number is None else match.number + 1
        for later in range(first_later, len(self.rules.filters)):
            filter_ = self.rules.filters[later]
            # What is known is not asked again: models have thousands of Variables.
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
        """Joins the decisions of two uses whose rules are equal."""
        new = FilterUse(self.rules)
        for use in (self, other):
            new._matched |= use._matched
            new._shadowed |= use._shadowed
            new._keys |= use._keys
            new._arguments |= use._arguments
        return new

    def unused(self, *, strict: bool) -> Iterator[str]:
        """Yields a line for each filter that decided nothing, with its arguments and a suggestion.

        Only those that look misspelt, or that come after filters that match the same (shadowed):
        others may be meant for another argument or function. With ``strict``, also all others for
        paths; a filter for a type alone, such as ``nnx.BatchStat``, fits any model.
        """
        for index, filter_ in enumerate(self.rules.filters):
            # Strategies list all paths, and a last filter for the rest may be left with nothing.
            may_be_unused = isinstance(filter_, Paths) or filter_ in (..., True, nnx.Everything())
            predicate = to_predicate(filter_)
            if index in self._matched or may_be_unused or is_opaque(predicate):
                continue
            near = spelling_hint(filter_, self._keys)
            if near or index in self._shadowed or (strict and names_paths(predicate)):
                yield f"  {self.rules.names[index]}, for {join_paths([*self._arguments])}{near}"


def check_filters(uses: Iterable[FilterUse], *, name: str, strict: bool) -> None:
    """Warns about filters that decided nothing in any use of equal rules, or raises if strict."""
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
