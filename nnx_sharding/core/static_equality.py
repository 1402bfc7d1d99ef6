"""Static values: when two of them are equal, and when one has changed.

A trace may be used again only for equal static values. There is one rule:

*By value* only if an object of the class can hold nothing but that value: type and value are equal.
It is stricter than ``==``: 1, 1.0 and True are different, so are 0.0 and -0.0, ``Decimal("1")`` and
``Decimal("1.00")``, and frozensets in different orders.

*Else by content*, at any depth: all that the object shows is equal by this same rule, with the
order of keys and all attributes, and the same places share one object. If the class has no
``__eq__``, or keeps something where Python cannot see it, it has to be the same object as well.

What shows nothing, such as a function, is the same object.

An object that is compared by content can be changed in place, so it is an entry of the structure
(:class:`~nnx_sharding.core.structure.StaticObject`), like a module. The table in
``docs/architecture.md`` lists the types.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import enum
import functools
import logging
import pathlib
import threading
import types
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding
from jax.tree_util import PyTreeDef

from .. import _compat
from ..specs.paths import Item, Path
from .static_parts import (
    StaticKind,
    attributes_of,
    fixed_parts,
    has_state,
    is_builtin,
    open_object,
    slots_of,
)
from .treedefs import aux_of

# By value

_PLAIN_TYPES = frozenset({str, int, bool, bytes, type(None), type(Ellipsis), type(NotImplemented)})
# Subclasses that these libraries define only add caches; the user's subclasses may hold more.
_LIBRARY_VALUES = (
    *(np.dtype, jax.Device, Sharding, Mesh, AbstractMesh, PartitionSpec),
    pathlib.PurePath,
)
_LIBRARIES = frozenset({"jax", "jaxlib", "numpy", "pathlib"})
# What belongs to the process or is code: none of it shows what it does.
_IDENTITY_TYPES = (
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type(jax.jit(len))),
    *(jax.custom_jvp, jax.custom_vjp, jax.core.Tracer, np.ufunc, weakref.ref),
    *(logging.Logger, threading.Thread),
)


def value_key(value: Any) -> Hashable | None:
    """Returns a key for a value that is compared by value, equal for equal ones; else None."""
    cls = type(value)
    if cls in _PLAIN_TYPES:
        return cls, value
    if cls is float:
        return cls, value.hex()
    if cls is complex:
        return cls, value.real.hex(), value.imag.hex()
    return _key_of_rare_type(cls, value)


def _key_of_rare_type(cls: type, value: Any) -> Hashable | None:
    """Returns a key for a value of a type that is rare in settings, equal for equal values only.

    None means that the value is not compared by value: it may change, or shows nothing. Each helper
    below returns a key for values of one kind, or None in the same sense.

    The order of the cases matters, since a class may be of several kinds. First comes what is known
    by its type. Then what may have attributes, as a subclass of ``float`` may: then its value is
    not all of it. Last come containers and values of C, which have no attributes.
    """
    if issubclass(cls, _IDENTITY_TYPES) or _compat.is_graph_object(value):
        return None
    if issubclass(cls, enum.Enum | type):
        # An id is enough: whoever holds the key also holds the value, so no other gets the id.
        return cls, _compat.identity(value)
    if issubclass(cls, jax.Array):
        return _array_key(cls, value)
    if cls is _compat.HashableMapping:
        return _mapping_key(cls, value)
    # Not the user's subclasses of these, which may hold more than their `==` compares.
    if issubclass(cls, _LIBRARY_VALUES) and cls.__module__.split(".")[0] in _LIBRARIES:
        # These libraries compare them right, with two exceptions.
        if issubclass(cls, pathlib.PurePath):
            return cls, str(value)  # as == ignores the case of paths of Windows
        if issubclass(cls, np.dtype) and value.metadata:  # which == ignores
            return None
        return cls, value
    if cls is PyTreeDef:
        # It compares the data of its nodes by `==` (1 == True), so these get keys of their own.
        return _key_of_all(cls, aux_of(value), value)
    if has_state(cls):  # attributes may change, except the fields of frozen dataclasses
        return _fields_key(cls, value)
    if issubclass(cls, np.generic) and not issubclass(cls, np.void):  # a void may hold objects
        return cls, value.dtype, value.tobytes()
    items = fixed_parts(value)  # of a tuple and the like, which may be anything; else None
    if items is not None:
        return _key_of_all(cls, items)
    if is_builtin(cls):  # a list or dict, which may change
        return None
    if cls.__eq__ is object.__eq__:  # no other object is equal to it
        return None
    return _key_as_pickled(cls, value)


def _key_of_all(cls: type, parts: Iterable[object], *more: Hashable) -> Hashable | None:
    """Returns the key of a value, made of the keys of its parts; None if a part has none."""
    keys = tuple(map(value_key, parts))
    return None if None in keys else (cls, *keys, *more)


def _array_key(cls: type, value: jax.Array) -> Hashable | None:
    """Returns the key of an array, with a copy of its data; None if it cannot be read."""
    if value.is_deleted() or not value.is_fully_addressable:
        return None
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.extended)
    data = np.asarray(jax.random.key_data(value) if is_key else value)
    return cls, value.dtype, value.shape, value.aval.weak_type, data.tobytes()


def _mapping_key(cls: type, value: object) -> Hashable | None:
    """Returns the key of one of Flax's hashable mappings, in which the order does not matter."""
    items = _compat.mapping_items(value)
    if all(type(part) is bool for _, part in items):  # which attributes are data: each module's
        return cls, bool, frozenset(items)
    keys = [(name, value_key(part)) for name, part in items]
    return None if any(key is None for _, key in keys) else (cls, frozenset(keys))


