"""Several processes: the launcher, and the library in them."""

from __future__ import annotations

import json
import os
import re
import shlex
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

from nnx_sharding.cli.main import main
from nnx_sharding.testing import launch, launcher
from zoo import mesh_of

WORKERS = Path(__file__).parent / "processes"
PREAMBLE = """
import os, signal, subprocess, sys, time

rank = int(os.environ["SLURM_PROCID"])
"""
# In a process of its own, without the import of JAX.
CODE = "import sys; from launcher import launch; sys.exit(launch(sys.argv[1:], grace=1.0))"
LAUNCHER = ["env", f"PYTHONPATH={Path(launcher.__file__).parent}", sys.executable, "-c", CODE]
QUICK = 60  # seconds; far more than it takes, also on a busy machine

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


class LaunchTest(Case):
    def test_program_runs_as_with_python_until_one_fails(self):
        """A module; the other tests launch scripts. The first failure ends all."""
        text = r"""
            if __name__ == "__main__":
                import atexit, beside
                print(beside.__name__, os.path.basename(sys.argv[0]), sys.argv[2:])
                print(os.path.samefile(sys.path[0], os.getcwd()), "jax" in sys.modules)
                print(os.environ["JAX_PLATFORMS"], sys.stdin.read() == "")
                sys.stdout.write("in two "); sys.stdout.flush(); time.sleep(0.05); print("parts")
                sys.stdout.write("10%\r20%\r\n")
                sys.stdout.buffer.write("a".encode() * (3 << 20) + b"\xff\n")
                sys.stdout.flush()
                subprocess.Popen(["sleep", os.environ["MARK"]])  # ends with the launch
                if rank == 1:
                    atexit.register(print, "handler of", rank)
                    while not os.path.exists(sys.argv[1]): time.sleep(0.01)
                    atexit.register(time.sleep, 100); sys.exit('no data')
                sys.stderr.write("no end é")
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(99))
                open(sys.argv[1], "x").close()
                try:
                    time.sleep(100)
                finally:
                    print("end", rank)
            """
        mark = f"100.{os.getpid()}"
        self.monkeypatch.setenv("MARK", mark)
        package = self.folder / "package_of_test"
        package.mkdir()
        for file in (self.folder / "beside.py", package / "__init__.py"):
            file.touch()
        self.monkeypatch.chdir(self.folder)
        self.script(text, "package_of_test/tool.py")
        options, start = ("--platform", "cuda", "--grace", "inf"), time.monotonic()
        words = "-m", "package_of_test.tool", "ready", "a", "--processes", "5"
        code, out, err = self.launch(*options, *words)
        assert code == 1 and time.monotonic() - start < QUICK, err
        *first, last = sorted(err.splitlines())
        assert first == ["[0] no end é", "[1] no data"]  # without frames of the launcher
        assert last.startswith("launch: process 1 failed with exit code 1, after ")
        assert last.endswith("; all processes were ended")
        for rank in "01":
            own = [line[4:] for line in out.splitlines() if line.startswith(f"[{rank}] ")]
            start = ["beside tool.py ['a', '--processes', '5']", "True False", "cuda True"]
            assert own[:6] == [*start, "in two parts", "10%", "20%"]
            assert "".join(own[6:10]) == "a" * (3 << 20) + r"\xff"
            # The program that failed did not end by itself.
            assert own[10:] == (["end 0"] if rank == "0" else [])
        assert ended(mark, 1) and ended("package_of_test.tool")

    def test_timeout(self):
        """Also of programs that ignore the request, and while a line does not end."""
        text = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: os.write(1, b'a' * 1000)"
        script = self.script(text)
        with mock.patch("sys.stdout", open(os.devnull, "w")) as nowhere, nowhere:
            assert main(["launch", "--timeout", "0.5", "--grace", "0.2", script]) == 124
        assert "launch: timed out, after 0." in self.capsys.readouterr().err
        assert ended(script)

    def test_closed_stdout(self):
        script = self.script("while True: print('here'); time.sleep(0.01)")
        words = shlex.join([*LAUNCHER, script])
        launcher = f"{words}; echo $? > {self.folder}/code"
        subprocess.run(f"({launcher}) | head -n 1", shell=True, timeout=60, check=True)
        assert (self.folder / "code").read_text() == "1\n"
        assert ended(script)

    @linux
    @parameterized.parameters((signal.SIGINT, 130), (signal.SIGKILL, -9))
    def test_launcher_is_ended(self, number, expected):
        """All that is left in the process groups ends, too."""
        # What a shell runs in the background ignores SIGINT, and so do its children. A child resets
        # what its parent handles.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, before)
        mark = f"1000.{os.getpid()}{number}"
        script = self.script(
            f"subprocess.Popen(['sleep', '{mark}']); print('ready'); time.sleep(1000)"
        )
        with subprocess.Popen(
            [*LAUNCHER, script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as launcher:
            lines = [launcher.stdout.readline() for _ in range(2)]
            children = running(mark)
            launcher.send_signal(number)
            _, err = launcher.communicate(timeout=QUICK)
            assert all("ready" in line for line in lines) and children
            assert launcher.returncode == expected
            if expected > 0:
                assert f"launch: ended by signal {number:d} ({number.name})" in err
        assert ended(mark) and ended(script)

    def test_environment(self):
        """What the user has set is kept."""
        inherited = {
            "XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=8 --xla_b=2",
            "JAX_NUM_CPU_DEVICES": "3",
            "OMPI_COMM_WORLD_SIZE": "2",
            "SLURM_JOB_ID": "17",
            "HOME": "/home",
        }
        with mock.patch.dict(os.environ, inherited):
            environment = launcher._environment(1, 2, 4, platform="cpu", coordinator="127.0.0.1:1")
        flags = ["--xla_a=1", "--xla_b=2", "--xla_force_host_platform_device_count=4"]
        assert environment["XLA_FLAGS"].split() == flags
        assert environment["JAX_LOCAL_DEVICE_IDS"] == "4,5,6,7"
        assert (environment["SLURM_JOB_ID"], environment["HOME"]) == ("17", "/home")
        assert not {"JAX_NUM_CPU_DEVICES", "OMPI_COMM_WORLD_SIZE"} & set(environment)


class UsageTest(Case):
    @parameterized.parameters(
        ([], "command"),
        (["lunch"], "invalid choice"),
        (["launch"], "name a script"),
        (["launch", "-m"], "name a script"),
        (["launch", "nothing.py"], "no such file: nothing.py"),
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

        self.monkeypatch.setattr("nnx_sharding.cli.commands.launch", fail)
        script = self.script("")
        assert main(["launch", script]) == 1
        assert self.capsys.readouterr().err == "launch: no more processes\n"
        with pytest.raises(OSError, match="no more"):
            main(["launch", "--traceback", script])

    def test_arguments_of_the_function(self):
        for words, processes, devices in ([], 2, 1), (["x.py"], 0, 1), (["x.py"], 2, -1):
            with pytest.raises(ValueError, match=f"{processes} processes of {devices} devices"):
                launch(words, processes=processes, devices_per_process=devices)


class LibraryTest(Case):
    """With 2 processes of 4 devices each."""

    @linux
    def test_arrays_batches_and_training(self):
        """Also with the losses of one process; at the end, one process fails while both train."""
        # The programs run only a few times.
        flags = f"{os.environ['XLA_FLAGS']} --xla_backend_optimization_level=0"
        self.monkeypatch.setenv("XLA_FLAGS", flags)
        script, start = str(WORKERS / "library.py"), time.monotonic()
        options = ["--devices-per-process", "4", "--timeout", "240", "--grace", "1"]
        code, out, err = self.launch(*options, script)
        assert "[0] ok 0" in out and "[1] ok 1" in out, err
        assert code == 1 and "[1] ValueError: out of luck" in err, err
        [seconds] = re.findall(r"launch: process 1 failed .*, after (\d+\.\d) s", err)
        assert time.monotonic() - start - float(seconds) < QUICK
        assert "launcher.py" not in err and "runpy" not in err
        assert ended(script, 1)
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
