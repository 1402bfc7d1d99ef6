"""``custom_vjp`` and ``custom_jvp``: functions of NNX objects with the user's derivatives.

The *pure function* of a call takes the leaves of the arguments (arrays, numbers, flags), of which
each has a *slot* (its position), calls the user's function, and returns the arrays of the results
in groups, and an *outcome*: what was done to objects, with the *structure* (all but the arrays) of
the objects after the call. A function and its rules are functions of the same arguments, and their
outcomes have to be the same: JAX runs `fwd` instead of the function where it differentiates. So
each call of the wrapper makes one :class:`_Call`, which traces whatever JAX asks for, function or
rule, as the user's function of the same pure function, and compares their outcomes.

The rules take and return modules. What the pure function does with arguments and results, they do
with tangents (:class:`~.tangents.TangentForm`): the arrays of an argument that is differentiated
become a module of cotangents, or with graph updates a state, as Flax has it. What a rule returns
besides the output (residuals, tangents) is recorded in a list while the pure function
runs, since that returns the output only.

From other modules:

    Plan          what is known before the trace: ``structure`` and names of the arguments
    Caller        the call being traced; the pure function calls ``caller.fun``
    Source        in ``outcome.sources``, by slot after the call: the group of outputs that has the
                  array and its position in that; or group ``INPUT`` and its slot before
    Location      where arrays are in the arguments: their path and slots, and the index of the
                  Variable (``object_index``); None outside of Variables
    flatten       a pytree of objects to structure, ``leaves`` (arrays, by slot) and ``objects``;
                  `unflatten` makes new objects, whose pytree is its ``root``
    slots_by_path the slots of the arrays in a structure, by path
    TangentForm   which arrays of some objects have tangents (``slots``); ``build`` makes objects
                  that hold tangents, ``tangents_in`` takes them out of those that the user gave
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .. import _compat
from ..core.call_context import called_by, current_caller
from ..core.constrain import type_spec
from ..core.fingerprint import fingerprint_of
from ..core.flatten import Flat, flatten
from ..core.functions import FunctionGroup, name_of
from ..core.outcome import INPUT, Outcome, OutputGroup, Source
from ..core.plan import Plan
from ..core.signature import Roles
from ..core.structure import Location, Structure, VariableEntry
from ..core.unflatten import unflatten
from ..errors import raise_listed
from ..specs.filters import to_predicate
from ..specs.paths import Path
from .differentiation import check_pair
from .in_trace import Function, Inner, InnerTransform, is_traced, replace_slots
from .lifted import Modes, P, R, lift, unbind
from .stages import user_tree
from .tangents import TangentForm, slots_by_path, without_tangent

# An array for each output, in the groups that the pure function returns.
GroupArrays: TypeAlias = list[list[Any]]


@_compat.api_boundary
def custom_vjp(
    fun: Callable[..., object] | None = None,
    *,
    nondiff_argnums: Sequence[object] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Gives a function a reverse-mode derivative of your own.

    The result is called like ``fun``, and has ``defvjp(fwd, bwd)``. What ``fun`` or ``fwd`` changes
    in its arguments is changed for the caller.

    With graph updates, ``bwd`` gets a pair as cotangent: for each differentiated argument the
    cotangents of its Variables after the call, in an ``nnx.State`` for each module and None for
    each array; and the cotangent of the output. It returns a state for each module. Without graph
    updates it gets the cotangent of the output and returns a module for each module; a keyword
    argument ``updates_g`` has the arguments with the cotangents of the Variables that the call
    changed, and None for the others.

    Args:
      fun: the function, of positional arguments. In a class, the object is its first argument.
      nondiff_argnums: the positions of arguments that are not differentiated; with graph updates
        also ``nnx.DiffState(position, filter)``, for what *is* differentiated in modules.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      The function.

    Raises:
      TypeError: the function has no rules yet, or a rule returns no pair, or cotangents of other
        types than the arguments.
      ValueError: ``fun`` and ``fwd`` change different Variables, or cotangents have another
        structure than the arguments.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import custom_vjp, grad
      >>> @custom_vjp(graph_updates=False)
      ... def apply(model, x):
      ...     return model(x)
      >>> def forward(model, x):
      ...     return apply(model, x), (model, x)
      >>> def backward(residuals, g):
      ...     return None, jnp.clip(g @ residuals[0].kernel.T, -1, 1)
      >>> apply.defvjp(forward, backward)
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> grad(lambda x: 1e6 * apply(model, x).sum())(jnp.ones((1, 2))).max() <= 1
      Array(True, dtype=bool)

    The semantics are those of ``jax.custom_vjp`` and ``flax.nnx.custom_vjp``.
    """
    return _make(CustomVjp, "custom_vjp", fun, nondiff_argnums, Modes(graph, graph_updates))


