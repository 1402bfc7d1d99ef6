"""Takes objects that are not arrays apart, to compare and copy them, and puts them together again.

An object has *parts*: first its *items* as an object of the built-in class that it derives from
(its *base*), then the values of its *attributes*, in its ``__dict__`` or in slots. Its *kind* is
everything else: the class, the *detail* that the base keeps besides items, and the names of the
attributes. A list of two strings has the kind ``(list, None, ())`` and the strings as its parts. A
kind is hashable. ``copying`` says whether objects of a kind can change, and can be copied.

The table ``_BUILTINS`` says for each base how its objects are opened, made and assigned to. A class
that derives from no class in the table has the base ``object``, which has no items (``_base_of``).
"""

from __future__ import annotations

import array
import collections
import enum
import functools
import pathlib
import struct
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .in_c import Operation


class Copying(enum.Enum):
    """Whether there can be a copy of a static object, with copies of its parts, and how it is made.

    Members:
      FIXED: the object itself is immutable, such as a tuple, whatever it holds. A copy is made
        with all parts at once.
      MUTABLE: the object can be changed, such as a list or an object with an ``__eq__``. A copy is
        made empty, and then gets its parts.
      FIXED_WITH_ATTRIBUTES: the class derives from an immutable class, but attributes can be
        changed. There is no copy: an object that can be changed is made empty first, but this class
        makes objects only with all items.
      UNIQUE: the object is equal to no other, even with equal parts, so a copy would not be equal.
    """

    FIXED = enum.auto()
    MUTABLE = enum.auto()
    FIXED_WITH_ATTRIBUTES = enum.auto()
    UNIQUE = enum.auto()


class StaticKind(NamedTuple):
    """Everything about a static object except its parts."""

    type: type
    # What the base keeps besides items: an `_ArrayDetail`, the bytes of a bytearray, ``maxlen`` of
    # a deque, the number of a partial's items before its keywords. It is None for a list, a dict, a
    # tuple or a plain object.
    detail: Hashable
    names: tuple[str, ...]  # the names of the attributes, whose values are the last parts

    @property
    def copying(self) -> Copying:
        """Whether objects of this kind can be changed, and copied."""
        base = _base_of(self.type)
        builtin = _BUILTINS[base]
        if builtin.make is not None:  # the base is immutable
            return Copying.FIXED_WITH_ATTRIBUTES if self.names else Copying.FIXED
        if base is not object:  # a list, a dict or the like
            return Copying.UNIQUE if builtin.is_view else Copying.MUTABLE
        # Objects of a class without `__eq__` compare by their identity. Objects of a class in C may
        # have content that no attribute shows.
        equal: Any = self.type.__eq__
        is_unique = equal is object.__eq__ or has_hidden_state(self.type)
        return Copying.UNIQUE if is_unique else Copying.MUTABLE


class _Builtin(NamedTuple):
    """How objects of a built-in class are opened, and made or assigned to.

    Immutable objects are made with all their items. Mutable objects are made empty, by ``empty`` or
    by ``__new__``, and then assigned to, by operations that run no Python code.
    """

    open: Callable[[Any], tuple[Hashable, Sequence[Any]]]  # object → detail and items
    make: Callable[[Any, Any, Sequence[Any]], Any] | None = None  # class, detail, items → object
    assign: Callable[[Any, Any, Sequence[Any]], list[Operation]] = lambda *_: []
    empty: Callable[[type, Any], Any] | None = None  # class and detail → object
    # A view shows the content of another object: a memoryview shows the bytes of an array. So two
    # views with equal content are not equal, because a change of one may not show in the other.
    is_view: bool = False


def _pairs(parts: Sequence[object]) -> list[tuple[Any, Any]]:
    return list(zip(parts[::2], parts[1::2], strict=True))


def _flat(items: Iterable[tuple[Any, Any]]) -> list[Any]:
    return [part for item in items for part in item]


# Makers of entries of the table, and of their ``open``, for one base. The base's own methods are
# called, because subclasses may override them.


def _iterate(base: Any) -> Callable[[Any], tuple[None, list[Any]]]:
    return lambda x: (None, list(base.__iter__(x)))


def _scalar(base: object, plain: Callable[[Any], Any]) -> _Builtin:
    return _Builtin(lambda x: (None, (plain(x),)), lambda cls, _, items: base.__new__(cls, *items))


