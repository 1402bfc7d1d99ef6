"""``ArraySharder``: Datarax's methods, and where they behave better."""

from __future__ import annotations

import contextlib
import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding import StateSharding, jit
from nnx_sharding.compat.datarax import ArraySharder, SharderModuleConfig
from nnx_sharding.errors import NoMeshError
from nnx_sharding.placement import place
from zoo import fails, mesh_of

TRACES = logging.getLogger("traces")
MESH = mesh_of((2, 4), ("data", "model"))
EXPLICIT = mesh_of((2, 4), ("data", "model"), "explicit")
ROWS = NamedSharding(MESH, P("data"))
RULES = [("batch", "data"), ("embed", None), ("mlp", "model"), ("both", ("data", "model"))]
CONFIG = SharderModuleConfig(sharding_rules=RULES)


def batch():
    return {
        "x": np.arange(32, dtype=np.float32).reshape(8, 4),
        "y": jnp.arange(8),
        "name": "train",
        "n": 3,
    }


def make_sharder(**options):
    return ArraySharder(CONFIG, rngs=nnx.Rngs(0), **options)


def stats(x):
    return {"mean": x.mean(0), "count": jnp.asarray(x.shape[0])}


class ShardTest(parameterized.TestCase):
    @parameterized.parameters(("shard",), ("shard_static",))
    def test_mixed_ranks_and_leaves_that_are_not_arrays(self, name):
        sharder = ArraySharder() if name != "shard_static" else ArraySharder
        given = batch()
        new = getattr(sharder, name)(given, NamedSharding(MESH, P("data", "model")))
        assert new["x"].sharding.spec == P("data", "model") and new["y"].sharding.spec == P("data")
        assert (new["name"], new["n"]) == ("train", 3)
        np.testing.assert_array_equal(new["x"], given["x"])
        assert isinstance(given["x"], np.ndarray)

    def test_prefixes(self):
        given = {"a": batch(), "b": [np.ones((4, 8)), np.ones(4)]}
        new = ArraySharder().shard(given, {"a": {**dict.fromkeys(batch()), "x": ROWS}, "b": ROWS})
        assert isinstance(new["a"]["y"], jax.Array) and new["a"]["y"].sharding.num_devices == 1
        assert new["a"]["x"].sharding == ROWS and new["b"][1].sharding == ROWS
        by_filter = StateSharding({nnx.PathContains("x"): P("data"), ...: P()})
        with jax.set_mesh(MESH):
            new = ArraySharder().shard(batch(), by_filter)
        assert new["x"].sharding == ROWS and new["y"].sharding == NamedSharding(MESH, P())

    def test_mistakes(self):
        sharder = ArraySharder()
        with fails(ValueError, "ArraySharder.shard", "tree['x'], shape (6, 4)", "size 6"):
            sharder.shard({"x": np.ones((6, 4)), "y": np.ones(8)}, NamedSharding(MESH, P("model")))
        with fails(NoMeshError, "tree['x']", "tree['y']"):
            sharder.shard(batch(), P("data"))
        with fails(TypeError, "'data'"):
            sharder.shard(batch(), "data")
        with fails(TypeError, "config must be a SharderModuleConfig"):
            ArraySharder({"sharding_rules": RULES})
        with fails(ValueError, "tree prefix"):
            sharder.shard(batch(), {"x": ROWS})
        assert sharder.get_operation_stats() == {"applied_count": 0, "skipped_count": 0}

    @parameterized.parameters(MESH, EXPLICIT)
    def test_in_a_trace(self, mesh):
        sharder, rows = ArraySharder(), NamedSharding(mesh, P("data"))

        @jax.jit
        def f(x, y):
            return sharder.shard_static({"x": x * 2, "y": y}, rows)

        with jax.set_mesh(mesh):
            new = f(np.ones((8, 4), np.float32), jnp.arange(8))
        assert new["x"].sharding.is_equivalent_to(rows, 2)
        assert new["y"].sharding.is_equivalent_to(rows, 1)


