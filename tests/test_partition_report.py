"""``check_sharding`` and ``assert_sharded``, against arrays that are placed."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import optax
import pytest
from absl.testing import parameterized
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from draws import specs
from nnx_sharding import StateSharding, jit
from nnx_sharding.errors import NoMeshError
from nnx_sharding.report.sharding import check_sharding
from nnx_sharding.specs.filters import Paths
from nnx_sharding.testing import assert_sharded
from test_fit import shapes
from zoo import MLP, Net, fails, mesh_of, mlp_specs

ABSTRACT = AbstractMesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
SPECS = specs(("a", "b"), 3)
TYPES = ["float32", "bfloat16", "int4", "bool", "key<fry>", "float8_e4m3fn", "uint8"]


def mesh24():
    return mesh_of((2, 4), ("a", "b"))


def array_of(shape, dtype):
    if dtype == "key<fry>":
        return jax.random.split(jax.random.key(0), shape)
    return jnp.zeros(shape, dtype)


def trained():
    model = MLP(hidden=6)
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def held(array):
    """The bytes of an array on a device, where two int4 take one byte."""
    return -(-array.nbytes // 2) if array.dtype == "int4" else array.nbytes


class BytesTest(parameterized.TestCase):
    """The bytes of the report are those on the devices."""

    @settings(max_examples=40)
    @given(
        specs(("a", "b"), 3), shapes, st.sampled_from(TYPES), st.sampled_from(["replicate", "drop"])
    )
    def test_of_an_array(self, spec, shape, dtype, how):
        array = array_of(shape, dtype)
        report = check_sharding(
            {"x": array}, StateSharding({...: spec}), mesh24(), on_indivisible=how
        )
        [row] = report.rows
        placed = jax.device_put(array, NamedSharding(mesh24(), row.spec))
        shards = [shard.data for shard in placed.addressable_shards]
        assert {(row.shard_shape, row.bytes_per_device)} == {(s.shape, held(s)) for s in shards}
        assert report.device_bytes == tuple(map(held, shards))
        assert report.bytes_total == row.bytes_total == held(array)
        replicated = held(array) if placed.is_fully_replicated else 0
        assert report.replicated_bytes == replicated
        assert (row.why is None) == (row.spec == spec)
        assert report.ok

    @parameterized.parameters("auto", "explicit")
    def test_of_a_model(self, kind):
        mesh = mesh_of((2, 4), ("a", "b"), kind)
        rules = StateSharding(
            {nnx.PathContains("kernel"): P("a", "b"), nnx.Param: P("b"), ...: P()}
        )
        report = check_sharding(nnx.eval_shape(Net), rules, mesh)
        model = jit(Net, out_shardings=rules, mesh=mesh)()
        arrays = {
            "/".join(map(str, path)): leaf.get_raw_value()
            for path, leaf in nnx.to_flat_state(nnx.state(model))
        }
        self.assertEqual([row.path for row in report.rows], list(arrays))
        for row in report.rows:
            self.assertEqual(row.sharding, arrays[row.path].sharding)
            shard = arrays[row.path].addressable_shards[0].data
            self.assertEqual((row.shard_shape, row.bytes_per_device), (shard.shape, shard.nbytes))
            self.assertEqual((row.dtype, row.shape), (str(shard.dtype), arrays[row.path].shape))
        held = sum(x.addressable_shards[0].data.nbytes for x in arrays.values())
        self.assertEqual((report.device_bytes, report.balance), ((held,) * 8, 1))
        replicated = sum(x.nbytes for x in arrays.values() if x.is_fully_replicated)
        self.assertEqual(report.replicated_bytes, replicated)

    def test_abstract_or_not(self):
        rules = mlp_specs("b")
        models, meshes = (MLP(), nnx.eval_shape(MLP)), (mesh24(), ABSTRACT)
        texts = {check_sharding(m, rules, mesh).to_json() for m in models for mesh in meshes}
        with jax.set_mesh(mesh24()):
            texts.add(check_sharding(MLP(), rules).to_json())
        self.assertLen(texts, 1)

    def test_uneven_devices(self):
        one, four = SingleDeviceSharding(jax.devices()[1]), mesh_of((4,), ("x",))
        rules = StateSharding(
            {nnx.PathContains("up"): one, ...: NamedSharding(four, P("x"), memory_kind="device")}
        )
        report = check_sharding(MLP(), rules)
        self.assertEqual(report.device_bytes, (64, 320, 64, 64))
        self.assertEqual(report.balance, 320 / 128)
        self.assertEqual(report.replicated_bytes, 256)

    def test_a_pytree_in_a_variable(self):
        x = jnp.zeros(8)
        table = nnx.Variable({"x": x, "y": jnp.zeros((4, 2), "bfloat16")})
        report = check_sharding(nnx.Dict(t=table), StateSharding({...: P("b")}), ABSTRACT)
        found = [(row.path, row.bytes_per_device) for row in report.rows]
        self.assertEqual(found, [("t/x", 8), ("t/y", 4)])


class RulesTest(parameterized.TestCase):
    def test_problems_are_those_of_jit(self):
        cases = [
            (None, ": no rule matches", P()),
            (P("bb"), ", P('bb',): the mesh has no axis 'bb'; did you mean 'b'?", P()),
            (P("b", "b"), ", P('b', 'b'): 'b' is used 2 times; an axis can shard only one ", P()),
            (P(None, None, "b"), ", P(None, None, 'b'): the spec has 3 entries, the array 2", P()),
            (P(None, "b"), ": dimension 1 of size 6 is not divisible by 'b' (4)", P(None, None)),
        ]
        for spec, text, kept in cases:
            model, up = MLP(hidden=6), {} if spec is None else {nnx.PathContains("up"): spec}
            rules = StateSharding({**up, nnx.PathContains("down"): P()})
            report = check_sharding(model, rules, mesh24())
            [line] = report.problems
            self.assertStartsWith(line, "up/kernel, shape (4, 6)")
            self.assertIn(text, line)
            self.assertEqual((report.rows[1].path, report.rows[1].spec), ("up/kernel", kept))
            self.assertEqual(report.unmatched, () if up else ("up/kernel",))
            self.assertEqual(report.on_indivisible, ("up/kernel",) if "divis" in text else ())
            self.assertFalse(report.ok)
            with self.assertRaises(ValueError):
                jit(lambda m: None, in_shardings=rules, mesh=mesh24())(model)
            with fails(ValueError, line):
                report.raise_for_problems()

    def test_no_problems(self):
        rules = StateSharding({nnx.PathContains("up"): P("a"), ...: P()})
        jit(lambda m: None, in_shardings=rules, mesh=mesh24(), strict=True)(MLP(hidden=6))
        report = check_sharding(MLP(hidden=6), rules, mesh24())
        self.assertTrue(report.ok)
        report.raise_for_problems(strict=True)

    @parameterized.parameters(None, "error", "replicate", "drop")
    def test_indivisible(self, how):
        rules = {nnx.PathContains("up"): P("a", "b"), ...: P()}
        model, strict = MLP(hidden=6), StateSharding(rules, on_indivisible="error")
        on_rules = check_sharding(model, StateSharding(rules, on_indivisible=how), ABSTRACT)
        report = check_sharding(model, strict, ABSTRACT, on_indivisible=how)
        self.assertEqual(report, on_rules)
        row = report.rows[1]
        self.assertEqual(row.declared, P("a", "b"))
        self.assertEqual(row.spec, P() if how == "replicate" else P("a", None))
        self.assertEqual(row.is_fault, how in (None, "error"))
        lines = report.problems if row.is_fault else report.warnings
        self.assertLen(lines, 1)
        self.assertIn("dimension 1 of size 6 is not divisible by 'b' (4)", lines[0])
        if not row.is_fault:
            self.assertIn(f"P('a', 'b') → {row.spec}: ", lines[0])
            report.raise_for_problems()
            with self.assertRaisesRegex(ValueError, "not divisible"):
                report.raise_for_problems(strict=True)

    def test_which_rule(self):
        up, dwn, kernel = map(nnx.PathContains, ("up", "dwn", "kernel"))
        filters = [up, dwn, nnx.All(nnx.Param, up), nnx.Param, kernel, Paths([("other",)]), ...]
        rules = StateSharding((filter_, P()) for filter_ in filters)
        report = check_sharding(MLP(), rules, ABSTRACT)
        found = [(row.rule, row.rule_text) for row in report.rows]
        self.assertEqual(found, [(3, "Param"), (0, rules.names[0])])
        self.assertEqual(report.unused, (1, 5))
        self.assertEqual(report.shadowed, {2: (0,), 4: (0, 3), 6: (0, 3)})
        one, two, four = report.warnings
        self.assertIn("matches nothing; did you mean 'down'?", one)
        self.assertIn("matches only what rule 0 before it matches", two)
        self.assertIn("matches only what rule 0, 3 before it matches", four)
        self.assertTrue(report.ok)

    def test_paths_start_at_the_module(self):
        seen = []
        rules = StateSharding({lambda path, _: seen.append(path) or True: P()})
        tree = {"both": trained(), "x": jnp.zeros(3), "v": nnx.Param(jnp.zeros(3))}
        report = check_sharding(tree, rules, ABSTRACT)
        names = [row.path for row in report.rows]
        self.assertEqual(names[:2], ["both/0/down/kernel", "both/0/up/kernel"])
        self.assertIn("both/1/opt_state/0/mu/up/kernel", names)
        self.assertEqual(names[-2:], ["v", "x"])
        ours, seen[:] = list(seen), []
        jit(lambda tree: None, in_shardings=(rules,), mesh=mesh24())(tree)
        self.assertEqual(ours, list(dict.fromkeys(seen)))

    def test_shared(self):
        model = MLP()
        report = check_sharding((model, model, model.up), StateSharding({...: P()}), ABSTRACT)
        self.assertEqual([row.path for row in report.rows], ["0/down/kernel", "0/up/kernel"])

    def test_none(self):
        rules = StateSharding({...: None})
        model = MLP()
        placed = jax.device_put(model.up.kernel[...], NamedSharding(mesh24(), P("a")))
        model.up.kernel.set_value(placed)
        down, up = check_sharding(model, rules, mesh24()).rows
        self.assertEqual((up.spec, up.declared, up.bytes_per_device), (P("a"), None, 128))
        self.assertEqual((down.spec, down.bytes_per_device), (P(), 256))
        down, _ = check_sharding(model, rules).rows
        self.assertEqual((down.spec, down.bytes_per_device), (None, 256))

    def test_formats(self):
        format_ = Format(Layout((1, 0)), NamedSharding(mesh24(), P("a")))
        report = check_sharding({"x": jnp.zeros((4, 4))}, StateSharding({...: format_}))
        self.assertEqual(report.rows[0].bytes_per_device, 32)

    def test_what_jax_refuses(self):
        mesh, spec = mesh_of((2, 4), ("a", "b"), "explicit"), P(P.UNCONSTRAINED)
        [row] = check_sharding({"x": jnp.zeros(4)}, StateSharding({...: spec}), mesh).rows
        try:
            NamedSharding(mesh, spec)
        except ValueError as error:
            self.assertEqual((row.why, row.is_fault), (str(error), True))
        else:
            self.assertIsNone(row.why)

    def test_bad_arguments(self):
        rules = StateSharding({...: P()})
        with self.assertRaisesRegex(TypeError, "StateSharding, .* in calls of their own"):
            check_sharding(MLP(), P("a"), ABSTRACT)
        with self.assertRaisesRegex(ValueError, "'error', 'replicate', 'drop'"):
            check_sharding(MLP(), rules, ABSTRACT, on_indivisible="keep")
        with self.assertRaises(NoMeshError):
            check_sharding(MLP(), rules)

    def test_nothing(self):
        report = check_sharding({"name": "x"}, StateSharding({...: P()}), ABSTRACT)
        self.assertEqual((report.rows, report.replicated_fraction, report.balance), ((), 0, 1))
        self.assertIn("total", str(report))


GOLDEN = """\
rule path        shape dtype   spec                        shard shape bytes/device bytes
0    down/kernel (6,4) float32 P('b', None) → P(None, None) (6,4)                 96    96
-    scale       (3)   float32 P()                          (3)                   12    12
0    up/kernel   (4,6) float32 P('b', None)                 (1,6)                 24    96
     total                                                                       132   204
