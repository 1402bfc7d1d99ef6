"""``docs/combinations.md`` says of each pair what its training step does."""

from __future__ import annotations

import pytest

import combinations


@pytest.mark.parametrize("pair", combinations.CELLS, ids=" ".join)
def test_pair(pair):
    assert combinations.run(*pair) == combinations.recorded()[pair]
