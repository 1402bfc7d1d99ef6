"""Sends tokens to the devices of their experts, and brings results back: two all-to-alls.

Each device has groups of tokens, and each expert is on one device of an axis of size n. A token has
k choices, so a group of T tokens has C = k·T choices, with the first choices of all tokens first:

    choices     e2 e0 e1 | e0 e2 e2      expert of the first, and of the second choice of 3 tokens
    order       1 3 | 2 | 0 4 5          choices sorted by expert (`argsort`, stable)
    counts      2     1   3              how many choose each expert
    ranks       0 1   0   0 1 2          place of a sorted choice among those of its expert

**With a capacity** c, each group sends to each expert a block of c rows: the sorted choices of rank
below c. Other choices are dropped. Each expert gets equally many rows, so one einsum multiplies
all.

**Without a capacity**, the choices of all groups of a device are one group. The device sends to
each device as many rows as choose its experts (``ragged_all_to_all`` on TPUs; padded blocks
elsewhere). The receiver sorts these rows by expert, for ``jax.lax.ragged_dot``.

The results go back in the inverse order, and are added with their weights.

A *row* is the features of a token, once for each choice of the token. The *local* experts are those
of one device along the axis of experts. Local functions run on each device in a `shard_map`
(`_Dispatch.on_each_device`). In them, ``exchange(x, split, concat)`` is the all-to-all: the i-th
part of one dimension goes to device i, and the arriving parts are concatenated along another.
A *routing* (`_Routing`) has the sorted choices of a device, by which results find their tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from .. import _compat
from ..activations.trace_keys import current_batch_axes
from ..core.constrain import given_mesh, mesh_in_trace, retype, type_spec
from ..core.known_faults import refuse_gradients_of_varying
from ..errors import raise_if_any
from ..specs.fitting import axes_of, axes_of_type, keep_axes, pad_entries, suggestion


class ExpertStatistics(NamedTuple):
    """How tokens were distributed over experts."""

    tokens: jax.Array  # (experts,): how often each was chosen, as int32
    dropped: jax.Array  # (): how many of these choices exceeded a capacity, as int32
    # (): 1 if experts are used equally; None without logits. The loss covers the tokens of the
    # call. In a pipeline or with accumulated gradients these are the tokens of one microbatch, and
    # the mean over microbatches is another number than the loss of the whole batch.
    balance_loss: jax.Array | None
    z_loss: jax.Array | None  # (): the mean square of log-sum-exp of the logits; None without
    # (): how many of the groups · experts · capacity places for tokens are empty, but computed.
    # None without a capacity.
    padding: jax.Array | None = None


@_compat.api_boundary
def dispatch_to_experts(
    x: jax.Array,
    weights: jax.Array,
    indices: jax.Array,
    experts: Callable[[jax.Array, Callable[..., jax.Array]], jax.Array],
    *,
    num_experts: int,
    capacity: int | None = None,
    logits: jax.Array | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    axis: str = "expert",
    batch_axes: Sequence[str] | None = None,
) -> tuple[jax.Array, ExpertStatistics]:
    """Returns for each token the weighted sum of the outputs of its experts, and statistics.

    Each device sends its tokens to the devices of their experts, and gets the results back: two
    all-to-alls over the axis, and two more in the backward pass. What is computed does not depend
    on the mesh.

    Without a capacity no token is dropped. The rows of a device are then sorted by expert, for
    ``jax.lax.ragged_dot``, and on TPUs only rows that exist are sent
    (``jax.lax.ragged_all_to_all``). On other platforms, and in memory on all, there is room for the
    case that all tokens choose the same device.

    Args:
      x: the tokens, of shape (groups, tokens, features), such as a batch of sequences. On a mesh,
        the groups are sharded over ``batch_axes`` and ``axis``.
      weights: the weights of the experts of each token, of shape (groups, tokens, k).
      indices: the indices of these experts, integers of shape (groups, tokens, k). The indices of
        one token are different from each other.
      experts: a function that computes all experts. It takes the tokens as rows of shape (rows,
        features), and a function ``matmul(rows, kernel, bias=None)``, which multiplies each row by
        the matrix of its expert. Kernels have the shape (num_experts, in, out), biases
        (num_experts, out). All other operations of ``experts`` have to be elementwise, or along the
        features.
      num_experts: the number of experts, which the axis has to divide.
      capacity: how many tokens of each group an expert takes; None for all. The first choices of
        all tokens precede their second choices, and among these the order is that of the tokens.
        An expert that a token is dropped from adds nothing to its output.
      logits: the logits of the router, of shape (groups, tokens, num_experts), for the auxiliary
        losses.
      mesh: the mesh; None for the one in context. Without any, all is computed on one device.
      axis: the mesh axis that shards the experts.
      batch_axes: the other mesh axes that shard the groups; None for those over which ``jit``
        shards the first dimension of the data of a model, else ``data``, if there is one, without
        the axes of a ``shard_map`` around the call.

    Returns:
      The outputs, of shape (groups, tokens, features of the outputs), and
      :class:`ExpertStatistics` over all devices: how often each expert was chosen, the number of
      dropped choices, two losses, which are None without ``logits``, and with a capacity the number
      of empty places.

    Raises:
      ValueError: shapes do not fit each other, the number of experts or the mesh, or the mesh lacks
        an axis. The error lists all problems.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from nnx_sharding.experimental import dispatch_to_experts
      >>> class Experts(nnx.Module):
      ...     def __init__(self, number, features, hidden, rngs):
      ...         init = nnx.initializers.lecun_normal(batch_axis=0)
      ...         self.router = nnx.Linear(features, number, rngs=rngs)
      ...         self.up = nnx.Param(init(rngs.params(), (number, features, hidden)))
      ...         self.down = nnx.Param(init(rngs.params(), (number, hidden, features)))
      ...     def experts(self, rows, matmul):
      ...         return matmul(nnx.relu(matmul(rows, self.up[...])), self.down[...])
      ...     def __call__(self, x):
      ...         logits = self.router(x)
      ...         weights, indices = jax.lax.top_k(nnx.softmax(logits), 2)
      ...         return dispatch_to_experts(
      ...             x, weights, indices, self.experts, num_experts=8, logits=logits)
      >>> y, statistics = Experts(8, 16, 32, nnx.Rngs(0))(jax.numpy.ones((4, 6, 16)))
      >>> y.shape, int(statistics.tokens.sum()), int(statistics.dropped)
      ((4, 6, 16), 48, 0)

    Capacities and all-to-alls as in GShard (Lepikhin et al., 2020, arXiv:2006.16668), the balance
    loss as in Switch Transformers (Fedus et al., 2021, arXiv:2101.03961), the z-loss as in ST-MoE
    (Zoph et al., 2022, arXiv:2202.08906).
    """
    mesh = given_mesh("dispatch_to_experts", mesh)
    # Within a `shard_map`, a call has only the groups of one shard along the mapped axes, so these
    # axes do not shard the groups.
    mapped_axes = axes_of_type(mesh_in_trace(mesh), AxisType.Manual) if mesh is not None else ()
    if batch_axes is None:
        data_axes = (current_batch_axes() or {"data"}).difference(mapped_axes, {axis})
        mesh_axes = () if mesh is None else mesh.axis_names
        batch_axes = [name for name in mesh_axes if name in data_axes]
    group_axes = (*batch_axes, axis)
    problems = [
        *_wrong_shapes(x, weights, indices, logits, num_experts, capacity),
        *_wrong_mesh(x, num_experts, mesh, axis, group_axes, mapped_axes),
    ]
    raise_if_any(ValueError, "dispatch_to_experts:", [f"  {line}" for line in problems])
    dispatch = _Dispatch(mesh, axis, group_axes, num_experts, capacity)

    # Each device has groups, rows and a routing of its own. Arrays of all devices have the devices'
    # parts concatenated along the first dimension.
    per_device, same_on_all = P(group_axes), P()
    in_features = dispatch.axes_of_dimension(x, -1)
    rows, routing, tokens, dropped = dispatch.on_each_device(
        dispatch.send,
        (x, indices),
        in_specs=(P(group_axes, None, in_features), per_device),
        out_specs=(P(group_axes, in_features), per_device, same_on_all, same_on_all),
    )
    results = experts(rows, functools.partial(dispatch.matmul, routing.sizes))
    if results.ndim != 2 or len(results) != len(rows):
        returned = jax.typeof(results)
        raise ValueError(f"dispatch_to_experts: experts returned {returned} for {len(rows)} rows.")
    out_features = dispatch.axes_of_dimension(results, -1)
    output = dispatch.on_each_device(
        dispatch.receive,
        (results, routing, weights),
        in_specs=(P(group_axes, out_features), per_device, per_device),
        out_specs=P(group_axes, None, out_features),
    )
    padding = None
    if capacity is not None:
        num_kept = tokens.sum() - dropped
        padding = x.shape[0] * num_experts * capacity - num_kept  # all places minus filled ones
    return output, ExpertStatistics(tokens, dropped, *_losses(logits, tokens), padding)


def _wrong_mesh(
    x: jax.Array,
    num_experts: int,
    mesh: Mesh | AbstractMesh | None,
    expert_axis: str,
    group_axes: Sequence[str],
    mapped_axes: Collection[str],
) -> Iterator[str]:
    """Yields a line for each axis that is missing or mapped already, or that does not divide.

    Args:
      x: the tokens; the first dimension are the groups.
      mesh: the mesh; None for one device, which has everything.
      group_axes: all axes that shard the groups, ``expert_axis`` among them.
      mapped_axes: the axes of a ``shard_map`` around the call.
    """
    sizes: Mapping[str, int] = {} if mesh is None else mesh.shape
    for name in group_axes:
        if mesh is not None and name not in sizes:
            known = ", ".join(map(repr, sizes))
            yield f"axis {name!r}{suggestion(name, sizes)}: the mesh has {known}"
        elif name in mapped_axes:
            yield f"axis {name!r}: the call is in a shard_map over it already"
    # A missing axis was reported above. It counts as an axis of size 1 here, because that divides
    # any number.
    size = sizes.get(expert_axis, 1)
    shards = math.prod(sizes.get(name, 1) for name in group_axes)
    if num_experts % size:
        yield f"{num_experts} experts: {expert_axis!r} of size {size} does not divide them"
    if x.shape and x.shape[0] % shards:
        over = f"{shards} shards over {', '.join(group_axes)}"
        yield f"{x.shape[0]} groups: {over} do not divide them"


def _wrong_shapes(
    x: jax.Array,
    weights: jax.Array,
    indices: jax.Array,
    logits: jax.Array | None,
    num_experts: int,
    capacity: int | None,
) -> Iterator[str]:
    """Yields a line for each shape or option that does not fit the others."""
    if x.ndim != 3:
        yield f"x: shape {x.shape}, expected (groups, tokens, features)"
        return
    if 0 in x.shape:
        yield f"x: shape {x.shape}, expected at least one group, token and feature"
    if indices.shape[-1:] == (0,):
        yield f"indices: shape {indices.shape}, expected at least one expert for each token"
    if indices.shape[:-1] != x.shape[:2] or not jnp.issubdtype(indices.dtype, jnp.integer):
        expected = f"expected integers of shape ({x.shape[0]}, {x.shape[1]}, k)"
        yield f"indices: {indices.dtype} of shape {indices.shape}, {expected}"
    if weights.shape != indices.shape:
        yield f"weights: shape {weights.shape}, but indices have {indices.shape}"
    if logits is not None and logits.shape != (*x.shape[:2], num_experts):
        yield f"logits: shape {logits.shape}, expected {(*x.shape[:2], num_experts)}"
    if capacity is not None and capacity < 1:
        yield f"capacity={capacity!r}: expected at least 1"


def _losses(
    logits: jax.Array | None, tokens: jax.Array
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns (balance loss, z-loss), or (None, None) without logits.

    The balance loss is the number of experts times ``Σ_e f_e p_e``, where expert e has the share
    f_e of the choices and the mean probability p_e. The loss is 1 if both are equal for all
    experts.

    Args:
      logits: (groups, tokens, experts).
      tokens: how often each expert was chosen, (experts,).
    """
    if logits is None:
        return None, None
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    chosen_share = (tokens / tokens.sum()).astype(logits.dtype)  # (experts,), without a gradient
    mean_probability = jax.nn.softmax(logits).mean((0, 1))  # (experts,), with a gradient
    balance_loss = tokens.size * (chosen_share * mean_probability).sum()
    z_loss = jnp.square(jax.nn.logsumexp(logits, axis=-1)).mean()
    return balance_loss, z_loss


