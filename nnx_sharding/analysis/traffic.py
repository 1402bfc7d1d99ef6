"""What collectives send over which links, and in what time.

Collectives send in a hierarchy: within a chip, which takes no time, within a slice, and between
slices (`_shares`). Collectives that share links send one after another; others send in parallel.
Latency counts once for each run of a collective. Links between slices are called ``DCN`` or
``network``; links within a slice are called after the route.

The times come from formulas of the literature (`_slowdown`), not from measurements. The formulas
ignore that messages collide, and that messages of a permutation may have to pass chips in between.

A *slice* is a torus of TPUs, or a node of GPUs; a chip of some TPUs is two devices. The *route* of
a group of devices is how they are connected (`routes.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .collectives import Collective, Collectives, MeshAxes
from .hardware import Hardware
from .meshes import MeshDescription
from .opcodes import CollectiveKind
from .routes import UNKNOWN, Route, route_of
from .units import all_known


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """What the collectives over some mesh axes send over one kind of link.

    Attributes:
      axes: the mesh axes; None for collectives whose axes are unknown.
      links: such as ``ICI x (ring of 16)``, ``ICI x (line of 2, 8 apart)`` or ``NVLink``; ``DCN``
        or, for GPUs, ``network`` between slices or nodes; ``all links`` if it is not known which
        ones are used. What two devices of one chip exchange is in no row.
      bandwidth: bytes per second that one device (at the end, if they form a line) can send over
        them; None if unknown or unlimited.
      bytes_sent: what one device sends over them in one call; None in a loop of unknown length.
      seconds: the time for that at full bandwidth; None if that is unknown.
    """

    axes: MeshAxes
    links: str
    bandwidth: float | None
    bytes_sent: int | None
    seconds: float | None


class Transfer(NamedTuple):
    """What one collective sends over one kind of link."""

    collective: Collective
    links: str  # the name of the links, written as in ``Traffic.links``
    bandwidth: float | None  # bytes per second; None if unknown or unlimited
    sent: float | None  # bytes in one call; None in a loop of unknown length
    seconds: float | None  # the time for all of these bytes; None if unknown


def transfers_of(
    collectives: Collectives, mesh: MeshDescription | None, hardware: Hardware
) -> Iterator[Transfer]:
    """Yields what each collective sends over each kind of link: in a slice, and between slices.

    Collectives over the same mesh axes use the same links. A collective that sends nothing, or is
    in a branch that is not taken, has no transfer.

    Args:
      collectives: the collectives of the program.
      mesh: the mesh, which says where the devices are; None if that is unknown.
      hardware: the hardware, which has the bandwidths of the links.
    """
    slices = () if mesh is None else {*mesh.coordinates.get("slice", ())}
    network, latency = _network_name(hardware), hardware.latency or 0.0
    for axes in collectives.by_axes():  # `by_axes` has each set of axes once.
        group = [c for c in collectives if c.axes == axes and c.bytes_sent]
        route = route_of(axes, mesh, hardware)
        # The route is that of whole axes. A collective may run over only a part of an axis, because
        # the compiler divides an all-reduce over an axis of two slices into one within slices and
        # one between them. The links of such a collective are not known, so the route of the whole
        # group counts as unknown.
        if any(c.group_size != route.devices and c.kind != "collective-permute" for c in group):
            route = UNKNOWN
        bandwidth: float | None = hardware.interconnect_bandwidth  # within a slice
        if route is UNKNOWN and len(slices) > 1:
            bandwidth = None  # The group may send over the network.
        elif route.torus:
            bandwidth = route.num_links * hardware.link_bandwidth
        for collective in group:
            shares = _shares(collective.kind, route)
            within_slice = _Links(
                route.links, bandwidth, latency, _slowdown(collective.kind, route)
            )
            between_slices = _Links(network, hardware.network_bandwidth, latency)
            transfers = (
                _transfer(collective, within_slice, shares.within_slice),
                _transfer(collective, between_slices, shares.between_slices),
            )
            yield from filter(None, transfers)


class _Links(NamedTuple):
    """Links of one kind, and how fast a collective is over them."""

    name: str
    bandwidth: float | None  # bytes per second; None if unknown, infinite if unlimited
    latency: float  # the seconds that each run of a collective takes in addition
    slowdown: float = 1.0  # the time relative to bytes that are spread evenly over the links


def _transfer(collective: Collective, links: _Links, share: float) -> Transfer | None:
    """Returns what a collective sends over links of one kind; None if it sends nothing.

    ``share`` is the part of the bytes of a device that goes over these links.
    """
    sent = seconds = None
    if collective.total_bytes_sent is not None and collective.times is not None:
        sent = share * collective.total_bytes_sent
        if links.bandwidth is not None:
            seconds = sent * links.slowdown / links.bandwidth + collective.times * links.latency
    # ``sent`` is 0 if the collective is in a branch that is not taken.
    if not share or sent == 0:
        return None
    shown_bandwidth = None if links.bandwidth == math.inf else links.bandwidth
    return Transfer(collective, links.name, shown_bandwidth, sent, seconds)


def traffic_of(transfers: Iterable[Transfer]) -> tuple[Traffic, ...]:
    """Sums transfers over the same links and mesh axes, with one row for each pair of these."""
    # The bandwidth is in the key only because rows need it: pairs of axes and links determine it.
    groups: defaultdict[tuple[MeshAxes, str, float | None], list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        groups[transfer.collective.axes, transfer.links, transfer.bandwidth].append(transfer)
    rows = []
    for (axes, links, bandwidth), group in groups.items():
        sent = all_known(transfer.sent for transfer in group)
        seconds = all_known(transfer.seconds for transfer in group)
        row = Traffic(
            axes=axes,
            links=links,
            bandwidth=bandwidth,
            bytes_sent=None if sent is None else round(sum(sent)),
            seconds=None if seconds is None else sum(seconds),
        )
        rows.append(row)
    return tuple(rows)


def interconnect_seconds(traffic: Iterable[Traffic], hardware: Hardware) -> float | None:
    """Returns the seconds for all traffic: in sequence over the same links, else in parallel.

    Links are the same if they have the same name. Returns None if the time of one row is unknown.
    """
    seconds_by_links: defaultdict[str, float] = defaultdict(float)
    sent_in_slice = 0  # the bytes sent over any links between chips of a slice
    for row in traffic:
        if row.seconds is None:
            return None
        seconds_by_links[row.links] += row.seconds
        if row.links != _network_name(hardware):
            sent_in_slice += row.bytes_sent or 0  # The bytes are known because the seconds are.
    # ``ICI x`` and ``ICI x + y`` have different names, but share the links of x. The time is
    # therefore at least the time for all bytes over all links of a chip.
    over_all_links = sent_in_slice / hardware.interconnect_bandwidth
    return max(over_all_links, *seconds_by_links.values(), 0.0)


def _network_name(hardware: Hardware) -> str:
    """Returns the vendor's name of the network between slices."""
    return "DCN" if hardware.torus_dimensions else "network"


