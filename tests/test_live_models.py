"""``transfer`` between live models, compared with NumPy."""

from __future__ import annotations

import gc
import itertools
import random
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding import place
from nnx_sharding.checkpoint import Tensor
from nnx_sharding.errors import CheckpointError
from nnx_sharding.experimental import live_models, transfer
from zoo import mesh_of

EMBED, HEADS, DIM, LAYERS = 16, 4, 8, 2
DEVICES = np.array(jax.devices())


def weights(seed=0):
    """Of a trainer: stacked, with separate queries, keys and values."""
    rng = np.random.default_rng(seed)
    shapes = {
        "embed": (32, EMBED),
        "q": (LAYERS, EMBED, HEADS, DIM),
        "k": (LAYERS, EMBED, 2, DIM),
        "v": (LAYERS, EMBED, 2, DIM),
    }
    return {name: rng.normal(size=s).astype(np.float32) for name, s in shapes.items()}


def trainer(mesh, values):
    specs = {name: P(None, "data") for name in values} | {"embed": P("data")}
    return place({name: nnx.Param(x) for name, x in values.items()}, specs, mesh)


def server(mesh, dtype=jnp.bfloat16):
    """A list of layers with fused projections, transposed."""
    blocks = [{"qkv": nnx.Param(jnp.zeros((8 * DIM, EMBED), dtype))} for _ in range(LAYERS)]
    model = {"tokens": nnx.Param(jnp.zeros((32, EMBED), dtype)), "blocks": blocks}
    return place(model, P("model"), mesh)


# From the names of the server to the arrays of the trainer, as for the files of such a server.
RULES = {
    "tokens": "embed",
    r"blocks/(\d+)/qkv": [
        Tensor(name, "(h d) e -> {0} e h d", h=8, take={"h": heads})
        for name, heads in (("q", slice(0, 4)), ("k", slice(4, 6)), ("v", slice(6, 8)))
    ],
}


def check_served(model, values, dtype=jnp.bfloat16):
    def same(x, expected):
        np.testing.assert_array_equal(np.asarray(x[...]), expected.astype(dtype))

    same(model["tokens"], values["embed"])
    for i, block in enumerate(model["blocks"]):
        fused = np.concatenate([values[name][i] for name in "qkv"], 1)
        same(block["qkv"], fused.reshape(EMBED, -1).T)