@_compat.api_boundary
def custom_jvp(
    fun: Callable[..., object] | None = None,
    *,
    nondiff_argnums: Sequence[int] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Gives a function a derivative of your own, for both modes of differentiation.

    The result is called like ``fun``, and has ``defjvp(rule)``.

    Args:
      fun: the function, as for :func:`custom_vjp`.
      nondiff_argnums: the positions of arguments that are not differentiated.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      The function.

    Raises:
      TypeError: as for :func:`custom_vjp`.
      ValueError: as for :func:`custom_vjp`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import custom_jvp, grad
      >>> @custom_jvp
      ... def scaled(model, x):
      ...     return model.scale * x
      >>> @scaled.defjvp
      ... def rule(primals, tangents):
      ...     (model, x), (d_model, d_x) = primals, tangents
      ...     return scaled(model, x), d_model.scale * x  # as if x was constant
      >>> model = nnx.LayerNorm(1, rngs=nnx.Rngs(0))
      >>> grad(lambda x: scaled(model, x).sum())(jnp.ones(1))
      Array([0.], dtype=float32)

    The semantics are those of ``jax.custom_jvp``.
    """
    return _make(CustomJvp, "custom_jvp", fun, nondiff_argnums, Modes(graph, graph_updates))


@_compat.api_boundary
def _make(
    cls: type[_CustomFunction[..., Any]],
    name: str,
    fun: Callable[..., object] | None,
    nondiff_argnums: Sequence[Any],
    modes: Modes,
) -> Any:
    """Makes the wrapper that ``custom_vjp`` or ``custom_jvp`` returns, or a decorator.

    Args:
      cls: the class of the wrapper.
      name: the name of the transform.
      fun: the user's function; None for a decorator.
      nondiff_argnums: as the user gave it: positions, or filters for what is differentiated.
      modes: how the user wants graphs to be treated.
    """
    if fun is None:
        # Called with options only, as a decorator.
        return lambda fun: _make(cls, name, fun, nondiff_argnums, modes)
    graph, updates = _compat.graph_mode(*modes)
    # A DiffState names an argument in which a filter chooses what is differentiated. A position
    # names one in which nothing is.
    states = [x for x in nondiff_argnums if isinstance(x, nnx.DiffState)]
    nondiff = [x for x in nondiff_argnums if not isinstance(x, nnx.DiffState)]
    positions = [*nondiff, *(x.argnum for x in states)]
    is_valid = all(isinstance(x, int) and x >= 0 for x in positions)
    if not is_valid or len({*positions}) < len(positions):
        raise TypeError(
            f"{name}: nondiff_argnums must be different positions from 0, got {positions}."
        )
    has_states = updates and name == "custom_vjp"  # whether rules get states, as from Flax
    if states and not has_states:
        need = (
            "needs graph=True and graph_updates=True. Without them, leave it out: bwd returns "
            "zeros for what is not differentiated."
            if name == "custom_vjp"
            else "only custom_vjp takes."
        )
        raise ValueError(f"{name}: nondiff_argnums holds an nnx.DiffState, which {need}")
    _, bound = unbind(fun)
    if bound:  # it would be unclear whether positions and rules count the object
        raise ValueError(
            f"{name}: {name_of(fun)} is a bound method. Decorate the function in the class: the "
            "object is then the first argument of the rules, too."
        )
    transform = _Custom(
        name=name,
        nondiff=tuple(sorted(nondiff)),
        filters=tuple((x.argnum, x.filter) for x in states),
        has_states=has_states,
    )
    return lift(cls, fun, transform, Roles(), graph, updates)


class _CustomFunction(Inner[P, R]):
    """A function with rules for its derivative."""

    _transform: _Custom
    _rules: tuple[Callable[..., Any], ...] = ()

    @_compat.api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function; its changes are made to the caller's own objects."""
        plan, flat = self._find_plan(self._positional_arguments(args, kwargs), {})
        with_rules = _Rules(self._fun, *self._rules)
        # A trace is used again only if function and rules reach the same as then: the fingerprint
        # is a key for that.
        fingerprint = fingerprint_of([*with_rules.functions, *plan.reached_from(flat.objects)])
        execute = plan.program_for(fingerprint).inline
        return self._run(plan, flat, execute, with_rules)  # type: ignore[no-any-return]

    def _positional_arguments(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Any, ...]:
        """Returns all arguments of a call by position, as rules get them, with the defaults.

        Raises:
          TypeError: the function has no rules yet, or an argument can only be passed by keyword.
          ValueError: a position in ``nondiff_argnums`` is not one of the call.
        """
        name = self._transform.name
        fun_name = name_of(self._fun)
        if not self._rules:
            how = "defvjp(fwd, bwd)" if name == "custom_vjp" else "defjvp(rule)"
            raise TypeError(f"{name}: {fun_name} has no rule. Call {fun_name}.{how} first.")
        # JAX's rules know positions only, so defaults and keywords become positional.
        given = inspect.signature(self._fun).bind(*self._bound, *args, **kwargs)
        given.apply_defaults()
        if given.kwargs:
            names = ", ".join(given.kwargs)
            raise TypeError(f"{name}: rules get no keyword-only arguments: {fun_name} has {names}.")
        positions = *self._transform.nondiff, *dict(self._transform.filters)
        if max(positions, default=-1) >= len(given.args):
            raise ValueError(
                f"{name}: nondiff_argnums names the positions {positions}, which count from 0, but "
                f"{fun_name} is called with {len(given.args)} arguments."
            )
        return given.args


class CustomVjp(_CustomFunction[P, R]):
    """What :func:`custom_vjp` makes."""

    def defvjp(self, fwd: Callable[..., object], bwd: Callable[..., object]) -> None:
        """Gives the function its rules.

        Args:
          fwd: is called with the arguments of the function in its place, where it is
            differentiated. Returns the output, and residuals for ``bwd``: any pytree of modules,
            arrays and other values. It changes the same Variables as the function.
          bwd: is called with the arguments in ``nondiff_argnums``, the residuals and the cotangent
            of the output. Returns a tuple with the cotangent of each other argument, or None for
            zeros.

        There is no ``symbolic_zeros``: cotangents are arrays, since Variables cannot hold others.
        """
        self._rules = fwd, bwd


class CustomJvp(_CustomFunction[P, R]):
    """What :func:`custom_jvp` makes."""

    def defjvp(self, rule: Callable[..., object]) -> Callable[..., Any]:
        """Gives the function its rule, and returns that: it can be a decorator.

        Args:
          rule: is called with the arguments in ``nondiff_argnums``, a tuple of all others, and a
            tuple of their tangents, in which modules have tangents in place of their arrays.
            Returns the output and its tangent. What it changes in the arguments is changed, as by
            the function; what it leaves in their tangents is the tangent of that.

        Returns:
          The rule.

        There is no ``symbolic_zeros``, as for :func:`custom_vjp`, and no ``defjvps``: rules for
        single arguments could not say what becomes of the tangents of changed Variables.
        """
        self._rules = (rule,)
        return rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Custom(InnerTransform):
    """What ``custom_vjp`` and ``custom_jvp`` decide."""

    in_name: str = "nondiff_argnums"
    nondiff: tuple[int, ...]  # the positions of arguments that are not differentiated
    # By position, the filter for what is differentiated in modules.
    filters: tuple[tuple[int, Any], ...] = ()
    # Whether cotangents of modules are states: Flax's contract with graph updates.
    has_states: bool = False

    def jax_transform(self, plan: Plan, function: Function) -> Function:
        # A new object for each call: it records what the function and its rules do.
        cls = _CallWithVjp if self.name == "custom_vjp" else _CallWithJvp
        return lambda *leaves: cls(
            transform=self, plan=plan, function=function, leaves=leaves
        ).run()


class _Rules(FunctionGroup):
    """A function and the rules for its derivative; called, it is the function."""

    __slots__ = ("__name__",)

    def __init__(self, *functions: Callable[..., object]):
        self.functions = functions
        self.__name__ = name_of(functions[0])

    def __call__(self, *args: object) -> Any:
        return self.functions[0](*args)


# The slot of an array that a call cannot change, and that so is none of the arrays after it. As an
# index it is the last one: lists of tangents by slot end with None for it.
_NO_SLOT = -1


class _SplitArguments(NamedTuple):
    """The arguments of a function with rules."""

    nondiff: list[Any]  # those that are not differentiated
    differentiated: tuple[Any, ...]


class _RuleTangents(NamedTuple):
    """What a rule of ``custom_jvp`` did with tangents."""

    output: Any  # the tangent that it returned: a pytree like the output
    args: Any  # the tangents of all arguments, a tuple, as it left them


class _Call:
    """One call: JAX may trace the function and its rules later, and several times."""

    def __init__(
        self, transform: _Custom, plan: Plan, function: Function, leaves: Sequence[object]
    ):
        """Sorts the leaves of one call: those that JAX gets as arguments, and the rest.

        Args:
          transform: the transform, with the arguments that are not differentiated.
          plan: what is known of the call before it: structure and names of its arguments.
          function: its pure function.
          leaves: the leaves of its arguments, by slot.
        """
        caller = current_caller()
        assert caller is not None  # a call is made in the trace of one
        self.transform, self.plan, self._function, self._caller = transform, plan, function, caller
        # The user's function; his rules are forward and backward, or the one for tangents.
        self.fun: Function
        self.rules: tuple[Function, ...]
        self.fun, *rules = caller.fun.functions
        self.rules = tuple(rules)
        # The slots of what is differentiated, by path.
        self._differentiated, nondiff_slots = self._sort_locations()
        # The slots of the arguments of JAX's function. The others are fixed: flags, and arrays that
        # are not differentiated. If an outer transform traces such an array, it is an argument too,
        # as JAX's rules must not capture tracers.
        self.slots = [
            slot
            for slot, leaf in enumerate(leaves)
            if is_traced(leaf) and (slot not in nondiff_slots or isinstance(leaf, jax.core.Tracer))
        ]
        self._arrays = [leaves[slot] for slot in self.slots]
        # By slot; None for an argument of JAX's function.
        self._fixed_leaves = replace_slots(leaves, self.slots, [None] * len(self.slots))
        self._types = {slot: _abstract(leaves[slot]) for slot in self.slots}
        self._outcomes: dict[Callable[..., Any], Outcome] = {}  # by the user's function or rule

    def _sort_locations(self) -> tuple[dict[Path, tuple[int, ...]], set[int]]:
        """Sorts the Variables and arrays of the arguments by whether they are differentiated.

        Returns:
          The slots of what is differentiated, by path, such as ``(0, "kernel")``, which starts with
          the position among differentiated arguments; and the slots of all that is in arguments of
          ``nondiff_argnums``.
        """
        differentiated: dict[Path, tuple[int, ...]] = {}
        nondiff_slots: set[int] = set()
        structure, nondiff = self.plan.structure, self.transform.nondiff
        for location in structure.walk(structure.root, iter(structure.root_slots)):
            # The root is (positional arguments, keyword arguments); there are none of the latter.
            _, position, *path = location.path
            if position in nondiff:
                nondiff_slots.update(location.slots)
            elif self._matches_filter(position, path, location):
                number_before = sum(other < position for other in nondiff)
                differentiated[position - number_before, *path] = location.slots
        return differentiated, nondiff_slots

    def _matches_filter(self, position: int, path: Sequence[Hashable], location: Location) -> bool:
        """Whether something in an argument is differentiated, by the filter for that argument.

        Args:
          position: that of the argument.
          path: where it is in the argument.
          location: the Variable or the array. Filters are for Variables in modules only.
        """
        filters = dict(self.transform.filters)  # by the position of the argument
        if location.object_index is None or position not in filters:
            return True
        # Filters get the path in the module, without the keys that lead to it in the argument:
        # ("kernel",) for the path (0, "kernel") in a list of modules, whose keys are (0,).
        all_keys = (part.keys for part in self.plan.graph_arguments[position].parts)
        depth = next(len(keys) for keys in all_keys if (*path[: len(keys)],) == keys)
        variable = self._caller.objects[location.object_index]
        is_differentiated = to_predicate(filters[position])
        return bool(is_differentiated((*path[depth:],), variable))

    def run(self) -> tuple[Any, ...]:
        """Calls the function with its rules; returns what the pure function returns.

        That is: groups of output arrays, and the outcome.
        """
        results = self.differentiable()(self._arrays)
        # JAX may keep the rules, and with them this call; it must not keep the user's modules and
        # arrays alive. Static objects are needed to trace a rule later.
        statics = {*self.plan.structure.static_indices()}
        objects = [x if i in statics else None for i, x in enumerate(self._caller.objects)]
        self._caller = self._caller._replace(objects=objects)
        self._arrays = []
        groups = [OutputGroup(("",) * len(arrays), arrays) for arrays in results]
        # Those of the function and of its rules are equal; the last one recorded serves.
        *_, outcome = self._outcomes.values()
        return (*groups, outcome)

    def differentiable(self) -> Function:
        """Makes JAX's function of the arrays in ``slots``, with rules. It returns `GroupArrays`."""
        raise NotImplementedError

    def _outputs(self, arrays: Sequence[object]) -> GroupArrays:
        """Traces the function; returns its outputs, in groups."""
        _, outputs = self.trace(self.fun, arrays)
        return outputs

    def trace(
        self,
        fun: Callable[..., object],
        arrays: Sequence[object],
        rule: Callable[..., object] | None = None,
    ) -> tuple[Outcome, GroupArrays]:
        """Calls the pure function, with the user's function or a rule as what it calls.

        Args:
          fun: what it calls.
          arrays: the arrays in ``slots``.
          rule: the rule that ``fun`` wraps, if it is one.

        Returns:
          What the function did to objects, and the outputs.

        Raises:
          ValueError: it does something else than what was traced before.
        """
        with called_by(self._caller._replace(fun=fun)):
            leaves = replace_slots(self._fixed_leaves, self.slots, arrays)
            *groups, outcome = self._function(*leaves)
        for traced, known in self._outcomes.items():
            # Sources too: JAX compares the outputs of rules, but not which inputs were returned.
            if (known.structure, known.sources) != (outcome.structure, outcome.sources):
                self._refuse_difference((traced, rule or fun), (known, outcome))
        self._outcomes[rule or fun] = outcome
        return outcome, [list(group.arrays) for group in groups]

    def _refuse_difference(
        self, functions: Sequence[Callable[..., object]], outcomes: Sequence[Outcome]
    ) -> NoReturn:
        """Raises an error for two functions that do different things to objects.

        Args:
          functions: the user's function and a rule, or two rules.
          outcomes: what each did.
        """
        name, other_name = map(name_of, functions)
        changed, other_changed = map(_changed_objects, outcomes)
        variables = self.plan.variables  # those of the arguments, by index
        lines = []
        for index in sorted(changed ^ other_changed):  # what only one of them changes
            place = variables[index].name if index in variables else "an object"
            lines.append(f"  {place}: changed by {name if index in changed else other_name} only")
        raise_listed(
            ValueError,
            f"{self.transform.name}: {name} and {other_name} have to return the same structure "
            "and to change the same Variables:",
            # The same Variables may change in both, and the results differ.
            lines or ["  the structures that they return or leave differ"],
        )
        raise AssertionError  # there are lines, so that `raise_listed` raises

    def split(self, args: Sequence[object]) -> _SplitArguments:
        """Splits arguments by whether they are differentiated."""
        nondiff = self.transform.nondiff
        others = tuple(x for i, x in enumerate(args) if i not in nondiff)
        return _SplitArguments([args[i] for i in nondiff], others)

    def _zero_tangent(self, slot: int) -> Any:
        """Returns the zero tangent of the leaf in a slot; for integers, of dtype ``float0``."""
        if slot not in self._types:
            return without_tangent(self._fixed_leaves[slot])
        aval = self._types[slot]
        if not jnp.issubdtype(aval.dtype, jnp.inexact):
            return np.zeros(aval.shape, jax.dtypes.float0)
        return jnp.zeros(aval.shape, aval.dtype, out_sharding=aval.sharding)

    def tangents_after(self, outcome: Outcome, tangents: GroupArrays) -> list[Any]:
        """Returns the tangent of each array after the call; zeros for what it did not change.

        Args:
          outcome: says where each array after the call comes from.
          tangents: those of the outputs, in groups.
        """
        return [
            self._zero_tangent(position) if group == INPUT else tangents[group][position]
            for group, position in outcome.sources
        ]

    def cotangent_form(self, arguments: Flat) -> TangentForm:
        """Returns what translates cotangents of the arguments from the user's objects to arrays.

        ``arguments`` are those that the rule got in its trace.
        """
        # Types in place of arrays, so that the form does not keep these alive.
        types = replace_slots(self._fixed_leaves, self.slots, self._types.values())
        return TangentForm(arguments._replace(leaves=types, objects=()), self._differentiated)


def _changed_objects(outcome: Outcome) -> set[int]:
    """Returns the indices of the Variables and modules that a call changed."""
    nodes = (change.node for change in outcome.nodes)
    return {*outcome.values, *outcome.metadata, *nodes}


def _abstract(leaf: object) -> jax.ShapeDtypeStruct:
    """Returns the type of an array; with a sharding only if its type has one."""
    aval: Any = jax.typeof(leaf)
    sharding = None if type_spec(leaf) is None else aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


class _ForwardPass(NamedTuple):
    """What the backward rule has to know of the forward rule, besides arrays."""

    outcome: Outcome  # what it did to objects
    before: Structure  # of the arguments before it
    cotangent_form: TangentForm  # of the arguments
    residuals: Structure  # of the arguments that are not differentiated, and what it left


class _CallWithVjp(_Call):
    """A call with rules for its forward and its backward pass."""

    def differentiable(self) -> Function:
        """Makes the function with its rules in the form of ``jax.custom_vjp``."""
        function: Any = jax.custom_vjp(self._outputs)
        # JAX passes the residuals of the forward rule to the backward rule. Here they are the
        # pullback itself, a function that is a pytree of the arrays that it needs.
        function.defvjp(self._forward, lambda pullback, cotangents: pullback(cotangents))
        return function  # type: ignore[no-any-return]

    def _forward(self, arrays: Sequence[object]) -> tuple[GroupArrays, Function]:
        """Runs the forward rule.

        Returns:
          The outputs, and the backward pass: a function of their cotangents, and for JAX, which
          keeps it, a pytree of the residual arrays.
        """
        forward_rule, _ = self.rules
        # The arguments before the rule; its residuals, after the arguments that are not
        # differentiated. The pure function that calls the rule returns arrays of the output alone,
        # so they are noted here.
        notes: list[tuple[Flat, Flat]] = []

        @functools.wraps(forward_rule, updated=())
        def output_of_rule(*args: Any) -> Any:
            arguments = flatten((args, {}))  # before the rule, which may change them
            pair = forward_rule(*args)
            expected = f"{name_of(forward_rule)} must return a pair (output, residuals)"
            check_pair(f"custom_vjp: {expected}", pair)
            output, residuals = pair
            notes.append((arguments, flatten((self.split(args).nondiff, residuals))))
            return output

        outcome, outputs = self.trace(output_of_rule, arrays, forward_rule)
        arguments, residuals = notes[-1]
        forward = _ForwardPass(
            outcome, arguments.structure, self.cotangent_form(arguments), residuals.structure
        )
        # JAX keeps the arrays, the leaves of the pytree; all other leaves are kept here.
        leaves = residuals.leaves
        slots = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)]
        others = replace_slots(leaves, slots, [None] * len(slots))

        def backward(arrays: Sequence[object], cotangents: GroupArrays) -> tuple[list[Any]]:
            return self._backward(forward, replace_slots(others, slots, arrays), cotangents)

        return outputs, jax.tree_util.Partial(backward, [leaves[slot] for slot in slots])

    def _backward(
        self, forward: _ForwardPass, residuals: Sequence[object], cotangents: GroupArrays
    ) -> tuple[list[Any]]:
        """Runs the backward rule.

        Args:
          forward: what the forward rule did.
          residuals: the leaves of what it left, by slot.
          cotangents: the cotangents of the outputs.

        Returns:
          The cotangents of the arrays in ``self.slots``; None for zeros.
        """
        _, backward_rule = self.rules
        outcome = forward.outcome
        nondiff, user_residuals = unflatten(forward.residuals, residuals).root
        # The cotangents of all arrays after the call, by slot; the last one is in `_NO_SLOT`.
        values = [*self.tangents_after(outcome, cotangents), None]
        arguments = _arguments_after(forward.before, outcome)  # their structure
        options: dict[str, Any] = {}
        # Flax's two contracts, by the mode; `custom_vjp` describes them.
        if self.transform.has_states:
            cotangent = self._cotangents_in_states(outcome, arguments, values)
        else:
            cotangent = unflatten(outcome.structure, values).root
            if "updates_g" in inspect.signature(backward_rule).parameters:
                unchanged = _unchanged_variables(arguments, outcome)
                args, _ = unflatten(arguments, values, existing=unchanged).root
                options["updates_g"] = args
        results = backward_rule(*nondiff, user_residuals, cotangent, **options)
        # From the user's modules and arrays to the arrays that JAX differentiates.
        form = forward.cotangent_form
        name = f"custom_vjp: {name_of(backward_rule)}: cotangents"  # for messages
        input_cotangents = form.tangents_in(name, results, may_omit=True)
        by_slot = dict(zip(form.slots, input_cotangents, strict=True))
        return ([by_slot.get(slot) for slot in self.slots],)

    def _cotangents_in_states(
        self, outcome: Outcome, arguments: Structure, values: Sequence[object]
    ) -> Any:
        """Returns the cotangents of the arguments after the call, and of the output, as Flax does.

        Both hold states of Variables; what is in the output and in an argument is one Variable.

        Args:
          outcome: what the forward rule did.
          arguments: the structure of the arguments after it.
          values: the cotangents, by slot after the call, and None in ``_NO_SLOT``.
        """

        def may_change(slots: Sequence[int]) -> bool:
            return _NO_SLOT not in slots

        objects = unflatten(arguments, values).objects  # Variables that hold cotangents
        args, _ = user_tree(arguments, values, may_change, objects)
        output = user_tree(outcome.structure, values, objects=objects)
        return self.split(args).differentiated, output


