"""Types and cost by line of the user's code, against the totals of the program."""

from __future__ import annotations

import collections
import html
import inspect
import json
import math
import re
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from module_programs import PROGRAMS
from nnx_sharding import jit, stack, tensor_parallel, value_and_grad
from nnx_sharding.analysis import HARDWARE
from nnx_sharding.analysis.inferred_specs import FROM_PROGRAM, spec_of_shard
from nnx_sharding.analysis.measured import measured_seconds
from nnx_sharding.analysis.units import UNKNOWN
from nnx_sharding.cli.main import main
from nnx_sharding.partition import fsdp, make_mesh
from nnx_sharding.transforms import module_memory

WIDTH, ROWS, LAYERS = 32, 64, 3


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        hidden = self.up(x)
        hidden = jnp.where(hidden > 0, hidden, 0.5)
        return x + self.down(hidden)


def sequential(rngs):
    return nnx.Sequential(*(Layer(rngs) for _ in range(LAYERS)))


class Stacked(nnx.Module):
    def __init__(self, rngs):
        self.layers = stack([Layer(rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        return self.layers(x)


def loss(model, x):
    return (model(x) ** 2).mean()


def lines_of(code, owner=Layer.__call__):
    """The number of the line of a function with this code."""
    source, start = inspect.getsourcelines(owner)
    return start + next(i for i, line in enumerate(source) if code in line)


def traced(make, axis_type, sizes=None, fun=None):
    sizes = sizes or {"data": 4}
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = make_mesh(sizes, axis_types=axis_type, devices=devices)
    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    sharding = fsdp(model, mesh=mesh, min_size=0)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    fun = jit(fun or value_and_grad(loss), in_shardings=(sharding, P("data")), mesh=mesh)
    return fun.trace(model, x)


CASES = {
    "auto": lambda: traced(sequential, AxisType.Auto).lower(),
    "explicit": lambda: traced(sequential, AxisType.Explicit).lower(),
    "stack": lambda: traced(Stacked, AxisType.Auto).lower(),
    "stack, explicit": lambda: traced(Stacked, AxisType.Explicit).lower(),
    "one device": lambda: jit(loss).lower(sequential(nnx.Rngs(0)), jnp.ones((ROWS, WIDTH))),
    **{name: PROGRAMS[name] for name in PROGRAMS if name != "mlp"},
}


@pytest.mark.parametrize("name", CASES)
def test_sums_are_those_of_the_program(name):
    compiled = CASES[name]().compile()
    table = compiled.by_line(hardware="TPU v5e")
    cost, collectives = compiled.cost(), compiled.collectives()
    assert table.why is None
    assert sum(row.flops for row in table.rows) == pytest.approx(cost.flops, rel=0.01)
    accessed = sum(row.bytes for row in table.rows)
    assert accessed == pytest.approx(cost.bytes_accessed, rel=0.01)
    sent = [part for row in table.rows for part in row.collectives]
    assert sum(part.bytes for part in sent) == collectives.bytes_sent
    totals = {}
    for part in sent:
        key = part.kind, part.axes
        totals[key] = totals.get(key, 0) + part.count
    # A collective that the compiler merged from several lines counts in each of them.
    numbers = {key: number for key, (number, _) in collectives.totals().items()}
    assert {*totals} == {*numbers} and all(totals[key] >= numbers[key] for key in numbers)
    assert sum(row.at_peak for row in table.rows) == compiled.by_module().in_use
    # The user's lines do nearly all of it; the last row is what has none.
    assert [row.line is None for row in table.rows] == [False] * (len(table.rows) - 1) + [True]
    assert table.rows[-1].flops <= 0.05 * cost.flops
    assert json.loads(json.dumps(table.as_dict()))["rows"][0]["code"] == table.rows[0].code


@pytest.fixture(scope="module")
def auto():
    return CASES["auto"]().compile()


def test_layers_are_folded(auto):
    """One row for a line of a method; its types are counted over layers."""
    table = auto.by_line()
    [row] = [x for x in table.rows if x.line == lines_of("self.up(x)")]
    assert (row.file, row.code) == (__file__, "hidden = self.up(x)")
    assert set(row.modules) == {f"model.layers[{i}].up" for i in range(LAYERS)}
    forward = [kind for kind in row.types if not kind.backward]
    assert (forward[0].shape, forward[0].dtype) == ((ROWS, 4 * WIDTH), "float32")
    assert forward[0].count == 2 * LAYERS  # the product, and its sum with the bias
    product = 2 * ROWS // 4 * WIDTH * 4 * WIDTH * LAYERS
    # Forward, and the gradients of the kernels and but for the first layer's of the input.
    assert row.flops == pytest.approx((3 - 1 / LAYERS) * product, rel=0.05)


def test_products_whose_names_the_compiler_drops():
    """XLA for CPUs drops those of batched products if a device has one row, not if it has two."""

    def turned(x):
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * 0.6 - b * 0.8, b * 0.6 + a * 0.8], -1)

    def attention(x, kernel):
        q, k = turned(x @ kernel), turned(x)
        return jax.nn.dot_product_attention(q, k, x).sum()

    def flops_by_line(rows):
        x, kernel = jnp.ones((rows, 64, 4, 32)), jnp.ones((32, 32))
        step = jit(jax.grad(attention, argnums=(0, 1)), in_shardings=(P("data"), P()), mesh=mesh)
        table = step.lower(x, kernel).compile().by_line()
        return {row.code: row.flops for row in table.rows if row.flops}

    mesh = make_mesh({"data": 8})
    one, two = flops_by_line(8), flops_by_line(16)
    assert one.keys() == two.keys()
    for code, flops in one.items():
        assert two[code] == pytest.approx(2 * flops, rel=0.2), code


def test_no_line_that_compiles_is_listed(auto):
    files = {row.file for row in auto.by_line().rows}
    assert files == {__file__, None}
    first = min(row.line for row in auto.by_line().rows if row.line)
    assert first >= lines_of("self.up(x)")
    assert not any("lower" in row.code or "trace" in row.code for row in auto.by_line().rows)


def test_a_cached_function_of_jax_has_the_line_of_each_call():
    def run(x):
        first = jnp.where(x > 0, x, 0.5)
        return jnp.where(first > 1, first, 0.5)

    table = jit(run).trace(jnp.ones(7)).by_line()
    made = {row.code.split(" = ")[0]: [x.shape for x in row.types] for row in table.rows}
    assert [*made] == ["first", "return jnp.where(first > 1, first, 0.5)"]
    assert all((7,) in shapes for shapes in made.values())


def test_types_of_a_trace_on_explicit_axes():
    mesh = make_mesh({"data": 2, "model": 4}, axis_types=AxisType.Explicit)
    model = nnx.eval_shape(lambda: Stacked(nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    table = jit(loss, in_shardings=(P(), P("data")), mesh=mesh).trace(model, x).by_line()
    [row] = [x for x in table.rows if x.line == lines_of("return x + self.down")]
    assert row.types[0].spec == P("data", None) and row.types[0].shape == (ROWS, WIDTH)
    assert row.types[0].count == LAYERS * 3  # the product, and the sums with bias and input
    assert (row.flops, row.bytes, row.at_peak, row.collectives) == (None,) * 4
    assert "not compiled" in table.why
    assert all(kind.spec is not None for kind in row.types)
    shown = str(table)
    assert "P('data', None)" in shown
    # Columns that are unknown in all rows are left out, as the line `unknown` says.
    assert "?" not in shown and UNKNOWN not in shown
    assert "flops" not in shown and "collectives" not in shown
    assert "unknown: figures, as the program is not compiled" in shown


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_types_of_a_trace_of_layers_on_auto_axes(axis_type):
    """The strategy runs layers on Auto axes in any case."""
    table = traced(sequential, axis_type).by_line()
    [row] = [x for x in table.rows if x.line == lines_of("self.up(x)")]
    # But for what the strategy constrains: FSDP's gathered kernel, and the batch of activations.
    specs = {kind.shape: kind.spec for kind in row.types if not kind.backward and kind.spec}
    assert specs[WIDTH, 4 * WIDTH] == P(None, None)
    assert any(kind.spec is None for kind in row.types)
    assert "the compiler chooses" in table.why_types


def test_specs_on_auto_axes_are_those_of_the_program(auto):
    table = auto.by_line()
    [row] = [x for x in table.rows if x.line == lines_of("self.up(x)")]
    assert row.types[0].spec == P("data", None)
    assert FROM_PROGRAM in table.why_types


@pytest.mark.parametrize(
    ("shape", "shard", "sizes", "spec"),
    [
        ((8, 64), (4, 16), {"data": 2, "model": 4}, P("data", "model")),
        ((8, 64), (8, 64), {"data": 2, "model": 4}, P(None, None)),
        ((8, 64), (1, 64), {"data": 2, "model": 4}, None),  # in either order
        ((8, 64), (4, 64), {"data": 2, "model": 2}, None),  # either
        ((8, 64), (3, 64), {"data": 2, "model": 4}, None),  # neither
        ((7,), (4,), {"data": 2}, P("data")),  # padded
        ((1,), (1,), {"data": 2}, None),  # as is what is padded to one row for each
        ((), (), {"data": 2}, P()),
    ],
)
def test_spec_of_a_shard(shape, shard, sizes, spec):
    assert spec_of_shard(shape, shard, sizes) == spec


PROGRAM = """\
    import jax, jax.numpy as jnp
    from flax import nnx
    from jax.sharding import PartitionSpec as P
    from nnx_sharding import jit
    from nnx_sharding.partition import fsdp

    def apply(model, x):
        return model(x).sum()

    def step(mesh):
        model = nnx.eval_shape(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)))
        sharding = fsdp(model, mesh=mesh, min_size=0)
        f = jit(apply, in_shardings=(sharding, P("data")), mesh=mesh)
        return f, model, jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def traced(mesh):
        f, *args = step(mesh)
        return f.trace(*args)

    def nothing(mesh):
        return 3
    """


@pytest.mark.parametrize(
    ("function", "options", "code", "words"),
    [
        ("step", [], 0, ["return model(x).sum()", "no line of yours", "all-"]),
        ("step", ["--all"], 0, ["in model", "f32[8,16]"]),
        ("traced", [], 0, ["return model(x).sum()", "not compiled"]),
        ("nothing", [], 1, ["returned 3. It has to return"]),
        ("stepp", [], 2, ["no 'stepp'; did you mean 'step'"]),
    ],
)
def test_command(tmp_path, monkeypatch, capsys, function, options, code, words):
    file = tmp_path / f"source_{function}_{len(options)}.py"
    file.write_text(textwrap.dedent(PROGRAM))
    monkeypatch.setattr(sys, "path", [*sys.path])
    mesh = [] if code == 1 else ["--json", str(tmp_path / "lines.json")]
    assert main(["source", f"{file}:{function}", "--mesh", "data=4", *options, *mesh]) == code
    shown = "".join(capsys.readouterr())
    assert all(word in shown for word in words), shown
    if code == 0:
        rows = json.loads((tmp_path / "lines.json").read_text())["rows"]
        assert rows[0]["file"] == str(file) and rows[0]["code"] in shown


def test_command_with_a_bad_path(capsys):
    assert main(["source", "nowhere.py:step", "--mesh", "data=4"]) == 2
    assert "no such file: nowhere.py" in capsys.readouterr().err


def test_seconds_are_of_the_hardware(auto):
    rows = auto.by_line(hardware=HARDWARE["TPU v5e"]).rows
    assert all(row.seconds is not None for row in rows) and sum(x.seconds for x in rows) > 0
    assert all(row.seconds is None for row in auto.by_line().rows)  # of CPUs nothing is known


def test_the_hottest_lines_stand_out_in_notebooks(auto):
    """Each of the products has a fifth of the flops or more, what adds up the loss next to none."""
    page = auto.by_line()._repr_html_()
    styles = {}
    for style, words in re.findall(r'<span style="([^"]*)">([^<]*)</span>', page):
        styles[html.unescape(words).strip()] = style
    assert "color: #d32f2f" in styles["hidden = self.up(x)"]
    assert "return (model(x) ** 2).mean()" not in styles


def test_measured_times_by_line(tmp_path):
    """A line that computes a thousand times as much takes most of the measured time."""

    def run(x):
        small = jnp.tanh(x[:8])
        large = x @ x @ x @ x
        return small.sum() + large.sum()

    compiled = jit(run).lower(x := jnp.ones((512, 512))).compile()
    compiled(x)
    with jax.profiler.trace(tmp_path):
        for _ in range(3):
            jax.block_until_ready(compiled(x))
    [file] = tmp_path.rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(file))
    table = compiled.by_line(profile=profile)
    assert table == compiled.by_line(profile=tmp_path) == compiled.by_line(profile=file)
    measured = {row.code: row.measured for row in table.rows}
    total = sum(measured.values())
    assert 0 < total < 10 and all(x >= 0 for x in measured.values())
    assert measured["large = x @ x @ x @ x"] > 0.5 * total
    assert "measured" in str(table) and "measured" not in str(compiled.by_line())
    other = jit(lambda x: x + 1).lower(x).compile()
    with pytest.raises(ValueError, match="has no operation of jit__lambda"):
        other.by_line(profile=tmp_path)
    smaller = jit(run).lower(part := x[:256, :256]).compile()  # of the same name
    with jax.profiler.trace(tmp_path / "both"):
        jax.block_until_ready((compiled(x), smaller(part)))
    with pytest.raises(ValueError, match="operations of 2 programs that are called jit_run"):
        compiled.by_line(profile=tmp_path / "both")


@pytest.mark.parametrize("is_sharded", [False, True])
def test_measured_times_by_module(tmp_path, is_sharded):
    """The times of modules are those of the lines, joined by another key."""

    class Model(nnx.Module):
        def __init__(self):
            self.small = nnx.Linear(512, 8, rngs=nnx.Rngs(0))
            self.large = nnx.List([nnx.Linear(512, 512, rngs=nnx.Rngs(i)) for i in range(2)])

        def __call__(self, x):
            for layer in self.large:
                x = nnx.relu(layer(x))
            return self.small(x)

    model, options = Model(), {}
    if is_sharded:
        mesh = make_mesh({"data": 2, "model": 4}, AxisType.Auto)
        options = {"in_shardings": (tensor_parallel(model, mesh=mesh), P("data")), "mesh": mesh}
    step = jit(lambda model, x: value_and_grad(lambda m: (m(x) ** 2).mean())(model), **options)
    compiled = step.lower(model, x := jnp.ones((1024, 512))).compile()
    compiled(model, x)
    with jax.profiler.trace(tmp_path):
        for _ in range(3):
            jax.block_until_ready(compiled(model, x))
    table, lines = compiled.by_module(profile=tmp_path), compiled.by_line(profile=tmp_path)
    total = sum(row.measured for row in lines.rows)
    assert sum(row.measured for row in table.rows) == pytest.approx(total)
    large, small = table.total("model.large"), table.total("model.small")
    assert large.measured > 0 and small.measured > 0
    if not is_sharded:  # no instruction is for several modules
        program = compiled._figures.dumped.module
        names = {x.name: x.operation for part in program.computations for x in part.instructions}
        times = measured_seconds(tmp_path, compiled._figures.module)
        by_name = sum(time for name, time in times.items() if "/large[" in names[name])
        assert large.measured == pytest.approx(by_name)
    assert table.total("model.large", backward=True).measured > 0
    assert "measured" in str(table) and "measured" not in str(compiled.by_module())
    shallow = compiled.by_module(1, profile=tmp_path)
    assert shallow.total("model.large").measured == pytest.approx(large.measured)
    assert compiled.by_module().total().measured is None


def test_specs_where_shapes_do_not_say_them():
    """Axes of one size, and several shapes of one rank: known from the sharding of each value."""
    mesh = make_mesh({"data": 2, "model": 2}, axis_types=AxisType.Auto, devices=jax.devices()[:4])
    model = nnx.eval_shape(lambda: sequential(nnx.Rngs(0)))
    shardings = tensor_parallel(model, mesh=mesh), P("data")
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    table = jit(loss, in_shardings=shardings, mesh=mesh).lower(model, x).compile().by_line()
    rows = {row.line: {kind.shape: kind.spec for kind in row.types} for row in table.rows}
    assert rows[lines_of("self.up(x)")][ROWS, 4 * WIDTH] == P("data", "model")
    assert rows[lines_of("self.down(hidden)")][ROWS, WIDTH] == P("data", None)


def test_a_report_computes_work_and_collectives_once(monkeypatch):
    """They are read from the program that is compiled once more, for both tables."""
    counts = collections.Counter()

    def counted(name):
        function = getattr(module_memory, name)

        def count(*args):
            counts[name] += 1
            return function(*args)

        return count

    for name in ("executed_work", "collectives_of"):
        monkeypatch.setattr(module_memory, name, counted(name))
    compiled = CASES["one device"]().compile()
    compiled.report(by_module=True)
    compiled.by_line(hardware="TPU v5e")
    assert counts == {"executed_work": 1, "collectives_of": 1}
