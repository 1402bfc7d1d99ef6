"""Where a sequence is: the mesh axes over which attention is mapped, and moves along them."""

from __future__ import annotations

import math
from collections.abc import Callable
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
from .blocks import AttentionArrays, Dropout, TokenInfo, Visibility

Axes = tuple[str, ...]


class Layout(NamedTuple):
    """Which mesh axes shard the arrays of an attention; it is hashable.

    Attributes:
      mesh: the mesh; None for one device.
      sequence: the axes that shard the sequence.
      batch: those that shard the batch, as far as functions for each device have to know them.
      heads: likewise those that shard heads.
      mapped: all axes over which functions for each device are mapped.
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
        """Returns the spec of (b, tokens, heads, features), sharded over these axes."""
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
        """Returns the specs of the arrays of an attention, in their places.

        Args:
          arrays: the arrays.
          query_axes: the axes that shard the queries, and what is known of these.
          key_axes: those that shard keys and values.
          info_axes: those that shard what is known of the keys; None for ``key_axes``.
        """
        info_axes = key_axes if info_axes is None else info_axes
        keys = self.token_spec(key_axes)
        specs: Any = AttentionArrays  # a `PartitionSpec` in the place of each array
        return specs(  # type: ignore[no-any-return]
            query=self.token_spec(query_axes),
            key=keys,
            value=keys,
            key_info=self._info_specs(arrays.key_info, info_axes),
            visibility=self._visibility_specs(arrays.visibility, query_axes),
        )

    def _info_specs(self, info: TokenInfo, sequence: Axes) -> TokenInfo:
        """Returns the specs of what is known of tokens that these axes shard."""

        def spec(x: jax.Array) -> P:  # of (tokens,) or (b, tokens)
            if x.ndim == 1:
                return P(_entry(sequence))
            return P(_entry(self.batch), _entry(sequence))

        return jax.tree.map(spec, info)  # type: ignore[no-any-return]

    def _visibility_specs(self, visibility: Visibility, sequence: Axes) -> Visibility:
        """Returns the specs of what decides on visibility, of queries that these axes shard."""
        mask, dropout = visibility.mask, visibility.dropout
        specs: Any = Visibility(self._info_specs(visibility.query_info, sequence))
        if mask is not None:  # (b or 1, heads or 1, queries or 1, all keys)
            axes = (self.batch, self.heads, sequence)
            sizes = mask.shape[:3]
            entries = [_entry(x) if n > 1 else None for x, n in zip(axes, sizes, strict=True)]
            specs = specs._replace(mask=P(*entries))
        if dropout is not None:
            rows = _entry(self.batch) if dropout.rows.size > 1 else None
            key_heads = _entry(self.heads) if dropout.heads.size > 1 else None
            all_specs: Any = Dropout
            specs = specs._replace(dropout=all_specs(P(), P(rows), P(key_heads)))
        return specs  # type: ignore[no-any-return]

    def map(self, fun: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Maps a function over the devices; specs have the mapped axes only."""
        if self.mesh is None:
            return fun
        mesh = mesh_in_trace(self.mesh)
        run = jax.shard_map(
            fun,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=self.mapped,
            check_vma=False,
        )

        def typed_run(*args: Any) -> Any:
            args = refuse_gradients_of_varying(args, name="attention over a sharded sequence")
            return run(*jax.tree.map(self.typed, args, in_specs))

        return typed_run

    def typed(self, x: jax.Array, spec: P) -> jax.Array:
        """Gives an array the type that a spec says over mapped axes, as far as they are Explicit.

        A function that is mapped over Explicit axes needs inputs of this type.
        """
        if self.mesh is None:
            return x
        mesh = mesh_in_trace(self.mesh)
        explicit = axes_of_type(mesh, AxisType.Explicit)
        if explicit.isdisjoint(self.mapped):
            return x
        mapped_entries = pad_entries(keep_axes(spec, explicit), x.ndim)
        # A dimension that no mapped axis shards keeps the other axes of its type.
        kept = keep_axes(type_spec(x) or P(), explicit - self.mapped)
        pairs = zip(mapped_entries, pad_entries(kept, x.ndim), strict=True)
        return retype(x, mesh, P(*(new or old for new, old in pairs)))  # type: ignore[no-any-return]

    def next_device(self, tree: Any) -> Any:
        """Returns the arrays of the device before, in the ring along the sequence."""
        if self.mesh is None:
            return tree
        size = self.count(self.sequence)
        return jax.lax.ppermute(tree, self.sequence, [(i, (i + 1) % size) for i in range(size)])

    def device_index(self) -> Any:
        """The index of the device along the sequence."""
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
      batch: the Auto axes that shard the batch, as a user says.
      heads: likewise of the heads.
      is_opaque: whether the compiler cannot split the function of each device, such as a kernel:
        then it is mapped over all axes.
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
        # An axis that does not divide the dimension cannot shard it.
        while query.shape[dimension] % math.prod(sizes[axis] for axis in axes):
            axes.pop()
        return tuple(axes)

    batch_axes, head_axes = axes_of_dimension(0, batch), axes_of_dimension(2, heads)
    all_axes = mesh.axis_names if is_opaque else (*sequence, *batch_axes, *head_axes)
    # An outer `shard_map` has mapped its axes already. JAX wants that of a `vmap` to be mapped too.
    manual = axes_of_type(mesh_in_trace(mesh), AxisType.Manual)
    mapped = _compat.spmd_axes() | (frozenset(all_axes) - manual)
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
    """Moves arrays, (b, tokens, …) or None, to the balanced order, or back.

    Device i has chunks 2i and 2i + 1 of 2n; in the balanced order it has i and 2n - 1 - i. Of both
    pairs one chunk is even. So two `ppermute` suffice: one of the even chunks, one of the odd ones.
    """
    size = layout.count(layout.sequence)
    last = 2 * size - 1
    # For the even chunks, then the odd ones: pairs of a device, and the device that it sends to.
    routes = []
    for parity in (0, 1):
        chunk_numbers = [2 * device + parity for device in range(size)]
        # Chunk c is on device c in the balanced order, or on 2n - 1 - c.
        route = [(i, min(chunk, last - chunk)) for i, chunk in enumerate(chunk_numbers)]
        routes.append([(target, source) for source, target in route] if back else route)

    def swap_on_odd_devices(first: jax.Array, second: jax.Array) -> list[jax.Array]:
        """In the balanced order, even devices have the even chunk first, odd ones second."""
        is_odd = layout.device_index() % 2 == 1
        return [jnp.where(is_odd, second, first), jnp.where(is_odd, first, second)]

    def move(x: jax.Array) -> jax.Array:  # (b, tokens of a device, …)
        chunks = jnp.split(x, 2, axis=1)
        if back:
            chunks = swap_on_odd_devices(*chunks)
        # The even chunk, and the odd one.
        moved = [
            jax.lax.ppermute(chunk, layout.sequence, route)
            for chunk, route in zip(chunks, routes, strict=True)
        ]
        if not back:
            moved = swap_on_odd_devices(*moved)
        return jnp.concatenate(moved, axis=1)

    def spec(x: jax.Array) -> P:
        whole = layout.token_spec(layout.sequence)
        return P(*whole[: min(x.ndim, 3)])

    specs = tuple(jax.tree.map(spec, arrays))
    run = layout.map(lambda *arrays: tuple(jax.tree.map(move, arrays)), specs, specs)
    moved: tuple[Any, ...] = run(*arrays)
    return moved
