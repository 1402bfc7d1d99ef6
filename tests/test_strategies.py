"""Strategies for models and their optimizers: replicated, FSDP, ZeRO-1, and in training."""

from __future__ import annotations

import math
import pickle
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding import StateSharding, jit, stack
from nnx_sharding.errors import NoMeshError, UnshardedWarning, UnusedFilterWarning
from nnx_sharding.experimental import context_parallel
from nnx_sharding.partition import (
    fsdp,
    optimizer_sharding,
    override,
    replicated,
    sharded_init,
    tensor_parallel,
    zero1,
)
from nnx_sharding.partition.variables import variables
from nnx_sharding.placement import place
from nnx_sharding.report import check_sharding
from nnx_sharding.specs.filters import Paths
from nnx_sharding.specs.fitting import axes_of
from zoo import (
    MESH,
    MODELS,
    STRATEGIES,
    WIDTH,
    Normed,
    assert_trains_alike,
    flax_gradient,
    loss_of,
    mesh_of,
    misfits,
    step_of,
    table,
    with_optimizer,
)


# The loss is outside of the models, and the logits of a tied embedding are gathered for it.
@pytest.mark.filterwarnings("ignore:.*operations outside of modules")
class TrainingTest(parameterized.TestCase):
    """Every strategy gives the numbers of one device, and state sharded as declared."""

    def check(self, name, strategy, kind):
        # With a larger epsilon: Adam amplifies rounding where gradients are zero, as of key biases.
        tx, make, strategy = optax.adam(1e-2, eps=1e-3), MODELS[name], STRATEGIES[strategy]
        # A loss outside of the model gets whole outputs, which is a warning on Explicit axes if the
        # strategy shards them. The tests of such models ignore this warning; others are errors.
        strict = kind == "auto" or name == "mlp"
        options = {"loss": loss_of(name), "tx": tx, "rtol": 2e-3, "strict": strict, "steps": 3}
        if kind == "auto":
            options["step"] = step_of(flax_gradient(loss_of(name)))
        mesh = mesh_of((2, 4), ("data", "model"), kind)
        _, (*trees, _) = assert_trains_alike(make, strategy, mesh, **options)
        model, optimizer = nnx.eval_shape(lambda: with_optimizer(make, tx))
        from_shapes = strategy(model, mesh=MESH, optimizer=optimizer)
        self.assertEqual(from_shapes, strategy(trees[0], mesh=mesh, optimizer=trees[1]))

    @parameterized.product(name=[*STRATEGIES], kind=["auto", "explicit"])
    def test_strategies(self, name, kind):
        self.check("mlp", name, kind)

    @pytest.mark.filterwarnings("ignore:.*operations outside of modules")
    @parameterized.product(model=[*MODELS], kind=["auto", "explicit"])
    def test_models(self, model, kind):
        self.check(model, "both", kind)

    @pytest.mark.filterwarnings("ignore:.*operations outside of modules")
    @parameterized.product(
        model=["attention", "words", "resnet", "lstm", "mixture"],
        name=[name for name in STRATEGIES if name != "both"],
    )
    def test_others(self, model, name):
        self.check(model, name, "explicit")

    def test_the_optimizer_holds_the_model(self):
        def update(optimizer, x):
            grads = nnx.grad(lambda model: (model(x) ** 2).mean())(optimizer.model)
            optimizer.update(grads)

        mesh, x = mesh_of((2, 4), ("data", "model")), np.ones((8, WIDTH), np.float32)
        ours, other = [
            nnx.ModelAndOptimizer(Normed(nnx.Rngs(0)), optax.adam(1e-2)) for _ in range(2)
        ]
        base = tensor_parallel(ours.model, mesh=mesh)
        self.assertEqual(table(ours, optimizer_sharding(ours, base)), table(
            ours, tensor_parallel(ours.model, mesh=mesh, optimizer=ours)))  # fmt: skip
        sharding = zero1(ours.model, optimizer=ours, mesh=mesh, base=base, min_size=8)
        jit(update, in_shardings=(sharding, P("data")), mesh=mesh, strict=True)(ours, x)
        update(other, x)
        kernel, moment = ours.model.up.kernel[...], ours.opt_state[0].mu["up"]["kernel"][...]
        self.assertEqual(kernel.sharding.spec, P(None, "model"))
        self.assertEqual(moment.sharding.spec, P("data", "model"))
        np.testing.assert_allclose(kernel, other.model.up.kernel[...], rtol=1e-4, atol=1e-5)


