"""Finds the function that a user names on the command line, and tells its errors from ours.

A ``UsageError`` is a mistake of the command line, such as a function that does not exist. A
``UserError`` is one in the user's code, such as a module that cannot be imported.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..specs.fitting import suggestion
from .options import UsageError


class UserError(RuntimeError):
    """The user's code failed."""


@contextlib.contextmanager
def user_code(what: str) -> Iterator[None]:
    """Raises a UserError for any error that the user's code raises in the block.

    ``what`` is the beginning of its text: ``train.py:step failed``. A KeyboardInterrupt, and the
    UsageError or UserError of a nested block, are raised as they are.
    """
    try:
        yield
    # A UsageError or UserError comes from a nested block, and has a message already.
    except (UsageError, UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a SystemExit, for example, would end this program
        text = f": {error}" if str(error) else ""
        raise UserError(f"{what}: {type(error).__name__}{text}") from error


def find(text: str, *, is_function: bool = True) -> Any:
    """Imports the function that a user names on the command line.

    Args:
      text: ``package.module:function``, ``path/to/file.py:function``, or with the name of a class
        in front of the function: ``train.py:Model.step``.
      is_function: whether the value has to be a function.

    Raises:
      UsageError: there is no such function or value.
      UserError: the module cannot be imported.
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise UsageError(
            f"{text!r} does not name a function; write package.module:function or "
            "path/file.py:function."
        )
    value = _import(place)
    # A method or a static function of a class may be named, too.
    for part in name.split("."):
        if not hasattr(value, part):
            # `suggestion` is empty if no public name of the module or class is similar.
            names = [known for known in vars(value) if not known.startswith("_")]
            raise UsageError(f"{place} has no {name!r}{suggestion(part, names)}")
        value = getattr(value, part)
    if is_function and not callable(value):
        raise UsageError(f"{text} is not a function, but {value!r:.200}.")
    return value


def _import(place: str) -> Any:
    """Imports a module by its name, or by the path of its file.

    Raises:
      UsageError: there is no such file or module, or another module has the name of the file.
      UserError: the module raises an error while it is imported.
    """
    path = Path(place).resolve() if place.endswith(".py") else None
    if path is not None and not path.is_file():
        raise UsageError(f"no such file: {place}.")
    # As with `python`, a file may import modules from its own folder, and a module may import
    # modules from the current folder.
    folder = str(path.parent if path else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = path.stem if path else place
    with user_code(f"{place} cannot be imported"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # The module may exist but import a missing module. If the module itself is missing, the
            # error names it or its package: `a` or `a.b` for `a.b`.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise UsageError(f"no module named {error.name!r}.") from None
    # Python imports only the first of two files with one name.
    if path is not None and getattr(module, "__file__", None) != str(path):
        raise UsageError(f"{place} has the name of another module, {module!r}; rename the file.")
    return module
