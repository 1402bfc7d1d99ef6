"""Tables of memory and cost by module of the user's model; attribution.py fills them.

A row is a module and a pass, forward or backward: what one device computes, sends and holds for the
module itself, without the modules in it. The *peak* is the step of the schedule with the most bytes
in use. Its bytes have *kinds*, such as parameters and activations (`MemoryUse`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from ..specs.paths import enclosing_paths
from .json_codec import AsData
from .names import is_within
from .tables import Pictured, Table, legend, text
from .units import all_known, bytes_text, count_text, time_text

MemoryUse: TypeAlias = Literal[
    "parameters", "optimizer state", "other state", "inputs", "outputs", "gradients", "activations",
    "intermediates",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleRow:
    """What one device does and holds for a module itself, without the modules in it.

    A figure that is not known is None.

    Attributes:
      path: the module, such as ``model.blocks[0].up``, or an optimizer, for its update; for
        arguments that are not in modules, that of the array; empty for what is outside of modules,
        such as a loss. None if it is unknown, as of what the compiler made and did not name.
      backward: whether it is for the backward pass, with what that computes again; None for a sum
        of both passes.
      flops: additions and multiplications in one call.
      bytes_accessed: the bytes that operations read and write in one call.
      bytes_sent: what collectives send in one call.
      seconds: the roofline of these figures; sums are of parts that run one after another.
      at_peak: the bytes that it holds at the peak, by kind.
      measured: the seconds that a profile has measured in one call on one device, next to the
        estimate in ``seconds``; None without a profile.
    """

    path: str | None
    backward: bool | None
    flops: float | None = None
    bytes_accessed: float | None = None
    bytes_sent: float | None = None
    seconds: float | None = None
    at_peak: Mapping[str, int] | None = None
    measured: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """A part of the schedule in which one module runs.

    Attributes:
      start: the position of its first instruction in the schedule.
      path: the module; empty outside of modules, None if it is unknown.
      backward: whether it is for the backward pass.
      bytes: the most bytes in use.
    """

    start: int
    path: str | None
    backward: bool
    bytes: int


_MOST_BARS = 40
_BAR_WIDTH = 24  # the width of a full bar in characters


class MemoryOverTime(tuple[Phase, ...], Pictured):
    """The memory in use over one call, which ``print`` and notebooks show as bars.

    The order is that of the schedule; the instructions of a loop count once.
    """

    __slots__ = ()

    def _pictures(self, width: int) -> Iterable[Any]:
        """Yields what ``print`` shows: a bar for each of at most 40 phases."""
        largest = max((phase.bytes for phase in self), default=0) or 1
        # If there are more than 40 phases, a bar stands for a few neighbours, and shows the phase
        # with the most bytes.
        step = max(1, math.ceil(len(self) / _MOST_BARS))
        rows = []
        for start in range(0, len(self), step):
            phase = max(self[start : start + step], key=lambda phase: phase.bytes)
            bar = text("█" * round(_BAR_WIDTH * phase.bytes / largest))
            rows.append((_pass(phase.path, phase.backward), bar, bytes_text(phase.bytes)))
        yield Table(("memory over time", "", "in use"), rows, numbers=1)


@dataclasses.dataclass(frozen=True)
class ModuleTable(AsData):
    """Memory and cost by module: what ``Compiled.by_module`` returns. ``print`` shows a table.

    Rows are exclusive: each flop and each byte is in one of them.

    Attributes:
      rows: one for each module and pass, those with the most bytes at the peak first.
      peak: what has to be free for a call, as ``Memory.peak``: the next two together.
      in_use: the bytes of arrays at the step with the most: live, or held for the whole call.
      reserved: the rest: the program's code, and gaps between arrays.
      unattributed: the bytes of ``in_use`` that are in no row, because the compiler does not say
        what they are for.
      over_time: the memory in use over the schedule.
      why: why figures are None, if some are.
    """

    rows: tuple[ModuleRow, ...] = ()
    peak: int | None = None
    in_use: int | None = None
    reserved: int | None = None
    unattributed: int | None = None
    over_time: MemoryOverTime = dataclasses.field(default_factory=MemoryOverTime)
    why: str | None = None

    def total(self, path: str = "", backward: bool | None = None) -> ModuleRow:
        """Sums the rows of a module and of all in it; all rows for an empty path.

        Args:
          path: the module, such as ``model.blocks``.
          backward: the pass; None for both.
        """
        rows = [row for row in self.rows if backward in (None, row.backward)]
        if path:
            rows = [row for row in rows if row.path and is_within(row.path, path)]
        total = _sum(rows, path=path, backward=backward)
        if rows or not self.rows:
            return total
        # A module without rows does nothing, so its sums are 0. But a figure that is unknown for
        # all other modules is unknown for this one as well.
        figures = (*_SUMMED, "at_peak")
        unknown = [x for x in figures if all(getattr(row, x) is None for row in self.rows)]
        return dataclasses.replace(total, **dict.fromkeys(unknown))

    def at_depth(self, depth: int) -> ModuleTable:
        """Sums modules that are more than ``depth`` attributes or keys below an argument.

        With a depth of 0 there is a row for ``model``, with 2 for ``model.blocks[0]``. Modules
        further down are part of these.
        """
        if depth < 0:
            raise ValueError(f"depth must be 0 or more, got {depth}.")
        groups: defaultdict[tuple[str | None, bool | None], list[ModuleRow]] = defaultdict(list)
        for row in self.rows:
            path = row.path
            if path:  # The module around it at this depth, or the row's own if that is further out.
                outermost_first = [*enclosing_paths(path), path]
                path = outermost_first[min(depth, len(outermost_first) - 1)]
            groups[path, row.backward].append(row)
        rows = [
            _sum(group, path=path, backward=backward) for (path, backward), group in groups.items()
        ]
        return dataclasses.replace(self, rows=ordered(rows))

    def by_kind(self) -> dict[str, int]:
        """Sums the bytes at the peak by kind, the largest first."""
        return dict(Counter(self.total().at_peak or {}).most_common())

    def held_by_path(self) -> dict[str | None, int | None]:
        """Sums the bytes at the peak by path, for both passes; None if unknown."""
        held: dict[str | None, int | None] = {}
        for row in self.rows:
            size = None if row.at_peak is None else sum(row.at_peak.values())
            other = held.get(row.path, 0)
            held[row.path] = None if size is None or other is None else size + other
        return held

    def holders(self, most: int = 5) -> list[str]:
        """Lists what holds the most bytes at the peak, as texts, the ``most`` largest ones.

        Modules in one list are alike, so what they make is one text: ``2 GiB activations of
        model.blocks (256 MiB each, 8 ×)``. Each kind of argument is one text: ``2 GiB inputs``. If
        there are more, the last text sums the others, so that the texts add up to all that is
        attributed: ``3 others (22 KiB)``.
        """
        # The key of a text is a kind, and the path of a module, or of a list of modules such as
        # ``model.blocks``. The path is empty for arguments.
        sizes: Counter[tuple[str, str]] = Counter()  # key → bytes
        # Key → the paths of the modules of the list.
        items: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        for row in self.rows:
            # The path ``model.blocks[0].up`` has the item ``model.blocks[0]`` of a list.
            item = _ITEM.match(row.path or "")
            for kind, size in (row.at_peak or {}).items():
                if kind not in ("activations", "gradients", "intermediates"):
                    sizes[kind, ""] += size
                elif item is None:
                    sizes[kind, row.path or ""] += size
                else:
                    sizes[kind, item[1]] += size
                    items[kind, item[1]].add(item[0])
        texts = []
        for (kind, path), size in sizes.most_common(most):
            count = len(items[kind, path])
            where = f" of {path}" if path else ""
            # Modules of one list are alike, so the mean says what each of them holds.
            each = f" ({bytes_text(size / count)} each, {count} ×)" if count > 1 else ""
            texts.append(f"{bytes_text(size)} {kind}{where}{each}")
        others = [size for _, size in sizes.most_common()[most:] if size]
        if others:
            noun = "other" if len(others) == 1 else "others"
            texts.append(f"{len(others)} {noun} ({bytes_text(sum(others))})")
        return texts

    def top(self, most: int = 8) -> ModuleTable:
        """Returns the same with the first rows only."""
        return dataclasses.replace(self, rows=self.rows[:most])

    def summary(self) -> str:
        """Says what holds the peak, in a sentence."""
        if self.in_use is None:
            return f"what holds the peak is unknown: {self.why}"
        highest = max(self.over_time, key=lambda phase: phase.bytes, default=None)
        where = f", in {_pass(highest.path, highest.backward)}" if highest else ""
        parts = self.holders()
        if self.unattributed:
            parts.append(f"{bytes_text(self.unattributed)} not attributed")
        words = f"{bytes_text(self.in_use)} at the peak{where}: {', '.join(parts)}"
        if self.reserved:
            words += f"; with {bytes_text(self.reserved)} for code and gaps between arrays, "
            words += f"{bytes_text(self.peak)} have to be free"
        return words if self.why is None else f"{words}; unknown: {self.why}"

    def _pictures(self, width: int) -> Iterable[Any]:
        """Yields what ``print`` shows: a sentence on the peak, and a row for each module."""
        yield text(self.summary())
        # "at least" needs the rates of hardware, and "measured" needs a profile. Without them, a
        # column would have no figure, so it is left out.
        has_times = any(row.seconds is not None for row in self.rows)
        is_measured = any(row.measured is not None for row in self.rows)
        names = ["module", "at the peak", "mostly"]  # columns that are aligned to the left
        figures = ["flops", "bytes", "sent"]
        if has_times:
            figures.append("at least")
        if is_measured:
            figures.append("measured")
        # 40 rows are enough for a look; `at_depth` joins modules of larger models. The last line
        # sums up all other rows.
        largest = {*_largest(self.rows, _SHOWN_ROWS)}
        shown = [
            (_pass(row.path, row.backward), row)
            for position, row in enumerate(self.rows)
            if position in largest
        ]
        others = [row for position, row in enumerate(self.rows) if position not in largest]
        if others:
            name = f"… and {len(others)} more (.rows, at_depth)"
            shown.append((name, _sum(others, path="", backward=None)))
        lines = []
        for name, row in shown:
            held = row.at_peak or {}  # the bytes by kind
            size = None if row.at_peak is None else sum(held.values())
            mostly = max(held, key=held.__getitem__, default="")
            line = [name, bytes_text(size), mostly]
            line += [count_text(row.flops), bytes_text(row.bytes_accessed)]
            line.append(bytes_text(row.bytes_sent))
            if has_times:
                line.append(time_text(row.seconds))
            if is_measured:
                line.append(time_text(row.measured))
            lines.append(line)
        yield Table(names + figures, lines, numbers=len(figures))
        yield from legend(names + figures, _PHRASES)


# What the columns are, for `legend`.
_PHRASES = {
    "module": "what one device does and holds for it in one call, without the modules in it",
    "at the peak": "its arrays while the most memory is in use",
    "mostly": "what most of these bytes are for",
    "flops": "additions and multiplications",
    "bytes": "what its operations read and write in memory",
    "sent": "what its collectives send",
    "at least": "the longest of the times for flops, bytes and sent, at the rates of the hardware",
    "measured": "the time in the profile",
}
_SHOWN_ROWS = 40
_ITEM = re.compile(r"(.*?)\[\d+\]")  # a module in a list: the list is the first group


def ordered(rows: Sequence[ModuleRow]) -> tuple[ModuleRow, ...]:
    """Sorts rows by the bytes that they hold at the peak, then by flops, the largest first."""

    def key(row: ModuleRow) -> tuple[float, float, str]:
        """Returns what rows are sorted by; the path makes the order of equal rows the same."""
        return -sum((row.at_peak or {}).values()), -(row.flops or 0), row.path or ""

    return tuple(sorted(rows, key=key))


def _largest(rows: Sequence[ModuleRow], most: int) -> list[int]:
    """Returns the positions of the rows that have the largest share of any one figure.

    Those that hold the most at the peak alone could leave out what computes or sends the most.
    """
    columns = [[sum((row.at_peak or {}).values()) for row in rows]]
    columns += [[getattr(row, figure) or 0 for row in rows] for figure in _SUMMED]
    totals = [sum(column) or 1 for column in columns]
    shares = [
        max(figure / total for figure, total in zip(figures, totals, strict=True))
        for figures in zip(*columns, strict=True)
    ]
    return sorted(range(len(rows)), key=shares.__getitem__, reverse=True)[:most]


def path_text(path: str | None) -> str:
    """Writes the path of a row: ``unknown`` for None, and words for the empty path."""
    return "unknown" if path is None else path or "outside of modules"


def _pass(path: str | None, backward: bool | None) -> str:
    """Writes the module and the pass of a row, such as ``the backward pass of model.up``."""
    name = path or f"what is {path_text(path)}"
    return f"the backward pass of {name}" if backward else name


# The fields of a row that add up. The bytes at the peak add up, too, but by kind.
_SUMMED = ("flops", "bytes_accessed", "bytes_sent", "seconds", "measured")


def _sum(rows: Sequence[ModuleRow], *, path: str | None, backward: bool | None) -> ModuleRow:
    """Adds up rows to one with this path and pass; a sum is None if one of its figures is."""
    sums: dict[str, float | None] = {}
    for name in _SUMMED:
        known = all_known(getattr(row, name) for row in rows)
        sums[name] = None if known is None else sum(known)
    held: Counter[str] = Counter()
    for row in rows:
        held.update(row.at_peak or {})
    is_known = all(row.at_peak is not None for row in rows)
    return ModuleRow(path, backward, **sums, at_peak=dict(held) if is_known else None)
