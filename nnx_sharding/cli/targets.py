"""The user's functions by their names on the command line: ``module:function``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..specs.fitting import suggestion
from .options import UsageError, user_code


def find(text: str) -> Callable[..., Any]:
    """The function for a name such as ``package.module:Model.plan`` or ``path/to/file.py:plan``."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise UsageError(
            f"{text!r} does not name a function; write package.module:function or "
            "path/file.py:function."
        )
    value: Any = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
    for part in name.split("."):
        if not hasattr(value, part):
            names = [known for known in vars(value) if not known.startswith("_")]
            raise UsageError(f"{place} has no {name!r}{suggestion(part, names)}")
        value = getattr(value, part)
    if not callable(value):
        raise UsageError(f"{text} is not a function, but {value!r:.200}.")
    function: Callable[..., Any] = value
    return function


def _from_name(name: str) -> ModuleType:
    # As for `python -m`; for a script, sys.path has the folder of the script instead.
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    with user_code(f"{name} cannot be imported"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise UsageError(f"no module named {error.name!r}.") from None


def _from_file(path: Path) -> ModuleType:
    """The module of a file, which may import its neighbours, as when Python runs it."""
    if not path.is_file():
        raise UsageError(f"no such file: {path}.")
    path = path.resolve()
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = path.stem if known is None else f"_{path.stem}_of_{path.parent.name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with user_code(f"{path} cannot be imported"):
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module
