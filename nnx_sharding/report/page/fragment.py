"""Static HTML of reports: for notebooks, and for readers of the page who have no JavaScript."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...analysis.json_codec import as_data
from ...analysis.units import bytes_text, count_text, time_text

COMPARISON = "nnx_sharding.comparison"
_VERSIONS = {"nnx_sharding.report": 1, COMPARISON: 1}
_MAX_ROWS = 200

# Readable on light and on dark: notebooks have themes that a fragment cannot ask for.
_HUES = ("#cfe0ff", "#ffdcb8", "#c9efd8", "#ecd5fb", "#fcd3e4", "#c5eef0", "#efe9b0", "#f2d2ca")
_STYLE = """
.nnx-sharding { font-size: 13px; overflow-x: auto }
.nnx-sharding table { border-collapse: collapse; margin: .5em 0 }
.nnx-sharding :is(th, td) { text-align: left; padding: 2px 14px 2px 0; white-space: nowrap }
.nnx-sharding tr { border-bottom: 1px solid #8884 }
.nnx-sharding .number { text-align: right; font-variant-numeric: tabular-nums }
.nnx-sharding tbody th { font-weight: normal }
.nnx-sharding b { font-weight: 500; color: #1d2026; border-radius: 4px; padding: 0 5px }
""" + "".join(f".nnx-sharding .axis-{i} {{ background: {hue} }}\n" for i, hue in enumerate(_HUES))


class _Html(str):
    """HTML; any other text is escaped before it becomes part of a table."""


def report_data(report: Any) -> dict[str, Any]:
    """The JSON form of a report or a comparison.

    Raises:
      TypeError: ``report`` is neither a dictionary nor has an ``as_dict``.
      ValueError: it is of an unknown format or version.
    """
    data = report.as_dict() if hasattr(report, "as_dict") else report
    if not isinstance(data, Mapping):
        raise TypeError(
            f"expected a ProgramReport, a Comparison or the dictionary of one, got {report!r}."
        )
    kind, version = data.get("format"), data.get("version")
    if kind not in _VERSIONS or version != _VERSIONS[kind]:
        known = ", ".join(f"{name!r} in version {number}" for name, number in _VERSIONS.items())
        raise ValueError(f"cannot show format {kind!r} in version {version!r}; known are {known}.")
    return dict(data)


def report_html(report: Any) -> str:
    """The summary of a report or a comparison, for ``_repr_html_``."""
    return _styled(fragment(report_data(report)))


def parameters_html(rows: Iterable[Any]) -> str:
    """A table of parameters, for ``_repr_html_``."""
    return _styled(_parameters([as_data(row) for row in rows]))


def sharding_html(report: Any) -> str:
    """The report of ``check_sharding``, for ``_repr_html_``."""
    facts = {
        "Mesh": _axes_text(report.mesh) or "unknown",
        "Fully replicated": f"{report.replicated_fraction:.1%} of the bytes",
        "Fullest device": bytes_text(max(report.device_bytes, default=0)),
        "Rules": "; ".join(f"{number}: {rule}" for number, rule in enumerate(report.rules)),
    }
    body = _table(facts.items())
    for title in ("problems", "warnings"):
        lines = getattr(report, title)
        body += _table([[line] for line in lines], [title.capitalize()]) if lines else ""
    return _styled(body + _parameters([as_data(row) for row in report.rows]))


def fragment(data: Mapping[str, Any]) -> str:
    """The summary of a report or a comparison in its JSON form, without a style."""
    return _comparison(data) if data["format"] == COMPARISON else _report(data)


def escaped(text: Any) -> str:
    """Text as HTML that shows just this text, also in a quoted attribute."""
    return html.escape(str(text).encode("utf-8", "replace").decode())


def made_with(report: Mapping[str, Any]) -> str:
    """The devices and versions of a report in one line."""
    kind, platform = report.get("device_kind") or "device", report.get("platform")
    devices = f"{report.get('num_devices') or '?'} × {kind}"
    devices += f" ({platform})" if platform and platform != kind else ""
    versions = (f"{name} {version}" for name, version in (report.get("made_with") or {}).items())
    return " · ".join([devices, *versions])


def _styled(body: str) -> str:
    return f'<div class="nnx-sharding"><style>{_STYLE}</style>{body}</div>'


def _report(data: Mapping[str, Any]) -> str:
    memory, roofline = data.get("memory") or {}, data.get("roofline") or {}
    peak, sent, flops, seconds = _figures(data).values()
    parts = ("arguments", "outputs", "temporaries", "generated_code", "aliased")
    facts = {
        "Program": data.get("name") or "report",
        "Made with": made_with(data),
        "Mesh": _axes_text((data.get("mesh") or {}).get("axes") or {}) or "none",
        "Peak memory of each device": peak,
        **{name.replace("_", " ").capitalize(): bytes_text(memory.get(name)) for name in parts},
        "Flops of each device": flops,
        "Bytes sent by each device": sent,
    }
    if roofline:
        bound = f"{seconds}, bound by {roofline.get('bound_by')}"
        facts[f"Roofline on {roofline.get('device')}"] = bound
    collectives, parameters = data.get("collectives") or [], data.get("parameters") or []
    return _table(facts.items()) + _collectives(collectives) + _parameters(parameters)


def _comparison(data: Mapping[str, Any]) -> str:
    best, rows = data.get("best") or {}, []
    for name, report in (data.get("reports") or {}).items():
        figures = {} if "error" in report else _figures(report)
        cells = (f"{'★ ' * (best.get(key) == name)}{text}" for key, text in figures.items())
        rows.append([name, *(cells if figures else [report["error"], "", "", ""])])
    return _table(rows, ["Strategy", "Peak memory", "Bytes sent", "Flops", "Roofline"], numbers=4)


def _figures(report: Mapping[str, Any]) -> dict[str, str]:
    """The figures by which strategies are compared, as text."""
    roofline = report.get("roofline") or {}
    times = (roofline.get(f"{kind}_s") for kind in ("compute", "memory", "interconnect"))
    return {
        "peak": bytes_text((report.get("memory") or {}).get("peak")),
        "bytes_sent": bytes_text(sum(map(_sent, report.get("collectives") or []))),
        "flops": count_text(((report.get("cost") or {}).get("executed") or {}).get("flops")),
        "roofline": time_text(max((time for time in times if time is not None), default=None)),
    }


def _sent(collective: Mapping[str, Any]) -> int:
    """The bytes that one device sends in one call; in a loop of unknown length, in one run."""
    times = collective.get("times")
    return int(collective.get("bytes_sent") or 0) * (1 if times is None else int(times))


def _collectives(collectives: Iterable[Mapping[str, Any]]) -> str:
    sums: dict[tuple[str, str], list[int]] = {}
    for each in collectives:
        axes = each.get("axes")
        names = "no axes fit" if axes is None else " + ".join(axes) or "none"
        sums.setdefault((str(each.get("kind")), names), []).append(_sent(each))
    rows = [[*key, len(sent), bytes_text(sum(sent))] for key, sent in sums.items()]
    return _table(rows, ["Collectives", "Axes", "Count", "Bytes sent"], numbers=2) if rows else ""


def _parameters(rows: Sequence[Mapping[str, Any]]) -> str:
    hues: dict[str, int] = {}
    keys = ("bytes_per_device", "bytes_total")
    lines = []
    for row in rows[:_MAX_ROWS]:
        shard = " × ".join(map(str, row["shard_shape"])) or "scalar"
        shapes = (_shape_and_axes(row, hues), shard)
        sizes = (_exact(row[key]) for key in keys)
        lines.append([row["path"] or "(the root)", row["dtype"], *shapes, *sizes])
    if len(rows) > _MAX_ROWS:
        lines.append([f"… {len(rows) - _MAX_ROWS} more", *[""] * 5])
    lines.append(["Total", "", "", "", *(_exact(sum(row[key] for row in rows)) for key in keys)])
    header = ["Path", "Dtype", "Shape and axes", "Shard shape", "Bytes/device", "Bytes"]
    return _table(lines, header, numbers=2)


def _shape_and_axes(row: Mapping[str, Any], hues: dict[str, int]) -> str:
    """The shape, each dimension with the axes over which it is sharded, in their colours."""
    shape, spec = row["shape"], row["spec"]
    if spec is None or isinstance(spec, str):
        return f"{' × '.join(map(str, shape)) or 'scalar'} {spec or 'no spec'}"
    sums = spec if isinstance(spec, Mapping) else {}
    dimensions = list(map(str, shape))
    for i, entry in enumerate(sums.get("partitions", spec)):
        for axis in [entry] if isinstance(entry, str) else entry or []:
            hue = hues.setdefault(axis, len(hues)) % len(_HUES)
            dimensions[i] += f' <b class="axis-{hue}">{escaped(axis)}</b>'
    text = " × ".join(dimensions) or "scalar"
    for kind in ("unreduced", "reduced"):
        if sums.get(kind):
            text += f", {kind} over {escaped(' and '.join(sums[kind]))}"
    return _Html(text)


def _exact(size: int) -> str:
    return _Html(f'<span title="{size:,} bytes">{bytes_text(size)}</span>')


def _axes_text(axes: Mapping[str, int]) -> str:
    return "  ".join(f"{axis} {size}" for axis, size in axes.items())


def _table(rows: Iterable[Sequence[Any]], header: Sequence[str] = (), numbers: int = 0) -> str:
    """A table of rows, whose first cell is their name and whose last ``numbers`` are numbers."""

    def line(cells: Sequence[Any], tag: str) -> str:
        tags = ['th scope="row"' if tag == "td" else tag, *[tag] * (len(cells) - 1)]
        for i in range(len(cells) - numbers, len(cells)):
            tags[i] += ' class="number"'
        texts = [cell if isinstance(cell, _Html) else escaped(cell) for cell in cells]
        parts = (f"<{t}>{text}</{t[:2]}>" for t, text in zip(tags, texts, strict=True))
        return f"<tr>{''.join(parts)}</tr>"

    head = f"<thead>{line(header, 'th')}</thead>" if header else ""
    return f"<table>{head}<tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>"
