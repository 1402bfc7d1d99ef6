"""Attention over a sequence that mesh axes shard: keys and values move around a ring of devices."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .. import _compat
from ..core.constrain import given_mesh, mesh_here, retype, type_mesh, type_spec
from ..errors import raise_listed
from ..specs.fitting import axes_of_type, padded, suggestion


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
    bias: Any = None,
    mask: jax.Array | None = None,
    *,
    is_causal: bool = False,
    window: int | None = None,
    input_positions: Any = None,
    segment_ids: jax.Array | None = None,
    rope: Callable[..., jax.Array] | None = None,
    scale: float | None = None,
    balanced: bool = False,
    mesh: Mesh | AbstractMesh | None = None,
    axis: str = "context",
    dtype: Any = None,
    precision: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    module: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    promote_dtype: Any = None,
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
    problems = [*_wrong_shapes(query, key, value, mask, input_positions, segment_ids, size, axis)]
    wrong = {
        "bias: not supported": bias is not None,
        "dropout of weights: not supported": dropout_rate and not deterministic,
        "sowing weights: not supported, they are never in memory": module is not None,
        f"window={window!r}: expected at least 1": window is not None and window < 1,
    }
    problems += [text for text, is_given in wrong.items() if is_given]
    if mesh is not None and not size:
        known = ", ".join(map(repr, mesh.shape))
        problems.append(f"axis={axis!r}{suggestion(axis, mesh.shape)}: the mesh has {known}")
    is_self = query.shape[1:2] == key.shape[1:2]
    given = input_positions is not None or segment_ids is not None
    if not is_self and (is_causal or window or given):
        problems.append("is_causal, window, positions and segments: for as many keys as queries")
    raise_listed(ValueError, "ring_attention:", [f"  {line}" for line in problems])
    dtype = query.dtype if dtype is None else dtype
    if rope is not None:
        query, key = (_rotated(rope, x, input_positions) for x in (query, key))
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    manual, length = _compat.spmd_axes() | {axis}, query.shape[1]
    moves = balanced and is_causal and input_positions is None and mask is None
    moves = moves and size > 1 and length % (2 * size) == 0
    own, positions, is_even = input_positions, None, False
    if is_causal or window:
        if own is None:
            own = balanced_order(length, size) if moves else np.arange(length)
        if is_causal and not window and isinstance(own, np.ndarray) and length % (2 * size) == 0:
            is_even = size > 1 and np.array_equal(own, balanced_order(length, size))
        positions = jnp.asarray(own, jnp.int32)
    ring = _Ring(mesh, axis, size, is_causal, window, scale, precision, manual, is_even)
    if mask is not None:
        mask = jnp.expand_dims(mask, range(4 - jnp.ndim(mask)))  # (batch, heads, length, keys)
        mask = jnp.broadcast_to(mask, (*mask.shape[:2], length, key.shape[1]))
    if moves:
        query, key, value, segment_ids = _balanced(ring, (query, key, value, segment_ids))
    seen = _Visible(positions, segment_ids, mask)
    output: jax.Array = _attention(ring, query, key, value, seen)
    if moves:
        [output] = _balanced(ring, (output,), back=True)
    return output


def _wrong_shapes(
    query: Any, key: Any, value: Any, mask: Any, positions: Any, segments: Any, size: int, axis: str
) -> Iterator[str]:
    shapes = {"query": query.shape, "key": key.shape, "value": value.shape}
    yield from (f"{name}: shape {x}, not 4-D" for name, x in shapes.items() if len(x) != 4)
    if any(len(shape) != 4 for shape in shapes.values()):
        return
    (batch, length, heads, features), own, others = shapes.values()
    if own[:3] != others[:3] or own[0] != batch or own[3] != features:
        yield f"query {query.shape}, key {own} and value {others} do not fit"
    elif heads % own[2]:
        yield f"{own[2]} heads of keys do not divide {heads} heads of queries"
    for name, count in {"queries": length, "keys": own[1]}.items():
        if size and count % size:
            yield f"{size} devices along {axis!r} do not divide {count} {name}; pad them"
    whole = (batch, heads, length, own[1])
    if mask is not None and not _broadcasts(np.shape(mask), whole):
        yield f"mask: shape {np.shape(mask)} does not broadcast to {whole}"
    if positions is not None and np.shape(positions) not in ((length,), (batch, length)):
        given = np.shape(positions)
        yield f"input_positions: shape {given}, not ({length},) or ({batch}, {length})"
    if segments is not None and segments.shape != (batch, length):
        yield f"segment_ids: shape {segments.shape}, not ({batch}, {length})"


def _broadcasts(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether an array of one shape can be broadcast to the other one."""
    last = whole[len(whole) - len(shape) :] if len(shape) <= len(whole) else ()
    return len(last) == len(shape) and all(a in (1, b) for a, b in zip(shape, last, strict=True))


