"""``flatten`` for a model that comes again: its guard finds the arrays without a walk in Python.

If the guard holds, the structure is the same object as last time. So a table finds what belongs to
the structure, such as a plan, without comparing all entries.

The entry of a model is kept under the id of the model, and does not keep the model alive. Once the
model is collected, another object may get its id, so a weak reference drops the entry. The entry
has weak references to ``identities`` for the same reason.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from ... import _compat
from ..bounded import make_room
from ..flatten import Flat, flatten
from ..structure import Structure
from .guard import check
from .recorder import WalkRecorder
from .store import make_walk, watch
from .walk import Walk

_MAX_MODELS = 64
_MAX_MISSES = 16  # misses of one model, after which it is rarely recorded again


@dataclasses.dataclass
class _KnownModel:
    """The entry of one model: how to recognize it, and its structure."""

    misses: int = 0  # the number of calls in which the model was new or changed
    # The walk that recognizes the model, and the model's structure when the walk was recorded. Both
    # are None until a walk is recorded.
    walk: Walk | None = None
    structure: Structure | None = None
    references: tuple[weakref.ref[Any], ...] = ()  # weak references whose callbacks drop the entry

    def count_miss_and_decide(self) -> bool:
        """Counts a miss; returns whether to record the model's walk in this call.

        Recording takes longer than flattening. It is wasted on a model that is passed once, and on
        a model that always changes. So the first miss is not recorded, and after 16 misses only
        every 64th miss is.
        """
        self.misses += 1
        if self.misses > _MAX_MISSES:
            return self.misses % 64 == 0
        return self.misses > 1


# By the id of the model. No entry keeps its model alive.
_MODELS: dict[int, _KnownModel] = {}


def flatten_known(tree: object) -> Flat:
    """Returns what ``flatten`` does, without reading in Python a module that has not changed.

    Only a module that has weak references is looked up and remembered; any other pytree is just
    flattened.

    A structure that is remembered keeps no static object alive. Within a trace nothing is looked up
    or remembered, because the objects may hold tracers.
    """
    # Only a weak reference tells that the model is gone, and then its entry has to be dropped. A
    # class whose objects can have weak references has an offset for these.
    has_weak_references = bool(type(tree).__weakrefoffset__)
    if not (_compat.is_node(tree) and has_weak_references and _compat.trace_is_clean()):
        return flatten(tree)
    key = _compat.identity(tree)
    entry = _MODELS.get(key)
    if entry is None:
        entry = _MODELS[key] = _KnownModel()
        entry.references = (*_watch((tree,), key),)
        make_room(_MODELS, _MAX_MODELS)  # removes the oldest entries if there are too many
    if entry.walk is not None and entry.structure is not None:
        flat = check(entry.walk, entry.structure, arguments=(tree,))
        if flat is not None:  # nothing but arrays has changed
            return flat
    # The model is new, or has changed.
    if entry.count_miss_and_decide():
        return _flatten_recorded(tree, key, entry)
    return flatten(tree)


def _flatten_recorded(tree: object, key: int, entry: _KnownModel) -> Flat:
    """Flattens a module, and records how, so that it is recognized the next time.

    Args:
      entry: gets the walk that recognizes the module, and the structure, if the module can be
        guarded.
    """
    # The recorder gets the module as the only argument of a call, at position 0.
    recorder = WalkRecorder((tree,), dynamic=[0], static=[])
    # The structure is remembered, so it must not keep objects of the user alive.
    flat = flatten(tree, keeps_alive=False, recorder=recorder)
    # ``flat.recorder`` may be another one than ``recorder``, because ``flatten`` starts again with
    # a new one if it has to. It is None if a part of the model cannot be compared.
    if flat.recorder is None:
        return flat
    walk = make_walk(flat.recorder, (tree,), name=type(tree).__name__)
    if walk is not None:
        # The walk compares these objects by their ids alone, so it is void once one of them is
        # collected.
        by_identity = flat.recorder.identities.values()
        entry.references = (*_watch((tree, *by_identity), key),)
        entry.walk, entry.structure = walk, flat.structure
    return flat


def _watch(objects: Iterable[object], key: int) -> Iterator[weakref.ref[Any]]:
    """Yields weak references that drop a model's entry when one of the objects is collected.

    Args:
      objects: the model, and the objects that its walk compares by their ids alone.
    """
    return watch(objects, lambda _: _MODELS.pop(key, None))
