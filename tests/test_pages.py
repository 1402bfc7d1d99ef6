"""What the pages say of the code is what the code says: the picture, links, the API reference."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_sharding
from nnx_sharding import StateSharding, jit
from nnx_sharding.core.guard.native import FastestWalk
from nnx_sharding.core.guard.walk import PythonWalk

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "docs")]

import draw_pipeline  # noqa: E402
import names  # noqa: E402

PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if "_build" not in page.parts
)
_LINK = re.compile(r"\]\(([^)\s]+)\)|<(?:img|source|a)[^>]*(?:src|href|srcset)=\"([^\"]+)\"")
_ANCHOR = re.compile(r"[^\w\- ]")


def test_picture_is_drawn_from_the_code():
    assert draw_pipeline.PICTURE.read_text(encoding="utf-8") == draw_pipeline.picture()


def functions_of(call):
    """The functions of the package that run in a call, each as file and name, in order."""
    package, found = f"{Path(nnx_sharding.__file__).parent}/", []

    def record(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            found.append((code.co_filename.removeprefix(package), code.co_qualname))

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def test_architecture_page_follows_an_argument():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    parts = re.findall(r"\*\*(.*? call.*?)\*\*\n\n((?:\|.*\n)*)", page)
    rows = {title: re.findall(r"^\| `(.*?)` \| `(.*?)` \|", of, re.M) for title, of in parts}
    mesh = jax.make_mesh((8,), ("data",))
    model, x = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((8, 8))
    specs = StateSharding({nnx.PathContains("kernel"): P("data"), ...: P()})

    @jit(in_shardings=(specs, P("data")), mesh=mesh)
    def step(model, x):
        model.kernel[...] *= 2
        return model(x)

    for title in ("First call", "Next call of the same model"):
        run = iter(functions_of(lambda: step(model, x)))
        assert len(rows[title]) > 4
        for row in rows[title]:  # in this order, with others in between
            assert row in run, (title, row)
    if FastestWalk is not PythonWalk:
        files = {file for file, _ in functions_of(lambda: step(model, x))}
        assert files <= {"core/call.py", "core/guard/direct.py", "_compat/flax_names.py"}


def test_picture_has_every_file_of_the_pipeline():
    stages = [
        draw_pipeline.FIRST,
        draw_pipeline.GUARD,
        *draw_pipeline.SLOW_WAY,
        *draw_pipeline.LAST,
    ]
    drawn = {file for stage in stages for file in stage.files} - {"transforms/lifted.py"}
    folder = ROOT / "nnx_sharding" / "core"
    files = [path for path in folder.rglob("*") if path.suffix in (".py", ".c")]
    names = {path.relative_to(folder).as_posix() for path in files if path.stem != "__init__"}
    assert drawn | set(draw_pipeline.BESIDE) == names


def test_links_lead_somewhere():
    assert [(str(page), target) for page in PAGES for target in dead_links(page)] == []


def dead_links(page: Path) -> Iterator[str]:
    for match in _LINK.finditer(page.read_text(encoding="utf-8")):
        target = match.group(1) or match.group(2)
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield target


def test_pages_render_in_a_repository_as_on_the_site():
    """Only Sphinx reads roles, directives, targets and links without a text."""
    raw = re.compile(r"\{[a-z][\w:]*\}`|\[\]\(|^(?:```|:::+)\{|^\(.+\)=$", re.MULTILINE)
    for_sphinx = {ROOT / "docs" / name for name in ("index.md", "api.md")}
    read = [page for page in PAGES if page not in for_sphinx and page.parent.name != "reference"]
    found = {str(page): raw.findall(page.read_text(encoding="utf-8")) for page in read}
    assert {page: parts for page, parts in found.items() if parts} == {}


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub and MyST make them, and MyST's targets."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ +(.+)$|^\((.+)\)=$", text, re.MULTILINE)
    headings = [heading or target for heading, target in headings]
    plain = (_ANCHOR.sub("", heading.replace("`", "")).strip().lower() for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def public_modules() -> list[str]:
    """All modules without a private part in their name that say what is public in them."""
    names = [
        module.name for module in pkgutil.walk_packages(nnx_sharding.__path__, "nnx_sharding.")
    ]
    open_names = [name for name in names if not re.search(r"\._|__main__|\.demo$", name)]
    return [
        name
        for name in ["nnx_sharding", *open_names]
        if hasattr(importlib.import_module(name), "__all__")
    ]


def missing(entries: set[str], modules: frozenset[str] = frozenset()) -> list[str]:
    """The public names that are not among entries, nor in one of these modules."""
    words = {name.rpartition(".")[2] for name in entries}
    return [
        f"{name}.{own}"
        for name in public_modules()
        if name not in modules
        for own in importlib.import_module(name).__all__
        if own not in words
        and not own.startswith("__")
        and not isinstance(getattr(importlib.import_module(name), own), types.ModuleType)
    ]


def test_every_public_name_is_in_the_reference():
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    texts = [page.read_text(encoding="utf-8") for page in pages]
    modules = frozenset(re.findall(r"automodule:: ([\w.]+)\n +:members:", "\n".join(texts)))
    assert missing({name for text in texts for name in names.documented(text)}, modules) == []


def test_every_page_of_the_reference_is_in_its_index():
    pages = {page.stem for page in (ROOT / "docs" / "reference").glob("*.md")}
    index = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[.*\]\(reference/(\w+).md\)$", index, re.MULTILINE)
    assert re.findall(r"^reference/(\w+)$", index, re.MULTILINE) == headings
    assert set(headings) == pages
    analysis = (ROOT / "docs" / "reference" / "analysis.md").read_text(encoding="utf-8")
    index = names.index(analysis)
    assert "   Hardware\n   parameter_table\n" in index
    assert "Data: {py:data}`~nnx_sharding.analysis.HARDWARE`.\n" in index
