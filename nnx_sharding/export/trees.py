"""Pytrees as JSON: where each array of an argument or a result is, without the code of its classes.

A tree is one of ::

    {"input": 3}, {"output": 0}      an array, by its position in the program
    null                             None
    {kind: [[path, tree], ...]}      a container with its parts

where the kind is "tuple", "list", "dict", "state" (a module, or an nnx.State) or "object" (any
other class, which becomes a dict), and a path is a list of keys: one, except in a "state".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from flax import nnx

from ..core.structure import LEAF, Child, Container, Structure, VariableEntry
from ..core.treedefs import PyTreeDef, container_keys, is_leaf_treedef
from ..specs.paths import Path, plain_key

Tree: TypeAlias = Any


def tree_of(structure: Structure, array: Callable[[int], Tree]) -> Tree:
    """The tree of a structure's root; ``array`` returns the tree of a slot."""
    return _tree(structure, structure.root, iter(structure.root_slots), array)


def _tree(
    structure: Structure, child: Child, slots: Iterator[int], array: Callable[[int], Tree]
) -> Tree:
    if child is LEAF:
        return array(next(slots))
    if isinstance(child, Container):
        parts = [_tree(structure, part, slots, array) for part in child.children]
        return _container(child.treedef, iter(parts))
    if not isinstance(child, int):  # a static value
        return None
    items = []
    for location in structure.walk(child, iter(())):
        entry = None if location.entry is None else structure.entries[location.entry]
        value = entry.value if isinstance(entry, VariableEntry) else LEAF
        items.append((location.path, _tree(structure, value, iter(location.slots), array)))
    is_variable = isinstance(structure.entries[child], VariableEntry)
    return items[0][1] if is_variable and items else tree_from("state", items)


def _container(treedef: PyTreeDef, parts: Iterator[Tree]) -> Tree:
    if is_leaf_treedef(treedef):
        return next(parts)
    type_, data = treedef.node_data()
    children = [_container(child, parts) for child in treedef.children()]
    if type_ is type(None):
        return None
    kind = _KINDS.get(type_, "object")
    keys = data if kind == "dict" else _keys(treedef)
    return tree_from(kind, (((key,), child) for key, child in zip(keys, children, strict=True)))


_KINDS = {tuple: "tuple", list: "list", dict: "dict", nnx.State: "state"}


def _keys(treedef: PyTreeDef) -> Iterator[Any]:
    """The key of each child of a node of any class; its index if it holds no array."""
    paths = iter(container_keys(treedef))
    for index, child in enumerate(treedef.children()):
        inner = [next(paths) for _ in range(child.num_leaves)]
        yield inner[0][0] if inner and inner[0] else index


def tree_from(kind: str, items: Iterable[tuple[Path, Tree]]) -> Tree:
    """The tree of a container from paths and trees; a State in a State becomes part of it."""
    parts = []
    for path, tree in items:
        is_state = kind == "state" and isinstance(tree, dict) and "state" in tree
        inner = tree["state"] if is_state else [[[], tree]]
        parts += [[[*map(_plain, path), *more], below] for more, below in inner]
    return {kind: parts}


def _plain(key: Any) -> str | int:
    key = plain_key(key)
    return key if type(key) in (str, int) else str(key)


def leaves(tree: Tree, path: Path = ()) -> Iterator[tuple[Path, str, int]]:
    """Every array in a tree: its path, ``"input"`` or ``"output"``, and its position."""
    for kind, content in (tree or {}).items():
        if kind in ("input", "output"):
            yield path, kind, content
        else:
            for keys, part in content:
                yield from leaves(part, (*path, *keys))


def build(tree: Tree, arrays: Mapping[str, Sequence[Any]]) -> Any:
    """The pytree with these arrays for ``"input"`` and ``"output"``, by position."""
    if tree is None:
        return None
    [(kind, content)] = tree.items()
    if kind in arrays:
        return arrays[kind][content]
    parts = {tuple(path): build(part, arrays) for path, part in content}
    if kind == "state":
        return nnx.from_flat_state(parts)
    if kind in ("tuple", "list"):
        return tuple(parts.values()) if kind == "tuple" else [*parts.values()]
    return {key: part for (key,), part in parts.items()}
