"""The roofline of a program: its time at peak rates, what bounds it, and the links it uses.

Three times, each at the peak rate of the hardware: flops, bytes of memory, bytes sent. The last
needs a model of the links between the devices of a group (`_route`):

    TPU   a torus; a group that varies in x is a ring of x, or a line where it does not wrap around,
          with two links, or one, of each chip. Groups that are interleaved share them.
    GPU   NVLink between the devices of a node, all links for any pair.
    both  a network between slices or nodes, and nothing between two devices of one chip.

A *slice* is a torus of TPUs, or a node of GPUs; a chip of some TPUs is two devices. Collectives
send in a hierarchy: within a chip, within a slice, between slices (`_parts`). What shares links is
sent one after another, other traffic in parallel. As scheduled, a collective that is in progress
while the device computes hides behind that (`_exposed`). This is no simulation: messages do not
collide, and latency counts once for each collective.

From other modules:

    Collective        one collective: kind, mesh axes, bytes that a device sends in one run, and
                      ``times``, the number of runs in one call. As scheduled, the device has done
                      ``flops_before`` when it starts, and does ``flops_beside`` until it ends; so
                      with bytes of memory
    Hardware          rates per second: ``flops``, ``memory_bandwidth``, ``link_bandwidth`` of one
                      link, ``interconnect_bandwidth`` of all links within a slice,
                      ``network_bandwidth`` between slices; ``latency`` in seconds.
                      ``torus_dimensions`` is 0 for GPUs, ``domain`` the GPUs of a node
    MeshDescription   the axes of a mesh, and where its devices are (``coordinates``: by dimension,
                      such as ``slice`` or ``x``, one number for each device)
    all_known         a list of values; None if one of them is
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from .collectives import Collective, Collectives, MeshAxes, axes_text
from .cost import Cost, Operation
from .hardware import Hardware, hardware_of
from .meshes import MeshDescription
from .tables import Pictured, table, text
from .units import UNKNOWN, all_known, bytes_text, count_text, printable, time_text


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """What the collectives over some mesh axes send over one kind of link.

    Attributes:
      axes: the mesh axes; None for collectives whose axes are unknown.
      links: such as ``ICI x (ring of 16)``, ``ICI x (line of 2, 8 apart)`` or ``NVLink``; ``DCN``
        or, for GPUs, ``network`` between slices or nodes; ``chip`` between two devices in one chip;
        ``all links`` if it is not known which ones are used.
      bandwidth: bytes per second that one device (at the end, if they form a line) can send over
        them; None if unknown or unlimited.
      bytes_sent: what one device sends over them in one call.
      seconds: the time for that at full bandwidth, 0 within a chip; None if that is unknown.
    """

    axes: MeshAxes
    links: str
    bandwidth: float | None
    bytes_sent: int
    seconds: float | None


class _Route(NamedTuple):
    """How the devices of a group are connected."""

    links: str  # as in ``Traffic.links``
    devices: int
    chips: int  # fewer than devices where a chip is two of them
    slices: int
    torus: tuple[tuple[int, float], ...] = ()  # by dimension: chips, and links of one at its end
    is_open: bool = False  # whether a dimension is a line

    @property
    def num_links(self) -> float:
        """The links of one chip in all dimensions of the torus."""
        return sum(links for _, links in self.torus)


_CHIP = "chip"  # the name of the links within one
# Of an unknown placement: all bytes go over all links, as between two devices.
_UNKNOWN = _Route(links="all links", devices=2, chips=2, slices=1)


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
        # It goes on as long as both.
        return min(1.0, self.compute_s / self.seconds) if self.seconds else 1.0


class _Transfer(NamedTuple):
    """What one collective sends over one kind of link."""

    collective: Collective
    links: str  # as in ``Traffic.links``
    bandwidth: float | None  # bytes per second; None if unknown or unlimited
    sent: float  # bytes in one call
    seconds: float | None  # for all of them; None if unknown


def _transfers(
    collectives: Collectives, mesh: MeshDescription | None, hardware: Hardware
) -> Iterator[_Transfer]:
    """Yields what each collective sends over each kind of link: in a slice, between them, in chips.

    Collectives over the same mesh axes use the same links.
    """
    slices = () if mesh is None else {*mesh.coordinates.get("slice", ())}
    for axes in collectives.by_axes():
        group = [c for c in collectives if c.axes == axes and c.bytes_sent]
        route = _route(axes, mesh, hardware)
        # One that runs over a part of these axes has other links: the compiler divides an
        # all-reduce over an axis of two slices into one within them and one between them.
        if any(c.group_size != route.devices and c.kind != "collective-permute" for c in group):
            route = _UNKNOWN
        within_bandwidth: float | None = hardware.interconnect_bandwidth
        if route is _UNKNOWN and len(slices) > 1:
            within_bandwidth = None  # it may send over the network
        elif route.torus:
            within_bandwidth = route.num_links * hardware.link_bandwidth
        parts = [_parts(collective, route, mesh, hardware) for collective in group]
        # By kind of link, so that a report has a row for each.
        for links, bandwidth, parts_over_links in (
            (route.links, within_bandwidth, [x.within_slice for x in parts]),
            (_network(hardware), hardware.network_bandwidth, [x.between_slices for x in parts]),
            (_CHIP, math.inf, [x.in_chip for x in parts]),
        ):
            latency = 0.0 if links == _CHIP else hardware.latency or 0.0
            for collective, part in zip(group, parts_over_links, strict=True):
                if part.sent:
                    yield _Transfer(
                        collective=collective,
                        links=links,
                        bandwidth=None if bandwidth == math.inf else bandwidth,
                        sent=part.sent,
                        seconds=_seconds(collective, part, bandwidth=bandwidth, latency=latency),
                    )


def _seconds(
    collective: Collective, part: _Part, *, bandwidth: float | None, latency: float
) -> float | None:
    """Returns the seconds that a part of a collective takes in all runs; None if unknown.

    ``bandwidth`` is that of its links in bytes per second, ``latency`` the seconds for each run.
    """
    if bandwidth is None or collective.times is None:
        return None  # in a loop of unknown length, the bytes are those of one run
    return part.sent_evenly / bandwidth + collective.times * latency


def _traffic(transfers: Iterable[_Transfer]) -> tuple[Traffic, ...]:
    """Sums transfers over the same links and mesh axes."""
    # The key: mesh axes, links, and the bandwidth, which is the same for both of them.
    groups: defaultdict[tuple[MeshAxes, str, float | None], list[_Transfer]] = defaultdict(list)
    for transfer in transfers:
        groups[transfer.collective.axes, transfer.links, transfer.bandwidth].append(transfer)
    rows = []
    for (axes, links, bandwidth), group in groups.items():
        seconds = all_known(transfer.seconds for transfer in group)
        row = Traffic(
            axes=axes,
            links=links,
            bandwidth=bandwidth,
            bytes_sent=round(sum(transfer.sent for transfer in group)),
            seconds=None if seconds is None else sum(seconds),
        )
        rows.append(row)
    return tuple(rows)


def _hidden(transfers: Sequence[_Transfer], hardware: Hardware) -> tuple[Hidden, ...] | None:
    """Returns the collectives that can hide behind compute; None if the time for one is unknown."""
    sending_seconds: defaultdict[Collective, float] = defaultdict(float)  # over all links
    for transfer in transfers:
        if transfer.seconds is None:
            return None
        sending_seconds[transfer.collective] += transfer.seconds
    rows = []
    for collective, seconds in sending_seconds.items():
        # What the device does in one run while the collective is in progress, at peak rates.
        beside = _device_seconds(collective.flops_beside, collective.bytes_beside, hardware)
        if beside:
            row = Hidden(
                kind=collective.kind,
                of=collective.of,
                bytes_sent=collective.total_bytes_sent,
                seconds=seconds,
                compute_s=(collective.times or 1) * beside,
                behind=collective.beside,
            )
            rows.append(row)
    return tuple(rows)


def _device_seconds(flops: int, bytes_accessed: int, hardware: Hardware) -> float:
    """Returns the time for flops and accesses to memory, which run concurrently, at peak rates."""
    return max(flops / hardware.flops, bytes_accessed / hardware.memory_bandwidth)


def _exposed(transfers: Iterable[_Transfer], hardware: Hardware) -> float | None:
    """Sums the seconds in which a device waits for collectives that end too late, as scheduled.

    None if the time for one is unknown. Each computation schedules its own collectives, so that
    their waiting adds up (`_waiting`).
    """
    # Name of the computation → its collectives, in the order of the program → their transfers.
    computations: defaultdict[str, defaultdict[Collective, list[_Transfer]]]
    computations = defaultdict(lambda: defaultdict(list))
    for transfer in transfers:
        if transfer.seconds is None:
            return None
        collective = transfer.collective
        computations[collective.scheduled_in][collective].append(transfer)
    return sum((_waiting(scheduled, hardware) for scheduled in computations.values()), 0.0)


class _Event(NamedTuple):
    """The start or the end of a collective; events sort in the order of the schedule."""

    flops: int  # done before it, in one run of the computation
    bytes: int  # accessed before it
    number: int  # of the collective: where these are equal, the order of HLO counts
    is_end: bool
    collective: Collective


def _waiting(scheduled: Mapping[Collective, Sequence[_Transfer]], hardware: Hardware) -> float:
    """Sums the seconds for which one computation waits, in all of its runs.

    One run is replayed from one start or end of a collective to the next: between them the device
    computes at peak rates. A start puts its transfers behind those on the same links; at an end the
    device waits until they have arrived.

    Args:
      scheduled: the transfers of each collective of the computation, in the order of the program.
        Their ``seconds``, which are known, are for all runs.
      hardware: the rates of the device.
    """
    events = []
    for number, c in enumerate(scheduled):
        end_flops, end_bytes = c.flops_before + c.flops_beside, c.bytes_before + c.bytes_beside
        events += [
            _Event(c.flops_before, c.bytes_before, number, is_end=False, collective=c),
            _Event(end_flops, end_bytes, number, is_end=True, collective=c),
        ]
    waited = now = 0.0  # seconds; ``now`` is since the start of the run
    last_flops = last_bytes = 0  # before the last event
    arrival: dict[Collective, float] = {}  # when all of its transfers have arrived
    free_from: defaultdict[str, float] = defaultdict(float)  # when these links are free again
    for event in sorted(events, key=lambda event: event[:4]):  # without what cannot be compared
        now += _device_seconds(event.flops - last_flops, event.bytes - last_bytes, hardware)
        last_flops, last_bytes = event.flops, event.bytes
        collective = event.collective
        times = collective.times or 1
        if event.is_end:
            waited += times * max(arrival[collective] - now, 0.0)
            now = max(arrival[collective], now)
            continue
        arrival[collective] = now
        for transfer in scheduled[collective]:  # one after the other
            begin = max(arrival[collective], free_from[transfer.links])
            end = begin + (transfer.seconds or 0.0) / times
            arrival[collective] = free_from[transfer.links] = end
    return waited


def interconnect_seconds(traffic: Iterable[Traffic], hardware: Hardware) -> float | None:
    """Returns the time for all traffic: in sequence over the same links, else in parallel.

    None if the time for a part is unknown.
    """
    seconds_by_links: defaultdict[str, float] = defaultdict(float)
    sent_in_slice = 0  # bytes, over any links between chips
    for row in traffic:
        if row.seconds is None:
            return None
        seconds_by_links[row.links] += row.seconds
        if row.links not in (_CHIP, _network(hardware)):
            sent_in_slice += row.bytes_sent
    # Links that count as different may share some: no chip sends faster than over all of them.
    over_all_links = sent_in_slice / hardware.interconnect_bandwidth
    return max(over_all_links, *seconds_by_links.values(), 0.0)


def _network(hardware: Hardware) -> str:
    return "DCN" if hardware.torus_dimensions else "network"  # as their vendors call them


class _Part(NamedTuple):
    """The bytes of a collective that go over one kind of link."""

    sent: float
    sent_evenly: float  # as many as take the same time if all links carry equally much


class _Parts(NamedTuple):
    """The bytes of a collective, by the kind of link that they go over."""

    within_slice: _Part
    between_slices: _Part
    in_chip: _Part  # between two devices of one chip


def _parts(
    collective: Collective, route: _Route, mesh: MeshDescription | None, hardware: Hardware
) -> _Parts:
    """Divides the bytes of a collective into those within the slice, between slices, and in a chip.

    The bytes are proportional to the number of devices that one reaches over each kind of link, of
    the ``devices - 1`` others. What several devices of a slice or chip need enters it once, which
    is a lower bound.
    """
    devices, chips, slices = route.devices, route.chips, route.slices
    uneven = 1.0  # how much longer the bytes within the slice take than spread evenly over links
    if collective.kind == "collective-permute":  # all of it over the slowest kind
        others = devices - 1
        between = others if slices > 1 else 0
        within = others if chips > 1 and not between else 0
        in_chip = others - between - within
        if route.torus and mesh is not None:
            uneven = route.num_links * _most_messages(collective.pairs, mesh, hardware)
    elif collective.kind == "all-to-all":  # no two devices need the same data
        slice_size, chip_size = devices // slices, devices // chips
        within, between, in_chip = slice_size - chip_size, devices - slice_size, chip_size - 1
        if route.torus and within:
            # In a line or ring of n chips, n // 2 of them send to the n - n // 2 others, over the
            # links in its middle. The dimension where that takes longest counts.
            crossing = max(n // 2 * (n - n // 2) / n / links for n, links in route.torus)
            uneven = crossing * route.num_links * slice_size / within
    else:  # one device of each chip, and one chip of each slice, exchanges data with the others
        within, between, in_chip = chips - slices, slices - 1, devices - chips
        if collective.kind == "all-reduce" and route.is_open and within:
            # On a line, its end sends all of its addends once, and receives the sums: n bytes,
            # where a ring sends 2·n·(chips - 1)/chips.
            uneven = chips / (chips - slices) / 2
    within_bytes, between_bytes, chip_bytes = (
        collective.total_bytes_sent * reached / (devices - 1)
        for reached in (within, between, in_chip)
    )
    return _Parts(
        within_slice=_Part(sent=within_bytes, sent_evenly=within_bytes * uneven),
        between_slices=_Part(sent=between_bytes, sent_evenly=between_bytes),
        in_chip=_Part(sent=chip_bytes, sent_evenly=chip_bytes),
    )


def _most_messages(
    pairs: Iterable[tuple[int, ...]], mesh: MeshDescription, hardware: Hardware
) -> float:
    """Counts the messages of a permutation over the busiest link, for each device of a chip.

    Messages take shortest paths, first in x, then in y, then in z; if both ways around a ring are
    shortest, half of the message takes each. ``pairs`` are (source, target), by positions in the
    mesh.
    """
    zeros = [0] * math.prod(mesh.axes.values())
    places = np.array([mesh.coordinates.get(name, zeros) for name in "xyz"])  # (3, devices)
    extents = [int(extent) + 1 for extent in np.ptp(places, axis=1)]  # chips along x, y and z
    # Messages over each link: its dimension, its direction (1 or -1), and the chip that it leaves.
    load: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for source, target in pairs:
        chip, end = places[:, source].tolist(), places[:, target].tolist()
        for i, size in enumerate(extents):
            ahead = end[i] - chip[i]
            hops_by_direction = {1: ahead, -1: -ahead}  # the negative one is no way
            if _is_closed(i, extents, hardware):
                hops_by_direction = {way: hops % size for way, hops in hops_by_direction.items()}
            hops = min(hops for hops in hops_by_direction.values() if hops >= 0)
            shortest = [way for way, count in hops_by_direction.items() if count == hops]
            for way, hop in itertools.product(shortest, range(hops)):
                passed = (*chip[:i], (chip[i] + way * hop) % size, *chip[i + 1 :])
                load[i, way, *passed] += 1 / len(shortest)
            chip[i] = end[i]
    cores_of_chip = len({*mesh.coordinates.get("core", [0])})
    return max(load.values(), default=0) / cores_of_chip


def _route(axes: MeshAxes, mesh: MeshDescription | None, hardware: Hardware) -> _Route:
    """Finds how the devices along mesh axes are connected: the worst connection if groups differ.

    Unknown without a mesh, or if it does not say where its devices are.
    """
    if mesh is None or not axes or not {*axes} <= {*mesh.axes}:
        return _UNKNOWN
    positions = np.arange(math.prod(mesh.axes.values())).reshape(*mesh.axes.values())
    over = [[*mesh.axes].index(axis) for axis in axes]
    size = math.prod(positions.shape[axis] for axis in over)
    groups = np.moveaxis(positions, over, range(-len(over), 0)).reshape(-1, size)  # (groups, size)
    if hardware.torus_dimensions:
        return _route_of_tpus(groups, mesh, hardware)
    return _route_of_gpus(groups, mesh, hardware)


def _route_of_tpus(groups: np.ndarray, mesh: MeshDescription, hardware: Hardware) -> _Route:
    """Finds the worst connection of groups of TPUs, given as positions in the mesh: (groups, size).

    Unknown for devices that do not say where they are, or in another torus than the hardware's.
    """
    zeros = [0] * groups.size
    names = ("slice", "x", "y", "z")
    places = np.array([mesh.coordinates.get(name, zeros) for name in names])  # (4, devices)
    extents = [int(extent) + 1 for extent in np.ptp(places[1:], axis=1)]  # chips along x, y and z
    fits = sum(extent > 1 for extent in extents) <= hardware.torus_dimensions
    if not mesh.coordinates.keys() - {"slice"} or not fits:
        return _UNKNOWN
    grouped = np.moveaxis(places[:, groups], 1, 0)  # (groups, 4, devices of a group)
    # Up to translation there are far fewer shapes than groups.
    shapes = np.unique(grouped - grouped.min(2, keepdims=True), axis=0)
    routes = {_torus_route(shape, extents, hardware) for shape in shapes}
    return min(routes, key=lambda route: (-route.slices, route.num_links))  # the slowest


def _route_of_gpus(groups: np.ndarray, mesh: MeshDescription, hardware: Hardware) -> _Route:
    """Finds the connection of groups of GPUs, given as positions in the mesh: (groups, size).

    If the mesh does not say in which nodes they are, nodes of ``Hardware.domain`` are assumed.
    """
    links = "NVLink" if hardware.domain else _UNKNOWN.links
    if mesh.coordinates.keys() == {"slice"}:
        nodes = np.array(mesh.coordinates["slice"])  # (devices,)
    else:  # not known, or a mesh of TPUs, which has x, y and z, too
        domain = hardware.domain or groups.size
        nodes = np.arange(groups.size) // domain
        if groups.size > domain:
            links += f" (nodes of {domain} assumed)"
    size = groups.shape[1]
    num_nodes = max(len({*nodes[group].tolist()}) for group in groups)
    return _Route(links, devices=size, chips=size, slices=num_nodes)


def _is_closed(dimension: int, extents: Sequence[int], hardware: Hardware) -> bool:
    """Tells whether links close a dimension to a ring.

    ``extents`` are the numbers of chips along x, y and z. A torus of two dimensions wraps around
    where it is as large as a pod, 16 chips. One of three consists of cubes of 4×4×4 chips, and
    wraps around if these are whole.
    """
    # https://jax-ml.github.io/scaling-book/tpus/, https://docs.cloud.google.com/tpu/docs/v5p
    if hardware.torus_dimensions == 2:
        return extents[dimension] == 16
    return all(extent % 4 == 0 for extent in extents)


def _torus_route(places: np.ndarray, extents: Sequence[int], hardware: Hardware) -> _Route:
    """Finds the links between the TPUs of a group.

    Args:
      places: (4, devices): the slice, x, y and z of each device; the cores of one chip have equal
        ones. Devices of a group are evenly spaced, since mesh axes are.
      extents: the number of chips along x, y and z in the whole mesh.
      hardware: the kind of TPU.
    """
    torus, words, is_open = [], [], False
    for i, (name, column) in enumerate(zip("xyz", places[1:], strict=True)):
        coordinates = np.unique(column)  # sorted
        size = len(coordinates)
        if size < 2:
            continue
        # With a gap of 2, every other chip is of another group, which shares the links.
        gap = int(np.diff(coordinates).min())
        is_ring = size * gap == extents[i] and _is_closed(i, extents, hardware)
        is_open |= not is_ring
        torus.append((size, (2 if is_ring else 1) / gap))
        shape = f"{'ring' if is_ring else 'line'} of {size}"
        words.append(f"{name} ({shape}, {gap} apart)" if gap > 1 else f"{name} ({shape})")
    return _Route(
        links=f"ICI {' + '.join(words)}",
        devices=places.shape[1],
        chips=len(np.unique(places, axis=1).T),
        slices=len(np.unique(places[0])),
        torus=tuple(torus),
        is_open=is_open,
    )


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
        scheduled them: those over the same links one after another. None if the time for one is
        unknown, or the program is compiled for CPUs and the rates are those of other hardware.
      sources: the page that each figure of the hardware is from.
      spread: the largest error of such estimates where they were measured, in parts of the
        estimate; None for peak figures.
      why: why times are None, if some are.
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
        busy = max(self.busy_s or 0.0, self.compute_s or 0.0, self.memory_s or 0.0)
        return max(self.seconds, busy + self.exposed_s)

    @property
    def hidden_share(self) -> float | None:
        """The share of the bytes sent that can hide behind compute, as scheduled; each alone."""
        sent = sum(row.bytes_sent for row in self.traffic)
        if self.hidden is None or not sent:
            return None
        return sum(row.share * row.bytes_sent for row in self.hidden) / sent

    @property
    def basis(self) -> str:
        """What the times are, in words: at peak rates, or an estimate with its error."""
        rates = f"at peak rates of {self.hardware}"
        if self.spread is not None:
            rates = f"estimate ± {100 * self.spread:.0f} % by the figures of {self.hardware}"
        if not self.traffic and self.busy_s is None:
            return rates
        is_scheduled = self.exposed_s is not None
        return f"{rates}, as {'scheduled' if is_scheduled else 'if all of it overlapped'}"

    def _pictures(self, width: int) -> Iterable[Any]:
        """Yields what ``print`` shows: the times, a row for each link, and what can be hidden."""
        yield text(self)
        rows: list[tuple[str, ...]] = []
        for row in self.traffic:
            speed = UNKNOWN if row.bandwidth is None else f"{count_text(row.bandwidth)}B/s"
            figures = speed, bytes_text(row.bytes_sent), time_text(row.seconds)
            rows.append((row.links, axes_text(row.axes), *figures))
        if rows:
            yield from ("", table(("links", "axes", "bandwidth", "sent", "time"), rows, numbers=3))
        rows = []
        for hidden in self.hidden or ():
            behind = ", ".join("/".join(name.split("/")[-2:]) for name in hidden.behind)
            times = time_text(hidden.seconds), time_text(hidden.compute_s)
            rows.append((hidden.kind, hidden.of, behind, *times, f"{100 * hidden.share:.0f} %"))
        if rows:
            share = f"{100 * (self.hidden_share or 0):.0f} % of the bytes sent"
            yield from ("", text(f"{share} can hide behind compute, each collective alone:"))
            yield table(("hidden", "of", "behind", "sent in", "compute", "share"), rows, numbers=3)

    def __str__(self) -> str:
        times = ", ".join(f"{name} {time_text(time)}" for name, time in self.times.items())
        bound = f"bound by {self.bound_by or UNKNOWN}"
        bounds = f"{time_text(self.seconds)} if all of it overlaps"
        bounds += f", {time_text(self.seconds_without_overlap)} if nothing does"
        if self.hidden:
            bounds += f"; {100 * (self.hidden_share or 0):.0f} % of the bytes can hide"
        unknown = f"; unknown: {self.why}" if self.why else ""
        line = f"{time_text(self.estimate)}, {self.basis}: {times}; {bound}; {bounds}{unknown}"
        return printable(line)


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
      platform: that the program was compiled for. The schedule of one for CPUs is not that of
        hardware whose peak figures are given.

    Example:
      >>> from nnx_sharding.analysis import Cost, collectives_of, roofline_of
      >>> hlo = "%a = f32[262144]{0} all-reduce(%x), replica_groups=[2,2]<=[4], to_apply=%add"
      >>> sent = collectives_of(hlo, {"data": 2, "model": 2})
      >>> roofline = roofline_of(Cost(1.97e14, 8.19e10, 0.0, "by hand"), sent, "TPU v5e")
      >>> roofline.compute_s, roofline.memory_s, roofline.bound_by
      (1.0, 0.1, 'compute')
    """
    peak = hardware_of(hardware)  # fails here if its name is unknown
    accessed = None if cost is None else cost.bytes_accessed
    transfers = [] if collectives is None else [*_transfers(collectives, mesh, peak)]
    has_schedule = collectives is not None and (platform != "cpu" or peak.spread is not None)
    traffic = _traffic(transfers)
    times: dict[Resource, float | None] = {
        "compute": None if cost is None else _compute_seconds(cost, peak),
        "memory": None if accessed is None else accessed / peak.memory_bandwidth,
        "interconnect": None if collectives is None else interconnect_seconds(traffic, peak),
    }
    operations = () if cost is None else cost.operations
    busy = [  # seconds of each operation
        max(
            _compute_seconds(operation, peak) or 0.0,
            operation.bytes_accessed / peak.memory_bandwidth,
        )
        for operation in operations
    ]
    known = all_known(times.values())
    return Roofline(
        hardware=peak.name,
        compute_s=times["compute"],
        memory_s=times["memory"],
        interconnect_s=times["interconnect"],
        # ``known`` has the times in the order of their names.
        bound_by=None if known is None else [*times][known.index(max(known))],
        arithmetic_intensity=None if cost is None else cost.arithmetic_intensity,
        traffic=traffic,
        hidden=None if collectives is None else _hidden(transfers, peak),
        busy_s=sum(busy) if has_schedule and busy else None,
        exposed_s=_exposed(transfers, peak) if has_schedule else None,
        sources=peak.sources,
        spread=peak.spread,
        why=None if known is not None else _why_unknown(cost, collectives, traffic),
    )


def _why_unknown(
    cost: Cost | None, collectives: Collectives | None, traffic: Sequence[Traffic]
) -> str:
    """Says why one of the three times is unknown, such as ``the bandwidth of DCN``."""
    if cost is None or collectives is None:
        return "the cost is unknown" if cost is None else "the collectives are unknown"
    if collectives.has_unknown_times:
        return cost.why or "a collective is in a loop of unknown length"
    links = ", ".join(row.links for row in traffic if row.seconds is None)
    bandwidth = f"the bandwidth of {links}" if links else ""
    return "; ".join(filter(None, [cost.why, bandwidth])) or "the cost is not known"


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
