"""The plans and traces that are kept for a function, shared by all transforms of it.

A *plan* (``plan.py``) is what was computed for arguments of one structure, such as the spec of each
array. A *guard* (``guard/``) finds it again in a later call without flattening the arguments. The
*options* of a transform are all on which its plans depend. Caches here are bounded.

From other modules:

    Plan        serves all calls whose arguments have its structure, whatever their arrays
    Guards      find plans in later calls, and have to forget those that are dropped here: one by
                ``drop``, all by ``clear``
    Flat        arguments that were flattened: their structure, and their arrays (``leaves``), whose
                positions are called *slots*
    SortedCall  the arguments of a call by their roles (static, donated), which are its signature
    FunctionGroup   stands for several functions of one transform, such as the branches of a cond
    make_room   removes the oldest items of a table until no more than a limit are left; returns
                those that it has removed
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from .. import _compat
from .bounded import make_room
from .flatten import Flat
from .functions import FunctionGroup
from .plan import Plan
from .signature import SortedCall
from .structure import NodeEntry
from .transform import Transform

if TYPE_CHECKING:  # the rest of the core runs without the guard
    from .guard.store import Guards

# Limits of the caches: plans for each set of options, and sets of options for each function.
MAX_PLANS = 1024
MAX_OPTIONS = 64


def plan_key(transform: Transform, call: SortedCall, flat: Flat) -> Hashable:
    """Returns the key under which the plan of a call is cached.

    It is the roles of the arguments, all of them except arrays, and what specs depend on. Arrays
    that modules hold as attributes, outside of Variables, are moved to their shardings by a call if
    they are JAX arrays, and left if they are NumPy arrays. The structure does not tell the two
    apart, so the slots of the latter are in the key, too.

    Args:
      transform: says what else its plans depend on (``dependencies``), such as the mesh in context.
      call: the arguments by their roles.
      flat: the same, flattened.
    """
    structure, leaves = flat.structure, flat.leaves
    # By exact type first, which is quick: nearly always, no slot is left, and the others need not
    # be looked at more closely.
    not_jax = {slot for slot, leaf in enumerate(leaves) if type(leaf) is not _compat.ArrayImpl}
    if not_jax:
        not_jax &= structure.slots_of(NodeEntry)  # of arrays that modules hold themselves
        jax_types = (jax.Array, jax.ShapeDtypeStruct)  # also tracers, and arrays without data
        not_jax = {slot for slot in not_jax if not isinstance(leaves[slot], jax_types)}
    return call.signature, structure, transform.dependencies(leaves), frozenset(not_jax)


class Plans:
    """The plans of one function with one set of options; the oldest are dropped beyond a limit.

    It takes no lock, because comparing keys and collecting garbage may run the user's code.

    Args:
      guards: find these plans in later calls.
    """

    def __init__(self, guards: Guards) -> None:
        self.guards = guards
        self._plans: dict[Hashable, Plan] = {}

    def get_or_make(self, key: Hashable, make: Callable[[], Plan]) -> tuple[Plan, bool]:
        """Returns the plan with this key, and whether it is new: then ``make`` has made it."""
        plan = self._plans.get(key)
        if plan is not None:
            return plan, False
        # Two threads may both make it; then both use the first one, and its program.
        plan = self._plans.setdefault(key, make())
        # The oldest plans beyond the limit are dropped, and guards must not find them any more.
        for evicted in make_room(self._plans, MAX_PLANS):
            self.guards.drop(evicted)
        return plan, True

    def _cache_size(self) -> int:
        """Counts the programs that JAX has compiled for calls, under the name that JAX uses."""
        programs = (program for plan in self._plans.values() for program in plan.programs.values())
        return sum(_compat.compiled_count(program.staged) for program in programs)

    def clear(self) -> None:
        """Drops all plans and what JAX has traced and compiled for them."""
        self.guards.clear()
        for plan in make_room(self._plans, 0):
            for program in make_room(plan.programs, 0):
                program.staged.clear_cache()


class FunctionCache:
    """Everything that is kept for one function, without a reference to the function itself.

    As in JAX, transforming the same function again does not retrace it, so this lives as long as
    the function.

    Attributes:
      traced: the pure functions that JAX has traced, and keeps alive, by what the traces depend on.
      log: the log of the function's traces, for diagnostics.
    """

    def __init__(self, log: Any) -> None:
        """Makes an empty cache."""
        self.traced: weakref.WeakValueDictionary[Hashable, Callable[..., Any]] = (
            weakref.WeakValueDictionary()
        )
        self.log = log
        self._plans: dict[Hashable, Plans] = {}  # by the options of a transform

    def plans(self, options: Hashable, guards: Guards) -> Plans:
        """Returns the plans for one set of options.

        Args:
          options: all on which the plans of a transform depend. Options that cannot be hashed get
            new plans each time.
          guards: an empty store for new plans. Plans that are kept have their own already, in which
            case this one is not used.
        """
        try:
            plans = self._plans.setdefault(options, Plans(guards))
        except Exception:  # such as a filter that is a list
            return Plans(guards)
        make_room(self._plans, MAX_OPTIONS)
        return plans


class _Entry(NamedTuple):
    """The cache of a function."""

    cache: FunctionCache
    references: list[Any]  # weak ones to the parts of the function, which drop it when one is gone


# By the ids of the parts of the function: itself, or those of a bound method.
_CACHES: dict[tuple[int, ...], _Entry] = {}


def cache_of(fun: Callable[..., Any], make_log: Callable[[], Any]) -> FunctionCache:
    """Returns the cache of a function, which all transforms of it share.

    It is dropped when the function is collected, or the object to which a method is bound. A
    function without weak references gets a new cache each time, since nothing would drop it.

    Args:
      fun: the function.
      make_log: makes the log of traces of a new cache.
    """
    parts: list[Any] = []  # the objects whose identity makes the function the same
    for function in fun.functions if isinstance(fun, FunctionGroup) else (fun,):
        if inspect.ismethod(function):  # a new object at each access
            parts += function.__func__, function.__self__
        else:
            parts.append(function)
    key = (*map(id, parts),)
    entry = _CACHES.get(key)
    if entry is not None:
        return entry.cache
    cache = FunctionCache(make_log())
    try:
        # When a part is collected, another object may get its id, and must not get this cache: the
        # weak reference calls the lambda then.
        references = [weakref.ref(part, lambda _: _CACHES.pop(key, None)) for part in parts]
    except TypeError:  # an object without weak references
        return cache
    # Another thread may have been first.
    return _CACHES.setdefault(key, _Entry(cache, references)).cache
