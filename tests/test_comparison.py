"""``compare`` and ``diff``: against placed arrays, and figures computed by hand."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh

import reports
from nnx_sharding import _compat, jit
from nnx_sharding.analysis import HARDWARE
from nnx_sharding.analysis.units import read_bytes
from nnx_sharding.partition import fsdp, planning_mesh, replicated, sharded_init, tensor_parallel
from nnx_sharding.report import Comparison, ProgramReport, Strategy, compare, compiling, diff
from nnx_sharding.report.changes import Change, Changes
from nnx_sharding.report.comparison import Failure, why_unknown
from test_terminal import printed
from zoo import MLP, P, fails, mesh_of

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import plan_7b

F32 = 4
WIDTH, HIDDEN, ROWS = 64, 256, 512
KERNELS = 2 * WIDTH * HIDDEN * F32


def make():
    return MLP(nnx.Rngs(0), WIDTH, HIDDEN)


def apply(model, x):
    return model(x)


def dp(model, x):
    return replicated(model), P("data")


def split(model, x):
    return fsdp(model, min_size=0), P("data")


def megatron(model, x):
    return tensor_parallel(model), P("data")


X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
TWO_AXES = AbstractMesh((64, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@functools.cache
def planned():
    """Four strategies for 256 devices, one of which fails."""
    return compare(
        {
            "dp": dp,
            "fsdp": split,
            "tp": Strategy(megatron, mesh=TWO_AXES),
            "typo": (P("modle"), P("data")),
        },
        apply,
        nnx.eval_shape(make),
        X,
        mesh={"data": 256},
        memory_limit="150 KiB",
    )


def folder_of(test):
    """A temporary folder for a test."""
    return Path(test.enterContext(tempfile.TemporaryDirectory()))


class CompareTest(parameterized.TestCase):
    def test_arguments_computed_by_hand(self):
        arguments = {name: own["arguments"] for name, own in planned().figures.items()}
        rows = ROWS * WIDTH * F32
        assert arguments == {
            "dp": KERNELS + rows // 256,
            "fsdp": KERNELS // 256 + rows // 256,
            "tp": KERNELS // 4 + rows // 64,
        }

    def test_shardings_of_the_results(self):
        """Those of a strategy count before those for all of them."""
        strategies = {"rows": Strategy(P("a"), out_shardings=P("a")), "whole": P("a")}
        found = compare(strategies, jnp.sin, X, mesh={"a": 8}, out_shardings=P())
        assert found.bytes_sent_by_axes["rows"] == {} != found.bytes_sent_by_axes["whole"]

    def test_lines_of_cached_reports(self):
        """A table of lines is that of the code as it is now."""
        folder = folder_of(self)

        def lines(above):
            code = compile("\n" * above + "def f(x): return jnp.sin(x)", "user.py", "exec")
            exec(code, names := {"jnp": jnp})
            found = compare({"one": None}, names["f"], X, cache_dir=folder, by_module=True)
            return [row.line for row in found.reports["one"].by_line.rows if row.line]

        assert [lines(above) for above in (0, 2, 2)] == [[1], [3], [3]]
        assert len([*folder.iterdir()]) == 2  # the last one was not compiled again

    def test_collectives_computed_by_hand(self):
        sent = planned().bytes_sent_by_axes
        assert sent["dp"] == {}
        # One sum of the output, over rings of 4: each device sends 2 · 3/4 of its rows.
        own_rows = ROWS // 64 * WIDTH * F32
        assert sent["tp"] == {("model",): 2 * own_rows * 3 // 4}
        assert set(sent["fsdp"]) == {("data",)}
        assert planned().figures["tp"]["bytes_sent"] == sent["tp"]["model",]

    def test_which_fit(self):
        found = planned()
        assert found.memory_limit == 150 * 1024
        # fsdp stores the least, but gathers both kernels.
        assert found.figures["fsdp"]["arguments"] < 2000 and KERNELS < 150 * 1024
        assert [found.fits(name) for name in found.reports] == [True, False, True, False]
        assert found.fitting == ("dp", "tp")
        assert found.best("bytes_sent") == "dp" and found.best("arguments") == "tp"
        assert found.best("roofline") is None  # no device was given
        one = dataclasses.replace(found, memory_limit=1)
        assert one.fitting == () and one.best("peak") is None
        assert dataclasses.replace(found, memory_limit=None).fitting == ("dp", "fsdp", "tp")
        with pytest.raises(KeyError):
            found.fits("pp")
        with pytest.raises(ValueError, match="the column must be one of"):
            found.best("price")

    def test_failures_keep_their_errors(self):
        failure = planned().reports["typo"]
        assert isinstance(failure, Failure)
        assert failure.error.startswith("ValueError: ")
        assert "the mesh has no axis 'modle'" in failure.error
        assert "typo failed: ValueError: " in str(planned())
        assert "typo" not in planned().figures and set(planned().seconds) == set(planned().reports)

    def test_figures_for_the_devices_that_are_here(self):
        mesh = mesh_of((8,), ("data",))
        found = compare(
            {"fsdp": split}, apply, make(), np.ones((ROWS, WIDTH), np.float32), mesh=mesh
        )
        assert found.reports["fsdp"].mesh.device_ids == [device.id for device in jax.devices()]
        [model] = [sharded_init(make, lambda model: fsdp(model, mesh=mesh, min_size=0), mesh)]
        held = sum(
            leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(nnx.state(model))
        )
        assert found.figures["fsdp"]["arguments"] == held + ROWS * WIDTH * F32 // 8
        own = jit(apply, in_shardings=(fsdp(model, mesh=mesh, min_size=0), P("data")), mesh=mesh)
        expected = own.lower(model, X).compile().report()
        for part in ("parameters", "memory", "cost", "mesh"):
            assert getattr(found.reports["fsdp"], part) == getattr(expected, part)

    def test_arguments_are_not_changed(self):
        model = make()
        before = model.up.kernel[...]
        with jax.set_mesh(mesh_of((8,), ("data",))):
            found = compare({"dp": dp}, apply, model, X)  # the mesh in context
        assert model.up.kernel[...] is before and before.sharding.num_devices == 1
        assert found.reports["dp"].num_devices == 8

    def test_shared_and_static_arguments(self):
        def fun(pair, name, x):
            assert name == "relu" and pair[0] is pair[1]
            return pair[0](x)

        model = make()
        found = compare(
            {"dp": (None, P("data"))}, fun, [model, model], "relu", X, mesh={"data": 2},
            static_argnames="name",
        )  # fmt: skip
        assert found.figures["dp"]["arguments"] == KERNELS + ROWS * WIDTH * F32 // 2

    def test_modes_are_those_of_the_jitted_function(self):
        model = make()
        shared = jit(lambda pair, x: pair[0](x), graph=True)
        specs = {"dp": (None, P("data"))}
        with nnx.set_graph_mode(False):
            found = compare(specs, shared, [model, model], X, mesh={"data": 2})
        assert found.figures["dp"]["arguments"] == KERNELS + ROWS * WIDTH * F32 // 2

    def test_numpy_arrays_have_the_dtype_of_a_call(self):
        def total(x):
            return x.sum()

        x = np.arange(8)  # of 64 bits
        report = compare({"all": (P(),)}, total, x, mesh={"data": 1}).reports["all"]
        traced = jax.jit(total).trace(x).jaxpr.in_avals[0]
        assert report.parameters[0].dtype == str(traced.dtype)

    def test_device_gives_roofline_and_limit(self):
        found = planned().judged(hardware="TPU v5e")
        own = HARDWARE["TPU v5e"]
        assert found.memory_limit == own.memory_bytes and found.fitting == ("dp", "fsdp", "tp")
        for name, figures in found.figures.items():
            roofline = found.reports[name].roofline
            assert roofline.compute_s == figures["flops"] / own.flops
            hops = own.latency * len(found.reports[name].collectives)
            sent = figures["bytes_sent"] / own.interconnect_bandwidth
            assert roofline.interconnect_s == pytest.approx(sent + hops)
            assert figures["roofline"] == roofline.seconds > 0
        assert found.judged(memory_limit="1 KB").memory_limit == 1000
        assert "roofline: the estimated time, at peak rates of TPU v5e" in str(found)

    def test_json(self):
        found = planned()
        again = Comparison.from_json(found.to_json())
        assert again == found
        data = json.loads(found.to_json())
        assert (data["format"], data["version"]) == ("nnx_sharding.comparison", 3)
        assert data["reports"]["typo"] == {"error": found.reports["typo"].error}
        file = folder_of(self) / "plan.json"
        found.save(file)
        assert Comparison.load(file) == found

    def test_marks(self):
        """Text, JSON and ``best`` agree, and mark nothing that does not fit the memory."""
        found = planned()
        data = found.as_dict()
        assert (
            data["best"] == found.marked == {column: found.best(column) for column in data["best"]}
        )
        assert data["best"]["arguments"] == "tp"  # fsdp has less, and does not fit
        [fsdp_line] = [line for line in str(found).splitlines() if line.startswith("fsdp")]
        assert "*" not in fsdp_line
        one = Comparison({"dp": found.reports["dp"]})
        assert one.marked == {} and "*" not in str(one)

    def test_text(self):
        lines = str(planned()).splitlines()
        assert lines[0].split()[:5] == ["strategy", "mesh", "peak", "arguments", "sent"]
        assert lines[2].startswith("dp        data 256") and lines[2].endswith("yes")
        assert lines[3].startswith("fsdp      data 256") and lines[3].endswith("no")
        assert lines[4].startswith("tp        data 64 × model 4") and " * " in lines[4]
        only = Comparison({"a": Failure("ValueError: x\ny")})
        assert str(only) == "a failed: ValueError: x\n  y"
        for count, more in ((4, "a; b; c; d"), (5, "a; b; c; and 2 more")):
            many = dict.fromkeys("abcde"[:count], Failure("ValueError: x"))
            ruled_out = dict.fromkeys("abcde"[:count], "too slow") | {"f": "too large"}
            lines = str(Comparison(many, ruled_out=ruled_out)).splitlines()
            assert lines == [
                f"{more} failed: ValueError: x",
                f"{count + 1} not compiled (ruled_out has their names):",
                f"  {count:>5}  too slow",
                "      1  too large",
            ]

    def test_reasons_that_differ_in_numbers_and_names_are_counted_once(self):
        ruled_out = {f"a{i}": f"shards everything like b{i}, data {i}" for i in range(300)}
        ruled_out |= {f"c{i}": f"the arguments take {i}.5 GiB on each device" for i in range(20)}
        ruled_out |= {f"d{i}": f"takes {i} ms or more by its products (bound)" for i in range(9)}
        ruled_out |= {"e": "takes 3.00 µs or more by its products (bound)"}
        assert str(Comparison({}, ruled_out=ruled_out)).splitlines()[1:] == [
            "    300  shards everything like another",
            "     20  such as: the arguments take 0.5 GiB on each device",
            "     10  such as: takes 0 ms or more by its products (bound)",
        ]

    @parameterized.named_parameters(
        ("no_json", "{", "not JSON"),
        ("no_object", "[]", "it has no format"),
        ("report", '{"format": "nnx_sharding.report"}', "its format is 'nnx_sharding.report'"),
        ("version", '{"format": "nnx_sharding.comparison", "version": 4}', "reads version 3"),
        ("bool", '{"format": "nnx_sharding.comparison", "version": true}', "version True"),
        (
            "parts",
            '{"format": "nnx_sharding.comparison", "version": 3, "memory_limit": "x", "more": 1, '
            '"seconds": {}}',
            "ruled_out, measured, more missing or unknown",
        ),
        (
            "damaged",
            '{"format": "nnx_sharding.comparison", "version": 3, "memory_limit": null, '
            '"seconds": {}, "ruled_out": {}, "measured": {}, "best": {}, '
            '"reports": {"dp": {"format": "nnx_sharding.report", "version": 1}}}',
            "reports.dp: this report of a program has the version 1",
        ),
    )
    def test_bad_json(self, text, message):
        with fails(ValueError, message):
            Comparison.from_json(text)
        file = folder_of(self) / "bad.json"
        file.write_text(text)
        with pytest.raises(ValueError) as caught:
            Comparison.load(file)
        assert str(caught.value).startswith(f"{file}: ")

    @parameterized.named_parameters(
        ("no_mapping", [dp], {}, TypeError, "must be a mapping"),
        ("none", {}, {}, ValueError, "expected strategies"),
        ("limit", {"dp": dp}, {"memory_limit": "much"}, ValueError, "is not a size"),
        ("limit_type", {"dp": dp}, {"memory_limit": 1.5}, TypeError, "a size must be"),
        ("hardware", {"dp": dp}, {"hardware": "TPU v5q"}, ValueError, "Did you mean"),
        ("shardings", {"dp": dp}, {"in_shardings": None}, TypeError, "leave out in_shardings"),
        ("names", {"dp": dp}, {"static_argnames": "y"}, ValueError, "not parameters of the func"),
    )
    def test_bad_arguments(self, strategies, options, error, message):
        with pytest.raises(error, match=message):
            compare(strategies, apply, None, X, **options)

    def test_bad_function(self):
        with pytest.raises(TypeError, match="compare needs a function"):
            compare({"dp": dp}, 3, None, X)

    def test_a_function_of_jit_keeps_its_other_options(self):
        wrapped = jit(apply, in_shardings=P("no"), donate_argnums=0, compiler_options={})
        [report] = compare({"dp": dp}, wrapped, make(), X, mesh={"data": 2}).compiled.values()
        assert [row.donated for row in report.parameters] == [True, True, False]
        assert report.mesh.axes == {"data": 2}

    def test_why_figures_are_unknown(self):
        known = planned().reports["fsdp"].with_roofline("TPU v5e")
        odd = "HloModule m\n\nENTRY %m {\n  ROOT %a = f32[8] all-to-some()\n}\n"
        unread = dataclasses.replace(known, collectives=None, cost=None, hlo=odd)
        comparison = Comparison({"odd": unread.with_roofline("TPU v5e"), "known": known})
        assert comparison.best("roofline") == "known"
        assert "odd: flops unknown, and ranked after known ones: not understood: a = f32" in str(
            comparison
        )
        assert why_unknown(known) == {}
        assert [*why_unknown(dataclasses.replace(known, memory=None))] == ["peak"]

    def test_columns_without_figures_are_left_out(self):
        known = planned().reports["fsdp"].with_roofline("TPU v5e")
        comparison = Comparison({"a": known, "b": known})
        assert {"flops", "roofline", "sent"} <= {*printed(comparison, width=200).split()}
        bare = dataclasses.replace(known, cost=None, roofline=None)
        text = printed(Comparison({"a": bare, "b": bare}), width=200)
        header = next(line for line in text.splitlines() if "strategy" in line)
        assert "flops" not in header and "roofline" not in header and "sent" in header
        # One that differs shows both.
        assert "flops" in printed(Comparison({"a": known, "b": bare}), width=200)

    def test_each_column_of_figures_is_explained(self):
        for width in (200, 100):  # a narrow table has fewer columns
            lines = printed(planned().judged(hardware="TPU v5e"), width=width).splitlines()
            _, _, *titles = re.split(r"\s{2,}", lines[0].strip())
            phrases = [
                line.strip().partition(": ")[0] for line in lines if re.match("  [a-z]", line)
            ]
            expected = dict.fromkeys("over …" if x.startswith("over ") else x for x in titles)
            assert phrases[: len(expected)] == [*expected]

    def test_caveat_of_programs_for_cpus(self):
        """Their memory traffic is that of the CPU's compiler, whatever the rates."""
        known = planned().reports["dp"].with_roofline("TPU v5e")
        own = dataclasses.replace(HARDWARE["TPU v5e"], spread=0.1)  # measured on the CPU itself
        for report, is_foreign in (
            (known, True),
            (dataclasses.replace(known, platform="tpu"), False),
            (known.with_roofline(own), False),
            (planned().reports["dp"], False),  # without a roofline
        ):
            for shown in (report, Comparison({"dp": report})):
                assert ("from the program compiled for CPU: bytes" in str(shown)) == is_foreign

    def test_bad_reports(self):
        with pytest.raises(ValueError, match="nothing to compare"):
            Comparison({})
        with pytest.raises(TypeError, match="'a': 3\n  'b': 'x'"):
            Comparison({"a": 3, "b": "x"})


