"""Writes lock files, small texts for review of what a program costs, and compares them.

A lock has a line for each figure of the program, modules and arrays in lists folded:

    [arguments]
    model.up.bias | float32[64] P('model') | rule column of tensor_parallel | 64 bytes | 1 array
    x | float32[8,32] P('data', None) | rule in_shardings | 512 bytes | 1 array

    [collectives]
    all-reduce over model for sum of layers[*].down | 18,432 bytes sent | 3 runs | 3 instructions

Lines are sorted and have neither line numbers nor paths of files, so that only what changes a cost
changes the text. Where a collective comes from is looked up in the new report when it differs.

`locked` collects the figures of a report as a ``Lock``, `lock_text` writes a lock and `_parse`
reads it again. `_changed_lines` compares a section of two locks. `folded` writes the paths of
layers in a list as one path: ``model.layers[*].up``. The figures of a line are kept by their units.
A text has the unit "", and the text of the rule has the unit "rule". The first line above is

    {"": "float32[64] P('model')", "rule": "column of tensor_parallel", "bytes": 64, "arrays": 1}

A figure that is unknown is the text ``unknown`` in a lock, and None before.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, TypeAlias

from .._publishing import write_file
from ..analysis.by_line import NO_LINE, LineRow
from ..analysis.by_module import ModuleRow, path_text
from ..analysis.collectives import Collective
from ..analysis.json_codec import file_path
from ..analysis.names import folded, operations
from ..analysis.parameters import ParameterRow
from ..analysis.program import ProgramReport
from ..analysis.units import printable
from ..report.changes import TITLES, Change, Changes, Part, Value, array_text
from ..transforms.stages import Compiled

__tracebackhide__ = True  # pytest shows the line of the test that failed

# The figures of a line by their unit: {"": "P('data')", "bytes": 1024}.
Figures: TypeAlias = dict[str, Value]
Lock: TypeAlias = dict[str, dict[str, Figures]]  # by section and name

TOLERANCE = 0.02
_UNKNOWN = "unknown"
# Whether `assert_unchanged` writes all lock files anew; the option --update-locks of pytest sets
# this.
update_all = False

_FORMAT = 2  # the version of the format, which rises when lines of the same program change
_HEAD = f"""\
# Lock file of nnx_sharding, version {_FORMAT}: what a program costs on one device, for review.
# Figures of a line are the sums of its arrays, or of all runs of its instructions.
# To accept a change, run `nnx-sharding lock` or `pytest --update-locks`.
"""
_VERSIONS = "made with"
# These sections are compared only if both locks have them, because a report may lack their tables.
_OPTIONAL: tuple[Part, ...] = ("module", "line")
# The causes, such as changes of the mesh, specs and rules, are listed before their effects.
_CAUSES: tuple[Part, ...] = ("program", "parameter")
_CAUSES_FIRST: tuple[Part, ...] = (*_CAUSES, *(part for part in TITLES if part not in _CAUSES))
# The unit of the rule that decides a spec; a report may lack rules, too.
_RULE = "rule"
_MEMORY = "arguments", "outputs", "temporaries", "aliased", "peak", "host_arguments"
_EXACT = ("arrays", "instructions", "runs")  # counts, for which there is no tolerance
_NUMBER = re.compile(r"(-?[\d,]+) ([a-z ]+)")  # "18,432 bytes", "64 bytes at the peak"
# The noun that a unit begins with, if it is written after 1: "byte" of "1 byte sent".
_SINGULAR = re.compile(r"^(array|instruction|run|byte|flop)\b")
_PLURAL = re.compile(r"s\b")
_VERSION = re.compile(r"# Lock file of nnx_sharding, version (\d+)")


def assert_unchanged(
    program: Compiled | ProgramReport,
    path: str | os.PathLike[str],
    update: bool = False,
    *,
    tolerance: float = TOLERANCE,
) -> None:
    """Fails if a program costs more, or less, than its lock file says.

    The file is a text for review, of a few kilobytes, to be committed. It has memory, flops, the
    bytes and specs of arguments by group with the rule that decides, and collectives by kind, axes
    and purpose. For a report with ``by_module`` it has memory and flops by module and line as well.
    The file is written with ``update``, with ``pytest --update-locks`` (``pytest_plugins =
    "nnx_sharding.testing.pytest_options"`` in the root's ``conftest.py``), and by
    ``nnx-sharding lock``.

    Args:
      program: a compiled function, or its report.
      path: the lock file.
      update: whether to write the file instead.
      tolerance: the fraction by which bytes and flops may differ, up or down. Specs, and numbers of
        arrays and of collectives have to be the same.

    Raises:
      AssertionError: something changed; it says what, with modules and lines.
      FileNotFoundError: there is no such file.
      ValueError: the file is not a lock file.

    Example:
      >>> import tempfile, jax
      >>> from pathlib import Path
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.testing import assert_unchanged
      >>> def report(width):
      ...     x = jax.ShapeDtypeStruct((width,), "float32")
      ...     return jit(lambda x: 2 * x).lower(x).compile().report("double")
      >>> lock = Path(tempfile.mkdtemp(), "double.lock")
      >>> assert_unchanged(report(64), lock, update=True)
      >>> assert_unchanged(report(64), lock)
      >>> assert_unchanged(report(128), lock)
      Traceback (most recent call last):
      AssertionError: double is not as double.lock says: peak: 512 B → 1.00 KiB (+100.0%); ...
      If this is wanted, write the file again: ...
      arguments
        x: float32[64]... → float32[128]...
      ...
      memory of one device
        arguments: 256 B → 512 B (+100.0%)
      ...
    """
    report = report_with_rules(program) if isinstance(program, Compiled) else program
    if update or update_all:
        write_file(file_path(path), lock_text(report).encode())
        return
    changes = changes_since(path, report, tolerance)
    if changes:
        # The headline and the remedy come before the details, because the details may be long.
        head = headline(path, report, changes, tolerance)
        raise AssertionError(
            f"{report.name} is not as {PurePath(path).name} says: {head}.\n"
            "If this is wanted, write the file again: update=True, pytest --update-locks, or "
            f"nnx-sharding lock.\n{described(changes, report)}"
        )


def report_with_rules(compiled: Compiled, **options: Any) -> ProgramReport:
    """Returns a report that says by which rule each argument is sharded, for a lock file.

    Args:
      compiled: the compiled function.
      **options: those of ``Compiled.report``.
    """
    report = compiled.report(**options)
    # Only used arguments get a reason, because the others have no sharding in the program. Reasons
    # that the report has already stay, because `why` would give the same.
    reasons = {row.path: compiled.why(row.path) for row in report.parameters if row.used}
    return dataclasses.replace(report, reasons={**reasons, **report.reasons})


def lock_text(report: ProgramReport) -> str:
    """Writes the lock file of a report."""
    parts = [_HEAD]
    for section, rows in locked(report).items():
        lines = [" | ".join([name, *_figure_texts(figures)]) for name, figures in rows.items()]
        parts.append("\n".join([f"[{section}]", *sorted(lines), ""]))
    return "\n".join(parts)


def changes_since(
    path: str | os.PathLike[str], report: ProgramReport, tolerance: float = TOLERANCE
) -> Changes:
    """Lists the figures of a report that differ from a lock file.

    Other versions of JAX are no change; they are kept in ``made_with`` of the result.

    Args:
      path: the lock file.
      report: what the program costs now.
      tolerance: the fraction by which figures may differ, except counts of arrays, instructions and
        runs, which have to be equal.
    """
    old, new = _lock_in(path), locked(report)
    changes: list[Change] = []
    for part in _CAUSES_FIRST:
        section = TITLES[part]
        if part in _OPTIONAL and not (section in old and section in new):
            continue
        # The name of a change ends with its unit: ``all-reduce over model: runs``. Counts, whose
        # units are in `_EXACT`, have to be equal.
        for change in _changed_lines(part, old.get(section, {}), new.get(section, {})):
            allowed = 0 if change.name.endswith(_EXACT) else tolerance
            if change.relative is None or abs(change.relative) > allowed:
                changes.append(change)
    # Versions explain changes, but are no changes themselves.
    return Changes(changes, _changed_versions(old.get(_VERSIONS, {}), new[_VERSIONS]))


def _changed_versions(
    old: Mapping[str, Figures], new: Mapping[str, Figures]
) -> dict[str, tuple[str, str]]:
    """Returns (before, after) for each package whose version differs; "?" for an unknown version.

    Args:
      old: the versions of the lock file, as lines: ``{"jax": {"": "0.12.0"}}``.
      new: the versions of the report, in the same form.
    """
    changed: dict[str, tuple[str, str]] = {}
    for package, figures in new.items():
        before, after = str(old.get(package, {}).get("", "?")), str(figures[""])
        if before != after:
            changed[package] = before, after
    return changed


def headline(
    path: str | os.PathLike[str],
    report: ProgramReport,
    changes: Sequence[Change],
    tolerance: float = TOLERANCE,
) -> str:
    """Writes the totals that differ: ``peak: 1 KiB → 2 KiB (+100.0%); as before: flops``.

    If none differs by more than the tolerance, the first change leads, because it is the reason:
    a collective of 256 bytes may be new in a program that sends megabytes.

    Args:
      path: the lock file.
      report: what the program costs now.
      changes: what :func:`changes_since` returned for them.
      tolerance: the fraction by which totals may differ.
    """
    old, new = _totals(_lock_in(path)), _totals(locked(report))
    texts: list[str] = []
    names: dict[str, list[str]] = {"within the tolerance": [], "as before": []}
    for name, before in old.items():
        # The figures of "memory" are bytes, as the peak and the bytes sent are.
        part: Part = "cost" if name == "flops" else "memory"
        change = Change(part, name, before, new[name])
        if before == new[name]:
            names["as before"].append(name)
        elif _is_seen(change, tolerance):
            texts.append(str(change))
        else:
            names["within the tolerance"].append(name)
    if not texts and changes:
        first = next((change for change in changes if _is_seen(change)), changes[0])
        others = f", and {len(changes) - 1} more" if len(changes) > 1 else ""
        texts.append(f"{first}{others}")
    texts += [f"{title}: {', '.join(equal)}" for title, equal in names.items() if equal]
    return "; ".join(texts)


def _is_seen(change: Change, tolerance: float = 0.0) -> bool:
    """Whether a change is above a tolerance, and not written as ``+0.0%``; True for texts."""
    return change.relative is None or abs(change.relative) > max(tolerance, 0.0005)


def _totals(lock: Lock) -> dict[str, float | None]:
    """Returns the peak, the bytes sent by all collectives, and the flops; None for unknown ones."""
    collectives = lock.get(TITLES["collective"], {}).values()
    is_unknown = any(str(figures.get("", "")).startswith(_UNKNOWN) for figures in collectives)
    sent = sum(_number(figures, "bytes sent") or 0 for figures in collectives)
    return {
        "peak": _number(lock.get(TITLES["memory"], {}).get("peak", {}), "bytes"),
        "bytes sent": None if is_unknown else sent,
        "flops": _number(lock.get(TITLES["cost"], {}).get("flops", {}), "flops"),
    }


def _number(figures: Figures, unit: str) -> float | None:
    """Returns a figure of a line as a number; None if it is missing or a text."""
    value = figures.get(unit)
    return value if isinstance(value, int | float) else None


def _lock_in(path: str | os.PathLike[str]) -> Lock:
    """Reads a lock file; a FileNotFoundError says how to write one."""
    try:
        text = file_path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no lock file {os.fspath(path)}. Write it with update=True, "
            "pytest --update-locks, or nnx-sharding lock."
        ) from None
    return _parse(text, os.fspath(path))


def described(changes: Changes, report: ProgramReport) -> str:
    """Writes changes; below each collective, up to four places where it is in the program now.

    Args:
      changes: what :func:`changes_since` returned for the report.
      report: what the program costs now.
    """
    # The name of a collective's line in the lock is mapped to places such as "user.py:7 in
    # model.up". The places are keys of a dict, so that each is listed once, in order.
    places: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for collective in report.collectives or ():
        module = f" in {folded(collective.module)}" if collective.module else ""
        if collective.source:
            places[_collective_name(collective)][f"{collective.source}{module}"] = None
    lines = []
    for line in str(changes).splitlines():
        lines.append(line)
        # A changed figure is written as "  NAME: bytes: 1 KiB → 2 KiB".
        changed = [name for name in places if line.startswith(f"  {name}: ")]
        for name in changed[:1]:
            # The places are removed, because other figures of the same collective may have changed,
            # and the places are written below the first of them only.
            lines.append(f"    now at {', '.join(itertools.islice(places.pop(name), 4))}")
    return "\n".join(lines)


def locked(report: ProgramReport) -> Lock:
    """Collects the figures for the lock file of a report, by section and name."""
    versions: dict[str, Figures] = {
        name: {"": version} for name, version in report.made_with.items() if name != "python"
    }
    sizes = {name: getattr(report.memory, name, None) for name in _MEMORY}
    mesh = "none" if report.mesh is None else str(report.mesh)
    if report.collectives is None:
        collectives: dict[str, Figures] = {"all": {"": _UNKNOWN}}
    else:
        collectives = _summed(map(_collective_figures, report.collectives))
    lock: Lock = {
        _VERSIONS: versions,
        TITLES["program"]: {
            "devices": {"": f"{report.num_devices} × {report.device_kind}"},
            "mesh": {"": mesh},
        },
        # A size of zero needs no line. An unknown size has a line, because without one it would
        # pass for zero.
        TITLES["memory"]: {name: _line("bytes", x) for name, x in sizes.items() if x != 0},
        TITLES["cost"]: {
            "flops": _line("flops", getattr(report.cost, "flops", None)),
            "bytes accessed": _line("bytes", getattr(report.cost, "bytes_accessed", None)),
        },
        TITLES["collective"]: collectives,
        TITLES["parameter"]: _argument_lines(report),
    }
    if report.by_module is not None:
        lock[TITLES["module"]] = _summed(map(_module_figures, report.by_module.rows))
    if report.by_line is not None:
        lock[TITLES["line"]] = _summed(map(_source_line_figures, report.by_line.rows))
    # Names are escaped here, so that they equal the names that are read from a file.
    return {
        section: {_escaped(name): figures for name, figures in lines.items()}
        for section, lines in lock.items()
    }


def _module_figures(row: ModuleRow) -> tuple[str, dict[str, float | None]]:
    """Returns (name, figures by unit) for a row by module; None for a figure that is not known."""
    at_peak = None if row.at_peak is None else sum(row.at_peak.values())
    return folded(path_text(row.path)), _cost_figures(row.flops, row.bytes_accessed, at_peak)


def _source_line_figures(row: LineRow) -> tuple[str, dict[str, float | None]]:
    """Returns (name, figures by unit) for a row by line; None for a figure that is not known."""
    name = f"{PurePath(row.file).name}: {row.code}" if row.file else NO_LINE
    return name, _cost_figures(row.flops, row.bytes, row.at_peak)


def _cost_figures(
    flops: float | None, accessed: float | None, at_peak: float | None
) -> dict[str, float | None]:
    """Returns the figures of a module or of a line of code, by unit."""
    return {"flops": flops, "bytes accessed": accessed, "bytes at the peak": at_peak}


def _summed(rows: Iterable[tuple[str, Mapping[str, float | None]]]) -> dict[str, Figures]:
    """Sums the figures of rows that have the same name, as the layers of a list do.

    A sum of zero is left out, and so is a name without any sum. If a figure of one row is unknown,
    the sum is unknown, and the line says that: ``{"": "unknown flops", "bytes": 64}``.

    Args:
      rows: pairs of a name and its figures by unit; None for a figure that is unknown.

    Returns:
      The figures of each name.
    """
    sums: defaultdict[str, dict[str, int]] = defaultdict(dict)  # name → unit → sum
    unknown: defaultdict[str, dict[str, None]] = defaultdict(dict)  # name → units, in order
    for name, figures in rows:
        totals = sums[name]
        for unit, figure in figures.items():
            if figure is None:
                unknown[name][unit] = None
            elif figure != 0:
                # Figures of XLA are whole numbers as floats, so they are rounded.
                totals[unit] = totals.get(unit, 0) + round(figure)
    lines: dict[str, Figures] = {}
    for name, totals in sums.items():
        line: Figures = {}
        if unknown[name]:
            line[""] = f"{_UNKNOWN} {' and '.join(unknown[name])}"
        line |= {unit: total for unit, total in totals.items() if unit not in unknown[name]}
        if line:
            lines[name] = line
    return lines


def _line(unit: str, figure: float | None) -> Figures:
    """Returns the figures of a line with one figure: ``{"bytes": 64}`` or ``{"": "unknown"}``."""
    return {"": _UNKNOWN} if figure is None else {unit: round(figure)}


def _collective_figures(collective: Collective) -> tuple[str, Mapping[str, float | None]]:
    """Returns (name, figures by unit) for a collective; None for figures that are not known."""
    sent, runs = collective.total_bytes_sent, collective.times
    return _collective_name(collective), {"bytes sent": sent, "runs": runs, "instructions": 1}


def _collective_name(collective: Collective) -> str:
    """Writes the kind, axes and purpose of a collective, and its arguments or module.

    Layers in lists are folded: ``all-reduce over model for sum of model.layers[*].down``.
    """
    # The Variable with the largest array comes first. If all are named, they are sorted, because
    # the same Variables must have the same name in all collectives.
    paths = [*dict.fromkeys(folded(path) for path in collective.parameters)]
    paths = [paths[0], f"{len(paths) - 1} others"] if len(paths) > 2 else sorted(paths)
    if paths:
        subject = " and ".join(paths)
    elif collective.module:
        subject = folded(collective.module)
    else:
        # The operations that XLA has merged into the collective, such as reduce_sum and
        # dot_general.
        names = {name.rpartition("/")[2] for name in operations(collective.operation or "")}
        subject = folded(" and ".join(sorted(names)))
    text = f"{collective.kind} over {collective.over}"
    text += f" for {collective.purpose or 'unknown'}"
    return _escaped(f"{text} of {subject}" if subject else text)


def _argument_lines(report: ProgramReport) -> dict[str, Figures]:
    """Sums arguments whose paths differ only in indices, and whose types and specs are the same.

    Returns:
      By the folded path, the figures of each group: ``{"model.layers[*].up": {"": "float32[8,32]
      P('model')", "rule": "column of tensor_parallel", "bytes": 2048, "arrays": 2}}``.
    """
    groups: defaultdict[str, defaultdict[str, list[ParameterRow]]]  # by folded path and type
    groups = defaultdict(lambda: defaultdict(list))
    for row in report.parameters:
        groups[folded(row.path)][array_text(row)].append(row)
    lines: dict[str, Figures] = {}
    for path, rows_by_type in groups.items():
        for type_text, rows in rows_by_type.items():
            # Items of one list may have several types. The name of each group then has the first
            # path of the group, too: ``model.layers[*].up, as model.layers[2].up``.
            has_one_type = len(rows_by_type) == 1
            name = path if has_one_type else f"{path}, as {rows[0].path}"
            reasons = [report.reasons[row.path] for row in rows if row.path in report.reasons]
            rules = sorted({reason.rule or "none" for reason in reasons})
            figures: Figures = {"": type_text}
            if rules:
                figures[_RULE] = _escaped(" and ".join(rules))
            figures["bytes"] = sum(row.bytes_per_device for row in rows)
            figures["arrays"] = len(rows)
            lines[name] = figures
    return lines


def _escaped(name: str) -> str:
    """Returns a name in which the separator of a line is replaced."""
    return printable(name).replace("|", "¦")


def _figure_texts(figures: Figures) -> Iterator[str]:
    """Writes each figure with its unit, ``18,432 bytes`` or ``1 array``; `_parse_figure` reads it.

    A text has no unit before it, and the text of a rule is written as ``rule fsdp``.
    """
    for unit, value in figures.items():
        if isinstance(value, int | float):
            # "bytes sent" → "1 byte sent": the first plural is that of the noun.
            yield f"{value:,} {_PLURAL.sub('', unit, count=1) if value == 1 else unit}"
        else:
            yield f"{unit} {printable(value, '×')}".lstrip()


def _parse(text: str, path: str) -> Lock:
    """Reads a text of :func:`lock_text`.

    Raises:
      ValueError: the text is another one, for example with the marks of a merge.
    """
    title = _HEAD.partition(":")[0]
    if not text.startswith(title):
        version = _VERSION.match(text)
        if version:
            raise ValueError(
                f"{path} has version {version[1]} of lock files, and this release only reads "
                f"version {_FORMAT}: write it again."
            )
        raise ValueError(f"{path} is not a lock file that begins with {title!r}: write it again.")
    lock: Lock = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        name, *texts = line.split(" | ")
        if line.startswith("[") and not texts:  # [section]
            rows: dict[str, Figures] = {}
            lock[line[1:-1]] = rows
        elif not lock or not texts or name in rows:
            raise ValueError(f"{path}, line {number}: not a line of a lock file: {line!r:.100}")
        else:
            rows[name] = dict(map(_parse_figure, texts))
    return lock


def _parse_figure(text: str) -> tuple[str, Value]:
    """Reads a figure as its unit and value.

    ``18,432 bytes`` is ``("bytes", 18432)``, ``1 array`` is ``("arrays", 1)``, ``rule fsdp`` is
    ``("rule", "fsdp")``; any other text has the unit "".
    """
    match = _NUMBER.fullmatch(text)
    if match is None:
        if text.startswith(f"{_RULE} "):
            return _RULE, text.removeprefix(f"{_RULE} ")
        return "", text
    number, unit = match.groups()
    if number == "1":
        unit = _SINGULAR.sub(r"\1s", unit)
    return unit, int(number.replace(",", ""))


def _changed_lines(
    part: Part, old: Mapping[str, Figures], new: Mapping[str, Figures]
) -> Iterator[Change]:
    """Yields a change for each figure of a section that differs.

    Args:
      part: the kind of the section, and of its changes.
      old: the lines of the lock file, by name.
    """
    # In these parts names such as "flops" and "arguments" say the unit, so it is not repeated.
    names_say_unit = part in ("memory", "cost")
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if before is not None and after is not None:
            pairs = _figure_pairs(before, after)
        elif before is not None:  # the line is gone
            unit, value, nothing = _first_figure(before)
            pairs = {unit: (value, nothing)}
        else:  # the line is new
            unit, value, nothing = _first_figure(new[name])
            pairs = {unit: (nothing, value)}
        for unit, (old_value, new_value) in pairs.items():
            if old_value != new_value:
                label = name if names_say_unit or not unit else f"{name}: {unit}"
                yield Change(part, label, old_value, new_value)


def _first_figure(figures: Figures) -> tuple[str, Value, Value]:
    """Describes a line that only one lock has by its first figure, which is a type or bytes.

    Returns:
      The unit, the figure, and what the other lock has instead: None for a text, 0 for a number.
    """
    unit, value = next(iter(figures.items()))
    return unit, value, None if isinstance(value, str) else 0


def _figure_pairs(before: Figures, after: Figures) -> dict[str, tuple[Value, Value]]:
    """Returns (before, after) by unit, for a line that both locks have."""
    if _UNKNOWN in (before.get(""), after.get("")):
        # The first figures are compared, because an unknown line has no unit in common with a known
        # one: {"": "unknown"} and {"bytes": 64}.
        return {"": (next(iter(before.values())), next(iter(after.values())))}
    units = [*(before | after)]
    if _RULE in units and not (_RULE in before and _RULE in after):
        units.remove(_RULE)  # the other report has no reasons, and so no rules
    return {unit: (_figure_in(before, unit), _figure_in(after, unit)) for unit in units}


def _figure_in(figures: Figures, unit: str) -> Value:
    """Returns a figure of a line; 0 for a missing figure, or None if it is a text or unknown.

    If a line has unknown figures, all its missing figures count as unknown: ``{"": "unknown flops",
    "bytes": 64}``.
    """
    if unit in figures:
        return figures[unit]
    is_zero = unit != "" and not str(figures.get("", "")).startswith(_UNKNOWN)
    return 0 if is_zero else None