class NamesTest(parameterized.TestCase):
    @parameterized.parameters(
        (("batch", "mlp"), P("data", "model")),
        (("batch", None), P("data", None)),
        (("both", "embed"), P(("data", "model"), None)),
        ((("batch", "mlp"),), P(("data", "model"))),
        (P("model"), P("model")),
        (["batch", None], P("data", None)),
        ([None, ("batch", "mlp"), "embed"], P(None, ("data", "model"), None)),
        ((), P()),
        (None, None),
    )
    def test_specs(self, names, spec):
        assert make_sharder().get_partition_spec(names) == spec

    def test_trees_of_names(self):
        names = {"x": ["batch", "mlp"], "y": [P("model")]}
        specs = make_sharder().get_partition_spec(names)
        assert specs == {"x": P("data", "model"), "y": [P("model")]}
        assert make_sharder().get_partition_spec([("mlp",), None]) == [P("model"), None]
        found = make_sharder().get_named_sharding(MESH, names)
        assert found["y"] == [NamedSharding(MESH, P("model"))]

    def test_the_first_rule_counts_and_none_are_mesh_axes(self):
        twice = SharderModuleConfig(sharding_rules=[("batch", "data"), ("batch", "model")])
        assert ArraySharder(twice).get_partition_spec(("batch",)) == P("data")
        assert ArraySharder().get_partition_spec(("data", None)) == P("data", None)

    def test_unknown_names(self):
        with fails(ValueError, "no rule for 'bath'", "did you mean 'batch'", "'batch', 'embed'"):
            make_sharder().get_partition_spec(("bath",))
        with fails(ValueError, "no rule for 'bath'"):
            make_sharder().shard_with_logical_names(batch(), MESH, ("bath",))

    def test_shard(self):
        sharder = make_sharder()
        new = sharder.shard_with_logical_names(batch(), MESH, ("batch", "mlp"))
        assert new["x"].sharding == NamedSharding(MESH, P("data", "model"))
        assert new["y"].sharding == ROWS and sharder.get_operation_stats()["applied_count"] == 1

    @parameterized.parameters(
        ([("a", 3)], ValueError, "invalid rules"),
        (3, TypeError, "pairs"),
        ([("a", ("x", "x"))], ValueError, "invalid rules"),
    )
    def test_wrong_rules(self, rules, error, message):
        with fails(error, message):
            SharderModuleConfig(sharding_rules=rules)


class TransformTest(parameterized.TestCase):
    def test_once_for_each_shard(self):
        def center(b):
            TRACES.info("%s", b["x"].shape)
            return {"x": b["x"] - b["x"].mean(0)}

        sharder, x = make_sharder(), np.arange(32.0, dtype=np.float32).reshape(8, 4)
        with self.assertLogs(TRACES) as traces:
            for method in (
                sharder.apply_parallel_transform,
                sharder.parallel_transform,
                make_sharder().parallel_transform,
            ):
                new = method({"x": x}, center, MESH, ("batch",))
                expected = np.concatenate([h - h.mean(0) for h in np.split(x, 2)])
                np.testing.assert_allclose(new["x"], expected)
                assert new["x"].sharding.is_equivalent_to(ROWS, 2)
        assert [x.getMessage() for x in traces.records] == ["(4, 4)"]
        assert sharder.get_operation_stats()["applied_count"] == 2

    def test_an_empty_out_spec(self):
        def total(b):
            return jax.lax.psum(b.sum(), "data")

        x = np.arange(8, dtype=np.float32)
        new = make_sharder().apply_parallel_transform(x, total, MESH, ("batch",), P())
        assert new.shape == () and float(new) == x.sum() and new.sharding.is_fully_replicated

    def test_other_out_names_and_trees_of_specs(self):
        def f(b):
            return {"x": b["x"].T, "y": b["y"]}

        specs = {"x": ("batch", "embed"), "y": ("batch",)}
        out = {"x": ("embed", "batch"), "y": P("data")}
        given = {"x": np.ones((8, 4)), "y": np.arange(8)}
        new = make_sharder().parallel_transform(given, f, MESH, specs, out)
        np.testing.assert_array_equal(new["x"], given["x"].T)
        assert new["x"].sharding.spec == P(None, "data")


