"""Runs Flax's own examples with Flax's transforms and with ours, and compares what they do.

An example is a docstring of the installed ``flax.nnx`` that has ``>>>`` lines, or, with
``--guides FOLDER``, a page of Flax's ``docs_nnx`` (its Python blocks, in one namespace). Its text
runs twice: the second time ``nnx`` is a module whose transforms are replaced by those of this
package. Flax itself is not patched, so only what the example calls is exchanged.

Both runs must print the same and raise errors of the same kind, block by block, and end with the
same arrays. What a page says that it prints is not compared, since pages are written for other
versions and need data sets; blocks that fail with Flax are counted.

``--split`` exchanges ``split`` and ``merge`` too. A few examples differ then, since a
``Structure`` is no ``GraphDef``, and ``split`` returns arrays where Flax returns the Variables.

``python tools/run_flax_examples.py [--guides FOLDER] [--split] [NAME...]`` needs no network.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import doctest
import importlib
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import textwrap
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Flax's names that this package has too; all else (modules, filters, optimizers) stays Flax's.
EXCHANGED = [
    *("Carry", "StateAxes", "StateSharding", "checkify", "cond", "custom_vjp", "eval_shape"),
    *("fori_loop", "grad", "jit", "jvp", "make_jaxpr", "remat", "scan", "shard_map", "switch"),
    *("value_and_grad", "vjp", "vmap", "while_loop"),
]
OURS = "flax_nnx_with_our_transforms"
LIMIT = 150  # seconds for a page: some train on whole data sets
MODES = ("flax", "ours")
# Addresses and times differ between two runs of the same program.
_VARYING = re.compile(r"0x[0-9a-f]+|\bid=\d+|\d+(\.\d+)? ?(ms|µs|us|ns|s)\b|File \".*")
_BLOCK = re.compile(
    r"^ *(?P<fence>```+)(?:\{code-cell\}[^\n]*|python)\n(?P<cell>.*?)^ *(?P=fence)"
    r"|^ *\.\. (?:testcode|code-block)::[^\n]*\n(?P<code>(?:\n|  +[^\n]*\n)+)",
    re.MULTILINE | re.DOTALL,
)


class Outcome(NamedTuple):
    """What one block printed, and the error that it ended with, if any."""

    source: str
    printed: str
    error: str


def add_our_module(with_split: bool) -> None:
    """Registers the module that has Flax's names, with our transforms."""
    from flax import nnx

    import nnx_sharding

    names = [*EXCHANGED, *(["split", "merge"] if with_split else [])]
    module = types.ModuleType(OURS)
    module.__dict__.update(vars(nnx))
    module.__dict__.update({name: getattr(nnx_sharding, name) for name in names})
    sys.modules[OURS] = module


def exchange_import(source: str) -> str:
    """Lets a block import our module where it imports ``flax.nnx``."""
    source = re.sub(r"from flax import nnx\b", f"import {OURS} as nnx", source)
    return re.sub(r"import flax\.nnx as nnx\b", f"import {OURS} as nnx", source)


def docstrings() -> Iterator[doctest.DocTest]:
    """Finds the examples of all modules of the installed ``flax.nnx``."""
    from flax import nnx

    names = [info.name for info in pkgutil.walk_packages(nnx.__path__, "flax.nnx.")]
    for name in names:
        tests = doctest.DocTestFinder().find(importlib.import_module(name))
        yield from (test for test in tests if test.examples)


def blocks(page: Path) -> list[str]:
    """Returns the code of a page, without the lines that are for a notebook's shell."""
    matches = _BLOCK.finditer(page.read_text())
    codes = (textwrap.dedent(match["cell"] or match["code"] or "") for match in matches)
    return [re.sub(r"^[ ]*[!%:].*$", "", code, flags=re.MULTILINE) for code in codes]


def run_block(run: Callable[[], Any], source: str) -> Outcome:
    """Runs one block, and catches what it prints and raises."""
    printed, error = io.StringIO(), ""
    with contextlib.redirect_stdout(printed):
        try:
            run()
        except Exception as e:
            error = f"{type(e).__name__}: {str(e)[:300]}"
    return Outcome(source, _VARYING.sub("…", printed.getvalue()), error)


def run_docstring(test: doctest.DocTest, mode: str) -> list[Outcome]:
    """Runs one docstring, line by line, as ``doctest`` does."""
    names: dict[str, Any] = dict(test.globs)
    if mode == "ours" and "nnx" in names:
        names["nnx"] = sys.modules[OURS]
    outcomes = []
    for example in test.examples:
        source = exchange_import(example.source) if mode == "ours" else example.source

        def run(source: str = source) -> None:
            exec(compile(source, test.name, "single"), names)

        outcomes.append(run_block(run, example.source))
    return outcomes


