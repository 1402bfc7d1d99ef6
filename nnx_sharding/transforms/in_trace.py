"""The base of transforms that become part of the surrounding trace, and compile nothing.

`jit` and `shard_map` make a program. All other transforms (`grad`, `vmap`, `scan`, `cond`, …) are
called while another function is traced, or at top level. A call of one goes to one pure function,
as in `jit`, but without stages, shardings and donation:

    Inner.__call__                  flattens the arguments, and finds the plan for their structure
      InnerTransform.make_program   once for each plan
        jax_transform(plan, …)      what JAX makes of the pure function: the one thing to override
      run                           calls it with the leaves, and writes back what changed

Subclasses of :class:`InnerTransform` say what JAX does with a pure function, and what happens
around the user's function in its trace (:meth:`InnerTransform.user_function`). A transform that has
to return more than the function, such as a derivative, subclasses :class:`Inner` as well.

Words of all transforms:

    leaf           an array or a number in the arguments; or a flag, which JAX does not trace
    slot           the position of a leaf among those of all arguments
    plan           what is known of all calls whose arguments differ only in their leaves
    pure function  the user's function as a function of leaves: returns the arrays of the results,
                   in one group for each spec, and last the outcome
    spec           how a leaf enters or leaves: an axis, in these transforms
    outcome        what a call did to the objects of its arguments, without arrays
    tag            what is declared for the activations of a module, with its path in the user's
                   argument; `jit` tags the modules in its trace, and traces within have copies
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
# The leaves of a call that JAX does not trace, such as flags, each in a pair with its slot. Two
# `Static` leaves are equal by type and value, or by identity.
StaticLeaves: TypeAlias = Sequence[tuple[int, Static]]


# Texts for messages


def type_text(value: object) -> str:
    """Returns a text for the type of a value: ``float32[2,4]``, ``a Linear``, ``the class X``."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return jax.typeof(value).str_short() if is_array(value) else f"a {type(value).__name__}"


def tree_text(tree: object) -> str:
    """Returns a text of at most 300 letters for a pytree: the pytree of the types of its leaves."""
    types = jax.tree.map(type_text, tree, is_leaf=_compat.is_graph_object)
    return textwrap.shorten(repr(types).replace("'", ""), 300)


# Leaves and slots


def is_array(x: object) -> bool:
    """Whether something is an array or a number, but no Variable."""
    return _compat.is_array_like(x) and not _compat.is_graph_object(x)


def is_traced(leaf: object) -> bool:
    """Whether JAX traces a leaf of the arguments: an array or a number, but no flag.

    A flag is not traced because it decides which code runs; `cond` is for conditions that only the
    program knows.
    """
    return _compat.is_array_like(leaf) and not isinstance(leaf, bool)


def replace_slots(
    leaves: Sequence[object], slots: Iterable[int], arrays: Iterable[object]
) -> list[Any]:
    """Returns a copy of the leaves with other arrays in some slots.

    ``replace_slots([a, b, c], slots=[2, 0], arrays=[x, y])`` is ``[y, b, x]``.
    """
    array_by_slot = dict(zip(slots, arrays, strict=True))
    return [array_by_slot.get(slot, leaf) for slot, leaf in enumerate(leaves)]


def traced_slots(leaves: Sequence[object]) -> list[int]:
    """Returns the slots of the leaves that JAX traces."""
    return [slot for slot, leaf in enumerate(leaves) if is_traced(leaf)]


def call_on_slots(
    transform: Callable[[Function], Function],
    function: Function,
    leaves: Sequence[object],
    slots: Sequence[int] | None = None,
) -> Any:
    """Transforms a function of all leaves as a function of some of them, and calls the result.

    Args:
      transform: a transform of JAX, such as ``jax.vmap``. It sees only the leaves in ``slots``.
      function: takes all leaves, as positional arguments.
      leaves: all leaves. A leaf whose slot is not given, such as a flag, is captured as it is.
      slots: the positions of the leaves that become arguments of the transformed function; None for
        all leaves that JAX traces.

    Returns:
      The result of the transformed function for the leaves in ``slots``.
    """
    slots = traced_slots(leaves) if slots is None else slots

    def restricted(*arrays: object) -> Any:
        return function(*replace_slots(leaves, slots, arrays))

    return transform(restricted)(*(leaves[slot] for slot in slots))


