"""The tests that ``make test-modes`` skips or `schedule` marks exist, and the files of ``CORE``."""

from __future__ import annotations

import re
from pathlib import Path

from absl.testing import absltest

import schedule
from configurations import CANNOT_RUN

TESTS = Path(__file__).parent
CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
METHOD = re.compile(r"^    def (test_\w+)", re.MULTILINE)


class ConfigurationsTest(absltest.TestCase):
    def test_what_is_skipped_exists(self):
        patterns = [
            p for reasons in CANNOT_RUN.values() for listed in reasons.values() for p in listed
        ]
        for pattern in patterns:
            file, name, *method = pattern.split("::")
            text = (TESTS / f"test_{file}").read_text(encoding="utf-8")
            classes = CLASS.split(text)[1:]
            bodies = dict(zip(classes[::2], classes[1::2], strict=True))
            if name == "*":
                continue
            self.assertIn(name, bodies, pattern)
            # Cases of a parameterized test have its name and theirs.
            start = method[0].split("*")[0]
            methods = METHOD.findall(bodies[name])
            self.assertTrue(any(start.startswith(m) or start in m for m in methods), pattern)

    def test_what_is_scheduled_exists(self):
        names = [*schedule.GATE, *schedule.NIGHTLY]
        self.assertLen(set(names), len(names))
        for name in (*names, *schedule.DRAWN, *schedule.NIGHT):
            file, *_, test = name.split("::")
            text = (TESTS / f"test_{file}").read_text(encoding="utf-8")
            if test.startswith("test_page["):
                page = TESTS.parent / test.removeprefix("test_page[").removesuffix("]")
                self.assertTrue(page.exists(), name)
            found = re.findall(r"def (test_\w*)", text)
            self.assertTrue(any(test.startswith(x) for x in found) or not test, name)

    def test_core_tests_exist(self):
        makefile = TESTS.with_name("Makefile").read_text(encoding="utf-8")
        names = " ".join(re.findall(r"^CORE [+:]= (.*)$", makefile, re.MULTILINE)).split()
        self.assertGreater(len(names), 10)
        for name in names:
            self.assertTrue((TESTS / f"test_{name}.py").exists(), name)
