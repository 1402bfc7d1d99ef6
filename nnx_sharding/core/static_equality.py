"""Static values: when two of them are equal, and when one has changed.

A trace may be used again only for equal static values. The rule has three parts; the table in
``docs/architecture.md`` lists the types.

By value: types and values are equal. It is stricter than ``==``: 1, 1.0 and True are different, so
are 0.0 and -0.0, ``np.int4(1)`` and ``np.uint4(1)``, and frozensets in different orders.

By content: all parts are equal by this same rule, with the order of keys and all attributes, and
the same places share one object.

By identity: it is the same object, as for Python and ``jax.jit``. Its attributes are compared as
well, but not what is inside them: replacing ``schedule.scale`` is a change, appending to a list in
it is not.

An object that is compared by content or has attributes can be changed in place, so it is an entry
of the structure (:class:`~nnx_sharding.core.structure.StaticEntry`), like a module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import pathlib
import types
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding
from jax.tree_util import PyTreeDef

from .. import _compat
from ..specs.paths import Item, Path
from .static_parts import SCALARS, Kind, has_hidden_state, has_state, is_builtin, open_object
from .treedefs import aux_of

# By value

_PLAIN_TYPES = frozenset({str, int, bool, bytes, type(None), type(Ellipsis), type(NotImplemented)})
_PLAIN_BASES = (
    *(np.dtype, jax.Device, Sharding, Mesh, AbstractMesh, PartitionSpec),
    pathlib.PurePath,  # its slots are caches
)
_IDENTITY_TYPES = (
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type(jax.jit(len))),
    *(jax.custom_jvp, jax.custom_vjp, jax.core.Tracer, np.ufunc, weakref.ref),
)


def value_key(value: Any) -> Hashable | None:
    """A key for a value that is compared by value, equal for equal values; None for others."""
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return kind, value
    if kind is float:
        return kind, value.hex()
    if kind is complex:
        return kind, value.real.hex(), value.imag.hex()
    return _rarer_key(kind, value)


def _rarer_key(kind: type, value: Any) -> Hashable | None:
    if issubclass(kind, _IDENTITY_TYPES) or _compat.is_graph_object(value):
        return None
    if issubclass(kind, enum.Enum | type):
        return kind, _compat.identity(value)  # whoever holds the key also holds the value
    if issubclass(kind, np.generic) and not issubclass(kind, np.void):
        return kind, value.dtype, value.tobytes()
    if issubclass(kind, tuple | frozenset) and not has_state(kind):
        return _key_of_all(kind, value)
    if kind is _compat.HashableMapping:
        mapping = _compat.mapping_items(value)
        if all(type(part) is bool for _, part in mapping):  # which attributes are data
            return kind, bool, frozenset(mapping)
        items = [(key, value_key(part)) for key, part in mapping]
        return None if any(key is None for _, key in items) else (kind, frozenset(items))
    if kind is slice or kind is range:
        return _key_of_all(kind, (value.start, value.stop, value.step))
    if issubclass(kind, jax.Array):
        return _array_key(kind, value)
    if kind is PyTreeDef:  # which compares the data of its nodes by `==`
        return kind, value, *map(value_key, aux_of(value))
    if issubclass(kind, _PLAIN_BASES):
        return kind, value
    for base, plain in SCALARS.items():
        if issubclass(kind, base) and not has_state(kind):
            return kind, value_key(plain(value))
    fields = _fields(kind)
    if fields is not None:
        is_frozen = hasattr(kind, "__dataclass_params__") and kind.__dataclass_params__.frozen
        return _key_of_all(kind, [getattr(value, f, ...) for f in fields]) if is_frozen else None
    if _has_eq(kind) and not is_builtin(kind) and not has_state(kind):
        with contextlib.suppress(Exception):  # no hash
            hash(value)
            return kind, value
    return None


def _key_of_all(kind: type, parts: Iterable[Any]) -> Hashable | None:
    keys = tuple(map(value_key, parts))
    return None if None in keys else (kind, *keys)


def _array_key(kind: type, value: jax.Array) -> Hashable | None:
    if value.is_deleted() or not value.is_fully_addressable:
        return None
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.extended)
    data = np.asarray(jax.random.key_data(value) if is_key else value)
    return kind, value.dtype, value.shape, value.aval.weak_type, data.tobytes()


class Static:
    """A static value that cannot change: one compared by value, or by identity alone."""

    __slots__ = ("_key", "_ref", "_value", "by_identity", "note")

    def __init__(self, value: Any, hold: bool = True):
        key = value_key(value)
        self.by_identity = key is None
        self._key = _compat.identity(value) if key is None else key
        self._value, self._ref = value, None
        self.note: Any = None  # for diagnostics: a description of an object compared by identity
        if self.by_identity and not hold:
            with contextlib.suppress(TypeError):  # not every object has weak references
                self._ref, self._value = weakref.ref(value), None

    @staticmethod
    def of(value: Any, *, hold: bool = True) -> Static:
        """A static for ``value``; common ones are cached, which saves time and memory.

        With ``hold=False`` it does not keep alive an object that is compared by identity.
        """
        return _shared(value) if type(value) in _SHARED_TYPES else Static(value, hold)

    @property
    def value(self) -> Any:
        """The value; None for an object compared by identity that is gone."""
        return self._value if self._ref is None else self._ref()

    @property
    def identity(self) -> int:
        """A number for an object compared by identity, unique as long as this exists."""
        return _compat.identity(self._value if self._ref is None else self._ref)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or self._key != other._key:
            return False
        return not self.by_identity or (self.value is not None and self.value is other.value)

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Static({self.value!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Static, (self.value,)


_SHARED_TYPES = frozenset({str, int, bool, type(None)})
_shared = functools.lru_cache(maxsize=4096, typed=True)(Static)


def strict(value: Any) -> Any:
    """A value that is equal only where Python's ``==`` and this rule agree; for options."""
    if type(value) is tuple:
        return tuple(map(strict, value))
    if type(value) is Static:
        return value
    static = Static.of(value)
    return value if static.by_identity else static


