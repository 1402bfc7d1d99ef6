"""Sums types, work and memory of a program by line of the user's code.

**Types** come from the trace (`traced_values.py`), on Auto axes with the specs that the compiler
chose (`inferred_specs.py`). **Cost** is that of `attribution.py`, where a place is a line instead
of a module (`line_places.py`). What belongs to no line is in a row of its own, so that sums are
those of the program.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from .attribution import (
    CompiledProgram,
    Measured,
    PlaceFigures,
    figures_by_place,
    seconds_by_place,
)
from .buffers import Buffers
from .by_line import LineCollectives, LineRow, LineTable, ValueType, source_text
from .collectives import Collectives
from .hlo import Module
from .inferred_specs import FROM_PROGRAM, compiled_values
from .line_places import LineFinder
from .owners import Arguments
from .places import UNKNOWN, Place
from .traced_values import Line, MadeValue


def line_table(
    program: CompiledProgram,
    made: Sequence[MadeValue],
    modules: Collection[str],
    whole: Module | None,
    measured: Measured | None = None,
) -> LineTable:
    """Sums types, cost and memory of a compiled program by line.

    Args:
      program: the program.
      made: the values of its trace.
      modules: the paths of the modules that it calls.
      whole: the program before it is partitioned, with the sharding of each value; None if unknown.
      measured: the times of the instructions of a program of this trace; None without a profile.
    """
    # Cost and memory are summed by place. The places of a `LineFinder` are lines.
    finder = LineFinder(program.module, made)
    times = None
    if measured is not None:
        times = seconds_by_place(LineFinder(measured.module, made), measured)
    # Lines without a cost have rows, too.
    places = [*(Place(path, backward=False) for path in finder.lines), UNKNOWN]
    no_arguments = Arguments(program.module, ())  # No line makes arguments, so none are given.
    figures, _, reasons = figures_by_place(finder, no_arguments, program, places, times)
    # Types, with the specs that the compiler chose.
    if program.mesh is not None:
        made = compiled_values(made, modules, program.module, whole, program.mesh.axes)
    rows_with_types = {(row.file, row.line): row for row in typed_table(made).rows}
    held_without_line = _held_without_line(figures, program.buffers)
    rows = []
    for place, figure in figures.items():
        # The place without a path is for everything without a line.
        file, number = finder.lines.get(place.path or "", (None, None))
        at_peak = held_without_line
        if place.path and figure.at_peak is not None:
            at_peak = figure.at_peak.total()
        sent = figure.collectives
        row = dataclasses.replace(
            rows_with_types.get((file, number), LineRow(file, number)),
            collectives=None if sent is None else _by_kind(sent),
            flops=figure.cost.flops,
            bytes=figure.cost.bytes_accessed,
            seconds=figure.seconds,
            at_peak=at_peak,
            measured=figure.measured,
        )
        rows.append(row)
    return LineTable(_ordered(rows), "; ".join(reasons) or None, _remark(made))


def _held_without_line(
    figures: Mapping[Place, PlaceFigures], buffers: Buffers | None
) -> int | None:
    """Sums the bytes at the peak that no line has made: of arguments, and the compiler's own.

    These are all bytes in use at the peak, less those of lines. Returns None if the compiler does
    not say what is in memory.
    """
    if buffers is None:
        return None
    held = max(buffers.in_use())
    for place, figure in figures.items():
        if place.path and figure.at_peak is not None:  # The place is a line.
            held -= figure.at_peak.total()
    return held


def typed_table(made: Sequence[MadeValue]) -> LineTable:
    """Returns a table with the types of the values that each line of a trace makes, without cost.

    The first type of a line is that of its result.
    """
    by_line: defaultdict[Line | None, list[MadeValue]] = defaultdict(list)
    # The last value that a line makes is its result, so values are listed from the last on.
    for value in reversed(made):
        by_line[value.line].append(value)
    rows = []
    for line, values in by_line.items():
        counts = Counter[ValueType]()
        for value in values:
            kind = ValueType(value.dtype, value.shape, value.spec, value.backward, count=0)
            counts[kind] += value.times
        types = [dataclasses.replace(kind, count=count) for kind, count in counts.items()]
        # Types of the forward pass come first. The sort is stable, so the result stays in front.
        types.sort(key=lambda kind: kind.backward)
        file, number = line or (None, None)
        code = "" if line is None else source_text(*line)
        modules = sorted({value.module for value in values if value.module})
        rows.append(LineRow(file, number, code, tuple(types), tuple(modules)))
    why_unknown = "figures, as the program is not compiled"
    return LineTable(_ordered(rows), why=why_unknown, why_types=_remark(made))


def _ordered(rows: Iterable[LineRow]) -> tuple[LineRow, ...]:
    """Sorts rows by file and line; the row without a line is the last one."""
    return tuple(sorted(rows, key=lambda row: (row.file is None, row.file or "", row.line or 0)))


def _remark(made: Iterable[MadeValue]) -> str | None:
    """Says which specs are unknown, and which come from the compiled program; None for none."""
    unknown = dict.fromkeys(value.why for value in made if value.why is not None)
    remarks = [FROM_PROGRAM] if FROM_PROGRAM in unknown else []
    if reasons := [why for why in unknown if why != FROM_PROGRAM]:
        remarks.append(f"unknown: {', '.join(reasons)}")
    return "; ".join(remarks) or None


def _by_kind(collectives: Collectives) -> tuple[LineCollectives, ...]:
    """Sums the collectives of each kind over the same axes; what sends most is first."""
    rows = [
        LineCollectives(kind, axes, bytes=sent, count=count)
        for (kind, axes), (count, sent) in collectives.totals().items()
    ]
    # Unknown bytes come first, because they may be the most. A table may show only the first rows.
    return tuple(sorted(rows, key=lambda row: (row.bytes is not None, -(row.bytes or 0))))
