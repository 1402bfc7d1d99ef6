"""The bytes that each device holds of the arrays in a table of parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .parameters import ParameterRow


def device_bytes(rows: Iterable[ParameterRow]) -> dict[int, int]:
    """The bytes on each device, by its id or by its position in an abstract mesh."""
    sums: Counter[Sharding] = Counter()
    for row in rows:
        if row.sharding is not None:
            sums[row.sharding] += row.bytes_per_device
    held: Counter[int] = Counter()
    for sharding, size in sums.items():
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
            held.update(dict.fromkeys(range(sharding.num_devices), size))
        else:
            devices: set[Any] = sharding.device_set
            held.update({device.id: size for device in devices})
    return dict(sorted(held.items()))
