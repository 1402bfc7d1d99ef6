"""What changed between two reports or comparisons, such as of two commits or releases of JAX.

A *figure* is a number, or a text, in a report, such as the bytes at the peak. Each report becomes a
flat table of figures by kind and name (`_figures`), and two tables are compared name by name. So a
collective that is gone, a figure that is not known any more and a parameter with another spec are
changes of one form: a `Change` from one value to another, whose ``relative`` growth is None unless
both are numbers. A *comparison* has a report for each of several *strategies*, by name; a `Failure`
where one does not compile.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias

from jax.sharding import PartitionSpec

from ..analysis.by_module import path_text
from ..analysis.collectives import Collectives, axes_text
from ..analysis.json_codec import as_data, json_text
from ..analysis.parameters import ParameterRow, spec_text
from ..analysis.program import ProgramReport
from ..analysis.tables import Pictured, text
from ..analysis.units import UNKNOWN, bytes_text, count_text, printable, time_text
from .comparison import Comparison, Failure, Source, load, shortened

Part: TypeAlias = Literal[
    "program", "memory", "cost", "roofline", "collective", "module", "line", "parameter"
]  # fmt: skip
Value: TypeAlias = float | str | None
_OUTCOME = "outcome"  # the name of the change of a strategy that one side has not compiled


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One difference between two reports.

    Attributes:
      kind: what it is about.
      name: such as ``peak``, ``all-gather over data: bytes`` or the path of a parameter.
      before: the figure or text before; None if there was none.
      after: the figure or text after; None if it has disappeared.
      strategy: the strategy in two comparisons; empty for two reports.
    """

    kind: Part
    name: str
    before: Value
    after: Value
    strategy: str = ""

    @property
    def relative(self) -> float | None:
        """The growth of a figure, as a fraction of the one before; None for text."""
        if not isinstance(self.before, int | float) or not isinstance(self.after, int | float):
            return None
        if not self.before:
            return math.inf if self.after else 0.0  # Growth from nothing has no fraction.
        return (self.after - self.before) / self.before

    @property
    def only_on_side(self) -> Literal["before", "after"] | None:
        """The side that alone has the strategy, unless its new outcome is an error; else None."""
        if self.name == _OUTCOME and self.after is None:
            return "before"
        if self.name == _OUTCOME and self.before is None and self.after == "compiled":
            return "after"
        return None

    @property
    def is_lost(self) -> bool:
        """Whether a figure is not known any more, or a strategy does not compile any more."""
        if self.name == _OUTCOME:  # `_of_strategy` gives this name to "compiled" or an error.
            return self.after != "compiled"
        return isinstance(self.before, int | float) and self.after is None

    def __str__(self) -> str:
        growth = ""
        if self.relative is not None:
            is_finite = math.isfinite(self.relative)
            growth = f" ({self.relative:+.1%})" if is_finite else " (from nothing)"
        before, after = self._text_of(self.before), self._text_of(self.after)
        return printable(f"{self.name}: {before} → {after}{growth}")

    def _text_of(self, value: Value) -> str:
        """Writes ``before`` or ``after``: a number with its unit, or a text as it is.

        A missing text is written as ``none``, and a missing number as a dash.
        """
        if isinstance(value, int | float):
            # The ends of the names that `_figures` and lock files give to numbers of bytes.
            names_of_bytes = (
                "bytes_accessed", "bytes accessed", ": bytes", ": bytes sent", "at the peak"
            )  # fmt: skip
            if self.kind == "roofline":
                return time_text(value)
            if self.kind == "memory" or self.name.endswith(names_of_bytes):
                return bytes_text(value)
            return count_text(value)
        if value:  # It is a text.
            return value
        # A value that is None or empty is missing. If the other value is a text, a text is missing:
        # "none → P()".
        is_of_text = isinstance(self.before, str) or isinstance(self.after, str)
        return "none" if is_of_text else UNKNOWN


