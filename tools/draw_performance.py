"""Puts the figures of the last run of ``python -m benchmarks`` into ``docs/performance.md``.

``python tools/draw_performance.py [WITHOUT]`` writes the tables, and the plots in ``docs/images``,
for which it needs matplotlib. WITHOUT is a file measured with ``NNX_SHARDING_PURE_PYTHON=1``. With
``--check`` it only fails if the tables of the page are not those of the last run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
IMAGES, PAGE, RESULTS = (
    ROOT / "docs/images",
    ROOT / "docs/performance.md",
    ROOT / "benchmarks/results",
)
BEGIN, END = "<!-- tables of benchmarks/results: ", "<!-- end of the tables -->"
FLOOR, OURS = "jax.jit on flat arrays", "nnx_sharding.jit"
COLUMNS = {
    "forward32": "forward, 32 blocks",
    "configured_dataclass": "configured by dataclasses",
    "forward1": "forward, 1 block",
    "train8": "training step",
    "sharded32": "forward, 8 devices",
    "lowering_training64": "trace and lower, 64 blocks",
}
PEERS = {"forward32": "o", "forward1": "s", "train8": "D", "sharded32": "^"}
GROWTH = {"forward1": 7, "forward32": 193, "deep_320_bare": 1921, "deep_1280_bare": 7681}
EXTENSION = ("forward32", "forward1", "train8")
GREY, BLUE, ORANGE = "#6e7b89", "#2f81f7", "#d9730d"  # legible on light and on dark pages

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
    """Checks or writes the tables, and writes the plots."""
    page, [last] = PAGE.read_text(), sorted(RESULTS.glob("*.json"))[-1:] or [None]
    before, _, rest = page.partition(BEGIN)
    written, _, after = rest.partition(END)
    if last is None:
        sys.exit(f"{PAGE} names a run, but there is none" if written[:4] != "none" else 0)
    found = json.loads(last.read_text())
    rows = found["rows"]
    ways = sorted(rows["forward32"]["figures"], key=lambda way: median(rows, "forward32", way) or 0)
    lines = [f"{last.name} -->", "", described(found["machine"]), ""]
    for title, suffix in (("in a loop", "_loop"), ("after other work", "")):
        lines += table(f"µs, {title}", rows, ways, suffix)
    text = "\n".join(lines)
    if sys.argv[1:] == ["--check"]:
        sys.exit(f"{PAGE} is not of {last}: run {__file__}" if written != text else 0)
    PAGE.write_text(f"{before}{BEGIN}{text}{END}{after}")
    without = [json.loads(Path(name).read_text())["rows"] for name in sys.argv[1:]]
    draw_peers(rows, ways)
    draw_growth(rows, ways)
    draw_first_call(rows)
    if without:
        draw_extension(rows, without[0])


def median(rows: dict[str, Any], row: str, way: str) -> float | None:
    """The median of one way; None where it was not measured."""
    return rows[row]["figures"].get(way, {}).get("median")


def ratio(rows: dict[str, Any], row: str, way: str) -> float | None:
    """The median as a multiple of the floor."""
    value, floor = median(rows, row, way), median(rows, row, FLOOR)
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
    """One median, with its ratio to the floor and what it is more than that."""
    value, floor = median(rows, row, way), median(rows, row, FLOOR)
    if value is None or floor is None:
        return "–"  # noqa: RUF001, a dash in a table
    return f"{number(value)} ({value / floor:.2f}×, +{number(value - floor)})"


def number(value: float) -> str:
    """Three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


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
    axes.legend(fontsize=7, loc="upper right")
    save(figure, "peers")


def draw_growth(rows: dict[str, Any], ways: list[str]) -> None:
    """Growth with the number of Variables."""
    figure, axes = subplots(figsize=(4, 3))
    for way in ways:
        points = [(n, median(rows, row, way)) for row, n in GROWTH.items()]
        known = [(n, value) for n, value in points if value is not None]
        if len(known) > 1:
            style = {OURS: (BLUE, 3), FLOOR: (ORANGE, 1.5)}.get(way, (None, 1))
            axes.loglog(*zip(*known, strict=True), "o-", label=way, color=style[0], lw=style[1])
    axes.set(xlabel="Variables", ylabel="µs until a call returns")
    axes.grid()
    axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.4, -0.18))
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


def draw_extension(rows: dict[str, Any], without: dict[str, Any]) -> None:
    """With and without the C extension, as multiples of the floor."""
    figure, axes = subplots(figsize=(4, 1.9))
    for shift, measured, colour, label in (
        (-0.2, rows, BLUE, "with the C extension"),
        (0.2, without, ORANGE, "without"),
    ):
        places = [y + shift for y in range(len(EXTENSION))]
        times = [ratio(measured, row, OURS) or 0 for row in EXTENSION]
        axes.bar_label(axes.barh(places, times, 0.36, color=colour, label=label), fmt=" %.2f×")
    axes.set_yticks(range(len(EXTENSION)), [COLUMNS[row] for row in EXTENSION])
    axes.invert_yaxis()
    axes.axvline(1, color=GREY, lw=1)
    axes.set_xlabel("multiple of jax.jit on flat arrays")
    axes.legend(fontsize=7, ncols=2, loc="lower center", bbox_to_anchor=(0.4, 1))
    save(figure, "extension")


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
