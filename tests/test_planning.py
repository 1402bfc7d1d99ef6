"""``plan``: against all strategies compiled one by one, and against its own predictions."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import AxisType, NamedSharding

from nnx_sharding import (
    StateSharding,
    experimental,
    jit,
    partition,
    shard_map,
    stack,
    value_and_grad,
)
from nnx_sharding.analysis import HARDWARE, Hardware
from nnx_sharding.analysis.collectives import Collectives
from nnx_sharding.analysis.units import read_bytes
from nnx_sharding.errors import UnshardedWarning
from nnx_sharding.partition import fsdp, make_mesh, pipeline, replicated, tensor_parallel, zero1
from nnx_sharding.planning import plan, recipes
from nnx_sharding.planning.arguments import Arguments
from nnx_sharding.planning.axes import Axes
from nnx_sharding.planning.candidates import Candidate
from nnx_sharding.planning.chains import strategies_of
from nnx_sharding.planning.memory import memory_need
from nnx_sharding.planning.plan import PlanningResult, _worse
from nnx_sharding.planning.predictions import predict, products_of
from nnx_sharding.planning.prepare import prepare
from nnx_sharding.planning.remedies import remedies
from nnx_sharding.planning.search import Search
from nnx_sharding.planning.variants import (
    variants_of,
    with_less_memory,
    with_prefetch,
    with_remat,
)
from nnx_sharding.report import Comparison, Strategy, compare, compiling
from nnx_sharding.report.comparison import Failure, SearchInterrupted
from nnx_sharding.report.compiling import CompilerCrash, CompilerProcess, fingerprint
from nnx_sharding.report.strategies import lowered
from nnx_sharding.training import accumulate_gradients, fetched, offload
from nnx_sharding.transforms.stages import Compiled
from test_messages import Logits
from zoo import MLP, P, layer

# Losses are outside of models, which gathers logits over the axes for layers.
pytestmark = pytest.mark.filterwarnings("ignore::nnx_sharding.errors.UnshardedWarning")

WIDTH = 128  # kernels of this width are large enough for fsdp


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(8, WIDTH, decode=False, rngs=rngs)
        self.mlp = MLP(rngs, WIDTH, 4 * WIDTH)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(256, WIDTH, rngs=rngs)
        self.blocks = stack(Block, 2, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 256, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.blocks(self.tokens(tokens)))


class ConvNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Conv(3, 64, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.second = nnx.Conv(64, 64, (3, 3), rngs=rngs)
        self.head = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.second(nnx.relu(self.norm(self.first(x)))))
        return self.head(x.mean((1, 2)))


class Experts(nnx.Module):
    """Every expert sees every row, weighted by a router."""

    def __init__(self, rngs):
        self.router = nnx.Linear(WIDTH, 8, rngs=rngs)
        self.up = nnx.Einsum("bi,eio->beo", (8, WIDTH, 256), (8, 256), rngs=rngs)
        self.down = nnx.Einsum("beo,eoi->bei", (8, 256, WIDTH), (8, WIDTH), rngs=rngs)

    def __call__(self, x):
        return jnp.einsum("bei,be->bi", self.down(nnx.relu(self.up(x))), self.router(x))


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs))
        self.head = nnx.Linear(WIDTH, 16, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x))


def searched(step, args, options=(), **changes):
    """Returns the search of a plan, with all candidates predicted and none compiled."""
    given = inspect.signature(prepare).parameters
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(plan).parameters.items()
        if name in given and parameter.default is not parameter.empty
    }
    return prepare(step, args, dict(options), **(defaults | changes))


MODELS = {
    "mlp": (lambda rngs: MLP(rngs, WIDTH, 8 * WIDTH), (16, WIDTH), jnp.float32),
    "transformer": (Transformer, (16, 8), jnp.int32),
    "convnet": (ConvNet, (16, 8, 8, 3), jnp.float32),
    "experts": (Experts, (16, WIDTH), jnp.float32),
    "recurrent": (Recurrent, (16, 4, WIDTH), jnp.float32),
}


def program(name):
    """An abstract model, its optimizer and its batch."""
    make, shape, dtype = MODELS[name]

    def both():
        model = make(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    return *nnx.eval_shape(both), jax.ShapeDtypeStruct(shape, dtype)


def loss_of(model, x):
    return jnp.mean(model(x) ** 2)


def train_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, grads)
    return loss


def by_hand(data, style):
    def in_shardings(model, optimizer, x):
        base = tensor_parallel(model, sequence=style == "sequence") if style else None
        if data == "fsdp":
            sharding = fsdp(model, base=base, optimizer=optimizer)
        elif data == "zero1":
            sharding = zero1(model, optimizer=optimizer, base=base)
        elif style:
            sharding = tensor_parallel(model, optimizer=optimizer, sequence=style == "sequence")
        else:
            sharding = replicated(model, optimizer=optimizer)
        return sharding, sharding, P("data")

    return in_shardings


def all_strategies(styles):
    """By their names in a plan all strategies on all meshes of 8 devices, chosen by hand."""
    for model in (1, 2, 4, 8):
        sizes = {"data": 8 // model, "model": model} if model > 1 else {"data": 8}
        over_data = ("dp", "zero1", "fsdp") if model < 8 else ("dp",)
        for data, style in itertools.product(over_data, styles if model > 1 else [""]):
            name = f"{data} + {style}" if style else data
            shown = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
            yield name, f"{name}, {shown}", Strategy(by_hand(data, style), sizes)


NAMES = ("model", "optimizer", "x")
OPTIONS = {"hardware": "TPU v5e", "donate_argnums": (0, 1)}


@pytest.mark.usefixtures("compile_here")
@pytest.mark.parametrize("name", MODELS)
def test_equals_brute_force(name, tmp_path):
    args = program(name)
    styles = ("tensor", "sequence") if name == "mlp" else ("tensor",)
    names, strategies = set(), {}
    for strategy, full_name, way in all_strategies(styles):
        names.add(strategy)
        strategies[full_name] = way
    options = OPTIONS | {"cache_dir": tmp_path}
    every = compare(strategies, train_step, *args, **options)
    assert {name: x.error for name, x in every.reports.items() if isinstance(x, Failure)} == {}
    figures = every.figures
    limit = sorted(each["peak"] for each in figures.values())[len(figures) // 2]
    compiled = set(tmp_path.iterdir())
    found = plan(train_step, *args, devices=8, strategies=names, memory_limit=limit, **options)

    def rank(name):
        return [figures[name][column] for column in ("roofline", "bytes_sent", "peak")]

    fitting = [name for name in strategies if figures[name]["peak"] <= limit]
    assert rank(found.best.name) == min(map(rank, fitting))
    ranked = [name for name in found.candidates if name in fitting]
    assert ranked == sorted(ranked, key=rank)
    assert set(tmp_path.iterdir()) == compiled  # read from disk
    reasons = found.ruled_out
    assert {*found.candidates, *reasons} == {*strategies}
    least = products_of(train_step, args, {}, Axes()).least / 8
    assert all(0.99 * least <= each["flops"] for each in figures.values())
    assert found.gap == 0  # all that may fit were compiled
    taken = {name: text for name, text in reasons.items() if text.startswith("the arguments take")}
    assert taken or name == "convnet"  # whose activations take most
    every = found.comparison.figures
    for candidate in found.candidates.values():
        exact = every[candidate.name]["arguments"]
        assert predict(candidate, Arguments(args, NAMES), Axes()).arguments == pytest.approx(
            exact, rel=0.05
        )
    for name, text in taken.items():
        predicted = read_bytes(text.removeprefix("the arguments take").partition(" on")[0])
        assert predicted == pytest.approx(figures[name]["arguments"], rel=0.05)
        assert figures[name]["arguments"] > limit


@pytest.mark.usefixtures("compile_here")
def test_variants_are_searched_together():
    model, optimizer, x = program("mlp")

    def step(model, optimizer, x, *, microbatches):
        loss_and_grads = accumulate_gradients(loss_of, steps=microbatches)
        optimizer.update(model, loss_and_grads(model, x)[1])

    x = jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32)
    options = {"devices": 8, "strategies": "dp", "donate_argnums": (0, 1), **OPTIONS}
    options["variants"] = {"microbatches": [1, 2, 4]}
    found = plan(step, model, optimizer, x, **options)
    names = [f"dp, data 8, microbatches={n}" for n in (1, 2, 4)]
    assert {*found.candidates} == {*names}
    figures = found.comparison.figures
    assert found.best.name == min(names, key=lambda name: figures[name]["roofline"])
    assert "functools.partial(step, microbatches=" in found.best.recipe
    peaks = [figures[name]["peak"] for name in names]
    assert peaks[0] > peaks[1] > peaks[2]
    options |= {"memory_limit": peaks[0] - 1, "by_module": True}
    frugal = plan(step, model, optimizer, x, **options)
    assert frugal.best.variant != "microbatches=1"
    reports = [report.by_module for report in frugal.comparison.compiled.values()]
    assert reports[0].peak and reports[1:] == [None, None]
    own = {"one": functools.partial(step, microbatches=1), "four": (step, model, optimizer, x)}
    with pytest.raises(ValueError, match=r"variants: expected lists of values for microbatches"):
        plan(own, **options | {"variants": {"microbatches": []}})


@pytest.mark.usefixtures("compile_here")
def test_unknown_memory_does_not_fit(monkeypatch):
    monkeypatch.setattr(Compiled, "memory", lambda _: None)
    variants = {"one": train_step, "two": lambda *args: train_step(*args)}
    options = {"devices": 2, "strategies": "dp", "memory_limit": "1 GiB"}
    found = plan(variants, *program("mlp"), **options)
    assert found.best is None
    assert {each.variant for each in found.candidates.values()} == {"one", "two"}


def test_best_runs_on_a_mesh_with_its_axes():
    def make():
        model = MLP(nnx.Rngs(0), WIDTH, 8 * WIDTH)
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    x = jnp.ones((16, WIDTH))
    best = plan(train_step, *make(), x, devices=8, strategies=["fsdp + tensor"], most=1).best
    assert best.strategy == "fsdp + tensor"
    run = jit(train_step, in_shardings=best.in_shardings, mesh=make_mesh(best.sizes))
    model, optimizer = make()
    loss = run(model, optimizer, x)
    assert not model.up.kernel.sharding.is_fully_replicated
    expected = make()
    np.testing.assert_allclose(loss, train_step(*expected, x), rtol=1e-5)
    np.testing.assert_allclose(model.up.kernel, expected[0].up.kernel, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("compile_here")
def test_most(tmp_path):
    args, options = program("mlp"), {"devices": 8, "strategies": ["dp", "fsdp", "fsdp + tensor"]}
    options["cache_dir"] = tmp_path
    peaks = [x["peak"] for x in plan(train_step, *args, **options).comparison.figures.values()]
    assert len(peaks) == 4
    # The first half is compiled by the time that is predicted, the others by memory.
    found = plan(train_step, *args, memory_limit=min(peaks), most=2, **options)
    assert len(found.candidates) == 2
    assert found.comparison.figures[found.best.name]["peak"] == min(peaks)


@pytest.mark.usefixtures("compile_here")
def test_slices():
    args = program("mlp")
    names = ["dp", "fsdp", "hsdp", "hsdp + tensor"]
    found = plan(train_step, *args, devices=8, num_slices=2, strategies=names)
    specs = {
        name.replace("replica 2 × ", ""): each.in_shardings[0].map_prefix(("up", "kernel"), None)
        for name, each in found.candidates.items()
    }
    assert specs == {
        "dp, data 4": P(),
        "fsdp, data 4": P(None, ("replica", "data")),
        "hsdp, data 4": P(None, "data"),
        "hsdp + tensor, data 2 × model 2": P("data", "model"),
    }
    assert all(each.in_shardings[2] == P(("replica", "data")) for each in found.candidates.values())


@pytest.mark.usefixtures("compile_here")
def test_axes_have_the_names_of_the_step():
    args = program("mlp")
    options = {"devices": 4, "strategies": ["fsdp", "fsdp + tensor"], "memory_limit": "1 GiB"}
    own = plan(train_step, *args, axes=("dp", "tp"), **options)
    usual = plan(train_step, *args, **options)
    names = {"data": "dp", "model": "tp"}
    assert [{names[a]: n for a, n in each.sizes.items()} for each in usual.candidates.values()] == [
        dict(each.sizes) for each in own.candidates.values()
    ]
    sizes = {"dp": 2, "tp": 2}
    both = own.candidates["fsdp + tensor, dp 2 × tp 2"]
    assert both.sizes == sizes and both.in_shardings[2] == P("dp")
    assert both.in_shardings[0].map_prefix(("up", "kernel"), None) == P("dp", "tp")
    [found] = plan(train_step, *args, axes=("dp", "tp"), meshes=[sizes], **options).candidates
    assert found == both.name
    for axes in ("data", ("a", "a"), ("a",)):
        with pytest.raises(ValueError, match="axes must be the names"):
            plan(train_step, *args, axes=axes, **options)


@pytest.mark.usefixtures("compile_here")
def test_own_strategies():
    def mine(model, optimizer, x):
        sharding = fsdp(model, axis="model", optimizer=optimizer)
        return sharding, sharding, P("data")

    def wrong(model, optimizer, x):
        raise ValueError("no such layer")

    meshes = [{"data": 2, "model": 4}, {"data": 4, "model": 2}]
    strategies = {"mine": mine, "wrong": wrong}
    found = plan(train_step, *program("mlp"), meshes=meshes, strategies=strategies)
    assert {*found.candidates} == {"mine, data 2 × model 4", "mine, data 4 × model 2"}
    assert found.ruled_out["wrong, data 2 × model 4"] == "ValueError: no such layer"
    found = plan(train_step, *program("mlp"), devices=4, strategies={"mine": mine})
    assert {*found.candidates} == {"mine, data 2 × model 2", "mine, data 1 × model 4"}


def test_specs_of_arrays_alone_tell_strategies_apart():
    args = ({"table": jax.ShapeDtypeStruct((64, 16), jnp.float32)},)
    specs = {"whole": P(), "rows": P("data"), "rows again": P(("data",), None)}
    strategies = {name: lambda *_, spec=spec: (spec,) for name, spec in specs.items()}
    meshes = [{"data": 8, "model": 1}]
    search = searched(lambda x: x, args, strategies=strategies, meshes=meshes)
    assert [x.candidate.strategy for x in search.entries.values()] == ["whole", "rows"]
    assert [*search.ruled_out] == ["rows again, data 8 × model 1"]


@pytest.mark.usefixtures("compile_here")
def test_specs_that_do_not_fit_are_no_matter_of_memory():
    def typo(model, optimizer, x):
        return StateSharding({...: P("modle")}), None, P("data")

    options = {"strategies": {"typo": typo}, "meshes": [{"data": 8}]}
    with pytest.raises(ValueError, match=r"no candidate can fit:\s.*'modle'"):
        plan(train_step, *program("mlp"), memory_limit=9, **options)


@pytest.mark.usefixtures("compile_here")
def test_uneven_batches_and_failures_are_ruled_out():
    model, optimizer, _ = program("mlp")
    x = jax.ShapeDtypeStruct((12, WIDTH), jnp.float32)
    found = plan(train_step, model, optimizer, x, devices=8, strategies=["dp", "dp + tensor"])
    assert found.ruled_out["dp, data 8"] == "ValueError: 8 devices over data do not divide 12 rows"
    assert found.best.sizes["data"] in (1, 2, 4)

    def fails(model, optimizer, x):
        raise RuntimeError("a mistake of the user")

    with pytest.raises(
        ValueError, match="no candidate can be lowered:\n  RuntimeError: a mistake"
    ) as all_fail:
        plan(fails, model, optimizer, x, devices=8, strategies="dp + tensor")
    assert str(all_fail.value).count("mistake") == 1
    assert isinstance(all_fail.value.__cause__, RuntimeError)


@pytest.mark.usefixtures("compile_here")
def test_an_error_on_every_mesh_is_told_once_and_takes_no_slot():
    model, x = nnx.eval_shape(MLP), jax.ShapeDtypeStruct((64, 4), jnp.float32)

    def fails(model, x):
        raise RuntimeError("a mistake of the user")

    meshes = [{"data": 8 // size, "model": size} for size in (1, 2, 4, 8)]
    variants = {"wrong": fails, "right": lambda model, x: model(x)}
    options = {"meshes": meshes, "strategies": "dp + tensor", "most": 2}
    found = plan(variants, model, x, **options)
    assert len(found.comparison.compiled) == 2  # as many as `most`, beside those that failed
    text = str(found)
    assert text.count("a mistake of the user") == 1  # of two programs, in one line
    assert "wrong failed: RuntimeError: a mistake of the user" in text
    left = {name: why for name, why in found.ruled_out.items() if name.endswith("wrong")}
    assert len(left) == 1 and "on other meshes" in left.popitem()[1]


@pytest.mark.usefixtures("compile_here")
def test_arguments_of_all_kinds():
    x, keys = jax.ShapeDtypeStruct((64, 256), jnp.float32), jax.random.split(jax.random.key(0), 64)
    key, scalar = jax.random.PRNGKey(0), jax.ShapeDtypeStruct((), jnp.float32)

    def step(model, batch, mode, key, keys, scalar, number):
        noise = jax.vmap(lambda k: jax.random.normal(k, (256,)))(keys)
        return model(batch["x"] + noise) * scalar * number + jax.random.normal(key, (256,))

    model = nnx.eval_shape(lambda: nnx.Linear(256, 256, rngs=nnx.Rngs(0)))
    args = (model, {"x": x, "none": None}, "mode", key, keys, scalar, 2.5)
    options = {"devices": 4, "meshes": [{"data": 4}], "strategies": "dp", "static_argnums": 2}
    best = plan(step, *args, **options).best
    assert best.in_shardings[1:] == (
        {"x": P("data"), "none": None}, None, None, P("data"), None, None,
    )  # fmt: skip
    wrapped = jit(lambda m, s: m.kernel[...] * s, donate_argnums=0, in_shardings=(P("no"), None))
    options.pop("static_argnums")
    found = plan(wrapped, model, scalar, **options)
    [report] = found.comparison.compiled.values()
    assert [row.donated for row in report.parameters] == [True, True, False]


@pytest.mark.parametrize(
    ("error", "match", "step", "options"),
    [
        (
            TypeError,
            "needs a function that is not wrapped",
            shard_map(train_step, out_specs=P()),
            {},
        ),
        (TypeError, "leave out device=..., mesh=", train_step, {"device": 3, "mesh": 0}),
        (ValueError, "not parameters .*'modle'", train_step, {"donate_argnames": "modle"}),
        (ValueError, r"strategies=\[\]: expected", train_step, {"strategies": []}),
        (ValueError, "strategies=7: expected", train_step, {"strategies": 7}),
        (ValueError, r"meshes=\[\]", train_step, {"meshes": []}),
        (ValueError, "num_slices=3 does not divide the 8", train_step, {"num_slices": 3}),
        (
            ValueError,
            "num_slices=0: .*\n  most='3': ",
            train_step,
            {"num_slices": 0, "most": "3"},
        ),
        (
            ValueError,
            "devices=8: topology='v5e:2x4' has its own",
            train_step,
            {"topology": "v5e:2x4"},
        ),
        (
            ValueError,
            r"a tuple of 3 shardings, .* got \(P\(\),\)",
            train_step,
            {"strategies": {"a": lambda *args: (P(),)}},
        ),
        (TypeError, "got 3", 3, {}),
        (ValueError, "unknown strategies:.*'fdsp'.*'fsdp'", train_step, {"strategies": "fdsp"}),
        (
            ValueError,
            r"'dp \+ tensor \+ sequence': two styles over one axis",
            train_step,
            {"strategies": ["dp + tensor + sequence", "dp + expert"]},
        ),
        (
            ValueError,
            "'tensor'; expected one of dp, zero1",
            train_step,
            {"strategies": "tensor + tensor"},
        ),
        (ValueError, "at least one variant", {}, {}),
        (ValueError, r"as in \('data', 'model'\).*; got \('a',\)\.", train_step, {"axes": ("a",)}),
        (ValueError, r"got \('a', 'a'\)|got \{", train_step, {"axes": ("a", "a")}),
        (
            ValueError,
            "no candidate can fit.*the arguments take",
            train_step,
            {"memory_limit": 9},
        ),
        (
            TypeError,
            r"strategies\['fsdp'\].*got 'fsdp'",
            train_step,
            {"strategies": {"fsdp": "fsdp"}},
        ),
        (
            ValueError,
            "'fsdp': 8}: strategies of this library.*'data': 4}: 4 devices, not 8",
            train_step,
            {"meshes": [{"fsdp": 8}, {"data": 4}, {"data": 8}]},
        ),
    ],
)
def test_mistakes(error, match, step, options):
    with pytest.raises(error, match=f"(?s){match}"):
        plan(step, *program("mlp"), devices=8, **options)


def test_processes_report_the_same(uncached):
    _, (_, _, way), *_ = all_strategies(["sequence"])
    low, _ = lowered(way, train_step, program("mlp"), {"donate_argnums": (0, 1)})
    here = low.compile().report()
    process = CompilerProcess(8)
    try:
        there = process.compile(low, None).report()
        assert there == here
        assert there.memory.by_path and there.hlo == here.hlo
    finally:
        process.close()


def test_figures_are_in_the_persistent_cache(tmp_path, uncached):
    """The second process is not started; programs to run have other keys."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    reset_cache()
    (_, _, way), *_ = all_strategies([])
    low, _ = lowered(way, train_step, program("mlp"), {})
    found = []
    for _ in range(2):
        process = CompilerProcess(8)
        try:
            found.append((process.compile(low, None).report(), process._process is not None))
        finally:
            process.close()
    assert [started for _, started in found] == [True, False]
    assert found[0][0] == found[1][0] == low.compile().report()


