"""Static values: when two of them are the same, and what a change of one of them is.

A trace is valid for the static values that it was made with, so this decides whether a call may
use it. The rule has three parts.

By value: numbers, strings, bytes, None, enum members, classes, dtypes, meshes, shardings and arrays
of JAX; tuples, frozensets and frozen dataclasses made of these only; other hashable objects with
an ``__eq__`` of their own whose state Python does not show. Equal values of one type are the same.
It is stricter than ``==``: 1, 1.0 and True are different, so are 0.0 and -0.0, ``np.int4(1)`` and
``np.uint4(1)``, and two frozensets whose items come in another order.

By content: lists, dicts, sets, deques, NumPy arrays, dataclasses, partial functions, bound methods,
tuples that hold any of these, subclasses of all of them, and objects of a class with an ``__eq__``.
The parts are compared one by one, by this same rule, with the order of keys and the attributes of
subclasses. Two objects with the same content are the same, but it counts which places share one.

By identity: everything else, as Python and ``jax.jit`` have it: functions, jitted functions,
modules, objects of classes without an ``__eq__`` or with content that is hidden in C. The
attributes of such an object are compared, too, but not what is inside of these: replacing
``schedule.scale`` is seen, appending to a list in it is not.

Objects that are compared by content or have attributes can be changed in place, so each is an entry
of the structure (:class:`~nnx_sharding.core.structure.StaticEntry`), as a module is. A function
gets the caller's own objects. What it changes in them is undone when the trace ends, and is written
back by every call, as with modules.
"""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import enum
import functools
import struct
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat

Operation: TypeAlias = tuple[Any, ...]  # a function and its arguments


# By value

_PLAIN_TYPES = frozenset({str, int, bool, bytes, type(None), type(Ellipsis), type(NotImplemented)})
_PLAIN_BASES = (
    np.dtype,
    jax.Device,
    jax.sharding.Sharding,
    jax.sharding.Mesh,
    jax.sharding.AbstractMesh,
    jax.sharding.PartitionSpec,
    jax.tree_util.PyTreeDef,
)
_IDENTITY_TYPES = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    type(jax.jit(len)),
    jax.custom_jvp,
    jax.custom_vjp,
    jax.core.Tracer,
    np.ufunc,
    weakref.ref,
)


def value_key(value: Any) -> Hashable | None:
    """What stands for a value that is compared by value; None if it is not compared so."""
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return (kind, value)
    if kind is float:
        return (kind, value.hex())
    if kind is complex:
        return (kind, value.real.hex(), value.imag.hex())
    return _rarer_key(kind, value)


def _rarer_key(kind: type, value: Any) -> Hashable | None:
    if issubclass(kind, _IDENTITY_TYPES) or _compat.is_graph_object(value):
        return None
    if issubclass(kind, enum.Enum | type):
        return (kind, Identity(value, hold=True))
    if issubclass(kind, np.generic) and not issubclass(kind, np.void):
        return (kind, value.dtype, value.tobytes())
    if issubclass(kind, tuple | frozenset) and not _has_state(kind):
        return _key_of_all(kind, value)
    if kind is _compat.HashableMapping:
        keys = [(key, value_key(part)) for key, part in _compat.mapping_items(value)]
        return None if any(key is None for _, key in keys) else (kind, frozenset(keys))
    if kind is slice or kind is range:
        return _key_of_all(kind, (value.start, value.stop, value.step))
    if issubclass(kind, jax.Array):
        return _array_key(kind, value)
    if issubclass(kind, _PLAIN_BASES):
        return (kind, value)
    for base in (str, int, float, complex, bytes):
        if issubclass(kind, base) and not _has_state(kind):
            return (kind, value_key(base(value) if base is not str else str.__str__(value)))
    fields = _fields(kind)
    if fields is not None:
        is_frozen = hasattr(kind, "__dataclass_params__") and kind.__dataclass_params__.frozen
        return _key_of_all(kind, [getattr(value, f, ...) for f in fields]) if is_frozen else None
    if _has_eq(kind) and _form(kind) is None and not kind.__dictoffset__ and is_hashable(value):
        return (kind, value)
    return None


