"""``scan`` for functions that take and return NNX objects, and the loop that it runs.

JAX's loops know three kinds of arrays: the carry, slices, and arrays that a step captures. A pure
function has all arrays of its arguments, so the loop sorts them by their axes (:class:`Loop`):

    array                                   in the loop    after a step
    ------------------------------------    -----------    -----------------------------------
    with an axis                            slice          stacked, if the step writes it
    of the argument that is the carry       carry          the next step's
    in an object, without an axis           carry          the next step's, if it writes it
    other arrays without an axis            carry          itself: a step cannot write to it
    flags and what is not an array          captured       itself

JAX turns a carry that no step changes into a constant, so the third and fourth row cost nothing for
arrays that no step writes. `while_loop` and `fori_loop` are the same loop without slices.

The *leaves* of the arguments are arrays, numbers and flags, each in a *slot* (its position). The
*structure* is a table of the objects, in which each object has an *index* and an *entry* that
describes it. A step has arrays in slots before and after it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeAlias, cast

import jax
import jax.numpy as jnp

from .. import _compat
from ..activations.variables import reshard_like
from ..core.arguments import named_parts
from ..core.call_context import Caller, current_caller
from ..core.functions import name_of
from ..core.outcome import Outcome, OutputGroup, Source
from ..core.plan import Plan
from ..core.static_equality import Static
from ..core.structure import RefEntry, VariableEntry, links_below
from ..core.unflatten import Unflattened
from ..errors import raise_if_any, see
from ..specs.fitting import axes_of, describe
from ..specs.types import BROADCAST, CARRY
from . import prefetching
from .carry_checks import check_carry, sharding_changes, structure_changes, type_changes
from .in_trace import Function, Inner, StaticLeaves, may_keep, tree_text
from .lifted import lift, unbind
from .mapped_axes import Carry, Mapped, axes_specs, captures, is_carry, jax_options

# A step returns this besides the carry: for each group of outputs the group, or None if it is not
# stacked; and what the step did.
StepOutput: TypeAlias = tuple[list[OutputGroup | None], Outcome]


@_compat.api_boundary
def scan(
    f: Callable[..., object] | None = None,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    in_axes: object = (Carry, 0),
    out_axes: object = (Carry, 0),
    transform_metadata: Mapping[Any, Any] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    _split_transpose: bool = False,
) -> Any:
    """Loops over a function whose arguments and results may be NNX objects.

    An argument is the carry, which each step gets from the previous one; or mapped along an axis,
    so that each step gets its slice; or the same for all steps. The loop stacks what a step writes
    to a mapped Variable, and new Variables of mapped modules. A value that a step writes to a
    Variable that is not mapped, such as a counter or a random stream, is read by the next step, as
    in a Python loop. A Variable that no step writes is an input of the loop and never an output.

    Args:
      f: the function.
      length: the number of steps, if nothing is mapped.
      reverse: whether to run from the last slice to the first.
      unroll: how many steps to unroll in one iteration; True for all.
      in_axes: for each argument :class:`~nnx_sharding.Carry` (for one at most), the axis along
        which it is mapped, or None: a tuple with one for each positional parameter, a mapping from
        parameter names, or one for all. Axes are a pytree prefix of their argument, with
        :class:`~nnx_sharding.StateAxes` allowed for a module, in which a Variable may also be
        carried.
      out_axes: ``Carry`` for the carry of the next step, and the axes along which everything else
        is stacked: a tuple, or one for all that the function returns.
      transform_metadata: as in :func:`vmap`.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.
      _split_transpose: passed to ``jax.lax.scan``, where it is experimental.

    Returns:
      A function that runs the loop, and returns the last carry and the stacked results.

    Raises:
      TypeError: something is not an axis; at a call, a step returns a carry of another form, or
        writes arrays of another shape or dtype to what the next step reads.
      ValueError: ``Carry`` is in one of ``in_axes`` and ``out_axes`` only; at a call, the number of
        steps is unknown or not the same for all arrays, or a step changes the structure of what is
        carried or the same for all steps.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import Carry, scan, vmap
      >>> make = nnx.split_rngs(splits=3)(vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs)))
      >>> @scan(in_axes=(0, Carry), out_axes=Carry)
      ... def forward(layer, x):
      ...     return layer(x)
      >>> forward(make(nnx.Rngs(0)), jnp.ones((2, 4))).shape
      (2, 4)

    The semantics are those of ``jax.lax.scan`` and ``flax.nnx.scan``.
    """
    in_axes = (in_axes,) if is_carry(in_axes) else in_axes
    # The carry among the arguments: its position, or its name in a mapping. None means no carry,
    # for example if the user gave one axis for all arguments.
    carry_argument = _carry_in(in_axes) if isinstance(in_axes, tuple | list | Mapping) else None
    # The position of the carry in the result; None if the carry is the whole result, or if there is
    # no carry.
    carry_result: Any = _carry_in(out_axes) if isinstance(out_axes, tuple) else None
    # The specs are the same axes in our own types; their ``written`` lists all axes.
    in_specs, out_specs = axes_specs("in_axes", in_axes), axes_specs("out_axes", out_axes)
    takes_carry = carry_argument is not None
    returns_carry = carry_result is not None or is_carry(out_axes)
    if takes_carry != returns_carry:
        raise ValueError(
            "scan: the carry is an argument and a result: give Carry in both in_axes and "
            f"out_axes, or in none, got in_axes={in_specs}, out_axes={out_specs}."
        )
    if BROADCAST in out_specs.written:
        raise ValueError(
            f"scan: what the steps return is stacked, so out_axes cannot be None, got {out_specs}."
        )
    options = {"length": length, "reverse": reverse, "unroll": unroll}
    metadata = tuple((transform_metadata or {}).items())

    def decorate(f: Callable[..., object]) -> Any:
        # The user's positions do not count the object of a bound method. In the trace, it is the
        # first argument.
        _, bound_objects = unbind(f)
        carry_key = carry_argument
        if isinstance(carry_key, int):
            carry_key += len(bound_objects)
        transform = Scan(
            in_specs=in_specs,
            out_specs=out_specs,
            carry_argument=carry_key,
            carry_result=carry_result,
            options=jax_options(**options, _split_transpose=_split_transpose),
            metadata=metadata,
        )
        return lift(Inner, f, transform, graph, graph_updates)

    return decorate if f is None else decorate(f)


def _carry_in(axes: Any) -> int | str | None:
    """Returns the position or the name of the argument whose axis is ``Carry``; None without one.

    ``(0, Carry)`` → 1, ``{"model": None, "x": Carry}`` → ``"x"``.

    Raises:
      ValueError: several arguments have the axis ``Carry``.
    """
    items = axes.items() if isinstance(axes, Mapping) else enumerate(axes)
    carries = [key for key, axis in items if is_carry(axis)]
    if len(carries) > 1:
        specs = axes_specs("in_axes", axes)
        raise ValueError(f"scan: only one argument can be the carry, got in_axes={specs}.")
    return carries[0] if carries else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scan(Mapped):
    """The options of ``scan``, and what they decide: the loop, and checks of the carry."""

    # The end of the error about a step that changes the structure of what it passes on.
    remedy: ClassVar[str] = (
        "Give it an axis, so that each step has its own, or make the change outside of the loop."
    )
    compiles_at_top_level: ClassVar[bool] = True

    name: str = "scan"
    # The position or the name of the argument that is the carry; None without one.
    carry_argument: int | str | None
    # The position of the carry in the function's result; None if the carry is the whole result.
    carry_result: int | None

    def jax_transform(self, plan: Plan, function: Function) -> Function:  # noqa: D102
        return Loop(self.options, plan, function)

    def user_function(self, plan: Plan, caller: Caller, unflattened: Unflattened) -> Function:
        """Returns the user's function, with a check that its carry has the form of the given one.

        The check is here, and not on flat arrays, because its error can name what was returned.
        """
        # The base class returns the user's function with names for the mapped axis taken out of the
        # metadata of Variables.
        fun = super().user_function(plan, caller, unflattened)
        fun_name = name_of(caller.fun)
        carry_argument = self.carry_argument
        if carry_argument is None:
            return fun

        def with_checked_carry(*args: object, **kwargs: object) -> Any:
            out = fun(*args, **kwargs)
            given_carry = _argument(caller.fun, carry_argument, args, kwargs)
            # `check_carry` raises an error if the second carry has another form than the first.
            if self.carry_result is None:  # the carry is the whole result
                check_carry(self.name, fun_name, given_carry, out)
            elif isinstance(out, tuple) and len(out) > self.carry_result:
                check_carry(self.name, fun_name, given_carry, out[self.carry_result])
            else:
                error = TypeError(
                    f"scan: {fun_name} must return a tuple whose item {self.carry_result} is "
                    f"the carry (out_axes={self.out_specs}), got {tree_text(out)}."
                )
                raise see(error, anchor="carry-of-another-form")  # the anchor is in docs/errors.md
            return out

        return with_checked_carry

    def carried_objects(self, plan: Plan) -> frozenset[int]:  # noqa: D102
        indices: set[int] = set()
        for argument in plan.graph_arguments:
            for part in argument.parts:  # the objects in its pytree, each with its axis
                if part.spec is CARRY:
                    indices.update(links_below(plan.structure, [part.child]))
        return frozenset(indices)


def _argument(
    fun: Callable[..., object], key: int | str, args: Sequence[object], kwargs: Mapping[str, object]
) -> Any:
    """Returns the carry among the arguments of a call, however it was passed.

    Args:
      fun: the function that is called; its signature says where a keyword belongs.
      key: the position or the name of the carry.

    Raises:
      TypeError: the call leaves the carry to its default.
    """
    if isinstance(key, int) and key < len(args):
        return args[key]
    signature = inspect.signature(fun)
    # The signature says the name of the parameter at that position. A count of the arguments
    # would be wrong, because the call may leave parameters before it to their defaults.
    names = [*signature.parameters]
    name = names[key] if isinstance(key, int) and key < len(names) else key
    arguments = {**signature.bind(*args, **kwargs).arguments, **kwargs}
    if name not in arguments:
        error = TypeError(
            f"scan: {name_of(fun)} is called without {name}, which is the carry by in_axes. Pass "
            "the first carry."
        )
        raise see(error, anchor="carry-of-another-form")
    return arguments[name]


class _Place(NamedTuple):
    """The place of a carried array in an object. A step may change its slot, but not this place."""

    object_index: int  # the index of the object in the structure
    position: int  # the position among the arrays of the object


class Loop:
    """A loop over a pure function, itself a function of the same flat arrays.

    The loop sorts the slots of the arguments as the table at the top of this file says. Each step
    calls the pure function with all leaves, and checks that the function left the structure and the
    types unchanged, because the next step runs the same program. An example is
    ``step(model, total, bias, x)`` with the axes ``(None, Carry, None, 0)``, which counts its calls
    in ``model.count``:

        slots       0 model.count   1 model.kernel   2 total   3 bias   4 x
        _mapped     {4: 0}
        _carried    [2, 0, 1]; after a step, these arrays may be in the slots [0, 2, 3]
        _places     {0: (object 1, position 0), 1: (object 2, position 0)}
        _others     [3]

    Attributes:
      _mapped: the axis of each slot that has one, by slot (first row of the table).
      _carried: the slots of the argument that is the carry, then those in ``_places`` (second and
        third row).
      _places: the places of the arrays in objects that are not mapped to which a step may write,
        by slot.
      _others: all other slots. `_can_carry` tells in each call which of them hold arrays, which are
        carried unchanged, after those in ``_carried`` (fourth row). A step captures the rest (last
        row).
      _has_refs: whether an argument is a `jax.Ref`.
      _group_axes: the axis along which each group of outputs is stacked; None if it is carried.
      _carry_group: the number of the group of outputs that belong to the carry; None without one.
      _fixed_objects: the indices of the objects whose structure no step may change.
      _function, _structure, _names: the pure function, the structure of its arguments, and the
        expression for each of their leaves, by slot.
      _signature, _graph_arguments: the names of the arguments, and the objects in them, with which
        errors name things.
      _transform: the options of the user's call; its ``name`` begins errors.
      _options: the keyword arguments for JAX's loop, such as ``length``; empty in a while loop.
      _kept_step: `_make_step` with a cache, by the static leaves.
    """

    def __init__(self, options: Iterable[tuple[str, Static]], plan: Plan, function: Function):
        """Sorts the inputs and outputs of a pure function into carry, slices and constants.

        Args:
          options: the options of JAX's own loop, in hashable form.
          plan: what is known before the trace: the structure of the arguments, and their axes.
          function: the pure function, of all leaves of the arguments.
        """
        self._options = {key: option.value for key, option in options}
        self._function, self._structure, self._names = function, plan.structure, plan.names
        self._signature = plan.signature  # has the names of the arguments
        self._transform = cast("Scan", plan.transform)
        self._graph_arguments = plan.graph_arguments
        self._group_axes = [axis.index for axis in plan.out_specs]
        self._carry_group = plan.out_specs.index(CARRY) if CARRY in plan.out_specs else None
        self._sort_slots(plan)
        self._fixed_objects = self._find_fixed_objects(plan)
        # JAX finds the trace of a loop, and at top level its program, by the identity of the step,
        # so one step is kept for each set of static leaves, and later calls use it again.
        self._kept_step = functools.lru_cache(maxsize=64)(self._make_step)

    def _sort_slots(self, plan: Plan) -> None:
        """Sorts the arrays of the arguments by the rows of the table at the top of this file.

        Sets ``_mapped`` (first row), ``_carried`` (second and third), ``_places``, ``_others`` and
        ``_has_refs``.

        Raises:
          ValueError: a `jax.Ref` is mapped.
        """
        structure, axes = plan.structure, plan.specs
        refs = structure.slots_of(RefEntry)  # the slots of the `jax.Ref`s
        self._has_refs = bool(refs)  # `__call__` keeps no step that has captured a ref
        self._mapped = {slot: x.index for slot, x in enumerate(axes) if x.index is not None}
        mapped_refs = [self._names[slot] for slot in refs if slot in self._mapped]
        if mapped_refs:
            raise ValueError(
                f"scan: a jax.Ref cannot be mapped: {', '.join(sorted(mapped_refs))}. Give it the "
                "axis None: the next step then reads what a step writes to it."
            )
        # A ref need not be carried, because a step writes to it in place and the next one reads it.
        not_carried = refs | self._mapped.keys()
        self._places = {
            slot: place
            for slot, place in self._writable_places(plan).items()
            if slot not in not_carried
        }
        # Outside of objects, only the arrays of the carry change from step to step.
        outside_of_objects = [slot for slot in structure.root_slots if axes[slot] is CARRY]
        self._carried = [*outside_of_objects, *self._places]
        sorted_slots = {*self._mapped, *self._carried}
        self._others = [slot for slot in range(len(axes)) if slot not in sorted_slots]

    def _writable_places(self, plan: Plan) -> dict[int, _Place]:
        """Finds the arrays in objects that keep what a step writes to them.

        A Variable always keeps it. With ``graph_updates=False``, an attribute of a module keeps it
        only if the module is in the carry; in other modules the loop loses it.

        Returns:
          The place of each such array, by slot.
        """
        structure = plan.structure
        carried_objects = plan.transform.carried_objects(plan)  # by index
        places: dict[int, _Place] = {}
        for index, (entry, slots) in enumerate(
            zip(structure.entries, structure.slots, strict=True)
        ):
            is_variable = isinstance(entry, VariableEntry)
            if is_variable or plan.updates or index in carried_objects:
                places |= {slot: _Place(index, position) for position, slot in enumerate(slots)}
        return places

    def _find_fixed_objects(self, plan: Plan) -> set[int]:
        """Finds the objects whose structure no step may change, because the next step gets them.

        All objects that are not mapped are fixed, and the objects of carried arrays.
        """
        structure = plan.structure
        fixed: set[int] = set()
        for argument in plan.graph_arguments:
            # The parts are the modules and Variables in its pytree, each with the axis that the
            # user gave for it, or None if the user gave none.
            for part in argument.parts:
                if part.spec in (None, BROADCAST, CARRY):
                    fixed.update(links_below(structure, [part.child]))
        # Before the first step, the Variables that collect what modules sow are empty, without
        # slots. A step puts arrays there, which the loop stacks, so the next step gets the
        # Variables empty again. They may change.
        for index in captures(structure):
            if not structure.slots[index]:
                fixed.discard(index)
        # StateAxes may carry a Variable in a module that has mapped Variables, too. Such a module
        # is not in `fixed`, so the Variable is added.
        return fixed | {place.object_index for place in self._places.values()}

    def __call__(self, *leaves: object) -> tuple[Any, ...]:
        """Runs the loop, as a function of the same leaves as the pure function of one step.

        Args:
          *leaves: the leaves of the arguments, by slot.

        Returns:
          Groups of outputs and the outcome of a step, like the pure function. The groups have
          stacked arrays or last values here.
        """
        self._check_lengths(leaves)  # raises unless all mapped arrays have one length
        self._check_unsharded(leaves)  # raises if a mapped array is sharded along its axis
        # The step captures leaves that JAX cannot carry, such as flags, in hashable form.
        captured = [slot for slot in self._others if not _can_carry(leaves[slot])]
        static = tuple((slot, Static.of(leaves[slot])) for slot in captured)
        # A kept step that has captured a ref would be used for a later call with another ref.
        may_be_kept = not self._has_refs and may_keep(static)
        step = self._kept_step(static) if may_be_kept else self._make_step(static)
        slots = self._carry_slots(static)
        names = tuple(self._names[slot] for slot in slots)  # for JAX's messages
        # To JAX, an `OutputGroup` is a pytree of its arrays.
        carry = OutputGroup(names, tuple(leaves[slot] for slot in slots))
        # (…, steps, …) → (steps, …), because `jax.lax.scan` slices the first dimension.
        mapped = [_move_axis(leaves[slot], axis, 0) for slot, axis in self._mapped.items()]
        last_carry, (stacked, outcome) = self._run(step, carry, mapped, static)
        return (*self._outputs(last_carry, stacked, outcome), outcome)

    def _run(
        self, step: Function, carry: OutputGroup, mapped: Sequence[jax.Array], static: StaticLeaves
    ) -> tuple[OutputGroup, StepOutput]:
        """Runs the steps.

        Args:
          step: the body, of the carry and the slices of one step.
          mapped: the arrays to slice: (steps, …).
          static: the leaves that JAX does not trace, which ``step`` has captured. Only the method
            of a while loop, which overrides this one, needs them: for the condition.

        Returns:
          The last carry, and the stacked outputs of the steps.
        """
        # This is `jax.lax.scan`, unless a `Stack` or its strategy asks for prefetching. Then the
        # loop gathers the parameters of the next layer while a layer computes.
        return prefetching.scan(step, carry, mapped, **self._options)

    def _outputs(
        self, last_carry: OutputGroup, stacked: Sequence[OutputGroup | None], outcome: Outcome
    ) -> list[OutputGroup]:
        """Returns the outputs of the loop, in the same groups as the outputs of a step.

        Args:
          stacked: the groups that were stacked; None for a group in the carry.
        """
        # The last values are found by the source that their array has in a step's outcome. An array
        # that a step does not change is no output. Its source is in the group `INPUT`, so it is in
        # none of the groups below.
        sources = [outcome.sources[slot] for slot in self._carried_after(outcome)]
        # The carry ends with arrays that no step can change. They are no outputs.
        last_arrays = last_carry.arrays[: len(self._carried)]
        last_values = dict(zip(sources, last_arrays, strict=True))
        groups = []
        for number, (group, axis) in enumerate(zip(stacked, self._group_axes, strict=True)):
            if group is None or axis is None:  # carried
                in_group = [source for source in last_values if source.group == number]
                # A step's outputs are ordered by position.
                arrays = [last_values[source] for source in sorted(in_group)]
            else:  # (steps, …) → (…, steps, …)
                arrays = [_move_axis(array, 0, axis) for array in group.arrays]
            groups.append(OutputGroup.unnamed(arrays))
        return groups

    def _carry_slots(self, static: StaticLeaves) -> list[int]:
        """Returns the slots of the arrays in the carry, in order.

        The carry has ``_carried``, then the arrays in ``_others``, which no step changes.
        ``static`` has the leaves that are not arrays.
        """
        captured = {slot for slot, _ in static}
        return [*self._carried, *(slot for slot in self._others if slot not in captured)]

    def _leaves(
        self, static: StaticLeaves, carry: OutputGroup, slices: Sequence[object]
    ) -> list[Any]:
        """Returns all leaves for the pure function in one step, by slot.

        Args:
          static: the leaves that JAX does not trace, in pairs with their slots.
          carry: the carry of the step: the arrays in the slots that `_carry_slots` returns.
          slices: the slices of the arrays in the slots ``_mapped``.
        """
        leaves = {slot: leaf.value for slot, leaf in static}
        leaves |= zip(self._carry_slots(static), carry.arrays, strict=True)
        leaves |= zip(self._mapped, slices, strict=True)
        return [leaves[slot] for slot in range(len(leaves))]

    def _make_step(self, static: StaticLeaves) -> Function:
        """Makes the body of the loop for JAX: ``(carry, slices) → (next carry, output)``.

        The output has the arrays that are stacked, and the outcome, which says what the step did to
        objects. The body raises an error if a step changes the structure or the types of what it
        passes on.

        Args:
          static: the leaves that JAX does not trace, such as flags, in pairs with their slots.
        """

        def step(carry: OutputGroup, slices: Sequence[object]) -> tuple[OutputGroup, StepOutput]:
            leaves = self._leaves(static, carry, slices)
            *groups, outcome = self._function(*leaves)
            # `_carried_after` is safe because this check raises if an object has changed its form.
            self._check_structure(groups, outcome)
            arrays = outcome.arrays(leaves, groups)  # by slot after the step
            new_carry = []
            for slot, slot_after in zip(self._carried, self._carried_after(outcome), strict=True):
                array = arrays[slot_after]
                # A new value in an object gets the sharding of the old one, as in all transforms.
                is_in_object = slot in self._places
                new_carry.append(reshard_like(array, leaves[slot]) if is_in_object else array)
            self._check_types(carry.arrays, new_carry)  # raises if the step changed types
            # The carry ends with arrays that the step passes on unchanged.
            new_carry += carry.arrays[len(new_carry) :]
            # A group without an axis is in the carry, so it is not stacked.
            pairs = zip(groups, self._group_axes, strict=True)
            stacked = [None if axis is None else group for group, axis in pairs]
            return OutputGroup(carry.names, tuple(new_carry)), (stacked, outcome)

        return step

    def _carried_after(self, outcome: Outcome) -> list[int]:
        """Returns the slots after a step of the arrays in ``_carried``, in the same order."""
        structure_after = outcome.structure
        # The carry begins with the arrays outside of objects that the step returned as its carry.
        # They have the order of the given arrays, because the user's function was checked to return
        # the same pytree.
        in_carry = [
            slot
            for slot in structure_after.root_slots
            if outcome.sources[slot].group == self._carry_group
        ]
        # The arrays in objects follow. Objects have the same indices after the step.
        in_objects = [
            structure_after.slots[place.object_index][place.position]
            for place in self._places.values()
        ]
        return [*in_carry, *in_objects]

    def _check_lengths(self, leaves: Sequence[object]) -> None:
        """Raises a ``ValueError`` unless all mapped arrays have one length along their axes."""
        # The arrays for each length, in words:
        # {"length 8": ["x(8, 4)"], "no axis 2": ["y(8,)"]}
        arrays_by_length: dict[str, list[str]] = {}
        have_all_axes = True  # whether each array has the axis along which it is mapped
        for slot, axis in self._mapped.items():
            aval = jax.typeof(leaves[slot])
            # A value of a hijax type is no array, so it has no axes.
            shape = aval.shape if hasattr(aval, "dtype") else ()
            if -len(shape) <= axis < len(shape):
                length_text = f"length {shape[axis]}"
            else:
                length_text = f"no axis {axis}"
                have_all_axes = False
            arrays_by_length.setdefault(length_text, []).append(f"{self._names[slot]}{shape}")
        length = self._options["length"]
        if not arrays_by_length and length is None:
            self._refuse_unknown_length()  # always raises
        if length:
            arrays_by_length.setdefault(f"length {length}", []).append("the option length")
        if not have_all_axes or len(arrays_by_length) > 1:
            lines = [
                f"  {length_text}: {', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
                for length_text, names in arrays_by_length.items()
            ]
            head = "scan: everything mapped must have the same length:"
            raise_if_any(ValueError, head, lines)

    def _check_unsharded(self, leaves: Sequence[object]) -> None:
        """Raises a ``ValueError`` if an Explicit mesh axis shards the dimension of the steps.

        All devices run each step, so JAX refuses such arrays, but without their names.
        """
        lines = []
        for slot, axis in self._mapped.items():
            aval = jax.typeof(leaves[slot])
            sharding = getattr(aval, "sharding", None)  # a value of a hijax type may have none
            if sharding is not None and axes_of(sharding.spec.partitions[axis]):
                spec = describe(sharding.spec)
                lines.append(f"  {self._names[slot]}{aval.shape}: {spec}, axis {axis}")
        raise_if_any(
            ValueError,
            "scan: all devices run each step, but these arrays are sharded along the axis of the "
            "steps:",
            lines,
            "Shard another dimension. A strategy that chose these specs has not found out that "
            "layers of a class of yours are stacked: override(sharding, {path: spec}).",
        )

    def _refuse_unknown_length(self) -> NoReturn:
        """Raises an error for a loop without a number of steps.

        If the call lacks an argument, such as the one to map, the error is Python's about that,
        because it says more.
        """
        fun: Any = current_caller().fun  # type: ignore[union-attr]
        # `bind` raises if Python could not call the function with as many arguments and these
        # keywords. The values do not matter.
        keywords = dict.fromkeys(self._signature.keywords)
        try:
            inspect.signature(fun).bind(*self._signature.names, **keywords)
        except TypeError as error:  # "missing a required argument: 'x'"
            missing = TypeError(f"scan: {name_of(fun)}: {error}.")
            raise see(missing, anchor="number-of-steps") from None
        unknown = ValueError(
            f"scan: no array is mapped along an axis, so {name_of(fun)} has no number of steps. "
            "Give length=..., or an axis in in_axes to an argument that is an array."
        )
        raise see(unknown, anchor="number-of-steps")

    def _check_structure(self, groups: Sequence[OutputGroup], outcome: Outcome) -> None:
        """Raises a ``ValueError`` if a step changed objects in more than the values of arrays.

        The structure has to stay, because the next step gets the same objects and runs the same
        program.
        """
        structure_before, structure_after = self._structure, outcome.structure
        # Indices mean the same objects in both; objects that the step made have higher ones.
        changed = [
            index
            for index in sorted(self._fixed_objects)
            if structure_before.entries[index] != structure_after.entries[index]
        ]
        lines = []
        for place, old_text, new_text in structure_changes(
            self._names_of(changed), structure_before, structure_after
        ):
            # The two texts are equal if another object of the same class is there now.
            is_replaced = old_text == new_text
            change = "replaced" if is_replaced else f"{old_text} before, {new_text} after it"
            lines.append(f"  {place}: is {change}")
        # A mapped object may change, but an array that a step adds to it must not be carried.
        lines = lines or self._lines_of_new_outputs(groups, outcome)
        raise_if_any(
            ValueError,
            f"{self._transform.name}: a step changed the structure of what is the same for all "
            "steps, or carried:",
            lines,
            self._transform.remedy,
        )

    def _lines_of_new_outputs(self, groups: Sequence[OutputGroup], outcome: Outcome) -> list[str]:
        """Returns a line for each output of a step that is neither stacked nor in the carry.

        Such an array was added by the step to a mapped object, and StateAxes give it no axis.
        """
        # An output is in the carry if its source is one of the carry's.
        carried = {outcome.sources[slot] for slot in self._carried_after(outcome)}
        lines = []
        for number, (group, axis) in enumerate(zip(groups, self._group_axes, strict=True)):
            if axis is not None:  # stacked
                continue
            for position, name in enumerate(group.names):
                if Source(number, position) not in carried:
                    lines.append(f"  {name}: is new")
        return lines

    def _check_types(self, given_arrays: Sequence[object], new_arrays: Sequence[object]) -> None:
        """Raises a ``TypeError`` if a step passes on arrays of other types than it got.

        Both lists begin with the arrays in ``_carried``.
        """
        names = [self._names[slot] for slot in self._carried]
        head = (
            f"{self._transform.name}: a step returns in the carry, or writes to what the next one "
            "reads, arrays of another {} than it was given:"
        )
        raise_if_any(
            TypeError,
            head.format("shape or dtype"),
            type_changes(names, given_arrays, new_arrays),
            "Cast or reshape them in the step, or start with those that it returns.",
            anchor="carry-of-another-form",
        )
        lines, remedy = sharding_changes(names, given_arrays, new_arrays)
        anchor = "carry-of-another-form"
        raise_if_any(TypeError, head.format("sharding"), lines, remedy, anchor)

    def _names_of(self, indices: Sequence[int]) -> dict[int, str]:
        """Returns the expressions for some objects of the arguments, by index."""
        names = self._structure.names(named_parts(self._graph_arguments)) if indices else {}
        return {index: names.get(index, "an object") for index in indices}


def _move_axis(array: Any, source: int, destination: int) -> Any:
    """Moves a dimension from one position to another; adds no operation if both are the same."""
    return array if source == destination else jnp.moveaxis(array, source, destination)


def _can_carry(leaf: object) -> bool:
    """Whether JAX can carry a leaf.

    Flags and ints are not carried, because functions use them as settings and sizes.
    """
    is_array = _compat.is_array_like(leaf) and not _compat.is_ref(leaf)
    return is_array and not isinstance(leaf, bool | int)
