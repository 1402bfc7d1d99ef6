"""``while_loop`` and ``fori_loop`` for functions of NNX objects.

Both are loops without slices: an argument is the same for all steps, or carried
(:class:`~.scan.Loop`). The loop is a function of these arguments:

    while_loop   objects, init_val              the same for all steps, carried
    fori_loop    objects, i, init_val, upper    the same, carried, carried, the same

``objects`` is the list of the objects to which the user's functions are bound, such as the model of
a method. A *pure function* takes the arrays of all arguments, calls ``fun`` of the *caller*
(:class:`~.call_context.Caller`), and returns output arrays and an *outcome*: what ``fun`` did to
objects. In a step, ``fun`` runs the body. The condition is a second function of the same arrays:
the same pure function, traced with the condition put into the caller. The condition's result is the
one array that is taken from its outputs.

`fori_loop` carries its counter, ``i``. With a known number of steps it is a `scan`, as in JAX, so
that it can be differentiated in reverse mode; otherwise the counter is compared with ``upper``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp

from .. import _compat
from ..core.call_context import Caller, called_by, current_caller
from ..core.functions import name_of
from ..core.outcome import OutputGroup
from ..core.plan import Plan
from ..core.prefixes import Specs
from ..core.unflatten import Unflattened
from ..errors import raise_if_any
from ..specs.types import BROADCAST, CARRY
from .carry_checks import check_carry
from .functions import Functions, call_functions, scalar_value
from .in_trace import Function, StaticLeaves, compile_at_top_level, is_array, tree_text
from .mapped_axes import jax_options
from .scan import Loop, Scan


@_compat.api_boundary
def while_loop(
    cond_fun: Callable[[Any], object],
    body_fun: Callable[[Any], object],
    init_val: object,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Calls a function repeatedly while a condition holds, in one loop of the program.

    Variables that the body does not write are inputs of the loop, and are not copied in it.

    Args:
      cond_fun: a function of the carry that returns a bool scalar. It may call modules, but change
        nothing.
      body_fun: a function of the carry that returns the next one: of the same structure, with
        arrays of the same types, and the same modules, which it may change. Either function may be
        a bound method.
      init_val: the first carry.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      The last carry.

    Raises:
      TypeError: the carry changes its structure or its types, or ``cond_fun`` returns no bool.
      ValueError: the body replaces modules or changes their structure, or ``cond_fun`` changes
        something.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import while_loop
      >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
      >>> def halve(carry):
      ...     model, x = carry
      ...     model.kernel[...] /= 2
      ...     return model, x / 2
      >>> same, x = while_loop(lambda carry: carry[1] > 1, halve, (model, jnp.float32(5)))
      >>> same is model, x
      (True, Array(0.625, dtype=float32))

    The semantics are those of ``jax.lax.while_loop`` and ``flax.nnx.while_loop``.
    """
    # The order counts: the condition is the first function of the call, the body the last one.
    functions_by_name = {"cond_fun": cond_fun, "body_fun": body_fun}
    functions = Functions(
        "while_loop", functions_by_name, leading=("functions", "init_val"), num_operands=0
    )
    transform = _While(
        name="while_loop",
        in_specs=Specs((BROADCAST, CARRY)),
        out_specs=Specs(CARRY),
        is_fori=False,
        bound=functions.bound,
    )
    args = functions.objects, init_val
    return call_functions(functions, transform, graph, graph_updates, *args)


