"""``eval_shape``, ``make_jaxpr`` and ``checkify`` for functions that take NNX objects."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx
from jax.experimental import checkify as jax_checkify

from .. import _compat
from ..core.signature import Roles
from .in_trace import Inner, InnerTransform, is_traced, of_slots
from .jit import Jit
from .lifted import Lifted, P, R, lift


@_compat.api_boundary
def eval_shape(
    fun: Callable[..., Any],
    /,
    *args: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **kwargs: Any,
) -> Any:
    """The shapes and dtypes of what a function returns, without computing it.

    Args:
      fun: the function, such as one that makes a model.
      *args: its arguments, in which ``jax.ShapeDtypeStruct`` may stand for arrays. They are not
        changed.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.
      **kwargs: its keyword arguments.

    Returns:
      What ``fun`` returns, with ``jax.ShapeDtypeStruct`` in place of arrays; modules in it are new,
      abstract ones. In the context of a mesh, Variables have the sharding that their metadata
      (``out_sharding``) names.

    Raises:
      TypeError: arguments are not arrays, or do not fit the signature of ``fun``.

    Example:
      >>> from flax import nnx
      >>> from nnx_sharding import eval_shape
      >>> eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0))).kernel.get_value()
      ShapeDtypeStruct(shape=(2, 3), dtype=float32)

    The semantics are those of ``jax.eval_shape`` and ``flax.nnx.eval_shape``.
    """
    lifted: Any = fun
    if not isinstance(fun, Lifted):  # one knows the layouts and shardings of its results
        transform = Jit(keeps_captures=False)
        lifted = lift(Lifted, fun, transform, Roles(), graph, graph_updates)
    return nnx.as_abstract(lifted.eval_shape(*args, **kwargs), graph=True)


@_compat.api_boundary
def make_jaxpr(
    fun: Any = None,
    *,
    static_argnums: int | Sequence[int] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Makes a function that returns the jaxpr of another one.

    Args:
      fun: the function.
      static_argnums: positions of static arguments.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      A function that takes the arguments of ``fun``, which it does not change, and returns a
      jaxpr. Its inputs are the arrays of the arguments; its outputs those of the result, then those
      that ``fun`` changes.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import make_jaxpr
      >>> make_jaxpr(lambda scale, x: scale * x)(nnx.Param(jnp.float32(2)), jnp.ones(3))
      { lambda ; a:f32[] b:f32[3]. let c:f32[3] = mul a b in (c,) }

    The semantics are those of ``jax.make_jaxpr`` and ``flax.nnx.make_jaxpr``.
    """

    def decorate(fun: Callable[..., Any]) -> Any:
        transform = Jit(keep_unused=True, keeps_captures=False)
        roles = Roles.of(static_argnums)
        lifted = lift(Lifted, fun, transform, roles, graph, graph_updates)

        @functools.wraps(fun)
        def jaxpr_of(*args: Any, **kwargs: Any) -> Any:
            return lifted._jaxpr(args, kwargs)

        return jaxpr_of

    return decorate if fun is None else decorate(fun)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Checkify(InnerTransform):
    """What ``checkify`` decides."""

    name: str = "checkify"
    in_name: str = "in_axes"
    errors: frozenset[Any]


class _Checked(Inner[P, R]):
    """A function that returns the error that a check found in it, before its result."""

    _transform: _Checkify

    @_compat.api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Calls the function; its changes are made to the caller's own objects."""
        plan, flat = self._found((*self._bound, *args), kwargs)
        inline, errors = self._program(plan, flat).inline, list[Any]()

        def execute(*leaves: Any) -> Any:
            slots = [slot for slot, leaf in enumerate(leaves) if is_traced(leaf)]
            function = of_slots(inline, slots, leaves)
            checked = jax_checkify.checkify(function, self._transform.errors)
            error, outputs = checked(*(leaves[slot] for slot in slots))
            errors.append(error)
            return outputs

        out = self._run(plan, flat, execute)
        return errors[0], out


@_compat.api_boundary
def checkify(
    fun: Callable[..., Any],
    errors: frozenset[Any] = jax_checkify.user_checks,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Makes a function that also returns the errors that the checks of ``fun`` find.

    Args:
      fun: the function. Changes that it makes to its arguments are made to the caller's own
        objects, whether a check fails or not.
      errors: the checks: a set of ``jax.experimental.checkify``, such as ``float_checks``. By
        default those that call ``checkify.check``.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      A function that returns ``(error, result)``; ``error.throw()`` raises the first error, if any.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax.experimental.checkify import float_checks
      >>> from nnx_sharding import checkify
      >>> scale = nnx.Param(jnp.zeros(()))
      >>> error, y = checkify(lambda scale, x: x / scale, float_checks)(scale, 1.0)
      >>> error.get()[:16]
      'division by zero'

    The semantics are those of ``jax.experimental.checkify.checkify`` and ``flax.nnx.checkify``.
    """
    return lift(_Checked, fun, _Checkify(errors=errors), Roles(), graph, graph_updates)
