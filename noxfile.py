"""Runs the tests on each Python found, with the newest and with the oldest jax and flax: ``nox``.

``nox -s "tests-3.12(oldest)" -- -k shard_map`` is one of the sessions, with options for pytest.
"""

import json
import os
import sys
from pathlib import Path

import nox

PROJECT = nox.project.load_toml("pyproject.toml")
REQUIREMENTS = {
    "newest": [],
    "oldest": [r.replace(">=", "==") for r in PROJECT["project"]["dependencies"] if ">=" in r],
}
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"  # that of the Makefile's environment
TESTED = set()

nox.options.default_venv_backend = "venv"
nox.options.download_python = "never"
nox.options.reuse_venv = "yes"

# The Pythons of pyenv, also those that are not active and whose shims therefore fail.
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
os.environ["PATH"] = os.pathsep.join([*map(str, PYENV.glob("3.*/bin")), os.environ["PATH"]])


@nox.session(python=nox.project.python_versions(PROJECT))
@nox.parametrize("releases", list(REQUIREMENTS), ids=list(REQUIREMENTS))
def tests(session: nox.Session, releases: str) -> None:
    """Run the tests."""
    session.install("--upgrade", "--no-compile", "--editable", ".[tests]", *REQUIREMENTS[releases])
    show = "from importlib.metadata import version as v; print('jax', v('jax'), 'flax', v('flax'))"
    versions = (session.python, session.run("python", "-c", show, silent=True))
    if versions in TESTED:
        session.skip(f"{releases} is the same as newest: {versions[1]}")
    TESTED.add(versions)
    if releases == "newest" and session.python == PYTHON and _has_constraints(session):
        session.skip("`make test` has the same: the newest releases are those of constraints.txt")
    session.log(versions[1])
    session.run(
        "python", "-m", "pytest", "-n", "auto", "--dist", "worksteal", "-q", *session.posargs
    )


def _has_constraints(session: nox.Session) -> bool:
    """Returns whether to install constraints.txt would change nothing."""
    install = ("pip", "install", "--dry-run", "--quiet", "--report", "-", "--constraint")
    report = session.run("python", "-m", *install, "constraints.txt", "-e", ".[tests]", silent=True)
    installed = [each["metadata"]["name"] for each in json.loads(report)["install"]]
    return installed == [PROJECT["project"]["name"]]  # an editable install is always listed
