"""The two passes of ring attention on each device.

Device i of n keeps its queries. The keys and values go around the ring: at step t, it has block
(i - t) mod n of them. For n = 4::

    step       0    1    2    3
    device 0   b0   b3   b2   b1
    device 1   b1   b0   b3   b2      one `ppermute` of keys and values in each step but the last,
    device 2   b2   b1   b0   b3      for the next one
    device 3   b3   b2   b1   b0

What stays on a device is the *state*: the running softmax of its queries forward, their gradient
backward. What is *moving* is the block, and backward the gradients of its keys and values, to which
each device adds what its queries cause. ``blocks.py`` has the formulas, and cuts what a device has
into smaller blocks, so that scores take as little memory as in attention on one device.

Words from ``blocks.py``: the *rule* has the options, such as causal; the *info* of tokens are their
positions and the like; the *visibility* has what decides to which keys queries attend. Letters are
dimensions: b the batch, q queries, s keys, k key heads, g the group of heads that one key head
serves, h = k g, d features. Queries are bqkgd, keys and values bskd, ``lse`` and ``delta`` bkgq.
`group_heads` turns bqhd into bqkgd, `ungroup_heads` turns it back. `add_in_blocks` adds a pair of
ranges of queries and keys to the softmax, `add_gradients_in_blocks` adds a pair to the gradients.

**Skipping.** Where positions are known for all rows, the queries and keys of a device are cut into
halves, and a pair of halves is computed only if a query may attend to a key (:func:`may_attend`).

**Balanced order.** Of 2 n chunks of the sequence, device i has chunk i as its first half, and chunk
2 n - 1 - i as its second half. So the numbers of the device and of the block tell which pairs of
halves (of queries, of keys) causal attention needs, and all devices have equally many pairs::

    block j < i, of earlier tokens    (1, 0)  (0, 0)
    block j > i, of later tokens      (1, 0)  (1, 1)
    block i, the device's own         (1, 0)  (1, 1)  (0, 0)     the last is its *extra pair*

**Bytes.** A device with L bytes of keys and values sends ``(n - 1) L`` in the forward pass. In the
backward pass it sends as much again, and n times the gradients of keys and values, in float32.

**Memory.** Halves are read, and their sums are written, where they are in the arrays of the device,
and the loop over steps updates these in place. Copies of halves took 176 MiB of 1,060 (32 heads,
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

_Index: TypeAlias = int | jax.Array  # the index of a step, or of a half
_Halves: TypeAlias = tuple[_Index, _Index]  # (half of the queries, half of the keys)
_State = TypeVar("_State", Softmax, Gradients)  # forward, backward
_Queries = TypeVar("_Queries", jax.Array, BackwardQueries)  # forward, backward


class Ring(NamedTuple):
    """The options of a call, which are hashable.

    Attributes:
      layout: the mesh axes; those of the sequence are the ring.
      rule: the options of attention.
      is_balanced: whether the table of the balanced order says which pairs are needed: attention is
        causal, without a window, and tokens are in that order.
    """

    layout: Layout
    rule: Rule
    is_balanced: bool

    @property
    def size(self) -> int:
        """The number of devices in the ring."""
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
    """The forward rule of :func:`attend`: runs :func:`_local_forward` on each device.

    Returns:
      The outputs, and the residuals for :func:`_backward`.
    """
    specs = _specs(ring, arrays)
    run = ring.layout.map(  # a `shard_map`
        functools.partial(_local_forward, ring),
        in_specs=(specs.arrays,),
        out_specs=(specs.out, specs.lse),
    )
    out, lse = run(arrays)
    return out, Residuals(arrays, out, lse)


def _backward(ring: Ring, residuals: Residuals, d_out: jax.Array) -> tuple[AttentionArrays]:
    """The backward rule of :func:`attend`: runs :func:`_local_backward` on each device.

    Returns:
      A tuple of the gradient of the only differentiable argument, the arrays.
    """
    specs = _specs(ring, residuals.arrays)
    run = ring.layout.map(
        functools.partial(_local_backward, ring),
        in_specs=(specs, specs.out),  # the specs of the residuals and of `d_out`
        out_specs=(specs.arrays.query, specs.arrays.key, specs.arrays.value),
    )
    d_query, d_key, d_value = run(residuals, d_out)
    # The infos and the visibility are integers and booleans, which have no gradients.
    return (AttentionArrays(d_query, d_key, d_value, None, None),)  # type: ignore[arg-type]


attend.defvjp(_forward, _backward)


def _specs(ring: Ring, arrays: AttentionArrays) -> Residuals:
    """Returns residuals that have the ``PartitionSpec`` of each array in its place."""
    layout, axes = ring.layout, ring.layout.sequence
    specs: Any = layout.array_specs(arrays, query_axes=axes, key_axes=axes)
    batch, sequence, heads = specs.query
    lse: Any = P(batch, heads, None, sequence)  # bkgq
    return Residuals(specs, specs.query, lse)


def _local_forward(ring: Ring, arrays: AttentionArrays) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs of the queries of a device, bqhd, and their log-sum-exp, bkgq."""
    # Without a barrier, JAX computes what depends on positions alone before a loop over layers, and
    # keeps the masks of all blocks: 86 GiB instead of 9.5 GiB for two layers of 131,072 tokens.
    arrays = jax.lax.optimization_barrier(arrays)
    query, key, value, key_info, visibility = arrays
    grouped = group_heads(query, key.shape[2])  # bqkgd

    def add_block(state: Any, moving: Any, step: _Index, *, only_extra_pair: bool) -> Any:
        # The queries are part of the state, because each step has to read the queries that
        # `_add_pairs` of the step before returned (see the barrier there).
        softmax, queries = state
        new_state = _add_pairs(
            ring,
            add_in_blocks,
            softmax,
            queries,
            _arrived_block(ring, step, *moving),
            visibility,
            only_extra_pair=only_extra_pair,
        )
        return new_state, moving

    state = Softmax.of_nothing(grouped, value.shape[-1]), grouped
    (softmax, _), _ = _add_all_blocks(ring, add_block, state, moving=(key, value, key_info))
    out, lse = softmax.results()  # bkgqd, bkgq
    out = jnp.moveaxis(out, 3, 1)  # bqkgd
    return ungroup_heads(out).astype(query.dtype), lse


