"""Which tests run where there is not time for all, and how long each takes.

A merge has minutes, and the tests take an hour. So each case gets ``--seconds-per-case``: one that
takes five times as long runs in one merge of five. Of the cases of one test function, so many run
that they take ``--seconds-per-test``. What runs is drawn anew each time, with the seed that pytest
prints: a fault that a merge does not show is found some merges later, or in the next night. Without
the options all tests run, and tests with the mark `gate` always do.

``durations.json`` has the seconds of a case of each test function. A test that is not in it is new
or quick, and runs always. ``pytest --record-durations`` writes it.
"""

from __future__ import annotations

import json
import pathlib
import random
import re
from collections import defaultdict

import pytest

FILE = pathlib.Path(__file__).with_name("durations.json")
# Of tests that take less, all cases run, so the file has no figure of them.
SHORTEST = 0.15
# Times of one test differ from run to run. A figure that is not so wrong stays: diffs are short.
TOLERANCE = 1.5


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("schedule", "which tests run")
    group.addoption("--seconds-per-case", type=float, metavar="S", help="on average, at most S")
    group.addoption("--seconds-per-test", type=float, metavar="S", help="all cases of a function")
    group.addoption("--record-durations", action="store_true", help=f"write {FILE.name}")


def function_of(nodeid: str) -> str:
    """Returns the name of the function whose case this is, without ``tests/test_`` in front.

    Cases of absl's parameterized tests are methods with a number at the end.
    """
    return re.sub(r"\d+$", "", nodeid.split("[")[0]).removeprefix("tests/test_")


def select(config: pytest.Config, items: list[pytest.Item], seed: str) -> None:
    """Deselects the tests that are not drawn."""
    per_case, per_test = config.option.seconds_per_case, config.option.seconds_per_test
    durations = json.loads(FILE.read_text(encoding="utf-8"))
    functions = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("gate"):
            functions[function_of(item.nodeid)].append(item.nodeid)
    left_out: set[str] = set()
    for name, cases in functions.items():
        share = share_of(durations.get(name, 0.0), len(cases), per_case, per_test)
        # The seed of each function is its own: another test that is added changes no other draw.
        draw = random.Random(f"{seed} {name}")
        count = int(share * len(cases) + draw.random())  # on average so many
        left_out.update(draw.sample(sorted(cases), len(cases) - count))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def share_of(seconds: float, cases: int, per_case: float | None, per_test: float | None) -> float:
    """Returns which share of the cases of a function runs, of which one takes so many seconds."""
    share = 1.0
    if seconds and per_case is not None:
        share = min(share, per_case / seconds)
    if seconds and per_test is not None:
        share = min(share, per_test / (seconds * cases))
    return share


class Recorder:
    """Measures the tests that run, and writes their times. Others keep their figures."""

    def __init__(self) -> None:
        """The process that hears of all workers has one."""
        self._seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds a phase of a test: what it sets up, its call, what it tears down."""
        if not report.skipped:
            self._seconds[function_of(report.nodeid)][report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Writes the file."""
        durations = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
        for name, cases in self._seconds.items():
            mean, before = sum(cases.values()) / len(cases), durations.get(name, 0.0)
            if mean < SHORTEST:
                durations.pop(name, None)
            elif not before / TOLERANCE < mean < before * TOLERANCE:
                durations[name] = float(f"{mean:.2g}")
        text = json.dumps(durations, indent=0, sort_keys=True)
        FILE.write_text(text + "\n", encoding="utf-8")
