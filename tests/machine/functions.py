"""The functions under test, and the ways to call them.

They move arrays about and hardly compute: XLA takes 10 ms to compile each kernel.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import nnx_sharding
from graphs import Loose, Node, Other, Tag, assign
from nnx_sharding import Lifted, StateSharding

from .views import (
    NUMBERS,
    Place,
    attributes,
    dtype_of,
    is_array,
    is_object,
    reachable,
    shown,
    survey,
)


def read(tree: Any, x: Any) -> Any:
    """Everything that there is."""
    number, places = survey(tree)
    return number, x, [place.value for place in places]


def step(tree: Any, x: Any, shapes: bool = True) -> Any:
    """Each array goes to the next place that it fits in."""
    number, places = survey(tree, shapes)
    groups: dict[Any, list[Place]] = {}
    for place in places:
        if place.assign is not None:
            groups.setdefault((np.shape(place.value), dtype_of(place.value)), []).append(place)
    for group in groups.values():
        if len(group) > 1:
            for place, source in zip(group, [*group[1:], group[0]], strict=True):
                place.assign(source.value)  # type: ignore[misc]
    return number, x


def local(tree: Any, x: Any) -> Any:
    """The same in each part of a mesh."""
    return step(tree, x, shapes=False)


def values(tree: Any, x: Any) -> Any:
    """As ``step``, but only Variables change, so it is alike in all modes."""
    variables = [v for v in reachable(tree) if _is_scalar(v)]
    arrays = [v.get_raw_value() for v in variables]
    for variable, array in zip(variables, [*arrays[1:], *arrays[:1]], strict=True):
        variable.set_raw_value(array)
    return survey(tree)[0], x


def _is_scalar(x: Any) -> bool:
    raw = x.get_raw_value() if isinstance(x, nnx.Variable) else None
    number = is_array(raw) or isinstance(raw, NUMBERS)
    return number and np.shape(raw) == () and dtype_of(raw) == "float32"


def count(tree: Any, x: Any) -> Any:
    """Changes the first number by computing."""
    number, places = survey(tree)
    for place in places:
        if place.assign and np.shape(place.value) == ():
            place.assign(1 - place.value)
            break
    return number, x


def pair(one: Any, two: Any, x: Any) -> Any:
    return step([one, two], x)


def scaled(tree: Any, x: Any = 2.0, mode: Any = 1, *, twice: Any = False) -> Any:
    return step(tree, x), np.uint32(zlib.crc32(repr(shown((mode, twice))).encode()))


def give(tree: Any, x: Any) -> Any:
    """Parts of its argument, and new objects."""
    objects = reachable(tree)
    new = Node()
    new.w, new.link = nnx.Param(x), objects[-1]
    return {"old": objects[-1], "new": new, "number": survey(tree)[0]}


def _modules(tree: Any) -> list[Any]:
    return [x for x in reachable(tree) if type(x) in (Node, Other, Loose)]


def _scalars(tree: Any) -> list[Any]:
    return [x for x in reachable(tree) if _is_scalar(x)]


def grow_attribute(tree: Any, x: Any) -> Any:
    node = (_modules(tree) or [Node()])[-1]
    if "extra" in vars(node):
        del node.extra
    else:
        node.extra = Tag(x, mark=1)
    return survey(tree)[0], x


def grow_static(tree: Any, x: Any) -> Any:
    node = (_modules(tree) or [Node()])[0]
    assign(node, "calls", (vars(node).get("calls", 0) + 1) % 3)
    return survey(tree)[0], x


def grow_metadata(tree: Any, x: Any) -> Any:
    for variable in _scalars(tree)[:1]:
        if variable.has_metadata("note"):
            variable.del_metadata("note")
        else:
            variable.set_metadata(note=[1])
    return survey(tree)[0], x


def grow_links(tree: Any, x: Any) -> Any:
    """Exchanges two attributes of the same kind."""
    node = (_modules(tree) or [Node()])[0]
    names = [key for key, value, _ in attributes(node) if is_object(value)]
    if len(names) > 1:
        one, two = getattr(node, names[0]), getattr(node, names[-1])
        setattr(node, names[0], two)
        setattr(node, names[-1], one)
    return survey(tree)[0], x


def grow_value(tree: Any, x: Any) -> Any:
    """A Variable's array becomes a container, and back."""
    for variable in reachable(tree):
        if isinstance(variable, Tag):
            raw = variable.get_raw_value()
            variable.set_raw_value(raw["in"] if isinstance(raw, dict) else {"in": raw})
    return survey(tree)[0], x


