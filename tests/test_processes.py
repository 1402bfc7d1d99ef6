"""Several processes: the launcher, and the library in them."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from models import mesh_of
from nnx_sharding.cli.main import main
from nnx_sharding.testing import launch, worker
from nnx_sharding.testing.launcher import DEVICE_COUNT, environment_of, reserve_port
from nnx_sharding.testing.output import Output

WORKERS = Path(__file__).parent / "processes"
PREAMBLE = """
import os, signal, subprocess, sys, time

rank = int(os.environ["SLURM_PROCID"])
"""
QUICK = 15  # seconds within which a launch has to end

linux = pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads /proc")


def running(text):
    """The processes that have a text in their command line."""
    processes = []
    for folder in Path("/proc").iterdir():
        try:
            words, state = (folder / "cmdline").read_bytes(), (folder / "stat").read_text()
        except OSError:
            continue
        if folder.name.isdigit() and text.encode() in words and ") Z" not in state:
            processes.append(int(folder.name))
    return [process for process in processes if process != os.getpid()]


def ended(text, seconds=QUICK):
    """Whether no such process is left after a while."""
    deadline = time.monotonic() + seconds
    while running(text) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not running(text)


class Case(parameterized.TestCase):
    @pytest.fixture(autouse=True)
    def _surroundings(self, tmp_path, capsys, monkeypatch):
        self.folder, self.capsys, self.monkeypatch = tmp_path, capsys, monkeypatch

    def script(self, text, name="script.py"):
        path = self.folder / name
        path.write_text(PREAMBLE + textwrap.dedent(text))
        return str(path)

    def launch(self, *words):
        """The exit code, and what came to stdout and stderr."""
        self.capsys.readouterr()
        code = main(["launch", *words])
        return code, *self.capsys.readouterr()


# Each launch has several checks; those of single signals, exit codes and streams are for the night.

SPEAKER = r"""
    import beside
    print("out", rank, sys.argv[1:])
    print("err é", rank, file=sys.stderr)
    sys.stdout.write("in two "); sys.stdout.flush(); time.sleep(0.02); print("parts")
    sys.stdout.write("10%\r20%\r30%\r\n")
    print(beside.__name__, __name__, os.path.basename(sys.argv[0]), "jax" in sys.modules)
    print(os.path.samefile(sys.path[0], os.environ["WHERE"]), os.environ["JAX_PLATFORMS"])
    sys.stderr.write("no end")
    subprocess.Popen(["sleep", os.environ["MARK"]], start_new_session=True, env={})