"""


class TextTest(parameterized.TestCase):
    def report(self):
        model = MLP(hidden=6)
        model.scale = nnx.Variable(jnp.zeros(3))
        rules = StateSharding({nnx.Param: P("b", None), lambda path, _: False: P()})
        return check_sharding(model, rules, ABSTRACT)

    def test_table(self):
        text = str(self.report())
        lines = [line.split() for line in text.splitlines()[:7] if "---" not in line]
        self.assertEqual(lines, [line.split() for line in GOLDEN.splitlines()])
        self.assertIn("mesh 'a' (2) × 'b' (4); fully replicated: 108 bytes (52.9%)", text)
        self.assertIn("  0 Param\n", text)
        self.assertIn("problems:\n  down/kernel", text)
        self.assertNotIn(" at 0x", text)

    def test_json(self):
        report = self.report()
        data = json.loads(report.to_json())
        self.assertEqual(data, report.as_dict())
        self.assertEqual(list(data), list(report.as_dict()))
        text = """{"path": "up/kernel", "shape": [4, 6], "dtype": "float32", "spec": ["b", null],
            "shard_shape": [1, 6], "bytes_per_device": 24, "bytes_total": 96, "rule": 0,
            "rule_text": "Param", "declared": ["b", null], "why": null, "is_fault": false,
            "reason": null}"""
        self.assertEqual(data["rows"][2], json.loads(text))
        self.assertEqual(list(data["rows"][2]), list(json.loads(text)))
        self.assertEqual(data["unmatched"], ["scale"])
        self.assertEqual((data["mesh"], data["unused"]), ({"a": 2, "b": 4}, [1]))
        self.assertEqual(self.report().to_json(), report.to_json())
        spec = P(("a", "b"), P.UNCONSTRAINED)
        other = check_sharding({"x": jnp.zeros((8, 2))}, StateSharding({...: spec}), ABSTRACT)
        self.assertEqual(other.as_dict()["rows"][0]["declared"], [["a", "b"], "UNCONSTRAINED"])

    def test_ten_thousand_parameters(self):
        weight = jax.ShapeDtypeStruct((8, 8), "float32")
        blocks = ({f"w{i}": nnx.Param(weight) for i in range(100)} for _ in range(100))
        model = nnx.List([nnx.Dict(block) for block in blocks])
        rules = StateSharding(
            [*((nnx.PathContains(f"{i}"), P()) for i in range(99)), (..., P("a"))]
        )
        report = check_sharding(model, rules, ABSTRACT)
        self.assertLen(report.rows, 10_000)
        self.assertLen(report.unused, 99)


class AssertShardedTest(parameterized.TestCase):
    def placed(self, rules, mesh):
        return jit(MLP, out_shardings=rules, mesh=mesh)()

    def test_placed_and_declared(self):
        half = StateSharding({nnx.PathContains("up"): P(None, "b"), ...: P()})
        full = mlp_specs("b")
        assert_sharded(self.placed(full, mesh24()), tolerance=0)
        assert_sharded(nnx.eval_shape(MLP), sharding=full, mesh=ABSTRACT, tolerance=0)
        for rules in (half, StateSharding({...: P()})):
            with self.assertRaisesRegex(AssertionError, "down/kernel, shape .16, 4.: 256 B"):
                assert_sharded(self.placed(rules, mesh24()))
            with self.assertRaisesRegex(AssertionError, "down/kernel, shape .16, 4.: 256 B"):
                assert_sharded(nnx.eval_shape(MLP), sharding=rules, mesh=ABSTRACT)
        assert_sharded(self.placed(half, mesh24()), tolerance=0.5)
        with self.assertRaisesRegex(AssertionError, "256 B of 512 B .50.0%.*more than 49.0%"):
            assert_sharded(self.placed(half, mesh24()), tolerance=0.49)

    def test_unplaced(self):
        for model in (MLP(), nnx.eval_shape(MLP)):
            with self.assertRaises(AssertionError):
                assert_sharded(model)

    def test_one_device(self):
        assert_sharded(self.placed(StateSharding({...: P()}), mesh_of((1,), ("b",))), tolerance=0)
        assert_sharded({}, tolerance=0)

    def test_the_largest_come_first(self):
        tree = {f"x{i}": jnp.zeros(i) for i in range(1, 31)}
        with self.assertRaises(AssertionError) as raised:
            assert_sharded(tree)
        lines = str(raised.exception).splitlines()
        self.assertIn("  x30, shape (30,): 120 B, spec", lines[1])
        self.assertEqual(lines[-2], "  … and 15 more")

    def test_bad_arguments(self):
        for tolerance in (-0.1, 1.1, float("nan")):
            with pytest.raises(ValueError, match="tolerance"):
                assert_sharded(MLP(), tolerance=tolerance)
        with pytest.raises(ValueError, match="no rule matches"):
            assert_sharded(MLP(), sharding=StateSharding({nnx.BatchStat: P()}), mesh=ABSTRACT)