class TransferTest(parameterized.TestCase):
    @parameterized.parameters(
        ("auto", "explicit", DEVICES),
        ("explicit", "auto", DEVICES[::-1]),
        ("explicit", "explicit", DEVICES[:4]),
    )
    def test_a_trainer_and_a_server(self, one, other, devices):
        """On the same devices, in another order, and on half of them; and back."""
        source = trainer(mesh_of((8,), ("data",), one), weights())
        kind = mesh_of((8,), ("data",), other).axis_types[:1] * 2
        mesh = Mesh(devices.reshape(2, -1), ("model", "data"), axis_types=kind)
        target = server(mesh)
        shardings = jax.tree.map(lambda x: x.sharding, nnx.to_pure_dict(nnx.state(target)))
        before = dict(source)
        for seed in (0, 1):
            source["embed"][...] = source["embed"][...] * (1 + seed)
            values = weights() | {"embed": weights()["embed"] * (1 + seed)}
            count = len(live_models._PLANS)
            assert transfer(source, target, RULES, reverse=True, cast=True) is not None
            assert seed == 0 or len(live_models._PLANS) == count
            check_served(target, values)
        found = jax.tree.map(lambda x: x.sharding, nnx.to_pure_dict(nnx.state(target)))
        assert found == shardings and source == before
        back = trainer(mesh_of((8,), ("data",), one), weights(7))
        transfer(target, back, RULES, cast=True)
        expected = {n: x.astype(jnp.bfloat16).astype(np.float32) for n, x in values.items()}
        for name, x in back.items():
            np.testing.assert_array_equal(np.asarray(x[...]), expected[name])
            assert x[...].sharding.is_equivalent_to(source[name][...].sharding, x.ndim)

    def test_plans_are_used_again_only_for_equal_filters_and_rules(self):
        names = ["kernel"]

        def is_named(path, _):
            return path[-1] in names

        source, target = (nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in (0, 1))
        source.bias[...] += 1
        for _ in range(2):  # the first one may change shardings, and so the plan
            transfer(source, target, only=is_named)
            assert (target.bias[...] == 0).all()
        names.append("bias")
        transfer(source, target, only=is_named)
        assert (target.bias[...] == 1).all()
        transfer(source, target)
        with self.assertRaisesRegex(CheckpointError, "kernel"):
            transfer(source, target, {})

    def test_no_memory_is_shared_and_models_are_collected(self):
        mesh = mesh_of((8,), ("data",))
        source = place(nnx.Linear(24, 8, rngs=nnx.Rngs(0)), P("data"), mesh)
        target = place(nnx.Linear(24, 8, rngs=nnx.Rngs(1)), P("data"), mesh)
        old, kernel = target.kernel[...], np.asarray(source.kernel[...])
        transfer(source, target)
        source.kernel[...].delete()
        np.testing.assert_array_equal(target.kernel[...], kernel)
        assert not old.is_deleted()  # released, not deleted
        transfer(nnx.state(target), source)  # a State as source
        del source, target, old
        gc.collect()
        assert not any(x.shape == (24, 8) for x in jax.live_arrays())  # plans hold none

    def test_the_old_values_are_released_first(self):
        mesh = mesh_of((8,), ("data",))
        source = place({"x": nnx.Param(jnp.ones((40, 8)))}, P("data"), mesh)
        target = place({"x": nnx.Param(jnp.zeros((8, 40)))}, P("data"), mesh)
        held = []

        def built(*_):
            held.append([x.shape for x in jax.live_arrays()].count((8, 40)))

        self.enter_context(mock.patch.object(live_models, "_MOST_KEPT", 0))
        rules = {"x": Tensor("x", "a b -> b a")}
        for _ in range(2):
            with mock.patch.object(live_models, "_arguments", wraps=live_models._arguments) as at:
                at.side_effect = lambda *_: (built(), mock.DEFAULT)[1]
                transfer(source, target, rules)
        assert held[-1] == 0, held

    @parameterized.product(kind=["auto", "explicit"], reverse=[False, True])
    def test_a_new_sharding_alone_needs_no_program_on_cpus(self, kind, reverse):
        """Collectives of virtual devices take several times as long as copies."""
        mesh = mesh_of((2, 4), ("data", "model"), kind)
        order = Mesh(mesh.devices[::-1], mesh.axis_names, axis_types=mesh.axis_types)
        dtype = random.choice([jnp.float32, jnp.bfloat16, jnp.int4, jnp.bool_])
        old, new = random.sample([P("data", "model"), P("model"), P(None, "data"), P()], 2)
        values = jnp.arange(8 * 16).reshape(8, 16) % 3
        source = place({"x": nnx.Param(values.astype(dtype))}, old, mesh)
        target = place({"x": nnx.Param(jnp.zeros((8, 16), dtype))}, new, order if reverse else mesh)
        sharding = target["x"].sharding
        with mock.patch.object(live_models, "_programs", side_effect=AssertionError):
            transfer(source, target)
        assert target["x"].sharding == sharding
        source["x"][...].delete()
        np.testing.assert_array_equal(target["x"][...], values.astype(dtype))

    @parameterized.product(kind=["auto", "explicit"], donate=[False, True])
    def test_layouts(self, kind, donate):
        """Programs convert, stack and transpose."""
        mesh, values = mesh_of((2, 4), ("data", "model"), kind), weights()["embed"]
        specs = [P("data", "model"), P("model"), P(None, "data")]
        old, new = random.choice(specs), random.choice([*specs, P(None, None, "model")])
        source = place({str(i): nnx.Param(values * i) for i in range(4)}, old, mesh)
        target = place({"x": nnx.Param(jnp.zeros((EMBED, 4, 32), jnp.bfloat16))}, new, mesh)
        sharding, rules = target["x"].sharding, {r"(\d)": Tensor("x", "a b -> b {0} a")}
        transfer(source, target, rules, cast=True, donate=donate)
        expected = np.stack([values * i for i in range(4)]).transpose(2, 0, 1)
        np.testing.assert_array_equal(target["x"][...], expected.astype(jnp.bfloat16))
        assert target["x"].sharding == sharding

    @parameterized.parameters((P("data"),), (P(None, "data"),))
    def test_donation(self, spec):
        mesh = mesh_of((8,), ("data",))
        shared = jnp.ones((8, 8))
        source = place({"a": nnx.Param(shared), "b": nnx.Param(shared * 2)}, P("data"), mesh)
        target = place({n: nnx.Param(shared * 0) for n in "ab"}, spec, mesh)
        arrays = [x[...] for x in source.values()]
        transfer(source, target, donate=True)
        np.testing.assert_array_equal(target["b"][...], shared * 2)
        held = {id(x[...]) for x in target.values()}
        assert all(x.is_deleted() for x in arrays if id(x) not in held)
        assert not any(x[...].is_deleted() for x in target.values())

    @parameterized.product(
        spec=[P("data"), P(None, "data")], kind=["device", "pinned_host"], donate=[False, True]
    )
    def test_two_targets_of_one_source(self, spec, kind, donate):
        """They are different arrays, so that donating one leaves the other."""
        mesh, x = mesh_of((8,), ("data",)), jnp.arange(64.0).reshape(8, 8)
        source = {"x": place(x, NamedSharding(mesh, P("data"), memory_kind=kind))}
        goal = NamedSharding(mesh, spec, memory_kind=kind)
        target = {name: nnx.Param(place(x * 0, goal)) for name in "ab"}
        transfer(source, target, {"x": ["a", "b"]}, donate=donate)
        assert source["x"].is_deleted() == donate
        target["a"][...].delete()
        np.testing.assert_array_equal(target["b"][...], x)
        assert target["b"][...].sharding == goal

    def test_accelerators(self):
        """Programs exchange parts between devices of which the host does not hold them."""
        mesh, x = mesh_of((8,), ("data",)), np.arange(64.0, dtype=np.float32).reshape(8, 8)
        half = Mesh(DEVICES[:4].reshape(2, 2), ("a", "b"))
        goals = [
            NamedSharding(Mesh(DEVICES[::-1], "c"), P(None, "c")),
            NamedSharding(half, P("b", "a")),
            NamedSharding(half, P("b", "a"), memory_kind="pinned_host"),
            NamedSharding(Mesh(DEVICES[:3], "d"), P()),
        ]
        with mock.patch.object(live_models, "_has_parts_on_host", return_value=False):
            for goal, spec, dtype in itertools.product(
                goals, (P("data"), P(None, "data")), (np.float32, jnp.bfloat16)
            ):
                source = {"x": place(x, spec, mesh)}
                target = {"x": place(x.astype(dtype) * 0, goal)}
                target = transfer(source, target, cast=True)
                np.testing.assert_array_equal(target["x"], x.astype(dtype))
                assert target["x"].sharding == goal

    def test_an_error_while_arrays_are_built_changes_nothing(self):
        target = nnx.Dict(k=nnx.Param(jnp.ones((6, 4))), b=nnx.Param(jnp.ones(3)))
        source = {"k": np.zeros((4, 6), np.float32), "b": np.zeros(3, np.float32)}
        old = target.k.get_value(), target.b.get_value()
        with (
            mock.patch.object(live_models.Placement, "arranged", side_effect=MemoryError),
            self.assertRaises(MemoryError),
        ):
            transfer(source, target, {"k": Tensor("k", "a b -> b a"), "b": "b"})
        assert (target.k.get_value(), target.b.get_value()) == old

    def test_hosts_keys_and_abstract_targets(self):
        mesh = mesh_of((8,), ("data",))
        source = {"x": np.arange(16.0, dtype=np.float32).reshape(2, 8), "n": np.arange(3)}
        put = NamedSharding(mesh, P("data"))
        target = {
            "y": jax.ShapeDtypeStruct((8, 2), jnp.bfloat16, sharding=put),
            "n": np.zeros(3, np.int64),
        }
        rules = {"x": Tensor("y", "a b -> b a"), "n": "n"}
        new = transfer(source, target, rules, cast=True)
        np.testing.assert_array_equal(new["y"].astype(np.float32), source["x"].T)
        assert new["y"].sharding == put and type(new["n"]) is np.ndarray
        one = {"y": jax.device_put(source["x"], SingleDeviceSharding(DEVICES[3]))}
        back = transfer(one, {"y": np.zeros((2, 8), np.float32)})
        np.testing.assert_array_equal(back["y"], source["x"])
        model = nnx.Dropout(0.5, rngs=nnx.Rngs(3))
        other = place(nnx.Dropout(0.5, rngs=nnx.Rngs(4)), P(), mesh)
        transfer(model, other, only=...)
        assert (
            jax.random.key_data(other.rngs.key[...]) == jax.random.key_data(model.rngs.key[...])
        ).all()

    def test_mistakes_change_nothing(self):
        mesh = mesh_of((8,), ("data",))
        source, target = trainer(mesh, weights()), server(mesh_of((2, 4), ("model", "data")))
        source["extra"] = nnx.Param(jnp.ones(3))
        before = [x[...] for x in nnx.to_flat_state(nnx.state(target)).leaves]
        with self.assertRaises(CheckpointError) as caught:
            transfer(source, target, RULES, reverse=True)
        text = str(caught.exception)
        for part in (
            "Sources without an array:\n  extra, shape (3,)",
            "embed: float32, tokens: bfloat16",
        ):
            assert part in text, text
        with self.assertRaises(CheckpointError) as caught:
            transfer(source, target, {"embed": "token", "[qkv]": None, "extra": "tokens"})
        text = str(caught.exception)
        for part in (
            "embed: no array token",
            "did you mean 'tokens'",
            "blocks/1/qkv, shape",
            "(3,)",
        ):
            assert part in text, text
        with pytest.raises(ValueError, match="int32 may be out of the range of int8"):
            transfer({"x": jnp.arange(3)}, {"x": jnp.zeros(3, jnp.int8)}, cast=True)
        with pytest.raises(ValueError, match="abstract, without values"):
            transfer({"x": jax.ShapeDtypeStruct((3,), jnp.float32)}, {"x": jnp.zeros(3)})
        # Rows 0 and 2, 1 and 3, and the rest, as a dimension of other axes.
        pairs = [Tensor(x, "(h p) -> h", h=4, p=2, take={"h": slice(0, 2), "p": p})
                 for p, x in enumerate("ab")]  # fmt: skip
        rules = {"x": [*pairs, Tensor("c", "o -> o", o=8, take={"o": slice(4, 8)})]}
        parts = {"a": jnp.ones(2), "b": jnp.ones(2), "c": jnp.ones(4)}
        with pytest.raises(ValueError, match="x: its rules name different axes for a, b, c; name"):
            transfer(parts, {"x": jnp.zeros(8)}, rules, reverse=True)
        deleted = jnp.ones(3)
        deleted.delete()
        with pytest.raises(ValueError, match="deleted or donated"):
            transfer({"x": deleted}, {"x": jnp.zeros(3)})
        after = [x[...] for x in nnx.to_flat_state(nnx.state(target)).leaves]
        assert all(a is b for a, b in zip(before, after, strict=True))


