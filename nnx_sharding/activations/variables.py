"""The Variables of modules while a call is intercepted: read and set without hooks."""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from .. import _compat
from ..paths import Path
from .record import frame_here

# The types of most attributes of modules.
_ATOMS = frozenset({bool, float, int, str, type, type(None), types.FunctionType})
# Found among the base classes: isinstance with abstract base classes would dominate the run time.
_CONTAINERS = frozenset({nnx.List, nnx.Dict, list, tuple, dict})
# A cache is data: it is sharded with the batch, like activations.
_NO_PARAMETERS = frozenset({nnx.RngState, nnx.Cache})


def own_variables(module: Any) -> Iterator[tuple[Path, Any]]:
    """A module's own Variables by path, without those of submodules, random state and caches."""
    stack: list[tuple[Path, Any]] = [((name,), value) for name, value in vars(module).items()]
    while stack:
        path, value = stack.pop()
        if type(value) in _ATOMS:
            continue
        if _compat.is_variable(value):
            if _NO_PARAMETERS.isdisjoint(type(value).__mro__):
                yield path, value
        elif not _CONTAINERS.isdisjoint(type(value).__mro__):
            parts = (
                value.items()
                if isinstance(value, dict)
                else vars(value).items()
                if (_compat.is_node(value))
                else enumerate(value)
            )
            stack += [((*path, key), part) for key, part in parts]


def modules_by_path(root: Any) -> Iterator[tuple[Path, Any]]:
    """A module and those in it, each once, with its first path."""
    seen: set[int] = set()
    stack: list[tuple[Path, Any]] = [((), root)]
    while stack:
        path, value = stack.pop()
        if _compat.is_node(value) and hasattr(value, "__dict__"):
            if id(value) in seen:
                continue
            seen.add(id(value))
            yield path, value
            items: list[Any] = [(_key(value, name), part) for name, part in vars(value).items()]
        elif isinstance(value, dict):
            items = [*value.items()]
        else:
            items = [*enumerate(value)] if isinstance(value, list | tuple) else []
        stack += [((*path, key), part) for key, part in reversed(items)]


def is_layer(module: Any) -> bool:
    """Whether a module has no submodules."""
    return next(itertools.islice(modules_by_path(module), 1, None), None) is None


def _key(node: Any, name: str) -> Any:
    return int(name) if isinstance(node, nnx.List) and name.isdigit() else name


def reachable(tree: Any) -> tuple[list[Any], list[Any]]:
    """The modules and the Variables in a pytree of modules, each once."""
    modules, variables = dict[int, Any](), dict[int, Any]()
    stack = [tree]
    while stack:
        value = stack.pop()
        if type(value) in _ATOMS:
            continue
        if _compat.is_variable(value):
            variables[id(value)] = value
        elif _compat.is_node(value) and hasattr(value, "__dict__"):
            if id(value) not in modules:
                modules[id(value)] = value
                stack += vars(value).values()
        elif isinstance(value, list | tuple):
            stack += value
        elif isinstance(value, dict):
            stack += value.values()
    return [*modules.values()], [*variables.values()]


class Saved:
    """The content of modules, to be restored after a call that failed."""

    def __init__(self, tree: Any):
        modules, variables = reachable(tree)
        self.variables, self._frame = variables, frame_here()
        self._attributes = [(x, dict(vars(x))) for x in modules]
        self._values = [(x, _compat.get_value(x), dict(_compat.get_metadata(x))) for x in variables]

    def restore(self) -> None:
        """Undoes what a call changed."""
        for module, attributes in self._attributes:
            vars(module).clear()
            vars(module).update(attributes)
        for variable, value, metadata in self._values:
            _compat.set_value(variable, value)
            _compat.set_metadata(variable, metadata)
        if self._frame is not None:
            self._frame.retry()


class Replaced:
    """Replaces values of Variables for the duration of a call."""

    def __init__(self, values: list[tuple[Any, Any]]):
        self._values = [(variable, _compat.get_value(variable), new) for variable, new in values]

    def __enter__(self) -> None:
        for variable, _, new in self._values:
            _compat.set_value(variable, new)

    def __exit__(self, *_: Any) -> None:
        """Restores the old values; values set meanwhile are kept, with the old sharding."""
        for variable, old, new in self._values:
            value = _compat.get_value(variable)
            _compat.set_value(variable, old if value is new else resharded(value, old))


def resharded(value: Any, like: Any) -> Any:
    """An array with the sharding in the type of another one of its rank."""
    new, old = jax.typeof(value), jax.typeof(like)
    is_other = new.sharding != old.sharding and new.shape == old.shape
    return jax.sharding.reshard(value, old.sharding) if is_other else value