class Changes(tuple[Change, ...], Pictured):
    """What :func:`diff` returns; empty if nothing changed. ``print`` and notebooks show it.

    Attributes:
      made_with: the versions that differ, before and after, by the name of the package.
    """

    made_with: Mapping[str, tuple[str, str]]

    def __new__(
        cls, changes: Iterable[Change] = (), made_with: Mapping[str, tuple[str, str]] | None = None
    ) -> Self:
        """The changes, and the versions that differ."""
        self = super().__new__(cls, changes)
        self.made_with = made_with or {}
        return self

    def grown(self, threshold: float = 0.0) -> Changes:
        """Selects figures that grew by more than a fraction of the one before, or became unknown.

        Strategies that do not compile any more are selected, too. Changed texts, such as a spec,
        have not grown. Figures of single modules are left out, because they are part of the totals.
        """
        _check_threshold(threshold)
        grown = []
        for change in self:
            has_grown = change.relative is not None and change.relative > threshold
            if change.kind != "module" and (has_grown or change.is_lost):
                grown.append(change)
        return Changes(grown, self.made_with)

    def as_dict(self) -> dict[str, Any]:
        """Returns all of it as data for JSON."""
        made_with, changes = as_data(self.made_with), as_data(tuple(self))
        head = {"format": "nnx_sharding.diff", "version": 1}
        return {**head, "made_with": made_with, "changes": changes}

    def to_json(self) -> str:
        """:meth:`as_dict` as text."""
        return json_text(self.as_dict())

    def _pictures(self, width: int) -> Iterable[Any]:
        """Yields a line for each change, with a title above those of each kind.

        Strategies that only one side has share one line for each side at the beginning, and changes
        whose two figures read the same share one line at the end.
        """
        versions = [f"{name} {old} → {new}" for name, (old, new) in self.made_with.items()]
        if versions:
            yield text(f"made with {', '.join(versions)}")
        yield from map(text, only_on_one_side(self))
        last_title = None
        unseen: list[str] = []  # the names of figures that read the same before and after
        for change in self:
            if change.only_on_side:
                continue
            # The figures may read the same, such as 30.8 T and 30.8 T.
            if change._text_of(change.before) == change._text_of(change.after):
                unseen.append(change.name)
                continue
            title = TITLES[change.kind]
            title = f"{change.strategy}: {title}" if change.strategy else title
            if title != last_title:
                yield text(title)
            yield text(f"  {change}")
            last_title = title
        if unseen:
            names = [*dict.fromkeys(unseen)]  # Several strategies may have one of these figures.
            listed = ", ".join(names)
            if len(names) > 4:
                listed = f"{', '.join(names[:3])} and {len(names) - 3} more"
            yield text(f"changed by less than the digits shown: {listed}", "dim")
        if not self:
            yield text("no changes")


def only_on_one_side(changes: Iterable[Change]) -> Iterator[str]:
    """Writes the strategies that only one side has: ``only before (12): dp, data 4; … and 9 more``.

    Plans for other meshes have hundreds of them, because the names of candidates have the mesh.
    """
    names: dict[str, list[str]] = {"before": [], "after": []}
    for change in changes:
        if change.only_on_side:
            names[change.only_on_side].append(change.strategy)
    for side, strategies in names.items():
        if strategies:
            yield printable(f"only {side} ({len(strategies)}): {shortened(strategies)}")


TITLES: dict[Part, str] = {
    "program": "program",
    "memory": "memory of one device",
    "cost": "cost of one device",
    "roofline": "roofline",
    "collective": "collectives",
    "module": "modules",
    "line": "lines",
    "parameter": "arguments",
}


def diff(before: Source, after: Source, *, threshold: float = 0.0) -> Changes:
    """Compares two reports or two comparisons.

    Args:
      before: a report or a comparison, its JSON form as a dictionary, or the path of a JSON file.
      after: likewise, of the same kind. Strategies are matched by name.
      threshold: figures that changed by no more than this fraction of the one before, up or down,
        are left out.

    Returns:
      The changes of memory, cost, roofline, collectives, modules (if both have them) and arguments.
      Different versions of JAX, Flax and Python are reported with them, but are not changes
      themselves.

    Raises:
      ValueError: one is a report and the other a comparison, or a file has none of this release.

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
      >>> [change.name for change in changes if change.kind == "collective"]
      ['all-reduce over data: number', 'all-reduce over data: bytes']
    """
    _check_threshold(threshold)
    old, new = load(before), load(after)
    if type(old) is not type(new):
        raise ValueError(
            f"diff needs two reports or two comparisons; before is a {type(old).__name__}, after "
            f"a {type(new).__name__}."
        )
    olds, news = by_strategy(old), by_strategy(new)
    changes = []
    for name in dict.fromkeys([*olds, *news]):  # unique names
        for change in _of_strategy(name, olds.get(name), news.get(name)):
            # A change without a relative size, such as that of a text, is never left out.
            if change.relative is None or abs(change.relative) > threshold:
                changes.append(change)
    old_versions, new_versions = _made_with(olds), _made_with(news)
    # A side without a compiled strategy has no versions, so only versions of both are compared.
    made_with = {
        name: (version, new_versions[name])
        for name, version in old_versions.items()
        if new_versions.get(name, version) != version
    }
    return Changes(changes, made_with)


