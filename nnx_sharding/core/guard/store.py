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
    Guard     a walk, and what follows if it succeeds: ``plan``, and ``key``, on what else this
              plan depends (``Dependencies``), such as the mesh in context
    check     is ``walk.follow`` without errors; ``match`` accepts other objects, and returns a
              recipe for these
    WalkRecorder   makes the recipe while ``flatten`` reads; ``identities`` are the objects of which
              the recipe has the ids alone, so that it is void when one is collected
    make_room      removes the oldest entries of a table that is too large
    extension      C code that replaces ``find``: it tries the guards in ``Guards.recent``
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
    """Returns what records how the arguments of a call are flattened.

    The recorder numbers the arguments, those by keyword last. The signature of the call knows each
    by its key: its position, or its name if it is passed by keyword. For ``f(a, n=1)``, the keys 0
    and ``"n"`` have the numbers 0 and 1.

    Args:
      call: the arguments by their roles; its signature says which are static.
      args: the positional arguments.
      kwargs: those by keyword.
    """
    signature = call.signature
    number_of = {key: number for number, key in enumerate((*range(len(args)), *kwargs))}
    dynamic_keys = (*signature.dynamic, *signature.dynamic_keywords)  # in the order of `flatten`
    dynamic = [number_of[key] for key in dynamic_keys]
    static = [number_of[key] for key in signature.static_keys]
    return WalkRecorder((*args, *kwargs.values()), dynamic, static)


