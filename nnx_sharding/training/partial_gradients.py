"""``partial_gradients``: gradients that several programs add up, reduced once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..core.retyping import mesh_of_types, type_mesh, type_spec
from ..specs.fitting import axes_of_type, only_axes
from ..transforms.partial_sums import with_sums
from .accumulation import partial_sums_of, with_batch


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["gradient", "count"],
    meta_fields=["specs"],
)
@dataclasses.dataclass(frozen=True)
class _PartialGradients:
    """A sum of gradients.

    Attributes:
      gradient: the gradient, in the form of the differentiated arguments.
      count: the number of microbatches.
      specs: for each of its arrays the spec of the parameter, if the first dimension is that of
        partial sums; else None.
    """

    gradient: Any
    count: jax.Array
    specs: tuple[PartitionSpec | None, ...]

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, _PartialGradients):
            return NotImplemented
        one, two = jax.tree.flatten(self), jax.tree.flatten(other)
        if one[1] != two[1] or [*map(jnp.shape, one[0])] != [*map(jnp.shape, two[0])]:
            raise ValueError(
                "partial_gradients: these partial gradients cannot be added: they are of different "
                "parameters, or the rows of their microbatches are sharded differently."
            )
        return jax.tree.map(lambda x, y: x if _is_empty(x) else x + y, self, other)


@_compat.api_boundary
def partial_gradients(
    loss: Any = None,
    *,
    argnums: Any = 0,
    wrt: Any = None,
    has_aux: bool = False,
    batch: str | Sequence[str] | None = None,
    axis: Any = None,
    dtype: Any = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Makes a function that returns the value of a loss and its gradient, not yet reduced.

    It is for training loops that call one compiled program for each microbatch. The partial
    gradients leave :func:`~nnx_sharding.jit`, are added with ``+``, in the same program or in
    another one, and are reduced once, by :func:`reduce_gradients` in the program of the update. Use
    :func:`accumulate_gradients` where all microbatches are in one program.

    The gradients that are not reduced are those of layers that compute each row independently, such
    as ``nnx.Linear``. All others are reduced in each call, and added as they are. Layers gather
    parameters that are sharded over the axes of the rows, as by ``fsdp``, and each device holds
    partial sums of whole gradients.

    Args:
      loss: the function, as for :func:`~nnx_sharding.value_and_grad`: the mean over its rows.
      argnums: as for ``value_and_grad``.
      wrt: as for ``value_and_grad``.
      has_aux: as for ``value_and_grad``.
      batch: the names of the arguments with the rows of the microbatch in the first dimension of
        their arrays. By default, all that hold arrays but no modules or Variables and are not
        differentiated; scalars are not part of it.
      axis: on Auto mesh axes, the axis that shards the rows, or a tuple of them. Parameters are
        replicated over it, and over all Explicit axes, in the loss.
      dtype: the dtype in which gradients are summed and returned; None for their own.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      A function that returns ``(value, partial)``. The value is that of ``value_and_grad``;
      ``partial`` is a pytree of the partial gradients. An array that is not reduced has a leading
      dimension for the devices of the axes of the rows, sharded over these axes, so that each
      device holds one array of the shape of the parameter.

    Raises:
      ValueError: when called, if the axes of the mesh are Auto and ``axis`` is not given.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import value_and_grad
      >>> from nnx_sharding.training import partial_gradients, reduce_gradients
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> def loss(model, x):
      ...     return (model(x) ** 2).mean()
      >>> x = jnp.arange(16.0).reshape(8, 2)
      >>> _, one = partial_gradients(loss)(model, x[:4])
      >>> _, other = partial_gradients(loss)(model, x[4:])
      >>> gradient = reduce_gradients(one + other)
      >>> _, expected = value_and_grad(loss)(model, x)
      >>> bool(jnp.allclose(gradient["kernel"][...], expected["kernel"][...]))
      True
    """

    def differentiate(gradient: Any, given: Any, rest: Any, microbatch: Any) -> Any:
        given.arguments.update(rest | microbatch)
        sums = partial_sums_of(microbatch, gathers=True)
        if sums is None:
            _check_axis(microbatch)
        prepared = gradient.prepared(given.args, given.kwargs, sums)
        value, arrays = with_sums(sums, gradient.of, prepared, sums)
        specs = [  # None would be no leaf
            type_spec(x) if slot in prepared.partial else False
            for slot, x in zip(prepared.slots, prepared.arrays(), strict=True)
        ]
        arrays = [
            x if spec is False else jnp.moveaxis(x, -1, 0)
            for x, spec in zip(arrays, specs, strict=True)
        ]
        arrays = [x if _is_empty(x) else x.astype(dtype or x.dtype) for x in arrays]
        leaves = jax.tree.leaves(prepared.in_form(specs))
        found = tuple(x if isinstance(x, PartitionSpec) else None for x in leaves)
        return value, _PartialGradients(prepared.in_form(arrays), jnp.ones(()), found)

    options = {
        "argnums": argnums,
        "wrt": wrt,
        "has_aux": has_aux,
        "graph": graph,
        "graph_updates": graph_updates,
    }
    return with_batch("partial_gradients", loss, options, batch, axis, differentiate)


