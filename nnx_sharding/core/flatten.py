"""A graph of NNX objects → a :class:`~nnx_sharding.core.structure.Structure` and flat arrays.

From other modules:

    Flattener      does the walk; this file gives it what the caller wants
    ReadRecorder   is told what is read, so that a guard can read it again
    Snapshot       objects before a trace, to reuse the entries of unchanged ones
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import repeat
from typing import NamedTuple

from ..specs.types import Arrays, Objects
from .flattener import Flattener
from .recording import UNRECORDED, ReadRecorder
from .snapshot import Snapshot
from .structure import Structure


class Flat(NamedTuple):
    """A flattened graph."""

    structure: Structure
    leaves: Arrays  # by slot
    objects: Objects  # by index: the object of each entry of the structure
    updatable: bool = False  # whether all objects are known to belong to the current trace
    recorder: ReadRecorder | None = None  # of the walk; None if no guard can repeat it


def flatten(
    tree: object,
    *,
    graph: bool = True,
    first_objects: Objects | None = None,
    replaced: Set[int] = frozenset(),
    statics: Sequence[object] = (),
    keeps_alive: bool = True,
    held_weakly: Set[int] = frozenset(),
    snapshot: Snapshot | None = None,
    recorder: ReadRecorder | None = None,
) -> Flat:
    """Flattens a pytree of NNX objects, arrays and scalars.

    Args:
      tree: any pytree; NNX objects in it may share references and form cycles.
      graph: False for Flax's tree mode, in which each leaf of data is an array, and a module that
        is met again another one.
      first_objects: objects that get the first indices, as those that a function was given do in
        the graph after its call; None if ``tree`` is the input of a function.
      replaced: the indices of modules among these that get no entry: links to them make new ones.
      statics: static arguments.
      keeps_alive: whether the structure keeps alive static objects that are compared by identity.
      held_weakly: the ids of objects that it never keeps alive.
      snapshot: the first objects as they were before; unchanged ones keep their entries.
      recorder: is told what is read, for a guard.
    """
    also_data: Set[int] = frozenset()
    while True:
        flattener = Flattener(
            graph=graph,
            objects=[*(first_objects or ())],
            replaced=replaced,
            keeps_alive=keeps_alive,
            held_weakly=held_weakly,
            snapshot=snapshot,
            recorder=recorder,
            also_data=also_data,
        )
        structure = _flatten_once(flattener, tree, statics, is_input=first_objects is None)
        met_later = flattener.left_out.intersection(flattener.index_of)
        if not met_later:
            leaves, objects = flattener.leaves, flattener.objects
            return Flat(structure, leaves, objects, recorder=flattener.recorder)
        # A module was left out in a static place, and met as data later: so it is a part of the
        # graph in both places, and the walk starts again with that in mind.
        also_data |= met_later
        recorder = recorder and recorder.restarted()


def _flatten_once(
    flattener: Flattener, tree: object, statics: Sequence[object], *, is_input: bool
) -> Structure:
    """Returns the structure of a tree and static arguments, as the flattener describes it.

    Args:
      flattener: a new one, which knows the objects that get the first indices.
      tree: the tree.
      statics: the static arguments.
      is_input: whether the tree is the input of a function, not its output.
    """
    recorder = flattener.recorder
    num_first = len(flattener.objects)
    root_slots: list[int] = []
    # JAX itself refuses a ref that is passed twice; results may share one.
    root = flattener.pytree_child(tree, root_slots, link_refs=not is_input, is_root=True)
    positions = repeat(UNRECORDED) if recorder is None else recorder.static_positions
    static_children = tuple(map(flattener.static_child, statics, positions))
    # The first objects have an entry even if nothing in the tree refers to them any more.
    for index in range(num_first):
        if index not in flattener.replaced and index not in flattener.linked:
            flattener.link_index(index)
    flattener.describe_pending()
    structure = Structure(
        tuple(flattener.entries),
        root,
        tuple(flattener.slots),
        tuple(root_slots),
        static_children,
        flattener.origins,
    )
    structure.shares = flattener.has_repeats
    return structure
