"""Attention over a sharded sequence, for which devices exchange heads for positions.

Before attention, a device has some positions of all heads. In attention, it has all positions of
some heads. For n = 4 devices and 4 heads::

                positions                              positions
                 0  1  2  3                             0  1  2  3
    head 0     [ a  b  c  d ]      all-to-all  →      [ a  a  a  a ]     letters are devices;
    head 1     [ a  b  c  d ]                         [ b  b  b  b ]     attention of each head
    head 2     [ a  b  c  d ]      ←  all-to-all      [ c  c  c  c ]     is that of one device
    head 3     [ a  b  c  d ]      of the outputs     [ d  d  d  d ]

Devices have equal work also in causal attention, with a window or with segments, and the attention
of a device can be any function of whole sequences, such as a kernel.

**Bytes.** Let Q be the bytes of a device's queries, and K the bytes of its keys. Values have as
many bytes as keys, and outputs as many as queries. Each device sends ``(n - 1) / n`` of what it
has: in the forward pass ``2 (n - 1) / n (Q + K)``, and in the backward pass the same for gradients.
A ring sends ``(n - 1) 2 K`` forward, and three to five times that backward, so it sends more as
soon as ``n K > Q + K``. If there are fewer key heads than devices, each key head is sent
``r = lcm(key heads, n) / key heads`` times, so K becomes ``r K``, which is at most Q.

**Two axes.** With ``axis=("inner", "outer")`` heads are exchanged over the devices of ``inner``,
the axis with the faster links, and keys and values then go around a ring over ``outer``. For 2 × 2
devices::

                positions                            positions
                 0  1  2  3                          0  1 │ 2  3
    head 0     [ a  b  c  d ]    a ⇄ b, c ⇄ d      [ a  a │ c  c ]   a ⇄ c and b ⇄ d
    head 1     [ a  b  c  d ]         →            [ b  b │ d  d ]   are rings

The exchange is from Jacobs et al., 2023 (DeepSpeed-Ulysses, arXiv:2309.14509). The exchange and a
ring together are from Fang and Zhao, 2024 (arXiv:2405.07719).
"""

from __future__ import annotations

import functools
from typing import Unpack

import jax

from .. import _compat
from .attention_inputs import AttentionOptions, inputs_of
from .layout import Layout
from .local_attention import AttentionFunction, local_attention
from .ring import attend_in_ring


