"""Random programs over static objects of every kind: with `jit` they do what Python does.

Two equal worlds go through the same steps: one calls functions under `jit`, the other without it.
After each step, the worlds and the results are equal.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import enum
import functools
import os
import random
import types
import zlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import nnx_sharding
from nnx_sharding.core.guard import native, store, walk

PROGRAMS = 2400 if os.environ.get("NNX_SHARDING_GUARD_STEPS") == "all" else 240
BATCHES = 8
STEPS = 10


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    ONE = 1


def square(x):
    return x * x


def halve(x):
    return x / 2


@dataclasses.dataclass
class Config:
    act: Any = square
    scale: Any = 1.0
    extra: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    act: Any = square
    note: Any = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(slots=True)
class Slim:
    one: Any = 1
    two: Any = None


class Lax:
    """Claims to be equal to every other one."""

    def __init__(self, one: Any):
        self.one = one

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lax)

    __hash__ = None  # type: ignore[assignment]


class Plain:
    """Without `__eq__`."""

    def __init__(self, scale: Any):
        self.scale = scale


class Words(list):
    pass


class Table(dict):
    pass


Point = collections.namedtuple("Point", ["x", "y"])

ATOMS: list[Callable[[], Any]] = [
    *(lambda x=x: x for x in (0, 1, True, False, 1.0, 0.0, -0.0, 2.5, float("nan"), 1j, -0j)),
    *(lambda x=x: x for x in ("a", "b", b"a", None, ..., int, np.float32, Color.RED, Level.ONE)),
    *(lambda x=x: x for x in (square, halve, nnx.relu, nnx.gelu, jnp.tanh, np.add, np.dtype("i4"))),
    *(lambda x=x: x for x in (np.float32(0.0), np.float32(-0.0), np.int8(1), slice(1, 2))),
    lambda: np.array([1, 0], ml_dtypes.float8_e4m3fn),
    lambda: np.array([1, 0], ml_dtypes.float8_e4m3fnuz),
    lambda: np.array([(1, 2)], [("a", "i4"), ("b", "i4")]),
    lambda: np.array([(1, 2)], [("b", "i4"), ("a", "i4")]),
    lambda: np.ma.array([1.0, 2.0], mask=[0, 1]),
    lambda: np.arange(3),
    lambda: np.arange(3.0).reshape(1, 3),
    lambda: bytearray(b"ab"),
    lambda: array.array("i", [1, 2]),
    lambda: frozenset({1, "a"}),
]


# Not mutable themselves, and not compared by identity.
FIXED = (
    *(tuple, frozenset, slice, np.generic, np.dtype, Frozen),
    *(functools.partial, types.MethodType, types.MappingProxyType),
)


def value(r: random.Random, depth: int = 3) -> Any:
    """A random value; all of its mutable parts are new."""
    if depth == 0 or r.random() < 0.3:
        return r.choice(ATOMS)()
    make: Callable[[], Any] = functools.partial(value, r, depth - 1)
    some = [make() for _ in range(r.randrange(3))]
    names = r.sample(["a", "b", "c"], len(some))
    key = r.choice([str, ord, lambda name: (name, 1)])  # of one type: JAX sorts them
    items = list(zip(map(key, names), some, strict=True))
    kinds: list[Callable[[], Any]] = [
        lambda: some,
        lambda: tuple(some),
        lambda: Point(make(), make()),
        lambda: dict(items),
        lambda: collections.OrderedDict(items),
        lambda: collections.defaultdict(r.choice([list, int, None]), items),
        lambda: {r.choice([1, 2.0, "s", True, Color.RED]) for _ in range(2)},
        lambda: collections.deque(some, r.choice([None, 3])),
        lambda: Config(make(), make()),
        lambda: Frozen(make(), make()),
        lambda: Slim(make(), make()),
        lambda: Lax(make()),
        lambda: Plain(r.choice([1, 2.0, square])),
        lambda: types.SimpleNamespace(**dict(zip(names, some, strict=True))),
        lambda: with_attribute(Words(some), make()),
        lambda: with_attribute(Table(items), make()),
        lambda: functools.partial(square, *some),
        lambda: types.MethodType(square, Plain(1)),
        lambda: types.MappingProxyType(dict(items)),
        lambda: np.array([*some, None], dtype=object),
    ]
    return r.choice(kinds)()


def with_attribute(x: Any, attribute: Any) -> Any:
    x.attribute = attribute
    return x


def parts(x: Any) -> list[Any]:
    """The parts of an object in order, keys and attributes included."""
    items: list[Any] = []
    if isinstance(x, dict | types.MappingProxyType):
        items += [part for item in x.items() for part in item]
    elif isinstance(x, set | frozenset):
        items += sorted(x, key=repr)  # the order depends on the history of the set
    elif isinstance(x, list | tuple | collections.deque):
        items += x
    elif isinstance(x, functools.partial):
        items += [x.func, *x.args]
    elif isinstance(x, types.MethodType):
        items += [x.__func__, x.__self__]
    elif isinstance(x, np.ndarray) and x.dtype == object:
        items += x.ravel().tolist()
    elif isinstance(x, Slim):
        items += [x.one, x.two]
    if not isinstance(x, types.FunctionType | type | enum.Enum | np.ufunc) and not callable(x):
        items += [part for item in getattr(x, "__dict__", {}).items() for part in item]
    return items


def seen(x: Any, numbers: dict[int, int], kept: list[Any]) -> Any:
    """All that Python code can observe of a value, shared objects included."""
    kind = type(x).__qualname__
    if isinstance(x, str | bytes | int | float | complex | type(None) | type(...) | enum.Enum):
        return (kind, repr(x))
    if isinstance(x, types.FunctionType | type | np.ufunc) or hasattr(x, "__wrapped__"):
        return (kind, getattr(x, "__name__", repr(x)))
    if id(x) in numbers:
        return ("again", numbers[id(x)])
    if not isinstance(x, FIXED):
        numbers[id(x)] = len(numbers)
    kept.append(x)
    described: list[Any] = [kind]
    if isinstance(x, np.ndarray) and x.dtype != object:
        described += [str(x.dtype), x.shape, np.asarray(x).tobytes(), str(getattr(x, "mask", ""))]
    elif isinstance(x, np.generic | np.dtype | slice | bytearray | array.array):
        described.append(repr(x))
    elif isinstance(x, collections.defaultdict):
        described.append(repr(x.default_factory))
    elif isinstance(x, collections.deque):
        described.append(x.maxlen)
    return (*described, *[seen(part, numbers, kept) for part in parts(x)])


def changeable(roots: list[Any]) -> list[Any]:
    """The objects that can be changed in place, each once, in a fixed order."""
    items: dict[int, Any] = {}
    stack = list(reversed(roots))
    while stack:
        x = stack.pop()
        if isinstance(x, str | bytes | int | float | complex | type(None) | type | enum.Enum):
            continue
        if id(x) in items or (
            callable(x) and not isinstance(x, functools.partial | types.MethodType)
        ):
            continue
        items[id(x)] = x
        if not isinstance(x, Plain):
            stack += reversed(parts(x))
    return [x for x in items.values() if not isinstance(x, FIXED)]


def change(x: Any, r: random.Random) -> None:
    """Changes an object in place."""
    new = value(r, 1)
    if hasattr(x, "__dict__") and r.random() < 0.3:
        x.added = r.choice([1, True, 2.0]) if isinstance(x, Plain) else new
    elif isinstance(x, list | collections.deque):
        if x and r.random() < 0.5:
            x.pop()
        else:
            x.append(new)
    elif isinstance(x, dict):
        if x and r.random() < 0.5:
            key = next(iter(x))
            x[key] = x.pop(key)  # another order
        elif isinstance(x, collections.defaultdict) and r.random() < 0.3:
            x.default_factory = r.choice([list, dict])
        else:
            x[next(iter(x), "a")] = new
    elif isinstance(x, set):
        x.symmetric_difference_update({r.choice([1, "s", 7])})
    elif isinstance(x, Config | Slim | Lax | Plain | types.SimpleNamespace):
        name = {Config: "scale", Slim: "two", Lax: "one", Plain: "scale"}.get(type(x), "a")
        setattr(x, name, r.choice([1, True, 2.0, halve]) if isinstance(x, Plain) else new)
    elif isinstance(x, bytearray | array.array):
        x[0] = r.randrange(5)
    elif isinstance(x, np.ndarray) and x.dtype == object:
        x[0] = new
    elif isinstance(x, np.ma.MaskedArray):
        x[0] = np.ma.masked if r.random() < 0.5 else 3.0
    elif isinstance(x, np.ndarray) and x.dtype.names is None:
        x.ravel()[0] = r.randrange(3)


def set_static(leaf: Any, static: Any) -> None:
    try:
        leaf.static = nnx.static(static)
    except ValueError:  # Flax refuses arrays that it can see
        leaf.static = nnx.static(Config(static))


class Leaf(nnx.Module):
    def __init__(self, static: Any, meta: Any):
        set_static(self, static)
        self.w = nnx.Param(jnp.ones(()), meta=meta)


class Model(nnx.Module):
    def __init__(self, r: random.Random):
        self.one = Leaf(value(r), value(r, 1))
        self.two = Leaf(value(r), value(r, 2))


def roots(model: Any) -> list[Any]:
    return [
        part
        for leaf in (model.one, model.two)
        for part in (leaf.static, leaf.w.get_metadata("meta", None))
    ]


def number(model: Any) -> int:
    kept: list[Any] = []
    return zlib.crc32(repr(seen(roots(model), {}, kept)).encode()) % 2**20


def read(model: Any) -> Any:
    return model.one.w[...] * number(model)


def write(model: Any, seed: int) -> Any:
    """Changes static objects while the function is traced."""
    r = random.Random(seed)
    before = number(model)
    items = changeable(roots(model))
    if items and r.random() < 0.8:
        change(r.choice(items), r)
    else:
        set_static(model.two, r.choice([[1], Config(), [*items[:1]], "new"]))
    model.one.w[...] += 1
    return model.one.w[...] * before


class World:
    def __init__(self, seed: int, jit: Callable[..., Any]):
        self.random = random.Random(seed)
        self.model = Model(self.random)
        self.read, self.write = jit(read), jit(write, static_argnames="seed")

    def step(self) -> float | None:
        r, model = self.random, self.model
        choice = r.randrange(8)
        if choice < 3:
            return float(self.read(model))
        if choice == 3:
            return float(self.write(model, seed=r.randrange(4)))
        items = changeable(roots(model))
        if choice < 6 and items:
            change(r.choice(items), r)
        elif choice == 6:
            set_static(model.one, value(r))
        else:
            set_static(model.two, model.one.static)
            model.two.w.set_metadata("meta", r.choice([model.one.static, value(r, 1)]))
        return None


def without_jit(fun: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    return fun


def with_jit(fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return nnx_sharding.jit(fun, graph=True, graph_updates=True, **options)


@pytest.mark.parametrize("kind", [native.FastestWalk, walk.PythonWalk])
@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.slow
def test_random_programs(kind, batch):
    with mock.patch.object(store, "FastestWalk", kind):
        for seed in range(batch, PROGRAMS // 2, BATCHES):
            mine, python = World(seed, with_jit), World(seed, without_jit)
            for step in range(STEPS):
                results = mine.step(), python.step()
                assert results[0] == results[1], (seed, step)
                assert number(mine.model) == number(python.model), (seed, step)
