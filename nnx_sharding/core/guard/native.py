"""Loads the C extension if it is installed, and chooses the walk that all guards use.

A *walk* reads a model again by a ``Recipe``, a list of ``Step``, and compares what it finds.
``walk.py`` has the walk in Python, the extension has it in C. A ``Guard`` has a walk, and all that
a call needs if the walk finds no change. The extension reads the fields of these tuples by their
positions, so it has to be compiled from the same version of the project.
"""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path

from ... import _compat
from ..static_equality import open_static
from .guard import Guard
from .recipe import Opcode, Recipe, Step
from .walk import PythonWalk, Walk, open_tree, same_value


def _load_walk() -> type[Walk]:
    """Returns the walk of the extension, or `PythonWalk` if it is missing or not wanted.

    Passes the extension the Python functions that it calls. Logs a warning if the extension is
    missing and the user has not asked for that.

    Raises:
      RuntimeError: the extension was compiled from another version of the project, so its fields
        may be at other positions.
    """
    is_pure = bool(os.environ.get("NNX_SHARDING_PURE_PYTHON"))
    try:
        _native = importlib.import_module("._native", __package__)
    except ImportError as error:
        if not is_pure:
            is_missing = isinstance(error, ModuleNotFoundError)
            logging.getLogger("nnx_sharding").warning(
                "nnx_sharding in %s is without its C extension%s, so calls are slower. "
                "Install a wheel, or a C compiler and nnx_sharding again. If this is a checkout, "
                "install it with `pip install -e .`, or run your program in another folder. "
                "NNX_SHARDING_PURE_PYTHON=1 silences this.",
                # The folder is named because a program that runs in a checkout imports the
                # checkout, even if another copy is installed.
                Path(__file__).parents[3],
                "" if is_missing else f" for this Python ({error})",
            )
        return PythonWalk
    # The positions of fields and the numbers of opcodes were compiled into the extension. Its
    # attribute FIELDS lists their names, "Opcode NODE DICT … Step opcode position …".
    fields_of = {cls.__name__: cls._fields for cls in (Step, Recipe, Guard)}
    names_by_class = {"Opcode": tuple(Opcode.__members__), **fields_of}
    words = (word for cls, names in names_by_class.items() for word in (cls, *names))
    if getattr(_native, "FIELDS", None) != " ".join(words):
        raise RuntimeError(
            f"{_native.__file__} was compiled from another version of nnx_sharding. Install it "
            "again; in a checkout, run `python setup.py build_ext --inplace`."
        )
    _native.set_up(
        # The walk in C calls these functions for what C cannot do alone.
        open_tree=open_tree,
        open_static=open_static,
        same_value=same_value,
        mapping_type=_compat.HashableMapping,  # the walk compares types with this class
        # By the name of an opcode, such as VALUE: the slot of a class of Flax that the walk reads
        # directly in memory.
        **_compat.SLOTS,
    )
    # The extension is set up even for a user who wants Python code only, because the tests compare
    # the walk in C with the walk in Python.
    return PythonWalk if is_pure else _native.Walk


FastestWalk: type[Walk] = _load_walk()
