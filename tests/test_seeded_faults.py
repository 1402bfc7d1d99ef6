"""A catalogue of seeded faults: what `assert_same` catches, what it names, and no false alarm.

Each fault of `faults` is one that public reports tell of. It is compared with one device in four
surroundings, and so is the right program that differs from it in one expression. A few cells run
before each merge; all of them at night, and with ``python tests/test_seeded_faults.py``, which
writes the table of docs/seeded_faults.md.
"""

from __future__ import annotations

import pytest

from faults import FAULTS, SURROUNDINGS, check

# One of each place where a fault may be, each in other surroundings.
SAMPLE = {
    "row parallel product not summed": "tensor",
    "gradient of a column parallel input not summed": "fsdp",
    "masked loss averaged on each shard": "data parallel",
    "gradients clipped before they are averaged": "fsdp × tensor",
}


def cells(names):
    return [
        pytest.param(name, around, is_wrong, id=f"{name}-{around}-{'wrong' if is_wrong else 'right'}")
        for name in names
        for around in SURROUNDINGS
        for is_wrong in (True, False)
    ]


def is_as_expected(name, around, is_wrong):
    fault = FAULTS[name]
    verdict = check(fault, SURROUNDINGS[around], is_wrong)
    if not is_wrong:
        assert not verdict.text, verdict.text
    else:
        assert verdict.names(fault.where), verdict.text


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.parametrize("is_wrong", [True, False])
def test_some(name, is_wrong):
    is_as_expected(name, SAMPLE[name], is_wrong)


@pytest.mark.parametrize(("name", "around", "is_wrong"), cells(FAULTS))
def test_all(name, around, is_wrong):
    is_as_expected(name, around, is_wrong)
