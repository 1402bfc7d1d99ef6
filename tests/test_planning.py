"""``plan``: against all strategies compiled one by one, and against its own predictions."""

from __future__ import annotations

import functools
import itertools
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from models import MLP, P
from nnx_sharding import StateSharding, jit, shard_map, stack
from nnx_sharding.analysis.units import read_bytes
from nnx_sharding.partition import fsdp, make_mesh, replicated, tensor_parallel, zero1
from nnx_sharding.planning import plan
from nnx_sharding.planning.candidates import predict
from nnx_sharding.report import Strategy, compare
from nnx_sharding.report.compiler_process import CompilerCrash, CompilerProcess
from nnx_sharding.report.strategies import lowered
from nnx_sharding.training import accumulate_gradients
from nnx_sharding.transforms.stages import Compiled

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


OPTIONS = {"hardware": "TPU v5e", "donate_argnums": (0, 1)}


@pytest.mark.usefixtures("compile_here")
@pytest.mark.slow  # all but the smallest nightly
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.gate] * (name == "mlp")) for name in MODELS]
)
def test_equals_brute_force(name, tmp_path):
    args = program(name)
    styles = ("tensor", "sequence") if name == "mlp" else ("tensor",)
    names, strategies = set(), {}
    for strategy, full_name, way in all_strategies(styles):
        names.add(strategy)
        strategies[full_name] = way
    options = OPTIONS | {"cache_dir": tmp_path}
    every = compare(strategies, train_step, *args, **options)
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
    taken = {name: text for name, text in reasons.items() if text.startswith("the arguments take")}
    assert taken or name == "convnet"  # whose activations take most
    for candidate in found.candidates.values():
        exact = found.comparison.figures[candidate.name]["arguments"]
        assert predict(candidate, args).arguments == pytest.approx(exact, rel=0.05)
    for name, text in taken.items():
        predicted = read_bytes(text.removeprefix("the arguments take").partition(" on")[0])
        assert predicted == pytest.approx(figures[name]["arguments"], rel=0.05)
        assert figures[name]["arguments"] > limit


@pytest.mark.usefixtures("compile_here")
def test_variants_in_the_order_of_preference():
    model, optimizer, x = program("mlp")

    def step(model, optimizer, x, *, microbatches):
        loss_and_grads = accumulate_gradients(loss_of, steps=microbatches)
        optimizer.update(model, loss_and_grads(model, x)[1])

    variants = {f"{n} microbatches": functools.partial(step, microbatches=n) for n in (1, 2, 4)}
    x = jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32)
    options = {"devices": 8, "strategies": "dp", "donate_argnums": (0, 1)}
    all_fit = plan(variants, model, optimizer, x, **options)
    assert [*all_fit.candidates] == ["dp, data 8, 1 microbatches"]
    assert all_fit.comparison.compiled[all_fit.best.name].by_module is None
    assert all_fit.ruled_out == {
        f"dp, data 8, {n} microbatches": "dp, data 8, 1 microbatches fits" for n in (2, 4)
    }
    peak = all_fit.comparison.figures["dp, data 8, 1 microbatches"]["peak"]
    options |= {"memory_limit": peak - 1, "by_module": True}
    frugal = plan(variants, model, optimizer, x, **options)
    assert frugal.best.variant == "2 microbatches"
    assert [*frugal.candidates] == [f"dp, data 8, {n} microbatches" for n in (2, 1)]
    found = [report.by_module for report in frugal.comparison.compiled.values()]
    assert found[0].peak and found[1] is None
    assert [*frugal.ruled_out] == ["dp, data 8, 4 microbatches"]


@pytest.mark.usefixtures("compile_here")
def test_unknown_memory_does_not_fit(monkeypatch):
    monkeypatch.setattr(Compiled, "memory", lambda _: None)
    variants = {"one": train_step, "two": lambda *args: train_step(*args)}
    options = {"devices": 2, "strategies": "dp", "memory_limit": "1 GiB"}
    found = plan(variants, *program("mlp"), **options)
    assert found.best is None
    assert {each.variant for each in found.candidates.values()} == {"one", "two"}


@pytest.mark.slow
@pytest.mark.gate
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
@pytest.mark.slow
@pytest.mark.gate
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
@pytest.mark.slow
@pytest.mark.gate
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
        (ValueError, "invalid argnames {'modle'}", train_step, {"donate_argnames": "modle"}),
        (ValueError, r"strategies=\[\]: expected", train_step, {"strategies": []}),
        (ValueError, "strategies=None: expected", train_step, {"strategies": None}),
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
        (ValueError, "unknown strategies: 'fdsp'.*'fsdp'", train_step, {"strategies": "fdsp"}),
        (ValueError, "at least one variant", {}, {}),
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


@pytest.mark.slow
@pytest.mark.gate
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


def test_a_pipeline_is_a_candidate_for_a_stack():
    def found(model, **options):
        x = jax.ShapeDtypeStruct((rows, width), "float32")
        return plan(lambda m, x: m(x), model, x, hardware="TPU v5e", quiet=True, **options)

    rows, width, layers = 32, 64, 8
    blocks = nnx.eval_shape(lambda: stack(nnx.Linear, layers, width, width, rngs=nnx.Rngs(0)))
    name, meshes = "dp + pipeline, data 1 × model 4", [{"data": 1, "model": 4}]
    report = found(blocks, meshes=meshes, strategies="dp + pipeline").comparison.reports[name]
    microbatches = 4 * 4
    ticks = microbatches + 4 - 1
    flops = 2 * rows * width * width * layers / 4 * ticks / microbatches  # the last 3 ticks idle
    assert flops <= report.cost.flops <= 1.1 * flops
    assert report.roofline.compute_s == pytest.approx(report.cost.flops / 1.97e14, rel=1e-3)
    [sent] = [x for x in report.collectives if x.kind == "collective-permute"]
    assert (sent.times, sent.bytes) == (ticks, rows // microbatches * width * 4)

    dense = nnx.eval_shape(lambda: nnx.Linear(width, width, rngs=nnx.Rngs(0)))
    for model, is_tried in ((blocks, True), (dense, False)):
        by_default = found(model, meshes=meshes, most=1)
        names = {*by_default.candidates, *by_default.ruled_out}
        assert (name in names) == is_tried
