"""Sharding one dimension more of an array that may be sharded already."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec

from ..fitting import axes_of, fit_sharding, spec_axes, with_entries
from .variables import NamedVariable


def shard_dimension(
    spec: Any, shape: Sequence[int] | None, dimension: int, axes: Sequence[Any], mesh: Any
) -> PartitionSpec | None:
    """A spec with a dimension sharded over further axes; None where that is not possible."""
    if shape is None or not isinstance(spec, PartitionSpec) or len(spec) > len(shape):
        return None
    if not -len(shape) <= dimension < len(shape) or not set(axes).isdisjoint(spec_axes(spec)):
        return None
    entries = [*spec.partitions, *[None] * (len(shape) - len(spec))]
    if entries[dimension] is PartitionSpec.UNCONSTRAINED:
        return None
    together = (*axes_of(entries[dimension]), *axes)
    entries[dimension] = together if len(together) > 1 else together[0]
    new = with_entries(spec, entries)
    alone = PartitionSpec(entries[dimension])
    return None if fit_sharding(alone, mesh, [shape[dimension]]).problems else new


def shard_largest(
    sharding: Any, variable: NamedVariable, axes: Sequence[Any], mesh: Any, min_size: int
) -> Any:
    """A sharding with the largest dimension sharded over axes not used yet, as in ``fsdp``."""
    shape = variable.shape
    if not isinstance(sharding, PartitionSpec) or isinstance(variable.variable, nnx.RngState):
        return sharding
    if shape is None or math.prod(shape) < min_size:
        return sharding
    is_sharded = [bool(axes_of(entry)) for entry in sharding.partitions] + [False] * len(shape)
    order = sorted(range(len(shape)), key=lambda d: (is_sharded[d], -shape[d], -d))
    free = [axis for axis in axes if axis not in spec_axes(sharding)]
    choices = (
        shard_dimension(sharding, shape, dimension, free[:count], mesh)
        for count in range(len(free), 0, -1)
        for dimension in order
    )
    return next((spec for spec in choices if spec is not None), sharding)
