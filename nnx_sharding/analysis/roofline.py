"""The roofline of a program: its time at peak rates, what bounds it, and the links it uses.

Three times, each at the peak rate of the hardware: flops, bytes of memory, bytes sent. The last
follows from the links that collectives send over (`traffic.py`). As scheduled, a collective that is
in progress while the device computes hides behind that (`_exposed_seconds`). Each is taken alone:
several that share links, or the compute behind which they hide, may take longer. Yet the estimate
is no less than the time of all traffic, nor than that of all compute.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from .collectives import Collective, Collectives, axes_text
from .cost import Cost, Operation
from .hardware import Hardware, hardware_of
from .meshes import MeshDescription
from .tables import Pictured, Table, legend, text
from .traffic import Traffic, Transfer, interconnect_seconds, traffic_of, transfers_of
from .units import UNKNOWN, all_known, bound_text, bytes_text, count_text, printable, time_text


@dataclasses.dataclass(frozen=True, slots=True)
class Hidden:
    """A collective that is in progress while the device computes, as the program is scheduled.

    Attributes:
      kind: such as ``all-gather``.
      of: what it moves: parameters, or the operation.
      bytes_sent: what one device sends in one call.
      seconds: the time for that, alone at full bandwidth.
      compute_s: the time for the compute that it can hide behind, at peak rates.
      behind: the operations with most of that.
    """

    kind: str
    of: str
    bytes_sent: int
    seconds: float
    compute_s: float
    behind: tuple[str, ...]

    @property
    def share(self) -> float:
        """The share of the bytes that are sent before the compute is done."""
        # The overlap lasts while both the collective and the compute run.
        return min(1.0, self.compute_s / self.seconds) if self.seconds else 1.0


def _with_compute_beside(
    transfers: Iterable[Transfer], hardware: Hardware
) -> tuple[Hidden, ...] | None:
    """Returns a row for each collective, with the compute that it can hide behind, perhaps none.

    Returns None if the time for one collective is unknown.
    """
    # Collective → the seconds to send it, summed over all links.
    sending_seconds: defaultdict[Collective, float] = defaultdict(float)
    for transfer in transfers:
        if transfer.seconds is None:
            return None
        sending_seconds[transfer.collective] += transfer.seconds
    rows = []
    for collective, seconds in sending_seconds.items():
        # While one run of the collective is in progress, the device computes and accesses memory at
        # the same time, so the larger of both times counts.
        flops_s = collective.flops_beside / hardware.flops
        memory_s = collective.bytes_beside / hardware.memory_bandwidth
        times = collective.times  # how often the collective runs
        assert times is not None  # otherwise its seconds would be unknown
        row = Hidden(
            kind=collective.kind,
            of=collective.of,
            bytes_sent=collective.bytes_sent * times,
            seconds=seconds,
            compute_s=times * max(flops_s, memory_s),
            behind=collective.beside,
        )
        rows.append(row)
    return tuple(rows)


def _exposed_seconds(rows: Iterable[Hidden]) -> float:
    """Sums what each collective takes beyond the compute that it can hide behind."""
    return sum((max(row.seconds - row.compute_s, 0.0) for row in rows), 0.0)


Resource: TypeAlias = Literal["compute", "memory", "interconnect"]


@dataclasses.dataclass(frozen=True, slots=True)
class Roofline(Pictured):
    """The time of a call at the peak rates of the hardware: of each part alone, and of all.

    In the roofline model (Williams, Waterman and Patterson, 2009,
    https://doi.org/10.1145/1498765.1498785) all parts of the device work simultaneously, so the
    largest of the three times counts. Compilers partly overlap collectives with computation
    (``async-start`` and ``async-done`` in the program): with these figures, a call takes between
    ``seconds`` and ``seconds_without_overlap``; as this program is scheduled, ``estimate``. They
    are no bounds of what is measured: a program compiled for CPUs is not the one that a TPU runs,
    and conditionals take their largest branch. A time is None if a figure that it needs is unknown,
    of which ``why`` names the reason.
    With figures that were measured by :func:`~nnx_sharding.planning.calibrate`, ``spread`` is the
    error of ``estimate``.

    Attributes:
      hardware: the name of the hardware.
      compute_s: seconds for the flops, at the peak of dense bfloat16, or of 8-bit numbers.
      memory_s: seconds for the bytes that operations read and write.
      interconnect_s: seconds for the bytes that collectives send: one after another over the same
        links, in parallel over different ones.
      bound_by: the resource with the largest time; None unless all three are known.
      arithmetic_intensity: flops per byte of memory traffic.
      traffic: what collectives send over which links, and in what time.
      hidden: the collectives that are in progress while the device computes, as the compiler has
        scheduled them; each alone, though several may share links and the compute behind which
        they hide. None if they, or the time for one, are unknown.
      busy_s: seconds in which the device computes or accesses memory: of each operation the larger
        of both times, one after the other. None as ``exposed_s``, or if they are unknown.
      exposed_s: seconds in which the device only waits for collectives, as the compiler has
        scheduled them: what each takes beyond the compute that it can hide behind. None if the time
        for one is unknown, or the program is compiled for CPUs and the rates are those of other
        hardware.
      sources: the page that each figure of the hardware is from.
      spread: the largest error of such estimates where they were measured, in parts of the
        estimate; None for peak figures.
      why: why times are None, if some are.
      at_least: if figures of the program are unknown, the ``estimate`` for all else
        (``Cost.at_least``), without collectives in loops of unknown length. None if ``estimate`` is
        known, or a time is unknown for another reason.
    """

    hardware: str
    compute_s: float | None
    memory_s: float | None
    interconnect_s: float | None
    bound_by: Resource | None
    arithmetic_intensity: float | None
    traffic: tuple[Traffic, ...]
    hidden: tuple[Hidden, ...] | None
    busy_s: float | None
    exposed_s: float | None
    sources: Mapping[str, str]
    spread: float | None
    why: str | None = None
    at_least: float | None = None

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

    @property
    def estimate(self) -> float | None:
        """The time by which programs are ranked: ``busy_s`` and ``exposed_s``.

        Without a known schedule ``seconds``, as if all parts of the device worked simultaneously.
        """
        if self.exposed_s is None or self.seconds is None:
            return self.seconds
        # ``busy_s`` leaves out copies that run next to operations, and is None if only sums of
        # flops and bytes are known. The times for these sums are lower bounds of the time in which
        # the device is busy, so they count if they are larger.
        busy = max(self.busy_s or 0.0, self.compute_s or 0.0, self.memory_s or 0.0)
        return max(self.seconds, busy + self.exposed_s)

    @property
    def hidden_share(self) -> float | None:
        """The share of the bytes sent that can hide behind compute, as scheduled; each alone."""
        sent = all_known(row.bytes_sent for row in self.traffic)
        if self.hidden is None or not sent:
            return None
        return sum(row.share * row.bytes_sent for row in self.hidden) / sum(sent)

    @property
    def basis(self) -> str:
        """What the times are, in words: at peak rates, or an estimate with its error."""
        rates = f"at peak rates of {self.hardware}"
        if self.spread is not None:
            rates = f"estimate ± {100 * self.spread:.0f} % by the figures of {self.hardware}"
        if not self.traffic and self.busy_s is None:  # There is nothing that could overlap.
            return rates
        is_scheduled = self.exposed_s is not None
        return f"{rates}, as {'scheduled' if is_scheduled else 'if all of it overlapped'}"

    def _pictures(self, width: int) -> Iterable[Any]:
        """Yields what ``print`` shows: the times, a row for each link, and what can be hidden."""
        yield text(self)
        links: list[tuple[str, ...]] = []
        for row in self.traffic:
            speed = UNKNOWN if row.bandwidth is None else f"{count_text(row.bandwidth)}B/s"
            figures = speed, bytes_text(row.bytes_sent), time_text(row.seconds)
            links.append((row.links, axes_text(row.axes), *figures))
        if links:
            yield ""  # an empty line
            yield Table(("links", "axes", "bandwidth", "sent", "time"), links, numbers=3)
        rows: list[tuple[str, ...]] = []
        for hidden in self.hidden or ():
            # "jit(step)/model/up/dot_general" → "up/dot_general"
            short_names = ["/".join(name.split("/")[-2:]) for name in hidden.behind]
            behind = ", ".join(short_names)
            times = time_text(hidden.seconds), time_text(hidden.compute_s)
            rows.append((hidden.kind, hidden.of, behind, *times, f"{100 * hidden.share:.0f} %"))
        if rows:
            share = f"{100 * (self.hidden_share or 0):.0f} % of the bytes sent"
            yield ""  # an empty line
            yield text(f"{share} can hide behind compute, each collective alone:")
            header = ("hidden", "of", "behind", "sent in", "compute", "share")
            yield Table(header, rows, numbers=3)
            yield from legend(header, _PHRASES)

    def __str__(self) -> str:
        """Writes one line: ``1.1 s, at peak rates of TPU v5e: compute 1 s, memory 0.1 s, …``."""
        times = ", ".join(f"{name} {time_text(time)}" for name, time in self.times.items())
        estimate = bound_text(self.estimate, self.at_least, time_text)
        line = f"{estimate}, {self.basis}: {times}"
        line += f"; bound by {self.bound_by or UNKNOWN}"
        line += f"; {time_text(self.seconds)} if all of it overlaps"
        line += f", {time_text(self.seconds_without_overlap)} if nothing does"
        if self.hidden:
            line += f"; {100 * (self.hidden_share or 0):.0f} % of the bytes can hide"
        if self.why:
            line += f"; unknown: {self.why}"
        return printable(line)


# What the columns of the table of hidden collectives are, for `legend`.
_PHRASES = {
    "of": "what it moves",
    "behind": "the operations that are scheduled while it is in progress",
    "sent in": "the time to send it, alone",
    "compute": "the time of these operations",
    "share": "of its bytes, those that are sent in that time",
}


def cpu_caveat(roofline: Roofline | None, platform: str) -> str | None:
    """Says what is wrong with the times of a program for CPUs; None if nothing is.

    Nothing is wrong with measured rates, which have a ``spread``, because they are of the CPU
    itself.

    Args:
      roofline: the times; None if they are unknown.
      platform: what the program was compiled for, such as ``cpu``.
    """
    if roofline is None or roofline.spread is not None or platform != "cpu":
        return None
    return (
        "estimated from the program compiled for CPU: bytes of memory, and so what it is bound by, "
        f"come from the fusions of that compiler; the one for {roofline.hardware} makes others, "
        "which often access less memory"
    )


def roofline_of(
    cost: Cost | None,
    collectives: Collectives | None,
    hardware: Hardware | str,
    mesh: MeshDescription | None = None,
    platform: str | None = None,
) -> Roofline:
    """Computes the roofline of a program.

    Args:
      cost: what one device does in one call; None if it is unknown.
      collectives: what the devices exchange in one call; None if that is unknown.
      hardware: the peak figures of the devices, or a key of ``HARDWARE``.
      mesh: where the devices are. If that is unknown, as for virtual CPU devices, a TPU is assumed
        to send everything over all its links, which takes the least time of any placement, and GPUs
        to be in nodes of ``Hardware.domain`` in the order of the mesh.
      platform: the platform that the program was compiled for, such as ``cpu``; None if it is the
        one of the hardware.

    Example:
      >>> from nnx_sharding.analysis import Cost, collectives_of, roofline_of
      >>> hlo = "%a = f32[262144]{0} all-reduce(%x), replica_groups=[2,2]<=[4], to_apply=%add"
      >>> sent = collectives_of(hlo, {"data": 2, "model": 2})
      >>> roofline = roofline_of(Cost(1.97e14, 8.19e10, 0.0, "by hand"), sent, "TPU v5e")
      >>> roofline.compute_s, roofline.memory_s, roofline.bound_by
      (1.0, 0.1, 'compute')
    """
    peak = hardware_of(hardware)  # raises for an unknown name
    times: dict[Resource, float | None] = {"compute": None, "memory": None, "interconnect": None}
    if cost is not None:
        times["compute"] = _compute_seconds(cost, peak)
        if cost.bytes_accessed is not None:
            times["memory"] = cost.bytes_accessed / peak.memory_bandwidth
    traffic: tuple[Traffic, ...] = ()
    beside: tuple[Hidden, ...] | None = None
    if collectives is not None:
        transfers = [*transfers_of(collectives, mesh, peak)]
        traffic = traffic_of(transfers)
        times["interconnect"] = interconnect_seconds(traffic, peak)
        beside = _with_compute_beside(transfers, peak)
    # A program for CPUs has the schedule of a CPU. The schedule counts only for measured figures,
    # which have a spread, because these are of the CPU itself. Peak figures are of other hardware.
    has_schedule = platform != "cpu" or peak.spread is not None
    busy_s = exposed_s = None
    if collectives is not None and has_schedule:
        if cost is not None and cost.operations:
            busy_s = _busy_seconds(cost.operations, peak)
        if beside is not None:
            exposed_s = _exposed_seconds(beside)
    known_times = {name: seconds for name, seconds in times.items() if seconds is not None}
    are_known = len(known_times) == len(times)
    longest = max(known_times, key=known_times.__getitem__, default=None)
    return Roofline(
        hardware=peak.name,
        compute_s=times["compute"],
        memory_s=times["memory"],
        interconnect_s=times["interconnect"],
        bound_by=longest if are_known else None,
        arithmetic_intensity=None if cost is None else cost.arithmetic_intensity,
        traffic=traffic,
        hidden=None if beside is None else tuple(row for row in beside if row.compute_s),
        busy_s=busy_s,
        exposed_s=exposed_s,
        sources=peak.sources,
        spread=peak.spread,
        why=None if are_known else _why_unknown(cost, collectives, traffic),
        at_least=None if are_known else _estimate_of_known(cost, collectives, peak, mesh, platform),
    )


def _estimate_of_known(
    cost: Cost | None,
    collectives: Collectives | None,
    peak: Hardware,
    mesh: MeshDescription | None,
    platform: str | None,
) -> float | None:
    """Estimates the time of a call without what is unknown (``Roofline.at_least``).

    The arguments are those of `roofline_of`.
    """
    if cost is None or collectives is None:
        return None
    sent = Collectives(c for c in collectives if c.total_bytes_sent is not None)
    if cost.at_least is None and len(sent) == len(collectives):
        return None  # Nothing of the program is unknown, but a rate of the hardware.
    return roofline_of(cost.at_least or cost, sent, peak, mesh, platform).estimate


def _why_unknown(
    cost: Cost | None, collectives: Collectives | None, traffic: Sequence[Traffic]
) -> str:
    """Says why any of the three times is unknown, such as ``the bandwidth of DCN``.

    The times for compute and memory are unknown if the cost is unknown. The time for the links is
    unknown if a bandwidth or a number of runs is unknown.

    Args:
      cost: what one device does; None if it is unknown.
      collectives: what the devices exchange; None if that is unknown.
      traffic: what they send over which links, with the time, which is None if it is unknown.
    """
    if cost is None or collectives is None:
        return "the cost is unknown" if cost is None else "the collectives are unknown"
    if collectives.bytes_sent is None:
        # ``cost.why`` names the loops, if anything is computed in them.
        return cost.why or "a collective is in a loop of unknown length"
    links = ", ".join(row.links for row in traffic if row.seconds is None)
    bandwidth = f"the bandwidth of {links}" if links else ""
    return "; ".join(filter(None, [cost.why, bandwidth])) or "the cost is not known"


def _busy_seconds(operations: Iterable[Operation], peak: Hardware) -> float:
    """Sums the larger of both times of each operation, whose flops are always known."""
    seconds = 0.0
    for operation in operations:
        compute_s = _compute_seconds(operation, peak) or 0.0
        seconds += max(compute_s, operation.bytes_accessed / peak.memory_bandwidth)
    return seconds


def _compute_seconds(cost: Cost | Operation, peak: Hardware) -> float | None:
    """Returns the seconds for all flops; None if these are unknown.

    Products of 8-bit numbers have rates of their own, on hardware that is faster with them.
    """
    if cost.flops is None:
        return None
    int8, fp8 = cost.int8_flops or 0.0, cost.fp8_flops or 0.0  # included in ``flops``
    int8_seconds = int8 / (peak.int8_flops or peak.flops)
    fp8_seconds = fp8 / (peak.fp8_flops or peak.flops)
    return (cost.flops - int8 - fp8) / peak.flops + (int8_seconds + fp8_seconds)
