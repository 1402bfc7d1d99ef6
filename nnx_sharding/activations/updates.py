"""Updates of an ``nnx.Optimizer`` in a trace, whose transformation of Optax runs with Auto axes.

On Explicit axes, JAX has to type each operation, and refuses many in transformations of Optax, such
as a concatenation of differently sharded arrays. So all axes are Auto within
``GradientTransformation.update``. On Auto axes nothing in the arrays tells their types outside, so
the updates get the types of the parameters, and the new state the types of the old one.

From the core: `AxisTypeChange` is a pair of meshes, ``outer`` (around a call) and ``inner`` (during
it, here with all axes Auto). `retype_all` gives arrays in a trace the axis types of a mesh, with
new specs over its Explicit axes, or with their own. It returns other values unchanged.
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
    """The part of ``optax.GradientTransformation`` that is used here."""

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
    # The call gets a copy, because other threads may use the user's optimizer during the trace.
    copy = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer), tx=_WithAutoAxes(tx))
    out = types.MethodType(call.__func__, copy)(*args, **kwargs)  # type: ignore[attr-defined]
    # The method of a user's subclass may have set attributes, so all of them are copied back.
    vars(optimizer).update(vars(copy), tx=tx)
    return out


class _WithAutoAxes:
    """A transformation of Optax whose ``update`` runs with Auto axes.

    ``_tx`` is the user's transformation, which has all other attributes.
    """

    def __init__(self, tx: GradientTransformation):
        self._tx = tx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tx, name)

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        """Returns the updates and the new state, typed like the parameters and the old state.

        Args:
          params: the parameters, of the structure of ``updates``, if the user's code passes them.
          **extra: arguments of some transformations, such as the loss function of a line search.
        """
        mesh = jax.sharding.get_abstract_mesh()
        all_axes = True
        retyping = AxisTypeChange.of(mesh, all_axes, AxisType.Auto, name="Optimizer.update")
        if retyping is None:  # no axis is Explicit
            return self._tx.update(updates, state, params, **extra)
        outer, inner = retyping  # the mesh around this call, and the same mesh with Auto axes
        like = updates if params is None else params  # the arrays whose types the updates get

        # Gradients may be sharded differently from parameters, but operations take both.
        updates = _typed_like(updates, like, outer)
        leaves, treedef = jax.tree.flatten(((updates, state, params), extra))
        # A function among them, such as the loss, is written for the Explicit axes, so it runs on
        # ``outer`` even when the transformation calls it.
        leaves = [_with_outer_axes(x, like, retyping) if callable(x) else x for x in leaves]
        args, kwargs = jax.tree.unflatten(treedef, retype_all(leaves, inner))
        with jax.sharding.use_abstract_mesh(inner):
            new_updates, new_state = self._tx.update(*args, **kwargs)
        return _typed_like((new_updates, new_state), (like, state), outer)


def _with_outer_axes(
    fun: Callable[..., Any], like: Any, retyping: AxisTypeChange
) -> Callable[..., Any]:
    """Returns a function for a transformation, such as the loss of a line search, on outer axes.

    The transformation calls the function with arrays on Auto axes, and computes with its result on
    Auto axes. But the user wrote the function for the axes outside.

    Args:
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

    An array is replicated if it has another shape, or its tree another structure. Replication is
    right for any array, because a type only says where the array is; it may cost a gather.

    Args:
      tree: a pytree of arrays; other values stay as they are.
      like: the other pytree; None to replicate all arrays.
    """
    leaves, treedef = jax.tree.flatten(tree)
    has_same_structure = jax.tree.structure(like) == treedef  # type: ignore[operator]
    like_leaves = jax.tree.leaves(like) if has_same_structure else [None] * len(leaves)
    specs: list[PartitionSpec | None] = []  # for each leaf; None leaves it as it is
    for x, like_leaf in zip(leaves, like_leaves, strict=True):
        if not isinstance(x, jax.Array):
            specs.append(None)
            continue
        has_same_shape = like_leaf is not None and jnp.shape(x) == jnp.shape(like_leaf)
        spec = type_spec(like_leaf) if has_same_shape else None
        if spec is None:
            specs.append(PartitionSpec())
        else:
            # Only the partitions are kept. Over `unreduced` and `reduced` axes each device has a
            # summand of its own, and the new array has none.
            specs.append(PartitionSpec(*spec.partitions))
    return jax.tree.unflatten(treedef, retype_all(leaves, mesh, specs))
