"""``flax_names.md`` lists all transforms of Flax and functions of models, and each has a test."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, nnx
from jax.experimental.layout import Format, Layout

import flax_functions
import nestings
import nnx_sharding
from libraries import MODES, OURS, Transforms, assert_same
from nestings import MESHES, NAMES

TESTS = Path(__file__).parent
TABLE = TESTS.parent / "docs" / "guides" / "flax_names.md"

# Which tests have the names that are neither nested in other transforms, as `NAMES` are, nor run
# in all of them, as in `flax_functions.PROGRAMS`.
TESTED_BY = {
    "StateSharding": "test_modes.py::ShardingInEveryModeTest",
    "DiffState": "test_grad.py",
    "Carry": "test_vmap_and_scan.py",
    "StateAxes": "test_vmap_and_scan.py",
    "transform_metadata": "test_flax_names.py::test_transform_metadata_of_flax",
    "jit_partial": "test_flax_names.py::test_cached_partial_of_flax",
    "cached_partial": "test_flax_names.py::test_cached_partial_of_flax",
    "set_graph_mode": "test_modes.py",
    "set_graph_updates": "test_modes.py",
    "with_partitioning": "test_init.py",
    "get_abstract_model": "test_init.py",
}
# Names of types, older names of functions that are listed, and what meshes replace.
UNTESTED = {"GraphDef", "NodeStates", "SplitContext", "MergeContext", "UpdateContext"}
UNTESTED |= {"pure", "vars_as", "abstract_with_sharding", "pmap"}

# Where Flax defines transforms and functions of models.
LISTED = ("transforms", "graphlib", "rnglib", "extract", "spmd", "module")
# What else it exports: layers and other classes, filters, states, and tools.
OTHERS = ("nn", "training", "helpers", "pytreelib", "variablelib", "filterlib", "statelib")
OTHERS += ("visualization", "summary")
# Modules are written, not transformed; streams are part of models.
CLASSES = {"Module", "RngCount", "RngKey", "RngState", "RngStream", "Rngs", "M"}


def rows():
    """The cells of each row, without those of the heading."""
    table = re.findall(r"^" + r"\| (.*?) " * 2 + r"\|$", TABLE.read_text(), re.MULTILINE)
    return list(table[2:])


def names(cell):
    """Names of functions, without those of options."""
    return re.findall(r"`([\w.]+)[`(]", cell)


def listed():
    return [name for cells in rows() for name in names(cells[0])]


def exported():
    """What Flax exports, with the module of Flax that defines it."""
    for name, value in vars(nnx).items():
        home = getattr(value, "__module__", None) or ""
        if home.startswith("flax.nnx.") and not inspect.ismodule(value):
            yield name, home.split(".")[2]


def test_all_names_of_flax():
    places = dict(exported())
    assert {*places.values()} <= {*LISTED, *OTHERS}
    wanted = {name for name, home in places.items() if home in LISTED} - CLASSES
    older = {name for name in listed() if not hasattr(nnx, name.partition(".")[0])}
    assert len(listed()) == len({*listed()})
    assert {*listed()} - {"compat.backup_keys"} - older == wanted


@pytest.mark.skipif(not hasattr(nnx, "compat"), reason="This Flax has no nnx.compat.")
def test_compat_has_the_same_names():
    own = {name for name, value in vars(nnx.compat).items() if isinstance(value, functools.partial)}
    assert own <= {*listed()} | {"backup_keys"}


def test_ours_exist_and_are_listed():
    for theirs, ours in rows():
        ours = names(f"{theirs}; {ours}" if ours.startswith("the same") else ours)
        for name in ours:
            library, _, own = name.rpartition(".")
            libraries = {"": nnx_sharding, "nnx": nnx, "jax.lax": jax.lax}
            assert hasattr(libraries[library], own), name
        for name in names(theirs):
            assert name in ours or not hasattr(nnx_sharding, name), name


def test_each_name_has_a_test():
    in_all_modes = {*NAMES} | {*" ".join(flax_functions.PROGRAMS).split()}
    assert {*listed()} - UNTESTED <= in_all_modes | {*TESTED_BY}
    assert not {*TESTED_BY} & in_all_modes
    for name, tested_by in TESTED_BY.items():
        file, _, test = tested_by.partition("::")
        assert re.search(rf"(def|class) {test}", (TESTS / file).read_text()), name


def outcome_of(function, mesh=None):
    """What it returns, and the state of the model after that."""
    model, x = flax_functions.Model(), jnp.arange(4.0)
    if mesh is not None:
        spec = jax.sharding.PartitionSpec(None, "model")
        kernel = jax.device_put(model.linear.kernel[...], jax.NamedSharding(mesh, spec))
        model.linear.kernel.set_value(kernel)
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        return function(model, x), nnx.to_pure_dict(nnx.state(model))


SURROUNDINGS = [*itertools.product(nestings.TRANSPARENT, MODES, (None, *MESHES))]


# An option that JAX has removed. Names of ours that mean something else, and `eval_shape`, whose
# function may have a keyword `f` of its own.
OTHER_OPTIONS = {"reduce_axes"}
OTHER_FUNCTIONS = {"split", "merge", "eval_shape"}


@pytest.mark.parametrize("name", sorted({*dir(nnx)} & {*nnx_sharding.__all__} - OTHER_FUNCTIONS))
def test_arguments_have_the_names_of_flax(name):
    """Programs that give the function as a keyword, ``scan(f=step)``, run with our import."""
    ours, flax = getattr(nnx_sharding, name), getattr(nnx, name)
    if not inspect.isfunction(flax):
        return
    positional, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY

    def names(function, *kinds):
        return [x.name for x in inspect.signature(function).parameters.values() if x.kind in kinds]

    missing = {*names(flax, positional, keyword)} - {*names(ours, positional, keyword)}
    assert missing <= OTHER_OPTIONS
    order = names(flax, positional)
    assert [x for x in names(ours, positional) if x in order] == [
        x for x in order if x in names(ours, positional)
    ]


@pytest.mark.parametrize("program", flax_functions.PROGRAMS)
@pytest.mark.parametrize(("transform", "mode", "kind"), SURROUNDINGS)
def test_functions_of_flax(program, transform, mode, kind):
    function = flax_functions.PROGRAMS[program]
    if not all(hasattr(nnx, name.partition(".")[0]) for name in program.split()):
        pytest.skip("This Flax does not have them.")
    mesh = kind and jax.make_mesh((2, 4), ("data", "model"), axis_types=MESHES[kind])
    run = transform(Transforms(nnx_sharding, **MODES[mode]), function)
    assert_same(outcome_of(run, mesh), outcome_of(function), rtol=1e-5)


@pytest.mark.parametrize("library", [nnx, nnx_sharding], ids=["flax", "ours"])
def test_the_number_of_compiled_programs(library):
    """Trainers ask for it, also through what wraps the function."""
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    run = library.jit(lambda model, x: model(x))
    cached = functools.partial(nnx.cached_partial(run, model))
    for rows in (2, 3, 2):
        cached(jnp.ones((rows, 4)))
    assert cached.func.jitted_fn._cache_size() == run.jitted_fn._cache_size() == 2
    if library is nnx_sharding:
        assert run._cache_size() == 2
        run.clear_cache()
        assert run.jitted_fn._cache_size() == 0


def test_a_changed_object_that_is_captured_is_named():
    """Also in a function without a frame of Flax, and beside attributes that are None."""

    class Holder(nnx.Module):
        def __init__(self):
            self.first, self.seen = None, nnx.Variable(jnp.zeros(3))

    def bump(variable, x):
        variable[...] += 1
        return x

    holder = Holder()
    for transform in (nnx_sharding.jit, nnx_sharding.grad):
        with pytest.raises(errors.TraceContextError, match=r"This is holder\.seen, which") as info:
            transform(lambda x: nnx_sharding.vmap(bump)(holder.seen, x).sum())(jnp.ones(3))
        assert "holder.first" not in str(info.value)


def test_shapes_of_a_lifted_function_have_its_formats():
    sharding = jax.NamedSharding(nnx_sharding.make_mesh({"data": 8}), jax.P("data"))
    declared = Format(Layout((1, 0)), sharding)
    run = nnx_sharding.jit(lambda x: x + 1, out_shardings=declared)
    assert nnx_sharding.eval_shape(run, jnp.ones((8, 16))).format == declared


def test_cached_partial_of_flax():
    outcomes = []
    for library in nnx_sharding, nnx:
        model = flax_functions.Model()
        run = nnx.cached_partial(library.jit(flax_functions.Model.__call__), model)
        results = [run(jnp.arange(4.0)) for _ in range(3)]
        outcomes.append((results, nnx.to_pure_dict(nnx.state(model))))
    assert_same(*outcomes)


@pytest.mark.parametrize("mode", MODES)
def test_custom_vjp_of_flax(mode):
    modes = MODES[mode]

    def double(model, x):
        return model.kernel.sum() * x

    def forward(model, x):
        return scaled(model, x), (model, x)

    def backward(residuals, cotangents):
        model, x = residuals
        like = nnx.state(model) if isinstance(cotangents, tuple) else model
        return jax.tree.map(lambda array: jnp.full_like(array, 7), like), 2 * x

    scaled = nnx.custom_vjp(double, **modes)
    scaled.defvjp(forward, backward)
    model = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    run = nnx_sharding.jit(nnx_sharding.grad(scaled, wrt=nnx.Param, **modes), **modes)
    gradient = run(model, jnp.float32(3))
    np.testing.assert_array_equal(gradient["kernel"], np.full((2, 2), 7))


@pytest.mark.parametrize("mode", MODES)
def test_transform_metadata_of_flax(mode):
    modes, seen = MODES[mode], []
    make = nnx.split_rngs(splits=3)(nnx_sharding.vmap(lambda rngs: nnx.Linear(2, 2, rngs=rngs)))
    layers = make(nnx.Rngs(0))
    layers.kernel.set_metadata(out_sharding=("layers", None, None))

    @nnx_sharding.scan(in_axes=(0, nnx_sharding.Carry), out_axes=nnx_sharding.Carry, **modes)
    @nnx.transform_metadata(
        in_axes=(0, None), out_axes=None, partition="layers", graph=modes["graph"]
    )
    def forward(layer, x):
        seen.append(layer.kernel.get_metadata("out_sharding"))
        return layer(x)

    assert forward(layers, jnp.ones((1, 2))).shape == (1, 2)
    assert {*seen} == {(None, None)}
    assert layers.kernel.get_metadata("out_sharding") == ("layers", None, None)


class Tied(nnx.Module):
    """A parameter in two places, and a counter: of Flax, only ``nnx.compat`` takes it."""

    def __init__(self):
        self.w = self.again = nnx.Param(jnp.arange(1.0, 4.0))
        self.calls = nnx.BatchStat(jnp.float32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return jnp.sin(self.w[...] * x) * self.again[...]


def loss(model, x):
    return model(x).sum()


def grad(outer, inner, model, x):
    return outer.jit(inner.grad(loss))(model, x)


def jit(outer, inner, model, x):
    return outer.value_and_grad(inner.jit(loss))(model, x)


def vmap(outer, inner, model, x):
    mapped = inner.vmap(lambda model, x: model.w[...] * x, in_axes=(None, 0))
    return outer.grad(lambda model, x: mapped(model, x).sum())(model, x)


def vmap_of_states(outer, inner, model, x):
    axes = nnx.StateAxes({nnx.Param: None, ...: 0})
    model.calls.set_value(jnp.zeros(3))
    return outer.vmap(inner.jit(loss), in_axes=(axes, 0))(model, x)


def scan(outer, inner, model, x):
    run = inner.scan(lambda model, x: (model, model(x)), in_axes=(nnx.Carry, 0))
    return outer.grad(lambda model, x: (run(model, x)[1] ** 2).sum())(model, x)


@pytest.mark.skipif(not hasattr(nnx, "compat"), reason="This Flax has no nnx.compat.")
@pytest.mark.parametrize("program", (grad, jit, vmap, vmap_of_states, scan))
def test_beside_compat_of_flax(program):
    """Around ours, within ours, and before ours on the same objects."""
    theirs = nnx.compat

    def outcome(*pairs):
        model, x = Tied(), jnp.linspace(0.1, 1, 3)
        results = [program(outer, inner, model, x) for outer, inner in pairs]
        assert model.w is model.again
        return results, nnx.compat.state(model)

    pairs = (theirs, OURS), (OURS, theirs), (theirs, theirs), (OURS, OURS)
    assert_same(outcome(*pairs), outcome(*[(theirs, theirs)] * len(pairs)))


def test_docstrings_of_flax_with_our_names():
    """All that the installed Flax has: 104 in Flax 0.12.12."""
    command = [sys.executable, TESTS.parent / "tools" / "run_flax_examples.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
    assert ast.literal_eval(done.stdout.splitlines()[-1])["same"] > 80
