"""What a sharding makes of a model: rule, layout and bytes of every array, and what is wrong."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flax import nnx
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from .._late import late
from ..analysis import parameters, tables
from ..analysis.units import printable
from ..core.flatten import Flat, flatten
from ..core.resolve import reach
from ..core.specs import target
from ..core.structure import Location
from ..errors import NoMeshError
from ..filters import Paths, misspelt, to_predicate
from ..fitting import (
    ON_INDIVISIBLE,
    OnIndivisible,
    axis_problems,
    describe,
    fit,
    shape_problems,
)
from ..partition.cutting import like
from ..paths import Path, plain_key
from ..state_sharding import StateSharding


@dataclasses.dataclass(frozen=True, slots=True)
class ShardingRow(parameters.ParameterRow):
    """How one array would be laid out, and why; ``spec`` and the rest as in its base.

    Attributes:
      rule: the number of the rule that decides, from 0; None if none matches.
      rule_text: the filter of this rule.
      declared: the spec of this rule. None leaves the layout to JAX.
      why: what does not fit in ``declared``, if anything; ``spec`` is what is left of it.
      is_fault: whether that is refused.
    """

    rule: int | None = None
    rule_text: str | None = None
    declared: Any = None
    why: str | None = None
    is_fault: bool = False

    def __str__(self) -> str:
        declared = "" if self.declared is None else f", {describe(self.declared)}"
        corrected = f" → {describe(self.spec)}" if self.why and not self.is_fault else ""
        line = f"{self.path or 'the root'}, shape {self.shape}{declared}{corrected}: {self.why}"
        return printable(line)


@dataclasses.dataclass(frozen=True)
class ShardingReport:
    """What :func:`check_sharding` found; ``str`` makes a table of it.

    Attributes:
      mesh: the sizes of the mesh axes by name; empty without a mesh.
      rules: the filters of the sharding, as text.
      rows: one for each array, in the order in which NNX walks the model.
      unmatched: the paths that no rule matches.
      on_indivisible: the paths of arrays that their specs do not divide.
      unused: the numbers of the rules that match nothing.
      shadowed: by the number of a rule of which earlier ones take all it matches, theirs.
      bytes_total: the bytes of all arrays, each counted once.
      replicated_bytes: the bytes of those that are whole on each of their devices.
      replicated_fraction: which part of all bytes that is, from 0 to 1.
      device_bytes: the bytes that each device holds, in the order of their ids.
      balance: the bytes on the fullest device over the mean of all: 1 if they hold the same.
      problems: what the transforms refuse, one line each.
      warnings: what they correct, and rules that decide about nothing, one line each.
    """

    mesh: Mapping[str, int]
    rules: tuple[str, ...]
    rows: tuple[ShardingRow, ...]
    unmatched: tuple[str, ...]
    on_indivisible: tuple[str, ...]
    unused: tuple[int, ...]
    shadowed: Mapping[int, tuple[int, ...]]
    bytes_total: int
    replicated_bytes: int
    replicated_fraction: float
    device_bytes: tuple[int, ...]
    balance: float
    problems: list[str]
    warnings: list[str]

    @property
    def ok(self) -> bool:
        """Whether there are no problems; warnings do not count."""
        return not self.problems

    def raise_for_problems(self, *, strict: bool = False) -> None:
        """Raises what is wrong, if anything is.

        Args:
          strict: whether warnings are problems, too.

        Raises:
          ValueError: there are problems; all are in the message.
        """
        lines = [*self.problems, *(self.warnings if strict else ())]
        if lines:
            raise ValueError("the sharding does not fit the model:\n" + _indented(lines))

    def as_dict(self) -> dict[str, Any]:
        """All of it as data for JSON, in an order that is always the same."""
        return {field.name: _data(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def to_json(self) -> str:
        """:meth:`as_dict` as text, to be kept and compared."""
        return json.dumps(self.as_dict(), indent=2)

    def _repr_html_(self) -> str:
        html: str = late("report.page.fragment", "sharding_html")(self)
        return html

    def __str__(self) -> str:
        header = ("rule", *parameters.HEADER)
        per_device = sum(row.bytes_per_device for row in self.rows)
        total = ("", "total", "", "", "", "", str(per_device), str(self.bytes_total))
        sizes = " × ".join(f"{axis!r} ({size})" for axis, size in self.mesh.items())
        table = tables.table(header, map(_cells, self.rows), numbers=2, footer=total)
        text = (
            f"{tables.drawn(table)}\n"
            f"mesh {sizes or 'unknown'}; whole on each device: {self.replicated_bytes} bytes "
            f"({self.replicated_fraction:.1%}); the fullest device holds "
            f"{max(self.device_bytes, default=0)} bytes, {self.balance:.2f} of the mean\nrules:\n"
            + _indented([f"{number} {name}" for number, name in enumerate(self.rules)])
        )
        for title, found in (("problems", self.problems), ("warnings", self.warnings)):
            text += f"\n{title}:\n{_indented(found)}" if found else ""
        return printable(text, kept="\n")


@_compat.api_boundary
def check_sharding(
    model: Any,
    sharding: StateSharding,
    mesh: Any = None,
    *,
    on_indivisible: OnIndivisible | None = None,
) -> ShardingReport:
    """Tells what a sharding makes of a model, before anything is placed or compiled.

    Args:
      model: a model, an optimizer, or a pytree of such; abstract (``nnx.eval_shape``) or not.
        A Variable that is reached more than once counts under its first path.
      sharding: the rules. Inside each module paths start at the module, as in ``nnx``.
      mesh: the mesh of partition specs, abstract or not; None for the one in context.
      on_indivisible: what is done with specs that do not divide a shape, as in
        :func:`~nnx_sharding.jit`: with ``"error"`` they are problems, and the row shows what
        ``"drop"`` would make of them. None takes what ``sharding`` says, else ``"error"``.

    Returns:
      The report. Where no rule matches or a spec cannot be, the array counts as whole on each
      device; likewise where a rule says None, unless the array lies on a mesh already.

    Raises:
      TypeError: ``sharding`` is no ``StateSharding``.
      ValueError: ``on_indivisible`` is something else.
      NoMeshError: a partition spec has no mesh.

    Example:
      >>> from flax import nnx
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> from nnx_sharding import StateSharding
      >>> from nnx_sharding.report import check_sharding
      >>> mesh = AbstractMesh((4,), ("model",))
      >>> model = nnx.eval_shape(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)))
      >>> rules = StateSharding({nnx.PathContains("kernel"): P(None, "model")})
      >>> report = check_sharding(model, rules, mesh)
      >>> report.problems
      ['bias, shape (16,): no rule matches']
      >>> report.rows[1].path, report.rows[1].rule, report.rows[1].bytes_per_device
      ('kernel', 0, 128)
    """
    if not isinstance(sharding, StateSharding):
        raise TypeError(f"sharding is a StateSharding, not {sharding!r}.")
    if on_indivisible is not None and on_indivisible not in ON_INDIVISIBLE:
        raise ValueError(
            f"on_indivisible is one of {ON_INDIVISIBLE} or None, not {on_indivisible!r}."
        )
    mesh = _compat.context_mesh() if mesh is None else mesh
    if mesh is None and any(isinstance(spec, PartitionSpec) for spec in sharding.shardings):
        raise NoMeshError("check_sharding: a PartitionSpec has no mesh. Pass mesh=...")
    flat = flatten(model)
    rules = tuple(_ADDRESS.sub("", name) for name in sharding.names)
    decisions = list(_decisions(flat, sharding))
    how = on_indivisible or sharding.on_indivisible or "error"
    fitted = functools.cache(functools.partial(_fitted, mesh=mesh, how=how))
    rows = tuple(_rows(flat, decisions, rules, fitted))
    takers = _takers(sharding, decisions)
    keys = {key for decision in decisions for key in decision.below}
    total = sum(row.bytes_total for row in rows)
    whole = sum(row.bytes_total for row in rows if _is_whole(row))
    held = tuple(device_bytes(rows).values())
    return ShardingReport(
        mesh={} if mesh is None else {str(axis): size for axis, size in mesh.shape.items()},
        rules=rules,
        rows=rows,
        unmatched=tuple(row.path for row in rows if row.rule is None),
        on_indivisible=tuple(row.path for row in rows if row.why and "divisible" in row.why),
        unused=tuple(number for number, by in takers.items() if not by),
        shadowed={number: by for number, by in takers.items() if by},
        bytes_total=total,
        replicated_bytes=whole,
        replicated_fraction=whole / max(total, 1),
        device_bytes=held,
        balance=max(held) * len(held) / sum(held) if any(held) else 1.0,
        problems=[str(row) for row in rows if row.is_fault],
        warnings=[str(row) for row in rows if row.why and not row.is_fault]
        + list(_rule_warnings(sharding, rules, takers, keys)),
    )


def assert_sharded(
    model: Any, *, tolerance: float = 0.02, sharding: StateSharding | None = None, mesh: Any = None
) -> None:
    """Fails if much of a model lies whole on each device, as after a forgotten rule.

    Args:
      model: a placed model or optimizer, or a pytree or ``nnx.state(model, nnx.Param)`` of it.
      tolerance: the part of all bytes that may be whole, from 0 to 1. What is on a mesh of one
        device does not count: there nothing can be cut.
      sharding: rules to check instead of where the arrays lie; the model may then be abstract.
      mesh: the mesh of these rules.

    Raises:
      AssertionError: more is whole; the largest of these arrays are named.
      ValueError: ``tolerance`` is not from 0 to 1, or the rules have problems.

    Example:
      >>> from flax import nnx
      >>> from nnx_sharding.testing import assert_sharded
      >>> assert_sharded(nnx.Linear(8, 16, rngs=nnx.Rngs(0)))
      Traceback (most recent call last):
      AssertionError: 576 of 576 bytes (100.0%) are whole on each device, more than 2.0%:
        kernel, shape (8, 16): 512 bytes
        bias, shape (16,): 64 bytes
      Give them specs, or raise the tolerance.

    The check, and its tolerance of 2%, follow ``assert_params_sufficiently_sharded`` of MaxText.
    """
    if not 0 <= tolerance <= 1:
        raise ValueError(f"tolerance is a part of all bytes, from 0 to 1, not {tolerance!r}.")
    rows: Sequence[parameters.ParameterRow]
    if sharding is None:
        rows = parameters.parameter_table(model)
    else:
        report = check_sharding(model, sharding, mesh)
        report.raise_for_problems()
        rows = report.rows
    whole = sorted(filter(_is_whole, rows), key=lambda row: -row.bytes_total)
    held, total = (sum(row.bytes_total for row in some) for some in (whole, rows))
    if held > tolerance * total:
        lines = [f"{row.path}, shape {row.shape}: {row.bytes_total} bytes" for row in whole[:10]]
        lines += [f"… {len(whole) - 10} more"] if len(whole) > 10 else []
        raise AssertionError(
            f"{held} of {total} bytes ({held / total:.1%}) are whole on each device, more than "
            f"{tolerance:.1%}:\n{_indented(lines)}\nGive them specs, or raise the tolerance."
        )


class _Decision(NamedTuple):
    """What the rules say of one place: its path, the path that rules see, and the outcome."""

    path: Path
    below: Path
    subject: Any
    place: Location
    rule: int | None
    declared: Any


def _decisions(flat: Flat, sharding: StateSharding) -> Iterator[_Decision]:
    structure = flat.structure
    seen: set[tuple[int, ...]] = {()}
    for found in reach(structure, [target("", sharding, None, structure.root)]):
        place = found.place
        if place.slots in seen:
            continue
        seen.add(place.slots)
        subject = flat.leaves[place.slots[0]] if place.entry is None else flat.objects[place.entry]
        below = tuple(map(plain_key, place.path or found.part.below))
        path = tuple(map(plain_key, (*found.part.keys, *place.path)))
        yield _Decision(path, below, subject, place, *sharding.find(below, subject))


def _rows(
    flat: Flat, decisions: Sequence[_Decision], rules: Sequence[str], fitted: Any
) -> Iterator[ShardingRow]:
    for decision in decisions:
        rule, declared = decision.rule, decision.declared
        text = None if rule is None else rules[rule]
        for path, array in parameters.arrays_at(flat, decision.place, decision.path):
            own = getattr(array, "sharding", None) if rule is not None else None
            as_it_lies = declared is None and isinstance(own, NamedSharding)
            layout, why, is_fault = fitted(own if as_it_lies else declared, tuple(array.shape))
            if rule is None:
                why, is_fault = "no rule matches", True
            said = {"rule": rule, "rule_text": text, "why": why, "is_fault": is_fault}
            yield parameters.row_of(ShardingRow, path, array, layout, declared=declared, **said)


def _fitted(
    declared: Any, shape: tuple[int, ...], mesh: Any, how: OnIndivisible
) -> tuple[Sharding | None, str | None, bool]:
    """The sharding that fits a shape, what does not fit, and whether that is refused."""
    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    declared = declared.sharding if isinstance(declared, Format) else declared
    if isinstance(declared, PartitionSpec):
        problems = axis_problems(declared, mesh)
        if problems:
            return whole, "; ".join(problems), True
        try:
            declared = NamedSharding(mesh, declared)
        except ValueError as error:  # such as UNCONSTRAINED on Explicit axes
            return whole, str(error), True
    if not isinstance(declared, NamedSharding):
        return whole if declared is None else declared, None, False
    spec, mesh = declared.spec, declared.mesh
    problems = shape_problems(spec, mesh, shape)
    if problems and len(spec) > len(shape):
        return whole, "; ".join(problems), True
    part = fit(spec, shape, mesh.shape, "drop" if how == "error" else how)
    is_fault = bool(problems) and how == "error"
    return like(declared, part), "; ".join(problems) or None, is_fault


def _is_whole(row: parameters.ParameterRow) -> bool:
    one = isinstance(row.sharding, NamedSharding) and row.num_devices == 1
    return not one and row.is_fully_replicated is not False


def _takers(sharding: StateSharding, decisions: Sequence[_Decision]) -> dict[int, tuple[int, ...]]:
    """For each rule that decides about nothing, those that take what it matches."""
    chosen = {decision.rule for decision in decisions}
    idle = {n: to_predicate(f) for n, f in enumerate(sharding.filters) if n not in chosen}
    takers: dict[int, set[int]] = {number: set() for number in idle}
    for decision in decisions:
        for number, predicate in idle.items():
            if decision.rule is not None and predicate(decision.below, decision.subject):
                takers[number].add(decision.rule)
    return {number: tuple(sorted(by)) for number, by in takers.items()}


def _rule_warnings(
    sharding: StateSharding, rules: Sequence[str], takers: Mapping[int, Any], keys: set[Any]
) -> Iterator[str]:
    """A last resort need not match anything, nor paths, which may be those of another model."""
    for number, by in takers.items():
        filter_ = sharding.filters[number]
        if isinstance(filter_, Paths) or filter_ in (..., True, nnx.Everything()):
            continue
        near = misspelt(filter_, keys)
        taken = f"only what rule {', '.join(map(str, by))} takes before it"
        yield f"rule {number}, {rules[number]}, matches {taken if by else 'nothing' + near}"


_ID = operator.attrgetter("id")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of functions, another one in each process


def device_bytes(rows: Iterable[parameters.ParameterRow]) -> dict[int, int]:
    """The bytes that each device holds by its id, or by its position in an abstract mesh."""
    sums: Counter[Sharding] = Counter()
    for row in rows:
        if row.sharding is not None:
            sums[row.sharding] += row.bytes_per_device
    held: Counter[int] = Counter()
    for sharding, size in sums.items():
        abstract = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)
        ids = range(sharding.num_devices) if abstract else map(_ID, sharding.device_set)
        held.update(dict.fromkeys(ids, size))
    return {device: held[device] for device in sorted(held)}


def _cells(row: ShardingRow) -> tuple[str, ...]:
    path, shape, dtype, spec, *rest = parameters.cells(row)
    changed = f"{describe(row.declared)} → {spec}" if row.why and row.declared is not None else spec
    return ("-" if row.rule is None else str(row.rule), path, shape, dtype, changed, *rest)


def _data(value: Any) -> Any:
    """The same as data for JSON; a spec as a list with an entry for each dimension.

    With unreduced or reduced axes it is a mapping, which has this list as ``partitions``.
    """
    if isinstance(value, ShardingRow):
        of_programs = ("sharding", "memory_kind", "donated", "used")
        names = (f.name for f in dataclasses.fields(value) if f.name not in of_programs)
        return {name: _data(getattr(value, name)) for name in names}
    value = value.spec if isinstance(value, NamedSharding) else value
    if isinstance(value, Mapping):
        return {str(key): _data(item) for key, item in value.items()}
    if isinstance(value, PartitionSpec):
        summing = {"unreduced": sorted(value.unreduced), "reduced": sorted(value.reduced)}
        entries = _data(value.partitions)
        return {"partitions": entries, **summing} if any(summing.values()) else entries
    if isinstance(value, tuple | list):
        return list(map(_data, value))
    is_plain = value is None or isinstance(value, int | float)
    return value if is_plain else _ADDRESS.sub("", str(value))


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)
