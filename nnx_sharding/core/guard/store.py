"""The guards of one function: finds the plan for some arguments without flattening them.

Guards are kept by arguments: by the types of all, and by the ids of the modules among them. For
each, there are a few, since a model may be trained and evaluated in turns. Where none holds, the
guards of other models whose arguments have the same types are *matched*, as templates: a model that
is built like an earlier one has its plan, and gets a guard of its own when it is passed again.

    call ─┬─ a guard of these arguments holds ──────────────── its plan
          ├─ a template matches ────────────────────────────── its plan; a guard the second time
          └─ neither: flatten, find or make a plan, ``add`` ── a guard and a template

Nothing here keeps a model alive, and all tables are bounded. From elsewhere:

    Plan      all that a function needs to know of arguments of one structure, to serve a call
    Flat      the arguments as ``flatten`` returns them: structure, arrays and objects
    Recipe    how to read some arguments again; a ``Walk`` does so. ``FastestWalk(recipe).follow``
              returns None unless these are the same objects, with the same content
    Guard     a walk, and what follows if it succeeds; ``check`` is ``walk.follow`` without errors,
              ``match`` accepts other objects, and returns a recipe for these
    WalkRecorder   makes the recipe while ``flatten`` reads; ``identities`` are the objects of which
              the recipe has the ids alone, so that it is void when one is collected
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ... import _compat
from ...specs.types import Arrays
from ..bounded import make_room
from ..flatten import Flat
from ..plan import Plan
from ..signature import SortedCall
from ..transform import Dependencies, Transform
from ..unflatten import items_getter
from .guard import Guard, check, match
from .native import FastestWalk
from .recipe import pack_int32
from .recorder import WalkRecorder
from .walk import Walk

_LOGGER = logging.getLogger("nnx_sharding")

# The number of remembered sets of arguments, and of guards for each: a model that is alternately
# trained and evaluated has two.
MAX_ARGUMENTS = 256
MAX_GUARDS = 8
MAX_RECENT = 4  # guards that the extension tries, whatever the arguments are


class _Form(NamedTuple):
    """What is seen of arguments at first sight; the key of templates."""

    types: tuple[type, ...]  # of all arguments, those by keyword last
    names: tuple[str, ...]  # of keyword arguments


class _Key(NamedTuple):
    """The key of guards, which are for the same modules."""

    form: _Form
    modules: tuple[int, ...]  # the ids of the modules among the arguments


def recorder_of(call: SortedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WalkRecorder:
    """Returns what records how the arguments of a call are flattened."""
    signature = call.signature
    keys = (*range(len(args)), *kwargs)  # of the arguments, in the order of the recorder
    position_of = {key: position for position, key in enumerate(keys)}
    dynamic = [position_of[key] for key in (*signature.dynamic, *signature.dynamic_keywords)]
    static = [position_of[key] for key in signature.static_keys]
    return WalkRecorder((*args, *kwargs.values()), dynamic, static)


def make_walk(recorder: WalkRecorder, arguments: tuple[Any, ...], name: str) -> Walk | None:
    """Returns the walk that was recorded; None if these arguments cannot be guarded.

    If that is by an error, it is logged; ``name`` is that of the function.
    """
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


class _GuardList:
    """The guards of one set of arguments, the last one that held first."""

    __slots__ = ("guards", "misses")

    def __init__(self) -> None:
        self.guards: tuple[Guard, ...] = ()
        self.misses = 0  # the number of calls for which none held

    def add(self, guard: Guard) -> None:
        self.guards = (guard, *self.guards[: MAX_GUARDS - 1])

    def count_miss(self, *, is_new: bool) -> bool:
        """Counts a call for which no guard held; returns whether to make one.

        A guard costs more than a call without one, which is wasted on a model that is used once:
        unless the plan is also new, it is made when the same arguments come again. Arguments that
        always change are not worth a guard each time.
        """
        self.misses += 1
        is_worth_it = self.misses <= 2 * MAX_GUARDS or self.misses % 64 == 0
        return is_worth_it and (is_new or self.misses > 1)


class Guards:
    """Guards by the arguments of a call: by their types, and by the modules among them.

    Holds no objects of the user: guards are dropped when one of their modules is collected.

    Args:
      transform: knows what a plan depends on besides the structure, such as the mesh in context.
      execute: returns what runs the program of a plan.

    Attributes:
      recent: the last guards that held, which the extension tries first.

    Its private attributes:

        _guards         a list of guards for each `_Key`: the types of arguments, and the modules
        _templates      a list of guards for each `_Form`: the types alone
        _modules_in     for each `_Form`, a function that picks the modules among the arguments
        _dependencies   returns what a plan depends on besides the graph, given the arrays
    """

    def __init__(
        self,
        transform: Transform,
        execute: Callable[[Plan], Callable[..., Any]] = lambda plan: plan.program.top_level,
    ):
        """Makes an empty store."""
        self.recent: list[Guard] = []  # the callables of the extension have this very list
        self._execute = execute
        self._reads_context = transform.reads_context
        self._reads_shapes = transform.reads_shapes
        self._infers_specs = transform.infers_specs
        # Most plans depend on nothing that a walk does not compare.
        depends = self._reads_context or self._reads_shapes or self._infers_specs
        self._dependencies: Callable[[Arrays], Dependencies] = lambda _: Dependencies()
        if depends:
            self._dependencies = transform.dependencies
        self._modules_in: dict[_Form, Callable[[Sequence[Any]], Sequence[Any]]] = {}
        self._guards: dict[_Key, _GuardList] = {}
        self._templates: dict[_Form, _GuardList] = {}

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plan, Flat] | None:
        """Returns the plan and the flat arguments of a call; None if no guard or template fits."""
        arguments = (*args, *kwargs.values()) if kwargs else args
        try:
            key = self._key(arguments, kwargs)
            guards = self._guards.get(key)
        except Exception:  # a class that cannot be hashed
            return None
        if guards is not None:
            for guard in guards.guards:
                flat = check(guard.walk, guard.plan.structure, arguments)
                if flat is not None and self._dependencies(flat.leaves) == guard.key:
                    self._move_to_front(guards, guard)
                    return guard.plan, flat
        templates = self._templates.get(key.form)
        if templates is None:
            return None
        return self._match(key, templates.guards, arguments)

    def _move_to_front(self, guards: _GuardList, guard: Guard) -> None:
        """Makes a guard that held the first one to be tried, also by the extension.

        From then on it has what runs the program, which the extension needs.
        """
        ready = guard
        if guard.execute is None and not self._infers_specs:
            ready = guard._replace(execute=self._execute(guard.plan))
        if ready is not guards.guards[0]:
            guards.guards = (ready, *(other for other in guards.guards if other is not guard))
        # The extension does not infer specs, which each call has to.
        if not self._infers_specs and not (self.recent and self.recent[0] is ready):
            others = [other for other in self.recent if other is not guard]
            self.recent[:] = [ready, *others][:MAX_RECENT]

    def _match(
        self, key: _Key, templates: Iterable[Guard], arguments: tuple[Any, ...]
    ) -> tuple[Plan, Flat] | None:
        """Returns what ``find`` does, by templates: guards of modules that may be built alike.

        Where the same arguments come a second time, they get a guard of their own.
        """
        for template in templates:
            matched = match(template.walk, template.plan.structure, arguments)
            if matched is None:
                continue
            flat, recipe = matched  # the recipe is for these modules
            if self._dependencies(flat.leaves) != template.key:
                continue
            if self._guards_of(key).count_miss(is_new=False):
                # The objects of which the recipe has the ids alone. None has been collected: the
                # template would be gone.
                identities = [reference() for reference in template.references]
                self._add_guard(key, FastestWalk(recipe), template.plan, flat, identities)
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
        """Makes a guard and a template for a call for which none held, if they may pay off.

        Args:
          plan: the plan that serves the call.
          flat: its arguments, flattened, with the recorder of what was read.
          args: the positional arguments.
          kwargs: those by keyword.
          is_new: whether the plan was made for this call.
        """
        arguments = (*args, *kwargs.values()) if kwargs else args
        try:
            key = self._key(arguments, kwargs)
            guards = self._guards_of(key)
        except Exception:  # as in `find`
            return
        if not guards.count_miss(is_new=is_new):
            return
        recorder = flat.recorder if isinstance(flat.recorder, WalkRecorder) else None
        walk = None if recorder is None else make_walk(recorder, arguments, plan.fun_name)
        if walk is None or recorder is None:
            # Something here cannot be guarded: as after many misses, it is rarely tried again.
            guards.misses += 2 * MAX_GUARDS
            return
        identities = recorder.identities.values()
        guard = self._add_guard(key, walk, plan, flat, identities)
        self._add_template(key.form, guard, identities)

    def _add_template(self, form: _Form, guard: Guard, identities: Iterable[object]) -> None:
        """Adds a guard as a template, for a new model of the same class.

        It serves also when the module of the guard is gone, but not without the ``identities``,
        which its walk compares by identity.
        """
        templates = self._templates  # not self, which the references would keep alive
        references = tuple(watch(identities, lambda _: templates.pop(form, None)))
        # A walk of its own: that of the guard notes where its model is in memory.
        walk = FastestWalk(guard.walk.recipe)
        template = guard._replace(walk=walk, references=references)
        templates.setdefault(form, _GuardList()).add(template)
        make_room(templates, MAX_ARGUMENTS)

    def _add_guard(
        self, key: _Key, walk: Walk, plan: Plan, flat: Flat, identities: Iterable[object]
    ) -> Guard:
        """Adds the guard of some arguments, which is dropped when any of their modules is gone.

        Likewise if one of ``identities`` is, the objects that the walk compares by identity.
        """
        all_guards, recent = self._guards, self.recent  # not self, which would live as long

        def forget(_: object) -> None:
            recent.clear()
            all_guards.pop(key, None)

        modules = [
            flat.objects[part.child]
            for argument in plan.graph_arguments
            for part in argument.parts
            if isinstance(part.child, int)
        ]
        # A call looks at these arrays: those that it may have to place, or all if shapes matter.
        leaves = flat.leaves
        slots: Sequence[int] = range(len(leaves)) if self._reads_shapes else plan.placed_slots
        targets = dict(zip(plan.placed_slots, plan.placed_shardings, strict=True))  # by slot
        avals = [getattr(leaves[slot], "aval", None) for slot in slots]  # None for a NumPy array
        dependencies = self._dependencies(leaves)
        guard = Guard(
            walk=walk,
            names=key.form.names,
            plan=plan,
            key=dependencies,
            donates=bool(plan.donated),
            context_of=_compat.context_mesh if self._reads_context else None,
            context=dependencies.mesh,
            slots=pack_int32(slots),
            shardings=[targets.get(slot) for slot in slots],
            avals=avals if self._reads_shapes else [],
            known=[None] * len(slots),  # `call.c` notes here which arrays fit
            references=tuple(watch((*modules, *identities), forget)),
        )
        self._guards_of(key).add(guard)
        return guard

    def _guards_of(self, key: _Key) -> _GuardList:
        """Returns the guards of some arguments; adds an empty list if there are none."""
        guards = self._guards.setdefault(key, _GuardList())
        make_room(self._guards, MAX_ARGUMENTS)
        return guards

    def drop(self, plan: Plan) -> None:
        """Forgets an evicted plan, so that further models do not use it."""
        self.recent.clear()
        for templates in [*self._templates.values()]:
            templates.guards = tuple(guard for guard in templates.guards if guard.plan is not plan)

    def clear(self) -> None:
        """Forgets everything."""
        for table in (self.recent, self._modules_in, self._guards, self._templates):
            table.clear()

    def _key(self, arguments: Sequence[Any], names: Iterable[str]) -> _Key:
        """Returns the key of the guards of some arguments; ``names`` are of those by keyword."""
        form = _Form((*map(type, arguments),), (*names,))
        modules_in = self._modules_in.get(form)
        if modules_in is None:
            # Not Variables: they have no weak references, so their guards would accumulate.
            positions = [
                i
                for i, argument in enumerate(arguments)
                if _compat.is_graph_object(argument) and type(argument).__weakrefoffset__
            ]
            modules_in = self._modules_in.setdefault(form, items_getter(positions))
            make_room(self._modules_in, MAX_ARGUMENTS)
        return _Key(form, (*map(_compat.identity, modules_in(arguments)),))


def watch(objects: Iterable[object], forget: Callable[[Any], object]) -> Iterator[weakref.ref[Any]]:
    """Yields weak references that call ``forget`` when an object is collected."""
    for obj in objects:
        # No weak references: a Variable (only its metadata is held), or a static of the plan.
        with contextlib.suppress(TypeError):
            yield weakref.ref(obj, forget)
