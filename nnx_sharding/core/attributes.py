"""How the walk over a graph describes the attributes of modules and the metadata of Variables.

Most layers of a model have equal ones: the same names, the same functions and sizes. So what
describes these is made once, and shared by all modules of one *form* (the class, with the names of
the attributes, and which of them are data) whose static values are the same objects.

The functions are parts of a :class:`~.flattener.Flattener`, whose words they use: a *child*
describes what an object holds in one place, and a *position* is where a recorder can read it again,
for a guard.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence
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


class DescribedNode(NamedTuple):
    """The attributes of a module, for others of its form that have the same static values."""

    form: _compat.NodeForm  # held because its id is the key
    statics: Sequence[Any]  # the values that have to be the same
    children: Sequence[Child]  # one for each attribute, in the order of ``form.keys``
    comparisons: bytes  # how a guard compares each value, in the order of the ``__dict__``


class DescribedMetadata(NamedTuple):
    """The metadata of a Variable, for others whose metadata are the same objects."""

    values: Sequence[Any]  # held because their ids are the key
    children: tuple[tuple[str, Child], ...]  # pairs of name and child, sorted by name
    comparisons: bytes  # how a guard compares each value, in the order of the dict


@dataclasses.dataclass(eq=False)
class Described:
    """What a walk has described so far, for layers that are equal in this."""

    forms: dict[Any, _compat.NodeForm] = dataclasses.field(default_factory=dict)
    nodes: dict[int, DescribedNode] = dataclasses.field(default_factory=dict)  # by id of the form
    # By the names, then the ids of the values.
    metadata: dict[tuple[Any, ...], DescribedMetadata] = dataclasses.field(default_factory=dict)


def describe_node(flattener: Flattener, node: object, position: int) -> NodeEntry:
    """Returns the entry of a module; links the objects in it, and adds its own arrays.

    Args:
      flattener: the walk.
      node: the module.
      position: where a recorder can read it again; ``UNRECORDED`` if nowhere.
    """
    if not flattener.graph and not _compat.is_pytree_type(type(node)):
        raise no_tree(type(node))
    # ``values`` are in the order of ``form.keys``, in which Flax walks; ``in_dict`` has them in the
    # order of the ``__dict__``, in which a guard reads them: value i is there at ``form.order[i]``.
    forms, no_tracers = flattener.described.forms, flattener.no_tracers
    form, values, in_dict = _compat.node_items(node, forms, no_tracers)
    if in_dict is None:
        flattener.recorder = None  # not all content is in the ``__dict__``, which a guard reads
    statics = [*compress(values, form.is_static)]
    known = flattener.described.nodes.get(_compat.identity(form))
    if known is not None and not all(map(operator.is_, statics, known.statics)):
        known = None
    positions: Sequence[int] = (UNRECORDED,) * len(values)  # in the order of the ``__dict__``
    if flattener.recorder is not None:
        comparisons = b"" if known is None else known.comparisons  # empty: not yet known
        content = in_dict or values
        positions = flattener.recorder.open_node(position, form.names, content, comparisons)
    children: list[Child] = [LEAF] * len(values)
    to_describe: Iterable[int] = range(len(values))
    if known is not None:  # only the attributes that may be data are others
        children, to_describe = [*known.children], form.others
    for i in to_describe:
        in_place = positions[form.order[i]]
        children[i] = _attribute_child(flattener, values[i], form.is_data[i], in_place)
    if known is None:
        _share_static_children(flattener.described, form, statics, children)
    return NodeEntry(type(node), form.metadata, form.keys, tuple(children))


def _share_static_children(
    described: Described, form: _compat.NodeForm, statics: Sequence[Any], children: Sequence[Child]
) -> None:
    """Keeps the children of a module, for others of its form with the same static values.

    Args:
      described: gets them.
      form: the form of the module.
      statics: its static values.
      children: one for each attribute, in the order of ``form.keys``.
    """
    # Links from static attributes have to be counted at each module, so these are not shared.
    if not all(type(child) is Static for child in compress(children, form.is_static)):
        return
    comparisons = bytearray(len(children))  # in the order of the ``__dict__``
    for i in compress(range(len(children)), form.is_static):
        comparisons[form.order[i]] = comparison_of(children[i])
    known = DescribedNode(form, statics, children, bytes(comparisons))
    described.nodes[_compat.identity(form)] = known


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
    if is_data is False:
        return flattener.static_child(value, position)
    if _compat.is_graph_object(value):
        return flattener.link_object(value, position)
    if _compat.is_node_state(value):  # Flax's record of how far a module is set up
        if flattener.recorder is not None:
            flattener.recorder.open_node_state(position, value)
        return node_state(_compat.node_flags(value))
    # Flax turns any value under nnx.data into an array.
    all_leaves = not flattener.graph or (bool(is_data) and jax.tree_util.all_leaves([value]))
    return flattener.pytree_child(value, position, all_leaves=all_leaves)


def describe_metadata(
    flattener: Flattener, variable: object, position: int
) -> tuple[tuple[str, Child], ...]:
    """Returns pairs of name and child for the metadata of a Variable, sorted by name.

    Variables with the same values share the result.

    Args:
      flattener: the walk.
      variable: the Variable.
      position: where a recorder can read it again; ``UNRECORDED`` if nowhere.
    """
    metadata = _compat.get_metadata(variable)
    names, values = (*metadata,), [*metadata.values()]
    key = (*names, *map(_compat.identity, values))
    known = flattener.described.metadata.get(key)
    positions: Sequence[int] = (UNRECORDED,) * len(values)  # in the order of the dict
    if flattener.recorder is not None:
        comparisons = b"" if known is None else known.comparisons  # empty: not yet known
        positions = flattener.recorder.open_metadata(position, names, values, comparisons)
    if known is not None:
        return known.children
    child_of: dict[str, Child] = {}
    for i in sorted(range(len(names)), key=names.__getitem__):  # the order of sorted names
        child_of[names[i]] = flattener.static_child(values[i], positions[i])
    children = tuple(child_of.items())
    # Links to objects have to be counted at each Variable, so these are not shared.
    if all(type(child) is Static for child in child_of.values()):
        comparisons = bytes(comparison_of(child_of[name]) for name in names)
        flattener.described.metadata[key] = DescribedMetadata(values, children, comparisons)
    return children
