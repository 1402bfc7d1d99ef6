"""Looks up a private name."""

from __future__ import annotations

import importlib
import operator
from typing import Any

import flax
import jax

from .._version import __version__


def private_name(module: str, name: str, *, optional: bool = False) -> Any:
    """A private name; None for an optional one that is not in the installed release."""
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        if optional:
            return None
        raise ImportError(
            f"nnx_sharding {__version__} needs {module}.{name}, which JAX {jax.__version__} with "
            f"Flax {flax.__version__} does not have. Install a newer nnx_sharding, or earlier "
            "releases of JAX and Flax."
        ) from error
