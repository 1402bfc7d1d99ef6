"""The two passes of ring attention on each device: a running softmax, and its derivative.

Device i of n keeps its queries. The keys and values go around the ring: at step t, it has block
(i - t) mod n of them. For n = 4::

    step       0    1    2    3
    device 0   b0   b3   b2   b1
    device 1   b1   b0   b3   b2      one `ppermute` of keys and values before each step but
    device 2   b2   b1   b0   b3      the first
    device 3   b3   b2   b1   b0

**Forward.** Let ``s_j = scale · q · k_j`` be the scores of one query. Three numbers are kept of all
blocks so far: the largest score m (``row_max``), the sum l of ``exp(s_j - m)`` (``row_sum``), and
the vector o of ``exp(s_j - m) v_j``, summed (``out``). A block B updates them::

    m' = max(m, max_B s_j)
    l' = l · exp(m - m') + Σ_B exp(s_j - m')
    o' = o · exp(m - m') + Σ_B exp(s_j - m') v_j

At the end ``o / l`` is the output, and ``lse = m + log l`` (log-sum-exp) is kept for the backward
pass, as one number for each query.

**Backward.** Keys, values and their gradients go around once more; the scores are computed again::

    p_ij     = exp(s_ij - lse_i)                          the weights
    delta_i  = d_out_i · out_i                            = Σ_j p_ij (d_out_i · v_j)
    d_s_ij   = p_ij (d_out_i · v_j - delta_i)             the derivative of the softmax
    d_q_i    = scale Σ_j d_s_ij k_j
    d_k_j    = scale Σ_i d_s_ij q_i
    d_v_j    = Σ_i p_ij d_out_i

The ring is that of Liu et al., 2023 (arXiv:2310.01889); the running softmax is from Milakov and
Gimelshein, 2018 (arXiv:1805.02867); that only ``lse`` and ``delta`` are kept, from Dao, 2023
(arXiv:2307.08691).

**Skipping.** Where positions are known for all rows, queries and blocks are halves, and a pair of
halves is computed only if a query may attend to a key (:func:`may_attend`).

In comments, and in the formulas of products: b is the batch, q queries, s keys, k key heads, g the
group of heads that one key head serves, d features.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..core.constrain import mesh_in_trace, retype, type_mesh, type_spec
from ..specs.fitting import axes_of_type, pad_entries

# The index of one of two parts, or whether it is the first, if only the device knows.
_Which: TypeAlias = int | jax.Array


class Visibility(NamedTuple):
    """What decides to which keys queries may attend; each is None if it does not."""

    positions: jax.Array | None  # (queries,) or (b, queries)
    segments: jax.Array | None  # (b, queries)
    mask: jax.Array | None  # (b or 1, heads or 1, queries, all keys)

    def parts(self, count: int) -> list[Visibility]:
        """Splits it along the queries."""
        return [Visibility(*x) for x in _split(count, self, (-1, 1, 2))]


class Block(NamedTuple):
    """Keys and values that go around, and what belongs to them."""

    key: jax.Array  # bskd
    value: jax.Array  # bskd
    positions: jax.Array | None  # (s,) or (b, s)
    segments: jax.Array | None  # (b, s)

    def parts(self, count: int) -> list[Block]:
        """Splits it along the keys."""
        return [Block(*x) for x in _split(count, self, (1, 1, -1, 1))]


class Ring(NamedTuple):
    """The options of a call, which are hashable.

    Attributes:
      mesh: the mesh; None for one device.
      axis: the axis that shards the sequence.
      size: the devices along it.
      is_causal: whether queries attend only to keys at their own position and before.
      window: by how much positions have to differ less; None for any.
      scale: the factor of the scores.
      precision: of products.
      mapped_axes: over which the functions for each device are mapped.
      is_even: whether attention is causal, with positions in the balanced order.
    """

    mesh: Mesh | AbstractMesh | None
    axis: str
    size: int
    is_causal: bool
    window: int | None
    scale: float
    precision: Any
    mapped_axes: frozenset[Any]
    is_even: bool

    def map(self, fun: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Maps a function over the devices of the ring; specs have its axis only."""
        if self.mesh is None:
            return fun
        mesh = mesh_in_trace(self.mesh)
        run = jax.shard_map(
            fun,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=self.mapped_axes,
            check_vma=False,
        )
        if self.axis not in axes_of_type(mesh, AxisType.Explicit):
            return run

        def typed(x: jax.Array, spec: P) -> Any:
            """On Explicit axes, inputs need the type that the spec says along the sequence."""
            pairs = zip(
                pad_entries(spec, x.ndim), pad_entries(type_spec(x) or P(), x.ndim), strict=True
            )
            return retype(x, mesh, P(*(new or old for new, old in pairs)))

        return lambda *args: run(*jax.tree.map(typed, args, in_specs))

    def receive(self, tree: Any) -> Any:
        """Returns the arrays of the device before in the ring."""
        if self.mesh is None:
            return tree
        to_next = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.lax.ppermute(tree, self.axis, to_next)

    def device_index(self) -> Any:
        """The index of the device along the ring."""
        return 0 if self.mesh is None else jax.lax.axis_index(self.axis)

    def spec(self, x: Any, dimension: int) -> P | None:
        """Returns the spec of an array, None for none, whose dimension is the sequence."""
        return None if x is None else P(*[None] * dimension, self.axis)

    def visibility_specs(self, seen: Visibility) -> Visibility:
        """Returns the specs of what decides on visibility."""
        positions, segments, mask = seen
        dimension = 0 if positions is None else positions.ndim - 1
        specs = self.spec(positions, dimension), self.spec(segments, 1), self.spec(mask, 2)
        return Visibility(*specs)  # type: ignore[arg-type]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    ring: Ring, query: jax.Array, key: jax.Array, value: jax.Array, seen: Visibility
) -> jax.Array:
    """Computes attention of queries to keys and values that the ring shards along the sequence.

    Args:
      ring: the options.
      query: (b, queries, heads, d).
      key: (b, keys, key heads, d).
      value: (b, keys, key heads, features of values).
      seen: what queries see.

    Returns:
      The outputs, (b, queries, heads, features of values).
    """
    out, _ = _forward(ring, query, key, value, seen)
    return out


