"""What a planner chooses from, and predicts: meshes, and strategies that shard arguments."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..activations.variables import modules_in
from ..analysis.hardware import HARDWARE, Hardware
from ..errors import raise_listed
from ..partition import fsdp, pipeline, replicated, tensor_parallel, zero1
from ..report.sharding import ShardingRow, check_sharding
from ..specs.fitting import axes_of, spec_and_mesh
from ..specs.state_sharding import StateSharding
from ..transforms.stacking import Stack

# The strategies over the axes of the batch, and those for layers over the model axis.
_OVER_DATA = ("dp", "zero1", "fsdp", "hsdp")
_OVER_MODEL = ("", " + tensor", " + sequence", " + pipeline")
STRATEGIES = tuple(data + model for model in _OVER_MODEL for data in _OVER_DATA)


class Axes(NamedTuple):
    """Names of mesh axes: the batch is sharded over the first two, layers over the last."""

    replica: str
    data: str
    model: str


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run a step.

    Attributes:
      strategy: the name of the strategy.
      sizes: the sizes of the axes of the mesh by name, major first.
      variant: the name of the variant of the step; empty if there is only one.
      in_shardings: the sharding of each argument, for :func:`~nnx_sharding.jit`. It has no mesh, so
        it can be used for every mesh with these axes.
      mesh: the mesh for which the step is compiled, perhaps of devices that this machine does not
        have. To run it, make one of the same ``sizes``.
    """

    strategy: str
    sizes: Mapping[str, int]
    variant: str
    in_shardings: tuple[Any, ...]
    mesh: Mesh = dataclasses.field(repr=False)

    @property
    def name(self) -> str:
        """Strategy, mesh and variant, as in ``fsdp + tensor, data 4 × model 2, remat``."""
        sizes = " × ".join(f"{axis} {size}" for axis, size in self.sizes.items())
        return ", ".join(part for part in (self.strategy, sizes, self.variant) if part)


