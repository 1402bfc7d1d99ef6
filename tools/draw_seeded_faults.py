"""Writes the table of seeded faults: ``python tools/draw_seeded_faults.py results.jsonl``.

The results are those of a run of the whole catalogue, some twenty minutes of one core:

    export SEEDED_FAULTS=results.jsonl
    python -m pytest -n 2 tests/test_seeded_faults.py
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import jax

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from faults import FAULTS, SURROUNDINGS  # noqa: E402

PAGE = ROOT / "docs/seeded_faults.md"
PART = re.compile(
    r"(?<=<!-- written by tools/draw_seeded_faults.py -->\n).*(?=<!-- end -->)", re.DOTALL
)
# Reports of faults of a kind, in JAX or elsewhere.
REPORTS = {
    "another key for replicas": "https://github.com/NVIDIA/Megatron-LM/pull/206",
    "clipped norm of a shard": "https://github.com/areal-project/AReaL/issues/312",
    "doubled sum": "https://github.com/jax-ml/jax/issues/3970",
    "mean of means": "https://github.com/huggingface/transformers/pull/34191",
    "missing sum": "https://github.com/NVIDIA/Megatron-LM/issues/1446",
    "normalization over a shard": "https://github.com/google/flax/issues/319",
    "one key for all shards": "https://github.com/huggingface/accelerate/issues/114",
    "order of shards": "https://github.com/NVIDIA-NeMo/Automodel/pull/1324",
    "position in a shard": "https://github.com/NVIDIA-NeMo/Automodel/pull/3544",
    "scaled auxiliary loss": "https://github.com/NVIDIA/Megatron-LM/pull/5047",
    "statistics of a shard": "https://github.com/google/flax/issues/877",
    "wrong divisor": "https://github.com/verl-project/verl/pull/3332",
}


Cell = dict[str, Any]  # what the test writes of one program


class Counts:
    """Of some programs: how many are faulty, caught, named, right, and alarms."""

    def __init__(self, cells: list[Cell]):
        """Counts cells."""
        wrong = [cell for cell in cells if cell["is_wrong"]]
        self.wrong, self.right = len(wrong), len(cells) - len(wrong)
        self.caught = sum(bool(cell["text"]) for cell in wrong)
        self.named = sum(cell["is_named"] for cell in wrong)
        self.alarms = sum(bool(cell["text"]) for cell in cells if not cell["is_wrong"])


def exception_of(fault: Any, counts: Counts) -> str:
    """Returns a fault with what finds it and its figures, where they are not the rule; else "".

    The rule is that `assert_same` finds it everywhere, names the place, and raises no alarm.
    """
    notes = [] if fault.tool == "assert_same" else [f"`{fault.tool}`"]
    if counts.caught < counts.wrong:
        notes.append(f"{counts.caught} of {counts.wrong} caught")
    if counts.named < counts.caught:
        notes.append(f"{counts.named} of {counts.caught} places named")
    if counts.alarms:
        notes.append(f"{counts.alarms} of {counts.right} right programs raise an alarm")
    return f"{fault.name} ({', '.join(notes)})" if notes else ""


def is_complete(name: str, cells: list[Cell]) -> bool:
    """Returns whether all programs of a fault have run."""
    return sum(cell["name"] == name for cell in cells) == 2 * len(SURROUNDINGS)


def table_of(cells: list[Cell]) -> str:
    """Returns the sums, and a row for each kind of faults."""
    measured = {name for name in FAULTS if is_complete(name, cells)}
    cells = [cell for cell in cells if cell["name"] in measured]
    faults = [fault for name, fault in FAULTS.items() if name in measured]
    kinds: dict[str, list[str]] = {}
    for fault in sorted(faults, key=lambda fault: fault.kind):
        counts = Counts([cell for cell in cells if cell["name"] == fault.name])
        kinds.setdefault(fault.kind, []).append(exception_of(fault, counts))
    reported = [f"[{kind}]({REPORTS[kind]})" for kind in kinds if kind in REPORTS]
    lines = [f"Reported elsewhere: {', '.join(reported)}.", "", "Exceptions:", ""]
    lines += [f"- {text}" for texts in kinds.values() for text in texts if text]
    total = Counts(cells)
    minutes = sum(cell["seconds"] for cell in cells) / 60
    missing = len(FAULTS) - len(measured)
    rest = f"{missing} further faults had not run everywhere." if missing else ""
    head = [
        f"{len(faults)} faults of {len(kinds)} kinds, in {len(SURROUNDINGS)} surroundings:",
        f"{total.caught} of {total.wrong} faulty programs are caught",
        f"({total.caught / total.wrong:.1%}), the place is named in {total.named}",
        f"({total.named / total.wrong:.1%}), and of {total.right} right programs {total.alarms}",
        f"raise an alarm. Measured on {datetime.date.today()}: jax {jax.__version__},",
        f"8 virtual CPU devices, {minutes:.0f} minutes of one core.",
        rest,
    ]
    return "\n".join([*filter(None, head), "", *lines, ""])


def main() -> None:
    """Reads the results, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    lines = parser.parse_args().results.read_text().splitlines()
    latest = {(c["name"], c["around"], c["is_wrong"]): c for c in map(json.loads, lines)}
    table = table_of([cell for cell in latest.values() if cell["name"] in FAULTS])
    PAGE.write_text(PART.sub(lambda _: table, PAGE.read_text()))
    print(table)


if __name__ == "__main__":
    main()
