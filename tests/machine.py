"""Worlds of equal objects, what users do to them between calls, and how worlds are compared.

A call may skip the split of its arguments if nothing but arrays changed since the last one. Here
everything is done three times, to equal objects: calls that may skip it, calls that never do, and
calls of the plain Python function. After each call all three must look alike.

``SCENARIOS`` has each kind of change once, alone; ``FAMILIES`` mixes them at random.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import pickle
import re
import threading
import types
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import nnx_sharding
from graphs import OPERATIONS, Graph, Loose, Node, Other, Tag, assign, build, is_ref
from nnx_sharding import Lifted, StateSharding

# Classes that make it hard to see what changed


class AlwaysEqual(Node):
    """Any two are equal."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class NeverEqual(Node):
    """Can be neither compared nor hashed."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    def __hash__(self) -> int:
        raise RuntimeError("not to be hashed")


class Watchful(Node):
    """Notes each assignment in an attribute of its own."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        super().__setattr__("writes", (vars(self).get("writes", 0) + 1) % 3)


class Measured(Node):
    """Has a property over an attribute of another name."""

    @property
    def size(self) -> Any:
        return vars(self).get("_size", 0)

    @size.setter
    def size(self, value: Any) -> None:
        self._size = value


class Lenient(Node):
    """Has any attribute that it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return 0


@nnx.dataclass
class Record(nnx.Module):
    """Compared by content, so not hashable."""

    w: nnx.Param = nnx.data()
    k: int = nnx.static(default=1)


class Scale(nnx.Param):
    """Like its base in all but the type."""


class Pair(NamedTuple):
    x: Any
    y: Any


class Twin(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_pytree_node_class
class Box:
    """A pytree of the user's, with a part that is no child."""

    def __init__(self, value: Any, tag: Any):
        self.value, self.tag = value, tag

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return (self.value,), self.tag

    @classmethod
    def tree_unflatten(cls, tag: Any, children: Sequence[Any]) -> Box:
        return cls(*children, tag)


class _Shown:
    """A static value with content."""

    def __init__(self, text: Any):
        self.text = text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r})"


class Label(_Shown):
    """Compared by identity, so what it contains does not count."""


class Title(Label):
    """Another type of it."""


class Value(_Shown):
    """Compared and hashed by content, although that can change."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


class Same(_Shown):
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class Bare(_Shown):
    """Compared by content, without a hash."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bare) and bool(np.all(self.text == other.text))

    __hash__ = None  # type: ignore[assignment]


class Slim:
    """Without a ``__dict__``."""

    __slots__ = ("text",)

    def __init__(self, text: Any):
        self.text = text

    def __repr__(self) -> str:
        return f"Slim({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slim) and self.text == other.text

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass
class Config:
    scale: Any = 1


@dataclasses.dataclass(frozen=True)
class FrozenConfig:
    scale: Any = 1


def double(x: Any) -> Any:
    return x * 2


def halve(x: Any) -> Any:
    return x / 2


# What the functions under test see. A trace keeps all of it as a constant of its output, so a call
# that takes a trace for another structure gives another number.


class Place(NamedTuple):
    """Where an array is: the array, and how to put another one there, if that can be done."""

    value: Any
    assign: Callable[[Any], None] | None


_NUMBERS = (bool, int, float)
_WORDS = (str, type, types.FunctionType)
_PLAIN = (*_NUMBERS, *_WORDS, type(None), tuple)


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
        elif is_array(x) or (is_data and isinstance(x, _NUMBERS)):
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
            if isinstance(leaf, _NUMBERS):  # static or an array, depending on the mode
                self.places.append(Place(leaf, None))
            else:
                self.visit(leaf, None)

    def array(self, x: Any, put: Callable[[Any], None] | None) -> None:
        self.notes.append((np.shape(x) if self.shapes else np.ndim(x), _dtype(x)))
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


# The functions under test. They move arrays about and hardly compute: XLA takes 10 ms to compile
# each kernel.


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
            groups.setdefault((np.shape(place.value), _dtype(place.value)), []).append(place)
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


def _dtype(x: Any) -> str:
    """As it is in a trace, where all numbers are arrays."""
    return str(x.dtype if isinstance(x, jax.Array) else jnp.result_type(x))


def _is_scalar(x: Any) -> bool:
    raw = x.get_raw_value() if isinstance(x, nnx.Variable) else None
    number = is_array(raw) or isinstance(raw, _NUMBERS)
    return number and np.shape(raw) == () and _dtype(raw) == "float32"


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


# Views


def view(tree: Any, before: Sequence[Any] = (), exact: bool = True) -> Any:
    """All that can be seen of a graph, as data that can be compared.

    Args:
      tree: the graph.
      before: things that are seen first, so that what has the same number in two views is the same
        thing before and after.
      exact: else no more than what Python and a transformed function agree on: numbers and shapes,
        but not whether they are a number or an array, where it is, or who else has it.
    """
    return _Viewer(before, exact).view(tree)


def things(tree: Any) -> list[Any]:
    """All that has an identity: objects, arrays, containers, statics."""
    found: list[Any] = []
    for x in reachable(tree):
        found.append(x)
        if isinstance(x, nnx.Variable):
            raw = x.get_raw_value()
            found.append(raw)
            if not isinstance(raw, jax.Array):
                found += jax.tree.leaves(raw)
        else:
            for value in vars(x).values():
                if _kind(value) not in ("object", "plain"):
                    found.append(value)
                    if isinstance(value, list | tuple | dict):
                        found += jax.tree.leaves(value, is_leaf=is_object)
    seen: dict[int, Any] = {id(x): x for x in found if not isinstance(x, _PLAIN)}
    return list(seen.values())


@functools.cache
def _kind_of(kind: type) -> str:
    if issubclass(kind, nnx.Pytree | nnx.Variable):
        return "object"
    if issubclass(kind, jax.Array | np.ndarray | np.generic):
        return "array"
    if issubclass(kind, _NUMBERS):
        return "number"
    return "plain" if kind is type(None) or issubclass(kind, _WORDS) else "other"


def _kind(x: Any) -> str:
    return "ref" if is_ref(x) else _kind_of(type(x))


class _Viewer:
    def __init__(self, before: Sequence[Any], exact: bool):
        self.exact = exact
        self.seen: list[Any] = list(before)
        self.numbers = {id(x): number for number, x in enumerate(before)}
        self.found: dict[int, Any] = {}

    def view(self, tree: Any) -> Any:
        before = list(self.seen)
        top = self.of(tree, None)
        # What was taken out of the graph belongs to the user as well.
        rest = [self.of(x, None) for x in before if _kind_of(type(x)) == "object"]
        return [top, rest, self.found]

    def number(self, x: Any) -> int:
        number = self.numbers.get(id(x))
        if number is None:
            number = self.numbers[id(x)] = len(self.seen)
            self.seen.append(x)  # which also keeps it alive, so its id stays its own
        return number

    def identity(self, x: Any) -> int | None:
        return self.number(x) if self.exact and not isinstance(x, _PLAIN) else None

    def of(self, x: Any, is_data: bool | None) -> Any:
        kind = _kind_of(type(x))
        if kind == "object" or (kind != "plain" and is_ref(x)):
            number = self.number(x)
            if number not in self.found:
                self.found[number] = None
                self.found[number] = self.content(x)
            return ("object", number)
        if kind == "array":
            return self.array(x)
        if kind == "number" and is_data is not False and not self.exact:
            return ("array", (), float(x))
        if kind in ("plain", "number"):
            return (type(x).__name__, shown(x))
        if is_data is False:
            return (self.identity(x), shown(x))
        parts, treedef = jax.tree.flatten(x, is_leaf=lambda part: part is not x)
        if len(parts) == 1 and parts[0] is x:
            return (self.identity(x), shown(x))
        order = list(x) if self.exact and isinstance(x, Mapping) else None
        own = [self.of(part, None) for part in parts]
        return (self.identity(x), type(x).__name__, str(treedef), order, own)

    def array(self, x: Any) -> Any:
        if isinstance(x, jax.Array) and x.is_deleted():
            return "deleted"
        data: Any = x
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = jax.random.key_data(x)
        data = np.asarray(data)
        if not self.exact:
            return ("array", data.shape, data.tolist())
        kind = (type(x).__name__, self.number(x), data.shape, str(x.dtype), data.tobytes())
        if not isinstance(x, jax.Array):
            return kind
        return (*kind, getattr(x, "weak_type", None), x.committed, x.sharding)

    def content(self, x: Any) -> Any:
        name = type(x).__qualname__
        if is_ref(x):
            return name, self.of(x[...], True)
        if isinstance(x, nnx.Variable):
            metadata = x.get_metadata()
            names = list(metadata) if self.exact else sorted(metadata)
            settings = [self.of(metadata[key], False) for key in names]
            raw = x.get_raw_value()
            if _kind(raw) in ("array", "ref"):
                own = self.of(raw, True)
            else:
                parts, treedef = jax.tree.flatten(raw)
                own = (self.identity(raw), str(treedef), [self.of(part, True) for part in parts])
            if not self.exact and isinstance(own, tuple) and own[1:2] == ("PyTreeDef(*)",):
                own = own[2][0]  # a number, which a trace makes an array
            return name, x._can_update, names, settings, own
        state = x._pytree__state
        flags = (state.initializing, state.is_setup, state.trace_state.is_valid())
        order = list(vars(x)) if self.exact else None
        own = [
            (key, is_data, self.of(value, is_data if is_data is not True else None))
            for key, value, is_data in attributes(x)
        ]
        return name, flags, order, own


def difference(one: Any, two: Any, path: str = "") -> str | None:
    """Where two views differ first."""
    if one == two:
        return None
    if type(one) is type(two) and isinstance(one, list | tuple) and len(one) == len(two):
        pairs: Any = [(index, one[index], two[index]) for index in range(len(one))]
    elif isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        pairs = [(key, one[key], two[key]) for key in one]
    else:
        return f"{path}: {one!r} and {two!r}"
    found = (difference(a, b, f"{path}/{key}") for key, a, b in pairs)
    return next((text for text in found if text is not None), None)


# Worlds


class World:
    """One copy of the objects of a test.

    Attributes:
      f: the functions that it calls.
      models: what the calls take.
      kept: objects that were taken out, and may come back.
      mode: anything else that a scenario changes between calls.
    """

    def __init__(self, functions: Functions):
        self.f = functions
        self.models: list[Any] = []
        self.kept: list[Any] = []
        self.mode: Any = None
        self._last = 0.0

    @property
    def model(self) -> Any:
        return self.models[0]

    @model.setter
    def model(self, model: Any) -> None:
        self.models[0] = model

    def number(self) -> float:
        """Another number each time; the same ones in each world."""
        self._last += 1.0
        return self._last

    def array(self, shape: tuple[int, ...] = (), dtype: Any = jnp.float32) -> jax.Array:
        """A new array with a number of its own."""
        return jnp.full(shape, self.number(), dtype)

    def param(self, variable_type: type = nnx.Param, **metadata: Any) -> Any:
        return variable_type(self.array(), **metadata)

    def node(self, **attributes: Any) -> Node:
        node = Node()
        for name, value in attributes.items():
            setattr(node, name, value)
        return node


class Failure(NamedTuple):
    """What a call raised."""

    kind: str
    text: str


_ADDRESS = re.compile(r"0x[0-9a-f]+|~\S+|id=\d+")


def attempt(function: Callable[[], Any]) -> Any:
    """What it returns or raises."""
    try:
        return function()
    except Exception as error:
        return Failure(type(error).__name__, _ADDRESS.sub("", str(error)))


class Functions3(NamedTuple):
    """The functions of the three worlds."""

    guarded: Functions
    uncached: Functions
    eager: Functions | None

    @classmethod
    def new(cls, truth: bool = True) -> Functions3:
        return cls(Functions(guarded), Functions(uncached), Functions(eager) if truth else None)


