"""Classes that make it hard to see what changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from graphs import Node


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
    """A pytree of the user's, with a part that is not a child."""

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
    """Compared by identity, and by its attributes."""


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
