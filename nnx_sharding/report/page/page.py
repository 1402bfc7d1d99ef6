"""Makes a self-contained HTML page of a report or of a comparison of reports."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from .fragment import COMPARISON, escaped, fragment, made_with, report_data

# In the order of use; `main` runs at the end.
_SCRIPT = ("nodes", "numbers", "figures", "table", "mesh", "cost", "parameters", "collectives")
_SCRIPT += ("hlo", "comparison", "main")


def html_page(report: Any, title: str | None = None) -> str:
    """Draws a report, or a comparison of several, as one self-contained HTML page.

    The page fetches nothing and can be sent as a single file. It shows the mesh, the parameters
    by mesh axis, memory, cost, collectives and the text of the program, with search and sort.
    Without JavaScript it shows a summary. Names from the report are never parsed as HTML.

    Args:
      report: a ``ProgramReport`` or a comparison, or the JSON form of one as a dictionary.
      title: the title of the page; None takes the name in the report.

    Returns:
      The HTML text.

    Raises:
      TypeError: ``report`` is neither a dictionary nor has an ``as_dict``.
      ValueError: it is of an unknown format or version.

    Example:
      >>> from nnx_sharding.report.page import html_page
      >>> report = {"format": "nnx_sharding.report", "version": 1, "name": "train_step"}
      >>> page = html_page(report)
      >>> "<title>train_step</title>" in page
      True
    """
    data = report_data(report)
    reports = (data.get("reports") or {}).values() if data["format"] == COMPARISON else [data]
    compiled = [each for each in reports if "error" not in each]
    style, script = _part("page.css"), _script()
    parts = {
        "policy": _policy(style, script),
        "title": escaped(title or _title(data)),
        "made_with": escaped(made_with(compiled[0]) if compiled else ""),
        "style": style,
        "script": script,
        "summary": fragment(data),
        "data": _script_data(data),
    }
    # In one pass, so that nothing that is filled in is taken for a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _part("page.html"))


def write_html(path: str | os.PathLike[str], report: Any, title: str | None = None) -> None:
    """Writes :func:`html_page` to a file.

    Args:
      path: the file, which is replaced if it exists.
      report: what to show, as in :func:`html_page`.
      title: the title of the page; None takes the name in the report.

    Raises:
      TypeError: as :func:`html_page`; nothing is written then.
      ValueError: as :func:`html_page`; nothing is written then.
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
    if data["format"] == COMPARISON:
        return f"{len(data.get('reports') or {})} strategies compared"
    return str(data.get("name") or "Report")


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _script() -> str:
    """All of the script in one scope."""
    parts = "\n".join(_part(f"script/{name}.js") for name in _SCRIPT)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def _policy(style: str, script: str) -> str:
    """A policy that allows the page its own style and script, and nothing else.

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
    """JSON for a script element: ASCII, null for NaN and infinities, nothing ends the element.

    See https://html.spec.whatwg.org/multipage/scripting.html#restrictions-for-contents-of-script-elements
    """
    finite = json.loads(json.dumps(data), parse_constant=lambda _: None)
    text = json.dumps(finite, separators=(",", ":"), allow_nan=False)
    return text.translate({ord(char): f"\\u{ord(char):04x}" for char in "<>&"})
