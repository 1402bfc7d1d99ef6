"""The roofline of a program: the least time that it can take on a device, and what bounds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, TypeAlias

from .collectives import Collectives
from .cost import Cost
from .hardware import Hardware, hardware_of
from .links import Traffic, all_known, interconnect_seconds, traffic_of
from .meshes import MeshDescription
from .units import UNKNOWN, printable, time_text

Resource: TypeAlias = Literal["compute", "memory", "interconnect"]


@dataclasses.dataclass(frozen=True, slots=True)
class Roofline:
    """Lower bounds of the time of a call, each as if the device did nothing else.

    The largest of the three is a lower bound, for a device whose parts all work simultaneously and
    at their peak: the roofline model (Williams, Waterman and Patterson, 2009,
    https://doi.org/10.1145/1498765.1498785). Compilers partly overlap collectives with computation
    (``async-start`` and ``async-done`` in the program), so a device at its peak takes between
    ``seconds`` and ``seconds_without_overlap``. A time is None if a figure that it needs is
    unknown.

    Attributes:
      hardware: the name of the hardware.
      compute_s: seconds for the flops, at the peak of dense bfloat16.
      memory_s: seconds for the bytes that operations read and write.
      interconnect_s: seconds for the bytes that collectives send: one after another over the same
        links, in parallel over different ones.
      bound_by: the resource with the largest time; None unless all three are known.
      arithmetic_intensity: flops per byte of memory traffic.
      traffic: what collectives send over which links, and in what time.
      sources: the page that each figure of the hardware is from.

    Example:
      >>> import jax.numpy as jnp
      >>> from nnx_sharding import jit
      >>> program = jit(lambda x: x + 1).lower(jnp.ones(1 << 20)).compile()
      >>> program.roofline("TPU v5e").bound_by
      'memory'
    """

    hardware: str
    compute_s: float | None
    memory_s: float | None
    interconnect_s: float | None
    bound_by: Resource | None
    arithmetic_intensity: float | None
    traffic: tuple[Traffic, ...]
    sources: Mapping[str, str]

    @property
    def times(self) -> dict[Resource, float | None]:
        """The three times in seconds."""
        compute, memory = self.compute_s, self.memory_s
        return {"compute": compute, "memory": memory, "interconnect": self.interconnect_s}

    @property
    def seconds(self) -> float | None:
        """The largest of the three times, as if all parts of the device worked simultaneously."""
        known = all_known(self.times.values())
        return None if known is None else max(known)

    @property
    def seconds_without_overlap(self) -> float | None:
        """Computation, memory and the traffic over each of the links, one after another."""
        links = [row.seconds for row in self.traffic]
        known = all_known([self.compute_s, self.memory_s, *links])
        return None if known is None or self.interconnect_s is None else sum(known)

    def __str__(self) -> str:
        times = ", ".join(f"{name} {time_text(time)}" for name, time in self.times.items())
        bound = f"bound by {self.bound_by or UNKNOWN}"
        most = f"{time_text(self.seconds_without_overlap)} without overlap"
        return printable(f"{self.hardware}: at least {times}; {bound}; {most}")


def roofline_of(
    cost: Cost | None,
    collectives: Collectives | None,
    hardware: Hardware | str,
    mesh: MeshDescription | None = None,
) -> Roofline:
    """The roofline of a program.

    Args:
      cost: what one device does in one call; None if it is unknown.
      collectives: what the devices exchange in one call; None if that is unknown.
      hardware: the peak figures of the devices, or a key of ``HARDWARE``.
      mesh: where the devices are. If that is unknown, as for virtual CPU devices, a TPU is assumed
        to send everything over all its links, which takes the least time of any placement, and GPUs
        to be in nodes of ``Hardware.domain`` in the order of the mesh.

    Example:
      >>> from nnx_sharding.analysis import Cost, collectives_of, roofline_of
      >>> hlo = "%a = f32[262144]{0} all-reduce(%x), replica_groups=[2,2]<=[4], to_apply=%add"
      >>> sent = collectives_of(hlo, {"data": 2, "model": 2})
      >>> roofline = roofline_of(Cost(1.97e14, 8.19e10, 0.0, "by hand"), sent, "TPU v5e")
      >>> roofline.compute_s, roofline.memory_s, roofline.bound_by
      (1.0, 0.1, 'compute')
    """
    peak = hardware_of(hardware)
    flops, accessed = (None, None) if cost is None else (cost.flops, cost.bytes_accessed)
    traffic = () if collectives is None else traffic_of(collectives, mesh, peak)
    times: dict[Resource, float | None] = {
        "compute": None if flops is None else flops / peak.flops,
        "memory": None if accessed is None else accessed / peak.memory_bandwidth,
        "interconnect": None if collectives is None else interconnect_seconds(traffic, peak),
    }
    known = all_known(times.values())
    return Roofline(
        peak.name,
        *times.values(),
        bound_by=None if known is None else [*times][known.index(max(known))],
        arithmetic_intensity=None if cost is None else cost.arithmetic_intensity,
        traffic=traffic,
        sources=peak.sources,
    )
