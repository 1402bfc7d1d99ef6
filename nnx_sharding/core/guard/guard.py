"""A guard: recognizes arguments that a function was called with before, without flattening them.

A guard compares everything on which a structure depends: names in order, types, statics, and which
objects are shared. Objects are compared by their ids, so a guard keeps no model alive. Another
object may get the id of a dead one. This is safe for objects with content, because a guard compares
the content as well, and for objects without content, because a weak reference drops the guard when
one of them is collected.

A mismatch, or anything unexpected, means "changed": the call then flattens. So a guard may be too
strict, which costs time, but never too lax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jax.sharding import Sharding

from ... import _compat
from ...specs.types import AnyMesh
from ..flatten import Flat
from ..plan import Plan
from ..structure import Structure
from ..transform import Dependencies
from .recipe import Recipe
from .walk import Walk


class Guard(NamedTuple):
    """The facts that a call needs about arguments that a function was called with before.

    The walk says whether the arguments are the same as then. All other fields hold for as long as
    the walk finds no change. ``call.c`` reads the fields by their position.
    """

    walk: Walk
    names: tuple[str, ...]  # the names of the keyword arguments
    plan: Plan
    key: Dependencies  # what the plan depends on besides the graph
    donates: bool  # whether the program deletes some of the arrays that it is given
    # Returns the mesh in context. None if the plan does not depend on the mesh in context.
    context_of: Callable[[], AnyMesh | None] | None
    context: AnyMesh | None  # the mesh in context that the plan was made for
    # The next four fields have an item for each array that has to be placed or whose shape matters.
    slots: bytes  # the slots of these arrays, as 32-bit integers
    shardings: list[Sharding | None]  # targets; None for an array that is not placed
    avals: list[Any]  # the types of the arrays in JAX; the list is empty if shapes do not matter
    # For each array: None, then a weak reference to the first array that fitted; False once calls
    # were found to replace the array, because the reference is then of no use.
    known: list[Any]
    references: tuple[Any, ...]  # weak references whose callbacks drop the guard
    execute: Callable[..., Any] | None = None  # runs the program; None until the guard has held


def check(walk: Walk, structure: Structure, arguments: tuple[Any, ...]) -> Flat | None:
    """Returns the graph as ``flatten`` would, with this structure; None if it may have changed.

    Args:
      walk: how the graph was read when it had this structure.
      structure: the structure that the graph had when the walk was recorded.
      arguments: the graph: the arguments of a call, those by keyword last.
    """
    try:
        followed = walk.follow(arguments)
    except Exception:  # an attribute is missing or a comparison raises, so the graph has changed
        return None
    if followed is None:
        return None
    leaves, objects = followed
    # ``updatable=True`` is safe because the walk has found each object in the trace in which the
    # guard was made, and because guards are made and tried outside of traces only: that trace is
    # still the current one.
    return Flat(structure, leaves, objects, updatable=True)


def match(
    walk: Walk, structure: Structure, arguments: tuple[Any, ...]
) -> tuple[Flat, Recipe] | None:
    """Returns another graph of this structure, and a recipe for it; None if it differs.

    The recipe has the steps of ``walk`` and the pins of the other graph.

    Args:
      walk: how a graph that is built alike was read.
      structure: its structure.
      arguments: the other graph: the arguments of a call, those by keyword last.
    """
    try:
        matched = walk.match(arguments)
    except Exception:  # an attribute is missing or a comparison raises, so the graphs differ
        return None
    if matched is None:
        return None
    # The arrays and objects of the other graph, its pins (``statics`` and ``ids``), and the traces
    # in which its objects were made.
    leaves, objects, statics, ids, traces = matched
    # ``walk.match`` does not compare traces, because they may differ between graphs. A call may
    # only change objects of the current trace.
    if not _compat.are_current(traces):
        return None
    recipe = walk.recipe._replace(statics=statics, ids=ids)
    return Flat(structure, leaves, objects, updatable=True), recipe
