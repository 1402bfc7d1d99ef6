"""The command line: what it prints, the files it writes and its exit codes."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from unittest import mock

import jax
import pytest
from absl.testing import parameterized

from mistakes import MISTAKES
from nnx_sharding import __version__
from nnx_sharding.cli.main import main
from nnx_sharding.planning.plan import PlanningResult
from nnx_sharding.report import Comparison, ProgramReport
from nnx_sharding.report.comparison import SearchInterrupted

ROOT = Path(__file__).parents[1]

# What a user would have in a file of their own.
HOSTILE = "\x1b]0;hacked\x07\x9b31m"
PLAN = textwrap.dedent("""\
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import PartitionSpec as P

    import plan_neighbour
    from nnx_sharding import jit
    from nnx_sharding.report import compare
    from nnx_sharding.partition import fsdp, replicated


    def make():
        return nnx.Linear(64, 256, rngs=nnx.Rngs(0))


    def apply(model, x):
        return model(x)


    X = jax.ShapeDtypeStruct((plan_neighbour.ROWS, 64), jnp.float32)


    def forward(mesh):
        model = nnx.eval_shape(make)
        step = jit(apply, in_shardings=(replicated(model), P("data")), mesh=mesh)
        return step, model, X


    def lowered(mesh):
        step, *arguments = forward(mesh)
        return step.lower(*arguments)


    def meshless(mesh=None):
        return forward(mesh)


    def own_mesh():
        mesh = jax.make_mesh((jax.device_count(),), ("data",))
        return forward(mesh)


    def traced(mesh):
        step, *arguments = forward(mesh)
        return step.trace(*arguments)


    def compiled(mesh):
        return lowered(mesh).compile()


    def report(mesh):
        return compiled(mesh).report("mine")


    def plain():
        return jnp.sin, X


    def without_arguments(mesh):
        return jit(lambda: jnp.zeros(64), out_shardings=P("data"), mesh=mesh)


    class Plans:
        @staticmethod
        def strategies():
            ways = {
                "dp": lambda model, x: (replicated(model), P("data")),
                "fsdp": lambda model, x: (fsdp(model, min_size=0), P("data")),
            }
            return ways, apply, nnx.eval_shape(make), X


    def step():
        return apply, nnx.eval_shape(make), X


    def programs(mesh):
        return {"dp": forward(mesh), "again": lowered(mesh)}


    def one_is_whole(mesh):
        return {"dp": forward(mesh), "alone": step()}


    def one_fails(mesh):
        return {"dp": lowered(mesh), "bad": (lambda x: 1 / 0, X)}


    def comparison():
        ways, *rest = Plans.strategies()
        return compare({"dp": ways["dp"]}, *rest)


    def broken():
        raise ValueError("no luck")


    def leaves():
        raise SystemExit(3)


    def cancels():
        raise __import__("asyncio").CancelledError("stopped")


    def nothing():
        return None


    def wrong_program():
        return (lambda x: x @ x), X


    a_number = 3


    def hostile():
        raise ValueError("\\x1b]0;hacked\\x07\\x9b31m")


    def hostile_name():
        return traced(jax.make_mesh((1,), ("data",))).lower().compile().report("\\x1b]hacked\\x9b")


    def hostile_names():
        return {"\\x1b]hacked\\x9b": (lambda x: 1 / 0, X)}
    """)


# `wrong` divides by the largest element of a shard, instead of that of the batch.
SAME = """
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import PartitionSpec as P
    from nnx_sharding import jit


    class MLP(nnx.Module):
        def __init__(self, width, wrong, rngs):
            self.linear = nnx.Linear(width, width, rngs=rngs)
            self.wrong = wrong

        def __call__(self, x):
            return self.scaled(self.linear(x))

        def scaled(self, x):
            if not self.wrong:
                return x
            scale = lambda x: x / jnp.abs(x).max(0)
            return jax.shard_map(scale, in_specs=P("data"), out_specs=P("data"))(x)


    def forward(model, x):
        return model(x).sum()


    def right(mesh, config={"width": 64}, wrong=False):
        x = jax.random.normal(jax.random.key(1), (64, config["width"]))
        step = jit(forward, in_shardings=(None, P("data")), mesh=mesh)
        return step, MLP(config["width"], wrong, nnx.Rngs(0)), x


    def wrong(mesh):
        return right(mesh, {"width": 8}, wrong=True)
