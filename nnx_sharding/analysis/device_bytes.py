"""The bytes that each device holds of a table of parameters."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable

from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .parameters import ParameterRow


def device_bytes(rows: Iterable[ParameterRow]) -> dict[int, int]:
    """The bytes that each device holds by its id, or by its position in an abstract mesh."""
    sums: Counter[Sharding] = Counter()
    for row in rows:
        if row.sharding is not None:
            sums[row.sharding] += row.bytes_per_device
    held: Counter[int] = Counter()
    for sharding, size in sums.items():
        abstract = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)
        devices = map(operator.attrgetter("id"), () if abstract else sharding.device_set)
        ids = range(sharding.num_devices) if abstract else devices
        held.update(dict.fromkeys(ids, size))
    return {device: held[device] for device in sorted(held)}