def shapes_of(**shapes):
    return {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}


def only(sharding, name="kernel"):
    return sharding.find((name,), None)[1]


@st.composite
def meshes(draw):
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=2, max_size=3))
    return AbstractMesh(tuple(sizes), ("data", "model", "more")[: len(sizes)])


sides = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8, 12, 48])
arrays = st.lists(sides, max_size=4).map(tuple)


class OwnCache(nnx.Cache):
    pass


class Weight(nnx.Variable):
    pass


class PytreeTest(parameterized.TestCase):
    """Strategies for a tuple, list or dict of modules."""

    MESH = mesh_of((2, 4), ("data", "model"))
    STRATEGIES = (lambda tree, mesh: fsdp(tree, mesh=mesh, min_size=0), tensor_parallel)

    def make(self, kind):
        model, other = nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 8, rngs=nnx.Rngs(1))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        return {
            "tuple": (model, optimizer),
            "list": [model, other],
            "dict": {"actor": model, "critic": other},
            "nested": ({"actor": [model], "critic": other}, optimizer),
            "modules in lists": (nnx.List([model, other]), optimizer),
        }[kind]

    def assert_sharded(self, tree, sharding):
        is_sharded = []
        for each in variables(tree):
            spec = sharding.map_prefix(each.path, each.variable)
            is_sharded.append(spec != P())
            self.assertEqual(each.variable.sharding, NamedSharding(self.MESH, spec), each.path)
        self.assertIn(True, is_sharded)

    @parameterized.product(
        kind=["tuple", "list", "dict", "nested", "modules in lists"], strategy=STRATEGIES
    )
    def test_as_one_argument(self, kind, strategy):
        tree = self.make(kind)
        sharding = strategy(tree, mesh=self.MESH)
        self.assertTrue(check_sharding(tree, sharding, self.MESH).ok)
        step = jit(
            lambda tree, x: x.sum(), in_shardings=(sharding, P("data")), mesh=self.MESH, strict=True
        )
        step(tree, jnp.ones(8))
        self.assert_sharded(tree, sharding)
        self.assert_sharded(place(self.make(kind), sharding, self.MESH), sharding)
        self.assert_sharded(sharded_init(lambda: self.make(kind), sharding, self.MESH), sharding)

    def test_as_results(self):
        sharding = fsdp(self.make("dict"), mesh=self.MESH, min_size=0)
        make = jit(lambda: self.make("dict"), out_shardings=sharding, mesh=self.MESH)
        self.assert_sharded(make(), sharding)

    def test_paths_in_the_module_come_first(self):
        model, other = self.make("list")
        rules = StateSharding(
            [
                (Paths([("kernel",), (0, "kernel")]), P("data")),
                (Paths([(1, "bias")]), P("model")),
                (nnx.PathContains("bias"), P()),
            ]
        )
        place([model, other], rules, self.MESH)
        self.assertEqual(other.kernel.sharding.spec, P("data"))
        self.assertEqual(other.bias.sharding.spec, P())

    def test_as_several_arguments(self):
        model, optimizer = self.make("tuple")
        sharding = fsdp((model, optimizer), mesh=self.MESH, min_size=0)
        for specs in ((sharding, sharding), sharding):
            step = jit(lambda model, optimizer: 0, in_shardings=specs, mesh=self.MESH)
            with self.assertRaisesRegex(
                ValueError, r"(?s)model\.kernel.*pass that as one argument"
            ):
                step(model, optimizer)


