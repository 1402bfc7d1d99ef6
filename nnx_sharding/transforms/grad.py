"""``grad`` and ``value_and_grad`` for functions that take NNX objects."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from .. import _compat
from ..core.arguments import Argument
from ..core.flatten import Flat
from ..core.functions import name_of
from ..core.plan import Plan
from ..core.resolve import NamedLocation, locate
from ..core.signature import ArgTree, Call, Roles
from ..core.unflatten import pytree_of, unflatten, value_at
from ..errors import raise_listed, see
from ..specs.filters import to_predicate
from ..specs.fitting import suggestion
from .differentiation import Differentiable, Differentiation, tangent_type, without_tangent
from .in_trace import Function, described, is_array
from .lifted import P, R, lift
from .partial_sums import PartialSums


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gradient(Differentiation):
    """What ``grad`` decides: what it differentiates, and how.

    Attributes:
      wrt: for each differentiated argument its position or name, and the filter for its Variables;
        None for the default.
      is_chosen: whether the user chose a filter, so that something has to match it.
      is_single: whether the gradient is of one argument, not a tuple.
      returns_value: whether calls return the value, too.
    """

    in_name: str = "argnums"
    wrt: tuple[tuple[int | str, Any], ...]
    is_chosen: bool
    is_single: bool
    returns_value: bool
    holomorphic: bool
    allow_int: bool

    def check_output(self, fun_name: str, out: Any) -> None:
        if not is_array(out) or jnp.shape(out) != ():
            hint = " Reduce it, for example to its mean." if is_array(out) else ""
            if not self.has_aux and isinstance(out, tuple | list):
                hint = " If it returns (loss, aux), give has_aux=True."
            raise TypeError(
                f"{self.name}: {fun_name} must return a scalar loss, got {described(out)}.{hint}"
            )


class Wanted(NamedTuple):
    """One differentiated argument: its argument, its value, and what is differentiated in it."""

    argument: Argument
    value: Any
    locations: list[NamedLocation]
    is_state: bool  # whether its gradient has states in place of modules


class Prepared(NamedTuple):
    """A call before it is differentiated.

    Attributes:
      plan: the plan of the call.
      flat: its arguments.
      wanted: the arguments that are differentiated.
      slots: the slots of the arrays that are differentiated.
      partial: those of them with partial sums.
      is_single: whether the gradient is of one argument, not a tuple.
    """

    plan: Plan
    flat: Flat
    wanted: list[Wanted]
    slots: list[int]
    partial: list[int]
    is_single: bool

    def arrays(self) -> list[Any]:
        """The arrays that are differentiated."""
        return [self.flat.leaves[slot] for slot in self.slots]

    def in_form(self, arrays: Sequence[Any]) -> Any:
        """Gradients of these arrays in the form of the arguments."""
        gradients, built = dict(zip(self.slots, arrays, strict=True)), dict[str, Any]()
        if not all(x.is_state for x in self.wanted):
            structure, objects = self.flat.structure, self.flat.objects
            leaves = [gradients.get(s, without_tangent(x)) for s, x in enumerate(self.flat.leaves)]
            # The same static objects, as those compared by identity are part of the treedef.
            statics = {i: objects[i] for i in structure.static_indices()}
            built = _by_name(self.plan, unflatten(structure, leaves, statics).root)
        parts = tuple(
            in_states(self.flat, x, gradients) if x.is_state else built[x.argument.name]
            for x in self.wanted
        )
        return parts[0] if self.is_single else parts


def _by_name(plan: Plan, tree: ArgTree) -> dict[str, Any]:
    """The values of the arguments."""
    values = [*tree[0], *(tree[1][k] for k in sorted(tree[1]))]
    return dict(zip((target.name for target in plan.arguments), values, strict=True))


class ValueAndGrad(Differentiable[P, R]):
    """A function that returns the gradient of another one, perhaps after its value."""

    _transform: _Gradient

    @_compat.api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The value and the gradient; changes are made to the caller's own objects."""
        prepared = self.prepared((*self._bound, *args), kwargs)
        value, arrays = self.of(prepared)
        gradient = prepared.in_form(arrays)
        if self._transform.returns_value:
            return value, gradient
        return (gradient, value[1]) if self._transform.has_aux else gradient

    def prepared(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], sums: PartialSums | None = None
    ) -> Prepared:
        """A call, with what is differentiated in it, and which of that has partial sums."""
        plan, flat = self._found(args, kwargs)
        wanted = self._wanted(plan, self._sorted(args, kwargs), flat)
        slots = [*dict.fromkeys(s for w in wanted for x in w.locations for s in x.location.slots)]
        some = sums.slots(flat.objects, flat.structure.slots, flat.leaves) if sums else ()
        partial = [slot for slot in slots if slot in some]
        return Prepared(plan, flat, wanted, slots, partial, self._transform.is_single)

    def of(self, prepared: Prepared, sums: PartialSums | None = None) -> tuple[Any, list[Any]]:
        """The value and the gradients; ``sums`` takes part of them until they are added."""
        plan, flat, _, slots, partial, _ = prepared
        transform = self._transform
        wrong = [
            f"  {plan.names[slot]}: {described(x)}"
            for slot, x in zip(slots, prepared.arrays(), strict=True)
            if not transform.allow_int and tangent_type(x) is None
        ]
        raise_listed(
            TypeError,
            f"{transform.name}: these cannot be differentiated, which takes floating-point or "
            "complex arrays:",
            wrong,
            "Leave them out with a filter (wrt=nnx.Param), or give allow_int=True, with which "
            "their gradients have dtype float0.",
        )

        def differentiate(function: Function, arrays: list[Any]) -> tuple[Any, Any]:
            def loss(arrays: Sequence[Any], zeros: Sequence[Any]) -> tuple[Any, Any]:
                known = dict(zip(slots, arrays, strict=True))
                pairs = ((known[slot], x) for slot, x in zip(partial, zeros, strict=True))
                with sums.known(pairs) if sums else contextlib.nullcontext():
                    [value], outputs = function(arrays)
                return value, outputs

            options: dict[str, Any] = {
                "holomorphic": transform.holomorphic,
                "allow_int": transform.allow_int,
            }
            derivative = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, **options)
            zeros = [sums.zeros(flat.leaves[slot]) for slot in partial] if sums else []
            (_, outputs), (gradients, new) = derivative(arrays, zeros)
            if sums:
                pairs = zip(partial, new, strict=True)
                total = {slot: sums.add(x, gradients[slots.index(slot)]) for slot, x in pairs}
                gradients = [total.get(s, x) for s, x in zip(slots, gradients, strict=True)]
            return gradients, outputs

        return self.at(plan, flat, slots, differentiate)

    def _wanted(self, plan: Plan, call: Call, flat: Flat) -> list[Wanted]:
        """What is differentiated in a call."""
        name, wrt = self._transform.name, self._transform.wrt
        targets = {target.name: target for target in plan.arguments}
        # As in Flax, without graph updates a gradient has the form of the whole argument.
        default = nnx.Param if self._modes["updates"] else ...
        chosen = {
            self._name_of(which, call): default if filter_ is None else filter_
            for which, filter_ in wrt
        }
        if len(chosen) < len(wrt):
            which = [x for x, _ in wrt]
            raise ValueError(f"{name}: argnums names an argument more than once: {which!r}.")
        if unknown := [repr(x) + suggestion(x, targets) for x in chosen if x not in targets]:
            raise ValueError(
                f"{name}: argnums names unknown arguments: {', '.join(unknown)}. "
                f"The arguments: {', '.join(targets)}."
            )
        predicates = {argument: to_predicate(filter_) for argument, filter_ in chosen.items()}
        locations: dict[str, list[NamedLocation]] = {argument: [] for argument in chosen}
        seen = set[int]()
        for found in locate(flat.structure, plan.arguments):
            predicate, (path, entry, slots) = predicates.get(found.argument.name), found.location
            # As in Flax, what is shared has its gradient only in the first place.
            if predicate is None or entry in seen:
                continue
            # A Variable without arrays, such as one of None, has a gradient without arrays.
            if not slots and pytree_of(flat.structure.entries[entry]) is None:  # type: ignore[index]
                continue
            subject = found.subject(flat.objects, flat.leaves)
            # What is not in a module was named by argnums.
            if not path or any(predicate(each, subject) for each in found.paths):
                locations[found.argument.name].append(found)
                seen.update([] if entry is None else [entry])
        is_empty = not any(x.location.slots for found in locations.values() for x in found)
        if is_empty and self._transform.is_chosen:
            kinds = {type(x).__name__ for x in flat.objects if isinstance(x, nnx.Variable)}
            filters = (getattr(x, "__name__", repr(x)) for x in chosen.values())
            error = ValueError(
                f"{name}: nothing to differentiate in {', '.join(chosen)}: no Variable matches "
                f"{', '.join(dict.fromkeys(filters))}. Give wrt a filter that matches some "
                f"(there are {', '.join(sorted(kinds)) or 'none'}), or argnums other arguments."
            )
            raise see(error, anchor="nothing-to-differentiate")
        values = _by_name(plan, call.tree)
        are_states = (self._modes["updates"] or filter_ is not None for _, filter_ in wrt)
        return [
            Wanted(targets[x], values[x], found, is_state)
            for (x, found), is_state in zip(locations.items(), are_states, strict=True)
        ]

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


