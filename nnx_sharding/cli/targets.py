"""Functions of the user's by the names that the command line has: ``module:function``."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..fitting import suggestion


class TargetError(ValueError):
    """A text does not name a function."""


class UsersError(RuntimeError):
    """Code of the user's failed."""


def find(text: str) -> Callable[..., Any]:
    """The function that a text names.

    Args:
      text: ``package.module:function`` or ``path/to/file.py:function``; the function may be an
        attribute of something, as in ``module:Model.plan``.

    Raises:
      TargetError: there is no such module, file or function.
      UsersError: the module fails when it is imported.
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise TargetError(
            f"{text!r} names no function; write package.module:function or path/file.py:function."
        )
    module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [own for own in vars(found) if not own.startswith("_")]
            raise TargetError(f"{place} has no {name!r}{suggestion(part, names)}")
        found = getattr(found, part)
    if not callable(found):
        raise TargetError(f"{text} is no function, but {found!r:.200}.")
    return functools.partial(_called, text, found)


def _called(text: str, function: Callable[..., Any], mesh: Any) -> Any:
    """What the function returns; the mesh is given to it if it has a parameter of this name.

    Raises:
      UsersError: it fails.
    """
    try:
        takes_mesh = "mesh" in inspect.signature(function).parameters
        return function(**({"mesh": mesh} if takes_mesh else {}))
    except (Exception, SystemExit) as error:
        raise UsersError(f"{text} failed: {told(error)}") from error


def told(error: BaseException) -> str:
    """An error in one text: its type, and what it says."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _from_name(name: str) -> ModuleType:
    # As for `python -m`; a script in a bin folder has its own folder there.
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise TargetError(f"there is no module {error.name!r}.") from None
        raise UsersError(f"{name} cannot be imported: {told(error)}") from error
    except (Exception, SystemExit) as error:
        raise UsersError(f"{name} cannot be imported: {told(error)}") from error


def _from_file(path: Path) -> ModuleType:
    """The module of a file, which may import its neighbours, as when Python runs it."""
    if not path.is_file():
        raise TargetError(f"there is no file {path}.")
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
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsersError(f"{path} cannot be imported: {told(error)}") from error
    return module