class PlanningMeshTest(parameterized.TestCase):
    def test_devices_that_are_here_come_first(self):
        assert planning_mesh({"a": 2, "b": 4}).devices.size == 8
        assert list(planning_mesh({"a": 4}).devices.flat) == jax.devices()[:4]
        assert planning_mesh({"a": -1}).shape == {"a": 8}
        assert planning_mesh({"a": np.int64(4)}).shape == {"a": 4}
        own = mesh_of((2, 4), ("a", "b"))
        assert planning_mesh(own) is own

    def test_more_than_there_are(self):
        types = (AxisType.Explicit, AxisType.Auto)
        mesh = planning_mesh(AbstractMesh((3, 5), ("a", "b"), axis_types=types))
        assert isinstance(mesh, Mesh) and dict(mesh.shape) == {"a": 3, "b": 5}
        assert mesh.axis_types == types
        assert not {*mesh.devices.flat} & {*jax.devices()}
        assert planning_mesh({"a": 15}).devices.flat[0] is mesh.devices.flat[0]  # made once
        assert jax.device_count() == 8

    def test_refused(self):
        with pytest.raises(TypeError, match="sizes of its axes by name"):
            planning_mesh((8, 4))
        for size in ("8", 0, 2.5):
            with pytest.raises(ValueError, match=rf"sizes \({size!r},\) do not take the 8"):
                planning_mesh({"a": size})
        with pytest.raises(ValueError, match="at most 10000 devices, got 99999999"):
            planning_mesh(AbstractMesh((99999999,), ("a",)))

    def test_a_release_without_them(self):
        _compat.virtual_cpu_devices.cache_clear()
        try:
            with (
                mock.patch("nnx_sharding._compat.jax_names._make_cpu_client", None),
                pytest.raises(RuntimeError, match="--devices 17"),
            ):
                planning_mesh({"a": 17})
        finally:
            _compat.virtual_cpu_devices.cache_clear()


