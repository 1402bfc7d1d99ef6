"""Paths of modules, and the names of operations, which have them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

_PART = re.compile(r"(?<!^)[.\[]")  # the beginning of an attribute or key in a path


def around(path: str) -> list[str]:
    """The paths of all that an array, or a module, is in; the outermost first."""
    return [path[: match.start()] for match in _PART.finditer(path)]


def is_within(path: str, module: str) -> bool:
    """Whether a path is that of a module, or below it."""
    return (path + ".").startswith((module + ".", module + "["))


def common(paths: Sequence[str]) -> str:
    """The innermost module that all of these are in; empty without one."""
    inner = [
        path for path in [*around(paths[0]), paths[0]] if all(is_within(x, path) for x in paths)
    ]
    return inner[-1] if inner else ""


def operations(operation: str) -> list[str]:
    """The operations that one was made from, written ``f/(a/dot:b/dot)`` or ``f/a;f/b``."""
    found = []
    for name in operation.split(";"):
        start = 0 if name.startswith("(") else name.find("/(") + 1
        is_joined = name.endswith(")") and (start > 0 or name.startswith("("))
        parts = name[start + 1 : -1].split(":") if is_joined else [name[start:]]
        found += [name[:start] + part for part in parts]
    return found


def module_of(operation: str, known: Collection[str]) -> str | None:
    """The module in the name of an operation, ``jit(f)/jvp(model)/up/dot``: its path, if known."""
    found: str | None = None
    for scope in operation.split("/")[:-1]:  # the last is the operation itself
        if scope.startswith(("jit(", "pjit(")):  # functions, which may be called as modules are
            continue
        part = scope.rpartition("(")[2].rstrip(")")  # without the transforms around it
        inside = [part] if found is None else [f"{found}.{part}", f"{found}{part}", part]
        found = next((path for path in inside if path in known), found)
    return found