def _local_backward(
    ring: Ring, residuals: Residuals, d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of the queries, keys and values of a device, in their shapes."""
    (query, key, value, key_info, visibility), out, lse = residuals
    wide, key_heads = wide_dtype(query), key.shape[2]
    grouped, d_grouped = group_heads(query, key_heads), group_heads(d_out, key_heads)  # bqkgd
    queries = BackwardQueries(grouped, d_grouped, lse, delta_of(out, d_out, key_heads))

    def add_block(state: Any, moving: Any, step: _Index, *, only_extra_pair: bool) -> Any:
        # The queries are part of the state, as in `_local_forward`. Gradients of keys and values
        # move with their block.
        (d_query, queries), (keys, d_key, d_value) = state, moving
        gradients, queries = _add_pairs(
            ring,
            add_gradients_in_blocks,
            Gradients(d_query, d_key, d_value),
            queries,
            _arrived_block(ring, step, *keys),
            visibility,
            only_extra_pair=only_extra_pair,
        )
        return (gradients.query, queries), (keys, gradients.key, gradients.value)

    d_query, d_key, d_value = (jnp.zeros_like(x, wide) for x in (grouped, key, value))
    moving = (key, value, key_info), d_key, d_value
    (d_query, _), (_, *d_block) = _add_all_blocks(ring, add_block, (d_query, queries), moving)
    # After n - 1 moves, block i + 1 is on device i. One more move brings its gradients home.
    d_key, d_value = ring.layout.next_device(d_block)
    # The sums lack the factor ``scale`` of queries and keys (see `Gradients`).
    scale, dtype = ring.rule.scale, query.dtype
    d_query, d_key = ungroup_heads(d_query) * scale, d_key * scale
    return d_query.astype(dtype), d_key.astype(dtype), d_value.astype(dtype)


def _arrived_block(
    ring: Ring, step: _Index, key: jax.Array, value: jax.Array, info: TokenInfo
) -> Block:
    """Returns the block that a device has at a step: device i has block ``i - step``."""
    number = (ring.layout.device_index() - step) % ring.size
    return Block(key, value, info, first=number * key.shape[1])


def _add_all_blocks(
    ring: Ring, add_block: Callable[..., tuple[Any, Any]], state: Any, moving: Any
) -> tuple[Any, Any]:
    """Adds the block of each step to a state, and moves blocks around the ring between steps.

    Args:
      add_block: called as ``add_block(state, moving, step, only_extra_pair=)``, adds the pairs of a
        step (:func:`_add_pairs`), and returns the new state and the new ``moving``.
      moving: what moves: the block, and in the backward pass the gradients of its keys and values.

    Returns:
      The state, and what was moving, as it is on each device after the last step.
    """

    def run_step(carry: Any, step: jax.Array) -> Any:
        state, moving = add_block(*carry, step, only_extra_pair=False)
        # The block is sent after its pairs were added. If it were sent before, two blocks would be
        # in memory meanwhile: the one that leaves and the one that arrives.
        return (state, ring.layout.next_device(moving)), None

    carry = state, moving
    if ring.is_balanced:
        # Only a device's own block has the extra pair, so it is added before the loop, whose steps
        # all do the same.
        carry = add_block(*carry, 0, only_extra_pair=True)
    carry, _ = jax.lax.scan(run_step, carry, jnp.arange(ring.size - 1))
    return add_block(*carry, ring.size - 1, only_extra_pair=False)  # after it, nothing has to move


def _add_pairs(
    ring: Ring,
    add_pair: Callable[..., _State],
    state: _State,
    queries: _Queries,
    block: Block,
    visibility: Visibility,
    *,
    only_extra_pair: bool,
) -> tuple[_State, _Queries]:
    """Adds the pairs of a half of the queries and a half of the block that may attend.

    Args:
      add_pair: `add_in_blocks` or `add_gradients_in_blocks`, which returns the new state.
      state: the sums to which ``add_pair`` adds.
      queries: what ``add_pair`` needs of all queries of the device.
      block: the keys and values that the device has in this step.
      only_extra_pair: in the balanced order, whether to add only the extra pair; otherwise the
        other pairs are added.

    Returns:
      The new state; and the same queries, behind the barriers. The next step has to read these.
    """
    query_positions, key_positions = visibility.query_info.positions, block.info.positions
    num_queries, num_keys = jax.tree.leaves(queries)[0].shape[1], block.key.shape[1]  # bqkgd, bskd
    # Only positions that all rows of the batch share, (tokens,), can hide a whole pair. Without
    # such positions no pair can be skipped, so the tokens are not cut into halves.
    can_skip = query_positions is not None and query_positions.ndim == 1
    num_parts = 2 if can_skip and num_queries % 2 == 0 and num_keys % 2 == 0 else 1

    def part(index: _Index, length: int) -> TokenRange:
        return TokenRange(index * (length // num_parts), length // num_parts)

    def add(i: _Index, j: _Index, state: _State, queries: _Queries, block: Block) -> _State:
        pair = Pair(part(i, num_queries), part(j, num_keys))
        return add_pair(ring.rule, state, queries, block, visibility, pair)

    def keep(state: _State, *_: Any) -> _State:
        return state

    if ring.is_balanced:
        pairs = _balanced_pairs(query_positions, key_positions, only_extra_pair=only_extra_pair)
    else:
        pairs = [(i, j) for j in range(num_parts) for i in range(num_parts)]
    for i, j in pairs:
        # The scores of a pair need no other pair, so without a barrier the compiler computes the
        # scores of all pairs at once: 3 × 128 MiB instead of 128 MiB, for 32 heads and blocks of
        # 1,024 tokens.
        state, queries, block_behind = jax.lax.optimization_barrier((state, queries, block))
        # The next pair or step reads the queries from behind the barrier. Otherwise the compiler
        # keeps them in two layouts, that of the loop and that before the loop, which takes 128 MiB
        # more for 8,192 tokens on a device. The next pair reads the block from before the barrier,
        # because otherwise v5e leaves a gap of 80 MiB.
        add_this_pair = functools.partial(add, i, j)
        if ring.is_balanced or not can_skip:  # all pairs are needed
            state = add_this_pair(state, queries, block_behind)
            continue
        is_visible = may_attend(
            ring.rule,
            part(i, num_queries).slice(query_positions, 0),  # type: ignore[arg-type]
            part(j, num_keys).slice(key_positions, 0),  # type: ignore[arg-type]
        )
        state = jax.lax.cond(is_visible, add_this_pair, keep, state, queries, block_behind)
    return state, queries


def _balanced_pairs(
    query_positions: jax.Array | None, key_positions: jax.Array | None, *, only_extra_pair: bool
) -> list[_Halves]:
    """Returns the pairs that causal attention needs in the balanced order (table of the module).

    Args:
      query_positions: the positions of the device's queries, (tokens,).
      key_positions: the positions of the keys of the block, (tokens,).
      only_extra_pair: whether to return only the extra pair of the device's own block.
    """
    if only_extra_pair:
        return [(0, 0)]
    # The first halves are in the order of their devices, so the first positions tell whether the
    # block is of an earlier device. For the own block this is False.
    is_earlier = key_positions[0] < query_positions[0]  # type: ignore[index]
    half = jnp.where(is_earlier, 0, 1)
    return [(1, 0), (half, half)]
