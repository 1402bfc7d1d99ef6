"""The reasons of ``Compiled.why``, for programs whose shardings are known by construction."""

from __future__ import annotations

import functools
import math
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from nnx_sharding import (
    StateSharding,
    _compat,
    accumulate_gradients,
    jit,
    tensor_parallel,
    value_and_grad,
)
from nnx_sharding.analysis.compiler_shardings import read_sharding
from nnx_sharding.analysis.units import bytes_text
from nnx_sharding.cli.main import main
from nnx_sharding.filters import Paths
from nnx_sharding.partition import (
    fsdp,
    make_mesh,
    override,
    replicated,
    with_sharding_constraint,
)
from test_tensor_parallel import FewHeads

WIDTH = 32


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = self.up(x)
        return self.down(jax.nn.relu(x))


def loss(model, x):
    return (model["block"](x) ** 2).mean()


def compiled(sharding, sizes=None, fun=loss, **options):
    sizes = sizes or {"data": 2, "model": 4}
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = make_mesh(sizes, axis_types=AxisType.Auto, devices=devices)
    model = nnx.eval_shape(lambda: nnx.Dict(block=Layer(nnx.Rngs(0)), odd=nnx.Param(jnp.ones(7))))
    sharding = sharding(model, mesh) if callable(sharding) else sharding
    options = {"in_shardings": (sharding, P("data")), "mesh": mesh, **options}
    return jit(fun, **options).lower(model, jax.ShapeDtypeStruct((64, WIDTH), "float32")).compile()


def by_fsdp(model, mesh):
    return fsdp(model, mesh=mesh, min_size=64)


def by_columns(model, mesh):
    rules = {nnx.PathContains("kernel"): P(None, "model"), "unknown": P("data"), ...: P("data")}
    return StateSharding(rules, on_indivisible="drop")


def by_rows_and_fsdp(model, mesh):
    return fsdp(model, mesh=mesh, base=tensor_parallel(model, mesh=mesh), min_size=64)


CASES = {
    "by two strategies": (
        by_rows_and_fsdp,
        "model.block.down.kernel",
        ["row of tensor_parallel, fsdp over dimension 1 decides: P('model', 'data')"],
        "P()",
    ),
    "added to a sum": (
        lambda model, mesh: tensor_parallel(model, mesh=mesh),
        "model.block.down.bias",
        ["row of tensor_parallel leaves it replicated: added to sums over 'model'"],
        "{r\"block/down/bias$\": P('data')}",
    ),
    "by paths of the user": (
        StateSharding({Paths([("block", "up", "bias")]): P("data"), ...: P()}),
        "model.block.up.bias",
        ["Rule 0, Paths(block/up/bias), decides: P('data')"],
        "P()",
    ),
    "by a strategy": (
        by_fsdp,
        "model.block.up.kernel",
        ["P(None, 'data'), (32,64) of (32,128)", "fsdp over dimension 1 decides"],
        "nothing, to hold 8.00 KiB on each device; to hold all of it there (16.0 KiB): "
        'nnx_sharding.partition.override(sharding, {r"block/up/kernel$": P()})',
    ),
    "too small": (
        by_fsdp,
        "model.block.down.bias",
        ["128 B", "fsdp leaves it replicated: fewer than", "'model' (4) would divide dimension 0"],
        "{r\"block/down/bias$\": P('data')}",
    ),
    "indivisible": (
        lambda model, mesh: fsdp(model, mesh=mesh, min_size=0),
        "model.odd",
        ["replicated", "'data' (2) divides no dimension of (7)"],
        "",
    ),
    "dropped": (
        by_columns,
        "model.odd",
        ["Rule 2, ..., decides: P('data')", "not all fits", "not divisible"],
        "",
    ),
    "by a rule": (
        by_columns,
        "model.block.up.kernel",
        ["P(None, 'model')", "Rule 0, PathContains('kernel'", "decides: P(None, 'model')"],
        "P()",
    ),
    "overridden": (
        lambda model, mesh: override(by_fsdp(model, mesh), {"up/kernel$": P()}),
        "model.block.up.kernel",
        [
            "Rule 0, PathRegex('up/kernel$'), decides: P()",
            "fsdp over dimension 1 says P(None, 'data'), and is overridden",
        ],
        "",
    ),
    "by a spec": (by_fsdp, "x", ["P('data', None)", "in_shardings has P('data') for x"], ""),
    "nothing": (None, "model.odd", ["in_shardings has nothing for model"], ""),
}


