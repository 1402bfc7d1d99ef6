"""Paths of modules, and the names of operations, which have them.

While a function is traced, each call of a module opens a name scope: the module's path below that
of the call around it (`activations/calls.py`). JAX wraps scopes in its transforms. So the path of a
module is put together from the scopes, as far as the result is the path of a known module:

    jit(step)/transpose(jvp(model))/blocks[0]/up/dot_general       model.blocks[0].up
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from ..specs.paths import enclosing_paths

_INDEX = re.compile(r"\[\d+\]")


def folded(path: str) -> str:
    """Returns the path that all modules of a list share, such as ``model.blocks[*].up``."""
    return _INDEX.sub("[*]", path)


def is_within(path: str, module: str) -> bool:
    """Tells whether a path is that of a module, or below it: ``model.up`` is within ``model``."""
    return (path + ".").startswith((module + ".", module + "["))


def common(paths: Sequence[str]) -> str:
    """Returns the path of the innermost module that all of ``paths`` are in; empty without one.

    A path is within itself. There has to be one path at least.
    """
    outermost_first = [*enclosing_paths(paths[0]), paths[0]]
    around_all = [
        module for module in outermost_first if all(is_within(path, module) for path in paths)
    ]
    return around_all[-1] if around_all else ""


def operations(operation: str) -> list[str]:
    """Lists the names that XLA joined to one, in two ways: ``f/(a/dot:b/dot)`` and ``f/a;f/b``.

    The first name becomes ``["f/a/dot", "f/b/dot"]``. Brackets within brackets are not taken apart.
    """
    merged = []
    for name in operation.split(";"):
        # A bracket that joins names begins a scope, as in ``f/(a/dot:b/dot)`` and in
        # ``(a/dot:b/dot)``. The brackets of ``jit(f)/dot`` do not.
        joined = _JOINED.fullmatch(name) if name.endswith(")") else None
        if joined is None:
            merged.append(name)
        else:
            merged += [joined["prefix"] + part for part in joined["names"].split(":")]
    return merged


_JOINED = re.compile(r"(?P<prefix>|.*?/)\((?P<names>.*)\)", re.DOTALL)


def module_of(operation: str, known: Collection[str]) -> str | None:
    """Returns the path of the innermost known module in the name of an operation; None for none.

    The example at the top of this file takes the scopes ``model``, ``blocks[0]`` and ``up``.
    """
    module: str | None = None
    for scope in operation.split("/")[:-1]:  # The last part is the operation itself.
        # Scopes of functions are left out, because a function may have the name of a module:
        # ``jit(model)``.
        if scope.startswith(("jit(", "pjit(")):
            continue
        part = scope.rpartition("(")[2].rstrip(")")  # "transpose(jvp(model))" → "model"
        # The scope is an attribute of the module so far, ``up``; or a key in it, ``[0]``; or
        # another argument of the function, ``teacher``.
        paths = [part] if module is None else [f"{module}.{part}", f"{module}{part}", part]
        module = next((path for path in paths if path in known), module)
    return module


def in_module(operation: str, module: str) -> str:
    """Writes the name of an operation with the path of its module: ``model.up/dot_general``.

    Scopes within the module stay, but for the subscripts of ``jnp.einsum``, which are longer than
    what they name. An operation whose name does not have the module is returned as it is.
    """
    known = {*enclosing_paths(module), module}
    scopes = operation.split("/")
    for count in range(1, len(scopes)):
        if module_of("/".join(scopes[: count + 1]), known) == module:
            inside = [scope for scope in scopes[count:] if "->" not in scope]
            return "/".join([module, *inside])
    return operation
