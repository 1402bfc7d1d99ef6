"""One call of a function with rules: the part that ``jax.custom_vjp`` and ``jax.custom_jvp`` see.

JAX takes functions and rules of arrays; the user's are of modules. The *pure function* of a call
translates between them. It takes the *leaves* of the arguments (arrays, numbers, flags; a *slot* is
the position of one), and calls the user's function. It returns *groups* of output arrays, and an
*outcome*: what was done to objects, and where each array is now. A rule has the same arguments as
the function, so the pure function can call the rule instead:

    JAX asks for    the user's function is called as       JAX gets
    ------------    ------------------------------------   ----------------------------------------
    the function    output = fun(*args)                    outputs
    forward rule    output, residuals = fwd(*args)         outputs; a function with the residuals
    backward rule   cotangents = bwd(*nondiff, residuals,  cotangents of the arrays in the arguments
                                     output_cotangent)
    rule of a jvp   output, tangent = rule(*nondiff,       outputs and their tangents
                                      primals, tangents)

JAX runs a rule instead of the function, so the outcomes of both have to be equal. For example, take
``f(model, x)``, which counts its calls in ``model``; its outputs are one group, ``[y, count]``:

    slots before    0 model.count             1 model.kernel           2 x
    slots after     0 the output y            1 model.count            2 model.kernel
      sources       (group 0, position 0)     (group 0, position 1)    (INPUT, slot 1 before)
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..core.call_context import called_by, current_caller
from ..core.constrain import type_spec
from ..core.flatten import Flat, flatten
from ..core.functions import FunctionGroup, name_of
from ..core.outcome import INPUT, Outcome, OutputGroup, Source
from ..core.plan import Plan
from ..core.structure import Structure, VariableEntry, locations_in
from ..core.unflatten import unflatten
from ..errors import raise_if_any
from ..specs.filters import to_predicate
from ..specs.paths import Path
from .differentiation import check_pair
from .in_trace import Function, InnerTransform, is_traced, replace_slots
from .stages import user_tree
from .tangents import TangentForm, slots_by_path, without_tangent

# An array for each output, in the groups that the pure function returns.
GroupArrays: TypeAlias = list[list[Any]]


class Rules(FunctionGroup):
    """A function that is called as usual, and the rules for its derivative (``functions``)."""

    __slots__ = ("__name__",)

    def __init__(self, function: Callable[..., object], *rules: Callable[..., object]):
        self.functions = function, *rules
        self.__name__ = name_of(function)

    def __call__(self, *args: object) -> Any:  # noqa: D102
        return self.functions[0](*args)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Custom(InnerTransform):
    """The options of ``custom_vjp`` and ``custom_jvp``, and the call that they make of JAX's."""

    in_name: str = "nondiff_argnums"
    nondiff: tuple[int, ...]  # the positions of arguments that are not differentiated, sorted
    # Each pair has the position of another argument and a filter for what is differentiated in its
    # modules.
    filters: tuple[tuple[int, Any], ...] = ()
    # Whether cotangents of modules are states: Flax's contract with graph updates.
    has_states: bool = False

    def jax_transform(self, plan: Plan, function: Function) -> Function:
        """Returns a function of all leaves that calls ``jax.custom_vjp`` or ``jax.custom_jvp``."""
        # Each call makes a new object, because the object records what the function and rules do.
        cls = _CallWithVjp if self.name == "custom_vjp" else _CallWithJvp
        return lambda *leaves: cls(
            transform=self, plan=plan, function=function, leaves=leaves
        ).run()


