"""Treedefs of JAX: the paths of their leaves, and the auxiliary data of their nodes.

A treedef is itself a tree. Its ``node_data()`` has the class of a container, and the *auxiliary
data*: what the class returns from its flatten function besides children, such as the keys of a
dict. ``node_data()`` is None for a leaf. ``children()`` are the treedefs of the children.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import jax

from .. import _compat
from ..specs.paths import Path, dict_key, path_key

PyTreeDef: TypeAlias = Any  # jax.tree_util.PyTreeDef, which has no type stubs


def container_keys(treedef: PyTreeDef) -> tuple[Path, ...]:
    """Returns the path of each leaf of a pytree, in the keys that NNX uses.

    For ``{"a": [*, *]}``, these are ``(("a", 0), ("a", 1))``. If JAX does not show the keys of a
    class, positions take the place of keys.

    The result is not cached, because treedefs hold the user's data, which a cache would keep alive
    and compare.
    """
    paths: list[Path] = []
    # No recursion, which would build the path of a leaf once for each level above the leaf.
    stack: list[tuple[Path, PyTreeDef]] = [((), treedef)]
    while stack:
        path, node = stack.pop()
        data = node.node_data()
        if data is None:  # the node is a leaf
            paths.append(path)
            continue
        children = node.children()
        pairs = zip(_child_keys(data, len(children)), children, strict=True)
        # Reversed, so that the first child is on top of the stack.
        stack += [((*path, key), child) for key, child in pairs][::-1]
    return tuple(paths)


def _child_keys(data: tuple[type, Any], count: int) -> Iterable[Any]:
    """Returns the key of each child of a container, in the keys that NNX uses.

    Args:
      data: the class and the auxiliary data of the container.
    """
    node_type, aux = data
    if node_type is dict:  # the auxiliary data are the keys
        return map(dict_key, aux)
    if node_type in (tuple, list) or not count:
        return range(count)
    # JAX shows the keys of other classes only for an instance, so one is made with Ellipsis as each
    # child.
    leaf = jax.tree_util.tree_structure(...)
    registry = jax.tree_util.default_registry
    one_level = jax.tree_util.PyTreeDef.from_node_data_and_children(registry, data, [leaf] * count)
    try:
        instance = jax.tree_util.tree_unflatten(one_level, [...] * count)
        leaves, _ = jax.tree_util.tree_flatten_with_path(instance)
    except Exception:  # the constructor of a class may check its children
        return range(count)
    keys = [path_key(path[0]) for path, _ in leaves if path]
    # Positions are used if children have equal keys, or if the class has other children by now.
    return keys if len(keys) == len(set(keys)) == count else range(count)


def is_leaf_treedef(treedef: PyTreeDef) -> bool:
    """Whether a pytree is a single leaf. An empty container also has one node, but no leaf."""
    return bool(treedef.num_nodes == 1 and treedef.num_leaves == 1)


def has_builtin_containers(treedef: PyTreeDef) -> bool:
    """Whether JAX builds all containers of a pytree without any Python code."""
    return all(cls in (tuple, list, dict, type(None)) for cls, _ in containers_of(treedef))


def containers_of(treedef: PyTreeDef) -> Iterator[tuple[type, Any]]:
    """Yields the class and the auxiliary data of each container, a container before its children.

    No recursion, because each item would pass through a generator for each level above it.
    """
    stack = [treedef]
    while stack:
        node = stack.pop()
        data = node.node_data()
        if data is not None:  # None for a leaf
            yield data
            stack += reversed(node.children())  # reversed: the first child is the next node


def aux_of(treedef: PyTreeDef) -> Iterator[Any]:
    """Yields the auxiliary data of the nodes of a pytree, from the root on, except plain keys.

    Auxiliary data is what a class returns from its flatten function besides children. JAX compares
    it by ``==`` only, so 1 and True are equal. The keys of dicts and States are left out.
    """
    for cls, aux in containers_of(treedef):
        if _compat.has_aux(cls, aux):
            yield aux


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
