"""The hashable description of a graph of NNX objects.

A graph is kept as a table. Every object with an identity (module, Variable, ``jax.Ref``)
is one entry; whatever points to it holds its index. Sharing and cycles need no special
case: two children with the same index are the same object. Arrays are not in the table:
a place where one belongs holds ``LEAF``, and the arrays themselves travel in a flat list.
Position ``i`` of that list is called slot ``i``.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from .. import _compat

Path: TypeAlias = tuple[Any, ...]
PyTreeDef: TypeAlias = Any  # jax.tree_util.PyTreeDef, which has no type stubs


class Leaf:
    """The place of one array. There is one instance, ``LEAF``."""

    def __repr__(self) -> str:
        return "LEAF"

    def __reduce__(self) -> str:
        return "LEAF"


LEAF = Leaf()


class Static:
    """A value that belongs to the structure itself.

    Python calls 1, 1.0 and True equal; a traced function does not treat them alike. So two
    statics are equal only where their types are, and zeros only where their signs are.

    A value that can change, such as a list, is kept as it is now, and given out as a copy: what
    happens to it later must not reach a structure under which a trace is kept.
    """

    __slots__ = ("_key", "_mutable", "_value")

    def __init__(self, value: Any):
        kind = type(value)
        if kind in _PLAIN_TYPES:
            self._key, self._mutable, self._value = (kind, value), False, value
            return
        self._key = static_key(value)
        # The hash of Flax's mappings is slow, but they have one.
        self._mutable = kind is not _compat.HashableMapping and not is_hashable(value)
        self._value = _copy(value) if self._mutable else value

    @staticmethod
    def of(value: Any) -> Static:
        """A static for ``value``; for common ones always the same, which saves time and room."""
        kind = type(value)
        if kind not in _SHARED_TYPES:
            return Static(value)
        found = _SHARED.get((kind, value))
        if found is None:
            if len(_SHARED) >= MAX_SHARED:
                _SHARED.clear()
            found = _SHARED[kind, value] = Static(value)
        return found

    def holds(self, value: Any) -> bool:
        """Whether it keeps this very object alive, and not a copy or an equal one."""
        return self._value is value and not self._mutable

    @property
    def value(self) -> Any:
        """The value."""
        return _copy(self._value) if self._mutable else self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Static({self._value!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Static, (self._value,)


def static_key(value: Any) -> Any:
    """What stands for ``value`` where statics are compared and hashed: always hashable."""
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return (kind, value)
    if kind is float:
        return (float, value.hex())
    if kind is complex:
        return (complex, value.real.hex(), value.imag.hex())
    if kind is list or kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        return (kind, *map(static_key, value))
    if kind is _compat.HashableMapping:
        return (kind, frozenset(_compat.mapping_items(value)))  # its own hash sorts in Python
    if kind is frozenset or kind is set:
        return (kind, frozenset(map(static_key, value)))
    if isinstance(value, dict):
        return (kind, frozenset((static_key(k), static_key(v)) for k, v in value.items()))
    if isinstance(value, np.ndarray | jax.Array) and not isinstance(value, jax.core.Tracer):
        array = np.asarray(value)
        return (kind, array.shape, array.dtype.str, array.tobytes())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value) if f.compare and hasattr(value, f.name)]
        own = tuple(static_key(getattr(value, name)) for name in fields)
        return (kind, value if is_hashable(value) else None, own)
    return (kind, value if is_hashable(value) else _ByEquality(value))


class _ByEquality:
    """A value that can be compared, but has no hash."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = _copy(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByEquality) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


# Most statics: nothing else is to be looked at.
_PLAIN_TYPES = frozenset({str, int, bool, type(None), type, types.FunctionType})

# Those among them that refer to nothing of the user's.
_SHARED_TYPES = frozenset({str, int, bool, type(None)})
_SHARED: dict[tuple[type, Any], Static] = {}
MAX_SHARED = 4096