class FsdpTest(parameterized.TestCase):
    @given(arrays, meshes(), st.data())
    def test_any_shape(self, shape, mesh, data):
        axes = tuple(data.draw(st.permutations(mesh.axis_names)))
        axes = axes[: data.draw(st.integers(1, len(axes)))]
        model = shapes_of(kernel=shape)
        sharding = fsdp(model, mesh=mesh, axis=axes, min_size=0)
        self.assertEqual(misfits(model, sharding, mesh), [])
        spec = only(sharding)
        one = only(fsdp(model, mesh=mesh, axis=axes[0], min_size=0))
        divides = [d for d, size in enumerate(shape) if size % mesh.shape[axes[0]] == 0]
        if not divides:
            self.assertEqual((spec, one), (P(), P()))
            return
        [where] = [d for d, entry in enumerate(one) if entry]
        largest = max(shape[d] for d in divides)
        self.assertEqual(where, max(d for d in divides if shape[d] == largest))
        [entry] = [entry for entry in spec if entry]
        count = len(axes_of(entry))
        self.assertEqual(axes_of(entry), axes[:count])
        more = math.prod(mesh.shape[axis] for axis in axes[: count + 1])
        if count < len(axes):
            self.assertTrue(all(size % more for size in shape))

    @given(arrays, meshes(), st.data())
    def test_on_top_of_any_base(self, shape, mesh, data):
        entries = [data.draw(st.sampled_from([None, "model"])) for _ in shape]
        wish = P(*entries) if entries.count("model") < 2 else P()
        base = StateSharding({...: wish}, on_indivisible="drop")
        model = shapes_of(kernel=shape)
        with warnings.catch_warnings(action="ignore", category=UnshardedWarning):
            kept = only(fsdp(model, mesh=mesh, base=base, min_size=10**9))
        sharding = fsdp(model, mesh=mesh, base=base, min_size=0)
        self.assertEqual(misfits(model, sharding, mesh), [])
        for dimension, entry in enumerate(kept):
            before, after = axes_of(entry), axes_of(only(sharding)[dimension])
            self.assertEqual(after[: len(before)], before)
        free = [d for d in range(len(shape)) if d >= len(kept) or not axes_of(kept[d])]
        if any(shape[d] % mesh.shape["data"] == 0 for d in free):
            [where] = [d for d, entry in enumerate(only(sharding)) if "data" in axes_of(entry)]
            self.assertIn(where, free)

    @parameterized.parameters(
        ((64, 256), P(), P(None, "data")),
        ((64, 64), P(), P(None, "data")),
        ((64, 63), P(), P("data", None)),
        ((63, 63), P(), P()),
        ((64, 256), P(None, "model"), P("data", "model")),
        ((63, 256), P(None, "model"), P(None, ("model", "data"))),
        ((63, 4), P(None, "model"), P(None, "model")),
        ((64, 256), P("data"), P("data")),
        ((64, 256), P(P.UNCONSTRAINED, P.UNCONSTRAINED), P(P.UNCONSTRAINED, P.UNCONSTRAINED)),
        ((64, 256), NamedSharding(MESH, P("model")), NamedSharding(MESH, P("model"))),
        ((64, 256), None, P(None, "data")),
        ((7, 256), P("model", None), "dimension 0 of size 7"),
        ((64, 256), P("modle", None), "did you mean 'model'?"),
    )
    def test_base(self, shape, base, expected):
        model, base = {"kernel": nnx.Param(jnp.zeros(shape))}, StateSharding({...: base})
        if isinstance(expected, str):
            with self.assertRaisesRegex(ValueError, re.escape(expected)) as caught:
                fsdp(model, mesh=MESH, base=base, min_size=1)
            self.assertIn(f"model.kernel, shape {shape}", str(caught.exception))
        else:
            self.assertEqual(only(fsdp(model, mesh=MESH, base=base, min_size=1)), expected)

    def test_replicated_keeps_its_base(self):
        model = shapes_of(kernel=(64, 256), bias=(256,))
        base = StateSharding({nnx.PathContains("kernel"): P("data")})
        found = replicated(model, mesh=MESH, base=base)
        self.assertEqual([only(found), only(found, "bias")], [P("data"), P()])
        with self.assertRaisesRegex(ValueError, "replicated: specs of base do not fit"):
            replicated(model, mesh=MESH, base=StateSharding({...: P("modle")}))

    def test_small_arrays_and_random_streams_are_replicated(self):
        kernel = {"kernel": jnp.zeros((128, 128))}
        self.assertEqual(only(fsdp(kernel, mesh=MESH)), P(None, "data"))
        with self.assertWarns(UnshardedWarning):
            self.assertEqual(only(fsdp(kernel, mesh=MESH, min_size=2**14 + 1)), P())
        keys = nnx.RngKey(jax.random.split(jax.random.key(0), 8), tag="params")
        self.assertEqual(only(fsdp({"kernel": keys}, mesh=MESH, min_size=1)), P())

    def test_one_variable_with_several_arrays(self):
        def of(*shapes):
            value = [jnp.zeros(shape) for shape in shapes]
            return only(fsdp({"kernel": nnx.Param(value)}, mesh=MESH, min_size=1))

        self.assertEqual(of((4, 8), (4, 8)), P(None, "data"))
        self.assertEqual(of((4, 8), (8, 4)), P())

    @parameterized.parameters(
        # what the Variable is, its shape, its spec of FSDP over 2 devices, and the reason
        (nnx.Cache, (8, 64, 2, 8), P("data", None, None, None), None),  # requests, not positions
        (OwnCache, (8, 64), P("data", None), None),
        (nnx.Cache, (3, 64), P(), "a cache, whose first dimension (3) is not divided by 'data'"),
        (nnx.Cache, (), P(), None),
        (nnx.Param, (8, 64), P(None, "data"), None),
        (
            Weight,
            (8, 64),
            P(None, "data"),
            "gathered where it is used, in the dtype of the product",
        ),
        (Weight, (3, 5), P(), None),
    )
    def test_variables_of_other_classes(self, cls, shape, spec, reason):
        model = nnx.Dict(x=cls(jnp.zeros(shape)), kernel=nnx.Param(jnp.zeros((4, 8))))
        sharding = fsdp(model, mesh=MESH, min_size=0)
        self.assertEqual(sharding.find(("x",), model["x"])[1], spec)
        *_, row = check_sharding(model, sharding, MESH).rows
        self.assertEqual(row.path, "x")
        self.assertEqual(bool(row.reason), bool(reason))
        self.assertIn(reason or "", row.reason or "")

    def test_caches_of_stacked_layers(self):
        def layer(rngs):
            attention = nnx.MultiHeadAttention(4, 16, decode=True, rngs=rngs)
            attention.init_cache((8, 64, 16))
            return attention

        model = nnx.eval_shape(lambda: nnx.vmap(layer)(nnx.Rngs(0).split(6)))
        base = tensor_parallel(model, mesh=MESH)
        found = table(model, fsdp(model, mesh=MESH, base=base, min_size=0))
        # (layers, requests, positions, heads, features)
        self.assertEqual(found["cached_key"], P(None, "data", None, "model", None))

    @parameterized.parameters("auto", "explicit")
    def test_decoding_sends_no_cache(self, kind):
        def make():
            attention = nnx.MultiHeadAttention(4, 16, decode=True, rngs=nnx.Rngs(0))
            attention.init_cache((8, 64, 16))
            return attention

        mesh = mesh_of((2, 4), ("data", "model"), kind)
        model = nnx.eval_shape(make)
        base = tensor_parallel(model, mesh=mesh)
        sharding = fsdp(model, mesh=mesh, base=base, min_size=0)
        model, expected = sharded_init(make, sharding, mesh), make()
        specs = {"in_shardings": (sharding, P("data")), "out_shardings": P("data")}
        step = jit(lambda model, x: model(x), mesh=mesh, **specs)
        x = jax.random.normal(jax.random.key(1), (8, 1, 16))
        for _ in range(3):
            y, truth = step(model, x), expected(x)
            np.testing.assert_allclose(y, truth, rtol=1e-5, atol=1e-6)
        sent = step.lower(model, x).compile().collectives()
        self.assertEqual([c.of for c in sent if any("cached" in p for p in c.parameters)], [])
        self.assertLess(max(c.bytes for c in sent), 4 * 8 * 64 * 16 // 2)

    def test_the_reason_of_arrays_of_one_variable(self):
        value = {"q": jnp.zeros((64, 8), jnp.int8), "scale": jnp.zeros((1, 8))}
        model = nnx.Dict(kernel=nnx.Param(value))
        rows = check_sharding(model, fsdp(model, mesh=MESH, min_size=0), MESH).rows
        for row in rows:
            self.assertIn("a Variable has one spec: use several", row.reason)
        rules = override(fsdp(model, mesh=MESH, min_size=0), {"kernel/q$": P("data")})
        (warning,) = check_sharding(model, rules, MESH).warnings
        self.assertIn("; kernel/q is in a Variable, which has one spec for all", warning)
        with pytest.warns(UnusedFilterWarning, match="kernel/q is in a Variable"):
            jit(lambda m: None, in_shardings=rules, mesh=mesh_of((2, 4), ("data", "model")))(model)

    def test_mesh_and_axis(self):
        model = shapes_of(kernel=(64, 64))
        with self.assertRaisesRegex(NoMeshError, "fsdp has no mesh"):
            fsdp(model)
        with jax.set_mesh(mesh_of((2, 4), ("data", "model"))):
            self.assertEqual(only(fsdp(model, min_size=1)), P(None, "data"))
            self.assertEqual(tensor_parallel(model), replicated(model))
            self.assertEqual(only(fsdp(model, axis=["data"], min_size=1)), P(None, "data"))
        with self.assertRaisesRegex(TypeError, "mesh must be a Mesh or an AbstractMesh, got 8"):
            fsdp(model, mesh=8)
        for function in (fsdp, tensor_parallel):
            with self.assertRaisesRegex(ValueError, "did you mean 'data'?") as caught:
                function(model, mesh=MESH, axis="dat")
            self.assertIn("The mesh has the axes 'data' (2), 'model' (4).", str(caught.exception))
            self.assertIn("Pass axis=..., one or several of these.", str(caught.exception))
        for axis, fault in (((), "names no axis"), (("data", "data"), "used 2 times")):
            with self.assertRaisesRegex(ValueError, fault):
                fsdp(model, mesh=MESH, axis=axis)
        with self.assertRaisesRegex(TypeError, "base must be a StateSharding, got P"):
            fsdp(model, mesh=MESH, base=P("data"))


class OptimizerTest(parameterized.TestCase):
    """The state follows the parameters."""

    def follow(self, tx, specs, **shapes):
        model = {name: nnx.Param(jnp.zeros(shape)) for name, shape in shapes.items()}
        optimizer = nnx.eval_shape(lambda: nnx.Optimizer(nnx.Dict(model), tx, wrt=nnx.Param))
        sharding = StateSharding({nnx.PathContains(k): v for k, v in specs.items()})
        found = optimizer_sharding(optimizer, sharding, model=nnx.Dict(model))
        self.assertEqual(misfits(optimizer, found, MESH), [])
        return table(optimizer, found)

    @parameterized.parameters(
        ((8, 16), P("data", "model"), P("data"), P("model")),
        ((16, 8), P("data", "model"), P("model"), P("data")),
        ((16, 16), P("data", "model"), P("data"), P("model")),
        ((3, 8, 8), P(None, "data", "model"), P(None, "data"), P(None, "model")),
        ((8, 8, 8), P("data", None, "model"), P("data", None), P("data", "model")),
    )
    def test_factors(self, shape, spec, row, column):
        tx = optax.adafactor(1e-3, min_dim_size_to_factor=4, momentum=0.9)
        found = self.follow(tx, {"w": spec, "b": P("model")}, w=shape, b=(16,))
        self.assertEqual(found.pop("opt_state/0/v_row/w"), row)
        self.assertEqual(found.pop("opt_state/0/v_col/w"), column)
        self.assertEqual(found.pop("opt_state/0/v/b"), P("model"))
        self.assertEqual(sorted(found.values(), key=len), [P("model"), spec])
        self.assertTrue(all("ema" in name for name in found))

    def test_memory_of_lbfgs(self):
        found = self.follow(optax.lbfgs(memory_size=3), {"w": P("data", "model")}, w=(8, 8))
        memory = {name: spec for name, spec in found.items() if "memory" in name}
        self.assertEqual(set(memory.values()), {P(None, "data", "model")})
        self.assertLen(memory, 2)

    def test_ambiguous_and_unknown_shapes_are_replicated(self):
        def init(params):
            value = lambda shape: jax.tree.map(lambda _: jnp.zeros(shape), params)  # noqa: E731
            sizes = {"one": (8,), "both": (1, 8), "far": (5, 8), "long": (2, 2, 8, 16)}
            return {name: value(shape) for name, shape in sizes.items()}

        tx = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
        found = self.follow(tx, {"w": P("data", "model")}, w=(8, 8))
        self.assertEqual(found, {"opt_state/both/w": P(None, "model")})
        self.assertEqual(self.follow(tx, {"w": P(None, None, "model")}, w=(8, 16)), {})

    def test_the_longest_path_decides(self):
        def make():
            model = Normed(nnx.Rngs(0))
            model.kernel = nnx.Param(jnp.zeros((WIDTH, 32)))
            return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

        model, optimizer = nnx.eval_shape(make)
        rules = StateSharding({nnx.PathContains("up"): P("data"), ...: P()})
        found = table(optimizer, optimizer_sharding(optimizer, rules, model=model))
        inside = "opt_state/0/trace/up"
        self.assertEqual(found, {f"{inside}/kernel": P("data"), f"{inside}/bias": P("data")})

    def test_shardings_with_a_mesh_of_their_own(self):
        model, optimizer = with_optimizer(Normed, optax.adafactor(1e-3, min_dim_size_to_factor=4))
        kernel = NamedSharding(MESH, P("data", "model"))
        rules = StateSharding({nnx.PathContains("kernel"): kernel, ...: NamedSharding(MESH, P())})
        found = optimizer_sharding(optimizer, rules, model=model)
        paths = [("opt_state", 0, name, "up", "kernel") for name in ("v_row", "v_col", "v")]
        specs = [P("data"), P("model"), P(), P()]
        for path, spec in zip([*paths, ("step",)], specs, strict=True):
            self.assertEqual(found.find(path, None)[1], NamedSharding(MESH, spec))

    def test_override(self):
        model, optimizer = with_optimizer(Normed, optax.adam(1e-3))
        sharding = tensor_parallel(model, mesh=MESH, optimizer=optimizer)
        names = table(optimizer, override(sharding, {nnx.PathContains("mu"): P()}))
        self.assertEqual({name.split("/")[2] for name in names}, {"nu"})

    def test_mistakes(self):
        model, optimizer = with_optimizer(Normed, optax.adam(1e-3))
        rules = replicated(model)
        with self.assertRaisesRegex(ValueError, "Pass model="):
            optimizer_sharding(optimizer, rules)
        with self.assertRaisesRegex(TypeError, "sharding must be a StateSharding, got P"):
            optimizer_sharding(optimizer, P(), model=model)
        with self.assertRaisesRegex(TypeError, r"nnx\.Optimizer\(model, tx"):
            optimizer_sharding(optax.adam(1e-3), rules, model=model)
        state = optax.adam(1e-3).init(nnx.state(model, nnx.Param))
        parts = {"tx": optax.adam(1e-3), "state": state}
        mesh = AbstractMesh((2, 4, 1), ("data", "model", "context"))
        for strategy in (*STRATEGIES.values(), context_parallel):
            for wrong in (optax, optax.adam, "adam", (1, 2), {}, optax.adam(1e-3)):
                with self.assertRaisesRegex(TypeError, "holds no state"):
                    strategy(model, mesh=mesh, optimizer=wrong)
            with self.assertRaisesRegex(TypeError, r"no arrays:\n  tx/init: .*\n  tx/update: "):
                strategy(model, mesh=mesh, optimizer=parts)
        with self.assertRaisesRegex(TypeError, "holds no state"):
            zero1(model, optimizer=None, mesh=MESH)
        with self.assertRaisesRegex(TypeError, "optimizer"):
            zero1(model, mesh=MESH)

    def test_paths_of_model_and_optimizer_may_not_clash(self):
        model = nnx.Dict(step=nnx.Param(jnp.zeros((8, 8))))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        self.assertEqual(only(replicated(model, optimizer=optimizer), "step"), P())
        with self.assertRaisesRegex(ValueError, r"(?s)in common.*step: P.*'data'.* and P"):
            fsdp(model, mesh=MESH, min_size=1, optimizer=optimizer)


class SmallArraysTest(parameterized.TestCase):
    """What `min_size` leaves replicated is reported."""

    def reasons(self, model, **options):
        report = check_sharding(model, fsdp(model, mesh=MESH, **options), MESH)
        return {row.path: row.reason for row in report.rows if row.reason}

    def test_reports_say_why_arrays_are_replicated(self):
        model = nnx.Dict(
            large=nnx.Linear(64, 32, rngs=nnx.Rngs(0)),
            odd=nnx.Param(jnp.ones((3, 5))),  # no axis divides it
            dropout=nnx.Dropout(0.1, rngs=nnx.Rngs(0)),
        )
        expected = {"large/bias": "replicated: 32 elements, fewer than min_size=1000"}
        self.assertEqual(self.reasons(model, min_size=1000), expected)
        self.assertEqual(self.reasons(model, min_size=0), {})
        sharding = pickle.loads(pickle.dumps(fsdp(model, mesh=MESH, min_size=1000)))
        self.assertIn("fewer than min_size=1000", str(check_sharding(model, sharding, MESH)))
        base = StateSharding({nnx.PathContains("bias"): P("model"), ...: P()})
        self.assertEqual(self.reasons(model, min_size=1000, base=base), {})

    def test_layers_of_a_stack_count_alone(self):
        model = nnx.Dict(
            layers=stack(lambda rngs: nnx.Linear(16, 16, rngs=rngs), 8, rngs=nnx.Rngs(0)),
            large=nnx.Linear(64, 32, rngs=nnx.Rngs(0)),
        )
        found = self.reasons(model, min_size=1000)
        reason = "replicated: 2048 elements, fewer than min_size=1000 in each layer"
        self.assertIn(reason, found.values())

    def test_a_warning_if_nothing_is_sharded(self):
        model, optimizer = with_optimizer(
            lambda rngs: nnx.Linear(64, 32, rngs=rngs), optax.sgd(0.1, 0.9)
        )
        message = r"nothing is sharded over 'data'.*kernel, has 2048\. Pass a smaller min_size"
        with self.assertWarnsRegex(UnshardedWarning, f"fsdp: {message}") as caught:
            fsdp(model, mesh=MESH)
        self.assertEqual(caught.filename, __file__)
        with self.assertWarnsRegex(UnshardedWarning, f"zero1: {message}"):
            zero1(model, optimizer=optimizer, mesh=MESH)
        with self.assertWarns(UnshardedWarning):
            fsdp(model, mesh=MESH, base=tensor_parallel(model, mesh=MESH))
        # No warning where something is sharded, or nothing could be.
        fsdp(model, mesh=MESH, min_size=2048)
        fsdp(model, mesh=AbstractMesh((1, 8), ("data", "model")))
        fsdp(model, mesh=MESH, base=StateSharding({...: P("data")}))
        fsdp(nnx.Linear(3, 5, rngs=nnx.Rngs(0)), mesh=MESH)