def static_leaves(leaves: Sequence[object]) -> StaticLeaves:
    """Returns the leaves that JAX does not trace: ``(x, True)`` -> ``((1, Static(True)),)``."""
    return tuple((slot, Static.of(x)) for slot, x in enumerate(leaves) if not is_traced(x))


def with_static(static: StaticLeaves, traced: Iterable[object]) -> list[Any]:
    """Returns all leaves by slot, from the static leaves and from the traced ones, in order.

    Inserting works because the static leaves are sorted by slot.
    """
    leaves = [*traced]
    for slot, leaf in static:
        leaves.insert(slot, leaf.value)
    return leaves


def may_keep(static: StaticLeaves) -> bool:
    """Whether a function that captures these leaves may be kept for later calls.

    JAX finds a trace by the identity of its function, so a kept function is not traced again. But
    it keeps alive what it captures, and that must not be the user's objects. Numbers, strings and
    other values of plain types are harmless.
    """
    return all(isinstance(leaf.value, PLAIN_TYPES) for _, leaf in static)


def compile_at_top_level(
    call: Function, compile_with: Callable[[Function], Function] = jax.jit
) -> Function:
    """Returns a function of the same leaves that runs as one program outside of any trace.

    Outside of a trace, JAX itself runs ``call`` operation by operation: it would trace the loops in
    it again in each call, and compile them. No program is made if a static leaf is an object of the
    user, because the program would keep that object alive. Then ``call`` runs as it is.

    Args:
      call: a function of all leaves, arrays and others.
      compile_with: makes a compiled function of a function of arrays: ``jax.jit`` or the like.
    """

    # There is one program for each set of flags and settings; JAX tells types of arrays apart.
    @functools.lru_cache(maxsize=64)
    def program_with(static: StaticLeaves) -> Function:
        """Compiles ``call`` as a function of the traced leaves, with the others fixed."""
        return compile_with(lambda *arrays: call(*with_static(static, arrays)))

    def run_compiled(*leaves: object) -> Any:
        # Within a trace, `call` becomes part of the trace, and is compiled with it.
        if not _compat.trace_is_clean():
            return call(*leaves)
        static = static_leaves(leaves)
        if not may_keep(static):
            return call(*leaves)
        return program_with(static)(*filter(is_traced, leaves))

    return run_compiled


# The transforms


