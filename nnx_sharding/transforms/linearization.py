"""``vjp``, ``jvp`` and ``linearize``: derivatives of functions of NNX objects at one point."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from ..activations.tracing import inherited
from ..core.call import run
from ..core.call_context import Caller
from ..core.flatten import Flat, flatten
from ..core.naming import name_of
from ..core.pure import Pure
from ..core.resolve import locate
from ..core.signature import Roles
from ..core.structure import Container, Structure
from ..core.unflatten import Built, unflatten
from ..errors import raise_listed
from ..specs.paths import accessor
from .gradients import is_inexact
from .in_trace import Function, InnerTransform, described, form, replaced
from .lifted_function import LiftedFunction, lift


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Linearization(InnerTransform):
    """What ``vjp``, ``jvp`` and ``linearize`` decide."""

    returns_any: ClassVar[bool] = True  # auxiliary data

    in_name: str = "primals"
    has_aux: bool

    def wrapped(self, pure: Pure, caller: Caller, built: Built) -> Function:
        if not self.has_aux:
            return super().wrapped(pure, caller, built)

        def checked(*args: Any) -> Any:
            out = caller.fun(*args)
            if not isinstance(out, tuple | list) or len(out) != 2:
                raise TypeError(
                    f"{self.name}: with has_aux=True {name_of(caller.fun)} must return a pair "
                    f"(output, aux), got {form(out)}."
                )
            return out

        return checked

    def output(self, structure: Structure) -> list[int]:
        """The slots of what is differentiated in what the function returned."""
        child: Any = structure.root
        if self.has_aux:
            first = child.treedef.children()[0]
            parts = child.children[: first.num_leaves]
            is_leaf = jax.tree_util.treedef_is_leaf(first) and first.num_nodes == 1
            child = parts[0] if is_leaf else Container(first, parts)
        return [s for x in structure.walk(child, iter(structure.root_slots)) for s in x.slots]


class _Form:
    """The form of tangents: a pytree of objects like some values, and which arrays have any."""

    def __init__(self, flat: Flat, order: Sequence[int], skipped: int | None = None):
        leaves = flat.leaves
        self._structure, self._order, self._skipped = flat.structure, order, skipped
        self.slots = [slot for slot in order if is_inexact(leaves[slot])]
        self._types = {slot: jax.typeof(leaves[slot]) for slot in self.slots}
        # As in JAX, what has no derivative has zeros of a type of its own.
        self._rest = [
            np.zeros(np.shape(x), jax.dtypes.float0) if _compat.is_array_like(x) else x
            for x in leaves
        ]

    def built(self, arrays: Sequence[Any]) -> Any:
        """New objects with these arrays."""
        root = unflatten(self._structure, replaced(self._rest, self.slots, arrays)).root
        return root if self._skipped is None else root[0][self._skipped :]

    def arrays(self, name: str, given: Any) -> list[Any]:
        """The tangents in such objects."""
        found = flatten(given)
        order = _order(found.structure)
        if len(order) != len(self._order):
            text = f"the structure of {form(given)} has {len(order)} arrays, their values have"
            raise ValueError(f"{name}: {text} {len(self._order)}. Give one for each.")
        arrays = {own: found.leaves[slot] for own, slot in zip(self._order, order, strict=True)}
        paths, what = found.structure.paths(), name.rpartition(" ")[2]
        lines = [
            f"  {accessor(what, paths[slot])}: {described(arrays[own])}, expected "
            f"{self._types[own].str_short()}"
            for own, slot in zip(self._order, order, strict=True)
            if own in self._types and not _fits(arrays[own], self._types[own])
        ]
        raise_listed(
            TypeError, f"{name}: these tangents have other types than their values:", lines
        )
        return [jnp.asarray(arrays[slot], self._types[slot].dtype) for slot in self.slots]


def _order(structure: Structure) -> list[int]:
    """The slots in the order of the paths, each once."""
    locations = structure.walk(structure.root, iter(structure.root_slots))
    return [slot for location in locations for slot in location.slots]


def _fits(x: Any, aval: Any) -> bool:
    if not _compat.is_array_like(x):
        return False
    own = jax.typeof(x)
    is_same = own.dtype == aval.dtype or own.weak_type
    return bool(own.shape == aval.shape and is_same)


class _AtPoint(LiftedFunction[..., Any]):
    """A function that is called and differentiated, with respect to all that is inexact."""

    _transform: _Linearization

    def at(
        self, primals: Sequence[Any], differentiate: Callable[[_Form, Function, list[Any]], Any]
    ) -> tuple[Any, Any, _Form, _Form]:
        """The output and the derivative, and of the primals and the output the form of tangents.

        ``differentiate`` gets the form of the primals, a function of their inexact arrays, and
        these; it returns the derivative, and what the function returns besides its output.
        """
        transform, arguments = self._transform, (*self._bound, *primals)
        call, flat = self._split(arguments, {})
        plan, _ = self._plan(call, flat)
        found = locate(flat.structure, plan.arguments[len(self._bound) :])
        order = [*dict.fromkeys(slot for x in found for slot in x.location.slots)]
        inputs = _Form(flatten((arguments, {})), order, len(self._bound))
        derivatives: list[Any] = []

        def execute(*leaves: Any) -> Any:
            def function(arrays: Sequence[Any]) -> Any:
                every = replaced(leaves, inputs.slots, arrays)
                *groups, outcome = outputs = plan.program.inline(*every)
                results = outcome.arrays(every, groups)
                chosen = (results[slot] for slot in transform.output(outcome.structure))
                return [x for x in chosen if is_inexact(x)], outputs

            derivative, outputs = differentiate(
                inputs, function, [jnp.asarray(leaves[slot]) for slot in inputs.slots]
            )
            derivatives.append(derivative)
            return outputs

        with inherited(flat.objects):
            out = run(plan, flat, execute, self._fun, nested=True)
        after = flatten(out[0] if transform.has_aux else out)
        return out, derivatives[0], inputs, _Form(after, _order(after.structure))


def _at(
    name: str,
    fun: Any,
    has_aux: bool,
    modes: tuple[bool | None, bool | None],
    primals: Sequence[Any],
    differentiate: Callable[[_Form, Function, list[Any]], Any],
) -> Any:
    lifted = lift(_AtPoint, fun, _Linearization(name=name, has_aux=has_aux), Roles(), *modes)
    return lifted.at(primals, differentiate)


@_compat.api_boundary
def vjp(
    fun: Any = None,
    *primals: Any,
    has_aux: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Calls a function, and returns its output and the function that pulls cotangents back.

    Without primals it is a decorator, whose function takes them. Changes that ``fun`` makes to its
    arguments are made to the caller's own objects.

    Args:
      fun: the function. What it is bound to, if it is a method, is not differentiated.
      *primals: its arguments: modules, Variables, arrays, and pytrees of these.
      has_aux: whether ``fun`` returns a pair of its output and auxiliary data.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      ``(output, pullback)``, or ``(output, pullback, aux)``. ``pullback`` takes cotangents in the
      structure of the output, and returns a tuple with those of each primal: for a module a new
      module with the cotangents in place of its arrays, those of integers of dtype ``float0``. It
      can be called any number of times.

    Raises:
      TypeError: cotangents of another shape or dtype than the output; no pair with ``has_aux``.
      ValueError: cotangents of another structure.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import vjp
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> y, pullback = vjp(lambda model, x: model(x), model, jnp.ones((4, 2)))
      >>> of_model, of_x = pullback(jnp.ones_like(y))
      >>> of_model.bias[...], of_x.shape
      (Array([4., 4., 4.], dtype=float32), (4, 2))

    The semantics are those of ``jax.vjp`` and ``flax.nnx.vjp``.
    """
    if fun is None or not primals:
        options: dict[str, Any] = {"graph": graph, "graph_updates": graph_updates}
        return functools.partial(vjp, *([] if fun is None else [fun]), has_aux=has_aux, **options)

    def differentiate(inputs: _Form, function: Function, arrays: list[Any]) -> Any:
        _, pullback, outputs = jax.vjp(function, arrays, has_aux=True)
        return pullback, outputs

    out, pull, inputs, outputs = _at(
        "vjp", fun, has_aux, (graph, graph_updates), primals, differentiate
    )

    def pullback(cotangents: Any) -> Any:
        return inputs.built(pull(outputs.arrays("vjp: cotangents", cotangents))[0])

    return (out[0], pullback, out[1]) if has_aux else (out, pullback)


