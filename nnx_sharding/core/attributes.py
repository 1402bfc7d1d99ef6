"""How the walk over a graph describes the attributes of modules and the metadata of Variables.

Most layers of a model have equal attributes: the same names, the same functions and sizes. So the
description of these (:class:`Described`) is made once. All Variables whose metadata are the same
objects share it, and so do all modules of one *form* (the class, the names of the attributes, and
which of them are data) whose static values are the same objects.

The functions are parts of a :class:`~.flattener.Flattener`, whose words they use:

    child        describes what an object holds in one place: ``LEAF`` for an array, the index of
                 an object, a static value (``Static``), or a container of these
    position     the place from which a guard can read a value again; ``UNRECORDED`` if there is
                 none. The flattener's recorder is told what is opened, and gives positions to the
                 parts. If the recorder is dropped (None), the graph gets no guard
    comparisons  one byte for each value that is opened, which says how a guard compares the value:
                 not at all (0), by value or by identity. If this is empty, it is not known yet, and
                 each child is recorded when it is described
    NodeForm     from ``_compat``: ``keys`` are the attributes in the order in which Flax walks,
                 ``names`` the same attributes in the order of the ``__dict__``, in which a guard
                 reads them. Attribute i of ``keys`` is number ``order[i]`` of ``names``.
                 ``is_static`` says which attributes are static whatever their values, and
                 ``may_be_data`` has the numbers of all other attributes
    Flattener    ``graph`` is False in tree mode. ``described`` has what was described, by key.
                 ``link_object`` records a link to an object and returns its index. ``static_child``
                 and ``pytree_child`` return the child for a value without arrays, and for any
                 pytree; ``pytree_child`` adds the arrays of the pytree to the leaves of the walk
    node_state   the child for Flax's record of how far a module is set up
    no_tree      the error for a class that is no pytree
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from .. import _compat
from .problems import no_tree
from .recording import UNRECORDED, comparison_of
from .snapshot import node_state
from .static_equality import Static
from .structure import LEAF, Child, NodeEntry

if TYPE_CHECKING:  # the flattener imports this module
    from .flattener import Flattener


class Described(NamedTuple):
    """A description of attributes or metadata that several modules or Variables share.

    The key of a description has the ids of the values that have to be the same objects, because
    values need not have a hash. The key of a module starts with the id of the form, and the key of
    a Variable with the names.
    """

    held: Sequence[Any]  # the objects whose ids are in the key, so that no other object gets them
    # For a module: one child for each attribute, in the order of ``form.keys``. For a Variable:
    # pairs of name and child, sorted by name.
    children: tuple[Any, ...]
    comparisons: bytes  # how a guard compares each value, in the order of the dict


def describe_node(flattener: Flattener, node: object, position: int) -> NodeEntry:
    """Returns the entry of a module; links the objects in it, and adds its own arrays.

    If another module of this form had the same static values, only attributes that may be data are
    described anew. Drops the flattener's recorder if a guard cannot read the module.

    Args:
      flattener: the walk.
      node: the module.
      position: where a guard can read the module again; ``UNRECORDED`` if nowhere.

    Raises:
      ValueError: the walk is in tree mode, and the class of the module is no pytree.
    """
    # Tree mode takes modules as pytrees, so their class has to be one.
    if not flattener.graph and not _compat.is_pytree_type(type(node)):
        raise no_tree(type(node))
    # ``values`` are in the order of ``form.keys``, and the values in ``dict_values`` in that of
    # ``form.names``. None: not all content is in the ``__dict__``, which a guard reads.
    form, values, dict_values = _compat.node_items(node, flattener.forms, flattener.no_tracers)
    if dict_values is None:
        flattener.recorder = None

    held = [form, *compress(values, form.is_static)]
    key = (*map(_compat.identity, held),)
    shared = flattener.described.get(key)

    positions: Sequence[int] = (UNRECORDED,) * len(values)  # in the order of ``form.names``
    if flattener.recorder is not None and dict_values is not None:
        comparisons = b"" if shared is None else shared.comparisons
        positions = flattener.recorder.open_node(position, form.names, dict_values, comparisons)

    if shared is None:
        children: list[Child] = [LEAF] * len(values)
        to_describe: Sequence[int] = range(len(values))
    else:  # the children of static attributes are shared
        children, to_describe = [*shared.children], form.may_be_data
    for i in to_describe:
        value_position = positions[form.order[i]]
        children[i] = _attribute_child(flattener, values[i], form.is_data[i], value_position)
    # A static attribute may be a link to an object. The flattener has to see each link, to tell
    # which objects are shared, so a module with such an attribute is always described anew.
    if shared is None and all(type(x) is Static for x in compress(children, form.is_static)):
        comparisons = _static_comparisons(form, children)
        flattener.described[key] = Described(held, tuple(children), comparisons)
    return NodeEntry(type(node), form.metadata, form.keys, tuple(children))


def _static_comparisons(form: _compat.NodeForm, children: Sequence[Child]) -> bytes:
    """Returns how a guard compares the static attributes of a module, in the order of its dict.

    The byte of an attribute that may be data is 0, because each module records it for itself.

    Args:
      children: one for each attribute, in the order of ``form.keys``.
    """
    comparisons = bytearray(len(children))
    for i, is_static in enumerate(form.is_static):
        if is_static:
            comparisons[form.order[i]] = comparison_of(children[i])
    return bytes(comparisons)


def _attribute_child(
    flattener: Flattener, value: object, is_data: bool | None, position: int
) -> Child:
    """Returns the child for the value of an attribute.

    Args:
      is_data: whether the attribute is data to Flax; None if the value decides.
      position: where a recorder can read the value again; ``UNRECORDED`` if nowhere.
    """
    if is_data is False:
        return flattener.static_child(value, position)
    if _compat.is_graph_object(value):
        return flattener.link_object(value, position)
    if _compat.is_node_state(value):  # Flax's record of how far a module is set up
        if flattener.recorder is not None:
            flattener.recorder.open_node_state(position, value)
        return node_state(_compat.node_flags(value))
    # Numbers and the like in a pytree are static, with two exceptions: in tree mode each leaf of
    # data is an array, and a number that is itself marked as data is an array to Flax.
    is_marked_leaf = is_data is True and jax.tree_util.all_leaves([value])
    all_leaves = not flattener.graph or is_marked_leaf
    return flattener.pytree_child(value, position, all_leaves=all_leaves)


def describe_metadata(
    flattener: Flattener, variable: object, position: int
) -> tuple[tuple[str, Child], ...]:
    """Returns pairs of name and child for the metadata of a Variable, sorted by name.

    Variables whose metadata are the same objects share the result.

    Args:
      flattener: the walk.
      variable: the Variable.
      position: where a recorder can read the Variable again; ``UNRECORDED`` if nowhere.
    """
    metadata = _compat.get_metadata(variable)
    names, values = (*metadata,), [*metadata.values()]
    key = (*names, *map(_compat.identity, values))
    shared = flattener.described.get(key)
    # The metadata of each Variable are recorded, even if the description is shared, because a guard
    # reads all of them.
    positions: Sequence[int] = (UNRECORDED,) * len(values)  # in the order of the dict
    if flattener.recorder is not None:
        comparisons = b"" if shared is None else shared.comparisons
        positions = flattener.recorder.open_metadata(position, names, values, comparisons)
    if shared is not None:
        return shared.children
    child_of: dict[str, Child] = {}
    items = zip(names, values, positions, strict=True)
    for name, value, value_position in sorted(items, key=lambda item: item[0]):
        child_of[name] = flattener.static_child(value, value_position)
    children = tuple(child_of.items())
    # A child may be a link to an object. The flattener has to see each link, to tell which objects
    # are shared, so such metadata are described anew for each Variable.
    if all(type(child) is Static for child in child_of.values()):
        comparisons = bytes(comparison_of(child_of[name]) for name in names)
        flattener.described[key] = Described(values, children, comparisons)
    return children
