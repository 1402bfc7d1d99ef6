"""``vjp``, ``jvp`` and ``linearize`` for functions that take and return NNX objects.

All three differentiate with respect to every inexact array of the *primals*, the arguments that the
user gives, and differ in the function of JAX. The derivative is a function of lists of arrays; the
forms of the primals and of the output (:class:`~.tangents.TangentForm`) translate it into one of
the user's pytrees. What a method is bound to is an argument as well, before the primals, but is not
differentiated. A *slot* is the position of an array among those of all arguments.

From other modules:

    differentiate   of `Differentiable`: calls the function and its derivative at some arrays, and
                    returns what the user's function returns, and the derivative
    TangentForm     ``tangents_in`` takes tangents out of the user's objects, as a list of arrays;
                    ``build`` makes objects that hold a list of tangents
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from .. import _compat
from ..core.flatten import flatten
from ..core.signature import Roles
from ..core.structure import Container
from .differentiation import Differentiable, Differentiation
from .in_trace import Function
from .lifted import Modes, lift
from .tangents import TangentForm, as_array, slots_by_path, tangent_type


@_compat.api_boundary
def vjp(
    f: Callable[..., object] | None = None,
    *primals: object,
    has_aux: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Calls a function, and returns its output and the function that pulls cotangents back.

    Without primals it is a decorator, whose function takes them. Changes that ``f`` makes to its
    arguments are made to the caller's own objects.

    Args:
      f: the function. What it is bound to, if it is a method, is not differentiated.
      *primals: its arguments: modules, Variables, arrays, and pytrees of these.
      has_aux: whether ``f`` returns a pair of its output and auxiliary data.
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
      >>> d_model, d_x = pullback(jnp.ones_like(y))
      >>> d_model.bias[...], d_x.shape
      (Array([4., 4., 4.], dtype=float32), (4, 2))

    The semantics are those of ``jax.vjp`` and ``flax.nnx.vjp``.
    """
    if f is None or not primals:
        options: dict[str, Any] = {"graph": graph, "graph_updates": graph_updates}
        return functools.partial(vjp, *(() if f is None else (f,)), has_aux=has_aux, **options)

    def differentiate(function: Function, arrays: list[object], _: TangentForm) -> tuple[Any, Any]:
        _, pullback, outputs = jax.vjp(function, arrays, has_aux=True)
        return pullback, outputs

    modes = Modes(graph, graph_updates)
    derivative = _differentiate("vjp", f, has_aux, modes, primals, differentiate)

    def pullback(cotangents: object) -> Any:
        output_arrays = derivative.outputs.tangents_in("vjp: cotangents", cotangents)
        [primal_arrays] = derivative.function(output_arrays)
        positional, _ = derivative.primals.build(primal_arrays)  # of (positional, keywords)
        return positional[-len(primals) :]  # without what the function is bound to

    return derivative.output, pullback, *derivative.aux


