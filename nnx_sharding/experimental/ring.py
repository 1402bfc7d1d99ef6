"""Attention over a sequence that mesh axes shard: keys and values move around a ring of devices.

Here are the functions of users, and what they refuse. ``ring_passes.py`` has the picture of the
ring, and the formulas of both passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike, DTypeLike

from .. import _compat
from .attention_inputs import AttentionOptions, Inputs, inputs_of
from .layout import Axes, attend_balanced, balanced_order
from .ring_passes import Ring, attend


@_compat.api_boundary
def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: object = None,
    mask: jax.Array | None = None,
    *,
    is_causal: bool = False,
    window: int | None = None,
    input_positions: ArrayLike | None = None,
    segment_ids: jax.Array | None = None,
    rope: Callable[..., jax.Array] | None = None,
    scale: float | None = None,
    balanced: bool = False,
    mesh: Mesh | AbstractMesh | None = None,
    axis: str = "context",
    batch_axis: str | Axes | None = None,
    head_axis: str | Axes | None = None,
    dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    module: object = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    promote_dtype: object = None,
) -> jax.Array:
    """Attention of queries to keys and values that are sharded along the sequence.

    Each device keeps its queries. Keys and values move around a ring of devices, and each block is
    added to a running softmax, which is computed in float32 (float64 for float64). So no device
    ever has all keys, nor a matrix of more than its own queries and one block of keys, also in the
    backward pass, where the blocks and their gradients go around once more.

    It takes the arguments of ``attention_fn`` of ``nnx.MultiHeadAttention``. Without a mesh,
    it computes the same on one device. Other axes of the mesh may shard
    the batch and the heads.

    Args:
      query: queries of shape (batch, length, heads, features).
      key: keys of shape (batch, length of keys, key heads, features); each key head serves equally
        many heads (grouped-query attention). If the devices do not divide their number, as in
        attention to another sequence, they are padded and hidden.
      value: values of shape (batch, length of keys, key heads, features of values).
      bias: not supported, None.
      mask: booleans of at most four dimensions that broadcast to (batch, heads, length, length of
        keys), as by Flax: where a query may attend. Each device has all columns of its rows; the
        other options take no memory. A dimension of size 1 is not expanded. A query that may
        attend to nothing gets zeros.
      is_causal: whether a query attends only to keys at its own position and before.
      window: a query attends only to keys whose position differs by less than this.
      input_positions: of the tokens, integers of shape (length,) or (batch, length), for
        ``is_causal`` and ``window``, named as by Flax; None for their order. With those of
        :func:`balanced_order`, all devices have equal work in causal attention. Blocks that nothing
        attends to are skipped, if all rows of the batch have the same positions.
      segment_ids: integers of shape (batch, length): a query attends only to its own segment, such
        as a document.
      rope: rotates queries and keys, such as an ``nnx.RoPE``: a function of an array of shape
        (batch, heads, length, features), and of ``input_positions`` if they are given.
      scale: the factor of the products; None for ``1 / sqrt(features)``.
      balanced: whether causal attention of tokens in their own order moves each of them to its
        place in :func:`balanced_order` and back, which sends queries, keys, values and outputs once
        more, and takes half the time. It needs a length that twice the devices divide, and no mask;
        else nothing moves.
      mesh: the mesh; None for the one in context.
      axis: the mesh axis that shards the sequence.
      batch_axis: the Auto axes that shard the batch. The compiler finds them by itself, except
        for a function ``attention`` of your own, as in :func:`all_to_all_attention`.
      head_axis: likewise the Auto axes that shard the heads, as by :func:`tensor_parallel`.
      dtype: of the computation; None for that of the query.
      precision: as for ``jax.numpy.einsum``.
      dropout_rate: the share of weights that is dropped. Which ones depends on their places in
        the whole sequence, so that any mesh drops the same, though others than Flax does.
      deterministic: whether there is no dropout.
      module: where Flax sows weights, which is not supported: None.
      broadcast_dropout: whether all rows and heads drop the same weights.
      dropout_rng: the key for dropout.
      promote_dtype: not used; Flax passes it to any ``attention_fn``.

    Returns:
      The attention outputs, of shape (batch, length, heads, features of values).

    Raises:
      ValueError: shapes do not fit each other or the axis, the mesh lacks it, or an option that is
        not supported is asked for. All of them are listed.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.experimental import ring_attention
      >>> mesh = jax.make_mesh((2, 4), ("data", "context"))
      >>> model = nnx.MultiHeadAttention(
      ...     4, 32, attention_fn=ring_attention, decode=False, rngs=nnx.Rngs(0)
      ... )
      >>> x = jax.numpy.ones((4, 64, 32))
      >>> forward = jit(lambda model, x: model(x, is_causal=True), mesh=mesh,
      ...               in_shardings=(P(), P("data", "context")))
      >>> forward(model, x).shape
      (4, 64, 32)

    From Liu et al., 2023, arXiv:2310.01889; the running softmax from Milakov and Gimelshein, 2018,
    arXiv:1805.02867.
    """
    options: AttentionOptions = {
        "is_causal": is_causal,
        "window": window,
        "input_positions": input_positions,
        "segment_ids": segment_ids,
        "rope": rope,
        "scale": scale,
        "balanced": balanced,
        "mesh": mesh,
        "batch_axis": batch_axis,
        "head_axis": head_axis,
        "dtype": dtype,
        "precision": precision,
        "dropout_rate": dropout_rate,
        "deterministic": deterministic,
        "module": module,
        "broadcast_dropout": broadcast_dropout,
        "dropout_rng": dropout_rng,
    }
    arrays = query, key, value
    return attend_in_ring(inputs_of("ring_attention", arrays, bias, mask, (axis,), options=options))


def attend_in_ring(inputs: Inputs) -> jax.Array:
    """Attends in a ring; for balanced attention, tokens move before, and outputs move back.

    Returns:
      The outputs, (batch, length, heads, features of values), in the order of the queries.
    """
    layout, arrays, rule = inputs.layout, inputs.arrays, inputs.rule
    length, size = arrays.query.shape[1], layout.count(layout.sequence)
    # A user who has put the tokens into the balanced order passes their positions. Only positions
    # that are known while tracing, in a NumPy array, can be compared with that order.
    is_given_balanced = (
        isinstance(inputs.positions, np.ndarray)
        and rule.is_causal
        and size > 1
        and length % (2 * size) == 0  # two chunks of equal length for each device
        and np.array_equal(inputs.positions, balanced_order(length, size))
    )
    # With a window, the balanced order does not tell which pairs of halves are hidden.
    is_balanced = (is_given_balanced or inputs.moves_tokens) and not rule.window
    ring = Ring(layout, rule, is_balanced)
    if not inputs.moves_tokens:  # tokens stay in their order
        return attend(ring, arrays)
    return attend_balanced(layout, arrays, functools.partial(attend, ring), moves_keys=True)
