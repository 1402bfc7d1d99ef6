"""Graph of NNX objects → :class:`~nnx_sharding.core.structure.Structure` and flat arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _compat
from ..paths import path_string
from .statics import Identity, Static, content_of, is_fixed, value_key
from .structure import (
    LEAF,
    Child,
    Container,
    Entry,
    Group,
    NodeEntry,
    PyTreeDef,
    RefEntry,
    StaticEntry,
    Structure,
    VariableEntry,
    container_keys,
    is_leaf_treedef,
)


class Flat(NamedTuple):
    """A graph taken apart.

    Attributes:
      structure: all but the arrays.
      leaves: the arrays, by slot.
      objects: the object of each entry of the structure.
      updatable: whether all objects are known to belong to the current trace.
    """

    structure: Structure
    leaves: Sequence[Any]
    objects: Sequence[Any]
    updatable: bool = False


def flatten(
    tree: Any,
    *,
    graph: bool = True,
    known: Sequence[Any] | None = None,
    describe_known: Callable[[Any], bool] = lambda _: True,
    statics: Sequence[Any] = (),
    held: bool = True,
    borrowed: Set[int] = frozenset(),
) -> Flat:
    """Takes a pytree of NNX objects, arrays and scalars apart; changes nothing.

    Args:
      tree: any pytree; NNX objects in it may share references and form cycles.
      graph: False for Flax's tree mode, where modules are plain pytrees: no Variable may be
        reached twice, and every non-module inside a data attribute is an array.
      known: objects that get the first indices, whether or not ``tree`` reaches them. Given,
        even if empty, ``tree`` is what a function returns, else what it takes.
      describe_known: which of the known objects are described even if ``tree`` does not
        reach them; the others then have the entry None.
      statics: static arguments.
      held: whether the structure keeps static objects alive that are compared by identity.
      borrowed: the ids of those that it does not keep alive all the same.

    Raises:
      ValueError: in tree mode without ``known``, a Variable is reached twice or there is a
        cycle; in tree mode, an object is not a pytree.
    """
    splitter = _Splitter(graph, known or (), held, borrowed)
    root_slots: list[int] = []
    root = splitter.root(tree, root_slots, link_refs=known is not None)
    static_children = tuple(map(splitter.static, statics))
    for obj in known or ():
        if describe_known(obj):
            splitter.link(obj)
    splitter.describe_pending()
    structure = Structure(
        tuple(splitter.entries),
        root,
        tuple(map(tuple, splitter.slots)),
        tuple(root_slots),
        static_children,
    )
    if not graph and known is None:
        _check_tree(structure, splitter.links, splitter.objects)
    return Flat(structure, splitter.leaves, splitter.objects)


class _Splitter:
    """One walk over a graph. Indices are given in the order of discovery, depth first."""

    def __init__(self, graph: bool, known: Sequence[Any], held: bool, borrowed: Set[int]):
        self.graph = graph
        self.held = held
        self.borrowed = borrowed
        self.objects: list[Any] = list(known)
        self.index = {id(obj): i for i, obj in enumerate(known)}
        self.entries: list[Entry | None] = [None] * len(known)
        self.slots: list[list[int]] = [[] for _ in known]
        self.links = [0] * len(known)
        self.leaves: list[Any] = []
        self._linked: set[int] = set()
        self._statics: dict[int, tuple[Static | Group, Any]] = {}
        self._pending: list[int] = []

    def link(self, obj: Any) -> int:
        """The index of an object; the first time it is seen it is noted for description."""
        index = self.index.get(id(obj))
        if index is None:
            index = self.index[id(obj)] = len(self.objects)
            self.objects.append(obj)
            self.entries.append(None)
            self.slots.append([])
            self.links.append(0)
        self.links[index] += 1
        if index not in self._linked:
            self._linked.add(index)
            self._pending.append(index)
        return index

    def describe_pending(self) -> None:
        """Describes what was linked to, and what that links to, children before siblings.

        A loop, not a recursion: models may be nested deeper than Python's stack is.
        """
        stack = self._take_pending()
        while stack:
            index = stack.pop()
            self.entries[index] = self._describe(self.objects[index], self.slots[index])
            stack += self._take_pending()

    def _take_pending(self) -> list[int]:
        taken, self._pending = self._pending[::-1], []
        return taken

    def _describe(self, obj: Any, slots: list[int]) -> Entry:
        if _compat.is_variable(obj):
            metadata = sorted(_compat.get_metadata(obj).items())
            value = _compat.get_value(obj)
            return VariableEntry(
                type(obj),
                tuple([(name, self.static(setting)) for name, setting in metadata]),
                self._leaf(value, slots)
                if type(value) is _compat.ArrayImpl
                else self._container(value, slots, all_leaves=True),
            )
        if _compat.is_node(obj):
            if not self.graph and not _compat.is_pytree_type(type(obj)):
                raise ValueError(
                    f"{type(obj).__name__} is declared with pytree=False, so it cannot be used "
                    "with graph=False. Use graph=True, or make the class a pytree."
                )
            items = _compat.node_items(obj)
            children = [
                self.static(value)
                if is_data is False
                else self._attribute(value, bool(is_data), slots)
                for value, is_data in zip(items.values, items.is_data, strict=True)
            ]
            return NodeEntry(type(obj), items.metadata, tuple(items.keys), tuple(children))
        if _compat.is_ref(obj) or _compat.is_hijax_variable(obj):
            self._leaf(obj, slots)
            return RefEntry()
        content = content_of(obj)
        assert content is not None
        identity, static = None, self.static
        if content.shallow:
            identity, static = Identity(obj, hold=self._holds(obj)), self._leaf_static
        parts = tuple([static(part) for part in content.parts])
        origin = obj if self._holds(obj) else None
        return StaticEntry(content.kind, parts, identity, origin)

    def static(self, value: Any) -> Child:
        """What stands for a static value: a static, or the index of an object that can change."""
        kind = type(value)
        if kind is str or kind is int or kind is bool or value is None:
            return Static.of(value)
        found = self._statics.get(id(value))
        if found is not None:
            return found[0]
        if id(value) in self.index:
            return self.link(value)
        content = content_of(value) if value_key(value) is None else None
        if content is None:
            return self._leaf_static(value)
        if not is_fixed(content.kind):
            return self.link(value)
        group = Group(content.kind, tuple(map(self.static, content.parts)))
        self._statics[id(value)] = group, value
        return group

    def _leaf_static(self, value: Any) -> Static:
        static = Static.of(value, hold=self._holds(value))
        self._statics[id(value)] = static, value  # kept, or something else could get its id
        return static

    def _holds(self, value: Any) -> bool:
        return self.held and id(value) not in self.borrowed

    def _attribute(self, value: Any, is_data: bool, slots: list[int]) -> Child:
        if _compat.is_graph_object(value):
            return self.link(value)
        if _compat.is_node_state(value):
            return _node_state(_compat.node_flags(value))
        child = self._container(value, slots, all_leaves=not self.graph, is_data=is_data)
        return child

    def root(self, tree: Any, slots: list[int], *, link_refs: bool) -> Child:
        """The pytree that is split. Its arrays and those of its objects come in its order.

        ``link_refs`` tells whether a ``jax.Ref`` in it is an object that may be shared. Where a
        function takes refs themselves it is not, so that JAX's own rule against passing one
        twice holds.
        """
        parts, treedef = jax.tree_util.tree_flatten(tree, is_leaf=_compat.is_graph_object)
        children: list[Child] = []
        for part in parts:
            if isinstance(part, Static):  # so says the transform
                children.append(self.static(part.value))
                continue
            is_object = (
                _compat.is_graph_object(part)
                or (link_refs and _compat.is_ref(part))
                or _compat.is_hijax_variable(part)
            )
            children.append(self.link(part) if is_object else self._leaf(part, slots))
            self.describe_pending()
        if is_leaf_treedef(treedef):
            return children[0]
        container = Container(treedef, tuple(children), self._aux(treedef))
        self.describe_pending()
        return container

    def _container(
        self, tree: Any, slots: list[int], *, all_leaves: bool, is_data: bool = False
    ) -> Child:
        """A pytree inside of an object.

        ``all_leaves`` tells whether leaves that are not arrays travel with the arrays, or are
        static; ``is_data`` whether a single leaf does.
        """
        parts, treedef = jax.tree_util.tree_flatten(tree, is_leaf=_compat.is_graph_object)
        if is_leaf_treedef(treedef):
            # Flax makes a value that was put under nnx.data an array, whatever its type.
            return self._part(parts[0], slots, all_leaves or is_data)
        children = tuple([self._part(part, slots, all_leaves) for part in parts])
        return Container(treedef, children, self._aux(treedef))

    def _aux(self, treedef: PyTreeDef) -> tuple[Child, ...]:
        return tuple(map(self.static, aux_of(treedef)))

    def _part(self, part: Any, slots: list[int], all_leaves: bool) -> Child:
        if _compat.is_graph_object(part) or _compat.is_ref(part):
            return self.link(part)
        if _compat.is_hijax_variable(part):
            return self.link(part)
        if all_leaves or isinstance(part, _ARRAYS):
            return self._leaf(part, slots)
        return self.static(part)

    def _leaf(self, value: Any, slots: list[int]) -> Child:
        slots.append(len(self.leaves))
        self.leaves.append(value)
        return LEAF


@functools.cache
def _node_state(flags: tuple[bool, bool]) -> Container:
    """What stands for Flax's note on how far a module is set up: a pytree without leaves."""
    return Container(jax.tree_util.tree_structure(_compat.new_node_state(*flags)), ())


