"""Where a sequence is: the mesh axes over which attention is mapped, and moves along them.

Attention runs as one function on each device, by ``jax.shard_map`` over some axes of the mesh, the
*mapped* axes. Over the other axes the compiler splits the function. The *info* of tokens are arrays
with a number for each token, such as the position (``blocks.py`` has the records). *Axes* are a
tuple of names, major first; ``()`` shards nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from .. import _compat
from ..core.constrain import mesh_in_trace, retype, type_mesh, type_spec
from ..core.known_faults import refuse_gradients_of_varying
from ..specs.fitting import axes_of, axes_of_type, keep_axes, pad_entries
from .blocks import AttentionArrays, TokenInfo, Visibility

Axes = tuple[str, ...]


class Layout(NamedTuple):
    """Which mesh axes shard the arrays of an attention; it is hashable.

    Attributes:
      mesh: the mesh; None for one device.
      sequence: the axes that shard the sequence, major first. A device's index along the sequence
        (`device_index`) counts along these axes.
      batch: the axes that shard the batch: Explicit axes, and axes that the user named.
      heads: the axes that shard the heads, found in the same way.
      mapped: all axes over which the function of each device is mapped.
    """

    mesh: Mesh | AbstractMesh | None
    sequence: Axes
    batch: Axes
    heads: Axes
    mapped: frozenset[Any]

    def count(self, axes: Axes) -> int:
        """Returns the number of devices along some axes."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in axes)

    def token_spec(self, sequence: Axes, heads: Axes | None = None) -> P:
        """Returns the spec of (b, tokens, heads, features), with an entry for all but the last.

        Args:
          sequence: the axes that shard the tokens.
          heads: the axes that shard the heads; None for those of the layout.
        """
        heads = self.heads if heads is None else heads
        return P(_entry(self.batch), _entry(sequence), _entry(heads))

    def array_specs(
        self,
        arrays: AttentionArrays,
        *,
        query_axes: Axes,
        key_axes: Axes,
        info_axes: Axes | None = None,
    ) -> AttentionArrays:
        """Returns the same record with a ``PartitionSpec`` instead of each array.

        Args:
          arrays: the arrays of the attention.
          query_axes: the axes that shard the queries, their info and their rows of a mask.
          key_axes: the axes that shard keys and values. All columns of a mask are on each device.
          info_axes: the axes that shard the info of the keys; None for ``key_axes``.
        """
        info_axes = key_axes if info_axes is None else info_axes
        key_spec = self.token_spec(key_axes)
        specs: Any = arrays  # `Any`, as the types of fields say arrays and not specs
        return specs._replace(  # type: ignore[no-any-return]
            query=self.token_spec(query_axes),
            key=key_spec,
            value=key_spec,
            key_info=self._info_specs(arrays.key_info, info_axes),
            visibility=self._visibility_specs(arrays.visibility, query_axes),
        )

    def _info_specs(self, info: TokenInfo, sequence: Axes) -> TokenInfo:
        """Returns the specs of the info of tokens; the axes ``sequence`` shard the tokens."""

        def spec(x: jax.Array) -> P:
            if x.ndim == 1:  # (tokens,)
                return P(_entry(sequence))
            return P(_entry(self.batch), _entry(sequence))  # (b, tokens)

        # A field that is None has no leaf, and stays None.
        return jax.tree.map(spec, info)  # type: ignore[no-any-return]

    def _visibility_specs(self, visibility: Visibility, sequence: Axes) -> Visibility:
        """Returns the specs of what decides on visibility; ``sequence`` shards the queries.

        A dimension of size 1 stands for all rows, heads or queries, so each device has it.
        """
        mask, dropout = visibility.mask, visibility.dropout
        query_info = self._info_specs(visibility.query_info, sequence)
        specs: Any = visibility._replace(query_info=query_info)  # `Any`: of specs, not arrays
        if mask is not None:  # (b or 1, heads or 1, queries or 1, all keys)
            axes_of_dimensions = (self.batch, self.heads, sequence)
            pairs = zip(axes_of_dimensions, mask.shape[:3], strict=True)
            entries = [_entry(axes) if size > 1 else None for axes, size in pairs]
            specs = specs._replace(mask=P(*entries))
        if dropout is not None:
            rows = _entry(self.batch) if dropout.rows.size > 1 else None
            key_heads = _entry(self.heads) if dropout.heads.size > 1 else None
            dropout_specs: Any = dropout
            dropout_specs = dropout_specs._replace(words=P(), rows=P(rows), heads=P(key_heads))
            specs = specs._replace(dropout=dropout_specs)
        return specs  # type: ignore[no-any-return]

    def map(self, fun: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Returns the function that runs ``fun`` on each device, by ``jax.shard_map``.

        Args:
          fun: takes and returns what one device has. Without a mesh, one device has everything,
            and ``fun`` itself is returned.
          in_specs: for each argument a spec, or a pytree of specs with the structure of the
            argument. Specs name mapped axes only.
          out_specs: the same for the result.
        """
        if self.mesh is None:
            return fun
        mesh = mesh_in_trace(self.mesh)
        run = jax.shard_map(
            fun,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=self.mapped,
            check_vma=False,  # functions of users, such as kernels, may not pass this check
        )

        def typed_run(*args: Any) -> Any:
            # `check_vma` is off, so JAX would get gradients wrong in an outer map where it is on.
            args = refuse_gradients_of_varying(args, name="attention over a sharded sequence")
            return run(*jax.tree.map(self.typed, args, in_specs))

        return typed_run

    def typed(self, x: jax.Array, spec: P) -> jax.Array:
        """Gives an array the sharding of a spec in its type, over mapped axes that are Explicit.

        JAX requires such a type before a function is mapped over Explicit axes. Other Explicit axes
        stay. For example, "data" and "context" are Explicit, and only "context" is mapped. The spec
        ``P(None, "context")`` then gives an array of type ``P("data")`` the type
        ``P("data", "context")``.
        """
        if self.mesh is None:
            return x
        mesh = mesh_in_trace(self.mesh)
        explicit = axes_of_type(mesh, AxisType.Explicit)
        if explicit.isdisjoint(self.mapped):
            return x
        mapped_entries = pad_entries(keep_axes(spec, explicit), x.ndim)
        # An array whose type has no mesh has no axes to keep.
        kept_spec = keep_axes(type_spec(x) or P(), explicit - self.mapped)
        kept_entries = pad_entries(kept_spec, x.ndim)
        pairs = zip(mapped_entries, kept_entries, strict=True)
        entries = [kept if mapped is None else mapped for mapped, kept in pairs]
        return retype(x, mesh, P(*entries))  # type: ignore[no-any-return]

    def next_device(self, tree: Any) -> Any:
        """Sends arrays to the next device along the sequence; returns the previous device's arrays.

        The last device sends to the first one. Without a mesh, the arrays are returned.
        """
        if self.mesh is None:
            return tree
        size = self.count(self.sequence)
        return self.permute(tree, [(i, (i + 1) % size) for i in range(size)])

    def permute(self, tree: Any, route: Sequence[tuple[int, int]]) -> Any:
        """Sends arrays to other devices along the sequence.

        Args:
          tree: the arrays.
          route: pairs of indices along the sequence: a device, and the device to which it sends.

        Returns:
          The arrays that each device got.
        """
        assert self.mesh is not None
        # JAX requires the axes in the order of the mesh. The sequence may have another order, so
        # indices along the sequence are translated into indices along the axes in that order.
        axes = tuple(axis for axis in self.mesh.axis_names if axis in self.sequence)
        numbers = np.arange(self.count(axes)).reshape([self.mesh.shape[axis] for axis in axes])
        along_sequence = numbers.transpose([axes.index(axis) for axis in self.sequence]).ravel()
        pairs = [(int(along_sequence[i]), int(along_sequence[j])) for i, j in route]
        return jax.lax.ppermute(tree, axes, pairs)

    def device_index(self) -> Any:
        """Returns the index of this device along the sequence; 0 without a mesh."""
        return 0 if self.mesh is None else jax.lax.axis_index(self.sequence)


def layout_of(
    mesh: Mesh | AbstractMesh | None,
    query: jax.Array,
    sequence: Axes,
    batch: str | Axes | None,
    heads: str | Axes | None,
    *,
    is_opaque: bool,
) -> Layout:
    """Finds the layout of an attention.

    Args:
      mesh: the mesh, or None.
      query: the queries, (b, tokens, heads, features); Explicit axes are in their type.
      sequence: the axes that shard the sequence.
      batch: the Auto axes that shard the batch, as the user named them.
      heads: the Auto axes that shard the heads, as the user named them.
      is_opaque: whether the compiler cannot split the function of each device, such as a kernel.
        The function is then mapped over all axes, because no axis may be left to the compiler.
    """
    if mesh is None:
        return Layout(None, sequence=(), batch=(), heads=(), mapped=frozenset())
    sizes = mesh.shape
    spec = type_spec(query) if type_mesh(query) is not None else None
    entries = pad_entries(spec or P(), 4)

    def axes_of_dimension(dimension: int, given: str | Axes | None) -> Axes:
        in_type = axes_of(entries[dimension])
        named = [axis for axis in axes_of(given) if axis not in in_type]
        axes = [x for x in (*in_type, *named) if x not in sequence and x in sizes]
        # Axes that do not divide the dimension cannot shard it. They are left out from the end:
        # the first ones are in the type, so they shard it already.
        while query.shape[dimension] % math.prod(sizes[axis] for axis in axes):
            axes.pop()
        return tuple(axes)

    batch_axes, head_axes = axes_of_dimension(0, batch), axes_of_dimension(2, heads)
    all_axes = mesh.axis_names if is_opaque else (*sequence, *batch_axes, *head_axes)
    # Over Manual axes, an outer `shard_map` has mapped this code already. The `spmd_axis_name` of
    # an outer `vmap` has to be mapped too, because JAX puts this axis in front of all specs.
    manual = axes_of_type(mesh_in_trace(mesh), AxisType.Manual)
    mapped = (frozenset(all_axes) - manual) | _compat.spmd_axes()
    return Layout(mesh, sequence, batch_axes, head_axes, mapped)


def _entry(axes: Axes) -> str | Axes | None:
    """Returns the entry of a spec: ``()`` → None, ``("x",)`` → ``"x"``; several as they are."""
    if not axes:
        return None
    return axes[0] if len(axes) == 1 else axes


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
    # (half, shard, positions of a chunk): chunk i, and counted from the end of the second half.
    chunks = np.arange(length, dtype=np.int32).reshape(2, shards, -1)
    return np.concatenate([chunks[0], chunks[1, ::-1]], axis=1).ravel()


def move_tokens(layout: Layout, arrays: tuple[Any, ...], *, back: bool = False) -> tuple[Any, ...]:
    """Moves the tokens of arrays to the balanced order, or back; returns the moved arrays.

    Of 2n chunks, device i has chunks 2i and 2i + 1, and in the balanced order chunks i and
    2n - 1 - i. For n = 3::

        device            0      1      2
        in order          0 1    2 3    4 5
        balanced          0 5    1 4    2 3

    In both orders, one of a device's two chunks is even. So two `ppermute` are enough: one for all
    even chunks (0, 2 and 4 go to devices 0, 2 and 1), and one for all odd chunks.

    Args:
      layout: the mesh axes, of which the sequence has n devices.
      arrays: arrays of (b, tokens, heads, features) or (b, tokens); None stays None.
      back: whether tokens move from the balanced order to their own order.
    """
    size = layout.count(layout.sequence)
    last = 2 * size - 1
    # The route of the even chunks, then the route of the odd chunks (see `Layout.permute`).
    routes = []
    for parity in (0, 1):
        route = []
        for in_order_device in range(size):
            chunk = 2 * in_order_device + parity
            # In the balanced order, chunk c is on device c, or on 2n - 1 - c if there is no such
            # device.
            balanced_device = min(chunk, last - chunk)
            if back:
                route.append((balanced_device, in_order_device))
            else:
                route.append((in_order_device, balanced_device))
        routes.append(route)

    def swap_on_odd_devices(first: jax.Array, second: jax.Array) -> list[jax.Array]:
        """Turns (first, second) chunks in the balanced order into (even, odd) ones, or back.

        Even devices have the even chunk first there, such as device 0; odd ones have it second.
        """
        is_odd = layout.device_index() % 2 == 1
        return [jnp.where(is_odd, second, first), jnp.where(is_odd, first, second)]

    def move(x: jax.Array) -> jax.Array:  # (b, tokens of a device, …)
        chunks = jnp.split(x, 2, axis=1)
        if back:
            chunks = swap_on_odd_devices(*chunks)
        # Here the chunks are (even, odd), as each device has them while tokens are in order.
        moved = [layout.permute(chunk, route) for chunk, route in zip(chunks, routes, strict=True)]
        if not back:
            moved = swap_on_odd_devices(*moved)
        return jnp.concatenate(moved, axis=1)

    def spec(x: jax.Array) -> P:
        batch, sequence, heads = layout.token_spec(layout.sequence)
        is_info = x.ndim == 2  # (b, tokens), such as segments
        return P(batch, sequence) if is_info else P(batch, sequence, heads)

    specs = tuple(jax.tree.map(spec, arrays))
    run = layout.map(
        lambda *arrays: tuple(jax.tree.map(move, arrays)), in_specs=specs, out_specs=specs
    )
    moved: tuple[Any, ...] = run(*arrays)
    return moved


def attend_balanced(
    layout: Layout,
    arrays: AttentionArrays,
    attend: Callable[[AttentionArrays], jax.Array],
    *,
    moves_keys: bool,
) -> jax.Array:
    """Moves tokens to the balanced order, attends, and moves the outputs back.

    Args:
      layout: where the sequence is.
      arrays: the arrays of causal attention, with tokens in their own order. Queries and keys are
        then of one sequence, and share positions, segments and places.
      attend: returns the outputs of the queries.
      moves_keys: whether keys and values move as well. Otherwise only the queries move.
    """
    query, key, value, info, visibility = arrays
    order = jnp.asarray(balanced_order(query.shape[1], layout.count(layout.sequence)))
    if moves_keys:
        query, key, value, segments = move_tokens(layout, (query, key, value, info.segments))
    else:
        query, segments = move_tokens(layout, (query, info.segments))
    # A token's place in the whole sequence is its position, because tokens were in order.
    moved_info = TokenInfo(order, segments, places=None if info.places is None else order)
    visibility = visibility._replace(query_info=moved_info)
    key_info = moved_info if moves_keys else info
    out = attend(AttentionArrays(query, key, value, key_info, visibility))
    moved_back: jax.Array
    [moved_back] = move_tokens(layout, (out,), back=True)
    return moved_back
