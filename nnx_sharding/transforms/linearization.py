"""``vjp``, ``jvp`` and ``linearize``: derivatives of functions of NNX objects at one point."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .. import _compat
from ..core.flatten import flatten
from ..core.signature import Roles
from ..core.structure import Container
from .differentiation import (
    Differentiable,
    Differentiation,
    Form,
    as_array,
    slots_by_path,
    tangent_type,
)
from .in_trace import Function
from .lifted import lift

# Of a function of arrays, these, and the form of the primals: the derivative, and what the function
# returns besides its output.
_Differentiate = Callable[[Function, list[Any], Form], tuple[Any, Any]]


class _AtPoint(Differentiable[..., Any]):
    """A function that is differentiated with respect to all that is inexact in its arguments."""

    def along(self, primals: Sequence[Any], differentiate: _Differentiate) -> Any:
        """What the function returned, the derivative, and the forms of the primals and the output.

        The first is a tuple of the output and, if there are, auxiliary data.
        """
        arguments, count = (*self._bound, *primals), len(self._bound)
        call, flat = self._split(arguments, {})
        plan, _ = self._plan(call, flat)
        # The pullback may be called when the caller's objects are gone.
        held = flatten((arguments, {}), graph=self._modes["graph"])
        children: Any = held.structure.root
        treedef = jax.tree_util.tree_structure(tuple(primals), is_leaf=_compat.is_graph_object)
        of_primals = Container(treedef, children.children[count:])
        inputs = Form(held, slots_by_path(held.structure, of_primals))

        def at(function: Function, arrays: list[Any]) -> tuple[Any, Any]:
            def inexact(arrays: Sequence[Any]) -> tuple[list[Any], Any]:
                out, others = function(arrays)
                return [x for x in out if tangent_type(x) is not None], others

            return differentiate(inexact, [*map(as_array, arrays)], inputs)

        out, derivative = self.at(plan, flat, inputs.slots, at)
        out = tuple(out) if self._transform.has_aux else (out,)
        after = flatten(out[0])
        return out, derivative, inputs, Form(after, slots_by_path(after.structure))


def _along(
    name: str,
    fun: Any,
    has_aux: bool,
    modes: tuple[bool | None, bool | None],
    primals: Sequence[Any],
    differentiate: _Differentiate,
) -> Any:
    transform = Differentiation(name=name, has_aux=has_aux)
    lifted: Any = lift(_AtPoint, fun, transform, Roles(), *modes)
    return lifted.along(primals, differentiate)


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

    def differentiate(function: Function, arrays: list[Any], _: Form) -> tuple[Any, Any]:
        return jax.vjp(function, arrays, has_aux=True)[1:]

    modes = graph, graph_updates
    out, pull, inputs, outputs = _along("vjp", fun, has_aux, modes, primals, differentiate)

    def pullback(cotangents: Any) -> Any:
        [arrays] = pull(outputs.arrays("vjp: cotangents", cotangents))
        return inputs.built(arrays)[0][-len(primals) :]

    return out[0], pullback, *out[1:]


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

    def differentiate(function: Function, arrays: list[Any], inputs: Form) -> tuple[Any, Any]:
        directions = inputs.arrays("jvp: tangents", tuple(tangents))
        return jax.jvp(function, (arrays,), (directions,), has_aux=True)[1:]

    modes = graph, graph_updates
    out, derivative, _, outputs = _along("jvp", fun, has_aux, modes, primals, differentiate)
    return out[0], outputs.built(derivative), *out[1:]


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

    def differentiate(function: Function, arrays: list[Any], _: Form) -> tuple[Any, Any]:
        return jax.linearize(function, arrays, has_aux=True)[1:]

    modes = graph, graph_updates
    out, push, inputs, outputs = _along("linearize", fun, has_aux, modes, primals, differentiate)

    def pushforward(*given: Any) -> Any:
        return outputs.built(push(inputs.arrays("linearize: tangents", given)))

    return out[0], pushforward, *out[1:]
