"""``grad`` and ``value_and_grad`` for functions that take NNX objects."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding

from .. import _compat
from ..activations.tracing import inherited
from ..core.axis_types import type_spec, with_reduced
from ..core.call import run
from ..core.caller import Caller
from ..core.flatten import Flat
from ..core.naming import name_of
from ..core.outcome import Outcome
from ..core.plan import Plan
from ..core.resolve import NamedLocation, locate
from ..core.signature import Call, Roles
from ..core.specs import Part, Target
from ..core.transform import Program
from ..core.unflatten import Built, pytree_of, value_at
from ..filters import to_predicate
from ..fitting import axes_of_type, spec_axes, suggestion
from ..lifted_function import LiftedFunction, P, R, lift
from .inner import InnerTransform


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gradient(InnerTransform):
    """What ``grad`` decides: what it differentiates, and how.

    Attributes:
      wrt: for each differentiated argument its position or name, and the filter for its Variables.
      is_single: whether the gradient is that of one argument, not a tuple.
    """

    returns_any: ClassVar[bool] = True  # auxiliary data

    in_name: str = "argnums"
    wrt: tuple[tuple[int | str, Any], ...]
    is_single: bool
    has_aux: bool
    holomorphic: bool
    allow_int: bool

    @contextlib.contextmanager
    def tracing(
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
                f"{self.name}: with has_aux=True {fun_name} returns a pair (loss, aux), "
                f"got {_described(out)}."
            )
        loss = out[0] if self.has_aux else out
        if not _is_array(loss) or jnp.shape(loss) != ():
            hint = "" if self.has_aux else " If it returns (loss, aux), give has_aux=True."
            raise TypeError(
                f"{self.name}: {fun_name} returns a scalar loss, got {_described(loss)}.{hint}"
            )

    def compile(
        self,
        pure: Any,
        function: Callable[..., Any],
        in_specs: Sequence[Any],
        out_specs: Sequence[Any],
        donated: tuple[int, ...],
    ) -> Program:
        return self.program(function)


def _is_array(x: Any) -> bool:
    return _compat.is_array_like(x) and not _compat.is_graph_object(x)


def _described(value: Any) -> str:
    kind = type(value).__name__
    return jax.typeof(value).str_short() if _is_array(value) else f"a {kind}"


class _Wanted(NamedTuple):
    """One differentiated argument: its target, its value, and what is differentiated in it."""

    target: Target
    value: Any
    locations: list[NamedLocation]


class ValueAndGrad(LiftedFunction[P, R]):
    """A function that returns the value of another one and its gradient."""

    _transform: _Gradient

    @_compat.api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The value and the gradient; objects that the function changes are the caller's own."""
        return self.of(args, kwargs)

    def of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], unreduced: frozenset[Any] = frozenset()
    ) -> Any:
        """The value and the gradient.

        Args:
          args: positional arguments.
          kwargs: keyword arguments.
          unreduced: Explicit mesh axes over which the gradients of arrays that are replicated over
            them are left unreduced.
        """
        flat, plan, wanted, slots = self._prepared(args, kwargs)
        transform = self._transform
        if not transform.allow_int:
            _check_dtypes(transform.name, plan.names, flat.leaves, slots)
        value_and_grad = jax.value_and_grad(
            _loss_of(plan, slots),
            has_aux=True,
            holomorphic=transform.holomorphic,
            allow_int=transform.allow_int,
        )
        gradients: dict[int, Any] = {}

        def execute(*leaves: Any) -> Any:
            some = [as_reduced(leaves[slot], unreduced) for slot in slots]
            (_, outputs), arrays = value_and_grad(some, leaves)
            gradients.update(zip(slots, arrays, strict=True))
            return outputs

        with inherited(flat.objects):
            value = run(plan, flat, execute, self._fun, nested=True)
        return value, self._in_form(wanted, flat, gradients)

    def zeros(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], zero: Callable[[Any], Any]
    ) -> Any:
        """What has the form of the gradient: for each array the result of ``zero``."""
        flat, _, wanted, slots = self._prepared(args, kwargs)
        return self._in_form(wanted, flat, {slot: zero(flat.leaves[slot]) for slot in slots})

    def names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
        """The names of the arguments that are differentiated."""
        return {one.target.name for one in self._prepared(args, kwargs)[2]}

    def _prepared(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Flat, Plan, list[_Wanted], list[int]]:
        """The arguments of a call, flattened, its plan, what is differentiated, and its slots."""
        call, flat = self._split((*self._bound, *args), kwargs)
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
          ValueError: an argument does not exist, or no Variable in it matches its filter.
        """
        name = self._transform.name
        targets = {target.name: target for target in plan.targets}
        chosen = {self._name_of(which, call): filter_ for which, filter_ in self._transform.wrt}
        if len(chosen) < len(self._transform.wrt):
            which = [x for x, _ in self._transform.wrt]
            raise ValueError(f"{name}: argnums names an argument more than once: {which!r}.")
        if unknown := [repr(x) + suggestion(x, targets) for x in chosen if x not in targets]:
            raise ValueError(
                f"{name}: argnums names what is not an argument of this call: "
                f"{', '.join(unknown)}. The arguments: {', '.join(targets)}."
            )
        predicates = {argument: to_predicate(filter_) for argument, filter_ in chosen.items()}
        locations: dict[str, list[NamedLocation]] = {argument: [] for argument in chosen}
        differentiable, seen = set[str](), set[int]()
        for found in locate(flat.structure, plan.targets):
            argument, (_, entry, slots) = found.target.name, found.location
            predicate = predicates.get(argument)
            # A Variable without arrays, such as one of None, has a gradient without arrays.
            if predicate is None or not (slots or pytree_of(flat.structure.entries[entry])):  # type: ignore[index]
                continue
            subject = found.subject(flat.objects, flat.leaves)
            # What is not in a module was named itself.
            if not found.location.path or any(predicate(path, subject) for path in found.paths):
                differentiable.update([argument] if slots else [])
                # As in Flax, what is shared has its gradient in the first place only.
                if entry is None or entry not in seen:
                    locations[argument].append(found)
                    seen.update([] if entry is None else [entry])
        if empty := [f"{x} (filter {chosen[x]!r})" for x in chosen if x not in differentiable]:
            raise ValueError(
                f"{name}: nothing to differentiate in {', '.join(empty)}. Give argnums the "
                "position or name of another argument, or wrt a filter that matches its Variables."
            )
        values = _values_by_name(call)
        return [_Wanted(targets[x], values[x], found) for x, found in locations.items()]

    def _name_of(self, which: int | str, call: Call) -> str:
        if isinstance(which, str):
            return which
        names = call.signature.names
        position = which + self._implicit if which >= 0 else which + len(names)
        if not 0 <= position < len(names):  # perhaps passed by keyword
            names = self._parameters.positional
        return names[position] if 0 <= position < len(names) else f"position {which}"


class Grad(ValueAndGrad[P, R]):
    """A function that returns the gradient of another one."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The gradient, with ``has_aux`` also the auxiliary data."""
        value, gradient = super().__call__(*args, **kwargs)
        return (gradient, value[1]) if self._transform.has_aux else gradient


