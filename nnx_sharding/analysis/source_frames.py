"""Frames of tracebacks, as pairs of a file and a line: which is the user's, and how to write it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import PurePath

from ..errors import is_library


def users_frame(frames: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
    """Returns the first frame that is not in a library, else None.

    ``frames`` are (file, line), innermost first. Frames in libraries are left out because the line
    of the user's model that calls a layer says more than a line of that layer's code in Flax.
    """
    for file, line in frames:
        if not (is_library(file) or "site-packages" in file or "<frozen" in file):
            return file, line
    return None


def users_line(frames: Sequence[tuple[str, int]]) -> str | None:
    """Writes the innermost frame outside of libraries, else the innermost: ``model.py:12``.

    Returns None if there are no frames, or if the file is unknown.
    """
    frame = users_frame(frames) or next(iter(frames), None)
    if frame is None:
        return None
    file, line = frame
    return f"{file_title(file)}:{line}" if file else None


def file_title(file: str) -> str:
    """Returns the name of a file without its folder; for a cell of a notebook, its title."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        # IPython compiles a cell under a name made from a hash, and this name says nothing to the
        # author of the cell. `format_code_name` returns the kind of the code, and its title, for a
        # cell; None for other files.
        cell: tuple[str, str] | None = shell.compile.format_code_name(file)
        if cell is not None:
            return cell[1]
    return PurePath(file).name
