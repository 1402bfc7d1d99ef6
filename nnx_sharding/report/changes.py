"""What changed between two reports, or two comparisons: of two commits, or two releases of JAX."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload

from ..analysis.arguments import Parameter
from ..analysis.units import bytes_text, count_text, printable, time_text
from .comparison import FORMAT as COMPARISON
from .comparison import Comparison, Failure
from .json_form import json_text
from .program import ProgramReport
from .reading import as_data

Kind: TypeAlias = Literal["program", "memory", "cost", "roofline", "collective", "parameter"]
Value: TypeAlias = float | str | None
Given: TypeAlias = "ProgramReport | Comparison | str | os.PathLike[str]"


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One thing that is not as it was.

    Attributes:
      kind: what it is about.
      name: such as ``peak``, ``all-gather over data: bytes`` or the path of a parameter.
      before: the figure or text before; None if there was none.
      after: that after; None if there is none any more.
      strategy: of which strategy, where comparisons were given; else empty.
    """

    kind: Kind
    name: str
    before: Value
    after: Value
    strategy: str = ""

    @property
    def relative(self) -> float | None:
        """By how much a figure grew, as a part of what it was; None for what is no figure."""
        if not isinstance(self.before, int | float) or not isinstance(self.after, int | float):
            return None
        if not self.before:
            return math.inf if self.after else 0.0
        return (self.after - self.before) / self.before

    def __str__(self) -> str:
        show = _text_of(self.kind, self.name)
        part = self.relative
        by = "" if part is None else f" ({part:+.1%})" if math.isfinite(part) else " (from nothing)"
        return printable(f"{self.name}: {show(self.before)} → {show(self.after)}{by}")


class Changes(Sequence[Change]):
    """What :func:`diff` found; empty if nothing changed. ``print`` shows it.

    Args:
      found: the changes.
      made_with: for each version that differs the one before and the one after.
    """

    def __init__(
        self,
        found: Iterable[Change] = (),
        made_with: Mapping[str, tuple[str, str]] | None = None,
    ):
        self._found = tuple(found)
        self.made_with = dict(made_with or {})

    @overload
    def __getitem__(self, index: int) -> Change: ...

    @overload
    def __getitem__(self, index: slice) -> Changes: ...

    def __getitem__(self, index: int | slice) -> Change | Changes:
        if isinstance(index, slice):
            return Changes(self._found[index], self.made_with)
        return self._found[index]

    def __len__(self) -> int:
        return len(self._found)

    def grown(self, threshold: float = 0.0) -> Changes:
        """The figures that grew by more than a part of what they were.

        Args:
          threshold: the part, such as 0.05 for 5 %.

        Raises:
          ValueError: it is negative or no number.
        """
        _check_threshold(threshold)
        return Changes(
            (one for one in self._found if one.relative is not None and one.relative > threshold),
            self.made_with,
        )

    def as_dict(self) -> dict[str, Any]:
        """All of it as data for JSON."""
        return {
            "format": "nnx_sharding.diff",
            "version": 1,
            "made_with": {name: list(pair) for name, pair in self.made_with.items()},
            "changes": as_data(self._found),
        }

    def to_json(self) -> str:
        """:meth:`as_dict` as text."""
        return json_text(self.as_dict())

    def __repr__(self) -> str:
        return f"Changes({list(self._found)!r})"

    def __str__(self) -> str:
        return printable("\n".join(_lines(self)), kept="\n")


