"""``checkify`` for functions that take and return NNX objects.

A call is flattened into *leaves* (arrays and flags) and a *plan*, which has the *pure function* of
the leaves. The pure function returns all arrays that the user's function returns or has changed.
JAX adds the checks to the pure function.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

from jax.experimental import checkify as jax_checkify

from .. import _compat
from .in_trace import Inner, InnerTransform, call_on_slots
from .lifted import P, R, lift


@_compat.api_boundary
def checkify(
    f: Callable[..., object],
    errors: Collection[object] = jax_checkify.user_checks,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Makes a function that also returns the errors that the checks of ``f`` find.

    Args:
      f: the function. Changes that it makes to its arguments are made to the caller's own
        objects, whether a check fails or not.
      errors: the checks: a set of ``jax.experimental.checkify``, such as ``float_checks``. By
        default, the checks that call ``checkify.check``.
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
    return lift(_Checked, f, _Checkify(errors=frozenset(errors)), graph, graph_updates)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Checkify(InnerTransform):
    """The options of ``checkify``."""

    name: str = "checkify"
    in_name: str = "in_axes"
    errors: frozenset[Any]  # the checks, as JAX takes them


class _Checked(Inner[P, R]):
    """A function that returns a pair: the error that a check found in it, and its result."""

    _transform: _Checkify

    @_compat.api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Calls the function; returns the error of its checks, and its result."""
        plan, flat = self._find_plan((*self._bound, *args), kwargs)
        pure_function = self._program(plan, flat).inline  # a function of all leaves
        add_checks = functools.partial(jax_checkify.checkify, errors=self._transform.errors)

        def execute(*leaves: object) -> tuple[Any, Any]:
            """Calls the pure function with checks; returns its outputs, and the error."""
            error, outputs = call_on_slots(add_checks, pure_function, leaves)
            return outputs, error

        returned, error = self._run_with_result(plan, flat, execute)
        return error, returned