class LimitsTest(parameterized.TestCase):
    @parameterized.parameters(
        (0, 0), (7, 7), ("7", 7), ("1KiB", 1024), ("1 kb", 1000), ("2 GiB", 2**31), ("16G", 16e9),
        ("1.5 MiB", 3 * 2**19), (".5 TB", 5e11), ("3 b", 3), (" 4 KIB ", 4096),
    )  # fmt: skip
    def test_read(self, text, expected):
        assert read_bytes(text) == expected

    @parameterized.parameters("", "GiB", "-1", "1 XB", "1 GiB 2", "1e3", "nan", -3, "1,5 GB")
    def test_refused(self, text):
        with pytest.raises(ValueError, match="is not a size"):
            read_bytes(text)

    @parameterized.parameters(1.5, None, True, b"1")
    def test_other_types(self, value):
        with pytest.raises(TypeError, match="a size must be"):
            read_bytes(value)


class DiffTest(parameterized.TestCase):
    def test_nothing_changed(self):
        changes = diff(planned(), Comparison.from_json(planned().to_json()))
        assert list(changes) == []
        assert str(changes) == "no changes"

    def test_reports(self):
        before, after = planned().reports["dp"], planned().reports["fsdp"]
        changes = diff(before, after)
        by_name = {change.name: change for change in changes}
        kernel = by_name["model.up.kernel"]
        assert kernel.before == "float32[64,256] P()"
        assert kernel.after == "float32[64,256] P(None, 'data')"
        assert kernel.relative is None
        memory = by_name["arguments"]
        assert (memory.before, memory.after) == (before.memory.arguments, after.memory.arguments)
        assert memory.relative == memory.after / memory.before - 1 < 0
        gathers = by_name["all-gather over data: number"]
        assert gathers.before == 0 and gathers.after > 0 and gathers.relative == math.inf
        assert "x" not in by_name  # unchanged
        assert memory not in changes.grown() and gathers in changes.grown(10)
        back = diff(after, before)
        assert {(c.name, c.before, c.after) for c in back} == {
            (c.name, c.after, c.before) for c in changes
        }
        text = str(changes)
        assert "model.up.kernel: float32[64,256] P() → " in text
        assert "all-gather over data: number: 0 → " in text and "(from nothing)" in text
        assert json.loads(changes.to_json())["changes"][0]["kind"] == changes[0].kind

    def test_figures_that_become_unknown(self):
        before = planned().reports["fsdp"].with_roofline("TPU v5e")
        for lost in ({"collectives": None}, {"cost": None}, {"memory": None}):
            after = dataclasses.replace(before, **lost).with_roofline("TPU v5e")
            grown = diff(before, after).grown(10)
            assert grown and all(change.after is None for change in grown)
            assert "→ –" in str(grown[0])  # noqa: RUF001
            assert not diff(after, before).grown(10)
            best = Comparison({"unknown": after, "known": before}).best("roofline")
            assert best == ("unknown" if "memory" in lost else "known")
        failed = diff(Comparison({"a": before}), Comparison({"a": Failure("E: e")}))
        assert [change.name for change in failed.grown(10)] == ["outcome"]

    def test_parameters_added_and_removed(self):
        report = planned().reports["dp"]
        less = dataclasses.replace(report, parameters=report.parameters[1:])
        path = report.parameters[0].path
        [removed], [added] = diff(report, less), diff(less, report)
        assert (removed.name, removed.after) == (path, None)
        assert (added.name, added.before) == (path, None)
        assert str(added).startswith(f"{path}: none → float32[")

    def test_arguments_of_which_only_the_path_changed_are_one_change(self):
        report = planned().reports["dp"]

        def with_paths(path_of):
            rows = [dataclasses.replace(x, path=path_of(x.path)) for x in report.parameters]
            return dataclasses.replace(report, parameters=rows)

        def of_state(path):
            return "state[0]" + "".join(f"[{key!r}]" for key in path.split(".")[1:])

        paths = [row.path for row in report.parameters if row.path != "x"]
        [moved, *others] = diff(with_paths(of_state), report)
        assert moved.name == f"paths of {len(paths)} arguments"
        assert (moved.before, moved.after) == (f"{of_state(paths[0])}, …", f"{paths[0]}, …")
        # Nothing is in the batch whose path could end that of the other one.
        assert {change.name for change in others} == {"state[0]", "x"}
        [one] = diff(report, with_paths(lambda path: path.replace("model.up.k", "net.up.k")))
        assert (one.name, one.before) == ("path of an argument", "model.up.kernel")
        # With the same path and two models, nothing says which of them each parameter is.
        twice = [
            dataclasses.replace(row, path=row.path.replace("model", name))
            for name in ("student", "teacher")
            for row in report.parameters
            if row.path != "x"
        ]
        changes = diff(report, dataclasses.replace(report, parameters=twice))
        assert {change.name for change in changes} == {
            row.path for row in (*report.parameters, *twice)
        }

    def test_versions_are_shown_but_are_not_changes(self):
        report = planned().reports["dp"]
        other = {**report.made_with, "jax": "0.99"}
        changes = diff(report, dataclasses.replace(report, made_with=other))
        assert not changes
        assert changes.made_with == {"jax": (jax.__version__, "0.99")}
        assert str(changes) == f"made with jax {jax.__version__} → 0.99\nno changes"

    def test_figures_that_read_the_same_are_one_line(self):
        before = planned().reports["dp"]
        memory = dataclasses.replace(before.memory, peak=before.memory.peak * 2)
        costs = {x: 1e9 + getattr(before.cost, x) for x in ("flops", "bytes_accessed")}
        old = dataclasses.replace(before, cost=dataclasses.replace(before.cost, **costs))
        more = {name: value + 1 for name, value in costs.items()}
        new = dataclasses.replace(old, cost=dataclasses.replace(old.cost, **more), memory=memory)
        changes = diff(old, new)
        assert {change.name for change in changes} == {"peak", *costs}  # the data has all
        title, peak, rest = str(changes).splitlines()
        assert title == "memory of one device" and peak.startswith("  peak: ")
        assert rest == "changed by less than the digits shown: flops, bytes_accessed"
        assert rest in str(diff(old, dataclasses.replace(new, memory=old.memory)))

    def test_modules(self):
        before = ProgramReport.from_dict(reports.report())
        table = before.by_module
        first = dataclasses.replace(table.rows[0], flops=2000, at_peak={"parameters": 4096})
        more = dataclasses.replace(table, rows=(first, *table.rows[1:]))
        changes = diff(before, dataclasses.replace(before, by_module=more))
        up = "model.blocks[0].up"
        assert [str(change) for change in changes] == [
            f"{up}: at the peak: 12.0 KiB → 4.00 KiB (-66.7%)",
            f"{up}: flops: 1.00 k → 2.00 k (+100.0%)",
        ]
        assert not changes.grown()  # the totals are the same
        assert not diff(before, dataclasses.replace(before, by_module=None))
        both = Comparison({"a": before, "b": dataclasses.replace(before, by_module=more)})
        lines = [line.split() for line in str(both).splitlines()]
        assert ["model.blocks", "14.0", "KiB", "6.00", "KiB"] in lines

    def test_threshold(self):
        report = planned().reports["dp"]
        cost = dataclasses.replace(report.cost, flops=report.cost.flops * 1.04)
        changed = dataclasses.replace(report, cost=cost)
        [change] = diff(report, changed)
        assert change.name == "flops" and math.isclose(change.relative, 0.04)
        assert not diff(report, changed, threshold=0.05)
        assert not diff(report, changed).grown(0.05) and diff(report, changed).grown(0.03)
        assert "(+4.0%)" in str(change)

    def test_comparisons(self):
        before = planned()
        reports = dict(before.reports)
        reports["typo"] = reports["tp"]
        reports["new"] = reports["dp"]
        reports["dp"] = reports["fsdp"]
        del reports["tp"]
        changes = diff(before, Comparison(reports))
        outcomes = {c.strategy: (c.before, c.after) for c in changes if c.name == "outcome"}
        assert outcomes["tp"] == ("compiled", None) and outcomes["new"] == (None, "compiled")
        assert outcomes["typo"][0].startswith("failed: ValueError") and outcomes["typo"][1]
        assert {c.strategy for c in changes} == {"dp", "tp", "typo", "new"}
        assert "dp: memory of one device" in str(changes)
        # Those that only one side has are one line for each side, but an error has its own.
        both = Comparison(dict.fromkeys(("dp", "dp, data 8", "e", "f"), before.reports["dp"]))
        other = Comparison({**reports, "z": Failure("E: e")})
        text = str(diff(both, other))
        assert text.startswith(
            "only before (3): dp, data 8; e; f\nonly after (3): fsdp; typo; new\n"
        )
        assert "outcome: compiled → none" not in text and "outcome: none → compiled" not in text
        assert "z: program\n  outcome: none → failed: E: e" in text

    def test_files(self):
        folder = folder_of(self)
        planned().save(folder / "plan.json")
        planned().reports["dp"].save(folder / "dp.json")
        assert not diff(folder / "plan.json", str(folder / "plan.json"))
        with pytest.raises(ValueError, match="two reports or two comparisons"):
            diff(folder / "plan.json", folder / "dp.json")
        (folder / "bad.json").write_text("{")
        with pytest.raises(ValueError, match=r"bad\.json: "):
            diff(folder / "plan.json", folder / "bad.json")
        with pytest.raises(OSError):
            diff(folder / "plan.json", folder / "missing.json")

    @parameterized.parameters(-0.1, float("nan"), "5%")
    def test_bad_threshold(self, threshold):
        with pytest.raises(ValueError, match="threshold must be a fraction"):
            diff(planned(), planned(), threshold=threshold)
        with pytest.raises(ValueError, match="threshold must be a fraction"):
            Changes([Change("memory", "peak", 1, 2)]).grown(threshold)

    def test_bad_types(self):
        with pytest.raises(TypeError, match="the path of a file"):
            diff(planned(), 3)


