"""A graph of NNX objects → a :class:`~nnx_sharding.core.structure.Structure` and flat arrays.

A *static place* is a place for values without arrays, such as the metadata of a Variable, or an
attribute that is static to Flax. A module with arrays in a static place is *left out*: it counts as
a static value that is compared by identity, unless the graph holds the same module as data. Flax
then has one object in both places.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

from ..specs.types import Arrays, Objects
from .flattener import Flattener
from .snapshot import Snapshot
from .structure import Structure

if TYPE_CHECKING:
    from .guard.recorder import WalkRecorder


class Flat(NamedTuple):
    """A flattened graph."""

    structure: Structure
    leaves: Arrays  # by slot
    objects: Objects  # by index: the object of each entry of the structure
    updatable: bool = False  # whether all objects are known to belong to the current trace
    recorder: WalkRecorder | None = None  # has recorded the walk; None if no guard can repeat it


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
    recorder: WalkRecorder | None = None,
) -> Flat:
    """Flattens a pytree of NNX objects, arrays and scalars.

    Args:
      tree: any pytree; NNX objects in it may share references and form cycles.
      graph: False for Flax's tree mode. Each leaf of data is then an array, and a module that is
        met again counts as another module.
      first_objects: objects that get the first indices: the objects of the arguments, if ``tree``
        is the graph after a call. None if ``tree`` is the input of a function.
      replaced: the indices of modules among ``first_objects`` that get no entry, so that links to
        them make new modules.
      statics: static arguments.
      keeps_alive: whether the structure keeps alive static objects that are compared by identity.
      held_weakly: the ids of objects that the structure never keeps alive.
      snapshot: ``first_objects`` as they were before the call; unchanged objects keep their
        entries.
      recorder: is told what is read, so that a guard can be made of it.
    """
    # The ids of modules in static places that are data elsewhere.
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
        structure = flattener.describe(tree, statics, is_input=first_objects is None)
        # The ids of modules that were left out in a static place, and met as data later. These are
        # parts of the graph in both places, so the walk starts again, and leaves them out nowhere.
        met_later = flattener.left_out.intersection(flattener.index_of)
        if not met_later:
            leaves, objects = flattener.leaves, flattener.objects
            return Flat(structure, leaves, objects, recorder=flattener.recorder)
        also_data |= met_later
        if recorder is not None:
            recorder = recorder.restarted()  # a recorder that has been told nothing yet
