"""A guard: recognizes arguments that a function was called with before, without flattening them.

It compares everything on which a structure depends: names in order, types, statics, and which
objects are shared. For these, ids are enough, so a guard keeps no model alive. Another object may
get the id of a dead one, but then its content is compared as well; objects without content drop the
guard when they are collected.

A mismatch, or anything unexpected, means "changed": the call then flattens. So a guard may be too
strict, which costs time, but never too lax.

From other modules:

    Recipe   how to read a graph again (its steps), and the *pins*, what must be there: ``statics``,
             values that are compared by ``==`` and type, and ``ids``, those of all objects
    Walk     follows a recipe. ``follow`` accepts the recorded graph only, ``match`` also another
             one that is built alike; both compare all but the arrays
    Flat     a graph as ``flatten`` returns it: its structure, arrays and objects. ``updatable``
             says that all objects belong to the current trace, so that a call may change them
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
    """What a call needs to know of arguments that a function was called with before.

    The walk says whether they are the same as then, and the rest follows from that. ``call.c``
    reads the fields by their position.
    """

    walk: Walk
    names: tuple[str, ...]  # of the keyword arguments
    plan: Plan
    key: Dependencies  # what the plan depends on besides the graph
    donates: bool  # whether the program deletes some of the arrays that it is given
    # returns the mesh in context; None if it does not matter
    context_of: Callable[[], AnyMesh | None] | None
    context: AnyMesh | None  # that mesh
    # Of the arrays that have to be placed, or whose shapes matter:
    slots: bytes  # as 32-bit integers
    shardings: list[Sharding | None]  # None for arrays that are not placed
    avals: list[Any]  # empty if shapes do not matter
    known: list[Any]  # weak references to arrays that were found to fit
    references: tuple[Any, ...]  # weak ones, whose callbacks end the guard
    execute: Callable[..., Any] | None = None  # runs the program; None until the guard has held


def check(walk: Walk, structure: Structure, arguments: tuple[Any, ...]) -> Flat | None:
    """Returns the graph as ``flatten`` would, with this structure; None if it may have changed.

    Args:
      walk: how the graph was read when it had this structure.
      structure: the structure then.
      arguments: the graph: the arguments of a call, those by keyword last.
    """
    try:
        followed = walk.follow(arguments)
    except Exception:  # a missing attribute or a comparison that raises is a change
        return None
    if followed is None:
        return None
    leaves, objects = followed
    # The walk compares the trace that each object belongs to. Guards are made and tried outside of
    # traces only, so it is still the current one.
    return Flat(structure, leaves, objects, updatable=True)


def match(
    walk: Walk, structure: Structure, arguments: tuple[Any, ...]
) -> tuple[Flat, Recipe] | None:
    """Returns another graph of this structure, with a recipe of its own; None if it differs.

    The recipe has the same steps, and the pins of the other graph.

    Args:
      walk: how a graph that is built alike was read.
      structure: its structure.
      arguments: the other graph: the arguments of a call, those by keyword last.
    """
    try:
        matched = walk.match(arguments)
    except Exception:  # a missing attribute or a comparison that raises is a difference
        return None
    if matched is None:
        return None
    # The other graph's arrays and objects, its pins (``statics`` and ``ids``), and the traces in
    # which its objects were made.
    leaves, objects, statics, ids, traces = matched
    # ``match`` has left out the traces, which differ between graphs. A call may only change objects
    # of the current one.
    if not _compat.are_current(traces):
        return None
    recipe = walk.recipe._replace(statics=statics, ids=ids)
    return Flat(structure, leaves, objects, updatable=True), recipe