def in_states(flat: Flat, wanted: Wanted, values: Mapping[int, Any]) -> Any:
    """Values by slot in the form of an argument, with a state in place of each module."""
    states: dict[Any, dict[Any, Any]] = {part.keys: {} for part in wanted.argument.parts}
    for found in wanted.locations:
        location = found.location
        value: Any = value_at(flat.structure, location, values)  # type: ignore[arg-type]
        if location.entry is not None:
            old = _compat.plain_variable(flat.objects[location.entry])
            variable = _compat.new_variable(type(old), _compat.get_metadata(old))
            _compat.set_value(variable, value)
            value = variable
        states[found.part.keys][location.path] = value
    parts = [state[()] if () in state else nnx.from_flat_state(state) for state in states.values()]
    treedef = jax.tree_util.tree_structure(wanted.value, is_leaf=_compat.is_graph_object)
    return jax.tree_util.tree_unflatten(treedef, parts)


@_compat.api_boundary
def value_and_grad(
    fun: Any = None,
    *,
    argnums: Any = 0,
    wrt: Any = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Makes a function that returns the value of ``fun`` and its gradient.

    Modules, optimizers and Variables may be anywhere in the arguments; changes that ``fun`` makes
    to them, such as to BatchNorm statistics and random streams, are made to the caller's own
    objects. A Variable that several arguments share is one input: its gradient covers all its uses
    and, as in Flax, is only in the first place.

    Args:
      fun: the function. It returns a scalar or, with ``has_aux``, a pair of a scalar and anything
        else.
      argnums: what to differentiate with respect to: the position or the name of an argument, an
        ``nnx.DiffState`` with a position and a filter, or a sequence of these.
      wrt: an NNX filter for the Variables of modules that are differentiated: by default all
        parameters or, without graph updates, everything. Arrays outside of modules, and bare
        Variables, are differentiated in any case.
      has_aux: whether ``fun`` returns auxiliary data besides the scalar.
      holomorphic: whether ``fun`` is promised to be holomorphic, as in ``jax.grad``.
      allow_int: whether integers may be differentiated; their gradients have dtype ``float0``.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      A function that returns ``(value, gradient)``; the value is what ``fun`` returns. The gradient
      has the form of the argument, with an ``nnx.State`` of the differentiated Variables, perhaps
      empty, in place of each module; without graph updates and without a filter it is a new module,
      with gradients in place of the arrays. Optimizers take either. For a sequence of ``argnums``
      it is a tuple.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import value_and_grad
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> @value_and_grad(wrt=nnx.PathContains("bias"))
      ... def loss(model, x):
      ...     return model(x).sum()
      >>> value, gradient = loss(model, jnp.ones((3, 2)))
      >>> gradient["bias"][...]
      Array([3.], dtype=float32)

    The semantics are those of ``jax.value_and_grad`` and ``flax.nnx.value_and_grad``.
    """
    options = {"has_aux": has_aux, "holomorphic": holomorphic, "allow_int": allow_int}
    modes = graph, graph_updates
    return _lifted("value_and_grad", fun, argnums, wrt, modes, returns_value=True, **options)


@_compat.api_boundary
def grad(
    fun: Any = None,
    *,
    argnums: Any = 0,
    wrt: Any = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Makes a function that returns the gradient of ``fun``.

    Args:
      fun: as for :func:`value_and_grad`, like all options.
      argnums: what to differentiate with respect to.
      wrt: an NNX filter for the Variables of modules.
      has_aux: whether ``fun`` returns auxiliary data.
      holomorphic: whether ``fun`` is promised to be holomorphic.
      allow_int: whether integers may be differentiated.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      A function that returns the gradient; with ``has_aux``, the gradient and the auxiliary data.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import grad
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> gradient = grad(lambda model, x: model(x).sum())(model, jnp.ones((3, 2)))
      >>> gradient["kernel"][...].shape
      (2, 1)
    """
    options = {"has_aux": has_aux, "holomorphic": holomorphic, "allow_int": allow_int}
    modes = graph, graph_updates
    return _lifted("grad", fun, argnums, wrt, modes, returns_value=False, **options)


def _lifted(
    name: str,
    fun: Any,
    argnums: Any,
    wrt: Any,
    modes: tuple[bool | None, bool | None],
    **options: Any,
) -> Any:
    to_predicate(... if wrt is None else wrt)  # raises for what is not a filter
    is_single = not isinstance(argnums, Sequence) or isinstance(argnums, str)
    pairs = tuple(
        (x.argnum, x.filter) if isinstance(x, nnx.DiffState) else (x, wrt)
        for x in ([argnums] if is_single else argnums)
    )
    wrong = [x for x, _ in pairs if not isinstance(x, int | str)]
    if wrong or len({x for x, _ in pairs}) < len(pairs):
        raise TypeError(
            f"{name}: argnums must be a position, a name or an nnx.DiffState, or a sequence of "
            f"different ones, got {argnums!r}."
        )
    options |= {"wrt": pairs, "is_single": is_single}
    is_chosen = wrt is not None and wrt is not nnx.Param
    transform = _Gradient(name=name, is_chosen=is_chosen, **options)

    def decorate(fun: Callable[..., Any]) -> Any:
        lifted = lift(ValueAndGrad, fun, transform, Roles(), *modes)
        if lifted._bound and any(isinstance(which, int) for which, _ in pairs):
            raise ValueError(
                f"{name}: positions do not count the object of a bound method. Name what is "
                "differentiated, for example argnums='self', or pass the object as an argument."
            )
        return lifted

    return decorate if fun is None else decorate(fun)