def make_walk(recorder: WalkRecorder, arguments: tuple[Any, ...], name: str) -> Walk | None:
    """Returns the walk that was recorded; None if these arguments cannot be guarded.

    Args:
      recorder: was told how the arguments were flattened.
      arguments: the same arguments, those by keyword last.
      name: that of the function, for the log: an error here is no error of the call.
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
        self.guards: tuple[Guard, ...] = ()  # replaced as a whole, so that loops over it go on
        self.misses = 0  # the number of calls for which none held

    def add(self, guard: Guard) -> None:
        self.guards = (guard, *self.guards[: MAX_GUARDS - 1])

    def give_up(self) -> None:
        """Counts so many misses that a guard is rarely made from now on."""
        self.misses += 2 * MAX_GUARDS

    def is_due(self, *, plan_is_new: bool) -> bool:
        """Whether a guard is made for the call that has just been counted as a miss.

        To make one takes longer than a call without it. That does not matter in a call with a new
        plan, which is traced and compiled. Otherwise the arguments have to come a second time, as a
        model that is used once needs no guard.
        """
        # Arguments that always change miss each time: only one miss in 64 then makes a guard.
        misses_often = self.misses > 2 * MAX_GUARDS
        if misses_often and self.misses % 64 != 0:
            return False
        return plan_is_new or self.misses > 1


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
        _execute        the function that was given as ``execute``
        _reads_context, _reads_shapes, _infers_specs   whether plans depend on the mesh in context,
                        on the shapes of arrays, or on the shardings in the types of arrays
    """

    def __init__(
        self,
        transform: Transform,
        execute: Callable[[Plan], Callable[..., Any]] = lambda plan: plan.program.top_level,
    ):
        """Makes an empty store."""
        self.recent: list[Guard] = []  # the extension has this very list, so it is never replaced
        self._execute = execute
        # Properties of the transform, which each call needs: kept, because to compute them is slow.
        self._reads_context = transform.reads_context
        self._reads_shapes = transform.reads_shapes
        self._infers_specs = transform.infers_specs
        self._dependencies: Callable[[Arrays], Dependencies]
        if self._reads_context or self._reads_shapes or self._infers_specs:
            self._dependencies = transform.dependencies
        else:  # most plans depend on nothing but the structure, which a walk compares
            self._dependencies = lambda _: Dependencies()  # equal to any other empty one
        self._modules_in: dict[_Form, Callable[[Sequence[Any]], Sequence[Any]]] = {}
        self._guards: dict[_Key, _GuardList] = {}
        self._templates: dict[_Form, _GuardList] = {}

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plan, Flat] | None:
        """Returns the plan and the flat arguments of a call; None if no guard or template fits."""
        arguments = (*args, *kwargs.values()) if kwargs else args
        try:
            key = self._key(arguments, kwargs)
            guard_list = self._guards.get(key)
        except Exception:  # a class that cannot be hashed
            return None
        if guard_list is not None:
            for guard in guard_list.guards:
                flat = check(guard.walk, guard.plan.structure, arguments)
                # The walk has compared the graph; the plan may depend on more, as on the context.
                if flat is not None and self._dependencies(flat.leaves) == guard.key:
                    self._move_to_front(guard_list, guard)
                    return guard.plan, flat
        templates = self._templates.get(key.form)
        if templates is None:
            return None
        return self._match(key, templates.guards, arguments)

    def _move_to_front(self, guard_list: _GuardList, guard: Guard) -> None:
        """Makes a guard that held the first one to be tried, here and by the extension."""
        first = guard
        # The extension cannot infer specs from the arrays of a call, so then it gets no guards.
        if not self._infers_specs:
            if guard.execute is None:  # the extension needs it, and guards that never hold do not
                first = guard._replace(execute=self._execute(guard.plan))
            if not (self.recent and self.recent[0] is first):
                others = [other for other in self.recent if other is not guard]
                self.recent[:] = [first, *others][:MAX_RECENT]
        if guard_list.guards[0] is not first:
            others = [other for other in guard_list.guards if other is not guard]
            guard_list.guards = (first, *others)

    def _match(
        self, key: _Key, templates: Iterable[Guard], arguments: tuple[Any, ...]
    ) -> tuple[Plan, Flat] | None:
        """Returns what ``find`` does, by templates: guards of modules that may be built alike.

        Where the same arguments come a second time, they get a guard of their own.

        Args:
          key: the types of the arguments, and the ids of the modules among them.
          templates: guards of other arguments with these types.
          arguments: the arguments, those by keyword last.
        """
        for template in templates:
            matched = match(template.walk, template.plan.structure, arguments)
            if matched is None:
                continue
            flat, recipe = matched  # the recipe reads these modules, not those of the template
            if self._dependencies(flat.leaves) != template.key:
                continue  # as in `find`, the plan depends on more than the graph
            guard_list = self._guards_of(key)
            guard_list.misses += 1
            if guard_list.is_due(plan_is_new=False):
                # What the recipe compares by identity is the same as for the template. All of it is
                # alive: the template is dropped when one of these objects is collected.
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
          flat: its arguments, flattened, with the recorder of what was read. Without one, something
            was read that no guard can compare.
          args: the positional arguments.
          kwargs: those by keyword.
          is_new: whether the plan was made for this call.
        """
        arguments = (*args, *kwargs.values()) if kwargs else args
        try:
            key = self._key(arguments, kwargs)
            guard_list = self._guards_of(key)
        except Exception:  # a class that cannot be hashed
            return
        guard_list.misses += 1
        if not guard_list.is_due(plan_is_new=is_new):
            return
        recorder = flat.recorder if isinstance(flat.recorder, WalkRecorder) else None
        walk = None if recorder is None else make_walk(recorder, arguments, plan.fun_name)
        if walk is None or recorder is None:  # such arguments are flattened in each call
            guard_list.give_up()
            return
        identities = recorder.identities.values()  # of which the walk has the ids alone
        guard = self._add_guard(key, walk, plan, flat, identities)
        self._add_template(key.form, guard, identities)

    def _add_template(self, form: _Form, guard: Guard, identities: Iterable[object]) -> None:
        """Adds a guard as a template, for a new model of the same class.

        It serves also when the module of the guard is gone, but not without the ``identities``,
        which its walk compares by identity. When one of these is collected, all templates of the
        form go with it, since later calls make new ones.

        Args:
          form: the types of the arguments.
          guard: the guard of the arguments.
          identities: the objects that its walk compares by identity.
        """
        templates = self._templates  # not self, which the references would keep alive
        references = tuple(watch(identities, lambda _: templates.pop(form, None)))
        # It has a walk of its own, since a walk in C keeps the addresses that it read last.
        walk = FastestWalk(guard.walk.recipe)
        # It keeps the references, because a weak reference that is gone calls nothing.
        template = guard._replace(walk=walk, references=references)
        templates.setdefault(form, _GuardList()).add(template)
        make_room(templates, MAX_ARGUMENTS)

    def _add_guard(
        self, key: _Key, walk: Walk, plan: Plan, flat: Flat, identities: Iterable[object]
    ) -> Guard:
        """Adds the guard of some arguments, and returns it.

        All guards of these arguments are dropped when one of their modules is collected, or one of
        ``identities``: another object may get its id, and the walk would take it for the first.

        Args:
          key: the types of the arguments, and the ids of the modules among them.
          walk: reads the arguments again.
          plan: serves calls for which the walk finds no change.
          flat: the arguments, flattened.
          identities: the objects that the walk compares by identity.
        """
        all_guards, recent = self._guards, self.recent  # not self, which would live as long

        def forget(_: object) -> None:
            recent.clear()  # all of it: which of these are for this key is not known
            all_guards.pop(key, None)

        children = (part.child for argument in plan.graph_arguments for part in argument.parts)
        # The child for a module or Variable is its index in the table of objects.
        modules = [flat.objects[child] for child in children if isinstance(child, int)]
        # The extension looks at these arrays: at those that a call may have to place, whether they
        # have their targets, and where shapes matter at all, whether they have the same types.
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
        guard_list = self._guards.setdefault(key, _GuardList())
        make_room(self._guards, MAX_ARGUMENTS)
        return guard_list

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
            positions = []
            for i, argument in enumerate(arguments):
                # Without weak references (a Variable), nothing would tell that an argument is gone,
                # and guards of dead ones would accumulate.
                has_weak_references = type(argument).__weakrefoffset__ != 0
                if _compat.is_graph_object(argument) and has_weak_references:
                    positions.append(i)
            picker = items_getter(positions)  # arguments → those at these positions
            modules_in = self._modules_in.setdefault(form, picker)
            make_room(self._modules_in, MAX_ARGUMENTS)
        return _Key(form, (*map(_compat.identity, modules_in(arguments)),))


def watch(objects: Iterable[object], forget: Callable[[Any], object]) -> Iterator[weakref.ref[Any]]:
    """Yields weak references that call ``forget`` when an object is collected."""
    for obj in objects:
        # No weak references: a Variable (only its metadata is held), or a static of the plan.
        with contextlib.suppress(TypeError):
            yield weakref.ref(obj, forget)
