"""Mixtures of experts: their weights on a mesh axis, and tokens that go to them and come back."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from .. import _compat
from ..activations.tracing import batch_axes_here
from ..core.constrain import given_mesh, mesh_here, retype, type_spec
from ..errors import raise_listed
from ..partition.optimizer import with_optimizer
from ..partition.strategies import activations_of, base_specs, mesh_and_axes, shard_dimension
from ..partition.variables import NamedVariable, variables
from ..specs.filters import to_predicate
from ..specs.fitting import axes_of, axes_of_type, only_axes, padded, suggestion
from ..specs.paths import accessor
from ..specs.state_sharding import StateSharding


@_compat.api_boundary
def expert_parallel(
    model: Any,
    *,
    experts: int | None = None,
    where: Any = None,
    mesh: Mesh | AbstractMesh | None = None,
    optimizer: Any = None,
    base: StateSharding | None = None,
    axis: Any = "expert",
    across_slices: bool = False,
) -> StateSharding:
    """Shards the stacked weights of experts over a mesh axis, for :func:`dispatch_to_experts`.

    They are the parameters of a module of a user's class whose first dimension, after those of
    stacked layers, is the number of experts: those with three dimensions or more, and, beside such
    a one in the same module, those with two (biases).

    Args:
      model: the model, abstract (``nnx.eval_shape``) or not.
      experts: the number of experts; None for that of the outputs of a router: a layer or parameter
        in the same module, or beside it, whose last dimension is the first of such weights.
      where: an NNX filter of the weights instead, such as ``nnx.PathContains("experts")``. Of each
        Variable, the first dimension of this size is sharded; that of stacked layers comes last.
      mesh: the mesh; None for the one in context.
      optimizer: as for :func:`fsdp`.
      base: shardings to start from. Its specs are kept, and the axis comes after those that shard
        the same dimension. With ``base=tensor_parallel(model)``, the hidden features of each expert
        are sharded as well; ``fsdp(model, base=expert_parallel(model))`` shards the experts over
        ``data`` as well, and the rest of the model over ``data``.
      axis: as for :func:`fsdp`.
      across_slices: whether ``axis`` may have devices of several TPU slices, over whose network
        tokens are then sent.

    Returns:
      The spec of each path. All of them divide the shapes.

    Raises:
      ValueError: there are no such weights, or an axis does not divide theirs: all are listed; or
        routers do not tell the number of experts.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax.sharding import AbstractMesh
      >>> from nnx_sharding.experimental import expert_parallel
      >>> from nnx_sharding.partition import tensor_parallel
      >>> class Experts(nnx.Module):
      ...     def __init__(self):
      ...         self.up = nnx.Param(jnp.ones((8, 16, 64)))
      ...         self.down = nnx.Param(jnp.ones((8, 64, 16)))
      >>> model = nnx.eval_shape(Experts)
      >>> mesh = AbstractMesh((2, 4), ("model", "expert"))
      >>> by_layer = tensor_parallel(model, mesh=mesh)
      >>> sharding = expert_parallel(model, experts=8, mesh=mesh, base=by_layer)
      >>> sharding.map_prefix(("down",), model.down)
      P('expert', 'model', None)
    """
    mesh, axes = mesh_and_axes("expert_parallel", mesh, axis, across_slices=across_slices)
    specs, problems = base_specs("expert_parallel", model, base, mesh), []
    experts = _routed(model) if experts is None else experts
    found = [*_expert_weights(model, experts, where)]
    for each, dimension in found:
        spec = shard_dimension(specs[each.path], each.shape, dimension, axes, mesh)
        if spec is None:
            text = f"{axes} cannot shard dimension {dimension} of shape {each.shape}"
            problems.append(f"  {accessor('model', each.path)}: {text}, {specs[each.path]}")
        else:
            specs[each.path] = spec
    raise_listed(ValueError, "expert_parallel:", problems, "Choose axes that divide the weights.")
    if not found:
        raise ValueError(
            f"expert_parallel: the model has no weights of {experts} experts: parameters of a "
            f"class of yours with the shape ({experts}, in, out), or what where={where!r} selects."
        )
    return with_optimizer(specs, model, optimizer, activations_of(base).extended(kept=axes))


def _expert_weights(model: Any, experts: int, where: Any) -> Iterator[tuple[NamedVariable, int]]:
    """The weights of experts, with the dimension of these."""
    if where is not None:
        is_wanted = to_predicate(where)
        for each in variables(model):
            own_first = [*each.layer_dimensions, *each.layers.dimensions]
            found = (d for d in own_first if (each.shape or ())[d] == experts)
            dimension = next(found, None)
            if dimension is not None and is_wanted(each.path, each.variable):
                yield each, dimension
        return
    own = [each for each in _own_parameters(model) if each.layer_shape[:1] == (experts,)]
    modules = {each.path[:-1] for each in own if len(each.layer_shape) > 2}
    for each in own:
        if each.path[:-1] in modules and len(each.layer_shape) > 1:
            yield each, each.layer_dimensions[0]


def _own_parameters(model: Any) -> list[NamedVariable]:
    """The parameters of modules of a user's class."""
    nodes = nnx.iter_graph(model, graph=True)
    of_flax = {path for path, node in nodes if type(node).__module__.startswith("flax.")}
    return [
        each
        for each in variables(model)
        if isinstance(each.variable, nnx.Param) and each.path[:-1] not in of_flax
    ]


