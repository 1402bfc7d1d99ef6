"""What changed between two reports, or two comparisons: of two commits, or two releases of JAX."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..analysis.json_codec import as_data, json_text
from ..analysis.parameters import ParameterRow
from ..analysis.units import bytes_text, count_text, printable, time_text
from .comparison import FORMAT as COMPARISON
from .comparison import Comparison, Failure
from .program import ProgramReport

Kind: TypeAlias = Literal["program", "memory", "cost", "roofline", "collective", "parameter"]
Value: TypeAlias = float | str | None
Source: TypeAlias = "ProgramReport | Comparison | str | os.PathLike[str]"


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One difference between two reports.

    Attributes:
      kind: what it is about.
      name: such as ``peak``, ``all-gather over data: bytes`` or the path of a parameter.
      before: the figure or text before; None if there was none.
      after: that after; None if there is none any more.
      strategy: the strategy in two comparisons; empty for two reports.
    """

    kind: Kind
    name: str
    before: Value
    after: Value
    strategy: str = ""

    @property
    def relative(self) -> float | None:
        """By how much a figure grew, as a fraction of the one before; None for texts."""
        if not isinstance(self.before, int | float) or not isinstance(self.after, int | float):
            return None
        if not self.before:
            return math.inf if self.after else 0.0
        return (self.after - self.before) / self.before

    def __str__(self) -> str:
        figure = _FIGURE_TEXTS.get(self.kind, count_text)
        if self.kind == "collective" and self.name.endswith("bytes"):
            figure = bytes_text
        before, after = (
            figure(value) if isinstance(value, int | float) else value or "none"
            for value in (self.before, self.after)
        )
        part = self.relative
        by = "" if part is None else f" ({part:+.1%})" if math.isfinite(part) else " (from nothing)"
        return printable(f"{self.name}: {before} → {after}{by}")


_FIGURE_TEXTS: dict[Kind, Callable[[float], str]] = {"memory": bytes_text, "roofline": time_text}


class Changes(tuple[Change, ...]):
    """What :func:`diff` returns; empty if nothing changed. ``print`` shows it.

    Attributes:
      made_with: for each version that differs the one before and the one after.
    """

    made_with: Mapping[str, tuple[str, str]] = types.MappingProxyType({})

    def grown(self, threshold: float = 0.0) -> Changes:
        """The figures that grew by more than a fraction of the one before.

        Args:
          threshold: the fraction, such as 0.05 for 5 %.

        Raises:
          ValueError: it is negative or not a number.
        """
        _check_threshold(threshold)
        grown = (one for one in self if one.relative is not None and one.relative > threshold)
        return _changes(grown, self.made_with)

    def as_dict(self) -> dict[str, Any]:
        """All of it as data for JSON."""
        return {
            "format": "nnx_sharding.diff",
            "version": 1,
            "made_with": {name: list(pair) for name, pair in self.made_with.items()},
            "changes": as_data(tuple(self)),
        }

    def to_json(self) -> str:
        """:meth:`as_dict` as text."""
        return json_text(self.as_dict())

    def __str__(self) -> str:
        return printable("\n".join(self._lines()), kept="\n")

    def _lines(self) -> Iterator[str]:
        versions = [f"{name} {old} → {new}" for name, (old, new) in self.made_with.items()]
        if versions:
            yield "made with " + ", ".join(versions)
        if not self:
            yield "no changes"
        previous = None
        for change in self:
            title = f"{change.strategy}: " * bool(change.strategy) + _TITLES[change.kind]
            if title != previous:
                yield title
            previous = title
            yield f"  {change}"


_TITLES: dict[Kind, str] = {
    "program": "program",
    "memory": "memory of one device",
    "cost": "cost of one device",
    "roofline": "roofline",
    "collective": "collectives",
    "parameter": "arguments",
}


def diff(before: Source, after: Source, *, threshold: float = 0.0) -> Changes:
    """Compares two reports or two comparisons.

    Args:
      before: a report or a comparison, or the path of a JSON file with one.
      after: likewise, of the same kind. Strategies are matched by name.
      threshold: figures that changed by no more than this fraction of the one before, up or down,
        are left out.

    Returns:
      The changes of memory, cost, roofline, collectives and arguments. Other versions of JAX, Flax
      and Python are reported with them, but are not changes themselves.

    Raises:
      ValueError: a file holds neither, one is a report and the other a comparison, or
        ``threshold`` is negative.
      TypeError: they are something else.
      OSError: a file cannot be read.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.report import diff
      >>> from nnx_sharding.partition import make_mesh
      >>> x = jax.ShapeDtypeStruct((64, 64), "float32")
      >>> def report(spec):
      ...     fun = jit(lambda x: x.sum(), in_shardings=spec, mesh=make_mesh({"data": -1}))
      ...     return fun.lower(x).compile().report()
      >>> changes = diff(report(P()), report(P("data")))
      >>> print([str(change) for change in changes if change.kind == "parameter"][0])
      x: float32[64,64] P(None, None) → float32[64,64] P('data', None)
      >>> [change.name for change in changes if change.kind == "collective"]
      ['all-reduce over data: number', 'all-reduce over data: bytes']
    """
    _check_threshold(threshold)
    old, new = load(before), load(after)
    if isinstance(old, ProgramReport) and isinstance(new, ProgramReport):
        changes = _of_reports(old, new)
    elif isinstance(old, Comparison) and isinstance(new, Comparison):
        changes = _of_comparisons(old, new)
    else:
        raise ValueError(
            f"diff needs two reports or two comparisons; before is a {type(old).__name__}, after "
            f"a {type(new).__name__}."
        )
    some = (one for one in changes if one.relative is None or abs(one.relative) > threshold)
    made_with, made_with_new = _made_with(old), _made_with(new)
    pairs = {name: (made_with[name], version) for name, version in made_with_new.items()}
    return _changes(some, {name: pair for name, pair in pairs.items() if pair[0] != pair[1]})


