"""The rule for static values: by value, else by content at any depth, and no arrays in them.

Classes and objects are drawn at random: base × frozen × slots × its own ``__eq__`` × further
attributes × ``cached_property`` × what they hold, at a depth × where it is. Eager Python is the
truth.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import os
import pathlib
import random
import threading
import types
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.errors import TraceContextError

from nnx_sharding import jit
from nnx_sharding.core.guard import native, store, walk
from zoo import fails

PROGRAMS = 900 if os.environ.get("NNX_SHARDING_GUARD_STEPS") == "all" else 90
BATCHES = 6


class Color(enum.Enum):
    RED = 1


# Drawing classes

BASES: tuple[type, ...] = (
    *(object, object, object, int, float, str, bytes, tuple, frozenset, list, set, dict),
    *(collections.deque, collections.OrderedDict, types.SimpleNamespace, nnx.Module),
    *(np.float64, np.float32, np.int8, decimal.Decimal, datetime.date, pathlib.PurePosixPath),
)
ITEMS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    tuple: lambda part: ([part, 1],),
    frozenset: lambda part: ([1, "s"],),
    list: lambda part: ([part, 1],),
    set: lambda part: ([1, "s"],),
    collections.deque: lambda part: ([part, 1],),
    dict: lambda part: ({"key": part},),
    collections.OrderedDict: lambda part: ({"key": part},),
    str: lambda part: ("text",),
    bytes: lambda part: (b"text",),
    pathlib.PurePosixPath: lambda part: ("folder",),
    datetime.date: lambda part: (2026, 1, 2),
}
EQUALITIES: tuple[dict[str, Any], ...] = (
    {},
    {"__eq__": lambda a, b: type(a) is type(b) and a.one == b.one, "__hash__": lambda a: 1},
    {"__eq__": lambda a, b: type(a) is type(b), "__hash__": lambda a: 1},  # of equal class
)


def table_of(self: Any) -> Any:
    return jnp.arange(3.0) * (zlib.crc32(repr(type(self.one)).encode()) % 1000)


def drawn_class(r: random.Random) -> Callable[[Any, Any], Any]:
    """A class; makes an object of it that holds two values, one of them perhaps as an item."""
    if r.random() < 0.4:
        return _drawn_dataclass(r)
    base = r.choice(BASES)
    has_slots = r.random() < 0.3 and base is not nnx.Module
    # CPython has no slots with names in objects of variable size.
    names = ("one", "two") if base in (object, list, set, dict, float, np.float32) else ()
    members: dict[str, Any] = {"__slots__": names} if has_slots else {}
    if not has_slots and base is not nnx.Module:  # whose attributes are data, so it would hold it
        members["table"] = _table()
    if not has_slots or names:
        members |= r.choice(EQUALITIES)
    cls = type(f"Drawn{base.__name__}", (base,), members)
    if has_slots and r.random() < 0.3:
        cls = type("Child", (cls,), {"__slots__": ("three",)} if names and r.random() < 0.5 else {})
    takes = ITEMS.get(base, lambda _: () if base in (object, nnx.Module) else (1,))

    def make(one: Any, two: Any) -> Any:
        x = cls() if base is types.SimpleNamespace else cls(*takes(one))
        for name, part in (("one", one), ("two", two)):
            if hasattr(x, "__dict__") or name in names:
                object.__setattr__(x, name, part)
        return x

    return make


def _table() -> Any:
    table = functools.cached_property(table_of)
    table.attrname = "table"
    return table


def _drawn_dataclass(r: random.Random) -> Callable[[Any, Any], Any]:
    frozen, slots, eq = r.random() < 0.7, r.random() < 0.4, r.random() < 0.8
    members: dict[str, Any] = {} if slots else {"table": _table()}
    fields = [("one", Any), ("two", Any, dataclasses.field(default=1, compare=r.random() < 0.5))]
    cls = dataclasses.make_dataclass(
        "Drawn", fields, namespace=members, frozen=frozen, slots=slots, eq=eq, unsafe_hash=eq
    )
    if r.random() < 0.5:
        more = r.choice(({}, {"__slots__": ("three",)})) | r.choice(EQUALITIES)
        cls = type("Child", (cls,), more)
    has_third = r.random() < 0.5

    def make(one: Any, two: Any) -> Any:
        x = cls(one, two)
        if has_third and (hasattr(x, "__dict__") or hasattr(cls, "three")):
            object.__setattr__(x, "three", two)
        return x

    return make


ATOMS: tuple[Callable[[], Any], ...] = (
    *(lambda x=x: x for x in (0, 1, True, 1.0, 0.0, -0.0, None, "s", b"s", Color.RED, int, len)),
    *(lambda x=x: x for x in (np.float32(0), np.int8(1), range(3), slice(1, 2), frozenset({1}))),
    *(lambda x=x: decimal.Decimal(x) for x in ("1", "1.00")),
    lambda: datetime.datetime(2026, 1, 1, 1, tzinfo=datetime.UTC),
    lambda: datetime.datetime(2026, 1, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=1))),
    *(lambda x=x: (1, x) for x in (1, True, "s")),
    lambda: np.arange(2),
    lambda: bytearray(b"ab"),
    lambda: memoryview(bytearray(b"ab")),
    lambda: types.CellType([1]),
)
CONTAINERS: tuple[Callable[[Any], Any], ...] = (
    lambda x: [x],
    lambda x: (x, 1),
    lambda x: {"key": x},
    lambda x: types.MappingProxyType({"key": x}),
    lambda x: functools.partial(len, x),
    lambda x: types.MethodType(len, [x]),
    lambda x: types.SimpleNamespace(x=x),
    lambda x: collections.deque([x]),
    lambda x: np.array([x, None], object),
)


def drawn_value(r: random.Random, depth: int) -> Callable[[], Any]:
    """A recipe: it makes equal objects, all mutable parts of which are new."""
    if depth == 0:
        return r.choice(ATOMS)
    inner = drawn_value(r, depth - 1)
    if r.random() < 0.4:
        container = r.choice(CONTAINERS)
        return lambda: container(inner())
    make, other = drawn_class(r), r.choice(ATOMS)
    return lambda: make(inner(), other())


# What Python can see of an object, and what can be changed in it


def items_of(x: Any) -> list[Any]:
    if isinstance(x, dict | types.MappingProxyType):
        return [part for item in x.items() for part in item]
    if isinstance(x, functools.partial):
        return [x.func, *x.args]
    if isinstance(x, types.MethodType):
        return [x.__func__, x.__self__]
    if isinstance(x, types.CellType):
        return [x.cell_contents]
    if isinstance(x, np.ndarray) and x.dtype == object:
        return x.tolist()
    return [*x] if isinstance(x, tuple | list | collections.deque) else []


def attributes_in(x: Any) -> dict[str, Any]:
    names = ["one", "two", "three", *getattr(x, "__dict__", ())]
    is_object = not isinstance(x, type | enum.Enum | types.BuiltinFunctionType | functools.partial)
    hidden = {"table", "_pytree__nodes", "_pytree__state"}
    found = {n: getattr(x, n) for n in names if n not in hidden and is_object and hasattr(x, n)}
    return found if type(x).__module__ in (__name__, "types") or hasattr(x, "one") else {}


def plain(x: Any) -> str:
    """The value of an object without its parts."""
    if isinstance(x, memoryview | bytearray):
        return bytes(x).hex()
    if isinstance(x, np.ndarray | np.generic):
        return "" if x.dtype == object else f"{x.dtype} {x.shape} {x.tobytes().hex()}"
    for base in (bool, int, float, str, bytes, datetime.date, decimal.Decimal, pathlib.PurePath):
        if isinstance(x, base):
            return str(x) if base is pathlib.PurePath else base.__repr__(x)
    if isinstance(x, frozenset | set):
        return str(sorted(map(repr, x)))
    return repr(x) if isinstance(x, range | slice | type | enum.Enum | type(len) | None) else ""


def seen(x: Any) -> Any:
    attributes = [(name, seen(part)) for name, part in attributes_in(x).items()]
    return type(x).__name__, plain(x), [*map(seen, items_of(x))], attributes


def read_tables(x: Any) -> Any:
    """Reads each ``cached_property`` in an object: under `jit`, of tracers."""
    parts = [*items_of(x), *attributes_in(x).values()]
    has_table = isinstance(vars(type(x)).get("table"), functools.cached_property)
    own = x.table.sum() if has_table and hasattr(x, "__dict__") else 0.0
    return own + sum(map(read_tables, parts))


def changes_of(x: Any, new: Any) -> Iterator[Callable[[], Any]]:
    """All changes in place of an object and of what it holds."""
    params = getattr(type(x), "__dataclass_params__", None)
    has_promised = params is not None and params.frozen and not hasattr(x, "__dict__")
    for name, part in attributes_in(x).items():
        if not has_promised:  # never to change
            yield functools.partial(object.__setattr__, x, name, new)
        yield from changes_of(part, new)
    for part in items_of(x):
        yield from changes_of(part, new)
    if isinstance(x, list | collections.deque):
        yield functools.partial(x.append, new)
    elif isinstance(x, dict):
        yield functools.partial(x.update, key=new)
    elif isinstance(x, set):
        yield functools.partial(x.add, "new")
    elif isinstance(x, bytearray | memoryview):
        yield functools.partial(x.__setitem__, 0, 7)
    elif isinstance(x, np.ndarray):
        yield functools.partial(x.__setitem__, 0, new if x.dtype == object else 7)
    elif isinstance(x, types.CellType):
        yield functools.partial(setattr, x, "cell_contents", new)


def holds_array_in_module(x: Any) -> bool:
    """Whether a module has an array; one in a static object there is compared by content."""
    if isinstance(x, nnx.Module) and any(isinstance(part, np.ndarray) for part in in_graph(x)):
        return True
    return any(map(holds_array_in_module, [*items_of(x), *attributes_in(x).values()]))


def in_graph(x: Any) -> Iterator[Any]:
    """All parts that are data; `nnx.iter_graph` fails for subclasses of tuple, which are none."""
    yield x
    if isinstance(x, nnx.Module):
        parts: Iterable[Any] = attributes_in(x).values()
    else:
        parts = items_of(x) if type(x) in (tuple, list, dict) else ()
    for part in parts:
        yield from in_graph(part)


# Programs


class Model(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(()))


def number(x: Any) -> int:
    return zlib.crc32(repr(seen(x)).encode()) % 2**20


def result_of(model: Any, x: Any) -> Any:
    return model.w[...] * number(x) + read_tables(x)


def in_attribute(x: Any) -> tuple[Any, tuple[Any, ...]]:
    model = Model()
    model.holder = nnx.static(types.SimpleNamespace(x=x))
    return lambda m: result_of(m, m.holder.x), (model,)


def in_metadata(x: Any) -> tuple[Any, tuple[Any, ...]]:
    model = Model()
    model.w.set_metadata("note", x)
    return lambda m: result_of(m, m.w.get_metadata("note")), (model,)


def in_argument(x: Any) -> tuple[Any, tuple[Any, ...]]:
    return lambda m, x: result_of(m, x), (Model(), x)


def in_partial(x: Any) -> tuple[Any, tuple[Any, ...]]:
    return lambda m, f: result_of(m, f.args[0]), (Model(), functools.partial(len, x))


PLACES = (in_attribute, in_metadata, in_partial, in_argument)


def is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except (TypeError, ValueError):
        return False
    return True


class World:
    """A function under `jit`, and the same without it, for values that change."""

    def __init__(self, seed: int):
        self.r = random.Random(seed)
        self.make = drawn_value(self.r, self.r.randrange(1, 4))
        self.traces, self.x = 0, self.make()
        self.place = self.r.choice(PLACES[: 4 if is_hashable(self.x) else 3])
        self.fun, self.args = self.place(self.x)
        self.calls = jit(
            self.counted, graph=True, graph_updates=True, static_argnums=(1,), strict=True
        )

    def counted(self, *args: Any) -> Any:
        self.traces += 1
        return self.fun(*args)

    def check(self, note: Any) -> None:
        ours = float(self.calls(*self.args))
        assert ours == float(self.fun(*self.args)), note

    def step(self) -> str:
        """Changes the value, or takes an equal one or another one."""
        choice = self.r.randrange(6)
        if choice < 3:
            found = [*changes_of(self.x, self.r.choice(ATOMS)())]
            self.r.choice(found or [lambda: None])()
            if self.place is not in_argument or is_hashable(self.x):
                return "in place"
        if choice == 3:
            read_tables(self.x)
            return "read"
        is_equal = choice < 5 or self.place is in_argument
        self.x = self.make() if is_equal else drawn_value(self.r, 1)()
        self.args = self.place(self.x)[1]
        return "replaced"


@pytest.mark.parametrize("kind", [native.FastestWalk, walk.PythonWalk])
@pytest.mark.parametrize("batch", range(BATCHES))
def test_drawn_classes(kind: str, batch: int) -> None:
    """A trace is reused only where eager Python gives the same, and where nothing changed."""
    with mock.patch.object(store, "FastestWalk", kind):
        for _ in range(PROGRAMS // BATCHES // 2):
            seed = random.randrange(10**9)
            world = World(seed)
            for step in range(5):
                if holds_array_in_module(world.x):
                    with pytest.raises(ValueError, match="static values must not hold"):
                        world.check((seed, step))
                    break
                for _ in range(2):
                    world.check((seed, step))
                traces = world.traces
                world.check((seed, step))
                assert world.traces == traces, ("traced again", seed, step)
                world.step()


@pytest.mark.parametrize("kind", [native.FastestWalk, walk.PythonWalk])
@pytest.mark.parametrize("batch", range(BATCHES))
def test_drawn_changes_in_the_function(kind: type, batch: int) -> None:
    """What a function does to static objects has been done to those of the caller afterwards."""
    with mock.patch.object(store, "FastestWalk", kind):
        for _ in range(PROGRAMS // BATCHES // 2):
            seed = random.randrange(10**9)
            r = random.Random(seed)
            recipe = drawn_value(r, r.randrange(1, 4))
            make, number = (lambda recipe=recipe: [recipe(), 1]), r.randrange(100)
            if holds_array_in_module(make()):
                continue

            def change(m: Any, number: int = number) -> Any:
                found = [*changes_of(m.holder.x, 2)]
                found[number % len(found)]()
                return m.w[...] * 2

            f = jit(change, graph=True, graph_updates=True)
            (_, (mine,)), (_, (other,)) = in_attribute(make()), in_attribute(make())
            for call in range(4):
                if call == 2:  # equal objects, which the trace has not seen
                    mine.holder, other.holder = (
                        nnx.static(types.SimpleNamespace(x=make())) for _ in "ab"
                    )
                f(mine), change(other)
                assert seen(mine.holder.x) == seen(other.holder.x), (seed, call)


# What is refused


class Layer(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(()))

    def __call__(self, x: Any) -> Any:
        return x * self.w[...]


@dataclasses.dataclass(frozen=True)
class Config:
    part: Any = None

    @functools.cached_property
    def table(self) -> jax.Array:
        return jnp.arange(3.0)


class Bare:
    """Has no `__eq__`."""

    def __init__(self, part: Any = None):
        self.part = part

    @functools.cached_property
    def table(self) -> jax.Array:
        return jnp.arange(3.0)


HOLDERS: dict[str, tuple[Callable[[], Any], str]] = {
    "module": (Layer, ": Layer with arrays"),
    "Variable": (lambda: Bare(nnx.Param(jnp.ones(()))), ".part: Param with arrays"),
    "method": (lambda: Layer().__call__, ".__self__: Layer with arrays"),
    "partial": (lambda: functools.partial(len, Layer()), ".args[0]: Layer with arrays"),
    "partial with a keyword": (
        lambda: functools.partial(len, key=Layer()),
        ".keywords['key']: Layer with arrays",
    ),
    "frozen": (lambda: Config((1, Layer())), ".part[1]: Layer with arrays"),
    "plain": (lambda: Bare([{"key": Layer()}]), ".part[0]['key']: Layer with arrays"),
    "array": (lambda: Bare((jnp.ones(2),)), ".part[0]: an array, float32[2]"),
    "module in a module": (lambda: Bare(nnx.Dict(a=Layer())), ".part: Dict with arrays"),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", HOLDERS)
def test_arrays_in_static_arguments_are_refused(name: str, strict: bool) -> None:
    make, line = HOLDERS[name]
    f = jit(lambda x, s: x, static_argnames="s", strict=strict)
    with fails(ValueError, f"\n  s{line}\n"):
        f(1.0, s=make())


@pytest.mark.parametrize("name", [name for name in HOLDERS if name != "array"])
def test_modules_in_static_attributes_are_refused(name: str) -> None:
    make, line = HOLDERS[name]
    model = Model()
    model.holder = Bare(make())
    with fails(ValueError, f"\n  m.holder.part{line}\n"):
        jit(lambda m: m.w[...])(model)


def test_a_model_in_what_exists_once_is_refused() -> None:
    model = Model()
    model.hook = Bare(model)
    with pytest.raises(ValueError, match=r"\n  m\.hook\.part: Model with arrays\n"):
        jit(lambda m: m.w[...], graph=True)(model)


class WithStreams(nnx.Module):
    """Passes `rngs` on to a Variable, whose metadata it becomes, as some public models do."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(jnp.ones(()), rngs=rngs, stream=rngs.params)


