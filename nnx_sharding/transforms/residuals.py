"""``saved_residuals``: what a function keeps from the forward to the backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from ..lifted_function import LiftedFunction, lift


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, and of those inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)