def _mapping(base: Any) -> _Builtin:
    return _Builtin(
        lambda x: (None, _flat(base.items(x))),
        assign=lambda x, _, items: [(base.clear, x), (base.update, x, _pairs(items))],
    )


class _ArrayDetail(NamedTuple):
    """The detail of a NumPy array or scalar, and a part of the detail of a memoryview."""

    dtype: np.dtype[Any] | str  # the format of a memoryview
    shape: tuple[int, ...]
    data: bytes | None  # None if the elements are Python objects, which are the array's items


def _open_array(x: object) -> tuple[_ArrayDetail, Sequence[Any]]:
    """Returns the detail of an array or scalar of NumPy, and its elements if they are objects."""
    plain = x.view(np.ndarray) if isinstance(x, np.ndarray) else np.asarray(x)
    if plain.dtype.hasobject:
        return _ArrayDetail(plain.dtype, plain.shape, None), plain.ravel().tolist()
    return _ArrayDetail(plain.dtype, plain.shape, plain.tobytes()), ()


def _empty_array(cls: type, detail: _ArrayDetail) -> Any:
    zeros = np.zeros(detail.shape, detail.dtype)
    return zeros[()] if issubclass(cls, np.void) else zeros.view(cls)


def _assign_array(x: Any, detail: _ArrayDetail, items: Sequence[Any]) -> list[Operation]:
    """Returns the operation ``plain[...] = content``; raises for another shape or dtype.

    Args:
      x: the array, or a record (``np.void``).
      detail: the dtype, the shape, and the bytes of the content.
      items: the elements if they are Python objects; the detail then has no bytes.
    """
    # The operation assigns to a plain view, because `__setitem__` of a subclass may be user code.
    # Records have no such view, but their class is NumPy's own.
    plain = x.view(np.ndarray) if isinstance(x, np.ndarray) else x
    if plain.shape != detail.shape or plain.dtype != detail.dtype:
        raise TypeError("the shape or dtype of a NumPy array was changed in place")
    if detail.data is not None:
        content = np.frombuffer(detail.data, detail.dtype)
    else:
        content = np.empty(len(items), detail.dtype)
        content[:] = items  # `np.array(items)` would open items that are lists
    return [(type(plain).__setitem__, plain, ..., content.reshape(detail.shape))]


def _assign_view(x: Any, detail: Any, _: Sequence[Any]) -> list[Operation]:
    _, content = detail  # whether a view is read-only never changes
    return [(memoryview.__setitem__, x.cast("B"), slice(None), content.data)]


def _open_cell(x: Any) -> tuple[Hashable, Sequence[Any]]:
    try:
        return True, (x.cell_contents,)
    except ValueError:  # not yet assigned
        return False, ()


def _assign_cell(x: object, is_full: object, items: Sequence[object]) -> list[Operation]:
    if is_full:
        return [(setattr, x, "cell_contents", *items)]
    return [(delattr, x, "cell_contents")]