class Worlds:
    """The same objects three times, to which the same is done.

    Args:
      functions: the functions of each.
      make: fills a new world.
      counting: whether the number of traces is compared.
    """

    def __init__(
        self,
        functions: Functions3,
        make: Callable[[World], None],
        *,
        counting: bool = True,
    ):
        self.worlds = [World(own) for own in functions if own is not None]
        self.counting = counting
        for world in self.worlds:
            make(world)

    def mutate(self, mutation: Callable[[World], Any]) -> Failure | None:
        """Does the same to the objects of each world. Returns what that raised."""
        results = [attempt(lambda: mutation(world)) for world in self.worlds]
        failures = [x.kind if isinstance(x, Failure) else None for x in results]
        assert failures.count(failures[0]) == len(failures), failures
        return results[0] if isinstance(results[0], Failure) else None

    def call(self, caller: Callable[[World], Any], counting: bool = True) -> int:
        """One call in each world; returns how often it was traced.

        Raises:
          AssertionError: something is not alike afterwards.
        """
        guarded, uncached, *others = self.worlds
        one, traces = self._call(guarded, caller, exact=True)
        two, expected = self._call(uncached, caller, exact=True)
        text = difference(one, two)
        assert text is None, f"with and without a guard: {text}"
        if counting and self.counting:
            assert traces == expected, f"traces with and without a guard: {traces}, {expected}"
        for world in others:
            if isinstance(one[0], Failure):
                # A call that fails changes nothing, so it need not be made here.
                after, plain = self._loose(guarded, None), self._loose(world, None)
            else:
                after = self._loose(guarded, self._result)
                plain, _ = self._call(world, caller, exact=False)
            text = difference(after, plain)
            assert text is None, f"with a guard and in Python: {text}"
        self._result = None
        self.last_failure = one[0]
        return expected

    def _call(self, world: World, caller: Callable[[World], Any], exact: bool) -> Any:
        before = things((world.models, world.kept)) if exact else []
        traced = world.f.traces
        result = attempt(lambda: caller(world))
        if world is self.worlds[0]:
            self._result = result
        if not exact:
            assert not isinstance(result, Failure), f"Python raises {result}"
            return self._loose(world, result), 0
        seen = view((world.models, world.kept, result), before)
        return (result if isinstance(result, Failure) else None, seen), world.f.traces - traced

    def _loose(self, world: World, result: Any) -> Any:
        return view((world.models, world.kept, result), exact=False)


# Calls


X = jnp.float32(0.5)
XS: tuple[Callable[[], Any], ...] = (
    lambda: X,
    lambda: 0.5,
    lambda: np.float32(0.5),
    lambda: jnp.arange(2.0),
    lambda: 3,
    lambda: True,
    lambda: (X, None),
)

Numbers = tuple[int, int, int]
Action = Callable[[World, int, int, int], Any]


def choose(options: Sequence[Any], number: int) -> Any:
    return options[number % len(options)] if options else None


def _plain(name: str) -> Action:
    def call(w: World, a: int, b: int, c: int) -> Any:
        return w.f[name](choose(w.models, a), X)

    return call


def call_pair(w: World, a: int, b: int, c: int) -> Any:
    return w.f["pair"](choose(w.models, a), choose(w.models, b), X)


def call_nested(w: World, a: int, b: int, c: int) -> Any:
    one, two = choose(w.models, a), choose(w.models, b)
    trees: list[Any] = [{"m": one, "n": (two, X)}, [one, two], (one, two), {"n": one, "m": [two]}]
    return w.f["step"](choose(trees, c), X)


def call_part(w: World, a: int, b: int, c: int) -> Any:
    """With an object, and another that is part of it."""
    model = choose(w.models, a)
    return w.f["pair"](model, choose(reachable(model), b), X)


def call_x(w: World, a: int, b: int, c: int) -> Any:
    return w.f["step"](choose(w.models, a), choose(XS, b)())


def call_keyword(w: World, a: int, b: int, c: int) -> Any:
    f, model = w.f["step"], choose(w.models, a)
    calls: list[Callable[[], Any]] = [
        lambda: f(model, X),
        lambda: f(model, x=X),
        lambda: f(tree=model, x=X),
        lambda: f(x=X, tree=model),
    ]
    return choose(calls, b)()


MODES = (1, True, 0.0, -0.0, (1,), (True,))


def call_static(w: World, a: int, b: int, c: int) -> Any:
    f, model = w.f[("static by name", "static by number")[a % 2]], choose(w.models, a)
    mode = choose(MODES, b)
    calls: list[Callable[[], Any]] = [
        lambda: f(model, X, mode=mode),
        lambda: f(model, 2.0, mode, twice=choose((1, True), b)),
        lambda: f(model),
        lambda: f(model, mode=mode),
        lambda: f(model, X, mode),
    ]
    return choose(calls, c)()


def call_threads(w: World, a: int, b: int, c: int) -> Any:
    """Two calls at once, on different models."""
    models = [choose(w.models, a), choose(w.models, a + 1)]
    if models[0] is models[1] or _meet(*models):
        return w.f["step"](models[0], X)
    barrier = threading.Barrier(2)

    def call(model: Any) -> Any:
        barrier.wait(10)
        return [w.f["step"](model, X) for _ in range(2)]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(call, model) for model in models]
        return [future.result() for future in futures]


def _meet(one: Any, two: Any) -> bool:
    """Whether two graphs have an object in common: a race, in Python as well."""
    others = set(map(id, reachable(two)))
    return any(id(x) in others for x in reachable(one))


def call_inside(w: World, a: int, b: int, c: int) -> Any:
    """Within another transformation, which may read the model but not change it."""
    name = ("read", "read", "step", "grow static")[b % 4]
    f, model = w.f[name], choose(w.models, a)
    calls: list[Callable[[], Any]] = [
        lambda: jax.jit(lambda x: f(model, x))(X),
        lambda: jax.eval_shape(lambda x: f(model, x), X) and None,
        lambda: jax.vmap(lambda x: f(model, x)[1])(jnp.arange(2.0)),
        lambda: jax.grad(lambda x: f(model, x)[1])(X),
        lambda: jax.make_jaxpr(lambda x: f(model, x)[1])(X) and None,
    ]
    return choose(calls, c)()


def call_inside_new(w: World, a: int, b: int, c: int) -> Any:
    """Within another transformation, on a model that is made there."""
    model = choose(w.models, a)
    graphdef, state = nnx.split(model)

    def traced(state: Any, x: Any) -> Any:
        own = nnx.merge(graphdef, state)
        w.f["step"](own, x)
        return nnx.state(own), w.f["step"](own, x)

    if b % 4:
        return jax.eval_shape(traced, state, X) and None
    return jax.jit(traced)(state, X)[1]


def call_method(w: World, a: int, b: int, c: int) -> Any:
    model = next((x for x in w.models if isinstance(x, w.f.Method)), None)
    if model is None:
        return None
    mode = choose((0, 1), b)
    calls: list[Callable[[], Any]] = [
        lambda: model.step(X),
        lambda: model.step(X, mode),
        lambda: model.step(x=X),
        lambda: w.f.Method.step(model, X),
    ]
    return choose(calls, c)()


def call_lower(w: World, a: int, b: int, c: int) -> Any:
    """Stages that do not run the function. They must leave everything alone."""
    f, model = w.f["step"], choose(w.models, a)
    if w.f.wrap is eager:
        return None
    stages: list[Callable[[], Any]] = [
        lambda: f.lower(model, X),
        lambda: f.trace(model, X),
        lambda: f.eval_shape(model, X),
    ]
    choose(stages, b)()
    return None


def call_clear(w: World, a: int, b: int, c: int) -> Any:
    if w.f.wrap is not eager:
        w.f[("step", "read")[a % 2]].clear_cache()
    return w.f["step"](choose(w.models, b), X)


def call_donated(w: World, a: int, b: int, c: int) -> Any:
    model = choose(w.models, a)
    for x in reachable(model):  # no other object may lose its array by this
        if isinstance(x, nnx.Variable) and isinstance(x.get_raw_value(), jax.Array):
            x.set_raw_value(jnp.array(x.get_raw_value()))
    return w.f["donated"](model, X)


def call_other_mode(w: World, a: int, b: int, c: int) -> Any:
    name = ("values", "values, no updates", "values, tree")[b % 3]
    return w.f[name](choose(w.models, a), X)


CALLS: dict[str, Action] = {
    **{name: _plain(name) for name in FUNCTIONS if name not in ("pair", "donated")},
    "donated": call_donated,
    "pair": call_pair,
    "nested": call_nested,
    "part": call_part,
    "x": call_x,
    "keyword": call_keyword,
    "static": call_static,
    "threads": call_threads,
    "inside": call_inside,
    "inside, new": call_inside_new,
    "method": call_method,
    "lower": call_lower,
    "clear": call_clear,
    "mode": call_other_mode,
}

# Threads that trace at the same time may both do it.
UNCOUNTED = ("threads",)


# Mutations. Each is given a world and numbers; what they choose is taken modulo what there is.


def objects_of(w: World) -> list[Any]:
    return reachable(w.models)


def nodes_of(w: World) -> list[Any]:
    """Modules that may get any attribute."""
    return [x for x in objects_of(w) if type(x) in (Node, Other, Loose) or type(x) is w.f.Method]


def variables_of(w: World) -> list[Any]:
    return [x for x in objects_of(w) if isinstance(x, nnx.Variable)]


def names_of(node: Any, kind: Callable[[Any], bool] = lambda _: True) -> list[str]:
    return [key for key, value, _ in attributes(node) if kind(value)]


def keep(w: World, thing: Any) -> None:
    w.kept = [*w.kept[-2:], thing]


NAMES = ("a", "b", "c", "w")
LIMIT = 14  # objects; a larger graph only takes longer


def set_static(w: World, a: int, b: int, c: int) -> None:
    options = (
        (1, True, 1.0),
        (0.0, -0.0, None),
        ("s", "t", (1, "u"), (True, "u")),
        (double, halve),
    )
    node = choose(nodes_of(w), a)
    if node is not None:
        assign(node, "klmn"[b % 4], choose(options[b % 4], c))


def delete(w: World, a: int, b: int, c: int) -> None:
    node = choose(nodes_of(w), a)
    if node is not None and (name := choose(names_of(node), b)):
        keep(w, vars(node)[name])
        delattr(node, name)


def restore(w: World, a: int, b: int, c: int) -> None:
    node = choose(nodes_of(w), a)
    if node is not None and w.kept and len(objects_of(w)) < LIMIT:
        assign(node, choose(NAMES, b), w.kept.pop())


def add(w: World, a: int, b: int, c: int) -> None:
    node, new = choose(nodes_of(w), a), w.param(choose((nnx.Param, nnx.BatchStat), c))
    if node is not None and len(objects_of(w)) < LIMIT:
        assign(node, choose(NAMES, b), new)


def add_node(w: World, a: int, b: int, c: int) -> None:
    node, new = choose(nodes_of(w), a), w.node(w=w.param(), k=1)
    if node is not None and len(objects_of(w)) < LIMIT:
        assign(node, choose(NAMES, b), new)


def rename(w: World, a: int, b: int, c: int) -> None:
    node = choose(nodes_of(w), a)
    if node is not None and (name := choose(names_of(node), b)):
        value = vars(node)[name]
        delattr(node, name)
        assign(node, choose(NAMES, c), value)


def reorder(w: World, a: int, b: int, c: int) -> None:
    node = choose(nodes_of(w), a)
    if node is not None and (name := choose(names_of(node), b)):
        value = vars(node)[name]
        delattr(node, name)
        assign(node, name, value)


def swap(w: World, a: int, b: int, c: int) -> None:
    node = choose(nodes_of(w), a)
    if node is not None and (names := names_of(node)):
        one, two = choose(names, b), choose(names, c)
        first, second = vars(node)[one], vars(node)[two]
        assign(node, one, second)
        assign(node, two, first)


def exchange(w: World, a: int, b: int, c: int) -> None:
    """Attributes of two modules."""
    nodes = nodes_of(w)
    one, two = choose(nodes, a), choose(nodes, b)
    common = [key for key in names_of(one) if key in vars(two)] if nodes else []
    if name := choose(common, c):
        first, second = vars(one)[name], vars(two)[name]
        assign(one, name, second)
        assign(two, name, first)


def move_last(w: World, a: int, b: int, c: int) -> None:
    """So that the attributes of both modules, one after the other, look as before."""
    nodes = nodes_of(w)
    one, two = choose(nodes, a), choose(nodes, a + 1)
    if one is not two and (names := names_of(one)):
        value = vars(one)[names[-1]]
        delattr(one, names[-1])
        assign(two, "A", value)


def renew_variable(w: World, a: int, b: int, c: int) -> None:
    """An equal one in its place; others that hold it keep it."""
    node = choose(nodes_of(w), a)
    if node is not None:
        names = names_of(node, lambda x: isinstance(x, nnx.Variable))
        if name := choose(names, b):
            assign(node, name, vars(node)[name].copy())


def renew_node(w: World, a: int, b: int, c: int) -> None:
    node = choose(nodes_of(w), a)
    if node is not None:
        names = names_of(node, lambda x: isinstance(x, nnx.Pytree))
        if name := choose(names, b):
            assign(node, name, nnx.clone(vars(node)[name]))


