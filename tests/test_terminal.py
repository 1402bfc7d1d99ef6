"""The pictures in the terminal, and which device holds which slice of an array."""

from __future__ import annotations

import copy
import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding, SingleDeviceSharding
from rich.console import Console

import reports
from draws import specs
from nnx_sharding import StateSharding
from nnx_sharding.analysis import parameter_table, tables
from nnx_sharding.analysis.parameters import ParameterTable
from nnx_sharding.analysis.units import bytes_text, count_text, time_text
from nnx_sharding.report import Comparison, ProgramReport, check_sharding, diff
from nnx_sharding.report.comparison import Failure, load
from nnx_sharding.report.terminal import holders_of, show_array
from zoo import P, mesh_of

MESHES = {
    "2x4": mesh_of((2, 4), ("data", "model")),
    "cube": mesh_of((2, 2, 2), ("data", "model", "x")),
    "line": mesh_of((8,), ("data",)),
    "one": mesh_of((1, 1), ("data", "model")),
}
MESH = MESHES["2x4"]


def shown(show, *args, width=100, colour=False, **options):
    """What a function prints."""
    file = io.StringIO()
    colours = {"force_terminal": True, "color_system": "standard"} if colour else {}
    console = Console(file=file, width=width, **colours)
    show(*args, console=console, **options)
    return file.getvalue()


def printed(report, **options):
    """What a console prints of an object."""
    return shown(lambda console: console.print(report), **options)


@st.composite
def shardings(draw):
    """A mesh and a spec over some of its axes, and a shape that it divides."""
    mesh, rank = MESHES[draw(st.sampled_from(sorted(MESHES)))], draw(st.integers(0, 3))
    shape = tuple(8 * draw(st.integers(1, 2)) for _ in range(rank))
    return mesh, draw(specs(mesh.axis_names, rank)), shape


@given(shardings())
def test_slices_are_those_of_jax(case):
    mesh, spec, shape = case
    sharding = NamedSharding(mesh, spec)
    held = holders_of(shape, sharding)
    spans_of = {holder: spans for spans, holders in held.items() for holder in holders}
    indices = sharding.devices_indices_map(shape)
    assert len(spans_of) == len(indices)
    for device, index in indices.items():
        expected = [dim.indices(size)[:2] for dim, size in zip(index, shape, strict=True)]
        assert list(spans_of[str(device.id)]) == expected
    # On an abstract mesh of the same shape, each at its position.
    planned = holders_of(shape, NamedSharding(mesh.abstract_mesh, spec))
    assert list(planned) == list(held)
    for spans, [position] in planned.items():
        at = dict(part.split("=") for part in position.split(", ")) if position != "all" else {}
        first = mesh.devices[tuple(int(at.get(axis, 0)) for axis in mesh.axis_names)]
        assert spans_of[str(first.id)] == spans


def test_array_of_two_dimensions():
    text = shown(show_array, (64, 256), P(None, "model"), MESH)
    assert "each device holds (64, 64)" in text
    heads, holders = text.splitlines()[1:]
    assert heads.split() == ["0:64", "64:128", "128:192", "192:256"]
    assert holders.split() == ["0", "4", "1", "5", "2", "6", "3", "7"]


def test_rows_and_columns():
    text = shown(show_array, (4, 6, 8), P("data", None, "model"), MESH, width=120)
    assert "rows are dimension 0, columns dimension 2" in text
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["0:2", "0", "1", "2", "3"],
        ["2:4", "4", "5", "6", "7"],
    ]
    text = shown(show_array, (4, 6), P("data"), MESH)
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["0:2", "0", "1", "2", "3"],
        ["2:4", "4", "5", "6", "7"],
    ]


def test_three_dimensions_and_many_columns_are_a_list():
    mesh = AbstractMesh((2, 2, 2), ("a", "b", "c"))
    text = shown(show_array, (4, 4, 4), P("a", "b", "c"), mesh)
    assert "[2:4, 0:2, 2:4]  a=1, b=0, c=1" in text
    wide = shown(show_array, (512,), P("a"), AbstractMesh((256,), ("a",)))
    assert "[510:512]  a=255" in wide


def test_placed_arrays():
    array = jax.device_put(jnp.ones((8, 4)), NamedSharding(MESH, P("data")))
    assert "P('data'" in shown(show_array, array)
    full = shown(show_array, jnp.ones(3))
    assert "full array" in full and full.split()[-1] == "0"
    on_third = SingleDeviceSharding(jax.devices()[3])
    assert shown(show_array, (3,), on_third).split()[-1] == "3"
    assert "0 1 2 3 4 5 6 7" in shown(show_array, (), P(), MESH)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((5,), TypeError, "array must be an array or a shape, got 5"),
        (("ab",), TypeError, "got 'ab'"),
        (((4,),), ValueError, "no sharding"),
        (((4,), P("data")), ValueError, "Pass mesh="),
        (((3,), P("data"), MESH), ValueError, "3"),
        (((4,), P(None, "data"), MESH), ValueError, "P"),
    ],
)
def test_wrong_arguments(args, error, message):
    with pytest.raises(error, match=message):
        shown(show_array, *args)