@_compat.api_boundary
def jvp(
    fun: Any = None,
    primals: Sequence[Any] | None = None,
    tangents: Sequence[Any] | None = None,
    *,
    has_aux: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Calls a function, and pushes tangents of its arguments forward.

    Without primals it is a decorator, whose function takes primals and tangents.

    Args:
      fun: the function, as for :func:`vjp`.
      primals: its arguments, a tuple.
      tangents: a tuple with the tangent of each: for a module one of the same structure, such as
        ``jax.tree.map(jnp.ones_like, model)``. Those of integers are ignored.
      has_aux: whether ``fun`` returns a pair of its output and auxiliary data.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      ``(output, tangent)``, or ``(output, tangent, aux)``.

    Raises:
      TypeError: tangents of another shape or dtype than the primals; no pair with ``has_aux``.
      ValueError: tangents of another structure.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import jvp
      >>> model, x = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), jnp.ones(2)
      >>> tangent = jax.tree.map(jnp.ones_like, model)
      >>> jvp(lambda model, x: model(x), (model, x), (tangent, 0 * x))[1]
      Array([3.], dtype=float32)

    The semantics are those of ``jax.jvp`` and ``flax.nnx.jvp``.
    """
    if fun is None or primals is None or tangents is None:
        options: dict[str, Any] = {"graph": graph, "graph_updates": graph_updates}
        return functools.partial(jvp, *([] if fun is None else [fun]), has_aux=has_aux, **options)
    given = tuple(tangents)

    def differentiate(inputs: _Form, function: Function, arrays: list[Any]) -> Any:
        directions = inputs.arrays("jvp: tangents", given)
        _, derivative, outputs = jax.jvp(function, (arrays,), (directions,), has_aux=True)
        return derivative, outputs

    out, derivative, _, outputs = _at(
        "jvp", fun, has_aux, (graph, graph_updates), primals, differentiate
    )
    tangent = outputs.built(derivative)
    return (out[0], tangent, out[1]) if has_aux else (out, tangent)


@_compat.api_boundary
def linearize(
    fun: Any,
    *primals: Any,
    has_aux: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Calls a function, and returns its output and its linear approximation there.

    Args:
      fun: the function, as for :func:`vjp`.
      *primals: its arguments.
      has_aux: whether ``fun`` returns a pair of its output and auxiliary data.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      ``(output, pushforward)``, or ``(output, pushforward, aux)``. ``pushforward`` takes a tangent
      for each primal, as :func:`jvp` does, and returns that of the output, any number of times.

    Raises:
      TypeError: as for :func:`jvp`.
      ValueError: as for :func:`jvp`.

    Example:
      >>> import jax.numpy as jnp
      >>> from nnx_sharding import linearize
      >>> y, pushforward = linearize(jnp.sin, 0.0)
      >>> pushforward(2.0)
      Array(2., dtype=float32)

    The semantics are those of ``jax.linearize``.
    """

    def differentiate(inputs: _Form, function: Function, arrays: list[Any]) -> Any:
        _, push, outputs = jax.linearize(function, arrays, has_aux=True)
        return push, outputs

    out, push, inputs, outputs = _at(
        "linearize", fun, has_aux, (graph, graph_updates), primals, differentiate
    )

    def pushforward(*tangents: Any) -> Any:
        return outputs.built(push(inputs.arrays("linearize: tangents", tangents)))

    return (out[0], pushforward, out[1]) if has_aux else (out, pushforward)
