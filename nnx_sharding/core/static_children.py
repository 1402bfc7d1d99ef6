"""How the walk over a graph describes static values: in places that hold no arrays.

A static value is described by one of these children (``static_equality.py`` has the rule):

    compared by value, or by identity alone       a ``Static``
    compared by content, and cannot change        a ``StaticObject``, with children for its parts
    compared by content, and can change           the index of an entry, which is a ``StaticObject``
    a module without arrays, or also met as data  the index of its entry, as if it were data

The functions are parts of a :class:`~.flattener.Flattener`, which gives values their indices, keeps
what was described, and tells a recorder at which *position* a guard can read each value again.

From the flattener:

    link_object     records a link to an object that has an entry, and returns its index; an object
                    that is met first gets the next index, and is described later
    static_child    the child for a value: a kept one, an index, or that of `new_static_child`
    is_kept_alive   whether the structure may keep alive a value that is compared by identity
    statics         the child of each value that was met, and the value, by the value's id
    origins         the static objects that the structure keeps alive, by index
    snapshot        the arguments before a call; None when the arguments themselves are flattened
    recorder        is told what is read; None if no guard will read it again
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import _compat
from .recording import ALL_UNRECORDED, UNRECORDED
from .static_equality import Static, content_of
from .static_parts import Copying, StaticKind, forget_cached
from .structure import Child, StaticObject

if TYPE_CHECKING:  # the flattener imports this module
    from .flattener import Flattener


def new_static_child(flattener: Flattener, value: object, position: int) -> Child:
    """Returns the child for a static value that a walk meets first, and keeps it for later links.

    The cases are those of the table above.

    Args:
      flattener: the walk. ``flattener.statics`` has the child of each value that was met, by id.
      value: the value.
      position: where a recorder can read the value again; ``UNRECORDED`` if nowhere.
    """
    static = Static.of(value, hold=flattener.is_kept_alive(value))
    content = content_of(value) if static.by_identity else None
    if content is None:  # the value is not compared by content
        if _is_part_of_graph(flattener, value):
            return flattener.link_object(value, position)
        # The value is compared by value, or by identity alone.
        flattener.statics[_compat.identity(value)] = static, value
        return static
    kind, parts = content
    if kind.copying is not Copying.FIXED:  # the object can change, so it gets an entry
        return flattener.link_object(value, position)
    child = StaticObject(kind, _children(flattener, value, kind, parts, position))
    # A guard compares the parts of this value in each place where the value is. So a recorder has
    # to see the parts each time, and the child is kept only if nothing is recorded.
    if position == UNRECORDED:
        flattener.statics[_compat.identity(value)] = child, value
    return child


def _is_part_of_graph(flattener: Flattener, value: object) -> bool:
    """Whether a module in a static place is an object of the graph, so that the place links to it.

    A module that holds arrays, at any depth, is an object of the graph only if it is data elsewhere
    as well (``also_data``). The walk may find that out later. So a module for which this returns
    False is added to ``left_out``. If the walk meets such a module as data, `flatten` starts again
    with the module in ``also_data``.
    """
    if not _compat.is_graph_object(value):
        return False
    key = _compat.identity(value)
    is_part = key in flattener.also_data or not _compat.holds_arrays(value)
    if not is_part:
        flattener.left_out.add(key)
    return is_part


def describe_static(
    flattener: Flattener, index: int, obj: object, position: int
) -> StaticObject | None:
    """Returns the entry of an object that can change, such as a dict of settings; None for a ref.

    After a call, this first deletes the values of each ``cached_property`` that the function has
    read.

    Args:
      flattener: the walk.
      index: the index of the object in the table.
      obj: the object.
      position: where a recorder can read the object again; ``UNRECORDED`` if nowhere.
    """
    # A snapshot means that the graph is flattened after a call. If the function has read a
    # cached_property, its value is now an attribute, and may be a tracer. Python computes the value
    # again when it is needed. Values from before the call stay.
    if flattener.snapshot is not None:
        forget_cached(obj, flattener.snapshot.attributes_of(index))
    content = content_of(obj)
    if content is None:  # a ref, whose content JAX keeps
        return None
    is_kept_alive = flattener.is_kept_alive(obj)
    if is_kept_alive:
        flattener.origins[index] = obj  # `unflatten` uses the object again if it is unchanged
    kind, parts = content
    identity = None
    if kind.copying is Copying.UNIQUE:
        # Equal parts do not make two such objects equal, so a trace is only for this object, and a
        # guard compares the object itself as well.
        identity = Static(obj, is_kept_alive)
        if flattener.recorder is not None:
            flattener.recorder.pin_object(index, obj)
    return StaticObject(kind, _children(flattener, obj, kind, parts, position), identity)


def _children(
    flattener: Flattener, obj: object, kind: StaticKind, parts: Sequence[object], position: int
) -> tuple[Child, ...]:
    """Returns the children for the parts of a static object: its items, then its attributes.

    Args:
      position: where a recorder can read the object again; ``UNRECORDED`` if nowhere.
    """
    # One position for each part; without a recorder, this is `UNRECORDED` without end.
    positions = ALL_UNRECORDED
    if flattener.recorder is not None:
        positions = flattener.recorder.open_static(position, obj, kind, parts)
    return tuple(map(flattener.static_child, parts, positions))
