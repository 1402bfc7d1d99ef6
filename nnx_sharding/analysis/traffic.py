"""What collectives send over which links, and in what time.

Collectives send in a hierarchy: within a chip, within a slice, between slices (`_shares`). What
shares links is sent one after another, other traffic in parallel. Latency counts once for each
collective. Links are called ``chip`` within a chip, ``DCN`` or ``network`` between slices, and
after the route within a slice.

A *slice* is a torus of TPUs, or a node of GPUs; a chip of some TPUs is two devices. The *route* of
a group of devices is how they are connected (`routes.py`).

From other modules:

    Collective   one collective: kind, mesh axes, bytes that a device sends in one run, and
                 ``times``, the number of runs in one call
    Hardware     rates per second: ``link_bandwidth`` of one link, ``interconnect_bandwidth`` of all
                 links within a slice, ``network_bandwidth`` between slices; ``latency`` in seconds
    Route        the number of ``devices``, ``chips`` and ``slices`` of a group; for TPUs the number
                 of chips and links in each dimension of the ``torus``, and whether one of these is
                 a line (``is_open``)
    all_known    a list of values; None if one of them is
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
from .routes import UNKNOWN, Route, most_messages, route_of
from .units import all_known


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


_CHIP = "chip"  # the name of the links within one


class Transfer(NamedTuple):
    """What one collective sends over one kind of link."""

    collective: Collective
    links: str  # as in ``Traffic.links``
    bandwidth: float | None  # bytes per second; None if unknown or unlimited
    sent: float  # bytes in one call
    seconds: float | None  # for all of them; None if unknown


def transfers_of(
    collectives: Collectives, mesh: MeshDescription | None, hardware: Hardware
) -> Iterator[Transfer]:
    """Yields what each collective sends over each kind of link: in a slice, between them, in chips.

    Collectives over the same mesh axes use the same links.

    Args:
      collectives: what the devices exchange.
      mesh: where the devices are; None if that is unknown.
      hardware: the bandwidths of the links.
    """
    slices = () if mesh is None else {*mesh.coordinates.get("slice", ())}
    for axes in collectives.by_axes():  # each set of axes once
        group = [c for c in collectives if c.axes == axes and c.bytes_sent]
        route = route_of(axes, mesh, hardware)
        # The route is that of whole axes. A collective may run over a part of them: the compiler
        # divides an all-reduce over an axis of two slices into one within slices and one between.
        # Its links are not known, and neither are those of the others in the group.
        if any(c.group_size != route.devices and c.kind != "collective-permute" for c in group):
            route = UNKNOWN
        within_bandwidth: float | None = hardware.interconnect_bandwidth
        if route is UNKNOWN and len(slices) > 1:
            within_bandwidth = None  # it may send over the network
        elif route.torus:
            within_bandwidth = route.num_links * hardware.link_bandwidth
        shares = [_shares(collective, route, mesh, hardware) for collective in group]
        # By kind of link, so that a report has a row for each. Within a chip, nothing is sent over
        # a link: the bandwidth is unlimited, so that the seconds are 0.
        for links, bandwidth, shares_of_links in (
            (route.links, within_bandwidth, [x.within_slice for x in shares]),
            (_network_name(hardware), hardware.network_bandwidth, [x.between for x in shares]),
            (_CHIP, math.inf, [x.in_chip for x in shares]),
        ):
            latency = 0.0 if links == _CHIP else hardware.latency or 0.0
            for collective, share in zip(group, shares_of_links, strict=True):
                if share.sent:
                    yield Transfer(
                        collective=collective,
                        links=links,
                        bandwidth=None if bandwidth == math.inf else bandwidth,
                        sent=share.sent,
                        seconds=_seconds(collective, share, bandwidth=bandwidth, latency=latency),
                    )


def _seconds(
    collective: Collective, share: _Share, *, bandwidth: float | None, latency: float
) -> float | None:
    """Returns the seconds that a collective takes over one kind of link in all runs.

    Args:
      collective: the collective.
      share: what it sends over these links in all runs.
      bandwidth: bytes per second of all these links together; None if unknown.
      latency: the seconds that each run takes in addition.

    Returns:
      The seconds; None if they are unknown.
    """
    if bandwidth is None or collective.times is None:
        return None  # in a loop of unknown length, the bytes are those of one run
    return share.sent * share.slowdown / bandwidth + collective.times * latency


def traffic_of(transfers: Iterable[Transfer]) -> tuple[Traffic, ...]:
    """Sums transfers over the same links and mesh axes."""
    # The key: mesh axes, links, and the bandwidth, which is the same for both of them.
    groups: defaultdict[tuple[MeshAxes, str, float | None], list[Transfer]] = defaultdict(list)
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


def interconnect_seconds(traffic: Iterable[Traffic], hardware: Hardware) -> float | None:
    """Returns the time for all traffic: in sequence over the same links, else in parallel.

    Links are the same if they have the same name. None if the time for a part is unknown.
    """
    seconds_by_links: defaultdict[str, float] = defaultdict(float)
    sent_in_slice = 0  # bytes, over any links between chips
    for row in traffic:
        if row.seconds is None:
            return None
        seconds_by_links[row.links] += row.seconds
        if row.links not in (_CHIP, _network_name(hardware)):
            sent_in_slice += row.bytes_sent
    # ``ICI x`` and ``ICI x + y`` have different names, but share the links of x. So the time is at
    # least that for all bytes over all links of a chip.
    over_all_links = sent_in_slice / hardware.interconnect_bandwidth
    return max(over_all_links, *seconds_by_links.values(), 0.0)


def _network_name(hardware: Hardware) -> str:
    return "DCN" if hardware.torus_dimensions else "network"  # as their vendors call them


class _Share(NamedTuple):
    """What a collective sends over one kind of link."""

    sent: float  # bytes, in all runs
    slowdown: float = 1.0  # the time, relative to that of bytes spread evenly over these links


class _Shares(NamedTuple):
    """What a collective sends, by the kind of link."""

    within_slice: _Share
    between: _Share  # slices
    in_chip: _Share  # between two devices of one chip


def _shares(
    collective: Collective, route: Route, mesh: MeshDescription | None, hardware: Hardware
) -> _Shares:
    """Divides the bytes of a collective into those within the slice, between slices, and in a chip.

    A device sends to ``devices - 1`` others, and the bytes are proportional to how many of these it
    reaches over each kind of link. For a group of 8 devices on 4 chips in 2 slices::

                         within the slice      between slices    in the chip
        permutation      0                     7                 0
        all-to-all       4 - 2 = 2             8 - 4 = 4         2 - 1 = 1
        others           4 - 2 = 2             2 - 1 = 1         8 - 4 = 4

    In an all-to-all, no two devices need the same data. In other collectives, one device of each
    chip, and one chip of each slice, exchanges data with the others, which is a lower bound.
    """
    devices, chips, slices = route.devices, route.chips, route.slices  # of the group
    slowdown = 1.0  # within the slice
    if collective.kind == "collective-permute":  # all of it over the slowest kind
        others = devices - 1
        between = others if slices > 1 else 0
        within = others if chips > 1 and not between else 0
        in_chip = others - between - within
        if route.torus and mesh is not None:
            # Each link carries 1 / num_links of a message if they are used evenly; the busiest one
            # carries several whole ones.
            slowdown = route.num_links * most_messages(collective.pairs, mesh, hardware)
    elif collective.kind == "all-to-all":
        slice_size, chip_size = devices // slices, devices // chips
        within, between, in_chip = slice_size - chip_size, devices - slice_size, chip_size - 1
        if route.torus and within:
            # Let each device send one byte to each other one. In a line or ring of n chips, n // 2
            # of them send to the n - n // 2 others, over ``links`` links in its middle. The slice
            # has slice_size / n of these lines, so each one's middle carries n // 2 · (n - n // 2)
            # · slice_size / n bytes. Evenly spread, the ``within`` bytes of a device go over
            # num_links links. The dimension where it takes longest counts.
            crossing = max(n // 2 * (n - n // 2) / n / links for n, links in route.torus)
            slowdown = crossing * route.num_links * slice_size / within
    else:
        within, between, in_chip = chips - slices, slices - 1, devices - chips
        if collective.kind == "all-reduce" and route.is_open and within:
            # On a line, its end sends all n bytes of its addends once, and receives the sums. The
            # bytes that count are those of a ring, 2·n·(chips - 1)/chips within one slice.
            slowdown = chips / (chips - slices) / 2
    within_bytes, between_bytes, chip_bytes = (
        collective.total_bytes_sent * reached / (devices - 1)
        for reached in (within, between, in_chip)
    )
    return _Shares(
        within_slice=_Share(within_bytes, slowdown),
        between=_Share(between_bytes),
        in_chip=_Share(chip_bytes),
    )