def test_parameters():
    model = jax.device_put(
        {"up": jnp.ones((64, 256)), "norm": jnp.ones((64,))}, NamedSharding(MESH, P("model"))
    )
    rows = parameter_table(model)
    text = printed(rows)
    assert "P('model',)" not in text and "(64,256)" in text and "P('model')" in text
    *_, total = text.splitlines()
    assert total.split() == ["total", "16.1", "KiB", "64.2", "KiB"]
    assert "\x1b" not in text
    assert "\x1b" in printed(rows, colour=True)
    assert "total" in printed(ParameterTable())
    assert "65536" in str(rows) and "65536" not in text
    assert "shard shape" in text and "shard shape" not in printed(rows, width=80)
    assert rows == list(rows)


CELLS = ("", "a", "path/é", "全角", "12345", "███", "x y  z", "a\tb", "a\nb", " lead", "trail ")


@given(st.data())
def test_text_is_laid_out_as_rich_does(data):
    """``print`` lays tables out itself, since rich is slow for thousands of rows."""
    count = data.draw(st.integers(1, 4))
    cell = st.sampled_from(CELLS)
    row = st.tuples(*[cell | st.builds(tables.text, cell, st.just("blue"))] * count)
    drawn = tables.Table(
        data.draw(row),
        data.draw(st.lists(row, max_size=4)),
        numbers=data.draw(st.integers(0, count)),
        footer=data.draw(st.none() | row),
        most=data.draw(st.sampled_from((None, 2))),
    )
    by_rich = printed(drawn, width=1000).splitlines()
    assert tables.drawn(drawn) == "\n".join(line.rstrip() for line in by_rich)


def test_names_are_not_markup():
    tree = {f"{i} {text}": jnp.ones(2) for i, text in enumerate(reports.NASTY) if text.isascii()}
    text = printed(parameter_table(tree), width=400)
    for i, name in enumerate(reports.NASTY):
        if name.isascii():
            assert f"{i} {name}" in text
    text = printed(parameter_table({"\x1b[31mred\x07\u202e": jnp.ones(2)}), width=200)
    assert r"\x1b[31mred\x07\u202e" in text


HOSTILE = "\x1b]0;hacked\x07\x9b31m\r\u202e"


def is_shown(text):
    """Whether a terminal only shows a text, and the name in it."""
    return text.replace("\n", "").isprintable() and "hacked" in text


def test_output_has_no_control_sequences():
    text = json.dumps(reports.report()).replace("blocks", json.dumps(HOSTILE)[1:-1])
    text = text.replace('"data', '"' + json.dumps(HOSTILE)[1:-1])
    report = ProgramReport.from_dict({**json.loads(text), "name": HOSTILE})
    other = dataclasses.replace(report, name="other", parameters=())
    changes = diff(report, other)
    found = Comparison({HOSTILE: report, f"{HOSTILE} failed": Failure(f"Error: {HOSTILE}")})
    rules = StateSharding({nnx.PathContains(HOSTILE): P("data"), ...: P()})
    state = {HOSTILE: nnx.Param(jnp.ones(8))}
    checked = check_sharding(state, rules, jax.make_mesh((8,), ("data",), (AxisType.Auto,)))
    own = [report, report.collectives, changes, changes[0], found, checked, parameter_table(state)]
    for each in own:
        assert is_shown(str(each)), repr(str(each))
    for each in report, found, changes:
        text = each.to_json()
        assert text.replace("\n", "").isprintable()
        assert json.loads(text) == json.loads(json.dumps(each.as_dict()))


@pytest.mark.parametrize("make", [reports.report, reports.empty, reports.nasty, reports.comparison])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_reports(make, width):
    data = make()
    before = copy.deepcopy(data)
    text = printed(load(data), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    assert data == before


def test_report():
    text = printed(load(reports.report()))
    for part in (
        "mesh data 2 × model 4",
        "4.20 M",
        "bound by memory",
        "all-reduce",
        "P(None, 'model')",
    ):
        assert part in text
    assert "arguments" in text and "host" not in text


def test_comparison():
    lines = printed(load(reports.comparison())).splitlines()
    [tp] = [line for line in lines if line.strip().startswith("tp ")]
    [dp] = [line for line in lines if line.strip().startswith("dp ")]
    assert "285 KiB *" in tp and tp.endswith("yes")
    assert "3.00 MiB  " in dp and dp.endswith("no") and "*" not in dp
    assert "pp failed: ValueError: no axis 'stage'" in lines
    only_failed = reports.comparison(reports={"pp": {"error": "no"}})
    assert "pp failed" in printed(load(only_failed))
    for data, error in ((5, TypeError), ({}, ValueError)):
        with pytest.raises(error):
            load(data)


@pytest.mark.parametrize(
    ("text", "n", "expected"),
    [
        (bytes_text, 0, "0 B"),
        (bytes_text, 1023, "1023 B"),
        (bytes_text, 1024, "1.00 KiB"),
        (bytes_text, 10 * 1024**3, "10.0 GiB"),
        (bytes_text, 1024**2 - 1, "1.00 MiB"),
        (bytes_text, None, "–"),  # noqa: RUF001
        (count_text, 999, "999"),
        (count_text, 4_200_000, "4.20 M"),
        (count_text, 0.5, "0.50"),
        (time_text, 0, "0 s"),
        (time_text, 2.5, "2.50 s"),
        (time_text, 12.34e-6, "12.3 µs"),
        (time_text, 3e-10, "0.30 ns"),
    ],
)
def test_units(text, n, expected):
    assert text(n) == expected