class _Call:
    """One call: JAX may trace the function and its rules later, and several times.

    To JAX, both are functions of one list: the arrays in ``slots``.

    Attributes:
      transform: the options: ``nondiff`` has the positions of the arguments that are not
        differentiated, ``filters`` pairs of another position and a filter.
      plan: what is known of the call before it.
      fun: the user's function.
      rules: his rules: forward and backward, or the one for tangents.
      slots: the slots of the arrays that JAX gets, in the order in which it gets them.
      types: the types of these arrays, by slot.
      fixed_leaves: all leaves by slot, with None for the arrays that JAX gets. The rest are flags,
        and arrays that are not differentiated.
      differentiated: the slots of what is differentiated, by path, such as ``(0, "kernel")``. A
        path starts with the position among the differentiated arguments.
      _caller: the call being traced. Its ``objects`` are the user's, by index, until `run` ends;
        then only static ones are left.
      _function: the pure function of the call. It calls the function of the current `Caller`.
      _arrays: the arrays in ``slots``; empty after `run`, so that JAX's rules keep none alive.
      _outcomes: what the function and each rule did when it was last traced, by the user's function
        or rule. All outcomes are equal in structure and sources, because `_trace` refuses others.
    """

    def __init__(self, transform: Custom, plan: Plan, function: Function, leaves: Sequence[object]):
        """Sorts the leaves of one call: those that JAX gets, and the rest.

        Args:
          transform: the transform, with the arguments that are not differentiated.
          plan: what is known of the call before it: structure and names of its arguments.
        """
        caller = current_caller()
        assert caller is not None  # `jax_transform` is used only in the trace of a call
        self.transform, self.plan, self._function, self._caller = transform, plan, function, caller
        self.fun: Function
        self.rules: tuple[Function, ...]
        self.fun, *rules = caller.fun.functions  # `caller.fun` is a `Rules`
        self.rules = tuple(rules)
        self.differentiated, nondiff_slots = self._sort_locations()
        # `slots` has all arrays and numbers, but no flags. An array that is not differentiated is
        # fixed, unless an outer transform traces it, because JAX's rules must not capture tracers.
        self.slots = [
            slot
            for slot, leaf in enumerate(leaves)
            if is_traced(leaf) and (slot not in nondiff_slots or isinstance(leaf, jax.core.Tracer))
        ]
        self._arrays = [leaves[slot] for slot in self.slots]
        self.fixed_leaves = replace_slots(leaves, self.slots, [None] * len(self.slots))
        self.types = {slot: _abstract(leaves[slot]) for slot in self.slots}
        # The keys are the user's function and rules; the values say what each did when it was last
        # traced.
        self._outcomes: dict[Callable[..., Any], Outcome] = {}

    def _sort_locations(self) -> tuple[dict[Path, tuple[int, ...]], set[int]]:
        """Sorts the Variables and arrays of the arguments by whether they are differentiated.

        Returns:
          The slots of what is differentiated, by path, as in ``self.differentiated``; and the slots
          of all that is in arguments of ``nondiff_argnums``.
        """
        differentiated: dict[Path, tuple[int, ...]] = {}
        nondiff_slots: set[int] = set()
        nondiff = self.transform.nondiff
        predicates = {
            position: to_predicate(filter_) for position, filter_ in self.transform.filters
        }
        # A location is the place of a Variable, or of an array that is in no Variable.
        for location in locations_in(self.plan.structure):
            # (0, 1, "kernel") is in the argument 1. The 0 means positional arguments; there are no
            # keyword arguments.
            _, position, *path = location.path
            if position in nondiff:
                nondiff_slots.update(location.slots)
                continue
            # Filters are for Variables. An array that is in no Variable is always differentiated.
            index = location.object_index  # the index of the Variable; None for such an array
            if position in predicates and index is not None:
                variable = self._caller.objects[index]
                if not predicates[position](self._path_in_module(position, path), variable):
                    continue
            number_before = sum(other < position for other in nondiff)
            differentiated[position - number_before, *path] = location.slots
        return differentiated, nondiff_slots

    def _path_in_module(self, position: int, path: Sequence[Hashable]) -> Path:
        """Returns the path of a Variable in its module, which filters get.

        In an argument ``[model]``, ``(0, "kernel")`` becomes ``("kernel",)``.

        Args:
          path: the path of the Variable in the argument.
        """
        # The parts of an argument are the modules and Variables in its pytree. The keys of a part
        # lead to it: (0,) in ``[model]``, () for an argument that is a module itself.
        for part in self.plan.graph_arguments[position].parts:
            depth = len(part.keys)
            if (*path[:depth],) == part.keys:
                return (*path[depth:],)
        raise AssertionError(path)  # each Variable is in a part

    def run(self) -> tuple[Any, ...]:
        """Calls the function with its rules, and returns what the pure function returns.

        The result is groups of output arrays, and the outcome. The call then forgets the user's
        objects and arrays.
        """
        function_with_rules = self.differentiable()
        # JAX traces the function here or, under differentiation, a rule. `_trace` records the
        # outcome.
        results = function_with_rules(self._arrays)
        # JAX may keep the rules, and with them this call, which must not keep the user's modules
        # and arrays alive. Static objects stay, because they are needed to trace a rule later.
        statics = {*self.plan.structure.static_indices()}
        objects = [x if i in statics else None for i, x in enumerate(self._caller.objects)]
        self._caller = self._caller._replace(objects=objects)
        self._arrays = []
        groups = [OutputGroup.unnamed(arrays) for arrays in results]
        *_, outcome = self._outcomes.values()  # `_trace` has checked that all of them are equal
        return (*groups, outcome)

    def differentiable(self) -> Function:
        """Makes JAX's function of the arrays in ``slots``, with rules. It returns `GroupArrays`."""
        raise NotImplementedError

    def outputs(self, arrays: Sequence[object]) -> GroupArrays:
        """Traces the function; returns its outputs, in groups. ``arrays`` are in ``slots``."""
        _, outputs = self._trace(self.fun, self.fun, arrays)
        return outputs

    def trace_rule(
        self,
        rule: Callable[..., object],
        call_rule: Callable[..., tuple[Any, Any]],
        arrays: Sequence[object],
    ) -> tuple[Outcome, GroupArrays, Any]:
        """Traces a rule, and returns what it did to objects, its outputs, and its second result.

        Args:
          call_rule: calls the rule with the arguments of the function. Returns a pair: the output
            of the rule, and anything else, which becomes the second result.
          arrays: the arrays in ``slots``.

        Raises:
          ValueError: the rule did not do the same to objects as the function or another rule.
        """
        second_results = list[Any]()

        # The pure function must return the output alone, so a list keeps the second result.
        @functools.wraps(rule, updated=())
        def output_of_rule(*args: object) -> Any:
            output, second_result = call_rule(*args)
            second_results.append(second_result)
            return output

        outcome, outputs = self._trace(rule, output_of_rule, arrays)
        [second_result] = second_results  # the pure function calls its function once
        return outcome, outputs, second_result

    def _trace(
        self,
        function_or_rule: Callable[..., object],
        called: Callable[..., object],
        arrays: Sequence[object],
    ) -> tuple[Outcome, GroupArrays]:
        """Calls the pure function, and records what was done to objects.

        Args:
          function_or_rule: the user's function or rule, for the record and for messages.
          called: what the pure function calls with the user's arguments: ``function_or_rule``, or a
            wrapper that returns the output alone.
          arrays: the arrays in ``slots``.

        Returns:
          The outcome, which says what was done to objects, and the outputs.

        Raises:
          ValueError: the function or rule did not do the same as another one in an earlier trace.
        """
        leaves = replace_slots(self.fixed_leaves, self.slots, arrays)
        with called_by(self._caller._replace(fun=called)):  # the pure function calls this function
            *groups, outcome = self._function(*leaves)
        for earlier_function, earlier_outcome in self._outcomes.items():
            # Sources count because JAX compares outputs, but not which inputs were returned.
            is_same_structure = earlier_outcome.structure == outcome.structure
            if not is_same_structure or earlier_outcome.sources != outcome.sources:
                # This always raises.
                self._refuse_difference(
                    earlier_function, earlier_outcome, function_or_rule, outcome
                )
        self._outcomes[function_or_rule] = outcome
        return outcome, [list(group.arrays) for group in groups]

    def _refuse_difference(
        self,
        function: Callable[..., object],
        outcome: Outcome,
        other_function: Callable[..., object],
        other_outcome: Outcome,
    ) -> NoReturn:
        """Raises an error for two functions that do different things to objects.

        Args:
          outcome: what ``function`` did.
          other_function: another one of the user's function and rules.
          other_outcome: what ``other_function`` did.
        """
        name, other_name = name_of(function), name_of(other_function)
        changed, other_changed = _changed_objects(outcome), _changed_objects(other_outcome)
        variables = self.plan.variables  # the arguments' Variables by index, with names and specs
        lines = []
        for index in sorted(changed ^ other_changed):  # the objects that only one of them changes
            place = variables[index].name if index in variables else "an object"
            lines.append(f"  {place}: changed by {name if index in changed else other_name} only")
        raise_if_any(
            ValueError,
            f"{self.transform.name}: {name} and {other_name} have to return the same structure "
            "and to change the same Variables:",
            # Without lines, both change the same Variables, so the results differ.
            lines or ["  the structures that they return or leave differ"],
        )
        raise AssertionError  # not reached: the list is not empty, so the call above raises

    def nondiff_of(self, args: Sequence[object]) -> list[Any]:
        """Returns the arguments that are not differentiated, which rules get first."""
        return [args[position] for position in self.transform.nondiff]

    def differentiated_of(self, args: Sequence[object]) -> tuple[Any, ...]:
        """Returns the arguments that are differentiated: all others."""
        return tuple(x for i, x in enumerate(args) if i not in self.transform.nondiff)


