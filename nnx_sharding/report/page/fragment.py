"""Static HTML for notebooks, and for readers of the page who have no JavaScript."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...analysis.json_codec import as_data
from ...analysis.units import bytes_text, count_text, time_text
from .data import (
    COMPARISON,
    bound_time,
    entry_axes,
    made_with,
    moved,
    report_data,
    reports_of,
    sent_by_kind,
    spec_entries,
    summing_text,
)

if TYPE_CHECKING:
    from ...analysis.parameters import ParameterRow
    from ..sharding import ShardingReport

_MOST_ROWS = 200

# Readable on light and on dark: notebooks have themes that a fragment cannot ask for.
_HUES = ("#cfe0ff", "#ffdcb8", "#c9efd8", "#ecd5fb", "#fcd3e4", "#c5eef0", "#efe9b0", "#f2d2ca")
_STYLE = (
    ".nnx-sharding{font-size:13px;overflow-x:auto}"
    ".nnx-sharding table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:.5em 0}"
    ".nnx-sharding th,.nnx-sharding td{text-align:left;padding:2px 14px 2px 0;"
    "border-bottom:1px solid #8884;white-space:nowrap}"
    ".nnx-sharding th.n,.nnx-sharding td.n{text-align:right}"
    ".nnx-sharding b.x{font-weight:500;color:#1d2026;border-radius:4px;"
    "padding:0 5px;margin-left:4px}"
    + "".join(f".nnx-sharding b.x{i}{{background:{hue}}}" for i, hue in enumerate(_HUES))
)


def fragment(data: Mapping[str, Any]) -> str:
    """A summary of a report or a comparison in its JSON form, without a style."""
    if data["format"] == COMPARISON:
        return _comparison(data)
    return _report(data)


def report_html(report: Any) -> str:
    """A summary of a report or a comparison, for ``_repr_html_``."""
    return _styled(fragment(report_data(report)))


def parameters_html(rows: Sequence[ParameterRow]) -> str:
    """A table of parameters, for ``_repr_html_``."""
    return _styled(_parameters([row_data(row) for row in rows]))


def sharding_html(report: ShardingReport) -> str:
    """The report of ``check_sharding``, for ``_repr_html_``."""
    sizes = "  ".join(f"{axis} {size}" for axis, size in report.mesh.items())
    facts = [
        ("Mesh", sizes or "unknown"),
        ("Whole on each device", f"{report.replicated_fraction:.1%} of the bytes"),
        ("Fullest device", bytes_text(max(report.device_bytes, default=0))),
        ("Rules", "; ".join(f"{number}: {rule}" for number, rule in enumerate(report.rules))),
    ]
    return _styled(
        _facts(facts)
        + _lines("Problems", report.problems)
        + _lines("Warnings", report.warnings)
        + _parameters([row_data(row) for row in report.rows])
    )


def escaped(text: Any) -> str:
    """Text that stands for itself in HTML, also in a quoted attribute."""
    return html.escape(str(text).encode("utf-8", "replace").decode())


def _styled(body: str) -> str:
    return f'<div class="nnx-sharding"><style>{_STYLE}</style>{body}</div>'


def _report(data: Mapping[str, Any]) -> str:
    memory, roofline = data.get("memory") or {}, data.get("roofline") or {}
    cost = (data.get("cost") or {}).get("executed") or {}
    collectives = data.get("collectives") or []
    axes = ((data.get("mesh") or {}).get("axes") or {}).items()
    parts = ("arguments", "outputs", "temporaries", "generated_code", "aliased")
    facts = [
        ("Program", data.get("name") or "report"),
        ("Made with", made_with(data)),
        ("Mesh", "  ".join(f"{axis} {size}" for axis, size in axes) or "none"),
        ("Peak memory of each device", bytes_text(memory.get("peak"))),
        *((part.replace("_", " ").capitalize(), bytes_text(memory.get(part))) for part in parts),
        ("Floating point operations of each device", count_text(cost.get("flops"))),
        ("Sent by each device", bytes_text(sum(map(moved, collectives)))),
    ]
    if roofline:
        least = f"{time_text(bound_time(data))}, bound by {roofline.get('bound_by')}"
        facts.append((f"Takes at least, on {roofline.get('device')}", least))
    return _facts(facts) + _sent(collectives) + _parameters(data.get("parameters") or [])


def _comparison(data: Mapping[str, Any]) -> str:
    header = ("Strategy", "Peak memory", "Sent by each device", "Operations", "Takes at least")
    lines = []
    for name, report in reports_of(data).items():
        if "error" in report:
            lines.append([escaped(name), escaped(report["error"]), "", "", ""])
            continue
        cost = (report.get("cost") or {}).get("executed") or {}
        sent = sum(map(moved, report.get("collectives") or []))
        figures = (
            bytes_text((report.get("memory") or {}).get("peak")),
            bytes_text(sent),
            count_text(cost.get("flops")),
            time_text(bound_time(report)),
        )
        lines.append([escaped(name), *figures])
    return _table(header, lines, numbers=4)


def _sent(collectives: Iterable[Mapping[str, Any]]) -> str:
    sums = sent_by_kind(collectives)
    if not sums:
        return ""
    lines = [
        [
            escaped(sent.kind),
            "no axes fit" if sent.axes is None else escaped(" + ".join(sent.axes) or "none"),
            str(sent.number),
            bytes_text(sent.bytes_sent),
        ]
        for sent in sums
    ]
    return _table(("Collectives", "Axes", "Count", "Sent by each device"), lines, numbers=2)


def row_data(row: ParameterRow) -> dict[str, Any]:
    """A row in the form that reports have in JSON."""
    names = ("shape", "dtype", "spec", "shard_shape", "bytes_per_device", "bytes_total")
    return {"path": row.path or "(the root)"} | {n: as_data(getattr(row, n)) for n in names}


def _parameters(rows: Sequence[Mapping[str, Any]]) -> str:
    axes: dict[str, int] = {}
    lines = [
        [
            escaped(row["path"]),
            escaped(row["dtype"]),
            _layout(row, axes),
            " × ".join(map(str, row["shard_shape"])) or "scalar",
            _exact(row["bytes_per_device"]),
            _exact(row["bytes_total"]),
        ]
        for row in rows[:_MOST_ROWS]
    ]
    if len(rows) > _MOST_ROWS:
        lines.append([f"… {len(rows) - _MOST_ROWS} more", *[""] * 5])
    sums = [sum(row[key] for row in rows) for key in ("bytes_per_device", "bytes_total")]
    lines.append(["<b>Total</b>", "", "", "", *map(_exact, sums)])
    header = ("Path", "Type", "Shape and axes", "Each device holds", "Bytes/device", "Bytes")
    return _table(header, lines, numbers=2)


def _layout(row: Mapping[str, Any], axes: dict[str, int]) -> str:
    """The shape, with the axes after each dimension that they cut."""
    shape, spec = row["shape"], row["spec"]
    if spec is None or isinstance(spec, str):
        return f"{' × '.join(map(str, shape)) or 'scalar'} {escaped(spec or 'no spec')}"
    entries = [*spec_entries(spec), *[None] * len(shape)]
    texts = []
    for size, entry in zip(shape, entries, strict=False):
        chips = (
            f'<b class="x x{axes.setdefault(axis, len(axes)) % len(_HUES)}">{escaped(axis)}</b>'
            for axis in entry_axes(entry)
        )
        texts.append(f"{size}{''.join(chips)}")
    return (" × ".join(texts) or "scalar") + escaped(summing_text(row))


def _exact(n: int) -> str:
    return f'<span title="{n:,} bytes">{bytes_text(n)}</span>'


def _facts(facts: Iterable[tuple[str, Any]]) -> str:
    lines = "".join(
        f'<tr><th scope="row">{escaped(name)}</th><td>{escaped(fact)}</td></tr>'
        for name, fact in facts
    )
    return f"<table>{lines}</table>"


def _lines(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{escaped(line)}</li>" for line in lines)
    return f"<p><strong>{title}</strong></p><ul>{items}</ul>"


def _table(header: Sequence[str], lines: Iterable[Sequence[str]], numbers: int) -> str:
    """A table of cells that are HTML already; the last ``numbers`` columns are numbers."""
    texts = len(header) - numbers

    def cells(tag: str, line: Sequence[str]) -> str:
        kind = ["" if i < texts else ' class="n"' for i in range(len(line))]
        found = zip(kind, line, strict=True)
        return f"<tr>{''.join(f'<{tag}{k}>{cell}</{tag}>' for k, cell in found)}</tr>"

    body = "".join(cells("td", line) for line in lines)
    return f"<table><thead>{cells('th', header)}</thead><tbody>{body}</tbody></table>"
