"""Runs the benchmarks: ``python -m benchmarks [--cases a,b] [--anyway]``.

Each case runs in a process of its own. The ways to do the same thing take turns there, so that a
change in the machine's speed hits all alike, and only their ratios mean something. A run of all
cases is written to ``benchmarks/results``, from which the tables of the documentation are drawn.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEVICES = 8
RESULTS = Path(__file__).parent / "results"
DESCRIPTION = "Measures what calls cost, against the least that JAX can do and against other ways."

HOW = (
    "Figures are medians: in a loop those of 15 groups of 100 calls, or of as many as take 0.3 s,\n"
    "in turns with other ways;\n"
    "after other work those of single calls, each the second of two, with all other ways between.\n"
    "What is 50 times as slow as the floor is called a tenth as often, 1000 times 3 times in all."
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
    if options.rows is not None:  # a process for one case
        rows = []
        for name in options.cases:
            for row in cases.CASES[name](sizes):
                print(report.table(row, options.mark), flush=True)
                rows.append(row)
        options.rows.write_bytes(pickle.dumps(rows))
        return
    start = time.perf_counter()
    while not report.is_idle() and not options.anyway:
        if time.perf_counter() - start > 60:
            sys.exit(
                f"the machine is not idle: a load of {report.load()}, not below {report.IDLE}. "
                "Give --anyway to measure nevertheless, with ~ before each figure."
            )
        time.sleep(1)
    mark = "" if report.is_idle() else "~"
    found = {"date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}", "idle": not mark}
    found |= report.machine()
    print(report.describe_machine(found))
    print(f"\n{HOW}", flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.cases:
            own = Path(folder, name)
            settings = [f"--cases={name}", f"--repeats={sizes.repeats}", f"--rows={own}"]
            settings += [f"--mark={mark}", *(["--smoke"] if options.smoke else [])]
            pure = {"NNX_SHARDING_PURE_PYTHON": "1"} if name == "pure_python" else {}
            command = [sys.executable, "-m", __package__, *settings]
            subprocess.run(command, check=True, env=os.environ | pure)
            rows += pickle.loads(own.read_bytes())
    print(report.summary(rows))
    found["load_after"] = report.load()
    found["seconds"] = round(time.perf_counter() - start)
    print(f"\n{found['seconds']} s; load afterwards: {found['load_after']}")
    if options.json is None and options.cases == list(cases.CASES) and not options.smoke:
        RESULTS.mkdir(exist_ok=True)
        options.json = RESULTS / f"{found['date'][:10]}-{found['commit'].split()[0]}.json"
    if options.json is not None:
        text = json.dumps(report.as_json(rows, found), indent=1, ensure_ascii=False)
        options.json.write_text(text + "\n", encoding="utf-8")
        print(f"written to {options.json}")


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
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures to this file")
    parser.add_argument(
        "--anyway", action="store_true", help="measure on a machine that is not idle, too"
    )
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--mark", default="", help=argparse.SUPPRESS)
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