class Boom(Exception):
    pass


def fail(tree: Any, x: Any) -> Any:
    step(tree, x)
    grow_static(tree, x)
    grow_metadata(tree, x)
    raise Boom


class _Method(Node):
    def step(self, x: Any, mode: Any = 1) -> Any:
        return step(self, x), mode


MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
FLIPPED = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def _is_large(path: Any, value: Any) -> bool:
    return getattr(value, "shape", ()) == (16,)


FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "read": (read, {}),
    "step": (step, {}),
    "count": (count, {}),
    "values": (values, {}),
    "values, no updates": (values, {"graph_updates": False}),
    "values, tree": (values, {"graph": False}),
    "donated": (step, {"donate_argnums": 0}),
    "pair": (pair, {}),
    "give": (give, {}),
    "static by name": (scaled, {"static_argnames": ("mode", "twice")}),
    "static by number": (scaled, {"static_argnums": 2, "static_argnames": ("mode", "twice")}),
    "grow attribute": (grow_attribute, {}),
    "grow static": (grow_static, {}),
    "grow metadata": (grow_metadata, {}),
    "grow links": (grow_links, {}),
    "grow value": (grow_value, {}),
    "fail": (fail, {}),
    "sharded": (
        step,
        {"mesh": MESH, "in_shardings": (StateSharding({"big": P("x"), ...: P()}), None)},
    ),
    "sharded by type": (
        step,
        {"mesh": MESH, "in_shardings": (StateSharding({nnx.Param: P("y"), ...: P()}), None)},
    ),
    "sharded in context": (
        step,
        {"in_shardings": (StateSharding({nnx.Param: P("x"), ...: P()}), None)},
    ),
    "sharded by shape": (
        step,
        {"mesh": MESH, "in_shardings": (StateSharding({_is_large: P("x"), ...: P()}), None)},
    ),
    "mapped": (
        local,
        {"mesh": MESH, "in_specs": (StateSharding({...: P("x")}), P()), "out_specs": P()},
    ),
    "mapped in context": (
        local,
        {"in_specs": (StateSharding({...: P("y")}), P()), "out_specs": P()},
    ),
}


class _NoGuards:
    """Stands for the guards of a function, and has none."""

    def find(self, *args: Any, **kwargs: Any) -> None:
        return None

    def add(self, *args: Any, **kwargs: Any) -> None:
        pass

    def clear(self) -> None:
        pass


def without_guards(lifted: Lifted[..., Any]) -> Lifted[..., Any]:
    """The same, but each call splits its arguments."""
    lifted._guards = _NoGuards()  # type: ignore[assignment]
    lifted._direct = ([], *lifted._direct[1:])
    return lifted


def guarded(function: Callable[..., Any], **options: Any) -> Any:
    transform = nnx_sharding.shard_map if "in_specs" in options else nnx_sharding.jit
    return transform(function, **options)


def uncached(function: Callable[..., Any], **options: Any) -> Any:
    return without_guards(guarded(function, **options))


def eager(function: Callable[..., Any], **options: Any) -> Any:
    return function


class Functions:
    """The functions of one world, each of its own, and how often they were traced."""

    def __init__(self, wrap: Callable[..., Any]):
        self.wrap = wrap
        self.traces = 0
        self._counting: dict[Callable[..., Any], Any] = {}
        self._wrapped: dict[str, Any] = {}
        # Bound methods are found by their class, so each world has its own.
        self.Method = type("Method", (Node,), {"step": wrap(self.counting(_Method.step))})

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, counting its traces. One for all options, as users have it."""
        if function not in self._counting:

            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                self.traces += 1
                return function(*args, **kwargs)

            self._counting[function] = call
        return self._counting[function]

    def __getitem__(self, name: str) -> Any:
        if name not in self._wrapped:
            function, options = FUNCTIONS[name]
            self._wrapped[name] = self.wrap(self.counting(function), **options)
        return self._wrapped[name]
