"""Memory and cost by module, against the totals of XLA and against sums by hand."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from module_programs import LAYERS, PROGRAMS, ROWS, WIDTH, Block
from nnx_sharding import jit, stack, value_and_grad
from nnx_sharding.analysis import HARDWARE
from nnx_sharding.analysis.attribution import CompiledProgram, module_table
from nnx_sharding.analysis.buffers import Buffer, read_buffers
from nnx_sharding.analysis.hlo import parse
from nnx_sharding.analysis.units import read_bytes
from nnx_sharding.partition import make_mesh


@pytest.fixture(scope="module")
def mlp():
    return PROGRAMS["mlp"]().compile()


@pytest.fixture(scope="module")
def table(mlp):
    return mlp.by_module(hardware="TPU v5e")


@pytest.mark.parametrize("name", PROGRAMS)
def test_sums_are_those_of_xla(name, request):
    compiled = request.getfixturevalue("mlp") if name == "mlp" else PROGRAMS[name]().compile()
    table, total = compiled.by_module(), compiled.by_module().total()
    attributed = sum(total.at_peak.values())
    assert attributed + table.unattributed == table.in_use
    assert table.in_use + table.reserved == table.peak == compiled.memory().peak
    assert table.reserved < 0.1 * table.peak
    assert attributed >= 0.95 * table.in_use
    assert total.flops == pytest.approx(compiled.cost().flops, rel=0.01)
    assert total.bytes_accessed == pytest.approx(compiled.cost().bytes_accessed, rel=0.01)
    assert total.bytes_sent == compiled.collectives().bytes_sent
    assert max(phase.bytes for phase in table.over_time) == table.in_use


def test_arguments_and_activations_by_hand(table):
    """One of four devices has a quarter of the rows and of the parameters."""
    block = 2 * WIDTH * 4 * WIDTH + 4 * WIDTH + WIDTH
    kinds = table.by_kind()
    assert kinds["inputs"] == ROWS * WIDTH * 4
    held = [table.total(f"model.blocks[{i}]").at_peak for i in range(LAYERS)]
    # A kernel of the optimizer counts with its module; what is gathered for a use counts as well.
    assert all(one["parameters"] >= block for one in held)
    hidden = ROWS * 4 * WIDTH * 4
    # The inputs of the activation function, two products of it, and the input of the block.
    assert held[0]["activations"] == held[1]["activations"]
    assert 2 * hidden < held[0]["activations"] <= 4 * hidden
    assert max(table.over_time, key=lambda x: x.bytes).backward


def test_memory_that_is_held_for_a_result():
    """Before the result is made, a smaller array is where it will be."""
    keys = jax.random.split(jax.random.key(0), 5)
    models = nnx.vmap(lambda key: Block(nnx.Rngs(key)))(keys)

    def run(models, x):
        hidden = jax.vmap(lambda x, w: jnp.tanh(x @ w[:, :WIDTH]))(x, models.up.kernel[...])
        return nnx.vmap(lambda block, x: block.up(x))(models, hidden)

    x = jnp.ones((5, 128, WIDTH))
    table = jit(run).lower(models, x).compile().by_module()
    kinds = table.by_kind()
    assert table.unattributed < 0.05 * table.peak
    assert kinds["outputs"] + kinds.get("intermediates", 0) <= 5 * 128 * 4 * 6 * WIDTH


class OwnParam(nnx.Param):
    """A parameter by a class of the user."""


class OwnStatistic(nnx.BatchStat):
    """A statistic by a class of the user."""


@pytest.mark.parametrize(
    ("variable", "role", "use"),
    [
        (nnx.Param, "parameter", "parameters"),
        (nnx.LoRAParam, "parameter", "parameters"),
        (OwnParam, "parameter", "parameters"),
        (nnx.OptState, "optimizer state", "optimizer state"),
        (OwnStatistic, "state", "other state"),
        (nnx.RngKey, "state", "other state"),
        (nnx.Variable, "variable", "other state"),
    ],
)
def test_variables_count_as_what_their_class_extends(variable, role, use):
    model = nnx.Dict(table=variable(jnp.ones((64, 64))))
    compiled = jit(lambda model, x: x @ model.table[...]).lower(model, jnp.ones((2, 64))).compile()
    rows = {row.path: row.role for row in compiled.parameters()}
    assert rows == {"model.table": role, "x": None}
    assert compiled.by_module().by_kind()[use] == 64 * 64 * 4


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of the compiler for CPUs")
def test_what_is_gathered_to_be_returned_is_an_output():
    mesh = make_mesh({"data": 8})
    gather = jit(lambda x: x, in_shardings=P("data"), out_shardings=P(), mesh=mesh)
    compiled = gather.lower(jax.ShapeDtypeStruct((8, 1024), "float32")).compile()
    held = compiled.by_module().by_kind()
    assert (held["inputs"], held["outputs"]) == (1024 * 4, 8 * 1024 * 4)
    assert compiled.memory().outputs == held["outputs"]


def test_flops_by_hand(table):
    product = 2 * ROWS * WIDTH * 4 * WIDTH
    for i in range(LAYERS):
        for name in ("up", "down"):
            path = f"model.blocks[{i}].{name}"
            assert table.total(path, backward=False).flops == pytest.approx(product, rel=0.03)
            # Gradients of the kernel and of the input; the first input needs none.
            number = 1 if (i, name) == (0, "up") else 2
            assert table.total(path, backward=True).flops == pytest.approx(
                number * product, rel=0.03
            )


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(64, 64, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.up(x))


@pytest.mark.parametrize("remat", [False, True])
def test_activations_of_a_stack_by_hand(remat):
    """Of 8 layers of 4096 rows: outputs of the product and of tanh, or the inputs with remat."""
    model = nnx.eval_shape(lambda: stack([Layer(nnx.Rngs(i)) for i in range(8)], remat=remat))
    x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)

    def step(model, x):
        return value_and_grad(lambda model, x: (model(x) ** 2).mean())(model, x)

    table = jit(step).lower(model, x).compile().by_module()
    kept = 8 * 4096 * 64 * 4
    # Older releases of XLA keep one array more.
    assert kept <= table.by_kind()["activations"] <= 3 * kept
    assert table.by_kind()["intermediates"] < kept / 2


def test_work_of_an_optimizer_by_hand(table):
    """Its update has a row: of momentum and SGD at most some flops for each parameter."""
    rows = [row for row in table.rows if row.path == "optimizer"]
    count = LAYERS * (2 * WIDTH * 4 * WIDTH + 4 * WIDTH + WIDTH)
    assert 0 < sum(row.flops for row in rows) < 32 * count
    assert sum(row.flops for row in table.rows if row.path == "") < 16 * ROWS * WIDTH
    assert not any(row.path is None for row in table.rows)


def test_products_without_names_are_in_modules():
    """The compiler for CPUs drops the names of attention's own products."""
    size, length, width = 2, 64, 32
    model = nnx.eval_shape(
        lambda: nnx.MultiHeadAttention(4, width, decode=False, rngs=nnx.Rngs(0), use_bias=False)
    )

    def step(model, x):
        return value_and_grad(lambda model, x: (model(x) ** 2).mean())(model, x)

    x = jax.ShapeDtypeStruct((size, length, width), jnp.float32)
    table = jit(step).lower(model, x).compile().by_module()
    # Queries with keys, weights with values; twice as many for the gradients.
    attention = 3 * 2 * 2 * size * length * length * width
    own = sum(row.flops for row in table.rows if row.path == "model")
    assert attention <= own < 1.3 * attention
    outside = table.total().flops - table.total("model").flops
    assert outside <= 8 * size * length * width