# Freed memory is used again when what was freed later is used up. More would take longer.
TRIES = 5_000


def new_at(address: int, kind: type) -> Any:
    """A new object without content: at this address, if Python can be brought to it."""
    others = []
    for _ in range(TRIES):
        new: Any = object.__new__(kind)
        if id(new) == address:
            break
        others.append(new)
    return new


def fill(new: Any, *args: Any, **attributes: Any) -> None:
    """Gives a new object its content: a Variable its value and metadata, a module attributes."""
    if isinstance(new, nnx.Variable):
        new.__init__(*args, **attributes)  # type: ignore[misc]
        return
    vars(new).update(vars(type(new)()))
    for name, value in attributes.items():
        setattr(new, name, value)


def reborn(node: Any, name: str, kind: type, *args: Any, **attributes: Any) -> None:
    """Deletes an attribute and sets a new object, at the address of the old one if possible."""
    address = id(vars(node)[name])
    delattr(node, name)
    new = new_at(address, kind)
    fill(new, *args, **attributes)
    assign(node, name, new)


def reborn_variable(w: World, a: int, b: int, c: int) -> None:
    node = choose(nodes_of(w), a)
    if node is not None and (name := choose(names_of(node, _is_variable), b)):
        reborn(node, name, nnx.Param, w.array(), mark=c % 2)


def reborn_node(w: World, a: int, b: int, c: int) -> None:
    node = choose(nodes_of(w), a)
    if node is not None and (name := choose(names_of(node, _is_plain_node), b)):
        reborn(node, name, (Node, Other)[c % 2], w=w.param())


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _is_plain_node(x: Any) -> bool:
    return type(x) in (Node, Other)


# Containers


def make_containers(w: World) -> None:
    for _ in range(2):
        w.models.append(
            w.node(
                list=nnx.List([w.param(), w.node(w=w.param()), 7]),
                dict=nnx.Dict(a=w.param(), b="s"),
                plain=nnx.data([w.param(), [w.array()], "s", 1]),
                table=nnx.data({"a": w.array(), "b": (w.param(), None)}),
                pair=nnx.data(Pair(w.array(), w.param())),
                state=nnx.data(nnx.State({"a": w.param(), "b": {"c": w.param()}})),
                box=nnx.data(Box(w.array(), "t")),
                held=nnx.Param({"x": w.array(), "y": (w.array(),)}),
                items=nnx.static([1, "s"]),
                words=nnx.static({"a": 1, "b": [2]}),
            )
        )


def edit_list(w: World, a: int, b: int, c: int) -> None:
    own = choose(w.models, a).list
    match b % 5:
        case 0 if len(own) < 4:
            own.append(w.param())
        case 1 if len(own):
            keep(w, own.pop())
        case 2 if len(own):
            own[c % len(own)] = w.param()
        case 3 if len(own) > 1:
            own[0], own[1] = own[1], own[0]
        case 4 if len(own) < 4:
            own.insert(c % 3, w.node(w=w.param()))


def edit_dict(w: World, a: int, b: int, c: int) -> None:
    own = choose(w.models, a).dict
    name = choose("abc", b)
    if name in own:
        del own[name]
    own_value: Any = (None, w.param(), "s", "t", w.node(w=w.param()))[c % 5]
    if own_value is not None:
        own[name] = own_value


def edit_plain(w: World, a: int, b: int, c: int) -> None:
    own = choose(w.models, a).plain
    match b % 7:
        case 0 if len(own) < 5:
            own.append(w.param())
        case 1 if len(own) > 1:
            own.pop()
        case 2:
            own[0] = (w.param(), w.array(), np.float32(w.number()), "s", 1)[c % 5]
        case 3:
            own.reverse()
        case 4:  # the leaves stay, but not what they are in
            own[:] = [[own[0]], *own[1:]] if not isinstance(own[0], list) else [*own[0], *own[1:]]
        case 5 if 1 in own or True in own:
            own[own.index(1)] = (1, True, 1.0)[c % 3]
        case 6:
            for index, part in enumerate(own):
                if isinstance(part, str):
                    own[index] = "st"[c % 2]


def edit_table(w: World, a: int, b: int, c: int) -> None:
    own = choose(w.models, a).table
    match b % 5:
        case 0:
            own["abc"[c % 3]] = w.array()
        case 1:
            own.pop("abc"[c % 3], None)
        case 2:
            own["b"] = ((w.param(), None), (w.param(), ()), [w.param(), None])[c % 3]
        case 3 if own:
            name = sorted(own)[0]
            own["abc"[c % 3]] = own.pop(name)
        case 4:  # only the order
            for name in sorted(own, reverse=c % 2 == 0):
                own[name] = own.pop(name)


def edit_pair(w: World, a: int, b: int, c: int) -> None:
    m = choose(w.models, a)
    kind = (Pair, Twin, lambda x, y: (x, y))[b % 3]
    m.pair = nnx.data(kind(*m.pair) if c % 2 else kind(m.pair[1], m.pair[0]))


def edit_state(w: World, a: int, b: int, c: int) -> None:
    own = choose(w.models, a).state
    match b % 3:
        case 0:
            own["ad"[c % 2]] = w.param()
        case 1:
            if "ad"[c % 2] in own:
                del own["ad"[c % 2]]
        case 2:
            own.raw_mapping["b"] = {"c": w.param()} if c % 2 else w.param()


def edit_box(w: World, a: int, b: int, c: int) -> None:
    own = choose(w.models, a).box
    match b % 3:
        case 0:
            own.tag = "tu"[c % 2]
        case 1:
            own.value = w.param() if c % 2 else w.array()
        case 2:
            own.value = [w.array(), w.param()] if c % 2 else w.array()


def edit_held(w: World, a: int, b: int, c: int) -> None:
    held = choose(w.models, a).held
    one, two = w.array(), w.array()
    options: list[Any] = [
        {"x": one, "y": (two,)},
        {"x": one, "y": (two, one)},
        {"x": one, "z": (two,)},
        {"x": one, "y": [two]},
        (one, two),
        [one, two],
        one,
        {"x": w.array((2,)), "y": (two,)},
    ]
    if b % 3 == 0 and isinstance(held.get_raw_value(), dict):  # in place
        held.get_raw_value()["x"] = options[c % 2]["x"]
        held.get_raw_value()["y"] = options[c % 3].get("y", (one,))
    else:
        held.set_raw_value(choose(options, c))


def edit_items(w: World, a: int, b: int, c: int) -> None:
    own = choose(w.models, a).items
    match b % 3:
        case 0 if len(own) < 3:
            own.append((1, True, "s")[c % 3])
        case 1 if len(own) > 1:
            own.pop()
        case 2:
            own[0] = (1, True, 1.0, -1)[c % 4]


def edit_words(w: World, a: int, b: int, c: int) -> None:
    own = choose(w.models, a).words
    match b % 4:
        case 0:
            own["ac"[c % 2]] = 1
        case 1:
            own.pop("ac"[c % 2], None)
        case 2:
            own["b"][:] = [2] * (c % 3)
        case 3:
            own["a"] = (1, True, 1.0)[c % 3]


def renew_container(w: World, a: int, b: int, c: int) -> None:
    """An equal container, with the same parts."""
    m = choose(w.models, a)
    name = choose(("plain", "table", "state", "box", "items", "words"), b)
    value = vars(m)[name]
    if isinstance(value, nnx.State):
        new: Any = nnx.State(dict(value.raw_mapping))
    else:
        new = copy.copy(value)
    setattr(m, name, new)


def make_deep(w: World, a: int, b: int, c: int) -> None:
    """A container in a container becomes a node, or the node a container."""
    m = choose(w.models, a)
    if isinstance(vars(m).get("deep"), nnx.Pytree):
        m.deep = nnx.data({"w": m.deep.w})
    elif "deep" in vars(m):
        m.deep = w.node(w=m.deep["w"])
    else:
        m.deep = w.node(w=w.param())


# Variables


def make_variables(w: World) -> None:
    for _ in range(2):
        w.models.append(
            w.node(
                u=w.param(note="n"),
                v=w.param(nnx.BatchStat),
                t=w.param(Tag, mark=1),
                r=nnx.Variable(w.array(), ref=True),
                raw=w.array(),
                numpy=np.full((), w.number(), np.float32),
                scalar=nnx.data(2.0),
                many=nnx.Param((w.array(), w.array())),
                k=1,
            )
        )


def _value(w: World, kind: int) -> Any:
    number = w.number()
    options: list[Any] = [
        jnp.float32(number),
        np.asarray(number, np.float32),
        number,
        int(number),
        jnp.asarray(number),  # a weak type
        jnp.int32(number),
        jnp.full(2, number),
        jnp.float16(number),
        np.float32(number),
        bool(number % 2),
        jax.device_put(jnp.float32(number), jax.devices()[0]),
    ]
    return choose(options, kind)


