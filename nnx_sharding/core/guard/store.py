"""The guards of one function: which plan serves these arguments, found without splitting them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

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


# The types of the arguments with the names of the keyword arguments, and the ids of the modules.
_Key: TypeAlias = tuple[tuple[Any, ...], tuple[int, ...]]


class Guards:
    """Guards by the arguments of a call: by their types, and by which modules are among them.

    Holds no object of the user's: a record is dropped when one of its modules is collected.

    Args:
      key_of: what a plan depends on besides the arguments' structure, such as the mesh in
        context, given the arrays; None if nothing.
    """

    def __init__(self, key_of: Callable[[Sequence[Any]], Hashable] | None = None):
        self._key_of = key_of
        self._pick_modules: dict[tuple[Any, ...], Callable[[Sequence[Any]], Sequence[Any]]] = {}
        self._records: dict[_Key, _Record] = {}
        self._walks: dict[Recipe, Any] = {}

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plan, Flat] | None:
        """The plan that serves a call, and its arguments as split; None if no guard holds."""
        arguments = (*args, *kwargs.values()) if kwargs else args
        try:
            record = self._records.get(self._key(arguments, kwargs))
        except TypeError:  # a class that cannot be hashed
            return None
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
        """Records which plan serves a call for which no guard held.

        A guard costs about as much as two splits, which would be lost on a model that is used
        once: unless the plan is new too, it is made when the same arguments come again.
        """
        arguments = (*args, *kwargs.values()) if kwargs else args
        try:
            key = self._key(arguments, kwargs)
            record = self._records.setdefault(key, _Record())
        except TypeError:
            return
        make_room(self._records, MAX_ARGUMENTS)
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
        records = self._records  # and not the guards, which would then live as long as the module
        watched = _watch((*_modules(plan, flat), *guard.watched), lambda _: records.pop(key, None))
        depends_on = None if self._key_of is None else self._key_of(flat.leaves)
        entry = _Entry(guard._replace(watched=tuple(watched)), plan, depends_on)
        record.entries = (entry, *record.entries[: MAX_GUARDS - 1])

    def clear(self) -> None:
        """Forgets all."""
        for table in (self._pick_modules, self._records, self._walks):
            table.clear()

    def _key(self, arguments: Sequence[Any], names: Iterable[str]) -> _Key:
        types = (*map(type, arguments), *names)
        pick = self._pick_modules.get(types)
        if pick is None:
            # Not Variables: they have no weak references, so their records would accumulate.
            positions = [
                i
                for i, argument in enumerate(arguments)
                if _compat.is_graph_object(argument) and type(argument).__weakrefoffset__
            ]
            pick = self._pick_modules.setdefault(types, picker(positions))
            make_room(self._pick_modules, MAX_ARGUMENTS)
        return types, (*map(id, pick(arguments)),)


def make_room(table: dict[Any, V], limit: int) -> list[V]:
    """Removes the oldest entries of a dict until no more than ``limit`` are left; returns them."""
    removed = []
    while len(table) > limit:
        try:
            removed.append(table.pop(next(iter(table))))
        except (RuntimeError, StopIteration, KeyError):  # changed by another thread or a finalizer
            continue
    return removed


def _watch(objects: Iterable[Any], forget: Callable[[Any], Any]) -> Iterator[Any]:
    """References that call ``forget`` when an object is collected."""
    for x in objects:
        # Without them: a Variable, of which only metadata is held; or a static, held by the plan.
        with contextlib.suppress(TypeError):
            yield weakref.ref(x, forget)


def _modules(plan: Plan, flat: Flat) -> list[Any]:
    """The graph objects among the arguments and in their containers."""
    parts = (part.child for target in plan.targets for part in target.parts)
    return [flat.objects[child] for child in parts if isinstance(child, int)]
