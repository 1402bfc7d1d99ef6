"""Writers that are killed or stopped at a call that changes the disk leave the old or the new.

``processes/crashing.py`` says what is tested.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parent
KINDS = (
    "checkpoint",
    "one-file",
    "files",
    "files-to-one",
    "one-to-files",
    "export",
    "json",
    "page",
)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("gcc"), reason="needs LD_PRELOAD and gcc"
)


def run(kind, folder, *calls):
    """Runs the trials of a kind of file; returns how many there were."""
    library = folder / "crash.so"
    command = ["gcc", "-O1", "-fPIC", "-shared", "-o", library, TESTS / "crash.c", "-ldl"]
    subprocess.run(command, check=True)
    env = {**os.environ, "LD_PRELOAD": str(library), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, TESTS / "processes" / "crashing.py", kind, folder, *map(str, calls)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout)[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_at_drawn_calls(kind, tmp_path):
    calls = [random.randrange(10**6) for _ in range(2)]
    for counts in run(kind, tmp_path, *calls).values():
        assert counts["killed"] + counts["stopped"] >= 2, counts


@pytest.mark.parametrize("kind", KINDS)
def test_at_all_calls(kind, tmp_path):
    for counts in run(kind, tmp_path).values():
        # Threads of TensorStore join their writes if they can, so each run has its own number of
        # calls: on a loaded machine 94 where the first had 104.
        assert min(counts["killed"], counts["stopped"]) >= 0.8 * counts["calls"], counts
