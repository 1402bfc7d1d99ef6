"""The guards of one function: which plan serves these arguments, found without splitting them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

from ... import _compat
from ..flatten import Flat
from ..plan import Plan
from ..signature import Call
from ..unflatten import picker
from .record import Guard, make_guard
from .walk import Recipe

V = TypeVar("V")

# Sets of arguments that are remembered, and guards for each of them: a model that is trained and
# evaluated in turn has two.
MAX_ARGUMENTS = 256
MAX_GUARDS = 8


class _Entry(NamedTuple):
    guard: Guard
    plan: Plan
    key: Hashable


class _Record:
    """What is known of one set of arguments."""

    __slots__ = ("entries", "misses")

    def __init__(self) -> None:
        self.entries: tuple[_Entry, ...] = ()
        self.misses = 0


class _Shelf(NamedTuple):
    """What is known of arguments of certain types: which are modules; records by who they are."""

    pick_roots: Callable[[Sequence[Any]], Sequence[Any]]
    records: dict[tuple[int, ...], _Record]


class Guards:
    """Guards by the arguments of a call: by their types, and by who the modules are.

    Holds no object of the user's: what belongs to a module goes when the module does.

    Args:
      key_of: what a plan depends on besides the arguments' structure, such as the mesh in
        context, given the arrays; None if nothing.
    """

    def __init__(self, key_of: Callable[[Sequence[Any]], Hashable] | None = None):
        self._key_of = key_of
        self._shelves: dict[tuple[Any, ...], _Shelf] = {}
        self._walks: dict[Recipe, Any] = {}

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plan, Flat] | None:
        """The plan that serves a call, and its arguments taken apart; None if no guard holds."""
        arguments = (*args, *kwargs.values()) if kwargs else args
        try:
            shelf = self._shelves.get((*map(type, arguments), *kwargs))
        except TypeError:  # a class that cannot be hashed
            return None
        if shelf is None:
            return None
        record = shelf.records.get((*map(id, shelf.pick_roots(arguments)),))
        if record is None:
            return None
        for entry in record.entries:
            flat = entry.guard.check(arguments)
            if flat is None:
                continue
            if self._key_of is None or self._key_of(flat.leaves) == entry.key:
                if entry is not record.entries[0]:
                    others = (other for other in record.entries if other is not entry)
                    record.entries = (entry, *others)
                return entry.plan, flat
        return None

    def add(
        self,
        plan: Plan,
        call: Call,
        flat: Flat,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_new: bool,
    ) -> None:
        """Notes which plan serves a call that no guard held for.

        A guard costs about as much as splitting, which a model that is used once would pay for
        nothing: unless the plan is new too, it is made when the same arguments come again.
        """
        arguments = (*args, *kwargs.values()) if kwargs else args
        try:
            shelf = self._shelf(arguments, kwargs)
        except TypeError:
            return
        ids = (*map(id, shelf.pick_roots(arguments)),)
        record = self._record(shelf, ids)
        record.misses += 1
        # Arguments that change all the time are not worth a guard each time.
        often = record.misses <= 2 * MAX_GUARDS or record.misses % 64 == 0
        if not often or not (is_new or record.misses > 1):
            return
        if len(self._walks) >= MAX_ARGUMENTS:
            self._walks.clear()
        shared = flat._replace(structure=plan.structure)  # equal, but there is only one
        guard = make_guard(call, shared, arguments, tuple(kwargs), self._walks)
        if guard is None:
            record.misses += 2 * MAX_GUARDS
            return
        forget = functools.partial(_forget, shelf.records, ids)
        watched = (*_roots(plan, flat), *guard.watched)
        guard = guard._replace(watched=tuple(_watch(one, forget) for one in watched))
        key = None if self._key_of is None else self._key_of(flat.leaves)
        entry = _Entry(guard, plan, key)
        record.entries = (entry, *record.entries[: MAX_GUARDS - 1])

    def clear(self) -> None:
        """Forgets all."""
        self._shelves.clear()
        self._walks.clear()

    def _shelf(self, arguments: Sequence[Any], kwargs: dict[str, Any]) -> _Shelf:
        signature = (*map(type, arguments), *kwargs)
        # Variables are not told apart here: nobody tells when they go, so they would pile up.
        positions = [
            i
            for i, arg in enumerate(arguments)
            if _compat.is_graph_object(arg) and type(arg).__weakrefoffset__
        ]
        found = self._shelves.setdefault(signature, _Shelf(picker(positions), {}))
        make_room(self._shelves, MAX_ARGUMENTS)
        return found

    def _record(self, shelf: _Shelf, ids: tuple[int, ...]) -> _Record:
        found = shelf.records.setdefault(ids, _Record())
        make_room(shelf.records, MAX_ARGUMENTS)
        return found


def make_room(kept: dict[Any, V], limit: int) -> list[V]:
    """Takes the oldest entries out of a dict until no more than ``limit`` are left."""
    taken = []
    while len(kept) > limit:
        try:
            taken.append(kept.pop(next(iter(kept))))
        except (RuntimeError, StopIteration, KeyError):  # changed by another thread or a finalizer
            continue
    return taken


def _watch(root: Any, forget: Callable[[Any], None]) -> Any:
    try:
        return weakref.ref(root, forget)
    except TypeError:  # a Variable, of which only metadata is held; or a static, held by the plan
        return None


def _forget(records: dict[tuple[int, ...], _Record], ids: tuple[int, ...], _: Any) -> None:
    records.pop(ids, None)


def _roots(plan: Plan, flat: Flat) -> list[Any]:
    """The objects that stand in the arguments themselves."""
    parts = (part.child for target in plan.targets for part in target.parts)
    return [flat.objects[child] for child in parts if isinstance(child, int)]
