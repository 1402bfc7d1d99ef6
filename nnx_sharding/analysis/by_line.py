"""Tables of types and cost by line of the user's code; line_attribution.py fills them.

A row is a line: what its values are, and what they cost on one device, forward and backward. Types
are written short, with the spec of the whole array and how many there are:

    line  code              types                       flops
    12    y = self.up(x)    f32[8,64] P('data') (3 ×)   196 k
"""

from __future__ import annotations

import dataclasses
import itertools
import linecache
from collections.abc import Iterable, Iterator
from typing import Any

from jax.sharding import PartitionSpec

from .collectives import MeshAxes, axes_text
from .json_codec import AsData
from .opcodes import CollectiveKind
from .parameters import spec_text
from .tables import Cell, Table, drawn, legend, text
from .units import bytes_text, count_text, time_text

NO_LINE = "no line of yours"
# The name of a dtype without its width → the letters for it in the short form: ``int32`` is i32.
_SHORT = {"float": "f", "bfloat": "bf", "uint": "u", "int": "i", "complex": "c"}


@dataclasses.dataclass(frozen=True, slots=True)
class ValueType:
    """A type of values that a line makes.

    Attributes:
      dtype: such as ``float32``.
      shape: the global shape; under ``shard_map`` that of one device.
      spec: how it is sharded: on Explicit axes by its type, on Auto axes as the compiled program
        has it. None if unknown; ``LineTable.why_types`` says why.
      backward: whether they are made in the backward pass.
      count: how many values of this type one call makes, in all modules and runs of loops; in a
        loop of unknown length, this is the figure of one run.
    """

    dtype: str
    shape: tuple[int, ...]
    spec: PartitionSpec | None
    backward: bool
    count: int

    def __str__(self) -> str:
        name = self.dtype.rstrip("0123456789")
        short = _SHORT.get(name, name) + self.dtype[len(name) :]
        spec = "" if self.spec is None else f" {spec_text(self.spec)}"
        count = f" ({self.count} ×)" if self.count > 1 else ""
        backward = ", backward" if self.backward else ""
        return f"{short}[{','.join(map(str, self.shape))}]{spec}{backward}{count}"


@dataclasses.dataclass(frozen=True, slots=True)
class LineCollectives:
    """The collectives of one kind over the same mesh axes that a line causes.

    Attributes:
      kind: such as ``all-reduce``.
      axes: the mesh axes; None if unknown.
      bytes: what one device sends in one call; None in a loop of unknown length.
      count: how many instructions they are; one in a loop counts once. One that the compiler merged
        from several lines counts in each of them, with the bytes of this line.
    """

    kind: CollectiveKind
    axes: MeshAxes
    bytes: int | None
    count: int

    def __str__(self) -> str:
        count = f"{self.count} × " if self.count > 1 else ""
        return f"{count}{self.kind} over {axes_text(self.axes)}, {bytes_text(self.bytes)}"


@dataclasses.dataclass(frozen=True, slots=True)
class LineRow:
    """What one line of the user's code makes and costs on one device, forward and backward.

    A figure that is not known is None.

    Attributes:
      file, line: where it is. Both are None in the row for everything that no line of the user's
        code causes.
      code: its text; empty if the file cannot be read.
      types: the values that it makes: its result first, those of the backward pass last.
      modules: the modules in whose calls it runs, such as ``model.blocks[0]``.
      collectives: what it sends.
      flops: additions and multiplications in one call.
      bytes: the bytes that its operations read and write in one call.
      seconds: the roofline of these figures.
      at_peak: the bytes of arrays made by it that are live at the peak. The row without a line has
        the bytes of arguments, and of arrays that the compiler does not attribute.
      measured: the seconds that a profile has measured in one call on one device, beside the
        estimate in ``seconds``; None without a profile.
    """

    file: str | None
    line: int | None
    code: str = ""
    types: tuple[ValueType, ...] = ()
    modules: tuple[str, ...] = ()
    collectives: tuple[LineCollectives, ...] | None = None
    flops: float | None = None
    bytes: float | None = None
    seconds: float | None = None
    at_peak: int | None = None
    measured: float | None = None