def test_what_is_not_known_of_work_is_none():
    def solve(a, b):
        return jax.scipy.linalg.solve_triangular(a, b)

    def decode(model, x):
        return jax.lax.while_loop(lambda x: x.max() > 0.5, model, x)

    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    solved = jit(solve).lower(square, square).compile()
    assert solved.by_module().total().flops is None is solved.cost().flops
    assert "custom calls of unknown cost: lapack" in solved.by_module().why
    model = nnx.eval_shape(lambda: Layer(nnx.Rngs(0)))
    decoded = jit(decode).lower(model, x).compile()
    table, roofline = decoded.by_module(hardware="TPU v5e"), decoded.roofline("TPU v5e")
    assert table.total("model.up").flops is None is table.total().seconds
    assert roofline.seconds is None is roofline.estimate
    for text in (str(table), str(roofline), str(decoded.cost())):
        assert "loops of unknown length: jit(decode)" in text


def test_each_column_is_explained(mlp):
    for shown in (mlp.by_module(), mlp.by_module(hardware="TPU v5e"), mlp.by_line()):
        lines = str(shown).splitlines()
        header = next(x for x in lines if x.startswith(("module ", "line ")))
        titles = {*re.split(r"\s{2,}", header.strip())} - {"line", "code"}
        phrases = {x.strip().partition(": ")[0] for x in lines if x.startswith("  ")}
        assert titles <= phrases, shown