class ParamTest(parameterized.TestCase):
    init = staticmethod(nnx.initializers.normal(1.0))

    def test_created_sharded(self):
        param = make_sharder().create_sharded_param(self.init, (8, 16), ("embed", "mlp"), mesh=MESH)
        assert type(param) is nnx.Param and param.sharding == NamedSharding(MESH, P(None, "model"))
        expected = self.init(nnx.Rngs(0).params(), (8, 16))
        np.testing.assert_allclose(param.get_raw_value(), expected, rtol=1e-6)
        assert param.out_sharding == ("embed", "mlp")
        spec = nnx.get_partition_spec(nnx.state(nnx.Dict(p=param)))["p"]
        assert getattr(spec, "get_value", lambda: spec)() == P(None, "model")

    @parameterized.parameters(MESH, EXPLICIT)
    def test_with_the_mesh_in_context(self, mesh):
        with jax.set_mesh(mesh):
            sharder = make_sharder()
            param = sharder.create_sharded_param(self.init, [8, 16], P("data", "model"))
            assert param.sharding.spec == P("data", "model") and param.out_sharding == (
                "data",
                "model",
            )
            nnx.Optimizer(nnx.Dict(p=param), optax.adam(1e-3), wrt=nnx.Param)
            nnx.clone(nnx.Dict(p=param))

    def test_without_a_mesh(self):
        param = make_sharder().create_sharded_param(self.init, (8, 16), ("embed", "mlp"))
        assert param.sharding.num_devices == 1 and param.out_sharding == ("embed", "mlp")

    def test_in_a_trace(self):
        @jit(out_shardings=None)
        def make(sharder):
            return sharder.create_sharded_param(self.init, (8, 16), ("embed", "mlp"), mesh=MESH)

        sharder = make_sharder()
        a, b = make(sharder), make(sharder)
        assert a.sharding.is_equivalent_to(NamedSharding(MESH, P(None, "model")), 2)
        assert not np.array_equal(a[...], b[...])

    @parameterized.product(kind=["auto", "explicit"], given=[True, False], context=[True, False])
    def test_a_trace_gives_shardings_with_the_spec(self, kind, given, context):
        if not given and not context:
            return
        mesh, sharder = MESH if kind == "auto" else EXPLICIT, make_sharder()

        def make(sharder):
            return sharder.create_sharded_param(
                self.init, (8, 16), ["embed", "mlp"], mesh=mesh if given else None
            )

        expected = make_sharder().create_sharded_param(
            self.init, (8, 16), ("embed", "mlp"), mesh=mesh
        )
        with jax.set_mesh(mesh) if context else contextlib.nullcontext():
            for transform in (jit, nnx.jit):
                param = transform(make)(sharder)
                assert param.sharding.spec == P(None, "model")
                nnx.Optimizer(nnx.Dict(p=param), optax.adam(1e-3), wrt=nnx.Param)
                if transform is jit:
                    np.testing.assert_allclose(param.get_raw_value(), expected, rtol=1e-6)

    def test_mistakes(self):
        with fails(ValueError, "random stream", "rngs="):
            ArraySharder(CONFIG).create_sharded_param(self.init, (8,), ("mlp",), mesh=MESH)
        sharder = make_sharder()
        before = sharder.rngs.default.count.get_value()
        with fails(ValueError, "create_sharded_param", "shape (6,)", "size 6"):
            sharder.create_sharded_param(self.init, (6,), ("mlp",), mesh=MESH)
        with fails(ValueError, "no rule for 'x'"):
            sharder.create_sharded_param(self.init, (6,), ("x",), mesh=MESH)
        assert sharder.rngs.default.count.get_value() == before


class CountTest(parameterized.TestCase):
    @parameterized.parameters("ours", "flax", "ours placed", "flax placed", "ours, declared")
    def test_counts_neither_leak_nor_retrace(self, name):
        traces = []
        sharder = place(make_sharder(), P(), MESH) if "placed" in name else make_sharder()

        def step(sharder, x):
            traces.append(0)
            x = sharder.shard(x * 2, ROWS)
            sharder.shard("nothing", None)
            assert isinstance(sharder.get_operation_stats()["applied_count"], jax.core.Tracer)
            return x

        options = {"in_shardings": (P(), P("data")), "mesh": MESH} if "declared" in name else {}
        step = (nnx.jit if "flax" in name else jit)(step, **options)
        x = np.ones((8, 4), np.float32)
        for number in range(3):
            sharder.shard(x, ROWS)
            y = step(sharder, x)
            assert sharder.get_operation_stats() == {
                "applied_count": 2 * (number + 1),
                "skipped_count": number + 1,
            }
        sharder.reset_operation_stats()
        step(sharder, x)
        assert y.sharding.is_equivalent_to(ROWS, 2)
        # One more after the counts come back on the mesh for the first time, as with any state.
        assert len(traces) == (2 if name in ("ours", "flax") else 1)
        assert sharder.get_operation_stats() == {"applied_count": 1, "skipped_count": 1}

    def test_equal_configs_do_not_retrace(self):
        traces = []

        @jit
        def f(sharder, x):
            traces.append(0)
            return sharder.get_partition_spec(("batch",)) and x

        for rules in (dict(RULES), RULES, [("batch", "model")]):
            f(ArraySharder(SharderModuleConfig(sharding_rules=rules)), jnp.ones(3))
        assert len(traces) == 2


