"""Static values: when two of them are equal, and when one has changed.

A trace may be used again only for equal static values. One rule says which are equal:

*By value*: if objects of a class can hold nothing but one value, two of them are equal if their
types and values are equal. This is stricter than ``==``: 1, 1.0 and True are different, and so are
0.0 and -0.0, ``Decimal("1")`` and ``Decimal("1.00")``, and frozensets in different orders.

*By content*: any other object that shows its content is compared with it at any depth. All that the
two objects show has to be equal by this same rule, with the order of keys and all attributes, and
the same places have to share one object. If the class has no ``__eq__``, or keeps something where
Python cannot see it, the two have to be the same object as well.

*By identity*: an object that shows nothing, such as a function, is equal only to itself.

An object that is compared by content can be changed in place, so it is an entry of the structure
(:class:`~nnx_sharding.core.structure.StaticObject`), like a module. The table in
``docs/architecture.md`` lists the types.

From ``static_parts.py``:

    open_object   the kind and the parts of an object: its items, then the values of its attributes
    fixed_parts   the items of a tuple or another object that cannot change and has nothing else;
                  None for any other object
    is_builtin    whether a class is, or derives from, a built-in one such as list or dict
    has_state     whether objects of a class have attributes, in a ``__dict__`` or in slots
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

# Values of exactly these types have no parts, and ``==`` compares all of them.
ATOMIC_TYPES = frozenset({str, int, bool, bytes, type(None), type(Ellipsis), type(NotImplemented)})
# Objects of JAX and NumPy that are compared by value, although they have attributes. Subclasses
# that the libraries define only add caches. The user's subclasses may hold more, so
# `_key_of_rare_type` asks for `_LIBRARIES`, too.
LIBRARY_VALUES = (np.dtype, jax.Device, Sharding, Mesh, AbstractMesh, PartitionSpec)
_LIBRARIES = frozenset({"jax", "jaxlib", "numpy", "pathlib"})
# Objects that belong to the process or are code. They do not show what they do.
_IDENTITY_TYPES = (
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type(jax.jit(len))),
    *(jax.custom_jvp, jax.custom_vjp, jax.core.Tracer, np.ufunc, weakref.ref),
    *(logging.Logger, threading.Thread),
)


def value_key(value: Any) -> Hashable | None:
    """Returns a key for a value that is compared by value, equal for equal values; else None."""
    cls = type(value)
    if cls in ATOMIC_TYPES:
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

    The order of the cases matters, because a class may be of several kinds. Types that are known
    come first. Objects that may have attributes come next, because the value of such an object (a
    subclass of ``float``, say) is not all that it holds. Containers and values of C, which have no
    attributes, come last.
    """
    # Functions and the like, modules and Variables are never compared by value.
    if issubclass(cls, _IDENTITY_TYPES) or _compat.is_graph_object(value):
        return None
    # There is one object for each class, and for each member of an enum.
    if issubclass(cls, enum.Enum | type):
        # An id is enough: whoever holds the key also holds the value, so the id is not used again.
        return cls, _compat.identity(value)
    if issubclass(cls, jax.Array):
        return _array_key(cls, value)
    if cls is _compat.HashableMapping:  # Flax's record of which attributes of a module are data
        return _mapping_key(cls, value)
    # Dtypes, shardings, meshes and paths. The user's subclasses of these are left out, because they
    # may hold more than their `==` compares.
    is_library_value = issubclass(cls, (*LIBRARY_VALUES, pathlib.PurePath))
    if is_library_value and cls.__module__.split(".")[0] in _LIBRARIES:
        # The libraries' own `==` is right, with two exceptions: it ignores the case of letters in
        # paths of Windows, and the metadata of dtypes.
        if issubclass(cls, pathlib.PurePath):
            return cls, str(value)
        if issubclass(cls, np.dtype) and value.metadata:
            return None
        return cls, value
    if cls is PyTreeDef:
        # To the `==` of treedefs, 1 and True are equal in the data of nodes, such as the settings
        # of a registered class. So the key has the treedef, and also the keys of this data.
        return _key_of_all(cls, aux_of(value), value)
    # An object with a `__dict__` or slots has attributes. These may change, except the fields of
    # frozen dataclasses.
    if has_state(cls):
        return _fields_key(cls, value)
    # A number of NumPy, such as `np.float32(0.1)`. A void is left out, because it may hold objects.
    if issubclass(cls, np.generic) and not issubclass(cls, np.void):
        return cls, value.dtype, value.tobytes()
    # Tuples, frozensets and slices are equal if their items are, and these may be anything.
    items = fixed_parts(value)
    if items is not None:
        return _key_of_all(cls, items)
    if is_builtin(cls):  # a list or dict, which may change
        return None
    if cls.__eq__ is object.__eq__:  # an object that equals only itself, such as `object()`
        return None
    # Values of types in C, such as a `Decimal` or a date, come last, because pickling runs code of
    # the class, and takes longest.
    return _key_as_pickled(cls, value)


