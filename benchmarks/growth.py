"""How costs grow with the size of a model: ``python -m benchmarks.growth [--cases a,b]``.

Each case is measured at three sizes, ours and a peer in turns in one process. Figures are the least
CPU time of several repeats, in all threads, without garbage collection: other programs on the
machine change them less than the time on a clock. The exponent is the slope of the figures over the
sizes, both as logarithms: 1 is linear, 2 quadratic. With ``--write`` the figures go to
``benchmarks/results/growth.json``, from which ``tools/draw_performance.py`` makes a table.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

DEVICES = 8
RESULT = Path(__file__).parent / "results/growth.json"
SHORT = 0.02  # seconds of CPU that a measurement takes at least, in several calls


def main() -> None:
    """Runs each case in a process of its own, and prints and writes the figures."""
    flag, flags = "--xla_force_host_platform_device_count", os.environ.get("XLA_FLAGS", "")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={DEVICES}".strip()
    from . import growth_cases, report

    names = list(growth_cases.CASES)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth")
    parser.add_argument("--cases", default=",".join(names), help=f"of {','.join(names)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="the smallest sizes, once")
    parser.add_argument("--write", action="store_true", help=f"put the figures into {RESULT.name}")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = options.cases.split(",")
    if options.child:
        print(json.dumps(measure_case(growth_cases.CASES[chosen[0]], options)))
        return
    machine = {"date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}", "idle": report.is_idle()}
    machine |= report.machine()
    print(f"{report.describe_machine(machine)}\n\n{HEAD}", flush=True)
    for name in chosen:
        command = [sys.executable, "-m", "benchmarks.growth", "--child", f"--cases={name}"]
        command += [f"--repeats={options.repeats}", *(["--smoke"] if options.smoke else [])]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        new = json.loads(out.splitlines()[-1])
        print("\n".join(map(line, new)), flush=True)
        if options.write:  # after each case, since all together may take an hour
            found = json.loads(RESULT.read_text("utf-8")) if RESULT.exists() else {}
            found |= {name: {"machine": machine, "rows": new}}
            ordered = {case: found[case] for case in names if case in found}
            text = json.dumps(ordered, indent=1, ensure_ascii=False)
            RESULT.write_text(text + "\n", encoding="utf-8")


def measure_case(case: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures all ways of a case, and compares them."""
    sizes, repeats = (case.sizes[:1], 1) if options.smoke else (case.sizes, options.repeats)
    found = [measure(case.make(size), repeats) for size in sizes]
    return [
        {
            "title": row.title,
            "peer": row.peer,
            "unit": case.unit,
            "sizes": sizes,
            "ours_s": [times[row.ours] for times in found],
            "peer_s": [times[row.peer] for times in found],
            "wanted": row.wanted,
        }
        for row in case.rows
    ]


def measure(ways: Mapping[str, Any], repeats: int) -> dict[str, float]:
    """The least seconds of CPU of each way, which take turns."""
    counts = {name: _warm_up(make) for name, make in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, make in ways.items():
            times[name].append(_time(make(), counts[name]))
    return {name: min(values) for name, values in times.items()}


def _warm_up(make: Callable[[], Callable[[], Any]]) -> int:
    """Imports and fills caches; returns how often to call what can be called again."""
    call = make()
    call()
    if make() is not call:
        return 1
    call()  # a model that is known from an earlier call is only noted in the second one
    return max(1, round(SHORT / max(_time(call, 1), 1e-6)))


def _time(call: Callable[[], Any], count: int) -> float:
    """Seconds of CPU of one of so many calls."""
    gc.collect()
    gc.disable()
    start = time.process_time()
    for _ in range(count):
        call()
    seconds = time.process_time() - start
    gc.enable()
    return seconds / count


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The power of the size with which the time grows: the slope of a line through logarithms."""
    if len(sizes) < 2:
        return math.nan
    return statistics.linear_regression([*map(math.log, sizes)], [*map(math.log, seconds)]).slope


HEAD = (
    "| CPU time of … | peer | sizes | ours, ms | × peer | wanted | exponent |\n"
    "|---|---|---|---:|---:|---:|---:|"
)


def line(row: Mapping[str, Any]) -> str:
    """One row as a line of a table."""
    ratios = [ours / peer for ours, peer in zip(row["ours_s"], row["peer_s"], strict=True)]
    cells = [
        row["title"],
        row["peer"],
        f"{', '.join(map(str, row['sizes']))} {row['unit']}",
        ", ".join(milliseconds(seconds) for seconds in row["ours_s"]),
        ", ".join(f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}" for ratio in ratios),
        row["wanted"] if isinstance(row["wanted"], str) else f"{row['wanted']:g}",
        f"{exponent(row['sizes'], row['ours_s']):.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def milliseconds(seconds: float) -> str:
    """Two or more digits, without commas between thousands: these are between values."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


if __name__ == "__main__":
    main()
