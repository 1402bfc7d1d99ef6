"""``docs/combinations.md`` says of each pair what its training step does."""

from __future__ import annotations

import pytest

import combinations


# The loss is outside of the model, so what that returns may be gathered on Explicit axes.
@pytest.mark.filterwarnings("ignore:.*operations outside of modules")
@pytest.mark.parametrize("pair", combinations.CELLS, ids=" ".join)
def test_pair(pair):
    assert combinations.run(*pair) == combinations.recorded()[pair]
