"""The JSON form of reports, as the page, the terminal and notebooks take it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .. import comparison, program

REPORT, COMPARISON = program.FORMAT, comparison.FORMAT
_VERSIONS = {REPORT: program.VERSION, COMPARISON: comparison.VERSION}


def report_data(report: Any) -> dict[str, Any]:
    """The JSON form of a report or a comparison as a dictionary.

    Raises:
      TypeError: ``report`` is neither a dictionary nor has a ``to_json``.
      ValueError: it is of another format or version.
    """
    data = report
    if hasattr(report, "to_json"):
        data = report.to_json()
        data = json.loads(data) if isinstance(data, str) else data
    if not isinstance(data, Mapping):
        raise TypeError(
            f"a report is a ProgramReport, a comparison or the dictionary of one, not {report!r}."
        )
    kind, version = data.get("format"), data.get("version")
    if kind not in _VERSIONS or version != _VERSIONS[kind]:
        known = ", ".join(f"{name!r} in version {own}" for name, own in _VERSIONS.items())
        raise ValueError(
            f"format {kind!r}, version {version!r} is no report that can be shown; known are "
            f"{known}."
        )
    return dict(data)


def reports_of(data: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The reports of a comparison by name; one that failed is ``{"error": text}``."""
    return dict(data.get("reports") or {})


def spec_axes(spec: Any) -> tuple[str, ...]:
    """The mesh axes that a spec in JSON form names, each once."""
    entries = spec_entries(spec)
    return tuple(dict.fromkeys(axis for entry in entries for axis in entry_axes(entry)))


def spec_entries(spec: Any) -> Sequence[Any]:
    """The entries of a spec in JSON form; with unreduced or reduced axes it is a mapping."""
    return (spec["partitions"] if isinstance(spec, Mapping) else spec) or ()


def summing_text(row: Mapping[str, Any]) -> str:
    """The axes over which an array is unreduced or reduced."""
    spec = row.get("spec")
    spec = spec if isinstance(spec, Mapping) else {}
    found = {kind: spec.get(kind) or () for kind in ("unreduced", "reduced")}
    words = (
        f", {kind} over {' and '.join(map(str, axes))}" for kind, axes in found.items() if axes
    )
    return "".join(words)


def entry_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec in JSON form."""
    if entry is None:
        return ()
    return tuple(map(str, entry)) if isinstance(entry, list | tuple) else (str(entry),)


def moved(collective: Mapping[str, Any]) -> int:
    """What one device sends for a collective in one call; once in a loop of unknown length."""
    times = collective.get("times")
    return int(collective.get("bytes_sent") or 0) * (1 if times is None else int(times))


class Sent(NamedTuple):
    """What the collectives of one kind over the same axes send.

    Attributes:
      kind: the kind.
      axes: the mesh axes; None if no set of axes explains the groups.
      number: how many instructions they are.
      bytes_sent: the bytes that one device sends in one call.
    """

    kind: str
    axes: tuple[str, ...] | None
    number: int
    bytes_sent: int


def sent_by_kind(collectives: Iterable[Mapping[str, Any]]) -> list[Sent]:
    """The sums of collectives by kind and axes, in order of appearance."""
    sums: dict[tuple[str, tuple[str, ...] | None], tuple[int, int]] = {}
    for each in collectives:
        axes = each.get("axes")
        key = str(each.get("kind")), None if axes is None else tuple(map(str, axes))
        count, size = sums.get(key, (0, 0))
        sums[key] = count + 1, size + moved(each)
    return [Sent(*key, *found) for key, found in sums.items()]


def bound_time(report: Mapping[str, Any]) -> float | None:
    """The longest of the three times that bound a program from below, in seconds."""
    roofline = report.get("roofline") or {}
    times = (roofline.get(f"{kind}_s") for kind in ("compute", "memory", "interconnect"))
    return max((time for time in times if time is not None), default=None)


def made_with(report: Mapping[str, Any]) -> str:
    """The devices and versions of a report in one line."""
    versions = [f"{name} {version}" for name, version in (report.get("made_with") or {}).items()]
    devices = f"{report.get('num_devices') or '?'} × {report.get('device_kind') or 'device'}"
    return " · ".join([devices, *versions])
