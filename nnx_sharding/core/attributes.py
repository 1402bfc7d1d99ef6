"""How the walk over a graph describes the attributes of modules and the metadata of Variables.

Most layers of a model have equal ones: the same names, the same functions and sizes. So what
describes these is made once (:class:`Described`), and shared by all Variables whose metadata are
the same objects, and by all modules of one *form* (the class, with the names of the attributes, and
which of them are data) whose static values are the same objects.

The functions are parts of a :class:`~.flattener.Flattener`, whose words they use:

    child        describes what an object holds in one place: ``LEAF`` for an array, the index of
                 an object, a static value (``Static``), or a container of these
    position     where a guard can read a value again; ``UNRECORDED`` if nowhere. The flattener's
                 recorder is told what is opened, and gives positions to its parts. If it is
                 dropped (None), the graph gets no guard
    comparisons  one byte for each value that is opened: how a guard compares it, not at all (0), by
                 value or by identity. Empty if that is not yet known: then each child is recorded
                 when it is described
    NodeForm     of ``_compat``: ``keys`` are the attributes in the order in which Flax walks,
                 ``names`` the same in the order of the ``__dict__``, in which a guard reads them.
                 Attribute i of ``keys`` is number ``order[i]`` of ``names``. ``is_static`` says
                 which are static whatever their values; ``others`` has the numbers of the rest
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

if TYPE_CHECKING:  # it calls the functions below
    from .flattener import Flattener


class Described(NamedTuple):
    """What describes the attributes of a module, or the metadata of a Variable, for equal ones.

    Its key has the ids of the values that have to be the same objects, since values need not have a
    hash: after that of the form for a module, after the names for a Variable.
    """

    held: Sequence[Any]  # what has its id in the key, kept alive so that no other object gets it
    # Of a module, one child for each attribute, in the order of ``form.keys``. Of a Variable, pairs
    # of name and child, sorted by name.
    children: tuple[Any, ...]
    comparisons: bytes  # how a guard compares each value, in the order of the dict


def describe_node(flattener: Flattener, node: object, position: int) -> NodeEntry:
    """Returns the entry of a module; links the objects in it, and adds its own arrays.

    Describes only those attributes anew that may be data, if another module of this form had the
    same static values. Drops the flattener's recorder if a guard cannot read the module.

    Args:
      flattener: the walk.
      node: the module.
      position: where a guard can read it again; ``UNRECORDED`` if nowhere.
    """
    # Tree mode takes modules as pytrees, so their class has to be one.
    if not flattener.graph and not _compat.is_pytree_type(type(node)):
        raise no_tree(type(node))
    # ``values`` are in the order of ``form.keys``; ``in_dict`` has them in that of ``form.names``.
    form, values, in_dict = _compat.node_items(node, flattener.forms, flattener.no_tracers)
    if in_dict is None:
        flattener.recorder = None  # not all content is in the ``__dict__``, which a guard reads

    held = [form, *compress(values, form.is_static)]
    key = (*map(_compat.identity, held),)
    known = flattener.described.get(key)

    positions: Sequence[int] = (UNRECORDED,) * len(values)  # in the order of ``form.names``
    if flattener.recorder is not None and in_dict is not None:
        comparisons = b"" if known is None else known.comparisons
        positions = flattener.recorder.open_node(position, form.names, in_dict, comparisons)

    if known is None:
        children: list[Child] = [LEAF] * len(values)
        to_describe: Sequence[int] = range(len(values))
    else:  # the children of static attributes are those of the other module
        children, to_describe = [*known.children], form.others
    for i in to_describe:
        own_position = positions[form.order[i]]
        children[i] = _attribute_child(flattener, values[i], form.is_data[i], own_position)
    # A static attribute may be a link to an object. The flattener has to see each link, to tell
    # which objects are shared, so then each module is described anew.
    if known is None and all(type(x) is Static for x in compress(children, form.is_static)):
        comparisons = _static_comparisons(form, children)
        flattener.described[key] = Described(held, tuple(children), comparisons)
    return NodeEntry(type(node), form.metadata, form.keys, tuple(children))


def _static_comparisons(form: _compat.NodeForm, children: Sequence[Child]) -> bytes:
    """Returns how a guard compares the static attributes of a module, in the order of its dict.

    What may be data, each module records for itself, so it is 0 here.

    Args:
      form: the form of the module.
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
      flattener: the walk.
      value: the value.
      is_data: whether Flax has it as data; None where the value decides.
      position: where a recorder can read it again; ``UNRECORDED`` if nowhere.
    """
    if is_data is False:  # static, whatever it is
        return flattener.static_child(value, position)
    if _compat.is_graph_object(value):
        return flattener.link_object(value, position)
    if _compat.is_node_state(value):  # Flax's record of how far a module is set up
        if flattener.recorder is not None:
            flattener.recorder.open_node_state(position, value)
        return node_state(_compat.node_flags(value))
    # Numbers and the like in a pytree are static, with two exceptions: in tree mode each leaf of
    # data is an array, and Flax makes an array of a number that is marked as data itself.
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
      position: where a recorder can read it again; ``UNRECORDED`` if nowhere.
    """
    metadata = _compat.get_metadata(variable)
    names, values = (*metadata,), [*metadata.values()]
    key = (*names, *map(_compat.identity, values))
    known = flattener.described.get(key)
    # Each Variable is recorded, also one whose metadata are known: a guard reads it, too.
    positions: Sequence[int] = (UNRECORDED,) * len(values)  # in the order of the dict
    if flattener.recorder is not None:
        comparisons = b"" if known is None else known.comparisons
        positions = flattener.recorder.open_metadata(position, names, values, comparisons)
    if known is not None:
        return known.children
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