def _key_of_all(cls: type, parts: Iterable[object], *more: Hashable) -> Hashable | None:
    """Returns a key made of the keys of some parts, and ``more`` keys; None if a part has none."""
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
    # Each module has a mapping of bools, which says what is data, so this form is tried first. In
    # its key, ``bool`` stands for the types of all values.
    if all(type(part) is bool for _, part in items):
        return cls, bool, frozenset(items)
    keys = [(name, value_key(part)) for name, part in items]
    return None if any(key is None for _, key in keys) else (cls, frozenset(keys))


def _fields_key(cls: type, value: object) -> Hashable | None:
    """Returns the key of a frozen dataclass that has no room for anything but its fields.

    Such a dataclass has ``slots=True``, so it has no ``__dict__``, and all its slots are fields.
    Returns None for any other object with attributes, because these may change.
    """
    params = getattr(cls, "__dataclass_params__", None)  # the arguments of `dataclass`
    has_dict = bool(cls.__dictoffset__)
    if params is None or not params.frozen or has_dict:
        return None
    names = [field.name for field in dataclasses.fields(cls)]
    if not {*slots_of(cls)}.issubset(names):
        return None
    # A field with `init=False` may not be set yet. Ellipsis then stands for the field.
    return _key_of_all(cls, [getattr(value, name, ...) for name in names])


def _key_as_pickled(cls: type, value: object) -> Hashable | None:
    """Returns the key of a value that keeps its content in C, such as a ``Decimal`` or a date.

    Attributes do not show this content. So the key is what pickle would make a copy from. If the
    class does not say how to pickle its objects, the key is the value itself, with its own ``==``.
    Returns None if the value has no hash, because it may change then, or if pickling raises.
    """
    with contextlib.suppress(Exception):  # pickling runs code of the class, which may raise any
        hash(value)
        # `object` is left out, because its methods do not know the content of a type in C.
        own_bases = cls.__mro__[:-1]
        # The table has the functions that other modules have registered for pickling a class.
        if cls in copyreg.dispatch_table:
            reduced = copyreg.dispatch_table[cls](value)
        elif any(name in vars(base) for base in own_bases for name in _REDUCERS):
            reduced = value.__reduce_ex__(4)
        else:
            return cls, value
        # ``reduced`` is (function that makes a copy, its arguments, its state…). The function is
        # left out, because all values of a class have the same one.
        return cls, _nested_key(reduced[1:])
    return None


_REDUCERS = ("__reduce__", "__reduce_ex__")  # the methods by which a class can be pickled


def _nested_key(part: object) -> Hashable:
    """Returns a key for nested tuples of any values, which are compared as static values.

    Unlike :func:`value_key`, this always returns a key: that of an object which is not compared by
    value is its identity.
    """
    return tuple(map(_nested_key, part)) if type(part) is tuple else Static.of(part)


class Static:
    """A static value that cannot change: it is compared by value, or by identity alone.

    Args:
      value: the value.
      hold: whether the ``Static`` keeps alive an object that is compared by identity.

    Attributes:
      by_identity: whether the value is compared by identity.
      note: a description of an object that is compared by identity, which the log of retraces sets
        while the object is alive; None until then.
      _key: what `==` compares: the value's key; its id if the value is compared by identity.
      _value, _ref: the value, or a weak reference to it; the other one of the two is None.
    """

    __slots__ = ("_key", "_ref", "_value", "by_identity", "note")

    def __init__(self, value: Any, hold: bool = True):
        """Computes the key of a value, and keeps the value or a weak reference to it."""
        key = value_key(value)  # None for a value that is compared by identity
        self.by_identity = key is None
        self._key = _compat.identity(value) if key is None else key
        self._value, self._ref = value, None
        self.note: Any = None
        if self.by_identity and not hold:
            # An object that cannot have weak references is kept alive all the same.
            with contextlib.suppress(TypeError):
                self._ref = weakref.ref(value)
                self._value = None

    @staticmethod
    def of(value: object, *, hold: bool = True) -> Static:
        """Returns a ``Static`` for a value.

        Statics of strings, ints, bools and None are cached, because a model has many equal ones.
        With ``hold=False``, the ``Static`` does not keep alive an object that is compared by
        identity, if that can have weak references.
        """
        return _shared(value) if type(value) in _SHARED_TYPES else Static(value, hold)

    @property
    def value(self) -> Any:
        """The value; None if it is an object that is compared by identity and was collected."""
        return self._value if self._ref is None else self._ref()

    @property
    def identity(self) -> int:
        """A number for an object compared by identity, unique as long as this ``Static`` exists."""
        # The weak reference lives as long. The id of an object that was collected is used again.
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

    Two keys are equal only if the options are equal by ``==`` and as static values (this file), so
    1 and True, or 0.0 and -0.0, are different. Options do not change, so the key of a dataclass,
    such as a user's policy, is made of the keys of its fields. Any other value that is not compared
    by value, such as a ``StateSharding``, is its own key.
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
        # Ellipsis stands for a field that is not set. The key is None if a field has no key.
        fields = (getattr(value, field.name, ...) for field in dataclasses.fields(value))
        key = _key_of_all(type(value), fields)
    return value if key is None else key


