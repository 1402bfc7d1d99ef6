"""``eval_shape`` and ``make_jaxpr`` for functions that take and return NNX objects.

Both trace like :func:`~nnx_sharding.jit`, but nothing is compiled that could be used again. So with
``keeps_captures=False``, they trace again if what the function captures (globals and closures) has
changed, where a function of `jit` keeps what it captured when it was first traced.

A :class:`~.lifted.Lifted` is what `jit` makes of a function; ``Jit`` is its transform, and ``lift``
makes one of these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from .. import _compat
from ..core.signature import Roles
from .jit import Jit
from .lifted import Lifted, lift


@_compat.api_boundary
def eval_shape(
    f: Callable[..., object],
    /,
    *args: object,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **kwargs: object,
) -> Any:
    """Finds the shapes and dtypes of what a function returns, without computing it.

    Args:
      f: the function, such as one that makes a model.
      *args: its arguments, in which ``jax.ShapeDtypeStruct`` may stand for arrays. They are not
        changed.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.
      **kwargs: its keyword arguments.

    Returns:
      What ``f`` returns, with ``jax.ShapeDtypeStruct`` in place of arrays; modules in it are new,
      abstract ones. In the context of a mesh, Variables have the sharding that their metadata
      (``out_sharding``) names.

    Raises:
      TypeError: arguments are not arrays, or do not fit the signature of ``f``.

    Example:
      >>> from flax import nnx
      >>> from nnx_sharding import eval_shape
      >>> eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0))).kernel.get_value()
      ShapeDtypeStruct(shape=(2, 3), dtype=float32)

    The semantics are those of ``jax.eval_shape`` and ``flax.nnx.eval_shape``.
    """
    lifted: Any = f
    # What `jit` or `shard_map` made is taken as it is, since it knows the shardings of its results.
    # It also has modes of its own, and `graph` and `graph_updates` do not apply, as in the call.
    if not isinstance(f, Lifted):
        transform = Jit(keeps_captures=False)
        lifted = lift(Lifted, f, transform, Roles(), graph, graph_updates)
    # The arrays of the result are abstract already. This gives those of Variables the shardings
    # that their metadata name, in the context of a mesh.
    return nnx.as_abstract(lifted.eval_shape(*args, **kwargs), graph=True)


@_compat.api_boundary
def make_jaxpr(
    f: Callable[..., object] | None = None,
    *,
    static_argnums: int | Sequence[int] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Makes a function that returns the jaxpr of another one.

    Args:
      f: the function.
      static_argnums: positions of static arguments.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      A function that takes the arguments of ``f``, which it does not change, and returns a
      jaxpr. Its inputs are the arrays of the arguments; its outputs those of the result, then those
      that ``f`` changes.

    Raises:
      TypeError: ``f`` cannot be traced; at a call, arguments are not arrays, or do not fit the
        signature of ``f``.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import make_jaxpr
      >>> make_jaxpr(lambda scale, x: scale * x)(nnx.Param(jnp.float32(2)), jnp.ones(3))
      { lambda ; a:f32[] b:f32[3]. let c:f32[3] = mul a b in (c,) }

    The semantics are those of ``jax.make_jaxpr`` and ``flax.nnx.make_jaxpr``.
    """

    def decorate(f: Callable[..., object]) -> Any:
        # With an input for each array of the arguments, including unused ones, as from JAX.
        transform = Jit(keep_unused=True, keeps_captures=False)
        roles = Roles.of(static_argnums)  # which arguments are static
        lifted = lift(Lifted, f, transform, roles, graph, graph_updates)

        # A function, not the method: it has the name and the signature of `f`.
        @functools.wraps(f)
        def jaxpr_of(*args: object, **kwargs: object) -> Any:
            return lifted._jaxpr(args, kwargs)

        return jaxpr_of

    return decorate if f is None else decorate(f)