def _changes(changes: Iterable[Change], made_with: Mapping[str, tuple[str, str]]) -> Changes:
    result = Changes(changes)
    result.made_with = made_with
    return result


def load(source: Source) -> ProgramReport | Comparison:
    """A report or a comparison, or that in the file of this path.

    Raises:
      ValueError: the file holds neither; the message begins with the path.
      TypeError: it is something else.
      OSError: the file cannot be read.
    """
    if isinstance(source, ProgramReport | Comparison):
        return source
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            f"expected a report, a comparison or the path of a file with one, got {source!r}."
        )
    try:
        return from_dict(json.loads(Path(source).read_bytes()))
    except ValueError as error:
        raise ValueError(f"{os.fspath(source)}: {error}") from None


def from_dict(data: Any) -> ProgramReport | Comparison:
    """A report or a comparison from its JSON form.

    Raises:
      ValueError: it is neither.
    """
    is_comparison = isinstance(data, dict) and data.get("format") == COMPARISON
    return Comparison.from_dict(data) if is_comparison else ProgramReport.from_dict(data)


def _check_threshold(threshold: float) -> None:
    if not isinstance(threshold, int | float) or not threshold >= 0:
        raise ValueError(f"threshold is a fraction such as 0.05, from 0 on, not {threshold!r}.")


def _of_comparisons(before: Comparison, after: Comparison) -> Iterator[Change]:
    for name in dict.fromkeys([*before.reports, *after.reports]):
        old, new = before.reports.get(name), after.reports.get(name)
        if isinstance(old, ProgramReport) and isinstance(new, ProgramReport):
            for change in _of_reports(old, new):
                yield dataclasses.replace(change, strategy=name)
        elif _outcome(old) != _outcome(new):
            yield Change("program", "outcome", _outcome(old), _outcome(new), name)


def _outcome(report: ProgramReport | Failure | None) -> str | None:
    if isinstance(report, Failure):
        return f"failed: {report.error.partition(chr(10))[0]}"
    return None if report is None else "compiled"


def _of_reports(before: ProgramReport, after: ProgramReport) -> Iterator[Change]:
    old, new = _figures(before), _figures(after)
    for kind, figures in old.items():
        missing = 0 if kind == "collective" else None
        for name in dict.fromkeys([*figures, *new[kind]]):
            pair = figures.get(name, missing), new[kind].get(name, missing)
            if pair[0] != pair[1]:
                yield Change(kind, name, *pair)


def _figures(report: ProgramReport) -> dict[Kind, dict[str, Value]]:
    """All that is compared, by kind and name."""
    memory = {} if report.memory is None else as_data(report.memory)
    cost = {} if report.cost.executed is None else as_data(report.cost.executed)
    roofline = report.roofline
    collectives: dict[str, Value] = {}
    for (kind, axes), (number, sent) in report.collectives.totals().items():
        name = f"{kind} over {'unknown axes' if axes is None else '+'.join(axes) or 'no axes'}"
        collectives |= {f"{name}: number": number, f"{name}: bytes": sent}
    return {
        "program": {
            "devices": f"{report.num_devices} × {report.device_kind}",
            "mesh": None if report.mesh is None else str(report.mesh),
        },
        "memory": {name: size for name, size in memory.items() if size is not None},
        "cost": {name: figure for name, figure in cost.items() if name != "stage"},
        "roofline": {}
        if roofline is None
        else {f"least time on {roofline.device}": roofline.seconds, "bound by": roofline.bound_by},
        "collective": collectives,
        "parameter": {row.path: _described(row) for row in report.parameters},
    }


def _described(row: ParameterRow) -> str:
    spec = "no spec" if row.spec is None else row.spec_text
    words = [f"{row.dtype}[{','.join(map(str, row.shape))}]", spec]
    words += [] if row.memory_kind in (None, "device") else [row.memory_kind]
    return " ".join([*words, *row.marks])


def _made_with(source: ProgramReport | Comparison) -> dict[str, str]:
    """The versions that the first report was made with."""
    reports = [source] if isinstance(source, ProgramReport) else [*source.compiled.values()]
    return as_data(reports[0].made_with) if reports else {}
