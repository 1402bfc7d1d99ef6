"""Treedefs of JAX: the paths of their leaves, and the auxiliary data of their nodes.

A treedef is itself a tree. Its ``node_data()`` is the class of a container, with what the class
returns from its flatten function besides children: the *auxiliary data*, such as the keys of a
dict. It is None for a leaf. ``children()`` are the treedefs of the children.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import jax

from .. import _compat
from ..specs.paths import Path, path_key

PyTreeDef: TypeAlias = Any  # jax.tree_util.PyTreeDef, which has no type stubs


def container_keys(treedef: PyTreeDef) -> tuple[Path, ...]:
    """Returns the path of each leaf of a pytree, in the keys that NNX uses.

    ``{"a": [*, *]}`` has ``(("a", 0), ("a", 1))``. A class whose keys JAX does not show has
    positions instead.

    Not cached: treedefs hold the user's data, which a cache would keep alive and compare.
    """
    count = treedef.num_leaves
    if not count:
        return ()
    if is_leaf_treedef(treedef):
        return ((),)
    node_type, data = treedef.node_data()
    if node_type in (tuple, list, dict):  # quicker than the general way below
        children = treedef.children()
        keys: Iterable[Any] = range(len(children))
        if data:  # the keys of a dict
            keys = [path_key(jax.tree_util.DictKey(key)) for key in data]
        paths_below = zip(keys, map(container_keys, children), strict=True)
        return tuple((key, *path) for key, paths in paths_below for path in paths)
    # JAX shows the keys of other node types only for a tree, which is made with other leaves.
    try:
        tree = jax.tree_util.tree_unflatten(treedef, [...] * count)  # with Ellipsis as its leaves
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    except Exception:  # a class whose constructor checks its children; then positions are used
        leaves = []
    paths = tuple(tuple(map(path_key, path)) for path, _ in leaves)
    if len(set(paths)) != count:  # such a class, or one whose children have equal keys
        return tuple((index,) for index in range(count))
    return paths


def is_leaf_treedef(treedef: PyTreeDef) -> bool:
    """Whether a pytree is a single leaf. An empty container has one node too, but no leaf."""
    return bool(treedef.num_nodes == 1 and treedef.num_leaves == 1)


def has_builtin_containers(treedef: PyTreeDef) -> bool:
    """Whether JAX builds all containers of a pytree without any Python code."""
    data = treedef.node_data()  # (class, keys or other data) of a container; None for a leaf
    is_builtin = data is None or data[0] in (tuple, list, dict, type(None))
    return is_builtin and all(map(has_builtin_containers, treedef.children()))


def node_types(treedef: PyTreeDef) -> set[type]:
    """Returns the classes of the containers of a pytree."""
    types = set[type]()
    stack = [treedef]
    while stack:
        node = stack.pop()
        if (data := node.node_data()) is not None:  # None for a leaf
            node_type, _ = data
            types.add(node_type)
            stack += node.children()
    return types


def aux_of(treedef: PyTreeDef) -> Iterator[Any]:
    """Yields the auxiliary data of the nodes of a pytree, from the root on, except plain keys.

    That is what a class returns from its flatten function besides children. JAX compares it by
    ``==`` only, so that 1 and True are equal. The keys of dicts and States are left out.
    """
    stack = [treedef]
    while stack:
        node = stack.pop()
        data = node.node_data()
        if data is None:  # a leaf
            continue
        node_type, aux = data
        if _compat.has_aux(node_type, aux):
            yield aux
        stack += reversed(node.children())  # so that the first child is the next node


def with_aux(treedef: PyTreeDef, aux: Iterator[Any]) -> PyTreeDef:
    """Returns the same tree structure with other auxiliary data: inverts :func:`aux_of`.

    Args:
      treedef: the tree structure.
      aux: the new data, one for each that ``aux_of`` yields for ``treedef``, in the same order: a
        node before its children.
    """
    data = treedef.node_data()
    if data is None:  # a leaf
        return treedef
    node_type, old_aux = data
    if _compat.has_aux(node_type, old_aux):  # the keys of a dict stay as they are
        data = node_type, next(aux)
    children = [with_aux(child, aux) for child in treedef.children()]
    return jax.tree_util.PyTreeDef.from_node_data_and_children(
        jax.tree_util.default_registry, data, children
    )