@pytest.mark.filterwarnings("ignore::nnx_sharding.errors.CorrectedSpecWarning")
@pytest.mark.filterwarnings("ignore::nnx_sharding.errors.UnusedFilterWarning")
@pytest.mark.parametrize("name", CASES)
def test_arguments(name):
    sharding, path, words, instead = CASES[name]
    reason = compiled(sharding).why(path)
    shown = str(reason)
    assert shown.startswith(f"{path}: ")
    assert all(word in shown for word in words), shown
    assert instead in reason.instead


def test_what_it_says_to_write_has_this_effect():
    reason = compiled(by_fsdp).why("model.block.down.bias")
    pattern, spec = reason.instead.partition('{r"')[2].split('": ')

    def changed(model, mesh):
        return override(by_fsdp(model, mesh), {pattern: eval(spec.rstrip("})") + ")")})

    assert (
        compiled(changed)
        .why("model.block.down.bias")
        .subject.startswith("model.block.down.bias: P('data'), (16) of (32)")
    )


def reason_of(program, kind, purpose):
    [first, *_] = [x for x in program.collectives().of(kind) if x.purpose == purpose]
    assert program.why(first) == program.why(first.name)
    return first, program.why(first)


def test_a_gathered_parameter():
    collective, reason = reason_of(compiled(by_fsdp), "all-gather", "parameter")
    shown = str(reason)
    assert f"It gathers {collective.parameters[0]}: P(" in shown
    assert re.search(r"fsdp over dimension \d decides", shown)
    assert re.search(r"Used.* on each device, by \w+ in model\.block\.(up|down) \(test_why", shown)
    assert reason.instead.startswith("nothing, if") and "FSDP" in reason.instead
    for remedy in ("more rows", "no remat", "tensor_parallel"):  # replication is the last one
        assert reason.instead.index(remedy) < reason.instead.index("replicated")


def test_a_sum():
    program = compiled(lambda model, mesh: tensor_parallel(model, mesh=mesh))
    _, reason = reason_of(program, "all-reduce", "sum")
    assert "dot_general in model.block.down (test_why.py:" in str(reason)
    assert "is sharded over model" in str(reason)
    assert "takes what dot_general in model.block.up (test_why.py:" in str(reason)
    assert reason.instead.startswith("nothing, if it is the one sum of a pair of layers")


def test_a_sum_that_no_pair_of_layers_needs():
    rows = StateSharding({Paths([("block", "up", "kernel")]): P("model"), ...: P()})
    shardings = rows, P("data", "model")
    program = compiled(None, fun=lambda model, x: model.block.up(x), in_shardings=shardings)
    _, reason = reason_of(program, "all-reduce", "sum")
    assert "over model" in str(reason) and "takes what" not in str(reason)
    assert "shard the kernel over its columns" in reason.instead


def test_a_sum_that_was_merged_with_a_gradient():
    def loss_of_sorted(model, x):
        x = jnp.sort(model.block.up(x), axis=0)
        return (model.norm(x) ** 2 * x).mean()

    model = nnx.eval_shape(
        lambda: nnx.Dict(block=Layer(nnx.Rngs(0)), norm=nnx.RMSNorm(4 * WIDTH, rngs=nnx.Rngs(0)))
    )
    mesh = make_mesh({"data": 8}, axis_types=AxisType.Auto)
    options = {"in_shardings": (fsdp(model, mesh=mesh, min_size=64), P("data")), "mesh": mesh}
    step = jit(value_and_grad(loss_of_sorted), **options)
    program = step.lower(model, jax.ShapeDtypeStruct((512, WIDTH), "float32")).compile()
    merged = [x for x in program.collectives() if len(x.parts) > 1 and x.bytes > 2**16]
    for collective in merged:  # Other compilers may not merge them.
        assert collective.purpose == "sum"
        shown = str(program.why(collective))
        assert "scatter-add" in shown and "It adds up the parts of the gradient" not in shown
        if any(part.purpose == "gradient" for part in collective.parts):
            assert "merged others into it: gradient of model.norm.scale (512 B)" in shown
    assert merged or jax.default_backend() != "cpu"


