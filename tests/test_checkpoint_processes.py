"""Checkpoints of several processes, read by others; a killed training run resumes."""

from __future__ import annotations

import json
import pathlib
import random
import re
import shutil
import signal
import sys

import numpy as np
import pytest
from absl.testing import absltest

from nnx_sharding.cli.main import main

WORKER = pathlib.Path(__file__).parent / "processes" / "checkpoint.py"
sys.path.append(str(WORKER.parent))

import checkpoint  # noqa: E402
import failing_alone  # noqa: E402


class CheckpointProcessesTest(absltest.TestCase):
    @pytest.fixture(autouse=True)
    def _surroundings(self, tmp_path, capfd):
        self.folder, self.capfd = tmp_path, capfd

    def launch(self, processes, *words, worker=WORKER, devices=8, code=0, timeout=100):
        options = ["--processes", processes, "--devices-per-process", devices // processes]
        found = main(["launch", "--timeout", str(timeout), *map(str, [*options, worker, *words])])
        out, self.err = self.capfd.readouterr()
        self.assertEqual(found, code, out + self.err)
        return out

    def test_one_process_and_two(self):
        """At the end one is killed while it trains; two others resume the run, and one."""
        killed = self.folder / "killed"
        self.exchange(2, killed, code=128 + signal.SIGKILL)
        self.resume(killed, "Auto")

    def test_killed_on_explicit_axes(self):
        """The rows of :meth:`test_one_process_and_two` that train, on Explicit axes."""
        killed = self.folder / "killed"
        self.launch(2, "kill", killed, "Explicit", code=128 + signal.SIGKILL)
        self.resume(killed, "Explicit")

    def resume(self, killed, kind):
        """Two processes, and one, go on as if no process had been killed."""
        self.assertRegex(self.err, r"process 1 failed with signal 9 \(SIGKILL\), after ")
        shutil.copytree(killed, self.folder / "copy")
        out = self.launch(2, "train", self.folder / "complete", kind, killed)
        (first, want), (start, losses) = map(json.loads, re.findall(r"^\[0\] (\[.*\])$", out, re.M))
        self.assertEqual((first, len(set(want))), (0, checkpoint.STEPS))
        self.assertIn(start, (3, 4))
        self.assertEqual(losses, want[start:])
        start, losses = checkpoint.train(self.folder / "copy", kind, is_another_number=True)
        self.assertIn(start, (3, 4))
        np.testing.assert_allclose(losses, want[start:], rtol=1e-5)

    def test_one_process_and_four(self):
        self.exchange(4)

    def test_each_of_two_fails_alone(self):
        """In some operations, which are drawn."""
        cases = random.sample(sorted(failing_alone.CASES), 3)
        self.fail_alone(2, *cases)

    def test_each_of_two_fails_alone_in_each_operation(self):
        self.fail_alone(2)

    def test_each_of_four_fails_alone_in_each_operation(self):
        self.fail_alone(4)

    def test_one_fails_where_devices_or_orbax_wait(self):
        for name in failing_alone.LAST:
            for rank in range(2):
                self.fail_alone(2, name, str(rank))

    def fail_alone(self, processes, *cases):
        shutil.rmtree(self.folder / "x", ignore_errors=True)
        (self.folder / "x").mkdir()
        worker = WORKER.with_name("failing_alone.py")
        out = self.launch(processes, self.folder / "x", *cases, worker=worker, timeout=1000)
        [count, longest] = json.loads(re.search(r"^\[0\] (\[.*\])$", out, re.M)[1])
        self.assertGreaterEqual(count, len({*cases} & {*failing_alone.CASES}))
        self.assertLess(longest, failing_alone.LIMIT)

    def test_one_of_two_is_preempted_while_it_saves(self):
        """All stop after the same step, from which the run goes on."""
        start = 0
        for _ in range(2):
            out = self.launch(2, self.folder, worker=WORKER.with_name("preempted.py"))
            found = {*re.findall(r"\] preempted (\d+) (\d+)", out)}
            self.assertLen(found, 1)
            [(first, last)] = found
            self.assertEqual(int(first), start)
            start = int(last)
            self.assertGreater(start, int(first))

    def test_a_hundred_arrays_of_three(self):
        many = {"worker": WORKER.with_name("many.py"), "devices": 6}
        self.assertIn("[1] ok", self.launch(3, self.folder, **many))

    def exchange(self, processes, *words, code=0):
        """One process and several read what the others wrote."""
        checkpoint.write(self.folder / "1")
        checkpoint.read(self.folder / "1")
        shutil.copytree(self.folder / "1", self.folder / "damaged")
        checkpoint.damage(self.folder / "damaged")
        checkpoint.refuse(self.folder / "damaged")
        self.launch(processes, "exchange", self.folder, *words, code=code)
        checkpoint.read(self.folder / str(processes))
