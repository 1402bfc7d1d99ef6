"""The tests that ``make test-modes`` skips and those with durations exist; which share runs."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from absl.testing import absltest

import schedule
from configurations import CANNOT_RUN

TESTS = Path(__file__).parent
CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
METHOD = re.compile(r"^    def (test_\w+)", re.MULTILINE)


GATE = "tests/test_a.py::test_of_a_gate"


class Item(NamedTuple):
    nodeid: str

    def get_closest_marker(self, name):
        return self.nodeid == GATE and name == "gate"


class ConfigurationsTest(absltest.TestCase):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path

    def test_what_is_skipped_exists(self):
        patterns = [
            p for reasons in CANNOT_RUN.values() for listed in reasons.values() for p in listed
        ]
        for pattern in patterns:
            file, name, *method = pattern.split("::")
            text = (TESTS / f"test_{file}").read_text(encoding="utf-8")
            if not method:
                self.assertIn(f"\ndef {name.rstrip('*')}(", text, pattern)
                continue
            classes = CLASS.split(text)[1:]
            bodies = dict(zip(classes[::2], classes[1::2], strict=True))
            if name == "*":
                continue
            self.assertIn(name, bodies, pattern)
            # Cases of a parameterized test have its name and theirs.
            start = method[0].split("*")[0]
            methods = METHOD.findall(bodies[name])
            self.assertTrue(any(start.startswith(m) or start in m for m in methods), pattern)

    def test_tests_with_durations_exist(self):
        """Names of parameterized tests go on behind those of their functions."""
        for name in json.loads(schedule.FILE.read_text(encoding="utf-8")):
            file, *_, test = name.split("::")
            found = re.findall(r"def (test_\w*)", (TESTS / f"test_{file}").read_text("utf-8"))
            self.assertTrue(any(test.startswith(x) or x.startswith(test) for x in found), name)

    def test_share_of_cases(self):
        for seconds, cases, per_case, per_test, share in (
            (0.0, 500, 0.1, 2, 1),  # new, or quick
            (9.0, 500, None, None, 1),
            (0.1, 20, 0.1, 2, 1),
            (0.1, 40, 0.1, 2, 0.5),
            (0.4, 1, 0.1, 2, 0.25),
            (0.4, 40, 0.1, 2, 0.125),
            (9.0, 10, None, 30, 1 / 3),
        ):
            found = schedule.share_of(seconds, cases, per_case, per_test)
            self.assertAlmostEqual(found, share)

    def test_draws(self):
        """The same with one seed; each case with some seed; those of a gate and new ones always."""
        with mock.patch.object(schedule, "FILE", self.file({"a.py::test_slow": 4.0})):
            drawn = [self.drawn(str(seed)) for seed in range(40)]
            self.assertEqual(drawn[3], self.drawn("3"))
        self.assertTrue(all({"tests/test_a.py::test_new", GATE} <= names for names in drawn))
        slow = Counter(name for names in drawn for name in names if "slow" in name)
        self.assertLen(slow, 8)
        self.assertBetween(slow.total() / 40, 1, 3)  # a quarter of eight, for one second each

    def drawn(self, seed):
        names = [f"tests/test_a.py::test_slow[{i}]" for i in range(8)]
        items = [Item(name) for name in (*names, "tests/test_a.py::test_new", GATE)]
        config = mock.MagicMock()
        config.option.seconds_per_case, config.option.seconds_per_test = 1.0, None
        schedule.select(config, items, seed)
        return {item.nodeid for item in items}

    def test_recorded_durations(self):
        file = self.file({"a.py::test_same": 1.0, "a.py::test_more": 1.0, "a.py::test_other": 5.0})
        with mock.patch.object(schedule, "FILE", file):
            recorder = schedule.Recorder()
            for name, seconds in {
                "same": 1.2,
                "more[1]": 2.0,
                "more[2]": 4.0,
                "quick": 0.01,
            }.items():
                report = mock.Mock(nodeid=f"tests/test_a.py::test_{name}", duration=seconds)
                report.skipped = False
                recorder.pytest_runtest_logreport(report)
            recorder.pytest_sessionfinish()
        found = json.loads(file.read_text())
        want = {"a.py::test_same": 1.0, "a.py::test_more": 3.0, "a.py::test_other": 5.0}
        self.assertEqual(found, want)

    def file(self, durations):
        path = self.folder / "durations.json"
        path.write_text(json.dumps(durations))
        return path

    def test_core_tests_exist(self):
        makefile = TESTS.with_name("Makefile").read_text(encoding="utf-8")
        names = " ".join(re.findall(r"^CORE [+:]= (.*)$", makefile, re.MULTILINE)).split()
        self.assertGreater(len(names), 10)
        for name in names:
            self.assertTrue((TESTS / f"test_{name}.py").exists(), name)
