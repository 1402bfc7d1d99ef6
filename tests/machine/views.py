"""What the functions under test see.

A trace keeps all of it as a constant of its output, so a call that takes a trace for another
structure gives another number.
"""

from __future__ import annotations

import functools
import re
import types
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from graphs import is_ref


class Place(NamedTuple):
    """Where an array is: the array, and how to put another one there, if that can be done."""

    value: Any
    assign: Callable[[Any], None] | None


NUMBERS = (bool, int, float)
WORDS = (str, type, types.FunctionType)
PLAIN = (*NUMBERS, *WORDS, type(None), tuple)


def is_object(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)


def is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def shown(x: Any) -> Any:
    """A static value in words, without addresses."""
    if isinstance(x, types.FunctionType | type):
        return x.__qualname__
    if isinstance(x, dict):
        return sorted((repr(key), shown(value)) for key, value in x.items())
    if isinstance(x, list | tuple):
        return (type(x).__name__, *map(shown, x))
    if isinstance(x, set | frozenset):
        return (type(x).__name__, sorted(map(repr, x)))
    return re.sub(r" at 0x[0-9a-f]+", "", f"{type(x).__name__} {x!r}")


def attributes(node: Any) -> list[tuple[str, Any, bool | None]]:
    """Name, value, and whether it is data; None where the value decides."""
    statuses = node._pytree__nodes if type(node)._pytree__is_pytree else None
    return [
        (key, value, None if statuses is None else statuses.get(key, False))
        for key, value in sorted(vars(node).items())
        if not key.startswith("_pytree__")
    ]


def reachable(tree: Any) -> list[Any]:
    """All modules and Variables, each once, in an order that depends on content alone.

    Unlike a nested function that calls itself, it leaves no garbage behind that refers to them: a
    new object can have the address of one that was deleted.
    """
    found: dict[int, Any] = {}
    stack = [tree]
    while stack:
        x = stack.pop()
        if is_object(x) and id(x) not in found:
            found[id(x)] = x
            if isinstance(x, nnx.Pytree):
                stack += [value for _, value, _ in reversed(attributes(x))]
        elif isinstance(x, list | tuple):
            stack += reversed(x)
        elif isinstance(x, dict | nnx.State):
            own = x.raw_mapping if isinstance(x, nnx.State) else x
            stack += [own[key] for key in sorted(own, reverse=True)]
    return list(found.values())


def survey(tree: Any, shapes: bool = True) -> tuple[np.uint32, list[Place]]:
    """A number for all that is static in a graph, and the places of its arrays."""
    own = _Survey(shapes)
    own.visit(tree, None)
    return np.uint32(zlib.crc32(repr(own.notes).encode()) % 2**20), own.places


class _Survey:
    def __init__(self, shapes: bool):
        self.shapes = shapes
        self.notes: list[Any] = []
        self.places: list[Place] = []
        self.numbers: dict[int, int] = {}

    def visit(self, x: Any, is_data: bool | None, put: Callable[[Any], None] | None = None) -> None:
        if is_object(x):
            if id(x) not in self.numbers:
                self.numbers[id(x)] = len(self.numbers)
                self.notes.append(type(x).__qualname__)
                (self.variable if isinstance(x, nnx.Variable) else self.node)(x)
            else:
                self.notes.append(self.numbers[id(x)])
        elif is_data is False:
            self.notes.append(shown(x))
        elif is_ref(x):
            self.array(x[...], functools.partial(x.__setitem__, ...))
        elif is_array(x) or (is_data and isinstance(x, NUMBERS)):
            self.array(x, put)
        else:
            self.container(x)

    def container(self, x: Any) -> None:
        leaves, treedef = jax.tree.flatten(x, is_leaf=is_object)
        if len(leaves) == 1 and leaves[0] is x:
            self.notes.append(shown(x))
            return
        self.notes.append(str(treedef))
        for leaf in leaves:
            if isinstance(leaf, NUMBERS):  # static or an array, depending on the mode
                self.places.append(Place(leaf, None))
            else:
                self.visit(leaf, None)

    def array(self, x: Any, put: Callable[[Any], None] | None) -> None:
        self.notes.append((np.shape(x) if self.shapes else np.ndim(x), dtype_of(x)))
        self.places.append(Place(x, put))

    def node(self, x: Any) -> None:
        state = x._pytree__state
        self.notes.append((state.initializing, state.is_setup))
        for key, value, is_data in attributes(x):
            self.notes.append((key, is_data))
            self.visit(value, is_data, functools.partial(setattr, x, key))

    def variable(self, x: Any) -> None:
        metadata = sorted(x.get_metadata().items())
        self.notes.append([(key, shown(value)) for key, value in metadata])
        raw = x.get_raw_value()
        if is_ref(raw):
            self.visit(raw, True)
            return
        leaves, treedef = jax.tree.flatten(raw)
        self.notes.append(str(treedef))

        def put(index: int, new: Any) -> None:
            leaves[index] = new
            x.set_raw_value(jax.tree.unflatten(treedef, leaves))

        for index, leaf in enumerate(list(leaves)):
            self.array(leaf, functools.partial(put, index))


def dtype_of(x: Any) -> str:
    """As it is in a trace, where all numbers are arrays."""
    return str(x.dtype if isinstance(x, jax.Array) else jnp.result_type(x))
