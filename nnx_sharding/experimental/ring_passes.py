"""The two passes of ring attention on each device.

Device i of n keeps its queries. The keys and values go around the ring: at step t, it has block
(i - t) mod n of them. For n = 4::

    step       0    1    2    3
    device 0   b0   b3   b2   b1
    device 1   b1   b0   b3   b2      one `ppermute` of keys and values before each step but
    device 2   b2   b1   b0   b3      the first
    device 3   b3   b2   b1   b0

Each block is added to a running softmax, and in the backward pass keys, values and their gradients
go around once more. ``blocks.py`` has the formulas, and cuts what a device has of queries and keys
into smaller blocks, so that scores take as little memory as in attention on one device.

**Bytes.** A device with L bytes of keys and values sends ``(n - 1) L`` forward. Backward it sends
as much again, and n times their gradients, which are in float32.

The ring is that of Liu et al., 2023 (arXiv:2310.01889).

**Skipping.** Where positions are known for all rows, queries and blocks are halves, and a pair of
halves is computed only if a query may attend to a key (:func:`may_attend`).

In comments, and in the formulas of products: b is the batch, q queries, s keys, k key heads, g the
group of heads that one key head serves, d features.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .blocks import (
    Block,
    Gradients,
    Marks,
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

# The index of one of two parts, or whether it is the first, if only the device knows.
_Which: TypeAlias = int | jax.Array


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
    grouped, count = group_heads(query, key.shape[2]), _num_parts(seen)  # bqkgd
    queries = [*zip(jnp.split(grouped, count, 1), _split_seen(seen, count), strict=True)]

    def add_pair(state: Softmax, _: Any, own: Any, block: Block, first_key: Any) -> Any:
        part, part_seen = own
        return add_in_blocks(ring.rule, state, part, block, part_seen, first_key), None

    def add_block(states: list[Softmax], moving: Block, step: Any) -> Any:
        nothing = [None] * count
        blocks = _split_block(moving, count)
        states, _ = _add_pairs(ring, step, add_pair, queries, blocks, (states, nothing))
        return states, moving

    states = [Softmax.of_nothing(part, value.shape[-1]) for part, _ in queries]
    states, _ = _go_around(ring, add_block, states, Block(key, value, marks))
    softmax = Softmax(*(jnp.concatenate(x, 3) for x in zip(*states, strict=True)))
    out, lse = softmax.results()
    return ungroup_heads(jnp.moveaxis(out, 3, 1)).astype(query.dtype), lse  # bkgqd → bqkgd → bqhd


def _local_backward(ring: Ring, kept: tuple[Any, ...], d_out: jax.Array) -> tuple[Any, ...]:
    """Returns the gradients of the queries, keys and values of a device."""
    query, key, value, marks, seen, out, lse = kept
    wide, key_heads, count = wide_dtype(query), key.shape[2], _num_parts(seen)
    grouped, d_grouped = group_heads(query, key_heads), group_heads(d_out, key_heads)  # bqkgd
    arrays = grouped, d_grouped, lse, delta_of(out, d_out, key_heads)
    split = (jnp.split(x, count, axis) for x, axis in zip(arrays, (1, 1, 3, 3), strict=True))
    parts = [QueryGradients(*x) for x in zip(*split, strict=True)]
    queries = [*zip(parts, _split_seen(seen, count), strict=True)]

    def add_pair(d_query: jax.Array, d_block: Any, own: Any, block: Block, first_key: Any) -> Any:
        part, part_seen = own
        start = Gradients(d_query, *d_block)
        new = add_gradients_in_blocks(ring.rule, start, part, block, part_seen, first_key)
        return new.query, (new.key, new.value)

    def add_block(d_queries: list[jax.Array], moving: Any, step: Any) -> Any:
        block, d_key, d_value = moving
        d_blocks = [*zip(jnp.split(d_key, count, 1), jnp.split(d_value, count, 1), strict=True)]
        states, blocks = (d_queries, d_blocks), _split_block(block, count)
        d_queries, d_blocks = _add_pairs(ring, step, add_pair, queries, blocks, states)
        d_key, d_value = (jnp.concatenate(x, 1) for x in zip(*d_blocks, strict=True))
        return d_queries, (block, d_key, d_value)

    d_query, d_key, d_value = (jnp.zeros_like(x, wide) for x in (grouped, key, value))
    moving = Block(key, value, marks), d_key, d_value
    d_queries, moving = _go_around(ring, add_block, jnp.split(d_query, count, 1), moving)
    _, d_key, d_value = ring.layout.next_device(moving)  # back to where the block started
    scale, dtype = ring.rule.scale, query.dtype
    d_query = ungroup_heads(jnp.concatenate(d_queries, 1)) * scale
    return tuple(x.astype(dtype) for x in (d_query, d_key * scale, d_value))


def _num_parts(seen: Visibility) -> int:
    """In how many parts blocks are: halves, if positions may say that some are hidden."""
    positions = seen.marks.positions
    return 2 if positions is not None and positions.ndim == 1 and positions.size % 2 == 0 else 1


def _split_marks(marks: Marks, count: int) -> list[Marks]:
    """Splits what is known of tokens, which are the last dimension."""
    split = ([None] * count if x is None else jnp.split(x, count, -1) for x in marks)
    return [Marks(*x) for x in zip(*split, strict=True)]


def _split_seen(seen: Visibility, count: int) -> list[Visibility]:
    """Splits it along the queries."""
    masks = [seen.mask] * count
    if seen.mask is not None and seen.mask.shape[2] > 1:
        masks = [*jnp.split(seen.mask, count, 2)]
    pairs = zip(_split_marks(seen.marks, count), masks, strict=True)
    return [Visibility(marks, mask, seen.dropout) for marks, mask in pairs]


def _split_block(block: Block, count: int) -> list[Block]:
    """Splits it along the keys."""
    arrays = jnp.split(block.key, count, 1), jnp.split(block.value, count, 1)
    return [Block(*x) for x in zip(*arrays, _split_marks(block.marks, count), strict=True)]


def _go_around(
    ring: Ring, add_block: Callable[[Any, Any, Any], Any], state: Any, moving: Any
) -> tuple[Any, Any]:
    """Adds each block of the ring to a state: ``add_block(state, moving, step)`` returns both."""

    def body(carry: Any, step: jax.Array) -> Any:
        state, moving = carry
        return add_block(state, ring.layout.next_device(moving), step), None

    # The first step outside, as it needs no communication, and is known to be the own block.
    carry = add_block(state, moving, 0)
    carry, _ = jax.lax.scan(body, carry, jnp.arange(1, ring.size))
    return carry  # type: ignore[no-any-return]


def _add_pairs(
    ring: Ring,
    step: int | jax.Array,
    add_pair: Callable[..., tuple[Any, Any]],
    queries: Sequence[tuple[Any, Visibility]],
    blocks: Sequence[Block],
    states: tuple[list[Any], list[Any]],
) -> tuple[list[Any], list[Any]]:
    """Adds the pairs of a part of the queries and a part of the block that may attend.

    Args:
      ring: the options.
      step: how far the block has come.
      add_pair: takes the states of a part of the queries and of a part of the block, both parts,
        and the number of the first key in that; returns both states.
      queries: the parts of the queries, with what they see.
      blocks: the parts of the block.
      states: those of all parts of the queries, and of all parts of the block.
    """
    number = (ring.layout.device_index() - step) % ring.size  # of the block
    length = blocks[0].key.shape[1]

    def add(i: _Which, j: _Which, states: tuple[list[Any], list[Any]]) -> Any:
        part = j if isinstance(j, int) else jnp.where(j, 0, 1)
        first_key = (number * len(blocks) + part) * length
        both = _select(queries, i), _select(blocks, j)
        # The scores of a pair need no other pair, so the compiler would compute those of all pairs
        # at once: 3 × 128 MiB in place of one, for 32 heads and blocks of 1,024 tokens.
        (of_queries, of_blocks), both = jax.lax.optimization_barrier((states, both))
        chosen = _select(of_queries, i), _select(of_blocks, j)
        new_query, new_block = add_pair(*chosen, *both, first_key)
        return _replace(of_queries, i, new_query), _replace(of_blocks, j, new_block)

    positions = [seen.marks.positions for _, seen in queries]
    # In the balanced order a device has chunks i and 2n - 1 - i, so which pairs are visible does
    # not have to be found out: with its own block 3 of 4, with any other one 2 of 4.
    if ring.is_even and isinstance(step, int):
        return add(1, 1, add(1, 0, add(0, 0, states)))  # type: ignore[no-any-return]
    if ring.is_even:
        first_keys, first_queries = blocks[0].marks.positions, positions[0]
        is_before = first_keys[0] < first_queries[0]  # type: ignore[index]
        return add(is_before, is_before, add(1, 0, states))  # type: ignore[no-any-return]
    for j, i in itertools.product(range(len(blocks)), range(len(queries))):
        mine, theirs = positions[i], blocks[j].marks.positions
        run = functools.partial(add, i, j)
        if mine is None or theirs is None or mine.ndim > 1:
            states = run(states)
        else:
            states = jax.lax.cond(may_attend(ring.rule, mine, theirs), run, lambda x: x, states)
    return states


# With a conditional in place of this choice, the compiler for TPUs fails on long sequences (jax
# 0.12, "overlaps with").
def _select(parts: Sequence[Any], which: _Which) -> Any:
    if isinstance(which, int):
        return parts[which]
    return jax.tree.map(functools.partial(jnp.where, which), *parts)


def _replace(parts: Sequence[Any], which: _Which, new: Any) -> list[Any]:
    if isinstance(which, int):
        return [*parts[:which], new, *parts[which + 1 :]]
    first, second = parts
    return [_select((new, first), which), _select((second, new), which)]