def run_page(page: Path, mode: str) -> list[Outcome]:
    """Runs a page's blocks in one namespace, in a process that runs nothing else."""
    names: dict[str, Any] = {"__name__": "__main__"}
    outcomes = []
    for block in blocks(page):
        source = exchange_import(block) if mode == "ours" else block

        def run(source: str = source) -> None:
            # "single" prints each expression, as a notebook prints the last one of a cell
            tree = ast.Interactive(ast.parse(source).body)
            exec(compile(tree, str(page), "single"), names)

        outcomes.append(run_block(run, block))
    return [*outcomes, run_block(lambda: print_arrays(names), "(arrays at the end of the page)")]


def print_arrays(names: dict[str, Any]) -> None:
    """Prints a sum for each array that the page's variables and models hold."""
    import jax
    import numpy as np
    from flax import nnx

    for name, value in sorted(names.items()):
        pure = nnx.to_pure_dict(nnx.state(value)) if isinstance(value, nnx.Module) else value
        arrays = [leaf for leaf in jax.tree.leaves(pure) if isinstance(leaf, jax.Array)]
        numbers = [leaf for leaf in arrays if jax.dtypes.issubdtype(leaf.dtype, np.number)]
        if numbers:
            print(name, [(leaf.shape, f"{float(abs(leaf).sum()):.3g}") for leaf in numbers])


def run_in_process(page: Path, mode: str, *options: str) -> list[Outcome]:
    """Runs a page in a new process: pages configure devices, and leave meshes in place."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, *options, "--page", str(page), mode, file.name]
        try:
            # Sets are printed in the order of hashes: the same one for both runs.
            environment = os.environ | {"PYTHONHASHSEED": "0"}
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=LIMIT, env=environment
            )
        except subprocess.TimeoutExpired:
            return [Outcome("(whole page)", "", f"runs longer than {LIMIT} s")]
        if done.returncode:
            return [Outcome("(whole page)", "", f"exit {done.returncode}: {done.stderr[-300:]}")]
        return [Outcome(*outcome) for outcome in json.loads(Path(file.name).read_text())]


def compare(name: str, flax: list[Outcome], ours: list[Outcome]) -> str:
    """Says in a few words what became of an example, and prints each block that differs."""
    pairs = list(zip(flax, ours, strict=False))
    differing = [(theirs, mine) for theirs, mine in pairs if is_different(theirs, mine)]
    for theirs, mine in differing:
        print(f"{name}\n{textwrap.indent(theirs.source.strip(), '  | ')}")
        print(f"  flax: {theirs.printed}{theirs.error}\n  ours: {mine.printed}{mine.error}")
    if differing or len(flax) != len(ours):
        return "different"
    return "same, with blocks that fail in both" if any(x.error for x in flax) else "same"


def is_different(flax: Outcome, ours: Outcome) -> bool:
    """Compares kinds of errors, and what was printed."""
    # The leaves of a State of `split` are Variables with Flax and arrays with us. What they hold
    # is compared at the end of a page.
    shows_state = "State({" in flax.printed and "State({" in ours.printed
    kinds = [outcome.error.partition(":")[0] for outcome in (flax, ours)]
    return kinds[0] != kinds[1] or (flax.printed != ours.printed and not shows_state)


def pages(folder: Path) -> list[Path]:
    """Finds the pages of Flax's ``docs_nnx`` that have code."""
    found = (*folder.rglob("*.md"), *folder.rglob("*.rst"))
    return sorted(page for page in found if blocks(page))


def main() -> None:
    """Runs what is asked for, and ends with 1 if any example differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="run examples whose names contain one of these")
    parser.add_argument("--guides", type=Path, help="folder of Flax's docs_nnx")
    parser.add_argument("--split", action="store_true", help="exchange split and merge as well")
    parser.add_argument("--page", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    add_our_module(arguments.split)
    if arguments.page:
        page, mode, result = arguments.page
        Path(result).write_text(json.dumps(run_page(Path(page), mode)))
        return

    def is_wanted(name: str) -> bool:
        return not arguments.names or any(part in name for part in arguments.names)

    counts: Counter[str] = Counter()
    if arguments.guides:
        for page in pages(arguments.guides):
            if is_wanted(str(page)):
                options = ["--split"] if arguments.split else []
                flax, ours = (run_in_process(page, mode, *options) for mode in MODES)
                outcome = compare(str(page), flax, ours)
                failed = [error for _, _, error in flax if error]
                print(f"{outcome}: {page}: {len(failed)} of {len(flax)} blocks fail with Flax")
                print(textwrap.indent("\n".join(failed), "  "), flush=True)
                counts[outcome] += 1
    else:
        for test in docstrings():
            if is_wanted(test.name):
                flax, ours = (run_docstring(test, mode) for mode in MODES)
                counts[compare(test.name, flax, ours)] += 1
    print(dict(counts))
    sys.exit(bool(counts["different"]))


if __name__ == "__main__":
    main()