@_compat.api_boundary
def reduce_gradients(partial: Any) -> Any:
    """Reduces partial gradients over the devices.

    Call it in the :func:`~nnx_sharding.jit` of the update, so that the compiler can combine the
    reductions, and scatter what they return if the update needs only shards of it.

    Args:
      partial: what the function of :func:`partial_gradients` returns besides the value, or a sum
        of several.

    Returns:
      The mean of the gradients of the microbatches, in the form of the gradient that
      :func:`~nnx_sharding.value_and_grad` returns, on Explicit axes sharded like the parameters.

    Raises:
      TypeError: if ``partial`` is something else.

    Example:
      >>> import jax.numpy as jnp
      >>> from nnx_sharding.training import partial_gradients, reduce_gradients
      >>> square = partial_gradients(lambda x, y: (x * y**2).mean())
      >>> _, one = square(1.0, jnp.arange(2.0))
      >>> _, other = square(1.0, jnp.arange(2.0, 4.0))
      >>> float(reduce_gradients(one + other))
      3.5
    """
    if not isinstance(partial, _PartialGradients):
        raise TypeError(
            "reduce_gradients takes the partial gradients that a function of partial_gradients "
            f"returns after the value, or a sum of them; got {type(partial).__name__}."
        )
    specs = iter(partial.specs)

    def reduced(x: Any) -> Any:
        spec = next(specs)
        return x if _is_empty(x) else _reduced(x, spec) / partial.count.astype(x.dtype)

    return jax.tree.map(reduced, partial.gradient)


def _reduced(x: Any, spec: PartitionSpec | None) -> Any:
    """The sum of partial sums, sharded like the parameter on Explicit axes."""
    if spec is None:
        return x
    total, mesh = x.sum(0), type_mesh(x)
    if type_spec(total) is None:
        return total
    goal = only_axes(spec, axes_of_type(mesh, AxisType.Explicit))
    return jax.sharding.reshard(total, NamedSharding(mesh, goal))


def _is_empty(x: Any) -> bool:
    """Whether an array is what a gradient has in place of arrays that are not differentiated."""
    return jnp.result_type(x) == jax.dtypes.float0


def _check_axis(microbatch: Any) -> None:
    mesh = mesh_of_types(jax.tree.leaves(microbatch))
    axes = () if mesh is None else axes_of_type(mesh, AxisType.Auto)
    if auto := sorted(axis for axis in axes if mesh.shape[axis] > 1):
        raise ValueError(
            f"partial_gradients: the mesh has the Auto axes {', '.join(map(repr, auto))}, on which "
            "JAX does not say how the rows of the microbatch are sharded. Name the axis that "
            "shards them: partial_gradients(loss, axis=...)."
        )