def _fields_key(cls: type, value: object) -> Hashable | None:
    """Returns the key of a frozen dataclass that has no room for anything but its fields.

    None for any other object with attributes: these may change.
    """
    params = getattr(cls, "__dataclass_params__", None)
    if params is None or not params.frozen or cls.__dictoffset__:
        return None
    names = [field.name for field in dataclasses.fields(cls)]
    if not {*slots_of(cls)}.issubset(names):
        return None
    return _key_of_all(cls, [getattr(value, name, ...) for name in names])


def _key_as_pickled(cls: type, value: object) -> Hashable | None:
    """Returns the key of a value that keeps its content in C, such as a ``Decimal`` or a date.

    Attributes do not show it. So the key is what pickle would make a copy from; or the value
    itself, with its own ``==``, if its class does not say how to pickle it. None if the value has
    no hash, since it may change then, or if it cannot be pickled.
    """
    with contextlib.suppress(Exception):  # pickling runs code of the class, which may raise any
        hash(value)
        if cls in copyreg.dispatch_table:
            reduced = copyreg.dispatch_table[cls](value)
        elif any(name in vars(base) for base in cls.__mro__[:-1] for name in _REDUCERS):
            reduced = value.__reduce_ex__(4)
        else:
            return cls, value
        # ``reduced`` is (function that makes a copy, its arguments, its state…); all values of a
        # class have the same function.
        return cls, _nested_key(reduced[1:])
    return None


_REDUCERS = ("__reduce__", "__reduce_ex__")


def _nested_key(part: object) -> Hashable:
    """Returns a key for nested tuples of any values, which are compared as static values."""
    return tuple(map(_nested_key, part)) if type(part) is tuple else Static.of(part)


class Static:
    """A static value that cannot change: one compared by value, or by identity alone.

    Args:
      value: the value.
      hold: whether it keeps alive an object that is compared by identity.

    Attributes:
      by_identity: whether it is compared by identity.
      note: for diagnostics, a description of an object compared by identity.
    """

    __slots__ = ("_key", "_ref", "_value", "by_identity", "note")

    def __init__(self, value: Any, hold: bool = True):
        """Computes the key of a value; ``hold`` keeps alive one that is compared by identity."""
        key = value_key(value)
        self.by_identity = key is None
        self._key = _compat.identity(value) if key is None else key
        # One of the two: the value, or a weak reference to it.
        self._value, self._ref = value, None
        self.note: Any = None
        if self.by_identity and not hold:
            with contextlib.suppress(TypeError):  # not every object has weak references
                self._ref = weakref.ref(value)
                self._value = None

    @staticmethod
    def of(value: object, *, hold: bool = True) -> Static:
        """Returns a static for ``value``; common ones are cached, which saves time and memory.

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


def strict_key(value: object) -> Any:
    """Returns a key for an option of a transform, which is stricter than ``==``.

    Two keys are equal only if the options are equal by ``==`` and as static values (this file):
    1 and True, or 0.0 and -0.0, are different. A value that is compared by content or identity,
    such as a ``StateSharding``, is its own key.
    """
    if type(value) is tuple:
        return tuple(map(strict_key, value))
    if type(value) is Static:
        return value
    static = Static.of(value)
    if not static.by_identity:
        return static
    key = None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (getattr(value, field.name, ...) for field in dataclasses.fields(value))
        key = _key_of_all(type(value), fields)
    return value if key is None else key


# By content


def content_of(value: object) -> tuple[StaticKind, list[Any]] | None:
    """Returns the kind and parts of an object compared by content; None for any other.

    ``static_parts.py`` says what these are. Other objects are compared by identity alone.
    """
    cls = type(value)
    if issubclass(cls, (*_IDENTITY_TYPES, jax.Array)) or _compat.is_graph_object(value):
        return None
    if _compat.is_hijax_variable(value) or _compat.is_ref(value):
        return None
    if "__wrapped__" in attributes_of(value):  # stands for a function, as by functools.wraps
        return None
    return open_object(value) if is_builtin(cls) or has_state(cls) else None


def open_static(value: object) -> tuple[list[Any], tuple[StaticKind, int]]:
    """Returns the parts of an object compared by content; then a pair of its kind and their number.

    A guard compares the pair before it reads the parts.
    """
    content = content_of(value)
    if content is None:
        raise TypeError(f"{type(value).__name__} objects have no content")
    kind, parts = content
    return parts, (kind, len(parts))


def static_paths(kind: StaticKind, children: Sequence[object]) -> list[Path]:
    """Returns the path from a static object to each of its parts: items, then attributes.

    For ``{"lr": 0.1}`` of a subclass of dict with the attribute ``a``, the children are ``"lr"``,
    ``0.1`` and the attribute, and the paths ``["lr"].key``, ``["lr"]`` and ``.a``.
    """
    cls = kind.type
    num_items = len(children) - len(kind.names)
    paths: list[Path]
    if issubclass(cls, dict):  # its items are keys and values in turns
        paths = []
        for child in children[:num_items:2]:
            key = child.value if isinstance(child, Static) else repr(child)
            # A plain string in a path would be the name of an attribute.
            key = Item(key) if type(key) is str else key
            paths += [(key, "key"), (key,)]
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        paths = [(name,) for name in cls._fields]
    elif issubclass(cls, functools.partial):
        paths = [("func",), *(("args", index) for index in range(num_items - 1))]
    elif issubclass(cls, types.MethodType):
        paths = [("__func__",), ("__self__",)]
    else:
        paths = [(index,) for index in range(num_items)]
    return [*paths, *((name,) for name in kind.names)]
