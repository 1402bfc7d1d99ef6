"""``place``: every kind of source and target, and all errors."""

from __future__ import annotations

import copy
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding import StateSharding, jit
from nnx_sharding.errors import CorrectedSpecWarning, NoMeshError, StrictError, UnusedFilterWarning
from nnx_sharding.partition import with_sharding_constraint
from nnx_sharding.placement import place
from zoo import MLP, compilations, fails, mesh_of, mlp_specs, numbers

DEVICES = np.array(jax.devices())
MESH = mesh_of((2, 4), ("data", "model"))
SHAPE = (8, 16)
TARGET = NamedSharding(MESH, P("data", "model"))
CPU0 = SingleDeviceSharding(jax.devices()[0])
VALUE = np.arange(128, dtype=np.float32).reshape(SHAPE)


def on(devices, shape, spec, kind=None):
    mesh = Mesh(np.asarray(devices).reshape(shape), ("a", "b"))
    return NamedSharding(mesh, spec, memory_kind=kind)


# Shardings of sources and targets.
PLACES = {
    "one": CPU0,
    "other one": SingleDeviceSharding(jax.devices()[5]),
    "mesh": TARGET,
    "replicated": NamedSharding(MESH, P()),
    "transposed": NamedSharding(MESH, P("model", "data")),
    "both": NamedSharding(MESH, P(None, ("model", "data"))),
    "explicit": NamedSharding(mesh_of((4, 2), ("x", "y"), "explicit"), P("x", "y")),
    "other shape": on(DEVICES, (4, 2), P("a", "b")),
    "reversed": on(DEVICES[::-1], (2, 4), P("b", "a")),
    "reversed, replicated": on(DEVICES[::-1], (2, 4), P()),
    "first half": on(DEVICES[:4], (2, 2), P("a", "b")),
    "last half": on(DEVICES[4:], (2, 2), P("a", "b")),
    "some": on(DEVICES[[6, 1]], (1, 2), P("b")),
    "host": TARGET.with_memory_kind("pinned_host"),
    "host, transposed": NamedSharding(MESH, P("model"), memory_kind="unpinned_host"),
    "half of the host": on(DEVICES[:4], (4, 1), P("a"), "pinned_host"),
}


# Shardings of rows, for arrays of any rank.
ROWS = {
    "mesh": NamedSharding(MESH, P("data")),
    "mesh, columns": NamedSharding(MESH, P("model")),
    "first half": on(DEVICES[:4], (2, 2), P("a")),
    "last half": on(DEVICES[4:], (2, 2), P("a")),
    "some": on(DEVICES[[6, 1]], (1, 2), P("b")),
    "host": NamedSharding(MESH, P("data"), memory_kind="pinned_host"),
}


def source(name):
    return np.array(VALUE) if name == "numpy" else jax.device_put(np.array(VALUE), PLACES[name])


def shards(x):
    return {s.device: s.data.unsafe_buffer_pointer() for s in x.addressable_shards}


def share_memory(x, y):
    return not set(shards(x).values()).isdisjoint(shards(y).values())