@_compat.api_boundary
def all_to_all_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: object = None,
    mask: jax.Array | None = None,
    *,
    attention: AttentionFunction | None = None,
    axis: str | tuple[str, str] = "context",
    **options: Unpack[AttentionOptions],
) -> jax.Array:
    """Attention over a sharded sequence, for which devices exchange heads for positions.

    The devices of the axis have to divide the heads. Fewer heads of keys and values are repeated as
    often as needed.

    Args:
      query: queries of shape (batch, length, heads, features).
      key: keys of shape (batch, length of keys, key heads, features).
      value: values of shape (batch, length of keys, key heads, features of values).
      bias: not supported, None.
      mask: booleans that broadcast to (batch, heads, length, length of keys).
      attention: the attention of each device, called with whole sequences of its heads, and with
        keywords that it has parameters for: ``is_causal``, ``window``, ``scale``,
        ``query_segment_ids``, ``key_segment_ids``, ``query_positions``, ``key_positions``,
        ``dropout_rng``. What it has none for is in ``mask``. Name the Auto axes that shard the
        batch and the heads, as the compiler cannot split a kernel: over others, arrays are
        gathered. None for one that goes block by block, whose memory does not grow with the square
        of the length.
      axis: the mesh axis that shards the sequence; or two, ``("inner", "outer")``, over which
        ``P(("outer", "inner"))`` shards it: heads are exchanged within the first, and keys and
        values go around a ring over the second one.
      **options: as of :func:`ring_attention`. Tokens have to move (``balanced``) only for a ring.

    Returns:
      The attention outputs, of shape (batch, length, heads, features of values).

    Raises:
      ValueError: shapes do not fit each other or the axis, or the mesh lacks it.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.experimental import all_to_all_attention
      >>> mesh = jax.make_mesh((2, 4), ("data", "context"))
      >>> heads = jax.numpy.ones((4, 64, 8, 16))  # (batch, length, heads, features)
      >>> def attend(query, key, value):
      ...     return all_to_all_attention(
      ...         query, key, value, is_causal=True, attention=jax.nn.dot_product_attention,
      ...         batch_axis="data",
      ...     )
      >>> forward = jit(attend, mesh=mesh, in_shardings=P("data", "context"))
      >>> forward(heads, heads, heads).shape
      (4, 64, 8, 16)
    """
    caller = "all_to_all_attention"
    inner, *outer = (axis,) if isinstance(axis, str) else axis
    if len(outer) > 1 or (outer and attention is not None):
        raise ValueError(
            f"{caller}: axis={axis!r} with attention={attention!r}: expected one axis, or two "
            "without attention, as a ring adds up its blocks itself."
        )
    inputs = inputs_of(
        caller,
        (query, key, value),
        bias,
        mask,
        (*outer, inner),  # `outer` is the major one, as in P(("outer", "inner"))
        exchanged=(inner,),
        is_opaque=attention is not None,
        options=options,
    )
    if inputs.layout.mesh is None:  # one device computes everything
        local = local_attention(caller, attention, inputs, is_whole=True)
        return local(inputs.arrays)
    layout, arrays = inputs.layout, inputs.arrays
    query, key, value = exchange(layout, inner, (arrays.query, arrays.key, arrays.value))
    arrays = arrays._replace(query=query, key=key, value=value)
    # `inner` sharded tokens before the exchange, and shards heads after it.
    exchanged = layout._replace(sequence=tuple(outer), heads=(*layout.heads, inner))
    inputs = inputs._replace(layout=exchanged, arrays=arrays)
    if outer:
        out = attend_in_ring(inputs)
    else:
        local = local_attention(caller, attention, inputs, is_whole=True)
        # No axes shard tokens, because each device has whole sequences of its heads.
        specs = exchanged.array_specs(arrays, query_axes=(), key_axes=())
        out = exchanged.map(local, in_specs=(specs,), out_specs=specs.query)(arrays)
    [out] = exchange(layout, inner, (out,), back=True)
    return out


def exchange(
    layout: Layout, inner: str, arrays: tuple[jax.Array, ...], *, back: bool = False
) -> tuple[jax.Array, ...]:
    """Exchanges heads for positions within the n devices along an axis.

    On each device, (b, tokens / n, heads, d) become (b, tokens, heads / n, d).

    Args:
      layout: the layout before heads are exchanged; ``inner`` is the last axis of its sequence.
      inner: the axis within which arrays are exchanged. Its size divides the number of heads.
      arrays: of shape (b, tokens, heads, d).
      back: whether to undo the exchange: devices then get some positions of all heads.
    """
    outer = layout.sequence[:-1]
    by_tokens = layout.token_spec(layout.sequence)  # (b, tokens, heads): inner shards tokens
    by_heads = layout.token_spec(outer, (*layout.heads, inner))  # inner shards heads instead
    source, target = (by_heads, by_tokens) if back else (by_tokens, by_heads)
    tokens, heads = 1, 2  # the dimensions
    split, joined = (tokens, heads) if back else (heads, tokens)

    def local(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        swap = functools.partial(jax.lax.all_to_all, axis_name=inner, tiled=True)
        return tuple(swap(x, split_axis=split, concat_axis=joined) for x in arrays)

    run = layout.map(local, in_specs=(source,) * len(arrays), out_specs=(target,) * len(arrays))
    exchanged: tuple[jax.Array, ...] = run(*arrays)
    return exchanged