def _arguments_after(before: Structure, outcome: Outcome) -> Structure:
    """Returns the structure of the arguments as a call left them, by slots after the call.

    Arrays outside of Variables, which the call cannot change, have none (`_NO_SLOT`).

    Args:
      before: the structure of the arguments before the call.
      outcome: what the call did; its structure has None for an object that could not change.
    """
    entries = [*outcome.structure.entries]
    slots = [*outcome.structure.slots]
    for index, entry in enumerate(before.entries):
        if entries[index] is None:
            entries[index], slots[index] = entry, (_NO_SLOT,) * len(before.slots[index])
    root_slots = (_NO_SLOT,) * len(before.root_slots)
    return Structure(tuple(entries), before.root, tuple(slots), root_slots)


def _unchanged_variables(arguments: Structure, outcome: Outcome) -> Mapping[int, None]:
    """Returns None for each Variable that a call did not change, by index.

    ``unflatten`` takes such a mapping, and puts the None in the place of the Variable.
    """
    changed = {*outcome.values, *outcome.metadata}
    return {
        index: None
        for index, entry in enumerate(arguments.entries)
        if isinstance(entry, VariableEntry) and index not in changed
    }


def _zero_tangent_like(array: jax.Array) -> Any:
    """Returns the zero tangent of an array; for integers, of dtype ``float0``."""
    if jnp.issubdtype(array.dtype, jnp.inexact):
        return jnp.zeros_like(array)
    return without_tangent(array)