def _forward(
    ring: Ring, query: jax.Array, key: jax.Array, value: jax.Array, seen: Visibility
) -> tuple[jax.Array, Any]:
    rows, lse_spec = P(None, ring.axis), P(None, None, None, ring.axis)
    in_specs = rows, rows, rows, ring.visibility_specs(seen)
    run = ring.map(functools.partial(_local_forward, ring), in_specs, (rows, lse_spec))
    out, lse = run(query, key, value, seen)
    return out, (query, key, value, seen, out, lse)


def _backward(ring: Ring, kept: tuple[Any, ...], d_out: jax.Array) -> tuple[Any, ...]:
    rows, lse_spec = P(None, ring.axis), P(None, None, None, ring.axis)
    seen: Visibility = kept[3]
    in_specs = (rows, rows, rows, ring.visibility_specs(seen), rows, lse_spec), rows
    run = ring.map(functools.partial(_local_backward, ring), in_specs, (rows,) * 3)
    return *run(kept, d_out), None


attend.defvjp(_forward, _backward)


class _Softmax(NamedTuple):
    """The running softmax of some queries."""

    row_max: jax.Array  # bkgq
    row_sum: jax.Array  # bkgq
    out: jax.Array  # bkgqd, not yet divided by row_sum

    @classmethod
    def of_nothing(cls, query: jax.Array, features: int) -> _Softmax:
        """Returns that of queries, bqkgd, which have seen no key."""
        dtype = _wide_dtype(query)
        # From the queries, so that it has their type on Explicit axes.
        row_sum = jnp.zeros_like(jnp.moveaxis(query, 1, 3), dtype).sum(-1)  # bqkgd → bkgq
        out = row_sum[..., None] + jnp.zeros(features, dtype)
        return cls(row_sum - jnp.inf, row_sum, out)

    def add(self, ring: Ring, scores: jax.Array, value: jax.Array, dtype: Any) -> _Softmax:
        """Adds a block: its scores, bkgqs, and values, bskd."""
        row_max = jnp.maximum(self.row_max, scores.max(-1))
        # A row that has seen no key yet has no finite maximum, and inf - inf is NaN.
        finite = jnp.where(jnp.isneginf(row_max), 0, row_max)
        weights, rescale = jnp.exp(scores - finite[..., None]), jnp.exp(self.row_max - finite)
        products = _einsum(ring, "bkgqs,bskd->bkgqd", weights.astype(dtype), value)
        row_sum = self.row_sum * rescale + weights.sum(-1)
        return _Softmax(row_max, row_sum, self.out * rescale[..., None] + products)

    def results(self) -> tuple[jax.Array, jax.Array]:
        """Returns the outputs, bkgqd, and the log-sum-exp, bkgq; 0 and inf of rows without keys."""
        has_any = self.row_sum > 0
        out = self.out / jnp.where(has_any, self.row_sum, 1)[..., None]
        # inf makes all weights of the backward pass zero.
        row_max = jnp.where(has_any, self.row_max, 0)
        return out, jnp.where(has_any, row_max + jnp.log(self.row_sum), jnp.inf)