def test_a_crash_ends_one_compiler(uncached):
    (_, _, way), *_ = all_strategies([])
    low, _ = lowered(way, train_step, program("mlp"), {})
    process = CompilerProcess(8)
    try:
        process.compile(low, None)
        process._process.send_signal(signal.SIGSEGV)
        process._process.wait()
        with pytest.raises(CompilerCrash, match="the compiler crashed with SIGSEGV"):
            process.compile(low, None)
        assert process.compile(low, None).memory() == low.compile().memory()
        with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
            process.compile(low, {"no_such_option": 1})
    finally:
        process.close()


def test_a_compiler_ends_with_its_search():
    """In the middle of a program, where it does not read what its search sends."""
    program = f"""
import time
from {compiling.__name__} import _compat, serve
_compat.compile_module = lambda *request: time.sleep(600)
serve(1)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as compiler:
        pickle.dump((), compiler.stdin)
        compiler.stdin.close()
        assert compiler.wait(120) == 0


def test_an_interruption_ends_compilers_at_work(monkeypatch, uncached):
    """Threads that wait for an answer read the pipes of processes that another thread ends."""
    (_, _, way), *_ = all_strategies([])
    low, _ = lowered(way, train_step, program("mlp"), {})
    never_answers = functools.partial(subprocess.Popen, ["sleep", "600"], stdin=-1, stdout=-1)
    monkeypatch.setattr(CompilerProcess, "_start", lambda _: never_answers())
    for _ in range(20):
        workers = compiling._Workers(8, None, by_module=False)
        with pytest.raises(KeyboardInterrupt), workers:
            for name in range(compiling._NUM_WORKERS):
                workers.start(str(name), (low, None), lowering_seconds=0)
            while not all(process._process for process in workers._processes):
                time.sleep(0.001)
            raise KeyboardInterrupt
        assert all(process._process is None for process in workers._processes)
        for future in workers.running:
            assert "crashed with SIGKILL" in future.result().report.error


def test_a_closed_compiler_starts_no_process():
    """A thread may still be about to start one when a search ends."""
    (_, _, way), *_ = all_strategies([])
    low, _ = lowered(way, train_step, program("mlp"), {})
    process = CompilerProcess(8)
    process.close()
    with pytest.raises(CompilerCrash, match="the search had ended"):
        process.compile(low, None)
    assert process._process is None


def test_a_pipeline_is_a_candidate_for_a_stack():
    def found(model, **options):
        x = jax.ShapeDtypeStruct((rows, width), "float32")
        return plan(lambda m, x: m(x), model, x, hardware="TPU v5e", quiet=True, **options)

    rows, width, layers = 32, 64, 8
    blocks = nnx.eval_shape(lambda: stack(nnx.Linear, layers, width, width, rngs=nnx.Rngs(0)))
    name, meshes = "dp + pipeline, stage 4 × data 1, 16 microbatches", [{"stage": 4, "data": 1}]
    report = found(blocks, meshes=meshes, strategies="dp + pipeline").comparison.reports[name]
    microbatches = 4 * 4
    ticks = microbatches + 4 - 1
    flops = 2 * rows * width * width * layers / 4 * ticks / microbatches  # the last 3 ticks idle
    assert flops <= report.cost.flops <= 1.1 * flops
    assert report.roofline.compute_s == pytest.approx(report.cost.flops / 1.97e14, rel=1e-3)
    [sent] = [x for x in report.collectives if x.kind == "collective-permute"]
    assert (sent.times, sent.bytes) == (ticks, rows // microbatches * width * 4)

    def dense_layer():
        return nnx.Linear(width, width, rngs=nnx.Rngs(0))

    def dense_layers(count):
        return nnx.Sequential(*(dense_layer() for _ in range(count)))

    dense = nnx.eval_shape(dense_layer)
    listed, odd = (nnx.eval_shape(lambda n=n: dense_layers(n)) for n in (layers, 3))
    plan_ = found(listed, meshes=meshes, strategies="dp + pipeline", most=None)
    assert name in plan_.comparison.compiled and "pipeline(m, mesh=mesh" in plan_.best.recipe
    for bounds in plan_.predicted.values():
        assert 0 < bounds[0] < bounds[1]
    for model in (blocks, listed):
        by_default = found(model, meshes=meshes, most=1)
        assert name in {*by_default.candidates, *by_default.ruled_out}
    assert not any("pipeline" in x for x in strategies_of(Arguments([dense], "m"), 4))
    assert Arguments([odd], "m").stages == [3] and Arguments([odd], "m").layers == []


@pytest.mark.parametrize(
    ("kernel", "matrix", "experts"),
    [
        ((8, 64, 256), (64, 8), 8),
        ((8, 256, 64), (64, 8), 0),  # the matrix reads the outputs, so it is not a router
        ((64, 4, 16), (256, 64), 0),  # a projection to heads, and the last layer of an MLP
        ((4, 16, 64), (64, 4), 0),  # a projection from heads, and a gate of each head
    ],
)
def test_experts_are_kernels_with_a_router(kernel, matrix, experts):
    class Layer(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones(kernel))
            self.matrix = nnx.Param(jnp.ones(matrix))

    assert Arguments([nnx.eval_shape(Layer)], "m").experts == experts


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_a_schedule_sends_is_predicted(schedule):
    """Between stages, and for gradients: in each tick, or once with 1F1B, as it is compiled."""
    stages, replicas, microbatches, rows, width = 4, 2, 8, 64, 32
    model = stack(nnx.Linear, 8, width, width, rngs=nnx.Rngs(0))
    x = jnp.ones((rows, width))
    mesh = make_mesh({"stage": stages, "data": replicas})

    def loss(model, x):
        return (model(x) ** 2).mean()

    gradient = value_and_grad(loss)
    if schedule == "1f1b":
        gradient = accumulate_gradients(loss, steps=microbatches)
    options = {"microbatches": microbatches, "schedule": schedule}
    shardings = pipeline(model, mesh=mesh, **options), P("data")
    step = jit(lambda *args: gradient(*args), mesh=mesh, in_shardings=shardings)
    compiled = step.lower(model, x).compile().collectives()
    candidate = Candidate("dp + pipeline", dict(mesh.shape), "", shardings, mesh)
    args = [model, x]
    predicted = predict(candidate, Arguments(args, ["model", "x"]), Axes()).sent_within
    ticks, held = microbatches + stages - 1, 8 // stages * width * (width + 1) * 4
    between = 2 * rows / replicas * width * 4 * (ticks / microbatches + 1)
    gradients = 2 * held * (1 - 1 / replicas) * (1 if schedule == "1f1b" else ticks)
    assert predicted == pytest.approx(between + gradients)
    reduced = [x for x in compiled if x.axes == ("data",) and x.bytes > 4]
    over_data = sum(x.bytes_sent * x.times for x in reduced)
    assert over_data == pytest.approx(gradients, rel=0.01)


def test_products_by_hand():
    """Of a step, without those whose results are not used, such as recomputed ones."""
    once = 2 * 16 * WIDTH * 8 * WIDTH
    # Forward two; backward two of weights, and one of the hidden features.
    assert products_of(train_step, program("mlp"), {}, Axes()).flops == 5 * once

    class Layer(nnx.Module):
        def __init__(self, is_curved, rngs):
            self.is_curved = is_curved
            self.inner = nnx.Linear(8, 8, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return jnp.sin(self.inner(x)) if self.is_curved else self.inner(x)

    for is_curved, remat, products in ((False, True, 3), (True, False, 3), (True, True, 4)):
        blocks = stack(Layer, 6, is_curved, remat=remat, rngs=nnx.Rngs(0))
        loss = lambda m, x: nnx.value_and_grad(lambda m: m(x).sum())(m)  # noqa: E731
        found = products_of(loss, (blocks, jnp.ones((4, 8))), {}, Axes())
        assert found.flops == 6 * products * 2 * 4 * 8 * 8, (is_curved, remat)
        assert found.least_seconds(2, HARDWARE["TPU v5e"]) == found.flops / 2 / 197e12

    def branches(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w)

    found = products_of(branches, (jnp.ones((2, 2)),) * 2, {}, Axes())
    assert (found.least, found.flops) == (2 * 2 * 2 * 2, 2 * 2 * 2 * 2 * 2)

    def loop(x, w, count):  # which may be 0
        condition, body = lambda c: c[0] < count, lambda c: (c[0] + 1, c[1] @ w)
        return jax.lax.while_loop(condition, body, (0, x @ w))

    found = products_of(loop, (jnp.ones((2, 2)), jnp.ones((2, 2)), 3), {}, Axes())
    assert (found.least, found.flops) == (2 * 2 * 2 * 2, 2 * 2 * 2 * 2 * 2)
    assert products_of(lambda x: x.no_such_attribute, (jnp.ones(2),), {}, Axes()) is None


def test_products_of_convolutions_and_of_groups_are_those_of_the_compiler():
    for seed in range(4):
        draw = np.random.default_rng(seed)
        size, kernel, stride, dilation = (int(draw.integers(1, n)) for n in (12, 4, 4, 3))
        size += dilation * kernel
        padding = str(draw.choice(["SAME", "VALID"]))
        x, w = jnp.ones((2, size, size, 4)), jnp.ones((kernel, kernel, 2, 6))

        def convolved(x, w, stride=stride, dilation=dilation, padding=padding):
            return jax.lax.conv_general_dilated(
                x, w, (stride,) * 2, padding, rhs_dilation=(dilation,) * 2,
                dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2,
            )  # fmt: skip

        counted = jit(convolved).lower(x, w).compile().cost().flops
        assert products_of(convolved, (x, w), {}, Axes()).flops == counted
    rows, weights, sizes = jnp.ones((12, 4)), jnp.ones((3, 4, 5)), jnp.array([4, 4, 4])
    found = products_of(jax.lax.ragged_dot, (rows, weights, sizes), {}, Axes())
    assert found.flops == 2 * 12 * 4 * 5


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(256, WIDTH, rngs=rngs)
        self.blocks = stack(Block, 4, rngs=rngs)
        self.again = self.tokens

    def __call__(self, tokens):
        return self.again.attend(self.blocks(self.tokens(tokens)))


class Mixture(nnx.Module):
    def __init__(self, rngs):
        self.router = nnx.Linear(WIDTH, 4, rngs=rngs)
        self.up = nnx.Param(jnp.ones((4, WIDTH, 256)))
        self.down = nnx.Param(jnp.ones((4, 256, WIDTH)))

    def experts(self, rows, matmul):
        return matmul(nnx.relu(matmul(rows, self.up[...])), self.down[...])

    def __call__(self, x):
        weights, chosen = jax.lax.top_k(nnx.softmax(self.router(x)), 2)
        options = {"num_experts": 4, "capacity": 8}
        return experimental.dispatch_to_experts(x, weights, chosen, self.experts, **options)[0]


def tokens_of(rows):
    return {"tokens": jax.ShapeDtypeStruct((rows, 8), jnp.int32), "none": None}


def step_in_another_order(optimizer, model, batch, key, scale):
    def loss_of(model):
        noise = jax.random.normal(key, (256,)) * scale
        return jnp.mean((model(batch["tokens"]) + noise) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    with fetched(optimizer):
        optimizer.update(model, grads)
    return loss


def in_another_order(make, rows=16):
    model, optimizer = nnx.eval_shape(lambda: with_optimizer(make))
    key = jax.eval_shape(lambda: jax.random.key(0))
    return optimizer, model, tokens_of(rows), key, jax.ShapeDtypeStruct((), jnp.float32)


def with_optimizer(make):
    model = make(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def forward(model, batch):
    return model(batch["tokens"])


def mixed(model, optimizer, x):
    return train_step(model, optimizer, x)


MIXTURE = (
    *nnx.eval_shape(lambda: with_optimizer(Mixture)),
    jax.ShapeDtypeStruct((8, 8, WIDTH), "float32"),
)
PROGRAMS = {
    "another order": (
        step_in_another_order, in_another_order(Tied), ["fsdp + tensor"],
        {"remat": [True], "offload": [True]},
    ),
    "inference": (forward, (in_another_order(Tied)[1], tokens_of(16)), ["fsdp + sequence"], {}),
    "experts": (mixed, MIXTURE, ["fsdp + expert"], {}),
    "contexts": (forward, (in_another_order(Tied, 4)[1], tokens_of(4)), ["fsdp + context"], {}),
    "pipeline": (
        step_in_another_order, in_another_order(Tied), ["fsdp + pipeline"], {"remat": [True, False]}
    ),
}  # fmt: skip


def test_recipes_import_what_exists():
    names = {name for found in recipes._RECIPE_NAMES.values() for name in found}
    exec("\n".join(recipes._imports(" ".join(names))), made := {})
    assert names <= {*made}


# Some losses are outside of the model, so that the strategy of the recipe gathers what it returns.
@pytest.mark.filterwarnings("ignore:.*operations outside of modules")
@pytest.mark.usefixtures("compile_here")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_recipe_is_the_program(name, tmp_path):
    step, args, strategies, variants = PROGRAMS[name]
    options = OPTIONS | {"donate_argnums": 0, "strategies": strategies, "variants": variants}
    best = plan(step, *args, devices=8, most=2, cache_dir=tmp_path, **options).best
    names = dict(zip(step.__code__.co_varnames, args, strict=False))
    exec(best.recipe, made := {**names, step.__name__: step})  # all else, the recipe imports
    program = made["step"].lower(*args)
    assert (tmp_path / f"{fingerprint(program, made['mesh'])}.json").exists()
    assert made["mesh"] == best.mesh
    shardings = {"in_shardings": best.in_shardings, "mesh": best.mesh}
    own = jit(best.step, **shardings, donate_argnums=0).lower(*args)
    assert own.as_text() == program.as_text()


@pytest.mark.parametrize("policy", [True, {"up": "save"}, "dots_saveable"])
def test_remat_of_a_step_is_that_of_its_stacks(policy):
    """Also in a ``ModelAndOptimizer``, which is no module; and stacks keep their own policy."""

    def args(remat):
        def make():
            blocks = stack(MLP, 4, rngs=nnx.Rngs(0), remat=remat)
            return nnx.ModelAndOptimizer(blocks, optax.sgd(1.0), wrt=nnx.Param)

        return nnx.eval_shape(make), jax.ShapeDtypeStruct((8, 4), jnp.float32)

    def step(optimizer, x):
        optimizer.update(nnx.grad(lambda model: loss_of(model, x))(optimizer.model))

    plain, planned = args(False), with_remat(step, policy)
    text = jit(planned).lower(*plain).as_text()
    assert text == jit(step).lower(*args(policy)).as_text() != jit(step).lower(*plain).as_text()
    assert plain[0].model.remat is False
    [variant] = variants_of(step, plain, {}, {})
    assert "remat=True" in [each.name for each in with_less_memory(variant, 8)]
    with pytest.raises(ValueError, match="an argument with a Stack"):
        planned(None, jnp.ones(4))


@pytest.mark.usefixtures("compile_here")
def test_an_optimizer_belongs_to_the_model_whose_parameters_its_state_has():
    def pair(width):
        model = nnx.Linear(width, 256, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    (g, of_g), (d, of_d) = nnx.eval_shape(lambda: (pair(128), pair(64)))
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    for args in ((g, d, of_g, of_d, x), (of_d, of_g, d, {"g": g}, x)):
        arguments = Arguments(args, "abcde")
        owners = arguments._model_of_optimizer
        assert len(owners) == 2
        for name, owner in owners.items():
            moments = arguments.parts[name].opt_state[0].mu["kernel"]
            assert moments.shape == arguments.parts[owner].kernel.shape
    with pytest.raises(ValueError, match="expected the model of its optimizer"):
        plan(lambda o, x: x, of_g, x, devices=2, strategies="fsdp")


@pytest.mark.usefixtures("compile_here")
@pytest.mark.parametrize("rows", [16, 1024])
def test_near_brute_force(rows, tmp_path):
    """Compiling a third of the candidates finds one that is at most 3 % slower than the best."""
    model, optimizer, _ = program("mlp")
    args = model, optimizer, jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    options = OPTIONS | {"cache_dir": tmp_path, "devices": 8}
    every = plan(train_step, *args, most=None, **options)
    some = plan(train_step, *args, most=len(every.candidates) // 3, **options)
    times = {name: x["roofline"] for name, x in every.comparison.figures.items()}
    found, best = times[some.best.name], min(times.values())
    assert found <= 1.03 * best
    assert every.gap == 0 and every.least == float("inf")
    assert (1 - some.gap) * found <= best * (1 + 1e-9)  # a bound of all others


@pytest.mark.usefixtures("compile_here")
def test_the_largest_batch():
    model = nnx.eval_shape(lambda: nnx.Linear(64, 256, rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    options = {"devices": 4, "hardware": "TPU v5e", "strategies": ["dp", "dp + tensor"]}

    def least(rows):
        """Of all meshes, the least bytes of kernel, bias, inputs and outputs on a device."""
        meshes = ((4, 1), (2, 2), (1, 4))
        parts = (((64 + 1) * 256 / m, rows * 64 / d, rows * 256 / (d * m)) for d, m in meshes)
        return min(4 * sum(part) for part in parts)

    for limit in ("200 KiB", "1 MiB"):
        found = plan(
            lambda m, x: m(x), model, x, memory_limit=limit, maximize="batch", most=24, **options
        )
        rows = found.best.rows
        assert found.best.variant == f"batch {rows}" and found.least is None
        fitting = {found.candidates[name].rows for name in found.comparison.fitting}
        assert rows == max(fitting)
        assert least(rows) <= read_bytes(limit) < least(2 * rows)
        larger = [name for name, x in found.candidates.items() if x.rows == 2 * rows]
        assert larger and not any(found.comparison.fits(name) for name in larger)
    # What is computed hardly grows with the rows: by it alone, 512 times as many would fit.
    first = lambda m, x: m(x[:1]).sum()  # noqa: E731
    one = options | {"devices": 1, "strategies": ["dp"]}
    found = plan(first, model, x, maximize="batch", memory_limit="1 MiB", **one)
    assert found.best.rows == 2048  # 512 KiB, next to 65 KiB of parameters
    # A step without a batch has no larger one.
    steps = {"rows": (lambda m, x: m(x), model, x), "none": (lambda m: m.kernel[...] ** 2, model)}
    found = plan(steps, maximize="batch", memory_limit="200 KiB", most=6, **options)
    assert found.best.rows >= 64 and found.best.variant.startswith("rows")
    assert any(name.endswith("none") for name in (*found.candidates, *found.ruled_out))
    with pytest.raises(ValueError, match="maximize='rows'"):
        plan(lambda m, x: m(x), model, x, maximize="rows", **options)
    with pytest.raises(ValueError, match="needs a batch"):
        plan(lambda m: m.kernel[...], model, maximize="batch", **options)


@pytest.mark.usefixtures("compile_here")
@pytest.mark.parametrize(
    ("limit", "why"),
    [
        ({"most": 2}, "not among the 2 that were compiled (most=2)"),
        ({"time_limit": 9000}, "not compiled within 9000 s"),
    ],
)
def test_larger_batches_that_are_not_decided(limit, why, monkeypatch):
    """The best is not called the largest, and a smaller batch is a reason, not its shorter time."""
    if "time_limit" in limit:  # the time ends after two programs
        pick = Search.pick
        monkeypatch.setattr(Search, "pick", lambda s, x: pick(s, x) if len(x) < 2 else None)
    model = nnx.eval_shape(lambda: nnx.Linear(64, 256, rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    options = {"devices": 4, "hardware": "TPU v5e", "memory_limit": "1 MiB", "strategies": ["dp"]}
    options["meshes"] = [{"data": 4}]
    found = plan(
        lambda m, x: m(x), model, x, maximize="batch", out_shardings=P("data"), **options, **limit
    )
    rows = found.best.rows
    larger = f"dp, data 4, batch {2 * rows}"
    assert found.undecided == (larger,) and found.ruled_out[larger] == why
    best, undecided, *_ = lines = [*found.explained()]
    assert best == f"best: dp, data 4, batch {rows}"
    assert undecided == f"larger batches may fit, but were {why}: {larger}"
    assert lines[-1] == f"  dp, data 4, batch 64: 64 rows, not {rows}"
    # The bytes that it sends, which a smaller batch has fewer of, do not choose among batches.
    unknown = {
        name: dataclasses.replace(report, roofline=None)
        for name, report in found.comparison.reports.items()
    }
    comparison = dataclasses.replace(found.comparison, reports=unknown)
    text = "\n".join(dataclasses.replace(found, comparison=comparison).explained())
    assert f"of those with {rows} rows, chosen by the bytes that it sends" in text
    assert f": 64 rows, not {rows}" in text


FIGURES = {"measured": None, "roofline": 2.0, "at_least": None, "bytes_sent": 8, "peak": 8}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"roofline": 3.0, "bytes_sent": 4}, "takes 3.00 s, not 2.00 s (+50.0 %)"),
        ({"bytes_sent": 16, "peak": 4}, "sends 16 B, not 8 B (+100.0 %)"),
        # What it sends less of is no reason against it.
        ({"roofline": None, "bytes_sent": 4}, "its time is not known"),
        ({"bytes_sent": None, "peak": 4}, "the bytes that it sends are not known"),
        ({"bytes_sent": 4, "peak": 16}, "needs 16 B, not 8 B (+100.0 %)"),
        ({"roofline": 1.0}, "its figures are not better, or not known"),
    ],
)
def test_an_advantage_is_no_reason(changed, why):
    assert _worse(FIGURES | changed, FIGURES) == why


def test_no_time(tmp_path):
    """What was predicted is there; the comparison says why it has no reports."""
    arguments, options = program("mlp"), {"devices": 8, "hardware": "TPU v5e"}
    at_once = plan(train_step, *arguments, time_limit=0, **options)
    assert {*at_once.ruled_out.values()} >= {"not compiled within 0 s"}
    found = plan(train_step, *arguments, time_limit=1e-9, **options)
    assert found.predicted and not found.comparison.reports and found.best is None
    assert {*found.predicted} <= {*found.ruled_out}
    assert found.ruled_out[next(iter(found.predicted))] == "not compiled within 1e-09 s"
    fastest = min(found.predicted, key=found.predicted.__getitem__)
    assert f"predicted to be fastest: {fastest}" in str(found)
    found.comparison.save(tmp_path / "none.json")
    assert Comparison.load(tmp_path / "none.json") == found.comparison


def test_an_interrupted_search_keeps_what_was_compiled(monkeypatch):
    arguments, options = program("mlp"), {"devices": 8, "hardware": "TPU v5e", "most": 4}
    wait = compiling._Workers.wait
    ends = itertools.count()

    def interrupted(workers, timeout):
        if next(ends) == 1:  # after the first time that programs ended
            raise KeyboardInterrupt
        return wait(workers, timeout)

    monkeypatch.setattr(compiling._Workers, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        plan(train_step, *arguments, **options)
    found = caught.value.result
    assert isinstance(caught.value, SearchInterrupted) and found.best is not None
    reports = found.comparison.reports
    assert 0 < len(reports) < 4 and {*found.predicted} <= {*reports, *found.ruled_out}
    assert compiling.INTERRUPTED in found.ruled_out.values()
    [note] = caught.value.__notes__
    assert f"best: {found.best.name}" in note and "not compiled before the interruption" in note
    ends = itertools.count(1)  # at once
    with pytest.raises(SearchInterrupted) as caught:
        plan(train_step, *arguments, **options)
    assert not caught.value.result.comparison.reports and "best: none" in caught.value.__notes__[0]


def accumulating(model, optimizer, x, *, microbatches=1):
    loss, grads = accumulate_gradients(loss_of, steps=microbatches)(model, x)
    optimizer.update(model, grads)
    return loss


def test_options_that_the_user_did_not_choose_are_varied():
    """Without anything compiled: which variants save memory, and which gather ahead."""
    model, _, x = program("transformer")
    [plain] = variants_of(accumulating, (model, None, x), {}, {})
    names = [variant.name for variant in with_less_memory(plain, 12)]
    assert names == [
        "remat=True",
        "microbatches=2",
        "microbatches=2, remat=True",
        "microbatches=4",
        "microbatches=4, remat=True",
    ]
    assert with_prefetch(plain).prefetch == 1 and not plain.prefetch
    saving = [*with_less_memory(plain, 12)][-1]
    assert inspect.signature(saving.fun).parameters["microbatches"].default == 4
    assert saving.text == "functools.partial(with_remat(accumulating, True), microbatches=4)"
    grid = {"remat": [False], "microbatches": [1], "prefetch": [0]}
    [chosen] = variants_of(accumulating, (model, None, x), grid, {})
    assert [*with_less_memory(chosen, 12)] == [] and with_prefetch(chosen) is None
    none = lambda model, optimizer, x, microbatches=0: model(x)  # noqa: E731
    [without] = variants_of(none, (model, None, x), {}, {})
    assert [variant.name for variant in with_less_memory(without, 12)] == ["remat=True"]


REFUSED = "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory "
TEMPORARIES = (
    REFUSED + "on HBM, the total memory required for HLO temporaries ({rest}) exceeds available "
    "HBM (15.75G). HLO module: jit_step."
)
USED = REFUSED + "in memory space hbm. Used {peak} of 15.75G hbm. Exceeded hbm capacity by 1.2G."
OF_A_CORE = "RESOURCE_EXHAUSTED: CompileTimeScopedVmemOom: Ran out of memory in memory space vmem."


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (TEMPORARIES.format(rest="24.66G"), (7, round(24.66 * 2**30))),
        (USED.format(peak="20.5M"), (7, round(20.5 * 2**20) - 7)),
        (USED.format(peak="5"), (7, 0)),
        ("RESOURCE_EXHAUSTED: of something else", (7, None)),
        (OF_A_CORE, None),
        ("INTERNAL: of something else", None),
    ],
)
def test_the_compilers_error_says_what_is_needed(error, memory):
    found = memory_need(Failure(f"JaxRuntimeError: {error}"), arguments=7)
    assert found == (None if memory is None else (*memory, True))


def refuse(monkeypatch, limit, error):
    """Programs that exceed a limit are refused, as by the compiler of TPUs."""
    report_of = compiling._report

    def report_if_it_fits(*args, **options):
        report = report_of(*args, **options)
        if (peak := report.memory.peak) > limit:
            sizes = {"peak": peak, "rest": peak - report.memory.arguments}
            texts = {name: f"{size / 1024}K" for name, size in sizes.items()}
            raise jax.errors.JaxRuntimeError(error.format(**texts))
        return report

    monkeypatch.setattr(compiling, "_report", report_if_it_fits)


@pytest.mark.usefixtures("compile_here")
def test_what_the_compiler_refuses_does_not_fit(monkeypatch, tmp_path):
    """The same as if it was compiled, and its report had the peak."""

    def make():
        blocks = stack(lambda rngs: MLP(rngs, WIDTH, 4 * WIDTH), 4, rngs=nnx.Rngs(0))
        return blocks, nnx.Optimizer(blocks, optax.adam(1e-3), wrt=nnx.Param)

    args = *nnx.eval_shape(make), jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32)
    options = {"devices": 2, "strategies": ["dp", "fsdp"], "cache_dir": tmp_path, **OPTIONS}
    every = plan(train_step, *args, **options).comparison.figures
    peak = min(figures["peak"] for figures in every.values())
    limits = peak - 1, peak // 4  # one fits with `remat`; none does
    plans = {limit: plan(train_step, *args, memory_limit=limit, **options) for limit in limits}
    for error, limit in (
        (TEMPORARIES, limits[0]),
        (TEMPORARIES, limits[1]),
        (REFUSED, limits[1]),
    ):
        found = plans[limit]
        with monkeypatch.context() as patch:
            refuse(patch, limit, error)
            refused = plan(train_step, *args, memory_limit=limit, **options)
        assert {*refused.candidates} == {*found.candidates}
        assert refused.best == found.best
        assert any("does not fit: " in line for line in refused.explained())
        assert " does not fit: " in str(refused) and " failed: " not in str(refused)
        if limit == limits[0]:
            assert "remat=True" in refused.best.variant
        elif error == REFUSED:  # which does not say what is needed
            assert refused.remedies
            assert all(x.endswith(", activations unknown") for x in refused.remedies)
        else:
            source = " (by the compiler's error)"
            assert [x.replace(source, "") for x in refused.remedies] == [*found.remedies]
            assert refused.remedies[0].endswith(source) and len(found.remedies) > 1
            assert [*refused.candidates] == [*found.candidates]  # the smallest first
            # If others are left, one of them may fit, too.
            [head, *_, left] = [*refused.candidates]
            fewer = dataclasses.replace(
                refused,
                comparison=dataclasses.replace(
                    refused.comparison, reports={head: refused.comparison.reports[head]}
                ),
                left={left: refused.candidates[left]},
            )
            [_, line, *lines] = fewer.summary()
            assert line.startswith(f"  perhaps one of 1 that were not compiled, {left}: a longer ")
            assert lines == [f"  {x}" for x in refused.remedies]


def test_plan_lists_all_hardware():
    assert [x.name for x in HARDWARE.values() if f"``{x.name}``" not in plan.__doc__] == []


def test_arguments_that_do_not_fit_say_what_would():
    model, optimizer, _ = program("mlp")
    x = jax.ShapeDtypeStruct((1024, WIDTH), jnp.float32)
    options = {"devices": 8, "strategies": ["dp", "fsdp"], "quiet": True}
    with pytest.raises(ValueError, match="one of these would fit") as error:
        plan(train_step, model, optimizer, x, memory_limit="100 KiB", **options)
    text = " ".join(str(error.value).split())
    need = re.search(r"would fit: at least (.*?) on each device, for fsdp, data 8", text)
    more = re.search(r"; or (\d+) devices, fsdp, data \1: at least (.*?) on each", text)
    least = int(more[1])
    # Of all that is sharded, each device has its part; the limit was not reached with half of them.
    assert 0.9 * read_bytes(need[1]) * 8 / least < read_bytes(more[2]) < 100 * 1024
    assert 1.1 * read_bytes(need[1]) * 8 / (least / 2) > 100 * 1024


def out_of_memory(rest):
    """The failure of a program that needs so many GiB besides its arguments."""
    error = TEMPORARIES.format(rest=f"{rest}G")
    return Failure(error, jax.errors.JaxRuntimeError(error))


@pytest.mark.parametrize(
    ("rows", "rests", "limit", "lines"),
    [
        # A device computes one row at once: no microbatches, devices or smaller batch change that.
        (8, {1: 4}, 2, []),
        (16, {2: 4}, 2, []),
        # Two rows at once: half of it at best.
        (16, {1: 4}, 1, []),
        (
            16,
            {1: 4},
            3,
            [
                "16 devices, fsdp, data 16: about 2.00 GiB on each, if",
                "2 microbatches of accumulate_gradients: about 2.00 GiB on each, if",
                "a batch of 8 rows: about 2.00 GiB on each, if",
            ],
        ),
        # Fewer rows on a device leave fewer microbatches of as many rows at once.
        (16, {1: 8, 2: 4}, 3, []),
        (32, {1: 8, 4: 4}, 3.5, []),
        # A row costs half a GiB, by the difference of two programs.
        (64, {2: 4, 4: 3}, 2, []),
        (
            64,
            {2: 4, 4: 3},
            2.6,
            [
                "16 devices, fsdp, data 16: about 2.50 GiB on each",
                "8 microbatches of accumulate_gradients: about 2.50 GiB on each",
                "a batch of 32 rows: about 2.50 GiB on each",
            ],
        ),
        # Without microbatches that divide the rows of a device, 12 rows on 4 devices.
        (24, {3: 4}, 2, []),
    ],
)
def test_what_may_fit_is_possible(rows, rests, limit, lines):
    model, optimizer, _ = program("mlp")
    x = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    options = {"devices": 8, "strategies": "fsdp", "quiet": True, "memory_limit": f"{limit} GiB"}
    variants = {"microbatches": [*rests], "remat": [False]}
    blocks = stack(MLP, 2, rngs=nnx.Rngs(0))  # `remat` is chosen, so it is no remedy
    args = (model, optimizer, x, nnx.eval_shape(lambda: blocks))
    step = lambda model, optimizer, x, blocks, microbatches: model(x)  # noqa: E731
    search = searched(step, args, variants=variants, **options)
    reports = {
        name: out_of_memory(rests[entry.variant.chosen["microbatches"]])
        for name, entry in search.entries.items()
    }
    first, *others = remedies(search, reports)
    assert first.endswith("(by the compiler's error)")
    assert len(others) == len(lines)
    for line, start in zip(others, lines, strict=True):
        assert line.startswith(start) and ("if all but" in line) == start.endswith("if"), line


def test_what_remat_saves_is_not_known():
    _, _, x = program("transformer")

    def line(remat):
        blocks = nnx.eval_shape(lambda: stack(Block, 2, rngs=nnx.Rngs(0), remat=remat))
        step = lambda blocks, x: blocks(x)  # noqa: E731
        options = {"devices": 8, "strategies": "dp", "memory_limit": "1 GiB", "quiet": True}
        search = searched(step, (blocks, x), **options)
        lines = remedies(search, {name: out_of_memory(4) for name in search.entries})
        return [line for line in lines if line.startswith("remat")]

    [text] = line(remat=False)
    assert text.endswith(
        "saves a part of the 4.00 GiB besides the arguments, which is not estimated"
    )
    assert line(remat=True) == []


@pytest.mark.parametrize(("rows", "counts"), [(8, []), (16, [2]), (24, []), (32, [2, 4])])
def test_microbatches_that_devices_cannot_have_are_not_tried(rows, counts):
    """Each of 8 devices divides its own rows."""
    model, optimizer, _ = program("mlp")
    x = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    options = {"devices": 8, "strategies": "fsdp", "quiet": True, "memory_limit": "1 GiB"}
    search = searched(accumulating, (model, optimizer, x), **options)
    [name] = search.programs
    search.programs.clear()  # it was started
    search.pick({name: out_of_memory(4)})
    assert [*search.entries] == [name, *(f"{name}, microbatches={count}" for count in counts)]


def test_what_microbatches_send_is_predicted():
    """Sharded parameters are sent for each of them, gradients of others once for the batch.

    The bytes of compiled programs have these ratios. The second time of ``predicted`` adds what is
    sent to the first, unless sending takes longest.
    """
    options = {"devices": 8, "strategies": ["dp", "zero1", "fsdp"], "quiet": True}
    options |= {"variants": {"microbatches": [1, 4]}, "hardware": "TPU v5e"}
    search = searched(accumulating, program("mlp"), **options)
    sent = {name: entry.prediction.sent_within for name, entry in search.entries.items()}
    for strategy, ratio in {"dp": 1, "zero1": 1, "fsdp": 4}.items():
        one, four = (sent[f"{strategy}, data 8, microbatches={n}"] for n in (1, 4))
        assert four == pytest.approx(ratio * one, rel=0.05)
    found = plan(accumulating, *program("mlp"), time_limit=0, **options)
    for name, (hidden, not_hidden) in found.predicted.items():
        seconds = search.entries[name].seconds
        sending = seconds["interconnect"]
        others = max(seconds["compute"], seconds["memory"])
        assert (hidden, not_hidden) == (max(others, sending), others + sending)


@pytest.mark.usefixtures("compile_here")
def test_one_program_takes_one_slot():
    """A batch of vectors has no sequence, so `+ sequence` declares what has no effect."""
    chosen = {"strategies": ["fsdp+tensor", "fsdp +sequence"], "most": 3}
    chosen |= {"meshes": [{"data": 2, "model": 4}, {"data": 4, "model": 2}]}
    found = plan(train_step, *program("mlp"), devices=8, hardware="TPU v5e", **chosen)
    assert {x.strategy for x in found.candidates.values()} == {"fsdp + tensor"}
    assert len(found.candidates) == 2
    assert found.ruled_out["fsdp + sequence, data 2 × model 4"] == (
        "compiles to the program of fsdp + tensor, data 2 × model 4"
    )


@pytest.mark.usefixtures("compile_here")
def test_says_which_method_of_attention_wins():
    """Four heads: four devices can exchange them, eight cannot."""
    model = nnx.eval_shape(lambda: stack([layer(nnx.Rngs(0)) for _ in range(2)]))
    x = jax.ShapeDtypeStruct((2, 64, 16), jnp.float32)
    options = {"strategies": "dp + context", "devices": 8, "hardware": "TPU v5 lite"}
    found = plan(lambda model, x: model(x), model, x, quiet=True, **options)
    assert found.best.variant in ("all_to_all", "all_gather")
    others = dict(line.split(": ", 1) for line in found.explained() if ", ring: " in line)
    assert len(others) == 2 and all(why.startswith("takes ") for why in others.values())
    [failed] = [line for line in found.explained() if "context 8, all_to_all: failed: " in line]
    assert "do not divide 4 heads" in failed
    sent = {name: figures["bytes_sent"] for name, figures in found.comparison.figures.items()}
    of_four = {name.split(", ")[-1]: x for name, x in sent.items() if "context 4" in name}
    assert of_four["all_to_all"] < min(of_four["ring"], of_four["all_gather"])


def test_predictions_of_a_large_model_take_seconds(monkeypatch):
    """All candidates of an 8.9-billion model on 16 devices: at most 14 ms of CPU for each."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    from benchmarks.planning_by_hand import Config, Decoder
    from benchmarks.planning_by_hand import train_step as decoder_step

    config = Config(4096, 14336, 32, 8, 36, 128256, batch=8, context=4096)

    def make():
        model = Decoder(config, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)

    args = (*nnx.eval_shape(make), *[jax.ShapeDtypeStruct((8, 4096), jnp.int32)] * 2)
    options = {"devices": 16, "hardware": "TPU v5p", "quiet": True}
    before = time.process_time()
    search = searched(decoder_step, args, {"donate_argnums": (0, 1)}, **options)
    seconds, count = time.process_time() - before, len({*search.entries, *search.ruled_out})
    assert count > 300  # besides those with microbatches of less than a row for each device
    assert seconds / count < 0.014


