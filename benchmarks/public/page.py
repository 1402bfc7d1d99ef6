"""The page docs/models.md, written from the results.

A result is a dict with one of ``result``, ``failed`` or ``not run``; a measure without one has not
been run. Reasons are notes below the table, each once.
"""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "public_models.json"
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- written by benchmarks/public -->\n", "<!-- end -->\n"

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]

_NUMBERS = ("Auto", "Explicit", "pipeline", "context", "experts")
_STRATEGIES = ("tensor_parallel", "fsdp")
_PODS = ("v5e-16", "v5p-8")


def load() -> dict[str, dict[str, Any]]:
    """Returns the results by model and measure."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def save(results: Results) -> None:
    """Writes the results."""
    text = json.dumps(results, indent=1, sort_keys=True)
    RESULTS.write_text(text + "\n", encoding="utf-8")


def write(results: Results) -> None:
    """Replaces the tables in the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}{tables(results)}{END}{after}", encoding="utf-8")


def tables(results: Results) -> str:
    """Returns the table and the notes, as Markdown.

    A measure that no model fails has no column: a sentence says for how many it works.
    """
    notes: list[str] = []
    failing = [
        name for name in _NUMBERS if any("failed" in m.get(name, {}) for m in results.values())
    ]
    head = ["model", "parameters", "sharded", "sent, GiB"]
    rows = [[*head, *(f"{pod}, GiB" for pod in _PODS), *failing]]
    for model, measures in sorted(results.items()):
        verdicts = (_verdict(measures.get(measure), notes) for measure in failing)
        cells = [*_figures(measures, notes), *verdicts]
        if len({*cells}) == 1:  # nothing could be run: the reason once
            cells[1:] = [""] * (len(cells) - 1)
        rows.append([_name(model), *cells])
    sentences = "".join(_summary(name, results) for name in _NUMBERS if name not in failing)
    listed = "".join(f"{i}. {note}\n" for i, note in enumerate(notes, 1))
    return f"{_table(rows)}\n{sentences}\n## Notes\n\n{listed}"


def _summary(name: str, results: Results) -> str:
    """Returns a sentence about a measure that no model fails: how many there are of each result."""
    found = [measures.get(name, {}).get("result", "not run") for measures in results.values()]
    counts = collections.Counter(found).most_common()
    return f"- {name}: {', '.join(f'{count} × {text}' for text, count in counts)}.\n"


def _name(model: str) -> str:
    source, _, name = model.partition(" ")
    return f"{name} ({source})"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    ruled = [head, ["---", *["--:"] * (len(head) - 1)], *body]
    return "".join(f"| {' | '.join(row)} |\n" for row in ruled)


def _figures(measures: Mapping[str, Mapping[str, Any]], notes: list[str]) -> list[str]:
    """Returns the cells of a model that are no verdicts."""
    shares = measures.get("shares", {})
    if "result" not in shares:
        cells = [_verdict(shares, notes)] * 2
    else:
        values = shares["result"]
        less = min(_STRATEGIES, key=values.__getitem__)
        reasons = [values.get(f"{strategy} reason") for strategy in _STRATEGIES]
        marks = "".join(f" [{_note(reason, notes)}]" for reason in filter(None, reasons))
        cells = [_count(values["parameters"]), f"{100 * values[less]:.1f}%{marks}"]
    sent = measures.get("bytes")
    if sent and "result" in sent:
        ours, authors = sent["result"]["ours"], sent["result"].get("authors")
        cells.append(_gib(ours) + (f" ({ours / authors:.2f}×)" if authors else ""))
    else:
        cells.append(_verdict(sent, notes))
    return [*cells, *_memory(measures.get("memory"), notes)]


def _memory(memory: Mapping[str, Any] | None, notes: list[str]) -> list[str]:
    """Returns the cells of a model's memory; ✗ is more than a chip has."""
    cells = []
    for pod in _PODS:
        value = memory["result"].get(pod) if memory and "result" in memory else None
        if isinstance(value, dict):
            cells.append(_gib(value["bytes"]) + ("" if value["fits"] else " ✗"))
        else:
            cells.append(_verdict({"failed": value} if value else memory, notes))
    return cells


def _verdict(result: Mapping[str, Any] | None, notes: list[str]) -> str:
    """Returns ✓, or ✗ and the number of a note."""
    if not result:
        return "not run"
    if result.get("result") == "works":
        return "✓"
    if "result" in result:
        return f"[{_note(str(result['result']), notes)}]"
    if "failed" in result:
        return f"✗ [{_note(result['failed'], notes)}]"
    return f"not run [{_note(result['not run'], notes)}]"


def _note(text: str, notes: list[str]) -> int:
    """Returns the number of a note: the first sentence of a text, which is added if it is new.

    What follows in an error is about details of the model, and how to write it otherwise. Of
    several places, ``…: first: 3 layers second: 3 layers``, only the first is shown.
    """
    text = text.split(". ")[0].partition("; compared with")[0]
    text = re.sub(r"(: \S+: \d+ layers) .*", r"\1, …", text)
    text = re.sub(r"^ValueError: |\.$", "", text).replace("|", "\\|").replace("<", "&lt;")
    if text not in notes:
        notes.append(text)
    return notes.index(text) + 1


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f}"
