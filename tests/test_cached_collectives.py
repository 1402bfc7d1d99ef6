"""The fault of jaxlib that ``docs/status.md`` shows, in plain JAX: does it still exist?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

STATUS = Path(__file__).parents[1] / "docs" / "status.md"
# A program that hangs is stopped by XLA.
FLAGS = "--xla_cpu_collective_call_terminate_timeout_seconds=5"


def runs(program, cache):
    """Whether a process of the program, with a persistent cache in a folder, ends without error."""
    variables = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": FLAGS,
    }
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        check=False,
        timeout=300,
    )
    return ran.returncode == 0


def test_cached_programs_for_several_cpu_devices_fail(tmp_path):
    """Without the fault, the warning about it, its page and the exception in conftest.py can go."""
    (program,) = re.findall(r"^```py\n(.*?)^```$", STATUS.read_text("utf-8"), re.M | re.S)
    assert runs(program, tmp_path), "it fails as compiled"
    assert list(tmp_path.iterdir()), "nothing was cached"
    # Which collectives meet is a matter of time.
    assert not all(runs(program, tmp_path) for _ in range(5)), "jaxlib has mended it"
