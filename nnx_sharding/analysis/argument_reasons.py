"""Why an argument of a program is sharded as it is.

An argument has the spec of the first rule that matches it, as far as its shape allows. So the
reason is that rule, which later rules it overrides, and which mesh axes divide which dimensions:

    model.up.bias: replicated, 64 B on each device
      Rule 1, 'bias', decides: P('model').
      Of P('model'), not all fits: dimension 0 has size 16, not divisible by 'model' (12).

From other modules:

    Plan            has the user's specs of each argument, by parts of it (``arguments``)
    slot            the number of an array among all of a call, in the order of ``Plan.names``
    NamedLocation   where a Variable or array is in an argument, and the expression for it; ``part``
                    is the part of the argument that has a spec of its own
    StateSharding   rules: ``filters``, the ``shardings`` that they give, and ``names`` of filters
    fit_sharding    fits a spec to a shape: drops axes that do not divide it, and says which (its
                    ``reasons`` are a text, empty if all of the spec fits)
    Reason          what the user reads: a subject, facts, and what to write instead
    accessor        the expression for a path below a name: ``model.blocks[3].kernel``
    ParameterRow    an argument of the program: its path, spec and shapes
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from ..core.locations import NamedLocation, locate
from ..core.plan import Plan
from ..specs.filters import to_predicate
from ..specs.fitting import OnIndivisible, describe, fit_sharding
from ..specs.paths import accessor
from ..specs.state_sharding import StateSharding
from .parameters import ParameterRow, axes_in, shape_text, spec_text
from .reasons import Reason
from .units import bytes_text, without_address

_MOST_OVERRIDDEN = 3  # rules that are named


class _Declared(NamedTuple):
    """What the user declared for an array."""

    spec: Any  # the declared spec; None if nothing is declared
    rule: str  # the option or the filter that declares it, or that of a strategy; empty without one
    facts: list[str]  # sentences that say so


class ArgumentReasons:
    """Says for each argument of one program why it is sharded as it is.

    Args:
      plan: how the function was called: the names of its array arguments, their structure, the
        specs that the user gave.
      objects: the Variables of the call, which hold abstract arrays.
      leaves: its arrays, abstract, in the order of ``plan.names``.

    Attributes:
      _plan: as given, like ``_objects`` and ``_leaves``. Its ``transform`` is the lifted transform,
        whose ``context`` is the mesh, and whose ``in_name`` is the option with the user's specs,
        such as ``in_shardings``.
      _slots: the slot of each array, by its name.
      _locations: the locations of each array, by its slot, in order. There are several if one
        Variable is in several arguments; its name in ``plan.names`` is that of the first one.
    """

    def __init__(self, plan: Plan, objects: Sequence[Any], leaves: Sequence[Any]):
        self._plan, self._objects, self._leaves = plan, objects, leaves
        self._slots = {name: slot for slot, name in enumerate(plan.names)}
        self._locations: defaultdict[int, list[NamedLocation]] = defaultdict(list)
        for location in locate(plan.structure, plan.arguments):
            for slot in location.location.slots:
                self._locations[slot].append(location)

    def reason(self, row: ParameterRow) -> Reason:
        """Says why one array, as the program has it, is sharded as it is."""
        slot = self._slots[row.path]
        mesh = self._plan.transform.context
        location, *others = self._locations[slot]
        declared, rule, facts = self._declared(location)  # facts: sentences, to which more come
        if others:
            names = ", ".join(other.name for other in others)
            facts.append(f"It is the same Variable as {names}, so all of them have one sharding.")
        # What is done with axes that do not divide a dimension: an option of the spec of the array,
        # or else of the transform, which `shard_map` does not have.
        default: OnIndivisible = getattr(self._plan.transform, "on_indivisible", "error")
        action = self._plan.on_indivisible.get(slot, default)
        # If it were an error, the program would not have compiled, so nothing is dropped here. Then
        # "drop" only avoids that the same spec is refused again.
        shown: OnIndivisible = "drop" if action == "error" else action
        fit = fit_sharding(declared, mesh, row.shape, on_indivisible=shown)
        if fit.reasons:
            facts.append(f"Of {_spec_text(declared)}, not all fits: {fit.reasons}.")
        sizes = {str(axis): size for axis, size in getattr(mesh, "shape", {}).items() if size > 1}
        unused = {axis: size for axis, size in sizes.items() if axis not in axes_in(row.spec)}
        facts += _dividing(row, unused)
        return Reason(
            subject=_subject(row),
            facts=tuple(facts),
            instead=_instead(row, _override(location, row, unused)),
            rule=rule,
        )

    def _declared(self, location: NamedLocation) -> _Declared:
        """Finds what the user declared for an array, and says so in sentences.

        The option may have nothing for the argument, one spec for all of its arrays, or rules.
        """
        rules, option = location.part.spec, self._plan.transform.in_name
        name = accessor(location.argument.name, location.part.keys)
        if rules is None:
            fact = (
                f"{option} has nothing for {name}: it keeps the sharding of the array that was "
                "passed, or else the compiler chooses."
            )
            return _Declared(spec=None, rule="", facts=[fact])
        if not isinstance(rules, StateSharding):  # one spec
            fact = f"{option} has {_spec_text(rules)} for {name}."
            return _Declared(spec=rules, rule=option, facts=[fact])
        no_rule = f"No rule of {option} for {name} matches."
        return self._declared_by_rule(rules, location, no_rule)

    def _declared_by_rule(
        self, rules: StateSharding, location: NamedLocation, no_rule: str
    ) -> _Declared:
        """Says which of the user's rules decides, and which later ones it overrides.

        ``no_rule`` is the sentence for an array that no rule matches.
        """
        subject = location.subject(self._objects, self._leaves)  # what filters get, with the path
        # The first rule that matches, its spec, and the path that it was given: in the model, or in
        # the list or tuple that holds the model. The number is None if none matches.
        path, number, declared = rules.find_below(location.part.below, location.paths[0], subject)
        if number is None:
            return _Declared(spec=None, rule="", facts=[no_rule])
        rule, note = _rule_text(rules, number), getattr(rules.filters[number], "note", "")
        facts = [f"{rule} decides: {_spec_text(declared)}."]
        # A strategy has notes on why it does not shard an array.
        is_replicated = isinstance(declared, PartitionSpec) and not any(declared.partitions)
        if note and is_replicated:
            facts = [f"{rule} leaves it replicated: {note}."]
        elif note:
            facts.append(f"Its note: {note}.")
        overridden = [
            later
            for later in range(number + 1, len(rules.filters))
            # A rule for the rest says nothing about this array.
            if rules.filters[later] not in (..., True)
            and to_predicate(rules.filters[later])(path, subject)
        ]
        for later in overridden[:_MOST_OVERRIDDEN]:
            says = _spec_text(rules.shardings[later])
            facts.append(f"{_rule_text(rules, later)} says {says}, and is overridden.")
        # A rule of a strategy has a name, such as "column of tensor_parallel", which says more than
        # its filter, a list of paths.
        name = _strategy(rules, number) or without_address(rules.names[number])
        return _Declared(spec=declared, rule=name, facts=facts)


def _subject(row: ParameterRow) -> str:
    """Writes how an array is sharded: ``bias: P('model'), (4) of (16) on each device``."""
    if not axes_in(row.spec):
        return f"{row.path}: replicated, {bytes_text(row.bytes_per_device)} on each device"
    whole, part = shape_text(row.shape), shape_text(row.shard_shape)
    return f"{row.path}: {spec_text(row.spec)}, {part} of {whole} on each device"


def _spec_text(declared: Any) -> str:
    """Writes what a user declares for an array: a spec, a sharding, or a layout of the memory."""
    spec = getattr(declared, "spec", declared)
    return spec_text(spec) if isinstance(spec, PartitionSpec) else describe(declared)


def _rule_text(rules: StateSharding, index: int) -> str:
    """Writes the rule of a strategy by its name, one of the user by its number and filter."""
    return _strategy(rules, index) or f"Rule {index}, {rules.names[index]},"


def _strategy(rules: StateSharding, index: int) -> str:
    """Returns the strategies that made a rule, and what they shard; empty for one of the user."""
    return getattr(rules.filters[index], "strategy", "")


def _dividing(row: ParameterRow, unused: Mapping[str, int]) -> Iterator[str]:
    """Says which dimensions could be divided by the axes that do not shard an array.

    Of an array that other axes shard, only that an axis divides no dimension: that it could shard
    the array, too, is not why it is sharded as it is.

    Args:
      row: the array.
      unused: the sizes of these axes.
    """
    for axis, size in unused.items():
        dimensions = [str(d) for d, n in enumerate(row.shape) if n % size == 0 and n > 0]
        if not dimensions:
            shape = shape_text(row.shape)
            yield f"{axis!r} ({size}) divides no dimension of {shape}, so it cannot shard it."
        elif not axes_in(row.spec):
            number = "dimension" if len(dimensions) == 1 else "each of the dimensions"
            yield f"{axis!r} ({size}) would divide {number} {', '.join(dimensions)}."


def _instead(row: ParameterRow, override: str) -> str:
    """Says what to write for another sharding of an array, and what that costs.

    For a sharded array, the override replicates it. That is no improvement as such, because each
    device then holds all of the array, so the text says "nothing" first.

    Args:
      row: the array.
      override: what `_override` wrote; empty for nothing.
    """
    if not override or not axes_in(row.spec):
        return override
    part, whole = bytes_text(row.bytes_per_device), bytes_text(row.bytes_total)
    return f"nothing, to hold {part} on each device; to hold all of it there ({whole}): {override}"


def _override(location: NamedLocation, row: ParameterRow, unused: Mapping[str, int]) -> str:
    """Writes a call that shards a replicated array, or replicates a sharded one.

    Such as ``nnx_sharding.partition.override(sharding, {r"up/bias$": P('data')})``. Empty if the
    user gave no rules that it could override, or no axis divides the array. ``unused`` are the
    sizes of the axes that do not shard it.
    """
    if not isinstance(location.part.spec, StateSharding):
        return ""
    spec = "P()"  # for a sharded one
    if not axes_in(row.spec):
        # The first axis of the mesh that divides a dimension; of several of these the largest one,
        # and of equally large ones the last.
        largest_first = sorted(range(len(row.shape)), key=lambda d: (-row.shape[d], -d))
        fitting = [
            (axis, dimension)
            for axis, size in unused.items()
            for dimension in largest_first
            if row.shape[dimension] % size == 0
        ]
        if not fitting:
            return ""
        axis, dimension = fitting[0]
        spec = f"P({', '.join([*['None'] * dimension, repr(axis)])})"  # P(None, 'data')
    # A regular expression for the path, with any number in place of an index: blocks/\d+/up/bias.
    keys = [re.escape(str(key)) for key in location.paths[0]]
    pattern = "/".join(r"\d+" if key.isdecimal() else key for key in keys)
    return f'nnx_sharding.partition.override(sharding, {{r"{pattern}$": {spec}}})'
