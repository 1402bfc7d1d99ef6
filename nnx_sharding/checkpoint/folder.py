"""Directories of checkpoints."""

from __future__ import annotations

import os
from typing import Any

from etils import epath

# Orbax's file with the names of arrays, and what a `CheckpointManager` calls the item of a step.
NAMES_FILE, ITEM = "_METADATA", "default"

# The entry of this library in the metadata of a checkpoint.
MANIFEST = "nnx_sharding"


def as_folder(path: str | os.PathLike[str]) -> Any:
    """A path as Orbax takes it: absolute, on this machine or in a bucket (``gs://…``)."""
    text = os.fspath(path)
    return epath.Path(text if "://" in text else os.path.abspath(text))


def beside(folder: Any, what: str) -> Any:
    """A path next to a checkpoint that nobody else uses."""
    return folder.parent / f".{folder.name}.nnx_sharding-{what}"


def holds_checkpoint(folder: Any) -> bool:
    """Whether a folder looks like a checkpoint, complete or not."""
    return any((folder / below / NAMES_FILE).exists() for below in ("", ITEM))


def first_line(error: BaseException) -> str:
    """The kind of an error and the beginning of its message."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