def test_a_gradient():
    program = compiled(None, fun=value_and_grad(loss))
    _, reason = reason_of(program, "all-reduce", "gradient")
    assert "gradient of model.block" in str(reason) and "sharded over data" in str(reason)


class Scale(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(4 * WIDTH))

    def __call__(self, x):
        return x * self.scale[...]


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_gradient_in_parts(is_sharded):
    """It is gathered if activations are sharded over an axis over which the parameter is not."""

    def loss_of_scaled(model, x):
        return (model.down(jnp.sin(model.norm(model.up(x)))) ** 2).mean()

    model = nnx.eval_shape(lambda: Layer(nnx.Rngs(0)))
    model.norm = nnx.eval_shape(Scale)
    mesh = make_mesh({"data": 2, "model": 4}, axis_types=AxisType.Auto)
    sharding = tensor_parallel(model, mesh=mesh)
    if is_sharded:
        sharding = override(sharding, {r"norm/scale$": P("model")})
    options = {"in_shardings": (sharding, P("data")), "out_shardings": (P(), sharding)}
    step = jit(value_and_grad(loss_of_scaled), **options, mesh=mesh)
    program = step.lower(model, jax.ShapeDtypeStruct((64, WIDTH), "float32")).compile()
    gathers = program.collectives().of("all-gather", "model")
    assert len(gathers) == (not is_sharded)
    for gather in gathers:
        assert (gather.purpose, gather.parameters) == ("gradient", ("model.norm.scale",))
        reason = program.why(gather)
        fact = "gathers the gradient of model.norm.scale: what it is computed from is sharded over"
        assert fact in str(reason), str(reason)
        assert "Made" in str(reason), str(reason)
        assert "shard the parameter over model, too" in reason.instead


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.rnn = nnx.RNN(nnx.SimpleCell(8, 16, rngs=rngs))

    def __call__(self, x):  # (batch, time, features)
        return self.rnn(self.norm(x))


def of_rnn(batch, gradient=value_and_grad, axis_types=None):
    mesh = make_mesh({"data": 8}, axis_types)
    model = nnx.eval_shape(lambda: Recurrent(nnx.Rngs(0)))
    step = jit(gradient(mean_square), in_shardings=(replicated(model), batch), mesh=mesh)
    return step.lower(model, jax.ShapeDtypeStruct((16, 24, 8), jnp.float32)).compile()


def mean_square(model, x):
    return (model(x) ** 2).mean()


def test_what_a_loop_takes_in_slices():
    """The dimension over which the loop runs is sharded; the function returns none of it."""
    _, reason = reason_of(of_rnn(P(None, "data")), "all-gather", "reshard")
    assert "by a loop, slice by slice, in model.rnn (test_why.py:" in str(reason)
    assert "shard it, but not over data" in reason.instead


class SumsFeatures(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)

    def __call__(self, x):
        return self.norm(x).sum()


def test_a_sum_without_a_kernel():
    mesh = make_mesh({"data": 8}, axis_types=AxisType.Auto)
    model = nnx.eval_shape(lambda: SumsFeatures(nnx.Rngs(0)))
    forward = jit(lambda model, x: model(x), in_shardings=(None, P(None, "data")), mesh=mesh)
    program = forward.lower(model, jax.ShapeDtypeStruct((4, 8), jnp.float32)).compile()
    reasons = [program.why(row) for row in program.collectives() if row.purpose == "sum"]
    assert reasons and all(
        "else keep the dimension that is summed whole" in x.instead for x in reasons
    )


@pytest.mark.parametrize(
    ("axis_types", "options"), [(AxisType.Explicit, {}), (AxisType.Auto, {"axis": "data"})]
)
def test_gradients_in_a_loop_over_time(axis_types, options):
    program = of_rnn(P("data"), axis_types=axis_types)
    row, reason = reason_of(program, "all-reduce", "gradient")
    written = "".join(f", {name}={value!r}" for name, value in {"steps": 1, **options}.items())
    assert row.times == 24 and f"accumulate_gradients(loss{written})" in reason.instead
    assert " in each of 24 runs (" in reason.subject
    once = functools.partial(accumulate_gradients, steps=1, **options)
    program = of_rnn(P("data"), once, axis_types)
    assert {row.times for row in program.collectives()} == {1}


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.out(self.norm(x))


