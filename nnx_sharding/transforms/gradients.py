"""``grad`` and ``value_and_grad`` for functions that take NNX objects."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
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
from ..core.signature import Call, Roles
from ..core.targets import Target
from ..core.unflatten import Built, pytree_of, value_at
from ..errors import raise_listed, see
from ..specs.filters import to_predicate
from ..specs.fitting import suggestion
from .in_trace import Function, InnerTransform, described, is_array, replaced
from .lifted_function import LiftedFunction, P, R, lift
from .partial_sums import PartialSums


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Differentiation(InnerTransform):
    """What ``grad`` decides: what it differentiates, and how.

    Attributes:
      wrt: for each differentiated argument its position or name, and the filter for its Variables.
      is_chosen: whether the user chose a filter, so that something has to match it.
      is_single: whether the gradient is of one argument, not a tuple.
      returns_value: whether calls return the value, too.
    """

    returns_any: ClassVar[bool] = True  # auxiliary data

    in_name: str = "argnums"
    wrt: tuple[tuple[int | str, Any], ...]
    is_chosen: bool
    is_single: bool
    returns_value: bool
    has_aux: bool
    holomorphic: bool
    allow_int: bool

    def wrapped(self, pure: Any, caller: Caller, built: Built) -> Function:
        def checked(*args: Any, **kwargs: Any) -> Any:
            out = caller.fun(*args, **kwargs)
            self._check_output(name_of(caller.fun), out)
            return out

        return checked

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


class _Prepared(NamedTuple):
    """A call before it is differentiated: with the slots of what is, and has partial sums."""

    flat: Flat
    plan: Plan
    wanted: list[_Wanted]
    slots: list[int]
    partial: list[int]


class ValueAndGrad(LiftedFunction[P, R]):
    """A function that returns the gradient of another one, perhaps after its value."""

    _transform: _Differentiation

    @_compat.api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The value and the gradient; changes are made to the caller's own objects."""
        value, gradient = self.of((*self._bound, *args), kwargs)
        if self._transform.returns_value:
            return value, gradient
        return (gradient, value[1]) if self._transform.has_aux else gradient

    def of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], sums: PartialSums | None = None
    ) -> Any:
        """The value and the gradient; ``sums`` takes part of the gradients until they are added."""
        flat, plan, wanted, slots, partial = self._prepared(args, kwargs, sums)
        transform = self._transform
        wrong = [
            f"  {plan.names[slot]}: {described(flat.leaves[slot])}"
            for slot in (() if transform.allow_int else slots)
            if not is_inexact(flat.leaves[slot])
        ]
        raise_listed(
            TypeError,
            f"{transform.name}: these cannot be differentiated, which takes floating-point or "
            "complex arrays:",
            wrong,
            "Leave them out with a filter (wrt=...), or give allow_int=True, with which their "
            "gradients have dtype float0.",
        )
        gradients: dict[int, Any] = {}

        def execute(*leaves: Any) -> Any:
            def loss_of(arrays: Sequence[Any], zeros: Sequence[Any]) -> Any:
                every = replaced(leaves, slots, arrays)
                pairs = zip((every[slot] for slot in partial), zeros, strict=True)
                with sums.known(pairs) if sums else contextlib.nullcontext():
                    *groups, outcome = outputs = plan.program.inline(*every)
                # The loss is the first array that the function returned.
                return outcome.arrays(every, groups)[outcome.structure.root_slots[0]], outputs

            (_, outputs), (arrays, new) = jax.value_and_grad(
                loss_of,
                argnums=(0, 1),
                has_aux=True,
                holomorphic=transform.holomorphic,
                allow_int=transform.allow_int,
            )(
                [leaves[slot] for slot in slots],
                [sums.zeros(leaves[slot]) for slot in partial] if sums else [],
            )
            gradients.update(zip(slots, arrays, strict=True))
            if sums:
                for slot, x in zip(partial, new, strict=True):
                    gradients[slot] = sums.with_sum(x, gradients[slot])
            return outputs

        with inherited(flat.objects):
            value = run(plan, flat, execute, self._fun, nested=True)
        return value, self._in_form(wanted, flat, gradients)

    def zeros(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], sums: PartialSums | None, dtype: Any
    ) -> tuple[Any, Any]:
        """What is differentiated, and zeros to add to, both in the form of the gradient."""
        flat, _, wanted, slots, partial = self._prepared(args, kwargs, sums)
        likes = {slot: flat.leaves[slot] for slot in slots}
        zeros = {
            slot: sums.zeros(x, dtype) if sums and slot in partial else jnp.zeros_like(x, dtype)
            for slot, x in likes.items()
        }
        return self._in_form(wanted, flat, likes), self._in_form(wanted, flat, zeros)

    def names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
        """The names of the arguments that are differentiated."""
        return {one.target.name for one in self._prepared(args, kwargs).wanted}

    def _prepared(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], sums: PartialSums | None = None
    ) -> _Prepared:
        plan, flat = self._found(args, kwargs)
        wanted = self._wanted(plan, self._sorted(args, kwargs), flat)
        slots = [*dict.fromkeys(s for w in wanted for x in w.locations for s in x.location.slots)]
        some = sums.slots(flat.objects, flat.structure.slots, flat.leaves) if sums else ()
        return _Prepared(flat, plan, wanted, slots, [slot for slot in slots if slot in some])

    def _in_form(self, wanted: Sequence[_Wanted], flat: Flat, gradients: Mapping[int, Any]) -> Any:
        parts = tuple(_gradient_of(one, flat, gradients) for one in wanted)
        return parts[0] if self._transform.is_single else parts

    def _wanted(self, plan: Plan, call: Call, flat: Flat) -> list[_Wanted]:
        """What is differentiated in a call."""
        name, wrt = self._transform.name, self._transform.wrt
        targets = {target.name: target for target in plan.arguments}
        chosen = {self._name_of(which, call): filter_ for which, filter_ in wrt}
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
            predicate, (path, entry, slots) = predicates.get(found.target.name), found.location
            # As in Flax, what is shared has its gradient only in the first place.
            if predicate is None or entry in seen:
                continue
            # A Variable without arrays, such as one of None, has a gradient without arrays.
            if not slots and pytree_of(flat.structure.entries[entry]) is None:  # type: ignore[index]
                continue
            subject = found.subject(flat.objects, flat.leaves)
            # What is not in a module was named by argnums.
            if not path or any(predicate(each, subject) for each in found.paths):
                locations[found.target.name].append(found)
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


