"""Reports side by side: which strategies fit, and which is best."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args

from ..analysis.collectives import MeshAxes, axes_text
from ..analysis.hardware import Device
from ..analysis.hardware import device as device_named
from ..analysis.json_codec import as_data, read
from ..analysis.tables import table, text
from ..analysis.units import bytes_text, count_text, read_bytes, time_text
from .json_form import JsonForm
from .program import ProgramReport

FORMAT = "nnx_sharding.comparison"
VERSION = 1

Column: TypeAlias = Literal["peak", "arguments", "bytes_sent", "flops", "roofline", "planning"]


@dataclasses.dataclass(frozen=True)
class Failure:
    """A strategy that could not be compiled.

    Attributes:
      error: the type of the error and its text.
    """

    error: str


@dataclasses.dataclass(frozen=True)
class Comparison(JsonForm):
    """Reports side by side: what :func:`compare` returns. ``print`` shows a table.

    Attributes:
      reports: for each strategy its report, or why there is none.
      memory_limit: the bytes that a device has; None if that was not given.
      seconds: how long it took to trace, lower and compile each strategy, as far as it is known.

    Raises:
      TypeError: an entry is not a report.
      ValueError: there are no reports.
    """

    reports: Mapping[str, ProgramReport | Failure]
    memory_limit: int | None = None
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.reports:
            raise ValueError("there is nothing to compare: give at least one report.")
        wrong = [
            f"  {name!r}: {report!r}"
            for name, report in self.reports.items()
            if not isinstance(report, ProgramReport | Failure)
        ]
        if wrong:
            raise TypeError("these are not reports of programs:\n" + "\n".join(wrong))

    @property
    def compiled(self) -> dict[str, ProgramReport]:
        """The reports of the strategies that were compiled."""
        return {name: r for name, r in self.reports.items() if isinstance(r, ProgramReport)}

    @property
    def figures(self) -> dict[str, dict[Column, float | None]]:
        """For each strategy that was compiled the figures of one device; None if not known.

        ``peak``, ``arguments`` and ``bytes_sent`` (by collectives in one call) are in bytes,
        ``roofline`` (the least time on the device that was given) and ``planning`` in seconds.
        """
        return {name: self._figures(name, report) for name, report in self.compiled.items()}

    def _figures(self, name: str, report: ProgramReport) -> dict[Column, float | None]:
        memory, cost = report.memory, report.cost.executed
        return {
            "peak": None if memory is None else memory.peak,
            "arguments": None if memory is None else memory.arguments,
            "bytes_sent": report.collectives.bytes_sent,
            "flops": None if cost is None else cost.flops,
            "roofline": None if report.roofline is None else report.roofline.seconds,
            "planning": self.seconds.get(name),
        }

    @property
    def bytes_sent_by_axes(self) -> dict[str, dict[MeshAxes, int]]:
        """For each strategy that was compiled the bytes that one device sends, by mesh axes."""
        return {name: report.collectives.by_axes() for name, report in self.compiled.items()}

    @property
    def fitting(self) -> tuple[str, ...]:
        """The strategies whose peak is known and within ``memory_limit``; all if there is none."""
        return tuple(name for name in self.compiled if self.fits(name) is True)

    def fits(self, name: str) -> bool | None:
        """Whether a strategy fits the memory; None if its peak is not known.

        Raises:
          KeyError: there is no such strategy.
        """
        report = self.reports[name]
        if isinstance(report, Failure):
            return False
        if self.memory_limit is None:
            return True
        peak = None if report.memory is None else report.memory.peak
        return None if peak is None else peak <= self.memory_limit

    def best(self, column: Column) -> str | None:
        """The strategy with the least of a figure, of those that fit; None if there is none.

        Args:
          column: one of ``figures``.

        Raises:
          ValueError: there is no such column.
        """
        if column not in get_args(Column):
            raise ValueError(f"the columns are {get_args(Column)}, not {column!r}.")
        figures = self.figures
        values = ((figures[name][column], name) for name in self.fitting)
        known = [(value, name) for value, name in values if value is not None]
        return min(known, key=lambda pair: pair[0])[1] if known else None

    @property
    def marked(self) -> dict[Column, str]:
        """:meth:`best` of each figure, as tables mark it; empty for a single strategy."""
        columns = [column for column in get_args(Column) if column != "planning"]
        best = {column: self.best(column) for column in columns if len(self.compiled) > 1}
        return {column: name for column, name in best.items() if name is not None}

    def judged(
        self, *, memory_limit: int | str | None = None, device: Device | str | None = None
    ) -> Comparison:
        """The same programs for another device, without compiling them again.

        Args:
          memory_limit: the bytes that a device has, or a text such as ``"16 GiB"``. None takes
            that of ``device``, else the old one.
          device: for the roofline; None leaves it as it is.

        Raises:
          ValueError: the limit cannot be read, or there is no such device in the table.
          TypeError: they are something else.
        """
        limit = self.memory_limit if memory_limit is None else read_bytes(memory_limit)
        if device is None:
            return dataclasses.replace(self, memory_limit=limit)
        device = device_named(device) if isinstance(device, str) else device
        limit = device.memory_bytes if memory_limit is None else limit
        compiled = {name: r.with_roofline(device) for name, r in self.compiled.items()}
        return Comparison({**self.reports, **compiled}, limit, self.seconds)

    _FORMAT = FORMAT
    _VERSION = VERSION
    _NOUN = "comparison"

    def _parts(self) -> dict[str, Any]:
        reports = {
            name: as_data(report) if isinstance(report, Failure) else report.as_dict()
            for name, report in self.reports.items()
        }
        return {
            "memory_limit": self.memory_limit,
            "seconds": dict(self.seconds),
            "best": self.marked,
            "reports": reports,
        }

    @classmethod
    def _of_parts(cls, parts: dict[str, Any]) -> Comparison:
        data = read(_Parts, parts, cls._NOUN)
        reports = {name: _report(name, report) for name, report in data.reports.items()}
        return cls(reports, data.memory_limit, data.seconds)

    def _pictures(self, width: int) -> Iterable[Any]:
        if self.compiled:
            yield self._table(width)
            limit, marked = self.memory_limit, self.marked
            fits = "" if limit is None else f"; a device has {bytes_text(limit)}"
            note = "; * is the least of those that fit" if marked else ""
            yield text(f"for one device and one call{fits}{note}")
        rooflines = (report.roofline for report in self.compiled.values())
        devices = {roofline.device for roofline in rooflines if roofline is not None}
        if devices:
            yield text(f"roofline: the least time on {', '.join(sorted(devices))}")
        for name, report in self.reports.items():
            if isinstance(report, Failure):
                first, *rest = report.error.splitlines() or [""]
                yield text(f"{name} failed: {first}", "red")
                yield from (text(f"  {line}") for line in rest[:12])

    def _table(self, width: int) -> Any:
        """One row for each strategy; on narrow consoles only the most important columns."""
        compiled, figures, marked = self.compiled, self.figures, self.marked
        sent = self.bytes_sent_by_axes
        all_axes = {axes for by_axes in sent.values() for axes in by_axes}
        by_size = sorted(all_axes, key=lambda axes: (axes is None, len(axes or ()), axes or ()))

        unit = {"flops": count_text, "roofline": time_text, "planning": time_text}

        def figure(column: Column) -> Callable[[str], Any]:
            def cell(name: str) -> Any:
                is_best = marked.get(column) == name
                shown = unit.get(column, bytes_text)(figures[name][column])
                return text(f"{shown} {'*' if is_best else ' '}", "green" if is_best else "")

            return cell

        def over(axes: MeshAxes) -> Callable[[str], Any]:
            return lambda name: bytes_text(sent[name].get(axes, 0))

        def mesh(name: str) -> str:
            return str(compiled[name].mesh or f"{compiled[name].num_devices} devices")

        def bound(name: str) -> str:
            roofline = compiled[name].roofline
            return "" if roofline is None else roofline.bound_by

        def fits(name: str) -> Any:
            return {True: "yes", False: text("no", "red"), None: "?"}[self.fits(name)]

        columns: dict[str, Callable[[str], Any]] = {
            "strategy": str,
            "mesh": mesh,
            "peak  ": figure("peak"),
            "arguments  ": figure("arguments"),
            "sent  ": figure("bytes_sent"),
            **{f"over {axes_text(axes)}": over(axes) for axes in by_size},
            "flops  ": figure("flops"),
            "roofline  ": figure("roofline"),
            "bound by": bound,
            "planned  ": figure("planning"),
            "fits": fits,
        }
        hidden = {"fits"} if self.memory_limit is None else set()
        hidden |= set() if any(map(bound, compiled)) else {"bound by"}
        if width < 140:
            hidden |= {"arguments  ", "bound by", "planned  "}
            hidden |= {name for name in columns if name.startswith("over ")}
        shown = {title: cell for title, cell in columns.items() if title not in hidden}
        rows = [[cell(name) for cell in shown.values()] for name in compiled]
        return table([*shown], rows, numbers=len(shown) - 2)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """A comparison as data; ``best`` is for readers and is computed again."""

    memory_limit: int | None
    seconds: dict[str, float]
    best: dict[str, str]
    reports: dict[str, Any]


def _report(name: str, data: Any) -> ProgramReport | Failure:
    if isinstance(data, dict) and set(data) == {"error"}:
        return Failure(str(data["error"]))
    try:
        return ProgramReport.from_dict(data)
    except ValueError as error:
        raise ValueError(f"reports.{name}: {error}") from None
