"""What ``import nnx_sharding`` imports, and what it leaves out."""

from __future__ import annotations

import datetime
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import nnx_sharding

ON_DEMAND = sorted(nnx_sharding._MODULES)


def test_parts_are_imported_on_demand():
    folder = Path(nnx_sharding.__file__).parent
    pages = {page.stem for page in (folder.parent / "docs" / "reference").glob("*.md")}
    documented = {part.name for part in folder.iterdir() if part.name in pages and part.is_dir()}
    assert documented <= {*ON_DEMAND, "transforms"}
    for name in ON_DEMAND:
        assert getattr(nnx_sharding, name) is importlib.import_module(f"nnx_sharding.{name}")
        assert name in dir(nnx_sharding)


def test_unknown_names():
    with pytest.raises(AttributeError, match="no attribute 'placment'"):
        nnx_sharding.placment  # noqa: B018


@pytest.mark.gate
def test_nothing_else_is_imported():
    unwanted = [*(f"nnx_sharding.{name}" for name in ON_DEMAND), "orbax.checkpoint.checkpointers"]
    unwanted = [name for name in unwanted if name not in NEEDED]
    program = (
        "import sys, flax.nnx; before = set(sys.modules); import nnx_sharding; "
        f"print(sorted((set(sys.modules) - before) & {set(unwanted)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


# `stages` imports the first two, StateSharding the last.
NEEDED = ("nnx_sharding.analysis", "nnx_sharding.diagnostics", "nnx_sharding.specs.filters")


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        ("{commit}\n{today}\nNNX_SHARDING_TEST_SEED=7\ntest ok 9 s\nfinished\n", None),
        ("{commit}\n{today}\ntest ok 9 s\n", "nightly: has not finished"),
        ("{commit}\n{today}\ntest ok 9 s\nasan FAILED 9 s\nfinished\n", "nightly: asan FAILED 9 s"),
        ("{commit}\n2020-01-01\ntest ok 9 s\nfinished\n", "days ago"),
        ("{commit}-dirty\n{today}\ntest ok 9 s\nfinished\n", "is not a commit that this one has"),
        (None, "there is no report of a nightly run"),
    ],
)
def test_a_release_needs_a_nightly_run_that_passed(report, problem, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "tools")
    check_release = importlib.import_module("check_release")
    head = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(head, cwd=check_release.ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not in a clone")
    path = tmp_path / "nightly.txt"
    if report is not None:
        today = datetime.datetime.now(datetime.UTC).date()
        path.write_text(report.format(commit=done.stdout.strip(), today=today))
    problems = check_release.nightly_problems(path)
    assert not problems if problem is None else len(problems) == 1 and problem in problems[0]
