"""``flatten`` for a model that comes again: its guard finds the arrays without a walk in Python.

The structure is then the same object as last time. So what is looked up by it, such as a plan, is
found without comparing all entries.
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
    guard: tuple[Walk, Structure] | None = None
    references: tuple[weakref.ref[Any], ...] = ()  # weak ones, whose callbacks forget the model


# By the id of the model. No entry keeps its model alive.
_MODELS: dict[int, _Known] = {}


def flatten_known(tree: object) -> Flat:
    """Returns what ``flatten`` does, but for a known module without reading it in Python.

    The structure keeps no static object alive. Within a trace nothing is known, since the objects
    may hold its tracers.
    """
    is_module = _compat.is_node(tree) and type(tree).__weakrefoffset__
    if not (is_module and _compat.trace_is_clean()):
        return flatten(tree)
    key = _compat.identity(tree)
    known = _MODELS.get(key)
    if known is None:
        known = _MODELS[key] = _Known()
        known.references = (*_watch((tree,), key),)
        make_room(_MODELS, _MAX_MODELS)
    if known.guard is not None:
        flat = check(*known.guard, (tree,))
        if flat is not None:
            return flat
    known.misses += 1
    # To record takes longer than to flatten, which is wasted on a model that is passed once.
    if known.misses == 1 or (known.misses > _MAX_MISSES and known.misses % 64):
        return flatten(tree)
    flat = flatten(tree, keeps_alive=False, recorder=WalkRecorder((tree,), [0], []))
    recorder: Any = flat.recorder
    walk = None if recorder is None else make_walk(recorder, (tree,), type(tree).__name__)
    if walk is not None:
        known.references = (*_watch((tree, *recorder.identities.values()), key),)
        known.guard = walk, flat.structure
    return flat


def _watch(objects: Iterable[object], key: int) -> Iterator[weakref.ref[Any]]:
    """Yields weak references that forget a model when it, or a static of it, is collected."""
    return watch(objects, lambda _: _MODELS.pop(key, None))