def test_random_streams_in_metadata_are_no_arrays_of_the_program() -> None:
    rngs = nnx.Rngs(0)
    model = WithStreams(rngs)
    traces = []

    @jit
    def double(m: WithStreams) -> None:
        traces.append(m)
        m.w[...] *= 2

    double(model)
    rngs.params()  # what a program cannot read does not change it
    double(model)
    assert len(traces) == 1 and model.w[...] == 4
    assert model.w.get_metadata()["rngs"] is rngs
    for draw in (lambda m: m.w.rngs.params(), lambda m: m.w.stream()):
        with pytest.raises(TraceContextError, match="Cannot mutate RngCount"):
            jit(draw)(model)


class Named(nnx.Module):
    """Has a method of itself, and one of a part that is found later, as static attributes."""

    def __init__(self) -> None:
        self.part, self.w = Layer(), nnx.Param(jnp.ones(()))
        self.own, self.of_part = self.double, self.part.__call__
        self.a_box = Config([self.part])

    def double(self) -> Any:
        return self.w[...] * 2


def test_methods_of_the_model_compute_with_its_arrays() -> None:
    def total(m: Any) -> Any:
        return m.own() + m.of_part(1.0) + m.a_box.part[0](1.0)

    model, f = Named(), jit(total, graph=True)  # the methods share the model
    for value in (1.0, 3.0, 5.0):
        model.w[...], model.part.w[...] = value, 10 * value
        for _ in range(3):
            assert float(f(model)) == float(total(model)) == 22 * value


