"""Flattens the same models again and again, outside of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import _compat
from ..bounded import make_room
from ..flatten import Flat, flatten
from .recorder import WalkRecorder
from .store import Guard, make_guard, watch


class KnownModels:
    """Modules that are flattened again and again: while they are the same, they are only compared.

    Holds none of them.
    """

    def __init__(self, caller: str, limit: int):
        self._caller, self._limit = caller, limit
        self._guards: dict[int, tuple[Guard, Sequence[Any]]] = {}

    def flatten(self, tree: Any) -> Flat:
        """What ``flatten`` returns; of a known model with the same structure, not an equal one."""
        guard, _ = self._guards.get(id(tree), (None, ()))
        found = None if guard is None else guard.check((tree,))
        if found is not None:
            return found
        is_module = _compat.is_graph_object(tree) and type(tree).__weakrefoffset__
        is_guarded = is_module and _compat.trace_is_clean()
        recorder = WalkRecorder((tree,), [0], []) if is_guarded else None
        return flatten(tree, held=recorder is None, recorder=recorder)

    def add(self, tree: Any, flat: Flat) -> None:
        """Remembers a model that was flattened here and has not changed since."""
        if not isinstance(flat.recorder, WalkRecorder):
            return
        guards, key = self._guards, id(tree)
        guard = make_guard(flat, (tree,), self._caller)
        if guard is not None:
            objects = (tree, *flat.recorder.identities.values())
            references = tuple(watch(objects, lambda _: guards.pop(key, None)))
            guards[key] = guard, references
            make_room(guards, self._limit)
