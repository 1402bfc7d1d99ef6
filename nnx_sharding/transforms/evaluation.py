"""``eval_shape`` and ``make_jaxpr`` for functions that take and return NNX objects.

Both trace like :func:`~nnx_sharding.jit`, but they compile nothing that later calls could use. So
they have ``keeps_captures=False``, and trace again if something that the function captures (globals
and closures) has changed. A function of `jit` keeps what it captured when it was first traced.

`jit` makes a :class:`~.lifted.Lifted` of a function; ``Jit`` is its transform, and ``lift`` makes a
`Lifted` from both.
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
    """Finds the shapes and dtypes of a function's result, without computing it.

    Args:
      f: the function, such as one that makes a model.
      *args: its arguments, in which ``jax.ShapeDtypeStruct`` may stand for arrays. They are not
        changed.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.
      **kwargs: its keyword arguments.

    Returns:
      The result of ``f``, with ``jax.ShapeDtypeStruct`` in place of arrays. Modules in it are new,
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
    # A function that `jit` or `shard_map` made is taken as it is, because it knows the shardings of
    # its results. It has its own modes, so `graph` and `graph_updates` do not apply, as in a call.
    if not isinstance(f, Lifted):
        transform = Jit(keeps_captures=False)
        lifted = lift(Lifted, f, transform, graph, graph_updates)
    # The arrays of the result are abstract already. In the context of a mesh, `as_abstract` gives
    # the arrays of Variables the shardings that their metadata name.
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
      jaxpr. Its inputs are the arrays of the arguments. Its outputs are the arrays of the result,
      then the arrays that ``f`` changes.

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
        # `keep_unused` gives the jaxpr an input for each array of the arguments, as in JAX.
        transform = Jit(keep_unused=True, keeps_captures=False)
        roles = Roles.of(static_argnums)
        lifted = lift(Lifted, f, transform, graph, graph_updates, roles=roles)

        # This function has the name and the signature of `f`. The method `_jaxpr` does not.
        @functools.wraps(f)
        def jaxpr_of(*args: object, **kwargs: object) -> Any:
            return lifted._jaxpr(args, kwargs)

        return jaxpr_of

    return decorate if f is None else decorate(f)
