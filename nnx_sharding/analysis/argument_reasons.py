"""Why an argument of a program is sharded as it is.

An argument has the spec of the first rule that matches it, as far as its shape allows. So the
reason is that rule, which later rules it overrides, and which mesh axes divide which dimensions:

    model.up.bias: replicated, 64 B on each device
      Rule 1, 'bias', decides: P('model').
      Of P('model'), not all fits: dimension 0 has size 16, not divisible by 'model' (12).
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
        for named in locate(plan.structure, plan.arguments):
            for slot in named.location.slots:
                self._locations[slot].append(named)

    def reason(self, row: ParameterRow) -> Reason:
        """Says why one array, as the program has it, is sharded as it is."""
        slot = self._slots[row.path]
        mesh = self._plan.transform.context
        location, *others = self._locations[slot]
        # ``facts`` are the sentences on what is declared; more are added below.
        declared, rule, facts = self._declared(location)
        if others:
            names = ", ".join(other.name for other in others)
            facts.append(f"It is the same Variable as {names}, so all of them have one sharding.")
        # The action for axes that do not divide a dimension is an option of the array's spec, or
        # else of the transform. `shard_map` does not have this option.
        default: OnIndivisible = getattr(self._plan.transform, "on_indivisible", "error")
        action = self._plan.on_indivisible.get(slot, default)
        # If the action is an error, the spec fits, because the program would not have compiled
        # otherwise. "drop" then drops nothing, and `fit_sharding` does not refuse the spec again.
        shown: OnIndivisible = "drop" if action == "error" else action
        fit = fit_sharding(declared, mesh, row.shape, on_indivisible=shown)
        if fit.reasons:
            facts.append(f"Of {_spec_text(declared)}, not all fits: {fit.reasons}.")
        sizes = {str(axis): size for axis, size in getattr(mesh, "shape", {}).items() if size > 1}
        unused = {axis: size for axis, size in sizes.items() if axis not in axes_in(row.spec)}
        facts += _facts_of_unused_axes(row, unused)
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
        # ``number`` is that of the first rule that matches, or None if no rule matches. Rules may
        # see a path in the model, or in the list or tuple that holds the model; ``path`` is the one
        # that matched.
        path, number, declared = rules.find_below(location.part.below, location.paths[0], subject)
        if number is None:
            return _Declared(spec=None, rule="", facts=[no_rule])
        rule = _rule_text(rules, number)
        facts = [f"{rule} decides: {_spec_text(declared)}."]
        # A filter of a strategy may have a note on why it does not shard an array.
        note = getattr(rules.filters[number], "note", "")
        is_replicated = isinstance(declared, PartitionSpec) and not any(declared.partitions)
        if note and is_replicated:
            facts = [f"{rule} leaves it replicated: {note}."]
        elif note:
            facts.append(f"Its note: {note}.")
        overridden = []  # the numbers of later rules that match, too
        for later in range(number + 1, len(rules.filters)):
            later_filter = rules.filters[later]
            is_for_the_rest = later_filter in (..., True)  # It says nothing about this array.
            if not is_for_the_rest and to_predicate(later_filter)(path, subject):
                overridden.append(later)
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
    """Writes a rule: by its name if a strategy made it, else by its number and its filter."""
    return _strategy(rules, index) or f"Rule {index}, {rules.names[index]},"


def _strategy(rules: StateSharding, index: int) -> str:
    """Returns the strategies that made a rule, and what they shard; empty for a user's rule."""
    return getattr(rules.filters[index], "strategy", "")


def _facts_of_unused_axes(row: ParameterRow, unused: Mapping[str, int]) -> Iterator[str]:
    """Says which dimensions of an array could be divided by the axes that do not shard it.

    If other axes shard the array, an axis that could shard it, too, is left out, because it is no
    reason why the array is sharded as it is.

    Args:
      unused: the sizes of the axes that do not shard it, by name.
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
      override: what `_override` wrote; empty for nothing.
    """
    if not override or not axes_in(row.spec):
        return override
    part, whole = bytes_text(row.bytes_per_device), bytes_text(row.bytes_total)
    return f"nothing, to hold {part} on each device; to hold all of it there ({whole}): {override}"


def _override(location: NamedLocation, row: ParameterRow, unused: Mapping[str, int]) -> str:
    """Writes a call that shards a replicated array, or replicates a sharded one.

    For example, ``nnx_sharding.partition.override(sharding, {r"up/bias$": P('data')})``. The result
    is empty if the user gave no rules that the call could override, or if no axis divides the
    array. ``unused`` has the sizes of the axes that do not shard the array, by name.
    """
    if not isinstance(location.part.spec, StateSharding):
        return ""
    # A sharded array is replicated by the call.
    spec = "P()" if axes_in(row.spec) else _spec_of_first_axis(row.shape, unused)
    if not spec:
        return ""
    # A regular expression for the path, with any number in place of an index: blocks/\d+/up/bias.
    keys = [re.escape(str(key)) for key in location.paths[0]]
    pattern = "/".join(r"\d+" if key.isdecimal() else key for key in keys)
    return f'nnx_sharding.partition.override(sharding, {{r"{pattern}$": {spec}}})'


def _spec_of_first_axis(shape: Sequence[int], axes: Mapping[str, int]) -> str:
    """Writes a spec that shards an array over the first axis that divides one of its dimensions.

    For the shape ``(3, 8)`` and the axes ``{"data": 4, "model": 2}``, it is ``P(None, 'data')``.
    The largest dimension that the axis divides is sharded; if several are equally large, the last
    one. The text is empty if no axis divides a dimension.
    """
    largest_first = sorted(range(len(shape)), key=lambda d: (-shape[d], -d))
    for axis, size in axes.items():
        for dimension in largest_first:
            if shape[dimension] % size == 0:
                return f"P({', '.join([*['None'] * dimension, repr(axis)])})"
    return ""
