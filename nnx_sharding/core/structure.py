"""The hashable description of a graph of NNX objects: to graphs what a treedef is to pytrees.

A graph is kept as a table. Every object with an identity (module, Variable, ``jax.Ref``, mutable
static object) is one *entry*, whose place in the table is its *index*. An entry has *children* for
all that the object holds: the index of another object, a static value, a pytree (``Container``) of
children, or ``LEAF`` for an array. Two children with the same index are the same object, so sharing
and cycles need no special case. The arrays themselves are in a flat list, whose positions are
called *slots*. The *root* is the child for the pytree that was flattened.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax

from .. import _compat
from ..errors import raise_if_any
from ..specs.paths import Metadata, Path, accessor, path_string
from .static_equality import Static, static_paths
from .static_parts import StaticKind
from .treedefs import PyTreeDef, container_keys


class Leaf:
    """The position of one array. There is one instance, ``LEAF``."""

    def __repr__(self) -> str:
        return "LEAF"

    __reduce__ = __repr__  # pickled by name


LEAF = Leaf()


class Container(NamedTuple):
    """A plain pytree inside the graph."""

    treedef: PyTreeDef
    children: tuple[Any, ...]  # the children for the leaves, in the order of the treedef
    # The children for the node data. These are here because the treedef compares by ``==`` only.
    aux: tuple[Any, ...] = ()


class StaticObject(NamedTuple):
    """A static object that is compared by content: an entry, or a child if it cannot change."""

    kind: StaticKind
    children: tuple[Any, ...]
    identity: Static | None = None  # the object, if it has to be the same one as well; else None

    @property
    def type(self) -> type:
        """The class of the object."""
        return self.kind.type


# The index of an entry, or the description of a value that is not in the table.
Child: TypeAlias = "int | Leaf | Static | Container | StaticObject"


class NodeEntry(NamedTuple):
    """A module, or an object of another registered node type."""

    type: type
    metadata: Any  # what Flax keeps for a node of this type
    keys: tuple[Any, ...]  # the names of the attributes
    children: tuple[Child, ...]  # the child for the value of each attribute


class VariableEntry(NamedTuple):
    """A Variable."""

    type: type
    metadata: tuple[tuple[str, Child], ...]  # names and settings
    value: Child  # a leaf, a pytree of leaves and objects, or the index of an object


class RefEntry(NamedTuple):
    """A ``jax.Ref``: JAX keeps its content, the table only its identity."""

    type: type = jax.Ref


Entry: TypeAlias = NodeEntry | VariableEntry | RefEntry | StaticObject


class Location(NamedTuple):
    """Where arrays are in a graph: a Variable, a ``jax.Ref``, or an array outside of these."""

    path: Path
    object_index: int | None  # the index of the Variable or ref; None for a bare array
    slots: tuple[int, ...]  # the slots of the arrays: one, unless a Variable holds a pytree


# A child that a walk has to visit. It is a plain tuple because a walk makes one for each Variable
# and module, and a NamedTuple takes four times as long to make.
_Visit: TypeAlias = tuple[
    Path,
    Child,
    Iterator[int],  # slots of the enclosing object: each array that it holds itself takes one
    int | None,  # the index of the enclosing Variable; None outside of Variables
]


@jax.tree_util.register_static  # a pytree without leaves, as a GraphDef is
@dataclasses.dataclass(slots=True, repr=False)
class Structure:
    """All of a graph except its arrays: types, static attributes, metadata, shared references.

    Hashable and comparable: two graphs with equal structures differ only in their arrays, so a
    function traced for one can be used for the other. Made by :func:`~nnx_sharding.split`. To JAX
    it is a pytree without leaves: ``jax.jit`` may return it, and loops carry it with the arrays.

    Attributes:
      entries: the table. An entry is None if its object is not described.
      root: the pytree that was split, in terms of the table.
      slots: for each entry, the slots of its own arrays, in the order of its children.
      root_slots: the slots of arrays that belong to no entry.
      statics: static arguments, in terms of the table.
      origins: the static objects that were split, by entry. Comparisons leave this out.
      shares: whether any object may have more than one reference. Comparisons leave this out.

    ``_hash``, ``_identities`` and ``_locations`` keep the results of ``hash``, `identities` and
    `locations_in`. They are None until these are first called.
    """

    entries: tuple[Entry | None, ...]
    root: Child
    slots: tuple[tuple[int, ...], ...] = field(compare=False)
    root_slots: tuple[int, ...] = field(compare=False)
    statics: tuple[Child, ...] = ()
    origins: Mapping[int, Any] = field(default_factory=dict, compare=False)
    shares: bool = field(default=True, init=False, compare=False)
    _hash: int | None = field(default=None, init=False, compare=False)
    _identities: tuple[Static, ...] | None = field(default=None, init=False, compare=False)
    _locations: tuple[Location, ...] | None = field(default=None, init=False, compare=False)

    @property
    def num_leaves(self) -> int:
        """The number of arrays that belong to this structure."""
        return len(self.root_slots) + sum(map(len, self.slots))

    def slots_of(self, kind: type) -> frozenset[int]:
        """Returns the slots of the arrays that belong to entries of one class, as `RefEntry`."""
        pairs = zip(self.entries, self.slots, strict=True)
        return frozenset(chain(*(slots for entry, slots in pairs if isinstance(entry, kind))))

    def static_indices(self) -> list[int]:
        """Returns the indices of static objects."""
        return [i for i, entry in enumerate(self.entries) if isinstance(entry, StaticObject)]

    def identities(self) -> Sequence[Static]:
        """Returns the static values that are compared by identity alone, such as functions."""
        if self._identities is not None:
            return self._identities
        # A model has thousands of entries, with few different children. Variables of one array may
        # share the tuple with their metadata, and only one such Variable is searched. An id stands
        # for one object, because the structure keeps all of them alive.
        entries: dict[int, Any] = {}  # by the id of the metadata, or of the entry
        for entry in self.entries:
            shared = entry.metadata if is_leaf_variable(entry) else entry
            entries[_compat.identity(shared)] = entry
        children = [self.root, *self.statics, *chain(*map(children_of, entries.values()))]
        # Nodes of one class share most of their static children.
        unique_children = {_compat.identity(x): x for x in children if type(x) is not int}
        self._identities = tuple(identities_in(unique_children.values()))
        return self._identities

    def walk(self, child: Child, slots: Iterator[int]) -> Iterator[Location]:
        """Yields where each Variable, ``jax.Ref`` and bare array below ``child`` is.

        The walk is depth first, with keys in order, as in Flax. A shared object is yielded once,
        under its first path.

        Args:
          child: where to start: a child in terms of the table.
          slots: the slots of the arrays of ``child`` outside of objects.
        """
        seen: set[int] = set()  # the indices of objects that were met
        # No recursion: models may be nested deeply.
        stack: list[_Visit] = [((), child, slots, None)]
        while stack:
            # The arrays that an object holds itself take slots from one iterator, which all visits
            # of the object's parts share. So the parts have to be visited in order, and are put on
            # the stack in reverse.
            path, child, slots, variable = stack.pop()
            parts: Sequence[tuple[Path, Child]] = ()  # children to visit, by path from this child
            if child is LEAF:  # an array in a container, a module, or a Variable with objects
                yield Location(path, variable, (next(slots),))
            elif isinstance(child, Container):
                parts = [*parts_of(child).items()] if child.children else ()
            elif isinstance(child, int) and child not in seen:  # an object that is met first
                seen.add(child)
                entry = self.entries[child]
                if is_leaf_variable(entry):  # tried first, because nearly all objects are such
                    yield Location(path, child, self.slots[child])
                    continue
                variable, slots = None, iter(self.slots[child])
                value = entry.value if isinstance(entry, VariableEntry) else None
                if isinstance(entry, NodeEntry):
                    pairs = zip(entry.keys, entry.children, strict=True)
                    # Static attributes are left out early, because most attributes are static.
                    parts = [((key,), part) for key, part in pairs if type(part) is not Static]
                elif isinstance(value, int) and isinstance(self.entries[value], RefEntry):
                    seen.add(value)  # the Variable stands for the ref that is its value
                    yield Location(path, child, self.slots[value])
                elif isinstance(entry, VariableEntry) and holds_objects(entry):
                    # The value is a Variable or module, or a pytree with such objects and arrays.
                    variable, parts = child, [((), entry.value)]
                elif isinstance(entry, VariableEntry | RefEntry):  # the value has only arrays
                    yield Location(path, child, self.slots[child])
            stack += [
                (path + key, part, slots, variable)
                for key, part in reversed(parts)
                if not isinstance(part, Static)
            ]

    def paths(self) -> tuple[Path, ...]:
        """Returns the path to each array, by slot: the first one from the root to the Variable."""
        paths: dict[int, Path] = {}
        for location in locations_in(self):
            for slot in location.slots:
                paths.setdefault(slot, location.path)
        return tuple(paths.get(slot, ()) for slot in range(self.num_leaves))

    def paths_to_objects(
        self, starts: Iterable[tuple[Path, Child]], limit: int = 1
    ) -> dict[int, list[Path]]:
        """Finds up to ``limit`` paths to each object below some children, by its index.

        Short paths come first. A path passes through no object twice, but may end at one of them.

        Args:
          starts: the children, each with the path that leads to it.
          limit: the most paths to one object. Only paths up to the ``limit``-th to an object go on
            to what it holds, so that the search ends even if everything is shared.
        """
        paths: dict[int, list[Path]] = {}
        # Each item is a path, the child there, and the objects that the path passes through.
        queue = deque((path, child, frozenset[int]()) for path, child in starts)
        while queue:  # breadth first, so that short paths come first
            path, child, above = queue.popleft()
            parts: dict[Path, Child] = {}
            if isinstance(child, Container | StaticObject):
                parts = parts_of(child)
            elif isinstance(child, int):
                paths_to_child = paths.setdefault(child, [])
                if len(paths_to_child) < limit:
                    paths_to_child.append(path)
                    if child not in above:  # the path does not end in a cycle
                        parts, above = parts_of(self.entries[child]), above | {child}
            # A static value is left out: it has no parts, and is no object of the table.
            inner = [(key, part) for key, part in parts.items() if not isinstance(part, Static)]
            queue += [(path + key, part, above) for key, part in inner]
        return paths

    def names(self, starts: Iterable[tuple[str, Child]]) -> dict[int, str]:
        """Returns the expression for each object below named children, by index: ``model.up``."""
        paths = self.paths_to_objects(((name,), child) for name, child in starts)
        return {index: accessor(path[0], path[1:]) for index, [path] in paths.items()}

    def shared_objects(self, child: Child) -> set[int]:
        """Returns the modules, Variables and refs in ``child`` with more than one reference."""
        # Counting takes as long as flattening. It is left out if flattening met no object twice.
        counts = Counter(links_below(self, [child]) if self.shares else ())
        shared = (index for index, count in counts.items() if count > 1)
        return {index for index in shared if not isinstance(self.entries[index], StaticObject)}

    def aliases(self, child: Child, limit: int = 8) -> dict[int, list[Path]]:
        """Finds up to ``limit`` paths to each Variable with more than one path from ``child``.

        A Variable with one reference has several paths, too, if a module above it is shared.
        """
        if not self.shared_objects(child):  # nearly all models share no objects
            return {}
        return {
            index: paths
            for index, paths in self.paths_to_objects([((), child)], limit).items()
            if len(paths) > 1 and isinstance(self.entries[index], VariableEntry)
        }

    def check_tree(self) -> None:
        """Raises an error for what a tree cannot express: a shared Variable, or a cycle."""
        # In tree mode, flattening describes a module anew in each place where it meets the module.
        # So a module with two references is in a cycle.
        duplicates = self.shared_objects(self.root)
        if not duplicates:
            return
        entries: Sequence[Any] = self.entries
        # The message shows up to four paths to each object.
        paths = self.paths_to_objects([((), self.root)], limit=4)
        lines = []
        for index in sorted(duplicates):
            places = [path_string(path) or "the root" for path in paths.get(index, ())]
            # No path leads through the data of a pytree node, such as the settings of a registered
            # class, so a reference in such data is not counted as a place in the tree.
            if len(places) > 1:
                lines.append(f"  {entries[index].type.__name__}: {', '.join(places)}")
        head = "graph=False does not support shared references. Duplicates, found at paths:"
        raise_if_any(ValueError, head, lines, "Remove the duplicates, or use graph=True.")

    def __hash__(self) -> int:
        # The hash is kept, because each call that flattens looks up its structure.
        self._hash = self._hash or hash((self.entries, self.root, self.statics))
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # The hash is left out, because it differs between processes.
        fields = self.entries, self.root, self.slots, self.root_slots, self.statics, self.origins
        return Structure, fields

    def __repr__(self) -> str:
        lines = [
            f"  {index}: {type(entry).__name__.removesuffix('Entry')} {entry.type.__name__}"
            for index, entry in enumerate(self.entries)
            if entry is not None
        ]
        header = f"Structure({self.num_leaves} arrays, root={self.root!r}"
        return "\n".join([header, *lines]) + ("\n)" if lines else ")")


def links_below(structure: Structure, children: Iterable[Child]) -> Iterator[int]:
    """Yields the index of an object for each reference to it, in children and all that they hold.

    An index among the children is a reference as well. So a set of the yielded indices has all
    objects that can be reached from the children, and a ``Counter`` says which of these are shared.
    """
    reached: set[int] = set()
    pending: list[Iterable[Child]] = [children]
    while pending:
        for part in atoms(pending.pop()):
            if not isinstance(part, int):  # an array or a static value
                continue
            yield part
            if part not in reached:  # an object that is met again adds no references of its own
                reached.add(part)
                pending.append(children_of(structure.entries[part]))


def children_of(entry: Entry | None) -> Sequence[Any]:
    """Returns the children of an entry; for a Variable, those for its value and its metadata."""
    if isinstance(entry, VariableEntry):
        return (entry.value, *(setting for _, setting in entry.metadata))
    return entry.children if isinstance(entry, (NodeEntry, StaticObject)) else ()


def is_leaf_variable(entry: object) -> TypeGuard[VariableEntry]:
    """Whether an entry describes a Variable whose value is one array."""
    return type(entry) is VariableEntry and entry.value is LEAF


def atoms(children: Iterable[Child]) -> Iterator[Any]:
    """Yields what is in children at any depth, except containers: indices, ``LEAF`` and statics."""
    for child in children:
        if isinstance(child, Container | StaticObject):
            yield from atoms(chain(child.children, getattr(child, "aux", ())))
        else:
            yield child


def identities_in(children: Iterable[Child]) -> Iterator[Static]:
    """Yields the static values among children that are compared by identity alone."""
    return (atom for atom in atoms(children) if isinstance(atom, Static) and atom.by_identity)


def holds_objects(entry: VariableEntry) -> bool:
    """Whether there are Variables or modules in the value of a Variable."""
    parts = entry.value.children if isinstance(entry.value, Container) else ()
    return isinstance(entry.value, int) or any(isinstance(part, int) for part in parts)


def parts_of(x: Entry | Container | None) -> dict[Path, Child]:
    """Returns the children of an entry or a pytree, each with the path that leads to it.

    None (nothing is described) and a ref have no children.
    """
    if isinstance(x, Container):  # a path may have several keys, such as ("a", 0)
        return dict(zip(container_keys(x.treedef), x.children, strict=True))
    if isinstance(x, StaticObject):  # a path is ("args", 0) in a `functools.partial`, for example
        return dict(zip(static_paths(x.kind, x.children), x.children, strict=True))
    if isinstance(x, VariableEntry):  # the value is at the path of the Variable itself
        return {(): x.value, **{(Metadata(name),): setting for name, setting in x.metadata}}
    if isinstance(x, NodeEntry):
        return {(key,): child for key, child in zip(x.keys, x.children, strict=True)}
    return {}


def locations_in(structure: Structure) -> tuple[Location, ...]:
    """Returns all places of arrays in a structure, in the order of `Structure.walk`."""
    if structure._locations is None:  # the result is kept, because `merge` needs it in each call
        structure._locations = (*structure.walk(structure.root, iter(structure.root_slots)),)
    return structure._locations
