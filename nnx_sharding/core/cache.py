"""The plans and traces that are kept for a function, shared by all transforms of it.

A *plan* (``plan.py``) is what was computed for arguments of one structure, such as the spec of each
array. A *guard* (``guard/``) finds the plan again in a later call without flattening the arguments.
The *options* of a transform are all settings on which its plans depend. Caches here are bounded.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

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

    The key has the roles of the arguments, all of the arguments except arrays, and what specs
    depend on besides. It also has the slots of NumPy arrays that modules hold as attributes,
    outside of Variables. A call moves JAX arrays in such attributes, and leaves NumPy arrays, but
    the structure does not tell the two apart.

    Args:
      transform: ``transform.dependencies`` has what else plans depend on, such as the mesh in
        context.
      call: the arguments by their roles.
      flat: the same arguments, flattened.
    """
    structure, leaves = flat.structure, flat.leaves
    numpy_slots: frozenset[int] = frozenset()
    # The exact type is compared first, because that is quick, and nearly always no slot is left.
    others = {slot for slot, leaf in enumerate(leaves) if type(leaf) is not _compat.ArrayImpl}
    if others:
        attribute_slots = structure.slots_of(NodeEntry)  # of arrays that modules hold themselves
        jax_types = (jax.Array, jax.ShapeDtypeStruct)  # a tracer is a `jax.Array`
        numpy_slots = frozenset(
            slot for slot in others & attribute_slots if not isinstance(leaves[slot], jax_types)
        )
    return call.signature, structure, transform.dependencies(leaves), numpy_slots


class Plans:
    """The plans of one function with one set of options; the oldest are dropped beyond a limit.

    No lock is taken, because comparing keys and collecting garbage may run the user's code.

    Args:
      guards: the guards that find these plans in later calls.
    """

    def __init__(self, guards: Guards) -> None:
        self.guards = guards
        self._plans: dict[Hashable, Plan] = {}  # by `plan_key`, the oldest first

    def get_or_make(self, key: Hashable, make: Callable[[], Plan]) -> tuple[Plan, bool]:
        """Returns the plan with this key, and whether ``make`` has made it in this call."""
        plan = self._plans.get(key)
        if plan is not None:
            return plan, False
        # Two threads may both make the plan, and then both use the first one, and its program.
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
        for plan in make_room(self._plans, 0):  # empties the table, and returns what was in it
            for program in make_room(plan.programs, 0):
                program.staged.clear_cache()


class FunctionCache:
    """Everything that is kept for one function, without a reference to the function itself.

    As in JAX, transforming the same function again does not retrace it, so the cache lives as long
    as the function.

    Attributes:
      traced: the pure functions that JAX has traced, by what the traces depend on. References are
        weak, because JAX keeps the functions alive as long as it keeps the traces.
      log: the log of the function's traces, for diagnostics.
      references: weak references to the parts of the function, which drop the cache when a part is
        collected.

    The private attribute ``_plans`` has the plans for each set of options.
    """

    def __init__(self, log: Any) -> None:
        """Makes an empty cache."""
        self.traced: weakref.WeakValueDictionary[Hashable, Callable[..., Any]] = (
            weakref.WeakValueDictionary()
        )
        self.log = log
        self.references: list[weakref.ref[Any]] = []
        self._plans: dict[Hashable, Plans] = {}

    def plans(self, options: Hashable, guards: Guards) -> Plans:
        """Returns the plans for one set of options.

        Args:
          options: all settings on which the plans of a transform depend. Options that cannot be
            hashed get new plans each time.
          guards: an empty store for new plans. It is not used if plans for the options are kept,
            because these have a store.
        """
        try:
            plans = self._plans.setdefault(options, Plans(guards))
        except Exception:  # a filter that is a list, for example, cannot be hashed
            return Plans(guards)
        make_room(self._plans, MAX_OPTIONS)
        return plans


# The key has the ids of the parts of a function: of itself, or of a bound method's two parts.
_CACHES: dict[tuple[int, ...], FunctionCache] = {}


def cache_of(fun: Callable[..., Any], make_log: Callable[[], Any]) -> FunctionCache:
    """Returns the cache of a function, which all transforms of it share.

    The cache is dropped when the function is collected, or the object to which a method is bound. A
    function without weak references gets a new cache each time, because nothing would drop it.

    Args:
      fun: the function.
      make_log: makes the log of traces of a new cache.
    """
    functions = fun.functions if isinstance(fun, FunctionGroup) else (fun,)
    parts: list[Any] = []  # the objects whose identity makes the function the same
    for function in functions:
        if inspect.ismethod(function):  # each access makes a new bound method
            parts += function.__func__, function.__self__
        else:
            parts.append(function)
    key = (*map(id, parts),)
    known_cache = _CACHES.get(key)
    if known_cache is not None:
        return known_cache
    cache = FunctionCache(make_log())
    try:
        # The lambda drops the cache when a part is collected, because another object may then get
        # the id of the part.
        cache.references = [weakref.ref(part, lambda _: _CACHES.pop(key, None)) for part in parts]
    except TypeError:  # a part cannot have weak references
        return cache
    # Another thread may have added a cache first, and all threads have to use the same.
    return _CACHES.setdefault(key, cache)
