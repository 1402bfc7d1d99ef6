"""Every Python block of the documentation and every example in a docstring runs."""

import contextlib
import doctest
import importlib
import pkgutil
import sys
from pathlib import Path

import jax
import pytest
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser

import configurations
import nnx_sharding

ROOT = Path(__file__).parents[1]
BLOCKS = Sybil([PythonCodeBlockParser(doctest_optionflags=doctest.ELLIPSIS)])


def pages() -> list[Path]:
    """The pages with examples, without README.md, which :func:`test_readme` runs each time."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found.remove(ROOT / "README.md")
    return sorted(p for p in found if "_build" not in p.parts and list(BLOCKS.parse(p)))


def docstrings() -> list[doctest.DocTest]:
    names = [m.name for m in pkgutil.walk_packages(nnx_sharding.__path__, "nnx_sharding.")]
    # Importing a `__main__` runs it.
    modules = [
        importlib.import_module(name)
        for name in ["nnx_sharding", *names]
        if not name.endswith("__main__")
    ]
    finder = doctest.DocTestFinder()
    # Without the names of its module an example runs only if a reader can copy it.
    tests = [test for module in modules for test in finder.find(module, globs={})]
    return [test for test in tests if test.examples]


def without_note(error, anchor):
    error.anchor = anchor
    return error


@pytest.fixture(autouse=True)
def plain_errors(monkeypatch, compile_here):
    """Keeps notes, by JAX on removed frames and by us, out of the errors that examples show."""
    for name, module in list(sys.modules.items()):
        if name.startswith("nnx_sharding.") and hasattr(module, "see"):
            monkeypatch.setattr(module, "see", without_note)
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


def cache_for(text):
    is_about_it = "compilation_cache" in text
    return configurations.without_cache() if is_about_it else contextlib.nullcontext()


def test_there_are_eight_devices():
    assert jax.device_count() == 8


# One test for each page: its blocks build on each other, and pytest-xdist would otherwise
# spread them over processes.
@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page):
    run_page(page)


@pytest.mark.gate
def test_readme():
    run_page(ROOT / "README.md")


def run_page(page):
    with cache_for(page.read_text(encoding="utf-8")):
        for example in BLOCKS.parse(page):
            example.evaluate()


@pytest.mark.parametrize("example", docstrings(), ids=lambda example: example.name)
def test_docstring(example):
    report: list[str] = []
    with cache_for(example.docstring):
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        results = runner.run(example, out=report.append)
    assert results.failed == 0, "".join(report)