class OwnAttention(nnx.Module):
    """Attention without an attribute ``attention_fn``, which no method can replace."""

    def __init__(self, rngs):
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)

    def __call__(self, x):
        heads = self.qkv(x).reshape(*x.shape[:2], 3, 4, -1)  # (batch, length, 3, heads, features)
        return jax.nn.dot_product_attention(*jnp.moveaxis(heads, 2, 0)).reshape(x.shape)


def test_no_method_is_named_that_replaces_no_attention():
    model = nnx.eval_shape(lambda: nnx.List([OwnAttention(nnx.Rngs(0)) for _ in range(2)]))
    x = jax.ShapeDtypeStruct((2, 8, WIDTH), jnp.float32)
    options = {"strategies": ["fsdp + context"], "devices": 8, "hardware": "TPU v5 lite"}
    search = searched(lambda model, x: model[1](model[0](x)), (model, x), quiet=True, **options)
    names = [entry.candidate.name for entry in search.entries.values()]
    for name in names:
        texts = [text for _, text in search.warned[name]]
        assert any("no module of the model has attention" in text for text in texts)
    meshes = {name.split(", ")[1] for name in names}
    assert {"data 1 × context 8", "data 1 × ring 2 × context 4"} <= meshes
    assert len(names) == len(meshes) and all(name.count(", ") == 1 for name in names)


