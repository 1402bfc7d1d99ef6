"""The extension, if it is there: the walk that is used, and the hooks that the extension calls.

A *walk* reads a model again by a ``Recipe``, a list of ``Step``, and compares what it finds;
``walk.py`` has it in Python, the extension in C. A ``Guard`` is a walk, and what a call needs if
it finds no change. The extension reads the fields of these tuples by their positions.
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
    """Returns the walk of the extension; that in Python if it is missing or not wanted.

    Passes the extension what it calls and reads. Raises a ``RuntimeError`` for one that was
    compiled from another version, whose fields may be others.
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
                # In a checkout, a program imports that, even if another copy is installed.
                Path(__file__).parents[3],
                "" if is_missing else f" for this Python ({error})",
            )
        return PythonWalk
    # The fields of these tuples and the numbers of opcodes were compiled into the extension. It has
    # a text that lists them, "Opcode NODE DICT … Step opcode position …", to compare with ours.
    fields_of = {cls.__name__: cls._fields for cls in (Step, Recipe, Guard)}
    names = {"Opcode": tuple(Opcode.__members__), **fields_of}
    expected = " ".join(word for name, parts in names.items() for word in (name, *parts))
    if getattr(_native, "FIELDS", None) != expected:
        raise RuntimeError(
            f"{_native.__file__} was compiled from another version of nnx_sharding. Install it "
            "again; in a checkout, run `python setup.py build_ext --inplace`."
        )
    _native.set_up(
        # What its walk calls or compares with, where C cannot do it alone.
        open_tree=open_tree,
        open_static=open_static,
        same_value=same_value,
        mapping_type=_compat.HashableMapping,
        # By opcode, such as VALUE, the slot of a class of Flax, which it reads in memory.
        **_compat.SLOTS,
    )
    # Set up in any case, since the tests compare its walk with that in Python.
    return PythonWalk if is_pure else _native.Walk


FastestWalk: type[Walk] = _load_walk()
