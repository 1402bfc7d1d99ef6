"""Code shared by assertions about programs: the report of a program, and texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from .. import errors
from ..analysis.activations import ActivationRow
from ..analysis.collectives import Collective, Collectives
from ..analysis.hlo import parse
from ..analysis.parameters import ParameterRow
from ..analysis.units import bytes_text
from ..fitting import suggestion
from ..report.program import ProgramReport
from ..stages import Compiled, Lowered, Traced

__tracebackhide__ = True  # pytest shows the line of the test that failed

Axes: TypeAlias = str | tuple[str, ...]
Program: TypeAlias = Compiled | ProgramReport

_MAX_LINES = 10


def report_of(program: Any) -> ProgramReport:
    """The report of a program."""
    if isinstance(program, ProgramReport):
        return program
    if isinstance(program, Compiled):
        return program.report()
    hints = {Lowered: "; compile it first: lowered.compile()", Traced: "; compile it first"}
    hint = hints.get(type(program), "")
    raise TypeError(
        f"expected a function that nnx_sharding.jit compiled, or its report, got {program!r}{hint}."
    )


def collectives_over(
    program: Any, axes: Axes | None
) -> tuple[ProgramReport, frozenset[str] | None, Collectives]:
    """The report of a program, axes as a set, and the collectives that may run over them."""
    report = report_of(program)
    if report.collectives is None:
        raise ValueError(f"the collectives of {report.name} are unknown: {_reason(report.hlo)}.")
    wanted = checked_axes(report, axes)
    some = (x for x in report.collectives if wanted is None or x.axes is None or wanted & {*x.axes})
    return report, wanted, Collectives(some)


def _reason(hlo: str | None) -> str:
    """Why a compiled program is not understood."""
    if not hlo:
        return "the backend has no text of the compiled program"
    lines = "".join(f"\n  {shown[:200]}" for shown in parse(hlo).unread[:_MAX_LINES])
    return f"in the compiled program these parts are not understood:{lines}\nReport this"


def checked_axes(report: ProgramReport, axes: Axes | None) -> frozenset[str] | None:
    """Axes of the mesh of the program; None for all.

    Raises:
      ValueError: the mesh has no such axis.
    """
    if axes is None:
        return None
    wanted = frozenset([axes] if isinstance(axes, str) else axes)
    names = {} if report.mesh is None else report.mesh.axes
    unknown = [f"{axis!r}{suggestion(axis, names)}" for axis in sorted(wanted - {*names})]
    if unknown:
        known = ", ".join(map(repr, names)) or "none"
        raise ValueError(f"the mesh has no axis {'; '.join(unknown)}. It has the axes {known}.")
    return wanted


def over_text(axes: frozenset[str] | None) -> str:
    """Axes as a part of a sentence."""
    return f" over {', '.join(map(repr, sorted(axes)))}" if axes else ""


def patterns(allowed: str | Iterable[str], paths: Sequence[str]) -> list[re.Pattern[str]]:
    """Compiles regular expressions.

    Raises:
      ValueError: one is invalid, or matches in none of the paths.
    """
    found, wrong = [], []
    for text in [allowed] if isinstance(allowed, str) else allowed:
        try:
            found.append(re.compile(text))
        except re.error as error:
            wrong.append(f"{text!r} is not a regular expression: {error}")
        else:
            if not any(map(found[-1].search, paths)):
                example = f" matches no path, such as {paths[0]}" if paths else " is not needed"
                wrong.append(f"{text!r}{example}")
    if wrong:
        raise ValueError("allowed: " + "; ".join(wrong) + ".")
    return found


def listed(collectives: Iterable[Collective]) -> str:
    """Collectives, one a line."""
    return shortened([f"  {_line(one)}" for one in collectives])


def _line(one: Collective) -> str:
    axes = "unknown axes" if one.axes is None else " and ".join(one.axes) or "no axes"
    times = {1: "", None: ", in a loop of unknown length"}.get(one.times, f", {one.times} times")
    origin = ", ".join(filter(None, (one.operation, one.source))) or one.name
    sizes = f"{bytes_text(one.bytes)}, sends {bytes_text(one.bytes_sent)}"
    return f"{one.kind} over {axes}, {sizes}{times}: {origin}"


def at(row: ParameterRow | ActivationRow) -> str:
    """The path and the shape of an array."""
    name = row.name if isinstance(row, ActivationRow) else row.path
    return f"{name or 'the root'}, shape {row.shape}"


def shortened(lines: Sequence[str]) -> str:
    """The first of these lines, and the number of further ones."""
    return "\n".join(errors.shortened(lines, "  "))