def mesh_sizes(
    count: int, num_slices: int, axes: Axes, *, uses_model: bool
) -> Iterator[dict[str, int]]:
    """The sizes of the meshes of this many devices, with a model axis if that is used."""
    if count % num_slices:
        raise ValueError(f"plan: num_slices={num_slices} does not divide the {count} devices.")
    slices = {axes.replica: num_slices} if num_slices > 1 else {}
    within = count // num_slices
    for model in range(1, within + 1 if uses_model else 2):
        if within % model == 0:
            of_model = {axes.model: model} if model > 1 else {}
            yield {**slices, axes.data: within // model, **of_model}


def has_stack(args: Sequence[Any]) -> bool:
    """Whether there are layers for a pipeline."""
    modules = (x for arg in args if isinstance(arg, nnx.Module) for _, x in modules_in(arg))
    return any(isinstance(x, Stack) for x in modules)


def check_meshes(
    meshes: Sequence[Mapping[str, int]],
    devices: int | None,
    strategies: Mapping[str, Any],
    axes: Axes,
) -> None:
    """Raises a ValueError for meshes with other axes than strategies use, or too many devices."""
    wrong = [
        f"  {dict(sizes)}: strategies of this library use the axes {', '.join(axes)}; name those "
        "of your mesh with axes=(data, model)"
        for sizes in meshes
        if None in strategies.values() and not {*axes}.issuperset(sizes)
    ]
    wrong += [
        f"  {dict(sizes)}: {math.prod(sizes.values())} devices, not {devices}"
        for sizes in meshes
        if devices is not None and math.prod(sizes.values()) != devices
    ]
    wrong += [] if meshes else ["  meshes=[] has none"]
    raise_listed(ValueError, "plan: these meshes cannot be used:", wrong)


def applies(strategy: str, sizes: Mapping[str, int], axes: Axes) -> bool:
    """Whether a mesh has the axes that a strategy needs, and no model axis that it does not use."""
    data, _, model = strategy.partition(" + ")
    needed = {"dp": (), "hsdp": (axes.replica, axes.data)}.get(data, (axes.data,))
    has_needed = all(sizes.get(axis, 1) > 1 for axis in needed)
    return has_needed and bool(model) == (axes.model in sizes)


def in_shardings_of(
    strategy: str, mesh: Mesh | AbstractMesh, args: Sequence[Any], axes: Axes
) -> tuple[Any, ...]:
    """The shardings of all arguments: modules by the strategy, batches by rows.

    An optimizer belongs to the model in front of it. The batch consists of the arrays outside of
    modules that have the most frequent first dimension.
    """
    over = tuple(axis for axis in axes[:2] if axis in mesh.shape)
    rows, count = _batch_rows(args), math.prod(mesh.shape[axis] for axis in over)
    if rows % count:
        raise ValueError(f"{count} devices over {' and '.join(over)} do not divide {rows} rows")
    batch = PartitionSpec(over if len(over) > 1 else over[0])
    result: list[Any] = []
    model: Any = None
    for arg in args:
        optimizer = arg if isinstance(arg, nnx.Optimizer) else None
        if not _compat.is_graph_object(arg):
            result.append(jax.tree.map(lambda x: batch if rows and _rows(x) == rows else None, arg))
            continue
        model = arg if optimizer is None else getattr(arg, "model", model)
        if model is None:
            raise ValueError("expected the model in front of its optimizer, got no model there")
        stages = mesh.shape.get(axes.model, 1)
        microbatches = math.gcd(4 * stages, rows // count)
        result.append(_sharding_of(strategy, model, optimizer, mesh, over, axes, microbatches))
    return tuple(result)


def _sharding_of(
    strategy: str,
    model: Any,
    optimizer: Any,
    mesh: Any,
    over: tuple[str, ...],
    axes: Axes,
    microbatches: int,
) -> StateSharding:
    data, _, style = strategy.partition(" + ")
    options: dict[str, Any] = {"mesh": mesh, "optimizer": optimizer}
    base = None
    if style == "pipeline":
        base = pipeline(model, axis=axes.model, microbatches=microbatches, **options)
    elif style:
        base = tensor_parallel(model, axis=axes.model, sequence=style == "sequence", **options)
    if data in ("fsdp", "hsdp"):
        axis = axes.data if data == "hsdp" else over
        return fsdp(model, axis=axis, base=base, across_slices=data == "fsdp", **options)
    if data == "zero1" and optimizer is not None:
        return zero1(model, axis=over, base=base, **options)
    return base or replicated(model, **options)


def _batch_rows(args: Sequence[Any]) -> int:
    """The most frequent first dimension, the largest of several; 0 without arrays."""
    arrays = (x for arg in args if not _compat.is_graph_object(arg) for x in jax.tree.leaves(arg))
    counts = Counter(filter(None, map(_rows, arrays)))
    return max(counts, key=lambda rows: (counts[rows], rows), default=0)


def _rows(x: Any) -> int:
    """The first dimension of an array; 0 for a scalar and what is not an array."""
    shape = getattr(x, "shape", ())
    return int(shape[0]) if shape else 0


class Prediction(NamedTuple):
    """What a candidate needs on one device.

    Attributes:
      arguments: the bytes of the arguments on the device, without the padding of tiles.
      sent: the bytes that a training step sends, roughly: each parameter that is sharded over batch
        axes is gathered twice and its gradient scattered, other gradients are summed, and so are
        the activations on both sides of each kernel that is sharded over the model axis. In a
        pipeline, these are those between stages, with as many features as the smallest parameter of
        its layers has.
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
    """Predicts what a candidate needs; layers are sharded over the axis ``model``.

    A ValueError if specs do not fit.
    """
    sizes = dict(candidate.sizes)
    abstract = AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))
    arguments, sent = 0, 0.0
    key: list[Any] = [tuple((axis, size) for axis, size in sizes.items() if size > 1)]
    devices = math.prod(sizes.values())
    for arg, sharding in zip(args, candidate.in_shardings, strict=True):
        if not isinstance(sharding, StateSharding):
            arguments += _tree_bytes(arg, sharding, abstract)
            continue
        rows = check_sharding(arg, sharding, abstract).rows
        if faults := [f"{row.path}: {row.why}" for row in rows if row.is_fault]:
            raise ValueError("these specs do not fit: " + "; ".join(faults))
        on_device = (row for row in rows if "host" not in (row.memory_kind or ""))
        arguments += sum(row.bytes_per_device for row in on_device)
        key.append(tuple(_split(row, sizes) for row in rows))
        key.append(sharding.activations)
        if isinstance(arg, nnx.Optimizer):
            continue
        declared = sharding.activations.shardings if sharding.activations else ()
        schedule = next((x.schedule for x in declared if x.schedule), None)
        split_by = model if schedule is None else schedule.axis
        tokens = _tokens(args) * sizes.get(split_by, 1) / devices
        if schedule is not None:
            held = (row for row in rows if (schedule.axis,) in _split(row, sizes)[:1])
            least = min((row.bytes_total / row.shape[0] for row in held if row.shape), default=0)
            # In each tick forward and backward; and what leaves the stages, and its gradient.
            sent += 2 * tokens * least * (schedule.ticks / schedule.microbatches + 1)
            tokens = 0
        sent += sum(_sent(row, sizes, tokens, split_by) for row in rows)
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
        math.prod(x.shape[:-1] if jnp.issubdtype(x.dtype, jnp.inexact) else x.shape) for x in arrays
    )
    return max(sizes, default=0)


def _tree_bytes(tree: Any, shardings: Any, mesh: AbstractMesh) -> int:
    def held(sharding: Any, arrays: Any) -> int:
        spec, on = spec_and_mesh(sharding, mesh) or (PartitionSpec(), mesh)
        shards = NamedSharding(on, spec)
        some = [x for x in jax.tree.leaves(arrays) if hasattr(x, "shape")]
        return sum(math.prod(shards.shard_shape(x.shape)) * x.dtype.itemsize for x in some)

    return sum(jax.tree.leaves(jax.tree.map(held, shardings, tree, is_leaf=lambda x: x is None)))
