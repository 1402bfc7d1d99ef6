"""Texts: names in pages, docstrings and messages exist, and comments are sentences of their own."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.gate  # what any change may break

ROOT = Path(__file__).parents[1]
DOTTED = re.compile(r"(?<![\w./-])nnx_sharding(?:\.[A-Za-z_]\w*)+")
IMPORT = re.compile(r"from (nnx_sharding[\w.]*) import (\([^)]*\)|[^\n(]+)")
MODULE = re.compile(r"(?:currentmodule|automodule):: (nnx_sharding[\w.]*)")
SOURCES = sorted((ROOT / "nnx_sharding").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Loggers, file formats and endings, which are no names in Python.
OTHER = re.compile(r"\.(?:report|comparison|diff|hardware|export|manifest|trace|json|zip|toml|py)$")


def texts(path: Path) -> Iterator[str]:
    """The text of a page; the strings in a source file, which are docstrings and messages."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield text
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def imports(text: str) -> Iterator[str]:
    """The names that the import statements in a text import, as module:name."""
    for module, names in IMPORT.findall(text):
        for line in names.strip("()").splitlines():
            for part in re.sub(r"#.*|\.\.\. ?|>>>", "", line).split(","):
                if name := re.match(r"\w+", part.strip()):
                    yield f"{module}:{name[0]}"


@functools.cache
def is_importable(name: str) -> bool:
    """Whether ``a.b:c`` can be imported from its module, or ``a.b.c`` is an attribute of one."""
    module, colon, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
        return not colon or hasattr(found, attribute) or is_importable(f"{module}.{attribute}")
    except ImportError:
        if colon or "." not in module:
            return False
    owner, attribute = name.rsplit(".", 1)
    return is_importable(owner) and hasattr(_found(owner), attribute)


def _found(name: str) -> object:
    try:
        return importlib.import_module(name)
    except ImportError:
        owner, attribute = name.rsplit(".", 1)
        return getattr(_found(owner), attribute)


def test_names_can_be_imported():
    wrong, count = [], 0
    for path in (*PAGES, *SOURCES):
        for text in texts(path):
            dotted = [x for x in DOTTED.findall(text) if not OTHER.search(x)]
            names = {*dotted, *imports(text), *(f"{x}:__name__" for x in MODULE.findall(text))}
            count += len(names)
            wrong += [f"{path.relative_to(ROOT)}: {x}" for x in names if not is_importable(x)]
    assert not wrong, "\n".join(sorted(wrong))
    assert count > 300, count


# With these words, a comment goes on with the code before it.
FRAGMENT = re.compile(
    r"# (?:(?:by |in |to |for |with |after )?which|whose|such as|those|its|else)\b", re.I
)


def test_comments_stand_alone():
    fragments, count = [], 0
    for path in SOURCES:
        with path.open("rb") as file:
            comments = [x for x in tokenize.tokenize(file.readline) if x.type == tokenize.COMMENT]
        rows = {x.start[0] for x in comments if not x.line[: x.start[1]].strip()}
        # The later lines of a comment of several lines do not begin a sentence.
        begins = [x for x in comments if x.start[0] not in rows or x.start[0] - 1 not in rows]
        count += len(begins)
        where = path.relative_to(ROOT)
        fragments += [
            f"{where}:{x.start[0]}: {x.string}" for x in begins if FRAGMENT.match(x.string)
        ]
    assert not fragments, "\n".join(fragments)
    assert count > 3000, count
