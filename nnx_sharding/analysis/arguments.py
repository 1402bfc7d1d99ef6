"""How the arguments of a compiled program are laid out, and on which mesh."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, Sharding

from .memory import array_bytes

SpecEntry: TypeAlias = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """One argument array of a program.

    Attributes:
      path: what the user would write, such as ``model.blocks[0].up.kernel``.
      shape: the shape of the whole array.
      dtype: its dtype, such as ``float32``.
      spec: for each dimension the axis or axes that cut it, or None; None as a whole where the
        sharding is no ``NamedSharding``.
      unreduced: the axes over which the devices hold summands of the array, each of full shape.
      reduced: the axes over which its gradient is unreduced.
      shard_shape: the shape of the part that one device holds.
      bytes_per_device: the bytes of that part.
      bytes_total: those of the whole array, counted once.
      memory_kind: such as ``device`` or ``pinned_host``; None if it is not known.
      donated: whether the caller gives it away.
      used: whether the program uses it; what it does not use is not among its arguments.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[SpecEntry, ...] | None
    shard_shape: tuple[int, ...]
    bytes_per_device: int
    bytes_total: int
    memory_kind: str | None
    donated: bool
    used: bool
    unreduced: tuple[str, ...] = dataclasses.field(default=(), metadata={"optional": True})
    reduced: tuple[str, ...] = dataclasses.field(default=(), metadata={"optional": True})

    @property
    def spec_text(self) -> str:
        """The spec as a user would write it; ``-`` without one."""
        if self.spec is None:
            return "-"
        summing = {"unreduced": self.unreduced, "reduced": self.reduced}
        words = [
            f"{kind}={{{', '.join(map(repr, axes))}}}" for kind, axes in summing.items() if axes
        ]
        return f"P({', '.join([*map(repr, self.spec), *words])})"


def parameter(path: str, info: Any, sharding: Sharding | None, *, used: bool) -> Parameter:
    """The row of one argument.

    Args:
      path: its name.
      info: its ``jax.stages.ArgInfo``.
      sharding: how it is laid out; None counts as whole on each device.
      used: whether the program uses it.
    """
    shape = tuple(info.shape)
    shard_shape = shape if sharding is None else tuple(sharding.shard_shape(shape))
    return Parameter(
        path=path,
        shape=shape,
        dtype=str(info.dtype),
        spec=_spec(sharding, len(shape)),
        shard_shape=shard_shape,
        bytes_per_device=array_bytes(shard_shape, info.dtype),
        bytes_total=array_bytes(shape, info.dtype),
        memory_kind=None if sharding is None else sharding.memory_kind,
        donated=bool(info.donated),
        used=used,
        **_summing(sharding),
    )


def _spec(sharding: Sharding | None, rank: int) -> tuple[SpecEntry, ...] | None:
    """The entries of a spec, one for each dimension."""
    if not isinstance(sharding, NamedSharding):
        return None
    entries = tuple(map(_entry, sharding.spec.partitions))
    return (*entries, *(None,) * (rank - len(entries)))


def _summing(sharding: Sharding | None) -> dict[str, tuple[str, ...]]:
    if not isinstance(sharding, NamedSharding):
        return {}
    spec = sharding.spec
    return {
        "unreduced": tuple(sorted(map(str, spec.unreduced))),
        "reduced": tuple(sorted(map(str, spec.reduced))),
    }


def _entry(entry: Any) -> SpecEntry:
    return tuple(map(str, entry)) if isinstance(entry, tuple) else entry and str(entry)


def mesh_of(shardings: Iterable[Any]) -> Mesh | None:
    """The mesh that most shardings have; None if none has a mesh with axes."""
    meshes = Counter(
        sharding.mesh
        for sharding in shardings
        if isinstance(sharding, NamedSharding)
        and isinstance(sharding.mesh, Mesh)
        and sharding.mesh.axis_names
    )
    return meshes.most_common(1)[0][0] if meshes else None


def device_of(mesh: Mesh | None, shardings: Iterable[Any]) -> tuple[jax.Device, int]:
    """One of the devices of a program, and how many there are."""
    if mesh is not None:
        return mesh.devices.flat[0], mesh.size
    sets = [one.device_set for one in shardings if isinstance(one, Sharding)]
    largest = max(sets, key=len, default={jax.devices()[0]})
    return min(largest, key=lambda device: device.id), len(largest)
