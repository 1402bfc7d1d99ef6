"""Programs of others: with only the import changed, and sharded."""

from __future__ import annotations

import functools
import warnings

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_sharding
from nnx_sharding import export
from nnx_sharding.checkpoint import restore, save
from nnx_sharding.errors import UnshardedWarning
from nnx_sharding.partition import abstract_init, sharded_init
from nnx_sharding.placement import place
from nnx_sharding.report import compare
from nnx_sharding.report.comparison import Failure
from programs import NAMES, PROGRAMS
from programs.harness import (
    STEPS,
    Run,
    batch_specs,
    numbers,
    sharding_jit,
    shardings,
    strategies,
)
from zoo import mesh_of

MESH = mesh_of((2, 4), ("data", "model"))
MODES = {"no updates": {"graph": True, "graph_updates": False}, "tree": {"graph": False}}


@functools.cache
def stock(name):
    return Run(PROGRAMS[name], nnx.jit)


@functools.cache
def sharded(name, kind):
    program = PROGRAMS[name]
    objects = program.make()
    specs = shardings(program, strategies(program, MESH)[kind], objects)
    place(objects, specs, MESH)
    return Run(program, sharding_jit(program, specs, MESH), objects), specs


def sharded_step(program, specs, mesh, **options):
    options |= getattr(program, "OPTIONS", {})
    return sharding_jit(program, specs, mesh)(program.train_step, **options)


def assert_equal(ours, theirs, **tolerance):
    for mine, expected in zip(ours.values, theirs.values, strict=True):
        assert mine.keys() == expected.keys()
        for path, value in expected.items():
            np.testing.assert_allclose(mine[path], value, err_msg=path, **tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_import_changes(name):
    ours = Run(PROGRAMS[name], nnx_sharding.jit)
    assert_equal(ours, stock(name), rtol=1e-6)
    assert ours.counts <= stock(name).counts


def assert_results_near(results, name):
    results, expected = numbers(results), numbers(stock(name).results)
    for path, value in expected.items():
        np.testing.assert_allclose(results[path], value, 2e-3, 2e-3, err_msg=path)


@pytest.mark.parametrize("name", NAMES)
def test_sharded(name):
    run, _ = sharded(name, "fsdp")
    assert_results_near(run.results, name)
    assert run.counts["train_step"] == 1


@pytest.mark.parametrize("kind", ["tensor", "rules", "logical"])
@pytest.mark.parametrize("name", NAMES)
def test_sharded_in_other_ways(name, kind):
    if kind not in strategies(PROGRAMS[name], MESH):
        pytest.skip("has no logical names")
    run, _ = sharded(name, kind)
    assert_results_near(run.results, name)
    assert run.counts["train_step"] == 1


def test_tensor_parallelism_of_modules_of_the_user():
    run, _ = sharded("gemma", "tensor")
    for attention in (layer.attn for layer in run.objects[0].layers):
        assert attention.qkv_einsum.w.sharding.spec == P(None, "model", None, None)
        assert attention.attn_vec_einsum.w.sharding.spec == P("model", None, None)


@pytest.mark.parametrize("kind", ["fsdp", "tensor"])
@pytest.mark.parametrize("name", NAMES)
def test_on_an_explicit_mesh(name, kind):
    program, mesh = PROGRAMS[name], jax.make_mesh((2, 4), ("data", "model"))
    objects = program.make()
    specs = shardings(program, strategies(program, mesh)[kind], objects)
    step = sharded_step(program, specs, mesh)
    arguments = (*place(objects, specs, mesh), *program.batch(0))
    if name == "clip":  # its loss picks labels from logits that are sharded over the texts
        with pytest.raises(Exception, match="out_sharding") as info:
            step.trace(*arguments)
        assert "auto_axes=True" in info.value.__notes__[0]
        step = sharded_step(program, specs, mesh, auto_axes=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnshardedWarning)
        step.trace(*arguments)
    # The losses of language models are outside of them, so their logits are gathered.
    gathered = [str(x.message) for x in caught if issubclass(x.category, UnshardedWarning)]
    assert all("outside of modules get whole arrays" in text for text in gathered)
    assert kind == "tensor" or not gathered


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint(name, tmp_path):
    program, (run, specs) = PROGRAMS[name], sharded(name, "fsdp")
    save(tmp_path / "checkpoint", run.objects)
    restored = restore(tmp_path / "checkpoint", abstract_init(program.make, specs, MESH))
    expected, found = numbers(nnx.state(run.objects)), numbers(nnx.state(restored))
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


@pytest.mark.parametrize("name", NAMES)
def test_reports(name):
    program, (_, specs) = PROGRAMS[name], sharded(name, "fsdp")
    args = *program.make(), *program.batch(0)
    ways = {"fsdp": (*specs, *batch_specs(program))}
    comparison = compare(ways, program.train_step, *args, mesh=MESH)
    report = comparison.reports["fsdp"]
    assert not isinstance(report, Failure), report
    assert len(report.parameters) == len(jax.tree.leaves(nnx_sharding.split(args)[1]))
    assert "fsdp" in str(comparison) and "train_step" in str(report)


@pytest.mark.parametrize("name", NAMES)
def test_export(name, tmp_path):
    program, (run, specs) = PROGRAMS[name], sharded(name, "fsdp")
    step = run.functions["train_step"]
    args = *place(run.objects, specs, MESH, copy=True), *program.batch(0)  # which it may donate
    export.export(step)(*args).save(tmp_path / "step.zip")
    output, _ = export.load(tmp_path / "step.zip").call(*args)
    expected = step(*place(run.objects, specs, MESH, copy=True), *program.batch(0))
    for mine, theirs in zip(jax.tree.leaves(output), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, 1e-5, 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_created_sharded(name):
    program, (run, _) = PROGRAMS[name], sharded(name, "fsdp")
    abstract = nnx.eval_shape(program.make)
    specs = shardings(program, strategies(program, MESH)["fsdp"], abstract)
    objects = sharded_init(program.make, specs, MESH)
    results = program.train(lambda fun, **_: run.functions[fun.__name__], objects, STEPS)
    assert_results_near(results, name)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")  # of Flax's own jit
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_other_modes(name, mode):
    options = MODES[mode]
    try:
        theirs = Run(PROGRAMS[name], functools.partial(nnx.jit, **options))
    except ValueError as error:
        pytest.skip(f"not with flax.nnx: {error}")
    ours = Run(PROGRAMS[name], functools.partial(nnx_sharding.jit, **options))
    assert_equal(ours, theirs, rtol=1e-6)
    assert ours.counts <= theirs.counts
