"""The two passes of ring attention on each device.

Device i of n keeps its queries. The keys and values go around the ring: at step t, it has block
(i - t) mod n of them. For n = 4::

    step       0    1    2    3
    device 0   b0   b3   b2   b1
    device 1   b1   b0   b3   b2      one `ppermute` of keys and values in each step but the last,
    device 2   b2   b1   b0   b3      for the next one
    device 3   b3   b2   b1   b0

Each block is added to a running softmax, and in the backward pass keys, values and their gradients
go around once more. ``blocks.py`` has the formulas, and cuts what a device has of queries and keys
into smaller blocks, so that scores take as little memory as in attention on one device.

**Bytes.** A device with L bytes of keys and values sends ``(n - 1) L`` forward. Backward it sends
as much again, and n times their gradients, which are in float32.

The ring is that of Liu et al., 2023 (arXiv:2310.01889).

**Memory.** Parts are read, and their sums are written, where they are in the arrays of the device,
and the loop over steps updates these in place. Copies of parts took 176 MiB of 1,060 (32 heads,
8,192 tokens on a device), and left gaps between arrays.

**Skipping.** Where positions are known for all rows, queries and blocks are halves, and a pair of
halves is computed only if a query may attend to a key (:func:`may_attend`).

In comments, and in the formulas of products: b is the batch, q queries, s keys, k key heads, g the
group of heads that one key head serves, d features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .blocks import (
    Block,
    Gradients,
    Marks,
    Pair,
    Part,
    QueryGradients,
    Rule,
    Softmax,
    Visibility,
    add_gradients_in_blocks,
    add_in_blocks,
    delta_of,
    group_heads,
    may_attend,
    ungroup_heads,
    wide_dtype,
)
from .layout import Layout

_Index: TypeAlias = int | jax.Array  # of a part
_State = TypeVar("_State", Softmax, Gradients)
_Queries = TypeVar("_Queries", jax.Array, QueryGradients)


class Ring(NamedTuple):
    """The options of a call, which are hashable.

    Attributes:
      layout: the mesh axes; those of the sequence are the ring.
      rule: the options of attention.
      is_even: whether attention is causal, with positions in the balanced order.
    """

    layout: Layout
    rule: Rule
    is_even: bool

    @property
    def size(self) -> int:
        """The devices of the ring."""
        return self.layout.count(self.layout.sequence)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    ring: Ring, query: jax.Array, key: jax.Array, value: jax.Array, marks: Marks, seen: Visibility
) -> jax.Array:
    """Computes attention of queries to keys and values that the ring shards along the sequence.

    Args:
      ring: the options.
      query: (b, queries, heads, d).
      key: (b, keys, key heads, d).
      value: (b, keys, key heads, features of values).
      marks: what is known of the keys.
      seen: what queries see.

    Returns:
      The outputs, (b, queries, heads, features of values).
    """
    out, _ = _forward(ring, query, key, value, marks, seen)
    return out


def _forward(
    ring: Ring, query: jax.Array, key: jax.Array, value: jax.Array, marks: Marks, seen: Visibility
) -> tuple[jax.Array, Any]:
    tokens, lse_spec, marks_spec, seen_spec = _specs(ring, marks, seen)
    in_specs = tokens, tokens, tokens, marks_spec, seen_spec
    run = ring.layout.map(functools.partial(_local_forward, ring), in_specs, (tokens, lse_spec))
    out, lse = run(query, key, value, marks, seen)
    return out, (query, key, value, marks, seen, out, lse)


def _backward(ring: Ring, kept: tuple[Any, ...], d_out: jax.Array) -> tuple[Any, ...]:
    tokens, lse_spec, marks_spec, seen_spec = _specs(ring, *kept[3:5])
    in_specs = (tokens, tokens, tokens, marks_spec, seen_spec, tokens, lse_spec), tokens
    run = ring.layout.map(functools.partial(_local_backward, ring), in_specs, (tokens,) * 3)
    return *run(kept, d_out), None, None


attend.defvjp(_forward, _backward)


def _specs(ring: Ring, marks: Marks, seen: Visibility) -> tuple[P, P, Marks, Visibility]:
    """Returns the specs of tokens, (b, tokens, heads, d), of `lse`, bkgq, and of the others."""
    layout, axes = ring.layout, ring.layout.sequence
    tokens = layout.tokens(axes)
    batch, sequence, heads = tokens
    lse = P(batch, heads, None, sequence)
    return tokens, lse, layout.marks(marks, axes), layout.seen(seen, axes)


def _local_forward(
    ring: Ring, query: jax.Array, key: jax.Array, value: jax.Array, marks: Marks, seen: Visibility
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs of the queries of a device, bqhd, and their log-sum-exp, bkgq."""
    # JAX would compute what depends on positions alone before a loop over layers, and keep the
    # masks of all blocks: 86 GiB in place of 9.5 for two layers of 131,072 tokens.
    whole = query, key, value, marks, seen
    query, key, value, marks, seen = jax.lax.optimization_barrier(whole)
    grouped = group_heads(query, key.shape[2])  # bqkgd

    def add_block(state: Any, block: Block, step: Any, **which: bool) -> Any:
        softmax, query = state
        new = _add_pairs(ring, add_in_blocks, softmax, query, block, seen, step, **which)
        return new, block

    state = Softmax.of_nothing(grouped, value.shape[-1]), grouped
    (softmax, _), _ = _go_around(ring, add_block, state, Block(key, value, marks))
    out, lse = softmax.results()
    return ungroup_heads(jnp.moveaxis(out, 3, 1)).astype(query.dtype), lse  # bkgqd → bqkgd → bqhd


