"""``flatten`` for a model that comes again: its guard finds the arrays without a walk in Python.

The structure is then the same object as last time. So what is looked up by it, such as a plan, is
found without comparing all entries.

From other modules:

    Walk           reads the arrays and objects of a graph, in the order in which ``flatten`` once
                   read them, and compares all else; the fastest one is in C
    check          follows a walk: returns what ``flatten`` would, or None if the graph has changed
    WalkRecorder   is told what ``flatten`` reads; ``make_walk`` makes a walk of it. ``identities``
                   are the objects of which the walk has the ids alone
    watch          makes weak references, which call a function when their object is collected

What is known is kept under the id of the model, without keeping the model alive. When the model is
collected, another object may get its id, so a weak reference then drops the entry. Likewise for
``identities``.
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
_MAX_MISSES = 16  # after which a model that always changes is rarely recorded again


@dataclasses.dataclass
class _Known:
    """What is remembered of one model."""

    misses: int = 0  # the number of calls in which it was new or changed
    # What recognizes it, and its structure when that was recorded; both None before.
    walk: Walk | None = None
    structure: Structure | None = None
    references: tuple[weakref.ref[Any], ...] = ()  # weak ones, whose callbacks forget the model

    def is_worth_recording(self) -> bool:
        """Counts a miss; returns whether to record the walk.

        To record takes longer than to flatten. It is wasted on a model that is passed once, and on
        one that always changes: after 16 misses, only each 64th is recorded.
        """
        self.misses += 1
        if self.misses > _MAX_MISSES:
            return self.misses % 64 == 0
        return self.misses > 1


# By the id of the model. No entry keeps its model alive.
_MODELS: dict[int, _Known] = {}


def flatten_known(tree: object) -> Flat:
    """Returns what ``flatten`` does, but for a known module without reading it in Python.

    The structure keeps no static object alive. Within a trace nothing is known, since the objects
    may hold its tracers.
    """
    # Without weak references to it, nothing would tell that the model is gone.
    can_be_forgotten = bool(type(tree).__weakrefoffset__)
    if not (_compat.is_node(tree) and can_be_forgotten and _compat.trace_is_clean()):
        return flatten(tree)
    key = _compat.identity(tree)  # its id
    known = _MODELS.get(key)  # what is remembered of it, if it came before
    if known is None:
        known = _MODELS[key] = _Known()
        known.references = (*_watch((tree,), key),)
        make_room(_MODELS, _MAX_MODELS)  # removes the oldest
    if known.walk is not None and known.structure is not None:
        flat = check(known.walk, known.structure, arguments=(tree,))
        if flat is not None:  # unchanged but for its arrays
            return flat
    # The model is new, or has changed. To record it takes longer than to flatten it, so a model
    # that is passed once, or always changes, is not recorded.
    return _flatten_recorded(tree, key, known) if known.is_worth_recording() else flatten(tree)


def _flatten_recorded(tree: object, key: int, known: _Known) -> Flat:
    """Flattens a module, and records how, so that it is recognized the next time.

    Args:
      tree: the module.
      key: its id.
      known: gets the walk that recognizes it, and its structure.
    """
    # As for a call with one argument, at position 0, which is flattened.
    recorder = WalkRecorder((tree,), dynamic=[0], static=[])
    # The structure is remembered, so it must not keep objects of the user alive.
    flat = flatten(tree, keeps_alive=False, recorder=recorder)
    # ``flat.recorder`` is that of the last attempt. None: some of the model cannot be compared.
    if not isinstance(flat.recorder, WalkRecorder):
        return flat
    walk = make_walk(flat.recorder, (tree,), name=type(tree).__name__)
    if walk is not None:
        # The walk knows these by their ids alone, so it is void when one of them is collected.
        by_identity = flat.recorder.identities.values()
        known.references = (*_watch((tree, *by_identity), key),)
        known.walk, known.structure = walk, flat.structure
    return flat


def _watch(objects: Iterable[object], key: int) -> Iterator[weakref.ref[Any]]:
    """Yields weak references that forget a model when one of the objects is collected.

    ``key`` is the id of the model; the objects are the model and what its walk has the ids of.
    """
    return watch(objects, lambda _: _MODELS.pop(key, None))
