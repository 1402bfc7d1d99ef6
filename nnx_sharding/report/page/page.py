"""A self-contained HTML page of a report or of a comparison of reports."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from importlib import resources
from pathlib import Path
from typing import Any

from .fragment import COMPARISON, escaped, fragment, made_with, report_data

# In the order of use; `main` runs at the end.
_SCRIPT = (
    *("nodes", "numbers", "figures", "table", "mesh", "cost"),
    *("parameters", "collectives", "hlo", "comparison", "main"),
)


def html_page(report: Any, title: str | None = None) -> str:
    """Draw a report, or a comparison of several, as one self-contained HTML page.

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
    is_comparison = data["format"] == COMPARISON
    reports = list((data.get("reports") or {}).values()) if is_comparison else [data]
    name = f"{len(reports)} strategies compared" if is_comparison else data.get("name") or "Report"
    versions = [made_with(each) for each in reports if "error" not in each]
    style = _part("page.css")
    script = "\n".join(_part(f"script/{name}.js") for name in _SCRIPT)
    script = f'"use strict";\n(() => {{\n{script}}})();\n'  # in one scope
    parts = {
        "title": escaped(title or name),
        "made_with": escaped(versions[0] if versions else ""),
        "style_hash": _hash(style),
        "script_hash": _hash(script),
        "style": style,
        "script": script,
        "summary": fragment(data),
        "data": _script_data(data),
    }
    # In one pass, so that nothing that is filled in is taken for a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _part("page.html"))


def write_html(path: str | os.PathLike[str], report: Any, title: str | None = None) -> None:
    """Write :func:`html_page` to a file.

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


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The source of an element in a policy: https://www.w3.org/TR/CSP3/#grammardef-hash-source."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _script_data(data: Any) -> str:
    """JSON for a script element: ASCII, null for NaN and infinities, nothing ends the element.

    See https://html.spec.whatwg.org/multipage/scripting.html#restrictions-for-contents-of-script-elements
    """
    finite = json.loads(json.dumps(data), parse_constant=lambda _: None)
    text = json.dumps(finite, separators=(",", ":"), allow_nan=False)
    return text.translate({ord(char): f"\\u{ord(char):04x}" for char in "<>&"})
