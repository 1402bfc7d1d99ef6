"""Attention over a sequence that mesh axes shard: keys and values move around a ring of devices.

Here are the functions of users, and what they refuse. ``ring_passes.py`` has the picture of the
ring, and the formulas of both passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike, DTypeLike

from .. import _compat
from ..core.constrain import given_mesh
from ..errors import raise_listed
from ..specs.fitting import suggestion
from .ring_passes import Ring, Visibility, attend, move_tokens


def balanced_order(length: int, shards: int) -> np.ndarray:
    """The order of positions in which causal attention is equal work for all shards.

    Of ``2 * shards`` chunks of a sequence, shard i has the i-th from the beginning and the i-th
    from the end. Order tokens and labels by it (``tokens[:, order]``), and pass it as positions to
    the attention and to position embeddings. ``np.argsort(order)`` is the inverse.

    Args:
      length: the number of positions, divisible by ``2 * shards``.
      shards: the size of the mesh axis.

    Returns:
      Integers of shape (length,): the position of each token.

    Raises:
      ValueError: ``2 * shards`` does not divide the length.

    Example:
      >>> from nnx_sharding.experimental import balanced_order
      >>> balanced_order(8, 2)
      array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)

    From Brandon et al., 2023, arXiv:2311.09431, in the form of Llama 3 (arXiv:2407.21783).
    """
    if length % (2 * shards):
        raise ValueError(f"balanced_order: 2 × {shards} shards do not divide {length} positions.")
    chunks = np.arange(length, dtype=np.int32).reshape(2, shards, -1)
    return np.concatenate([chunks[0], chunks[1, ::-1]], axis=1).ravel()


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
    dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    module: object = None,
    broadcast_dropout: bool = True,
    dropout_rng: object = None,
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
        many heads (grouped-query attention).
      value: values of shape (batch, length of keys, key heads, features of values).
      bias: not supported, None.
      mask: booleans of at most four dimensions that broadcast to (batch, heads, length, length of
        keys), as by Flax: where a query may attend. Each device has all columns of its rows; the
        other options take no memory. A query that may attend to nothing gets zeros.
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
      dtype: of the computation; None for that of the query.
      precision: as for ``jax.numpy.einsum``.
      dropout_rate: of weights, which is not supported: 0, or ``deterministic``.
      deterministic: whether there is no dropout.
      module: where Flax sows weights, which is not supported: None.
      broadcast_dropout: not used.
      dropout_rng: not used.
      promote_dtype: not used.

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
    del broadcast_dropout, dropout_rng, promote_dtype
    mesh = given_mesh("ring_attention", mesh)
    size = 1 if mesh is None else mesh.shape.get(axis, 0)
    arrays = {"query": query, "key": key, "value": value}
    # These compare the place of a query with that of a key, so both have to be of one sequence.
    is_self = is_causal or bool(window) or input_positions is not None or segment_ids is not None
    problems = [
        *_wrong_shapes(arrays, mask, input_positions, segment_ids),
        *_wrong_lengths(arrays, size, axis, is_self=is_self),
        *_unsupported(bias, dropout_rate, deterministic, module, window),
        *_wrong_mesh(mesh, axis),
    ]
    raise_listed(ValueError, "ring_attention:", [f"  {line}" for line in problems])
    dtype = query.dtype if dtype is None else dtype
    if rope is not None:
        query, key = (_rotate(rope, x, input_positions) for x in (query, key))
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    length = query.shape[1]
    can_move = balanced and is_causal and mask is None  # a mask is in the order of the tokens
    order = _order_of(input_positions, length, size, is_causal, window, can_move=can_move)
    ring = Ring(
        mesh=mesh,
        axis=axis,
        size=size,
        is_causal=is_causal,
        window=window,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        precision=precision,
        mapped_axes=_compat.spmd_axes() | {axis},
        is_even=order.is_even,
    )
    if mask is not None:
        mask = jnp.expand_dims(mask, range(4 - jnp.ndim(mask)))  # (batch, heads, length, keys)
        mask = jnp.broadcast_to(mask, (*mask.shape[:2], length, key.shape[1]))
    return _attend_in_order(ring, order, query, key, value, segment_ids, mask)


def _attend_in_order(
    ring: Ring,
    order: _Order,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    mask: jax.Array | None,
) -> jax.Array:
    """Attends to the tokens; in the balanced order if ``order.moves``, and returns to their own."""
    if order.moves:
        moved = move_tokens(ring, (query, key, value, segment_ids))
        query, key, value, segment_ids = moved
    output = attend(ring, query, key, value, Visibility(order.positions, segment_ids, mask))
    if order.moves:
        [output] = move_tokens(ring, (output,), back=True)
    return output


class _Order(NamedTuple):
    """The positions of the tokens, as the devices attend to them."""

    positions: jax.Array | None  # None if they decide nothing
    moves: bool  # whether tokens are moved to the balanced order, and back
    is_even: bool  # whether attention is causal, in the balanced order: equal work for all


def _order_of(
    positions: ArrayLike | None,
    length: int,
    size: int,
    is_causal: bool,
    window: int | None,
    *,
    can_move: bool,
) -> _Order:
    """Decides on the order in which tokens are attended to."""
    if not (is_causal or window):
        return _Order(None, moves=False, is_even=False)
    has_chunks = size > 1 and length % (2 * size) == 0
    moves = can_move and has_chunks and positions is None
    if positions is None:
        positions = balanced_order(length, size) if moves else np.arange(length)
    # Only positions that are known while tracing can be compared.
    is_even = (
        is_causal
        and not window
        and has_chunks
        and isinstance(positions, np.ndarray)
        and np.array_equal(positions, balanced_order(length, size))
    )
    return _Order(jnp.asarray(positions, jnp.int32), moves, is_even)


def _unsupported(
    bias: object,
    dropout_rate: float,
    deterministic: bool,
    module: object,
    window: int | None,
) -> Iterator[str]:
    """Says which options of Flax's function are asked for that a ring does not have."""
    if bias is not None:
        yield "bias: not supported"
    if dropout_rate and not deterministic:
        yield "dropout of weights: not supported"
    if module is not None:
        yield "sowing weights: not supported, they are never in memory"
    if window is not None and window < 1:
        yield f"window={window!r}: expected at least 1"


