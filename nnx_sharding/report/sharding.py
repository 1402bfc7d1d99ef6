"""A sharding applied to a model: rule, spec and bytes of every array, and all problems.

A ``StateSharding`` is a list of *rules*: a filter for paths, and a spec. A *location* is where a
Variable, or an array outside of any, is in the model. The report takes the decisions of the
transforms one by one, so that what it says is what a call does: for each location the first rule
whose filter matches (`_decisions`), then what of its spec fits each array there (`_fit`), which is
one *row*. Nothing is placed, and arrays may be abstract.

A model is *flattened* (`Flat`) into ``structure``, ``leaves`` (its arrays, which locations name by
*slots*) and ``objects``. `locate` finds all locations, `fit_sharding` the part of a spec that fits
a mesh and a shape: a `Fit` with the ``sharding``, what was dropped for it (``corrections``) and
what cannot be (``problems``). Its ``reasons`` are the problems as text, or without problems the
corrections; empty if all of the spec fits. `parameters.row_of` makes a row, of which it computes
the sizes from the array and the sharding; `parameters.arrays_at` yields the arrays of a location.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..analysis import parameters
from ..analysis.json_codec import as_data, json_text
from ..analysis.parameters import ActivationTable, activations_table
from ..analysis.tables import Pictured, Table, text
from ..analysis.units import printable, without_address
from ..core.arguments import split_argument
from ..core.filter_uses import needs_filter
from ..core.flatten import Flat, flatten
from ..core.locations import locate
from ..core.structure import Location
from ..errors import ActivationError, NoMeshError, listed, raise_if_any
from ..specs.filters import Paths, paths_inside, shadowed, spelling_hint, to_predicate
from ..specs.fitting import ON_INDIVISIBLE, Fit, OnIndivisible, describe, fit_sharding, show
from ..specs.paths import Path, plain_key
from ..specs.state_sharding import StateSharding, candidates
from ..transforms.jit import jit


@dataclasses.dataclass(frozen=True, slots=True)
class ShardingRow(parameters.ParameterRow):
    """The sharding of one array, and why. Its base class has ``spec`` and the other fields.

    Attributes:
      rule: the index of the rule that decides; None if none matches.
      rule_text: the filter of this rule.
      declared: the spec of this rule. None leaves the choice to JAX.
      why: the reason why ``declared`` does not fit, if it does not; ``spec`` is the part that fits.
      is_fault: whether the transforms refuse the sharding of this array.
      reason: the note of a strategy on the array: why it stays replicated, or that heads are split.
    """

    rule: int | None = None
    rule_text: str | None = None
    declared: Any = None
    why: str | None = None
    is_fault: bool = False
    reason: str | None = None

    def __str__(self) -> str:
        declared = "" if self.declared is None else f", {describe(self.declared)}"
        corrected = f" → {describe(self.spec)}" if self.why and not self.is_fault else ""
        line = f"{self.path or 'the root'}, shape {self.shape}{declared}{corrected}: {self.why}"
        return printable(line)


@dataclasses.dataclass(frozen=True)
class ShardingReport(Pictured):
    """The result of :func:`check_sharding`; ``print`` and notebooks show it as a table.

    Attributes:
      mesh: the sizes of the mesh axes by name; empty without a mesh.
      rules: the filters of the sharding, as text.
      rows: one for each array, in the order in which NNX walks the model.
      unmatched: the paths that no rule matches.
      on_indivisible: the paths of arrays that their specs do not divide.
      unused: the indices of the rules that match nothing.
      shadowed: by the index of each rule that matches only what earlier ones match, the indices of
        those.
      bytes_total: the bytes of all arrays, each counted once.
      replicated_bytes: the bytes of those that are fully replicated.
      replicated_fraction: the fraction of the latter, from 0 to 1.
      device_bytes: the bytes that each device holds, in the order of their ids.
      balance: the bytes on the fullest device over the mean of all; 1 if all hold the same.
      problems: what the transforms refuse, one line each.
      warnings: what they correct, and rules that have no effect, one line each.
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
        """True without problems; warnings do not count."""
        return not self.problems

    def raise_for_problems(self, *, strict: bool = False) -> None:
        """Raises a ValueError that lists all problems, if any; with ``strict`` also warnings."""
        lines = [f"  {line}" for line in (*self.problems, *(self.warnings if strict else ()))]
        raise_if_any(ValueError, "the sharding does not fit the model:", lines)

    def as_dict(self) -> dict[str, Any]:
        """The report as data for JSON, in a fixed order."""
        data: dict[str, Any] = as_data(self, _plain)
        for row in data["rows"]:
            # Only arguments of programs have these fields.
            for name in ("memory_kind", "donated", "used", "variable", "role"):
                del row[name]
        return data

    def to_json(self) -> str:
        """:meth:`as_dict` as text, to store and compare."""
        return json_text(self.as_dict())

    def _pictures(self, width: int) -> Iterable[Any]:
        """Yields the table of arrays, and below it the mesh, the rules and what is wrong."""
        # The bytes of a device with a shard of each array; `device_bytes` has those of each device.
        per_device = sum(row.bytes_per_device for row in self.rows)
        # The footer has a cell for each column: the rule, then `HEADER`, which ends with bytes.
        total = ("", "total", "", "", "", "", str(per_device), str(self.bytes_total))
        yield Table(("rule", *parameters.HEADER), map(_cells, self.rows), numbers=2, footer=total)
        sizes = " × ".join(f"{axis!r} ({size})" for axis, size in self.mesh.items())
        yield text(
            f"mesh {sizes or 'unknown'}; fully replicated: {self.replicated_bytes} bytes "
            f"({self.replicated_fraction:.1%}); the fullest device holds "
            f"{max(self.device_bytes, default=0)} bytes, {self.balance:.2f} of the mean"
        )
        yield text("rules:")
        yield from (text(f"  {number} {name}") for number, name in enumerate(self.rules))
        for title, lines in (("problems:", self.problems), ("warnings:", self.warnings)):
            if lines:
                yield text(title)
                yield from (text(f"  {line}") for line in lines)


