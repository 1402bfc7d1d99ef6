"""Finds one spec for each Variable and array, from the specs that a user gave for arguments.

A *spec* is a sharding or a dimension that is mapped. A Variable may be in several arguments, or in
one argument under several paths, and each path may have a spec. These specs have to agree, because
there is one array. A path without a spec leaves the decision to the other paths. A
:class:`~nnx_sharding.StateSharding` maps filters to specs, and its first filter that matches
decides (``filter_uses.py``).

From ``locations.py``:

    NamedLocation   where a Variable or array is: the ``argument``, the ``part`` of it for which the
                    user gave a spec, and the ``location`` in this part.
                    ``location.object_index`` is the index of the Variable in the table of all
                    objects, or None for a *bare* array, which is in no Variable;
                    ``location.slots`` are the positions of the arrays in the flat list

From ``filter_uses.py``:

    FilterUse       what the filters of one ``StateSharding`` (its ``rules``) decided. ``find``
                    returns a match for each path that may decide, at least one; ``number`` is None
                    if no filter matches. ``add_unmatched`` notes a location for the error of
                    `check_matched`
    needs_filter    whether it is an error if no filter matches: not for a number, nor for a
                    Variable without arrays
    check_matched   raises the error for all unmatched Variables and arrays, if there are any
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

from ..errors import raise_if_any
from ..specs.fitting import OnIndivisible, describe_both
from ..specs.state_sharding import FilterMatch, StateSharding
from ..specs.types import Arrays, Axis, Objects, Spec
from .filter_uses import FilterUse, check_matched, needs_filter
from .locations import NamedLocation

SpecOf: TypeAlias = Callable[[Any], Any]  # a spec as the user wrote it → its final form


class NamedSpec(NamedTuple):
    """The spec of a Variable or an array, and the expression that names it in messages."""

    name: str  # the expression, such as ``model.blocks[3].kernel``
    spec: Any  # the spec in the final form that the transform uses; None if the user gave none


UNNAMED = NamedSpec("", None)


class Conflict(NamedTuple):
    """Two expressions for one Variable or array, with different specs."""

    first: NamedSpec
    other: NamedSpec


class Resolved(NamedTuple):
    """The spec of each Variable and array at some locations."""

    slots: list[Any]  # the spec of each array, by slot
    variables: dict[int, NamedSpec]  # the name and spec of each Variable or ref, by index
    on_indivisible: dict[int, OnIndivisible]  # the option of the array's StateSharding, by slot
    filter_uses: list[FilterUse]  # the decisions of each ``StateSharding``


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
      locations: where the Variables and arrays are in arguments or outputs, each with the user's
        spec for its part.
      objects: the Variables and modules, by index.
      leaves: the arrays, by slot.
      spec_of: returns the final form of a spec that a user wrote, such as a dimension that ``vmap``
        maps.
      decided: the names and final specs of Variables about which is decided, by index. When outputs
        are resolved, these are the Variables of the arguments.
      decided_arguments: the names of the arguments whose specs are in ``decided``. Their filters
        are not asked about these Variables again.

    Raises:
      ValueError: no filter matches, or one array has several specs.
    """
    result = Resolved([None] * len(leaves), dict(decided or {}), {}, [])
    bare_arrays: dict[int, NamedSpec] = {}  # the names and specs of bare arrays, by slot
    uses: dict[int, FilterUse] = {}  # by the id of the ``StateSharding``
    conflicts: list[Conflict] = []
    for named in locations:
        index, slots = named.location.object_index, named.location.slots
        is_in_argument = named.argument.name in decided_arguments
        # Step 1: the spec that the user gave for this location, perhaps by a filter, or None.
        written = named.part.spec
        if is_in_argument and decided and index in decided:
            written = None  # the Variable was in the argument before the call, so this is decided
        elif isinstance(written, StateSharding):
            # Rules are found by identity, because comparing filters takes long. `check_filters`
            # joins uses of equal rules later.
            use = uses.setdefault(id(written), FilterUse(written))
            subject = named.subject(objects, leaves)  # filters see the Variable or array
            # The first match decides. Matches of other paths of a shared Variable have to agree.
            matches = use.find(named, subject)
            written = matches[0].sharding
            conflicts += _disagreements(named, matches, spec_of)
            # A subject that no filter matches is an error, unless it has no array or is a number.
            if matches[0].number is None and needs_filter(slots, subject):
                # A Variable in an argument about which nothing is decided is new there.
                use.add_unmatched(named, subject, is_added=is_in_argument)
                continue
            if use.rules.on_indivisible is not None:
                result.on_indivisible.update(dict.fromkeys(slots, use.rules.on_indivisible))
        spec = None if written is None else spec_of(written)
        # Step 2: the first location with a spec decides. All others have to agree, or have no spec.
        if index is None:  # a bare array has one slot
            decisions, key = bare_arrays, slots[0]
        else:
            decisions, key = result.variables, index
        decision = decisions.get(key, UNNAMED)
        if decision.spec is None:
            decisions[key] = NamedSpec(named.name, spec)
        elif spec is not None and spec != decision.spec:
            conflicts.append(Conflict(decision, NamedSpec(named.name, spec)))
        for slot in slots:
            result.slots[slot] = decisions[key].spec
    check_matched(uses.values())  # raises only if there are unmatched locations
    _check_conflicts(conflicts)  # raises only if there are conflicts
    result.filter_uses.extend(uses.values())
    return result


def _disagreements(
    named: NamedLocation, matches: Sequence[FilterMatch], spec_of: SpecOf
) -> Iterator[Conflict]:
    """Yields a conflict for each path of a shared Variable that has another spec than the first.

    Args:
      matches: the filters that decide about the Variable, each with the path for which it was
        tried, and with the user's spec.
      spec_of: returns the final form of a spec. It is needed because two specs may differ as
        written, and mean the same.
    """
    first = NamedSpec(named.name_of(matches[0].path), matches[0].sharding)
    for match in matches[1:]:
        if spec_of(match.sharding) != spec_of(first.spec):
            yield Conflict(first, NamedSpec(named.name_of(match.path), match.sharding))


def _check_conflicts(conflicts: Sequence[Conflict]) -> None:
    """Raises an error that lists all conflicts, if there are any."""
    # ``specs`` is the user's word for specs. All specs of a transform are of one kind: each is an
    # `Axis` for `vmap` and the like, and a sharding for other transforms.
    specs = "axes" if conflicts and isinstance(conflicts[0].first.spec, Axis) else "shardings"
    lines = []
    for first, other in conflicts:
        # The texts are short, unless only longer texts show the difference.
        text, other_text = describe_both(first.spec, other.spec)
        lines.append(f"  {first.name}: {text}\n  {other.name}: {other_text}")
    raise_if_any(
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

    Args:
      locations: where the Variables are.
      specs: the final spec of each array, by slot; None if nothing is declared for it.
      open_spec: the spec that leaves the decision to the compiler; takes the place of None.
      resolved: the specs before they were fitted to shapes.
    """
    variables: dict[int, NamedSpec] = {}
    for named in locations:
        index, slots = named.location.object_index, named.location.slots
        if index is None or index in variables:  # a bare array, or another path of a Variable
            continue
        if slots:
            spec = specs[slots[0]]  # all arrays of a Variable have the same spec
            spec = open_spec if spec is None else spec
        else:
            # The Variable holds no array yet. Arrays that the function puts there get this spec.
            spec = resolved.variables.get(index, UNNAMED).spec
        variables[index] = NamedSpec(named.name, spec)
    return variables
