"""Static objects of all kinds, nested in each other, that are changed in place at any depth."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from flax import nnx

from .calls import choose
from .objects import Bare, Config, FrozenConfig, double, halve
from .worlds import World


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Names(dict[str, Any]):
    """A subclass of dict, with attributes."""


@dataclasses.dataclass
class Settings:
    """What a model keeps as its configuration."""

    act: Callable[..., Any] = double
    names: list[Any] = dataclasses.field(default_factory=lambda: ["a", ["b"]])
    inner: Any = dataclasses.field(default_factory=lambda: FrozenConfig([1, Config([2])]))
    table: Any = dataclasses.field(default_factory=lambda: collections.OrderedDict(a=1, b=[2]))
    more: Any = dataclasses.field(default_factory=lambda: Names(a=[1]))
    array: Any = dataclasses.field(default_factory=lambda: np.arange(2))
    bound: Any = dataclasses.field(default_factory=lambda: functools.partial(halve, x=[1]))
    color: Color = Color.RED
    label: Any = dataclasses.field(default_factory=lambda: Bare([1]))


OPTIONS: tuple[Callable[[], Any], ...] = (
    *(lambda x=x: x for x in (1, True, 1.0, 0.0, -0.0, None, "s", (1, "u"), (True, "u"))),  # type: ignore[misc]
    *(lambda x=x: x for x in (double, halve, Color.RED, Color.BLUE)),  # type: ignore[misc]
    lambda: [1, [2]],
    lambda: {"a": 1},
    lambda: Config([1]),
    lambda: FrozenConfig(1),
    lambda: FrozenConfig([1]),
    lambda: functools.partial(halve, 1),
    lambda: functools.partial(double, x=[1]),
    lambda: np.arange(3),
    lambda: np.float32(1),
    lambda: collections.OrderedDict(a=1, b=2),
    lambda: Bare(1),
    lambda: ([1],),
)


def make_statics(w: World) -> None:
    for _ in range(2):
        w.models.append(w.node(w=w.param(), config=nnx.static(Settings()), k=1))


def mutable_in(x: Any) -> Iterator[Any]:
    """All that can be changed in place in a static object, itself included."""
    if isinstance(x, functools.partial):
        parts = [x.keywords]
    elif isinstance(x, dict):
        yield x
        parts = [*x.values(), vars(x)] if isinstance(x, Names) else [*x.values()]
    elif isinstance(x, list | tuple):
        if isinstance(x, list):
            yield x
        parts = [*x]
    elif isinstance(x, np.ndarray):
        yield x
        parts = []
    elif isinstance(x, Settings | Config | FrozenConfig | Bare):
        if not isinstance(x, FrozenConfig):
            yield x
        parts = [*vars(x).values()]
    else:
        parts = []
    for part in parts:
        yield from mutable_in(part)


def edit_inside(w: World, a: int, b: int, c: int) -> None:
    """One change, anywhere inside of a configuration."""
    model = choose(w.models, a)
    found = [*mutable_in(model.config)]
    if not found or len(found) > 40:
        model.config = nnx.static(Settings())
        return
    x, new = found[(7 * b + c + a) % len(found)], choose(OPTIONS, 5 * c + b)()
    if isinstance(x, list):
        if b % 3 == 0 and len(x) > 1:
            x.pop()
        elif b % 3 == 1 and x:
            x[c % len(x)] = new
        else:
            x.append(new)
    elif isinstance(x, collections.OrderedDict) and b % 2 and x:
        x.move_to_end(next(iter(x)))
    elif isinstance(x, dict):
        key = "abx"[c % 3]
        if b % 3 == 0 and key in x and key != "x":
            del x[key]
        else:
            x[key] = new
    elif isinstance(x, np.ndarray):
        x.flat[0] = c
    else:
        names = sorted(vars(x))
        object.__setattr__(x, names[b % len(names)], new)


def replace_config(w: World, a: int, b: int, c: int) -> None:
    """An equal configuration, or one that is shared with another model or within itself."""
    one, two = choose(w.models, a), choose(w.models, a + 1)
    if b % 3 == 0:
        one.config = nnx.static(copy.deepcopy(one.config))
    elif b % 3 == 1:
        one.config = nnx.static(two.config)
    elif isinstance(one.config, Settings) and isinstance(one.config.names, list):
        one.config.more = one.config.names


def step_config(w: World, a: int, b: int, c: int) -> None:
    """What training does: it replaces a value by an equal one, or by the next."""
    config = choose(w.models, a).config
    if isinstance(config, Settings):
        config.color = choose((*Color,), b)
        config.act = choose((double, halve), c)