def test_a_module_without_rows_is_as_known_as_others(mlp, table):
    nothing = table.total("model.nothing")
    assert (nothing.flops, nothing.at_peak, nothing.seconds) == (0, {}, 0)
    assert nothing.measured is None is table.total().measured
    assert mlp.by_module().total("model.nothing").seconds is None  # the devices are CPUs
    program = CompiledProgram(parse("?"), None, None, None, None, None)
    unread = module_table(program, (), ())
    assert unread.total().flops is None is unread.total("model").at_peak
    assert "not understood: " in unread.why


def test_what_has_changed_since_it_was_compiled():
    """The second trace is of another program, whose figures would look right."""
    config = {"layers": 1}

    def run(x):
        for _ in range(config["layers"]):
            x = x @ x
        return x

    compiled, other = (jit(run).lower(jnp.ones((64, 64))).compile() for _ in range(2))
    config["layers"] = 2
    for table in (compiled.by_module, compiled.by_line):
        with pytest.raises(ValueError, match="run is another program than the one that was"):
            table()
    config["layers"] = 1
    with jax.enable_x64(True):
        wide = jit(lambda x: jnp.sin(x.astype(float))).lower(jnp.ones(4)).compile()
    assert other.by_module().total().flops == other.cost().flops
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some releases of JAX: it has no 64 bits now
        with pytest.raises(ValueError, match="a setting of JAX, has changed since"):
            wide.by_module()


def test_devices_without_a_mesh_have_peak_rates_as_well():
    with mock.patch.dict(HARDWARE, {"cpu": HARDWARE["TPU v5e"]}):
        compiled = jit(jnp.matmul).lower(jnp.ones((64, 64)), jnp.ones((64, 64))).compile()
        assert compiled.by_module().total().seconds == compiled.report().roofline.seconds > 0


def test_depths_are_sums(table):
    with pytest.raises(ValueError, match="depth must be 0 or more, got -1"):
        table.at_depth(-1)
    shallow = table.at_depth(2)
    paths = {row.path for row in shallow.rows}
    assert {"model.blocks[0]", "model.blocks[1]", "model.blocks[2]", ""} <= paths
    assert not any(path.endswith(".up") for path in paths)
    sums = [dataclasses.replace(x.total(), seconds=None) for x in (shallow, table)]
    assert sums[0] == sums[1]
    assert shallow.total().seconds == pytest.approx(table.total().seconds)
    row = next(row for row in shallow.rows if (row.path, row.backward) == ("model.blocks[1]", True))
    assert row == table.total("model.blocks[1]", backward=True)
    both = [table.total("model", backward=one).flops for one in (False, True)]
    assert sum(both) == table.total("model").flops
    assert [row.path for row in table.at_depth(0).rows if row.path.startswith("model")] == [
        "model",
        "model",
    ]


