"""Checks a commit before its release: ``python tools/check_release.py`` (``make release-check``).

First what takes no time, and ends it if it is wrong: all places name one version, the changelog is
that of a release, and the last ``make nightly`` passed. Then the gates, the commands of README.md
in a fresh clone, and the links to other sites, about 15 minutes on 2 cores. Sdist and wheel are
left in ``dist/``.
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What ``make nightly`` writes: the commit, the date, a line for each part, and "finished". It takes
# hours, so it is not run again.
NIGHTLY = ROOT / "build" / "nightly.txt"
MOST_DAYS = 7

# The file, and a pattern with one group for the version.
PLACES = {
    "nnx_sharding/_version.py": r'__version__ = "([^"]+)"',
    "CITATION.cff": r"^version: (\S+)$",
    "CHANGELOG.md": r"^## \[(\d[^\]]*)\] - \d{4}-\d\d-\d\d$",  # the newest release
}


def version_problems() -> list[str]:
    """Lists the places that name another version than the package, and changes of no release."""
    versions, problems = {}, []
    for name, pattern in PLACES.items():
        match = re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        versions[name] = match[1] if match else "no version"
    if len({*versions.values()}) > 1:
        problems = [f"{place} has {version}" for place, version in versions.items()]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased = changelog.partition("## [Unreleased]\n")[2].partition("\n## ")[0]
    if unreleased.strip():
        problems.append("CHANGELOG.md has changes under Unreleased: give them a version and a date")
    return problems


def nightly_problems(path: Path = NIGHTLY) -> list[str]:
    """Lists why the last ``make nightly`` does not stand for this commit."""
    if not path.exists():
        return [f"there is no report of a nightly run, {path}: run `make nightly`"]
    commit, date, *parts = path.read_text(encoding="utf-8").splitlines()
    problems = [f"nightly: {part}" for part in parts if "FAILED" in part]
    if "finished" not in parts:
        problems.append("nightly: has not finished: run `make nightly`, which goes on with it")
    is_ancestor = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
    if subprocess.run(is_ancestor, cwd=ROOT, check=False, capture_output=True).returncode:
        problems.append(f"nightly: {commit} is not a commit that this one has")
    days = (datetime.datetime.now(datetime.UTC).date() - datetime.date.fromisoformat(date)).days
    if days > MOST_DAYS:
        problems.append(f"nightly: ran {days} days ago: run `make nightly`")
    return problems


def try_readme() -> None:
    """Runs the commands of README.md as a new user does, in a fresh clone and environment."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = readme.partition("\n## Install\n")[2].partition("```sh\n")[2].partition("```")[0]
    # Of the make that runs this: its options and its environment are not the user's.
    ours = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHONPATH", "VENV")
    kept = {key: value for key, value in os.environ.items() if key not in ours}
    with tempfile.TemporaryDirectory() as scratch:
        clone, environment = Path(scratch, "clone"), Path(scratch, "environment")
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        venv.create(environment, with_pip=True)
        path = f"{environment / 'bin'}{os.pathsep}{kept['PATH']}"
        variables = kept | {"PATH": path, "VIRTUAL_ENV": str(environment)}
        subprocess.run(["bash", "-euxc", commands], cwd=clone, env=variables, check=True)


def main() -> int:
    """Prints what is wrong, and returns 1; 0 if the commit can be released."""
    if problems := version_problems() + nightly_problems():
        print("This commit cannot be released:", *problems, sep="\n  ", file=sys.stderr)
        return 1
    subprocess.run([".ci/run"], cwd=ROOT, check=True)
    try_readme()
    # Last, since other sites may be down, or the network: what comes before has then been checked.
    subprocess.run(["make", "links"], cwd=ROOT, check=True)
    print("This commit can be released. dist/ has:", *sorted(os.listdir(ROOT / "dist")), sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