class InfoTest(parameterized.TestCase):
    def test_info(self):
        info = {"kept": 1}
        sharder = ArraySharder()
        new = sharder.shard_with_info(batch(), ROWS, info)
        before, after = info["batch_pre_sharding"], info["batch_post_sharding"]
        shapes = {"x": (8, 4), "y": (8,), "name": None, "n": None}
        assert before["shapes"] == after["shapes"] == shapes and info["kept"] == 1
        assert before["structure"] == after["structure"] == jax.tree.structure(batch())
        assert after["shardings"] == {"x": ROWS, "y": ROWS, "name": None, "n": None}
        size = sum(s.data.nbytes for k in "xy" for s in new[k].addressable_shards) // 8
        assert after["bytes_per_device"] == {d.id: size for d in jax.devices()}
        ArraySharder.shard_with_info_static(batch(), ROWS, info)
        sharder.shard_with_info(batch(), ROWS)
        with pytest.raises(ValueError, match="divisible"):
            sharder.shard_with_info({"x": np.ones(3)}, ROWS, info := {})
        assert info == {} and sharder.get_operation_stats()["applied_count"] == 2


class StatisticsTest(parameterized.TestCase):
    def test_computed_and_kept(self):
        sharder, x = (
            ArraySharder(SharderModuleConfig(batch_stats_fn=stats)),
            jnp.arange(8.0).reshape(4, 2),
        )
        assert sharder.get_statistics() is None
        found = sharder.compute_statistics(x)
        np.testing.assert_array_equal(found["mean"], [3, 4])
        assert sharder.get_statistics().keys() == {"mean", "count"}
        sharder.get_statistics()["mean"] = None
        assert sharder.get_statistics()["mean"] is not None
        sharder.reset_statistics()
        assert sharder.get_statistics() is None and ArraySharder().compute_statistics(x) is None

    def test_known_and_set(self):
        known = {"mean": 1.0}
        config = SharderModuleConfig(precomputed_stats=known)
        sharder = ArraySharder(config)
        known["mean"] = 2.0
        assert sharder.get_statistics() == {"mean": 1.0}
        given = {"mean": {"a": 3.0}}
        sharder.set_statistics(given)
        given["mean"]["a"] = 4.0
        assert sharder.get_statistics() == {"mean": {"a": 3.0}}
        sharder.reset_statistics()
        assert sharder.get_statistics() is None
        assert ArraySharder(config).get_statistics() == {"mean": 1.0}

    @parameterized.parameters(jit, nnx.jit)
    def test_in_a_trace(self, transform):
        traces = []

        @transform
        def f(sharder, x):
            traces.append(0)
            return sharder.compute_statistics(x)["count"]

        sharder, x = ArraySharder(SharderModuleConfig(batch_stats_fn=stats)), jnp.ones((4, 2))
        assert int(f(sharder, x)) == 4
        np.testing.assert_array_equal(sharder.get_statistics()["mean"], [1, 1])
        f(sharder, x), f(sharder, x * 2)
        assert len(traces) == 2  # without statistics, and with them
        np.testing.assert_array_equal(sharder.get_statistics()["mean"], [2, 2])

    def test_a_module_that_changes(self):
        class Running(nnx.Module):
            def __init__(self):
                self.seen = nnx.BatchStat(jnp.zeros(()))

            def __call__(self, x):
                self.seen[...] += 1
                return {"mean": x.mean()}

        module = Running()
        sharder = ArraySharder(SharderModuleConfig(batch_stats_fn=module))
        f = jit(lambda sharder, x: sharder.compute_statistics(x)["mean"])
        f(sharder, jnp.ones(3)), f(sharder, jnp.ones(3))
        assert float(module.seen[...]) == 2

    def test_mistakes(self):
        with fails(ValueError, "both given"):
            SharderModuleConfig(batch_stats_fn=stats, precomputed_stats={"a": 1})
        with fails(TypeError, "batch_stats_fn must be a function, got 3"):
            SharderModuleConfig(batch_stats_fn=3)
        with fails(TypeError, "mapping"):
            SharderModuleConfig(precomputed_stats=[1])
        sharder = ArraySharder(SharderModuleConfig(batch_stats_fn=lambda x: 3))
        for call in (lambda: sharder.compute_statistics(1), lambda: sharder.set_statistics(None)):
            with fails(TypeError, "mapping"):
                call()
        with fails(TypeError, "config must be a SharderModuleConfig"):
            ArraySharder({"sharding_rules": RULES})
        with pytest.raises(dataclasses.FrozenInstanceError):
            CONFIG.sharding_rules = None


