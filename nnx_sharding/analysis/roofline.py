"""The roofline of a program: the least time that it can take on a device, and what bounds it."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

from .cost import Cost
from .hardware import Device, device
from .units import UNKNOWN, printable, time_text

Resource: TypeAlias = Literal["compute", "memory", "interconnect"]


@dataclasses.dataclass(frozen=True, slots=True)
class Roofline:
    """Lower bounds of the time of a call, each as if the device did nothing else.

    The largest of the three is a lower bound, for a device whose parts work at once and at their
    peak all the time: the roofline model (Williams, Waterman and Patterson, 2009,
    https://doi.org/10.1145/1498765.1498785). A time is None if its figure is unknown.

    Attributes:
      device: the name of the device.
      compute_s: seconds for the flops, at the peak of dense bfloat16.
      memory_s: seconds for the bytes that operations read and write.
      interconnect_s: seconds for the bytes that collectives send, over all links at once.
      bound_by: the largest of them; None if none is known.
      arithmetic_intensity: flops for each byte of memory.
      source: the source of the figures of the device.
    """

    device: str
    compute_s: float | None
    memory_s: float | None
    interconnect_s: float | None
    bound_by: Resource | None
    arithmetic_intensity: float | None
    source: str

    @property
    def times(self) -> dict[Resource, float | None]:
        """The three times in seconds."""
        compute, memory = self.compute_s, self.memory_s
        return {"compute": compute, "memory": memory, "interconnect": self.interconnect_s}

    @property
    def seconds(self) -> float:
        """The largest of the three times."""
        return max(time or 0.0 for time in self.times.values())

    def __str__(self) -> str:
        times = ", ".join(f"{name} {time_text(time)}" for name, time in self.times.items())
        return printable(f"{self.device}: at least {times}; bound by {self.bound_by or UNKNOWN}")


def roofline_of(
    cost: Cost | None, bytes_sent: float | None, device_or_name: Device | str
) -> Roofline:
    """The roofline of a program.

    Args:
      cost: what one device does in one call; None if it is unknown.
      bytes_sent: the bytes that one device sends in one call; None if they are unknown.
      device_or_name: the peak figures of the device, or its name in the table.

    Raises:
      ValueError: there is no device of this name in the table.
      TypeError: it is neither a device nor a name.

    Example:
      >>> from nnx_sharding.analysis import Cost, roofline_of
      >>> roofline = roofline_of(Cost(1.97e14, 8.19e10, 0.0, "by hand"), 2e10, "TPU v5e")
      >>> roofline.compute_s, roofline.memory_s, roofline.interconnect_s, roofline.bound_by
      (1.0, 0.1, 0.1, 'compute')
    """
    if not isinstance(device_or_name, Device | str):
        raise TypeError(f"the device is a Device or the name of one, not {device_or_name!r}.")
    peak = device(device_or_name) if isinstance(device_or_name, str) else device_or_name
    flops, accessed = (None, None) if cost is None else (cost.flops, cost.bytes_accessed)
    compute = None if flops is None else flops / peak.flops
    memory = None if accessed is None else accessed / peak.memory_bandwidth
    interconnect = None if bytes_sent is None else bytes_sent / peak.interconnect_bandwidth
    times: dict[Resource, float | None]
    times = {"compute": compute, "memory": memory, "interconnect": interconnect}
    known = [(name, time) for name, time in times.items() if time is not None]
    return Roofline(
        device=peak.name,
        compute_s=compute,
        memory_s=memory,
        interconnect_s=interconnect,
        bound_by=max(known, key=lambda pair: pair[1])[0] if known else None,
        arithmetic_intensity=None if cost is None else cost.arithmetic_intensity,
        source=peak.source,
    )