@_compat.api_boundary
def check_sharding(
    model: Any,
    sharding: StateSharding,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    on_indivisible: OnIndivisible | None = None,
) -> ShardingReport:
    """Checks a sharding for a model, before anything is placed or compiled.

    Args:
      model: a model, an optimizer, or a pytree of them, abstract (``nnx.eval_shape``) or not. A
        Variable with several paths counts under the first one.
      sharding: the rules. Inside each module, paths start at the module, as in ``nnx``.
      mesh: the mesh of partition specs, abstract or not; None for the one in context.
      on_indivisible: as in :func:`~nnx_sharding.jit`; with ``"error"`` the row shows the result of
        ``"drop"``. None uses that of ``sharding``, else ``"error"``.

    Returns:
      The report. An array counts as replicated if no rule matches it, if its spec cannot be used,
      or if its rule has None and it is not on a mesh yet.

    Raises:
      NoMeshError: a ``PartitionSpec`` has no mesh. Other faults of the sharding are in the report.
      TypeError: ``sharding`` is no ``StateSharding``.
      ValueError: ``on_indivisible`` is none of the possible values.

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
        raise TypeError(
            f"sharding must be a StateSharding, got {show(sharding)}. One is for all of the first "
            "argument; check parts that have others in calls of their own."
        )
    if on_indivisible is not None and on_indivisible not in ON_INDIVISIBLE:
        raise ValueError(
            f"on_indivisible must be one of {ON_INDIVISIBLE} or None, got {on_indivisible!r}."
        )
    mesh = _compat.context_mesh() if mesh is None else mesh
    if mesh is None and any(isinstance(spec, PartitionSpec) for spec in sharding.shardings):
        raise NoMeshError("check_sharding: a PartitionSpec has no mesh. Pass mesh=...")
    rules = tuple(without_address(name) for name in sharding.names)
    flat = flatten(model)
    decisions = [*_decisions(flat, sharding)]
    checked = [*_rows_of(flat, decisions, sharding, rules, mesh, on_indivisible)]
    return _report(checked, decisions, sharding, rules, mesh)


def _report(
    checked: Sequence[_CheckedRow],
    decisions: Sequence[_Decision],
    sharding: StateSharding,
    rules: tuple[str, ...],
    mesh: Mesh | AbstractMesh | None,
) -> ShardingReport:
    """Makes the report: the rows with their sums, and the rules that decide nothing.

    Args:
      decisions: what the rules say about each location of the model.
      mesh: the mesh of partition specs; None without one.
    """
    rows = [checked_row.row for checked_row in checked]
    # Number of a rule that decides nothing → the earlier rules that decide instead: {1: (0,)} if
    # rule 1 matches only arrays that rule 0 matches; {1: ()} if rule 1 matches nothing.
    idle = shadowed(len(rules), [decision.matches for decision in decisions])
    # The keys of all paths that rules see. A misspelt rule may mean one of them.
    keys = {key for decision in decisions for key in decision.path_in_module}
    inside = [path for x in decisions for path in paths_inside(x.path_in_module, x.subject)]
    total = sum(row.bytes_total for row in rows)
    replicated = sum(row.bytes_total for row in rows if is_replicated(row))
    held = tuple(parameters.device_bytes(rows).values())
    # A row with `why` does not fit. It is a fault if the transforms refuse it, else a correction.
    corrections = [str(row) for row in rows if row.why and not row.is_fault]
    return ShardingReport(
        mesh={} if mesh is None else {str(axis): size for axis, size in mesh.shape.items()},
        rules=rules,
        rows=tuple(rows),
        unmatched=tuple(row.path for row in rows if row.rule is None and row.is_fault),
        on_indivisible=tuple(x.row.path for x in checked if x.is_indivisible),
        unused=tuple(number for number, by in idle.items() if not by),
        shadowed={number: by for number, by in idle.items() if by},
        bytes_total=total,
        replicated_bytes=replicated,
        replicated_fraction=replicated / max(total, 1),
        device_bytes=held,
        balance=max(held) * len(held) / sum(held) if any(held) else 1.0,  # max(held) / mean
        problems=[str(row) for row in rows if row.is_fault],
        warnings=[*corrections, *_rule_warnings(sharding, rules, idle, keys, inside)],
    )


def sharding_rows(flat: Flat, sharding: StateSharding, mesh: AbstractMesh) -> list[ShardingRow]:
    """Returns only the rows of ``check_sharding``, in less time, and without texts of rules.

    A search needs the rows for hundreds of shardings of one flattened model.
    """
    no_texts = [""] * len(sharding.filters)
    checked = _rows_of(
        flat, _decisions(flat, sharding), sharding, no_texts, mesh, on_indivisible=None
    )
    return [checked_row.row for checked_row in checked]


class _Decision(NamedTuple):
    """What the rules say about a location in a model."""

    location: Location  # where a Variable or an array is; its ``slots`` are the leaves there
    path: Path  # the path from the root of the model, for the report
    path_in_module: Path  # the path that rules see, from the module with the sharding on
    matches: list[int]  # the numbers of the rules that match; the first one decides
    subject: Any  # the value that filters are given: the Variable, or the array


class _CheckedRow(NamedTuple):
    """A row of the report."""

    row: ShardingRow
    is_indivisible: bool  # whether the spec of the rule does not divide the array


def _decisions(flat: Flat, sharding: StateSharding) -> Iterator[_Decision]:
    """Yields what the rules say about each location of a model.

    A shared Variable has one location, and objects without arrays have none.
    """
    structure = flat.structure
    predicates = [to_predicate(filter_) for filter_ in sharding.filters]  # (path, value) -> bool
    # The whole model is one argument, and all of it has the same rules.
    argument = split_argument("", prefix=sharding, child=structure.root)
    seen: set[tuple[int, ...]] = set()  # the slots of arrays
    for named in locate(structure, [argument]):
        location = named.location
        # An object without arrays has no slots. Slots seen before are those of a shared Variable.
        if not location.slots or location.slots in seen:
            continue
        seen.add(location.slots)
        subject = named.subject(flat.objects, flat.leaves)
        path = tuple(map(plain_key, (*named.part.keys, *location.path)))
        # Rules may see a path from the module, or from the list or dict that the module is in
        # (``below`` is the path from there to the module). The first path that a rule matches
        # counts. If none is matched, the last one counts, which is the longest.
        path_in_module: Path = ()
        matches: list[int] = []
        for candidate in candidates(named.part.below, location.path):  # There is always one.
            path_in_module = tuple(map(plain_key, candidate))
            matches = [
                number
                for number, is_match in enumerate(predicates)
                if is_match(path_in_module, subject)
            ]
            if matches:
                break
        yield _Decision(location, path, path_in_module, matches, subject)


def _rows_of(
    flat: Flat,
    decisions: Iterable[_Decision],
    sharding: StateSharding,
    rules: Sequence[str],
    mesh: Mesh | AbstractMesh | None,
    on_indivisible: OnIndivisible | None,
) -> Iterator[_CheckedRow]:
    """Yields a row for each array of a model.

    Args:
      decisions: which rules match at each of its locations.
      on_indivisible: the action for a spec that does not divide an array; None uses the action of
        ``sharding``.
    """
    action = on_indivisible or sharding.on_indivisible or "error"
    # A row whose spec is refused shows the part of the spec that fits.
    shown: OnIndivisible = "drop" if action == "error" else action
    # Results of fit(declared, shape) are cached because layers that are alike share them.
    fit = functools.cache(functools.partial(_fit, mesh=mesh, action=shown))
    for decision in decisions:
        yield from _rows(flat, decision, sharding, rules, fit, strict=action == "error")


def _rows(
    flat: Flat,
    decision: _Decision,
    sharding: StateSharding,
    rules: Sequence[str],
    fit: Callable[[Any, tuple[int, ...]], Fit],
    *,
    strict: bool,
) -> Iterator[_CheckedRow]:
    """Yields a row of the report for each array of a Variable.

    Args:
      decision: which rules match the Variable; the first one decides.
      fit: the function that fits a declared sharding to a shape (`_fit`).
      strict: whether a spec that does not divide its array is a fault, not a correction.
    """
    rule = decision.matches[0] if decision.matches else None  # the number of the rule
    declared = None if rule is None else sharding.shardings[rule]
    # An array that no rule matches is a fault. `needs_filter` is False for a number, which needs no
    # rule.
    is_open = rule is None and needs_filter(decision.location.slots, decision.subject)
    # Filters of strategies say why they leave an array as it is.
    note = None if rule is None else getattr(sharding.filters[rule], "note", None)
    for path, array in parameters.arrays_at(flat, decision.location, decision.path):
        present = getattr(array, "sharding", None)
        if isinstance(array, np.ndarray) and _compat.is_array_like(array):
            array = jax.typeof(array)  # The type has the array's dtype on a device.
        # A rule with None leaves an array in place if it is on a mesh.
        is_kept = rule is not None and declared is None and isinstance(present, NamedSharding)
        fitted = fit(present if is_kept else declared, array.shape)
        # Problems cannot be corrected. Corrections drop axes that do not divide the shape.
        is_refused = bool(fitted.problems) or (strict and bool(fitted.corrections))
        row = parameters.row_of(
            ShardingRow,
            path,
            array,
            fitted.sharding,
            rule=rule,
            rule_text=None if rule is None else rules[rule],
            declared=declared,
            why="no rule matches" if is_open else fitted.reasons or None,
            is_fault=is_open or is_refused,
        )
        if note:  # The note is not in `why`, because nothing is wrong.
            is_whole = row.sharding is None or row.sharding.is_fully_replicated
            size = f"replicated: {math.prod(array.shape)} elements, " if is_whole else ""
            row = dataclasses.replace(row, reason=f"{size}{note}")
        yield _CheckedRow(row, fitted.is_indivisible)


def _fit(
    declared: Any,
    shape: tuple[int, ...],
    *,
    mesh: Mesh | AbstractMesh | None,
    action: OnIndivisible,
) -> Fit:
    """Finds the sharding that an array gets: replicated if the declared one cannot be used.

    Args:
      declared: the sharding of the rule; None if no rule matches, or if the rule has None.
      shape: the shape of the array.
      action: the action for a spec that does not divide the shape.
    """
    # The layout of a `Format` does not count here.
    declared = declared.sharding if isinstance(declared, Format) else declared
    fit = fit_sharding(declared, mesh, shape, on_indivisible=action)
    if isinstance(fit.sharding, PartitionSpec) and mesh is not None and not fit.problems:
        try:
            return fit._replace(sharding=NamedSharding(mesh, fit.sharding))
        except ValueError as error:  # UNCONSTRAINED on Explicit axes, for example
            fit = fit.refuse(str(error))  # `refuse` adds a problem.
    if declared is not None and not fit.problems:
        return fit
    # Nothing usable is declared, so the array counts as replicated.
    replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return fit._replace(sharding=replicated)


def is_replicated(row: parameters.ParameterRow) -> bool:
    """Tells whether an array is replicated over several devices, or over unknown ones."""
    if row.sharding is None:  # The devices are unknown.
        return True
    is_on_one_device = isinstance(row.sharding, NamedSharding) and row.num_devices == 1
    return row.sharding.is_fully_replicated and not is_on_one_device


def _rule_warnings(
    sharding: StateSharding,
    rules: Sequence[str],
    idle: Mapping[int, tuple[int, ...]],
    keys: set[Any],
    paths_in_variables: Sequence[Path],
) -> Iterator[str]:
    """Yields a line for each rule that decides for no array.

    Rules for everything and for exact paths are left out: they are written for any model.

    Args:
      idle: by the number of each rule that decides nothing, the earlier rules that decide instead;
        empty if it matches nothing.
      keys: the keys in all paths of the model, one of which a misspelt rule may mean.
      paths_in_variables: the paths of arrays in Variables that hold several.
    """
    for number, by in idle.items():
        filter_ = sharding.filters[number]
        # Such a rule is meant for arrays that a model may lack. The three values match everything,
        # and can be compared by equality.
        if isinstance(filter_, Paths) or filter_ in (..., True, nnx.Everything()):
            continue
        what = f"nothing{spelling_hint(filter_, keys, paths_in_variables)}"
        if by:
            what = f"only what rule {', '.join(map(str, by))} before it matches"
        yield f"rule {number}, {rules[number]}, matches {what}"


def _cells(row: ShardingRow) -> tuple[str, ...]:
    """Returns the texts of a row: its rule, and those of a table of parameters.

    If only a part of a spec fits, the cell is ``P('model') → P()``.
    """
    rule = "-" if row.rule is None else str(row.rule)
    path, shape, dtype, spec, *sizes = parameters.cells(row)  # in the order of `HEADER`
    if row.why and row.declared is not None:  # Only a part of the spec fits.
        spec = f"{describe(row.declared)} → {spec}"
    return (rule, path, shape, dtype, spec, *sizes)


def _plain(value: Any) -> Any:
    """Converts an object that `as_data` does not know to data that are the same in each process.

    A sharding becomes its spec. Any other object becomes its text without addresses.
    """
    value = value.spec if isinstance(value, NamedSharding) else value
    return value if isinstance(value, PartitionSpec) else without_address(str(value))


@dataclasses.dataclass(frozen=True)
class ActivationReport(Pictured):
    """The result of :func:`check_activations`; ``print`` and notebooks show it as a table.

    Attributes:
      rows: what each module returns; empty if there are problems.
      problems: what is wrong, as lines of text.
    """

    rows: ActivationTable
    problems: list[str]

    @property
    def ok(self) -> bool:
        """Whether it has no problems."""
        return not self.problems

    def raise_for_problems(self) -> None:
        """Raises an ``ActivationError`` that lists all problems, if there are any."""
        if self.problems:
            raise ActivationError("\n".join(listed(self.problems)))

    def _pictures(self, width: int) -> Iterable[Any]:
        yield from map(text, self.problems)
        if self.ok:
            yield activations_table(self.rows)


@_compat.api_boundary
def check_activations(fun: Callable[..., Any], *args: Any, **options: Any) -> ActivationReport:
    """Checks how a function shards the activations of its modules, without compiling it.

    Lists every module whose output JAX cannot type on Explicit axes, with the specs that would
    work, and every declared spec that does not fit.

    Args:
      fun: the function.
      *args: its arguments, abstract or not.
      **options: for :func:`~nnx_sharding.jit`: ``in_shardings``, ``activation_shardings``, ….

    Returns:
      The activations with their shardings, or the problems.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import StateSharding
      >>> from nnx_sharding.report import check_activations
      >>> mesh = jax.make_mesh((8,), ("model",))
      >>> model = nnx.Dict(down=nnx.Linear(16, 4, rngs=nnx.Rngs(0)))
      >>> specs = StateSharding({nnx.PathContains("kernel"): P("model"), ...: P()})
      >>> forward = lambda model, x: model.down(x)
      >>> options = {"mesh": mesh, "in_shardings": (specs, P(None, "model"))}
      >>> report = check_activations(forward, model, jnp.ones((2, 16)), **options)
      >>> report.ok, "model.down: Linear" in report.problems[1]
      (False, True)
    """
    try:
        rows = jit(fun, **options).trace(*args).activations()
    except ActivationError as error:
        return ActivationReport(ActivationTable(), str(error).splitlines())
    return ActivationReport(rows, [])