def _local_backward(ring: Ring, kept: tuple[Any, ...], d_out: jax.Array) -> tuple[Any, ...]:
    """Returns the gradients of the queries, keys and values of a device."""
    query, key, value, marks, seen, out, lse = kept
    wide, key_heads = wide_dtype(query), key.shape[2]
    grouped, d_grouped = group_heads(query, key_heads), group_heads(d_out, key_heads)  # bqkgd
    queries = QueryGradients(grouped, d_grouped, lse, delta_of(out, d_out, key_heads))

    def add_block(state: Any, moving: Any, step: Any, **which: bool) -> Any:
        (d_query, queries), (block, d_key, d_value) = state, moving
        old, add = Gradients(d_query, d_key, d_value), add_gradients_in_blocks
        new, queries = _add_pairs(ring, add, old, queries, block, seen, step, **which)
        return (new.query, queries), (block, new.key, new.value)

    d_query, d_key, d_value = (jnp.zeros_like(x, wide) for x in (grouped, key, value))
    moving = Block(key, value, marks), d_key, d_value
    (d_query, _), (_, *d_block) = _go_around(ring, add_block, (d_query, queries), moving)
    d_key, d_value = ring.layout.next_device(d_block)  # back to where the block started
    scale, dtype = ring.rule.scale, query.dtype
    return tuple(x.astype(dtype) for x in (ungroup_heads(d_query) * scale, d_key * scale, d_value))


def _go_around(
    ring: Ring, add_block: Callable[..., tuple[Any, Any]], state: Any, moving: Any
) -> tuple[Any, Any]:
    """Adds each block of the ring to a state.

    Args:
      ring: the options.
      add_block: ``add_block(state, moving, step, is_extra=)`` returns both, with what the pairs of
        a step add (:func:`_add_pairs`).
      state: what stays on a device.
      moving: what moves.
    """

    def body(carry: Any, step: jax.Array) -> Any:
        state, moving = add_block(*carry, step, is_extra=False)
        # Last, so that nothing has to keep the place from which arrays move, while pairs are added.
        return (state, ring.layout.next_device(moving)), None

    carry = state, moving
    if ring.is_even:
        carry = add_block(*carry, 0, is_extra=True)
    carry, _ = jax.lax.scan(body, carry, jnp.arange(ring.size - 1))
    return add_block(*carry, ring.size - 1, is_extra=False)


def _add_pairs(
    ring: Ring,
    add_pair: Callable[..., _State],
    state: _State,
    queries: _Queries,
    block: Block,
    seen: Visibility,
    step: int | jax.Array,
    *,
    is_extra: bool,
) -> tuple[_State, _Queries]:
    """Adds the pairs of a part of the queries and a part of the block that may attend.

    Args:
      ring: the options.
      add_pair: `add_in_blocks` or `add_gradients_in_blocks`.
      state: what it adds to.
      queries: what it takes of the queries.
      block: the keys.
      seen: what the queries see.
      step: how far the block has come.
      is_extra: whether to add that pair of the own block, in the balanced order, which no other
        block has.

    Returns:
      The new state, and the queries for the next step.
    """
    first_key = (ring.layout.device_index() - step) % ring.size * block.key.shape[1]
    count = _num_parts(seen, block)
    num_queries, num_keys = (jax.tree.leaves(x)[0].shape[1] for x in (queries, block))

    def part(index: _Index, length: int) -> Part:
        return Part(index * (length // count), length // count)

    def add(i: _Index, j: _Index, state: _State, queries: _Queries, block: Block) -> _State:
        pair = Pair(part(i, num_queries), part(j, num_keys))
        return add_pair(ring.rule, state, queries, block, seen, first_key, pair)

    mine, theirs = seen.marks.positions, block.marks.positions
    pairs: list[tuple[_Index, _Index]] = [(i, j) for j in range(count) for i in range(count)]
    # In the balanced order a device has chunks i and 2n - 1 - i, so which pairs are visible does
    # not have to be found out: with its own block 3 of 4, with any other one 2 of 4.
    if ring.is_even:
        index = jnp.where(theirs[0] < mine[0], 0, 1)  # type: ignore[index]
        pairs = [(0, 0)] if is_extra else [(1, 0), (index, index)]
    for i, j in pairs:
        # The scores of a pair need no other pair, so the compiler would compute those of all pairs
        # at once: 3 × 128 MiB in place of one, for 32 heads and blocks of 1,024 tokens.
        #
        # The next pair, or step, reads what the barrier returns of the queries. Else the compiler,
        # which gives arrays in a loop a layout of its own, also keeps them as they are before it:
        # 128 MiB more, for 8,192 tokens on a device. (Of the block too, the allocator of v5e leaves
        # a gap of 80 MiB for 2,048 tokens.)
        carry = jax.lax.optimization_barrier((state, queries, block))
        _, queries, _ = carry
        run = functools.partial(add, i, j)
        if ring.is_even or mine is None or theirs is None or mine.ndim > 1:
            state = run(*carry)
            continue
        of_parts = part(i, mine.size).slice(mine, 0), part(j, theirs.size).slice(theirs, 0)
        is_visible = may_attend(ring.rule, *of_parts)
        state = jax.lax.cond(is_visible, run, lambda state, *_: state, *carry)
    return state, queries


def _num_parts(seen: Visibility, block: Block) -> int:
    """In how many parts blocks are: halves, if positions may say that some are hidden."""
    positions = seen.marks.positions
    if positions is None or positions.ndim > 1:
        return 1
    return 2 if positions.size % 2 == 0 and block.key.shape[1] % 2 == 0 else 1
