"""What a planner chooses from: meshes, and strategies that shard the arguments of a step."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .. import _compat
from ..errors import raise_listed
from ..partition import fsdp, replicated, tensor_parallel, zero1
from ..specs.state_sharding import StateSharding

# Batches are sharded over the first two axes of a mesh, layers by tensor parallelism over the last.
REPLICA, DATA, MODEL = "replica", "data", "model"

# The strategies over the axes of the batch, and those for layers over the model axis.
_OVER_DATA = ("dp", "zero1", "fsdp", "hsdp")
_OVER_MODEL = ("", " + tensor", " + sequence")
STRATEGIES = tuple(data + model for model in _OVER_MODEL for data in _OVER_DATA)


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


def mesh_sizes(count: int, num_slices: int, *, uses_model: bool) -> Iterator[dict[str, int]]:
    """The sizes of the meshes of this many devices, with a model axis if that is used."""
    slices = {REPLICA: num_slices} if num_slices > 1 else {}
    within = count // num_slices
    most = within if uses_model else 1
    for model in range(1, most + 1):
        if within % model == 0:
            yield {**slices, DATA: within // model, **({MODEL: model} if model > 1 else {})}


def check_meshes(
    meshes: Sequence[Mapping[str, int]], devices: int | None, strategies: Mapping[str, Any]
) -> None:
    """Checks the meshes that the user wants to try.

    Raises:
      ValueError: a mesh has other axes than the strategies of this library use, or not this many
        devices.
    """
    axes = (REPLICA, DATA, MODEL)
    wrong = [
        f"  {dict(sizes)}: strategies of this library use the axes {', '.join(axes)}"
        for sizes in meshes
        if None in strategies.values() and not set(axes).issuperset(sizes)
    ]
    wrong += [
        f"  {dict(sizes)}: {math.prod(sizes.values())} devices, not {devices}"
        for sizes in meshes
        if devices is not None and math.prod(sizes.values()) != devices
    ]
    raise_listed(ValueError, "plan: these meshes cannot be used:", wrong)


def applies(strategy: str, sizes: Mapping[str, int]) -> bool:
    """Whether a mesh has the axes that a strategy needs, and no model axis that it does not use."""
    data, _, model = strategy.partition(" + ")
    needed = {"dp": (), "hsdp": (REPLICA, DATA)}.get(data, (DATA,))
    has_needed = all(sizes.get(axis, 1) > 1 for axis in needed)
    return has_needed and bool(model) == (MODEL in sizes)


def in_shardings_of(
    strategy: str, mesh: Mesh | AbstractMesh, args: Sequence[Any]
) -> tuple[Any, ...]:
    """The shardings of all arguments: modules by the strategy, batches by rows.

    An optimizer belongs to the model in front of it. The batch consists of the arrays outside of
    modules that have the most frequent first dimension.

    Raises:
      ValueError: the devices do not divide the batch, or no model is in front of an optimizer.
    """
    axes = tuple(axis for axis in (REPLICA, DATA) if axis in mesh.shape)
    rows, count = batch_rows(args), math.prod(mesh.shape[axis] for axis in axes)
    if rows % count:
        raise ValueError(f"{count} devices over {' and '.join(axes)} do not divide {rows} rows")
    batch = PartitionSpec(axes if len(axes) > 1 else axes[0])
    result: list[Any] = []
    model: Any = None
    for arg in args:
        optimizer = arg if isinstance(arg, nnx.Optimizer) else None
        if not _compat.is_graph_object(arg):
            result.append(jax.tree.map(lambda x: batch if _rows(x) == rows else None, arg))
            continue
        model = arg if optimizer is None else getattr(arg, "model", model)
        if model is None:
            raise ValueError("expected the model in front of its optimizer, got no model there")
        result.append(_sharding_of(strategy, model, optimizer, mesh, axes))
    return tuple(result)


def _sharding_of(
    strategy: str, model: Any, optimizer: Any, mesh: Any, axes: tuple[str, ...]
) -> StateSharding:
    data, _, style = strategy.partition(" + ")
    base = None
    if style:
        base = tensor_parallel(model, mesh=mesh, optimizer=optimizer, sequence=style == "sequence")
    if data in ("fsdp", "hsdp"):
        over = DATA if data == "hsdp" else axes
        return fsdp(model, mesh=mesh, axis=over, base=base, optimizer=optimizer)
    if data == "zero1" and optimizer is not None:
        return zero1(model, optimizer=optimizer, mesh=mesh, axis=axes, base=base)
    return base or replicated(model, optimizer=optimizer)


def batch_rows(args: Sequence[Any]) -> int:
    """The number of rows of the batch; 0 without one."""
    arrays = (x for arg in args if not _compat.is_graph_object(arg) for x in jax.tree.leaves(arg))
    counts = Counter(filter(None, map(_rows, arrays)))
    return counts.most_common(1)[0][0] if counts else 0


def _rows(x: Any) -> int:
    """The first dimension of an array; 0 for a scalar and what is not an array."""
    shape = getattr(x, "shape", ())
    return int(shape[0]) if shape else 0