def test_layers_over_an_axis_to_a_list_with_different_shardings():
    w = np.arange(4 * 8 * 16, dtype=np.float32).reshape(4, 8, 16)
    source = place({"w": jnp.asarray(w)}, P("x"), Mesh(DEVICES[:4], "x"))
    specs = [P("a"), P(None, "b"), P(None, "b"), P("b", "a")]
    mesh = Mesh(DEVICES[4:].reshape(2, 2), ("a", "b"))
    target = [place(jnp.zeros((8, 16)), spec, mesh) for spec in specs]
    rules = {r"(\d+)": Tensor("w", "a b -> {0} a b")}
    for found, layer in zip(transfer(source, target, rules, reverse=True), w, strict=True):
        np.testing.assert_array_equal(found, layer)


class LaterCallsTest(parameterized.TestCase):
    def test_changed_models(self):
        """After each change a call reads and fills what there is then, as with new models."""
        mesh = mesh_of((8,), ("data",), random.choice(["auto", "explicit"]))

        def make(seed):
            layers = [nnx.Linear(8, 16, rngs=nnx.Rngs(seed + i)) for i in range(3)]
            return place(nnx.Dict(a=nnx.List(layers[:2]), b=layers[2]), P(), mesh)

        def add(model, seed):
            model.c = nnx.Param(jax.device_put(jnp.full(8, seed), NamedSharding(mesh, P("data"))))

        def replace(model, seed):
            model.a[0] = place(nnx.Linear(8, 8, rngs=nnx.Rngs(seed)), P("data"), mesh)

        def remove(model, seed):
            del model.b

        def tie(model, seed):
            model.a[1].kernel = model.a[0].kernel

        def assign(model, seed):
            bias = model.a[0].bias
            bias[...] = jax.device_put(jnp.full(bias.shape, seed + 0.5), bias.sharding)

        source, target = make(0), make(10)
        changes = [add, replace, remove, tie, assign]
        random.shuffle(changes)
        for number, change in enumerate(changes):
            for _ in range(2):
                renewed = jax.tree.map(lambda x: x * 2 + 1, nnx.state(source))
                nnx.update(source, renewed)
                transfer(source, target)
            change(source, number), change(target, 20 + number)
            transfer(source, target)
            ours, theirs = (nnx.to_flat_state(nnx.state(x)) for x in (target, source))
            assert ours.paths == theirs.paths
            for x, y in zip(ours.leaves, theirs.leaves, strict=True):
                np.testing.assert_array_equal(x[...], y[...])

    @parameterized.parameters("source", "target", "both")
    def test_adopted_memory_survives_donation(self, donated):
        """CPUs adopt parts of replicated arrays: later programs must not write into them."""
        mesh = mesh_of((2, 4), ("data", "model"))
        old = NamedSharding(mesh, random.choice([P(), P("data"), P("model")]))
        values = np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024)
        make = jax.jit(lambda x: x + 1, out_shardings=old)
        source = {"x": make(values)}
        target = {"x": jax.device_put(values * 0, NamedSharding(mesh, P(("data", "model"))))}
        found = {"source": source, "target": transfer(source, target)}
        negative = jax.jit(jnp.negative, donate_argnums=0)
        for name, model in found.items():
            if donated in (name, "both"):
                model["x"] = negative(model["x"])
        taken = [make(values * 7) for _ in range(4)]  # what memory is free
        for name, model in found.items():
            sign = -1 if donated in (name, "both") else 1
            np.testing.assert_array_equal(model["x"], sign * (values + 1))
        assert len(taken) == 4