def as_reduced(x: Any, axes: frozenset[Any]) -> Any:
    """An array of reduced type over those axes that are Explicit and over which it is replicated.

    Its gradient is then unreduced over them.
    """
    spec = type_spec(x)
    if spec is None:
        return x
    mesh = jax.typeof(x).sharding.mesh
    free = axes & axes_of_type(mesh, AxisType.Explicit) - {*spec_axes(spec)}
    if not free:
        return x
    new = with_reduced(spec, spec.reduced | free)
    return jax.sharding.reshard(x, NamedSharding(mesh, new))


def _values_by_name(call: Call) -> dict[str, Any]:
    names = [call.signature.names[i] for i in call.signature.dynamic]
    return {**dict(zip(names, call.tree[0], strict=True)), **call.tree[1]}


def _check_dtypes(
    name: str, names: Sequence[str], leaves: Sequence[Any], slots: Sequence[int]
) -> None:
    wrong = [
        f"  {names[slot]}: {_described(leaves[slot])}"
        for slot in slots
        if not _compat.is_array_like(leaves[slot])
        or not jnp.issubdtype(jax.typeof(leaves[slot]).dtype, jnp.inexact)
    ]
    if wrong:
        raise TypeError(
            f"{name}: these cannot be differentiated, which takes floating-point or complex "
            "arrays:\n" + "\n".join(wrong) + "\nLeave them out with a filter (wrt=...), or give "
            "allow_int=True, with which their gradients have dtype float0."
        )


