"""Static objects and what they hold, as a part of flattening."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING

from .. import _compat
from .recording import NOWHERE
from .static_equality import Static, content_of
from .static_parts import StaticKind, forget_cached, is_told_apart
from .structure import Child, StaticObject

if TYPE_CHECKING:  # flattening calls the functions below
    from .flatten import Flattener


def describe_static(flattener: Flattener, index: int, obj: object, at: int) -> StaticObject | None:
    """The entry of a static object; ``at`` is its position for a guard. None if it shows nothing.

    At the end of a trace, what ``cached_property`` has stored meanwhile is deleted: it may be
    traced, and follows from the rest.
    """
    if flattener.snapshot is not None:
        forget_cached(obj, flattener.snapshot.attributes_of(index))
    content = content_of(obj)
    if content is None:  # a reference, which is no static
        return None
    is_held = flattener.holds(obj)
    if is_held:
        flattener.origins[index] = obj
    # Parts that are equal do not make these the same, so a trace is only for this one object.
    identity = Static(obj, is_held) if is_told_apart(type(obj)) else None
    if flattener.recorder is not None and identity is not None:
        flattener.recorder.fix(index, obj)
    kind, parts = content
    return StaticObject(kind, describe_parts(flattener, obj, kind, parts, at), identity)


def describe_parts(
    flattener: Flattener, value: object, kind: StaticKind, parts: Sequence[object], at: int
) -> tuple[Child, ...]:
    """The children for the parts of a static object."""
    places: Iterable[int] = repeat(NOWHERE)
    if flattener.recorder is not None:
        places = flattener.recorder.open_static(at, value, kind, parts)
    return tuple(map(flattener.static, parts, places))


def is_linked(flattener: Flattener, value: object) -> bool:
    """Whether something in a static place is a part of the graph: a module without arrays is.

    One with arrays is a part only if it is also met as data; else it stays hidden from the graph.
    """
    if not _compat.is_graph_object(value):
        return False
    linked = _compat.identity(value) in flattener.shown or not _compat.holds_arrays(value)
    if not linked:
        flattener.hidden.add(_compat.identity(value))
    return linked
