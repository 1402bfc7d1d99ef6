"""Tokens that go to the devices of their experts, and come back: two all-to-alls.

Each device has groups of tokens, and each expert is on one device of an axis of size n. A token has
k choices, so a group of T tokens has C = k·T choices, with the first choices of all tokens first:

    choices     e2 e0 e1 | e0 e2 e2      expert of the first, and of the second choice of 3 tokens
    order       1 3 | 2 | 0 4 5          choices sorted by expert (`argsort`, stable)
    counts      2     1   3              how many choose each expert
    ranks       0 1   0   0 1 2          place of a sorted choice among those of its expert

**With a capacity** c, each group sends to each expert a block of c rows: the sorted choices of rank
below c. Others are dropped. Each expert gets equally many rows, so one einsum multiplies all.

**Without**, the choices of all groups of a device are one group. It sends to each device as many
rows as choose its experts (``ragged_all_to_all`` on TPUs; padded blocks elsewhere), which that
device sorts by expert, for ``jax.lax.ragged_dot``.

Back they go in the inverse order, and are added with their weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from .. import _compat
from ..activations.tracing import batch_axes_here
from ..core.constrain import given_mesh, mesh_here, retype, type_spec
from ..errors import raise_listed
from ..specs.fitting import axes_of, axes_of_type, only_axes, padded, suggestion


class ExpertStatistics(NamedTuple):
    """How tokens were distributed over experts."""

    tokens: jax.Array  # (experts,): how often each was chosen, as int32
    dropped: jax.Array  # (): how many of these choices exceeded a capacity, as int32
    # (): 1 if experts are used equally; None without logits. It is that of the tokens of the call:
    # in a pipeline or with accumulated gradients of one microbatch, whose mean is another number.
    balance_loss: jax.Array | None
    z_loss: jax.Array | None  # (): the mean square of log-sum-exp of the logits; None without


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
    """The weighted sum, for each token, of what the experts chosen for it compute.

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
      weights: of the experts of each token, of shape (groups, tokens, k).
      indices: of these experts, integers of shape (groups, tokens, k), different for each token.
      experts: computes all experts: takes the tokens as rows of shape (rows, features), and a
        function ``matmul(rows, kernel, bias=None)``, which multiplies each row by the matrix of its
        expert. Kernels have the shape (num_experts, in, out), biases (num_experts, out). All else
        that it does has to be elementwise, or along the features.
      num_experts: their number, which the axis has to divide.
      capacity: how many tokens of each group an expert takes; None for all. The first choices of
        all tokens precede their second choices, and among these the order is that of the tokens.
        An expert that a token is dropped from adds nothing to its output.
      logits: of the router, of shape (groups, tokens, num_experts), for the auxiliary losses.
      mesh: the mesh; None for the one in context. Without any, all is computed on one device.
      axis: the mesh axis that shards the experts.
      batch_axes: the other mesh axes that shard the groups; None for those over which ``jit``
        shards the first dimension of the data of a model, else ``data``, if there is one.

    Returns:
      The outputs, of shape (groups, tokens, features of the outputs), and
      :class:`ExpertStatistics` over all devices: how often each expert was chosen, the number of
      dropped choices, and two losses, which are None without ``logits``.

    Raises:
      ValueError: shapes do not fit each other, the number of experts or the mesh; the mesh lacks an
        axis. All of them are listed.

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
    if batch_axes is None:
        of_rows = batch_axes_here() or {"data"}
        names = () if mesh is None else mesh.axis_names
        batch_axes = [name for name in names if name in of_rows and name != axis]
    axes = (*batch_axes, axis)
    problems = [
        *_wrong_shapes(x, weights, indices, logits, num_experts, capacity),
        *_wrong_mesh(x, num_experts, mesh, axis, axes),
    ]
    raise_listed(ValueError, "dispatch_to_experts:", [f"  {line}" for line in problems])
    layout = _Layout(mesh, axis, axes, num_experts, capacity)
    device = P(axes)  # of what each device knows: the first dimension is the devices
    last = layout.last_entry(x)
    in_specs, out_specs = (P(axes, None, last), device), (P(axes, last), device, P(), P())
    rows, sent, tokens, dropped = layout.run(layout.send, in_specs, out_specs, x, indices)
    count, rows = len(rows), experts(rows, functools.partial(layout.matmul, sent.sizes))
    if rows.ndim != 2 or len(rows) != count:
        returned = jax.typeof(rows)
        raise ValueError(f"dispatch_to_experts: experts returned {returned} for {count} rows.")
    last = layout.last_entry(rows)
    back = (P(axes, last), device, device), P(axes, None, last)
    output = layout.run(layout.receive, *back, rows, sent, weights)
    return output, ExpertStatistics(tokens, dropped, *_losses(logits, tokens))