def test_heads_are_exchanged_within_a_ring():
    """Over two axes: heads for positions along one of them, keys and values around the other."""
    model = nnx.eval_shape(lambda: stack([layer(nnx.Rngs(0)) for _ in range(2)]))
    x = jax.ShapeDtypeStruct((2, 8, 16), jnp.float32)
    strategies = {"strategies": ["fsdp + context"], "devices": 8, "hardware": "TPU v5 lite"}
    search = searched(lambda model, x: model(x), (model, x), quiet=True, **strategies)
    found = {entry.candidate.name: entry for entry in search.entries.values()}
    assert {name.split(", ")[1] for name in found if "ring " in name} == {
        "data 2 × ring 2 × context 2", "data 1 × ring 2 × context 4", "data 1 × ring 4 × context 2",
    }  # fmt: skip
    name = "fsdp + context, data 1 × ring 2 × context 4, all_to_all"
    candidate, sent = found[name].candidate, found[name].prediction.sent_within
    assert "axis=('context', 'ring'), method='all_to_all'" in candidate.recipe
    assert "axis=('ring', 'context')" in candidate.recipe  # of fsdp
    assert candidate.in_shardings[1] == P("data", ("ring", "context"))
    # Of 16 tokens on 8 devices, 2 layers, forward and backward: a scale of 16 features of 4 bytes.
    tokens = 2 * 2 * (16 / 8) * (16 * 4)
    exchanged, around = 4 * (1 - 1 / 4), 3 * (2 - 1)
    others = [x for x in found if "context 8" in x and "all_to_all" in x]
    [alone] = [found[x].prediction.sent_within for x in others]
    assert sent - alone == pytest.approx(tokens * (exchanged + around - 4 * (1 - 1 / 8)))