@dataclasses.dataclass(frozen=True)
class LineTable(AsData):
    """Types and cost by line: what ``by_line`` of stages returns. ``print`` shows a table.

    Terminals with colours and notebooks show in red the code of lines that take a fifth of the time
    or more, and in yellow the code of lines that take a twentieth or more. If the peak rates of the
    device are not known, the flops count instead of the time.

    Rows are exclusive: flops, bytes and what is sent add up to the totals of the program.

    Attributes:
      rows: by file and line; last the row without a line, in a compiled program.
      why: why figures are None, if some are.
      why_types: why specs are None or lack axes, and which are from the compiled program.
    """

    rows: tuple[LineRow, ...] = ()
    why: str | None = None
    why_types: str | None = None

    def full(self) -> str:
        """Writes the table with all types, collectives and modules of each line."""
        return drawn(*self._tables(most=None))

    def _pictures(self, width: int) -> Iterable[Any]:
        yield from self._tables(most=1)

    def _tables(self, most: int | None) -> Iterator[Any]:
        """Yields a table for each file, then what the columns are, and what is unknown.

        ``most`` is the number of types, and of collectives, that a line shows; None shows all.
        """
        # Colours show which lines take most seconds. If no seconds are known, because the peak
        # rates of the devices are not, they show which lines have most flops.
        heated_by = "seconds" if any(row.seconds for row in self.rows) else "flops"
        total = sum(getattr(row, heated_by) or 0 for row in self.rows) or 1
        # Columns that are unknown in all rows are left out.
        figures = [
            title
            for title, field in _FIGURES.items()
            if any(getattr(row, field) is not None for row in self.rows)
        ]
        is_sent_known = any(row.collectives is not None for row in self.rows)
        names = _NAMES if is_sent_known else _NAMES[:-1]
        all_columns, header = (*_NAMES, *_FIGURES), (*names, *figures)
        shown = [all_columns.index(title) for title in header]
        files = dict.fromkeys(row.file for row in self.rows)  # unique, in order
        for file in files:
            yield text(file or NO_LINE)
            lines: list[tuple[Cell, ...]] = []
            for row in self.rows:
                if row.file == file:
                    style = _heat((getattr(row, heated_by) or 0) / total)
                    for line in _lines_of(row, most, style):
                        lines.append(tuple(line[index] for index in shown))
            yield Table(header, lines, numbers=len(figures))
            yield text("")  # an empty line between the tables
        yield from legend(header, _PHRASES)
        if self.why is not None:
            yield text(f"unknown: {self.why}")
        if self.why_types is not None:
            yield text(self.why_types)


# What the columns are, for `legend`: on one device in one call.
_PHRASES = {
    "types": "the values that it makes, as whole arrays with their specs; in shard_map their parts",
    "collectives": "what one device sends for it",
    "flops": "additions and multiplications on one device",
    "bytes": "what its operations read and write in the memory of one device",
    "at least": "the longest of the times for flops, bytes and collectives, at the rates of the "
    "hardware",
    "at the peak": "the arrays that it makes, on one device, while the most memory is in use",
    "measured": "the time in the profile",
}
# The columns of words, then those of figures, which are aligned to the right, with their fields.
_NAMES = ("line", "code", "types", "collectives")
_FIGURES = {
    "flops": "flops",
    "bytes": "bytes",
    "at least": "seconds",
    "at the peak": "at_peak",
    "measured": "measured",
}


def _heat(share: float) -> str:
    """Returns the style of the code of a line that causes this share of the cost."""
    if share >= 0.2:
        return "bold red"
    return "yellow" if share >= 0.05 else ""


def _lines_of(row: LineRow, most: int | None, code_style: str) -> Iterator[tuple[Cell, ...]]:
    """Yields the lines that a row takes in a table with all columns of words and figures.

    Code, types and collectives have texts below each other. The number and the figures are in the
    first line.

    Args:
      most: how many texts each column has; None for all.
    """
    # Below the code are the modules that it runs in, as far as ``most`` leaves room for them.
    code = [row.code[:60], *(f"  in {path}" for path in row.modules)][:most]
    types = _folded([*map(str, row.types)], most)
    sent = ["?"] if row.collectives is None else [*map(str, row.collectives)]
    figures = [count_text(row.flops), bytes_text(row.bytes), time_text(row.seconds)]
    figures += [bytes_text(row.at_peak), time_text(row.measured)]
    number = "" if row.line is None else str(row.line)
    # The row takes as many lines as its longest column has texts; other columns get empty texts.
    columns = itertools.zip_longest(code, types, _folded(sent, most), fillvalue="")
    for index, (code_text, type_text, sent_text) in enumerate(columns):
        if index == 0:
            yield (number, text(code_text, code_style), type_text, sent_text, *figures)
        else:
            yield ("", code_text, type_text, sent_text, *[""] * len(figures))


def _folded(texts: list[str], most: int | None) -> list[str]:
    """Keeps the first ``most`` texts, and counts the others in the last of them: ``f32[8] +3``."""
    if most is None or len(texts) <= most:
        return texts
    return [*texts[: most - 1], f"{texts[most - 1]} +{len(texts) - most}"]


def source_text(file: str, line: int) -> str:
    """Returns the text of a line; empty if the file cannot be read."""
    return linecache.getline(file, line).strip()
