"""Orbax and its paths, imported when they are needed: that takes longer than all of ours."""

from __future__ import annotations

import importlib
import os
from typing import Any


def orbax() -> Any:
    """The module ``orbax.checkpoint``."""
    return importlib.import_module("orbax.checkpoint")


def as_folder(path: str | os.PathLike[str]) -> Any:
    """A path as Orbax takes it: absolute, on this machine or in a bucket (``gs://…``)."""
    text = os.fspath(path)
    paths = importlib.import_module("etils.epath")
    return paths.Path(text if "://" in text else os.path.abspath(text))


def beside(folder: Any, what: str) -> Any:
    """A name next to a checkpoint that nobody else uses."""
    return folder.parent / f".{folder.name}.nnx_sharding-{what}"