@_compat.api_boundary
def jvp(
    f: Callable[..., object] | None = None,
    primals: Sequence[object] | None = None,
    tangents: Sequence[object] | None = None,
    *,
    has_aux: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Calls a function, and pushes tangents of its arguments forward.

    Without primals it is a decorator, whose function takes primals and tangents.

    Args:
      f: the function, as for :func:`vjp`.
      primals: its arguments, a tuple.
      tangents: a tuple with the tangent of each: for a module one of the same structure, such as
        ``jax.tree.map(jnp.ones_like, model)``. Those of integers are ignored.
      has_aux: whether ``f`` returns a pair of its output and auxiliary data.
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
    if f is None or primals is None or tangents is None:
        options: dict[str, Any] = {"graph": graph, "graph_updates": graph_updates}
        return functools.partial(jvp, *(() if f is None else (f,)), has_aux=has_aux, **options)

    def differentiate(
        function: Function, arrays: list[object], inputs: TangentForm
    ) -> tuple[Any, Any]:
        # Only here is the form of the primals known.
        directions = inputs.tangents_in("jvp: tangents", tuple(tangents))
        _, output_tangents, outputs = jax.jvp(function, (arrays,), (directions,), has_aux=True)
        return output_tangents, outputs

    modes = Modes(graph, graph_updates)
    derivative = _differentiate("jvp", f, has_aux, modes, primals, differentiate)
    output_tangents = derivative.function  # for `jvp`, a list of arrays
    return derivative.output, derivative.outputs.build(output_tangents), *derivative.aux


@_compat.api_boundary
def linearize(
    fun: Callable[..., object],
    *primals: object,
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

    def differentiate(function: Function, arrays: list[object], _: TangentForm) -> tuple[Any, Any]:
        _, pushforward, outputs = jax.linearize(function, arrays, has_aux=True)
        return pushforward, outputs

    modes = Modes(graph, graph_updates)
    derivative = _differentiate("linearize", fun, has_aux, modes, primals, differentiate)

    def pushforward(*tangents: object) -> Any:
        arrays = derivative.primals.tangents_in("linearize: tangents", tangents)
        return derivative.outputs.build(derivative.function(arrays))

    return derivative.output, pushforward, *derivative.aux


# Differentiates a function of arrays at these, which have the given form. The function returns the
# arrays of the output, and all outputs of the call. Returns the derivative, and the latter.
_Differentiate: TypeAlias = Callable[[Function, list[Any], TangentForm], tuple[Any, Any]]


class _Derivative(NamedTuple):
    """What a function returned, its derivative there, and the forms for its tangents."""

    output: Any  # what the user's function returned, without auxiliary data
    aux: tuple[Any, ...]  # its auxiliary data: one item or none
    function: Any  # the derivative, of lists of arrays; for `jvp` the tangents of the output
    primals: TangentForm  # for tangents of the arguments
    outputs: TangentForm  # for tangents of the output


class _AtPoint(Differentiable[..., Any]):
    """A function that is differentiated with respect to all that is inexact in its arguments."""

    def differentiate_at(
        self, primals: Sequence[object], differentiate: _Differentiate
    ) -> _Derivative:
        """Calls the function once, which may change the primals, and differentiates that call.

        Args:
          primals: its arguments, without what it is bound to.
          differentiate: uses ``jax.vjp``, ``jax.jvp`` or ``jax.linearize``; see
            ``_Differentiate``.
        """
        call, flat = self._split((*self._bound, *primals), {})
        plan, _ = self._plan(call, flat)  # and whether it is new
        primal_form = self._primal_form(primals)

        def derivative_of(function: Function, arrays: list[object]) -> tuple[Any, Any]:
            """Returns the derivative of a function and its outputs, as `self.differentiate` asks.

            JAX's transforms want a derivative of each output, but integers and keys have none. So
            these are left out.
            """

            def inexact_function(arrays: Sequence[object]) -> tuple[list[Any], Any]:
                output_arrays, outputs = function(arrays)
                return [x for x in output_arrays if tangent_type(x) is not None], outputs

            return differentiate(inexact_function, [*map(as_array, arrays)], primal_form)

        returned, derivative = self.differentiate(plan, flat, primal_form.slots, derivative_of)
        output, *aux = returned if self._transform.has_aux else (returned,)
        flat_output = flatten(output)
        output_form = TangentForm(flat_output, slots_by_path(flat_output.structure))
        return _Derivative(output, tuple(aux), derivative, primal_form, output_form)

    def _primal_form(self, primals: Sequence[object]) -> TangentForm:
        """Returns the form for tangents of the arguments, without bound objects."""
        # Flattened once more, so that the form keeps static objects alive: the pullback may be
        # called when the caller has dropped them.
        flat = flatten(((*self._bound, *primals), {}), graph=self._modes["graph"])
        # The children of the root are the leaves of all arguments. Each bound object is one leaf,
        # and they come first; the rest are the leaves of the primals.
        root: Any = flat.structure.root
        treedef = jax.tree_util.tree_structure(tuple(primals), is_leaf=_compat.is_graph_object)
        differentiated = Container(treedef, root.children[len(self._bound) :])
        return TangentForm(flat, slots_by_path(flat.structure, differentiated))


def _differentiate(
    name: str,
    fun: Callable[..., object],
    has_aux: bool,
    modes: Modes,
    primals: Sequence[object],
    differentiate: _Differentiate,
) -> _Derivative:
    """Calls a function at the primals, and differentiates that call.

    Args:
      name: the transform, for messages: ``vjp``, ``jvp`` or ``linearize``.
      fun: the user's function.
      has_aux: whether it returns a pair of its output and auxiliary data.
      modes: the user's options ``graph`` and ``graph_updates``.
      primals: the arguments.
      differentiate: JAX's transform of a function of arrays, with the form of the primals.
    """
    transform = Differentiation(name=name, has_aux=has_aux, is_reverse=name == "vjp")
    lifted: Any = lift(_AtPoint, fun, transform, Roles(), *modes)
    derivative: _Derivative = lifted.differentiate_at(primals, differentiate)
    return derivative
