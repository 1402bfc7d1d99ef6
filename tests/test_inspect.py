"""The table of parameters against the arrays, counts of collectives against known ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding

from nnx_sharding import StateSharding, jit
from nnx_sharding.analysis import collectives_of, parameter_table
from nnx_sharding.analysis.opcodes import COLLECTIVES
from nnx_sharding.analysis.parameters import ParameterTable
from zoo import MLP, P, mesh_of

MESH = mesh_of((2, 4), ("data", "model"))
SHARDING = StateSharding(
    {nnx.PathContains("up"): P(None, "model"), nnx.PathContains("down"): P("model"), ...: P()}
)


def create(rngs):
    model = MLP(rngs)
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def place(array, *spec):
    return jax.device_put(array, NamedSharding(MESH, P(*spec)))


def row_of(tree):
    [row] = parameter_table(tree)
    return row


ARRAYS = {
    "sharded": lambda: place(jnp.ones((8, 16)), "data", "model"),
    "sharded_over_two_axes": lambda: place(jnp.ones((8, 16)), ("data", "model")),
    "replicated": lambda: place(jnp.ones((8, 16), jnp.bfloat16)),
    "scalar": lambda: place(jnp.array(1, jnp.int8)),
    "empty": lambda: place(jnp.ones((0, 4)), None, "model"),
    "keys": lambda: place(jax.random.split(jax.random.key(0), 8), "data"),
    "on_one_device": lambda: jnp.ones((3, 5), bool),
}


class ParameterTableTest(parameterized.TestCase):
    @parameterized.named_parameters(ARRAYS.items())
    def test_sizes_are_those_of_the_shards(self, make):
        array = make()
        row = row_of(array)
        assert (row.path, row.shape, row.dtype) == ("", array.shape, str(array.dtype))
        for shard in array.addressable_shards:
            assert row.shard_shape == shard.data.shape
            assert row.bytes_per_device == shard.data.nbytes
        assert row.bytes_total == array.nbytes

    def test_model_and_optimizer_after_sharded_creation(self):
        with jax.set_mesh(MESH):
            model, optimizer = jit(create, out_shardings=(SHARDING, SHARDING))(nnx.Rngs(0))
        rows = {row.path: row for row in parameter_table([model, optimizer])}
        state = nnx.to_flat_state(nnx.state([model, optimizer]))
        assert list(rows) == ["/".join(map(str, path)) for path, _ in state]
        for path, variable in state:
            row, value = rows["/".join(map(str, path))], variable[...]
            assert row.spec == value.sharding.spec
            assert row.bytes_per_device == value.addressable_shards[0].data.nbytes
        for name in ("up/kernel", "down/kernel"):
            for moment in ("mu", "nu"):
                assert rows[f"1/opt_state/0/{moment}/{name}"].spec == rows[f"0/{name}"].spec

    def test_abstract_model_as_the_placed_one(self):
        placed = jit(MLP, out_shardings=SHARDING, mesh=MESH)(nnx.Rngs(0))
        abstract = nnx.clone(placed)
        for _, variable in nnx.iter_graph(abstract):
            if isinstance(variable, nnx.Variable):
                value = variable[...]
                variable.set_value(
                    jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
                )
        assert parameter_table(abstract) == parameter_table(placed)

    def test_abstract_without_sharding(self):
        row = row_of(nnx.eval_shape(lambda: nnx.Dict(w=nnx.Param(jnp.ones((4, 6))))))
        assert (row.path, row.spec, row.shard_shape) == ("w", None, (4, 6))
        assert row.bytes_per_device == row.bytes_total == 4 * 6 * 4

    def test_abstract_mesh(self):
        sharding = NamedSharding(AbstractMesh((2, 4), ("data", "model")), P("data", "model"))
        row = row_of(jax.ShapeDtypeStruct((8, 8), jnp.float16, sharding=sharding))
        assert (row.spec, row.shard_shape, row.bytes_per_device) == (sharding.spec, (4, 2), 16)

    @parameterized.named_parameters(
        ("numpy", np.ones((2, 3), np.int16), (2, 3), 12),
        ("python_float", 1.5, (), 4),
        ("python_bool", True, (), 1),
    )
    def test_host_values(self, value, shape, size):
        row = row_of(nnx.Dict(w=nnx.Param(value)))
        assert (row.path, row.shape, row.spec, row.bytes_total) == ("w", shape, None, size)

    def test_other_shardings_are_described(self):
        sharding = SingleDeviceSharding(jax.devices()[3])
        assert row_of(jax.device_put(jnp.ones(4), sharding)).spec == repr(sharding)

    def test_ref(self):
        row = row_of(nnx.Dict(w=nnx.Param(jnp.ones((2, 3)), ref=True)))
        assert (row.path, row.shape, row.bytes_total) == ("w", (2, 3), 24)

    def test_shared_variables_come_once(self):
        model = nnx.List([MLP(), MLP()])
        model[1].up = model[0].up
        model[1].down.kernel = model[0].down.kernel
        model[1].again = model
        assert [row.path for row in parameter_table(model)] == ["0/down/kernel", "0/up/kernel"]

    def test_paths_inside_of_values(self):
        value = {"a": jnp.ones(2), "b": [jnp.ones(3), jnp.ones(4)]}
        tree = {"model": nnx.Dict(state=nnx.Variable(value)), "extra": (jnp.ones(5), "text", None)}
        rows = [(row.path, row.shape) for row in parameter_table(tree)]
        assert rows == [
            ("extra/0", (5,)),
            ("model/state/a", (2,)),
            ("model/state/b/0", (3,)),
            ("model/state/b/1", (4,)),
        ]

    def test_nothing(self):
        assert parameter_table({}) == []

    def test_deleted_arrays(self):
        array = place(jnp.ones((8, 16)), "data")
        before = parameter_table(array)
        array.delete()
        assert parameter_table(array) == before

    def test_tracers(self):
        seen = []
        model = MLP()
        nnx.jit(lambda model: seen.extend(parameter_table(model)))(model)
        assert [row.shape for row in seen] == [row.shape for row in parameter_table(model)]

    def test_all_shardings_that_do_not_fit_are_named(self):
        sharding = NamedSharding(MESH, P("model"))
        bad = jax.ShapeDtypeStruct((6,), jnp.float32, sharding=sharding)
        tree = nnx.Dict(a=nnx.Param(bad), b=nnx.Param(jnp.ones(4)), c=nnx.Param(bad))
        with pytest.raises(ValueError, match=r"(?s)do not divide.*  a: .*\(6,\).*  c: .*Change"):
            parameter_table(tree)


class ShardingPropertiesTest(absltest.TestCase):
    def test_those_of_the_array(self):
        mesh = jax.make_mesh((2, 4), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
        sharding = NamedSharding(mesh, P("data", None), memory_kind="pinned_host")
        array = jax.device_put(jnp.ones((4, 6)), sharding)
        [row] = parameter_table({"w": nnx.Param(array)})
        self.assertEqual((row.sharding, row.num_devices), (sharding, 8))
        self.assertEqual(row.memory_kind, "pinned_host")
        held = sum(shard.data.nbytes for shard in array.addressable_shards)
        self.assertEqual(row.bytes_addressable, held)

    def test_without_sharding(self):
        [row] = parameter_table({"w": jax.ShapeDtypeStruct((2,), "float32")})
        self.assertIsNone(row.memory_kind)
        self.assertIsNone(row.bytes_addressable)
        self.assertEqual(row.num_devices, 1)


class FormatTableTest(absltest.TestCase):
    def test_columns_are_aligned(self):
        tree = {"wide": place(jnp.ones((64, 256)), None, "model"), "x": np.int8(3)}
        header, rule, wide, x, last_rule, total = str(parameter_table(tree)).splitlines()
        assert rule == last_rule
        starts = [i for i, c in enumerate(rule) if c == "-" and (i == 0 or rule[i - 1] == " ")]
        cells = [wide[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        spec = str(P(None, "model"))
        assert cells == ["wide", "(64,256)", "float32", spec, "(64,64)", "16384", "65536"]
        assert x.split() == ["x", "()", "int8", "-", "()", "1", "1"]
        assert total.split() == ["total", "16385", "65537"]
        assert len({len(line) for line in (header, rule, wide, x, total)}) == 1

    def test_no_rows(self):
        assert str(ParameterTable()).splitlines()[0].startswith("path")


LINES = {
    "sync": ("%r = f32[8]{0} all-reduce(%x), to_apply=%add", {"all-reduce": 1}),
    "root": ("  ROOT %r = f32[8]{0} all-reduce(%x), to_apply=%add", {"all-reduce": 1}),
    "no_percent_signs": ("r.1 = bf16[8]{0} all-gather(x.2), dimensions={0}", {"all-gather": 1}),
    "tuple": (
        "%r = (f32[8]{0}, /*index=1*/f32[]) all-to-all(%x, /*index=1*/%y)",
        {"all-to-all": 1},
    ),
    "tiled_layout": (
        "%r = (f32[8,128]{1,0:T(8,128)(2,1)S(1)}, u32[]) reduce-scatter(%x, %y)",
        {"reduce-scatter": 1},
    ),
    "async": (
        """
        %s = (f32[1]{0}, f32[8]{0}) all-gather-start(%x), dimensions={0}
        %d = f32[8]{0} all-gather-done(%s)
        %s.1 = f32[8]{0} all-reduce-start(%d), to_apply=%add
        %d.1 = f32[8]{0} all-reduce-done(%s.1)
        %s.2 = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%d.1)
        ROOT %d.2 = f32[8]{0} collective-permute-done(%s.2)
        """,
        {"all-gather": 1, "all-reduce": 1, "collective-permute": 1},
    ),
    "async_of_any_kind": (
        """
        %wrapped (p: f32[8]) -> f32[1] {
          %p = f32[8]{0} parameter(0)
          ROOT %r = f32[1]{0} reduce-scatter(%p), dimensions={0}, to_apply=%add
        }
        %s = ((f32[8]{0}), f32[1]{0}, u32[]) async-start(%x), calls=%wrapped
        %u = ((f32[8]{0}), f32[1]{0}, u32[]) async-update(%s)
        %d = f32[1]{0} async-done(%u)
        """,
        {"reduce-scatter": 1},
    ),
    "names_only": (
        """
        %all-gather (p: f32[8]) -> f32[8] {
          ROOT %all-reduce.1 = f32[8]{0} add(%all-gather.2, %all-to-all)
        }
        %f = f32[8]{0} fusion(%x), calls=%all-gather, metadata={op_name="a = b all-reduce(c"}
        %g = f32[8]{0} get-tuple-element(%all-to-all), index=0
        """,
        {},
    ),
    "other_kinds": (
        "%r = f32[8]{0} ragged-all-to-all(%x), replica_groups={}",
        {"ragged-all-to-all": 1},
    ),
    "stablehlo": ('%0 = "stablehlo.all_reduce"(%arg0) : (tensor<8xf32>) -> tensor<8xf32>', None),
    "prose": ("An all-reduce(x) = a reduce-scatter (x), then an all-gather(x). \x00\n = (", None),
    "empty": ("", None),
}


class CollectivesTest(parameterized.TestCase):
    @parameterized.named_parameters((name, *rest) for name, rest in LINES.items())
    def test_text(self, text, expected):
        found = collectives_of(text)
        assert (found is None) == (expected is None)
        if found is not None:
            assert set(found.counts()) == COLLECTIVES
            assert {kind: n for kind, n in found.counts().items() if n} == expected

    def test_long_lines_take_no_longer_than_their_length(self):
        shapes = ", ".join(["f32[8]{0}"] * 50_000)
        assert collectives_of(f"%r = ({shapes}) all-reduce(%x)").counts()["all-reduce"] == 1
        assert collectives_of(f"%r = ({shapes} = " * 3) is None