def test_accumulated_gradients():
    """What comes out of the loop over microbatches is named after its operation, not the loop."""
    mesh = make_mesh({"data": 8}, axis_types=AxisType.Explicit)
    model = nnx.eval_shape(lambda: Normed(nnx.Rngs(0)))
    step = jit(
        accumulate_gradients(mean_square, steps=4),
        in_shardings=(fsdp(model, mesh=mesh, min_size=0), P("data")),
        mesh=mesh,
    )
    program = step.lower(model, jax.ShapeDtypeStruct((64, 8, WIDTH), jnp.float32)).compile()
    sums = program.collectives().of("all-reduce", "data")
    [after] = [row for row in sums if row.times == 1]
    assert after.purpose == "gradient"
    assert {*after.parameters} == {"model.norm.scale", "model.norm.bias"}
    inside = [row for row in sums if row.times == 4 and row.purpose == "gradient"]
    assert inside  # the gradients of what the axis shards
    for row in inside:  # It advises neither a single step nor the option for Auto axes.
        instead = program.why(row).instead
        assert "as many steps as the loop has microbatches" in instead
        assert "steps=1" not in instead and "axis=" not in instead


class ReadsInside(nnx.Module):
    """Computes with the kernel of a module inside, without calling that, as if sharded by hand."""

    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return jnp.sin(jnp.einsum("bi,io->bo", x, self.up.kernel[...]))


def test_gradient_of_a_parameter_that_a_module_outside_reads():
    mesh = make_mesh({"data": 8}, axis_types=AxisType.Explicit)
    model = nnx.eval_shape(lambda: nnx.Dict(block=ReadsInside(nnx.Rngs(0))))
    step = jit(value_and_grad(loss), in_shardings=(P(), P("data")), mesh=mesh)
    program = step.lower(model, jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)).compile()
    row, _ = reason_of(program, "all-reduce", "gradient")
    assert row.parameters == ("model.block.up.kernel",) and row.module == "model.block"


class Sine(nnx.Module):
    def __call__(self, x):
        return jnp.sin(x)


class Moved(nnx.Module):
    def __init__(self):
        self.up = Sine()

    def __call__(self, x):
        x = with_sharding_constraint(x, P("model", None, "data"))
        return with_sharding_constraint(self.up(x), P(None, ("model", "data")))


def moved(**options):
    mesh = make_mesh({"model": 4, "data": 2})
    fun = jit(lambda model, x: 2 * model(x), in_shardings=(None, P()), mesh=mesh, **options)
    return fun.lower(Moved(), jax.ShapeDtypeStruct((16, 16, 16), jnp.float32)).compile()


def test_two_shardings_that_meet():
    _, reason = reason_of(moved(), "all-gather", "reshard")
    made, used = reason.facts
    assert made.startswith("Made as P('model', None, 'data'), (4,16,8) on each device, by sin in")
    assert "model.up (test_why.py:" in made
    assert used.startswith("Used as P(None, ('model', 'data'), None), (16,2,16) on each device, by")
    [code] = re.findall(r"jit\((.*)\) if model\.up returns it", reason.instead)
    assert code == "activation_shardings={r\"up\": P(None, ('model', 'data'))}"
    moved(**eval(f"dict({code})"))  # the spec can be used as it is written


def largest(model, x, spec=None):
    hidden = model["block"].up(x)
    hidden = hidden if spec is None else with_sharding_constraint(hidden, spec)
    return hidden.argmax(-1)


def test_an_argmax_over_a_sharded_dimension():
    """The results of the parts are compared, unless the array is gathered before."""
    for spec, words in ((None, "nothing: each device has compared"), (P("data"), "no constraint")):
        fun = functools.partial(largest, spec=spec)
        program = compiled(lambda model, mesh: tensor_parallel(model, mesh=mesh), fun=fun)
        gathers = [x for x in program.collectives().of("all-gather") if x.purpose == "reshard"]
        assert gathers
        for gather in gathers:
            assert program.why(gather).instead.startswith(words), program.why(gather)


