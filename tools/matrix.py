"""Runs the tests on every Python found, with the oldest and the newest jax and flax.

``python tools/matrix.py`` (``make test-matrix``) uses one environment for each Python and each of
the two; ``--only 3.12 newest`` picks those that have one of these in their name, such as
``3.12-oldest``. Options after ``--`` go to pytest. ``--find newest`` runs nothing: it prints the
newest Python found of those that ``setup.py`` declares.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
OLDEST, NEWEST = "oldest", "newest"
_LOWER_BOUND = re.compile(r'"(flax|jax|numpy)>=([\d.]+)"')
_DECLARED = re.compile(r'"Programming Language :: Python :: (3\.\d+)"')


class Run(NamedTuple):
    """One run of the tests: what it ran on, how it ended, and how many seconds it took."""

    name: str
    versions: dict[str, str]
    result: str
    seconds: float


def pythons(only: str | None = None) -> dict[str, str]:
    """The interpreters that the package supports, by version such as ``3.12``."""
    names = [shutil.which(f"python3.{minor}") for minor in range(11, 30)]
    managed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found: dict[str, str] = {}
    every = [*filter(None, names), *map(str, sorted(managed.glob("3.*/bin/python")))]
    for path in every if only is None else [only]:
        show = "import sys; print('%d.%d' % sys.version_info[:2])"
        # What version managers put on the path may stand for a version that is not there.
        answer = subprocess.run([path, "-c", show], capture_output=True, text=True, check=False)
        version = answer.stdout.strip()
        if answer.returncode == 0 and tuple(map(int, version.split("."))) >= (3, 11):
            found.setdefault(version, path)
    return dict(sorted(found.items(), key=lambda item: int(item[0].split(".")[1])))


def find(which: str) -> str | None:
    """The oldest or the newest Python found that ``setup.py`` declares; None if there is none."""
    declared = _DECLARED.findall(_setup())
    found = [path for version, path in pythons().items() if version in declared]
    return found[0 if which == OLDEST else -1] if found else None


def lower_bounds() -> list[str]:
    """The oldest versions that ``setup.py`` declares, as requirements."""
    return [f"{name}=={version}" for name, version in _LOWER_BOUND.findall(_setup())]


def _setup() -> str:
    return (ROOT / "setup.py").read_text(encoding="utf-8")


def environment(name: str, interpreter: str) -> Path:
    """The Python of an environment that has the package and what its tests need."""
    folder = ROOT / ".venv-matrix" / name
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    bounds = lower_bounds() if name.endswith(OLDEST) else []
    subprocess.run([*pip, "--upgrade", "--editable", ".[tests]", *bounds], cwd=ROOT, check=True)
    return python


def versions(python: Path) -> dict[str, str]:
    """The versions of jax, flax and numpy in an environment."""
    show = (
        "import importlib.metadata as m, json; "
        "print(json.dumps({n: m.version(n) for n in ('jax', 'flax', 'numpy')}))"
    )
    answer = subprocess.run([str(python), "-c", show], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(answer.stdout)
    return found


def runs(
    interpreters: dict[str, str], only: Sequence[str], pytest_arguments: Sequence[str]
) -> Iterator[Run]:
    """Runs the tests in each environment; what is the same as one before is passed over."""
    for version, interpreter in interpreters.items():
        seen: list[dict[str, str]] = []
        for kind in (NEWEST, OLDEST):
            name = f"{version}-{kind}"
            if only and not any(part in name for part in only):
                continue
            print(f"\n== {name}: {interpreter}", flush=True)
            start = time.perf_counter()
            try:
                python = environment(name, interpreter)
            except subprocess.CalledProcessError as error:
                yield Run(name, {}, f"not installed (pip: {error.returncode})", 0.0)
                continue
            own = versions(python)
            # NumPy has no part in what differs: all of its versions are used through jax.
            if any((own["jax"], own["flax"]) == (x["jax"], x["flax"]) for x in seen):
                yield Run(name, own, f"the same as {NEWEST}", 0.0)
                continue
            seen.append(own)
            command = [str(python), "-m", "pytest", "-n", "auto", "-q", *pytest_arguments]
            code = subprocess.run(command, cwd=ROOT, check=False).returncode
            result = "ok" if code == 0 else f"FAILED ({code})"
            yield Run(name, own, result, time.perf_counter() - start)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs it from a command line; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--python", metavar="PATH", help="this Python alone (default: all that are found)"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--find", choices=(OLDEST, NEWEST), help="print this Python, run nothing")
    arguments = parser.parse_args(given[:split])
    if arguments.find:
        path = find(arguments.find)
        print(path or "")
        return 0 if path else 1
    done = list(runs(pythons(arguments.python), arguments.only, given[split + 1 :]))
    print("\n== report")
    for run in done:
        own = ", ".join(f"{name} {version}" for name, version in run.versions.items())
        print(f"{run.name:12} {run.result:22} {run.seconds:5.0f} s  {own}")
    if not done:
        print("nothing ran: no Python 3.11 or newer was found, or --only names none of them")
    passed = all(run.result == "ok" or run.result.startswith("the same") for run in done)
    return 0 if done and passed else 1


if __name__ == "__main__":
    sys.exit(main())
