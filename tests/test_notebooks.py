"""What notebooks show: each object that prints a table also has an HTML form of it.

To run the example anew and keep its outputs: ``jupyter nbconvert --execute --inplace
examples/first_program.ipynb``.
"""

from __future__ import annotations

import html
import importlib
import os
import pkgutil
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_sharding
from nnx_sharding import jit, saved_residuals
from nnx_sharding.analysis import HARDWARE
from nnx_sharding.analysis.json_codec import AsData, JsonForm
from nnx_sharding.analysis.parameters import parameter_table
from nnx_sharding.analysis.tables import Pictured
from nnx_sharding.checkpoint import contents, match_tensors, save, save_safetensors
from nnx_sharding.export import export
from nnx_sharding.partition import fsdp, make_mesh
from nnx_sharding.planning import plan
from nnx_sharding.report import check_activations, check_sharding, compare, diff

# Their texts are one line each, as parts of other texts, or their repr is the text.
ONE_LINE = {
    "_Error",
    "_Side",
    "ArrayInfo",
    "Change",
    "Collective",
    "Instruction",
    "Leaf",
    "LineCollectives",
    "MeshDescription",
    "Mismatch",
    "Retrace",
    "ShardingRow",
    "ValueType",
}


def all_classes() -> set[type]:
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(nnx_sharding.__path__, "nnx_sharding.")
        if not found.name.endswith(("__main__", "worker", "_native"))
    ]
    found = {x for module in modules for x in vars(module).values() if isinstance(x, type)}
    return {x for x in found if x.__module__.startswith("nnx_sharding")}


def objects_with_tables(folder):
    mesh = make_mesh({"data": 8})
    model = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
    sharding, x = fsdp(model, mesh=mesh, min_size=0), jnp.ones((8, 16))

    def step(model, x):
        return jnp.tanh(model(x)).sum()

    options = {"in_shardings": (sharding, P("data")), "mesh": mesh}
    lowered = jit(step, **options).lower(model, x)
    compiled = lowered.compile()
    report = compiled.report()
    comparison = compare({"fsdp": lambda *_: (sharding, P("data"))}, step, model, x, mesh=mesh)
    exported = export(jit(step))(model, x)
    save(folder / "model", model)
    save_safetensors(folder / "tensors", model, {"(.*)": "{0}"})
    return [
        contents(folder / "model"),
        match_tensors(model, folder / "tensors").table,
        compiled.roofline("TPU v5e"),
        compiled.collectives(),
        compiled.memory(),
        compiled.by_line(),
        compiled.by_module(),
        compiled.by_module().over_time,
        compiled.cost(),
        compiled.why("x"),
        compiled.activations(),
        report,
        report.cost,
        comparison,
        diff(report, jit(step).lower(model, x).compile().report("step")),
        parameter_table(model),
        check_sharding(model, sharding, mesh),
        check_activations(jit(step, **options), model, x),
        saved_residuals(step, model, x),
        exported,
        exported.manifest,
        plan(step, model, x, devices=8, strategies=["dp"], most=1),
        HARDWARE["TPU v5e"],
    ]


@pytest.mark.usefixtures("compile_here")
def test_all_objects_with_tables(tmp_path):
    objects = objects_with_tables(tmp_path)
    for one in objects:
        text = str(one)
        page = one._repr_html_()
        shown = html.unescape(re.sub("<[^>]+>", "", page))
        # Rules may be longer, and bytes have units.
        words = {word for word in text.split() if word.strip("-0123456789")}
        assert words and words <= set(shown.split()), type(one)
        assert page.startswith("<div") and page.rstrip().endswith("</div>")
        # Pages of nbconvert set neither, and break the rows of a wide table.
        assert "font-family: monospace; white-space: pre;" in page
    pictured = {x for x in all_classes() if issubclass(x, Pictured)}
    pictured -= {Pictured, AsData, JsonForm}
    assert {type(one) for one in objects} == pictured


def test_what_prints_several_lines_is_among_them():
    own = {x for x in all_classes() if "__str__" in vars(x) and not issubclass(x, Pictured)}
    assert {x.__name__ for x in own} == ONE_LINE


def tables(notebook) -> list[str]:
    """Returns the HTML of all outputs that have some."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [x.data["text/html"] for x in outputs if "text/html" in x.get("data", {})]


def test_example_runs_and_shows_what_it_did():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    path = Path(__file__).parents[1] / "examples" / "first_program.ipynb"
    notebook = nbformat.read(path, as_version=4)
    stored = tables(notebook)
    assert len(stored) == 3
    # The kernel compiles as a user's does: the figures are those of an optimized program.
    changed = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "PYTHONWARNINGS": "error::UserWarning"}
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3")
    client.execute(env={**os.environ, **changed})
    if jax.__version_info__ >= (0, 12):  # older releases compile other programs
        assert tables(notebook) == stored
    # Collectives name the cell, not the file that IPython made of it.
    assert re.search(r"In\[\d+\]:\d+", stored[1])
