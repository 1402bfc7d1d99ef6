"""Runs the benchmarks: ``python -m benchmarks [--cases a,b] [--repeats N] [--json FILE]``.

Everything is measured in one process. The ways to do the same thing take turns, so that a change
in the machine's speed hits all alike, and only their ratios mean something. Figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

DEVICES = 8
DESCRIPTION = "Measures what calls cost, against the least that JAX can do and against other ways."

HOW = (
    "Figures are medians. What is 50 times as slow as the floor is measured in each 10th repeat,\n"
    "what is 1000 times as slow 3 times."
)


def main() -> None:
    # Only the CPU heeds it; it has to be there before JAX is imported.
    flag, flags = "--xla_force_host_platform_device_count", os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={DEVICES}".strip()
    from . import cases, report

    options = _options(list(cases.CASES))
    sizes = cases.SMOKE if options.smoke else cases.Sizes()
    if options.repeats is not None:
        sizes = sizes._replace(repeats=options.repeats, few=min(sizes.few, options.repeats))
    start = time.perf_counter()
    found = report.machine()
    print(report.describe_machine(found))
    print(f"\n{HOW}", flush=True)
    rows = []
    for name in options.cases:
        for row in cases.CASES[name](sizes):
            print(report.table(row), flush=True)
            rows.append(row)
    print(report.summary(rows))
    found["load_after"] = report.load()
    found["seconds"] = round(time.perf_counter() - start)
    print(f"\n{found['seconds']} s; load afterwards: {found['load_after']}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report.as_json(rows, found), file, indent=2, ensure_ascii=False)


def _options(names: list[str]) -> Any:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=DESCRIPTION)
    parser.add_argument(
        "--cases",
        type=_list_of(names),
        default=names,
        help=f"which to run, with commas between them (default: {','.join(names)})",
    )
    parser.add_argument(
        "--repeats", type=_positive, help="how often to measure a call (default: 200)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file as well")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes, to see whether everything runs"
    )
    return parser.parse_args()


def _list_of(names: list[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        unknown = [name for name in chosen if name not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown case {', '.join(unknown)}")
        return chosen

    return parse


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


if __name__ == "__main__":
    main()