"""


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


class CommandTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        # Each test has a module of its own: Python would not look twice at one of the same name.
        self.module = f"plan_{self.folder.name}"
        (self.folder / f"{self.module}.py").write_text(PLAN)
        (self.folder / "plan_neighbour.py").write_text("ROWS = 128\n")
        self.path = f"{self.folder / self.module}.py"
        before = list(sys.path)
        self.addCleanup(sys.path.__setitem__, slice(None), before)
        self.addCleanup(sys.modules.pop, "plan_neighbour", None)
        self.addCleanup(sys.modules.pop, "bad", None)

    def run_command(self, *words):
        """The exit code, and what went to standard output and to standard error."""
        out, error = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = main([*map(str, words)])
        return code, out.getvalue(), error.getvalue()

    @parameterized.parameters(signal.SIGTERM, signal.SIGINT)
    def test_a_search_that_a_signal_stops_shows_what_it_has(self, number):
        def stopped(*args, **options):
            try:
                signal.raise_signal(number)
            except KeyboardInterrupt:
                rest = {"dp": "not compiled before the interruption"}
                raise SearchInterrupted(
                    PlanningResult(Comparison({}, ruled_out=rest), {})
                ) from None
            raise AssertionError("the signal was ignored")

        # A shell lets jobs in the background ignore Ctrl-C.
        of_ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, of_ctrl_c)
        before = signal.getsignal(signal.SIGTERM)
        data, page = self.folder / "plan.json", self.folder / "plan.html"
        with mock.patch("nnx_sharding.cli.programs.plan", side_effect=stopped):
            words = "plan", f"{self.path}:step", "--json", data, "--html", page
            code, out, error = self.run_command(*words)
        self.assertEqual(code, 128 + number)
        self.assertIn("1  not compiled before the interruption", out)
        self.assertIn("best: none was compiled in time", error)
        self.assertTrue(error.endswith(f"plan: stopped by {number.name}\n"), error)
        self.assertEqual([*Comparison.load(data).ruled_out], ["dp"])
        self.assertIn("<title>Plan: none was compiled</title>", page.read_text())
        self.assertEqual(signal.getsignal(signal.SIGTERM), before)

    def inspect(self, function, *words):
        return self.run_command("inspect", f"{self.path}:{function}", *words)

    def compare(self, function, *words):
        return self.run_command("compare", f"{self.path}:{function}", *words)

    def test_explain(self):
        for anchor in {case.anchor for case in MISTAKES.values()}:
            code, text, _ = self.run_command("explain", anchor)
            self.assertEqual(code, 0, anchor)
            self.assertRegex(text, r"^##+ ")
            self.assertNotIn("<!--", text)
        self.assertIn("\n\nPad", self.run_command("explain", "not-divisible")[1])
        self.assertNotIn("Unused filter", self.run_command("explain", "no-filter-matches")[1])
        code, names, _ = self.run_command("explain")
        self.assertIn("not-divisible", names.split())
        code, _, error = self.run_command("explain", "not-divisble")
        self.assertEqual(code, 2)
        self.assertIn("did you mean not-divisible?", error)

    def test_output_that_nobody_reads(self):
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, "-m", "nnx_sharding", "explain"]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
        os.close(writing)
        self.assertEqual((done.returncode, done.stderr), (128 + signal.SIGPIPE, b""))

    @pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
    def test_sigterm_ends_a_search_and_its_compilers(self):
        cache, data = self.folder / "cache", self.folder / "plan.json"
        command = [sys.executable, "-m", "nnx_sharding", "plan", f"{self.path}:step"]
        command += ["--devices", "64", "--cache", cache, "--json", data]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            wait_until(lambda: any(cache.glob("*.json")))  # until one was compiled
            tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
            compilers = [Path("/proc", child) for x in tasks for child in x.read_text().split()]
            process.terminate()
        self.assertEqual(process.returncode, 143)
        self.assertTrue(compilers)
        self.assertFalse([compiler for compiler in compilers if compiler.exists()])
        found = Comparison.load(data)
        self.assertTrue(found.compiled)
        self.assertIn("not compiled before the interruption", found.ruled_out.values())

    def reports(self):
        """Files with the report of the same program on 4 and on 32 devices."""
        files = []
        for count in (4, 32):
            files.append(self.folder / f"{count}.json")
            self.inspect("forward", "--mesh", f"data={count}", "--json", files[-1])
        return files

    def test_inspect(self):
        page, data = self.folder / "report.html", self.folder / "report.json"
        code, out, error = self.inspect(
            "forward", "--mesh", "data=32", "--html", page, "--json", data, "--hardware", "tpu v5e"
        )
        assert (code, error) == (0, "")
        assert out.startswith("apply: 32 × ") and "model.kernel  (64,256)" in out
        report = ProgramReport.load(data)
        assert report.num_devices == 32 and report.roofline.hardware == "TPU v5e"
        kernel, bias, rows = 64 * 256 * 4, 256 * 4, 128 // 32 * 64 * 4
        assert report.memory.arguments == kernel + bias + rows
        assert page.read_text().startswith("<!doctype html>")

    @parameterized.parameters("lowered", "traced", "compiled", "report")
    def test_inspect_what_a_function_may_return(self, function):
        code, out, error = self.inspect(function, "--mesh", "data=4", "--json", "-")
        assert (code, error) == (0, "")
        report = ProgramReport.from_json(out)
        assert report.num_devices == 4
        assert report.name == ("mine" if function == "report" else "apply")

    def test_inspect_a_function_of_arrays(self):
        code, out, error = self.inspect("plain")
        assert code == 0 and out.startswith("sin: 1 × ") and not error

    @parameterized.parameters("inspect", "source", "lock", "check", "compare")
    def test_what_is_not_sharded(self, command):
        function = "one_is_whole" if command == "compare" else "step"
        options = ["--mesh", "data=4"]
        if command in ("lock", "check"):
            options += ["--file", self.folder / "step.lock"]
        if command == "check":
            self.run_command("lock", f"{self.path}:step", *options)
        code, _, error = self.run_command(command, f"{self.path}:{function}", *options)
        assert code == 0
        name = {"compare": "alone"}.get(command, "apply")
        [line] = [line for line in error.splitlines() if "is not sharded" in line]
        assert line.startswith(f"{command}: {name} is not sharded: each of the 4 devices holds all")

    def test_what_has_no_arguments_has_none_to_shard(self):
        code, _, error = self.inspect("without_arguments", "--mesh", "data=4")
        assert (code, error) == (0, "")

    def test_inspect_in_a_module(self):
        sys.path.insert(0, str(self.folder))
        code, out, _ = self.run_command("inspect", f"{self.module}:own_mesh")
        assert code == 0 and out.startswith(f"apply: {jax.device_count()} × ")

    def test_memory_limit(self):
        code, out, error = self.inspect("forward", "--mesh", "data=4", "--memory-limit", "1 KiB")
        assert code == 1 and out.startswith("apply: 4 × ")
        assert re.match(r"inspect: apply: needs .*; the limit is 1\.00 KiB on each device", error)
        assert self.inspect("forward", "--mesh", "data=4", "--memory-limit", "1GB")[0] == 0

    def test_donate(self):
        data = self.folder / "donated.json"
        code, _, error = self.inspect("step", "--donate", "model", "--json", data)
        assert (code, error) == (0, "")
        donated = ("model.bias", "model.kernel")
        rows = ProgramReport.load(data).parameters
        assert tuple(row.path for row in rows if row.donated) == donated
        words = "--mesh", "data=4", "--donate", "model", "--json", data
        code, _, error = self.compare("Plans.strategies", *words)
        assert (code, error) == (0, "")
        [report, _] = Comparison.load(data).compiled.values()
        assert tuple(row.path for row in report.parameters if row.donated) == donated
        for function in ("forward", "lowered", "report"):
            code, _, error = self.inspect(function, "--mesh", "data=4", "--donate", "model")
            assert code == 1 and "--donate is for functions that are not jitted" in error

    def test_compare(self):
        page, data = self.folder / "plan.html", self.folder / "plan.json"
        code, out, error = self.compare(
            "Plans.strategies", "--mesh", "data=64", "--html", page, "--json", data,
            "--memory-limit", "1 GiB",
        )  # fmt: skip
        assert (code, error) == (0, "")
        assert out.splitlines()[0].startswith("strategy  mesh")
        comparison = Comparison.load(data)
        assert comparison.fitting == ("dp", "fsdp") and comparison.memory_limit == 2**30
        assert comparison.best("arguments") == "fsdp"
        assert page.read_text().startswith("<!doctype html>")

    def test_compare_what_does_not_fit(self):
        code, _, error = self.compare("comparison", "--mesh", "data=4", "--memory-limit", "1 KiB")
        assert (code, error) == (1, "compare: no strategy fits 1.00 KiB on each device\n")
        code, out, _ = self.compare("comparison", "--mesh", "data=4", "--hardware", "H200")
        assert code == 0 and "at peak rates of H200" in out

    def test_compare_programs(self):
        code, out, _ = self.compare("programs", "--mesh", "data=4", "--json", "-")
        assert code == 0
        found = Comparison.from_json(out)
        assert found.reports["dp"].memory == found.reports["again"].memory

    def test_compare_what_fails(self):
        code, out, error = self.compare("one_fails", "--mesh", "data=4")
        assert (code, error) == (1, "compare: failed: bad\n")
        assert "bad failed: UserError: what " in out and "ZeroDivisionError" in out

    @pytest.mark.usefixtures("compile_here")
    def test_plan(self):
        words = "plan", f"{self.path}:step", "--strategies", "dp", "fsdp"
        data = self.folder / "plan.json"
        code, out, error = self.run_command(*words, "--devices", "8", "--json", data)
        assert (code, error) == (0, "")
        why = "the bytes that it sends, as its time is not known: the hardware is not known"
        recipe = (
            "from nnx_sharding import jit, make_mesh, replicated\n  mesh = make_mesh({'data': 8})\n"
        )
        assert f"\nbest: dp, data 8\nchosen by {why}\n  {recipe}" in out.replace(
            "from jax.sharding import PartitionSpec as P\n  ", ""
        )
        assert "\nwhy not:\n  fsdp, data 8: " in out
        assert [*Comparison.load(data).reports] == ["dp, data 8", "fsdp, data 8"]
        donated = *words, "--devices", "8", "--donate", "model", "--json", data
        code, _, error = self.run_command(*donated)
        assert code == 0
        [report, _] = Comparison.load(data).compiled.values()
        assert {row.path for row in report.parameters if row.donated} == {
            "model.kernel",
            "model.bias",
        }
        limits = "--mesh", "data=4", "--memory-limit", "100 KiB"
        code, _, error = self.run_command(*words, *limits)
        assert code == 1 and error.startswith(
            "best: none fits; by estimates, one of these may:\n  "
        )
        code, _, error = self.run_command(*words, "--mesh", "data=4", "--memory-limit", "1 KiB")
        assert code == 1 and error.startswith("plan: no candidate can fit:\n  dp, data 4: the arg")
        code, out, error = self.run_command("plan", f"{self.path}:forward", *words[2:])
        assert (code, error) == (0, "") and "dp, data 8" in out  # the same function as for inspect
        code, _, error = self.run_command("plan", f"{self.path}:nothing")
        assert code == 1 and "It has to return (step, *arguments)" in error
        code, _, error = self.run_command(*words[:2], "--strategies", "fdsp")
        assert code == 2 and "unknown strategies" in error and "'fsdp'" in error

    def test_diff(self):
        before, after = self.reports()
        code, out, error = self.run_command("diff", before, after)
        assert (code, error) == (1, "")
        assert "devices: 4 × cpu → 32 × cpu" in out and "mesh: data 4 → data 32" in out
        assert "memory of one device\n  arguments: " in out
        assert self.run_command("diff", before, before)[:2] == (0, "no changes\n")

    def test_diff_of_plans_names_the_best(self):
        """Plans for other numbers of devices have no name in common."""
        report = ProgramReport.load(self.reports()[0])
        large = dataclasses.replace(report, memory=dataclasses.replace(report.memory, peak=2**40))
        plans = {
            "four": {"fsdp, data 4": report},
            "eight": {"fsdp, data 8": report},
            "none": {"dp, data 8": large},
        }
        for name, reports in plans.items():
            Comparison(reports, 2**30).save(self.folder / f"{name}.json")

        # A plan chooses by the known part of a time before the bytes that are sent.
        with_time = report.with_roofline("TPU v5e")
        partly = {
            f"{name}, data 8": dataclasses.replace(
                with_time,
                roofline=dataclasses.replace(with_time.roofline, compute_s=None, at_least=seconds),
            )
            for name, seconds in {"late": 3.0, "soon": 2.0}.items()
        }
        Comparison(partly).save(self.folder / "partly.json")
        files = (self.folder / f"{name}.json" for name in ("none", "partly"))
        out = self.run_command("diff", *files)[1]
        assert "\nbest after: soon, data 8: roofline ≥ 2.00 s, " in out, out

        def head(before, after):
            files = (self.folder / f"{name}.json" for name in (before, after))
            code, out, error = self.run_command("diff", *files)
            assert error == "" and code == int(before != after)
            return re.sub(r": (measured|roofline|sent|peak) .*", "", out).split("\n")[:2]

        assert head("four", "eight") == ["best before: fsdp, data 4", "best after: fsdp, data 8"]
        assert head("none", "eight") == ["best before: none fits", "best after: fsdp, data 8"]
        assert head("four", "four") == ["no changes", ""]
        files = [self.folder / f"{name}.json" for name in ("four", "eight")]
        only = "only before (1): fsdp, data 4\nonly after (1): fsdp, data 8\n"
        assert self.run_command("diff", *files)[1].endswith(only)
        gone = self.run_command("diff", *files, "--fail-above", "5%")[2]
        assert gone.endswith("or are unknown:\n  only before (1): fsdp, data 4\n"), gone

    def test_diff_fails_above(self):
        before, after = self.reports()
        code, _, error = self.run_command("diff", before, after, "--fail-above", "5%")
        assert (code, error) == (0, "")  # a device has less to do
        code, _, error = self.run_command("diff", after, before, "--fail-above", "5")
        assert code == 1
        assert error.startswith(
            "diff: these grew by more than 5.0%, or are unknown:\n  arguments: "
        )
        code, _, error = self.run_command("diff", after, before, "--fail-above", "900%")
        assert (code, error) == (0, "")
        shown = "--threshold", "900%"  # what is not shown has grown all the same
        code, _, error = self.run_command("diff", after, before, *shown, "--fail-above", "5%")
        assert code == 1 and "\n  arguments: " in error
        late = self.folder / "late.json"
        Comparison({}, ruled_out={"dp": "not compiled within the time limit"}).save(late)
        code, out, error = self.run_command("diff", late, late, "--fail-above", "5%")
        assert (code, out, error) == (0, "no changes\n", "")
        report = json.loads(Path(before).read_text())
        path = Path(before).with_name("unknown.json")
        path.write_text(json.dumps(report | {"collectives": None}))
        for old in (before, path):  # unknown before, too
            code, _, error = self.run_command("diff", old, path, "--fail-above", "900%")
            assert code == 1 and re.search("bytes_sent is unknown|bytes: .* → –", error)  # noqa: RUF001

    def test_diff_threshold_and_files(self):
        before, after = self.reports()
        page, data = self.folder / "diff.html", self.folder / "diff.json"
        code, out, _ = self.run_command(
            "diff", before, after, "--threshold", "99%", "--html", page, "--json", data
        )
        assert code == 1 and "arguments: " not in out.partition("program")[2].partition("\n")[0]
        found = json.loads(data.read_text())
        assert {change["kind"] for change in found["changes"]} == {"program"}
        shown = page.read_text()
        assert "<title>What changed</title>" in shown and "devices: 4 × cpu → 32 × cpu" in shown

    def test_version(self):
        assert self.run_command("--version") == (0, f"nnx_sharding {__version__}\n", "")

    @parameterized.parameters(
        (["inspect", "{path}:broken"], "{path}:broken failed: ValueError: no luck"),
        (["inspect", "{path}:leaves"], "{path}:leaves failed: SystemExit: 3"),
        (["inspect", "{path}:cancels"], "{path}:cancels failed: CancelledError: stopped"),
        (["inspect", "{path}:nothing"], "{path}:nothing returned None. It has to return"),
        (["inspect", "{path}:wrong_program"], "cannot be compiled: TypeError: "),
        (["inspect", "{path}:meshless"], "meshless returned cannot be compiled: NoMeshError: "),
        (["compare", "{path}:nothing"], "{path}:nothing returned None. It has to return"),
        (["compare", "{path}:plain"], "It has to return (strategies, function"),
        (["compare", "{path}:broken"], "{path}:broken failed: ValueError: no luck"),
        (["inspect", "{folder}/bad.py:f"], "bad.py cannot be imported: RuntimeError: no"),
        (["inspect", "bad:f"], "bad cannot be imported: RuntimeError: no"),
    )
    def test_errors_of_the_user(self, words, expected):
        sys.path.insert(0, str(self.folder))
        (self.folder / "bad.py").write_text("raise RuntimeError('no')\n")
        names = {"path": self.path, "folder": self.folder}
        code, out, error = self.run_command(*(word.format(**names) for word in words))
        assert (code, out) == (1, ""), (code, error)
        assert error.startswith(f"{words[0]}: ") and expected.format(**names) in error, error
        assert "Traceback" not in error

    def test_traceback_when_asked(self):
        with self.assertRaisesRegex(RuntimeError, "no luck") as caught:
            main(["inspect", f"{self.path}:broken", "--traceback"])
        assert isinstance(caught.exception.__cause__, ValueError)

    @parameterized.parameters(
        (["inspect"], "the following arguments are required: MODULE:FUNCTION"),
        (["inspect", "plan"], "'plan' does not name a function; write package.module:function"),
        (["inspect", ":f"], "does not name a function"),
        (["inspect", "missing.py:f"], "no such file: missing.py"),
        (["inspect", "no_such_module:f"], "no module named 'no_such_module'"),
        (["inspect", "json.no_such_module:f"], "no module named 'json.no_such_module'"),
        (["inspect", "{path}:forwrad"], "has no 'forwrad'; did you mean 'forward'?"),
        (["inspect", "{path}:a_number"], "is not a function, but 3"),
        (["inspect", "{path}:f", "--mesh", "data"], "write each axis once with its size"),
        (["inspect", "{path}:f", "--mesh", "data=2,data=4"], "write each axis once"),
        (["inspect", "{path}:f", "--mesh", "data=--2"], "write each axis once with its size"),
        (["inspect", "{path}:forward", "--mesh", "data=0"], "sizes (0,)"),
        (["inspect", "{path}:forward", "--mesh", "data=99999999"], "at most 10000 devices, got"),
        (["compare", "{path}:forward", "--mesh", "data=101,model=100"], "got 10100"),
        (["inspect", "{path}:f", "--devices", "99999999"], "must be from 1 to 10000, not 99999999"),
        (["inspect", "{path}:f", "--devices", "0"], "must be from 1 to 10000, not 0"),
        (
            ["inspect", "{path}:f", "--devices", "9"],
            "JAX is already running in this process, with 8",
        ),
        (["plan", "{path}:f", "--time-limit", "0"], "must be more than 0"),
        (["plan", "{path}:stpe", "--time-limit", "14400"], "did you mean 'step'"),  # four hours
        (["inspect", "{path}:f", "--hardware", "TPU v5q"], "Did you mean"),
        (["compare", "{path}:f", "--memory-limit", "much"], "'much' is not a size"),
        (["diff", "{path}", "{path}", "--fail-above", "-1"], "must be a percentage"),
        (["diff", "{path}", "{path}", "--threshold", "x%"], "must be a percentage"),
        (["diff", "{path}", "{path}", "--html", "-"], "must be the name of a file"),
        (["lock", "{path}:step", "--file", "-"], "must be the name of a file"),
        (["diff", "missing.json", "{path}"], "missing.json"),
        (["diff", "{path}", "{path}"], "not a report: it is not JSON"),
        (["inspect", "{path}:forward"], "forward takes a mesh: add one, such as --mesh data=8"),
        (
            ["plan", "{path}:step", "--donate", "modle"],
            "no parameter 'modle'; did you mean 'model'",
        ),
        (["inspect", "{path}:f", "--html", "/nowhere/a.html"], "no writable folder /nowhere"),
        (["plan", "{path}:f", "--json", "/"], "/ is a folder"),
        (["inspekt"], "invalid choice"),
    )
    def test_usage(self, words, expected):
        code, out, error = self.run_command(*(word.format(path=self.path) for word in words))
        assert (code, out) == (2, ""), error
        assert error.startswith("usage: ") and expected in error, error

    @parameterized.parameters(
        (["inspect", "{path}:{name}"], 2), (["inspect", "{name}.py:f"], 2), (["{name}"], 2),
        (["inspect", "{path}:f", "--mesh", "{name}"], 2), (["launch", "{name}"], 2),
        (["compare", "{path}:f", "--hardware", "{name}"], 2), (["diff", "{name}", "{name}"], 2),
        (["inspect", "{path}:hostile"], 1), (["inspect", "{path}:f", "--{name}"], 2),
        (["inspect", "{path}:hostile_name"], 0), (["compare", "{path}:hostile_names"], 1),
        (["inspect", "{path}:hostile_name", "--json", "-"], 0),
    )  # fmt: skip
    def test_no_name_controls_the_terminal(self, words, expected):
        names = {"path": self.path, "name": HOSTILE}
        code, out, error = self.run_command(*(word.format(**names) for word in words))
        assert code == expected, error
        assert (out + error).replace("\n", "").isprintable(), out + error
        assert "hacked" in out + error

    def test_as_many_devices_as_there_are(self):
        assert self.inspect("own_mesh", "--devices", jax.device_count())[0] == 0

    @parameterized.parameters("inspect", "compare", "diff", "launch")
    def test_help(self, command):
        code, out, error = self.run_command(command, "--help")
        assert (code, error) == (0, "")
        assert out.startswith(f"usage: python -m nnx_sharding {command} ")
        assert "exit code" in out

    def test_help_names_the_command_and_each_strategy_once(self):
        with mock.patch.object(sys, "argv", ["/bin/nnx-sharding"]):
            _, out, _ = self.run_command("plan", "--help")
        assert out.startswith("usage: nnx-sharding plan ") and "python -m" not in out
        assert "\n  nnx-sharding plan plan.py:training --topology" in out
        assert out.count("zero1") == out.count("pipeline") == 1
        assert "--devices N" in out and "number of devices to plan for" in out

    def test_virtual_devices_in_a_process_of_its_own(self):
        words = ["inspect", f"{self.module}.py:own_mesh", "--devices", "64", "--json", "-"]
        environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        environment["PYTHONPATH"] = str(ROOT)
        done = subprocess.run(
            [sys.executable, "-m", "nnx_sharding", *words],
            cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert ProgramReport.from_json(done.stdout).num_devices == 64

    def test_same(self):
        """Compares a smaller step, in a process of its own, and names the first wrong module."""
        program = Path(self.folder, "same_steps.py")
        program.write_text(textwrap.dedent(SAME))
        environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        environment["PYTHONPATH"] = str(ROOT)
        results = {}
        for name in ("right", "wrong"):
            words = ["same", f"{program}:{name}", "--mesh", "data=4", "--axis-types", "auto"]
            results[name] = subprocess.run(
                [sys.executable, "-m", "nnx_sharding", *words],
                cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300,
            )  # fmt: skip
        right, wrong = results["right"], results["wrong"]
        assert (right.returncode, wrong.returncode) == (0, 1), (right.stderr, wrong.stderr)
        assert "shrunk: width 64 → " in right.stdout
        assert "the same numbers on 4 devices" in right.stdout
        text = wrong.stdout + wrong.stderr
        assert "model.scaled (MLP) is the first module whose output differs" in text
        assert "Traceback" not in text