class _Visible(NamedTuple):
    """What decides to which keys queries may attend; each None if it does not."""

    positions: Any
    segments: Any
    mask: Any

    def parts(self, count: int) -> list[_Visible]:
        return [_Visible(*x) for x in _split(count, self, (-1, 1, 2))]


class _Block(NamedTuple):
    """Keys and values that move, and what belongs to them."""

    key: Any
    value: Any
    positions: Any
    segments: Any

    def parts(self, count: int) -> list[_Block]:
        return [_Block(*x) for x in _split(count, self, (1, 1, -1, 1))]


class _Ring(NamedTuple):
    """The options of a call. Hashable."""

    mesh: Any
    axis: str
    size: int
    is_causal: bool
    window: int | None
    scale: float
    precision: Any
    manual: frozenset[Any]  # axes over which the functions for each device are mapped
    is_even: bool  # causal, in the balanced order

    def mapped(self, fun: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
        """The function for each device of the ring, with specs of its own axis."""
        if self.mesh is None:
            return fun
        mesh = mesh_here(self.mesh)
        options = {"in_specs": inputs, "out_specs": outputs, "axis_names": self.manual}
        run = jax.shard_map(fun, mesh=mesh, check_vma=False, **options)
        if self.axis not in axes_of_type(mesh, AxisType.Explicit):
            return run

        def typed(x: Any, spec: P) -> Any:  # as the specs say along the sequence
            pairs = zip(padded(spec, x.ndim), padded(type_spec(x) or P(), x.ndim), strict=True)
            return retype(x, mesh, P(*(new or old for new, old in pairs)))

        return lambda *args: run(*jax.tree.map(typed, args, inputs))

    def next(self, tree: Any) -> Any:
        """Arrays of the device before in the ring."""
        if self.mesh is None:
            return tree
        return jax.lax.ppermute(
            tree, self.axis, [(i, (i + 1) % self.size) for i in range(self.size)]
        )

    def spec(self, x: Any, dimension: int) -> P | None:
        """The spec of an array whose dimension is that of the sequence."""
        return None if x is None else P(*[None] * dimension, self.axis)

    def specs(self, seen: _Visible) -> _Visible:
        positions, segments, mask = seen
        own = self.spec(positions, 0 if positions is None else positions.ndim - 1)
        return _Visible(own, self.spec(segments, 1), self.spec(mask, 2))


def _rotated(rope: Callable[..., Any], x: Any, positions: Any) -> Any:
    """Queries or keys, rotated by positions, or by their order."""
    x = x.swapaxes(1, 2)
    if positions is None:
        x = rope(x)
    else:
        x = (rope if np.ndim(positions) == 1 else jax.vmap(rope))(x, jnp.asarray(positions))
    return x.swapaxes(1, 2)


def _balanced(ring: _Ring, arrays: tuple[Any, ...], back: bool = False) -> Any:
    """Arrays moved from the order of their tokens to the balanced order, or back.

    Device i has chunks 2i and 2i + 1, in the balanced order i and 2n - 1 - i: again one is even.
    """
    last = 2 * ring.size - 1
    chunks = ([2 * i + odd for i in range(ring.size)] for odd in (0, 1))
    routes = [[(i, min(chunk, last - chunk)) for i, chunk in enumerate(x)] for x in chunks]
    if back:
        routes = [[(there, here) for here, there in route] for route in routes]

    def by_parity(first: Any, second: Any) -> list[Any]:
        is_odd = jax.lax.axis_index(ring.axis) % 2 == 1
        return [jnp.where(is_odd, second, first), jnp.where(is_odd, first, second)]

    def moved(x: Any) -> Any:
        halves = jnp.split(x, 2, axis=1)
        halves = by_parity(*halves) if back else halves
        pairs = zip(halves, routes, strict=True)
        halves = [jax.lax.ppermute(half, ring.axis, route) for half, route in pairs]
        return jnp.concatenate(halves if back else by_parity(*halves), axis=1)

    specs = tuple(ring.spec(x, 1) for x in arrays)
    run = ring.mapped(lambda *arrays: tuple(jax.tree.map(moved, arrays)), specs, specs)
    return run(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(ring: _Ring, query: Any, key: Any, value: Any, seen: _Visible) -> Any:
    return _forward(ring, query, key, value, seen)[0]


def _forward(ring: _Ring, query: Any, key: Any, value: Any, seen: _Visible) -> Any:
    rows, heads = P(None, ring.axis), P(None, None, None, ring.axis)
    run = ring.mapped(
        functools.partial(_local_forward, ring), (rows, rows, rows, ring.specs(seen)), (rows, heads)
    )
    out, log_total = run(query, key, value, seen)
    return out, (query, key, value, seen, out, log_total)


def _backward(ring: _Ring, kept: Any, of_out: Any) -> Any:
    rows, heads = P(None, ring.axis), P(None, None, None, ring.axis)
    inputs = (rows, rows, rows, ring.specs(kept[3]), rows, heads), rows
    run = ring.mapped(functools.partial(_local_backward, ring), inputs, (rows,) * 3)
    return *run(kept, of_out), None


_attention.defvjp(_forward, _backward)


def _local_forward(ring: _Ring, query: Any, key: Any, value: Any, seen: _Visible) -> Any:
    """The outputs of the queries of a device, and the logarithms of their totals."""
    query, key, value, seen = _together(query, key, value, seen)
    grouped, count = _grouped(query, key.shape[2]), _num_parts(seen)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    queries = [*zip(jnp.split(grouped, count, 1), seen.parts(count), strict=True)]

    def added(state: Any, own: Any, block: _Block, column: Any) -> Any:
        [(peak, total, out)], (query, seen) = state, own
        scores = _scores(ring, query, block, seen, column)
        new_peak = jnp.maximum(peak, scores.max(-1))
        # A row that has attended to nothing yet has no finite peak.
        finite = jnp.where(jnp.isneginf(new_peak), 0, new_peak)
        weights, kept = jnp.exp(scores - finite[..., None]), jnp.exp(peak - finite)
        products = _einsum(ring, "bkgqs,bskd->bkgqd", weights.astype(query.dtype), block.value)
        return [(new_peak, total * kept + weights.sum(-1), out * kept[..., None] + products)]

    def add(states: Any, moving: _Block, step: Any) -> Any:
        [states] = _each(ring, step, added, queries, moving.parts(count), (states,))
        return states

    states = []
    for each, _ in queries:
        totals = jnp.zeros_like(jnp.moveaxis(each, 1, 3), wide).sum(-1)
        outs = totals[..., None] + jnp.zeros(value.shape[-1], wide)
        states.append((totals - jnp.inf, totals, outs))
    states, _ = _around(ring, add, states, _Block(key, value, *seen[:2]))
    peak, total, out = (jnp.concatenate(x, 3) for x in zip(*states, strict=True))
    has_any = total > 0
    out = out / jnp.where(has_any, total, 1)[..., None]
    log_total = jnp.where(has_any, jnp.where(has_any, peak, 0) + jnp.log(total), jnp.inf)
    return _ungrouped(jnp.moveaxis(out, 3, 1)).astype(query.dtype), log_total


def _local_backward(ring: _Ring, kept: Any, of_out: Any) -> Any:
    """The cotangents of the queries, keys and values of a device."""
    query, key, value, seen, out, log_total = kept
    wide, count = jnp.promote_types(query.dtype, jnp.float32), _num_parts(seen)
    grouped, of_outs = _grouped(query, key.shape[2]), _grouped(of_out, key.shape[2])
    products = (out.astype(wide) * of_out.astype(wide)).sum(-1)[..., None]
    delta = jnp.moveaxis(_grouped(products, key.shape[2])[..., 0], 1, 3)
    parts = _split(count, (grouped, of_outs, log_total, delta), (1, 1, 3, 3))
    queries = [*zip(parts, seen.parts(count), strict=True)]

    def added(state: Any, own: Any, block: _Block, column: Any) -> Any:
        (query, of_out, log_total, delta), seen = own
        weights = jnp.exp(_scores(ring, query, block, seen, column) - log_total[..., None])
        of_weights = _einsum(ring, "bqkgd,bskd->bkgqs", of_out, block.value)
        of_scores = (weights * (of_weights - delta[..., None])).astype(query.dtype)
        new = (
            _einsum(ring, "bkgqs,bskd->bqkgd", of_scores, block.key),
            _einsum(ring, "bkgqs,bqkgd->bskd", of_scores, query),
            _einsum(ring, "bkgqs,bqkgd->bskd", weights.astype(query.dtype), of_out),
        )
        return map(operator.add, state, new)

    def add(of_queries: Any, moving: Any, step: Any) -> Any:
        moved, *cotangents = moving
        states = of_queries, *(jnp.split(x, count, 1) for x in cotangents)
        blocks = moved.parts(count)
        of_queries, *found = _each(ring, step, added, queries, blocks, states)
        return of_queries, (moved, *(jnp.concatenate(x, 1) for x in found))

    zeros = [jnp.zeros_like(x, wide) for x in (grouped, key, value)]
    moving = _Block(key, value, *seen[:2]), *zeros[1:]
    of_queries, (_, of_key, of_value) = _around(
        ring, add, jnp.split(zeros[0], count, 1), moving, home=True
    )
    of_query = _ungrouped(jnp.concatenate(of_queries, 1)) * ring.scale
    return tuple(x.astype(query.dtype) for x in (of_query, of_key * ring.scale, of_value))


def _together(*tree: Any) -> Any:
    """The same arrays, each of which depends on all."""
    # JAX would compute what depends on positions alone before a loop over layers, and keep it.
    return jax.lax.optimization_barrier(tree)


def _num_parts(seen: _Visible) -> int:
    """In how many parts blocks are: halves, if positions may say that some are hidden."""
    positions = seen.positions
    return 2 if positions is not None and positions.ndim == 1 and positions.size % 2 == 0 else 1


def _split(count: int, arrays: Iterable[Any], dimensions: Iterable[int]) -> list[list[Any]]:
    """Parts of arrays, each in its dimension."""
    pairs = zip(arrays, dimensions, strict=True)
    parts = ([None] * count if x is None else jnp.split(x, count, axis) for x, axis in pairs)
    return [[*each] for each in zip(*parts, strict=True)]


def _around(
    ring: _Ring, add: Callable[..., Any], state: Any, moving: Any, home: bool = False
) -> Any:
    """Adds each block of the ring; ``home``: blocks change, and return to where they started."""

    def body(carry: Any, step: Any) -> Any:
        state, moving = carry
        moving = ring.next(moving)
        found = add(state, moving, step)
        return (found if home else (found, moving)), None

    found = add(state, moving, 0)
    carry = found if home else (found, moving)
    carry, _ = jax.lax.scan(body, carry, jnp.arange(1, ring.size))
    return (carry[0], ring.next(carry[1])) if home else carry


def _each(
    ring: _Ring, step: Any, added: Any, queries: list[Any], blocks: list[_Block], states: Any
) -> Any:
    """The states, of queries and then of blocks, with each block added where queries may attend."""

    def one(i: Any, j: Any, states: Any) -> Any:
        places = i, *[j] * (len(states) - 1)
        column = step, j if isinstance(j, int) else jnp.where(j, 0, 1)
        given = _part(queries, i), _part(blocks, j), column
        found = added(tuple(map(_part, states, places)), *given)
        return tuple(map(_with_part, states, places, found))

    positions = [seen.positions for _, seen in queries]
    if ring.is_even and isinstance(step, int):  # its own keys
        return one(1, 1, one(1, 0, one(0, 0, states)))
    if ring.is_even:  # two of four halves, as many as each device has to add
        is_before = blocks[0].positions[0] < positions[0][0]
        return one(is_before, is_before, one(1, 0, states))
    for j, i in itertools.product(range(len(blocks)), range(len(queries))):
        mine, theirs = positions[i], blocks[j].positions
        add = functools.partial(one, i, j)
        if mine is None or mine.ndim > 1:
            states = add(states)
        else:
            states = jax.lax.cond(_is_needed(ring, mine, theirs), add, lambda x: x, states)
    return states


# A part is given by its number, or by whether it is the first of two. With a conditional in place
# of this choice, the compiler for TPUs fails on long sequences (jax 0.12, "overlaps with").
def _part(parts: Any, at: Any) -> Any:
    if isinstance(at, int):
        return parts[at]
    return jax.tree.map(functools.partial(jnp.where, at), *parts)


def _with_part(parts: Any, at: Any, new: Any) -> list[Any]:
    if isinstance(at, int):
        return [*parts[:at], new, *parts[at + 1 :]]
    first, second = parts
    return [_part((new, first), at), _part((second, new), at)]


def _is_needed(ring: _Ring, mine: Any, theirs: Any) -> Any:
    """Whether a query at one of my positions may attend to a key at one of theirs."""
    needed = theirs.min() <= mine.max() if ring.is_causal else True
    if ring.window is not None:
        needed &= mine.min() - theirs.max() < ring.window
        needed &= theirs.min() - mine.max() < ring.window
    return needed


def _scores(ring: _Ring, grouped: Any, block: _Block, seen: _Visible, column: Any) -> Any:
    """Scaled products (batch, key heads, group, length, keys); ``column``: step and part."""
    scores = _einsum(ring, "bqkgd,bskd->bkgqs", grouped, block.key) * ring.scale
    visible = []
    if seen.positions is not None:
        apart = seen.positions[..., :, None] - block.positions[..., None, :]
        visible += [apart >= 0] if ring.is_causal else []
        visible += [] if ring.window is None else [jnp.abs(apart) < ring.window]
    visible = [x if x.ndim == 3 else x[None] for x in visible]
    if seen.segments is not None:
        visible.append(seen.segments[:, :, None] == block.segments[:, None, :])
    masks = [x[:, None, None] for x in visible]
    if seen.mask is not None:
        count, keys = seen.mask.shape[1], scores.shape[-1]
        own = 0 if ring.mesh is None else jax.lax.axis_index(ring.axis)
        parts = seen.mask.shape[3] // keys // ring.size
        start = ((own - column[0]) % ring.size * parts + column[1]) * keys
        columns = jax.lax.dynamic_slice_in_dim(seen.mask, start, keys, 3)
        split = (1, 1) if count == 1 else scores.shape[1:3]
        masks.append(columns.reshape(columns.shape[0], *split, *columns.shape[2:]))
    for each in masks:
        scores = jnp.where(each, scores, -jnp.inf)
    return scores


def _einsum(ring: _Ring, formula: str, *operands: Any) -> Any:
    wide = jnp.promote_types(operands[0].dtype, jnp.float32)
    return jnp.einsum(formula, *operands, precision=ring.precision, preferred_element_type=wide)


def _grouped(x: Any, key_heads: int) -> Any:
    """Heads by the key head that serves them."""
    batch, length, heads, features = x.shape
    return _reshaped(
        x, (batch, length, key_heads, heads // key_heads, features), (0, 1, 2, None, 3)
    )


def _ungrouped(x: Any) -> Any:
    shape = (*x.shape[:2], math.prod(x.shape[2:4]), x.shape[4])
    return _reshaped(x, shape, (0, 1, 2, 4))


def _reshaped(x: Any, shape: Iterable[int], dimensions: Iterable[int | None]) -> Any:
    """An array in another shape, each dimension with the Explicit axes of one of the old."""
    spec = type_spec(x)
    if spec is None:
        return x.reshape(shape)
    old = padded(spec, x.ndim)
    entries = [None if i is None else old[i] for i in dimensions]
    sharding = NamedSharding(type_mesh(x), P(*entries))
    return jax.lax.reshape(x, tuple(shape), out_sharding=sharding)
