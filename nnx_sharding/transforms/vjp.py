"""``vjp``, ``jvp`` and ``linearize`` for functions that take and return NNX objects.

All three differentiate with respect to every *inexact* array (floating-point or complex) of the
*primals*, the arguments that the user gives. They differ only in the transform of JAX that they
apply. That transform returns functions of lists of arrays. The forms of the primals and of the
output (:class:`~.tangents.TangentForm`) translate the lists from and to the user's pytrees. The
object of a bound method is an argument as well, before the primals, but is not differentiated. A
*slot* is the position of an array among those of all arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from .. import _compat
from ..core.flatten import flatten
from ..core.structure import Container
from .differentiation import Differentiable, Differentiation
from .in_trace import Function
from .lifted import lift
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

    Without primals it is a decorator, whose function takes the primals. Changes that ``f`` makes to
    its arguments are made to the caller's own objects.

    Args:
      f: the function. The object of a bound method is not differentiated.
      *primals: its arguments: modules, Variables, arrays, and pytrees of these.
      has_aux: whether ``f`` returns a pair of its output and auxiliary data.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      ``(output, pullback)``, or ``(output, pullback, aux)``. ``pullback`` takes cotangents in the
      structure of the output, and returns a tuple with the cotangent of each primal. For a module
      it is a new module with cotangents in place of its arrays; for integers they have dtype
      ``float0``. ``pullback`` can be called any number of times.

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
    if f is None or not primals:  # return a decorator, or a function that takes the primals
        given = () if f is None else (f,)
        return functools.partial(
            vjp, *given, has_aux=has_aux, graph=graph, graph_updates=graph_updates
        )

    call = _differentiable("vjp", f, has_aux, graph, graph_updates)
    primal_form = call.primal_form(primals)
    output, aux, pull_arrays, output_form = call.differentiate_at(primals, primal_form, jax.vjp)

    def pullback(cotangents: object) -> Any:
        output_arrays = output_form.tangents_in("vjp: cotangents", cotangents)
        # JAX's function has one argument, the list of the arrays in the primals.
        [primal_arrays] = pull_arrays(output_arrays)
        positional, _keywords = primal_form.build(primal_arrays)
        return positional[-len(primals) :]  # leaves out the objects of a bound method

    return output, pullback, *aux


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

    Without primals and tangents it is a decorator, whose function takes both.

    Args:
      f: the function, as for :func:`vjp`.
      primals: its arguments, a tuple.
      tangents: a tuple with the tangent of each primal: for a module one of the same structure,
        such as ``jax.tree.map(jnp.ones_like, model)``. Tangents of integers are ignored.
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
    # This returns a decorator, or a function that takes primals and tangents. Primals alone are not
    # enough for a call.
    if f is None or primals is None or tangents is None:
        given = () if f is None else (f,)
        return functools.partial(
            jvp, *given, has_aux=has_aux, graph=graph, graph_updates=graph_updates
        )

    call = _differentiable("jvp", f, has_aux, graph, graph_updates)
    primal_form = call.primal_form(primals)
    array_tangents = primal_form.tangents_in("jvp: tangents", tuple(tangents))

    def push(function: Function, arrays: list[object], **options: Any) -> Any:
        return jax.jvp(function, (arrays,), (array_tangents,), **options)

    output, aux, output_tangents, output_form = call.differentiate_at(primals, primal_form, push)
    return output, output_form.build(output_tangents), *aux


@_compat.api_boundary
def linearize(
    fun: Callable[..., object],
    *primals: object,
    has_aux: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Calls a function, and returns its output and its linear approximation at the primals.

    Args:
      fun: the function, as for :func:`vjp`.
      *primals: its arguments.
      has_aux: whether ``fun`` returns a pair of its output and auxiliary data.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      ``(output, pushforward)``, or ``(output, pushforward, aux)``. ``pushforward`` takes a tangent
      for each primal, as :func:`jvp` does, and returns the tangent of the output. It can be called
      any number of times.

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
    call = _differentiable("linearize", fun, has_aux, graph, graph_updates)
    primal_form = call.primal_form(primals)
    output, aux, push, output_form = call.differentiate_at(primals, primal_form, jax.linearize)

    def pushforward(*tangents: object) -> Any:
        return output_form.build(push(primal_form.tangents_in("linearize: tangents", tangents)))

    return output, pushforward, *aux


class _Derivative(NamedTuple):
    """The result of a function, and its derivative at the arguments."""

    output: Any  # the result of the user's function, without auxiliary data
    aux: tuple[Any, ...]  # the auxiliary data: one item or none
    # The pullback or the pushforward, a function of lists of arrays; for `jvp`, the tangents.
    from_jax: Any
    output_form: TangentForm  # the form for tangents of the output


class _AtPoint(Differentiable[..., Any]):
    """A function that is differentiated with respect to all inexact arrays in its arguments.

    The objects of a bound method (``_bound``) are its first arguments. From `LiftedFunction` it has
    `_split`, which sorts arguments by their roles and flattens them, and `_plan`, which returns the
    plan of such a call, and whether it is new.
    """

    def differentiate_at(
        self, primals: Sequence[object], primal_form: TangentForm, transform: Callable[..., Any]
    ) -> _Derivative:
        """Calls the function once, which may change the primals, and differentiates that call.

        Args:
          primals: the arguments of the function, without the objects of a bound method.
          primal_form: the form of the tangents of the primals.
          transform: ``jax.vjp``, or another function of a function of a list of arrays, and of the
            arrays at which to differentiate. It is called with ``has_aux=True``.
        """
        call, flat = self._split((*self._bound, *primals), {})
        plan, _is_new = self._plan(call, flat)

        def derivative_of(function: Function, arrays: list[object]) -> tuple[Any, Any]:
            """Applies the transform to a function at these arrays, for `self.differentiate`."""

            def inexact_function(arrays: Sequence[object]) -> tuple[list[Any], Any]:
                output_arrays, outputs = function(arrays)
                # JAX wants a tangent for each output, so outputs without tangents are left out.
                return [x for x in output_arrays if tangent_type(x) is not None], outputs

            # Python numbers become JAX arrays, as in `tangents_in`, because a primal and its
            # tangent need the same dtype. To JAX, all outputs of the call are auxiliary data,
            # whether or not the user has any.
            jax_arrays = [*map(as_array, arrays)]
            _, from_jax, outputs = transform(inexact_function, jax_arrays, has_aux=True)
            return from_jax, outputs

        returned, from_jax = self.differentiate(plan, flat, primal_form.slots, derivative_of)
        output, *aux = returned if self._transform.has_aux else (returned,)
        # The output holds the user's objects after the call. Its tangents have this form.
        flat_output = flatten(output)
        output_form = TangentForm(flat_output, slots_by_path(flat_output.structure))
        return _Derivative(output, tuple(aux), from_jax, output_form)

    def primal_form(self, primals: Sequence[object]) -> TangentForm:
        """Returns the form for tangents of the primals, without objects of a bound method."""
        # The arguments are flattened once more, because this form has to keep static objects alive:
        # the pullback may be called when the caller has dropped them.
        flat = flatten(((*self._bound, *primals), {}), graph=self._graph)
        # The root of the structure has a child for each module, Variable or array of the arguments,
        # in order. The bound objects come first, so the children after them are the primals'.
        root: Any = flat.structure.root
        # A module or a Variable is one leaf here, because it is one child in the structure.
        treedef = jax.tree_util.tree_structure(tuple(primals), is_leaf=_compat.is_graph_object)
        differentiated = Container(treedef, root.children[len(self._bound) :])
        return TangentForm(flat, slots_by_path(flat.structure, differentiated))


def _differentiable(
    name: str,
    fun: Callable[..., object],
    has_aux: bool,
    graph: bool | None,
    graph_updates: bool | None,
) -> _AtPoint:
    """Wraps the user's function for the transform ``name``, with its options."""
    transform = Differentiation(name=name, has_aux=has_aux, is_reverse=name == "vjp")
    differentiable: _AtPoint = lift(_AtPoint, fun, transform, graph, graph_updates)
    return differentiable