class _Routing(NamedTuple):
    """The data by which a device brings the results of its experts back to its tokens."""

    order: jax.Array  # (groups, C): the choice at each sorted place
    experts: jax.Array  # (groups, C): the expert of each sorted choice
    ranks: jax.Array  # (groups, C): the place of each choice among those of the same expert
    # (1, local experts): how many rows each of the device's experts gets. The number of the last
    # expert may include one row of padding (`_send_all`).
    sizes: jax.Array
    # None with a capacity, because each expert then gets a block of the same size from each group.
    exchange: _Exchange | None = None


class _Exchange(NamedTuple):
    """The numbers of rows that a device sent and received without a capacity.

    All groups of a device are one group. In arrays of all devices, the first dimension has one
    index for each device.
    """

    # (1, devices, local experts): how many rows this device sent to each expert.
    sent: jax.Array
    # (1, devices, local experts): how many rows each device sent to each expert of this one.
    received: jax.Array
    # (1, rows): for each place in the order of experts, its row in the received blocks.
    places: jax.Array


class _Dispatch(NamedTuple):
    """How tokens and experts are distributed. Without a mesh, one device has all of both."""

    mesh: Mesh | AbstractMesh | None  # None for one device
    expert_axis: str  # the axis that shards the experts, and the groups of tokens too
    group_axes: tuple[str, ...]  # all axes that shard the groups, `expert_axis` among them
    num_experts: int  # the number of experts on all devices
    capacity: int | None  # the rows of a block (see the top of this file); None sends all rows

    @property
    def size(self) -> int:
        """The number of devices over which the experts are sharded."""
        return 1 if self.mesh is None else self.mesh.shape[self.expert_axis]

    @property
    def num_local_experts(self) -> int:
        """The number of experts on each device."""
        return self.num_experts // self.size

    def explicit_axes(self) -> set[str]:
        """Returns the Explicit axes of the mesh in context."""
        if self.mesh is None:
            return set()
        return {*axes_of_type(mesh_in_trace(self.mesh), AxisType.Explicit)}

    def axes_of_dimension(self, x: jax.Array, dimension: int) -> tuple[str, ...] | None:
        """Returns the Explicit axes, other than those of the groups, that shard a dimension.

        Such a dimension stays sharded on the devices, as tensor parallelism shards features. Auto
        axes are left out, because they are not in the type of an array, and the compiler decides
        about them.

        Returns:
          The axes as an entry of a ``PartitionSpec``: None if there are none.
        """
        spec = type_spec(x) if self.explicit_axes() else None
        if spec is None:
            return None
        axes = axes_of(pad_entries(spec, x.ndim)[dimension])
        kept = tuple(axis for axis in axes if axis not in self.group_axes)
        return kept or None

    def on_each_device(
        self, fun: Callable[..., Any], args: tuple[Any, ...], *, in_specs: Any, out_specs: Any
    ) -> Any:
        """Runs a function on each device, by ``jax.shard_map``, and returns the results of all.

        Args:
          fun: the function of one device's part of the arguments.
          args: the arguments of all devices together. Without a mesh, one device has all.
        """
        if self.mesh is None:
            return fun(*args)
        # This returns the same arrays, whose gradients raise an error if the arrays vary in an
        # outer map that is checked. JAX would get such gradients wrong, because this map is not
        # checked (below).
        args = refuse_gradients_of_varying(args, name="dispatch_to_experts")
        mesh, explicit = mesh_in_trace(self.mesh), self.explicit_axes()
        # All Explicit axes are mapped, so the types of arguments have to be sharded over these axes
        # as the specs say.
        if explicit:
            typed = []
            for arg, spec in zip(args, in_specs, strict=True):
                explicit_spec = keep_axes(spec, explicit)
                retyped = jax.tree.map(lambda x, s=explicit_spec: retype(x, mesh, s), arg)
                typed.append(retyped)
            args = tuple(typed)
        return jax.shard_map(
            fun,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            # JAX puts the `spmd_axis_name` of an outer `vmap` in front of all specs.
            axis_names=explicit.union(self.group_axes, _compat.spmd_axes()),
            # The types of `ragged_all_to_all`'s results do not say that they vary, so the map is
            # not checked.
            check_vma=False,
        )(*args)

    def sum(self, x: jax.Array) -> jax.Array:
        """Returns the sum over all devices that have tokens."""
        return x if self.mesh is None else jax.lax.psum(x, self.group_axes)

    def exchange(self, x: jax.Array, split: int, concat: int) -> Any:
        """Sends the i-th part of dimension ``split`` to device i.

        Returns the arriving parts, concatenated along dimension ``concat``.
        """
        if self.mesh is None:
            return x
        return jax.lax.all_to_all(x, self.expert_axis, split, concat, tiled=True)

    def send(
        self, x: jax.Array, indices: jax.Array
    ) -> tuple[jax.Array, _Routing, jax.Array, jax.Array]:
        """Sends the tokens of a device to their experts.

        Args:
          x: (groups, tokens, features).
          indices: the chosen experts, (groups, tokens, k).

        Returns:
          A tuple of the rows that the experts of this device get, (rows, features); the routing by
          which their results go back; how often each expert was chosen on all devices, (experts,);
          and how many choices were dropped on all devices, ().
        """
        # The docstring of the module has an example of `choices`, `order`, `counts` and `ranks`.
        if self.capacity is None:  # all groups are one
            x = x.reshape(1, -1, x.shape[-1])
            indices = indices.reshape(1, -1, indices.shape[-1])
        num_groups, num_tokens, _ = x.shape
        choices = indices.astype(jnp.int32).swapaxes(1, 2)  # (groups, k, tokens)
        choices = choices.reshape(num_groups, -1)  # (groups, C)
        order = jnp.argsort(choices, axis=1, stable=True)  # (groups, C)
        experts = jnp.take_along_axis(choices, order, 1)  # the sorted choices, (groups, C)
        is_chosen = choices[:, :, None] == jnp.arange(self.num_experts)[None, None]
        counts = is_chosen.sum(1, dtype=jnp.int32)  # (groups, experts)
        starts = jnp.cumsum(counts, 1) - counts  # each expert's first row, (groups, experts)
        ranks = jnp.arange(choices.shape[1])[None] - jnp.take_along_axis(starts, experts, 1)
        # Choice i belongs to token i mod T, because the first choices of all tokens come first.
        token = order % num_tokens
        rows = jnp.take_along_axis(x, token[:, :, None], 1)  # (groups, C, features)
        if self.capacity is None:
            # There is one group, so index 0 has all rows of the device.
            arrived, sizes, exchange = self._send_all(rows[0], counts[0])
            routing = _Routing(order, experts, ranks, sizes, exchange)
            dropped = jnp.zeros((), jnp.int32)  # the same on all devices, so it needs no sum
        else:
            arrived, sizes = self._send_blocks(rows, starts, self.capacity)
            routing = _Routing(order, experts, ranks, sizes)
            excess = jnp.maximum(counts - self.capacity, 0)  # (groups, experts)
            dropped = self.sum(excess.sum(dtype=jnp.int32))
        # The dtype is given, because sums of int32 are int64 with JAX's option `jax_enable_x64`.
        tokens = self.sum(counts.sum(0, dtype=jnp.int32))  # (experts,)
        return arrived, routing, tokens, dropped

    def _send_blocks(
        self, rows: jax.Array, starts: jax.Array, capacity: int
    ) -> tuple[jax.Array, jax.Array]:
        """Sends a block of ``capacity`` rows from each group to each expert.

        Rows of a block beyond the choices of its expert are computed, but :meth:`receive` does not
        read their results.

        Args:
          rows: the rows sorted by expert, (groups, C, features).
          starts: the first row of each expert, (groups, experts).

        Returns:
          A tuple of the rows of the device's experts, (rows, features), one expert after the other;
          and how many rows each of these experts gets, (1, local experts).
        """
        # The indices of the rows in each block, (groups, experts, capacity).
        places = starts[:, :, None] + jnp.arange(capacity)[None, None]
        # The rest of the block of an expert with fewer choices gets rows of other experts, not
        # zeros, because the expert's own operations, such as a norm, may have no gradient on rows
        # of zeros.
        blocks = jax.vmap(lambda group, index: group.at[index].get(mode="clip"))(rows, places)
        blocks = blocks.swapaxes(0, 1)  # (experts, groups, capacity, features)
        # (local experts, groups of all devices along the axis, capacity, features)
        blocks = self.exchange(blocks, split=0, concat=1)
        rows_per_expert = blocks.shape[1] * capacity
        sizes = jnp.full((1, self.num_local_experts), rows_per_expert, jnp.int32)
        return blocks.reshape(-1, rows.shape[-1]), sizes

    def _send_all(
        self, rows: jax.Array, counts: jax.Array
    ) -> tuple[jax.Array, jax.Array, _Exchange]:
        """Sends each device as many rows as choose its experts.

        Args:
          rows: the rows sorted by expert, and so also by device, (C, features).
          counts: how many rows are for each expert, (experts,).

        Returns:
          A tuple of the received rows, sorted by local expert, (devices · C, features); how many
          rows each of these experts gets, (1, local experts); and the numbers for the way back.
          Rows at the end are padding. The first row of padding counts as a row of the last expert.
        """
        # How many rows of this device go to each expert, (devices, local experts). The experts of a
        # device are neighbors in `counts`.
        sent = counts.reshape(self.size, self.num_local_experts)
        # How many rows of each device come to each expert of this one, (devices, local experts).
        received = self.exchange(sent, split=0, concat=0)
        # `blocks` has C rows from each device, sorted by expert and padded: (devices · C,
        # features). The transport only needs the number of rows for all experts of a device,
        # (devices,).
        blocks = _to_experts(self, rows, sizes=sent.sum(axis=1), received=received.sum(axis=1))
        # A row's local expert is the number of experts whose rows end before it in the block. For
        # padding this number is `num_local_experts`, one more than the last expert, so padding is
        # sorted to the end.
        ends = jnp.cumsum(received, axis=1)  # (devices, local experts)
        # (devices, local experts, C)
        is_after = jnp.arange(len(rows))[None, None] >= ends[:, :, None]
        expert = is_after.sum(axis=1).ravel()  # (devices · C,)
        places = jnp.argsort(expert, stable=True)
        arrived, sizes = blocks[places], received.sum(axis=0)
        if self.size > 1:  # a single device has only its own rows, without padding
            # Padding is copies of a token, not zeros, because the experts' own operations, such as
            # a norm, may have no gradient on zeros. The device takes a token that it sends, because
            # it may have received none.
            num_received = sizes.sum()
            arrived = _fill_padding(arrived, num_received, rows[:1])
            # The last expert gets the first row of padding, because `matmul` fills padding with the
            # product of this token, and so has to compute it.
            sizes = sizes.at[-1].add(num_received < len(arrived))
        # `[None]` adds the first dimension, along which the arrays of all devices are concatenated.
        return arrived, sizes[None], _Exchange(sent[None], received[None], places[None])

    def receive(self, rows: jax.Array, routing: _Routing, weights: jax.Array) -> jax.Array:
        """Returns the outputs of a device's tokens, (groups, tokens, features of outputs).

        Args:
          rows: the results of the device's experts, (rows, features of outputs).
          routing: what :meth:`send` returned.
          weights: the weights of the device's tokens, (groups, tokens, k).
        """
        num_groups, num_tokens, k = weights.shape
        num_features = rows.shape[-1]
        # Without a capacity, all groups are one, so there is one sorted group.
        if routing.exchange is None:
            sorted_rows = self._return_blocks(rows, routing)  # (groups, C, features)
        else:
            sorted_rows = self._return_all(rows, routing.exchange)[None]  # (1, C, features)
        unsort = jnp.argsort(routing.order, axis=1)  # the inverse permutation of `order`
        rows = jnp.take_along_axis(sorted_rows, unsort[:, :, None], 1)  # the same shape
        # The first choices of all tokens of a group come first: C → k, tokens.
        rows = rows.reshape(len(rows), k, -1, num_features)
        rows = rows.swapaxes(1, 2)  # the same with tokens before k
        # Where all groups were one, their tokens are split into groups again.
        rows = rows.reshape(num_groups, num_tokens, k, num_features)
        return jnp.einsum("gtk,gtkf->gtf", weights.astype(rows.dtype), rows)

    def _return_blocks(self, rows: jax.Array, routing: _Routing) -> jax.Array:
        """Sends results back after :meth:`_send_blocks`.

        Args:
          rows: the results of the device's experts, (rows, features of outputs).
          routing: what :meth:`send` returned.

        Returns:
          The result of each sorted choice, (groups, C, features of outputs); zeros for dropped
          choices.
        """
        num_groups = self.size * len(routing.order)  # on all devices along the axis
        # (local experts, groups of all devices along the axis, capacity, features)
        shape = (self.num_local_experts, num_groups, self.capacity, rows.shape[-1])
        blocks = rows.reshape(shape)
        # (experts, groups of this device, capacity, features)
        blocks = self.exchange(blocks, split=1, concat=0)
        blocks = blocks.swapaxes(0, 1)  # (groups, experts, capacity, features)
        # Each choice gets the row of its expert at its rank. Ranks of dropped choices are beyond
        # the end of a block, so they get zeros.
        return jax.vmap(_rows_of_blocks)(blocks, routing.experts, routing.ranks)

    def _return_all(self, rows: jax.Array, exchange: _Exchange) -> Any:
        """Sends results back after :meth:`_send_all`.

        Args:
          rows: the results of the device's experts, (devices · C, features of outputs).
          exchange: what :meth:`_send_all` returned.

        Returns:
          The result of each sorted choice of the device, (C, features of outputs).
        """
        # The inverse of the sort in `_send_all` makes one block of rows for each device again.
        blocks = rows[jnp.argsort(exchange.places[0])]
        return _from_experts(
            self,
            blocks,
            sizes=exchange.sent[0].sum(axis=1),  # (devices,)
            received=exchange.received[0].sum(axis=1),  # (devices,)
        )

    def matmul(
        self,
        sizes: jax.Array,
        rows: jax.Array,
        kernel: jax.Array,
        bias: jax.Array | None = None,
    ) -> Any:
        """Multiplies the rows of each expert by its matrix, and adds its bias.

        With ``sizes`` bound, this method is the ``matmul`` that the user's ``experts`` get.

        Args:
          sizes: how many rows each expert has, (devices, local experts).
          rows: the rows, (rows, in).
          kernel: the matrices, (experts, in, out).
          bias: the biases, (experts, out), or None.

        Raises:
          ValueError: the kernel or the bias has another shape.
        """
        expected_kernel = (self.num_experts, rows.shape[-1], "out")
        problem = ""
        if kernel.ndim != 3 or kernel.shape[:2] != expected_kernel[:2]:
            problem = f"kernel: shape {kernel.shape}, expected {expected_kernel}"
        elif bias is not None and bias.shape != (self.num_experts, kernel.shape[2]):
            problem = f"bias: shape {bias.shape}, expected {(self.num_experts, kernel.shape[2])}"
        if problem:
            raise ValueError(f"matmul of dispatch_to_experts: {problem}.")
        # The axes that shard `in` and `out`, as tensor parallelism does; None for none.
        in_axes, out_axes = self.axes_of_dimension(kernel, 1), self.axes_of_dimension(kernel, 2)
        return self.on_each_device(
            functools.partial(self._multiply_local, in_axes),
            (sizes, rows, kernel, bias),
            in_specs=(
                P(self.group_axes),  # sizes
                P(self.group_axes, in_axes),  # rows
                P(self.expert_axis, in_axes, out_axes),  # kernel
                P(self.expert_axis, out_axes),  # bias
            ),
            out_specs=P(self.group_axes, out_axes),
        )

    def _multiply_local(
        self,
        in_axes: tuple[str, ...] | None,
        sizes: jax.Array,
        rows: jax.Array,
        kernel: jax.Array,
        bias: jax.Array | None,
    ) -> jax.Array:
        """Computes :meth:`matmul` on one device: the product of each row with its expert's kernel.

        Args:
          in_axes: the axes that shard ``in``, over which the products are summed; None for none.
          sizes: how many rows each expert of the device has, (1, local experts). The rows are in
            the order of the experts. Without a capacity, there may be more rows than these. They
            are padding, and get the product of the last row that ``sizes`` counts.
          rows: the rows, (rows, in).
          kernel: the matrices, (local experts, in, out).
          bias: the biases, (local experts, out), or None.
        """
        if self.capacity is None:
            product = jax.lax.ragged_dot(rows, kernel, sizes[0])
        else:  # all experts have equally many rows
            grouped = rows.reshape(len(kernel), -1, rows.shape[-1])  # (local experts, rows, in)
            product = jnp.einsum("erf,efo->ero", grouped, kernel).reshape(len(rows), -1)
        if in_axes:
            product = jax.lax.psum(product, in_axes)
        if bias is not None:
            # The expert of a row is the number of experts whose rows end before it. For padding the
            # number is out of range, so `get` returns a bias of 0.
            ends = jnp.cumsum(sizes[0])  # (local experts,)
            is_after = jnp.arange(len(rows))[:, None] >= ends[None]  # (rows, local experts)
            product += bias.at[is_after.sum(1)].get(mode="fill", fill_value=0)
        if self.capacity is None and self.size > 1:
            # `ragged_dot` multiplies only as many rows as `sizes` counts. If there is padding,
            # `sizes` counts its first row (`_send_all`), and the rest gets the product of that row.
            num_multiplied = sizes.sum()
            last = product[num_multiplied[None] - 1]  # (1, out)
            product = _fill_padding(product, num_multiplied, last)
        return product


