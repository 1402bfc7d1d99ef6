"""Finds the Variables and submodules of a module, and replaces values for the time of its call.

A trace asks for them at each call of each module, so this reads ``__dict__`` directly. That is much
faster than ``nnx.iter_graph``, and runs no hook of a class (``on_get_value``, ``__getattr__``) that
the user's code would not have run.

A *path* is the attributes, keys and indices that lead from a module to something in it:
``("blocks", 0, "up", "kernel")``. A *container* is a list, a tuple or a dict, of Python or of NNX.
A *node* is an object in which NNX looks for Variables (modules, optimizers, `nnx.List` and
`nnx.Dict`). Here it counts only if it has a ``__dict__``.
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

# Most attributes of modules have these types, and hold neither Variables nor modules.
_ATOMS = frozenset({bool, float, int, str, type, type(None), types.FunctionType})
# Containers are recognized by their base classes (``__mro__``), because ``isinstance`` with
# abstract base classes would dominate the run time.
_CONTAINERS = frozenset({nnx.List, nnx.Dict, list, tuple, dict})
# The Variables of these types and their subclasses are no parameters of a layer.
_NO_PARAMETERS = frozenset({nnx.RngState, nnx.Cache})


def own_variables(module: object) -> Iterator[tuple[Path, Variable]]:
    """Yields a module's own Variables, each after its path. Lists and dicts of it are searched.

    Variables of submodules are not its own. Random state (``nnx.RngState``) and caches
    (``nnx.Cache``) are left out, because no layer computes with them as with parameters.
    """
    # The order is reversed. In a trace, attributes are sorted by name, and callers that look for
    # the kernel of a layer take the first Variable that fits, which would sometimes be a bias.
    for path, value in reversed([*_walk(module, into_modules=False)]):
        if _compat.is_variable(value) and _NO_PARAMETERS.isdisjoint(type(value).__mro__):
            yield path, value


def is_parameter(variable: Variable) -> bool:
    """Returns whether a strategy gathers a Variable while its module runs: Params only.

    Other Variables are data, such as a cache of keys, and are used as they are sharded.
    """
    return nnx.Param in type(variable).__mro__


def modules_in(root: object) -> Iterator[tuple[Path, Any]]:
    """Yields a module and all nodes below it, each once, with its first path from ``root``."""
    return ((path, value) for path, value in _walk(root, into_modules=True) if _is_node(value))


def is_layer(module: object) -> bool:
    """Returns whether a module has no submodules."""
    return sum(isinstance(inner, nnx.Module) for _, inner in modules_in(module)) == 1


def _walk(root: object, *, into_modules: bool) -> Iterator[tuple[Path, Any]]:
    """Yields ``root`` and what it holds, each after its path, depth-first.

    It yields modules (each once), containers, Variables and arrays, but not the values of `_ATOMS`:
    None, bools, numbers, strings, classes and functions.

    Args:
      into_modules: whether it goes into other modules than ``root``. It always goes into
        containers.
    """
    seen_nodes = set[int]()  # the ids of nodes
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
            # The order is reversed because the last item is popped first.
            pending += [((*path, key), part) for key, part in reversed([*_items(value)])]


def _is_node(value: object) -> bool:
    """Whether NNX looks into a value, and the value has a ``__dict__`` to read."""
    return _compat.is_node(value) and hasattr(value, "__dict__")


def _items(value: object) -> Iterable[tuple[Any, object]]:
    """Returns the contents of a module or a container, each after its attribute, key or index.

    The result is empty for other values.
    """
    if _is_node(value):
        attributes = vars(value).items()
        if isinstance(value, nnx.List):  # items are attributes named "0", "1", …
            return [(int(k) if k.isdigit() else k, part) for k, part in attributes]
        return attributes
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()


@contextlib.contextmanager
def replaced_values(values: Iterable[tuple[Variable, jax.Array]]) -> Iterator[None]:
    """Gives Variables other values within the block, such as gathered ones.

    Afterwards they have their old values again. A value that the block itself assigned stays,
    resharded like the old value. ``values`` are pairs of a Variable and its value for the block.
    """
    # The triples have the Variable, the value before the block, and the value in it.
    replaced = [(variable, _compat.get_value(variable), new) for variable, new in values]
    for variable, _, new in replaced:
        _compat.set_value(variable, new)
    try:
        yield
    finally:  # values are restored after an error, too, because the function may catch it
        for variable, old, new in replaced:
            now = _compat.get_value(variable)
            is_unassigned = now is new
            _compat.set_value(variable, old if is_unassigned else reshard_like(now, old))


def reshard_like(value: AnyArray, like: AnyArray) -> Any:
    """Returns an array with the sharding in the type of another one of the same shape.

    The array is returned unchanged if the shapes differ, or if that type has no mesh.
    """
    value_type, like_type = jax.typeof(value), jax.typeof(like)
    sharding = getattr(like_type, "sharding", None)  # values of a hijax type have none
    if sharding is None or sharding.mesh.empty or value_type.shape != like_type.shape:
        return value
    return value if value_type.sharding == sharding else jax.sharding.reshard(value, sharding)
