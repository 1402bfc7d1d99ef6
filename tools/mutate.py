"""Changes one place of the code at a time, and shows which changes no test notices.

A *mutant* is the package with one place changed: a condition negated, a comparison or ``and``
exchanged, a number one larger, a result None, a statement gone. A mutant that fails a test is
*killed*; one that survives is a line that the tests run, but whose effect none of them checks (or a
change that makes no difference, such as a faster way that is not taken). Before tests are removed
or merged, and after it, the same seed must give the same survivors.

Which tests run which line is measured once, with the contexts of coverage.py, and kept in
``build/mutants``. Each mutant is tried in a copy of the checkout by the tests that run its line, up
to a limit: those of which fewer lines are in the map first, since they fail soonest.

    python tools/mutate.py nnx_sharding/core --count 100 --seed 0

Operators after DeMillo, Lipton and Sayward, "Hints on test data selection", 1978.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from coverage import CoverageData

ROOT = Path(__file__).parent.parent
MAP = ROOT / "build" / "mutants" / "coverage"
SLOWEST = 300  # seconds for the tests of a mutant; one that loops for ever is killed
MOST_TESTS = 60  # for each mutant

EXCHANGED: dict[type[ast.AST], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}


class Mutant(NamedTuple):
    """One change: the text of ``file`` from ``start`` to ``end`` becomes ``new``."""

    file: str
    line: int
    start: int
    end: int
    new: str
    old: str


def mutants_of(file: Path) -> Iterator[Mutant]:
    """Yields each change of a file that its syntax offers."""
    text = file.read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    source = text.encode()  # columns of the syntax tree count bytes

    def change(node: ast.expr | ast.stmt, new: str) -> Mutant:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        old = source[start:end].decode()
        return Mutant(str(file.relative_to(ROOT)), node.lineno, start, end, new, old)

    for node in _without_annotations(ast.parse(text)):
        segment = (ast.get_source_segment(text, node) or "") if hasattr(node, "lineno") else ""
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            condition = ast.get_source_segment(text, node.test)
            yield change(node.test, f"(not ({condition}))")
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = (ast.get_source_segment(text, x) for x in (node.left, *node.comparators))
            yield change(node, f"({left} {EXCHANGED[type(node.ops[0])]} {right})")
        elif isinstance(node, ast.BoolOp):
            word = " or " if isinstance(node.op, ast.And) else " and "
            values = (f"({ast.get_source_segment(text, value)})" for value in node.values)
            yield change(node, f"({word.join(values)})")
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield change(node, str(node.value + 1))
        elif isinstance(node, ast.Return) and node.value is not None and segment != "return None":
            yield change(node, "return None")
        elif isinstance(node, ast.Expr | ast.AugAssign) and _is_effect(node):
            yield change(node, "pass")


def _is_effect(node: ast.AST) -> bool:
    """Returns whether a statement is there only for what it changes."""
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return is_call or isinstance(node, ast.AugAssign)


def _without_annotations(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that run: no annotations, no error messages."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns") or isinstance(tree, ast.Raise):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from _without_annotations(child)


def measure(folder: str, options: list[str]) -> None:
    """Runs the tests once, and notes which of them runs which line."""
    MAP.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--dist", "worksteal", *options]
    command += [f"--cov={folder}", "--cov-context=test", "--cov-report="]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"COVERAGE_FILE": str(MAP)}, check=False)


def tests_by_line(file: str) -> dict[int, list[str]]:
    """Returns the tests that run each line of a file; those that run few lines first."""
    data = CoverageData(str(MAP))
    data.read()
    lines = data.contexts_by_lineno(str(ROOT / file))
    counts: dict[str, int] = {}
    for contexts in lines.values():
        for context in contexts:
            counts[context] = counts.get(context, 0) + 1
    return {
        line: sorted({x.partition("|")[0] for x in contexts if x}, key=lambda x: counts.get(x, 0))
        for line, contexts in lines.items()
    }


def is_killed(mutant: Mutant, tests: list[str], copy: Path) -> bool:
    """Runs tests on a mutant in a copy of the checkout."""
    path = copy / mutant.file
    original = path.read_bytes()
    path.write_bytes(original[: mutant.start] + mutant.new.encode() + original[mutant.end :])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(
            command, cwd=copy, env=environment, timeout=SLOWEST, capture_output=True, check=False
        )
        return run.returncode not in (0, 5)  # 5: no test was collected
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_bytes(original)


def main() -> None:
    """Reads the command line, and prints each mutant with what became of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="the code to change, such as nnx_sharding/core")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", action="store_true", help="measure anew which test runs what")
    parser.add_argument("--json", type=Path, help="write the mutants and their fates to this file")
    arguments, options = parser.parse_known_args()
    if arguments.measure or not MAP.exists():
        measure(arguments.folder, options)
    files = [*sorted((ROOT / arguments.folder).rglob("*.py"))]
    maps = {str(file.relative_to(ROOT)): None for file in files}
    mutants = [mutant for file in files for mutant in mutants_of(file)]
    lines = {name: tests_by_line(name) for name in maps}
    covered = [mutant for mutant in mutants if lines[mutant.file].get(mutant.line)]
    print(f"{len(mutants)} mutants, of which tests run {len(covered)}")
    drawn = random.Random(arguments.seed).sample(covered, min(arguments.count, len(covered)))
    fates = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".git", ".venv*", ".nox", "build", "_build", ".cache")
        shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
        for mutant in drawn:
            killed = is_killed(mutant, lines[mutant.file][mutant.line][:MOST_TESTS], copy)
            fates.append({**mutant._asdict(), "killed": killed})
            fate = "killed  " if killed else "SURVIVED"
            change = f"{' '.join(mutant.old.split())[:60]}  ->  {' '.join(mutant.new.split())[:60]}"
            print(f"{fate} {mutant.file}:{mutant.line}  {change}", flush=True)
    count = sum(bool(fate["killed"]) for fate in fates)
    print(f"{count} of {len(fates)} killed")
    if arguments.json:
        arguments.json.write_text(json.dumps(fates, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
