"""Imports of higher layers, at the time of the call; the only such imports in the package."""

import importlib
from typing import Any


def late(module: str, name: str) -> Any:
    """An attribute of a module of this package that imports its caller."""
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)
