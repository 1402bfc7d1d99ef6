"""Arrays of a model outside of its Variables: masks, tables and buffers, abstract and with data."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding import StateSharding, jit, merge, split
from nnx_sharding.analysis import parameter_table
from nnx_sharding.checkpoint import restore, save
from nnx_sharding.partition import (
    LogicalRules,
    abstract_init,
    from_arrays,
    from_logical,
    from_metadata,
    from_rules,
    fsdp,
    optimizer_sharding,
    override,
    replicated,
    sharded_init,
    specs_by_path,
    tensor_parallel,
    with_sharding_constraint,
    zero1,
)
from nnx_sharding.partition.variables import variables
from nnx_sharding.placement import place
from nnx_sharding.report import check_sharding
from nnx_sharding.testing import assert_sharded
from zoo import mesh_of

WIDTH = 16
MESH = mesh_of((2, 4), ("data", "model"))
ABSTRACT = AbstractMesh((2, 4), ("data", "model"))
MODES = [(True, True), (True, False), (False, False)]


class Masked(nnx.Module):
    """A model with arrays of every kind that Flax takes as data."""

    def __init__(self, rngs):
        self.lin = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.mask = jnp.tril(jnp.ones((WIDTH, WIDTH)))
        self.table = np.arange(WIDTH, dtype=np.float32)
        self.rotary = nnx.data({"sin": [jnp.sin(jnp.arange(3.0))], "cos": (jnp.ones((8, 2)),)})
        self.layers = nnx.List([jnp.full(WIDTH, 2.0), nnx.Param(jnp.ones(WIDTH))])
        self.named = nnx.Dict(shift=jnp.arange(8.0), offset=np.float32([3]))
        self.scale = nnx.data(2)

    def __call__(self, x):
        x = self.lin(x) @ self.mask * self.layers[0] + self.layers[1] + self.table
        return x * self.scale + self.rotary["cos"][0].sum() + self.named.shift[1]


class Plain(nnx.Module, pytree=False):
    """Some of them in a module that JAX does not take as a pytree."""

    def __init__(self, rngs):
        self.lin = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.mask = jnp.tril(jnp.ones((WIDTH, WIDTH)))
        self.rotary = [{"sin": jnp.ones(3)}, np.ones(3, np.float32), 3]

    def __call__(self, x):
        return self.lin(x) @ self.mask * self.rotary[2]


def made(kind=Masked):
    return kind(nnx.Rngs(0))


# How users get a model without data. The result may contain tracers, which JAX cannot compare with
# those of an earlier result in its caches.


def _eval_shape(make, **options):
    jax.clear_caches()
    return nnx.eval_shape(lambda: make(), graph=True, **options)


def _jax_eval_shape(function):
    jax.clear_caches()
    return jax.eval_shape(lambda: function())


def _merged(make):
    graphdef, state = nnx.split(make())
    return nnx.merge(graphdef, jax.eval_shape(lambda: state))


KINDS = {
    "eval_shape": lambda make: _eval_shape(make, graph_updates=True),
    "no updates": lambda make: _eval_shape(make, graph_updates=False),
    "jax.eval_shape": _jax_eval_shape,
    "split inside": lambda make: nnx.merge(*_jax_eval_shape(lambda: nnx.split(make()))),
    "split": _merged,
    "abstract_init": lambda make: abstract_init(make, StateSharding({...: P()}), MESH),
    "jit": lambda make: jit(make).eval_shape(),
}


@functools.cache
def abstract_model(kind):
    """The model of a kind; not to be changed."""
    return KINDS[kind](made)


of_each_kind = pytest.mark.parametrize("kind", KINDS)

STRATEGIES = {
    "replicated": replicated,
    "fsdp": lambda m: fsdp(m, mesh=ABSTRACT, min_size=0),
    "fsdp, two axes": lambda m: fsdp(m, mesh=ABSTRACT, axis=("data", "model"), min_size=16),
    "tensor_parallel": lambda m: tensor_parallel(m, mesh=ABSTRACT),
    "both": lambda m: fsdp(m, mesh=ABSTRACT, min_size=0, base=tensor_parallel(m, mesh=ABSTRACT)),
    "base": lambda m: fsdp(m, mesh=ABSTRACT, min_size=0, base=from_rules(
        {"mask": P("model"), "raw": P("data")}, default=P(), on_indivisible="replicate")),
    "override": lambda m: override(tensor_parallel(m, mesh=ABSTRACT), {...: P()}),
    "metadata": from_metadata,
    "logical": lambda m: from_logical(
        m, LogicalRules([("rows", "data"), ("model", "model")]),
        [(lambda path, x: "mask" in path, ("rows", None))]),
}  # fmt: skip


def shapes(tree):
    """The shape of each array by the keys to it, as Flax and JAX see the tree."""
    flat = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(tree)))
    return {
        tuple(str(getattr(k, "key", getattr(k, "idx", k))) for k in path): np.shape(leaf)
        for path, leaf in flat
    }


def shapes_found(tree):
    return {tuple(map(str, each.path)): each.shape for each in variables(tree)}


class TestAbstract:
    @of_each_kind
    def test_has_all_arrays(self, kind):
        abstract = abstract_model(kind)
        assert shapes_found(abstract) == shapes_found(made()) == shapes(made())
        arrays = [x for each in variables(abstract) for x in each.arrays]
        assert {type(x) for x in arrays} == {jax.ShapeDtypeStruct}

    @pytest.mark.parametrize("kind", ["eval_shape", "no updates"])
    def test_has_all_arrays_of_a_module_that_is_no_pytree(self, kind):
        assert shapes_found(KINDS[kind](lambda: made(Plain))) == shapes_found(made(Plain))

    @of_each_kind
    @pytest.mark.parametrize("name", STRATEGIES)
    def test_gives_the_strategy_of_the_model(self, kind, name):
        sharding = STRATEGIES[name](made())
        assert STRATEGIES[name](abstract_model(kind)) == sharding
        assert not check_sharding(made(), sharding, ABSTRACT).unmatched

    @of_each_kind
    def test_is_not_changed(self, kind):
        abstract = abstract_model(kind)
        before = {**vars(abstract), **{("named", k): x for k, x in vars(abstract.named).items()}}
        replicated(abstract)
        check_sharding(abstract, replicated(abstract), ABSTRACT)
        after = {**vars(abstract), **{("named", k): x for k, x in vars(abstract.named).items()}}
        assert [*before] == [*after]
        assert all(map(lambda a, b: a is b, before.values(), after.values()))

    def test_can_be_split_merged_and_lowered(self):
        abstract = abstract_model("eval_shape")
        copy = merge(*split(abstract))
        assert copy.mask == jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")
        assert nnx.state(copy)["mask"] is copy.mask  # data to Flax as well
        x = jnp.ones((8, WIDTH))
        for model in (abstract, copy):
            compiled = jit(lambda m, x: m(x)).lower(model, x).compile()
            np.testing.assert_allclose(compiled(made(), x), made()(x), rtol=1e-6)

    def test_keeps_explicit_shardings(self):
        mesh = jax.make_mesh((2, 4), ("data", "model"), (jax.sharding.AxisType.Explicit,) * 2)
        rows = NamedSharding(mesh, P("data"))

        class Rows(nnx.Module):
            def __init__(self):
                self.rows = jax.sharding.reshard(jnp.ones((8, 4)), rows)

        with jax.set_mesh(mesh):
            want = jax.eval_shape(lambda: jax.sharding.reshard(jnp.ones((8, 4)), rows))
            [each] = variables(_eval_shape(Rows))
        assert each.arrays == (want,) and want.sharding.spec == P("data", None)

    def test_cannot_be_called(self):
        with pytest.raises(TypeError, match=r"abstract.*\n.*m\.mask, float32\[16,16\]"):
            jit(lambda m: m.mask + 1)(abstract_model("split inside"))

    def test_a_leaked_tracer_is_named(self):
        model = made()
        jax.jit(lambda x: vars(model).update(_last=x * 2))(jnp.ones(3))
        with pytest.raises(TypeError, match=r"m\._last, float32\[3\]\n.*outlives the trace"):
            jit(lambda m: m._last + 1)(model)


SPECS = {
    "fsdp": (
        lambda m: fsdp(m, mesh=MESH, axis="model", min_size=0),
        {("lin", "kernel"): P(None, "model"), ("lin", "bias"): P("model"),
         ("layers", 1): P("model")},
    ),
    "rules": (
        lambda m: fsdp(m, mesh=MESH, min_size=2**20, base=from_rules(
            {"mask": P("data", "model"), "table|cos": P("model"), "layers/0": P("data")},
            default=P())),
        {("mask",): P("data", "model"), ("table",): P("model"), ("layers", 0): P("data"),
         ("rotary", "cos", 0): P("model")},
    ),
    "logical": (
        lambda m: from_logical(m, {"in": None, "out": "model"}, {"mask": ("in", "out")}),
        {("mask",): P(None, "model")},
    ),
}  # fmt: skip


class TestPlaced:
    """What Flax and JAX do with the specs, against ``jax.device_put`` of each array."""

    @pytest.mark.parametrize(
        ("name", "kind", "modes"),
        [*(("rules", Masked, modes) for modes in MODES), ("fsdp", Masked, MODES[0]),
         ("logical", Masked, MODES[0]), ("fsdp", Plain, MODES[0])],
    )  # fmt: skip
    def test_every_way(self, name, kind, modes):
        make = functools.partial(made, kind)
        strategy, specs = SPECS[name]
        abstract = abstract_model("eval_shape") if kind is Masked else KINDS["eval_shape"](make)
        with nnx.set_graph_mode(modes[0]), nnx.set_graph_updates(modes[1]):
            sharding = strategy(abstract)
            assert check_sharding(make(), sharding, MESH).ok
            x = jnp.ones((8, WIDTH))
            call = jit(lambda m, x: m(x), in_shardings=(sharding, P("data")), mesh=MESH)
            np.testing.assert_allclose(call(make(), x), make()(x), rtol=1e-6)
            self.check_specs(call.lower(abstract, x).compile().parameters(), specs, make())
            for model in (
                sharded_init(make, sharding, MESH),
                place(make(), sharding, MESH),
                with_sharding_constraint(make(), sharding, mesh=MESH),
                place(merge(*split(abstract)), sharding, MESH),
                abstract_init(make, sharding, MESH),
            ):
                self.check_arrays(model, specs, make())

    def check_arrays(self, model, specs, plain):
        for new, old in zip(variables(model), variables(plain), strict=True):
            assert new.path == old.path
            [array], [data] = new.arrays, old.arrays
            if isinstance(array, int):  # not an array yet
                continue
            want = jax.device_put(data, NamedSharding(MESH, specs.get(new.path, P())))
            assert array.sharding.is_equivalent_to(want.sharding, want.ndim), new.path
            if not isinstance(array, jax.ShapeDtypeStruct):
                np.testing.assert_allclose(array, data, rtol=1e-6)

    def check_specs(self, rows, specs, plain):
        known = {each.name: NamedSharding(MESH, specs.get(each.path, P())) for each in
                 variables(plain)}  # fmt: skip
        for row in rows:
            name = row.path.removeprefix("m.").replace("['", ".").replace("[", ".")
            name = name.replace("']", "").replace("]", "").replace(".", "/")
            if row.used and name in known:
                assert row.shard_shape == known[name].shard_shape(row.shape), name

    @pytest.mark.parametrize("kind", ["eval_shape", "abstract_init"])
    def test_with_an_optimizer(self, kind):
        def make():
            model = made()
            return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

        for strategy in (
            lambda m, o: fsdp(m, mesh=ABSTRACT, min_size=0, optimizer=o),
            lambda m, o: replicated(m, optimizer=o),
            lambda m, o: zero1(m, optimizer=o, mesh=ABSTRACT, min_size=0),
            lambda m, o: optimizer_sharding(o, tensor_parallel(m, mesh=ABSTRACT), model=m),
        ):
            assert strategy(*KINDS[kind](make)) == strategy(*make())
        sharding = fsdp(*KINDS[kind](make)[:1], mesh=MESH, min_size=0, optimizer=make()[1])
        model, optimizer = sharded_init(make, sharding, MESH)
        assert model.mask.sharding == NamedSharding(MESH, P())
        assert model.lin.kernel.sharding.spec == P(None, "data")
        assert optimizer.opt_state[0].mu.lin.kernel.sharding.spec == P(None, "data")

    def test_from_the_metadata(self):
        model = sharded_init(made, None, MESH)
        assert {x.sharding for each in variables(model) for x in each.arrays} == {
            NamedSharding(MESH, P())
        }
        assert from_arrays(model) == from_arrays(abstract_init(made, None, MESH))

    @pytest.mark.parametrize("make", [made, lambda: abstract_model("eval_shape")])
    def test_an_unnamed_array_is_a_problem_everywhere(self, make):
        rules = from_rules({"lin|layers/1|table|rotary|named": P()})
        report = check_sharding(make(), rules, MESH)
        assert report.unmatched[:2] == ("layers/0", "mask")
        for use in (
            lambda: jit(lambda m: m, in_shardings=rules, mesh=MESH).lower(make()),
            lambda: place(make(), rules, MESH),
            lambda: sharded_init(lambda: made(), rules, MESH),
        ):
            with pytest.raises(ValueError, match=r"\w+\.layers\[0\].*\n.*\w+\.mask"):
                use()


class TestKept:
    """Arrays that are attributes are moved to their declared sharding once, as Variables are."""

    SPECS = from_rules({"mask": P("data", "model"), "layers/0": P("model")}, default=P())

    def called(self, model, function=lambda m, x: m(x), specs=SPECS, **options):
        call = jit(function, in_shardings=(specs, P("data")), mesh=MESH, **options)
        return call(model, jnp.ones((8, WIDTH)))

    @pytest.mark.parametrize("kind", [Masked, Plain])
    def test_once(self, kind):
        model, expected = made(kind), made(kind)(jnp.ones((8, WIDTH)))
        np.testing.assert_allclose(self.called(model), expected, rtol=1e-6)
        placed = {key: x for key, x in vars(model).items() if isinstance(x, jax.Array)}
        assert placed["mask"].sharding.spec == P("data", "model")
        np.testing.assert_array_equal(placed["mask"], made(kind).mask)
        for _ in range(2):
            np.testing.assert_allclose(self.called(model), expected, rtol=1e-6)
            assert all(vars(model)[key] is x for key, x in placed.items())
        model.mask = made(kind).mask * 0
        assert not np.array_equal(self.called(model), expected)
        assert model.mask.sharding.spec == P("data", "model")

    def test_in_lists_of_modules(self):
        model = made()
        self.called(model)
        assert model.layers[0].sharding.spec == P("model")
        assert model.named.shift.sharding == NamedSharding(MESH, P())

    def test_a_shared_array_stays_one(self):
        model = nnx.List([made(), made()])
        model[1].mask = model[0].mask
        self.called(model, lambda m, x: m[1](m[0](x)))
        assert model[1].mask is model[0].mask

    def test_only_jax_arrays_that_are_attributes(self):
        model = made()
        table, rotary = model.table, model.rotary
        self.called(model)
        assert model.table is table and type(table) is np.ndarray
        assert model.rotary is rotary and not rotary["cos"][0].committed

    @pytest.mark.parametrize(("graph", "updates"), MODES[1:])
    def test_not_without_updates(self, graph, updates):
        model = made()
        mask = model.mask
        self.called(model, graph=graph, graph_updates=updates)
        assert model.mask is mask
        assert model.lin.kernel.sharding == NamedSharding(MESH, P())

    def test_what_the_function_assigns_is_newer(self):
        def function(m, x):
            m.mask = m.mask + 1
            return x

        model = made()
        self.called(model, function)
        np.testing.assert_array_equal(model.mask, made().mask + 1)

    def test_what_is_assigned_meanwhile_is_newer(self):
        model, other = made(), jnp.zeros((WIDTH, WIDTH))

        def function(m, x):
            vars(model)["mask"] = other  # as another thread may
            return m(x)

        np.testing.assert_allclose(self.called(model, function), made()(jnp.ones((8, WIDTH))))
        assert model.mask is other

    def test_not_after_an_error(self):
        model = made()
        mask, kernel = model.mask, model.lin.kernel[...]
        with pytest.raises(ZeroDivisionError):
            self.called(model, lambda m, x: 1 / 0)
        assert model.mask is mask and model.lin.kernel[...] is kernel

    def test_on_explicit_axes(self):
        mesh = jax.make_mesh((2, 4), ("data", "model"))
        model = nnx.Dict(mask=jnp.ones((WIDTH, WIDTH)))
        types = []

        def function(m, x):
            types.append(jax.typeof(m.mask).sharding.spec)
            return x * 2

        specs = StateSharding({...: P("data")})
        call = jit(function, in_shardings=(specs, P("data")), mesh=mesh)
        call.lower(model, jnp.ones((8, WIDTH)))
        for _ in range(2):
            call(model, jnp.ones((8, WIDTH)))
        assert types == [P("data", None)]


class TestBuffers:
    """Which arrays ``fsdp`` takes as parameters."""

    def sharded(self, tree):
        specs = specs_by_path(tree, fsdp(tree, mesh=ABSTRACT, min_size=0))
        return {path for path, spec in specs.items() if spec != P()}

    @of_each_kind
    def test_arrays_beside_variables_are_replicated(self, kind):
        want = {("lin", "bias"), ("lin", "kernel"), ("layers", 1)}
        abstract = abstract_model(kind)
        assert self.sharded(abstract) == self.sharded(made()) == want
        assert self.sharded({"model": abstract}) == {("model", *path) for path in want}

    def test_in_a_state(self):
        state = nnx.state(made())
        assert self.sharded(jax.eval_shape(lambda: state)) == self.sharded(made())

    def test_arrays_without_variables_are_parameters(self):
        class Weights(nnx.Pytree):
            def __init__(self):
                self.kernel = jnp.ones((WIDTH, 3))
                self.layer = nnx.Dict(bias=jnp.ones(WIDTH))

        want = {("kernel",), ("layer", "bias")}
        assert self.sharded(Weights()) == want
        assert self.sharded(_eval_shape(Weights)) == want
        pure = nnx.to_pure_dict(nnx.state(made()))
        assert ("mask",) in self.sharded(pure)
        # Beside a model they are those of something else, such as an average of its parameters.
        assert ("average", "mask") in self.sharded({"model": made(), "average": pure})

    def test_layers_of_plain_arrays(self):
        class Layers(nnx.Module):
            def __init__(self):
                rngs = nnx.Rngs(0)
                self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

        class PlainLayers(Layers):
            def __init__(self):
                super().__init__()
                for layer in (self.up, self.down):
                    for name in ("kernel", "bias"):
                        array = getattr(layer, name)[...] * 1
                        delattr(layer, name)
                        setattr(layer, name, array)

        want = tensor_parallel(Layers(), mesh=ABSTRACT)
        assert tensor_parallel(PlainLayers(), mesh=ABSTRACT) == want
        abstract = _eval_shape(PlainLayers)
        assert tensor_parallel(abstract, mesh=ABSTRACT) == want
        assert want.map_prefix(("down", "kernel"), None) == P("model", None)


class TestListed:
    @of_each_kind
    def test_in_reports_and_tables(self, kind):
        abstract, model = abstract_model(kind), made()
        sharding = from_rules({"mask": P("data", "model")}, default=P())
        rows = check_sharding(abstract, sharding, ABSTRACT).rows
        for row, other in zip(rows, check_sharding(model, sharding, ABSTRACT).rows, strict=True):
            assert (row.path, row.shape, row.dtype) == (other.path, other.shape, other.dtype)
            assert (row.spec, row.bytes_per_device) == (other.spec, other.bytes_per_device)
        paths = {"/".join(path): shape for path, shape in shapes(model).items()}
        assert {row.path: row.shape for row in rows} == paths
        assert {row.path: row.shape for row in parameter_table(abstract)} == paths
        [mask] = [row for row in rows if row.path == "mask"]
        assert mask.bytes_per_device == 4 * WIDTH * WIDTH // 8

    def test_a_numpy_array_has_the_dtype_of_a_device(self):
        tree = {"table": np.ones(4)}
        for spec in (P("data"), None):
            [row] = check_sharding(tree, StateSharding({...: spec}), ABSTRACT).rows
            assert row.dtype == str(jnp.asarray(tree["table"]).dtype)
            assert row.spec == (spec or P())

    def test_in_assertions(self):
        model = abstract_init(made, fsdp(made(), mesh=MESH, min_size=0), MESH)
        with pytest.raises(AssertionError, match=r"mask, shape \(16, 16\)"):
            assert_sharded(model, tolerance=0, min_size=100)
        assert_sharded(model, tolerance=0, min_size=100, allowed="mask")


class TestCheckpoint:
    @pytest.mark.parametrize(
        ("kind", "sharded"),
        [*((kind, False) for kind in KINDS), ("eval_shape", True), ("abstract_init", True)],
    )
    def test_saved_and_restored(self, tmp_path, kind, sharded):
        rules = from_rules({"mask": P("data", "model"), "layers": P("model")}, default=P())
        original = place(made(), rules, MESH) if sharded else made()
        original.mask = original.mask * 3
        save(tmp_path / "model", original)
        options = (rules, MESH) if sharded else ()
        model = restore(tmp_path / "model", KINDS[kind](made), *options)
        if sharded:
            assert model.mask.sharding.spec == P("data", "model")
        pure, want = (nnx.to_pure_dict(nnx.state(m)) for m in (model, original))  # as Flax sees it
        jax.tree.map(np.testing.assert_array_equal, pure, want)
        x = jnp.ones((8, WIDTH))
        for run in (jit(lambda m, x: m(x)), nnx.jit(lambda m, x: m(x))):
            np.testing.assert_allclose(run(model, x), original(x), rtol=1e-6)

    def test_a_model_with_data_keeps_its_kinds(self, tmp_path):
        save(tmp_path / "model", made())
        model = restore(tmp_path / "model", made())
        assert type(model.table) is np.ndarray and type(model.scale) is int


def test_numbers_in_containers_need_no_spec():
    class Scaled(nnx.Module):
        def __init__(self):
            self.lin = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
            self.scales = nnx.data((jnp.ones(WIDTH), 3, 2.5))

        def __call__(self, x):
            return self.lin(x) * self.scales[0] * self.scales[1]

    x = jnp.ones((8, WIDTH))
    for graph, abstract in itertools.product((True, False), (True, False)):
        model = Scaled()
        of = KINDS["jax.eval_shape"](Scaled) if abstract else model
        specs = (fsdp(of, mesh=MESH, min_size=0), P("data"))
        call = jit(lambda m, x: m(x), in_shardings=specs, mesh=MESH, graph=graph)
        np.testing.assert_allclose(call(model, x), model(x), rtol=1e-6)


# Models of any form: each is a list of attributes, drawn as data and built again for each trace.


class Node(nnx.Module):
    pass


class PlainNode(nnx.Module, pytree=False):
    pass


SHAPES = st.sampled_from([(), (3,), (8,), (4, 8), (16, 4), (0, 4)])
LEAVES = {
    "param": lambda s, r, m: nnx.Param(jnp.ones(s) * 2),
    "stat": lambda s, r, m: nnx.BatchStat(jnp.ones(s)),
    "number": lambda s, r, m: nnx.Param(3.0),
    "numpy": lambda s, r, m: nnx.Param(np.ones(s, np.float32)),
    "pytree": lambda s, r, m: nnx.Param({"a": jnp.ones(s), "b": [jnp.ones(s)]}),
    "named": lambda s, r, m: nnx.Param(
        jnp.ones((8, 16)), out_sharding=(None, "model"), eager_sharding=False),
    "raw": lambda s, r, m: jnp.ones(s) * 2,
    "raw numpy": lambda s, r, m: np.ones(s, np.float32),
    "raw key": lambda s, r, m: jax.random.key(0),
    "raw number": lambda s, r, m: nnx.data(2),
    "data list": lambda s, r, m: nnx.data([jnp.ones(s), {"b": np.ones(3), "a": nnx.Param(1.0)}]),
    "data dict": lambda s, r, m: nnx.data({"z": jnp.ones(s) * 2, "n": None, "y": (jnp.ones(s),)}),
    "linear": lambda s, r, m: nnx.Linear(8, 16, rngs=r),
    "lora": lambda s, r, m: nnx.LoRALinear(8, 16, lora_rank=4, rngs=r),
    "dropout": lambda s, r, m: nnx.Dropout(0.5, rngs=r),
    "shared": lambda s, r, m: m.setdefault("shared", nnx.Param(jnp.ones((8, 16)))),
    "shared layer": lambda s, r, m: m.setdefault("layer", nnx.Linear(16, 8, rngs=r)),
    "shared raw": lambda s, r, m: m.setdefault("raw", jnp.ones((8, 16)) * 2),
    "static": lambda s, r, m: ("a", 1),
}  # fmt: skip
HOLDERS = {"node": Node, "plain": PlainNode, "list": nnx.List, "dict": nnx.Dict}
LEAF = st.tuples(st.sampled_from([*LEAVES]), SHAPES)
TREE = st.recursive(
    LEAF, lambda x: st.tuples(st.sampled_from([*HOLDERS]), st.lists(x, max_size=3)), max_leaves=6
)
MODEL = st.tuples(st.sampled_from(["node", "plain"]), st.lists(TREE, min_size=1, max_size=3))


def built(recipe, rngs, known):
    kind, content = recipe
    if kind in LEAVES:
        return LEAVES[kind](content, rngs, known)
    holder = HOLDERS[kind]()
    for index, part in enumerate(content):
        value = built(part, rngs, known)
        if isinstance(holder, nnx.List):
            holder.append(value)
        else:
            setattr(holder, f"x{index}", value)
    return holder


@pytest.mark.filterwarnings("ignore::nnx_sharding.errors.UnusedFilterWarning")
@pytest.mark.filterwarnings("ignore::nnx_sharding.errors.UnshardedWarning")  # of small models
@settings(max_examples=25)
@given(MODEL, st.sampled_from([kind for kind in KINDS if kind not in ("jax.eval_shape", "split")]))
def test_strategies_of_any_model_do_not_need_its_data(recipe, kind):
    def make():
        return built(recipe, nnx.Rngs(0), {})

    model, abstract = make(), KINDS[kind](make)
    for name, strategy in STRATEGIES.items():
        sharding = strategy(model)
        assert strategy(abstract) == sharding, name
        reports = [check_sharding(x, sharding, ABSTRACT) for x in (model, abstract)]
        assert reports[0].ok and reports[0].as_dict() == reports[1].as_dict()


@settings(max_examples=20)
@given(MODEL)
def test_any_model_is_created_as_its_shape_says(recipe):
    def make():
        return built(recipe, nnx.Rngs(0), {})

    sharding = STRATEGIES["both"](KINDS["eval_shape"](make))
    placed = sharded_init(make, sharding, MESH)
    for new, old in zip(variables(placed), variables(make()), strict=True):
        assert new.path == old.path
        spec = sharding.find(new.path, new.variable)[1]
        for array, data in zip(new.arrays, old.arrays, strict=True):
            want = jax.device_put(data, NamedSharding(MESH, spec))
            assert array.sharding.is_equivalent_to(want.sharding, want.ndim)