_FROZEN_TYPES = _PLAIN_TYPES | {
    float,
    complex,
    bytes,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    type(jax.jit(len)),
    jax.custom_jvp,
    jax.custom_vjp,
    np.ufunc,
    _compat.HashableMapping,
}
_FROZEN_BASES = (
    enum.Enum,
    type,
    np.dtype,
    np.generic,
    jax.Array,
    jax.Device,
    jax.sharding.Sharding,
    jax.sharding.Mesh,
    jax.sharding.AbstractMesh,
    jax.sharding.PartitionSpec,
)


def is_frozen(value: Any) -> bool:
    """Whether the same object always has the same :func:`static_key`.

    That leaves out objects of the user's classes, even if they are compared by identity, because
    their class can be changed.
    """
    kind = type(value)
    if kind in _FROZEN_TYPES:
        return True
    if kind is tuple or kind is frozenset:
        return all(map(is_frozen, value))
    return isinstance(value, _FROZEN_BASES) and not isinstance(value, np.void)


def is_hashable(value: Any) -> bool:
    """Whether ``value`` has a hash."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _copy(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # whatever its own __deepcopy__ raises: then it is shared, as in Flax
        return value


class Container(NamedTuple):
    """A plain pytree inside the graph; ``children`` stand for its leaves."""

    treedef: PyTreeDef
    children: tuple[Any, ...]


# The index of a table entry, or what stands in place of one.
Child: TypeAlias = "int | Leaf | Static | Container"


class NodeEntry(NamedTuple):
    """A module, or an object of another registered node type."""

    type: type
    metadata: Any
    keys: tuple[Any, ...]
    children: tuple[Child, ...]


class VariableEntry(NamedTuple):
    """A Variable. ``value`` is a leaf, a pytree of leaves, or the index of a ``jax.Ref``."""

    type: type
    metadata: tuple[tuple[str, Static], ...]
    value: Child


class RefEntry(NamedTuple):
    """A ``jax.Ref``, or a hijax Variable: JAX keeps its content, only its identity is ours."""

    type: type = jax.Ref


Entry: TypeAlias = NodeEntry | VariableEntry | RefEntry


class Structure:
    """All of a graph but its arrays: types, static attributes, metadata, who is who.

    Hashable and comparable: two graphs with equal structures differ only in their arrays,
    so a function traced for one serves the other. Made by :func:`~nnx_sharding.split`.

    Attributes:
      entries: the table. An entry is None where the object was left out on purpose.
      root: what the graph was split from, in terms of the table.
      slots: per entry, the slots of its own arrays.
      root_slots: the slots of arrays that belong to no entry.
    """

    __slots__ = ("_hash", "entries", "root", "root_slots", "slots")

    def __init__(
        self,
        entries: tuple[Entry | None, ...],
        root: Child,
        slots: tuple[tuple[int, ...], ...],
        root_slots: tuple[int, ...],
    ):
        self.entries = entries
        self.root = root
        self.slots = slots
        self.root_slots = root_slots
        self._hash: int | None = None

    @property
    def num_leaves(self) -> int:
        """The number of arrays that belong to this structure."""
        return len(self.root_slots) + sum(map(len, self.slots))

    def slots_of(self, kind: type) -> frozenset[int]:
        """The slots of the arrays that belong to entries of one kind."""
        pairs = zip(self.entries, self.slots, strict=True)
        return frozenset(
            slot for entry, slots in pairs if isinstance(entry, kind) for slot in slots
        )

    def paths(self) -> tuple[Path, ...]:
        """The path to each array, by slot: from the root to the Variable, first way found."""
        paths: dict[int, Path] = {}
        for place in self.walk(self.root, iter(self.root_slots)):
            for slot in place.slots:
                paths.setdefault(slot, place.path)
        return tuple(paths.get(slot, ()) for slot in range(self.num_leaves))

    def walk(self, child: Child, slots: Iterator[int], path: Path = ()) -> Iterator[Place]:
        """Every Variable, ``jax.Ref`` and bare array that can be reached from ``child``.

        Depth first with keys in order, as Flax walks a graph; an object reached twice comes
        once, under its first path.

        Args:
          child: where to start.
          slots: the slots of the leaves that ``child`` holds outside of any entry.
          path: the path of ``child``.
        """
        seen: set[int] = set()
        stack = [_steps([path], [child], slots)]  # no recursion: models may be nested deeply
        while stack:
            step = next(stack[-1], None)
            if step is None:
                stack.pop()
                continue
            path, child, slots = step
            if child is LEAF:
                yield Place(path, None, (next(slots),))
            elif isinstance(child, Container):
                if not child.children:
                    continue
                paths = [path + key for key in container_keys(child.treedef)]
                stack.append(_steps(paths, child.children, slots))
            elif isinstance(child, int) and child not in seen:
                seen.add(child)
                entry, own = self.entries[child], self.slots[child]
                if isinstance(entry, NodeEntry):
                    paths = [(*path, key) for key in entry.keys]
                    stack.append(_steps(paths, entry.children, iter(own)))
                elif isinstance(entry, VariableEntry) and isinstance(entry.value, int):
                    seen.add(entry.value)
                    yield Place(path, child, self.slots[entry.value])
                elif entry is not None:
                    yield Place(path, child, own)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Structure) or hash(self) != hash(other):
            return False
        return bool(self.entries == other.entries and self.root == other.root)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.entries, self.root))
        return self._hash

    def __repr__(self) -> str:
        lines = [
            f"  {index}: {type(entry).__name__[:-5]} {entry.type.__name__}"
            for index, entry in enumerate(self.entries)
            if entry is not None
        ]
        header = f"Structure({self.num_leaves} arrays, root={self.root!r}"
        return "\n".join([header, *lines]) + ("\n)" if lines else ")")


def _steps(
    paths: Sequence[Path], children: Sequence[Child], slots: Iterator[int]
) -> Iterator[tuple[Path, Child, Iterator[int]]]:
    return ((path, child, slots) for path, child in zip(paths, children, strict=True))


class Place(NamedTuple):
    """Where arrays live: the path, the entry of the Variable or ref (None: a bare array)."""

    path: Path
    entry: int | None
    slots: tuple[int, ...]


def container_keys(treedef: PyTreeDef) -> tuple[Path, ...]:
    """The path of each leaf of a pytree, in the keys that NNX uses.

    Not cached: treedefs hold data of the user's, which a cache would keep and compare.
    """
    count = treedef.num_leaves
    try:
        tree = jax.tree_util.tree_unflatten(treedef, [LEAF] * count)
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    except Exception:  # a class whose constructor checks its children; then positions must do
        leaves = []
    if len(leaves) != count:
        return tuple((index,) for index in range(count))
    return tuple(tuple(map(path_key, path)) for path, _ in leaves)


def is_leaf_treedef(treedef: PyTreeDef) -> bool:
    """Whether a pytree is a single leaf. An empty container has one node too, but no leaf."""
    return bool(treedef.num_nodes == 1 and treedef.num_leaves == 1)


class Item(str):
    """A key of a dict in a path: equal to the plain string, but written ``['key']``."""

    __slots__ = ()


def path_key(key: Any) -> Any:
    """One key of a JAX key path as NNX writes it: an index, a dict key, an attribute name."""
    if isinstance(key, jax.tree_util.DictKey):
        return Item(key.key) if type(key.key) is str else key.key
    for attribute in ("idx", "key", "name"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def path_string(path: Path) -> str:
    """A path as a user writes it: ``blocks/3/up/kernel``."""
    return "/".join(map(str, path))


def accessor(name: str, path: Path) -> str:
    """A path in the manner of Python code: ``model.blocks[3].up.kernel``."""
    return name + "".join(
        f".{key}" if type(key) is str and key.isidentifier() else f"[{plain_key(key)!r}]"
        for key in path
    )


def plain_key(key: Any) -> Any:
    """A key of a path, with nothing of ours in it."""
    return str(key) if isinstance(key, Item) else key