def _local_forward(
    ring: Ring, query: jax.Array, key: jax.Array, value: jax.Array, seen: Visibility
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs of the queries of a device, bqhd, and their log-sum-exp, bkgq."""
    # JAX would compute what depends on positions alone before a loop over layers, and keep the
    # masks of all blocks: 86 GiB in place of 9.5 for two layers of 131,072 tokens.
    query, key, value, seen = jax.lax.optimization_barrier((query, key, value, seen))
    grouped, count = _group_heads(query, key.shape[2]), _num_parts(seen)  # bqkgd
    queries = [*zip(jnp.split(grouped, count, 1), seen.parts(count), strict=True)]

    def add_pair(state: _Softmax, _: Any, own: Any, block: Block, place: Any) -> Any:
        part, part_seen = own
        scores = _scores(ring, part, block, part_seen, place)
        return state.add(ring, scores, block.value, query.dtype), None

    def add_block(states: list[_Softmax], moving: Block, step: Any) -> Any:
        nothing = [None] * count
        blocks = moving.parts(count)
        states, _ = _add_pairs(ring, step, add_pair, queries, blocks, (states, nothing))
        return states, moving

    states = [_Softmax.of_nothing(part, value.shape[-1]) for part, _ in queries]
    states, _ = _go_around(ring, add_block, states, Block(key, value, *seen[:2]))
    softmax = _Softmax(*(jnp.concatenate(x, 3) for x in zip(*states, strict=True)))
    out, lse = softmax.results()
    return _ungroup_heads(jnp.moveaxis(out, 3, 1)).astype(query.dtype), lse  # bkgqd → bqkgd → bqhd


def _local_backward(ring: Ring, kept: tuple[Any, ...], d_out: jax.Array) -> tuple[Any, ...]:
    """Returns the gradients of the queries, keys and values of a device."""
    query, key, value, seen, out, lse = kept
    dtype, wide = query.dtype, _wide_dtype(query)
    key_heads, count = key.shape[2], _num_parts(seen)
    grouped, d_grouped = _group_heads(query, key_heads), _group_heads(d_out, key_heads)  # bqkgd
    delta = (out.astype(wide) * d_out.astype(wide)).sum(-1)[..., None]  # bqh1
    delta = jnp.moveaxis(_group_heads(delta, key_heads)[..., 0], 1, 3)  # bkgq
    parts = _split(count, (grouped, d_grouped, lse, delta), (1, 1, 3, 3))
    queries = [*zip(parts, seen.parts(count), strict=True)]

    def add_pair(d_query: jax.Array, d_block: Any, own: Any, block: Block, place: Any) -> Any:
        (part, d_part, lse, delta), part_seen = own
        d_key, d_value = d_block
        scores = _scores(ring, part, block, part_seen, place)  # bkgqs
        weights = jnp.exp(scores - lse[..., None])
        d_weights = _einsum(ring, "bqkgd,bskd->bkgqs", d_part, block.value)
        d_scores = (weights * (d_weights - delta[..., None])).astype(dtype)
        d_query = d_query + _einsum(ring, "bkgqs,bskd->bqkgd", d_scores, block.key)
        d_key = d_key + _einsum(ring, "bkgqs,bqkgd->bskd", d_scores, part)
        d_value = d_value + _einsum(ring, "bkgqs,bqkgd->bskd", weights.astype(dtype), d_part)
        return d_query, (d_key, d_value)

    def add_block(d_queries: list[jax.Array], moving: Any, step: Any) -> Any:
        block, d_key, d_value = moving
        d_blocks = [*zip(jnp.split(d_key, count, 1), jnp.split(d_value, count, 1), strict=True)]
        states = d_queries, d_blocks
        d_queries, d_blocks = _add_pairs(ring, step, add_pair, queries, block.parts(count), states)
        d_key, d_value = (jnp.concatenate(x, 1) for x in zip(*d_blocks, strict=True))
        return d_queries, (block, d_key, d_value)

    d_query, d_key, d_value = (jnp.zeros_like(x, wide) for x in (grouped, key, value))
    moving = Block(key, value, *seen[:2]), d_key, d_value
    d_queries, moving = _go_around(ring, add_block, jnp.split(d_query, count, 1), moving)
    _, d_key, d_value = ring.receive(moving)  # back to where the block started
    d_query = _ungroup_heads(jnp.concatenate(d_queries, 1)) * ring.scale
    return tuple(x.astype(dtype) for x in (d_query, d_key * ring.scale, d_value))


def _num_parts(seen: Visibility) -> int:
    """In how many parts blocks are: halves, if positions may say that some are hidden."""
    positions = seen.positions
    return 2 if positions is not None and positions.ndim == 1 and positions.size % 2 == 0 else 1


def _split(count: int, arrays: Iterable[Any], dimensions: Iterable[int]) -> list[list[Any]]:
    """Splits arrays, each in its dimension; returns them part by part."""
    pairs = zip(arrays, dimensions, strict=True)
    parts = ([None] * count if x is None else jnp.split(x, count, axis) for x, axis in pairs)
    return [[*each] for each in zip(*parts, strict=True)]


def _go_around(
    ring: Ring, add_block: Callable[[Any, Any, Any], Any], state: Any, moving: Any
) -> tuple[Any, Any]:
    """Adds each block of the ring to a state: ``add_block(state, moving, step)`` returns both."""

    def body(carry: Any, step: jax.Array) -> Any:
        state, moving = carry
        return add_block(state, ring.receive(moving), step), None

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
        and the step with the index of the part of the block; returns both states.
      queries: the parts of the queries, with what they see.
      blocks: the parts of the block.
      states: those of all parts of the queries, and of all parts of the block.
    """

    def add(i: _Which, j: _Which, states: tuple[list[Any], list[Any]]) -> Any:
        of_queries, of_blocks = states
        place = step, j if isinstance(j, int) else jnp.where(j, 0, 1)
        chosen = _select(of_queries, i), _select(of_blocks, j)
        new_query, new_block = add_pair(*chosen, _select(queries, i), _select(blocks, j), place)
        return _replace(of_queries, i, new_query), _replace(of_blocks, j, new_block)

    positions = [seen.positions for _, seen in queries]
    # In the balanced order a device has chunks i and 2n - 1 - i, so which pairs are visible does
    # not have to be found out: with its own block 3 of 4, with any other one 2 of 4.
    if ring.is_even and isinstance(step, int):
        return add(1, 1, add(1, 0, add(0, 0, states)))  # type: ignore[no-any-return]
    if ring.is_even:
        first_key, first_query = blocks[0].positions, positions[0]
        is_before = first_key[0] < first_query[0]  # type: ignore[index]
        return add(is_before, is_before, add(1, 0, states))  # type: ignore[no-any-return]
    for j, i in itertools.product(range(len(blocks)), range(len(queries))):
        mine, theirs = positions[i], blocks[j].positions
        run = functools.partial(add, i, j)
        if mine is None or theirs is None or mine.ndim > 1:
            states = run(states)
        else:
            states = jax.lax.cond(may_attend(ring, mine, theirs), run, lambda x: x, states)
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


def may_attend(ring: Ring, mine: jax.Array, theirs: jax.Array) -> Any:
    """Whether a query at one of my positions may attend to a key at one of theirs."""
    visible = theirs.min() <= mine.max() if ring.is_causal else True
    if ring.window is not None:
        visible &= mine.min() - theirs.max() < ring.window
        visible &= theirs.min() - mine.max() < ring.window
    return visible


def _scores(
    ring: Ring, query: jax.Array, block: Block, seen: Visibility, place: tuple[Any, Any]
) -> jax.Array:
    """Returns the scores of some queries, bqkgd, for a block: bkgqs, -inf for what is hidden."""
    scores = _einsum(ring, "bqkgd,bskd->bkgqs", query, block.key) * ring.scale
    visible = []  # (queries, keys) or (b, queries, keys)
    if seen.positions is not None and block.positions is not None:
        apart = seen.positions[..., :, None] - block.positions[..., None, :]
        visible += [apart >= 0] if ring.is_causal else []
        visible += [] if ring.window is None else [jnp.abs(apart) < ring.window]
    if seen.segments is not None and block.segments is not None:
        visible.append(seen.segments[:, :, None] == block.segments[:, None, :])
    visible = [x if x.ndim == 3 else x[None] for x in visible]
    masks = [x[:, None, None] for x in visible]  # bkgqs, where k and g are 1
    if seen.mask is not None:
        masks.append(_mask_of_block(ring, seen.mask, scores.shape, place))
    for mask in masks:
        scores = jnp.where(mask, scores, -jnp.inf)
    return scores


def _mask_of_block(
    ring: Ring, mask: jax.Array, shape: tuple[int, ...], place: tuple[Any, Any]
) -> jax.Array:
    """Returns the columns of a mask that are a block's: (b, heads, queries, all keys) → bkgqs.

    Args:
      ring: the options.
      mask: the mask of some queries.
      shape: of the scores, bkgqs.
      place: the step, and which part of the block it is.
    """
    step, part = place
    keys = shape[-1]
    parts = mask.shape[3] // keys // ring.size  # of each block
    number = (ring.device_index() - step) % ring.size
    start = (number * parts + part) * keys
    columns = jax.lax.dynamic_slice_in_dim(mask, start, keys, 3)
    heads = (1, 1) if mask.shape[1] == 1 else shape[1:3]
    return columns.reshape(columns.shape[0], *heads, *columns.shape[2:])


def _wide_dtype(x: jax.Array) -> Any:
    """The dtype in which sums are computed: float32, or float64 for that."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _einsum(ring: Ring, formula: str, one: jax.Array, other: jax.Array) -> jax.Array:
    dtype = _wide_dtype(one)
    return jnp.einsum(formula, one, other, precision=ring.precision, preferred_element_type=dtype)


def _group_heads(x: jax.Array, key_heads: int) -> jax.Array:
    """Splits heads by the key head that serves them: bqhd → bqkgd."""
    batch, length, heads, features = x.shape
    shape = (batch, length, key_heads, heads // key_heads, features)
    return _reshape(x, shape, (0, 1, 2, None, 3))


def _ungroup_heads(x: jax.Array) -> jax.Array:
    """Joins heads: bqkgd → bqhd."""
    shape = (*x.shape[:2], math.prod(x.shape[2:4]), x.shape[4])
    return _reshape(x, shape, (0, 1, 2, 4))


def _reshape(x: jax.Array, shape: tuple[int, ...], dimensions: Sequence[int | None]) -> jax.Array:
    """Reshapes an array; each new dimension has the Explicit axes of the old one that is named."""
    spec = type_spec(x)
    if spec is None:
        return x.reshape(shape)
    old = pad_entries(spec, x.ndim)
    entries = [None if i is None else old[i] for i in dimensions]
    sharding = NamedSharding(type_mesh(x), P(*entries))
    reshaped: jax.Array = jax.lax.reshape(x, shape, out_sharding=sharding)
    return reshaped


def move_tokens(ring: Ring, arrays: tuple[Any, ...], *, back: bool = False) -> tuple[Any, ...]:
    """Moves arrays, (b, queries, …) or None, to the balanced order, or back.

    Device i has chunks 2i and 2i + 1 of 2n; in the balanced order it has i and 2n - 1 - i. Of both
    pairs one chunk is even. So two `ppermute` suffice: one of the even chunks, one of the odd ones.
    """
    last = 2 * ring.size - 1
    routes = []
    for parity in (0, 1):
        chunks = [2 * i + parity for i in range(ring.size)]
        route = [(i, min(chunk, last - chunk)) for i, chunk in enumerate(chunks)]
        routes.append([(target, source) for source, target in route] if back else route)

    def swap_on_odd_devices(first: jax.Array, second: jax.Array) -> list[jax.Array]:
        """In the balanced order, even devices have the even chunk first, odd ones second."""
        is_odd = jax.lax.axis_index(ring.axis) % 2 == 1
        return [jnp.where(is_odd, second, first), jnp.where(is_odd, first, second)]

    def move(x: jax.Array) -> jax.Array:
        chunks = jnp.split(x, 2, axis=1)
        chunks = swap_on_odd_devices(*chunks) if back else chunks
        pairs = zip(chunks, routes, strict=True)
        chunks = [jax.lax.ppermute(chunk, ring.axis, route) for chunk, route in pairs]
        return jnp.concatenate(chunks if back else swap_on_odd_devices(*chunks), axis=1)

    specs = tuple(ring.spec(x, 1) for x in arrays)
    run = ring.map(lambda *arrays: tuple(jax.tree.map(move, arrays)), specs, specs)
    moved: tuple[Any, ...] = run(*arrays)
    return moved
