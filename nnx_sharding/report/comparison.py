"""Reports side by side: which strategies fit, and which is best.

A *strategy* is a way to shard a model, and here the name of a report. A `Comparison` holds reports
and failures by name. Its properties compute everything else from these: *figures* such as the bytes
at the peak, the strategies that fit, the best strategy by each figure, and the table. Its JSON form
has the reports themselves, so a comparison that was read from a file can be judged again with
another limit or other hardware. The method `_pictures` of a class yields the parts of what `print`
and notebooks show: a `text` in a colour, a `Table`, or the `legend` of a table, which says what its
columns are.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

from ..analysis.by_module import path_text
from ..analysis.collectives import MeshAxes, axes_text
from ..analysis.hardware import HARDWARE, Hardware, hardware_of
from ..analysis.hlo import why_unread
from ..analysis.json_codec import UNWRITTEN, JsonForm, as_data, file_path, read
from ..analysis.program import ProgramReport
from ..analysis.roofline import cpu_caveat
from ..analysis.tables import Table, legend, text
from ..analysis.units import UNKNOWN, bound_text, bytes_text, count_text, read_bytes, time_text
from ..errors import raise_if_any

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

Column: TypeAlias = Literal[
    "peak", "arguments", "bytes_sent", "flops", "roofline", "measured", "planning"
]
# The figures that decide between strategies that fit, the most important first. Estimates count if
# nothing was measured. On unknown hardware there are no estimates, so the bytes decide.
DECISIVE: tuple[Column, ...] = ("measured", "roofline", "bytes_sent")
K = TypeVar("K")
Source: TypeAlias = "ProgramReport | Comparison | dict[str, Any] | str | os.PathLike[str]"


@dataclasses.dataclass(frozen=True)
class Failure:
    """A strategy that could not be compiled.

    Attributes:
      error: the type of the error and its text.
      exception: the error itself; None if the failure was read from a file, or if the strategy
        failed while it ran.
    """

    error: str
    exception: Exception | None = dataclasses.field(
        default=None, repr=False, compare=False, metadata=UNWRITTEN
    )

    @property
    def lacks_memory(self) -> bool:
        """Whether the arrays of the program do not fit the memory of a device.

        False for a kernel that does not fit the scratch memory of a core (VMEM), because recomputed
        activations and smaller batches do not change what the kernel needs.
        """
        return "RESOURCE_EXHAUSTED" in self.error and not _OF_A_CORE.search(self.error)


_OF_A_CORE = re.compile(r"CompileTimeScopedVmemOom|memory space [vs]mem\b")


class SearchInterrupted(KeyboardInterrupt):
    """Ctrl-C ended ``plan`` or ``compare``: ``result`` has what was compiled until then.

    The class has no public name, because programs catch it as a ``KeyboardInterrupt``.

    Attributes:
      result: the value that the function would have returned. Its ``ruled_out`` names the programs
        that were not compiled.
    """

    def __init__(self, result: Any):
        super().__init__("interrupted")
        self.result = result
        # Python prints notes below the traceback of an error that nothing catches.
        self.add_note(f"`except KeyboardInterrupt as error` has this as error.result:\n{result}")


@dataclasses.dataclass(frozen=True)
class Comparison(JsonForm):
    """Reports side by side: what :func:`compare` returns. ``print`` shows a table.

    Attributes:
      reports: the report of each strategy, or why there is none.
      memory_limit: the bytes that a device has; None if that is not known.
      seconds: how long it took to trace, lower and compile each strategy, if known.
      ruled_out: why others were not compiled, by name.
      measured: the median seconds of a call of each strategy that ``plan(..., measure=...)`` ran.
    """

    reports: Mapping[str, ProgramReport | Failure]
    memory_limit: int | None = None
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    ruled_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    measured: Mapping[str, float] = dataclasses.field(default_factory=dict)

    _VERSION = 3
    _FORMAT = "nnx_sharding.comparison"
    _NOUN = "comparison"

    def __post_init__(self) -> None:
        """Raises an error if there is nothing to compare, or if a report is none."""
        # A comparison without reports has to say in ``ruled_out`` why there are none: no time was
        # left to compile, for example.
        if not self.reports and not self.ruled_out:
            raise ValueError("there is nothing to compare: give at least one report.")
        wrong = [
            f"  {name!r}: {report!r}"
            for name, report in self.reports.items()
            if not isinstance(report, ProgramReport | Failure)
        ]
        raise_if_any(TypeError, "these are not reports of programs:", wrong)

    @property
    def compiled(self) -> dict[str, ProgramReport]:
        """The reports of the strategies that were compiled."""
        return {name: r for name, r in self.reports.items() if isinstance(r, ProgramReport)}

    @property
    def figures(self) -> dict[str, dict[Column, float | None]]:
        """The figures of one device for each compiled strategy; None if not known.

        ``peak``, ``arguments`` and ``bytes_sent`` (by collectives in one call, None if one is in a
        loop of unknown length) are in bytes, ``roofline`` (``Roofline.estimate`` for the given
        hardware), ``measured`` and ``planning`` in seconds.
        """
        return {
            name: {
                "peak": getattr(report.memory, "peak", None),
                "arguments": getattr(report.memory, "arguments", None),
                "bytes_sent": getattr(report.collectives, "bytes_sent", None),
                "flops": getattr(report.cost, "flops", None),
                "roofline": getattr(report.roofline, "estimate", None),
                "measured": self.measured.get(name),
                "planning": self.seconds.get(name),
            }
            for name, report in self.compiled.items()
        }

    @property
    def at_least(self) -> dict[str, dict[Column, float | None]]:
        """Lower bounds of ``figures`` that loops of unknown length, or custom calls, add to.

        They are the figures without these. None for figures that are known, or have no bound.
        """
        bounds: dict[str, dict[Column, float | None]] = {}
        all_figures = self.figures
        for name, report in self.compiled.items():
            known: dict[Column, float | None] = {
                "bytes_sent": getattr(report.collectives, "bytes_sent_at_least", None),
                "flops": getattr(getattr(report.cost, "at_least", None), "flops", None),
                "roofline": getattr(report.roofline, "at_least", None),
            }
            bounds[name] = {
                column: known.get(column) if figure is None else None
                for column, figure in all_figures[name].items()
            }
        return bounds

    @property
    def bytes_sent_by_axes(self) -> dict[str, dict[MeshAxes, int | None] | None]:
        """The bytes that one device sends in each strategy, by mesh axes; None if unknown."""
        sent = {name: report.collectives for name, report in self.compiled.items()}
        return {name: None if x is None else x.by_axes() for name, x in sent.items()}

    @property
    def fitting(self) -> tuple[str, ...]:
        """The strategies with a known peak within ``memory_limit``.

        Without a limit, these are all strategies that were compiled.
        """
        return tuple(name for name in self.compiled if self.fits(name) is True)

    def fits(self, name: str) -> bool | None:
        """Tells whether a strategy fits the memory; None if its peak is not known.

        A strategy that failed does not fit. Without a limit, every compiled strategy fits.
        """
        report = self.reports[name]
        if isinstance(report, Failure):
            return False
        if self.memory_limit is None:
            return True
        peak = None if report.memory is None else report.memory.peak
        return None if peak is None else peak <= self.memory_limit

    def best(self, column: Column) -> str | None:
        """Returns the strategy that fits with the lowest of one of the ``figures``, if any fits.

        Raises:
          ValueError: there is no such figure.
        """
        if column not in get_args(Column):
            raise ValueError(f"the column must be one of {get_args(Column)}, got {column!r}.")
        figures = self.figures
        values = {name: figures[name][column] for name in self.fitting}
        known = {name: value for name, value in values.items() if value is not None}
        return min(known, key=known.__getitem__, default=None)

    @property
    def marked(self) -> dict[Column, str]:
        """The :meth:`best` of each figure, which tables mark; empty for a single strategy."""
        # "planning", the time to compile, is left out because it is no merit of a strategy.
        columns = [column for column in get_args(Column) if column != "planning"]
        best = {column: self.best(column) for column in columns if len(self.compiled) > 1}
        return {column: name for column, name in best.items() if name is not None}

    def judged(
        self, *, memory_limit: int | str | None = None, hardware: Hardware | str | None = None
    ) -> Comparison:
        """Returns a comparison of the same programs on other hardware, without compiling again.

        Args:
          memory_limit: the bytes that a device has, or a text such as ``"16 GiB"``. None uses the
            memory of ``hardware``; without ``hardware`` the old limit, else the memory of the
            devices that the programs were compiled for, if it is known.
          hardware: the hardware that rooflines are for; None leaves the rooflines unchanged.
        """
        limit, reports, measured = self.memory_limit, self.reports, self.measured
        if hardware is not None:
            new_hardware = hardware_of(hardware)
            # The old limit and the measured times are dropped, because they are of other hardware.
            limit, measured = new_hardware.memory_bytes, {}
            compiled = {name: r.with_roofline(new_hardware) for name, r in self.compiled.items()}
            reports = {**reports, **compiled}
        elif limit is None:
            # The memory is known if the programs were compiled for devices of one known kind.
            kinds = {report.device_kind for report in self.compiled.values()}
            known_hardware = HARDWARE.get(kinds.pop()) if len(kinds) == 1 else None
            limit = None if known_hardware is None else known_hardware.memory_bytes
        if memory_limit is not None:
            limit = read_bytes(memory_limit)
        return dataclasses.replace(self, reports=reports, memory_limit=limit, measured=measured)

    def _parts(self) -> dict[str, Any]:
        """Returns the data for JSON; `as_dict` adds the format and the version."""
        reports = {
            name: as_data(report) if isinstance(report, Failure) else report.as_dict()
            for name, report in self.reports.items()
        }
        others = {name: as_data(getattr(self, name)) for name in _OTHERS}
        return {**others, "best": self.marked, "reports": reports}

    @classmethod
    def _of_parts(cls, parts: dict[str, Any]) -> Comparison:
        """Makes a comparison from what `_parts` returned.

        Raises:
          ValueError: the parts are no comparison.
        """
        # Reports are read here; `read` makes the comparison from them and from the other fields,
        # which are left in ``parts``, and raises a ValueError for wrong ones. "best" is only for
        # readers of the file, and is computed again, so it is removed.
        entries = parts.pop("reports", None)
        parts.pop("best", None)
        if not isinstance(entries, dict):  # `read` raises because there is nothing to compare.
            entries = {}
        reports: dict[str, ProgramReport | Failure] = {}
        for name, data in entries.items():
            if isinstance(data, dict) and set(data) == {"error"}:
                reports[name] = Failure(str(data["error"]))
                continue
            try:
                reports[name] = ProgramReport.from_dict(data)
            except ValueError as error:
                raise ValueError(f"reports.{name}: {error}") from None
        return read(cls, parts, cls._NOUN, reports=reports)

    def _pictures(self, width: int) -> Iterable[RenderableType]:
        """Yields the table of strategies, and lines about unknown figures, failures and the rest.

        The lines about failures are short, because an error of XLA has hundreds of lines, and a
        plan may have hundreds of strategies that fail alike. ``reports`` has the whole errors.
        """
        if self.compiled:
            yield from self._table(width)
            limit = self.memory_limit
            fits = "" if limit is None else f"; a device has {bytes_text(limit)}"
            note = "; * is the best among those that fit" if self.marked else ""
            yield text(f"for one device and one call{fits}{note}")
            kinds = sorted({f"{r.num_devices} × {r.device_kind}" for r in self.compiled.values()})
            yield text(f"compiled for {', '.join(kinds)}")
        for caveat in self._caveats():
            yield text(caveat, "yellow")
        # Most strategies of a step lack the same figures, for the same reason.
        reasons = {
            (name, figure): f"{figure} unknown, and ranked after known ones: {why}"
            for name, report in self.compiled.items()
            for figure, why in why_unknown(report).items()
        }
        for reason, keys in names_by_value(reasons).items():
            yield text(f"{shortened([name for name, _ in keys])}: {reason}", "yellow")
        yield from self._held_by_module()
        yield from self._failures()
        if self.ruled_out:
            yield text(f"{len(self.ruled_out)} not compiled (ruled_out has their names):")
            yield from map(text, _counts(self.ruled_out.values()))

    def _failures(self) -> Iterable[RenderableType]:
        """Yields the first lines of each error, behind the strategies that failed with it."""
        errors = {n: r.error for n, r in self.reports.items() if isinstance(r, Failure)}
        for error, names in names_by_value(errors).items():
            lines = error.splitlines()
            first = lines[0] if lines else ""
            outcome = "does not fit" if Failure(error).lacks_memory else "failed"
            yield text(f"{shortened(names)} {outcome}: {first}", "red")
            yield from (text(f"  {line}") for line in lines[1:13])

    def _held_by_module(self) -> Iterable[RenderableType]:
        """Yields the modules that hold the memory at the peak, by strategy.

        Reports without figures by module are left out. Two reports or more have a table.
        """
        tables = {
            name: report.by_module
            for name, report in self.compiled.items()
            if report.by_module is not None
        }
        for name, modules in tables.items():
            yield text(f"{name}: {modules.summary()}")
        if len(tables) < 2:
            return
        # Strategy → path of an outermost module → the bytes that the module holds.
        held = {name: modules.at_depth(1).held_by_path() for name, modules in tables.items()}
        paths = dict.fromkeys(path for sizes in held.values() for path in sizes)  # unique paths
        rows = []
        for path in paths:
            sizes_of_path = [sizes.get(path, 0) for sizes in held.values()]
            rows.append((path_text(path), *map(bytes_text, sizes_of_path)))
        yield Table(("held at the peak", *held), rows, numbers=len(held))

    def _caveats(self) -> list[str]:
        """Lists what is wrong with rooflines of programs that were compiled for CPUs."""
        caveats = {
            cpu_caveat(report.roofline, report.platform) for report in self.compiled.values()
        }
        return sorted(filter(None, caveats))

    def _table(self, width: int) -> Iterator[RenderableType]:
        """Draws a row for each strategy, and below it what the columns are.

        Narrow consoles get the main columns only.
        """
        columns = self._columns()
        if width < _WIDE:
            columns = {title: cells for title, cells in columns.items() if title in _MAIN_COLUMNS}
        # The table has these two columns in any case, so the filter below is not for them.
        names = {title: columns.pop(title) for title in ("strategy", "mesh")}
        # A column without any figure but zeros is left out, because it does not distinguish
        # strategies.
        distinctive = {
            title: cells
            for title, cells in columns.items()
            if not _NOTHING.issuperset(str(cell).strip(" *") for cell in cells)
        }
        rows = zip(*names.values(), *distinctive.values(), strict=True)  # columns → rows
        yield Table([*names, *distinctive], rows, numbers=len(distinctive))
        # One phrase is for all columns of bytes by mesh axes.
        shown = dict.fromkeys(
            "over …" if title.startswith("over ") else title for title in distinctive
        )
        rooflines = (report.roofline for report in self.compiled.values())
        # A basis says which figures a roofline was estimated from: peak figures, or measured ones.
        bases = {roofline.basis for roofline in rooflines if roofline is not None}
        roofline_phrase = f"{_PHRASES['roofline']}, {'; '.join(sorted(bases))}"
        yield from legend(shown, {**_PHRASES, "roofline": roofline_phrase})

    def _columns(self) -> dict[str, Sequence[Text | str]]:
        """Returns the columns of the table by title: the cells, one for each compiled strategy."""
        compiled = list(self.compiled.values())
        # Columns of figures are aligned to the right. Two spaces behind a title keep it above the
        # figures, and not above the mark of the best one: "12 GiB *".
        columns: dict[str, Sequence[Text | str]] = {
            "strategy": list(self.compiled),
            "mesh": [str(report.mesh or f"{report.num_devices} devices") for report in compiled],
            "peak  ": self._cells("peak"),
            "arguments  ": self._cells("arguments"),
            "sent  ": self._cells("bytes_sent"),
            **self._sent_by_axes(),
            "flops  ": self._cells("flops"),
            "roofline  ": self._cells("roofline"),
            "measured  ": self._cells("measured"),
            "bound by": [getattr(report.roofline, "bound_by", None) or "" for report in compiled],
            "compiled in  ": self._cells("planning"),  # the time to trace and compile
        }
        if self.memory_limit is not None:
            fits: dict[bool | None, Text | str] = {True: "yes", False: text("no", "red"), None: "?"}
            columns["fits"] = [fits[self.fits(name)] for name in self.compiled]
        return columns

    def _cells(self, column: Column) -> list[Text | str]:
        """Writes a figure of each compiled strategy, and marks the best one."""
        best, bounds = self.marked.get(column), self.at_least
        cells: list[Text | str] = []
        for name, figures in self.figures.items():
            shown = bound_text(figures[column], bounds[name][column], _WRITERS[column])
            # Figures without a mark have spaces instead, so that figures stand below each other.
            cells.append(text(f"{shown} *", "green") if name == best else f"{shown}  ")
        return cells

    def _sent_by_axes(self) -> dict[str, list[str]]:
        """Returns a column of bytes sent for each set of mesh axes, by the title of the column.

        None has two meanings here. As axes, it stands for collectives with unknown axes, which have
        a column of their own. As the bytes of a strategy, it says that the collectives of its
        program are unknown; the cells of this strategy then say so in each column.
        """
        # For each strategy, a dict: mesh axes → bytes.
        sent = self.bytes_sent_by_axes.values()
        all_axes = {axes for by_axes in sent for axes in by_axes or ()}
        # Sets of few axes come first. Sets with as many axes are in alphabetical order.
        known_axes = [axes for axes in all_axes if axes is not None]
        in_order: list[MeshAxes] = [*sorted(known_axes, key=lambda axes: (len(axes), axes))]
        if None in all_axes:
            in_order.append(None)
        columns = {}
        for axes in in_order:
            sizes = [None if by_axes is None else by_axes.get(axes, 0) for by_axes in sent]
            columns[f"over {axes_text(axes)}"] = [*map(bytes_text, sizes)]
        return columns


def figure_text(column: Column, figure: float | None) -> str:
    """Writes one of ``Comparison.figures`` with its unit; an unknown one, None, as `UNKNOWN`."""
    return _WRITERS[column](figure)


_WRITERS: Mapping[Column, Callable[[Any], str]] = {
    "peak": bytes_text,
    "arguments": bytes_text,
    "bytes_sent": bytes_text,
    "flops": count_text,
    "roofline": time_text,
    "measured": time_text,
    "planning": time_text,
}
_PHRASES = {
    "peak": "the most memory in use at any time",
    "arguments": "the memory of what a call is given: parameters, optimizer state, inputs",
    "sent": "the bytes that collectives send",
    "over …": "the part of it that is sent over these mesh axes",
    "flops": "additions and multiplications",
    "roofline": "the estimated time",
    "measured": "the median time of the calls that plan ran",
    "bound by": "what takes longest in the roofline: compute, memory or interconnect",
    "compiled in": "the time to trace it and to compile it, or to read it from a cache",
    "fits": "whether the peak is within the memory of a device",
}
_NOTHING = frozenset({"", "0", "0 B", "0 s", UNKNOWN})
_WIDE = 140  # characters of a console that has room for all columns
_MAIN_COLUMNS = (
    "strategy",
    "mesh",
    "peak  ",
    "sent  ",
    "flops  ",
    "roofline  ",
    "measured  ",
    "fits",
)


def why_unknown(report: ProgramReport) -> dict[str, str]:
    """Returns the reason why each unknown figure of a program is unknown, by its name."""
    reasons: dict[str, str] = {}
    if report.memory is None or report.memory.peak is None:
        reasons["peak"] = "the backend does not report it"
    parts = {"bytes_sent": report.collectives, "flops": report.cost}
    missing = [figure for figure, part in parts.items() if part is None]
    if missing:
        # The missing figures are read from the text of the compiled program. The roofline is
        # computed from them, so it needs no reason of its own.
        reasons |= dict.fromkeys(missing, why_unread(report.hlo))
    elif report.roofline is not None and report.roofline.seconds is None:
        reasons["roofline"] = report.roofline.why or "the report does not say why"
    if report.collectives is not None and report.collectives.bytes_sent is None:
        reasons["bytes_sent"] = "a collective is in a loop of unknown length"
    return reasons


def names_by_value(texts: Mapping[K, str]) -> dict[str, list[K]]:
    """Groups names by their texts, in the order in which texts occur first."""
    names: dict[str, list[K]] = {}
    for name, value in texts.items():
        names.setdefault(value, []).append(name)
    return names


def _counts(reasons: Iterable[str]) -> Iterator[str]:
    """Yields lines that say how often each reason occurs, the most frequent first.

    Reasons that differ only in names and numbers count as one: ``["needs 2 GiB", "needs 3 GiB"]``
    become ``  2  such as: needs 2 GiB``.
    """
    # Reason without names and numbers ("needs #") → how often each of its first lines occurs.
    kinds: dict[str, Counter[str]] = {}
    for reason in reasons:
        without_name = _OTHER.sub(r"\1 another", reason)  # "the program of fsdp" → "… of another"
        kind = _NUMBER.sub("#", without_name)
        first_line = without_name.partition("\n")[0]
        kinds.setdefault(kind, Counter())[first_line] += 1
    for first_lines in sorted(kinds.values(), key=lambda lines: -lines.total()):
        example = next(iter(first_lines))
        such_as = "such as: " if len(first_lines) > 1 else ""
        # `.200` cuts the example to 200 characters.
        yield f"  {first_lines.total():>5}  {such_as}{example:.200}"


# The end of a reason that names another strategy.
_OTHER = re.compile(r"(everything like|the program of) .*")
# A number, with its unit if it has one: "1.5 GiB", "20 ms", "8".
_NUMBER = re.compile(r"[\d.]+( [kKMGTPµmn]?i?[sB]\b)?")


def shortened(names: Sequence[str]) -> str:
    """Joins the first names, and says how many more there are, because a plan has hundreds."""
    more = len(names) - _SHOWN
    return "; ".join(names) if more <= 1 else f"{'; '.join(names[:_SHOWN])}; and {more} more"


_SHOWN = 3
_OTHERS = ("memory_limit", "seconds", "ruled_out", "measured")


def load(source: Source) -> ProgramReport | Comparison:
    """Reads a report or a comparison from what a user may pass for one.

    Args:
      source: a report or a comparison, which is returned unchanged; the JSON form of one as a
        dictionary; or the path of a file with one.

    Raises:
      ValueError: the dictionary or the file has neither a report nor a comparison. For a file, the
        text begins with its path.
      TypeError: ``source`` is nothing of these.
    """
    if isinstance(source, ProgramReport | Comparison):
        return source
    if isinstance(source, dict):
        return _of_json(source)
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            "expected a ProgramReport, a Comparison, the dictionary of one or the path of a file "
            f"with one, got {source!r}."
        )
    try:
        return _of_json(json.loads(file_path(source).read_bytes()))
    except json.JSONDecodeError:
        raise ValueError(f"{os.fspath(source)}: not a report: it is not JSON") from None
    except ValueError as error:
        raise ValueError(f"{os.fspath(source)}: {error}") from None


def _of_json(data: Any) -> ProgramReport | Comparison:
    """Makes a report or a comparison of parsed JSON; raises a ValueError if it is neither."""
    is_comparison = isinstance(data, dict) and data.get("format") == Comparison._FORMAT
    # Data that are no comparison are read as a report. `ProgramReport.from_dict` raises the error
    # if they are none either.
    return Comparison.from_dict(data) if is_comparison else ProgramReport.from_dict(data)
