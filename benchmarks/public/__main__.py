"""Runs the measures, each in a process of its own, and writes the page.

python -m benchmarks.public --path FOLDER      all models; FOLDER has the sources of some
python -m benchmarks.public --models Qwen --measures shares,Auto
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import page

if TYPE_CHECKING:
    from .registry import Model

_LIMIT = 600  # seconds for one measure of one model
ON_REQUEST = ("optimized",)  # measures that take an hour, and check another one
NUMBERS = ("Auto", "Explicit", "pipeline", "context", "experts")  # measures that compare them


def main() -> None:
    """Runs what the options select."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="", help="part of a name, as in 'bonsai Qwen3'")
    parser.add_argument("--measures", default="", help="names of measures, comma-separated")
    parser.add_argument("--path", action="append", default=[], help="a folder with sources")
    parser.add_argument("--limit", type=float, default=_LIMIT, help="seconds for each")
    parser.add_argument("--missing", action="store_true", help="only what has no result yet")
    parser.add_argument("--draw", type=int, help="only check so many, and keep no results")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--run", nargs=3, metavar=("MODEL", "MEASURE", "FILE"), help="internal")
    options = parser.parse_args()
    random.seed(os.environ.get("NNX_SHARDING_TEST_SEED"))  # that of a night draws the same again
    sys.path[:0] = options.path
    if options.run:
        _measure(*options.run)
        return
    results = page.load()
    if not options.page:
        from .measures import MEASURES
        from .registry import MODELS

        usual = [measure for measure in MEASURES if measure not in ON_REQUEST]
        chosen = options.measures.split(",") if options.measures else usual
        if options.draw is not None:
            _check(random.sample(MODELS, options.draw), chosen, results, options)
            return
        for model in MODELS:
            key = f"{model.source} {model.name}"
            if options.models.lower() not in key.lower():
                continue
            for measure in chosen:
                if options.missing and measure in results.get(key, {}):
                    continue
                result = _in_process(key, measure, options.path, options.limit)
                print(f"{key}, {measure}: {result}", flush=True)
                results = page.load()  # other runs may have written it
                known = results.setdefault(key, {})
                # Without its package, here or tonight, a model keeps what was measured before.
                if "not run" not in result or measure not in known:
                    known[measure] = result
                page.save(results)
                page.write(results)
    page.write(results)


def _check(
    models: Sequence[Model], measures: Sequence[str], results: page.Results, options: Any
) -> None:
    """Runs measures of some models, and fails if one that has a result on the page has none now."""
    failed = []
    for model in models:
        key = f"{model.source} {model.name}"
        for measure in measures:
            result = _in_process(key, measure, options.path, options.limit)
            print(f"{key}, {measure}: {result}", flush=True)
            if "failed" in result and "result" in results.get(key, {}).get(measure, {}):
                failed.append(f"{key}, {measure}")
    if failed:
        sys.exit("These had results before: " + "; ".join(failed))


def _in_process(key: str, measure: str, folders: list[str], limit: float) -> dict[str, Any]:
    """Runs one measure of one model; returns its result, or why there is none."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    if measure in NUMBERS:  # compile in half the time; what is sent and needed would be another
        environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    if measure == "memory":  # a twentieth of the time; "optimized" is the same without this
        environment["JAX_OPTIMIZATION_LEVEL"] = "O1"
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.public", "--run", key, measure, str(file)]
        command += [argument for name in folders for argument in ("--path", name)]
        try:
            process = subprocess.run(
                command, env=environment, timeout=limit, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return {"not run": f"takes longer than {limit:.0f} s"}
        if file.exists():
            return {**json.loads(file.read_text()), "seconds": round(time.monotonic() - start, 1)}
    return {"failed": f"the process ended with {process.returncode}: {process.stderr[-200:]}"}


def _measure(key: str, name: str, file: str) -> None:
    """Runs one measure of one model in this process, and writes the result into a file."""
    from .measures import MEASURES, reason
    from .registry import MODELS

    [model] = [model for model in MODELS if f"{model.source} {model.name}" == key]
    try:
        result = {"result": MEASURES[name](model)}
    except ImportError as error:
        result = {"not run": reason(error)}
    except Exception as error:
        traceback.print_exc()
        result = {"failed": f"{type(error).__name__}: {reason(error)}"}
    Path(file).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
