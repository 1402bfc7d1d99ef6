"""The hashable description of a graph of NNX objects.

A graph is kept as a table. Every object with an identity (module, Variable, ``jax.Ref``, a static
object that can be changed) is one entry; whatever points to it holds its index. Sharing and cycles
need no special case: two children with the same index are the same object. Arrays are not in the
table: a place where one belongs holds ``LEAF``, and the arrays themselves travel in a flat list.
Position ``i`` of that list is called slot ``i``.
"""

from __future__ import annotations

import functools
import types
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax

from ..paths import Item, Metadata, Path, accessor, path_key
from .statics import Identity, Static

PyTreeDef: TypeAlias = Any  # jax.tree_util.PyTreeDef, which has no type stubs


class Leaf:
    """The place of one array. There is one instance, ``LEAF``."""

    def __repr__(self) -> str:
        return "LEAF"

    def __reduce__(self) -> str:
        return "LEAF"


LEAF = Leaf()


class Container(NamedTuple):
    """A plain pytree inside the graph.

    Attributes:
      treedef: its tree structure.
      children: its leaves, each as a child.
      aux: the auxiliary data of its node types, each as a child; ``treedef`` compares it by ``==``
        only.
    """

    treedef: PyTreeDef
    children: tuple[Any, ...]
    aux: tuple[Any, ...] = ()


class Group(NamedTuple):
    """A static value that cannot be changed itself, but holds objects that can.

    Attributes:
      kind: all of its content but the parts, see ``statics.Content``.
      children: the parts, each as a child.
    """

    kind: tuple[Any, ...]
    children: tuple[Any, ...]


# The index of a table entry, or what stands in place of one.
Child: TypeAlias = "int | Leaf | Static | Container | Group"


class NodeEntry(NamedTuple):
    """A module, or an object of another registered node type."""

    type: type
    metadata: Any
    keys: tuple[Any, ...]
    children: tuple[Child, ...]


class VariableEntry(NamedTuple):
    """A Variable. ``value`` is a leaf, a pytree of leaves, or the index of a ``jax.Ref``."""

    type: type
    metadata: tuple[tuple[str, Child], ...]
    value: Child


class RefEntry(NamedTuple):
    """A ``jax.Ref``, or a hijax Variable: JAX keeps its content, only its identity is ours."""

    type: type = jax.Ref


class StaticEntry:
    """A static object that is compared by content, or by identity and its attributes.

    Attributes:
      kind: all of its content but the parts, see ``statics.Content``.
      children: the parts, each as a child.
      identity: the object, where that is compared too; else None.
      origin: the object itself, if it is to be kept alive; else None. Not compared.
    """

    __slots__ = ("children", "identity", "kind", "origin")

    def __init__(
        self,
        kind: tuple[Any, ...],
        children: tuple[Child, ...],
        identity: Identity | None = None,
        origin: Any = None,
    ):
        self.kind = kind
        self.children = children
        self.identity = identity
        self.origin = origin

    @property
    def type(self) -> type:
        """The class of the object."""
        kind: type = self.kind[0]
        return kind

    def _key(self) -> Hashable:
        return self.kind, self.children, self.identity

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticEntry) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[Any, ...]:
        return StaticEntry, (self.kind, self.children, self.identity, self.origin)


def _static_paths(x: StaticEntry | Group) -> list[Path]:
    """The path from a static object to each of its parts."""
    kind, _, names = x.kind
    count = len(x.children) - len(names)
    if issubclass(kind, dict):
        keys = [_static_key(key) for key in x.children[count % 2 : count : 2]]
        items = [path for key in keys for path in ((key, "key"), (key,))]
        return [*[("default_factory",)] * (count % 2), *items, *((name,) for name in names)]
    if hasattr(kind, "_fields"):
        return [(name,) for name in kind._fields]
    if issubclass(kind, functools.partial):
        return [("func",), *(("args", i) for i in range(count - 1)), *((name,) for name in names)]
    if issubclass(kind, types.MethodType):
        return [("__func__",), ("__self__",)]
    return [*((index,) for index in range(count)), *((name,) for name in names)]