def _own(w: World, a: int, names: str = "uvt") -> Any:
    """One Variable of one model, if it is still there."""
    own = vars(choose(w.models, a)).get(choose(names, a // 2))
    return own if isinstance(own, nnx.Variable) else nnx.Param(0.0)


def edit_value(w: World, a: int, b: int, c: int) -> None:
    _own(w, a).set_raw_value(_value(w, b))


def reset_values(w: World, a: int, b: int, c: int) -> None:
    """Plain arrays everywhere, so that not everything is of another kind all the time."""
    for m in w.models:
        for name in "uvt":
            if isinstance(vars(m).get(name), nnx.Variable):
                vars(m)[name].set_raw_value(w.array())


def edit_metadata(w: World, a: int, b: int, c: int) -> None:
    own = _own(w, a)
    match b % 6:
        case 0:
            own.set_metadata(note=choose((1, True, 1.0, "n", [1], {"a": 1}, np.arange(2)), c))
        case 1:
            own.set_metadata("mark", choose((1, True, 0.0, -0.0), c))
        case 2:
            for name in ("note", "mark")[: c % 3]:
                if own.has_metadata(name):
                    own.del_metadata(name)
        case 3:
            own.set_metadata({"note": "n"} if c % 2 else {})
        case 4:
            note = own.get_metadata().get("note")
            if isinstance(note, list):
                note.append(c % 2)
            elif isinstance(note, dict):
                note["a"] = (1, True)[c % 2]
            elif isinstance(note, np.ndarray):
                note[0] = c % 2
        case 5:
            own.set_metadata(dict(reversed(own.get_metadata().items())))


def edit_type(w: World, a: int, b: int, c: int) -> None:
    m, name = choose(w.models, a), choose("uvt", b)
    own = vars(m).get(name)
    if isinstance(own, nnx.Variable):
        kind = choose((nnx.Param, nnx.BatchStat, Scale), c)
        if a // 2 % 2:
            own.__class__ = kind
        else:
            setattr(m, name, kind.from_metadata(own.get_raw_value(), own.get_metadata()))


def edit_ref(w: World, a: int, b: int, c: int) -> None:
    m = choose(w.models, a)
    match b % 4:
        case 0 if m.u._can_update:
            m.r = nnx.Variable(w.array(), ref=True)
        case 1:
            m.r = nnx.Variable(w.array())
        case 2:
            m.r[...] = w.array()
        case 3:  # one ref in two Variables
            raw = m.r.get_raw_value()
            if is_ref(raw):
                m.s = nnx.Variable.from_metadata(raw, m.r.get_metadata())
            elif "s" in vars(m):
                del m.s


def edit_raw(w: World, a: int, b: int, c: int) -> None:
    m = choose(w.models, a)
    name = choose(("raw", "numpy", "scalar"), b)
    own = vars(m).get(name)
    if c % 12 == 11:
        setattr(m, name, nnx.Param(w.array()))
    elif not isinstance(own, jax.Array) or c % 2:
        setattr(m, name, nnx.data(_value(w, c)))
    else:
        setattr(m, name, w.array())


def edit_many(w: World, a: int, b: int, c: int) -> None:
    choose(w.models, a).many.set_raw_value(tuple(w.array() for _ in range(b % 4)))


def leak(w: World, a: int, b: int, c: int) -> None:
    """A Variable of another trace, with a value of this one; or an end to it."""
    m = choose(w.models, a)
    if not m.u._can_update:
        m.u = m.u.copy()
    elif c % 3 == 0:
        # A call that cannot update it fails after it ran, when refs have changed already.
        m.r = nnx.Variable(w.array())
        if "s" in vars(m):
            del m.s
        m.u = leaked(lambda value: nnx.Param(value, note="n"), w.array())


def leaked(make: Callable[[Any], Any], value: Any) -> Any:
    made: list[Any] = []

    def traced() -> Any:
        made.append(make(value))
        return jnp.zeros(())

    jax.eval_shape(traced)
    return made[0]


def flip_status(w: World, a: int, b: int, c: int) -> None:
    """A number is data or static."""
    choose(w.models, a).flip = nnx.data(3) if b % 2 else nnx.static(3)


# Aliases


def make_aliases(w: World) -> None:
    for _ in range(2):
        left, right = w.node(w=w.param(), v=w.param()), w.node(w=w.param(), v=w.param())
        w.models.append(w.node(left=left, right=right, w=w.param(), raw=w.array()))


def link(w: World, a: int, b: int, c: int) -> None:
    """One Variable in two places, of one model or of two."""
    nodes, variables = nodes_of(w), variables_of(w)
    if variables:
        assign(choose(nodes, a), choose("wv", b), choose(variables, c))


def link_node(w: World, a: int, b: int, c: int) -> None:
    nodes = nodes_of(w)
    assign(choose(nodes, a), choose(("left", "right", "up"), b), choose(nodes, c))


def link_cycle(w: World, a: int, b: int, c: int) -> None:
    m = choose(w.models, a)
    targets = [m, *(x for x in vars(m).values() if type(x) is Node)]
    assign(choose(targets, b), "up", choose(targets, c))


def unlink(w: World, a: int, b: int, c: int) -> None:
    """A shared object gets a copy in one of its places."""
    m = choose(w.models, a)
    for child in (m, *(x for x in vars(m).values() if type(x) is Node)):
        if "up" in vars(child) and b % 2:
            del child.up
        if isinstance(vars(child).get("w"), nnx.Variable):
            child.w = child.w.copy()


def link_raw(w: World, a: int, b: int, c: int) -> None:
    """One array in two places, which is no alias."""
    nodes, raw = nodes_of(w), w.array()
    for number in (a, b)[: 1 + c % 2]:
        assign(choose(nodes, number), "raw", raw)


def tidy(w: World, a: int, b: int, c: int) -> None:
    """New models, in place of those that have become one knot."""
    del w.models[:], w.kept[:]
    make_aliases(w)


def swap_models(w: World, a: int, b: int, c: int) -> None:
    w.models.reverse()


def copy_model(w: World, a: int, b: int, c: int) -> None:
    ways: tuple[Callable[[Any], Any], ...] = (
        nnx.clone,
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: nnx.merge(*nnx.split(m)),
        copy.copy,
    )
    index = a % len(w.models)
    w.models[index] = choose(ways, b)(w.models[index])


def update_model(w: World, a: int, b: int, c: int) -> None:
    one, two = choose(w.models, a), choose(w.models, b)
    nnx.update(one, jax.tree.map(lambda x: x + 1, nnx.state(two)))


def update_in_two(w: World, a: int, b: int, c: int) -> None:
    m = choose(w.models, a)
    graphdef, state = nnx.split(m)
    nnx.update(m, state)
    if b % 3 == 0:
        w.models[a % len(w.models)] = nnx.merge(graphdef, state)


# Classes


def make_classes(w: World) -> None:
    for _ in range(2):
        model = Node()
        for name, kind in CLASSES.items():
            child = kind()
            child.w = w.param()
            child.k = 1
            setattr(model, name, child)
        model.record = Record(w.param())
        model.label, model.value, model.same = Label("a"), Value("a"), Same("a")
        model.bare, model.slim, model.config = Bare("a"), Slim("a"), Config()
        model.frozen = FrozenConfig(1)
        w.models.append(model)


CLASSES: dict[str, type] = {
    "equal": AlwaysEqual,
    "equal_too": AlwaysEqual,
    "never": NeverEqual,
    "watchful": Watchful,
    "measured": Measured,
    "lenient": Lenient,
    "loose": Loose,
}


def swap_classes(w: World, a: int, b: int, c: int) -> None:
    m = choose(w.models, a)
    names = [name for name in CLASSES if name != "loose"]
    one, two = choose(names, b), choose(names, c)
    first, second = vars(m)[one], vars(m)[two]
    setattr(m, one, second)
    setattr(m, two, first)


def renew_class(w: World, a: int, b: int, c: int) -> None:
    """Another object that calls itself equal."""
    m, name = choose(w.models, a), choose([*CLASSES], b)
    old = vars(m)[name]
    new = type(old)()
    new.w, new.k = w.param() if c % 2 else old.w, vars(old)["k"]
    setattr(m, name, new)


def renew_record(w: World, a: int, b: int, c: int) -> None:
    m = choose(w.models, a)
    m.record = Record(m.record.w.copy() if b % 2 else m.record.w, choose((1, True), c))


def edit_class_static(w: World, a: int, b: int, c: int) -> None:
    child = vars(choose(w.models, a))[choose(("equal", "never", "loose", "record"), b)]
    child.k = choose((1, True), c)


def edit_property(w: World, a: int, b: int, c: int) -> None:
    child = choose(w.models, a).measured
    if isinstance(child, Measured):
        child.size = choose((1, True, 0.0, -0.0), b)


def edit_class(w: World, a: int, b: int, c: int) -> None:
    child = vars(choose(w.models, a))[choose([*CLASSES][:6], b)]
    object.__setattr__(child, "__class__", choose((AlwaysEqual, NeverEqual, Measured, Other), c))


STATIC_OBJECTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "label": (Label, "text"),
    "value": (Value, "text"),
    "same": (Same, "text"),
    "bare": (Bare, "text"),
    "slim": (Slim, "text"),
    "config": (Config, "scale"),
}


def edit_static_object(w: World, a: int, b: int, c: int) -> None:
    """In place."""
    name = choose([*STATIC_OBJECTS], b)
    setattr(vars(choose(w.models, a))[name], STATIC_OBJECTS[name][1], choose("ab", c))


def edit_static_number(w: World, a: int, b: int, c: int) -> None:
    """In place: numbers that are equal, and not the same."""
    m = choose(w.models, a)
    match b % 3:
        case 0:
            m.config.scale = choose((1, True, 0.0, -0.0), c)
        case 1:
            m.slim.text = choose((1, True), c)
        case 2:
            m.bare.text = choose((np.zeros(2), np.ones(2)), c)


def renew_static_object(w: World, a: int, b: int, c: int) -> None:
    name = choose([*STATIC_OBJECTS], b)
    setattr(choose(w.models, a), name, STATIC_OBJECTS[name][0](choose("ab", c)))


def edit_frozen(w: World, a: int, b: int, c: int) -> None:
    m = choose(w.models, a)
    if isinstance(m.frozen.scale, list) and b % 2:
        m.frozen.scale.append(c % 2)
        del m.frozen.scale[:-2]
    else:
        m.frozen = FrozenConfig(choose((1, True, [1], [True]), c))


def share_static(w: World, a: int, b: int, c: int) -> None:
    one, two = w.models
    name = choose([*STATIC_OBJECTS], b)
    setattr(one, name, vars(two)[name])


def set_flag(w: World, a: int, b: int, c: int) -> None:
    m = choose(w.models, a)
    state = (m, m.equal, m.loose)[b % 3]._pytree__state
    if c % 3:
        state._initializing = not state._initializing
    else:
        state._is_setup = not state._is_setup


# Layers


class Layers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.one = nnx.Linear(2, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.two = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.two(self.dropout(self.norm(self.one(x))))


def train(model: Any, optimizer: Any, x: Any) -> Any:
    # Its own parameters serve as the gradient: a real one takes four times as long to compile.
    optimizer.update(model, nnx.state(model, nnx.Param))
    return optimizer.step[...], x


def forward(model: Any, x: Any) -> Any:
    return model(x)


# The tests wait for the compiler most of the time.
QUICK = {"compiler_options": {"xla_backend_optimization_level": 0}}
FUNCTIONS["train"] = (train, QUICK)
FUNCTIONS["forward"] = (forward, QUICK)
FUNCTIONS["forward, no updates"] = (forward, {"graph_updates": False, **QUICK})
BATCH = np.arange(6, dtype=np.float32).reshape(3, 2) / 4


def make_layers(w: World) -> None:
    for seed in range(2):
        model = Layers(nnx.Rngs(seed))
        w.models.append(model)
        w.kept.append(nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param))
    w.mode = optax.sgd(0.02)


def call_forward(w: World, a: int, b: int, c: int) -> Any:
    name = "forward, no updates" if b % 4 == 0 else "forward"
    return w.f[name](choose(w.models, a), BATCH)


def call_train(w: World, a: int, b: int, c: int) -> Any:
    return w.f["train"](choose(w.models, a), choose(w.kept, a), BATCH)


def set_training(w: World, a: int, b: int, c: int) -> None:
    model = choose(w.models, a)
    if b % 2:
        model.train()
    else:
        model.eval()


def set_rate(w: World, a: int, b: int, c: int) -> None:
    choose(w.models, a).dropout.rate = choose((0.5, 0.0, 0), b)


def tie(w: World, a: int, b: int, c: int) -> None:
    model = choose(w.models, a)
    model.two.kernel = model.one.kernel if b % 2 else model.one.kernel.copy()


def swap_layers(w: World, a: int, b: int, c: int) -> None:
    model = choose(w.models, a)
    model.one, model.two = model.two, model.one


def exchange_layers(w: World, a: int, b: int, c: int) -> None:
    one, two = w.models
    name = choose(("one", "norm", "two"), a)
    first, second = getattr(one, name), getattr(two, name)
    setattr(one, name, second)
    setattr(two, name, first)


def new_layer(w: World, a: int, b: int, c: int) -> None:
    choose(w.models, a).two = nnx.Linear(2, 2, use_bias=b % 2 == 0, rngs=nnx.Rngs(c))


def new_optimizer(w: World, a: int, b: int, c: int) -> None:
    index = a % len(w.models)
    rate = w.mode if b % 2 else RATE
    w.kept[index] = nnx.Optimizer(w.models[index], rate, wrt=nnx.Param)


def reseed(w: World, a: int, b: int, c: int) -> None:
    model = choose(w.models, a)
    model.dropout.rngs = nnx.Rngs(b)["default"].fork() if c % 2 else model.dropout.rngs.fork()


def copy_layers(w: World, a: int, b: int, c: int) -> None:
    copy_model(w, a, b % 4, c)


def update_layers(w: World, a: int, b: int, c: int) -> None:
    nnx.update(w.models[a % 2], nnx.state(w.models[(a + 1) % 2], nnx.Param))


RATE = optax.sgd(0.01)


def call_in_gradient(w: World) -> Any:
    """A function of the library in a gradient of Flax."""
    f = w.f["forward"]
    gradient = nnx.grad(lambda model: jnp.sum(f(model, BATCH)))(w.model)
    return jax.tree.leaves(gradient)


def call_in_jit(w: World) -> Any:
    f = w.f["forward"]
    return nnx.jit(lambda model, x: f(model, x) + 1)(w.model, BATCH)


# Shardings


def make_shardings(w: World) -> None:
    for _ in range(2):
        model = w.node(
            big=nnx.Param(jnp.arange(8.0) + w.number()),
            other=nnx.Param(jnp.arange(8.0) + w.number()),
            stat=nnx.BatchStat(jnp.arange(8.0) + w.number()),
            k=1,
        )
        w.models.append(model)


LAYOUTS: tuple[Callable[[], Any], ...] = (
    lambda: NamedSharding(MESH, P("x")),
    lambda: NamedSharding(MESH, P("y")),
    lambda: NamedSharding(MESH, P()),
    lambda: SingleDeviceSharding(jax.devices()[0]),
    lambda: SingleDeviceSharding(jax.devices()[3]),
)


def lay_out(w: World, a: int, b: int, c: int) -> None:
    variable = choose(variables_of(w), a)
    variable.set_raw_value(jax.device_put(variable.get_raw_value(), choose(LAYOUTS, b)()))


def lay_out_all(w: World, a: int, b: int, c: int) -> None:
    for variable in reachable(choose(w.models, a)):
        if isinstance(variable, nnx.Variable):
            variable.set_raw_value(jax.device_put(variable.get_raw_value(), choose(LAYOUTS, b)()))


def uncommit(w: World, a: int, b: int, c: int) -> None:
    """Values that nobody has laid out yet."""
    for variable in reachable(choose(w.models, a)):
        if isinstance(variable, nnx.Variable):
            number = np.asarray(variable.get_raw_value())
            variable.set_raw_value(number if b % 3 == 0 else jnp.array(number))


def resize(w: World, a: int, b: int, c: int) -> None:
    size = (8, 16, 16, 3)[b % 4] if c % 4 == 0 else (8, 16)[b % 2]
    for variable in reachable(choose(w.models, a)):
        if isinstance(variable, nnx.Variable):
            variable.set_raw_value(jnp.arange(float(size)) + w.number())


def retype(w: World, a: int, b: int, c: int) -> None:
    model = choose(w.models, a)
    kind = choose((nnx.Param, nnx.BatchStat), b)
    model.other = kind(np.asarray(model.other.get_raw_value()))


def call_sharded(w: World, a: int, b: int, c: int) -> Any:
    names = ("sharded", "sharded by type", "sharded by shape", "mapped")
    return w.f[choose(names, b)](choose(w.models, a), X)


def call_in_mesh(w: World, a: int, b: int, c: int) -> Any:
    name = ("sharded in context", "mapped in context")[c % 2]
    f, model = w.f[name], choose(w.models, a)
    if b % 4 == 3:
        return f(model, X)  # refused
    with jax.set_mesh((MESH, FLIPPED)[b % 2]):
        return f(model, X)


def call_on_device(w: World, a: int, b: int, c: int) -> Any:
    with jax.default_device(jax.devices()[b % 2]):
        return w.f["count"](choose(w.models, a), X)


# Random graphs


def operation(name: str) -> Action:
    def mutate(w: World, a: int, b: int, c: int) -> None:
        objects = reachable(w.models)
        OPERATIONS[name](objects, [], a, b, c)

    return mutate


def make_graph(graph: Graph) -> Callable[[World], None]:
    def make(w: World) -> None:
        w.models += build(graph)

    return make


def call_all(w: World, a: int, b: int, c: int) -> Any:
    return w.f[("step", "read", "grow attribute")[a % 3]](w.models, X)


# Families


class Family(NamedTuple):
    """One kind of model, with what may happen to it.

    Attributes:
      make: fills a world.
      mutations: what may happen between calls.
      calls: the calls, by name; more often what stands there twice.
      truth: whether the plain Python function does the same. It does not where the user breaks
        the rules for statics: then what a call without a guard does is right.
      weight: its share of the tests. Layers take long to compile.
    """

    make: Callable[[World], None]
    mutations: dict[str, Action]
    calls: dict[str, Action]
    truth: bool = True
    weight: float = 1.0


def table(*actions: Action) -> dict[str, Action]:
    return {action.__name__.removeprefix("call_"): action for action in actions}


def calls(*names: str) -> dict[str, Action]:
    return {name: CALLS[name] for name in names}


def make_blocks(w: World) -> None:
    for _ in range(2):
        one, two = w.node(w=w.param(), v=w.param(), k=1), w.node(w=w.param(), k=1)
        w.models.append(w.node(a=one, b=two, w=w.param(), k=1))


def make_methods(w: World) -> None:
    for _ in range(2):
        model = w.f.Method()
        model.w, model.v, model.k = w.param(), w.param(), 1
        model.child = w.node(w=w.param(Tag))
        w.models.append(model)


FAMILIES: dict[str, Family] = {
    "attributes": Family(
        make_blocks,
        table(
            set_static, delete, restore, add, add_node, rename, reorder, swap, exchange, move_last,
            renew_variable, renew_node, reborn_variable, reborn_node,
        ),
        calls("step", "read", "pair", "grow links"),
    ),
    "containers": Family(
        make_containers,
        table(
            edit_list, edit_dict, edit_plain, edit_table, edit_pair, edit_state, edit_box,
            edit_held, edit_items, edit_words, renew_container, make_deep,
        ),
        calls("step", "read", "grow static"),
    ),
    "variables": Family(
        make_variables,
        table(
            edit_value, reset_values, edit_metadata, edit_type, edit_ref, edit_raw, edit_many, leak,
            flip_status,
        ),
        calls("step", "read", "grow metadata", "grow value", "fail"),
    ),
    "aliases": Family(
        make_aliases,
        table(
            link, link_node, link_cycle, unlink, link_raw, tidy, swap_models, copy_model,
            update_model, update_in_two, renew_variable, renew_node,
        ),
        calls("step", "pair", "nested", "part", "mode", "give", "grow links"),
    ),
    "classes": Family(
        make_classes,
        table(
            swap_classes, renew_class, renew_record, edit_class_static, edit_property, edit_class,
            edit_static_object, edit_static_number, renew_static_object, edit_frozen, share_static,
            set_flag,
        ),
        calls("step", "read"),
        truth=False,
    ),
    "calls": Family(
        make_methods,
        table(set_static, delete, add, swap_models, copy_model, renew_variable, reorder, link),
        calls(
            "step", "x", "keyword", "static", "method", "threads", "inside", "inside, new",
            "lower", "clear", "fail", "mode", "grow attribute", "donated", "count",
        ),
    ),
    "layers": Family(
        make_layers,
        table(
            set_training, set_rate, tie, swap_layers, exchange_layers, new_layer, new_optimizer,
            reseed, copy_layers, update_layers,
        ),
        table(call_forward, call_train),
        truth=False,  # which differs in the last digits, and after some training in more
        weight=0.4,
    ),
    "shardings": Family(
        make_shardings,
        table(lay_out, lay_out_all, uncommit, resize, retype, set_static, swap_models, reorder),
        table(call_sharded, call_in_mesh, call_donated, call_on_device),
    ),
    "graphs": Family(
        lambda w: None,  # what hypothesis draws
        {
            name: operation(name)
            for name in OPERATIONS
            if name not in ("scale variable", "mix variables", "return object", "return array")
        },
        table(call_all),
        weight=1.3,
    ),
}  # fmt: skip


# Scenarios: each kind of change alone


class Scenario(NamedTuple):
    """Three calls, one change, two calls.

    Attributes:
      mutate: the change.
      make: fills a world.
      call: the call.
      retraces: whether a call that splits its arguments traces again after the change. None where
        that depends on more.
      truth: whether the plain Python function does the same.
      counting: whether the number of traces is compared.
    """

    mutate: Callable[[World], Any]
    make: Callable[[World], None]
    call: Callable[[World], Any]
    retraces: bool | None = True
    truth: bool = True
    counting: bool = True


SCENARIOS: dict[str, Scenario] = {}


def make_one(w: World) -> None:
    one = w.node(w=w.param(), z=w.param(), k=1)
    two = w.node(w=w.param(), k=1)
    model = w.node(a=one, b=two, w=w.param(), v=w.param(), k=1, f=double)
    model.raw, model.plain, model.tag = w.array(), Other(), w.param(Tag, mark=1)
    model.plain.w = w.param()
    w.models.append(model)


def call_step(w: World) -> Any:
    return w.f["step"](w.model, X)


def scenario(
    make: Callable[[World], None] = make_one,
    call: Callable[[World], Any] = call_step,
    **options: Any,
) -> Callable[[Callable[[World], Any]], Callable[[World], Any]]:
    """Adds a scenario, named after its change."""

    def add(mutate: Callable[[World], Any]) -> Callable[[World], Any]:
        name = mutate.__name__.strip("_")
        assert name not in SCENARIOS, name
        SCENARIOS[name] = Scenario(mutate, make, call, **options)
        return mutate

    return add


def scenarios(
    changes: Mapping[str, Callable[[World], Any]],
    make: Callable[[World], None] = make_one,
    call: Callable[[World], Any] = call_step,
    **options: Any,
) -> None:
    """Adds several that are alike."""
    for name, mutate in changes.items():
        assert name not in SCENARIOS, name
        SCENARIOS[name] = Scenario(mutate, make, call, **options)


def run_scenario(name: str) -> None:
    """Runs one scenario.

    Raises:
      AssertionError: a call did something else than one that splits its arguments, or than Python.
    """
    own = SCENARIOS[name]
    worlds = Worlds(Functions3.new(own.truth), own.make, counting=own.counting)
    for _ in range(3):
        worlds.call(own.call)
    failure = worlds.mutate(own.mutate)
    assert failure is None, failure
    traces = [worlds.call(own.call) for _ in range(2)]
    if own.retraces is not None and own.counting:
        assert bool(traces[0]) == own.retraces, f"traces without a guard: {traces}"


def put(path: str, value: Any) -> Callable[[World], None]:
    """Sets an attribute below the model: to the value, or to what a lambda makes for the world."""
    *parents, name = path.split(".")

    def mutate(w: World) -> None:
        target, new = functools.reduce(getattr, parents, w.model), _made(w, value)
        if isinstance(target, nnx.Pytree) and not isinstance(new, dataclasses.Field):
            status = target._pytree__nodes.get(name)
            if name in vars(target) and status != nnx.is_data(new):
                delattr(target, name)
        setattr(target, name, new)

    return mutate


def do(path: str, *args: Any, **kwargs: Any) -> Callable[[World], None]:
    """Calls a method of something below the model."""

    def mutate(w: World) -> None:
        method = functools.reduce(getattr, path.split("."), w.model)
        method(*(_made(w, arg) for arg in args), **{k: _made(w, x) for k, x in kwargs.items()})

    return mutate


def _made(w: World, value: Any) -> Any:
    is_lambda = isinstance(value, types.FunctionType) and value.__name__ == "<lambda>"
    return value(w) if is_lambda else value


# Attributes

scenarios(
    {
        "attribute added": put("new", lambda w: w.param()),
        "static attribute added": put("new", 1),
        "module added": put("new", lambda w: w.node(w=w.param())),
        "raw array added": put("new", lambda w: w.array()),
        "attribute deleted": do("__delattr__", "v"),
        "last attribute deleted": do("__delattr__", "w"),
        "static attribute deleted": do("__delattr__", "k"),
        "module deleted": do("__delattr__", "a"),
        "static from 1 to True": put("k", True),
        "static from 1 to 1.0": put("k", 1.0),
        "static from 1 to 2": put("k", 2),
        "static from 1 to None": put("k", None),
        "static from 1 to a string": put("k", "1"),
        "static from 1 to a tuple": put("k", (1,)),
        "static function": put("f", halve),
        "static becomes a Variable": put("k", lambda w: w.param()),
        "static becomes a module": put("k", lambda w: w.node()),
        "Variable becomes static": put("v", 1),
        "Variable becomes a raw array": put("v", lambda w: w.array()),
        "raw array becomes a Variable": put("raw", lambda w: w.param()),
        "Variable becomes a module": put("v", lambda w: w.node(w=w.param())),
        "module becomes a Variable": put("a", lambda w: w.param()),
        "module of another type": put("plain", lambda w: w.node(w=w.param())),
        "static of a child": put("b.k", True),
    }
)


@scenario()
def attribute_renamed(w: World) -> None:
    value = w.model.v
    del w.model.v
    w.model.u = value


@scenario()
def static_attribute_renamed(w: World) -> None:
    del w.model.k
    w.model.m = 1


@scenario(retraces=False)
def attributes_reordered(w: World) -> None:
    for name in ("v", "a", "k"):
        value = vars(w.model)[name]
        delattr(w.model, name)
        setattr(w.model, name, value)


@scenario(retraces=False)
def attributes_swapped(w: World) -> None:
    w.model.w, w.model.v = w.model.v, w.model.w


@scenario()
def modules_swapped(w: World) -> None:
    w.model.a, w.model.b = w.model.b, w.model.a


@scenario(retraces=False)
def equal_modules_swapped(w: World) -> None:
    del w.model.a.z
    w.model.a, w.model.b = w.model.b, w.model.a


SCENARIOS["equal_modules_swapped"] = SCENARIOS["equal_modules_swapped"]._replace(
    make=lambda w: w.models.append(w.node(a=w.node(w=w.param()), b=w.node(w=w.param()))),
    mutate=lambda w: _swap(w.model, "a", w.model, "b"),
)


def _swap(one: Any, name: str, two: Any, other: str) -> None:
    first, second = vars(one)[name], vars(two)[other]
    setattr(one, name, second)
    setattr(two, other, first)


@scenario(retraces=False)
def attributes_of_two_modules_swapped(w: World) -> None:
    _swap(w.model.a, "w", w.model.b, "w")


@scenario()
def last_attribute_moved_to_the_next_module(w: World) -> None:
    value = w.model.a.z
    del w.model.a.z
    w.model.b.a = value


@scenario()
def static_moved_to_another_module(w: World) -> None:
    del w.model.a.k
    w.model.plain.k = 1


@scenario()
def dotted_names(w: World) -> None:
    """Names that together look as before."""
    setattr(w.model.a, "z.w", w.model.a.z)
    del w.model.a.z


@scenario(lambda w: w.models.append(w.node(zero=0.0, w=w.param())))
def static_from_0_to_minus_0(w: World) -> None:
    w.model.zero = -0.0


@scenario(lambda w: w.models.append(w.node(pair=(1, ("a", 0.0)), w=w.param())))
def static_in_a_tuple(w: World) -> None:
    w.model.pair = (1, ("a", -0.0))


@scenario(
    lambda w: w.models.append(w.node(pair=(1, ("a", 0.0)), w=w.param())),
    retraces=False,
)
def static_tuple_by_an_equal_one(w: World) -> None:
    w.model.pair = (int("1"), ("a", float("0")))


@scenario(lambda w: w.models.append(w.node(pair=Pair(1, 2), w=w.param())))
def static_named_tuple_of_another_type(w: World) -> None:
    w.model.pair = Twin(1, 2)


@scenario()
def number_becomes_data(w: World) -> None:
    del w.model.k
    w.model.k = nnx.data(1)


@scenario(lambda w: w.models.append(w.node(w=w.param(), k=nnx.data(1))))
def number_becomes_static(w: World) -> None:
    w.model.k = nnx.static(1)


@scenario(
    lambda w: w.models.append(w.node(w=w.param(), k=nnx.data(1))),
    retraces=False,
)
def data_number_changed(w: World) -> None:
    w.model.k = 3


# Identity

scenarios(
    {
        "Variable by an equal one": put("v", lambda w: w.model.v.copy()),
        "Variable by one with another value": put("v", lambda w: w.param()),
        "module by an equal one": put("a", lambda w: nnx.clone(w.model.a)),
        "child by its copy": put("a", lambda w: copy.deepcopy(w.model.a)),
        "model by its clone": lambda w: setattr(w, "model", nnx.clone(w.model)),
        "model by its copy": lambda w: setattr(w, "model", copy.deepcopy(w.model)),
        "model by its shallow copy": lambda w: setattr(w, "model", copy.copy(w.model)),
        "model by itself, pickled": lambda w: setattr(
            w, "model", pickle.loads(pickle.dumps(w.model))
        ),
        "model split and merged": lambda w: setattr(w, "model", nnx.merge(*nnx.split(w.model))),
        "model updated from a state": lambda w: nnx.update(
            w.model, jax.tree.map(lambda x: x + 1, nnx.state(w.model))
        ),
        "nothing": lambda w: None,
    },
    retraces=False,
)


def make_models(w: World) -> None:
    for _ in range(2):
        w.models.append(w.node(w=w.param(), child=w.node(w=w.param(), k=1)))


scenarios(
    {
        "another model of the same structure": lambda w: w.models.reverse(),
        "children of two models exchanged": lambda w: _swap(
            w.models[0], "child", w.models[1], "child"
        ),
        "a child that belongs to another model, too": lambda w: setattr(
            w.models[0], "child", w.models[1].child
        ),
    },
    make_models,
    retraces=False,
)


@scenario(make_models)
def another_model_of_another_structure(w: World) -> None:
    w.models.reverse()
    w.model.child.k = True


scenarios(
    {
        "other attributes at the address of the old module": lambda w: reborn(
            w.model, "plain", Other, v=w.param()
        ),
        "other static at the address of the old module": lambda w: reborn(
            w.model, "plain", Other, w=w.param(), k=1
        ),
        "module of another type at the address of the old one": lambda w: reborn(
            w.model, "plain", Node, w=w.param()
        ),
        "metadata at the address of the old Variable": lambda w: reborn(
            w.model, "v", nnx.Param, w.array(), mark=1
        ),
        "type at the address of the old Variable": lambda w: reborn(
            w.model, "v", nnx.BatchStat, w.array()
        ),
    }
)
scenarios(
    {
        "module at the address of the old one": lambda w: reborn(
            w.model, "plain", Other, w=w.param()
        ),
        "Variable at the address of the old one": lambda w: reborn(
            w.model, "v", nnx.Param, w.array()
        ),
    },
    retraces=False,
)


@scenario(lambda w: w.models.append(w.node(w=w.param(), k=1)))
def model_at_the_address_of_the_old_one(w: World) -> None:
    address = id(w.model)
    w.models.clear()
    new = new_at(address, Node)
    fill(new, w=w.param(), k=True)
    w.models.append(new)


# Types

scenarios(
    {
        "class of a module": lambda w: object.__setattr__(w.model.plain, "__class__", Node),
        "class of the model": lambda w: object.__setattr__(w.model, "__class__", Other),
        "class of a Variable": put("v.__class__", nnx.BatchStat),
        "class of a Variable, to a subclass": put("v.__class__", Scale),
        "Variable by one of another type": put(
            "v",
            lambda w: nnx.BatchStat.from_metadata(
                w.model.v.get_raw_value(), w.model.v.get_metadata()
            ),
        ),
    }
)


# Aliases


def make_alias(w: World) -> None:
    shared, child = w.param(), w.node(w=w.param())
    w.models.append(
        w.node(a=w.node(w=shared, v=w.param()), w=shared, one=child, two=child, v=w.param())
    )
    w.model.a.up = w.model


scenarios(
    {
        "alias broken": put("w", lambda w: w.model.w.copy()),
        "alias made": put("v", lambda w: w.model.a.v),
        "alias of another Variable": put("w", lambda w: w.model.a.v),
        "module alias broken": put("two", lambda w: nnx.clone(w.model.two)),
        "module alias made": put("one", lambda w: w.model.a),
        "cycle broken": do("a.__delattr__", "up"),
        "cycle to another module": put("a.up", lambda w: w.model.one),
        "cycle made": put("one.up", lambda w: w.model),
        "cycle to itself": put("me", lambda w: w.model),
        "cycle to a copy": put("a.up", lambda w: nnx.clone(w.model.one)),
    },
    make_alias,
)


@scenario(make_alias, retraces=False)
def aliases_exchanged(w: World) -> None:
    """Another Variable is shared in the same places."""
    w.model.w = w.model.a.w = w.param()


@scenario(retraces=False)
def one_array_in_two_variables(w: World) -> None:
    w.model.v.set_raw_value(w.model.w.get_raw_value())


@scenario(retraces=False)
def one_array_in_a_variable_and_an_attribute(w: World) -> None:
    w.model.raw = w.model.w.get_raw_value()


def call_two(w: World) -> Any:
    return w.f["pair"](*w.models, X)


scenarios(
    {
        "Variable shared between arguments": lambda w: setattr(w.models[1], "w", w.models[0].w),
        "module shared between arguments": lambda w: setattr(
            w.models[1], "child", w.models[0].child
        ),
        "one model twice": lambda w: w.models.__setitem__(1, w.models[0]),
        "child as argument": lambda w: w.models.__setitem__(1, w.models[0].child),
        "Variable as argument": lambda w: w.models.__setitem__(1, w.models[0].w),
        "arguments that point to each other": lambda w: (
            setattr(w.models[0], "up", w.models[1]),
            setattr(w.models[1], "up", w.models[0]),
        ),
    },
    make_models,
    call_two,
)
scenarios(
    {"arguments exchanged": lambda w: w.models.reverse()}, make_models, call_two, retraces=False
)


@scenario(
    lambda w: w.models.extend([w.node(w=w.param())] * 2),
    call_two,
)
def no_longer_one_model_twice(w: World) -> None:
    w.models[1] = nnx.clone(w.models[0])


# Metadata


def make_metadata(w: World) -> None:
    v = w.param(mark=1, zero=0.0, items=[1, [2]], table={"a": 1}, array=np.arange(2), name="n")
    w.models.append(w.node(v=v, w=w.param()))


def _metadata(w: World) -> dict[str, Any]:
    return w.model.v.get_metadata()


scenarios(
    {
        "metadata added": do("v.set_metadata", new=1),
        "metadata deleted": do("v.del_metadata", "mark"),
        "metadata renamed": do(
            "v.set_metadata",
            lambda w: {"note" if key == "mark" else key: x for key, x in _metadata(w).items()},
        ),
        "metadata from 1 to True": do("v.set_metadata", mark=True),
        "metadata from 1 to 2": do("v.set_metadata", "mark", 2),
        "metadata from 0 to minus 0": do("v.set_metadata", zero=-0.0),
        "metadata string": do("v.set_metadata", name="m"),
        "metadata list edited": lambda w: _metadata(w)["items"].append(1),
        "metadata list in a list edited": lambda w: _metadata(w)["items"][1].append(1),
        "metadata list from 1 to True": lambda w: _metadata(w)["items"].__setitem__(0, True),
        "metadata dict edited": lambda w: _metadata(w)["table"].update(a=True),
        "metadata array edited": lambda w: _metadata(w)["array"].__setitem__(0, 7),
        "metadata replaced": do("v.set_metadata", {}),
        "metadata moved": lambda w: (
            w.model.v.del_metadata("mark"),
            w.model.w.set_metadata(mark=1),
        ),
        "eager sharding": do("v.set_metadata", "eager_sharding", False),
    },
    make_metadata,
)
scenarios(
    {
        "metadata by an equal dict": do("v.set_metadata", lambda w: _metadata(w)),
        "metadata reordered": do("v.set_metadata", lambda w: dict(reversed(_metadata(w).items()))),
        "metadata list by an equal one": do("v.set_metadata", items=[1, [2]]),
    },
    make_metadata,
    retraces=False,
)


# Values


def make_values(w: World) -> None:
    w.models.append(
        w.node(
            v=w.param(),
            w=w.param(),
            raw=w.array(),
            numpy=np.full(2, w.number(), np.float32),
            many=nnx.Param((w.array(), w.array())),
            table=nnx.Param({"a": w.array(), "b": w.array()}),
            ref=nnx.Variable(w.array(), ref=True),
        )
    )


def _set_value(kind: Callable[[World], Any]) -> Callable[[World], None]:
    return lambda w: w.model.v.set_raw_value(kind(w))


scenarios(
    {
        "value of another dtype": _set_value(lambda w: w.array(dtype=jnp.int32)),
        "value of another shape": _set_value(lambda w: w.array((2,))),
        "value of a weak type": _set_value(lambda w: jnp.asarray(w.number())),
        "value becomes a float": _set_value(lambda w: w.number()),
        "value becomes an int": _set_value(lambda w: 3),
        "value becomes a bool": _set_value(lambda w: True),
        "value becomes a tuple": _set_value(lambda w: (w.array(), w.array())),
        "value becomes a dict": _set_value(lambda w: {"a": w.array()}),
        "value becomes None": _set_value(lambda w: None),
        "container grows": do("many.set_raw_value", lambda w: (w.array(), w.array(), w.array())),
        "container shrinks": do("many.set_raw_value", lambda w: (w.array(),)),
        "container becomes empty": do("many.set_raw_value", ()),
        "container of another type": do("many.set_raw_value", lambda w: [w.array(), w.array()]),
        "container nests": do("many.set_raw_value", lambda w: (w.array(), (w.array(),))),
        "container becomes an array": do("many.set_raw_value", lambda w: w.array()),
        "container dict grows in place": lambda w: w.model.table.get_raw_value().update(
            c=w.array()
        ),
        "container dict renamed in place": lambda w: w.model.table.get_raw_value().update(
            c=w.model.table.get_raw_value().pop("a")
        ),
        "raw array of another dtype": put("raw", lambda w: w.array(dtype=jnp.int32)),
        "raw array becomes a container": put("raw", lambda w: nnx.data([w.array()])),
        "ref becomes an array": put("ref", lambda w: nnx.Variable(w.array())),
        "array becomes a ref": put("v", lambda w: nnx.Param(w.array(), ref=True)),
        "ref of another shape": put("ref", lambda w: nnx.Variable(w.array((2,)), ref=True)),
        "one ref in two Variables": put(
            "v",
            lambda w: nnx.Variable.from_metadata(
                w.model.ref.get_raw_value(), w.model.ref.get_metadata()
            ),
        ),
    },
    make_values,
)
scenarios(
    {
        "value changed": _set_value(lambda w: w.array()),
        "value becomes a NumPy array": _set_value(lambda w: np.float32(w.number())[None][0:1][0]),
        "value becomes a NumPy array of one dimension less": _set_value(
            lambda w: np.full((), w.number(), np.float32)
        ),
        "container dict reordered in place": lambda w: w.model.table.get_raw_value().update(
            a=w.model.table.get_raw_value().pop("a")
        ),
        "container by an equal one": do(
            "table.set_raw_value", lambda w: dict(w.model.table.get_raw_value())
        ),
        "raw array changed": put("raw", lambda w: w.array()),
        "raw array becomes a NumPy array": put(
            "raw", lambda w: np.full((), w.number(), np.float32)
        ),
        "NumPy array edited in place": do("numpy.__setitem__", 0, 7),
        "NumPy array becomes a JAX array": put("numpy", lambda w: w.array((2,))),
        "ref changed": do("ref.__setitem__", ..., lambda w: w.array()),
        "ref by another one": put("ref", lambda w: nnx.Variable(w.array(), ref=True)),
    },
    make_values,
    retraces=False,
)
scenarios(
    {
        "committed to the first device": _set_value(
            lambda w: jax.device_put(w.array(), jax.devices()[0])
        ),
        "all on another device": lambda w: [
            x.set_raw_value(jax.device_put(x.get_raw_value(), jax.devices()[3]))
            for x in reachable(w.model)
            if isinstance(x, nnx.Variable) and not is_ref(x.get_raw_value())
        ],
        "value on a mesh": _set_value(
            lambda w: jax.device_put(w.array(), NamedSharding(MESH, P()))
        ),
        "two devices": lambda w: (
            w.model.v.set_raw_value(jax.device_put(w.array(), jax.devices()[1])),
            w.model.w.set_raw_value(jax.device_put(w.array(), jax.devices()[2])),
        ),
    },
    lambda w: w.models.append(w.node(v=w.param(), w=w.param())),
    retraces=None,
)


# Containers

scenarios(
    {
        "list grows": do("list.append", lambda w: w.param()),
        "list shrinks": do("list.pop"),
        "list gets another item": do("list.__setitem__", 0, lambda w: w.node()),
        "list: items swapped": lambda w: _swap(w.model.list, "0", w.model.list, "1"),
        "dict grows": do("dict.__setitem__", "c", lambda w: w.param()),
        "dict shrinks": do("dict.__delitem__", "a"),
        "static in a dict": do("dict.__setitem__", "b", "t"),
        "data list grows": do("plain.append", lambda w: w.param()),
        "data list grows inside": lambda w: w.model.plain[1].append(w.array()),
        "data list shrinks": do("plain.pop", 0),
        "data list nests": do(
            "plain.__setitem__", slice(None), lambda w: [[w.model.plain[0]], *w.model.plain[1:]]
        ),
        "data list reversed": do("plain.reverse"),
        "data list: Variable becomes an array": do("plain.__setitem__", 0, lambda w: w.array()),
        "data list: Variable becomes another type": do(
            "plain.__setitem__", 0, lambda w: w.param(nnx.BatchStat)
        ),
        "data list: static string": do("plain.__setitem__", 2, "t"),
        "data list: static from 1 to True": do("plain.__setitem__", 3, True),
        "data dict grows": do("table.update", c=lambda w: w.array()),
        "data dict renamed": do("table.update", c=lambda w: w.model.table.pop("a")),
        "data dict: None becomes a tuple": do(
            "table.update", b=lambda w: (w.model.table["b"][0], ())
        ),
        "data dict: tuple becomes a list": do("table.update", b=lambda w: [*w.model.table["b"]]),
        "data list becomes a tuple": put("plain", lambda w: nnx.data((*w.model.plain,))),
        "named tuple of another type": put("pair", lambda w: nnx.data(Twin(*w.model.pair))),
        "named tuple becomes a tuple": put("pair", lambda w: nnx.data(tuple(w.model.pair))),
        "state grows": do("state.__setitem__", "z", lambda w: w.param()),
        "state shrinks": do("state.__delitem__", "a"),
        "state: Variable replaced by another type": do(
            "state.__setitem__", "a", lambda w: w.param(nnx.BatchStat)
        ),
        "state grows inside": lambda w: w.model.state.raw_mapping["b"].update(d=w.param()),
        "pytree of the user's: static part": put("box.tag", "u"),
        "pytree of the user's: child becomes a list": put(
            "box.value", lambda w: [w.array(), w.array()]
        ),
        "pytree of the user's: child becomes a Variable": put("box.value", lambda w: w.param()),
        "static list grows": do("items.append", 1),
        "static list shrinks": do("items.pop"),
        "static list from 1 to True": do("items.__setitem__", 0, True),
        "static dict grows": do("words.update", c=1),
        "static dict from 1 to True": do("words.update", a=True),
        "static list in a dict grows": lambda w: w.model.words["b"].append(1),
        "static list becomes a tuple": put("items", lambda w: (*w.model.items,)),
    },
    make_containers,
)
scenarios({"list: an item twice": do("list.append", lambda w: w.model.list[0])}, make_containers)
scenarios(
    {
        "data list: Variable by an equal one": do(
            "plain.__setitem__", 0, lambda w: w.model.plain[0].copy()
        ),
        "data list: array changed": lambda w: w.model.plain[1].__setitem__(0, w.array()),
        "data list by an equal one": put("plain", lambda w: nnx.data([*w.model.plain])),
        "data dict reordered": do("table.update", a=lambda w: w.model.table.pop("a")),
        "data dict: array becomes a NumPy array": do(
            "table.update", a=lambda w: np.full((), w.number(), np.float32)
        ),
        "state: Variable by an equal one": do(
            "state.__setitem__", "a", lambda w: w.model.state["a"].copy()
        ),
        "state reordered": do(
            "state.__setitem__", "a", lambda w: w.model.state.raw_mapping.pop("a")
        ),
        "pytree of the user's: array changed": put("box.value", lambda w: w.array()),
        "pytree of the user's by an equal one": put(
            "box", lambda w: nnx.data(Box(w.model.box.value, "t"))
        ),
        "static list by an equal one": put("items", lambda w: [*w.model.items]),
        "static dict by an equal one": put("words", lambda w: dict(w.model.words)),
    },
    make_containers,
    retraces=False,
)
# JAX compares treedefs as Python does, for which 1 and True are the same.
scenarios(
    {"pytree of the user's: static part from 1 to True": put("box.tag", True)},
    lambda w: w.models.append(w.node(box=nnx.data(Box(w.array(), 1)), w=w.param())),
    retraces=False,
    truth=False,
)


# Statics with content, classes that make it hard


def _static_object(name: str, attribute: str, value: Any) -> Callable[[World], None]:
    return lambda w: setattr(vars(w.model)[name], attribute, value)


scenarios(
    {
        "static without a hash, in place": _static_object("bare", "text", "b"),
        "static without a dict, in place": _static_object("slim", "text", "b"),
        "static with a hash of its content, in place": _static_object("value", "text", "b"),
        "static dataclass, in place": _static_object("config", "scale", 2),
        "static dataclass from 1 to True": _static_object("config", "scale", True),
        "static frozen dataclass": put("frozen", FrozenConfig(True)),
        "static object by another one": put("label", Label("a")),
        "static object by one of another type": put("bare", Slim("a")),
        "flag: initializing": put("_pytree__state._initializing", True),
        "flag: set up": put("equal._pytree__state._is_setup", True),
        "flag of a module that is no pytree": put("loose._pytree__state._initializing", True),
        "static of a module that is always equal": put("equal.k", True),
        "static of a module that cannot be compared": put("never.k", True),
        "static of a module that is no pytree": put("loose.k", True),
        "class to one that is always equal": lambda w: object.__setattr__(
            w.model.never, "__class__", AlwaysEqual
        ),
        "property": put("measured.size", True),
        "data in a module that is no pytree": put("loose.v", lambda w: [w.array(), "s"]),
        "record by one with True for 1": put("record", lambda w: Record(w.model.record.w, True)),
        "always equal modules become one": put("equal_too", lambda w: w.model.equal),
    },
    make_classes,
    truth=False,
)
scenarios(
    {
        "static object by identity, in place": _static_object("label", "text", "b"),
        "static object that is always equal, in place": _static_object("same", "text", "b"),
        "static object that is always equal, another": put("same", Same("b")),
        "static object by an equal one": put("value", Value("a")),
        "static without a hash, by an equal one": put("bare", Bare("a")),
        "always equal modules swapped": lambda w: _swap(w.model, "equal", w.model, "equal_too"),
        "always equal module by another": put("equal", lambda w: nnx.clone(w.model.equal)),
        "record by an equal one": put("record", lambda w: Record(w.param())),
        "model by itself, without hash": put("never", lambda w: w.model.never),
    },
    make_classes,
    retraces=False,
    truth=False,
)


def make_static_contents(w: World) -> None:
    w.models.append(
        w.node(
            frozen=FrozenConfig([1]),
            bare=Bare(np.zeros(2)),
            nested=(1, [2, Config(1)]),
            value=(Value(1), 2),
            values=[Value(1)],
            config=Config(Value(1)),
            label=Label("a"),
            labels=(Label("a"), 1),
            set={1},
            bytes=bytearray(b"ab"),
            space=types.SimpleNamespace(a=1),
            queue=collections.deque([1]),
            ordered=collections.OrderedDict(a=1, b=2),
            box=nnx.data(Box(w.array(), Value("a"))),
            w=w.param(note=Value("a")),
        )
    )


scenarios(
    {
        "list in a frozen dataclass": do("frozen.scale.append", 1),
        "array in a static without a hash": do("bare.text.__setitem__", 0, 1),
        "list in a static tuple": lambda w: w.model.nested[1].append(1),
        "dataclass in a list in a static tuple": lambda w: setattr(
            w.model.nested[1][1], "scale", True
        ),
        "static with a hash of its content in a tuple": lambda w: setattr(
            w.model.value[0], "text", 3
        ),
        "static with a hash of its content in a list": lambda w: setattr(
            w.model.values[0], "text", 3
        ),
        "static with a hash of its content in a dataclass": put("config.scale.text", 3),
        "static with a hash of its content as metadata": lambda w: setattr(
            w.model.w.get_metadata("note"), "text", "b"
        ),
        "class of a static": put("label.__class__", Title),
        "class of a static in a tuple": lambda w: setattr(w.model.labels[0], "__class__", Title),
        "set": do("set.add", 2),
        "set from 1 to True": lambda w: (w.model.set.clear(), w.model.set.add(True)),
        "bytes": do("bytes.append", 3),
        "namespace": put("space.a", 2),
        "queue": do("queue.append", 2),
        "ordered dict": do("ordered.update", a=True),
    },
    make_static_contents,
)
# Statics that say they are still the same, so a trace for them serves.
scenarios(
    {
        "from 1 to True in a static that calls them equal": lambda w: setattr(
            w.model.value[0], "text", True
        ),
        "static with a hash of its content in a pytree of the user's": put("box.tag.text", "b"),
    },
    make_static_contents,
    retraces=False,
    truth=False,
)


# Traces


@scenario(retraces=False)
def variable_of_another_trace(w: World) -> None:
    w.model.v = leaked(lambda value: nnx.Param(value), w.array())


@scenario(retraces=False)
def module_of_another_trace(w: World) -> None:
    new = leaked(lambda value: Node(), None)
    new.__dict__.update({key: x for key, x in vars(w.model).items() if key != "_pytree__state"})
    w.model = new


@scenario(call=lambda w: w.mode(w) if w.mode else call_step(w), retraces=None)
def within_a_trace(w: World) -> None:
    """The model belongs outside, where a call within another trace cannot change it."""
    w.mode = lambda w: jax.jit(lambda x: w.f["step"](w.model, x))(X)


@scenario(
    call=lambda w: w.mode(w) if w.mode else w.f["read"](w.model, X)[:2],
    retraces=None,
)
def read_within_a_trace(w: World) -> None:
    w.mode = lambda w: jax.jit(lambda x: w.f["read"](w.model, x)[:2])(X)


@scenario(
    call=lambda w: w.mode(w) if w.mode else w.f["read"](w.model, X)[1],
    retraces=None,
)
def read_within_a_gradient(w: World) -> None:
    w.mode = lambda w: jax.grad(lambda x: w.f["read"](w.model, x)[1])(X)


@scenario(call=lambda w: w.mode(w) if w.mode else call_step(w), retraces=None)
def new_model_within_a_trace(w: World) -> None:
    graphdef, state = nnx.split(w.model)

    def traced(state: Any, x: Any) -> Any:
        model = nnx.merge(graphdef, state)
        return [w.f["step"](model, x) for _ in range(3)], nnx.state(model)

    w.mode = lambda w: jax.jit(traced)(state, X)[0]


@scenario(call=lambda w: w.mode(w) if w.mode else call_step(w), retraces=None)
def tracer_put_into_the_model(w: World) -> None:
    """In place of an array, within a trace; then taken out again."""

    def call(w: World) -> Any:
        def traced(x: Any) -> Any:
            old = vars(w.model)["raw"]
            object.__setattr__(w.model, "raw", x)
            try:
                return w.f["read"](w.model, x)[:2]
            finally:
                object.__setattr__(w.model, "raw", old)

        return jax.jit(traced)(X), w.f["read"](w.model, X)[:2]

    w.mode = call


# Arguments and options


def call_with_mode(w: World) -> Any:
    args, kwargs = w.mode or ((X, 1), {})
    return w.f["static by number"](w.model, *args, **kwargs)


def _arguments(*args: Any, **kwargs: Any) -> Callable[[World], None]:
    return lambda w: setattr(w, "mode", (args, kwargs))


scenarios(
    {
        "static argument from 1 to True": _arguments(X, True),
        "static argument from 1 to 1.0": _arguments(X, 1.0),
        "static argument by keyword": _arguments(X, mode=1),
        "static argument left out": _arguments(X),
        "another static argument": _arguments(X, 1, twice=True),
        "argument by keyword": _arguments(x=X, mode=1),
        "argument left out": _arguments(mode=1),
        "argument of another type": _arguments(1.0, 1),
        "argument None": _arguments(None, 1),
        "argument of another shape": _arguments(jnp.arange(2.0), 1),
        "argument a tuple": _arguments((X, X), 1),
    },
    call=call_with_mode,
)
scenarios(
    {
        "argument a NumPy array": _arguments(np.float32(2), 1),
        "argument of another value": _arguments(X + 1, 1),
    },
    call=call_with_mode,
    retraces=False,
)


@scenario(
    call=lambda w: w.f["static by name"](w.model, **(w.mode or {"x": X, "mode": 1, "twice": 2})),
    retraces=False,
)
def keywords_reordered(w: World) -> None:
    w.mode = {"twice": 2, "mode": 1, "x": X}


@scenario(
    call=lambda w: w.f["static by name"](w.model, **(w.mode or {"x": X, "mode": 1, "twice": 2})),
)
def keywords_exchanged(w: World) -> None:
    w.mode = {"x": X, "mode": 2, "twice": 1}


@scenario(
    lambda w: (make_one(w), setattr(w, "mode", Value("a"))),  # type: ignore[func-returns-value]
    lambda w: w.f["static by name"](w.model, X, mode=w.mode),
)
def static_argument_in_place(w: World) -> None:
    w.mode.text = "b"


def _trees(w: World) -> Any:
    one, two = w.models
    return w.f["step"](w.mode(one, two) if w.mode else {"a": one, "b": [two, X]}, X)


scenarios(
    {
        "tree: another key": lambda w: setattr(w, "mode", lambda a, b: {"a": a, "c": [b, X]}),
        "tree: another container": lambda w: setattr(w, "mode", lambda a, b: {"a": a, "b": (b, X)}),
        "tree: another nesting": lambda w: setattr(w, "mode", lambda a, b: {"a": [a, b], "b": X}),
        "tree: less": lambda w: setattr(w, "mode", lambda a, b: {"a": a, "b": [b]}),
        "tree: one model twice": lambda w: setattr(w, "mode", lambda a, b: {"a": a, "b": [a, X]}),
        "tree: a named tuple": lambda w: setattr(w, "mode", lambda a, b: Pair(a, [b, X])),
        "tree: a part of a model": lambda w: setattr(
            w, "mode", lambda a, b: {"a": a, "b": [a.child, X]}
        ),
    },
    make_models,
    _trees,
)
scenarios(
    {
        "tree: another order": lambda w: setattr(w, "mode", lambda a, b: {"b": [b, X], "a": a}),
        "tree: models exchanged": lambda w: setattr(w, "mode", lambda a, b: {"a": b, "b": [a, X]}),
    },
    make_models,
    _trees,
    retraces=False,
)
scenarios(
    {
        "tree: static in a model": lambda w: setattr(w.models[1].child, "k", True),
        "tree: attribute deleted": lambda w: delattr(w.models[1].child, "k"),
        "tree: Variable shared": lambda w: setattr(w.models[1], "w", w.models[0].w),
    },
    make_models,
    _trees,
)


def each(*names: str) -> Callable[[World], Any]:
    """Calls some functions, one after the other."""
    return lambda w: [w.f[name](w.model, X) for name in names]


scenarios(
    {
        "grow attribute": lambda w: None,
        "grow static": lambda w: None,
        "grow metadata": lambda w: None,
        "grow links": lambda w: None,
        "grow value": lambda w: None,
        "fail": lambda w: None,
        "give": lambda w: None,
    },
    retraces=None,
)
for _name in ("grow attribute", "grow static", "grow metadata", "grow links", "grow value", "give"):
    SCENARIOS[_name] = SCENARIOS[_name]._replace(call=each(_name))


def call_and_fail(w: World) -> Any:
    result = call_step(w)
    if w.f.wrap is not eager:  # a function that fails under jit changes nothing
        failure = attempt(lambda: w.f["fail"](w.model, X))
        assert isinstance(failure, Failure) and failure.kind == "Boom", failure
    return result


SCENARIOS["fail"] = SCENARIOS["fail"]._replace(call=call_and_fail)
scenarios(
    {"other options of the same function": put("b.k", True)},
    call=each("values", "values, no updates", "values, tree"),
    retraces=None,
)
scenarios(
    {"other functions": put("b.k", True)},
    call=each("read", "step", "donated", "grow attribute", "count"),
    retraces=None,
)
scenarios(
    {"a function that changes, then a change": put("b.k", True)},
    call=each("grow static"),
    retraces=None,
)
scenarios(
    {
        "without updates: static": put("b.k", True),
        "without updates: alias": put("v", lambda w: w.model.w),
    },
    call=each("values, no updates"),
)
scenarios(
    {"tree mode: static": put("b.k", True)},
    call=each("values, tree"),
)
scenarios(
    {
        "tree mode: alias": put("v", lambda w: w.model.w),
        "tree mode: cycle": put("me", lambda w: w.model),
    },
    call=each("values, tree"),
    retraces=False,  # refused
)


@scenario(make_methods, lambda w: [w.model.step(X), w.f.Method.step(w.model, X)])
def method(w: World) -> None:
    w.model.child.k = 2


@scenario(make_methods, lambda w: w.model.step(X), retraces=False)
def method_of_another_object(w: World) -> None:
    w.models.reverse()


@scenario(retraces=None)
def cache_cleared(w: World) -> None:
    if w.f.wrap is not eager:
        w.f["step"].clear_cache()


@scenario(retraces=None)
def all_caches_cleared(w: World) -> None:
    jax.clear_caches()


@scenario(retraces=False)
def lowered_between(w: World) -> None:
    if w.f.wrap is not eager:
        w.f["step"].lower(w.model, X)


def _in(context: Callable[[], Any]) -> Callable[[World], None]:
    return lambda w: setattr(w, "mode", context)


def call_in_context(w: World) -> Any:
    with w.mode() if w.mode else contextlib.nullcontext():
        return w.f["count"](w.model, X)


scenarios(
    {
        "without jit": _in(jax.disable_jit),
        "with 64 bits": _in(lambda: jax.enable_x64(True)),
        "on another device": _in(lambda: jax.default_device(jax.devices()[2])),
        "with another precision": _in(lambda: jax.default_matmul_precision("highest")),
        "in a mesh": _in(lambda: jax.set_mesh(MESH)),
        "evaluated at once": _in(jax.ensure_compile_time_eval),
        "in a named scope": _in(lambda: jax.named_scope("scope")),
    },
    call=call_in_context,
    retraces=None,
    counting=True,
)


@scenario(make_models, lambda w: call_threads(w, 0, 0, 0), counting=False, retraces=None)
def two_threads(w: World) -> None:
    for model in w.models:
        model.child.k = True


# Shardings


def call_sharding(name: str) -> Callable[[World], Any]:
    return lambda w: w.f[name](w.model, X)


def call_in_a_mesh(w: World) -> Any:
    with jax.set_mesh(w.mode or MESH):
        return w.f["sharded in context"](w.model, X)


@scenario(make_shardings, call_in_a_mesh)
def mesh_in_context(w: World) -> None:
    for model in w.models:  # not yet laid out in the new mesh
        uncommit(w, w.models.index(model), 0, 0)
    w.mode = FLIPPED


@scenario(make_shardings, call_in_a_mesh, retraces=False)  # refused
def mesh_in_context_with_arrays_of_the_old_one(w: World) -> None:
    w.mode = FLIPPED


@scenario(make_shardings, lambda w: w.mode(w) if w.mode else call_in_a_mesh(w), retraces=False)
def no_mesh_in_context(w: World) -> None:
    w.mode = lambda w: w.f["sharded in context"](w.model, X)


@scenario(make_shardings, call_sharding("sharded by shape"))
def shape_that_a_filter_looks_at(w: World) -> None:
    for name in ("big", "other", "stat"):
        vars(w.model)[name].set_raw_value(jnp.arange(16.0) + w.number())


@scenario(make_shardings, call_sharding("sharded by type"))
def type_that_a_filter_looks_at(w: World) -> None:
    w.model.stat = nnx.Param(np.asarray(w.model.stat.get_raw_value()))


@scenario(make_shardings, call_sharding("sharded"))
def name_that_a_filter_looks_at(w: World) -> None:
    value = np.asarray(w.model.big.get_raw_value())
    del w.model.big
    w.model.large = nnx.Param(value)


scenarios(
    {
        "value that is not yet laid out": lambda w: uncommit(w, 0, 1, 0),
        "NumPy value that is not yet laid out": lambda w: uncommit(w, 0, 0, 0),
        "value laid out otherwise": lambda w: lay_out(w, 0, 1, 0),
        "value on one device": lambda w: lay_out(w, 0, 3, 0),
        "value on another device": lambda w: lay_out(w, 0, 4, 0),
        "value laid out as declared": lambda w: lay_out(w, 0, 0, 0),
        "value of a shape that does not fit": do("big.set_raw_value", jnp.arange(3.0)),
    },
    make_shardings,
    call_sharding("sharded"),
    retraces=None,
)
scenarios(
    {"sharded: static": put("k", True)},
    make_shardings,
    call_sharding("sharded"),
)
scenarios(
    {"donated: values renewed": lambda w: uncommit(w, 0, 1, 0)},
    make_shardings,
    call_sharding("donated"),
    retraces=False,
)


scenarios(
    {"mapped: static": put("k", True)},
    make_shardings,
    call_sharding("mapped"),
)
scenarios(
    {
        "mapped: value of another shape": lambda w: resize(w, 0, 1, 1),
        "mapped: value that is not yet laid out": lambda w: uncommit(w, 0, 0, 0),
        "mapped: value laid out otherwise": lambda w: lay_out_all(w, 0, 1, 0),
        "mapped: value on one device": lambda w: lay_out(w, 0, 3, 0),
    },
    make_shardings,
    call_sharding("mapped"),
    retraces=None,
)


@scenario(make_shardings, lambda w: _in_mesh(w.mode or MESH, w.f["mapped in context"], w.model))
def mapped_over_the_mesh_in_context(w: World) -> None:
    uncommit(w, 0, 0, 0)
    w.mode = FLIPPED


def _in_mesh(mesh: Mesh, function: Any, model: Any) -> Any:
    with jax.set_mesh(mesh):
        return function(model, X)


# Layers


scenarios(
    {
        "eval": lambda w: w.model.eval(),
        "rate of dropout": put("dropout.rate", 0.0),
        "kernels tied": put("two.kernel", lambda w: w.model.one.kernel),
        "layer without a bias": lambda w: new_layer(w, 0, 1, 0),
        "layers with other dtypes": put("one.dtype", jnp.float16),
    },
    make_layers,
    lambda w: call_forward(w, 0, 1, 0),
    truth=False,
)
scenarios(
    {
        "layers swapped": lambda w: swap_layers(w, 0, 0, 0),
        "layers of two models exchanged": lambda w: exchange_layers(w, 0, 0, 0),
        "streams renewed": put("dropout.rngs", lambda w: w.model.dropout.rngs),
    },
    make_layers,
    lambda w: call_forward(w, 0, 1, 0),
    retraces=False,
    truth=False,
)
scenarios(
    {
        "another optimizer": lambda w: new_optimizer(w, 0, 1, 0),
        "eval of a model with an optimizer": lambda w: w.model.eval(),
    },
    make_layers,
    lambda w: call_train(w, 0, 0, 0),
    truth=False,
)
scenarios(
    {
        "a new optimizer of the same kind": lambda w: new_optimizer(w, 0, 0, 0),
        "the optimizer of another model": lambda w: w.kept.reverse(),
    },
    make_layers,
    lambda w: call_train(w, 0, 0, 0),
    truth=False,
    retraces=None,
)
scenarios(
    {"eval, in a gradient": lambda w: w.model.eval()}, make_layers, call_in_gradient, truth=False
)
scenarios({"eval, in nnx.jit": lambda w: w.model.eval()}, make_layers, call_in_jit, truth=False)
