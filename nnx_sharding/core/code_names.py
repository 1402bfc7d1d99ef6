"""The names that the code of a function uses, including the functions defined in it."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import NamedTuple

from .bounded import make_room


class Names(NamedTuple):
    """The names that a code and the functions defined in it use."""

    globals: tuple[str, ...]
    attributes: frozenset[str]
    imports: frozenset[str]


# By id, since hashing a code hashes its instructions; the code is held so that its id stays.
_MAX_CODES = 4096
_NAMES: dict[int, tuple[types.CodeType, Names]] = {}


def names_of(code: types.CodeType) -> Names:
    """Returns the names that a code uses."""
    entry = _NAMES.get(id(code))
    if entry is None:
        entry = _NAMES[id(code)] = code, _read_names(code)
        make_room(_NAMES, _MAX_CODES)
    return entry[1]


def _read_names(code: types.CodeType) -> Names:
    """Returns the names in the instructions of a code, by what the instructions do with them."""
    global_names: dict[str, None] = {}  # in the order in which they are first used
    attributes, imports = set[str](), set[str]()
    for instruction in _instructions(code):
        name, operation = instruction.argval, instruction.opname
        if operation in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            global_names[name] = None
        elif operation in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            attributes.add(name)
        elif operation == "IMPORT_NAME":
            imports.add(name)
    return Names(tuple(global_names), frozenset(attributes), frozenset(imports))


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Yields the instructions of a code and of the functions defined in it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)