def is_inexact(x: Any) -> bool:
    """Whether something is an array that has a derivative."""
    return _compat.is_array_like(x) and jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)


def _gradient_of(wanted: _Wanted, flat: Flat, gradients: Mapping[int, Any]) -> Any:
    """The gradient of one argument, in its form: for each module a state."""
    states: dict[Any, dict[Any, Any]] = {part.keys: {} for part in wanted.target.parts}
    for found in wanted.locations:
        location = found.location
        gradient = value_at(flat.structure, location, gradients)  # type: ignore[arg-type]
        if location.entry is not None:
            old = flat.objects[location.entry]
            value, gradient = gradient, _compat.new_variable(type(old), _compat.get_metadata(old))
            _compat.set_value(gradient, value)
        states[found.part.keys][location.path] = gradient
    parts = [state[()] if () in state else nnx.from_flat_state(state) for state in states.values()]
    treedef = jax.tree_util.tree_structure(wanted.value, is_leaf=_compat.is_graph_object)
    return jax.tree_util.tree_unflatten(treedef, parts)


@_compat.api_boundary
def value_and_grad(
    fun: Any = None,
    *,
    argnums: Any = 0,
    wrt: Any = nnx.Param,
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
      wrt: an NNX filter for the Variables of modules that are differentiated. Arrays outside of
        modules, and bare Variables, are differentiated in any case.
      has_aux: whether ``fun`` returns auxiliary data besides the scalar.
      holomorphic: whether ``fun`` is promised to be holomorphic, as in ``jax.grad``.
      allow_int: whether integers may be differentiated; their gradients have dtype ``float0``.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      A function that returns ``(value, gradient)``; the value is what ``fun`` returns. The gradient
      has the form of the argument, with an ``nnx.State`` of the differentiated Variables, perhaps
      empty, in place of each module, as optimizers expect; for a sequence of ``argnums`` it is a
      tuple.

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
    wrt: Any = nnx.Param,
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
    to_predicate(wrt)  # raises for what is not a filter
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
    is_chosen = wrt is not nnx.Param
    transform = _Differentiation(
        name=name, wrt=pairs, is_chosen=is_chosen, is_single=is_single, **options
    )

    def decorate(fun: Callable[..., Any]) -> Any:
        lifted = lift(ValueAndGrad, fun, transform, Roles(), *modes)
        if lifted._bound and any(isinstance(which, int) for which, _ in pairs):
            raise ValueError(
                f"{name}: positions do not count the object of a bound method. Name what is "
                "differentiated, for example argnums='self', or pass the object as an argument."
            )
        return lifted

    return decorate if fun is None else decorate(fun)
