"""A self-contained HTML page of a report, of a comparison of reports, or of what changed.

The page is a template (``page.html``) with the data as JSON and one script, which is put together
from the files in ``script/``. A policy in the page allows this script and style only, by hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from importlib import resources
from pathlib import Path
from typing import Any

from ..._publishing import write_file
from ...analysis.program import ProgramReport
from ..changes import Changes
from ..comparison import Comparison, load

# In the order of use; `main` runs at the end.
_SCRIPT = (
    *("nodes", "table", "cost", "mesh", "arrays"),
    *("modules", "lines", "program", "collectives", "main"),
)


def html_page(report: Any, title: str | None = None, head: str = "") -> str:
    """Draws a report, or a comparison of several, as one self-contained HTML page.

    The page fetches nothing, and shows a summary without JavaScript. Names from the report are
    never parsed as HTML.

    Args:
      report: a ``ProgramReport`` or a ``Comparison``, or the JSON form of one, as a dictionary or
        in a file; or what :func:`~nnx_sharding.report.diff` or
        :func:`~nnx_sharding.planning.plan` returned.
      title: the title of the page; None takes the name in the report.
      head: text that is shown as it is before the report, such as the summary of a plan.

    Example:
      >>> import jax
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.report.page import html_page
      >>> report = jit(lambda x: x + 1).lower(jax.numpy.ones(8)).compile().report("train_step")
      >>> "<title>train_step</title>" in html_page(report)
      True
    """
    # The report may be what `plan` returned. It is not recognised by its class, because the package
    # of that class imports this one. ``explained`` returns lines: a summary, and why others are not
    # the best.
    if hasattr(report, "explained"):
        lines = list(report.explained())
        title = title or lines[0]
        head = head or "\n".join(lines)
        report = report.comparison
    report = report if isinstance(report, Changes) else load(report)
    name, made_with = _name_and_versions(report)
    style = _part("page.css")
    script = "\n".join(_part(f"script/{file}.js") for file in _SCRIPT)
    # A function around the script keeps its names out of the page's global scope.
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    parts = {
        "title": _escaped(title or name),
        "made_with": _escaped(made_with),
        "style_hash": _hash(style),
        "script_hash": _hash(script),
        "style": style,
        "script": script,
        "head": f'<pre class="scroll">{_escaped(head)}</pre>' if head else "",
        "summary": _escaped(report),  # what `print` shows
        "data": _script_data(report.as_dict()),
    }
    # All placeholders ``{{name}}`` are replaced in one pass, so that no inserted text is taken for
    # one.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _part("page.html"))


def write_html(
    path: str | os.PathLike[str], report: Any, title: str | None = None, head: str = ""
) -> None:
    """Writes :func:`html_page` to a file, which is replaced if it exists."""
    write_file(Path(path), html_page(report, title, head).encode())


def _name_and_versions(report: ProgramReport | Comparison | Changes) -> tuple[str, str]:
    """Returns the title of a page without another one, and with what its reports were made.

    The second text is that of the first report of a comparison. It is empty without a report: for
    `Changes`, and if nothing was compiled.
    """
    if isinstance(report, Changes):
        return "What changed", ""
    if isinstance(report, ProgramReport):
        return report.name, _made_with(report)
    compiled = list(report.compiled.values())
    return f"{len(compiled)} strategies compared", _made_with(compiled[0]) if compiled else ""


def _made_with(report: ProgramReport) -> str:
    """Writes the devices and versions of a report in one line."""
    kind, platform = report.device_kind, report.platform
    devices = f"{report.num_devices} × {kind}"
    devices = devices if platform == kind else f"{devices} ({platform})"
    versions = (f"{name} {version}" for name, version in report.made_with.items())
    return " · ".join([devices, *versions])


def _escaped(text: Any) -> str:
    """Escapes a text, or the text of an object, for HTML; a lone surrogate becomes a question mark.

    A surrogate cannot be encoded.
    """
    return html.escape(str(text).encode("utf-8", "replace").decode())


def _part(name: str) -> str:
    """Reads a file next to this module: the template, the style or a part of the script."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Returns a hash source of a security policy: https://www.w3.org/TR/CSP3/#grammardef-hash-source."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _script_data(data: Any) -> str:
    """Writes JSON for a script element: ASCII, null for NaN, nothing that ends the element."""
    # https://html.spec.whatwg.org/multipage/scripting.html#restrictions-for-contents-of-script-elements
    finite = json.loads(json.dumps(data), parse_constant=lambda _: None)
    text = json.dumps(finite, separators=(",", ":"), allow_nan=False)
    return text.translate({ord(char): f"\\u{ord(char):04x}" for char in "<>&"})
