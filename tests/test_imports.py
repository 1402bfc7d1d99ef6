"""The imports of the package, without cycles or from the core upwards; and how long files are."""

from __future__ import annotations

import ast
import graphlib
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nnx_sharding

pytestmark = pytest.mark.gate  # what any change may break

ROOT = Path(nnx_sharding.__file__).parent


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def without_type_checking(tree: ast.Module) -> ast.Module:
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return tree


def imported(name: str, path: Path) -> Iterator[str]:
    """The modules of the package that a file imports, also in functions, not for type checkers."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(without_type_checking(ast.parse(path.read_text(encoding="utf-8")))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                if full in FILES or base in FILES:
                    yield full if full in FILES else base


IMPORTS = {name: set(imported(name, path)) - {name} for name, path in FILES.items()}
# The package itself names everything.
del IMPORTS["nnx_sharding"]


def package_of(name: str) -> str:
    """The folder directly below the package, or the file."""
    return ".".join(name.split(".")[:2])


def check_acyclic(graph: dict[str, set[str]]) -> None:
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(reversed(error.args[1])))


def test_no_cycle_between_files():
    packages = {name for name, path in FILES.items() if path.name == "__init__.py"}
    check_acyclic({name: targets - packages for name, targets in IMPORTS.items()})


def test_no_cycle_between_packages():
    graph: dict[str, set[str]] = {}
    for name, targets in IMPORTS.items():
        graph.setdefault(package_of(name), set()).update(map(package_of, targets))
    check_acyclic({name: targets - {name, "nnx_sharding"} for name, targets in graph.items()})


def test_core_imports_only_what_is_below_it():
    below = {"_compat", "errors", "specs", "core"}
    for name, targets in IMPORTS.items():
        if package_of(name) == "nnx_sharding.core":
            above = {t for t in targets if package_of(t).partition(".")[2] not in below}
            assert not above, name


def test_the_rest_of_the_core_does_not_import_the_guard():
    guard = "nnx_sharding.core.guard"
    for name, targets in IMPORTS.items():
        if package_of(name) == "nnx_sharding.core" and not name.startswith(guard):
            assert not [target for target in targets if target.startswith(guard)], name


def test_files_of_the_core_are_short():
    core = {name: path for name, path in FILES.items() if package_of(name) == "nnx_sharding.core"}
    lengths = {name: len(path.read_text().splitlines()) for name, path in core.items()}
    assert [(name, length) for name, length in lengths.items() if length > 400] == []


def lines_of(function: ast.FunctionDef) -> int:
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def test_functions_fit_on_a_screen():
    """Sixty lines without the docstring."""
    long = [
        f"{name}.{node.name}: {lines_of(node)}"
        for name, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines_of(node) > 60
    ]
    assert long == []


def test_private_names_of_jax_are_in_one_package():
    for path in ROOT.rglob("*.py"):
        if path.parent.name != "_compat":
            assert not re.search(r"jax\._src|\bjaxlib\.", path.read_text(encoding="utf-8")), path


def test_architecture_page_lists_the_packages_in_this_order():
    page = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \|", page[: page.index("## One call")], re.MULTILINE)
    order = {name: i for i, row in enumerate(rows) for name in re.findall(r"`(\w+)/?`", row)}
    packages = {package_of(name).removeprefix("nnx_sharding.") for name in IMPORTS}
    assert order.keys() == packages
    for name, targets in IMPORTS.items():
        own = package_of(name).removeprefix("nnx_sharding.")
        for target in map(package_of, targets - {"nnx_sharding"}):
            assert order[target.removeprefix("nnx_sharding.")] <= order[own], (name, target)


def test_contributing_lists_each_transform_with_its_files():
    page = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page[page.index("### Transforms") : page.index("## Tests")]
    listed: dict[str, str] = {}
    for row in re.findall(r"^\| (`.*?) \| (`.*?) \| (`.*?) \|$", section, re.MULTILINE):
        names, files, tests = (re.findall(r"`([\w.]+)`", cell) for cell in row)
        assert all((ROOT / "transforms" / file).exists() for file in files), row
        texts = [(Path(__file__).parent / test).read_text(encoding="utf-8") for test in tests]
        for name in names:
            if name == "Lifted":  # which tests get from `jit`
                texts.append(name)
            assert any(re.search(rf"\b{name}\b", text) for text in texts), (name, tests)
            listed[name] = files[0]
    transforms = {*nnx_sharding.transforms.__all__} - {"Residual", "SavedResiduals"}
    assert listed.keys() == transforms | {"jit", "shard_map", "Lifted", "split", "merge"}
    for name, file in listed.items():
        own = getattr(nnx_sharding, name).__module__
        assert own == f"nnx_sharding.transforms.{file.removesuffix('.py')}", name


IMPORTS_AND_CALLS = """
import sys

import jax
import jax.numpy as jnp
from flax import nnx

import nnx_sharding


class Model(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(4, 8, rngs=nnx.Rngs(0))

    @nnx_sharding.jit(strict=True)
    def __call__(self, x):
        return self.up(x)


def tools():
    names = (name.split(".") for name in sys.modules if name.startswith("nnx_sharding."))
    return [name for name in names if name[1] in ("analysis", "report", "planning", "testing")]


assert not tools(), tools()
Model()(jnp.ones((2, 4)))
assert not tools(), tools()
mesh = nnx_sharding.make_mesh({"data": jax.device_count()})
model = Model()
step = nnx_sharding.jit(
    nnx_sharding.grad(lambda model, x: model(x).sum()),
    in_shardings=(nnx_sharding.fsdp(model, mesh=mesh, min_size=0), None),
)
with jax.set_mesh(mesh):
    lowered = step.lower(model, jnp.ones((8, 4)))
    lowered.compile()(model, jnp.ones((8, 4)))
    step(model, jnp.ones((8, 4)))
loss = nnx_sharding.accumulate_gradients(lambda model, x: model(x).sum(), steps=2)
nnx_sharding.jit(loss)(Model(), jnp.ones((8, 4)))
assert not tools(), tools()
assert lowered.cost().flops and tools()
"""


def test_calls_load_no_tools():
    """Neither an import nor a call loads what only reports and tests of users need."""
    env = {**os.environ, "XLA_FLAGS": ""}  # one device
    subprocess.run([sys.executable, "-c", IMPORTS_AND_CALLS], check=True, cwd=ROOT.parent, env=env)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("checkpoint", "transfer"),
        ("partition", "ring_attention"),
        ("partition", "ExpertStatistics"),
    ],
)
def test_names_that_moved_are_found_with_a_warning(module, name):
    old = importlib.import_module(f"nnx_sharding.{module}")
    new = getattr(importlib.import_module("nnx_sharding.experimental"), name)
    with pytest.warns(DeprecationWarning, match=f"{name} is nnx_sharding.experimental.{name} now"):
        assert getattr(old, name) is new
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        old.nothing  # noqa: B018
    assert name not in old.__all__
