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
from typing import Any

from ... import _compat
from ..bounded import make_room
from ..flatten import Flat, flatten
from ..structure import Structure
from .guard import check
from .recorder import WalkRecorder
from .store import is_due, make_walk, watch
from .walk import Walk

_MAX_MODELS = 64


@dataclasses.dataclass
class _KnownModel:
    """The entry of one model: how to recognize it, and its structure."""

    misses: int = 0  # the number of calls in which the model was new or changed
    # The walk that recognizes the model, and the model's structure when the walk was recorded. Both
    # are None until a walk is recorded.
    walk: Walk | None = None
    structure: Structure | None = None
    references: tuple[weakref.ref[Any], ...] = ()  # weak references whose callbacks drop the entry


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
        entry.references = (*watch((tree,), lambda _: _MODELS.pop(key, None)),)
        make_room(_MODELS, _MAX_MODELS)  # removes the oldest entries if there are too many
    if entry.walk is not None and entry.structure is not None:
        flat = check(entry.walk, entry.structure, arguments=(tree,))
        if flat is not None:  # nothing but arrays has changed
            return flat
    # The model is new, or has changed.
    entry.misses += 1
    if is_due(entry.misses):
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
        objects = (tree, *by_identity)
        entry.references = (*watch(objects, lambda _: _MODELS.pop(key, None)),)
        entry.walk, entry.structure = walk, flat.structure
    return flat
