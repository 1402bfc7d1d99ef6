"""Modules on Explicit axes: their calls with Auto axes, and how the outputs are sharded outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from .. import _compat
from ..apply import called, rebuilt
from ..core.axis_types import Retyped, Retyping, retyped, type_spec
from ..core.flatten import flatten
from ..fitting import axes_of, axes_of_type, only_axes, spec_axes
from .variables import modules_in, own_variables


def with_auto_axes(
    module: Any,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    axes: frozenset[Any],
    spec_of: Callable[[jax.Array], PartitionSpec],
) -> Any:
    """Calls a method with Explicit axes Auto.

    Args:
      module: the module.
      call: its method.
      args: its arguments.
      kwargs: its keyword arguments.
      axes: the axes that become Auto.
      spec_of: how an array that it returns is sharded outside.
    """
    mesh = jax.sharding.get_abstract_mesh()
    retyping = Retyping.of(mesh, axes, AxisType.Auto, name="activation_shardings")
    if retyping is None:
        return call(*args, **kwargs)
    flat = flatten((module, args, kwargs))
    arrays = Retyped.of(retyping, flat.leaves, summed_axes(module, (args, kwargs)))
    try:
        after = called(flat, arrays, lambda tree: call(*tree[1], **tree[2]))
    except BaseException:
        rebuilt(flat._replace(leaves=arrays.inside), flat.leaves, foreign=True)
        raise
    left, untyped = arrays.leave(flat.structure, after)
    for slot, x in untyped.items():
        left[slot] = retyped(x, mesh, spec_of(x))
    return rebuilt(after, left, foreign=True)


def output_spec(
    x: jax.Array, first: jax.Array, kernels: list[jax.Array], declared: PartitionSpec | None
) -> PartitionSpec:
    """How an output is sharded that leaves a call with Auto axes.

    As declared; where nothing is, like the first input in the leading dimensions, and like the
    columns of a kernel in the last ones.

    Args:
      x: the output.
      first: the first input.
      kernels: the kernels of a layer.
      declared: the spec that was declared, or None.
    """
    is_same = x.shape == first.shape and not kernels
    entries = list[Any]()
    dimensions = zip(x.shape if is_same else x.shape[:-1], first.shape, strict=False)
    for (size, other), entry in zip(dimensions, _entries(first), strict=False):
        if size != other:
            break
        entries.append(entry)
    entries += [None] * (x.ndim - len(entries))
    used = {axis for entry in entries for axis in axes_of(entry)}
    columns = (k for k in kernels if k.ndim and x.ndim and k.shape[-1] == x.shape[-1])
    if (kernel := next(columns, None)) is not None:
        for i, entry in enumerate(reversed(_entries(kernel)), 1):
            is_column = i <= x.ndim and kernel.shape[-i] == x.shape[-i] and entries[-i] is None
            if not is_column or not used.isdisjoint(axes_of(entry)):
                break
            entries[-i] = entry
    if declared is None:
        return PartitionSpec(*entries)
    fixed = {*spec_axes(declared)}
    open_ = PartitionSpec.UNCONSTRAINED
    free = only_axes(PartitionSpec(*entries), {*spec_axes(PartitionSpec(*entries))} - fixed)
    padded = [*declared.partitions, *[None] * (x.ndim - len(declared))]
    pairs = zip(padded, free.partitions, strict=False)
    return PartitionSpec(*(other if entry is open_ else entry for entry, other in pairs))


def _entries(x: jax.Array) -> list[Any]:
    return [*jax.typeof(x).sharding.spec.partitions]


def kernels_of(module: Any) -> list[jax.Array]:
    """A module's own parameters of several dimensions."""
    values = (_compat.get_value(variable) for _, variable in own_variables(module))
    return [x for x in values if type_spec(x) is not None and x.ndim > 1]


def reduced_axes(module: Any) -> frozenset[Any]:
    """The axes over which parameters in a module's submodules have a reduced type."""
    _, *inner = modules_in(module)
    return frozenset(axis for _, one in inner for axis in _reduced(one))


def is_reduced(module: Any) -> bool:
    """Whether one of a module's own parameters has a reduced type."""
    return next(_reduced(module), None) is not None


def _reduced(module: Any) -> Iterator[Any]:
    for _, variable in own_variables(module):
        spec = type_spec(_compat.get_value(variable))
        yield from () if spec is None else spec.reduced


# Layers that compute each row independently.
_BY_ROWS = (
    nnx.Linear,
    nnx.LinearGeneral,
    nnx.Einsum,
    nnx.Conv,
    nnx.ConvTranspose,
    nnx.Embed,
    nnx.LayerNorm,
    nnx.RMSNorm,
    nnx.GroupNorm,
    nnx.LoRA,
)


def summed_axes(module: Any, inputs: Any) -> frozenset[Any]:
    """The axes over which the gradients of a layer are sums over rows: those of its first input.

    There, parameters may have a reduced type. Elsewhere JAX may count their gradients once for each
    device: where axes become Auto, and where an embedding looks up replicated indices.
    """
    spec = type_spec(first_typed(inputs))
    if spec is None or not spec.partitions or not isinstance(module, _BY_ROWS):
        return frozenset()
    owner = next((kind for kind in type(module).__mro__ if "__call__" in vars(kind)), None)
    return frozenset(axes_of(spec.partitions[0])) if owner in _BY_ROWS else frozenset()


def first_typed(inputs: Any) -> Any:
    """The first array with a sharding in its type, or None."""
    return next((x for x in arrays_in(inputs) if type_spec(x) is not None), None)


def arrays_in(tree: Any) -> list[jax.Array]:
    """The arrays in a pytree, without those in modules."""
    leaves = jax.tree.leaves(tree, is_leaf=_compat.is_graph_object)
    return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]


def explicit_axes_here() -> frozenset[Any]:
    """The Explicit axes of the mesh in context."""
    return frozenset(axes_of_type(jax.sharding.get_abstract_mesh(), AxisType.Explicit))