@pytest.mark.usefixtures("compile_here")
def test_few_rows_and_devices_of_all_numbers():
    model = nnx.eval_shape(lambda: Transformer(nnx.Rngs(0)))
    for devices, rows, strategies in ((1, 1, None), (7, 7, ["dp", "fsdp"]), (6, 1, None)):
        tokens = jax.ShapeDtypeStruct((rows, 12), jnp.int32)
        weights = jax.ShapeDtypeStruct((rows,), jnp.float32)
        options = {"devices": devices, "strategies": strategies, "most": 1, **OPTIONS}
        found = plan(
            lambda m, x, y: m(x) * y[:, None, None],
            model,
            tokens,
            weights,
            **options | {"donate_argnums": ()},
        )
        assert found.best.mesh.size == devices and found.gap is not None
        names = {*found.candidates, *found.ruled_out}
        assert any("context" in name for name in names) == (devices == 6)
        assert not any("fsdp" in name for name in names) or devices > 1


@pytest.mark.usefixtures("compile_here")
def test_a_mesh_of_the_user_and_names_by_role():
    args = program("transformer")
    mesh = jax.make_mesh((2, 2, 2), ("dp", "x", "y"), axis_types=(AxisType.Auto,) * 3)
    options = {"axes": {"data": "dp", "model": ("x", "y")}, "strategies": "fsdp + tensor"}
    found = plan(train_step, *args, meshes=[mesh], **options)
    assert found.best.mesh == mesh and "axis_types=(AxisType.Auto, " in found.best.recipe
    assert found.best.in_shardings[0].map_prefix(("head", "kernel"), None) == P("dp", ("x", "y"))
    names = set(plan(train_step, *args, devices=8, most=1, **options).ruled_out)
    assert "fsdp + tensor, dp 2 × x 2 × y 2" in names | {*found.candidates}
    for axes in ({"data": ("a", "b")}, {"date": "a"}, {"data": "model"}, {"stage": ()}):
        with pytest.raises(ValueError, match="axes must be the names"):
            plan(train_step, *args, devices=8, axes=axes)