def _changed_objects(outcome: Outcome) -> set[int]:
    """Returns the indices of the Variables and modules that a call changed."""
    nodes = (change.node for change in outcome.nodes)
    return {*outcome.values, *outcome.metadata, *nodes}


def _abstract(leaf: object) -> jax.ShapeDtypeStruct:
    """Returns the type of an array, with a sharding only on Explicit axes.

    On Explicit axes the sharding is part of the type, so zeros for a cotangent need it.
    """
    aval: Any = jax.typeof(leaf)
    sharding = None if type_spec(leaf) is None else aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


class _ForwardPass(NamedTuple):
    """The facts about a forward rule that the backward rule needs, besides arrays."""

    outcome: Outcome  # what the forward rule did to objects
    arguments: Structure  # the arguments before the forward rule
    # The structure of (arguments that are not differentiated, residuals). The backward rule gets
    # both.
    residuals: Structure
    cotangent_form: TangentForm  # the form of the cotangents that the backward rule returns


class _CallWithVjp(_Call):
    """A call with rules for its forward and its backward pass."""

    def differentiable(self) -> Function:
        """Makes the function with its rules in the form of ``jax.custom_vjp``."""
        function: Any = jax.custom_vjp(self.outputs)
        # JAX passes the residuals of the forward rule to the backward rule. Here they are the
        # pullback itself, a function that is also a pytree of the arrays that it needs.
        function.defvjp(self._forward, lambda pullback, cotangents: pullback(cotangents))
        return function  # type: ignore[no-any-return]

    def _forward(self, arrays: Sequence[object]) -> tuple[GroupArrays, Function]:
        """Runs the forward rule; ``arrays`` are those in ``slots``.

        Returns:
          The outputs, and the pullback: a function of their cotangents. To JAX, which keeps the
          pullback, it is a pytree of the residual arrays.
        """
        forward_rule, _ = self.rules

        def call_rule(*args: Any) -> tuple[Any, tuple[Structure, Flat]]:
            # The rule may change the arguments, so their structure is taken before it.
            arguments = flatten((args, {})).structure
            pair = forward_rule(*args)
            expected = f"{name_of(forward_rule)} must return a pair (output, residuals)"
            check_pair(f"custom_vjp: {expected}", pair)  # raises for another result
            output, residuals = pair
            # The backward rule gets the arguments that are not differentiated, too. They may be
            # traced, so they are among the residuals.
            return output, (arguments, flatten((self.nondiff_of(args), residuals)))

        outcome, outputs, noted = self.trace_rule(forward_rule, call_rule, arrays)
        arguments, residuals = noted
        forward = _ForwardPass(outcome, arguments, residuals.structure, self._cotangent_form())
        # JAX has to know the residuals that are arrays, and keeps them. This call keeps the others.
        leaves = residuals.leaves
        slots = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)]
        kept_leaves = replace_slots(leaves, slots, [None] * len(slots))

        def pullback(arrays: Sequence[object], cotangents: GroupArrays) -> tuple[list[Any]]:
            return self._backward(forward, replace_slots(kept_leaves, slots, arrays), cotangents)

        # The leaves of this pytree are the arrays. JAX gives the pytree to the backward rule with
        # other leaves in their place, such as tracers.
        return outputs, jax.tree_util.Partial(pullback, [leaves[slot] for slot in slots])

    def _cotangent_form(self) -> TangentForm:
        """Returns the form of the cotangents of the differentiated arguments."""
        # Types stand for the arrays, because the form must not keep the arrays alive.
        types = replace_slots(self.fixed_leaves, self.slots, self.types.values())
        return TangentForm(Flat(self.plan.structure, types, ()), self.differentiated)

    def _backward(
        self, forward: _ForwardPass, residuals: Sequence[object], cotangents: GroupArrays
    ) -> tuple[list[Any]]:
        """Runs the backward rule.

        Args:
          residuals: the leaves of ``forward.residuals``, by slot.

        Returns:
          A tuple, as JAX wants it: its item is the cotangents of the only argument of JAX's
          function, the list of arrays in ``self.slots``; None means zeros.
        """
        _, backward_rule = self.rules
        nondiff, user_residuals = unflatten(forward.residuals, residuals).root
        g, options = self._cotangent_arguments(forward, cotangents)
        results = backward_rule(*nondiff, user_residuals, g, **options)
        # JAX gets the arrays that it differentiates, out of the user's modules and arrays. None in
        # place of a module or an array stands for zeros.
        form = forward.cotangent_form
        name = f"custom_vjp: {name_of(backward_rule)}: cotangents"  # for messages
        input_cotangents = form.tangents_in(name, results, may_omit=True)
        by_slot = dict(zip(form.slots, input_cotangents, strict=True))
        return ([by_slot.get(slot) for slot in self.slots],)

    def _cotangent_arguments(
        self, forward: _ForwardPass, cotangents: GroupArrays
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the cotangents that the user's backward rule gets.

        Args:
          cotangents: the cotangents of the outputs of JAX's function.

        Returns:
          The argument ``g`` of the rule; and its keyword arguments: ``updates_g``, or none.
          :func:`custom_vjp` describes them for both modes.
        """
        outcome = forward.outcome
        # The cotangent of each array after the call, by slot. An array that the call did not change
        # is no output of JAX's function: its cotangent goes around the rule, so the rule gets zeros
        # for it.
        by_slot_after: list[Any] = []
        for group, position in outcome.sources:
            if group == INPUT:
                by_slot_after.append(self._zero_cotangent(position))
            else:
                by_slot_after.append(cotangents[group][position])
        # The last slot is for arrays in the arguments that are not among the arrays after the call.
        by_slot_after.append(None)
        no_slot = len(by_slot_after) - 1
        arguments = _arguments_after(forward.arguments, outcome, no_slot)
        if self.transform.has_states:  # with graph updates
            return self._cotangents_in_states(outcome, arguments, by_slot_after), {}
        g = unflatten(outcome.structure, by_slot_after).root  # in the form of the output
        _, backward_rule = self.rules
        if "updates_g" not in inspect.signature(backward_rule).parameters:
            return g, {}
        # `existing` has None for each unchanged Variable, so `unflatten` puts None there.
        unchanged = dict.fromkeys(_unchanged_variables(arguments, outcome))
        args, _ = unflatten(arguments, by_slot_after, existing=unchanged).root
        return g, {"updates_g": args}

    def _zero_cotangent(self, slot: int) -> Any:
        """Returns zeros for the leaf in a slot of the arguments; for integers, of ``float0``."""
        if slot not in self.types:  # a flag, or not differentiated: it has no tangent, either
            return without_tangent(self.fixed_leaves[slot])
        aval = self.types[slot]
        if not jnp.issubdtype(aval.dtype, jnp.inexact):
            return np.zeros(aval.shape, jax.dtypes.float0)
        return jnp.zeros(aval.shape, aval.dtype, out_sharding=aval.sharding)

    def _cotangents_in_states(
        self, outcome: Outcome, arguments: Structure, cotangents: Sequence[object]
    ) -> tuple[tuple[Any, ...], Any]:
        """Returns what a rule gets with graph updates, as in Flax: cotangents with states.

        Args:
          arguments: the arguments after it, as `_arguments_after` returns them.
          cotangents: by slot after the call. The last one is None, for arrays that the call cannot
            change.

        Returns:
          The cotangents of the differentiated arguments after the call, and of the output. Both
          have an ``nnx.State`` in place of each module.
        """
        no_slot = len(cotangents) - 1
        # The Variables of `variables` hold cotangents, by index. The structure after the call has
        # the same indices, so a Variable in the output and in an argument is one Variable in both
        # states.
        variables = unflatten(arguments, cotangents).objects
        args, _ = user_tree(
            arguments,
            cotangents,
            keep=lambda slots: no_slot not in slots,  # None stands for what the call cannot change
            objects=variables,
        )
        output = user_tree(outcome.structure, cotangents, objects=variables)
        return self.differentiated_of(args), output


def _arguments_after(before: Structure, outcome: Outcome, no_slot: int) -> Structure:
    """Returns the structure of the arguments as a call left them, by slots after the call.

    In the example of this module, ``model.count`` is in slot 1, and ``model.kernel`` in slot 2. The
    call cannot change ``x``, so ``x`` is none of the arrays after it, and gets ``no_slot``.

    Args:
      before: the structure of the arguments before the call.
      no_slot: the slot for arrays that the call cannot change.
    """
    # The structure of the output has the objects of the arguments in its table, too.
    structure_after = outcome.structure
    entries, slots = [*structure_after.entries], [*structure_after.slots]
    for index, entry in enumerate(before.entries):
        if entries[index] is None:  # a module that could not change, without graph updates
            entries[index], slots[index] = entry, (no_slot,) * len(before.slots[index])
    root_slots = (no_slot,) * len(before.root_slots)  # arrays outside of objects
    return Structure(tuple(entries), before.root, tuple(slots), root_slots)


def _unchanged_variables(arguments: Structure, outcome: Outcome) -> list[int]:
    """Returns the indices of the Variables in the arguments that a call did not change."""
    changed = {*outcome.values, *outcome.metadata}
    return [
        index
        for index, entry in enumerate(arguments.entries)
        if isinstance(entry, VariableEntry) and index not in changed
    ]


class _CallWithJvp(_Call):
    """A call with a rule for tangents."""

    def differentiable(self) -> Function:
        """Makes the function with its rule in the form of ``jax.custom_jvp``."""
        function: Any = jax.custom_jvp(self.outputs)
        function.defjvp(self._push_forward)
        return function  # type: ignore[no-any-return]

    def _push_forward(self, primals: Any, tangents: Any) -> tuple[GroupArrays, GroupArrays]:
        """Runs the rule, as JAX calls it; returns the outputs and their tangents, in groups.

        Args:
          primals: a tuple of one: JAX's function has one argument, the arrays in ``slots``.
          tangents: a tuple of one: their tangents.
        """
        [rule] = self.rules
        [arrays], [array_tangents] = primals, tangents

        def call_rule(*args: Any) -> tuple[Any, tuple[Any, Any]]:
            # The tangents of the arguments are in new objects of the same form. A leaf that JAX
            # does not get has zeros of `float0`.
            arguments = flatten((args, {}))
            zeros = [without_tangent(x) for x in arguments.leaves]
            leaves = replace_slots(zeros, self.slots, array_tangents)
            d_args, _ = unflatten(arguments.structure, leaves).root
            pair = rule(
                *self.nondiff_of(args), self.differentiated_of(args), self.differentiated_of(d_args)
            )
            # Raises unless the rule has returned a pair.
            check_pair(f"custom_jvp: {name_of(rule)} must return a pair (output, tangent)", pair)
            output, d_output = pair
            return output, (d_output, d_args)

        outcome, outputs, (d_output, d_args) = self.trace_rule(rule, call_rule, arrays)
        return outputs, self._tangents_of_outputs(outcome, outputs, d_output, d_args)

    def _tangents_of_outputs(
        self, outcome: Outcome, outputs: GroupArrays, d_output: object, d_args: tuple[Any, ...]
    ) -> GroupArrays:
        """Returns the tangent of each output of JAX's function, in the groups of the outputs.

        In the example of this module, the result is ``[[tangent of y, tangent of count]]``. The
        rule returns the first one, and leaves the second one in the tangents of its arguments.

        Args:
          outputs: the arrays that it returned or wrote, in groups.
          d_args: the tangents of all arguments, as it left them.
        """
        [rule] = self.rules
        # The arrays after the call, by slot. An array that the function returns unchanged is no
        # output of JAX's function: its tangent goes around the rule, so it is None here.
        leaves = [
            None if group == INPUT else outputs[group][position]
            for group, position in outcome.sources
        ]
        structure = outcome.structure
        form = TangentForm(Flat(structure, leaves, ()), slots_by_path(structure))
        name = f"custom_jvp: {name_of(rule)}: tangent"  # for messages
        returned = form.tangents_in(name, d_output)
        by_slot_after = dict(zip(form.slots, returned, strict=True))
        # An array in the output and in an argument has the tangent that the rule left in the
        # argument.
        by_slot_after |= self._tangents_left(outcome, d_args)
        # Each output of JAX's function is in one slot after the call.
        by_source = {outcome.sources[slot]: tangent for slot, tangent in by_slot_after.items()}
        tangents = []
        for group, arrays in enumerate(outputs):
            in_group = []
            for position, array in enumerate(arrays):
                # The tangent is None for an integer, and for an array without a place in them.
                tangent = by_source.get(Source(group, position))
                in_group.append(_zero_tangent(array) if tangent is None else tangent)
            tangents.append(in_group)
        return tangents

    def _tangents_left(self, outcome: Outcome, d_args: tuple[Any, ...]) -> dict[int, Any]:
        """Returns the tangents that a rule left in its argument tangents, by slot after the call.

        Args:
          d_args: the tangents of the arguments, as it left them.
        """
        # The tangents are flattened like the arguments, (positional, keywords), so paths are equal.
        flat_d_args = flatten((d_args, {}))
        d_slots_by_path = slots_by_path(flat_d_args.structure)
        no_slot = len(outcome.sources)  # none of the arrays after the call has this slot
        arguments = _arguments_after(self.plan.structure, outcome, no_slot)
        tangents: dict[int, Any] = {}
        for path, slots in slots_by_path(arguments).items():
            # The tangents may have no place for a Variable that the rule has added to an argument,
            # or for an array that it has added to a Variable.
            d_slots = d_slots_by_path.get(path, ())
            for slot, d_slot in zip(slots, d_slots, strict=False):
                if slot != no_slot:
                    tangents[slot] = flat_d_args.leaves[d_slot]
        return tangents


def _zero_tangent(array: jax.Array) -> Any:
    """Returns the zero tangent of an array; for integers, of dtype ``float0``."""
    if jnp.issubdtype(array.dtype, jnp.inexact):
        return jnp.zeros_like(array)
    return without_tangent(array)