def test_what_is_gathered_is_not_to_be_replicated():
    """A constraint to P() where the array is made would send the same."""

    def fun(x):
        x = jnp.sin(with_sharding_constraint(x, P("model", None, "data")))
        return 2 * with_sharding_constraint(x, P())

    mesh, x = make_mesh({"model": 4, "data": 2}), jax.ShapeDtypeStruct((16, 16, 16), "float32")
    program = jit(fun, in_shardings=P(), mesh=mesh).lower(x).compile()
    reasons = [program.why(row) for row in program.collectives().of("all-gather")]
    assert reasons and all("P()" not in reason.instead for reason in reasons)


def test_nothing_is_written_that_cannot_be_used():
    mesh = make_mesh({"data": 2, "model": 4}, axis_types=AxisType.Auto)
    model = nnx.eval_shape(lambda: FewHeads(nnx.Rngs(0)))  # each head is on two of four devices
    specs = tensor_parallel(model, mesh=mesh), P("data")
    fun = jit(lambda model, x: model(x), in_shardings=specs, mesh=mesh)
    program = fun.lower(model, jax.ShapeDtypeStruct((4, 8, 64), jnp.float32)).compile()
    _, reason = reason_of(program, "all-gather", "reshard")
    assert all(" as P(" not in fact for fact in reason.facts)  # no spec is known
    [module] = re.findall(r"by dot_general in (model\.[kv]_proj) ", reason.facts[0])
    assert reason.instead == (
        "shard it, but not over model: by with_sharding_constraint where it is made, or by "
        f"activation_shardings of jit if {module} returns it"
    )


def test_a_module():
    reason = compiled(by_fsdp).why("model.block.up")
    size, whole = (32 * 128 // 2 + 128 // 2) * 4, (32 * 128 + 128) * 4
    assert reason.subject == (
        f"model.block.up: 2 arrays, {bytes_text(size)} of {bytes_text(whole)} on each device"
    )
    bias, kernel = reason.facts
    assert bias.startswith("model.block.up.bias: P('data'), (64) of (128)")
    assert kernel.startswith("model.block.up.kernel: P(None, 'data')")
    assert kernel.endswith("fsdp over dimension 1 decides: P(None, 'data').")


def test_report_has_the_reasons():
    program = compiled(by_fsdp)
    report = program.report(by_module=True)
    used = [row.path for row in program.parameters() if row.used]
    assert {*report.reasons} == {*used, *(x.name for x in program.collectives())}
    assert all(reason == program.why(name) for name, reason in report.reasons.items())
    assert program.report().reasons == {}


def test_names_that_are_not_there():
    program = compiled(None)
    with pytest.raises(ValueError, match=r"called 'model\.block\.up\.kernl'; did you mean"):
        program.why("model.block.up.kernl")


@pytest.mark.parametrize(
    ("written", "spec"),
    [
        ("{mesh['data'=2,'model'=4], [{'data'}, {}]}", P("data", None)),
        ("{mesh['data'=2,'model'=4], [{?}, {'model', 'data'}]}", P(None, ("model", "data"))),
        ("{mesh['data'=2,'model'=4], [{'model':(1)2}, {}]}", None),
        ("{mesh['data'=2,'model'=4], [{'data'}]}", None),
        ("{mesh['x'=8], [{'x'}, {}]}", None),
        ("{replicated}", P(None, None)),
        ("{maximal device=0}", None),
        ("{devices=[2,1,4]<=[8] last_tile_dim_replicate}", P("data", None)),
        ("{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}", P(None, "model")),
        ("{devices=[8,1]<=[8]}", P(("data", "model"), None)),
        ("{devices=[8,1]<=[2,4]T(1,0)}", P(("model", "data"), None)),
        ("{devices=[4,2]<=[8]}", None),  # parts of axes
        (
            "{mesh['data'=2,'model'=4], [{}, {'model'}], unreduced={'data'}}",
            P(None, "model", unreduced={"data"}),
        ),
        (
            "{mesh['data'=2,'model'=4], [{}, {}], replicated={'model'}, unreduced={'data'}}",
            P(None, None, unreduced={"data"}),
        ),
        ("{mesh['data'=2,'model'=4], [{}, {}], unreduced={'model':(1)2}}", None),
        ("{mesh['data'=2,'model'=4], [{'data'}, {}], manual={'model'}}", None),
        ("{devices=[2,4]<=[8] last_tile_dims={manual}}", None),
        ("{devices=[4,2]<=[2,4]T(1,0)}", P("model", "data")),
        (
            "{devices=[4,1,2]<=[2,2,2]T(2,1,0) last_tile_dim_replicate}",
            None,
        ),  # the tiles 0, 2, 1, 3
    ],
)
def test_shardings_of_the_compiler(written, spec):
    assert read_sharding(written, 2, {"data": 2, "model": 4}) == spec


def test_inferred_activations():
    """``up`` returns (64, 128) of which XLA computes (32, 32) on each device: both axes."""
    program = compiled(lambda model, mesh: tensor_parallel(model, mesh=mesh))
    rows = {row.path: row for row in program.activations()}
    assert rows["model.block.up"].spec == P("data", "model")
    assert rows["model.block.up"].chosen_by == "inferred"
    assert rows["model.block.up"].shard_shape == (32, 32)
    assert rows["model.block.up"].bytes_per_device == 32 * 32 * 4
    assert rows["model.block.down"].spec == P("data", None)


@pytest.mark.usefixtures("uncached")  # a program from the cache brings no remarks
@pytest.mark.parametrize("level", ["1", "3"])  # warnings; nothing
def test_remarks_of_the_compiler_in_the_users_names(level, tmp_path, monkeypatch, capfd):
    file = tmp_path / f"moved_for_why_{level}.py"
    file.write_text("import test_why\n\ndef step():\n    return test_why.moved()\n")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent)])
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
        with _compat.without_compiler_warnings():
            pass  # then the level is that of the variable
        assert main(["inspect", f"{file}:step"]) == 0
    with _compat.without_compiler_warnings():
        pass  # and here what it was before
    error = capfd.readouterr().err
    assert "[SPMD]" not in error
    expected = "P('model', None, 'data') → P(None, ('model', 'data'), None)"
    assert re.search(rf"sin in model\.up( \(test_why\.py:\d+\))?: {re.escape(expected)}", error)