@_compat.api_boundary
def fori_loop(
    lower: object,
    upper: object,
    body_fun: Callable[[Any, Any], object],
    init_val: object,
    *,
    unroll: int | bool | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Calls a function for each integer in a range, in one loop of the program.

    Args:
      lower: the first integer; an integer scalar.
      upper: the integer after the last one. With bounds that are known while tracing, the loop is a
        ``scan``, which can be differentiated in reverse mode; otherwise it is a ``while_loop``.
      body_fun: a function of the integer and the carry that returns the next carry, as for
        :func:`while_loop`.
      init_val: the first carry.
      unroll: how many steps to unroll in one iteration; True for all. It needs known bounds.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      The last carry.

    Raises:
      TypeError: the bounds are not integer scalars of one type, or the carry changes its structure
        or its types.
      ValueError: ``unroll`` for unknown bounds; the body replaces modules or changes their
        structure.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import fori_loop
      >>> count = nnx.BatchStat(jnp.int32(0))
      >>> def add(i, count):
      ...     count[...] += i
      ...     return count
      >>> fori_loop(0, 5, add, count)[...]
      Array(10, dtype=int32)

    The semantics are those of ``jax.lax.fori_loop`` and ``flax.nnx.fori_loop``.
    """
    lower = scalar_value("fori_loop", "lower", lower, "iu", "an integer scalar")
    upper = scalar_value("fori_loop", "upper", upper, "iu", "an integer scalar")
    # Both bounds get one type. The options for `scan` are empty if the number of steps is unknown.
    lower, upper, scan_options = _fori_bounds(lower, upper, unroll)
    # The names, the specs and the arguments below are in one order.
    functions = Functions(
        "fori_loop",
        {"body_fun": body_fun},
        leading=("functions", "i", "init_val", "upper"),
        num_operands=0,
    )
    transform = _While(
        name="fori_loop",
        in_specs=Specs((BROADCAST, CARRY, CARRY, BROADCAST)),
        out_specs=Specs(CARRY),
        is_fori=True,
        bound=functions.bound,
        options=jax_options(**scan_options),
    )
    args = functions.objects, lower, init_val, upper
    # The counter is an argument of its own, and not in the user's carry, so that messages name the
    # carry as the user wrote it.
    _last_i, last_carry = call_functions(functions, transform, graph, graph_updates, *args)
    return last_carry


def _fori_bounds(
    lower: Any, upper: Any, unroll: int | bool | None
) -> tuple[int | jax.Array, int | jax.Array, dict[str, Any]]:
    """Returns the bounds of a loop in one type, and options of ``scan``.

    The options are empty if a bound is traced, because then the number of steps is unknown.

    Args:
      unroll: how many steps to unroll in one iteration; None for the default.

    Raises:
      TypeError: the bounds have different types.
      ValueError: ``unroll`` is given, but the number of steps is unknown.
    """
    dtype = _dtype_of_bounds(lower, upper)  # raises for different types
    if not isinstance(lower, jax.core.Tracer) and not isinstance(upper, jax.core.Tracer):
        lower, upper = int(lower), int(upper)
        length = max(upper - lower, 0)
        # Under `jax.disable_jit`, JAX's `scan` cannot run without steps, but its `while_loop` can.
        if length or not jax.config.jax_disable_jit:
            # JAX's `scan` takes no None for `unroll`; 1 is its default.
            options = {"length": length, "reverse": False, "unroll": unroll or 1}
            return lower, upper, options
    elif unroll not in (None, False, 1):  # True equals 1, so it passes as well, as in JAX
        raise ValueError(
            f"fori_loop: unroll={unroll!r} needs a known number of steps, and lower or upper is "
            "traced. Pass them as static values, or leave unroll out."
        )
    return jnp.asarray(lower, dtype), jnp.asarray(upper, dtype), {}


def _dtype_of_bounds(lower: Any, upper: Any) -> Any:
    """Returns the dtype that both bounds of a loop have, or can have.

    Raises:
      TypeError: the bounds have different types.
    """
    types = [jax.typeof(x) for x in (lower, upper)]
    # A Python number has a weak type, and takes the dtype of the other bound.
    dtypes = {x.dtype for x in types if not x.weak_type}
    if not dtypes:  # two Python numbers, which may be traced: JAX's default
        return jnp.result_type(*types)
    if len(dtypes) > 1:
        raise TypeError(
            f"fori_loop: lower and upper must have one type, got {types[0].str_short()} and "
            f"{types[1].str_short()}."
        )
    return dtypes.pop()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _While(Scan):
    """The options of ``while_loop`` and ``fori_loop``.

    The field ``options`` has options of ``jax.lax.scan``, with which the loop runs as a ``scan``.
    The field is empty if the number of steps is unknown. ``carry_argument`` and
    ``carry_result`` are None, because `user_function` checks the carry itself.
    """

    remedy: ClassVar[str] = "Make the change outside of the loop."
    is_fori: bool  # whether it is ``fori_loop``
    # For each function, the positions of its objects in ``objects``. They are part of the key by
    # which a trace is found.
    bound: tuple[tuple[int, ...], ...]
    carry_argument: int | str | None = None
    carry_result: int | None = None

    def stacks_captured(self, array: object) -> bool:
        return False  # the number of steps may be unknown, so nothing can be stacked

    def user_function(self, plan: Plan, caller: Caller, unflattened: Unflattened) -> Function:
        """Returns the function that the pure function calls at each step.

        That is the body with a check of its carry. It takes the arguments of the loop, as in the
        table of this module. It returns the next carry; for ``fori_loop``, the next counter and the
        next carry.
        """
        # `_trace_condition` has put the condition in the place of the `Functions` of the call. The
        # condition is called as it is, because it returns no carry to check.
        if not isinstance(caller.fun, Functions):
            return super().user_function(plan, caller, unflattened)
        body = caller.fun.bind(-1)  # the last function, after the condition if there is one

        def while_step(objects: Sequence[object], carry: object) -> object:
            new_carry = body(objects, carry)
            # Raises an error unless the new carry has the same form, and the same modules.
            check_carry(self.name, name_of(body), carry, new_carry)
            return new_carry

        def fori_step(objects: Sequence[object], i: Any, carry: object, upper: object) -> Any:
            new_carry = body(objects, i, carry)
            check_carry(self.name, name_of(body), carry, new_carry)  # raises like `while_step`
            return i + 1, new_carry

        return fori_step if self.is_fori else while_step

    def jax_transform(self, plan: Plan, function: Function) -> Function:
        if self.options:  # the number of steps is known
            return super().jax_transform(plan, function)
        return compile_at_top_level(_WhileLoop((), plan, function))


class _WhileLoop(Loop):
    """A loop that runs as long as a condition holds.

    It is a ``while_loop``, or a ``fori_loop`` with a traced bound. From `Loop` it has the pure
    function (``_function``), the options of the call (``_transform``), and

        _leaves     a method that puts static leaves and a carry into the slots of the pure function
        _names_of   a method that returns the user's expressions for objects, by their indices
    """

    def _check_lengths(self, leaves: Sequence[object]) -> None:
        pass  # nothing is mapped

    def _run(
        self, step: Function, carry: OutputGroup, mapped: Sequence[jax.Array], static: StaticLeaves
    ) -> tuple[OutputGroup, Any]:
        """Runs ``jax.lax.while_loop``.

        Args:
          step: returns the next carry, and an output without arrays that says what the step did.
          mapped: is empty, because such a loop has no slices.
          static: the leaves that JAX does not trace, in pairs with their slots.

        Returns:
          The last carry, and the output of a step.
        """
        caller = current_caller()
        assert caller is not None  # a loop only runs in a call
        # The condition takes the arguments of the loop. For `fori_loop` it is our own function, for
        # `while_loop` the user's, which is the first one of the call.
        is_fori = cast("_While", self._transform).is_fori
        condition = _is_below if is_fori else caller.fun.bind(0)
        # JAX returns the carry alone, so each trace of the body records here what a step did. JAX
        # may trace the body again if types are weak. It runs the last trace, so the last item
        # counts.
        step_outputs: list[Any] = []

        def holds(carry: OutputGroup) -> jax.Array:
            return self._trace_condition(condition, caller, self._leaves(static, carry, mapped))

        def body(carry: OutputGroup) -> OutputGroup:
            new_carry: OutputGroup
            new_carry, step_output = step(carry, mapped)
            step_outputs.append(step_output)
            return new_carry

        last_carry = jax.lax.while_loop(holds, body, carry)
        if not step_outputs:  # under `jax.disable_jit`, a loop without steps traces no step
            jax.eval_shape(body, carry)
        return last_carry, step_outputs[-1]

    def _trace_condition(
        self, condition: Function, caller: Caller, leaves: Sequence[object]
    ) -> jax.Array:
        """Returns the condition for these leaves, a traced bool scalar.

        The pure function is traced once more, and calls the condition instead of the body, so both
        get modules made of the same leaves.

        Args:
          condition: the user's function, or :func:`_is_below`.
          caller: the call that is being traced, whose ``fun`` runs the body.

        Raises:
          TypeError: the condition returns no bool scalar.
          ValueError: the condition changes an object.
        """
        fun_name = name_of(condition)

        def checked_condition(*args: object) -> Any:
            out = condition(*args)
            # In a `shard_map`, the type may also say that the value differs between devices, so
            # types are not compared as a whole.
            aval: Any = jax.typeof(out) if is_array(out) else None
            if getattr(aval, "dtype", None) != jnp.bool_ or aval.shape != ():
                raise TypeError(
                    f"while_loop: {fun_name} must return a bool scalar, got {tree_text(out)}."
                )
            return out

        # The pure function calls `checked_condition` in this block.
        with called_by(caller._replace(fun=checked_condition)):
            *groups, outcome = self._function(*leaves)  # new arrays, and what was done to objects
        # A loop takes nothing but the bool from its condition, so other changes would be lost.
        # `changed` has the indices of Variables with other arrays or metadata, of static objects
        # and of modules.
        changed = {*outcome.values, *outcome.metadata, *outcome.statics}
        changed |= {change.node for change in outcome.nodes}
        raise_if_any(
            ValueError,
            f"while_loop: the condition {fun_name} changes these, which only the body can do:",
            [f"  {name}" for name in self._names_of(sorted(changed)).values()],
            "Change them in body_fun, or call a copy (nnx.clone) in cond_fun.",
        )
        # The array in each slot after the call is an output, or an input if it is unchanged.
        arrays_after = outcome.arrays(leaves, groups)
        # The structure after the call also has the objects of the arguments, but its root is the
        # condition's result, and the bool is the only array there.
        [slot] = outcome.structure.root_slots
        return cast(jax.Array, arrays_after[slot])


def _is_below(objects: object, i: Any, init_val: object, upper: Any) -> Any:
    """The condition of ``fori_loop``, a function of the loop's arguments."""
    return i < upper
