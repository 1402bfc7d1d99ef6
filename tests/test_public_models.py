"""The page of public models: it is what was measured, and a measure of a model of our own."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.public import page
from benchmarks.public.measures import MEASURES, shares
from benchmarks.public.registry import MODELS, Program, PublicModel


def test_page_has_the_results():
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.tables(page.load()) in text


def test_results_are_of_models_in_the_registry():
    names = [f"{model.source} {model.name}" for model in MODELS]
    assert len(names) == len({*names}) >= 15
    results = page.load()
    assert {*results} <= {*names}
    assert {measure for of_model in results.values() for measure in of_model} <= {*MEASURES}


def test_shares_of_a_model():
    """An embedding is sharded, and a vector that belongs to no layer is not."""

    def make(rngs):
        return nnx.Dict(embed=nnx.Embed(256, 64, rngs=rngs), free=nnx.Param(jnp.ones(64)))

    row = jax.ShapeDtypeStruct((16,), jnp.int32)
    program = Program(make, row, lambda model, x: model.embed(x).sum())
    found = shares(PublicModel("table", "ours", lambda size: program))
    whole = 64
    assert found["parameters"] == 256 * 64 + whole
    assert found["tensor_parallel"] == 1 - whole / found["parameters"]


def test_memory_that_a_chip_lacks_is_marked():
    fits, lacks = ({"bytes": 2**34, "fits": fits} for fits in (True, False))
    measures = {
        "memory": {"result": {"v5e-16": lacks, "v5p-8": fits}},
    }
    text = page.tables({"a b": measures})
    assert "| not run | 16.00 ✗ | 16.00 |\n" in text


def test_what_failed_or_was_not_run_has_its_reason():
    failed = {"failed": "ValueError: no stages; compared with the first one: a. Make some."}
    results = {
        "a b": {"Auto": {"result": "works"}, "Explicit": failed},
        "a c": {"shares": {"not run": "No module named 'a'"}, "Explicit": failed},
    }
    text = page.tables(results)
    assert "| not run | ✗ [1] |" in text
    assert "- Auto: 1 × works, 1 × not run." in text
    assert "1. no stages\n2. No module named 'a'\n" in text