def _check_threshold(threshold: float) -> None:
    """Raises a ValueError for a threshold that is no number, or negative, or NaN."""
    if not isinstance(threshold, int | float) or not threshold >= 0:  # NaN >= 0 is False.
        raise ValueError(f"threshold must be a fraction such as 0.05, got {threshold!r}.")


def by_strategy(source: ProgramReport | Comparison) -> Mapping[str, ProgramReport | Failure]:
    """Returns the reports by strategy; a single report under the empty name."""
    return {"": source} if isinstance(source, ProgramReport) else source.reports


def _made_with(reports: Mapping[str, ProgramReport | Failure]) -> dict[str, str]:
    """Returns the versions that reports were made with; empty if nothing was compiled."""
    # One process has made all reports, so all have the versions of the first one.
    for report in reports.values():
        if isinstance(report, ProgramReport):
            return dict(report.made_with)
    return {}


def _of_strategy(
    strategy: str, before: ProgramReport | Failure | None, after: ProgramReport | Failure | None
) -> Iterator[Change]:
    """Yields what changed for one strategy: its outcome, or all figures that are different.

    Args:
      strategy: its name; empty if two single reports are compared.
      before: the report, or why there is none; None if the strategy was not there.
    """
    if not isinstance(before, ProgramReport) or not isinstance(after, ProgramReport):
        old_outcome, new_outcome = _outcome(before), _outcome(after)
        if old_outcome != new_outcome:
            yield Change("program", _OUTCOME, old_outcome, new_outcome, strategy)
        return
    # Both tables have the same kinds as keys.
    old_figures, new_figures = _figures(before), _figures(after)
    has_modules = before.by_module is not None and after.by_module is not None
    has_collectives = before.collectives is not None and after.collectives is not None
    moved = _moved(old_figures["parameter"], new_figures["parameter"])
    if moved:
        yield Change("parameter", *_as_figure(moved), strategy)
    for kind, old in old_figures.items():
        # Without modules on one side, each module would count as new, or as gone.
        if kind == "module" and not has_modules:
            continue
        # A module or a collective that only one side has is 0 on the other side. Any other missing
        # figure is unknown, and so are all collectives of a program that was not read.
        is_zero = kind == "module" or (kind == "collective" and has_collectives)
        missing = 0 if is_zero else None
        new = new_figures[kind]
        same = {*moved, *moved.values()} if kind == "parameter" else ()
        for name in dict.fromkeys([*old, *new]):  # unique names, in order
            if name in same:
                continue
            old_value, new_value = old.get(name, missing), new.get(name, missing)
            if old_value != new_value:
                yield Change(kind, name, old_value, new_value, strategy)


def _moved(old: Mapping[str, Value], new: Mapping[str, Value]) -> dict[str, str]:
    """Finds arguments of which only the path changed, as of a step that takes a model, no states.

    Two arguments are the same if they have the same text, and the path in one argument of the call
    ends the other path: ``blocks[0].up.kernel`` ends ``state[0]['blocks'][0]['up']['kernel']`` as
    well as ``model.blocks[0].up.kernel``. No other argument may fit either of them.

    Args:
      old: the arguments of the report before: path → what `array_text` writes.
      new: those of the report after.

    Returns:
      The path before → the path after.
    """
    gone = {path: _KEY.findall(path) for path in old if path not in new}
    come = {path: _KEY.findall(path) for path in new if path not in old}
    # The paths of `come` by their text and what they end with; and by the path in their argument.
    by_end: defaultdict[tuple[Value, tuple[str, ...]], set[str]] = defaultdict(set)
    by_inner_path: defaultdict[tuple[Value, tuple[str, ...]], set[str]] = defaultdict(set)
    for path, keys in come.items():
        for end in _ends(keys):
            by_end[new[path], end].add(path)
        by_inner_path[new[path], (*keys[1:],)].add(path)
    found: defaultdict[str, list[str]] = defaultdict(list)  # path of `come` → paths of `gone`
    for path, keys in gone.items():
        fitting = {*by_end.get((old[path], (*keys[1:],)), ())}
        for end in _ends(keys):
            fitting |= by_inner_path.get((old[path], end), set())
        for other in fitting:
            found[other].append(path)
    times = Counter(path for paths in found.values() for path in paths)
    return {
        paths[0]: other
        for other, paths in found.items()
        if len(paths) == 1 and times[paths[0]] == 1
    }