class _CallWithJvp(_Call):
    """A call with a rule for tangents."""

    def differentiable(self) -> Function:
        """Makes the function with its rule in the form of ``jax.custom_jvp``."""
        function: Any = jax.custom_jvp(self._outputs)
        function.defjvp(self._push_forward)
        return function  # type: ignore[no-any-return]

    def _push_forward(self, primals: Any, tangents: Any) -> tuple[GroupArrays, GroupArrays]:
        """Runs the rule, as JAX calls it; returns the outputs and their tangents.

        ``primals`` and ``tangents`` have one item each: the arrays in ``slots``, and their
        tangents. The results are in the groups of outputs.
        """
        [rule] = self.rules
        [arrays], [array_tangents] = primals, tangents
        # The pure function that calls the rule returns arrays of the output alone, so the tangents
        # are noted here.
        notes: list[_RuleTangents] = []

        @functools.wraps(rule, updated=())
        def output_of_rule(*args: Any) -> Any:
            arguments = flatten((args, {}))
            zeros = [without_tangent(x) for x in arguments.leaves]
            # What JAX does not differentiate is not an input of its function, and has a tangent of
            # zero.
            leaves = replace_slots(zeros, self.slots, array_tangents)
            d_args = unflatten(arguments.structure, leaves).root[0]
            nondiff, differentiated = self.split(args)
            pair = rule(*nondiff, differentiated, self.split(d_args).differentiated)
            check_pair(f"custom_jvp: {name_of(rule)} must return a pair (output, tangent)", pair)
            output, d_output = pair
            notes.append(_RuleTangents(d_output, d_args))
            return output

        outcome, outputs = self.trace(output_of_rule, arrays, rule)
        return outputs, self._tangents_of_outputs(outcome, outputs, notes[-1])

    def _tangents_of_outputs(
        self, outcome: Outcome, outputs: GroupArrays, noted: _RuleTangents
    ) -> GroupArrays:
        """Returns the tangent of each output of JAX's function, in the groups of the outputs.

        Args:
          outcome: what the rule did to objects.
          outputs: the arrays that it returned or wrote, in groups.
          noted: the tangents that it returned, and left in those of the arguments.
        """
        [rule] = self.rules
        structure = outcome.structure
        # The tangents of all arrays after the call, by slot: zeros at first.
        zeros = [[_zero_tangent_like(x) for x in group] for group in outputs]
        tangents = self.tangents_after(outcome, zeros)
        # Then what the rule returned. What the function returns unchanged is not an output of JAX's
        # function, and has no tangent here.
        leaves = [
            None if group == INPUT else outputs[group][position]
            for group, position in outcome.sources
        ]
        form = TangentForm(Flat(structure, leaves, ()), slots_by_path(structure))
        name = f"custom_jvp: {name_of(rule)}: tangent"  # for messages
        tangents = replace_slots(tangents, form.slots, form.tangents_in(name, noted.output))
        # Last, what it left in the tangents of the arguments.
        self._take_tangents_of_changes(outcome, noted.args, tangents)
        tangent_of = dict(zip(outcome.sources, tangents, strict=True))
        return [
            [tangent_of[Source(group, position)] for position in range(len(arrays))]
            for group, arrays in enumerate(outputs)
        ]

    def _take_tangents_of_changes(
        self, outcome: Outcome, d_args: object, tangents: list[object]
    ) -> None:
        """Puts the tangents of what the rule changed in its arguments into ``tangents``.

        Args:
          outcome: what the rule did to objects.
          d_args: the tangents of the arguments, as the rule left them.
          tangents: those of all arrays after the call, by slot.
        """
        flat = flatten(d_args)
        tangent_slots_by_path = slots_by_path(flat.structure)
        arguments = _arguments_after(self.plan.structure, outcome)
        for path, slots in slots_by_path(arguments).items():
            # A path in the arguments starts with 0, for the positional ones: all of `d_args`.
            _, *path_in_args = path
            tangent_slots = tangent_slots_by_path.get((*path_in_args,), ())  # none if it is new
            for slot, tangent_slot in zip(slots, tangent_slots, strict=False):
                if slot != _NO_SLOT:
                    tangents[slot] = flat.leaves[tangent_slot]
