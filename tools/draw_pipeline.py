"""Draws one call, from the first sentences of the files that it goes through.

``python tools/draw_pipeline.py`` writes ``docs/images/pipeline.svg``; a test compares that file
with what the code says now.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "pipeline.svg"
_PACKAGE = ROOT / "nnx_sharding"


class Stage(NamedTuple):
    """A box of the picture: its name, its files, the first of which describes it."""

    name: str
    files: tuple[str, ...]


FIRST = Stage("call", ("transforms/lifted.py",))
GUARD_FILES = (*("store.py", "guard.py", "recipe.py", "recorder.py", "walk_order.py", "walk.py"),)
GUARD_IN_C = ("native.py", "walk.c", "direct.py", "call.c")
GUARD = Stage("guard", tuple(f"guard/{name}" for name in (*GUARD_FILES, *GUARD_IN_C)))
SLOW_WAY = (
    Stage("signature", ("signature.py",)),
    Stage(
        "flatten",
        (
            "flatten.py",
            "flattener.py",
            "attributes.py",
            "recording.py",
            "structure.py",
            "treedefs.py",
            "static_equality.py",
            "static_parts.py",
            "static_children.py",
            "hijax_variables.py",
            "snapshot.py",
        ),
    ),
    Stage("specs", ("prefixes.py", "argument_specs.py", "arguments.py", "static_arguments.py")),
    Stage("resolve", ("locations.py", "resolve.py", "filter_uses.py", "spec_checks.py")),
    Stage("plan", ("plan.py", "static_places.py", "transform.py", "retyping.py", "cache.py")),
    Stage(
        "trace",
        (
            "pure.py",
            "functions.py",
            "call_context.py",
            "trace_checks.py",
            "known_faults.py",
            "outcome.py",
        ),
    ),
)
LAST = (
    Stage(
        "run",
        (
            "call.py",
            "declared.py",
            "interrupts.py",
            "in_c.py",
            "in_flight.py",
            "place.py",
            "moves.py",
            "constrain.py",
        ),
    ),
    Stage("write-back", ("unflatten.py", "rebuild.py")),
)
# Not on the way of a call of `jit`: what is reported when something is wrong, guards outside of
# calls, and whether a trace of another transform is used again.
BESIDE = (
    *("bounded.py", "compiled_mismatches.py", "convolutions.py"),
    *(
        "failures.py",
        "checks.py",
        "listing.py",
        "stateless.py",
        "memory.py",
        "problems.py",
        "fingerprint.py",
    ),
    *("tree_shardings.py", "guard/known.py"),
)

# Narrow enough for the text to be legible on a phone.
_WIDTH, _LEFT, _BOX, _GAP, _LINE = 620, 8, 470, 24, 17
_WRAP, _WRAP_FILES = 66, 62  # characters of a line
_STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", Arial, sans-serif; fill: #24292f }
  .name { font-weight: 650; font-size: 15px }
  .file { font-family: ui-monospace, SFMono-Regular, Menlo, monospace; font-size: 11.5px }
  .file, .note { fill: #57606a }
  rect { fill: #f6f8fa; stroke: #d0d7de; rx: 8px }
  .hot rect { fill: #ddf4ff; stroke: #54aeff }
  path { fill: none; stroke: #8c959f; stroke-width: 1.6 }
  path.short { stroke: #218bff; stroke-width: 2.4 }
  .head { fill: #8c959f; stroke: none } .head.short { fill: #218bff; stroke: none }
  text.short { fill: #0969da; font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .file, .note { fill: #8b949e }
    rect { fill: #161b22; stroke: #30363d } .hot rect { fill: #0c2d6b; stroke: #1f6feb }
    path { stroke: #6e7681 } .head { fill: #6e7681 }
    path.short { stroke: #58a6ff } .head.short { fill: #58a6ff } text.short { fill: #58a6ff }
  }
"""


def _path(file: str) -> Path:
    in_core = _PACKAGE / "core" / file
    return in_core if in_core.exists() else _PACKAGE / file


def sentence(file: str) -> str:
    """The first line of a file's docstring as plain text."""
    text = ast.get_docstring(ast.parse(_path(file).read_text(encoding="utf-8"))) or ""
    plain = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", text.splitlines()[0])
    return plain.replace("``", "").rstrip(".")


def picture() -> str:
    """The picture as SVG."""
    stages = [FIRST, GUARD, *SLOW_WAY, *LAST]
    hot = {FIRST, GUARD, *LAST}
    heights = [_height(stage) for stage in stages]
    ends = itertools.accumulate(heights, lambda end, height: end + _GAP + height, initial=-8)
    *starts, height = (end + _GAP for end in ends)
    tops = dict(zip(stages, starts, strict=True))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img" aria-labelledby="title">',
        '<title id="title">One call through nnx_sharding.core</title>',
        f"<style>{_STYLE}</style>",
    ]
    for stage in stages:
        lines += _box(stage, tops[stage], "hot" if stage in hot else "slow")
    for above, below in itertools.pairwise(stages):
        lines += _arrow(tops[above] + _height(above), tops[below])
    middle = _LEFT + _BOX // 2
    changed = tops[GUARD] + _height(GUARD) + 16
    lines.append(f'<text class="note" x="{middle + 12}" y="{changed}">new, or changed</text>')
    lines += _shortcut(tops[GUARD], tops[LAST[0]])
    return "\n".join([*lines, "</svg>", ""])


def _texts(stage: Stage) -> tuple[list[str], list[str]]:
    """The lines below the name of a stage: what it does, and its files."""
    files = ", ".join(Path(file).name for file in stage.files)
    return textwrap.wrap(sentence(stage.files[0]), _WRAP), textwrap.wrap(files, _WRAP_FILES)


def _height(stage: Stage) -> int:
    return 34 + _LINE * sum(map(len, _texts(stage)))


def _box(stage: Stage, top: int, kind: str) -> Iterator[str]:
    yield f'<g class="{kind}">'
    yield f'<rect x="{_LEFT}" y="{top}" width="{_BOX}" height="{_height(stage)}"/>'
    yield f'<text class="name" x="{_LEFT + 14}" y="{top + 22}">{escape(stage.name)}</text>'
    does, files = _texts(stage)
    classes = ["does"] * len(does) + ["file"] * len(files)
    for row, (line, name) in enumerate(zip([*does, *files], classes, strict=True), start=1):
        y = top + 24 + _LINE * row
        yield f'<text class="{name}" x="{_LEFT + 14}" y="{y}">{escape(line)}</text>'
    yield "</g>"


def _arrow(start: int, end: int) -> Iterator[str]:
    x = _LEFT + _BOX // 2
    yield f'<path d="M{x} {start}V{end - 7}"/>'
    yield f'<path class="head" d="M{x} {end}l-5 -8h10z"/>'


def _shortcut(start: int, end: int) -> Iterator[str]:
    """What most calls do: from the guard straight to the execution."""
    x, out = _LEFT + _BOX, _LEFT + _BOX + 28
    a, b = start + 26, end + 26
    yield f'<path class="short" d="M{x} {a}H{out - 12}q12 0 12 12V{b - 12}q0 12 -12 12H{x + 8}"/>'
    yield f'<path class="head short" d="M{x} {b}l9 -6v12z"/>'
    for row, line in enumerate(("unchanged:", "every call", "but the first")):
        y = (a + b) // 2 + 16 * row
        yield f'<text class="short" x="{out + 8}" y="{y}">{line}</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    print(PICTURE.relative_to(ROOT))
    sys.exit(0)