def _loss_of(plan: Plan, slots: Sequence[int]) -> Callable[..., Any]:
    """The function that JAX differentiates: of the arrays in some slots, and of all."""

    def loss_of(some: Sequence[Any], leaves: Sequence[Any]) -> Any:
        every = [*leaves]
        for slot, array in zip(slots, some, strict=True):
            every[slot] = array
        *groups, outcome = outputs = plan.program.inline(*every)
        return _loss(outcome, every, groups), outputs

    return loss_of


def _loss(outcome: Outcome, leaves: Sequence[Any], groups: Sequence[Any]) -> Any:
    """The first array that the function returned."""
    return outcome.arrays(leaves, groups)[outcome.structure.root_slots[0]]


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
    to them, such as those of BatchNorm and of random streams, are made to the caller's own objects.
    A Variable that several arguments share is one input: its gradient is that of all its uses, and
    as in Flax it is in the first place only.

    Args:
      fun: the function. It returns a scalar, with ``has_aux`` a pair of it and anything else.
      argnums: what to differentiate with respect to: the position or the name of an argument, an
        ``nnx.DiffState`` with a position and a filter, or a sequence of these.
      wrt: an NNX filter: the Variables of the modules in these arguments that are differentiated.
        Arrays outside of modules, and bare Variables, are differentiated in any case.
      has_aux: whether ``fun`` returns auxiliary data besides the scalar.
      holomorphic: whether ``fun`` is promised to be holomorphic, as in ``jax.grad``.
      allow_int: whether integers may be differentiated; their gradients have dtype ``float0``.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      A function that returns ``(value, gradient)``; the value is what ``fun`` returns. The gradient
      has the form of the argument, with an ``nnx.State`` of the differentiated Variables in the
      place of each module, as optimizers take it; for a sequence of ``argnums`` it is a tuple.

    Raises:
      TypeError: at a call, ``fun`` does not return a scalar, or an integer is differentiated.
      ValueError: at a call, an argument does not exist, or nothing in it is to be differentiated;
        at once, for a bound method with ``argnums`` by position.

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
    options = (has_aux, holomorphic, allow_int)
    transform = _transform("value_and_grad", argnums, wrt, *options)
    return _decorated(ValueAndGrad, fun, transform, graph, graph_updates)


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

    Raises:
      TypeError: as :func:`value_and_grad`.
      ValueError: as :func:`value_and_grad`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import grad
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> gradient = grad(lambda model, x: model(x).sum())(model, jnp.ones((3, 2)))
      >>> gradient["kernel"][...].shape
      (2, 1)
    """
    transform = _transform("grad", argnums, wrt, has_aux, holomorphic, allow_int)
    return _decorated(Grad, fun, transform, graph, graph_updates)


def _transform(
    name: str, argnums: Any, wrt: Any, has_aux: bool, holomorphic: bool, allow_int: bool
) -> _Gradient:
    to_predicate(wrt)  # refuses what is not a filter
    is_single = not isinstance(argnums, Sequence) or isinstance(argnums, str)
    pairs = tuple(
        (x.argnum, x.filter) if isinstance(x, nnx.DiffState) else (x, wrt)
        for x in ([argnums] if is_single else argnums)
    )
    wrong = [x for x, _ in pairs if not isinstance(x, int | str)]
    if wrong or len({x for x, _ in pairs}) < len(pairs):
        raise TypeError(
            f"{name}: argnums is a position, a name or an nnx.DiffState, or a sequence of "
            f"different ones, got {argnums!r}."
        )
    return _Gradient(
        name=name,
        wrt=pairs,
        is_single=is_single,
        has_aux=has_aux,
        holomorphic=holomorphic,
        allow_int=allow_int,
    )


def _decorated(
    kind: type[ValueAndGrad[..., Any]],
    fun: Any,
    transform: _Gradient,
    graph: bool | None,
    graph_updates: bool | None,
) -> Any:
    def decorate(fun: Callable[..., Any]) -> Any:
        lifted = lift(kind, fun, transform, Roles(), graph, graph_updates)
        if lifted._bound and any(isinstance(which, int) for which, _ in transform.wrt):
            raise ValueError(
                f"{transform.name}: positions do not count the object of a bound method. Name what "
                "is differentiated, for example argnums='self', or pass the object as an argument."
            )
        return lifted

    return decorate if fun is None else decorate(fun)