def _ends(keys: Sequence[str]) -> list[tuple[str, ...]]:
    """Lists what a path ends with: of ``("a", "b", "c")`` the last one, two and three keys."""
    return [(*keys[start:],) for start in range(len(keys))]


_KEY = re.compile(r"\w+")  # the attributes, keys and indices of a path


def _as_figure(moved: Mapping[str, str]) -> tuple[str, str, str]:
    """Writes arguments of which only the path changed as name, before and after of one change."""
    before, after = next(iter(moved.items()))
    if len(moved) == 1:
        return "path of an argument", before, after
    return f"paths of {len(moved)} arguments", f"{before}, …", f"{after}, …"


def _outcome(report: ProgramReport | Failure | None) -> str | None:
    """Returns ``compiled``, or the first line of the error; None if the strategy is not there."""
    if isinstance(report, Failure):
        first_line = report.error.partition("\n")[0]
        return f"failed: {first_line}"
    return None if report is None else "compiled"


def _figures(report: ProgramReport) -> dict[Part, dict[str, Value]]:
    """Collects everything that is compared, by kind and name; a figure may be None if unknown.

    Names are, for example, ``peak``, ``flops`` and ``all-gather over data: bytes``. `Change` prints
    them, and chooses the unit of a figure by the end of its name. The names of times have the
    hardware, so times on other hardware are other figures.
    """
    # Both are dicts, field → figure; empty if the report has none.
    memory, cost = as_data(report.memory) or {}, as_data(report.cost) or {}
    memory.pop("by_path", None)  # Arguments are compared one by one instead.
    costs = {name: cost[name] for name in _COSTS if name in cost}
    collectives: dict[str, Value] = {}
    # Unknown collectives have no figures, like a program without collectives. The caller,
    # `_of_strategy`, tells the two apart.
    for (kind, axes), (number, sent) in (report.collectives or Collectives()).totals().items():
        name = f"{kind} over {axes_text(axes, words=True)}"
        collectives[f"{name}: number"] = number
        collectives[f"{name}: bytes"] = sent
    roofline: dict[str, Value] = {}
    if report.roofline is not None:
        roofline[f"time on {report.roofline.hardware}"] = report.roofline.estimate
        roofline["bound by"] = report.roofline.bound_by
    roofline["the compiler's own estimate"] = getattr(report.cost, "optimal_seconds", None)
    return {
        "program": {
            "devices": f"{report.num_devices} × {report.device_kind}",
            "mesh": None if report.mesh is None else str(report.mesh),
        },
        "memory": {name: size for name, size in memory.items() if size is not None},
        "cost": costs,
        "roofline": roofline,
        "collective": collectives,
        "module": _of_modules(report),
        "parameter": {row.path: array_text(row) for row in report.parameters},
    }


_COSTS = ("flops", "bytes_accessed", "transcendentals")


def _of_modules(report: ProgramReport) -> dict[str, Value]:
    """Collects what each module holds at the peak, and its flops, if the report has that."""
    rows = () if report.by_module is None else report.by_module.rows
    figures: dict[str, Value] = {}
    for row in rows:
        name = path_text(row.path)
        name = f"{name}, backward" if row.backward else name
        figures[f"{name}: at the peak"] = None if row.at_peak is None else sum(row.at_peak.values())
        figures[f"{name}: flops"] = row.flops
    return figures


def array_text(row: ParameterRow) -> str:
    """Writes what is compared of an argument: ``float32[8,16] P('data') pinned_host donated``."""
    spec = "no spec" if row.spec is None else spec_text(_without_empty_entries(row.spec))
    memory = "" if row.memory_kind in (None, "device") else row.memory_kind
    parts = f"{row.dtype}[{','.join(map(str, row.shape))}]", spec, memory, *row.marks
    return " ".join(filter(None, parts))


def _without_empty_entries(spec: PartitionSpec | str) -> PartitionSpec | str:
    """Returns ``P()`` for a spec that shards no dimension, which has an entry for each of them."""
    if not isinstance(spec, PartitionSpec) or any(spec.partitions):
        return spec
    return PartitionSpec(unreduced=spec.unreduced, reduced=spec.reduced)
