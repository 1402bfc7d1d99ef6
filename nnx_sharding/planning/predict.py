"""What a candidate needs, predicted from shapes and specs alone: nothing is traced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..analysis.hardware import HARDWARE, Hardware
from ..report.sharding import ShardingRow, check_sharding
from ..specs.fitting import axes_of
from ..specs.state_sharding import StateSharding
from .candidates import Candidate


class Prediction(NamedTuple):
    """What a candidate needs on one device.

    Attributes:
      arguments: the bytes of the arguments, which is exact.
      sent: the bytes that a training step sends, roughly: each parameter that is sharded over batch
        axes is gathered twice and its gradient scattered, other gradients are summed, and so are
        the activations on both sides of each kernel that is sharded over the model axis.
      key: equal for candidates that shard all arguments equally.
    """

    arguments: int
    sent: float
    key: Any

    def seconds(self, hardware: Hardware | None) -> float:
        """A rough time to send, and to read and write the arguments; on a TPU v5e by default."""
        peak = hardware or HARDWARE["TPU v5e"]
        accessed = 2 * self.arguments / peak.memory_bandwidth
        return self.sent / peak.interconnect_bandwidth + accessed


def predict(candidate: Candidate, args: Sequence[Any], model: str = "model") -> Prediction:
    """Predicts what a candidate needs; a ValueError if specs do not fit.

    Args:
      candidate: the candidate.
      args: the arguments of the step.
      model: the name of the axis over which layers are sharded.
    """
    sizes = dict(candidate.sizes)
    abstract = AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))
    arguments, sent = 0, 0.0
    key: list[Any] = [tuple((axis, size) for axis, size in sizes.items() if size > 1)]
    tokens = _tokens(args) / math.prod(size for axis, size in sizes.items() if axis != model)
    for arg, sharding in zip(args, candidate.in_shardings, strict=True):
        if not isinstance(sharding, StateSharding):
            arguments += _tree_bytes(arg, sharding, abstract)
            continue
        rows = check_sharding(arg, sharding, abstract).rows
        if faults := [f"{row.path}: {row.why}" for row in rows if row.is_fault]:
            raise ValueError("these specs do not fit: " + "; ".join(faults))
        arguments += sum(row.bytes_per_device for row in rows)
        key.append(tuple(_split(row, sizes) for row in rows))
        key.append(sharding.activations)
        if not isinstance(arg, nnx.Optimizer):
            sent += sum(_sent(row, sizes, tokens, model) for row in rows)
    return Prediction(arguments, sent, tuple(key))


def _split(row: ShardingRow, sizes: dict[str, int]) -> tuple[tuple[str, ...], ...]:
    """The axes that shard each dimension, without those of size 1."""
    entries = row.spec.partitions if isinstance(row.spec, PartitionSpec) else ()
    return tuple(tuple(axis for axis in axes_of(x) if sizes[axis] > 1) for x in entries)


def _sent(row: ShardingRow, sizes: dict[str, int], tokens: float, model: str) -> float:
    if "float" not in row.dtype:  # it has no gradient
        return 0.0
    split = _split(row, sizes)
    over = {axis for axes in split for axis in axes}
    shards = math.prod(sizes[axis] for axis in over - {model})
    devices = math.prod(size for axis, size in sizes.items() if axis != model)
    held = row.bytes_total / (sizes[model] if model in over else 1)
    sent = 3 * held * (1 - 1 / shards) + 2 * held / shards * (1 - shards / devices)
    if model in over and len(row.shape) > 1:
        sharded = math.prod(d for d, axes in zip(row.shape, split, strict=False) if model in axes)
        features = math.prod(row.shape) / sharded
        itemsize = row.bytes_total / math.prod(row.shape)
        sent += tokens * features * itemsize * 2 * (1 - 1 / sizes[model])
    return sent


def _tokens(args: Sequence[Any]) -> int:
    """The number of feature vectors in the largest array of the batch."""
    arrays = [
        x for a in args if not _compat.is_graph_object(a) for x in jax.tree.leaves(a) if np.ndim(x)
    ]
    sizes = (
        math.prod(x.shape if np.issubdtype(x.dtype, np.integer) else x.shape[:-1]) for x in arrays
    )
    return max(sizes, default=0)


def _tree_bytes(tree: Any, shardings: Any, mesh: AbstractMesh) -> int:
    specs = jax.tree.leaves(shardings, is_leaf=lambda x: x is None)
    total = 0
    for x, spec in zip(jax.tree.leaves(tree), specs, strict=True):
        if hasattr(x, "shape"):
            shape = NamedSharding(mesh, spec or PartitionSpec()).shard_shape(tuple(x.shape))
            total += math.prod(shape) * x.dtype.itemsize
    return total