def _static_key(child: Any) -> Any:
    value = child.value if isinstance(child, Static) else repr(child)
    return Item(value) if type(value) is str else value


Entry: TypeAlias = NodeEntry | VariableEntry | RefEntry | StaticEntry


class Structure:
    """All of a graph but its arrays: types, static attributes, metadata, who is who.

    Hashable and comparable: two graphs with equal structures differ only in their arrays,
    so a function traced for one serves the other. Made by :func:`~nnx_sharding.split`.

    Attributes:
      entries: the table. An entry is None where the object was left out on purpose.
      root: what the graph was split from, in terms of the table.
      slots: per entry, the slots of its own arrays.
      root_slots: the slots of arrays that belong to no entry.
      statics: static arguments, in terms of the table.
    """

    __slots__ = ("_hash", "entries", "root", "root_slots", "slots", "statics")

    def __init__(
        self,
        entries: tuple[Entry | None, ...],
        root: Child,
        slots: tuple[tuple[int, ...], ...],
        root_slots: tuple[int, ...],
        statics: tuple[Child, ...] = (),
    ):
        self.entries = entries
        self.root = root
        self.slots = slots
        self.root_slots = root_slots
        self.statics = statics
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

    def static_indices(self) -> list[int]:
        """The entries of static objects."""
        return [i for i, entry in enumerate(self.entries) if isinstance(entry, StaticEntry)]

    def identities(self) -> Iterator[Static]:
        """The static values that are compared by identity alone."""
        yield from identities_in((self.root, *self.statics))
        for entry in self.entries:
            yield from identities_in(children_of(entry))

    def names(self, starts: Iterable[tuple[str, Child]]) -> dict[int, str]:
        """What a user would write for each object that can be reached from named places."""
        found: dict[int, str] = {}
        queue: deque[tuple[str, Path, Child]] = deque((name, (), child) for name, child in starts)
        while queue:
            name, path, child = queue.popleft()
            if isinstance(child, Container | Group):
                queue += ((name, path + key, part) for key, part in parts_of(child).items())
            elif isinstance(child, int) and child not in found:
                found[child] = accessor(name, path)
                parts = parts_of(self.entries[child])
                queue += ((found[child], key, part) for key, part in parts.items())
        return found

    def paths(self) -> tuple[Path, ...]:
        """The path to each array, by slot: from the root to the Variable, first way found."""
        paths: dict[int, Path] = {}
        for place in self.walk(self.root, iter(self.root_slots)):
            for slot in place.slots:
                paths.setdefault(slot, place.path)
        return tuple(paths.get(slot, ()) for slot in range(self.num_leaves))

    def aliases(self, child: Child, limit: int = 8) -> dict[int, list[Path]]:
        """Up to ``limit`` paths to each Variable that is reached from ``child`` by several.

        No path passes an object twice.
        """
        links: Counter[int] = Counter()
        pending, seen = [child], set[int]()
        while pending:
            for index in _linked(pending.pop()):
                links[index] += 1
                if index not in seen:
                    seen.add(index)
                    pending += _own_children(self.entries[index])
        if not any(count > 1 for count in links.values()):
            return {}
        paths: dict[int, list[Path]] = {}
        stack: list[tuple[Path, Child, frozenset[int]]] = [((), child, frozenset())]
        while stack:
            path, child, above = stack.pop()
            if isinstance(child, Container):
                inner = reversed(parts_of(child).items())
                stack += [(path + key, part, above) for key, part in inner]
            elif isinstance(child, int) and child not in above:
                own = paths.setdefault(child, [])
                if len(own) < limit:
                    own.append(path)
                    stack += [
                        (path + key, part, above | {child})
                        for key, part in reversed(parts_of(self.entries[child]).items())
                        if not isinstance(part, Static)
                    ]
        return {
            index: own
            for index, own in paths.items()
            if len(own) > 1 and isinstance(self.entries[index], VariableEntry)
        }

    def _is_ref(self, child: Child) -> TypeGuard[int]:
        return isinstance(child, int) and isinstance(self.entries[child], RefEntry)

    def walk(self, child: Child, slots: Iterator[int], path: Path = ()) -> Iterator[Location]:
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
            if isinstance(child, Location):
                yield child
            elif child is LEAF:
                yield Location(path, None, (next(slots),))
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
                elif isinstance(entry, VariableEntry) and self._is_ref(entry.value):
                    seen.add(entry.value)
                    yield Location(path, child, self.slots[entry.value])
                elif isinstance(entry, VariableEntry) and holds_objects(entry):
                    stack.append(_nested(child, entry.value, iter(own), path))
                elif isinstance(entry, VariableEntry | RefEntry):
                    yield Location(path, child, own)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Structure) or hash(self) != hash(other):
            return False
        return self._key() == other._key()

    def _key(self) -> tuple[Any, ...]:
        return self.entries, self.root, self.statics

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self._key())
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Structure, (self.entries, self.root, self.slots, self.root_slots, self.statics)

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


