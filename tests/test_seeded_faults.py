"""A catalogue of seeded faults: which are caught, what is named, and that right programs pass.

Each fault of `faults` is of a kind that public reports tell of. It runs in four surroundings, and
so does its twin: the right program that differs from it in one expression. With
``SEEDED_FAULTS=results.jsonl`` in the environment, all cells leave a line in that file, from which
tools/draw_seeded_faults.py writes the page.
"""

from __future__ import annotations

import json
import os
import time

import pytest

from faults import FAULTS, SURROUNDINGS, check

# Missed: `jit` does not warn of captured arrays that are replicated.
MISSED = {("evaluation captures the weights of its first call", "data parallel")}


@pytest.mark.parametrize("is_wrong", [True, False], ids=["wrong", "right"])
@pytest.mark.parametrize("around", SURROUNDINGS)
@pytest.mark.parametrize("name", FAULTS)
def test_is_caught_or_passes(name, around, is_wrong):
    start = time.process_time()
    text, is_named = check(name, around, is_wrong)
    if results := os.environ.get("SEEDED_FAULTS"):
        cell = {"name": name, "around": around, "is_wrong": is_wrong, "text": text[:500]}
        cell |= {"is_named": is_named, "seconds": time.process_time() - start}
        with open(results, "a") as file:
            file.write(json.dumps(cell) + "\n")
    if is_wrong and (name, around) in MISSED:
        assert not text, f"no longer missed: {text}"
    elif is_wrong:
        assert is_named, text or "nothing is said"
    else:
        assert not text, text