def _wrong_mesh(
    x: jax.Array,
    num_experts: int,
    mesh: Mesh | AbstractMesh | None,
    axis: str,
    axes: Sequence[str],
) -> Iterator[str]:
    """Says which axes the mesh lacks, and what they do not divide."""
    sizes: Mapping[str, int] = {} if mesh is None else mesh.shape
    for name in axes:
        if mesh is not None and name not in sizes:
            known = ", ".join(map(repr, sizes))
            yield f"axis {name!r}{suggestion(name, sizes)}: the mesh has {known}"
    size, shards = sizes.get(axis, 1), math.prod(sizes.get(name, 1) for name in axes)
    if num_experts % size:
        yield f"{num_experts} experts: {axis!r} of size {size} does not divide them"
    if x.shape and x.shape[0] % shards:
        over = f"{shards} shards over {', '.join(axes)}"
        yield f"{x.shape[0]} groups: {over} do not divide them"


def _wrong_shapes(
    x: jax.Array,
    weights: jax.Array,
    indices: jax.Array,
    logits: jax.Array | None,
    num_experts: int,
    capacity: int | None,
) -> Iterator[str]:
    """Says which shapes do not fit each other."""
    if x.ndim != 3:
        yield f"x: shape {x.shape}, expected (groups, tokens, features)"
        return
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
    """Returns the balance loss and the z-loss, from logits of shape (groups, tokens, experts)."""
    if logits is None:
        return None, None
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    chosen = tokens / tokens.sum()
    probability = jax.nn.softmax(logits).mean((0, 1))
    balance = tokens.size * (chosen.astype(logits.dtype) * probability).sum()
    return balance, jnp.square(jax.nn.logsumexp(logits, axis=-1)).mean()


class _Sent(NamedTuple):
    """What a device knows of its rows; with a capacity, each group of tokens is sent alone."""

    order: jax.Array  # (groups, choices): of the choices, sorted by expert
    experts: jax.Array  # (groups, choices): those of the sorted choices
    ranks: jax.Array  # (groups, choices): their places among those of the same expert
    sizes: Any = None  # (1, own experts): rows of each of its experts
    # Without a capacity:
    counts: Any = None  # (1, experts): how often each is chosen
    places: Any = None  # (1, rows): of the rows that it got, where they are sorted by expert
    received: Any = None  # (1, devices of the axis, own experts): rows from each device


