"""Pytrees as JSON: where each array of an argument or a result is, without the code of its classes.

A tree is one of ::

    {"input": 3}, {"output": 0}          an array, by its position in the program
    null                                 None
    {"tuple": [tree, ...]}, {"list": [tree, ...]}
    {"dict": [[key, tree], ...]}
    {"state": [[path, tree], ...]}       a module, or an nnx.State
    {"object": [[key, tree], ...], "type": name}     any other class: comes back as a dict
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from flax import nnx

from ..core.structure import (
    LEAF,
    Child,
    Container,
    PyTreeDef,
    Structure,
    VariableEntry,
    container_keys,
    is_leaf_treedef,
)
from ..paths import Path, plain_key

Tree: TypeAlias = Any


def tree_of(structure: Structure, array: Callable[[int], Tree]) -> Tree:
    """The tree of a structure's root; ``array`` returns that of a slot."""
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
    return items[0][1] if is_variable and items else state_tree(items)


def _container(treedef: PyTreeDef, parts: Iterator[Tree]) -> Tree:
    if is_leaf_treedef(treedef):
        return next(parts)
    kind, data = treedef.node_data()
    children = [_container(child, parts) for child in treedef.children()]
    if kind is type(None):
        return None
    if kind is tuple or kind is list:
        return {kind.__name__: children}
    keys = map(_plain, data if kind is dict else _keys(treedef))
    items = [[key, child] for key, child in zip(keys, children, strict=True)]
    if kind is nnx.State:
        return state_tree(((key,), child) for key, child in items)
    return {"dict": items} if kind is dict else {"object": items, "type": kind.__name__}


def _keys(treedef: PyTreeDef) -> Iterator[Any]:
    """The key of each child of a node of any class; its index if it holds no array."""
    paths = iter(container_keys(treedef))
    for index, child in enumerate(treedef.children()):
        inner = [next(paths) for _ in range(child.num_leaves)]
        yield inner[0][0] if inner and inner[0] else index


def state_tree(items: Iterable[tuple[Path, Tree]]) -> Tree:
    """The tree of a State from paths and trees; a State in it becomes part of it."""
    flat = []
    for path, tree in items:
        inner = tree["state"] if isinstance(tree, dict) and "state" in tree else [[[], tree]]
        flat += [[[*map(_plain, path), *more], below] for more, below in inner]
    return {"state": flat}


def _plain(key: Any) -> str | int:
    key = plain_key(key)
    return key if type(key) in (str, int) else str(key)


def _items(kind: str, content: list[Any]) -> list[tuple[Path, Tree]]:
    """The parts of a tree, each with its path."""
    if kind in ("tuple", "list"):
        return [((index,), part) for index, part in enumerate(content)]
    return [(tuple(key) if kind == "state" else (key,), part) for key, part in content]


def leaves(tree: Tree, path: Path = ()) -> Iterator[tuple[Path, str, int]]:
    """Every array in a tree: its path, ``"input"`` or ``"output"``, and its position."""
    if tree is None:
        return
    kind, content = next(iter(tree.items()))
    if kind in ("input", "output"):
        yield path, kind, content
        return
    for keys, part in _items(kind, content):
        yield from leaves(part, path + keys)


def build(tree: Tree, arrays: Mapping[str, Sequence[Any]]) -> Any:
    """The pytree with these arrays for ``"input"`` and ``"output"``, by position."""
    if tree is None:
        return None
    kind, content = next(iter(tree.items()))
    if kind in arrays:
        return arrays[kind][content]
    parts = {path: build(part, arrays) for path, part in _items(kind, content)}
    if kind == "state":
        return nnx.from_flat_state(parts)
    if kind in ("tuple", "list"):
        return tuple(parts.values()) if kind == "tuple" else [*parts.values()]
    return {key: part for (key,), part in parts.items()}


def check(tree: Tree, counts: Mapping[str, int]) -> None:
    """Raises a ValueError for what is not a tree of so many ``"input"`` and ``"output"`` arrays."""
    if tree is None:
        return
    kind, content = next(iter(tree.items())) if isinstance(tree, dict) and tree else ("", None)
    if type(content) is int and 0 <= content < counts.get(kind, 0):
        return
    if not isinstance(content, list) or not (
        kind in ("tuple", "list") or (kind in _KEYED and all(_is_item(kind, x) for x in content))
    ):
        raise ValueError(f"{tree!r:.100} is not a tree")
    for _, part in _items(kind, content):
        check(part, counts)


_KEYED = ("dict", "object", "state")


def _is_item(kind: str, item: Any) -> bool:
    if (
        not isinstance(item, list)
        or len(item) != 2
        or isinstance(item[0], list) != (kind == "state")
    ):
        return False
    keys = item[0] if kind == "state" else item[:1]
    return all(type(key) in (str, int) for key in keys)