# By content


def content_of(value: object) -> tuple[StaticKind, list[Any]] | None:
    """Returns the kind and parts of an object compared by content; None for any other.

    For ``{"lr": 0.1}``, the kind is that of plain dicts, and the parts are ``"lr"`` and ``0.1``
    (``static_parts.py``). An object that is compared neither by value nor by content is compared by
    identity alone.
    """
    cls = type(value)
    # Functions and the like do not show what they do. Arrays, modules and Variables are no statics.
    if issubclass(cls, (*_IDENTITY_TYPES, jax.Array)) or _compat.is_graph_object(value):
        return None
    # Hijax Variables and refs hold arrays as well, and `is_graph_object` is False for them.
    if _compat.is_hijax_variable(value) or _compat.is_ref(value):
        return None
    # An object with `__wrapped__` stands for a function, as `functools.wraps` makes it.
    if "__wrapped__" in attributes_of(value):
        return None
    # A list, dict or the like shows its items, and any object with attributes shows these. Other
    # objects, such as `object()`, show nothing.
    return open_object(value) if is_builtin(cls) or has_state(cls) else None


def open_static(value: object) -> tuple[list[Any], tuple[StaticKind, int]]:
    """Returns the parts of an object that is compared by content, and a pair of kind and number.

    For ``{"lr": 0.1}`` these are ``["lr", 0.1]`` and ``(kind of plain dicts, 2)``. A guard compares
    the pair with that of an earlier call. If the pairs are equal, each part is in the same place.

    Raises:
      TypeError: the object is not compared by content.
    """
    content = content_of(value)
    if content is None:
        raise TypeError(f"{type(value).__name__} objects have no content")
    kind, parts = content
    return parts, (kind, len(parts))


def static_paths(kind: StaticKind, children: Sequence[object]) -> list[Path]:
    """Returns the path from a static object to each of its parts: items, then attributes.

    If ``{"lr": 0.1}`` is of a subclass of dict with the attribute ``a``, the children are for
    ``"lr"``, ``0.1`` and the attribute, and the paths are ``["lr"].key``, ``["lr"]`` and ``.a``.

    Args:
      kind: the kind of the object. ``kind.names`` has the names of the attributes, whose values are
        the last children.
      children: the children that describe the parts.
    """
    cls = kind.type
    num_items = len(children) - len(kind.names)
    paths: list[Path]
    if issubclass(cls, dict):  # the items are keys and values in turns
        paths = []
        for child in children[:num_items:2]:
            # The child of a key that is compared by content, such as a tuple of lists, has no
            # value, so the path shows the description of the child.
            key = child.value if isinstance(child, Static) else repr(child)
            # `Item` marks a string as a key, because a plain string in a path names an attribute.
            key = Item(key) if type(key) is str else key
            paths += [(key, "key"), (key,)]
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):  # a named tuple
        paths = [(name,) for name in cls._fields]
    elif issubclass(cls, functools.partial):
        # The items are the function, the positional arguments, then names and values of keywords in
        # turns. The detail of the kind is the number of items before the keywords.
        num_passed: Any = kind.detail
        paths = [("func",), *(("args", index) for index in range(num_passed - 1))]
        for child in children[num_passed:num_items:2]:
            assert isinstance(child, Static)  # the name of a keyword is a string
            paths += [("keywords", Item(child.value), "key"), ("keywords", Item(child.value))]
    elif issubclass(cls, types.MethodType):
        paths = [("__func__",), ("__self__",)]
    else:
        paths = [(index,) for index in range(num_items)]
    return [*paths, *((name,) for name in kind.names)]