# Each of the next two functions is the transpose of the other (`_define_transpose`). JAX's own
# transposes are not used, because they scatter rows, and this is slower than to gather them.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _to_experts(dispatch: _Dispatch, rows: jax.Array, sizes: jax.Array, received: jax.Array) -> Any:
    """Sends rows to the devices of their experts.

    Args:
      rows: the rows sorted by device, (C, features).
      sizes: how many rows each device gets, (devices,).
      received: how many rows each device sends to this one, (devices,).

    Returns:
      One padded block of C rows from each device, (devices · C, features).
    """
    if dispatch.mesh is None:
        return rows
    starts = jnp.cumsum(sizes) - sizes  # the first row for each device
    width = len(rows)  # the length of a block: all rows may go to the same device

    def send_ragged(rows: jax.Array) -> Any:
        # Each receiver has a block for this device. The rows go to the beginning of that block.
        block_start = jax.lax.axis_index(dispatch.expert_axis).astype(jnp.int32) * width
        return jax.lax.ragged_all_to_all(
            operand=rows,
            output=jnp.zeros((dispatch.size * width, rows.shape[-1]), rows.dtype),
            input_offsets=starts,
            send_sizes=sizes,
            # A mapped array is added, because JAX can `vmap` this operation, for example over
            # stages of a pipeline, only if all of its operands are mapped.
            output_offsets=block_start + 0 * sizes,
            recv_sizes=received,
            axis_name=dispatch.expert_axis,
        )

    def send_padded(rows: jax.Array) -> Any:
        places = jnp.arange(width)[None]
        # `blocks` has a block for each device, (devices, C, features).
        blocks = rows.at[starts[:, None] + places].get(mode="fill", fill_value=0)
        is_row = places < sizes[:, None]  # (devices, C); False for rows of the next devices
        blocks = jnp.where(is_row[:, :, None], blocks, 0)
        return dispatch.exchange(blocks, split=0, concat=0).reshape(-1, rows.shape[-1])

    return jax.lax.platform_dependent(rows, tpu=send_ragged, default=send_padded)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _from_experts(
    dispatch: _Dispatch, blocks: jax.Array, sizes: jax.Array, received: jax.Array
) -> Any:
    """Sends rows back: the inverse of :func:`_to_experts`, with the same ``sizes``, ``received``.

    Args:
      blocks: the rows to send to each device, (devices · C, features).
      sizes: how many rows of this device each device has, (devices,).
      received: how many rows of each device this one has, (devices,).

    Returns:
      The device's own rows, sorted by device, (C, features).
    """
    if dispatch.mesh is None:
        return blocks
    starts = jnp.cumsum(sizes) - sizes  # the first of this device's own rows that each device has
    width = len(blocks) // dispatch.size  # the length of a block

    def send_ragged(blocks: jax.Array) -> Any:
        # This device's block for each device.
        block_starts = jnp.arange(dispatch.size, dtype=jnp.int32) * width
        return jax.lax.ragged_all_to_all(
            operand=blocks,
            output=jnp.zeros((width, blocks.shape[-1]), blocks.dtype),
            input_offsets=block_starts + 0 * sizes,  # mapped, as in `_to_experts`
            send_sizes=received,  # as many rows go back as have come
            # Each device gets its rows at the place from which it has sent them.
            output_offsets=dispatch.exchange(starts, split=0, concat=0),
            recv_sizes=sizes,
            axis_name=dispatch.expert_axis,
        )

    def send_padded(blocks: jax.Array) -> Any:
        by_device = blocks.reshape(dispatch.size, width, -1)  # (devices, C, features)
        returned = dispatch.exchange(by_device, split=0, concat=0)
        places = jnp.arange(width)  # of the device's own rows, (C,)
        # The device to which a row was sent is the number of devices whose rows all precede it.
        is_after = places[:, None] >= jnp.cumsum(sizes)[None]  # (C, devices)
        device = is_after.sum(1)  # (C,)
        return _rows_of_blocks(returned, device, places - starts[device])

    return jax.lax.platform_dependent(blocks, tpu=send_ragged, default=send_padded)