# By content


class Content(NamedTuple):
    """The content of an object: its kind, its items and then the values of its attributes."""

    kind: Kind
    parts: Sequence[Any]
    shallow: bool  # whether it is compared by identity, and its attributes by value or identity


def content_of(value: Any) -> Content | None:
    """The content of an object that is not compared by value; None if it has none."""
    kind = type(value)
    if issubclass(kind, (*_IDENTITY_TYPES, jax.Array)) or _compat.is_graph_object(value):
        return None
    if _compat.is_hijax_variable(value) or _compat.is_ref(value):
        return None
    built_in = is_builtin(kind)
    if not built_in and not has_state(kind):
        return None
    by_content = _has_eq(kind) or _fields(kind) is not None
    shallow = not built_in and (not by_content or has_hidden_state(kind))
    return Content(*open_object(value), shallow)


def opened(value: Any) -> tuple[list[Any], tuple[Kind, int]]:
    """The parts of an object that is compared by content; its kind, and the number of parts."""
    content = content_of(value)
    if content is None:
        raise TypeError(f"{type(value).__name__} objects have no content")
    return list(content.parts), (content.kind, len(content.parts))


def _fields(kind: type) -> tuple[str, ...] | None:
    """The names of the fields of a dataclass, or of a class made by attrs; None for others."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if hasattr(kind, "__attrs_attrs__"):
        return tuple(field.name for field in kind.__attrs_attrs__)
    return None


def _has_eq(kind: type) -> bool:
    equal: Any = kind.__eq__
    return equal is not object.__eq__


def static_paths(kind: Kind, children: Sequence[Any]) -> list[Path]:
    """The path from a static object to each of its parts."""
    own, count = kind.type, len(children) - len(kind.names)
    items: Iterable[Path] = [(index,) for index in range(count)]
    if issubclass(own, dict):
        keys = [part.value if isinstance(part, Static) else repr(part) for part in children]
        keys = [Item(key) if type(key) is str else key for key in keys[:count:2]]
        items = [path for key in keys for path in ((key, "key"), (key,))]
    elif issubclass(own, tuple) and hasattr(own, "_fields"):
        items = [(name,) for name in own._fields]
    elif issubclass(own, functools.partial):
        items = [("func",), *(("args", index) for index in range(count - 1))]
    elif issubclass(own, types.MethodType):
        items = [("__func__",), ("__self__",)]
    return [*items, *((name,) for name in kind.names)]
