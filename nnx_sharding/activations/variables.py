"""Modules and their Variables while a call is intercepted: found, read and set without hooks."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from flax import nnx

from .. import _compat
from ..specs.paths import Path

# The types of most attributes of modules.
_ATOMS = frozenset({bool, float, int, str, type, type(None), types.FunctionType})
# Found among the base classes: isinstance with abstract base classes would dominate the run time.
_CONTAINERS = frozenset({nnx.List, nnx.Dict, list, tuple, dict})
# No layer computes with them as with parameters.
_NO_PARAMETERS = frozenset({nnx.RngState, nnx.Cache})


def own_variables(module: Any) -> Iterator[tuple[Path, Any]]:
    """A module's own Variables by path, without those of submodules, random state and caches."""
    # In a trace, attributes are sorted: the last one first, so that kernels come before biases.
    for path, value in reversed([*_held(module, nested=False)]):
        if _compat.is_variable(value) and _NO_PARAMETERS.isdisjoint(type(value).__mro__):
            yield path, value


def is_parameter(variable: Any) -> bool:
    """Whether a strategy gathers a Variable while its module runs: Params only.

    Others are data, such as a cache of keys, and are used as they are sharded.
    """
    return nnx.Param in type(variable).__mro__


def modules_in(root: Any) -> Iterator[tuple[Path, Any]]:
    """A module and those in it, each once, with its first path."""
    return ((path, value) for path, value in _held(root, nested=True) if _is_node(value))


def is_layer(module: Any) -> bool:
    """Whether a module has no submodules."""
    return sum(isinstance(inner, nnx.Module) for _, inner in modules_in(module)) == 1


def _held(root: Any, *, nested: bool) -> Iterator[tuple[Path, Any]]:
    """A module and what it holds, by path: in containers and, if nested, in other modules."""
    seen: set[int] = set()
    stack: list[tuple[Path, Any]] = [((), root)]
    while stack:
        path, value = stack.pop()
        if type(value) in _ATOMS or id(value) in seen:
            continue
        if _is_node(value):
            seen.add(id(value))
        yield path, value
        if nested or value is root or not _CONTAINERS.isdisjoint(type(value).__mro__):
            stack += [((*path, key), part) for key, part in reversed([*_items(value)])]


def _is_node(value: Any) -> bool:
    return _compat.is_node(value) and hasattr(value, "__dict__")


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """What a module or a container holds, by key."""
    if _is_node(value):
        is_list = isinstance(value, nnx.List)
        attributes = vars(value).items()
        return [(int(k) if is_list and k.isdigit() else k, part) for k, part in attributes]
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()


@contextlib.contextmanager
def replaced_values(values: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    """Replaces values of Variables within the block; what is set in it is kept, resharded."""
    before = [(variable, _compat.get_value(variable), new) for variable, new in values]
    for variable, _, new in before:
        _compat.set_value(variable, new)
    try:
        yield
    finally:
        for variable, old, new in before:
            value = _compat.get_value(variable)
            _compat.set_value(variable, old if value is new else resharded(value, old))


def resharded(value: Any, like: Any) -> Any:
    """An array with the sharding in the type of another one of its rank, if that is on a mesh."""
    new, old = jax.typeof(value), jax.typeof(like)
    sharding = getattr(old, "sharding", None)  # values of a hijax type have none
    if sharding is None or sharding.mesh.empty or new.shape != old.shape:
        return value
    return value if new.sharding == sharding else jax.sharding.reshard(value, sharding)