def _routed(model: Any) -> int:
    """The number of experts that the outputs of routers tell."""
    routers = [each for each in variables(model) if len(each.layer_shape) == 2]
    sizes = {
        shape[0]
        for each in _own_parameters(model)
        if len(shape := each.layer_shape) > 2
        for router in routers
        if router.path[: len(beside := each.path[:-2])] == beside
        if router.layer_shape[-1] == shape[0]
    }
    if len(sizes) != 1:
        known = f"may be {' or '.join(map(str, sorted(sizes)))}" if sizes else "is not known"
        raise ValueError(f"expert_parallel: the number of experts {known}. Pass experts=….")
    return sizes.pop()


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
    problems = [*_wrong_shapes(x, weights, indices, logits, num_experts, capacity)]
    sizes: Mapping[str, int] = {} if mesh is None else mesh.shape
    problems += [
        f"axis {each!r}{suggestion(each, sizes)}: the mesh has {', '.join(map(repr, sizes))}"
        for each in axes
        if mesh is not None and each not in sizes
    ]
    size, shards = sizes.get(axis, 1), math.prod(sizes.get(each, 1) for each in axes)
    if num_experts % size:
        problems.append(f"{num_experts} experts: {axis!r} of size {size} does not divide them")
    if x.shape and x.shape[0] % shards:
        over = f"{shards} shards over {', '.join(axes)}"
        problems.append(f"{x.shape[0]} groups: {over} do not divide them")
    raise_listed(ValueError, "dispatch_to_experts:", [f"  {line}" for line in problems])
    layout = _Layout(mesh, axis, axes, num_experts, capacity)
    last = layout.last_entry(x)
    own = P(axes)  # the first dimension of all that a device knows
    in_specs, out_specs = (P(axes, None, last), own), (P(axes, last), own, P(), P())
    rows, sent, tokens, dropped = layout.run(layout.send, in_specs, out_specs, x, indices)
    count, rows = len(rows), experts(rows, functools.partial(layout.matmul, sent.sizes))
    if rows.ndim != 2 or len(rows) != count:
        found = jax.typeof(rows)
        raise ValueError(f"dispatch_to_experts: experts returned {found} for {count} rows.")
    last = layout.last_entry(rows)
    back = (P(axes, last), own, own), P(axes, None, last)
    output = layout.run(layout.receive, *back, rows, sent, weights)
    return output, ExpertStatistics(tokens, dropped, *_losses(logits, tokens))


def _wrong_shapes(
    x: Any, weights: Any, indices: Any, logits: Any, num_experts: int, capacity: int | None
) -> Iterator[str]:
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


def _losses(logits: Any, tokens: jax.Array) -> tuple[Any, Any]:
    """The balance loss, and the z-loss."""
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
    sizes: jax.Array  # (1, own experts): rows of each of its experts
    # Without a capacity:
    counts: Any = None  # (1, experts): how often each is chosen
    places: Any = None  # (1, rows): of the rows that it got, where they are sorted by expert
    received: Any = None  # (1, devices of the axis, own experts): rows from each device