# Functions that convert strings and numbers of subclasses to plain ones.
SCALARS: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    bytes: bytes.__bytes__,
}
_BUILTINS: dict[type, _Builtin] = {
    **{base: _scalar(base, plain) for base, plain in SCALARS.items()},
    tuple: _Builtin(_iterate(tuple), lambda cls, _, items: tuple.__new__(cls, items)),
    frozenset: _Builtin(_iterate(frozenset), lambda cls, _, items: frozenset.__new__(cls, items)),
    slice: _Builtin(
        lambda x: (None, (x.start, x.stop, x.step)), lambda cls, _, items: slice(*items)
    ),
    types.MappingProxyType: _Builtin(
        lambda x: (None, _flat(x.items())), lambda cls, _, items: cls(dict(_pairs(items)))
    ),
    types.MethodType: _Builtin(
        lambda x: (None, (x.__func__, x.__self__)), lambda cls, _, items: cls(*items)
    ),
    functools.partial: _Builtin(
        lambda x: (len(x.args) + 1, [x.func, *x.args, *_flat(x.keywords.items())]),
        lambda cls, count, items: functools.partial.__new__(
            cls, *items[:count], **dict(_pairs(items[count:]))
        ),
    ),
    pathlib.PurePath: _Builtin(  # the slots of a path are caches, and are left out
        lambda x: (None, (pathlib.PurePath.__str__(x),)), lambda cls, _, items: cls(*items)
    ),
    list: _Builtin(
        lambda x: (None, list.__getitem__(x, slice(None))),
        assign=lambda x, _, items: [(list.__setitem__, x, slice(None), items)],
    ),
    set: _Builtin(_iterate(set), assign=lambda x, _, items: [(set.__init__, x, items)]),
    collections.deque: _Builtin(
        lambda x: (x.maxlen, list(x)),
        assign=lambda x, maxlen, items: [(collections.deque.__init__, x, items, maxlen)],
    ),
    dict: _mapping(dict),
    collections.OrderedDict: _mapping(collections.OrderedDict),
    bytearray: _Builtin(
        lambda x: (bytes(x), ()),
        assign=lambda x, data, _: [(bytearray.__setitem__, x, slice(None), data)],
    ),
    array.array: _Builtin(
        lambda x: ((x.typecode, x.tobytes()), ()),
        assign=lambda x, data, _: [(array.array.__setitem__, x, slice(None), array.array(*data))],
        empty=lambda cls, data: array.array.__new__(cls, data[0]),
    ),
    np.ndarray: _Builtin(_open_array, assign=_assign_array, empty=_empty_array),
    np.void: _Builtin(_open_array, assign=_assign_array, empty=_empty_array),
    np.generic: _Builtin(
        _open_array, lambda cls, detail, _: np.frombuffer(detail.data, detail.dtype)[0]
    ),
    memoryview: _Builtin(
        lambda x: ((x.readonly, _ArrayDetail(x.format, x.shape, x.tobytes())), ()),
        assign=_assign_view,
        is_view=True,
    ),
    types.CellType: _Builtin(_open_cell, assign=_assign_cell, is_view=True),
    object: _Builtin(lambda x: (None, ())),
}


def _base_of(cls: type) -> type:
    """Returns the first base class that is in the table, which may be ``object``."""
    return next(base for base in cls.__mro__ if base in _BUILTINS)


def is_builtin(cls: type) -> bool:
    """Whether a class is, or derives from, a built-in class in the table other than ``object``."""
    return _base_of(cls) is not object


def fixed_parts(value: object) -> Sequence[Any] | None:
    """Returns the items of an object that cannot change and has no other content; else None."""
    base = _base_of(type(value))
    builtin = _BUILTINS[base]
    can_change = builtin.make is None or has_state(type(value))
    if can_change or base is types.MappingProxyType:  # the dict behind a proxy can change
        return None
    return builtin.open(value)[1]


def open_object(value: object) -> tuple[StaticKind, list[Any]]:
    """Returns the kind and the parts of an object."""
    cls = type(value)
    detail, items = _BUILTINS[_base_of(cls)].open(value)
    attributes = attributes_of(value)
    slots = {name: getattr(value, name) for name in slots_of(cls) if hasattr(value, name)}
    names = (*attributes, *slots)
    return StaticKind(cls, detail, names), [*items, *attributes.values(), *slots.values()]


def make_fixed(kind: StaticKind, parts: Sequence[object]) -> Any:
    """Returns a new object of an immutable kind."""
    make: Any = _BUILTINS[_base_of(kind.type)].make
    return make(kind.type, kind.detail, parts)


def make_empty(kind: StaticKind) -> Any:
    """Returns a new object without its parts, for :func:`assign`; no ``__init__`` is called.

    Raises:
      TypeError: the base makes objects only with all their items, as ``tuple`` does. Such an object
        is in the table of a structure only if it has attributes.
    """
    base: Any = _base_of(kind.type)
    builtin = _BUILTINS[base]
    if builtin.make is not None:
        raise TypeError(f"cannot make a {kind.type.__name__} object that has attributes")
    if builtin.empty is not None:  # an array needs its shape or type from the start
        return builtin.empty(kind.type, kind.detail)
    if base is object:
        # The class may derive from a class in C that is not in the table, such as SimpleNamespace.
        # Only the `__new__` of this class can make objects; `object.__new__` refuses.
        base = next(cls for cls in kind.type.__mro__ if not cls.__flags__ & _HEAP_TYPE)
    return base.__new__(kind.type)


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: CPython's flag of classes that Python code has made


