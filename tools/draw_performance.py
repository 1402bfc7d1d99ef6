"""Puts the figures of the last run of ``python -m benchmarks`` into README and documentation.

Those of ``python -m benchmarks.growth`` as well.

``python tools/draw_performance.py`` writes the parts of the pages between two marks, and the plots
in ``docs/images``, for which it needs matplotlib. With ``--check`` it only fails if the parts are
not of that run.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for the benchmarks

from benchmarks.growth import HEAD, line  # noqa: E402

IMAGES, RESULTS = ROOT / "docs/images", ROOT / "benchmarks/results"
PAGES = [ROOT / name for name in ("README.md", "docs/index.md", "docs/performance.md")]
# Those of one line are within a sentence.
PART = re.compile(r"<!-- figures: (\w+) -->(.*?)<!-- end of figures -->", re.DOTALL)
FLOOR, OURS = "jax.jit on flat arrays", "nnx_sharding.jit"
OUR_SHARD_MAP = "nnx_sharding.jit(nnx_sharding.shard_map)"
COLUMNS = {
    "forward32": "forward, 32 blocks",
    "configured_dataclass": "configured by dataclasses",
    "forward1": "forward, 1 block",
    "train8": "training step",
    "sharded32": "forward, 8 devices",
}
OTHERS = {
    "configured_frozen_dataclass": "32 blocks, each with a frozen dataclass",
    "deep_320_bare": "320 blocks, 1,921 Variables",
    "deep_1280_bare": "1,280 blocks, 7,681 Variables",
    "new_models": "another model of the same structure at each call",
    "lowering_training64": "trace and lower a training step of 64 blocks",
    "first_call": "the first call of a function that does nearly nothing, 7,681 Variables",
    "pure_python_32": "without the C extension: 32 blocks",
}
PEERS = {"forward32": "o", "forward1": "s", "train8": "D", "sharded32": "^"}
GROWTH = {"forward1": 7, "forward32": 193, "deep_320_bare": 1921, "deep_1280_bare": 7681}
# Legible on light and on dark pages.
GREY, BLUE, ORANGE = "#6e7b89", "#2f81f7", "#d9730d"
OTHER_WAYS = ("#a371f7", "#2da44e", "#84920a", "#db61a2", "#6e7b89", "#1b9e9e")

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "nnx_sharding",  # the same file from the same figures
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), GREY),
    **dict.fromkeys(("xtick.color", "ytick.color", "grid.color"), GREY),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


def main() -> None:
    """Checks or writes the parts of the pages, and writes the plots."""
    paths = RESULTS.glob("2*.json")  # their names begin with the date
    runs = {path: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    if not runs:
        sys.exit(f"no run in {RESULTS}")
    last, found = max(runs.items(), key=lambda run: run[1]["machine"]["date"])
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    written = {
        page: PART.sub(lambda part: filled(part, found), text) for page, text in texts.items()
    }
    if sys.argv[1:] == ["--check"]:
        stale = [str(page.relative_to(ROOT)) for page in PAGES if texts[page] != written[page]]
        sys.exit(f"{', '.join(stale)}: not of {last.name}; run {__file__}" if stale else 0)
    for page, text in written.items():
        page.write_text(text, encoding="utf-8")
    rows = found["rows"]
    ways = sorted(rows["forward32"]["figures"], key=lambda way: median(rows, "forward32", way) or 0)
    draw_peers(rows, ways)
    draw_growth(rows, ways)
    draw_first_call(rows)


def filled(part: re.Match[str], found: dict[str, Any]) -> str:
    """A part of a page with the figures of a run."""
    text = PARTS[part[1]](found)
    text = f"\n\n{text}\n\n" if "\n" in text else f" {text} "
    return f"<!-- figures: {part[1]} -->{text}<!-- end of figures -->"


def calls(found: dict[str, Any]) -> str:
    """The tables of ways to call a model."""
    rows = found["rows"]
    ways = sorted(rows["forward32"]["figures"], key=lambda way: median(rows, "forward32", way) or 0)
    lines = [described(found["machine"]), ""]
    lines += table("× floor, in a loop", rows, ways, "_loop")
    lines += table("× floor, after other work", rows, [FLOOR, OURS], "")  # the picture has the rest
    return "\n".join(lines[:-1])


def others(found: dict[str, Any]) -> str:
    """The rows that `calls` leaves out, as multiples of the floor."""
    rows, lines = found["rows"], ["| × floor | in a loop | after other work |", "|---|---:|---:|"]
    for name, title in OTHERS.items():
        times = [ratio(rows, row, OURS) if row in rows else None for row in (f"{name}_loop", name)]
        cells = ["" if value is None else f"{value:.2f}" for value in times]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shard_maps(found: dict[str, Any]) -> str:
    """The table of all ways to call a `shard_map`."""
    rows = found["rows"]
    lines = [
        "| tensor-parallel MLP on 8 devices, × floor | in a loop | after other work |",
        "|---|---:|---:|",
    ]
    for way in rows["shard_map_mlp"]["figures"]:
        if "graph=False" in way:  # two more ways of Flax, no faster than those that are shown
            continue
        cells = " | ".join(cell(rows, row, way) for row in ("shard_map_mlp_loop", "shard_map_mlp"))
        name = f"**{way}**" if way == OUR_SHARD_MAP else way
        lines.append(f"| {name} | {cells} |")
    if later := found.get("later"):  # what was measured again after the run
        where = f"{later['date']} at commit {later['commit']}, load {later['load']}"
        lines += ["", f"Measured on {where}."]
    return "\n".join(lines)


def overhead(found: dict[str, Any]) -> str:
    """The one number of the first page: a call of 193 Variables, as a multiple of the floor."""
    return f"{ratio(found['rows'], 'forward32_loop', OURS):.2f}"


def median(rows: dict[str, Any], row: str, way: str) -> float | None:
    """The median of one way; None where it was not measured."""
    return rows[row]["figures"].get(way, {}).get("median")


def ratio(rows: dict[str, Any], row: str, way: str) -> float | None:
    """The median as a multiple of the floor."""
    value, floor = median(rows, row, way), median(rows, row, rows[row]["floor"])
    return None if value is None or floor is None else value / floor


def described(machine: dict[str, Any]) -> str:
    """What was measured, when and where."""
    packages = ", ".join(f"{name} {machine[name]}" for name in ("jax", "flax", "equinox"))
    return (
        f"Measured on {machine['date']} at commit {machine['commit']}: {machine['cores']} cores of "
        f"{machine['cpu']}, {machine['devices']}, Python {machine['python']}, {packages}, load "
        f"{machine['load']}{'' if machine['idle'] else ': the machine was not idle'}."
    )


def table(title: str, rows: dict[str, Any], ways: list[str], suffix: str) -> list[str]:
    """One line for each way, for the rows whose names end with a suffix."""
    names = [name for name in COLUMNS if name + suffix in rows]
    lines = [f"| {title} | {' | '.join(COLUMNS[name] for name in names)} |"]
    lines.append("|---" + "|---:" * len(names) + "|")
    for way in ways:
        cells = " | ".join(cell(rows, name + suffix, way) for name in names)
        lines.append(f"| {f'**{way}**' if way == OURS else way} | {cells} |")
    return [*lines, ""]


def cell(rows: dict[str, Any], row: str, way: str) -> str:
    """One median as a multiple of the floor, whose own is in µs."""
    value, times = median(rows, row, way), ratio(rows, row, way)
    if value is None or times is None:
        return "–"  # noqa: RUF001, a dash in a table
    if way == rows[row]["floor"]:
        return f"{number(value)}µs"
    return f"{times:.2f}" if times < 10 else f"{times:.0f}"


def number(value: float) -> str:
    """Two or more digits."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def growth(_: dict[str, Any]) -> str:
    """The table of ``python -m benchmarks.growth``."""
    found = json.loads((RESULTS / "growth.json").read_text(encoding="utf-8"))
    lines = [line(row).split(" | ") for case in found.values() for row in case["rows"]]
    rows = [" | ".join(lines[0])]
    for before, cells in itertools.pairwise(lines):
        # Where several peers are compared with one program, its sizes and times are shown once.
        repeated = [i for i in (2, 3) if cells[i] == before[i]]
        rows.append(" | ".join("" if i in repeated else cell for i, cell in enumerate(cells)))
    first = next(iter(found.values()))["machine"]
    others: dict[str, list[str]] = {}  # of later runs: how they differ → their cases
    for name, case in found.items():
        machine = case["machine"]
        if machine != first:
            text = f"{machine['date']} at commit {machine['commit']}, load {machine['load']}"
            others.setdefault(text, []).append(f"`{name}`")
    texts = [described(first), *(f"{', '.join(names)}: {text}." for text, names in others.items())]
    return "\n".join([HEAD, *rows, "", "\n\n".join(texts)])


PARTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "calls": calls,
    "others": others,
    "shard_map": shard_maps,
    "overhead": overhead,
    "growth": growth,
}


def draw_peers(rows: dict[str, Any], ways: list[str]) -> None:
    """Each way as a multiple of the floor."""
    figure, axes = subplots(figsize=(4, 3.4))
    axes.set_xscale("log")
    colours = [BLUE if way == OURS else GREY for way in ways]
    for row, marker in PEERS.items():
        axes.scatter([], [], marker=marker, color=GREY, label=COLUMNS[row])
        points = [(ratio(rows, row, way), y) for y, way in enumerate(ways)]
        for (times, y), colour in zip(points, colours, strict=True):
            if times is not None:
                axes.scatter(times, y, marker=marker, color=colour, s=34, alpha=0.8, zorder=2)
    axes.axvline(1, color=GREY, lw=1)
    axes.set_yticks(range(len(ways)), ways)
    axes.get_yticklabels()[ways.index(OURS)].set(color=BLUE, fontweight="bold")
    axes.set_xticks([1, 2, 5, 10, 20, 50], ["1×", "2×", "5×", "10×", "20×", "50×"])
    axes.minorticks_off()
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.set_xlabel("multiple of jax.jit on flat arrays")
    axes.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.3, -0.16))
    save(figure, "peers")