@pytest.mark.usefixtures("uncached")
def test_the_compiler_warns_once(capfd):
    program = moved()
    assert capfd.readouterr().err.count("Involuntary full rematerialization") == 1
    assert program.by_module().peak == program.memory().peak  # compiles again
    assert capfd.readouterr().err == ""


def test_activations_after_a_constraint_that_leaves_out_dimensions():
    def run(model, x):
        return model(x).sum()

    class Constrained(nnx.Module):
        def __call__(self, x):
            return with_sharding_constraint(jnp.sin(x), P("data"))

    mesh = make_mesh({"data": 8}, axis_types=AxisType.Auto)
    x = jax.ShapeDtypeStruct((8, 4, 4), jnp.float32)
    fun = jit(run, in_shardings=(None, P()), mesh=mesh)
    [row] = fun.lower(Constrained(), x).compile().activations()
    assert (row.spec, row.shard_shape) == (P("data", None, None), (1, 4, 4))


class Words(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(64, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.layer = Layer(rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return x + self.layer(self.norm(x))


SIZES = {
    "axes of several sizes": {"data": 2, "model": 4},
    "axes of one size": {"data": 2, "model": 2},  # shapes do not say which of them it is
}


@pytest.mark.parametrize("name", SIZES)
def test_activations_that_the_compiler_chose(name):
    sizes = SIZES[name]
    mesh = make_mesh(
        sizes, axis_types=AxisType.Auto, devices=jax.devices()[: math.prod(sizes.values())]
    )
    model = nnx.eval_shape(lambda: Words(nnx.Rngs(0)))
    fun = jit(
        lambda model, tokens: model(tokens).sum(),
        in_shardings=(tensor_parallel(model, mesh=mesh), P("data")),
        mesh=mesh,
    )
    compiled = fun.lower(model, jax.ShapeDtypeStruct((16, 8), jnp.int32)).compile()
    rows = compiled.activations()
    assert rows == [*compiled.report(by_module=True).activations]
    assert {row.path: row.spec for row in rows if row.chosen_by == "inferred"} == {
        **dict.fromkeys(["model.embed", "model.norm", "model.layer"], P("data", None, None)),
        "model.layer.up": P("data", None, "model"),
        "model.layer.down": P("data", None, None),
        "model": P("data", None, None),
    }
