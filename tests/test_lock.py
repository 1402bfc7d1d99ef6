"""Lock files: what they hold, what changes them, and what writes them."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from nnx_sharding import jit, tensor_parallel, value_and_grad
from nnx_sharding.analysis.units import bytes_text
from nnx_sharding.cli.main import main
from nnx_sharding.partition import fsdp, make_mesh, override, with_sharding_constraint
from nnx_sharding.report import ProgramReport
from nnx_sharding.testing import assert_unchanged
from nnx_sharding.testing.lock import (
    _HEAD,
    _figure_texts,
    _parse_figure,
    lock_text,
    report_with_rules,
)

WIDTH, ROWS = 16, 32


class Layer(nnx.Module):
    def __init__(self, rngs, is_gathering=False):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.is_gathering = is_gathering

    def __call__(self, x):
        hidden = nnx.relu(self.up(x))
        if self.is_gathering:
            hidden = with_sharding_constraint(hidden, P())
        return x + self.down(hidden)


def layers(rngs, is_gathering=False, count=3):
    return nnx.Sequential(*(Layer(rngs, is_gathering) for _ in range(count)))


def loss(model, x):
    return (model(x) ** 2).mean()


def compiled(strategy=True, rows=ROWS, **options):
    mesh = make_mesh({"data": 4}, axis_types=AxisType.Auto, devices=jax.devices()[:4])
    model = nnx.eval_shape(lambda: layers(nnx.Rngs(0), **options))
    sharding = fsdp(model, mesh=mesh, min_size=0) if strategy else None
    fun = jit(value_and_grad(loss), in_shardings=(sharding, P("data")), mesh=mesh)
    return fun.lower(model, jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)).compile()


@pytest.fixture(scope="module")
def report():
    return compiled().report("step", by_module=True)


@pytest.fixture
def lock(report, tmp_path):
    path = tmp_path / "step.lock"
    assert_unchanged(report, path, update=True)
    return path


BYTES = {
    "[collectives]": {"bytes sent"},
    "[modules]": {"bytes accessed", "bytes at the peak"},
    "[lines]": {"bytes accessed", "bytes at the peak"},
}


def test_text(report):
    text = lock_text(report)
    sections = [block.splitlines() for block in text.split("\n\n")]
    assert all(lines[1:] == sorted(lines[1:]) for lines in sections[1:])
    # 3 kernels of 16 × 64 float32, over 4 devices.
    size = 3 * WIDTH * 4 * WIDTH * 4 // 4
    kernel = "model.layers[*].up.kernel | float32[16,64] P(None, 'data')"
    assert f"{kernel} | rule fsdp over dimension 1 | {size:,} bytes | 3 arrays" in text
    # A gather of each sends 3 quarters of it.
    gathered = "all-gather over data for parameter of model.layers[*].up.kernel | "
    assert f"{gathered}{3 * WIDTH * 4 * WIDTH * 4 * 3 // 4:,} bytes sent" in text
    assert f"test_lock.py: {'hidden = nnx.relu(self.up(x))'} | " in text
    # Each section says which bytes these are. Those of arguments are held.
    for lines in sections[1:]:
        units = {*re.findall(r"[\d,]+ (bytes?(?: [a-z ]+)?)(?= \||$)", "\n".join(lines), re.M)}
        assert units <= BYTES.get(lines[0], {"bytes"}), (lines[0], units)
    assert not re.search(r"/\w|HloModule|:\d+", text)  # no folder, no program, no line number
    assert lock_text(compiled(count=6).report(by_module=True)).count("\n") == text.count("\n")
    assert len(text) < 4000


def test_what_is_in_the_file_is_the_same(report, lock):
    before = lock.read_text()
    assert_unchanged(report, lock)
    assert_unchanged(dataclasses.replace(report, by_module=None, by_line=None), lock)
    assert_unchanged(report, lock, update=True)
    assert lock.read_text() == before


CHANGES = {
    "gather": (
        {"is_gathering": True},
        [
            r"all-\w+ over data for \w+ of model.layers\[\*\]",
            r"now at test_lock.py:\d+ in model.layers\[\*\]",
            "temporaries: .* → ",
        ],
    ),
    "layers": ({"count": 4}, [r"model.layers\[\*\].up.kernel: arrays: 3 → 4 \(\+33.3%\)"]),
    "specs": (
        {"strategy": False},
        [r"up.kernel: float32\[16,64\] P\(None, 'data'\) → float32\[16,64\] P\(\)"],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes(lock, name):
    options, words = CHANGES[name]
    with pytest.raises(AssertionError, match=r"step is not as step\.lock says") as error:
        assert_unchanged(compiled(**options).report("step"), lock)
    for pattern in words:
        assert re.search(pattern, str(error.value)), f"{pattern}\n{error.value}"


def test_totals_and_remedy_come_first(report, lock):
    """Then what a user changes, such as specs, before what follows from it."""
    with pytest.raises(AssertionError) as error:
        assert_unchanged(compiled(is_gathering=True, count=4).report("step"), lock)
    first, remedy, *details = str(error.value).splitlines()
    before = {"peak": report.memory.peak, "bytes sent": report.collectives.bytes_sent}
    for name, size in before.items():
        assert f"{name}: {bytes_text(size)} → " in first
    assert remedy.startswith("If this is wanted, write the file again")
    assert details.index("arguments") < details.index("memory of one device")
    # A total that is equal is named without a figure.
    memory = dataclasses.replace(report.memory, peak=2 * report.memory.peak)
    with pytest.raises(AssertionError, match=r"; as before: bytes sent, flops\.\n"):
        assert_unchanged(dataclasses.replace(report, memory=memory), lock)


def test_the_headline_names_what_differs(report, lock):
    """Where all totals are within the tolerance, the change that is the reason comes first."""
    tiny = dataclasses.replace(
        report.collectives[0], kind="collective-permute", bytes_sent=1, times=1, parameters=()
    )
    extra = dataclasses.replace(
        report, collectives=type(report.collectives)([*report.collectives, tiny])
    )
    with pytest.raises(AssertionError) as error:
        assert_unchanged(extra, lock)
    first = str(error.value).splitlines()[0]
    assert "says: collective-permute over data for " in first, first
    assert first.endswith("; within the tolerance: bytes sent; as before: peak, flops.")


def test_rules(tmp_path):
    """A rule that decides instead of another is named, also where the spec is the same."""
    mesh = make_mesh({"data": 4}, axis_types=AxisType.Auto, devices=jax.devices()[:4])
    model = nnx.eval_shape(lambda: layers(nnx.Rngs(0)))
    x, path = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), tmp_path / "step.lock"

    def step(sharding):
        return jit(loss, in_shardings=(sharding, P("data")), mesh=mesh).lower(model, x).compile()

    strategy = fsdp(model, mesh=mesh, min_size=0)
    assert_unchanged(step(strategy), path, update=True)
    text = path.read_text()
    kernel = (
        "model.layers[*].up.kernel | float32[16,64] P(None, 'data') | rule fsdp over dimension 1 | "
    )
    assert kernel in text and "x | float32[32,16] P('data', None) | rule in_shardings | " in text
    same = override(strategy, {"up/kernel$": P(None, "data")})
    with pytest.raises(AssertionError) as error:
        assert_unchanged(step(same), path)
    changed = "  model.layers[*].up.kernel: rule: fsdp over dimension 1 → PathRegex('up/kernel$')"
    assert str(error.value).endswith(f"\narguments\n{changed}")
    assert str(error.value).count("→") == 2  # in the headline and below
    # A report without reasons says nothing of rules.
    assert_unchanged(step(same).report(), path)
    both = fsdp(model, mesh=mesh, min_size=0, base=override(strategy, {"up/kernel$": P("data")}))
    assert_unchanged(step(both), path, update=True)
    text = path.read_text()
    assert "up.kernel | float32[16,64] P('data', None) | rule PathRegex('up/kernel$') | " in text
    assert "down.kernel | float32[64,16] P('data', None) | rule fsdp over dimension 0 | " in text


ROLES = {
    "up.kernel": "float32[16,64] P('data', 'model') | rule column of tensor_parallel, fsdp over "
    "dimension 0",
    "up.bias": "float32[64] P(('model', 'data')) | rule column of tensor_parallel, fsdp over "
    "dimension 0",
    "down.kernel": "float32[64,16] P('model', 'data') | rule row of tensor_parallel, fsdp over "
    "dimension 1",
    "down.bias": "float32[16] P('data') | rule fsdp over dimension 0",
}


def test_what_strategies_shard():
    mesh = make_mesh({"data": 2, "model": 2}, axis_types=AxisType.Auto, devices=jax.devices()[:4])
    model = nnx.eval_shape(lambda: layers(nnx.Rngs(0)))
    sharding = fsdp(model, mesh=mesh, min_size=0, base=tensor_parallel(model, mesh=mesh))
    fun = jit(loss, in_shardings=(sharding, P("data")), mesh=mesh)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    text = lock_text(report_with_rules(fun.lower(model, x).compile()))
    for name, line in ROLES.items():
        assert f"model.layers[*].{name} | {line} | " in text, text


def test_tolerance(report, lock):
    cost = dataclasses.replace(report.cost, flops=report.cost.flops * 1.015)
    more = dataclasses.replace(report, cost=cost)
    assert_unchanged(more, lock)
    with pytest.raises(AssertionError, match=r"flops: .*\(\+1.5%\)"):
        assert_unchanged(more, lock, tolerance=0.01)
    line = report.by_line.rows[0]
    lines = dataclasses.replace(
        report.by_line,
        rows=(dataclasses.replace(line, flops=2 * line.flops), *report.by_line.rows[1:]),
    )
    with pytest.raises(AssertionError) as error:
        assert_unchanged(dataclasses.replace(report, by_line=lines), lock)
    assert f"lines\n  test_lock.py: {line.code}: flops: " in str(error.value)


def test_other_versions_are_said_and_no_change(report, lock):
    other = dataclasses.replace(report, made_with={**report.made_with, "jax": "0.99"})
    assert_unchanged(other, lock)
    assert_unchanged(dataclasses.replace(other, name="other"), lock)
    with pytest.raises(AssertionError, match=rf"made with jax {jax.__version__} → 0\.99"):
        assert_unchanged(dataclasses.replace(other, num_devices=8), lock)


@pytest.mark.parametrize(
    "text",
    [
        "<<<<<<< ours\n",
        "",
        f"{_HEAD}[program]\nmesh | a\nmesh | b\n",
        f"{_HEAD}[program]\nmesh\n",
        f"{_HEAD}mesh | 2\n",
    ],
)
def test_a_damaged_file(report, tmp_path, text):
    path = tmp_path / "step.lock"
    path.write_text(text)
    with pytest.raises(ValueError, match="lock file"):
        assert_unchanged(report, path)


def test_another_version(report, tmp_path):
    path = tmp_path / "step.lock"
    path.write_text(_HEAD.replace("version 2", "version 1"))
    with pytest.raises(ValueError, match=r"version 1 of lock files, .* only reads version 2: w"):
        assert_unchanged(report, path)


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        ({"bytes sent": 1, "runs": 1, "instructions": 1}, "1 byte sent | 1 run | 1 instruction"),
        ({"flops": 1, "bytes at the peak": 1}, "1 flop | 1 byte at the peak"),
        ({"bytes": 2048, "arrays": 2}, "2,048 bytes | 2 arrays"),
    ],
)
def test_figures_are_read_as_written(figures, text):
    texts = [*_figure_texts(figures)]
    assert " | ".join(texts) == text and dict(map(_parse_figure, texts)) == figures


def test_no_file(report, tmp_path):
    with pytest.raises(FileNotFoundError, match="pytest --update-locks"):
        assert_unchanged(report, tmp_path / "step.lock")


def test_report_without_the_program(report, tmp_path):
    report.save(tmp_path / "with.json")
    report.save(tmp_path / "without.json", hlo=False)
    loaded = ProgramReport.load(tmp_path / "without.json")
    assert loaded == dataclasses.replace(report, hlo=None)
    assert loaded.by_line == report.by_line
    assert ProgramReport.load(tmp_path / "with.json") == report


PROGRAM = """\
    import jax, jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    from nnx_sharding import jit

    def step(mesh):
        f = jit(lambda x: x.sum(0), in_shardings=P("data"), mesh=mesh)
        return f, jax.ShapeDtypeStruct((8, 64 * len(mesh.axis_names)), jnp.float32)
    """


def test_commands(tmp_path, monkeypatch, capsys):
    (tmp_path / "train_for_lock.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    target = ["train_for_lock.py:step", "--mesh", "data=4"]
    assert main(["check", *target]) == 2
    write = "nnx-sharding lock train_for_lock.py:step, with the same options"
    assert f"no lock file step.lock; write it: {write}" in capsys.readouterr().err
    assert main(["lock", *target]) == 0
    assert "wrote step.lock" in capsys.readouterr().out
    assert "all-reduce over data" in (tmp_path / "step.lock").read_text()
    assert main(["check", *target]) == 0
    assert "no changes" in capsys.readouterr().out
    assert main(["check", *target[:-1], "data=4,model=2"]) == 1
    shown = capsys.readouterr().out
    assert "mesh: data 4 → data 4 × model 2" in shown and "x: float32[8,64] P('data'" in shown
    assert f"write step.lock again: {write}" in shown
    assert main(["lock", *target, "--file", "other.lock", "--by-module"]) == 0
    assert "[lines]\n" in (tmp_path / "other.lock").read_text()


def test_option_of_pytest(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = "nnx_sharding.testing.pytest_options"')
    test = """\
        import jax
        from nnx_sharding import jit
        from nnx_sharding.testing import assert_unchanged

        def test_step():
            compiled = jit(lambda x: 2 * x).lower(jax.ShapeDtypeStruct((8,), "float32")).compile()
            assert_unchanged(compiled, "step.lock")
        """
    (tmp_path / "test_it.py").write_text(textwrap.dedent(test))
    for options, code in ([], 1), (["--update-locks"], 0), ([], 0):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == code, run.stdout


def test_what_is_unknown_is_not_zero(tmp_path):
    """A report that lost its figures does not pass for one that sends and holds nothing."""
    report = compiled().report("step")
    lost = dataclasses.replace(report, memory=None, cost=None, collectives=None)
    text = lock_text(lost)
    for line in ("peak | unknown", "flops | unknown", "all | unknown"):
        assert line in text.splitlines(), text
    path = tmp_path / "step.lock"
    assert_unchanged(report, path, update=True)
    with pytest.raises(AssertionError, match=r"flops: .* → unknown"):
        assert_unchanged(lost, path)
    nothing = dataclasses.replace(report, collectives=())
    assert_unchanged(lost, path, update=True)
    with pytest.raises(AssertionError, match="all: unknown → "):
        assert_unchanged(dataclasses.replace(lost, collectives=()), path)
    assert "unknown" not in lock_text(nothing)


def test_a_module_whose_figures_are_unknown(report, lock):
    """Unknown flops of a module are written, and are not the zero of another module."""
    module, *others = report.by_module.rows
    lost = dataclasses.replace(module, flops=None)
    table = dataclasses.replace(report.by_module, rows=(lost, *others))
    lost_report = dataclasses.replace(report, by_module=table)
    [line] = {*lock_text(lost_report).splitlines()} - {*lock_text(report).splitlines()}
    assert " | unknown flops" in line
    with pytest.raises(AssertionError, match="unknown flops"):
        assert_unchanged(lost_report, lock)
    assert_unchanged(lost_report, lock, update=True)
    assert_unchanged(lost_report, lock)
