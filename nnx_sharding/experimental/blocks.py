"""Attention block by block: what one pair of blocks adds to outputs and to gradients.

Queries and keys are cut into blocks of at most 1,024 tokens, and only one pair of blocks is
multiplied at a time, so that no matrix of all queries and all keys is in memory::

              keys   b0   b1   b2   b3
    queries a0     [ 0 ]  .    .    .       a row is one running softmax; its steps are numbered.
    queries a1     [ 0    1 ]  .    .       Pairs in which no query may attend to a key, here those
    queries a2     [ 0    1    2 ]  .       above the diagonal of causal attention, are skipped.
    queries a3     [ 0    1    2    3 ]

One pair is :meth:`Softmax.add` forward and :func:`pair_gradients` backward; :func:`add_keys` and
:func:`add_key_gradients` go along a row. All rows, for the keys that a ring has brought, are
:func:`add_in_blocks` and :func:`add_gradients_in_blocks`; :func:`attend_in_blocks` is attention on
one device, which has all keys.

The *rule* has the options, such as causal. The *info* of tokens are their positions, segments and
places in the whole sequence. The *visibility* has what decides to which keys queries attend: the
info of the queries, a mask, the key of dropout. A *range* (:class:`TokenRange`) is of consecutive
tokens: ``slice(x)`` reads them from an array, ``put(x, new)`` replaces them, ``add(x, more)`` adds
to them, and ``block(n)`` is the range of its n-th block. A :class:`Pair` is a range of queries and
one of keys, of any length. A row of the batch is one sequence.

Letters are dimensions: b the batch, q queries, s keys, k key heads, g the group of heads that one
key head serves, h = k g, d features. Queries are bqkgd, keys and values bskd, scores bkgqs.

**Forward.** Let ``s_j = scale · q · k_j`` be the scores of one query. Three numbers are kept of all
blocks so far: the largest score m (``row_max``), the sum l of ``exp(s_j - m)`` (``row_sum``), and
the vector o of ``exp(s_j - m) v_j``, summed (``out``). A block B updates them::

    m' = max(m, max_B s_j)
    l' = l · exp(m - m') + Σ_B exp(s_j - m')
    o' = o · exp(m - m') + Σ_B exp(s_j - m') v_j

At the end ``o / l`` is the output, and ``lse = m + log l`` (log-sum-exp) is kept for the backward
pass, as one number for each query.

**Backward.** The scores are computed again::

    p_ij     = exp(s_ij - lse_i)                          the weights
    delta_i  = d_out_i · out_i                            = Σ_j p_ij (d_out_i · v_j)
    d_s_ij   = p_ij (d_out_i · v_j - delta_i)             the derivative of the softmax
    d_q_i    = scale Σ_j d_s_ij k_j
    d_k_j    = scale Σ_i d_s_ij q_i
    d_v_j    = Σ_i p_ij d_out_i

**Dropout.** The factor ``r_ij`` is 0 or ``1 / (1 - rate)``. It multiplies the weights in the last
sum of the forward pass, and in the backward pass ``p_ij`` of ``d_v_j`` and the product
``d_out_i · v_j`` of ``d_s_ij``. It is a hash of the places i and j in the whole sequence (Salmon et
al., 2011, doi:10.1145/2063384.2063405), so that any split over devices drops the same weights, and
no two devices use the same random bits.

The running softmax is from Milakov and Gimelshein, 2018 (arXiv:1805.02867); that only ``lse`` and
``delta`` are kept, from Dao, 2023 (arXiv:2307.08691).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ..core.constrain import type_mesh, type_spec
from ..specs.fitting import pad_entries

_State = TypeVar("_State")

# Scores of 1,024 × 1,024 in float32 are 4 MiB for each head, and keep the matrix units busy.
BLOCK_LENGTH = 1024


class Rule(NamedTuple):
    """The options of attention that are known while tracing, which are hashable."""

    is_causal: bool = False  # whether queries attend only to keys at their position and before
    window: int | None = None  # positions have to differ by less than this; None for any
    scale: float = 1.0  # the factor of the scores
    precision: Any = None  # the precision of products
    dropout_rate: float = 0.0  # the share of weights that are dropped


class TokenRange(NamedTuple):
    """Consecutive tokens of an array, which are read and written where they are."""

    start: int | jax.Array  # the index of the first token; an array in loops over blocks
    length: int

    def slice(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """Returns the tokens of an array; ``axis`` is the dimension that has them."""
        return jax.lax.dynamic_slice_in_dim(x, self.start, self.length, axis % x.ndim)

    def put(self, x: jax.Array, new: jax.Array, axis: int = 1) -> jax.Array:
        """Returns an array with new tokens in the range, in place if the compiler can."""
        return jax.lax.dynamic_update_slice_in_dim(x, new, self.start, axis)

    def add(self, x: jax.Array, more: jax.Array) -> jax.Array:
        """Returns an array, (b, tokens, …), with ``more`` added to the tokens of the range."""
        return self.put(x, self.slice(x) + more)

    @property
    def block_length(self) -> int:
        """The length of the equal blocks of the range.

        It is the largest divisor of the range's length up to ``BLOCK_LENGTH``. If that is less than
        an eighth of ``BLOCK_LENGTH``, as for 2 × 1,039 tokens, it is the next larger divisor: very
        many small products would take several times as long, which costs more than the memory of
        larger scores.
        """
        length = self.length
        shorter = next(n for n in range(min(length, BLOCK_LENGTH), 0, -1) if length % n == 0)
        if shorter == length or shorter >= BLOCK_LENGTH / 8:
            return shorter
        return next(n for n in range(BLOCK_LENGTH, length + 1) if length % n == 0)

    @property
    def block_numbers(self) -> jax.Array:
        """The numbers 0, 1, … of the range's blocks, to loop over."""
        return jnp.arange(self.length // self.block_length)

    def block(self, number: jax.Array) -> TokenRange:
        """Returns the range of one block, which has ``block_length`` tokens."""
        return TokenRange(self.start + number * self.block_length, self.block_length)


class TokenInfo(NamedTuple):
    """What is known of tokens, apart from their features; each is None if it decides nothing."""

    positions: jax.Array | None = None  # (tokens,) or (b, tokens)
    segments: jax.Array | None = None  # (b, tokens): the document of each, for example
    places: jax.Array | None = None  # (tokens,): where in the whole sequence, for dropout

    def slice(self, tokens: TokenRange) -> TokenInfo:
        """Returns the info of some of the tokens; ``tokens`` counts within this info."""
        return jax.tree.map(lambda x: tokens.slice(x, -1), self)  # type: ignore[no-any-return]


class Dropout(NamedTuple):
    """The key of random bits, and the numbers of the rows and heads with bits of their own."""

    words: jax.Array  # (2,), uint32: the key
    # If all rows and heads drop the same weights, there is one number of each.
    rows: jax.Array  # (b or 1,)
    heads: jax.Array  # (k, g) or (1, 1)


class Visibility(NamedTuple):
    """What decides to which keys queries attend; a field is None if it decides nothing."""

    query_info: TokenInfo = TokenInfo()
    mask: jax.Array | None = None  # (b or 1, heads or 1, queries or 1, all keys)
    dropout: Dropout | None = None

    def slice(self, queries: TokenRange) -> Visibility:
        """Returns the visibility of some of the queries. Columns of the mask stay, for all keys."""
        mask = self.mask
        if mask is not None and mask.shape[2] > 1:  # 1: all queries have the same row
            mask = queries.slice(mask, 2)
        return Visibility(self.query_info.slice(queries), mask, self.dropout)


class AttentionArrays(NamedTuple):
    """The arrays of an attention; or in their places the specs, or the gradients."""

    query: jax.Array  # (b, queries, heads, d)
    key: jax.Array  # (b, keys, key heads, d)
    value: jax.Array  # (b, keys, key heads, features of values)
    key_info: TokenInfo
    visibility: Visibility


class Block(NamedTuple):
    """Consecutive keys and their values."""

    key: jax.Array  # bskd
    value: jax.Array  # bskd
    info: TokenInfo
    first: int | jax.Array  # the number of the first key among all keys, for a mask of these

    def slice(self, keys: TokenRange) -> Block:
        """Returns some of the keys."""
        key, value = keys.slice(self.key), keys.slice(self.value)
        return Block(key, value, self.info.slice(keys), self.first + keys.start)


class Softmax(NamedTuple):
    """The running softmax of some queries."""

    row_max: jax.Array  # bkgq
    row_sum: jax.Array  # bkgq
    out: jax.Array  # bkgqd, not yet divided by row_sum

    @classmethod
    def of_nothing(cls, query: jax.Array, num_features: int) -> Softmax:
        """Returns the softmax of queries that have seen no key yet.

        Args:
          query: bqkgd; only its shape and its type matter.
          num_features: the number of features of values, and so of outputs.
        """
        dtype = wide_dtype(query)
        # The zeros are computed from the queries, so that they have the sharding of the queries in
        # their type if there are Explicit axes.
        row_sum = jnp.zeros_like(jnp.moveaxis(query, 1, 3), dtype).sum(-1)  # bkgqd → bkgq
        out = row_sum[..., None] + jnp.zeros((1, 1, 1, 1, num_features), dtype)  # bkgqd
        return cls(row_max=row_sum - jnp.inf, row_sum=row_sum, out=out)

    def add(self, rule: Rule, query: jax.Array, block: Block, visibility: Visibility) -> Softmax:
        """Adds one block of keys, for the same queries: bqkgd."""
        scores = scores_of(rule, query, block, visibility)  # bkgqs
        row_max = jnp.maximum(self.row_max, scores.max(-1))
        # A row that has seen no key yet has the maximum -inf, and inf - inf is NaN. With 0 instead
        # of that maximum, the weights of the row are exp(-inf) = 0. With the first key of a row,
        # `rescale` is exp(-inf) = 0, too.
        finite = jnp.where(jnp.isneginf(row_max), 0, row_max)
        weights, rescale = jnp.exp(scores - finite[..., None]), jnp.exp(self.row_max - finite)
        row_sum = self.row_sum * rescale + weights.sum(-1)
        # Dropout drops weights in the output only. The sum that divides them has all weights.
        if visibility.dropout is not None:
            weights = weights * dropout_factors(rule, visibility, block)
        products = einsum(rule, "bkgqs,bskd->bkgqd", weights.astype(query.dtype), block.value)
        return Softmax(row_max, row_sum, self.out * rescale[..., None] + products)

    def results(self) -> tuple[jax.Array, jax.Array]:
        """Returns the outputs, bkgqd, and the log-sum-exp, bkgq: 0 and inf without keys."""
        has_any = self.row_sum > 0
        out = self.out / jnp.where(has_any, self.row_sum, 1)[..., None]
        # A log-sum-exp of inf makes all weights of the row zero in the backward pass.
        row_max = jnp.where(has_any, self.row_max, 0)
        return out, jnp.where(has_any, row_max + jnp.log(self.row_sum), jnp.inf)


def add_keys(
    rule: Rule,
    softmax: Softmax,
    query: jax.Array,
    block: Block,
    visibility: Visibility,
    keys: TokenRange,
) -> Softmax:
    """Adds a range of the keys to the softmax of one block of queries, block by block.

    Args:
      rule: the options.
      softmax: the softmax of the queries over the keys that were added before.
      query: the block of queries, bqkgd.
      block: all keys that the device has.
      visibility: the visibility of the queries.
      keys: the range of ``block`` that is added.
    """

    def add_block(softmax: Softmax, number: jax.Array) -> tuple[Softmax, None]:
        some_keys = block.slice(keys.block(number))  # one block

        def add(softmax: Softmax) -> Softmax:
            return softmax.add(rule, query, some_keys, visibility)

        # Not even the scores of a hidden block are computed: half of causal attention.
        return _if_visible(rule, visibility.query_info, some_keys.info, add, softmax), None

    softmax, _ = jax.lax.scan(add_block, softmax, keys.block_numbers)
    return softmax


class Pair(NamedTuple):
    """A range of the queries and a range of the keys of a device, which are taken together."""

    queries: TokenRange
    keys: TokenRange

    @property
    def is_one_block(self) -> bool:
        """Whether both ranges are one block each. A loop over one block would only cost time."""
        return all(tokens.block_length == tokens.length for tokens in self)


def add_in_blocks(
    rule: Rule,
    softmax: Softmax,
    query: jax.Array,
    block: Block,
    visibility: Visibility,
    pair: Pair,
) -> Softmax:
    """Adds a range of the keys to the softmax of a range of the queries, block by block.

    Args:
      rule: the options.
      softmax: the softmax of all queries of the device.
      query: all these queries, bqkgd.
      block: all keys that the device has.
      visibility: the visibility of all queries.
      pair: the ranges of queries and keys.

    Returns:
      The softmax of all queries. Only the rows of the range have changed.
    """

    def update_rows(softmax: Softmax, tokens: TokenRange) -> Softmax:
        """Adds the keys to one block of queries, whose rows are updated where they are."""
        old = Softmax(*(tokens.slice(x, axis=3) for x in softmax))  # the queries of bkgq and bkgqd
        some_queries, their_visibility = tokens.slice(query), visibility.slice(tokens)
        if pair.is_one_block:
            new = old.add(rule, some_queries, block.slice(pair.keys), their_visibility)
        else:
            new = add_keys(rule, old, some_queries, block, their_visibility, pair.keys)
        rows = zip(softmax, new, strict=True)
        return Softmax(*(tokens.put(whole, part, axis=3) for whole, part in rows))

    if pair.is_one_block:
        return update_rows(softmax, pair.queries)

    def add_block(softmax: Softmax, number: jax.Array) -> tuple[Softmax, None]:
        return update_rows(softmax, pair.queries.block(number)), None

    softmax, _ = jax.lax.scan(add_block, softmax, pair.queries.block_numbers)
    return softmax


class BackwardQueries(NamedTuple):
    """What the backward pass needs of some queries."""

    query: jax.Array  # bqkgd
    d_out: jax.Array  # bqkgd
    lse: jax.Array  # bkgq
    delta: jax.Array  # bkgq

    def slice(self, queries: TokenRange) -> BackwardQueries:
        """Returns the same arrays for some of the queries."""
        return BackwardQueries(
            query=queries.slice(self.query),
            d_out=queries.slice(self.d_out),
            lse=queries.slice(self.lse, axis=3),
            delta=queries.slice(self.delta, axis=3),
        )


class Gradients(NamedTuple):
    """The gradients of queries, keys and values, in a wide dtype.

    Gradients of queries and keys are not yet multiplied by the scale. Gradients of values have no
    such factor.
    """

    query: jax.Array  # bqkgd
    key: jax.Array  # bskd
    value: jax.Array  # bskd


def pair_gradients(
    rule: Rule, queries: BackwardQueries, block: Block, visibility: Visibility
) -> Gradients:
    """Computes what a pair of blocks adds to gradients, by the formulas of the backward pass.

    Args:
      rule: the options.
      queries: one block of queries.
      block: one block of keys.
      visibility: the visibility of these queries.
    """
    dtype = queries.query.dtype
    scores = scores_of(rule, queries.query, block, visibility)  # bkgqs
    weights = jnp.exp(scores - queries.lse[..., None])
    d_weights = einsum(rule, "bqkgd,bskd->bkgqs", queries.d_out, block.value)
    kept_weights = weights
    if visibility.dropout is not None:
        factors = dropout_factors(rule, visibility, block)
        kept_weights, d_weights = weights * factors, d_weights * factors
    d_scores = (weights * (d_weights - queries.delta[..., None])).astype(dtype)
    d_query = einsum(rule, "bkgqs,bskd->bqkgd", d_scores, block.key)
    d_key = einsum(rule, "bkgqs,bqkgd->bskd", d_scores, queries.query)
    d_value = einsum(rule, "bkgqs,bqkgd->bskd", kept_weights.astype(dtype), queries.d_out)
    return Gradients(d_query, d_key, d_value)


def add_key_gradients(
    rule: Rule,
    gradients: Gradients,
    queries: BackwardQueries,
    block: Block,
    visibility: Visibility,
    keys: TokenRange,
) -> Gradients:
    """Adds the gradients of one block of queries and a range of the keys, block by block of keys.

    Args:
      rule: the options.
      gradients: the sums so far: of this block of queries, and of all keys in ``block``.
      queries: the block of queries.
      block: all keys that the device has.
      visibility: the visibility of the queries.
      keys: the range of ``block`` whose pairs with the queries are added.
    """

    def add_block(gradients: Gradients, number: jax.Array) -> tuple[Gradients, None]:
        tokens = keys.block(number)
        some_keys = block.slice(tokens)  # one block

        def add(gradients: Gradients) -> Gradients:
            more = pair_gradients(rule, queries, some_keys, visibility)
            return Gradients(
                query=gradients.query + more.query,
                # The gradients have the length of all keys; only the rows of this block change.
                key=tokens.add(gradients.key, more.key),
                value=tokens.add(gradients.value, more.value),
            )

        return _if_visible(rule, visibility.query_info, some_keys.info, add, gradients), None

    gradients, _ = jax.lax.scan(add_block, gradients, keys.block_numbers)
    return gradients


def add_gradients_in_blocks(
    rule: Rule,
    gradients: Gradients,
    queries: BackwardQueries,
    block: Block,
    visibility: Visibility,
    pair: Pair,
) -> Gradients:
    """Adds the gradients of a range of the queries and a range of the keys, block by block.

    Args:
      rule: the options.
      gradients: the sums so far, of all queries and keys of the device.
      queries: all these queries.
      block: all keys that the device has.
      visibility: the visibility of all queries.
      pair: the ranges of queries and keys.
    """
    if pair.is_one_block:  # nothing to loop over
        more = pair_gradients(
            rule,
            queries.slice(pair.queries),
            block.slice(pair.keys),
            visibility.slice(pair.queries),
        )
        return Gradients(
            query=pair.queries.add(gradients.query, more.query),
            key=pair.keys.add(gradients.key, more.key),
            value=pair.keys.add(gradients.value, more.value),
        )

    def add_block(gradients: Gradients, number: jax.Array) -> tuple[Gradients, None]:
        tokens = pair.queries.block(number)
        # The gradients of queries are sliced to this block. Those of keys are not, because each
        # block of queries adds to the gradients of all keys.
        old = gradients._replace(query=tokens.slice(gradients.query))
        new = add_key_gradients(
            rule, old, queries.slice(tokens), block, visibility.slice(tokens), pair.keys
        )
        return new._replace(query=tokens.put(gradients.query, new.query)), None

    gradients, _ = jax.lax.scan(add_block, gradients, pair.queries.block_numbers)
    return gradients


def may_attend(rule: Rule, query_positions: jax.Array, key_positions: jax.Array) -> Any:
    """Whether some query may attend to some key, by the ranges of their positions.

    The result is a boolean of JAX, or True if the rule does not depend on positions.
    """
    visible = key_positions.min() <= query_positions.max() if rule.is_causal else True
    if rule.window is not None:
        visible &= query_positions.min() - key_positions.max() < rule.window
        visible &= key_positions.min() - query_positions.max() < rule.window
    return visible


def visible_by_info(rule: Rule, queries: TokenInfo, keys: TokenInfo) -> list[jax.Array]:
    """Returns masks by position and by segment: booleans, (b or 1, queries, keys).

    A query may attend to a key if all masks are true for this pair. The list is empty if nothing
    is hidden by info.
    """
    visible = []
    if queries.positions is not None and keys.positions is not None:
        apart = queries.positions[..., :, None] - keys.positions[..., None, :]
        if rule.is_causal:
            visible.append(apart >= 0)
        if rule.window is not None:
            visible.append(jnp.abs(apart) < rule.window)
    if queries.segments is not None and keys.segments is not None:
        visible.append(queries.segments[:, :, None] == keys.segments[:, None, :])
    return [x if x.ndim == 3 else x[None] for x in visible]


def scores_of(rule: Rule, query: jax.Array, block: Block, visibility: Visibility) -> jax.Array:
    """Returns the scores of some queries, bqkgd, for a block: bkgqs, -inf for what is hidden."""
    scores = einsum(rule, "bqkgd,bskd->bkgqs", query, block.key) * rule.scale
    masks_by_info = visible_by_info(rule, visibility.query_info, block.info)  # bqs
    masks = [mask[:, None, None] for mask in masks_by_info]  # bkgqs, where k and g are 1
    if visibility.mask is not None:  # bhqs, with the columns of all keys in the sequence
        num_keys = block.key.shape[1]
        columns = TokenRange(block.first, num_keys)
        mask = columns.slice(visibility.mask, axis=3)
        heads = (1, 1) if mask.shape[1] == 1 else scores.shape[1:3]  # h → k, g
        masks.append(mask.reshape(mask.shape[0], *heads, *mask.shape[2:]))  # bhqs → bkgqs
    for mask in masks:
        scores = jnp.where(mask, scores, -jnp.inf)
    return scores


def dropout_factors(rule: Rule, visibility: Visibility, block: Block) -> jax.Array:
    """Returns the factors of weights under dropout: 0 or 1 / (1 - rate), bkgqs."""
    query_places, key_places = visibility.query_info.places, block.info.places
    assert visibility.dropout is not None
    assert query_places is not None
    assert key_places is not None
    words, rows, heads = visibility.dropout  # (2,), (b,) and (k, g)
    places = jnp.broadcast_arrays(query_places[:, None], key_places[None])
    place_pairs = jnp.stack(places).astype(jnp.uint32)  # (2, queries, keys)

    # Threefry hashes pairs of numbers by a key of two numbers.
    def bits_of(row: jax.Array, head: jax.Array) -> jax.Array:
        """Returns random bits of one row and head, uint32: (queries, keys)."""
        key = threefry_2x32(words, jnp.stack([row, head]).astype(jnp.uint32))
        hashes: jax.Array = threefry_2x32(key, place_pairs)  # (2, queries, keys)
        return hashes[0]  # 32 bits are enough

    over_group = jax.vmap(bits_of, (None, 0))  # gqs
    over_heads = jax.vmap(over_group, (None, 0))  # kgqs
    bits = jax.vmap(over_heads, (0, None))(rows, heads)  # bkgqs
    # The share ``dropout_rate`` of all numbers of 32 bits is below the threshold.
    is_kept = bits >= jnp.uint32(min(rule.dropout_rate * 2.0**32, 2.0**32 - 1))
    return jnp.where(is_kept, 1 / (1 - rule.dropout_rate), 0.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_in_blocks(rule: Rule, arrays: AttentionArrays) -> jax.Array:
    """Computes attention of the queries of a device to keys and values that it has.

    Returns:
      The outputs, (b, queries, heads, features of values).
    """
    out, _ = _forward(rule, arrays)
    return out


class Residuals(NamedTuple):
    """What the backward pass of an attention needs."""

    arrays: AttentionArrays
    out: jax.Array  # bqhd
    lse: jax.Array  # bkgq


def _forward(rule: Rule, arrays: AttentionArrays) -> tuple[jax.Array, Residuals]:
    """The forward rule of :func:`attend_in_blocks`: each block of queries attends by itself.

    Returns:
      The outputs, and the residuals. The residuals have all arrays, because the backward pass
      computes scores again.
    """
    # Without a barrier, JAX computes what depends on positions alone before a loop over layers, and
    # keeps the masks of all blocks: 86 GiB instead of 9.5 GiB for two layers of 131,072 tokens.
    arrays = jax.lax.optimization_barrier(arrays)
    query, key, value, key_info, visibility = arrays
    block = Block(key, value, key_info, first=0)
    grouped = group_heads(query, key.shape[2])  # bqkgd
    queries, keys = TokenRange(0, query.shape[1]), TokenRange(0, key.shape[1])

    def attend_block(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens = queries.block(number)
        some_queries = tokens.slice(grouped)
        softmax = Softmax.of_nothing(some_queries, value.shape[-1])
        softmax = add_keys(rule, softmax, some_queries, block, visibility.slice(tokens), keys)
        out, lse = softmax.results()
        return jnp.moveaxis(out, 3, 1).astype(query.dtype), lse  # bkgqd → bqkgd

    # Both results of `map` have the number of the block as a first dimension.
    outs, lses = jax.lax.map(attend_block, queries.block_numbers)
    out = ungroup_heads(_join_blocks(outs, 1))  # bqkgd → bqhd
    return out, Residuals(arrays, out, _join_blocks(lses, 3))  # bkgq


def _backward(rule: Rule, residuals: Residuals, d_out: jax.Array) -> tuple[AttentionArrays]:
    """The backward rule of :func:`attend_in_blocks`: goes along the rows of pairs once more.

    Returns:
      A tuple of the gradient of the only differentiable argument, the arrays.
    """
    (query, key, value, key_info, visibility), out, lse = residuals
    block = Block(key, value, key_info, first=0)
    wide, key_heads = wide_dtype(query), key.shape[2]
    all_queries = BackwardQueries(
        query=group_heads(query, key_heads),
        d_out=group_heads(d_out, key_heads),
        lse=lse,
        delta=delta_of(out, d_out, key_heads),
    )
    queries, keys = TokenRange(0, query.shape[1]), TokenRange(0, key.shape[1])

    # A row of pairs completes the gradient of its queries, which is an output of the loop. The
    # gradients of keys and values add up over the rows, so they are the carry.
    def add_block(d_keys: list[jax.Array], number: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        tokens = queries.block(number)
        some_queries = all_queries.slice(tokens)
        d_key, d_value = d_keys
        old = Gradients(jnp.zeros_like(some_queries.query, wide), d_key, d_value)
        new = add_key_gradients(rule, old, some_queries, block, visibility.slice(tokens), keys)
        return [new.key, new.value], (new.query * rule.scale).astype(query.dtype)

    zeros = [jnp.zeros_like(x, wide) for x in (key, value)]
    (d_key, d_value), d_queries = jax.lax.scan(add_block, zeros, queries.block_numbers)
    d_query = ungroup_heads(_join_blocks(d_queries, 1))  # bqkgd → bqhd
    # All arrays have the dtype of the query.
    d_key, d_value = (x.astype(query.dtype) for x in (d_key * rule.scale, d_value))
    # The infos and the visibility are integers and booleans, which have no gradients.
    return (AttentionArrays(d_query, d_key, d_value, None, None),)  # type: ignore[arg-type]


attend_in_blocks.defvjp(_forward, _backward)


def delta_of(out: jax.Array, d_out: jax.Array, key_heads: int) -> jax.Array:
    """Returns the scalar product of each output with its gradient, bqhd: ``delta``, bkgq."""
    wide = wide_dtype(out)
    delta = (out.astype(wide) * d_out.astype(wide)).sum(-1)[..., None]  # bqh1
    return jnp.moveaxis(group_heads(delta, key_heads)[..., 0], 1, 3)


def _if_visible(
    rule: Rule,
    queries: TokenInfo,
    keys: TokenInfo,
    add: Callable[[_State], _State],
    state: _State,
) -> _State:
    """Returns ``add(state)``, or the state itself if all of the keys are hidden from the queries.

    Only a cheap test of the first and last positions decides (:func:`may_attend`). Segments and
    masks are not tested, so keys that only these hide are added, with weights of 0.
    """
    for info in (queries, keys):
        # Positions of (b, tokens) differ from row to row, so keys that are hidden in one row may be
        # visible in another row.
        if info.positions is None or info.positions.ndim > 1:
            return add(state)
    is_visible = may_attend(rule, queries.positions, keys.positions)  # type: ignore[arg-type]
    new: _State = jax.lax.cond(is_visible, add, lambda state: state, state)
    return new


def _join_blocks(blocks: jax.Array, axis: int) -> jax.Array:
    """Joins blocks along one of their dimensions.

    Args:
      blocks: the blocks, stacked along the first dimension as by ``scan``: (2, b, 3, d) for two
        blocks.
      axis: the dimension of a block along which blocks are joined: 1 for the result (b, 6, d).
    """
    moved = jnp.moveaxis(blocks, 0, axis)  # (b, 2, 3, d)
    before, after = moved.shape[:axis], moved.shape[axis + 2 :]
    num_blocks, block_length = moved.shape[axis : axis + 2]
    # For each new dimension, the dimension of `moved` whose sharding it keeps. The joined dimension
    # has no sharding.
    sources = [*range(axis), None, *range(axis + 2, moved.ndim)]
    return reshape(moved, (*before, num_blocks * block_length, *after), sources)


def wide_dtype(x: jax.Array) -> Any:
    """Returns the dtype in which sums are computed: float32, or float64 for float64."""
    return jnp.promote_types(x.dtype, jnp.float32)


def einsum(rule: Rule, formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiplies arrays in the precision of the rule, and sums in a wide dtype."""
    dtype = wide_dtype(x)
    return jnp.einsum(formula, x, y, precision=rule.precision, preferred_element_type=dtype)


def group_heads(x: jax.Array, key_heads: int) -> jax.Array:
    """Splits heads by the key head that serves them: bqhd → bqkgd. ``key_heads`` is k."""
    batch, length, heads, features = x.shape
    shape = (batch, length, key_heads, heads // key_heads, features)
    return reshape(x, shape, (0, 1, 2, None, 3))


def ungroup_heads(x: jax.Array) -> jax.Array:
    """Joins heads: bqkgd → bqhd."""
    shape = (*x.shape[:2], math.prod(x.shape[2:4]), x.shape[4])
    return reshape(x, shape, (0, 1, 2, 4))


def reshape(x: jax.Array, shape: tuple[int, ...], sources: Sequence[int | None]) -> jax.Array:
    """Reshapes an array whose type may have Explicit axes.

    Args:
      x: the array.
      shape: the new shape.
      sources: for each new dimension, the old dimension whose axes it gets; None for no axes.
    """
    spec = type_spec(x)
    if spec is None:
        return x.reshape(shape)
    old = pad_entries(spec, x.ndim)  # an entry for each dimension
    entries = [None if source is None else old[source] for source in sources]
    sharding = NamedSharding(type_mesh(x), P(*entries))
    reshaped: jax.Array = jax.lax.reshape(x, shape, out_sharding=sharding)
    return reshaped
