"""Draws figures of ``python -m benchmarks --json FILE`` for ``docs/performance.md``.

``python tools/draw_performance.py FILE`` prints the tables and writes the plot of growth. It needs
matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
FLOOR, OURS = "jax.jit on flat arrays", "nnx_sharding.jit"
COLUMNS = {
    "forward32": "forward, 32 blocks",
    "configured_dataclass": "configured by dataclasses",
    "forward1": "forward, 1 block",
    "train8": "training step",
    "sharded32": "forward, 8 devices",
    "lowering_training64": "trace and lower, 64 blocks",
}
GROWTH = {"forward1": 7, "forward32": 193, "deep_320_bare": 1921, "deep_1280_bare": 7681}


def main() -> None:
    """Prints the table, and writes the plot."""
    rows: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())["rows"]
    print("| median µs (ratio to the floor; maximum) |", " | ".join(COLUMNS.values()), "|")
    print("|---" + "|---:" * len(COLUMNS) + "|")
    ways = sorted(rows["forward32"]["figures"], key=lambda way: median(rows, "forward32", way) or 0)
    for way in ways:
        cells = " | ".join(cell(rows, column, way) for column in COLUMNS)
        print(f"| {f'**{way}**' if way == OURS else way} | {cells} |")
    draw(rows, ways)


def median(rows: dict[str, Any], row: str, way: str) -> float | None:
    """The median of one way; None where it was not measured."""
    return rows[row]["figures"].get(way, {}).get("median")


def cell(rows: dict[str, Any], row: str, way: str) -> str:
    """One figure with its ratio to the floor and its maximum."""
    value, floor = median(rows, row, way), median(rows, row, FLOOR)
    if value is None or floor is None:
        return "–"  # noqa: RUF001, a dash in a table
    most = rows[row]["figures"][way]["most"]
    return f"{number(value)} ({value / floor:.2f}×; {number(most)})"


def number(value: float) -> str:
    """Three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw(rows: dict[str, Any], ways: list[str]) -> None:
    """Growth with the number of Variables."""
    figure, axes = plt.subplots(figsize=(6, 4))
    for way in ways:
        points = [(n, median(rows, row, way)) for row, n in GROWTH.items()]
        known = [(n, value) for n, value in points if value is not None]
        if len(known) > 1:
            is_ours = way == OURS
            axes.loglog(*zip(*known, strict=True), "o-", label=way, lw=3 if is_ours else 1)
    axes.set(xlabel="Variables", ylabel="µs until a call returns")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(ROOT / "docs/images/growth.svg", bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
