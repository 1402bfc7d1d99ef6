"""One call of a function with rules: what ``jax.custom_vjp`` and ``jax.custom_jvp`` get of it.

JAX takes functions and rules of arrays; the user's are of modules. The *pure function* of a call
translates: it takes the *leaves* of the arguments (arrays, numbers, flags; a *slot* is the position
of one), calls the user's function, and returns *groups* of output arrays, and an *outcome*: what
was done to objects, and where each array is now. A rule has the same arguments as the function, so
it is called by the same pure function in its place:

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

From other modules:

    Plan          what is known before the trace: ``structure`` (all but the arrays) of the
                  arguments, whose ``root`` is (positional, keywords), and their names
    Caller        the call being traced; the pure function calls ``caller.fun``
    flatten       a pytree of objects to a ``Flat``: structure, ``leaves`` by slot, and objects
    unflatten     makes new objects around leaves; ``root`` is their pytree
    slots_by_path the slots of the arrays in a structure: {(0, 0, "kernel"): (1,)}
    TangentForm   says which arrays of some objects have tangents (``slots``); ``tangents_in`` takes
                  them out of objects that the user gave, as a list of arrays
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
from ..errors import raise_listed
from ..specs.filters import to_predicate
from ..specs.paths import Path
from .differentiation import check_pair
from .in_trace import Function, InnerTransform, is_traced, replace_slots
from .stages import user_tree
from .tangents import TangentForm, slots_by_path, without_tangent

# An array for each output, in the groups that the pure function returns.
GroupArrays: TypeAlias = list[list[Any]]


class Rules(FunctionGroup):
    """A function, then the rules for its derivative (``functions``); called, it is the function."""

    __slots__ = ("__name__",)

    def __init__(self, function: Callable[..., object], *rules: Callable[..., object]):
        self.functions = function, *rules
        self.__name__ = name_of(function)

    def __call__(self, *args: object) -> Any:  # noqa: D102
        return self.functions[0](*args)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Custom(InnerTransform):
    """What ``custom_vjp`` and ``custom_jvp`` decide."""

    in_name: str = "nondiff_argnums"
    nondiff: tuple[int, ...]  # the positions of arguments that are not differentiated, sorted
    # Pairs of the position of another argument and a filter: for what is differentiated in modules.
    filters: tuple[tuple[int, Any], ...] = ()
    # Whether cotangents of modules are states: Flax's contract with graph updates.
    has_states: bool = False

    def jax_transform(self, plan: Plan, function: Function) -> Function:
        """Returns a function of all leaves that calls ``jax.custom_vjp`` or ``jax.custom_jvp``."""
        # A new object for each call: it records what the function and its rules do.
        cls = _CallWithVjp if self.name == "custom_vjp" else _CallWithJvp
        return lambda *leaves: cls(
            transform=self, plan=plan, function=function, leaves=leaves
        ).run()


class _Call:
    """One call: JAX may trace the function and its rules later, and several times.

    To JAX, both are functions of one list: the arrays in ``slots``.

    Attributes:
      transform: says which arguments are not differentiated.
      plan: what is known of the call before it.
      fun: the user's function.
      rules: his rules: forward and backward, or the one for tangents.
      slots: the slots of the arrays that JAX gets, in the order in which it gets them.
      types: their types, by slot.
      fixed_leaves: all leaves by slot, with None for what JAX gets. The others are flags, and
        arrays that are not differentiated.
      differentiated: the slots of what is differentiated, by path, such as ``(0, "kernel")``. Paths
        start with the position among the differentiated arguments.

    ``_caller`` is the call being traced, with the user's objects, and ``_function`` its pure
    function.
    """

    def __init__(self, transform: Custom, plan: Plan, function: Function, leaves: Sequence[object]):
        """Sorts the leaves of one call: those that JAX gets, and the rest.

        Args:
          transform: the transform, with the arguments that are not differentiated.
          plan: what is known of the call before it: structure and names of its arguments.
          function: its pure function.
          leaves: the leaves of its arguments, by slot.
        """
        caller = current_caller()
        assert caller is not None  # a call is made in the trace of one
        self.transform, self.plan, self._function, self._caller = transform, plan, function, caller
        self.fun: Function
        self.rules: tuple[Function, ...]
        self.fun, *rules = caller.fun.functions  # of `Rules`
        self.rules = tuple(rules)
        self.differentiated, nondiff_slots = self._sort_locations()
        # All arrays and numbers, but no flags. An array that is not differentiated is fixed, unless
        # an outer transform traces it, as JAX's rules must not capture tracers.
        self.slots = [
            slot
            for slot, leaf in enumerate(leaves)
            if is_traced(leaf) and (slot not in nondiff_slots or isinstance(leaf, jax.core.Tracer))
        ]
        self._arrays = [leaves[slot] for slot in self.slots]
        self.fixed_leaves = replace_slots(leaves, self.slots, [None] * len(self.slots))
        self.types = {slot: _abstract(leaves[slot]) for slot in self.slots}
        # What each did when it was last traced, by the user's function or rule.
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
        # Where each Variable is, and each array that is in none.
        for location in locations_in(self.plan.structure):
            # (0, 1, "kernel") is in the argument 1. The 0 is for positional arguments; there are no
            # keyword arguments.
            _, position, *path = location.path
            if position in nondiff:
                nondiff_slots.update(location.slots)
                continue
            # Filters are for Variables. An array that is in none is differentiated in any case.
            index = location.object_index  # of the Variable
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
          position: that of the argument.
          path: where the Variable is in the argument.
        """
        # The parts of an argument are the modules and Variables in its pytree. The keys of one lead
        # to it: (0,) for that in ``[model]``, () for an argument that is a module itself.
        for part in self.plan.graph_arguments[position].parts:
            depth = len(part.keys)
            if (*path[:depth],) == part.keys:
                return (*path[depth:],)
        raise AssertionError(path)  # each Variable is in a part

    def run(self) -> tuple[Any, ...]:
        """Calls the function with its rules; returns what the pure function returns.

        That is: groups of output arrays, and the outcome.
        """
        function_with_rules = self.differentiable()
        # JAX traces the function here or, under differentiation, a rule. `_trace` records the
        # outcome.
        results = function_with_rules(self._arrays)
        # JAX may keep the rules, and with them this call; it must not keep the user's modules and
        # arrays alive. Static objects are needed to trace a rule later.
        statics = {*self.plan.structure.static_indices()}
        objects = [x if i in statics else None for i, x in enumerate(self._caller.objects)]
        self._caller = self._caller._replace(objects=objects)
        self._arrays = []
        groups = [OutputGroup.unnamed(arrays) for arrays in results]
        *_, outcome = self._outcomes.values()  # any of them: `_trace` checks that they are equal
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
          rule: the user's rule, for messages.
          call_rule: calls it with the arguments of the function. Returns a pair: the output of the
            rule, and anything else, which is the second result.
          arrays: the arrays in ``slots``.
        """
        second_results = list[Any]()

        # The pure function returns what belongs to the output alone.
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
          function_or_rule: what the user wrote, for the record and for messages.
          called: what the pure function calls with the user's arguments: this, or a wrapper that
            returns the output alone.
          arrays: the arrays in ``slots``.

        Returns:
          What was done to objects, and the outputs.

        Raises:
          ValueError: it is not what the function, or another rule, did in an earlier trace.
        """
        leaves = replace_slots(self.fixed_leaves, self.slots, arrays)
        with called_by(self._caller._replace(fun=called)):  # the pure function calls this function
            *groups, outcome = self._function(*leaves)
        for other, known in self._outcomes.items():
            # Sources too: JAX compares the outputs of rules, but not which inputs were returned.
            if (known.structure, known.sources) != (outcome.structure, outcome.sources):
                self._refuse_difference(other, known, function_or_rule, outcome)
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
          function: the user's function or a rule.
          outcome: what it did.
          other_function: another one of these.
          other_outcome: what that did.
        """
        name, other_name = name_of(function), name_of(other_function)
        changed, other_changed = _changed_objects(outcome), _changed_objects(other_outcome)
        variables = self.plan.variables  # names (and specs) of those in the arguments, by index
        lines = []
        for index in sorted(changed ^ other_changed):  # what only one of them changes
            place = variables[index].name if index in variables else "an object"
            lines.append(f"  {place}: changed by {name if index in changed else other_name} only")
        raise_listed(
            ValueError,
            f"{self.transform.name}: {name} and {other_name} have to return the same structure "
            "and to change the same Variables:",
            # Without lines, both change the same Variables, and the results differ.
            lines or ["  the structures that they return or leave differ"],
        )
        raise AssertionError  # there are lines, so that `raise_listed` raises

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

    There it is a part of the type, so that zeros in place of a cotangent have to have it.
    """
    aval: Any = jax.typeof(leaf)
    sharding = None if type_spec(leaf) is None else aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


