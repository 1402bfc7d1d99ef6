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

Words from there: the *rule* has the options, such as causal; the *info* of tokens are their
positions and the like; the *visibility* has what decides to which keys queries attend. Letters are
dimensions: b the batch, q queries, s keys, k key heads, g the group of heads that one key head
serves, h = k g, d features. Queries are bqkgd, keys and values bskd, ``lse`` and ``delta`` bkgq.

**Skipping.** Where positions are known for all rows, queries and blocks are halves, and a pair of
halves is computed only if a query may attend to a key (:func:`may_attend`).

**Bytes.** A device with L bytes of keys and values sends ``(n - 1) L`` forward. Backward it sends
as much again, and n times their gradients, which are in float32.

**Memory.** Parts are read, and their sums are written, where they are in the arrays of the device,
and the loop over steps updates these in place. Copies of parts took 176 MiB of 1,060 (32 heads,
8,192 tokens on a device), and left gaps between arrays.

The ring is that of Liu et al., 2023 (arXiv:2310.01889).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .blocks import (
    AttentionArrays,
    BackwardQueries,
    Block,
    Gradients,
    Pair,
    Residuals,
    Rule,
    Softmax,
    TokenInfo,
    TokenRange,
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

_Index: TypeAlias = int | jax.Array  # of a step, or of a half
_State = TypeVar("_State", Softmax, Gradients)
_Queries = TypeVar("_Queries", jax.Array, BackwardQueries)


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
def attend(ring: Ring, arrays: AttentionArrays) -> jax.Array:
    """Computes attention of queries to keys and values that the ring shards along the sequence.

    Returns:
      The outputs, (b, queries, heads, features of values).
    """
    out, _ = _forward(ring, arrays)
    return out


def _forward(ring: Ring, arrays: AttentionArrays) -> tuple[jax.Array, Residuals]:
    """Is the forward rule: maps :func:`_local_forward` over the devices."""
    specs = _specs(ring, arrays)
    run = ring.layout.map(
        functools.partial(_local_forward, ring),
        in_specs=(specs.arrays,),
        out_specs=(specs.out, specs.lse),
    )
    out, lse = run(arrays)
    return out, Residuals(arrays, out, lse)


def _backward(ring: Ring, residuals: Residuals, d_out: jax.Array) -> tuple[AttentionArrays]:
    """Is the backward rule: returns the gradients of the arrays; None for what has none."""
    specs = _specs(ring, residuals.arrays)
    run = ring.layout.map(
        functools.partial(_local_backward, ring),
        in_specs=(specs, specs.out),
        out_specs=specs.arrays[:3],
    )
    d_query, d_key, d_value = run(residuals, d_out)
    return (AttentionArrays(d_query, d_key, d_value, None, None),)  # type: ignore[arg-type]


attend.defvjp(_forward, _backward)


def _specs(ring: Ring, arrays: AttentionArrays) -> Residuals:
    """Returns the specs of the arrays, the outputs and the log-sum-exp, in their places."""
    layout, axes = ring.layout, ring.layout.sequence
    specs: Any = layout.array_specs(arrays, query_axes=axes, key_axes=axes)
    batch, sequence, heads = specs.query
    lse: Any = P(batch, heads, None, sequence)  # bkgq
    return Residuals(specs, specs.query, lse)


def _local_forward(ring: Ring, arrays: AttentionArrays) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs of the queries of a device, bqhd, and their log-sum-exp, bkgq."""
    # JAX would compute what depends on positions alone before a loop over layers, and keep the
    # masks of all blocks: 86 GiB in place of 9.5 for two layers of 131,072 tokens.
    arrays = jax.lax.optimization_barrier(arrays)
    query, key, value, key_info, visibility = arrays
    grouped = group_heads(query, key.shape[2])  # bqkgd

    def add_block(state: Any, moving: Any, step: _Index, *, is_extra: bool) -> Any:
        softmax, query = state
        block = _arrived_block(ring, step, *moving)
        state = _add_pairs(
            ring, add_in_blocks, softmax, query, block, visibility, is_extra=is_extra
        )
        return state, moving

    state = Softmax.of_nothing(grouped, value.shape[-1]), grouped
    (softmax, _), _ = _go_around(ring, add_block, state, (key, value, key_info))
    out, lse = softmax.results()
    return ungroup_heads(jnp.moveaxis(out, 3, 1)).astype(query.dtype), lse  # bkgqd → bqkgd → bqhd


def _local_backward(
    ring: Ring, residuals: Residuals, d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of the queries, keys and values of a device."""
    (query, key, value, key_info, visibility), out, lse = residuals
    wide, key_heads = wide_dtype(query), key.shape[2]
    grouped, d_grouped = group_heads(query, key_heads), group_heads(d_out, key_heads)  # bqkgd
    queries = BackwardQueries(grouped, d_grouped, lse, delta_of(out, d_out, key_heads))

    def add_block(state: Any, moving: Any, step: _Index, *, is_extra: bool) -> Any:
        # The gradients of keys move with the keys: each device adds what its queries cause.
        (d_query, queries), (keys, d_key, d_value) = state, moving
        block = _arrived_block(ring, step, *keys)
        old = Gradients(d_query, d_key, d_value)
        new, queries = _add_pairs(
            ring, add_gradients_in_blocks, old, queries, block, visibility, is_extra=is_extra
        )
        return (new.query, queries), (keys, new.key, new.value)

    d_query, d_key, d_value = (jnp.zeros_like(x, wide) for x in (grouped, key, value))
    moving = (key, value, key_info), d_key, d_value
    (d_query, _), (_, *d_block) = _go_around(ring, add_block, (d_query, queries), moving)
    d_key, d_value = ring.layout.next_device(d_block)  # back to where the block started
    scale, dtype = ring.rule.scale, query.dtype
    d_query, d_key = ungroup_heads(d_query) * scale, d_key * scale
    return d_query.astype(dtype), d_key.astype(dtype), d_value.astype(dtype)


def _arrived_block(
    ring: Ring, step: _Index, key: jax.Array, value: jax.Array, info: TokenInfo
) -> Block:
    """Returns the block that a device has at a step: of device i the block i - step."""
    number = (ring.layout.device_index() - step) % ring.size
    return Block(key, value, info, first=number * key.shape[1])


def _go_around(
    ring: Ring, add_block: Callable[..., tuple[Any, Any]], state: Any, moving: Any
) -> tuple[Any, Any]:
    """Adds each block of the ring to a state.

    Args:
      ring: the options.
      add_block: ``add_block(state, moving, step, is_extra=)`` adds a step's pairs
        (:func:`_add_pairs`), and returns state and moving, new.
      state: what stays on a device.
      moving: what moves: the block, and in the backward pass its gradients.
    """

    def run_step(carry: Any, step: jax.Array) -> Any:
        state, moving = add_block(*carry, step, is_extra=False)
        # Last, so that nothing has to keep the place from which arrays move, while pairs are added.
        return (state, ring.layout.next_device(moving)), None

    carry = state, moving
    if ring.is_even:  # a device has one more pair with its own block than with any other one
        carry = add_block(*carry, 0, is_extra=True)
    carry, _ = jax.lax.scan(run_step, carry, jnp.arange(ring.size - 1))
    return add_block(*carry, ring.size - 1, is_extra=False)


def _add_pairs(
    ring: Ring,
    add_pair: Callable[..., _State],
    state: _State,
    queries: _Queries,
    block: Block,
    visibility: Visibility,
    *,
    is_extra: bool,
) -> tuple[_State, _Queries]:
    """Adds the pairs of a half of the queries and a half of the block that may attend.

    Args:
      ring: the options.
      add_pair: `add_in_blocks` or `add_gradients_in_blocks`.
      state: what it adds to.
      queries: what it takes of the queries.
      block: the keys.
      visibility: that of the queries.
      is_extra: whether to add only that pair of the own block, in the balanced order, which no
        other block has.

    Returns:
      The new state, and the queries for the next step.
    """
    count = _num_parts(visibility, block)
    num_queries = jax.tree.leaves(queries)[0].shape[1]  # bqkgd
    num_keys = block.key.shape[1]

    def half(index: _Index, length: int) -> TokenRange:
        return TokenRange(index * (length // count), length // count)

    def add(i: _Index, j: _Index, state: _State, queries: _Queries, block: Block) -> _State:
        pair = Pair(half(i, num_queries), half(j, num_keys))
        return add_pair(ring.rule, state, queries, block, visibility, pair)

    query_positions, key_positions = visibility.query_info.positions, block.info.positions
    # Whether it is known here, and not only in a call, which pairs have to be added.
    is_known = query_positions is None or key_positions is None or query_positions.ndim > 1
    pairs: list[tuple[_Index, _Index]] = [(i, j) for j in range(count) for i in range(count)]
    if ring.is_even:
        # In the balanced order a device has chunks i and 2n - 1 - i, so which pairs are visible
        # does not have to be found out: with its own block 3 of 4, with any other one 2 of 4.
        is_known = True
        is_earlier = key_positions[0] < query_positions[0]  # type: ignore[index]
        index = jnp.where(is_earlier, 0, 1)
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
        if is_known:
            state = run(*carry)
            continue
        is_visible = may_attend(
            ring.rule,
            half(i, num_queries).slice(query_positions, 0),  # type: ignore[arg-type]
            half(j, num_keys).slice(key_positions, 0),  # type: ignore[arg-type]
        )
        state = jax.lax.cond(is_visible, run, lambda state, *_: state, *carry)
    return state, queries


def _num_parts(visibility: Visibility, block: Block) -> int:
    """In how many parts blocks are: halves, if positions may say that some are hidden; else 1."""
    positions = visibility.query_info.positions
    if positions is None or positions.ndim > 1:
        return 1
    return 2 if positions.size % 2 == 0 and block.key.shape[1] % 2 == 0 else 1
