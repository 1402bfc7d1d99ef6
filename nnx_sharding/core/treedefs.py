"""Treedefs of JAX: the paths of their leaves, and the auxiliary data of their nodes.

A treedef is itself a tree. Its ``node_data()`` has the class of a container, and the *auxiliary
data*: what the class returns from its flatten function besides children, such as the keys of a
dict. ``node_data()`` is None for a leaf. ``children()`` are the treedefs of the children.

From other modules:

    has_aux    whether a node has auxiliary data other than plain keys, as of a dict or State
    path_key   a key of JAX's key paths as NNX writes it: an index, a dict key, or a name
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

    For ``{"a": [*, *]}``, these are ``(("a", 0), ("a", 1))``. If JAX does not show the keys of a
    class, positions take the place of keys.

    The result is not cached, because treedefs hold the user's data, which a cache would keep alive
    and compare.
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
        paths_by_key = zip(keys, map(container_keys, children), strict=True)
        return tuple((key, *path) for key, paths in paths_by_key for path in paths)
    # JAX shows the keys of other node types only for a tree, so one is made with Ellipsis as each
    # leaf.
    try:
        tree = jax.tree_util.tree_unflatten(treedef, [...] * count)
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    except Exception:  # the constructor of a class may check its children
        leaves = []
    paths = tuple(tuple(map(path_key, path)) for path, _ in leaves)
    # Positions are used if the tree could not be made, or if children have equal keys.
    if len(set(paths)) != count:
        return tuple((index,) for index in range(count))
    return paths


def is_leaf_treedef(treedef: PyTreeDef) -> bool:
    """Whether a pytree is a single leaf. An empty container also has one node, but no leaf."""
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
        data = node.node_data()
        if data is not None:  # None for a leaf
            node_type, _ = data
            types.add(node_type)
            stack += node.children()
    return types


def aux_of(treedef: PyTreeDef) -> Iterator[Any]:
    """Yields the auxiliary data of the nodes of a pytree, from the root on, except plain keys.

    Auxiliary data is what a class returns from its flatten function besides children. JAX compares
    it by ``==`` only, so 1 and True are equal. The keys of dicts and States are left out.
    """
    stack = [treedef]
    while stack:
        node = stack.pop()
        data = node.node_data()
        if data is None:  # the node is a leaf
            continue
        node_type, aux = data
        if _compat.has_aux(node_type, aux):
            yield aux
        stack += reversed(node.children())  # reversed: the first child is the next node


def with_aux(treedef: PyTreeDef, aux: Iterator[Any]) -> PyTreeDef:
    """Returns the same tree structure with other auxiliary data: inverts :func:`aux_of`.

    Args:
      treedef: the tree structure.
      aux: the new data, one item for each that ``aux_of`` yields for ``treedef``, in the same
        order: a node before its children.
    """
    data = treedef.node_data()
    if data is None:  # the treedef describes a leaf
        return treedef
    node_type, old_aux = data
    if _compat.has_aux(node_type, old_aux):  # the keys of a dict stay as they are
        data = node_type, next(aux)
    children = [with_aux(child, aux) for child in treedef.children()]
    return jax.tree_util.PyTreeDef.from_node_data_and_children(
        jax.tree_util.default_registry, data, children
    )