class _Shares(NamedTuple):
    """The parts of what a device sends in a collective; the rest stays in its chip."""

    within_slice: float
    between_slices: float


def _shares(kind: CollectiveKind, route: Route) -> _Shares:
    """Divides what a device sends by the kinds of links over which it reaches other devices.

    A device exchanges data with ``devices - 1`` others. The share of a kind of links is the number
    of others that it reaches over these links, divided by ``devices - 1``. For a group of 8 devices
    on 4 chips in 2 slices::

                         within the slice      between slices    in the chip
        permutation      0                     7                 0
        all-to-all       4 - 2 = 2             8 - 4 = 4         2 - 1 = 1
        others           4 - 2 = 2             2 - 1 = 1         8 - 4 = 4

    In an all-to-all, no two devices need the same data. In other collectives, one device of each
    chip, and one chip of each slice, exchanges data with the others.
    """
    devices, chips, slices = route.devices, route.chips, route.slices  # numbers of the group
    others = devices - 1
    if kind == "collective-permute":  # All bytes count over the slowest kind of links.
        between = others if slices > 1 else 0
        within = others if slices == 1 and chips > 1 else 0
    elif kind == "all-to-all":
        slice_size, chip_size = devices // slices, devices // chips
        within, between = slice_size - chip_size, devices - slice_size
    else:
        within, between = chips - slices, slices - 1
    return _Shares(within / others, between / others)


def _slowdown(kind: CollectiveKind, route: Route) -> float:
    """Returns the time of a collective in a torus, relative to bytes spread evenly over its links.

    In a permutation, each message takes one link. An all-to-all is bound by the middle of the
    torus: let each device send one byte to each other device. In a line or ring of n chips, n // 2
    chips send to the n - n // 2 other chips, over ``links`` links. The torus has slice_size / n
    such lines, so the middle of each line carries n // 2 · (n - n // 2) · slice_size / n bytes.
    Other collectives spread their bytes evenly, and have the factor 1.
    """
    if kind == "collective-permute" and route.torus:
        return route.num_links
    slice_size, chip_size = route.devices // route.slices, route.devices // route.chips
    if kind == "all-to-all" and route.torus and slice_size > chip_size:
        # ``crossing`` is the number of bytes over one link in the middle, divided by slice_size. If
        # the bytes were spread evenly, a link would carry (slice_size - chip_size) / num_links.
        crossing = max(n // 2 * (n - n // 2) / n / links for n, links in route.torus)
        return crossing * route.num_links * slice_size / (slice_size - chip_size)
    return 1.0
