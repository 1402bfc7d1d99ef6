"""Finds the Variables and submodules of a module, and replaces values for the time of its call.

A trace asks for them at each call of each module, so this reads ``__dict__`` directly, much faster
than ``nnx.iter_graph``, and no hook of a class (``on_get_value``, ``__getattr__``) runs that the
user's code would not have run.

A *path* is the attributes, keys and indices that lead from a module to what it holds: ``("blocks",
0, "up", "kernel")``. A *container* is a list, a tuple or a dict, of Python or of NNX; a *node* is
what NNX looks into for Variables (modules, optimizers, `nnx.List` and `nnx.Dict`), here only if it
has a ``__dict__``.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import jax
from flax import nnx

from .. import _compat
from ..specs.paths import Path
from ..specs.types import AnyArray

Variable: TypeAlias = "nnx.Variable[Any]"

# The types of most attributes of modules, which hold nothing.
_ATOMS = frozenset({bool, float, int, str, type, type(None), types.FunctionType})
# Looked for among the base classes (``__mro__``): ``isinstance`` with abstract base classes would
# dominate the run time.
_CONTAINERS = frozenset({nnx.List, nnx.Dict, list, tuple, dict})

_NO_PARAMETERS = frozenset({nnx.RngState, nnx.Cache})


def own_variables(module: object) -> Iterator[tuple[Path, Variable]]:
    """Yields a module's own Variables, each after its path, also those in its lists and dicts.

    Those of submodules are not its own. Random state (``nnx.RngState``) and caches (``nnx.Cache``)
    are left out, as no layer computes with them as with parameters.
    """
    # From the last one: in a trace, attributes are sorted by name, and callers that look for the
    # kernel of a layer take the first that fits. A bias would fit sometimes.
    for path, value in reversed([*_walk(module, into_modules=False)]):
        if _compat.is_variable(value) and _NO_PARAMETERS.isdisjoint(type(value).__mro__):
            yield path, value


def is_parameter(variable: Variable) -> bool:
    """Returns whether a strategy gathers a Variable while its module runs: Params only.

    Others are data, such as a cache of keys, and are used as they are sharded.
    """
    return nnx.Param in type(variable).__mro__


def modules_in(root: object) -> Iterator[tuple[Path, Any]]:
    """Yields a module and all below it, each once, with its first path from ``root``."""
    return ((path, value) for path, value in _walk(root, into_modules=True) if _is_node(value))


def is_layer(module: object) -> bool:
    """Returns whether a module has no submodules."""
    return sum(isinstance(inner, nnx.Module) for _, inner in modules_in(module)) == 1


def _walk(root: object, *, into_modules: bool) -> Iterator[tuple[Path, Any]]:
    """Yields ``root`` and what it holds, each after its path, depth-first.

    It yields modules (each once), containers, Variables and arrays, but not the values of `_ATOMS`:
    None, bools, numbers, strings, classes and functions.

    Args:
      root: a module.
      into_modules: whether it goes into other modules than ``root``. Into containers it always
        goes.
    """
    seen_nodes = set[int]()  # by id
    pending: list[tuple[Path, object]] = [((), root)]  # no recursion: models may be nested deeply
    while pending:
        path, value = pending.pop()
        if type(value) in _ATOMS or id(value) in seen_nodes:
            continue
        if _is_node(value):
            seen_nodes.add(id(value))  # modules may form cycles; lists and dicts in them do not
        yield path, value
        # Like ``isinstance``, but faster; see `_CONTAINERS`.
        is_container = not _CONTAINERS.isdisjoint(type(value).__mro__)
        if value is root or into_modules or is_container:
            # In reverse, as the last one is popped first.
            pending += [((*path, key), part) for key, part in reversed([*_items(value)])]


def _is_node(value: object) -> bool:
    """Tells whether NNX looks into a value; not for node types without a ``__dict__`` to read."""
    return _compat.is_node(value) and hasattr(value, "__dict__")


def _items(value: object) -> Iterable[tuple[Any, object]]:
    """Returns what a module or a container holds, each after its attribute, key or index.

    Nothing for other values.
    """
    if _is_node(value):
        attributes = vars(value).items()
        if isinstance(value, nnx.List):  # whose items are attributes named "0", "1", …
            return [(int(k) if k.isdigit() else k, part) for k, part in attributes]
        return attributes
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()


@contextlib.contextmanager
def replaced_values(values: Iterable[tuple[Variable, jax.Array]]) -> Iterator[None]:
    """Gives Variables other values within the block, such as gathered ones.

    Afterwards they have their old values again. What the block itself assigned stays, resharded
    like the old value. ``values`` are pairs of a Variable and its value for the block.
    """
    # (Variable, the value before the block, the value in it)
    replaced = [(variable, _compat.get_value(variable), new) for variable, new in values]
    for variable, _, new in replaced:
        _compat.set_value(variable, new)
    try:
        yield
    finally:  # also after an error, which the function may catch
        for variable, old, new in replaced:
            now = _compat.get_value(variable)
            is_unassigned = now is new
            _compat.set_value(variable, old if is_unassigned else reshard_like(now, old))


def reshard_like(value: AnyArray, like: AnyArray) -> Any:
    """Returns an array with the sharding in the type of another one of the same shape.

    Unchanged if the shapes differ, or that type has no mesh.
    """
    value_type, like_type = jax.typeof(value), jax.typeof(like)
    sharding = getattr(like_type, "sharding", None)  # values of a hijax type have none
    if sharding is None or sharding.mesh.empty or value_type.shape != like_type.shape:
        return value
    return value if value_type.sharding == sharding else jax.sharding.reshard(value, sharding)