def children_of(entry: Entry | None) -> Sequence[Any]:
    """What an entry consists of."""
    if isinstance(entry, VariableEntry):
        return (entry.value, *(setting for _, setting in entry.metadata))
    return entry.children if isinstance(entry, NodeEntry | StaticEntry) else ()


def identities_in(children: Iterable[Any]) -> Iterator[Static]:
    """The static values among children that are compared by identity alone."""
    for child in children:
        if isinstance(child, Static):
            if child.by_identity:
                yield child
        elif isinstance(child, Container | Group):
            yield from identities_in(child.children)
            yield from identities_in(getattr(child, "aux", ()))


def parts_of(x: Entry | Container | Group | None) -> dict[Path, Child]:
    """What an entry or a value consists of, by the path to it."""
    if isinstance(x, Container):
        return dict(zip(container_keys(x.treedef), x.children, strict=True))
    if isinstance(x, Group | StaticEntry):
        return dict(zip(_static_paths(x), x.children, strict=True))
    if isinstance(x, VariableEntry):
        return {(): x.value, **{(Metadata(name),): own for name, own in x.metadata}}
    if isinstance(x, NodeEntry):
        return {(key,): child for key, child in zip(x.keys, x.children, strict=True)}
    return {}


def holds_objects(entry: VariableEntry) -> bool:
    """Whether there are Variables or modules in the value of a Variable."""
    value = entry.value
    children = value.children if isinstance(value, Container) else (value,)
    return any(isinstance(child, int) for child in children)


def _own_children(entry: Entry | None) -> tuple[Child, ...]:
    if isinstance(entry, VariableEntry):
        return (entry.value,)
    return entry.children if isinstance(entry, NodeEntry) else ()


def _linked(child: Child) -> Iterator[int]:
    if isinstance(child, int):
        yield child
    elif isinstance(child, Container):
        for part in child.children:
            yield from _linked(part)


def _nested(
    index: int, value: Child, slots: Iterator[int], path: Path
) -> Iterator[tuple[Path, Any, Iterator[int]]]:
    """The arrays in such a value, each as a place of its own, and the objects."""
    parts = parts_of(value) if isinstance(value, Container) else {(): value}
    for key, part in parts.items():
        if part is LEAF:
            yield path, Location(path + key, index, (next(slots),)), slots
        elif isinstance(part, int):
            yield path + key, part, slots


class Location(NamedTuple):
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
    paths = tuple(tuple(map(path_key, path)) for path, _ in leaves)
    if len(set(paths)) != count:  # or one whose children have equal keys
        return tuple((index,) for index in range(count))
    return paths


def is_leaf_treedef(treedef: PyTreeDef) -> bool:
    """Whether a pytree is a single leaf. An empty container has one node too, but no leaf."""
    return bool(treedef.num_nodes == 1 and treedef.num_leaves == 1)
