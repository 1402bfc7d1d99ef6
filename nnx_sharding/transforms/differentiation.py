"""How ``grad`` and ``value_and_grad`` call JAX: flat arrays in, gradients by path out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from .. import _compat
from ..activations.tracing import inherited
from ..core.call import run
from ..core.call_context import Caller
from ..core.flatten import Flat
from ..core.naming import name_of
from ..core.plan import Plan
from ..core.resolve import NamedLocation, locate
from ..core.signature import Call
from ..core.targets import Part, Target
from ..core.unflatten import Built, pytree_of, value_at
from ..errors import raise_listed, see
from ..specs.filters import to_predicate
from ..specs.fitting import suggestion
from .in_trace import InnerTransform, described, is_array
from .lifted import LiftedFunction, P, R
from .partial_sums import PartialSums


@dataclasses.dataclass(frozen=True, kw_only=True)
class Differentiation(InnerTransform):
    """What ``grad`` decides: what it differentiates, and how.

    Attributes:
      wrt: for each differentiated argument its position or name, and the filter for its Variables.
      is_chosen: whether the user chose a filter, so that something has to match it.
      is_single: whether the gradient is of one argument, not a tuple.
    """

    returns_any: ClassVar[bool] = True  # auxiliary data

    in_name: str = "argnums"
    wrt: tuple[tuple[int | str, Any], ...]
    is_chosen: bool
    is_single: bool
    has_aux: bool
    holomorphic: bool
    allow_int: bool

    @contextlib.contextmanager
    def tracing(  # noqa: D102
        self, pure: Any, caller: Caller, built: Built, leaves: Sequence[Any]
    ) -> Iterator[Callable[..., Any]]:
        with super().tracing(pure, caller, built, leaves) as fun:

            def checked(*args: Any, **kwargs: Any) -> Any:
                out = fun(*args, **kwargs)
                self._check_output(name_of(caller.fun), out)
                return out

            yield checked

    def _check_output(self, fun_name: str, out: Any) -> None:
        if self.has_aux and not (isinstance(out, tuple | list) and len(out) == 2):
            raise TypeError(
                f"{self.name}: with has_aux=True {fun_name} must return a pair (loss, aux), "
                f"got {described(out)}."
            )
        loss = out[0] if self.has_aux else out
        if not is_array(loss) or jnp.shape(loss) != ():
            hint = "" if self.has_aux else " If it returns (loss, aux), give has_aux=True."
            raise TypeError(
                f"{self.name}: {fun_name} must return a scalar loss, got {described(loss)}.{hint}"
            )


class _Wanted(NamedTuple):
    """One differentiated argument: its target, its value, and what is differentiated in it."""

    target: Target
    value: Any
    locations: list[NamedLocation]


class ValueAndGrad(LiftedFunction[P, R]):
    """A function that returns the value of another one and its gradient."""

    _transform: Differentiation

    @_compat.api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The value and the gradient; changes are made to the caller's own objects."""
        return self.of((*self._bound, *args), kwargs)

    def of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], sums: PartialSums | None = None
    ) -> Any:
        """The value and the gradient.

        Args:
          args: positional arguments, with the object of a bound method.
          kwargs: keyword arguments.
          sums: what parameters have that can have partial sums; their gradient is these.
        """
        flat, plan, wanted, slots = self._prepared(args, kwargs)
        transform = self._transform
        if not transform.allow_int:
            _check_dtypes(transform.name, plan.names, flat.leaves, slots)
        partial = self._partial(sums, flat, slots)
        value_and_grad = jax.value_and_grad(
            _loss_of(plan, slots, sums, partial),
            has_aux=True,
            holomorphic=transform.holomorphic,
            allow_int=transform.allow_int,
        )
        gradients: dict[int, Any] = {}

        def execute(*leaves: Any) -> Any:
            zeros = [sums.zeros(leaves[slot]) for slot in partial] if sums else []
            (_, outputs), (arrays, new) = value_and_grad(
                ([leaves[slot] for slot in slots], zeros), leaves
            )
            gradients.update(zip(slots, arrays, strict=True))
            if sums is not None:
                for slot, x in zip(partial, new, strict=True):
                    gradients[slot] = sums.with_sum(x, gradients[slot])
            return outputs

        with inherited(flat.objects):
            value = run(plan, flat, execute, self._fun, nested=True)
        return value, self._in_form(wanted, flat, gradients)

    def differentiated(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], sums: PartialSums | None = None
    ) -> tuple[Any, Any]:
        """What is differentiated, and which of it has partial sums, in the form of the gradient."""
        flat, _, wanted, slots = self._prepared(args, kwargs)
        partial = self._partial(sums, flat, slots)
        forms = ({s: flat.leaves[s] for s in slots}, {s: s in partial for s in slots})
        return tuple(self._in_form(wanted, flat, form) for form in forms)

    def names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
        """The names of the arguments that are differentiated."""
        return {one.target.name for one in self._prepared(args, kwargs)[2]}

    def _partial(self, sums: PartialSums | None, flat: Flat, slots: Sequence[int]) -> list[int]:
        """The slots of what is differentiated and has partial sums."""
        some = sums.slots(flat.objects, flat.structure.slots, flat.leaves) if sums else ()
        return [slot for slot in slots if slot in some]

    def _prepared(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Flat, Plan, list[_Wanted], list[int]]:
        """The flattened arguments of a call, its plan, what is differentiated, and its slots."""
        call, flat = self._split(args, kwargs)
        plan, _ = self._plan(call, flat)
        wanted = self._wanted(plan, call, flat)
        slots = (slot for w in wanted for x in w.locations for slot in x.location.slots)
        return flat, plan, wanted, list(dict.fromkeys(slots))

    def _in_form(self, wanted: Sequence[_Wanted], flat: Flat, gradients: Mapping[int, Any]) -> Any:
        parts = tuple(_gradient_of(one, flat, gradients) for one in wanted)
        return parts[0] if self._transform.is_single else parts

    def _wanted(self, plan: Plan, call: Call, flat: Flat) -> list[_Wanted]:
        """What is differentiated in a call.

        Raises:
          ValueError: an argument does not exist, or no Variable matches the user's filter.
        """
        name = self._transform.name
        targets = {target.name: target for target in plan.arguments}
        chosen = {self._name_of(which, call): filter_ for which, filter_ in self._transform.wrt}
        if len(chosen) < len(self._transform.wrt):
            which = [x for x, _ in self._transform.wrt]
            raise ValueError(f"{name}: argnums names an argument more than once: {which!r}.")
        if unknown := [repr(x) + suggestion(x, targets) for x in chosen if x not in targets]:
            raise ValueError(
                f"{name}: argnums names unknown arguments: {', '.join(unknown)}. "
                f"The arguments: {', '.join(targets)}."
            )
        predicates = {argument: to_predicate(filter_) for argument, filter_ in chosen.items()}
        locations: dict[str, list[NamedLocation]] = {argument: [] for argument in chosen}
        is_empty, seen = True, set[int]()
        for found in locate(flat.structure, plan.arguments):
            argument, (_, entry, slots) = found.target.name, found.location
            predicate = predicates.get(argument)
            # A Variable without arrays, such as one of None, has a gradient without arrays.
            if predicate is None or not (slots or pytree_of(flat.structure.entries[entry])):  # type: ignore[index]
                continue
            subject = found.subject(flat.objects, flat.leaves)
            # What is not in a module was named by argnums.
            if not found.location.path or any(predicate(path, subject) for path in found.paths):
                is_empty = is_empty and not slots
                # As in Flax, what is shared has its gradient only in the first place.
                if entry is None or entry not in seen:
                    locations[argument].append(found)
                    seen.update([] if entry is None else [entry])
        if is_empty and self._transform.is_chosen:
            kinds = {type(x).__name__ for x in flat.objects if isinstance(x, nnx.Variable)}
            filters = (getattr(x, "__name__", repr(x)) for x in chosen.values())
            error = ValueError(
                f"{name}: nothing to differentiate in {', '.join(chosen)}: no Variable matches "
                f"{', '.join(dict.fromkeys(filters))}. Give wrt a filter that matches some "
                f"(there are {', '.join(sorted(kinds)) or 'none'}), or argnums other arguments."
            )
            raise see(error, anchor="nothing-to-differentiate")
        ordered = [*call.tree[0], *(call.tree[1][k] for k in sorted(call.tree[1]))]
        values = dict(zip(targets, ordered, strict=True))
        return [_Wanted(targets[x], values[x], found) for x, found in locations.items()]

    def _name_of(self, which: int | str, call: Call) -> str:
        if isinstance(which, str):
            return which
        names = call.signature.names
        position = which + self._implicit if which >= 0 else which + len(names)
        if not 0 <= position < len(names):  # perhaps passed by keyword
            names = self._parameters.positional
        if not 0 <= position < len(names):
            error = ValueError(
                f"{self._transform.name}: argnums={which}, but {name_of(self._fun)} has the "
                f"arguments {', '.join(names[self._implicit :]) or '()'}."
            )
            raise see(error, anchor="unknown-parameter")
        return names[position]