def _define_transpose(exchange: Any, transpose: Callable[..., jax.Array]) -> None:
    """Gives an exchange, which is linear in its rows, a transpose for the backward pass.

    Args:
      exchange: a ``custom_vjp`` of (dispatch, rows, sizes, received); ``dispatch`` is static.
      transpose: a function of the same arguments, but with the gradient of the exchange's result in
        place of the rows. It returns the gradient of the rows.
    """

    def forward(dispatch: _Dispatch, rows: jax.Array, sizes: jax.Array, received: jax.Array) -> Any:
        return exchange(dispatch, rows, sizes, received), (sizes, received)

    def backward(dispatch: _Dispatch, residuals: Any, d_result: jax.Array) -> Any:
        sizes, received = residuals
        d_rows = transpose(dispatch, d_result, sizes, received)
        return d_rows, None, None  # `sizes` and `received` are integers, without gradients

    exchange.defvjp(forward, backward)


_define_transpose(_to_experts, _from_experts)
_define_transpose(_from_experts, _to_experts)


def _rows_of_blocks(blocks: jax.Array, block: jax.Array, place: jax.Array) -> jax.Array:
    """Returns ``blocks[block, place]``; zeros for places beyond the end of a block."""
    return blocks.at[block, place].get(mode="fill", fill_value=0)


def _fill_padding(rows: jax.Array, num_rows: jax.Array, filling: jax.Array) -> jax.Array:
    """Returns the rows with all rows after the first ``num_rows`` replaced by ``filling``.

    No result depends on the replaced rows, and no gradient flows to ``filling``.

    Args:
      rows: the rows, (rows, features).
      num_rows: how many rows are not replaced, ().
      filling: the row that replaces each of the other rows, (1, features).
    """
    is_row = jnp.arange(len(rows))[:, None] < num_rows
    return jnp.where(is_row, rows, jax.lax.stop_gradient(filling))
