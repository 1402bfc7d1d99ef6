"""What was measured as tables for people and as JSON."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from .measure import Figure, Figures, Unavailable

IDLE = 0.3  # of the load


class Target(NamedTuple):
    """How two figures of a row should compare; ``must`` has to be kept, ``aim`` is better yet.

    Attributes:
      other: the name of the figure that ours is compared with, which may be another of ours.
      must: the bound.
      aim: a stricter one.
      is_peer: whether ours should be so many times faster, and not at most so many times slower.
    """

    other: str
    must: float
    aim: float | None
    is_peer: bool

    def ratio(self, row: Row) -> float | None:
        """The figure that has the bounds; None where one of both could not be measured."""
        ours, other = row.median(row.ours), row.median(self.other)
        if ours is None or other is None:
            return None
        return other / ours if self.is_peer else ours / other

    def is_met(self, ratio: float, bound: float) -> bool:
        return ratio >= bound if self.is_peer else ratio <= bound


def at_most(must: float, aim: float, of: str) -> Target:
    """Ours takes at most so many times as long."""
    return Target(of, must, aim, is_peer=False)


def faster(must: float, than: str) -> Target:
    """Ours is at least so many times as fast."""
    return Target(than, must, None, is_peer=True)


class Row(NamedTuple):
    """One figure, of all ways to get it.

    Attributes:
      name: its name, for JSON and the list of targets.
      title: what it is.
      unit: of all figures.
      figures: by the name of the way.
      floor: the name of the way that ratios refer to, if there is one.
      ours: the name of that of this library.
      targets: what ours should be.
      not_peers: other ways that ours does not have to beat.
    """

    name: str
    title: str
    unit: str
    figures: Figures
    floor: str | None
    ours: str
    targets: tuple[Target, ...] = ()
    not_peers: tuple[str, ...] = ()

    def median(self, name: str | None) -> float | None:
        """One figure; None where there is none, or where it drowned in noise."""
        figure = self.figures.get(name)
        return figure.median if isinstance(figure, Figure) and figure.median > 0 else None

    def peers(self) -> Iterator[tuple[str, Figure]]:
        """What ours is compared with, as far as it was measured."""
        for name, figure in self.figures.items():
            own = name in (self.floor, self.ours, *self.not_peers)
            if not own and isinstance(figure, Figure):
                yield name, figure


def commit() -> str:
    """The commit of the working tree, and whether that was changed."""
    git = ["git", "-C", str(Path(__file__).parent)]
    found = [
        subprocess.run([*git, *command], capture_output=True, text=True, check=False).stdout.strip()
        for command in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "-uno"))
    ]
    return f"{found[0] or 'unknown'}{' with changes' if found[1] else ''}"


def machine() -> dict[str, Any]:
    """What ran the benchmark."""
    packages = ("jax", "jaxlib", "flax", "equinox", "optax", "numpy", "nnx_sharding")
    devices = jax.devices()
    return {
        "commit": commit(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "devices": f"{len(devices)} × {devices[0].platform} ({devices[0].device_kind})",
        "python": platform.python_version(),
        **{package: _version(package) for package in packages},
        "load": load(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def is_idle() -> bool:
    """Whether nothing else was running in the last minute."""
    return os.getloadavg()[0] < IDLE


def load() -> str:
    return ", ".join(f"{load:.1f}" for load in os.getloadavg())


def describe_machine(found: dict[str, Any]) -> str:
    return "\n".join(f"{name:13} {value}" for name, value in found.items())


def table(row: Row, mark: str = "") -> str:
    """A row as a table with one line for each way, and the targets below.

    ``mark`` is before each median, if the machine was not idle.
    """
    lines = [
        f"\n{row.name}: {row.title}",
        f"  {'':44} {row.unit:>11} {'maximum':>9} {'× floor':>8} {'+ floor':>9} "
        f"{'× ours':>8} {'repeats':>8}",
    ]
    lines += [f"  {name:44} {_cells(row, figure, mark)}" for name, figure in row.figures.items()]
    lines += [f"  {line}" for line in _verdicts(row)]
    return "\n".join(lines)


def _cells(row: Row, figure: Figure | Unavailable, mark: str) -> str:
    if isinstance(figure, Unavailable):
        return f"n/a ({figure.reason})"
    to_floor, to_ours = (_ratio(figure.median, row.median(x)) for x in (row.floor, row.ours))
    figures = f"{mark + _number(figure.median):>11} {_number(figure.most):>9}"
    floor = row.median(row.floor)
    more = "-" if floor is None else _number(figure.median - floor)
    return f"{figures} {to_floor} {more:>9} {to_ours} {figure.repeats:>8}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:,.2f}"


def _ratio(value: float, other: float | None) -> str:
    return f"{'-' if other is None else f'{value / other:.2f}':>8}"


def _verdicts(row: Row) -> Iterator[str]:
    for target in row.targets:
        ratio = target.ratio(row)
        if ratio is None:
            yield f"{target.other}: cannot be compared with"
            continue
        sign = "≥" if target.is_peer else "≤"
        what = f"× faster than {target.other}" if target.is_peer else f"× {target.other}"
        must = f"must {sign} {target.must:g}: {_yes(target.is_met(ratio, target.must))}"
        aim = ""
        if target.aim is not None:
            aim = f", aim {sign} {target.aim:g}: {_yes(target.is_met(ratio, target.aim))}"
        yield f"{ratio:.2f} {what}; {must}{aim}"


def _yes(is_met: bool) -> str:
    return "met" if is_met else "NOT MET"


def summary(rows: Sequence[Row]) -> str:
    """All targets, and whether any peer was faster than ours."""
    lines = ["\ntargets"]
    lines += [f"  {row.name:14} {line}" for row in rows for line in _verdicts(row)]
    slower = faster_peers(rows)
    count = sum(len(list(row.peers())) for row in rows)
    verdict = (
        f"no, not in {len(slower)} of {count} comparisons" if slower else f"yes, {count} of {count}"
    )
    lines.append(f"\nfaster than every peer on every row: {verdict}")
    lines += [f"  {row}: {peer} takes {ratio:.2f} × ours" for row, peer, ratio in slower]
    return "\n".join(lines)


def faster_peers(rows: Sequence[Row]) -> list[tuple[str, str, float]]:
    """The rows and peers where ours is not the faster one, and the peer's time over ours."""
    return [
        (row.name, name, figure.median / ours)
        for row in rows
        if (ours := row.median(row.ours))
        for name, figure in row.peers()
        if figure.median <= ours
    ]


def as_json(rows: Sequence[Row], found: dict[str, Any]) -> dict[str, Any]:
    return {
        "machine": found,
        "rows": {row.name: _row_json(row) for row in rows},
        "faster_peers": faster_peers(rows),
    }


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "title": row.title,
        "unit": row.unit,
        "floor": row.floor,
        "ours": row.ours,
        "figures": {name: figure._asdict() for name, figure in row.figures.items()},
        "targets": [_target_json(target, row) for target in row.targets],
    }


def _target_json(target: Target, row: Row) -> dict[str, Any]:
    ratio = target.ratio(row)
    bounds = {"must": target.must, "aim": target.aim}
    met = {
        f"{kind}_is_met": None if ratio is None or bound is None else target.is_met(ratio, bound)
        for kind, bound in bounds.items()
    }
    return {**target._asdict(), "ratio": ratio, **met}
