"""Worlds of equal objects, and how they are compared."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from graphs import Node, is_ref

from .functions import Functions, eager, guarded, uncached
from .views import NUMBERS, PLAIN, WORDS, attributes, is_object, reachable, shown


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
    seen: dict[int, Any] = {id(x): x for x in found if not isinstance(x, PLAIN)}
    return list(seen.values())


@functools.cache
def _kind_of(kind: type) -> str:
    if issubclass(kind, nnx.Pytree | nnx.Variable):
        return "object"
    if issubclass(kind, jax.Array | np.ndarray | np.generic):
        return "array"
    if issubclass(kind, NUMBERS):
        return "number"
    return "plain" if kind is type(None) or issubclass(kind, WORDS) else "other"


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
        return self.number(x) if self.exact and not isinstance(x, PLAIN) else None

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
