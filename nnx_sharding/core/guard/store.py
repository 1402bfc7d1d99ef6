"""The guards of one function: finds the plan for some arguments without flattening them.

Guards are kept by arguments: by the types of all, and by the ids of the modules among them. There
are a few guards for the same arguments, because a model may be trained and evaluated in turns. If
no guard holds, the guards of other arguments with the same types are tried as *templates*: a model
that is built like an earlier one uses its plan, and gets a guard when it is passed again.

    call ─┬─ a guard of these arguments holds ──────────────── its plan
          ├─ a template matches ────────────────────────────── its plan; a guard the second time
          └─ neither: flatten, find or make a plan, ``add`` ── a guard and a template

Nothing here keeps a model alive, and all tables are bounded. The C extension replaces ``find``: it
tries the guards in ``Guards.recent``.
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
from ..in_c import items_getter
from ..plan import Plan
from ..signature import SortedCall
from ..transform import Dependencies, Transform
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
MANY_MISSES = 2 * MAX_GUARDS  # calls without a guard that holds; after more, guards are made rarely


class _Form(NamedTuple):
    """The types and names of arguments; the key of templates."""

    types: tuple[type, ...]  # the types of all arguments, those by keyword last
    names: tuple[str, ...]  # the names of keyword arguments


class _Key(NamedTuple):
    """The types and names of arguments, and the modules among them; the key of guards."""

    form: _Form
    modules: tuple[int, ...]  # the ids of the modules among the arguments


def recorder_of(call: SortedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WalkRecorder:
    """Returns a recorder for the arguments of a call, which ``flatten`` then reports to.

    The recorder numbers the arguments, those by keyword last. The signature of the call names each
    argument by a key: the position, or the name if it is passed by keyword. For ``f(a, n=1)``, the
    keys 0 and ``"n"`` have the numbers 0 and 1.

    Args:
      call: the arguments by their roles; its signature says which are static.
      args: the positional arguments.
      kwargs: the keyword arguments.
    """
    signature = call.signature
    number_of = {key: number for number, key in enumerate((*range(len(args)), *kwargs))}
    dynamic_keys = (*signature.dynamic, *signature.dynamic_keywords)  # in the order of `flatten`
    dynamic = [number_of[key] for key in dynamic_keys]
    static = [number_of[key] for key in signature.static_keys]
    return WalkRecorder((*args, *kwargs.values()), dynamic, static)


def make_walk(recorder: WalkRecorder, arguments: tuple[Any, ...], name: str) -> Walk | None:
    """Returns the walk that was recorded; None if these arguments cannot be guarded.

    An error is logged as a warning, and None is returned, because the call needs no guard.

    Args:
      recorder: was told how the arguments were flattened.
      arguments: the same arguments, those by keyword last.
      name: the name of the function or class in the log.
    """
    try:
        recipe = recorder.recipe()
        if recipe is None:
            return None
        walk = FastestWalk(recipe)
        # The graph may have changed while it was flattened, and a walk may raise at each call.
        return walk if walk.follow(arguments) is not None else None
    except Exception:  # the user's classes may raise any error
        _LOGGER.warning("%s is flattened at each call:", name, exc_info=True)
        return None


class _GuardList:
    """The guards of one set of arguments, the last one that held first."""

    __slots__ = ("guards", "misses")

    def __init__(self) -> None:
        self.guards: tuple[Guard, ...] = ()  # replaced as a whole, so loops over the old one go on
        self.misses = 0  # the number of calls for which none held

    def add(self, guard: Guard) -> None:
        self.guards = (guard, *self.guards[: MAX_GUARDS - 1])


def is_due(misses: int, *, plan_is_new: bool = False) -> bool:
    """Whether to make a guard, or to record a walk, in a call for which none held.

    Both take longer than a call without. This does not matter in a call with a new plan, which is
    traced and compiled. Otherwise the arguments have to come a second time, because a model that is
    used once needs no guard.

    Args:
      misses: the number of calls with these arguments for which none held, with this one.
      plan_is_new: whether the plan was made for this call.
    """
    # Arguments that always change miss each time, so only one miss in 64 then makes a guard.
    is_skipped = misses > MANY_MISSES and misses % 64 != 0
    return not is_skipped and (plan_is_new or misses > 1)


class Guards:
    """Guards by the arguments of a call: by their types, and by the modules among them.

    Holds no objects of the user: guards are dropped when one of their modules is collected.

    Args:
      transform: knows what a plan depends on besides the structure, such as the mesh in context.
      execute: returns the function that runs the program of a plan.

    Attributes:
      recent: the last guards that held, which the extension tries first.

    Private attributes:

        _guards         a list of guards for each `_Key`
        _templates      a list of guards for each `_Form`
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
        self.recent: list[Guard] = []  # never replaced, because the extension has this very list
        self._execute = execute
        # Each call needs these properties, and computing them is slow, so their values are kept.
        self._reads_context = transform.reads_context
        self._reads_shapes = transform.reads_shapes
        self._infers_specs = transform.infers_specs
        self._dependencies: Callable[[Arrays], Dependencies]
        if self._reads_context or self._reads_shapes or self._infers_specs:
            self._dependencies = transform.dependencies
        else:  # plans depend on nothing but the structure, and all empty `Dependencies` are equal
            self._dependencies = lambda _: Dependencies()
        self._modules_in: dict[_Form, Callable[[Sequence[Any]], Sequence[Any]]] = {}
        self._guards: dict[_Key, _GuardList] = {}
        self._templates: dict[_Form, _GuardList] = {}

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plan, Flat] | None:
        """Returns the plan and the flat arguments of a call; None if no guard or template fits."""
        arguments = (*args, *kwargs.values()) if kwargs else args
        try:
            key = self._key(arguments, kwargs)
            guard_list = self._guards.get(key)
        except Exception:  # the class of an argument cannot be hashed
            return None
        if guard_list is not None:
            for guard in guard_list.guards:
                flat = check(guard.walk, guard.plan.structure, arguments)
                # The walk has compared the graph. The plan may also depend on the mesh in context.
                if flat is not None and self._dependencies(flat.leaves) == guard.key:
                    self._move_to_front(guard_list, guard)
                    return guard.plan, flat
        templates = self._templates.get(key.form)
        if templates is None:
            return None
        return self._match(key, templates.guards, arguments)

    def _move_to_front(self, guard_list: _GuardList, guard: Guard) -> None:
        """Makes a guard that held the first one to be tried, here and by the extension."""
        front_guard = guard
        # The extension cannot infer specs from the arrays of a call, so then it gets no guards.
        if not self._infers_specs:
            # Only the extension uses ``execute``, so a guard that never holds needs none.
            if guard.execute is None:
                front_guard = guard._replace(execute=self._execute(guard.plan))
            if not (self.recent and self.recent[0] is front_guard):
                other_guards = [other for other in self.recent if other is not guard]
                self.recent[:] = [front_guard, *other_guards][:MAX_RECENT]
        if guard_list.guards[0] is not front_guard:
            other_guards = [other for other in guard_list.guards if other is not guard]
            guard_list.guards = (front_guard, *other_guards)

    def _match(
        self, key: _Key, templates: Iterable[Guard], arguments: tuple[Any, ...]
    ) -> tuple[Plan, Flat] | None:
        """Returns what ``find`` does, by templates: guards of modules that may be built alike.

        Adds a guard for these arguments if they come a second time.

        Args:
          key: the types of the arguments, and the ids of the modules among them.
        """
        for template in templates:
            matched = match(template.walk, template.plan.structure, arguments)
            if matched is None:
                continue
            flat, recipe = matched  # the recipe has the pins of ``arguments``
            if self._dependencies(flat.leaves) != template.key:
                continue  # the plan may depend on more than the graph, such as the mesh in context
            guard_list = self._guards_of(key)
            guard_list.misses += 1
            if is_due(guard_list.misses):
                # The recipe compares the same objects by identity as the template does. These are
                # alive, because the template is dropped when one of them is collected.
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
          flat: the flat arguments. ``flat.recorder`` is None if no guard can compare some of them.
          args: the positional arguments.
          kwargs: the keyword arguments.
          is_new: whether the plan was made for this call.
        """
        arguments = (*args, *kwargs.values()) if kwargs else args
        try:
            key = self._key(arguments, kwargs)
            guard_list = self._guards_of(key)
        except Exception:  # the class of an argument cannot be hashed
            return
        guard_list.misses += 1
        if not is_due(guard_list.misses, plan_is_new=is_new):
            return
        recorder = flat.recorder
        walk = None if recorder is None else make_walk(recorder, arguments, plan.fun_name)
        if walk is None or recorder is None:  # such arguments are flattened in each call
            guard_list.misses += MANY_MISSES
            return
        identities = recorder.identities.values()
        guard = self._add_guard(key, walk, plan, flat, identities)
        self._add_template(key.form, guard, identities)

    def _add_template(self, form: _Form, guard: Guard, identities: Iterable[object]) -> None:
        """Adds a guard as a template, for a new model of the same class.

        The template still serves when the module of the guard is gone. When one of ``identities``
        is collected, all templates of the form are dropped, and later calls make new ones.

        Args:
          identities: the objects that the guard's walk compares by identity.
        """
        templates = self._templates  # the callback uses this, as it must not keep ``self`` alive
        references = tuple(watch(identities, lambda _: templates.pop(form, None)))
        # A template has a walk of its own, because a walk in C keeps the addresses that it read.
        walk = FastestWalk(guard.walk.recipe)
        # A template keeps the references, because a weak reference that is gone calls nothing.
        template = guard._replace(walk=walk, references=references)
        templates.setdefault(form, _GuardList()).add(template)
        make_room(templates, MAX_ARGUMENTS)

    def _add_guard(
        self, key: _Key, walk: Walk, plan: Plan, flat: Flat, identities: Iterable[object]
    ) -> Guard:
        """Adds the guard of some arguments, and returns it.

        All guards of these arguments are dropped when one of the modules or ``identities`` is
        collected, because another object may get its id, and the walk would take it for the first.

        Args:
          key: the types of the arguments, and the ids of the modules among them.
          plan: serves calls for which the walk finds no change.
          identities: the objects that the walk compares by identity.
        """
        # The callback uses the tables, because it must not keep ``self`` alive.
        all_guards, recent = self._guards, self.recent

        def forget(_: object) -> None:
            recent.clear()  # the list does not say which of its guards are for this key
            all_guards.pop(key, None)

        children = (part.child for argument in plan.graph_arguments for part in argument.parts)
        # The child for a module or Variable is its index in the table of objects.
        modules = [flat.objects[child] for child in children if isinstance(child, int)]
        # The extension looks at the arrays in ``slots``. It compares the sharding of an array that
        # a call may have to place with its target, and, if shapes matter, the type of each array.
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
            known=[None] * len(slots),  # `call.c` notes which arrays fit
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
        """Forgets an evicted plan, so that no further model uses it."""
        self.recent.clear()
        for templates in [*self._templates.values()]:
            templates.guards = tuple(guard for guard in templates.guards if guard.plan is not plan)

    def clear(self) -> None:
        """Forgets everything."""
        for table in (self.recent, self._modules_in, self._guards, self._templates):
            table.clear()

    def _key(self, arguments: Sequence[Any], names: Iterable[str]) -> _Key:
        """Returns the key of some arguments; ``names`` are the names of the keyword arguments."""
        form = _Form((*map(type, arguments),), (*names,))
        modules_in = self._modules_in.get(form)
        if modules_in is None:
            positions = []
            for i, argument in enumerate(arguments):
                # Only a weak reference tells that an argument is gone. A Variable has none, and the
                # guards of dead Variables would accumulate.
                has_weak_references = type(argument).__weakrefoffset__ != 0
                if _compat.is_graph_object(argument) and has_weak_references:
                    positions.append(i)
            picker = items_getter(positions)
            modules_in = self._modules_in.setdefault(form, picker)
            make_room(self._modules_in, MAX_ARGUMENTS)
        return _Key(form, (*map(_compat.identity, modules_in(arguments)),))


def watch(objects: Iterable[object], forget: Callable[[Any], object]) -> Iterator[weakref.ref[Any]]:
    """Yields weak references that call ``forget`` when an object is collected.

    Skips Variables, and statics that have no weak references: the plan keeps these statics alive.
    """
    for obj in objects:
        with contextlib.suppress(TypeError):
            yield weakref.ref(obj, forget)