class _ForwardPass(NamedTuple):
    """What the backward rule has to know of the forward rule, besides arrays."""

    outcome: Outcome  # what it did to objects
    arguments: Structure  # the arguments before it
    # Of (arguments that are not differentiated, residuals), both of which the backward rule gets.
    residuals: Structure
    cotangent_form: TangentForm  # of the cotangents that the backward rule returns


class _CallWithVjp(_Call):
    """A call with rules for its forward and its backward pass."""

    def differentiable(self) -> Function:
        """Makes the function with its rules in the form of ``jax.custom_vjp``."""
        function: Any = jax.custom_vjp(self.outputs)
        # JAX passes the residuals of the forward rule to the backward rule. Here they are the
        # pullback itself, a function that is a pytree of the arrays that it needs.
        function.defvjp(self._forward, lambda pullback, cotangents: pullback(cotangents))
        return function  # type: ignore[no-any-return]

    def _forward(self, arrays: Sequence[object]) -> tuple[GroupArrays, Function]:
        """Runs the forward rule; ``arrays`` are those in ``slots``.

        Returns:
          The outputs, and the pullback: a function of their cotangents, and for JAX, which keeps
          it, a pytree of the residual arrays.
        """
        forward_rule, _ = self.rules

        def call_rule(*args: Any) -> tuple[Any, tuple[Structure, Flat]]:
            arguments = flatten((args, {})).structure  # before the rule, which may change them
            pair = forward_rule(*args)
            expected = f"{name_of(forward_rule)} must return a pair (output, residuals)"
            check_pair(f"custom_vjp: {expected}", pair)
            output, residuals = pair
            # With the arguments that the backward rule gets as well, and that may be traced.
            return output, (arguments, flatten((self.nondiff_of(args), residuals)))

        outcome, outputs, noted = self.trace_rule(forward_rule, call_rule, arrays)
        arguments, residuals = noted
        forward = _ForwardPass(outcome, arguments, residuals.structure, self._cotangent_form())
        # JAX has to know the residuals that are arrays, and keeps them; all others are kept here.
        leaves = residuals.leaves
        slots = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)]
        others = replace_slots(leaves, slots, [None] * len(slots))

        def pullback(arrays: Sequence[object], cotangents: GroupArrays) -> tuple[list[Any]]:
            return self._backward(forward, replace_slots(others, slots, arrays), cotangents)

        # The leaves of this pytree are the arrays. JAX gives it to the backward rule with others in
        # their place, such as tracers.
        return outputs, jax.tree_util.Partial(pullback, [leaves[slot] for slot in slots])

    def _cotangent_form(self) -> TangentForm:
        """Returns the form of the cotangents of the differentiated arguments."""
        # Types in place of arrays, so that the form does not keep these alive.
        types = replace_slots(self.fixed_leaves, self.slots, self.types.values())
        return TangentForm(Flat(self.plan.structure, types, ()), self.differentiated)

    def _backward(
        self, forward: _ForwardPass, residuals: Sequence[object], cotangents: GroupArrays
    ) -> tuple[list[Any]]:
        """Runs the backward rule.

        Args:
          forward: what the forward rule did.
          residuals: the leaves of ``forward.residuals``, by slot.
          cotangents: the cotangents of the outputs.

        Returns:
          What JAX wants: a tuple with the cotangents of the only argument of its function, the list
          of arrays in ``self.slots``; None for zeros.
        """
        _, backward_rule = self.rules
        outcome = forward.outcome
        # First the cotangent of each array after the call, by slot. An array that the call did not
        # change is no output of JAX's function: its cotangent goes around the rule, which gets
        # zeros.
        by_slot_after: list[Any] = []
        for group, position in outcome.sources:
            is_unchanged = group == INPUT
            cotangent = (
                self._zero_cotangent(position) if is_unchanged else cotangents[group][position]
            )
            by_slot_after.append(cotangent)
        # One more, for arrays in the arguments that are none of those after the call.
        by_slot_after.append(None)
        no_slot = len(by_slot_after) - 1
        arguments = _arguments_after(forward.arguments, outcome, no_slot)
        # Then what the user's rule gets. The forms of both modes are described in `custom_vjp`.
        nondiff, user_residuals = unflatten(forward.residuals, residuals).root
        options: dict[str, Any] = {}
        if self.transform.has_states:  # with graph updates
            g = self._cotangents_in_states(outcome, arguments, by_slot_after)
        else:
            g = unflatten(outcome.structure, by_slot_after).root  # in the form of the output
            if "updates_g" in inspect.signature(backward_rule).parameters:
                # {index: None}: in place of the Variable with that index, `unflatten` puts None.
                unchanged = dict.fromkeys(_unchanged_variables(arguments, outcome))
                args, _ = unflatten(arguments, by_slot_after, existing=unchanged).root
                options["updates_g"] = args
        results = backward_rule(*nondiff, user_residuals, g, **options)
        # Last, from the user's modules and arrays to the arrays that JAX differentiates. None in
        # place of a module or an array stands for zeros.
        form = forward.cotangent_form
        name = f"custom_vjp: {name_of(backward_rule)}: cotangents"  # for messages
        input_cotangents = form.tangents_in(name, results, may_omit=True)
        by_slot = dict(zip(form.slots, input_cotangents, strict=True))
        return ([by_slot.get(slot) for slot in self.slots],)

    def _zero_cotangent(self, slot: int) -> Any:
        """Returns zeros for the leaf in a slot of the arguments; for integers, of ``float0``."""
        if slot not in self.types:  # not differentiated, or a flag: zeros of `float0`, too
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
          outcome: what the forward rule did.
          arguments: the arguments after it, as `_arguments_after` returns them.
          cotangents: by slot after the call; the last one is None, for arrays that the call cannot
            change.

        Returns:
          The cotangents of the differentiated arguments after the call, and of the output. Both
          have an ``nnx.State`` in place of each module.
        """
        no_slot = len(cotangents) - 1
        # Variables that hold cotangents, by index. The structure after the call has the same
        # indices, so a Variable that is in the output and in an argument is one in both states.
        variables = unflatten(arguments, cotangents).objects
        args, _ = user_tree(
            arguments,
            cotangents,
            keep=lambda slots: no_slot not in slots,  # None in place of other arrays
            objects=variables,
        )
        output = user_tree(outcome.structure, cotangents, objects=variables)
        return self.differentiated_of(args), output


def _arguments_after(before: Structure, outcome: Outcome, no_slot: int) -> Structure:
    """Returns the structure of the arguments as a call left them, by slots after the call.

    In the example of this module, ``model.count`` is in slot 1, and ``model.kernel`` in slot 2.
    ``x``, which the call cannot change, is none of the arrays after it, and gets ``no_slot``.

    Args:
      before: the structure of the arguments before the call.
      outcome: what the call did.
      no_slot: the slot for arrays that the call cannot change.
    """
    after = outcome.structure  # of the output, with the objects of the arguments in its table
    entries, slots = [*after.entries], [*after.slots]
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
            # The tangents of the arguments, in new objects like these. What JAX does not get has
            # zeros of `float0`.
            arguments = flatten((args, {}))
            zeros = [without_tangent(x) for x in arguments.leaves]
            leaves = replace_slots(zeros, self.slots, array_tangents)
            d_args, _ = unflatten(arguments.structure, leaves).root
            pair = rule(
                *self.nondiff_of(args), self.differentiated_of(args), self.differentiated_of(d_args)
            )
            check_pair(f"custom_jvp: {name_of(rule)} must return a pair (output, tangent)", pair)
            output, d_output = pair
            return output, (d_output, d_args)

        outcome, outputs, (d_output, d_args) = self.trace_rule(rule, call_rule, arrays)
        return outputs, self._tangents_of_outputs(outcome, outputs, d_output, d_args)

    def _tangents_of_outputs(
        self, outcome: Outcome, outputs: GroupArrays, d_output: object, d_args: tuple[Any, ...]
    ) -> GroupArrays:
        """Returns the tangent of each output of JAX's function, in the groups of the outputs.

        In the example of this module, ``[[tangent of y, tangent of count]]``: the rule returns the
        first one, and leaves the second one in the tangents of its arguments.

        Args:
          outcome: what the rule did to objects.
          outputs: the arrays that it returned or wrote, in groups.
          d_output: the tangent that it returned.
          d_args: the tangents of all arguments, as it left them.
        """
        [rule] = self.rules
        # The arrays after the call, by slot. What the function returns unchanged is no output of
        # JAX's function: its tangent goes around the rule, and is not asked for here.
        leaves = [
            None if group == INPUT else outputs[group][position]
            for group, position in outcome.sources
        ]
        structure = outcome.structure
        form = TangentForm(Flat(structure, leaves, ()), slots_by_path(structure))
        name = f"custom_jvp: {name_of(rule)}: tangent"  # for messages
        returned = form.tangents_in(name, d_output)
        by_slot_after = dict(zip(form.slots, returned, strict=True))
        # What is in the output and in an argument has the tangent that was left in the latter.
        by_slot_after |= self._tangents_left(outcome, d_args)
        # Each output of JAX's function is in one slot after the call.
        by_source = {outcome.sources[slot]: tangent for slot, tangent in by_slot_after.items()}
        tangents = []
        for group, arrays in enumerate(outputs):
            in_group = []
            for position, array in enumerate(arrays):
                # None for an integer, and for an array that has no place in the tangents.
                tangent = by_source.get(Source(group, position))
                in_group.append(_zero_tangent(array) if tangent is None else tangent)
            tangents.append(in_group)
        return tangents

    def _tangents_left(self, outcome: Outcome, d_args: tuple[Any, ...]) -> dict[int, Any]:
        """Returns the tangents that a rule left in those of its arguments, by slot after the call.

        Args:
          outcome: what the rule did to objects.
          d_args: the tangents of the arguments, as it left them.
        """
        # Flattened like the arguments, (positional, keywords), and so with the same paths.
        left = flatten((d_args, {}))
        left_slots_by_path = slots_by_path(left.structure)
        no_slot = len(outcome.sources)  # none of the arrays after the call has this slot
        arguments = _arguments_after(self.plan.structure, outcome, no_slot)
        tangents: dict[int, Any] = {}
        for path, slots in slots_by_path(arguments).items():
            # A Variable that the rule has added to an argument, or an array to a Variable, may have
            # none in the tangents.
            left_slots = left_slots_by_path.get(path, ())
            for slot, left_slot in zip(slots, left_slots, strict=False):
                if slot != no_slot:
                    tangents[slot] = left.leaves[left_slot]
        return tangents


def _zero_tangent(array: jax.Array) -> Any:
    """Returns the zero tangent of an array; for integers, of dtype ``float0``."""
    if jnp.issubdtype(array.dtype, jnp.inexact):
        return jnp.zeros_like(array)
    return without_tangent(array)