class Grad(ValueAndGrad[P, R]):
    """A function that returns the gradient of another one."""

    @_compat.api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The gradient, and with ``has_aux`` the auxiliary data."""
        value, gradient = self.of((*self._bound, *args), kwargs)
        return (gradient, value[1]) if self._transform.has_aux else gradient


def _check_dtypes(
    name: str, names: Sequence[str], leaves: Sequence[Any], slots: Sequence[int]
) -> None:
    wrong = [
        f"  {names[slot]}: {described(leaves[slot])}"
        for slot in slots
        if not _compat.is_array_like(leaves[slot])
        or not jnp.issubdtype(jax.typeof(leaves[slot]).dtype, jnp.inexact)
    ]
    raise_listed(
        TypeError,
        f"{name}: these cannot be differentiated, which takes floating-point or complex arrays:",
        wrong,
        "Leave them out with a filter (wrt=...), or give allow_int=True, with which their "
        "gradients have dtype float0.",
    )


def _loss_of(
    plan: Plan, slots: Sequence[int], sums: PartialSums | None, partial: Sequence[int]
) -> Callable[..., Any]:
    """The function that JAX differentiates: of the arrays in some slots, and of all."""

    def loss_of(some: tuple[Sequence[Any], Sequence[Any]], leaves: Sequence[Any]) -> Any:
        arrays, zeros = some
        every = [*leaves]
        for slot, array in zip(slots, arrays, strict=True):
            every[slot] = array
        pairs = zip((every[slot] for slot in partial), zeros, strict=True)
        with sums.known(pairs) if sums else contextlib.nullcontext():
            *groups, outcome = outputs = plan.program.inline(*every)
        # The loss is the first array that the function returned.
        return outcome.arrays(every, groups)[outcome.structure.root_slots[0]], outputs

    return loss_of


def _gradient_of(wanted: _Wanted, flat: Flat, gradients: Mapping[int, Any]) -> Any:
    """The gradient of one argument, in its form: for each module a state."""
    by_part: dict[Any, list[NamedLocation]] = {}
    for found in wanted.locations:
        by_part.setdefault(found.part.keys, []).append(found)
    parts = [
        _gradient_of_part(part, by_part.get(part.keys, ()), flat, gradients)
        for part in wanted.target.parts
    ]
    if _compat.is_graph_object(wanted.value):
        return parts[0]
    treedef = jax.tree_util.tree_structure(wanted.value, is_leaf=_compat.is_graph_object)
    return jax.tree_util.tree_unflatten(treedef, parts)


def _gradient_of_part(
    part: Part, locations: Sequence[NamedLocation], flat: Flat, gradients: Mapping[int, Any]
) -> Any:
    by_path: dict[Any, Any] = {}
    for _, _, location, _, _ in locations:
        arrays = {slot: gradients[slot] for slot in location.slots}
        gradient = value_at(flat.structure, location, arrays)  # type: ignore[arg-type]
        if location.entry is not None:
            old = flat.objects[location.entry]
            value, gradient = gradient, _compat.new_variable(type(old), _compat.get_metadata(old))
            _compat.set_value(gradient, value)
        by_path[location.path] = gradient
    return by_path[()] if () in by_path else nnx.from_flat_state(by_path)