class ExampleTest(parameterized.TestCase):
    CONFIG = plan_7b.Config(
        vocabulary=64, features=32, hidden=96, heads=4, layers=2, context=16, batch=16
    )

    def test_seven_billion(self):
        features, hidden, vocabulary = 4096, 11008, 32000
        layer = 4 * features**2 + 3 * features * hidden + 2 * features
        count = 32 * layer + 2 * vocabulary * features + features
        assert plan_7b.size_of(plan_7b.Config()) == count == 6_738_415_616

    def test_plan(self):
        all_ways = plan_7b.strategies({"data": 16}, {"data": 8, "model": 2})
        assert list(all_ways) == ["dp", "zero1", "fsdp", "tp × fsdp"]
        found = plan_7b.plan(self.CONFIG, {"dp": all_ways["dp"]})
        arguments = {name: own["arguments"] for name, own in found.figures.items()}
        # Parameters and two moments of each, two counts of steps, and a part of the tokens.
        count = plan_7b.size_of(self.CONFIG)
        assert arguments["dp"] == 12 * count + 2 * 4 + 17 * 4
        assert found.bytes_sent_by_axes["dp"]["data",] > 0
        # What the loop over the layers sends counts as often as it runs.
        assert {one.times for one in found.reports["dp"].collectives} == {1, 2}
        # What donated arguments take is not needed twice; all else is in the peak.
        memory = found.reports["dp"].memory
        assert memory.peak >= memory.arguments + memory.temporaries
        for name, report in found.reports.items():
            assert found.figures[name]["flops"] == report.cost.flops


def test_failures_for_one_reason_take_one_slot(monkeypatch):
    """Of ten programs, eight do not fit: after the first, these take no slots of good ones."""
    monkeypatch.setattr(compiling, "_NUM_WORKERS", 1)
    done = []

    def report(lowered, *_, **__):
        done.append(lowered)
        if lowered < 8:
            raise MemoryError(f"{lowered}00 bytes are too many")
        return planned().reports["dp"]

    monkeypatch.setattr(compiling, "_report", report)

    def run(most):
        done.clear()
        programs = {f"p{i}": lambda i=i: (i, None) for i in range(10)}
        found = compiling.compile_all("test", programs, most=most, quiet=True)
        return len(found.compiled), len(done)

    assert run(most=10) == (2, 10)
    assert run(most=5) == (2, 10)  # counted are one failure, the seventh and eighth, and both
    assert run(most=2) == (0, 4)  # not without end
