"""Attention over a sharded sequence, for which each device gathers all keys and values.

A device keeps its queries, and has all keys and values while it attends. For n = 4::

                keys                                    keys
    queries 0  [ a  .  .  . ]                       0  [ a  a  a  a ]    letters are devices that
    queries 1  [ .  b  .  . ]      all-gather  →    1  [ b  b  b  b ]    have the keys; each row is
    queries 2  [ .  .  c  . ]                       2  [ c  c  c  c ]    the attention of one
    queries 3  [ .  .  .  d ]                       3  [ d  d  d  d ]    device

The number of heads may be any. The method suits models with few key heads, because the gathered
bytes grow with the number of key heads only.

**Bytes.** With K bytes of keys on a device, and as many bytes of values, each device sends
``(n - 1) 2 K`` in the forward pass. In the backward pass, the gradients of keys and values are
summed and scattered in float32, which sends as many numbers once more. (A ring also sends keys and
values again.) A device has ``2 n K`` bytes of keys and values of the layer whose attention is
computed. They are kept from the forward to the backward pass, unless ``remat`` gathers them again.

**Causal balance.** If tokens are in order, the last device attends to n times as many keys as the
first. So queries, and only queries, move to :func:`balanced_order`, and their outputs move back. If
the queries of a device have Q bytes, this sends ``2 Q`` in each pass. Device i then has chunks i
and 2n - 1 - i of 2n::

    chunk       0  1  2  3  4  5  6  7
    device      a  b  c  d  d  c  b  a      i + 1 and 2n - i chunks of keys: 2n + 1 for everyone

From Llama 3 (arXiv:2407.21783), which gathers keys for the same reasons.
"""

from __future__ import annotations

import functools
from typing import Unpack

import jax
from jax.sharding import AxisType

from .. import _compat
from ..specs.fitting import axes_of_type
from .attention_inputs import AttentionOptions, inputs_of
from .blocks import AttentionArrays, wide_dtype
from .layout import Axes, Layout, attend_balanced
from .local_attention import AttentionFunction, LocalAttention, local_attention, takes_positions


@_compat.api_boundary
def all_gather_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: object = None,
    mask: jax.Array | None = None,
    *,
    attention: AttentionFunction | None = None,
    axis: str | Axes = "context",
    **options: Unpack[AttentionOptions],
) -> jax.Array:
    """Attention over a sharded sequence, for which each device gathers all keys and values.

    Args:
      query: queries of shape (batch, length, heads, features).
      key: keys of shape (batch, length of keys, key heads, features).
      value: values of shape (batch, length of keys, key heads, features of values).
      bias: not supported, None.
      mask: booleans that broadcast to (batch, heads, length, length of keys).
      attention: the attention of each device, called with its queries, all keys and all values,
        and with the keywords that :func:`all_to_all_attention` lists. As its queries are not the
        whole sequence, ``is_causal`` is in ``mask``, unless it has parameters ``query_positions``
        and ``key_positions``. None for one that goes block by block.
      axis: the mesh axes that shard the sequence.
      **options: as of :func:`ring_attention`. With ``balanced``, the queries of causal attention
        move, if ``attention`` is told their positions, and so can skip keys.

    Returns:
      The attention outputs, of shape (batch, length, heads, features of values).

    Raises:
      ValueError: shapes do not fit each other or the axis, or the mesh lacks it.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.experimental import all_gather_attention
      >>> mesh = jax.make_mesh((2, 4), ("data", "context"))
      >>> heads = jax.numpy.ones((4, 64, 2, 16))  # (batch, length, heads, features)
      >>> forward = jit(
      ...     lambda q, k, v: all_gather_attention(q, k, v, is_causal=True, balanced=True),
      ...     mesh=mesh, in_shardings=P("data", "context"),
      ... )
      >>> forward(heads, heads, heads).shape
      (4, 64, 2, 16)
    """
    caller, axes = "all_gather_attention", (axis,) if isinstance(axis, str) else axis
    inputs = inputs_of(
        caller,
        (query, key, value),
        bias,
        mask,
        axes,
        is_opaque=attention is not None,
        options=options,
    )
    local = local_attention(caller, attention, inputs, is_whole=inputs.layout.mesh is None)
    arrays, layout = inputs.arrays, inputs.layout
    attend = functools.partial(_attend, layout, local)
    # An attention that cannot be told the positions of queries takes them to be in order, so the
    # queries must not move.
    if not (inputs.moves_tokens and takes_positions(attention)):
        return attend(arrays)
    # All devices have all keys, in any order, so only queries move.
    return attend_balanced(layout, arrays, attend, moves_keys=False)


def _attend(layout: Layout, local: LocalAttention, arrays: AttentionArrays) -> jax.Array:
    """Gathers keys and values, and attends on each device to all of them.

    Args:
      layout: the mesh axes; those of the sequence shard queries, keys and values.
      local: the attention of one device, with its queries and all keys.

    Returns:
      The outputs of all queries, sharded as the queries.
    """
    if layout.mesh is None:  # one device, which has all keys and values
        return local(arrays)
    axes = layout.sequence

    def gather_and_attend(arrays: AttentionArrays) -> jax.Array:
        key, value = _gather(axes, arrays.key), _gather(axes, arrays.value)
        return local(arrays._replace(key=key, value=value))

    # The info of keys (positions, segments and places) is small, so it is on every device for all
    # keys, and `gather_and_attend` does not have to gather it.
    specs = layout.array_specs(arrays, query_axes=axes, key_axes=axes, info_axes=())
    # `layout.map` is `shard_map` over the axes of the layout.
    run = layout.map(gather_and_attend, in_specs=(specs,), out_specs=specs.query)
    out: jax.Array = run(arrays)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(axes: Axes, x: jax.Array) -> jax.Array:
    """Gathers keys or values: (b, keys / n, key heads, d) → (b, keys, key heads, d)."""
    whole: jax.Array = jax.lax.all_gather(x, axes, axis=1, tiled=True)
    return whole


def _scatter(axes: Axes, _: None, d_whole: jax.Array) -> tuple[jax.Array]:
    """The backward rule of :func:`_gather`: each device gets the summed gradients of its keys.

    The sum is in a wide dtype, because XLA for CPUs (jax 0.12) aborts on bfloat16.
    """
    wide = d_whole.astype(wide_dtype(d_whole))
    if axes_of_type(jax.sharding.get_abstract_mesh(), AxisType.Explicit):
        # JAX 0.12 cannot compile `psum_scatter` if some axes are left Explicit.
        size = jax.lax.axis_size(axes)
        parts = wide.reshape(wide.shape[0], size, -1, *wide.shape[2:])  # (b, n, keys / n, …)
        d_x = jax.lax.all_to_all(parts, axes, split_axis=1, concat_axis=1, tiled=True).sum(1)
    else:
        d_x = jax.lax.psum_scatter(wide, axes, scatter_dimension=1, tiled=True)
    return (d_x.astype(d_whole.dtype),)


_gather.defvjp(lambda axes, x: (_gather(axes, x), None), _scatter)
