"""The guards of one function: finds the plan for some arguments without splitting them."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ... import _compat
from ..bounded import make_room
from ..flatten import Flat
from ..plan import Plan
from ..signature import Call
from ..structure import Structure
from ..transform import Transform
from ..unflatten import picker
from .recipe import Pins, Route, packed
from .recorder import WalkRecorder
from .walk import Walk

V = TypeVar("V")

_LOGGER = logging.getLogger("nnx_sharding")

# The number of remembered sets of arguments, and of guards for each: a model that is alternately
# trained and evaluated has two.
MAX_ARGUMENTS = 256
MAX_GUARDS = 8
MAX_ROUTES = 4  # of which the extension tries each


def recorder_of(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WalkRecorder:
    """What records how the arguments of a call are flattened."""
    signature, place = call.signature, dict(zip(kwargs, count(len(args)), strict=False))
    dynamic = [*signature.dynamic, *(place[k] for k in sorted(signature.dynamic_keywords))]
    static = [*sorted(signature.static), *(place[k] for k in sorted(signature.static_keywords))]
    return WalkRecorder((*args, *kwargs.values()), dynamic, static)


class Guard(NamedTuple):
    """The path through a graph, and what must be there for it to have a structure.

    It compares everything on which a structure depends: names in order, types, statics, and which
    objects are shared. For these, ids are enough, so a guard keeps no model alive. Another object
    may get the id of a dead one, but then its content is compared as well; objects without content
    drop the guard when they are collected.

    A mismatch, or anything unexpected, means "changed": the call then flattens. So a guard may be
    too strict, which costs time, but never too lax.
    """

    structure: Structure
    walk: Any
    pins: Pins
    follow: Any

    @classmethod
    def of(cls, structure: Structure, walk: Any, pins: Pins) -> Guard:
        """The guard of the graph with these pins."""
        return cls(structure, walk, pins, walk.follower(pins))

    def check(self, arguments: tuple[Any, ...]) -> Flat | None:
        """The graph as ``flatten`` would return it, or None if it may have changed."""
        try:
            found = self.follow(arguments)
        except Exception:  # a missing attribute or a comparison that raises is a change
            return None
        if found is None:
            return None
        leaves, objects = found
        return Flat(self.structure, leaves, objects, updatable=True)

    def match(self, arguments: tuple[Any, ...]) -> tuple[Flat, Pins] | None:
        """Another graph of the same structure, and its pins; None if the structure differs."""
        try:
            match = self.walk.match(self.pins, arguments)
        except Exception:
            return None
        if match is None:
            return None
        leaves, objects, frozen, mentions, traces = match
        if not _compat.are_current(traces):
            return None
        return Flat(self.structure, leaves, objects, updatable=True), Pins(frozen, mentions)


def make_guard(flat: Flat, arguments: tuple[Any, ...], name: str) -> Guard | None:
    """A guard for the arguments of a call that were flattened; None if they cannot be guarded."""
    try:
        recorder = flat.recorder
        recorded = recorder.recipe_and_pins() if isinstance(recorder, WalkRecorder) else None
        if recorded is None:
            return None
        recipe, pins = recorded
        guard = Guard.of(flat.structure, Walk(recipe), pins)
        # The graph may have changed while it was flattened. What raises here would at each call.
        return guard if guard.follow(arguments) is not None else None
    except Exception:  # of the user's classes, or ours; the call needs no guard
        _LOGGER.warning("%s is flattened at each call:", name, exc_info=True)
        return None


class _Entry(NamedTuple):
    guard: Guard
    plan: Plan
    key: tuple[Hashable, ...]
    references: tuple[Any, ...]  # whose callbacks drop the record


class _Record:
    """What is known of one set of arguments."""

    __slots__ = ("entries", "misses")

    def __init__(self) -> None:
        self.entries: tuple[_Entry, ...] = ()
        self.misses = 0

    def add(self, entry: _Entry) -> None:
        self.entries = (entry, *self.entries[: MAX_GUARDS - 1])

    def missed(self, *, is_new: bool) -> bool:
        """Counts a call for which no guard held; returns whether to make one.

        A guard costs more than a call without one, which is wasted on a model that is used once:
        unless the plan is also new, it is made when the same arguments come again. Arguments that
        always change are not worth a guard each time.
        """
        self.misses += 1
        often = self.misses <= 2 * MAX_GUARDS or self.misses % 64 == 0
        return often and (is_new or self.misses > 1)


# The types of the arguments with the names of the keyword arguments, and the ids of the modules.
_Key: TypeAlias = tuple[tuple[Any, ...], tuple[int, ...]]


class Guards:
    """Guards by the arguments of a call: by their types, and by the modules among them.

    Holds no objects of the user: a record is dropped when one of its modules is collected.
    ``transform`` knows what a plan depends on besides the structure; ``execute`` returns what runs
    the program of a plan.
    """

    def __init__(
        self,
        transform: Transform | None = None,
        execute: Callable[[Plan], Any] = lambda plan: plan.program.top_level,
    ):
        self.routes: list[Route] = []  # the last ones, for ``_native.call``
        self._execute = execute
        self._reads_context = transform is not None and transform.reads_context
        self._reads_shapes = transform is not None and transform.reads_shapes
        self._infers_specs = transform is not None and transform.infers_specs
        self._key_of: Callable[[Sequence[Any]], tuple[Hashable, ...]] = lambda _: (None,)
        if transform is not None and (
            self._reads_context or self._reads_shapes or self._infers_specs
        ):
            self._key_of = transform.key
        self._pick_modules: dict[tuple[Any, ...], Callable[[Sequence[Any]], Sequence[Any]]] = {}
        self._records: dict[_Key, _Record] = {}
        # By types alone, for other modules of the same structure.
        self._templates: dict[tuple[Any, ...], _Record] = {}

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plan, Flat] | None:
        """The plan that serves a call, and its arguments as split; None if no guard holds."""
        arguments = (*args, *kwargs.values()) if kwargs else args
        try:
            key = self._key(arguments, kwargs)
            record = self._records.get(key)
        except Exception:  # a class that cannot be hashed
            return None
        if record is not None:
            for entry in record.entries:
                flat = entry.guard.check(arguments)
                if flat is not None and self._key_of(flat.leaves) == entry.key:
                    if entry is not record.entries[0]:
                        others = (other for other in record.entries if other is not entry)
                        record.entries = (entry, *others)
                    self._add_route(entry, flat, (*kwargs,))
                    return entry.plan, flat
        template = self._templates.get(key[0])
        return self._match(key, template.entries, arguments) if template is not None else None

    def _add_route(self, entry: _Entry, flat: Flat, names: tuple[str, ...]) -> None:
        plan = entry.plan
        if self._infers_specs:
            return
        slots: Sequence[int] = plan.placed_slots
        if self._reads_shapes:
            slots = range(len(flat.leaves))
        goals = dict(zip(plan.placed_slots, plan.placed_shardings, strict=True))
        avals = [getattr(flat.leaves[slot], "aval", None) for slot in slots]
        self.routes[MAX_ROUTES - 1 :] = []
        route = Route(
            entry.guard.follow,
            names,
            plan,
            self._execute(plan),
            bool(plan.donated),
            _compat.context_mesh if self._reads_context else None,
            entry.key[0],
            packed(slots),
            [goals.get(slot) for slot in slots],
            avals if self._reads_shapes else [],
            [None] * len(slots),
            entry,
        )
        self.routes.insert(0, route)

    def _match(
        self, key: _Key, templates: Iterable[_Entry], arguments: tuple[Any, ...]
    ) -> tuple[Plan, Flat] | None:
        """The same for arguments with the structure of others for which there is a guard."""
        for template in templates:
            match = template.guard.match(arguments)
            if match is None or self._key_of(match[0].leaves) != template.key:
                continue
            flat, pins = match
            if self._record(key).missed(is_new=False):
                guard = Guard.of(flat.structure, template.guard.walk, pins)
                self._add(key, guard, template.plan, flat, [x() for x in template.references])
            return template.plan, flat
        return None

    def add(
        self,
        plan: Plan,
        flat: Flat,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_new: bool,
    ) -> None:
        """Records which plan serves a call for which no guard held."""
        arguments = (*args, *kwargs.values()) if kwargs else args
        try:
            key = self._key(arguments, kwargs)
            record = self._record(key)
        except Exception:
            return
        if not record.missed(is_new=is_new):
            return
        shared = flat._replace(structure=plan.structure)  # equal, but there is only one
        guard = make_guard(shared, arguments, plan.fun_name)
        if guard is None or not isinstance(flat.recorder, WalkRecorder):
            record.misses += 2 * MAX_GUARDS
            return
        identities = flat.recorder.identities.values()
        self._add(key, guard, plan, flat, identities)
        templates, types = self._templates, key[0]
        references = tuple(watch(identities, lambda _: templates.pop(types, None)))
        template = guard._replace(follow=None)  # without the dicts of this model
        entry = _Entry(template, plan, self._key_of(flat.leaves), references)
        templates.setdefault(types, _Record()).add(entry)
        make_room(templates, MAX_ARGUMENTS)

    def _add(
        self, key: _Key, guard: Guard, plan: Plan, flat: Flat, identities: Iterable[Any]
    ) -> None:
        records, routes = self._records, self.routes  # not self, which would live as long
        objects = (*_modules(plan, flat), *identities)

        def forget(_: Any) -> None:
            routes.clear()
            records.pop(key, None)

        references = tuple(watch(objects, forget))
        self._record(key).add(_Entry(guard, plan, self._key_of(flat.leaves), references))

    def _record(self, key: _Key) -> _Record:
        record = self._records.setdefault(key, _Record())
        make_room(self._records, MAX_ARGUMENTS)
        return record

    def drop(self, plan: Plan) -> None:
        """Forgets an evicted plan, so that further models do not use it."""
        self.routes.clear()
        for record in [*self._templates.values()]:
            record.entries = tuple(entry for entry in record.entries if entry.plan is not plan)

    def clear(self) -> None:
        """Forgets everything."""
        for table in (self.routes, self._pick_modules, self._records, self._templates):
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
        return types, (*map(_compat.identity, pick(arguments)),)


def watch(objects: Iterable[Any], forget: Callable[[Any], Any]) -> Iterator[Any]:
    """References that call ``forget`` when an object is collected."""
    for x in objects:
        # No weak references: a Variable (only its metadata is held), or a static of the plan.
        with contextlib.suppress(TypeError):
            yield weakref.ref(x, forget)


def _modules(plan: Plan, flat: Flat) -> list[Any]:
    """The graph objects among the arguments and in their containers."""
    parts = (part.child for argument in plan.graph_arguments for part in argument.parts)
    return [flat.objects[child] for child in parts if isinstance(child, int)]