def _key_of_all(kind: type, parts: Iterable[Any]) -> Hashable | None:
    keys = tuple(map(value_key, parts))
    return None if None in keys else (kind, *keys)


def _array_key(kind: type, value: jax.Array) -> Hashable | None:
    if value.is_deleted() or not value.is_fully_addressable:
        return None
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.extended)
    data = np.asarray(jax.random.key_data(value) if is_key else value)
    return (kind, value.dtype, value.shape, value.aval.weak_type, data.tobytes())


def is_hashable(value: Any) -> bool:
    """Whether ``value`` has a hash."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


class Identity:
    """An object as a key: equal only to itself. Keeps it alive only if it is to be held."""

    __slots__ = ("_hash", "_held", "_ref")

    def __init__(self, value: Any, *, hold: bool):
        self._hash = id(value)
        self._held, self._ref = value, None
        if not hold:
            with contextlib.suppress(TypeError):  # not every object has weak references
                self._ref, self._held = weakref.ref(value), None

    def __call__(self) -> Any:
        """The object; None if it is gone."""
        return self._held if self._ref is None else self._ref()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity) or self._hash != other._hash:
            return False
        value = self()
        return value is not None and value is other()

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Identity({self()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _held_identity, (self(),)


def _held_identity(value: Any) -> Identity:
    return Identity(value, hold=True)


class Static:
    """A static value that cannot change: one compared by value, or by identity alone.

    Attributes:
      note: room for what is to be shown of an object that is compared by identity.
    """

    __slots__ = ("_key", "_value", "note")

    def __init__(self, value: Any, *, hold: bool = True):
        self._key: Hashable = value_key(value)
        self._value = value
        self.note: Any = None
        if self._key is None:
            self._key = self._value = Identity(value, hold=hold)

    @staticmethod
    def of(value: Any, *, hold: bool = True) -> Static:
        """A static for ``value``; for common ones always the same, which saves time and room."""
        kind = type(value)
        if kind not in _SHARED_TYPES:
            return Static(value, hold=hold)
        found = _SHARED.get((kind, value))
        if found is None:
            if len(_SHARED) >= MAX_SHARED:
                _SHARED.clear()
            found = _SHARED[kind, value] = Static(value)
        return found

    @property
    def value(self) -> Any:
        """The value; None for an object compared by identity that is gone."""
        return self._value() if self.by_identity else self._value

    @property
    def by_identity(self) -> bool:
        """Whether it is compared by identity."""
        return self._value is self._key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Static({self.value!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Static, (self.value,)


_SHARED_TYPES = frozenset({str, int, bool, type(None)})
_SHARED: dict[tuple[type, Any], Static] = {}
MAX_SHARED = 4096


# By content


class Content(NamedTuple):
    """What an object consists of.

    Attributes:
      parts: the values in it: items first, then attributes.
      kind: all else, hashable: its class, the names of attributes, the bytes of arrays.
      shallow: whether parts that are not compared by value are compared by identity.
    """

    parts: Sequence[Any]
    kind: tuple[Any, ...]
    shallow: bool = False


class Form(NamedTuple):
    """How objects of some built-in class are opened and made.

    Attributes:
      open: the detail of an object, hashable, and its items.
      empty: a new object of a class, given the detail, without items; None if it is made at once.
      assign: the operations that give an object the detail and items; the object of a form
        without ``empty`` as the only result of one operation.
    """

    open: Callable[[Any], tuple[Hashable, Sequence[Any]]]
    empty: Callable[[type, Any], Any] | None
    assign: Callable[[Any, Any, Sequence[Any]], Any]


def _pairs(parts: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(parts[::2], parts[1::2], strict=True))


def _flat(items: Iterable[tuple[Any, Any]]) -> list[Any]:
    return [part for item in items for part in item]


def _mapping_form(base: Any) -> Form:
    return Form(
        lambda own: (None, _flat(base.items(own))),
        lambda kind, _: base.__new__(kind),
        lambda own, _, parts: [(base.clear, own), (base.update, own, _pairs(parts))],
    )


def _sequence_form(base: Any) -> Form:
    return Form(
        lambda own: (None, list(base.__iter__(own))),
        None,
        lambda kind, _, parts: base.__new__(kind, parts),
    )


def _defaultdict_open(own: Any) -> tuple[Hashable, Sequence[Any]]:
    return None, [own.default_factory, *_flat(dict.items(own))]


def _defaultdict_assign(own: Any, _: Any, parts: Sequence[Any]) -> list[Operation]:
    factory = vars(collections.defaultdict)["default_factory"]
    return [
        (factory.__set__, own, parts[0]),
        (dict.clear, own),
        (dict.update, own, _pairs(parts[1:])),
    ]


def _array_open(own: Any) -> tuple[Hashable, Sequence[Any]]:
    plain = own.view(np.ndarray) if isinstance(own, np.ndarray) else np.asarray(own)
    if plain.dtype.hasobject:
        return (plain.dtype, plain.shape), plain.ravel().tolist()
    return (plain.dtype, plain.shape, plain.tobytes()), ()


def _array_of(detail: Any, parts: Sequence[Any]) -> np.ndarray[Any, Any]:
    dtype, shape = detail[:2]
    if dtype.hasobject:
        new = np.empty(len(parts), dtype)
        new[:] = parts
        return new.reshape(shape)
    return np.frombuffer(bytearray(detail[-1]), dtype).reshape(shape)


def _array_empty(kind: type, detail: Any) -> Any:
    if issubclass(kind, np.void):
        return np.zeros(detail[1], detail[0])[()]
    return np.zeros(detail[1], detail[0]).view(kind)


def _array_assign(own: Any, detail: Any, parts: Sequence[Any]) -> list[Operation]:
    plain = own.view(np.ndarray) if isinstance(own, np.ndarray) else own
    if plain.shape != detail[1] or plain.dtype != detail[0]:
        raise TypeError("the shape or dtype of a NumPy array was changed in place")
    return [(type(plain).__setitem__, plain, ..., _array_of(detail, parts))]


_FORMS: dict[type, Form] = {
    list: Form(
        lambda own: (None, list.__getitem__(own, slice(None))),
        lambda kind, _: list.__new__(kind),
        lambda own, _, parts: [(list.__setitem__, own, slice(None), parts)],
    ),
    tuple: _sequence_form(tuple),
    frozenset: _sequence_form(frozenset),
    collections.OrderedDict: _mapping_form(collections.OrderedDict),
    collections.defaultdict: Form(
        _defaultdict_open,
        lambda kind, _: collections.defaultdict.__new__(kind),
        _defaultdict_assign,
    ),
    dict: _mapping_form(dict),
    types.MappingProxyType: Form(
        lambda own: (None, _flat(own.items())),
        None,
        lambda kind, _, parts: kind(dict(_pairs(parts))),
    ),
    set: Form(
        lambda own: (None, list(set.__iter__(own))),
        lambda kind, _: set.__new__(kind),
        lambda own, _, parts: [(set.clear, own), (set.update, own, parts)],
    ),
    collections.deque: Form(
        lambda own: (own.maxlen, list(own)),
        lambda kind, maxlen: _deque(kind, maxlen),
        lambda own, _, parts: [
            (collections.deque.clear, own),
            (collections.deque.extend, own, parts),
        ],
    ),
    bytearray: Form(
        lambda own: (bytes(own), ()),
        lambda kind, _: bytearray.__new__(kind),
        lambda own, data, _: [(bytearray.__setitem__, own, slice(None), data)],
    ),
    array.array: Form(
        lambda own: ((own.typecode, own.tobytes()), ()),
        lambda kind, detail: array.array.__new__(kind, detail[0]),
        lambda own, detail, _: [
            (array.array.__setitem__, own, slice(None), array.array(*detail)),
        ],
    ),
    np.ndarray: Form(_array_open, _array_empty, _array_assign),
    np.void: Form(_array_open, _array_empty, _array_assign),
    functools.partial: Form(
        lambda own: (len(own.args), [own.func, *own.args, *_flat(own.keywords.items())]),
        None,
        lambda kind, count, parts: functools.partial.__new__(
            kind, *parts[: count + 1], **dict(_pairs(parts[count + 1 :]))
        ),
    ),
    types.MethodType: Form(
        lambda own: (None, (own.__func__, own.__self__)),
        None,
        lambda kind, _, parts: kind(*parts),
    ),
}
# Strings and numbers of classes that give them attributes of their own.
for _base in (str, int, float, complex, bytes):
    _FORMS[_base] = Form(
        lambda own, base=_base: (value_key(base(own)), ()),  # type: ignore[misc]
        None,
        lambda kind, key, _, base=_base: base.__new__(kind, _plain_of(key)),  # type: ignore[misc]
    )


def _plain_of(key: Any) -> Any:
    kind, *parts = key
    if kind is float:
        return float.fromhex(parts[0])
    return complex(*map(float.fromhex, parts)) if kind is complex else parts[0]


def _deque(kind: Any, maxlen: int | None) -> Any:
    new = collections.deque.__new__(kind)
    collections.deque.__init__(new, (), maxlen)
    return new


_NO_FORM = Form(lambda own: (None, ()), lambda kind, _: object.__new__(kind), lambda *_: [])


def _form(kind: type) -> Form | None:
    """How the built-in class behind a class is opened."""
    return next((_FORMS[base] for base in kind.__mro__ if base in _FORMS), None)


def content_of(value: Any) -> Content | None:
    """What an object consists of that is compared by content; None for other values.

    The value is not compared by value: :func:`value_key` has been asked.
    """
    kind = type(value)
    if issubclass(kind, _IDENTITY_TYPES) or _compat.is_graph_object(value):
        return None
    if issubclass(kind, jax.Array) or _compat.is_hijax_variable(value) or _compat.is_ref(value):
        return None
    form, names = _form(kind), _state_names(value)
    if form is None and not names and not _has_state(kind):
        return None
    by_content = form is not None or _has_eq(kind) or _fields(kind) is not None
    shallow = not by_content or _has_hidden_state(kind)
    if form is None:
        return Content(_values(value, names), (kind, None, names), shallow)
    detail, items = form.open(value)
    if not names:
        return Content(items, (kind, detail, ()))
    return Content([*items, *_values(value, names)], (kind, detail, names))


def opened(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """The parts of an object that is compared by content; its kind, and the number of parts."""
    found = content_of(value)
    if found is None:
        raise TypeError(f"{type(value).__name__} objects have no content")
    return list(found.parts), (found.kind, len(found.parts))


def is_fixed(kind: tuple[Any, ...]) -> bool:
    """Whether an object of this kind cannot be changed itself, only what it holds."""
    return _is_made_at_once(kind) and not kind[2]


def _is_made_at_once(kind: tuple[Any, ...]) -> bool:
    form = _form(kind[0])
    return form is not None and form.empty is None


def is_container(kind: type) -> bool:
    """Whether objects of a class are of a built-in kind that only holds other objects."""
    return _form(kind) is not None


def make_fixed(kind: tuple[Any, ...], parts: Sequence[Any]) -> Any:
    """A new object of a kind that cannot be changed."""
    cls, detail, _ = kind
    form = _form(cls)
    assert form is not None
    return form.assign(cls, detail, parts)


def make_empty(kind: tuple[Any, ...]) -> Any:
    """A new object without its parts.

    Raises:
      TypeError: its class does not allow it.
    """
    cls, detail, _ = kind
    form = _form(cls) or _NO_FORM
    if form.empty is None:
        raise TypeError(f"{cls.__name__} objects with attributes of their own cannot be made")
    return form.empty(cls, detail)


def assign(value: Any, kind: tuple[Any, ...], parts: Sequence[Any]) -> list[Operation]:
    """The operations that give an existing object this content.

    Raises:
      TypeError: an object of its kind cannot get this content.
    """
    cls, detail, names = kind
    if type(value) is not cls or is_fixed(kind):
        raise TypeError(f"a {type(value).__name__} cannot become a {cls.__name__}")
    form = _form(cls) or _NO_FORM
    count = len(parts) - len(names)
    operations = list(form.assign(value, detail, parts[:count])) if form.empty is not None else []
    if names or _has_state(cls):
        operations += _assign_state(value, names, parts[count:])
    return operations


# Attributes


def _assign_state(value: Any, names: Sequence[str], parts: Sequence[Any]) -> list[Operation]:
    given = dict(zip(names, parts, strict=True))
    operations: list[Operation] = []
    for name in _slots(type(value)):
        if name in given:
            operations.append((object.__setattr__, value, name, given.pop(name)))
        elif hasattr(value, name):
            operations.append((object.__delattr__, value, name))
    if type(value).__dictoffset__:
        own = object.__getattribute__(value, "__dict__")
        operations += [(dict.clear, own), (dict.update, own, given)]
    return operations


def has_only_dict(value: Any) -> bool:
    """Whether all content of an object is in its ``__dict__``."""
    kind = type(value)
    return bool(kind.__dictoffset__) and _form(kind) is None and not _slots(kind)


def _state_names(value: Any) -> tuple[str, ...]:
    """The names of the attributes that an object has, in their order."""
    slots = tuple(name for name in _slots(type(value)) if hasattr(value, name))
    return (*_instance_dict(value), *slots)


def _values(value: Any, names: Sequence[str]) -> list[Any]:
    own = _instance_dict(value)
    return [own[name] if name in own else getattr(value, name) for name in names]


def _instance_dict(value: Any) -> dict[str, Any]:
    if not type(value).__dictoffset__:
        return {}
    own: dict[str, Any] = object.__getattribute__(value, "__dict__")
    return own


def _has_state(kind: type) -> bool:
    """Whether objects of a class can have attributes of their own."""
    return bool(kind.__dictoffset__) or bool(_slots(kind))


_SLOTS: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _slots(kind: type) -> tuple[str, ...]:
    """The names of the slots that classes written in Python gave their objects."""
    found = _SLOTS.get(kind)
    if found is None:
        found = _SLOTS[kind] = tuple(
            name
            for base in kind.__mro__
            if "__slots__" in vars(base)
            for name, member in vars(base).items()
            if isinstance(member, types.MemberDescriptorType)
        )
    return found


def _has_hidden_state(kind: type) -> bool:
    """Whether objects of a class have content that Python does not show, as those of C may.

    The size tells, as it does where ``object.__reduce_ex__`` refuses to pickle such an object.
    """
    base = next((base for base in kind.__mro__ if base in _FORMS), object)
    pointers = len(_slots(kind))
    # Negative for objects of variable size, and where the interpreter manages the dict.
    has_pointer = kind.__dictoffset__ > 0 or (kind.__dictoffset__ < 0 and base.__itemsize__ > 0)
    pointers += has_pointer and not base.__dictoffset__
    pointers += kind.__weakrefoffset__ > 0 and not base.__weakrefoffset__
    return kind.__basicsize__ > base.__basicsize__ + pointers * _POINTER


_POINTER = struct.calcsize("P")


def _fields(kind: type) -> tuple[str, ...] | None:
    """The names of the fields of a dataclass, or of a class made by attrs; None for others."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if hasattr(kind, "__attrs_attrs__"):
        return tuple(field.name for field in kind.__attrs_attrs__)
    return None


def _has_eq(kind: type) -> bool:
    own: Any = kind.__eq__
    return own is not object.__eq__