class CopyAndStateTest(parameterized.TestCase):
    def counted(self):
        sharder = make_sharder(name="mine")
        sharder.shard(np.ones(8), ROWS)
        sharder.rngs.params()
        sharder.set_statistics({"mean": jnp.ones(2)})
        return sharder

    def test_copy(self):
        sharder = self.counted()
        same = sharder.copy()
        assert (same.config, same.rngs, same.name) == (sharder.config, sharder.rngs, "mine")
        assert same.get_operation_stats()["applied_count"] == 0
        config, rngs = SharderModuleConfig(), nnx.Rngs(1)
        new = sharder.copy(config=config, rngs=rngs, name="new")
        assert (new.config, new.rngs, new.name) == (config, rngs, "new")

    def test_clone(self):
        sharder = self.counted()
        new = sharder.clone()
        sharder.reset_operation_stats()
        sharder.reset_statistics()
        assert new.get_operation_stats()["applied_count"] == 1 and new.rngs is not sharder.rngs
        np.testing.assert_array_equal(new.get_statistics()["mean"], [1, 1])

    def test_state(self):
        sharder, new = self.counted(), ArraySharder(rngs=nnx.Rngs(5))
        shared = new.config
        state = sharder.get_state()
        kept = dict(state)
        new.set_state(state)
        assert state.keys() == kept.keys() and shared.sharding_rules is None
        assert (
            new.config == sharder.config
            and new.get_operation_stats() == sharder.get_operation_stats()
        )
        np.testing.assert_array_equal(new.get_statistics()["mean"], [1, 1])
        ours, theirs = (jax.random.key_data(s.rngs.params()) for s in (new, sharder))
        np.testing.assert_array_equal(ours, theirs)
        new.reset_statistics()
        fresh = ArraySharder(rngs=nnx.Rngs(5))
        fresh.set_statistics({"a": 1})
        fresh.set_state(new.get_state())
        assert fresh.get_statistics() is None

    def test_arrays_of_numpy_are_not_shared(self):
        mean = np.zeros(2)
        config = SharderModuleConfig(precomputed_stats={"mean": mean})
        sharder, new = ArraySharder(config), ArraySharder(SharderModuleConfig(cacheable=True))
        state = jax.tree.map(np.array, sharder.get_state())  # as a checkpoint is read
        new.set_state(state)
        new.shard(np.ones(8), ROWS)
        saved = new.get_state()
        new.shard(np.ones(8), ROWS)
        for other in (mean, state["_computed_stats"]["mean"], saved["_computed_stats"]["mean"]):
            other += 1
        new.get_statistics()["mean"][:] = 2
        assert (int(state["_applied_count"]), int(saved["_applied_count"])) == (0, 1)
        assert new.get_operation_stats()["applied_count"] == 2
        for each in (sharder, new, ArraySharder(config)):
            np.testing.assert_array_equal(each.get_statistics()["mean"], [0, 0])
        sharder.set_statistics({"mean": mean})
        mean += 1
        np.testing.assert_array_equal(sharder.get_statistics()["mean"], [1, 1])

    def test_wrong_states(self):
        sharder = self.counted()
        state = sharder.get_state()
        wrong = {**state, "_applied_count": jnp.zeros(3), "typo": 1}
        del wrong["_skipped_count"]
        wrong["sharding_rules"] = [("a", "b")]
        with fails(
            ValueError,
            "['_applied_count']: float32[3], expected int32[]",
            "['_skipped_count']: missing, expected int32[]",
            "['typo']: int32[], expected nothing",
        ):
            sharder.set_state(wrong)
        with fails(TypeError, "mapping"):
            sharder.set_state({**state, "_computed_stats": 3, "_applied_count": jnp.int32(9)})
        with fails(TypeError, "got a list"):
            sharder.set_state([])
        with fails(ValueError, "invalid rules"):
            sharder.set_state(
                {**state, "sharding_rules": [("a", 3)], "_applied_count": jnp.int32(9)}
            )
        assert sharder.get_operation_stats()["applied_count"] == 1 and sharder.config is CONFIG

    def test_streams(self):
        sharder = ArraySharder()
        assert sharder.requires_rng_streams() is None
        sharder.ensure_rng_streams([])

        class Needs(ArraySharder):
            def requires_rng_streams(self):
                return ["params", "noise", "dropout"]

        Needs().ensure_rng_streams(["params", "noise", "dropout"])
        with fails(ValueError, "'noise', 'dropout'", "['params']"):
            Needs().ensure_rng_streams(["params"])