def test_the_last_line_sums_up_what_is_not_shown(table):
    shown = table.rows[:1] * 40
    nothing = dataclasses.replace(
        shown[0], path="model.idle", flops=0.0, bytes_accessed=0.0, bytes_sent=0, seconds=0.0,
        at_peak={"parameters": 1},
    )  # fmt: skip
    many = dataclasses.replace(table, rows=(*shown, *[nothing] * 3))
    [line] = [line for line in str(many).splitlines() if line.startswith("…")]
    assert line.startswith("… and 3 more (.rows, at_depth)  ")
    assert "3 B  " in line
    assert not any(line.startswith("…") for line in str(table).splitlines())


@pytest.mark.parametrize("figure", ["flops", "bytes_accessed", "bytes_sent"])
def test_what_does_most_is_shown_though_it_holds_nothing(table, figure):
    busy = dataclasses.replace(
        table.rows[0], path="model.busy", at_peak={}, **{figure: 2 * getattr(table.total(), figure)}
    )
    many = dataclasses.replace(table, rows=(*[table.rows[0]] * 45, busy))
    assert re.search(r"^(the backward pass of )?model\.busy ", str(many), re.MULTILINE)


def test_merged_collectives_count_for_each_module(mlp, table):
    merged = [x for x in mlp.collectives() if len({part.module for part in x.parts}) > 1]
    assert merged  # the gradients of biases, of all blocks
    sent = [table.total(f"model.blocks[{i}]").bytes_sent for i in range(LAYERS)]
    assert all(sent)
    # Each block sends the same, up to a byte of each merged collective that is rounded.
    assert max(sent) - min(sent) <= len(merged)


def test_seconds_are_rooflines(table):
    rows = [row for row in table.rows if row.path == "model.blocks[0].up"]
    for row in rows:  # what is sent on four virtual devices is sent over all links of a TPU
        sent = row.bytes_sent / 200e9 if row.bytes_sent else 0
        at_least = max(row.flops / 197e12, row.bytes_accessed / 819e9, sent)
        assert at_least <= row.seconds < at_least + 10 * HARDWARE["TPU v5e"].latency


def test_printing_says_what_holds_the_peak(mlp, table):
    words = str(mlp.memory())
    assert "at the peak, in the backward pass of model.blocks[2]" in words
    assert "activations of model.blocks (3.25 MiB each, 3 ×)" in words
    assert "the backward pass of model.blocks[2].down" in str(table)
    assert "memory over time" in str(mlp.by_module().over_time)
    assert "memory over time" in mlp.by_module().over_time._repr_html_()
    data = json.loads(json.dumps(table.as_dict()))
    assert data["peak"] == table.peak and len(data["rows"]) == len(table.rows)


@pytest.mark.parametrize("most", [1, 3, 5, 99])
def test_what_holds_the_peak_adds_up(table, most):
    texts = table.holders(most)
    # "2 MiB activations of model (1 MiB each, 2 ×)" begins with a size, "3 others (22 KiB)" ends
    # with one.
    *_, last = texts
    *named, size_of_others = [*texts[:-1], last.partition("(")[2] if " other" in last else last]
    sizes = [read_bytes(" ".join(x.strip(")").split()[:2])) for x in (*named, size_of_others)]
    assert sum(sizes) == pytest.approx(sum(table.total().at_peak.values()), rel=0.01)
    assert len(texts) <= most + 1


def test_plain_compile_writes_nothing():
    """Files are for `by_module` only, and are removed."""
    written = []
    lowered = jit(lambda x: x + 1).lower(jnp.ones(4))
    compiled = lowered.compile()
    again = compiled._compile_with
    compiled._compile_with = lambda stage, more: written.append(more) or again(stage, more)
    assert compiled.memory().peak == 32
    assert not written
    compiled.by_module()
    [options] = written
    assert not os.path.exists(options["xla_dump_to"])
    compiled.by_module()
    assert len(written) == 1


def test_persistent_cache_does_not_hide_the_files():
    """The tests have one, in which the second program is found."""
    for _ in range(2):
        compiled = jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((8, 8))).compile()
        assert compiled.by_module().peak is not None