@pytest.mark.usefixtures("compile_here")
def test_slices_along_the_stages_of_a_pipeline():
    args = in_another_order(Tied)
    options = {"devices": 8, "num_slices": 2, "strategies": "dp + pipeline", "most": 1}
    found = plan(step_in_another_order, *args, **options)
    meshes = {name.split(", ")[1] for name in (*found.candidates, *found.ruled_out)}
    assert meshes == {
        "replica 2 × stage 2 × data 2", "replica 2 × stage 4 × data 1",
        "stage 2 × data 4", "stage 4 × data 2",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("network", "num_slices", "first"),
    [
        (1e9, 2, "dp + pipeline, stage 2 × data 4, 16 microbatches"),
        (1e11, 2, "hsdp, replica 2 × data 4"),
        (1e9, 1, "hsdp, replica 4 × data 2"),
    ],
)
def test_stages_over_slices_where_gradients_take_longer(network, num_slices, first):
    """On hardware by hand: a step computes for 4 ms, and its gradients are 34 MB."""
    rows, width, layers = 64, 1024, 8
    model = nnx.eval_shape(lambda: stack(nnx.Linear, layers, width, width, rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    flops = 3 * layers * 2 * rows * width**2
    hardware = Hardware("mine", flops / 8 / 4e-3, 2**34, 1e12, 1e11, network_bandwidth=network)
    search = searched(
        lambda model, x: nnx.value_and_grad(loss_of)(model, x),
        (model, x),
        devices=8,
        num_slices=num_slices,
        hardware=hardware,
        strategies=["fsdp", "hsdp", "dp + pipeline", "fsdp + pipeline"],
        quiet=True,
    )
    assert search.pick({}) == first
    entry = search.entries[first]
    times, between = entry.seconds, entry.prediction.sent_between
    of_layers = layers * (width**2 + width) * 4
    if "pipeline" in first:
        ticks = 17 / 16
        assert times["compute"] == pytest.approx(4e-3 * ticks)
        # A stage sends the rows of a device forward, and their gradients backward.
        assert between == 2 * (rows / 4) * (width * 4) * (ticks + 1)
        # In each of 17 ticks its layers' gradients are summed over the data.
        assert entry.prediction.sent_within == pytest.approx(17 * 2 * of_layers / 2 * (1 - 1 / 4))
        assert entry.exposed == pytest.approx(between / network / times["interconnect"])
    else:
        shards = of_layers / 4
        assert times["compute"] == pytest.approx(4e-3)
        assert between == pytest.approx(2 * shards * (1 - 1 / 2) * (num_slices - 1), rel=0.01)


def test_host_memory_is_not_device_memory():
    args = in_another_order(Tied)
    mesh = make_mesh({"data": 8})
    sharding = fsdp(args[1], optimizer=args[0], mesh=mesh, min_size=0)
    on_host = offload(sharding, args[0], mesh=mesh)
    arguments = Arguments(args, ["optimizer", "model", "batch", "key", "scale"])
    held = []
    for state in (sharding, on_host):
        own = {"tokens": P("data"), "none": None}
        shardings = state, sharding, own, None, None
        candidate = Candidate("fsdp", {"data": 8}, "", shardings, mesh)
        held.append(predict(candidate, arguments, Axes()).arguments)
    specs = partition.specs_by_path(args[0], sharding)
    states = {path: x.get_raw_value().shape for path, x in nnx.to_flat_state(nnx.state(args[0]))}
    shapes = [NamedSharding(mesh, specs[path]).shard_shape(x) for path, x in states.items() if x]
    assert held[0] - held[1] == 4 * sum(map(math.prod, shapes))
    array = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    candidate = Candidate("fsdp", {"data": 8}, "", (array,), mesh)
    x = (jax.ShapeDtypeStruct((8, 4), jnp.float32),)
    assert predict(candidate, Arguments(x, "x"), Axes()).arguments == 0


@pytest.mark.parametrize("dtype", ["int4", "bool", "float8_e4m3fn", "float32"])
def test_arrays_outside_of_modules_take_the_bytes_of_the_compiler(dtype):
    """Two elements of `int4` take one byte, in arguments and in products."""
    x = jax.ShapeDtypeStruct((8, 6), dtype)
    compiled = jit(lambda x: x).lower(x).compile()
    candidate = Candidate("dp", {"data": 8}, "", (P(),), make_mesh({"data": 8}))
    taken = compiled.memory().arguments
    assert predict(candidate, Arguments((x,), "x"), Axes()).arguments == taken
    if jnp.issubdtype(dtype, jnp.integer):
        product = lambda x: jax.lax.dot(x, x.T, preferred_element_type=jnp.int32)  # noqa: E731
        assert products_of(product, (x,), {}, Axes()).accessed == 2 * taken + 4 * 8 * 8


@pytest.mark.usefixtures("compile_here")
def test_unknown_figures_are_never_best():
    found = plan(train_step, *program("mlp"), devices=2, strategies=["dp", "fsdp"], **OPTIONS)
    first, second = found.candidates
    reports = dict(found.comparison.reports)

    def best(**unknown):
        changed = {first: dataclasses.replace(reports[first], **unknown), second: reports[second]}
        return PlanningResult(Comparison(changed, 2**40), found.candidates).best.name

    assert best() == first
    assert best(roofline=None) == best(memory=None) == second
    # How often a loop sends something may be unknown, too.
    in_loops = Collectives(
        dataclasses.replace(each, times=None) for each in reports[first].collectives
    )
    for collectives in (None, in_loops):
        unknown = dataclasses.replace(reports[first], roofline=None, collectives=collectives)
        only = Comparison({first: unknown})
        assert PlanningResult(only, found.candidates).best is None
        assert "bytes_sent unknown, and ranked after known ones: " in str(only)


@pytest.mark.usefixtures("compile_here")
@pytest.mark.parametrize(
    ("hardware", "best_by", "why"),
    [
        ("TPU v5e", "at_least", "the known part of its time, .*: loops of unknown length: .*gamma"),
        (None, "bytes_sent", "the bytes that it sends, .* not known: the hardware is not known"),
    ],
)
def test_a_loop_of_unknown_length(hardware, best_by, why):
    """``jax.random.beta`` draws until it accepts, so no time of a step with it is known."""

    def mixed(model, x, key):
        return nnx.grad(lambda model: (model(x * jax.random.beta(key, 0.4, 0.4)) ** 2).mean())(
            model
        )

    model = nnx.eval_shape(lambda: nnx.Linear(256, 256, rngs=nnx.Rngs(0)))
    x, key = jax.ShapeDtypeStruct((64, 256), jnp.float32), jax.eval_shape(jax.random.key, 0)
    options = {"devices": 2, "strategies": ["dp", "fsdp"], "hardware": hardware}
    found = plan(mixed, model, x, key, **options)
    assert (found.best_by, found.gap) == (best_by, None)
    assert re.search(f"^chosen by {why}", "\n".join(found.summary()), re.MULTILINE)
    for name, figures in found.comparison.figures.items():
        bounds = found.comparison.at_least[name]
        assert figures["flops"] is None and bounds["flops"] >= 2 * 2 * 32 * 256 * 256
        assert (bounds["roofline"] is None) == (hardware is None)
    assert "≥ " in str(found)


@pytest.mark.usefixtures("compile_here")
@pytest.mark.filterwarnings("default")
def test_each_warning_once():
    model = nnx.eval_shape(lambda: Logits(nnx.Rngs(0)))
    tokens = jax.ShapeDtypeStruct((64, 16), jnp.int32)
    # On two meshes, both of which gather logits for the loss.
    options = {"strategies": ["dp + tensor"], "devices": 8, "most": 2, "measure": 1}
    with pytest.warns(UnshardedWarning) as caught:
        found = plan(nnx.value_and_grad(loss_of), model, tokens, **options)
    assert len(found.comparison.compiled) == 2
    texts = [str(warning.message) for warning in caught]
    assert len({*texts}) == len(texts) > 0
    # Those of the best are warnings, behind its name; those of the other are below its reason.
    assert all(text.startswith(f"plan: {found.best.name}: ") for text in texts)
    assert {warning.filename for warning in caught} == {__file__}
    assert {*found.warned} == {*found.candidates}
    assert "    warning: " in "\n".join(found.explained())


@pytest.mark.usefixtures("compile_here")
@pytest.mark.filterwarnings("error")
def test_a_candidate_that_loses_gives_no_warning():
    """Its heads are six, which four devices do not divide."""

    class Heads(MLP):
        def __init__(self, rngs):
            super().__init__(rngs, 1024, 1024)
            self.q_proj = nnx.LinearGeneral(1024, (6, 256), use_bias=False, rngs=rngs)

    model = nnx.eval_shape(lambda: Heads(nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    meshes = [{"data": 8}, {"data": 2, "model": 4}]
    options = {"strategies": ["dp", "dp + tensor", "fsdp + tensor"], "hardware": "TPU v5e"}
    step = lambda m, x: (m(x) + m.q_proj(x).sum()).sum(1)  # noqa: E731
    found = plan(step, model, x, meshes=meshes, **options)
    assert found.best.name == "dp, data 8"
    # Both chains have the warning, although their call of the strategy is the same.
    losing = {*found.candidates} - {found.best.name}
    assert {*found.warned} == losing and len(losing) == 2
    assert all("q_proj" in text for texts in found.warned.values() for text in texts)