def draw_growth(rows: dict[str, Any], ways: list[str]) -> None:
    """Growth with the number of Variables."""
    figure, axes = subplots(figsize=(4, 3))
    colours = iter(OTHER_WAYS)
    for way in ways:
        points = [(n, median(rows, row, way)) for row, n in GROWTH.items()]
        known = [(n, value) for n, value in points if value is not None]
        if len(known) > 1:
            style = {OURS: (BLUE, 3), FLOOR: (ORANGE, 1.5)}.get(way) or (next(colours), 1)
            axes.loglog(*zip(*known, strict=True), "o-", label=way, color=style[0], lw=style[1])
    axes.set(xlabel="Variables", ylabel="µs until a call returns")
    axes.grid()
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.16))
    save(figure, "growth")


def draw_first_call(rows: dict[str, Any]) -> None:
    """The first call of a function that does nearly nothing."""
    figures = {way: median(rows, "first_call", way) for way in (FLOOR, OURS, "nnx.jit")}
    seconds = {way: value / 1e6 for way, value in figures.items() if value is not None}
    figure, axes = subplots(figsize=(4, 1.3))
    bars = axes.barh(list(seconds), list(seconds.values()), color=[ORANGE, BLUE, GREY])
    axes.bar_label(bars, fmt=" %.2g s")
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    save(figure, "first_call")


def subplots(**options: Any) -> Any:
    """A figure with axes."""
    import matplotlib.pyplot as plt

    plt.rcParams.update(STYLE)
    return plt.subplots(**options)


def save(figure: Any, name: str) -> None:
    """Writes one plot."""
    figure.savefig(
        IMAGES / f"{name}.svg", bbox_inches="tight", transparent=True, metadata={"Date": None}
    )


if __name__ == "__main__":
    main()
