"""What a program gets with ``import nnx_sharding``, and what it does not pay for."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import nnx_sharding

ON_DEMAND = sorted(nnx_sharding._MODULES)


@pytest.mark.parametrize("name", ON_DEMAND)
def test_parts_come_when_they_are_asked_for(name):
    assert getattr(nnx_sharding, name) is importlib.import_module(f"nnx_sharding.{name}")
    assert name in dir(nnx_sharding)


def test_other_names_are_errors():
    with pytest.raises(AttributeError, match="no attribute 'placment'"):
        nnx_sharding.placment  # noqa: B018


def test_parts_and_libraries_that_are_not_needed_are_not_imported():
    unwanted = [*(f"nnx_sharding.{name}" for name in ON_DEMAND), "orbax.checkpoint.checkpointers"]
    unwanted = [name for name in unwanted if name not in NEEDED]
    program = (
        "import sys, flax.nnx; before = set(sys.modules); import nnx_sharding; "
        f"print(sorted((set(sys.modules) - before) & {set(unwanted)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


# The stages stand on the one, StateSharding on the other.
NEEDED = ("nnx_sharding.analysis", "nnx_sharding.diagnostics", "nnx_sharding.filters")