# What two moves have beside the defaults below, and the one thing in which the second differs.
CHANGES = {
    "shape": ({}, {"shape": (16, 32)}),
    "rank": ({}, {"shape": (64,)}),
    "weak type": ({}, {"weak": True}),
    "copy": ({}, {"copy": True}),
    "donated": ({}, {"donate": True}),
    "source": ({}, {"source": "last half"}),
    "source of a copy": ({"copy": True, "source": "last half"}, {"source": "mesh"}),
    "target": ({}, {"target": "some"}),
    "other memory": ({}, {"target": "host"}),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("target", ["mesh, columns", "first half"])
def test_a_way_that_is_kept_is_of_equal_moves_only(target, change):
    """How arrays move is kept by their shardings, shape and options: one move after another."""
    common, difference = CHANGES[change]
    base = {"source": "mesh", "target": target, "shape": SHAPE, "weak": False, **common}
    for case in (base, base | difference, base):
        options = {name: case[name] for name in ("copy", "donate") if name in case}
        goal = ROWS[case["target"]]
        values = np.arange(np.prod(case["shape"]), dtype=np.float32).reshape(case["shape"])
        if case["weak"]:  # as Python's numbers are
            values = jnp.broadcast_to(jnp.asarray(2.0), case["shape"])
        old = jax.device_put(values, ROWS[case["source"]])
        assert old.weak_type == case["weak"]
        new = place(old, goal, **options)
        assert (new.sharding, new.weak_type) == (goal, case["weak"])
        assert old.is_deleted() == ("donate" in case)
        if "copy" in case:
            assert not share_memory(old, new)
        np.testing.assert_array_equal(new, values)


class EveryWayTest(parameterized.TestCase):
    @parameterized.parameters("numpy", *PLACES)
    def test_from(self, name):
        for goal in PLACES.values():
            old = source(name)
            new = place(old, goal)
            assert new.sharding == goal and new.committed, goal
            np.testing.assert_array_equal(new, VALUE)
            expected = jax.device_put(VALUE, goal)
            for a, b in zip(new.addressable_shards, expected.addressable_shards, strict=True):
                assert a.device == b.device and a.index == b.index
                assert a.data.sharding.memory_kind == goal.memory_kind
            if name != "numpy":
                assert not old.is_deleted() and (new is old) == (old.sharding == goal)

    @parameterized.parameters("one", "mesh", "reversed", "last half", "host")
    def test_a_copy_shares_no_memory(self, name):
        for goal in PLACES.values():
            old = source(name)
            new = place(old, goal, copy=True)
            assert new is not old and not share_memory(old, new), goal
            old.delete()
            np.testing.assert_array_equal(new, VALUE)
            assert new.sharding == goal

    @parameterized.parameters("one", "mesh", "replicated", "explicit", "last half")
    def test_a_copy_of_keys_shares_no_memory(self, name):
        words = np.arange(512, dtype=np.uint32).reshape(*SHAPE, 4)
        for goal in ("one", "other one", "mesh", "replicated", "explicit", "first half", "some"):
            old = jax.device_put(jax.random.wrap_key_data(words, impl="rbg"), PLACES[name])
            new = place(old, PLACES[goal], copy=True)
            assert not share_memory(*map(jax.random.key_data, (old, new))), goal
            old.delete()
            np.testing.assert_array_equal(jax.random.key_data(new), words)
            assert jax.random.key_impl(new) == "rbg"
            assert new.sharding.is_equivalent_to(PLACES[goal], 2)

    @parameterized.parameters("one", "mesh", "reversed", "last half", "host")
    def test_donated(self, name):
        for goal in PLACES.values():
            old = source(name)
            new = place(old, goal, donate=True)
            assert old.is_deleted() == (old is not new)
            np.testing.assert_array_equal(new, VALUE)
            assert new.sharding == goal

    def test_donated_buffers_are_used_again(self):
        old = source("mesh")
        before = set(shards(old).values())
        new = place(old, NamedSharding(MESH, P("model", "data")), donate=True)
        assert set(shards(new).values()) <= before

    def test_an_array_in_two_places(self):
        x, y = source("mesh"), source("mesh")
        new = place([x, x, y], [P(), P(), P("data")], MESH, donate=True)
        assert new[0] is new[1] and x.is_deleted() and y.is_deleted()
        x = source("mesh")
        new = place([x, x, x], [P(), P("data"), None], MESH, donate=True)
        assert not x.is_deleted() and new[2] is x
        new = place([x, x], [P("data"), None], MESH, donate=True)
        assert not x.is_deleted() and new[1] is x

    def test_numpy_memory_is_not_shared(self):
        x = np.zeros((512, 512), np.float32)
        both = place([x, x], [P("data"), P()], MESH)
        x[:] = 1
        assert all(float(y.max()) == 0 for y in both)
        model = MLP()
        model.up.kernel.set_raw_value(x[:4, :16])
        jit(lambda m: m.up.kernel.sum(), in_shardings=(mlp_specs(),), mesh=MESH)(model)
        x[:] = 2
        assert float(model.up.kernel[...].max()) == 1

    def test_replicas_may_be_donated(self):
        x = place(np.ones((512, 512), np.float32), P(), MESH)
        y = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
        assert {float(s.data[0, 0]) for s in y.addressable_shards} == {2.0}

    @parameterized.parameters(
        (np.float16(3),),
        (np.arange(8),),
        (np.ones((8, 4), np.bool_),),
        (np.zeros((0, 8), np.int8),),
        (3,),
        (2.5,),
        (True,),
        (np.arange(16.0)[::-2],),
    )
    def test_types_are_those_of_jax(self, value):
        new, expected = place(value, P(), MESH), jnp.asarray(value)
        assert (new.dtype, new.shape, new.weak_type) == (
            expected.dtype,
            expected.shape,
            expected.weak_type,
        )
        np.testing.assert_array_equal(new, expected)
        weak = jnp.asarray(2.0)
        assert weak.weak_type and place(weak, P(), MESH).weak_type

    @parameterized.parameters("bfloat16", "float8_e4m3fn", "int4", "uint16", "complex64")
    def test_dtypes(self, dtype):
        x = jnp.arange(8).astype(dtype)
        for goal in (P("data"), on(DEVICES[3:5], (2, 1), P("a"))):
            y = place(place(x, goal, MESH), PLACES["last half"].update(spec=P("b")))
            assert y.dtype == x.dtype
            np.testing.assert_array_equal(y.astype(float), x.astype(float))

    def test_random_keys(self):
        keys = jax.random.split(jax.random.key(0, impl="rbg"), 8)
        for goal in PLACES.values():
            if goal.memory_kind != "device":
                continue
            goal = goal if goal.num_devices == 1 else goal.update(spec=P(goal.mesh.axis_names[0]))
            moved = place(place(keys, P("data"), MESH), goal)
            np.testing.assert_array_equal(numbers(moved), numbers(keys))
            assert moved.dtype == keys.dtype and moved.sharding.is_equivalent_to(goal, 1)

    def test_abstract(self):
        x = jax.ShapeDtypeStruct(SHAPE, "float32")
        new = place({"x": x, "y": x}, {"x": P("data"), "y": None}, MESH)
        assert new["x"].sharding == NamedSharding(MESH, P("data")) and new["y"] is x
        abstract = AbstractMesh((4,), ("a",))
        assert place(x, P("a"), abstract).sharding.mesh == abstract

    def test_a_format(self):
        goal = Format(Layout((1, 0)), TARGET)
        assert place(VALUE, goal).format.layout.major_to_minor == (1, 0)
        with fails(ValueError, "tree, shape (8, 16)", "abstract"):
            place(VALUE, Format(Layout((1, 0)), NamedSharding(AbstractMesh((2,), ("a",)), P())))

    def test_the_mesh_in_context(self):
        with jax.set_mesh(MESH):
            assert place(VALUE, P("data")).sharding == NamedSharding(MESH, P("data"))


class CountTest(parameterized.TestCase):
    def test_one_program_for_a_call(self):
        # Shapes of its own, so that nothing is compiled yet.
        shapes = [(8, 8 * n) for n in range(11, 16)]
        tree = {n: np.ones(shape, np.float32) for n, shape in enumerate(shapes)}
        with compilations() as compiled:
            tree = place(tree, P("data", "model"), MESH)
            assert len(compiled) == 0
            place(tree, P("model", "data"), MESH, copy=True)
            assert len(compiled) == 0  # CPUs copy parts
            tree = place(tree, P("model", "data"), MESH, donate=True)
            assert len(compiled) == 1
            tree = place(tree, PLACES["reversed"], donate=True)
            assert len(compiled) == 2
            tree = place(tree, PLACES["last half"])
            tree = place(tree, PLACES["one"])
            tree = place(tree, PLACES["mesh"])
            assert len(compiled) == 2
            place(tree, PLACES["host, transposed"], donate=True)
            assert len(compiled) == 3
        with compilations() as compiled:
            place({n: np.ones(shape, np.float32) for n, shape in enumerate(shapes)}, TARGET)
            again = {n: jax.device_put(np.ones(s, np.float32), TARGET) for n, s in tree_items(tree)}
            place(again, P("model", "data"), MESH)
        assert compiled == []

    def test_no_full_array_is_fetched_or_kept(self):
        """Shards of an array on other devices are assembled for each device."""
        x = jax.device_put(np.ones((64, 64), np.float32), PLACES["first half"])
        before = len(jax.live_arrays())
        y = place(x, on(DEVICES[4:], (4, 1), P("a")))
        gc.collect()
        assert len(jax.live_arrays()) - before <= 1 + 2 * len(y.addressable_shards)
        assert getattr(x, "_npy_value", None) is None

    def test_placed_arrays_are_not_moved(self):
        model = place(MLP(), mlp_specs(), MESH)
        before = values_of(model)
        with compilations() as compiled:
            place(model, mlp_specs(), MESH)
        after = values_of(model)
        assert compiled == [] and all(after[path] is x for path, x in before.items())


def tree_items(tree):
    return [(key, x.shape) for key, x in tree.items()]


def values_of(model):
    state = nnx.to_flat_state(nnx.state(model))
    return {path: v.get_raw_value() if isinstance(v, nnx.Variable) else v for path, v in state}


def flat(model):
    return {path: jax.tree.map(numbers, x) for path, x in values_of(model).items()}


def assert_same_numbers(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


class Shared(nnx.Module):
    """Shared Variables and modules, a cycle, statics, a bare array and a NumPy array."""

    def __init__(self):
        self.one = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
        self.two = self.one
        self.tied = self.one.kernel
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        self.pair = nnx.Param({"a": jnp.ones((8, 8)), "b": np.ones((8, 4), np.float32)})
        self.bare = nnx.data(jnp.ones((8, 2)))
        self.number = nnx.Variable(3)
        self.names = nnx.static(["x", "y"])
        self.loop = nnx.List([])
        self.loop.append(self)


RULES = StateSharding(
    {nnx.PathContains("kernel"): P(None, "model"), nnx.Param: P("data"), ...: P()}
)


class ModelTest(parameterized.TestCase):
    def test_in_place(self):
        model = Shared()
        kernel, before, expected = model.one.kernel, copy.copy(vars(model)), flat(model)
        assert place(model, RULES, MESH) is model
        assert model.one.kernel is kernel and model.tied is kernel and model.two is model.one
        assert model.loop[0] is model and vars(model).keys() == before.keys()
        assert kernel.sharding == NamedSharding(MESH, P(None, "model"))
        assert model.pair.get_raw_value()["b"].sharding == NamedSharding(MESH, P("data"))
        assert model.bare.sharding == NamedSharding(MESH, P())
        assert isinstance(model.number.get_raw_value(), jax.Array)
        assert_same_numbers(flat(model), expected)

    def test_a_copy(self):
        model = Shared()
        before = values_of(model)
        new = place(model, RULES, MESH, copy=True)
        for path, x in values_of(model).items():
            assert x is before[path]
        assert new is not model and new.two is new.one and new.tied is new.one.kernel
        assert new.loop[0] is new and new.names == model.names and new.names is not model.names
        assert new.one.kernel.sharding == NamedSharding(MESH, P(None, "model"))
        assert_same_numbers(flat(new), flat(model))
        half = place(model, StateSharding({nnx.Param: P(), ...: None}), MESH, copy=True)
        assert half.bare is not model.bare and not share_memory(half.bare, model.bare)
        assert half.number.get_raw_value() == 3

    def test_a_copy_of_numpy_arrays(self):
        x = {"a": np.ones(8), "b": np.ones(8), "names": np.array(["a"])}
        new = place(x, {"a": P(), "b": None, "names": None}, MESH, copy=True)
        x["b"][:] = 2
        x["names"][0] = "b"
        assert new["b"].max() == 1 and new["names"].tolist() == ["a"]

    def test_none_leaves_arrays_as_they_are(self):
        model = MLP()
        up, down = model.up.kernel[...], model.down.kernel[...]
        place({"m": model, "x": VALUE}, {"m": None, "x": P()}, MESH)
        assert model.up.kernel.get_raw_value() is up and model.down.kernel.get_raw_value() is down

    def test_prefixes(self):
        model, x = MLP(), {"a": VALUE, "b": [VALUE, 2]}
        specs = (mlp_specs(), {"a": P("data"), "b": TARGET.update(spec=P())})
        new = place((model, x), specs, MESH)
        assert new[0] is model and new[1] is not x and isinstance(x["b"][1], int)
        assert new[1]["a"].sharding.spec == P("data") and new[1]["b"][1].sharding.spec == P()

    def test_a_model_with_its_optimizer(self):
        model = MLP()
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        rules = StateSharding({nnx.PathContains("up"): P(None, "model"), ...: P()})
        place((model, optimizer), rules, MESH)
        mu = optimizer.opt_state[0].mu
        assert mu["up"]["kernel"].sharding == NamedSharding(MESH, P(None, "model"))

    @parameterized.parameters(True, False)
    def test_equal_numbers_become_an_array_each(self, is_placed):
        """Or they could not be donated: Python has one object for them."""
        model = nnx.Dict(a=nnx.Param(0.5), b=nnx.Param(0.5))
        if is_placed:
            place(model, P(), MESH)

        def step(model):
            model.a[...] += 1
            model.b[...] += 2

        specs = StateSharding({...: P()})
        jit(step, in_shardings=(specs,), mesh=MESH, donate_argnums=0)(model)
        assert (float(model.a[...]), float(model.b[...])) == (1.5, 2.5)

    def test_then_jit_moves_nothing(self):
        model = place(MLP(), mlp_specs(), MESH)
        before = values_of(model)
        x = jnp.ones((8, 4))
        expected = model(x)
        y = jit(lambda m, x: m(x), in_shardings=(mlp_specs(), P("data")), mesh=MESH)(model, x)
        np.testing.assert_allclose(y, expected, rtol=1e-6)
        assert all(x is before[path] for path, x in values_of(model).items())

    def test_variables_of_an_abstract_model(self):
        model = nnx.eval_shape(MLP)
        place(model, mlp_specs(), AbstractMesh((2, 4), ("data", "model")))
        assert model.up.kernel.get_raw_value().sharding.spec == P(None, "model")


class MistakesTest(parameterized.TestCase):
    def unchanged(self, error, parts, sharding, mesh=MESH, **options):
        model = MLP(features=6)
        before = values_of(model)
        with fails(error, *parts):
            place(model, sharding, mesh, **options)
        assert all(x is before[path] and not x.is_deleted() for path, x in values_of(model).items())

    def test_specs(self):
        both = StateSharding({nnx.PathContains("up"): P("modle"), ...: P("data", ("data",))})
        self.unchanged(
            ValueError,
            ("place: these specs cannot be used", "'data' is used 2", "did you mean 'model'"),
            both,
        )
        self.unchanged(
            ValueError,
            (
                "place: these specs",
                "tree.down.kernel, shape (16, 6)",
                "of size 6",
                "tree.up.kernel",
            ),
            StateSharding({nnx.PathContains("up"): P("model"), ...: P(None, "model")}),
        )
        self.unchanged(ValueError, ("3 entries, the array 2 dimensions",), P(None, None, "data"))
        self.unchanged(
            ValueError,
            ("no filter", "tree.down.kernel: Param of shape (16, 6)", "up"),
            StateSharding({nnx.PathContains("up"): P()}),
        )
        self.unchanged(ValueError, ("tree.down.kernel", "UNCONSTRAINED"), P(P.UNCONSTRAINED))
        self.unchanged(
            TypeError,
            ("place: expected a sharding spec", "write P('data')"),
            ["data", None],
        )
        self.unchanged(ValueError, ("tree.down.kernel", "PathIn"), {"up": P()})
        hint = "Flax's: write nnx_sharding.StateSharding"
        self.unchanged(TypeError, (hint,), nnx.StateSharding({...: P()}))

    def test_meshes(self):
        self.unchanged(
            NoMeshError,
            ("needs a mesh", "mesh=...", "tree.down.kernel: P()", "tree.up.kernel: P()"),
            P(),
            None,
        )
        self.unchanged(TypeError, ("place: mesh must be a Mesh or an AbstractMesh, got 3",), P(), 3)
        abstract = AbstractMesh((2,), ("data",))
        self.unchanged(ValueError, ("tree.down.kernel", "abstract", "tree.up"), P(), abstract)
        self.unchanged(ValueError, ("abstract",), NamedSharding(abstract, P()), None)

    def test_options(self):
        self.unchanged(ValueError, ("copy=True keeps",), P(), copy=True, donate=True)
        self.unchanged(ValueError, ("on_indivisible: expected one of",), P(), on_indivisible="pad")

    def test_leaves(self):
        x = jnp.ones(8)
        gone = jnp.ones(8)
        gone.delete()
        tree = {"a": "text", "b": np.array(["x"]), "c": jax.new_ref(x), "d": object(), "x": x}
        names = ("tree['a']: a str", "tree['b']: a ndarray", "tree['c']", "tree['d']: a object")
        with fails(TypeError, "place: these leaves have a sharding", *names):
            place(tree, P("data"), MESH, donate=True)
        assert not x.is_deleted()
        kept = place(tree, {**dict.fromkeys("abcd"), "x": P("data")}, MESH)
        assert all(kept[key] is tree[key] for key in "abcd")
        with fails(ValueError, "tree[1], shape (8,), P(): its data was deleted"):
            place([x, gone], P(), MESH, donate=True)
        assert not x.is_deleted()

    def test_traces(self):
        for transform in (jax.jit, jax.grad, jax.vmap):
            with fails(RuntimeError, "place moves data", "with_sharding_constraint"):
                transform(lambda x: place(x, P(), MESH).sum())(jnp.ones(8))

    def test_corrections(self):
        model = MLP(features=6)
        with pytest.warns(CorrectedSpecWarning, match="tree.down.kernel"):
            place(model, P(None, "model"), MESH, on_indivisible="drop")
        assert model.down.kernel.sharding.spec == P(None, None)
        assert model.up.kernel.sharding.spec == P(None, "model")
        self.unchanged(StrictError, ("corrected",), P("model"), on_indivisible="drop", strict=True)
        with pytest.raises(StrictError) as caught:
            place(MLP(features=6), P("model"), MESH, on_indivisible="drop", strict=True)
        assert caught.value.anchor == "when-a-spec-does-not-divide-a-shape"
        rules = StateSharding({...: P("model")}, on_indivisible="replicate")
        with pytest.warns(CorrectedSpecWarning):
            place(model, rules, MESH)
        assert model.up.kernel.sharding.spec == P()
        transposed = Format(Layout((1, 0)), NamedSharding(MESH, P("model", "data")))
        with pytest.warns(CorrectedSpecWarning):
            placed = place(np.ones((6, 8)), transposed, on_indivisible="drop")
        assert placed.sharding.spec == P(None, "data")
        assert placed.format.layout.major_to_minor == (1, 0)

    def test_unused_filters(self):
        typo = StateSharding({nnx.PathContains("upp"): P("model"), ...: P()})
        self.unchanged(StrictError, ("did you mean 'up'",), typo, strict=True)
        with pytest.warns(UnusedFilterWarning):
            place(MLP(), typo, MESH)

    def test_a_variable_with_two_shardings(self):
        model = MLP()
        with fails(ValueError, "Inconsistent aliasing", "P()", "P('data',)"):
            place([model, model], [P(), P("data")], MESH)


SPEC = P("data")


class OthersTest(parameterized.TestCase):
    """Constraints outside of traces move arrays in the same way."""

    def test_constraints_move_between_devices(self):
        x = jax.device_put(VALUE, PLACES["first half"])
        with compilations() as compiled:
            y = with_sharding_constraint(x, PLACES["reversed"])
        assert compiled == [] and y.sharding.is_equivalent_to(PLACES["reversed"], 2)

    @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
    def test_the_mesh_in_context_may_have_other_devices(self, axis_type):
        """That of a trainer, for example, while a model for inference is placed elsewhere."""
        for goal in ("mesh", "explicit", "reversed"):
            x = jax.device_put(VALUE, PLACES["transposed"])
            with jax.set_mesh(Mesh(jax.devices()[:2], ("a",), axis_types=(axis_type,))):
                y = place(x, PLACES[goal], donate=True)
            np.testing.assert_array_equal(y, VALUE)
            assert y.sharding == PLACES[goal]

    @parameterized.parameters(False, True)
    def test_host_arrays_are_the_same_in_a_trace(self, in_trace):
        def constrained(x, spec=SPEC):
            if not in_trace:
                return with_sharding_constraint(x, spec, mesh=MESH)
            results = []
            call = lambda y: (results.append(with_sharding_constraint(x, spec, mesh=MESH)), y)[1]  # noqa: E731
            jax.grad(call)(1.0)
            return results[0]

        no_gradient = np.zeros(8, jax.dtypes.float0)
        for kept in (no_gradient, np.array(["s"]), 3.0, "text"):
            assert constrained(kept) is kept
        for dtype in (np.float64, np.int64, bool, np.float16):
            x = constrained(np.ones(8, dtype))
            assert x.dtype == jnp.asarray(np.ones(8, dtype)).dtype and x.sharding.spec == P("data")
        assert constrained(np.float64(2), P()).sharding.spec == P()
        with fails(ValueError, "masked arrays are not supported"):
            constrained(np.ma.array(np.ones(8), mask=np.ones(8)))

    def test_constraints_name_deleted_arrays(self):
        x = jnp.ones(8)
        x.delete()
        with fails(ValueError, "tree, shape (8,)", "deleted"):
            with_sharding_constraint(x, P("data"), mesh=MESH)