class InnerTransform(Transform):
    """The settings that these transforms share: no shardings, and anything may be an argument.

    `make_program` calls `jax_transform`, before anything is traced. Each trace calls `tracing`,
    which gets from `user_function` what the trace calls in place of the user's function.
    """

    # Whether the transformed function is compiled even outside of `jax.jit`, because it has a loop
    # or a branch, which JAX compiles in any case.
    compiles_at_top_level: ClassVar[bool] = False

    def jax_transform(self, plan: Plan, function: Function) -> Function:
        """Applies JAX's transform to the pure function of a plan; by default, none.

        Args:
          plan: has a spec for each leaf that the function takes.
          function: the pure function.

        Returns:
          A function of the same leaves that returns the same: groups of arrays, and the outcome.
        """
        return function

    def user_function(self, plan: Plan, caller: Caller, unflattened: Unflattened) -> Function:
        """Returns what the pure function calls with the arguments; by default, the user's function.

        Args:
          plan: the plan of the call.
          caller: the call that is being traced; ``caller.fun`` is the user's function.
          unflattened: the user's objects as copies for the trace, which hold tracers.
        """
        fun: Function = caller.fun
        return fun

    def tracing(
        self, plan: Plan, caller: Caller, unflattened: Unflattened, leaves: Sequence[object]
    ) -> AbstractContextManager[Function]:
        """Prepares the copies of the user's modules that this trace has, before it calls them.

        Facts about a module in the surrounding trace are passed on from the caller's module to its
        copy: its tag, and its path within each surrounding ``remat`` with filters.

        Args:
          plan: the plan of the call.
          caller: the call that is being traced, with the objects of the surrounding trace.
          unflattened: the copies of these objects, in the same order.
          leaves: the tracers in the copies, which these transforms do not need here.

        Returns:
          A context that yields the function to call in place of the user's.
        """
        pass_tags(caller, unflattened)
        pass_paths(caller, unflattened)
        return contextlib.nullcontext(self.user_function(plan, caller, unflattened))

    def make_program(self, plan: Plan, function: Function) -> Program:
        """Transforms the pure function, once for each plan. Nothing is compiled here.

        Returns:
          A program whose ``inline`` and ``top_level`` are one function. Its ``traced_each_time`` is
          for calls at top level of a function that captures arrays, or reaches other values than in
          earlier calls: no trace of such a function can be used again. ``staged`` is None, because
          these transforms have no stages to lower.
        """
        transformed = self.jax_transform(plan, function)
        traced_each_time = transformed
        if self.compiles_at_top_level:
            # JAX would compile the loop again after each trace. `compiled_by_content` finds the
            # program of an earlier trace with the same operations, if there is one.
            traced_each_time = compile_at_top_level(transformed, compile_with=compiled_by_content)
        return Program(
            staged=None,
            top_level=transformed,
            inline=transformed,
            traced_each_time=traced_each_time,
        )


class Inner(LiftedFunction[P, R]):
    """A function that takes and returns NNX objects, transformed by JAX.

    Changes that the function makes to its arguments are made to the caller's own objects. It is
    called within other transforms, such as :func:`~nnx_sharding.jit`, or at top level. Subclasses
    call `_run`, or `_run_with_result` if the call has a second result. From `LiftedFunction` they
    have the user's function (``_fun``), the objects to which it is bound (``_bound``), and
    ``_find_plan(args, kwargs)``, which returns the plan of a call and its flattened arguments.
    """

    @_compat.api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function; its changes are made to the caller's own objects."""
        plan, flat = self._find_plan((*self._bound, *args), kwargs)
        execute = self._choose_program(plan, flat)  # the transformed pure function
        return self._run(plan, flat, execute)  # type: ignore[no-any-return]

    def _run(self, plan: Plan, flat: Flat, execute: Function, fun: object = None) -> Any:
        """Runs a call within the current trace, if any; returns what the user's function returns.

        Args:
          flat: its arguments, to which changes are written back.
          execute: takes the leaves, and returns what the pure function returns.
          fun: the function that the trace calls; None for the user's function.
        """
        # JAX compares arrays only, and could use a trace of modules whose activations are sharded
        # in another way. In this context, tags of modules are part of the key of a trace.
        with key_traces_by_tags(flat.objects):
            # ``nested`` is True even at top level, because these transforms compile no plan.
            # `run` also writes back what the function changed, and returns the user's result.
            return run(plan, flat, execute, fun or self._fun, nested=True)

    def _run_with_result(self, plan: Plan, flat: Flat, execute: Function) -> tuple[Any, Any]:
        """Runs a call that has a result besides the user's function's, such as a derivative.

        Args:
          flat: its arguments, to which changes are written back.
          execute: takes the leaves, and returns what the pure function returns, and the result.

        Returns:
          The result of the user's function, and the other result.
        """
        results = list[Any]()  # gets one item, because `execute` is called once

        def outputs_of(*leaves: object) -> Any:
            outputs, result = execute(*leaves)
            results.append(result)
            return outputs

        returned = self._run(plan, flat, outputs_of)
        return returned, results[0]
