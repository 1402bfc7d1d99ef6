"""The base of transforms that become part of the surrounding trace, and compile nothing.

`jit` and `shard_map` make a program. All other transforms (`grad`, `vmap`, `scan`, `cond`, …) are
called while another function is traced, or at top level. A call of them goes the same way, to one
pure function, but without stages, shardings and donation:

    Inner.__call__                  flattens the arguments, and finds the plan for their structure
      InnerTransform.compile        once for each plan
        jax_transform(plan, …)      what JAX makes of the pure function: the one thing to override
      run                           calls it with the leaves, and writes back what changed

Subclasses of :class:`InnerTransform` say what JAX does with a pure function, and what happens
around the user's function in its trace (:meth:`InnerTransform.user_function`). Those that have to
return more than the function, such as a derivative, subclass :class:`Inner` as well.

Words of all transforms:

    leaf           an array or a number in the arguments; or a flag, which JAX does not trace
    slot           the position of a leaf among those of all arguments
    plan           what is known of all calls whose arguments differ only in their leaves
    pure function  the user's function as one of leaves: returns the arrays of the results, in one
                   group for each spec, and last the outcome
    spec           how a leaf enters or leaves: an axis, in these transforms
    outcome        what a call did to the objects of its arguments, without arrays
"""

from __future__ import annotations

import contextlib
import functools
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeAlias

import jax

from .. import _compat
from ..activations.trace_keys import key_traces_by_tags, pass_paths, pass_tags
from ..core.call import run
from ..core.call_context import Caller
from ..core.flatten import Flat
from ..core.plan import Plan
from ..core.static_arguments import PLAIN_TYPES
from ..core.static_equality import Static
from ..core.transform import Program, Transform
from ..core.unflatten import Unflattened
from .by_content import compiled_by_content
from .lifted import LiftedFunction, P, R

Function: TypeAlias = Callable[..., Any]
# What a call gets that JAX does not trace, such as flags, by slot.
StaticLeaves: TypeAlias = Sequence[tuple[int, Static]]


# Texts for messages