class _Layout(NamedTuple):
    """Where tokens and experts are."""

    mesh: Any
    axis: str
    axes: tuple[str, ...]  # those that shard the groups
    num_experts: int
    capacity: int | None

    @property
    def size(self) -> int:
        """The number of devices over which the experts are sharded."""
        return 1 if self.mesh is None else self.mesh.shape[self.axis]

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

    def send(self, x: jax.Array, indices: jax.Array) -> Any:
        """The rows that this device gets, what it knows of them, and two figures of all devices."""
        if self.capacity is None:
            x, indices = x.reshape(1, -1, x.shape[-1]), indices.reshape(1, -1, indices.shape[-1])
        flat = indices.astype(jnp.int32).swapaxes(1, 2).reshape(len(indices), -1)
        order = jnp.argsort(flat, axis=1, stable=True)
        experts = jnp.take_along_axis(flat, order, 1)
        counts = (flat[:, :, None] == jnp.arange(self.num_experts)).sum(1, dtype=jnp.int32)
        starts = jnp.cumsum(counts, 1) - counts
        ranks = jnp.arange(flat.shape[1]) - jnp.take_along_axis(starts, experts, 1)
        rows = jnp.take_along_axis(x, (order % x.shape[1])[:, :, None], 1)
        own = self.num_experts // self.size
        if self.capacity is not None:
            # In unused places other tokens: where all is zero, the experts may have no gradient.
            places = starts[:, :, None] + jnp.arange(self.capacity)
            blocks = jax.vmap(lambda rows, at: rows.at[at].get(mode="clip"))(rows, places)
            blocks = self.exchange(blocks.swapaxes(0, 1), 0, 1)
            sizes = jnp.full((1, own), blocks.shape[1] * self.capacity, jnp.int32)
            sent = _Sent(order, experts, ranks, sizes)
            dropped = jnp.maximum(counts - self.capacity, 0).sum()
            return blocks.reshape(-1, x.shape[-1]), sent, self.sum(counts.sum(0)), self.sum(dropped)
        received = self.exchange(counts.reshape(self.size, own), 0, 0)
        sizes = counts[0].reshape(self.size, own).sum(1)
        blocks = _to_experts(self, rows[0], sizes, received.sum(1))
        ends = jnp.cumsum(received, 1)[:, :, None]
        own_expert = (jnp.arange(rows.shape[1]) >= ends).sum(1).ravel()  # of rows in the blocks
        places = jnp.argsort(own_expert, stable=True)
        sizes = received.sum(0)
        sent = _Sent(order, experts, ranks, sizes[None], counts, places[None], received[None])
        return blocks[places], sent, self.sum(counts[0]), jnp.zeros((), jnp.int32)

    def receive(self, rows: jax.Array, sent: _Sent, weights: jax.Array) -> jax.Array:
        """The outputs of this device's tokens, from the rows of its experts."""
        own, shape = self.num_experts // self.size, weights.shape
        if self.capacity is not None:
            blocks = rows.reshape(own, self.size * shape[0], self.capacity, rows.shape[-1])
            blocks = self.exchange(blocks, 1, 0).swapaxes(0, 1)
            rows = jax.vmap(_from_blocks)(blocks, sent.experts, sent.ranks)
        else:
            blocks = rows[jnp.argsort(sent.places[0])]
            sizes = sent.counts[0].reshape(self.size, own).sum(1)
            rows = _from_experts(self, blocks, sizes, sent.received[0].sum(1))[None]
        rows = jnp.take_along_axis(rows, jnp.argsort(sent.order, axis=1)[:, :, None], 1)
        rows = rows.reshape(len(rows), shape[-1], -1, rows.shape[-1]).swapaxes(1, 2)
        rows = rows.reshape(*shape, rows.shape[-1])
        return jnp.einsum("gtk,gtkf->gtf", weights.astype(rows.dtype), rows)

    def matmul(self, sizes: Any, rows: Any, kernel: Any, bias: Any = None) -> Any:
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

    def multiply(self, inner: Any, sizes: Any, rows: Any, kernel: Any, bias: Any) -> jax.Array:
        """The same for the experts of one device; ``inner`` shards the inner dimension."""
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
def _to_experts(layout: _Layout, rows: Any, sizes: Any, received: Any) -> Any:
    """Sends rows, sorted by device, to these; returns what each device sent in a block."""
    if layout.mesh is None:
        return rows
    starts, width = jnp.cumsum(sizes) - sizes, len(rows)

    def ragged(rows: jax.Array) -> Any:
        space = jnp.zeros((layout.size * width, rows.shape[-1]), rows.dtype)
        own = jax.lax.axis_index(layout.axis).astype(jnp.int32) * width
        # JAX can `vmap` it, as over stages of a pipeline, only if all of these are mapped.
        where = starts, sizes, own + 0 * sizes, received
        return jax.lax.ragged_all_to_all(rows, space, *where, axis_name=layout.axis)

    def padded(rows: Any) -> Any:
        places = jnp.arange(width)
        blocks = rows.at[starts[:, None] + places].get(mode="fill", fill_value=0)
        blocks = jnp.where((places < sizes[:, None])[:, :, None], blocks, 0)
        return layout.exchange(blocks, 0, 0).reshape(-1, rows.shape[-1])

    return jax.lax.platform_dependent(rows, tpu=ragged, default=padded)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _from_experts(layout: _Layout, blocks: Any, sizes: Any, received: Any) -> Any:
    """The inverse: sends each block back, and returns the rows sorted by device."""
    if layout.mesh is None:
        return blocks
    starts, width = jnp.cumsum(sizes) - sizes, len(blocks) // layout.size

    def ragged(blocks: jax.Array) -> Any:
        space = jnp.zeros((width, blocks.shape[-1]), blocks.dtype)
        own = jnp.arange(layout.size, dtype=jnp.int32) * width
        wanted = layout.exchange(starts, 0, 0)  # where each device has its rows of this one
        where = own + 0 * sizes, received, wanted, sizes
        return jax.lax.ragged_all_to_all(blocks, space, *where, axis_name=layout.axis)

    def padded(blocks: Any) -> Any:
        back = layout.exchange(blocks.reshape(layout.size, width, -1), 0, 0)
        places = jnp.arange(width)
        device = (places[:, None] >= jnp.cumsum(sizes)).sum(1)
        return _from_blocks(back, device, places - starts[device])

    return jax.lax.platform_dependent(blocks, tpu=ragged, default=padded)


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
