"""The plans and traces that are kept for a function, shared by all transforms of it.

A *plan* (``plan.py``) is what was computed for arguments of one structure, such as the spec of each
array. A *guard* (``guard/``) finds it again in a later call without flattening the arguments. The
*options* of a transform are all on which its plans depend. Caches here are bounded.

From other modules:

    Plan        serves all calls whose arguments have its structure, whatever their arrays
    make_room   removes the oldest items of a table until no more than a limit are left
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax

from .. import _compat
from .bounded import make_room
from .flatten import Flat
from .functions import FunctionGroup
from .plan import Plan
from .signature import SortedCall
from .structure import NodeEntry
from .transform import Transform

# Limits of the caches: plans for each set of options, and sets of options for each function.
MAX_PLANS = 1024
MAX_OPTIONS = 64


class PlanUser(Protocol):
    """Finds plans in a faster way, and forgets plans that are dropped."""

    def drop(self, plan: Plan) -> None:
        """Forgets one plan."""

    def clear(self) -> None:
        """Forgets all plans."""


G = TypeVar("G", bound=PlanUser)


def plan_key(transform: Transform, call: SortedCall, flat: Flat) -> Hashable:
    """Returns the key under which the plan of a call is cached.

    It is the roles of the arguments, all of them except arrays, and what specs depend on. Whether
    an attribute of a module is a JAX array or a NumPy array, which is not moved to its sharding, is
    not in the structure. So the slots of the latter are in the key, too.

    Args:
      transform: says what else its plans depend on, such as the mesh in context.
      call: the arguments by their roles.
      flat: the same, flattened.
    """
    structure, leaves = flat.structure, flat.leaves
    # Nearly always empty, so the slots of attributes are only asked for if it is not.
    not_jax = {slot for slot, leaf in enumerate(leaves) if type(leaf) is not _compat.ArrayImpl}
    if not_jax:
        not_jax &= structure.slots_of(NodeEntry)
        jax_types = (jax.Array, jax.ShapeDtypeStruct)
        not_jax = {slot for slot in not_jax if not isinstance(leaves[slot], jax_types)}
    return call.signature, structure, transform.dependencies(leaves), frozenset(not_jax)


class Plans(Generic[G]):
    """The plans of one function with one set of options; the oldest are dropped beyond a limit.

    It takes no lock, because comparing keys and collecting garbage may run the user's code.
    """

    def __init__(self, guards: G) -> None:
        self.guards = guards
        self._plans: dict[Hashable, Plan] = {}

    def get_or_make(self, key: Hashable, make: Callable[[], Plan]) -> tuple[Plan, bool]:
        """Returns the plan with this key, and whether it is new: then ``make`` has made it."""
        plan = self._plans.get(key)
        if plan is not None:
            return plan, False
        # Two threads may both make it; then both use the first one, and its program.
        plan = self._plans.setdefault(key, make())
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
        self._plans: dict[Hashable, Plans[Any]] = {}  # by the options of a transform

    def plans(self, options: Hashable, guards: G) -> Plans[G]:
        """Returns the plans for one set of options, with these guards if they are new.

        Options that cannot be hashed get new plans each time.
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

    It lives until the function is collected. A new one gets a log of traces from ``make_log``.
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
        # When a part is collected, another object may get its id.
        references = [weakref.ref(part, lambda _: _CACHES.pop(key, None)) for part in parts]
    except TypeError:  # an object without weak references
        return cache
    # Another thread may have been first.
    return _CACHES.setdefault(key, _Entry(cache, references)).cache