class _Layout(NamedTuple):
    """Where tokens and experts are."""

    mesh: Mesh | AbstractMesh | None
    axis: str
    axes: tuple[str, ...]  # those that shard the groups
    num_experts: int
    capacity: int | None

    @property
    def size(self) -> int:
        """The number of devices over which the experts are sharded."""
        return 1 if self.mesh is None else self.mesh.shape[self.axis]

    @property
    def num_own(self) -> int:
        """The number of experts on each device."""
        return self.num_experts // self.size

    def explicit(self) -> set[str]:
        """The Explicit axes of the mesh in context."""
        if self.mesh is None:
            return set()
        return {*axes_of_type(mesh_here(self.mesh), AxisType.Explicit)}

    def last_entry(self, x: Any, dimension: int = -1) -> Any:
        """How the type of an array shards a dimension over axes that do not shard the groups."""
        spec = type_spec(x) if self.explicit() else None
        entry = None if spec is None else padded(spec, x.ndim)[dimension]
        return tuple(name for name in axes_of(entry) if name not in self.axes) or None

    def run(self, fun: Callable[..., Any], in_specs: Any, out_specs: Any, *args: Any) -> Any:
        """Runs a function on each device of the axes, and of all Explicit ones."""
        if self.mesh is None:
            return fun(*args)
        mesh, explicit = mesh_here(self.mesh), self.explicit()

        def typed(x: Any, spec: P) -> Any:
            part = only_axes(spec, explicit)
            return jax.tree.map(lambda leaf: retype(leaf, mesh, part), x)

        args = tuple(map(typed, args, in_specs)) if explicit else args
        specs = {"in_specs": in_specs, "out_specs": out_specs}
        names = explicit.union(self.axes, _compat.spmd_axes())
        return jax.shard_map(fun, mesh=mesh, axis_names=names, check_vma=False, **specs)(*args)

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum over all devices that have tokens."""
        return x if self.mesh is None else jax.lax.psum(x, self.axes)

    def exchange(self, x: jax.Array, split: int, concat: int) -> Any:
        """An all-to-all over the axis."""
        if self.mesh is None:
            return x
        return jax.lax.all_to_all(x, self.axis, split, concat, tiled=True)

    def send(self, x: jax.Array, indices: jax.Array) -> tuple[jax.Array, _Sent, Any, Any]:
        """Sends the tokens of a device to their experts.

        Args:
          x: (groups, tokens, features).
          indices: (groups, tokens, k).

        Returns:
          The rows that the device gets, (rows, features), what it knows of them, and of all devices
          together how often each expert was chosen, and how many choices were dropped.
        """
        if self.capacity is None:  # all groups are one
            x, indices = x.reshape(1, -1, x.shape[-1]), indices.reshape(1, -1, indices.shape[-1])
        choices = indices.astype(jnp.int32).swapaxes(1, 2)  # (groups, k, tokens)
        choices = choices.reshape(len(choices), -1)  # (groups, C)
        order = jnp.argsort(choices, axis=1, stable=True)
        experts = jnp.take_along_axis(choices, order, 1)
        counts = (choices[:, :, None] == jnp.arange(self.num_experts)).sum(1, dtype=jnp.int32)
        starts = jnp.cumsum(counts, 1) - counts  # (groups, experts)
        ranks = jnp.arange(choices.shape[1]) - jnp.take_along_axis(starts, experts, 1)
        rows = jnp.take_along_axis(x, (order % x.shape[1])[:, :, None], 1)  # (groups, C, features)
        sent = _Sent(order, experts, ranks, counts=counts)
        if self.capacity is None:
            blocks, sent = self._send_all(rows[0], sent)
            return blocks, sent, self.sum(counts[0]), jnp.zeros((), jnp.int32)
        blocks, sent = self._send_blocks(rows, starts, sent, self.capacity)
        dropped = jnp.maximum(counts - self.capacity, 0).sum()
        return blocks, sent, self.sum(counts.sum(0)), self.sum(dropped)

    def _send_blocks(
        self, rows: jax.Array, starts: jax.Array, sent: _Sent, capacity: int
    ) -> tuple[jax.Array, _Sent]:
        """Sends sorted rows, (groups, C, features), in a block of one size for each expert."""
        # In unused places other tokens: where all is zero, the experts may have no gradient.
        places = starts[:, :, None] + jnp.arange(capacity)  # (groups, experts, capacity)
        blocks = jax.vmap(lambda rows, at: rows.at[at].get(mode="clip"))(rows, places)
        blocks = blocks.swapaxes(0, 1)  # (experts, groups, capacity, features)
        blocks = self.exchange(blocks, 0, 1)  # (own experts, groups of all, capacity, features)
        count = blocks.shape[1] * capacity
        sizes = jnp.full((1, self.num_own), count, jnp.int32)
        # Only what is needed on the way back leaves the device.
        sent = sent._replace(sizes=sizes, counts=None)
        return blocks.reshape(-1, rows.shape[-1]), sent

    def _send_all(self, rows: jax.Array, sent: _Sent) -> tuple[jax.Array, _Sent]:
        """Sends sorted rows, (C, features), to each device as many as choose its experts."""
        by_device = sent.counts[0].reshape(self.size, self.num_own)
        received = self.exchange(by_device, 0, 0)  # rows from each device, for each own expert
        blocks = _to_experts(self, rows, by_device.sum(1), received.sum(1))
        # In a block rows are sorted by expert; what is beyond them belongs to none, and goes last.
        ends = jnp.cumsum(received, 1)[:, :, None]  # (size, own experts, 1)
        expert = (jnp.arange(len(rows)) >= ends).sum(1).ravel()  # of each row in the blocks
        places = jnp.argsort(expert, stable=True)
        sizes = received.sum(0)[None]
        sent = sent._replace(sizes=sizes, places=places[None], received=received[None])
        return blocks[places], sent

    def receive(self, rows: jax.Array, sent: _Sent, weights: jax.Array) -> jax.Array:
        """Returns the outputs of a device's tokens, from the rows of its experts.

        Args:
          rows: (rows, features of outputs).
          sent: what the device knows of the rows that it sent and got.
          weights: of its tokens, (groups, tokens, k).
        """
        shape = weights.shape
        if self.capacity is not None:
            blocks = rows.reshape(self.num_own, self.size * shape[0], self.capacity, rows.shape[-1])
            blocks = self.exchange(blocks, 1, 0).swapaxes(0, 1)  # (groups, experts, capacity, …)
            rows = jax.vmap(_from_blocks)(blocks, sent.experts, sent.ranks)
        else:
            blocks = rows[jnp.argsort(sent.places[0])]
            sizes = sent.counts[0].reshape(self.size, self.num_own).sum(1)
            rows = _from_experts(self, blocks, sizes, sent.received[0].sum(1))[None]
        rows = jnp.take_along_axis(rows, jnp.argsort(sent.order, axis=1)[:, :, None], 1)
        rows = rows.reshape(len(rows), shape[-1], -1, rows.shape[-1])  # (groups, k, tokens, …)
        rows = rows.swapaxes(1, 2).reshape(*shape, rows.shape[-1])  # (groups, tokens, k, …)
        return jnp.einsum("gtk,gtkf->gtf", weights.astype(rows.dtype), rows)

    def matmul(
        self,
        sizes: jax.Array,
        rows: jax.Array,
        kernel: jax.Array,
        bias: jax.Array | None = None,
    ) -> Any:
        """Multiplies the rows of each expert by its matrix, and adds its bias."""
        expected, wrong = (self.num_experts, rows.shape[-1], "out"), ""
        if kernel.ndim != 3 or kernel.shape[:2] != expected[:2]:
            wrong = f"kernel: shape {kernel.shape}, expected {expected}"
        elif bias is not None and bias.shape != (self.num_experts, kernel.shape[2]):
            wrong = f"bias: shape {bias.shape}, expected {(self.num_experts, kernel.shape[2])}"
        if wrong:
            raise ValueError(f"matmul of dispatch_to_experts: {wrong}.")
        inner, outer = self.last_entry(kernel, 1), self.last_entry(kernel, 2)
        in_specs = (
            P(self.axes),
            P(self.axes, inner),
            P(self.axis, inner, outer),
            P(self.axis, outer),
        )
        multiply = functools.partial(self.multiply, inner)
        return self.run(multiply, in_specs, P(self.axes, outer), sizes, rows, kernel, bias)

    def multiply(
        self,
        inner: Any,
        sizes: jax.Array,
        rows: jax.Array,
        kernel: jax.Array,
        bias: jax.Array | None,
    ) -> jax.Array:
        """Does so for the experts of one device; ``inner`` shards the inner dimension."""
        if self.capacity is None:
            product = jax.lax.ragged_dot(rows, kernel, sizes[0])
        else:
            grouped = rows.reshape(len(kernel), -1, rows.shape[-1])
            product = jnp.einsum("erf,efo->ero", grouped, kernel).reshape(len(rows), -1)
        if inner:
            product = jax.lax.psum(product, inner)
        if bias is not None:
            expert = (jnp.arange(len(rows))[:, None] >= jnp.cumsum(sizes[0])).sum(1)
            product += bias.at[expert].get(mode="fill", fill_value=0)
        return product


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _to_experts(layout: _Layout, rows: jax.Array, sizes: jax.Array, received: jax.Array) -> Any:
    """Sends rows, sorted by device, to these; returns what each device sent in a block."""
    if layout.mesh is None:
        return rows
    starts, width = jnp.cumsum(sizes) - sizes, len(rows)

    def send_ragged(rows: jax.Array) -> Any:
        space = jnp.zeros((layout.size * width, rows.shape[-1]), rows.dtype)
        own = jax.lax.axis_index(layout.axis).astype(jnp.int32) * width
        # JAX can `vmap` it, as over stages of a pipeline, only if all of these are mapped.
        where = starts, sizes, own + 0 * sizes, received
        return jax.lax.ragged_all_to_all(rows, space, *where, axis_name=layout.axis)

    def send_padded(rows: jax.Array) -> Any:
        places = jnp.arange(width)
        blocks = rows.at[starts[:, None] + places].get(mode="fill", fill_value=0)
        blocks = jnp.where((places < sizes[:, None])[:, :, None], blocks, 0)
        return layout.exchange(blocks, 0, 0).reshape(-1, rows.shape[-1])

    return jax.lax.platform_dependent(rows, tpu=send_ragged, default=send_padded)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _from_experts(layout: _Layout, blocks: jax.Array, sizes: jax.Array, received: jax.Array) -> Any:
    """The inverse: sends each block back, and returns the rows sorted by device."""
    if layout.mesh is None:
        return blocks
    starts, width = jnp.cumsum(sizes) - sizes, len(blocks) // layout.size

    def send_ragged(blocks: jax.Array) -> Any:
        space = jnp.zeros((width, blocks.shape[-1]), blocks.dtype)
        own = jnp.arange(layout.size, dtype=jnp.int32) * width
        wanted = layout.exchange(starts, 0, 0)  # where each device has its rows of this one
        where = own + 0 * sizes, received, wanted, sizes
        return jax.lax.ragged_all_to_all(blocks, space, *where, axis_name=layout.axis)

    def send_padded(blocks: jax.Array) -> Any:
        back = layout.exchange(blocks.reshape(layout.size, width, -1), 0, 0)
        places = jnp.arange(width)
        device = (places[:, None] >= jnp.cumsum(sizes)).sum(1)
        return _from_blocks(back, device, places - starts[device])

    return jax.lax.platform_dependent(blocks, tpu=send_ragged, default=send_padded)


def _keeping_sizes(exchange: Any, layout: _Layout, rows: Any, *sizes: Any) -> Any:
    return exchange(layout, rows, *sizes), sizes


def _undone(inverse: Any, layout: _Layout, sizes: Any, rows: Any) -> Any:
    return inverse(layout, rows, *sizes), None, None


# Each is the transpose of the other: rows that no device sent are zeros.
for _one, _other in (_to_experts, _from_experts), (_from_experts, _to_experts):
    _one.defvjp(functools.partial(_keeping_sizes, _one), functools.partial(_undone, _other))


def _from_blocks(blocks: jax.Array, block: jax.Array, place: jax.Array) -> Any:
    """Rows of blocks; zeros where a block has no such place."""
    return blocks.at[block, place].get(mode="fill", fill_value=0)