def test_unknown_is_none(monkeypatch):
    compiled = jit(lambda x: x + 1).lower(jnp.ones(4)).compile()
    monkeypatch.setattr("nnx_sharding.transforms.module_memory.read_buffers", lambda folder: None)
    table = compiled.by_module()
    assert table.peak is None and table.unattributed is None and table.total().at_peak is None
    assert "unknown: the compiler" in table.summary() and "unknown" in str(compiled.memory())


def test_out_of_memory_ends_with_what_holds_it(monkeypatch):
    model = nnx.Sequential(*(nnx.Linear(64, 64, rngs=nnx.Rngs(0)) for _ in range(4)))

    def step(model, x):
        return value_and_grad(lambda model, x: jnp.tanh(model(jnp.tanh(x))).sum())(model, x)

    lowered = jit(step).lower(model, jnp.ones((1024, 64)))

    class Full:
        def compile(self, *_):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too much")

        def __getattr__(self, name):
            return getattr(stage, name)

    stage, lowered._stage = lowered._stage, Full()
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        lowered.compile()
    words = str(caught.value)
    assert words.startswith("RESOURCE_EXHAUSTED: too much")
    assert "at the peak" in words and "model.layers[" in words
    assert "at most: nnx_sharding.remat" in words and "accumulate_gradients" in words


@pytest.mark.parametrize("compiles", [False, True])
def test_out_of_memory_at_run_time_ends_with_what_holds_it(compiles):
    """In first calls and guarded ones, which Python and C make, and of compiled programs."""

    def step(model):
        model.scale[...] += 1
        return jnp.zeros(2**44) + model.scale[...]

    def model():
        return nnx.Dict(scale=nnx.Param(jnp.float32(2)))

    fun, small = jit(step, donate_argnums=0), model()
    call = fun.lower(small).compile() if compiles else fun
    for _ in range(2):
        nnx.update(small, nnx.state(model()))
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            call(small)
        words = str(caught.value)
        assert words.startswith("RESOURCE_EXHAUSTED: ")
        assert "\n64.0 TiB at the peak" in words and "64.0 TiB outputs" in words
        assert "donating" not in words, "all that could be donated is"


def test_reads_values_of_the_main_memory_only(tmp_path):
    """Values that an operation replaces in place do not count twice."""
    (tmp_path / "m.after_optimizations-buffer-assignment.txt").write_text(
        "BufferAssignment:\n"
        "allocation 0: size 64, page 0, parameter 0, shape |f32[16]| at ShapeIndex {}:\n"
        " value: <1 x.1 @0> (size=64,offset=0): f32[16]{0}\n"
        "allocation 1: size 128, page 0, preallocated-temp:\n"
        " value: <2 a @0> (size=64,offset=0): f32[16]{0}\n"
        " value: <3 b{1} @0> (size=64,offset=0): f32[16]{0}\n"
        " value: <4 c @0> (size=64,offset=64): f32[16]{0}\n"
        "allocation 2: size 999, color 1, page 0, preallocated-temp:\n"
        " value: <5 d @1> (size=999,offset=0): f32[16]{0:S(1)}\n"
        "allocation 3: size 4, page 0, thread-local:\n"
    )
    (tmp_path / "m.after_optimizations-live-range.txt").write_text(
        "HloLiveRange (max 4):\n  InstructionSequence:\n    0:x.1\n    1:a\n    2:b\n    3:c\n"
        "  BufferLiveRange:\n    x.1{}:0-4\n    a{}:1-2\n    b{1}:2-3\n    c{}:2-4\n    d{}:1-4\n"
    )
    buffers = read_buffers(tmp_path)
    assert [one.size for one in buffers.allocations] == [64, 128]
    assert buffers.allocations[1].values[:2] == (
        Buffer("a", (), 64, 0, 1, 1),
        Buffer("b", (1,), 64, 0, 2, 3),
    )
    assert buffers.in_use() == [64, 128, 192, 192]
    assert read_buffers(tmp_path / "missing") is None