def aux_of(treedef: PyTreeDef) -> Iterator[Any]:
    """The data that the node types of a pytree keep beside their children, without plain keys."""
    stack = [treedef]
    while stack:
        node = stack.pop()
        data = node.node_data()
        if data is None:
            continue
        if _compat.has_aux(*data):
            yield data[1]
        stack += reversed(node.children())


_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


def _check_tree(structure: Structure, links: list[int], objects: list[Any]) -> None:
    """Refuses what a tree cannot say: a Variable in two places, a cycle."""
    shared = [
        index
        for index, count in enumerate(links)
        if count > 1 and isinstance(structure.entries[index], VariableEntry | RefEntry)
    ]
    nodes = [
        index
        for index, count in enumerate(links)
        if count > 1 and isinstance(structure.entries[index], NodeEntry)
    ]
    cyclic, below = _reach(structure, nodes)
    shared += sorted(below - set(shared))
    if not shared and not cyclic:
        return
    lines = [
        f"  {type(objects[index]).__name__}: " + ", ".join(_all_paths(structure, index))
        for index in sorted({*shared, *cyclic})
    ]
    raise ValueError(
        "graph=False does not support shared references. Duplicates, found at paths:\n"
        + "\n".join(lines)
        + "\nRemove the duplicates, or use graph=True."
    )


