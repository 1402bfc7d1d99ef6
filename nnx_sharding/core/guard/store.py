"""The guards of one function: finds the plan for some arguments without flattening them.

Guards are kept by arguments: by the types of all, and by the ids of the modules among them. For
each, there are a few, since a model may be trained and evaluated in turns. Where none holds, the
guards of other models whose arguments have the same types are *matched*, as templates: a model that
is built like an earlier one has its plan, and gets a guard of its own when it is passed again.

    call ─┬─ a guard of these arguments holds ──────────────── its plan
          ├─ a template matches ────────────────────────────── its plan; a guard the second time
          └─ neither: flatten, find or make a plan, ``add`` ── a guard and a template

Nothing here keeps a model alive, and all tables are bounded.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, TypeAlias

from ... import _compat
from ..bounded import make_room
from ..flatten import Flat
from ..plan import Plan
from ..signature import Call
from ..transform import Transform
from ..unflatten import picker
from .guard import Guard
from .native import FastestWalk
from .recipe import packed
from .recorder import WalkRecorder
from .walk import Walk

_LOGGER = logging.getLogger("nnx_sharding")

# The number of remembered sets of arguments, and of guards for each: a model that is alternately
# trained and evaluated has two.
MAX_ARGUMENTS = 256
MAX_GUARDS = 8
MAX_RECENT = 4  # of which the extension tries each


def recorder_of(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WalkRecorder:
    """What records how the arguments of a call are flattened."""
    signature, place = call.signature, dict(zip(kwargs, count(len(args)), strict=False))
    dynamic = [*signature.dynamic, *(place[k] for k in sorted(signature.dynamic_keywords))]
    static = [*sorted(signature.static), *(place[k] for k in sorted(signature.static_keywords))]
    return WalkRecorder((*args, *kwargs.values()), dynamic, static)


def make_walk(recorder: WalkRecorder, arguments: tuple[Any, ...], name: str) -> Walk | None:
    """Returns the walk that was recorded; None if these arguments cannot be guarded."""
    try:
        recipe = recorder.recipe()
        if recipe is None:
            return None
        walk = FastestWalk(recipe)
        # The graph may have changed while it was flattened. What raises here would at each call.
        return walk if walk.follow(arguments) is not None else None
    except Exception:  # of the user's classes, or ours; the call needs no guard
        _LOGGER.warning("%s is flattened at each call:", name, exc_info=True)
        return None


class _Record:
    """What is known of one set of arguments."""

    __slots__ = ("guards", "misses")

    def __init__(self) -> None:
        self.guards: tuple[Guard, ...] = ()
        self.misses = 0

    def add(self, guard: Guard) -> None:
        self.guards = (guard, *self.guards[: MAX_GUARDS - 1])

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

    Args:
      transform: knows what a plan depends on besides the structure; None if on nothing.
      execute: returns what runs the program of a plan.
    """

    def __init__(
        self,
        transform: Transform | None = None,
        execute: Callable[[Plan], Any] = lambda plan: plan.program.top_level,
    ):
        # The last ones that held, which the extension tries first.
        self.recent: list[Guard] = []
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
        # By types alone: guards that may match other modules of the same structure.
        self._templates: dict[tuple[Any, ...], _Record] = {}

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plan, Flat] | None:
        """Returns the plan that serves a call, and its flat arguments; None if no guard holds."""
        arguments = (*args, *kwargs.values()) if kwargs else args
        try:
            key = self._key(arguments, kwargs)
            record = self._records.get(key)
        except Exception:  # a class that cannot be hashed
            return None
        if record is not None:
            for guard in record.guards:
                flat = guard.check(arguments)
                if flat is not None and self._key_of(flat.leaves) == guard.key:
                    self._move_to_front(record, guard)
                    return guard.plan, flat
        template = self._templates.get(key[0])
        return self._match(key, template.guards, arguments) if template is not None else None

    def _move_to_front(self, record: _Record, guard: Guard) -> None:
        """Makes a guard that held the first one to be tried, also by the extension."""
        ready = guard
        if guard.execute is None and not self._infers_specs:
            ready = guard._replace(execute=self._execute(guard.plan))
        if ready is not record.guards[0]:
            record.guards = (ready, *(other for other in record.guards if other is not guard))
        # The extension does not infer specs, which each call has to.
        if not self._infers_specs and not (self.recent and self.recent[0] is ready):
            others = [other for other in self.recent if other is not guard]
            self.recent[:] = [ready, *others][:MAX_RECENT]  # the same list, which callables have

    def _match(
        self, key: _Key, templates: Iterable[Guard], arguments: tuple[Any, ...]
    ) -> tuple[Plan, Flat] | None:
        """The same for arguments with the structure of others for which there is a guard."""
        for template in templates:
            match = template.match(arguments)
            if match is None or self._key_of(match[0].leaves) != template.key:
                continue
            flat, recipe = match
            if self._record(key).missed(is_new=False):
                identities = [reference() for reference in template.references]
                self._add(key, FastestWalk(recipe), template.plan, flat, identities)
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
        recorder, walk = flat.recorder, None
        if isinstance(recorder, WalkRecorder):
            walk = make_walk(recorder, arguments, plan.fun_name)
        if walk is None or not isinstance(recorder, WalkRecorder):
            record.misses += 2 * MAX_GUARDS
            return
        identities = recorder.identities.values()
        guard = self._add(key, walk, plan, flat, identities)
        templates, types = self._templates, key[0]
        references = tuple(watch(identities, lambda _: templates.pop(types, None)))
        # A new walk, without what that one has noted of this model.
        template = guard._replace(walk=FastestWalk(walk.recipe), references=references)
        templates.setdefault(types, _Record()).add(template)
        make_room(templates, MAX_ARGUMENTS)

    def _add(
        self, key: _Key, walk: Walk, plan: Plan, flat: Flat, identities: Iterable[Any]
    ) -> Guard:
        """Adds a guard, which ends with any of its modules or of the objects compared by id."""
        records, recent = self._records, self.recent  # not self, which would live as long
        objects = (*_modules(plan, flat), *identities)

        def forget(_: Any) -> None:
            recent.clear()
            records.pop(key, None)

        references = tuple(watch(objects, forget))
        names = tuple(name for name in key[0] if isinstance(name, str))
        guard = self._guard(names, walk, plan, flat, references)
        self._record(key).add(guard)
        return guard

    def _guard(
        self,
        names: tuple[str, ...],
        walk: Walk,
        plan: Plan,
        flat: Flat,
        references: tuple[Any, ...],
    ) -> Guard:
        slots: Sequence[int] = plan.placed_slots
        if self._reads_shapes:
            slots = range(len(flat.leaves))
        goals = dict(zip(plan.placed_slots, plan.placed_shardings, strict=True))
        avals = [getattr(flat.leaves[slot], "aval", None) for slot in slots]
        key = self._key_of(flat.leaves)
        return Guard(
            walk=walk,
            names=names,
            plan=plan,
            key=key,
            donates=bool(plan.donated),
            context_of=_compat.context_mesh if self._reads_context else None,
            context=key[0],
            slots=packed(slots),
            shardings=[goals.get(slot) for slot in slots],
            avals=avals if self._reads_shapes else [],
            known=[None] * len(slots),
            references=references,
        )

    def _record(self, key: _Key) -> _Record:
        record = self._records.setdefault(key, _Record())
        make_room(self._records, MAX_ARGUMENTS)
        return record

    def drop(self, plan: Plan) -> None:
        """Forgets an evicted plan, so that further models do not use it."""
        self.recent.clear()
        for record in [*self._templates.values()]:
            record.guards = tuple(guard for guard in record.guards if guard.plan is not plan)

    def clear(self) -> None:
        """Forgets everything."""
        for table in (self.recent, self._pick_modules, self._records, self._templates):
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