class Scale(nnx.Module):
    def __init__(self, k: Any) -> None:
        self.k = k


@pytest.mark.parametrize("wrap", [lambda x: x, Bare, Config, lambda x: (x,)])
def test_a_module_without_arrays_is_compared_by_content(wrap: Callable[[Any], Any]) -> None:
    traces = []

    def scaled(x: Any, s: Any) -> Any:
        traces.append(s)
        while not isinstance(s, Scale):
            s = s[0] if isinstance(s, tuple) else s.part
        return x * s.k

    f, module = jit(scaled, static_argnums=1), Scale(2.0)
    static = wrap(module)
    assert [float(f(1.0, static)) for _ in range(3)] == [2.0] * 3
    module.k = 5.0
    assert [float(f(1.0, static)) for _ in range(3)] == [5.0] * 3
    assert len(traces) == 2


# Effects


@pytest.mark.parametrize("place", [in_attribute, in_metadata, in_argument, in_partial])
@pytest.mark.parametrize("make", [Config, Bare])
def test_a_cached_property_leaks_no_tracer(
    place: Callable[[Any], Any], make: Callable[[], Any]
) -> None:
    config = make()
    _, args = place(config)
    for modes in ({}, {"graph": False}):
        f = jit(lambda m, *s: config_of((m, *s)).table.sum(), static_argnums=(1,), **modes)
        for _ in range(3):
            assert float(f(*args)) == float(make().table.sum())
        assert "table" not in vars(config)
    assert not isinstance(config.table, jax.core.Tracer)  # and it may be there
    for _ in range(3):
        assert float(f(*args)) == float(make().table.sum())
    assert "table" in vars(config)


def config_of(args: tuple[Any, ...]) -> Any:
    """The value that one of the places has."""
    if len(args) > 1:
        return args[1].args[0] if isinstance(args[1], functools.partial) else args[1]
    held = getattr(args[0], "holder", None)
    return args[0].w.get_metadata("note") if held is None else held.x


@pytest.mark.parametrize("make", [list, dict, lambda: Config([]), set, collections.deque])
def test_what_another_thread_changes_is_no_effect(make: Callable[[], Any]) -> None:
    def change(log: Any) -> None:
        log = log.part if isinstance(log, Config) else log
        [*changes_of(log, "a line")][-1]()

    def model_with_log() -> Any:
        model = Model()
        model.log = nnx.static(make())
        return model

    def step(model: Any) -> Any:
        tracing.set()
        go_on.wait(10)
        return model.w[...] * 1

    def logger() -> None:
        tracing.wait(10)
        change(first.log)
        go_on.set()

    tracing, go_on = threading.Event(), threading.Event()
    first, second, f = model_with_log(), model_with_log(), jit(step)
    thread = threading.Thread(target=logger)
    thread.start()
    f(first)
    thread.join()
    f(second)
    assert seen(first.log) != seen(make()) == seen(second.log)
