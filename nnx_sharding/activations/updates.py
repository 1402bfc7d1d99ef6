"""Updates of an ``nnx.Optimizer`` in a trace, whose transformation of Optax runs with Auto axes.

On Explicit axes, JAX has to type each operation, and refuses many in transformations of Optax, such
as a concatenation of differently sharded arrays. So all axes are Auto within
``GradientTransformation.update``. The updates leave it with the types of the parameters, and the
new state with those of the old one, which nothing in the arrays says on Auto axes.

From the core: `AxisTypeChange` is a pair of meshes, ``outer`` (around a call) and ``inner`` (during
it, here with all axes Auto). `retype_all` gives arrays in a trace the axis types of a mesh, with
specs over its Explicit axes, or those that they have; other values it returns unchanged.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from ..core.constrain import retype_all, type_spec
from ..core.retyping import AxisTypeChange


class GradientTransformation(Protocol):
    """What is used here of ``optax.GradientTransformation``."""

    update: Callable[..., tuple[Any, Any]]


def update(
    optimizer: nnx.Optimizer[Any],
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Calls ``update`` of an ``nnx.Optimizer``, whose transformation runs with Auto axes.

    Args:
      optimizer: the optimizer.
      call: its bound method ``update``.
      args: the positional arguments of the call.
      kwargs: its keyword arguments.
    """
    tx = optimizer.tx
    # A copy, because other threads may use the user's optimizer while it is traced.
    copy = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer), tx=_WithAutoAxes(tx))
    out = types.MethodType(call.__func__, copy)(*args, **kwargs)  # type: ignore[attr-defined]
    # The method of a user's subclass may have set attributes.
    vars(optimizer).update(vars(copy), tx=tx)
    return out


class _WithAutoAxes:
    """A transformation of Optax with another ``update``."""

    def __init__(self, tx: GradientTransformation):
        self._tx = tx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tx, name)

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        """Returns the updates and the new state, typed like the parameters and the old state.

        Args:
          updates: the gradients, a pytree of arrays.
          state: the state of the transformation.
          params: the parameters, of the structure of ``updates``, if the user's code passes them.
          **extra: what some transformations need, such as the loss function of a line search.
        """
        mesh = jax.sharding.get_abstract_mesh()
        all_axes = True
        retyping = AxisTypeChange.of(mesh, all_axes, AxisType.Auto, name="Optimizer.update")
        if retyping is None:  # no axis is Explicit
            return self._tx.update(updates, state, params, **extra)
        outer, inner = retyping
        like = updates if params is None else params

        # Gradients may be sharded otherwise than parameters; all have to meet as these are.
        updates = _typed_like(updates, like, outer)
        leaves, treedef = jax.tree.flatten(((updates, state, params), extra))
        # Functions among them, such as the loss, are written for the Explicit axes.
        leaves = [_with_outer_axes(x, like, retyping) if callable(x) else x for x in leaves]
        args, kwargs = jax.tree.unflatten(treedef, retype_all(leaves, inner))
        with jax.sharding.use_abstract_mesh(inner):
            new_updates, new_state = self._tx.update(*args, **kwargs)
        return _typed_like((new_updates, new_state), (like, state), outer)


def _with_outer_axes(
    fun: Callable[..., Any], like: Any, retyping: AxisTypeChange
) -> Callable[..., Any]:
    """Returns a function for a transformation, as the loss of a line search, on the outer axes.

    The transformation, on Auto axes, calls it with arrays of those, and computes with what it
    returns. The user wrote it for the axes outside.

    Args:
      fun: the user's function.
      like: the parameters. An argument of their structure gets their types; other arrays are
        replicated.
      retyping: the mesh outside of the transformation, and the mesh in it.
    """
    outer, inner = retyping

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_typed_like(arg, like, outer) for arg in args)
        kwargs = _typed_like(kwargs, None, outer)
        with jax.sharding.use_abstract_mesh(outer):
            out = fun(*args, **kwargs)
        leaves, treedef = jax.tree.flatten(out)
        return jax.tree.unflatten(treedef, retype_all(leaves, inner))  # to Auto axes again

    return call


def _typed_like(tree: Any, like: Any, mesh: AbstractMesh) -> Any:
    """Gives the arrays of a pytree the types of the arrays in another pytree of the same structure.

    Arrays are replicated if they have another shape, or their tree another structure. That is
    right for any array, since a type only says where it is; it may cost a gather.

    Args:
      tree: a pytree of arrays; other values stay as they are.
      like: the other pytree; None to replicate all arrays.
      mesh: the mesh of the new types.
    """
    leaves, treedef = jax.tree.flatten(tree)
    is_same = jax.tree.structure(like) == treedef  # type: ignore[operator]
    others = jax.tree.leaves(like) if is_same else [None] * len(leaves)
    specs: list[PartitionSpec | None] = []  # for each leaf; None leaves it as it is
    for x, other in zip(leaves, others, strict=True):
        if not isinstance(x, jax.Array):
            specs.append(None)
            continue
        is_like = other is not None and jnp.shape(x) == jnp.shape(other)
        spec = (type_spec(other) if is_like else None) or PartitionSpec()
        # Without `unreduced` and `reduced` axes, over which each device has a summand of its own.
        specs.append(PartitionSpec(*spec.partitions))
    return jax.tree.unflatten(treedef, retype_all(leaves, mesh, specs))