def _reach(structure: Structure, nodes: list[int]) -> tuple[set[int], set[int]]:
    """Which of ``nodes`` lie on a cycle, and which Variables lie below them."""
    cyclic: set[int] = set()
    variables: set[int] = set()
    for start in nodes:
        seen: set[int] = set()
        stack = _targets(structure, start)
        while stack:
            index = stack.pop()
            if index == start:
                cyclic.add(start)
            if index in seen:
                continue
            seen.add(index)
            if isinstance(structure.entries[index], NodeEntry):
                stack += _targets(structure, index)
            elif not isinstance(structure.entries[index], StaticEntry):
                variables.add(index)
    return cyclic, variables


def _targets(structure: Structure, index: int) -> list[int]:
    entry = structure.entries[index]
    found: list[int] = []
    stack: list[Any] = list(entry.children) if isinstance(entry, NodeEntry) else []
    while stack:
        child = stack.pop()
        if isinstance(child, Container):
            stack += child.children
        elif isinstance(child, int):
            found.append(child)
    return found


def _all_paths(structure: Structure, target: int, limit: int = 4) -> list[str]:
    """Up to ``limit`` ways from the root to an entry, none of which visits a node twice."""
    found: list[str] = []

    def visit(child: Child, path: tuple[Any, ...], above: frozenset[int]) -> None:
        if len(found) >= limit:
            return
        if isinstance(child, Container):
            for key, part in zip(container_keys(child.treedef), child.children, strict=True):
                visit(part, path + key, above)
        elif isinstance(child, int):
            if child == target:
                found.append(path_string(path) or "the root")
            entry = structure.entries[child]
            if child not in above and isinstance(entry, NodeEntry):
                for key, part in zip(entry.keys, entry.children, strict=True):
                    visit(part, (*path, key), above | {child})

    visit(structure.root, (), frozenset())
    return found