def _wrong_shapes(
    arrays: Mapping[str, jax.Array],
    mask: ArrayLike | None,
    positions: ArrayLike | None,
    segments: jax.Array | None,
) -> Iterator[str]:
    """Says which shapes do not fit that of the query, or each other."""
    if any(x.ndim != 4 for x in arrays.values()):
        shapes = ((name, x.shape) for name, x in arrays.items())
        yield from (f"{name}: shape {x}, not 4-D" for name, x in shapes if len(x) != 4)
        return
    query, key, value = (x.shape for x in arrays.values())
    batch, length, heads, features = query
    if key[:3] != value[:3] or key[0] != batch or key[3] != features:
        yield f"query {query}, key {key} and value {value} do not fit"
    elif heads % key[2]:
        yield f"{key[2]} heads of keys do not divide {heads} heads of queries"
    whole = (batch, heads, length, key[1])
    if mask is not None and not _broadcasts(np.shape(mask), whole):
        yield f"mask: shape {np.shape(mask)} does not broadcast to {whole}"
    if positions is not None and np.shape(positions) not in ((length,), (batch, length)):
        given = np.shape(positions)
        yield f"input_positions: shape {given}, not ({length},) or ({batch}, {length})"
    if segments is not None and segments.shape != (batch, length):
        yield f"segment_ids: shape {segments.shape}, not ({batch}, {length})"


def _wrong_lengths(
    arrays: Mapping[str, jax.Array], size: int, axis: str, *, is_self: bool
) -> Iterator[str]:
    """Says which lengths the devices do not divide; with ``is_self``, both have to be equal."""
    if any(x.ndim != 4 for x in arrays.values()):
        return
    lengths = {"queries": arrays["query"].shape[1], "keys": arrays["key"].shape[1]}
    for name, length in lengths.items():
        if size and length % size:
            yield f"{size} devices along {axis!r} do not divide {length} {name}; pad them"
    if is_self and lengths["queries"] != lengths["keys"]:
        yield "is_causal, window, positions and segments: for as many keys as queries"


def _wrong_mesh(mesh: Mesh | AbstractMesh | None, axis: str) -> Iterator[str]:
    if mesh is not None and axis not in mesh.shape:
        known = ", ".join(map(repr, mesh.shape))
        yield f"axis={axis!r}{suggestion(axis, mesh.shape)}: the mesh has {known}"


def _broadcasts(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether an array of one shape can be broadcast to the other one."""
    last = whole[len(whole) - len(shape) :] if len(shape) <= len(whole) else ()
    return len(last) == len(shape) and all(a in (1, b) for a, b in zip(shape, last, strict=True))


def _rotate(rope: Callable[..., jax.Array], x: jax.Array, positions: ArrayLike | None) -> jax.Array:
    """Rotates queries or keys, (batch, length, heads, features), by positions or their order."""
    x = x.swapaxes(1, 2)  # (batch, heads, length, features)
    if positions is None:
        x = rope(x)
    elif np.ndim(positions) == 1:
        x = rope(x, jnp.asarray(positions))
    else:
        x = jax.vmap(rope)(x, jnp.asarray(positions))
    return x.swapaxes(1, 2)
