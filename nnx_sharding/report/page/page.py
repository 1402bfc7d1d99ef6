"""Makes a self-contained HTML page of a report or of a comparison of reports."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from .data import REPORT, report_data
from .fragment import escaped, fragment

# In the order of data flow; all names are there before `main` runs.
_SCRIPT = (
    "nodes",
    "numbers",
    "axes",
    "controls",
    "table",
    "figures",
    "mesh",
    "cost",
    "parameters",
    "collectives",
    "program",
    "comparison",
    "main",
)


def html_page(report: Any, title: str | None = None) -> str:
    """Draws a report, or a comparison of several, as one self-contained HTML page.

    The page fetches nothing and can be sent as a single file. It shows the mesh, the parameters
    by mesh axis, memory, cost, collectives and the text of the program, with search and sort.
    Without JavaScript it shows a summary. Names from the report are never taken as markup.

    Args:
      report: a ``ProgramReport`` or a comparison, or the JSON form of one as a dictionary.
      title: the title of the page; None takes the name in the report.

    Returns:
      The HTML text.

    Raises:
      TypeError: ``report`` is neither a dictionary nor has a ``to_json``.
      ValueError: it is of another format, or of a version that this release does not know.

    Example:
      >>> from nnx_sharding.report.page import html_page
      >>> report = {"format": "nnx_sharding.report", "version": 1, "name": "train_step"}
      >>> page = html_page(report)
      >>> "<title>train_step</title>" in page
      True
    """
    data = report_data(report)
    style, script = _part("page.css"), _script()
    parts = {
        "policy": _policy(style, script),
        "title": escaped(title or _title(data)),
        "style": style,
        "script": script,
        "summary": fragment(data),
        "data": _script_data(data),
    }
    # In one pass, so that nothing that is filled in is taken as a place to fill in.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _part("page.html"))


def write_html(path: str | os.PathLike[str], report: Any, title: str | None = None) -> None:
    """Writes :func:`html_page` to a file.

    Args:
      path: the file; one that is there is replaced.
      report: what to show, as in :func:`html_page`.
      title: the title of the page; None takes the name in the report.

    Raises:
      TypeError: as :func:`html_page`; then nothing is written.
      ValueError: likewise.
      OSError: the file cannot be written.

    Example:
      >>> import pathlib, tempfile
      >>> from nnx_sharding.report.page import write_html
      >>> report = {"format": "nnx_sharding.report", "version": 1, "name": "train_step"}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     write_html(f"{folder}/report.html", report)
      ...     pathlib.Path(folder, "report.html").read_text()[:15]
      '<!doctype html>'
    """
    page = html_page(report, title)
    Path(path).write_text(page, encoding="utf-8")


def _title(data: Mapping[str, Any]) -> str:
    if data["format"] == REPORT:
        return str(data.get("name") or "Report")
    return f"{len(data.get('reports') or {})} strategies compared"


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _script() -> str:
    """All of the script in one scope."""
    parts = "\n".join(_part(f"script/{name}.js") for name in _SCRIPT)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def _policy(style: str, script: str) -> str:
    """Allows the page its own style and script, and nothing else.

    See https://www.w3.org/TR/CSP3/#match-element-to-source-list
    """
    style_hash, script_hash = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (style, script)
    )
    return (
        f"default-src 'none'; style-src 'sha256-{style_hash}'; script-src 'sha256-{script_hash}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _script_data(data: Any) -> str:
    """JSON that may stand in a script element: ASCII, and nothing in it ends the element.

    See https://html.spec.whatwg.org/multipage/scripting.html#restrictions-for-contents-of-script-elements
    """
    text = json.dumps(_finite(data), ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