def diff(before: Given, after: Given, *, threshold: float = 0.0) -> Changes:
    """Tells what changed between two reports or two comparisons.

    Args:
      before: a report or a comparison, or the path of a JSON file with one.
      after: likewise, of the same kind. Strategies are matched by name.
      threshold: figures that changed by no more than this part of what they were, up or down, are
        left out.

    Returns:
      The changes of memory, cost, roofline, collectives and arguments; other versions of JAX, Flax
      and Python are told with them, but are no changes themselves.

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
        found = _of_reports(old, new)
    elif isinstance(old, Comparison) and isinstance(new, Comparison):
        found = _of_comparisons(old, new)
    else:
        raise ValueError(
            f"diff needs two reports or two comparisons: the one is {_a(old)}, the other {_a(new)}."
        )
    return Changes((one for one in found if _counts(one, threshold)), _versions(old, new))


def load(given: Given) -> ProgramReport | Comparison:
    """A report or a comparison; read from a file if it is the path of one.

    Raises:
      ValueError: the file holds neither; its name is in the message.
      TypeError: it is something else.
      OSError: the file cannot be read.
    """
    if isinstance(given, ProgramReport | Comparison):
        return given
    if not isinstance(given, str | os.PathLike):
        raise TypeError(
            f"this is a report, a comparison or the path of a file with one, not {given!r}."
        )
    try:
        data = json.loads(Path(given).read_bytes())
        is_comparison = isinstance(data, dict) and data.get("format") == COMPARISON
        return Comparison.from_dict(data) if is_comparison else ProgramReport.from_dict(data)
    except ValueError as error:
        raise ValueError(f"{os.fspath(given)}: {error}") from None


def _a(found: object) -> str:
    return "a comparison" if isinstance(found, Comparison) else "a report"


def _check_threshold(threshold: float) -> None:
    if not isinstance(threshold, int | float) or not threshold >= 0:
        raise ValueError(f"threshold is a part such as 0.05, from 0 on, not {threshold!r}.")


def _counts(change: Change, threshold: float) -> bool:
    return change.relative is None or abs(change.relative) > threshold


def _of_comparisons(before: Comparison, after: Comparison) -> Iterator[Change]:
    for name in dict.fromkeys([*before.reports, *after.reports]):
        old, new = before.reports.get(name), after.reports.get(name)
        if isinstance(old, ProgramReport) and isinstance(new, ProgramReport):
            for change in _of_reports(old, new):
                yield dataclasses.replace(change, strategy=name)
        elif _outcome(old) != _outcome(new):
            yield Change("program", "outcome", _outcome(old), _outcome(new), name)


def _outcome(found: ProgramReport | Failure | None) -> str | None:
    if isinstance(found, Failure):
        return f"failed: {found.error.partition(chr(10))[0]}"
    return None if found is None else "compiled"


def _of_reports(before: ProgramReport, after: ProgramReport) -> Iterator[Change]:
    for kind, figures in _FIGURES.items():
        old, new = figures(before), figures(after)
        nothing = 0 if kind == "collective" else None
        for name in dict.fromkeys([*old, *new]):
            pair = old.get(name, nothing), new.get(name, nothing)
            if pair[0] != pair[1]:
                yield Change(kind, name, *pair)


def _program(report: ProgramReport) -> dict[str, Value]:
    axes = None if report.mesh is None else report.mesh.axes.items()
    mesh = None if axes is None else " × ".join(f"{axis} {size}" for axis, size in axes)
    return {"devices": f"{report.num_devices} × {report.device_kind}", "mesh": mesh}


def _memory(report: ProgramReport) -> dict[str, Value]:
    data = {} if report.memory is None else as_data(report.memory)
    return {name: value for name, value in data.items() if value is not None}


def _cost(report: ProgramReport) -> dict[str, Value]:
    cost = report.cost.executed
    return {} if cost is None else {k: v for k, v in as_data(cost).items() if k != "stage"}


def _roofline(report: ProgramReport) -> dict[str, Value]:
    roofline = report.roofline
    if roofline is None:
        return {}
    return {f"least time on {roofline.device}": roofline.seconds, "bound by": roofline.bound_by}


def _collectives(report: ProgramReport) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for one in report.collectives:
        axes = "unknown axes" if one.axes is None else "+".join(one.axes) or "no axes"
        for what, count in (("number", 1), ("bytes", one.total_bytes_sent)):
            name = f"{one.kind} over {axes}: {what}"
            so_far = found.get(name, 0)
            assert isinstance(so_far, int)
            found[name] = so_far + count
    return found


def _parameters(report: ProgramReport) -> dict[str, Value]:
    return {row.path: _layout(row) for row in report.parameters}


def _layout(row: Parameter) -> str:
    spec = "no spec" if row.spec is None else row.spec_text
    marks = [mark for mark, holds in (("donated", row.donated), ("unused", not row.used)) if holds]
    kind = [] if row.memory_kind in (None, "device") else [row.memory_kind]
    return " ".join([f"{row.dtype}[{','.join(map(str, row.shape))}] {spec}", *kind, *marks])


_FIGURES: dict[Kind, Callable[[ProgramReport], dict[str, Value]]] = {
    "program": _program,
    "memory": _memory,
    "cost": _cost,
    "roofline": _roofline,
    "collective": _collectives,
    "parameter": _parameters,
}


def _versions(before: Any, after: Any) -> dict[str, tuple[str, str]]:
    """The versions that differ, as the first reports of both tell them."""
    old, new = _made_with(before), _made_with(after)
    return {name: (old[name], new[name]) for name in old if name in new and old[name] != new[name]}


def _made_with(found: ProgramReport | Comparison) -> dict[str, str]:
    reports = [found] if isinstance(found, ProgramReport) else found.reports.values()
    made: dict[str, str] = {}
    for report in reports:
        if isinstance(report, ProgramReport) and not made:
            made = as_data(report.made_with)
    return made


# The text


def _lines(changes: Changes) -> Iterator[str]:
    versions = [f"{name} {old} → {new}" for name, (old, new) in changes.made_with.items()]
    if versions:
        yield "made with " + ", ".join(versions)
    if not changes:
        yield "no changes"
    heading: tuple[str, str] | None = None
    for change in changes:
        if heading != (change.strategy, change.kind):
            heading = (change.strategy, change.kind)
            yield f"{change.strategy + ': ' if change.strategy else ''}{_HEADINGS[change.kind]}"
        yield f"  {change}"


_HEADINGS: dict[Kind, str] = {
    "program": "program",
    "memory": "memory of one device",
    "cost": "cost of one device",
    "roofline": "roofline",
    "collective": "collectives",
    "parameter": "arguments",
}


def _text_of(kind: Kind, name: str) -> Callable[[Value], str]:
    """What shows a value of this kind."""
    figure = _TEXTS.get(kind, count_text)
    if kind == "collective" and name.endswith("bytes"):
        figure = bytes_text

    def show(value: Value) -> str:
        if value is None:
            return "none"
        return value if isinstance(value, str) else figure(value)

    return show


_TEXTS: dict[Kind, Callable[[float], str]] = {"memory": bytes_text, "roofline": time_text}