"""


class OutputTest(Case):
    def launch_speaker(self, where, *words):
        mark = f"100.{os.getpid()}"
        for name, value in (("WHERE", str(where)), ("MARK", mark)):
            self.monkeypatch.setenv(name, value)
        code, out, err = self.launch(*words, "a", "--processes", "5", "-m")
        assert code == 0, err
        assert not running(mark), "a process of the program is left"
        assert all(re.match(r"\[[01]\] ", line) for line in (out + err).splitlines())
        for rank in "01":
            own = [
                [line[4:] for line in text.splitlines() if line.startswith(f"[{rank}] ")]
                for text in (out, err)
            ]
            platform = "cuda" if "cuda" in words else "cpu"
            assert own == [
                [
                    f"out {rank} ['a', '--processes', '5', '-m']",
                    "in two parts",
                    *("10%", "20%", "30%"),
                    "beside __main__ tool.py False",
                    f"True {platform}",
                ],
                [f"err é {rank}", "no end"],
            ]

    def test_program_runs_as_with_python(self):
        """Lines are complete and have a rank; nothing is left of the program in the end."""
        package = self.folder / "package_of_test"
        package.mkdir()
        for name in ("beside.py", "package_of_test/beside.py", "package_of_test/__init__.py"):
            (self.folder / name).touch()
        tool = self.script(SPEAKER, "package_of_test/tool.py")
        self.launch_speaker(package, tool)
        self.monkeypatch.chdir(self.folder)
        self.launch_speaker(self.folder, "--platform", "cuda", "-m", "package_of_test.tool")

    def test_line_ends_split_between_reads(self):
        shown = io.StringIO()
        with mock.patch("sys.stdout", shown):
            output = Output(1, lambda: None)
        reading, writing = os.pipe()
        with open(reading) as pipe, open(os.devnull) as nothing:
            output.follow(0, mock.Mock(stdout=pipe, stderr=nothing))
            for part in (b"a\r", b"\nb\r", b"c\n\n", b"d\r", b"\r", b"e\r"):
                os.write(writing, part)
                time.sleep(0.02)
            os.close(writing)
            output.finish(QUICK, str)
        assert shown.getvalue() == "".join(f"[0] {x}\n" for x in ["a", "b", "c", "", "d", "", "e"])

    @pytest.mark.slow
    def test_long_lines(self):
        script = self.script(
            r"""
            sys.stdout.write("a" * 500_000 + "\r\n")
            sys.stdout.write("b" * 5_000_000 + "\rend\r")
            sys.stderr.write("c" * 500_000 + "\n")
            sys.exit(1)
            """
        )
        start = time.monotonic()
        code, out, err = self.launch("--processes", "1", script)
        assert time.monotonic() - start < QUICK
        first, *parts, end = out.splitlines()
        assert (code, first, end) == (1, "[0] " + "a" * 500_000, "[0] end")
        assert "".join(part.removeprefix("[0] ") for part in parts) == "b" * 5_000_000
        assert all(len(part) < 2 << 20 for part in parts)
        assert err.startswith("[0] " + "c" * 500_000 + "\n")
        assert err.endswith("\n  " + "c" * 2000 + " ... 498000 more characters\n")

    @pytest.mark.slow
    def test_closed_stdout(self):
        script = self.script("while True: print('here'); time.sleep(0.01)")
        launcher = f"{sys.executable} -m nnx_sharding launch {script}; echo $? > {self.folder}/code"
        subprocess.run(f"({launcher}) | head -n 1", shell=True, timeout=60, check=True)
        assert (self.folder / "code").read_text() == f"{128 + signal.SIGPIPE}\n"
        assert ended(script)


class EnvironmentTest(Case):
    def test_flags_of_the_user_are_kept(self):
        inherited = {
            "XLA_FLAGS": f"--xla_a=1 {DEVICE_COUNT}=8 --xla_b=2",
            "JAX_NUM_CPU_DEVICES": "3",
            "OMPI_COMM_WORLD_SIZE": "2",
            "SLURM_JOB_ID": "17",
            "HOME": "/home",
        }
        environment = environment_of(1, 2, 4, "cpu", "127.0.0.1:1", inherited)
        assert environment["XLA_FLAGS"].split() == ["--xla_a=1", "--xla_b=2", f"{DEVICE_COUNT}=4"]
        assert environment["JAX_LOCAL_DEVICE_IDS"] == "4,5,6,7"
        assert (environment["SLURM_JOB_ID"], environment["HOME"]) == ("17", "/home")
        assert not {"JAX_NUM_CPU_DEVICES", "OMPI_COMM_WORLD_SIZE"} & set(environment)

    def test_reserved_ports_differ(self):
        held = [reserve_port() for _ in range(20)]
        assert len({port.getsockname()[1] for port in held}) == 20
        for port in held:
            port.close()


# What the program does, and the exit code, the description and the last line that it gets.
FAULTS = {
    "error": (
        "raise ValueError('out of luck')",
        (1, "with exit code 1", "ValueError: out of luck"),
    ),
    "signal": ("os.kill(os.getpid(), signal.SIGKILL)", (137, r"by signal 9 \(SIGKILL\)", None)),
}
MORE_FAULTS = {
    "exit code": ("sys.exit(3)", (3, "with exit code 3", None)),
    "exit text": ("sys.exit('no data')", (1, "with exit code 1", "no data")),
    "exit without handlers": ("os._exit(5)", (5, "with exit code 5", None)),
    "abort": ("os.abort()", (134, r"by signal 6 \(SIGABRT\)", None)),
    # The end of the parent ends the process a moment later.
    "signal to the parent": (
        "os.kill(os.getppid(), signal.SIGKILL); time.sleep(100)",
        (137, r"by signal 9 \(SIGKILL\)", None),
    ),
}


class FailureTest(Case):
    @parameterized.named_parameters((name.replace(" ", "_"), name) for name in FAULTS)
    def test_first_failure_is_reported(self, name):
        self.check(*FAULTS[name])

    @parameterized.named_parameters((name.replace(" ", "_"), name) for name in MORE_FAULTS)
    @pytest.mark.slow
    def test_other_failure_is_reported(self, name):
        self.check(*MORE_FAULTS[name])

    def check(self, fault, expected):
        expected_code, how, last = expected
        script = self.script(
            f"""
            if rank == 1:
                print("before", file=sys.stderr)
                while not os.path.exists(sys.argv[1]): time.sleep(0.01)
                {fault}
            try:
                signal.signal(signal.SIGTERM, lambda *_: sys.exit("late noise"))
                open(sys.argv[1], "x").close()
                time.sleep(100)
            finally:
                print("end", rank)
            """
        )
        start = time.monotonic()
        code, out, err = self.launch(script, str(self.folder / "ready"))
        assert code == expected_code
        assert time.monotonic() - start < QUICK
        shown, message = err.split("launch: process 1 failed ", 1)
        assert re.match(how + r", after \d+\.\d s; the others were ended", message)
        assert "[1] before" in shown and "late noise" not in shown
        message, others = message.split("launch: output of the others after that:\n")
        assert "\n  before\n" in message
        assert last is None or f"\n  {last}\n" in message
        assert others == "[0] late noise\n"
        assert "worker.py" not in err and "runpy" not in err
        assert "[0] end" in out
        assert ended(script)

    @pytest.mark.slow
    def test_error_is_reported_before_exit_handlers(self):
        script = self.script(
            """
            import atexit
            if rank == 0:
                atexit.register(time.sleep, 100)  # as JAX, which waits for the others
                raise KeyError("first")
            time.sleep(100)
            """
        )
        code, _, err = self.launch("--grace", "0.5", script)
        assert code == 1
        assert "process 0 failed with exit code 1" in err
        assert ended(script)

    @pytest.mark.slow
    def test_death_is_reported_before_the_errors_it_causes(self):
        # Each process takes a second to end, but its connections are closed before.
        script = self.script(
            """
            import socket
            path = sys.argv[1]
            if rank == 0:
                server = socket.socket(socket.AF_UNIX); server.bind(path); server.listen()
                peer, _ = server.accept()
                peer.recv(1)
                raise ConnectionError("the other is gone")
            peer = socket.socket(socket.AF_UNIX)
            while peer.connect_ex(path): time.sleep(0.01)
            peer.close(); time.sleep(0.05)
            os._exit(7)
            """
        )
        code, _, err = self.launch(script, str(self.folder / "socket"))
        assert code == 7
        assert "process 1 failed with exit code 7" in err

    def test_timeout(self):
        """Of a process that writes a line without end, and of one that does not want to end."""
        script = self.script(
            """
            if rank: signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)
            while True: os.write(1, b"a" * 10_000)
            """
        )
        start, seen = time.monotonic(), io.StringIO()
        with (
            open(os.devnull, "w") as nowhere,
            mock.patch("sys.stdout", nowhere),
            mock.patch("sys.stderr", seen),
        ):
            assert main(["launch", "--timeout", "0.5", "--grace", "0.2", script]) == 124
        assert 0.5 <= time.monotonic() - start < QUICK
        assert re.search(r"launch: timed out, after \d", seen.getvalue())
        assert ended(script)


class EndTest(Case):
    """Signals to the launcher of a program that starts processes, also in other sessions."""

    @linux
    def test_launcher_is_killed(self):
        self.check(signal.SIGKILL, -9)

    @parameterized.parameters((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129))
    @linux
    @pytest.mark.slow
    def test_launcher_is_ended(self, number, expected):
        self.check(number, expected)

    def check(self, number, expected):
        mark = f"1000.{os.getpid()}{number}"
        script = self.script(
            rf"""
            subprocess.Popen(["sleep", "{mark}"])
            subprocess.Popen(["sleep", "{mark}"], start_new_session=True)
            sys.stdout.buffer.write(b"ready \xff\n")
            time.sleep(1000)
            """
        )
        with subprocess.Popen(
            [sys.executable, "-m", "nnx_sharding", "launch", "--grace", "1", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as launcher:
            for _ in range(2):  # the lines are shown at once
                assert re.fullmatch(rb"\[[01]\] ready \xff\n", launcher.stdout.readline())
            assert len(running(mark)) == 4
            workers = set(running(worker.__file__))
            assert len(workers & set(running(script))) == 4  # each forks to run the program
            launcher.send_signal(number)
            _, err = launcher.communicate(timeout=QUICK)
            assert launcher.returncode == expected
            if expected > 0:
                assert f"launch: ended by signal {number:d} ({number.name})" in err.decode()
        assert ended(mark) and ended(script)


class UsageTest(Case):
    @parameterized.parameters(
        ([], "command"),
        (["lunch"], "invalid choice"),
        (["launch"], "which program"),
        (["launch", "-m"], "which module"),
        (["launch", "nothing.py"], "no such file: nothing.py"),
        (["launch", "-m", "nothing_like_it.at_all"], "no module named nothing_like_it.at_all"),
        (["launch", "--processes", "0", "x.py"], "must be from 1 to 10000, not 0"),
        (["launch", "--processes", "two", "x.py"], "invalid"),
        (["launch", "--devices-per-process", "-1", "x.py"], "must be from 1 to 10000, not -1"),
        (["launch", "--processes", "99999999", "x.py"], "from 1 to 10000, not 99999999"),
        (["launch", "--devices-per-process", "99999999", "x.py"], "from 1 to 10000"),
        (["launch", "--timeout", "0", "x.py"], "more than 0, not 0"),
        (["launch", "--timeout", "nan", "x.py"], "more than 0, not nan"),
        (["launch", "--grace", "soon", "x.py"], "could not convert"),
        (["launch", "--proceses", "2", "x.py"], "unrecognized arguments: --proceses"),
    )
    def test_wrong_usage(self, words, expected):
        assert main(words) == 2
        assert expected in self.capsys.readouterr().err

    def test_help(self):
        assert main(["--help"]) == 0
        assert "launch" in self.capsys.readouterr().out
        assert main(["launch", "--help"]) == 0
        assert "--devices-per-process" in self.capsys.readouterr().out

    def test_traceback_option(self):
        def fail(*_, **__):
            raise OSError("no more processes")

        self.monkeypatch.setattr("nnx_sharding.cli.launch.launch", fail)
        script = self.script("")
        assert main(["launch", script]) == 1
        assert self.capsys.readouterr().err == "launch: no more processes\n"
        with pytest.raises(OSError, match="no more"):
            main(["launch", "--traceback", script])

    def test_arguments_of_the_function(self):
        with pytest.raises(ValueError, match=r"expected processes >= 1, got 0; .* is empty"):
            launch([], processes=0)
        with pytest.raises(ValueError, match="at most 10000 devices in all, got 200 processes of"):
            launch(["x.py"], processes=200, devices_per_process=51)


@pytest.mark.slow
class LibraryTest(Case):
    """With 2 processes of 4 devices each."""

    def work(self, *words):
        return self.launch("--devices-per-process", "4", "--timeout", "240", *words)

    @pytest.mark.gate
    def test_arrays_and_batches(self):
        code, out, err = self.work(str(WORKERS / "library.py"), str(self.folder))
        assert code == 0, err
        assert "[0] ok 0" in out and "[1] ok 1" in out

    def test_losses_match_one_process(self):
        code, out, err = self.work(str(WORKERS / "training.py"))
        assert code == 0, err
        self.monkeypatch.syspath_prepend(WORKERS)
        import training

        lines = re.findall(r"^\[(\d)\] step +(\d+)  loss ([\d.]+)", out, re.MULTILINE)
        assert {rank for rank, *_ in lines} == {"0"}
        shown = {int(step): float(loss) for _, step, loss in lines}
        mesh = mesh_of((2, 4), ("data", "model"))
        *_, losses = training.transformer.train_sharded(training.CONFIG, training.STEPS, mesh)
        assert len(shown) == training.STEPS
        for step, loss in shown.items():
            assert abs(loss - losses[step]) < 2e-4  # 5e-5 is the precision of the output
        demo = [json.loads(line[4:])["demo"] for line in out.splitlines() if '"demo"' in line]
        assert len(demo) == 2 and demo[0] == demo[1]
        assert jax.process_count() == 1
        np.testing.assert_allclose(demo[0], training.losses_of_demo(), rtol=0, atol=1e-4)

    @parameterized.parameters(
        ("raise", 1, 1, "ValueError: out of luck"), ("kill", 0, 137, "SIGKILL")
    )
    @linux
    def test_process_fails_while_training(self, how, who, expected, text):
        start = time.monotonic()
        script = str(WORKERS / "failing.py")
        code, out, err = self.work("--grace", "1", script, how, str(who))
        assert code == expected, err
        assert "[0] training" in out and "[1] training" in out
        [seconds] = re.findall(rf"launch: process {who} failed .*, after (\d+\.\d) s", err)
        assert time.monotonic() - start - float(seconds) < QUICK
        assert text in err.split("launch: process ")[1]
        assert ended(script, 1)
