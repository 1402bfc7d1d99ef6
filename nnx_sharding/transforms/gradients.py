"""``grad`` and ``value_and_grad`` for functions that take NNX objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from .. import _compat
from ..core.signature import Roles
from ..specs.filters import to_predicate
from .differentiation import Differentiation, Grad, ValueAndGrad
from .lifted import lift


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

    Raises:
      TypeError: at a call, ``fun`` does not return a scalar, or an integer is differentiated.
      ValueError: at a call, an argument does not exist, or no Variable matches ``wrt``;
        immediately, for a bound method with ``argnums`` by position.

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
) -> Differentiation:
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
    return Differentiation(
        name=name,
        wrt=pairs,
        is_chosen=wrt is not nnx.Param,
        is_single=is_single,
        has_aux=has_aux,
        holomorphic=holomorphic,
        allow_int=allow_int,
    )


def _decorated(
    kind: type[ValueAndGrad[..., Any]],
    fun: Any,
    transform: Differentiation,
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
