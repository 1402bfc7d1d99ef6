"""Pytrees as JSON: what is where in arguments and results, without the code of their classes.

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

import jax
from flax import nnx

from ..core.statics import Static
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
ARRAYS = ("input", "output")


def tree_of(structure: Structure, array: Callable[[int], Tree]) -> Tree:
    """The tree of a structure's root; ``array`` gives that of a slot."""
    return _tree(structure, structure.root, iter(structure.root_slots), array)


def _tree(
    structure: Structure, child: Child, slots: Iterator[int], array: Callable[[int], Tree]
) -> Tree:
    if child is LEAF:
        return array(next(slots))
    if isinstance(child, Container):
        parts = [_tree(structure, part, slots, array) for part in child.children]
        return _container(child.treedef, iter(parts))
    if isinstance(child, Static):
        return None
    assert isinstance(child, int)
    items = []
    for place in structure.walk(child, iter(())):
        entry = None if place.entry is None else structure.entries[place.entry]
        value = entry.value if isinstance(entry, VariableEntry) else LEAF
        items.append((place.path, _tree(structure, value, iter(place.slots), array)))
    is_variable = isinstance(structure.entries[child], VariableEntry)
    return items[0][1] if is_variable and items else state_tree(items)


def _container(treedef: PyTreeDef, parts: Iterator[Tree]) -> Tree:
    if is_leaf_treedef(treedef):
        return next(parts)
    kind, own = treedef.node_data()
    children = [_container(child, parts) for child in treedef.children()]
    if kind is type(None):
        return None
    if kind is tuple or kind is list:
        return {kind.__name__: children}
    if kind is dict:
        return {"dict": [[_plain(key), child] for key, child in zip(own, children, strict=True)]}
    keys = _keys(treedef)
    if kind is nnx.State:
        return state_tree(((key,), tree) for key, tree in zip(keys, children, strict=True))
    items = [[_plain(key), tree] for key, tree in zip(keys, children, strict=True)]
    return {"object": items, "type": kind.__name__}


def _keys(treedef: PyTreeDef) -> list[Any]:
    """The key of each child of a node of any class; its position where it holds no array."""
    paths = iter(container_keys(treedef))
    keys = []
    for index, child in enumerate(treedef.children()):
        own = [next(paths) for _ in range(child.num_leaves)]
        keys.append(own[0][0] if own and own[0] else index)
    return keys


def state_tree(items: Iterable[tuple[Path, Tree]]) -> Tree:
    """The tree of a State from paths and trees; what is a State in it becomes part of it."""
    flat = []
    for path, tree in items:
        inner = tree["state"] if isinstance(tree, dict) and "state" in tree else [[[], tree]]
        flat += [[[*map(_plain, path), *more], below] for more, below in inner]
    return {"state": flat}


def _plain(key: Any) -> str | int:
    key = plain_key(key)
    return key if type(key) in (str, int) else str(key)


def places(tree: Tree, path: Path = ()) -> Iterator[tuple[Path, str, int]]:
    """Every array in a tree: its path, ``"input"`` or ``"output"``, and its position."""
    for kind, content in (tree or {}).items():
        if kind in ARRAYS:
            yield path, kind, content
        elif kind in ("tuple", "list"):
            for index, part in enumerate(content):
                yield from places(part, (*path, index))
        elif kind in ("dict", "object"):
            for key, part in content:
                yield from places(part, (*path, key))
        elif kind == "state":
            for keys, part in content:
                yield from places(part, (*path, *keys))


def build(tree: Tree, arrays: Mapping[str, Sequence[Any]]) -> Any:
    """The pytree that a tree describes.

    Args:
      tree: the tree.
      arrays: the arrays for ``"input"`` and for ``"output"``, by position.
    """
    if tree is None:
        return None
    kind = next(iter(tree))
    content = tree[kind]
    if kind in ARRAYS:
        return arrays[kind][content]
    if kind in ("tuple", "list"):
        parts = [build(part, arrays) for part in content]
        return parts if kind == "list" else tuple(parts)
    if kind == "state":
        return state_from((tuple(path), build(part, arrays)) for path, part in content)
    return {key: build(part, arrays) for key, part in content}


def state_from(items: Iterable[tuple[Path, Any]]) -> nnx.State[Any, Any]:
    """A State from paths and values."""
    return nnx.from_flat_state(dict(items))


def check(tree: Tree, counts: Mapping[str, int]) -> None:
    """Makes sure that what came out of a file is a tree.

    Args:
      tree: what may be one.
      counts: how many arrays there are for ``"input"`` and for ``"output"``.

    Raises:
      ValueError: it is none.
    """
    if tree is None:
        return
    kind, content = next(iter(tree.items())) if isinstance(tree, dict) and tree else ("", None)
    if kind in ARRAYS and type(content) is int and 0 <= content < counts.get(kind, 0):
        return
    if kind in ("tuple", "list") and isinstance(content, list):
        parts = content
    elif kind in ("dict", "object", "state") and isinstance(content, list):
        keys = [key for key, _ in content]
        if not all(map(_is_path if kind == "state" else _is_key, keys)):
            raise ValueError(f"{keys!r:.100} are no keys of a tree")
        parts = [part for _, part in content]
    else:
        raise ValueError(f"{tree!r:.100} is no tree")
    for part in parts:
        check(part, counts)


def _is_key(key: Any) -> bool:
    return type(key) in (str, int)


def _is_path(path: Any) -> bool:
    return isinstance(path, list) and all(map(_is_key, path))


def struct(aval: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """The type of an array, with where it is laid out."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
