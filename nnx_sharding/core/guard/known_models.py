"""Flattens the same models again and again, outside of calls."""

from __future__ import annotations

from typing import Any, NamedTuple

from ... import _compat
from ..bounded import make_room
from ..flatten import Flat, flatten
from ..structure import Structure
from .guard import check
from .recorder import WalkRecorder
from .store import make_walk, watch
from .walk import Walk


class _KnownModel(NamedTuple):
    """A model that was flattened before."""

    walk: Walk
    structure: Structure
    references: tuple[Any, ...]  # weak ones, whose callbacks forget the model


class KnownModels:
    """Modules that are flattened again and again: while they are the same, they are only compared.

    Holds none of them.

    Args:
      caller: the name of the user's function, for the log.
      limit: the number of modules that are remembered.
    """

    def __init__(self, caller: str, limit: int):
        self._caller, self._limit = caller, limit
        self._models: dict[int, _KnownModel] = {}  # by id

    def flatten(self, tree: object) -> Flat:
        """Returns what ``flatten`` returns; for an unchanged model the same structure again."""
        model = self._models.get(id(tree))
        flat = None if model is None else check(model.walk, model.structure, (tree,))
        if flat is not None:
            return flat
        is_module = _compat.is_graph_object(tree) and type(tree).__weakrefoffset__
        is_guarded = is_module and _compat.trace_is_clean()
        recorder = WalkRecorder((tree,), [0], []) if is_guarded else None
        return flatten(tree, keeps_alive=recorder is None, recorder=recorder)

    def add(self, tree: object, flat: Flat) -> None:
        """Remembers a model that was flattened here and has not changed since."""
        if not isinstance(flat.recorder, WalkRecorder):
            return
        walk = make_walk(flat.recorder, (tree,), self._caller)
        if walk is None:
            return
        models, key = self._models, id(tree)  # not self, which the references would keep alive
        objects = (tree, *flat.recorder.identities.values())
        references = tuple(watch(objects, lambda _: models.pop(key, None)))
        models[key] = _KnownModel(walk, flat.structure, references)
        make_room(models, self._limit)