def assign(value: object, kind: StaticKind, parts: Sequence[object]) -> list[Operation]:
    """Returns the operations (functions with arguments) that give an object this kind and parts.

    Raises a ``TypeError`` if the object has another class, or is immutable.
    """
    if type(value) is not kind.type or kind.copying is Copying.FIXED:
        raise TypeError(f"a {type(value).__name__} cannot become a {kind.type.__name__}")
    num_items = len(parts) - len(kind.names)
    # 1. The items of a list, dict or the like. A plain object has none.
    operations = _BUILTINS[_base_of(kind.type)].assign(value, kind.detail, parts[:num_items])
    # 2. Attributes in slots. ``setattr`` is not used, because a ``__setattr__`` of the class may
    # run the user's code, or raise.
    attributes = dict(zip(kind.names, parts[num_items:], strict=True))
    for name in slots_of(kind.type):
        if name in attributes:
            operations.append((object.__setattr__, value, name, attributes.pop(name)))
        elif hasattr(value, name):  # the slot has to become empty
            operations.append((object.__delattr__, value, name))
    # 3. The attributes that are left are those in the `__dict__`, if there is one.
    if kind.type.__dictoffset__:
        content = attributes_of(value)
        operations += [(dict.clear, content), (dict.update, content, attributes)]
    return operations


# Attributes


def has_state(cls: type) -> bool:
    """Whether objects of a class can have attributes."""
    return bool(cls.__dictoffset__) or bool(slots_of(cls))


def has_only_dict(cls: type, base: type = object) -> bool:
    """Whether objects of a class have only a ``__dict__`` and what ``base`` objects hold."""
    return bool(cls.__dictoffset__) and _base_of(cls) is base and not slots_of(cls)


def has_hidden_state(cls: type) -> bool:
    """Whether objects of a class have content that Python does not show, as those of C may.

    Such an object is larger than a bare ``object`` with a pointer for each slot, for the
    ``__dict__`` and for the weak references. ``object.__reduce_ex__`` uses the same test, and
    refuses to pickle such objects. The class must derive from no built-in one, because a list, for
    example, is larger as well.
    """
    # An offset is 0 if objects have no dict or no weak references. It is negative if CPython keeps
    # these in front of the object, where the size does not count them.
    offsets = [offset for offset in (cls.__dictoffset__, cls.__weakrefoffset__) if offset > 0]
    num_pointers = len(slots_of(cls)) + len(offsets)
    return cls.__basicsize__ > object.__basicsize__ + num_pointers * struct.calcsize("P")


def attributes_of(value: object) -> dict[str, Any]:
    """Returns the ``__dict__`` of an object, without calling ``__getattribute__`` of its class."""
    if not type(value).__dictoffset__:
        return {}
    content: dict[str, Any] = object.__getattribute__(value, "__dict__")
    return content


def is_cache(cls: type, name: Any) -> bool:
    """Whether an attribute is a ``cached_property``, whose value follows from the others."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), object)
    return isinstance(vars(owner).get(name), functools.cached_property)


def forget_cached(value: object, kept: Collection[str]) -> None:
    """Deletes the values of each ``cached_property`` in an object, except those in ``kept``."""
    attributes = attributes_of(value)
    for name in [*attributes]:
        if name not in kept and is_cache(type(value), name):
            del attributes[name]


# By class. References to classes are weak, because a program may make classes all the time.
_SLOTS: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def slots_of(cls: type) -> tuple[str, ...]:
    """Returns the names of the ``__slots__`` of a class, without those of its built-in base.

    The tuple has a name twice if a subclass declares it again.
    """
    names = _SLOTS.get(cls)
    if names is None:
        slots: list[str] = []
        for base in cls.__mro__[: cls.__mro__.index(_base_of(cls))]:
            # Python makes a member descriptor of each slot. Classes in C have such descriptors for
            # their fields, which may be read-only, so only classes with `__slots__` count. The one
            # exception is defaultdict, because its field `default_factory` can be assigned to.
            if "__slots__" in vars(base) or base is collections.defaultdict:
                for name, member in vars(base).items():
                    if type(member) is types.MemberDescriptorType:
                        slots.append(name)
        names = _SLOTS[cls] = tuple(slots)
    return names