def type_text(value: object) -> str:
    """Says what something is: ``float32[2,4]``, ``a Linear``, ``the class Linear``."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return jax.typeof(value).str_short() if is_array(value) else f"a {type(value).__name__}"


def tree_text(tree: object) -> str:
    """Says what is in a pytree: the pytree with the type of each leaf, in at most 300 letters."""
    types = jax.tree.map(type_text, tree, is_leaf=_compat.is_graph_object)
    return textwrap.shorten(repr(types).replace("'", ""), 300)


# Leaves and slots


def is_array(x: object) -> bool:
    """Whether something is an array or a number, and no Variable."""
    return _compat.is_array_like(x) and not _compat.is_graph_object(x)


def is_traced(leaf: object) -> bool:
    """Whether JAX traces a leaf of the arguments; flags, and what is not an array, stay unchanged.

    Flags decide which code runs, and `cond` is for conditions that only the program knows.
    """
    return _compat.is_array_like(leaf) and not isinstance(leaf, bool)


def replace_slots(
    leaves: Sequence[object], slots: Iterable[int], arrays: Iterable[object]
) -> list[Any]:
    """Replaces the leaves in some slots by arrays."""
    new = dict(zip(slots, arrays, strict=True))
    return [new.get(slot, leaf) for slot, leaf in enumerate(leaves)]


def traced_slots(leaves: Sequence[object]) -> list[int]:
    """Returns the slots of the leaves that JAX traces."""
    return [slot for slot, leaf in enumerate(leaves) if is_traced(leaf)]


def call_on_slots(
    transform: Callable[[Function], Function],
    function: Function,
    slots: Sequence[int],
    leaves: Sequence[object],
) -> Any:
    """Transforms a function of leaves as a function of some slots, and calls it with their leaves.

    The other leaves are fixed, so ``transform``, such as ``jax.vmap``, need not know what they are.
    """

    def restricted(*arrays: object) -> Any:
        return function(*replace_slots(leaves, slots, arrays))

    return transform(restricted)(*(leaves[slot] for slot in slots))


def static_leaves(leaves: Sequence[object]) -> StaticLeaves:
    """Returns the leaves that JAX does not trace."""
    return tuple((s, Static.of(x)) for s, x in enumerate(leaves) if not is_traced(x))


def may_keep(static: StaticLeaves) -> bool:
    """Whether a function with these leaves may be kept for later calls.

    JAX finds a trace by the identity of its function, so keeping that saves a trace. But it must
    not keep the user's objects alive; numbers and strings are harmless.
    """
    return all(isinstance(leaf.value, PLAIN_TYPES) for _, leaf in static)


def compile_at_top_level(
    call: Function, compile_with: Callable[[Function], Function] = jax.jit
) -> Function:
    """Returns a function of the same leaves that is compiled if it is called outside of any trace.

    There JAX would trace, and for loops compile, it again at each call. ``compile_with`` makes a
    program of a function of arrays.
    """

    # One program for each set of flags and settings; JAX itself tells types of arrays apart.
    @functools.lru_cache(maxsize=64)
    def program(static: StaticLeaves, count: int) -> Function:
        fixed = {slot: leaf.value for slot, leaf in static}
        slots = [slot for slot in range(count) if slot not in fixed]
        leaves = [fixed.get(slot) for slot in range(count)]
        return compile_with(lambda *arrays: call(*replace_slots(leaves, slots, arrays)))

    def call_or_run(*leaves: object) -> Any:
        # Within a trace it becomes part of that, and is compiled with it.
        if not _compat.trace_is_clean():
            return call(*leaves)
        static = static_leaves(leaves)
        if not may_keep(static):
            return call(*leaves)
        return program(static, len(leaves))(*filter(is_traced, leaves))

    return call_or_run


# The transforms


class InnerTransform(Transform):
    """What these transforms decide: no shardings, and anything may be an argument."""

    # Whether JAX compiles what it runs outside of any trace, as a loop.
    compiles_at_top_level: ClassVar[bool] = False

    def jax_transform(self, plan: Plan, function: Function) -> Function:
        """Transforms a pure function, which takes leaves with ``plan.specs``.

        Returns:
          A function that takes and returns the same.
        """
        return function

    def user_function(self, plan: Plan, caller: Caller, unflattened: Unflattened) -> Function:
        """Returns what the trace calls for the user's function, with the objects of the trace."""
        fun: Function = caller.fun
        return fun

    def tracing(  # noqa: D102
        self, plan: Plan, caller: Caller, unflattened: Unflattened, leaves: Sequence[object]
    ) -> AbstractContextManager[Function]:
        # The surrounding trace has given the modules names and shardings; these are other objects.
        pass_tags(caller, unflattened)
        pass_paths(caller, unflattened)
        return contextlib.nullcontext(self.user_function(plan, caller, unflattened))

    def compile(self, plan: Plan, function: Function) -> Program:
        """Returns the transformed function in the forms that calls use; nothing is compiled here.

        It is called once for each plan.
        """
        inline = self.jax_transform(plan, function)
        by_content = compile_at_top_level(inline, compiled_by_content)
        per_call = by_content if self.compiles_at_top_level else inline
        return Program(staged=None, top_level=inline, inline=inline, traced_each_time=per_call)


class Inner(LiftedFunction[P, R]):
    """A function that takes and returns NNX objects, transformed by JAX.

    Changes that it makes to its arguments are made to the caller's own objects. It is called
    within other transforms, such as :func:`~nnx_sharding.jit`, or at top level.
    """

    @_compat.api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function; its changes are made to the caller's own objects."""
        plan, flat = self._find_plan((*self._bound, *args), kwargs)
        return self._run(plan, flat, self._choose_program(plan, flat))  # type: ignore[no-any-return]

    def _run(self, plan: Plan, flat: Flat, execute: Function, fun: object = None) -> Any:
        """Runs a call within the current trace, if any; returns what the user's function returns.

        Args:
          plan: the plan of the call.
          flat: its arguments, to which changes are written back.
          execute: what takes the leaves, and returns what the pure function returns.
          fun: what the trace calls instead of the user's function.
        """
        with key_traces_by_tags(flat.objects):
            return run(plan, flat, execute, fun or self._fun, nested=True)
