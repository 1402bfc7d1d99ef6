"""``scan`` for functions that take and return NNX objects, and the loop that it runs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, cast

import jax
import jax.numpy as jnp
from flax import nnx

from .. import _compat
from ..activations.variables import resharded
from ..core.arguments import named_parts
from ..core.call_context import Caller, caller_here
from ..core.functions import name_of
from ..core.outcome import Outcome, OutputGroup
from ..core.plan import Plan
from ..core.signature import Roles
from ..core.static_equality import Static
from ..core.structure import RefEntry, Structure, VariableEntry, parts_of
from ..core.unflatten import Built
from ..diagnostics.differences import show_child
from ..errors import raise_listed, see
from ..specs.paths import accessor, path_key
from ..specs.state_sharding import BROADCAST, CARRY
from . import prefetching
from .in_trace import Fixed, Function, Inner, described, form, is_array, is_kept
from .lifted import lift, unbind
from .vmap import Carry, Mapped, axes_specs, captures, options_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scan(Mapped):
    """What ``scan`` decides.

    Attributes:
      carried: the position or the name of the argument that is the carry; None without one.
      returned: the position of the carry in what the function returns; None if it is all of it.
    """

    remedy: ClassVar[str] = "Give it an axis, so that each step has its own, or m"
    compiles_at_top_level: ClassVar[bool] = True

    name: str = "scan"
    carried: int | str | None
    returned: int | None

    def wrapped(self, plan: Plan, caller: Caller, built: Built) -> Function:  # noqa: D102
        fun = super().wrapped(plan, caller, built)
        if self.carried is None:
            return fun

        def checked(*args: Any, **kwargs: Any) -> Any:
            out = fun(*args, **kwargs)
            given, fun_name = _argument(caller.fun, self.carried, args, kwargs), name_of(caller.fun)
            if self.returned is None:
                check_carry(self.name, fun_name, given, out)
            elif isinstance(out, tuple) and len(out) > self.returned:
                check_carry(self.name, fun_name, given, out[self.returned])
            else:
                error = TypeError(
                    f"scan: {fun_name} must return a tuple whose item {self.returned} is the "
                    f"carry (out_axes={self.out_specs}), got {form(out)}."
                )
                raise see(error, anchor="carry-of-another-form")
            return out

        return checked

    def passes_sums(self, spec: Any) -> bool:  # noqa: D102
        # A step may write to what is not mapped, and has no sums for the new value. The last
        # dimension of sums is an additional one.
        return spec.index is not None and spec.index >= 0

    def carried_objects(self, plan: Plan) -> frozenset[int]:  # noqa: D102
        parts = (
            part
            for argument in plan.graph_arguments
            for part in argument.parts
            if part.spec is CARRY
        )
        return frozenset().union(*(plan.structure._links(part.child) for part in parts))

    def applied(  # noqa: D102
        self, plan: Plan, function: Function, in_specs: Sequence[Any], out_specs: Sequence[Any]
    ) -> Function:
        return Loop(self.options, plan, function, in_specs, out_specs)


def check_carry(name: str, fun_name: str, given: Any, out: Any) -> None:
    """Checks that the returned carry has the form of the given one."""
    is_leaf = _compat.is_graph_object
    before, old = jax.tree_util.tree_flatten_with_path(given, is_leaf=is_leaf)
    after, new = jax.tree_util.tree_flatten(out, is_leaf=is_leaf)
    if old != new:  # type: ignore[operator]
        error = TypeError(
            f"{name}: {fun_name} returns a carry of a different structure than it was given:\n"
            f"  given: {form(given)}\n  returned: {form(out)}"
        )
        raise see(error, anchor="carry-of-another-form")
    others = [
        f"  carry{accessor('', tuple(map(path_key, path)))}: {type(one).__name__}"
        for (path, one), other in zip(before, after, strict=True)
        if one is not other and (is_leaf(one) or is_leaf(other))
    ]
    head = f"{name}: {fun_name} returns different objects in the carry than it was given:"
    raise_listed(ValueError, head, others, "Change the module that it was given, and return that.")


def differing(names: Iterable[str], given: Iterable[Any], new: Iterable[Any]) -> list[str]:
    """Lines for arrays with others of another shape or dtype in their place."""
    lines = []
    for name, one, other in zip(names, given, new, strict=False):
        if one is not other and is_array(one) and is_array(other):
            types = old, _ = jax.typeof(one), jax.typeof(other)
            shapes, dtypes = ({getattr(x, key, None) for x in types} for key in ("shape", "dtype"))
            # JAX promotes what has a weak type.
            if len(shapes) > 1 or (len(dtypes) > 1 and not getattr(old, "weak_type", False)):
                lines.append(f"  {name}: {described(one)} → {described(other)}")
    return lines


def _argument(fun: Any, which: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """One argument of a call, by position or by name."""
    if isinstance(which, int) and which < len(args):
        return args[which]
    arguments = inspect.signature(fun).bind(*args, **kwargs).arguments
    return arguments[which] if isinstance(which, str) else [*arguments.values()][which]


def _carry_in(in_axes: Any) -> int | str | None:
    """The position or the name of the argument that is the carry."""
    items = in_axes.items() if isinstance(in_axes, Mapping) else enumerate(in_axes)
    found = [key for key, axes in items if _is_carry(axes)]
    if len(found) > 1:
        written = axes_specs("in_axes", in_axes)
        raise ValueError(f"scan: only one argument can be the carry, got in_axes={written}.")
    return found[0] if found else None


def _is_carry(axes: Any) -> bool:
    return axes is Carry or axes is nnx.Carry


class Loop:
    """A loop over a pure function, itself a function of the same flat arrays.

    Arrays of objects that are not mapped are carried: the next step reads what a step writes to
    them. JAX turns those that no step writes into constants.
    """

    def __init__(
        self,
        options: Iterable[tuple[str, Static]],
        plan: Plan,
        function: Function,
        in_specs: Sequence[Any],
        out_specs: Sequence[Any],
    ):
        self._options = {key: option.value for key, option in options}
        self._function, self._structure, self._names = function, plan.structure, plan.names
        self._signature, self._transform = plan.signature, cast("Scan", plan.transform)
        structure = plan.structure
        self._mapped = {s: x.index for s, x in enumerate(in_specs) if x.index is not None}
        self._carry = [s for s in structure.root_slots if in_specs[s] is CARRY]
        refs = structure.slots_of(RefEntry)
        if mapped_refs := [self._names[slot] for slot in refs.intersection(self._mapped)]:
            raise ValueError(
                f"scan: a jax.Ref cannot be mapped: {', '.join(sorted(mapped_refs))}. Give it the "
                "axis None: the next step then reads what a step writes to it."
            )
        # Where each other carried array belongs: the index of its object, and its place in that.
        # Without graph updates only Variables and the carry keep what a step writes.
        carried = plan.transform.carried_objects(plan)
        self._places = {
            slot: (index, number)
            for index, slots in enumerate(structure.slots)
            if plan.updates
            or index in carried
            or isinstance(structure.entries[index], VariableEntry)
            for number, slot in enumerate(slots)
            if slot not in self._mapped and slot not in refs
        }
        self._carried = [*self._carry, *self._places]
        used = {*self._carried, *self._mapped}
        self._others = [slot for slot in range(len(in_specs)) if slot not in used]
        self._has_refs = bool(refs)
        self._kept_step = functools.lru_cache(maxsize=64)(self._step)
        self._group_axes = [axis.index for axis in out_specs]
        self._carry_group = out_specs.index(CARRY) if CARRY in out_specs else None
        # Each step gets the same structure, so none may change the structure of what it passes on:
        # what is not mapped, and the object of each other carried array.
        self._targets = plan.graph_arguments
        parts = [part for argument in plan.graph_arguments for part in argument.parts]
        passed = (x.child for x in parts if x.spec in (None, BROADCAST, CARRY))
        self._fixed = set[int]().union(*map(structure._links, passed))
        self._fixed -= {index for index in captures(structure) if not structure.slots[index]}
        self._fixed |= {index for index, _ in self._places.values()}

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        """The outputs and the outcome of all steps, in the form that the function has for one."""
        self._check_lengths(leaves)
        others = [slot for slot in self._others if _is_carried(leaves[slot])]
        fixed = tuple((s, Static.of(leaves[s])) for s in self._others if s not in others)
        # JAX traces, and at top level compiles, the loop again for each new function, so it is
        # kept, but must not keep the user's objects alive.
        keeps = not self._has_refs and is_kept(fixed)
        step = (self._kept_step if keeps else self._step)(fixed)
        slots = [*self._carried, *others]
        names = tuple(self._names[slot] for slot in slots)  # for JAX's messages
        carry = OutputGroup(names, tuple(leaves[slot] for slot in slots))
        mapped = [_moved(leaves[slot], axis, 0) for slot, axis in self._mapped.items()]
        last, (stacked, outcome) = self._run(step, carry, mapped, fixed)
        final = {
            outcome.sources[slot]: array
            for slot, array in zip(self._slots_after(outcome), last.arrays, strict=False)
        }
        groups = []
        for number, (group, axis) in enumerate(zip(stacked, self._group_axes, strict=True)):
            if axis is None:
                positions = sorted(position for group, position in final if group == number)
                arrays = [final[number, position] for position in positions]
            else:
                arrays = [_moved(array, 0, axis) for array in group.arrays]
            groups.append(OutputGroup(("",) * len(arrays), arrays))
        return (*groups, outcome)

    def _run(
        self, step: Function, carry: OutputGroup, mapped: Sequence[Any], fixed: Fixed
    ) -> tuple[OutputGroup, Any]:
        return prefetching.scan(step, carry, mapped, **self._options)

    def _every(self, fixed: Fixed, carry: OutputGroup, slices: Sequence[Any]) -> list[Any]:
        """All arrays of a step; ``fixed`` has what is not an array, by slot."""
        known = {slot: static.value for slot, static in fixed}
        slots = [*self._carried, *(s for s in self._others if s not in known), *self._mapped]
        known |= zip(slots, [*carry.arrays, *slices], strict=True)
        return [known[slot] for slot in range(len(known))]

    def _step(self, fixed: Fixed) -> Function:
        """What JAX runs at each step."""

        def step(carry: OutputGroup, slices: Sequence[Any]) -> tuple[OutputGroup, Any]:
            every = self._every(fixed, carry, slices)
            *groups, outcome = self._function(*every)
            self._check_structure(groups, outcome)
            arrays = outcome.arrays(every, groups)
            new = [*carry.arrays]  # those that are carried come first
            for i, (slot, after) in enumerate(
                zip(self._carried, self._slots_after(outcome), strict=True)
            ):
                x, is_in_object = arrays[after], slot in self._places
                # As elsewhere, a new value in an object has the sharding of the old one.
                new[i] = resharded(x, every[slot]) if is_in_object else x
            self._check_types(carry.arrays, new)
            pairs = zip(groups, self._group_axes, strict=True)
            out = [None if axis is None else group for group, axis in pairs]
            return OutputGroup(carry.names, tuple(new)), (out, outcome)

        return step

    def _slots_after(self, outcome: Outcome) -> list[int]:
        """The slot of each carried array after a step."""
        after = outcome.structure
        root = [s for s in after.root_slots if outcome.sources[s][0] == self._carry_group]
        return [*root, *(after.slots[index][number] for index, number in self._places.values())]

    def _check_lengths(self, leaves: Sequence[Any]) -> None:
        """Checks that all arrays have the same length along their axes."""
        lengths: dict[Any, list[str]] = {}
        for slot, axis in self._mapped.items():
            aval = jax.typeof(leaves[slot])
            shape = aval.shape if hasattr(aval, "dtype") else ()  # of a hijax type
            has_axis = -len(shape) <= axis < len(shape)
            length = f"length {shape[axis]}" if has_axis else f"no axis {axis}"
            lengths.setdefault(length, []).append(f"{self._names[slot]}{shape}")
        if not lengths and self._options["length"] is None:
            self._refuse_no_length()
        if length := self._options["length"]:
            lengths.setdefault(f"length {length}", []).append("the option length")
        if len(lengths) > 1 or any(not text.startswith("length") for text in lengths):
            lines = [
                f"  {length}: {', '.join(names[:5])}" + ", …" * (len(names) > 5)
                for length, names in lengths.items()
            ]
            head = "scan: everything mapped must have the same length:"
            raise_listed(ValueError, head, lines)

    def _refuse_no_length(self) -> NoReturn:
        fun: Any = caller_here().fun  # type: ignore[union-attr]
        arguments = dict.fromkeys(self._signature.keywords)
        try:
            inspect.signature(fun).bind(*self._signature.names, **arguments)
        except TypeError as error:
            missing = TypeError(f"scan: {name_of(fun)}: {error}.")
            raise see(missing, anchor="number-of-steps") from None
        unknown = ValueError(
            f"scan: no array is mapped along an axis, so {name_of(fun)} has no number of steps. "
            "Give length=..., or an axis in in_axes to an argument that is an array."
        )
        raise see(unknown, anchor="number-of-steps")

    def _check_structure(self, groups: Sequence[OutputGroup], outcome: Outcome) -> None:
        """Checks that a step did not change the structure of what it passes on."""
        pairs = enumerate(zip(self._structure.entries, outcome.structure.entries, strict=False))
        changed = [i for i, (old, new) in pairs if old != new and i in self._fixed]
        names = self._names_of(changed)
        lines = [
            f"  {place}: is {f'{old} before, {new} after it' if old != new else 'replaced'}"
            for place, old, new in differences(names, self._structure, outcome.structure)
        ]
        if not lines:
            known = {outcome.sources[slot] for slot in self._slots_after(outcome)}
            lines = [
                f"  {name}: is new"
                for number, (group, axis) in enumerate(zip(groups, self._group_axes, strict=True))
                for position, name in enumerate(group.names)
                if axis is None and (number, position) not in known
            ]
        raise_listed(
            ValueError,
            f"{self._transform.name}: a step changed the structure of what is the same for all "
            "steps, or carried:",
            lines,
            f"{self._transform.remedy}ake the change outside of the loop.",
        )

    def _check_types(self, given: Sequence[Any], new: Sequence[Any]) -> None:
        raise_listed(
            TypeError,
            f"{self._transform.name}: a step returns in the carry, or writes to what the next one "
            "reads, arrays of another shape or dtype than it was given:",
            differing([self._names[slot] for slot in self._carried], given, new),
            "Cast or reshape them in the step, or start with those that it returns.",
            anchor="carry-of-another-form",
        )

    def _names_of(self, indices: Sequence[int]) -> dict[int, str]:
        """The expressions for some objects of the arguments."""
        names = self._structure.names(named_parts(self._targets)) if indices else {}
        return {index: names.get(index, "an object") for index in indices}


def differences(
    names: Mapping[int, str], one: Structure, other: Structure
) -> Iterator[tuple[str, str, str]]:
    """Where two structures of the same objects differ, and what each has there."""
    for index, name in names.items():
        entries = one.entries[index], other.entries[index]
        if entries[0] == entries[1] or None in entries:  # None without graph updates
            continue
        old, new = map(parts_of, entries)
        changed = [path for path in dict.fromkeys([*old, *new]) if old.get(path) != new.get(path)]
        for path in [path for path in changed if path != (_compat.STATUSES,)] or changed:
            shown = [
                show_child(side, parts[path]) if path in parts else "nothing"
                for side, parts in ((one, old), (other, new))
            ]
            yield accessor(name, path), *shown  # type: ignore[misc]


def _moved(array: Any, source: int, destination: int) -> Any:
    """An array with a dimension in another place; mostly it is there, and nothing is traced."""
    return array if source == destination else jnp.moveaxis(array, source, destination)


def _is_carried(leaf: Any) -> bool:
    """Whether JAX can carry something; flags and other settings are not traced."""
    is_array = _compat.is_array_like(leaf) and not _compat.is_ref(leaf)
    return is_array and not isinstance(leaf, bool | int)


@_compat.api_boundary
def scan(
    fun: Any = None,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    in_axes: Any = (Carry, 0),
    out_axes: Any = (Carry, 0),
    transform_metadata: Mapping[Any, Any] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    _split_transpose: bool = False,
) -> Any:
    """Loops over a function whose arguments and results may be NNX objects.

    An argument is the carry, which each step gets from the previous one; or mapped along an axis,
    so that each step gets its slice; or the same for all steps. What a step writes to a mapped
    Variable is stacked, and so are new Variables of mapped modules. What it writes to Variables
    that are not mapped, such as counters and random streams, is read by the next step, as in a
    Python loop. Variables that no step writes are inputs of the loop and never outputs.

    Args:
      fun: the function.
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
    in_axes = (in_axes,) if _is_carry(in_axes) else in_axes
    carried = _carry_in(in_axes) if isinstance(in_axes, tuple | list | Mapping) else None
    returned: Any = _carry_in(out_axes) if isinstance(out_axes, tuple) else None
    in_specs, out_specs = axes_specs("in_axes", in_axes), axes_specs("out_axes", out_axes)
    if (carried is None) != (returned is None and not _is_carry(out_axes)):
        raise ValueError(
            "scan: the carry is an argument and a result: give Carry in both in_axes and "
            f"out_axes, or in none, got in_axes={in_specs}, out_axes={out_specs}."
        )
    if BROADCAST in out_specs.written:
        raise ValueError(
            f"scan: what the steps return is stacked, so out_axes cannot be None, got {out_specs}."
        )
    given = {"length": length, "reverse": reverse, "unroll": unroll}
    options = options_of(**given, _split_transpose=_split_transpose)

    def decorate(fun: Callable[..., Any]) -> Any:
        bound = len(unbind(fun)[1])
        transform = Scan(
            in_specs=in_specs,
            out_specs=out_specs,
            carried=carried + bound if isinstance(carried, int) else carried,
            returned=returned,
            options=options,
            metadata=tuple((transform_metadata or {}).items()),
        )
        return lift(Inner, fun, transform, Roles(), graph, graph_updates)

    return decorate if fun is None else decorate(fun)
