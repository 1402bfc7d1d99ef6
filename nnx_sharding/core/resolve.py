"""Parts with their specs → one spec for every Variable and array, each with its path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from flax import nnx

from ..filters import Paths, is_opaque, misspelt, names_paths, to_predicate
from ..fitting import OnIndivisible, describe_both
from ..paths import Path, accessor
from ..state_sharding import StateSharding
from .specs import Part, Target
from .structure import Location, Structure


class NamedLocation(NamedTuple):
    """A place that a target reaches.

    Attributes:
      target: the target.
      part: the part of it.
      place: the place.
      name: what the user would write to reach it: ``model.blocks[3].kernel``.
      paths: all paths from the part to it, the first one first.
    """

    target: Target
    part: Part
    place: Location
    name: str
    paths: Sequence[Path]

    def name_of(self, path: Path) -> str:
        """What the user would write to reach it by another path."""
        return accessor(self.target.name, (*self.part.keys, *path))


def reach(structure: Structure, wanted: Sequence[Target]) -> list[NamedLocation]:
    """All places that the targets reach, in their order; shared ones once for each part.

    The arrays that the targets hold outside of objects must be those of the structure's root.
    """
    slots = iter(structure.root_slots)
    found = []
    for goal in wanted:
        for part in goal.parts:
            aliases = structure.aliases(part.child)
            for place in structure.walk(part.child, slots):
                name = accessor(goal.name, (*part.keys, *place.path))
                others = aliases.get(place.entry, ()) if place.entry is not None else ()
                paths = dict.fromkeys((place.path, *others))
                found.append(NamedLocation(goal, part, place, name, tuple(paths)))
    return found


def slot_names(num_leaves: int, reached: Sequence[NamedLocation]) -> list[str]:
    """For each array what the user would write to reach it, or nothing if no target does."""
    names = [""] * num_leaves
    for found in reached:
        for slot in found.place.slots:
            names[slot] = names[slot] or found.name
    return names


class Resolved(NamedTuple):
    """The outcome of resolving.

    Attributes:
      slots: the spec of each array, by slot.
      variables: for each Variable or ref that was reached, its spec and where it was found.
      on_indivisible: by slot, what the ``StateSharding`` there does on an indivisible spec.
      uses: what each ``StateSharding`` decided about.
    """

    slots: list[Any]
    variables: dict[int, tuple[str, Any]]
    on_indivisible: dict[int, OnIndivisible]
    uses: list[FilterUse]


def resolve(
    reached: Sequence[NamedLocation],
    objects: Sequence[Any],
    leaves: Sequence[Any],
    spec_of: Callable[[Any], Any],
    *,
    known: Mapping[int, tuple[str, Any]] | None = None,
    settled: Set[str] = frozenset(),
) -> Resolved:
    """Gives every array that targets reach its spec.

    Args:
      reached: what they reach.
      objects: the object of each entry.
      leaves: the arrays, by slot.
      spec_of: turns a spec as the user wrote it into its final form.
      known: Variables that have their spec already, and where they were found.
      settled: names of targets that have no say about known Variables.

    Raises:
      ValueError: no filter matches some Variables; or one Variable is reached with two
        different specs.
    """
    result = Resolved([None] * len(leaves), dict(known or {}), {}, [])
    uses: dict[int, FilterUse] = {}
    conflicts: list[str] = []
    for found in reached:
        place, spec = found.place, found.part.spec
        if found.target.name in settled and known and place.entry in known:
            spec = None
        elif isinstance(spec, StateSharding):
            use = uses.setdefault(id(spec), FilterUse(spec))
            index = place.entry
            subject = leaves[place.slots[0]] if index is None else objects[index]
            which, spec = _find(use, found, subject, spec_of, conflicts)
            if which is None and place.slots:  # what holds no array needs no filter
                use.unmatched.append(f"  {found.name}: {_describe(subject)}")
                continue
            if use.rules.on_indivisible is not None:
                result.on_indivisible.update(dict.fromkeys(place.slots, use.rules.on_indivisible))
        _record(result, found, None if spec is None else spec_of(spec), conflicts)
    unmatched = [use for use in uses.values() if use.unmatched]
    if unmatched:
        raise ValueError(
            "no filter of the StateSharding matches:\n"
            + "\n".join(use.unmatched_lines() for use in unmatched)
            + "\nAdd a filter for them, or a last entry `...: PartitionSpec()`."
        )
    result.uses.extend(uses.values())
    if conflicts:
        raise ValueError(
            "Inconsistent aliasing: one Variable is reached with different shardings:\n"
            + "\n".join(conflicts)
            + "\nGive it the same sharding everywhere."
        )
    return result


def _find(
    use: FilterUse,
    found: NamedLocation,
    subject: Any,
    spec_of: Callable[[Any], Any],
    conflicts: list[str],
) -> tuple[int | None, Any]:
    """What a ``StateSharding`` says of a Variable: by the filter that names one of its paths.

    A filter that does not look at paths has no say if another one names another path.
    """
    decisions = []
    for own in found.paths:
        # Inside a module paths start at the module, as in Flax.
        path = own or found.part.below
        which, spec = use.rules.find(path, subject)
        use.note(which, path, subject, found.target.name)
        decisions.append((own, which, spec))
    named = [] if len(decisions) == 1 else [d for d in decisions if use.names_paths(d[1])]
    for path, _, spec in named[1:]:
        if spec_of(spec) != spec_of(named[0][2]):
            old, new = describe_both(named[0][2], spec)
            first, other = found.name_of(named[0][0]), found.name_of(path)
            conflicts.append(f"  {first}: {old}\n  {other}: {new}")
    _, which, spec = (named or decisions)[0]
    return which, spec


class FilterUse:
    """What one ``StateSharding`` decided about."""

    def __init__(self, rules: StateSharding):
        self.rules = rules
        self.unmatched: list[str] = []
        self._matched: set[int | None] = set()
        self._shadowed: set[int] = set()  # matched what an earlier filter had taken
        self._keys: dict[Any, None] = {}
        self._arguments: dict[str, None] = {}

    def note(self, which: int | None, path: Path, subject: Any, argument: str) -> None:
        """Notes one decision: the number of the filter, for what and in what argument."""
        self._matched.add(which)
        later = range(0 if which is None else which + 1, len(self.rules.filters))
        for index in later:
            filter_ = self.rules.filters[index]
            if index in self._matched or index in self._shadowed or isinstance(filter_, Paths):
                continue
            if to_predicate(filter_)(path, subject):
                self._shadowed.add(index)
        self._keys.update(dict.fromkeys(path))
        self._arguments[argument] = None

    def names_paths(self, which: int | None) -> bool:
        """Whether a filter looks at paths."""
        filters = self.rules.filters
        return (
            which is not None and which < len(filters) and names_paths(to_predicate(filters[which]))
        )

    def copy(self) -> FilterUse:
        """One that can be added to."""
        new = FilterUse(self.rules)
        new.add(self)
        return new

    def add(self, other: FilterUse) -> None:
        """Takes in the decisions of an equal one."""
        self._matched |= other._matched
        self._shadowed |= other._shadowed
        self._keys |= other._keys
        self._arguments |= other._arguments

    def unmatched_lines(self) -> str:
        """What no filter matched, and the filters that were tried."""
        return "\n".join([*self.unmatched, f"The filters are {', '.join(self.rules.names)}."])

    def unused_lines(self) -> Iterator[str]:
        """The filters that decided about nothing.

        Only those that look misspelt, and those behind a filter that takes all they match: others
        may be meant for another argument or function.
        """
        for index, filter_ in enumerate(self.rules.filters):
            may_rest = isinstance(filter_, Paths) or filter_ in (..., True, nnx.Everything())
            if index in self._matched or may_rest or is_opaque(to_predicate(filter_)):
                continue
            near = misspelt(filter_, self._keys)
            if near or index in self._shadowed:
                yield f"  {self.rules.names[index]}, for {', '.join(self._arguments)}{near}"


def merged(uses: Iterable[FilterUse]) -> list[FilterUse]:
    """Uses of equal rules as one: each filter may be meant for one argument only."""
    found: list[FilterUse] = []
    for use in uses:
        same = next((other for other in found if other.rules == use.rules), None)
        if same is None:
            found.append(use.copy())
        else:
            same.add(use)
    return found


def _record(result: Resolved, found: NamedLocation, spec: Any, conflicts: list[str]) -> None:
    index = found.place.entry
    if index is not None:
        first = result.variables.get(index)
        if first is None or first[1] is None:
            result.variables[index] = (found.name, spec)
        elif spec is not None and spec != first[1]:
            old, new = describe_both(first[1], spec)
            conflicts.append(f"  {first[0]}: {old}\n  {found.name}: {new}")
        spec = result.variables[index][1]
    for slot in found.place.slots:
        result.slots[slot] = spec


def _describe(x: Any) -> str:
    shape = getattr(x, "shape", None)
    return type(x).__name__ if shape is None else f"{type(x).__name__} of shape {shape}"
